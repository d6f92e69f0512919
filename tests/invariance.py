"""Sequences alone, and the same sequences among others: in batches, with more heads, packed, in caches, in pages.

With ``batch_invariant=True`` each gives the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct

Arrays = dict[str, Any]
OF_KEYS = ("k", "v", "dk", "dv", "tdk", "tdv")
OF_HEADS = ("sinks", "alibi_slopes")
BATCHINGS = ("batch", "heads", "packed", "lengths", "pages")


@dataclass(frozen=True)
class BatchedCall:
    """A call that has a sequence among others, and how to find the sequence in its results."""

    options: Arrays
    arrays: Arrays
    # Of a result whose heads are those of k, or of q, and whose rows are keys, or queries.
    find: Callable[[Any, bool, bool], Any] = field(default=lambda x, of_kv_heads, of_keys: x)

    def result(self, name: str, x: Any) -> Any:
        """The slice of a result that belongs to the sequence."""
        return self.find(x, name in OF_KEYS, name in (*OF_KEYS, "column_sums"))


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Lengths (queries, keys) of sequences, and the options that they share; the first one is looked for."""

    lengths: tuple[tuple[int, int], ...]
    heads_kv: int
    group: int
    head_dim: int
    head_dim_v: int
    dtype: str
    options: Arrays
    sinks: bool = False
    slopes: bool = False
    spread: float = 1.0  # of scores
    seed: int = 0
    capacity: int = 0  # keys that a cache has space for beyond the longest sequence
    page_size: int = 16

    def rows(self, heads: int, heads_kv: int, lengths: tuple[int, int], rng: Any) -> Arrays:
        """The arrays of one sequence."""
        queries, keys = lengths
        shapes = {
            "q": (heads, queries, self.head_dim),
            "k": (heads_kv, keys, self.head_dim),
            "v": (heads_kv, keys, self.head_dim_v),
            "dout": (heads, queries, self.head_dim_v),
        }
        found = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        found["q"] *= self.spread
        return {name: x.astype(ct.numpy_dtype(self.dtype)) for name, x in found.items()}

    def per_head(self, heads: int, rng: Any) -> Arrays:
        wide = np.float64 if self.dtype == "float64" else np.float32
        wanted = [name for name, given in zip(OF_HEADS, (self.sinks, self.slopes), strict=True) if given]
        return {name: rng.random(heads).astype(wide) for name in wanted}

    def batched(self, name: str) -> BatchedCall:
        """The first sequence, alone or among others."""
        rng = np.random.default_rng(self.seed)
        heads, options = self.heads_kv * self.group, {"batch_invariant": True, **self.options}
        own, of_heads = self.rows(heads, self.heads_kv, self.lengths[0], rng), self.per_head(heads, rng)
        others = np.random.default_rng(self.seed + 1)
        if name == "alone":
            return BatchedCall(options, own | of_heads)
        return getattr(self, f"_{name}")(options, own, of_heads, others)  # type: ignore[no-any-return]

    def _batch(self, options: Arrays, own: Arrays, of_heads: Arrays, rng: Any) -> BatchedCall:
        heads, size = len(own["q"]), int(rng.integers(2, 12))
        at = int(rng.integers(size))
        entries = [self.rows(heads, self.heads_kv, self.lengths[0], rng) for _ in range(size)]
        entries[at] = own
        arrays = {x: np.stack([entry[x] for entry in entries]) for x in own}
        return BatchedCall(options, arrays | of_heads, lambda x, *_: x[at])

    def _heads(self, options: Arrays, own: Arrays, of_heads: Arrays, rng: Any) -> BatchedCall:
        before, after = (int(n) for n in rng.integers(0, 9, 2))
        first, last = (
            self.rows(n * self.group, n, self.lengths[0], rng) | self.per_head(n * self.group, rng)
            for n in (before, after)
        )
        arrays = {name: np.concatenate([first[name], x, last[name]]) for name, x in (own | of_heads).items()}

        def find(x: Any, of_kv_heads: bool, of_keys: bool) -> Any:
            group = 1 if of_kv_heads else self.group
            return x[before * group : (before + self.heads_kv) * group]

        return BatchedCall(options, arrays, find)

    def _packed(self, options: Arrays, own: Arrays, of_heads: Arrays, rng: Any) -> BatchedCall:
        heads, at = len(own["q"]), int(rng.integers(len(self.lengths)))
        lengths = [*self.lengths[1:]]
        lengths.insert(at, self.lengths[0])
        entries = [self.rows(heads, self.heads_kv, x, rng) for x in lengths]
        entries[at] = own
        arrays = {x: np.concatenate([entry[x] for entry in entries], axis=1) for x in own}
        starts = np.cumsum([(0, 0), *lengths], axis=0, dtype=np.int32)
        arrays |= {"cu_seqlens_q": starts[:, 0].copy(), "cu_seqlens_k": starts[:, 1].copy()}

        def find(x: Any, of_kv_heads: bool, of_keys: bool) -> Any:
            first, stop = starts[at : at + 2, int(of_keys)]
            return x[:, first:stop]

        return BatchedCall(options, arrays | of_heads, find)

    def _cache(self, own: Arrays, rng: Any) -> tuple[int, np.ndarray, list[Arrays]]:
        """Where the sequence is, how many keys each entry has, and the entries."""
        (queries, keys), size = self.lengths[0], int(rng.integers(1, 6))
        at = int(rng.integers(size))
        counts = np.array([rng.integers(1, keys + self.capacity + 1) for _ in range(size)])
        counts[at] = keys
        entries = [self.rows(len(own["q"]), self.heads_kv, (queries, n), rng) for n in counts]
        entries[at] = own
        return at, counts, entries

    def _lengths(self, options: Arrays, own: Arrays, of_heads: Arrays, rng: Any) -> BatchedCall:
        at, counts, entries = self._cache(own, rng)
        capacity = self.lengths[0][1] + self.capacity

        def padded(x: np.ndarray, name: str) -> np.ndarray:
            if name not in OF_KEYS:
                return x
            rest = np.full((len(x), capacity - x.shape[1], x.shape[2]), np.nan).astype(x.dtype)
            return np.concatenate([x, rest], axis=1)

        arrays = {x: np.stack([padded(entry[x], x) for entry in entries]) for x in own}
        if options.get("causal") is True:
            options = options | {"causal": "lengths"}
        keys = self.lengths[0][1]

        def find(x: Any, of_kv_heads: bool, of_keys: bool) -> Any:
            return x[at][:, :keys] if of_keys else x[at]

        return BatchedCall(options, arrays | of_heads | {"kv_lengths": counts.astype(np.int32)}, find)

    def _pages(self, options: Arrays, own: Arrays, of_heads: Arrays, rng: Any) -> BatchedCall:
        at, counts, entries = self._cache(own, rng)
        size, capacity = self.page_size, self.lengths[0][1] + self.capacity
        width = -(-capacity // size)
        table = rng.permutation(len(counts) * width).astype(np.int32).reshape(len(counts), width)
        arrays = {x: np.stack([entry[x] for entry in entries]) for x in ("q", "dout")}
        for name in ("k", "v"):
            dim = own[name].shape[2]
            pool = np.full((table.size, self.heads_kv, size, dim), np.nan).astype(own[name].dtype)
            for row, entry, count in zip(table, entries, counts, strict=True):
                for page in range(-(-int(count) // size)):
                    keys = entry[name][:, page * size : (page + 1) * size]
                    pool[row[page], :, : keys.shape[1]] = keys
            arrays[name] = pool
        arrays |= {"block_table": table, "kv_lengths": counts.astype(np.int32)}
        return BatchedCall(options, arrays | of_heads, lambda x, *_: x[at])

    @property
    def batchings(self) -> tuple[str, ...]:
        """Those that have the sequence with the same diagonal: without causal, that of a longer cache is another."""
        moved = ("window" in self.options or self.slopes) and not self.options.get("causal")
        return tuple(x for x in BATCHINGS if x != "lengths" or not moved)


@st.composite
def sequences(
    draw: Any,
    *,
    dtypes: Sequence[str] = ("float32", "float64", "float16", "bfloat16"),
    queries: Sequence[int] = (1, 2, 4, 7, 20, 33, 100, 130, 200),
    keys: Sequence[int] = (1, 5, 40, 128, 131, 300, 600, 1100, 2500),
    head_dims: Sequence[int] = (8, 16, 24, 64),
    most_pairs: int = 2**18,
) -> Sequences:
    """Strategy for sequences."""
    group, heads_kv = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (4, 1), (3, 2), (8, 1)]))
    heads = group * heads_kv
    length = st.tuples(st.sampled_from(queries), st.sampled_from(keys)).filter(
        lambda x: x[0] * x[1] * heads <= most_pairs
    )
    options: Arrays = {}
    if causal := draw(st.sampled_from([False, True, "top_left"])):
        options["causal"] = causal
    if draw(st.booleans()):
        right = draw(st.sampled_from([None, 0, 30]))
        options["window"] = (draw(st.sampled_from([0, 17, 70, 300])), right)
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = 3.0
    if draw(st.integers(0, 3)) == 0:
        options["scale"] = draw(st.sampled_from([-0.3, 0.0, 1.0]))
    return Sequences(
        lengths=tuple(draw(st.lists(length, min_size=2, max_size=5))),
        heads_kv=heads_kv,
        group=group,
        head_dim=draw(st.sampled_from(head_dims)),
        head_dim_v=draw(st.sampled_from(head_dims)),
        dtype=draw(st.sampled_from(dtypes)),
        options=options,
        sinks=draw(st.booleans()),
        slopes=draw(st.booleans()),
        spread=draw(st.sampled_from([1.0, 1.0, 100.0])),
        seed=draw(st.integers(0, 2**20)),
        capacity=draw(st.sampled_from([0, 3, 500, 3000])),
        page_size=draw(st.sampled_from([16, 64, 128])),
    )


Compute = Callable[[Arrays, Arrays, Sequence[str]], Arrays]


def by_calls(options: Arrays, arrays: Arrays, passes: Sequence[str]) -> Arrays:
    """The results of a call by name: those of `forward`, and of other passes that are named.

    "want" stands for the row reductions, and "tangents" for `jvp` and `backward_jvp`.
    """
    given = dict(arrays)
    q, k, v, dout = (given.pop(name) for name in ("q", "k", "v", "dout"))
    attn, wanted = cuflash.FlashAttention(**options), {"want": ("max", "entropy")} if "want" in passes else {}
    found: Arrays = attn.forward(q, k, v, **given, **wanted)._asdict()
    out, lse = found["out"], found["lse"]
    if "backward" in passes:
        found |= attn.backward(dout, q, k, v, out, lse, **given)._asdict()
    if "tangents" in passes:
        jvp = attn.jvp(q, k, v, tq=q, tv=v, **given)
        moved = {"tq": q, "tv": v, "tout": jvp.tout, "tlse": jvp.tlse}
        found |= {"tout": jvp.tout, "tlse": jvp.tlse}
        found |= attn.backward_jvp(dout, q, k, v, jvp.out, jvp.lse, **moved, **given)._asdict()
    if "column_sums" in passes:
        found["column_sums"] = attn.column_sums(q, k, lse, **given)
    return found


def assert_invariant(
    drawn: Sequences, passes: Sequence[str], compute: Compute = by_calls, batchings: Sequence[str] = BATCHINGS
) -> None:
    """Hold the results of the first sequence in each of these batchings against those that it has alone."""
    alone = drawn.batched("alone")
    expected = compute(alone.options, alone.arrays, passes)
    for name in set(batchings) & set(drawn.batchings):
        call = drawn.batched(name)
        served = [x for x in passes if x == "want"] if name == "pages" else passes  # pages have no backward pass
        for result, x in compute(call.options, call.arrays, served).items():
            own, of_alone = (np.ascontiguousarray(y) for y in (call.result(result, x), expected[result]))
            assert (own.dtype, own.shape) == (of_alone.dtype, of_alone.shape)
            message = f"{result}, {name} and alone: {drawn}"
            np.testing.assert_array_equal(own.view(np.uint8), of_alone.view(np.uint8), err_msg=message)
