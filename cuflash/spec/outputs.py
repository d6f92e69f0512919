"""The results of all passes: a row for each.

A row says over which axes a result lies, its dtype, whose gradient it is, and whether the backward pass takes it up.
Bindings, the kernels' argument, `need`, slices of a problem, the oracle rule and test strategies iterate over the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any, Generic, Literal, TypedDict

from cuflash.spec.inputs import (
    CAPS,
    INPUTS,
    NAMES,
    NUMBERS,
    OPTIONAL_INPUTS,
    InputGradients,
    InputGradientTangents,
    OptionalArrays,
    OptionalInput,
    WithTangents,
)
from cuflash.spec.type_variables import ArrayT, LseT, NamedResults

_QUERIES = ("batch", "num_heads", "seqlen_q")
_KEYS = ("batch", "num_heads_kv", "seqlen_k")
_COLUMNS = ("batch", "num_heads", "seqlen_k")
_HEAD_DIMS = ("head_dim", "head_dim_v")


@dataclass(frozen=True, kw_only=True)
class Output:
    """One result of a pass, named as `cuflash.FlashAttention` names it."""

    name: str
    # Sizes of a problem: the axes as kernels read them. None where the result has the shape of what it is the gradient
    # of.
    axes: tuple[str, ...] | None = None
    # That of q, that of the softmax, int32, or that of what it is the gradient of.
    dtype: Literal["input", "softmax", "index", "like"] = "like"
    gradient_of: str = ""  # the array or number whose gradient it is; empty for results of the forward pass
    # As `OptionalInput.gradient_via`, where this is such a gradient; those of numbers flow through the scores.
    gradient_via: Literal["", "scores", "softmax"] = ""
    needs: str = ""  # the optional array or number that a problem must have, so that it has this result
    strides: int = 3  # how many strides the kernels get
    is_default: bool = False  # whether a call returns it by default
    # Whether the backward pass reads the result, and its gradient if there is one ("optional") or always; or, with
    # "gradient", its gradient alone. A result that is no default is read only where its gradient is.
    upstream: Literal["", "gradient", "optional", "required"] = ""
    of_no_keys: float = 0.0  # its value in a row that attends to no key
    # What kernels store for each row on the way to its gradient: arrays in memory, one number a row.
    scratch: tuple[str, ...] = ()

    @property
    def has_head_dim(self) -> bool:
        """Whether it lies over a head dimension, in the layout of q."""
        return self.axes is not None and self.axes[-1:] != () and self.axes[-1] in _HEAD_DIMS

    @property
    def is_of_rows(self) -> bool:
        """Whether it has one value for each row of queries."""
        return self.axes == _QUERIES

    @property
    def is_number(self) -> bool:
        """Whether it is one number."""
        return self.axes == ()

    @property
    def gradient(self) -> str:
        """The name of the gradient of a loss with respect to it; empty where the backward pass takes none."""
        return f"d{self.name}" if self.upstream else ""


def _input_gradient(row: OptionalInput) -> Output:
    return Output(
        name=row.gradient, gradient_of=row.name, gradient_via=row.gradient_via, needs=row.name, strides=row.strides
    )


def _gradient_of_number(name: str) -> Output:
    return Output(
        name=f"d{name}",
        axes=(),
        dtype="softmax",
        gradient_of=name,
        gradient_via="scores",
        needs=name if name in CAPS else "",
        strides=0,
    )


# Results of the forward pass, in the order in which it gives them.
FORWARD_ROWS = (
    Output(name="out", axes=(*_QUERIES, "head_dim_v"), dtype="input", is_default=True, upstream="required"),
    Output(name="lse", axes=_QUERIES, dtype="softmax", is_default=True, upstream="optional", of_no_keys=-inf),
    Output(
        name="max",
        axes=_QUERIES,
        dtype="softmax",
        upstream="gradient",
        of_no_keys=-inf,
        scratch=("row_dmax", "row_first_max"),
    ),
    Output(name="entropy", axes=_QUERIES, dtype="softmax", upstream="optional", scratch=("row_dentropy",)),
)
# Those of the backward pass, which gives gradients of arrays that a score reads after these.
GRADIENT_ROWS = (
    Output(name="dq", axes=(*_QUERIES, "head_dim"), dtype="input", gradient_of="q", is_default=True),
    Output(name="dk", axes=(*_KEYS, "head_dim"), dtype="input", gradient_of="k", is_default=True),
    Output(name="dv", axes=(*_KEYS, "head_dim_v"), dtype="input", gradient_of="v", is_default=True),
    *(_input_gradient(row) for row in OPTIONAL_INPUTS if row.gradient_via == "scores"),
    *(_gradient_of_number(name) for name in NUMBERS),
    *(_input_gradient(row) for row in OPTIONAL_INPUTS if row.gradient_via == "softmax"),
)
# Reductions of the attention weights: over the queries, and of each row the largest.
COLUMN_SUMS_ROWS = (Output(name="column_sums", axes=_COLUMNS, dtype="softmax", is_default=True),)
COLUMN_MAX_ROWS = (Output(name="column_max", axes=_COLUMNS, dtype="softmax", is_default=True),)
TOP_KEYS_ROWS = (
    Output(name="key_indices", axes=(*_QUERIES, "count"), dtype="index", strides=4, is_default=True),
    Output(name="key_weights", axes=(*_QUERIES, "count"), dtype="softmax", strides=4, is_default=True),
)
WEIGHT_REDUCTION_ROWS = (*COLUMN_SUMS_ROWS, *COLUMN_MAX_ROWS, *TOP_KEYS_ROWS)
# Tangents of both: what the passes jvp and backward_jvp give.
TANGENT_ROWS = tuple(replace(row, name=f"t{row.name}", upstream="") for row in FORWARD_ROWS if row.is_default)
GRADIENT_TANGENT_ROWS = tuple(replace(row, name=f"t{row.name}") for row in GRADIENT_ROWS)
BY_NAME = {
    row.name: row
    for row in (*FORWARD_ROWS, *GRADIENT_ROWS, *TANGENT_ROWS, *GRADIENT_TANGENT_ROWS, *WEIGHT_REDUCTION_ROWS)
}
UPSTREAM = {row.gradient: row for row in FORWARD_ROWS if row.upstream}  # by the name of the gradient

# ---- names of results, in order --------------------------------------------------------------------------------------

OUTPUTS = tuple(row.name for row in FORWARD_ROWS if row.is_default)
# What a forward pass gives on request: reductions of each row of scores. The passes with tangents do not know them.
ROW_REDUCTION_ROWS = tuple(row for row in FORWARD_ROWS if not row.is_default)
ROW_REDUCTIONS = tuple(row.name for row in ROW_REDUCTION_ROWS)
GRADIENTS = tuple(row.name for row in GRADIENT_ROWS)
DEFAULT_NEED = tuple(row.name for row in GRADIENT_ROWS if row.is_default)
NUMBER_GRADIENTS = tuple(row.name for row in GRADIENT_ROWS if row.is_number)
SCORE_GRADIENTS = tuple(row.name for row in GRADIENT_ROWS if row.gradient_via == "scores")
SOFTMAX_GRADIENTS = tuple(row.name for row in GRADIENT_ROWS if row.gradient_via == "softmax")
# Gradients that only a problem with a certain option has, and that option.
INPUT_OF_GRADIENT = {row.name: row.needs for row in GRADIENT_ROWS if row.needs}

# ---- names of arrays of both passes ----------------------------------------------------------------------------------

# What the backward pass reads besides the inputs: what it always needs, and all of it.
REQUIRED_BY_BACKWARD = (
    *(row.gradient for row in FORWARD_ROWS if row.upstream == "required"),
    *OUTPUTS,
)
_OPTIONAL_DEFAULTS = tuple(row.gradient for row in FORWARD_ROWS if row.is_default and row.upstream == "optional")
# The same of row reductions: gradients, and those of the results that these need.
OF_ROW_REDUCTIONS = tuple(
    name
    for row in ROW_REDUCTION_ROWS
    if row.upstream
    for name in ((row.gradient,) if row.upstream == "gradient" else (row.name, row.gradient))
)
TAKEN_BY_BACKWARD = (*REQUIRED_BY_BACKWARD, *_OPTIONAL_DEFAULTS, *OF_ROW_REDUCTIONS)


# ---- tangents --------------------------------------------------------------------------------------------------------

# The inputs and numbers that have gradients: these may have tangents. The tangent of x is named tx.
MOVABLE = (*INPUTS, *(row.name for row in OPTIONAL_INPUTS if row.gradient_via), *NUMBERS)
OUTPUT_TANGENTS = tuple(row.name for row in TANGENT_ROWS)
DEFAULT_NEED_TANGENTS = tuple(row.name for row in GRADIENT_TANGENT_ROWS if row.is_default)
# What backward_jvp needs, besides q, k and v, and what else it takes.
REQUIRED_BY_BACKWARD_JVP = (*REQUIRED_BY_BACKWARD, *OUTPUT_TANGENTS)
TAKEN_BY_BACKWARD_JVP = (
    *REQUIRED_BY_BACKWARD,
    *_OPTIONAL_DEFAULTS,
    *OUTPUT_TANGENTS,
    *(f"t{row.gradient}" for row in FORWARD_ROWS if row.is_default),
)


def model_of(result: str) -> str:
    """The array or number whose gradient, or tangent of a gradient, a result of a backward pass is."""
    return result.removeprefix("t")[1:]


def gradient_of(result: str) -> str:
    """The gradient that a result of a backward pass is, or is the tangent of."""
    return result.removeprefix("t")


def _with_gradients(rows: tuple[Output, ...]) -> tuple[str, ...]:
    return tuple(name for row in rows for name in (row.name, row.gradient) if name)


# Arrays over head dimensions, and over rows of queries, in the order in which the kernels' argument has them.
OVER_HEAD_DIM = (
    *INPUTS,
    *_with_gradients(tuple(row for row in FORWARD_ROWS if row.has_head_dim)),
    *(row.name for row in GRADIENT_ROWS if row.has_head_dim),
)
OVER_ROWS = _with_gradients(tuple(row for row in FORWARD_ROWS if row.is_of_rows))
ROW_REDUCTIONS_AND_GRADIENTS = _with_gradients(ROW_REDUCTION_ROWS)
ROW_REDUCTION_SCRATCH = tuple(name for row in reversed(ROW_REDUCTION_ROWS) for name in row.scratch)
# Scratch arrays of kernels, in the order in which their argument has them, and those of passes with tangents, and with
# arrays that a score reads, in addition.
SCRATCH = (
    *("row_stats", "dq_accumulator", "dkv_partials", "partial_out", "partial_sums", "arrivals"),
    *("q_copy", "k_copy", "v_copy", "dout_copy", "key_index", "query_index", "mask_words", "mask_blocks"),
    *("bias_blocks", "row_sums", "score_partials", "sums_partials"),
)
TANGENT_SCRATCH = ("row_tangents",)
SCORE_ARG_SCRATCH = ("score_arg_sums", "score_arg_largest")
# The same with their tangents.
MOVABLE_OVER_HEAD_DIM = (*OVER_HEAD_DIM, *(f"t{name}" for name in OVER_HEAD_DIM))
MOVABLE_OVER_ROWS = (*OVER_ROWS, *(f"t{name}" for name in OVER_ROWS))
# Inputs that have an axis of keys and heads of these, and their tangents.
MOVABLE_OF_KEYS = (*INPUTS[1:], *(f"t{name}" for name in INPUTS[1:]))
# Arrays besides the optional ones, gradients left out, that have an axis of queries.
OF_QUERIES = ("q", "tq", *TAKEN_BY_BACKWARD_JVP, *OF_ROW_REDUCTIONS, "row_sums", "first_maxima")
# All names by which passes, kernels and slices of a problem know arrays.
KNOWN = frozenset(
    (
        *(*INPUTS, *NAMES, *NUMBERS, *BY_NAME, *MOVABLE_OVER_HEAD_DIM, *MOVABLE_OVER_ROWS, *OF_QUERIES, "lse_pairs"),
        *(*SCRATCH, *ROW_REDUCTION_SCRATCH, *TANGENT_SCRATCH, *SCORE_ARG_SCRATCH),
    )
)

# ---- the arrays of calls, for type checkers --------------------------------------------------------------------------


class ForwardArrays(OptionalArrays, total=False):
    """The arrays of `FlashAttention.forward` besides q, k and v, as keyword arguments."""

    out: Any
    lse: Any
    max: Any
    entropy: Any


class WithDlse(OptionalArrays, total=False):
    """The optional inputs of a backward pass, as keyword arguments."""

    dlse: Any


class OfRowReductions(WithDlse, total=False):
    """The optional inputs of a backward pass, and what it takes of `ROW_REDUCTIONS`, as keyword arguments."""

    dmax: Any
    entropy: Any
    dentropy: Any


class OfThreeGradients(OfRowReductions, total=False):
    """The arrays of a backward pass that gives `DEFAULT_NEED`, as keyword arguments."""

    dq: Any
    dk: Any
    dv: Any


class OfGradients(OfThreeGradients, InputGradients, total=False):
    """The arrays of any backward pass, as keyword arguments."""


class PassArrays(ForwardArrays, OfGradients, total=False):
    """All arrays of the passes without tangents besides q, k and v, as keyword arguments."""

    dout: Any


class OfHessian(WithTangents, WithDlse, total=False):
    """The arrays of `cuflash.hessian_vector_product` that it may be called without, as keyword arguments."""


class JvpArrays(WithTangents, total=False):
    """The arrays of `FlashAttention.jvp` besides q, k and v, as keyword arguments."""

    out: Any
    lse: Any
    tout: Any
    tlse: Any


class OfThreeTangents(OfHessian, total=False):
    """The arrays of a pass that gives `DEFAULT_NEED_TANGENTS`, as keyword arguments."""

    tdout: Any
    tdlse: Any
    tdq: Any
    tdk: Any
    tdv: Any


class BackwardJvpArrays(OfThreeTangents, InputGradientTangents, total=False):
    """The arrays of `FlashAttention.backward_jvp` that it may be called without, as keyword arguments."""


class AllPassArrays(PassArrays, JvpArrays, BackwardJvpArrays, total=False):
    """All arrays of passes with and without tangents besides q, k and v, as keyword arguments."""


class OfWeightReductions(TypedDict, total=False):
    """What methods that reduce the attention weights take besides q, k and optional inputs, as keyword arguments."""

    lse: Any
    weights: Any
    count: int
    dsums: Any


class PlannedArrays(AllPassArrays, OfWeightReductions, total=False):
    """The arrays of `FlashAttention.plan` besides q, k and v, as keyword arguments."""


class PreparedArrays(WithTangents, OfWeightReductions, total=False):
    """The arrays of `FlashAttention.compile` and `tune` besides q, k and v, as keyword arguments."""


class NamedForwardResult(NamedResults, Generic[ArrayT, LseT]):
    """A named tuple of out, lse and the row reductions that were wanted; the others are no attributes of it."""

    __slots__ = ()

    out: ArrayT
    lse: LseT
    max: LseT
    entropy: LseT


class NamedMergeGradients(NamedResults, Generic[ArrayT, LseT]):
    """A named tuple of douts, dlses and the gradients of those row reductions that have some, tuples of arrays."""

    __slots__ = ()

    douts: tuple[ArrayT, ...]
    dlses: tuple[LseT, ...]
    dmaxes: tuple[LseT, ...]
    dentropies: tuple[LseT, ...]
