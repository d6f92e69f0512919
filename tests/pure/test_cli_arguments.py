"""Arguments that a command does not take: what is meant, what takes them, and the help of the command itself."""

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cuflash
import cuflash.__main__
from cuflash.cli import here
from cuflash.cli.main import _FOREIGN, COMMANDS, main, make_parser
from cuflash.spec.keywords import _MEANT

ROOT = Path(cuflash.__file__).parents[1]
OF_PROBLEMS = ("plan", "compile", "tune", "check")
PARSERS = make_parser().commands
OPTIONS = {name: parser._options() for name, parser in PARSERS.items()}


def message_of(capsys, command):
    """What a command says of its arguments, without its name; its help is named before, and nothing else is printed."""
    with pytest.raises(SystemExit, match=r"^2$"):
        main(command.split())
    output, error = capsys.readouterr()
    first, last = error.splitlines()
    name = re.match(rf"python -m cuflash( (?:{'|'.join(COMMANDS)}))?(?=: )", last)
    assert name and output == ""
    assert first == f"{name.group()} --help shows all arguments"
    return last.removeprefix(f"{name.group()}: ")


@pytest.mark.parametrize("name", sorted({*_MEANT, *_FOREIGN} - {"backend"}))
def test_names_of_others(capsys, name):
    """Of options of other libraries, and of sizes on command lines: the option here, or what to do without one."""
    option = f"--{name.replace('_', '-')}"
    message = message_of(capsys, f"plan {option} 3")
    argument, note = (_FOREIGN[name], "") if name in _FOREIGN else _MEANT[name]
    meant = f"--{argument.replace('_', '-')}"
    if meant in OPTIONS["plan"]:
        assert message.endswith(f"; did you mean {meant}?")
    elif argument == "seed":
        assert message.endswith("; did you mean --seed (check takes it)?")
    else:
        expected = f"no command takes {argument}; in Python, FlashAttention.plan() plans such calls"
        assert message == f"unknown arguments: {option} 3; {expected if argument else note}"


@pytest.mark.parametrize("command", OF_PROBLEMS)
@given(data=st.data())
def test_slips_of_the_pen(command, data):
    """A letter that is missing, twice there or in the wrong place still finds the option."""
    parser = PARSERS[command]
    name = data.draw(st.sampled_from([x for x in OPTIONS[command] if len(x) > 8]))
    at = data.draw(st.integers(3, len(name) - 2))
    swapped = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    slips = (name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], swapped)
    slip = data.draw(st.sampled_from(slips))
    assume(slip not in OPTIONS[command])
    assume(slip[2:].replace("-", "_") not in {*_MEANT, *_FOREIGN})
    assert parser._meant(slip) == (name, "")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("info --arch 9.0", "unknown arguments: --arch 9.0; plan, compile, tune and check take --arch"),
        ("plan --quick", "unknown arguments: --quick; check takes --quick"),
        ("plan --quik", "unknown arguments: --quik; did you mean --quick (check takes it)?"),
        ("plan --backend cpu", "unknown arguments: --backend cpu; demo and check take --backend"),
        (
            "check --verbose --forget",
            "unknown arguments: --verbose --forget; plan takes --verbose; tune takes --forget",
        ),
        ("demo --batch 2", "unknown arguments: --batch 2; plan, compile, tune and check take --batch"),
        ("--arch 9.0 plan", "unknown arguments: --arch; plan, compile, tune and check take --arch"),
        ("--seqlen=3 plan", "unknown arguments: --seqlen=3; demo, plan, compile, tune and check take --seqlen"),
        (
            "plan --nheads 8 --is-causal -7",
            "unknown arguments: --nheads 8 --is-causal -7; did you mean --num-heads --causal?",
        ),
        ("plan 128", "unknown arguments: 128"),
        ("plan --xyzzy", "unknown arguments: --xyzzy"),
        ("plam", f"unknown command: plam, expected {', '.join(COMMANDS)}; did you mean plan?"),
        ("xyzzy", f"unknown command: xyzzy, expected {', '.join(COMMANDS)}"),
        (
            "demo --backend cuda",
            "argument --backend: invalid choice: 'cuda', expected gpu, cpu; did you mean gpu?",
        ),
        (
            "plan --head-dim 64,128",
            "argument --head-dim: 64,128 is not a positive integer; several are written with spaces: 64 128",
        ),
    ],
)
def test_messages(capsys, command, message):
    assert message_of(capsys, command) == message


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("fp16", "float16"),
        ("half", "float16"),
        ("BF16", "bfloat16"),
        ("float", "float32"),
        ("single", "float32"),
        ("double", "float64"),
        ("flaot32", "float32"),
    ],
)
def test_dtypes(capsys, value, meant):
    assert message_of(capsys, f"plan --dtype {value}").endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan --arch 9.0 --tangents q", "--tangents goes with --pass jvp or backward_jvp"),
        ("compile --arch 9.0 --block-size 64", "--block-size goes with --block-mask"),
        ("plan --arch 9.0 --precision tf32", "--precision tf32 goes with --dtype float32"),
        ("tune --forget --dry-run", "--forget goes without --dry-run"),
    ],
)
def test_arguments_without_effect_are_refused(capsys, command, words):
    assert main(command.split()) == 1
    assert capsys.readouterr() == ("", f"python -m cuflash {command.split()[0]}: {words}\n")


SEVERAL = {
    "arch": ("8.0", "9.0", "7.5"),
    "passes": ("forward", "backward", "jvp", "backward_jvp"),
    "tangents": ("q", "k", "v", "bias"),
    "dtype": ("float16", "bfloat16", "float64"),
    "head_dim": ("64", "128", "256"),
    "causal": ("no", "yes", "top_left"),
}


@given(command=st.sampled_from(OF_PROBLEMS), name=st.sampled_from(sorted(SEVERAL)), data=st.data())
def test_values_are_taken_together_and_once_each(command, name, data):
    """However they are spread over occurrences of their argument, which replace the default."""
    occurrences = data.draw(st.lists(st.lists(st.sampled_from(SEVERAL[name]), min_size=1), min_size=1, max_size=3))
    option = "--pass" if name == "passes" else f"--{name.replace('_', '-')}"
    args = make_parser().parse_args([command, *(x for values in occurrences for x in (option, *values))])
    assert list(map(str, getattr(args, name))) == list(dict.fromkeys(x for values in occurrences for x in values))
    assert args.given == {name}


def test_causal_alone_means_yes():
    assert make_parser().parse_args(["plan", "--causal", "--causal", "no"]).causal == ["yes", "no"]


@pytest.mark.parametrize("name", ["cuflash", "cuflash.exe", "__main__.py", "pytest"])
def test_the_program_is_called_as_it_was_typed(capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{name}", "plan", "--quik"])
    typed = "cuflash" if name.startswith("cuflash") else "python -m cuflash"
    with pytest.raises(SystemExit):
        main()
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"{typed} plan --help shows all arguments"
    assert last.startswith(f"{typed} plan: unknown arguments: ")
    monkeypatch.setattr(here, "find_gpu", lambda: (None, "none in this test"))
    assert main(["compile"]) == 1
    assert capsys.readouterr().err.startswith(f"{typed} compile: there is no GPU here")


def test_the_console_script():
    """What `pip install` writes calls the function that pyproject.toml names."""
    text = (ROOT / "pyproject.toml").read_text()
    ((module, function),) = re.findall(r'^\[project\.scripts\]\ncuflash = "([\w.]+):(\w+)"$', text, re.MULTILINE)
    script = f"import sys; sys.argv[0] = 'bin/cuflash'; from {module} import {function}; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: cuflash [-h] [--version] COMMAND")


WORDS = sorted({*COMMANDS, *(x for options in OPTIONS.values() for x in options), *(f"--{x}" for x in _MEANT)})


@given(st.lists(st.sampled_from(WORDS) | st.sampled_from(["3", "-1", "x", "--", "-", "", "--=", "a=b"]), max_size=5))
def test_any_arguments_end_with_a_message(words):
    """Of two lines: the help of the command, and what is wrong; nothing else is raised."""
    said, shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
        try:
            found = make_parser().parse_args(words)
        except SystemExit as stop:
            assert stop.code == 2 or {"--help", "--version"} & {*words}
        else:
            assert found.command is None or found.command in words
            return
    assert shown.getvalue() or re.fullmatch(r".* --help shows all arguments\n[^\n]+\n", said.getvalue())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ModuleNotFoundError("No module named 'cupy'", name="cupy"),
            r'CuPy is not installed: pip install "cupy-cuda13x',
        ),
        (ModuleNotFoundError("No module named 'x'", name="x"), r"CuPy is not importable \(No module named 'x'\)$"),
        (ImportError("libcuda.so.1: no such file"), r"CuPy is not importable \(libcuda.so.1: no such file\)$"),
    ],
)
def test_remedies_for_a_missing_library(monkeypatch, error, words):
    """What is named exists: the packages are those of the extras cuda12 and cuda13."""

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == "cupy":
                raise error

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    cupy, reason = here.find_gpu()
    assert cupy is None and re.match(words, reason)
    extras = (ROOT / "pyproject.toml").read_text()
    assert all(f'["{name}' in extras for name in re.findall(r"cupy-cuda1\dx", reason))


def test_an_interruption_while_modules_load(capsys, monkeypatch):
    """Of the package itself nobody can catch one; of the commands' modules it is said in one word."""
    monkeypatch.delitem(sys.modules, "cuflash.cli.main")

    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == "cuflash.cli.main":
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "cuflash.__main__")
    with pytest.raises(SystemExit, match=r"^130$"):
        runpy.run_module("cuflash", run_name="__main__")
    assert capsys.readouterr() == ("", "interrupted\n")
