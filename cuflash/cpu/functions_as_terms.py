"""Functions of the caller as a bias and masks, with which the compiled core computes some queries at a time.

What a score adds to the scaled product is its bias, if that does not depend on the product. NumPy computes it, and what
a mask function hides, once for all batch entries and heads that the functions do not tell apart. A part of a call has
as many queries as take `PART_BYTES`, so that memory is linear, and results do not depend on the number of threads.
What parts add to dk and dv is summed in the dtype of the softmax, in their order. Gradients of arrays that the score
reads follow from that of the bias, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import core, jobs
from cuflash.cpu.by_functions import shown_blocks, sums_of_entries
from cuflash.operands import ITEMSIZE, view_4d, view_rows
from cuflash.options import Options
from cuflash.problem import Problem, make_problem
from cuflash.score.evaluation import evaluate
from cuflash.score.intervals import Tables
from cuflash.score.nodes import Node, in_order
from cuflash.terms import DEFAULT_NEED, NAMES, TERMS

Array = NDArray[Any]

# With as many pairs, calls of NumPy take most of the time: one head of 64 queries and keys took 0.28 ms by tiles, and
# 0.41 so.
FEW_PAIRS = 2**13
PART_BYTES = 2**23  # of the bias of a part
BLOCK = 128  # queries, and keys, that a mask may hide as a whole
KEYS = 8 * BLOCK  # of which one job evaluates functions, for BLOCK queries
LENGTHS = "kv_lengths"
_OF_SCORES = tuple(term.name for term in TERMS if term.part_of == "scores")
BESIDE = ("mask", LENGTHS, *_OF_SCORES, *(term.name for term in TERMS if term.part_of == "softmax"))


def why_not(problem: Problem, wanted: Collection[str] = ()) -> str | None:
    """Why a call, or its gradients `wanted`, are not computed so; None if they are."""
    if (reason := core.why_not(problem)) is not None:
        return reason
    terms = [name for name in problem.given(NAMES) if name not in BESIDE] + ["dropout"] * (problem.dropout > 0)
    is_bounded = (problem.window_left, problem.window_right) != (None, None)
    if terms or problem.has_float8:
        return f"functions beside {', '.join(terms) or 'numbers of one byte'}"
    if problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k <= FEW_PAIRS:
        return "functions of few pairs"
    if problem.given((LENGTHS,)) and (is_bounded or problem.given(_OF_SCORES)):
        return f"functions beside {LENGTHS} and what a diagonal decides"
    try:
        program = problem.program.on_numpy()
    except NotImplementedError:
        return "a score that is a text"
    if program.score is not None and not _is_sum(program.score):
        return "a score that is no sum of the scaled product and a number"
    others = [name for name in wanted if name not in (*DEFAULT_NEED, *problem.captured_gradients)]
    return f"gradients beside functions: {', '.join(others)}" if others else None


def _is_sum(score: Node) -> bool:
    """Whether a score is the scaled product and what does not depend on it."""
    while score.op in ("add", "sub"):
        own = [_reads_product(arg) for arg in score.args]
        if own != [True, False] and (own != [False, True] or score.op == "sub"):
            return False
        score = score.args[own.index(True)]
    return score.op == "input" and score.payload == "s"


def _reads_product(at: Node) -> bool:
    return any(x.op == "input" and x.payload == "s" for x in in_order([at]))


class _Part(NamedTuple):
    """Some queries of some batch entries and heads."""

    batches: slice
    heads: slice
    heads_kv: slice
    rows: slice


def _cut(term: Array, axes: int, part: _Part) -> Array:
    """What a part sees of a term that is broadcast to the first axes of the scores."""
    own = (part.batches, part.heads, part.rows, slice(None))[axes - term.ndim : axes]
    return term[tuple(of if n > 1 else slice(None) for n, of in zip(term.shape, own, strict=True))]


def run(problem: Problem, arrays: Mapping[str, Array | None], is_backward: bool) -> None:
    """Compute a pass, as `cuflash.cpu.core.run` does."""
    call = _Call(problem, {name: x for name, x in arrays.items() if x is not None})
    parts = list(call.parts())
    if not is_backward:
        for part in parts:
            call.run(part, call.of_rows(part, ("out", "lse")), False)
    else:
        call.run_backward(parts)


class _Call:
    """One call whose arrays are (batch, heads, seqlen, dim)."""

    def __init__(self, problem: Problem, given: dict[str, Array]) -> None:
        self.problem, self.program = problem, problem.program.on_numpy()
        self.captured = {name: given[name] for name, _ in problem.captured}
        self.terms = {name: given[name] for name in BESIDE if name in given}
        self.results = {name: x for name, x in given.items() if name in problem.gradients}
        self.of_reads = {name: np.zeros(x.shape) for name, x in self.captured.items() if f"d{name}" in self.results}
        self.arrays = {
            name: view_rows(x) if name in ("lse", "dlse") else view_4d(x, problem.layout)
            for name, x in given.items()
            if name not in (*self.captured, *BESIDE, *self.results)
        }
        self.wide: np.dtype[Any] | None = None  # in place of the dtype of q, if it is another one
        self.tables = Tables(self.captured)
        roots = [root for root in (self.program.score, self.program.mask) if root is not None]
        inputs = {at.payload for at in in_order(roots) if at.op == "input"}
        self.by_batch, self.by_head = "batch" in inputs, "head" in inputs

    def parts(self) -> Iterator[_Part]:
        """Parts whose bias takes at most `PART_BYTES`, or a block of rows, in a fixed order."""
        problem = self.problem
        most = PART_BYTES // np.dtype(problem.softmax_dtype).itemsize
        group, every = problem.group_size, slice(None)
        batches, heads = [every], [(every, every)]
        seen = (problem.batch if self.by_batch else 1) * (problem.num_heads if self.by_head else 1)
        of_block = min(BLOCK, max(problem.seqlen_q, 1)) * max(problem.seqlen_k, 1)
        if self.by_batch and seen * of_block > most:
            batches = [slice(b, b + 1) for b in range(problem.batch)]
            seen //= max(problem.batch, 1)
        if self.by_head and seen * of_block > most:
            kv_heads = range(problem.num_heads_kv)
            heads = [(slice(h * group, (h + 1) * group), slice(h, h + 1)) for h in kv_heads]
            seen = group
        blocks = max(1, most // max(seen * BLOCK * problem.seqlen_k, 1))
        for batch in batches:
            for of_q, of_kv in heads:
                for first in range(0, problem.seqlen_q, blocks * BLOCK):
                    rows = slice(first, min(first + blocks * BLOCK, problem.seqlen_q))
                    yield _Part(batch, of_q, of_kv, rows)

    def of_rows(self, part: _Part, names: Collection[str]) -> dict[str, Array]:
        place = (part.batches, part.heads, part.rows)
        return {name: self.as_computed(self.arrays[name][place]) for name in names if name in self.arrays}

    def as_computed(self, x: Array) -> Array:
        return x if self.wide is None else x.astype(self.wide)

    def run(self, part: _Part, arrays: dict[str, Array], is_backward: bool) -> None:
        """Compute a part: `arrays` are those of a call but for q, k, v and terms."""
        pairs = _Pairs(self, part)
        own = self.of_rows(part, ("q",))
        own |= {name: self.as_computed(self.arrays[name][part.batches, part.heads_kv]) for name in ("k", "v")}
        terms = {name: _cut(x, cast("int", core.AXES[name]), part) for name, x in self.terms.items()}
        of_functions = self.functions(pairs)
        if "mask" in terms and "mask" in of_functions:
            of_functions["mask"] = of_functions["mask"] & terms["mask"]
        terms |= of_functions
        whole = self.problem
        window = (whole.window_left, whole.window_right)
        options = Options(
            **whole.numbers,
            window=None if window == (None, None) else window,
            diagonal=whole.diagonal + part.rows.start,
            block_size=BLOCK,
        )
        problem = make_problem(options, *own.values(), **terms)  # type: ignore[arg-type]
        of_bias = {"dbias": np.empty_like(terms["bias"])} if self.of_reads else {}
        core.run(problem, {**own, **terms, **arrays, **of_bias}, is_backward, None, None)
        if self.of_reads:
            self.add_reads(pairs, of_bias["dbias"])

    def run_backward(self, parts: list[_Part]) -> None:
        """Write gradients. Where several parts add to dk and dv, all is computed in the dtype of the softmax."""
        dtype = np.dtype(self.problem.softmax_dtype)
        results = {name: view_4d(x, self.problem.layout) for name, x in self.results.items() if name in DEFAULT_NEED}
        is_split = len({part.rows.start for part in parts}) > 1
        if is_split and ITEMSIZE[self.problem.dtype] < dtype.itemsize:
            self.wide = dtype
        sums = {name: np.zeros(x.shape, self.wide or x.dtype) for name, x in results.items()}
        for part in parts:
            of_keys = (part.batches, part.heads_kv)
            own = {name: x[of_keys] for name, x in sums.items() if name != "dq"}
            added = {name: np.empty_like(x) for name, x in own.items()} if is_split else own
            rows = {"dq": sums["dq"][part.batches, part.heads, part.rows]} if "dq" in sums else {}
            given = self.of_rows(part, ("dout", "out", "lse", "dlse"))
            self.run(part, given | rows | added, True)
            if is_split:
                for name, x in own.items():
                    x += added[name]
        with np.errstate(all="ignore"):
            for name, x in results.items():
                x[...] = sums[name]
            for name, read in self.of_reads.items():
                self.results[f"d{name}"][...] = read

    def functions(self, pairs: _Pairs) -> dict[str, Array]:
        """The bias of a part, the mask of its pairs, and that of its blocks; those that there are."""
        program, rows, dtype = self.program, pairs.rows, self.problem.softmax_dtype
        terms: dict[str, Array] = {}
        if program.score is not None:
            terms["bias"] = np.zeros(pairs.shape, dtype)
        if program.mask is not None:
            always, sometimes = self.blocks(program.mask, rows, pairs.of_all)
            terms |= {"block_mask": sometimes, "mask": np.ones(pairs.shape, bool)}

        def evaluate_tile(_: jobs.Workspace, first_row: int, first_key: int) -> None:
            inputs, place = pairs.tile(first_row, first_key)
            if program.mask is not None:
                stop_key = place[-1].stop
                blocks = (..., (first_row - rows.start) // BLOCK, slice(first_key // BLOCK, -(-stop_key // BLOCK)))
                if not sometimes[blocks].any():
                    return
                if not always[blocks].all():
                    terms["mask"][place] = evaluate([program.mask], inputs, self.captured, dtype)[0]
            if program.score is not None:
                terms["bias"][place] = evaluate([program.score], inputs, self.captured, dtype)[0]

        self.for_tiles(pairs, evaluate_tile)
        return terms

    def for_tiles(self, pairs: _Pairs, work: Callable[..., None]) -> None:
        tiles = list(pairs.tiles(self.problem))
        jobs.run(work, tiles, jobs.count_cores() if len(tiles) > 1 else 1, np.dtype(self.problem.softmax_dtype))

    def add_reads(self, pairs: _Pairs, values: Array) -> None:
        """Add to the gradients of arrays what follows from that of the bias, tile after tile."""
        loads = [(name, load) for name in self.of_reads for load in self.program.loads[name]]
        found: dict[tuple[int, int], list[tuple[str, Any, Array]]] = {at: [] for at in pairs.tiles(self.problem)}
        dtype = self.problem.softmax_dtype

        def sum_tile(_: jobs.Workspace, first_row: int, first_key: int) -> None:
            inputs, place = pairs.tile(first_row, first_key)
            own, entries = values[place], []
            for name, load in loads:
                (derivative,) = evaluate([load.derivative], inputs, self.captured, dtype)
                # A pair that does not count has no part, whatever the derivative is.
                terms = own * np.where(own == 0, 0, derivative)
                places = evaluate(load.at.args, inputs, self.captured, dtype)
                entries.append((name, *sums_of_entries(self.captured[name].shape, places, terms)))
            found[first_row, first_key] = entries

        self.for_tiles(pairs, sum_tile)
        for entries in found.values():
            for name, places, sums in entries:
                self.of_reads[name].reshape(-1)[places] += sums

    def blocks(self, mask: Node, rows: range, of_all: Mapping[str, Array]) -> tuple[Array, Array]:
        """For each block of some rows, whether the mask shows all its pairs, and whether it shows any."""
        batches, heads = (of_all[name].reshape(-1).tolist() for name in ("batch", "head"))
        keys = range(self.problem.seqlen_k)
        blocks = (BLOCK, BLOCK)
        shown = [[shown_blocks(mask, rows, keys, blocks, b, h, self.tables) for h in heads] for b in batches]
        always, sometimes = (np.array([[found[n] for found in of_heads] for of_heads in shown]) for n in range(2))
        return always, sometimes


class _Pairs:
    """The pairs of a part, as functions see them.

    Attributes
    ----------
    rows : range
    of_all : dict of str to array
        The batch entries and heads that functions tell apart, as axes 0 and 1 of four.
    shape : tuple of int
        Of the bias.
    """

    def __init__(self, call: _Call, part: _Part) -> None:
        problem = call.problem
        batches, heads = np.arange(problem.batch)[part.batches], np.arange(problem.num_heads)[part.heads]
        batches, heads = batches if call.by_batch else batches[:1], heads if call.by_head else heads[:1]
        self.rows = range(part.rows.start, part.rows.stop)
        self.of_all = {"batch": batches[:, None, None, None], "head": heads[:, None, None]}
        self.shape = (len(batches), len(heads), len(self.rows), problem.seqlen_k)
        self.dtype = problem.softmax_dtype

    def tiles(self, problem: Problem) -> Iterator[tuple[int, int]]:
        """The first row and the first key of each tile of `BLOCK` rows and `KEYS` keys that bounds show."""
        for first_row in range(self.rows.start, self.rows.stop, BLOCK):
            last = min(first_row + BLOCK, self.rows.stop) - 1
            first, stop = problem.key_range(first_row)[0], problem.key_range(last)[1]
            for first_key in range(first // KEYS * KEYS, stop, KEYS):
                yield first_row, first_key

    def tile(self, first_row: int, first_key: int) -> tuple[dict[str, Array], tuple[Any, ...]]:
        """The inputs of functions in a tile, and its place in the bias. The scaled product is 0."""
        stop_row, stop_key = min(first_row + BLOCK, self.rows.stop), min(first_key + KEYS, self.shape[3])
        inputs = {"i": np.arange(first_row, stop_row)[:, None], "j": np.arange(first_key, stop_key)}
        place = (..., slice(first_row - self.rows.start, stop_row - self.rows.start), slice(first_key, stop_key))
        return {**inputs, **self.of_all, "s": np.zeros(1, self.dtype)}, place
