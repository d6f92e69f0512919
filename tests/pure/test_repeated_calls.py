"""Calls on arrays that lie as those of an earlier call do: how little Python runs, and that nothing else is taken."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.cpu import backend, core, score_mod_as_bias

needs_core = pytest.mark.skipif(core.why_not() is not None, reason=f"no compiled core: {core.why_not()}")
PACKAGE = str(Path(cuflash.__file__).parent)


def t5(s, i, j, *, head, table):
    return s + table[head, cuflash.minimum(cuflash.abs(i - j), 15)]


def points(s, i, j, *, x):
    return s - (x[i] - x[j]) ** 2


def tempered(s, i, j, *, head, table, cap):
    return cap * cuflash.tanh(s * table[head, 0])


def documents(i, j, *, document):
    return document[i] == document[j]


def stripes(i, j):
    return (i + j) % 3 != 0


def arrays_of(attn, seed, shape=(1, 2, 64, 64), dtype=np.float32):
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.standard_normal(shape).astype(dtype)

    arrays = {name: normal(*shape) for name in ("q", "k", "v", "dout")}
    own = {
        "table": normal(shape[1], 16),
        "x": normal(shape[2]),
        "cap": np.array(seed + 1, dtype),
        "document": random.integers(0, 3, shape[2]),
    }
    return arrays, {name: own[name] for name in attn.options.score_args}


def passes(attn, seed, gradients=(), **changes):
    """Functions that compute both passes."""
    arrays, own = arrays_of(attn, seed, **changes)
    q, k, v, dout = arrays.values()
    out, lse = attn.forward(q, k, v, **own)
    need = {"need": ("dq", "dk", "dv", *gradients)} if gradients else {}
    return {
        "forward": lambda: attn.forward(q, k, v, **own),
        "backward": lambda: attn.backward(dout, q, k, v, out, lse, **own, **need),
    }


def calls_of(compute):
    """How many functions of the package a call enters, without comprehensions and lambdas."""
    entered = []

    def enter(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            entered.append(code.co_name)

    sys.setprofile(enter)
    try:
        compute()
    finally:
        sys.setprofile(None)
    return len(entered), entered


ONE = cuflash.FlashAttention()
# What is computed, gradients besides dq, dk and dv, and the most calls of each pass.
CASES = {
    "plain": (ONE, (), 9, 10),
    "t5": (cuflash.FlashAttention(score=t5), (), 17, 18),
    "points": (cuflash.FlashAttention(score=points), (), 17, 18),
    "stripes": (cuflash.FlashAttention(mask=stripes), (), 17, 18),
    "t5 and its gradient": (cuflash.FlashAttention(score=t5), ("dtable",), 17, 24),
    "tempered": (cuflash.FlashAttention(score=tempered), (), 20, 26),
}


@needs_core
@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_enters_few_functions(name):
    attn, gradients, *most = CASES[name]
    repeated = passes(attn, 0, gradients)
    for compute, limit in zip(repeated.values(), most, strict=True):
        compute()
        with cuflash.cpu_threads(1):  # else the quota of the process is read once a second
            count, entered = calls_of(compute)
        assert count <= limit, entered


@needs_core
@pytest.mark.parametrize("mask", [None, stripes, documents])
@pytest.mark.parametrize("score", [None, t5, points, tempered])
def test_a_repeated_call_takes_no_number_from_an_earlier_one(score, mask, monkeypatch):
    """Neither from arrays that a score or a mask reads, nor from the results: bit by bit, as where nothing is kept."""
    attn = cuflash.FlashAttention(score=score, mask=mask)
    gradients = attn.options.score_gradients
    every = [passes(attn, seed, gradients) for seed in range(3)]
    alone = []
    for own in every:
        backend._known.clear()
        backend._repeatable.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(score_mod_as_bias, "MOST_FOLDED", 0)
            alone.append([compute() for compute in own.values()])
    backend._known.clear()
    backend._repeatable.cache_clear()
    with ThreadPoolExecutor(3) as pool:
        repeated = [[pool.submit(compute) for compute in own.values()] for own in every * 4]
    for found, expected in zip(repeated, alone * 4, strict=True):
        for own, other in zip(found, expected, strict=True):
            for x, y in zip(own.result(), other, strict=True):
                np.testing.assert_array_equal(x, y)


@needs_core
def test_a_repeated_call_refuses_what_the_first_one_refuses():
    arrays, _ = arrays_of(ONE, 0)
    q, k, v, out = arrays.values()
    for _ in range(2):
        assert ONE.forward(q, k, v, out=out).out is out
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out: got a read-only array"):
        ONE.forward(q, k, v, out=out)
    other: Any = k.tolist()
    with pytest.raises(TypeError, match="k: got list"):
        ONE.forward(q, other, v)
    with pytest.raises(TypeError, match="k: got None"):
        ONE.forward(q, None, v)


@needs_core
def test_repeated_calls_with_functions_are_checked():
    attn = cuflash.FlashAttention(score=t5, mask=documents)
    arrays, own = arrays_of(attn, 0)
    q, k, v, out = arrays.values()
    expected = attn.forward(q, k, v, **own)
    np.testing.assert_array_equal(attn.forward(q, k, v, **own, out=out).out, expected.out)
    assert attn.forward(q, k, v, **own, out=out).out is out
    with pytest.raises(ValueError, match="out: got memory shared with q"):
        attn.forward(q, k, v, **own, out=q)
    own["table"] = out[0, :, :16, 0]
    with pytest.raises(ValueError, match="out: got memory shared with table"):
        attn.forward(q, k, v, **own, out=out)


@needs_core
def test_a_remembered_call_keeps_its_dtypes():
    """Later calls are compared with their addresses, which another dtype must not get."""
    arrays = arrays_of(ONE, 0)[0]
    q, k, v, _ = arrays.values()
    ONE.forward(q, k, v)
    dtype = np.dtype(np.float32, metadata={"equal to": "that of the first call"})
    own = [x.view(dtype) for x in (q, k, v)]
    bound = ONE.bind(*own)
    ONE.forward(*own)
    del own
    kept = sys.getrefcount(dtype)
    backend._known.clear()
    without_call = sys.getrefcount(dtype)
    del bound
    assert kept > without_call > sys.getrefcount(dtype)
