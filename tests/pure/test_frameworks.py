"""What `cuflash.torch` and `cuflash.jax` share, which needs neither."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash import frameworks
from cuflash.frameworks import call, call_of, check_lse_keywords, forward_call, result_shapes
from tests.sampling import examples
from tests.second_derivatives import FEATURES

CASES = ct.cases(features=FEATURES, max_seqlen=17, max_head_dim=16, max_scores=2**10)


@settings(max_examples=examples(200))
@given(CASES)
def test_shapes_are_those_of_the_passes(case):
    arrays, attn = case.arrays(), cuflash.FlashAttention(**case.keywords)
    given = {name: arrays[name] for name in ("q", "k", "v")} | ct.optional(arrays)
    found = attn.jvp(**given, **case.random, tv=arrays["v"])._asdict()
    need = tuple(f"d{name}" for name in call(attn, tuple(given)).movable)
    of_forward = {"out": found["out"], "lse": found["lse"]}
    of_backward = given | of_forward | {"dout": arrays["dout"]}
    gradients = attn.backward(**of_backward, need=need, **case.random)._asdict()
    expected = {
        "forward": (given, (), of_forward),
        "jvp": (given, (), found),
        "backward": (of_backward, need, gradients),
    }
    for which, (taken, needed, results) in expected.items():
        shapes = {name: x.shape for name, x in taken.items()}
        right = {name: results[name].shape for name in needed or results}
        assert result_shapes(which, call(attn, tuple(taken), needed), shapes) == right


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((5, 4), (6, 4)),
        ((1, 5, 4), (6, 4)),
        ((5, 4), (1, 6, 4)),
        ((2, 5, 4), (3, 2, 6, 4)),
        ((7, 1, 2, 5, 4), (3, 2, 6, 4)),
        ((1, 0, 2, 5, 4), (1, 2, 6, 4)),
    ],
)
def test_batch_axes_broadcast(layout, q, k):
    if layout == "bshd":
        q, k = ((*x[:-3], x[-2], x[-3], x[-1]) if len(x) > 2 else x for x in (q, k))
    attn = cuflash.FlashAttention(layout=layout)
    found = attn.forward(np.zeros(q), np.zeros(k), np.zeros(k))
    shapes = result_shapes("forward", call(attn, ("q", "k", "v")), {"q": q, "k": k, "v": k})
    assert shapes == {"out": found.out.shape, "lse": found.lse.shape}


@settings(max_examples=examples(100))
@given(CASES, st.lists(st.sampled_from(["dq", "dk", "dv"]), unique=True))
def test_a_call_is_made_again_of_its_text(case, need):
    """To the last bit of a scale."""
    one = call(cuflash.FlashAttention(**case.keywords), ("q", "k", "v"), tuple(need))
    token = one.token
    frameworks._calls.clear()
    other = call_of(token)
    assert (other.attn, other.names, other.need) == (one.attn, one.names, one.need)
    assert call_of(token) is other


def test_functions_stay_in_their_process():
    attn = cuflash.FlashAttention(score=lambda s, i, j, *, gamma: s + gamma[i], mask=lambda i, j: j <= i)
    one = call(attn, ("q", "k", "v", "gamma"))
    assert call_of(one.token) is one
    others = {
        f: call(cuflash.FlashAttention(score=f), ("q", "k", "v")).token
        for f in (lambda s, i, j: s + i, lambda s, i, j: s + j)
    }
    assert len({one.token, *others.values()}) == 3
    options, *rest = json.loads(one.token)
    of_another = json.dumps([options | {"process": "0"}, *rest])
    with pytest.raises(RuntimeError, match=r"^score: got a graph that another process compiled.* with an empty cache$"):
        call_of(of_another)


def test_what_has_a_gradient():
    def score(s, i, j, *, gamma, unread):
        return s + gamma[i]

    attn = cuflash.FlashAttention(score=score, mask=lambda i, j, *, ends: j < ends[i])
    one = call(attn, ("q", "k", "v", "sinks", "gamma", "ends", "unread", "kv_lengths", "dout", "tq"))
    assert one.inputs == ("q", "k", "v", "sinks", "gamma", "ends", "unread", "kv_lengths")
    assert one.movable == ("q", "k", "v", "sinks", "gamma")
    assert one.moved({name: 0 for name in one.names}).keys() == {*one.movable, "dout", "tq"}
    with pytest.raises(NotImplementedError, match=r"^k_scale: got a derivative"):
        call(attn, ("q", "k", "v", "k_scale")).moved({"k_scale": 0})


@pytest.mark.parametrize(
    ("attn", "names", "options", "words"),
    [
        (None, ("gamma",), {}, r"attention\(\) got an unexpected keyword argument 'gamma'"),
        (None, ("scale",), {}, r"scale: got an array, expected a Python value, .* scale\.item\(\)"),
        (None, (), {"is_causal": True}, r"attention\(\) got an unexpected keyword argument 'is_causal'"),
        (None, (), {"bias": 1.0}, "bias: got float, expected an array of the library of q"),
        (None, (), {"mask": True}, "mask: got bool, expected an array of the library of q"),
        (cuflash.FlashAttention(), (), {"causal": True}, "causal: got it together with attn.* give it to attn"),
        (cuflash.FlashAttention(), (), {"mask": [True]}, "mask: got list, expected an array"),
    ],
)
def test_wrong_keywords_are_named(attn, names, options, words):
    with pytest.raises(TypeError, match=f"^{words}"):
        forward_call(attn, ("q", "k", "v", *names), options)


@pytest.mark.parametrize("attn", [{"causal": True}, True, "causal", cuflash.FlashAttention, cuflash.attention])
def test_attn_is_an_object(attn):
    x = np.ones((2, 3, 4))
    message = "^attn: got .*, expected .*FlashAttention"
    for call_of_attn in (
        lambda: forward_call(attn, ("q", "k", "v"), {}),
        lambda: check_lse_keywords(attn, {}),
        lambda: cuflash.hessian_vector_product(attn, x, x, x, x, tq=x),
        lambda: cuflash.double_backward(attn, {"dq": x}, x, x, x, x),
        lambda: cuflash.jvp_backward(attn, x, x, x, x, x, x[..., 0], x, x[..., 0], tq=x),
    ):
        with pytest.raises(TypeError, match=message):
            call_of_attn()


def test_a_subclass_is_not_taken_for_its_base():
    class Other(cuflash.FlashAttention[None]):
        pass

    one, other = cuflash.FlashAttention(causal=True), Other(causal=True)
    assert one == cuflash.FlashAttention(causal=True) and other == Other(causal=True) and one != other
    for attn in (one, other, one):
        assert call(attn, ("q", "k", "v")).attn == call_of(call(attn, ("q", "k", "v")).token).attn == attn


def test_options_are_kept():
    assert forward_call(None, ("q", "k", "v"), {"causal": True}) is forward_call(
        cuflash.FlashAttention(causal=True), ("q", "k", "v"), {}
    )
    assert forward_call(None, ("q", "k", "v"), {"window": [1, 2]}).attn.options.window == (1, 2)
