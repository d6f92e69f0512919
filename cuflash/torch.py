"""Attention of PyTorch tensors, for autograd, `torch.func` and `torch.compile`.

>>> import torch, cuflash.torch
>>> q, k, v = torch.randn(3, 8, 100, 64, requires_grad=True)
>>> cuflash.torch.attention(q, k, v, causal=True).sum().backward()

PyTorch is no dependency of cuflash, and ``import cuflash`` does not import this module.

Each pass is an operator, ``torch.ops.cuflash.forward``, ``backward``, ``jvp`` and ``backward_jvp``: what a compiler
sees. Each has a `torch.autograd.Function`, which says what its derivative is in terms of the others. Without a compiler
the functions compute at once, because a call through the dispatcher costs as much as a small pass.

Tensors in host memory are viewed as NumPy arrays, those in CUDA memory as CuPy arrays, without a copy. On a GPU the
kernels run on PyTorch's current stream, in memory of its allocator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from cuflash.arrays.fp8 import fp8
from cuflash.arrays.packages import INSTALL_CUPY
from cuflash.flash_attention import FlashAttention
from cuflash.frameworks import (
    Call,
    call,
    call_of,
    cupy_stream,
    forward_call,
    forward_twice_error,
    result_shapes,
    third_order_error,
    vmapped_shapes,
)
from cuflash.spec.outputs import DEFAULT_NEED, model_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.score_mod import Score
    from cuflash.spec.options import AttentionKeywords, Function
    from cuflash.spec.type_variables import WithFunction

__all__ = ["attention"]

Tensors = Sequence[Tensor]
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
# What NumPy does not know by the same name: integers of as many bits, and the dtype by which cuflash knows it.
_VIEWED_AS = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
}
_NUMPY_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
}
_HALF_PRECISION = (torch.float16, torch.bfloat16)


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _numpy_view(x: Tensor) -> Any:
    viewed = _VIEWED_AS.get(x.dtype)
    if viewed is None:
        try:
            return x.numpy(force=True)
        except RuntimeError as error:
            if not torch._C._functorch.is_legacy_batchedtensor(x):
                raise
            raise NotImplementedError(
                "attention: got tensors of vectorize=True or is_grads_batched=True, expected those of torch.func: "
                "torch.func.jacrev, or torch.func.vmap of torch.func.vjp"
            ) from error
    return x.detach().view(viewed[0]).numpy().view(viewed[1])


def _from_numpy(x: Any) -> Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _cupy_view(x: Tensor) -> Any:
    """By the address: through DLPack it takes 20 microseconds rather than 3."""
    import cupy

    if x.is_neg():
        x = x.resolve_neg()
    viewed = _VIEWED_AS.get(x.dtype)
    dtype = _NUMPY_DTYPES[x.dtype] if viewed is None else viewed[1]
    is_float8 = viewed is not None and viewed[0] is torch.uint8
    size, device = x.element_size(), x.device.index
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), x.nbytes, x, device)
    strides = tuple([size * stride for stride in x.stride()])
    array = cupy.ndarray(tuple(x.shape), np.uint8 if is_float8 else dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
    return fp8(array, dtype.name) if is_float8 else array


@functools.cache
def _allocator() -> Any:
    """PyTorch's allocator for the scratch memory of passes, which a CUDA graph of PyTorch then keeps."""
    import cupy

    def allocate(size: int, device: int) -> int:
        return int(torch.cuda.caching_allocator_alloc(size, device))

    def free(pointer: int, device: int) -> None:
        torch.cuda.caching_allocator_delete(pointer)

    return cupy.cuda.PythonFunctionAllocator(allocate, free).malloc


def _run(which: str, call: Call, seed: int | None, offset: int | None, tensors: Tensors) -> tuple[Tensor, ...]:
    """The results of a pass."""
    keywords: dict[str, Any] = {"seed": seed, "offset": offset}
    if call.need and call.need != DEFAULT_NEED:  # to which the pass has a shorter way
        keywords["need"] = call.need
    method = getattr(call.attn, which)
    if not tensors[0].is_cpu:
        return _run_cuda(method, keywords, dict(zip(call.names, tensors, strict=True)), _results(which, call, tensors))
    for name, x in zip(call.names, tensors, strict=True):
        if not x.is_cpu:
            raise TypeError(f"{name}: got a tensor on {x.device}, expected one on cpu as q is")
        keywords[name] = _numpy_view(x)
    found = method(**keywords)
    if call.need:
        found = [getattr(found, name) for name in call.need]  # in that order
    return tuple([_from_numpy(x) for x in found])


def _run_cuda(
    method: Callable[..., Any], keywords: dict[str, Any], given: dict[str, Tensor], results: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    device = given["q"].device
    if device.type != "cuda":
        raise TypeError(f"q: got a tensor on {device}, expected one in host or CUDA memory: q.cpu() or q.cuda()")
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"q: got a tensor in CUDA memory, expected CuPy: {INSTALL_CUPY}") from error
    stream = cupy_stream(torch.cuda.current_stream(device).cuda_stream, device.index)
    own = cupy.cuda.Device(device.index)
    with own, stream, cupy.cuda.using_allocator(_allocator()):
        own.use()  # autograd calls from a thread of its own, in which the device may have no context yet
        for name, x in (given | results).items():
            if x.device != device:
                raise TypeError(f"{name}: got a tensor on {x.device}, expected one on {device} as q is")
            keywords[name] = _cupy_view(x)
        method(**keywords)
    return tuple(results.values())


def _results(which: str, call: Call, tensors: Tensors) -> dict[str, Tensor]:
    """Tensors for the results of a pass, by name, not yet written."""
    given = dict(zip(call.names, tensors, strict=True))
    shapes = result_shapes(which, call, {name: x.shape for name, x in given.items()})
    if call.need:
        return {name: given[model_of(name)].new_empty(shape) for name, shape in shapes.items()}
    q = given["q"]
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    dtypes = {"out": dtype, "lse": torch.float64 if dtype == torch.float64 else torch.float32}
    return {name: q.new_empty(shape, dtype=dtypes[name.removeprefix("t")]) for name, shape in shapes.items()}


# ---- operators -------------------------------------------------------------------------------------------------------

_library = torch.library.Library("cuflash", "DEF")
_SCHEMAS = {
    "forward": "(Tensor out, Tensor lse)",
    "backward": "Tensor[]",
    "jvp": "(Tensor out, Tensor lse, Tensor tout, Tensor tlse)",
    "backward_jvp": "Tensor[]",
}


def _define(which: str) -> None:
    """Define the operator of a pass: what it computes, and what a compiler knows of that."""
    _library.define(f"{which}(Tensor[] arrays, str call, SymInt? seed, SymInt? offset) -> {_SCHEMAS[which]}")
    of_list = _SCHEMAS[which] == "Tensor[]"

    def kernel(arrays: list[Tensor], token: str, seed: int | None, offset: int | None) -> Any:
        found = _run(which, call_of(token), seed, offset, arrays)
        return list(found) if of_list else found

    def fake(arrays: list[Tensor], token: str, seed: int | None, offset: int | None) -> Any:
        found = tuple(_results(which, call_of(token), arrays).values())
        return list(found) if of_list else found

    def differentiable(arrays: list[Tensor], token: str, seed: int | None, offset: int | None) -> Any:
        found = _FUNCTIONS[which].apply(call_of(token), seed, offset, *arrays)
        return list(found) if of_list else found

    _library.impl(which, kernel, "CPU")
    _library.impl(which, kernel, "CUDA")
    _library.impl(which, differentiable, "Autograd")
    _library.impl(which, differentiable, "FuncTorchDynamicLayerFrontMode")  # transforms of torch.func
    torch.library.register_fake(f"cuflash::{which}", fake, lib=_library)


def _is_plain(tensors: Tensors) -> bool:
    """Whether these are tensors with memory and nobody traces what is computed."""
    if torch._C._len_torch_dispatch_stack():
        return False
    for x in tensors:  # noqa: SIM110 (all() of a generator takes three times as long)
        if type(x) not in _PLAIN:
            return False
    return True


def _compute(which: str, call: Call, seed: int | None, offset: int | None, tensors: Tensors) -> tuple[Tensor, ...]:
    if _is_plain(tensors):
        return _run(which, call, seed, offset, tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return tuple(getattr(torch.ops.cuflash, which)(list(tensors), call.token, seed, offset))


# ---- derivatives -----------------------------------------------------------------------------------------------------


class _Pass(torch.autograd.Function):  # type: ignore[misc]  # PyTorch's types are left out
    """A pass as a differentiable function of a `Call`, seed and offset, and the tensors that the call names.

    Of tensors that have no gradient, and of those that are results of an earlier pass, gradients are None.
    """

    which: str

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As that of the base, which looks at the signature of `forward` in every call; that takes 40 microseconds."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

    @classmethod
    def of(cls, attn: FlashAttention, need: tuple[str, ...], random: Any, given: Mapping[str, Tensor]) -> Any:
        return cls.apply(call(attn, tuple(given), need), *random, *given.values())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *random = inputs[:3]
        ctx.random = tuple(random)
        ctx.set_materialize_grads(False)
        tensors = (*inputs[3:], *(output if not ctx.call.need else ()))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *args: Any) -> Any:
        """One pass with one more batch axis, or one for each entry where that cannot be (`vmapped_shapes`)."""
        which, head, tensors = args[0], args[:3], args[3:]
        if which.attn.options.dropout and info.randomness == "different":
            raise NotImplementedError(
                "dropout: got randomness='different' of torch.vmap, expected 'same' or 'error': all entries have one "
                "seed; as a batch axis of q, in place of vmap, they drop other weights"
            )
        dims, size = in_dims[3:], info.batch_size
        own = [x.shape if d is None else x.select(d, 0).shape for x, d in zip(tensors, dims, strict=True)]
        shapes = dict(zip(which.names, own, strict=True))
        mapped = [name for name, d in zip(which.names, dims, strict=True) if d is not None]
        if (wider := vmapped_shapes(which, shapes, mapped)) is not None:
            given = zip(which.names, tensors, dims, strict=True)
            found = cls.apply(*head, *(_widened(x, d, wider.get(name), size) for name, x, d in given))
            right = result_shapes(cls.which, which, shapes)
            results = tuple(x.reshape(size, *shape) for x, shape in zip(found, right.values(), strict=True))
            return results, (0,) * len(results)
        found = []
        for entry in range(size):
            of_entry = (x if d is None else x.select(d, entry) for x, d in zip(tensors, dims, strict=True))
            found.append(cls.apply(*head, *of_entry))
        stacked = tuple(torch.stack(entries) for entries in zip(*found, strict=True))
        return stacked, (0,) * len(stacked)


def _widened(x: Tensor, dim: int | None, shape: tuple[int, ...] | None, size: int) -> Tensor:
    """A tensor with an axis of vmap in front of such a shape of an entry; as it is, where there is no shape."""
    if shape is None:
        return x
    if dim is None:
        return x.reshape(1, *shape).expand(size, *shape)
    return x.movedim(dim, 0).reshape(size, *shape)


def _named(ctx: Any) -> dict[str, Tensor]:
    return dict(zip(ctx.call.names, ctx.saved_tensors, strict=False))


def _inputs(ctx: Any) -> dict[str, Tensor]:
    named = _named(ctx)
    return {name: named[name] for name in ctx.call.inputs}


def _wanted(ctx: Any) -> tuple[str, ...]:
    """The names of inputs that have gradients and need them."""
    needs = dict(zip(ctx.call.names, ctx.needs_input_grad[3:], strict=True))
    return tuple(name for name in ctx.call.inputs if name in ctx.call.movable and needs[name])


def _reached(ctx: Any) -> list[str]:
    """The names of tensors whose gradients the running backward pass goes on to, of all that need one."""
    found, edges = [], ctx.next_functions
    for name, needs, (node, _) in zip(ctx.call.names, ctx.needs_input_grad[3:], edges, strict=True):
        if needs and node is not None:
            try:
                is_reached = torch._C._will_engine_execute_node(node)
            except RuntimeError:  # a leaf that is asked for
                is_reached = True
            found += [name] * is_reached
    return found


def _in_order(ctx: Any, by_name: Mapping[str, Any]) -> tuple[Any, ...]:
    return (None, None, None, *(by_name.get(name) for name in ctx.call.names))


class _Forward(_Pass):
    which = "forward"

    @staticmethod
    def forward(call: Call, seed: int | None, offset: int | None, *tensors: Tensor) -> Any:
        return _compute("forward", call, seed, offset, tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        wanted = _wanted(ctx)
        *_, out, lse = ctx.saved_tensors
        given = _inputs(ctx) | {"dout": torch.zeros_like(out) if dout is None else dout, "out": out, "lse": lse}
        given |= {} if dlse is None else {"dlse": dlse}
        found = _backward(ctx.call.attn, wanted, ctx.random, given)
        return _in_order(ctx, found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        moved = {f"t{name}": t for name, t in zip(ctx.call.names, tangents[3:], strict=True) if t is not None}
        _, _, tout, tlse = _Jvp.of(ctx.call.attn, (), ctx.random, _inputs(ctx) | moved)
        return tout, tlse


def _backward(attn: FlashAttention, wanted: Sequence[str], random: Any, given: Mapping[str, Tensor]) -> dict[str, Any]:
    """By the name of each wanted input, its gradient."""
    if not wanted:
        return {}
    found = _Backward.of(attn, tuple(f"d{name}" for name in wanted), random, given)
    return dict(zip(wanted, found, strict=True))


def _hessian(
    attn: FlashAttention, wanted: Sequence[str], random: Any, given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """By the name of each wanted input, the tangent of its gradient."""
    if not wanted:
        return {}
    found = _BackwardJvp.of(attn, tuple(f"td{name}" for name in wanted), random, given)
    return dict(zip(wanted, found, strict=True))


class _Backward(_Pass):
    which = "backward"

    @staticmethod
    def forward(call: Call, seed: int | None, offset: int | None, *tensors: Tensor) -> Any:
        return _compute("backward", call, seed, offset, tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """The gradients of ``sum(c * g)``: `cuflash.double_backward` says why these are they."""
        given, inputs = _named(ctx), _inputs(ctx)
        moved = {f"t{name[1:]}": c for name, c in zip(ctx.call.need, cotangents, strict=True) if c is not None}
        if not moved:
            return _in_order(ctx, {})
        _, _, tout, tlse = _Jvp.of(ctx.call.attn, (), ctx.random, inputs | moved)
        own = given | {"tout": tout, "tlse": tlse} | moved
        found = _hessian(ctx.call.attn, _wanted(ctx), ctx.random, own)
        return _in_order(ctx, found | {"dout": tout, "dlse": tlse})

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        given, random, attn = _named(ctx), ctx.random, ctx.call.attn
        moved = {f"t{name}": t for name, t in zip(ctx.call.names, tangents[3:], strict=True) if t is not None}
        of_inputs = {name: t for name, t in moved.items() if name[1:] in ctx.call.inputs}
        if not of_inputs:
            linear = {"dout": moved.get("tdout", torch.zeros_like(given["dout"]))}
            linear |= {"dlse": moved["tdlse"]} if "tdlse" in moved else {}
            own = {name: x for name, x in given.items() if name != "dlse"} | linear
            return tuple(_Backward.of(attn, ctx.call.need, random, own))
        _, _, tout, tlse = _Jvp.of(attn, (), random, _inputs(ctx) | of_inputs)
        own = given | moved | {"tout": tout, "tlse": tlse}
        return tuple(_BackwardJvp.of(attn, tuple(f"t{name}" for name in ctx.call.need), random, own))


class _Jvp(_Pass):
    which = "jvp"

    @staticmethod
    def forward(call: Call, seed: int | None, offset: int | None, *tensors: Tensor) -> Any:
        return _compute("jvp", call, seed, offset, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Pass.setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[:2])

    @staticmethod
    def backward(ctx: Any, _dout: None, _dlse: None, dtout: Tensor | None, dtlse: Tensor | None) -> Any:
        """As `cuflash.jvp_backward`."""
        *_, out, lse, tout, tlse = ctx.saved_tensors
        inputs, attn, random = _inputs(ctx), ctx.call.attn, ctx.random
        results = {"out": out, "lse": lse, "dout": torch.zeros_like(tout) if dtout is None else dtout}
        results |= {} if dtlse is None else {"dlse": dtlse}
        moved = {name: x for name, x in _named(ctx).items() if name not in inputs}
        own = inputs | moved | results | {"tout": tout, "tlse": tlse}
        found = _hessian(attn, _wanted(ctx), random, own)
        needs = dict(zip(ctx.call.names, ctx.needs_input_grad[3:], strict=True))
        of_tangents = _backward(attn, [name[1:] for name in moved if needs[name]], random, inputs | results)
        return _in_order(ctx, found | {f"t{name}": x for name, x in of_tangents.items()})

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        moved = {name: t for name, t in zip(ctx.call.names, tangents[3:], strict=True) if t is not None}
        inputs = _inputs(ctx)
        if moved.keys() & inputs.keys():
            raise forward_twice_error()
        _, _, tout, tlse = _Jvp.of(ctx.call.attn, (), ctx.random, inputs | moved)
        return None, None, tout, tlse


class _BackwardJvp(_Pass):
    which = "backward_jvp"

    @staticmethod
    def forward(call: Call, seed: int | None, offset: int | None, *tensors: Tensor) -> Any:
        return _compute("backward_jvp", call, seed, offset, tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """The pass is a symmetric matrix, the Hessian, times the tangents, and linear in tdout and tdlse."""
        given, inputs, attn, random = _named(ctx), _inputs(ctx), ctx.call.attn, ctx.random
        moved = {name for name in ctx.call.names if name[1:] in inputs}
        linear = moved | {"tdout", "tdlse"}
        of_earlier = {"out", "lse", "tout", "tlse"}
        if wrong := [name for name in _reached(ctx) if name not in linear | of_earlier]:
            raise third_order_error(f"a gradient of backward_jvp with respect to {wrong[0]}")
        own = {f"t{name[2:]}": c for name, c in zip(ctx.call.need, cotangents, strict=True) if c is not None}
        if not own:
            return _in_order(ctx, {})
        _, _, tout, tlse = _Jvp.of(attn, (), random, inputs | own)
        fixed = {name: x for name, x in given.items() if name not in linear}
        found = _hessian(attn, [name[1:] for name in moved], random, fixed | own | {"tout": tout, "tlse": tlse})
        return _in_order(ctx, {f"t{name}": x for name, x in found.items()} | {"tdout": tout, "tdlse": tlse})

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Where nothing moves but what the pass is linear in."""
        given, inputs, attn, random = _named(ctx), _inputs(ctx), ctx.call.attn, ctx.random
        moved = {name: t for name, t in zip(ctx.call.names, tangents[3:], strict=True) if t is not None}
        if moved.keys() & {*inputs, "dout", "dlse"}:
            raise third_order_error("a tangent of backward_jvp")
        own = {name: t for name, t in moved.items() if name[1:] in inputs}
        _, _, tout, tlse = _Jvp.of(attn, (), random, inputs | own)
        fixed = {name: given[name] for name in ("dout", "dlse", "out", "lse") if name in given}
        return tuple(
            _BackwardJvp.of(attn, ctx.call.need, random, inputs | fixed | moved | {"tout": tout, "tlse": tlse})
        )


_FUNCTIONS: dict[str, type[_Pass]] = {f.which: f for f in (_Forward, _Backward, _Jvp, _BackwardJvp)}
for _which in _SCHEMAS:
    _define(_which)


# ---- the function ----------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _token(attn: FlashAttention | None, names: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> str:
    """What a compiled graph has in place of the options; the compiler calls this once, and guards the arguments."""
    return forward_call(attn, names, dict(options)).token


def _cast(arrays: dict[str, Tensor]) -> None:
    """Give q, k and v the dtype of autocast, as for `torch.nn.functional.scaled_dot_product_attention`.

    A bias in float32 stays so: kernels add it to scores, which are float32. Sinks and slopes have to be float32.
    """
    dtype = torch.get_autocast_dtype(arrays["q"].device.type)
    for name in ("q", "k", "v", "bias"):
        x = arrays.get(name)
        if x is not None and (x.dtype in _HALF_PRECISION or (x.dtype == torch.float32 and name != "bias")):
            arrays[name] = x.to(dtype)


# fmt: off
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn: FlashAttention[None] | None = ..., score: None = ...,
    seed: int | None = ..., offset: int | None = ..., return_lse: Literal[False] = ...,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn: FlashAttention[None] | None = ..., score: None = ...,
    seed: int | None = ..., offset: int | None = ..., return_lse: Literal[True],
    **keywords: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn: FlashAttention[WithFunction], seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[False] = ..., **keywords: Any,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn: FlashAttention[WithFunction], seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[True], **keywords: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, score: Function | Score, seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[False] = ..., **keywords: Any,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, score: Function | Score, seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[True], **keywords: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Function, seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[False] = ..., **keywords: Any,
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Function, seed: int | None = ...,
    offset: int | None = ..., return_lse: Literal[True], **keywords: Any,
) -> tuple[Tensor, Tensor]: ...
# fmt: on


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn: FlashAttention | None = None,
    seed: int | None = None,
    offset: int | None = None,
    return_lse: bool = False,
    **keywords: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of PyTorch tensors, differentiable twice, in memory linear in the sequence length.

    Gradients reach q, k, v, bias, alibi_slopes, sinks, and the tensors that `score` reads, by autograd, its double
    backward, forward mode and `torch.func`. `torch.compile` takes it whole (``fullgraph=True``), forward and backward.
    An axis of `torch.func.vmap` is one more batch axis, or a loop where it cannot be one. Within `torch.autocast` q, k
    and v are cast as those of `torch.nn.functional.scaled_dot_product_attention` are.

    Parameters
    ----------
    q, k, v : torch.Tensor
        As `cuflash.FlashAttention.forward` takes them, in host or CUDA memory.
    attn : FlashAttention, optional
        The options.
    seed, offset : int, optional
        Which weights dropout drops, as `cuflash.FlashAttention.forward` takes them; in a compiled function the seed is
        at most ``2 ** 63 - 1``.
    return_lse : bool, default False
        Whether to return lse, too, which is differentiable as out is.
    **keywords :
        Without `attn`, options of `cuflash.FlashAttention`: causal, scale, softcap, score and so on. And tensors, as
        `cuflash.FlashAttention.forward` takes them: bias, sinks, kv_lengths and so on, and those that `score` and
        `mask` read. A `mask` is an option if it is a function.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        out, or (out, lse).

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `cuflash.FlashAttention.forward` does. NotImplementedError also for third derivatives, for forward mode over
        forward mode, and for gradients of what has none (keys in pages, fp8).

    See Also
    --------
    cuflash.FlashAttention : The options, and passes without a framework.
    cuflash.jax.attention : The same for JAX.

    References
    ----------
    Dao: FlashAttention-2 (2023), https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
    """
    arrays = {"q": q, "k": k, "v": v}
    options: dict[str, Any] = {}
    for name, x in keywords.items():
        if isinstance(x, Tensor):
            arrays[name] = x
        elif x is not None:
            options[name] = x
    for name in ("q", "k", "v"):
        if not isinstance(arrays[name], Tensor):
            raise TypeError(f"{name}: got {type(arrays[name]).__name__}, expected a torch.Tensor")
    if torch.is_autocast_enabled(q.device.type):
        _cast(arrays)
    if torch.compiler.is_compiling():
        # A number that follows from sizes may be a symbol. To hash it makes it a constant, which the compiler guards.
        fixed = {name: next(iter({x})) if isinstance(x, (int, float)) else x for name, x in options.items()}
        token = _token(attn, tuple(arrays), tuple(fixed.items()))
        out, lse = torch.ops.cuflash.forward(list(arrays.values()), token, seed, offset)
    else:
        out, lse = _Forward.apply(forward_call(attn, tuple(arrays), options), seed, offset, *arrays.values())
    return (out, lse) if return_lse else out
