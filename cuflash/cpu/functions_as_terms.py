"""score_mod and mask_mod as a bias and masks, with which the compiled core computes some queries at a time.

What a score adds to the scaled product is its bias, if that does not depend on the product. Of any other score, the
bias is all of it: NumPy multiplies q and k, and the core gets zeros in their places. NumPy computes the bias, and what
a mask function hides, once for all batch entries and heads that the functions do not tell apart. What follows from
i - j alone is computed once for each diagonal, and the rows of the bias are views of one line.

A part of a call has as many queries, heads and batch entries as take `PART_BYTES`, so that memory is linear, and
results do not depend on the number of threads. What parts add to dk and dv is summed in the dtype of the softmax, in
their order. Gradients of arrays that a score reads, and of q and k where it is no sum, follow from that of the bias;
those of arrays are summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cuflash.arrays.array_info import ITEMSIZE, view_4d, view_rows
from cuflash.cpu import core, jobs
from cuflash.cpu.fallback import shown_blocks, sums_of_entries
from cuflash.cpu.packed import clear_gradients_of_no_sequence, sequences
from cuflash.cpu.part_products import Products
from cuflash.cpu.parts import BLOCK, Pairs, Part, Tile, parts, slices, sums_of_diagonals
from cuflash.score_mod import is_of_diagonals
from cuflash.score_mod.evaluation import evaluate
from cuflash.score_mod.intervals import Tables
from cuflash.score_mod.nodes import Node, in_order
from cuflash.spec.inputs import NAMES, TERMS
from cuflash.spec.options import Options, Origin
from cuflash.spec.outputs import DEFAULT_NEED, OUTPUTS, OVER_ROWS, TAKEN_BY_BACKWARD
from cuflash.spec.passes import BACKWARD, FORWARD, Pass
from cuflash.spec.problem import Problem, make_problem

Array = NDArray[Any]
Result = TypeVar("Result")

# With as many pairs, calls of NumPy take most of the time: one head of 64 queries and keys took 0.28 ms by tiles, and
# 0.41 so.
FEW_PAIRS = 2**13
PART_BYTES = 2**23  # of the bias of a part
LINE = 2**16  # diagonals at a time
LENGTHS = "kv_lengths"
STARTS = ("cu_seqlens_q", "cu_seqlens_k")
_OF_SCORES = tuple(term.name for term in TERMS if term.part_of == "scores")
BESIDE = ("mask", LENGTHS, *_OF_SCORES, *(term.name for term in TERMS if term.part_of == "softmax"))


def why_not(problem: Problem, wanted: Collection[str] = ()) -> str | None:
    """Why a call, or its gradients `wanted`, are not computed so; None if they are."""
    if (reason := core.why_not(problem)) is not None:
        return reason
    terms = [name for name in problem.given(NAMES) if name not in (*BESIDE, *STARTS)]
    is_bounded = (problem.window_left, problem.window_right) != (None, None)
    if terms or problem.has_float8:
        return f"functions beside {', '.join(terms) or 'fp8'}"
    one = problem.mean_sequence
    if one.batch * one.num_heads * one.seqlen_q * one.seqlen_k <= FEW_PAIRS:
        return "functions of few pairs"
    if problem.given((LENGTHS,)) and (is_bounded or problem.given(_OF_SCORES)):
        return f"functions beside {LENGTHS} and what a diagonal decides"
    try:
        problem.program.on_numpy()
    except NotImplementedError:
        return "a score that is a text"
    others = [name for name in wanted if name not in (*DEFAULT_NEED, *problem.captured_gradients)]
    return f"gradients beside functions: {', '.join(others)}" if others else None


def is_sum(score: Node) -> bool:
    """Whether a score is the scaled product and what does not depend on it."""
    while score.op in ("add", "sub"):
        own = [_reads_product(arg) for arg in score.args]
        if own != [True, False] and (own != [False, True] or score.op == "sub"):
            return False
        score = score.args[own.index(True)]
    return score.op == "input" and score.payload == "s"


def _reads_product(at: Node) -> bool:
    return any(x.op == "input" and x.payload == "s" for x in in_order([at]))


def run(
    problem: Problem, arrays: Mapping[str, Array | None], pass_: Pass, seed: int | None, offset: int | None
) -> None:
    """Compute a pass, as `cuflash.cpu.core.run` does."""
    given = {name: x for name, x in arrays.items() if x is not None}
    captured = {name: given.pop(name) for name, _ in problem.captured}
    results = {name: given.pop(f"d{name}") for name in captured if f"d{name}" in given}
    of_reads = {name: np.zeros(x.shape) for name, x in results.items()}
    call_of = partial(_Call, captured, of_reads, (seed, offset))
    if problem.is_packed:
        clear_gradients_of_no_sequence(problem, given)
        for one in sequences(problem, *(given[name] for name in STARTS)):
            call_of(one.problem, one.of_call(given), one.index).run(pass_)
    else:
        call_of(problem, given).run(pass_)
    with np.errstate(all="ignore"):
        for name, x in results.items():
            x[...] = of_reads[name]


class _Workspace:
    """Memory for arrays of pairs, kept from part to part: fresh memory has to be mapped page by page."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._memory: dict[str, Array] = {}

    def take(self, name: str, *shape: int) -> Array:
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].size < size:
            self._memory[name] = np.empty(size, self.dtype)
        return self._memory[name][:size].reshape(shape)


class _Call:
    """One call, or one packed sequence, whose arrays are (batch, heads, seqlen, dim).

    Attributes
    ----------
    of_reads : dict of str to array
        What has been summed of the wanted gradients of captured arrays.
    is_sum : bool
        Whether the score is the scaled product and what does not depend on it.
    has_diagonals : bool
        Whether it is, and what it adds follows from i - j alone.
    different : set of {"batch", "head"}
        What functions, or products, tell apart.
    wide : dtype or None
        In place of the dtype of q, if it is another one.
    """

    def __init__(
        self,
        captured: dict[str, Array],
        of_reads: dict[str, Array],
        random: tuple[int | None, int | None],
        problem: Problem,
        given: Mapping[str, Array],
        sequence: int = 0,
    ) -> None:
        self.captured, self.of_reads, self.random = captured, of_reads, random
        self.problem, self.sequence = problem, sequence
        self.dtype = np.dtype(problem.softmax_dtype)
        self.terms = {name: given[name] for name in BESIDE if name in given}
        self.results = {name: view_4d(given[name], problem.layout) for name in DEFAULT_NEED if name in given}
        self.arrays = {
            name: view_rows(x) if name in OVER_ROWS else view_4d(x, problem.layout)
            for name, x in given.items()
            if name not in (*self.terms, *self.results, *STARTS)
        }
        program = self.program = problem.program.on_numpy()
        self.is_sum = program.score is not None and is_sum(program.score)
        self.has_diagonals = self.is_sum and is_of_diagonals(cast("Node", program.score), program.arrays)
        roots = [root for root in (program.score, program.mask) if root is not None]
        inputs = {at.payload for at in in_order(roots) if at.op == "input"}
        multiplies = program.score is not None and not self.is_sum
        self.different = {name for name in ("batch", "head") if multiplies or name in inputs}
        self.tables = Tables(captured)
        self.wide: np.dtype[Any] | None = None
        self.workspace = _Workspace(self.dtype)

    def run(self, pass_: Pass) -> None:
        """Write results, and add to those of captured arrays."""
        problem, most = self.problem, PART_BYTES // self.dtype.itemsize
        is_line = self.has_diagonals and self.program.mask is None and not self.of_reads
        of_lines = problem.seqlen_q + problem.seqlen_k if is_line else None
        every = list(parts(problem, self.different, most, of_lines))
        if pass_ is FORWARD:
            for part in every:
                self.run_part(part, self.of_rows(part, OUTPUTS), FORWARD)
        elif "dout" not in self.arrays:
            for part in every:
                self.run_part(part, self.of_rows(part, ("lse", "row_sums")), BACKWARD)
        else:
            self.run_backward(every)

    def run_backward(self, every: list[Part]) -> None:
        """Write gradients. Where several parts add to dk and dv, all is computed in the dtype of the softmax."""
        is_split = len({part.rows.start for part in every}) > 1
        if is_split and ITEMSIZE[self.problem.dtype] < self.dtype.itemsize:
            self.wide = self.dtype
        sums = {name: np.zeros(x.shape, self.wide or x.dtype) for name, x in self.results.items()}
        for part in every:
            of_keys = (part.batches, part.heads_kv)
            own = {name: x[of_keys] for name, x in sums.items() if name != "dq"}
            added = {name: np.empty_like(x) for name, x in own.items()} if is_split else own
            rows = {"dq": sums["dq"][part.batches, part.heads, part.rows]} if "dq" in sums else {}
            given = self.of_rows(part, (*TAKEN_BY_BACKWARD, "row_sums"))
            self.run_part(part, given | rows | added, BACKWARD)
            if is_split:
                for name, x in own.items():
                    x += added[name]
        with np.errstate(all="ignore"):
            for name, x in self.results.items():
                x[...] = sums[name]

    def of_rows(self, part: Part, names: Collection[str]) -> dict[str, Array]:
        place = (part.batches, part.heads, part.rows)
        return {name: self.as_computed(self.arrays[name][place]) for name in names if name in self.arrays}

    def as_computed(self, x: Array) -> Array:
        is_narrow = x.dtype.itemsize < self.dtype.itemsize
        return x.astype(self.wide) if self.wide is not None and is_narrow else x

    def run_part(self, part: Part, arrays: dict[str, Array], pass_: Pass) -> None:
        """Compute a part: `arrays` are those of a call but for q, k, v and terms."""
        pairs = Pairs(self.problem, part, self.different, self.sequence)
        own = self.of_rows(part, ("q",))
        own |= {name: self.as_computed(self.arrays[name][part.batches, part.heads_kv]) for name in ("k", "v")}
        products, of_products = None, dict[str, Array]()
        if self.program.score is not None and not self.is_sum:
            scaled = self.workspace.take("scaled", *pairs.shape)
            products = Products(own["q"], own["k"], scaled, self.problem.scale)
            of_products = {name: arrays.pop(name) for name in ("dq", "dk") if name in arrays}
            own |= {name: np.zeros((*own[name].shape[:3], 1), own[name].dtype) for name in ("q", "k")}
        terms = {name: part.of_term(x, cast("int", core.AXES[name])) for name, x in self.terms.items()}
        of_functions, tiles = self.functions(pairs, products)
        if "mask" in terms and "mask" in of_functions:
            of_functions["mask"] = of_functions["mask"] & terms["mask"]
        if "bias" in terms:
            terms["bias"] = self.as_computed(terms["bias"])
        terms |= of_functions
        of_bias = {"dbias": self.workspace.take("dbias", *pairs.shape)} if self.of_reads or of_products else {}
        problem = make_problem(self.options(part), *own.values(), **terms)  # type: ignore[arg-type]
        core.run(problem, {**own, **terms, **arrays, **of_bias}, pass_, *self.random)
        if self.of_reads:
            self.add_reads(tiles, of_bias["dbias"], products)
        if products is not None and of_products:
            self.write_of_products(tiles, of_bias["dbias"], products, of_products)

    def options(self, part: Part) -> Options:
        """The options of a part."""
        whole = self.problem
        window, origin = (whole.window_left, whole.window_right), whole.origin
        head = ((part.batches.start or 0) + self.sequence) * origin.num_heads + (part.heads.start or 0)
        return Options(
            **whole.numbers,
            window=None if window == (None, None) else window,
            diagonal=whole.diagonal + part.rows.start,
            block_size=BLOCK,
            dropout=whole.dropout,
            origin=Origin(origin.query + part.rows.start, origin.key, origin.head + head, origin.num_heads),
        )

    def functions(self, pairs: Pairs, products: Products | None) -> tuple[dict[str, Array], list[Tile]]:
        """The bias of a part, the mask of its pairs, and that of its blocks, those that there are; and its tiles.

        Tiles that bounds or the mask hide as a whole are not among these. The bias may be anything there.
        """
        program, terms = self.program, dict[str, Array]()
        if self.has_diagonals:
            terms["bias"] = self.bias_of_diagonals(pairs)
        elif program.score is not None:
            terms["bias"] = self.workspace.take("bias", *pairs.shape)
        tiles = pairs.tiles()
        if program.mask is not None:
            always, sometimes = self.blocks(program.mask, pairs)
            terms["block_mask"], is_mixed = sometimes, sometimes & ~always
            if is_mixed.any():
                terms["mask"] = np.ones(pairs.shape, bool)
            tiles = [tile for tile in tiles if sometimes[tile.blocks].any()]

        def evaluate_mask(tile: Tile) -> None:
            (terms["mask"][tile.place],) = self.evaluate([cast("Node", program.mask)], tile.inputs())

        def evaluate_score(tile: Tile) -> None:
            if products is not None:
                products.write(tile)
            inputs = tile.inputs(None if products is None else products.scaled)
            (terms["bias"][tile.place],) = self.evaluate([cast("Node", program.score)], inputs)

        if "mask" in terms:
            self.for_each(evaluate_mask, [tile for tile in tiles if is_mixed[tile.blocks].any()])
        if program.score is not None and not self.has_diagonals:
            self.for_each(evaluate_score, tiles)
        return terms, tiles

    def bias_of_diagonals(self, pairs: Pairs) -> Array:
        """The bias of a part, whose rows are views of one line: each begins one number before the one above it."""
        *outer, rows, keys = pairs.shape
        line = np.empty((*outer, 1, max(rows + keys - 1, 0)), self.dtype)
        for part in slices(line.shape[-1], LINE):
            differences = pairs.rows[-1] - np.arange(part.start, part.stop)
            (line[..., part],) = self.evaluate([cast("Node", self.program.score)], pairs.of_diagonals(differences))
        *strides, _, step = line.strides
        return as_strided(line[..., 0, rows - 1 :], pairs.shape, (*strides, -step, step), writeable=False)

    def for_each(
        self, work: Callable[[Tile], Result], tiles: list[Tile], take: Callable[[Result], object] = lambda result: None
    ) -> None:
        jobs.run(work, tiles, jobs.count_cores(), take)

    def add_reads(self, tiles: list[Tile], dbias: Array, products: Products | None) -> None:
        """Add to the gradients of arrays what follows from that of the bias, tile after tile."""
        loads = [(name, load) for name in self.of_reads for load in self.program.loads[name]]

        def sum_tile(tile: Tile) -> list[tuple[str, Any, Array]]:
            own, entries = dbias[tile.place], []
            if self.has_diagonals:
                own, inputs = sums_of_diagonals(own), tile.of_diagonals()
            else:
                inputs = tile.inputs(None if products is None else products.scaled)
            for name, load in loads:
                (derivative,) = self.evaluate([load.derivative], inputs)
                # A pair that does not count has no part, whatever the derivative is.
                terms = own * np.where(own == 0, 0, derivative)
                places = self.evaluate(load.at.args, inputs)
                entries.append((name, *sums_of_entries(self.captured[name].shape, places, terms)))
            return entries

        def add(entries: list[tuple[str, Any, Array]]) -> None:
            for name, places, sums in entries:
                self.of_reads[name].reshape(-1)[places] += sums

        self.for_each(sum_tile, tiles, add)

    def write_of_products(
        self, tiles: list[Tile], dbias: Array, products: Products, results: Mapping[str, Array]
    ) -> None:
        """Write gradients of q and k, which follow from that of the bias, tile after tile."""
        sums = {name: np.zeros(x.shape, self.dtype) for name, x in results.items()}

        def multiply_tile(tile: Tile) -> list[tuple[Array, Array]]:
            own = dbias[tile.place]
            (slope,) = self.evaluate([cast("Node", self.program.by_s)], tile.inputs(products.scaled))
            own *= np.where(own == 0, 0, slope)
            found = products.gradients(tile, dbias, results)
            return [
                (sums[name][:, :, tile.own_rows if name == "dq" else tile.own_keys], x) for name, x in found.items()
            ]

        def add(found: list[tuple[Array, Array]]) -> None:
            for total, x in found:
                total += x

        self.for_each(multiply_tile, tiles, add)
        for name, x in results.items():
            x[...] = sums[name]

    def evaluate(self, roots: Collection[Node], inputs: Mapping[str, Array]) -> list[Array]:
        return evaluate(list(roots), inputs, self.captured, self.dtype)

    def blocks(self, mask: Node, pairs: Pairs) -> tuple[Array, Array]:
        """For each block of some rows, whether the mask shows all its pairs, and whether it shows any."""
        batches, heads = (pairs.of_all[name].reshape(-1).tolist() for name in ("batch", "head"))
        of = (pairs.rows, range(self.problem.seqlen_k), (BLOCK, BLOCK))
        shown = [[shown_blocks(mask, *of, b, h, self.tables) for h in heads] for b in batches]
        always, sometimes = (np.array([[found[n] for found in of_heads] for of_heads in shown]) for n in range(2))
        return always, sometimes
