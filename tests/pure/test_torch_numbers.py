"""`torch.compile` of functions whose score_mod or mask_mod read numbers that change, or whose `attn` does."""

import math
import sys
from math import pi
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cuflash.torch import attention, logsumexp  # noqa: E402

FACTOR = 1.0


def scaled(s):
    return s * FACTOR


def times(factor):
    return lambda s, i, j: s * factor


ONE = times(1.0)


def through(function):
    return lambda s, i, j: function(s, i, j)


def one_after_the_other(f, g):
    return lambda s, i, j: g(f(s, i, j), i, j)


def scaled_score(s, i, j):
    return s * FACTOR


SCALED: dict[str, Any] = {
    "closure": lambda q, c, f: attention(q, q, q, score=lambda s, i, j: s * c),
    "global": lambda q, c, f: attention(q, q, q, score=lambda s, i, j: s * FACTOR),
    "global of a function": lambda q, c, f: attention(q, q, q, score=lambda s, i, j: scaled(s)),
    "global of a score": lambda q, c, f: attention(q, q, q, score=scaled_score),
    "made outside": lambda q, c, f: attention(q, q, q, score=f),
    "function made outside": lambda q, c, f: attention(q, q, q, score=lambda s, i, j: f(s, i, j)),
    "function of a function made outside": lambda q, c, f: attention(q, q, q, score=through(f)),
    "function of a function": lambda q, c, f: attention(q, q, q, score=through(lambda s, i, j: s * c)),
    "made by a function": lambda q, c, f: attention(q, q, q, score=times(c)),
    "two functions of one code": lambda q, c, f: attention(q, q, q, score=one_after_the_other(times(1), times(c))),
    "two made outside": lambda q, c, f: attention(q, q, q, score=one_after_the_other(ONE, f)),
    "size": lambda q, c, f: attention(q, q, q, score=times(q.shape[-2] - 10 + (c % 1))),
    "lse": lambda q, c, f: logsumexp(q, q, score=lambda s, i, j: s * c),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_function_is_traced_by_each_call(name, monkeypatch):
    q = torch.randn(2, 12, 8, dtype=torch.float64)
    for factor in (2, 3, 0.5, 2):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        scale = (2 + factor % 1 if name == "size" else factor) * 8**-0.5
        right = logsumexp(q, q, scale=scale) if name == "lse" else attention(q, q, q, scale=scale)
        torch.testing.assert_close(SCALED[name](q, factor, times(factor)), right, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("how", [{}, {"dynamic": True}], ids=str)
@pytest.mark.parametrize("name", SCALED)
def test_numbers_that_a_score_reads_may_change(name, how, monkeypatch):
    """Each of them is compiled for once, whether the function closes over it or finds it among its globals."""
    graphs = []

    def compiles(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(SCALED[name], backend=compiles, fullgraph=True, **how)
    factors = (2, 3, 5, 3, 2) if name == "size" else (2, 3, 5, 0.5, 3, 0.25, 0.5, 2)
    for factor in factors:
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        q = torch.randn(2, 10 + int(factor) if name == "size" else 12, 8, dtype=torch.float64)
        scale = factor * 8**-0.5
        right = logsumexp(q, q, scale=scale) if name == "lse" else attention(q, q, q, scale=scale)
        torch.testing.assert_close(compiled(q, factor, times(factor)), right, rtol=1e-14, atol=1e-14)
    assert len(graphs) == len({*factors})


def test_a_mask_may_close_over_a_number_that_changes():
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, width):
        return attention(q, q, q, mask=lambda i, j: cuflash.abs(i - j) < width)

    for width in (1, 5, 3):
        q = torch.randn(2, 20, 8, dtype=torch.float64)
        right = attention(q, q, q, window=(width - 1, width - 1))
        torch.testing.assert_close(compiled(q, width), right, rtol=1e-14, atol=1e-14)


def test_other_closures_of_compiled_scores_are_named():
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, table):
        return attention(q, q, q, score=lambda s, i, j: s + table[0])

    message = r"closes over table, of type Tensor, expected one that closes over numbers and functions: make it, or Fla"
    with pytest.raises(Exception, match=message):
        compiled(torch.randn(2, 4, 8), torch.ones(3))


settings: Any = ModuleType("settings")
settings.factor, settings.inner = 1.0, ModuleType("inner")
HELD: dict[str, Any] = {
    "list": [1.0],
    "dict": {0: 1.0},
    "object": SimpleNamespace(factor=1.0),
    "number of NumPy": np.float64(1.0),
}


def of_held(name):
    held: Any = HELD[name]
    if name == "object":
        return lambda s, i, j: s * held.factor
    return (lambda s, i, j: s * held) if name == "number of NumPy" else lambda s, i, j: s * held[0]


def from_a_list(s, i, j):
    return s * HELD["list"][0]


NUMBER_OF_NUMPY = np.float64(1.0)


def by_a_number_of_numpy(s, i, j):
    return s * NUMBER_OF_NUMPY


class OfObject:
    def score(self, s, i, j):
        return s


def by_settings(s):
    return s * settings.factor * settings.inner.factor


def through_modules(s, i, j):
    return by_settings(np.clip(s, -100, 100)) * math.pi / pi


@pytest.mark.parametrize("name", ["factor", "inner"])
def test_numbers_of_modules_may_change(name, monkeypatch):
    torch.compiler.reset()
    compiled = torch.compile(lambda q: attention(q, q, q, score=through_modules), backend="aot_eager", fullgraph=True)
    q = torch.randn(2, 12, 8, dtype=torch.float64)
    monkeypatch.setattr(settings.inner, "factor", 1.0, raising=False)
    for factor in (1.0, 2.0, 0.5, 2.0):
        monkeypatch.setattr(settings if name == "factor" else settings.inner, "factor", factor)
        torch.testing.assert_close(compiled(q), attention(q, q, q, scale=factor * 8**-0.5))


@pytest.mark.parametrize(
    ("score", "message"),
    [
        *((of_held(name), f"closes over held, of type {type(HELD[name]).__name__}") for name in HELD),
        (from_a_list, "reads HELD, of type dict"),
        (through(from_a_list), "reads HELD, of type dict"),
        (by_a_number_of_numpy, "reads NUMBER_OF_NUMPY, of type float64"),
        (OfObject().score, "an object of type method, expected a function"),
    ],
)
def test_what_a_compiled_score_reads_and_no_compiler_guards_is_named(score, message):
    """It would go on with what it read first. A `FlashAttention` is what it was when it was made."""
    torch.compiler.reset()
    q = torch.randn(2, 4, 8)
    compiled = torch.compile(lambda q: attention(q, q, q, score=score), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=message):
        compiled(q)
    attn = cuflash.FlashAttention(score=score)
    compiled = torch.compile(lambda q: attention(q, q, q, attn=attn), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), attention(q, q, q))


def test_attn_is_made_outside_of_a_compiled_function():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x):
        return attention(x, x, x, attn=cuflash.FlashAttention(causal=True))

    torch.compiler.reset()
    with pytest.raises(Exception, match=r"attn: got a FlashAttention that is made within the compiled function, expec"):
        compiled(torch.randn(2, 4, 8))


def test_another_attn_is_another_graph():
    attns = [cuflash.FlashAttention(**options) for options in ({"causal": True}, {}, {"scale": 1.0}, {"causal": True})]
    holder = SimpleNamespace(attn=attns[0])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x, attn):
        return attention(x, x, x, attn=attn) + attention(x, x, x, attn=holder.attn)

    torch.compiler.reset()
    x = torch.randn(2, 4, 8)
    for attn in attns:
        holder.attn = attn
        torch.testing.assert_close(compiled(x, attn), 2 * attention(x, x, x, attn=attn))
