"""Hoists subexpressions of a score that take few values out of the kernels: each becomes a table, read like an array.

Such a subexpression depends on i - j alone, on i alone or on j alone, and never on s. Of these, the largest are taken
that cost more than reading a table does. A number that is read from an array and is the same for all pairs of a head
stays outside of a subexpression that it is only added to or multiplied by: then heads may share the table, and its
gradient need not be known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from cuflash.score_mod.codegen import INT32, OF_DTYPES, OF_INPUTS
from cuflash.score_mod.derivatives import ZERO, derivatives
from cuflash.score_mod.indexing import counts_from_origin
from cuflash.score_mod.intervals import Bounds, all_bounds
from cuflash.score_mod.nodes import COMPARISONS, Node, in_order, node
from cuflash.score_mod.program import Program, ScoreFunction, Traced, program_of, with_derivatives
from cuflash.score_mod.tables import AXES, By, Loaded, Table, dtype_of

# About how many instructions the kernels of compute capability 9.0 need for an operation on a score; any other needs 1.
# A read of an array finds the nearest entry along each axis; a read of a table is one instruction.
COSTS: Mapping[str, int] = {
    "load": 5, "div": 3, "exp": 3, "log": 3, "sqrt": 3, "tanh": 6, "sech2": 6, "sin": 12, "cos": 12, "pow": 20,
    "floor": 8, "floordiv": 20, "mod": 20,
}  # fmt: skip
COST_BY_CONSTANT = 4  # of an integer quotient or remainder by a constant
COST_OF_REAL_FLOOR = 2  # of one that no index needs as an integer
# A subexpression must cost at least this to be hoisted. Distances such as slope * abs(i - j) cost less, and so does a
# mere read of an array of queries or of keys.
LEAST_COST = 6
MOST_TABLES = 3  # the costliest subexpressions; each takes registers


class Form(NamedTuple):
    """How a number depends on i and j. An integer is a multiple of each plus a rest; any other number is all rest."""

    of_i: int
    of_j: int
    rest: frozenset[str]  # the inputs that it depends on; "i - j" for what follows from the difference alone

    @property
    def inputs(self) -> frozenset[str]:
        """The inputs of a pair that the number depends on."""
        if self.of_i == -self.of_j:
            return self.rest | ({"i - j"} if self.of_i else set())
        return self.rest | ({"i"} if self.of_i else set()) | ({"j"} if self.of_j else set())


def _form(at: Node, args: Sequence[Form], bounds: Mapping[Node, Bounds]) -> Form:
    if at.op == "input":
        name = str(at.payload)
        return Form(int(name == "i"), int(name == "j"), frozenset({"s"} if name == "s" else ()))
    rest = frozenset().union(*(form.rest for form in args))
    is_sum = at.op in ("add", "sub") and at.type == "int"
    if is_sum or (at.op in COMPARISONS and _are_exact(at.args, bounds)):
        sign = 1 if at.op == "add" else -1
        form = Form(args[0].of_i + sign * args[1].of_i, args[0].of_j + sign * args[1].of_j, rest)
        return form if at.type == "int" else Form(0, 0, form.inputs)
    if at.op == "neg" and at.type == "int":
        return Form(-args[0].of_i, -args[0].of_j, rest)
    if at.op == "mul" and at.type == "int":
        for factor, other in (at.args, args), (at.args[::-1], args[::-1]):
            if factor[0].op == "constant":
                times = int(factor[0].payload or 0)  # type: ignore[arg-type]
                return Form(times * other[1].of_i, times * other[1].of_j, rest)
    return Form(0, 0, frozenset().union(*(form.inputs for form in args)))


def _are_exact(args: Sequence[Node], bounds: Mapping[Node, Bounds]) -> bool:
    """Whether these are integers that cannot have wrapped around: then they compare like their difference and 0."""
    return all(arg.type == "int" and all(abs(int(x)) < 2**62 for x in bounds[arg]) for arg in args)


def _bounds_and_forms(root: Node, arrays: Mapping[str, str]) -> tuple[Mapping[Node, Bounds], dict[Node, Form]]:
    """Those of the nodes of an expression, for arrays of these names and dtypes."""
    bounds = all_bounds(root, OF_INPUTS, lambda name, _: OF_DTYPES.get(arrays[name], (math.nan,) * 2))
    forms: dict[Node, Form] = {}
    for at in in_order([root]):
        forms[at] = _form(at, [forms[arg] for arg in at.args], bounds)
    return bounds, forms


@functools.lru_cache(maxsize=256)
def is_of_diagonals(root: Node, arrays: tuple[tuple[str, int, str], ...]) -> bool:
    """Whether an expression has one value for each i - j, where the scaled product is a constant."""
    _, forms = _bounds_and_forms(root, {name: dtype for name, _, dtype in arrays})
    return forms[root].inputs - {"s"} == {"i - j"}


class _Subexpressions:
    """The subexpressions of an expression that are worth hoisting."""

    def __init__(self, root: Node, arrays: Mapping[str, str]) -> None:
        self.bounds, forms = _bounds_and_forms(root, arrays)
        self.inputs = {at: form.inputs for at, form in forms.items()}
        self.reads: set[Node] = set()  # nodes that depend on a read of an array
        for at in forms:
            if at.op == "load" or any(arg in self.reads for arg in at.args):
                self.reads.add(at)
        found: dict[Node, None] = {}
        pending, seen = [root], set()
        while pending:
            at = pending.pop()
            if at in seen:
                continue
            seen.add(at)
            sub = self._subexpression(at)
            if sub is None:
                pending += reversed(at.args)
            elif self.cost(sub) >= LEAST_COST:
                found[sub] = None
        self.found = sorted(found, key=self.cost, reverse=True)[:MOST_TABLES]

    def by(self, at: Node) -> By | None:
        """The index of a table of the number: "i", "j" or "i - j". None if the number cannot be hoisted."""
        if len(self.inputs[at]) != 1:
            return None
        (name,) = self.inputs[at]
        if name == "s":
            return None
        if at.type == "int" and not INT32[0] <= int(self.bounds[at][0]) <= int(self.bounds[at][1]) <= INT32[1]:
            return None
        return name  # type: ignore[return-value]

    def _subexpression(self, at: Node) -> Node | None:
        """The subexpression at this node, without outer summands and factors of the head; None if there is none."""
        if self.by(at) is None:
            return None
        while at.type == "float" and at.op in ("add", "sub", "mul", "neg"):
            inner = [arg for arg in at.args if self.inputs[arg]]
            others = [arg for arg in at.args if not self.inputs[arg]]
            if len(inner) != 1 or not all(arg in self.reads for arg in others):
                break
            (at,) = inner
        return at

    def cost(self, sub: Node) -> int:
        """About how many instructions the subexpression takes for each pair."""
        return sum(_cost(at) for at in in_order([sub]) if at.args and self.inputs[at] and not counts_from_origin(at))


def _cost(at: Node) -> int:
    if at.op in ("floordiv", "mod") and at.type == "int" and at.args[1].op == "constant":
        return COST_BY_CONSTANT
    if at.op == "floor" and at.type == "float":
        return COST_OF_REAL_FLOOR
    return COSTS.get(at.op, 1)


@functools.lru_cache(maxsize=256)
def hoisted_program_of(
    score: ScoreFunction | None,
    mask: Traced | None,
    arrays: tuple[tuple[str, int, str], ...],
    real: str,
    of_batch: bool,
) -> Program:
    """The program of functions as `program_of` gives it, with tables in place of subexpressions that take few values.

    Real numbers have the dtype `real`. Without `of_batch`, one that differs between batch entries is not hoisted.
    """
    program = program_of(score, mask, arrays)
    if program.score is None:
        return program
    found = _Subexpressions(program.score, {name: dtype for name, _, dtype in program.arrays})
    tables: dict[Node, Table] = {}
    for sub in found.found:
        inputs = {at.payload for at in in_order([sub]) if at.op == "input"}
        by = found.by(sub)
        if by is None or sub.type is None or ("batch" in inputs and not of_batch):
            continue
        tables[sub] = Table(
            name=f"hoisted.{len(tables)}",
            of=sub,
            by=by,
            of_batch="batch" in inputs,
            of_head="head" in inputs,
            dtype=dtype_of(sub.type, real),
            loads=_loads(sub),
        )
    if not tables:
        return program
    done: dict[Node, Node] = {sub: table.load for sub, table in tables.items()}
    for at in in_order([program.score], tables):
        if at not in done:
            done[at] = node(at.op, tuple(done[arg] for arg in at.args), at.payload, at.type, at.location)
    own = tuple((table.name, AXES, table.dtype) for table in tables.values())
    arrays = (*program.arrays, *own)
    made = with_derivatives(done[program.score], program.mask, arrays)
    # An array that only tables read gets its gradient from theirs.
    loads = {name: made.loads.get(name, ()) for name, _, _ in arrays if name in program.loads or name in made.loads}
    return replace(made, loads=loads, tables=tuple(tables.values()))


def _loads(sub: Node) -> dict[str, tuple[Loaded, ...]]:
    """The reads of real arrays by a real subexpression, except those by which its derivative is 0."""
    if sub.type != "float":
        return {}
    reads = [at for at in in_order([sub]) if at.op == "load" and at.type == "float"]
    found: dict[str, tuple[Loaded, ...]] = {}
    for at, derivative in zip(reads, derivatives(sub, reads), strict=True):
        if derivative != ZERO:
            name = str(at.payload)
            found[name] = (*found.get(name, ()), Loaded(at=at, derivative=derivative))
    return found
