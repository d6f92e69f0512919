"""Typed expressions: every node is a bool, an integer or a real number, and casts are inserted where types differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from cuflash.arrays.checks import value_error
from cuflash.score_mod.nodes import COMPARISONS, FUNCTIONS, LOGICAL, Node, NodeType, in_order, node

MOST_PRODUCTS = 64  # an integer exponent up to this becomes a chain of products
OF_INPUTS: Mapping[str, NodeType] = {"s": "float", "i": "int", "j": "int", "head": "int", "batch": "int"}
_RANK = {"bool": 0, "int": 1, "float": 2}


def typed(root: Node, arrays: Mapping[str, tuple[int, str]]) -> Node:
    """The typed expression, where `arrays` has the number of axes and the dtype of each array.

    Raises TypeError for an operation that these types do not have, and ValueError for a wrong number of indices.
    """
    done: dict[Node, Node] = {}
    for at in in_order([root]):
        done[at] = _Typed(at, [done[arg] for arg in at.args], arrays).result()
    return done[root]


def cast(x: Node, type_: NodeType) -> Node:
    """The number as one of another type."""
    if x.type == type_:
        return x
    if x.op == "constant" and x.payload is not None and not isinstance(x.payload, str):
        value = {"bool": bool, "int": int, "float": float}[type_](x.payload)
        return node("constant", (), value, type_)
    if x.op == "floor" and type_ == "float":  # which need not fit an integer, and converts nothing
        return node("floor", x.args, None, type_, x.location)
    return node("cast", (x,), None, type_)


def real(value: float) -> Node:
    """A real constant."""
    return node("constant", (), float(value), "float")


def power(x: Node, exponent: int) -> Node:
    """The product of `exponent` factors x. The exponent is at least 1."""
    result, square = None, x
    while True:
        if exponent % 2:
            result = square if result is None else node("mul", (result, square), None, x.type)
        exponent //= 2
        if exponent == 0:
            assert result is not None
            return result
        square = node("mul", (square, square), None, x.type)


class _Typed:
    """One node on its way to a typed one."""

    def __init__(self, at: Node, args: list[Node], arrays: Mapping[str, tuple[int, str]]) -> None:
        self.at, self.args, self.arrays = at, args, arrays

    def result(self) -> Node:
        at, args = self.at, self.args
        if at.op == "constant":
            type_: NodeType = (
                "bool" if isinstance(at.payload, bool) else "int" if isinstance(at.payload, int) else "float"
            )
            return self.made(type_)
        if at.op == "input":
            return self.made(OF_INPUTS[str(at.payload)])
        if at.op == "load":
            return self.load()
        if at.op in FUNCTIONS:
            return self.made("float", cast(args[0], "float"))
        if at.op == "floor":
            return cast(args[0], "int") if args[0].type != "float" else self.made("int", args[0])
        if at.op in ("neg", "abs"):
            type_ = "float" if args[0].type == "float" else "int"
            return self.made(type_, cast(args[0], type_))
        if at.op in LOGICAL or at.op == "not":
            return self.logical()
        if at.op == "where":
            type_ = self.common(args[1:])
            return self.made(type_, cast(args[0], "bool"), cast(args[1], type_), cast(args[2], type_))
        if at.op == "pow":
            return self.power()
        type_ = self.common(args)
        if at.op in COMPARISONS:
            return self.made("bool", *(cast(x, type_) for x in args))
        type_ = "float" if at.op == "div" or type_ == "float" else "int"
        return self.made(type_, *(cast(x, type_) for x in args))

    def made(self, type_: NodeType, *args: Node) -> Node:
        return node(self.at.op, args, self.at.payload, type_, self.at.location)

    def common(self, args: list[Node]) -> NodeType:
        return max((x.type for x in args if x.type is not None), key=lambda type_: _RANK[type_])

    def refuse(self, message: str) -> NoReturn:
        raise TypeError(f"{self.at.location}: {message}")

    def load(self) -> Node:
        name = str(self.at.payload)
        num_axes, dtype = self.arrays[name]
        if len(self.args) != num_axes:
            expected = f"{len(self.args)} axes, which it is indexed by in {self.at.location}"
            raise value_error(name, f"an array of {num_axes} axes", expected)
        for index in self.args:
            if index.type == "float":
                self.refuse(
                    f"got a real number as an index of {name}, expected an integer, such as cuflash.floor gives"
                )
        type_: NodeType = "bool" if dtype == "bool" else "int" if dtype.startswith("int") else "float"
        return self.made(type_, *(cast(index, "int") for index in self.args))

    def logical(self) -> Node:
        if any(x.type == "float" for x in self.args):
            self.refuse(f"got real numbers for {self.at.op!r}, expected conditions or integers")
        if self.at.op == "not":
            type_ = self.args[0].type
            if type_ == "int":
                self.refuse("got an integer for ~, expected a condition")
            return self.made("bool", *self.args)
        type_ = self.common(self.args)
        return self.made(type_, *(cast(x, type_) for x in self.args))

    def power(self) -> Node:
        base, exponent = self.args
        type_: NodeType = "float" if base.type == "float" else "int"
        number = exponent.payload if exponent.op == "constant" else None
        if isinstance(number, float) and number.is_integer() and abs(number) <= MOST_PRODUCTS:
            number, type_ = int(number), "float"
        if isinstance(number, int) and abs(number) <= MOST_PRODUCTS:
            if number == 0:
                return cast(node("constant", (), 1, "int"), type_)
            if number > 0:
                return power(cast(base, type_), int(number))
            return node("div", (real(1), power(cast(base, "float"), -int(number))), None, "float")
        if number == 0.5:
            return node("sqrt", (cast(base, "float"),), None, "float")
        return self.made("float", cast(base, "float"), cast(exponent, "float"))
