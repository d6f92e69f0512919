"""The cache of compiled kernels, with a stand-in for NVRTC that counts its calls and hashes what it is given."""

import hashlib
import itertools
import multiprocessing
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cuflash import compiler, kernel_cache, nvrtc
from cuflash.compiler import CompileError, Compiler, Resources
from cuflash.nvrtc import Nvrtc, NvrtcNotFoundError

ROOT = Path(compiler.__file__).parents[1]
FILES = {"a.cu": b'#include "b.cuh"\n', "b.cuh": b"#pragma once\n", "sub/c.cuh": b""}
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}' for 'sm_80'
ptxas info    : Function properties for {name}
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers, 308 bytes smem, 364 bytes cmem[0]"""


class CountingToolchain:
    def __init__(self, version="13.0.1", expected=None, cubin_bytes=64, delay=0.0):
        self.calls = 0
        self.loaded = False
        self._version = version
        self._expected = expected
        self._cubin_bytes = cubin_bytes
        self._delay = delay

    def expected_version(self):
        return self._expected

    def version(self):
        self.loaded = True
        return self._version

    def compile(self, path, program, headers, arch, options):
        self.calls += 1
        time.sleep(self._delay)
        name = next((option.partition("=")[2] for option in options if option.startswith("-DNAME=")), "kernel")
        seen = repr((path.name, program, sorted(headers.items()), arch, options, self._version)).encode()
        return hashlib.sha256(seen).digest() * (self._cubin_bytes // 32), LOG.format(name=name)


def write_files(directory, files):
    for name, content in files.items():
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.fixture
def kernel_dir(tmp_path):
    write_files(tmp_path / "kernels", FILES)
    return tmp_path / "kernels"


def compile_once(kernel_dir, cache_dir, toolchain, source="a.cu", name="kernel", defines=None, arch="sm_80"):
    """As a process that starts now would: the sources are read anew."""
    return Compiler(Path(kernel_dir), Path(cache_dir), toolchain).compile(source, name, defines or {}, arch)


# ---- The key --------------------------------------------------------------------------------------------------------


def test_a_second_process_compiles_nothing_and_writes_nothing(kernel_dir, tmp_path):
    toolchain = CountingToolchain()
    first = compile_once(kernel_dir, tmp_path / "cache", toolchain)
    listing = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert compile_once(kernel_dir, tmp_path / "cache", toolchain) == first
    assert toolchain.calls == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == listing
    assert len(listing) == 2 and first.path in listing


file_names = st.sampled_from(["a.cu", "b.cuh", "c.cuh", "sub/b.cuh", "sub/d.cuh"])
file_sets = st.dictionaries(file_names, st.binary(max_size=40), max_size=5).map(lambda files: {"a.cu": b"//", **files})


@given(first=file_sets, second=file_sets)
@example(first={"a.cu": b"//", "b.cuh": b"xy", "c.cuh": b"z"}, second={"a.cu": b"//", "b.cuh": b"x", "c.cuh": b"yz"})
@example(first={"a.cu": b"//", "b.cuh": b"x"}, second={"a.cu": b"//", "c.cuh": b"x"})
@example(first={"a.cu": b"//"}, second={"a.cu": b"//", "c.cuh": b""})
@settings(max_examples=60)
def test_kernels_are_shared_exactly_when_every_file_is_equal(first, second):
    toolchain = CountingToolchain()
    with tempfile.TemporaryDirectory() as directory:
        write_files(f"{directory}/1", first)
        write_files(f"{directory}/2", second)
        compile_once(f"{directory}/1", f"{directory}/cache", toolchain)
        compile_once(f"{directory}/2", f"{directory}/cache", toolchain)
    assert toolchain.calls == (1 if first == second else 2)


@given(files=file_sets, data=st.data())
@settings(max_examples=60)
def test_any_changed_byte_of_any_file_compiles_again_and_changing_it_back_does_not(files, data):
    assume(any(files.values()))
    name = data.draw(st.sampled_from(sorted(name for name, content in files.items() if content)))
    position = data.draw(st.integers(0, len(files[name]) - 1))
    changed = bytearray(files[name])
    changed[position] ^= data.draw(st.integers(1, 255))
    toolchain = CountingToolchain()
    with tempfile.TemporaryDirectory() as directory:
        for version, calls in ((files, 1), ({**files, name: bytes(changed)}, 2), (files, 2)):
            write_files(f"{directory}/kernels", version)
            compile_once(f"{directory}/kernels", f"{directory}/cache", toolchain)
            assert toolchain.calls == calls


macros = st.from_regex(r"[A-Z_][A-Z0-9_]{0,4}", fullmatch=True)
define_sets = st.dictionaries(macros, st.integers(-4, 4) | st.sampled_from(["", "a", "a b", "-DX=1"]), max_size=4)
requests = st.tuples(define_sets, st.sampled_from(["sm_80", "sm_90", "sm_90a"]), st.sampled_from(["13.0", "13.1"]))


@given(first=requests, second=requests)
@settings(max_examples=60)
def test_kernels_are_shared_exactly_when_defines_arch_and_version_are_equal(first, second):
    cubins = []
    calls = 0
    with tempfile.TemporaryDirectory() as directory:
        write_files(f"{directory}/kernels", FILES)
        for defines, arch, version in (first, second):
            toolchain = CountingToolchain(version)
            kernel = compile_once(f"{directory}/kernels", f"{directory}/cache", toolchain, defines=defines, arch=arch)
            cubins.append(kernel.path.read_bytes())
            calls += toolchain.calls
    assert (calls == 1) == (cubins[0] == cubins[1]) == (first == second)


@given(defines=define_sets, data=st.data())
@settings(max_examples=30)
def test_order_and_type_of_defines_do_not_matter(defines, data):
    shuffled = data.draw(st.permutations(sorted(defines.items())))
    toolchain = CountingToolchain()
    with tempfile.TemporaryDirectory() as directory:
        write_files(f"{directory}/kernels", FILES)
        compile_once(f"{directory}/kernels", f"{directory}/cache", toolchain, defines=defines)
        strings = {macro: str(value) for macro, value in shuffled}
        compile_once(f"{directory}/kernels", f"{directory}/cache", toolchain, defines=strings)
    assert toolchain.calls == 1


def test_name_and_source_are_part_of_the_key(kernel_dir, tmp_path):
    write_files(kernel_dir, {"d.cu": FILES["a.cu"]})
    toolchain = CountingToolchain()
    compile_once(kernel_dir, tmp_path / "cache", toolchain, defines={"NAME": "f"}, name="f")
    compile_once(kernel_dir, tmp_path / "cache", toolchain, defines={"NAME": "f"}, name="f", source="d.cu")
    assert toolchain.calls == 2
    with pytest.raises(CompileError, match="no kernel 'g'"):
        compile_once(kernel_dir, tmp_path / "cache", toolchain, defines={"NAME": "f"}, name="g")


def test_an_edit_is_seen_by_the_next_process_only(kernel_dir, tmp_path):
    toolchain = CountingToolchain()
    running = Compiler(kernel_dir, tmp_path / "cache", toolchain)
    before = running.compile("a.cu", "kernel", {}, "sm_80")
    (kernel_dir / "b.cuh").write_bytes(b"// edited")
    other = running.compile("a.cu", "kernel", {"NEW": 1}, "sm_80")  # compiled from the bytes its key was made of
    (kernel_dir / "b.cuh").write_bytes(FILES["b.cuh"])
    assert compile_once(kernel_dir, tmp_path / "cache", toolchain) == before
    assert compile_once(kernel_dir, tmp_path / "cache", toolchain, defines={"NEW": 1}) == other
    assert toolchain.calls == 2


def test_a_hit_does_not_load_nvrtc_and_a_wrong_guess_of_its_version_is_put_right(kernel_dir, tmp_path):
    right = CountingToolchain("13.0.1", expected="13.0.1")
    compile_once(kernel_dir, tmp_path / "cache", right)
    right.loaded = False
    compile_once(kernel_dir, tmp_path / "cache", right)
    assert (right.calls, right.loaded) == (1, False)

    other = CountingToolchain("12.9", expected="13.0.2")  # the library that was loaded is not the wheel's
    first = compile_once(kernel_dir, tmp_path / "cache", other)
    assert compile_once(kernel_dir, tmp_path / "cache", other) == first
    assert other.calls == 1
    compile_once(kernel_dir, tmp_path / "cache", CountingToolchain("12.9"))
    assert compile_once(kernel_dir, tmp_path / "cache", CountingToolchain("12.9", expected="12.9")) == first


# ---- Damage, processes and threads ----------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=60)
def test_a_damaged_entry_is_compiled_again(data):
    toolchain = CountingToolchain()
    with tempfile.TemporaryDirectory() as directory:
        write_files(f"{directory}/kernels", FILES)
        kernel = compile_once(f"{directory}/kernels", f"{directory}/cache", toolchain)
        cubin = kernel.path.read_bytes()
        victim = data.draw(st.sampled_from(sorted(Path(directory, "cache").iterdir())))
        content = bytearray(victim.read_bytes())
        position = data.draw(st.integers(0, 9999)) * len(content) // 10_000  # lengths vary with times in the report
        damage = data.draw(st.sampled_from(["flip", "truncate", "append", "replace", "delete"]))
        if damage == "flip":
            content[position] ^= data.draw(st.integers(1, 255))
        elif damage == "truncate":
            del content[position:]
        elif damage == "append":
            content += data.draw(st.binary(min_size=1, max_size=9))
        elif damage == "replace":
            content = data.draw(st.binary(max_size=100))
        if damage == "delete":
            victim.unlink()
        else:
            victim.write_bytes(content)
        for _ in range(2):
            repaired = compile_once(f"{directory}/kernels", f"{directory}/cache", toolchain)
            assert repaired.path.read_bytes() == cubin
            assert repaired.resources.registers == 40
            assert toolchain.calls == 2


def fetch_forever(kernel_dir, cache_dir, stop_after_s):
    """A process that compiles one kernel after the other, and checks each that it gets."""
    stop = time.monotonic() + stop_after_s
    for number in itertools.cycle(range(40)):
        if time.monotonic() > stop:
            return
        toolchain = CountingToolchain(cubin_bytes=200_000)
        kernel = compile_once(kernel_dir, cache_dir, toolchain, defines={"NUMBER": number})
        reference, _ = toolchain.compile(
            Path("a.cu"),
            FILES["a.cu"],
            {
                name: b'#line 1 "%s"\n' % str(Path(kernel_dir, name)).encode() + FILES[name]
                for name in FILES
                if name != "a.cu"
            },
            "sm_80",
            (*compiler.OPTIONS, "--gpu-architecture=sm_80", f"-DNUMBER={number}"),
        )
        assert kernel.path.read_bytes() == reference
        for entry in Path(cache_dir).glob(f"{number % 16:x}*.entry"):
            entry.unlink(missing_ok=True)  # keeps everybody writing


def test_processes_share_a_cache_and_may_be_killed_at_any_moment(kernel_dir, tmp_path):
    context = multiprocessing.get_context("spawn")
    cache = tmp_path / "cache"
    killed = [context.Process(target=fetch_forever, args=(kernel_dir, cache, 60)) for _ in range(2)]
    checked = [context.Process(target=fetch_forever, args=(kernel_dir, cache, 1.5)) for _ in range(2)]
    for process in (*killed, *checked):
        process.start()
    deadline = time.monotonic() + 60
    while not list(cache.glob("*.entry")):
        assert time.monotonic() < deadline, "no process stored anything"
        time.sleep(0.01)
    for delay, process in zip((0.05, 0.13), killed, strict=True):
        time.sleep(delay)
        process.kill()
    for process in (*killed, *checked):
        process.join()
    assert [process.exitcode for process in checked] == [0, 0]
    fetch_forever(kernel_dir, cache, 0.2)


def test_threads_that_ask_for_one_kernel_compile_it_once(kernel_dir, tmp_path):
    toolchain = CountingToolchain(delay=0.05)
    shared = Compiler(kernel_dir, tmp_path / "cache", toolchain)
    results = []
    barrier = threading.Barrier(8)

    def ask(number):
        barrier.wait()
        results.append((number, shared.compile("a.cu", "kernel", {"NUMBER": number}, "sm_80")))

    threads = [threading.Thread(target=ask, args=(index % 2,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert toolchain.calls == 2
    assert len(results) == 8
    assert len(set(results)) == 2


# ---- The limit ------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(kernel_dir, tmp_path):
    """A cache of four kernels, used 9, 7, 5 and 3 hours ago, by their numbers; and the bytes of one of them."""
    cache = tmp_path / "cache"
    kernels = {hours: store(kernel_dir, cache, hours) for hours in (9, 7, 5, 3)}
    for hours, kernel in kernels.items():
        age(kernel, hours)
    return types.SimpleNamespace(cache=cache, kernels=kernels, kernel_bytes=size_of(cache) // 4)


def store(kernel_dir, cache, number, toolchain=None):
    toolchain = toolchain or CountingToolchain(cubin_bytes=32_000)
    return compile_once(kernel_dir, cache, toolchain, defines={"NUMBER": number})


def files_of(kernel):
    """The two files of a kernel."""
    return [kernel.path, *(path for path in kernel.path.parent.glob("*.entry") if kernel.path.name in path.read_text())]


def age(kernel, hours):
    then = time.time() - 3600 * hours
    for path in files_of(kernel):
        os.utime(path, (then, then))


def size_of(cache):
    return sum(path.stat().st_size for path in cache.iterdir())


def left(filled):
    return [hours for hours, kernel in filled.kernels.items() if kernel.path.exists()]


@pytest.mark.parametrize("room", [5, 4, 3, 2, 1, 0])
def test_what_was_not_used_for_the_longest_time_goes_first(monkeypatch, kernel_dir, filled, room):
    limit = room * filled.kernel_bytes + 2_000  # lengths of reports vary a little
    monkeypatch.setenv("CUFLASH_CACHE_BYTES", str(limit))
    stored = store(kernel_dir, filled.cache, 0)
    assert stored.path.exists()
    assert left(filled) == [9, 7, 5, 3][5 - max(room, 1) :]
    assert size_of(filled.cache) <= max(limit, filled.kernel_bytes + 2_000)
    for hours in filled.kernels:
        assert store(kernel_dir, filled.cache, hours).path.exists(), "half of a kernel is no kernel"


def test_a_lookup_marks_what_it_finds(monkeypatch, kernel_dir, filled):
    toolchain = CountingToolchain(cubin_bytes=32_000)
    assert store(kernel_dir, filled.cache, 9, toolchain) == filled.kernels[9]
    assert toolchain.calls == 0
    monkeypatch.setenv("CUFLASH_CACHE_BYTES", "0")
    store(kernel_dir, filled.cache, 0)
    assert left(filled) == [9]
    assert store(kernel_dir, filled.cache, 7, toolchain).path.exists(), "what is gone is compiled again"
    assert toolchain.calls == 1


def test_what_was_used_within_the_hour_stays(monkeypatch, kernel_dir, filled):
    monkeypatch.setenv("CUFLASH_CACHE_BYTES", "0")
    age(filled.kernels[7], 0.9)
    age(filled.kernels[5], 1.1)
    store(kernel_dir, filled.cache, 0)
    assert left(filled) == [7]


def test_what_a_lookup_found_while_files_were_listed_stays(monkeypatch, filled):
    """Between the listing and the removal of a file a process may choose it."""
    listed = kernel_cache.cached_files(filled.cache)
    age(filled.kernels[7], 0)
    monkeypatch.setattr(kernel_cache, "cached_files", lambda directory: listed)
    kernel_cache.trim_cache(filled.cache, 0, time.time())
    assert left(filled) == [7]


def test_temporary_files_of_killed_processes_go_and_other_files_stay(monkeypatch, kernel_dir, filled):
    (filled.cache / "tuned").mkdir()
    kept = [filled.cache / name for name in ("notes.txt", "tuned/best.json")]
    temporary, fresh = filled.cache / ".0123.tmp", filled.cache / ".4567.tmp"
    for path in (*kept, temporary, fresh):
        path.write_bytes(bytes(1000))
    for path in (*kept, temporary):
        os.utime(path, (0, 0))
    monkeypatch.setenv("CUFLASH_CACHE_BYTES", "0")
    store(kernel_dir, filled.cache, 0)
    assert not temporary.exists()
    assert fresh.exists(), "another process is writing it"
    kernel_cache.clear_cache(filled.cache)
    assert fresh.exists()
    assert all(path.exists() for path in kept)


def test_only_storing_looks_at_the_whole_cache(monkeypatch, kernel_dir, filled):
    looks = []
    monkeypatch.setattr(compiler, "trim_cache", lambda *arguments: looks.append(arguments))
    for hours in (9, 9, 7):
        store(kernel_dir, filled.cache, hours)
    assert looks == []
    store(kernel_dir, filled.cache, 0)
    assert len(looks) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_of_others_is_read(kernel_dir, filled):
    filled.cache.chmod(0o555)
    try:
        assert store(kernel_dir, filled.cache, 9) == filled.kernels[9]
    finally:
        filled.cache.chmod(0o755)


def test_trimming_is_never_an_error(monkeypatch, tmp_path, filled):
    """Not where the directory is gone, nor where files are not to be removed, nor where they are gone already."""
    kernel_cache.trim_cache(tmp_path / "absent", 0, time.time())
    listed = kernel_cache.cached_files(filled.cache)
    assert kernel_cache.clear_cache(filled.cache) == listed
    monkeypatch.setattr(kernel_cache, "cached_files", lambda directory: listed)
    kernel_cache.trim_cache(filled.cache, 0, time.time())
    assert kernel_cache.clear_cache(filled.cache) == []


@pytest.mark.parametrize(("text", "limit"), [("", 2**30), (" 1000 ", 1000), ("0", 0), (str(2**70), 2**70)])
def test_the_limit_is_that_of_the_environment(monkeypatch, text, limit):
    monkeypatch.setenv("CUFLASH_CACHE_BYTES", text)
    assert kernel_cache.cache_limit() == limit
    monkeypatch.delenv("CUFLASH_CACHE_BYTES")
    assert kernel_cache.cache_limit() == 2**30


@pytest.mark.parametrize("text", ["1 GiB", "-1", "1e9", "٣"])
def test_a_limit_that_is_none_is_a_warning(monkeypatch, kernel_dir, tmp_path, text):
    monkeypatch.setenv("CUFLASH_CACHE_BYTES", text)
    with pytest.warns(RuntimeWarning, match=f"^CUFLASH_CACHE_BYTES: got {text!r}, expected a number of bytes"):
        assert store(kernel_dir, tmp_path / "cache", 0).path.exists()


def fetch_and_load_forever(kernel_dir, cache_dir, stop_after_s, calls):
    """A process that chooses one kernel after the other from a cache that has room for few, and loads each."""
    os.environ["CUFLASH_CACHE_BYTES"] = "50000"
    kernel_cache.KEPT_SECONDS, kernel_cache.MARKED_SECONDS = 0.7, 0.1
    stop = time.monotonic() + stop_after_s
    toolchain, rng = CountingToolchain(cubin_bytes=3_200), random.Random(os.getpid())
    while time.monotonic() < stop:
        kernel = store(kernel_dir, cache_dir, rng.randrange(300), toolchain)
        time.sleep(0.004)  # others store, and remove, meanwhile
        assert len(kernel.path.read_bytes()) == 3_200
    with calls.get_lock():
        calls.value += toolchain.calls


def test_no_process_loses_what_it_just_chose(kernel_dir, tmp_path):
    context, cache = multiprocessing.get_context("spawn"), tmp_path / "cache"
    calls = context.Value("i", 0)
    arguments = (kernel_dir, cache, 5, calls)
    processes = [context.Process(target=fetch_and_load_forever, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert calls.value > 400, "nothing was removed"


# ---- Where things are -----------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_warns_once_and_works(kernel_dir, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    toolchain = CountingToolchain()
    unlucky = Compiler(kernel_dir, tmp_path / "file" / "cache", toolchain)
    with pytest.warns(RuntimeWarning, match="CUFLASH_CACHE_DIR") as caught:
        first = unlucky.compile("a.cu", "kernel", {"NUMBER": 1}, "sm_80")
        second = unlucky.compile("a.cu", "kernel", {"NUMBER": 2}, "sm_80")
    assert len(caught) == 1 and str(tmp_path / "file") in str(caught[0].message)
    assert first.path.is_file() and second.path.is_file()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unlucky.compile("a.cu", "kernel", {"NUMBER": 1}, "sm_80") == first
    assert toolchain.calls == 2


def test_a_private_directory_ends_with_its_process():
    program = "from cuflash.kernel_cache import private_directory as made; assert made().is_dir(); print(made())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).exists()


@pytest.mark.skipif(sys.platform == "win32", reason="names of POSIX directories")
def test_cache_directory(monkeypatch, tmp_path):
    for variable in ("CUFLASH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_cache.cache_directory() == tmp_path / ".cache" / "cuflash"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert kernel_cache.cache_directory() == tmp_path / ".cache" / "cuflash"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernel_cache.cache_directory() == tmp_path / "xdg" / "cuflash"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "~/mine")
    assert kernel_cache.cache_directory() == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "here")
    assert kernel_cache.cache_directory() == tmp_path / "here"


def test_tests_leave_the_cache_of_the_user_alone(tmp_path):
    """A run of a test that compiles kernels, by somebody who has said nothing about where."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is needed to compile")
    spoken = ("CUFLASH_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA", "PYTEST_XDIST_WORKER")
    environment = {name: value for name, value in os.environ.items() if name not in spoken} | {"HOME": str(tmp_path)}
    program = (
        "import sys, pytest\n"
        "code = pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/pure/test_cli.py::test_plan_of_one_pass'])\n"
        "from cuflash import kernel_cache\n"
        "print(kernel_cache.cache_directory(), len(kernel_cache.cached_files(kernel_cache.cache_directory())))\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    directory, files = done.stdout.splitlines()[-1].split()
    assert Path(directory) == ROOT / "tests" / ".cache" and int(files) > 0
    assert list(tmp_path.iterdir()) == []


def test_cache_directory_without_a_home(monkeypatch):
    for variable in ("CUFLASH_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert kernel_cache.cache_directory().is_dir()


@pytest.mark.parametrize(
    ("place", "is_found"),
    [("site/cuflash/kernels", True), ("site/kernels", True), ("kernels", False)],
    ids=["wheel", "checkout", "missing"],
)
def test_kernel_directory(tmp_path, place, is_found):
    """A stranger's package named kernels beside an installed cuflash is not taken for ours."""
    package = tmp_path / "site" / "cuflash"
    sources = Path(compiler.__file__).parent
    modules = [path.name for path in sources.glob("*.py")]
    write_files(package, {name: (sources / name).read_bytes() for name in modules})
    shutil.copytree(sources / "planning", package / "planning")
    write_files(package, {"__init__.py": b""})
    write_files(tmp_path / "site" / "kernels", {"__init__.py": b""})
    write_files(tmp_path / place, {"ptx/base.cuh": b""})
    program = "from cuflash import compiler; print(compiler.kernel_directory())"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "site", capture_output=True, text=True)
    if is_found:
        assert Path(done.stdout.strip()) == (tmp_path / place).resolve()
    else:
        assert "FileNotFoundError: the CUDA sources of cuflash are in none of" in done.stderr


# ---- Messages and reports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"source": "b.cu"}, ValueError, "source: got 'b.cu'"),
        ({"source": "../kernels/a.cu"}, ValueError, "source: got"),
        ({"name": "a b"}, ValueError, "name: got 'a b'"),
        ({"name": ""}, ValueError, "name: got ''"),
        ({"arch": "8.0"}, ValueError, "arch: got '8.0'"),
        ({"arch": "compute_80"}, ValueError, "arch: got 'compute_80'"),
        ({"arch": "sm_80\n"}, ValueError, "arch: got"),
        ({"defines": {"A=1 -DB": 1}}, ValueError, "defines: got 'A=1 -DB'"),
        ({"defines": {"A": 1.5}}, TypeError, "defines: got A=1.5"),
        ({"defines": {"A": None}}, TypeError, "defines: got A=None"),
    ],
)
def test_malformed_arguments(kernel_dir, tmp_path, change, error, words):
    with pytest.raises(error) as caught:
        compile_once(kernel_dir, tmp_path / "cache", CountingToolchain(), **change)
    assert words in str(caught.value)


def test_booleans_and_integer_types_become_numbers(kernel_dir, tmp_path):
    numpy = pytest.importorskip("numpy")
    toolchain = CountingToolchain()
    for value in (1, True, numpy.int64(1), "1"):
        compile_once(kernel_dir, tmp_path / "cache", toolchain, defines={"ON": value})
    assert toolchain.calls == 1


def test_a_failure_shows_log_options_and_how_to_reproduce_and_is_not_cached(kernel_dir, tmp_path):
    class Failing(CountingToolchain):
        def compile(self, path, *rest):
            self.calls += 1
            return None, f"{path}(7): error: no"

    toolchain = Failing()
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            compile_once(kernel_dir, tmp_path / "cache", toolchain, defines={"B": 2, "A": "x"})
    assert toolchain.calls == 2
    assert not (tmp_path / "cache").exists()
    message = str(caught.value)
    assert f"{kernel_dir / 'a.cu'}(7): error: no" in message
    assert "NVRTC 13.0.1 with --std=c++17" in message
    assert "-DA=x -DB=2" in message
    assert f"compile_kernel('a.cu', 'kernel', {{'A': 'x', 'B': 2}}, 'sm_80', kernel_dir={str(kernel_dir)!r})" in message
    copy = pickle.loads(pickle.dumps(caught.value))  # from a pool of processes
    assert (str(copy), copy.log, copy.options) == (message, caught.value.log, caught.value.options)


def test_report_of_one_kernel_among_several():
    log = """\
/k/a.cu(3): warning #177-D: variable "x" was declared but never referenced
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'one'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one_more' for 'sm_90a'
ptxas info    : Function properties for one_more
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 308 bytes smem, 364 bytes cmem[0]
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
ptxas         .     400 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 416 bytes cumulative stack size, 8 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 43.471 ms
ptxas info    : Function properties for _Z6calleePKfi
ptxas         .     16 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads"""
    resources = Resources.from_log(log, "one", 0.5)
    assert resources == Resources(
        registers=168,
        spill_stores_bytes=20,
        spill_loads_bytes=40,
        stack_bytes=416,
        static_shared_bytes=8,
        barriers=16,
        seconds=0.5,
        log=log,
    )
    assert [line.partition(":")[0] for line in resources.warnings] == ["/k/a.cu(3)", "ptxas info    "]
    assert Resources.from_log(log, "one_more", 0.5).static_shared_bytes == 308
    with pytest.raises(ValueError, match=r"no kernel 'two', only \['one', 'one_more'\]"):
        Resources.from_log(log, "two", 0.5)


def test_a_report_without_barriers_and_shared_memory():
    resources = Resources.from_log(LOG.format(name="f").partition(", used")[0], "f", 0.0)
    assert (resources.registers, resources.stack_bytes) == (40, 16)
    assert (resources.barriers, resources.static_shared_bytes) == (0, 0)


def stand_in(**functions):
    module = types.ModuleType("cuda.bindings.nvrtc")
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def result(value=0):
    return types.SimpleNamespace(value=value, name=f"NVRTC_{value}")


@pytest.mark.parametrize(
    ("has_bindings", "missing", "command"),
    [
        (False, "needs cuda-bindings, which is missing here", "pip install cuda-bindings nvidia-cuda-nvrtc "),
        (True, "needs the library NVRTC, which cuda-bindings does not find here", "pip install nvidia-cuda-nvrtc "),
    ],
    ids=["no bindings", "no library"],
)
def test_what_is_missing_to_compile_is_named(monkeypatch, kernel_dir, tmp_path, has_bindings, missing, command):
    def not_found():
        raise RuntimeError("Failure finding libnvrtc.so.13")

    module = stand_in(nvrtcVersion=not_found) if has_bindings else None
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", module)
    with pytest.raises(NvrtcNotFoundError) as caught:
        compile_once(kernel_dir, tmp_path / "cache", Nvrtc())
    assert isinstance(caught.value, ImportError)
    for words in (missing, command, '"cuflash[compile]"', *(("libnvrtc.so.13",) if has_bindings else ())):
        assert words in str(caught.value)


def test_the_extra_of_the_message_is_what_the_message_installs():
    metadata = (ROOT / "pyproject.toml").read_text()
    (extra,) = re.findall(r"^compile = \[(.*)\]$", metadata, re.MULTILINE)
    assert re.findall(r'"([\w-]+)[^"]*"', extra) == [nvrtc.BINDINGS, nvrtc.NVRTC]


@pytest.mark.parametrize(("arch", "remedy"), [("sm_120", "pip install -U"), ("sm_35", "an older NVRTC")])
def test_an_architecture_that_nvrtc_does_not_know(monkeypatch, kernel_dir, tmp_path, arch, remedy):
    module = stand_in(nvrtcVersion=lambda: (result(), 12, 4), nvrtcGetSupportedArchs=lambda: (result(), [50, 80, 90]))
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", module)
    with pytest.raises(NotImplementedError) as caught:
        compile_once(kernel_dir, tmp_path / "cache", Nvrtc(), arch=arch)
    assert f"NVRTC 12.4 does not compile for {arch}, only for sm_50, sm_80, sm_90" in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("distributions", "expected"),
    [
        (["cuda_bindings-13.0.3.dist-info", "nvidia_cuda_nvrtc-13.0.88.dist-info"], "13.0.88"),
        (["cuda_bindings-12.9.0.dist-info", "nvidia_cuda_nvrtc_cu12-12.9.86.dist-info"], "12.9.86"),
        (
            [
                "nvidia_cuda_nvrtc_cu12-12.9.86.dist-info",
                "nvidia_cuda_nvrtc-13.0.88.dist-info",
                "cuda_bindings-13.0.3.dist-info",
            ],
            "13.0.88",
        ),
        (["cuda_bindings-13.0.3.dist-info"], None),
        (["nvidia_cuda_nvrtc-13.0.88.dist-info"], None),
        (["cuda_bindings-13.0.3.dist-info", "nvidia_cuda_nvrtc_cu12-12.9.86.dist-info"], None),
        ([], None),
    ],
)
def test_expected_version_of_nvrtc(monkeypatch, tmp_path, distributions, expected):
    for name in distributions:
        (tmp_path / "site" / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), str(tmp_path / "absent.zip")])
    assert Nvrtc().expected_version() == expected


def test_importing_the_compiler_imports_no_cuda():
    program = "import sys, cuflash.compiler; print([name for name in ('cuda.bindings', 'cupy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
