"""The optional arrays of a call, and the numbers that act on scores: a row for each.

A row says what its array or number may be, how kernels read it and whether it has a gradient. Validation, operands, the
kernels' argument, `need`, the interface and test strategies iterate over the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict

from cuflash.arrays.array_info import Operand, softmax_dtype_of
from cuflash.arrays.cached import cached_property
from cuflash.spec.type_variables import ArrayT, KeyT, NamedResults, ValueT

INPUTS = ("q", "k", "v")
_OR_INT64 = " or int64"
SCORES = ("batch", "num_heads", "seqlen_q", "seqlen_k")


@dataclass(frozen=True, kw_only=True)
class OptionalInput:
    """One optional array, named as the argument of `cuflash.FlashAttention.forward`."""

    name: str
    dtypes: tuple[str, ...]  # the dtypes that it may have; "input" stands for that of q, "softmax" for that of lse
    hint: str = ""  # what a message about a wrong dtype adds
    # The shapes that it may have, as names of axes. With `broadcasts` there is one, to which the array is broadcast.
    # Empty where the shape follows from more than the sizes of the problem: then `cuflash.spec.problem` checks it.
    shapes: tuple[tuple[str, ...], ...] = ()
    broadcasts: bool = False
    strides: int  # how many strides the kernels get
    own_axes: int | None = None  # how many of its axes are not batch axes. None where it goes with no batch axes.
    # What its gradient flows through: it is added to the scores, or to the sum of exponentials whose logarithm is lse.
    # The gradient has its shape and dtype. Empty where there is none.
    gradient_via: Literal["", "scores", "softmax"] = ""
    goes_packed: bool = False  # whether it may be given with packed sequences
    has_keys: bool = False  # whether one of its axes is as long as there are keys, or blocks of them
    # Its position in the order in which inputs act on a score; the names of kernels list options in this order. 0 for
    # one that does not act on scores.
    acts: int = 0
    # The macro that tells kernels of it. It is 0 where the input is absent. Where it is given, it is 1, or the size of
    # an element if its name ends with "_BYTES". Empty where kernels need to know more than that.
    define: str = ""

    def dtypes_with(self, dtype: str) -> tuple[str, ...]:
        """The dtypes that it may have next to q of a dtype."""
        spelled = {"input": dtype, "softmax": softmax_dtype_of(dtype)}
        return tuple(dict.fromkeys(spelled.get(x, x) for x in self.dtypes))

    @property
    def gradient(self) -> str:
        """The name of its gradient; empty where it has none."""
        return f"d{self.name}" if self.gradient_via else ""

    @property
    def may_lack_batch(self) -> bool:
        """Whether a pass takes it without an axis for the batch, and then sums its gradient over the batch."""
        return bool(self.own_axes)

    @property
    def lacks_batch(self) -> bool:
        """Whether a pass takes it in no other way: all batch entries share one array."""
        return self.may_lack_batch and bool(self.shapes) and not any("batch" in shape for shape in self.shapes)


OPTIONAL_INPUTS = (
    OptionalInput(
        name="bias",
        dtypes=("input", "softmax"),
        shapes=(SCORES,),
        broadcasts=True,
        strides=4,
        own_axes=3,
        gradient_via="scores",
        has_keys=True,
        acts=2,
        define="CUFLASH_BIAS_BYTES",
    ),
    OptionalInput(
        name="mask",
        dtypes=("bool",),
        hint=" (True takes part; additive terms go into bias)",
        shapes=(SCORES,),
        broadcasts=True,
        strides=4,
        own_axes=3,
        has_keys=True,
        acts=3,
        define="CUFLASH_HAS_MASK",
    ),
    OptionalInput(
        name="block_mask", dtypes=("bool",), hint=" (True takes part)", strides=4, own_axes=3, has_keys=True, acts=4
    ),
    OptionalInput(
        name="alibi_slopes",
        dtypes=("softmax",),
        shapes=(("num_heads",), ("batch", "num_heads")),
        strides=3,
        own_axes=1,
        gradient_via="scores",
        goes_packed=True,
        acts=1,
        define="CUFLASH_HAS_ALIBI",
    ),
    OptionalInput(
        name="kv_lengths",
        dtypes=("int32", "int64"),
        shapes=(("batch",),),
        strides=1,
        own_axes=0,
        acts=5,
        define="CUFLASH_KV_LENGTHS_BYTES",
    ),
    OptionalInput(
        name="sinks",
        dtypes=("softmax",),
        shapes=(("num_heads",),),
        strides=1,
        own_axes=1,
        gradient_via="softmax",
        goes_packed=True,
        acts=6,
        define="CUFLASH_HAS_SINKS",
    ),
    OptionalInput(name="cu_seqlens_q", dtypes=("int32",), hint=_OR_INT64, strides=1, goes_packed=True),
    OptionalInput(name="cu_seqlens_k", dtypes=("int32",), hint=_OR_INT64, strides=1, goes_packed=True),
    OptionalInput(name="block_table", dtypes=("int32",), hint=_OR_INT64, strides=2),
    OptionalInput(name="q_scale", dtypes=("float32",), strides=3, own_axes=2, goes_packed=True),
    OptionalInput(name="k_scale", dtypes=("float32",), strides=3, own_axes=2, goes_packed=True),
    OptionalInput(name="v_scale", dtypes=("float32",), strides=3, own_axes=2, goes_packed=True),
)
NAMES = tuple(row.name for row in OPTIONAL_INPUTS)
WITH_KEYS = tuple(row.name for row in OPTIONAL_INPUTS if row.has_keys)
BY_NAME: Mapping[str, OptionalInput] = {row.name: row for row in OPTIONAL_INPUTS}
ACTING = tuple(row.name for row in sorted(OPTIONAL_INPUTS, key=lambda row: row.acts) if row.acts)
# The inputs over pairs of a query and a key. They broadcast along these axes.
BROADCAST = tuple(row.name for row in OPTIONAL_INPUTS if row.broadcasts)
# The same, and the tangents of those that have some.
MOVABLE_BROADCAST = (*BROADCAST, *(f"t{row.name}" for row in OPTIONAL_INPUTS if row.broadcasts and row.gradient_via))
# The inputs with a value for each query head: the same in every batch entry, or with an axis for these.
PER_HEAD_INPUTS = tuple(row for row in OPTIONAL_INPUTS if row.gradient_via and not row.broadcasts)


@dataclass(frozen=True, kw_only=True)
class Number:
    """One option that is a number, named as the argument of `cuflash.FlashAttention`. It has a gradient.

    The passes multiply products of q and k by the numbers, by the inverses of those that are positive, and by log2(e),
    in the dtype of the softmax. So that no ordinary product overflows on the way, each of these factors is at most a
    power of two: 2**48 in float32, 2**384 in float64. Two of them take three quarters of the exponents of the dtype,
    and leave range for products up to 2**31 in float32.
    """

    name: str
    is_positive: bool = False  # whether it has to be greater than 0
    # A lower exponent of the largest number, for inputs of these dtypes.
    exponents: Mapping[str, int] = field(default_factory=dict)

    def range_of(self, dtype: str) -> tuple[float, float, str]:
        """The smallest number and the largest one for inputs of a dtype, and the same in words."""
        lowest = 384 if dtype == "float64" else 48
        highest = self.exponents.get(dtype, lowest)
        if self.is_positive:
            return 2.0**-lowest, 2.0**highest, f"2**-{lowest} to 2**{highest} for {dtype} arrays"
        return -(2.0**highest), 2.0**highest, f"-2**{highest} to 2**{highest} for {dtype} arrays"


NUMBER_ROWS = (
    Number(name="scale"),
    # The kernels of half precision compute the tanh with an error of 1e-7, which softcap multiplies. Up to 2**16, the
    # rounding of the weights hides the error.
    Number(name="softcap", is_positive=True, exponents={"float16": 16, "bfloat16": 16}),
)
# The first always has a value. The others have one only if they are given.
NUMBERS = tuple(number.name for number in NUMBER_ROWS)
CAPS = ("softcap",)  # parameters of a function that acts on scaled products, before the inputs act
# The inputs of which kernels read int32 alone. Calls convert int64, which is NumPy's integer and that of its sums.
NARROWED = tuple(row.name for row in OPTIONAL_INPUTS if row.dtypes == ("int32",))
# The factors of fp8 q, k and v; their names begin with those of the arrays.
FP8_SCALES = ("q_scale", "k_scale", "v_scale")
# Options that act on scores pair by pair, in the order in which they do: a kernel without scores knows none of them.
PAIR_OPTIONS = (
    *CAPS,
    *(name for name in ACTING if BY_NAME[name].has_keys or BY_NAME[name].gradient_via == "scores"),
)
# Those of `PAIR_OPTIONS` that hide pairs, and do nothing else.
MASKS = tuple(name for name in PAIR_OPTIONS if name in BY_NAME and not BY_NAME[name].gradient_via)
# The others of `PAIR_OPTIONS`, which make the score: a score_mod replaces them.
SCORE_OPTIONS = tuple(name for name in PAIR_OPTIONS if name not in MASKS)
# The macros that tell kernels whether an option is given.
DEFINES: Mapping[str, str] = {
    **{name: f"CUFLASH_HAS_{name.upper()}" for name in CAPS},
    **{row.name: row.define for row in OPTIONAL_INPUTS if row.define},
}
_ADDED = tuple(row.name for row in OPTIONAL_INPUTS if row.gradient_via == "scores")


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers as options, None for those that are not given."""

    scale: float | None = None
    softcap: float | None = None

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """The numbers by name, not to be written to."""
        return {name: getattr(self, name) for name in NUMBERS}


@dataclass(frozen=True, kw_only=True)
class Given(Numbers):
    """The numbers of a problem, and its optional inputs as kernels read them."""

    scale: float = field()
    bias: Operand | None = None
    mask: Operand | None = None
    kv_lengths: Operand | None = None
    alibi_slopes: Operand | None = None
    sinks: Operand | None = None
    block_mask: Operand | None = None
    block_table: Operand | None = None  # k and v are then pools of pages: (num_pages, num_heads_kv, page_size, dim)
    cu_seqlens_q: Operand | None = None
    cu_seqlens_k: Operand | None = None
    q_scale: Operand | None = None  # over the first two axes of q, as (batch, heads, ...), and blocks of its rows
    k_scale: Operand | None = None  # likewise of k
    v_scale: Operand | None = None

    def given(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of these names, which are of `NAMES` and `NUMBERS`, that the problem has."""
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def has_added_terms(self) -> bool:
        """Whether an input is added to the scores, which may be large."""
        return bool(self.given(_ADDED))

    @property
    def acting(self) -> tuple[str, ...]:
        """The options that act on scores, in the order in which they do."""
        return self.given((*CAPS, *ACTING))


class OfNumbers(TypedDict, total=False):
    """The numbers as keyword arguments."""

    scale: float | None
    softcap: float | None


class OptionalArrays(TypedDict, total=False):
    """The optional inputs as keyword arguments."""

    bias: Any
    mask: Any
    kv_lengths: Any
    alibi_slopes: Any
    sinks: Any
    block_mask: Any
    block_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any


class Tangents(TypedDict, total=False):
    """The tangents of inputs and numbers, as keyword arguments."""

    tq: Any
    tk: Any
    tv: Any
    tbias: Any
    talibi_slopes: Any
    tsinks: Any
    tscale: Any
    tsoftcap: Any


class WithTangents(OptionalArrays, Tangents, total=False):
    """The optional inputs, and the tangents of all inputs and numbers, as keyword arguments."""


class InputGradients(TypedDict, total=False):
    """The gradients of optional inputs and numbers, as keyword arguments."""

    dbias: Any
    dalibi_slopes: Any
    dscale: Any
    dsoftcap: Any
    dsinks: Any


class InputGradientTangents(TypedDict, total=False):
    """The tangents of these gradients, as keyword arguments."""

    tdbias: Any
    tdalibi_slopes: Any
    tdscale: Any
    tdsoftcap: Any
    tdsinks: Any


class NamedGradients(NamedResults, Generic[ArrayT, KeyT, ValueT]):
    """A named tuple of the gradients that were asked for; the others are no attributes of it."""

    __slots__ = ()

    dq: ArrayT
    dk: KeyT
    dv: ValueT
    dbias: Any
    dalibi_slopes: Any
    dscale: Any
    dsoftcap: Any
    dsinks: Any


class NamedGradientTangents(NamedResults, Generic[ArrayT, KeyT, ValueT]):
    """A named tuple of the tangents of gradients that were asked for; the others are no attributes of it."""

    __slots__ = ()

    tdq: ArrayT
    tdk: KeyT
    tdv: ValueT
    tdbias: Any
    tdalibi_slopes: Any
    tdscale: Any
    tdsoftcap: Any
    tdsinks: Any


if TYPE_CHECKING:

    class ScoreGradients(NamedGradients[ArrayT, KeyT, ValueT]):
        """Those of arrays that a score reads, too, by the names that it gives to them."""

        def __getattr__(self, name: str) -> Any: ...

    class ScoreGradientTangents(NamedGradientTangents[ArrayT, KeyT, ValueT]):
        """Those of arrays that a score reads, too, by the names that it gives to them."""

        def __getattr__(self, name: str) -> Any: ...
