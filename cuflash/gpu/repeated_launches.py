"""Launches that are repeated by the addresses of their arrays alone.

A caller whose arrays are not CuPy's, as `cuflash.torch`, needs more time for views of them than a launch takes. So it
remembers the launch of a call under the signature of its own arrays, and later calls repeat it without any view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy

from cuflash.gpu import launch_cache
from cuflash.gpu.launch import Launch
from cuflash.gpu.replay import of_thread


class RepeatedLaunch:
    """A launch that later calls repeat by the addresses of their arrays, without views of these as arrays of CuPy.

    It serves arrays with the signature of those of the first call: the same shapes, strides, dtypes and device, the
    same addresses modulo 16, and k and v that begin at one address, or do not, as before. Results share no memory with
    other arrays.
    """

    __slots__ = ("_device_id", "_mapped_keys", "_order", "_seqlen_k", "launch", "results")

    def __init__(
        self, launch: Launch, order: Sequence[int], seqlen_k: int, mapped_keys: int, device_id: int, results: Any
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
            if launch.scratch_offsets:
                scratch = allocate(launch.scratch_bytes, stream)
                pointers += [scratch + offset for offset in launch.scratch_offsets]
            launch.run_on_addresses(pointers, self._mapped_keys, random, self._seqlen_k, stream)
        finally:
            if scratch:
                free(scratch)
            if before != self._device_id:
                runtime.setDevice(before)


_repeated: dict[tuple, RepeatedLaunch] = {}  # by the signature of the caller's arrays
launch_cache.shortcuts.append(_repeated)


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
    launch, launched_on, seqlen_k, mapped_keys, sums = launches[0]
    index_of = {id(x): index for index, x in enumerate(arrays)}
    if launch.copied or launch.new_results or sums is not None or sorted(map(id, launched_on)) != sorted(index_of):
        return
    order = [index_of[id(x)] for x in launched_on]
    device_id = launched_on[0].data.device_id
    launch_cache.keep(_repeated, signature, RepeatedLaunch(launch, order, seqlen_k, mapped_keys, device_id, results))
