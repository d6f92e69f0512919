"""Attention and logsumexp of PyTorch tensors, for autograd, `torch.func` and `torch.compile`.

>>> import torch, cuflash.torch
>>> q, k, v = torch.randn(3, 8, 100, 64, requires_grad=True)
>>> cuflash.torch.attention(q, k, v, causal=True).sum().backward()

PyTorch is no dependency of cuflash, and ``import cuflash`` does not import this module.

Each pass is an operator, ``torch.ops.cuflash.forward``, ``backward``, ``jvp`` and ``backward_jvp``: what a compiler
sees. Each has a `torch.autograd.Function`, which says what its derivative is in terms of the others. Without a compiler
the functions compute at once, because a call through the dispatcher costs as much as a small pass.

Tensors in host memory are viewed as NumPy arrays, those in CUDA memory as CuPy arrays, without a copy; repeated
calls on a GPU launch by their addresses alone. There the kernels run on PyTorch's current stream, in memory of its
allocator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from cuflash.flash_attention import FlashAttention
from cuflash.frameworks import add_keywords, check_lse_keywords, forward_call
from cuflash.torch.operators import Forward
from cuflash.torch.tensors import device_error

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.score_mod import Score
    from cuflash.spec.options import AttentionKeywords, Function
    from cuflash.spec.type_variables import WithFunction

__all__ = ["attention", "logsumexp"]

_PADDED = "sequences of several lengths padded, with kv_lengths, or packed, with cu_seqlens_q and cu_seqlens_k"
_HALF_PRECISION = (torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _token(
    attn: FlashAttention | None, names: tuple[str, ...], options: tuple[tuple[str, Any], ...], function: str
) -> str:
    """What a compiled graph has in place of the options; the compiler calls this once, and guards the arguments."""
    return forward_call(attn, names, dict(options), function).token


def _fixed(option: Any) -> Any:
    """An option without symbols, as numbers that change or follow from sizes may be, alone or in a pair.

    To hash a symbol makes it a constant, which the compiler guards.
    """
    if isinstance(option, tuple):
        return tuple([_fixed(x) for x in option])
    return next(iter({option})) if isinstance(option, (int, float)) else option


def _cast(arrays: dict[str, Tensor]) -> None:
    """Give q, k and v the dtype of autocast, as for `torch.nn.functional.scaled_dot_product_attention`.

    A bias in float32 stays so: kernels add it to scores, which are float32. Sinks and slopes have to be float32.
    """
    dtype = torch.get_autocast_dtype(arrays["q"].device.type)
    for name in ("q", "k", "v", "bias"):
        x = arrays.get(name)
        if x is not None and (x.dtype in _HALF_PRECISION or (x.dtype == torch.float32 and name != "bias")):
            arrays[name] = x.to(dtype)


def _check(arrays: dict[str, Tensor]) -> None:
    """Refuse tensors that are no array, and those on devices that PyTorch's own questions about q may not know."""
    if not (arrays["q"].is_cpu or arrays["q"].is_cuda):
        raise device_error(arrays["q"])
    for name, x in arrays.items():
        if x.layout is not torch.strided or x.is_nested:
            got = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
            raise TypeError(f"{name}: got {got}, expected one of layout torch.strided: {name}.to_dense(), or {_PADDED}")


# fmt: off
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn: FlashAttention[None] | None = ..., score: None = ...,
    seed: int | None = ..., offset: int | None = ..., return_lse: Literal[False] = ...,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn: FlashAttention[None] | None = ..., score: None = ...,
    seed: int | None = ..., offset: int | None = ..., return_lse: Literal[True],
    **keywords: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn: FlashAttention[WithFunction], seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[False] = ..., **keywords: Any,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn: FlashAttention[WithFunction], seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[True], **keywords: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, score: Function | Score, seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[False] = ..., **keywords: Any,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, score: Function | Score, seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[True], **keywords: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Function, seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[False] = ..., **keywords: Any,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Function, seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[True], **keywords: Any,
) -> tuple[Tensor, Tensor]: ...
# fmt: on


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn: FlashAttention | None = None,
    seed: int | None = None,
    offset: int | None = None,
    return_lse: bool = False,
    **keywords: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of PyTorch tensors, differentiable twice, in memory linear in the sequence length.

    Gradients reach q, k, v, bias, alibi_slopes, sinks, and the tensors that `score` reads, by autograd, its double
    backward, forward mode and `torch.func`. `torch.compile` takes it whole (``fullgraph=True``), forward and backward.
    An axis of `torch.func.vmap` is one more batch axis, or a loop where it cannot be one. Within `torch.autocast` q, k
    and v are cast as those of `torch.nn.functional.scaled_dot_product_attention` are.

    Parameters
    ----------
    q, k, v : torch.Tensor
        As `cuflash.FlashAttention.forward` takes them, in host or CUDA memory.
    attn : FlashAttention, optional
        The options.
    seed, offset : int, optional
        Which weights dropout drops, as `cuflash.FlashAttention.forward` takes them; in a compiled function the seed is
        at most ``2 ** 63 - 1``.
    return_lse : bool, default False
        Whether to return lse, too, which is differentiable as out is.
    **keywords :
        Without `attn`, options of `cuflash.FlashAttention`: causal, scale, softcap, score and so on. And tensors, as
        `cuflash.FlashAttention.forward` takes them: bias, sinks, kv_lengths and so on, and those that `score` and
        `mask` read. A `mask` is an option if it is a function.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        out, or (out, lse).

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `cuflash.FlashAttention.forward` does. NotImplementedError also for third derivatives, for forward mode over
        forward mode, and for gradients of what has none (keys in pages, fp8).

    See Also
    --------
    cuflash.FlashAttention : The options, and passes without a framework.
    logsumexp : lse alone, without values.
    cuflash.jax.attention : The same for JAX.

    References
    ----------
    Dao: FlashAttention-2 (2023), https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
    """
    out, lse = _forward("attention", {"q": q, "k": k, "v": v}, attn, seed, offset, keywords)
    return (out, lse) if return_lse else out


def logsumexp(q: Tensor, k: Tensor, *, attn: FlashAttention | None = None, **keywords: Any) -> Tensor:
    """The logarithm of the sum of exponentials of each row of scores, differentiable as `attention` is.

    Neither the product with values nor its derivatives are computed. Gradients reach q, k, bias, alibi_slopes, sinks,
    and the tensors that `score` reads.

    Parameters
    ----------
    q, k : torch.Tensor
        As `cuflash.FlashAttention.forward` takes them, in host or CUDA memory.
    attn : FlashAttention, optional
        The options, without dropout, which does not change lse.
    **keywords :
        As `attention` takes them.

    Returns
    -------
    torch.Tensor
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
    >>> import torch, cuflash.torch
    >>> x, y = torch.randn(2, 100, 3, dtype=torch.float64)
    >>> right = torch.logsumexp(x @ y.T, dim=-1)
    >>> torch.allclose(cuflash.torch.logsumexp(x, y, scale=1.0), right)
    True
    """
    check_lse_keywords(attn, keywords)
    return _forward("logsumexp", {"q": q, "k": k}, attn, None, None, keywords)[1]


def _forward(
    function: str,
    arrays: dict[str, Any],
    attn: FlashAttention | None,
    seed: int | None,
    offset: int | None,
    keywords: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """out and lse of the forward pass; lse alone without v."""
    options = add_keywords(arrays, keywords, (Tensor,), "torch.Tensor", lambda k: k.new_empty((*k.shape[:-1], 0)))
    if not torch.compiler.is_compiling():
        _check(arrays)
    if torch.is_autocast_enabled(arrays["q"].device.type):
        _cast(arrays)
    if torch.compiler.is_compiling():
        from cuflash.torch.compiling import check_made_outside, guard_numbers  # torch._dynamo takes a second to import

        check_made_outside(attn)
        for name in ("score", "mask"):
            guard_numbers(options.get(name))
        fixed = {name: _fixed(x) for name, x in options.items()}
        token = _token(attn, tuple(arrays), tuple(fixed.items()), function)
        out, lse = torch.ops.cuflash.forward(list(arrays.values()), token, seed, offset)
    else:
        call = forward_call(attn, tuple(arrays), options, function)
        out, lse = Forward.apply(call, seed, offset, *arrays.values())
    return out, lse
