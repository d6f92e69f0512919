"""Both passes of a case by the emulator, and how tests hold their results against each other and the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES, passes
from cuflash.plan import DeviceSpec
from cuflash.plan.tiles import round_up
from tests.emulate import attention
from tests.emulate.attention import problem_of
from tests.emulate.specialisations import poison
from tests.judging import assert_within

either_kernel = pytest.mark.parametrize("arch", ["8.0", "9.0"])  # of the forward pass, where arrays are aligned
schedules = st.sampled_from(SCHEDULES)
FEW = settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])

CASE = ct.Case(
    seqlen_q=70,
    seqlen_k=150,
    batch=2,
    num_heads=2,
    num_heads_kv=1,
    head_dim=48,
    head_dim_v=40,
    dtype="float16",
    causal=True,
    window=(40, None),
    kv_lengths=(150, 77),
    seed=1,
)


def all_results(case, *, deterministic=False, precision="highest", forward_tiles=None, backward_tiles=None, **options):
    """out, lse, dq, dk, dv, maybe dsinks, by name: the backward pass works on what the forward pass made."""
    arrays = case.arrays()
    problem = problem_of(case, arrays, deterministic=deterministic, precision=precision)
    options |= case.random
    out, lse = attention.forward(problem, arrays, tiles=forward_tiles, **options)
    gradients = attention.backward(problem, arrays, out, lse, tiles=backward_tiles, **options)
    names = ("out", "lse", "dq", "dk", "dv", *(("dsinks",) if case.sinks else ()))
    return dict(zip(names, (out, lse, *gradients), strict=True))


EDGES: dict[str, dict[str, Any]] = {
    "one pair": {"seqlen_q": 1, "seqlen_k": 1},
    "one query": {"seqlen_q": 1, "seqlen_k": 201},
    "one key": {"seqlen_q": 201, "seqlen_k": 1},
    "no keys": {"seqlen_q": 70, "seqlen_k": 0},
    "no queries": {"seqlen_q": 0, "seqlen_k": 70},
    "nothing at all": {"seqlen_q": 0, "seqlen_k": 0},
    "no heads": {"seqlen_q": 20, "seqlen_k": 20, "num_heads": 0},
    "no batch": {"seqlen_q": 20, "seqlen_k": 20, "batch": 0},
    "no lengths": {"seqlen_q": 70, "seqlen_k": 140, "batch": 2, "kv_lengths": (0, 0)},
    "lengths of one": {"seqlen_q": 70, "seqlen_k": 140, "batch": 2, "kv_lengths": (1, 0)},
    "lengths at the edges of tiles": {
        "seqlen_q": 33,
        "seqlen_k": 140,
        "batch": 5,
        "kv_lengths": (63, 64, 65, 127, 129),
    },
    "blocks of queries before the first key": {"seqlen_q": 300, "seqlen_k": 5, "causal": True},
    "blocks of keys that no query sees": {"seqlen_q": 5, "seqlen_k": 300, "causal": "top_left"},
    "blocks of queries past the window": {"seqlen_q": 300, "seqlen_k": 9, "causal": "top_left", "window": (2, None)},
    "only the diagonal": {"seqlen_q": 150, "seqlen_k": 150, "window": (0, 0)},
    "many heads": {"seqlen_q": 3, "seqlen_k": 3, "batch": 3, "num_heads": 40},
    "many heads, longest tiles first": {"seqlen_q": 70, "seqlen_k": 70, "batch": 3, "num_heads": 13, "causal": True},
}


def judge(problem, arrays, results):
    """Hold results by name against the oracle, for arrays that no `Case` makes."""
    yardsticks = ct.yardsticks(problem, arrays)
    assert_within(results, yardsticks)


def judge_functions(case, arch="8.0", *, score_args=True, **options):
    """Hold both passes of a problem whose scores or masks are functions against the oracle.

    With `score_args`, the gradients of arrays that the score reads, too.
    """
    arrays = case.arrays
    every = {**options, **case.random, "arch": arch}
    inputs = {name: x for name, x in arrays.items() if name != "dlse"}
    out, lse = attention.forward(case.problem, inputs, **every)
    left_out = ("dsinks", *(() if score_args else case.problem.score_arg_gradients))
    need = [name for name in ct.gradients_of(case.problem) if name not in left_out]
    gradients = attention.backward(case.problem, arrays, out, lse, need=need, **every)
    judges = ct.yardsticks(case.problem, arrays, **case.random)
    results = {"out": out, "lse": lse, **dict(zip(need, gradients, strict=True))}
    assert_within(results, judges)


def run_both(problem, arrays, **options):
    out, lse = attention.forward(problem, arrays, **options)
    gradients = attention.backward(problem, arrays, out, lse, **options)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def rounded_to_tf32(x):
    """To nearest, ties away from zero, as the kernels round."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


FEW_SMS = replace(DeviceSpec.for_arch("9.0"), num_sms=2)


def rising(tile, dtype, **options):
    """A problem whose scores rise from tile to tile: keys come last first, the first ones are the most alike to q.

    From one tile to the next, scores of the even rows rise by `rise` units of log2, beyond what a tile may sum up to;
    those of the odd rows fall.
    """
    num_tiles, rise = 4, {"float16": 20.0, "bfloat16": 40.0}[dtype]
    seqlen_k = tile.block_n * num_tiles - 3
    case = ct.Case(seqlen_q=67, seqlen_k=seqlen_k, head_dim=16, dtype=dtype, scale=1.0, score_spread=0.5, **options)
    arrays = case.arrays()
    n_block = np.arange(seqlen_k) // tile.block_n
    # The first column carries the rise alone: +-1 in q, the size in k; both are exact.
    arrays["q"][..., 0] = np.where(np.arange(67) % 2, -1, 1)
    arrays["k"][..., 0] = np.round((num_tiles - 1 - 2 * n_block) / 2 * rise * np.log(2))
    if options.get("alibi_slopes"):
        arrays["alibi_slopes"][...] = 2**-6  # of what the rise does not hide
    return case, problem_of(case, arrays), arrays


def framed(frames, *, aligned=False):
    """Allocates arrays within NaN; `frames` collects what surrounds them and where they are in it.

    With `aligned`, rows begin at multiples of 16 bytes.
    """

    def allocate(array):
        leads = [2] * (array.ndim - 1) + [8 if aligned else 2]
        shape = [n + 2 * lead for n, lead in zip(array.shape, leads, strict=True)]
        if aligned:
            shape[-1] = round_up(shape[-1], 8)
        frame = attention.guarded(np.full(shape, poison(array.dtype), array.dtype))
        inside = tuple(slice(lead, n + lead) for n, lead in zip(array.shape, leads, strict=True))
        frame[inside] = array
        frames.append((frame, inside))
        return frame[inside]

    return allocate


def assert_only_noise(frames, count):
    """Around each of `count` arrays everything is still NaN."""
    assert len(frames) == count
    for frame, inside in frames:
        frame[inside] = np.nan
        assert np.isnan(frame.astype(np.float32)).all()


# Every option and every kernel.
SANITIZED = replace(CASE, bias=(150,), mask=(70, 150), softcap=5.0, alibi_slopes=(2,), bias_dtype="input", dropout=0.2)


def judge_both_passes(case: ct.Case, arch: str | DeviceSpec, deterministic: bool = False, **options: Any) -> None:
    """Hold both passes of a case to the oracle rule: all gradients, row reductions and their gradients, too."""
    arrays, problem, want = case.arrays(), replace(case.problem, deterministic=deterministic), case.row_reductions
    if case.axes is not None:
        options |= {"arch": arch, "deterministic": deterministic}
        ct.assert_forward(case, **attention.by_calls(case, arrays, "forward", **options))
        need = ct.gradients_of(problem)
        ct.assert_backward(case, **attention.by_calls(case, arrays, "backward", need=need, **options))
        return
    options |= {"arch": arch, **case.random}
    of_rows = ("dout", "dlse", *(f"d{name}" for name in want))
    found = passes.forward(
        problem, {name: x for name, x in arrays.items() if name not in of_rows}, want=want, **options
    )
    results = dict(zip(("out", "lse", *want), found, strict=True))
    ct.assert_forward(case, **results)
    if "dout" not in arrays:
        return
    need = ct.gradients_of(problem)
    every = arrays | {name: results[name] for name in want if name == "entropy"}
    gradients = passes.backward(problem, every, results["out"], results["lse"], need=need, **options)
    ct.assert_backward(case, **dict(zip(need, gradients, strict=True)))
