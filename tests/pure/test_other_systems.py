"""Windows and macOS, as far as Linux can play them: the modules and functions of POSIX that they lack are taken away.

cuflash is imported as a whole, plans, and computes by NumPy, because there is no library of the core of that name.
"""

import errno
import os
import shutil
import sys
import time

import pytest

from cuflash.emulator import EmulationError, building
from cuflash.gpu import kernel_cache
from tests.compiled import CHECKOUT, run_python

# What the standard library of each does not have.
MODULES = {
    "win32": ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"),
    "darwin": ("msvcrt", "spwd", "winreg"),
}
FUNCTIONS = {
    "win32": (
        *("fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getloadavg", "mkfifo", "fchmod", "chown"),
        *("sched_getaffinity", "sched_setaffinity", "sched_yield", "posix_fadvise", "posix_fallocate", "pread"),
    ),
    "darwin": ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create"),
}
SIGNALS = {
    "win32": ("SIGALRM", "SIGUSR1", "SIGHUP", "SIGKILL", "setitimer", "pthread_sigmask", "pthread_kill", "sigwait"),
    "darwin": ("SIGRTMIN", "sigtimedwait"),
}
FILES = "/proc", "/sys"
PLAY = """
import builtins, ctypes, importlib, io, os, pkgutil, signal, sys, tempfile, threading
import concurrent.futures, multiprocessing, platform, shutil, subprocess, sysconfig
import hypothesis, numpy as np, ml_dtypes, pytest
sysconfig.get_config_vars()
platform.platform()
system, modules, functions, signals, files = {!r}, {!r}, {!r}, {!r}, {!r}
others = ("cuda", "cupy", "cupyx", "jax", "mpi4py", "torch")  # whether their wheels serve a system is theirs to say
for name in modules + others:
    sys.modules[name] = None
for module, names in ((os, functions), (signal, signals)):
    for name in names:
        vars(module).pop(name, None)
really_open = io.open
def guarded(file, *args, **kwargs):
    if isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith(files):
        raise FileNotFoundError(2, "no such file", file)
    return really_open(file, *args, **kwargs)
builtins.open = io.open = guarded
sys.platform = system
import cuflash
"""
IMPORTS_ALL = """
imported = 0
for module in pkgutil.walk_packages(cuflash.__path__, "cuflash.", onerror=lambda name: None):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            imported += 1
    except ModuleNotFoundError as error:
        assert (error.name or "").partition(".")[0] in others, error
assert imported > 80, imported
"""
COMPUTES = """
import warnings
import cuflash.testing as ct
from cuflash import cpu
from cuflash.cpu import core, jobs
assert core.LIBRARY.name == {"win32": "libcuflash.dll", "darwin": "libcuflash.dylib"}[system]
assert "not built" in core.why_not()
assert jobs.available_cores() == os.cpu_count() and jobs.count_cores() >= 1
warnings.simplefilter("ignore", RuntimeWarning)  # that the core is missing
from hypothesis import given, settings, strategies as st
@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(*[st.integers(1, n) for n in (3, 40, 40)], st.booleans(), st.sampled_from(("float32", "bfloat16")))
def holds(heads, rows, keys, causal, dtype):
    case = ct.Case(num_heads=heads, seqlen_q=rows, seqlen_k=keys, head_dim=8, causal=causal, dtype=dtype)
    from tests.compiled import run
    from tests.judging import assert_oracle
    assert_oracle(case, run(case))
holds()
plan = cuflash.FlashAttention(causal=True).plan(*[np.zeros((2, 8, 4), np.float32)] * 3)
assert "NumPy" in plan.describe(), plan.describe()
from cuflash.cli.main import main
assert main(["plan", "--arch", "9.0", "--head-dim", "64", "--seqlen", "512"]) in (0, None)
assert main(["info"]) in (0, None)
"""


@pytest.mark.parametrize("system", ["win32", "darwin"])
@pytest.mark.parametrize("code", [IMPORTS_ALL, COMPUTES], ids=["imports", "computes"])
def test_a_system_without_what_only_linux_has(system, code, tmp_path):
    play = PLAY.format(system, MODULES[system], FUNCTIONS[system], SIGNALS[system], FILES)
    environment = {"CUFLASH_CACHE_DIR": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}
    run_python(f"{play}\n{code}", **environment)


def in_use(times):
    """`os.replace` where another process reads the target, so many times."""
    replace, calls = os.replace, []

    def replaced(source, target):
        calls.append(target)
        if len(calls) <= times:
            raise PermissionError(errno.EACCES, "the file is in use", str(target))
        return replace(source, target)

    return replaced, calls


@pytest.mark.parametrize("system, times, is_written", [("win32", 3, True), ("win32", 0, True), ("linux", 1, False)])
def test_a_cached_file_that_another_process_reads(tmp_path, monkeypatch, system, times, is_written):
    """Windows replaces no file that is open; on other systems the error has another cause, and is raised at once."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(b"before")
    replaced, calls = in_use(times)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(sys, "platform", system)
    if is_written:
        kernel_cache.write_atomically(path, b"after")
    else:
        with pytest.raises(PermissionError):
            kernel_cache.write_atomically(path, b"after")
    assert path.read_bytes() == (b"after" if is_written else b"before")
    assert len(calls) == (times + 1 if is_written else 1)
    assert [*tmp_path.iterdir()] == [path]


def test_a_cached_file_that_stays_open_is_an_error_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", in_use(10**9)[0])
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(kernel_cache, "OPEN_SECONDS", 0.05)
    begun = time.monotonic()
    with pytest.raises(PermissionError, match="in use"):
        kernel_cache.write_atomically(tmp_path / "kernel.cubin", b"after")
    assert 0.05 <= time.monotonic() - begun < 5
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_the_cache_is_where_programs_of_the_system_keep_theirs(monkeypatch, system, tmp_path):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.delenv("CUFLASH_CACHE_DIR", raising=False)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    expected = {"win32": tmp_path / "local", "darwin": tmp_path / "home" / "Library" / "Caches"}[system]
    assert kernel_cache.cache_directory() == expected / "cuflash"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernel_cache.cache_directory() == (expected if system == "win32" else tmp_path / "xdg") / "cuflash"


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_the_emulator_says_that_it_needs_linux(monkeypatch, system, tmp_path):
    """Also where there is a command g++, which is another compiler, or one for other libraries."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert building.find_compiler() is None
    with pytest.raises(EmulationError, match="on Linux"):
        building.build(CHECKOUT / "kernels" / "sm80" / "forward.cu", cache=tmp_path)
