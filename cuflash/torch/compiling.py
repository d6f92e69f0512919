"""What `torch.compile` has to know of score_mod and mask_mod: the numbers that they read when they are called.

A compiled graph has a token in place of a function, which is traced once for the graph. So the compiler sees none of
what the function reads, and would neither guard it nor compile again where it changes. Numbers that change are symbols
of the compiler, which no function of the graph can close over.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch._dynamo.comptime import comptime
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import (
    NestedUserFunctionVariable,
    UserFunctionVariable,
    UserMethodVariable,
)
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
    function = context.get_local("function")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    if isinstance(function, UserMethodVariable) or not (
        isinstance(function, (NestedUserFunctionVariable, UserFunctionVariable)) or function.is_python_constant()
    ):
        raise TypeError(
            f"score or mask: got an object of type {function.python_type().__name__}, expected a function: give "
            "FlashAttention(score=...), made outside of the compiled function"
        )
    _guard_function(tx, function, [])


def _guard_function(tx: Any, function: VariableTracker, seen: list[object]) -> None:
    function = function.realize()
    if not isinstance(function, (NestedUserFunctionVariable, UserFunctionVariable)):
        return
    identity = function.get_function() if isinstance(function, UserFunctionVariable) else function
    if any(x is identity for x in seen) or _is_known(function.get_globals()):
        return
    seen.append(identity)
    is_nested = isinstance(function, NestedUserFunctionVariable)
    contents = _closed_over(tx, function) if is_nested else _cells(tx, function)
    for x in [*contents, *_globals(tx, function.get_code(), function.get_globals())]:
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
    """Numbers and functions that a function made elsewhere closes over. All else might change without a guard."""
    outer = function.get_function()
    names, cells = outer.__code__.co_freevars, outer.__closure__ or ()
    for number, (name, cell) in enumerate(zip(names, cells, strict=True)):
        try:
            content = cell.cell_contents
        except ValueError:  # nothing yet
            continue
        if _may_be_guarded(content):
            arguments = [function, ConstantVariable.create(number)]
            yield _constant(tx.inline_user_function_return(UserFunctionVariable(_content), arguments, {}))
        elif not _is_fixed(content):
            raise _may_change_error(f"closes over {name}", content)


def _content(function: Any, number: int) -> Any:
    return function.__closure__[number].cell_contents


def _globals(tx: Any, code: CodeType, of_module: dict[str, Any]) -> list[VariableTracker]:
    """Numbers and functions among the globals that code reads, and among the attributes of modules there."""
    names = sorted({*_read(code, of_module)})
    if not names:
        return []
    (reading,) = (x for x in compile(f"lambda: ({', '.join(names)},)", "", "eval").co_consts if type(x) is CodeType)
    read = UserFunctionVariable(FunctionType(reading, of_module))
    return [_constant(x) for x in tx.inline_user_function_return(read, [], {}).items]


def _read(code: CodeType, of_module: dict[str, Any]) -> Iterator[str]:
    """What code, and that of functions within it, reads of that, as Python spells it. All else might change."""
    instructions = [*dis.get_instructions(code)]
    for number, instruction in enumerate(instructions):
        if instruction.opname != "LOAD_GLOBAL" or instruction.argval not in of_module:
            continue
        text, content = str(instruction.argval), of_module[instruction.argval]
        for after in instructions[number + 1 :]:
            if not isinstance(content, ModuleType) or after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                break
            text, content = f"{text}.{after.argval}", getattr(content, after.argval, None)
        if _may_be_guarded(content):
            yield text
        elif not _is_fixed(content):
            raise _may_change_error(f"reads {text}", content)
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _read(x, of_module)


def _may_be_guarded(content: object) -> bool:
    """Whether these are numbers that the compiler guards, or a function of the caller, which may read some."""
    is_function = isinstance(content, FunctionType) and not _is_known(content.__globals__)
    return is_function or type(content) in _CONSTANTS


def _is_fixed(content: object) -> bool:
    """Whether nothing that a score reads of it changes: functions of Python's and NumPy's C code, classes, modules."""
    if content is None or isinstance(content, (type, ModuleType, FunctionType)):
        return True
    return callable(content) and type(content).__module__ in ("builtins", "numpy")


def _may_change_error(what: str, content: object) -> TypeError:
    """The error for what the compiler cannot guard."""
    return TypeError(
        f"score or mask: got a function that {what}, of type {type(content).__name__}, expected one that reads numbers "
        "of Python and functions, for which a graph is compiled: give FlashAttention(score=...), made outside of the "
        "compiled function, which keeps what it read then, or an array as keyword"
    )


def _is_known(of_module: dict[str, Any]) -> bool:
    """Whether these are the globals of a module of cuflash, of NumPy, or of Python itself."""
    name = str(of_module.get("__name__")).partition(".")[0]
    return name in ("cuflash", "numpy") or name in sys.stdlib_module_names


def _constant(x: VariableTracker) -> VariableTracker:
    """The same, guarded if it is a symbol."""
    x = x.realize()
    if isinstance(x, SymNodeVariable):
        x.evaluate_expr()
    return x
