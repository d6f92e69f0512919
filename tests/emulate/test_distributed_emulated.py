"""Ranks whose calls are those of devices: by `cuflash.gpu.backend` on the emulator, against the oracle."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.arrays.array_info import numpy_dtype
from cuflash.arrays.memory_ranges import Band
from cuflash.distributed import rank
from cuflash.shards import merge as merging
from cuflash.spec import call as spec
from tests.emulate.launcher import allocated, launcher
from tests.emulate.slices import EmulatedSlices
from tests.judging import assert_within
from tests.ranks import Shards, Whole, compute, judge, on_threads, results_of
from tests.ranks_with_tangents import everything
from tests.ranks_with_tangents import judge as judge_tangents
from tests.ranks_with_tangents import results_of as tangents_of
from tests.scored import MASKS, SCORES, SCORES_AND_TEXTS, Scored, score_args_of

pytestmark = pytest.mark.one_in(8)
SIZES: dict[str, Any] = {"seqlen_q": 100, "seqlen_k": 140, "num_heads": 2, "num_heads_kv": 1, "head_dim": 64}
PACKED: dict[str, Any] = {"cu_seqlens_q": (0, 30, 100), "cu_seqlens_k": (0, 77, 135)}
CASES = {
    "9.0": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, dlse=True),
    "9.0 no values": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, dlse=True, has_values=False),
    "9.0 dropout": ct.Case(**SIZES, causal=True, dtype="float16", dropout=0.3, alibi_slopes=(2,)),
    "9.0 packed": ct.Case(**SIZES, **PACKED, causal=True, dtype="bfloat16", dropout=0.3),
    "8.0 blocks": ct.Case(**SIZES, dtype="float16", block_mask=(2,), block_size=(16, 32), bias=(100, 140)),
    "8.0": ct.Case(**SIZES, causal=True, dtype="float16", softcap=5.0, layout="bshd"),
    "8.0 float32": ct.Case(**SIZES, dtype="float32", window=(40, 40), mask=(100, 140), kv_lengths=(120,)),
}
SPLIT_Q = cd.Split([[(0, 21), (90, 100)], [(21, 90)]])
SPLIT_K = cd.Split([[(0, 40), (99, 140)], [(40, 99)]])


@pytest.fixture
def emulated(monkeypatch):
    """Lets calls of ranks go by way of the emulator; NumPy merges."""
    merge = merging.merge
    monkeypatch.setattr(
        merging, "merge", lambda outs, lses: merge(*([x.view(np.ndarray) for x in y] for y in (outs, lses)))
    )
    monkeypatch.setattr(spec.Call, "as_callers", lambda self, results, own: [x.view(np.ndarray) for x in results])
    return lambda module: monkeypatch.setattr(rank, "Slices", functools.partial(EmulatedSlices, module=module))


@pytest.mark.parametrize("need", [None, ("dq", "dk", "dv")], ids=["all", "partial dq"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_keep_the_oracle_rule(name, need, emulated):
    case = CASES[name]
    with launcher(name[:3], computes=True) as found:
        emulated(found._module)
        judge(case, results_of(case, SPLIT_Q, SPLIT_K, need=need))


@pytest.mark.parametrize("need", [None, ("dq", "dk", "dv")], ids=["all", "partial dq"])
@pytest.mark.parametrize("name", ["9.0 dropout", "8.0 blocks"])
def test_spans_that_begin_where_blocks_do_are_split(name, need, emulated):
    splits = cd.Split([[(0, 16), (64, 100)], [(16, 64)]]), cd.Split([[(0, 32), (96, 140)], [(32, 96)]])
    with launcher(name[:3], computes=True) as found:
        emulated(found._module)
        judge(CASES[name], results_of(CASES[name], *splits, need=need))


LARGE = {
    "9.0": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, bias=(140,)),
    "9.0 products": ct.Case(**SIZES, dtype="float16", score_mean=-3e4),
    "9.0 packed": ct.Case(**SIZES, **PACKED, dtype="float16", score_mean=-3e4),
    "9.0 float32": ct.Case(**SIZES, dtype="float32", bias=(140,)),
    "8.0": ct.Case(**SIZES, dtype="float16", bias=(140,), layout="bshd"),
    "8.0 products": ct.Case(**SIZES, dtype="float32", window=(40, 40), score_mean=-3e4),
    "8.0 float64": ct.Case(**SIZES, dtype="float64", bias=(140,)),
}


@pytest.mark.parametrize("need", [None, ("dq", "dk", "dv")], ids=["all", "partial dq"])
@pytest.mark.parametrize("name", LARGE)
def test_shards_weigh_what_their_keys_do_where_scores_are_large(name, need, emulated):
    """A finite mask of all keys, or products around -3e4: lse, rounded, does not say what a shard weighs."""
    case = LARGE[name]
    whole = masked(case)
    shards = Shards(whole, SPLIT_Q, SPLIT_K)

    def work(comm):
        attn = cd.ContextParallel(comm, split=SPLIT_Q, split_k=SPLIT_K, timeout=300, steps=3, **case.keywords)
        return compute(attn, shards, whole.arrays, need)

    with launcher(name[:3], computes=True) as found:
        emulated(found._module)
        results = shards.whole(on_threads(2, work))
    judges = ct.yardsticks(case.problem, whole.arrays)
    assert_within({n: x.view(np.ndarray) for n, x in results.items()}, judges)


def masked(case: ct.Case) -> Whole:
    """The problem of a case, where bias and sinks are -1e9."""
    arrays = case.arrays()
    for name in ("bias", "sinks"):
        if name in arrays:
            arrays[name][...] = -1e9
    return Whole(case.problem, arrays, case.keywords, case.random)


@pytest.mark.parametrize("arch", ["9.0", "8.0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_splits_of_decoding_weigh_what_their_keys_do(arch, dtype, emulated):
    case = ct.Case(seqlen_q=2, seqlen_k=300, num_heads=4, num_heads_kv=1, head_dim=64, dtype=dtype, bias=(300,))
    whole, split = masked(case), cd.Split([[(0, 110), (250, 300)], [(110, 250)]])

    def work(comm):
        own = {
            name: split.part(whole.arrays[name], comm.rank, axis) for name, axis in (("k", -2), ("v", -2), ("bias", -1))
        }
        attn = cd.ContextParallel(comm, split=split, timeout=300)
        return attn.decode(whole.arrays["q"], own["k"], own["v"], bias=own["bias"])

    with launcher(arch, computes=True) as found:
        emulated(found._module)
        results = on_threads(2, work)
    judges = ct.yardsticks(case.problem, whole.arrays)
    for result in results:
        assert_within({name: np.asarray(x) for name, x in result._asdict().items()}, judges)


OF_TANGENTS = {
    "9.0": ct.Case(**SIZES, causal=True, dtype="bfloat16", sinks=True, dlse=True, dropout=0.3),
    "8.0": ct.Case(**SIZES, dtype="float16", softcap=5.0, layout="bshd", bias=(100, 140), score_mean=2e3),
    "8.0 bits": ct.Case(**{**SIZES, "seqlen_k": 100, "head_dim": 32}, causal=True, dtype="float32"),
}


@pytest.mark.parametrize("name", OF_TANGENTS)
def test_tangents_of_ranks_keep_the_oracle_rule(name, emulated):
    """Partial results are not rounded before they are merged or added; or results have the same bits on any ranks."""
    case, need = OF_TANGENTS[name], ("tdq", "tdk", "tdv")
    moved = everything(case)
    with launcher(name[:3], computes=True) as found:
        emulated(found._module)
        if "bits" not in name:
            judge_tangents(case, moved, tangents_of(case, moved, SPLIT_Q, SPLIT_K, need=need, timeout=300))
            return
        both = [
            tangents_of(case, moved, *[cd.zigzag(100, ranks)] * 2, need=need, deterministic=True, chunks=4, timeout=300)
            for ranks in (1, 2)
        ]
    judge_tangents(case, moved, both[0])
    for result, x in both[0].items():
        assert x.tobytes() == both[1][result].tobytes(), result


SCORED: dict[str, Any] = {
    "9.0": ("t5", None, "bfloat16", {"dropout": 0.2}),
    "9.0 pairs": ("with_pairs", "documents", "float16", {}),
    "8.0": ("distance", "prefix", "float32", {"window": (90, None)}),
    "9.0 in CUDA": ("branching", None, "bfloat16", {}),
    "8.0 in CUDA": ("polynomial", "near", "float32", {}),
}


@pytest.mark.parametrize("name", SCORED)
def test_functions_keep_the_oracle_rule(name, emulated):
    """They count queries, keys and heads of all ranks; heads are exchanged one after the other."""
    score, mask, dtype, options = SCORED[name]
    functions = (SCORES_AND_TEXTS[score], MASKS[mask] if mask else None)
    random = np.random.default_rng(0)
    shapes = {"q": (2, 100, 64), "k": (2, 140, 64), "v": (2, 140, 64), "dout": (2, 100, 64)}
    arrays = {n: random.standard_normal((1, *shape)).astype(numpy_dtype(dtype)) for n, shape in shapes.items()}
    arrays |= score_args_of(functions, (1, 2, 100, 140), dtype, 0)
    attn: Any = cuflash.FlashAttention(score=functions[0], mask=functions[1], **options)
    case = Scored(attn, arrays, {"seed": 3, "offset": 1} if "dropout" in options else {}, name)
    with launcher(name[:3], computes=True) as found:
        emulated(found._module)
        judge(case, results_of(case, SPLIT_Q, SPLIT_K))


@pytest.mark.parametrize("name", ["9.0", "9.0 dropout", "8.0", "8.0 blocks"])
def test_bits_do_not_depend_on_the_number_of_ranks(name, emulated):
    case, found = replace(CASES[name], seqlen_q=100, seqlen_k=100, bias=None), []
    with launcher(name[:3], computes=True) as module:
        emulated(module._module)
        for ranks in (1, 2):
            splits = [cd.zigzag(100, ranks)] * 2
            found.append(results_of(case, *splits, deterministic=True, chunks=4))
    judge(case, found[0])
    for result, x in found[0].items():
        assert x.tobytes() == found[1][result].tobytes(), result


@given(st.sampled_from((8, 16, 20)), st.integers(0, 20), st.integers(1, 60), st.sampled_from((1, 2)), st.booleans())
def test_rows_are_copied_for_the_same_bits_only_where_accesses_would_be_narrower(columns, first, rows, heads, front):
    """Of arrays of float16; those over one head are contiguous as they are."""
    case = ct.Case(**{**SIZES, "num_heads": heads, "head_dim": columns}, dtype="float16")
    memory, random = allocated(heads * 100 * columns * 2), np.random.default_rng(0)
    whole = memory.view(np.float16).reshape(1, heads, 100, columns)
    whole[...] = random.standard_normal(whole.shape)
    own, out = whole[:, :, first : first + rows], np.zeros_like(whole)
    slices = EmulatedSlices(
        options=cuflash.FlashAttention().options,
        band=Band(0, None, None),
        problem=case.problem,
        random=(0, 0),
        arrays={},
        is_fixed=True,
    )
    begins_wide = first * columns * 2 % 16 == 0
    is_like_copy = begins_wide and (heads == 1 or columns % 8 == 0)
    seen = []

    def call(arrays):
        seen.append(arrays["q"])
        assert arrays["q"].flags.c_contiguous or is_like_copy
        if "out" in arrays:
            arrays["out"][...] = arrays["q"]
        return {"out": arrays.get("out", arrays["q"])}

    target = out[:, :, first + front : first + rows]
    slices.into({"out": target}, {"q": own}, call, front=int(front))
    assert (seen[0] is own) == is_like_copy
    np.testing.assert_array_equal(target, own[:, :, int(front) :])


DECODED = {"9.0": ("t5", None, "bfloat16"), "8.0": (None, "near", "float32")}


@pytest.mark.parametrize("name", DECODED)
def test_decoding_keeps_the_oracle_rule(name, emulated):
    score, mask, dtype = DECODED[name]
    functions = (SCORES[score] if score else None, MASKS[mask] if mask else None)
    random = np.random.default_rng(0)
    shapes = {"q": (2, 3, 64), "k": (1, 140, 64), "v": (1, 140, 64)}
    arrays = {n: random.standard_normal((1, *shape)).astype(numpy_dtype(dtype)) for n, shape in shapes.items()}
    score_args = score_args_of(functions, (1, 2, 3, 140), dtype, 0)
    attn: Any = cuflash.FlashAttention(score=functions[0], mask=functions[1], causal=True, dropout=0.2)
    case = Scored(attn, arrays | score_args, {"seed": 3, "offset": 1}, name)

    def work(comm):
        own = [SPLIT_K.part(arrays[n], comm.rank) for n in ("k", "v")]
        ranks: Any = cd.ContextParallel(comm, split=SPLIT_K, **Whole.of(case).keywords)
        return ranks.decode(arrays["q"], *own, **score_args, **case.random)._asdict()

    with launcher(name[:3], computes=True) as found:
        emulated(found._module)
        first, second = on_threads(2, work)
    judge(case, first)
    for n, x in second.items():
        np.testing.assert_array_equal(x, first[n])
