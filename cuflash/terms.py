"""The optional arrays of a call: a row for each says what it may be, how kernels see it and whether it has a gradient.

Validation, operands, the kernels' argument, `need`, the interface and test strategies walk over the rows of `TERMS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

SCORES = ("batch", "num_heads", "seqlen_q", "seqlen_k")


@dataclass(frozen=True, kw_only=True)
class Term:
    """One optional array, named as the argument of `cuflash.FlashAttention.forward`.

    Attributes
    ----------
    dtypes : tuple of str
        Those it may have; "input" stands for the dtype of q, "softmax" for that of lse.
    hint : str
        What a message about a wrong dtype adds.
    shapes : tuple
        Those it may have, as names of axes; with `broadcasts` one, to which it broadcasts. Empty where the shape
        follows from more than the sizes of the problem: `cuflash.problem` checks it.
    strides : int
        How many the kernels get.
    has_gradient : bool
        Whether `backward` may give one, of its shape and dtype.
    goes_packed : bool
        Whether it may be given with packed sequences.
    """

    name: str
    dtypes: tuple[str, ...]
    hint: str = ""
    shapes: tuple[tuple[str, ...], ...] = ()
    broadcasts: bool = False
    strides: int
    has_gradient: bool = False
    goes_packed: bool = False


TERMS = (
    Term(name="bias", dtypes=("input", "softmax"), shapes=(SCORES,), broadcasts=True, strides=4, has_gradient=True),
    Term(
        name="mask",
        dtypes=("bool",),
        hint=" (True takes part; additive terms go into bias)",
        shapes=(SCORES,),
        broadcasts=True,
        strides=4,
    ),
    Term(name="block_mask", dtypes=("bool",), hint=" (True takes part)", strides=4),
    Term(
        name="alibi_slopes",
        dtypes=("softmax",),
        shapes=(("num_heads",), ("batch", "num_heads")),
        strides=3,
        has_gradient=True,
        goes_packed=True,
    ),
    Term(name="kv_lengths", dtypes=("int32", "int64"), shapes=(("batch",),), strides=1),
    Term(name="sinks", dtypes=("softmax",), shapes=(("num_heads",),), strides=1, has_gradient=True, goes_packed=True),
    Term(name="cu_seqlens_q", dtypes=("int32",), strides=1, goes_packed=True),
    Term(name="cu_seqlens_k", dtypes=("int32",), strides=1, goes_packed=True),
    Term(name="block_table", dtypes=("int32",), strides=2),
)
NAMES = tuple(term.name for term in TERMS)
BY_NAME: Mapping[str, Term] = {term.name: term for term in TERMS}


class Terms(TypedDict, total=False):
    """The terms as keyword arguments."""

    bias: Any
    mask: Any
    kv_lengths: Any
    alibi_slopes: Any
    sinks: Any
    block_mask: Any
    block_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any


class PassArrays(Terms, total=False):
    """All arrays of both passes beside q, k and v, as keyword arguments."""

    dout: Any
    out: Any
    lse: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dalibi_slopes: Any
    dscale: Any
    dsoftcap: Any
    dsinks: Any


def checked(method: str, kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """All arrays of a typed dictionary by name, None for those that a method was not given as keyword arguments.

    Raises TypeError for other keywords, as Python itself does.
    """
    for name in given:
        if name not in kind.__annotations__:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
    return {name: given.get(name) for name in kind.__annotations__}
