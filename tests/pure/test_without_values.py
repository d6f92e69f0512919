"""Calls without values: lse alone and its derivatives, on the CPU, streamed and over ranks."""

import functools
import re
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.testing.tangents import assert_tangents, everything, tangents_by
from tests.compiled import INSTRUCTION_SETS, NUMPY, way_taken
from tests.pure import test_streamed
from tests.pure.test_streamed import chunks_for
from tests.ranks import judge, on_threads
from tests.sampling import examples, sample
from tests.second_derivatives import moved_by
from tests.streams import ON_CPU, judge_tangents

SMALL: dict[str, Any] = {"max_seqlen": 129, "max_head_dim": 80, "max_scores": 2**13}
FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES)


def cases(features=FEATURES, **options):
    """Cases without values, all of which have a gradient of lse."""
    drawn = ct.cases(features=features, **SMALL | options)
    return drawn.map(lambda case: replace(case, has_values=False, dlse=True))


WAYS = pytest.mark.parametrize(("name", "way"), sample((*INSTRUCTION_SETS, NUMPY), 1), ids=str)


@WAYS
@settings(max_examples=examples(120))
@given(case=cases((*FEATURES, "dropout", "packed", "lengths"), max_seqlen=65))
def test_tangents_keep_the_oracle_rule(name, way, case):
    moved = everything(case)
    with way_taken(way):
        assert_tangents(case, moved, tangents_by(cuflash.FlashAttention(**case.keywords), case, moved))


@settings(max_examples=examples(80))
@given(case=ct.with_axes(cases((*FEATURES, "dropout"), ndims=(4,))))
def test_batch_axes_keep_the_oracle_rule(case):
    arrays = case.arrays()
    attn: Any = cuflash.FlashAttention(**case.keywords)
    optional = ct.optional(arrays) | case.random
    out, lse = attn.forward(arrays["q"], arrays["k"], None, **optional)
    need = ct.gradients_of(case.problem)
    found = attn.backward(None, arrays["q"], arrays["k"], None, out, lse, need=need, dlse=arrays["dlse"], **optional)
    ct.assert_forward(case, arrays["dout"], lse)
    ct.assert_backward(case, **{name: x for name, x in found._asdict().items() if x is not None})


@settings(max_examples=examples(60))
@given(data=st.data(), case=cases(test_streamed.FEATURES, max_seqlen=100, max_head_dim=24, score_spreads=(1.0, 8.0)))
def test_streamed_keys_keep_the_oracle_rule(data, case):
    judge(case, ON_CPU.results(case, chunks_for(data, case)))
    moved = data.draw(moved_by(case))
    judge_tangents(case, moved, ON_CPU.tangents(case, moved, chunks_for(data, case)))


# ---- The interface ---------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((2, 4, 70, 33), np.float32), RNG.standard_normal((2, 2, 90, 33), np.float32)
DLSE = RNG.standard_normal((2, 4, 70), np.float32)
ATTENTION: Any = cuflash.FlashAttention(causal=True)
LSE = ATTENTION.forward(Q, K, None).lse
TQ = RNG.standard_normal(Q.shape, np.float32)


def test_lse_is_that_of_attention_with_values():
    v = RNG.standard_normal((2, 2, 90, 7), np.float32)
    np.testing.assert_array_equal(LSE, ATTENTION.forward(Q, K, v).lse)
    np.testing.assert_array_equal(LSE, cuflash.logsumexp(Q, K, causal=True))
    np.testing.assert_array_equal(LSE, ATTENTION.forward(q=Q, k=K, v=None).lse)
    into = np.empty_like(LSE)
    assert cuflash.logsumexp(Q, K, causal=True, lse=into) is into
    np.testing.assert_array_equal(into, LSE)


def test_functions_and_vectors_of_rows_and_columns():
    f, g = RNG.standard_normal(70, np.float32), RNG.standard_normal(90, np.float32)
    by_function = cuflash.logsumexp(Q, K, score=lambda s, i, j, *, f, g: s + f[i] + g[j], f=f, g=g)
    expected = f + cuflash.logsumexp(Q, K, bias=g[None])
    np.testing.assert_allclose(by_function, expected, rtol=0, atol=4e-6)
    hidden = cuflash.logsumexp(Q, K, mask=lambda i, j: j <= i + 20)
    np.testing.assert_allclose(hidden, LSE, rtol=0, atol=4e-6)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'bais'"):
        cuflash.logsumexp(Q, K, bais=g)  # type: ignore[call-overload]


def test_streamed_keys_and_ranks_take_none():
    keys = cuflash.streamed(K, None, chunk=32)
    out, lse = ATTENTION.forward(Q, *keys)
    assert out is None
    np.testing.assert_allclose(lse, LSE, rtol=0, atol=2e-6)
    gradients = ATTENTION.backward(None, Q, K, None, None, LSE, dlse=DLSE)
    found = ATTENTION.backward(None, Q, *keys, None, LSE, dlse=DLSE)
    moved = ATTENTION.jvp(Q, *keys, tq=TQ)
    assert found.dv is gradients.dv is moved.out is moved.tout is None
    for x, y in (
        (found.dq, gradients.dq),
        (found.dk, gradients.dk),
        (moved.tlse, ATTENTION.jvp(Q, K, None, tq=TQ).tlse),
    ):
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-6)

    def work(comm):
        attn: Any = cd.ContextParallel(comm, causal=True, split="contiguous", timeout=30)
        rows, keys = (cd.contiguous(n, 2).part(x, comm.rank, -2) for n, x in ((70, Q), (90, K)))
        dlse = cd.contiguous(70, 2).part(DLSE, comm.rank, -1)
        decoded = attn.decode(Q, keys, None)
        assert decoded.out is None
        np.testing.assert_allclose(decoded.lse, LSE, rtol=0, atol=4e-6)
        out, lse = attn.forward(rows, keys, None)
        found = attn.backward(None, rows, keys, None, None, lse, dlse=dlse)
        assert out is found.dv is None
        return lse, found.dq

    of_ranks = [np.concatenate(x, axis=2) for x in zip(*on_threads(2, work), strict=True)]
    for x, y in zip(of_ranks, (LSE, gradients.dq), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-6)


@pytest.mark.parametrize("with_values", [0, 1])
@pytest.mark.parametrize("pass_", ["forward", "backward", "jvp"])
def test_ranks_agree_on_values(pass_, with_values):
    def work(comm):
        attn: Any = cd.ContextParallel(comm, causal=True, split="contiguous", timeout=30)
        v, out = (K, Q) if comm.rank == with_values else (None, None)
        if pass_ == "backward":
            return attn.backward(out, Q, K, v, out, LSE, dlse=DLSE)
        return getattr(attn, pass_)(Q, K, v, **({"tq": TQ} if pass_ == "jvp" else {}))

    shape = re.escape(f"float32 {K.shape[:2] + K.shape[3:]} besides rows")
    got, expected = (shape, "None") if with_values else ("None", shape)
    with pytest.raises(ValueError, match=rf"^v: got {got} on rank 1, expected {expected} as on rank 0$"):
        on_threads(2, work)


def test_second_derivatives_take_none():
    moved = ATTENTION.jvp(Q, K, None, tq=TQ)
    found = ATTENTION.backward_jvp(None, Q, K, None, None, moved.lse, None, moved.tlse, dlse=DLSE, tq=TQ)
    product = cuflash.hessian_vector_product(ATTENTION, None, Q, K, None, dlse=DLSE, tq=TQ)
    for name in ("tdq", "tdk"):
        np.testing.assert_array_equal(getattr(found, name), getattr(product, name))
    assert found.tdv is product.tdv is None
    twice = cuflash.double_backward(ATTENTION, {"dq": TQ}, None, Q, K, None, dlse=DLSE)
    assert twice.ddout is None
    np.testing.assert_array_equal(twice.ddlse, moved.tlse)
    back = cuflash.jvp_backward(ATTENTION, None, Q, K, None, None, LSE, None, moved.tlse, dtlse=DLSE, tq=TQ)
    np.testing.assert_array_equal(back.of_tangents.dk, ATTENTION.backward(None, Q, K, None, None, LSE, dlse=DLSE).dk)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ATTENTION.backward(None, Q, K, None, None, LSE), "dlse: got None, expected the gradient with respect"),
        (lambda: ATTENTION.forward(Q, K, None, out=Q), "out: got an array, expected None as v is"),
        (lambda: ATTENTION.backward(None, Q, K, None, None, LSE, dlse=DLSE, dv=K), "dv: got an array, expected None"),
        (lambda: ATTENTION.backward(Q, Q, K, None, None, LSE, dlse=DLSE), "dout: got an array, expected None as v is"),
        (lambda: ATTENTION.backward(None, Q, K, None, None, LSE[0], dlse=DLSE), r"lse: got shape \(4, 70\)"),
        (lambda: ATTENTION.forward(Q[..., :0], K[..., :0], None), "q: got last axis of length 0, expected a head dim"),
        (lambda: ATTENTION.jvp(Q, K, None, tv=K), "tv: got an array, expected None as v is"),
    ],
)
def test_what_goes_with_values_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_forgotten_values_are_an_error():
    with pytest.raises(TypeError, match="v"):
        ATTENTION.forward(Q, K)
    with pytest.raises(TypeError, match=r"^v: got None, expected an array; cuflash.logsumexp takes none$"):
        cuflash.attention(Q, K, None)
    with pytest.raises(TypeError, match=r"^k: got None, expected an array"):
        ATTENTION.forward(Q, None, None)


def test_merges_refuse_what_goes_with_outs():
    lses, nothing = list(np.zeros((2, 2, 5))), cast(Any, None)
    out = np.zeros((2, 5, 4))
    with pytest.raises(ValueError, match=r"^touts\[1\]: got an array, expected None as each of outs is"):
        cuflash.merge([None, None], lses, touts=[None, out], tlses=lses)
    with pytest.raises(ValueError, match=r"^dout: got an array, expected None as each of outs is"):
        cuflash.merge_backward(out, [None, None], lses, None, lses[0], dlse=lses[0])
    with pytest.raises(TypeError, match=r"^outs: got NoneType, expected a list or tuple of arrays, or of None"):
        cuflash.merge(nothing, lses)


def test_messages_name_the_function_and_its_arguments():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    for name in ("v", "axis", "dropout"):
        with pytest.raises(TypeError, match=rf"^logsumexp\(\) got an unexpected keyword argument '{name}'"):
            cuflash.logsumexp(q, k, **{name: v})
    with pytest.raises(TypeError, match=r"attn_bias': expected bias$"):
        cuflash.logsumexp(q, k, attn_bias=v)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^logsumexp: got 3 positional arguments, expected q and k: lse has no v, "):
        cuflash.logsumexp(*(q, k, v))  # type: ignore[call-overload]
    attn = cuflash.FlashAttention()
    for call in (cuflash.logsumexp, lambda q, k: attn.column_sums(q, k, LSE)):
        with pytest.raises(ValueError, match=r"^k: got 0-D shape \(\), expected an array of two axes or more"):
            call(q, np.array(1.0, q.dtype))
    found = attn.jvp(q, k, None, tq=q)
    with pytest.raises(ValueError, match=r"^dtlse: got None, expected the gradient with respect to tlse"):
        cuflash.jvp_backward(attn, None, q, k, None, *found, tq=q, dlse=found.lse)


@pytest.mark.parametrize("name", ["plan", "compile", "backward", "backward_jvp"])
def test_gradients_of_values_alone_are_refused(name):
    attn = cuflash.FlashAttention()
    prefix, rows = ("td", {"tlse": LSE, "tq": Q}) if name == "backward_jvp" else ("d", {})
    given = {"dout": None, "out": None, "lse": LSE, "dlse": LSE} if name.startswith("backward") else {}
    given |= {"tout": None} if prefix == "td" else {}
    call = functools.partial(getattr(attn, name), q=Q, k=K, v=None, **given, **rows)
    with pytest.raises(ValueError, match=rf"^need: got {prefix}v without v, expected a gradient of lse, such as dq$"):
        call(need=(f"{prefix}v",))
    call(need=(f"{prefix}q", f"{prefix}v"))


def test_float8_keys_need_their_scale():
    q = np.ones((2, 5, 16), np.float32)
    k, k_scale = cuflash.quantize(q)
    with pytest.raises(ValueError, match=r"^k_scale: got None, expected the scale of k, .*: k_scale=1\.0 if"):
        cuflash.logsumexp(q, k)
    np.testing.assert_allclose(cuflash.logsumexp(q, k, k_scale=k_scale), cuflash.logsumexp(q, q))
