"""How functions are traced: what they may do, and what is said of mistakes, with the line and a remedy."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.score_mod import Traced, program_of
from cuflash.score_mod.evaluation import evaluate
from tests.compiled import run_python
from tests.pure.test_score_expressions import inputs, program


def line_of(function, text):
    lines = Path(__file__).read_text().splitlines()
    start = function.__code__.co_firstlineno
    return next(n for n in range(start, start + 9) if text in lines[n - 1])


def branches(s, i, j):
    t = s * 2
    return t if i > j else s


def chained(s, i, j):
    return cuflash.where(0 < i < 5, s, 0)


def asks_math(s, i, j):
    import math

    return math.sqrt(s)


OUTSIDE, LISTED, NAMED = np.arange(30.0), [1.0, 2.0], {1: 2.0}


@pytest.mark.parametrize(
    ("function", "text", "message"),
    [
        (branches, "if i > j", r"Python branches on a traced value, .*use cuflash\.where in place of if"),
        (chained, "0 < i < 5", "Python branches on a traced value"),
        (asks_math, "math.sqrt(s)", "Python asks a traced value for a number"),
        (
            lambda s, i, j: s - OUTSIDE[i],
            "OUTSIDE[i]",
            r".*: if that is an index, pass the array as an argument after the \*",
        ),
        (
            lambda s, i, j: s - OUTSIDE[i - j, 0],
            "[i - j, 0]",
            r".*: if that is an index, pass the array as an argument after the \*",
        ),
        (lambda s, i, j: s - LISTED[i], "LISTED[i]", r".*: for an index, pass the array as an argument after the \*"),
        (lambda s, i, j: s - OUTSIDE, "s - OUTSIDE", r"got ndarray .* pass the array as an argument after the \*"),
        (lambda s, i, j: s - NAMED[i], "NAMED[i]", r"got TypeError while the score was traced: unhashable type"),
        (lambda s, i, j: cuflash.where(i > j, s), "where(i > j, s)", "got TypeError .* missing 1 req"),  # type: ignore
        (lambda s, i, j, *, p: s * p.shape[0], "p.shape", "got .shape of a traced value, .* expected lengths as integ"),
        (lambda s, i, j: s.astype(float), "s.astype", r"got \.astype of a traced value, which is one number"),
        (
            lambda s, i, j: np.round(s),
            "np.round",
            r"got numpy\.round of a traced value, expected cuflash\.floor\(x \+ 0",
        ),
        (lambda s, i, j: np.sum(s), "np.sum", "got numpy.sum of a traced value, expected a function of cuflash: abs, "),
        (lambda s, i, j: np.arctan(s), "arctan", "got numpy.arctan of a traced value, expected a function of cuflash"),
        (lambda s, i, j: np.hypot(s, i), "hypot", r"got numpy\.hypot .* expected cuflash\.sqrt\(x \* x \+ y \* y\)"),
        (
            lambda s, i, j: np.where(i > j),
            "np.where",
            r"got numpy\.where .* expected cuflash\.where\(condition, x, y\)",
        ),
        (lambda s, i, j: np.clip(s, 0, 1, out=OUTSIDE), "np.clip", "got numpy.clip of a traced value, expected no arg"),
        (lambda s, i, j: np.sqrt(s, out=OUTSIDE), "np.sqrt", "got numpy.sqrt .* without keyword arguments"),
        (lambda s, i, j: np.add.reduce(s), "np.add", "got numpy.add of a traced value, expected it as a function"),
    ],
)
def test_what_needs_a_value_is_refused_with_its_line_and_a_remedy(function, text, message):
    with pytest.raises(TypeError, match=f"^{re.escape(__file__)}:{line_of(function, text)}: {message}"):
        Traced.of(function, "score")


def of_integer(number):
    return lambda s, i, j: s + cuflash.where(i < number, 1, 0)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**70, 10**400], ids=["2**63", "-2**63-1", "2**70", "10**400"])
def test_integers_beyond_64_bits_are_refused_with_their_line(number):
    for function in (lambda s, i, j: s * number, of_integer(number)):
        with pytest.raises(ValueError, match=r"test_score_tracing\.py:\d+: got int .* expected an integer of 64 bits"):
            Traced.of(function, "score")
    for most in (2**63 - 1, -(2**63)):
        made = program(of_integer(most), given={})
        assert np.isfinite(evaluate([made.score], inputs(), {}, np.float64)[0]).all()


def test_errors_of_the_caller_stay_what_they_are():
    def fails(s, i, j):
        raise RuntimeError("its own")

    with pytest.raises(RuntimeError, match=r"^its own$"):
        Traced.of(fails, "score")
    with pytest.raises(NameError, match="nowhere"):
        Traced.of(lambda s, i, j: s + nowhere, "score")  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("mask", "spelled"),
    [
        (lambda i, j: i - j, "i - j"),
        (lambda i, j: 1, "1"),
        (lambda i, j: cuflash.where(i > j, i, False), r"where\(j < i, i, False\)"),
        (lambda i, j, *, x: x[i] * 2.0, r"x\[i\] \* 2\.0"),
        (lambda i, j, *, x: (x[i] > 0) + (i > j), r"\(0 < x\[i\]\) \+ \(j < i\)"),
    ],
)
def test_a_number_is_no_mask(mask, spelled):
    message = f"mask: got a function that returns a number, {spelled}, expected a condition, such as this number >= 0"
    with pytest.raises(TypeError, match=message):
        cuflash.FlashAttention(mask=mask)


def test_whether_an_array_is_a_mask_shows_in_the_call():
    q = np.ones((1, 3, 4))
    for mask in (
        lambda i, j, *, x: x[i, j],
        lambda i, j, *, x: x[i, 0] & x[0, j],
        lambda i, j, *, x: x[i, j] & (i > j),
    ):
        attn = cuflash.FlashAttention(mask=mask)
        attn.forward(q, q, q, x=np.ones((3, 3), bool))
        for dtype in (np.int32, np.float64):
            with pytest.raises(
                TypeError, match=r"mask: got a function that returns a number, x\[|got real numbers for"
            ):
                attn.forward(q, q, q, x=np.ones((3, 3), dtype))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, i: s, "score: got a function of 2 positional arguments, expected 3"),
        (lambda s, i, j, *, a=1: s, "score: got a function with a=1, expected keyword-only arguments without defaults"),
        (lambda s, i, j, **rest: s, r"score: got a function with \*\*rest"),
        (lambda s, i, j: None, "score: got a function that returns None, expected one that returns an expression"),
        (3, "score: got int 3, expected None or a function"),
        (int, "score: got type <class 'int'>, expected a Python function of "),
    ],
)
def test_functions_of_another_form_are_refused(function, message):
    with pytest.raises(TypeError, match=message):
        Traced.of(function, "score")


def test_kinds_and_axes_are_checked_with_the_line():
    of_table = Traced.of(lambda s, i, j, *, table: s + table[s * 2], "score")
    with pytest.raises(TypeError, match=r"test_score_tracing.py:\d+: got a real number as an index of table"):
        program_of(of_table, None, (("table", 1, "float32"),))
    with pytest.raises(ValueError, match="table: got an array of 2 axes, expected 1 axes"):
        program_of(of_table, None, (("table", 2, "float32"),))
    of_floats = Traced.of(lambda s, i, j: s + ((s + 1) & (i + 1)), "score")
    with pytest.raises(TypeError, match=r":\d+: got real numbers for 'and'"):
        program_of(of_floats, None, ())


def test_equal_expressions_are_equal_functions():
    one = Traced.of(lambda s, i, j, *, a: s + a[i] * 2, "score")
    assert one == Traced.of(lambda x, row, key, *, a: x + a[row] * 2, "score")
    assert one != Traced.of(lambda s, i, j, *, a: s + a[j] * 2, "score")


def test_numpy_functions_of_symbols_are_those_of_cuflash():
    pairs: list[tuple[Any, Any]] = [
        (lambda s, i, j: cuflash.sqrt(cuflash.abs(s)), lambda s, i, j: np.sqrt(np.abs(s))),
        (lambda s, i, j: s + cuflash.minimum(i, j), lambda s, i, j: s + np.minimum(i, j)),
        (lambda s, i, j: cuflash.where(i > j, s, 0.0), lambda s, i, j: np.where(i > j, s, 0.0)),
        (lambda s, i, j: cuflash.clip(s, -1, 1), lambda s, i, j: np.clip(s, -1, 1)),
        (lambda s, i, j: cuflash.clip(s, -1, 1), lambda s, i, j: np.clip(s, a_max=1, a_min=-1)),
        (lambda s, i, j: cuflash.minimum(s, 1), lambda s, i, j: np.clip(s, None, 1)),
        (lambda s, i, j: cuflash.maximum(s, 1), lambda s, i, j: np.clip(s, 1, None)),
        (lambda s, i, j: s - cuflash.floor(s), lambda s, i, j: s - np.floor(s)),
        (lambda s, i, j: cuflash.abs(s) ** 1.5, lambda s, i, j: np.float_power(np.fabs(s), 1.5)),
    ]
    for mine, of_numpy in pairs:
        assert Traced.of(mine, "score") == Traced.of(of_numpy, "score")
    assert Traced.of(lambda i, j: np.float64(2) < i, "mask") == Traced.of(lambda i, j: i > 2.0, "mask")
    assert cuflash.clip(5, 0, 3) == 3 and cuflash.floor(np.float32(-1.5)) == -2


WHILE_A_THREAD_TRACES = """
import os, signal, threading, cuflash
from cuflash.score_mod import nodes

def trace():
    return cuflash.FlashAttention(score=lambda s, i, j: s - (i - j) * 0.25)

holds, ends = threading.Event(), threading.Event()

def hold():
    with nodes._lock:
        holds.set()
        ends.wait(0.2)

thread = threading.Thread(target=hold)
thread.start()
holds.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends a child that waits
    trace()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
thread.join()
trace()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_traces_even_if_a_thread_did():
    run_python(WHILE_A_THREAD_TRACES)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_a_handler_of_a_signal_traces_wherever_it_comes():
    code = """
import faulthandler, signal, time, cuflash

def trace(*_):
    return cuflash.FlashAttention(score=lambda s, i, j: s - (i - j) * 0.25 + (i + j) * 0.5)

faulthandler.dump_traceback_later(20, exit=True)
signal.signal(signal.SIGALRM, trace)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
ends = time.monotonic() + 1
while time.monotonic() < ends:
    trace()
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    run_python(code)
