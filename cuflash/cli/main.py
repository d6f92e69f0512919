"""The commands of ``python -m cuflash``, and how one is run."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cuflash import __version__
from cuflash.cli.arguments import add_problem_arguments
from cuflash.cli.cache import add_cache_arguments, cache
from cuflash.cli.check import add_check_arguments, check
from cuflash.cli.demo import add_demo_arguments, demo
from cuflash.cli.here import Failure
from cuflash.cli.info import info
from cuflash.cli.plans import add_plan_arguments, fill_cache, plan
from cuflash.cli.tune import add_tune_arguments, tune
from cuflash.gpu.compiler import CompileError

INTERRUPTED, PIPE_CLOSED = 128 + 2, 128 + 13  # exit codes, as shells give them to what these signals end


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 is success, 1 failure, 130 an interruption, 141 a reader of the output that has gone. Arguments that cannot be
    parsed exit with 2.
    """
    try:
        try:
            return run_command(make_parser(), argv)
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


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the command that is named, or show which there are; what is known to go wrong is said in one line."""
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except BrokenPipeError:
        raise
    except (Failure, NotImplementedError, ImportError, MemoryError, OSError, ValueError) as error:
        print(f"python -m cuflash {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
    except CompileError as error:
        print(error, file=sys.stderr)
    return 1


class Parser(argparse.ArgumentParser):
    """Says what is wrong in the last line, and in place of all arguments how they are shown.

    What it returns has `given`: the names of the arguments that are on the command line, be their values the defaults
    or not.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # here, and not by the parser of all commands, which does not know the arguments of one
            self.error(f"unknown arguments: {' '.join(unknown)}{self._meant(unknown)}")
        if not hasattr(found, "given"):  # of the parser of a command, which comes first
            absent = object()
            again, _ = super().parse_known_args(args, argparse.Namespace(**dict.fromkeys(vars(found), absent)))
            found.given = {name for name, value in vars(again).items() if value is not absent}
        return found, unknown

    def _meant(self, unknown: Sequence[str]) -> str:
        """Which arguments the unknown ones may be misspelt."""
        names = [name for name in self._option_string_actions if name.startswith("--")]
        meant = [x for word in unknown for x in difflib.get_close_matches(word.partition("=")[0], names, 1)]
        return f"; did you mean {' '.join(meant)}?" if meant else ""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog} --help shows all arguments\n{self.prog}: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``python -m cuflash``; ``args.run`` is the command."""
    parser = Parser(
        prog="python -m cuflash", description="Exact attention and its gradients for CuPy and NumPy arrays."
    )
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (run, add_arguments, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run=run)
        add_arguments(command)
    return parser


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None], str]] = {
    "demo": (demo, add_demo_arguments, "a long causal problem forward and backward, timed and checked"),
    "info": (info, lambda command: None, "devices and their limits, versions, the compiler and its cache"),
    "plan": (plan, add_plan_arguments, "what would run for a problem and why, also on a GPU that is not here"),
    "compile": (fill_cache, add_problem_arguments, "compile kernels into the cache, for GPUs that need not be here"),
    "tune": (
        tune,
        add_tune_arguments,
        "find the fastest tiles for a problem on the GPU that is here, and remember them",
    ),
    "cache": (cache, add_cache_arguments, "where compiled kernels are kept, how many, how large; and to clear it"),
    "check": (check, add_check_arguments, "a self-test: many kinds of problem on this device, against the oracle"),
}
