"""PyTorch tensors as arrays of NumPy and CuPy, without a copy, and the passes on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from cuflash.arrays.fp8 import fp8
from cuflash.arrays.packages import INSTALL_CUPY
from cuflash.frameworks import Call, cupy_stream, result_shapes
from cuflash.spec.outputs import DEFAULT_NEED, model_of

Tensors = Sequence[Tensor]
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


# The dtype of a view by CuPy, the bytes of a number, and whether it is fp8, which CuPy does not know.
_OF_CUPY = {dtype: (own, own.itemsize, False) for dtype, own in _NUMPY_DTYPES.items()} | {
    dtype: (own, own.itemsize, viewed is torch.uint8) for dtype, (viewed, own) in _VIEWED_AS.items()
}


def numpy_view(x: Tensor) -> Any:
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


def from_numpy(x: Any) -> Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def cupy_view(x: Tensor) -> Any:
    """By the address: through DLPack it takes 20 microseconds rather than 3."""
    cupy = _cupy()
    if x.is_neg():
        x = x.resolve_neg()
    dtype, size, is_float8 = _OF_CUPY[x.dtype]
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), x.nbytes, x, x.get_device())
    strides = tuple([size * stride for stride in x.stride()])
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    if is_float8:
        return fp8(cupy.ndarray(tuple(x.shape), np.uint8, pointer, strides), dtype.name)
    return cupy.ndarray(tuple(x.shape), dtype, pointer, strides)


@functools.cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"q: got a tensor in CUDA memory, expected CuPy: {INSTALL_CUPY}") from error
    return cupy


@functools.cache
def _allocator() -> Any:
    """PyTorch's allocator for the scratch memory of passes, which a CUDA graph of PyTorch then keeps.

    As `torch.cuda.caching_allocator_alloc`, which makes the device current, as it is here, and looks for its stream.
    """

    def allocate(size: int, device: int) -> int:
        stream = torch._C._cuda_getCurrentRawStream(device)
        return int(torch._C._cuda_cudaCachingAllocator_raw_alloc(size, stream))

    def free(pointer: int, device: int) -> None:
        torch._C._cuda_cudaCachingAllocator_raw_delete(pointer)

    return _cupy().cuda.PythonFunctionAllocator(allocate, free).malloc


def run(which: str, call: Call, seed: int | None, offset: int | None, tensors: Tensors) -> tuple[Tensor, ...]:
    """The results of a pass."""
    keywords: dict[str, Any] = {"seed": seed, "offset": offset}
    if call.need and call.need != DEFAULT_NEED:  # to which the pass has a shorter way
        keywords["need"] = call.need
    method = getattr(call.attn, which)
    if not tensors[0].is_cpu:
        results = empty_results(call, tensors, _shapes(which, call, tuple([x.shape for x in tensors])))
        return _run_cuda(method, keywords, dict(zip(call.names, tensors, strict=True)), results)
    for name, x in zip(call.names, tensors, strict=True):
        if not x.is_cpu:
            raise TypeError(f"{name}: got a tensor on {x.device}, expected one on cpu as q is")
        keywords[name] = numpy_view(x)
    found = method(**keywords)
    if call.need:
        found = [getattr(found, name) for name in call.need]  # in that order
    return tuple([from_numpy(x) for x in found])


def _run_cuda(
    method: Callable[..., Any], keywords: dict[str, Any], given: dict[str, Tensor], results: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    device = given["q"].device
    if device.type != "cuda":
        raise TypeError(f"q: got a tensor on {device}, expected one in host or CUDA memory: q.cpu() or q.cuda()")
    cupy, index = _cupy(), device.index
    own, stream = cupy.cuda.Device(index), cupy_stream(torch._C._cuda_getCurrentRawStream(index), index)
    with own, stream, cupy.cuda.using_allocator(_allocator()):
        own.use()  # autograd calls from a thread of its own, in which the device may have no context yet
        for name, x in given.items():
            if x.get_device() != index:
                raise TypeError(f"{name}: got a tensor on {x.device}, expected one on {device} as q is")
            keywords[name] = cupy_view(x)
        for name, x in results.items():
            keywords[name] = cupy_view(x)
        method(**keywords)
    return tuple(results.values())


@functools.lru_cache(maxsize=1024)
def _shapes(which: str, call: Call, shapes: tuple[torch.Size, ...]) -> dict[str, tuple[int, ...]]:
    return result_shapes(which, call, dict(zip(call.names, shapes, strict=True)))


def empty_results(call: Call, tensors: Tensors, shapes: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
    """Tensors for the results of a pass, by name, not yet written."""
    given = dict(zip(call.names, tensors, strict=True))
    if call.need:
        return {name: given[model_of(name)].new_empty(shape) for name, shape in shapes.items()}
    q = given["q"]
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    dtypes = {"out": dtype, "lse": torch.float64 if dtype == torch.float64 else torch.float32}
    return {name: q.new_empty(shape, dtype=dtypes[name.removeprefix("t")]) for name, shape in shapes.items()}
