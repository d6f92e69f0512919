"""``demo``: a long causal problem forward and backward, timed and checked."""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np

from cuflash import FlashAttention
from cuflash.arrays.array_info import DTYPES, numpy_dtype
from cuflash.arrays.units import in_bytes, in_flops, in_seconds
from cuflash.cli import here
from cuflash.cli.arguments import add_backend_argument, positive
from cuflash.cli.here import Failure
from cuflash.cli.sampled import NUM_SAMPLES, Sampled, sample_errors
from cuflash.gpu.progress import Bar
from cuflash.spec.options import Options
from cuflash.spec.problem import Problem, make_problem


def add_demo_arguments(command: argparse.ArgumentParser) -> None:
    add_backend_argument(command)
    dtypes = f"of {', '.join(DTYPES)} (default: bfloat16 on a GPU, float32 on a CPU)"
    command.add_argument(
        "--seqlen", type=positive, metavar="N", help="queries and keys (default: 65536 on a GPU, 16384 on a CPU)"
    )
    command.add_argument("--num-heads", type=positive, metavar="N", help="heads (default: 16 on a GPU, 8 on a CPU)")
    command.add_argument(
        "--head-dim", type=positive, metavar="D", help="head dimension (default: 128 on a GPU, 64 on a CPU)"
    )
    command.add_argument("--dtype", choices=DTYPES, metavar="DTYPE", help=dtypes)


class Cost(NamedTuple):
    """What one pass took."""

    seconds: float
    extra_bytes: int  # at the peak, besides inputs and results


def demo(args: argparse.Namespace) -> int:
    xp = here.array_module(args.backend)
    on_gpu = xp is not np
    num_heads, head_dim = args.num_heads or (16 if on_gpu else 8), args.head_dim or (128 if on_gpu else 64)
    dtype = numpy_dtype(args.dtype or ("bfloat16" if on_gpu else "float32"))
    seqlen = args.seqlen or (longest_that_fits(xp, num_heads * head_dim * dtype.itemsize) if on_gpu else 16384)
    print(f"causal attention of {num_heads} heads, seqlen {seqlen}, head_dim {head_dim}, {dtype.name}")
    print(f"forward and backward on {here.describe_here(xp)}\n", flush=True)
    rng = xp.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((num_heads, seqlen, head_dim), xp.float32).astype(dtype) for _ in range(4))
    out, dq, dk, dv = (xp.empty_like(q) for _ in range(4))
    options = Options(causal=True)
    problem = make_problem(options, q, k, v)
    lse = xp.empty(problem.lse_shape, problem.softmax_dtype)
    # On the CPU one head at a time, which takes as long as all at once and lets the bar move.
    head_slices = [slice(None)] if on_gpu else [slice(head, head + 1) for head in range(num_heads)]
    attn = FlashAttention(causal=True)

    def forward(h: slice) -> None:
        attn.forward(q[h], k[h], v[h], out=out[h], lse=lse[h])

    def backward(h: slice) -> None:
        attn.backward(dout[h], q[h], k[h], v[h], out[h], lse[h], dq=dq[h], dk=dk[h], dv=dv[h])

    measure = measure_on_gpu if on_gpu else measure_on_cpu
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    with Bar("compiling", total=1 + 2 * len(head_slices) + 2 * NUM_SAMPLES) as bar:
        attn.compile(q, k, v)
        bar.advance()
        costs = {}
        for run in (forward, backward):
            bar.label = run.__name__
            costs[bar.label] = measure(run, head_slices, bar)
        bar.label = "float64 reference"
        sampled = sample_errors(options, arrays, bar)
    print_costs(problem, costs)
    print_errors(dtype.name, sampled)
    if not all(s.is_allowed for s in sampled.values()):
        raise Failure("a result is further from the float64 reference than the plain formula's error allows")
    return 0


def print_costs(problem: Problem, costs: dict[str, Cost]) -> None:
    print(f"{'':<10}{'time':>12}{'rate':>16}{'extra memory':>16}")
    for name, flops in (("forward", problem.forward_flops), ("backward", problem.backward_flops)):
        seconds, extra_bytes = costs[name]
        print(f"{name:<10}{in_seconds(seconds):>12}{in_flops(flops / seconds):>16}{in_bytes(extra_bytes):>16}")
    print(f"\nInputs, results and gradients take {in_bytes(8 * problem.q.nbytes)}. The plain formula stores")
    print(f"one matrix of scores forward, {in_bytes(problem.naive_bytes)}, and several backward.\n")


def longest_that_fits(xp: ModuleType, bytes_per_row: int) -> int:
    """65536, or less on a GPU whose free memory does not hold the arrays of such a problem twice."""
    seqlen = 65536
    while seqlen > 1024 and 2 * 10 * seqlen * bytes_per_row > xp.cuda.Device().mem_info[0]:
        seqlen //= 2
    return seqlen


def measure_on_cpu(run: Callable[[slice], None], head_slices: list[slice], bar: Bar) -> Cost:
    tracemalloc.start()  # NumPy reports what it allocates
    start = time.perf_counter()
    for heads in head_slices:
        run(heads)
        bar.advance()
    seconds = time.perf_counter() - start
    extra_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Cost(seconds, extra_bytes)


def measure_on_gpu(run: Callable[[slice], None], head_slices: list[slice], bar: Bar) -> Cost:
    import cupy

    pool = cupy.cuda.MemoryPool()  # an empty one, so that it ends up as large as what the call needed
    times = []
    with cupy.cuda.using_allocator(pool.malloc):
        for _ in range(4):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            for heads in head_slices:
                run(heads)
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    for _ in head_slices:
        bar.advance()
    extra_bytes = pool.total_bytes()
    pool.free_all_blocks()  # which would stay even without the pool
    return Cost(statistics.median(times[1:]), extra_bytes)


def print_errors(dtype: str, sampled: dict[str, Sampled]) -> None:
    print(f"Errors against float64 at {NUM_SAMPLES} sampled rows and keys, where they are most of what is allowed:")
    print(f"{'':<10}{'error':>12}{f'plain {dtype}':>16}{'allowed':>16}")
    for name, s in sampled.items():
        error, plain_error, allowed = s.worst
        print(f"{name:<10}{error:>12.2e}{plain_error:>16.2e}{allowed:>16.2e}{'' if s.is_allowed else '  FAILED'}")
