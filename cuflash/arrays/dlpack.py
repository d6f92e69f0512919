"""Whose array is this? NumPy and CuPy arrays are taken as they are, any other array through DLPack, without a copy.

DLPack (https://dmlc.github.io/dlpack/latest/) is the struct by which array libraries share memory. An
array in host memory becomes a NumPy array, one in device memory a CuPy array, and a result goes back through
`from_dlpack` of the library that the arguments came from. Nothing of those libraries is imported here: an array brings
its module along.

Streams. `cupy.from_dlpack` makes CuPy's current stream wait for the producer's, and the library's own `from_dlpack`
makes its stream wait for CuPy's; so a result given as `out=` crosses back too, although the new array is not used.

Lazy bits. A PyTorch tensor may have other numbers than its memory holds: those of the other sign, for example. DLPack
cannot express that and PyTorch's exporter does not check it, so such tensors are refused.

bfloat16 on the host. NumPy neither exports nor imports it. Its bits cross as uint16, and the type code in the capsule,
which belongs to the consumer alone, is rewritten on the way, without a copy, in both directions. fp8 numbers,
which neither NumPy nor CuPy imports, cross as uint8 on the way in.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from cuflash.arrays.array_info import Shaped
from cuflash.arrays.checks import type_error, value_error
from cuflash.arrays.fp8 import Float8Array, fp8
from cuflash.arrays.packages import INSTALL_CUPY

HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost (pinned)
CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Methods by which a PyTorch tensor says that its memory holds other numbers than it has, and those that make it plain.
LAZY_BITS = {"is_neg": "resolve_neg", "is_conj": "resolve_conj", "_is_zerotensor": "clone"}
OVERLAP_WORK = 100_000  # candidate solutions tried before two interleaved arrays count as overlapping
LONGEST_REASON = 100  # characters of an error of another library within a message
ANY_ADDRESS = 2**61  # of arrays that exist for a comparison, with room on both sides

Backend = Literal["numpy", "cupy"]


class Imported(NamedTuple):
    """The arguments of one call as NumPy or CuPy arrays, and the way back."""

    backend: Backend
    arrays: dict[str, Any]
    from_dlpack: Callable[[Any], Any] | None  # of the caller's library; None: results stay NumPy or CuPy arrays

    def export(self, result: Any, given: Any) -> Any:
        """`result` as an array of the caller's library; `given`, if the caller gave one to write to."""
        if self.from_dlpack is None or (self.backend == "numpy" and given is not None):
            return result if given is None else given
        source = _Bfloat16Export(result) if self.backend == "numpy" and result.dtype == BFLOAT16 else result
        exported = self.from_dlpack(source)
        return exported if given is None else given


def import_arrays(present: Mapping[str, Any], written: Iterable[str]) -> Imported:
    """View arrays of one library as NumPy arrays, or as CuPy arrays; messages name the argument."""
    (first_name, first), *others = present.items()
    library = _library_of(first_name, first)
    for name, x in others:
        if _library_of(name, x) != library:
            raise type_error(name, _spell(x), f"an array of {library} as {first_name} is")
    views: dict[str, Any] = dict(present)
    if library == "numpy":
        for name, x in present.items():
            views[name] = x if type(x) is np.ndarray else x.view(np.ndarray)  # of np.memmap, a subclass
            if name in written and not x.flags.writeable:
                raise value_error(name, "a read-only array", "a writable one")
        return Imported("numpy", views, None)
    if library == "cupy":
        return Imported("cupy", views, None)
    backend = _backend_of(first_name, first)
    for name, x in others:
        if _backend_of(name, x) != backend:
            sides = ("CUDA", "host") if backend == "numpy" else ("host", "CUDA")
            raise type_error(name, f"an array in {sides[0]} memory", f"one in {sides[1]} memory as {first_name} is")
    for name, x in present.items():
        _check_lazy_bits(name, x, name in written)
        views[name], read_only = _take(name, x, backend)
        if name in written and read_only:
            raise value_error(name, f"a read-only {library} array", "a writable one")
    return Imported(backend, views, _importer_of(first))


def module_of(array: Any) -> Any:
    """NumPy or CuPy, whose array it is."""
    if isinstance(array, np.ndarray):
        return np
    return sys.modules.get("cupy") or importlib.import_module("cupy")  # which takes long even where it is loaded


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy array of an array of NumPy or CuPy."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.get())


def on_device(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of an array of CuPy current; nothing for an array of NumPy."""
    return contextlib.nullcontext() if isinstance(array, np.ndarray) else array.device  # type: ignore[no-any-return]


def is_captured(array: Any) -> bool:
    """Whether calls on an array of NumPy or CuPy are recorded in a CUDA graph, on its device's current stream."""
    if isinstance(array, np.ndarray):
        return False
    with array.device:
        return bool(module_of(array).cuda.get_current_stream().is_capturing())


def overlap(a: Any, b: Any) -> bool:
    """Whether two NumPy arrays, or two CuPy arrays, have an element in common.

    Interleaved arrays, such as q, k and v packed into one, do not. Two that are too entangled to tell count as
    overlapping.
    """
    if not isinstance(a, np.ndarray):
        a, b = (_never_read(x.data.ptr, x.shape, x.strides, x.dtype.itemsize) for x in (a, b))
    return _share(a, b)


def check_no_overlap(arrays: Mapping[str, Any], results: Collection[str]) -> None:
    """Refuse those results that share memory with another array. None stands for an absent array.

    Arrays in host memory and arrays on a device have nothing in common.
    """
    others = {name: x for name, x in arrays.items() if x is not None and name not in results}
    for result in results:
        if (written := arrays.get(result)) is None:
            continue
        for name, x in others.items():
            if isinstance(x, np.ndarray) == isinstance(written, np.ndarray) and overlap(written, x):
                raise value_error(result, f"memory shared with {name}", "memory of its own")
        others[result] = written


def check_distinct(name: str, array: Shaped) -> None:
    """Refuse a result that is written to two of whose elements share memory."""
    if overlaps_itself(array):
        raise value_error(name, f"strides {tuple(array.strides)}", "an array whose elements are all distinct in memory")


def overlaps_itself(array: Shaped) -> bool:
    """Whether elements of an array of any library share memory with each other.

    Steps along one axis that reach past all that smaller steps reach keep elements apart: so do those of nearly all
    arrays. Other strides are looked at axis by axis: two elements whose first differing index is that of axis k share
    memory if one of those after step k shares memory with one without that step. What is too entangled counts as
    overlapping.
    """
    size = array.dtype.itemsize
    axes = [(n, int(stride)) for n, stride in zip(array.shape, array.strides, strict=True) if n != 1]
    if any(n == 0 for n, _ in axes):
        return False
    reach = size
    for step, n in sorted((abs(stride), n) for n, stride in axes):
        if step < reach:
            break
        reach += step * (n - 1)
    else:
        return False

    def elements(axes: list[tuple[int, int]], first: int) -> np.ndarray[Any, Any]:
        return _never_read(ANY_ADDRESS + first, [n for n, _ in axes], [stride for _, stride in axes], size)

    for k, (n, stride) in enumerate(axes):
        after, others = elements([(n - 1, stride), *axes[k + 1 :]], stride), elements(axes[k + 1 :], 0)
        if _share(after, others):
            return True
    return False


def _share(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether two NumPy arrays have an element in common, or are too entangled to tell."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=OVERLAP_WORK))  # type: ignore[arg-type]  # any int
    except np.exceptions.TooHardError:
        return True


def _never_read(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> np.ndarray[Any, Any]:
    """A NumPy array of elements at such addresses; only ever compared."""

    class Addresses:
        __array_interface__ = {  # noqa: RUF012 (the protocol wants an attribute)
            "version": 3,
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": f"|V{itemsize}",
            "data": (address, True),
        }

    return np.asarray(Addresses())


def _library_of(name: str, array: object) -> str:
    """'numpy', 'cupy', or the top-level module of another library whose arrays speak DLPack."""
    cupy = sys.modules.get("cupy")
    if isinstance(array, Float8Array):
        return "cupy"
    if cupy is not None and isinstance(array, cupy.ndarray):
        if type(array) is not cupy.ndarray:
            raise type_error(name, _spell(array), "a plain cupy.ndarray")
        return "cupy"
    if isinstance(array, np.ndarray):
        if type(array) is not np.ndarray and type(array) is not np.memmap:
            expected = f"a plain numpy.ndarray: numpy.asarray({name}), which leaves out what the subclass adds"
            raise type_error(name, _spell(array), expected)
        return "numpy"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.core.Tracer):
        doors = "cuflash.jax.attention or cuflash.jax.logsumexp"
        remedy = f"an array with values: within jax.jit, jax.grad, jax.vmap and the like call {doors}"
        raise type_error(name, f"{_spell(array)}, which JAX traces and which has no values yet", remedy)
    if isinstance(array, type) or not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        value = f" {array!r}" if isinstance(array, (bool, int, float, complex, str)) else ""
        expected = f"a NumPy or CuPy array, or one with __dlpack__{_how_to_convert(name, array)}"
        raise type_error(name, f"{_spell(array)}{value}", expected)
    return type(array).__module__.partition(".")[0]


def _how_to_convert(name: str, array: object) -> str:
    """What a message adds on something that is no array, but could become one."""
    if {"array", "scale"} <= set(getattr(array, "_fields", ())):  # of `cuflash.quantize`
        return f": {name}.array, and {name}_scale={name}.scale"
    if isinstance(array, type) or hasattr(array, "_fields"):
        return ""
    if name == "mask" and callable(array):
        return "; a function goes into FlashAttention(mask=...)"
    if hasattr(array, "toarray"):  # a sparse matrix, of which numpy.asarray makes an array of one object
        return f": {name}.toarray()"
    protocols = ("__array__", "__array_interface__", "__buffer__")
    is_like = isinstance(array, (list, tuple, memoryview)) or any(hasattr(array, way) for way in protocols)
    return f": numpy.asarray({name})" if is_like else ""


def _spell(array: object) -> str:
    """The name of the type, with that of its library before it."""
    library = type(array).__module__.partition(".")[0]
    return type(array).__name__ if library == "builtins" else f"{library}.{type(array).__name__}"


def _backend_of(name: str, array: Any) -> Backend:
    try:
        device_type, device_id = array.__dlpack_device__()
    except Exception as error:  # whatever a foreign method raises
        raise _refused(name, array, error) from error
    if device_type in HOST_DEVICES:
        return "numpy"
    if device_type in CUDA_DEVICES:
        return "cupy"
    expected = f"host memory {HOST_DEVICES} or CUDA memory {CUDA_DEVICES}"
    raise type_error(name, f"DLPack device type {int(device_type)} (number {device_id})", expected)


def _check_lazy_bits(name: str, array: Any, is_written: bool) -> None:
    """Refuse an array that has other numbers than its memory holds."""
    for is_set, remedy in LAZY_BITS.items():
        method = getattr(array, is_set, None)
        if callable(method) and method():
            expected = "one whose memory holds its values" + ("" if is_written else f": {name}.{remedy}()")
            raise type_error(name, f"{_spell(array)} with {is_set}() True, which DLPack does not pass on", expected)


def _importer_of(array: Any) -> Callable[[Any], Any] | None:
    """`from_dlpack` of the library that `array` is from; None where that library takes no arrays in."""
    if hasattr(array, "__array_namespace__"):  # the array API standard's way; jax arrays do not live in the module jax
        namespace = array.__array_namespace__()
    else:
        namespace = sys.modules.get(type(array).__module__.partition(".")[0])
    return getattr(namespace, "from_dlpack", None)


def _take(name: str, array: Any, backend: Backend) -> tuple[Any, bool]:
    """A view of another library's array, and whether that library forbids writing to it."""
    try:
        library: Any = np if backend == "numpy" else importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(f"{name}: got {_spell(array)} in CUDA memory, expected CuPy: {INSTALL_CUPY}") from error
    importing = _Importing(array, retype=backend == "numpy")
    try:
        view = library.from_dlpack(importing)
    except Exception as error:  # whatever a foreign __dlpack__ raises
        raise _refused(name, array, error) from error
    if importing.float8:
        return fp8(view, importing.float8), importing.read_only
    if backend == "cupy":
        return view, importing.read_only
    return (view.view(BFLOAT16) if importing.retyped else view), not view.flags.writeable


def _refused(name: str, array: Any, error: Exception) -> TypeError:
    remedy = "an array that DLPack can export"
    if getattr(array, "requires_grad", False):
        remedy += f": {name}.detach() (gradients come from FlashAttention.backward or cuflash.torch.attention)"
    dtype = f" of dtype {array.dtype}" if hasattr(array, "dtype") else ""
    reason = textwrap.shorten(str(error), LONGEST_REASON, placeholder=" ...")
    return type_error(name, f"{_spell(array)}{dtype}, which is not exported through DLPack ({reason})", remedy)


# ---- DLPack capsules: only the element type is ever touched ---------------------------------------------------------


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor, up to the field that is wanted."""

    _fields_ = (("tensor", _Tensor),)


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned of major version 1, likewise."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


UINT_CODE, BFLOAT_CODE = 1, 4  # DLDataTypeCode
FLOAT8_CODES = {10: "float8_e4m3fn", 12: "float8_e5m2"}
READ_ONLY_FLAG = 1

_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.argtypes, _capsule_is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


def _managed(capsule: object) -> _Managed | _ManagedVersioned | None:
    """The struct inside a capsule that is not consumed yet; None if its version is unknown."""
    if _capsule_is_valid(capsule, b"dltensor"):
        return _Managed.from_address(_capsule_pointer(capsule, b"dltensor"))
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        managed = _ManagedVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        return managed if managed.major == 1 else None
    return None


def _retype(managed: _Managed | _ManagedVersioned | None, old: int, new: int, bits: int = 16) -> bool:
    """Change the type code of elements of so many bits from `old` to `new`; False if the elements are others."""
    if managed is None:
        return False
    dtype = managed.tensor.dtype
    if (dtype.code, dtype.bits, dtype.lanes) != (old, bits, 1):
        return False
    dtype.code = new
    return True


class _Importing:
    """Another library's array on its way in. With `retype`, bfloat16 passes as uint16; float8 always does as uint8."""

    def __init__(self, array: Any, *, retype: bool) -> None:
        self.array = array
        self.retype = retype
        self.retyped = False
        self.float8 = ""  # the dtype
        self.read_only = False

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        capsule = self.array.__dlpack__(**how)
        managed = _managed(capsule)
        self.retyped = self.retype and _retype(managed, BFLOAT_CODE, UINT_CODE)
        for code, name in FLOAT8_CODES.items():
            if _retype(managed, code, UINT_CODE, 8):
                self.float8 = name
        self.read_only = isinstance(managed, _ManagedVersioned) and bool(managed.flags & READ_ONLY_FLAG)
        return capsule


class _Bfloat16Export:
    """A NumPy array of bfloat16 on its way out."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        capsule = self.array.view(np.uint16).__dlpack__(**how)
        if not _retype(_managed(capsule), UINT_CODE, BFLOAT_CODE):
            raise BufferError("NumPy exports a version of DLPack that cuflash does not know")
        return capsule
