"""Reductions by the compiled core, of rows and of weights: splits of keys, threads, bits, and who computes them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.cpu import core, fallback
from cuflash.cpu.jobs import cpu_threads
from tests.compiled import INSTRUCTION_SETS, NUMPY, much_work, way_taken
from tests.judging import assert_same_bits
from tests.reductions import attention_of, inputs_of, judge, lse_of
from tests.row_reductions import gap_is_clear, results_of
from tests.sampling import examples

if core.why_not() is not None:
    pytest.skip(f"no compiled core: {core.why_not()}", allow_module_level=True)

BOTH = ("max", "entropy")
DTYPES = st.sampled_from(("float16", "bfloat16", "float32", "float64"))
WAYS = st.sampled_from([way for _, way in INSTRUCTION_SETS])
# Few rows, whose keys several jobs split; blocks of several heads; small heads.
SIZES = st.sampled_from(((1, 2400), (3, 2400), (40, 1300), (150, 520), (17, 90), (128, 128), (1, 16)))


def cases(**more: Any):
    """Cases of several tiles, with or without values."""
    sizes = SIZES | st.tuples(st.integers(1, 200), st.integers(1, 600))
    return st.builds(
        lambda size, **own: ct.Case(seqlen_q=size[0], seqlen_k=size[1], num_heads=4, row_reductions=BOTH, **own),
        size=sizes,
        **{
            "dtype": DTYPES,
            "num_heads_kv": st.sampled_from((1, 2, 4)),
            "head_dim": st.sampled_from((8, 40, 64)),
            "causal": st.booleans(),
            "sinks": st.booleans(),
            "softcap": st.sampled_from((None, None, 3.0)),
            "dropout": st.sampled_from((0.0, 0.0, 0.3)),
            "score_spread": st.sampled_from((1.0, 4.0, 30.0)),
            "seed": st.integers(0, 2**16),
        }
        | more,
    )


@settings(max_examples=examples(160))
@given(way=WAYS, case=cases(has_values=st.booleans()))
def test_several_tiles_and_splits_keep_the_oracle_rule(way, case):
    assume(gap_is_clear(case))
    with way_taken(way):
        found = results_of(case)
    ct.assert_forward(case, **found.forward)
    ct.assert_backward(case, **found.gradients)


def test_small_entropies_have_their_digits():
    """Of rows with most of their weight on one key, whatever the row max of the softmax lags."""
    case = ct.Case(
        seqlen_q=300, seqlen_k=300, num_heads=4, num_heads_kv=1, head_dim=40, sinks=True, score_spread=4.0, seed=340,
        row_reductions=BOTH,
    )  # fmt: skip
    ct.assert_forward(case, **results_of(case).forward)


@settings(max_examples=examples(60))
@given(
    way=st.sampled_from([way for _, way in (*INSTRUCTION_SETS, NUMPY)]),
    case=cases(causal=st.just(False)),
    value=st.sampled_from((np.nan, np.inf)),
    data=st.data(),
)
def test_maxima_of_scores_that_are_no_numbers(way, case, value, data):
    """A row has a maximum of NaN or infinity where one of its scores is, and only there."""
    case = replace(case, bias=(case.seqlen_q, case.seqlen_k))
    arrays = case.arrays()
    row = data.draw(st.integers(0, case.seqlen_q - 1))
    arrays["bias"][row, data.draw(st.integers(0, case.seqlen_k - 1))] = value
    attn: Any = cuflash.FlashAttention(**case.keywords)
    with way_taken(way), np.errstate(invalid="ignore"):
        found = attn.forward(*ct.qkv(arrays), want=("max",), **ct.optional(arrays), **case.random)
    np.testing.assert_array_equal(found.max[0, :, row], np.full(case.num_heads, value))
    assert np.isfinite(np.delete(found.max[0], row, axis=1)).all()


@settings(max_examples=examples(80))
@given(way=WAYS, case=cases())
def test_other_results_and_any_number_of_threads_have_the_same_bits(way, case):
    """Row reductions change no bit of out and lse, and threads none of anything."""
    with pytest.MonkeyPatch.context() as patch:
        much_work(patch)
        patch.setattr(core, "SKIPPED_INSTRUCTION_SETS", way)
        found = {}
        for threads in (1, 3):
            with cpu_threads(threads):
                found[threads] = results_of(case)
        plain = results_of(replace(case, row_reductions=()))
    assert_same_bits(found[1].forward, found[3].forward)
    assert_same_bits(found[1].gradients, found[3].gradients)
    assert_same_bits(found[1].forward, plain.forward)


@settings(max_examples=examples(400))
@given(
    case=cases(
        dtype=st.just("float32"),
        head_dim=st.sampled_from((16, 17, 64, 100, 144)),
        head_dim_v=st.sampled_from((17, 32, 80)),
        softcap=st.none(),
        dropout=st.just(0.0),
    ),
    seqlen_q=st.integers(12, 200),
    tiles=st.integers(1, 18),
    more=st.sampled_from((0, 0, 5)),
    window=st.sampled_from((None, None, (100, 300))),
)
def test_a_softmax_inside_the_products_has_the_bits_of_one_after_them(case, seqlen_q, tiles, more, window):
    """Rows with reductions take the other way, where AVX-512 has both."""
    case = replace(
        case, seqlen_q=seqlen_q, seqlen_k=32 * tiles + more, window=window, causal=case.causal and not window
    )
    plain = replace(case, row_reductions=())
    found = results_of(plain).forward
    assert_same_bits(results_of(case).forward, found)
    ct.assert_forward(plain, **found)


@settings(max_examples=examples(80), deadline=None)
@given(way=WAYS, case=cases(), count=st.sampled_from((1, 5, 16, 64)))
def test_reductions_of_weights_keep_the_oracle_rule(way, case, count):
    case = replace(case, row_reductions=(), dropout=0.0)
    attn, arrays = attention_of(case), inputs_of(case)
    others = {name: x for name, x in arrays.items() if name not in ("q", "k")}
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        much_work(patch)
        patch.setattr(core, "SKIPPED_INSTRUCTION_SETS", way)
        lse = lse_of(attn, arrays)
        weights = np.random.default_rng(case.seed).standard_normal(lse.shape).astype(lse.dtype)
        inputs = (arrays["q"], arrays["k"], lse)
        for threads in (1, 3):
            with cpu_threads(threads):
                sums = attn.column_sums(*inputs, weights, **others)
                top = attn.top_keys(*inputs, count, **others)
                found.append({"sums": sums, "largest": attn.column_max(*inputs, **others), **top._asdict()})
    assert_same_bits(found[0], found[1])
    judge(case, weights, found[0]["sums"], found[0]["largest"], (found[0]["indices"], found[0]["weights"]))


def test_numpy_computes_none_of_them(monkeypatch):
    def refuse(*args: Any, **keywords: Any) -> None:
        raise AssertionError("NumPy computed a reduction")

    monkeypatch.setattr(fallback, "run", refuse)
    monkeypatch.setattr(fallback, "calls", refuse)
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 300, 32), np.float32)
    lengths = np.array([300, 40])
    for attn, optional in (
        (cuflash.FlashAttention(causal=True), {}),
        (cuflash.FlashAttention(), {"kv_lengths": lengths}),
        (cuflash.FlashAttention(score=lambda s, i, j: s - 0.1 * abs(i - j)), {}),
    ):
        found: Any = attn.forward(q, k, v, want=BOTH, **optional)
        ones = np.ones_like(found.lse)
        of_rows = {"dmax": ones, "dentropy": ones, "entropy": found.entropy}
        attn.backward(v, q, k, v, found.out, found.lse, **of_rows, **optional)
        if attn.options.score is None:
            attn.column_sums(q, k, found.lse, **optional)
            attn.column_max(q, k, found.lse, **optional)
            attn.top_keys(q, k, found.lse, 3, **optional)
