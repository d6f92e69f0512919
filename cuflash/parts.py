"""Calls on some queries and some keys of a longer problem, by the functions that compute whole calls.

What pairs are visible, which weights are dropped and how far a key is from a query follow from the places that rows
have in the whole. Everything is seen as (batch, heads, rows, ...) here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from cuflash import host
from cuflash.binding import INPUTS
from cuflash.interop import module_of
from cuflash.operands import numpy_dtype
from cuflash.options import Options
from cuflash.problem import Problem
from cuflash.spans import Band, Span
from cuflash.terms import DEFAULT_NEED, GRADIENTS, NAMES, OF_HEADS

Array = Any
_OF_BATCH = (*INPUTS, "dout", "out", "lse", "dlse", *DEFAULT_NEED)  # arrays with an axis of the batch, and of rows


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A problem that is computed part by part."""

    options: Options  # those of the whole
    band: Band  # which keys a query of the whole sees
    problem: Problem  # the dtypes and heads of this one are those of the whole
    random: tuple[int, int]  # seed and offset of dropout
    arrays: Mapping[str, Array]  # by name, None where there is none
    is_fixed: bool = False  # calls get copies of arrays, which lie in memory in one way
    starts: tuple[Array, Array] | None = None  # of packed sequences that are whole, cu_seqlens_q and cu_seqlens_k

    @property
    def xp(self) -> Any:
        return module_of(self.arrays["q"])

    @property
    def is_on_cpu(self) -> bool:
        """Whether results are as precise as the arrays of a call are."""
        return self.xp is np

    @property
    def backend(self) -> ModuleType:
        return host if self.is_on_cpu else importlib.import_module("cuflash.launch")

    def options_of(self, queries: Span, keys: Span) -> Options:
        """Those of a call on a part: its diagonal, and what dropout counts, are those of the whole."""
        if self.starts is not None:
            return replace(self.options, layout="bhsd")
        band = self.band
        bounds = None if band.left is None and band.right is None else (band.left, band.right)
        diagonal = queries[0] + band.diagonal - keys[0]
        origin = (queries[0], keys[0]) if self.options.dropout else (0, 0)
        return replace(self.options, causal=False, window=bounds, layout="bhsd", diagonal=diagonal, origin=origin)

    def forward(self, queries: Span, keys: Span, arrays: dict[str, Array]) -> dict[str, Array]:
        """out and lse of a part; out in the dtype of the softmax if it has room in this dtype."""
        of_call = dict.fromkeys((*NAMES, "out", "lse")) | arrays
        options = self._widening("out", self.options_of(queries, keys), arrays)
        found = self.backend.forward(options, self._packed(of_call), self.random)
        return self._unpacked(dict(zip(("out", "lse"), found, strict=True)))

    def backward(self, queries: Span, keys: Span, need: tuple[str, ...], arrays: dict[str, Array]) -> dict[str, Array]:
        """The gradients `need` of a part; dq in the dtype of the softmax if it has room in this dtype."""
        of_call: dict[str, Any] = dict.fromkeys((*NAMES, "dlse")) | arrays
        del of_call["block_table"]
        ordered = tuple(name for name in GRADIENTS if name in need)
        results = {name: arrays.get(name) for name in ordered}
        options = self._widening("dq", self.options_of(queries, keys), arrays)
        found = self.backend.backward(options, self._packed(of_call | results), ordered, self.random)
        return self._unpacked(dict(zip(ordered, found, strict=True)))

    def _packed(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The arrays of a call, of packed sequences without the axis of the batch."""
        if self.starts is None:
            return arrays
        of_batch = {name: x[0] for name, x in arrays.items() if name in _OF_BATCH and x is not None}
        return arrays | of_batch | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.starts, strict=True))

    def _unpacked(self, results: dict[str, Array]) -> dict[str, Array]:
        """The results of a call, with the axis of the batch again."""
        if self.starts is None:
            return results
        return {name: x[None] if name in _OF_BATCH else x for name, x in results.items()}

    def _widening(self, name: str, options: Options, arrays: Mapping[str, Array]) -> Options:
        """The options of a call that gives a result as its room is."""
        room = arrays.get(name)
        return options if room is None or room.dtype == arrays["q"].dtype else replace(options, wide=(name,))

    def into(
        self,
        results: dict[str, Array],
        arrays: dict[str, Array],
        call: Callable[[dict[str, Array]], dict[str, Array]],
        *,
        is_wide: bool = False,
    ) -> dict[str, Array]:
        """Have a call fill some arrays: directly, or by a copy where it computes on copies.

        These lie in memory in one way, or, if the call `is_wide`, have the dtype of the softmax.
        """
        is_wide = is_wide and self.problem.dtype != self.problem.softmax_dtype
        if not self.is_fixed and not is_wide:
            return call(arrays | results)
        if is_wide:
            arrays = {name: self.widened(x) for name, x in arrays.items()}
        got = call({name: self.xp.ascontiguousarray(x) for name, x in arrays.items()})
        for name, into in results.items():
            into[...] = got[name]
        return got

    @property
    def softmax_dtype(self) -> np.dtype[Any]:
        """The dtype of the softmax, in which parts are added."""
        return numpy_dtype(self.problem.softmax_dtype)

    def widened(self, array: Array) -> Array:
        """An array of the dtype of the inputs in that of the softmax; any other as it is."""
        return array.astype(self.softmax_dtype) if array.dtype.name == self.problem.dtype else array

    def of_heads(self, q_heads: slice, *, of_softmax: bool) -> dict[str, Array]:
        """The terms that have a number for each query head, those of the softmax if it is to have them."""
        rows = (term for term in OF_HEADS if of_softmax or term.part_of != "softmax")
        return {x.name: self.arrays[x.name][..., q_heads] for x in rows if self.arrays.get(x.name) is not None}

    def lengths(self, keys: Span) -> dict[str, Array]:
        """How many keys of a span there are in each batch entry."""
        lengths = self.arrays.get("kv_lengths")
        return {} if lengths is None else {"kv_lengths": self.xp.clip(lengths - keys[0], 0, keys[1] - keys[0])}
