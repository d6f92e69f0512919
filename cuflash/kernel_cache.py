"""The directory on disk that compiled kernels are kept in: where it is, what it holds, and what is removed from it.

After a kernel is stored, the least recently used ones are removed if all of them together take more than
`cache_limit`. A lookup marks the files that it finds as used before it reads them, and nothing that was used within the
last hour is removed: so a file does not vanish between its lookup and the moment at which a device loads it, which
follows at once. A kernel that a lookup no longer finds is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

CACHE_BYTES = 1 << 30  # the cache may take so many unless CUFLASH_CACHE_BYTES says otherwise
KEPT_SECONDS: float = 3600  # a file that was used is kept for so long, whatever the limit is
MARKED_SECONDS: float = 600  # a file counts as just used for so long, so that most lookups write nothing


def cache_directory() -> Path:
    """Directory of compiled kernels; it is created when the first kernel is stored.

    `CUFLASH_CACHE_DIR` where that is set, else `$XDG_CACHE_HOME/cuflash`, else `~/.cache/cuflash`; on Windows
    `%LOCALAPPDATA%\\cuflash`. Without a home directory it is one of this process alone, removed when the process ends.
    """
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: a relative path is to be ignored
        return Path(base, "cuflash")
    try:
        return Path.home() / ".cache" / "cuflash"
    except RuntimeError:
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
    found = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith((".cubin", ".entry", ".tmp")):
                with contextlib.suppress(OSError):  # another process may just have removed it
                    status = entry.stat()
                    found.append(CachedFile(path=Path(entry.path), size_bytes=status.st_size, used=status.st_mtime))
    return found


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


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that any other process reads all of it or none."""
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def marked_as_used(path: Path) -> Path:
    """The path of a file, marked as used now unless it was a few minutes ago."""
    with contextlib.suppress(OSError):  # it is missing, which reading it will show, or others own it
        if time.time() - path.stat().st_mtime > MARKED_SECONDS:
            os.utime(path)
    return path


def private_instead(directory: Path, error: OSError) -> Path:
    """The directory of this process alone, in place of one that cannot be written, with a warning that says so."""
    warnings.warn(
        f"cuflash cannot store compiled kernels in {directory} ({error}); every process compiles them again. Set "
        "CUFLASH_CACHE_DIR to a directory that can be written.",
        RuntimeWarning,
        stacklevel=3,
    )
    return private_directory()


@functools.cache
def private_directory() -> Path:
    """A directory of this process alone, removed when it ends."""
    import atexit
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="cuflash-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not take its parent's
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory
