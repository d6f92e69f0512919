"""Lengths of 0, one or several: results are written, whatever was in their memory, and nothing else is."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.passes import BACKWARD, PASSES
from tests.compiled import INSTRUCTION_SETS, NUMPY, way_taken
from tests.sampling import examples
from tests.scored import MASKS, SCORES, Scored, score_args_of

WAYS = (*INSTRUCTION_SETS[:1], NUMPY)
LENGTHS = {"batch": (1, 2), "num_heads_kv": (1, 2), "group": (1, 2), "seqlen_q": (1, 5, 40), "seqlen_k": (1, 6, 300)}


@st.composite
def cases(draw):
    """Cases of which at least one length is 0: of the batch or a batch axis, of heads, of queries or of keys."""

    def pick(*values):
        return draw(st.sampled_from(values))

    empty = draw(st.sets(st.sampled_from(tuple(LENGTHS)), min_size=1))
    sizes = {name: 0 if name in empty else pick(*values) for name, values in LENGTHS.items()}
    batch, heads_kv, seqlen_q, seqlen_k = (sizes[name] for name in ("batch", "num_heads_kv", "seqlen_q", "seqlen_k"))
    heads, axes = heads_kv * sizes["group"], (batch,)
    has_axes, is_packed = pick(False, False, True), pick(False, False, False, True)
    if has_axes and not is_packed:
        axes = (*draw(st.lists(st.sampled_from((0, 1, 2) if batch == 0 else (1, 2)), max_size=2)), batch)

    def some(*shape):
        return tuple(pick(n, 1) for n in shape)

    def of_scores():
        return draw(st.none() | st.just((*some(*axes), *some(heads, seqlen_q, seqlen_k))))

    options: dict[str, Any] = {}
    if is_packed:
        starts = [(*[0] * batch, n) if batch else (0,) for n in (seqlen_q, seqlen_k)]
        options |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    else:
        options |= {"bias": of_scores(), "mask": of_scores(), "bias_dtype": pick("softmax", "input")}
        if has_axes:
            options |= {"axes": axes, "batch_axes": tuple((name, some(*axes)) for name in ("k", "v"))}
            options["batch_axes"] += (("kv_lengths", axes),)
        lengths = tuple(draw(st.integers(0, seqlen_k)) for _ in range(math.prod(axes)))
        options["kv_lengths"] = pick(None, lengths)
        options["block_mask"] = pick(None, some(heads))
    return ct.Case(
        batch=batch, num_heads=heads, num_heads_kv=heads_kv, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        head_dim=pick(8, 3, 70), head_dim_v=pick(8, 5), dtype=pick("float32", "float64", "bfloat16", "float16"),
        alibi_slopes=pick(None, (heads,), (*axes, heads) if has_axes else (batch, heads)), sinks=pick(False, True),
        softcap=pick(None, 5.0), scale=pick(None, 0.0, -1.0), dropout=pick(0.0, 0.5), dlse=pick(False, True),
        causal=pick(False, True), block_size=(16, 16), layout=pick("bhsd", "bshd"), **options,
    )  # fmt: skip


def poison(patch):
    """Have fresh memory be full of NaN."""
    empty = np.empty

    def poisoned(*args, **kwargs):
        array = empty(*args, **kwargs)
        if array.dtype != object:
            array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    patch.setattr(np, "empty", poisoned)
    patch.setattr(np, "empty_like", lambda x, *args, **kwargs: poisoned(x.shape, *(args or (x.dtype,)), **kwargs))


def result_array(shape, dtype, around):
    """An array of NaN; one without elements lies in the middle of `around`, whose numbers are those of others."""
    if 0 in shape:
        memory = around[1:].view(np.uint8).view(dtype)
        return np.lib.stride_tricks.as_strided(memory, shape, (0,) * len(shape))  # NumPy's strides of such arrays
    return np.full(shape, np.nan, dtype)


@settings(max_examples=examples(200))
@given(cases(), st.sampled_from(("8.0", "9.0")))
@example(ct.Case(batch=0, seqlen_q=215, seqlen_k=145, head_dim=48, dtype="float32"), "9.0")
def test_kernels_have_nothing_to_do_without_elements(case, arch):
    """No map has an axis of length 0, which the driver refuses; where dbias has no elements, no block stores any."""
    for pass_ in PASSES:
        need = ct.gradients_of(case.problem) if pass_ is BACKWARD else None
        plan = choose_plan(case.problem, DeviceSpec.for_arch(arch), pass_, need=need)
        assert not [spec for spec in plan.tensor_maps if 0 in spec.shape]
        if case.bias is not None and 0 in case.bias:
            assert not [x.name for x in plan.kernels if x.grid and dict(x.defines).get("CUFLASH_NEEDS_DBIAS")]


@pytest.mark.parametrize("way", [way for _, way in WAYS], ids=[name for name, _ in WAYS])
def test_results_are_written(way):
    @settings(max_examples=examples(400))
    @given(cases(), st.booleans())
    def every_case(case, gives_results):
        arrays, around = case.arrays(), np.full(8, 7.0)
        attn: Any = cuflash.FlashAttention(**case.keywords)
        inputs, optional, problem = ct.qkv(arrays), ct.optional(arrays) | case.random, case.problem
        need = ct.gradients_of(problem)
        results: dict[str, Any] = {"out": {}, "backward": {}}
        with way_taken(way), pytest.MonkeyPatch.context() as patch:
            poison(patch)
            out, lse = attn.forward(*inputs, **optional)
            if gives_results:
                results["out"] = {"out": result_array(out.shape, out.dtype, around)}
                shapes = {name: arrays.get(name[1:], np.empty((), lse.dtype)) for name in need}
                results["backward"] = {name: result_array(x.shape, x.dtype, around) for name, x in shapes.items()}
                out, lse = attn.forward(*inputs, **optional, **results["out"])
            of_backward = ct.optional_backward(arrays) | case.random | results["backward"]
            found = attn.backward(arrays["dout"], *inputs, out, lse, need=need, **of_backward)
        assert (around == 7).all()
        ct.assert_forward(case, out, lse)
        ct.assert_backward(case, **dict(zip(need, found, strict=True)))

    every_case()


@pytest.mark.parametrize("way", [way for _, way in WAYS], ids=[name for name, _ in WAYS])
def test_functions_of_no_pairs(way):
    """Nothing is read: neither the arrays of functions nor gradients of these, which are zeros."""

    @settings(max_examples=examples(200))
    @given(
        st.sampled_from((*SCORES, None)), st.sampled_from((*MASKS, None)), st.sampled_from(("float32", "bfloat16")),
        st.sets(st.sampled_from(tuple(LENGTHS)), min_size=1), st.sampled_from(((), (2,), (0,), (1, 2))),
    )  # fmt: skip
    def every_case(score, mask, dtype, empty, axes):
        functions = (SCORES[score] if score else None, MASKS[mask] if mask else None)
        batch, heads_kv, group, rows, keys = (0 if name in empty else values[-1] for name, values in LENGTHS.items())
        heads = heads_kv * group
        q, k, dout = (np.ones((*axes, batch, h, n, 8), ct.numpy_dtype(dtype))
                      for h, n in ((heads, rows), (heads_kv, keys), (heads, rows)))  # fmt: skip
        score_args = score_args_of(functions, (math.prod(axes) * batch, heads, rows, keys), dtype, 0)
        attn: Any = cuflash.FlashAttention(score=functions[0], mask=functions[1])
        with way_taken(way), pytest.MonkeyPatch.context() as patch:
            poison(patch)
            out, lse = attn.forward(q, k, k, **score_args)
            one = [np.ones((math.prod(x.shape[:-3]), *x.shape[-3:]), x.dtype) for x in (q, k)]
            of_reads = Scored(attn, {"q": one[0], "k": one[1], "v": one[1], **score_args}, {}, "").problem
            need = ("dq", "dk", "dv", *of_reads.score_arg_gradients)
            gradients = attn.backward(dout, q, k, k, out, lse, **score_args, need=need)
        assert not out.any() and np.isneginf(lse).all()
        for name, x in zip(need, gradients, strict=True):
            assert not x.any(), name

    every_case()


@pytest.mark.parametrize("empty", LENGTHS)
@pytest.mark.parametrize("score", ["gathered", "gated", "t5", "of_rows"])
def test_no_kernel_fills_tables_of_no_pairs(score, empty):
    """It would read arrays that have no elements."""
    batch, heads_kv, group, rows, keys = (0 if name == empty else values[-1] for name, values in LENGTHS.items())
    heads = heads_kv * group
    q, k = (np.ones((batch, h, n, 8), np.float32) for h, n in ((heads, rows), (heads_kv, keys)))
    score_args = score_args_of((SCORES[score],), (batch, heads, rows, keys), "float32", 0)
    attn = cuflash.FlashAttention(score=SCORES[score])
    problem = Scored(attn, {"q": q, "k": k, "v": k, **score_args}, {}, "").problem
    for arch, pass_ in itertools.product(("8.0", "9.0"), PASSES):
        need = (*pass_.default, *(problem.score_arg_gradients if pass_ is BACKWARD else ()))
        plan = choose_plan(problem, DeviceSpec.for_arch(arch), pass_, need=need)
        assert not any(kernel.grid for kernel in plan.kernels if kernel.source == "helpers/hoisted.cu")
