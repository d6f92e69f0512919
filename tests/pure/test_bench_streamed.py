"""The suite of streamed keys: small cases on NumPy arrays, and what is shown of them."""

from typing import Any

import numpy as np
import pytest

from bench import streamed
from bench.timing import HostClock

SIZES: dict[str, Any] = {"num_heads": 2, "num_heads_kv": 1, "head_dim": 8}
CASES = (
    streamed.Case(what="prefill", seqlen_q=16, seqlen_k=300, **SIZES),
    streamed.Case(what="prefill", seqlen_q=16, seqlen_k=5000, dtype="float32", passes=("forward",), **SIZES),
    streamed.Case(what="decode", seqlen_q=1, seqlen_k=300, chunk=32, way="pageable", passes=("forward",), **SIZES),
)


class NoMeter:
    def begin(self):
        pass

    def taken(self):
        return 2**20


@pytest.fixture(scope="module")
def records():
    found = []
    machine = streamed.Machine(np, np.empty, np.copyto, HostClock(), NoMeter())
    streamed.measure(lambda record, **fields: found.append({"record": record, **fields}), machine, CASES, seconds=0.05)
    return found


def test_each_pass_of_each_case_is_measured(records):
    assert [(r["case"], r["pass"]) for r in records] == [
        ("prefill-bf16-d8-h2kv1-s16k300-pinned", "forward"),
        ("prefill-bf16-d8-h2kv1-s16k300-pinned", "backward"),
        ("prefill-fp32-d8-h2kv1-s16k5000-pinned", "forward"),
        ("decode-bf16-d8-h2kv1-s1k300-pageable", "forward"),
    ]
    for record in records:
        assert set(record["us"]) == {"streamed", "in memory", "link"}
        assert record["error"] < 0.01
        assert (record["peak_bytes"], record["stated_bytes"]) == (2**20, 0)
    assert records[0]["bytes"] == 2 * 300 * 8 * 2


def test_speed_is_that_in_memory_or_of_the_link(records):
    row = {**records[0], "us": {"streamed": 200.0, "in memory": 180.0, "link": 100.0}, "bytes": 54 * 10**5}
    text = streamed.markdown([row, {**row, "what": "decode", "case": "other"}])
    assert "| prefill-bf16-d8-h2kv1-s16k300-pinned | forward | 0.2 | 0.18 | 0.1 | 90% | 1 | 0 |" in text
    assert "| other | forward | 0.2 | 0.18 | 0.1 | 50% | 1 | 0 |" in text
    assert "The link copies 54.0 to 54.0 GB/s from pinned memory." in text


def test_the_picture_is_drawn(records, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="draws the plots")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    streamed.draw(plt, records, tmp_path / "streamed.svg")
    assert (tmp_path / "streamed.svg").stat().st_size > 1000


def test_the_cases_are_those_of_the_goals():
    """16k query rows a key/value head, and decoding; of each a case by pinned memory."""
    rows = [case.seqlen_q * case.num_heads // case.num_heads_kv for case in streamed.CASES if case.what == "prefill"]
    assert set(rows) == {16384}
    assert {case.way for case in streamed.CASES} == {"pinned", "copied", "pageable"}
    assert len({case.name for case in streamed.CASES}) == len(streamed.CASES)
