"""Runs of the benchmark: the order of contenders, clocks, small runs on the CPU, and one on a stand-in for CuPy."""

import functools
import json
import os
import subprocess
import sys
import time
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash.testing as ct
from bench import ceiling, peers, report
from bench.__main__ import ROOT, main
from bench.cases import ALL_PASSES, BLOCK, Case
from bench.check import Check
from bench.contender import Absent, Contender
from bench.inputs import make_inputs
from bench.run import Bench, choose_cases, choose_contenders, compile_ahead, distribute, failures, run_suite
from bench.suites import SUITES, Suite
from bench.timing import (
    CALLS_IN_A_ROW,
    CudaClock,
    HostClock,
    RowClock,
    choose_repeats,
    schedule,
    summarize,
    time_host,
    time_interleaved,
)
from cuflash.gpu.compiler import CompileError
from cuflash.spec.options import Options
from cuflash.spec.problem import make_problem
from tests.bench_records import OPTIONAL, PLAIN, SMALL, by_contender, tiny_suite
from tests.fake_cupy import FakeEvent


@pytest.fixture(autouse=True)
def low_ceiling(monkeypatch):
    """Which is measured in no time."""
    monkeypatch.setattr(ceiling, "HOST_PRODUCT_SIZE", 64)
    monkeypatch.setattr(ceiling, "HOST_COPY_BYTES", 4096)
    monkeypatch.setattr(ceiling, "_fused_multiply_adds", dict)


def test_slow_contenders_run_on_some_cases_unless_named(tmp_path):
    suite = replace(tiny_suite(peers=("naive",)), only={"naive": (SMALL,)})
    for named, expected in ((None, {SMALL.name}), (("naive",), {SMALL.name, PLAIN.name})):
        records = run_suite("tiny", suite, out=tmp_path, seconds=1e-4, revision="abc", peers=named)
        assert {r["case"] for r in records if r.get("contender") == "naive"} == expected
        assert {r["case"] for r in records if r.get("contender") == "cuflash"} == {SMALL.name, PLAIN.name}
    assert "| - / - |" in report.markdown(run_suite("tiny", suite, out=tmp_path, seconds=1e-4, revision="abc"))


def test_devices_share_cases(monkeypatch, tmp_path):
    """Each case is measured by one process, and comes in its order."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    cases = (PLAIN, SMALL, replace(SMALL, seqlen_q=3))
    results = list(distribute([(case, ["cuflash"], ["forward"]) for case in cases], "cpu", 1e-4, 2))
    expected = [[(case.name, "cuflash", "ok")] for case in cases]
    assert [[(r["case"], r["contender"], r["status"]) for r in of_case] for of_case in results] == expected
    for devices in (0, 2):
        with pytest.raises(ValueError, match=rf"^devices: got {devices}, expected 1 to 1 for this suite here$"):
            run_suite("tiny", tiny_suite(), out=tmp_path, devices=devices)


def test_a_run_with_options(tmp_path):
    cases = tuple(replace(case, head_dim_v=case.head_dim) for case in OPTIONAL)
    suite = Suite(kind="cpu", cases=cases, peers=("cuflash-dscale", "naive", "cudnn", "flex"), about="options")
    records = run_suite("tiny", suite, out=tmp_path, seconds=1e-4, revision="abc")
    status = {(r["case"], r["contender"]): r["status"] for r in records if r["record"] == "result"}
    for case in cases:
        naive = "ok" if case.options in (("mask",), ("dropout",)) and "h" not in case.mask else "absent"
        expected = {"cuflash": "ok", "cuflash-dscale": "ok", "naive": naive, "cudnn": "absent", "flex": "absent"}
        assert {name: status[case.name, name] for name in expected} == expected
    text = report.markdown(records)
    for words in ("full, softcap 0.5", "causal, alibi", "full, mask bk", "causal, window 5", "full, dropout 0.4"):
        assert f"| {words} |" in text
    assert "- plain formula: absent: is run without sinks (2 measurements)" in text
    assert "cuflash, with dscale" in text


def test_block_masks_are_within_the_oracle_rule():
    """Every head of what is timed, and the mean over several draws of operands without the allowance for luck."""
    case = Case(dtype="float32", head_dim=8, seqlen_q=300, batch=1, num_heads=2, blocks_kept=0.5)
    ratios = []
    for seed in range(8):
        inputs = make_inputs(np, case, seed)
        arrays = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout")} | {"block_mask": case.block_mask()}
        operands = ct.qkv(arrays)
        problem = make_problem(Options(block_size=BLOCK), *operands, block_mask=arrays["block_mask"])
        expected = ct.yardsticks(problem, arrays)
        calls = peers.ADAPTERS["cuflash"](case, inputs).calls
        results = dict(zip(("out", "dq", "dk", "dv"), (*calls["forward"](), *calls["backward"]()), strict=True))
        measurements = [ct.measure(name, x, expected[name]) for name, x in results.items()]
        assert not [str(measurement) for measurement in measurements if measurement.failure]
        ratios.append([measurement.strict_ratio for measurement in measurements])
    assert np.all(np.mean(ratios, axis=0) <= 1), np.mean(ratios, axis=0)


def test_summary():
    timing = summarize([float(x) for x in range(101)])
    assert (timing.median_us, timing.p10_us, timing.p90_us, timing.repeats) == (50, 10, 90, 101)
    assert summarize([3.0]).median_us == 3


def test_repeats_fit_the_budget():
    assert choose_repeats({"a": 3000.0, "b": 1e5, "c": 1.0}, budget_s=0.15, limit_s=3) == {"a": 50, "b": 10, "c": 100}
    assert choose_repeats({"slow": 1e6, "quick": 1e3}, budget_s=0.1, limit_s=3) == {"slow": 3, "quick": 29}
    assert choose_repeats({}, budget_s=0.1, limit_s=3) == {}


def test_schedule_interleaves_evenly():
    repeats = {"a": 12, "b": 12, "c": 4}
    plan = schedule(repeats)
    assert len(plan) == 12
    assert {x: sum(names.count(x) for names in plan) for x in repeats} == repeats
    assert [sum("c" in names for names in plan[i : i + 3]) for i in (0, 3, 6, 9)] == [1, 1, 1, 1]
    assert {names[0] for names in plan} >= {"a", "b"}
    assert schedule({}) == []


def test_contenders_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = time_interleaved(calls, HostClock(), budget_s=1e-9)
    assert all(timing.repeats == 10 for timing in times.values())
    assert all(timing.p10_us <= timing.median_us <= timing.p90_us for timing in times.values())
    turns = order[-30:]
    assert all(sorted(turns[i : i + 3]) == ["a", "b", "c"] for i in range(0, 30, 3))


def test_a_call_is_timed_after_others_that_are_not(monkeypatch):
    seconds = iter([0.0, 0.1, 0.2, 0.3, 5.0, 7.5])  # begun; after each of the calls before; around the one
    log: list[str] = []
    monkeypatch.setattr("bench.timing.time.perf_counter", lambda: next(seconds))
    clock = HostClock(0.25)
    assert clock.read_us(clock.run(lambda: log.append("call"))) == 2.5e6
    assert len(log) == 4


def test_calls_that_events_do_not_see_are_timed_between_waits(fake_cupy):
    log = []

    def call():
        log.append("call")
        return len(log)

    def wait(result):
        assert result == len(log) == CALLS_IN_A_ROW * (len(waits) + 1)
        time.sleep(0.01)
        waits.append(result)

    waits: list[Any] = []
    clock = CudaClock()
    times = time_interleaved(
        {"seen": lambda: None, "unseen": call}, clock, clocks={"unseen": RowClock(clock, wait)}, budget_s=1e-6
    )
    assert times["seen"].median_us == pytest.approx(500)
    assert 10_000 / CALLS_IN_A_ROW <= times["unseen"].median_us < 5 * 10_000 / CALLS_IN_A_ROW
    assert len(waits) == 3 + times["unseen"].repeats


def test_calls_with_a_clock_of_their_own_take_turns_after_the_others():
    """Which would else begin on an idle device."""
    log: list[str] = []
    own = HostClock()
    calls = {name: functools.partial(log.append, name) for name in ("a", "own", "b", "another")}
    times = time_interleaved(calls, HostClock(), clocks={"own": own, "another": own}, budget_s=1e-9)
    timed = log[3 * len(calls) :]
    count = times["a"].repeats
    assert count >= 10 and [x.repeats for x in times.values()] == [count] * 4
    assert set(timed[: 2 * count]) == {"a", "b"} and set(timed[2 * count :]) == {"own", "another"}


def test_the_cache_is_read_full_before_a_call(fake_cupy):
    """Of other data than the call's, four times over, before the time starts; nothing of it is written."""
    clock = CudaClock()
    assert clock.flush_buffer.nbytes == 4 * 1024
    clock.flush_buffer[...] = content = np.arange(1024, dtype=np.uint32).reshape(4, 256)
    started = FakeEvent.now_ms
    clock.flush()
    assert clock.flush_result.tolist() == [255, 511, 767, 1023]
    assert (clock.flush_buffer == content).all()
    assert FakeEvent.now_ms == started
    clock.flush_result[...] = 0
    results_before_the_call = []
    clock.run(lambda: results_before_the_call.append(clock.flush_result.tolist()))
    assert results_before_the_call == [[255, 511, 767, 1023]]


def test_host_time_is_that_of_one_call():
    counts = {"calls": 0, "waits": 0}

    def count(what):
        counts[what] += 1

    times = time_host({"a": lambda: count("calls")}, lambda: count("waits"), calls_per_sample=5, samples=4)
    assert counts == {"calls": 30, "waits": 7}
    assert times["a"].repeats == 4


def test_a_run_on_the_cpu(tmp_path):
    records = run_suite("tiny", tiny_suite(), out=tmp_path, seconds=1e-4, revision="abc")
    assert records == [json.loads(line) for line in (tmp_path / "tiny.jsonl").read_text().splitlines()]
    first, last = records[0], records[-1]
    assert (first["record"], last["record"]) == ("run", "end")
    assert first["revision"] == "abc"
    assert first["versions"]["numpy"] == np.__version__
    for case in (PLAIN, SMALL):
        for pass_ in ("forward", "backward"):
            found = by_contender(records, case, pass_)
            assert list(found) == ["cuflash", "naive", "torch-cpu", "cudnn"]
            for name in ("cuflash", "naive"):
                assert found[name]["status"] == "ok", found[name]
                expected = case.flops(pass_) / found[name]["median_us"] / 1e6
                assert found[name]["tflops"] == pytest.approx(expected)
                assert found[name]["repeats"] >= 3
                assert all(e["error"] < 1e-5 for e in found[name]["errors"].values())
            assert found["cudnn"]["status"] == "absent"
            assert found["cuflash"]["plan"]
    assert not failures(records)
    assert "median_us" not in by_contender(records, SMALL, "forward")["torch-cpu"]  # it has no grouped heads
    table = report.markdown(records)
    assert table.count("\n| 8 | 24 | 2 x 2 | full | fp32 |") == 1
    assert "cuDNN: absent" in table


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no choice of cores")
def test_a_run_on_some_of_the_cores(tmp_path):
    """All of the process has these: threads of libraries that have begun before, too."""
    small = "import sys; from bench import __main__, ceiling; ceiling.HOST_PRODUCT_SIZE = 64; "
    small += "ceiling.HOST_COPY_BYTES = 4096; sys.exit(__main__.main())"
    command = [sys.executable, "-c", small, "run", "--suite", "small", "--case", "fp32-d16-b1-h1-", "--peers", "none"]
    command += ["--pass", "forward", "--seconds", "0.01", "--out", str(tmp_path), "--revision", "abc", "--cores"]
    subprocess.run([*command, "1"], cwd=ROOT, check=True, capture_output=True)
    start, result, end = report.load(tmp_path / "small.jsonl")
    assert start["cores"] == 1 and result["status"] == "ok"
    assert all(rate > 0 for rate in start["ceiling"].get("fma_tflops", {}).values())
    assert end["ceiling"].keys() == start["ceiling"].keys()
    many = len(os.sched_getaffinity(0)) + 1
    for count in (0, many):
        with pytest.raises(SystemExit, match=f"--cores: got {count}, expected 1 to {many - 1}"):
            main([*command[3:], str(count)])


def test_block_masks(tmp_path):
    case = Case(dtype="float32", head_dim=8, seqlen_q=300, batch=1, num_heads=2, blocks_kept=0.5)
    suite = Suite(kind="cpu", cases=(case,), peers=("cuflash-mask", "cuflash-dense", "naive"), about="blocks")
    records = run_suite("tiny", suite, out=tmp_path, seconds=1e-4, revision="abc")
    results = [r for r in records if r["record"] == "result"]
    status = {(r["contender"], r["pass"]): r["status"] for r in results}
    for pass_ in ("forward", "backward"):
        assert {status[f"cuflash{how}", pass_] for how in ("", "-mask", "-dense")} == {"ok"}
        assert status["naive", pass_] == "absent"
    text = report.markdown(records)
    assert "| 50 % of blocks |" in text and "cuflash, no mask" in text and "cuflash, as a mask of pairs" in text
    assert report.Table(records).unit == "microseconds"
    inputs = make_inputs(np, case)
    with pytest.raises(Absent, match="needs blocks"):
        peers.ADAPTERS["cuflash-mask"](replace(case, blocks_kept=0.0), inputs)
    unmasked = peers.cuflash(replace(case, blocks_kept=0.0), inputs)
    assert Check(case, inputs).errors("forward", unmasked.calls["forward"]())["out"].wrong


def test_a_wrong_contender_is_recorded_and_not_timed(tmp_path, monkeypatch):
    timed = []

    def broken(case, inputs):
        def forward():
            timed.append(case)
            return (np.full(case.out_shape, np.nan, "float32"),)

        def backward():
            raise RuntimeError("no such kernel\nand a long trace")

        return Contender({"forward": forward, "backward": backward})

    monkeypatch.setitem(peers.ADAPTERS, "cuflash", broken)
    records = run_suite("tiny", tiny_suite(peers=("naive",)), out=tmp_path, seconds=1e-4, match="h2-")
    forward, backward = (by_contender(records, PLAIN, pass_)["cuflash"] for pass_ in ("forward", "backward"))
    assert forward["status"] == "wrong" and forward["errors"]["out"]["error"] is None
    assert len(timed) == 1
    assert (backward["status"], backward["reason"]) == ("failed", "RuntimeError: no such kernel")
    assert len(failures(records)) == 2
    assert {r["case"] for r in records if r["record"] == "result"} == {PLAIN.name}
    assert "cuflash: wrong" in report.markdown(records)


def test_unknown_names_are_refused():
    assert choose_contenders(SUITES["fa2"], ("fa2", "cuflash")) == ["cuflash", "fa2"]
    assert choose_contenders(SUITES["fa2"], ()) == ["cuflash"]
    with pytest.raises(ValueError, match=r"peers: got .'fa9'"):
        choose_contenders(SUITES["fa2"], ("fa9",))
    with pytest.raises(ValueError, match="case: got 'd77'"):
        choose_cases(SUITES["fa2"], "d77")


@pytest.mark.parametrize("kind", ["gpu", "host"])
def test_the_steps_of_a_run_on_a_device(kind, fake_cupy, tmp_path):
    suite = tiny_suite(kind, peers=("naive", "empty-launch", "fa2"))
    records = run_suite("tiny", suite, out=tmp_path, seconds=1e-4, revision="abc")
    assert records[0]["device"] == "Fake"
    assert (records[0]["cuda"], records[0]["cuda_driver"]) == ("13.0", "13.1")
    found = by_contender(records, PLAIN, "forward")
    assert [found[x]["status"] for x in ("cuflash", "naive", "empty-launch", "fa2")] == ["ok", "ok", "ok", "absent"]
    assert "empty-launch" not in by_contender(records, PLAIN, "backward")
    if kind == "gpu":
        assert found["naive"]["median_us"] == pytest.approx(500)
        assert records[-1]["ceiling"]["product_tflops"] == pytest.approx(2 * 8**3 / 500 / 1e6)
    assert ("TFLOP/s" if kind == "gpu" else "Microseconds") in report.heading(records)


def test_kernels_of_all_cases_are_compiled_ahead(monkeypatch, fake_cupy):
    """Once each; what is refused, or does not compile, is for the contender to report."""
    asked: list[set[str]] = []
    compiled: list[str] = []

    def plan(self, q, k, v, *, passes, **arrays):
        asked.append({*passes, *arrays})
        if q.shape == PLAIN.q_shape:
            raise NotImplementedError("not served")
        plans = {name: types.SimpleNamespace(kernels=(f"{q.shape} {name}", "shared", "broken")) for name in passes[1:]}
        return types.SimpleNamespace(**plans, forward=None)

    def compile_one(kernel):
        compiled.append(kernel)
        if kernel == "broken":
            raise CompileError("it does not compile", "", ())

    monkeypatch.setattr("bench.run.FlashAttention.plan", plan)
    monkeypatch.setattr("bench.run.compile_spec", compile_one)
    other = replace(SMALL, seqlen_q=3)
    compile_ahead(Bench.make("gpu", 1e-4), (PLAIN, SMALL, other), ALL_PASSES)
    own = {f"{case.q_shape} {name}" for case in (SMALL, other) for name in ("backward", "jvp", "backward_jvp")}
    assert sorted(compiled) == sorted((*own, "shared", "broken"))
    passes = {"forward", "backward", "jvp", "backward_jvp"}
    assert all(passes | {"tq", "tk", "tv"} <= words and "double_backward" not in words for words in asked)


def test_a_gpu_suite_without_cupy_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit, match="cupy"):
        main(["run", "--suite", "fa2", "--out", str(tmp_path)])
