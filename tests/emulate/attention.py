"""Both passes by the kernels in the emulator, and what tests of several kernels share."""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cuflash.emulator import Schedule, guarded
from cuflash.emulator.passes import Allocate, backward, forward, jvp, plan_for, run
from cuflash.plan import DeviceSpec, LaunchPlan, choose_plan
from cuflash.plan.tiles import Tile
from cuflash.spec.batch_axes import BatchCalls, axes_of, is_plain
from cuflash.spec.inputs import NAMES
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED, SOFTMAX_GRADIENTS, TAKEN_BY_BACKWARD
from cuflash.spec.passes import BACKWARD
from cuflash.spec.problem import Problem, make_problem
from cuflash.testing import Case, measure, optional, qkv, reference, yardsticks
from tests.large_scores import Backend

__all__ = [
    "Allocate",
    "assert_tf32_split",
    "backward",
    "by_calls",
    "far_apart",
    "forward",
    "forward_by_oracle",
    "gradients_of",
    "guarded",
    "inputs_of",
    "packed_sizes",
    "plan_for",
    "problem_of",
    "run",
    "with_true_as",
]

FAR = 2**28  # elements: 16 rows this far apart, and offsets cut to 32 bits land somewhere else


def far_apart(array: np.ndarray) -> np.ndarray:
    """A copy whose rows, heads and batch entries lie so far apart that offsets take more than 32 bits.

    The last axis of 4-D arrays of up to 16 columns, which are operands, stays contiguous.
    """
    neighbours = 1 if array.ndim == 4 and array.shape[-1] <= 16 else 0
    far = array.ndim - neighbours
    strides = [array.itemsize] * array.ndim
    for axis in reversed(range(far)):
        inner = strides[axis + 1] * array.shape[axis + 1] if axis + 1 < far else 0
        strides[axis] = max(FAR * array.itemsize, inner)
    extent = sum((n - 1) * stride for n, stride in zip(array.shape, strides, strict=True)) + array.itemsize
    no_reserve = 0x4000  # MAP_NORESERVE: only the pages that are touched take memory
    storage = mmap.mmap(-1, max(extent, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    copy = np.ndarray(array.shape, array.dtype, storage, 0, strides)
    copy[...] = array
    return copy


def with_true_as(byte: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, with masks that have this byte where they are True: views of other bytes have any but 0."""
    seen = {name: (arrays[name] * np.uint8(byte)).view(bool) for name in ("mask", "block_mask") if name in arrays}
    return {**arrays, **seen}


def packed_sizes(of_queries: Sequence[int], of_keys: Sequence[int], rest: int = 0) -> dict[str, Any]:
    """Of a case: packed sequences of such lengths, and so many rows after the last one."""
    return {
        f"{name}_{x}": value
        for x, lengths in (("q", of_queries), ("k", of_keys))
        for name, value in (("seqlen", sum(lengths) + rest), ("cu_seqlens", tuple(np.cumsum([0, *lengths]).tolist())))
    }


def problem_of(case: Case, arrays: Mapping[str, Any], **options: Any) -> Problem:
    """The problem of the arrays as they lie, with such static options."""
    return make_problem(replace(case.options, **options), *qkv(arrays), **optional(arrays))


def inputs_of(case: Case, **options: Any) -> tuple[Problem, dict[str, Any]]:
    """The problem of a case, and its arrays."""
    arrays = case.arrays()
    return problem_of(case, arrays, **options), arrays


def by_calls(
    case: Case,
    arrays: Mapping[str, Any],
    pass_: str,
    *,
    arch: str | DeviceSpec,
    need: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """The results of one pass of a case with axes of its own by name: of the calls that a CuPy call would be made of.

    The gradients are those of `need`, or those that `backward` gives without it.
    """
    static = replace(case.options, **options)
    names: tuple[str, ...] = ("out", "lse")
    if is_plain(arrays):
        make_problem(static, *qkv(arrays), **optional(arrays))  # it refuses what goes with no batch axes
    given = dict.fromkeys((*NAMES, "dlse", "out", "lse")) | dict(arrays)
    if pass_ == "backward":
        spread = case.spread
        assert spread is not None
        of_spread = spread.arrays
        out, lse = forward_by_oracle(problem_of(case, of_spread), of_spread, **case.random)
        given |= {"out": spread.fold("out", out), "lse": spread.fold("lse", lse)}
        names = tuple(need) or (*DEFAULT_NEED, *(name for name in SOFTMAX_GRADIENTS if name[1:] in arrays))
    axes = axes_of(static, given, names)

    def call(own: Options, given: dict[str, Any]) -> tuple[np.ndarray, ...]:
        present = {name: x for name, x in given.items() if x is not None and name not in names}
        problem = make_problem(own, *qkv(present), **optional(present))
        found: tuple[np.ndarray, ...]
        if pass_ == "forward":
            found = forward(problem, present, arch=arch, **case.random)
        else:
            out, lse = present.pop("out"), present.pop("lse")
            found = backward(problem, present, out, lse, need=names, arch=arch, **case.random)
        for name, x in zip(names, found, strict=True):
            if given.get(name) is not None:
                given[name][...] = x
        return found

    calls = axes and BatchCalls(axes, static, given, names, np, gives_partials=True)
    return dict(zip(names, calls.run(call) if calls else call(static, given), strict=True))


def forward_by_oracle(problem: Problem, arrays: Mapping[str, Any], **random: Any) -> tuple[np.ndarray, np.ndarray]:
    """out and lse as a forward pass without error would round them."""
    out, lse = reference.forward(problem, *qkv(arrays), **optional(arrays) | random)
    with np.errstate(over="ignore"):
        return out.astype(arrays["q"].dtype), lse.astype(problem.softmax_dtype)


def gradients_of(
    case: Case,
    tile: Tile,
    num_sms: int,
    schedule: Schedule,
    deterministic: bool = False,
    need: Sequence[str] = DEFAULT_NEED,
) -> tuple[LaunchPlan, dict[str, Any]]:
    """Both passes of a case on compute capability 9.0: the plan of the backward pass, and its results by name."""
    problem, arrays = inputs_of(case, deterministic=deterministic)
    device = replace(DeviceSpec.for_arch("9.0"), num_sms=num_sms)
    out, lse = forward(problem, arrays, arch=device)
    gradients = backward(problem, arrays, out, lse, arch=device, schedule=schedule, tiles=(tile,), need=need)
    plan = choose_plan(problem, device, BACKWARD, tiles=(tile,), need=need)
    return plan, dict(zip(need, gradients, strict=True))


def assert_tf32_split(problem: Problem, arrays: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Hold results of float32 as two bf16 terms against the oracle: 16 bits of the 24 that the tolerance is for."""
    expected = yardsticks(problem, arrays)
    for name, x in results.items():
        measurement = measure(name, x, expected[name].looser(2.0 ** (24 - 16)))
        assert not measurement.failure, str(measurement)


def on_kernels(arch: str | DeviceSpec, kernels: Path | None = None) -> Backend:
    """Both passes by the kernels for a device, or by those of a folder."""

    def backend(
        options: Options, arrays: dict[str, Any], need: tuple[str, ...], **how: Any
    ) -> tuple[Any, Any, Mapping[str, Any]]:
        others = {name: x for name, x in arrays.items() if name not in ("q", "k", "v", *TAKEN_BY_BACKWARD)}
        score_args = {name: others.pop(name) for name in others.keys() - {*NAMES}}
        problem = make_problem(options, *qkv(arrays), score_args=score_args, **others)
        how |= {"arch": arch, "kernels": kernels}
        out, lse = forward(problem, arrays, **how)
        gradients = backward(problem, arrays, out, lse, need=need, **how) if need else ()
        return out, lse, dict(zip(need, gradients, strict=True))

    return backend


def jvp_on_kernels(arch: str | DeviceSpec, options: Options, arrays: dict[str, Any]) -> dict[str, Any]:
    """out, lse and their tangents by the kernels for a device, of arrays and tangents by name."""
    optional = {name: x for name, x in arrays.items() if name in NAMES}
    problem = make_problem(options, arrays["q"], arrays["k"], arrays["v"], **optional)
    return dict(zip(("out", "lse", "tout", "tlse"), jvp(problem, arrays, arch=arch), strict=True))
