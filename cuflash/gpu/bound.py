"""Forward passes that are bound to arrays of one form: a call compares its arrays with that form, and launches.

A plain call builds a key of all properties of its arrays and looks up its launch. A bound call has the launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import cupy

from cuflash.gpu import backend
from cuflash.spec.batch_axes import Axes
from cuflash.spec.binding import FIXED, growing_keys, same_plan
from cuflash.spec.options import Options
from cuflash.spec.passes import FORWARD


class _Form(NamedTuple):
    """What one array of a bound call is like."""

    name: str
    kind: Any  # its type
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    alignment: int  # its address modulo 16
    grows: bool  # whether the launch serves several lengths of its axis of keys


class _Bound(NamedTuple):
    """A launch, and the calls that it serves."""

    device_id: int
    launch: Any
    forms: tuple[_Form, ...]
    is_v_at_k: bool  # whether k and v begin at one address
    axis: int  # of keys, or of pages
    length: int  # of that axis
    lengths: tuple[int, int]  # the smallest and the largest that the launch serves
    keys: int  # for each element of the axis


class BoundLaunch:
    """The launch of a forward pass on arrays of one form.

    `arrays` are those of the call by name, None for absent; kernels are compiled and loaded, and nothing is computed.
    """

    __slots__ = ("_bound", "_need", "_options")

    def __init__(self, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...]) -> None:
        self._options, self._need = options, need
        self._bound: _Bound | None = None
        self.bind(arrays)

    @property
    def is_bound(self) -> bool:
        """Whether calls are one launch on arrays as they are: without copies, and without batch axes of several."""
        return self._bound is not None

    def bind(self, arrays: Mapping[str, Any]) -> None:
        """Bind such arrays in place of those before."""
        with cupy.cuda.Device(arrays["q"].data.device_id):
            self._bound = self._found(arrays)

    def _found(self, arrays: Mapping[str, Any]) -> _Bound | None:
        found = backend._found(FORWARD, self._options, arrays, self._need)
        if isinstance(found, Axes) or found[0].copied:
            return None
        launch, _, seqlen_k = found
        names, axis, _, _ = growing_keys(self._options, arrays) if launch.any_length else FIXED
        length, keys, lengths = 0, seqlen_k, (0, 0)
        if names:
            length = arrays[names[0]].shape[axis]
            keys = seqlen_k // length
            first, last = same_plan(self._options, launch.plan.problem.seqlen_q, seqlen_k)
            lengths = max(-(-first // keys), 2), last // keys  # of an axis of length 1 the stride may be any
        forms = tuple(_form(name, arrays[name], name in names) for name in launch.names)
        is_v_at_k = arrays["k"].data.ptr == arrays["v"].data.ptr
        return _Bound(arrays["q"].data.device_id, launch, forms, is_v_at_k, axis, length, lengths, keys)

    def __call__(self, arrays: Mapping[str, Any], random: tuple[int, int]) -> tuple[Any, ...] | None:
        """The results of a call, or None if its arrays are not of the form. `arrays` are those that are given.

        This code is written for speed.
        """
        if self._bound is None:
            return None
        device_id, launch, forms, is_v_at_k, axis, length, lengths, keys = self._bound
        if cupy.cuda.runtime.getDevice() != device_id:
            return None
        pointers: list[int] = []
        grown: list[int] = []
        for name, kind, shape, strides, dtype, alignment, grows in forms:
            x = arrays[name]
            if type(x) is not kind:
                return None
            if grows:
                own = x.shape
                if len(own) != len(shape) or (*own[:axis], *own[axis + 1 :]) != (*shape[:axis], *shape[axis + 1 :]):
                    return None
                grown.append(own[axis])
            elif x.shape != shape:
                return None
            memory = x.data
            pointer = memory.ptr
            if x.strides != strides or x.dtype != dtype or pointer & 15 != alignment or memory.device_id != device_id:
                return None
            pointers.append(pointer)
        if (arrays["k"].data.ptr == arrays["v"].data.ptr) is not is_v_at_k:
            return None
        if grown:
            length = grown[0]
            if grown[-1] != length or not lengths[0] <= length <= lengths[1]:
                return None
        return backend._start(launch, arrays, pointers, random, length * keys or launch.seqlen_k)


def _form(name: str, x: Any, grows: bool) -> _Form:
    return _Form(name, type(x), x.shape, x.strides, x.dtype, x.data.ptr & 15, grows)
