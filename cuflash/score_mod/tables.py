"""Tables of subexpressions of a score that take few values, and the CUDA source that fills them before the main kernel.

A subexpression that follows from i - j alone, from i or from j, and from the head and the batch entry, has a value for
each diagonal, query or key. `cuflash.score_mod.hoisting` finds such subexpressions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cuflash.score_mod.codegen import ELEMENTS, Writer, body
from cuflash.score_mod.nodes import Node, NodeType, node

By = Literal["i", "j", "i - j"]
# Kernels compute whole tiles of pairs: they may read so many rows past the last row, and keys past the last key.
MARGIN = 256
LINE = 32  # a row of a table is made of lines of so many entries, and a warp fills each
AXES = 3  # batch entries, heads and positions
_POSITION = "const ScoreArg* arrays, int batch, int head, int position"  # in CUDA source


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """One way in which an expression reads an array of real numbers: the node, and the derivative by it."""

    at: Node
    derivative: Node


@dataclass(frozen=True, kw_only=True)
class Table:
    """The values of a subexpression of a score, for each i - j, each i or each j."""

    name: str  # used like the name of a score_mod args. It is no identifier, so that no array of a caller has it.
    of: Node  # the expression, typed
    by: By
    of_batch: bool  # whether it differs between batch entries, and between heads
    of_head: bool
    dtype: str
    loads: Mapping[str, tuple[Loaded, ...]]  # by the name of an array of real numbers, how the subexpression reads it

    @property
    def load(self) -> Node:
        """How the score reads it."""
        i, j, head, batch = (node("input", (), name, "int") for name in ("i", "j", "head", "batch"))
        zero = node("constant", (), 0, "int")
        position = {"i": i, "j": j, "i - j": node("sub", (i, j), None, "int")}[self.by]
        indices = (batch if self.of_batch else zero, head if self.of_head else zero, position)
        return node("load", indices, self.name, self.of.type)

    def size(self, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int, int]:
        """Batch entries, heads and positions that it has for such a problem."""
        rows, keys = seqlen_q + MARGIN, seqlen_k + MARGIN
        positions = {"i": rows, "j": keys, "i - j": rows + keys}[self.by]
        return batch if self.of_batch else 1, num_heads if self.of_head else 1, -(-positions // LINE) * LINE

    def first(self, seqlen_k: int) -> int:
        """The position of its first entry."""
        return -(seqlen_k + MARGIN) if self.by == "i - j" else 0

    def reads(self, names: Collection[str]) -> bool:
        """Whether it changes with real numbers of any of these arrays."""
        return any(name in names for name in self.loads)

    def field(self, array: int) -> str:
        """CUDA source: the member of OfHead that points to position 0 of the table's row for a head."""
        return f"const StoredAs<{ELEMENTS[self.dtype]}>::Type* table{array}"

    @property
    def spelled(self) -> str:
        """Its name and its indices."""
        axes = (("batch", self.of_batch), ("head", self.of_head), (self.by, True))
        return f"{self.name}[{', '.join(name for name, on in axes if on)}]"


def dtype_of(type_: NodeType, real: str) -> str:
    """The dtype of a table of elements of this type; real numbers have the dtype of the softmax, `real`."""
    return {"bool": "bool", "int": "int32", "float": real}[type_]


def filling_source(tables: Sequence[Table], arrays: Mapping[str, tuple[int, str]], wanted: Collection[str]) -> str:
    """CUDA source: the functions that fill tables, and those that lead their gradients on to the `wanted` arrays."""
    numbers = ", ".join(str(arrays[table.name][0]) for table in tables)
    source = f"constexpr int kNumTables = {len(tables)};\n"
    source += f"CUFLASH_DEVICE constexpr int array_of_table(int table) {{ constexpr int of[] = {{{numbers}}}; "
    source += "return of[table]; }\n"
    for number, table in enumerate(tables):
        source += _filling(number, table, arrays)
        source += _batch_axes_on(number, table, arrays, wanted) if table.reads(wanted) else ""
    return source


def _filling(number: int, table: Table, arrays: Mapping[str, tuple[int, str]]) -> str:
    root = table.of
    head = f"CUFLASH_DEVICE void fill_table(Integer<{number}>, void* data, i64 at, {_POSITION}) {{\n{_pair(table)}"
    stored = f"((StoredAs<{ELEMENTS[table.dtype]}>::Type*)data)[at]"
    return head + body([root], arrays, lambda writer: [f"{stored} = {writer.source(root)};"], exact=True) + "}\n"


def _batch_axes_on(number: int, table: Table, arrays: Mapping[str, tuple[int, str]], wanted: Collection[str]) -> str:
    reads = [(name, load) for name, loads in table.loads.items() if name in wanted for load in loads]
    head = f"template <class Visit>\nCUFLASH_DEVICE void lead_on(Integer<{number}>, {_POSITION}, Visit visit) {{\n"
    roots = [*(index for _, load in reads for index in load.at.args), *(load.derivative for _, load in reads)]

    def visits(writer: Writer) -> list[str]:
        lines = []
        for name, load in reads:
            offset = f"flat_index<0>(arrays[{arrays[name][0]}], (i64)0{writer.indices(load.at)})"
            lines.append(f"visit({arrays[name][0]}, {offset}, {writer.source(load.derivative)});")
        return lines

    return head + _pair(table) + body(roots, arrays, visits, exact=True) + "}\n"


def _pair(table: Table) -> str:
    """CUDA source: i and j of a pair that the position of an entry belongs to."""
    pairs = {
        "i": "i = position, j = 0",
        "j": "i = 0, j = position",
        "i - j": "i = position > 0 ? position : 0, j = i - position",
    }
    return f"  const int {pairs[table.by]};\n  (void)i, (void)j;\n"
