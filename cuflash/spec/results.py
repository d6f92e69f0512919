"""The results of a call, which are named tuples, and the gradients and passes that it is asked for."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from cuflash.arrays.checks import type_error, typed, value_error
from cuflash.spec.inputs import NUMBERS, NamedGradients, NamedGradientTangents
from cuflash.spec.outputs import GRADIENTS, INPUT_OF_GRADIENT
from cuflash.spec.passes import PASS_NAMES, PASSES, Pass

_LISTED_PASSES = ", ".join(map(repr, PASS_NAMES[:-1])) + f" or {PASS_NAMES[-1]!r}"
Array = Any  # a NumPy or CuPy array, or another library's with __dlpack__; one library per call


class ForwardResult(NamedTuple):
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

    out: Array
    lse: Array


class Gradients(NamedTuple):
    """What `FlashAttention.backward` returns, unless it is asked for other gradients: then a tuple with their names.

    Attributes
    ----------
    dq, dk, dv : array
        Shapes and dtypes of q, k and v.

    See Also
    --------
    FlashAttention.backward
    """

    dq: Array
    dk: Array
    dv: Array


class JvpResult(NamedTuple):
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

    out: Array
    lse: Array
    tout: Array
    tlse: Array


class GradientTangents(NamedTuple):
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

    tdq: Array
    tdk: Array
    tdv: Array


@functools.cache
def named_tuple_of(names: tuple[str, ...]) -> Callable[..., Gradients | NamedGradients]:
    """The named tuple of some gradients."""
    if names == Gradients._fields:
        return Gradients
    return type("Gradients", (namedtuple("Gradients", names), NamedGradients), {"__slots__": ()})


@functools.cache
def named_tuple_of_tangents(names: tuple[str, ...]) -> Callable[..., GradientTangents | NamedGradientTangents]:
    """The named tuple of the tangents of some gradients."""
    if names == GradientTangents._fields:
        return GradientTangents
    return type("GradientTangents", (namedtuple("GradientTangents", names), NamedGradientTangents), {"__slots__": ()})


def checked_passes(passes: Collection[str]) -> tuple[Pass, ...]:
    """The passes that are wanted, in order."""
    if isinstance(passes, str) or not isinstance(passes, Collection):
        raise type_error("passes", typed(passes), f"a collection of {_LISTED_PASSES}")
    for name in passes:
        if name not in PASS_NAMES:
            raise value_error("passes", repr(name), _LISTED_PASSES)
    if not passes:
        raise value_error("passes", repr(passes), f"one or more of {_LISTED_PASSES}")
    return tuple(pass_ for pass_ in PASSES if pass_.name in passes)


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
    if isinstance(need, str) or not isinstance(need, Collection):
        raise type_error("need", typed(need), "a collection of names of gradients")
    every = tuple(f"{prefix}{name}" for name in (*GRADIENTS, *score_args))
    for name in need:
        if name not in every:
            listed = ", ".join(map(repr, every[:-1])) + f" or {every[-1]!r}"
            raise value_error("need", repr(name), listed)
    wanted = tuple(name for name in every if name in need or results.get(name) is not None)
    for own, name in INPUT_OF_GRADIENT.items():
        gradient = f"{prefix}{own}"
        if gradient in wanted and given.get(name) is None:
            argument = "need" if results.get(gradient) is None else gradient
            expected = f"FlashAttention({name}=...)" if name in NUMBERS else f"the {name} that forward took"
            raise value_error(argument, f"{gradient} without {name}", expected)
    return wanted
