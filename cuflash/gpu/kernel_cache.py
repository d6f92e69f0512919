"""The directory on disk that compiled kernels are kept in: where it is, what it holds, and what is removed from it.

After a kernel is stored, the least recently used ones are removed if all of them together take more than
`cache_limit`. A lookup marks the files that it finds as used before it reads them, and nothing that was used within the
last hour is removed: so a file does not vanish between its lookup and the moment at which a device loads it, which
follows at once. A kernel that a lookup no longer finds is compiled again.

What is read runs on a device. So nothing is read that anybody but this user, or root, may have written: neither a file
of others nor one in a directory of others, or in one that others may write to.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

CACHE_BYTES = 1 << 30  # the cache may take so many unless CUFLASH_CACHE_BYTES says otherwise
KEPT_SECONDS: float = 3600  # a file that was used is kept for so long, whatever the limit is
MARKED_SECONDS: float = 600  # a file counts as just used for so long, so that most lookups write nothing
OPEN_SECONDS: float = 1  # on Windows a file is replaced once no other process reads it, if that is within this time


def cache_directory() -> Path:
    """Directory of compiled kernels; it is created when the first kernel is stored.

    `CUFLASH_CACHE_DIR` where that is set, else `$XDG_CACHE_HOME/cuflash`, else `~/.cache/cuflash`, on macOS
    `~/Library/Caches/cuflash`; on Windows `%LOCALAPPDATA%\\cuflash`. Without a home directory it is one of this process
    alone, removed when the process ends. So it is, with a RuntimeWarning, where `CUFLASH_CACHE_DIR` begins with the
    home directory of nobody.
    """
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    if chosen:
        with contextlib.suppress(RuntimeError):
            path = Path(chosen).expanduser()
            if path.is_absolute() or not chosen.startswith("~"):
                return path.absolute()
        warnings.warn(
            f"CUFLASH_CACHE_DIR: got {chosen!r}, expected a directory: there is no such home directory; every process "
            "compiles kernels again",
            RuntimeWarning,
            stacklevel=2,
        )
        return private_directory()
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: a relative path is to be ignored
        return Path(base, "cuflash")
    with contextlib.suppress(RuntimeError):
        home = Path.home()
        if home.is_absolute():  # HOME may be any text, and a relative path leads elsewhere from each directory
            return home.joinpath(*(("Library", "Caches") if sys.platform == "darwin" else (".cache",)), "cuflash")
    return private_directory()


def cache_limit() -> int:
    """Bytes that compiled kernels may take on disk: `CUFLASH_CACHE_BYTES` where that is set, else 1 GiB.

    If that is not a whole number, it counts as not set, with a RuntimeWarning.
    """
    chosen = os.environ.get("CUFLASH_CACHE_BYTES", "").strip()
    if re.fullmatch(r"\d{1,30}", chosen, re.ASCII):
        return int(chosen)
    if chosen:
        warnings.warn(
            f"CUFLASH_CACHE_BYTES: got {chosen!r}, expected a number of bytes; {CACHE_BYTES} is taken instead",
            RuntimeWarning,
            stacklevel=2,
        )
    return CACHE_BYTES


@dataclass(frozen=True, kw_only=True)
class CachedFile:
    """A file of the cache: where it is, its size, and when it was used the last time, in seconds of its file system."""

    path: Path
    size_bytes: int
    used: float


def cached_files(directory: Path) -> list[CachedFile]:
    """The files of a cache directory: two for each compiled kernel, and what killed processes left of others."""
    files = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith((".cubin", ".entry", ".tmp")):
                with contextlib.suppress(OSError):  # another process may just have removed it
                    status = entry.stat()
                    files.append(CachedFile(path=Path(entry.path), size_bytes=status.st_size, used=status.st_mtime))
    return files


def trim_cache(directory: Path, limit: int, now: float) -> None:
    """Remove the files that were not used for the longest time until the others take at most `limit` bytes.

    A file that was used within an hour before `now` is kept. `now` is the time of a file that was just stored, because
    the clock of the file system may differ from that of this machine.
    """
    files = sorted(cached_files(directory), key=lambda file: file.used)
    total = sum(file.size_bytes for file in files)
    for file in files:
        if total <= limit or file.used > now - KEPT_SECONDS:
            break
        with contextlib.suppress(OSError):
            if file.path.stat().st_mtime == file.used:  # no lookup has found it meanwhile
                file.path.unlink()
                total -= file.size_bytes


def clear_cache(directory: Path) -> list[CachedFile]:
    """Remove all compiled kernels, those that were just used too; returns the files that were removed.

    Processes that run keep the kernels that they have loaded.
    """
    removed = []
    for file in cached_files(directory):
        if file.path.suffix == ".tmp" and file.used > time.time() - KEPT_SECONDS:
            continue  # another process is writing it
        with contextlib.suppress(OSError):
            file.path.unlink()
            removed.append(file)
    return removed


def check_own(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError if others than this user and root own a file or a directory, or may write to it."""
    if not hasattr(os, "geteuid"):  # Windows says nothing of the kind by these numbers
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, f"it belongs to another user, of number {status.st_uid}", str(path))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"others may write to it (mode {stat.S_IMODE(status.st_mode):03o}), which `chmod go-w` ends"
        raise PermissionError(errno.EPERM, why, str(path))


def make_own_directory(path: Path) -> None:
    """Make a directory that nobody else may use. OSError if that fails, or if it is there and may be others' work."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(path, path.stat())


def read_own(path: Path) -> bytes:
    """The content of a file. OSError if it cannot be read, or if it or its directory may be others' work."""
    with path.open("rb") as file:
        check_own(path.parent, path.parent.stat())
        check_own(path, os.fstat(file.fileno()))
        return file.read()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that any other process reads all of it or none, and nobody else may write it."""
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
        _replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _replace(source: Path, target: Path) -> None:
    """Rename a file, over another one too. Windows does not while another process reads that one: it is tried again."""
    until = time.monotonic() + (OPEN_SECONDS if sys.platform == "win32" else 0)
    while True:
        try:
            return os.replace(source, target)
        except PermissionError:
            if time.monotonic() >= until:
                raise
        time.sleep(0.01)


def marked_as_used(path: Path) -> Path:
    """The path of a file, marked as used now unless it was a few minutes ago."""
    with contextlib.suppress(OSError):  # it is missing, which reading it will show, or others own it
        if time.time() - path.stat().st_mtime > MARKED_SECONDS:
            os.utime(path)
    return path


def warn_of_private_directory(directory: Path, error: OSError) -> None:
    """Say that `private_directory` is used in place of one that cannot be written, or that may be others' work."""
    warnings.warn(
        f"cuflash cannot store compiled kernels in {directory} ({error}); every process compiles them again. Set "
        "CUFLASH_CACHE_DIR to a directory that you, and nobody else, can write to.",
        RuntimeWarning,
        stacklevel=3,
    )


def private_directory() -> Path:
    """A directory of this process alone, removed when it ends. A child of fork gets another one."""
    return _private_directory(os.getpid())


@functools.cache
def _private_directory(process: int) -> Path:
    import atexit
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="cuflash-"))

    def remove() -> None:
        if os.getpid() == process:  # a forked child must not take its parent's
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory
