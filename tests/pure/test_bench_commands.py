"""The command line of the benchmark: arguments that a suite does not use, suggestions, interruptions."""

import pytest

from bench import __main__ as bench
from bench.__main__ import EVIDENCE, main


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run --suit quick", "run: unknown arguments: --suit quick; did you mean --suite?"),
        ("run --backnd cpu", "run: unknown arguments: --backnd cpu; did you mean --backend?"),
        ("run --pages x", "run: unknown arguments: --pages x; did you mean --page (report takes it)?"),
        ("list --dtype float32", "list: unknown arguments: --dtype float32; accuracy takes --dtype"),
        ("rn", ": unknown command: rn, expected run, report, accuracy, draw, list; did you mean run?"),
        (
            "accuracy --dtype double",
            "invalid choice: 'double', expected float16, bfloat16, float32, float64; did you mean",
        ),
    ],
)
def test_unknown_arguments(capsys, command, words):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(command.split())
    output, error = capsys.readouterr()
    first, last = error.splitlines()
    assert output == "" and words in last
    assert first.startswith("python -m bench") and first.endswith("--help shows all arguments")


@pytest.mark.parametrize("option", ["--peers none", "--pass forward", "--case x", "--seconds 1", "--devices 2"])
def test_options_of_suites_of_times(option):
    """Which suites of other evidence do not look at; each is refused by its own name."""
    with pytest.raises(SystemExit, match=rf"^{option.split()[0]}: got --suite memory, expected a suite of times"):
        main(["run", "--suite", "memory", *option.split()])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--suite quick --backend cpu", rf"^--backend: got --suite quick, expected {', '.join(EVIDENCE)}$"),
        ("--suite cpu --scale 2", "^--scale: got --suite cpu, expected memory, "),
        ("--suite memory --scale 2", "^--scale: got --suite memory, expected pathfinder$"),
    ],
)
def test_options_of_other_evidence(command, words):
    with pytest.raises(SystemExit, match=words):
        main(["run", *command.split()])


def test_an_interruption_is_one_word(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_list", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 0
    output = capsys.readouterr().out
    assert all(f"\n    {name} " in output for name in ("run", "report", "accuracy", "draw", "list"))
