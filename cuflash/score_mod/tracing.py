"""From a Python function to an expression: the function is called once, with symbols in place of numbers."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from cuflash.arrays.checks import callers_frame, callers_line, type_error, typed, value_error
from cuflash.score_mod.nodes import COMPARISONS, INPUTS, LOGICAL, Node, in_order, node, shown

NAMED_INPUTS = ("head", "batch")  # the inputs that a function may ask for by name
AFTER_THE_STAR = "pass the array as an argument after the *"


def location() -> str:
    """File and line of a caller: of the innermost frame outside of this package and of NumPy."""
    frame, _ = callers_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def as_node(value: object) -> Node:
    """The node of a symbol or a number; TypeError for anything else."""
    if isinstance(value, Symbol):
        return value.node
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(
            f"{location()}: got {typed(value)}, expected an integer of 64 bits, or a real number: float(...)"
        )
    if isinstance(value, (bool, int, float)):
        return node("constant", (), value)
    if isinstance(value, numbers.Real):
        return node("constant", (), float(value))
    raise TypeError(
        f"{location()}: got {typed(value)} in a traced expression, "
        f"expected a number or a traced value: {AFTER_THE_STAR}"
    )


def operation(op: str, *args: object) -> Symbol:
    """The symbol of an operation on symbols and numbers."""
    return Symbol(node(op, tuple(map(as_node, args)), location=location()))


def _binary(op: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Symbol, other: object) -> Symbol:
        return operation(op, other, self) if swapped else operation(op, self, other)

    return method


def _refused(what: str, remedy: str) -> Callable[..., Any]:
    def method(self: Symbol, *_: object) -> NoReturn:
        raise TypeError(f"{location()}: {what}, whose value is not known while the function is traced: {remedy}")

    return method


_UFUNCS = {
    np.add: "add", np.subtract: "sub", np.multiply: "mul", np.true_divide: "div", np.floor_divide: "floordiv",
    np.remainder: "mod", np.power: "pow", np.negative: "neg", np.absolute: "abs", np.minimum: "min", np.maximum: "max",
    np.exp: "exp", np.log: "log", np.sqrt: "sqrt", np.tanh: "tanh", np.sin: "sin", np.cos: "cos", np.less: "lt",
    np.less_equal: "le", np.equal: "eq", np.not_equal: "ne", np.bitwise_and: "and", np.bitwise_or: "or",
    np.bitwise_xor: "xor", np.invert: "not", np.logical_and: "and", np.logical_or: "or", np.logical_not: "not",
    np.floor: "floor", np.fabs: "abs", np.float_power: "pow",
}  # fmt: skip
_TURNED = {np.greater: "lt", np.greater_equal: "le"}
# What to write in place of other functions of NumPy, by name.
_REMEDIES = {
    **dict.fromkeys(("round", "rint"), "cuflash.floor(x + 0.5)"),
    "ceil": "-cuflash.floor(-x)", "exp2": "2.0**x", "expm1": "cuflash.exp(x) - 1",
    "hypot": "cuflash.sqrt(x * x + y * y)", "isnan": "x != x", "log10": "cuflash.log(x) / math.log(10)",
    "log1p": "cuflash.log(1 + x)",
    "log2": "cuflash.log(x) / math.log(2)", "reciprocal": "1 / x", "select": "one cuflash.where in another",
    "sign": "cuflash.where(x < 0, -1, cuflash.where(x > 0, 1, 0))", "square": "x * x",
    "tan": "cuflash.sin(x) / cuflash.cos(x)",
}  # fmt: skip
_FUNCTIONS = "abs, clip, cos, exp, floor, log, maximum, minimum, sin, sqrt, tanh or where"


def _not_traced(function: Any, remedy: str = "") -> TypeError:
    name = function.__name__
    remedy = remedy or _REMEDIES.get(name, f"a function of cuflash: {_FUNCTIONS}")
    return TypeError(f"{location()}: got numpy.{name} of a traced value, expected {remedy}")


def _clip(x: object, low: object = None, high: object = None, **bounds: object) -> Symbol:
    """What `numpy.clip` makes of symbols: it has two names for each bound, of which one may be None."""
    low, high = bounds.pop("min", low), bounds.pop("max", high)
    low, high = bounds.pop("a_min", low), bounds.pop("a_max", high)
    if bounds:
        raise _not_traced(np.clip, "no arguments but bounds")
    x = x if low is None else operation("max", x, low)
    return Symbol(as_node(x if high is None else operation("min", x, high)))


def _where(condition: object, *values: object) -> Symbol:
    if len(values) != 2:
        raise _not_traced(np.where, "cuflash.where(condition, x, y)")
    return operation("where", condition, *values)


_ARRAY_FUNCTIONS: dict[Any, Callable[..., Symbol]] = {np.where: _where, np.clip: _clip}


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
        if ufunc not in _UFUNCS and ufunc not in _TURNED:
            raise _not_traced(ufunc)
        if method != "__call__" or options:
            raise _not_traced(ufunc, "it as a function of values, without keyword arguments")
        return operation(_UFUNCS[ufunc], *args) if ufunc in _UFUNCS else operation(_TURNED[ufunc], *reversed(args))

    def __array_function__(self, function: Any, types: object, args: Any, options: Any) -> Symbol:
        """Apply another NumPy function to symbols. Raises TypeError, which says what to write."""
        if function not in _ARRAY_FUNCTIONS:
            raise _not_traced(function)
        return _ARRAY_FUNCTIONS[function](*args, **options)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and NumPy ask for what a value can do
            raise AttributeError(name)
        expected = "operators and functions of cuflash"
        if name in ("shape", "size", "ndim"):
            expected = "lengths as integers from outside, or as arrays after the *"
        raise AttributeError(f"{location()}: got .{name} of a traced value, which is one number, expected {expected}")

    __bool__ = _refused(
        "Python branches on a traced value", "use cuflash.where in place of if, and &, | and ~ for and, or and not"
    )
    __int__ = __index__ = _refused("Python asks a traced value for an integer", f"for an index, {AFTER_THE_STAR}")
    __array__ = _refused("NumPy makes an array of a traced value", f"if that is an index, {AFTER_THE_STAR}")
    __float__ = _refused("Python asks a traced value for a number", "functions such as sqrt are those of cuflash")
    __iter__ = __len__ = __contains__ = _refused("Python iterates over a traced value", "it is one number")
    __getitem__ = _refused("Python looks into a traced value", f"only arrays have entries; {AFTER_THE_STAR}")


class ScoreArgSymbol(Symbol):
    """An array that the function takes as a keyword argument. Without an index it stands for its only entry."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__(node("load", (), name, location=location()))
        self.name = name

    def __getitem__(self, index: object) -> Symbol:
        indices = index if isinstance(index, tuple) else (index,)
        return Symbol(node("load", tuple(map(as_node, indices)), self.name, location=location()))


def score_arg_names(function: Callable[..., Any], what: str, positional: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the keyword-only arguments of a function, those of `NAMED_INPUTS` among them."""
    if not callable(function):
        is_array = what == "mask" and hasattr(function, "__dlpack__")
        remedy = "; an array goes into mask= of forward and backward" if is_array else ""
        expected = f"None or a function of ({', '.join(positional)}, *, ...){remedy}"
        raise type_error(what, type(function).__name__ if is_array else typed(function), expected)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # of some callables that are no Python code
        expected = f"a Python function of ({', '.join(positional)}, *, ...)"
        raise type_error(what, typed(function), expected) from error
    names, count = [], 0
    for parameter in parameters:
        if parameter.kind == parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            names.append(parameter.name)
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            count += 1
        else:
            raise type_error(what, f"a function with {parameter}", "keyword-only arguments without defaults")
    if count != len(positional):
        expected = f"{len(positional)}, ({', '.join(positional)}), and all others after a *"
        raise type_error(what, f"a function of {count} positional arguments", expected)
    return tuple(names)


def trace(function: Callable[..., Any], what: str, positional: tuple[str, ...]) -> tuple[Node, tuple[str, ...]]:
    """The expression of what a function returns, and the names of the arrays that it takes."""
    names = score_arg_names(function, what, positional)
    arrays = tuple(name for name in names if name not in NAMED_INPUTS)
    inputs = {name: Symbol(node("input", (), name)) for name in INPUTS}
    keywords = {name: inputs[name] if name in NAMED_INPUTS else ScoreArgSymbol(name) for name in names}
    try:
        result = function(*(inputs[name] for name in positional), **keywords)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        line = callers_line(error)
        if str(error).startswith(line):
            raise (TypeError(str(error)) if isinstance(error, AttributeError) else error) from None
        raise TypeError(
            f"{line}: got {type(error).__name__} while the {what} was traced: {error}; expected operators and "
            "functions of cuflash on traced values, and arrays as arguments after the *"
        ) from error
    if not isinstance(result, (Symbol, bool, int, float, np.generic)):
        raise type_error(what, f"a function that returns {typed(result)}", "one that returns an expression")
    root = as_node(result)
    if not isinstance(result, Symbol) and what == "score":
        raise value_error(what, f"a function that returns {typed(result)}", "a score of s, i or j")
    if what == "mask" and is_number(root):
        raise number_as_mask(root)
    return root, arrays


def is_number(root: Node) -> bool:
    """Whether an expression is a number, and no condition, whatever the dtypes of arrays are."""
    known: dict[Node, bool | None] = {}  # None for what depends on dtypes
    for at in in_order([root]):
        args = [known[arg] for arg in at.args]
        if at.op == "load":
            known[at] = None
        elif at.op == "constant":
            known[at] = not isinstance(at.payload, bool)
        elif at.op in (*COMPARISONS, "not"):
            known[at] = False
        elif at.op in (*LOGICAL, "where"):
            values = args[-2:]
            known[at] = True if True in values else None if None in values else False
        else:
            known[at] = True
    return known[root] is True


def number_as_mask(root: Node) -> TypeError:
    """The error for a mask function that returns a number."""
    line = f"{root.location}: " if root.location else ""
    return TypeError(
        f"{line}mask: got a function that returns a number, {shown([('', root)])}, expected a condition, such as this "
        "number >= 0 or != 0"
    )
