"""Functions as a bias and masks of the compiled core, in many small parts, and the way without it, to the oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.cpu import core, functions_as_terms
from cuflash.operands import numpy_dtype
from cuflash.terms import DEFAULT_NEED
from cuflash.testing.rule import measure, yardsticks
from tests.scored import MASKS, SCORES, Scored, captured_of

SUMS = ("distance", "plane", "gated", "box", "alibi", "t5", "decay", "fade")
FUNCTIONS = [*((score, None) for score in SUMS), *((None, mask) for mask in MASKS), ("fade", "prefix"), ("t5", "near")]


@st.composite
def summed(draw, score, mask):
    """A problem with functions of these names, beside options that they may have."""
    functions = (SCORES[score] if score else None, MASKS[mask] if mask else None)
    dtype = draw(st.sampled_from(("float32", "float64", "float16", "bfloat16")))
    batch, heads, group = draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)))
    seqlen_q, seqlen_k, dim = draw(st.integers(1, 90)), draw(st.integers(1, 90)), draw(st.sampled_from((8, 16)))
    options = {}
    if draw(st.booleans()):
        options["window"] = draw(st.tuples(*[st.none() | st.integers(0, 60)] * 2))
    elif draw(st.booleans()):
        options["causal"] = draw(st.sampled_from((True, "top_left")))
    seed = draw(st.integers(0, 99))
    random = np.random.default_rng(seed)
    rows = {"q": (heads * group, seqlen_q), "k": (heads, seqlen_k), "v": (heads, seqlen_k)}
    shapes: dict[str, tuple[int, ...]] = {name: (batch, *of, dim) for name, of in rows.items()}
    shapes["dout"], shapes["dlse"] = shapes["q"], shapes["q"][:3]
    wide = numpy_dtype("float64" if dtype == "float64" else "float32")
    arrays = {
        name: random.standard_normal(shape).astype(wide if name == "dlse" else numpy_dtype(dtype))
        for name, shape in shapes.items()
    }
    arrays |= captured_of(functions, (batch, heads * group, seqlen_q, seqlen_k), dtype, seed)
    if draw(st.booleans()):
        arrays["sinks"] = random.standard_normal(heads * group).astype(wide)
    if draw(st.booleans()):
        arrays["kv_lengths"] = random.integers(0, seqlen_k + 1, batch).astype(np.int32)
    if score is None and draw(st.booleans()):
        options["softcap"] = 3.0
        arrays["alibi_slopes"] = random.uniform(0, 0.1, heads * group).astype(wide)
        arrays["bias"] = random.standard_normal((1, heads * group, seqlen_q, 1)).astype(wide)
        arrays["mask"] = random.random((batch, 1, 1, seqlen_k)) < 0.9
    return Scored(cuflash.FlashAttention(score=functions[0], mask=functions[1], **options), arrays, {}, "")


def is_served(problem):
    return functions_as_terms.why_not(problem, (*DEFAULT_NEED, *problem.captured_gradients)) is None


def results_of(case):
    out, lse = case.attention.forward(*case.inputs, **case.terms)
    again = {"dlse": case.arrays["dlse"], **case.terms}
    need = (*DEFAULT_NEED, *case.problem.captured_gradients)
    gradients = case.attention.backward(case.arrays["dout"], *case.inputs, out, lse, need=need, **again)
    return {"out": out, "lse": lse, **gradients._asdict()}


@pytest.mark.parametrize(("score", "mask"), FUNCTIONS)
def test_results_obey_the_oracle_rule_however_a_call_is_cut(score, mask, monkeypatch):
    if core.why_not() is not None:
        pytest.skip(f"no compiled core: {core.why_not()}")
    for name, value in (("FEW_PAIRS", 0), ("BLOCK", 16), ("KEYS", 32)):
        monkeypatch.setattr(functions_as_terms, name, value)

    @settings(max_examples=10)
    @given(summed(score, mask), st.sampled_from((1600, 6000, 2**23)))
    def judge(case, part_bytes):
        monkeypatch.setattr(functions_as_terms, "PART_BYTES", part_bytes)
        assert "kv_lengths" in case.arrays or is_served(case.problem)
        results = results_of(case)
        judges = yardsticks(case.problem, case.arrays)
        measured = [measure(name, x, judges[name]) for name, x in results.items()]
        assert not any(m.failure for m in measured), "\n".join(map(str, measured))
        with cuflash.cpu_threads(3):
            for name, x in results_of(case).items():
                np.testing.assert_array_equal(x, results[name])

    judge()


@settings(max_examples=20)
@given(st.sampled_from(FUNCTIONS).flatmap(lambda names: summed(*names)))
def test_without_the_core_results_are_the_same_within_the_rule(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "why_not", lambda problem=None: "it is left out")
        results = results_of(case)
    judges = yardsticks(case.problem, case.arrays)
    measured = [measure(name, x, judges[name]) for name, x in results.items()]
    assert not any(m.failure for m in measured), "\n".join(map(str, measured))


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
    assert functions_as_terms.FEW_PAIRS < 8 * 40 * 40
    if core.why_not() is not None:
        pytest.skip(f"no compiled core: {core.why_not()}")
    q = np.zeros((8, 40, 8), np.float32)
    described = cuflash.FlashAttention(score=score).plan(q, q, q).describe()
    assert ("no sum of the scaled product" not in described) == is_sum
