"""What `plan` says is what runs: the kernels, to the last define, whatever the arrays look like."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.spec.passes import BACKWARD, FORWARD
from tests.gpu.planned import plan_of
from tests.sampling import examples

pytestmark = pytest.mark.gpu

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "pages", "packed", "dropout")


def moved(cupy, array, steps):
    """A copy whose first element lies so many elements past an address of an allocation, with strides of its own."""
    storage = cupy.zeros(array.size * 2 + steps, array.dtype)
    if steps % 2:  # neighbours along the last axis are apart
        return cupy.ndarray(
            array.shape,
            array.dtype,
            storage.data + steps * array.dtype.itemsize,
            strides=tuple(2 * s for s in cupy.empty(array.shape, array.dtype).strides),
        )
    return storage[steps : steps + array.size].reshape(array.shape)


def kernels_of_calls():
    """Those of the launches that were made since they were forgotten last."""
    from cuflash.gpu import launch_cache

    return [made.plan.kernels for made in launch_cache._launches.values()]


@settings(max_examples=examples(160), deadline=None)
@given(case=ct.cases(features=FEATURES, max_scores=2**12, max_seqlen=130), data=st.data())
def test_the_kernels_of_a_plan_are_those_that_run(case, data, cupy):
    from cuflash.gpu import launch_cache

    case = replace(case, block_mask=None) if case.page_size else case
    options = {"deterministic": data.draw(st.booleans()), "precision": data.draw(st.sampled_from(("highest", "tf32")))}
    attn = cuflash.FlashAttention(**case.keywords, **options)
    arrays, problem = case.arrays(cupy.asarray), case.problem
    for name in ("q", "k", "v", "dout"):
        steps = data.draw(st.sampled_from((0, 0, 1, 2, 4)))
        if steps and name in arrays and arrays[name].size:
            copy = moved(cupy, arrays[name], steps)
            copy[...] = arrays[name]
            arrays[name] = copy
    inputs, optional = ct.qkv(arrays), ct.optional(arrays)
    if data.draw(st.booleans()):
        optional["out"] = cupy.zeros(problem.out_shape, arrays["q"].dtype)
    need = tuple(data.draw(st.lists(st.sampled_from(ct.gradients_of(problem)), min_size=1, unique=True)))
    launch_cache.forget_launches()
    out, lse = attn.forward(*inputs, **optional | case.random)
    assert kernels_of_calls() == [plan_of(FORWARD, attn, *inputs, **optional).kernels]
    if case.page_size:
        return
    launch_cache.forget_launches()
    rest = ct.optional_backward(arrays)
    attn.backward(arrays["dout"], *inputs, out, lse, **rest | case.random, need=need)
    planned = plan_of(BACKWARD, attn, *inputs, **rest, dout=arrays["dout"], out=out, lse=lse, need=need)
    assert kernels_of_calls() == [planned.kernels]
