"""The cache of compiled kernels: its key, damage, processes and threads, and where it lies."""

import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cuflash.gpu import compiler, kernel_cache
from cuflash.gpu.compiler import CompileError, Compiler
from tests.sampling import examples
from tests.toolchain import FILES, CountingToolchain, compile_once, write_files

ROOT = Path(__file__).parents[2]


# ---- The key --------------------------------------------------------------------------------------------------------


def test_a_second_process_compiles_nothing_and_writes_nothing(kernel_dir, tmp_path):
    toolchain = CountingToolchain()
    first = compile_once(kernel_dir, tmp_path / "cache", toolchain)
    listing = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert compile_once(kernel_dir, tmp_path / "cache", toolchain) == first
    assert toolchain.calls == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == listing
    assert len(listing) == 2 and first.path in listing


HEADERS = ("b.cuh", "c.cuh", "sub/b.cuh", "sub/d.cuh")


def including(content, names):
    """A file that includes others, by names from the directory of all."""
    return b"".join(b'#include "%s"\n' % name.encode() for name in names) + content.replace(b"#", b"")


# A source and headers, each of which includes some of those after it; a header may be there that nothing includes.
@st.composite
def file_sets(draw):
    names = ("a.cu", *draw(st.lists(st.sampled_from(HEADERS), unique=True).map(sorted)))
    content, after = st.binary(max_size=20), [names[i + 1 :] for i in range(len(names))]
    subsets = [st.lists(st.sampled_from(rest), unique=True) if rest else st.just([]) for rest in after]
    return {name: including(draw(content), draw(subset)) for name, subset in zip(names, subsets, strict=True)}


def used(files, name="a.cu"):
    """What a file is made of."""
    names = [line.split(b'"')[1].decode() for line in files[name].split(b"\n") if line.startswith(b"#include")]
    of_others = [used(files, other) for other in names]
    return {name: files[name]} | {key: content for files_of_one in of_others for key, content in files_of_one.items()}


@given(first=file_sets(), second=file_sets())
@example(first={"a.cu": b'#include "b.cuh"\n', "b.cuh": b"x"}, second={"a.cu": b'#include "b.cuh"\n', "b.cuh": b"y"})
@example(first={"a.cu": b"//"}, second={"a.cu": b"//", "c.cuh": b"that nothing includes"})
@settings(max_examples=examples(60))
def test_kernels_are_shared_exactly_when_what_they_are_made_of_is_equal(first, second):
    toolchain = CountingToolchain()
    with tempfile.TemporaryDirectory() as directory:
        write_files(f"{directory}/1", first)
        write_files(f"{directory}/2", second)
        compile_once(f"{directory}/1", f"{directory}/cache", toolchain)
        compile_once(f"{directory}/2", f"{directory}/cache", toolchain)
    assert toolchain.calls == (1 if used(first) == used(second) else 2)


@given(files=file_sets(), data=st.data())
@settings(max_examples=examples(60))
def test_any_changed_byte_of_what_is_included_compiles_again_and_changing_it_back_does_not(files, data):
    name = data.draw(st.sampled_from(sorted(files)))
    lines = files[name].split(b"\n")
    changed = {**files, name: b"\n".join([*lines[:-1], lines[-1] + data.draw(st.binary(min_size=1, max_size=3))])}
    again = 2 if name in used(files) else 1
    toolchain = CountingToolchain()
    with tempfile.TemporaryDirectory() as directory:
        for version, calls in ((files, 1), (changed, again), (files, again)):
            write_files(f"{directory}/kernels", version)
            compile_once(f"{directory}/kernels", f"{directory}/cache", toolchain)
            assert toolchain.calls == calls


@pytest.mark.parametrize(
    ("files", "how"),
    [
        ({"a.cu": b"  #  include <b.cuh>\n"}, {}),
        ({"a.cu": b"#include NAMED\n"}, {"defines": {"NAMED": '"b.cuh"'}}),
        ({"a.cu": b"#include OWN\n"}, {"own_headers": {"own.cuh": '#include "b.cuh"\n'}}),
        ({"sub/a.cu": b'#include "../b.cuh"\n'}, {"source": "sub/a.cu"}),
        (
            {"a.cu": b'#include "sub/d.cuh"\n', "sub/d.cuh": b'#include "e.cuh"\n', "sub/e.cuh": b'#include "b.cuh"\n'},
            {},
        ),
    ],
    ids=["angle brackets", "by a macro", "by a header of its own", "from a folder", "from the folder of a header"],
)
def test_a_header_counts_however_it_is_included(files, how, tmp_path):
    toolchain = CountingToolchain()
    request = {"source": "a.cu", "name": "kernel", "defines": {}, "arch": "sm_80"} | how
    for number in range(2):
        write_files(tmp_path / "kernels", files | {"b.cuh": b"// %d\n" % number})
        Compiler(tmp_path / "kernels", tmp_path / "cache", toolchain).compile(**request)
        assert toolchain.calls == number + 1


macros = st.from_regex(r"[A-Z_][A-Z0-9_]{0,4}", fullmatch=True)


define_sets = st.dictionaries(macros, st.integers(-4, 4) | st.sampled_from(["", "a", "a b", "-DX=1"]), max_size=4)


requests = st.tuples(define_sets, st.sampled_from(["sm_80", "sm_90", "sm_90a"]), st.sampled_from(["13.0", "13.1"]))


@given(first=requests, second=requests)
@settings(max_examples=examples(60))
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
@settings(max_examples=examples(30))
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
@settings(max_examples=examples(60))
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
            {"b.cuh": b'#line 1 "%s"\n' % str(Path(kernel_dir, "b.cuh")).encode() + FILES["b.cuh"]},
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
    program = "from cuflash.gpu.kernel_cache import private_directory as made; assert made().is_dir(); print(made())"
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
        "code = pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/compile/test_narrow_compile.py'])\n"
        "from cuflash.gpu import kernel_cache\n"
        "print(kernel_cache.cache_directory(), len(kernel_cache.cached_files(kernel_cache.cache_directory())))\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    directory, files = done.stdout.splitlines()[-1].split()
    assert Path(directory) == ROOT / "tests" / ".cache" and int(files) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="names of POSIX directories")
@pytest.mark.parametrize("chosen", ["~nosuchuser/x", "~nosuchuser", "~"])
def test_a_cache_in_the_home_of_nobody(monkeypatch, tmp_path, chosen):
    """Nothing but a warning, and nothing is made where the process happens to be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", chosen)
    monkeypatch.setenv("HOME", "relative")  # for the last one
    with pytest.warns(RuntimeWarning, match=f"^CUFLASH_CACHE_DIR: got '{chosen}', expected a directory"):
        directory = kernel_cache.cache_directory()
    assert directory == kernel_cache.private_directory() and directory.is_dir()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="names of POSIX directories")
def test_a_relative_home_is_none(monkeypatch, tmp_path):
    """It would lead elsewhere from each directory."""
    for variable in ("CUFLASH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    for home in ("relative", "./x", "x/../y"):
        monkeypatch.setenv("HOME", home)
        assert kernel_cache.cache_directory() == kernel_cache.private_directory()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_a_private_directory_of_its_own(kernel_dir, tmp_path):
    """Its parent removes its own when it ends."""
    (tmp_path / "file").write_text("not a directory")
    unlucky = Compiler(kernel_dir, tmp_path / "file" / "cache", CountingToolchain())
    with pytest.warns(RuntimeWarning, match="CUFLASH_CACHE_DIR"):
        before = unlucky.compile("a.cu", "kernel", {"NUMBER": 1}, "sm_80")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        shutil.rmtree(before.path.parent)  # as the parent does
        kernel = unlucky.compile("a.cu", "kernel", {"NUMBER": 1}, "sm_80")
        os.write(write, f"{kernel.path} {kernel.path.is_file()}".encode())
        shutil.rmtree(kernel.path.parent)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    path, was_there = os.read(read, 10_000).decode().split()
    assert was_there == "True" and Path(path).parent != before.path.parent
    before.path.parent.mkdir(exist_ok=True)  # for the end of this process


# ---- Whose work it is -----------------------------------------------------------------------------------------------


@pytest.fixture
def to_others(monkeypatch):
    """Gives files and directories to another user, or makes this process one of another user."""

    def give(*paths):
        if os.geteuid() == 0:
            for path in paths:
                os.chown(path, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)

    return give


def forged(kernel_dir, cache):
    """A kernel in a cache, with bytes that no compiler made, and all checksums right."""

    class Forging(CountingToolchain):
        def compile(self, *args):
            return b"forged" * 9, super().compile(*args)[1]

    return compile_once(kernel_dir, cache, Forging())


def assert_not_taken(kernel_dir, cache, words):
    toolchain = CountingToolchain()
    with pytest.warns(RuntimeWarning, match=words) as caught:
        kernel = compile_once(kernel_dir, cache, toolchain)
    assert len(caught) == 1 and str(cache) in str(caught[0].message)
    assert toolchain.calls == 1 and b"forged" not in kernel.path.read_bytes()
    assert kernel.path.parent == kernel_cache.private_directory()


needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files")


@needs_owners
def test_a_directory_is_made_for_this_user_alone(kernel_dir, tmp_path):
    before = os.umask(0)
    try:
        kernel = compile_once(kernel_dir, tmp_path / "more" / "cache", CountingToolchain())
    finally:
        os.umask(before)
    assert kernel.path.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in kernel.path.parent.iterdir()} == {0o600}


@needs_owners
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_not_trusted(kernel_dir, tmp_path, mode):
    cache = tmp_path / "cache"
    forged(kernel_dir, cache)
    cache.chmod(mode)
    assert_not_taken(kernel_dir, cache, "others may write to it .*`chmod go-w` ends")
    cache.chmod(0o755)
    assert b"forged" in compile_once(kernel_dir, cache, CountingToolchain()).path.read_bytes()


@needs_owners
def test_a_directory_of_others_is_not_trusted(kernel_dir, tmp_path, to_others):
    forged(kernel_dir, tmp_path / "cache")
    to_others(tmp_path / "cache")
    assert_not_taken(kernel_dir, tmp_path / "cache", "belongs to another user")


@needs_owners
@pytest.mark.parametrize("suffix", ["cubin", "entry"])
@pytest.mark.parametrize("mode", [None, 0o620, 0o666])
def test_files_of_others_are_compiled_again(kernel_dir, tmp_path, to_others, suffix, mode):
    """Those that lie in a directory of one's own, as from a time when others could write to it."""
    cache = tmp_path / "cache"
    forged(kernel_dir, cache)
    (file,) = cache.glob(f"*.{suffix}")
    if mode is None and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    to_others(file) if mode is None else file.chmod(mode)
    toolchain = CountingToolchain()
    kernel = compile_once(kernel_dir, cache, toolchain)
    assert toolchain.calls == 1 and kernel.path.parent == cache and b"forged" not in kernel.path.read_bytes()
    assert compile_once(kernel_dir, cache, toolchain) == kernel and toolchain.calls == 1


@needs_owners
def test_what_root_made_is_trusted(kernel_dir, tmp_path, monkeypatch):
    """Root can do anything as it is, and may fill a cache for all users."""
    forged(kernel_dir, tmp_path / "cache")
    (tmp_path / "cache").chmod(0o755)
    status = os.stat(tmp_path / "cache")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if status.st_uid == 0:
        assert b"forged" in compile_once(kernel_dir, tmp_path / "cache", CountingToolchain()).path.read_bytes()
    kernel_cache.check_own(tmp_path, os.stat_result((0o40755, 0, 0, 1, 0, 0, 0, 0, 0, 0)))
    with pytest.raises(PermissionError, match="belongs to another user, of number 7"):
        kernel_cache.check_own(tmp_path, os.stat_result((0o40755, 0, 0, 1, 7, 0, 0, 0, 0, 0)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text(max_size=5), own, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(100))
@given(st.data())
def test_entries_of_wrong_fields_are_compiled_again(data):
    """Whatever an entry says whose checksum is right, as one of another program."""
    toolchain = CountingToolchain()
    with tempfile.TemporaryDirectory() as directory:
        write_files(f"{directory}/kernels", FILES)
        kernel = compile_once(f"{directory}/kernels", f"{directory}/cache", toolchain)
        (entry,) = kernel.path.parent.glob("*.entry")
        content = json.loads(entry.read_bytes().partition(b"\n")[2])
        where = data.draw(st.sampled_from(("all", "cubin", "cubin_sha256", "resources", "of resources", "deep")))
        if where == "all":
            content = data.draw(JSON)
        elif where == "of resources":
            content["resources"][data.draw(st.sampled_from([*content["resources"], "more"]))] = data.draw(JSON)
        else:
            content[where] = data.draw(JSON)
        body = b"[" * 100_000 if where == "deep" else json.dumps(content).encode()
        entry.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        repaired = compile_once(f"{directory}/kernels", f"{directory}/cache", toolchain)
        assert repaired.path.read_bytes() == kernel.path.read_bytes()
        registers = repaired.resources.registers
        assert type(registers) is int and (registers == 40) == (toolchain.calls == 2 or where != "of resources" or
               content["resources"]["registers"] == 40)  # fmt: skip


def test_cache_directory_without_a_home(monkeypatch):
    for variable in ("CUFLASH_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert kernel_cache.cache_directory().is_dir()


@pytest.mark.parametrize(
    ("kernels", "is_found"),
    [("site/cuflash/kernels", True), ("site/kernels", True), ("kernels", False)],
    ids=["wheel", "checkout", "missing"],
)
def test_kernel_directory(tmp_path, kernels, is_found):
    """A stranger's package named kernels next to an installed cuflash is not taken for ours."""
    package = tmp_path / "site" / "cuflash"
    for folder in ("arrays", "score_mod", "spec", "plan", "gpu"):
        shutil.copytree(ROOT / "cuflash" / folder, package / folder)
    write_files(package, {"__init__.py": b""})
    write_files(tmp_path / "site" / "kernels", {"__init__.py": b""})
    write_files(tmp_path / kernels, {"ptx/base.cuh": b""})
    program = "from cuflash.gpu import compiler; print(compiler.kernel_directory())"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "site", capture_output=True, text=True)
    if is_found:
        assert Path(done.stdout.strip()) == (tmp_path / kernels).resolve()
    else:
        assert "FileNotFoundError: the CUDA sources of cuflash are in none of" in done.stderr
