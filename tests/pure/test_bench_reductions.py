"""The suite of reductions: a small case on NumPy arrays, wrong results, and what is shown."""

from typing import Any

import numpy as np
import pytest

from bench import reductions
from bench.cases import Case
from bench.logsumexp import Machine
from bench.timing import HostClock

CASE = Case(dtype="float32", head_dim=16, seqlen_q=48, batch=1, num_heads=2, causal=True)
CLASSES = (20, 30, 8)


def records_of(case=CASE) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def write(record, **fields):
        found.append({"record": record, **fields})

    reductions.measure(write, Machine(np, np.asarray, HostClock()), (case,), CLASSES, 0.001)
    return found


@pytest.fixture(scope="module")
def records():
    return records_of()


def test_each_call_is_right_and_timed(records):
    found = {r["call"]: r for r in records if r["status"] == "ok"}
    assert found.keys() == reductions.BASES.keys() - {"column sums, flash-colreduce"}
    assert all(r["us"] > 0 for r in found.values())
    checked = {name for name, r in found.items() if r["error"] is not None}
    assert checked >= {"forward", "lse alone", "entropy", reductions.STRONGEST, "backward of lse alone"}
    assert all(found[name]["error"] < 1e-4 for name in checked)


def test_a_peer_that_is_not_there_is_said(records):
    assert [r["reason"] for r in records if r["status"] == "absent"] == ["flash-colreduce is run on a GPU"]


def test_wrong_results_are_not_timed(monkeypatch):
    right = reductions.expected

    def other(case, xp):
        return right(case, xp) | {"max": right(case, xp)["max"] * 1.001}

    monkeypatch.setattr(reductions, "expected", other)
    wrong = [r for r in records_of() if r["status"] == "wrong"]
    assert [(r["call"], "us" in r) for r in wrong] == [("max", False)]


def test_the_table_has_multiples_of_what_calls_belong_to(records):
    times = {(r["case"], r["call"]): r["us"] for r in records if "us" in r}
    table = reductions.markdown(records)
    ratio = times[CASE.name, "entropy"] / times[CASE.name, "forward"]
    line = next(x for x in table.splitlines() if x.startswith("| entropy : forward"))
    assert f", {ratio:.2f} |" in line and line.endswith("| - |")
    assert "flash-colreduce is run on a GPU" in table
