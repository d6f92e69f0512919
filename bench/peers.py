"""Contenders: cuflash and its peers, each as two calls (forward, backward) on the inputs of one case.

An adapter raises `Absent` with the reason where its library, device or kernel is missing; a kernel that refuses a case
raises whatever its library raises. Backward calls run the gradient kernels alone on saved results where the library
lets them, so no autograd bookkeeping is timed. FlashAttention-2 and the efficient kernel get (batch, seqlen, heads,
dim) memory: they copy other layouts of dout and out first, which would count against them.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cuflash.operands import numpy_dtype

from .cases import BLOCK, Case
from .formula import Inputs, gradient_rows, softmax_rows, widen

Calls = dict[str, Callable[[], tuple[Any, ...]]]
STEPS = 2000  # of decoding, before the cache is as short again as at the start


class Absent(Exception):
    """This contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Contender:
    """`calls["forward"]` returns (out,), `calls["backward"]` (dq, dk, dv), whole arrays that `to_array` turns into
    NumPy or CuPy ones; `plans` describes what runs, where the library tells; `coarser` is how much larger its unit of
    rounding is than the dtype's, where it was asked for less accuracy; `wait` returns when a result is there, where the
    library works on a stream of its own."""

    calls: Calls
    to_array: Callable[[Any], Any] = lambda x: x
    plans: Mapping[str, str] = field(default_factory=dict)
    coarser: float = 1.0
    wait: Callable[[Any], object] | None = None


def _poisoned(xp: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """An array of NaN (all bits set, in every dtype): an element that nothing writes is found by the check."""
    array = xp.empty(shape, dtype=numpy_dtype(dtype))
    array.view(xp.uint8)[...] = 0xFF
    return array


def cuflash(
    case: Case,
    inputs: Inputs,
    *,
    deterministic: bool = False,
    allocate: bool = False,
    precision: Any = "highest",
    dense: bool = False,
    dbias: bool = False,
) -> Contender:
    """cuflash's public interface, into arrays made once (as a training loop would), or allocating its results.

    With `dense` the block mask is left out: what takes time is another problem, whose results are not checked.
    """
    from cuflash import FlashAttention

    if dbias and not case.bias:
        raise Absent("needs a bias")
    if case.lengths:
        raise Absent("a batch of sequences of different lengths: cuflash-packed has them")
    xp, q, k, v, dout = inputs.xp, inputs.q, inputs.k, inputs.v, inputs.dout
    terms: dict[str, Any] = {"bias": inputs.bias} if case.bias else {}
    if case.blocks_kept and not dense:
        terms["block_mask"] = xp.asarray(case.block_mask())
    attn = FlashAttention(causal=case.causal, deterministic=deterministic, precision=precision, block_size=BLOCK)
    out = _poisoned(xp, case.out_shape, case.dtype)
    lse = _poisoned(xp, case.out_shape[:3], case.softmax_dtype)
    shapes = {"dq": case.q_shape, "dk": case.k_shape, "dv": case.v_shape}
    gradients = {name: _poisoned(xp, shape, case.dtype) for name, shape in shapes.items()}
    if dbias:
        gradients["dbias"] = _poisoned(xp, case.bias_shape, case.dtype)
    attn.forward(q, k, v, **terms, out=out, lse=lse)  # backward may be timed without forward
    into = {"out": out, "lse": lse}
    if allocate:
        into = gradients = {}
    calls: Calls = {
        "forward": lambda: (attn.forward(q, k, v, **terms, **into).out,),
        "backward": lambda: tuple(attn.backward(dout, q, k, v, out, lse, **terms, **gradients))[:3],
    }
    if dense:
        calls = {name: _without_results(call) for name, call in calls.items()}
    coarser = 2.0**13 if precision == "tf32" else 1.0  # 11 bits instead of 24
    need = ("dq", "dk", "dv", *(("dbias",) if dbias else ()))
    return Contender(calls, plans=_describe(attn, q, k, v, **terms, need=need), coarser=coarser)


def cuflash_packed(case: Case, inputs: Inputs) -> Contender:
    """The batch entries of a case one behind the other, into arrays made once."""
    from cuflash import FlashAttention

    xp, lengths = inputs.xp, case.lengths or (case.seqlen_q,) * case.batch
    if case.seqlen_q != case.seqlen_k:
        raise Absent("queries and keys of different lengths")
    if case.blocks_kept or case.bias:
        raise Absent("block masks and biases: packed sequences take none")
    attn = FlashAttention(causal=case.causal)
    bounds = [sum(lengths[:b]) for b in range(case.batch + 1)]
    starts = xp.asarray(bounds, dtype="int32")
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


def cuflash_steps(case: Case, inputs: Inputs) -> Contender:
    """Decoding: keys and values are slices of a cache, one row longer in each call; results are allocated."""
    from cuflash import FlashAttention

    xp = inputs.xp
    if case.bias or case.blocks_kept or case.lengths:
        raise Absent("is run without bias, block mask and lengths")

    def cache(x: Any) -> Any:
        rows = xp.zeros((*x.shape[:2], STEPS, x.shape[3]), x.dtype)
        return xp.concatenate([x, rows], axis=2)

    k, v = cache(inputs.k), cache(inputs.v)
    steps = [(k[:, :, :n], v[:, :, :n]) for n in range(case.seqlen_k, case.seqlen_k + STEPS)]
    following = itertools.cycle(steps)
    attn = FlashAttention(causal=case.causal)
    return Contender(
        {"forward": lambda: (attn.forward(inputs.q, *next(following)).out,)},
        plans={"forward": _describe(attn, inputs.q, *steps[0])["forward"]},
    )


def cuflash_kv_lengths(case: Case, inputs: Inputs) -> Contender:
    """Decoding: keys and values are the whole cache, and an array says how many there are; results are allocated."""
    from cuflash import FlashAttention

    lengths = inputs.xp.full(case.batch, case.seqlen_k, "int32")
    attn = FlashAttention(causal=case.causal)
    return Contender(
        {"forward": lambda: (attn.forward(inputs.q, inputs.k, inputs.v, kv_lengths=lengths).out,)},
        plans={"forward": _describe(attn, inputs.q, inputs.k, inputs.v, kv_lengths=lengths)["forward"]},
    )


def _without_results(call: Callable[[], object]) -> Callable[[], tuple[Any, ...]]:
    def run() -> tuple[Any, ...]:
        call()
        return ()

    return run


def _describe(attn: Any, q: Any, k: Any, v: Any, **keywords: Any) -> dict[str, str]:
    plans = attn.plan(q, k, v, **keywords)
    return {name: getattr(plans, name, plans).describe() for name in ("forward", "backward")}


def _refuse_block_masks(case: Case) -> None:
    if case.blocks_kept:
        raise Absent("has no block masks")


def _paged(page_size: int) -> Callable[[Case, Inputs], Contender]:
    """cuflash on keys and values in pages of a pool, in no order."""

    def contender(case: Case, inputs: Inputs) -> Contender:
        from cuflash import FlashAttention

        xp = inputs.xp
        if case.seqlen_k % page_size:
            raise Absent(f"{case.seqlen_k} keys are no whole pages of {page_size}")
        if case.bias:
            raise Absent("is run without a bias")
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
    """The plain formula on whole arrays, 16-bit operands in float32; P is kept for the backward pass."""
    _refuse_block_masks(case)
    if case.bias:
        raise Absent("is run without a bias")
    xp, group = inputs.xp, case.group_size
    needed = 6 * case.scores_bytes
    if xp.__name__ == "cupy" and needed > xp.cuda.runtime.memGetInfo()[0]:
        raise Absent(f"would need about {needed / 1e9:.0f} GB")
    dtype, compute, scale = numpy_dtype(case.dtype), case.softmax_dtype, case.head_dim**-0.5

    def grouped(x: Any) -> Any:
        """(batch, heads_kv, group or 1, seqlen, dim), so that products broadcast over the query heads of a group."""
        heads_kv = case.num_heads_kv
        return widen(x.reshape(x.shape[0], heads_kv, x.shape[1] // heads_kv, *x.shape[2:]), compute)

    def softmax() -> Any:
        return softmax_rows(xp, grouped(inputs.q), grouped(inputs.k), scale=scale, causal=case.causal)

    def forward() -> tuple[Any]:
        return ((softmax() @ grouped(inputs.v)).astype(dtype).reshape(case.out_shape),)

    saved: list[Any] = []  # P, made by the first backward call: it is large, and a forward run does not need it

    def backward() -> tuple[Any, ...]:
        if not saved:
            saved.append(softmax())
        operands = [grouped(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        dq, dk, dv = gradient_rows(saved[0], *operands, scale=scale, rounded=lambda x: x)
        if group > 1:
            dk, dv = dk.sum(axis=2), dv.sum(axis=2)
        shapes = (case.q_shape, case.k_shape, case.v_shape)
        return tuple(x.astype(dtype).reshape(shape) for x, shape in zip((dq, dk, dv), shapes, strict=True))

    return Contender({"forward": forward, "backward": backward})


def empty_launch(case: Case, inputs: Inputs) -> Contender:
    """One CuPy launch of a kernel that does nothing: the floor of host time."""
    if inputs.xp.__name__ != "cupy":
        raise Absent("needs CuPy arrays")
    kernel = inputs.xp.RawKernel('extern "C" __global__ void empty() {}', "empty")

    def launch() -> tuple[Any, ...]:
        kernel((1,), (1,), ())
        return ()

    return Contender({"forward": launch})


def fa2_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any) -> Calls:
    """FlashAttention-2 as PyTorch carries it."""
    aten = torch.ops.aten
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))

    def forward() -> Any:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, case.causal, False)

    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = forward()

    def backward() -> Any:
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, case.causal, seed, offset
        )

    return {"forward": lambda: forward()[:1], "backward": backward}


def cudnn_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any) -> Calls:
    """cuDNN's fused attention as PyTorch calls it, with lse as in training."""
    aten = torch.ops.aten

    def forward() -> Any:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, case.causal, False)

    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = forward()

    def backward() -> Any:
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, case.causal
        )

    return {"forward": lambda: forward()[:1], "backward": backward}


def efficient_calls(
    torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, bias: Any = None, *, dbias: bool = False
) -> Calls:
    """PyTorch's memory-efficient attention; its dbias is that of a whole bias, and summed behind it."""
    if case.group_size > 1:
        raise Absent("has no grouped heads")
    aten = torch.ops.aten
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))

    whole = None if bias is None else bias.expand(case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)
    summed = [axis for axis, name in enumerate("bhqk") if name not in case.bias]

    def forward() -> Any:
        return aten._scaled_dot_product_efficient_attention(q, k, v, whole, True, 0.0, case.causal)

    out, lse, seed, offset = forward()

    def backward() -> Any:
        wanted = [True, True, True, dbias]
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, whole, out, lse, seed, offset, 0.0, wanted, case.causal
        )
        if dbias and summed:
            gradients[3].sum(summed)
        return gradients[:3]

    return {"forward": lambda: forward()[:1], "backward": backward}


def torch_cpu_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any) -> Calls:
    """PyTorch's flash attention for the CPU."""
    if case.group_size > 1:
        raise Absent("has no grouped heads")
    aten = torch.ops.aten

    def forward() -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, case.causal)

    out, lse = forward()

    def backward() -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, case.causal)

    return {"forward": lambda: forward()[:1], "backward": backward}


def _autograd_calls(torch: Any, run: Callable[..., Any], q: Any, k: Any, v: Any, dout: Any, *more: Any) -> Calls:
    """For libraries whose gradient kernels only autograd can reach: the graph is built once and kept.

    `more` are inputs whose gradients are computed, and not returned.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *more)]
    saved: list[Any] = []  # made by the first backward call: the graph of the math kernel is large

    def backward() -> Any:
        if not saved:
            saved.append(run(*leaves))
        return torch.autograd.grad(saved[0], leaves, dout, retain_graph=True)[:3]

    return {"forward": lambda: (run(*leaves),), "backward": backward}


def math_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, bias: Any = None) -> Calls:
    """PyTorch's unfused attention; with a bias, its gradient too."""
    if case.causal and case.bias:
        raise Absent("takes a causal mask or a bias, not both")
    attention = importlib.import_module("torch.nn.attention")
    needed = 6 * case.scores_bytes
    if q.device.type == "cuda" and needed > torch.cuda.mem_get_info()[0]:
        raise Absent(f"would need about {needed / 1e9:.0f} GB")

    def run(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=case.causal, enable_gqa=case.group_size > 1
            )

    return _autograd_calls(torch, run, q, k, v, dout, *(() if bias is None else (bias,)))


def flex_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any) -> Calls:
    """FlexAttention, compiled for this case."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    functorch_config: Any = importlib.import_module("torch._functorch.config")
    functorch_config.donated_buffer = False  # the graph of a run is used again
    torch._dynamo.reset()  # else the limit on recompilations is met after a few cases
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    block_mask = None
    if case.causal:
        block_mask = flex.create_block_mask(
            lambda b, h, i, j: i >= j, None, None, case.seqlen_q, case.seqlen_k, device=q.device.type
        )
    if case.blocks_kept:
        blocks = torch.from_numpy(case.block_mask()).to(q.device)
        block_mask = flex.create_block_mask(
            lambda b, h, i, j: blocks[i // BLOCK, j // BLOCK],
            *(None, None, case.seqlen_q, case.seqlen_k),
            device=q.device.type,
            BLOCK_SIZE=BLOCK,
        )

    def run(q: Any, k: Any, v: Any) -> Any:
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=case.group_size > 1)

    return _autograd_calls(torch, run, q, k, v, dout)


def fa4_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any) -> Calls:
    """FlashAttention-4 (the flash-attn-4 wheel), whose layout is (batch, seqlen, heads, dim)."""
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise Absent(f"flash-attn-4: {error}") from None
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))

    def run(q: Any, k: Any, v: Any) -> Any:
        result = interface.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=case.causal)
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    return _autograd_calls(torch, run, q, k, v, dout)


def _torch_contender(
    make_calls: Callable[..., Calls], case: Case, inputs: Inputs, *, device: str | None, bias: str
) -> Contender:
    """Torch tensors over the same memory as `inputs`, on CuPy's stream; `device` is the one that the kernel needs.

    `bias` says whether its calls take cases with one: "no", "yes", or "only" those.
    """
    if case.bias and bias == "no":
        raise Absent("is run without a bias")
    if bias == "only" and not case.bias:
        raise Absent("needs a bias")
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise Absent(f"torch: {error}") from None
    on_gpu = inputs.xp.__name__ == "cupy"
    if device is not None and on_gpu != (device == "cuda"):
        raise Absent(f"needs arrays on a {device} device")
    if on_gpu:
        if not torch.cuda.is_available():
            raise Absent("this torch has no CUDA device")
        if torch.cuda.current_stream().cuda_stream != inputs.xp.cuda.get_current_stream().ptr:
            raise Absent("torch and CuPy are on different streams")
    if make_calls is not flex_calls:
        _refuse_block_masks(case)
    arrays = (inputs.q, inputs.k, inputs.v, inputs.dout, *((inputs.bias,) if case.bias else ()))
    tensors = [torch.from_dlpack(x) for x in arrays]
    calls = make_calls(torch, case, *tensors)
    return Contender(calls, to_array=lambda x: inputs.xp.from_dlpack(x.detach()))


def _torch(
    make_calls: Callable[..., Calls], device: str | None = "cuda", *, bias: str = "no"
) -> Callable[[Case, Inputs], Contender]:
    return lambda case, inputs: _torch_contender(make_calls, case, inputs, device=device, bias=bias)


def jax_pallas(case: Case, inputs: Inputs) -> Contender:
    """The attention of JAX Pallas for compute capability 9.0, forward, with the fastest of its tiles of keys.

    Its layout is (batch, seqlen, heads, dim). It knows no scale: q is scaled before, and rounded once more by that.
    """
    _refuse_block_masks(case)
    xp = inputs.xp
    if xp.__name__ != "cupy":
        raise Absent("needs CuPy arrays")
    if case.bias:
        raise Absent("is run without a bias")
    if case.dtype != "float16" or case.head_dim % 64 or case.head_dim_v != case.head_dim:
        raise Absent("needs float16, and one head dimension that is a multiple of 64")
    if case.seqlen_q % 128 or case.seqlen_k % 64:
        raise Absent("needs a multiple of 128 queries and of 64 keys")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of the device's memory
    try:
        jax = importlib.import_module("jax")
        pallas = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    except ImportError as error:
        raise Absent(f"jax: {error}") from None
    if jax.default_backend() != "gpu":
        raise Absent("this jax has no CUDA device")

    scaled = (widen(inputs.q, "float32") * case.head_dim**-0.5).astype(numpy_dtype(case.dtype))
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
    "cuflash-dense": lambda case, inputs: cuflash(case, inputs, dense=True),
    "cuflash-dbias": lambda case, inputs: cuflash(case, inputs, dbias=True),
    "cuflash-tf32": lambda case, inputs: cuflash(case, inputs, precision="tf32"),
    **{f"cuflash-pages{size}": _paged(size) for size in (16, 64, 256)},
    "cuflash-packed": cuflash_packed,
    "cuflash-steps": cuflash_steps,
    "cuflash-kv-lengths": cuflash_kv_lengths,
    "cudnn": _torch(cudnn_calls),
    "fa2": _torch(fa2_calls),
    "fa4": _torch(fa4_calls),
    "efficient": _torch(efficient_calls, bias="yes"),
    "efficient-dbias": _torch(functools.partial(efficient_calls, dbias=True), bias="only"),
    "math": _torch(math_calls, device=None),
    "math-dbias": _torch(math_calls, device=None, bias="only"),
    "flex": _torch(flex_calls),
    "torch-cpu": _torch(torch_cpu_calls, device="cpu"),
    "jax-pallas": jax_pallas,
    "naive": naive,
    "empty-launch": empty_launch,
}
