"""Functions that spell out options: computed as these, with the results that the functions say."""

import inspect
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.arrays.array_info import numpy_dtype
from cuflash.spec.rewrites import equivalent
from cuflash.testing.rule import gradients_of, measure, yardsticks
from tests.judging import assert_within
from tests.sampling import examples
from tests.scored import Scored

# Summands of scores by what they are: their spellings, all of which mean the same.
CAPS = {
    "s": ["s"],
    "softcap": ["5.0 * cuflash.tanh(s / 5.0)", "cuflash.tanh(s / 5) * 5", "np.tanh(s / 5.0) * 5.0"],
}
SUMMANDS = {
    "slopes[head]": [
        "- slopes[head] * cuflash.abs(i - j)", "+ -slopes[head] * abs(j - i)", "- abs(i - j) * slopes[head]",
        "+ abs(j - i) * -slopes[head]",
    ],
    "slopes[batch, head]": ["- slopes[batch, head] * cuflash.abs(j - i)"],
    "pairs[i, j]": ["+ pairs[i, j]", "- (-pairs[i, j])"],
    "pairs[batch, head, i, j]": ["+ pairs[batch, head, i, j]"],
    "pairs[head, j]": ["+ pairs[head, j]"],
    "pairs[batch, i]": ["+ pairs[batch, i]"],
    "pairs[j]": ["+ pairs[j]"],
}  # fmt: skip
MASKS = {
    (None, 0): ["i >= j", "j <= i", "i - j >= 0", "j < i + 1"],
    (9, 0): ["(i >= j) & (i - j < 10)", "(j <= i) & (j + 10 > i)"],
    (7, 7): ["abs(i - j) <= 7", "(cuflash.abs(j - i) < 8)", "(i - j < 8) & (j - 7 <= i)"],
    (5, None): ["i - 5 <= j"],
}


def made(text: str, arrays: list[str]):
    inputs = [name for name in ("batch", "head") if name in text]
    keywords = ", ".join((*inputs, *arrays))
    return eval(f"lambda s, i, j, *, {keywords}: {text}" if keywords else f"lambda s, i, j: {text}", globals())


@dataclass(frozen=True)
class Spelled:
    """A problem whose functions spell out options, and the same with these options."""

    case: Scored
    options: dict[str, Any]
    optional: dict[str, Any]  # arrays of the options


def score_of(draw: st.DrawFn, sizes: dict[str, int], dtype: str, is_packed: bool):
    """A drawn score or None, the arrays that it reads, and the options that it spells out."""
    pick = st.sampled_from
    real = "float64" if dtype == "float64" else "float32"
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    kinds = ["slopes[head]"] if is_packed else [*SUMMANDS]
    slopes = draw(pick([None, *(name for name in kinds if name.startswith("slopes"))]))
    bias = draw(pick([None, *(name for name in kinds if name.startswith("pairs"))]))
    cap = draw(pick([*CAPS]))
    score_args: dict[str, Any] = {}
    options: dict[str, Any] = {"softcap": 5.0 if cap == "softcap" else None}
    if slopes is not None:
        shape = tuple(sizes[axis] for axis in slopes[7:-1].split(", "))
        score_args["slopes"] = options["alibi_slopes"] = random.uniform(0.01, 0.2, shape).astype(real)
    if bias is not None:
        axes = bias[6:-1].split(", ")
        shape = tuple(draw(pick([1, sizes[axis]])) for axis in axes)
        score_args["pairs"] = random.standard_normal(shape).astype(numpy_dtype(draw(pick([dtype, real]))))
        index = tuple(slice(None) if axis in axes else None for axis in ("batch", "head", "i", "j"))
        options["bias"] = score_args["pairs"][index]
    summands = [draw(pick(SUMMANDS[name])) for name in (slopes, bias) if name is not None]
    order = draw(st.permutations([f"+ {draw(pick(CAPS[cap]))}", *summands]))
    function = None if cap == "s" and not summands else made(" ".join(order), [*score_args])
    return function, score_args, options


@st.composite
def spelled(draw: st.DrawFn) -> Spelled:
    """Drawn sums in drawn words and orders, with options that go with functions."""
    pick = st.sampled_from
    dtype = draw(pick(["float32", "float64", "bfloat16", "float16"]))
    batch, heads_kv, group = (draw(pick([1, 2])) for _ in range(3))
    heads, dim = heads_kv * group, draw(pick([8, 16]))
    seqlen_q, seqlen_k = draw(pick([(40, 40), (130, 130), (7, 40), (65, 30)]))
    layout = draw(pick(["bhsd", "bshd"]))
    is_packed = layout == "bhsd" and draw(pick([False, False, False, True]))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    lead = () if is_packed else (batch,)

    def normal(*shape: int, of: str = "float64" if dtype == "float64" else "float32"):
        return random.standard_normal(shape).astype(numpy_dtype(of))

    def array(heads: int, seqlen: int):
        return normal(*lead, *((heads, seqlen) if layout == "bhsd" else (seqlen, heads)), dim, of=dtype)

    arrays = {"q": array(heads, seqlen_q), "k": array(heads_kv, seqlen_k), "v": array(heads_kv, seqlen_k)}
    arrays |= {"dout": array(heads, seqlen_q), "dlse": normal(*lead, heads, seqlen_q)}
    options: dict[str, Any] = {"layout": layout, "dropout": draw(pick([0.0, 0.0, 0.3]))}
    options["scale"] = draw(pick([None, -0.4]))
    is_square = seqlen_q == seqlen_k and not is_packed
    options["causal"] = draw(pick(["top_left", *([True] if is_square else []), False]))
    sizes = {"batch": 2 if is_packed else batch, "head": heads, "i": seqlen_q, "j": seqlen_k}
    score, score_args, same = score_of(draw, sizes, dtype, is_packed)
    window = draw(pick([*MASKS, *([] if score is None else [None])]))
    mask = None if window is None else eval(f"lambda i, j: {draw(pick(MASKS[window]))}", globals())
    if is_packed:
        cuts = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in (seqlen_q, seqlen_k)]
        for name, (start, stop) in zip(("cu_seqlens_q", "cu_seqlens_k"), cuts, strict=True):
            arrays[name] = np.array([0, start, stop], np.int32)
    elif draw(st.booleans()):
        arrays["kv_lengths"] = random.integers(0, seqlen_k + 1, batch)
    if draw(st.booleans()):
        arrays["sinks"] = normal(heads)
    optional = {name: x for name, x in arrays.items() if name not in ("q", "k", "v", "dout", "dlse")}
    optional |= {name: same.pop(name) for name in ("alibi_slopes", "bias") if name in same}
    attention = cuflash.FlashAttention(**options, score=score, mask=mask)
    shown = f"{attention!r} {[(name, x.shape, x.dtype.name) for name, x in (arrays | score_args).items()]}"
    case = Scored(attention, arrays | score_args, {"seed": 3, "offset": 1} if options["dropout"] else {}, shown)
    return Spelled(case, options | same | {"window": window}, optional)


@settings(max_examples=examples(60))
@given(spelled())
def test_spellings_of_options_have_the_results_of_the_formula(drawn):
    case, arrays = drawn.case, drawn.case.arrays
    attn = case.attention
    own = equivalent(attn.options, arrays)
    assert own is not None and own.options.score is None and own.options.mask_function is None
    out, lse = attn.forward(*case.inputs, **case.optional, **case.random)
    need = gradients_of(case.problem)
    again = {"dlse": arrays["dlse"], **case.optional, **case.random}
    gradients = attn.backward(arrays["dout"], *case.inputs, out, lse, need=need, **again)
    judges = yardsticks(case.problem, arrays, **case.random)
    results = {"out": out, "lse": lse, **gradients._asdict()}
    assert_within(results, judges)
    for name in case.problem.score_arg_gradients:
        assert results[name].shape == arrays[name[1:]].shape and results[name].dtype == arrays[name[1:]].dtype

    written = {name: np.empty_like(x) for name, x in gradients._asdict().items()}
    arguments: dict[str, Any] = written | again
    given_back = attn.backward(arrays["dout"], *case.inputs, out, lse, **arguments)._asdict()
    for name, x in written.items():
        assert given_back[name] is x
        np.testing.assert_array_equal(x, results[name])


@settings(max_examples=examples(30))
@given(spelled().filter(lambda drawn: drawn.options["causal"]))
def test_spellings_have_the_bits_of_the_options(drawn):
    case = drawn.case
    out, lse = case.attention.forward(*case.inputs, **case.optional, **case.random)
    q, k, v = case.inputs
    expected = cuflash.FlashAttention(**drawn.options).forward(q, k, v, **drawn.optional, **case.random)
    np.testing.assert_array_equal(out, expected.out)
    np.testing.assert_array_equal(lse, expected.lse)


def arrays_of(dtype="float32"):
    random = np.random.default_rng(0)
    q, k, v, dout = random.standard_normal((4, 2, 3, 40, 8)).astype(dtype)
    own = {"slopes": random.uniform(0.01, 0.2, 3), "pairs": random.standard_normal((40, 40)), "cap": np.array(5.0)}
    return {"q": q, "k": k, "v": v, "dout": dout, **{name: x.astype(dtype) for name, x in own.items()}}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("s + slopes[head] * abs(i - j)", ["slopes"]),  # scores that grow with the distance
        ("s - slopes[head] * (i - j)", ["slopes"]),  # with its sign, where keys may come after the query
        ("s - slopes[head] * abs(i - j - 1)", ["slopes"]),
        ("s - slopes[head] * abs(i - j) * 0.5", ["slopes"]),
        ("s - slopes[i] * abs(i - j)", ["slopes"]),
        ("s - slopes[head] * abs(i - j) - slopes[head] * abs(i - j)", ["slopes"]),
        ("s + pairs[j, i]", ["pairs"]),
        ("s - pairs[i, j]", ["pairs"]),
        ("s + pairs[i, j] + pairs[i, j]", ["pairs"]),
        ("s + pairs[i, i]", ["pairs"]),
        ("s + pairs[i, j + 1]", ["pairs"]),
        ("s + slopes[j]", ["slopes"]),  # fewer numbers than keys: the last stands for all that follow
        ("s + s + pairs[i, j]", ["pairs"]),
        ("-s + pairs[i, j]", ["pairs"]),
        ("pairs[i, j]", ["pairs"]),
        ("cap * cuflash.tanh(s / cap)", ["cap"]),  # known when the function runs
        ("5.0 * cuflash.tanh(s / 4.0)", []),
        ("-5.0 * cuflash.tanh(s / -5.0)", []),
        ("1e20 * cuflash.tanh(s / 1e20)", []),  # out of the option's range
        ("s * 1.0 + pairs[i, j]", ["pairs"]),
    ],
)
def test_other_scores_stay_functions(text, names):
    attn, arrays = cuflash.FlashAttention(score=made(text, names)), arrays_of()
    given = {name: x for name, x in arrays.items() if name in ("q", "k", "v", *names)}
    assert equivalent(attn.options, given) is None
    case = Scored(attn, given | {"dout": arrays["dout"]}, {}, text)
    optional: dict[str, Any] = case.optional
    out, lse = attn.forward(*case.inputs, **optional)
    judges = yardsticks(case.problem, case.arrays)
    for measured in (measure("out", out, judges["out"]), measure("lse", lse, judges["lse"])):
        assert not measured.failure, measured


@pytest.mark.parametrize(
    "text",
    [
        "i > j",
        "abs(i - j) < 0",
        "i - j != 3",
        "(i >= j) | (j < 3)",
        "i + j < 30",
        "2 * i >= j",
        "(i - j) % 3 == 0",
        "i + 2**62 + 2**62 > j",
    ],
)
def test_other_masks_stay_functions(text):
    attn, arrays = cuflash.FlashAttention(mask=eval(f"lambda i, j: {text}", globals())), arrays_of()
    assert equivalent(attn.options, arrays) is None


def test_what_decides_beside_the_function():
    """Other diagonals than i = j, dtypes and axes that optional inputs do not have, and arrays that the mask reads."""

    def alibi(s, i, j, *, head, slopes):
        return s - slopes[head] * cuflash.abs(i - j)

    def kept(arrays, **options):
        own = equivalent(cuflash.FlashAttention(**({"score": alibi} | options)).options, arrays)
        return own is None or own.options.score is not None

    arrays = arrays_of()
    shorter = arrays | {"q": arrays["q"][:, :, :7]}
    assert not kept(arrays) and not kept(arrays, causal=True) and not kept(shorter)
    assert not kept(shorter, causal="top_left") and kept(shorter, causal=True) and kept(shorter, window=(3, 3))
    assert not kept(arrays, score=lambda s, i, j, *, head, slopes: s - slopes[head] * (i - j), causal=True)
    assert kept(arrays | {"slopes": arrays["slopes"].astype("f8")}) and kept(arrays | {"slopes": arrays["slopes"][:2]})
    assert kept(arrays | {"kv_lengths": np.array([3, 40])}, causal="lengths")
    starts = np.array([0, 10, 40], np.int32)
    packed = {name: x[0] if name in "qkvdout" else x for name, x in arrays.items()}
    packed |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts.copy()}
    assert not kept(packed) and not kept(packed, causal="top_left") and kept(packed, causal=True)
    assert not kept(packed | {"cu_seqlens_k": starts}, causal=True)
    by_pairs = {"score": lambda s, i, j, *, pairs: s + pairs[i, j]}
    assert not kept(arrays, **by_pairs) and kept(packed, **by_pairs)
    assert kept(arrays, **by_pairs, mask=lambda i, j, *, pairs: pairs[i, j] > 0)
    assert kept(arrays | {"pairs": np.zeros((40, 40), np.int32)}, **by_pairs)
    assert kept(arrays | {"block_table": starts}, **by_pairs) and kept(arrays | {"bias": arrays["pairs"]}, **by_pairs)
    assert kept(arrays, score=None, mask=lambda i, j: i >= j, softcap=3.0)


def test_plan_says_which_options():
    arrays = arrays_of()
    attn = cuflash.FlashAttention(score=made("s - slopes[head] * abs(i - j)", ["slopes"]), mask=lambda i, j: i - j < 9)
    q, k, v = (arrays[name] for name in "qkv")
    text = attn.plan(q, k, v, slopes=arrays["slopes"]).describe(verbose=True, width=0)
    assert "options that they spell out: alibi_slopes = slopes, window = (8, None)" in text
    assert "score = s - (slopes[head] * abs(t0))" in text and "d score / d slopes[head] [head] = -abs(t0)" in text
    attn.compile(q, k, v, slopes=arrays["slopes"], need=("dslopes",))


def repeated(count, step, first):
    """A function of indices: a value after so many steps, each of which makes an expression of the one before."""

    def last(*indices):
        value = first(*indices)
        for number in range(count):
            value = step(value, number, *indices)
        return value

    return {2: lambda i, j: last(i, j), 3: lambda s, i, j: last(s, i, j)}[len(inspect.signature(first).parameters)]


# Expressions that are deep, and those whose sums and products have 2**200 terms where they are multiplied out.
DEEP = {
    "sum": repeated(3000, lambda value, n, s, i, j: value + 0.001 * (i - j), lambda s, i, j: s),
    "product": repeated(3000, lambda value, n, s, i, j: value * 0.999, lambda s, i, j: s),
    "doubled": repeated(200, lambda s, n, *_: s + s, lambda s, i, j: s),
    "squared": repeated(200, lambda s, n, *_: s * s, lambda s, i, j: s),
}


@pytest.mark.parametrize("name", DEEP)
def test_scores_may_be_of_any_depth(name):
    q, k = np.linspace(-1, 1, 12).reshape(3, 4), np.linspace(0, 0.5, 12).reshape(3, 4)
    attn = cuflash.FlashAttention(score=DEEP[name])
    with np.errstate(all="ignore"):
        expected = np.logaddexp.reduce(DEEP[name](q @ k.T / 2, *np.ogrid[:3, :3]), axis=1)
    for own in (attn, pickle.loads(pickle.dumps(attn))):
        np.testing.assert_allclose(own.forward(q, k, None).lse, expected, rtol=1e-9)


def test_masks_may_be_of_any_depth():
    doubled = repeated(40, lambda d, n, *_: d + d, lambda i, j: i - j)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (lambda i, j: doubled(i, j) <= 0, {"mask": np.tri(3, dtype=bool).T}),
        (repeated(3000, lambda shown, n, i, j: shown & (i - j < n + 2), lambda i, j: j >= 0), {"window": (1, None)}),
        (repeated(40, lambda shown, n, *_: shown & shown, lambda i, j: i >= j), {"causal": True}),
    ]
    q = np.linspace(-1, 1, 12).reshape(3, 4)
    for mask, options in cases:
        np.testing.assert_allclose(cuflash.attention(q, q, q, mask=mask), cuflash.attention(q, q, q, **options))
