"""`torch.compile` of functions whose score_mod or mask_mod read numbers that change."""

import sys
from typing import Any

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
