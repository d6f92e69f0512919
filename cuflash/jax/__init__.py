"""Attention of JAX arrays, for `jax.grad`, `jax.jvp`, `jax.jit` and `jax.vmap`.

>>> import jax, cuflash.jax
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 100, 64))
>>> jax.jit(jax.grad(lambda q: cuflash.jax.attention(q, k, v, causal=True).sum()))(q).shape
(8, 100, 64)

JAX is no dependency of cuflash, and ``import cuflash`` does not import this module.

Each pass is a primitive of JAX. The tangents of `forward` are a primitive that is linear in the tangents of the inputs,
whose transpose is `backward`; those of `backward` are the Hessian times a vector, which is its own transpose. That is
all of second order but forward mode over forward mode, whose values no pass gives; its transpose exists, so reverse
mode over forward mode has them.

Arrays with values are passed on by DLPack, without a copy. Within `jax.jit` the host calls the pass back: on a CPU by
`jax.pure_callback`, on a GPU by JAX's buffer callbacks, which copy nothing and launch on the stream of the computation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import numpy as np

from cuflash.flash_attention import FlashAttention
from cuflash.frameworks import forward_call
from cuflash.jax.primitives import FORWARD, RANDOM, Array, bind
from cuflash.spec.options import check_random

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.score_mod import Score
    from cuflash.spec.options import AttentionKeywords, Function
    from cuflash.spec.type_variables import WithFunction

__all__ = ["attention"]


# fmt: off
@overload
def attention(
    q: Array, k: Array, v: Array, *, attn: FlashAttention[None] | None = ..., score: None = ...,
    seed: Array | None = ..., offset: Array | None = ..., return_lse: Literal[False] = ...,
    **keywords: Unpack[AttentionKeywords],
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, attn: FlashAttention[None] | None = ..., score: None = ...,
    seed: Array | None = ..., offset: Array | None = ..., return_lse: Literal[True],
    **keywords: Unpack[AttentionKeywords],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, attn: FlashAttention[WithFunction], seed: Array | None = ...,
    offset: Array | None = ..., return_lse: Literal[False] = ..., **keywords: Any,
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, attn: FlashAttention[WithFunction], seed: Array | None = ...,
    offset: Array | None = ..., return_lse: Literal[True], **keywords: Any,
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, score: Function | Score, seed: Array | None = ...,
    offset: Array | None = ..., return_lse: Literal[False] = ..., **keywords: Any,
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, score: Function | Score, seed: Array | None = ...,
    offset: Array | None = ..., return_lse: Literal[True], **keywords: Any,
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, mask: Function, seed: Array | None = ...,
    offset: Array | None = ..., return_lse: Literal[False] = ..., **keywords: Any,
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, mask: Function, seed: Array | None = ...,
    offset: Array | None = ..., return_lse: Literal[True], **keywords: Any,
) -> tuple[Array, Array]: ...
# fmt: on


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    attn: FlashAttention | None = None,
    seed: Array | None = None,
    offset: Array | None = None,
    return_lse: bool = False,
    **keywords: Any,
) -> Array | tuple[Array, Array]:
    """Exact attention of JAX arrays, differentiable twice, in memory linear in the sequence length.

    Gradients reach q, k, v, bias, alibi_slopes, sinks, and the arrays that `score` reads, in reverse mode, forward mode
    and one over the other, but for forward mode over forward mode. An axis of `jax.vmap` is one more batch axis, or a
    loop where it cannot be one.

    Parameters
    ----------
    q, k, v : jax.Array
        As `cuflash.FlashAttention.forward` takes them.
    attn : FlashAttention, optional
        The options.
    seed, offset : int or jax.Array, optional
        Which weights dropout drops, as `cuflash.FlashAttention.forward` takes them, and the same in every entry of
        `jax.vmap`. A seed in an array, which may change without another compilation, has 32 bits.
    return_lse : bool, default False
        Whether to return lse, too, which is differentiable as out is.
    **keywords :
        Without `attn`, options of `cuflash.FlashAttention`: causal, scale, softcap, score and so on. And arrays, as
        `cuflash.FlashAttention.forward` takes them: bias, sinks, kv_lengths and so on, and those that `score` and
        `mask` read. A `mask` is an option if it is a function.

    Returns
    -------
    jax.Array or (jax.Array, jax.Array)
        out, or (out, lse).

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `cuflash.FlashAttention.forward` does; within `jax.jit` where it is traced. NotImplementedError also for
        third derivatives, for forward mode over forward mode, and for gradients of what has none (keys in pages, fp8).

    See Also
    --------
    cuflash.FlashAttention : The options, and passes without a framework.
    cuflash.torch.attention : The same for PyTorch.

    References
    ----------
    Dao: FlashAttention-2 (2023), https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
    """
    arrays = {"q": q, "k": k, "v": v}
    options: dict[str, Any] = {}
    for name, x in keywords.items():
        if isinstance(x, (jax.Array, np.ndarray)):
            arrays[name] = x
        elif x is not None:
            options[name] = x
    for name in ("q", "k", "v"):
        if not isinstance(arrays[name], (jax.Array, np.ndarray)):
            raise TypeError(f"{name}: got {type(arrays[name]).__name__}, expected a jax.Array")
    attn = forward_call(attn, tuple(arrays), options).attn
    if attn.options.dropout:
        arrays[RANDOM] = _random(seed, offset)
    given = {name: x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for name, x in arrays.items()}
    out, lse = bind(FORWARD, attn, given)
    return (out, lse) if return_lse else out


def _random(seed: Array, offset: Array) -> Array:
    """Seed and offset as the operand of a primitive."""
    if isinstance(seed, jax.Array) or isinstance(offset, jax.Array):
        parts = seed, 0, offset
        return jax.numpy.stack([jax.numpy.asarray(x).astype(np.uint32) for x in parts])
    seed, offset = check_random(seed, offset)
    return np.array([seed & 0xFFFFFFFF, seed >> 32, offset], np.uint32)
