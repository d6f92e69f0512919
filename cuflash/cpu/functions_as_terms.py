"""Functions of the caller as a bias and masks, with which the compiled core computes some queries at a time.

What a score adds to the scaled product is its bias, if that does not depend on the product. NumPy computes it, and what
a mask function hides, once for all batch entries and heads that the functions do not tell apart. A part of a call has
as many queries as take `PAIRS` numbers, so that memory is linear, and results do not depend on the number of threads.
What parts add to dk and dv is summed in the dtype of the softmax, in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import core, jobs
from cuflash.operands import ITEMSIZE, view_4d, view_rows
from cuflash.options import Options
from cuflash.problem import Problem, make_problem
from cuflash.score.evaluation import evaluate
from cuflash.score.intervals import Tables, bounds_of
from cuflash.score.nodes import Node, in_order
from cuflash.terms import DEFAULT_NEED, NAMES, TERMS

Array = NDArray[Any]

# With as many pairs, calls of NumPy take most of the time: one head of 64 queries and keys took 0.28 ms by tiles, and
# 0.41 so.
FEW_PAIRS = 2**13
PAIRS = 2**21  # of a part
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
    others = [name for name in wanted if name not in DEFAULT_NEED]
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
        self.arrays = {
            name: view_rows(x) if name in ("lse", "dlse") else view_4d(x, problem.layout)
            for name, x in given.items()
            if name not in self.captured and name not in BESIDE
        }
        self.tables = Tables(self.captured)
        roots = [root for root in (self.program.score, self.program.mask) if root is not None]
        inputs = {at.payload for at in in_order(roots) if at.op == "input"}
        self.by_batch, self.by_head = "batch" in inputs, "head" in inputs

    def parts(self) -> Iterator[_Part]:
        """Parts whose functions take at most `PAIRS` numbers, or a block of rows, in a fixed order."""
        problem = self.problem
        group, every = problem.group_size, slice(None)
        batches, heads = [every], [(every, every)]
        seen = (problem.batch if self.by_batch else 1) * (problem.num_heads if self.by_head else 1)
        of_block = min(BLOCK, max(problem.seqlen_q, 1)) * max(problem.seqlen_k, 1)
        if self.by_batch and seen * of_block > PAIRS:
            batches = [slice(b, b + 1) for b in range(problem.batch)]
            seen //= max(problem.batch, 1)
        if self.by_head and seen * of_block > PAIRS:
            kv_heads = range(problem.num_heads_kv)
            heads = [(slice(h * group, (h + 1) * group), slice(h, h + 1)) for h in kv_heads]
            seen = group
        blocks = max(1, PAIRS // max(seen * BLOCK * problem.seqlen_k, 1))
        for batch in batches:
            for of_q, of_kv in heads:
                for first in range(0, problem.seqlen_q, blocks * BLOCK):
                    rows = slice(first, min(first + blocks * BLOCK, problem.seqlen_q))
                    yield _Part(batch, of_q, of_kv, rows)

    def of_rows(self, part: _Part, names: Collection[str]) -> dict[str, Array]:
        return {name: self.arrays[name][part.batches, part.heads, part.rows] for name in names if name in self.arrays}

    def run(self, part: _Part, arrays: dict[str, Array], is_backward: bool) -> None:
        """Compute a part: `arrays` are those of a call but for q, k, v and terms."""
        own = self.of_rows(part, ("q",)) | {x: self.arrays[x][part.batches, part.heads_kv] for x in ("k", "v")}
        terms = {name: _cut(x, cast("int", core.AXES[name]), part) for name, x in self.terms.items()}
        of_functions = self.functions(part)
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
        core.run(problem, {**own, **terms, **arrays}, is_backward, None, None)

    def run_backward(self, parts: list[_Part]) -> None:
        """Write gradients. Where several parts add to dk and dv, all are of the dtype of the softmax."""
        dtype = np.dtype(self.problem.softmax_dtype)
        results = {name: self.arrays.pop(name) for name in DEFAULT_NEED if name in self.arrays}
        is_split = len({part.rows.start for part in parts}) > 1
        if is_split and ITEMSIZE[self.problem.dtype] < dtype.itemsize:
            self.arrays = {name: x.astype(dtype) for name, x in self.arrays.items()}
        sums = {name: np.zeros(x.shape, self.arrays["q"].dtype) for name, x in results.items()}
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
        for name, x in results.items():
            x[...] = sums[name]

    def functions(self, part: _Part) -> dict[str, Array]:
        """The bias of a part, the mask of its pairs, and that of its blocks; those that there are."""
        problem, program = self.problem, self.program
        rows, dtype = range(part.rows.start, part.rows.stop), problem.softmax_dtype
        batches, heads = np.arange(problem.batch)[part.batches], np.arange(problem.num_heads)[part.heads]
        of_all = {"batch": batches if self.by_batch else batches[:1], "head": heads if self.by_head else heads[:1]}
        inputs = {"batch": of_all["batch"][:, None, None, None], "head": of_all["head"][None, :, None, None]}
        shape = (len(of_all["batch"]), len(of_all["head"]), len(rows), problem.seqlen_k)
        terms: dict[str, Array] = {}
        if program.score is not None:
            terms["bias"] = np.zeros(shape, dtype)
        if program.mask is not None:
            always, sometimes = self.blocks(program.mask, rows, inputs)
            terms |= {"block_mask": sometimes, "mask": np.ones(shape, bool)}

        def evaluate_block(_: jobs.Workspace, first_row: int, first_key: int) -> None:
            stop_row, stop_key = min(first_row + BLOCK, rows.stop), min(first_key + KEYS, problem.seqlen_k)
            at = {"i": np.arange(first_row, stop_row)[:, None], "j": np.arange(first_key, stop_key)}
            at |= {**inputs, "s": np.zeros(1, dtype)}
            place = (..., slice(first_row - rows.start, stop_row - rows.start), slice(first_key, stop_key))
            if program.mask is not None:
                blocks = (..., (first_row - rows.start) // BLOCK, slice(first_key // BLOCK, -(-stop_key // BLOCK)))
                if not sometimes[blocks].any():
                    return
                if not always[blocks].all():
                    terms["mask"][place] = evaluate([program.mask], at, self.captured, dtype)[0]
            if program.score is not None:
                terms["bias"][place] = evaluate([program.score], at, self.captured, dtype)[0]

        every = []
        for first_row in range(rows.start, rows.stop, BLOCK):
            first, stop = problem.key_range(first_row)[0], problem.key_range(min(first_row + BLOCK, rows.stop) - 1)[1]
            every += [(first_row, first_key) for first_key in range(first // KEYS * KEYS, stop, KEYS)]
        threads = jobs.count_cores() if len(every) > 1 else 1
        jobs.run(evaluate_block, every, threads, np.dtype(dtype))
        return terms

    def blocks(self, mask: Node, rows: range, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
        """For each block of some rows, whether the mask shows all its pairs, and whether it shows any."""
        ranges = []
        for whole in (rows, range(self.problem.seqlen_k)):
            first = np.arange(whole.start, whole.stop, BLOCK)
            ranges.append((first, np.minimum(first + BLOCK, whole.stop) - 1))
        (first_i, last_i), (first_j, last_j) = ranges
        shape = (*np.broadcast_shapes(*(x.shape for x in inputs.values()))[:2], first_i.size, first_j.size)
        always, sometimes = np.empty((2, *shape), bool)
        for b, h in np.ndindex(shape[:2]):
            own = {"batch": inputs["batch"][b].item(), "head": inputs["head"][0, h].item()}
            bounds = {"i": (first_i[:, None], last_i[:, None]), "j": (first_j, last_j)}
            bounds |= {name: (x, x) for name, x in own.items()}
            for result, found in zip((always, sometimes), bounds_of(mask, bounds, self.tables.load), strict=True):
                result[b, h] = found == 1
        return always, sometimes
