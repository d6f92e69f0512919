"""Forward passes that are bound to arrays of one form: a call compares its arrays with that form, and launches.

A plain call builds a key of all properties of its arrays and looks up its launch. A bound call has the launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import cupy

from cuflash.gpu import backend
from cuflash.spec.batch_axes import Axes
from cuflash.spec.binding import growing_keys
from cuflash.spec.inputs import INPUTS
from cuflash.spec.options import Options
from cuflash.spec.passes import FORWARD

MAY_GROW = (*INPUTS[1:], "block_table")  # arrays of which a launch serves several lengths


class _Form(NamedTuple):
    """What one array of a bound call is like."""

    name: str
    kind: Any  # its type
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    alignment: int  # its address modulo 16


class _Bound(NamedTuple):
    """A launch, and the calls that it serves."""

    device_id: int
    launch: Any
    forms: tuple[_Form, ...]
    seqlen_k: int
    planned_for: tuple[Any, ...]  # of `growing_keys`
    is_v_at_k: bool  # whether k and v begin at one address


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
        forms = tuple(_form(name, arrays[name]) for name in launch.names)
        planned_for = growing_keys(self._options, arrays)[3]
        is_v_at_k = arrays["k"].data.ptr == arrays["v"].data.ptr
        return _Bound(arrays["q"].data.device_id, launch, forms, seqlen_k, planned_for, is_v_at_k)

    def __call__(self, arrays: Mapping[str, Any], random: tuple[int, int]) -> tuple[Any, ...] | None:
        """The results of a call, or None if its arrays are not of the form. `arrays` are those that are given."""
        bound = self._bound
        if bound is None or cupy.cuda.runtime.getDevice() != bound.device_id:
            return None
        return self._run(bound, arrays, random)

    def _run(self, bound: _Bound, arrays: Mapping[str, Any], random: tuple[int, int]) -> tuple[Any, ...] | None:
        """The results of a call. This code is written for speed."""
        device_id = bound.device_id
        pointers: list[int] = []
        for name, kind, shape, strides, dtype, alignment in bound.forms:
            x = arrays[name]
            if type(x) is not kind:
                return None
            if x.shape != shape:
                longer = self._grown(bound, arrays) if name in MAY_GROW else None
                return None if longer is None else self._run(longer, arrays, random)
            memory = x.data
            pointer = memory.ptr
            if x.strides != strides or x.dtype != dtype or pointer & 15 != alignment or memory.device_id != device_id:
                return None
            pointers.append(pointer)
        if (arrays["k"].data.ptr == arrays["v"].data.ptr) is not bound.is_v_at_k:
            return None
        return backend._start(bound.launch, arrays, pointers, random, bound.seqlen_k)

    def _grown(self, bound: _Bound, arrays: Mapping[str, Any]) -> _Bound | None:
        """What is bound, for another number of keys; None if another launch serves that."""
        names, axis, seqlen_k, planned_for = growing_keys(self._options, arrays)
        if not (bound.launch.any_length and names and planned_for == bound.planned_for):
            return None
        forms = []
        for form in bound.forms:
            if form.name in names:
                shape = arrays[form.name].shape
                if (*shape[:axis], *shape[axis + 1 :]) != (*form.shape[:axis], *form.shape[axis + 1 :]):
                    return None
                form = form._replace(shape=shape)
            forms.append(form)
        self._bound = longer = bound._replace(forms=tuple(forms), seqlen_k=seqlen_k)
        return longer


def _form(name: str, x: Any) -> _Form:
    return _Form(name, type(x), x.shape, x.strides, x.dtype, x.data.ptr & 15)
