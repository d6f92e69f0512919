"""The fields of the kernels' only argument, as `Params` in kernels/common/io/params.cuh declares them, and its size."""

from __future__ import annotations

import struct
from dataclasses import fields

from cuflash.plan.launch_plan import RunTime
from cuflash.plan.tiles import round_up
from cuflash.spec.inputs import FP8_SCALES, NUMBERS, OPTIONAL_INPUTS
from cuflash.spec.outputs import BY_NAME as OUTPUT_ROWS
from cuflash.spec.outputs import (
    NUMBER_GRADIENTS,
    OVER_HEAD_DIM,
    OVER_ROWS,
    ROW_REDUCTION_SCRATCH,
    ROW_REDUCTIONS_AND_GRADIENTS,
    SCRATCH,
    TANGENT_SCRATCH,
)
from cuflash.spec.problem import Problem

# Arrays in the order of the struct, with the number of strides that follow each pointer.
ARRAYS = (
    *((name, 3) for name in (*OVER_HEAD_DIM, *OVER_ROWS) if name not in ROW_REDUCTIONS_AND_GRADIENTS),
    *((row.name, row.strides) for row in OPTIONAL_INPUTS),
    *((row.gradient, OUTPUT_ROWS[row.gradient].strides) for row in OPTIONAL_INPUTS if row.gradient_via),
    *((name, OUTPUT_ROWS[name].strides) for name in NUMBER_GRADIENTS),
    *((name, 0) for name in SCRATCH),
)
OF_LENGTH = ("seqlen_k", "diagonal", "right_offset", "left_offset")  # integers that follow the number of keys
RUN_TIME = tuple(field.name for field in fields(RunTime))
# Fields that are at the end of the struct, and their types: elsewhere kernels would read them in groups of 16 bytes,
# which takes more registers.
AT_END = {"bias_blocks": "Q", "mask_batches": "i", "mask_heads": "i", "row_sums": "Q"}


def _fields() -> tuple[tuple[str, str, int], ...]:
    """All fields in their order: name, type as the module `struct` spells it, and how many of that type."""
    layout: list[tuple[str, str, int]] = []
    for name, num_strides in ARRAYS:
        layout += [(name, "Q", 1), (f"{name}_strides", "q", num_strides)]
    return (
        *(field for field in layout if field[2] and field[0] not in AT_END),
        ("call", "Q", 1),
        *(
            (name, "i", 1)
            for name in ("batch", "num_heads", "num_heads_kv", "seqlen_q", *OF_LENGTH, *RUN_TIME)
            if name not in AT_END
        ),
        *((name, "f", 1) for name in NUMBERS),
        *((name, "I", 1) for name in ("seed_low", "seed_high", "offset", "dropout_threshold")),
        *((name, "I", 1) for name in ("dropout_rows", "dropout_columns", "dropout_head", "dropout_heads")),
        ("kept_scale", "f", 1),
        *((name, "i", 1) for name in ("num_pages", *(f"{name}_shift" for name in FP8_SCALES))),
        *((f"{name}_float64", "d", 1) for name in (*NUMBERS, "kept_scale")),
        *((name, format_, 1) for name, format_ in AT_END.items()),
    )


# The arrays of `CUFLASH_ROW_REDUCTIONS`, which follow in passes with row reductions, and their strides.
ROW_REDUCTION_ARRAYS = (
    *((name, 3) for name in ROW_REDUCTIONS_AND_GRADIENTS),
    *((name, 0) for name in ROW_REDUCTION_SCRATCH),
)
ROW_REDUCTION_BYTES = sum(8 + 8 * num_strides for _, num_strides in ROW_REDUCTION_ARRAYS)
# The arrays of `CUFLASH_TANGENTS`, which follow in passes with tangents, and their strides.
TANGENT_ARRAYS = (
    *((name, 3) for name in ("tq", "tk", "tv", "tout", "tdout", "tlse", "tdlse")),
    *((f"t{row.name}", row.strides) for row in OPTIONAL_INPUTS if row.gradient_via),
    *((f"t{name}", 0) for name in NUMBERS),
    *((name, 0) for name in TANGENT_SCRATCH),
)
TANGENT_BYTES = sum(8 + 8 * num_strides for _, num_strides in TANGENT_ARRAYS)

FIELDS = _fields()
# C ends a struct at a multiple of its widest field, which is what "0Q" does here.
PARAMS_BYTES = struct.calcsize("@" + "".join(f"{count}{format_}" for _, format_, count in FIELDS) + "0Q")
SCORE_ARG_BYTES = 80  # of each array that functions read, and as many of its gradient


def bytes_without_functions(problem: Problem) -> int:
    """Bytes of the argument without score_mod and mask_mod, with the arrays of row reductions and of tangents."""
    of_tangents = TANGENT_BYTES if problem.moved is not None else 0
    return PARAMS_BYTES + (ROW_REDUCTION_BYTES if problem.row_reductions else 0) + of_tangents


def params_bytes(problem: Problem) -> int:
    """Bytes of the struct.

    With score_mod and mask_mod, it ends with the arrays that these read (tables among them), the gradients of these
    arrays, and two scratch arrays.
    """
    without_functions = bytes_without_functions(problem)
    if not problem.has_functions:
        return without_functions
    return without_functions + 2 * SCORE_ARG_BYTES * max(len(problem.hoisted.arrays), 1) + 16


def maps_offset(problem: Problem) -> int:
    """The offset of the tensor maps, which follow the struct."""
    return round_up(params_bytes(problem), 64)
