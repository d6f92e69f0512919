"""The suite of logsumexp: small cases on NumPy arrays, wrong results, and what is shown."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import logsumexp
from bench.contender import Absent
from bench.timing import HostClock

CASES = (
    logsumexp.Case(what="sinkhorn", rows=70, columns=50, dim=3, width=0.3, steps=2),
    logsumexp.Case(what="density", rows=80, columns=90, dim=5, width=0.4),
    logsumexp.Case(what="density", rows=80, columns=90, dim=5, width=0.4, dtype="float64"),
)
MACHINE = logsumexp.Machine(np, np.asarray, HostClock())


@pytest.fixture(scope="module")
def records():
    found: list[dict[str, Any]] = []
    logsumexp.measure(lambda record, **fields: found.append({"record": record, **fields}), MACHINE, CASES, 0.001, 0.01)
    return found


def test_each_contender_of_each_case_is_checked(records):
    assert len(records) == len(CASES) * len(logsumexp.CONTENDERS)
    for record in records:
        if record["contender"] in ("cuflash", "dense"):
            assert record["status"] == "ok" and record["us"] > 0
            assert record["error"] < (1e-12 if "fp64" in record["case"] else 1e-4)
        assert (record["status"] == "absent") == ("reason" in record)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["scipy", "scikit-learn"])
def test_others_compute_the_same_density(case, name):
    module, contender = {"scipy": ("scipy", "SciPy"), "scikit-learn": ("sklearn", name)}[name]
    pytest.importorskip(module)
    points = logsumexp.Points.of(case, np)
    if case.what == "sinkhorn":
        with pytest.raises(Absent, match="densities"):
            logsumexp.CONTENDERS[contender](points)
    else:
        results = logsumexp.CONTENDERS[contender](points)()
        assert logsumexp.error(case, points.host, results, results) < 1e-6


def test_wrong_results_are_not_timed(monkeypatch):
    """A density of another width, and potentials of one step less."""

    def other(points):
        case = points.case
        changed = {"steps": 1} if case.what == "sinkhorn" else {"width": 1.1 * case.width}
        return logsumexp.CONTENDERS["dense"](replace(points, case=replace(case, **changed)))

    def raises(points):
        raise RuntimeError("out of order")

    contenders = {"cuflash": logsumexp.CONTENDERS["cuflash"], "dense": logsumexp.CONTENDERS["dense"]}
    monkeypatch.setattr(logsumexp, "CONTENDERS", contenders | {"other": other, "raises": raises})
    found: list[dict[str, Any]] = []
    logsumexp.measure(lambda record, **fields: found.append({"record": record, **fields}), MACHINE, CASES, 0.001, 0.01)
    by_name = [(r["contender"], r["status"], "us" in r) for r in found]
    right = [("cuflash", "ok", True), ("dense", "ok", True), ("other", "wrong", False), ("raises", "failed", False)]
    assert by_name == right * len(CASES)
    text = logsumexp.markdown(found)
    assert f"- raises, {CASES[0].name}: failed, RuntimeError: out of order" in text
    assert f"- other, {CASES[1].name}: wrong, " in text


def test_the_table(records):
    row = {**records[0], "us": 2000.0, "pairs": 10**7, "error": 1.2e-6, "status": "ok", "contender": "cuflash"}
    text = logsumexp.markdown([row, {**row, "us": 9000.0, "contender": "dense"}])
    assert "| sinkhorn-fp32-d3-n70m50 | cuflash | 2 | 5 | 1 | 1.2e-06 |" in text
    assert "| sinkhorn-fp32-d3-n70m50 | dense | 9 | 1.111 | 4.5 | 1.2e-06 |" in text


def test_pairs_and_names():
    assert [case.pairs for case in CASES] == [4 * 70 * 50, 80 * 90, 80 * 90]
    for cases in logsumexp.CASES.values():
        assert len({case.name for case in cases}) == len(cases)


def test_the_picture_is_drawn(records, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="draws the plots")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    logsumexp.draw(plt, records, tmp_path / "logsumexp.svg")
    assert (tmp_path / "logsumexp.svg").stat().st_size > 1000
