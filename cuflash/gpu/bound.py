"""Forward passes that are bound to arrays of one form: a call compares its arrays with that form, and launches.

A plain call looks up launches by its options and by the names of its arrays. A bound call has the launch.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from typing import Any

import cupy

from cuflash.gpu import launch_cache
from cuflash.gpu.launch import Launch
from cuflash.gpu.signature import form_of
from cuflash.spec.batch_axes import Axes, first_call
from cuflash.spec.options import Options
from cuflash.spec.passes import FORWARD


class BoundLaunch:
    """The launch of a forward pass on arrays of one form.

    `arrays` are those of the call by name, None for absent; kernels are compiled and loaded, and nothing is computed.
    """

    __slots__ = ("__weakref__", "_bound", "_need", "_options")

    def __init__(self, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...]) -> None:
        self._options, self._need = options, need
        self._bound: tuple[Launch, Any, list[type]] | None = None  # the launch, its arrays of a call, and their types
        self.bind(arrays)
        launch_cache.bound_launches.add(weakref.ref(self, launch_cache.bound_launches.discard))

    @property
    def is_bound(self) -> bool:
        """Whether calls are one launch on arrays as they are: without copies, and without batch axes of several."""
        return self._bound is not None

    def bind(self, arrays: Mapping[str, Any]) -> None:
        """Bind such arrays in place of those before; raises what `compute` does for their shapes and dtypes."""
        with cupy.cuda.Device(arrays["q"].data.device_id):
            launch_or_axes = launch_cache.find_launch(FORWARD, self._options, arrays, self._need)
            if isinstance(launch_or_axes, Axes):
                first = first_call(self._options, arrays, self._need, cupy, gives_partials=True)
                launch_cache.find_launch(FORWARD, first.options, first.arrays, self._need)
        if isinstance(launch_or_axes, Axes) or launch_or_axes[0].copied:
            self._bound = None
            return
        launch = launch_or_axes[0]
        in_order = operator.itemgetter(*launch.names)
        self._bound = launch, in_order, [*map(type, in_order(arrays))]

    def forget(self) -> None:
        """Forget the launch, so that the next call is planned again and binds what it is given."""
        self._bound = None

    def __call__(self, arrays: Mapping[str, Any], random: tuple[int, int]) -> tuple[Any, ...] | None:
        """The results of a call, or None if its arrays are not of the form. `arrays` are those that are given."""
        if self._bound is None:
            return None
        launch, in_order, types = self._bound
        values = in_order(arrays)
        if [*map(type, values)] != types:
            return None
        return launch.repeat(values, [*map(form_of, values)], random)
