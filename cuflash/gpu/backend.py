"""From CuPy arrays to kernel launches: pointers, scratch memory, stream, and the cache that makes a call cheap.

The first call of a problem binds its arrays, plans it and compiles or loads its kernels. The result is a `_Launch`. Its
key in the cache has everything that it depends on: options, shapes, strides, dtypes, pointer alignment, device. Later
calls fill in the pointers and launch, on CuPy's current stream of the arrays' device, without a synchronisation. They
compare their arrays with those of the latest launches for such arguments, and look up the key if none serves them.

The number of keys is an exception. A forward pass whose k and v grow by a row with each call, as they do in decoding,
finds the launch of the call before: the key has only those properties of the number of keys that a plan depends on, and
each call fills in the number itself. Most of the time for that goes into new tensor maps. Maps can stay the same if k
and v are slices of a longer cache, so that their memory continues after them, and if the kernel hides all keys past the
last one. Then the maps reach over as many keys as the launch serves.

A caller whose arrays are not CuPy's needs more time for views of them than a launch takes. So it may repeat the launch
of an earlier call by addresses alone (`RepeatedLaunch`).
"""

from __future__ import annotations

import functools
import itertools
import secrets
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy

from cuflash.arrays.array_info import FLOAT8, extent
from cuflash.arrays.checks import value_error
from cuflash.arrays.dlpack import check_no_overlap
from cuflash.arrays.units import WIDTH
from cuflash.gpu import progress, tuning
from cuflash.gpu.compiler import with_resources
from cuflash.gpu.device import Kernel, cuda_driver, device_spec, load_kernel
from cuflash.gpu.params import Argument, Maps, kept_frames
from cuflash.gpu.replay import Recording, forget_recordings, of_thread
from cuflash.gpu.row_sums import PartialRowSums
from cuflash.gpu.signature import Form, Signature, form_of
from cuflash.gpu.timing import Stopwatch
from cuflash.gpu.tuning import PassTuning, Tuning, candidates, tuned_plan
from cuflash.plan import LaunchPlan
from cuflash.plan.tensor_map import encoder
from cuflash.spec.batch_axes import Axes, BatchCalls, axes_of, first_call
from cuflash.spec.binding import FIXED, Binding, Contiguous, Growing, bind, growing_keys, of_pass, planned_length
from cuflash.spec.inputs import INPUTS, NAMES
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.passes import BACKWARD, FORWARD, JVP, PASSES_WITHOUT_TANGENTS, Pass

MAX_LAUNCHES = 1024  # launches that are kept; each takes 10 KB
MOST_KNOWN = 2048  # keys of launches that a call looks up before it checks its arrays
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


@dataclass(eq=False, slots=True)
class _Launch:
    """All that is known of a call except its pointers and, if the plan serves several, its number of keys."""

    plan: LaunchPlan
    names: tuple[str, ...]  # of the arrays that a call is given, results among them
    seqlen_k: int  # the number of keys of the plan
    any_length: bool  # whether it serves calls of another seqlen_k that have the same plan
    kernels: tuple[Kernel, ...]
    run_overlapping: Callable[..., tuple[Any]]  # cuLaunchKernelEx
    argument: Argument  # with pointers of the arrays of the call, results that it allocates, and scratch arrays
    results: tuple[str, ...]
    allocated: tuple[tuple[int, tuple[int, ...], Any], ...]  # index, shape and dtype of results that the call allocates
    copied: tuple[int, ...]  # indices of arrays of which kernels get copies
    scratch: tuple[int, ...]  # first byte of each scratch array in one allocation
    scratch_bytes: int  # size of that allocation
    most_keys: int  # that it serves, if maps of k and v may have so many; else 0
    ends_of_most: tuple[tuple[int, int], ...]  # indices of k and v, and the offset in bytes at which so many keys end
    extents: tuple[tuple[int, int], ...]  # first and end byte of each array of the call, relative to its pointer
    given_results: tuple[tuple[int, int], ...]  # of results that the call is given the indices of array and result
    last_call: int = 0  # the number of its last call
    signature: Signature | None = None  # None of a launch that tuning tries
    latest: tuple[list[Form], int] = ([], 0)  # the forms of the arrays of the latest call, and its number of keys


class _OtherAddresses(Exception):
    """Raised where arrays are like those of a launch but at addresses that it does not serve."""


_launches: dict[tuple, _Launch] = {}
# The latest launch by pass, options, results, names and types of the arrays, and the shape of the first one, q. So a
# cache may have grown. For calls that alternate there is a launch by the forms of all arrays, too.
_known: dict[tuple, _Launch] = {}
_repeated: dict[tuple, RepeatedLaunch] = {}  # by the signature of their arrays
bound_launches: set[weakref.ref[Any]] = set()  # those of `cuflash.gpu.bound` that are alive
# Every call has a number of its own, by which kernels tell what they have written from earlier contents of memory. The
# numbers start at a random one, so that memory holds one of them only by chance, and stay below 2**48.
_calls = itertools.count(secrets.randbits(47))


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


def row_sums(options: Options, arrays: dict[str, Any]) -> Any:
    """Row max and row sum, over the keys of a call, of rows whose lse is large, in host memory.

    `cuflash.spec.row_sums` says which rows these are. lse is that of these keys. There is one batch axis, and the
    layout is "bhsd".
    """
    q, v = arrays["q"], arrays["v"]
    zeros = cupy.broadcast_to(cupy.zeros(v.shape[-1], q.dtype), (*q.shape[:-1], v.shape[-1]))
    sums = PartialRowSums(arrays)
    of_call = {**arrays, "out": zeros, "dout": zeros, "dlse": None, "dk": None, "dv": None}
    run_pass(BACKWARD, options, of_call, ("dk", "dv"), (0, 0), sums)
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
    binding = _bind(pass_, first.options, first.arrays, results)
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
    of_before = dict(zip(before.default, results, strict=True))
    given = {name: x for name, x in taken.items() if x is not None or name in NAMES}
    return {"dout": of_before["out"]} | given | of_before


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
    forget_launches()
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

    binding = _bind(pass_, options, with_results(), pass_.default)

    def call_by(plan: LaunchPlan) -> Callable[[], tuple[Any, ...]]:
        of_plan = with_results()  # of each plan, so that results of two can be compared
        values = [array for array in of_plan.values() if array is not None]
        pointers = [array.data.ptr for array in values]
        launch = _launch_of(binding, plan, of_plan)
        return lambda: _launch_on_arrays(launch, values, list(pointers), random, plan.problem.seqlen_k)

    device = device_spec(arrays["q"].data.device_id)
    return candidates(binding.problem, device, pass_, **binding.layout), call_by


def forget_launches() -> None:
    """Forget all launches, so that later calls are planned again, bound and recorded ones among them."""
    _launches.clear()
    _known.clear()
    _repeated.clear()
    for reference in [*bound_launches]:
        if (bound := reference()) is not None:
            bound.forget()
    forget_recordings()


# ---- A call ----------------------------------------------------------------------------------------------------------


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
    launch_or_axes = find_launch(pass_, options, arrays, results)
    if isinstance(launch_or_axes, Axes):
        call = functools.partial(run_pass, pass_, results=results, random=random)
        return BatchCalls(launch_or_axes, options, arrays, results, cupy, gives_partials=True).run(call)
    launch, pointers, seqlen_k = launch_or_axes
    if repeats and not launch.copied:
        _remember(pass_, options, arrays, results, launch)
    values = [array for array in arrays.values() if array is not None]
    return _launch_on_arrays(launch, values, pointers, random, seqlen_k, sums)


def repeated(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...], random: tuple[int, int]
) -> tuple[Any, ...] | None:
    """What `compute` gives for arrays like those of a recent call, which are CuPy's; None if there is none.

    Arrays that are None are absent. The others may be of any library. This compares the arrays with those of the latest
    call with such a q. `compute` takes the host twice as long: it checks their libraries, and builds a key of all their
    properties.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    values = [*given.values()]
    key = (pass_, options, need, *given, *map(type, values), values[0].shape)
    launch = _known.get(key)
    if launch is None:
        return None
    forms = [*map(form_of, values)]
    results = repeat_launch(launch, values, forms, random)
    if results is None and (launch := _known.get((*key, *forms))) is not None:
        results = repeat_launch(launch, values, forms, random)
    return results


def repeat_launch(
    launch: _Launch, values: Sequence[Any], forms: list[Form], random: tuple[int, int]
) -> tuple[Any, ...] | None:
    """The results of a launch on arrays in the order of its names, with their forms; None if it does not serve them.

    The arrays have the types of those that it was made for. This, too, is written for speed.
    """
    signature = launch.signature
    if signature is None or signature.device_id != cupy.cuda.runtime.getDevice():
        return None
    latest_forms, seqlen_k = launch.latest
    if latest_forms != forms:
        length = signature.seqlen_k_of(forms)
        if length is None:
            return None
        launch.latest, seqlen_k = (forms, length), length
    try:
        return _launch_on_arrays(launch, values, [x.data.ptr for x in values], random, seqlen_k)
    except _OtherAddresses:
        return None


def _remember(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], results: tuple[str, ...], launch: _Launch
) -> None:
    """Let later calls on arrays like these find the launch before they are checked."""
    given = {name: x for name, x in arrays.items() if x is not None}
    if (options.score or options.mask_function) and "cu_seqlens_q" in given:
        return  # whether options take the place of functions depends on whether the starts of keys are the same array
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    values = [*given.values()]
    key = (pass_, options, results, *given, *map(type, values), values[0].shape)
    _known[key] = _known[(*key, *map(form_of, values))] = launch


def find_launch(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], results: tuple[str, ...]
) -> tuple[_Launch, list[int], int] | Axes:
    """The launch of a call, the pointers of its arrays, which are on the current device, and its number of keys.

    Where its batch axes need several launches, these axes instead.
    """
    names, axis, seqlen_k, planned_for = growing = growing_keys(options, arrays) if pass_.any_length else FIXED
    key: list[Any] = [pass_, options, results, planned_for]
    pointers: list[int] = []
    for name, array in arrays.items():
        if array is not None:
            memory, shape = array.data, array.shape
            pointer = memory.ptr
            pointers.append(pointer)
            if name in names:
                key += (shape[:axis], shape[axis + 1 :])
            else:
                key.append(shape)
            key += (name, array.strides, array.dtype, pointer & 15, memory.device_id)
    key.append(arrays["k"].data.ptr == arrays["v"].data.ptr)  # then v may be the first columns of k
    any_length_key = tuple(key)
    launch = _launches.get(any_length_key) or _launches.get((any_length_key, seqlen_k))
    if launch is None:
        axes = axes_of(options, arrays, results)
        if axes is not None:
            return axes
        binding = _bind(pass_, options, arrays, results)
        plan = tuned_plan(binding.problem, device_spec(arrays["q"].data.device_id), pass_, **binding.layout)
        launch = _launch_of(binding, plan, arrays, growing)
        seqlen_q = plan.problem.seqlen_q
        launch.signature = Signature.of(options, arrays, seqlen_q, growing if launch.any_length else FIXED)
        launch.latest = launch.signature.forms, launch.seqlen_k
        serves_any = launch.any_length or not names
        _keep(_launches, any_length_key if serves_any else (any_length_key, seqlen_k), launch)
    return launch, pointers, seqlen_k or launch.seqlen_k


def _keep(kept: dict[tuple, Any], key: tuple, launch: _Launch | RepeatedLaunch) -> None:
    """Remember a launch. If there are too many, only the half that was used last is kept."""
    if len(kept) >= MAX_LAUNCHES:
        by_use = sorted(list(kept.items()), key=lambda item: item[1].last_call)
        for old, _ in by_use[: MAX_LAUNCHES // 2]:
            kept.pop(old, None)
        alive = {*_launches.values()}
        for shortcuts in (_known, _repeated):  # by which calls would find, and keep, the launches that are gone
            for old, x in [*shortcuts.items()]:
                if getattr(x, "launch", x) not in alive:
                    shortcuts.pop(old, None)
    kept[key] = launch


def _launch_on_arrays(
    launch: _Launch,
    values: Sequence[Any],
    pointers: list[int],
    random: tuple[int, int],
    seqlen_k: int,
    sums: PartialRowSums | None = None,
) -> tuple[Any, ...]:
    """The results of a launch on arrays in the order of its names, whose addresses are `pointers` (to be appended to).

    Raises _OtherAddresses if the launch does not serve these; addresses that an earlier call had are not checked again.
    """
    if not of_thread.has_context:  # memory of CuPy's pool is given to a thread without one, too
        cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
        of_thread.has_context = True
    results: list[Any] = [None] * len(launch.results)
    for index, result in launch.given_results:
        results[result] = values[index]
    # Memory: copies in place of arrays that kernels cannot read as they lie, new results, and scratch.
    copies = _copy(launch, values, pointers) if launch.copied else None
    for index, shape, dtype in launch.allocated:
        results[index] = array = cupy.ndarray(shape, dtype)
        pointers.append(array.data.ptr)
    scratch = None
    if launch.scratch:
        scratch = cupy.cuda.alloc(launch.scratch_bytes)  # goes back to the pool in stream order
        first = scratch.ptr
        for offset in launch.scratch:
            pointers.append(first + offset)
    # Tensor maps over more keys than there are serve later calls, too, if the memory of k and v goes on so far.
    mapped_keys = launch.most_keys or seqlen_k
    for index, end in launch.ends_of_most:
        memory = values[index].data
        if memory.ptr + end > memory.mem.ptr + memory.mem.size:
            mapped_keys = seqlen_k
    # The kernels' argument: that of an earlier call on these addresses, or a new one.
    key, are_disjoint = (launch.argument.number, *pointers), True
    frame = kept_frames.pop(key, None)
    if frame is None:
        if copies is None:
            if launch.signature is not None and not launch.signature.has_addresses(pointers):
                raise _OtherAddresses
            are_disjoint = _check_overlap(launch, pointers, values)
        frame = launch.argument.frame(key)
    launch.last_call = call = next(_calls)
    launch.argument.fill(frame, mapped_keys, random, seqlen_k, call)
    if sums is None:
        _launch_kernels(launch, launch.kernels, frame.address)
    else:
        sums.run(launch.plan, lambda some: _launch_kernels(launch, launch.kernels[some], frame.address), scratch)
    if are_disjoint:
        kept_frames[key] = frame
    if of_thread.recording is not None:
        _record(of_thread.recording, launch, results, pointers, seqlen_k, sums)
    if of_thread.launches is not None:
        of_thread.launches.append((launch, values, seqlen_k, mapped_keys, sums))
    if copies is not None:
        for index, copy in copies.items():
            if launch.names[index] in launch.results:
                values[index][...] = copy
    return tuple(results)


def _copy(launch: _Launch, values: Sequence[Any], pointers: list[int]) -> dict[int, Any]:
    """Copies of arrays that kernels cannot read as they lie, and memory in place of results: by index."""
    _check_overlap(launch, pointers, values)
    copies = {}
    for index in launch.copied:
        array = values[index].bits if values[index].dtype.name in FLOAT8 else values[index]
        copies[index] = copy = cupy.empty(array.shape, array.dtype)
        pointers[index] = copy.data.ptr
        if launch.names[index] not in launch.results:
            copy[...] = array
    return copies


def _launch_on_addresses(
    launch: _Launch,
    pointers: Sequence[int],
    mapped_keys: int,
    random: tuple[int, int],
    seqlen_k: int,
    stream: int | None = None,
) -> None:
    """Launch. `pointers` are those of the given arrays, of the results that the call allocates, and of scratch.

    Nothing checks them here, so the frame has a key that `_launch_on_arrays` never looks up: there a frame says that
    its addresses were checked.
    """
    key = (~launch.argument.number, *pointers)
    frame = kept_frames.pop(key, None) or launch.argument.frame(key)
    launch.last_call = call = next(_calls)
    launch.argument.fill(frame, mapped_keys, random, seqlen_k, call)
    _launch_kernels(launch, launch.kernels, frame.address, stream)
    kept_frames[key] = frame


def _launch_kernels(
    launch: _Launch, kernels: tuple[Kernel, ...], kernel_params: int, stream: int | None = None
) -> None:
    """Launch kernels on a stream by its address, or else on CuPy's current one."""
    # On the host of an H200 this way of launching took 3.0 us, and cuda.bindings took 3.6 us; in another run that took
    # 3.9 us, and CuPy's kernel object 5.3 us.
    run = cupy.cuda.driver.launchKernel
    if stream is None:
        stream = cupy.cuda.get_current_stream().ptr
    for _, handle, grid, threads, shared_bytes, config_of in kernels:
        if config_of is None:
            run(handle, grid, 1, 1, threads, 1, 1, shared_bytes, stream, kernel_params, 0)
        else:
            (error,) = launch.run_overlapping(config_of(stream), handle, kernel_params, 0)
            if error:
                raise RuntimeError(f"cuLaunchKernelEx returned {error.name}")


def _record(
    recording: Recording,
    launch: _Launch,
    results: list[Any],
    pointers: list[int],
    seqlen_k: int,
    sums: PartialRowSums | None,
) -> None:
    """Record a launch, so that it can be repeated with other pointers."""

    def make(pointers: list[int]) -> Callable[[Any], None]:
        return lambda call: _launch_on_addresses(launch, pointers, seqlen_k, call.random, seqlen_k)

    if launch.copied or sums is not None:
        recording.spoil()
    reads = [pointer for name, pointer in zip(launch.names, pointers, strict=False) if name not in launch.results]
    recording.work(make, list(pointers), reads, results)


# ---- Calls without arrays of CuPy ------------------------------------------------------------------------------------


class RepeatedLaunch:
    """A launch that later calls repeat by the addresses of their arrays, without views of these as arrays of CuPy.

    It serves arrays with the signature of those of the first call: the same shapes, strides, dtypes and device, the
    same addresses modulo 16, and k and v that begin at one address, or do not, as before. Results share no memory with
    other arrays.
    """

    __slots__ = ("_device_id", "_mapped_keys", "_order", "_seqlen_k", "launch", "results")

    def __init__(
        self, launch: _Launch, order: Sequence[int], seqlen_k: int, mapped_keys: int, device_id: int, results: Any
    ) -> None:
        self.launch, self._seqlen_k, self._mapped_keys, self._device_id = launch, seqlen_k, mapped_keys, device_id
        self._order = tuple(order)  # for each array of the launch, which of the caller's it is
        self.results = results  # what the caller needs to know to allocate its results

    @property
    def last_call(self) -> int:
        """The number of the last call of the launch."""
        return self.launch.last_call

    def run(
        self,
        addresses: Sequence[int],
        random: tuple[int, int],
        stream: int,
        allocate: Callable[[int, int], int],
        free: Callable[[int], object],
    ) -> None:
        """Launch on a stream. `addresses` are those of the arrays that the caller remembered, in its order.

        `allocate` gives scratch memory of so many bytes for a stream, and `free` takes it back in stream order.
        """
        launch, runtime, scratch = self.launch, cupy.cuda.runtime, 0
        pointers = [addresses[n] for n in self._order]
        before = runtime.getDevice()
        runtime.setDevice(self._device_id)  # also in a thread in which the device has no context yet
        try:
            if launch.scratch:
                scratch = allocate(launch.scratch_bytes, stream)
                pointers += [scratch + offset for offset in launch.scratch]
            _launch_on_addresses(launch, pointers, self._mapped_keys, random, self._seqlen_k, stream)
        finally:
            if scratch:
                free(scratch)
            if before != self._device_id:
                runtime.setDevice(before)


def repeated_launch(signature: tuple) -> RepeatedLaunch | None:
    """The launch that a call on arrays of a signature can repeat; None if it has to go the usual way."""
    return _repeated.get(signature) if of_thread.recording is None else None


@contextmanager
def remembered(signature: tuple, arrays: Sequence[Any], results: Any) -> Iterator[None]:
    """A context in which a call is made whose launch calls on arrays of the same signature repeat.

    `arrays` are all that the caller gives, those of results among them. A launch is remembered only if it does all of
    the work of the call: without copies, on these very arrays and no others.
    """
    launches: list[Any] = []
    before, of_thread.launches = of_thread.launches, launches
    try:
        yield
    finally:
        of_thread.launches = before
    if len(launches) != 1:  # calls for some of the batch axes each
        return
    launch, values, seqlen_k, mapped_keys, sums = launches[0]
    index_of = {id(x): index for index, x in enumerate(arrays)}
    if launch.copied or launch.allocated or sums is not None or sorted(map(id, values)) != sorted(index_of):
        return
    order = [index_of[id(x)] for x in values]
    device_id = values[0].data.device_id
    _keep(_repeated, signature, RepeatedLaunch(launch, order, seqlen_k, mapped_keys, device_id, results))


# ---- What is prepared once -------------------------------------------------------------------------------------------


def _bind(pass_: Pass, options: Options, arrays: Mapping[str, Any], need: Collection[str]) -> Binding:
    """The binding of arrays that are all on one device, or of which only shape and dtype are known."""
    device_id = arrays["q"].data.device_id
    for name, array in arrays.items():
        if not (array is None or isinstance(array, Contiguous) or array.data.device_id == device_id):
            raise value_error(name, f"an array on device {array.data.device_id}", f"device {device_id}, where q is")
    return bind(pass_, options, arrays, need=need, address_of=_address_of)


def _address_of(array: Any) -> int:
    return 0 if isinstance(array, Contiguous) else array.data.ptr  # type: ignore[no-any-return]


def _launch_of(binding: Binding, plan: LaunchPlan, arrays: Mapping[str, Any], growing: Growing = FIXED) -> _Launch:
    """Compile and load the kernels of a plan, for calls on arrays like these, which are on the current device."""
    given = {name: array for name, array in arrays.items() if array is not None}
    layout = plan.scratch_layout
    pointers = (*given, *(name for name, _, _ in binding.allocated), *layout.names)
    any_length = plan.any_length and not binding.copied
    names, axis, seqlen_k, _ = growing
    keeps_maps = any_length and plan.hides_last_keys and names == INPUTS[1:]

    def extent_of(name: str) -> tuple[int, int]:
        shape = list(given[name].shape)
        if any_length and name in names:
            # The extent is that of the longest call that finds this launch.
            shape[axis] = -(-planned_length(seqlen_k) * shape[axis] // seqlen_k)
        return extent(given[name], shape)

    maps: Maps = tuple(
        (encoder(spec.of_any_rows), pointers.index(spec.name), 0 if spec.name in names else spec.shape[1])
        for spec in plan.tensor_maps
    )
    return _Launch(
        plan=plan,
        names=tuple(given),
        seqlen_k=plan.problem.seqlen_k,
        any_length=any_length,
        kernels=tuple(load_kernel(kernel, arrays["q"].data.device_id) for kernel in plan.kernels if kernel.grid),
        run_overlapping=cuda_driver().cuLaunchKernelEx,
        argument=Argument(plan, binding.operands, pointers, maps),
        results=binding.results,
        allocated=tuple((binding.results.index(name), shape, dtype) for name, shape, dtype in binding.allocated),
        copied=tuple(pointers.index(name) for name in binding.copied),
        most_keys=planned_length(seqlen_k) if keeps_maps else 0,
        ends_of_most=tuple((pointers.index(name), extent_of(name)[1]) for name in names) if keeps_maps else (),
        scratch=layout.offsets,
        scratch_bytes=layout.nbytes,
        extents=tuple(map(extent_of, given)),
        given_results=tuple(
            (index, binding.results.index(name)) for index, name in enumerate(given) if name in binding.results
        ),
    )


def _check_overlap(launch: _Launch, pointers: list[int], values: Sequence[Any]) -> bool:
    """Refuse a result that shares memory with another array; True if no later call on these addresses does."""
    extents, are_disjoint = launch.extents, True
    for index, _ in launch.given_results:
        low, high = pointers[index] + extents[index][0], pointers[index] + extents[index][1]
        for other, (start, stop) in enumerate(extents):
            if other != index and low < pointers[other] + stop and pointers[other] + start < high:
                result, name = launch.names[index], launch.names[other]
                check_no_overlap({result: values[index], name: values[other]}, (result,))
                are_disjoint = not launch.any_length  # with more keys, they may share memory
    return are_disjoint
