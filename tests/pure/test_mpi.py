"""Context parallel calls on real ranks of MPI, processes with NumPy arrays."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    done = run(3, "-m", "tests.mpi_ranks", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    says(done, *(f"case {number} is right on 3 ranks" for number in range(3)))
    says(done, *(f"rank {rank}: causal: got True on rank 1, expected False as on rank 0" for rank in range(3)))


def test_a_rank_that_does_not_come_is_missed_in_time():
    done = run(2, "-m", "tests.mpi_ranks", "absence")
    says(done, "rank 0 after 1 s: what other ranks say: got nothing within timeout=0.5 seconds")


def test_the_program_of_the_page_runs():
    (program,) = re.findall(r"^```python mpi\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    done = run(2, "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    says(done, "rank 0 of 2 has rows ((0, 250), (750, 1000)): (8, 500, 32)", "rank 1 of 2 has rows ((250, 750),)")
