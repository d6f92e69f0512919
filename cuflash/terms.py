"""The optional arrays of a call: a row for each says what it may be, how kernels see it and whether it has a gradient.

Validation, operands, the kernels' argument, `need`, the interface and test strategies walk over the rows of `TERMS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

SCORES = ("batch", "num_heads", "seqlen_q", "seqlen_k")


@dataclass(frozen=True, kw_only=True)
class Term:
    """One optional array, named as the argument of `cuflash.FlashAttention.forward`.

    Attributes
    ----------
    dtypes : tuple of str
        The dtypes that it may have; "input" stands for that of q, "softmax" for that of lse.
    hint : str
        What a message about a wrong dtype adds.
    shapes : tuple
        The shapes that it may have, as names of axes. With `broadcasts` there is one, to which the array is broadcast.
        Empty where the shape follows from more than the sizes of the problem: then `cuflash.problem` checks it.
    strides : int
        How many strides the kernels get.
    part_of : {"", "scores", "softmax"}
        Whether it is a summand of the scores, or of the sum of exponentials, which lse has in it. Such a term has a
        gradient, of its own shape and dtype.
    goes_packed : bool
        Whether it may be given with packed sequences.
    has_keys : bool
        Whether one of its axes is as long as there are keys, or blocks of them.
    acts : int
        In which place it acts on a score; the names of kernels list options in this order. 0 for a term that does not
        act on scores, but says where arrays lie.
    define : str
        The macro that tells kernels of it. It is 0 where the term is absent. Where the term is given it is 1, or the
        size of an element if its name ends with "_BYTES". Empty where kernels need to know more than that.
    """

    name: str
    dtypes: tuple[str, ...]
    hint: str = ""
    shapes: tuple[tuple[str, ...], ...] = ()
    broadcasts: bool = False
    strides: int
    part_of: Literal["", "scores", "softmax"] = ""
    goes_packed: bool = False
    has_keys: bool = False
    acts: int = 0
    define: str = ""

    @property
    def gradient(self) -> str:
        """The name of its gradient; empty where it has none."""
        return f"d{self.name}" if self.part_of else ""


TERMS = (
    Term(
        name="bias",
        dtypes=("input", "softmax"),
        shapes=(SCORES,),
        broadcasts=True,
        strides=4,
        part_of="scores",
        has_keys=True,
        acts=2,
        define="CUFLASH_BIAS_BYTES",
    ),
    Term(
        name="mask",
        dtypes=("bool",),
        hint=" (True takes part; additive terms go into bias)",
        shapes=(SCORES,),
        broadcasts=True,
        strides=4,
        has_keys=True,
        acts=3,
        define="CUFLASH_HAS_MASK",
    ),
    Term(name="block_mask", dtypes=("bool",), hint=" (True takes part)", strides=4, has_keys=True, acts=4),
    Term(
        name="alibi_slopes",
        dtypes=("softmax",),
        shapes=(("num_heads",), ("batch", "num_heads")),
        strides=3,
        part_of="scores",
        goes_packed=True,
        acts=1,
        define="CUFLASH_HAS_ALIBI",
    ),
    Term(
        name="kv_lengths",
        dtypes=("int32", "int64"),
        shapes=(("batch",),),
        strides=1,
        acts=5,
        define="CUFLASH_KV_LENGTHS_BYTES",
    ),
    Term(
        name="sinks",
        dtypes=("softmax",),
        shapes=(("num_heads",),),
        strides=1,
        part_of="softmax",
        goes_packed=True,
        acts=6,
        define="CUFLASH_HAS_SINKS",
    ),
    Term(name="cu_seqlens_q", dtypes=("int32",), strides=1, goes_packed=True),
    Term(name="cu_seqlens_k", dtypes=("int32",), strides=1, goes_packed=True),
    Term(name="block_table", dtypes=("int32",), strides=2),
)
NAMES = tuple(term.name for term in TERMS)
BY_NAME: Mapping[str, Term] = {term.name: term for term in TERMS}
ACTING = tuple(term.name for term in sorted(TERMS, key=lambda term: term.acts) if term.acts)

# Options that are numbers and have a gradient. The first is always there, the others where they are given, and then
# they act on scores before the terms do.
NUMBERS = ("scale", "softcap")
# Options that act on scores pair by pair, in the order in which they do: a kernel without scores knows none of them.
OF_PAIRS = (
    *NUMBERS[1:],
    *(name for name in ACTING if BY_NAME[name].has_keys or BY_NAME[name].part_of == "scores"),
)
# The macros that tell kernels whether they are given.
DEFINES: Mapping[str, str] = {
    **{name: f"CUFLASH_HAS_{name.upper()}" for name in NUMBERS[1:]},
    **{term.name: term.define for term in TERMS if term.define},
}
# The gradients that `backward` gives unless it is told otherwise; those that are sums of gradients of scores; those of
# parts of the softmax; and all of them, in the order in which `backward` gives them.
DEFAULT_NEED = ("dq", "dk", "dv")
OF_NUMBERS = tuple(f"d{name}" for name in NUMBERS)
OF_SCORES = (*(term.gradient for term in TERMS if term.part_of == "scores"), *OF_NUMBERS)
OF_SOFTMAX = tuple(term.gradient for term in TERMS if term.part_of == "softmax")
GRADIENTS = (*DEFAULT_NEED, *OF_SCORES, *OF_SOFTMAX)
# Gradients that only a problem with a certain option has, and that option.
OF_OPTIONS = {f"d{name}": name for name in NUMBERS[1:]} | {term.gradient: term.name for term in TERMS if term.part_of}


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


class OfThreeGradients(Terms, total=False):
    """The arrays of a backward pass that gives `DEFAULT_NEED`, as keyword arguments."""

    dlse: Any
    dq: Any
    dk: Any
    dv: Any


class OfGradients(OfThreeGradients, total=False):
    """The arrays of any backward pass, as keyword arguments."""

    dbias: Any
    dalibi_slopes: Any
    dscale: Any
    dsoftcap: Any
    dsinks: Any


class PassArrays(OfGradients, total=False):
    """All arrays of both passes beside q, k and v, as keyword arguments."""

    dout: Any
    out: Any
    lse: Any


class NamedGradients(tuple[Any, ...]):
    """Gradients by the names of those that were asked for, a named tuple; the others are no attributes."""

    __slots__ = ()

    if TYPE_CHECKING:
        _fields: ClassVar[tuple[str, ...]]

        def _asdict(self) -> dict[str, Any]: ...

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
