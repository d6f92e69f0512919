"""The plan of streaming: which keys are on the device at which time, and how much memory that takes. Pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.arrays.checks import value_error
from cuflash.arrays.memory_ranges import Band, Span, overlap
from cuflash.arrays.units import WIDTH, in_bytes, wrapped
from cuflash.spec.problem import Problem

CHUNK_BYTES = 2**27  # of keys and values in a chunk; to copy so many takes 2.5 ms over PCIe 5
CHUNK_STEP = 128  # keys; default chunks have a multiple of it, because tiles of the kernels end at multiples of it
WAYS = {
    "views": "chunks are views: queries are in host memory, too",
    "pinned": "chunks are copied from pinned memory by a stream of its own, through two buffers",
    "staged": "threads bring chunks into two pinned buffers, from where a stream of its own copies them",
    "mapped": "kernels read pinned memory where it is, because each key is read once",
}
Way = Literal["views", "pinned", "staged", "mapped"]


class Chunk(NamedTuple):
    """Keys that are on the device together, and the queries that attend to at least one of them."""

    queries: Span
    keys: Span


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """What `FlashAttention.plan` says of streamed keys and values.

    Attributes
    ----------
    chunk : int
        The most keys that are computed with at a time.
    chunks : tuple of Chunk
        In the order of keys; chunks that no query attends to are left out.
    ways : mapping of str to str
        By pass, how keys get to where the pass computes: "views", "pinned", "staged" or "mapped".
    memory : mapping of str to (mapping of str to int)
        By pass and purpose, bytes of device memory that a call takes besides its arguments; the peak is their sum.
    pinned_bytes : mapping of str to int
        By pass, bytes of pinned host memory that a call takes.
    others : tuple of StreamPlan
        Those of passes over other values, if there are some: reductions of the attention weights have none.
    note : str
        How the call goes through batch axes, its functions, and the options that they spell out.
    """

    problem: Problem
    chunk: int
    chunks: tuple[Chunk, ...]
    ways: Mapping[str, Way]
    memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    pinned_bytes: Mapping[str, int] = field(default_factory=dict)
    others: tuple[StreamPlan, ...] = ()
    note: str = ""  # a description of the functions

    def noted(self, note: str) -> StreamPlan:
        """The plan with a further note, before what it notes already."""
        return replace(self, note=f"{note}\n{self.note}".strip())

    def joined(self, other: StreamPlan) -> StreamPlan:
        """The plans of both."""
        own = replace(other, ways=self.ways, memory=self.memory, pinned_bytes=self.pinned_bytes)
        if self.others or own != self:
            return replace(self, others=(*self.others, other))
        return replace(
            self,
            ways={**self.ways, **other.ways},
            memory={**self.memory, **other.memory},
            pinned_bytes={**self.pinned_bytes, **other.pinned_bytes},
        )

    def device_bytes(self, pass_: str) -> int:
        """The peak device memory that a pass takes besides its arguments; 0 if it runs in host memory."""
        return sum(self.memory.get(pass_, {}).values())

    def describe(self, verbose: bool = False, width: int = WIDTH) -> str:
        """The plan in words, wrapped at `width` columns (0: not at all): first the chunks and their memory.

        `verbose` is for plans of kernels.
        """
        p = self.problem
        heads = f"{p.num_heads} heads" + (f" over {p.num_heads_kv} key/value heads" if p.group_size > 1 else "")
        takes = "no extra memory on the device"
        if self.memory:
            takes = ", ".join(f"{in_bytes(self.device_bytes(x))} on the device {x}" for x in self.memory)
        lines = [
            f"streamed keys in {len(self.chunks)} chunks of up to {self.chunk} keys, {in_bytes(self._bytes_of_chunk)} "
            f"of k{' and v' if p.head_dim_v else ''} each; {takes}",
            f"  problem   batch {p.batch}, {heads}, seqlen {p.seqlen_q} x {p.seqlen_k}, head_dim {p.head_dim}, "
            f"head_dim_v {p.head_dim_v}, {p.dtype}",
        ]
        for pass_, way in self.ways.items():
            lines.append(f"  {pass_:<9} {WAYS[way]}")
            memory = self.memory.get(pass_, {})
            if memory:
                parts = ", ".join(f"{what} {in_bytes(size)}" for what, size in memory.items())
                lines.append(f"            {in_bytes(self.device_bytes(pass_))} on the device at most: {parts}")
            if self.pinned_bytes.get(pass_):
                lines.append(f"            {in_bytes(self.pinned_bytes[pass_])} of pinned memory")
        if not self.memory:
            lines.append("  memory    results, sums of results in the dtype of lse, and what a call on a chunk takes")
        lines += (f"  {line}" for line in self.note.splitlines())
        return "\n".join([wrapped(lines, width), *(other.describe(verbose, width) for other in self.others)])

    @property
    def _bytes_of_chunk(self) -> int:
        return self.chunk * bytes_of_key(self.problem)


def bytes_of_key(problem: Problem) -> int:
    """Bytes of one key and its value, of all heads of the batch."""
    dims = problem.head_dim + problem.head_dim_v
    return problem.batch * problem.num_heads_kv * dims * ITEMSIZE[problem.k.dtype]


def chunk_of(problem: Problem, wanted: int | None, step: int) -> int:
    """The number of keys in a chunk: what the caller wants, or as many as fit into `CHUNK_BYTES`."""
    if wanted is not None:
        if wanted % step and wanted < problem.seqlen_k:
            raise value_error("chunk", wanted, f"a multiple of {step}, because of dropout or a block_mask")
        return min(wanted, max(problem.seqlen_k, 1))
    if problem.batch_invariant:
        raise NotImplementedError(
            "chunk: got None together with batch_invariant=True, expected a number of keys, as in cuflash.streamed(k, "
            "v, chunk=4096): by default it follows from the size of the batch"
        )
    step = math.lcm(CHUNK_STEP, step)
    fitting = CHUNK_BYTES // max(bytes_of_key(problem), 1) // step * step
    return min(max(fitting, step), max(problem.seqlen_k, 1))


def chunks_of(band: Band, seqlen_q: int, seqlen_k: int, length: int, step: int) -> tuple[Chunk, ...]:
    """The chunks that some query attends to. Each has the queries that attend to it, beginning at a multiple of `step`.

    If one chunk can hold all keys, it is the whole problem, with all queries.
    """
    if seqlen_k <= length:
        return (Chunk((0, seqlen_q), (0, seqlen_k)),)
    seen = band.keys_of((0, seqlen_q), seqlen_k)
    found = []
    for start in range(seen[0] // length * length, seen[1], length):
        keys = overlap((start, start + length), (0, seqlen_k))
        queries = band.queries_of(keys, seqlen_q)
        if queries[0] < queries[1]:
            found.append(Chunk((queries[0] // step * step, queries[1]), keys))
    return tuple(found)
