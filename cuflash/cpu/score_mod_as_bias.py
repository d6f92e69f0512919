"""score_mod and mask_mod as a bias and masks, with which the compiled core computes some queries at a time.

If a score is the scaled product plus what does not depend on the product, the latter is the bias. Any other score is
the bias as a whole: NumPy multiplies q and k, and the core gets zeros in place of these. NumPy computes the bias, and
what a mask_mod hides, once for all batch entries and heads that the functions do not distinguish. What follows from
i - j alone is computed once for each diagonal, and the rows of the bias are views of one line.

A slice of a call has as many queries, heads and batch entries as take `SLICE_BYTES`, so that memory is linear, and
results do not depend on the number of threads. All that follows from the shapes and strides of arrays is prepared once
(`Prepared`), and kept for repeated calls by `cuflash.cpu.backend`.

- dk and dv are sums over slices, added in the dtype of the softmax, in the order of the slices.
- Gradients of arrays that the score reads follow from dbias, and are summed in float64. If NumPy multiplied q and k, dq
  and dk follow from dbias, too.
- In passes with tangents, tbias is the tangent of what the bias is, for which NumPy may multiply the tangents of q and
  k, too. Then tdq and tdk follow from dbias, which the core computes first, and from its tangent.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cuflash.arrays.array_info import ITEMSIZE, view_4d, view_rows
from cuflash.cpu import core, jobs
from cuflash.cpu.fallback import entries, shown_blocks, sums_of_entries
from cuflash.cpu.gemm import Products
from cuflash.cpu.packed import clear_gradients_of_no_sequence, sequences
from cuflash.cpu.score_tiles import BLOCK, CallSlice, Pairs, Tile, call_slices, sums_of_diagonals
from cuflash.score_mod import is_of_diagonals
from cuflash.score_mod.evaluation import Folded, evaluate, fold
from cuflash.score_mod.intervals import Tables
from cuflash.score_mod.nodes import Node, in_order
from cuflash.score_mod.program import Program, ScoreTangents
from cuflash.spec.inputs import INPUTS, NAMES, NUMBERS, OPTIONAL_INPUTS
from cuflash.spec.options import Options, Origin
from cuflash.spec.outputs import DEFAULT_NEED, DEFAULT_NEED_TANGENTS, MOVABLE_OVER_ROWS, REQUIRED_BY_BACKWARD
from cuflash.spec.passes import BACKWARD, JVP, Pass
from cuflash.spec.problem import Problem, make_problem

Array = NDArray[Any]

# Up to so many pairs, the overhead of NumPy calls dominates if nothing is kept of an earlier call: one head of 64
# queries and keys took 0.28 ms by the tiles of `cuflash.cpu.fallback`, and 0.41 ms with a bias.
FEW_PAIRS = 2**13
SLICE_BYTES = 2**23  # of the bias of a slice
LINE = 2**16  # diagonals at a time
MOST_SLICES = 16  # of a call, of which what is prepared is kept
MOST_FOLDED = 2**14  # pairs of a call for which values that no array changes are kept; their diagonals fit into LINE
LENGTHS = "kv_lengths"
STARTS = ("cu_seqlens_q", "cu_seqlens_k")
_OF_SCORES = tuple(row.name for row in OPTIONAL_INPUTS if row.gradient_via == "scores")
_OF_ROWS = ("dq", "tdq")
_OF_PRODUCTS = ("dq", "dk", "tdq", "tdk")
OTHER_INPUTS = ("mask", LENGTHS, *_OF_SCORES, *(row.name for row in OPTIONAL_INPUTS if row.gradient_via == "softmax"))


def why_not(problem: Problem, wanted: Collection[str] = ()) -> str | None:
    """Why the core does not compute a call, or its gradients `wanted`, with a bias; None if it does."""
    if (reason := core.why_not(problem)) is not None:
        return reason
    optional_inputs = [name for name in problem.given(NAMES) if name not in (*OTHER_INPUTS, *STARTS)]
    is_bounded = (problem.window_left, problem.window_right) != (None, None)
    if optional_inputs or problem.has_float8:
        return f"score_mod or mask_mod with {', '.join(optional_inputs) or 'fp8'}"
    sequence = problem.mean_sequence
    pairs = sequence.batch * sequence.num_heads * sequence.seqlen_q * sequence.seqlen_k
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
    not_served = [name for name in wanted if name not in (*DEFAULT_NEED, *problem.score_arg_gradients)]
    return f"gradients besides those of score_mod args: {', '.join(not_served)}" if not_served else None


def why_not_tangents(problem: Problem, wanted: Collection[str]) -> str | None:
    """Why the core does not compute the results `wanted` of a pass with tangents with a bias; None if it does."""
    if (reason := why_not(problem)) is not None:
        return reason
    not_served = [name[2:] for name in wanted if name not in (*JVP.default, *DEFAULT_NEED_TANGENTS)]
    return f"tangents of gradients of {', '.join(not_served)} with functions" if not_served else None


def is_sum(score: Node) -> bool:
    """Whether a score is the scaled product and what does not depend on it."""
    while score.op in ("add", "sub"):
        reads = [_reads_product(arg) for arg in score.args]
        if reads != [True, False] and (reads != [False, True] or score.op == "sub"):
            return False
        score = score.args[reads.index(True)]
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
    gradients = {name: given.pop(f"d{name}") for name in score_args if f"d{name}" in given}
    of_all_sequences = score_args | {f"d{name}": x for name, x in gradients.items()}
    sums = {name: np.zeros(x.shape) for name, x in gradients.items()}
    clear_gradients_of_no_sequence(problem, given)
    with np.errstate(all="ignore"):
        for sequence in sequences(problem, *(given[name] for name in STARTS)):
            of_call = sequence.of_call(given) | of_all_sequences
            prepared = Prepared(sequence.problem, tuple(of_call), pass_, sequence.index)
            prepared.compute((*of_call.values(),), (seed, offset), are_disjoint=True, sums=sums)
        for name, x in gradients.items():
            x[...] = sums[name]


def prepare(problem: Problem, given: Mapping[str, object], pass_: Pass) -> Prepared | None:
    """What calls on arrays like these, by name, have in common; None where that is too much to be kept."""
    wanted = [name for name in problem.gradients if name in given]
    if why_not(problem, wanted) is not None:
        return None
    prepared = Prepared(problem, tuple(given), pass_)
    if not prepared.is_kept:
        return None
    prepared.fold()
    return prepared


class _VisibleBlocks(NamedTuple):
    """For each block of `BLOCK` rows and keys: whether a mask shows any of its pairs, and whether it hides others."""

    any_pairs: Array
    are_partial: Array  # some pairs, and not all

    def tiles(self, tiles: Iterable[Tile]) -> list[Tile]:
        """Those of some tiles in which the mask shows pairs."""
        return [tile for tile in tiles if self.any_pairs[tile.blocks].any()]


class _Call(NamedTuple):
    """The arrays of one call, or of one packed sequence, which have an axis for the batch and one for heads."""

    arrays: Mapping[str, Array]  # all but optional inputs and results
    optional_inputs: Mapping[str, Array]
    tangents: Mapping[str, Array]  # of optional inputs and numbers
    score_args: Mapping[str, Array]  # what functions read, and the tangents of that
    sums: Mapping[str, Array]  # of the wanted gradients of score_mod args, by the names of these
    random: tuple[int, int]
    memory: dict[str, Array]  # for arrays of pairs of a slice: fresh one has to be mapped page by page


class _PreparedSlice(NamedTuple):
    """What is known of a slice before its arrays are."""

    call_slice: CallSlice
    indices: Mapping[str, tuple[slice, ...]]  # of the slice in an array of the call, by the name of this
    pairs: Pairs
    tiles: list[Tile]
    visible: _VisibleBlocks | None  # of the mask, if that does not depend on arrays
    # What the core computes, by the names of the optional inputs; also as prepared, except in passes with tangents.
    calls: dict[tuple[str, ...], tuple[Problem, core.Prepared | None]]
    # For repeated calls: `Prepared.expressions` by name and tile, none for all diagonals of the slice; and the entries
    # that loads name, by the number of the load and the tile.
    folded: dict[tuple[str, Tile | None], Folded]
    entries: dict[tuple[int, Tile], Array]


class _Slice(NamedTuple):
    """The arrays of a slice, while a call computes it."""

    call: _Call
    prepared: _PreparedSlice
    tiles: list[Tile]  # in which the mask shows pairs
    visible: _VisibleBlocks | None  # of the mask, if there is one
    arrays: dict[str, Array]  # as the core gets them: zeros for q and k where NumPy multiplies these
    optional_inputs: dict[str, Array]
    tangents: dict[str, Array]  # of optional inputs and numbers
    of_pairs: dict[str, Array]  # `Prepared.of_pairs`
    products: Products | None
    sums: dict[str, Array]  # of `Prepared.of_products`
    on_tiles: Callable[[Callable[[Tile], Any], Iterable[Tile]], Iterable[Any]]  # `map`, or that on all cores


class _Names(NamedTuple):
    """The names of the arrays of a call, by what they are."""

    in_order: tuple[str, ...]  # all, as a call gets them
    score_args: tuple[str, ...]
    reads: tuple[str, ...]  # those whose gradients are wanted
    moved: tuple[str, ...]  # those that have tangents
    read_by_functions: tuple[str, ...]  # score_args, and the tangents of those
    optional_inputs: tuple[str, ...]
    tangents: tuple[str, ...]  # of optional inputs and numbers
    results: tuple[str, ...]  # gradients of q, k and v, and tangents of these
    arrays: tuple[str, ...]  # all others

    @classmethod
    def of(cls, problem: Problem, given: tuple[str, ...]) -> _Names:
        def those_given(names: Iterable[str], prefix: str = "") -> tuple[str, ...]:
            return tuple(name for name in names if f"{prefix}{name}" in given)

        score_args = tuple(name for name, _ in problem.score_args)
        reads, moved = those_given(score_args, "d"), those_given(score_args, "t")
        optional_inputs = those_given(OTHER_INPUTS)
        tangents = tuple(f"t{name}" for name in those_given((*OTHER_INPUTS, *NUMBERS), "t"))
        results = those_given((*DEFAULT_NEED, *DEFAULT_NEED_TANGENTS))
        read_by_functions = (*score_args, *(f"t{name}" for name in moved))
        of_score_args = {*read_by_functions, *(f"d{name}" for name in reads)}
        known = of_score_args.union(optional_inputs, tangents, results, STARTS)
        arrays = tuple(name for name in given if name not in known)
        return cls(given, score_args, reads, moved, read_by_functions, optional_inputs, tangents, results, arrays)


class _Score(NamedTuple):
    """How a score, if there is one, becomes a bias."""

    program: Program
    multiplies: bool  # whether it is no sum of the scaled product and a number, so that NumPy multiplies q and k
    moves_products: bool  # whether these products have tangents
    by_tangents: ScoreTangents | None  # of the score and of its derivatives, if there are any
    tangent: Node | None  # of what the score adds, or of the score, if there is one
    has_diagonals: bool  # whether it is a sum, what it adds follows from i - j alone, and that has no tangent

    @classmethod
    def of(cls, problem: Problem, names: _Names) -> _Score:
        program, by_tangents, tangent = problem.program.on_numpy(), None, None
        if program.score is None:
            return cls(program, False, False, None, None, False)
        multiplies = not is_sum(program.score)
        moves_products = multiplies and not {"tq", "tk", "tscale"}.isdisjoint(names.in_order)
        if names.moved or moves_products:
            by_tangents = problem.score_tangents(names.moved)
            tangent = by_tangents.score
        has_diagonals = not multiplies and tangent is None and is_of_diagonals(program.score, program.arrays)
        return cls(program, multiplies, moves_products, by_tangents, tangent, has_diagonals)

    @property
    def distinguishes(self) -> set[str]:
        """What functions, or products, distinguish: "batch" and "head"."""
        roots = [root for root in (self.program.score, self.program.mask) if root is not None]
        inputs = {at.payload for at in in_order(roots) if at.op == "input"}
        return {name for name in ("batch", "head") if self.multiplies or name in inputs}


class Prepared:
    """What calls, or packed sequences, on arrays of the same names, shapes, strides and dtypes have in common.

    Attributes
    ----------
    is_kept : bool
        Whether its slices are so few that they are kept.
    are_4d : bool
        Whether arrays are (batch, heads, seqlen, dim) as they are given.
    is_split : bool
        Whether several slices add to dk and dv.
    wide_dtype : dtype or None
        In which several slices add up gradients, if it is wider than the dtype of q.
    of_products, of_core : tuple of str
        The results that follow from the gradients of products, and what the core writes.
    of_pairs : tuple of str
        The arrays of pairs of a slice.
    adding : list of callable
        Methods that give the addends of a tile to gradients that follow from that of the bias.
    loads : list of (str, Loaded)
        How the score reads the arrays whose gradients are wanted.
    written : dict of tuple of str
        The optional inputs that expressions of a tile make: of one that the mask cuts "masked", else "whole".
    expressions : dict of list of Node
        What is evaluated at once: that, the score of "diagonals", the derivatives "by_s", and derivatives and indices
        of "loads".
    """

    def __init__(self, problem: Problem, names: tuple[str, ...], pass_: Pass, sequence: int = 0) -> None:
        self.problem, self.pass_, self.sequence = problem, pass_, sequence
        self.dtype = np.dtype(problem.softmax_dtype)
        self.are_4d = problem.layout == "bhsd" and problem.ndim == 4
        self.names = _Names.of(problem, names)
        score = self.score = _Score.of(problem, self.names)
        self.distinguished = score.distinguishes
        is_line = score.has_diagonals and score.program.mask is None and not self.names.reads
        self._slices = list(
            call_slices(
                problem,
                self.distinguished,
                most=SLICE_BYTES // self.dtype.itemsize,
                per_row_values=problem.seqlen_q + problem.seqlen_k if is_line else None,
            )
        )
        self.is_kept = len(self._slices) <= MOST_SLICES
        self.is_split = "dout" in names and len({call_slice.rows.start for call_slice in self._slices}) > 1
        is_wide = self.is_split and ITEMSIZE[problem.dtype] < self.dtype.itemsize
        self.wide_dtype = self.dtype if is_wide else None
        self._prepared = [self._prepare(call_slice) for call_slice in self._slices] if self.is_kept else None
        self._set_results()
        self._set_expressions()

    def _set_results(self) -> None:
        score, results = self.score, self.names.results
        self.of_products = tuple(name for name in results if score.multiplies and name in _OF_PRODUCTS)
        of_pairs = {
            "scaled": score.multiplies,
            "tscaled": score.moves_products,
            "bias": score.program.score is not None and not score.has_diagonals,
            "tbias": score.tangent is not None,
            "dbias": self.names.reads or self.of_products,
            "tdbias": self.pass_.has_tangents and self.of_products,
        }
        self.of_pairs = tuple(name for name, is_needed in of_pairs.items() if is_needed)
        written = {*results, *self.of_pairs}.difference(self.of_products)
        of_bias = "tdbias" if self.pass_.has_tangents else "dbias"
        self.of_core = tuple(name for name in (*results, of_bias) if name in written)
        adding = {Prepared._sums_of_tile: self.names.reads, Prepared._gradients_of_tile: self.of_products}
        self.adding = [addends_of_tile for addends_of_tile, wanted in adding.items() if wanted]

    def _set_expressions(self) -> None:
        program, score, of_tangents = self.score.program, self.score.program.score, self.score.by_tangents
        has_diagonals = self.score.has_diagonals
        of_tile = {"bias": None if has_diagonals else score, "tbias": self.score.tangent, "mask": program.mask}
        masked = {name: root for name, root in of_tile.items() if root is not None}
        whole = {name: root for name, root in masked.items() if name != "mask"}
        by_s = (program.by_s, None if of_tangents is None else of_tangents.by_s)
        self.loads = [(name, load) for name in self.names.reads for load in program.loads.get(name, ())]
        self.written = {"masked": tuple(masked), "whole": tuple(whole)}
        self.expressions: dict[str, list[Node]] = {
            "masked": [*masked.values()],
            "whole": [*whole.values()],
            "diagonals": [score] if has_diagonals and score is not None else [],
            "by_s": [root for root in by_s if root is not None],
            "loads": [root for _, load in self.loads for root in (load.derivative, *load.at.args)],
        }

    def fold(self) -> None:
        """Keep what functions make of indices alone, if it is little, for repeated calls."""
        if self._prepared is None or sum(math.prod(prepared.pairs.shape) for prepared in self._prepared) > MOST_FOLDED:
            return
        shapes = {name: operand.shape for name, operand in self.problem.score_args}
        for prepared in self._prepared:
            if self.score.has_diagonals:
                _, _, rows, keys = prepared.pairs.shape
                inputs = prepared.pairs.of_diagonals(prepared.pairs.rows[-1] - np.arange(rows + keys - 1))
                prepared.folded["diagonals", None] = fold(self.expressions["diagonals"], inputs, shapes, self.dtype)
            for tile in prepared.tiles:
                for group in ("masked", "whole", "by_s", "loads"):
                    inputs = tile.inputs(are_diagonals=self.score.has_diagonals and group == "loads")
                    if self.score.multiplies:
                        del inputs["s"]
                    prepared.folded[group, tile] = fold(self.expressions[group], inputs, shapes, self.dtype)
                    for number, (name, load) in enumerate(self.loads if group == "loads" else ()):
                        if all(at.op == "constant" or at in prepared.folded[group, tile].values for at in load.at.args):
                            indices = evaluate(load.at.args, inputs, {}, self.dtype)
                            prepared.entries[number, tile] = entries(shapes[name], indices)

    def compute(
        self,
        arrays: Sequence[Array],
        random: tuple[int | None, int | None],
        *,
        are_disjoint: bool,
        sums: Mapping[str, Array] | None = None,
    ) -> int:
        """Compute a pass on arrays in order of their names; `OVERLAPPING` unless `are_disjoint`, as `core.compute`.

        Gradients of score_mod args are added to `sums`, if these are given, by the names of the args, and not written.
        """
        if not are_disjoint:
            return core.OVERLAPPING
        names = self.names
        given = dict(zip(names.in_order, arrays, strict=True))
        views = {name: given[name] for name in (*names.arrays, *names.results)}
        if not self.are_4d:
            for name, x in views.items():
                views[name] = view_rows(x) if name in MOVABLE_OVER_ROWS else view_4d(x, self.problem.layout)
        call = _Call(
            arrays=views,
            optional_inputs={name: given[name] for name in names.optional_inputs},
            tangents={name: given[name] for name in names.tangents},
            score_args={name: given[name] for name in names.read_by_functions},
            sums={name: np.zeros(given[name].shape) for name in names.reads} if sums is None else sums,
            random=(random[0] or 0, random[1] or 0),
            memory={},
        )
        all_prepared = self._prepared or map(self._prepare, self._slices)
        with np.errstate(all="ignore"):
            if self.is_split:
                self._add_slices(call, all_prepared)
            else:
                for name in () if self._slices else names.results:
                    call.arrays[name][...] = 0
                for prepared in all_prepared:
                    results = {name: call.arrays[name][prepared.indices[name]] for name in names.results}
                    self._run_slice(call, prepared, results)
            if sums is None:
                for name, x in call.sums.items():
                    given[f"d{name}"][...] = x
        return core.DONE

    def _add_slices(self, call: _Call, all_prepared: Iterable[_PreparedSlice]) -> None:
        """Write gradients, all computed in the dtype of the softmax, where several slices add to dk and dv."""
        results = {name: call.arrays[name] for name in self.names.results}
        totals = {name: np.zeros(x.shape, self.wide_dtype or x.dtype) for name, x in results.items()}
        for prepared in all_prepared:
            of_slice = {name: x[prepared.indices[name]] for name, x in totals.items()}
            addends = {name: x if name in _OF_ROWS else np.empty_like(x) for name, x in of_slice.items()}
            self._run_slice(call, prepared, addends)
            for name, total in of_slice.items():
                if name not in _OF_ROWS:
                    total += addends[name]
        for name, total in totals.items():
            results[name][...] = total

    def _prepare(self, call_slice: CallSlice) -> _PreparedSlice:
        pairs, visible = Pairs(self.problem, call_slice, self.distinguished, self.sequence), None
        tiles, mask = pairs.tiles(), self.score.program.mask
        if mask is not None and not any(at.op == "load" for at in in_order([mask])):
            visible = self._blocks(mask, pairs, Tables({}))
            tiles = visible.tiles(tiles)
        indices = {name: call_slice.index_of(name) for name in (*self.names.arrays, *self.names.results)}
        return _PreparedSlice(call_slice, indices, pairs, tiles, visible, {}, {}, {})

    # ---- one slice ---------------------------------------------------------------------------------------------------

    def _run_slice(self, call: _Call, prepared: _PreparedSlice, results: Mapping[str, Array]) -> None:
        """Compute a slice, and write its `results`: gradients of q, k and v, or their tangents."""
        slice_ = self._slice_of(call, prepared, results)
        self._evaluate(slice_)
        written = {**results, **slice_.of_pairs}
        given = {
            **slice_.arrays,
            **slice_.optional_inputs,
            **slice_.tangents,
            **{name: written[name] for name in self.of_core},
        }
        problem, prepared_call = prepared.calls.get(tuple(slice_.optional_inputs)) or self._prepare_call(slice_, given)
        if "tdbias" in slice_.of_pairs:
            self._run_backward(slice_, problem, given)
        arrays = tuple(given.values())
        if prepared_call is None or core.compute(prepared_call, arrays, call.random, are_disjoint=True) != core.DONE:
            core.run(problem, given, self.pass_, *call.random)
        for addends_of_tile in self.adding:
            for addends in slice_.on_tiles(functools.partial(addends_of_tile, self, slice_), slice_.tiles):
                for total, index, x in addends:
                    total[index] += x
        for name, x in slice_.sums.items():
            results[name][...] = x

    def _slice_of(self, call: _Call, prepared: _PreparedSlice, results: Mapping[str, Array]) -> _Slice:
        """The arrays of a slice, of which nothing is computed yet: views of those of the call, and arrays of pairs."""
        arrays, optional_inputs, tangents = self._inputs_of(call, prepared)
        size, of_pairs = math.prod(prepared.pairs.shape), dict[str, Array]()
        for name in self.of_pairs:
            if name not in call.memory or call.memory[name].size < size:
                call.memory[name] = np.empty(size, self.dtype)
            of_pairs[name] = call.memory[name][:size].reshape(prepared.pairs.shape)
        products = None
        if self.score.multiplies:
            products = self._take_products(arrays, optional_inputs.get(LENGTHS), tangents, of_pairs)
        tiles, visible, mask = prepared.tiles, prepared.visible, self.score.program.mask
        if mask is not None and visible is None:
            visible = self._blocks(mask, prepared.pairs, Tables(call.score_args))
            tiles = visible.tiles(tiles)
        sums = {name: np.zeros(results[name].shape, self.dtype) for name in self.of_products}
        on_tiles = map if len(tiles) == 1 else jobs.on_cores
        return _Slice(
            call, prepared, tiles, visible, arrays, optional_inputs, tangents, of_pairs, products, sums, on_tiles
        )

    def _inputs_of(
        self, call: _Call, prepared: _PreparedSlice
    ) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """The arrays of a slice, its optional inputs, and the tangents of optional inputs and numbers."""
        view_of = prepared.call_slice.view_of
        arrays = {name: call.arrays[name][prepared.indices[name]] for name in self.names.arrays}
        optional_inputs = {name: view_of(x, cast("int", core.AXES[name])) for name, x in call.optional_inputs.items()}
        tangents = {
            name: x if name[1:] in NUMBERS else view_of(x, cast("int", core.AXES[name[1:]]))
            for name, x in call.tangents.items()
        }
        if self.wide_dtype is not None:
            _widen(arrays, (*arrays,), self.wide_dtype)
            _widen(optional_inputs, ("bias",), self.wide_dtype)
            _widen(tangents, ("tbias",), self.wide_dtype)
        return arrays, optional_inputs, tangents

    def _take_products(
        self,
        arrays: dict[str, Array],
        lengths: Array | None,
        tangents: dict[str, Array],
        of_pairs: Mapping[str, Array],
    ) -> Products:
        """The products of q and k by NumPy, and of their tangents; the core gets zeros in place of q and k.

        So q, k and the scale do not move for the core: their tangents are taken out of the arrays.
        """
        operands = {name: arrays[name] for name in ("q", "k", "tq", "tk") if name in arrays}
        for name in ("tq", "tk"):
            arrays.pop(name, None)
        arrays |= {name: np.zeros((*arrays[name].shape[:3], 1), arrays[name].dtype) for name in ("q", "k")}
        batch, num_heads_kv = arrays["k"].shape[:2]
        grouped = {}  # the query heads that share keys have an axis of their own
        for name, x in operands.items():
            is_of_keys = name[-1] == "k"
            rows = _zero_past(lengths, x) if is_of_keys and lengths is not None else x
            shape = (batch, num_heads_kv, 1 if is_of_keys else -1, *x.shape[2:])
            grouped[name] = rows.astype(self.dtype, copy=False).reshape(shape)
        scale, tscale = self.dtype.type(self.problem.scale), self.dtype.type(tangents.pop("tscale", 0))
        return Products(of_pairs["scaled"], scale, moved=of_pairs.get("tscaled"), tscale=tscale, **grouped)

    def _evaluate(self, slice_: _Slice) -> None:
        """Make the optional inputs that functions stand for, bias and masks, and the tangent of the bias."""
        optional_inputs, visible = slice_.optional_inputs, slice_.visible
        written = {name: slice_.of_pairs[name] for name in self.written["whole"]}
        if visible is not None:
            optional_inputs["block_mask"] = visible.any_pairs
            if visible.are_partial.any():
                written["mask"] = np.ones(slice_.prepared.pairs.shape, bool)
        if written:
            for _ in slice_.on_tiles(functools.partial(self._evaluate_tile, slice_, written), slice_.tiles):
                pass
        if self.score.has_diagonals:
            optional_inputs["bias"] = self._bias_of_diagonals(slice_.call, slice_.prepared)
        if self.score.tangent is not None:
            slice_.tangents["tbias"] = written.pop("tbias")
        if "mask" in optional_inputs and "mask" in written:
            written["mask"] = written["mask"] & optional_inputs["mask"]
        optional_inputs |= written

    def _run_backward(self, slice_: _Slice, problem: Problem, given: Mapping[str, Array]) -> None:
        """Compute the gradient of the bias, on which the tangents of gradients of q and k depend."""
        names = (*INPUTS, *REQUIRED_BY_BACKWARD, "dlse", "row_sums", *slice_.optional_inputs)
        of_backward = {name: x for name, x in given.items() if name in names}
        core.run(problem, of_backward | {"dbias": slice_.of_pairs["dbias"]}, BACKWARD, *slice_.call.random)

    def _prepare_call(self, slice_: _Slice, given: Mapping[str, Array]) -> tuple[Problem, core.Prepared | None]:
        """What the core computes for a slice, from now on: `given` are all arrays, in their order."""
        inputs = [slice_.arrays[name] for name in INPUTS]
        problem = make_problem(self._options(slice_.prepared.call_slice), *inputs, **slice_.optional_inputs)
        prepared_call = None if self.pass_.has_tangents else core.prepare(problem, given, self.pass_)
        slice_.prepared.calls[tuple(slice_.optional_inputs)] = problem, prepared_call
        return problem, prepared_call

    def _evaluate_tile(self, slice_: _Slice, written: Mapping[str, Array], tile: Tile) -> None:
        """Write the products of a tile, and optional inputs; these may be anything in tiles that are hidden."""
        if slice_.products is not None:
            slice_.products.write(tile)
        is_cut = slice_.visible is not None and slice_.visible.are_partial[tile.blocks].any()
        group = "masked" if is_cut else "whole"
        folded = slice_.prepared.folded.get((group, tile))
        inputs = tile.inputs() if folded is None else {}
        if slice_.products is not None:
            inputs["s"] = slice_.products.scaled[tile.index]
        if self.score.tangent is not None:
            inputs["ts"] = self._moved(tile, slice_.products)
        values = evaluate(self.expressions[group], inputs, slice_.call.score_args, self.dtype, folded)
        for name, x in zip(self.written[group], values, strict=True):
            written[name][tile.index] = x

    def _options(self, call_slice: CallSlice) -> Options:
        """The options of a slice."""
        problem = self.problem
        window, origin = (problem.window_left, problem.window_right), problem.origin
        head = ((call_slice.batches.start or 0) + self.sequence) * origin.num_heads + (call_slice.heads.start or 0)
        return Options(
            **problem.numbers,
            window=None if window == (None, None) else window,
            diagonal=problem.diagonal + call_slice.rows.start,
            block_size=BLOCK,
            dropout=problem.dropout,
            origin=Origin(origin.query + call_slice.rows.start, origin.key, origin.head + head, origin.num_heads),
        )

    def _bias_of_diagonals(self, call: _Call, prepared: _PreparedSlice) -> Array:
        """The bias of a slice, whose rows are views of one line: each begins one number before the one above it."""
        pairs, folded = prepared.pairs, prepared.folded.get(("diagonals", None))
        *outer, rows, keys = pairs.shape
        line = np.empty((*outer, 1, max(rows + keys - 1, 0)), self.dtype)
        for first in range(0, line.shape[-1], LINE):
            segment = line[..., first : first + LINE]
            inputs = {}
            if folded is None:
                inputs = pairs.of_diagonals(pairs.rows[-1] - np.arange(first, first + segment.shape[-1]))
            (segment[...],) = evaluate(self.expressions["diagonals"], inputs, call.score_args, self.dtype, folded)
        *strides, _, step = line.strides
        return as_strided(line[..., 0, rows - 1 :], pairs.shape, (*strides, -step, step), writeable=False)

    def _sums_of_tile(self, slice_: _Slice, tile: Tile) -> list[tuple[Array, Any, Array]]:
        """What a tile adds to the gradients of arrays, which follows from that of the bias: sums, entries and addends.

        The sums are flat.
        """
        dbias, folded = slice_.of_pairs["dbias"][tile.index], slice_.prepared.folded.get(("loads", tile))
        inputs = tile.inputs(are_diagonals=self.score.has_diagonals) if folded is None else {}
        if self.score.has_diagonals:
            dbias = sums_of_diagonals(dbias)
        if slice_.products is not None:
            inputs["s"] = slice_.products.scaled[tile.index]
        values = iter(evaluate(self.expressions["loads"], inputs, slice_.call.score_args, self.dtype, folded))
        addends = []
        for number, (name, load) in enumerate(self.loads):
            derivative = next(values)
            of_pairs = dbias * derivative
            if not math.isfinite(of_pairs.sum()):
                of_pairs = self._without_hidden(slice_, tile, dbias, derivative)
            indices = list(itertools.islice(values, len(load.at.args)))
            named = slice_.prepared.entries.get((number, tile))
            if named is None:
                named = entries(slice_.call.score_args[name].shape, indices)
            addends.append((slice_.call.sums[name].reshape(-1), *sums_of_entries(named, of_pairs)))
        return addends

    def _gradients_of_tile(self, slice_: _Slice, tile: Tile) -> list[tuple[Array, Any, Array]]:
        """What a tile adds to gradients of q and k, or to their tangents, which follow from that of the bias.

        That is, for each of them: the sum, the index of the tile's rows or keys in it, and the addends.
        """
        assert slice_.products is not None
        has_tangents, folded = self.pass_.has_tangents, slice_.prepared.folded.get(("by_s", tile))
        of_pairs = slice_.of_pairs
        dbias, tangent = (of_pairs[name][tile.index] for name in ("dbias", "tdbias" if has_tangents else "dbias"))
        inputs = tile.inputs() if folded is None else {}
        inputs["s"] = slice_.products.scaled[tile.index]
        if self.score.by_tangents is not None:
            inputs["ts"] = self._moved(tile, slice_.products)
        slope, *moved = evaluate(self.expressions["by_s"], inputs, slice_.call.score_args, self.dtype, folded)
        if has_tangents:
            tangent *= np.where(tangent == 0, 0, slope)
            for of_slope in moved:
                tangent += dbias * np.where(dbias == 0, 0, of_slope)
            dbias *= np.where(dbias == 0, 0, slope)
            addends = slice_.products.tangents_of_gradients(tile, of_pairs["dbias"], of_pairs["tdbias"], slice_.sums)
        else:
            of_scores = dbias * slope
            if not math.isfinite(of_scores.sum()):
                of_scores = self._without_hidden(slice_, tile, dbias, slope)
            dbias[...] = of_scores
            addends = slice_.products.gradients(tile, of_pairs["dbias"], slice_.sums)
        return [
            (slice_.sums[name], (slice(None), slice(None), tile.own_rows if name in _OF_ROWS else tile.own_keys), x)
            for name, x in addends.items()
        ]

    def _without_hidden(self, slice_: _Slice, tile: Tile, dbias: Array, derivative: Array) -> Array:
        """Gradients of the scores of a tile times a derivative, where some are not finite.

        0 times infinity is NaN, but 0 for pairs without weight.
        """
        weights = self._weights(slice_)[tile.index]
        counts = (sums_of_diagonals(weights) if self.score.has_diagonals else weights) != 0
        product: Array = dbias * np.where(counts | (dbias != 0), derivative, 0)
        return product

    def _weights(self, slice_: _Slice) -> Array:
        """The attention weights of a slice: the gradient of the bias, if that of lse is 1 and that of out is 0."""
        if "weights" not in slice_.of_pairs:
            problem, _ = slice_.prepared.calls[tuple(slice_.optional_inputs)]
            arrays = {name: slice_.arrays[name] for name in (*INPUTS, "lse", "row_sums") if name in slice_.arrays}
            arrays |= {name: np.zeros_like(slice_.arrays["out"]) for name in ("out", "dout")}
            arrays |= {"dlse": np.ones_like(arrays["lse"]), "dbias": np.empty(slice_.prepared.pairs.shape, self.dtype)}
            core.run(problem, arrays | slice_.optional_inputs, BACKWARD, *slice_.call.random)
            slice_.of_pairs["weights"] = arrays["dbias"]
        return slice_.of_pairs["weights"]

    def _moved(self, tile: Tile, products: Products | None) -> Array:
        """The tangents of the products of a tile; zero where these do not move."""
        return np.zeros(1, self.dtype) if products is None or products.moved is None else products.moved[tile.index]

    def _blocks(self, mask: Node, pairs: Pairs, tables: Tables) -> _VisibleBlocks:
        """What a mask shows of the blocks of a slice, by batch entry and head if functions distinguish these."""
        batches, heads = (pairs.of_all[name].reshape(-1).tolist() for name in ("batch", "head"))
        keys, block_size = range(self.problem.seqlen_k), (BLOCK, BLOCK)
        shown = [[shown_blocks(mask, pairs.rows, keys, block_size, b, h, tables) for h in heads] for b in batches]
        always, sometimes = (np.array([[of_head[n] for of_head in of_batch] for of_batch in shown]) for n in range(2))
        return _VisibleBlocks(sometimes, sometimes & ~always)


def _zero_past(lengths: Array, keys: Array) -> Array:
    """Keys, or their tangents, with zeros past the lengths: that memory may hold NaN, which no weight of 0 cancels."""
    exists = np.arange(keys.shape[2]) < lengths.reshape(-1, 1)
    return np.where(exists[:, None, :, None], keys, np.zeros((), keys.dtype))


def _widen(arrays: dict[str, Array], names: Iterable[str], dtype: np.dtype[Any]) -> None:
    """Convert those of some arrays that have smaller numbers than `dtype`."""
    for name in names:
        if name in arrays and arrays[name].dtype.itemsize < dtype.itemsize:
            arrays[name] = arrays[name].astype(dtype)
