"""Launches of kernels/helpers/merge.cu: sums and merges of partial results on a device, and what their gradients need.

Arrays of an operation either have the shape of its elements or, one axis less, that of its rows, with any strides.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cuflash.gpu.replay import of_thread
from cuflash.spec.row_sums import LARGE_LSE

if TYPE_CHECKING:
    from cuflash.plan import DeviceSpec, KernelSpec

Array = Any  # CuPy's
SOURCE = "helpers/merge.cu"
LANES = 4  # neighbours of a row that a thread reads at once, where rows allow it
THREADS = 256
THREADS_OF_ROW = 16
# In one launch: an argument has at most 4 KiB.
MOST_MERGED = 16
MOST_ADDED = 64


def add(result: Array, partials: Sequence[Array]) -> None:
    """Fill an array with the sum of others, added in their order and dtype, and rounded once."""
    partials = list(partials)
    while len(partials) > MOST_ADDED:
        total = _empty_like(partials[0])
        add(total, partials[:MOST_ADDED])
        partials[:MOST_ADDED] = [total]
    _launch("add", (result,), partials, partial=partials[0], result=result, partials=len(partials))


class Tangents(NamedTuple):
    """The tangents of merged results, to be filled, and of partial ones."""

    tout: Array
    tlse: Array
    touts: Sequence[Array]
    tlses: Sequence[Array]


def merge(
    out: Array, lse: Array, outs: Sequence[Array], lses: Sequence[Array], tangents: Tangents | None = None
) -> None:
    """Fill out and lse with the merge of partial results, and their tangents if there are any.

    lse may be pairs, on a last axis: lse, and what its rounding leaves of it. That of the result is so if it has that
    axis, too.
    """
    if out.shape[-1] == 0:
        out, outs, lse, lses, tangents = _with_a_column(outs, lse, lses, tangents)
    partials = [list(x) for x in (outs, lses, *(tangents[2:] if tangents else ()))]
    most = MOST_MERGED // 2 if tangents else MOST_MERGED
    if len(partials[0]) > most:  # several are merged first, and not rounded
        partials = [[x.astype(lses[0].dtype, copy=False) for x in group] for group in partials]
    while len(partials[0]) > most:
        of_merged = [_empty_like(group[0]) for group in partials]
        some = [group[:most] for group in partials]
        of_tangents = Tangents(*of_merged[2:], *some[2:]) if tangents else None
        merge(of_merged[0], of_merged[1], some[0], some[1], of_tangents)
        for group, x in zip(partials, of_merged, strict=True):
            group[:most] = [x]
    outs, lses, *partial_tangents = partials
    has_lse_rest, stores_lse_rest = (x.ndim == out.ndim for x in (lses[0], lse))
    defines = {
        "HAS_LSE_REST": int(has_lse_rest),
        "HAS_TANGENTS": int(tangents is not None),
        "STORES_LSE_REST": int(stores_lse_rest),
    }
    lses, lse = [x[..., 0] if has_lse_rest else x for x in lses], lse[..., 0] if stores_lse_rest else lse
    results = (out, lse, *(tangents[:2] if tangents else ()))
    reads = (*outs, *lses, *(x for group in partial_tangents for x in group))
    _launch("merge", results, reads, partial=outs[0], result=out, partials=len(outs), flags=defines)


def softmax_step(
    row_max: Array, row_sum: Array, factor: Array, weight: Array, lse: Array, tangents: Sequence[Array] = ()
) -> None:
    """Take a partial lse into account: updates row_max and row_sum, fills factor (of what was added) and weight.

    `tangents` are those of lse so far, which is updated; two arrays for by how much this, and that of the partial
    result, lie above the new one; and that of the partial result.
    """
    results, reads = [row_max, row_sum, factor, weight, *tangents[:3]], [lse, *tangents[3:]]
    results, reads = ([x[..., None] for x in arrays] for arrays in (results, reads))
    flags = {"HAS_TANGENTS": int(bool(tangents))}
    _launch("softmax_step", results, reads, partial=lse, result=lse, reads_results=True, flags=flags)


def rescale_and_add(total: Array, out: Array, factor: Array, weight: Array, tangents: Sequence[Array] = ()) -> None:
    """``total = factor * total + weight * out``, where out without weight counts for nothing.

    `tangents` are those of what was added and of out, and what `softmax_step` fills with how far tangents of lse lie
    above the new one.
    """
    totals, partials, factors = (total, *tangents[:1]), (out, *tangents[1:2]), (factor, weight, *tangents[2:])
    flags = {"HAS_TANGENTS": int(bool(tangents))}
    reads = (*partials, *factors)
    _launch("rescale_and_add", totals, reads, partial=out, result=total, reads_results=True, flags=flags)


def normalize(out: Array, lse: Array, total: Array, row_max: Array, row_sum: Array) -> None:
    """Fill out and lse from what was added up; `total` may be `out`."""
    if out.shape[-1] == 0:
        out = total = _empty_like(lse[..., None])
    _launch("normalize", (out, lse), (total, row_max, row_sum), partial=total, result=out)


def minus_delta(result: Array, out: Array, dout: Array, dlse: Array | None) -> None:
    """Fill rows with ``dlse - rowsum(dout * out)``."""
    reads = (out, dout) if dlse is None else (out, dout, dlse)
    _launch("minus_delta", (result,), reads, partial=out, result=out, by_row=True, flags=_has(dlse))


def merge_backward(
    split_dout: Array,
    split_dlse: Array,
    dout: Array,
    split_out: Array,
    out: Array,
    split_lse: Array,
    lse: Array,
    dlse: Any,
) -> None:
    """Fill the gradients of one of the partial results that were merged to out and lse."""
    reads = (dout, split_out, out, split_lse, lse, *([] if dlse is None else [dlse]))
    _launch("merge_backward", (split_dout, split_dlse), reads, partial=out, result=out, by_row=True, flags=_has(dlse))


def merge_backward_tangents(
    split_tdout: Array, split_tdlse: Array, reads: Sequence[Array], dlse: Any, tdlse: Any, tdout: Any
) -> None:
    """Fill split_tdout and split_tdlse with the tangents of what `merge_backward` fills.

    `reads` are dout, the outs of this partial result and of all, their tangents, both lses and their tangents.
    """
    optional = {"DLSE": dlse, "TDLSE": tdlse, "TDOUT": tdout}
    flags = {f"HAS_{name}": int(x is not None) for name, x in optional.items()}
    reads = (*reads, *(x for x in optional.values() if x is not None))
    out = reads[2]
    _launch(
        "merge_backward_tangents", (split_tdout, split_tdlse), reads, partial=out, result=out, by_row=True, flags=flags
    )


def _empty_like(array: Array) -> Array:
    return importlib.import_module("cupy").empty(array.shape, array.dtype)


def _with_a_column(
    outs: Sequence[Array], lse: Array, lses: Sequence[Array], tangents: Tangents | None
) -> tuple[Array, Sequence[Array], Array, Sequence[Array], Tangents | None]:
    """What `merge` takes, with a column that nothing reads where values have none: a thread of it merges the lses."""

    def column(x: Array) -> Array:
        return x[..., :1] if x.ndim == outs[0].ndim else x[..., None]

    out, columns = _empty_like(column(lse)), [column(x) for x in lses]
    if tangents is not None:
        tangents = tangents._replace(tout=_empty_like(out), touts=[column(x) for x in tangents.tlses])
    return out, columns, lse, lses, tangents


def _lacks_columns(array: Array) -> bool:
    return array.shape[-1:] == (0,) and 0 not in array.shape[:-1]


def _or_scratch(array: Array) -> Array:
    """An array that a kernel writes, or one column in place of no columns."""
    if not _lacks_columns(array):
        return array
    return importlib.import_module("cupy").empty((*array.shape[:-1], 1), array.dtype)


def _or_zeros(array: Array) -> Array:
    """An array that a kernel reads, or one column of zeros in place of no columns."""
    if not _lacks_columns(array):
        return array
    cupy = importlib.import_module("cupy")
    zero = _zero(cupy.cuda.runtime.getDevice(), array.dtype, array.ndim)
    return cupy.broadcast_to(zero, (*array.shape[:-1], 1))


@functools.lru_cache(maxsize=64)
def _zero(device_id: int, dtype: Any, ndim: int) -> Array:
    return importlib.import_module("cupy").zeros((1,) * ndim, dtype)


def _has(dlse: Array | None) -> dict[str, int]:
    return {"HAS_DLSE": int(dlse is not None)}


def _launch(
    operation: str,
    results: Sequence[Array],
    reads: Sequence[Array],
    *,
    partial: Array,
    result: Array,
    partials: int = 1,
    by_row: bool = False,
    reads_results: bool = False,
    flags: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Launch an operation on the current device and stream, in a way that can be recorded.

    `partial` and `result` have the dtypes of the arrays that the kernel calls so; `flags` are defines.
    """
    if by_row:  # a row without columns has numbers of its own, but no thread
        results, reads = [_or_scratch(x) for x in results], [_or_zeros(x) for x in reads]
    arrays = (*results, *reads)
    shape = max((x.shape for x in arrays), key=len)
    if 0 in shape:
        return
    strides = tuple(x.strides if x.ndim == len(shape) else (*x.strides, 0) for x in arrays)
    elements = tuple(x.itemsize if x.ndim == len(shape) else 0 for x in arrays)
    pointers = [x.data.ptr for x in arrays]
    layout = layout_of(shape, strides, elements, tuple(pointer % 32 for pointer in pointers), by_row)
    device_id = importlib.import_module("cupy").cuda.runtime.getDevice()
    dtypes = (partial.dtype.name, result.dtype.name, partials)
    run = _kernel(device_id, operation, layout, dtypes, tuple(sorted(flags.items())))
    if of_thread.recording is not None:
        sources = arrays if reads_results else reads
        of_thread.recording.work(run.on, pointers, [x.data.ptr for x in sources], results)
    run.on(pointers)(None)


class Layout(NamedTuple):
    """Axes of an operation, neighbours joined where all arrays allow it."""

    size: tuple[int, ...]  # the last one in elements of `lanes` neighbours
    strides: tuple[tuple[int, ...], ...]  # of each array
    lanes: int
    threads: int


@functools.lru_cache(maxsize=1024)
def layout_of(
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    elements: tuple[int, ...],
    misaligned: tuple[int, ...],
    by_row: bool,
) -> Layout:
    """The layout of arrays of such a shape, with strides in bytes.

    `elements` are the bytes of an element of each array, 0 of those without the last axis; `misaligned` are the
    pointers modulo 32.
    """
    axes: list[tuple[int, tuple[int, ...]]] = []
    for n, of_axis in zip(shape[:-1], zip(*(x[:-1] for x in strides), strict=True), strict=True):
        if n == 1:
            continue
        if axes and all(outer == n * inner for outer, inner in zip(axes[-1][1], of_axis, strict=True)):
            axes[-1] = (axes[-1][0] * n, of_axis)
        else:
            axes.append((n, of_axis))
    last = tuple(x[-1] for x in strides)
    is_aligned = shape[-1] % LANES == 0 and all(
        not nbytes or (last[i] == nbytes and not any(x % (LANES * nbytes) for x in (misaligned[i], *outer)))
        for i, (nbytes, outer) in enumerate(zip(elements, _by_array(axes, len(strides)), strict=True))
    )
    lanes = LANES if is_aligned else 1
    columns = shape[-1] // lanes
    rows = int(np.prod([n for n, _ in axes], dtype=np.int64))
    axes.append((columns, last))
    by_array = tuple(_by_array(axes, len(strides)))
    return Layout(tuple(n for n, _ in axes), by_array, lanes, rows * (THREADS_OF_ROW if by_row else columns))


def _by_array(axes: Sequence[tuple[int, tuple[int, ...]]], count: int) -> list[tuple[int, ...]]:
    return [tuple(strides[i] for _, strides in axes) for i in range(count)]


class _Run:
    """A kernel for arrays of one layout."""

    def __init__(self, function: Any, layout: Layout) -> None:
        self._function = function  # keeps the module loaded
        self._grid = -(-layout.threads // THREADS)
        words = [0, *layout.size]
        self._pointer_words = []
        for strides in layout.strides:
            self._pointer_words.append(len(words))
            words += [0, *strides]
        self._words = np.array(words, np.int64)

    def on(self, pointers: Sequence[int]) -> Callable[[Any], None]:
        """The launch for arrays at some addresses."""
        words = self._words.copy()  # the first one holds the address of the argument, which follows
        words[self._pointer_words] = pointers
        words[0] = words.ctypes.data + words.itemsize
        cuda = importlib.import_module("cupy").cuda
        run, handle, grid, address = cuda.driver.launchKernel, self._function.ptr, self._grid, words.ctypes.data

        def launch(call: Any, words: np.ndarray = words) -> None:
            run(handle, grid, 1, 1, THREADS, 1, 1, 0, cuda.get_current_stream().ptr, address, 0)

        return launch


@functools.lru_cache(maxsize=256)
def _kernel(
    device_id: int,
    operation: str,
    layout: Layout,
    dtypes: tuple[str, str, int],
    flags: tuple[tuple[str, int], ...],
) -> _Run:
    """The kernel of an operation, compiled and loaded on the current device."""
    device = importlib.import_module("cuflash.gpu.device")
    spec = kernel_spec(device.device_spec(device_id), operation, layout, dtypes, flags)
    return _Run(device.load_function(spec, device_id), layout)


def kernel_spec(
    device: DeviceSpec,
    operation: str,
    layout: Layout,
    dtypes: tuple[str, str, int],
    flags: tuple[tuple[str, int], ...] = (),
) -> KernelSpec:
    """How an operation is compiled. `dtypes`: those of partial results and of results, and how many partial ones."""
    from cuflash.plan import KernelSpec  # not before: `import cuflash` would take half as long again
    from cuflash.plan.defines import DTYPE_TAGS

    partial, result, partials = dtypes
    real = "double" if partial == "float64" else "float"
    axes, arrays = len(layout.size), len(layout.strides)
    name = f"cuflash_{operation}_{partial}_{result}_{partials}"
    defines: dict[str, str | int] = {
        "ARCH": device.arch,
        "ARRAYS": arrays,
        "AXES": axes,
        "HAS_DLSE": 0,
        "HAS_LSE_REST": 0,
        "HAS_TANGENTS": 0,
        "HAS_TDLSE": 0,
        "HAS_TDOUT": 0,
        "INDEX": "u32" if layout.threads + THREADS < 2**32 else "u64",
        "KERNEL_NAME": name,
        "LANES": layout.lanes,
        "LARGE_LSE": f"{LARGE_LSE:.1f}",
        "OPERATION": operation,
        "OVERLAPS_PREVIOUS": 0,
        "PARAMS_BYTES": 8 * (axes + arrays * (1 + axes)),
        "PARTIALS": partials,
        "PARTIAL_DTYPE": DTYPE_TAGS[partial],
        "REAL": real,
        "RESULT_DTYPE": DTYPE_TAGS[result],
        "STORES_LSE_REST": 0,
        **dict(flags),
    }
    return KernelSpec(
        source=SOURCE,
        name=name,
        target=device.target,
        defines=tuple((f"CUFLASH_{name}", value) for name, value in sorted(defines.items())),
        grid=0,  # the kernel serves arrays of any size
        threads=THREADS,
        shared_bytes=0,
        overlaps_previous=False,
    )
