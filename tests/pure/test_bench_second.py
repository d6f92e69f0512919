"""The benchmark of second derivatives: what is computed, counted, checked and shown."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from bench import ceiling, memory, peers, report
from bench.cases import ALL_PASSES, PASSES, PRODUCTS, SECOND, Case
from bench.check import RESULTS, Check
from bench.contender import Absent
from bench.inputs import make_inputs
from bench.run import run_suite
from bench.suites import SUITES, Suite
from cuflash.spec.passes import PASSES as PASSES_OF_CUFLASH
from tests.bench_records import PLAIN, SMALL
from tests.pure.test_evidence import HostMeter, writer
from tests.sampling import examples

DENSE = replace(PLAIN, causal=True, seqlen_q=29, seqlen_k=29)


def test_products_are_those_of_the_passes():
    assert [sum(PRODUCTS[pass_]) for pass_ in ALL_PASSES] == [2, 5, 6, 10, 16]
    case = Case(head_dim=24, head_dim_v=40, seqlen_q=70, seqlen_k=90, batch=2, num_heads=3)
    problem = replace(
        ct.Case(head_dim=24, head_dim_v=40, seqlen_q=70, seqlen_k=90, batch=2, num_heads=3, num_heads_kv=3).problem,
        moved=("q", "k", "v"),
    )
    for pass_ in PASSES_OF_CUFLASH:
        assert case.flops(pass_.name) == pass_.flops(problem)
    assert case.flops("double_backward") == case.flops("jvp") + case.flops("backward_jvp")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_passes(dtype):
    case = Case(head_dim=24, head_dim_v=40, seqlen_q=70, seqlen_k=90, batch=2, num_heads=3, dtype=dtype)
    sizes: dict[str, Any] = {"head_dim": 24, "head_dim_v": 40, "seqlen_q": 70, "seqlen_k": 90, "batch": 2}
    problem = ct.Case(**sizes, num_heads=3, num_heads_kv=3, dtype=dtype).problem
    problem = replace(problem, moved=("q", "k", "v"))
    for pass_ in PASSES_OF_CUFLASH:
        assert case.ideal_bytes(pass_.name) == pass_.least_bytes(problem)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from(("cuflash", "cuflash-alloc", "cuflash-tangents", "naive-second")),
    st.sampled_from(("float32", "bfloat16", "float16", "float64")),
    st.tuples(st.integers(1, 24), st.integers(1, 40), st.integers(1, 2), st.integers(1, 3)),
    st.booleans(),
)
def test_contenders_agree_with_the_oracle(name, dtype, sizes, causal):
    head_dim, seqlen, batch, heads = sizes
    case = Case(head_dim=head_dim, seqlen_q=seqlen, batch=batch, num_heads=heads, causal=causal, dtype=dtype)
    inputs = make_inputs(np, case, passes=ALL_PASSES)
    check, contender = Check(case, inputs, ALL_PASSES), peers.ADAPTERS[name](case, inputs)
    passes = [pass_ for pass_ in SECOND if pass_ in contender.calls]
    assert passes == (["jvp", "double_backward"] if name == "cuflash-tangents" else [*SECOND])
    for pass_ in passes:
        for _ in range(2):  # what the first call keeps is right in the second
            errors = check.errors(pass_, contender.calls[pass_]())
            assert errors.keys() == {*RESULTS[pass_]}
            assert not any(own.wrong for own in errors.values()), (pass_, errors)


@pytest.mark.parametrize("pass_", SECOND)
def test_wrong_results_are_noticed(pass_):
    inputs = make_inputs(np, DENSE, passes=ALL_PASSES)
    check, contender = Check(DENSE, inputs, ALL_PASSES), peers.ADAPTERS["cuflash"](DENSE, inputs)
    results = contender.calls[pass_]()
    for wrong in range(len(results)):
        spoiled = tuple(1.001 * x if n == wrong else x for n, x in enumerate(results))
        assert [own.wrong for own in check.errors(pass_, spoiled).values()] == [n == wrong for n in range(len(results))]


def test_passes_without_tangents_have_none():
    inputs = make_inputs(np, DENSE, passes=PASSES)
    assert not inputs.tangents and set(peers.ADAPTERS["cuflash"](DENSE, inputs).calls) == {*PASSES}
    for name in ("cuflash-tangents", "naive-second"):
        with pytest.raises(Absent, match="needs tangents"):
            peers.ADAPTERS[name](DENSE, inputs)
    of_both = make_inputs(np, DENSE, passes=ALL_PASSES)
    assert {name: x.shape for name, x in of_both.on_host().tangents.items()} == {
        "tq": DENSE.q_shape,
        "tk": DENSE.k_shape,
        "tv": DENSE.v_shape,
    }
    np.testing.assert_array_equal(of_both.q, inputs.q)


def test_heads_that_share_keys_are_not_of_the_dense_formula():
    with pytest.raises(Absent, match="has no grouped heads"):
        peers.ADAPTERS["naive-second"](replace(SMALL, head_dim_v=8), make_inputs(np, SMALL, passes=SECOND))


def test_a_run_shows_speeds_and_multiples(monkeypatch, tmp_path):
    monkeypatch.setattr(ceiling, "HOST_PRODUCT_SIZE", 64)
    monkeypatch.setattr(ceiling, "HOST_COPY_BYTES", 4096)
    monkeypatch.setattr(ceiling, "_fused_multiply_adds", dict)
    suite = Suite(
        kind="cpu", cases=(PLAIN, DENSE), peers=("naive-second",), passes=ALL_PASSES, about="tiny",
        only={"naive-second": (PLAIN,)},
    )  # fmt: skip
    records = run_suite("second", suite, out=tmp_path, seconds=1e-4, revision="abc")
    assert {r["pass"] for r in records if r.get("contender") == "cuflash"} == {*ALL_PASSES}
    for record in records:  # times that are known
        if "median_us" in record:
            us = 10.0 * (1 + ALL_PASSES.index(record["pass"])) * (1 if record["contender"] == "cuflash" else 2.5)
            record |= {"median_us": us, "tflops": 1e-3 / us}
    lines = report.markdown(records).splitlines()
    heads, first, second = ([cell.strip() for cell in lines[n].split("|")[1:-1]] for n in (0, 2, 3))
    row = dict(zip(heads, first, strict=True))
    assert row["jvp : forward, time"] == "3.00"
    assert row["backward_jvp : backward, time"] == "2.00" and row["double backward : backward, time"] == "2.50"
    assert row["cuflash : best, jvp / backward_jvp / double backward"] == "2.50 / 2.50 / 2.50"
    of_peer = dict(zip(heads, second, strict=True))["dense formula, jvp / backward_jvp / double backward"]
    assert of_peer == "- / - / -"
    assert "forward / backward / jvp / backward_jvp / double backward; tiny" in report.heading(records)
    assert not report.plots_of(records, tmp_path)


def test_suites_are_those_of_the_goals():
    cases = SUITES["second"].cases
    rows = [case for case in cases if case.dtype == "bfloat16"]
    assert {(case.head_dim, case.causal) for case in rows} == {(d, c) for d in (64, 128, 256) for c in (False, True)}
    for case in rows:
        assert (case.seqlen_q, case.num_heads * case.head_dim, case.batch * case.seqlen_q) == (4096, 2048, 16384)
    assert {case.dtype for case in cases} == {"bfloat16", "float32", "float64"}
    for name in ("second", "cpu-second"):
        assert SUITES[name].passes == ALL_PASSES
        assert {*SUITES[name].only} <= {*SUITES[name].peers} <= {*peers.ADAPTERS}


def test_memory_of_second_derivatives(tmp_path):
    """That of cuflash grows as the length, that of the dense formula as its square."""
    cases = [Case(head_dim=16, seqlen_q=n, batch=1, num_heads=2, dtype="float32") for n in (128, 256, 512)]
    records, write = writer()
    meter, contenders = HostMeter(), ("naive-second", "cuflash-tangents")
    memory.measure(write, meter, np, cases, contenders, memory.PASSES_OF_SECOND)
    tracemalloc.stop()
    found = {(r["seqlen"], r["pass"], r["contender"]): r["extra_bytes"] for r in records[1:]}
    for pass_ in memory.PASSES_OF_SECOND:
        assert found[512, pass_, "naive-second"] >= cases[-1].scores_bytes
        assert found[512, pass_, "naive-second"] / found[128, pass_, "naive-second"] > 8
    plt = pytest.importorskip("matplotlib.pyplot", reason="draws the plots")
    memory.draw(plt, records, tmp_path / "memory.svg")
    assert "double backward" in (tmp_path / "memory.svg").read_text()
    text = memory.markdown(records)
    assert "MiB besides inputs and results, jvp / double backward." in text
    assert "| seqlen | dense formula | cuflash | formula : cuflash |" in text


def test_results_of_second_order_do_not_count():
    case = replace(PLAIN, dtype="bfloat16", head_dim_v=12)
    out, *gradients = (2 * int(np.prod(x)) for x in (case.out_shape, case.q_shape, case.k_shape, case.v_shape))
    lse = 4 * int(np.prod(case.out_shape[:3]))
    assert memory.results_bytes(case, "jvp") == 2 * (out + lse)
    assert memory.results_bytes(case, "double_backward") == out + lse + sum(gradients)
