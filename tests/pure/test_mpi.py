"""Context parallel calls on real ranks of MPI, processes with NumPy arrays."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import cuflash.distributed as cd

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "distributed.md"
# Beside the interpreter, where the wheels of MPICH and Open MPI put it, or on the path.
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="no MPI: mpiexec is not on the path")


def run(ranks: int, *program: str) -> subprocess.CompletedProcess[str]:
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, *program]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True, timeout=100)


def says(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    """Lines of several ranks may run into one another, but for what each of them writes at once."""
    missing = [text for text in texts if text not in done.stdout]
    assert not missing, done.stdout + done.stderr


def test_ranks_compute_what_one_device_does_and_find_out_what_they_do_not_share():
    done = run(3, "-m", "tests.mpi_ranks", "right_results", "disagreement")
    assert done.returncode == 0, done.stdout + done.stderr
    says(done, *(f"case {number} is right on 3 ranks" for number in range(4)))
    says(done, *(f"rank {rank}: causal: got True on rank 1, expected False as on rank 0" for rank in range(3)))


def test_a_rank_that_does_not_come_is_missed_in_time():
    done = run(2, "-m", "tests.mpi_ranks", "absence")
    says(done, "rank 0 after 1 s: what other ranks say: got nothing from rank 1 within timeout=0.5 seconds")


def test_a_rank_that_fails_on_its_way_is_heard_of_at_once():
    done = run(3, "-m", "tests.mpi_ranks", "failure")
    says(done, *(f"rank {rank} soon True: RankFailed('rank 1 failed: MemoryError: no memory')" for rank in (0, 2)))


def test_a_rank_that_is_interrupted_is_heard_of_at_once():
    done = run(3, "-m", "tests.mpi_ranks", "interruption")
    says(done, *(f"rank {rank} soon True, 0 threads: RankFailed('rank 1 failed: KeyboardInter" for rank in (0, 2)))
    says(done, "rank 1 soon True, 0 threads: KeyboardInterrupt()")


def test_rows_come_while_ranks_compute():
    done = run(2, "-m", "tests.mpi_ranks", "progress")
    assert done.returncode == 0, done.stdout + done.stderr
    says(done, "rank 0: rows are there is True", "rank 1: rows are there is True")


class LateDevice:
    """A device that copies only once somebody waits for it."""

    def __init__(self) -> None:
        self.waits, self.may_go = 0, threading.Event()

    def pinned(self, shape, dtype):
        return np.full(shape, 255, dtype)

    def stream(self):
        return []

    def mark(self, stream):
        return stream, 0 if stream is None else len(stream)

    def follow(self, stream, event):
        assert event[0] is None

    def copy(self, target, source, stream):
        stream.append((target, source))

    def wait(self, event):
        assert self.may_go.wait(10)
        self.waits += 1
        stream, count = event
        for target, source in [] if stream is None else stream[:count]:
            np.copyto(*(x.own if isinstance(x, OnDevice) else x for x in (target, source)))


class OnDevice:
    """An array that NumPy does not know."""

    device = contextlib.nullcontext()

    def __init__(self, own):
        self.own, self.shape, self.dtype, self.nbytes = own, own.shape, own.dtype, own.nbytes

    def view(self, dtype):
        return OnDevice(self.own.view(dtype))

    def reshape(self, *shape):
        return OnDevice(self.own.reshape(*shape))

    def __buffer__(self, flags):
        return memoryview(self.own)

    @property
    def __array_interface__(self):
        raise AssertionError("an array of a device is read by the host")


@pytest.mark.parametrize("courier", [True, False], ids=["by a thread", "by the caller"])
def test_arrays_of_a_device_pass_through_pinned_memory(courier, monkeypatch):
    """The caller waits for nothing before it needs the rows; bytes are sent once they have been copied."""
    from mpi4py import MPI

    device = LateDevice()
    monkeypatch.setattr("cuflash.distributed.mpi.Cuda", lambda: device)
    if not courier:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    transport = cd.Mpi(MPI.COMM_SELF)
    sent, received = np.arange(12.0).reshape(3, 4), np.full((3, 4), np.nan)
    pending = transport.start([(0, OnDevice(sent))], [(0, OnDevice(received))])
    assert device.waits == 0
    device.may_go.set()
    transport.finish(pending, 10)
    np.testing.assert_array_equal(received, sent)
    assert device.waits == 2


def test_rows_that_do_not_come_are_missed_in_time():
    from mpi4py import MPI

    transport, into = cd.Mpi(MPI.COMM_SELF), np.empty(3)
    with pytest.raises(TimeoutError, match=r"^rows of other ranks: got nothing from rank 0 within timeout=0.2 seco"):
        transport.finish(transport.start([], [(0, into)]), 0.2)


def test_the_program_of_the_page_runs():
    (program,) = re.findall(r"^```python mpi\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    done = run(2, "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    says(done, "rank 0 of 2 has rows ((0, 250), (750, 1000)): (8, 500, 32)", "rank 1 of 2 has rows ((250, 750),)")
