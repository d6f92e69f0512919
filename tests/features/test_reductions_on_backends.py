"""Reductions of rows and of attention weights, lse without values, and sinks: one list of cases for every backend."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume
from hypothesis import strategies as st

import cuflash.testing as ct
from tests import sampling
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.reductions import judge
from tests.row_reductions import BEHIND_SINKS, gap_is_clear, maxima_are_clear

DTYPES = ("float16", "bfloat16", "float32", "float64")
kernels = on_backends(
    {"emulated 9.0": DTYPES, "emulated 8.0": DTYPES, "emulated 7.5": DTYPES[:3], DEVICE: DTYPES}, emulated=24, device=24
)
# Nearly every problem that is drawn compiles kernels of its own.
every_backend = on_backends(
    (CORE, FALLBACK, DEVICE, *(("emulated 9.0", "emulated 8.0") if sampling.exhaustive else ()))
)
BOTH = ("max", "entropy")
KINDS: dict[str, dict[str, Any]] = {
    "reductions of rows": {"row_reductions": BOTH},
    "lse alone": {"has_values": False, "dlse": True},
    "sinks": {"sinks": True, "dlse": True},
    "reductions of weights": {},
}
DRAWN: dict[str, tuple[dict[str, Any], ...]] = {
    **{
        " and ".join(want): tuple({"row_reductions": want, "has_values": has} for has in (True, False))
        for want in (BOTH, ("max",), ("entropy",))
    },
    "lse alone or sinks": (KINDS["lse alone"], KINDS["sinks"]),
}


def options_for(rows: int, keys: int) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "dropout": {"causal": True, "dropout": 0.2, "sinks": True},
        "softcap": {"softcap": 5.0, "alibi_slopes": (4,), "window": (40, 9)},
        "bias of rows": {"bias": (1, 4, rows, 1), "causal": True},
        "bias and mask": {"bias": (1, 4, rows, keys), "bias_holes": True, "mask": (rows, keys), "head_dim": 128},
        "point": {"bias": (4, 1, 1), "head_dim": 3, "strides": "padded", "window": (40, 3)},
        "blocks": {"block_mask": (4,), "block_size": (32, 64), "head_dim": 192},
        "packed": {"cu_seqlens_q": (0, 40, rows), "cu_seqlens_k": (0, 90, keys - 3), "head_dim": 16},
        "lengths": {"batch": 2, "kv_lengths": (0, 77), "layout": "bshd"},
        "decode": {"seqlen_q": 1, "seqlen_k": 1300, "num_heads": 8, "num_heads_kv": 1, "scale": -0.2},
        "maxima that rise late": {"score_spread": 40.0, "seqlen_k": 400},
        "large scores": {"score_mean": 3e3, "causal": True},
        "256 columns": {"head_dim": 256, "causal": True},
    }


CACHES: dict[str, dict[str, Any]] = {
    "fp8": {"kv_dtype": "float8_e4m3fn", "k_scale": "token", "seqlen_q": 3, "seqlen_k": 900},
    "pages": {"page_size": 16, "seqlen_k": 208},
}


def check(backend, kind, dtype, options):
    rows, keys = (300, 1000) if backend.name == DEVICE else (113, 203)
    sizes: dict[str, Any] = {"seqlen_q": rows, "seqlen_k": keys, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
    own = options_for(rows, keys) | CACHES
    case = ct.Case(**sizes | {"dtype": dtype} | KINDS[kind] | own[options])
    if kind == "reductions of weights":
        judge(case, *backend.reduce(case, 16 if dtype == "bfloat16" else 60))
    else:
        backend.judge(case)


@kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", options_for(0, 0))
def test_every_option(backend, kind, dtype, options):
    check(backend, kind, dtype, options)


@on_backends({name: ("bfloat16",) for name in ("emulated 9.0", "emulated 8.0", DEVICE)})
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reductions of weights"])
@pytest.mark.parametrize("options", CACHES)
def test_caches(backend, kind, dtype, options):
    check(backend, kind, dtype, options)


@every_backend
@pytest.mark.parametrize("kinds", DRAWN.values(), ids=DRAWN)
def test_options_together(backend, kinds):
    of_cpu = backend.name in (CORE, FALLBACK)
    features = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", "packed", "lengths", *(("empty",) if of_cpu else ()))
    sizes = {"max_seqlen": 260, "max_head_dim": 130} if backend.name == DEVICE else {"max_seqlen": 129}
    drawn: dict[str, Any] = {"max_head_dim": 80, "max_scores": 2**13, "min_seqlen": 0 if of_cpu else 1} | sizes

    def holds(case, kind, deterministic):
        case = replace(case, **kind)
        assume("max" not in case.row_reductions or gap_is_clear(case))
        backend.judge(case, deterministic=deterministic)

    backend.draw(
        40 if backend.name == DEVICE else 100,
        holds,
        case=ct.cases(features=features, **drawn),
        kind=st.sampled_from(kinds),
        deterministic=st.booleans(),
    )


@every_backend
def test_one_key(backend):
    """Its weight is 1 to the last bit: the rule leaves one unit in the last place of the value, which TF32 takes."""
    packed: dict[str, Any] = {"cu_seqlens_q": (0, 97), "cu_seqlens_k": (0, 1), "row_reductions": BOTH}
    case = ct.Case(seqlen_q=97, seqlen_k=1, head_dim=24, num_heads=2, num_heads_kv=1, dtype="float32", **packed)
    for seed, score_spread in ((1, 1.0), (4, 10.0)):
        backend.judge(replace(case, seed=seed, score_spread=score_spread))


@every_backend
def test_the_gradient_of_a_maximum_alone(backend):
    """Sinks have all of the weight, so that a row of dq is one product, which tensor cores make of terms."""
    case = ct.Case(seqlen_q=3, seqlen_k=3, head_dim=128, num_heads=4, dtype="float32", sinks=True, score_spread=30.0)
    for seed in (8, 22, 23, 44, 50):
        backend.judge(replace(case, row_reductions=("max",), seed=seed))


@every_backend
def test_entropy_of_maxima_that_rise(backend):
    """Exponents relative to a row max far below the maximum would cancel."""
    case = ct.Case(seqlen_q=130, seqlen_k=300, head_dim=64, dtype="bfloat16", score_spread=6.0, seed=3)
    backend.judge(replace(case, row_reductions=("entropy",)))


@every_backend
def test_reductions_of_weights(backend):
    features = {
        CORE: ("sinks", "dropout", "packed", "lengths", "float8", "block_mask", "empty"),
        DEVICE: ("sinks", "packed", "lengths", "float8", "block_mask"),
    }.get(CORE if backend.name == FALLBACK else backend.name, ("sinks", "packed", "lengths", "block_mask"))
    sizes = {"max_seqlen": 513, "max_scores": 2**15, "max_head_dim": 256} if backend.name == DEVICE else {}
    drawn: dict[str, Any] = {"max_seqlen": 129, "max_head_dim": 80, "max_scores": 2**13} | sizes
    cases = ct.cases(features=(*ct.FEATURES, *features), min_seqlen=0 if "empty" in features else 1, **drawn)
    if backend.name in (CORE, FALLBACK):
        # Without a causal mask, the diagonal of a window and of slopes follows the lengths with pages alone.
        cases |= ct.cases(features=(*ct.FEATURES, *features[:5], "pages"), **drawn).map(
            lambda case: case if case.causal else replace(case, window=None, alibi_slopes=None)
        )

    def holds(case, count):
        weights, sums, largest, top = backend.reduce(case, count)
        assert {x.dtype for x in (sums, largest, top[1])} == {weights.dtype}
        judge(case, weights, sums, largest, top)

    backend.draw(300, holds, case=cases, count=st.sampled_from((1, 2, 7, 16, 33, 64)))


LONG: tuple[dict[str, Any], ...] = (
    {"head_dim": 2048, "dtype": "bfloat16", "causal": True, "sinks": True},
    {"head_dim": 4096, "dtype": "float16"},
    {"head_dim": 1100, "dtype": "float32", "bias": (1, 4, 200, 1)},
    {"head_dim": 1025, "dtype": "float64", "softcap": 5.0},
)


@on_backends((DEVICE,))
@pytest.mark.parametrize("options", LONG, ids=str)
def test_lse_of_long_heads(backend, options):
    sizes: dict[str, Any] = {"seqlen_q": 200, "seqlen_k": 333, "num_heads": 4, "num_heads_kv": 2}
    backend.judge(ct.Case(**sizes | KINDS["lse alone"] | options))


@on_backends((CORE, FALLBACK))
@pytest.mark.parametrize("bias_mask", [-2.5e38, -1.7e308])
def test_finite_masks_have_no_gradients(backend, bias_mask):
    """Products of the logarithm of a weight that is 0 and dentropy would overflow."""
    case = ct.Case(
        seqlen_q=13, seqlen_k=40, head_dim=8, dtype="float32" if bias_mask > -1e39 else "float64", bias=(1, 1, 13, 40),
        bias_mask=bias_mask, row_reductions=("entropy",),
    )  # fmt: skip
    backend.judge(case)


# ---- Maxima of which a sink leaves no weight -------------------------------------------------------------------------


@on_backends({CORE: DTYPES, FALLBACK: DTYPES, "emulated 8.0": DTYPES, "emulated 9.0": DTYPES[:3], DEVICE: DTYPES})
def test_maxima_have_gradients_whatever_a_sink_leaves_of_their_weight(backend, dtype):
    """The weight of the key is no factor of its gradient, but the derivative of the score is."""

    def holds(drawn):
        assume(maxima_are_clear(drawn.problem(dtype), drawn.arrays(dtype)))
        drawn.judge(dtype, backend.run)

    backend.draw(60, holds, drawn=BEHIND_SINKS)
