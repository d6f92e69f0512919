"""One pass over chunks of keys: partial outputs are merged, partial dq are added, dk and dv of a chunk are whole.

Sums always have the dtype of the softmax; partial results have it if calls can give them so. They are added in the
order of the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cuflash.arrays import dlpack
from cuflash.arrays.memory_ranges import Span
from cuflash.shards.cuda import Cuda
from cuflash.shards.merge import LargeRows, RunningMerge
from cuflash.shards.slices import Slices
from cuflash.spec import row_sums
from cuflash.spec.inputs import BROADCAST
from cuflash.spec.outputs import OF_QUERIES, SOFTMAX_GRADIENTS
from cuflash.spec.streamed import OF_KEYS
from cuflash.streaming.chunks import Chunk
from cuflash.streaming.copy_pipeline import Drain, Feed, Host

Array = Any


class ChunkStep(NamedTuple):
    """A chunk that is on the device, and the arrays for its gradients."""

    number: int
    chunk: Chunk
    keys: dict[str, Array]  # k and v
    buffers: dict[str, Array]  # dk and dv


@dataclass(frozen=True, kw_only=True)
class StreamedPass:
    """A pass over keys in host memory."""

    slices: Slices
    chunks: tuple[Chunk, ...]
    keys: Mapping[str, Host]  # k and v, as (batch, heads, rows, dim)
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

    def forward(self, out: Array, lse: Array) -> None:
        """Fill out, with four axes, and lse, with three."""
        if self.is_whole:
            for step in self._steps({}):
                arrays = self.arrays_of(step, of_softmax=True) | {"out": out, "lse": lse}
                self.slices.forward(*step.chunk, arrays)
            return
        xp, dtype = self.slices.xp, self.slices.softmax_dtype
        total = out if out.dtype == dtype else xp.empty(out.shape, dtype)
        merge = RunningMerge(total, self._scores_of_heads())
        buffers = {}
        if not self.slices.is_on_cpu:
            buffers = {"out": xp.empty(out.shape, dtype), "lse": xp.empty(lse.shape, lse.dtype)}
        for step in self._steps({}):
            rows = slice(*step.chunk.queries)
            results = {name: x[:, :, rows] for name, x in buffers.items()}
            call = functools.partial(self.slices.forward, *step.chunk)
            arrays = self.arrays_of(step, of_softmax=False)
            got = self.slices.into(results, arrays, call, is_wide=self.slices.is_on_cpu)
            merge.add(got["out"], got["lse"], rows)
        merge.finish(out, lse)
        if row_sums.has_large(dlpack.on_host(lse), self.slices.large_lse):
            self._merge_large(out, lse)

    def _merge_large(self, out: Array, lse: Array) -> None:
        """Merge chunks again, in rows whose lse is so large that it does not say what a chunk weighs."""
        merge = LargeRows(lse, self.slices.large_lse, out.shape[3], self._scores_of_heads())
        for step in self._steps({}):
            got = self._forward_of(step)
            merge.add(self._row_sums_of(step, lse, got["lse"]), slice(*step.chunk.queries), got["out"])
        merge.finish(out, lse)

    def _row_sums(self) -> Array:
        """The row sums over all chunks, where lse is large."""
        lse = self.arrays["lse"]
        merge = LargeRows(lse, self.slices.large_lse, 0, self._scores_of_heads())
        for step in self._steps({}):
            # Kernels find the row sums only of the lse of a chunk.
            own_lse = None if self.slices.is_on_cpu else self._forward_of(step)["lse"]
            merge.add(self._row_sums_of(step, lse, own_lse), slice(*step.chunk.queries))
        return merge.sums

    def _forward_of(self, step: ChunkStep) -> dict[str, Array]:
        """out and lse of a chunk, in the dtype of the softmax."""
        slices, arrays = self.slices, self._inputs_of(step)
        if not slices.is_on_cpu:
            *shape, length = arrays["q"].shape[:3]
            of_out = (*shape, length, arrays["v"].shape[3])
            arrays |= {
                "out": slices.xp.empty(of_out, slices.softmax_dtype),
                "lse": slices.xp.empty(of_out[:3], slices.softmax_dtype),
            }
        return slices.into({}, arrays, functools.partial(slices.forward, *step.chunk), is_wide=slices.is_on_cpu)

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
        found = self.arrays_of(step, of_softmax=False)
        return {name: x for name, x in found.items() if name not in OF_QUERIES or name == "q"}

    def backward(self, need: tuple[str, ...], results: Mapping[str, Array]) -> None:
        """Fill dq, dk, dv and dbias, which have four axes, and the other gradients, shaped as their arrays are."""
        if not self.is_whole and row_sums.has_large(dlpack.on_host(self.arrays["lse"]), self.slices.large_lse):
            arrays = {**self.arrays, "row_sums": self._row_sums()}
            replace(self, slices=replace(self.slices, arrays=arrays))._backward(need, results)
        else:
            self._backward(need, results)

    def _backward(self, need: tuple[str, ...], results: Mapping[str, Array]) -> None:
        of_keys = {name: results[name] for name in OF_KEYS if name in need}
        self._clear_unseen(of_keys)
        sums = _Sums(self, [name for name in need if name not in OF_KEYS], results)
        for step in self._steps(of_keys):
            wanted = tuple(name for name in need if name not in SOFTMAX_GRADIENTS or step.number == 0)
            if not wanted:
                break
            into = dict(step.buffers)
            is_wide = self.slices.is_on_cpu and not self.is_whole
            if "dq" in need and not is_wide:
                into["dq"] = sums.buffer_of_dq(step.chunk)
            arrays = self.arrays_of(step, of_softmax=sums_softmax(wanted))
            if sums.adds_bias:
                arrays["bias"] = self.slices.widened(arrays["bias"])
            if not self.is_whole:
                arrays |= {name: x for name, x in self.slices.wide_score_args.items() if f"d{name}" in need}
            call = functools.partial(self.slices.backward, *step.chunk, wanted)
            sums.add(step.chunk, self.slices.into(into, arrays, call, is_wide=is_wide))
        sums.finish()

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
        for name in BROADCAST:
            if name in self.arrays:
                found[name] = of_pairs(self.arrays[name], queries, keys)
        heads = slice(0, self.slices.problem.num_heads)
        optional_inputs = self.slices.of_heads(heads, of_softmax=of_softmax) | self.slices.of_blocks(queries, keys)
        return found | optional_inputs | self.slices.lengths(keys)


class _Sums:
    """Gradients that are sums over chunks, in the dtype of the softmax, or that consist of a slice from each chunk."""

    def __init__(self, run: StreamedPass, names: Sequence[str], results: Mapping[str, Array]) -> None:
        self.run, self.names, self.results = run, names, results
        xp, dtype = run.slices.xp, run.slices.softmax_dtype
        self.totals = {}
        # The gradient of a bias that is the same for all keys is a sum over chunks.
        self.adds_bias = "dbias" in names and run.arrays["bias"].shape[3] == 1 and not run.is_whole
        for name in names:
            array = results[name]
            is_sum = array.dtype != dtype and (name != "dbias" or self.adds_bias)
            if name != "dq" or not run.is_whole:
                self.totals[name] = xp.zeros(array.shape, dtype) if is_sum else array
                self.totals[name][...] = 0
        self.partial_dq = None
        if "dq" in self.totals and not run.slices.is_on_cpu:
            self.partial_dq = xp.empty(results["dq"].shape, dtype)

    def buffer_of_dq(self, chunk: Chunk) -> Array:
        """The array that a call writes dq, or its partial dq, to."""
        if "dq" not in self.totals:
            return self.results["dq"]
        assert self.partial_dq is not None
        return self.partial_dq[:, :, slice(*chunk.queries)]

    def add(self, chunk: Chunk, got: Mapping[str, Array]) -> None:
        """Add the results of a call."""
        for name, total in self.totals.items():
            if name not in got:
                continue
            if name == "dbias" and not self.adds_bias:
                of_pairs(total, *chunk)[...] = got[name]
                continue
            if name == "dq":
                total = total[:, :, slice(*chunk.queries)]
            elif name == "dbias":
                total = of_pairs(total, *chunk)
            total += got[name]

    def finish(self) -> None:
        """Write the sums to the results, rounded if these have a narrower dtype."""
        for name, total in self.totals.items():
            if total is not self.results[name]:
                self.results[name][...] = total


def sums_softmax(need: Collection[str]) -> bool:
    """Whether `need` has gradients of optional inputs that add to the row sum."""
    return not set(SOFTMAX_GRADIENTS).isdisjoint(need)


def of_pairs(array: Array, queries: Span, keys: Span) -> Array:
    """The slice of an array over pairs for some queries and keys; an axis of length 1 stays whole."""
    rows = slice(*queries) if array.shape[2] != 1 else slice(None)
    columns = slice(*keys) if array.shape[3] != 1 else slice(None)
    return array[:, :, rows, columns]
