"""What of the tests runs by default: of each file, each function and each choice something; all where all is asked."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import sampling

VALUES, CASES = [object() for _ in range(3)], [object() for _ in range(30)]


def item(file, name, number="", mark=None, **params):
    nodeid = f"tests/{file}.py::{name}" + (f"[{number}]" if number != "" else "")
    marker = None if mark is None else SimpleNamespace(args=mark[1:])
    return SimpleNamespace(
        nodeid=nodeid,
        path=Path(f"tests/{file}.py"),
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda asked: marker if mark and asked == mark[0] else None,
    )


@pytest.fixture
def kept(monkeypatch):
    def kept_of(items, exhaustive=False):
        monkeypatch.setattr(sampling, "exhaustive", exhaustive)
        out = sampling.left_out(items)
        assert len({id(x) for x in out}) == len(out)
        return [x for x in items if not any(x is y for y in out)]

    return kept_of


@pytest.mark.parametrize("count", [1, 4, 5, 6, 23])
def test_of_functions_that_compile_one_in_five_of_each_file_runs(kept, count):
    items = [item(f"{folder}/test_x", f"test_{n}") for folder in ("compile", "emulate", "pure") for n in range(count)]
    files = [x.path.parent.name for x in kept(items)]
    assert [files.count(folder) for folder in ("compile", "emulate", "pure")] == [-(-count // 5), -(-count // 5), count]
    assert kept(items, exhaustive=True) == items


def test_of_functions_with_emulated_kernels_these_cases_of_one_in_five_run(kept):
    backends = ("core", "emulated 9.0", "device")
    items = [item("features/test_x", f"test_{n}", name) for n in range(10) for name in backends]
    numbers = [x.nodeid.partition("[")[2] for x in kept(items)]
    assert [numbers.count(f"{name}]") for name in backends] == [10, 2, 10]
    assert kept(items, exhaustive=True) == items


def test_of_cases_of_which_one_in_so_many_runs_there_is_one(kept):
    items = [item("pure/test_x", name, n, ("one_in", 4)) for name in ("test_a", "test_b") for n in range(40)]
    names = {sampling.function_of(x).rpartition("::")[2] for x in kept(items)}
    assert names == {"test_a", "test_b"} and len(kept(items)) < 10
    assert kept(items, exhaustive=True) == items


def test_of_one_argument_one_value_runs_with_each_choice_of_the_others(kept):
    items = [
        item("emulate/test_emulator", "test_x", f"{number}-{case}", ("one_of", "value"), value=value, case=CASES[case])
        for number, value in enumerate(VALUES)
        for case in range(30)
    ]
    pairs = [(x.callspec.params["value"], x.callspec.params["case"]) for x in kept(items)]
    assert len(pairs) == len({case for _, case in pairs}) == 30
    assert {value for value, _ in pairs} == set(VALUES)
    assert kept(items, exhaustive=True) == items


def test_examples_are_two_or_more(monkeypatch):
    monkeypatch.setattr(sampling, "exhaustive", False)
    assert [sampling.examples(count) for count in (1, 20, 60, 200)] == [2, 2, 3, 10]
