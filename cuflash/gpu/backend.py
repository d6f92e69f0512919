"""Passes on CuPy arrays: running, planning, compiling and tuning them, the functions of `cuflash.spec.backends`.

`run_pass` finds the launch of a call (`cuflash.gpu.launch_cache`) and runs it (`cuflash.gpu.launch`) on CuPy's current
stream of the arrays' device, without a synchronisation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cupy

from cuflash.arrays.array_info import FLOAT8
from cuflash.arrays.units import WIDTH
from cuflash.gpu import launch_cache, progress, tuning
from cuflash.gpu.compiler import with_resources
from cuflash.gpu.device import device_spec
from cuflash.gpu.launch import Launch, bind_on_device
from cuflash.gpu.row_sums import PartialRowSums
from cuflash.gpu.timing import Stopwatch
from cuflash.gpu.tuning import PassTuning, Tuning, candidates, tuned_plan
from cuflash.plan import LaunchPlan
from cuflash.spec.batch_axes import Axes, BatchCalls, first_call
from cuflash.spec.binding import of_pass
from cuflash.spec.inputs import NAMES
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.passes import BACKWARD, FORWARD, JVP, PASSES_WITHOUT_TANGENTS, Pass

NO_RESULTS: Mapping[str, tuple[tuple[int, ...], Any]] = {}


class Plans(NamedTuple):
    """The plans of the passes of one problem; None of one that was not asked for, or that the problem does not have."""

    forward: LaunchPlan | None = None
    backward: LaunchPlan | None = None
    jvp: LaunchPlan | None = None
    backward_jvp: LaunchPlan | None = None
    column_sums: LaunchPlan | None = None
    column_max: LaunchPlan | None = None
    top_keys: LaunchPlan | None = None
    column_sums_backward: Plans | None = None  # a backward pass, and a forward pass for dlse and dweights

    def describe(self, verbose: bool = False, width: int = WIDTH) -> str:
        """The plans in words, as `LaunchPlan.describe` gives each."""
        paragraphs = [plan.describe(verbose, width) for plan in self if plan is not None]
        if self.forward is not None and self.forward.problem.why_no_gradients is not None:
            paragraphs.append(f"no backward pass with {self.forward.problem.why_no_gradients}")
        return "\n".join(paragraphs)

    def noted(self, note: str) -> Plans:
        """The plans with a note before their reasons."""
        return Plans(*(plan and plan.noted(note) for plan in self))

    def joined(self, other: Plans) -> Plans:
        """The plans of both."""
        return self._replace(**{name: plan for name, plan in other._asdict().items() if plan is not None})


def compute(
    pass_: Pass, options: Options, arrays: dict[str, Any], need: tuple[str, ...], random: tuple[int, int] = (0, 0)
) -> tuple[Any, ...]:
    """The results `need` of a pass over CuPy arrays by name: its inputs and the results to write to, None for absent.

    `random` is the seed and the offset of dropout. `arrays` of a backward pass may have row sums
    (`cuflash.spec.row_sums`) where q, k and v are a slice of a problem.
    """
    if "row_sums" not in arrays:
        return run_pass(pass_, options, arrays, need, random, repeats=True)
    without_sums = {name: x for name, x in arrays.items() if name != "row_sums"}
    return run_pass(pass_, options, without_sums, need, random, PartialRowSums(arrays, arrays["row_sums"]))


# What `compute` gives for arrays like those of a recent call, or None: `cuflash.dispatch` looks here first.
repeated = launch_cache.repeated


def run_pass(
    pass_: Pass,
    options: Options,
    arrays: dict[str, Any],
    results: tuple[str, ...],
    random: tuple[int, int],
    sums: PartialRowSums | None = None,
    *,
    repeats: bool = False,
) -> tuple[Any, ...]:
    """Run one pass, and remember its launch if the caller `repeats` such calls.

    On the host this takes as long as the launch itself, so it is written for speed.
    """
    device_id = arrays["q"].data.device_id
    if device_id != cupy.cuda.runtime.getDevice():
        with cupy.cuda.Device(device_id):
            return run_pass(pass_, options, arrays, results, random, sums, repeats=repeats)
    launch_or_axes = launch_cache.find_launch(pass_, options, arrays, results)
    if isinstance(launch_or_axes, Axes):
        call = functools.partial(run_pass, pass_, results=results, random=random)
        return BatchCalls(launch_or_axes, options, arrays, results, cupy, gives_partials=True).run(call)
    launch, pointers, seqlen_k = launch_or_axes
    if repeats and not launch.copied:
        launch_cache.remember(pass_, options, arrays, results, launch)
    present = [array for array in arrays.values() if array is not None]
    return launch.run(present, pointers, random, seqlen_k, sums)


def row_sums(options: Options, arrays: dict[str, Any]) -> Any:
    """Row max and row sum, over the keys of a call, of rows whose lse is large, in host memory.

    `cuflash.spec.row_sums` says which rows these are. lse is that of these keys. There is one batch axis, and the
    layout is "bhsd".
    """
    q, v = arrays["q"], arrays["v"]
    zeros = cupy.broadcast_to(cupy.zeros(v.shape[-1], q.dtype), (*q.shape[:-1], v.shape[-1]))
    sums = PartialRowSums(arrays)
    arrays_of_pass = {**arrays, "out": zeros, "dout": zeros, "dlse": None, "dk": None, "dv": None}
    run_pass(BACKWARD, options, arrays_of_pass, ("dk", "dv"), (0, 0), sums)
    return sums.found


def plan(
    options: Options,
    arrays: dict[str, Any],
    need: tuple[str, ...] = DEFAULT_NEED,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
) -> Plans:
    """The plans of passes; this compiles the kernels, to tell how many registers they take."""
    plans: dict[str, Any] = {
        pass_.name: planned(pass_, options, of_pass(pass_, arrays, options), pass_.results_for(need))
        for pass_ in _served(passes, arrays)
    }
    return Plans(**plans)


def planned(pass_: Pass, options: Options, arrays: Mapping[str, Any], results: tuple[str, ...]) -> LaunchPlan:
    """The plan of one pass on its arrays, with the registers of its kernels."""
    first = first_call(options, arrays, results, cupy, gives_partials=True)
    binding = bind_on_device(pass_, first.options, first.arrays, results)
    device = device_spec(arrays["q"].data.device_id)
    plan = with_resources(tuned_plan(binding.problem, device, pass_, **binding.layout))
    return plan.noted(first.axes) if first.axes else plan


def _served(passes: tuple[Pass, ...], arrays: Mapping[str, Any]) -> tuple[Pass, ...]:
    """The passes without that of gradients, if it comes with the forward pass of a problem that has none."""
    has_gradients = arrays.get("block_table") is None and arrays["k"].dtype.name not in FLOAT8
    return tuple(pass_ for pass_ in passes if has_gradients or pass_ is not BACKWARD or FORWARD not in passes)


def compile(
    options: Options,
    arrays: dict[str, Any],
    need: tuple[str, ...] = DEFAULT_NEED,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
) -> None:
    """Compile and load the kernels of passes, and let CuPy's pool of the current stream grow to what they need.

    A later call on arrays of these shapes and strides compiles nothing and takes no new memory from the device. This
    runs the passes once on the given arrays, and those whose results they read.
    """
    results: dict[Pass, tuple[Any, ...]] = {}
    with cupy.cuda.Device(arrays["q"].data.device_id):
        for pass_ in _served(passes, arrays):
            taken = _arrays_of(pass_, options, arrays, earlier=results)
            results[pass_] = run_pass(pass_, options, taken, pass_.results_for(need), (0, 0))


def _arrays_of(
    pass_: Pass,
    options: Options,
    arrays: Mapping[str, Any],
    random: tuple[int, int] = (0, 0),
    earlier: Mapping[Pass, tuple[Any, ...]] | None = None,
) -> dict[str, Any]:
    """The arrays of a pass, among them results of the one before, `earlier` or computed here; dout is out if absent."""
    taken = of_pass(pass_, arrays, options)
    if not pass_.required:
        return taken
    before = JVP if pass_.has_tangents else FORWARD
    results = (earlier or {}).get(before)
    if results is None:
        results = run_pass(before, options, of_pass(before, arrays, options), before.default, random)
    earlier_results = dict(zip(before.default, results, strict=True))
    inputs = {name: x for name, x in taken.items() if x is not None or name in NAMES}
    return {"dout": earlier_results["out"]} | inputs | earlier_results


def tune(
    options: Options,
    arrays: dict[str, Any],
    random: tuple[int, int] = (0, 0),
    *,
    passes: tuple[Pass, ...] = PASSES_WITHOUT_TANGENTS,
    remember: bool = True,
    forget: bool = False,
) -> Tuning | None:
    """Tune the passes of a call, or forget what tuning found: what `FlashAttention.tune` does.

    `arrays` are those of `forward`, tangents, and dout, which may be None or absent.
    """
    tunings: dict[str, Any] = {}
    with cupy.cuda.Device(arrays["q"].data.device_id):
        for pass_ in passes:
            taken = _arrays_of(pass_, options, arrays, random)
            tunings[pass_.name] = tuned(pass_, options, taken, random, remember=remember, forget=forget)
    return None if forget else Tuning(**tunings)


def tuned(
    pass_: Pass,
    options: Options,
    arrays: dict[str, Any],
    random: tuple[int, int] = (0, 0),
    *,
    results: Mapping[str, tuple[tuple[int, ...], Any]] = NO_RESULTS,
    remember: bool = True,
    forget: bool = False,
) -> PassTuning | None:
    """What tuning finds for one pass on its arrays, on the current device; `results` are as `trials` takes them."""
    if options.batch_invariant:
        raise NotImplementedError(
            "batch_invariant: got True, expected False in tune: tiles follow from no size of a problem, so none are "
            "tuned for one"
        )
    plans, call_by = trials(pass_, options, arrays, random, results)
    pass_tuning = None
    if forget:
        tuning.forget(plans[0])
    else:
        with progress.Bar(f"tuning {pass_}", total=2 * len(plans)) as bar:
            pass_tuning = tuning.tune(plans, Stopwatch(call_by), advance=bar.advance, remember=remember)
    launch_cache.forget_launches()
    return pass_tuning


def trials(
    pass_: Pass,
    options: Options,
    arrays: dict[str, Any],
    random: tuple[int, int],
    results: Mapping[str, tuple[tuple[int, ...], Any]] = NO_RESULTS,
) -> tuple[tuple[LaunchPlan, ...], Callable[[LaunchPlan], Callable[[], tuple[Any, ...]]]]:
    """The plans that tuning tries for a call, and a function that turns a plan into a call that runs it.

    `arrays` are those of the pass, without results, of which `results` has shapes and dtypes that do not follow from
    the arrays; CuPy's current device is that of the arrays.
    """
    options, arrays, _ = first_call(options, arrays, pass_.default, cupy, gives_partials=True)

    def with_results() -> dict[str, Any]:
        return arrays | {name: cupy.empty(shape, dtype) for name, (shape, dtype) in results.items()}

    binding = bind_on_device(pass_, options, with_results(), pass_.default)

    def call_by(plan: LaunchPlan) -> Callable[[], tuple[Any, ...]]:
        arrays_of_plan = with_results()  # so that results of two plans can be compared
        present = [array for array in arrays_of_plan.values() if array is not None]
        pointers = [array.data.ptr for array in present]
        launch = Launch.of(binding, plan, arrays_of_plan)
        return lambda: launch.run(present, list(pointers), random, plan.problem.seqlen_k)

    device = device_spec(arrays["q"].data.device_id)
    return candidates(binding.problem, device, pass_, **binding.layout), call_by
