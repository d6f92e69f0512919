"""Functions of a caller: `Traced` before a call, and the `Program` that a call makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuflash.score_mod.codegen import ELEMENTS, Writer, body, divisors_of_head, of_head, of_points, reciprocal_of
from cuflash.score_mod.derivatives import ONE, derivatives, loads_of
from cuflash.score_mod.evaluation import as_score_args, evaluate
from cuflash.score_mod.factors import factored
from cuflash.score_mod.indexing import COUNTED, ORIGIN, is_difference, of_slice
from cuflash.score_mod.nodes import Node, in_order, node, shown
from cuflash.score_mod.tables import AXES, Loaded, Table, filling_source
from cuflash.score_mod.tangents import TANGENT_OF_S, tangent_of_load, tangents
from cuflash.score_mod.tile_bounds import bounds_source
from cuflash.score_mod.tracing import NAMED_INPUTS, number_as_mask, trace
from cuflash.score_mod.types import cast, typed

Array = NDArray[Any]
What = Literal["score", "mask"]

FEW_TABLES = 2  # tiles of every size leave registers for so many tables
MOST_OF_POINTS = 4  # a function gets so many numbers of a row, and of a key; it reads all others itself
OF_HEAD = "const OfHead& of_head"  # in CUDA source
PAIR = "const ScoreArg* arrays, Real s, int i, int j, int head, int batch"
OF_POINTS = "const OfRow& of_row, const OfKey& of_key"
MOVED_PAIR = PAIR.replace("Real s,", "Real s, Real ts,")
SCORE_TANGENT = f"CUFLASH_DEVICE Real score_tangent({OF_HEAD}, {MOVED_PAIR})"
# A template, so that kernels that do not call it do not compile it.
SLOPE_TANGENT = "template <class Number>\nCUFLASH_DEVICE Number slope_tangent({}, {})".format(
    OF_HEAD, PAIR.replace("Real s,", "Number s, Number ts,")
)
DERIVATIVE_TANGENTS = (
    f"template <class Visit>\nCUFLASH_DEVICE void score_derivative_tangents({OF_HEAD}, {MOVED_PAIR}, Visit visit)"
)
SCORE_FUNCTION = (
    f"template <class Slope>\nCUFLASH_DEVICE Real score_function({OF_HEAD}, {OF_POINTS}, {PAIR}, Slope& by_s)"
)
# The number of a read, by the class of its index. ReadClass of kernels/common/score/score_args_gradients.cuh has the
# same numbers. All other reads have the next number.
READ_CLASSES = {"head": 0, "j": 1, "i": 2, "i - j": 3}
PAIR_READ = len(READ_CLASSES)
POSITIONAL: Mapping[What, tuple[str, ...]] = {"score": ("s", "i", "j"), "mask": ("i", "j")}


class ScoreFunction(Protocol):
    """A function of scores: a traced function, or CUDA source, which is known only by the results of its runs."""

    def __hash__(self) -> int:
        """Equal ones are the same score."""

    @property
    def arrays(self) -> Sequence[str]:
        """The names of the arrays that it takes."""

    @property
    def read(self) -> Collection[str]:
        """The names of those arrays that it reads."""

    @property
    def root(self) -> Node | None:
        """The expression; None for CUDA source."""

    def on_numpy(self) -> Traced:
        """The function for NumPy arrays. Raises NotImplementedError if there is none."""

    def of_slice(self) -> ScoreFunction:
        """The function for a slice of a longer problem. It reads the array `ORIGIN` (`cuflash.score_mod.indexing`)."""

    def program(self, mask: Node | None, arrays: tuple[tuple[str, int, str], ...]) -> Program:
        """The program of it and of a mask, typed for arrays of these names, numbers of axes and dtypes."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A function of a score or a mask, as the expression that it returns.

    Traced functions with the same expression are equal. Pickling keeps the expression, and drops the function.
    """

    what: What
    root: Node
    arrays: tuple[str, ...]  # the names of those that it takes
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, function: Callable[..., Any], what: What) -> Traced:
        """The function, traced. Raises TypeError, which names the line, if it cannot be traced."""
        root, arrays = trace(function, what, POSITIONAL[what])
        return cls(what=what, root=root, arrays=arrays, function=function)

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(Traced, what=self.what, root=self.root, arrays=self.arrays), ()

    def __repr__(self) -> str:
        return f"<{self.what} {shown([('', self.root)])!r}>".replace("\\n", "; ")

    @property
    def read(self) -> Collection[str]:
        """The names of those arrays that are in the expression."""
        return {str(at.payload) for at in in_order([self.root]) if at.op == "load"}

    def on_numpy(self) -> Traced:
        """The same: an expression computes arrays of every type."""
        return self

    def of_slice(self) -> Traced:
        """The function for a slice; the same function if it depends on no index."""
        if not self.depends_on(*COUNTED):
            return self
        return replace(self, root=of_slice(self.root), arrays=(*self.arrays, ORIGIN), function=None)

    def program(self, mask: Node | None, arrays: tuple[tuple[str, int, str], ...]) -> Program:
        """See `ScoreFunction`."""
        return with_derivatives(_typed(self, _by_name(arrays)), mask, arrays)

    def depends_on(self, *inputs: str) -> bool:
        """Whether any of these inputs is in the expression."""
        return any(at.op == "input" and at.payload in inputs for at in in_order([self.root]))

    def __call__(self, inputs: Mapping[str, Any], arrays: Mapping[str, Array], dtype: DTypeLike) -> Any:
        """Call the function itself on NumPy arrays, or evaluate the expression if there is no function any more."""
        if self.function is None:
            return evaluate([self.typed(arrays)], inputs, arrays, dtype)[0]
        keywords = {name: as_score_args(arrays[name], dtype) for name in self.arrays}
        import inspect

        asked = tuple(inspect.signature(self.function).parameters)
        keywords |= {name: inputs[name] for name in NAMED_INPUTS if name in asked}
        with np.errstate(all="ignore"):
            return np.asarray(self.function(*(inputs[name] for name in POSITIONAL[self.what]), **keywords))

    def typed(self, arrays: Mapping[str, Any]) -> Node:
        """The typed expression for these arrays: a real number for a score, a condition for a mask."""
        types = {name: (arrays[name].ndim, arrays[name].dtype.name) for name in self.arrays}
        return _typed(self, tuple(types.items()))


def _by_name(arrays: tuple[tuple[str, int, str], ...]) -> tuple[tuple[str, tuple[int, str]], ...]:
    return tuple((name, (num_axes, dtype)) for name, num_axes, dtype in arrays)


def _typed(traced: Traced, types: tuple[tuple[str, tuple[int, str]], ...]) -> Node:
    root = typed(traced.root, dict(types))
    if traced.what == "mask" and root.type != "bool":
        raise number_as_mask(traced.root)
    return cast(root, "float") if traced.what == "score" else root


@dataclass(frozen=True, kw_only=True)
class Program:
    """The expressions that a call computes, for the dtypes of its arrays."""

    score: Node | None  # the score, and whether a pair is visible, typed. That of CUDA source is None, too.
    mask: Node | None
    by_s: Node | None  # the derivative of the score by the scaled product
    arrays: tuple[tuple[str, int, str], ...]  # name, number of axes and dtype of every array that the functions read
    loads: Mapping[str, tuple[Loaded, ...]]  # by the name of an array of real numbers, how the score reads it
    # The tables, which are filled before the main kernel runs. They are the last of `arrays`.
    tables: tuple[Table, ...] = ()
    # The arrays that have tangents, in a pass that takes some. These tangents are the last of `arrays` then.
    moved: tuple[str, ...] | None = None
    tangents: ScoreTangents | None = None  # the expressions of such a pass; CUDA source has none

    @property
    def changes_slope(self) -> bool:
        """Whether the derivative of the score by the scaled product differs from 1."""
        return self.by_s is not None and self.by_s != ONE

    def derivatives_read_s(self, wanted: Collection[str]) -> bool:
        """Whether the derivatives by s, and by the arrays that are `wanted`, depend on s."""
        roots = [] if self.by_s is None else [self.by_s]
        roots += [load.derivative for name in wanted for load in self.loads.get(name, ())]
        return any(at.op == "input" and at.payload == "s" for at in in_order(roots))

    def on_numpy(self) -> Program:
        """The program for NumPy arrays, made of expressions. Raises NotImplementedError if there are none."""
        return self

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The arrays that the score has derivatives by."""
        return tuple(self.loads)

    def classes(self, wanted: Collection[str]) -> list[str]:
        """The classes of the indices by which the score reads these arrays, one for each read."""
        return [index_class(load.at) for name, loads in self.loads.items() if name in wanted for load in loads]

    @property
    def reads_pairs(self) -> bool:
        """Whether the score reads arrays by indices of rows or of keys. Up to `FEW_TABLES` tables do not count."""
        reads = [at for at in in_order([] if self.score is None else [self.score]) if at.op == "load"]
        own = {table.name for table in self.tables} if len(self.tables) <= FEW_TABLES else ()
        return any(at.payload not in own and index_class(at) != "head" for at in reads)

    @property
    def reads_points(self) -> bool:
        """Whether all that the score reads belongs to the head, a row or a key, such as coordinates of points."""
        reads = [at for at in in_order([] if self.score is None else [self.score]) if at.op == "load"]
        return all(index_class(at) in ("head", "i", "j") for at in reads)

    @property
    def of_keys(self) -> tuple[Node, ...]:
        """The numbers that the score reads for a key, whatever the query is. Kernels may read them for a tile."""
        return self._of_points("j")

    @property
    def of_rows(self) -> tuple[Node, ...]:
        """The numbers that the score reads for a row, whatever the key is. Kernels may read them for a tile, too."""
        return self._of_points("i")

    def _of_points(self, index: str) -> tuple[Node, ...]:
        roots = [root for root in (self.score, self.by_s) if root is not None]
        return tuple(of_points(roots, of_head(roots), index)[:MOST_OF_POINTS])

    def describe(self, tables: Sequence[Table] = ()) -> str:
        """The expressions, one in a line, and the subexpressions that the tables hold."""
        named = [] if self.score is None or self.by_s is None else [("score", self.score), ("d score / d s", self.by_s)]
        for loads in self.loads.values():
            for load in loads:
                named.append((f"d score / d {shown([('', load.at)])} [{index_class(load.at)}]", load.derivative))
        if self.mask is not None:
            named.append(("mask", self.mask))
        return shown([*named, *((table.spelled, table.of) for table in tables)])

    def summed(self, wanted: Collection[str]) -> tuple[str, ...]:
        """The arrays and tables whose gradients are needed for those of the `wanted` arrays."""
        own = {table.name for table in self.tables if table.reads(wanted)}
        return tuple(name for name, loads in self.loads.items() if loads and (name in wanted or name in own))

    def with_space_for(self, tables: Sequence[Table]) -> Program:
        """The program for a kernel argument that also holds these tables, which the program does not read."""
        own = tuple((table.name, AXES, table.dtype) for table in tables)
        return replace(self, arrays=(*self.arrays, *own))

    def header(self, wanted: Collection[str] = ()) -> str:
        """CUDA source: functions of a pair and of the arrays in their order, with derivatives for `wanted` arrays."""
        arrays = {name: (index, dtype) for index, (name, _, dtype) in enumerate(self.arrays)}
        summed = self.summed(wanted)
        reads = [load for name in summed for load in self.loads.get(name, ())]
        of_reads = [index for load in reads for index in load.at.args]
        for load in reads:
            made = factored(load.derivative)
            of_reads += [made.rest, made.factor]
        roots = [*(root for root in (self.score, self.by_s, self.mask) if root is not None), *of_reads]
        of_all = of_head(roots)
        divisors = divisors_of_head(roots, of_all)
        reciprocals = {reciprocal_of(at): f"of_head.reciprocal{n}" for n, at in enumerate(divisors)}
        of_all = [at for at in of_all if at not in reciprocals]
        known = {at: f"of_head.x{n}" for n, at in enumerate(of_all)} | reciprocals
        source = f"constexpr int kNumScoreArgs = {len(arrays)};\n" + self._of_head(of_all, divisors, arrays)
        source += self._scores(arrays, wanted, known)
        source += self._tangents(arrays, summed, known)
        if self.mask is not None:
            visible = self.mask
            source += f"CUFLASH_DEVICE bool mask_function({OF_HEAD}, {PAIR.replace('Real s, ', '')}) {{\n"
            source += body([visible], arrays, lambda writer: [f"return {writer.source(visible)};"], known) + "}\n"
            source += bounds_source(visible, arrays)
        source += self._derivatives(arrays, wanted, summed, known) if wanted else ""
        return source + filling_source(self.tables, arrays, wanted) if self.tables else source

    @property
    def _rows(self) -> dict[str, str]:
        """By the name of a table, the source of the pointer to position 0 of its row."""
        first = len(self.arrays) - len(self.tables)
        return {table.name: f"of_head.table{array}" for array, table in enumerate(self.tables, first)}

    def _of_head(self, nodes: Sequence[Node], divisors: Sequence[Node], arrays: Mapping[str, tuple[int, str]]) -> str:
        """The struct of the numbers that all pairs of a head share, and the function that reads them."""
        own = [(table, arrays[table.name][0]) for table in self.tables]
        fields = [f"  {table.field(array)};\n" for table, array in own]
        rows = [f"row_of_table<{ELEMENTS[table.dtype]}>(arrays[{array}], batch, head)" for table, array in own]

        def made(writer: Writer) -> list[str]:
            fields.extend(f"  {writer.type_of(at)} x{n};\n" for n, at in enumerate(nodes))
            fields.extend(f"  Real reciprocal{n};\n" for n in range(len(divisors)))
            numbers = (*(writer.source(at) for at in nodes), *(f"1 / {writer.source(at)}" for at in divisors))
            return [f"return {{{', '.join((*rows, *numbers))}}};"]

        source = body(nodes, arrays, made)
        reads = "CUFLASH_DEVICE OfHead read_of_head(const ScoreArg* arrays, int head, int batch) {\n"
        return f"struct OfHead {{\n{''.join(fields)}}};\n{reads}{source}}}\n"

    def _points(self, arrays: Mapping[str, tuple[int, str]], known: Mapping[Node, str]) -> str:
        """The structs of the numbers of a row and of a key, and the functions that read them."""
        source = ""
        for what, index, nodes in (("Row", "i", self.of_rows), ("Key", "j", self.of_keys)):

            def made(writer: Writer, nodes: Sequence[Node] = nodes) -> list[str]:
                return [f"return {{{{{', '.join(map(writer.source, nodes)) or '0'}}}}};"]

            source += f"constexpr int kNumOf{what} = {len(nodes)};\n"
            source += f"struct Of{what} {{\n  Real x[{max(len(nodes), 1)}];\n}};\n"
            source += f"CUFLASH_DEVICE Of{what} read_of_{what.lower()}({OF_HEAD}, const ScoreArg* arrays, int {index}, "
            source += "int head, int batch) {\n" + body(nodes, arrays, made, known, tables=self._rows) + "}\n"
        return source

    def _with_points(self, known: Mapping[Node, str]) -> dict[Node, str]:
        """The `known` nodes, and those of the numbers of a row and of a key."""
        of_rows = {at: f"of_row.x[{n}]" for n, at in enumerate(self.of_rows)}
        return {**known, **of_rows} | {at: f"of_key.x[{n}]" for n, at in enumerate(self.of_keys)}

    def _scores(self, arrays: Mapping[str, tuple[int, str]], wanted: Collection[str], known: Mapping[Node, str]) -> str:
        """The function of scores, after the structs of the numbers of a row and of a key."""
        if self.score is None or self.by_s is None:
            return ""
        value, slope = self.score, self.by_s

        def both(writer: Writer) -> list[str]:
            return [f"by_s = {writer.source(slope)};", f"return {writer.source(value)};"]

        lines = body([value, slope], arrays, both, self._with_points(known), tables=self._rows)
        return self._points(arrays, known) + f"{SCORE_FUNCTION} {{\n{lines}}}\n"

    def _derivatives(
        self,
        arrays: Mapping[str, tuple[int, str]],
        wanted: Collection[str],
        summed: Collection[str],
        known: Mapping[Node, str],
    ) -> str:
        """The functions for gradients of `wanted` arrays, which follow from those of `summed` arrays and tables."""
        reads = self._reads(arrays, summed)
        numbers, types, constant = (", ".join(str(int(read[n])) for read in reads) or "0" for n in range(3))
        has_sums = ", ".join(str(int(name in wanted or name in summed)) for name in arrays)
        of_array = "CUFLASH_DEVICE constexpr {} {}(int read) {{ constexpr int of[] = {{{}}}; return of[read]; }}\n"
        cases = "".join(
            f"  if (array == {arrays[name][0]}) score_put({ELEMENTS[arrays[name][1]]}(), data, at, value);\n"
            for name in self.differentiable
            if name in wanted
        )
        return (
            f"constexpr int kNumReads = {len(reads)};\n"
            + of_array.format("int", "array_of_read", numbers)
            + of_array.format("int", "class_of_read", types)
            + of_array.format("bool", "has_constant_derivative", constant)
            + of_array.format("bool", "has_sums", has_sums).replace("read", "array")
            + f"constexpr bool kDerivativesReadS = {str(self.derivatives_read_s(summed)).lower()};\n"
            + f"template <class Visit>\nCUFLASH_DEVICE void score_derivatives({OF_HEAD}, {OF_POINTS}, {PAIR}, "
            + "Real& by_s, Visit visit) {\n"
            + self._visits(arrays, summed, known)
            + f"}}\nCUFLASH_DEVICE void factors_of_reads({OF_HEAD}, const ScoreArg* arrays, int head, int batch, "
            + "Real* of_read) {\n"
            + self._factors(arrays, summed, known)
            + "}\nCUFLASH_DEVICE void store_gradient(int array, void* data, i64 at, Real value) {\n"
            + cases
            + "}\n"
        )

    def _tangents(
        self, arrays: Mapping[str, tuple[int, str]], summed: Collection[str], known: Mapping[Node, str]
    ) -> str:
        """The functions of the tangents of the score, of its derivative by s, and of those by `summed` arrays."""
        if self.tangents is None:
            return ""
        source = ""
        for function, tangent in ((SCORE_TANGENT, self.tangents.score), (SLOPE_TANGENT, self.tangents.by_s)):
            source += f"{function} {{\n"
            source += body([tangent], arrays, functools.partial(_returned, tangent), known) + "}\n"
        if not summed:
            return source
        reads = [
            (name, load.at, load.derivative, tangent)
            for name in summed
            for load, tangent in zip(self.loads[name], self.tangents.reads[name], strict=True)
        ]
        roots = [root for _, at, *both in reads for root in (*at.args, *both)]

        def visits(writer: Writer) -> list[str]:
            return [
                f"visit(Integer<{number}>{{}}, flat_index<0>(arrays[{arrays[name][0]}], (i64)0{writer.indices(at)}), "
                f"{writer.source(derivative)}, {writer.source(tangent)});"
                for number, (name, at, derivative, tangent) in enumerate(reads)
            ]

        return f"{source}{DERIVATIVE_TANGENTS} {{\n{body(roots, arrays, visits, known)}}}\n"

    def _reads(self, arrays: Mapping[str, tuple[int, str]], summed: Collection[str]) -> list[tuple[int, int, bool]]:
        """For each read of a `summed` array: the array, the kind, and whether the derivative is a constant."""
        return [
            (
                arrays[name][0],
                READ_CLASSES.get(index_class(load.at), PAIR_READ),
                factored(load.derivative).rest is ONE,
            )
            for name in summed
            for load in self.loads[name]
        ]

    def _visits(self, arrays: Mapping[str, tuple[int, str]], summed: Collection[str], known: Mapping[Node, str]) -> str:
        """The body of a function that computes the derivative by s and visits those by the reads of `summed` arrays."""
        reads = [(name, load) for name in summed for load in self.loads[name]]
        own = {table.name for table in self.tables}
        slope = ONE if self.by_s is None else self.by_s

        def visits(writer: Writer) -> list[str]:
            lines = [f"by_s = {writer.source(slope)};"]
            for number, (name, load) in enumerate(reads):
                array, indices = f"arrays[{arrays[name][0]}]", writer.indices(load.at)
                offset = f"flat_index<0>({array}, (i64)0{indices})"
                if name in own:
                    offset = f"index_in_table({array}{indices})"
                lines.append(f"visit(Integer<{number}>{{}}, {offset}, {writer.source(rests[number])});")
            return lines

        rests = [factored(load.derivative).rest for _, load in reads]
        roots = [slope, *(index for _, load in reads for index in load.at.args), *rests]
        return body(roots, arrays, visits, self._with_points(known), tables=self._rows)

    def _factors(
        self, arrays: Mapping[str, tuple[int, str]], summed: Collection[str], known: Mapping[Node, str]
    ) -> str:
        """The body of a function that computes, for each read, the factor of its derivatives."""
        factors = [factored(load.derivative).factor for name in summed for load in self.loads[name]]
        return body(
            factors,
            arrays,
            lambda writer: [f"of_read[{n}] = {writer.source(factor)};" for n, factor in enumerate(factors)],
            known,
            tables=self._rows,
        )


@functools.lru_cache(maxsize=256)
def program_of(score: ScoreFunction | None, mask: Traced | None, arrays: tuple[tuple[str, int, str], ...]) -> Program:
    """The program of functions for arrays with these numbers of axes and dtypes.

    Raises TypeError or ValueError if the arrays do not fit the functions.
    """
    visible = None if mask is None else _typed(mask, _by_name(arrays))
    return with_derivatives(None, visible, arrays) if score is None else score.program(visible, arrays)


def with_derivatives(score: Node | None, mask: Node | None, arrays: tuple[tuple[str, int, str], ...]) -> Program:
    """The program of typed expressions."""
    by_s = None
    loads: dict[str, tuple[Loaded, ...]] = {}
    if score is not None:
        by_name = {name: [at for at in loads_of(score, name) if at.type == "float"] for name, _, _ in arrays}
        reads = [at for found in by_name.values() for at in found]
        by_s, *slopes = derivatives(score, [node("input", (), "s", "float"), *reads])
        of_load = dict(zip(reads, slopes, strict=True))
        loads = {
            name: tuple(Loaded(at=at, derivative=of_load[at]) for at in found)
            for name, found in by_name.items()
            if found
        }
    return Program(score=score, mask=mask, by_s=by_s, arrays=arrays, loads=loads)


def _returned(at: Node, writer: Writer) -> list[str]:
    return [f"return {writer.source(at)};"]


class ScoreTangents(NamedTuple):
    """Tangents of a score, of its derivative by the scaled product, and of those by its reads, by array.

    They are expressions of ``ts``, the tangent of the scaled product, and of reads of ``t<array>``.
    """

    score: Node
    by_s: Node
    reads: Mapping[str, tuple[Node, ...]]


@functools.lru_cache(maxsize=256)
def tangents_of(
    score: ScoreFunction, arrays: tuple[tuple[str, int, str], ...], moved: tuple[str, ...], of_s: bool
) -> ScoreTangents:
    """The tangents of a score where the arrays `moved`, and s if `of_s`, have tangents. See `program_of`."""
    program = program_of(score, None, arrays).on_numpy()
    assert program.score is not None and program.by_s is not None
    seeds = {load.at: tangent_of_load(load.at) for name in moved for load in program.loads[name]}
    if of_s:
        seeds[node("input", (), "s", "float")] = TANGENT_OF_S
    reads = [(name, load.derivative) for name, loads in program.loads.items() for load in loads]
    score_tangent, by_s, *others = tangents([program.score, program.by_s, *(x for _, x in reads)], seeds, program.score)
    found: dict[str, tuple[Node, ...]] = {}
    for (name, _), tangent in zip(reads, others, strict=True):
        found[name] = (*found.get(name, ()), tangent)
    return ScoreTangents(score_tangent, by_s, found)


def index_class(load: Node) -> str:
    """How an array is read: "head" (or batch, or a constant), "i", "j", "i - j", "i, j" or "gather"."""
    by_difference = {at for at in in_order(load.args) if is_difference(at)}
    used = _inputs_outside(load.args, by_difference)
    if "s" in used:
        return "gather"
    if not used & {"i", "j"}:
        return "i - j" if by_difference else "head"
    if by_difference or used >= {"i", "j"}:
        direct = [arg for arg in load.args if arg.op == "input" and arg.payload in ("i", "j")]
        others = [arg for arg in load.args if arg not in direct]
        of_others = {at.payload for at in in_order(others) if at.op == "input"}
        return "i, j" if len(direct) == 2 and not of_others & {"i", "j"} else "gather"
    return "i" if "i" in used else "j"


def _inputs_outside(roots: Sequence[Node], excluded: set[Node]) -> set[str]:
    """The inputs that nodes depend on by other ways than through the nodes `excluded`."""
    found, pending, seen = set(), list(roots), set()
    while pending:
        at = pending.pop()
        if at in excluded or at in seen:
            continue
        seen.add(at)
        if at.op == "input":
            found.add(str(at.payload))
        pending += at.args
    return found
