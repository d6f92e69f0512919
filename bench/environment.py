"""What a measurement ran on: revision, device, driver, library versions."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("cuflash", "numpy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "torch", "triton", "jax"),
    *("fa3-fwd", "flash-attn3-jax", "flash-attn-4", "nvidia-cutlass-dsl", "fold-attention", "nvidia-cudnn-frontend"),
    *("scipy", "scikit-learn", "pykeops", "flash-sinkhorn", "onnxruntime", "openvino"),
)
ROOT = Path(__file__).resolve().parents[1]


def _output_of(*command: str) -> str | None:
    """Standard output of a command, or None where it cannot run or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def revision() -> str:
    """Short git revision of the checkout, with "+" where files differ from it; "unknown" outside one."""
    commit = _output_of("git", "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+" if _output_of("git", "status", "--porcelain", "--untracked-files=no") else "")


def is_unchanged_since(revision: str, folder: str) -> bool:
    """Whether the sources in a folder are as in a commit but for comments, committed or not.

    False if git does not know that commit.
    """
    differing = _output_of("git", "diff", "--numstat", r"--ignore-matching-lines=^\s*//", revision, "--", folder)
    untracked = _output_of("git", "ls-files", "--others", "--exclude-standard", "--", folder)
    return differing == "" and untracked == ""


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> dict[str, Any]:
    cupy: Any = importlib.import_module("cupy")
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": properties["name"].decode(),
        "sms": properties["multiProcessorCount"],
        "l2_bytes": properties["l2CacheSize"],
        "driver": driver.splitlines()[0] if driver else "unknown",
        "cuda": _dotted(cupy.cuda.runtime.runtimeGetVersion()),
        "cuda_driver": _dotted(cupy.cuda.runtime.driverGetVersion()),
    }


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _cudnn_version() -> str | None:
    try:
        version = importlib.import_module("torch").backends.cudnn.version()
    except ImportError:
        return None
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(*, gpu: bool, revision_given: str | None = None) -> dict[str, Any]:
    """Everything that a later reader needs in order to judge a number."""
    facts: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision_given or revision(),
        "cpu": _cpu_name(),
        "cores": cores(),
        "versions": _versions(),
    }
    if gpu:
        facts |= _gpu()
        if cudnn := _cudnn_version():
            facts["versions"]["cudnn"] = cudnn
    return facts
