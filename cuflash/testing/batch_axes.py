"""Batch axes of cases: arrays that broadcast along some of them, the same with every axis, and the way back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.spec.inputs import BY_NAME, OPTIONAL_INPUTS
from cuflash.spec.outputs import OUTPUTS, OVER_HEAD_DIM, OVER_ROWS, ROW_REDUCTIONS

Array = NDArray[Any]

# How many axes of an array are not batch axes.
OWN_AXES = {
    **dict.fromkeys(OVER_HEAD_DIM, 3),
    **dict.fromkeys(OVER_ROWS, 2),
    **{row.name: row.own_axes for row in OPTIONAL_INPUTS if row.own_axes is not None},
}


def batch_axes_of(name: str, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The batch axes of an array, those that it lacks as axes of length 1."""
    own = shape[: max(len(shape) - OWN_AXES[name], 0)]
    return (1,) * (count - len(own)) + own


@dataclass(frozen=True)
class Spread:
    """The arrays of a case with batch axes as arrays with one axis for the batch, which broadcast along none."""

    axes: tuple[int, ...]
    natural: Mapping[str, Array]

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays; a bias that broadcasts has the dtype of lse, so that its gradient is not rounded before sums."""
        return {name: self._spread(name, x) for name, x in self.natural.items()}

    @property
    def wide(self) -> tuple[str, ...]:
        """Gradients of q, k and v that are summed over batch axes."""
        return tuple(f"d{name}" for name in ("q", "k", "v") if self._lacks_axes(name))

    def fold(self, name: str, result: Array) -> Array:
        """A result for these arrays as that for the natural ones: summed over the axes that what it is of lacks."""
        is_result = name in (*OUTPUTS, *ROW_REDUCTIONS)
        model = name if is_result else name[1:]
        if model not in OWN_AXES:
            return result
        if is_result:
            return result.reshape(*self.axes, *result.shape[1:])
        shape = self.natural[model].shape
        if self._stays(model):
            return result.reshape(shape)
        batch_axes = batch_axes_of(model, shape, len(self.axes))
        short = tuple(axis for axis, n in enumerate(batch_axes) if n == 1)
        return result.reshape(*self.axes, *result.shape[1:]).sum(axis=short, dtype=result.dtype).reshape(shape)

    def rounded(self, name: str, result: Array) -> Array:
        """A folded result in the dtype that it has for the natural arrays."""
        model = self.natural.get(name[1:])
        return result if model is None else result.astype(model.dtype)

    def _stays(self, name: str) -> bool:
        """Whether an array has no axis for the batch."""
        if name not in BY_NAME:
            return False
        has_no_batch_axes = self.natural[name].ndim <= OWN_AXES[name]
        return BY_NAME[name].lacks_batch or (BY_NAME[name].may_lack_batch and has_no_batch_axes)

    def _lacks_axes(self, name: str) -> bool:
        return batch_axes_of(name, self.natural[name].shape, len(self.axes)) != self.axes

    def _spread(self, name: str, array: Array) -> Array:
        own = array.shape[max(array.ndim - OWN_AXES[name], 0) :]
        if self._stays(name):
            return array.reshape(own)
        if name == "bias" and self._lacks_axes(name) and array.dtype.itemsize == 2:
            array = array.astype(np.float32)
        whole = np.broadcast_to(array, (*self.axes, *own))
        return np.ascontiguousarray(whole).reshape(math.prod(self.axes), *own)
