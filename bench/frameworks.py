"""What `cuflash.torch` and `cuflash.jax` add to the time of a call, without and with their compilers."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cuflash
from cuflash.arrays.array_info import numpy_dtype
from cuflash.gpu.progress import Bar

from .report import Record
from .timing import HostClock, time_host, time_interleaved

SHAPE, DTYPE = (1, 8, 256, 64), "bfloat16"  # the problem of the suite "host": the GPU takes less time than the host
PASSES = ("forward", "forward + backward")
BARE = "bare call"
ATTN = cuflash.FlashAttention(causal=True)

Call = Callable[[], Any]


@dataclass(frozen=True)
class Way:
    """A way to call both passes: calls by the name of the pass, and what waits for their results."""

    calls: Mapping[str, Call]
    wait: Callable[[Any], object]
    compiles: bool = False
    computes: bool = True


def measure(
    backend: str, write: Callable[..., None], *, samples: int = 30, calls_per_sample: int = 50, seconds: float = 0.1
) -> None:
    """Write a record for each pass of each way.

    `host_us` is the time until a call returns, `result_us` the time until its result is there. The two differ on a GPU
    alone. `first_s` is that of the first call, which compiles.
    """
    ways = _ways(backend)
    with Bar("frameworks", total=2 * len(ways)) as bar:
        for pass_ in PASSES:
            calls = {name: way.calls[pass_] for name, way in ways.items()}
            first, results = {}, {}
            for name, call in calls.items():
                start = time.perf_counter()
                results[name] = call()
                ways[name].wait(results[name])
                first[name] = time.perf_counter() - start

            def synchronize(results: Mapping[str, Any] = results) -> None:
                for name, result in results.items():
                    ways[name].wait(result)

            host = time_host(calls, synchronize, samples=samples, calls_per_sample=calls_per_sample)
            waited = {name: _waiting(call, ways[name].wait) for name, call in calls.items()}
            there = time_interleaved(waited, HostClock(), budget_s=seconds)
            for name, way in ways.items():
                times = {"host_us": host[name].median_us, "result_us": there[name].median_us}
                difference = _difference(results[name], results[BARE]) if way.computes else None
                compiling = {"first_s": first[name]} if way.compiles else {}
                write("frameworks", way=name, **{"pass": pass_}, difference=difference, **times, **compiling)
                bar.advance()


def _waiting(call: Call, wait: Callable[[Any], object]) -> Call:
    return lambda: wait(call())


def _difference(found: Sequence[Any], right: Sequence[Any]) -> float:
    """The largest difference between the results of two ways."""
    pairs = zip(map(_numbers, found), map(_numbers, right), strict=True)
    return max(float(abs(x - y).max()) for x, y in pairs)


def _numbers(x: Any) -> Any:
    if hasattr(x, "detach"):
        return x.detach().float().cpu().numpy()
    return np.asarray(x.get() if hasattr(x, "get") else x).astype(np.float32)


def _ways(backend: str) -> dict[str, Way]:
    """All ways whose library is installed."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(SHAPE, np.float32).astype(numpy_dtype(DTYPE)) for _ in range(4)]
    if backend == "gpu":
        cupy: Any = importlib.import_module("cupy")
        found = {BARE: _bare([cupy.asarray(x) for x in arrays], lambda _: cupy.cuda.get_current_stream().synchronize())}
    else:
        found = {BARE: _bare(arrays, lambda _: None)}
    for of_library in (_of_torch, _of_jax):
        try:
            found |= of_library(backend, arrays)
        except ImportError:
            continue
    return found


def _bare(arrays: Sequence[Any], wait: Callable[[Any], object]) -> Way:
    q, k, v, dout = arrays

    def both() -> tuple[Any, ...]:
        out, lse = ATTN.forward(q, k, v)
        return (out, *ATTN.backward(dout, q, k, v, out, lse))

    return Way({"forward": lambda: ATTN.forward(q, k, v)[:1], "forward + backward": both}, wait)


def _of_torch(backend: str, arrays: Sequence[Any]) -> dict[str, Way]:
    torch: Any = importlib.import_module("torch")
    of_cuflash = importlib.import_module("cuflash.torch").attention
    on_gpu = backend == "gpu"
    on_host = (torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in arrays)
    q, k, v, dout = (x.cuda() if on_gpu else x for x in on_host)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    synchronize = (lambda _: torch.cuda.synchronize()) if on_gpu else lambda _: None

    def way(function: Callable[..., Any], *, compiles: bool = False) -> Way:
        def both() -> tuple[Any, ...]:
            out = function(*leaves)
            return (out, *torch.autograd.grad(out, leaves, dout))

        calls = {"forward": lambda: (function(q, k, v),), "forward + backward": both}
        return Way(calls, synchronize, compiles=compiles)

    def in_this_thread(call: Call) -> Call:
        def run() -> Any:
            with torch.autograd.set_multithreading_enabled(False):
                return call()

        return run

    def attention(q: Any, k: Any, v: Any) -> Any:
        return of_cuflash(q, k, v, causal=True)

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    eager = way(attention)
    own_thread = {pass_: in_this_thread(call) for pass_, call in eager.calls.items()}
    return {
        "bare call on PyTorch tensors": _bare((q, k, v, dout), synchronize),
        "cuflash.torch": eager,
        "cuflash.torch, autograd in the calling thread": Way(own_thread, synchronize),
        "autograd function without kernels": replace(way(_no_kernels(torch)), computes=False),
        "cuflash.torch, torch.compile(fullgraph=True)": way(torch.compile(attention, fullgraph=True), compiles=True),
        "PyTorch's scaled_dot_product_attention": way(sdpa),
    }


def _no_kernels(torch: Any) -> Callable[..., Any]:
    """What autograd alone takes: a function that allocates results, and computes none."""

    class Function(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.save_for_backward(q, k, v)
            return q.new_empty(q.shape)

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            return tuple(x.new_empty(x.shape) for x in ctx.saved_tensors)

    return Function.apply  # type: ignore[no-any-return]


def _of_jax(backend: str, arrays: Sequence[Any]) -> dict[str, Way]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of the device's memory
    jax: Any = importlib.import_module("jax")
    of_cuflash = importlib.import_module("cuflash.jax").attention
    device = jax.devices("cuda" if backend == "gpu" else "cpu")[0]
    q, k, v, dout = (jax.device_put(x, device) for x in arrays)

    def forward(q: Any, k: Any, v: Any) -> Any:
        return (of_cuflash(q, k, v, causal=True),)

    def both(q: Any, k: Any, v: Any) -> Any:
        (out,), of_cotangents = jax.vjp(forward, q, k, v)
        return (out, *of_cotangents((dout,)))

    def way(wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *, compiles: bool = False) -> Way:
        functions = zip(PASSES, map(wrap, (forward, both)), strict=True)
        calls = {pass_: _applied(function, q, k, v) for pass_, function in functions}
        return Way(calls, jax.block_until_ready, compiles=compiles)

    return {
        "bare call on JAX arrays": _bare((q, k, v, dout), jax.block_until_ready),
        "cuflash.jax": way(lambda function: function),
        "cuflash.jax, jax.jit": way(jax.jit, compiles=True),
    }


def _applied(function: Callable[..., Any], *arrays: Any) -> Call:
    return lambda: function(*arrays)


# ---- What is shown ---------------------------------------------------------------------------------------------------


def markdown(records: Sequence[Record]) -> str:
    """A row for each way: its times, and what they are over those of the bare call."""
    rows = [r for r in records if r["record"] == "frameworks"]
    of = {(r["way"], r["pass"]): r for r in rows}
    lines = [
        "Microseconds, forward / forward + backward, of calls by `FlashAttention.forward` and `backward` (bare) and by "
        "the functions of the frameworks, with their autograd: until a call returns, how much longer that is than for "
        "the bare call, and until the result is there. Seconds of the first call, which compiles.",
        "",
        "| call | until it returns | over the bare call | until the result is there | first call |",
        "|---|---|---|---|---|",
    ]
    for way in dict.fromkeys(r["way"] for r in rows):
        own, bare = ([of[x, pass_] for pass_ in PASSES] for x in (way, BARE))
        over = [x["host_us"] - y["host_us"] for x, y in zip(own, bare, strict=True)]
        cells = [_both(x["host_us"] for x in own), _both(over) if way != BARE else "-"]
        cells += [
            _both(x["result_us"] for x in own),
            _both((x["first_s"] for x in own), ".2g") if "first_s" in own[0] else "-",
        ]
        lines.append(f"| {' | '.join((way, *cells))} |")
    return "\n".join(lines)


def _both(numbers: Any, digits: str = ".1f") -> str:
    return " / ".join(f"{x:{digits}}" for x in numbers)
