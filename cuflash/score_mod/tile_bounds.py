"""CUDA source that says whether a mask holds for all, some or no pairs of a tile: interval arithmetic on its indices.

`kernels/common/score/tile_bounds.cuh` has the operations. `cuflash.score_mod.intervals` has the same ones for NumPy
arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash.score_mod.codegen import ELEMENTS, integer_literal
from cuflash.score_mod.intervals import bounds_of_constant
from cuflash.score_mod.nodes import Node, NodeType, in_order

BOUNDS_TYPES: Mapping[NodeType | None, str] = {"bool": "truth", "int": "integers", "float": "reals"}
UNKNOWN: Mapping[NodeType | None, str] = {"bool": "Truth{false, false}", "int": "any_integer()", "float": "any_real()"}
# The operations that tile_bounds.cuh has, by the type of their results.
SERVED: Mapping[NodeType | None, tuple[str, ...]] = {
    "bool": ("not", "and", "or", "xor", "lt", "le", "eq", "ne", "where"),
    "int": ("neg", "abs", "add", "sub", "mul", "floordiv", "mod", "min", "max", "floor", "where"),
    "float": ("neg", "abs", "add", "sub", "mul", "div", "min", "max", "exp", "log", "sqrt", "tanh", "where"),
}


def bounds_source(mask: Node, arrays: Mapping[str, tuple[int, str]]) -> str:
    """The function that gives the bounds of a typed mask over a range of rows and a range of keys."""
    names: dict[Node, str] = {}
    lines: list[str] = []
    for at in in_order([mask]):
        source = _expression(at, [names[arg] for arg in at.args], arrays)
        names[at] = f"t{len(lines)}"
        lines.append(f"  const auto {names[at]} = {source};\n")
    head = "CUFLASH_DEVICE Truth mask_bounds(const ScoreArg* arrays, Integers i, Integers j, int head, int batch) {\n"
    return head + "".join(lines) + f"  return {names[mask]};\n}}\n"


def _expression(at: Node, args: list[str], arrays: Mapping[str, tuple[int, str]]) -> str:
    if at.op == "constant":
        return _constant(at)
    if at.op == "input":
        name = str(at.payload)
        return name if name in ("i", "j") else f"Integers{{{name}, {name}}}"
    if at.op == "load":
        index, dtype = arrays[str(at.payload)]
        entries = f"bounds_of_entries<{ELEMENTS[dtype]}>({', '.join((f'arrays[{index}]', *args))})"
        return f"to_{BOUNDS_TYPES[at.type]}({entries})"
    if at.op == "cast":
        return f"to_{BOUNDS_TYPES[at.type]}({args[0]})"
    if at.op == "floor" and at.type == "float":
        return f"bounds_real_floor({args[0]})"
    return f"bounds_{at.op}({', '.join(args)})" if at.op in SERVED[at.type] else UNKNOWN[at.type]


def _constant(at: Node) -> str:
    value: Any = at.payload
    if at.type == "bool":
        return f"Truth{{{str(bool(value)).lower()}, {str(not value).lower()}}}"
    if at.type == "int":
        return f"Integers{{{integer_literal(int(value))}, {integer_literal(int(value))}}}"
    low, high = bounds_of_constant(at)
    return f"Reals{{{float(low)!r}, {float(high)!r}}}" if abs(value) < float("inf") else UNKNOWN["float"]
