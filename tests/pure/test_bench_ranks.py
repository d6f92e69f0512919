"""The suite of sequences over several devices: small cases by threads with NumPy arrays, and what is shown of them."""

from typing import Any

import numpy as np
import pytest

import cuflash.distributed as cd
from bench import rank, ranks

SIZES: dict[str, Any] = {"num_heads": 2, "num_heads_kv": 1, "head_dim": 8}
PROBLEMS = (
    rank.Problem(tokens=96, compares_bits=True, **SIZES),
    rank.Problem(tokens=50, dtype="float32", causal=False, passes=("forward",), **SIZES),
    rank.Problem(tokens=200, passes=("decode",), **SIZES),
)


@pytest.fixture(scope="module")
def records():
    found: list[dict[str, Any]] = []
    with ranks.Machine.of_threads(2) as machine:
        ranks.measure(lambda record, **fields: found.append({"record": record, **fields}), machine, PROBLEMS, rounds=2)
    return found


def one_thread(number, size):
    assert (number, size) == (0, 1)
    return np, cd.threads(1)[0]


def test_ranks_are_processes_too():
    found: list[dict[str, Any]] = []
    processes = rank.Processes(1, one_thread)
    try:
        machine = ranks.Machine(rank.Devices(1, np, 1), {"processes": processes})
        ranks.measure(lambda _, **fields: found.append(fields), machine, PROBLEMS[:1], rounds=1)
        with pytest.raises(RuntimeError, match=r"^time_us of a rank: KeyError: 'q'$"):
            processes.call("time_us", "forward", 1)
    finally:
        processes.close()
    assert [(row["ranks"], row["same_bits"]) for row in found] == [(1, True)] * 2
    assert all(row["error"] == 0 and row["us"]["processes"] > 0 for row in found)


def test_each_pass_of_each_problem_is_measured(records):
    assert [(r["case"], r["pass"]) for r in records] == [
        ("bf16-d8-h2kv1-t96-causal", "forward"),
        ("bf16-d8-h2kv1-t96-causal", "both"),
        ("fp32-d8-h2kv1-t50-full", "forward"),
        ("bf16-d8-h2kv1-t200-decode", "decode"),
    ]
    for record in records:
        assert set(record["us"]) == {"one device", "threads"}
        assert record["error"] < 0.01
        assert record["ranks"] == 2
    assert [r["same_bits"] for r in records] == [True, True, None, None]
    assert records[3]["bytes"] == 2 * 400 * 8 * 2
    # Half of the pairs of 192 tokens: 2 and 5 products.
    assert [r["flops"] for r in records] == [192**2 * 2 * 8 * x for x in (2, 7)] + [100**2 * 2 * 8 * 4, 0]


def test_what_is_shown_of_them(records):
    us = {"one device": 2000.0, "NCCL": 1000.0}
    row = {**records[1], "run": "a", "flops": 10**9}
    decoding = {**row, "us": us, "flops": 0, "bytes": 10**9, "same_bits": None, "pass": "decode"}
    run = {"record": "run", "run": "a", "revision": "abc1234"}
    text = ranks.markdown([run, {**row, "us": {**us, "NCCL in a graph": 800.0}}, decoding])
    assert (
        "| bf16-d8-h2kv1-t96-causal | forward and backward | 2 | 2 | 1 | 0.8 | 2.000 | 2.500 | 1 TFLOP/s | yes |"
        " abc1234 |" in text
    )
    assert "| decode | 2 | 2 | 1 | - | 2.000 | - | 1.00 TB/s | - | abc1234 |" in text


def test_the_latest_row_of_each_case_is_shown():
    def run(name, device, *rows):
        head = {"record": "run", "run": name, "device": device}
        return [head, *({"record": "ranks", "run": name, "ranks": n, "case": c, "pass": "both"} for n, c in rows)]

    last_case = ranks.PROBLEMS[-1].name
    records = [
        *run("first", "A", (2, "other"), (4, last_case)),
        *run("replaced", "A", (2, last_case)),
        *run("elsewhere", "B", (2, "only there")),
        *run("last", "A", (2, "other"), (2, last_case)),
    ]
    found = ranks.latest_rows(records)
    assert [r["run"] for r in found if r["record"] == "run"] == ["last", "first"]
    rows = [(r["run"], r["ranks"], r["case"]) for r in found if r["record"] == "ranks"]
    assert rows == [("first", 4, last_case), ("last", 2, last_case), ("last", 2, "other")]


def test_the_picture_is_drawn(records, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="draws the plots")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks.draw(plt, records, tmp_path / "ranks.svg")
    assert (tmp_path / "ranks.svg").stat().st_size > 1000


def test_a_problem_for_each_goal():
    """8192 and 65536 tokens a device, both dtypes, and decoding of 2**20 keys on two."""
    assert {(p.tokens, p.dtype) for p in ranks.PROBLEMS} >= {
        (2**13, "bfloat16"),
        (2**16, "bfloat16"),
        (2**15, "float32"),
    }
    assert [2 * p.tokens for p in ranks.PROBLEMS if p.passes == ("decode",)] == [2**20]
    assert len({p.name for p in ranks.PROBLEMS}) == len(ranks.PROBLEMS)
