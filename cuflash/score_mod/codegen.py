"""Typed expressions as CUDA source: functions of a pair (query, key), for `Real`, which is float or double.

An integer has 32 bits where bounds prove that it fits for any sequence lengths, and 64 bits elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cuflash.score_mod.intervals import EVERY_INTEGER, Bounds, all_bounds
from cuflash.score_mod.nodes import COMPARISONS, FUNCTIONS, INFIX, Node, constant, in_order, node

INT32 = (-(2**31), 2**31 - 1)
MOST_ROWS = 2**30  # of queries and of keys: `options.MAX_SEQLEN`
OF_DTYPES: Mapping[str, Bounds] = {"bool": (0, 1), "int32": INT32, "int64": EVERY_INTEGER}
OF_INPUTS: Mapping[str, Bounds] = {
    "s": (math.nan, math.nan),
    "ts": (math.nan, math.nan),
    "i": (0, MOST_ROWS),
    "j": (0, MOST_ROWS),
    "head": (0, INT32[1]),
    "batch": (0, INT32[1]),
}
ELEMENTS = {
    "bool": "u8", "int32": "i32", "int64": "i64", "float16": "Float16", "bfloat16": "BFloat16", "float32": "float",
    "float64": "double",
}  # fmt: skip


FAST = (
    "exp",
    "log",
    "sqrt",
    "tanh",
    "sech2",
    "sin",
    "cos",
    "div",
)  # approximations compute these, unless their last bits may decide a result
# How operations are written: by operators of C++, or else as calls of the functions of the same name.
OPERATORS = {op: f"{{}} {sign} {{}}" for op, sign in INFIX.items() if op not in ("floordiv", "mod", "pow")}
OPERATORS |= {"neg": "-{}", "not": "!{}", "where": "{} ? {} : {}"}
CALLED = (*FUNCTIONS, "div", "floordiv", "mod", "pow", "min", "max", "abs", "floor", "product")
_TURNS = ("floor", "floordiv", "mod", *COMPARISONS)  # operations that jump where their arguments do not


def deciding(roots: Sequence[Node]) -> set[Node]:
    """The nodes whose last bits may decide a result, because it follows from them by operations that jump."""
    found: set[Node] = set()
    for at in reversed(list(in_order(roots))):
        if at in found or at.op in _TURNS or at.type == "bool":
            found.update(at.args)
    return found


def real_literal(value: float) -> str:
    if math.isnan(value):
        return "score_nan()"
    if math.isinf(value):
        return "-score_infinity()" if value < 0 else "score_infinity()"
    return f"(Real){value!r}"


def integer_literal(value: int) -> str:
    if INT32[0] < value <= INT32[1]:
        return str(value) if value >= 0 else f"({value})"
    return f"(i64){value}ll" if value > EVERY_INTEGER[0] else "(-9223372036854775807ll - 1)"


class Writer:
    """The lines of a function body that compute the nodes `roots`, each once.

    `arrays` has the number among the parameters and the dtype of each array, `known` nodes that are computed already,
    and how they are written, `tables` the source of the pointer to position 0 of the row of a table. With `exact`, no
    function is approximated, even where its last bits decide nothing.
    """

    def __init__(
        self,
        roots: Sequence[Node],
        arrays: Mapping[str, tuple[int, str]],
        known: Mapping[Node, str] | None = None,
        *,
        tables: Mapping[str, str] | None = None,
        exact: bool = False,
    ) -> None:
        self.arrays = arrays
        self.tables = tables or {}
        self.exact = exact
        self.names: dict[Node, str] = dict(known or {})
        self.lines: list[str] = []
        bounds: dict[Node, Bounds] = {}
        for root in roots:
            if root not in bounds:
                bounds |= all_bounds(root, OF_INPUTS, lambda name, _: OF_DTYPES.get(arrays[name][1], (math.nan,) * 2))
        self.bounds = bounds
        self.deciding = deciding(roots)
        for root in roots:
            for at in in_order([root], self.names):
                if at not in self.names:
                    self.names[at] = self._named(at)

    def source(self, at: Node) -> str:
        """How the value of a node is written after the lines."""
        return self.names[at]

    def type_of(self, at: Node) -> str:
        if at.type != "int":
            return "bool" if at.type == "bool" else "Real"
        low, high = self.bounds[at]
        return "int" if INT32[0] <= int(low) and int(high) <= INT32[1] else "i64"

    def _named(self, at: Node) -> str:
        if at.op == "constant":
            if at.type == "float":
                return real_literal(float(_number(at)))
            return integer_literal(int(_number(at))) if at.type == "int" else str(bool(at.payload)).lower()
        if at.op == "input":
            return str(at.payload)
        name = f"t{len(self.lines)}"
        self.lines.append(f"const {self.type_of(at)} {name} = {self._expression(at)};")
        return name

    def _expression(self, at: Node) -> str:
        if at.op == "load":
            return self._load(at)
        args = [self.names[arg] for arg in at.args]
        own = self.type_of(at)
        if at.type == "int" and own == "i64" and at.op != "floor":
            args = [f"(i64){x}" if arg.type == "int" else x for x, arg in zip(args, at.args, strict=True)]
        if at.op == "cast":
            return self._cast(at, args[0])
        divides = at.type == "float" and at.op in ("div", "floordiv", "mod")
        reciprocal = self._reciprocal(at.args[1]) if divides else None
        if reciprocal is not None:
            args.append(reciprocal)
        if (squares := self._sum_of_squares(at)) is not None:
            return squares
        is_fast = at.op in FAST and at not in self.deciding and not self.exact
        if at.op in OPERATORS and reciprocal is None and not is_fast:
            return OPERATORS[at.op].format(*args)
        assert at.op in CALLED, at.op
        name = "floor_to_int" if at.op == "floor" and at.type == "int" else at.op
        return f"score_{'fast_' * is_fast}{name}({', '.join(args)})"

    def _cast(self, at: Node, arg: str) -> str:
        (of,) = at.args
        own = self.type_of(at)
        if own == "Real" and of.op == "abs":  # rounded the same either way, and abs of real numbers costs nothing
            return f"score_abs((Real){self.names[of.args[0]]})"
        return f"{arg} != 0" if at.type == "bool" else f"({own}){arg}"

    def _reciprocal(self, divisor: Node) -> str | None:
        """The reciprocal of a real number, if it is known before any pair is."""
        if divisor.op == "constant":
            return f"1 / {self.names[divisor]}"
        return self.names.get(reciprocal_of(divisor))

    def _sum_of_squares(self, at: Node) -> str | None:
        """The sum of two squares and a constant that is not negative, in an order that takes multiply-adds alone."""
        if at.op != "add" or at.type != "float" or at in self.deciding or self.exact:
            return None
        rest, last = at.args
        is_positive = last.op == "constant" and last.type == "float" and float(_number(last)) >= 0
        if not is_positive or rest.op != "add" or not all(x.op == "mul" and x.args[0] is x.args[1] for x in rest.args):
            return None
        first, second = (self.names[x] for x in rest.args)
        return f"({first} + {self.names[last]}) + {second}"

    def _load(self, at: Node) -> str:
        name = str(at.payload)
        index, dtype = self.arrays[name]
        if name in self.tables:
            return f"score_element({ELEMENTS[dtype]}{{}}, {self.tables[name]}, (i64){self.names[at.args[-1]]})"
        return f"score_load<{ELEMENTS[dtype]}>(arrays[{index}]{self.indices(at)})"

    def indices(self, load: Node) -> str:
        """The indices of a load as arguments; as unsigned numbers where they are never negative."""
        source = ""
        for at in load.args:
            is_unsigned = self.type_of(at) == "int" and int(self.bounds[at][0]) >= 0
            source += f", {'(u32)' if is_unsigned else ''}{self.names[at]}"
        return source


def _number(at: Node) -> Any:
    return at.payload


def of_head(roots: Sequence[Node]) -> list[Node]:
    """The subexpressions that read arrays and are the same for all pairs of a head, as large as they can be."""
    varies: dict[Node, bool] = {}
    reads: dict[Node, bool] = {}
    used: dict[Node, None] = dict.fromkeys(roots)
    for at in in_order(roots):
        varies[at] = at.payload in ("s", "ts", "i", "j") if at.op == "input" else any(varies[arg] for arg in at.args)
        reads[at] = at.op == "load" or any(reads[arg] for arg in at.args)
        if varies[at]:
            used |= dict.fromkeys(at.args)
    return [at for at in used if reads[at] and not varies[at]]


def reciprocal_of(divisor: Node) -> Node:
    return node("div", (constant(1.0, "float"), divisor), None, "float")


def divisors_of_head(roots: Sequence[Node], of_all: Sequence[Node]) -> list[Node]:
    """Those of the numbers that are the same for all pairs of a head by which other real numbers are divided."""
    divisions = (at for at in in_order(roots, of_all) if at.type == "float" and at.op in ("div", "floordiv", "mod"))
    divisors = {at.args[1] for at in divisions}
    return [at for at in of_all if at in divisors]


def of_points(roots: Sequence[Node], known: Collection[Node], index: str) -> list[Node]:
    """The real subexpressions that read arrays and depend on one `index` alone: "i" or "j".

    Those that are the same for all pairs of a head are `known`, and left out.
    """
    others = {"s", "i", "j"} - {index}
    inputs: dict[Node, frozenset[str]] = {}
    reads: set[Node] = set()
    used: dict[Node, None] = dict.fromkeys(roots)
    for at in in_order(roots):
        inputs[at] = frozenset({str(at.payload)} if at.op == "input" else ()).union(*(inputs[arg] for arg in at.args))
        if at.op == "load" or any(arg in reads for arg in at.args):
            reads.add(at)
        if inputs[at] & others:
            used |= dict.fromkeys(at.args)
    return [
        at
        for at in used
        if at.type == "float" and at in reads and at not in known and index in inputs[at] and not inputs[at] & others
    ]


def body(
    roots: Sequence[Node],
    arrays: Mapping[str, tuple[int, str]],
    last: Callable[[Writer], list[str]],
    known: Mapping[Node, str] | None = None,
    *,
    tables: Mapping[str, str] | None = None,
    exact: bool = False,
) -> str:
    """The body of a function: the lines that compute nodes, and those that `last` makes of their names."""
    writer = Writer(roots, arrays, known, tables=tables, exact=exact)
    return "".join(f"  {line}\n" for line in (*writer.lines, *last(writer)))
