"""How much of a long command is done: a bar on a terminal, a line a minute elsewhere, on standard error alone."""

import io
import os
import re
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.gpu import progress
from cuflash.gpu.progress import Bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def screen_after(text):
    """What a terminal shows in its lines after it was sent text with carriage returns."""
    lines = []
    for line in text.split("\n"):
        shown: list[str] = []
        for part in line.split("\r"):
            shown[: len(part)] = part
        lines.append("".join(shown).rstrip())
    return lines


@pytest.fixture
def clock(monkeypatch):
    own = Clock()
    monkeypatch.setattr(time, "perf_counter", own)
    return own


def on_terminal(monkeypatch):
    """Standard error in place of that of pytest, which it sets anew after fixtures are made."""
    own = Terminal()
    monkeypatch.setattr(sys, "stderr", own)
    return own


def test_a_bar_has_a_label_a_percentage_and_the_time_left(clock, monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Bar("tuning forward", total=4, start=clock()) as bar:
        clock.seconds += 5
        bar.advance()
        assert screen_after(terminal.getvalue()) == [f"tuning forward [{'#' * 10}{'.' * 30}]  25 %, 15 s left"]
        clock.seconds += 5
        bar.advance()
        assert screen_after(terminal.getvalue()) == [f"tuning forward [{'#' * 20}{'.' * 20}]  50 %, 10 s left"]
    assert screen_after(terminal.getvalue()) == [""]


def test_an_interrupted_bar_goes_away(clock, monkeypatch):
    terminal = on_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), Bar("check", total=4, start=clock()) as bar:
        clock.seconds += 5
        bar.advance()
        raise KeyboardInterrupt
    assert "check [###" in terminal.getvalue()
    assert screen_after(terminal.getvalue()) == [""]


def test_what_takes_less_than_a_second_shows_nothing(clock, monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Bar("check", total=5, start=clock()) as bar:
        for _ in range(4):
            clock.seconds += 0.2
            bar.advance()
        assert terminal.getvalue() == ""
        clock.seconds += 0.3
        bar.advance()
        assert terminal.getvalue() != ""


@given(st.lists(st.floats(0.01, 200), min_size=1, max_size=40))
def test_a_pipe_gets_a_line_a_minute(steps):
    """Whatever steps take: one after each minute in which a step ended, none within a minute of another."""
    pipe, own = io.StringIO(), Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", pipe)
        patch.setattr(time, "perf_counter", own)
        written, expected = own.seconds, 0
        with Bar("check", total=len(steps), start=own.seconds) as bar:
            for seconds in steps:
                own.seconds += seconds
                if own.seconds - written >= 60:
                    written, expected = own.seconds, expected + 1
                bar.advance()
    lines = pipe.getvalue().splitlines()
    assert len(lines) == expected
    assert all(re.fullmatch(r"check: +\d+ %, \d[\d.]* (s|min|h) left", line) for line in lines)


def test_nothing_is_written_without_a_standard_error(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with Bar("check", total=1, start=clock()) as bar:
        clock.seconds += 1000
        bar.advance()


def test_results_stand_above_the_bar(clock, monkeypatch):
    """Where standard output is on the same terminal."""
    shared = Terminal()
    monkeypatch.setattr(sys, "stderr", shared)
    monkeypatch.setattr(sys, "stdout", shared)
    with Bar("check", total=2, start=clock()) as bar:
        bar.print("first")
        clock.seconds += 5
        bar.advance()
        bar.print("second, which is shorter than the bar")
        assert screen_after(shared.getvalue())[:2] == ["first", "second, which is shorter than the bar"]
        assert screen_after(shared.getvalue())[2].startswith("check [##########")
    assert screen_after(shared.getvalue()) == ["first", "second, which is shorter than the bar", ""]


@given(st.integers(1, 200), st.text("abc ", min_size=1, max_size=60), st.integers(1, 99))
def test_a_bar_fits_the_terminal(columns, label, done):
    """A longer line would begin another one, which a carriage return does not take back."""
    shown, own = Terminal(), Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", shown)
        patch.setattr(time, "perf_counter", own)
        patch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((columns, 24)))
        patch.setattr(shown, "fileno", lambda: 2)
        with Bar(label, total=100, done=done - 1, start=0.0) as bar:
            bar.advance()
            (line,) = screen_after(shown.getvalue())
            assert len(line) <= max(1, columns - 1)
            if len(label) + 40 < columns:
                assert "[" in line and f"{done} %" in line
    assert screen_after(shown.getvalue()) == [""]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s"), (99.4, "99 s"), (100, "2 min"), (99.4 * 60, "99 min"), (6000, "1.7 h"), (86400, "24.0 h")],
)
def test_time_left(seconds, words):
    assert progress._in_words(seconds) == words
