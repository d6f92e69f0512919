"""What `torch.compile` has to know of score_mod and mask_mod: the numbers that they read when they are called.

A compiled graph has a token in place of a function, which is traced once for the graph. So the compiler sees none of
what the function reads, and would neither guard it nor compile again where it changes. Numbers that change are symbols
of the compiler, which no function of the graph can close over.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch._dynamo.comptime import comptime
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import NestedUserFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable

_CONSTANTS = (bool, int, float, str)


def guard_numbers(function: Any) -> None:
    """Make constants, which the compiler guards, of the numbers that a function closes over or has as globals.

    Functions that it calls are looked at, too. What else a function closes over is an error if it is made within the
    compiled function.
    """
    comptime(_guard)


def check_made_outside(attn: Any) -> None:
    """Refuse a `FlashAttention` that is made within the compiled function: its options are not known there."""
    comptime(_check)


def _check(context: Any) -> None:
    """Called by the compiler, with the frame of `check_made_outside`."""
    attn = context.get_local("attn")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    if attn.source is None and not attn.is_python_constant():
        raise TypeError(
            "attn: got a FlashAttention that is made within the compiled function, expected one made outside of it, or "
            "its options as keywords"
        )


def _guard(context: Any) -> None:
    """Called by the compiler, with the frame of `guard_numbers`."""
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    function = context.get_local("function")._i_will_not_complain_if_bc_breaks_VariableTracker()
    _guard_function(tx, function, [])


def _guard_function(tx: Any, function: VariableTracker, seen: list[object]) -> None:
    function = function.realize()
    if not isinstance(function, (NestedUserFunctionVariable, UserFunctionVariable)):
        return
    own = function.get_function() if isinstance(function, UserFunctionVariable) else function
    if any(x is own for x in seen) or _is_own(function.get_globals()):
        return
    seen.append(own)
    found = _closed_over(tx, function) if isinstance(function, NestedUserFunctionVariable) else _cells(tx, function)
    for x in [*found, *_globals(tx, function.get_code(), function.get_globals())]:
        _guard_function(tx, x, seen)


def _closed_over(tx: Any, function: NestedUserFunctionVariable) -> Iterator[VariableTracker]:
    """What a function that is made within the compiled function closes over, symbols replaced by constants."""
    cells = function.closure.items if function.closure else ()  # type: ignore[attr-defined]
    effects = tx.output.side_effects
    for name, cell in zip(function.get_code().co_freevars, cells, strict=True):
        content = effects.load_cell(cell).realize()
        if isinstance(content, SymNodeVariable):
            content = ConstantVariable.create(content.evaluate_expr())
            effects.store_cell(cell, content)
        if not (content.is_python_constant() or isinstance(content, NestedUserFunctionVariable)):
            raise TypeError(
                f"score or mask: got a function that closes over {name}, of type {content.python_type().__name__}, "
                "expected one that closes over numbers and functions: make it, or FlashAttention(score=...), outside "
                "of the compiled function, or give an array as keyword"
            )
        yield content


def _cells(tx: Any, function: UserFunctionVariable) -> Iterator[VariableTracker]:
    """Numbers and functions that a function made elsewhere closes over."""
    for number, cell in enumerate(function.get_function().__closure__ or ()):
        try:
            content = cell.cell_contents
        except ValueError:  # nothing yet
            continue
        if isinstance(content, (*_CONSTANTS, FunctionType)):
            arguments = [function, ConstantVariable.create(number)]
            yield _constant(tx.inline_user_function_return(UserFunctionVariable(_content), arguments, {}))


def _content(function: Any, number: int) -> Any:
    return function.__closure__[number].cell_contents


def _globals(tx: Any, code: CodeType, of_module: dict[str, Any]) -> list[VariableTracker]:
    """Numbers and functions among the globals that code reads."""
    names = sorted(name for name in {*_names(code)} if _may_change(of_module.get(name)))
    if not names:
        return []
    (reading,) = (x for x in compile(f"lambda: ({', '.join(names)},)", "", "eval").co_consts if type(x) is CodeType)
    read = UserFunctionVariable(FunctionType(reading, of_module))
    return [_constant(x) for x in tx.inline_user_function_return(read, [], {}).items]


def _may_change(x: object) -> bool:
    return isinstance(x, _CONSTANTS) or (isinstance(x, FunctionType) and not _is_own(x.__globals__))


def _is_own(of_module: dict[str, Any]) -> bool:
    """Whether these are the globals of a module of cuflash."""
    return str(of_module.get("__name__")).partition(".")[0] == "cuflash"


def _names(code: CodeType) -> Iterator[str]:
    """The names that code, and that of functions within it, may read."""
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _names(x)


def _constant(x: VariableTracker) -> VariableTracker:
    """The same, guarded if it is a symbol."""
    x = x.realize()
    if isinstance(x, SymNodeVariable):
        x.evaluate_expr()
    return x
