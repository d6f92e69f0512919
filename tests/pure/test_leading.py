"""Leading axes: any number of them, broadcasting as numpy.matmul does, on every way of the CPU path."""

import pytest
from hypothesis import given, settings

import cuflash
import cuflash.testing as ct
from cuflash.cpu import core

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout")


def gradients_by_name(case, attn, arrays, **results):
    """out, lse and all gradients of a case, by the public interface."""
    inputs = ct.qkv(arrays)
    out, lse = attn.forward(*inputs, **ct.optional(arrays), **case.random)
    need = ct.gradients_of(case.problem)
    keywords = ct.optional_backward(arrays) | case.random | results
    found = attn.backward(arrays["dout"], *inputs, out, lse, need=need, **keywords)
    return out, lse, dict(zip(need, found, strict=True))


@pytest.mark.parametrize("way", ["core", "numpy"])
@settings(max_examples=60)
@given(ct.with_axes(ct.cases(ndims=(4,), features=FEATURES, max_seqlen=40, max_head_dim=24, max_scores=2**13)))
def test_results_are_those_of_arrays_with_every_axis(way, case):
    with pytest.MonkeyPatch.context() as patch:
        if way == "numpy":
            patch.setattr(core, "why_not", lambda problem=None: "a test asks for NumPy")
        arrays = case.arrays()
        out, lse, gradients = gradients_by_name(case, cuflash.FlashAttention(**case.keywords), arrays)
        ct.assert_forward(case, out, lse)
        ct.assert_backward(case, **gradients)
        for name, x in gradients.items():
            model = arrays.get(name[1:])
            assert (x.shape, x.dtype) == (((), lse.dtype) if model is None else (model.shape, model.dtype))
