"""The one-liner: attention in one call, without gradients."""

from __future__ import annotations

import functools
from types import NoneType
from typing import Literal, TypeVar, cast

from cuflash.flash_attention import Causal, FlashAttention, Window
from cuflash.spec.options import BLOCK_SIZE
from cuflash.spec.streamed import takes_star

ArrayT = TypeVar("ArrayT")
_KEPT_TYPES = frozenset((bool, float, int, str, NoneType))
# Instances with options of these types are kept, because checking the options takes half as long as a small call.
_kept = functools.lru_cache(maxsize=64, typed=True)(FlashAttention)


@takes_star
def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    precision: Literal["highest", "tf32"] = "highest",
    block_size: int | tuple[int, int] = BLOCK_SIZE,
    bias: ArrayT | float | None = None,
    mask: ArrayT | float | None = None,
    kv_lengths: ArrayT | float | None = None,
    alibi_slopes: ArrayT | None = None,
    sinks: ArrayT | None = None,
    block_mask: ArrayT | None = None,
    block_table: ArrayT | None = None,
    cu_seqlens_q: ArrayT | None = None,
    cu_seqlens_k: ArrayT | None = None,
    q_scale: ArrayT | float | None = None,
    k_scale: ArrayT | float | None = None,
    v_scale: ArrayT | float | None = None,
    out: ArrayT | None = None,
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
    causal, scale, window, softcap, layout, precision, block_size :
        Options, as `FlashAttention` takes them.
    bias, mask, kv_lengths, alibi_slopes, sinks, block_mask, block_table, cu_seqlens_q, cu_seqlens_k :
        Arrays, optional, as `FlashAttention.forward` takes them; a scalar stands for an array without axes.
    q_scale, k_scale, v_scale, out :
        Arrays, optional, as `FlashAttention.forward` takes them.

    Returns
    -------
    array
        Shape of q with head_dim_v as last axis and all batch axes, dtype and library of q: NumPy, CuPy, or of the
        library that q comes from.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `FlashAttention` and `FlashAttention.forward` do.

    Examples
    --------
    On plain matrices it is the formula:

    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> weights = np.exp(q @ k.T / 2)
    >>> np.allclose(cuflash.attention(q, k, v), weights / weights.sum(axis=1, keepdims=True) @ v)
    True
    """
    types = (type(causal), type(scale), type(window), type(softcap), type(layout), type(precision))
    is_kept = block_size is BLOCK_SIZE and _KEPT_TYPES.issuperset(types)
    attn = (_kept if is_kept else FlashAttention)(
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        layout=layout,
        precision=precision,
        block_size=block_size,
    )
    result = attn.forward(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
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
        out=out,
    )
    return cast(ArrayT, result.out)
