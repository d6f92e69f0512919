"""The results of a call, which are named tuples, and the gradients and passes that it is asked for."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from cuflash.arrays.checks import type_error, typed, value_error
from cuflash.spec.inputs import NUMBERS, NamedGradients, NamedGradientTangents
from cuflash.spec.outputs import (
    GRADIENTS,
    INPUT_OF_GRADIENT,
    OUTPUTS,
    ROW_REDUCTIONS,
    NamedForwardResult,
    NamedMergeGradients,
)
from cuflash.spec.passes import PREPARED, PREPARED_NAMES, Pass
from cuflash.spec.type_variables import ArrayT, KeyT, LseT, ValueT

_LISTED_PASSES = ", ".join(map(repr, PREPARED_NAMES[:-1])) + f" or {PREPARED_NAMES[-1]!r}"
Array = Any  # a NumPy or CuPy array, or another library's with __dlpack__; one library per call

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cuflash.spec.inputs import ScoreGradients, ScoreGradientTangents
    from cuflash.spec.type_variables import ScalarT


class ForwardResult(NamedTuple, Generic[ArrayT, LseT]):
    """What `FlashAttention.forward` returns.

    Attributes
    ----------
    out : array
        (..., num_heads, seqlen_q, head_dim_v) in layout "bhsd", dtype of q.
    lse : array
        (..., num_heads, seqlen_q) in every layout, float32 (float64 for float64): natural logarithm of the row sums.

    See Also
    --------
    FlashAttention.forward
    """

    out: ArrayT
    lse: LseT


class Gradients(NamedTuple, Generic[ArrayT, KeyT, ValueT]):
    """What `FlashAttention.backward` returns, unless it is asked for other gradients: then a tuple with their names.

    Attributes
    ----------
    dq, dk, dv : array
        Shapes and dtypes of q, k and v.

    See Also
    --------
    FlashAttention.backward
    """

    dq: ArrayT
    dk: KeyT
    dv: ValueT


class JvpResult(NamedTuple, Generic[ArrayT, LseT]):
    """What `FlashAttention.jvp` returns.

    Attributes
    ----------
    out : array
        (..., num_heads, seqlen_q, head_dim_v) in layout "bhsd", dtype of q.
    lse : array
        (..., num_heads, seqlen_q) in every layout, float32 (float64 for float64): natural logarithm of the row sums.
    tout, tlse : array
        Tangents of out and lse, of their shapes and dtypes.

    See Also
    --------
    FlashAttention.jvp
    """

    out: ArrayT
    lse: LseT
    tout: ArrayT
    tlse: LseT


class GradientTangents(NamedTuple, Generic[ArrayT, KeyT, ValueT]):
    """What `FlashAttention.backward_jvp` returns, unless it is asked for other tangents of gradients.

    Attributes
    ----------
    tdq, tdk, tdv : array
        Tangents of dq, dk and dv: shapes and dtypes of q, k and v.

    See Also
    --------
    FlashAttention.backward_jvp
    hessian_vector_product
    """

    tdq: ArrayT
    tdk: KeyT
    tdv: ValueT


class DoubleGradients(NamedTuple, Generic[ArrayT, KeyT, ValueT]):
    """What `double_backward` returns.

    Attributes
    ----------
    ddout : array
        Gradient with respect to dout, of its shape and dtype.
    ddlse : array
        Gradient with respect to dlse, with the shape and dtype of lse.
    gradients : GradientTangents
        Those with respect to the inputs: tdq has the shape and dtype of q, and so on.

    See Also
    --------
    double_backward
    """

    ddout: ArrayT
    ddlse: Any
    gradients: ScoreGradientTangents[ArrayT, KeyT, ValueT]


class JvpGradients(NamedTuple, Generic[ArrayT, KeyT, ValueT]):
    """What `jvp_backward` returns.

    Attributes
    ----------
    gradients : GradientTangents
        Those with respect to the inputs: tdq has the shape and dtype of q, and so on.
    of_tangents : Gradients
        Those with respect to the tangents: dq has the shape and dtype of tq, and so on.

    See Also
    --------
    jvp_backward
    """

    gradients: ScoreGradientTangents[ArrayT, KeyT, ValueT]
    of_tangents: ScoreGradients[ArrayT, KeyT, ValueT]


class TopKeys(NamedTuple):
    """What `FlashAttention.top_keys` returns.

    Attributes
    ----------
    indices : array
        (..., num_heads, seqlen_q, count) in every layout, int32; -1 where a query attends to fewer keys.
    weights : array
        The same shape, dtype of lse: the attention weights of these keys, the largest first; 0 where there is none.

    See Also
    --------
    FlashAttention.top_keys
    """

    indices: Any
    weights: Any


class MergeResult(NamedTuple, Generic[ArrayT, LseT]):
    """The result of `merge`.

    Attributes
    ----------
    out : array
        Shape and dtype of each of the outs.
    lse : array
        Shape and dtype of each of the lses.

    See Also
    --------
    merge
    """

    out: ArrayT
    lse: LseT


class MergeGradients(NamedTuple, Generic[ArrayT, LseT]):
    """The result of `merge_backward`: gradients for every split.

    Attributes
    ----------
    douts : tuple of array
        For each split the gradient with respect to its out, of the shape and dtype of out.
    dlses : tuple of array
        For each split the gradient with respect to its lse, of the shape and dtype of lse.

    See Also
    --------
    merge_backward
    """

    douts: tuple[ArrayT, ...]
    dlses: tuple[LseT, ...]


class MergeGradientTangents(NamedTuple, Generic[ArrayT, LseT]):
    """The result of `merge_backward` with tangents: gradients for every split, and their tangents.

    Attributes
    ----------
    douts : tuple of array
        For each split the gradient with respect to its out, of the shape and dtype of out.
    dlses : tuple of array
        For each split the gradient with respect to its lse, of the shape and dtype of lse.
    tdouts, tdlses : tuple of array
        The tangents of douts and dlses, of their shapes and dtypes.

    See Also
    --------
    merge_backward
    """

    douts: tuple[ArrayT, ...]
    dlses: tuple[LseT, ...]
    tdouts: tuple[ArrayT, ...]
    tdlses: tuple[LseT, ...]


if TYPE_CHECKING:
    # Classes of their own, because checkers would take results of arrays without types for these.
    class NumpyForwardResult(ForwardResult[NDArray[ScalarT], NDArray[Any]], Generic[ScalarT]): ...

    class NumpyJvpResult(JvpResult[NDArray[ScalarT], NDArray[Any]], Generic[ScalarT]): ...


_NAMED = {
    ForwardResult: NamedForwardResult,
    Gradients: NamedGradients,
    GradientTangents: NamedGradientTangents,
    MergeGradients: NamedMergeGradients,
}


@functools.cache
def named_tuple(type_: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """The named tuple of results of these names: `type_`, or one like it with other fields."""
    if names == type_._fields:
        return type_  # type: ignore[no-any-return]
    own = {"__slots__": (), "__reduce__": lambda self: (_named_again, (type_, names, tuple(self)))}
    return type(type_.__name__, (namedtuple(type_.__name__, names), _NAMED[type_]), own)


def _named_again(type_: Any, names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """A result that was pickled: its class is made when it is needed, and no module has it by a name."""
    return named_tuple(type_, names)(*values)


def wanted_results(want: Collection[str], given: Mapping[str, Array | None]) -> tuple[str, ...]:
    """The results of a forward pass: out, lse, and row reductions that are wanted or have an array to be written to."""
    listed = " or ".join(map(repr, ROW_REDUCTIONS))
    if isinstance(want, str) or not isinstance(want, Collection) or getattr(want, "ndim", 1) != 1:
        raise type_error("want", typed(want), f"a collection of {listed}")
    for name in want:
        if not isinstance(name, str) or name not in ROW_REDUCTIONS:
            raise value_error("want", repr(name), f"{listed}; out and lse are given")
    return (*OUTPUTS, *(name for name in ROW_REDUCTIONS if name in want or given.get(name) is not None))


def checked_passes(passes: Collection[str]) -> tuple[Pass, ...]:
    """The passes that are wanted, in order."""
    if isinstance(passes, str) or not isinstance(passes, Collection) or getattr(passes, "ndim", 1) != 1:
        raise type_error("passes", typed(passes), f"a collection of {_LISTED_PASSES}")
    for name in passes:
        if not isinstance(name, str) or name not in PREPARED_NAMES:
            raise value_error("passes", repr(name), _LISTED_PASSES)
    if len(passes) == 0:
        raise value_error("passes", repr(passes), f"one or more of {_LISTED_PASSES}")
    return tuple(pass_ for pass_ in PREPARED if pass_.name in passes)


def check_need(need: Collection[str], known: Sequence[str], argument: str = "need") -> None:
    """Raise TypeError or ValueError unless these are names of gradients, of those that a method gives."""
    if isinstance(need, str) or not isinstance(need, Collection) or getattr(need, "ndim", 1) != 1:
        raise type_error(argument, typed(need), "a collection of names of gradients")
    for name in need:
        if not isinstance(name, str) or name not in known:
            raise value_error(argument, repr(name), ", ".join(map(repr, known[:-1])) + f" or {known[-1]!r}")


def needed(
    need: Collection[str],
    given: Mapping[str, Any],
    results: Mapping[str, Array | None],
    score_args: tuple[str, ...] = (),
    prefix: str = "",
) -> tuple[str, ...]:
    """The gradients that are wanted, in their order: those that are needed, or have an array to be written to.

    `score_args` are those of arrays that the score reads. With the prefix "t" the names are those of tangents.
    """
    every = tuple(f"{prefix}{name}" for name in (*GRADIENTS, *score_args))
    check_need(need, every)
    wanted = tuple(name for name in every if name in need or results.get(name) is not None)
    for own, name in INPUT_OF_GRADIENT.items():
        gradient = f"{prefix}{own}"
        if gradient in wanted and given.get(name) is None:
            argument = "need" if results.get(gradient) is None else gradient
            expected = f"FlashAttention({name}=...)" if name in NUMBERS else f"the {name} that forward took"
            raise value_error(argument, f"{gradient} without {name}", expected)
    return wanted
