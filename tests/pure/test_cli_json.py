"""The JSON of commands: strict, alone on standard output, with the keys that docs/commands.md has."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import FlashAttention, __version__, testing
from cuflash.cli import documents, here
from cuflash.cli.main import main
from cuflash.emulator import building, passes
from cuflash.gpu import compiler
from cuflash.gpu.nvrtc import NvrtcNotFoundError
from cuflash.plan import DeviceSpec
from cuflash.spec.passes import PASSES

PAGE = (Path(cuflash.__file__).parents[1] / "docs" / "commands.md").read_text()
FREE = {"info": ("packages", "gpus[].dtypes"), "plan": ("plans[].scratch",), "check": ()}  # whose keys are names


def refuse(name):
    raise ValueError(f"{name} is no JSON")


@pytest.fixture
def document(capsys, monkeypatch):
    """Runs a command without a GPU, by default, and returns its exit code and its document."""
    monkeypatch.setattr(here, "find_gpu", lambda: (None, "none in this test"))

    def run(command):
        code = main(f"{command} --json".split())
        output, error = capsys.readouterr()
        assert error == ""
        found = json.loads(output, parse_constant=refuse)
        assert (found["command"], found["version"]) == (command.split()[0], __version__)
        return code, found

    return run


def keys_of(value, free, path=""):
    """Keys of a document: `plans[].pass` is that of the objects in a list."""
    if isinstance(value, dict) and path not in free:
        return {x for name, y in value.items() for x in keys_of(y, free, f"{path}.{name}".strip("."))} | {path}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {x for y in value for x in keys_of(y, free, f"{path}[]")}
    return {path}


def documented(command):
    (table,) = re.findall(rf"^\| key of `{command} --json` \|.*\n\|.*\n((?:\|.*\n)*)", PAGE, re.MULTILINE)
    return {key for row in table.splitlines() for key in re.findall(r"`([^`]+)`", row.split("|")[1])}


def assert_documented(command, found, missing=()):
    keys = keys_of(found, FREE[command]) - {"", "command", "version"}
    parents = {parent for key in keys for parent in (key.rpartition(".")[0], key.rpartition("[]")[0])}
    parents |= {f"{key}[]" for key in parents}
    of_page = documented(command)
    assert keys - parents - {"cuda.driver", "cuda.runtime", "gpus"} <= of_page
    assert of_page - keys == set(missing)


def test_info(document):
    code, found = document("info")
    assert (code, found["why_no_gpu"], found["gpus"], found["cuda"]) == (0, "none in this test", [], None)
    assert found["cpu"]["threads"] >= 1 and found["cache"]["limit_bytes"] > 0
    assert_documented("info", found, {key for key in documented("info") if key.startswith("gpus[]")})


def test_info_of_a_device_and_without_a_compiler(document, monkeypatch):
    """With a stand-in for CuPy that has two devices."""
    properties = {"name": b"H200", "major": 9, "minor": 0}
    sizes = ("totalGlobalMem", "multiProcessorCount", "sharedMemPerBlockOptin", "sharedMemPerMultiprocessor")
    properties |= {name: 2**20 for name in (*sizes, "l2CacheSize")}
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2,
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12090,
        getDeviceProperties=lambda index: properties,
    )
    device = SimpleNamespace(device_spec=lambda index: DeviceSpec.for_arch("9.0"))

    def missing():
        raise NvrtcNotFoundError("NVRTC is\nmissing")

    monkeypatch.setattr(here, "find_gpu", lambda: (SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), ""))
    monkeypatch.setitem(sys.modules, "cuflash.gpu.device", device)
    monkeypatch.setattr(compiler, "nvrtc_version", missing)
    _, found = document("info")
    assert [(gpu["name"], gpu["capability"], gpu["sms"]) for gpu in found["gpus"]] == 2 * [("H200", "9.0", 2**20)]
    assert found["gpus"][0]["dtypes"]["float64"] == "by sm80 kernels"
    assert found["cuda"] == {"driver": 13000, "runtime": 12090} and found["why_no_gpu"] is None
    assert found["nvrtc"] == {"version": None, "archs": [], "why_not": "NVRTC is missing"}
    assert_documented("info", found)


@pytest.fixture
def without_compiler(monkeypatch):
    def missing(spec):
        raise NvrtcNotFoundError("missing")

    monkeypatch.setattr(compiler, "compile_spec", missing)


ARGUMENTS = st.fixed_dictionaries(
    {
        "--arch": st.lists(st.sampled_from(["8.0", "9.0", "12.0"]), min_size=1, max_size=2, unique=True),
        "--pass": st.lists(st.sampled_from([str(x) for x in PASSES]), min_size=1, max_size=2, unique=True),
        "--dtype": st.lists(st.sampled_from(["float16", "bfloat16", "float32"]), min_size=1, max_size=2, unique=True),
        "--seqlen": st.integers(200, 9000).map(lambda n: [str(n)]),
        "--window": st.sampled_from([["none,none"], ["100,0"], ["none,7"]]),
        "--head-dim": st.just(["64"]),
    }
)


@given(arguments=ARGUMENTS)
def test_plans_are_those_of_the_library(arguments):
    """A plan of every pass of every problem on every device, with the numbers of `LaunchPlan`."""
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text, **how: printed.append(text))
        patch.setattr("cuflash.cli.plans.resources_of", lambda kernel: None)
        assert main(["plan", "--json", *(x for name, values in arguments.items() for x in (name, *values))]) == 0
    found = json.loads("".join(printed), parse_constant=refuse)["plans"]
    expected = [
        (d, a, p)
        for d in arguments["--dtype"]
        for a in arguments["--arch"]
        for p in map(str, PASSES)
        if p in arguments["--pass"]
    ]
    assert [(x["problem"]["dtype"], x["capability"], x["pass"]) for x in found] == expected
    for x in found:
        p = x["problem"]
        left, right = arguments["--window"][0].split(",")
        assert p["window"] == [None if side == "none" else int(side) for side in (left, right)]
        assert p["seqlen_q"] == p["seqlen_k"] == int(arguments["--seqlen"][0]) and p["options"] == []
        assert p["tangents"] == (["q", "k", "v"] if "jvp" in x["pass"] else [])
        assert x["extra_bytes"] >= sum(x["scratch"].values()) and x["kernels"]
        assert x["memory_model"] is None or x["memory_model"]["least_bytes"] > 0


def test_keys_of_plans(document, without_compiler):
    of_cpu = {f"plans[].{name}" for name in ("core", "why_not")}
    code, found = document("plan --arch 9.0 --causal --bias --kv-lengths --num-heads 4 --num-heads-kv 2")
    assert code == 0
    assert found["plans"][0]["problem"]["options"] == ["bias", "kv_lengths"]
    assert found["plans"][0]["problem"]["window"] == [None, 0]
    assert found["plans"][0]["kernels"][0]["registers"] is None
    assert_documented("plan", found, of_cpu)
    code, found = document("plan --seqlen 100")
    assert [x["backend"] for x in found["plans"]] == ["cpu", "cpu"] and found["why_no_gpu"] == "none in this test"
    assert found["plans"][0]["why_not"] is None and found["plans"][0]["core"]
    assert keys_of(found, FREE["plan"]) & of_cpu == of_cpu


def test_registers_of_plans(document):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is needed to compile")
    _, found = document("plan --arch 8.0 --head-dim 64 --pass forward")
    (kernel,) = found["plans"][0]["kernels"]
    assert 0 < kernel["registers"] <= 255 and kernel["spill_bytes"] >= 0


def test_check(document, monkeypatch):
    cases = testing.self_test_cases
    monkeypatch.setattr(testing, "self_test_cases", lambda seed, **how: list(cases(seed, **how))[:2])
    code, found = document("check --backend cpu")
    assert (code, found["passed"], found["failed"], found["not_served"]) == (0, 4, 0, 0)
    assert [x["tangents"] for x in found["checks"]] == [False, True] * 2
    assert all(0 <= x["error"] <= x["tolerance"] for x in found["checks"])
    of_emulator = {f"checks[].{name}" for name in ("kernels", "pass", "capability", "seconds")}
    assert_documented("check", found, of_emulator)


def test_check_that_fails(document, monkeypatch):
    cases, wrong = testing.self_test_cases, FlashAttention(scale=0.5).forward
    monkeypatch.setattr(testing, "self_test_cases", lambda seed, **how: list(cases(seed, **how))[:2])
    monkeypatch.setattr(FlashAttention, "forward", lambda self, *args, **keywords: wrong(*args, **keywords))
    code, found = document("check --backend cpu")
    assert (code, found["passed"], found["failed"]) == (1, 2, 2)
    (first, *_) = found["checks"]
    assert (first["verdict"], first["error"], first["result"]) == ("failed", None, None) and "out" in first["detail"]

    def unserved(self, *args, **keywords):
        raise NotImplementedError("q: not here")

    monkeypatch.setattr(FlashAttention, "forward", unserved)
    monkeypatch.setattr(FlashAttention, "jvp", unserved)
    code, found = document("check --backend cpu")
    assert (code, found["not_served"]) == (1, 4) and found["checks"][0]["detail"] == "q: not here"


def test_check_in_the_emulator(document, monkeypatch):
    """With a stand-in for the kernels."""
    monkeypatch.setattr(building, "find_compiler", lambda: "g++")
    monkeypatch.setattr(
        passes,
        "forward",
        lambda problem, arrays, **options: testing.reference.forward(problem, **{name: arrays[name] for name in "qkv"}),
    )
    code, found = document("check --emulate --pass forward --dtype float64 --arch 8.0 --schedule fifo lifo")
    assert code == 0, found
    assert {x["name"].split(",")[0] for x in found["checks"]} == {"fifo", "lifo"}
    assert {(x["pass"], x["capability"], x["verdict"]) for x in found["checks"]} == {("forward", "8.0", "passed")}
    assert_documented("check", found, {f"checks[].{name}" for name in ("tangents", "result", "error", "tolerance")})


@pytest.mark.parametrize(
    "command", ["plan --arch 6.1", "plan --arch 9.0 --num-heads 6 --num-heads-kv 4", "check --causal"]
)
def test_errors_leave_standard_output_empty(capsys, command):
    assert main(f"{command} --json".split()) == 1
    output, error = capsys.readouterr()
    assert output == "" and len(error.splitlines()) == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text('a"\n\u2028', max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.text("cd"), VALUES, max_size=3))
def test_documents_are_strict(content):
    """Whatever floats they have."""
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", printed.append)
        documents.print_document("plan", content)
    json.loads("".join(printed), parse_constant=refuse)
