"""jvp and backward_jvp in the compiled core: threads, long problems, and who computes what.

`tests/pure/test_second_derivatives.py` holds every instruction set to the oracle rule.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash import cpu
from cuflash.cpu import core, fallback_tangents, score_mod_as_bias, score_tiles
from cuflash.testing.tangents import Moved, everything
from tests.compiled import INSTRUCTION_SETS, NUMPY, much_work, way_taken
from tests.judging import assert_same_bits
from tests.pure.test_second_derivatives import compute, judge
from tests.sampling import examples
from tests.scored import SCORES, Scored, scored

if core.why_not() is not None:
    pytest.skip(f"no compiled core: {core.why_not()}", allow_module_level=True)

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (90, 70)},
    "mask": {"mask": None},
    "block_mask": {"block_mask": (4,), "block_size": (64, 80), "blocks_kept": 0.5},
    "bias": {"bias": None, "causal": True},
    "bias of lengths": {"bias": None, "kv_lengths": None},
    "capped bias": {"bias": None, "softcap": 3.0},
    "alibi_slopes": {"alibi_slopes": (4,), "softcap": 3.0},
    "dropout": {"dropout": 0.3, "sinks": True, "dlse": True},
    "lengths": {"kv_lengths": None, "softcap": 2.0, "scale": -0.3},
    "large": {"score_mean": 3e3, "sinks": True},
}


@st.composite
def long_cases(draw):
    """Blocks of several heads or several groups of rows, and several tiles of keys."""
    seqlen_q, seqlen_k = draw(st.integers(1, 200)), draw(st.integers(130, 300))
    options = dict(OPTIONS[draw(st.sampled_from(list(OPTIONS)))])
    if "mask" in options:
        options["mask"] = (seqlen_q, seqlen_k)
    if "bias" in options:  # broadcast along any axes
        whole = (2, 4, seqlen_q, seqlen_k)
        options["bias"] = tuple(n if draw(st.booleans()) else 1 for n in whole)
    if "kv_lengths" in options:
        options["kv_lengths"] = (seqlen_k, seqlen_k // 3)
    heads = draw(st.sampled_from([(4, 4), (4, 2), (4, 1)]))
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
    head_dim, head_dim_v = (draw(st.sampled_from([5, 16, 33])) for _ in range(2))
    return ct.Case(
        batch=2, num_heads=heads[0], num_heads_kv=heads[1], seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, dtype=dtype, **options,
    )  # fmt: skip


@settings(max_examples=examples(30))
@given(long_cases())
def test_the_same_bits_on_any_number_of_threads(case):
    moved = replace(everything(case), common=10.0)
    with pytest.MonkeyPatch.context() as patch:
        much_work(patch)
        with cuflash.cpu_threads(3):
            results = compute(case, moved)
        judge(case, moved, results)
        with cuflash.cpu_threads(1):
            assert_same_bits(compute(case, moved), results)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("head_dim", [257, 1025])
def test_large_head_dims(head_dim, dtype):
    case = ct.Case(seqlen_q=50, seqlen_k=140, head_dim=head_dim, head_dim_v=1300 - head_dim, dtype=dtype, causal=True)
    judge(case, replace(everything(case), common=10.0), compute(case, replace(everything(case), common=10.0)))


@pytest.mark.parametrize(("seqlen_k", "heads", "softcap"), [(16, 1, None), (48, 2, 5.0)])
def test_dq_of_16_bits_without_space_for_its_sums(seqlen_k, heads, softcap):
    """Rows of tdq do not depend on each other: those of a slice of the queries are the same, and fit."""
    random, head_dim = np.random.default_rng(4), 64 // heads
    rows = (32 << 20) // (4 * heads * head_dim) + 1000
    some = random.standard_normal((4, 997, heads, head_dim)).astype(np.float16)
    of_rows = dict(zip(("q", "tq", "dout", "tdout"), some, strict=True))
    k, v, tk, tv = random.standard_normal((4, seqlen_k, 1, head_dim)).astype(np.float16)
    attention = cuflash.FlashAttention(softcap=softcap, layout="bshd")

    def tdq(first, stop):
        q, tq, dout, tdout = (x.take(np.arange(first, stop) % 997, axis=0) for x in of_rows.values())
        of_forward = attention.jvp(q, k, v, tq=tq, tk=tk, tv=tv)
        return attention.backward_jvp(
            dout, q, k, v, *of_forward, tq=tq, tk=tk, tv=tv, tdout=tdout, need=("tdq",)
        ).tdq.astype(np.float32)

    whole = tdq(0, rows)
    for first in (0, rows // 2, rows - 700):
        np.testing.assert_allclose(whole[first : first + 700], tdq(first, first + 700), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("sink", [-np.inf, -200.0, 0.0, 70.0])
def test_sinks_of_any_size(sink):
    """In rows that attend to keys, and in rows that attend to none, as NumPy computes them."""
    random = np.random.default_rng(0)
    q, k, v, tq, tk, tv, dout = random.standard_normal((7, 2, 150, 8))
    k, v, tk, tv = k[:, :70], v[:, :70], tk[:, :70], tv[:, :70]
    attention = cuflash.FlashAttention(causal=True)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "sinks": np.array([sink, 0.0])}
    tangents: dict[str, Any] = {"tq": tq, "tk": tk, "tv": tv, "tsinks": np.array([2.0, -3.0])}
    results = {}
    for way in (NUMPY[1], 0):
        with way_taken(way):
            of_forward = attention.jvp(**given, **tangents)
            need = ("tdq", "tdk", "tdv", "tdsinks")
            found = attention.backward_jvp(dout, **given, **of_forward._asdict(), **tangents, need=need)
        results[way] = (*of_forward, *found)
    for x, y in zip(*results.values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)


def test_infinite_tangents_of_hidden_keys_change_nothing():
    random = np.random.default_rng(1)
    q, k, v, tq, tk, dout = random.standard_normal((6, 2, 40, 8))
    mask = random.random((40, 40)) < 0.5
    mask[:, 7] = False
    attention, found = cuflash.FlashAttention(), []
    for value in (1.0, np.inf, np.nan):
        tk[:, 7] = value
        of_forward = attention.jvp(q, k, v, tq=tq, tk=tk, mask=mask)
        tangents = attention.backward_jvp(dout, q, k, v, *of_forward, tq=tq, tk=tk, mask=mask, need=("tdk", "tdv"))
        found.append((*of_forward, *tangents))
    for one, infinite, nan in zip(*found, strict=True):
        np.testing.assert_array_equal(one, infinite)
        np.testing.assert_array_equal(one, nan)


@pytest.mark.parametrize("shape", [(2, 3, 7, 40), (2, 1, 7, 40), (1, 3, 7, 40), (1, 3, 1, 40), (2, 3, 7, 1)])
def test_results_of_keys_past_the_lengths_are_zeros(shape):
    """Whatever was in the memory of these: no job computes these keys."""
    random = np.random.default_rng(5)
    q, dout = random.standard_normal((2, 2, 3, 7, 8))
    k, v = random.standard_normal((2, 2, 3, 40, 8))
    given: dict[str, Any] = {"bias": random.standard_normal(shape), "kv_lengths": np.array([0, 9])}
    attention = cuflash.FlashAttention()
    of_forward = attention.jvp(q, k, v, tq=q, **given)
    names = {"tdk": k.shape, "tdv": v.shape, "tdbias": shape}
    results: dict[str, Any] = {name: np.full(of, np.nan) for name, of in names.items()}
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, **of_forward._asdict()}
    attention.backward_jvp(dout, **inputs, tq=q, need=(), **given, **results)
    for entry, length in enumerate(given["kv_lengths"]):
        for name in ("tdk", "tdv"):
            assert not results[name][entry, :, length:].any()
            assert not np.isnan(results[name][entry]).any()
        if shape[0] == 2 and shape[3] == 40:
            assert not results["tdbias"][entry, ..., length:].any()
    assert not np.isnan(results["tdbias"]).any()


# ---- functions -------------------------------------------------------------------------------------------------------


def of_function(case, need, tangents):
    """Results of both passes."""
    given = {**case.optional, **case.random}
    of_forward = case.attention.jvp(*case.inputs, **given, **tangents)
    found = case.attention.backward_jvp(
        case.arrays["dout"], *case.inputs, **of_forward._asdict(), need=need, dlse=case.arrays["dlse"], **given,
        **tangents,
    )  # fmt: skip
    return (*of_forward, *found)


@settings(max_examples=examples(60))
@given(
    scored(dtypes=("float64", "bfloat16"), max_seqlen=130, scores=tuple(SCORES)),
    st.sampled_from((1600, 6000, 2**23)),
    st.data(),
)
def test_functions_however_a_call_is_cut(case, slice_bytes, data):
    """As NumPy computes them; the same bits on any number of threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_mod_as_bias, "FEW_PAIRS", -1)
        patch.setattr(score_mod_as_bias, "LINE", 50)
        patch.setattr(score_mod_as_bias, "SLICE_BYTES", slice_bytes)
        for module in (score_mod_as_bias, score_tiles):
            patch.setattr(module, "BLOCK", 16)
        patch.setattr(score_tiles, "KEYS", 32)
        for name in ("block_mask", "kv_lengths"):
            if score_mod_as_bias.why_not_tangents(case.problem, ()) is not None:
                own = {other: x for other, x in case.arrays.items() if other != name}
                case = Scored(case.attention, own, case.random, case.spelled)
        need = ("tdq", "tdk", "tdv")
        assert score_mod_as_bias.why_not_tangents(case.problem, need) is None
        names = [f"t{name}" for name in ("q", "k", "v", "bias", "alibi_slopes", "sinks") if name in case.arrays]
        names += case.problem.score_arg_tangents
        names = data.draw(st.lists(st.sampled_from(names), unique=True))
        random = np.random.default_rng(0)
        models = {name: case.arrays[name[1:]] for name in names}
        tangents = {name: random.standard_normal(x.shape).astype(x.dtype) for name, x in models.items()}
        if data.draw(st.booleans()):
            tangents["tscale"] = np.array(0.5, case.problem.softmax_dtype)
        with way_taken(NUMPY[1]):
            expected = of_function(case, need, tangents)
        patch.setattr(fallback_tangents, "run", None)
        with cuflash.cpu_threads(3):
            found = of_function(case, need, tangents)
        with cuflash.cpu_threads(1):
            alone = of_function(case, need, tangents)
    limit = 1e-10 if case.problem.dtype == "float64" else 0.03
    for x, y, z in zip(found, expected, alone, strict=True):
        np.testing.assert_array_equal(x, z)
        x, y = x.astype(np.float64), y.astype(np.float64)
        largest = np.abs(y, where=np.isfinite(y), out=np.zeros_like(y)).max(initial=0)
        np.testing.assert_allclose(x, y, rtol=limit, atol=limit * (1 + largest))


# ---- who computes ----------------------------------------------------------------------------------------------------


def by_numpy(monkeypatch, attention):
    """Which of the two passes NumPy computes."""
    passes: list[str] = []
    compute_pass = fallback_tangents.run

    def run(problem, arrays, pass_, seed, offset):
        passes.append(pass_.name)
        compute_pass(problem, arrays, pass_, seed, offset)

    monkeypatch.setattr(fallback_tangents, "run", run)
    q = np.random.default_rng(2).standard_normal((2, 5, 4))
    of_forward = attention.jvp(q, q, q, tq=q)
    attention.backward_jvp(q, q, q, q, *of_forward, tq=q, need=("tdq", "tdscale"))
    return passes


def test_the_core_computes_what_it_serves(monkeypatch, recwarn):
    assert by_numpy(monkeypatch, cuflash.FlashAttention(causal=True)) == []
    assert not recwarn.list


def test_numpy_computes_gradients_of_the_scale_with_functions(monkeypatch, recwarn):
    function = cuflash.FlashAttention(score=lambda s, i, j: s * abs(i - j))
    assert by_numpy(monkeypatch, function) == ["backward_jvp"]
    assert not recwarn.list


def test_without_a_core_there_is_a_warning(monkeypatch):
    cpu._warn_once.cache_clear()
    monkeypatch.setenv("CUFLASH_NO_CORE_WARNING", "0")
    with way_taken(NUMPY[1]), pytest.warns(RuntimeWarning, match="NumPy computes attention in place of the compiled"):
        by_numpy(monkeypatch, cuflash.FlashAttention())
    cpu._warn_once.cache_clear()


def test_every_instruction_set_has_tangents():
    """Those with products of bfloat16 leave tangents to others: results in bfloat16 are those of float32, rounded."""
    random = np.random.default_rng(3)
    arrays = [x.astype(ct.numpy_dtype("bfloat16")) for x in random.standard_normal((6, 2, 70, 16))]
    found = {}
    for dtype in ("bfloat16", "float32"):
        q, k, v, tq, tk, tv = (x.astype(ct.numpy_dtype(dtype)) for x in arrays)
        for name, way in INSTRUCTION_SETS:
            with way_taken(way):
                found[name, dtype] = cuflash.FlashAttention().jvp(q, k, v, tq=tq, tk=tk, tv=tv)
    for name, _ in INSTRUCTION_SETS:
        for x, y in zip(found[name, "bfloat16"], found[name, "float32"], strict=True):
            np.testing.assert_array_equal(x, y.astype(x.dtype))


LONG_SUMS = (
    ct.Case(
        seqlen_q=239, seqlen_k=5, head_dim=80, head_dim_v=80, batch=3, num_heads=4, num_heads_kv=2, dtype="float64",
        kv_lengths=(0, 2, 5), dropout=0.5, score_spread=30.0, seed=7191,
    ),
    Moved(names=("k", "v"), cotangents=(), common=100.0, seed=10245),
)  # fmt: skip
SMALL_WEIGHTS = (
    ct.Case(
        seqlen_q=94, seqlen_k=16, head_dim=1, head_dim_v=64, batch=2, num_heads=2, num_heads_kv=2, layout="bshd",
        causal="lengths", mask=(2, 2, 94, 1), kv_lengths=(5, 8), kv_lengths_dtype="int64", sinks=True, dlse=True,
        dropout=0.1, strides="padded", score_spread=30.0, seed=51698,
    ),
    Moved(names=("q", "scale"), cotangents=("tdlse",), common=10.0, seed=1214),
)  # fmt: skip


@pytest.mark.parametrize(("case", "moved"), [LONG_SUMS, SMALL_WEIGHTS], ids=["sums of 80 products", "small weights"])
def test_rounding_errors_do_not_add_up(case, moved):
    """Sums of more than 64 products are made of partial sums; the exponents of weights are not rounded."""
    judge(case, moved, compute(case, moved))
