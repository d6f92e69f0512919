"""Gradients of bias, slopes, scale and softcap on the device, and calls that ask for some gradients only."""

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.spec.outputs import GRADIENTS
from cuflash.spec.passes import BACKWARD
from tests.gpu.planned import is_sm90, plan_of

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32", "float64")
SCORES = ("dbias", "dalibi_slopes", "dscale", "dsoftcap")


def case_of(seqlen_q, seqlen_k, **options):
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
    lengths = {"m": seqlen_q, "n": seqlen_k}
    for name in {"bias", "mask"} & options.keys():
        options[name] = tuple(lengths.get(n, n) for n in options[name])
    return ct.Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes | options)


def run(cupy, case, need, *, deterministic=False, **results):
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
    inputs = ct.qkv(arrays)
    out, lse = attn.forward(*inputs, **ct.optional(arrays) | case.random)
    keywords = ct.optional_backward(arrays) | case.random | results
    return attn.backward(arrays["dout"], *inputs, out, lse, **keywords, need=need)


@pytest.mark.parametrize("bias", [(4, 700, 900), (2, 1, 1, 900), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeatable_bit_by_bit(cupy, dtype, bias):
    """Whatever else is computed, and wherever the results go."""
    case = case_of(700, 900, dtype=dtype, bias=bias, softcap=5.0, alibi_slopes=(2, 4), causal=True)
    first = run(cupy, case, SCORES)
    ct.assert_backward(case, **first._asdict())
    frame = cupy.full((*first.dbias.shape[:-1], 2 * first.dbias.shape[-1]), np.nan, first.dbias.dtype)
    again = run(cupy, case, ("dq", *SCORES), dbias=frame[..., ::2])
    for name in SCORES:
        np.testing.assert_array_equal(ct.to_numpy(getattr(again, name)), ct.to_numpy(getattr(first, name)))
    assert again.dbias.data.ptr == frame.data.ptr
    assert cupy.isnan(frame[..., 1::2].astype(np.float32)).all()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("options", [{}, {"mask": (2, 1, 1, "n")}, {"causal": True, "dropout": 0.2}], ids=str)
@pytest.mark.parametrize("bias", [(4, "m", "n"), (2, 1, "m", "n"), (2, 4, "m", "n"), ("m", "n")], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(500, 700), (330, 388)])
@pytest.mark.parametrize("head_dim", [32, 64])
def test_dbias_of_float32(cupy, head_dim, seqlen_q, seqlen_k, bias, options):
    """By tiles that blocks of the main kernel add to memory or store, or in a fixed order by a kernel of its own."""
    case = case_of(seqlen_q, seqlen_k, dtype="float32", head_dim=head_dim, bias=bias, **options)
    need = ("dq", "dk", "dv", "dbias")
    summed = case.batch * case.num_heads // int(np.prod(case.bias[:-2]))  # terms of each element
    for deterministic in (False, True):
        found = run(cupy, case, need, deterministic=deterministic)
        ct.assert_backward(case, **found._asdict())
        again = run(cupy, case, need, deterministic=deterministic)
        if deterministic or summed <= 2:  # two terms have one sum in any order
            np.testing.assert_array_equal(ct.to_numpy(found.dbias), ct.to_numpy(again.dbias))
    if is_sm90():
        arrays = case.arrays(cupy.asarray)
        attn = cuflash.FlashAttention(**case.keywords)
        plan = plan_of(BACKWARD, attn, *ct.qkv(arrays), **ct.optional(arrays), need=need)
        assert "the main kernel" in plan.reason.partition("dbias: ")[2].split("\n")[0]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("need", [("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dv"), ("dq", "dk"), ("dsinks",), ()])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_only_what_is_needed(cupy, dtype, need, deterministic, head_dim):
    case = case_of(300, 500, dtype=dtype, head_dim=head_dim, causal=True, sinks=True)
    gradients = run(cupy, case, need, deterministic=deterministic)
    assert gradients._fields == tuple(name for name in GRADIENTS if name in need)
    ct.assert_backward(case, **gradients._asdict())


def test_plans_name_what_is_needed(cupy):
    arrays = case_of(113, 203, dtype="bfloat16", bias=("n",)).arrays(cupy.asarray)
    plans = cuflash.FlashAttention().plan(*ct.qkv(arrays), bias=arrays["bias"], need=("dv", "dbias", "dscale"))
    assert "for dv, dbias, dscale" in plans.describe(verbose=True, width=0)
