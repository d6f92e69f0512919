"""The macros that say what a problem is, and which of them its helper kernels ignore (kernels/common/config.cuh)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from cuflash.arrays.array_info import ITEMSIZE, Operand
from cuflash.plan.argument import bytes_without_functions
from cuflash.plan.device import DeviceSpec
from cuflash.plan.launch_plan import option_names
from cuflash.spec.inputs import CAPS, DEFINES, FP8_SCALES, MASKS, OPTIONAL_INPUTS, PAIR_OPTIONS, OptionalInput
from cuflash.spec.outputs import SCORE_GRADIENTS
from cuflash.spec.problem import Problem

# The largest soft cap that is folded into exponents, and only without sinks. Rows have an lse below 1024 then, so that
# none of them is large in the sense of kernels/common/softmax/backward.cuh.
MOST_FOLDED_SOFTCAP = 512.0
DTYPE_TAGS = {
    **{"float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32", "float64": "Float64"},
    **{"float8_e4m3fn": "Float8E4M3", "float8_e5m2": "Float8E5M2"},
}


def common_defines(
    problem: Problem, device: DeviceSpec, load_bytes: int, store_bytes: int, *, natural: bool
) -> dict[str, str | int]:
    """What all kernels of a pass are compiled with, unless one says otherwise.

    `natural` is `has_natural_scores` of the problem as the caller gives it.
    """
    changes_scores = any(name in CAPS or f"d{name}" in SCORE_GRADIENTS for name in problem.acting)
    changes_scores = changes_scores or problem.score is not None
    indexes_function = problem.mask_function is not None and not problem.is_packed
    inputs = {row.define: _define_of(getattr(problem, row.name), row) for row in OPTIONAL_INPUTS if row.define}
    numbers = {DEFINES[name]: int(getattr(problem, name) is not None) for name in CAPS}
    return {
        **inputs,
        **numbers,
        "CUFLASH_BIAS_OF_ROWS": int(problem.bias is not None and problem.bias.strides[2:] == (1, 0)),
        "CUFLASH_ARCH": device.arch,
        "CUFLASH_DTYPE": DTYPE_TAGS[problem.dtype],
        "CUFLASH_KV_DTYPE": DTYPE_TAGS[problem.k.dtype],
        "CUFLASH_FLOAT8_QUERIES": int(problem.multiplies_float8),
        "CUFLASH_Q_SCALE": int(problem.q_scale is not None),
        "CUFLASH_K_SCALE": _scale_class(problem, "k_scale"),
        "CUFLASH_V_SCALE": _scale_class(problem, "v_scale"),
        "CUFLASH_ROUNDS_TO_TF32": int("tf32" in option_names(problem)),
        "CUFLASH_HEAD_DIM": problem.head_dim,
        "CUFLASH_HEAD_DIM_V": problem.head_dim_v,
        "CUFLASH_LOAD_BYTES": load_bytes,
        "CUFLASH_STORE_BYTES": store_bytes,
        "CUFLASH_STORES_BY_ROWS": 0,
        "CUFLASH_V_IN_K": 0,
        "CUFLASH_HAS_RIGHT_BOUND": int(problem.window_right is not None),
        "CUFLASH_HAS_LEFT_BOUND": int(problem.window_left is not None),
        "CUFLASH_MASK_BLOCK_M": problem.block_size[0],
        "CUFLASH_MASK_BLOCK_N": problem.block_size[1],
        "CUFLASH_HAS_DROPOUT": int(problem.dropout > 0),
        "CUFLASH_PACKED": {"top_left": 1, "bottom_right": 2}[problem.alignment] if problem.is_packed else 0,
        "CUFLASH_SCALE_IN_EXPONENT": int(not changes_scores and problem.scale > 0),
        "CUFLASH_NATURAL_SCORES": int(natural),
        "CUFLASH_LSE_HAS_SINKS": 0,
        "CUFLASH_HAS_SCORE_FUNCTION": int(problem.score is not None),
        "CUFLASH_SCORE_CHANGES_SLOPE": int(problem.score is not None and problem.program.changes_slope),
        "CUFLASH_HAS_MASK_FUNCTION": int(problem.mask_function is not None),
        "CUFLASH_NEEDS_SCORE_ARGS": 0,
        "CUFLASH_PAGE_SIZE": problem.page_size,
        "CUFLASH_FOLLOWS_LENGTHS": int(problem.follows_lengths),
        "CUFLASH_PARAMS_BYTES": bytes_without_functions(problem),
        "CUFLASH_PAIRS": 0,
        "CUFLASH_DYNAMIC_TILES": 0,
        "CUFLASH_BATCH_FIRST": 0,
        "CUFLASH_MASK_OF_KEYS": 0,
        "CUFLASH_MASK_BY_BITS": 0,
        "CUFLASH_HAS_BLOCK_INDEX": int(problem.block_mask is not None or indexes_function),
        "CUFLASH_HAS_TILE_ORDER": 0,
        "CUFLASH_HAS_TILE_CLASSES": 0,
        "CUFLASH_HAS_BIAS_TILE_CLASSES": 0,
        "CUFLASH_CHOSEN_BY_BIAS": 0,
        "CUFLASH_PLAIN_FRAGMENTS": 0,
    }


def has_natural_scores(problem: Problem) -> bool:
    """Whether kernels multiply products, or their tanh, by their factor before the softmax (common/config.cuh)."""
    if problem.has_added_terms or problem.score is not None:
        return True
    if not (caps := problem.given(CAPS)):
        return problem.scale <= 0
    is_folded = caps == ("softcap",) and problem.softcap is not None and problem.softcap <= MOST_FOLDED_SOFTCAP
    return not is_folded or problem.sinks is not None


def _scale_class(problem: Problem, name: Literal["k_scale", "v_scale"]) -> int:
    """How kernels read a scale of keys or values: 0 (there is none), 1 (all keys of a head share it), 2 (others)."""
    operand: Operand | None = getattr(problem, name)
    if operand is None:
        return 0
    of_page, _, of_keys = operand.strides
    return 1 if of_keys == 0 and (problem.block_table is None or of_page == 0) else 2


def _define_of(operand: Operand | None, row: OptionalInput) -> int:
    """What the macro of an optional input is defined as."""
    if operand is None:
        return 0
    return ITEMSIZE[operand.dtype] if row.define.endswith("_BYTES") else 1


# Options that make no difference to most helper kernels, and the macros that tell of them. Those kernels are compiled
# without these options, so that one compilation serves all combinations.
_IGNORED: dict[str, tuple[str, ...]] = {
    **{name: (DEFINES[name],) for name in PAIR_OPTIONS if name in DEFINES},
    "bias": (DEFINES["bias"], "CUFLASH_BIAS_OF_ROWS", "CUFLASH_BIAS_OF_PAIRS", "CUFLASH_BIAS_OF_KEYS"),
    "mask": (DEFINES["mask"], "CUFLASH_MASK_OF_KEYS", "CUFLASH_MASK_BY_BITS"),
    "block_mask": (
        "CUFLASH_MASK_BLOCK_M",
        "CUFLASH_MASK_BLOCK_N",
        "CUFLASH_HAS_BLOCK_INDEX",
        "CUFLASH_HAS_TILE_CLASSES",
    ),
    "dropout": ("CUFLASH_HAS_DROPOUT",),
    "scale": ("CUFLASH_SCALE_IN_EXPONENT", "CUFLASH_NATURAL_SCORES"),
    "q_scale": ("CUFLASH_Q_SCALE", "CUFLASH_FLOAT8_QUERIES"),
    "k_scale": ("CUFLASH_K_SCALE",),
    "v_scale": ("CUFLASH_V_SCALE",),
    "score": ("CUFLASH_HAS_SCORE_FUNCTION", "CUFLASH_SCORE_CHANGES_SLOPE"),
    "mask_function": ("CUFLASH_HAS_MASK_FUNCTION",),
}
# Which of these options a helper kernel needs all the same.
_NEEDED = {
    "block_index.cu": (*MASKS, "mask_function"),
    "tile_order.cu": (),
    "mask_bits.cu": MASKS,
    "scores_reduce.cu": ("bias",),
    "split_combine.cu": ("scale",),
    "sinks.cu": ("scale",),
    "backward_preprocess.cu": tuple(name for name in _IGNORED if name != "dropout" and name not in FP8_SCALES),
    "backward_postprocess.cu": ("dropout",),
    "score_args_gradients.cu": ("score",),
    "hoisted.cu": ("score",),
    "mask_tiles.cu": ("mask", "mask_function"),
}


def ignored_options(source: str, needed: Collection[str] | None = None) -> tuple[str, ...]:
    """The options that a source does not need; `needed` are those that it does, in place of `_NEEDED`."""
    folder, _, file = source.rpartition("/")
    needed = _NEEDED.get(file, ()) if needed is None else needed
    return tuple(name for name in _IGNORED if name not in needed) if folder == "helpers" else ()


def defines_without(options: Collection[str]) -> dict[str, int]:
    """The macros of a kernel that is compiled without some options."""
    return dict.fromkeys((define for option in options for define in _IGNORED[option]), 0)
