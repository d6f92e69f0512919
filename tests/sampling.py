"""Which cases of a long list, and how many examples, run: a sample of them, or all with `pytest --exhaustive`."""

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

Case = TypeVar("Case")

# Of samples, one case in so many runs: that keeps .ci/run within its 15 minutes.
KEPT_ONE_IN = 20
# Whether all of them do; conftest.py says so before test modules are imported.
exhaustive = False


def sample(cases: Iterable[Case], one_in: int) -> Sequence[Case]:
    """A twentieth of one in `one_in` of the cases, by their names: a case more does not change which others run."""
    cases = list(cases)
    chosen = [case for case in cases if exhaustive or is_chosen(str(case), one_in)] or cases[:1]
    assert chosen, "there are no cases to choose from"
    return chosen


def examples(count: int) -> int:
    """How many examples of hypothesis run of so many: a twentieth, but two, the first of which is the simplest."""
    return count if exhaustive else max(2, -(-count // 20))


def is_chosen(name: str, one_in: int) -> bool:
    index, rest = divmod(zlib.crc32(name.encode()), one_in)
    return rest == 0 and index % KEPT_ONE_IN == 1


# Of functions that compile kernels, and of those that run emulated ones among other backends, one in five of each file
# runs; but for these files, whose kernels are few or small.
COMPILING = ("compile", "emulate")
ALWAYS = ("tests/compile/test_plans.py::test_row",)  # the rows of the tables, a sample of which compiles
SMALL = ("test_mutants", "test_emulator", "test_emulator_sm90", "test_conformance", "test_conformance_sm90")


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """What runs with `--exhaustive` alone.

    Of functions that compile kernels four of five of each file, of other functions that have cases on emulated kernels
    these cases of four of five. Of tests marked ``one_in(n)``, all cases but a
    twentieth of one in n, and at least one, of each function. Of tests marked ``one_of(name)``, all values of this
    argument but one, another one for each choice of the other arguments.
    """
    if exhaustive:
        return []
    kept = functions_kept(items)
    out = [item for item in items if function_of(item) not in kept]
    cases: dict[str, list[pytest.Item]] = {}
    values: dict[tuple[str, tuple[int, ...]], list[pytest.Item]] = {}
    for item in items:
        if function_of(item) not in kept:
            continue
        if item.get_closest_marker("one_in"):
            cases.setdefault(function_of(item), []).append(item)
        elif marker := item.get_closest_marker("one_of"):
            params = item.callspec.params  # type: ignore[attr-defined]
            others = tuple(id(value) for name, value in params.items() if name != marker.args[0])
            values.setdefault((function_of(item), others), []).append(item)
    for of_function in cases.values():
        (one_in,) = of_function[0].get_closest_marker("one_in").args  # type: ignore[union-attr]
        chosen = [item for item in of_function if is_chosen(item.nodeid, one_in)] or of_function[:1]
        out += [item for item in of_function if item not in chosen]
    for number, of_choice in enumerate(values.values()):
        del of_choice[number % len(of_choice)]
        out += of_choice
    return out


def function_of(item: pytest.Item) -> str:
    """The name of its function; with the word for emulated kernels where those are one backend of several."""
    return item.nodeid.partition("[")[0] + (" emulated" if is_emulated(item) else "")


def is_emulated(item: pytest.Item) -> bool:
    return item.path.parent.name == "features" and "emulated " in item.nodeid


def functions_kept(items: Sequence[pytest.Item]) -> set[str]:
    """The functions that run: of a file of some, one in five and at least one, by their names."""
    files: dict[tuple[Path, bool], set[str]] = {}
    for item in items:
        files.setdefault((item.path, is_emulated(item)), set()).add(function_of(item))
    kept: set[str] = set()
    for (path, emulated), functions in files.items():
        compiles = emulated or (path.parent.name in COMPILING and path.stem not in SMALL)
        count = -(-len(functions) // 5) if compiles else len(functions)
        kept |= {*sorted(functions, key=lambda name: (name not in ALWAYS, zlib.crc32(name.encode())))[:count]}
    return kept
