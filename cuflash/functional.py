"""Attention in one call, without gradients; and what two calls of `FlashAttention` make of second derivatives."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from cuflash.arrays.checks import type_error, value_error
from cuflash.flash_attention import FlashAttention
from cuflash.score_mod import Score
from cuflash.spec.inputs import NamedGradientTangents, OptionalArrays, Tangents
from cuflash.spec.keywords import unexpected_keyword
from cuflash.spec.options import BLOCK_SIZE, Causal, Function, Window
from cuflash.spec.outputs import DEFAULT_NEED_TANGENTS
from cuflash.spec.results import Array, DoubleGradients, JvpGradients
from cuflash.spec.streamed import takes_star
from cuflash.spec.type_variables import ArrayT, KeyT, ValueT, WithFunction
from cuflash.spec.without_values import takes_no_values

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.distributed import ContextParallel
    from cuflash.spec.inputs import OptionalArrays, ScoreGradientTangents, WithTangents
    from cuflash.spec.options import ForwardKeywords
    from cuflash.spec.outputs import OfHessian, WithDlse
    from cuflash.spec.type_variables import Integer

    Plain: TypeAlias = FlashAttention[None] | ContextParallel[None]  # without a score or mask function
    WithScores: TypeAlias = FlashAttention[WithFunction] | ContextParallel[WithFunction]

_KEPT_TYPES = frozenset((bool, float, int, str, NoneType))
# Instances with options of these types are kept, because checking the options takes half as long as a small call.
_kept = functools.lru_cache(maxsize=64, typed=True)(FlashAttention)


# Only functions read arrays of any name, so that type checkers refuse misspelt arguments of calls without one.
@overload
def attention(
    q: ArrayT,
    k: Array,
    v: Array,
    *,
    score: None = None,
    seed: int | None = None,
    offset: int | None = None,
    out: Array | None = None,
    **keywords: Unpack[ForwardKeywords],
) -> ArrayT: ...


@overload
def attention(q: ArrayT, k: Array, v: Array, *, score: Function | Score, **arguments: Any) -> ArrayT: ...


@overload
def attention(q: ArrayT, k: Array, v: Array, *, mask: Function, **arguments: Any) -> ArrayT: ...


@takes_star
def attention(
    q: ArrayT,
    k: Array,
    v: Array,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    precision: Literal["highest", "tf32"] = "highest",
    dropout: float = 0.0,
    block_size: int | tuple[int, int] = BLOCK_SIZE,
    score: Function | Score | None = None,
    bias: Array | None = None,
    mask: Array | Function | None = None,
    kv_lengths: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    block_mask: Array | None = None,
    block_table: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    seed: int | None = None,
    offset: int | None = None,
    out: Array | None = None,
    **score_args: Array,
) -> ArrayT:
    """Exact attention, ``softmax(scale * q @ k.T) @ v`` of every head, in memory linear in the sequence length.

    Parameters
    ----------
    q : array
        (..., num_heads, seqlen_q, head_dim); float16, bfloat16, float32 or float64.
    k : array
        (..., num_heads_kv, seqlen_k, head_dim), dtype of q or float8; num_heads_kv divides num_heads.
    v : array
        (..., num_heads_kv, seqlen_k, head_dim_v), dtype of k.
    causal, scale, window, softcap, layout, precision, dropout, block_size, score :
        Options, as `FlashAttention` takes them; all but `deterministic`, which only gradients need.
    bias, mask, kv_lengths, alibi_slopes, sinks, block_mask, block_table, cu_seqlens_q, cu_seqlens_k :
        Arrays, optional, as `FlashAttention.forward` takes them; a scalar stands for an array without axes. `mask` may
        instead be a function, as `FlashAttention` takes it.
    q_scale, k_scale, v_scale, seed, offset, out :
        Optional, as `FlashAttention.forward` takes them.
    **score_args :
        The arrays that `score` and a `mask` function read.

    Returns
    -------
    array
        Shape of q with head_dim_v as last axis and all batch axes, dtype and library of q: NumPy, CuPy, or of the
        library that q comes from.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `FlashAttention` and `FlashAttention.forward` do.

    See Also
    --------
    FlashAttention : Options that are checked once, and gradients.
    cuflash.torch.attention, cuflash.jax.attention : For autograd and JAX's transformations.

    References
    ----------
    Dao: FlashAttention-2 (2023), https://arxiv.org/abs/2307.08691, algorithm 1. The sources of
    options are those of `FlashAttention`.

    Examples
    --------
    On plain matrices it is the formula:

    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> weights = np.exp(q @ k.T / 2)
    >>> np.allclose(cuflash.attention(q, k, v), weights / weights.sum(axis=1, keepdims=True) @ v)
    True
    """
    if v is None:
        raise type_error("v", "None", "an array; cuflash.logsumexp takes none")
    types = (type(causal), type(scale), type(window), type(softcap), type(layout), type(precision), type(dropout))
    mask_function = mask if callable(mask) else None
    # A function is traced by each call: it may read Python variables that have changed.
    is_kept = block_size is BLOCK_SIZE and score is mask_function is None and _KEPT_TYPES.issuperset(types)
    attn = (_kept if is_kept else FlashAttention)(
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        layout=layout,
        precision=precision,
        dropout=dropout,
        block_size=block_size,
        score=score,
        mask=mask_function,
    )
    if unknown := score_args.keys() - attn.options.score_args:
        accepted = (*attn.options.score_args, *inspect.signature(attention).parameters)
        raise unexpected_keyword("attention", min(unknown), accepted)
    result = attn.forward(
        q,
        k,
        v,
        bias=bias,
        mask=None if mask_function else mask,
        kv_lengths=kv_lengths,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        block_mask=block_mask,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        seed=seed,
        offset=offset,
        out=out,
        **score_args,
    )
    return result.out


@takes_no_values
def logsumexp(
    q: Array,
    k: Array,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    precision: Literal["highest", "tf32"] = "highest",
    block_size: int | tuple[int, int] = BLOCK_SIZE,
    score: Function | Score | None = None,
    mask: Array | Function | None = None,
    **arrays: Array,
) -> Array:
    """The logarithm of the sum of exponentials of each row of scores, ``logsumexp(scale * q @ k.T + ..., axis=-1)``.

    It is the lse of `FlashAttention.forward` with ``v=None``, in memory linear in the sequence length. For gradients,
    give ``None`` for v, dout and out to `FlashAttention.backward`, and dlse.

    Parameters
    ----------
    q, k : array
        As `attention` takes them.
    causal, scale, window, softcap, layout, precision, block_size, score, mask :
        As `attention` takes them.
    **arrays : array, optional
        bias, kv_lengths, alibi_slopes, sinks and so on, as `FlashAttention.forward` takes them; the arrays that `score`
        and `mask` read; and lse, an array to write to.

    Returns
    -------
    array
        (..., num_heads, seqlen_q) in every layout, natural logarithm, float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `FlashAttention` and `FlashAttention.forward` do.

    See Also
    --------
    FlashAttention.forward : The same with options that are kept, and out.
    FlashAttention.backward : Gradients, from dlse.

    References
    ----------
    Dao: FlashAttention-2 (2023), https://arxiv.org/abs/2307.08691, section 3.1, "L".

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x, y = np.random.default_rng(0).standard_normal((2, 5, 3))
    >>> np.allclose(cuflash.logsumexp(x, y, scale=1.0), np.log(np.exp(x @ y.T).sum(axis=-1)))
    True
    """
    is_function = callable(mask)
    attn = FlashAttention(
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        layout=layout,
        precision=precision,
        block_size=block_size,
        score=score,
        mask=mask if is_function else None,
    )
    accepted = {*OptionalArrays.__annotations__, "seed", "offset", "lse", "out", *attn.options.score_args}
    if unknown := arrays.keys() - accepted:
        raise unexpected_keyword("logsumexp", min(unknown), {*accepted, *inspect.signature(logsumexp).parameters})
    return attn.forward(q, k, None, mask=None if is_function else mask, **arrays).lse


# fmt: off
@overload
def hessian_vector_product(
    attn: Plain, dout: Array, q: ArrayT, k: KeyT, v: ValueT, *, need: Collection[str] = ...,
    seed: Integer = None, offset: Integer = None, **arrays: Unpack[OfHessian],
) -> NamedGradientTangents[ArrayT, KeyT, ValueT]: ...
@overload
def hessian_vector_product(
    attn: WithScores, dout: Array, q: ArrayT, k: KeyT, v: ValueT, **arrays: Any
) -> ScoreGradientTangents[ArrayT, KeyT, ValueT]: ...
# fmt: on


def hessian_vector_product(
    attn: FlashAttention | ContextParallel,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    need: Collection[str] = DEFAULT_NEED_TANGENTS,
    seed: int | None = None,
    offset: int | None = None,
    **arrays: Array,
) -> NamedGradientTangents:
    """The Hessian of ``sum(dout * out) + sum(dlse * lse)`` with respect to q, k, v and so on, times a vector.

    Parameters
    ----------
    attn : FlashAttention or ContextParallel
        Over ranks all arrays are this rank's, as its methods take them.
    dout, q, k, v : array
        As `FlashAttention.backward` takes them.
    need : collection of str, default ("tdq", "tdk", "tdv")
        The parts of the product that are wanted, as `FlashAttention.backward_jvp` names them.
    seed, offset : int, optional
        As `FlashAttention.forward` takes them.
    **arrays : array, optional
        The vector, as tangents tq, tk, tv, tbias and so on; dlse; and bias, mask and so on.

    Returns
    -------
    GradientTangents
        A named tuple of the parts that are wanted, in the order of the gradients: tdq has the shape and dtype of q.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `FlashAttention.jvp` and `FlashAttention.backward_jvp` do.

    See Also
    --------
    FlashAttention.jvp, FlashAttention.backward_jvp : The two passes that this calls.
    double_backward : Gradients of gradients.

    References
    ----------
    Pearlmutter: Fast exact multiplication by the Hessian (1994), https://doi.org/10.1162/neco.1994.6.1.147.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v, dout, tq = np.random.default_rng(0).standard_normal((5, 2, 30, 8))
    >>> attn = cuflash.FlashAttention()
    >>> cuflash.hessian_vector_product(attn, dout, q, k, v, tq=tq).tdq.shape
    (2, 30, 8)
    """
    both: dict[str, Array] = {"seed": seed, "offset": offset}
    own = {name: x for name, x in arrays.items() if name != "dlse"}
    out, lse, tout, tlse = attn.jvp(q, k, v, **both, **own)
    return attn.backward_jvp(dout, q, k, v, out, lse, tout, tlse, need=need, **both, **arrays)


# fmt: off
@overload
def double_backward(
    attn: Plain, cotangents: Mapping[str, Array], dout: Array, q: ArrayT, k: KeyT, v: ValueT, *,
    need: Collection[str] = ..., seed: Integer = None, offset: Integer = None, **arrays: Unpack[WithDlse],
) -> DoubleGradients[ArrayT, KeyT, ValueT]: ...
@overload
def double_backward(
    attn: WithScores, cotangents: Mapping[str, Array], dout: Array, q: ArrayT, k: KeyT, v: ValueT,
    **arrays: Any,
) -> DoubleGradients[ArrayT, KeyT, ValueT]: ...
# fmt: on


def double_backward(
    attn: FlashAttention | ContextParallel,
    cotangents: Mapping[str, Array],
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    need: Collection[str] = DEFAULT_NEED_TANGENTS,
    seed: int | None = None,
    offset: int | None = None,
    **arrays: Array,
) -> DoubleGradients:
    """Gradients of ``sum(c * g)`` over gradients g that `FlashAttention.backward` gave, for cotangents c of them.

    That sum is the derivative of ``sum(dout * out) + sum(dlse * lse)`` in the direction c of the inputs. It is linear
    in dout and dlse, whose gradients are therefore tout and tlse; and those of the inputs are the Hessian times c,
    because it is symmetric. None are due to out and lse as inputs of the backward pass: what goes through them is in
    the gradients of q, k and v.

    Parameters
    ----------
    attn : FlashAttention or ContextParallel
        Over ranks all arrays are this rank's, as its methods take them.
    cotangents : Mapping
        By the name of a gradient, "dq", "dbias" and so on: an array of its shape and dtype.
    dout, q, k, v : array
        As `FlashAttention.backward` took them.
    need : collection of str, default ("tdq", "tdk", "tdv")
        The inputs whose gradients are wanted: "tdx" stands for that of x.
    seed, offset : int, optional
        As `FlashAttention.forward` took them.
    **arrays : array, optional
        dlse, bias, mask and so on, as `FlashAttention.backward` took them.

    Returns
    -------
    DoubleGradients
        ``ddout`` and ``ddlse``, the gradients with respect to dout and dlse, and ``gradients``: tdq is that with
        respect to q, and so on.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `FlashAttention.jvp` and `FlashAttention.backward_jvp` do.

    See Also
    --------
    FlashAttention.backward : The gradients whose gradients these are.
    hessian_vector_product : Without cotangents by name.
    jvp_backward : Gradients of a Jacobian-vector product.

    References
    ----------
    - Pearlmutter: Fast exact multiplication by the Hessian (1994), https://doi.org/10.1162/neco.1994.6.1.147.
    - Examples: docs/second-derivatives.md.
    """
    both: dict[str, Array] = {"seed": seed, "offset": offset}
    tangents = {f"t{name.removeprefix('d')}": x for name, x in cotangents.items()}
    own = {name: x for name, x in arrays.items() if name != "dlse"}
    out, lse, tout, tlse = attn.jvp(q, k, v, **both, **own, **tangents)
    found = attn.backward_jvp(dout, q, k, v, out, lse, tout, tlse, need=need, **both, **arrays, **tangents)
    return DoubleGradients(tout, tlse, found)


# fmt: off
@overload
def jvp_backward(
    attn: Plain, dtout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, tout: Array,
    tlse: Array, *, dout: Array | None = None, dlse: Array | None = None, dtlse: Array | None = None,
    need: Collection[str] = ..., seed: Integer = None, offset: Integer = None, **arrays: Unpack[WithTangents],
) -> JvpGradients[ArrayT, KeyT, ValueT]: ...
@overload
def jvp_backward(
    attn: WithScores, dtout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array,
    tout: Array, tlse: Array, **arrays: Any,
) -> JvpGradients[ArrayT, KeyT, ValueT]: ...
# fmt: on


def jvp_backward(
    attn: FlashAttention | ContextParallel,
    dtout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    tout: Array,
    tlse: Array,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dtlse: Array | None = None,
    need: Collection[str] = DEFAULT_NEED_TANGENTS,
    seed: int | None = None,
    offset: int | None = None,
    **arrays: Array,
) -> JvpGradients:
    """Gradients of ``sum(dtout * tout) + sum(dtlse * tlse) + sum(dout * out) + sum(dlse * lse)``: `jvp` backwards.

    tout and tlse are linear in the tangents, whose gradients are those of `FlashAttention.backward` for dtout and
    dtlse. Those of q, k, v and so on are what `FlashAttention.backward_jvp` gives where dout and dlse are the tangents
    of dtout and dtlse, because the backward pass is linear in these.

    Parameters
    ----------
    attn : FlashAttention or ContextParallel
        Over ranks all arrays are this rank's, as its methods take them.
    dtout, dtlse : array
        Gradients with respect to tout and tlse; dtlse may be missing.
    q, k, v, out, lse, tout, tlse : array
        As `FlashAttention.jvp` took and returned them.
    dout, dlse : array, optional
        Gradients with respect to out and lse.
    need : collection of str, default ("tdq", "tdk", "tdv")
        The inputs whose gradients are wanted, and with them those of their tangents.
    seed, offset : int, optional
        As `FlashAttention.jvp` took them.
    **arrays : array, optional
        The tangents, bias, mask and so on, as `FlashAttention.jvp` took them.

    Returns
    -------
    JvpGradients
        ``gradients``, in which tdq is that with respect to q, and so on; and ``of_tangents``, in which dq is that with
        respect to tq, and so on.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `FlashAttention.jvp` and `FlashAttention.backward_jvp` do.

    See Also
    --------
    FlashAttention.jvp : The pass whose gradients these are.
    double_backward : Gradients of gradients.
    """
    if v is None and dtlse is None and isinstance(attn, FlashAttention):  # ranks raise where all of them hear of it
        raise value_error("dtlse", "None", "the gradient with respect to tlse, the only tangent without values")
    both: dict[str, Array] = {"seed": seed, "offset": offset}
    extra = {"dlse": dtlse, "tdout": dout, "tdlse": dlse}
    found = attn.backward_jvp(dtout, q, k, v, out, lse, tout, tlse, need=need, **both, **arrays, **extra)
    tangents = {*Tangents.__annotations__, *(f"t{name}" for name in attn.options.score_args)}
    inputs = {name: x for name, x in arrays.items() if name not in tangents}
    of_tangents = attn.backward(
        dtout, q, k, v, out, lse, need=tuple(name[1:] for name in found._fields), dlse=dtlse, **both, **inputs
    )
    return JvpGradients(found, of_tangents)
