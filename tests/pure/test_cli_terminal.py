"""Commands on a terminal of their own: the bar, the width, interruptions; and in pipes."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cuflash
from cuflash.cli.main import COMMANDS, main

pty = pytest.importorskip("pty", reason="a system without pseudoterminals")
fcntl = pytest.importorskip("fcntl", reason="a system without pseudoterminals")
termios = pytest.importorskip("termios", reason="a system without pseudoterminals")

ROOT = Path(cuflash.__file__).parents[1]
SECONDS = 100  # until a command that should have ended is given up
# `check` that computes nothing and takes more than a second, so that there is a bar.
SLOW = """
import sys, time
from types import SimpleNamespace
from cuflash import testing
from cuflash.cli import check
from cuflash.cli.main import main
cases = testing.self_test_cases
def slow(*args, **keywords):
    time.sleep(0.3)
    return [SimpleNamespace(name="out", error=1e-8, tolerance=1e-6, ratio=0.01)]
testing.check = check.assert_tangents = slow
check.tangents_by = lambda *args, **keywords: None
testing.self_test_cases = lambda seed, **how: list(cases(seed, **how))[:3]
sys.exit(main())
"""


def on_terminal(arguments, columns=100, interrupt_after=None):
    """Exit code and output of a process on a terminal; it gets a Ctrl-C when the output has matched a pattern."""
    descriptor, of_process = pty.openpty()
    size = b"".join(n.to_bytes(2, sys.byteorder) for n in (50, columns, 0, 0))
    fcntl.ioctl(of_process, termios.TIOCSWINSZ, size)

    def become_foreground():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs that a shell starts in the background ignore it
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = {name: x for name, x in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=of_process,
        stdout=of_process,
        stderr=of_process,
        preexec_fn=become_foreground,
    ) as process:
        os.close(of_process)
        output, deadline = "", time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if not select.select([descriptor], [], [], 1)[0]:
                continue
            try:
                output += os.read(descriptor, 65536).decode()
            except OSError:  # the terminal is closed
                break
            if interrupt_after and re.search(interrupt_after, output):
                os.write(descriptor, b"\x03")
                interrupt_after = None
        else:
            process.kill()
    os.close(descriptor)
    return process.returncode, output.replace("\r\n", "\n")


def screen_after(text):
    """What a terminal shows in its lines."""
    lines = []
    for line in text.split("\n"):
        shown: list[str] = []
        for part in line.split("\r"):
            shown[: len(part)] = part
        lines.append("".join(shown).rstrip())
    return lines


def test_a_check_shows_a_bar_below_its_rows():
    columns = 60
    code, output = on_terminal(["-c", SLOW, "check", "--backend", "cpu"], columns)
    assert code == 0, output
    bars = re.findall(r"check \[#+\.*\] +\d+ %, \d+ s left", output)
    assert bars and all(len(bar) < columns for bar in bars)
    assert [line.split()[0] for line in screen_after(output) if line] == ["on", *["passed"] * 6, "6"]


def test_json_is_alone_on_standard_output():
    """And on the screen, when the bar has gone."""
    code, output = on_terminal(["-c", SLOW, "check", "--backend", "cpu", "--json"])
    assert code == 0
    assert re.search(r"check \[#+\.*\] +\d+ %, \d+ s left", output)
    shown = json.loads("\n".join(screen_after(output)))
    assert (shown["passed"], shown["failed"]) == (6, 0)


def test_an_interruption_is_one_word():
    """With the bar on the screen, which goes away."""
    code, output = on_terminal(["-c", SLOW, "check", "--backend", "cpu"], interrupt_after=" s left")
    assert code == 130, output
    *_, last, end = screen_after(output)
    assert (last.replace("^C", ""), end) == ("interrupted", "")
    assert "Traceback" not in output


def test_help_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    for command in COMMANDS:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([command, "--help"])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 70
