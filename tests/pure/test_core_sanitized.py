"""The tests of the compiled core, on a core that sanitizers watch: with --exhaustive alone, for they take an hour.

The core is built in a copy of the checkout, whose tests run in a process of their own: a runtime of sanitizers has to
be loaded before Python is.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from cuflash.cpu import core
from tests import sampling
from tests.compiled import CHECKOUT

pytestmark = pytest.mark.skipif(not sampling.exhaustive, reason="takes an hour: with --exhaustive")

FILES = (
    *("test_core.py", "test_core_threads.py", "test_core_tangents.py", "test_no_elements.py"),
    *("test_core_large_scores.py", "test_core_packed_tiles.py", "test_without_values.py"),
)
# Those that ask how much memory, or how many threads, a process has; and those that would take longest.
OF_THE_PROCESS = "beside_inputs or stay_for_the_next or use_the_cores"
LONGEST = "without_space or space_for_its_sums"


class Sanitizer(NamedTuple):
    """How the core is built, which runtime comes first, what the tests are, and what a report begins with."""

    flags: str
    definitions: str
    runtime: str
    tests: str  # as pytest's -k has them
    environment: dict[str, str]
    report: str


SANITIZERS = {
    "address, undefined": Sanitizer(
        flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined",
        definitions="-DMODEL_OF_TILES",  # code for AMX, on any processor with AVX2
        runtime="libasan.so",
        tests=f"not ({OF_THE_PROCESS} or {LONGEST})",
        environment={"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"},  # Python frees not all it has
        report="ERROR: AddressSanitizer|runtime error:",
    ),
    "thread": Sanitizer(
        flags="-fsanitize=thread",
        definitions="",
        runtime="libtsan.so",
        tests=f"(threads or packed_tiles or broadcast or side or slices_of) and not ({OF_THE_PROCESS} or {LONGEST})",
        environment={"TSAN_OPTIONS": "die_after_fork=0"},
        report="WARNING: ThreadSanitizer",
    ),
}


@pytest.mark.parametrize("name", SANITIZERS)
def test_core_under_sanitizers(tmp_path, name):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    sanitizer = SANITIZERS[name]
    asked = ["g++", f"-print-file-name={sanitizer.runtime}"]
    runtime = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"no {sanitizer.runtime}")
    for folder in ("cuflash", "kernels", "tests", "bench"):
        without = shutil.ignore_patterns("__pycache__", "*.so", "build.txt", ".cache")
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=without)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / file, tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}

    compiler = {
        "CXX": f"g++ {sanitizer.flags} -fno-omit-frame-pointer -g1",
        # Without these optimisations, products and sums are rounded twice.
        "CXXFLAGS": f"-O1 -fexpensive-optimizations {sanitizer.definitions}",
    }
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tmp_path, env=environment | compiler, check=True, timeout=3600)
    library = core.LIBRARY.relative_to(CHECKOUT)
    assert (tmp_path / library).exists()

    preloaded = {"LD_PRELOAD": runtime, "UBSAN_OPTIONS": "print_stacktrace=1"} | sanitizer.environment
    files = [str(Path("tests", "pure", file)) for file in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", sanitizer.tests, *files]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | preloaded, capture_output=True, text=True, timeout=4 * 3600
    )
    said = done.stdout + done.stderr
    assert not any(report in said for report in sanitizer.report.split("|")), said[-20_000:]
    assert done.returncode == 0, said[-20_000:]
