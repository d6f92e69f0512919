"""Tuning on the device: small problems, whose winner is found again and computes what the oracle says."""

from dataclasses import replace
from typing import Any

import pytest

import cuflash
import cuflash.testing as ct
from cuflash.testing.tangents import Moved, assert_tangents, tangents_by
from tests.gpu.planned import both_passes, plan_of

pytest.importorskip("cupy")

from cuflash.gpu import backend as gpu_backend
from cuflash.gpu import launch_cache, tuning
from cuflash.spec.passes import FORWARD, PASSES_WITHOUT_TANGENTS

pytestmark = pytest.mark.gpu

CASE = ct.Case(seqlen_q=300, seqlen_k=310, batch=2, num_heads=4, num_heads_kv=2, head_dim=64, dtype="bfloat16")


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    """A store of this test alone; and compiled kernels, which the next test compiles again."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_recalled", {})
    launch_cache.forget_launches()
    yield tmp_path / "tuned"
    launch_cache.forget_launches()


def new_process():
    """What this one remembers is gone, what is on disk stays."""
    tuning._recalled.clear()
    launch_cache.forget_launches()


def results(attn, case, arrays):
    inputs = ct.qkv(arrays)
    out, lse = attn.forward(*inputs, **ct.optional(arrays) | case.random)
    gradients = attn.backward(arrays["dout"], *inputs, out, lse, **ct.optional_backward(arrays) | case.random)
    return out, lse, *gradients


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_winner_is_found_again_and_right(cupy, store, dtype, deterministic):
    case = replace(CASE, dtype=dtype)
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(deterministic=deterministic)
    found = both_passes(attn.tune(*ct.qkv(arrays)))
    assert len(list(store.iterdir())) == 2
    for tuned in found:
        timed = [trial for trial in tuned.trials if trial.why_not is None]
        assert tuned.trials[0] in timed
        # Candidates fail by not compiling or spilling alone, never by other results.
        reasons = {(trial.why_not or "").split(" ")[0] for trial in tuned.trials}
        assert reasons <= {"", "spills", "does"}, tuned.describe()
        assert "winner" in tuned.describe() or "stays" in tuned.describe()
    new_process()
    plans = [plan_of(pass_, attn, *ct.qkv(arrays)) for pass_ in PASSES_WITHOUT_TANGENTS]
    for plan, tuned in zip(plans, found, strict=True):
        assert plan.tiles == tuned.winner.plan.tiles
        assert "tuned: " in plan.reason
    out, lse, *gradients = results(attn, case, arrays)
    ct.assert_forward(case, out, lse)
    ct.assert_backward(case, *gradients)


def test_every_candidate_is_as_right_as_the_first(cupy):
    """Each is remembered in its turn, and held against the oracle with every option."""
    shapes: dict[str, Any] = {"alibi_slopes": (4,), "mask": (300, 310), "kv_lengths": (7, 310)}
    case = replace(CASE, causal=True, softcap=5.0, dropout=0.2, **shapes)
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(**case.keywords)
    optional = ct.optional(arrays) | case.random
    for tuned in both_passes(attn.tune(*ct.qkv(arrays), **optional, remember=False)):
        for trial in tuned.trials:
            if trial.why_not is None:
                winner = tuning.Winner(tiles=trial.plan.tiles, tflops=1.0, table_tflops=1.0)
                tuning._recalled[tuning._file_of(tuned.trials[0].plan)] = winner
                launch_cache.forget_launches()
                out, lse, *gradients = results(attn, case, arrays)
                ct.assert_forward(case, out, lse)
                ct.assert_backward(case, *gradients)


@pytest.mark.parametrize("changes", [{"q_float8": True, "q_scale": "token"}, {}], ids=["products", "cache"])
def test_fp8_is_tuned(cupy, changes):
    """Tiles that multiply bytes round weights in other orders: all the same they agree."""
    case = replace(CASE, kv_dtype="float8_e4m3fn", k_scale="head", v_scale="head", **changes)
    arrays = case.arrays(cupy.asarray)
    found = cuflash.FlashAttention().tune(*ct.qkv(arrays), **ct.optional(arrays), passes=["forward"])
    assert found is not None and found.forward is not None
    assert {(trial.why_not or "").split(" ")[0] for trial in found.forward.trials} <= {"", "spills", "does"}


def test_other_strides_and_dout(cupy):
    case = replace(CASE, strides="transposed", layout="bshd", sinks=True)
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(layout="bshd")
    found = attn.tune(*ct.qkv(arrays), dout=arrays["dout"], sinks=arrays["sinks"])
    _, backward = both_passes(found)
    assert backward.trials[0].why_not is None


def test_one_pass_and_forgetting(cupy, store):
    arrays = CASE.arrays(cupy.asarray)
    inputs = ct.qkv(arrays)
    attn = cuflash.FlashAttention()
    found = attn.tune(*inputs, passes=["forward"])
    assert found is not None and found.backward is None
    assert "tuned: " in plan_of(FORWARD, attn, *inputs).reason
    assert attn.tune(*inputs, forget=True) is None
    assert not list(store.iterdir())
    assert "tuned: " not in plan_of(FORWARD, attn, *inputs).reason


def test_a_plan_with_other_results_is_not_timed(cupy):
    from cuflash.gpu import timing

    arrays = CASE.arrays(cupy.asarray)
    options = cuflash.FlashAttention().options
    plans, call_by = gpu_backend.trials(FORWARD, options, {name: arrays[name] for name in "qkv"}, (0, 0))
    calls = [0]

    def spoiled(plan):
        calls[0] += 1
        call, number = call_by(plan), calls[0]

        def run():
            out, lse = call()
            return (out, lse) if number == 1 else (2 * out, lse)

        return run

    watch = timing.Stopwatch(spoiled)
    assert watch.why_wrong(plans[0]) is None
    assert "out differs by" in str(watch.why_wrong(plans[0]))


def test_passes_with_tangents_are_planned_compiled_tuned_and_right(cupy, store):
    case, moved = replace(CASE, causal=True), Moved(names=("q", "k", "v"))
    attn = cuflash.FlashAttention(causal=True)
    call = {name: x for name, x in case.arrays(cupy.asarray).items() if name in ("q", "k", "v")}
    call |= moved.arrays(case, cupy.asarray)
    passes = ["jvp", "backward_jvp"]
    attn.compile(**call, passes=passes)
    found = attn.tune(**call, passes=passes)
    assert found is not None and found.forward is found.backward is None
    assert len(list(store.iterdir())) == 2
    new_process()
    plans: Any = attn.plan(**call, passes=passes)
    for plan, tuned in ((plans.jvp, found.jvp), (plans.backward_jvp, found.backward_jvp)):
        assert tuned is not None
        reasons = {(trial.why_not or "").split(" ")[0] for trial in tuned.trials}
        assert reasons <= {"", "spills", "does"}, tuned.describe()
        assert plan.tiles == tuned.winner.plan.tiles and "tuned: " in plan.reason
    assert_tangents(case, moved, tangents_by(attn, case, moved, convert=cupy.asarray))
