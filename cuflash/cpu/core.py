"""The compiled core of the CPU path: where its library is, how a call is handed to it, and when it is not used.

The library (sources in `core/`) is built when the package is installed, if there is a C++ compiler. It has one plain C
interface, and is called by ctypes, which lets other threads of Python run meanwhile. Threads of its own take part in
calls that are worth it, and end after a second without a call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import DTYPES, FLOAT8, Shaped, extent, layout_of
from cuflash.cpu.jobs import count_cores
from cuflash.spec.inputs import NUMBERS, OPTIONAL_INPUTS, SCORES
from cuflash.spec.outputs import (
    OVER_HEAD_DIM,
    OVER_ROWS,
    SCORE_GRADIENTS,
    SOFTMAX_GRADIENTS,
    WEIGHT_REDUCTION_ROWS,
)
from cuflash.spec.passes import BACKWARD, FORWARD, JVP, Pass
from cuflash.spec.problem import Problem

Array = NDArray[Any]

_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
LIBRARY = Path(__file__).parent / "core" / f"libcuflash{_SUFFIX}"
NOTE = "build.txt"  # next to it, where something was not built
# In nanoseconds of one core: the most work that is not worth a second thread, and the least work for each thread. Calls
# that take longer than PATIENCE_NS look for Ctrl-C, every SLICE_MS milliseconds.
SERIAL_NS = 60_000
THREAD_NS = 14_000
PATIENCE_NS = 20_000_000
SLICE_MS = 50
MOST_PREPARED = 64  # calls that are kept with one problem
NO_BOUND = 2**40
SKIPPED_INSTRUCTION_SETS = 0  # how many of the best instruction sets are not used, which tests change

# Options that act on scores, as the core knows them: a problem with any other is not for it.
KNOWN = ("softcap", "alibi_slopes", "bias", "mask", "block_mask", "kv_lengths", "sinks")
KNOWN_REDUCTIONS = ("max", "entropy")  # the row reductions that it makes, likewise
_NUMBERS = tuple(name for name in NUMBERS if name == "scale" or name in KNOWN)
_INPUTS = tuple(row for row in OPTIONAL_INPUTS if not row.acts or row.name in KNOWN)
# How many axes an input is broadcast to: the first ones of the scores, up to its last one.
_INPUT_AXES = {row.name: SCORES.index(row.shapes[-1][-1]) + 1 if row.shapes else row.strides for row in _INPUTS}
_OF_OPTIONS = (*(f"d{name}" for name in _NUMBERS), *(row.gradient for row in _INPUTS))
# Arrays of a call in the order of `enum Array`, and how many axes each is broadcast to; those of q are 4 in its layout.
AXES = {
    **dict.fromkeys(OVER_HEAD_DIM, "q"),
    **dict.fromkeys(OVER_ROWS, 3),
    **_INPUT_AXES,
    "row_sums": 4,
    **{name: _INPUT_AXES.get(name[1:], 0) for name in (*SCORE_GRADIENTS, *SOFTMAX_GRADIENTS) if name in _OF_OPTIONS},
    **{row.name: row.strides for row in WEIGHT_REDUCTION_ROWS},
    **dict.fromkeys(_NUMBERS, 0),  # whose tangents are arrays
}
DONE, _OUT_OF_MEMORY, _OTHER_LAYOUT, _NO_THREAD, UNALIGNED, OVERLAPPING = range(6)
_TUPLE_HEAD = tuple.__basicsize__  # bytes before the addresses of its items, in CPython
_CHANGING = struct.Struct("@4q2QP")  # `struct Changing` of `core/core.cpp`


class _Call(ctypes.Structure):
    """`struct Call` of `core/call.h`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("bytes", "is_backward", "has_tangents", "finds_row_sums")),
        *((name, ctypes.c_int64) for name in ("dtype", "kv_dtype", "bias_dtype")),
        *((name, ctypes.c_int64) for name in ("batch", "num_heads", "num_heads_kv", "seqlen_q", "seqlen_k")),
        *((name, ctypes.c_int64) for name in ("head_dim", "head_dim_v")),
        *((name, ctypes.c_int64) for name in ("diagonal", "window_left", "window_right", "has_own_diagonals")),
        *((name, ctypes.c_int64) for name in ("page_size", "block_rows", "block_keys", "lengths_are_64_bit")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "dropout_steps",
                *("dropout_row", "dropout_column", "dropout_head", "dropout_heads"),
                *("batch_invariant", "num_top_keys", "num_given"),
            )
        ),
        *((name, ctypes.c_double) for name in (*_NUMBERS, "kept_scale")),
        ("sizes", ctypes.c_int64 * len(AXES)),
        ("strides", ctypes.c_int64 * 4 * len(AXES)),
        *((name, ctypes.c_int64 * len(AXES)) for name in ("begins", "ends")),
        ("given", ctypes.c_int64 * len(AXES)),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("arrays", ctypes.c_void_p * len(AXES)),
    )


class _LongCall(ctypes.Structure):
    """`struct LongCall` of `core/core.cpp`."""

    _fields_ = (("running", ctypes.c_void_p), ("status", ctypes.c_int))


class _Signature(ctypes.Structure):
    """`struct ArraySignature` of `core/core.cpp`."""

    _fields_ = (
        ("type", ctypes.c_void_p),
        ("dtype", ctypes.c_void_p),
        ("num_axes", ctypes.c_int64),
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
    )


class _Library(NamedTuple):
    """The library, and how many bytes of an array object come before its own fields; -1 where that is not known."""

    functions: Any
    head_bytes: int


class Prepared(NamedTuple):
    """What calls on arrays of the same shapes and strides have in common."""

    fixed: bytes
    nanoseconds: float


@functools.cache
def _load() -> _Library | str:
    """The library, or why there is none."""
    if not LIBRARY.exists():
        return f"it was not built when cuflash was installed: {build_note() or 'nothing says why'}"
    try:
        functions = ctypes.CDLL(str(LIBRARY))
        functions.cuflash_call_bytes.restype = ctypes.c_int64
        functions.cuflash_sources.restype = ctypes.c_char_p
        size, sources = functions.cuflash_call_bytes(), functions.cuflash_sources().decode()
    except (OSError, AttributeError) as error:
        return f"it cannot be loaded: {error}"
    if size != ctypes.sizeof(_Call) or _hash_of_sources() not in ("", sources):
        return "it was built of other sources than these: pip install -e . in the checkout builds it again"
    call: list[Any] = [ctypes.c_char_p, ctypes.c_char_p]
    functions.cuflash_run.argtypes = call
    of_long = ctypes.POINTER(_LongCall)
    functions.cuflash_start.argtypes, functions.cuflash_start.restype = [*call, of_long], None
    functions.cuflash_wait.argtypes = [of_long, ctypes.c_int]
    functions.cuflash_finish.argtypes, functions.cuflash_finish.restype = [of_long], None
    functions.cuflash_find.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    functions.cuflash_processor.restype = ctypes.c_char_p
    functions.cuflash_overhead_ns.argtypes = [ctypes.c_char_p]
    functions.cuflash_overhead_ns.restype = ctypes.c_double
    return _Library(functions, _find_head_bytes())


def build_note() -> str:
    """What the build of the library left out, and why: all of it, or kinds of instructions; empty if nothing."""
    try:
        return "; ".join(LIBRARY.with_name(NOTE).read_text(encoding="utf-8").splitlines())
    except OSError:
        return ""


def _hash_of_sources() -> str:
    """The hash of the sources next to the library, as in setup.py; empty where there are none, as in a wheel."""
    files = sorted(path for path in LIBRARY.parent.rglob("*") if path.suffix in (".h", ".cpp"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else ""


class _ArrayObject(ctypes.Structure):
    """The end of the head of all objects, and the fields of an array object after it, as NumPy's headers say."""

    _fields_ = (
        ("type", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("num_axes", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("base", ctypes.c_void_p),
        ("dtype", ctypes.c_void_p),
    )


def _find_head_bytes() -> int:
    """How many bytes of an array object come before its own fields, in CPython; -1 where that is not known.

    The core reads these fields itself, and finds the arrays in a tuple, whose items come after its own head. Asking
    arrays for their addresses, shapes and strides in Python takes longer than all the rest of a small call.
    """
    if sys.implementation.name != "cpython":
        return -1
    head_bytes = object.__basicsize__
    probes = (np.empty(3), np.empty((2, 5), np.int16)[:, 1:])
    items = (ctypes.c_void_p * len(probes)).from_address(id(probes) + _TUPLE_HEAD)
    if [*items] != [*map(id, probes)]:
        return -1
    for x in probes:
        own = _ArrayObject.from_address(id(x) + head_bytes - ctypes.sizeof(ctypes.c_void_p))
        if (own.type, own.data, own.num_axes, own.dtype) != (id(np.ndarray), x.ctypes.data, x.ndim, id(x.dtype)):
            return -1
        if (*own.shape[: x.ndim],) != x.shape or (*own.strides[: x.ndim],) != x.strides:
            return -1
    return head_bytes


def why_not(problem: Problem | None = None) -> str | None:
    """Why the core does not compute this problem without its functions, or any; None if it does."""
    library = _load()
    if isinstance(library, str):
        return library
    unknown = [] if problem is None else [name for name in problem.acting if name not in KNOWN]
    if problem is not None and problem.row_reductions:
        unknown += [name for name in problem.row_reductions if name not in KNOWN_REDUCTIONS]
    return f"it knows no {' and no '.join(unknown)}" if unknown else None


def processor() -> str:
    """The instructions that the core uses here."""
    library = _load()
    return "" if isinstance(library, str) else library.functions.cuflash_processor(SKIPPED_INSTRUCTION_SETS).decode()


def instruction_sets() -> dict[str, int]:
    """The instruction sets that there is code for here, best first, by how many better ones are left out."""
    library = _load()
    if isinstance(library, str):
        return {}
    named = {library.functions.cuflash_processor(skipped).decode(): skipped for skipped in reversed(range(5))}
    return dict(sorted(named.items(), key=lambda item: item[1]))


def unit_of(problem: Problem) -> float:
    """What a row max of the core times this is an exponent of e, as `Scaling` of `core/score_tiles.h` says."""
    acts = problem.given(("bias", "alibi_slopes")) or problem.softcap is not None or problem.scale == 0
    return 1.0 if acts or problem.score is not None else abs(problem.scale)


def run(
    problem: Problem, arrays: Mapping[str, Array | None], pass_: Pass, seed: int | None, offset: int | None
) -> None:
    """Compute a pass: `arrays` has those of `AXES` that there are, by name, and the results to be written among them.

    A backward pass without dout finds row sums only; other ones may be given these (`cuflash.spec.row_sums.in_units`).

    Raises MemoryError, and whatever a signal handler raises, such as KeyboardInterrupt: within a tenth of a second.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    if pass_.has_tangents:
        if "block_table" in given:
            given["tblock_table"] = given["block_table"]  # tk and tv are pools of the same pages
        given = dict(sorted(given.items(), key=lambda item: item[0] not in AXES))  # as the core takes them
    kept: dict[Any, Prepared] = vars(problem).setdefault("_prepared_calls", {})  # with the problem
    key = (pass_, *given, *[x.strides for x in given.values()])
    prepared = kept.get(key)
    if prepared is None:
        prepared = prepare(problem, given, pass_)
        if prepared is not None:
            if len(kept) >= MOST_PREPARED:
                kept.clear()
            kept[key] = prepared
    random = (seed or 0, offset or 0)
    if prepared is None or compute(prepared, tuple(given.values()), random, are_disjoint=True) != DONE:
        _run_on_copies(problem, given, pass_, seed, offset)


def compute(prepared: Prepared, arrays: tuple[Array, ...], random: tuple[int, int], *, are_disjoint: bool) -> int:
    """Compute a pass on arrays in the order in which they were prepared. Raises as `run` does.

    Returns `DONE`, or why nothing was computed: `UNALIGNED` if elements of an array are not aligned to their size, or
    `OVERLAPPING` if a result overlaps with the range from the first to the last byte of another array. `are_disjoint`
    says that they share no memory all the same.
    """
    library = _load()
    if isinstance(library, str):
        raise RuntimeError(f"there is no compiled core: {library}")
    functions, head_bytes = library
    fixed, nanoseconds = prepared
    status, threads, is_long = _NO_THREAD, 1, False
    if nanoseconds > SERIAL_NS:
        threads = max(1, min(count_cores(), int(nanoseconds / THREAD_NS)))
        is_long = nanoseconds > PATIENCE_NS * threads
    if head_bytes >= 0:
        pointers = id(arrays) + _TUPLE_HEAD
    else:
        addresses = (ctypes.c_void_p * len(arrays))(*[x.ctypes.data for x in arrays])
        pointers = ctypes.addressof(addresses)
    changing = _CHANGING.pack(head_bytes, SKIPPED_INSTRUCTION_SETS, threads, are_disjoint, *random, pointers)
    if is_long:
        status = _run_on_threads(functions, fixed, changing)
    if status == _NO_THREAD:
        status = functions.cuflash_run(fixed, changing)
    if status == _OUT_OF_MEMORY:
        raise MemoryError("no memory for the tiles of attention")
    if status == _OTHER_LAYOUT:
        raise RuntimeError("the compiled core was built of other sources")
    return status


def signatures_of(arrays: Iterable[Shaped | None]) -> bytes:
    """Types, dtypes, shapes and strides of the arrays of a call, some of which may be None, for `table_of`.

    The caller has to keep their dtypes alive.
    """
    none, array = type(None), np.ndarray
    signatures = [
        _Signature(id(none)) if x is None else _Signature(id(array), id(x.dtype), len(x.shape), x.shape, x.strides)
        for x in arrays
    ]
    return b"".join(map(bytes, signatures))


def table_of(calls: Sequence[bytes]) -> bytes:
    """A table for `find` of the signatures of some calls, each of as many arrays."""
    library = _load()
    head_bytes = -1 if isinstance(library, str) else library.head_bytes
    if head_bytes < 0:
        calls = ()
    num_arrays = len(calls[0]) // ctypes.sizeof(_Signature) if calls else 0
    return b"".join((struct.pack("@3q", len(calls), num_arrays, head_bytes), *calls))


def find(table: bytes, arrays: tuple[Array | None, ...]) -> int:
    """The number of the call of a table whose arrays are like these, and -1 where there is none, or no core.

    It takes a fifth of the time that it takes Python to ask arrays for shapes, strides and dtypes. Objects of any type
    may be among them.
    """
    if why_not() is not None:
        return -1
    library = _load()
    assert not isinstance(library, str)
    number: int = library.functions.cuflash_find(table, id(arrays) + _TUPLE_HEAD)
    return number


def _run_on_copies(
    problem: Problem, given: dict[str, Array], pass_: Pass, seed: int | None, offset: int | None
) -> None:
    """Compute a call on arrays some of whose elements are not aligned to their size: the core gets copies of these."""
    copies = {name: x if x.flags.aligned else x.copy() for name, x in given.items()}
    run(problem, copies, pass_, seed, offset)
    for name, x in given.items():
        if name in pass_.results_in(problem) and copies[name] is not x:
            x[...] = copies[name]


def _run_on_threads(functions: Any, fixed: bytes, changing: bytes) -> int:
    """Compute a long call on threads of the core. This one waits, and handles signals in between.

    A signal handler may raise as soon as the core has come back from any function. So the core itself writes down that
    a call is running, and arrays live until it is not.
    """
    call, finish = _LongCall(), functions.cuflash_finish
    own = ctypes.byref(call)
    try:
        try:
            functions.cuflash_start(fixed, changing, own)
            while not functions.cuflash_wait(own, SLICE_MS):
                pass
        finally:
            finish(own)
    finally:
        # Another handler may run, and raise, before the first line of a `finally` does.
        finish(own)
    status: int = call.status
    return status


def prepare(problem: Problem, given: Mapping[str, Shaped], pass_: Pass) -> Prepared | None:
    """What calls on arrays like these, by name, have in common; None where strides are not whole elements."""
    library = _load()
    if isinstance(library, str):
        raise RuntimeError(f"there is no compiled core: {library}")
    filled = [x for x in given.values() if 0 not in x.shape]
    steps = [(s, x.dtype.itemsize) for x in filled for n, s in zip(x.shape, x.strides, strict=True) if n > 1]
    if any(stride % itemsize for stride, itemsize in steps):
        return None
    fixed = _fixed_fields(problem, {name: x for name, x in given.items() if name in AXES}, pass_)
    per_ns = 30 if problem.dtype == "float64" else 60
    nanoseconds = pass_.flops(problem) / per_ns + library.functions.cuflash_overhead_ns(fixed)
    if pass_.has_tangents:
        of_tangents = {name[1:]: x for name, x in given.items() if name not in AXES}
        fixed = fixed.ljust(ctypes.sizeof(_Call), b"\0") + _fixed_fields(problem, of_tangents, pass_)
    return Prepared(fixed, nanoseconds)


def _fixed_fields(problem: Problem, given: Mapping[str, Shaped], pass_: Pass) -> bytes:
    """A `struct Call` up to what changes from call to call, of arrays like these."""
    call = _Call(
        bytes=ctypes.sizeof(_Call),
        is_backward=pass_ not in (FORWARD, JVP),
        has_tangents=pass_.has_tangents,
        finds_row_sums=pass_ is BACKWARD and "dout" not in given,
        dtype=DTYPES.index(problem.dtype),
        kv_dtype=(*DTYPES, *FLOAT8).index(problem.k.dtype),
        bias_dtype=0 if problem.bias is None else DTYPES.index(problem.bias.dtype),
        diagonal=problem.diagonal,
        window_left=NO_BOUND if problem.window_left is None else problem.window_left,
        window_right=NO_BOUND if problem.window_right is None else problem.window_right,
        has_own_diagonals=problem.follows_lengths or (problem.is_packed and problem.alignment == "bottom_right"),
        page_size=problem.page_size,
        block_rows=problem.block_size[0],
        block_keys=problem.block_size[1],
        lengths_are_64_bit=problem.kv_lengths is not None and problem.kv_lengths.dtype == "int64",
        dropout_steps=round(65536 * problem.dropout),
        dropout_row=problem.origin.query,
        dropout_column=problem.origin.key,
        dropout_head=problem.origin.head,
        dropout_heads=problem.origin.num_heads,
        kept_scale=problem.kept_scale,
        batch_invariant=problem.batch_invariant,
        num_top_keys=given["key_indices"].shape[-1] if "key_indices" in given else 0,
    )
    for name in problem.given(_NUMBERS):
        setattr(call, name, getattr(problem, name))
    for name in ("batch", "num_heads", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        setattr(call, name, getattr(problem, name))
    names = list(AXES)
    call.num_given = len(given)
    for number, (name, x) in enumerate(given.items()):
        at = call.given[number] = names.index(name)
        call.sizes[at] = x.dtype.itemsize
        call.strides[at][:] = _strides(x, AXES[name], problem.layout)
        call.begins[at], call.ends[at] = extent(x)
    return bytes(call)[: _Call.seed.offset]


def _strides(array: Shaped, axes: Any, layout: str) -> tuple[int, ...]:
    """Strides of an array in elements, 0 on axes that it does not have and on those of length 1."""
    if axes == "q":
        return layout_of(array, layout).strides
    own = [0 if n == 1 else s // array.dtype.itemsize for n, s in zip(array.shape, array.strides, strict=True)]
    return (*[0] * (axes - len(own)), *own, *[0] * (4 - axes))
