"""The wrappers by which a caller marks keys and values that stay in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from cuflash.arrays import dlpack
from cuflash.arrays.array_info import FLOAT8
from cuflash.arrays.checks import as_integer, type_error, value_error
from cuflash.spec import array_imports

Array = Any
OF_KEYS = ("dk", "dv", "tdk", "tdv")  # gradients, and their tangents, in host memory
TANGENTS = ("tk", "tv")  # of keys and values, in host memory
GIVEN_BY_KEY = (*TANGENTS, "dsums")  # arrays in host memory that calls take besides keys and values
P = ParamSpec("P")
R = TypeVar("R")


class Streamed:
    """Keys or values in host memory, for `cuflash.FlashAttention`: made by `cuflash.streamed`.

    Attributes
    ----------
    array : numpy.ndarray
        The array that was given, or a view of it.
    chunk : int or None
        Keys in a chunk, if the caller chose it.
    """

    __slots__ = ("array", "chunk", "imported")

    def __init__(self, array: Any, chunk: int | None, imported: dlpack.Imported) -> None:
        self.array = array
        self.chunk = chunk
        self.imported = imported  # gradients are returned as arrays of its library

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> Any:
        """That of the array."""
        return self.array.dtype

    def with_array(self, array: Any) -> Streamed:
        """Other keys or values in NumPy's memory, in chunks like these."""
        return Streamed(array, self.chunk, dlpack.Imported("numpy", {}, None))

    def __repr__(self) -> str:
        return f"Streamed({self.dtype.name} {self.shape}, chunk={self.chunk})"


class StreamedPair(NamedTuple):
    """The result of `streamed`: the second and third argument of `cuflash.FlashAttention.forward`."""

    k: Any  # `Streamed`, whose gradients are arrays
    v: Any  # the same, or None


def streamed(k: Array, v: Array | None, *, chunk: int | None = None) -> StreamedPair:
    """Wrap keys and values that stay in host memory, for queries on a GPU or in host memory.

    Parameters
    ----------
    k, v : array
        Arrays in host memory: NumPy arrays, memory maps, pinned memory (``cupyx.empty_pinned``), or arrays of another
        library with ``__dlpack__``, in the shapes that `cuflash.FlashAttention.forward` takes. They may be read-only;
        v may be None, as there.
    chunk : int, optional
        The number of keys in a chunk. Two chunks are on the device at a time: one that is computed with, and one that
        is being copied. The default is as many keys as fit into 128 MiB of k and v. With dropout it must be a multiple
        of 16, and with a `block_mask` a multiple of the keys of a block.

    Returns
    -------
    StreamedPair
        ``k`` and ``v``, which all methods of `cuflash.FlashAttention` take in place of k and v:
        ``attn.forward(q, *cuflash.streamed(k, v))``. Reductions of the attention weights, which take no values, take
        both in place of k: ``attn.column_sums(q, cuflash.streamed(k, None), lse)``.

    Raises
    ------
    TypeError
        `k` or `v` is no array in host memory, or `chunk` is no integer.
    ValueError
        `chunk` is below 1.
    NotImplementedError
        `k` or `v` is fp8.

    See Also
    --------
    FlashAttention.forward : Takes the two where it takes k and v.
    merge : The same for splits that the caller makes.

    References
    ----------
    - Milakov, Gimelshein: Online normalizer calculation for softmax (2018), https://arxiv.org/abs/1805.02867.
    - Yao, Jacobs, Tanaka, Ruwase, Subramoni, Panda: Training ultra long context language model with fully pipelined
      distributed transformer (2024), https://arxiv.org/abs/2408.16978 (copies of chunks overlap with computation).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 64))
    >>> out = cuflash.FlashAttention().forward(q, *cuflash.streamed(k, v, chunk=300)).out
    >>> np.allclose(out, cuflash.attention(q, k, v))
    True
    """
    if chunk is not None:
        chunk = as_integer("chunk", chunk)
        if chunk < 1:
            raise value_error("chunk", chunk, "an integer >= 1")
    given = {"k": k} if v is None else {"k": k, "v": v}
    imported = import_from_host(given, required=tuple(given))
    for name, array in imported.arrays.items():
        if array.dtype.name in FLOAT8:
            remedy = "numbers of the dtype of q: fp8 keys and values are not streamed"
            raise NotImplementedError(f"{name}: got dtype {array.dtype.name}, expected {remedy}")
    wrapped = {name: Streamed(array, chunk, imported) for name, array in imported.arrays.items()}
    return StreamedPair(wrapped["k"], wrapped.get("v"))


def import_from_host(
    arrays: Mapping[str, Any], *, required: Collection[str] = (), written: Collection[str] = ()
) -> dlpack.Imported:
    """Arrays in host memory, as NumPy arrays. Others raise a TypeError that names them."""
    for name, array in arrays.items():
        if isinstance(array, Streamed):
            raise type_error(name, "Streamed", "an array in host memory")
    imported = array_imports.import_arguments(arrays, required=required, written=written)
    if imported.backend != "numpy":
        name = next(name for name, x in arrays.items() if x is not None)
        raise type_error(name, "an array in device memory", "one in host memory: those on the device need no streaming")
    return imported


def takes_star(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, with a remedy where a `StreamedPair` is given as k, and Python misses v."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except TypeError:
            if any(isinstance(x, StreamedPair) for x in (*args, *keywords.values())):
                raise _without_star("k") from None
            raise

    return call


def _without_star(name: str) -> TypeError:
    return type_error(name, "a StreamedPair", "*cuflash.streamed(k, v), with a star: it stands for k and v")


def is_streamed(arrays: Mapping[str, Any]) -> bool:
    """Whether keys or values of a call are streamed."""
    for name in ("k", "v"):
        if isinstance(arrays.get(name), StreamedPair):
            raise _without_star(name)
    return isinstance(arrays["k"], Streamed) or isinstance(arrays.get("v"), Streamed)


def import_with_streamed(
    arrays: Mapping[str, Any], required: Iterable[str], written: Iterable[str]
) -> tuple[dlpack.Imported, dict[str, Any]]:
    """The imported arguments of a call with streamed keys, but for these, and all arrays that it is given.

    Among these are k and v as they are wrapped, and their tangents, dk and dv as NumPy arrays. Raises as
    `import_arguments` does, and for keys or values that are not both of one `streamed`.
    """
    k, v = arrays["k"], arrays["v"]
    for name, wrapped, other in (("k", k, "v"), ("v", v, "k")):
        if not isinstance(wrapped, Streamed):
            raise type_error(name, type(wrapped).__name__, f"Streamed as {other} is: *cuflash.streamed(k, v)")
    if k.chunk != v.chunk:
        raise value_error("v", f"chunks of {v.chunk} keys", f"{k.chunk} as k: both of one cuflash.streamed(k, v)")
    present = {name: x for name, x in arrays.items() if x is not None and name not in ("k", "v")}
    of_keys = {name: present.pop(name) for name in (*GIVEN_BY_KEY, *OF_KEYS) if name in present}
    others = [name for name in required if name not in ("k", "v", *of_keys)]
    own = array_imports.import_arguments(
        {**dict.fromkeys(others), **present},
        required=others,
        written=[name for name in written if name in present],
    )
    hosts = import_from_host(of_keys, written=[name for name in written if name in of_keys]).arrays if of_keys else {}
    return own, {"k": k, "v": v, **own.arrays, **hosts}
