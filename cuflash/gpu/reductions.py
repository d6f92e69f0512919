"""Reductions of the attention weights of CuPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash.arrays.array_info import FLOAT8
from cuflash.arrays.dlpack import module_of
from cuflash.gpu import backend
from cuflash.spec.options import Options
from cuflash.spec.passes import COLUMN_MAX, COLUMN_SUMS, TOP_KEYS, Pass
from cuflash.spec.reductions import widened


def column_sums(options: Options, arrays: Mapping[str, Any]) -> Any:
    """The sum of the weights of each column, each times dlse of its row if that is given; per query head."""
    return _run(COLUMN_SUMS, options, arrays)[0]


def column_max(options: Options, arrays: Mapping[str, Any]) -> Any:
    """The largest weight of each column, 0 of a key that no query attends to; per query head."""
    return _run(COLUMN_MAX, options, arrays)[0]


def top_keys(options: Options, arrays: Mapping[str, Any], count: int) -> tuple[Any, Any]:
    """Indices and weights of the keys with the largest weights of each row, the largest first; else -1 and 0."""
    lse, xp = arrays["lse"], module_of(arrays["lse"])
    shape = (*lse.shape, count)
    results = {"key_indices": xp.empty(shape, "int32"), "key_weights": xp.empty(shape, lse.dtype)}
    indices, weights = _run(TOP_KEYS, options, {**arrays, **results})
    return indices, weights


def _run(pass_: Pass, options: Options, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    if "block_table" in arrays:
        raise NotImplementedError(
            f"block_table: got one for {pass_} on the GPU, expected None: gather the pages of each batch entry into "
            "contiguous k"
        )
    given, sums = dict(arrays), None
    if "row_sums" in given:  # of a problem that q and k are a slice of
        sums = backend.PartialRowSums(given, given.pop("row_sums"))
    if any(given[name].dtype.name in FLOAT8 for name in ("q", "k")):  # the kernels recompute weights of wider numbers
        given = widened(options, given)
        given["v"] = given["k"][..., :0]
    return backend._call(pass_, options, given, pass_.default, (0, 0), sums)
