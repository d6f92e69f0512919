"""What every command line here has in common: the program's name, messages about arguments, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

INTERRUPTED, PIPE_CLOSED = 128 + 2, 128 + 13  # exit codes, as shells give them to what these signals end
MOST_SHOWN = 16  # choices that an error lists

# What choices are called elsewhere.
_VALUES = {
    "float16": "fp16 half f16 float16_t",
    "bfloat16": "bf16 bfp16",
    "float32": "fp32 float single f32",
    "float64": "fp64 double f64",
    "yes": "true on causal bottom_right",
    "no": "false off none",
    "forward": "fwd",
    "backward": "bwd",
    "gpu": "cuda cupy",
    "cpu": "numpy host",
}


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """What each name means, of a table of names by what they mean."""
    return {name: meant for meant, names in table.items() for name in names.split()}


_MEANT_VALUES = by_name(_VALUES)


def program(module: str) -> str:
    """The command as it was typed: a console script by its name, or the module run by Python."""
    return module if Path(sys.argv[0]).stem == module else f"python -m {module}"


def exit_code(run: Callable[[], int]) -> int:
    """What a command returns; 130 after an interruption, 141 where the reader of the output has gone."""
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:  # as it is in a process that was started without one
                sys.stdout.flush()  # a closed pipe shows here, and not when Python ends, which would complain of it
    except BrokenPipeError:
        # What is still to be written goes nowhere. (An output that is no file, as in tests, needs nothing.)
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


class Parser(argparse.ArgumentParser):
    """Says what is wrong in the last line, and in place of all arguments how they are shown.

    What it returns has `given`: the names of the arguments that are on the command line, be their values the defaults
    or not. `commands` are the parsers of all commands by name, which the parser of each of them knows, too.
    """

    def __init__(self, *, allow_abbrev: bool = False, **keywords: Any) -> None:
        super().__init__(allow_abbrev=allow_abbrev, **keywords)
        self.commands: Mapping[str, Parser] = {}
        self._is_of_all = False

    def add_subparsers(self, **keywords: Any) -> Any:
        """As of argparse."""
        added = super().add_subparsers(**keywords)
        self.commands, self._is_of_all = added.choices, True
        return added

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As of argparse, but that unknown arguments are an error."""
        given = sys.argv[1:] if args is None else list(args)
        if self._is_of_all:
            for command in self.commands.values():
                command.commands = self.commands
            if given and given[0].startswith("-") and given[0].partition("=")[0] not in self._option_string_actions:
                self._refuse(given[:1])
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # here, and not by the parser of all commands, which does not know the arguments of one
            self._refuse(unknown)
        if not hasattr(found, "given"):  # of the parser of a command, which comes first
            absent: list[Any] = []  # `Several` adds to what there is
            again, _ = super().parse_known_args(args, argparse.Namespace(**dict.fromkeys(vars(found), absent)))
            found.given = {name for name, value in vars(again).items() if value is not absent}
        return found, unknown

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Say of unknown arguments which commands take them, and else what they may mean."""
        meant, remedies = [], []
        for option in dict.fromkeys(word.partition("=")[0] for word in unknown):
            if not option.startswith("-") or option[1:2].isdigit():
                continue
            near, remedy = self._meant(option)
            meant += [near] if near else []
            remedies += [remedy] if remedy else []
        if meant:
            remedies.append(f"did you mean {' '.join(meant)}?")
        self.error("; ".join([f"unknown arguments: {' '.join(unknown)}", *remedies]))

    def _meant(self, option: str) -> tuple[str, str]:
        """The option that an unknown one may be, and what else there is to say of it."""
        if takers := self._takers(option):
            return "", f"{_take(takers)} {option}"
        argument, note = self.meant_by(option.strip("-").lower().replace("-", "_"))
        meant = f"--{argument.replace('_', '-')}" if argument else ""
        if not argument and not note:
            known = [*self._options(), *(x for command in self.commands.values() for x in command._options())]
            meant = next(iter(difflib.get_close_matches(option, known, 1)), "")
        if not meant or meant in self._options():
            return meant, "" if meant else note
        if takers := self._takers(meant):
            return f"{meant} ({_take(takers)} it)", ""
        return "", f"no command takes {argument}; in Python, FlashAttention.plan() plans such calls"

    def meant_by(self, name: str) -> tuple[str, str]:
        """The argument here that a name of others means, or what to do without one; both are "" if nothing is known."""
        return "", ""

    def _options(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]

    def _takers(self, option: str) -> list[str]:
        """The commands that take an option."""
        return [name for name, command in self.commands.items() if option in command._option_string_actions]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices: Any = action.choices
        if choices is None or value in choices:
            return
        named = [str(choice) for choice in choices]
        near = _MEANT_VALUES.get(str(value).lower().replace("-", "_"), "")
        near = near if near in named else next(iter(difflib.get_close_matches(str(value), named, 1)), "")
        meant = f"; did you mean {near}?" if near else ""
        expected = ", ".join(named) if len(named) <= MOST_SHOWN else f"one of the {len(named)} that --help shows"
        if action.choices is self.commands:
            self.error(f"unknown command: {value}, expected {expected}{meant}")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}, expected {expected}{meant}")

    def error(self, message: str) -> NoReturn:
        """End with the message, after a line that says how all arguments are shown."""
        self.exit(2, f"{self.prog} --help shows all arguments\n{self.prog}: {message}\n")


class Several(argparse.Action):
    """Values of one argument, each once, in the order of the command line, where the argument may stand repeatedly.

    `const` is the value of the argument alone.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        earlier = () if before is self.default else before
        setattr(namespace, self.dest, list(dict.fromkeys([*earlier, *(values or [self.const])])))


def _take(takers: Sequence[str]) -> str:
    names = " and ".join(filter(None, (", ".join(takers[:-1]), takers[-1])))
    return f"{names} {'take' if len(takers) > 1 else 'takes'}"
