"""Functions that call `FlashAttention`: attention and logsumexp in one call, and second derivatives in two."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, overload

from cuflash.arrays.checks import type_error, typed, value_error
from cuflash.flash_attention import FlashAttention
from cuflash.score_mod import Score
from cuflash.spec.inputs import INPUTS, NamedGradientTangents, Tangents
from cuflash.spec.keywords import unexpected_keyword
from cuflash.spec.options import Function, Options
from cuflash.spec.outputs import DEFAULT_NEED_TANGENTS, GRADIENTS, ROW_REDUCTIONS
from cuflash.spec.results import Array, DoubleGradients, JvpGradients, check_need
from cuflash.spec.streamed import takes_star
from cuflash.spec.type_variables import ArrayT, KeyT, ValueT, WithFunction
from cuflash.spec.without_values import takes_no_values

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.distributed import ContextParallel
    from cuflash.spec.inputs import ScoreGradientTangents, WithTangents
    from cuflash.spec.options import ForwardKeywords
    from cuflash.spec.outputs import OfHessian, WithDlse
    from cuflash.spec.type_variables import Integer

    Plain: TypeAlias = FlashAttention[None] | ContextParallel[None]  # without a score or mask function
    WithScores: TypeAlias = FlashAttention[WithFunction] | ContextParallel[WithFunction]

P = ParamSpec("P")
R = TypeVar("R")

_KEPT_TYPES = frozenset((bool, float, int, str, NoneType))
# Instances with options of these types are kept, because checking the options takes half as long as a small call.
_kept = functools.lru_cache(maxsize=64, typed=True)(FlashAttention)

Keywords = dict[str, inspect.Parameter]


def _keywords_of(method: Callable[..., Any]) -> Keywords:
    return {name: x for name, x in inspect.signature(method).parameters.items() if name != "self"}


# `attention` and `logsumexp` take the keywords of `FlashAttention` and those of its `forward`, with few exceptions.
_OPTIONS, _ARRAYS = _keywords_of(FlashAttention), _keywords_of(FlashAttention.forward)
_SCORE_ARGS = _ARRAYS.pop("score_args")
_ARRAYS["mask"] = _ARRAYS["mask"].replace(annotation="Array | Function | None")  # an array, or the option


def _keywords_without(*names: str) -> Keywords:
    left_out = ("deterministic", *INPUTS, "want", *ROW_REDUCTIONS, *names)
    both = {name: x for name, x in _OPTIONS.items() if name not in _ARRAYS} | _ARRAYS
    return {name: x for name, x in both.items() if name not in left_out}


_KEYWORDS_OF_ATTENTION, _KEYWORDS_OF_LOGSUMEXP = _keywords_without("lse"), _keywords_without("dropout")


def _with_signature(keywords: Keywords) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let ``inspect.signature`` of a function of arrays and ``**keywords`` show these keywords and score_mod args."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        declared = inspect.signature(function)
        *arrays, _ = declared.parameters.values()
        shown = declared.replace(parameters=(*arrays, *keywords.values(), _SCORE_ARGS))
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorate


def _as_method(function: str, accepted: Keywords, keywords: dict[str, Any]) -> tuple[FlashAttention, dict[str, Any]]:
    """The instance whose `forward` a function calls, and the keywords that `forward` gets.

    `accepted` are the keywords of the function, `keywords` those of this call.
    """
    options: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, x in keywords.items():
        is_option = name in _OPTIONS and name in accepted and (name != "mask" or callable(x))
        (options if is_option else arrays)[name] = x
    # A function is traced by each call: it may read Python variables that have changed.
    attn = (_kept if _KEPT_TYPES.issuperset(map(type, options.values())) else FlashAttention)(**options)
    if not accepted.keys() >= arrays.keys():
        names = (*attn.options.score_args, *accepted)
        if unknown := arrays.keys() - names:
            raise unexpected_keyword(function, min(unknown), names)
    return attn, arrays


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
@_with_signature(_KEYWORDS_OF_ATTENTION)
def attention(q: ArrayT, k: Array, v: Array, **keywords: Any) -> ArrayT:
    """Exact attention, ``softmax(scale * q @ k.T) @ v`` of every head, in memory linear in the sequence length.

    Parameters
    ----------
    q : array
        (..., num_heads, seqlen_q, head_dim); float16, bfloat16, float32 or float64.
    k : array
        (..., num_heads_kv, seqlen_k, head_dim), dtype of q or float8; num_heads_kv divides num_heads.
    v : array
        (..., num_heads_kv, seqlen_k, head_dim_v), dtype of k.
    causal, scale, window, softcap, layout, batch_invariant, precision, dropout, block_size, score :
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
    attn, arrays = _as_method("attention", _KEYWORDS_OF_ATTENTION, keywords)
    return attn.forward(q, k, v, **arrays).out


@overload
def logsumexp(
    q: Array,
    k: Array,
    *,
    score: None = None,
    seed: int | None = None,
    offset: int | None = None,
    lse: Array | None = None,
    **keywords: Unpack[ForwardKeywords],
) -> Array: ...
@overload
def logsumexp(q: Array, k: Array, *, score: Function | Score, **arguments: Any) -> Array: ...
@overload
def logsumexp(q: Array, k: Array, *, mask: Function, **arguments: Any) -> Array: ...


@takes_no_values
@_with_signature(_KEYWORDS_OF_LOGSUMEXP)
def logsumexp(q: Array, k: Array, **keywords: Any) -> Array:
    """The logarithm of the sum of exponentials of each row of scores, ``logsumexp(scale * q @ k.T + ..., axis=-1)``.

    It is the lse of `FlashAttention.forward` with ``v=None``, in memory linear in the sequence length. For gradients,
    give ``None`` for v, dout and out to `FlashAttention.backward`, and dlse.

    Parameters
    ----------
    q, k : array
        As `attention` takes them.
    causal, scale, window, softcap, layout, batch_invariant, precision, block_size, score :
        As `attention` takes them.
    bias, mask, kv_lengths, alibi_slopes, sinks, block_mask, block_table, cu_seqlens_q, cu_seqlens_k, q_scale, k_scale :
        As `attention` takes them.
    v_scale, seed, offset, out : None, optional
        What belongs to values, as `FlashAttention.forward` takes it without them.
    lse : array, optional
        Written to and returned.
    **score_args :
        The arrays that `score` and a `mask` function read.

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
    attn, arrays = _as_method("logsumexp", _KEYWORDS_OF_LOGSUMEXP, keywords)
    return attn.forward(q, k, None, **arrays).lse


def _check_attn(attn: object) -> None:
    """Refuse what is no object with options, such as the options themselves."""
    if not isinstance(getattr(attn, "options", None), Options):
        raise type_error("attn", typed(attn), "a cuflash.FlashAttention or a cuflash.distributed.ContextParallel")


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
    _check_attn(attn)
    random: dict[str, Array] = {"seed": seed, "offset": offset}
    arrays_of_jvp = {name: x for name, x in arrays.items() if name != "dlse"}
    out, lse, tout, tlse = attn.jvp(q, k, v, **random, **arrays_of_jvp)
    return attn.backward_jvp(dout, q, k, v, out, lse, tout, tlse, need=need, **random, **arrays)


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
        By the name of a gradient, "dq", "dbias" and so on: an array of its shape and dtype, and of the library of q.
        None stands for zeros. Errors name one as ``cotangents["dq"]``.
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
    _check_attn(attn)
    random: dict[str, Array] = {"seed": seed, "offset": offset}
    if not isinstance(cotangents, Mapping):
        raise type_error("cotangents", typed(cotangents), "a mapping of names of gradients to arrays")
    # What has a tangent of its own is of the third order, which `jvp` refuses.
    names = [name for name in cotangents if not (isinstance(name, str) and name.startswith("td"))]
    gradients_of_attn = (*GRADIENTS, *attn.options.score_gradients)
    check_need(names, gradients_of_attn, "cotangents")
    tangents = {f"t{name.removeprefix('d')}": x for name, x in cotangents.items()}
    arrays_of_jvp = {name: x for name, x in arrays.items() if name != "dlse"}
    with _errors_naming_cotangents(gradients_of_attn):
        out, lse, tout, tlse = attn.jvp(q, k, v, **random, **arrays_of_jvp, **tangents)
        gradients = attn.backward_jvp(dout, q, k, v, out, lse, tout, tlse, need=need, **random, **arrays, **tangents)
    return DoubleGradients(tout, tlse, gradients)


@contextlib.contextmanager
def _errors_naming_cotangents(gradients: Collection[str]) -> Iterator[None]:
    """A context for passes whose tangents are cotangents of gradients: its errors name tq ``cotangents["dq"]``."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:  # the last of ranks that failed
        message = str(error)
        for name in gradients:
            # At the front, in code and in lists, not in a sentence: the tangent of an array named o is "to".
            message = re.sub(rf"\bt{name[1:]}(?=[:.,)]| of )", f'cotangents["{name}"]', message)
        error.args = (message,)
        raise


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
    if v is None and dtlse is None and isinstance(attn, FlashAttention):  # ranks check this in the call, together
        raise value_error("dtlse", "None", "the gradient with respect to tlse, the only tangent without values")
    _check_attn(attn)
    random: dict[str, Array] = {"seed": seed, "offset": offset}
    upstream = {"dlse": dtlse, "tdout": dout, "tdlse": dlse}
    gradients = attn.backward_jvp(dtout, q, k, v, out, lse, tout, tlse, need=need, **random, **arrays, **upstream)
    tangents = {*Tangents.__annotations__, *(f"t{name}" for name in attn.options.score_args)}
    inputs = {name: x for name, x in arrays.items() if name not in tangents}
    of_tangents = attn.backward(
        dtout, q, k, v, out, lse, need=tuple(name[1:] for name in gradients._fields), dlse=dtlse, **random, **inputs
    )
    return JvpGradients(gradients, of_tangents)
