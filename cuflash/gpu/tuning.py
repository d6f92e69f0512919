"""Which tiles are fastest for a problem on this device: what is tried, how it is judged, and what is remembered of it.

The rows of the tables were measured on few devices and problems. `candidates` has the plans that might be faster for a
problem: the rows next to the one that the table gives, and rows that differ from it in one number. `tune` throws out
those that do not compile or that spill, compares the results of every other one with those of the table's row, and
times it. The fastest is remembered in a file of its own next to the compiled kernels, and `tuned_plan` finds it there.

Every candidate computes the same sums of the same products, in tiles of other sizes and so in another order: results
differ by rounding from those of the table's row, no more than these do from the exact ones.

The caller gives a `Runner`, which runs and times plans, so that nothing here needs a device.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args, get_origin, get_type_hints

from cuflash.arrays.checks import LONGEST_VALUE
from cuflash.gpu.compiler import CompileError, compile_spec, kernels_fingerprint
from cuflash.gpu.kernel_cache import cache_directory, make_own_directory, read_own, write_atomically
from cuflash.plan import DeviceSpec, LaunchPlan, choose_plan
from cuflash.plan.architectures import FAMILIES
from cuflash.plan.backward import SOFTMAX_KERNELS
from cuflash.plan.tiles import Tile, serves_dims, why_too_large
from cuflash.spec.binding import Layout
from cuflash.spec.passes import FORWARD, PREPARED_NAMES, Pass
from cuflash.spec.problem import Problem

if TYPE_CHECKING:
    from typing_extensions import Unpack

MOST_IN_TILE = 2**16  # of rows, keys, warps and whatever else a tile counts
MARGIN = 0.01  # a candidate has to be faster than the table's row by more than this: less is noise

# ---- What is tried ---------------------------------------------------------------------------------------------------

_NEAR = 32  # keys: only values of block_n that are so near to the row's are tried, and half and twice the row's


def candidates(
    problem: Problem, device: DeviceSpec, pass_: Pass = FORWARD, **arrays: Unpack[Layout]
) -> tuple[LaunchPlan, ...]:
    """Plans to try for one pass, that of the tables first; `arrays` are the keyword arguments of `choose_plan`.

    Those that do not fit into shared memory are not among them.
    """
    plan = choose_plan(problem, device, pass_, **arrays)
    by_kernels = {plan.kernels: plan}
    for tiles in _alternatives(plan):
        if _why_not(tiles, plan) is not None:
            continue
        try:
            candidate = choose_plan(problem, device, pass_, tiles=tiles, origin="a candidate", **arrays)
        except NotImplementedError:
            continue
        # Rows may have grown as they were configured for a bias, a mask or a score.
        if all(why_too_large(tile, problem, device) is None for tile in candidate.tiles):
            by_kernels.setdefault(candidate.kernels, candidate)
    return tuple(by_kernels.values())


def _alternatives(plan: LaunchPlan) -> Iterator[tuple[Tile, ...]]:
    """The plan's tiles with one replaced, by another row or by a variation; a plan with two tiles keeps the other."""
    # In a deterministic backward pass, other kernels have a row for dq, too.
    any_type = not (plan.pass_.adds_to_memory and plan.problem.deterministic)
    for index, tile in enumerate(plan.tiles):
        for other in (*FAMILIES[type(tile)].alternatives(plan.problem), *_variations(tile)):
            if any_type or type(other) is type(tile):
                yield (*plan.tiles[:index], other, *plan.tiles[index + 1 :])


def _variations(tile: Tile) -> Iterator[Tile]:
    """The row with one number changed."""
    for name, values in tile.variations.items():
        current = getattr(tile, name)
        for value in values:
            is_near = value in (current // 2, 2 * current) or abs(value - current) <= _NEAR
            if value == current or (name == "block_n" and not is_near):
                continue
            try:
                yield tile.changed(**{name: value}, origin=f"{name} {current} changed to {value}")
            except ValueError:  # the row refuses this value
                continue


def _why_not(tiles: Sequence[Tile], plan: LaunchPlan) -> str | None:
    """Why these tiles cannot stand for those of a plan of the tables; None where they can."""
    if len(tiles) != len(plan.tiles):
        return f"{len(tiles)} tiles for a plan of {len(plan.tiles)}"
    for tile, of_table in zip(tiles, plan.tiles, strict=True):
        tile_types = {type(row) for row in FAMILIES[type(of_table)].alternatives(plan.problem)}
        if type(tile) not in tile_types or getattr(tile, "bf16_terms", None) != getattr(of_table, "bf16_terms", None):
            return f"{tile.label} computes other products than {of_table.label}"
        if not serves_dims(tile, plan.problem):
            return f"{tile.label} is not for these head dimensions"
        if tile.serves_nothing_else and (why_not := tile.why_not(plan.problem, plan.device)) is not None:
            return f"{tile.label} is {why_not}"
        if (excess := why_too_large(tile, plan.problem, plan.device)) is not None:
            return excess
    return None


# ---- How it is judged ------------------------------------------------------------------------------------------------


class Runner(Protocol):
    """It runs plans: on a device, or on whatever stands for one in a test."""

    def why_wrong(self, plan: LaunchPlan) -> str | None:
        """Run the plan and say how its results differ from those of the first plan that was run; None if they agree."""

    def seconds(self, plan: LaunchPlan) -> float:
        """How long a run of the plan takes."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One candidate, and what became of it."""

    plan: LaunchPlan
    seconds: float = math.inf
    why_not: str | None = None  # why it was not timed

    @property
    def tflops(self) -> float:
        """How fast the products over visible pairs were made, in 1e12 floating-point operations a second."""
        return self.plan.pass_.flops(self.plan.problem) / self.seconds / 1e12

    @property
    def label(self) -> str:
        """Its tiles in words."""
        return "; ".join(_spelled(tile) for tile in self.plan.tiles)


# Fields that every label has, and fields that are the same to a kernel.
_IN_LABEL = ("block_m", "block_n", "num_warps", "num_stages", "min_blocks")
_NOT_COMPILED = ("element_bytes", "max_dim", "serves", "origin")


def _spelled(tile: Tile) -> str:
    """The tile in words, with the fields that only its type has."""
    more = {name: x for name, x in _values(tile).items() if name not in _IN_LABEL + _NOT_COMPILED}
    return ", ".join([tile.label, *(f"{name} {x}" for name, x in more.items())])


@dataclass(frozen=True, kw_only=True)
class PassTuning:
    """What tuning of one pass found: the table's row first among `trials`."""

    trials: tuple[Trial, ...]
    winner: Trial
    remembered: str  # the file, or why there is none

    @property
    def gain(self) -> float:
        """How much faster the winner is than the table's row, as a fraction of the winner's time: 0.1 is 10 %."""
        return self.trials[0].seconds / self.winner.seconds - 1

    def describe(self) -> str:
        """A table of the candidates, the fastest first, the winner and the gain."""
        plan = self.trials[0].plan
        lines = [f"{plan.pass_} pass on {plan.device.name}: {len(self.trials)} candidates"]
        for trial in sorted(self.trials, key=lambda trial: trial.seconds):
            mark = "*" if trial is self.winner else " "
            summary = f"{trial.tflops:8.1f} TFLOP/s {1e3 * trial.seconds:10.4f} ms"
            row = " (the table's row)" if trial is self.trials[0] else ""
            lines.append(f"{mark} {trial.why_not or summary}  {trial.label}{row}")
        if self.winner is self.trials[0]:
            lines.append(f"the table's row stays: nothing is more than {MARGIN:.0%} faster")
        else:
            lines.append(f"winner: {self.winner.label}, {self.gain:.1%} faster than the table's row")
        return "\n".join([*lines, self.remembered])


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What `FlashAttention.tune` found, by pass; None for a pass that was not asked for."""

    forward: PassTuning | None = None
    backward: PassTuning | None = None
    jvp: PassTuning | None = None
    backward_jvp: PassTuning | None = None
    column_sums: PassTuning | None = None
    column_max: PassTuning | None = None
    top_keys: PassTuning | None = None
    column_sums_backward: Tuning | None = None  # a backward pass, and a forward pass for dlse and dweights

    def describe(self) -> str:
        """All passes in words."""
        of_passes: list[PassTuning | Tuning | None] = [getattr(self, name) for name in PREPARED_NAMES]
        return "\n\n".join(tuned.describe() for tuned in of_passes if tuned is not None)

    def joined(self, other: Tuning) -> Tuning:
        """What both found."""
        return replace(self, **{name: x for name in PREPARED_NAMES if (x := getattr(other, name)) is not None})


def tune(
    plans: Sequence[LaunchPlan],
    runner: Runner,
    *,
    spills: Callable[[LaunchPlan], int] | None = None,
    advance: Callable[[], None] = lambda: None,
    remember: bool = True,
) -> PassTuning:
    """Compile, check and time the plans of `candidates`, that of the tables first, and remember the fastest.

    That first plan is not thrown out for its spills. The others may not spill more, and their results must agree with
    its results. `spills` are bytes that the kernels of a plan spill, by default the compiler's report. `advance` is
    called twice for every plan: when it is compiled, and when it is timed.

    Raises CompileError or RuntimeError if the first does not compile, or gives other results than in its first run.
    """
    spills = spills or _spills_of
    report = functools.partial(_reported, spills)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = []
        for spilled in pool.map(report, plans):
            reports.append(spilled)
            advance()
    if isinstance(reports[0], CompileError):
        raise reports[0]
    trials = []
    for plan, spilled in zip(plans, reports, strict=True):
        trials.append(_tried(plan, spilled, reports[0], runner))
        advance()
    if trials[0].why_not is not None:
        raise RuntimeError(f"the plan of the tables cannot be tuned: {trials[0].why_not}")
    fastest = min(trials, key=lambda trial: trial.seconds)
    winner = fastest if fastest.seconds * (1 + MARGIN) < trials[0].seconds else trials[0]
    summary = _remember(trials[0], winner) if remember else "not remembered"
    return PassTuning(trials=tuple(trials), winner=winner, remembered=summary)


def _spills_of(plan: LaunchPlan) -> int:
    resources = [compile_spec(kernel).resources for kernel in plan.kernels]
    return sum(r.spill_stores_bytes + r.spill_loads_bytes for r in resources)


def _reported(spills: Callable[[LaunchPlan], int], plan: LaunchPlan) -> int | CompileError:
    try:
        return spills(plan)
    except CompileError as error:
        return error


def _tried(plan: LaunchPlan, spilled: int | CompileError, allowed: int | CompileError, runner: Runner) -> Trial:
    if isinstance(spilled, CompileError) or isinstance(allowed, CompileError):
        return Trial(plan=plan, why_not="does not compile")
    if spilled > allowed:
        return Trial(plan=plan, why_not=f"spills {spilled} bytes")
    if (wrong := runner.why_wrong(plan)) is not None:
        return Trial(plan=plan, why_not=wrong)
    return Trial(plan=plan, seconds=runner.seconds(plan))


# ---- What is remembered ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest tiles, and their rate and that of the table's row: the content of a file."""

    tiles: tuple[Tile, ...]
    tflops: float
    table_tflops: float


_TILE_TYPES = {kind.__name__: kind for kind in FAMILIES}
_recalled: dict[Path, Winner | str | None] = {}  # what this process has read from a file, or why it could not


def tuned_plan(problem: Problem, device: DeviceSpec, pass_: Pass = FORWARD, **arrays: Unpack[Layout]) -> LaunchPlan:
    """The plan of the tiles that tuning found fastest, or that of the tables; parameters as those of `choose_plan`.

    Once a plan for a problem was made here, later findings of other processes about it are not looked at.
    """
    plan = choose_plan(problem, device, pass_, **arrays)
    if problem.batch_invariant:  # other sizes may have been tuned for other tiles
        return plan
    path = _file_of(plan)
    if path not in _recalled:
        _recalled[path] = _read(path)
    winner = _recalled[path]
    if winner is None:
        return plan
    if isinstance(winner, str):
        return replace(plan, reason=f"{plan.reason}\nnot tuned: {winner}")
    labels = ["; ".join(tile.label for tile in tiles) for tiles in (winner.tiles, plan.tiles)]
    if winner.tiles == plan.tiles:
        summary = f"tuned: {winner.tflops:.1f} TFLOP/s on {device.name}, the table's row is the fastest"
        return replace(plan, reason=f"{plan.reason}\n{summary}", tuned_flops_per_s=1e12 * winner.tflops)
    if (why_not := _why_not(winner.tiles, plan)) is not None:
        return replace(plan, reason=f"{plan.reason}\nnot the tuned {labels[0]}: {why_not}")
    summary = (
        f"{labels[0]}: tuned: {winner.tflops:.1f} TFLOP/s on {device.name}, the table's row {winner.table_tflops:.1f} "
        f"({labels[1]})"
    )
    tuned = choose_plan(problem, device, pass_, tiles=winner.tiles, origin=summary, **arrays)
    return replace(tuned, tuned_flops_per_s=1e12 * winner.tflops)


def forget(plan: LaunchPlan) -> bool:
    """Remove what is remembered for the problem of a plan of the tables; True if there was something."""
    path = _file_of(plan)
    _recalled.pop(path, None)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def remembered() -> list[Path]:
    """The files of all problems for which something is remembered."""
    return sorted(_directory().glob("*.json"))


def forget_all() -> int:
    """Remove what is remembered for all problems, and return their number."""
    files = remembered()
    _recalled.clear()
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def size_class(size: int) -> int:
    """The power of two that is not smaller; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


class _Key(NamedTuple):
    """The range in which a measurement holds: this device, these kernels, and problems of about this size.

    The kernels of the table's row say all else: dtype, head dimensions, options, alignment, and the row itself.
    """

    device: DeviceSpec
    pass_: str
    seqlen: tuple[int, int]
    heads: tuple[int, int]
    window: tuple[int | None, ...]
    deterministic: bool
    kernels: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, plan: LaunchPlan) -> _Key:
        p = plan.problem
        return cls(
            device=plan.device,
            pass_=plan.pass_.name,
            seqlen=(size_class(p.seqlen_q), size_class(p.seqlen_k)),
            heads=(size_class(p.batch * p.num_heads), p.group_size),
            window=tuple(None if side is None else size_class(abs(side)) for side in (p.window_left, p.window_right)),
            deterministic=p.deterministic,
            kernels=tuple((kernel.source, kernel.defines) for kernel in plan.kernels if kernel.source not in _UNTIMED),
        )

    def described(self) -> dict[str, Any]:
        """The key as a file has it."""
        return self._asdict() | {"device": asdict(self.device), "sources": kernels_fingerprint()}


_UNTIMED = tuple(SOFTMAX_KERNELS.values())  # they take the same time, whatever the tiles are


@functools.lru_cache(maxsize=1024)
def _file_name(key: _Key) -> str:
    digest = hashlib.sha256(json.dumps(key.described(), sort_keys=True).encode()).hexdigest()
    return f"{digest[:32]}.json"


def _file_of(plan: LaunchPlan) -> Path:
    return _directory() / _file_name(_Key.of(plan))


def _directory() -> Path:
    return cache_directory() / "tuned"


def _remember(of_table: Trial, winner: Trial) -> str:
    """Store the winner, and return what there is to say about it."""
    path = _file_of(of_table.plan)
    stored = Winner(tiles=winner.plan.tiles, tflops=winner.tflops, table_tflops=of_table.tflops)
    content = {
        "key": _Key.of(of_table.plan).described(),
        "problem": of_table.plan.describe().splitlines()[1].strip(),
        "tflops": stored.tflops,
        "table_tflops": stored.table_tflops,
        "tiles": [{"kind": type(tile).__name__, **_values(tile)} for tile in stored.tiles],
    }
    _recalled[path] = stored
    try:
        make_own_directory(path.parent)
        write_atomically(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        return f"remembered by this process alone: {error}"
    return f"remembered in {path}"


def _values(tile: Tile) -> dict[str, Any]:
    return {field.name: getattr(tile, field.name) for field in fields(tile)}


def _read(path: Path) -> Winner | str | None:
    """The content of a file, or why it cannot be read; None if there is no file."""
    try:
        content = json.loads(read_own(path))
        tiles = tuple(_tile_of(**values) for values in content["tiles"])
        speeds = [float(content[name]) for name in ("tflops", "table_tflops")]
        if not tiles or not all(map(math.isfinite, speeds)):
            raise ValueError(f"{len(tiles)} tiles, {speeds} TFLOP/s")
        return Winner(tiles=tiles, tflops=speeds[0], table_tflops=speeds[1])
    except FileNotFoundError:
        return None
    except (OSError, ArithmeticError, KeyError, RecursionError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())[:LONGEST_VALUE]
        return f"{path} cannot be read ({type(error).__name__}: {message})"


def _tile_of(kind: str, **values: Any) -> Tile:
    """The tile that a file describes. KeyError, TypeError or ValueError where there is none."""
    for field in fields(_TILE_TYPES[kind]):
        value, expected = values.get(field.name), _types(kind)[field.name]
        is_one = value in get_args(expected) if get_origin(expected) is Literal else type(value) is expected
        if field.name in values and not (is_one and (type(value) is not int or 0 <= value <= MOST_IN_TILE)):
            raise ValueError(f"{field.name}: got {value!r}, expected {expected}")
    tile: Tile = _TILE_TYPES[kind](**values)
    return tile


@functools.cache
def _types(kind: str) -> dict[str, Any]:
    """The types of the fields of a type of tiles."""
    return get_type_hints(_TILE_TYPES[kind])
