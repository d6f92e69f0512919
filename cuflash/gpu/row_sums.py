"""Row sums of a backward pass over some keys of a problem: kernels find them, and those of all keys replace them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.array_info import numpy_dtype
from cuflash.plan import LaunchPlan
from cuflash.spec import row_sums


class PartialRowSums:
    """The row sums that the first kernels of a backward pass over some keys find (`cuflash.spec.row_sums`).

    Either the host reads them, as `found`, or `of_all_keys` replace them before the other kernels read them.
    """

    def __init__(self, arrays: Mapping[str, Any], of_all_keys: Any = None) -> None:
        q, self.lse, self.of_all_keys = arrays["q"], arrays["lse"], of_all_keys
        self.starts = None if arrays.get("cu_seqlens_q") is None else dlpack.on_host(arrays["cu_seqlens_q"])
        self.is_large = row_sums.is_large(dlpack.on_host(self.lse), row_sums.bound_of(q.dtype, on_device=True))
        self.found = row_sums.full(self.lse.shape, row_sums.ABSENT)

    def run(self, plan: LaunchPlan, launch: Callable[[slice], None], scratch: Any) -> None:
        """Launch the kernels of a pass, or only those that find row sums. `launch` launches some of the kernels."""
        kernels = [spec for spec in plan.kernels if spec.grid]
        at = next((i for i, spec in enumerate(kernels) if spec.source == "helpers/backward_preprocess.cu"), None)
        first = 0 if at is None else at + 1
        launch(slice(first))
        if at is not None:
            self._exchange(plan, dict(kernels[at].defines), scratch)
        if self.of_all_keys is not None:
            launch(slice(first, None))

    def _exchange(self, plan: LaunchPlan, defines: Mapping[str, Any], scratch: Any) -> None:
        """Read the row sums that the kernels left in their scratch memory, or replace them."""
        cupy = importlib.import_module("cupy")
        layout, dtype = plan.scratch_layout, numpy_dtype(plan.problem.softmax_dtype)
        is_natural = plan.problem.dtype in ("float32", "float64") or defines["CUFLASH_NATURAL_SCORES"]
        unit = 1.0 if is_natural else math.log(2)
        shape = (*self.lse.shape[:-1], plan.run_time.stats_rows, 2)
        on_device = cupy.ndarray(shape, dtype, scratch + layout.offsets[layout.names.index("row_sums")])
        row_indices = self._row_indices(defines["CUFLASH_STATS_BLOCK"])
        large, at = self.is_large[..., : len(row_indices)], (..., cupy.asarray(row_indices), slice(None))
        if self.of_all_keys is None:
            row_max, inverse = np.moveaxis(dlpack.on_host(on_device[at]).astype(np.float64), -1, 0)
            sums = np.stack([row_max, 1 / inverse, np.full_like(row_max, unit)], axis=-1)
            self.found[..., : len(row_indices), :][large] = sums[large]
        else:
            sums = row_sums.in_units(dlpack.on_host(self.of_all_keys), unit, dtype)[..., : len(row_indices), :]
            has_sum = cupy.asarray((large & (sums[..., 1] >= 0))[..., None])
            on_device[at] = cupy.where(has_sum, cupy.asarray(sums.astype(dtype)), on_device[at])

    def _row_indices(self, block: int) -> Any:
        """Where the kernels keep the rows: each packed sequence begins a block (common/schedule/schedule.cuh)."""
        if self.starts is None:
            return np.arange(self.lse.shape[-1])
        starts, counts = self.starts[:-1], np.diff(self.starts)
        firsts = (starts // block + np.arange(len(starts))) * block - starts
        return np.arange(self.starts[-1]) + np.repeat(firsts, counts)
