"""What an exception on one rank leaves: other ranks hear of it, and no thread uses its arrays any more."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
from tests import sampling
from tests.interrupts import Interrupt, of_package

FILES = of_package("distributed/", "shards/", "gpu/replay.py")
# The lines around a call: a rank that is interrupted there does not come to it, or has done its part.
AROUND = ("carry_out", "forward", "backward", "decode", "_forward", "reporting_failures", "__init__")
SPLIT = cd.zigzag(24, 3)
ARRAYS = np.random.default_rng(0).standard_normal((4, 2, 24, 8))
LSE = cuflash.FlashAttention(causal=True).forward(*ARRAYS[:3])
METHODS = ("forward", "backward", "decode")


def call(attn: Any, method, own):
    if method == "decode":
        return attn.decode(ARRAYS[0], own[1], own[2])
    return attn.forward(*own[:3]) if method == "forward" else attn.backward(own[3], *own[:3], *own[4:])


def expected(method):
    """What one device computes, and the axes of rows of the results."""
    attn: Any = cuflash.FlashAttention(causal=True)
    if method == "backward":
        return attn.backward(ARRAYS[3], *ARRAYS[:3], *LSE), (-2, -2, -2)
    return LSE, (-2, -1)


def check(method, rank, results):
    for whole, axis, x in zip(*expected(method), results, strict=True):
        np.testing.assert_allclose(x, whole if method == "decode" else SPLIT.part(whole, rank, axis), rtol=1e-9)


def run(method, interrupt, timeout=3):
    """Two calls of three ranks, the second of which rank 1 is interrupted in; what each rank gives in the second."""
    found: list[Any] = [None] * 3
    comms = cd.threads(3)

    def work(rank):
        own = [SPLIT.part(x, rank).copy() for x in (*ARRAYS, LSE.out)]
        own.append(SPLIT.part(LSE.lse, rank, -1).copy())
        attn = cd.ContextParallel(comms[rank], split=SPLIT, causal=True, timeout=timeout, steps=2)
        try:
            call(attn, method, own)
            if rank == 1:
                with interrupt():
                    results = call(attn, method, own)
            else:
                results = call(attn, method, own)
        except BaseException as error:
            for x in own:
                x[...] = np.nan  # whoever still reads them shows it
            results = error
        found[rank] = results

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return found, comms


@pytest.fixture(scope="module")
def lines():
    """The function of each line that a call runs, by method."""
    found = {}
    for method in METHODS:
        interrupt = Interrupt(FILES)
        run(method, interrupt)
        found[method] = interrupt.functions
    return found


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60 if sampling.exhaustive else 20, deadline=None)
@given(data=st.data(), error=st.sampled_from([KeyboardInterrupt, MemoryError]))
def test_an_error_at_any_line_is_heard_of_and_leaves_nothing(method, data, error, lines):
    line = data.draw(st.integers(1, len(lines[method])))
    interrupt = Interrupt(FILES, line, error)
    is_around = lines[method][line - 1] in AROUND  # other ranks may wait to the end
    found, comms = run(method, interrupt, timeout=1 if is_around else 3)
    if not interrupt.where:  # threads take turns in another order
        return
    assert isinstance(found[1], error)
    for rank in (0, 2):
        if isinstance(found[rank], tuple):
            check(method, rank, found[rank])  # it had all that it needs
            continue
        errors = (RuntimeError, TimeoutError) if interrupt.where in AROUND else RuntimeError
        assert isinstance(found[rank], errors), interrupt.where
    if (
        interrupt.where not in AROUND and error is KeyboardInterrupt
    ):  # others may be of arguments, after which all go on
        assert not [thread for comm in comms[1:2] for thread in comm._progress._pool._threads if thread.is_alive()]


def test_rows_of_a_rank_that_failed_are_not_read_later():
    """It may use its arrays for something else as soon as its call has raised."""
    first, second = cd.threads(2)
    own, into = np.ones(3), np.zeros(3)
    first.start([(1, own)], [])
    first.fail(0, "KeyboardInterrupt: ")
    own[:] = np.nan
    with pytest.raises(RuntimeError, match=r"^rank 0 failed: KeyboardInterrupt: $"):
        second.finish(second.start([], [(0, into)]), 5)
    np.testing.assert_array_equal(into, 0)


@pytest.mark.parametrize("method", ["all_gather", "start"])
def test_a_communicator_of_a_failed_call_says_so(method):
    (comm,) = cd.threads(1)
    with pytest.raises(TimeoutError):
        comm.finish(comm.start([], [(0, np.empty(3))]), 0.1)
    with pytest.raises(RuntimeError, match=r"^comm: got a communicator after a call that failed, expected a new one$"):
        getattr(comm, method)(*((b"", 1.0) if method == "all_gather" else ([], [])))
