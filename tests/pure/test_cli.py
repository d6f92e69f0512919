"""The command line: every command does its work, and says in one line what it cannot do."""

import functools
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cuflash
from cuflash import FlashAttention, __version__, testing
from cuflash.arrays.units import in_bytes, in_flops, in_seconds
from cuflash.cli import demo, here, info, rates
from cuflash.cli.main import COMMANDS, main
from cuflash.emulator import EmulationError, building, passes
from cuflash.gpu import compiler, kernel_cache, tuning
from cuflash.gpu.progress import Bar
from cuflash.plan import DeviceSpec
from cuflash.spec.options import Options
from cuflash.spec.passes import PASSES
from cuflash.spec.problem import make_problem

NO_GPU = here.find_gpu()[0] is None
ROOT = Path(cuflash.__file__).parents[1]


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(here, "find_gpu", lambda: (None, "none in this test"))


@pytest.fixture
def without_registers(monkeypatch):
    """NVRTC takes most of the time of a command that shows plans."""
    monkeypatch.setattr(compiler, "with_resources", lambda plan: plan)


def run(capsys, command):
    """Exit code, standard output and standard error of a command in this process."""
    code: int | str | None
    try:
        code = main(command.split())
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "cuflash", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"^ +{name} ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(capsys, name):
    code, output, _ = run(capsys, f"{name} --help")
    assert code == 0
    assert COMMANDS[name][2][1:] in " ".join(output.split())


def test_without_a_command_all_are_listed(capsys):
    code, output, error = run(capsys, "")
    assert (code, error) == (0, "")
    assert all(re.search(rf"^ +{name} ", output, re.MULTILINE) for name in COMMANDS)


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"cuflash {__version__}\n", "")


def start(arguments, **how):
    """A command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "cuflash", *arguments.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


@pytest.mark.one_in(1)
@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize(("command", "code"), [("plan --arch 8.0 --pass forward", 141), ("info", 141), ("--help", 0)])
def test_a_reader_that_goes_is_no_failure(command, code):
    with start(command) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == code


@pytest.mark.one_in(1)
@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize(
    "command", ["info", "plan --arch 8.0", "demo --backend cpu --seqlen 99 --num-heads 1", "--help"]
)
def test_closed_streams_are_no_failure(command, closed):
    shell = f"exec {sys.executable} -m cuflash {command} {closed}"
    done = subprocess.run(["sh", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


@pytest.mark.one_in(1)
@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
@pytest.mark.parametrize("command", ["info", "plan --arch 8.0", "check --quick"])
def test_a_document_needs_standard_output(command):
    shell = f"exec {sys.executable} -m cuflash {command} --json >&-"
    done = subprocess.run(["sh", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    name, said = done.stderr.split(": ", 1)
    assert done.returncode == 1 and name == f"python -m cuflash {command.split()[0]}"
    assert said == "--json: got no standard output, expected one that takes the document\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interruption_is_one_word():
    """As from a terminal, by a signal to a process that is at work; a shell may have told this one to ignore it."""
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with start("demo --backend cpu --seqlen 65536 --num-heads 8", preexec_fn=listens) as process:
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "interrupted\n"
    assert process.returncode == 130


def test_demo(capsys):
    code, output, _ = run(capsys, "demo --backend cpu --seqlen 200 --num-heads 2 --head-dim 16")
    assert code == 0
    assert "causal attention of 2 heads, seqlen 200, head_dim 16, float32" in output
    assert "320 kB" in output  # 2 * 200 * 200 scores
    for row in ("forward", "backward", "out", "lse", "dq", "dk", "dv"):
        assert re.search(rf"^{row} .*\d", output, re.MULTILINE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_demo_in_other_dtypes(capsys, dtype):
    code, output, _ = run(capsys, f"demo --backend cpu --seqlen 100 --num-heads 1 --head-dim 8 --dtype {dtype}")
    assert code == 0, output


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_demo_notices_wrong_results(capsys, monkeypatch, name):
    """A value off by one in a thousand at the last position, which is always sampled, is a failure."""

    def spoiled(method):
        def call(self, *arrays, **results):
            returned = method(self, *arrays, **results)
            if name in results:
                results[name][:, -1] *= 1.001
            return returned

        return call

    monkeypatch.setattr(FlashAttention, "forward", spoiled(FlashAttention.forward))
    monkeypatch.setattr(FlashAttention, "backward", spoiled(FlashAttention.backward))
    code, output, error = run(capsys, "demo --backend cpu --seqlen 100 --num-heads 2 --head-dim 8")
    assert code == 1
    assert re.search(rf"^{name} .*FAILED$", output, re.MULTILINE)
    assert len(error.splitlines()) == 1


def test_demo_measures_the_extra_memory():
    arrays = []
    bar = Bar("forward", total=2)
    cost = demo.measure_on_cpu(lambda part: arrays.append(np.empty(10**6)), [slice(0, 1), slice(1, 2)], bar)
    assert cost.extra_bytes == pytest.approx(16e6, rel=0.01)
    assert bar.done == 2


def test_info(capsys):
    code, output, _ = run(capsys, "info")
    assert code == 0
    rows = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert rows["numpy"] == np.__version__
    assert str(compiler.kernel_directory()) in rows["cuflash"]
    assert str(kernel_cache.cache_directory()) in rows["cache"]
    assert rows["cache"].endswith(f" of at most {in_bytes(kernel_cache.cache_limit())}")


@pytest.mark.parametrize(
    ("arch", "text"),
    [
        ("8.0", "float16, bfloat16, float32, float64 by sm80 kernels"),
        ("9.0", "float16, bfloat16, float32 by sm90 kernels; float64 by sm80 kernels"),
        ("12.0", "float16, bfloat16, float32, float64 by sm80 kernels"),
        ("7.5", "float16, bfloat16, float32 by sm80 kernels; float64 not served: device: no tile of float64 at head"),
        ("6.1", "float16, bfloat16, float32, float64 not served: device: got compute capability 6.1, expected 7.0 or"),
    ],
)
def test_kernels_that_serve_a_device(arch, text):
    device = replace(DeviceSpec.for_arch("7.0"), arch=61) if arch == "6.1" else DeviceSpec.for_arch(arch)
    p = dict.fromkeys(("memory_bytes", "sms", "shared_bytes_per_block", "shared_bytes_per_sm", "l2_bytes"), 1)
    words = info.device_in_words({"name": "GPU", "capability": arch, "dtypes": info.served(device), **p})
    assert words.startswith(f"GPU, compute capability {arch} ({text}")


def test_info_of_a_device(capsys, monkeypatch):
    """With a stand-in for CuPy that has one device."""
    properties = {
        "name": b"H200",
        "major": 9,
        "minor": 0,
        "totalGlobalMem": 150e9,
        "multiProcessorCount": 132,
        "sharedMemPerBlockOptin": 232448,
        "sharedMemPerMultiprocessor": 233472,
        "l2CacheSize": 60e6,
    }
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 1,
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        getDeviceProperties=lambda index: properties,
    )
    device = SimpleNamespace(device_spec=lambda index: DeviceSpec.for_arch("9.0"))
    monkeypatch.setattr(here, "find_gpu", lambda: (SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), ""))
    monkeypatch.setitem(sys.modules, "cuflash.gpu.device", device)
    code, output, _ = run(capsys, "info")
    assert code == 0
    assert re.search(
        r"^GPU 0 +H200, compute capability 9.0 \(float16, bfloat16, float32 by sm90 kernels; ", output, re.M
    )


# ---- cache -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A cache of two kernels, of 3 kB, and of one tuned problem."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUFLASH_CACHE_BYTES", "5000000")
    monkeypatch.setattr(tuning, "_recalled", {})
    for name, size in (("a.cubin", 1000), ("b.cubin", 1500), ("a.entry", 250), ("b.entry", 250)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "c.json").write_bytes(bytes(10))
    return tmp_path


def names_in(directory):
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def test_cache(capsys, store):
    code, output, error = run(capsys, "cache")
    assert (code, error) == (0, "")
    assert dict(line.split(maxsplit=1) for line in output.splitlines()) == {
        "directory": str(store),
        "kernels": "2 kernels, 3 kB of at most 5 MB",
        "tuning": "1 tuned problem, not counted above",
    }
    assert len(names_in(store)) == 5
    assert "2 kernels, 3 kB of at most 5 MB" in run(capsys, "info")[1]


@pytest.mark.parametrize(
    ("options", "output", "left"),
    [
        ("", "removed 2 kernels, 3 kB\n", ["c.json"]),
        ("--tuned", "removed 2 kernels, 3 kB, and 1 tuned problem\n", []),
    ],
)
def test_the_cache_is_cleared(capsys, store, options, output, left):
    assert run(capsys, f"cache --clear {options}") == (0, output, "")
    assert names_in(store) == left
    assert run(capsys, "cache --clear") == (0, "removed 0 kernels, 0 B\n", "")


def test_kernels_of_the_emulator_are_counted_and_removed_too(capsys, store):
    (store / "emulated").mkdir()
    for name in ("a.so", "b.so"):
        (store / "emulated" / name).write_bytes(bytes(2000))
    assert "emulator   2 kernels, 4 kB, not counted above\n" in run(capsys, "cache")[1]
    assert run(capsys, "cache --clear") == (0, "removed 2 kernels, 3 kB, and 2 kernels of the emulator\n", "")
    assert names_in(store) == ["c.json"]


def test_a_cache_that_is_not_there(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "absent"))
    code, output, error = run(capsys, "cache")
    assert (code, error) == (0, "")
    assert "0 kernels, 0 B of at most" in output and "0 tuned problems" in output
    assert run(capsys, "cache --clear --tuned") == (0, "removed 0 kernels, 0 B, and 0 tuned problems\n", "")
    assert not (tmp_path / "absent").exists()


# ---- plan, compile, check --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["8.0", "8.6", "9.0", "12.0", "sm_89"])
@pytest.mark.parametrize("options", ["", "--causal", "--causal top_left --bias --mask --kv-lengths --alibi-slopes"])
@pytest.mark.usefixtures("without_registers")
def test_plan_for_a_device_that_is_not_here(capsys, arch, options):
    code, output, _ = run(capsys, f"plan --arch {arch} --head-dim 64 256 {options}")
    assert code == 0
    digits = arch.removeprefix("sm_").replace(".", "")
    assert output.count(f"compute capability {digits[:-1]}.{digits[-1]}") == 4  # two dimensions, two passes
    assert "forward pass" in output and "backward pass" in output


@pytest.mark.parametrize(("short", "arch"), [("8", "8.0"), ("9", "9.0"), ("12", "12.0")])
@pytest.mark.usefixtures("without_registers")
def test_a_major_version_is_a_compute_capability(capsys, short, arch):
    assert run(capsys, f"plan --arch {short}") == run(capsys, f"plan --arch {arch}")


def test_plan_of_one_pass(capsys):
    _, output, _ = run(capsys, "plan --arch 9.0 --pass backward --deterministic --window 100,none")
    assert "backward pass" in output and "forward pass" not in output
    assert re.search(r"\d+ registers", output) or importlib.util.find_spec("cuda.bindings.nvrtc") is None


@pytest.mark.usefixtures("without_registers")
def test_plan_without_values(capsys):
    command = "plan --arch 9.0 --dtype float32 --head-dim 3 64 --head-dim-v 0 --pass forward"
    sources = re.findall(r"kernel (\w+forward\w*)_float32_d(\d+)x0_", run(capsys, command)[1])
    assert sources == [("sm80_forward_narrow", "3"), ("sm90_forward_fp32", "64")]


@pytest.mark.usefixtures("without_registers")
def test_plan_of_passes_with_tangents(capsys):
    command = "plan --arch 8.0 9.0 --causal --pass jvp backward_jvp"
    code, output, _ = run(capsys, command)
    assert code == 0
    passes_of_plans = re.findall(r"^(\w+) pass on", output, re.MULTILINE)
    assert passes_of_plans == ["jvp", "backward_jvp"] * 2
    assert output.count("  memory model: ") == 4 and " ".join(output.split()).count("; tangents of q, k, v ") == 4
    with_q_alone = run(capsys, f"{command} --tangents q")[1]
    assert [with_q_alone.count(f"kernel {arch}_jvp") for arch in ("sm80", "sm90")] == [1, 1] and with_q_alone != output


def test_plan_of_tangents_without_a_gpu(capsys, without_gpu):
    _, output, _ = run(capsys, "plan --pass forward jvp --seqlen 1024 --num-heads 4 --head-dim 64 --tangents q")
    text = " ".join(output.split())
    assert re.match(r"CPU: forward about [\d.]+ \w?s, jvp about [\d.]+ \w?s, extra memory linear in seqlen path ", text)
    assert "; jvp by " in text and " work 1.07 GFLOP forward, 2.15 GFLOP jvp problem " in text
    assert "tangents of q," in text
    assert "tangents" not in run(capsys, "plan --seqlen 64 --num-heads 4 --head-dim 64")[1]


def test_plan_without_a_gpu_is_that_of_the_cpu(capsys, without_gpu):
    code, output, _ = run(capsys, "plan --dtype float64 --seqlen 100 --seqlen-k 300 --num-heads 6 --num-heads-kv 2")
    assert code == 0
    assert "CPU" in output and "100 x 300" in output
    last = f"there is no GPU here: none in this test; {here.NAME_ONE}"
    assert " ".join(output.split("\n\n")[-1].split()) == last


def test_compile_fills_the_cache_and_reports(capsys, monkeypatch, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is needed to compile")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    code, output, _ = run(capsys, "compile --arch 8.0 9.0 --head-dim 64 --pass forward")
    assert code == 0
    rows = [line.split() for line in output.splitlines() if line.startswith("sm_")]
    assert [row[0] for row in rows] == ["sm_80", "sm_90a"]
    assert all(0 < int(row[2]) <= 255 for row in rows)
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_check(capsys, monkeypatch):
    cases = testing.self_test_cases
    monkeypatch.setattr(testing, "self_test_cases", lambda seed, **how: list(cases(seed, **how))[:2])
    code, output, error = run(capsys, "check --backend cpu")
    assert (code, error) == (0, "")
    assert output.endswith("\n4 passed\n")
    assert output.count("plain, with tangents") == 2


def test_columns_of_check_do_not_run_together(capsys, monkeypatch):
    long_name, cases = "a name that is longer than any other one is now", testing.self_test_cases

    def renamed(seed, quick):
        found = ((name, case) for name, case in cases(seed) if name == "one query")
        return [(name if n else long_name, case) for n, (name, case) in enumerate(found)]

    monkeypatch.setattr(testing, "self_test_cases", renamed)
    _, output, _ = run(capsys, "check --backend cpu")
    details = [re.search(r"\w+ closest to its bound", line) for line in output.splitlines()[1:-1]]
    assert len({found and found.start() for found in details}) == 1 and all(details)
    assert f"{long_name}  " in output


def test_a_quick_check_has_a_few_cases_in_every_dtype(capsys):
    code, output, _ = run(capsys, "check --backend cpu --quick")
    assert code == 0
    rows = [line.split() for line in output.splitlines() if line.startswith("passed")]
    assert output.endswith(f"\n{len(rows)} passed\n")
    assert {row[1] for row in rows} == {"float16", "bfloat16", "float32", "float64"}
    assert len([row for row in rows if "tangents" not in row]) <= len(list(testing.self_test_cases())) / 4


def test_check_needs_no_hypothesis():
    code = "import sys; sys.modules['hypothesis'] = None; from cuflash.cli.main import main; "
    code += "from cuflash import testing; every = testing.self_test_cases; "
    code += "testing.self_test_cases = lambda *seed, **how: [*every(*seed, **how)][:2]; sys.exit(main())"
    command = [sys.executable, "-c", code, "check", "--backend", "cpu", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_check_notices_wrong_results(capsys, monkeypatch):
    cases = testing.self_test_cases
    monkeypatch.setattr(testing, "self_test_cases", lambda seed, **how: list(cases(seed, **how))[:3])
    wrong = FlashAttention(scale=0.5).forward
    monkeypatch.setattr(FlashAttention, "forward", lambda self, *args, **keywords: wrong(*args, **keywords))
    code, output, _ = run(capsys, "check --backend cpu")
    assert code == 1
    assert output.endswith("\n3 passed, 3 FAILED\n")


@pytest.mark.parametrize("method", ["jvp", "backward_jvp"])
def test_check_notices_wrong_tangents(capsys, monkeypatch, method):
    cases = testing.self_test_cases
    monkeypatch.setattr(testing, "self_test_cases", lambda seed, **how: list(cases(seed, **how))[:3])
    wrong = getattr(FlashAttention(scale=0.5), method)
    monkeypatch.setattr(FlashAttention, method, lambda self, *args, **keywords: wrong(*args, **keywords))
    code, output, _ = run(capsys, "check --backend cpu")
    assert code == 1
    assert output.endswith("\n3 passed, 3 FAILED\n")
    assert re.findall(r"^FAILED +\w+ +(.*?)  ", output, re.MULTILINE) == ["plain, with tangents"] * 3


def test_the_self_test_has_every_option_and_dtype():
    from cuflash.spec.inputs import NAMES

    cases = [case for _, case in testing.self_test_cases()]
    assert {case.dtype for case in cases} == {"float16", "bfloat16", "float32", "float64"}
    used = {name for case in cases for name in case.keywords} | {name for case in cases for name in case.arrays()}
    # fp8 q, with its q_scale, is rounded as no other is: tests/gpu/test_float8_gpu.py judges it.
    assert used >= {"causal", "scale", "window", "softcap", "layout", "dropout", "dlse", *NAMES} - {"q_scale"}


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("dance", 2, "dance"),
        ("--verson", 2, "unknown arguments: --verson; did you mean --version?"),
        ("plan --heads 8", 2, "unknown arguments: --heads 8; did you mean --num-heads?"),
        ("plan --arch 9.0 --casual", 2, "unknown arguments: --casual; did you mean --causal?"),
        ("tune --window=3,0 -x 1", 2, "unknown arguments: -x 1"),
        ("check --seed -1", 2, "argument --seed: -1 is not a positive integer or 0"),
        ("plan --dtype float8", 2, "float8"),
        ("plan --head-dim 0", 2, "0 is not a positive integer"),
        ("plan --head-dim x", 2, "x is not a positive integer"),
        ("plan --softcap x", 2, "x is not a number"),
        ("plan --window 3", 2, "3 is not of the form LEFT,RIGHT with an integer or none on each side, such as 1023,0"),
        ("plan --window 1,2,3", 2, "1,2,3 is not of the form LEFT,RIGHT"),
        ("plan --arch 6", 1, "6.0"),
        ("plan --arch 6.1", 1, "6.1"),
        ("plan --arch 9.0 --head-dim 1025", 1, "1025"),
        ("plan --arch 8.6 --dtype float64 --head-dim 200 --pass backward", 1, "float64"),
        ("plan --softcap -1", 1, "softcap"),
        ("plan --num-heads 6 --num-heads-kv 4", 1, "4 heads"),
        ("plan --arch 9.0 --pass jvp --tangents q bias", 1, "--tangents: got bias, expected --bias next to it"),
        ("plan --arch 9.0 --pass jvp --tangents mask", 2, "argument --tangents: invalid choice: 'mask'"),
        ("plan --arch 8.6 --pass jvp backward_jvp --head-dim 600", 1, "no tile of bfloat16 at head dimensions 600"),
        ("compile", 1, "give its compute capability, such as --arch 9.0"),
        ("tune --dry-run", 1, "give its compute capability, such as --arch 9.0"),
        ("cache --tuned", 1, "--tuned goes with --clear"),
        ("demo --backend gpu", 1, "none in this test"),
        ("check --backend gpu", 1, "none in this test"),
    ],
)
def test_errors(capsys, without_gpu, command, code, words):
    got, output, error = run(capsys, command)
    assert got == code
    assert output == ""
    assert words in error.splitlines()[-1]
    usage = [f"{' '.join(['python -m cuflash', *command.split()[:1]])} --help shows all arguments"] if code == 2 else []
    if command in ("dance", "--verson"):
        usage = ["python -m cuflash --help shows all arguments"]
    assert error.splitlines()[:-1] == usage


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (in_bytes(0), "0 B"),
        (in_bytes(999), "999 B"),
        (in_bytes(1000), "1 kB"),
        (in_bytes(2.749e11), "275 GB"),
        (in_flops(5.5e11), "550 GFLOP/s"),
        (in_flops(6.21e14), "621 TFLOP/s"),
        (in_flops(2e7), "0.02 GFLOP/s"),
        (in_seconds(0.00123), "1.23 ms"),
        (in_seconds(0.000123), "123 us"),
        (in_seconds(12.34), "12.3 s"),
        (in_seconds(0.0009999), "1 ms"),
        (in_seconds(0.9996), "1 s"),
        (in_bytes(999_900), "1 MB"),
        (in_flops(9.996e11), "1 TFLOP/s"),
    ],
)
def test_numbers(text, expected):
    assert text == expected


# ---- check --emulate -------------------------------------------------------------------------------------------------

EMULATE = "check --emulate --seqlen 30 --num-heads 1 --head-dim 16"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: g++ is not on the path")


@needs_compiler
@pytest.mark.usefixtures("without_registers")
def test_check_emulated(capsys):
    code, output, error = run(capsys, f"{EMULATE} --causal --arch 8.0 9.0 --dtype float16")
    assert code == 0, error
    assert re.findall(r"^(\w+) pass on .*compute capability (.*)\): ", output, re.MULTILINE) == [
        ("forward", "8.0"),
        ("backward", "8.0"),
        ("forward", "9.0"),
        ("backward", "9.0"),
    ]
    assert re.search(r"^ *kernel sm80_forward_float16_\w+_right_bound: grid ", output, re.MULTILINE)
    assert len(re.findall(r"^passed +\w+, (late|eager) ", output, re.MULTILINE)) == 4 * 6


@needs_compiler
@pytest.mark.usefixtures("without_registers")
def test_check_emulated_with_every_option(capsys):
    options = "--causal top_left --window 9,3 --softcap 5 --bias --mask --kv-lengths --alibi-slopes --head-dim-v 24"
    code, output, error = run(capsys, f"{EMULATE} {options} --deterministic --num-heads 2 --num-heads-kv 1 --seed 3")
    assert code == 0, output + error


@needs_compiler
@pytest.mark.usefixtures("without_registers")
def test_check_emulated_of_a_diagonal_that_follows_lengths(capsys):
    """The argument brings lengths along."""
    code, output, error = run(capsys, f"{EMULATE} --causal lengths --batch 2 --schedule random --arch 8.0")
    assert code == 0, output + error
    assert "right_bound, kv_lengths, lengths_diagonal" in " ".join(output.split())


@needs_compiler
def test_check_emulated_takes_one_pass_and_one_order(capsys):
    code, output, _ = run(capsys, f"{EMULATE} --pass forward --schedule random")
    assert code == 0
    assert "backward" not in output
    assert re.findall(r"^passed +(\w+, \w+)", output, re.MULTILINE) == ["random, late", "random, eager"]
    assert re.search(r"\d+\s+registers", output) or importlib.util.find_spec("cuda.bindings.nvrtc") is None


@needs_compiler
@pytest.mark.usefixtures("without_registers")
def test_check_emulated_notices_wrong_results_and_broken_kernels(capsys, monkeypatch):
    right = passes.forward

    def wrong(problem, arrays, **options):
        out, lse = right(problem, arrays, **options)
        return out, lse + 1

    monkeypatch.setattr(passes, "forward", wrong)
    code, output, _ = run(capsys, f"{EMULATE} --pass forward --schedule lifo")
    assert code == 1
    assert re.search(r"^FAILED +lifo, late (.|\n)*lse", output, re.MULTILINE)

    def broken(problem, arrays, **options):
        raise EmulationError("forward_kernel", "data race", "forward.cu", 7, 0, 1)

    monkeypatch.setattr(passes, "forward", broken)
    code, output, _ = run(capsys, f"{EMULATE} --pass forward --schedule lifo")
    assert code == 1
    assert "FAILED      lifo, late          forward.cu:7: kernel forward_kernel, block 0, thread 1: data race" in output


@needs_compiler
@pytest.mark.usefixtures("without_registers")
@pytest.mark.parametrize("pass_", ["jvp", "backward_jvp"])
def test_check_emulated_of_passes_with_tangents(capsys, monkeypatch, pass_):
    command = f"{EMULATE} --causal --softcap 2 --sinks --tangents q v softcap --pass {pass_} --schedule fifo --arch 8.0"
    code, output, error = run(capsys, command)
    assert code == 0, output + error
    assert re.findall(r"^(\w+) pass on ", output, re.MULTILINE) == [pass_]
    assert "; tangents of q, v, softcap " in " ".join(output.split())
    right = getattr(passes, pass_)

    def wrong(*args, **options):
        return tuple(1.1 * x for x in right(*args, **options))

    monkeypatch.setattr(passes, pass_, wrong)
    code, output, _ = run(capsys, command)
    assert code == 1 and len(re.findall(r"^FAILED +fifo, ", output, re.MULTILINE)) == 2


@needs_compiler
def test_check_emulated_without_a_compiler(capsys, monkeypatch):
    monkeypatch.setattr(building, "find_compiler", lambda: None)
    code, _, error = run(capsys, EMULATE)
    assert code == 1
    assert "g++" in error


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("check --causal", "--causal goes with --emulate"),
        ("check --pass forward", "--pass goes with --emulate"),
        ("check --head-dim 64", "--head-dim goes with --emulate"),  # the default
        ("check --causal no --quick", "--causal goes with --emulate"),
        ("check --seqlen 7 --backend cpu", "--seqlen goes with --emulate"),
        ("check --emulate --backend cpu", "--backend goes without --emulate"),
        ("check --emulate --quick", "--quick goes without --emulate"),
    ],
)
def test_arguments_of_the_other_kind_of_check_are_refused(capsys, command, words):
    code, output, error = run(capsys, command)
    assert (code, output) == (1, "")
    assert words in error


# ---- rates and widths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_", PASSES, ids=str)
def test_the_time_on_this_cpu_is_about_right(pass_):
    """Of heads that are more and longer, causal: within a factor that a busy machine does not exceed."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 16, 1100, 40), np.float32)
    attn = FlashAttention(causal=True)
    out, lse = attn.forward(q, k, v)
    tangents = {"tq": q, "tk": k, "tv": v}
    calls = {
        "forward": lambda: attn.forward(q, k, v),
        "backward": lambda: attn.backward(out, q, k, v, out, lse),
        "jvp": lambda: attn.jvp(q, k, v, **tangents),
        "backward_jvp": lambda: attn.backward_jvp(out, q, k, v, out, lse, out, lse, **tangents),
    }
    start = time.perf_counter()
    calls[pass_.name]()
    seconds = time.perf_counter() - start
    problem = replace(
        make_problem(Options(causal=True), q, k, v), moved=("q", "k", "v") if pass_.has_tangents else None
    )
    rates.flops_per_s.cache_clear()
    assert seconds / 8 < rates.about_seconds(problem, pass_) < seconds * 8
    ten = rates.about_seconds(replace(problem, batch=10), pass_)
    assert ten == pytest.approx(10 * rates.about_seconds(problem, pass_))


@pytest.mark.usefixtures("without_registers")
@pytest.mark.parametrize("columns", [40, 200])
def test_lines_fit_the_terminal(capsys, monkeypatch, without_gpu, columns):
    """Plans and rows are wrapped there; a row of `info` is one line elsewhere."""
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = run(capsys, "info")[1].splitlines()
    assert len(rows) == len({row.split()[0] for row in rows})
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)
    for command in ("info", "plan --seqlen 100", "plan --arch 9.0"):
        lines = run(capsys, command)[1].splitlines()
        long = [line for line in lines if len(line) > min(columns, 100 if command != "info" else columns)]
        assert all(len(line.split()) <= 2 for line in long), long  # a path that nothing can break
