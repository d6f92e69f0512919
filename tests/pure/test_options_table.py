"""The tables of arguments in docs/options.md: as the program writes it, with every option, and true of the passes."""

import inspect

import pytest

import cuflash
import cuflash.testing as ct
from cuflash.spec.inputs import OPTIONAL_INPUTS
from cuflash.spec.outputs import GRADIENTS, MOVABLE
from tests.options_table import MEANINGS, PAGE, SHAPES, in_page, of_calls, of_constructor

OPTIONS, ARGUMENTS = ({name.split("`")[1]: rest for name, *rest in lines} for lines in (of_constructor(), of_calls()))


def test_the_table_is_current():
    text = PAGE.read_text()
    assert in_page(text) == text, "python -m tests.options_table writes it"
    stale = text.replace("`dbias`, `tbias`", "-", 1)
    assert stale != text and in_page(stale) == text


def test_every_option_is_in_the_table():
    own, calls = (inspect.signature(x).parameters for x in (cuflash.FlashAttention, cuflash.FlashAttention.backward))
    inputs = {"q", "k", "v", "dout", "out", "lse", "self", "score_args", *GRADIENTS}
    assert list(OPTIONS) == list(own)
    assert set(ARGUMENTS) - {"want"} == set(calls) - inputs
    assert len(OPTIONS) + len(ARGUMENTS) == len(MEANINGS)


def test_shapes_are_told_once():
    assert SHAPES.keys() == {row.name for row in OPTIONAL_INPUTS if not row.shapes}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradients_and_tangents_are_those_of_the_interface(name):
    derivatives = ARGUMENTS[name][2]
    assert (f"`d{name}`" in derivatives) == (f"d{name}" in GRADIENTS)
    assert (f"`t{name}`" in derivatives) == (name in MOVABLE or name == "dlse")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("bias", {"bias": (20, 20)}),
        ("sinks", {"sinks": True}),
        ("block_table", {"page_size": 16, "seqlen_k": 32}),
        ("k_scale", {"kv_dtype": "float8_e4m3fn", "k_scale": "head"}),
        ("dlse", {"dlse": True}),
    ],
)
def test_passes_take_what_the_table_says(name, fields):
    """Each is called; those that the table does not name refuse, or have no such argument."""
    case = ct.Case(**{"seqlen_q": 20, "seqlen_k": 20, "head_dim": 8, "dtype": "float32"} | fields)
    arrays, attn = case.arrays(), cuflash.FlashAttention(**case.keywords)
    q, k, v = ct.qkv(arrays)
    out, lse = attn.forward(q, k, v, **ct.optional(arrays))
    dout = arrays.get("dout", out)
    calls = {
        "forward": lambda: attn.forward(q, k, v, **ct.optional_backward(arrays)),
        "backward": lambda: attn.backward(dout, q, k, v, out, lse, **ct.optional_backward(arrays)),
        "jvp": lambda: attn.jvp(q, k, v, tq=q, **ct.optional_backward(arrays)),
        "backward_jvp": lambda: attn.backward_jvp(
            dout, q, k, v, out, lse, out, lse, tq=q, **ct.optional_backward(arrays)
        ),
    }
    for pass_, call in calls.items():
        if ARGUMENTS[name][3] == "all" or f"`{pass_}`" in ARGUMENTS[name][3]:
            call()
        else:
            with pytest.raises((NotImplementedError, TypeError)):
                call()
