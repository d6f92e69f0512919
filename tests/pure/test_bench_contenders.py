"""The contenders of the benchmark, as far as they go without a device: right, or absent with a reason."""

import sys
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from bench import environment, peers, peers_runtimes, peers_torch, report
from bench.cases import OPTIONS, SUFFIXES, Case
from bench.check import Check
from bench.contender import Absent, Contender, refuse
from bench.functions import FUNCTIONS
from bench.inputs import make_inputs
from bench.suites import SUITES
from cuflash.cpu import core
from cuflash.cpu.jobs import count_cores
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.options import Options
from cuflash.spec.passes import BACKWARD, FORWARD
from cuflash.spec.problem import make_problem
from cuflash.testing import reference
from tests.bench_records import BIASED, OPTIONAL, PLAIN, SMALL, abstract

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


@pytest.mark.parametrize("case", [SMALL, PLAIN], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "name",
    [
        *("cuflash", "cuflash-alloc", "cuflash-deterministic", "cuflash-threads1", "cuflash-avx2"),
        *("naive", "math", "torch-cpu"),
    ],
)
def test_contenders_on_the_cpu_are_right(name, case, monkeypatch):
    monkeypatch.setattr(environment, "cores", lambda: 2)
    if name in ("math", "torch-cpu"):
        pytest.importorskip("torch", reason="a torch peer")
    if name == "torch-cpu" and case is SMALL:
        with pytest.raises(Absent, match="grouped"):
            peers.ADAPTERS[name](case, make_inputs(np, case))
        return
    if name == "cuflash-avx2" and "AVX2" not in core.instruction_sets():
        pytest.skip("no compiled core with AVX2")
    inputs = make_inputs(np, case)
    check = Check(case, inputs)
    contender = peers.ADAPTERS[name](case, inputs)
    for _ in range(2):  # a call may be repeated
        for pass_ in ("backward", "forward"):
            results = tuple(contender.to_array(x) for x in contender.calls[pass_]())
            assert [x.shape for x in results] == [getattr(case, f"{s}_shape") for s in SHAPES[pass_]]
            assert not any(error.wrong for error in check.errors(pass_, results).values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_runtimes_of_graphs_are_right(name, causal, monkeypatch):
    for package in (name, "onnx")[: 1 + (name == "onnxruntime")]:
        pytest.importorskip(package, reason="a peer that runs graphs")
    case = replace(PLAIN, causal=causal)
    inputs = make_inputs(np, case)
    operators = peers_runtimes.OPERATORS[: 2 + causal] if name == "onnxruntime" else ("scaled_dot_product_attention",)
    for operator in operators:  # each one is the fastest once
        monkeypatch.setattr(peers_runtimes, "OPERATORS", (operator,))
        contender = peers.ADAPTERS[name](case, inputs)
        for _ in range(2):
            errors = Check(case, inputs).errors("forward", contender.calls["forward"]())
            assert not errors["out"].wrong
        assert contender.plans == {"forward": operator}


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_runtimes_of_graphs_take_plain_float32(name):
    for case, reason in ((SMALL, "no grouped heads"), (replace(PLAIN, dtype="float64"), "in float32")):
        with pytest.raises(Absent, match=reason):
            peers.ADAPTERS[name](case, make_inputs(np, case))


@pytest.mark.parametrize("case", OPTIONAL, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["cuflash", "cuflash-dscale"])
def test_contenders_with_options_are_right(name, case):
    """And would be wrong by the check without any one of them."""
    inputs = make_inputs(np, case)
    contender, check = peers.ADAPTERS[name](case, inputs), Check(case, inputs)
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
    values["function"] = "distance"
    for option, words in OPTIONS.items():
        changes: dict[str, Any] = {option: values.get(option, True)} | ({"causal": True} if option == "window" else {})
        if option == "is_aligned":
            changes = {"causal": True, "seqlen_k": PLAIN.seqlen_k + 8}
        case = replace(PLAIN, **changes)
        assert case.options == (option,)
        if option not in takes:
            with pytest.raises(Absent, match=f"^is run without {words}$"):
                peers.ADAPTERS[name](case, make_inputs(np, case))


def test_contenders_with_some_of_the_cores(monkeypatch):
    asked: list[int] = []

    def record_cores() -> tuple[Any, ...]:
        asked.append(count_cores())
        return ()

    inputs = make_inputs(np, PLAIN)
    monkeypatch.setattr(environment, "cores", lambda: 4)
    contender = peers.ADAPTERS["cuflash-threads2"](PLAIN, inputs)
    monkeypatch.setattr(peers, "cuflash", lambda *_: Contender({"forward": record_cores}))
    for count in (1, 2):
        peers.ADAPTERS[f"cuflash-threads{count}"](PLAIN, inputs).calls["forward"]()
    assert asked == [1, 2] and contender.plans
    with pytest.raises(Absent, match=r"^needs more than 4 cores$"):
        peers.ADAPTERS["cuflash-threads4"](PLAIN, inputs)


def test_contenders_of_an_instruction_set(monkeypatch):
    used: list[str] = []

    def record_processor() -> tuple[Any, ...]:
        used.append(core.processor())
        return ()

    inputs = make_inputs(np, PLAIN)
    monkeypatch.setattr(core, "instruction_sets", lambda: {"AVX-512": 0, "AVX2": 3})
    monkeypatch.setattr(core, "processor", lambda: f"{core.SKIPPED_INSTRUCTION_SETS} left out")
    monkeypatch.setattr(peers, "cuflash", lambda *_: Contender({"forward": record_processor}))
    peers.ADAPTERS["cuflash-avx2"](PLAIN, inputs).calls["forward"]()
    assert used == ["3 left out"] and core.SKIPPED_INSTRUCTION_SETS == 0
    monkeypatch.setattr(core, "instruction_sets", lambda: {"NEON": 0})
    with pytest.raises(Absent, match=r"^needs the compiled core with AVX2$"):
        peers.ADAPTERS["cuflash-avx2"](PLAIN, inputs)


@pytest.mark.parametrize("name", ["cuflash-sm75", "cuflash-sm80"])
def test_contenders_by_the_kernels_for_another_device(name, fake_cupy, monkeypatch):
    """Plans are for its compute capability, and each pass is bound and compiled when it is first called."""
    case, bound = Case(head_dim=64, seqlen_q=256, batch=1, num_heads=2, dtype="float16", causal=True), []

    def trials(pass_, options, arrays, random):
        q, k, v = (abstract(arrays[x].shape, case.dtype) for x in "qkv")
        plan = choose_plan(make_problem(options, q, k, v), DeviceSpec.for_arch("9.0"), pass_)

        def call_by(plan):
            bound.append((pass_, plan, set(arrays)))
            return lambda: ("out", "lse") if pass_ is FORWARD else ("dq", "dk", "dv")

        return (plan,), call_by

    launch: Any = types.ModuleType("cuflash.gpu.backend")
    launch.trials = trials
    monkeypatch.setitem(sys.modules, "cuflash.gpu.backend", launch)
    monkeypatch.setattr(cuflash.gpu, "backend", launch, raising=False)
    contender = peers.ADAPTERS[name](case, make_inputs(fake_cupy, case))
    assert bound == [] and list(contender.plans) == ["forward", "backward"]
    for _ in range(2):
        assert contender.calls["backward"]() == ("dq", "dk", "dv")
        assert contender.calls["forward"]() == ("out",)
    assert [pass_ for pass_, _, _ in bound] == [FORWARD, BACKWARD]
    for pass_, plan, arrays in bound:
        assert arrays == {"q", "k", "v"} | ({"dout", "out", "lse"} if pass_ is BACKWARD else set())
        assert (plan.pass_, plan.device.arch, plan.device.compiled_for) == (pass_, int(name[-2:]), 90)
        assert {kernel.target for kernel in plan.kernels} == {"sm_90"}


def test_refusals_name_every_option():
    case = replace(PLAIN, softcap=1.0, mask="qk", sinks=True)
    refuse(case, *OPTIONS)
    refuse(case, "softcap", "mask", "sinks")
    with pytest.raises(Absent, match=r"^is run without a soft cap and sinks$"):
        refuse(case, "mask")


def test_the_suite_of_options_has_every_option():
    suite = SUITES["options"]
    assert {option for case in suite.cases for option in case.options} == set(SUFFIXES) - {"function"}
    for case in suite.cases:
        assert (case.batch, case.seqlen_q, case.num_heads * case.head_dim, len(case.options) <= 1) == (4, 4096, 2048, 1)
    for name, cases in suite.only.items():
        assert name in suite.peers and set(cases) < set(suite.cases)
    assert [case.options for case in suite.only["cuflash-dbias"]] == 6 * [("bias",)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_gradients_beside_packed_documents(name):
    case = replace(PLAIN, function=name, causal=True)
    inputs = make_inputs(np, case)
    check = Check(case, inputs)
    for contender in ("cuflash-gradients", "cuflash-packed"):
        if FUNCTIONS[name].is_mask == (contender == "cuflash-gradients"):
            with pytest.raises(Absent):
                peers.ADAPTERS[contender](case, inputs)
            continue
        made = peers.ADAPTERS[contender](case, inputs)
        for pass_ in ("backward", "forward"):
            results = tuple(made.to_array(x) for x in made.calls[pass_]())
            assert not any(error.wrong for error in check.errors(pass_, results).values())
    assert peers.ADAPTERS["cuflash-plain"](case, inputs).calls["forward"]() == ()


def test_the_flops_of_documents_are_those_of_their_pairs():
    case = Case(head_dim=64, seqlen_q=1024, batch=2, num_heads=4)
    assert 8 * replace(case, function="documents").flops("forward") == case.flops("forward")


def test_the_flops_of_a_window_are_those_of_its_pairs():
    case = Case(head_dim=64, seqlen_q=4096, batch=4, num_heads=32, causal=True, window=1024)
    i, j = np.ogrid[:4096, :4096]
    assert case.flops("forward") == 4 * 4 * 32 * 64 * int(((j <= i) & (j > i - 1024)).sum())
    assert replace(case, window=9999).flops("forward") == 4 * 4 * 32 * 64 * (4096 * 4097 // 2)
    for queries, window in ((1, 1024), (100, 1024), (3000, 1100), (1, 9999), (100, 4090)):
        few = replace(case, seqlen_q=queries, seqlen_k=4096, window=window)
        pairs = (j <= i) & (j > i - window)
        assert few.flops("forward") == 4 * 4 * 32 * 64 * int(pairs[-queries:].sum())


@pytest.mark.parametrize("changes", [{"alibi": True}, {"causal": True}, {"causal": True, "window": 9}, {"bias": "hqk"}])
def test_few_queries_stand_at_the_last_keys(changes):
    case = Case(head_dim=8, seqlen_q=3, seqlen_k=40, batch=1, num_heads=4, num_heads_kv=2, dtype="float32", **changes)
    inputs = make_inputs(np, case)
    out = peers.cuflash(case, inputs).calls["forward"]()
    assert Check(case, inputs).errors("forward", out)["out"].within_rule


def test_the_suite_of_few_queries_has_every_option():
    suite = SUITES["decode-options"]
    assert {option for case in suite.cases for option in case.options} >= set(SUFFIXES) - {"function"}
    assert {case.dtype for case in suite.cases if not case.options} == {"bfloat16", "float16", "float32", "float64"}
    assert {(case.seqlen_q, case.seqlen_k) for case in suite.cases} == {(1, 131072)}


def test_suites_of_head_dimensions_and_devices():
    small, wide = SUITES["small-dims"].cases, SUITES["wide-dims"].cases
    assert len({(case.batch, case.num_heads, case.seqlen_q) for case in small}) == 1
    assert {case.head_dim for case in small} == {2, 3, 8, 16, 32}
    assert {(case.head_dim, case.head_dim_v) for case in wide} >= {(256, 256), (320, 320), (512, 512), (576, 512)}
    assert {case.head_dim for case in wide} >= {768, 1024}
    for head_dim in (64, 128, 256):
        found = [case for case in SUITES["architectures"].cases if case.head_dim == head_dim]
        assert [case.causal for case in found] == [False, True] and {case.dtype for case in found} == {"float16"}
    latent = SUITES["decode-wide"].cases
    assert [case.v_in_k for case in latent] == [False, True] * (len(latent) // 2)
    assert (128, 1, 576, 512) in {(x.num_heads, x.num_heads_kv, x.head_dim, x.head_dim_v) for x in latent}


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
        errors = Check(case, inputs).errors(pass_, results)
        assert not any(error.wrong for error in errors.values())
    for other, reason in (("naive", "without a bias"), ("fa2", "without a bias")):
        with pytest.raises(Absent, match=reason):
            peers.ADAPTERS[other](case, inputs)


@pytest.mark.parametrize("name", ["cuflash-dbias", "cuequivariance", "efficient-dbias", "math-dbias"])
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
    check, contender = Check(case, inputs), peers.ADAPTERS["cuflash-packed"](case, inputs)
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
    **{
        f"cuflash-{name}": set()
        for name in ("bound", "steps", "bound-steps", "kv-lengths", "pages16", "pages64", "pages256")
    },
    "cuflash-packed": {"lengths"},
    "naive": {"mask", "dropout"},
    "cudnn": {"bias", "mask", "dropout"},
    "fa2": {"window", "dropout"},
    "fa3": {"softcap", "window"},
    "fa3-jax": {"window"},
    "fa4": {"softcap", "window"},
    "cudnn-flex": {"blocks_kept", "window", "function"},
    "efficient": {"bias", "mask", "dropout"},
    "efficient-dbias": {"bias", "mask"},
    "cuequivariance": {"bias", "mask"},
    "math-dbias": {"bias"},
    "flex": {"blocks_kept", "softcap", "alibi", "bias", "mask", "window", "function"},
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


@pytest.mark.parametrize("changes", [{"bias": "hqk"}, {"bias": "hqk", "mask": "bk"}])
def test_cuequivariance_gets_its_axes(changes, monkeypatch):
    """(entries, rows, heads, seqlen, dim), of which the rows are the batch; on a stand-in that checks them."""
    torch = pytest.importorskip("torch", reason="a torch peer")
    case = replace(PLAIN, batch=3, **changes)
    n, d, heads = case.seqlen_q, case.head_dim, case.num_heads

    def triangle_attention(q, k, v, bias, mask):
        assert q.shape == k.shape == v.shape == (1, 3, heads, n, d) and bias.shape == (1, 1, heads, n, n)
        scores = q @ k.mT * d**-0.5 + bias
        if mask is not None:
            assert mask.shape == (1, 3, 1, 1, n)
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v

    module: Any = types.ModuleType("cuequivariance_ops_torch")
    module.triangle_attention = triangle_attention
    monkeypatch.setitem(sys.modules, module.__name__, module)
    inputs = make_inputs(np, case)
    calls = peers_torch.cuequivariance_calls(torch, case, *as_tensors(torch, inputs))
    for pass_ in ("forward", "backward"):
        results = tuple(x.detach().numpy() for x in calls[pass_]())
        assert not any(error.wrong for error in Check(case, inputs).errors(pass_, results).values())
    for other in (replace(case, bias="qk", mask=""), replace(case, mask="qk")):
        with pytest.raises(Absent, match="needs a bias of axes hqk"):
            peers_torch.cuequivariance_calls(torch, other, None, None, None, None, {})


def dense(q, k, v, pairs):
    """Attention of (batch, seqlen, heads, dim) over the visible pairs; queries that see no key get zeros."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~pairs, float("-inf"))
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def agrees(calls, case, inputs):
    """Both passes of a peer are right."""
    for pass_ in ("forward", "backward"):
        results = tuple(x.detach().numpy() for x in calls[pass_]())
        assert not any(error.wrong for error in Check(case, inputs).errors(pass_, results).values())


@pytest.mark.parametrize("causal", [False, True])
def test_fold_attention_gets_its_layout(causal, monkeypatch):
    torch = pytest.importorskip("torch", reason="a torch peer")

    def fold_attn_func(q, k, v, *, causal):
        pairs = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        return dense(q, k, v, pairs.tril() if causal else pairs)

    module: Any = types.ModuleType("fold_attention")
    module.fold_attn_func = fold_attn_func
    monkeypatch.setitem(sys.modules, module.__name__, module)
    case = replace(PLAIN, batch=2, causal=causal)
    inputs = make_inputs(np, case)
    agrees(peers_torch.fold_calls(torch, case, *as_tensors(torch, inputs)), case, inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 7},
        {"function": "documents"},
        {"function": "documents", "causal": True},
        {"blocks_kept": 0.5, "seqlen_q": 512, "seqlen_k": 640},
    ],
    ids=str,
)
def test_cudnn_gets_intervals(changes, monkeypatch):
    torch = pytest.importorskip("torch", reason="a torch peer")

    def create_mask_plan(ends, q, k, v, *, build_backward):
        assert build_backward and ends.dtype == torch.int32 and ends.is_contiguous() and ends.shape[1] % 2 == 1
        assert all(x.requires_grad for x in (q, k, v)) and ends.shape[::2] == (1, q.shape[0] * q.shape[1])
        keys = torch.arange(k.shape[1])
        bounds = [torch.zeros_like(ends[0, 0]), *ends[0]]
        parts = zip(bounds[::2], bounds[1::2], strict=True)
        pairs = sum((keys >= low[:, None]) & (keys < high[:, None]) for low, high in parts)
        return (pairs > 0).view(q.shape[0], 1, q.shape[1], k.shape[1])

    module: Any = types.ModuleType("cudnn.flex_attention")
    module.create_mask_plan = create_mask_plan
    module.flex_attn_func = lambda q, k, v, *, mask_plan: dense(q, k, v, mask_plan)
    monkeypatch.setitem(sys.modules, "cudnn", types.ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    case = replace(PLAIN, batch=2, **changes)
    inputs = make_inputs(np, case)
    agrees(peers_torch.cudnn_flex_calls(torch, case, *as_tensors(torch, inputs)), case, inputs)
    with pytest.raises(Absent, match="no functions of scores"):
        peers_torch.cudnn_flex_calls(torch, replace(PLAIN, function="box"), *as_tensors(torch, inputs))


@pytest.mark.one_in(1)
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
    assert not Check(case, inputs).errors("forward", (out.numpy(),))["out"].wrong


@pytest.mark.parametrize("changes", [{"mask": "qk"}, {"mask": "bk"}, {"bias": "hq"}, {"bias": "bk", "mask": "qk"}])
def test_masks_are_bias_terms_to_kernels_that_have_no_others(changes):
    torch = pytest.importorskip("torch", reason="a torch peer")
    case = replace(PLAIN, **changes)
    inputs = make_inputs(np, case)
    q, k, v, _, terms = as_tensors(torch, inputs)
    bias = peers_torch.additive(torch, case, terms, q.dtype)
    assert bias.shape == (2, 2, 24, 24)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).numpy()
    assert not Check(case, inputs).errors("forward", (out,))["out"].wrong
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

    adapter = peers_torch.on_torch(make_calls, "dropout", device="cpu")
    for of, expected in ((case, 0), (PLAIN, 1)):
        assert len(adapter(of, make_inputs(np, of)).calls["forward"]()) == expected
    assert len(ran) == 2


@pytest.mark.parametrize("name", ["cudnn", "fa2", "efficient", "flex", "empty-launch", "jax-pallas", "fa3-jax"])
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
        q, k, v = (x.astype("float32").transpose(0, 2, 1, 3) for x in (q, k, v))
        problem = make_problem(Options(causal=config.causal, scale=1.0), q, k, v)
        return reference.forward(problem, q, k, v)[0].transpose(0, 2, 1, 3).astype("float16")

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
    assert not any(error.wrong for error in Check(case, inputs).errors("forward", results).values())


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


@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"causal": True, "window": 9}], ids=str)
def test_flash_attention_3_in_jax_gets_its_layout_and_window(fake_cupy, monkeypatch, changes):
    """On a stand-in for the library, and JAX's gradients of it."""
    jax = pytest.importorskip("jax", reason="JAX")
    case = Case(**{"head_dim": 16, "seqlen_q": 40, "batch": 2, "num_heads": 3, "dtype": "float32"} | changes)

    def flash_mha(q, k, v, is_causal, window_size):
        assert q.shape == k.shape == v.shape == (case.batch, case.seqlen_q, case.num_heads, case.head_dim)
        assert window_size == ((case.window - 1, 0) if case.window else (-1, -1))
        scores = jax.numpy.einsum("bihd,bjhd->bhij", q, k) * case.head_dim**-0.5
        i, j = jax.numpy.mgrid[: case.seqlen_q, : case.seqlen_k]
        hidden = (is_causal & (j > i)) | (j < i - case.window + 1 if case.window else False)
        weights = jax.nn.softmax(jax.numpy.where(hidden, -jax.numpy.inf, scores), -1)
        return jax.numpy.einsum("bhij,bjhd->bihd", weights, v)

    library: Any = types.ModuleType("flash_attn3_jax")
    library.flash_mha = flash_mha
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    fake_cupy.from_dlpack = np.from_dlpack
    inputs = replace(make_inputs(np, case), xp=fake_cupy)
    contender = peers.ADAPTERS["fa3-jax"](case, inputs)
    assert contender.wait is jax.block_until_ready
    for pass_ in ("forward", "backward"):
        results = tuple(contender.to_array(x) for x in contender.calls[pass_]())
        assert not any(error.wrong for error in Check(case, inputs).errors(pass_, results).values())


def test_every_contender_has_a_title_and_suites_name_contenders():
    assert set(report.TITLES) == set(peers.ADAPTERS)
    for suite in SUITES.values():
        assert set(suite.peers) <= set(peers.ADAPTERS)
