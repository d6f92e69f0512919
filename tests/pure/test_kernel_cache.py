"""How much the cache of compiled kernels takes: what is removed, and what stays."""

import multiprocessing
import os
import random
import time
import types

import pytest

from cuflash.gpu import compiler, kernel_cache
from tests.toolchain import CountingToolchain, store


@pytest.fixture
def filled(kernel_dir, tmp_path):
    """A cache of four kernels, used 9, 7, 5 and 3 hours ago, by their numbers; and the bytes of one of them."""
    cache = tmp_path / "cache"
    kernels = {hours: store(kernel_dir, cache, hours) for hours in (9, 7, 5, 3)}
    for hours, kernel in kernels.items():
        age(kernel, hours)
    return types.SimpleNamespace(cache=cache, kernels=kernels, kernel_bytes=size_of(cache) // 4)


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


@pytest.mark.parametrize("capacity", [5, 4, 3, 2, 1, 0])
def test_what_was_not_used_for_the_longest_time_goes_first(monkeypatch, kernel_dir, filled, capacity):
    limit = capacity * filled.kernel_bytes + 2_000  # lengths of reports vary a little
    monkeypatch.setenv("CUFLASH_CACHE_BYTES", str(limit))
    stored = store(kernel_dir, filled.cache, 0)
    assert stored.path.exists()
    assert left(filled) == [9, 7, 5, 3][5 - max(capacity, 1) :]
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


def fetch_and_load(kernel_dir, cache_dir):
    """A process that chooses one kernel after the other from a cache with space for few, and loads each."""
    os.environ["CUFLASH_CACHE_BYTES"] = "50000"
    kernel_cache.KEPT_SECONDS, kernel_cache.MARKED_SECONDS = 0.7, 0.1
    stop = time.monotonic() + 60
    toolchain, rng = CountingToolchain(cubin_bytes=3_200), random.Random(os.getpid())
    while toolchain.calls < 120:  # three processes compile each of the kernels once, and some that were removed
        assert time.monotonic() < stop, "nothing is removed"
        kernel = store(kernel_dir, cache_dir, rng.randrange(300), toolchain)
        time.sleep(0.004)  # others store, and remove, meanwhile
        assert len(kernel.path.read_bytes()) == 3_200


def test_no_process_loses_what_it_just_chose(kernel_dir, tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=fetch_and_load, args=(kernel_dir, tmp_path / "cache")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
