"""The bench package, as far as it goes without a device: cases, the check, timing, a small run, the report."""

import json
import sys
import time
import types
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash.testing as ct
from bench import accuracy, ceiling, peers, peers_torch, report
from bench.__main__ import ROOT, main
from bench.cases import BLOCK, FA2, GROUPED, OPTIONS, SUFFIXES, SUITES, Case, Suite
from bench.contender import Absent, Contender, refuse
from bench.formula import RANDOM, Inputs, Reference, make_inputs, one_group, softmax_rows
from bench.run import choose_cases, choose_contenders, failures, run_suite
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
from cuflash import reference
from cuflash.operands import numpy_dtype
from cuflash.options import Options
from cuflash.problem import make_problem

SMALL = Case(head_dim=8, head_dim_v=12, seqlen_q=24, batch=2, num_heads=4, num_heads_kv=2, causal=True, dtype="float32")
PLAIN = Case(head_dim=8, seqlen_q=24, batch=2, num_heads=2, dtype="float32")
BIASED = [replace(PLAIN, bias="hqk"), replace(PLAIN, bias="bq"), replace(PLAIN, bias="k")]
OPTIONAL = [
    replace(PLAIN, softcap=0.5),
    replace(SMALL, alibi=True),
    *(replace(PLAIN, mask=axes) for axes in ("qk", "bk", "bhqk")),
    *(replace(SMALL, window=window) for window in (5, 24, 1000)),
    replace(PLAIN, dropout=0.4),
    replace(SMALL, sinks=True),
    replace(PLAIN, kv_lengths=True),
    replace(SMALL, softcap=0.5, alibi=True, bias="hqk", window=9, dropout=0.3, sinks=True, kv_lengths=True),
    replace(PLAIN, softcap=0.5, alibi=True, bias="bk", mask="qk", dropout=0.3, sinks=True, kv_lengths=True),
]
ALL_CASES = sorted({case for suite in SUITES.values() for case in suite.cases}, key=lambda case: case.name)


BESIDE_PEERS = [case for case in OPTIONAL if not {"dropout", "sinks", "kv_lengths"} & set(case.options)] + [
    *BIASED,
    replace(PLAIN, softcap=0.5, alibi=True, bias="hqk", mask="bqk"),
]


def on_meta(torch, case):
    """Operands and terms without memory, in bfloat16."""
    dtypes = {"bfloat16": torch.bfloat16, "bool": torch.bool}
    shapes = (case.q_shape, case.k_shape, case.v_shape, case.out_shape)
    operands = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    terms = {name: torch.empty(x, dtype=dtypes[dtype], device="meta") for name, (x, dtype) in case.terms.items()}
    return *operands, terms


def as_tensors(torch, inputs):
    operands = (torch.from_numpy(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    return *operands, {name: torch.from_numpy(x) for name, x in inputs.terms.items()}


def options_of(case):
    """Those of cuflash."""
    window = (case.window - 1, 0) if case.window else None
    return Options(causal=case.causal, softcap=case.softcap or None, window=window, dropout=case.dropout)


def abstract(shape, dtype):
    """Something with shape, strides and dtype, without the memory."""
    dtype = numpy_dtype(dtype)
    strides = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) * dtype.itemsize for i in range(len(shape)))
    return types.SimpleNamespace(shape=shape, strides=strides, dtype=dtype)


# Cases


def test_fa2_is_the_usual_table():
    assert len(FA2) == len(set(FA2)) == 18
    for case in FA2:
        assert case.batch * case.seqlen_q == 16384
        assert case.num_heads * case.head_dim == 2048
        assert case.dtype == "bfloat16"
    assert {(c.head_dim, c.seqlen_q, c.causal) for c in FA2} == {
        (d, n, causal) for d in (64, 128, 256) for n in (1024, 4096, 16384) for causal in (False, True)
    }
    assert SUITES["targets"].cases == FA2 + GROUPED


def test_names_are_unique():
    assert len({case.name for case in ALL_CASES}) == len(ALL_CASES)
    assert SMALL.name == "fp32-d8x12-b2-h4kv2-s24-causal"


@pytest.mark.parametrize("case", [case for case in ALL_CASES if not case.lengths], ids=lambda case: case.name)
def test_work_agrees_with_the_problem(case):
    q, k, v = (abstract(shape, case.dtype) for shape in (case.q_shape, case.k_shape, case.v_shape))
    terms = {name: abstract(*term) for name, term in case.terms.items()}
    problem = make_problem(options_of(case), q, k, v, **terms)
    assert case.ideal_bytes("forward") == problem.forward_bytes
    assert case.ideal_bytes("backward") == problem.backward_bytes
    assert case.scores_bytes == problem.naive_bytes
    assert case.out_shape == problem.out_shape
    for pass_, exact in (("forward", problem.forward_flops), ("backward", problem.backward_flops)):
        if case.causal and not case.window:  # half of the square leaves out half of the diagonal
            assert case.flops(pass_) == pytest.approx(exact, rel=1.01 / case.seqlen_q)
        elif case.blocks_kept:
            assert case.flops(pass_) == exact * case.block_mask().mean()
        else:
            assert case.flops(pass_) == exact


def test_a_number_of_operations_worked_out_by_hand():
    case = Case(head_dim=128, seqlen_q=4096, batch=4, num_heads=16)
    assert case.flops("forward") == 2 * 4 * 16 * 4096 * 4096 * 256
    assert case.flops("backward") == 2 * 4 * 16 * 4096 * 4096 * 640


def test_cases_that_peers_disagree_on_are_refused():
    with pytest.raises(ValueError, match="causal"):
        Case(head_dim=8, seqlen_q=4, seqlen_k=5, batch=1, num_heads=1, causal=True)
    with pytest.raises(ValueError, match="num_heads_kv"):
        Case(head_dim=8, seqlen_q=4, batch=1, num_heads=3, num_heads_kv=2)
    with pytest.raises(ValueError, match="alibi: got seqlen_q != seqlen_k"):
        Case(head_dim=8, seqlen_q=4, seqlen_k=5, batch=1, num_heads=1, alibi=True)
    with pytest.raises(ValueError, match="window: got no causal"):
        replace(PLAIN, window=4)
    for changes in ({"causal": True, "mask": "qk"}, {"causal": True, "blocks_kept": 0.5}, {"mask": "q"}):
        with pytest.raises(ValueError, match=r"rows (might|would) see nothing"):
            replace(PLAIN, **changes)


# The check


@pytest.mark.parametrize("case", [SMALL, PLAIN, *BIASED, *OPTIONAL], ids=lambda case: case.name)
def test_the_formula_is_the_oracle(case, monkeypatch):
    monkeypatch.setattr("bench.formula.ROWS_AT_ONCE", 7)
    inputs = make_inputs(np, case)
    problem = make_problem(options_of(case), inputs.q, inputs.k, inputs.v, **inputs.terms)
    given = RANDOM | dict(inputs.terms)
    out, _ = reference.forward(problem, inputs.q, inputs.k, inputs.v, **given)
    dq, dk, dv = reference.backward(problem, inputs.dout, inputs.q, inputs.k, inputs.v, **given)
    for b, h in ((0, 0), (1, 1)):
        heads = slice(h * case.group_size, (h + 1) * case.group_size)
        group = one_group(case, inputs, b, h, compute="float64", store="float64")
        expected = {"out": out[b, heads], "dq": dq[b, heads], "dk": dk[b, h], "dv": dv[b, h]}
        for name, value in expected.items():
            np.testing.assert_allclose(group[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_check_tells_right_from_wrong(dtype):
    case = Case(head_dim=16, seqlen_q=40, batch=2, num_heads=2, causal=True, dtype=dtype)
    inputs = make_inputs(np, case)
    assert {x.dtype for x in (inputs.q, inputs.k, inputs.v, inputs.dout)} == {numpy_dtype(dtype)}
    check = Reference(case, inputs)
    contender = peers.naive(case, inputs)
    (out,) = contender.calls["forward"]()
    (error,) = check.errors("forward", (out,)).values()
    assert error.within_rule and not error.wrong
    gradients = contender.calls["backward"]()
    assert not any(error.wrong for error in check.errors("backward", gradients).values())

    for spoil in (np.nan, 3.0):
        wrong = out.copy()
        wrong[1, 1, -1, -1] = spoil
        (error,) = check.errors("forward", (wrong,)).values()
        assert error.wrong and not error.within_rule
    future = Inputs(np, *(x[:, :, ::-1] for x in (inputs.q, inputs.k, inputs.v, inputs.dout)))
    assert check.errors("forward", (peers.naive(case, future).calls["forward"]()[0][:, :, ::-1],))["out"].wrong


def test_poison_is_not_a_number_in_every_dtype():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        array = peers._poisoned(np, (2, 3), dtype)
        assert array.dtype == numpy_dtype(dtype)
        assert np.isnan(array.astype("float64")).all()


# Peers


@pytest.mark.parametrize("case", [SMALL, PLAIN], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["cuflash", "cuflash-alloc", "cuflash-deterministic", "naive", "math", "torch-cpu"])
def test_contenders_on_the_cpu_are_right(name, case):
    if name in ("math", "torch-cpu"):
        pytest.importorskip("torch", reason="a torch peer")
    if name == "torch-cpu" and case is SMALL:
        with pytest.raises(Absent, match="grouped"):
            peers.ADAPTERS[name](case, make_inputs(np, case))
        return
    inputs = make_inputs(np, case)
    check = Reference(case, inputs)
    contender = peers.ADAPTERS[name](case, inputs)
    for _ in range(2):  # a call may be repeated
        for pass_ in ("backward", "forward"):
            results = tuple(contender.to_array(x) for x in contender.calls[pass_]())
            assert [x.shape for x in results] == [getattr(case, f"{s}_shape") for s in SHAPES[pass_]]
            assert not any(error.wrong for error in check.errors(pass_, results).values())


@pytest.mark.parametrize("case", OPTIONAL, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["cuflash", "cuflash-dscale"])
def test_contenders_with_options_are_right(name, case):
    """And would be wrong by the check without any one of them."""
    inputs = make_inputs(np, case)
    contender, check = peers.ADAPTERS[name](case, inputs), Reference(case, inputs)
    for pass_ in ("backward", "forward"):
        errors = check.errors(pass_, contender.calls[pass_]())
        assert not any(error.wrong for error in errors.values())
    for option in set(case.options) - {"kv_lengths"} if case.window < case.seqlen_q else ():
        without = replace(case, **{option: Case.__dataclass_fields__[option].default})
        less = replace(inputs, terms={name: inputs.terms[name] for name in without.terms})
        assert check.errors("forward", peers.ADAPTERS[name](without, less).calls["forward"]())["out"].wrong, option


@pytest.mark.parametrize("name", sorted(peers.ADAPTERS.keys() - {"empty-launch"}))
def test_contenders_refuse_the_options_that_they_do_not_have(name):
    """By name, before anything else: of those that they take, nothing but a library or a device can be missing."""
    takes = TAKES.get(name, set())
    values: dict[str, Any] = {"blocks_kept": 0.5, "lengths": (24, 20), "bias": "qk", "mask": "bk"}
    for option, words in OPTIONS.items():
        changes: dict[str, Any] = {option: values.get(option, True)} | ({"causal": True} if option == "window" else {})
        case = replace(PLAIN, **changes)
        assert case.options == (option,)
        if option not in takes:
            with pytest.raises(Absent, match=f"^is run without {words}$"):
                peers.ADAPTERS[name](case, make_inputs(np, case))


def test_refusals_name_every_option():
    case = replace(PLAIN, softcap=1.0, mask="qk", sinks=True)
    refuse(case, *OPTIONS)
    refuse(case, "softcap", "mask", "sinks")
    with pytest.raises(Absent, match=r"^is run without a soft cap and sinks$"):
        refuse(case, "mask")


def test_the_suite_of_options_has_every_option():
    suite = SUITES["options"]
    assert {option for case in suite.cases for option in case.options} == set(SUFFIXES)
    for case in suite.cases:
        assert (case.batch, case.seqlen_q, case.num_heads * case.head_dim, len(case.options) <= 1) == (4, 4096, 2048, 1)
    for name, cases in suite.only.items():
        assert name in suite.peers and set(cases) < set(suite.cases)
    assert [case.options for case in suite.only["cuflash-dbias"]] == 6 * [("bias",)]


def test_the_flops_of_a_window_are_those_of_its_pairs():
    case = Case(head_dim=64, seqlen_q=4096, batch=4, num_heads=32, causal=True, window=1024)
    i, j = np.ogrid[:4096, :4096]
    assert case.flops("forward") == 4 * 4 * 32 * 64 * int(((j <= i) & (j > i - 1024)).sum())
    assert replace(case, window=9999).flops("forward") == 4 * 4 * 32 * 64 * (4096 * 4097 // 2)


def test_masks_show_most_pairs_and_the_diagonal():
    case = Case(head_dim=8, seqlen_q=300, batch=2, num_heads=2, mask="qk")
    mask = make_inputs(np, case).terms["mask"]
    assert mask.shape == (1, 1, 300, 300) and mask[0, 0].diagonal().all() and abs(mask.mean() - 0.9) < 0.01
    assert make_inputs(np, replace(case, mask="bk")).terms["mask"].shape == (2, 1, 1, 300)


@pytest.mark.parametrize("case", BIASED, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["cuflash", "cuflash-dbias", "math-dbias"])
def test_contenders_with_a_bias_are_right(name, case):
    if name.startswith("math"):
        pytest.importorskip("torch", reason="a torch peer")
    inputs = make_inputs(np, case)
    contender = peers.ADAPTERS[name](case, inputs)
    for pass_ in ("backward", "forward"):
        results = tuple(contender.to_array(x) for x in contender.calls[pass_]())
        errors = Reference(case, inputs).errors(pass_, results)
        assert not any(error.wrong for error in errors.values())
    for other, reason in (("naive", "without a bias"), ("fa2", "without a bias")):
        with pytest.raises(Absent, match=reason):
            peers.ADAPTERS[other](case, inputs)


@pytest.mark.parametrize("name", ["cuflash-dbias", "efficient-dbias", "math-dbias"])
def test_contenders_of_a_bias_need_one(name):
    with pytest.raises(Absent, match="needs a bias"):
        peers.ADAPTERS[name](PLAIN, make_inputs(np, PLAIN))


def test_unfused_attention_of_torch_has_no_bias_under_a_causal_mask():
    pytest.importorskip("torch", reason="a torch peer")
    case = replace(PLAIN, causal=True, bias="k")
    with pytest.raises(Absent, match="not both"):
        peers.ADAPTERS["math-dbias"](case, make_inputs(np, case))


@pytest.mark.parametrize("dbias", [False, True])
@pytest.mark.parametrize("axes", ["hqk", "bhqk", "k"])
def test_the_efficient_kernel_takes_a_bias(axes, dbias):
    torch = pytest.importorskip("torch", reason="a torch peer")
    case = Case(head_dim=64, seqlen_q=128, batch=2, num_heads=4, bias=axes)
    calls = peers_torch.efficient_calls(torch, case, *on_meta(torch, case), dbias=dbias)
    assert [tuple(x.shape) for x in calls["backward"]()] == [case.q_shape, case.k_shape, case.v_shape]


@pytest.mark.parametrize("lengths", [(), (7, 40, 19)])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_right_and_counted_exactly(lengths, causal):
    sizes: dict[str, Any] = {"batch": 3, "num_heads": 4, "num_heads_kv": 2, "head_dim": 8, "dtype": "float32"}
    case = Case(seqlen_q=40, lengths=lengths, causal=causal, **sizes)
    inputs = make_inputs(np, case)
    check, contender = Reference(case, inputs), peers.ADAPTERS["cuflash-packed"](case, inputs)
    for pass_ in ("forward", "backward"):
        results = tuple(contender.to_array(x) for x in contender.calls[pass_]())
        assert not any(error.wrong for error in check.errors(pass_, results).values())
        results[0][-1, -1, 18] = 3
        assert any(error.wrong for error in check.errors(pass_, results).values())
    pairs = sum(n * n for n in lengths or (40, 40, 40))
    assert case.flops("forward") == 2 * 4 * pairs * 16 // (2 if causal else 1)
    if lengths:
        with pytest.raises(Absent, match="different lengths"):
            peers.ADAPTERS["cuflash"](case, inputs)
        with pytest.raises(ValueError, match="lengths"):
            Case(seqlen_q=41, lengths=lengths, **sizes)


SHAPES = {"forward": ("out",), "backward": ("q", "k", "v")}
# Options of contenders that have any; names that begin with "cuflash" and are not here have all but `lengths`.
TAKES = {
    **{name: OPTIONS.keys() - {"lengths"} for name in peers.ADAPTERS if name.startswith("cuflash")},
    **{f"cuflash-{name}": set() for name in ("steps", "kv-lengths", "pages16", "pages64", "pages256")},
    "cuflash-packed": {"lengths"},
    "cudnn": {"bias", "mask", "dropout"},
    "fa2": {"window", "dropout"},
    "fa4": {"softcap", "window"},
    "efficient": {"bias", "mask", "dropout"},
    "efficient-dbias": {"bias"},
    "math-dbias": {"bias"},
    "flex": {"blocks_kept", "softcap", "alibi", "bias", "mask", "window"},
}


def test_keys_in_pages_are_those_of_the_case():
    case = Case(head_dim=16, seqlen_q=3, seqlen_k=512, batch=2, num_heads=4, num_heads_kv=2, dtype="float32")
    inputs = make_inputs(np, case)
    expected = peers.cuflash(case, inputs).calls["forward"]()[0].copy()
    for size in (16, 64, 256):
        contender = peers.ADAPTERS[f"cuflash-pages{size}"](case, inputs)
        np.testing.assert_allclose(contender.calls["forward"]()[0], expected, rtol=1e-5, atol=1e-6)
        assert list(contender.plans) == ["forward"]
    with pytest.raises(Absent, match="500 keys are no whole pages of 64"):
        peers.ADAPTERS["cuflash-pages64"](replace(case, seqlen_k=500), inputs)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("make_calls", [peers_torch.fa2_calls, peers_torch.cudnn_calls, peers_torch.efficient_calls])
def test_device_kernels_of_torch_take_these_arguments(make_calls, grouped):
    """On tensors without memory: names, order and number of arguments and results."""
    torch = pytest.importorskip("torch", reason="a torch peer")
    case = Case(head_dim=64, seqlen_q=128, batch=2, num_heads=4, num_heads_kv=2 if grouped else 4, causal=True)
    operands = on_meta(torch, case)
    if grouped and make_calls is peers_torch.efficient_calls:
        with pytest.raises(Absent, match="grouped"):
            make_calls(torch, case, *operands)
        return
    calls = make_calls(torch, case, *operands)
    assert [tuple(x.shape) for x in calls["forward"]()] == [case.out_shape]
    assert [tuple(x.shape) for x in calls["backward"]()] == [case.q_shape, case.k_shape, case.v_shape]


@pytest.mark.parametrize(
    ("make_calls", "changes"),
    [
        (peers_torch.fa2_calls, {"causal": True, "window": 100}),
        (peers_torch.fa2_calls, {"dropout": 0.1}),
        *(
            (make_calls, changes)
            for make_calls in (peers_torch.cudnn_calls, peers_torch.efficient_calls)
            for changes in ({"bias": "qk"}, {"mask": "bk"}, {"dropout": 0.1})
        ),
    ],
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_device_kernels_of_torch_take_options(make_calls, changes):
    torch = pytest.importorskip("torch", reason="a torch peer")
    case = Case(**{"head_dim": 64, "seqlen_q": 128, "batch": 2, "num_heads": 4} | changes)
    calls = make_calls(torch, case, *on_meta(torch, case))
    assert [tuple(x.shape) for x in calls["forward"]()] == [case.out_shape]
    assert [tuple(x.shape) for x in calls["backward"]()] == [case.q_shape, case.k_shape, case.v_shape]


@pytest.mark.parametrize("case", BESIDE_PEERS, ids=lambda case: case.name)
def test_flex_gets_the_options(case, monkeypatch):
    """Traced, on the CPU, where it has no backward pass."""
    torch = pytest.importorskip("torch", reason="a torch peer")
    compile_ = torch.compile

    def traced(function, **options):
        compiled = compile_(function, backend="aot_eager", **options)
        return lambda q, k, v, **terms: compiled(q.detach(), k.detach(), v.detach(), **terms)

    monkeypatch.setattr(torch, "compile", traced)
    inputs = make_inputs(np, case)
    calls = peers_torch.flex_calls(torch, case, *as_tensors(torch, inputs))
    (out,) = calls["forward"]()
    assert not Reference(case, inputs).errors("forward", (out.numpy(),))["out"].wrong


@pytest.mark.parametrize("changes", [{"mask": "qk"}, {"mask": "bk"}, {"bias": "hq"}, {"bias": "bk", "mask": "qk"}])
def test_masks_are_addends_to_kernels_that_have_no_others(changes):
    torch = pytest.importorskip("torch", reason="a torch peer")
    case = replace(PLAIN, **changes)
    inputs = make_inputs(np, case)
    q, k, v, _, terms = as_tensors(torch, inputs)
    bias = peers_torch.additive(torch, case, terms, q.dtype)
    assert bias.shape == (2, 2, 24, 24)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).numpy()
    assert not Reference(case, inputs).errors("forward", (out,))["out"].wrong
    assert peers_torch.additive(torch, PLAIN, {}, q.dtype) is None


def test_results_of_random_numbers_of_their_own_are_not_checked():
    """Those of a peer with dropout."""
    pytest.importorskip("torch", reason="a torch peer")
    case = replace(PLAIN, dropout=0.1)
    ran = []

    def make_calls(torch, case, q, k, v, dout, terms):
        def forward():
            ran.append(q)
            return (q,)

        return {"forward": forward}

    adapter = peers_torch._torch(make_calls, "dropout", device="cpu")
    for of, expected in ((case, 0), (PLAIN, 1)):
        assert len(adapter(of, make_inputs(np, of)).calls["forward"]()) == expected
    assert len(ran) == 2


def test_slow_contenders_run_on_some_cases_unless_named(tmp_path):
    suite = replace(tiny_suite(peers=("naive",)), only={"naive": (SMALL,)})
    for named, expected in ((None, {SMALL.name}), (("naive",), {SMALL.name, PLAIN.name})):
        records = run_suite("tiny", suite, out=tmp_path, seconds=1e-4, revision="abc", peers=named)
        assert {r["case"] for r in records if r.get("contender") == "naive"} == expected
        assert {r["case"] for r in records if r.get("contender") == "cuflash"} == {SMALL.name, PLAIN.name}
    assert "| - / - |" in report.markdown(run_suite("tiny", suite, out=tmp_path, seconds=1e-4, revision="abc"))


def test_a_run_with_options(tmp_path):
    cases = tuple(replace(case, head_dim_v=case.head_dim) for case in OPTIONAL)
    suite = Suite(kind="cpu", cases=cases, peers=("cuflash-dscale", "naive", "cudnn", "flex"), about="options")
    records = run_suite("tiny", suite, out=tmp_path, seconds=1e-4, revision="abc")
    status = {(r["case"], r["contender"]): r["status"] for r in records if r["record"] == "result"}
    for case in cases:
        expected = {"cuflash": "ok", "cuflash-dscale": "ok", "naive": "absent", "cudnn": "absent", "flex": "absent"}
        assert {name: status[case.name, name] for name in expected} == expected
    text = report.markdown(records)
    for words in ("full, softcap 0.5", "causal, alibi", "full, mask bk", "causal, window 5", "full, dropout 0.4"):
        assert f"| {words} |" in text
    assert "- plain formula: absent: is run without sinks (2 measurements)" in text
    assert "cuflash, with dscale" in text


@pytest.mark.parametrize("name", ["cudnn", "fa2", "efficient", "flex", "empty-launch", "jax-pallas"])
def test_device_peers_are_absent_on_the_cpu(name):
    with pytest.raises(Absent, match=r"needs|torch"):
        peers.ADAPTERS[name](PLAIN, make_inputs(np, PLAIN))


@pytest.fixture
def fake_jax(monkeypatch, fake_cupy):
    """As much of JAX as its adapter calls, on NumPy arrays: no tile of 256 keys fits, and one of 64 is slow."""
    jax: Any = types.ModuleType("jax")
    pallas: Any = types.ModuleType("attention_mgpu")
    jax.default_backend = lambda: "gpu"
    jax.dlpack = types.SimpleNamespace(from_dlpack=lambda x: x)
    jax.now = 0
    jax.block_until_ready = lambda results: results
    monkeypatch.setattr(peers, "time", types.SimpleNamespace(perf_counter=lambda: jax.now))
    pallas.TuningConfig = types.SimpleNamespace
    fake_cupy.from_dlpack = lambda x: x

    def attention(q, k, v, config):
        if config.block_kv == 256:
            raise ValueError("exceeds available shared memory")
        jax.now += 2 if config.block_kv == 64 else 1
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.astype("float32").transpose(0, 2, 1, 3) for x in (q, k, v))
        given = {"causal": True} if config.causal else {}
        p, _ = softmax_rows(np, q, k.repeat(group, axis=1), scale=1.0, **given)
        return (p @ v.repeat(group, axis=1)).transpose(0, 2, 1, 3).astype("float16")

    pallas.attention = attention
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.gpu.attention_mgpu", pallas)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return jax


@pytest.mark.parametrize("causal", [False, True])
def test_pallas_gets_its_layout_scale_and_tile(fake_jax, fake_cupy, causal):
    case = Case(head_dim=128, seqlen_q=256, batch=2, num_heads=4, num_heads_kv=2, causal=causal, dtype="float16")
    inputs = replace(make_inputs(np, case), xp=fake_cupy)
    contender = peers.ADAPTERS["jax-pallas"](case, inputs)
    assert set(contender.calls) == {"forward"}
    assert contender.plans["forward"] == "block_q 64, block_kv 128, 2 concurrent steps"
    assert contender.wait is fake_jax.block_until_ready
    results = tuple(contender.to_array(x) for x in contender.calls["forward"]())
    assert [x.shape for x in results] == [case.out_shape]
    assert not any(error.wrong for error in Reference(case, inputs).errors("forward", results).values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "bfloat16"}, "float16"),
        ({"head_dim": 72}, "multiple of 64"),
        ({"head_dim_v": 128}, "one head dimension"),
        ({"seqlen_q": 64}, "128 queries"),
        ({"seqlen_k": 100}, "64 keys"),
    ],
    ids=str,
)
def test_pallas_says_what_it_does_not_serve(fake_jax, fake_cupy, changes, reason):
    case = Case(**{"head_dim": 64, "seqlen_q": 128, "batch": 1, "num_heads": 1, "dtype": "float16"} | changes)
    with pytest.raises(Absent, match=reason):
        peers.jax_pallas(case, replace(make_inputs(np, case), xp=fake_cupy))


def test_pallas_without_a_device_or_a_tile_is_absent(fake_jax, fake_cupy, monkeypatch):
    case = Case(head_dim=64, seqlen_q=128, batch=1, num_heads=1, dtype="float16")
    inputs = replace(make_inputs(np, case), xp=fake_cupy)
    pallas = sys.modules["jax.experimental.pallas.ops.gpu.attention_mgpu"]

    def refuse(*args):
        raise ValueError("Causal masking not supported")

    monkeypatch.setattr(pallas, "attention", refuse)
    with pytest.raises(Absent, match="none of its tiles runs: Causal masking not supported"):
        peers.jax_pallas(case, inputs)
    fake_jax.default_backend = lambda: "cpu"
    with pytest.raises(Absent, match="no CUDA device"):
        peers.jax_pallas(case, inputs)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(Absent, match="jax: "):
        peers.jax_pallas(case, inputs)


def test_block_masks(tmp_path):
    case = Case(dtype="float32", head_dim=8, seqlen_q=300, batch=1, num_heads=2, blocks_kept=0.5)
    suite = Suite(kind="cpu", cases=(case,), peers=("cuflash-dense", "naive"), about="blocks")
    records = run_suite("tiny", suite, out=tmp_path, seconds=1e-4, revision="abc")
    results = [r for r in records if r["record"] == "result"]
    status = {(r["contender"], r["pass"]): r["status"] for r in results}
    for pass_ in ("forward", "backward"):
        assert status["cuflash", pass_] == status["cuflash-dense", pass_] == "ok"
        assert status["naive", pass_] == "absent"
    text = report.markdown(records)
    assert "| 50 % of blocks |" in text and "cuflash, no mask" in text
    assert report.Table(records).unit == "microseconds"
    inputs = make_inputs(np, case)
    unmasked = peers.cuflash(replace(case, blocks_kept=0.0), inputs)
    assert Reference(case, inputs).errors("forward", unmasked.calls["forward"]())["out"].wrong


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


def test_every_contender_has_a_title_and_suites_name_contenders():
    assert set(report.TITLES) == set(peers.ADAPTERS)
    for suite in SUITES.values():
        assert set(suite.peers) <= set(peers.ADAPTERS)


# Timing


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


# A run


def tiny_suite(kind="cpu", peers=("naive", "torch-cpu", "cudnn")):
    return Suite(kind=kind, cases=(PLAIN, SMALL), peers=peers, about="two tiny cases")


def by_contender(records, case, pass_):
    return {
        r["contender"]: r for r in records if r["record"] == "result" and (r["case"], r["pass"]) == (case.name, pass_)
    }


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


class FakeMemory(np.ndarray):
    """An array that can be copied as CuPy's memory can."""

    @property
    def data(self):
        return types.SimpleNamespace(copy_from_device_async=lambda source, size: None)


def raw_memory(array):
    return array.view(FakeMemory) if array.dtype.kind == "u" else array


class FakeEvent:
    now_ms = 0.0

    def record(self):
        FakeEvent.now_ms += 0.5
        self.at = FakeEvent.now_ms

    def synchronize(self):
        pass


@pytest.fixture
def fake_cupy(monkeypatch):
    """NumPy under CuPy's names, as far as the bench calls them; time passes by half a millisecond an event."""
    fake: Any = types.ModuleType("cupy")
    fake.__dict__.update({name: getattr(np, name) for name in dir(np) if not name.startswith("__")})
    fake.ndarray = FakeMemory  # so that cuflash computes on what it is given as NumPy's
    fake.empty = lambda *args, **kwargs: raw_memory(np.empty(*args, **kwargs))
    fake.arange = lambda *args, **kwargs: raw_memory(np.arange(*args, **kwargs))
    fake.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
    fake.RawKernel = lambda source, name: lambda grid, block, args: None
    properties = {"name": b"Fake", "multiProcessorCount": 1, "l2CacheSize": 1024}
    fake.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(
            getDeviceProperties=lambda device: properties,
            memGetInfo=lambda: (10**9, 10**9),
            runtimeGetVersion=lambda: 13000,
            driverGetVersion=lambda: 13010,
        ),
        Device=lambda: types.SimpleNamespace(id=0),
        Event=FakeEvent,
        get_elapsed_time=lambda start, end: end.at - start.at,
        get_current_stream=lambda: types.SimpleNamespace(synchronize=lambda: None, ptr=0),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr("bench.timing.FLUSH_BYTES", 64)
    monkeypatch.setattr("bench.timing.FLUSH_ROWS", 4)
    monkeypatch.setattr(ceiling, "PRODUCT_SIZE", 8)
    monkeypatch.setattr(ceiling, "COPY_BYTES", 64)
    return fake


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


# The report


def synthetic(run_id="r1", *, speed=300.0, cases=FA2, ended=True, matched=""):
    """Records of a run of `cases`: cuDNN at 400, FlashAttention-2 at 250 TFLOP/s, cuflash at `speed`."""
    ceilings = {"product": "torch bfloat16 8192^3", "product_tflops": 790.0, "copy_tbytes_per_s": 4.2}
    base = {"run": run_id, "suite": "fa2"}
    contenders = ["cuflash", "cudnn", "fa2", "flex"]
    records = [
        base
        | {"record": "run", "kind": "gpu", "about": "bfloat16", "filter": matched, "contenders": contenders}
        | {"time": "2026-11-20T10:00:00+00:00", "revision": "abc", "device": "NVIDIA H200", "driver": "580"}
        | {"cuda": "13.0", "cpu": "x", "cores": 16, "versions": {"numpy": "2.5"}, "ceiling": ceilings}
    ]
    for case in cases:
        problem = {name: getattr(case, name) for name in case.__dataclass_fields__}
        for pass_ in ("forward", "backward"):
            row = base | {"record": "result", "case": case.name, "pass": pass_, "problem": problem}
            for name, tflops in (("cuflash", speed), ("cudnn", 400.0), ("fa2", 250.0)):
                us = case.flops(pass_) / tflops / 1e6
                errors = {"out": {"error": 2e-3, "formula_error": 1.6e-3, "ulp": 1e-2}}
                times = {"median_us": us, "p10_us": us * 0.98, "p90_us": us * 1.03, "repeats": 20}
                ok = {"contender": name, "status": "ok", "within_rule": True, "errors": errors}
                records.append(row | ok | times | {"tflops": tflops, "gbytes_per_s": 5.0})
            records.append(row | {"contender": "flex", "status": "absent", "reason": "torch: not here"})
    return records + ([base | {"record": "end"}] if ended else [])


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_table_of_a_synthetic_run():
    text = report.markdown(synthetic())
    lines = text.splitlines()
    assert lines[0] == (
        "| head_dim | seqlen | batch x heads | mask | dtype | cuflash | cuDNN | FlashAttention-2 "
        "| cuflash : best peer | cuflash : FA2 | error : formula's |"
    )
    assert len({line.count("|") for line in lines[:21]}) == 1
    numbers = ("300 / 300", "400 / 400", "250 / 250", "0.75 / 0.75", "1.20 / 1.20", "1.25 / 1.25")
    assert lines[2] == "| 64 | 1024 | 16 x 32 | full | bf16 | " + " | ".join(numbers) + " |"
    assert lines[20].startswith("| geometric mean |") and "| 0.75 / 0.75 | 1.20 / 1.20 |" in lines[20]
    assert lines[-1] == "- FlexAttention: absent: torch: not here (36 measurements)"
    assert "790 TFLOP/s" in report.heading(synthetic()) and "NVIDIA H200" in report.heading(synthetic())


def test_the_last_whole_run_is_reported(tmp_path):
    path = tmp_path / "fa2.jsonl"
    runs = [
        synthetic("old", speed=100),
        synthetic("good", speed=200),
        synthetic("part", cases=FA2[:1], matched="s1024"),
        synthetic("cut", cases=FA2[:3], ended=False),
    ]
    write(path, [record for records in runs for record in records])
    with path.open("a") as file:
        file.write('{"record": "resu')
    assert {r["run"] for r in report.latest_run(report.load(path))} == {"good"}
    write(path, runs[2] + runs[3])
    assert {r["run"] for r in report.latest_run(report.load(path))} == {"cut"}
    assert report.latest_run([]) == []


def test_decoding_is_read_in_bytes_and_the_cpu_in_gflops():
    assert report.Table(synthetic(cases=SUITES["decode"].cases)).unit == "TB/s"
    assert report.Table(synthetic()).unit == "TFLOP/s"
    records = synthetic()
    records[0]["kind"] = "cpu"
    assert report.Table(records).unit == "GFLOP/s"
    assert report.Table(records).value(FA2[0].name, "cudnn", "forward") == 400e3


def test_the_generated_parts(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="draws the plots")
    assert matplotlib
    results, page, readme = tmp_path / "results", tmp_path / "docs" / "performance.md", tmp_path / "README.md"
    results.mkdir()
    page.parent.mkdir()
    write(results / "fa2.jsonl", synthetic())
    for path in (page, readme):
        path.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\ntail\n")
    arguments = ["report", "--results", str(results), "--page", str(page), "--readme", str(readme)]
    assert main(arguments) == 0
    text = page.read_text()
    assert text.startswith("# Title\n\n" + report.BEGIN) and text.endswith(report.END + "\n\ntail\n")
    assert "old" not in text and "### fa2" in text and "geometric mean" in text
    assert "old" in readme.read_text()  # it shows another suite
    for pass_ in ("forward", "backward"):
        assert f"![fa2, {pass_}](../results/fa2_{pass_}.svg)" in text
        picture = results / f"fa2_{pass_}.svg"
        assert "head_dim 128, causal" in picture.read_text()
        assert picture.stat().st_size < 100_000
    pictures = [(results / f"fa2_{pass_}.svg").read_bytes() for pass_ in ("forward", "backward")]
    assert main(arguments) == 0
    assert page.read_text() == text
    assert [(results / f"fa2_{pass_}.svg").read_bytes() for pass_ in ("forward", "backward")] == pictures
    write(results / f"{report.HEADLINE_SUITE}.jsonl", synthetic())
    assert main(arguments) == 0
    rows = [line for line in readme.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows[1:]] == [
        [f"| {head_dim}", mask] for head_dim in (64, 128, 256) for mask in ("full", "causal")
    ]
    assert rows[0].endswith("cuDNN | FlashAttention-2 | cuflash : best of the others |")
    assert "old" not in readme.read_text() and "![" not in readme.read_text()


def test_errors_of_random_problems_are_recorded_and_reported(tmp_path, capsys):
    command = ["accuracy", "--backend", "cpu", "--out", str(tmp_path), "--revision", "abc", "--problems", "2"]
    assert main([*command, "--dtype", "float64"]) == 0
    printed = capsys.readouterr().out
    (row,) = report.load(tmp_path / report.ACCURACY)
    assert (row["dtype"], row["problems"], row["kind"], row["revision"]) == ("float64", 2, "cpu", "abc")
    assert list(row["results"]) == ["out", "lse", "dq", "dk", "dv"]
    for name, found in row["results"].items():
        assert sum(found["counts"]) == 2 and found["outside"] == 0
        assert 0 < found["median"] <= found["largest"]
        assert f"{name}: 2 problems, median {found['median']:.2f}" in printed
    accuracy.append(tmp_path, row | {"revision": "new", "dtype": "float32", "precision": "tf32"})
    accuracy.append(tmp_path, row | {"revision": "new"})
    lines = report.accuracy(report.load(tmp_path / report.ACCURACY)).splitlines()
    assert [line.split(" | ")[1] for line in lines[4:]] == ["float64", "float32, tf32"]
    assert all(line.endswith("| new |") for line in lines[4:])


def test_an_error_that_is_not_a_number_counts_as_the_largest():
    assert accuracy._counts(np.array([0.0, 0.3, 0.3, 9.0, np.inf, np.nan])) == [1, 0, 2, 0, 0, 0, 0, 0, 3]


def test_a_page_without_markers_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    for text in ("no markers", report.END + report.BEGIN, report.BEGIN * 2 + report.END):
        page.write_text(text)
        with pytest.raises(ValueError, match="page"):
            report.update(page, "new")
        assert page.read_text() == text
    with pytest.raises(SystemExit, match="results"):
        main(["report", "--results", str(tmp_path), "--page", str(page)])


def test_the_pages_have_the_committed_results():
    results, page, readme = ROOT / "bench" / "results", ROOT / "docs" / "performance.md", ROOT / "README.md"
    for path, part in ((page, report.section(results, page)), (readme, report.readme_part(results))):
        text = path.read_text()
        shown = text[text.index(report.BEGIN) + len(report.BEGIN) : text.index(report.END)].strip()
        assert shown == part, "python -m bench report writes it"


def test_list_prints_every_case(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(case.name in printed for case in ALL_CASES)


def test_a_gpu_suite_without_cupy_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit, match="cupy"):
        main(["run", "--suite", "fa2", "--out", str(tmp_path)])


def test_bfloat16_is_the_one_of_ml_dtypes():
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
