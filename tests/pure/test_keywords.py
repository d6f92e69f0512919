"""Keyword arguments that a call does not take: the error says what is meant, and what takes it."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
from cuflash.spec.keywords import _MEANT
from cuflash.spec.outputs import ROW_REDUCTIONS

Q = np.ones((2, 4, 8), np.float32)
ATTN = cuflash.FlashAttention()
OUT, LSE = ATTN.forward(Q, Q, Q)
CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda **keywords: cuflash.attention(Q, Q, Q, **keywords),
    "FlashAttention": cuflash.FlashAttention,
    "ContextParallel": lambda **keywords: cd.ContextParallel(cd.threads(1)[0], split="contiguous", **keywords),
    "forward": lambda **keywords: ATTN.forward(Q, Q, Q, **keywords),
    "backward": lambda **keywords: ATTN.backward(OUT, Q, Q, Q, OUT, LSE, **keywords),
    "jvp": lambda **keywords: ATTN.jvp(Q, Q, Q, **keywords),
    "backward_jvp": lambda **keywords: ATTN.backward_jvp(OUT, Q, Q, Q, OUT, LSE, OUT, LSE, **keywords),
    "plan": lambda **keywords: ATTN.plan(Q, Q, Q, **keywords),
    "compile": lambda **keywords: ATTN.compile(Q, Q, Q, **keywords),
    "tune": lambda **keywords: ATTN.tune(Q, Q, Q, **keywords),
}
OPTIONS = tuple(inspect.signature(cuflash.FlashAttention).parameters)
ARRAYS = ("bias", "kv_lengths", "alibi_slopes", "sinks", "block_mask", "block_table", "cu_seqlens_q", "k_scale", "seed")


def message_of(method: str, name: str) -> str:
    """What a call says of a keyword."""
    with pytest.raises(TypeError) as caught:
        CALLS[method](**{name: 1})
    start = f"{method}() got an unexpected keyword argument {name!r}"
    assert str(caught.value).startswith(start)
    return str(caught.value).removeprefix(start)


@pytest.mark.parametrize("method", CALLS)
def test_foreign_names(method):
    """Names of other libraries lead to the argument here, or to what to do without one."""
    for name, (argument, note) in _MEANT.items():
        message = message_of(method, name)
        assert note in message
        if argument:
            assert message.startswith(f": expected {argument}")
            assert argument in {*OPTIONS, *inspect.signature(ATTN.backward).parameters}


@pytest.mark.parametrize("method", [name for name in CALLS if name.islower() and name != "attention"])
def test_options_of_constructors(method):
    """Options that a call is given instead of the constructor: attention alone takes both."""
    for name in OPTIONS:
        if name != "mask":
            assert message_of(method, name) == ": FlashAttention(...) and ContextParallel(...) take it"


@pytest.mark.parametrize("method", ["FlashAttention", "ContextParallel"])
def test_arrays_of_calls(method):
    """Arrays that a constructor is given instead of a call."""
    for name in ARRAYS:
        assert message_of(method, name) == ": forward and backward take it"


@pytest.mark.parametrize(
    ("method", "name", "takers"),
    [
        ("forward", "dlse", "backward takes"),
        ("forward", "need", "backward takes"),
        ("forward", "dq", "backward takes"),
        ("forward", "tq", "jvp and backward_jvp take"),
        ("forward", "tlse", "jvp takes"),
        ("jvp", "tdout", "backward_jvp takes"),
        ("backward", "tbias", "jvp and backward_jvp take"),
        ("attention", "deterministic", "FlashAttention(...) and ContextParallel(...) take"),
        ("attention", "lse", "forward and jvp take"),
        ("compile", "remember", "tune takes"),
    ],
)
def test_arguments_of_other_methods(method, name, takers):
    assert message_of(method, name) == f": {takers} it"


def is_visible_slip(name: str, slip: str) -> bool:
    return slip not in (*OPTIONS, *_MEANT) and slip.isidentifier() and name[:2] == slip[:2]


@given(data=st.data(), name=st.sampled_from([name for name in OPTIONS if len(name) > 4]))
@example(data=None, name="causal")
def test_slips_of_the_pen(data, name):
    """One letter that is missing, twice there, or in the wrong place still finds the option."""
    if data is None:
        slip = "casual"
    else:
        at = data.draw(st.integers(2, len(name) - 2))
        slip = data.draw(
            st.sampled_from(
                [
                    name[:at] + name[at + 1 :],
                    name[:at] + name[at] + name[at:],
                    name[:at] + name[at + 1] + name[at] + name[at + 2 :],
                ]
            )
        )
        assume(is_visible_slip(name, slip) and slip not in ARRAYS)
    assert message_of("attention" if name != "deterministic" else "FlashAttention", slip) == f": did you mean {name}?"


def test_a_score_function_s_array():
    """A misspelt array of a score function finds that of the function."""
    attn = cuflash.FlashAttention(score=lambda s, i, j, *, position: s - position[i])
    with pytest.raises(TypeError, match=r"'positon': did you mean position[?]$"):
        attn.forward(Q, Q, Q, positon=np.arange(4.0))
    with pytest.raises(TypeError, match=r"attention\(\) got .* 'positon': did you mean position[?]$"):
        cuflash.attention(Q, Q, Q, score=lambda s, i, j, *, position: s - position[i], positon=np.arange(4.0))


def test_names_without_a_meaning():
    """What resembles nothing gets Python's words alone."""
    assert message_of("forward", "xyzzy") == ""


def test_masks_of_the_other_kind():
    """An array where the constructor takes a function, and a function where forward takes an array."""
    with pytest.raises(TypeError, match=r"mask: got ndarray, .*; an array goes into mask= of forward and backward"):
        cuflash.FlashAttention(mask=np.ones((4, 4), bool))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"mask: got function, .*; a function goes into FlashAttention\(mask=\.\.\.\)"):
        ATTN.forward(Q, Q, Q, mask=lambda i, j: i >= j)


def test_attention_takes_every_option():
    """attention has the options of FlashAttention and the arrays of forward, but for what it has no use for."""
    own = set(inspect.signature(cuflash.attention).parameters)
    forward = set(inspect.signature(ATTN.forward).parameters)
    assert own == (set(OPTIONS) | forward) - {"deterministic", "lse", "want", *ROW_REDUCTIONS}


@given(st.booleans(), st.floats(-2, 2), st.integers(0, 2**31))
def test_attention_by_functions_and_dropout(has_mask, slope, seed):
    """Functions, their arrays and dropout in one call are those of FlashAttention and forward."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, 2, 9, 4))
    options: dict[str, Any] = {"score": lambda s, i, j, *, slope: s + slope * (i - j), "dropout": 0.25}
    if has_mask:
        options["mask"] = lambda i, j: i != j
    arrays: dict[str, Any] = {"slope": slope, "seed": seed, "offset": 1}
    expected = cuflash.FlashAttention(**options).forward(q, k, v, **arrays).out
    np.testing.assert_array_equal(cuflash.attention(q, k, v, **options, **arrays), expected)
