"""What a fresh process waits for: imports, its first call, and the first call of each new shape.

Each contender runs in processes of its own. The first of them fills what is cached on disk, the second is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cuflash.gpu.progress import Bar

from .report import Record

HEADS, HEAD_DIM = 8, 64
SEQLENS = (512, 640, 1000, 1024, 1500, 2048, 3000, 4096, 777)  # of the first call, and of those of new shapes
MOST_SECONDS = 300
TITLES = {
    "cuflash": "cuflash",
    "cudnn": "cuDNN, by PyTorch",
    "fa2": "FlashAttention-2, by PyTorch",
    "torch": "PyTorch",
    "fa4": "FlashAttention-4",
}
CONTENDERS = {"gpu": ("cuflash", "cudnn", "fa2", "fa4"), "cpu": ("cuflash", "torch")}
IMPORTED = {
    ("cuflash", "gpu"): "cupy, cuflash",
    ("cuflash", "cpu"): "cuflash",
    ("fa4", "gpu"): "torch, flash_attn.cute",
    **{(name, backend): "torch" for name in ("cudnn", "fa2", "torch") for backend in CONTENDERS},
}
IMPORT = """
import time
start = time.perf_counter()
import {}
print('{{"status": "ok", "import_s": %g}}' % (time.perf_counter() - start))
"""

Call = Callable[[], object]


def measure(backend: str, write: Callable[..., None]) -> None:
    """Write a record for each contender: seconds of imports and of calls, or why there are none."""
    with Bar("first-call", total=len(CONTENDERS[backend])) as bar:
        for name in CONTENDERS[backend]:
            for _ in range(2):
                found = in_a_process("-c", IMPORT.format(IMPORTED[name, backend]))
                if found["status"] == "ok":
                    found |= in_a_process("-m", "bench.first_call", name, backend)
            write("first-call", contender=name, **found)
            bar.advance()


def in_a_process(*arguments: str) -> dict[str, Any]:
    """What a fresh process of Python prints last."""
    command = [sys.executable, *arguments]
    try:
        ended = subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"status": "absent", "reason": f"longer than {MOST_SECONDS} s"}
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        return {"status": "absent", "reason": (ended.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def of_this_process(name: str, backend: str) -> dict[str, Any]:
    """Seconds of calls in this process. Inputs are made, and a context with them, before calls are timed."""
    call_of, wait = _MAKERS[name](backend)
    calls = [call_of(seqlen) for seqlen in SEQLENS]
    wait()
    seconds = []
    for call in calls:
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    first, *of_shapes = seconds
    return {"status": "ok", "first_s": first, "shape_s": statistics.median(of_shapes), "most_s": max(of_shapes)}


def _cuflash(backend: str) -> tuple[Callable[[int], Call], Call]:
    cuflash: Any = importlib.import_module("cuflash")
    numpy: Any = importlib.import_module("numpy")
    attn = cuflash.FlashAttention(causal=True)
    if backend == "cpu":
        xp, dtype, wait = numpy, numpy.float32, _nothing
    else:
        xp, dtype = importlib.import_module("cupy"), numpy.float16
        wait = xp.cuda.runtime.deviceSynchronize

    def call_of(seqlen: int) -> Call:
        q = xp.ones((1, HEADS, seqlen, HEAD_DIM), dtype)
        return partial(attn.forward, q, q, q)

    return call_of, wait


def _torch(backend: str, kernels: str = "") -> tuple[Callable[[int], Call], Call]:
    torch: Any = importlib.import_module("torch")
    of_torch = torch.nn.attention
    chosen = of_torch.sdpa_kernel(getattr(of_torch.SDPBackend, kernels)) if kernels else None
    if chosen is not None:
        chosen.__enter__()  # for the rest of the process
    how = {"device": "cuda", "dtype": torch.float16} if backend == "gpu" else {"dtype": torch.float32}

    def call_of(seqlen: int) -> Call:
        q = torch.ones((1, HEADS, seqlen, HEAD_DIM), **how)
        return partial(torch.nn.functional.scaled_dot_product_attention, q, q, q, is_causal=True)

    return call_of, torch.cuda.synchronize if backend == "gpu" else _nothing


def _fa4(backend: str) -> tuple[Callable[[int], Call], Call]:
    torch: Any = importlib.import_module("torch")
    attention = importlib.import_module("flash_attn.cute").flash_attn_func

    def call_of(seqlen: int) -> Call:
        q = torch.ones((1, seqlen, HEADS, HEAD_DIM), device="cuda", dtype=torch.float16)
        return partial(attention, q, q, q, causal=True)

    return call_of, torch.cuda.synchronize


def _nothing() -> None:
    pass


_MAKERS: dict[str, Callable[[str], tuple[Callable[[int], Call], Call]]] = {
    "cuflash": _cuflash,
    "torch": _torch,
    "cudnn": partial(_torch, kernels="CUDNN_ATTENTION"),
    "fa2": partial(_torch, kernels="FLASH_ATTENTION"),
    "fa4": _fa4,
}


def markdown(records: Sequence[Record]) -> str:
    """The table of a run."""
    rows = [r for r in records if r["record"] == "first-call"]
    lines = [
        "Seconds in fresh processes, where kernels are cached on disk: until all is imported; of the first call, when "
        "inputs are there; and of the first call of each of eight other lengths, the median and the longest.",
        "",
        "| contender | imports | first call | a new shape | the longest of these |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        names = ("import_s", "first_s", "shape_s", "most_s")
        cells = [f"{r[x]:.3g}" if r["status"] == "ok" else "-" for x in names]
        lines.append(f"| {TITLES[r['contender']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time one contender in this process.")
    parser.add_argument("contender", choices=sorted(_MAKERS))
    parser.add_argument("backend", choices=sorted(CONTENDERS))
    given = parser.parse_args()
    print(json.dumps(of_this_process(given.contender, given.backend)))
