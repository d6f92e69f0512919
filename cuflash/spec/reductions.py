"""Calls that reduce the attention weights: over the queries of each key, and to the strongest keys of each query.

Such a call has no values. Its weights are ``P = exp(S - lse)``, those before dropout, as lse is. What multiplies the
rows of a column sum is in the place of dlse: a column sum is the gradient with respect to a number that is added to all
scores of the column, and dS is P times dlse where there are no values.

It is dv as well, of one column of values for each query head that shares a key/value head: ``dv_j = sum_i P_ij dout_i``
with the row's factor in the column of its own head, and zeros in the others. So the backward pass has the gradients:
with the gradients of the sums as those columns of v, dP is the factor of the row times the gradient of the column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cuflash.arrays.array_info import FLOAT8, check_array, check_byte_order, softmax_dtype_of
from cuflash.arrays.checks import as_integer, counted, value_error
from cuflash.arrays.dlpack import module_of
from cuflash.spec.backends import Computes
from cuflash.spec.batch_axes import as_one_call, shape_of_lse
from cuflash.spec.call import Backend, Call, prepare
from cuflash.spec.inputs import INPUTS, OptionalArrays
from cuflash.spec.options import Options
from cuflash.spec.outputs import GRADIENTS, OUTPUTS
from cuflash.spec.passes import BACKWARD, COLUMN_MAX, COLUMN_SUMS, FORWARD, TOP_KEYS, Pass
from cuflash.spec.quantization import dequantize
from cuflash.spec.results import check_need, needed
from cuflash.spec.rewrites import equivalent
from cuflash.spec.score_args import check_names_of_method, checked_with_score_args
from cuflash.spec.streamed import Streamed, StreamedPair

if TYPE_CHECKING:
    from cuflash.spec.inputs import ScoreGradients

    class ColumnGradients(ScoreGradients[Any, Any, Any]):
        """The gradients of column sums: those of `backward`, then dlse and dweights."""

        dlse: Any
        dweights: Any


Array = Any  # of NumPy or CuPy
HALVES = ("float16", "bfloat16")
MOST_KEYS = 64  # of a row, that `top_keys` returns
OF_COLUMN_SUMS = ("dlse", "dweights")  # gradients that column sums have besides those of `backward`
NOT_OF_COLUMN_SUMS = ("dv", "dsinks")  # and those of `backward` that they have not: sinks act through lse alone
# What a method takes or gives besides what others do: arrays of functions, and their gradients, have other names.
OWN_ARGUMENTS = {
    "column_sums": ("weights", *COLUMN_SUMS.default),
    "column_max": COLUMN_MAX.default,
    "top_keys": ("count", *TOP_KEYS.default),
    "column_sums_backward": ("weights", "dsums", *OF_COLUMN_SUMS),
}
WIDE_COLUMNS = 8  # columns of values on a GPU, so that rows of 16-bit numbers have 16 bytes


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
    without_values = {**arrays, "k": keys_of(arrays["k"]), "v": None}
    call = prepare(replace(options, dropout=0.0), without_values, (*INPUTS, "lse"), (), rewrites=False)
    rewrite = equivalent(call.options, call.given)
    options, given = (call.options, call.given) if rewrite is None else (rewrite.options, rewrite.arrays(call.given))
    given = {name: x for name, x in given.items() if x is not None}
    weights = given.pop("weights", None) if method == "column_sums" else None  # else a function may read such an array
    if weights is not None:
        check_weights(weights, given["lse"])
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
    """The arrays, of which those in half precision are float32, and those of fp8 have the dtype of the softmax."""
    wide, dtype = dict(arrays), "float64" if arrays["q"].dtype == np.float64 else "float32"
    layout: Any = options.layout
    for name, x in arrays.items():
        if x.dtype.name in FLOAT8:
            wide[name] = dequantize(x, arrays.get(f"{name}_scale"), dtype=dtype, layout=layout)
        elif x.dtype.name in HALVES:
            wide[name] = x.astype(np.float32)
    return {name: x for name, x in wide.items() if name not in ("q_scale", "k_scale", "v_scale")}


def checked_of_reduction(method: str, options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """The optional inputs of a method, and what its functions read, by name; None for those that are not given."""
    check_names_of_method(method, options, OWN_ARGUMENTS[method])
    return checked_with_score_args(method, OptionalArrays, options, given)


def check_weights(weights: Array, lse: Array) -> None:
    """Check the factors of queries."""
    check_array("weights", weights, tuple(lse.shape), lse.dtype.name)
    check_byte_order("weights", weights.dtype)


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


def dout_from_factors(factors: Array, group: int, columns: int, layout: str, dtype: Any) -> Array:
    """dout: the factor of each row in the column of its head within the group, and zeros."""
    by_group = _by_group(factors, group)
    whole = module_of(factors).zeros((*by_group.shape, columns), factors.dtype)
    for head in range(group):
        whole[..., head, :, head] = by_group[..., head, :]
    return _as_caller(whole.reshape(*_with_heads(factors).shape, columns), factors.ndim > 1, layout, dtype)


def v_from_sums(sums: Array, group: int, columns: int, layout: str, dtype: Any) -> Array:
    """v: a column of values for each query head that shares the key/value head, and zeros up to so many columns."""
    by_group = _by_group(sums, group)
    *others, _, keys = by_group.shape
    whole = module_of(sums).zeros((*others, keys, columns), sums.dtype)
    whole[..., :group] = by_group.swapaxes(-2, -1)
    return _as_caller(whole, sums.ndim > 1, layout, dtype)


def sums_from_dv(dv: Array, group: int, layout: str) -> Array:
    """The sums (..., heads, keys) of `v_from_sums`."""
    sums = _by_heads(dv, layout)[..., :group].swapaxes(-2, -1)
    if dv.ndim < 3:
        return sums[0]
    *others, heads_kv, _, keys = sums.shape
    return sums.reshape(*others, heads_kv * group, keys)


def rows_from_out(out: Array, group: int, layout: str) -> Array:
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


@np.errstate(all="ignore")
def _as_caller(x: Array, has_heads: bool, layout: str, dtype: Any) -> Array:
    x = _by_heads(x, layout) if has_heads else x[0]
    return module_of(x).ascontiguousarray(x).astype(dtype)


def gradients_wanted(
    options: Options, given: Mapping[str, Any], need: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The gradients that `backward` has, too, and those that only column sums have, each in their order.

    `given` are the optional inputs by name, and what functions read.
    """
    of_functions = options.score_gradients
    check_need(need, (*(x for x in GRADIENTS if x not in NOT_OF_COLUMN_SUMS), *of_functions, *OF_COLUMN_SUMS))
    of_scores = [name for name in need if name not in OF_COLUMN_SUMS]
    names = needed(of_scores, {**given, **options.numbers}, {}, of_functions)
    return names, tuple(name for name in OF_COLUMN_SUMS if name in need)


class ColumnSums:
    """The gradients of column sums as passes over values, by a backend of the arrays of a call."""

    def __init__(self, call: Call, backend: Computes) -> None:
        inputs = dict(call.arrays)
        if inputs.get("block_table") is not None:
            raise NotImplementedError(
                "block_table: got one for column_sums_backward, expected None: gradients are not given in pages; "
                "gather the pages of each batch entry into contiguous k"
            )
        lse, weights, dsums = inputs.pop("lse"), inputs.pop("weights", None), inputs.pop("dsums")
        k, xp = inputs["k"], module_of(inputs["q"])
        streamed = k if isinstance(k, Streamed) else None
        k = k if streamed is None else streamed.array
        if k.dtype.name in FLOAT8:
            raise NotImplementedError(
                f"k: got dtype {k.dtype} for column_sums_backward, expected numbers of at least 16 bits: give "
                "cuflash.dequantize(k, k_scale)"
            )
        self.layout, self.lse = call.options.layout, lse
        check_array("lse", lse, shape_of_lse(self.layout, inputs), softmax_dtype_of(inputs["q"].dtype.name))
        check_byte_order("lse", lse.dtype)
        self.group = group_of(k, lse, self.layout)
        self.columns = self.group if xp is np else -(-self.group // WIDE_COLUMNS) * WIDE_COLUMNS
        keys = k.shape[-3 if self.layout == "bshd" and k.ndim > 2 else -2]
        check_array("dsums", dsums, (*lse.shape[:-1], keys), lse.dtype.name)
        check_byte_order("dsums", dsums.dtype)
        if weights is not None:
            check_weights(weights, lse)
        self.factors = xp.ones(lse.shape, lse.dtype) if weights is None else weights
        v = v_from_sums(dsums, self.group, self.columns, self.layout, k.dtype)
        self.inputs = {**inputs, "v": v if streamed is None else streamed.with_array(v)}
        self.call, self.backend = call, backend

    def passes(self, of_columns: tuple[str, ...]) -> tuple[Pass, ...]:
        """The passes over values that make them."""
        return (*((FORWARD,) if of_columns else ()), *((BACKWARD,) if self.call.need else ()))

    @property
    def given(self) -> dict[str, Any]:
        """The arrays of these passes, without results of the forward pass."""
        dout = dout_from_factors(self.factors, self.group, self.columns, self.layout, self.inputs["q"].dtype)
        return {**self.inputs, "dout": dout}

    @np.errstate(all="ignore")
    def gradients(self, of_columns: tuple[str, ...]) -> list[Any]:
        """The gradients of the call, which the passes make, and those `of_columns` (dlse, dweights)."""
        results: list[Any] = []
        if self.call.need:
            given = self.given
            row_arrays = {"lse": self.lse, "out": module_of(given["q"]).zeros_like(given["dout"])}
            arrays = {**given, **row_arrays, **self._absent("dlse")}
            results += self.backend.compute(BACKWARD, self.call.options, arrays, self.call.need)
        if of_columns:
            means = self._means()
            results += [self._of_lse(means) if name == "dlse" else means for name in of_columns]
        return results

    def _of_lse(self, means: Array) -> Array:
        """dlse; 0 in rows that attend to no key, whatever their factors are."""
        return module_of(means).where(self.lse == -np.inf, 0, -self.factors * means)

    def _absent(self, *names: str) -> dict[str, None]:
        """Absent arrays, which the GPU backend needs as None and the others do without."""
        return dict.fromkeys(names) if self.call.backend == "cupy" else {}

    def _means(self) -> Array:
        """``sum_j P[i, j] * dsums[j]`` of each row."""
        arrays = {**self.inputs, **self._absent("out", "lse")}
        out, lse = self.backend.compute(FORWARD, self.call.options, arrays, OUTPUTS)
        xp, means = module_of(out), rows_from_out(out, self.group, self.layout).astype(self.lse.dtype)
        is_empty = self.lse == -xp.inf
        return xp.where(is_empty, 0, means * xp.exp(xp.where(is_empty, -xp.inf, lse) - xp.where(is_empty, 0, self.lse)))
