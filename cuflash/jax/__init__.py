"""Attention and logsumexp of JAX arrays, for `jax.grad`, `jax.jvp`, `jax.jit` and `jax.vmap`.

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

from cuflash.arrays.checks import type_error
from cuflash.flash_attention import FlashAttention
from cuflash.frameworks import add_keywords, check_lse_keywords, forward_call
from cuflash.jax.primitives import FORWARD, RANDOM, Array, bind
from cuflash.spec.options import check_random

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.score_mod import Score
    from cuflash.spec.options import AttentionKeywords, Function
    from cuflash.spec.type_variables import WithFunction

__all__ = ["attention", "logsumexp"]


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
        `jax.vmap`. In arrays they may change without another compilation; an offset there has 32 bits.
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
    logsumexp : lse alone, without values.
    cuflash.torch.attention : The same for PyTorch.

    References
    ----------
    Dao: FlashAttention-2 (2023), https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
    """
    out, lse = _forward("attention", {"q": q, "k": k, "v": v}, attn, seed, offset, keywords)
    return (out, lse) if return_lse else out


def logsumexp(q: Array, k: Array, *, attn: FlashAttention | None = None, **keywords: Any) -> Array:
    """The logarithm of the sum of exponentials of each row of scores, differentiable as `attention` is.

    Neither the product with values nor its derivatives are computed. Gradients reach q, k, bias, alibi_slopes, sinks,
    and the arrays that `score` reads.

    Parameters
    ----------
    q, k : jax.Array
        As `cuflash.FlashAttention.forward` takes them.
    attn : FlashAttention, optional
        The options, without dropout, which does not change lse.
    **keywords :
        As `attention` takes them.

    Returns
    -------
    jax.Array
        (..., num_heads, seqlen_q) in every layout, natural logarithm, float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `attention` does.

    See Also
    --------
    cuflash.logsumexp : The same for NumPy and CuPy arrays.
    attention : With values.

    References
    ----------
    Dao: FlashAttention-2 (2023), https://arxiv.org/abs/2307.08691, section 3.1, "L".

    Examples
    --------
    >>> import jax, cuflash.jax
    >>> x, y = jax.random.normal(jax.random.key(0), (2, 100, 3))
    >>> right = jax.nn.logsumexp(x @ y.T, axis=-1)
    >>> bool(jax.numpy.allclose(cuflash.jax.logsumexp(x, y, scale=1.0), right, atol=1e-5))
    True
    """
    check_lse_keywords(attn, keywords)
    return _forward("logsumexp", {"q": q, "k": k}, attn, None, None, keywords)[1]


def _forward(
    function: str,
    arrays: dict[str, Any],
    attn: FlashAttention | None,
    seed: Array,
    offset: Array,
    keywords: dict[str, Any],
) -> Any:
    """out and lse of the forward pass; lse alone without v."""
    options = add_keywords(
        arrays, keywords, (jax.Array, np.ndarray), "jax.Array", lambda k: jax.numpy.empty((*k.shape[:-1], 0), k.dtype)
    )
    attn = forward_call(attn, tuple(arrays), options, function).attn
    if attn.options.dropout:
        arrays[RANDOM] = _random(seed, offset)
    operands = {name: x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for name, x in arrays.items()}
    return bind(FORWARD, attn, operands)


def _random(seed: Array, offset: Array) -> Array:
    """Seed and offset as the operand of a primitive."""
    numbers = {"seed": seed, "offset": offset}
    in_arrays = {name: x for name, x in numbers.items() if isinstance(x, jax.Array)}
    for name, x in in_arrays.items():
        if x.shape or not jax.numpy.issubdtype(x.dtype, np.integer):
            remedy = "jax.random.bits(key, dtype='uint32')"
            expected = f"an integer, or an array of one without axes; of a key of jax.random, {remedy}"
            raise type_error(name, f"an array of {x.dtype} and shape {x.shape}", expected)
    known_seed, known_offset = check_random(*(0 if name in in_arrays else x for name, x in numbers.items()))
    known = np.array([known_seed & 0xFFFFFFFF, known_seed >> 32, known_offset], np.uint32)
    if not in_arrays:
        return known
    words = {"seed": known[0], "high": known[1], "offset": known[2]} | in_arrays
    if "seed" in in_arrays and in_arrays["seed"].dtype.itemsize == 8:
        words["high"] = in_arrays["seed"] >> 32
    return jax.numpy.stack([jax.numpy.asarray(x).astype(np.uint32) for x in words.values()])
