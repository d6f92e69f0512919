"""The suites of fp8 numbers: contenders, what is said of them, and the errors that roundings make."""

import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from bench import peers, report, rounding
from bench.cases import Case
from bench.check import Check
from bench.contender import Absent
from bench.inputs import make_inputs
from bench.suites import SUITES
from tests.bench_records import PLAIN, synthetic

CASE = Case(head_dim=32, seqlen_q=40, batch=2, num_heads=4, num_heads_kv=2)


@given(
    st.sampled_from(("cuflash-fp8", "cuflash-fp8-cache")),
    st.booleans(),
    st.sampled_from((8, 32, 64)),
    st.integers(1, 90),
)
def test_contenders_of_one_byte_are_near_the_numbers_before_rounding(name, causal, head_dim, seqlen):
    case = Case(head_dim=head_dim, seqlen_q=seqlen, batch=2, num_heads=4, num_heads_kv=2, causal=causal)
    inputs = make_inputs(np, case)
    contender, check = peers.ADAPTERS[name](case, inputs), Check(case, inputs)
    for _ in range(2):  # a call may be repeated
        (out,) = contender.calls["forward"]()
        (error,) = check.errors("forward", (out,), contender.coarser).values()
        assert not error.wrong
        (strict,) = check.errors("forward", (out,)).values()
        assert strict.error > 0
    assert check.errors("forward", (np.roll(out, 1, axis=-1),), contender.coarser)["out"].wrong


@pytest.mark.parametrize("name", ["cuflash-fp8", "cuflash-fp8-cache", "cudnn-fp8"])
def test_contenders_of_one_byte_need_bfloat16_and_their_device(name):
    with pytest.raises(Absent, match=r"needs (bfloat16|CuPy arrays)"):
        peers.ADAPTERS[name](PLAIN, make_inputs(np, PLAIN))


def test_what_a_plan_says_is_of_the_passes_that_there_are():
    """On a GPU an fp8 problem has no plan of a backward pass."""
    said = types.SimpleNamespace(describe=lambda: "said")
    attn = types.SimpleNamespace(plan=lambda *_, **__: types.SimpleNamespace(forward=said, backward=None))
    assert peers._describe(attn, None, None, None) == {"forward": "said"}
    attn = types.SimpleNamespace(plan=lambda *_, **__: said)
    assert peers._describe(attn, None, None, None) == {"forward": "said", "backward": "said"}


def test_cudnn_is_absent_without_its_interface(monkeypatch):
    inputs = replace(make_inputs(np, CASE), xp=types.SimpleNamespace(__name__="cupy"))
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(Absent, match=r"^nvidia-cudnn-frontend: "):
        peers.ADAPTERS["cudnn-fp8"](CASE, inputs)


def test_suites_of_one_byte_have_the_usual_rows_and_caches():
    rows = SUITES["float8"].cases
    assert {(case.head_dim, case.seqlen_q, case.causal) for case in rows} == {
        (d, n, causal) for d in (64, 128, 256) for n in (4096, 16384) for causal in (False, True)
    }
    assert all((case.num_heads * case.head_dim, case.batch * case.seqlen_q) == (2048, 16384) for case in rows)
    caches = SUITES["float8-decode"].cases
    assert {(case.batch, case.seqlen_k) for case in caches} == {(b, n) for b in (1, 16) for n in (8192, 32768, 131072)}
    assert {(case.num_heads, case.num_heads_kv, case.head_dim, case.seqlen_q) for case in caches} == {(32, 8, 128, 1)}


def test_tables_hold_one_byte_against_the_peers_and_bfloat16():
    """In a suite about another contender its speed is what ratios begin with; decoding shows times."""
    of_bytes = {"cudnn": "cudnn-fp8", "fa2": "cuflash-fp8"}
    records = [
        r
        | {"suite": "float8"}
        | ({"contender": of_bytes.get(r["contender"], r["contender"])} if "contender" in r else {})
        for r in synthetic(cases=SUITES["float8"].cases)
    ]
    records[0]["contenders"] = ["cuflash", "cuflash-fp8", "cudnn-fp8"]
    table = report.Table(records)
    case = SUITES["float8"].cases[0].name
    speeds = {name: table.value(case, name, "forward") for name in table.contenders}
    assert set(speeds) == {"cuflash", "cuflash-fp8", "cudnn-fp8"} and table.peers == ["cudnn-fp8"]
    ratio, peer = table.ratio(case, "forward", table.peers), speeds["cudnn-fp8"]
    assert ratio and peer and ratio * peer == pytest.approx(speeds["cuflash-fp8"])
    header = report.markdown(records).splitlines()[0]
    assert "cuflash, float8 q, k and v : best peer" in header and header.count(" : bfloat16 |") == 1
    assert report.Table([r | {"suite": "float8-decode"} for r in records]).unit == "microseconds"


# ---- Errors of rounding ----------------------------------------------------------------------------------------------


def test_errors_of_rounding_are_those_of_the_numbers_and_not_of_the_computation(tmp_path):
    records = []
    rounding.measure(lambda record, **x: records.append({"record": record, **x}), "cpu", lengths=(1, 64))
    found = {(r["data"], r["way"], r["seqlen"]): r for r in records}
    assert len(found) == len(records) == len(rounding.DATA) * len(rounding.WAYS) * 2
    for (data, way, seqlen), r in found.items():
        assert 0 <= r["own"] < 0.004  # out is rounded to bfloat16
        assert (r["original"] < 0.004) == (way == "bfloat16")
        if data != "a quiet head" or "tensor" not in way:
            assert r["original"] < (0.04 if seqlen == 1 else 0.2)
    heads, tensor = ("k, v; a scale per " + per for per in ("head", "tensor"))
    assert found["normal", heads, 64]["original"] < found["normal", f"q, {heads}", 64]["original"]
    assert found["loud channels", f"{heads}, rotated", 64]["original"] < (
        0.8 * found["loud channels", heads, 64]["original"]
    )
    assert found["a quiet head", tensor, 64]["original"] > 1.1 * found["a quiet head", heads, 64]["original"]
    text = rounding.markdown(records)
    assert text.count("| error of out, by keys | 1 | 64 |") == len(rounding.DATA)
    assert text.count("| q, k, v; a scale per block, rotated |") == len(rounding.DATA)
    plt = pytest.importorskip("matplotlib.pyplot", reason="draws the plots")
    rounding.draw(plt, records, tmp_path / "plot.svg")
    assert "loud channels" in (tmp_path / "plot.svg").read_text()


@given(st.sampled_from(rounding.WAYS), st.sampled_from(sorted(rounding.DATA)), st.integers(1, 60))
def test_the_error_of_a_way_is_that_of_rounding_but_for_what_computing_adds(way, data, seqlen):
    operands = rounding.draw_operands(data, seqlen)
    rounded = []
    for name, x in zip("qkv", operands, strict=True):
        turned = cuflash.rotate(x) if way.rotates and name != "v" else x
        if name in way.names:
            x8, scale = cuflash.quantize(x, per=way.per, rotate=way.rotates and name != "v")
            turned = cuflash.dequantize(x8, scale, dtype="float64")
        rounded.append(turned)
    original, own = rounding.errors(np, way, operands)
    expected = rounding.relative(rounding.exact(*rounded), rounding.exact(*operands))
    assert abs(original - expected) <= 1.3 * own + 1e-9
