"""Calls over ranks that are threads, on every backend: by the oracle rule, and bit for bit over numbers of ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.arrays.array_info import numpy_dtype
from cuflash.arrays.memory_ranges import cut_evenly
from cuflash.distributed.streams import Streams
from cuflash.testing.strategies import BIAS_MASKS, SCORE_MEANS
from cuflash.testing.tangents import everything
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.judging import assert_same_bits
from tests.pure.test_schedule import of_chunks, splits
from tests.ranks import ON_CPU, WITHOUT_VALUES, AnyCase, Whole, judge, ranking, reduce_weights
from tests.reductions import given_of, gradient_problem, judge_gradients
from tests.reductions import judge as judge_weights
from tests.row_reductions import gap_is_clear
from tests.scored import CONDITIONED, MASKS, SCORES_AND_TEXTS, Scored, score_args_of, scored
from tests.second_derivatives import moved_by

# ---- Lists of cases --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Functions:
    """A problem whose score or mask is a function, by its name in tests/scored.py."""

    score: str | None
    mask: str | None
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, int, int, int] = (2, 2, 100, 140)  # heads, those of keys, queries and keys

    def scored(self) -> Scored:
        functions = (SCORES_AND_TEXTS[self.score] if self.score else None, MASKS[self.mask] if self.mask else None)
        heads, heads_kv, rows, keys = self.sizes
        of_q, of_k = (heads, rows, 64), (heads_kv, keys, 64)
        shapes = {"q": of_q, "k": of_k, "v": of_k, "dout": of_q}
        random, dtype = np.random.default_rng(0), numpy_dtype(self.dtype)
        arrays = {name: random.standard_normal((1, *shape)).astype(dtype) for name, shape in shapes.items()}
        arrays |= score_args_of(functions, (1, heads, rows, keys), self.dtype, 0)
        attn: Any = cuflash.FlashAttention(score=functions[0], mask=functions[1], **self.options)
        return Scored(attn, arrays, {"seed": 3, "offset": 1} if "dropout" in self.options else {}, str(self))


def case_of(cases: Mapping[str, Mapping[str, Any]], backend: str, name: str) -> AnyCase:
    """A case of a list by backend; bias and sinks of those that are called masked are -1e9."""
    case = cases[backend][name]
    if isinstance(case, Functions):
        return case.scored()
    found: AnyCase = masked(case) if name.startswith("masked") else case
    return found


def masked(case: ct.Case) -> Whole:
    """The problem of a case, where bias and sinks are -1e9: lse, rounded, does not say what a shard weighs."""
    whole = Whole.of(case)
    for name in ("bias", "sinks"):
        if name in whole.arrays:
            whole.arrays[name][...] = -1e9
    return whole


def uneven(seqlen: int) -> cd.Split:
    """Two ranks, one of which has the first and the last rows."""
    first, last = seqlen // 5 + 1, 9 * seqlen // 10
    return cd.Split([[(0, first), (last, seqlen)], [(first, last)]])


SIZES: dict[str, Any] = {"seqlen_q": 100, "seqlen_k": 140, "num_heads": 2, "num_heads_kv": 1, "head_dim": 64}
ODD: dict[str, Any] = {"seqlen_q": 61, "seqlen_k": 83, "num_heads": 4, "num_heads_kv": 2, "head_dim": 16}
LONG: dict[str, Any] = {"seqlen_q": 300, "seqlen_k": 300, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
CAUSAL: dict[str, Any] = {**LONG, "causal": True}
PACKED: dict[str, Any] = {"cu_seqlens_q": (0, 30, 100), "cu_seqlens_k": (0, 77, 135)}
CASES: dict[str, dict[str, Any]] = {
    CORE: {
        "float32": ct.Case(**ODD, causal=True, dtype="float32"),
        "lengths": ct.Case(**ODD, batch=2, dtype="bfloat16", window=(20, 3), sinks=True, kv_lengths=(0, 70)),
        "pairs": ct.Case(
            **ODD, dtype="float64", causal=True, bias=(4, 61, 83), mask=(1, 83), alibi_slopes=(4,), dlse=True
        ),
        "axes": ct.Case(**ODD, dtype="bfloat16", causal=True, axes=(2, 2), batch_axes=(("k", (1, 2)), ("v", (1, 2)))),
    },
    "emulated 9.0": {
        "sinks": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, dlse=True),
        "no values": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, dlse=True, has_values=False),
        "dropout": ct.Case(**SIZES, causal=True, dtype="float16", dropout=0.3, alibi_slopes=(2,)),
        "aligned dropout": ct.Case(**SIZES, causal=True, dtype="float16", dropout=0.3, alibi_slopes=(2,)),
        "packed": ct.Case(**SIZES, **PACKED, causal=True, dtype="bfloat16", dropout=0.3),
        "masked": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, bias=(140,)),
        "masked float32": ct.Case(**SIZES, dtype="float32", bias=(140,)),
        "products": ct.Case(**SIZES, dtype="float16", score_mean=-3e4),
        "packed products": ct.Case(**SIZES, **PACKED, dtype="float16", score_mean=-3e4),
        "t5": Functions("t5", None, "bfloat16", {"dropout": 0.2}),
        "with pairs": Functions("with_pairs", "documents", "float16"),
        "in CUDA": Functions("branching", None, "bfloat16"),
    },
    "emulated 8.0": {
        "softcap": ct.Case(**SIZES, causal=True, dtype="float16", softcap=5.0, layout="bshd"),
        "blocks": ct.Case(**SIZES, dtype="float16", block_mask=(2,), block_size=(16, 32), bias=(100, 140)),
        "aligned blocks": ct.Case(**SIZES, dtype="float16", block_mask=(2,), block_size=(16, 32), bias=(100, 140)),
        "float32": ct.Case(**SIZES, dtype="float32", window=(40, 40), mask=(100, 140), kv_lengths=(120,)),
        "masked": ct.Case(**SIZES, dtype="float16", bias=(140,), layout="bshd"),
        "masked float64": ct.Case(**SIZES, dtype="float64", bias=(140,)),
        "products": ct.Case(**SIZES, dtype="float32", window=(40, 40), score_mean=-3e4),
        "distance": Functions("distance", "prefix", "float32", {"window": (90, None)}),
        "in CUDA": Functions("polynomial", "near", "float32"),
    },
    "emulated 7.5": {"float16": ct.Case(**SIZES, causal=True, dtype="float16", sinks=True)},
    DEVICE: {  # kernels take long to compile: so cases have many options each
        "bfloat16": ct.Case(**CAUSAL, dtype="bfloat16"),
        "float32": ct.Case(**CAUSAL, dtype="float32", window=(100, None), sinks=True),
        "pairs": ct.Case(**CAUSAL, dtype="bfloat16", bias=(4, 300, 300), alibi_slopes=(4,), dlse=True),
        "blocks": ct.Case(**CAUSAL, dtype="float16", block_mask=(4,), block_size=(64, 32), dropout=0.2),
        "packed": ct.Case(
            **CAUSAL, dtype="bfloat16", dropout=0.2, cu_seqlens_q=(0, 41, 300), cu_seqlens_k=(0, 90, 290)
        ),
        "masked": ct.Case(**LONG, dtype="float16", bias=(300,)),
        "t5": Functions("t5", None, "bfloat16", {"causal": True}, (4, 4, 300, 300)),
        "distance": Functions("distance", "documents", "float32", {"causal": True}, (4, 4, 300, 300)),
    },
}
WITH_TANGENTS: dict[str, dict[str, ct.Case]] = {
    "emulated 9.0": {"sinks": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, dlse=True, dropout=0.3)},
    "emulated 8.0": {
        "bias": ct.Case(**SIZES, dtype="float16", softcap=5.0, layout="bshd", bias=(100, 140), score_mean=2e3),
    },
    DEVICE: {
        "sinks": ct.Case(**CAUSAL, dtype="bfloat16", sinks=True, dlse=True, dropout=0.2),
        "bias": ct.Case(**CAUSAL, dtype="float32", window=(100, None), bias=(4, 300, 300)),
        "slopes": ct.Case(**CAUSAL, dtype="float16", layout="bshd", score_mean=4e3, alibi_slopes=(4,)),
        "packed": ct.Case(
            **{**CAUSAL, "head_dim": 32}, dtype="float64", cu_seqlens_q=(0, 41, 300), cu_seqlens_k=(0, 90, 290)
        ),
    },
}
_SHORT: dict[str, Any] = {"seqlen_q": 2, "seqlen_k": 300, "num_heads": 4, "num_heads_kv": 1, "head_dim": 64}
_STEP: dict[str, Any] = {"seqlen_q": 1, "seqlen_k": 3000, "num_heads": 8, "num_heads_kv": 2, "head_dim": 64}
DECODING: dict[str, dict[str, Any]] = {
    "emulated 9.0": {
        "masked": ct.Case(**_SHORT, dtype="bfloat16", bias=(300,)),
        "masked float32": ct.Case(**_SHORT, dtype="float32", bias=(300,)),
        "t5": Functions("t5", None, "bfloat16", {"causal": True, "dropout": 0.2}, (2, 1, 3, 140)),
    },
    "emulated 8.0": {
        "masked": ct.Case(**_SHORT, dtype="bfloat16", bias=(300,)),
        "masked float32": ct.Case(**_SHORT, dtype="float32", bias=(300,)),
        "near": Functions(None, "near", "float32", {"causal": True, "dropout": 0.2}, (2, 1, 3, 140)),
    },
    DEVICE: {dtype: ct.Case(**_STEP, dtype=dtype, kv_lengths=(2900,)) for dtype in ("float32", "bfloat16")},
}


PARTIAL_DQ = ("dq", "dk", "dv")  # of which partial sums of dq are sent
NEED = ("tdq", "tdk", "tdv")


def names_of(cases):
    return {name: tuple(own) for name, own in cases.items()}


# Spans begin where blocks of dropout or of a block mask do: so calls are split.
ALIGNED = cd.Split([[(0, 16), (64, 100)], [(16, 64)]]), cd.Split([[(0, 32), (96, 140)], [(32, 96)]])


@on_backends(names_of(CASES), of="name", emulated=8)
@pytest.mark.parametrize("need", [None, PARTIAL_DQ], ids=["all", "partial dq"])
def test_ranks_keep_the_oracle_rule(backend, name, need):
    case = case_of(CASES, backend.name, name)
    pair = ALIGNED if "aligned" in name else (uneven(case.problem.seqlen_q), uneven(case.problem.seqlen_k))
    with ranking(backend.name) as ranks:
        judge(case, ranks.results(case, *pair, need=need))


@on_backends(names_of(WITH_TANGENTS), of="name", emulated=8)
@pytest.mark.parametrize("calls", [1, 3])
def test_tangents_keep_the_oracle_rule(backend, name, calls):
    """Partial results are not rounded before they are merged or added; later calls repeat what was recorded."""
    case = WITH_TANGENTS[backend.name][name]
    need, moved = (*NEED, *(["tdsinks"] if case.sinks and calls == 1 else [])), everything(case)
    with ranking(backend.name) as ranks:
        pair = uneven(case.seqlen_q), uneven(case.seqlen_k)
        judge(case, ranks.results(case, *pair, moved=moved, need=need, calls=calls), moved)


EQUAL: dict[str, Any] = {**SIZES, "seqlen_k": 100, "causal": True}
OF_BITS: dict[str, dict[str, ct.Case]] = {
    "emulated 9.0": {
        "sinks": ct.Case(**EQUAL, dtype="bfloat16", sinks=True, dlse=True),
        "dropout": ct.Case(**EQUAL, dtype="float16", dropout=0.3, alibi_slopes=(2,)),
    },
    "emulated 8.0": {
        "softcap": ct.Case(**EQUAL, dtype="float16", softcap=5.0, layout="bshd"),
        "blocks": ct.Case(**EQUAL, dtype="float16", block_mask=(2,), block_size=(16, 32)),
        "tangents": ct.Case(**{**EQUAL, "num_heads_kv": 2, "head_dim": 32}, dtype="float32"),
    },
    DEVICE: {name: CASES[DEVICE][name] for name in ("bfloat16", "float32", "pairs", "blocks", "packed")}
    | {f"tangents, {name}": WITH_TANGENTS[DEVICE][name] for name in ("sinks", "bias")},
}


@on_backends(names_of(OF_BITS), of="name", emulated=8)
def test_bits_do_not_depend_on_the_number_of_ranks(backend, name):
    case = OF_BITS[backend.name][name]
    moved, need = (everything(case), NEED) if "tangents" in name else (None, None)
    is_short = backend.device is not None or moved is not None
    numbers, how = ((1, 2), {"chunks": 4}) if is_short else ((1, 2, 4, 8), dict[str, int]())
    pairs = [[cd.zigzag(case.seqlen_q, n)] * 2 for n in numbers]
    with ranking(backend.name) as ranks:
        judge(case, ranks.same_bits(case, pairs, moved=moved, need=need, **how), moved)


@on_backends(names_of(DECODING), of="name", emulated=8)
def test_decoding_keeps_the_oracle_rule(backend, name):
    """Three steps, of which the later ones repeat what the first one did, on other numbers."""
    case = case_of(DECODING, backend.name, name)
    cases = [replace(case, seed=seed) for seed in range(3)] if isinstance(case, ct.Case) else [case]
    with ranking(backend.name) as ranks:
        for one, results in zip(cases, ranks.decoded(cases, uneven(case.problem.seqlen_k)), strict=True):
            judge(one, results)


OF_WEIGHTS = {
    "emulated 9.0": ("sinks", "dropout"),
    "emulated 8.0": ("softcap", "float32", "products"),
    DEVICE: ("bfloat16", "float32", "pairs"),
}


@on_backends(OF_WEIGHTS, of="name", emulated=8)
def test_reductions_of_weights_keep_the_oracle_rule(backend, name):
    case = CASES[backend.name][name]
    whole = Whole.of(case)._replace(arrays=given_of(case))
    with ranking(backend.name) as ranks:
        pair = uneven(case.seqlen_q), uneven(case.seqlen_k)
        found = ranks.results(whole, *pair, need=(), call=reduce_weights)
    top = found["indices"], found["key_weights"]
    judge_weights(case, whole.arrays["weights"], found["column_sums"], found["column_max"], top)


@on_backends({name: ("float16", "float32") for name in (CORE, DEVICE)})
def test_gradients_of_column_sums_keep_the_oracle_rule(backend, dtype):
    case, (dsums, q, k, lse, weights), need = gradient_problem(dtype)
    arrays = {"q": q, "k": k, "lse": lse, "weights": weights, "dsums": dsums}
    with ranking(backend.name) as ranks:
        pair, whole = (cd.zigzag(150, 2), cd.zigzag(230, 2)), Whole.of(case)._replace(arrays=arrays)
        found = ranks.results(whole, *pair, need=need, call=reduce_weights)
    judge_gradients(case, weights, dsums, {name: found[name] for name in need})


# ---- Drawn cases -----------------------------------------------------------------------------------------------------

FEATURES = (*(name for name in ct.FEATURES if name != "scale"), "sinks", "dlse", "dropout", "block_mask")
SMALL: dict[str, Any] = {
    "features": FEATURES,
    "max_seqlen": 65,
    "max_head_dim": 24,
    "max_scores": 2**13,
    "score_spreads": (1.0, 8.0),
}
WITH_AXES: dict[str, Any] = {**SMALL, "features": (*FEATURES, "gqa"), "max_scores": 2**11, "ndims": (4,)}
OF_LARGE: dict[str, Any] = {**SMALL, "features": (*FEATURES, "scale"), "score_spreads": (1.0, 8.0, 30.0)}
PLAIN = ("causal", "window", "softcap", "gqa", "head_dim_v", "sinks", "dlse", "layout")
PACKED_FEATURES = (*PLAIN[:-1], "alibi_slopes", "packed", "dropout")
OF_PACKED = ct.cases(
    features=PACKED_FEATURES, ndims=(3,), max_seqlen=65, max_scores=2**12, max_head_dim=16, min_seqlen=0
).filter(lambda case: case.cu_seqlens_q is not None)
PER_HEAD = {"block": "head", "token": "tensor"}  # in place of scales of blocks of rows


@st.composite
def large(draw, cases):
    """With a finite mask of some rows and pairs, or with products around a large number."""
    case = draw(cases)
    if case.bias is not None:
        return replace(case, bias_mask=draw(st.sampled_from(BIAS_MASKS)))
    return replace(case, score_mean=draw(st.sampled_from(SCORE_MEANS)), softcap=None)


@st.composite
def float8(draw):
    sizes = {**SMALL, "features": (*ct.FEATURES, "float8", "sinks", "dropout", "block_mask", "packed")}
    sizes |= {"max_scores": 2**11, "score_spreads": (1.0,)}
    case = draw(ct.cases(**sizes) | ct.with_axes(ct.cases(**sizes, ndims=(4,))))
    scales: dict[str, Any] = {name: getattr(case, name) for name in ("k_scale", "v_scale")}
    scales = {name: PER_HEAD.get(per, per) for name, per in scales.items()}
    if draw(st.booleans()):
        scales |= {"q_float8": True, "dtype": "bfloat16", "q_scale": draw(st.sampled_from([None, "tensor", "head"]))}
    return replace(case, kv_dtype=case.kv_dtype or "float8_e4m3fn", dlse=False, **scales)


def without_values(case):
    return replace(case, has_values=False, dlse=True)


@st.composite
def row_reductions(draw):
    case = draw(ct.cases(**SMALL) | OF_PACKED | ct.with_axes(ct.cases(**WITH_AXES)))
    want = draw(st.sampled_from([("max", "entropy"), ("max",), ("entropy",)]))
    case = replace(case, row_reductions=want, has_values=draw(st.booleans()))
    assume("max" not in want or gap_is_clear(case))
    return case


class Drawn(NamedTuple):
    """Cases, and how many are examples; which gradients are needed, and whether inputs have tangents."""

    cases: st.SearchStrategy[Any]
    examples: int = 20
    needs: Sequence[Any] = (PARTIAL_DQ, None, ("dq", "dv"), ("dq", "dk"), ("dk", "dv"), ("dq",))
    moves: bool = False
    zigzag: bool = False  # also by these splits, whose ranks have several spans


DRAWN = {
    "options": Drawn(ct.cases(**SMALL), 40),
    "batch axes": Drawn(ct.with_axes(ct.cases(**WITH_AXES)), 30),
    # Nothing depends on numbers of rows: own rows of several spans are in one call.
    "plain": Drawn(ct.cases(**{**SMALL, "features": PLAIN}), zigzag=True),
    # Rows in front of a span have no weight in any sum.
    "blocks": Drawn(
        ct.cases(**{**SMALL, "features": (*FEATURES, "gqa")}).map(
            lambda case: case if case.block_mask is not None and case.seed % 2 else replace(case, dropout=0.5)
        )
    ),
    "packed": Drawn(OF_PACKED, 60),
    "functions": Drawn(scored(max_seqlen=130, scores=(*CONDITIONED, "branching")), 60, needs=(None,)),
    "no values": Drawn(ct.cases(**{**SMALL, "max_seqlen": 100}).map(without_values), 60, needs=(None,)),
    "row reductions": Drawn(row_reductions(), 40, needs=(None, ("dq", "dk"))),
    "large": Drawn(large(ct.cases(**OF_LARGE)), 40, needs=(None, PARTIAL_DQ)),
    "large batch axes": Drawn(
        ct.with_axes(large(ct.cases(**{**WITH_AXES, "features": (*OF_LARGE["features"], "gqa")}))), 15, needs=(None,)
    ),
    "large packed": Drawn(large(OF_PACKED), 15, needs=(None,)),
    "float8": Drawn(float8(), 40, needs=((),)),
    "tangents": Drawn(ct.cases(**SMALL), 40, moves=True),
    "tangents, plain": Drawn(ct.cases(**{**SMALL, "features": PLAIN}), moves=True, zigzag=True),
    "tangents, packed": Drawn(OF_PACKED, 15, needs=(None,), moves=True),
}
ON_FALLBACK = ("blocks", "large", "large batch axes", "large packed")


def lengths_of(case):
    return case.problem.seqlen_q, case.problem.seqlen_k


def is_clear(case, split):
    """Whether an axis of queries of length 1 cannot be taken for that of a rank's own query."""
    is_alike = any if isinstance(case, ct.Case) else all
    return lengths_of(case)[0] == 1 or is_alike(split.rows(rank) != 1 for rank in range(split.ranks))


@on_backends({CORE: tuple(DRAWN), FALLBACK: ON_FALLBACK}, of="name")
def test_any_split_of_any_case_keeps_the_oracle_rule(backend, name, monkeypatch):
    """Also of a second call, in which ranks begin before they hear of each other, and in the order of a device."""
    drawn = DRAWN[name]

    def holds(data, case, ranks, steps, need, calls, goes_on):
        is_zigzag = drawn.zigzag and data.draw(st.booleans())
        pair = [cd.zigzag(n, ranks) if is_zigzag else data.draw(splits(n, ranks)) for n in lengths_of(case)]
        assume(is_clear(case, pair[0]))
        moved = data.draw(moved_by(case)) if drawn.moves else None
        need = need and tuple(f"t{x}" if drawn.moves else x for x in need)
        monkeypatch.setattr(Streams, "goes_on", goes_on)
        is_none = isinstance(case, ct.Case) and not case.has_values and data.draw(st.booleans())
        on = WITHOUT_VALUES if is_none else ON_CPU
        results = on.results(case, *pair, moved=moved, need=need, steps=steps, calls=calls)
        if name == "batch axes":  # gradients are sums over what broadcasts
            arrays = case.arrays()
            assert all(x.shape == arrays[of[1:]].shape for of, x in results.items() if of[1:] in arrays)
        judge(case, results, moved)

    backend.draw(
        drawn.examples,
        holds,
        data=st.data(),
        case=drawn.cases,
        ranks=st.integers(1, 8),
        steps=st.integers(1, 3),
        need=st.sampled_from(drawn.needs),
        calls=st.integers(1, 2),
        goes_on=st.booleans(),
    )


OF_DRAWN_BITS = ("options", "packed", "functions", "row reductions", "large", "float8", "tangents")


@on_backends({CORE: OF_DRAWN_BITS, FALLBACK: ("large",)}, of="name")
def test_bits_of_drawn_cases_do_not_depend_on_the_number_of_ranks(backend, name):
    """Zigzag over 1 and 2, 4 or 8 ranks, and chunks dealt to any number of ranks."""

    def holds(data, case, ranks, many):
        dealt = [data.draw(of_chunks(n, ranks, 16)) for n in lengths_of(case)]
        pairs = [*([cd.zigzag(n, ranks) for n in lengths_of(case)] for ranks in (1, many)), dealt]
        assume(all(is_clear(case, split_q) for split_q, _ in pairs))
        moved = data.draw(moved_by(case)) if DRAWN[name].moves else None
        need = () if name == "float8" else None
        judge(case, ON_CPU.same_bits(case, pairs, moved=moved, need=need), moved)

    count, many = st.integers(1, 8), st.sampled_from((8, 2, 4))
    backend.draw(16, holds, data=st.data(), case=DRAWN[name].cases, ranks=count, many=many)


DECODED = {
    "options": DRAWN["options"].cases | DRAWN["batch axes"].cases,
    "functions": scored(max_seqlen=40, packs=False, scores=CONDITIONED),
    "float8": float8()
    .filter(lambda case: case.cu_seqlens_q is None)
    .map(lambda case: replace(case, bias=None, mask=None)),
}


@on_backends({CORE: tuple(DECODED)}, of="name")
def test_decoding_of_drawn_cases_keeps_the_oracle_rule(backend, name):
    """With the same bits on any number of ranks if that is wanted."""

    def holds(data, case, ranks, deterministic):
        keys = lengths_of(case)[1]
        if deterministic:
            chosen = [data.draw(of_chunks(keys, ranks, 16)), cd.contiguous(keys, 1)]
        else:
            chosen = [data.draw(splits(keys, ranks))]
        found = [ON_CPU.decoded([case], split, deterministic=deterministic)[0] for split in chosen]
        judge(case, found[0])
        assert all(x.tobytes() == found[-1][of].tobytes() for of, x in found[0].items())

    backend.draw(25, holds, data=st.data(), case=DECODED[name], ranks=st.integers(1, 8), deterministic=st.booleans())


# ---- Single properties -----------------------------------------------------------------------------------------------

LARGE_WITH_TANGENTS: list[dict[str, Any]] = [
    {"score_mean": 3e3, "bias": (1, 1, 13, 1), "dropout": 0.1, "sinks": True, "dlse": True},
    {"bias": (4, 13, 50), "bias_mask": -1e9, "sinks": True, "dlse": True},
    {"dtype": "bfloat16", "score_mean": 5e3, "window": (30, 0)},
]


@on_backends((CORE,))
@pytest.mark.parametrize("options", LARGE_WITH_TANGENTS, ids=str)
@pytest.mark.parametrize("need", [None, NEED])
def test_tangents_of_large_scores_keep_the_oracle_rule(backend, options, need):
    case = ct.Case(**{"seqlen_q": 13, "seqlen_k": 50, "num_heads": 4, "num_heads_kv": 2, "head_dim": 8} | options)
    moved = everything(case)
    judge(case, ON_CPU.results(case, cd.zigzag(13, 3), cd.contiguous(50, 3), moved=moved, need=need), moved)


@on_backends((CORE,))
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_without_check_two_splits_say_all(backend, deterministic, moves):
    sizes: dict[str, Any] = {"seqlen_q": 13, "seqlen_k": 17, "num_heads": 4, "num_heads_kv": 2, "head_dim": 8}
    case = ct.Case(**sizes, causal=True, bias=(17,), sinks=True)
    pair = [cd.Split([cut_evenly(n, 16)[rank::3] for rank in range(3)]) for n in (13, 17)]
    moved = everything(case) if moves else None
    judge(case, ON_CPU.results(case, *pair, moved=moved, check=False, deterministic=deterministic), moved)


MANY: dict[str, Any] = {"seqlen_q": 160, "seqlen_k": 160, "num_heads": 4, "num_heads_kv": 2, "head_dim": 8}


@on_backends((CORE,))
@pytest.mark.parametrize(("dtype", "moves"), [("bfloat16", False), ("float64", False), ("bfloat16", True)])
def test_rows_of_many_ranks_are_added_in_one_order(backend, dtype, moves):
    """The same call gives the same bits; partial dq are added in the dtype of the softmax, not in 16 bits."""
    case = ct.Case(**MANY, causal=True, dtype=dtype)
    moved, need = (everything(case), NEED) if moves else (None, PARTIAL_DQ)
    pair = [cd.zigzag(160, 8)] * 2
    first, second = (ON_CPU.results(case, *pair, moved=moved, need=need, steps=2) for _ in range(2))
    judge(case, first, moved)
    assert_same_bits(second, first)
