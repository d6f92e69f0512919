"""Context parallel calls that go wrong: ranks that disagree, fail or leave, and bad arguments."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
from tests.ranks import on_threads
from tests.sampling import examples


def failures(change, ranks=3, **options):
    """What each rank raises where rank 1 makes another call than the others; and how long it takes."""
    split = cd.contiguous(12, ranks)
    x = np.zeros((2, 12, 4))

    def work(comm):
        attn_options: dict[str, Any] = {"causal": True, "split": "contiguous", "timeout": 5.0} | options
        arrays = {name: split.part(x, comm.rank) for name in "qkv"}
        optional: dict[str, Any] = {}
        method = "forward"
        if comm.rank == 1:
            method = change(attn_options, arrays, optional) or method
        try:
            getattr(cd.ContextParallel(comm, **attn_options), method)(*arrays.values(), **optional)
        except Exception as error:
            return error
        return None

    start = time.monotonic()
    return on_threads(ranks, work), time.monotonic() - start


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda options, arrays, optional: options.update(causal=False),
            "^causal: got False on rank 1, expected True as on rank 0$",
        ),
        (
            lambda options, arrays, optional: options.update(steps=2),
            "^steps: got 2 on rank 1, expected None as on rank 0$",
        ),
        (lambda options, arrays, optional: options.update(split="zigzag"), "^split: got 'zigzag' on rank 1, expected "),
        (
            lambda options, arrays, optional: arrays.update({n: x[:1] for n, x in arrays.items()}),
            r"^q: got float64 \(1, 4\) besides rows on rank 1, expected float64 \(2, 4\) besides rows as on rank 0$",
        ),
        (
            lambda options, arrays, optional: arrays.update({n: x.astype("f4") for n, x in arrays.items()}),
            r"^q: got float32 .* on rank 1, expected float64 .* as on rank 0$",
        ),
        (
            lambda options, arrays, optional: optional.update(sinks=np.zeros(2)),
            "^arrays: got q, k, v, sinks of numpy on rank 1, expected q, k, v of numpy as on rank 0$",
        ),
        (lambda options, arrays, optional: "plan", "^method: got plan on rank 1, expected forward as on "),
    ],
)  # fmt: skip
def test_ranks_that_disagree_raise_on_all_of_them(change, message):
    errors, seconds = failures(change)
    for error in errors:
        with pytest.raises(ValueError, match=message):
            raise error
    assert seconds < 5


def rows_more(options, arrays, optional):
    arrays["q"] = np.zeros((2, 5, 4))


def wrong_bias(options, arrays, optional):
    optional["kv_lengths"] = np.zeros(3, np.int32)


def no_array(options, arrays, optional):
    arrays["k"] = 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (rows_more, ValueError, "^q: got 5 rows, expected 4, which rank 1 has of 13$"),
        (wrong_bias, ValueError, r"^kv_lengths: got shape \(3,\), expected \(batch,\) = \(1,\)$"),
        (no_array, TypeError, "^k: got int 3, expected a NumPy or CuPy array, or one with __dlpack__$"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all_of_them(change, error, message):
    errors, seconds = failures(change)
    with pytest.raises(error, match=message):
        raise errors[1]
    for error in (errors[0], errors[2]):
        with pytest.raises((RuntimeError, ValueError), match=r"rank 1|rank 0 has of 13|rank 2 has of 13"):
            raise error
    assert seconds < 5


def test_values_of_arrays_that_all_ranks_have_are_compared():
    def work(comm):
        x = np.zeros((2, 3, 4))
        try:
            cd.ContextParallel(comm, split="zigzag").forward(x, x, x, sinks=np.full(2, float(comm.rank)))
        except ValueError as error:
            return str(error)

    for message in on_threads(2, work):
        assert message.startswith("sinks: got float64 (2,) with checksum ")


@settings(max_examples=examples(25), deadline=None)
@given(st.data(), st.sampled_from(["bias", "mask"]), st.sampled_from(["forward", "backward", "decode"]), st.booleans())
def test_values_of_bias_and_mask_that_all_ranks_have_are_compared(data, name, method, is_same):
    """Those without an axis of queries, or with one of length 1; in a step of decoding those without one of keys."""
    lead = data.draw(st.sampled_from([(), (1,), (2,), (1, 2)]))
    if method == "decode":
        shape = (*data.draw(st.sampled_from([(), (1,), (*lead, 3)])), 1)
    else:
        shape = (*data.draw(st.sampled_from([(), (1,), (*lead, 1)])), data.draw(st.sampled_from([1, 12])))
    values = np.ones(shape, bool) if name == "mask" else np.zeros(shape)
    index = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    split = cd.contiguous(12, 3)

    def work(comm):
        own, x = values.copy(), np.ones((2, 4, 8))
        if comm.rank == 2 and not is_same:
            own[index] = not own[index]
        attn = cd.ContextParallel(comm, split=split, timeout=5)
        inputs = {"forward": (x,) * 3, "backward": (*(x,) * 5, x[..., 0]), "decode": (x[:, :3], x, x)}[method]
        return getattr(attn, method)(*inputs, **{name: own})

    if is_same:
        on_threads(3, work)
        return
    message = rf"^{name}: got .* with checksum \w+ on rank 2, expected .* with checksum \w+ as on rank 0$"
    with pytest.raises(ValueError, match=message):
        on_threads(3, work)


def test_columns_of_ranks_with_one_key_each_are_their_own():
    """A last axis of length 1 is then that of the key."""
    split, (q, k, v) = cd.contiguous(3, 3), np.random.default_rng(0).standard_normal((3, 2, 3, 8))
    bias = np.random.default_rng(1).standard_normal((2, 3, 3))

    def work(comm):
        own_k, own_v, own_bias = split.part(k, comm.rank), split.part(v, comm.rank), split.part(bias, comm.rank, -1)
        return cd.ContextParallel(comm, split=split).decode(q, own_k, own_v, bias=own_bias).out

    for out in on_threads(3, work):
        np.testing.assert_allclose(out, cuflash.attention(q, k, v, bias=bias), rtol=1e-12)


@pytest.mark.parametrize("leaves_after", [0, 1, 2])
def test_a_rank_that_leaves_is_missed_in_time(leaves_after):
    """Before the call, between what ranks say, and before its rows are exchanged."""

    def work(comm):
        if comm.rank == 1:
            said: list[bytes] = []

            def all_gather(text, timeout):
                if len(said) == leaves_after:
                    raise KeyboardInterrupt
                said.append(text)
                return cd.transports.Threads.all_gather(comm, text, timeout)

            def start(sends, receives):
                raise KeyboardInterrupt

            comm.all_gather, comm.start = all_gather, start
            comm.fail = lambda rank, text: None  # as a process that is gone
        x, began = np.zeros((2, 3, 4)), time.monotonic()
        try:
            cd.ContextParallel(comm, split="zigzag", timeout=0.3).forward(x, x, x)
        except (TimeoutError, KeyboardInterrupt) as error:
            return error, time.monotonic() - began

    (missed, seconds), (left, _) = on_threads(2, work)
    assert isinstance(left, KeyboardInterrupt)
    assert isinstance(missed, TimeoutError)
    assert "got nothing from rank 1 within timeout=0.3 seconds; it may have failed or left" in str(missed)
    assert seconds < 3


@pytest.mark.parametrize("method", ["forward", "backward", "decode"])
def test_a_rank_that_fails_on_its_way_is_heard_of_at_once(method):
    """Long before the time is over."""
    split = cd.contiguous(12, 3)

    def work(comm):
        x, lse = np.zeros((2, 4, 4)), np.zeros((2, 4))
        if comm.rank == 1:

            def start(sends, receives):
                raise MemoryError("no memory")

            comm.start = start
        began = time.monotonic()
        attn = cd.ContextParallel(comm, split=split, timeout=60)
        try:
            getattr(attn, method)(*((x,) * 5 + (lse,) if method == "backward" else (x,) * 3))
        except (MemoryError, RuntimeError) as error:
            return repr(error), time.monotonic() - began

    found = on_threads(3, work)
    said = "RankFailed('rank 1 failed: MemoryError: no memory')"
    assert [text for text, _ in found] == [said, "MemoryError('no memory')", said]
    assert max(seconds for _, seconds in found) < 10


X = np.zeros((1, 4, 4))
ONES = np.ones((1, 1), bool)


@pytest.mark.parametrize(
    ("options", "optional", "error", "message"),
    [
        ({"dropout": 0.5}, {}, TypeError, "^seed: got None, expected an integer, which dropout needs$"),
        (
            {},
            {"block_mask": ONES[:, :0]},
            ValueError,
            r"^block_mask: got shape \(1, 0\), expected \(..., ceil\(seqlen_q ",
        ),
        ({}, {"block_table": ONES}, NotImplementedError, "^block_table: got ndarray, which is not served over ranks; "),
        ({}, {"k_scale": ONES}, ValueError, "^k_scale: got an array, expected None, since k has dtype float64: "),
        ({}, {"nonsense": 1}, TypeError, r"^forward\(\) got an unexpected keyword argument 'nonsense'$"),
        (
            {"split": None},
            {},
            TypeError,
            r"^split: got nothing, expected which rows each rank has: 'contiguous' \(.*\), 'zigzag' \(.*\) or a cuf",
        ),
        ({"split": 3}, {}, TypeError, "^split: got int 3, expected 'contiguous' "),
        ({"split": "zag"}, {}, ValueError, "^split: got 'zag', expected 'contiguous' "),
        ({"split_k": "zag"}, {}, ValueError, "^split_k: got 'zag', expected 'contiguous' "),
        ({"split": cd.zigzag(4, 2)}, {}, ValueError, "^split: got 2 ranks, expected 1 as comm has$"),
        ({"split": cd.zigzag(5, 1)}, {}, ValueError, "^q: got 4 rows, expected 5, which rank 0 has of 5$"),
        ({"split_k": cd.zigzag(5, 1)}, {}, ValueError, "^k: got 4 rows, expected 5, which rank 0 has of 5$"),
        ({"chunks": 0}, {}, ValueError, "^chunks: got 0, expected an integer >= 1$"),
        ({"steps": 1.5}, {}, TypeError, "^steps: got float 1.5, expected an integer$"),
        ({"timeout": 0}, {}, ValueError, "^timeout: got 0, expected a number of seconds > 0$"),
        ({"check": 1}, {}, TypeError, "^check: got int 1, expected a bool$"),
        ({"check": False}, {}, ValueError, "^check: got False, expected True, or two Split, "),
        ({"window": 3}, {}, TypeError, "^window: got int 3, "),
        ({}, {"bias": np.zeros((4, 5))}, ValueError, r"^bias: got shape \(4, 5\), expected a shape that broadcasts "),
        ({}, {"bias": np.zeros((3, 4))}, ValueError, r"^bias: got shape \(3, 4\), expected a shape that broadcasts "),
        ({}, {"kv_lengths": np.array([5])}, ValueError, "^kv_lengths: got an entry 5, expected 0 to seqlen_k = 4$"),
    ],
)
def test_bad_arguments(options, optional, error, message):
    (comm,) = cd.threads(1)
    with pytest.raises(error, match=message):
        cd.ContextParallel(comm, **{"split": "zigzag", **options}).forward(X, X, X, **optional)


@pytest.mark.parametrize("options", [{"timeout": 1e300}, {"chunks": 2**60, "deterministic": True}, {"steps": 2**70}])
def test_numbers_may_be_as_large_as_they_like(options):
    x = np.linspace(-1, 1, 48).reshape(2, 6, 4)
    split = cd.Split([[(0, 1), (3, 6)], [(1, 3)]])

    def work(comm):
        own = split.part(x, comm.rank)
        return cd.ContextParallel(comm, split=split, causal=True, **options).forward(own, own, own).out

    np.testing.assert_allclose(split.whole(on_threads(2, work)), cuflash.attention(x, x, x, causal=True))


@pytest.mark.parametrize("method", ["forward", "plan", "decode"])
def test_streamed_keys_are_refused(method):
    (comm,) = cd.threads(1)
    attn: Any = cd.ContextParallel(comm, split="zigzag")
    with pytest.raises(NotImplementedError, match=r"^k: got Streamed, which is not served over ranks; expected"):
        getattr(attn, method)(X, *cuflash.streamed(X, X))


def test_what_is_no_communicator():
    with pytest.raises(TypeError, match=r"^comm: got int, expected one of threads"):
        cd.ContextParallel(3, split="zigzag")
    with pytest.raises(TypeError, match=r"^comm: got int, expected a communicator of mpi4py$"):
        cd.Mpi(3)
    with pytest.raises(ValueError, match=r"^ranks: got 0, expected an integer >= 1$"):
        cd.threads(0)


def test_gradients_are_asked_for_as_of_one_device():
    (comm,) = cd.threads(1)
    attn = cd.ContextParallel(comm, split="zigzag")
    out, lse = attn.forward(X, X, X)
    with pytest.raises(ValueError, match=r"^need: got dbias without bias, expected the bias that forward took$"):
        attn.backward(X, X, X, X, out, lse, need=("dbias",))
    with pytest.raises(ValueError, match=r"^dout: got shape \(1, 3, 4\), expected \(1, 4, 4\)$"):
        attn.backward(X[:, :3], X, X, X, out, lse)
