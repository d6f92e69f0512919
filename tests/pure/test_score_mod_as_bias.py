"""Functions as a bias and masks of the compiled core, in many small slices, and the way without it, to the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.cpu import backend, core, gemm, score_mod_as_bias, score_tiles
from cuflash.score_mod.program import Traced
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.testing.rule import yardsticks
from tests.judging import assert_same_bits, assert_within
from tests.sampling import examples
from tests.scored import DRAWN, MASKS, SCORES, Scored, score_args_of, scored

needs_core = pytest.mark.skipif(core.why_not() is not None, reason=f"no compiled core: {core.why_not()}")


def is_served(case):
    return score_mod_as_bias.why_not(case.problem, (*DEFAULT_NEED, *case.problem.score_arg_gradients)) is None


def as_served(case):
    """The case, without options that do not go with its functions on this path."""
    for name in ("block_mask", "kv_lengths"):
        if not is_served(case):
            arrays = {other: x for other, x in case.arrays.items() if other != name}
            # Keys past the lengths count now. (nan_to_num leaves bfloat16 as it is.)
            keys = {
                other: np.where(np.isnan(x), np.zeros((), x.dtype), x) for other, x in arrays.items() if other in "kv"
            }
            case = replace(case, arrays=arrays | keys)
    assert is_served(case)
    return case


def results_of(case):
    out, lse = case.attention.forward(*case.inputs, **case.optional, **case.random)
    again = {"dlse": case.arrays["dlse"], **case.optional, **case.random}
    need = (*DEFAULT_NEED, *case.problem.score_arg_gradients)
    gradients = case.attention.backward(case.arrays["dout"], *case.inputs, out, lse, need=need, **again)
    return {"out": out, "lse": lse, **gradients._asdict()}


def forget():
    """Forget calls that were prepared for other limits."""
    backend._known.clear()
    backend._repeatable.cache_clear()


def judge(case, results):
    judges = yardsticks(case.problem, case.arrays, **case.random)
    assert_within(results, judges)


@needs_core
@pytest.mark.parametrize("score", [*SCORES, *DRAWN])
def test_results_obey_the_oracle_rule_however_a_call_is_cut(score, monkeypatch):
    monkeypatch.setattr(score_mod_as_bias, "FEW_PAIRS", -1)
    monkeypatch.setattr(score_mod_as_bias, "LINE", 50)
    monkeypatch.setattr(gemm, "PRODUCT_BLOCK", 24)
    monkeypatch.setattr(gemm, "PRODUCT_DEPTH", 5)
    for module in (score_mod_as_bias, score_tiles):
        monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(score_tiles, "KEYS", 32)

    @settings(max_examples=examples(12))
    @given(scored(max_seqlen=130, scores=(score,)), st.sampled_from((1600, 6000, 2**23)))
    def check(case, slice_bytes):
        case = as_served(case)
        monkeypatch.setattr(score_mod_as_bias, "SLICE_BYTES", slice_bytes)
        forget()
        results = results_of(case)
        judge(case, results)
        with cuflash.cpu_threads(3):
            for name, x in results_of(case).items():
                np.testing.assert_array_equal(x, results[name])

    check()
    forget()


@needs_core
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", [None, "plane", "tempered", "alibi"])
def test_a_mask_that_blocks_decide(score, causal):
    """No pair is asked by itself."""
    sizes = (1, 2, 4 * score_tiles.BLOCK, 4 * score_tiles.BLOCK)
    random = np.random.default_rng(5)
    arrays = {name: random.standard_normal((1, 2, sizes[2], 8)).astype(np.float32) for name in ("q", "k", "v", "dout")}
    arrays["dlse"] = random.standard_normal((1, 2, sizes[2])).astype(np.float32)
    functions = (SCORES[score] if score else None, MASKS["documents"])
    arrays |= score_args_of(functions, sizes, "float32", 5)
    arrays["kind_q"] = arrays["kind_k"] = np.repeat([0, 1], 2 * score_tiles.BLOCK)
    case = Scored(cuflash.FlashAttention(score=functions[0], mask=functions[1], causal=causal), arrays, {}, "")
    assert is_served(case)
    judge(case, results_of(case))


def capped(s, i, j, *, g):
    return cuflash.tanh(s) * g


@needs_core
@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=4, max_size=5),
    moved=st.sets(st.sampled_from(["tq", "tk", "tv", "tg"])),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    seed=st.integers(0, 2**16),
)
def test_what_lies_past_the_lengths_of_keys_is_never_read(lengths, moved, dtype, seed):
    """In no pass, where NumPy multiplies q and k: NaN there leaves the bits of all results as they are."""
    rng, batch = np.random.default_rng(seed), len(lengths)
    q, dout = rng.standard_normal((2, batch, 2, 33, 8)).astype(dtype)
    keys = dict(zip(("k", "v", "tk", "tv"), rng.standard_normal((4, batch, 1, 40, 8)).astype(dtype), strict=True))
    g = np.array(0.7, np.float64 if dtype == "float64" else np.float32)
    past = (np.arange(40) >= np.array(lengths)[:, None])[:, None, :, None]
    attn: Any = cuflash.FlashAttention(score=capped)

    def results(numbers):
        own = {name: np.where(past, np.array(numbers, dtype), x) for name, x in keys.items()}
        k, v, how = own.pop("k"), own.pop("v"), {"kv_lengths": np.array(lengths), "g": g}
        tangents = {name: x for name, x in {**own, "tq": q, "tg": g}.items() if name in moved}
        found = attn.jvp(q, k, v, **how, **tangents)
        gradients = attn.backward(dout, q, k, v, found.out, found.lse, **how, need=("dq", "dk", "dv", "dg"))
        return *found, *gradients, *attn.backward_jvp(dout, q, k, v, *found, **how, **tangents)

    assert_same_bits(results(np.nan), results(0))


@settings(max_examples=examples(20))
@given(scored(max_seqlen=130, follows_lengths=True))
def test_without_the_core_results_are_the_same_within_the_rule(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "why_not", lambda problem=None: "it is left out")
        judge(case, results_of(case))


@pytest.mark.parametrize(
    ("score", "is_sum"),
    [
        (lambda s, i, j: s, True),
        (lambda s, i, j: 2.0 + (s - i) - cuflash.floor(j / 3), True),
        (lambda s, i, j: s + cuflash.floor(s), False),
        (lambda s, i, j: i - s, False),
        (lambda s, i, j: s + s, False),
        (lambda s, i, j: s * 2, False),
        (lambda s, i, j: cuflash.where(i > j, s, s - 1), False),
        (lambda s, i, j: i - j, False),
    ],
)
def test_which_scores_are_sums(score, is_sum):
    program = Traced.of(score, "score").program(None, ())
    assert program.score is not None
    assert score_mod_as_bias.is_sum(program.score) == is_sum


@pytest.mark.parametrize("rows", [1, 5, 63, 64, 65, 200])
@pytest.mark.parametrize("columns", [1, 64, 150])
def test_a_product_of_stacks_is_the_product(rows, columns):
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, 1, rows, 120)), random.standard_normal((3, columns, 120)).swapaxes(1, 2)
    product = np.full((2, 3, columns, rows), np.nan).swapaxes(2, 3)
    gemm.multiply(a, b, product)
    np.testing.assert_allclose(product, a @ b, rtol=1e-13, atol=1e-12)


@given(st.integers(1, 9), st.integers(1, 9))
def test_sums_of_diagonals(rows, keys):
    x = np.random.default_rng(rows).standard_normal((2, rows, keys)).astype(np.float32)
    sums = score_tiles.sums_of_diagonals(x)
    assert sums.shape == (2, 1, rows + keys - 1)
    for d, column in zip(range(1 - keys, rows), sums[:, 0].T, strict=True):
        np.testing.assert_allclose(column, np.trace(x, -d, 1, 2, dtype=np.float64), rtol=1e-6, atol=1e-6)
