"""One pass over chunks of keys: partial outputs are merged, partial dq are added, dk and dv of a chunk are whole.

Sums always have the dtype of the softmax; partial results have it if calls can give them so. They are added in the
order of the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.memory_ranges import Span
from cuflash.shards.cuda import Cuda
from cuflash.shards.partial_results import LargeRows, RunningMerge
from cuflash.shards.reductions import RunningReductions, merge_top_keys
from cuflash.shards.slices import Slices
from cuflash.spec import row_sums
from cuflash.spec.inputs import INPUTS, MOVABLE_BROADCAST, NAMES
from cuflash.spec.outputs import OF_QUERIES, ROW_REDUCTIONS, SOFTMAX_GRADIENTS, gradient_of
from cuflash.spec.passes import FORWARD, Pass
from cuflash.spec.streamed import OF_KEYS
from cuflash.streaming.chunks import Chunk
from cuflash.streaming.copy_pipeline import Drain, Feed, Host

Array = Any


class ChunkStep(NamedTuple):
    """A chunk that is on the device, and the arrays for its gradients."""

    number: int
    chunk: Chunk
    keys: dict[str, Array]  # k and v, and their tangents
    buffers: dict[str, Array]  # dk and dv, or their tangents


@dataclass(frozen=True, kw_only=True)
class StreamedPass:
    """A pass over keys in host memory."""

    pass_: Pass
    slices: Slices
    chunks: tuple[Chunk, ...]
    keys: Mapping[str, Host]  # k and v, and their tangents, as (batch, heads, rows, dim)
    device: Cuda | None  # None: queries are in host memory, too
    is_mapped: bool = False  # kernels read the one chunk in host memory

    @property
    def arrays(self) -> Mapping[str, Array]:
        return self.slices.arrays

    @property
    def is_whole(self) -> bool:
        """Whether one call computes everything."""
        seqlen_q = self.arrays["q"].shape[2]
        return len(self.chunks) == 1 and self.chunks[0].queries == (0, seqlen_q)

    def forward(self, results: Mapping[str, Array]) -> None:
        """Fill out, with four axes, and the results of rows, with three: lse, and tangents or reductions."""
        if self.is_whole:
            for step in self._steps({}):
                arrays = self.arrays_of(step, of_softmax=True) | dict(results)
                self.slices.forward(*step.chunk, arrays, self.pass_, tuple(results))
            return
        xp, dtype = self.slices.xp, self.slices.softmax_dtype
        over_columns = [x for x in results.values() if x.ndim == 4]  # out, and tout
        totals = [x if x.dtype == dtype else xp.empty(x.shape, dtype) for x in over_columns]
        scores = self._scores_of_heads()
        merge = RunningMerge(totals[0], scores, *totals[1:])
        reductions = RunningReductions(results, [of_heads for of_heads, _ in scores])
        merged = [name for name in results if name not in reductions.results]
        buffers = {}
        if not self.slices.is_on_cpu:
            buffers = {name: xp.empty(x.shape, dtype) for name, x in results.items()}
        for step in self._steps({}):
            rows = slice(*step.chunk.queries)
            of_rows = {name: x[:, :, rows] for name, x in buffers.items()}
            call = functools.partial(self._call_forward, step.chunk, self.pass_, tuple(reductions.results))
            arrays = self.arrays_of(step, of_softmax=False)
            got = self.slices.into(of_rows, arrays, call, is_wide=self.slices.is_on_cpu)
            reductions.add(got, rows)
            merge.add(rows=rows, **{name: got[name] for name in merged})
        reductions.finish()
        merge.finish(**{name: results[name] for name in merged})
        if row_sums.has_large(dlpack.on_host(results["lse"]), self.slices.large_lse):
            self._merge_large(results)

    def _call_forward(
        self, chunk: Chunk, pass_: Pass, reductions: tuple[str, ...], arrays: dict[str, Array]
    ) -> dict[str, Array]:
        return self.slices.forward(*chunk, arrays, pass_, reductions)

    def _merge_large(self, results: Mapping[str, Array]) -> None:
        """Merge chunks again, in rows whose lse is so large that it does not say what a chunk weighs.

        It says nothing of maxima.
        """
        results = {name: x for name, x in results.items() if name != "max"}
        reductions = tuple(name for name in results if name in ROW_REDUCTIONS)
        out, lse = results["out"], results["lse"]
        merge = LargeRows(lse, self.slices.large_lse, out.shape[3], self._scores_of_heads())
        for step in self._steps({}):
            got = self._forward_of(step, self.pass_, reductions)
            sums = self._row_sums_of(step, lse, got.pop("lse"))
            merge.add(sums, slice(*step.chunk.queries), **got)
        merge.finish(**results)

    def _row_sums(self) -> Array:
        """The row sums over all chunks, where lse is large and that of these keys."""
        lse = self.arrays["lse"]
        merge = LargeRows(lse, self.slices.large_lse, 0, self._scores_of_heads())
        for step in self._steps({}):
            # Kernels find the row sums only of the lse of a chunk.
            own_lse = None if self.slices.is_on_cpu else self._forward_of(step, FORWARD)["lse"]
            merge.add(self._row_sums_of(step, lse, own_lse), slice(*step.chunk.queries))
        return row_sums.explaining(merge.sums, dlpack.on_host(lse))

    def _forward_of(self, step: ChunkStep, pass_: Pass, reductions: tuple[str, ...] = ()) -> dict[str, Array]:
        """out and lse of a chunk in the dtype of the softmax, with their tangents or with row reductions."""
        slices = self.slices
        arrays = self.arrays_of(step, of_softmax=False) if pass_.has_tangents else self._inputs_of(step)
        results = {}
        if not slices.is_on_cpu:
            of_lse = arrays["q"].shape[:3]
            of_out = (*of_lse, arrays["v"].shape[3])
            results = {
                name: slices.xp.empty(of_out if name.endswith("out") else of_lse, slices.softmax_dtype)
                for name in (*pass_.default, *reductions)
            }
        call = functools.partial(self._call_forward, step.chunk, pass_, reductions)
        return slices.into({}, arrays | results, call, is_wide=slices.is_on_cpu)

    def _row_sums_of(self, step: ChunkStep, lse: Array, own_lse: Array | None) -> Array:
        """The row sums over a chunk, of rows whose lse is large; on a device, those that its own lse does not say."""
        slices, arrays = self.slices, self._inputs_of(step)
        arrays["lse"] = lse[:, :, slice(*step.chunk.queries)] if slices.is_on_cpu else own_lse
        found = slices.into({}, arrays, functools.partial(slices.row_sums, *step.chunk), is_wide=slices.is_on_cpu)[
            "row_sums"
        ]
        return found if slices.is_on_cpu else row_sums.of_partial(found, dlpack.on_host(own_lse))

    def _inputs_of(self, step: ChunkStep) -> dict[str, Array]:
        """The arrays of a call that finds the weights of a chunk."""
        return {name: x for name, x in self.arrays_of(step, of_softmax=False).items() if name in (*INPUTS, *NAMES)}

    def backward(self, need: tuple[str, ...], results: Mapping[str, Array]) -> None:
        """Fill dq, dk, dv and dbias, which have four axes, and the other gradients, shaped as their arrays are.

        Or their tangents, if the pass makes these.
        """
        self._with_row_sums()._backward(need, results)

    def _backward(self, need: tuple[str, ...], results: Mapping[str, Array]) -> None:
        of_keys = {name: results[name] for name in OF_KEYS if name in need}
        self._clear_unseen(of_keys)
        sums = _Sums(self, [name for name in need if name not in OF_KEYS], results)
        chunks = self._chunks_of_maxima() if "dmax" in self.arrays and not self.is_whole else None
        for step in self._steps(of_keys):
            wanted = tuple(name for name in need if gradient_of(name) not in SOFTMAX_GRADIENTS or step.number == 0)
            if not wanted:
                break
            into = dict(step.buffers)
            is_wide = self.slices.is_on_cpu and not self.is_whole
            if sums.dq in need and not is_wide:
                into[sums.dq] = sums.buffer_of_dq(step.chunk)
            arrays = self.arrays_of(step, of_softmax=sums_softmax(wanted))
            if sums.adds_bias:
                arrays |= {name: self.slices.widened(arrays[name]) for name in ("bias", "tbias") if name in arrays}
            if not self.is_whole:
                arrays |= self.slices.summed_score_args(need)
            if chunks is not None:
                is_own = chunks[:, :, slice(*step.chunk.queries)] == step.number
                arrays["dmax"] = self.slices.xp.where(is_own, arrays["dmax"], 0)
            call = functools.partial(self.slices.backward, *step.chunk, wanted, pass_=self.pass_)
            sums.add(step.chunk, self.slices.into(into, arrays, call, is_wide=is_wide))
        sums.finish()

    def columns(self, result: Host) -> None:
        """Fill what a reduction over queries gives, (batch, num_heads, seqlen_k), in host memory."""
        whole, run = {"columns": result[..., None]}, self._with_row_sums()
        self._clear_unseen(whole)
        for step in self._steps(whole):
            (step.buffers["columns"][..., 0],) = run._reduced(step).values()

    def top_keys(self, indices: Array, weights: Array) -> None:
        """Fill indices and weights of the strongest keys, (batch, num_heads, seqlen_q, count) each."""
        indices[...], weights[...] = -1, 0
        run = self._with_row_sums()
        for step in self._steps({}):
            rows = slice(*step.chunk.queries)
            found = run._reduced(step, indices.shape[-1])
            own_indices, own_weights = found.values()
            own_indices = self.slices.xp.where(own_indices < 0, -1, own_indices + step.chunk.keys[0])
            merge_top_keys(indices[:, :, rows], weights[:, :, rows], own_indices, own_weights)

    def _with_row_sums(self) -> StreamedPass:
        """The same with the row sums of rows whose lse is large."""
        if self.is_whole or not row_sums.has_large(dlpack.on_host(self.arrays["lse"]), self.slices.large_lse):
            return self
        arrays = {**self.arrays, "row_sums": self._row_sums()}
        return replace(self, slices=replace(self.slices, arrays=arrays))

    def _reduced(self, step: ChunkStep, *count: int) -> dict[str, Array]:
        return self.slices.reduce(*step.chunk, self.arrays_of(step, of_softmax=False), self.pass_, count)

    def _chunks_of_maxima(self) -> Array:
        """The first chunk that has the largest score of each row: one of its keys gets the gradient of the maximum."""
        xp, shape, dtype = self.slices.xp, self.arrays["q"].shape[:3], self.slices.softmax_dtype
        found, largest = xp.zeros(shape, np.int32), xp.full(shape, -np.inf, dtype)
        without_values = replace(self, keys={"k": self.keys["k"], "v": self.keys["k"][..., :0]})
        for step in without_values._steps({}):
            rows = slice(*step.chunk.queries)
            own = without_values._forward_of(step, FORWARD, ("max",))["max"]
            found[:, :, rows] = xp.where(own > largest[:, :, rows], step.number, found[:, :, rows])
            largest[:, :, rows] = xp.maximum(largest[:, :, rows], own)
        return found

    def _scores_of_heads(self) -> list[tuple[Array, Array | None]]:
        """The optional inputs that add to the row sum, once for all chunks, and their tangents."""
        optional_inputs = self.slices.of_heads(slice(None), of_softmax=True)
        names = [name for name in optional_inputs if f"d{name}" in SOFTMAX_GRADIENTS]
        return [(optional_inputs[name], self.arrays.get(f"t{name}")) for name in names]

    def _steps(self, results: Mapping[str, Host]) -> Iterator[ChunkStep]:
        """One chunk after the other. The results of a chunk are copied away when the next chunk is requested."""
        spans = [chunk.keys for chunk in self.chunks]
        if self.device is None:
            for number, chunk in enumerate(self.chunks):
                at = slice(*chunk.keys)
                views = ({name: x[:, :, at] for name, x in arrays.items()} for arrays in (self.keys, results))
                yield ChunkStep(number, chunk, *views)
            return
        if self.is_mapped:
            mapped = {name: self.device.mapped(array) for name, array in self.keys.items()}
            try:
                yield ChunkStep(0, self.chunks[0], mapped, {})
            finally:  # kernels read the caller's memory
                self.device.wait(self.device.mark(None))
            return
        with Drain(self.device, results, spans) as drain, Feed(self.device, self.keys, spans) as feed:
            for number, (chunk, keys) in enumerate(zip(self.chunks, feed, strict=True)):
                yield ChunkStep(number, chunk, keys, drain.buffers(number))
                drain.send(number)

    def _clear_unseen(self, results: Mapping[str, Host]) -> None:
        """Write zeros to the gradients of keys that are in no chunk, because no query attends to them."""
        reached = 0
        for start, stop in (*(chunk.keys for chunk in self.chunks), (None, None)):
            for array in results.values():
                array[:, :, reached:start] = 0
            reached = stop or reached

    def arrays_of(self, step: ChunkStep, *, of_softmax: bool) -> dict[str, Array]:
        """The arrays of a call."""
        queries, keys = step.chunk
        found = {name: self.arrays[name][:, :, slice(*queries)] for name in OF_QUERIES if name in self.arrays}
        found |= step.keys
        for name in MOVABLE_BROADCAST:
            if name in self.arrays:
                found[name] = of_pairs(self.arrays[name], queries, keys)
        heads = slice(0, self.slices.problem.num_heads)
        optional_inputs = self.slices.of_heads(heads, of_softmax=of_softmax) | self.slices.of_blocks(queries, keys)
        return found | optional_inputs | self.slices.lengths(keys)


class _Sums:
    """Gradients that are sums over chunks, in the dtype of the softmax, or that consist of a slice from each chunk.

    Or the tangents of these.
    """

    def __init__(self, run: StreamedPass, names: Sequence[str], results: Mapping[str, Array]) -> None:
        self.run, self.names, self.results = run, names, results
        self.dq, self.dbias = (f"t{name}" if run.pass_.has_tangents else name for name in ("dq", "dbias"))
        xp, dtype = run.slices.xp, run.slices.softmax_dtype
        self.totals = {}
        # The gradient of a bias that is the same for all keys is a sum over chunks.
        self.adds_bias = self.dbias in names and run.arrays["bias"].shape[3] == 1 and not run.is_whole
        for name in names:
            array = results[name]
            is_sum = array.dtype != dtype and (name != self.dbias or self.adds_bias)
            if name != self.dq or not run.is_whole:
                self.totals[name] = xp.zeros(array.shape, dtype) if is_sum else array
                self.totals[name][...] = 0
        self.partial_dq = None
        if self.dq in self.totals and not run.slices.is_on_cpu:
            self.partial_dq = xp.empty(results[self.dq].shape, dtype)

    def buffer_of_dq(self, chunk: Chunk) -> Array:
        """The array that a call writes dq, or its partial dq, to."""
        if self.dq not in self.totals:
            return self.results[self.dq]
        assert self.partial_dq is not None
        return self.partial_dq[:, :, slice(*chunk.queries)]

    def add(self, chunk: Chunk, got: Mapping[str, Array]) -> None:
        """Add the results of a call."""
        for name, total in self.totals.items():
            if name not in got:
                continue
            if name == self.dbias and not self.adds_bias:
                of_pairs(total, *chunk)[...] = got[name]
                continue
            if name == self.dq:
                total = total[:, :, slice(*chunk.queries)]
            elif name == self.dbias:
                total = of_pairs(total, *chunk)
            total += got[name]

    def finish(self) -> None:
        """Write the sums to the results, rounded if these have a narrower dtype."""
        for name, total in self.totals.items():
            if total is not self.results[name]:
                self.results[name][...] = total


def sums_softmax(need: Collection[str]) -> bool:
    """Whether `need` has gradients of optional inputs that add to the row sum, or tangents of these."""
    return not set(SOFTMAX_GRADIENTS).isdisjoint(map(gradient_of, need))


def of_pairs(array: Array, queries: Span, keys: Span) -> Array:
    """The slice of an array over pairs for some queries and keys; an axis of length 1 stays whole."""
    rows = slice(*queries) if array.shape[2] != 1 else slice(None)
    columns = slice(*keys) if array.shape[3] != 1 else slice(None)
    return array[:, :, rows, columns]
