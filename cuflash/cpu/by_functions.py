"""Attention and its gradients by NumPy where a function of the caller makes scores or hides pairs.

A tile is ROWS queries by KEYS keys of one head, and a job is a row of tiles: nothing takes memory for all pairs. Tiles
that the mask hides as a whole are skipped, by bounds of the mask over their indices. The calling thread adds the parts
of gradients that jobs share (dk, dv, gradients of what the score reads), in the order of the jobs, so results are the
same, bit for bit, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import cap, jobs, sink
from cuflash.cpu.packed import sequences
from cuflash.cpu.part_products import product
from cuflash.cpu.terms_as_score import program_and_arrays
from cuflash.cpu.tiles import count_threads
from cuflash.dropout import kept_weights
from cuflash.operands import view_4d, view_rows
from cuflash.problem import Problem
from cuflash.score.evaluation import clamped, evaluate
from cuflash.score.intervals import Tables, bounds_of
from cuflash.score.nodes import Node
from cuflash.terms import DEFAULT_NEED, GRADIENTS

Array = NDArray[Any]

ROWS, KEYS = 128, 512
SPREAD = 4  # sums for entries of an array are dense where the entries range over at most SPREAD times as many as values


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


class Call:
    """The operands of one call, or of one packed sequence, as (batch, heads, seqlen, dim)."""

    def __init__(
        self,
        problem: Problem,
        arrays: Mapping[str, Array],
        seed: int | None,
        offset: int | None,
        sequence: int | None = None,
    ) -> None:
        self.problem = problem
        self.program, self.captured = program_and_arrays(problem, arrays)
        self.seed, self.offset = seed, offset
        self.sequence = sequence
        self.dtype = np.dtype(problem.softmax_dtype)
        self.q, self.k, self.v = (view_4d(arrays[name], problem.layout) for name in ("q", "k", "v"))
        shape = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
        mask, blocks = arrays.get("mask"), arrays.get("block_mask")
        self.mask = None if mask is None else np.broadcast_to(mask, shape)
        self.block_mask = None if blocks is None else np.broadcast_to(blocks, (*shape[:2], *blocks.shape[-2:]))
        self.kv_lengths, self.sink = arrays.get("kv_lengths"), sink.Sink(arrays)
        self.k_scale, self.v_scale = arrays.get("k_scale"), arrays.get("v_scale")
        self._tables = Tables(self.captured)
        self._shown: dict[tuple[int, int], tuple[Array, Array]] = {}

    def entry(self, batch: int) -> int:
        """The number of a batch entry, or of the packed sequence, that functions see."""
        return batch if self.sequence is None else self.sequence

    def num_keys(self, batch: int) -> int:
        """How many keys a batch entry has."""
        if self.kv_lengths is None:
            return self.problem.seqlen_k
        return min(max(int(self.kv_lengths[batch]), 0), self.problem.seqlen_k)

    def aligned(self, batch: int) -> Problem:
        """The problem with the diagonal of a batch entry."""
        return self.problem.aligned_to(self.num_keys(batch))

    def shown(self, batch: int, head: int) -> tuple[Array, Array]:
        """For each tile of a head whether the mask shows all its pairs, and whether it shows any."""
        function = self.problem.mask_function
        assert function is not None and self.program.mask is not None
        entry = self.entry(batch) if function.depends_on("batch") else 0
        key = (entry, head if function.depends_on("head") else 0)
        if key not in self._shown:
            pairs = (range(self.problem.seqlen_q), range(self.problem.seqlen_k))
            self._shown[key] = shown_blocks(self.program.mask, *pairs, (ROWS, KEYS), *key, self._tables)
        return self._shown[key]

    def tiles(self, batch: int, head: int, rows: range) -> Iterator[tuple[range, bool]]:
        """The tiles of keys that some rows may see, and whether the mask has to be evaluated pair by pair."""
        own, num_keys = self.aligned(batch), self.num_keys(batch)
        first, stop = own.key_range(rows[0])[0], min(own.key_range(rows[-1])[1], num_keys)
        for start in range(first // KEYS * KEYS, stop, KEYS):
            keys, asks = range(max(start, first), min(start + KEYS, stop)), False
            if self.problem.mask_function is not None:
                always, sometimes = (x[rows.start // ROWS, start // KEYS] for x in self.shown(batch, head))
                if not sometimes:
                    continue
                asks = not always
            if len(keys):
                yield keys, asks

    def inputs(self, batch: int, head: int, rows: range, keys: range) -> dict[str, Any]:
        """The inputs of functions of pairs."""
        i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)[None, :]
        return {"i": i, "j": j, "head": head, "batch": self.entry(batch)}

    def hide(self, scores: Array, batch: int, head: int, inputs: Mapping[str, Any], asks: bool) -> None:
        """Put -inf in the place of hidden scores."""
        problem, i, j = self.aligned(batch), inputs["i"], inputs["j"]
        hidden = np.zeros(scores.shape, bool)
        if problem.window_right is not None:
            hidden |= j > i + problem.diagonal + problem.window_right
        if problem.window_left is not None:
            hidden |= j < i + problem.diagonal - problem.window_left
        if self.mask is not None:
            hidden |= ~self.mask[batch, head, i, j]
        if self.block_mask is not None:
            hidden |= ~self.block_mask[batch, head, i // problem.block_size[0], j // problem.block_size[1]]
        if asks and self.program.mask is not None:
            hidden |= ~evaluate([self.program.mask], inputs, self.captured, self.dtype)[0]
        scores[hidden] = -np.inf

    def rows_of(self, operand: Array, batch: int, head: int, rows: range) -> Array:
        part = operand[batch, head, rows.start : rows.stop].astype(self.dtype)
        scale = self.k_scale if operand is self.k else self.v_scale if operand is self.v else None
        return part if scale is None else part * scale[batch, head, rows.start : rows.stop, None]

    def kept(self, batch: int, head: int, rows: range, keys: range) -> Array:
        """The factors by which dropout multiplies weights."""
        origin = self.problem.origin
        place = origin.head + self.entry(batch) * origin.num_heads + head
        rows, keys = (range(first + x.start, first + x.stop) for first, x in zip(origin[:2], (rows, keys), strict=True))
        kept = kept_weights(self.problem.dropout, self.seed, self.offset, place, rows, keys)
        return kept * self.dtype.type(self.problem.kept_scale)

    def jobs(self) -> list[tuple[int, int, range]]:
        """(batch, head, rows) of every row of tiles."""
        problem = self.problem
        starts = range(0, problem.seqlen_q, ROWS)
        rows = [range(i, min(i + ROWS, problem.seqlen_q)) for i in starts]
        return [(b, h, r) for b, h in np.ndindex(problem.batch, problem.num_heads) for r in rows]


def run(
    problem: Problem, arrays: Mapping[str, Array | None], is_backward: bool, seed: int | None, offset: int | None
) -> None:
    """Compute a pass, as `cuflash.cpu.core.run` does."""
    given = {name: x for name, x in arrays.items() if x is not None}
    if is_backward:
        wanted = {name: given.pop(name) for name in problem.gradients if name in given}
        backward(problem, given, wanted, seed, offset)
    else:
        out, lse = given.pop("out"), given.pop("lse")
        forward(problem, given, out, lse, seed, offset)


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward(
    problem: Problem,
    arrays: Mapping[str, Array],
    out: Array,
    lse: Array,
    seed: int | None,
    offset: int | None,
) -> None:
    """Write out and lse; `arrays` are all others of the call, by name."""
    if problem.is_packed:
        for call, own in _sequences(problem, {**arrays, "out": out, "lse": lse}, seed, offset):
            _forward(call, own["out"], own["lse"])
    else:
        _forward(Call(problem, arrays, seed, offset), out, lse)


def _sequences(
    problem: Problem, arrays: Mapping[str, Array], seed: int | None, offset: int | None
) -> Iterator[tuple[Call, dict[str, Array]]]:
    """Each packed sequence as a call of its own, and its part of the arrays."""
    captured = {name: arrays[name] for name, _ in problem.captured}
    others = {name: x for name, x in arrays.items() if name not in captured}
    for one in sequences(problem, arrays["cu_seqlens_q"], arrays["cu_seqlens_k"]):
        own = one.of_call(others) | captured
        yield Call(one.problem, own, seed, offset, one.index), own


def _forward(call: Call, out: Array, lse: Array) -> None:
    out_4d, lse_3d = view_4d(out, call.problem.layout), view_rows(lse)
    threads = count_threads(call.problem.forward_flops)
    jobs.run(lambda _, *job: _forward_rows(call, out_4d, lse_3d, *job), call.jobs(), threads, call.dtype)


def _forward_rows(call: Call, out: Array, lse: Array, batch: int, head: int, rows: range) -> None:
    """out and lse of some rows of one head, by online softmax (FlashAttention-2, algorithm 1)."""
    problem, of_keys = call.problem, head // call.problem.group_size
    scaled = call.rows_of(call.q, batch, head, rows) * call.dtype.type(problem.scale)
    o = np.zeros((len(rows), problem.head_dim_v), call.dtype)
    m = np.full((len(rows), 1), -np.inf, call.dtype)
    l = np.zeros((len(rows), 1), call.dtype)  # noqa: E741 (the paper's letter)
    if call.sink:
        call.sink.begin(head, m, l)
    for keys, asks in call.tiles(batch, head, rows):
        k, v = (call.rows_of(x, batch, of_keys, keys) for x in (call.k, call.v))
        inputs = call.inputs(batch, head, rows, keys)
        scores = product(scaled, k.T)
        if call.program.score is not None:
            scores = _full(
                evaluate([call.program.score], {**inputs, "s": scores}, call.captured, call.dtype)[0], scores
            )
        call.hide(scores, batch, head, inputs, asks)
        raised = np.maximum(m, scores.max(axis=1, keepdims=True))
        base = np.where(raised == -np.inf, 0, raised)
        weights = np.exp(scores - base)
        factor = np.exp(np.where(m == -np.inf, -np.inf, m - base))
        m, l = raised, l * factor + weights.sum(axis=1, keepdims=True)  # noqa: E741 (the paper's letter)
        if problem.dropout:
            weights *= call.kept(batch, head, rows, keys)
        o = o * factor + product(weights, v)
    place = (batch, head, slice(rows.start, rows.stop))
    out[place] = o / np.where(l == 0, 1, l)
    lse[place] = np.where(l == 0, -np.inf, m + np.log(l))[:, 0]


def _full(value: Array, like: Array) -> Array:
    """A new array of the shape and dtype of another, with these values."""
    return np.array(np.broadcast_to(value, like.shape), like.dtype)


# ---- backward --------------------------------------------------------------------------------------------------------


def backward(
    problem: Problem,
    arrays: Mapping[str, Array],
    wanted: Mapping[str, Array],
    seed: int | None,
    offset: int | None,
) -> None:
    """Write the gradients that are wanted; `arrays` are all others of the call, by name."""
    sums: dict[str, Array] = {}
    for name, x in wanted.items():
        is_of_rows = name in DEFAULT_NEED
        sums[name] = np.zeros(x.shape, problem.softmax_dtype if is_of_rows else np.float64)
    if problem.is_packed:
        of_rows = {name: x for name, x in sums.items() if name in DEFAULT_NEED}
        for call, own in _sequences(problem, {**arrays, **of_rows}, seed, offset):
            of_terms = {name: x[call.sequence] for name, x in sums.items() if name in GRADIENTS and x.ndim == 2}
            _backward(call, own, {name: own.get(name, of_terms.get(name, x)) for name, x in sums.items()})
    else:
        _backward(Call(problem, arrays, seed, offset), arrays, sums)
    with np.errstate(all="ignore"):
        for name, x in wanted.items():
            x[...] = sums[name]


def _backward(call: Call, arrays: Mapping[str, Array], sums: Mapping[str, Array]) -> None:
    """Add the gradients of one call, or of one sequence, to sums."""
    layout = call.problem.layout
    dout, out = (view_4d(arrays[name], layout) for name in ("dout", "out"))
    lse = view_rows(arrays["lse"])
    dlse = view_rows(arrays["dlse"]) if "dlse" in arrays else None
    views = {name: view_4d(sums[name], layout) for name in DEFAULT_NEED if name in sums}
    threads, every = count_threads(call.problem.backward_flops), call.jobs()
    for first in range(0, len(every), threads):
        parts = [_Part(call, sums, *job) for job in every[first : first + threads]]

        def work(_: jobs.Workspace, part: _Part) -> None:
            part.compute(dout, out, lse, dlse)

        jobs.run(work, [(part,) for part in parts], threads, call.dtype)
        with np.errstate(all="ignore"):
            for part in parts:
                part.add_to(sums, views)


def sums_of_entries(shape: tuple[int, ...], places: Sequence[Array], values: Array) -> tuple[Any, Array]:
    """The places among all entries of an array that indices name, and the sums of the values for each."""
    flat: Any = np.zeros((1,) * values.ndim, np.int64)
    for index, length in zip(places, shape, strict=True):
        flat = flat * length + clamped(index, length)
    summed = tuple(axis for axis in range(values.ndim) if flat.shape[axis] == 1)
    weights = values.sum(axis=summed, keepdims=True, dtype=np.float64) if summed else values
    flat, weights = np.broadcast_to(flat, weights.shape).reshape(-1), weights.reshape(-1)
    start, stop = int(flat.min()), int(flat.max()) + 1
    if stop - start <= SPREAD * flat.size:
        return slice(start, stop), np.bincount(flat - start, weights, stop - start)
    found, inverse = np.unique(flat, return_inverse=True)
    return found, np.bincount(inverse.reshape(-1), weights)


class _Part:
    """The contribution of some rows of one head to the gradients that are wanted."""

    def __init__(self, call: Call, wanted: Mapping[str, Array], batch: int, head: int, rows: range) -> None:
        self.call, self.wanted = call, wanted
        self.batch, self.head, self.rows = batch, head, rows
        self.of_keys = head // call.problem.group_size
        self.dq: Array | None = None
        self.keys: list[tuple[range, Array | None, Array | None]] = []  # of dk and dv
        self.entries: list[tuple[str, Any, Array]] = []  # of arrays that the score reads: name, entries, and their sums
        self.dscale = self.dsink = 0.0

    def compute(self, dout: Array, out: Array, lse: Array, dlse: Array | None) -> None:
        call, rows, place = self.call, self.rows, (self.batch, self.head)
        problem, wanted = call.problem, self.wanted
        q, dO, O = (call.rows_of(x, *place, rows) for x in (call.q, dout, out))  # noqa: E741 (the paper's letter)
        here = (*place, slice(rows.start, rows.stop))
        log_sum = lse[here].astype(call.dtype)[:, None]
        is_empty = np.isneginf(log_sum)
        delta = (dO * O).sum(axis=1, keepdims=True)
        if dlse is not None:
            delta -= np.where(is_empty, 0, dlse[here][:, None])
        if call.sink and sink.GRADIENT in wanted:
            self.dsink = float(call.sink.gradient(self.head, log_sum[:, 0], delta[:, 0]))
        exponent = np.where(is_empty, np.inf, log_sum)
        if "dq" in wanted:
            self.dq = np.zeros(q.shape, call.dtype)
        for keys, asks in call.tiles(*place, rows):
            k, v = (call.rows_of(x, self.batch, self.of_keys, keys) for x in (call.k, call.v))
            inputs = call.inputs(*place, rows, keys)
            products = product(q, k.T)
            s = products * call.dtype.type(problem.scale)
            scores, slope, derivatives = self.functions(s, inputs)
            call.hide(scores, *place, inputs, asks)
            p = np.where(is_empty, 0, np.exp(scores - exponent))  # a row without weights may have any scores
            kept = call.kept(*place, rows, keys) if problem.dropout else None
            dv = product((p if kept is None else p * kept).T, dO) if "dv" in wanted else None
            dp = product(dO, v.T)
            ds = p * ((dp if kept is None else dp * kept) - delta)
            seen = p != 0  # a pair without weight contributes nothing, whatever its derivative is
            for name, load, derivative in derivatives:
                self.read(name, load.at.args, inputs, ds * np.where(seen, derivative, 0))
            ds = ds * np.where(seen, slope, 0)
            if "dscale" in wanted:
                self.dscale += float((ds * products).sum(dtype=np.float64))
            ds *= call.dtype.type(problem.scale)
            if self.dq is not None:
                self.dq += product(ds, k)
            self.keys.append((keys, product(ds.T, q) if "dk" in wanted else None, dv))

    def functions(self, s: Array, inputs: Mapping[str, Any]) -> tuple[Array, Array, list[tuple[str, Any, Array]]]:
        """Scores, their derivative by s, and those by entries that are wanted."""
        program, call = self.call.program, self.call
        if program.score is None or program.by_s is None:
            return s.copy(), np.ones((1, 1), call.dtype), []
        reads = [(name, x) for name, loads in program.loads.items() if f"d{name}" in self.wanted for x in loads]
        nodes = [program.score, program.by_s, *(x.derivative for _, x in reads)]
        value, slope, *others = evaluate(nodes, {**inputs, "s": s}, call.captured, call.dtype)
        for number, (name, _) in enumerate(reads):
            if f"d{name}" == cap.GRADIENT:  # its terms nearly cancel
                x = s / call.captured[name]
                others[number] = cap.derivative_by_softcap(x, np.tanh(x))
        return _full(value, s), slope, [(*read, x) for read, x in zip(reads, others, strict=True)]

    def read(self, name: str, indices: Any, inputs: Mapping[str, Any], values: Array) -> None:
        """Sum values for the entries of an array that pairs read."""
        array = self.call.captured[name]
        places = evaluate(indices, inputs, self.call.captured, self.call.dtype)
        self.entries.append((name, *sums_of_entries(array.shape, places, values)))

    def add_to(self, sums: Mapping[str, Array], views: Mapping[str, Array]) -> None:
        """Add this part to the sums that jobs share."""
        if self.dq is not None:
            views["dq"][self.batch, self.head, self.rows.start : self.rows.stop] = self.dq
        for keys, dk, dv in self.keys:
            for name, part in (("dk", dk), ("dv", dv)):
                if part is not None:
                    views[name][self.batch, self.of_keys, keys.start : keys.stop] += part
        for name, entries, part in self.entries:
            sums[f"d{name}"].reshape(-1)[entries] += part
        if "dscale" in sums:
            sums["dscale"][...] += self.dscale
        if sink.GRADIENT in sums:
            sums[sink.GRADIENT][self.head] += self.dsink
