"""Context parallel calls on k and v, or q, k and v, of float8: forward passes and steps of decoding by threads."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash.distributed as cd
import cuflash.testing as ct
from tests.pure.test_schedule import splits
from tests.ranks import Shards, Whole, on_threads
from tests.sampling import examples

FEATURES = (*ct.FEATURES, "float8", "sinks", "dropout", "block_mask", "packed")
SMALL: dict[str, Any] = {"features": FEATURES, "max_seqlen": 65, "max_head_dim": 24, "max_scores": 2**11}
PER_HEAD = {"block": "head", "token": "tensor"}  # in place of scales of blocks of rows


@st.composite
def float8_cases(draw):
    case = draw(ct.cases(**SMALL) | ct.with_axes(ct.cases(**SMALL, ndims=(4,))))
    scales: dict[str, Any] = {name: getattr(case, name) for name in ("k_scale", "v_scale")}
    scales = {name: PER_HEAD.get(per, per) for name, per in scales.items()}
    if draw(st.booleans()):
        scales |= {"q_float8": True, "dtype": "bfloat16", "q_scale": draw(st.sampled_from([None, "tensor", "head"]))}
    kv_dtype = case.kv_dtype or "float8_e4m3fn"
    return replace(case, kv_dtype=kv_dtype, dlse=False, **scales)


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), float8_cases(), st.integers(1, 5), st.booleans())
def test_any_split_of_any_case_keeps_the_oracle_rule(data, case, ranks, deterministic):
    if deterministic:
        split_q, split_k = (cd.contiguous(n, ranks) for n in (case.seqlen_q, case.seqlen_k))
    else:
        split_q, split_k = (data.draw(splits(n, ranks)) for n in (case.seqlen_q, case.seqlen_k))
    assume(case.seqlen_q == 1 or any(split_q.rows(rank) != 1 for rank in range(ranks)))
    shards, arrays = Shards(Whole.of(case), split_q, split_k), case.arrays()

    def work(comm):
        own = shards.of(comm.rank, arrays)
        options = {"deterministic": deterministic, "chunks": ranks, "timeout": 30}
        attn: Any = cd.ContextParallel(comm, split=split_q, split_k=split_k, **case.keywords, **options)
        return attn.forward(*ct.qkv(own), **ct.optional(own), **case.random)._asdict()

    results = shards.whole(on_threads(ranks, work))
    assert results["out"].dtype.name == case.problem.dtype
    ct.assert_forward(case, results["out"], results["lse"])


@settings(max_examples=examples(25), deadline=None)
@given(st.data(), float8_cases(), st.integers(1, 5))
def test_decoding_keeps_the_oracle_rule(data, case, ranks):
    assume(case.cu_seqlens_q is None)
    case = replace(case, bias=None, mask=None)
    split, axis = data.draw(splits(case.seqlen_k, ranks)), -3 if case.layout == "bshd" and case.ndim > 2 else -2
    arrays = case.arrays()

    def work(comm):
        k, v = (split.part(arrays[name], comm.rank, axis) for name in "kv")
        attn = cd.ContextParallel(comm, split=split, timeout=30, **case.keywords)
        return attn.decode(arrays["q"], k, v, **ct.optional(arrays), **case.random)

    for out, lse in on_threads(ranks, work):
        assert out.dtype.name == case.problem.dtype
        ct.assert_forward(case, out, lse)


X = np.ones((2, 6, 8), ml_dtypes.float8_e4m3fn)
NO_SCALES: dict[str, Any] = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}


@pytest.mark.parametrize(
    ("optional", "error", "message"),
    [
        (
            {"k_scale": np.ones((2, 6), np.float32)},
            NotImplementedError,
            r"^k_scale: got shape \(2, 6\), factors of bloc",
        ),
        (
            {"q_scale": np.ones(3, np.float32)},
            NotImplementedError,
            r"^q_scale: got shape \(3,\), factors of blocks of r",
        ),
        (
            {"k_scale": np.ones((3, 1), np.float32)},
            ValueError,
            r"^k_scale: got shape \(3, 1\), expected a shape that b",
        ),
    ],
)
def test_scales_that_are_refused(optional, error, message):
    (comm,) = cd.threads(1)
    with pytest.raises(error, match=message):
        cd.ContextParallel(comm, split="contiguous").forward(X, X, X, **NO_SCALES | optional)


def test_scales_of_ranks_are_compared():
    def work(comm):
        scale = np.full((2, 1), 1 + comm.rank, np.float32)
        cd.ContextParallel(comm, split="contiguous", timeout=5).forward(X, X, X, **NO_SCALES | {"v_scale": scale})

    with pytest.raises(ValueError, match=r"^v_scale: got float32 \(2, 1\) with checksum \w+ on rank 1, expected "):
        on_threads(2, work)


def test_gradients_are_refused():
    (comm,) = cd.threads(1)
    x, lse = X.astype(ml_dtypes.bfloat16), np.ones((2, 6), np.float32)
    with pytest.raises(NotImplementedError, match=r"^k: got dtype float8_e4m3fn for the backward pass, expected "):
        cd.ContextParallel(comm, split="contiguous").backward(x, X, X, X, x, lse, **NO_SCALES)
