"""Calls that reduce the attention weights: over the queries of each key, and to the strongest keys of each query.

Such a call has no values. Its weights are ``P = exp(S - lse)``, those before dropout, as lse is. What multiplies the
rows of a column sum is in the place of dlse: a column sum is the gradient with respect to a number that is added to all
scores of the column, and dS is P times dlse where there are no values.

It is dv as well, of one column of values for each query head that shares a key/value head: ``dv_j = sum_i P_ij dout_i``
with the row's factor in the column of its own head, and zeros in the others. So the backward pass has the gradients:
with the gradients of the sums as those columns of v, dP is the factor of the row times the gradient of the column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuflash.arrays.array_info import FLOAT8, check_array, check_byte_order
from cuflash.arrays.checks import as_integer, counted, value_error
from cuflash.arrays.dlpack import module_of
from cuflash.spec.batch_axes import as_one_call
from cuflash.spec.call import Backend, prepare
from cuflash.spec.inputs import INPUTS
from cuflash.spec.options import Options
from cuflash.spec.quantization import dequantize
from cuflash.spec.rewrites import equivalent
from cuflash.spec.streamed import Streamed, StreamedPair

Array = Any  # of NumPy or CuPy
HALVES = ("float16", "bfloat16")
MOST_KEYS = 64  # of a row, that `top_keys` returns


class Reduction(NamedTuple):
    """A call as a backend computes it: with at most one batch axis, and options in place of functions."""

    backend: Backend
    options: Options
    arrays: dict[str, Any]
    lengths: tuple[int, ...] | None  # of the caller's batch axes, where they became one
    imported: Any  # the caller's library; None where its arrays are those of the backend
    imported_keys: Any  # the same of results that lie over the keys
    has_heads: bool = True  # without, the caller's arrays are matrices, which a batch axis gives an axis of heads

    @property
    def module(self) -> ModuleType:
        """NumPy or CuPy."""
        return module_of(self.arrays["q"])

    def exported(self, x: Array, *, of_keys: bool = False) -> Any:
        """A result, whose first axis is the batch, as the caller gets it."""
        if self.lengths is not None:
            x = x.reshape(*self.lengths, *x.shape[1 if self.has_heads else 2 :])
        imported = self.imported_keys if of_keys else self.imported
        return x if imported is None else imported.export(x, None)


def prepare_reduction(method: str, options: Options, arrays: Mapping[str, Any]) -> Reduction:
    """The call on the arrays of the caller by name: q, k, lse, weights or None, and the optional inputs."""
    own = {**arrays, "k": keys_of(arrays["k"]), "v": None}
    call = prepare(replace(options, dropout=0.0), own, (*INPUTS, "lse"), (), rewrites=False)
    rewrite = equivalent(call.options, call.given)
    options, given = (call.options, call.given) if rewrite is None else (rewrite.options, rewrite.arrays(call.given))
    given = {name: x for name, x in given.items() if x is not None}
    weights = given.pop("weights", None) if method == "column_sums" else None  # else a function may read such an array
    if weights is not None:
        check_array("weights", weights, tuple(given["lse"].shape), given["lse"].dtype.name)
        check_byte_order("weights", weights.dtype)
        given["dlse"] = weights
    streamed = {name: x for name, x in given.items() if isinstance(x, Streamed)}
    hosts = {name: x.array for name, x in streamed.items()}
    own_keys = streamed["k"].imported if streamed else call.imported
    one = as_one_call(options, given | hosts, (), module_of(given["q"]))
    if one is None:
        return Reduction(call.backend, options, given, None, call.imported, own_keys)
    lengths, has_heads = one.axes.lengths, given["lse"].ndim > 1 + len(one.axes.lengths)
    inputs = one.inputs((0,) * len(lengths))
    inputs |= {name: x.with_array(inputs[name]) for name, x in streamed.items()}
    return Reduction(call.backend, options, inputs, lengths, call.imported, own_keys, has_heads)


def keys_of(k: Any) -> Any:
    """The keys of a call without values, which takes those of `cuflash.streamed` as it returns them, too."""
    return k.k if isinstance(k, StreamedPair) else k


def checked_count(count: Any) -> int:
    """How many keys of a row are wanted."""
    wanted = as_integer("count", count)
    if not 1 <= wanted <= MOST_KEYS:
        raise value_error("count", wanted, f"1 to {MOST_KEYS}")
    return wanted


def widened(options: Options, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, of which those of 16 bits are float32, and those of fp8 have the dtype of the softmax."""
    found, dtype = dict(arrays), "float64" if arrays["q"].dtype == np.float64 else "float32"
    layout: Any = options.layout
    for name, x in arrays.items():
        if x.dtype.name in FLOAT8:
            found[name] = dequantize(x, arrays.get(f"{name}_scale"), dtype=dtype, layout=layout)
        elif x.dtype.name in HALVES:
            found[name] = x.astype(np.float32)
    return {name: x for name, x in found.items() if name not in ("q_scale", "k_scale", "v_scale")}


# ---- column sums as gradients of values ------------------------------------------------------------------------------


def group_of(k: Array, rows: Array, layout: str) -> int:
    """How many query heads share a key/value head, by the shapes of k and of lse."""
    if rows.ndim < 2:
        return 1
    heads_kv = 1 if k.ndim < 3 else k.shape[-2 if layout == "bshd" else -3]
    heads = rows.shape[-2]
    if heads % heads_kv if heads_kv else heads:
        raise value_error("k", counted(heads_kv, "head"), f"a divisor of the {counted(heads, 'head')} of q")
    return max(1, heads // heads_kv) if heads_kv else 1


def as_rows_of_values(factors: Array, group: int, columns: int, layout: str, dtype: Any) -> Array:
    """dout: the factor of each row in the column of its head within the group, and zeros."""
    by_group = _by_group(factors, group)
    whole = module_of(factors).zeros((*by_group.shape, columns), factors.dtype)
    for head in range(group):
        whole[..., head, :, head] = by_group[..., head, :]
    return _as_caller(whole.reshape(*_with_heads(factors).shape, columns), factors.ndim > 1, layout, dtype)


def as_values(sums: Array, group: int, columns: int, layout: str, dtype: Any) -> Array:
    """v: a column of values for each query head that shares the key/value head, and zeros up to so many columns."""
    by_group = _by_group(sums, group)
    *others, _, keys = by_group.shape
    whole = module_of(sums).zeros((*others, keys, columns), sums.dtype)
    whole[..., :group] = by_group.swapaxes(-2, -1)
    return _as_caller(whole, sums.ndim > 1, layout, dtype)


def of_values(dv: Array, group: int, layout: str) -> Array:
    """The sums (..., heads, keys) of `as_values`."""
    sums = _by_heads(dv, layout)[..., :group].swapaxes(-2, -1)
    if dv.ndim < 3:
        return sums[0]
    *others, heads_kv, _, keys = sums.shape
    return sums.reshape(*others, heads_kv * group, keys)


def of_rows(out: Array, group: int, layout: str) -> Array:
    """The column (..., heads, seqlen_q) of each row that belongs to its head."""
    whole = _by_heads(out, layout)
    if out.ndim < 3:
        return whole[..., 0]
    *others, heads, rows, _ = whole.shape
    by_group = whole.reshape(*others, heads // group, group, rows, whole.shape[-1])
    columns = [by_group[..., head, :, head] for head in range(group)]
    return module_of(out).stack(columns, axis=-2).reshape(*others, heads, rows)


def _by_heads(x: Array, layout: str) -> Array:
    return x.swapaxes(-3, -2) if layout == "bshd" and x.ndim > 2 else x


def _with_heads(x: Array) -> Array:
    return x if x.ndim > 1 else x[None]


def _by_group(x: Array, group: int) -> Array:
    x = _with_heads(x)
    return x.reshape(*x.shape[:-2], x.shape[-2] // group, group, x.shape[-1])


def _as_caller(x: Array, has_heads: bool, layout: str, dtype: Any) -> Array:
    x = _by_heads(x, layout) if has_heads else x[0]
    return module_of(x).ascontiguousarray(x).astype(dtype)
