"""The kernels' only argument, filled in; `cuflash.plan.argument` has its fields.

This needs NumPy only, so that the argument can be filled for any backend that runs the kernels.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cuflash.arrays.array_info import Operand
from cuflash.plan import LaunchPlan
from cuflash.plan.argument import (
    ARRAYS,
    FIELDS,
    OF_LENGTH,
    PARAMS_BYTES,
    ROW_REDUCTION_ARRAYS,
    ROW_REDUCTION_BYTES,
    RUN_TIME,
    SCORE_ARG_BYTES,
    TANGENT_ARRAYS,
    TANGENT_BYTES,
    maps_offset,
)
from cuflash.plan.tensor_map import BYTES as TENSOR_MAP_BYTES
from cuflash.spec.inputs import FP8_SCALES, NAMES, NUMBERS
from cuflash.spec.outputs import GRADIENTS, SCORE_ARG_SCRATCH
from cuflash.spec.problem import Problem

# The layout is that of a struct of these fields in C.
PARAMS = np.dtype(
    [(name, format_, (count,)) if "strides" in name else (name, format_) for name, format_, count in FIELDS], align=True
)


def _dtype_of(arrays: Sequence[tuple[str, int]]) -> np.dtype:
    """Arrays, each a pointer and so many strides."""
    return np.dtype(
        [
            field
            for name, num_strides in arrays
            for field in ((name, np.uint64), (f"{name}_strides", np.int64, (num_strides,)))
        ]
    )


# These follow `PARAMS` in passes with row reductions, and with tangents.
ROW_REDUCTIONS, TANGENTS = _dtype_of(ROW_REDUCTION_ARRAYS), _dtype_of(TANGENT_ARRAYS)
# One of these follows for each array that score_mod and mask_mod read, and for its gradient.
SCORE_ARG = np.dtype([("data", np.uint64), ("stride", np.int64, 4), ("size", np.int64, 4), ("first", np.int64)])
if SCORE_ARG.itemsize != SCORE_ARG_BYTES:
    raise ValueError(f"SCORE_ARG: got {SCORE_ARG.itemsize} bytes, expected {SCORE_ARG_BYTES}")

# Which 64-bit word of the struct holds the pointer of an array.
POINTER_WORD = {name: PARAMS.fields[name][1] // 8 for name, _ in ARRAYS}  # type: ignore[index]
# Fields that have another array in some passes: reductions of the weights are where gradients of keys are otherwise,
# and tangents of gradients where the gradients are.
_WEIGHT_REDUCTIONS = {"column_sums": "dv", "column_max": "dv", "key_indices": "dk", "key_weights": "dv"}
_TANGENTS = {f"t{name}": name for name in GRADIENTS}
_FIELD_OF = _TANGENTS | _WEIGHT_REDUCTIONS
# Which 64-bit word of a `Frame` holds the number of the call; its first word holds the address of the argument.
_CALL = 1 + PARAMS.fields["call"][1] // 8  # type: ignore[index]
# Where the numbers lie that depend on the number of keys, four 32-bit words in a row: `length_numbers`.
_LENGTH = PARAMS.fields["seqlen_k"][1]  # type: ignore[index]
_PACK_LENGTH = struct.Struct("=4i").pack_into
# Where the seed lies, as two 32-bit words that form one of 64 bits. The offset lies after it.
_RANDOM = PARAMS.fields["seed_low"][1]  # type: ignore[index]


def parameters(
    plan: LaunchPlan, operands: Mapping[str, Operand], seed: int = 0, offset: int = 0, call: int = 0
) -> np.ndarray:
    """The argument for the kernels of `plan` as an array of one `PARAMS`, pointers left 0; `SCORE_ARG` may follow.

    `operands` gives the strides of everything that is not in the problem: out and lse, and for the backward pass dout,
    its results other than numbers, and dlse if there is one. `seed` and `offset` are those of dropout, `call` is the
    number of the call.
    """
    problem = plan.problem
    inputs = {name: getattr(problem, name) for name in ("q", "k", "v", *NAMES)}
    params = np.zeros(1, PARAMS)
    for name, operand in {**inputs, **operands}.items():
        field = f"{_FIELD_OF.get(name, name)}_strides"
        if operand is not None and field in PARAMS.fields:  # type: ignore[operator]
            strides = params[field][0]
            # Kernels get no stride of the last axis of q, k and so on, which is contiguous.
            strides[:] = (operand.strides + (0,) * len(strides))[: len(strides)]
    for name in ("batch", "num_heads", "num_heads_kv", "seqlen_q"):
        params[name] = getattr(problem, name)
    for name, number in zip(OF_LENGTH, length_numbers(problem), strict=True):
        params[name] = number
    for name in problem.given(NUMBERS):
        params[name] = params[f"{name}_float64"] = getattr(problem, name)
    params["seed_low"], params["seed_high"], params["offset"] = seed & 0xFFFFFFFF, seed >> 32, offset
    params["call"] = call
    params["dropout_threshold"] = round(65536 * problem.dropout)
    origin = problem.origin
    params["dropout_rows"], params["dropout_columns"] = origin.query // 2, origin.key // 4
    params["dropout_head"], params["dropout_heads"] = origin.head, origin.num_heads
    params["kept_scale"] = params["kept_scale_float64"] = problem.kept_scale
    for name in RUN_TIME:
        params[name] = getattr(plan.run_time, name)
    params["num_pages"] = problem.k.shape[0] if problem.block_table is not None else 0
    for name in FP8_SCALES:
        params[f"{name}_shift"] = max(problem.scale_block(name).bit_length() - 1, 0)
    if problem.row_reductions:
        params = _with_arrays(params, ROW_REDUCTION_ARRAYS, ROW_REDUCTIONS, operands)
    if problem.moved is not None:
        params = _with_arrays(params, TANGENT_ARRAYS, TANGENTS, operands)
    return _with_score_args(params, plan, operands) if problem.has_functions else params


def _with_arrays(
    params: np.ndarray, arrays: Sequence[tuple[str, int]], dtype: np.dtype, operands: Mapping[str, Operand]
) -> np.ndarray:
    """The argument with the strides of more arrays."""
    more = np.zeros(1, dtype)
    for name, num_strides in arrays:
        if num_strides and (operand := operands.get(name)) is not None:
            more[f"{name}_strides"][0][:] = (operand.strides + (0,) * num_strides)[:num_strides]
    return np.frombuffer(params.tobytes() + more.tobytes(), np.uint64).copy()


def _with_score_args(params: np.ndarray, plan: LaunchPlan, operands: Mapping[str, Operand]) -> np.ndarray:
    """The argument, with the arrays that score_mod and mask_mod read, and their gradients. Missing axes have length 1.

    Tables that kernels fill follow the arrays; their entries are zeros if the plan has none.
    """
    problem = plan.problem
    count = max(len(problem.hoisted.arrays), 1)
    score_args = np.zeros(2 * count, SCORE_ARG)
    for n, filled in enumerate(plan.tables, len(problem.score_args)):
        score_args[n]["stride"][:3], score_args[n]["size"] = filled.strides, (*filled.shape, 1)
        score_args[n]["first"] = filled.first

    def describe(n: int, operand: Operand) -> None:
        score_args[n]["size"] = 1
        score_args[n]["stride"][: len(operand.strides)] = operand.strides
        score_args[n]["size"][: len(operand.shape)] = operand.shape

    for n, (name, operand) in enumerate(problem.score_args):
        gradient = f"d{name}" if problem.moved is None else f"td{name}"
        describe(n, operand)
        describe(count + n, operands.get(gradient, operand))
    for n, name in enumerate(problem.moved_score_args, len(problem.score_args)):
        describe(n, operands[f"t{name}"])
    pointer = bytes(8)
    return np.frombuffer(params.tobytes() + pointer + score_args.tobytes() + pointer, np.uint64).copy()


def pointer_words(problem: Problem) -> dict[str, int]:
    """Which 64-bit word of the argument holds the pointer of an array."""
    words, end = POINTER_WORD | {name: POINTER_WORD[field] for name, field in _WEIGHT_REDUCTIONS.items()}, PARAMS_BYTES
    if problem.row_reductions:
        words = words | {name: end // 8 + ROW_REDUCTIONS.fields[name][1] // 8 for name, _ in ROW_REDUCTION_ARRAYS}  # type: ignore[index]
        end += ROW_REDUCTION_BYTES
    if problem.moved is not None:
        words = words | {name: words[field] for name, field in _TANGENTS.items()}
        words |= {name: end // 8 + TANGENTS.fields[name][1] // 8 for name, _ in TANGENT_ARRAYS}  # type: ignore[index]
        end += TANGENT_BYTES
    if not problem.has_functions:
        return words
    arrays = problem.hoisted.arrays
    count, first, step = max(len(arrays), 1), 1 + end // 8, SCORE_ARG_BYTES // 8
    words = dict(words)
    for n, (name, _, _) in enumerate(arrays):
        words |= {name: first + n * step}
        words |= dict.fromkeys((f"d{name}", f"td{name}"), first + (count + n) * step)
    return words | dict(zip(SCORE_ARG_SCRATCH, (first - 1, first + 2 * count * step), strict=True))


def length_numbers(problem: Problem) -> tuple[int, int, int, int]:
    """The parameters `OF_LENGTH` of a problem; bounds that do not exist are 0."""
    diagonal, left, right = problem.diagonal, problem.window_left, problem.window_right
    return (
        problem.seqlen_k,
        diagonal,
        0 if right is None else diagonal + right,
        0 if left is None else diagonal - left,
    )


# For each tensor map of a launch: a function of address and number of rows, the index of the address among those of the
# call, and the rows, 0 where they are as many as the call has keys.
Maps = tuple[tuple[Callable[[int, int], bytes], int, int], ...]

MOST_FRAMES = 2048  # that are kept for later calls, of 2.5 KB each


class Frame:
    """The argument of one call in memory, after a word with its address: a launch wants the address of that word."""

    __slots__ = ("address", "bytes", "key", "mapped_keys", "random", "seqlen_k", "words")

    def __init__(self, content: bytes, key: tuple[int, ...], seqlen_k: int) -> None:
        memory = ctypes.create_string_buffer(bytes(8) + content, 8 + len(content))
        self.address = ctypes.addressof(memory)
        self.bytes = memoryview(memory).cast("B")
        self.words = self.bytes.cast("Q")
        self.words[0] = self.address + 8
        self.key = key  # the number of its `Argument`, inverted if nothing checks addresses, and those that it holds
        self.mapped_keys = -1  # the number of keys of its tensor maps; -1 until they are there
        self.random = (0, 0)
        self.seqlen_k = seqlen_k


# Frames that no call uses, the one used last at the end. A call takes its frame out, so that no other thread has it. It
# puts the frame back once its kernels are launched.
kept_frames: dict[tuple[int, ...], Frame] = {}
_numbers = itertools.count()  # of arguments


class Argument:
    """The common part of the arguments of all calls of one problem, and frames, each of which holds one argument.

    `names` are the arrays of a call, scratch arrays among them. A call takes the frame of its addresses from
    `kept_frames`, or makes one. Layers of a model have addresses of their own, which recur with each step: then a call
    writes only what else changes.
    """

    def __init__(
        self, plan: LaunchPlan, operands: Mapping[str, Operand], names: Sequence[str], maps: Maps = ()
    ) -> None:
        self._content = parameters(plan, operands).tobytes()
        self._maps, self._maps_start = maps, 8 + maps_offset(plan.problem)
        if plan.tensor_maps:
            length = maps_offset(plan.problem) + TENSOR_MAP_BYTES * len(plan.tensor_maps)
            self._content = self._content.ljust(length, b"\0")
        words = pointer_words(plan.problem)
        self._words = tuple(1 + words[name] for name in names)
        self._seqlen_k, self._numbers = plan.problem.seqlen_k, length_numbers(plan.problem)
        longer = length_numbers(plan.problem.of_length(self._seqlen_k + 1))
        self._step = tuple(b - a for a, b in zip(self._numbers, longer, strict=True))
        self.number = next(_numbers)

    def frame(self, key: tuple[int, ...]) -> Frame:
        """A new frame. Its key is the `number`, or this inverted, and addresses in the order of `names`.

        If there are too many, only the half that was used last is kept.
        """
        if len(kept_frames) >= MOST_FRAMES:
            for old in list(kept_frames)[: MOST_FRAMES // 2]:
                kept_frames.pop(old, None)
        frame = Frame(self._content, key, self._seqlen_k)
        for word, pointer in zip(self._words, key[1:], strict=True):
            frame.words[word] = pointer
        return frame

    def fill(self, frame: Frame, mapped_keys: int, random: tuple[int, int], seqlen_k: int, call: int) -> None:
        """Write what a call differs in from the one before on the same addresses.

        Tensor maps reach over so many `mapped_keys`. `random` are the seed and the offset of dropout. `seqlen_k` may
        differ from that of the plan's problem, if the plan serves it. `call` is the number of the call.
        """
        frame.words[_CALL] = call
        if frame.seqlen_k != seqlen_k:
            more, (a, b, c, d), (of_a, of_b, of_c, of_d) = seqlen_k - self._seqlen_k, self._numbers, self._step
            numbers = a + more * of_a, b + more * of_b, c + more * of_c, d + more * of_d
            _PACK_LENGTH(frame.bytes, 8 + _LENGTH, *numbers)
            frame.seqlen_k = seqlen_k
        if frame.random != random:
            struct.pack_into("=QI", frame.bytes, 8 + _RANDOM, *random)
            frame.random = random
        if frame.mapped_keys != mapped_keys:
            start, (_, *pointers) = self._maps_start, frame.key
            maps = [map_of(pointers[index], rows or mapped_keys) for map_of, index, rows in self._maps]
            frame.bytes[start : start + TENSOR_MAP_BYTES * len(maps)] = b"".join(maps)
            frame.mapped_keys = mapped_keys
