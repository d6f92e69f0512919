"""Suites of memory, traffic and training: small runs on NumPy arrays and stand-ins, and what is shown of them."""

import json
import re
import sys
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench import evidence, first_call, frameworks, memory, traffic, training
from bench.__main__ import EVIDENCE, main, parser
from bench.cases import Case
from bench.examples import run_page
from bench.inputs import make_inputs
from bench.peers import ADAPTERS
from bench.report import begin_of
from bench.suites import RUNTIME
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.options import Options
from cuflash.spec.problem import make_problem
from tests.bench_records import synthetic
from tests.bench_records import write as write_records

TINY = training.Study(
    curve={"steps": 3, "batch": 2, "length": 12, "width": 16, "blocks": 1, "heads": 2},
    model={"width": 16, "blocks": 1},
    heads=2,
    lengths=(8, 16),
    tokens=16,
    dtypes=("float32", "bfloat16"),
)


class HostMeter:
    """What Python's allocations, NumPy's among them, add up to."""

    def begin(self):
        tracemalloc.stop()
        tracemalloc.start()

    def taken(self):
        return tracemalloc.get_traced_memory()[1]


def writer():
    records = [{"record": "run", "run": "x", "suite": "y", "kind": "cpu", "filter": "", "contenders": []}]
    return records, lambda record, **fields: records.append({"record": record, **fields})


def test_the_command_knows_them():
    assert set(EVIDENCE) == evidence.EVIDENCE.keys()
    for name in EVIDENCE:
        assert parser().parse_args(["run", "--suite", name]).backend == "gpu"
    with pytest.raises(SystemExit, match=r"backend: got 'cpu', expected gpu for memory"):
        main(["run", "--suite", "memory", "--backend", "cpu"])


# ---- Memory ----------------------------------------------------------------------------------------------------------


def test_memory_of_the_formula_is_quadratic():
    """Its scores and more; a contender that is missing is asked once."""
    cases = [Case(head_dim=16, seqlen_q=n, batch=1, num_heads=2, dtype="float32") for n in (128, 256, 512)]
    records, write = writer()
    memory.measure(write, HostMeter(), np, cases, ("cuflash", "naive", "fa2"))
    tracemalloc.stop()
    found = {(r["seqlen"], r["pass"], r["contender"]): r for r in records[1:]}
    assert len(found) == 3 * 2 * 3
    for case in cases:
        for pass_ in ("forward", "backward"):
            assert found[case.seqlen_q, pass_, "naive"]["extra_bytes"] >= case.scores_bytes
            assert found[case.seqlen_q, pass_, "fa2"]["status"] == "absent"
    growth = [
        found[512, pass_, "naive"]["extra_bytes"] / found[128, pass_, "naive"]["extra_bytes"]
        for pass_ in ("forward", "backward")
    ]
    assert min(growth) > 8
    text = memory.markdown(records)
    assert re.search(r"- With the last doubling .*: cuflash x [\d.]+ / x [\d.]+; plain formula x [34][\d.]* / x", text)
    assert "| seqlen | cuflash | plain formula | FlashAttention-2 | formula : cuflash |" in text
    assert "\n- FlashAttention-2, forward, from 128 on: " in text


def test_results_do_not_count():
    case = RUNTIME[0]
    shapes = (case.out_shape, case.q_shape, case.k_shape, case.v_shape)
    out, *gradients = (2 * int(np.prod(shape)) for shape in shapes)
    lse = 4 * int(np.prod(case.out_shape[:3]))
    assert memory.results_bytes(case, "forward") == out + lse
    assert memory.results_bytes(case, "backward") == out + lse + sum(gradients)


def test_pools_of_both_libraries_count(monkeypatch):
    """CuPy's pool by what it has grown to, PyTorch's by its peak."""
    pools = {"cupy": 100, "torch": 7}
    stream, pool = SimpleNamespace(synchronize=lambda: None), SimpleNamespace(free_all_blocks=lambda: None)
    pool.total_bytes = lambda: pools["cupy"]
    of_torch = SimpleNamespace(empty_cache=lambda: None, reset_peak_memory_stats=lambda: None)
    of_torch.max_memory_allocated = lambda: pools["torch"]
    cuda = SimpleNamespace(get_current_stream=lambda: stream)
    cupy = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=of_torch))
    meter = memory.DeviceMeter()
    meter.begin()
    assert meter.taken() == 0
    pools |= {"cupy": 150, "torch": 10}
    assert meter.taken() == 53


# ---- Runtime ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["qk", "bk"])
def test_the_formula_with_a_mask(axes):
    case = Case(head_dim=8, seqlen_q=20, batch=2, num_heads=4, num_heads_kv=2, dtype="float64", mask=axes)
    inputs = make_inputs(np, case)
    own, plain = (ADAPTERS[name](case, inputs).calls for name in ("cuflash", "naive"))
    for pass_ in ("forward", "backward"):
        for mine, theirs in zip(own[pass_](), plain[pass_](), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-12)


def test_dropout_of_the_formula_keeps_the_mean(monkeypatch):
    """Of `out` over many draws, within five standard errors; the backward pass keeps to one draw."""
    case = Case(head_dim=4, seqlen_q=6, batch=1, num_heads=2, dtype="float64", dropout=0.25)
    monkeypatch.setattr("bench.peers.without_results", lambda calls: calls)
    inputs = make_inputs(np, case)
    dropped = ADAPTERS["naive"](case, inputs).calls
    plain = ADAPTERS["naive"](replace(case, dropout=0.0), inputs).calls
    draws = np.array([dropped["forward"]()[0] for _ in range(3000)])
    spread = draws.std(axis=0) / len(draws) ** 0.5
    assert (draws.std(axis=0) > 0).all() and (abs(draws.mean(axis=0) - plain["forward"]()[0]) < 5 * spread).all()
    first, second = dropped["backward"](), dropped["backward"]()
    for name, one, two, without in zip(("dq", "dk", "dv"), first, second, plain["backward"](), strict=True):
        np.testing.assert_array_equal(one, two, err_msg=name)
        assert abs(one - without).max() > 1e-3, name


# ---- Traffic ---------------------------------------------------------------------------------------------------------

PAGE_OF_NCU = """==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_bytes.sum"
"","","byte","byte","byte"
"0","first","1,000","20","5000"
"1","second","2,000.5","30","7000"
"2","end_of_one","1","1","1"
"3","third","4","5","6"
"4","end_of_one","1","1","1"
"""


def test_the_page_of_the_profiler():
    """Sums for each plan: those after the last separator were cut off."""
    first = {"read": 3000.5, "written": 50, "by_l2": 12000, "kernels": 2}
    both = [first, {"read": 4, "written": 5, "by_l2": 6, "kernels": 1}]
    assert traffic.parse(PAGE_OF_NCU) == both
    assert traffic.parse(PAGE_OF_NCU + '"5","fourth","7","8","9"\n') == both
    refused = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        traffic.parse(refused)
    with pytest.raises(ValueError, match="no output"):
        traffic.parse("")


def test_no_profiler_is_said(monkeypatch):
    monkeypatch.setattr(traffic, "profiler", lambda: None)
    assert traffic.counted(RUNTIME[0], "forward", 2) == 3 * [{"status": "absent", "reason": "ncu is not installed"}]


@pytest.mark.parametrize("printed", [PAGE_OF_NCU, "==ERROR== ERR_NVGPUCTRPERM"])
def test_every_plan_gets_its_counters_or_the_reason(monkeypatch, printed):
    monkeypatch.setattr(traffic, "profiler", lambda: "ncu")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(stdout=printed, stderr=""))
    found = traffic.counted(RUNTIME[0], "forward", 2)
    if "PROF" in printed:
        assert [x.get("read") for x in found] == [3000.5, 4, None] and "none of its kernels" in found[2]["reason"]
    else:
        assert found == 3 * [{"status": "absent", "reason": "ncu: ==ERROR== ERR_NVGPUCTRPERM"}]


def test_plans_are_of_several_sizes():
    """The first one, and one of each other number of bytes."""
    plans = [SimpleNamespace(traffic=x and SimpleNamespace(tiles=x)) for x in (5, 5, 3, None, 3, 7, 1, 2, 4, 6)]
    chosen = traffic.of_several_sizes(plans)
    assert chosen == [plans[i] for i in (0, 2, 5, 6, 7, 8)]


@pytest.mark.parametrize("refused", [False, True])
def test_a_run_of_traffic(monkeypatch, refused, tmp_path):
    """On plans for a device that is not here, with times and counters made up."""
    matplotlib = pytest.importorskip("matplotlib", reason="draws the plots")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    case = Case(head_dim=64, seqlen_q=256, batch=1, num_heads=2)
    q, k, v = (np.empty(shape, "float16") for shape in (case.q_shape, case.k_shape, case.v_shape))
    plan = choose_plan(make_problem(Options(), q, k, v), DeviceSpec.for_arch("9.0"))
    monkeypatch.setattr(traffic, "plans_of", lambda case, pass_: ([plan], lambda plan: lambda: None, None))
    monkeypatch.setattr(traffic, "formula_call", lambda *_: None)
    found = {"status": "ok", "read": 2e6, "written": 1e6, "by_l2": 3e6, "kernels": 1}
    absent = {"status": "absent", "reason": "no"}
    monkeypatch.setattr(traffic, "counted", lambda *_: [absent if refused else dict(found), absent])
    records, write = writer()
    clock = SimpleNamespace(run=lambda call: call(), read_us=lambda ticket: 12.0)
    traffic.measure(write, clock, [case])
    text = traffic.markdown(records)
    assert plan.tiles[0].label in text and "| 12 |" in text
    assert plan.traffic is not None
    ratio = 3e6 / plan.traffic.moved
    assert ("- no counters: no" in text) if refused else (f"| {ratio:.2f} |" in text)
    near = int(1 / 1.15 <= ratio <= 1.15)
    said = f"unless others are asked for: {ratio:.2f} to {ratio:.2f}; within 15% in {2 * near} of 2 plans."
    assert refused or said in text
    # Of a plan that is asked for the model may be off, and that is said.
    model = {"read": 2e6, "written": 1.3e6, "tiles": 0}
    first = {"record": "traffic", "case": "a", "pass": "forward", "what": "", "least": 1, "median_us": 1} | found
    others = [first | {"model": model}, first | {"model": {"read": 9e6, "written": 0, "tiles": 0}}]
    assert "0.91 to 0.91; within 15% in 1 of 2 plans." in traffic.markdown(others)
    traffic.draw(plt, records, tmp_path / "traffic.svg")
    assert "tiles by L2" in (tmp_path / "traffic.svg").read_text()


# ---- Training, and the pages -----------------------------------------------------------------------------------------


def test_a_run_of_training_reaches_its_page(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="draws the plots")
    monkeypatch.setitem(training.STUDIES, "cpu", TINY)
    pages = {x: tmp_path / f"{x}.md" for x in ("page", "training", "readme", "evidence")}
    results, learnt, everything = tmp_path / "results", pages["training"], pages["evidence"]
    assert main(["run", "--suite", "training", "--backend", "cpu", "--out", str(results), "--revision", "abc"]) == 0
    for name, path in pages.items():
        markers = [begin_of(name) for name in evidence.PAGE_SECTIONS] if name == "evidence" else [begin_of()]
        path.write_text("".join(f"{marker}\n<!-- bench:end -->\n" for marker in markers))
    records = [json.loads(line) for line in (results / "training.jsonl").read_text().splitlines()]
    curves = {(r["attention"], r["seed"]): r["losses"] for r in records if r["record"] == "curve"}
    assert curves.keys() == {("formula", 0), ("formula", 1), ("cuflash, float32", 0), ("cuflash, bfloat16", 0)}
    assert {len(losses) for losses in curves.values()} == {3}
    steps = [r for r in records if r["record"] == "step"]
    assert [(r["length"], r["batch"]) for r in steps[::3]] == [(8, 2), (16, 1)]
    assert all(r["tokens_per_s"] == pytest.approx(1e3 * 16 / r["step_ms"]) for r in steps)
    write_records(results / "fa2.jsonl", synthetic())  # the page on performance needs a run
    memory_records = [{**records[0], "suite": "memory", "kind": "gpu", "device": "Fake", "driver": "1", "cuda": "13.0"}]
    row = {"record": "memory", "run": records[0]["run"], "seqlen": 512, "status": "ok", "contender": "cuflash"}
    memory_records += [{**row, "pass": pass_, "extra_bytes": 2**20} for pass_ in ("forward", "backward")]
    (results / "memory.jsonl").write_text("".join(json.dumps(r) + "\n" for r in memory_records))
    assert main(["report", "--results", str(results), *(x for k, v in pages.items() for x in (f"--{k}", str(v)))]) == 0
    text = learnt.read_text()
    for shown in ("| formula, seed 1 | ", "| cuflash, bfloat16, seed 0 | ", "revision abc", "run --suite training"):
        assert shown in text
    assert "![training on a CPU](results/training_cpu.svg)" in text and "formula : cuflash, float32" in text
    assert (results / "training_cpu.svg").exists() and (results / "memory_gpu.svg").exists()
    text = everything.read_text()
    assert "| 512 | 1 / 1 | - / - |" in text and "\n- AMD" in text.replace(records[0]["cpu"], "AMD")
    assert "speedup of a step / of attention: " in text and "cuflash, float32 at 16 tokens: " in text
    assert text.count("No results yet") == 3
    assert "### fa2" in pages["page"].read_text() and "memory" not in pages["page"].read_text()


def test_what_does_not_fit_is_said(monkeypatch):
    names = run_page(training.PAGE)

    class Large:
        def forward(self, q, k, v):
            raise MemoryError("Out of memory allocating 1 byte")

    study = replace(TINY, lengths=(8,))
    found = training._of_length(names, Large(), study, 1, 8)
    assert found == {"status": "out of memory", "reason": "Out of memory allocating 1 byte"}
    assert training._cell(found) == "out of memory"


def test_ratios_of_memory():
    assert [memory._ratio(*pair) for pair in ((8, 2), (8, 0), (0, 0), (None, 2), (2, None))] == [
        "4",
        "inf",
        "1",
        "-",
        "-",
    ]
    assert [memory._growth(x) for x in ([1, 2, 8], [1, 2, 8, None], [None, 3], [])] == ["x 4", "x 4", "", ""]


def test_ways_of_frameworks_give_the_same_results(monkeypatch):
    monkeypatch.setattr(frameworks, "SHAPE", (1, 1, 8, 8))
    records, write = writer()
    frameworks.measure("cpu", write, samples=1, calls_per_sample=1, seconds=0.01)
    rows = records[1:]
    assert len(rows) == 2 * len({r["way"] for r in rows})
    own = [r for r in rows if r["way"].startswith(("cuflash.", "bare call"))]
    assert [r["difference"] for r in own] == [0] * len(own)
    assert all(r["host_us"] > 0 and r["result_us"] > 0 for r in rows)
    assert {r["way"] for r in rows if "first_s" in r} == {r["way"] for r in rows if r["way"].endswith((".jit", ")"))}
    text = frameworks.markdown(records)
    assert all(f"\n| {r['way']} | " in text for r in rows)


def test_first_calls(monkeypatch):
    monkeypatch.setitem(first_call.CONTENDERS, "cpu", ("cuflash",))
    records, write = writer()
    first_call.measure("cpu", write)
    (row,) = records[1:]
    assert row["status"] == "ok"
    assert row["import_s"] > 0
    assert 0 < row["shape_s"] <= row["most_s"]
    assert "\n| cuflash | " in first_call.markdown(records)


def test_contenders_that_do_not_run_have_no_first_calls():
    absent = first_call.in_a_process("-c", "import a_package_that_nobody_has")
    assert absent == {"status": "absent", "reason": "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"}
    assert first_call.markdown([{"record": "first-call", "contender": "fa4", **absent}]).endswith("| - | - | - | - |")


def test_frameworks_are_compared_with_the_bare_call():
    pairs = zip(frameworks.PASSES, (20.0, 50.0), (31.5, 75.25), strict=True)
    rows = [
        {"record": "frameworks", "way": way, "pass": pass_, "host_us": us, "result_us": us + 4}
        for pass_, *times in pairs
        for way, us in zip((frameworks.BARE, "cuflash.torch"), times, strict=True)
    ]
    assert frameworks.markdown(rows).endswith(
        "| bare call | 20.0 / 50.0 | - | 24.0 / 54.0 | - |\n"
        "| cuflash.torch | 31.5 / 75.2 | 11.5 / 25.2 | 35.5 / 79.2 | - |"
    )
