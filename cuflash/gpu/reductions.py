"""Reductions of the attention weights of CuPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.arrays.array_info import FLOAT8
from cuflash.arrays.dlpack import module_of, on_device
from cuflash.gpu import backend
from cuflash.gpu.row_sums import PartialRowSums
from cuflash.gpu.tuning import Tuning
from cuflash.spec.binding import Contiguous
from cuflash.spec.options import Options
from cuflash.spec.passes import Pass
from cuflash.spec.reductions import widened


def compute(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int) -> tuple[Any, ...]:
    """The results of a reduction; `count` is how many keys `TOP_KEYS` finds of a row."""
    xp = module_of(arrays["lse"])
    results = {name: xp.empty(*of_result) for name, of_result in _results(pass_, arrays, *count).items()}
    options, taken, sums = _as_kernels_take(pass_, options, {**arrays, **results})
    return backend.run_pass(pass_, options, taken, pass_.default, (0, 0), sums)


def plan(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int) -> backend.Plans:
    """The plan of a reduction; `count` is that of `TOP_KEYS`."""
    options, taken, _ = _as_kernels_take(pass_, options, arrays)
    results = {name: Contiguous(*of_result) for name, of_result in _results(pass_, arrays, *count).items()}
    plans: dict[str, Any] = {pass_.name: backend.planned(pass_, options, taken | results, pass_.default)}
    return backend.Plans(**plans)


def compile(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int) -> None:
    """Compile and load the kernels of a reduction, by running it once."""
    compute(pass_, options, arrays, *count)


def tune(pass_: Pass, options: Options, arrays: Mapping[str, Any], *count: int, **how: Any) -> Tuning | None:
    """Tune a reduction, or forget what tuning found."""
    options, taken, _ = _as_kernels_take(pass_, options, arrays)
    with on_device(arrays["q"]):
        tuning: Any = backend.tuned(pass_, options, taken, results=_results(pass_, arrays, *count), **how)
    return None if tuning is None else Tuning(**{pass_.name: tuning})


def plan_gradients(
    options: Options, arrays: dict[str, Any], need: tuple[str, ...], passes: tuple[Pass, ...]
) -> backend.Plans:
    """The plans of the gradients of column sums, by passes over values (`cuflash.spec.reductions`)."""
    return backend.Plans(column_sums_backward=backend.plan(options, arrays, need, passes))


def tune_gradients(options: Options, arrays: dict[str, Any], **how: Any) -> Tuning | None:
    """Tune these passes, or forget what tuning found."""
    tuning = backend.tune(options, arrays, **how)
    return None if tuning is None else Tuning(column_sums_backward=tuning)


def _results(pass_: Pass, arrays: Mapping[str, Any], *count: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of those results for which a call makes arrays: of all others they follow from the inputs."""
    shape = (*arrays["lse"].shape, *count)
    dtypes = (np.dtype(np.int32), arrays["lse"].dtype)
    return {name: (shape, dtype) for name, dtype in zip(pass_.default, dtypes, strict=True)} if count else {}


def _as_kernels_take(
    pass_: Pass, options: Options, arrays: Mapping[str, Any]
) -> tuple[Options, dict[str, Any], PartialRowSums | None]:
    """Options and arrays as the kernels of a reduction take them, and row sums, if q and k are a slice of a problem."""
    if "block_table" in arrays:
        raise NotImplementedError(
            f"block_table: got one for {pass_} on the GPU, expected None: gather the pages of each batch entry into "
            "contiguous k"
        )
    taken, sums = dict(arrays), None
    if "row_sums" in taken:
        sums = PartialRowSums(taken, taken.pop("row_sums"))
    if any(taken[name].dtype.name in FLOAT8 for name in ("q", "k")):  # the kernels recompute weights of wider numbers
        taken = widened(options, taken)
        taken["v"] = taken["k"][..., :0]
        options = replace(options, precision="highest")  # which is that of float32 arrays of the caller
    return options, taken, sums
