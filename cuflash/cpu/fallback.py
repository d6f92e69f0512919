"""Attention and its gradients by NumPy alone: without the compiled core, and for what the core leaves out.

Letters are those of `cuflash.testing.reference`, and the algorithm is that of FlashAttention-2: online softmax over
tiles of keys. A job is some rows of one key/value head, with all query heads that share it, or as many small heads as
make up a tile. Nothing takes memory for all pairs. Tiles that are masked as a whole are left out; of a mask function,
bounds over the indices tell which these are.

Jobs do not depend on the number of threads, and the calling thread adds what jobs share (dk, dv, and gradients of bias
terms and of what functions read) in the order of the jobs. So results are the same, bit for bit, on any number of
threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import view_4d, view_rows
from cuflash.arrays.cached import cached_property
from cuflash.cpu import jobs
from cuflash.cpu.gemm import product
from cuflash.cpu.packed import OF_KEYS, clear_gradients_of_no_sequence, sequences
from cuflash.cpu.score_tiles import slices
from cuflash.score_mod.evaluation import clamped, evaluate
from cuflash.score_mod.intervals import Tables, bounds_of
from cuflash.score_mod.nodes import Node
from cuflash.score_mod.program import ScoreTangents
from cuflash.spec.dropout import kept_weights
from cuflash.spec.inputs import NUMBERS
from cuflash.spec.outputs import DEFAULT_NEED, MOVABLE_OVER_ROWS
from cuflash.spec.passes import Pass
from cuflash.spec.problem import Problem
from cuflash.spec.row_sums import is_large

Array = NDArray[Any]
Random = tuple[int | None, int | None]
AnyJob = TypeVar("AnyJob", bound="Job")

PAIRS = 2**16  # in a tile: 256 KiB in float32
ROWS = 128  # in a tile, of all query heads that share its keys
ELEMENTS = 2**18  # of the keys of a tile
LEAST_KEYS = 64  # in a tile, if there are as many
BLOCK = 128  # keys that a mask function may hide as a whole
SERIAL_FLOPS = 1e8  # too little work for several threads
UNITS_OF_LSE = 8  # by which a large lse may differ from row max and row sum: as in the core, which may have made it
SPREAD = 4  # sums for entries of an array are dense where the entries range over at most SPREAD times as many as values
# Smaller weights count as zero: subnormal numbers slow products down a hundredfold.
LEAST_WEIGHT = {np.dtype(np.float32): 2.0**-100, np.dtype(np.float64): 2.0**-960}


def run(
    problem: Problem,
    arrays: Mapping[str, Array | None],
    pass_: Pass,
    seed: int | None,
    offset: int | None,
    job_type: type[Job] | None = None,
) -> None:
    """Compute a pass by jobs of a type, as `cuflash.cpu.core.run` does."""
    job_type, random = job_type or Job, (seed, offset)
    given = {name: x for name, x in arrays.items() if x is not None}
    threads = 1 if pass_.flops(problem) < SERIAL_FLOPS else jobs.count_cores()
    if not pass_.gives_gradients:
        jobs.run(job_type.forward, jobs_of(problem, given, random, job_type), threads)
        return
    if "dout" not in given:
        jobs.run(job_type.find_row_sums, jobs_of(problem, given, random, job_type), threads)
        return
    # Sums of tangents are named as those of the gradients whose tangents they are.
    named = {name: f"t{name}" if pass_.has_tangents else name for name in problem.gradients}
    sums = GradientSums(problem, {name: given.pop(own) for name, own in named.items() if own in given})
    given |= sums.of_rows
    if problem.is_packed:
        clear_gradients_of_no_sequence(problem, given)
    backward = functools.partial(job_type.backward, wanted=sums.wanted)
    jobs.run(backward, jobs_of(problem, given, random, job_type), threads, sums.add)
    sums.write()


def jobs_of(problem: Problem, arrays: Mapping[str, Array], random: Random, job_type: type[AnyJob]) -> Iterator[AnyJob]:
    """The jobs of a call, in order."""
    for call in calls(problem, arrays, random):
        yield from call.jobs(job_type)


def calls(problem: Problem, arrays: Mapping[str, Array], random: Random = (None, None)) -> Iterator[FallbackCall]:
    """The call itself, or its packed sequences, or its batch entries with the keys that each has."""
    if problem.is_packed:
        score_args = _score_args(problem, arrays)
        others = {name: x for name, x in arrays.items() if name not in score_args}
        for one in sequences(problem, arrays["cu_seqlens_q"], arrays["cu_seqlens_k"]):
            yield FallbackCall(one.problem, one.of_call(others) | score_args, random, one.index)
        return
    call, lengths = FallbackCall(problem, arrays, random), arrays.get("kv_lengths")
    if lengths is None:
        yield call
        return
    for entry, length in enumerate(np.clip(lengths, 0, problem.seqlen_k).tolist()):
        yield call.of_entry(entry, length)


def _score_args(problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """What functions read, and the tangents of it that there are."""
    names = [name for name, _ in problem.score_args]
    return {name: arrays[name] for name in (*names, *(f"t{name}" for name in names)) if name in arrays}


class FallbackCall:
    """The arrays of a call, of a packed sequence, or of a batch entry.

    Attributes
    ----------
    arrays : dict of str to array
        Those with rows are (batch, heads of k and v, query heads that share one, rows, ...), and what bias terms and
        masks have is broadcast to such axes. Those with keys are (batch, heads of k and v, keys, ...).
    entry : int
        Number of the first batch entry, or of the packed sequence.
    moved : frozenset of str
        Arrays and numbers that have tangents.
    """

    def __init__(self, problem: Problem, arrays: Mapping[str, Array], random: Random, entry: int = 0) -> None:
        self.problem, self.random, self.entry = problem, random, entry
        self.dtype = np.dtype(problem.softmax_dtype)
        self.program = problem.program.on_numpy()
        self.score_args = _score_args(problem, arrays)
        self.bounds = Tables(self.score_args)
        self.moved = frozenset(name[1:] for name in arrays if name.startswith("t"))
        self.numbers = {name: arrays[f"t{name}"] for name in NUMBERS if name in self.moved}
        self.block_table = arrays.get("block_table")
        heads = (problem.batch, problem.num_heads)
        pairs = (*heads, problem.seqlen_q, problem.seqlen_k)
        shapes = {"bias": pairs, "mask": pairs, "alibi_slopes": heads, "sinks": heads}
        shapes |= {f"t{name}": shape for name, shape in shapes.items()}
        if "block_mask" in arrays:
            shapes["block_mask"] = (*heads, *arrays["block_mask"].shape[-2:])

        def views(*names: str) -> dict[str, Array]:
            return {name: view_4d(arrays[name], problem.layout) for name in names if name in arrays}

        by_heads = views("q", "out", "dout", "dq", "tq", "tout", "tdout")
        by_heads |= {name: view_rows(arrays[name]) for name in MOVABLE_OVER_ROWS if name in arrays}
        by_heads |= {name: view_4d(arrays[name], "bhsd") for name in ("row_sums",) if name in arrays}
        by_heads |= {name: np.broadcast_to(arrays[name], shape) for name, shape in shapes.items() if name in arrays}
        split = (problem.num_heads_kv, problem.group_size)
        self.arrays = {name: x.reshape(len(x), *split, *x.shape[2:]) for name, x in by_heads.items()}
        self.arrays |= views(*OF_KEYS)
        self.arrays |= {name: arrays[name] for name in ("k_scale", "v_scale") if name in arrays}

    @property
    def tangents(self) -> ScoreTangents:
        """The tangents of the score and of its derivatives, as expressions."""
        return self.problem.score_tangents(self.moved)

    def of_entry(self, entry: int, length: int) -> FallbackCall:
        """One batch entry, which has so many keys."""
        own, one = copy(self), slice(entry, entry + 1)
        own.entry, own.arrays = entry, {}
        own.problem = replace(self.problem.aligned_to(length), batch=1, seqlen_k=length)
        for name, x in self.arrays.items():
            if name in (*OF_KEYS, "k_scale", "v_scale"):
                own.arrays[name] = self._gathered(x, entry, length) if self.block_table is not None else x[one]
                own.arrays[name] = own.arrays[name][:, :, :length]
            else:
                own.arrays[name] = x[one, ..., :length] if name in ("bias", "mask", "tbias") else x[one]
        return own

    def _gathered(self, pool: Array, entry: int, length: int) -> Array:
        """The pages of an entry that has so many keys, in one piece: (1, heads, keys, ...)."""
        assert self.block_table is not None
        size = self.problem.page_size
        pages = pool[self.block_table[entry, : -(-length // size)]]
        return pages.swapaxes(0, 1).reshape(1, pool.shape[1], len(pages) * size, *pool.shape[3:])

    def jobs(self, job_type: type[AnyJob]) -> Iterator[AnyJob]:
        problem, group = self.problem, self.problem.group_size
        if not problem.batch * problem.num_heads * problem.seqlen_q:
            return
        num_heads, num_rows = PAIRS // max(group * problem.seqlen_q * problem.seqlen_k, 1), problem.seqlen_q
        if num_heads < 2:
            num_heads, num_rows = 1, max(1, ROWS // group)
        dim = max(problem.head_dim, problem.head_dim_v)
        # As if there were any number of heads: the bits of one do not depend on others.
        num_keys = min(PAIRS // (num_heads * group * num_rows), ELEMENTS // (num_heads * dim))
        num_heads = min(num_heads, problem.batch * problem.num_heads_kv)
        for batches in slices(problem.batch, max(1, num_heads // problem.num_heads_kv)):
            for heads in slices(problem.num_heads_kv, num_heads):
                for rows in slices(problem.seqlen_q, num_rows):
                    yield job_type(self, batches, heads, range(rows.start, rows.stop), max(num_keys, LEAST_KEYS))


class Tile(NamedTuple):
    """Some keys of a job."""

    keys: range
    inputs: dict[str, Any]  # of functions of pairs
    visible: Array | None  # which pairs are visible, (batch, heads of k and v, query heads, rows, keys); None: all

    @property
    def columns(self) -> slice:
        return slice(self.keys.start, self.keys.stop)


class OnlineSoftmax:
    """The row max m of scores, and the row sum of exp(S - m), over the sink and the tiles so far.

    `reduce` also keeps the row reductions, or what they are made of: the sum of exp(S - m) (S - m).
    """

    def __init__(self, sinks: Array) -> None:
        self.row_max, self.row_sum = sinks, (sinks != -np.inf).astype(sinks.dtype)
        self.max, self.row_moment = np.full_like(sinks, -np.inf), np.zeros_like(sinks)

    def step(self, scores: Array) -> tuple[Array, Array]:
        """exp(S - m) of a tile, in place of its scores; and the factor of what tiles before this one have summed."""
        row_max = np.maximum(self.row_max, scores.max(axis=-1, keepdims=True))
        base = np.where(row_max == -np.inf, 0, row_max)
        weights, factor = _exponentials(scores, base), np.exp(self.row_max - base)
        self.row_max, self.row_sum = row_max, self.row_sum * factor + weights.sum(axis=-1, keepdims=True)
        return weights, factor

    def reduce(self, scores: Array) -> None:
        """Take a tile of scores into the reductions, before `step` does."""
        tile_max = scores.max(axis=-1, keepdims=True)
        row_max = np.maximum(self.row_max, tile_max)
        base, old = (np.where(x == -np.inf, 0, x) for x in (row_max, self.row_max))
        exponents = np.where(scores == -np.inf, 0, scores - base)
        moment = (_exponentials(scores.copy(), base) * exponents).sum(axis=-1, keepdims=True)
        kept = np.where(self.row_sum == 0, 0, np.exp(old - base))
        self.row_moment = kept * (self.row_moment + (old - base) * self.row_sum) + moment
        self.max = np.maximum(self.max, tile_max)

    @property
    def entropy(self) -> Array:
        """That of the weights; 0 of none."""
        row_sum = np.where(self.row_sum == 0, 1, self.row_sum)
        return np.log(row_sum) - self.row_moment / row_sum


def _exponentials(scores: Array, base: Array) -> Array:
    """exp(scores - base), in place of scores, without weights that count as zero."""
    scores -= base
    np.exp(scores, out=scores)
    scores *= scores >= LEAST_WEIGHT[scores.dtype]  # NaN stays NaN
    return scores


class Job:
    """Some rows of some heads, over all of their keys.

    Arrays of rows are (batch, heads of k and v, rows of all query heads that share one, ...), as products need them.
    Arrays of pairs are so, too, or have an axis for these query heads: (batch, heads of k and v, query heads, rows,
    keys), as bias terms and functions need them. `folded` goes from these to those.
    """

    def __init__(self, call: FallbackCall, batches: slice, heads: slice, rows: range, num_keys: int) -> None:
        self.call, self.problem, self.dtype = call, call.problem, call.dtype
        self.rows, self.num_keys = rows, num_keys
        self.at_heads, self.at_rows = (batches, heads), (batches, heads, slice(None), slice(rows.start, rows.stop))
        group = self.problem.group_size
        self.batches = np.arange(batches.start, batches.stop) + call.entry
        self.heads = np.arange(heads.start * group, heads.stop * group).reshape(-1, group)
        self.shape = (*self.batches.shape, *self.heads.shape, len(rows))

    def of_rows(self, name: str) -> Array:
        x = self.call.arrays[name][self.at_rows]
        return x.astype(self.dtype, order="C").reshape(*self.shape[:2], self.shape[2] * self.shape[3], -1)

    def of_keys(self, name: str, tile: Tile) -> Array:
        index = (*self.at_heads, tile.columns)
        x, scale = self.call.arrays[name][index], self.call.arrays.get(f"{name}_scale")
        x = x.astype(self.dtype, order="C", copy=False)  # NumPy multiplies rows that are not contiguous without BLAS
        return x if scale is None else x * scale[index][..., None]

    def of_pairs(self, name: str, keys: range) -> Array:
        index = (*self.at_rows, slice(keys.start, keys.stop))
        return self.call.arrays[name][index]

    def folded(self, x: Array) -> Array:
        return x.reshape(*self.shape[:2], self.shape[2] * self.shape[3], x.shape[-1])

    def write(self, name: str, x: Array) -> None:
        result = self.call.arrays[name][self.at_rows]
        result[...] = x.reshape(result.shape)

    @cached_property
    def q(self) -> Array:
        return self.of_rows("q")

    @cached_property
    def scaled_q(self) -> Array:
        return self.q * self.dtype.type(self.problem.scale)

    @property
    def sinks(self) -> Array:
        """The sink of each row, -inf without one."""
        sinks = np.full(self.shape, -np.inf, self.dtype)
        if "sinks" in self.call.arrays:
            sinks[...] = self.call.arrays["sinks"][self.at_heads][..., None]
        return self.folded(sinks[..., None])

    # ---- tiles -------------------------------------------------------------------------------------------------------

    def tiles(self) -> Iterator[Tile]:
        """The tiles with a visible pair."""
        first, stop = self.problem.key_range(self.rows[0])[0], self.problem.key_range(self.rows[-1])[1]
        may_show, evaluates = self.shown_keys(range(first, stop))
        edges = np.flatnonzero(np.diff(may_show, prepend=False, append=False)) + first
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            for own in slices(end - begin, self.num_keys):
                keys = range(begin + own.start, begin + own.stop)
                inputs = self.inputs(keys)
                visible = self.visible(inputs, keys, bool(evaluates[keys.start - first : keys.stop - first].any()))
                if visible is None or visible.any():
                    yield Tile(keys, inputs, visible)

    def shown_keys(self, keys: range) -> tuple[Array, Array]:
        """Of each key, whether block mask and mask function may show it, and whether the function may hide it."""
        may_show, evaluates = np.ones(len(keys), bool), np.zeros(len(keys), bool)
        if "block_mask" in self.call.arrays:
            rows, columns = self.problem.block_size
            index = (*self.at_heads, slice(None), slice(self.rows.start // rows, self.rows[-1] // rows + 1))
            blocks = np.asarray(self.call.arrays["block_mask"][index].any(axis=(0, 1, 2, 3)))
            may_show = blocks[np.arange(keys.start, keys.stop) // columns]
        mask, function = self.call.program.mask, self.problem.mask_function
        if mask is not None and function is not None:
            batches = self.batches if function.depends_on("batch") else self.batches[:1]
            heads = self.heads.reshape(-1) if function.depends_on("head") else self.heads.reshape(-1)[:1]
            if len(batches) * len(heads) > self.problem.group_size:  # many small heads
                return may_show, ~evaluates
            blocks_of = functools.partial(shown_blocks, mask, self.rows, keys, (len(self.rows), BLOCK))
            every = [blocks_of(b, h, self.call.bounds) for b in batches.tolist() for h in heads.tolist()]
            always, sometimes = (np.array(x)[:, 0].repeat(BLOCK, axis=1) for x in zip(*every, strict=True))
            evaluates = ~np.logical_and.reduce(always)[: len(keys)]
            may_show = may_show & np.logical_or.reduce(sometimes)[: len(keys)]
        return may_show, evaluates

    def inputs(self, keys: range) -> dict[str, Any]:
        i, j = np.arange(self.rows.start, self.rows.stop)[:, None], np.arange(keys.start, keys.stop)
        return {"i": i, "j": j, "head": self.heads[..., None, None], "batch": self.batches[:, None, None, None, None]}

    def visible(self, inputs: Mapping[str, Any], keys: range, evaluates: bool) -> Array | None:
        """Which pairs are visible; None where all are."""
        problem, i, j = self.problem, inputs["i"], inputs["j"]
        diagonal, right, left = problem.diagonal, problem.window_right, problem.window_left
        found: list[Array] = []
        if right is not None and keys[-1] > self.rows[0] + diagonal + right:
            found.append(j <= i + (diagonal + right))
        if left is not None and keys[0] < self.rows[-1] + diagonal - left:
            found.append(j >= i + (diagonal - left))
        if "mask" in self.call.arrays:
            found.append(self.of_pairs("mask", keys))
        if "block_mask" in self.call.arrays:
            rows, columns = problem.block_size
            found.append(self.call.arrays["block_mask"][self.at_heads][..., i // rows, j // columns])
        if evaluates and self.call.program.mask is not None:
            found += evaluate([self.call.program.mask], inputs, self.call.score_args, self.dtype)
        if not found:
            return None
        return np.broadcast_to(functools.reduce(np.logical_and, found), (*self.shape, len(keys)))

    def scores(self, tile: Tile) -> tuple[Array, Array]:
        """Scaled products of a tile, and its scores, -inf for pairs that are not visible; both may be one array."""
        problem, call = self.problem, self.call
        s = product(self.q, self.of_keys("k", tile).swapaxes(2, 3)).reshape(*self.shape, len(tile.keys))
        # Not of q before the sum: rounded elements would tell equal products apart.
        s *= self.dtype.type(problem.scale)
        scores = s
        if call.program.score is not None:
            (scores,) = evaluate([call.program.score], {**tile.inputs, "s": s}, call.score_args, self.dtype)
        if problem.softcap is not None:
            cap = self.dtype.type(problem.softcap)
            scores = np.tanh(s / cap) * cap
        if "alibi_slopes" in call.arrays:
            scores = scores - call.arrays["alibi_slopes"][self.at_heads][..., None, None] * self.distances(tile)
        if "bias" in call.arrays:
            scores = scores + self.of_pairs("bias", tile.keys).astype(self.dtype, copy=False)
        if tile.visible is not None:
            scores = np.where(tile.visible, scores, self.dtype.type(-np.inf))
        if scores.shape != s.shape or scores.dtype != s.dtype:
            scores = np.broadcast_to(scores, s.shape).astype(s.dtype)
        return s, scores

    def distances(self, tile: Tile) -> Array:
        return np.abs(tile.inputs["i"] + self.problem.diagonal - tile.inputs["j"]).astype(self.dtype)

    def kept(self, tile: Tile) -> Array:
        """The factors by which dropout multiplies weights."""
        origin = self.problem.origin
        heads = origin.head + self.batches[:, None, None] * origin.num_heads + self.heads
        rows, keys = (
            range(first + x.start, first + x.stop) for first, x in zip(origin[:2], (self.rows, tile.keys), strict=True)
        )
        kept = kept_weights(self.problem.dropout, *self.call.random, heads, rows, keys)
        return self.folded(kept) * self.dtype.type(self.problem.kept_scale)

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Write out, lse and the reductions that are wanted."""
        softmax = OnlineSoftmax(self.sinks)
        o = np.zeros((*self.q.shape[:3], self.problem.head_dim_v), self.dtype)
        for tile in self.tiles():
            scores = self.folded(self.scores(tile)[1])
            if self.problem.row_reductions:
                softmax.reduce(scores)
            weights, factor = softmax.step(scores)
            if self.problem.dropout:
                weights *= self.kept(tile)
            o = o * factor + product(weights, self.of_keys("v", tile))
        self.write("out", o / np.where(softmax.row_sum == 0, 1, softmax.row_sum))
        self.write("lse", softmax.row_max + np.log(softmax.row_sum))
        for name in self.problem.row_reductions:
            self.write(name, getattr(softmax, name))

    # ---- backward ----------------------------------------------------------------------------------------------------

    def softmax(self) -> OnlineSoftmax:
        """Row max and row sum over all keys."""
        softmax = OnlineSoftmax(self.sinks)
        for tile in self.tiles():
            softmax.step(self.folded(self.scores(tile)[1]))
        return softmax

    def find_row_sums(self) -> None:
        """Write row max and row sum of rows whose lse is large, whatever lse is: other calls may have other keys."""
        large = is_large(self.of_rows("lse"))
        if not large.any():
            return
        softmax = self.softmax()
        result = self.call.arrays["row_sums"][self.at_rows]
        found = np.concatenate([softmax.row_max, softmax.row_sum], axis=-1, dtype=np.float64)
        result[...] = np.where(large.reshape(*result.shape[:-1], 1), found.reshape(result.shape), result)

    def row_max_and_sum(self, lse: Array) -> tuple[Array, Array | None]:
        """What makes weights of scores: ``exp(S - first) / second``, or ``exp(S - first)`` if the second is None.

        They are lse and None. But where lse = row_max + log(row_sum) is large, its rounding loses what log(row_sum)
        says, and the weights of a row would not sum to 1. There row max and row sum are computed again. They are used
        if they explain lse: otherwise these keys are some of those that lse belongs to.
        """
        base = np.where(lse == -np.inf, np.inf, lse)
        if "row_sums" in self.call.arrays:
            row_max, inverse = np.split(self.of_rows("row_sums"), 2, axis=-1)
            return np.where(inverse < 0, base, row_max), 1 / np.where(inverse < 0, 1, inverse)
        large = is_large(lse)
        if not large.any():
            return base, None
        softmax = self.softmax()
        difference = (softmax.row_max - lse) + np.log(softmax.row_sum)
        explains = large & (np.abs(difference) <= UNITS_OF_LSE * np.spacing(np.abs(lse)))
        return np.where(explains, softmax.row_max, base), np.where(explains, softmax.row_sum, 1)

    def first_maxima(self) -> Array:
        """The first key of each row that has the largest score of the row; -1 in a row without keys."""
        largest, found = np.full_like(self.sinks, -np.inf), np.full(self.sinks.shape, -1)
        for tile in self.tiles():
            scores = self.folded(self.scores(tile)[1])
            at = scores.argmax(axis=-1)[..., None]
            own = np.take_along_axis(scores, at, axis=-1)
            found = np.where(own > largest, at + tile.keys.start, found)
            largest = np.maximum(largest, own)
        return found

    def weights_of(self, lse: Array) -> Callable[[Array], Array]:
        """A function that makes weights of scores, in index of these."""
        row_max, row_sum = self.row_max_and_sum(lse)
        return self.weights_by(row_max, row_sum, lse == -np.inf)

    def weights_by(self, row_max: Array, row_sum: Array | None, is_empty: Array) -> Callable[[Array], Array]:
        """The same by `row_max_and_sum`, and rows that have no weights."""

        def weights(scores: Array) -> Array:
            p = _exponentials(scores, row_max)
            if row_sum is not None:
                p /= row_sum
            if is_empty.any():
                np.copyto(p, 0, where=is_empty)  # such a row may have any scores
            return p

        return weights

    def backward(self, wanted: Mapping[str, Array]) -> JobGradients:
        """Write dq, if it is wanted, and return what the job adds to the other gradients."""
        lse, dO, O = (self.of_rows(name) for name in ("lse", "dout", "out"))  # noqa: E741 (the paper's letter)
        row_max, row_sum = self.row_max_and_sum(lse)
        is_empty = lse == -np.inf
        weights = self.weights_by(row_max, row_sum, is_empty)
        delta = (dO * O).sum(axis=-1, keepdims=True)
        if "dlse" in self.call.arrays:
            delta -= np.where(is_empty, 0, self.of_rows("dlse"))
        reductions = RowReductionGradients(self, row_max, row_sum, is_empty)

        gradients = JobGradients(self, wanted)
        dq = np.zeros(self.q.shape, self.dtype)  # over scale
        for tile in self.tiles():
            s, scores = self.scores(tile)
            scores = self.folded(scores)
            of_weights = reductions.by_log(scores)
            p = weights(scores)
            kept = self.kept(tile) if self.problem.dropout else None
            if "dv" in wanted:
                gradients.add_keys("dv", tile, product((p if kept is None else p * kept).swapaxes(2, 3), dO))
            if gradients.is_of_values:
                continue
            ds = product(dO, self.of_keys("v", tile).swapaxes(2, 3))
            if kept is not None:
                ds *= kept
            ds -= delta
            if of_weights is not None:
                ds -= of_weights
            ds *= p
            reductions.add_maxima(tile, ds)
            if gradients.is_of_scores:
                counts = (p != 0) | (ds != 0)  # with a sink, the largest score may have a gradient and no weight
                ds = self.folded(gradients.add_scores(tile, s, ds.reshape(s.shape), counts.reshape(s.shape)))
            if "dk" in wanted:
                gradients.add_keys("dk", tile, product(ds.swapaxes(2, 3), self.scaled_q))
            if "dq" in wanted or "dscale" in wanted:
                dq += product(ds, self.of_keys("k", tile))
        if "dscale" in wanted:
            gradients.of_heads["dscale"] = self.sum_of_rows(dq * self.of_rows("q"))
        if "dsinks" in wanted and "sinks" in self.call.arrays:
            of_sink = reductions.by_log(self.sinks)
            own_delta = delta if of_sink is None else delta + of_sink
            gradients.of_heads["dsinks"] = -self.sum_of_rows(weights(self.sinks) * own_delta)
        if "dq" in wanted:
            self.write("dq", dq * self.dtype.type(self.problem.scale))
        return gradients

    def sum_of_rows(self, x: Array) -> Array:
        """The sum over rows, or over pairs, of each head: (batch, heads)."""
        return x.reshape(self.shape[0], self.heads.size, -1).sum(axis=2, dtype=np.float64)


LEAST_LOG_WEIGHT = -1024.0


class RowReductionGradients:
    """What gradients of row reductions add to dS: ``-P (log P + H) dH``, and dmax at the first largest score."""

    def __init__(self, job: Job, row_max: Array, row_sum: Array | None, is_empty: Array) -> None:
        self.dentropy = self.dmax = None
        if "entropy" in job.problem.row_reductions:
            self.dentropy = np.where(is_empty, 0, job.of_rows("dentropy"))
            self.entropy = np.where(is_empty, 0, job.of_rows("entropy"))
            self.row_max, self.log_sum = row_max, 0 if row_sum is None else np.log(row_sum)
        if "max" in job.problem.row_reductions:
            self.dmax, self.at = job.of_rows("dmax"), job.first_maxima()

    def by_log(self, scores: Array) -> Array | None:
        """(log P + H) dH for scores, 0 where these hide pairs; None without dH."""
        if self.dentropy is None:
            return None
        log_weights = np.where(scores == -np.inf, 0, (scores - self.row_max) - self.log_sum)
        # Below, weights are 0, and finite masks are so low that the product may overflow.
        log_weights = np.maximum(log_weights, LEAST_LOG_WEIGHT)
        return np.where(np.isfinite(log_weights), log_weights + self.entropy, 0) * self.dentropy

    def add_maxima(self, tile: Tile, ds: Array) -> None:
        """Add dmax to the gradients of the scores of a tile."""
        if self.dmax is not None:
            ds += np.where(self.at == np.arange(tile.keys.start, tile.keys.stop), self.dmax, 0)


class JobGradients:
    """What a job adds to gradients that jobs share."""

    def __init__(self, job: Job, wanted: Mapping[str, Array]) -> None:
        self.job, self.wanted = job, wanted
        self.is_of_values = wanted.keys() <= {"dv"}
        changes_slope = job.problem.softcap is not None or job.call.program.score is not None
        self.is_of_scores = changes_slope or bool(wanted.keys() & {"dbias", "dalibi_slopes"})
        self.of_keys: list[tuple[Array, Array]] = []  # views of sums, and what is added to them
        self.of_heads: dict[str, Array] = {}  # by name, (batch, heads)
        self.of_bias: list[tuple[tuple[slice, ...], Array]] = []  # where in dbias, and what
        self.of_entries: list[tuple[str, Any, Array]] = []  # which array that the score reads, which entries, and what

    def add_keys(self, name: str, tile: Tile, x: Array) -> None:
        """Add to dk or dv of the keys of a tile."""
        index = (*self.job.at_heads, tile.columns)
        self.of_keys.append((self.job.call.arrays[name][index], x))

    def add_scores(self, tile: Tile, s: Array, ds: Array, counts: Array) -> Array:
        """Add to the gradients of what makes scores of the scaled products s; return the gradient of s.

        `ds` is that of the scores. Only pairs with weight count: others add nothing, whatever a derivative is.
        """
        job, call, problem = self.job, self.job.call, self.job.problem
        if "dbias" in self.wanted and "bias" in call.arrays:
            self.add_bias(tile, ds)
        if "dalibi_slopes" in self.wanted and "alibi_slopes" in call.arrays:
            self.add_heads("dalibi_slopes", -ds * job.distances(tile))
        if problem.softcap is not None:
            x = argument_of_cap(s, job.dtype.type(problem.softcap))
            tanh = np.tanh(x)
            if "dsoftcap" in self.wanted:
                self.add_heads("dsoftcap", ds * np.where(counts, derivative_by_softcap(x, tanh), 0))
            ds = ds * np.where(counts, 1 - tanh * tanh, 0)
        program = call.program
        if program.score is not None and program.by_s is not None:
            inputs = {**tile.inputs, "s": s}
            reads = [(name, x) for name, loads in program.loads.items() if f"d{name}" in self.wanted for x in loads]
            nodes = [program.by_s, *(load.derivative for _, load in reads)]
            slope, *derivatives = evaluate(nodes, inputs, call.score_args, job.dtype)
            for (name, load), derivative in zip(reads, derivatives, strict=True):
                indices = evaluate(load.at.args, inputs, call.score_args, job.dtype)
                own = sums_of_entries(
                    entries(call.score_args[name].shape, indices), ds * np.where(counts, derivative, 0)
                )
                self.of_entries.append((name, *own))
            ds = ds * np.where(counts, slope, 0)
        return ds

    def add_heads(self, name: str, x: Array) -> None:
        self.of_heads[name] = self.of_heads.get(name, 0) + self.job.sum_of_rows(x)

    def add_bias(self, tile: Tile, ds: Array) -> None:
        job, shape = self.job, _with_axes(self.wanted["dbias"], 4).shape
        whole: tuple[Any, ...] = (job.batches, job.heads.reshape(-1), job.rows, tile.keys)
        index = tuple(slice(x[0], x[-1] + 1) if n > 1 else slice(None) for x, n in zip(whole, shape, strict=True))
        summed = tuple(axis for axis, n in enumerate(shape) if n == 1)
        ds = ds.reshape([len(x) for x in whole])
        self.of_bias.append((index, ds.sum(axis=summed, keepdims=True, dtype=np.float64) if summed else ds))


class GradientSums:
    """The gradients that are `wanted`: sums over jobs.

    `of_rows` has dq itself, and the sums of dk and dv in the dtype of the softmax; those that are wanted.
    """

    def __init__(self, problem: Problem, wanted: dict[str, Array]) -> None:
        self.wanted = wanted
        self.of_rows, self._of_heads, self._of_entries = dict[str, Array](), dict[str, Array](), dict[str, Array]()
        for name, x in wanted.items():
            if name in DEFAULT_NEED:
                self.of_rows[name] = x if name == "dq" else np.zeros(x.shape, problem.softmax_dtype)
            elif name == "dbias" or name in problem.score_arg_gradients:
                self._of_entries[name] = np.zeros(x.shape)
            else:
                self._of_heads[name] = np.zeros((problem.batch, problem.num_heads))

    def add(self, gradients: JobGradients) -> None:
        for total, x in gradients.of_keys:
            total += x
        for name, x in gradients.of_heads.items():
            batches, heads = gradients.job.batches, gradients.job.heads.reshape(-1)
            self._of_heads[name][batches[0] : batches[-1] + 1, heads[0] : heads[-1] + 1] += x
        for index, x in gradients.of_bias:
            _with_axes(self._of_entries["dbias"], 4)[index] += x
        for name, entries, x in gradients.of_entries:
            self._of_entries[f"d{name}"].reshape(-1)[entries] += x

    def write(self) -> None:
        """Round the sums to the results."""
        with np.errstate(all="ignore"):
            for name, x in (self.of_rows | self._of_entries).items():
                if name != "dq":
                    self.wanted[name][...] = x
            for name, x in self._of_heads.items():
                result = self.wanted[name]
                result[...] = x.sum(axis=tuple(range(2 - result.ndim)))


def _with_axes(x: Array, count: int) -> Array:
    """A view with so many axes, the first ones of length 1."""
    return x[(None,) * (count - x.ndim)]


def shown_blocks(
    mask: Node, rows: range, keys: range, block: tuple[int, int], batch: int, head: int, tables: Tables
) -> tuple[Array, Array]:
    """For each block of pairs of a head whether the mask shows all of them, and whether it shows any."""
    ranges = []
    for whole, size in zip((rows, keys), block, strict=True):
        first = np.arange(whole.start, whole.stop, size)
        ranges.append((first, np.minimum(first + size, whole.stop) - 1))
    (first_i, last_i), (first_j, last_j) = ranges
    inputs: dict[str, Any] = {"i": (first_i[:, None], last_i[:, None]), "j": (first_j, last_j)}
    inputs |= {"batch": (batch, batch), "head": (head, head)}
    always, sometimes = bounds_of(mask, inputs, tables.load)
    shape = (first_i.size, first_j.size)
    return np.broadcast_to(always, shape) == 1, np.broadcast_to(sometimes, shape) == 1


def entries(shape: tuple[int, ...], indices: Sequence[Array]) -> Array:
    """The numbers of the entries of an array that the indices name, all of its entries counted."""
    flat: Any = np.zeros((), np.int64)
    for index, length in zip(clamped(indices, shape), shape, strict=True):
        flat = flat * length + index
    return np.asarray(flat)


def sums_of_entries(named: Array, values: Array) -> tuple[Any, Array]:
    """Which `entries` of an array are named, and the sums of the values for each."""
    flat = named.reshape((1,) * (values.ndim - named.ndim) + named.shape)
    summed = tuple(axis for axis in range(values.ndim) if flat.shape[axis] == 1)
    weights = values.sum(axis=summed, keepdims=True, dtype=np.float64) if summed else values
    flat, weights = np.broadcast_to(flat, weights.shape).reshape(-1), weights.reshape(-1)
    start, stop = int(flat.min()), int(flat.max()) + 1
    if stop - start <= SPREAD * flat.size:
        return slice(start, stop), np.bincount(flat - start, weights, stop - start)
    found, inverse = np.unique(flat, return_inverse=True)
    return found, np.bincount(inverse.reshape(-1), weights)


def argument_of_cap(s: Array, cap: Any) -> Array:
    """``s / cap`` for derivatives: within bounds beyond which those of tanh are 0, because it may be infinite."""
    return np.clip(s / cap, -64, 64)  # type: ignore[no-any-return]


def derivative_by_softcap(x: Array, tanh: Array) -> Array:
    """The derivative of ``softcap * tanh(x)``, x = score / softcap: ``tanh(x) - x * (1 - tanh(x) ** 2)``.

    The terms cancel near 0. There it is ``(sinh(2 x) - 2 x) / 2 * (1 - tanh(x) ** 2)``, by the series of the first
    factor.
    """
    slope, near = 1 - tanh * tanh, np.abs(x) < 0.5
    x2 = np.where(near, x * x, 0)
    series = np.ones_like(x)
    for n in range(18, 3, -2):
        series = 1 + 4 / (n * (n + 1)) * x2 * series
    return np.where(near, 2 / 3 * x * x2 * series * slope, tanh - x * slope)
