"""Context parallel calls on real ranks of MPI, processes with NumPy arrays."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
ROOT = Path(__file__).parents[2]
# Beside the interpreter, where the wheels of MPICH and Open MPI put it, or on the path.
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="no MPI: mpiexec is not on the path")


def run(what: str, ranks: int) -> subprocess.CompletedProcess[str]:
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, "-m", "tests.mpi_ranks", what]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True, timeout=100)


def test_ranks_compute_what_one_device_does_and_find_out_what_they_do_not_share():
    done = run("all", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = set(done.stdout.splitlines())
    assert lines >= {f"case {number} is right on 3 ranks" for number in range(3)}
    assert lines >= {f"rank {rank}: causal: got True on rank 1, expected False as on rank 0" for rank in range(3)}


def test_a_rank_that_does_not_come_is_missed_in_time():
    done = run("absence", 2)
    assert "rank 0 after 1 s: what other ranks say: got nothing within timeout=0.5 seconds" in done.stdout
