"""A launch: kernels compiled and loaded for calls on arrays of one form, and how such a call runs them.

A `Launch` has all that is known of a call except its pointers. So a call has only to allocate results and scratch
memory, to fill the pointers into the kernels' argument, and to launch, on CuPy's current stream, without a
synchronisation.

A launch may serve calls of another seqlen_k, too, each of which fills in its own. Most of the time for that goes into
new tensor maps. Maps can stay the same if k and v are slices of a longer cache, so that their memory continues after
them, and if kernels hide all keys past the last one. Then the maps reach over as many keys as the launch serves.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cupy

from cuflash.arrays.array_info import FLOAT8, extent
from cuflash.arrays.checks import value_error
from cuflash.arrays.dlpack import check_no_overlap
from cuflash.gpu.device import Kernel, cuda_driver, load_kernel
from cuflash.gpu.params import Argument, Frame, Maps, kept_frames
from cuflash.gpu.replay import Recording, of_thread
from cuflash.gpu.row_sums import PartialRowSums
from cuflash.gpu.signature import Form, Signature
from cuflash.plan import LaunchPlan
from cuflash.plan.tensor_map import encoder
from cuflash.spec.binding import FIXED, Binding, Contiguous, Growing, bind, planned_length
from cuflash.spec.inputs import INPUTS
from cuflash.spec.options import Options
from cuflash.spec.passes import Pass

# Every call has a number of its own, by which kernels tell what they have written from earlier contents of memory. The
# numbers start at a random one, so that memory holds one of them only by chance, and stay below 2**48.
_call_numbers = itertools.count(secrets.randbits(47))


class _OtherAddresses(Exception):
    """Raised where arrays are like those of a launch but at addresses that it does not serve."""


def bind_on_device(pass_: Pass, options: Options, arrays: Mapping[str, Any], need: Collection[str]) -> Binding:
    """The binding of arrays that are all on one device, or of which only shape and dtype are known."""
    device_id = arrays["q"].data.device_id
    for name, array in arrays.items():
        if not (array is None or isinstance(array, Contiguous) or array.data.device_id == device_id):
            raise value_error(name, f"an array on device {array.data.device_id}", f"device {device_id}, where q is")
    return bind(pass_, options, arrays, need=need, address_of=_address_of)


def _address_of(array: Any) -> int:
    return 0 if isinstance(array, Contiguous) else array.data.ptr  # type: ignore[no-any-return]


@dataclass(eq=False, slots=True)
class Launch:
    """All that is known of a call except its pointers and, if the plan serves several, its number of keys.

    Pointers come in one order: of the arrays that a call is given, of results that it allocates, and of scratch arrays.
    """

    plan: LaunchPlan
    names: tuple[str, ...]  # of the arrays that a call is given, results among them
    seqlen_k: int  # the number of keys of the plan
    any_length: bool  # whether it serves calls of another seqlen_k that have the same plan
    kernels: tuple[Kernel, ...]
    launch_kernel_ex: Callable[..., tuple[Any]]  # cuLaunchKernelEx
    argument: Argument
    results: tuple[str, ...]  # names of what a call returns
    caller_results: tuple[tuple[int, int], ...]  # of results that a call is given, the indices of array and result
    new_results: tuple[tuple[int, tuple[int, ...], Any], ...]  # index, shape and dtype of results that a call allocates
    copied: tuple[int, ...]  # indices of arrays of which kernels get copies
    scratch_offsets: tuple[int, ...]  # first byte of each scratch array in one allocation
    scratch_bytes: int  # size of that allocation
    max_seqlen_k: int  # that it serves, if maps of k and v may have so many rows; else 0
    max_ends: tuple[tuple[int, int], ...]  # indices of k and v, and the offset in bytes at which so many keys end
    extents: tuple[tuple[int, int], ...]  # first and end byte of each array of a call, relative to its pointer
    last_call: int = 0  # the number of its last call
    signature: Signature | None = None  # None of a launch that tuning tries
    latest: tuple[list[Form], int] = ([], 0)  # the forms of the arrays of the latest call, and its number of keys

    @classmethod
    def of(cls, binding: Binding, plan: LaunchPlan, arrays: Mapping[str, Any], growing: Growing = FIXED) -> Launch:
        """Compile and load the kernels of a plan, for calls on arrays like these, which are on the current device."""
        present = {name: array for name, array in arrays.items() if array is not None}
        results, layout = binding.results, plan.scratch_layout
        order = (*present, *(name for name, _, _ in binding.allocated), *layout.names)
        any_length = plan.any_length and not binding.copied
        growing_names, axis, seqlen_k, _ = growing
        keeps_maps = any_length and plan.hides_last_keys and growing_names == INPUTS[1:]

        def extent_of(name: str) -> tuple[int, int]:
            shape = list(present[name].shape)
            if any_length and name in growing_names:
                # The extent is that of the longest call that finds this launch.
                shape[axis] = -(-planned_length(seqlen_k) * shape[axis] // seqlen_k)
            return extent(present[name], shape)

        maps: Maps = tuple(
            (encoder(spec.of_any_rows), order.index(spec.name), 0 if spec.name in growing_names else spec.shape[1])
            for spec in plan.tensor_maps
        )
        return cls(
            plan=plan,
            names=tuple(present),
            seqlen_k=plan.problem.seqlen_k,
            any_length=any_length,
            kernels=tuple(load_kernel(kernel, arrays["q"].data.device_id) for kernel in plan.kernels if kernel.grid),
            launch_kernel_ex=cuda_driver().cuLaunchKernelEx,
            argument=Argument(plan, binding.operands, order, maps),
            results=results,
            caller_results=tuple((n, results.index(name)) for n, name in enumerate(present) if name in results),
            new_results=tuple((results.index(name), shape, dtype) for name, shape, dtype in binding.allocated),
            copied=tuple(order.index(name) for name in binding.copied),
            scratch_offsets=layout.offsets,
            scratch_bytes=layout.nbytes,
            max_seqlen_k=planned_length(seqlen_k) if keeps_maps else 0,
            max_ends=tuple((order.index(name), extent_of(name)[1]) for name in growing_names) if keeps_maps else (),
            extents=tuple(map(extent_of, present)),
        )

    # ---- on arrays ---------------------------------------------------------------------------------------------------

    def repeat(self, arrays: Sequence[Any], forms: list[Form], random: tuple[int, int]) -> tuple[Any, ...] | None:
        """The results of a call on arrays in the order of `names`, with their forms; None if it does not serve them.

        The arrays have the types of those that it was made for. This takes the host as long as the launch itself, so
        it is written for speed.
        """
        signature = self.signature
        if signature is None or signature.device_id != cupy.cuda.runtime.getDevice():
            return None
        latest_forms, seqlen_k = self.latest
        if latest_forms != forms:
            new_seqlen_k = signature.seqlen_k_of(forms)
            if new_seqlen_k is None:
                return None
            self.latest, seqlen_k = (forms, new_seqlen_k), new_seqlen_k
        try:
            return self.run(arrays, [x.data.ptr for x in arrays], random, seqlen_k)
        except _OtherAddresses:
            return None

    def run(
        self,
        arrays: Sequence[Any],
        pointers: list[int],
        random: tuple[int, int],
        seqlen_k: int,
        sums: PartialRowSums | None = None,
    ) -> tuple[Any, ...]:
        """The results of a call on arrays in the order of `names`, whose addresses are `pointers` (to be appended to).

        Raises _OtherAddresses if the launch does not serve these; addresses that an earlier call had are not checked
        again. What most calls do is written out here, for speed; what few calls do has methods.
        """
        if not of_thread.has_context:
            _make_context_current()
        # 1. Memory: copies in place of arrays that kernels cannot read as they lie, new results, and scratch.
        results: list[Any] = [None] * len(self.results)
        for index, result in self.caller_results:
            results[result] = arrays[index]
        copies = self._copy(arrays, pointers) if self.copied else None
        for result, shape, dtype in self.new_results:
            results[result] = array = cupy.ndarray(shape, dtype)
            pointers.append(array.data.ptr)
        scratch = None
        if self.scratch_offsets:
            scratch = cupy.cuda.alloc(self.scratch_bytes)  # goes back to the pool in stream order
            first = scratch.ptr
            for offset in self.scratch_offsets:
                pointers.append(first + offset)
        # 2. Tensor maps over more keys than there are serve later calls, too, if the memory of k and v goes on so far.
        mapped_keys = self.max_seqlen_k or seqlen_k
        for index, end in self.max_ends:
            memory = arrays[index].data
            if memory.ptr + end > memory.mem.ptr + memory.mem.size:
                mapped_keys = seqlen_k
        # 3. The kernels' argument: that of an earlier call on these addresses, or a new one.
        key, are_disjoint = (self.argument.number, *pointers), True
        frame = kept_frames.pop(key, None)
        if frame is None:
            frame, are_disjoint = self._new_frame(key, arrays, pointers)
        self.last_call = call = next(_call_numbers)
        self.argument.fill(frame, mapped_keys, random, seqlen_k, call)
        # 4. The kernels.
        if sums is None:
            self._launch_kernels(self.kernels, frame.address)
        else:
            self._launch_around(sums, frame.address, scratch)
        if are_disjoint:
            kept_frames[key] = frame
        # 5. Whoever repeats calls learns of this one, and results are copied to where they belong.
        if of_thread.recording is not None:
            self._record(of_thread.recording, results, pointers, seqlen_k, sums)
        if of_thread.launches is not None:
            of_thread.launches.append((self, arrays, seqlen_k, mapped_keys, sums))
        if copies is not None:
            self._copy_back(copies, arrays)
        return tuple(results)

    def _copy(self, arrays: Sequence[Any], pointers: list[int]) -> dict[int, Any]:
        """Copies of arrays that kernels cannot read as they lie, and memory in place of results: by index."""
        self._check_overlap(arrays, pointers)
        copies = {}
        for index in self.copied:
            array = arrays[index].bits if arrays[index].dtype.name in FLOAT8 else arrays[index]
            copies[index] = copy = cupy.empty(array.shape, array.dtype)
            pointers[index] = copy.data.ptr
            if self.names[index] not in self.results:
                copy[...] = array
        return copies

    def _copy_back(self, copies: Mapping[int, Any], arrays: Sequence[Any]) -> None:
        """Copy results from the memory in place of them."""
        for index, copy in copies.items():
            if self.names[index] in self.results:
                arrays[index][...] = copy

    def _new_frame(self, key: tuple[int, ...], arrays: Sequence[Any], pointers: list[int]) -> tuple[Frame, bool]:
        """A frame for addresses of which no call has left one, and whether later calls on these need no check.

        Arrays that are copied were checked before their copies took their places.
        """
        are_disjoint = True
        if not self.copied:
            if self.signature is not None and not self.signature.has_addresses(pointers):
                raise _OtherAddresses
            are_disjoint = self._check_overlap(arrays, pointers)
        return self.argument.frame(key), are_disjoint

    def _check_overlap(self, arrays: Sequence[Any], pointers: list[int]) -> bool:
        """Refuse a result that shares memory with another array; True if no later call on these addresses does."""
        extents, are_disjoint = self.extents, True
        for index, _ in self.caller_results:
            low, high = pointers[index] + extents[index][0], pointers[index] + extents[index][1]
            for other, (start, stop) in enumerate(extents):
                if other != index and low < pointers[other] + stop and pointers[other] + start < high:
                    result, name = self.names[index], self.names[other]
                    check_no_overlap({result: arrays[index], name: arrays[other]}, (result,))
                    are_disjoint = not self.any_length  # with more keys, they may share memory
        return are_disjoint

    def _launch_around(self, sums: PartialRowSums, kernel_params: int, scratch: Any) -> None:
        """Launch the kernels that find row sums, let the host read or replace these, and launch the others."""
        sums.run(self.plan, lambda part: self._launch_kernels(self.kernels[part], kernel_params), scratch)

    def _record(
        self,
        recording: Recording,
        results: list[Any],
        pointers: list[int],
        seqlen_k: int,
        sums: PartialRowSums | None,
    ) -> None:
        """Record a call, so that it can be repeated with other pointers."""

        def make(pointers: list[int]) -> Callable[[Any], None]:
            return lambda call: self.run_on_addresses(pointers, seqlen_k, call.random, seqlen_k)

        if self.copied or sums is not None:
            recording.spoil()
        reads = [pointer for name, pointer in zip(self.names, pointers, strict=False) if name not in self.results]
        recording.work(make, list(pointers), reads, results)

    # ---- on addresses ------------------------------------------------------------------------------------------------

    def run_on_addresses(
        self,
        pointers: Sequence[int],
        mapped_keys: int,
        random: tuple[int, int],
        seqlen_k: int,
        stream: int | None = None,
    ) -> None:
        """Launch. `pointers` are those of the given arrays, of the results that the call allocates, and of scratch.

        Nothing checks them here, so the frame has a key that `run` never looks up: there a frame says that its
        addresses were checked.
        """
        key = (~self.argument.number, *pointers)
        frame = kept_frames.pop(key, None) or self.argument.frame(key)
        self.last_call = call = next(_call_numbers)
        self.argument.fill(frame, mapped_keys, random, seqlen_k, call)
        self._launch_kernels(self.kernels, frame.address, stream)
        kept_frames[key] = frame

    def _launch_kernels(self, kernels: tuple[Kernel, ...], kernel_params: int, stream: int | None = None) -> None:
        """Launch kernels on a stream by its address, or else on CuPy's current one."""
        # On the host of an H200 this way of launching took 3.0 us, and cuda.bindings took 3.6 us; in another run that
        # took 3.9 us, and CuPy's kernel object 5.3 us.
        launch_kernel = cupy.cuda.driver.launchKernel
        if stream is None:
            stream = cupy.cuda.get_current_stream().ptr
        for _, handle, grid, threads, shared_bytes, config_of in kernels:
            if config_of is None:
                launch_kernel(handle, grid, 1, 1, threads, 1, 1, shared_bytes, stream, kernel_params, 0)
            else:
                (error,) = self.launch_kernel_ex(config_of(stream), handle, kernel_params, 0)
                if error:
                    raise RuntimeError(f"cuLaunchKernelEx returned {error.name}")


def _make_context_current() -> None:
    """Make the context of the current device current in this thread; CuPy's pool gives memory to one without, too."""
    cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
    of_thread.has_context = True
