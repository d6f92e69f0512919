"""Contenders: cuflash and its peers, each as two calls (forward, backward) on the inputs of one case.

An adapter raises `Absent` with the reason where its library, device or kernel is missing; a kernel that refuses a case
raises whatever its library raises. Backward calls run the gradient kernels alone on saved results where the library
lets them, so no autograd bookkeeping is timed. Those of PyTorch and of what builds on it are in `peers_torch`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from cuflash.arrays.array_info import numpy_dtype
from cuflash.spec.passes import BACKWARD, DEFAULT_PASSES, FORWARD, JVP, PASS_NAMES, PASSES_WITHOUT_TANGENTS
from cuflash.testing import reference

from . import environment, peers_float8, peers_runtimes, peers_second, peers_torch
from .cases import BLOCK, OPTIONS, THREADS, Case
from .contender import Absent, Calls, Contender, refuse, without_results
from .functions import DOCUMENTS, FUNCTIONS
from .inputs import RANDOM, Inputs, keywords_of, problem_of

STEPS = 2000  # of decoding, before the cache is as short again as at the start


def _poisoned(xp: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """An array of NaN (all bits set, in every dtype): an element that nothing writes is found by the check."""
    array = xp.empty(shape, dtype=numpy_dtype(dtype))
    array.reshape(-1).view(xp.uint8)[...] = 0xFF
    return array


def cuflash(
    case: Case,
    inputs: Inputs,
    *,
    deterministic: bool = False,
    allocate: bool = False,
    precision: Any = "highest",
    blocks: Literal["block_mask", "mask", ""] = "block_mask",
    more: str = "",
    function: bool = True,
) -> Contender:
    """cuflash's public interface, into arrays made once (as a training loop would), or allocating its results.

    `blocks` is the argument that blocks are given as. With "mask" it has their pairs; with "" they are left out: what
    takes time is another problem, whose results are not checked; so it is without `function`. `more` is a gradient
    besides dq, dk and dv, or "arrays" for those of the arrays that a function reads.
    """
    from cuflash import FlashAttention

    refuse(case, *(OPTIONS.keys() - {"lengths"}))  # cuflash-packed has those
    if more == "dbias" and not case.bias:
        raise Absent("needs a bias")
    named = FUNCTIONS[case.function] if case.function and function else None
    if more == "arrays" and (named is None or not named.gradients):
        raise Absent("needs a score")
    if not function and not case.function:
        raise Absent("needs a function")
    xp, q, k, v, dout = inputs.xp, inputs.q, inputs.k, inputs.v, inputs.dout
    terms = dict(inputs.terms)
    if not function:
        terms = {name: x for name, x in terms.items() if name not in FUNCTIONS[case.function].shapes}
    if blocks == "mask" and not case.blocks_kept:
        raise Absent("needs blocks")
    if case.blocks_kept and blocks == "block_mask":
        terms["block_mask"] = xp.asarray(case.block_mask())
    elif case.blocks_kept and blocks == "mask":
        rows = xp.repeat(xp.asarray(case.block_mask()), BLOCK, axis=0)[: case.seqlen_q]
        terms["mask"] = xp.ascontiguousarray(xp.repeat(rows, BLOCK, axis=1)[:, : case.seqlen_k])
    computed = case if function else replace(case, function="")
    attn = FlashAttention(**keywords_of(computed), deterministic=deterministic, precision=precision)
    out = _poisoned(xp, case.out_shape, case.dtype)
    lse = _poisoned(xp, case.out_shape[:3], case.softmax_dtype)
    shapes = {"dq": case.q_shape, "dk": case.k_shape, "dv": case.v_shape}
    gradients = {name: _poisoned(xp, shape, case.dtype) for name, shape in shapes.items()}
    others = named.gradients if more == "arrays" and named else tuple(filter(None, (more,)))
    for name in others:
        gradients[name] = _poisoned(xp, *case.terms.get(name[1:], ((), case.softmax_dtype)))
    given = terms | RANDOM if case.dropout else terms
    attn.forward(q, k, v, **given, out=out, lse=lse)  # backward may be timed without forward
    into = {"out": out, "lse": lse}
    if allocate:
        into = gradients = {}
    calls: Calls = {
        "forward": lambda: (attn.forward(q, k, v, **given, **into).out,),
        "backward": lambda: tuple(attn.backward(dout, q, k, v, out, lse, **given, **gradients))[:3],
    }
    if inputs.tangents:
        calls |= _second_order(attn, case, inputs, given, allocate=allocate)
    if not blocks or not function:
        calls = without_results(calls)
    coarser = 2.0**13 if precision == "tf32" else 1.0  # 11 bits instead of 24
    need = ("dq", "dk", "dv", *others)
    plans = _describe(attn, q, k, v, **terms, **inputs.tangents, need=need)
    return Contender(calls, plans=plans, coarser=coarser)


def _second_order(attn: Any, case: Case, inputs: Inputs, given: Mapping[str, Any], *, allocate: bool) -> Calls:
    """The passes with tangents, into arrays made once or allocating results; and the double backward pass."""
    from cuflash import double_backward

    xp, dout, tangents = inputs.xp, inputs.dout, inputs.tangents
    operands = (inputs.q, inputs.k, inputs.v)
    shapes = {"q": case.q_shape, "k": case.k_shape, "v": case.v_shape}

    @functools.cache
    def results() -> dict[str, Any]:
        """Of jvp, which backward_jvp reads: it may be timed alone."""
        into: dict[str, Any] = (
            {}
            if allocate
            else {
                **{name: _poisoned(xp, case.out_shape, case.dtype) for name in ("out", "tout")},
                **{name: _poisoned(xp, case.out_shape[:3], case.softmax_dtype) for name in ("lse", "tlse")},
            }
        )
        made: dict[str, Any] = attn.jvp(*operands, **given, **tangents, **into)._asdict()
        return made

    @functools.cache
    def gradients() -> dict[str, Any]:
        return {} if allocate else {f"td{x}": _poisoned(xp, shape, case.dtype) for x, shape in shapes.items()}

    def jvp() -> tuple[Any, ...]:
        return (attn.jvp(*operands, **given, **tangents, **({} if allocate else results())).tout,)

    def backward_jvp() -> tuple[Any, ...]:
        return tuple(attn.backward_jvp(dout, *operands, **results(), **given, **tangents, **gradients()))

    def both() -> tuple[Any, ...]:
        cotangents = {f"d{name[1:]}": x for name, x in tangents.items()}
        found = double_backward(attn, cotangents, dout, *operands, **given)
        return (found.ddout, *found.gradients)

    return {"jvp": jvp, "backward_jvp": backward_jvp, "double_backward": both}


def cuflash_threads(case: Case, inputs: Inputs, *, count: int) -> Contender:
    """cuflash on so many of the cores that this process has."""
    from cuflash import cpu_threads

    refuse(case)
    if inputs.xp.__name__ == "cupy":
        raise Absent("needs NumPy arrays")
    if count >= environment.cores():
        raise Absent(f"needs more than {count} cores")

    def on_threads(call: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
        def run() -> tuple[Any, ...]:
            with cpu_threads(count):
                return call()

        return run

    made = cuflash(case, inputs)
    return replace(made, calls={name: on_threads(call) for name, call in made.calls.items()})


def cuflash_limited(case: Case, inputs: Inputs, *, instructions: str) -> Contender:
    """cuflash on a processor that has better instructions, by the compiled core for these."""
    from cuflash.cpu import core

    refuse(case)
    if inputs.xp.__name__ == "cupy":
        raise Absent("needs NumPy arrays")
    skipped = core.instruction_sets().get(instructions)
    if skipped is None:
        raise Absent(f"needs the compiled core with {instructions}")

    def limited(call: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
        def run() -> tuple[Any, ...]:
            usual = core.SKIPPED_INSTRUCTION_SETS
            core.SKIPPED_INSTRUCTION_SETS = skipped
            try:
                return call()
            finally:
                core.SKIPPED_INSTRUCTION_SETS = usual

        return run

    made = cuflash(case, inputs)
    return replace(made, calls={name: limited(call) for name, call in made.calls.items()})


def cuflash_as(case: Case, inputs: Inputs, *, arch: str) -> Contender:
    """cuflash by the kernels for another compute capability, on a device that has its instructions and later ones."""
    refuse(case, *(OPTIONS.keys() - {"lengths", "function"}))
    if inputs.xp.__name__ != "cupy":
        raise Absent("needs CuPy arrays")
    from cuflash import FlashAttention
    from cuflash.gpu import backend as gpu_backend
    from cuflash.plan import choose_plan

    options, terms = FlashAttention(**keywords_of(case)).options, dict(inputs.terms)
    if case.blocks_kept:
        terms["block_mask"] = inputs.xp.asarray(case.block_mask())
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **terms}
    random = RANDOM["seed"], RANDOM["offset"]

    (first, *_), _ = gpu_backend.trials(FORWARD, options, arrays, random)
    plans = {pass_: choose_plan(first.problem, first.device.as_arch(arch), pass_) for pass_ in PASSES_WITHOUT_TANGENTS}

    @functools.cache
    def forward() -> Callable[[], tuple[Any, ...]]:
        return gpu_backend.trials(FORWARD, options, arrays, random)[1](plans[FORWARD])

    @functools.cache
    def backward() -> Callable[[], tuple[Any, ...]]:
        out, lse = forward()()
        given = {"dout": inputs.dout, "out": out, "lse": lse, **arrays}
        return gpu_backend.trials(BACKWARD, options, given, random)[1](plans[BACKWARD])

    return Contender(
        {"forward": lambda: forward()()[:1], "backward": lambda: backward()()},
        plans={pass_.name: plan.describe() for pass_, plan in plans.items()},
    )


def _by_bytes(xp: Any, x: Any) -> tuple[Any, Any]:
    """An array in float8_e4m3fn with a scale for each head, a batch entry at a time: rounding takes memory."""
    from cuflash import fp8, quantize

    array, scale = xp.empty(x.shape, "uint8"), xp.empty((*x.shape[:2], 1), "float32")
    for b, entry in enumerate(x):
        codes, scale[b] = quantize(entry)
        array[b] = codes.view("uint8") if xp.__name__ == "numpy" else codes.bits
    return fp8(array, "e4m3"), scale


def cuflash_float8(case: Case, inputs: Inputs, *, names: str) -> Contender:
    """cuflash on fp8 arrays, those of `names`; what is rounded before is not timed.

    The check is against the numbers before they were rounded to 4 digits of base 2 where bfloat16 has 8.
    """
    from cuflash import FlashAttention

    refuse(case)
    if case.dtype != "bfloat16":
        raise Absent("needs bfloat16")
    arrays, scales = {"q": inputs.q, "k": inputs.k, "v": inputs.v}, {}
    for name in names:
        arrays[name], scales[f"{name}_scale"] = _by_bytes(inputs.xp, arrays[name])
    attn = FlashAttention(causal=case.causal)
    into = {
        "out": _poisoned(inputs.xp, case.out_shape, case.dtype),
        "lse": _poisoned(inputs.xp, case.out_shape[:3], case.softmax_dtype),
    }
    return Contender(
        {"forward": lambda: (attn.forward(**arrays, **scales, **into).out,)},
        plans={"forward": _describe(attn, **arrays, **scales)["forward"]},
        coarser=peers_float8.COARSER,
    )


def cuflash_packed(case: Case, inputs: Inputs) -> Contender:
    """The batch entries of a case one after the other, into arrays made once."""
    from cuflash import FlashAttention

    xp, lengths = inputs.xp, case.lengths or (case.seqlen_q,) * case.batch
    of_documents = case.function == "documents"
    refuse(case, "lengths", *(("function",) if of_documents else ()))
    if case.seqlen_q != case.seqlen_k:
        raise Absent("queries and keys of different lengths")
    attn = FlashAttention(causal=case.causal)
    bounds = [sum(lengths[:b]) for b in range(case.batch + 1)]
    sequences = range(0, bounds[-1] + 1, case.seqlen_q // DOCUMENTS) if of_documents else bounds
    starts = xp.asarray(list(sequences), dtype="int32")
    terms = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}

    def packed(array: Any) -> Any:
        return xp.concatenate([array[b, :, :n] for b, n in enumerate(lengths)], axis=1)

    def unpacked(array: Any) -> Any:
        padded = xp.zeros((case.batch, array.shape[0], case.seqlen_q, array.shape[2]), array.dtype)
        for b, n in enumerate(lengths):
            padded[b, :, :n] = array[:, bounds[b] : bounds[b] + n]
        return padded

    q, k, v, dout = (packed(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    out = _poisoned(xp, dout.shape, case.dtype)
    lse = _poisoned(xp, dout.shape[:2], case.softmax_dtype)
    gradients = {name: _poisoned(xp, x.shape, case.dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    attn.forward(q, k, v, **terms, out=out, lse=lse)
    calls: Calls = {
        "forward": lambda: (attn.forward(q, k, v, **terms, out=out, lse=lse).out,),
        "backward": lambda: tuple(attn.backward(dout, q, k, v, out, lse, **terms, **gradients)),
    }
    return Contender(calls, to_array=unpacked, plans=_describe(attn, q, k, v, **terms))


def cuflash_bound(case: Case, inputs: Inputs) -> Contender:
    """Calls that `FlashAttention.bind` returns, into arrays made once."""
    from cuflash import FlashAttention

    refuse(case)
    attn = FlashAttention(**keywords_of(case))
    out, lse = (
        _poisoned(inputs.xp, shape, dtype)
        for shape, dtype in ((case.out_shape, case.dtype), (case.out_shape[:3], case.softmax_dtype))
    )
    call = attn.bind(inputs.q, inputs.k, inputs.v)
    return Contender(
        {"forward": lambda: (call(inputs.q, inputs.k, inputs.v, out=out, lse=lse).out,)},
        plans={"forward": _describe(attn, inputs.q, inputs.k, inputs.v)["forward"]},
    )


def cuflash_steps(case: Case, inputs: Inputs, *, is_bound: bool = False) -> Contender:
    """Decoding: keys and values are slices of a cache, one row longer in each call; results are allocated."""
    from cuflash import FlashAttention

    xp = inputs.xp
    refuse(case)

    def cache(x: Any) -> Any:
        rows = xp.zeros((*x.shape[:2], STEPS, x.shape[3]), x.dtype)
        return xp.concatenate([x, rows], axis=2)

    k, v = cache(inputs.k), cache(inputs.v)
    steps = [(k[:, :, :n], v[:, :, :n]) for n in range(case.seqlen_k, case.seqlen_k + STEPS)]
    following = itertools.cycle(steps)
    attn = FlashAttention(causal=case.causal)
    forward = attn.bind(inputs.q, *steps[0]) if is_bound else attn.forward
    return Contender(
        {"forward": lambda: (forward(inputs.q, *next(following)).out,)},
        plans={"forward": _describe(attn, inputs.q, *steps[0])["forward"]},
    )


def cuflash_kv_lengths(case: Case, inputs: Inputs) -> Contender:
    """Decoding: keys and values are the whole cache, and an array says how many there are; results are allocated."""
    from cuflash import FlashAttention

    refuse(case)
    lengths = inputs.xp.full(case.batch, case.seqlen_k, "int32")
    attn = FlashAttention(causal=case.causal)
    return Contender(
        {"forward": lambda: (attn.forward(inputs.q, inputs.k, inputs.v, kv_lengths=lengths).out,)},
        plans={"forward": _describe(attn, inputs.q, inputs.k, inputs.v, kv_lengths=lengths)["forward"]},
    )


def _describe(attn: Any, q: Any, k: Any, v: Any, **keywords: Any) -> dict[str, str]:
    """What `plan` says of each pass that there is; a plan on the CPU is of all."""
    wanted = PASS_NAMES if any(name in keywords for name in JVP.takes) else DEFAULT_PASSES
    plans = attn.plan(q, k, v, **keywords, passes=wanted)
    passes = {name: getattr(plans, name, plans) for name in wanted}
    return {name: plan.describe() for name, plan in passes.items() if plan is not None}


def _paged(page_size: int) -> Callable[[Case, Inputs], Contender]:
    """cuflash on keys and values in pages of a pool, in no order."""

    def contender(case: Case, inputs: Inputs) -> Contender:
        from cuflash import FlashAttention

        refuse(case)
        xp = inputs.xp
        if case.seqlen_k % page_size:
            raise Absent(f"{case.seqlen_k} keys are no whole pages of {page_size}")
        max_pages = case.seqlen_k // page_size
        order = xp.random.permutation(case.batch * max_pages).astype(xp.int32)
        table = order.reshape(case.batch, max_pages)
        lengths = xp.full(case.batch, case.seqlen_k, xp.int32)

        def pool(x: Any) -> Any:
            _, heads, _, dim = x.shape
            bits = x.view(f"u{x.dtype.itemsize}")  # which every library can scatter
            pages = bits.reshape(case.batch, heads, max_pages, page_size, dim).swapaxes(1, 2)
            made = xp.empty((len(order), heads, page_size, dim), bits.dtype)
            made[order] = pages.reshape(made.shape)
            return made.view(x.dtype)

        k, v = pool(inputs.k), pool(inputs.v)
        attn = FlashAttention(causal=case.causal)
        into = {
            "out": _poisoned(xp, case.out_shape, case.dtype),
            "lse": _poisoned(xp, case.out_shape[:3], case.softmax_dtype),
        }
        terms = {"block_table": table, "kv_lengths": lengths}
        plan = attn.plan(inputs.q, k, v, **terms)
        return Contender(
            {"forward": lambda: (attn.forward(inputs.q, k, v, **terms, **into).out,)},
            plans={"forward": getattr(plan, "forward", plan).describe()},
        )

    return contender


def naive(case: Case, inputs: Inputs) -> Contender:
    """The plain formula on whole arrays, 16-bit operands in float32; P is kept for the backward pass.

    A mask has one head for all. Dropout draws bits of its own, for all weights in one array that the backward pass gets
    again: the results are not those that are checked.
    """
    refuse(case, "mask", "dropout")
    if "h" in case.mask:
        raise Absent("is run without masks of heads")
    xp, group = inputs.xp, case.group_size
    needed = (8 if case.dropout else 6) * case.scores_bytes
    if xp.__name__ == "cupy" and needed > xp.cuda.runtime.memGetInfo()[0]:
        raise Absent(f"would need about {needed / 1e9:.0f} GB")
    dtype, compute = numpy_dtype(case.dtype), numpy_dtype(case.softmax_dtype)
    problem = problem_of(case, inputs.q, inputs.k, inputs.v, inputs.terms)
    shown = {name: x[:, None] for name, x in inputs.terms.items()}  # for all heads of a group

    def grouped(x: Any) -> Any:
        """(batch, heads_kv, group or 1, seqlen, dim), so that products broadcast over the query heads of a group."""
        heads_kv = case.num_heads_kv
        return x.reshape(x.shape[0], heads_kv, x.shape[1] // heads_kv, *x.shape[2:]).astype(compute, copy=False)

    def softmax() -> Any:
        products = reference.product(grouped(inputs.q), grouped(inputs.k).swapaxes(-1, -2))
        products *= problem.scale
        return reference.softmax(reference.scores(problem, products, **shown)[0])[0]

    random = xp.random.default_rng(0)

    def kept(p: Any) -> Any:
        """What the weights are multiplied by: 0 or 1 / (1 - rate); 1.0 without dropout."""
        if not case.dropout:
            return 1.0
        return (random.random(p.shape, dtype=p.dtype) >= case.dropout) / p.dtype.type(1 - case.dropout)

    def output(p: Any, z: Any) -> Any:
        return reference.output(p, z, grouped(inputs.v), compute)

    def forward() -> tuple[Any]:
        p = softmax()
        return (output(p, kept(p)).astype(dtype).reshape(case.out_shape),)

    saved: list[Any] = []  # by the first backward call: P is large, and a forward run does not need it

    def backward() -> tuple[Any, ...]:
        if not saved:
            p = softmax()
            z = kept(p)
            saved.extend((p, z, output(p, z)))
        p, z, out = saved
        q, k, v, dout = (grouped(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        delta = (dout * out).sum(axis=-1, keepdims=True)
        dq, dk, dv, *_ = reference.gradients(problem.scale, q, k, v, dout, p, delta, compute, Z=z)
        if group > 1:
            dk, dv = dk.sum(axis=2), dv.sum(axis=2)
        shapes = (case.q_shape, case.k_shape, case.v_shape)
        return tuple(x.astype(dtype).reshape(shape) for x, shape in zip((dq, dk, dv), shapes, strict=True))

    calls: Calls = {"forward": forward, "backward": backward}
    return Contender(without_results(calls) if case.dropout else calls)


def empty_launch(case: Case, inputs: Inputs) -> Contender:
    """One CuPy launch of a kernel that does nothing: the floor of host time."""
    if inputs.xp.__name__ != "cupy":
        raise Absent("needs CuPy arrays")
    kernel = inputs.xp.RawKernel('extern "C" __global__ void empty() {}', "empty")

    def launch() -> tuple[Any, ...]:
        kernel((1,), (1,), ())
        return ()

    return Contender({"forward": launch})


def _jax_and(module: str) -> tuple[Any, Any]:
    """JAX on a CUDA device, and a module that builds on it."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of the device's memory
    try:
        jax, built_on_it = importlib.import_module("jax"), importlib.import_module(module)
    except ImportError as error:
        raise Absent(f"jax: {error}") from None
    if jax.default_backend() != "gpu":
        raise Absent("this jax has no CUDA device")
    return jax, built_on_it


def fa3_jax(case: Case, inputs: Inputs) -> Contender:
    """Both passes of FlashAttention-3 (the flash-attn3-jax wheel); the layout is (batch, seqlen, heads, dim)."""
    refuse(case, "window")
    xp = inputs.xp
    if xp.__name__ != "cupy":
        raise Absent("needs CuPy arrays")
    jax, library = _jax_and("flash_attn3_jax")
    operands = (inputs.q, inputs.k, inputs.v, inputs.dout)
    q, k, v, dout = (jax.dlpack.from_dlpack(xp.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in operands)
    window = (case.window - 1, 0) if case.window else (-1, -1)
    forward = jax.jit(partial(library.flash_mha, is_causal=case.causal, window_size=window))
    gradients = jax.jit(jax.vjp(forward, q, k, v)[1])
    return Contender(
        {"forward": lambda: (forward(q, k, v),), "backward": lambda: gradients(dout)},
        to_array=lambda x: xp.from_dlpack(x).transpose(0, 2, 1, 3),
        wait=jax.block_until_ready,
    )


def jax_pallas(case: Case, inputs: Inputs) -> Contender:
    """The attention of JAX Pallas for compute capability 9.0, forward, with the fastest of its tiles of keys.

    Its layout is (batch, seqlen, heads, dim). It knows no scale: q is scaled before, and rounded once more by that.
    """
    refuse(case)
    xp = inputs.xp
    if xp.__name__ != "cupy":
        raise Absent("needs CuPy arrays")
    if case.dtype != "float16" or case.head_dim % 64 or case.head_dim_v != case.head_dim:
        raise Absent("needs float16, and one head dimension that is a multiple of 64")
    if case.seqlen_q % 128 or case.seqlen_k % 64:
        raise Absent("needs a multiple of 128 queries and of 64 keys")
    jax, pallas = _jax_and("jax.experimental.pallas.ops.gpu.attention_mgpu")

    scaled = (inputs.q.astype("float32") * case.head_dim**-0.5).astype(numpy_dtype(case.dtype))
    q, k, v = (
        jax.dlpack.from_dlpack(xp.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (scaled, inputs.k, inputs.v)
    )

    def with_tile(block_kv: int) -> Callable[[], tuple[Any]]:
        config = pallas.TuningConfig(block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=case.causal)
        return lambda: (pallas.attention(q, k, v, config),)

    def seconds(forward: Callable[[], tuple[Any]]) -> float:
        jax.block_until_ready(forward())
        start = time.perf_counter()
        jax.block_until_ready([forward() for _ in range(5)])
        return time.perf_counter() - start

    best, fastest, refusal = None, math.inf, ""
    for block_kv in (64, 128, 256):
        if case.seqlen_k % block_kv:
            continue
        try:
            taken = seconds(with_tile(block_kv))
        except (ValueError, NotImplementedError) as error:  # too much shared memory, for one
            refusal = str(error)
            continue
        if taken < fastest:
            best, fastest = block_kv, taken
    if best is None:
        raise Absent(f"none of its tiles runs: {refusal}")
    return Contender(
        {"forward": with_tile(best)},
        to_array=lambda x: xp.from_dlpack(x).transpose(0, 2, 1, 3),
        plans={"forward": f"block_q 64, block_kv {best}, 2 concurrent steps"},
        wait=jax.block_until_ready,
    )


ADAPTERS: dict[str, Callable[[Case, Inputs], Contender]] = {
    "cuflash": cuflash,
    "cuflash-alloc": lambda case, inputs: cuflash(case, inputs, allocate=True),
    "cuflash-deterministic": lambda case, inputs: cuflash(case, inputs, deterministic=True),
    "cuflash-dense": lambda case, inputs: cuflash(case, inputs, blocks=""),
    "cuflash-mask": lambda case, inputs: cuflash(case, inputs, blocks="mask"),
    "cuflash-dbias": lambda case, inputs: cuflash(case, inputs, more="dbias"),
    "cuflash-dscale": lambda case, inputs: cuflash(case, inputs, more="dscale"),
    "cuflash-plain": lambda case, inputs: cuflash(case, inputs, function=False),
    "cuflash-gradients": lambda case, inputs: cuflash(case, inputs, more="arrays"),
    "cuflash-tf32": lambda case, inputs: cuflash(case, inputs, precision="tf32"),
    **{f"cuflash-pages{size}": _paged(size) for size in (16, 64, 256)},
    "cuflash-fp8": lambda case, inputs: cuflash_float8(case, inputs, names="qkv"),
    "cuflash-fp8-cache": lambda case, inputs: cuflash_float8(case, inputs, names="kv"),
    "cudnn-fp8": peers_float8.cudnn,
    "cuflash-packed": cuflash_packed,
    **{f"cuflash-sm{arch.replace('.', '')}": partial(cuflash_as, arch=arch) for arch in ("7.5", "8.0")},
    **{f"cuflash-threads{n}": partial(cuflash_threads, count=n) for n in THREADS},
    "cuflash-avx2": partial(cuflash_limited, instructions="AVX2"),
    "cuflash-bound": cuflash_bound,
    "cuflash-steps": cuflash_steps,
    "cuflash-bound-steps": partial(cuflash_steps, is_bound=True),
    "cuflash-kv-lengths": cuflash_kv_lengths,
    **peers_torch.ADAPTERS,
    **peers_second.ADAPTERS,
    "onnxruntime": peers_runtimes.onnxruntime,
    "openvino": peers_runtimes.openvino,
    "fa3-jax": fa3_jax,
    "jax-pallas": jax_pallas,
    "naive": naive,
    "empty-launch": empty_launch,
}
