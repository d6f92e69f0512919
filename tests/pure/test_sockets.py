"""Ranks that are joined by TCP: on threads of one process, and as workers of Dask and of Ray."""

import importlib
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.distributed as cd
import cuflash.testing as ct
from tests.pure.test_schedule import splits
from tests.ranks import Parts, Whole, compute, judge

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "distributed.md"
SIZES: dict[str, Any] = {"seqlen_q": 61, "seqlen_k": 83, "num_heads": 4, "num_heads_kv": 2, "head_dim": 16}
CASE = ct.Case(**SIZES, causal=True, dtype="float32", sinks=True)


def free_address():
    with socket.create_server(("localhost", 0)) as server:
        return "localhost", server.getsockname()[1]


def on_ranks(size, work, timeout=20.0):
    """What `work` gives for each rank, each of which has connections of its own."""
    address = free_address()

    def run(rank):
        return work(cd.Sockets(address, rank, size, timeout=timeout))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_hear_what_each_of_them_says(size):
    texts = [b"long " * 9, b"", b"short", b"x", b"y"][:size]
    assert on_ranks(size, lambda comm: comm.share(texts[comm.rank], 5.0)) == [texts] * size


def test_more_arrives_than_any_buffer_holds():
    """Ranks send before they receive, and none waits for another."""

    def work(comm):
        own, into = np.full(2**22, comm.rank, np.float64), [np.empty(2**22) for _ in range(3)]
        others = [rank for rank in range(3) if rank != comm.rank]
        pending = comm.start([(rank, own) for rank in others], [(rank, into[rank]) for rank in others])
        comm.finish(pending, 20.0)
        return [float(into[rank].mean()) for rank in others]

    assert on_ranks(3, work) == [[1, 2], [0, 2], [0, 1]]


@settings(max_examples=5, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_ranks_compute_what_one_device_does(data, ranks):
    parts = Parts(Whole.of(CASE), *(data.draw(splits(n, ranks)) for n in (61, 83)))

    def work(comm):
        attn = cd.ContextParallel(comm, split=parts.split_q, split_k=parts.split_k, **CASE.keywords)
        return compute(attn, parts, CASE.arrays())

    judge(CASE, parts.whole(on_ranks(ranks, work)))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def errors_of(change, ranks=3):
    """What each rank raises, and after how many seconds, where rank 1 does something else."""
    split = cd.contiguous(12, ranks)

    def work(comm):
        x, began = np.zeros((2, 4, 4)), time.monotonic()
        if comm.rank == 1:
            change(comm)
        try:
            cd.ContextParallel(comm, split=split, timeout=60).forward(x, x, x)
        except Exception as error:
            return f"{error}", time.monotonic() - began
        return "", 0.0

    return on_ranks(ranks, work)


def test_a_rank_that_fails_on_its_way_is_heard_of_at_once():
    def change(comm):
        def start(sends, receives):
            raise MemoryError("no room")

        comm.start = start

    found = errors_of(change)
    assert found[1][0] == "no room"
    # Where its connections are closed before all is read, what it said may be lost.
    assert all(text.startswith("rank 1 failed: ") for text, _ in (found[0], found[2]))
    assert max(seconds for _, seconds in found) < 20


def test_a_rank_that_is_killed_is_heard_of_at_once():
    def change(comm):
        for peer in comm._peers.values():
            peer.shutdown(socket.SHUT_RDWR)

    found = errors_of(change)
    assert all(text.startswith("rank 1 failed: ") for text, _ in (found[0], found[2]))
    assert max(seconds for _, seconds in found) < 20


def test_ranks_that_do_not_come_are_missed_in_time():
    address = free_address()
    with pytest.raises(TimeoutError, match=r"^ranks \[1\]: got nothing within timeout=0.3 seconds"):
        cd.Sockets(address, 0, 2, timeout=0.3)
    with pytest.raises(
        TimeoutError, match=r"^the rank at localhost:\d+ \(.*\): got nothing within timeout=0.3 seconds"
    ):
        cd.Sockets(address, 1, 2, timeout=0.3)


def test_rows_that_do_not_come_are_missed_in_time():
    def work(comm):
        if comm.rank == 1:
            return time.sleep(0.5)
        with pytest.raises(TimeoutError, match=r"^rows of other ranks: got nothing within timeout=0.2 seconds"):
            comm.finish(comm.start([], [(1, np.empty(3))]), 0.2)

    on_ranks(2, work)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((3, 0, 1), TypeError, r"^address: got int 3, expected \(host, port\)$"),
        ((("localhost", "x"), 0, 1), TypeError, "^port: got "),
        ((("localhost", 0), 1, 1), ValueError, "^rank: got 1, expected 0 to size - 1 = 0$"),
        ((("localhost", 0), 0, 0), ValueError, "^rank: got 0, expected 0 to size - 1 = -1$"),
    ],
)
def test_bad_arguments(arguments, kind, message):
    with pytest.raises(kind, match=message):
        cd.Sockets(*arguments)


def test_arrays_of_devices_are_refused():
    comm = cd.Sockets(("localhost", 0), 0, 1)
    with pytest.raises(NotImplementedError, match=r"^comm: got Sockets for Array of a device, expected NumPy arrays"):
        comm.start([(0, type("Array", (), {})())], [])


# ---- workers of others -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_the_program_of_the_page_runs(engine, tmp_path):
    module = {"dask": "distributed"}.get(engine, engine)
    try:
        importlib.import_module(module)
    except ImportError:
        pytest.skip(f"{module} is not installed")
    (program,) = re.findall(rf"^```python {engine}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, path], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
