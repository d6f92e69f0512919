"""float32 arrays split into bf16 terms, as the kernels that multiply them read them."""

from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash import emulator
from cuflash.arrays.array_info import layout_of, view_4d
from cuflash.emulator import SCHEDULES
from cuflash.gpu.params import POINTER_WORD, parameters
from cuflash.plan.sm90.copies import COPIED, COPY_WARPS
from cuflash.plan.tiles import round_up
from cuflash.spec.passes import FORWARD
from cuflash.spec.problem import make_problem
from tests.emulate import attention
from tests.emulate.checks import FEW
from tests.judging import bits

SPLIT_ROWS = 64


def split(case, arrays, count=3, schedule=SCHEDULES[0]):
    """The bf16 terms of each array, as float64, without the columns of padding, and the width of their loads."""
    arrays = {name: attention.guarded(array) for name, array in arrays.items()}
    problem = make_problem(case.options, *ct.qkv(arrays), **ct.optional(arrays))
    plan = attention.plan_for(problem, FORWARD, arrays | {"out": arrays["dout"]}, "8.0", None)
    rows = {"CUFLASH_BLOCK_M": SPLIT_ROWS, "CUFLASH_NUM_WARPS": COPY_WARPS, "CUFLASH_SHARED_BYTES": 0}
    defines = dict(plan.kernels[0].defines) | rows | {"CUFLASH_BF16_TERMS": count, "CUFLASH_COPIED": 15}
    params = parameters(plan, {"dout": layout_of(arrays["dout"], problem.layout)})
    words = params.view(np.uint64)
    for name, array in arrays.items():
        words[POINTER_WORD[name]] = array.ctypes.data
    bf16_terms, blocks = {}, 0
    for name in COPIED:
        batch, heads, seqlen, columns = layout_of(arrays[name], problem.layout).shape
        bf16_terms[name] = emulator.guarded_array(
            (count, batch, heads, seqlen, round_up(columns, 8)), ml_dtypes.bfloat16
        )
        words[POINTER_WORD[f"{name}_copy"]] = bf16_terms[name].ctypes.data
        blocks += batch * heads * -(-seqlen // SPLIT_ROWS)
    module = emulator.build(Path("helpers/split_fp32.cu"), defines)
    threads = 32 * COPY_WARPS
    module.launch(plan.kernels[0].name, params, grid=blocks, threads=threads, shared_bytes=0, schedule=schedule)
    found = {name: x.astype(np.float64)[..., : arrays[name].shape[-1]] for name, x in bf16_terms.items()}
    return found, defines["CUFLASH_LOAD_BYTES"]


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[2]], ids=str)
@pytest.mark.parametrize(
    ("options", "load_bytes"),
    [
        ({"head_dim": 24, "layout": "bshd"}, 16),
        ({"head_dim": 128, "head_dim_v": 12}, 16),
        ({"head_dim": 6, "head_dim_v": 10}, 8),
        ({"head_dim": 5, "head_dim_v": 33}, 4),
        ({"head_dim": 16, "strides": "padded", "kv_lengths": (150, 0)}, 4),
        ({"head_dim": 16, "kv_lengths": (64, 77), "kv_lengths_dtype": "int64"}, 16),
    ],
    ids=str,
)
def test_pieces_sum_to_the_numbers(options, load_bytes, schedule):
    sizes = {"seqlen_q": 70, "seqlen_k": 150, "batch": 2, "num_heads": 4, "num_heads_kv": 2, "dtype": "float32"}
    case = ct.Case(**sizes | options)
    arrays = case.arrays()
    bf16_terms, width = split(case, arrays, schedule=schedule)
    two, _ = split(case, arrays, 2, schedule)
    assert width == load_bytes
    for name in COPIED:
        x = np.nan_to_num(view_4d(arrays[name], case.layout).astype(np.float64))  # NaN is what kv_lengths hides
        assert (bf16_terms[name].sum(axis=0) == x).all()
        high, middle, low = np.abs(bf16_terms[name])
        assert (middle <= 2**-8 * high).all()
        assert (low <= 2**-8 * middle).all()
        assert (two[name] == bf16_terms[name][:2]).all()


def test_pieces_at_the_end_of_the_range():
    """One infinity, or NaN, and a product with a finite factor is what it should be, whatever its terms are."""
    largest = np.finfo(np.float32).max
    special = np.array([np.inf, -np.inf, np.nan, largest, -largest, 1.0, 2.0**-110, -0.0], np.float32)
    case = ct.Case(seqlen_q=1, seqlen_k=1, head_dim=8, dtype="float32")
    arrays = case.arrays()
    arrays["q"][...] = special
    with np.errstate(invalid="ignore"):
        high, middle, low = split(case, arrays)[0]["q"].reshape(3, -1)
        np.testing.assert_array_equal(low[3:] + middle[3:] + high[3:], special[3:].astype(np.float64))
        np.testing.assert_array_equal(low[:3], special[:3])
        assert (np.sign(high[:2]) == [1, -1]).all()
        assert (np.abs(high[:2]) == 1).all()
        assert not middle[:2].any()
        high, low = split(case, arrays, 2)[0]["q"].reshape(2, -1)
        np.testing.assert_allclose(low[3:] + high[3:], special[3:].astype(np.float64), rtol=2.0**-16)
        np.testing.assert_array_equal(low[:3], special[:3])
        np.testing.assert_array_equal(high[:2], [1, -1])


SPECIAL = (np.inf, -np.inf, np.nan, np.finfo(np.float32).max, -3e38, 2.0**-130)


@FEW
@given(
    dims=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    strides=st.sampled_from(("contiguous", "padded", "flipped")),
    kv_lengths=st.sampled_from((None, (150, 60))),
    specials=st.lists(st.tuples(st.sampled_from("qkv"), st.sampled_from(SPECIAL)), max_size=3),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 99),
)
def test_the_producer_splits_as_the_kernel_before_does(dims, strides, kv_lengths, specials, schedule, seed):
    """To the bit, whatever the numbers are."""
    sizes: dict[str, Any] = {
        "seqlen_q": 150,
        "seqlen_k": 150,
        "batch": 2,
        "num_heads": 4,
        "num_heads_kv": 2,
        "dtype": "float32",
    }
    case = ct.Case(**sizes, head_dim=dims[0], head_dim_v=dims[1], strides=strides, kv_lengths=kv_lengths, seed=seed)
    problem, arrays = attention.inputs_of(case)
    rng = np.random.default_rng(seed)
    for name, number in specials:
        arrays[name][tuple(rng.integers(arrays[name].shape))] = number
    results = []
    for few_readers in (0, 99):
        with mock.patch("cuflash.plan.sm90.forward.FEW_READERS", few_readers):
            plan = attention.plan_for(problem, FORWARD, arrays, "9.0", None)
            assert [kernel.source for kernel in plan.kernels][-1] == "sm90/forward_fp32.cu"
            assert len(plan.kernels) == (1 if few_readers else 2)
            found = attention.forward(problem, arrays, arch="9.0", schedule=schedule)
            results.append(bits(dict(zip(("out", "lse"), found, strict=True))))
    assert results[0] == results[1]
