"""Paged key/value caches: the oracle, the CPU path and the checks of a block table."""

import dataclasses
import inspect
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.cpu import core
from cuflash.gpu.params import parameters
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.options import Options
from cuflash.spec.passes import BACKWARD, FORWARD
from cuflash.spec.problem import PAGE_SIZES, make_problem
from cuflash.testing import Case, reference
from tests.features.test_pages_on_backends import entry_of
from tests.sampling import examples

FEATURES = ("causal", "window", "softcap", "bias", "mask", "alibi_slopes", "gqa", "head_dim_v", "sinks", "dropout")


def paged_cases(features=FEATURES, **options):
    every = ct.cases(features=(*features, "pages"), ndims=[4], max_head_dim=40, **options)
    return every.filter(lambda case: case.page_size)


def inputs(case, arrays=None):
    arrays = case.arrays() if arrays is None else arrays
    return ct.qkv(arrays), ct.optional(arrays) | case.random


def run(case, arrays=None):
    qkv, optional = inputs(case, arrays)
    return cuflash.FlashAttention(**case.keywords).forward(*qkv, **optional)


# ---- Against attention over keys in one piece ------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(paged_cases([f for f in FEATURES if f != "dropout"], dtypes=["float64"], strides=["contiguous", "flipped"]))
def test_the_oracle_is_that_of_each_entry_by_itself(case):
    """With as many keys as the entry has: the diagonal follows the lengths."""
    arrays = case.arrays()
    out, lse = reference.forward(case.problem, *ct.qkv(arrays), **ct.optional(arrays))
    whole = ct.gather_pages(arrays, case.layout)
    options = Options(**{name: value for name, value in case.keywords.items() if name != "dropout"})
    for b, length in enumerate(case.kv_lengths):
        first = np.s_[b : b + 1, :, :length] if case.layout == "bhsd" else np.s_[b : b + 1, :length]
        q, k, v = whole["q"][b : b + 1], whole["k"][first], whole["v"][first]
        optional: dict[str, Any] = {
            n: entry_of(whole[n], b, case.batch, length) for n in ("bias", "mask") if n in whole
        }
        optional |= {"sinks": whole["sinks"]} if case.sinks else {}
        if case.alibi_slopes:
            optional["alibi_slopes"] = np.broadcast_to(whole["alibi_slopes"], (case.batch, case.num_heads))[b]
        expected = reference.forward(make_problem(options, q, k, v, **optional), q, k, v, **optional)
        np.testing.assert_array_equal(out[b : b + 1], expected[0])
        np.testing.assert_array_equal(lse[b : b + 1], expected[1])


@settings(max_examples=examples(60))
@given(paged_cases(["float8", "gqa"], layouts=["bhsd"], min_seqlen=0), st.booleans())
def test_gathered_keys_are_those_of_all_entries(case, is_empty):
    """Of none, too."""
    case = dataclasses.replace(case, batch=0, kv_lengths=()) if is_empty else case
    arrays = case.arrays()
    whole = ct.gather_pages(arrays)
    for name in ("k", "v"):
        assert whole[name].shape == (case.batch, arrays[name].shape[-3], case.seqlen_k, arrays[name].shape[-1])


def test_pages_may_be_shared():
    case = Case(batch=3, seqlen_q=3, seqlen_k=64, head_dim=4, kv_lengths=(16, 17, 64), page_size=16)
    table = case.arrays()["block_table"]
    assert len(set(table[:, 0])) == 1
    assert len(set(table[table >= 0])) == 1 + 1 + 3
    ct.check(lambda q, k, v, **optional: cuflash.attention(q, k, v, **optional), case)


@pytest.mark.skipif(core.why_not() is not None, reason="without the compiled core all keys are gathered")
def test_only_a_tile_is_gathered_at_a_time():
    case = Case(batch=2, seqlen_q=1, seqlen_k=2**16, head_dim=32, kv_lengths=(2**16, 2**15), page_size=64)
    arrays = case.arrays()
    run(case, arrays)
    tracemalloc.start()
    try:
        run(case, arrays)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < arrays["k"].nbytes / 2


def test_cases_check_themselves():
    with pytest.raises(ValueError, match="page_size: got 32, expected a divisor of seqlen_k = 48"):
        dataclasses.replace(BASE, page_size=32)
    assert dataclasses.replace(BASE, kv_lengths=None).kv_lengths == (48,) * BASE.batch
    again = Case.from_problem(BASE.problem)
    assert (again.page_size, again.seqlen_k) == (16, 48)
    assert again.problem.k.shape[1:] == BASE.problem.k.shape[1:]


def test_no_pages_at_all():
    q, pool = np.ones((2, 1, 3, 4), np.float32), np.ones((5, 1, 16, 4), np.float32)
    table, lengths = np.zeros((2, 0), np.int32), np.zeros(2, np.int32)
    out, lse = cuflash.FlashAttention().forward(q, pool, pool, block_table=table, kv_lengths=lengths)
    assert not out.any() and np.all(lse == -np.inf)


# ---- Plans -----------------------------------------------------------------------------------------------------------


def planned(arch="9.0", pass_=FORWARD, **changes):
    sizes: dict[str, Any] = {
        "batch": 2,
        "num_heads": 8,
        "num_heads_kv": 2,
        "seqlen_q": 1,
        "seqlen_k": 2048,
        "head_dim": 128,
    }
    others: dict[str, Any] = {"page_size": 64, "kv_lengths": (99, 2048), "dtype": "bfloat16", "causal": True}
    return choose_plan(Case(**sizes | others | changes).problem, DeviceSpec.for_arch(arch), pass_)


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({}, "sm90/decode.cu"),
        ({"seqlen_q": 300}, "sm90/forward.cu"),
        ({"arch": "8.0"}, "sm80/decode.cu"),
        ({"arch": "8.0", "seqlen_q": 300}, "sm80/forward.cu"),
        ({"arch": "12.0", "dtype": "float16", "seqlen_q": 300}, "sm80/forward.cu"),
        ({"dtype": "float32", "seqlen_q": 300}, "sm80/forward.cu"),
        ({"dtype": "float64"}, "sm80/decode.cu"),
        ({"dtype": "float64", "seqlen_q": 300}, "sm80/forward.cu"),
        ({"strides": "padded"}, "sm80/decode.cu"),
        ({"strides": "padded", "seqlen_q": 300}, "sm80/forward.cu"),
    ],
    ids=str,
)
def test_kernels(changes, source):
    plan = planned(**changes)
    kernel = plan.kernels[0]
    assert kernel.source == source
    defines = dict(kernel.defines)
    assert (defines["CUFLASH_PAGE_SIZE"], defines["CUFLASH_FOLLOWS_LENGTHS"]) == (64, 1)
    assert "pages64" in kernel.name
    assert dict(planned(**changes | {"causal": "top_left"}).kernels[0].defines)["CUFLASH_FOLLOWS_LENGTHS"] == 0
    by_lengths = planned(**changes | {"causal": "lengths"})
    assert by_lengths.problem == planned(**changes | {"causal": True}).problem


def test_the_plan_says_why_float32_is_not_split():
    assert "not sm90/forward_fp32: it would split all pages" in planned(dtype="float32", seqlen_q=300).reason


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seqlen_q", [1, 300])
def test_a_box_lies_in_one_page_and_in_one_tile(seqlen_q, page_size):
    for head_dim in (64, 128, 192, 256):
        plan = planned(seqlen_q=seqlen_q, page_size=page_size, head_dim=head_dim)
        for name in "kv":
            (spec,) = (spec for spec in plan.tensor_maps if spec.name == name)
            assert page_size % spec.rows == plan.tiles[0].block_n % spec.rows == 0
            assert spec.rows >= 16
            assert spec.shape == (head_dim, page_size, 2, plan.problem.k.shape[0])


def test_no_plan_for_the_backward_pass():
    with pytest.raises(NotImplementedError, match=r"^block_table: got one for the backward pass.*gather"):
        planned(pass_=BACKWARD)


def test_parameters():
    plan = planned()
    table = plan.problem.block_table
    params = parameters(plan, {})[0]
    assert params["num_pages"] == plan.problem.k.shape[0] == 2 + 32 + 3 - 1  # one page is shared
    assert params["block_table_strides"].tolist() == list(table.strides) == [32, 1]
    assert (params["seqlen_k"], params["diagonal"]) == (2048, 2047)
    assert params["k_strides"].tolist() == [2 * 64 * 128, 64 * 128, 128]


def test_bytes_are_those_of_the_keys_and_not_of_the_pool():
    contiguous, paged = Case(seqlen_q=1, seqlen_k=64, head_dim=8, kv_lengths=(64,)), planned().problem
    small = dataclasses.replace(contiguous, page_size=16).problem
    assert small.forward_bytes == contiguous.problem.forward_bytes + 4 * 4
    assert paged.forward_bytes > 2 * 2 * 2048 * 128 * 2 * 2


# ---- Bad input -------------------------------------------------------------------------------------------------------

BASE = Case(batch=2, num_heads=2, seqlen_q=3, seqlen_k=48, head_dim=8, kv_lengths=(17, 48), page_size=16)


def changed(**arrays):
    return {**BASE.arrays(), **arrays}


def refused(arrays, error, message):
    qkv, optional = inputs(BASE, arrays)
    for call in (cuflash.FlashAttention().forward, cuflash.FlashAttention().plan, cuflash.attention):
        with pytest.raises(error, match=re.escape(message)):
            call(*qkv, **optional)


POOLS = {size: np.zeros((4, 2, size, 8), np.float32) for size in (0, 8, 17, 512)}


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"block_table": np.zeros((2, 3))}, TypeError, "block_table: got dtype float64, expected int32"),
        (
            {"block_table": np.zeros((2, 3), np.int16)},
            TypeError,
            "block_table: got dtype int16, expected int32 or int64",
        ),
        (
            {"block_table": np.full((2, 3), 2**40)},
            ValueError,
            "block_table: got an entry 1099511627776, expected integers",
        ),
        ({"block_table": np.zeros(2, np.int32)}, ValueError, "block_table: got shape (2,), expected (batch, max"),
        ({"block_table": np.zeros((3, 3), np.int32)}, ValueError, "block_table: got shape (3, 3), expected (batch,"),
        ({"block_table": np.full((2, 3), -1, np.int32)}, ValueError, "block_table: got an entry -1, expected 0 to"),
        ({"block_table": np.full((2, 3), 99, np.int32)}, ValueError, "block_table: got an entry 99, expected 0 to"),
        ({"block_table": [[0, 1, 2]] * 2}, TypeError, "block_table: got list, expected a NumPy"),
        (
            {"block_mask": np.ones((1, 1), bool)},
            NotImplementedError,
            "block_mask: got it together with block_table, expected one of them; give the pairs of its blocks as a",
        ),
        ({"kv_lengths": None}, ValueError, "kv_lengths: got None, expected lengths of shape (batch,) = (2,), which"),
        ({"kv_lengths": np.array([3, 49])}, ValueError, "kv_lengths: got an entry 49, expected 0 to seqlen_k = 48"),
        *(
            ({"k": pool, "v": pool}, ValueError, f"k: got {size} keys a page in shape (4, 2, {size}, 8), expected")
            for size, pool in POOLS.items()
        ),
        ({"k": np.zeros((0, 2, 16, 8), np.float32)}, ValueError, "k: got shape (0, 2, 16, 8), expected a pool of"),
        ({"v": np.zeros((1, 2, 16, 8), np.float32)}, ValueError, "v: got num_pages 1, expected num_pages 7 as k has"),
        ({"v": np.zeros((7, 2, 32, 8), np.float32)}, ValueError, "v: got page_size 32, expected page_size 16 as k"),
        ({"k": np.zeros((7, 3, 16, 8), np.float32)}, ValueError, "v: got num_heads_kv 2, expected num_heads_kv 3"),
        ({"k": np.zeros((7, 2, 16, 9), np.float32)}, ValueError, "k: got head_dim 9, expected head_dim 8 as q has"),
    ],
)
def test_bad_inputs(arrays, error, message):
    refused(changed(**arrays), error, message)


def test_arrays_have_four_axes():
    arrays = changed()
    for name in "qkv":
        arrays[name] = arrays[name][0]
    arrays |= {"kv_lengths": np.array([3]), "block_table": np.zeros((1, 2), np.int32)}
    refused(arrays, ValueError, "q: got 3-D shape (2, 3, 8), expected a 4-D array, which a block_table needs")


def test_too_many_keys():
    arrays = changed(block_table=np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2, 2**27), (0, 0)))
    refused(arrays, ValueError, "block_table: got seqlen 2147483648, expected at most")


def test_backward_is_refused():
    (q, k, v), optional = inputs(BASE)
    out, lse = run(BASE)
    with pytest.raises(NotImplementedError, match=r"^block_table: got ndarray, expected None.*gather the pages"):
        cuflash.FlashAttention().backward(out, q, k, v, out, lse, **optional)


def test_the_plan_of_the_cpu_says_so():
    qkv, optional = inputs(BASE)
    assert "no backward pass with a block_table" in cuflash.FlashAttention().plan(*qkv, **optional).describe(
        verbose=True, width=0
    )


def test_every_method_takes_a_block_table():
    for function in (cuflash.FlashAttention.forward, cuflash.attention):
        assert "block_table" in inspect.signature(function).parameters
    case = ct.Case(batch=2, seqlen_q=3, seqlen_k=64, head_dim=8, page_size=16, kv_lengths=(50, 7))
    arrays, attn = case.arrays(), cuflash.FlashAttention()
    for method in (attn.plan, attn.compile):
        method(*ct.qkv(arrays), **ct.optional(arrays))
        with pytest.raises(ValueError, match="kv_lengths"):
            method(*ct.qkv(arrays), block_table=arrays["block_table"])


def test_gradients_of_pages_have_no_tangents():
    case = Case(seqlen_q=2, seqlen_k=32, batch=1, num_heads=1, head_dim=8, page_size=16, kv_lengths=(20,))
    qkv, optional = inputs(case)
    attn: Any = cuflash.FlashAttention()
    tangents = {f"t{name}": x for name, x in zip("qkv", qkv, strict=True)}
    out, lse, tout, tlse = attn.jvp(*qkv, **optional, **tangents)
    with pytest.raises(NotImplementedError, match=r"^block_table: got one for the backward pass.*gather"):
        attn.backward_jvp(out, *qkv, out, lse, tout, tlse, **optional)
