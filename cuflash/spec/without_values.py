"""Calls without values, ``v=None``: lse alone, and its derivatives.

What a backend computes for them has values without columns, and out, dout and dv have none either. So every product
over the columns of v is a sum of no terms, which no kernel computes: QK^T is left of the forward pass; and of the
backward pass, where dP and delta are 0 and ``dS = P * dlse``, QK^T, dQ and dK are left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from cuflash.arrays.array_info import FLOAT8
from cuflash.arrays.checks import type_error, value_error
from cuflash.arrays.dlpack import module_of
from cuflash.spec.inputs import INPUTS
from cuflash.spec.outputs import FORWARD_ROWS

# What lies over the columns of v, or belongs to it: without v none is given, and none is returned.
OF_VALUES = ("v_scale", "out", "dout", "tv", "tout", "tdout", "dv", "tdv")
_LIKE_OUT = ("out", "dout", "tout")
# Gradients of which a backward pass needs one.
_GRADIENTS = (*(f"{t}{row.gradient}" for row in FORWARD_ROWS if row.is_of_rows and row.upstream for t in ("", "t")),)

P = ParamSpec("P")
R = TypeVar("R")


def takes_no_values(function: Callable[P, R]) -> Callable[P, R]:
    """The same function of q and k, with a remedy where a third array is given by position, as v is elsewhere."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if len(args) > 2:
            got = f"{len(args)} positional arguments"
            expected = "q and k: lse has no v, which cuflash.attention takes; options and other arrays go by name"
            raise type_error(function.__name__, got, expected)
        return function(*args, **keywords)

    return call


def check_without_values(
    arrays: Mapping[str, Any], required: Iterable[str], wanted: Collection[str]
) -> tuple[str, ...]:
    """What a call requires that has no v. Refuses arrays that go with v, and a backward pass of nothing."""
    if wanted and all(name in OF_VALUES for name in wanted):
        raise value_error("need", f"{', '.join(wanted)} without v", "a gradient of lse, such as dq")
    for name in OF_VALUES:
        if arrays.get(name) is not None:
            raise value_error(name, "an array", "None as v is: without values there are lse and its derivatives alone")
    if "dout" in required and all(arrays.get(name) is None for name in _GRADIENTS):
        raise value_error("dlse", "None", "the gradient with respect to lse, or to a reduction: the other results")
    return tuple(name for name in required if name not in ("v", *_LIKE_OUT))


def with_no_columns(arrays: Mapping[str, Any], required: Iterable[str], layout: str) -> dict[str, Any]:
    """The arrays of a backend, with values that have no columns, and with what else a call requires."""
    q, k = arrays["q"], arrays["k"]
    v = arrays.get("v")  # streamed keys bring it along
    if v is None:
        v = k[..., :0] if k.shape else k  # which is refused as k is
    given = {**dict.fromkeys(INPUTS), **arrays, "v": v}
    if k.dtype.name in FLOAT8 and arrays.get("k_scale") is not None:  # else k_scale is what the error is about
        given["v_scale"] = arrays["k_scale"]
    shape = [*given["lse"].shape, 0] if "lse" in required else []
    if layout == "bshd" and len(shape) > 2:
        shape[-3:-1] = shape[-2], shape[-3]
    for name in (name for name in _LIKE_OUT if name in required):
        given.pop(name, None)  # last of all: a message about a wrong shape is then one about lse
        given[name] = module_of(q).empty(tuple(shape), q.dtype)
    return given
