"""The plan for a pass of a problem on a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from cuflash.arrays.array_info import ITEMSIZE, Operand
from cuflash.arrays.checks import value_error
from cuflash.plan.backward import draft_backward
from cuflash.plan.backward_jvp import draft_backward_jvp
from cuflash.plan.defines import common_defines, has_natural_scores
from cuflash.plan.device import DeviceSpec, why_by_lanes
from cuflash.plan.draft import CAUSAL_HEAD_SECTION, Draft
from cuflash.plan.forward import draft_forward
from cuflash.plan.launch_plan import LaunchPlan, RunTime
from cuflash.plan.reductions import draft_reduction
from cuflash.plan.sm80.tiles import MOST_CHUNKED
from cuflash.plan.tiles import Tile, round_up
from cuflash.spec.binding import assumed, planned_length, read_rows, widest_accesses
from cuflash.spec.inputs import INPUTS, OPTIONAL_INPUTS
from cuflash.spec.outputs import ROW_REDUCTIONS, gradient_of
from cuflash.spec.passes import (
    BACKWARD,
    BACKWARD_JVP,
    COLUMN_MAX,
    COLUMN_SUMS,
    COLUMN_SUMS_BACKWARD,
    FORWARD,
    JVP,
    TOP_KEYS,
    Pass,
)
from cuflash.spec.problem import Problem
from cuflash.spec.reductions import WIDE_COLUMNS

MAX_HEAD_DIM = 1024
FAST_FLOAT64 = (70, 80, 90, 100)  # compute capabilities with half as many FP64 units as FP32 units


def choose_plan(
    problem: Problem,
    device: DeviceSpec,
    pass_: Pass = FORWARD,
    *,
    load_bytes: int | None = None,
    store_bytes: int | None = None,
    operands: Mapping[str, Operand] | None = None,
    tiles: tuple[Tile, ...] | None = None,
    origin: str = "tiles given by the caller",
    need: Collection[str] | None = None,
) -> LaunchPlan:
    """The plan for one pass. Pure: the same arguments give the same plan.

    `load_bytes` and `store_bytes` are the widest aligned accesses that serve all operands. If they are None, they
    follow from the strides, with pointers taken as 16-byte aligned. Arrays that are not in `operands` lie as
    `binding.assumed` says. `need` names the results that the pass is to make, by default `Pass.default`.
    `tiles` overrides the tables: a row of the forward pass, or rows of the backward pass, at most one for each
    `tiles.Role`. `origin` says where they come from.

    Raises NotImplementedError for what no kernel serves, ValueError for arrays that are not aligned to their elements.
    """
    problem, pass_ = _as_planned(problem, pass_)
    need = (*pass_.default, *problem.row_reductions) if need is None else need
    operands = operands or {}
    row_reductions = pass_.row_reductions_of((*need, *operands)) or problem.row_reductions
    problem = replace(problem, row_reductions=row_reductions)
    check_served(problem, device, pass_)
    pass_.check(problem)
    arrays = assumed(problem, pass_, operands)
    widest = _Accesses(*widest_accesses(problem, pass_, arrays, need))
    accesses = _Accesses(load_bytes or widest.load_bytes, store_bytes or widest.store_bytes)
    arrays = _aligned(problem, pass_, arrays, accesses, widest)
    planning = _PLANNING[pass_]
    read_problem = planning.read(problem)
    draft = Draft(
        problem=read_problem,
        device=device,
        pass_=pass_,
        arrays=arrays,
        defines=common_defines(read_problem, device, *accesses, natural=has_natural_scores(problem))
        | _row_reduction_defines(problem, pass_),
        has_sinks=problem.sinks is not None,
        need=tuple(name for name in _results(problem, pass_) if name in need),
        run_time=RunTime(head_section=1 if problem.window_right is None else CAUSAL_HEAD_SECTION),
        origin=origin,
        program=read_problem.hoisted,
    )
    planning.draft(draft, tiles)
    draft.reasons += _remarks(problem, device)
    return LaunchPlan(
        pass_=pass_,
        problem=problem,
        device=device,
        tiles=draft.tiles,
        kernels=tuple(draft.kernels),
        run_time=draft.run_time,
        key_splits=draft.key_splits,
        scratch=tuple(draft.scratch.items()),
        tensor_maps=draft.tensor_maps,
        tables=draft.tables,
        reason="\n".join(draft.reasons),
        need=draft.need,
        models=tuple(draft.models),
        any_length=pass_.any_length and not _has_keys_elsewhere(problem) and not draft.copies.keys() & {"k", "v"},
        hides_last_keys=draft.hides_last_keys,
    )


class _Accesses(NamedTuple):
    """The widest accesses to the arrays that a pass reads, and to those that it writes."""

    load_bytes: int
    store_bytes: int


def _as_planned(problem: Problem, pass_: Pass) -> tuple[Problem, Pass]:
    """The problem and the pass that a call is planned as."""
    if pass_ is COLUMN_SUMS_BACKWARD:  # by values of as many columns as rows of whole 16 bytes have
        problem, pass_ = problem.with_values(round_up(problem.group_size, WIDE_COLUMNS)), BACKWARD
    if pass_.has_tangents and problem.moved is None:
        problem = replace(problem, moved=())
    return problem, pass_


def _aligned(
    problem: Problem, pass_: Pass, arrays: Mapping[str, Operand], accesses: _Accesses, widest: _Accesses
) -> dict[str, Operand]:
    """All arrays of a pass, inputs included, with no more alignment than such accesses need.

    Accesses narrower than the widest ones that strides allow say that addresses are aligned to no more than these.
    """
    if min(accesses) < ITEMSIZE[problem.dtype]:
        raise value_error(
            "q",
            f"arrays at multiples of {min(accesses)} bytes",
            f"all of them at multiples of the {ITEMSIZE[problem.dtype]} bytes of a {problem.dtype}",
        )
    aligned = {**arrays, **{name: getattr(problem, name) for name in INPUTS}}
    for names, width, most in zip((read_rows(pass_, arrays), pass_.written), accesses, widest, strict=True):
        if width < most:
            aligned |= {name: replace(aligned[name], alignment=width) for name in names}
    if problem.bias is not None:
        aligned["bias"] = problem.bias
    return aligned


def _results(problem: Problem, pass_: Pass) -> tuple[str, ...]:
    """The results of a pass that have elements: without values, dv has none."""
    names = pass_.results_in(problem)
    return names if problem.head_dim_v else tuple(name for name in names if gradient_of(name) != "dv")


def _remarks(problem: Problem, device: DeviceSpec) -> list[str]:
    """What a plan says of the problem on the device, whatever kernels it has."""
    remarks = []
    if problem.batch_invariant:
        remarks.append("batch_invariant: tiles of long sequences of many heads, for calls of all sizes")
    if problem.dtype == "float64" and device.arch not in FAST_FLOAT64:
        remarks.append(f"float64 is slow here: compute capability {device.arch / 10:.1f} has few FP64 units")
    if (why_not := why_by_lanes(problem.dtype, device)) is not None:
        remarks.append(why_not)
    return remarks


def _row_reduction_defines(problem: Problem, pass_: Pass) -> dict[str, str | int]:
    """The macro of row reductions, with bits for those that a pass makes, or takes the gradients of."""
    bits = sum(1 << ROW_REDUCTIONS.index(name) for name in problem.row_reductions)
    return {"CUFLASH_ROW_REDUCTIONS": bits << (0 if pass_ is FORWARD else 16)} if bits else {}


def _has_keys_elsewhere(problem: Problem) -> bool:
    """Whether an array other than k, v and a block table has an axis of keys."""
    return any(row.has_keys and getattr(problem, row.name) is not None for row in OPTIONAL_INPUTS)


def _without_softmax_inputs(problem: Problem) -> Problem:
    """The problem as the backward pass reads it: lse includes these, and only their own gradients need them."""
    absent: dict[str, Any] = {row.name: None for row in OPTIONAL_INPUTS if row.gradient_via == "softmax"}
    return replace(problem, **absent)


def _with_planned_length(problem: Problem) -> Problem:
    """The problem with as many keys as its forward pass is planned for: a few more than there are."""
    if _has_keys_elsewhere(problem):
        return problem
    return problem.of_length(planned_length(problem.seqlen_k))


def _unchanged(problem: Problem) -> Problem:
    return problem


class _Planning(NamedTuple):
    """How a pass is planned: what makes the problem as its kernels read it, and what adds these."""

    read: Callable[[Problem], Problem]
    draft: Callable[[Draft, tuple[Tile, ...] | None], None]


_PLANNING = {
    FORWARD: _Planning(_with_planned_length, draft_forward),
    BACKWARD: _Planning(_without_softmax_inputs, draft_backward),
    JVP: _Planning(_unchanged, draft_forward),
    BACKWARD_JVP: _Planning(_without_softmax_inputs, draft_backward_jvp),
    COLUMN_SUMS: _Planning(_without_softmax_inputs, draft_reduction),
    COLUMN_MAX: _Planning(_without_softmax_inputs, draft_reduction),
    TOP_KEYS: _Planning(_without_softmax_inputs, draft_reduction),
}


def check_served(problem: Problem, device: DeviceSpec, pass_: Pass = FORWARD) -> None:
    """Raise NotImplementedError, with the limit and the remedy, for a problem that no kernel serves on `device`."""
    may_be_long = problem.head_dim_v == 0 and not problem.has_float8
    of_lse_alone = pass_ in (FORWARD, BACKWARD) and not problem.row_reductions
    most = MOST_CHUNKED if may_be_long and of_lse_alone else MAX_HEAD_DIM
    if max(problem.head_dim, problem.head_dim_v) > most:
        name, got = ("q", problem.head_dim) if problem.head_dim > most else ("v", problem.head_dim_v)
        longer = f" ({MOST_CHUNKED} for lse and its gradients alone)" if may_be_long and not of_lse_alone else ""
        raise NotImplementedError(
            f"{name}: got head dimension {got}, expected at most {most} on the GPU{longer}; NumPy arrays of "
            "any head dimension are served on the CPU"
        )
    if device.arch < 70:
        raise NotImplementedError(
            f"device: got compute capability {device.arch / 10:.1f}, expected 7.0 or later; NumPy arrays are served on "
            "the CPU"
        )
