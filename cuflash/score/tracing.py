"""From a Python function to an expression: the function is called once, with symbols in place of numbers."""

from __future__ import annotations

import inspect
import numbers
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cuflash.score.nodes import INPUTS, Node, node
from cuflash.values import type_error, typed, value_error

HERE = str(Path(__file__).resolve().parent)
NAMED_INPUTS = ("head", "batch")  # the inputs that a function may ask for by name


def place() -> str:
    """File and line of the innermost frame outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def as_node(value: object) -> Node:
    """The node of a symbol or a number; TypeError for anything else."""
    if isinstance(value, Symbol):
        return value.node
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return node("constant", (), value)
    if isinstance(value, numbers.Real):
        return node("constant", (), float(value))
    raise TypeError(
        f"{place()}: got {typed(value)} in a traced expression, expected a number, a traced value or an array that the "
        "function takes as a keyword argument"
    )


def operation(op: str, *args: object) -> Symbol:
    """The symbol of an operation on symbols and numbers."""
    return Symbol(node(op, tuple(map(as_node, args)), place=place()))


def _binary(op: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Symbol, other: object) -> Symbol:
        return operation(op, other, self) if swapped else operation(op, self, other)

    return method


def _refused(what: str, remedy: str) -> Callable[..., Any]:
    def method(self: Symbol, *_: object) -> NoReturn:
        raise TypeError(f"{place()}: {what}, whose value is not known while the function is traced: {remedy}")

    return method


_UFUNCS = {
    np.add: "add", np.subtract: "sub", np.multiply: "mul", np.true_divide: "div", np.floor_divide: "floordiv",
    np.remainder: "mod", np.power: "pow", np.negative: "neg", np.absolute: "abs", np.minimum: "min", np.maximum: "max",
    np.exp: "exp", np.log: "log", np.sqrt: "sqrt", np.tanh: "tanh", np.sin: "sin", np.cos: "cos", np.less: "lt",
    np.less_equal: "le", np.equal: "eq", np.not_equal: "ne", np.bitwise_and: "and", np.bitwise_or: "or",
    np.bitwise_xor: "xor", np.invert: "not", np.logical_and: "and", np.logical_or: "or", np.logical_not: "not",
}  # fmt: skip
_TURNED = {np.greater: "lt", np.greater_equal: "le"}


class Symbol:
    """A number that is not known yet. Operators make expressions of it."""

    __slots__ = ("node",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, node: Node) -> None:
        self.node = node

    __add__, __radd__ = _binary("add"), _binary("add", True)
    __sub__, __rsub__ = _binary("sub"), _binary("sub", True)
    __mul__, __rmul__ = _binary("mul"), _binary("mul", True)
    __truediv__, __rtruediv__ = _binary("div"), _binary("div", True)
    __floordiv__, __rfloordiv__ = _binary("floordiv"), _binary("floordiv", True)
    __mod__, __rmod__ = _binary("mod"), _binary("mod", True)
    __pow__, __rpow__ = _binary("pow"), _binary("pow", True)
    __and__, __rand__ = _binary("and"), _binary("and", True)
    __or__, __ror__ = _binary("or"), _binary("or", True)
    __xor__, __rxor__ = _binary("xor"), _binary("xor", True)
    __lt__, __gt__ = _binary("lt"), _binary("lt", True)
    __le__, __ge__ = _binary("le"), _binary("le", True)
    __eq__ = _binary("eq")
    __ne__ = _binary("ne")

    def __neg__(self) -> Symbol:
        return operation("neg", self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return operation("abs", self)

    def __invert__(self) -> Symbol:
        return operation("not", self)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: object, **options: object) -> Symbol:
        """Apply a NumPy function to symbols. Raises TypeError if expressions have no such operation."""
        if method == "__call__" and not options:
            if ufunc in _UFUNCS:
                return operation(_UFUNCS[ufunc], *args)
            if ufunc in _TURNED:
                return operation(_TURNED[ufunc], *reversed(args))
        raise TypeError(f"{place()}: got numpy.{ufunc.__name__} of a traced value, expected a function of cuflash")

    __bool__ = _refused(
        "Python branches on a traced value", "use cuflash.where in place of if, and &, | and ~ for and, or and not"
    )
    __int__ = __index__ = _refused("Python asks a traced value for an integer", "arrays are keyword arguments")
    __float__ = _refused("Python asks a traced value for a number", "functions such as sqrt are those of cuflash")
    __iter__ = __len__ = __contains__ = _refused("Python walks over a traced value", "it is one number")
    __getitem__ = _refused("Python looks into a traced value", "only arrays, which are keyword arguments, have entries")


class CapturedSymbol(Symbol):
    """An array that the function takes as a keyword argument. Without an index it stands for its only entry."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__(node("load", (), name, place=place()))
        self.name = name

    def __getitem__(self, index: object) -> Symbol:
        indices = index if isinstance(index, tuple) else (index,)
        return Symbol(node("load", tuple(map(as_node, indices)), self.name, place=place()))


def captured_names(function: Callable[..., Any], what: str, positional: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the keyword-only arguments of a function, those of `NAMED_INPUTS` among them."""
    if not callable(function):
        raise type_error(what, typed(function), f"None or a function of ({', '.join(positional)}, *, ...)")
    names, count = [], 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind == parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            names.append(parameter.name)
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            count += 1
        else:
            raise type_error(what, f"a function with {parameter}", "keyword-only arguments without defaults")
    if count != len(positional):
        expected = f"{len(positional)}, ({', '.join(positional)}); all others behind a *"
        raise type_error(what, f"a function of {count} positional arguments", expected)
    return tuple(names)


def trace(function: Callable[..., Any], what: str, positional: tuple[str, ...]) -> tuple[Node, tuple[str, ...]]:
    """The expression of what a function returns, and the names of the arrays that it takes."""
    names = captured_names(function, what, positional)
    arrays = tuple(name for name in names if name not in NAMED_INPUTS)
    inputs = {name: Symbol(node("input", (), name)) for name in INPUTS}
    keywords = {name: inputs[name] if name in NAMED_INPUTS else CapturedSymbol(name) for name in names}
    result = function(*(inputs[name] for name in positional), **keywords)
    if not isinstance(result, (Symbol, bool, int, float, np.generic)):
        raise type_error(what, f"a function that returns {typed(result)}", "one that returns an expression")
    root = as_node(result)
    if not isinstance(result, Symbol) and what == "score":
        raise value_error(what, f"a function that returns {typed(result)}", "a score of s, i or j")
    return root, arrays
