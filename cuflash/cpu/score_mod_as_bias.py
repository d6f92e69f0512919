"""score_mod and mask_mod as a bias and masks, with which the compiled core computes some queries at a time.

What a score adds to the scaled product is its bias, if that does not depend on the product. Of any other score, the
bias is all of it: NumPy multiplies q and k, and the core gets zeros instead. NumPy computes the bias, and what
a mask function hides, once for all batch entries and heads that the functions do not distinguish. What follows from
i - j alone is computed once for each diagonal, and the rows of the bias are views of one line.

A slice of a call has as many queries, heads and batch entries as take `SLICE_BYTES`, so that memory is linear, and
results do not depend on the number of threads. All that follows from the shapes and strides of arrays is prepared once
(`Prepared`), and kept for repeated calls by `cuflash.cpu.backend`. What slices add to dk and dv is summed in the dtype
of the softmax, in their order. Gradients of arrays that a score reads, and of q and k where it is no sum, follow from
that of the bias; those of arrays are summed in float64. In passes with tangents the tangent of the bias is that of what
the score adds, or of the score: NumPy multiplies the tangents of q and k, too, and the tangents of gradients of q and k
follow from the gradient of the bias, which the core computes before, and from the tangent of that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cuflash.arrays.array_info import ITEMSIZE, view_4d, view_rows
from cuflash.cpu import core, jobs
from cuflash.cpu.fallback import shown_blocks, sums_of_entries
from cuflash.cpu.gemm import Products
from cuflash.cpu.packed import clear_gradients_of_no_sequence, sequences
from cuflash.cpu.score_tiles import BLOCK, CallSlice, Pairs, Tile, call_slices, sums_of_diagonals
from cuflash.score_mod import is_of_diagonals
from cuflash.score_mod.evaluation import evaluate
from cuflash.score_mod.intervals import Tables
from cuflash.score_mod.nodes import Node, in_order
from cuflash.spec.inputs import INPUTS, NAMES, NUMBERS, OPTIONAL_INPUTS
from cuflash.spec.options import Options, Origin
from cuflash.spec.outputs import DEFAULT_NEED, DEFAULT_NEED_TANGENTS, MOVABLE_OVER_ROWS, REQUIRED_BY_BACKWARD
from cuflash.spec.passes import BACKWARD, JVP, Pass
from cuflash.spec.problem import Problem, make_problem

Array = NDArray[Any]
Result = TypeVar("Result")

# With as many pairs, calls of NumPy take most of the time where nothing is kept of an earlier call: one head of 64
# queries and keys took 0.28 ms by tiles, and 0.41 so.
FEW_PAIRS = 2**13
SLICE_BYTES = 2**23  # of the bias of a slice
LINE = 2**16  # diagonals at a time
MOST_SLICES = 16  # of a call, of which what is prepared is kept
LENGTHS = "kv_lengths"
STARTS = ("cu_seqlens_q", "cu_seqlens_k")
_OF_SCORES = tuple(row.name for row in OPTIONAL_INPUTS if row.gradient_via == "scores")
_OF_ROWS = ("dq", "tdq")
_OF_PRODUCTS = ("dq", "dk", "tdq", "tdk")
OTHER_INPUTS = ("mask", LENGTHS, *_OF_SCORES, *(row.name for row in OPTIONAL_INPUTS if row.gradient_via == "softmax"))


def why_not(problem: Problem, wanted: Collection[str] = ()) -> str | None:
    """Why a call, or its gradients `wanted`, are not computed so; None if they are."""
    if (reason := core.why_not(problem)) is not None:
        return reason
    optional_inputs = [name for name in problem.given(NAMES) if name not in (*OTHER_INPUTS, *STARTS)]
    is_bounded = (problem.window_left, problem.window_right) != (None, None)
    if optional_inputs or problem.has_float8:
        return f"score_mod or mask_mod with {', '.join(optional_inputs) or 'fp8'}"
    one = problem.mean_sequence
    pairs = one.batch * one.num_heads * one.seqlen_q * one.seqlen_k
    if pairs == 0:
        return "score_mod or mask_mod of no pairs"
    if pairs <= FEW_PAIRS and (problem.is_packed or problem.given((LENGTHS,))):
        return f"score_mod or mask_mod of few pairs with {'cu_seqlens_q' if problem.is_packed else LENGTHS}"
    if problem.given((LENGTHS,)) and (is_bounded or problem.given(_OF_SCORES)):
        return f"score_mod or mask_mod with {LENGTHS} and what a diagonal decides"
    try:
        problem.program.on_numpy()
    except NotImplementedError:
        return "a score in CUDA"
    others = [name for name in wanted if name not in (*DEFAULT_NEED, *problem.score_arg_gradients)]
    return f"gradients besides those of score_mod args: {', '.join(others)}" if others else None


def why_not_tangents(problem: Problem, wanted: Collection[str]) -> str | None:
    """Why the results `wanted` of a pass with tangents are not computed so; None if they are."""
    if (reason := why_not(problem)) is not None:
        return reason
    others = [name for name in wanted if name not in (*JVP.default, *DEFAULT_NEED_TANGENTS)]
    return f"tangents of gradients of {', '.join(name[2:] for name in others)} with functions" if others else None


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
    if not problem.is_packed:
        Prepared(problem, tuple(given), pass_).compute((*given.values(),), (seed, offset), are_disjoint=True)
        return
    names = [name for name, _ in problem.score_args]
    score_args = {name: given.pop(name) for name in (*names, *(f"t{name}" for name in names)) if name in given}
    results = {name: given.pop(f"d{name}") for name in score_args if f"d{name}" in given}
    sums = {name: np.zeros(x.shape) for name, x in results.items()}
    clear_gradients_of_no_sequence(problem, given)
    with np.errstate(all="ignore"):
        for one in sequences(problem, *(given[name] for name in STARTS)):
            own = one.of_call(given)
            prepared = Prepared(one.problem, (*own, *score_args, *(f"d{name}" for name in sums)), pass_, one.index)
            prepared.add(own, score_args, sums, (seed, offset))
        for name, x in results.items():
            x[...] = sums[name]


def prepare(problem: Problem, given: Mapping[str, object], pass_: Pass) -> Prepared | None:
    """What calls on arrays like these, by name, have in common; None where that is too much to be kept."""
    wanted = [name for name in problem.gradients if name in given]
    if why_not(problem, wanted) is not None:
        return None
    prepared = Prepared(problem, tuple(given), pass_)
    return prepared if prepared.is_kept else None


class _Call(NamedTuple):
    """The arrays of one call, or of one packed sequence, which have an axis for the batch and one for heads."""

    arrays: Mapping[str, Array]  # all but optional inputs and results
    optional_inputs: Mapping[str, Array]
    tangents: Mapping[str, Array]  # of optional inputs and numbers
    score_args: Mapping[str, Array]  # what functions read, and the tangents of that
    sums: Mapping[str, Array]  # of the wanted gradients of score_mod args, by the names of these
    random: tuple[int | None, int | None]
    memory: dict[str, Array]  # for arrays of pairs, kept from slice to slice: fresh one has to be mapped page by page

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of pairs, whose numbers may be any."""
        size, memory = math.prod(shape), self.memory
        if name not in memory or memory[name].size < size:
            memory[name] = np.empty(size, dtype)
        return memory[name][:size].reshape(shape)


class _PreparedSlice(NamedTuple):
    """What is known of a slice before its arrays are."""

    call_slice: CallSlice
    indices: Mapping[str, tuple[slice, ...]]  # of the slice in an array of the call, by the name of this
    pairs: Pairs
    tiles: list[Tile]
    shown: tuple[Array, Array] | None  # `Prepared.blocks`, if these do not depend on arrays
    problems: dict[tuple[str, ...], Problem]  # what the core computes, by the names of the optional inputs


class Prepared:
    """What calls, or packed sequences, on arrays of the same names, shapes, strides and dtypes have in common.

    Attributes
    ----------
    is_kept : bool
        Whether its slices are so few that they are kept.
    are_4d : bool
        Whether arrays are (batch, heads, seqlen, dim) as they are given.
    is_sum : bool
        Whether the score is the scaled product and what does not depend on it.
    has_diagonals : bool
        Whether it is, what it adds follows from i - j alone, and that has no tangent.
    tangent : Node or None
        The tangent of what the score adds, or of the score, if there is one.
    moves_products : bool
        Whether the products have tangents on which that depends.
    different : set of {"batch", "head"}
        What functions, or products, distinguish.
    is_split : bool
        Whether several slices add to dk and dv.
    wide : dtype or None
        In place of the dtype of q, if it is another one.
    """

    def __init__(self, problem: Problem, names: tuple[str, ...], pass_: Pass, sequence: int = 0) -> None:
        self.problem, self.names, self.pass_, self.sequence = problem, names, pass_, sequence
        self.dtype = np.dtype(problem.softmax_dtype)
        self.score_args = tuple(name for name, _ in problem.score_args)
        self.reads = tuple(name for name in self.score_args if f"d{name}" in names)
        self.moved = tuple(name for name in self.score_args if f"t{name}" in names)
        self.optional_inputs = tuple(name for name in OTHER_INPUTS if name in names)
        self.tangents = tuple(f"t{name}" for name in (*OTHER_INPUTS, *NUMBERS) if f"t{name}" in names)
        self.results = tuple(name for name in (*DEFAULT_NEED, *DEFAULT_NEED_TANGENTS) if name in names)
        of_score_args = (*(f"t{name}" for name in self.moved), *(f"d{name}" for name in self.reads))
        others = {*self.score_args, *of_score_args, *self.optional_inputs, *self.tangents, *self.results, *STARTS}
        self.arrays = tuple(name for name in names if name not in others)
        self.are_4d = problem.layout == "bhsd" and problem.ndim == 4
        program = self.program = problem.program.on_numpy()
        self.is_sum = program.score is not None and is_sum(program.score)
        multiplies = program.score is not None and not self.is_sum
        self.moves_products = multiplies and not {"tq", "tk", "tscale"}.isdisjoint(names)
        self.by_tangents = problem.score_tangents(self.moved) if self.moved or self.moves_products else None
        self.tangent = None if self.by_tangents is None else self.by_tangents.score
        self.has_diagonals = self.is_sum and is_of_diagonals(cast("Node", program.score), program.arrays)
        self.has_diagonals = self.has_diagonals and self.tangent is None
        roots = [root for root in (program.score, program.mask) if root is not None]
        inputs = {at.payload for at in in_order(roots) if at.op == "input"}
        self.different = {name for name in ("batch", "head") if multiplies or name in inputs}
        is_line = self.has_diagonals and program.mask is None and not self.reads
        most, of_lines = SLICE_BYTES // self.dtype.itemsize, problem.seqlen_q + problem.seqlen_k if is_line else None
        self._slices = list(call_slices(problem, self.different, most, of_lines))
        self.is_kept = len(self._slices) <= MOST_SLICES
        self.is_split = "dout" in names and len({call_slice.rows.start for call_slice in self._slices}) > 1
        is_wide = self.is_split and ITEMSIZE[problem.dtype] < self.dtype.itemsize
        self.wide = self.dtype if is_wide else None
        self._prepared = [self._prepare(call_slice) for call_slice in self._slices] if self.is_kept else None

    def compute(self, arrays: Sequence[Array], random: tuple[int | None, int | None], *, are_disjoint: bool) -> int:
        """Compute a pass on arrays in order of their names; `OVERLAPPING` unless `are_disjoint`, as `core.compute`."""
        if not are_disjoint:
            return core.OVERLAPPING
        given = dict(zip(self.names, arrays, strict=True))
        sums = {name: np.zeros(given[name].shape) for name in self.reads}
        with np.errstate(all="ignore"):
            read = (*self.score_args, *(f"t{name}" for name in self.moved))
            self.add(given, {name: given[name] for name in read}, sums, random)
            for name, x in sums.items():
                given[f"d{name}"][...] = x
        return core.DONE

    def add(
        self,
        given: Mapping[str, Array],
        score_args: Mapping[str, Array],
        sums: Mapping[str, Array],
        random: tuple[int | None, int | None],
    ) -> None:
        """Write results, and add to `sums` of the gradients of score_mod args."""
        views = {name: given[name] for name in (*self.arrays, *self.results)}
        if not self.are_4d:
            for name, x in views.items():
                views[name] = view_rows(x) if name in MOVABLE_OVER_ROWS else view_4d(x, self.problem.layout)
        optional_inputs = {name: given[name] for name in self.optional_inputs}
        tangents = {name: given[name] for name in self.tangents}
        call = _Call(views, optional_inputs, tangents, score_args, sums, random, {})
        every = self._prepared or map(self._prepare, self._slices)
        if self.is_split:
            self._add_slices(call, every)
            return
        if not self._slices:
            for name in self.results:
                views[name][...] = 0
        for prepared in every:
            self._run_slice(call, prepared, {name: views[name][prepared.indices[name]] for name in self.results})

    def _add_slices(self, call: _Call, every: Iterable[_PreparedSlice]) -> None:
        """Write gradients, all computed in the dtype of the softmax, where several slices add to dk and dv."""
        whole = {name: call.arrays[name] for name in self.results}
        totals = {name: np.zeros(x.shape, self.wide or x.dtype) for name, x in whole.items()}
        for prepared in every:
            own = {name: x[prepared.indices[name]] for name, x in totals.items()}
            results = {name: x if name in _OF_ROWS else np.empty_like(x) for name, x in own.items()}
            self._run_slice(call, prepared, results)
            for name, x in own.items():
                if name not in _OF_ROWS:
                    x += results[name]
        for name, x in totals.items():
            whole[name][...] = x

    def _prepare(self, call_slice: CallSlice) -> _PreparedSlice:
        pairs, shown = Pairs(self.problem, call_slice, self.different, self.sequence), None
        tiles, mask = pairs.tiles(), self.program.mask
        if mask is not None and not any(at.op == "load" for at in in_order([mask])):
            shown = self._blocks(mask, pairs, Tables({}))
            tiles = [tile for tile in tiles if shown[1][tile.blocks].any()]
        indices = {name: call_slice.index_of(name) for name in (*self.arrays, *self.results)}
        return _PreparedSlice(call_slice, indices, pairs, tiles, shown, {})

    def _run_slice(self, call: _Call, prepared: _PreparedSlice, wanted: Mapping[str, Array]) -> None:
        """Compute a slice, and write the gradients that are `wanted` of q, k and v."""
        call_slice, pairs, indices = prepared.call_slice, prepared.pairs, prepared.indices
        arrays = {name: call.arrays[name][indices[name]] for name in self.arrays}
        if self.wide is not None:
            arrays = {name: x.astype(self.wide) if _is_narrow(x, self.wide) else x for name, x in arrays.items()}
        optional_inputs = {
            name: call_slice.view_of(x, cast("int", core.AXES[name])) for name, x in call.optional_inputs.items()
        }
        tangents = {
            name: x if name[1:] in NUMBERS else call_slice.view_of(x, cast("int", core.AXES[name[1:]]))
            for name, x in call.tangents.items()
        }
        for of, name in ((optional_inputs, "bias"), (tangents, "tbias")):
            if self.wide is not None and name in of and _is_narrow(of[name], self.wide):
                of[name] = of[name].astype(self.wide)
        products, results, of_products = None, dict(wanted), dict[str, Array]()
        if self.program.score is not None and not self.is_sum:
            scaled = call.take("scaled", pairs.shape, self.dtype)
            moves: dict[str, Array] = {name: arrays.pop(name) for name in ("tq", "tk") if name in arrays}
            moves |= {"tscale": tangents.pop("tscale")} if "tscale" in tangents else {}
            moved = call.take("tscaled", pairs.shape, self.dtype) if self.moves_products else None
            products = Products(arrays["q"], arrays["k"], scaled, self.problem.scale, moves, moved)
            of_products = {name: results.pop(name) for name in _OF_PRODUCTS if name in results}
            arrays |= {name: np.zeros((*arrays[name].shape[:3], 1), arrays[name].dtype) for name in ("q", "k")}
        of_functions, tiles = self._functions(call, prepared, products)
        if self.tangent is not None:
            tangents["tbias"] = of_functions.pop("tbias")
        if "mask" in optional_inputs and "mask" in of_functions:
            of_functions["mask"] = of_functions["mask"] & optional_inputs["mask"]
        optional_inputs |= of_functions
        gradient = "tdbias" if self.pass_.has_tangents else "dbias"
        if call.sums or of_products:
            results[gradient] = call.take(gradient, pairs.shape, self.dtype)
        problem = prepared.problems.get(names := tuple(optional_inputs))
        if problem is None:
            own = (arrays[name] for name in INPUTS)
            problem = prepared.problems[names] = make_problem(self._options(call_slice), *own, **optional_inputs)
        dbias = results.get("dbias")
        if of_products and self.pass_.has_tangents:
            given = {
                name: x for name, x in arrays.items() if name in (*INPUTS, *REQUIRED_BY_BACKWARD, "dlse", "row_sums")
            }
            dbias = call.take("dbias", pairs.shape, self.dtype)
            given |= {**optional_inputs, "dbias": dbias}
            core.run(problem, given, BACKWARD, *call.random)
        core.run(problem, {**arrays, **optional_inputs, **tangents, **results}, self.pass_, *call.random)
        if call.sums:
            self._add_reads(call, pairs, tiles, results["dbias"], products)
        if products is not None and dbias is not None and of_products:
            self._write_of_products(call, pairs, tiles, dbias, products, of_products)

    def _options(self, call_slice: CallSlice) -> Options:
        """The options of a slice."""
        whole = self.problem
        window, origin = (whole.window_left, whole.window_right), whole.origin
        head = ((call_slice.batches.start or 0) + self.sequence) * origin.num_heads + (call_slice.heads.start or 0)
        return Options(
            **whole.numbers,
            window=None if window == (None, None) else window,
            diagonal=whole.diagonal + call_slice.rows.start,
            block_size=BLOCK,
            dropout=whole.dropout,
            origin=Origin(origin.query + call_slice.rows.start, origin.key, origin.head + head, origin.num_heads),
        )

    def _functions(
        self, call: _Call, prepared: _PreparedSlice, products: Products | None
    ) -> tuple[dict[str, Array], list[Tile]]:
        """The bias of a slice and its tangent, the masks of its pairs and blocks, those that there are; and its tiles.

        Tiles that bounds or the mask hide as a whole are not among these. The bias may be anything there.
        """
        score, mask, optional_inputs, of_tile = self.program.score, self.program.mask, dict[str, Array](), {}
        pairs, tiles, shown = prepared.pairs, prepared.tiles, prepared.shown
        if self.has_diagonals:
            optional_inputs["bias"] = self._bias_of_diagonals(call, pairs)
        elif score is not None:
            optional_inputs["bias"] = call.take("bias", pairs.shape, self.dtype)
            of_tile["bias"] = score
        if self.tangent is not None:
            optional_inputs["tbias"] = call.take("tbias", pairs.shape, self.dtype)
            of_tile["tbias"] = self.tangent
        if mask is not None:
            if shown is None:
                shown = self._blocks(mask, pairs, Tables(call.score_args))
                tiles = [tile for tile in tiles if shown[1][tile.blocks].any()]
            optional_inputs["block_mask"], is_mixed = shown[1], shown[1] & ~shown[0]
            if is_mixed.any():
                optional_inputs["mask"] = np.ones(pairs.shape, bool)
                of_tile["mask"] = mask

        def write(tile: Tile) -> None:
            if products is not None:
                products.write(tile)
            own = of_tile
            if "mask" in own and not is_mixed[tile.blocks].any():
                own = {name: root for name, root in own.items() if name != "mask"}
            inputs = tile.inputs(None if products is None else products.scaled)
            if self.tangent is not None:
                inputs |= _moved(tile, pairs, products)
            values = evaluate([*own.values()], inputs, call.score_args, self.dtype)
            for name, x in zip(own, values, strict=True):
                optional_inputs[name][tile.index] = x

        if of_tile:
            _for_each(write, tiles)
        return optional_inputs, tiles

    def _bias_of_diagonals(self, call: _Call, pairs: Pairs) -> Array:
        """The bias of a slice, whose rows are views of one line: each begins one number before the one above it."""
        *outer, rows, keys = pairs.shape
        line = np.empty((*outer, 1, max(rows + keys - 1, 0)), self.dtype)
        score = [cast("Node", self.program.score)]
        for first in range(0, line.shape[-1], LINE):
            own = line[..., first : first + LINE]
            inputs = pairs.of_diagonals(pairs.rows[-1] - np.arange(first, first + own.shape[-1]))
            (own[...],) = evaluate(score, inputs, call.score_args, self.dtype)
        *strides, _, step = line.strides
        return as_strided(line[..., 0, rows - 1 :], pairs.shape, (*strides, -step, step), writeable=False)

    def _add_reads(self, call: _Call, pairs: Pairs, tiles: list[Tile], dbias: Array, products: Products | None) -> None:
        """Add to the gradients of arrays what follows from that of the bias, tile after tile."""
        loads = [(name, load) for name in call.sums for load in self.program.loads.get(name, ())]
        roots = [root for _, load in loads for root in (load.derivative, *load.at.args)]

        def sum_tile(tile: Tile) -> list[tuple[str, Any, Array]]:
            own, entries = dbias[tile.index], []
            if self.has_diagonals:
                own, inputs = sums_of_diagonals(own), pairs.of_diagonals(tile.diagonals)
            else:
                inputs = tile.inputs(None if products is None else products.scaled)
            values = iter(evaluate(roots, inputs, call.score_args, self.dtype))
            for name, load in loads:
                # A pair that does not count adds nothing, whatever the derivative is.
                optional_inputs = own * np.where(own == 0, 0, next(values))
                indices = list(itertools.islice(values, len(load.at.args)))
                entries.append((name, *sums_of_entries(call.score_args[name].shape, indices, optional_inputs)))
            return entries

        def add(entries: list[tuple[str, Any, Array]]) -> None:
            for name, indices, sums in entries:
                call.sums[name].reshape(-1)[indices] += sums

        _for_each(sum_tile, tiles, add)

    def _write_of_products(
        self,
        call: _Call,
        pairs: Pairs,
        tiles: list[Tile],
        dbias: Array,
        products: Products,
        results: Mapping[str, Array],
    ) -> None:
        """Write gradients of q and k, or their tangents, which follow from that of the bias, tile after tile."""
        sums = {name: np.zeros(x.shape, self.dtype) for name, x in results.items()}
        by_s = [cast("Node", self.program.by_s)]
        has_tangents = self.pass_.has_tangents
        tdbias = call.take("tdbias", pairs.shape, self.dtype) if has_tangents else dbias
        if self.by_tangents is not None:
            by_s.append(self.by_tangents.by_s)

        def multiply_tile(tile: Tile) -> list[tuple[Array, Array]]:
            own, tangent = dbias[tile.index], tdbias[tile.index]
            inputs = tile.inputs(products.scaled)
            if self.by_tangents is not None:
                inputs |= _moved(tile, pairs, products)
            slope, *moved = evaluate(by_s, inputs, call.score_args, self.dtype)
            if has_tangents:
                tangent *= np.where(tangent == 0, 0, slope)
            for of_slope in moved:
                tangent += own * np.where(own == 0, 0, of_slope)
            own *= np.where(own == 0, 0, slope)
            if has_tangents:
                found = products.tangents_of_gradients(tile, dbias, tdbias, results)
            else:
                found = products.gradients(tile, dbias, results)
            return [
                (sums[name][:, :, tile.own_rows if name in _OF_ROWS else tile.own_keys], x) for name, x in found.items()
            ]

        def add(found: list[tuple[Array, Array]]) -> None:
            for total, x in found:
                total += x

        _for_each(multiply_tile, tiles, add)
        for name, x in results.items():
            x[...] = sums[name]

    def _blocks(self, mask: Node, pairs: Pairs, tables: Tables) -> tuple[Array, Array]:
        """For each block of some rows, whether the mask shows all its pairs, and whether it shows any."""
        batches, heads = (pairs.of_all[name].reshape(-1).tolist() for name in ("batch", "head"))
        of = (pairs.rows, range(self.problem.seqlen_k), (BLOCK, BLOCK))
        shown = [[shown_blocks(mask, *of, b, h, tables) for h in heads] for b in batches]
        always, sometimes = (np.array([[found[n] for found in of_heads] for of_heads in shown]) for n in range(2))
        return always, sometimes


def _moved(tile: Tile, pairs: Pairs, products: Products | None) -> dict[str, Array]:
    """The tangents of the products of a tile, as functions read them; zeros where these do not move."""
    return {"ts": pairs.zero if products is None or products.moved is None else products.moved[tile.index]}


def _is_narrow(x: Array, dtype: np.dtype[Any]) -> bool:
    return x.dtype.itemsize < dtype.itemsize


def _for_each(
    work: Callable[[Tile], Result], tiles: list[Tile], take: Callable[[Result], object] = lambda result: None
) -> None:
    if len(tiles) == 1:
        take(work(tiles[0]))
    else:
        jobs.run(work, tiles, jobs.count_cores(), take)
