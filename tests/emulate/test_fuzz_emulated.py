"""One in 250 of the problems of `pytest -m fuzz`, by the real kernels in the emulator, each for one device."""

import itertools

import pytest

import cuflash.testing as ct
from cuflash.emulator import passes
from cuflash.spec.outputs import TAKEN_BY_BACKWARD
from cuflash.spec.passes import FORWARD, JVP
from cuflash.testing.float8 import assert_float8
from cuflash.testing.tangents import COTANGENTS
from tests import fuzz
from tests.emulate import attention
from tests.emulate.checks import judge_both_passes
from tests.emulate.reduced import reduced
from tests.pairs import Setting, judge, judge_weights, with_row_reductions

SUBNORMAL = fuzz.Trial(
    name="subnormal weights of out",
    case=ct.Case(
        seqlen_q=31,
        seqlen_k=121,
        head_dim=256,
        dtype="bfloat16",
        ndim=3,
        bias=(1, 1, 1, 1),
        kv_lengths=(118,),
        kv_lengths_dtype="int64",
        alibi_slopes=(1, 1),
        sinks=True,
        dropout=0.9,
        strides="transposed",
        score_spread=8.0,
        seed=23976,
    ),
    deterministic=True,
    precision="highest",
    need=("dk", "dbias", "dalibi_slopes", "dsinks"),
    given=(),
)
FLUSHED = fuzz.Trial(
    name="parts of dq that are subnormal",
    case=ct.Case(
        softcap=50.0,
        seqlen_q=371,
        seqlen_k=170,
        head_dim=40,
        num_heads=2,
        num_heads_kv=2,
        ndim=3,
        kv_lengths=(153,),
        alibi_slopes=(1, 2),
        dropout=0.9,
        block_mask=(2,),
        blocks_kept=0.9,
        factors=(("q", 2.0**96), ("k", 2.0**-96)),
        seed=61252,
    ),
    deterministic=False,
    precision="highest",
    need=("dq",),
    given=(),
)
OF_ONE_DEVICE = [
    number for number in range(fuzz.GROUPS) if fuzz.category_of(number) not in (*fuzz.OF_RANKS, fuzz.OF_STREAMED_KEYS)
]
SHARES = [OF_ONE_DEVICE[first : first + 25] for first in range(0, len(OF_ONE_DEVICE), 25)]


def with_tangents(trial, arrays, arch):
    """The results of the passes with tangents by name."""
    problem, how = trial.problem, {"arch": arch, **trial.case.random}
    tangents = {f"t{name}" for name in trial.moved.names}
    of_jvp = {name: x for name, x in arrays.items() if name not in (*TAKEN_BY_BACKWARD, *COTANGENTS)}
    results = dict(zip(JVP.default, passes.jvp(problem, of_jvp, **how), strict=True))
    assert {*of_jvp} >= tangents
    need = fuzz.served_need(trial, on_device=True, arch=arch)
    if need:
        found = passes.backward_jvp(problem, arrays | results, need=need, **how)
        results |= zip(need, found, strict=True)
    return results


@pytest.mark.parametrize(
    ("groups", "arch"),
    [*zip(SHARES, itertools.cycle(("8.0", "9.0")))],
    ids=lambda x: x if isinstance(x, str) else f"groups from {x[0]}",
)
def test_drawn_problems_agree_with_the_oracle(groups, arch):
    assert_agrees(fuzz.smallest(groups), arch)


@pytest.mark.parametrize("trial", [SUBNORMAL, FLUSHED], ids=lambda trial: trial.name)
def test_problems_that_were_wrong_agree_with_the_oracle(trial):
    assert_agrees(trial, "9.0")


def assert_agrees(trial, arch):
    case, arrays = trial.case, trial.arrays()
    if case.axes is not None:
        static = {"deterministic": trial.deterministic, "precision": trial.precision}
        results = attention.by_calls(case, arrays, "forward", arch=arch, **static)
        if trial.need:
            results |= attention.by_calls(case, arrays, "backward", arch=arch, need=trial.need, **static)
        judge(trial, results)
        return
    if case.row_reductions and trial.functions is None:
        options = {"deterministic": trial.deterministic, "precision": trial.precision}
        setting = Setting(case=case, chosen={}, **options)
        if trial.precision == "highest":
            judge_both_passes(with_row_reductions(setting), arch, trial.deterministic)
        judge_weights(setting, *reduced(case, arch, 16, **options))
        return
    problem = trial.problem
    if trial.moved is not None:
        judge(trial, with_tangents(trial, arrays, arch))
        return
    options = {"arch": arch, **case.random}
    of_forward = {name: x for name, x in arrays.items() if name not in ("dmax", "dentropy")}
    found = attention.forward(problem, of_forward, want=case.row_reductions, **options)
    results = dict(zip(("out", "lse", *case.row_reductions), found, strict=True))
    if trial.need:
        every = arrays | {name: results[name] for name in case.row_reductions if name == "entropy"}
        gradients = attention.backward(problem, every, *found[:2], need=trial.need, **options)
        results |= zip(trial.need, gradients, strict=True)
    if case.q_float8 and fuzz.multiplies_float8(passes.plan_for(problem, FORWARD, of_forward, arch)):
        assert_float8(case, results["out"], results["lse"])
    else:
        judge(trial, results)
