"""What is to be computed: shapes, dtypes, strides and the mask of one attention problem, validated once.

A `Problem` is plain data, made from the static `Options` and from anything with `shape`, `strides` and `dtype` (NumPy
and CuPy arrays alike). Everything downstream (the oracle, the CPU path, plans, kernels) reads the mask from it in one
form: row i sees key j where

    i + diagonal - window_left <= j <= i + diagonal + window_right        (a bound that is None does not exist)
    and j < kv_lengths[batch] and mask[batch, head, i, j]
    and block_mask[batch, head, i // block_size[0], j // block_size[1]].

With a paged cache, `diagonal` is that of an entry with all seqlen_k keys; others have their own (`aligned_to`).

Of packed sequences, `batch` is their number, and `seqlen_q` and `seqlen_k` are the rows of all of them. Each is a
problem of its own, with its own diagonal.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from cuflash.terms import BY_NAME, NAMES, TERMS, Term, Terms

if TYPE_CHECKING:
    from typing_extensions import Unpack

DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEMSIZE = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
LAYOUTS = ("bhsd", "bshd")
PRECISIONS = ("highest", "tf32")
MAX_BLOCK = 1024  # rows, or keys, of a block of a block mask
# What `backward` can give, in the order in which it does; and what it gives unless told otherwise.
GRADIENTS = ("dq", "dk", "dv", "dbias", "dalibi_slopes", "dscale", "dsoftcap", "dsinks")
DEFAULT_NEED = ("dq", "dk", "dv")
# Those that only a problem with such an option has.
OF_OPTIONS = {"dsoftcap": "softcap"} | {f"d{term.name}": term.name for term in TERMS if term.has_gradient}
# The passes multiply products of q and k by scale, 1 / softcap and log2(e), in the dtype of the softmax. So that no
# ordinary product overflows on the way, scale, softcap and 1 / softcap are at most 2 to this power. Two of them take
# three quarters of the exponents of the dtype, and leave room for products up to 2**31 in float32.
OPTION_EXPONENT = {"float32": 48, "float64": 384}
# The kernels of these dtypes compute the tanh to 1e-7, which softcap multiplies. Up to 2 to this power, the error hides
# behind the rounding of the weights.
SOFTCAP_EXPONENT = {"float16": 16, "bfloat16": 16}
SMALLEST_SCALE = 2.0**-149  # in float32: what is closer to 0 rounds to it
MAX_SEQLEN = 2**30  # positions and their sums are 32-bit in the kernels
PAGE_SIZES = (16, 32, 64, 128, 256)
CAUSAL = "False, True (bottom-right aligned) or 'top_left'"
FINITE = "a finite number that float64 holds"
LONGEST_VALUE = 200  # characters of a value in a message


def type_error(name: str, got: object, expected: str) -> TypeError:
    return TypeError(f"{name}: got {_shown(got)}, expected {expected}")


def value_error(name: str, got: object, expected: str) -> ValueError:
    return ValueError(f"{name}: got {_shown(got)}, expected {expected}")


def not_packed_error(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: got it together with cu_seqlens_q, expected one of them; for {name}, pad the sequences to one length "
        "and make them the entries of a batch"
    )


def typed(value: object) -> str:
    """A value with its type, as messages say it: ``float 1.5``, but ``None`` and ``Decimal('1.5')``."""
    name, text = type(value).__name__, _shown(value, repr)
    return text if value is None or f"{name}(" in text else f"{name} {text}"


def _shown(value: object, spell: Callable[[object], str] = str) -> str:
    """A value in one line that is not too long for a message."""
    try:
        text = " ".join(spell(value).split())
    except ValueError:  # Python prints no integers of more than 4300 digits
        return "of thousands of digits"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _unwrapped(value: object) -> object:
    """What a NumPy scalar, or an array without axes, holds; any other value as it is."""
    import numpy as np

    return value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value


def as_bool(name: str, value: object, expected: str = "a bool") -> bool:
    """A bool, of Python or NumPy, checked."""
    unwrapped = value if type(value) is bool else _unwrapped(value)
    if not isinstance(unwrapped, bool):
        raise type_error(name, typed(value), expected)
    return unwrapped


def as_integer(name: str, value: object, expected: str = "an integer") -> int:
    """An integer of any type that can hold one, checked: nothing is rounded, and a bool or a float is none."""
    return _converted(int, (numbers.Rational, Decimal), name, value, expected)


def as_real(name: str, value: object, expected: str = "a real number") -> float:
    """A finite real number of any type, checked and rounded to float64."""
    number = _converted(float, (numbers.Real, Decimal), name, value, expected)
    if not math.isfinite(number):
        raise value_error(name, value, FINITE)
    return number


def _converted(kind: Callable[[Any], Any], types: tuple[type, ...], name: str, value: object, expected: str) -> Any:
    if type(value) is kind:
        return value
    unwrapped = _unwrapped(value)
    if isinstance(unwrapped, bool) or not isinstance(unwrapped, types):
        raise type_error(name, typed(value), expected)
    try:
        converted = kind(unwrapped)
    except (OverflowError, ValueError):  # too large for float64; or a Decimal that is no number, or infinite
        raise value_error(name, typed(value), FINITE if kind is float else expected) from None
    if kind is int and converted != unwrapped:
        raise value_error(name, typed(value), expected)
    return converted


def check_dropout(value: object, name: str = "dropout") -> float:
    """A rate of dropout, checked."""
    expected = "a number from 0 up to, but not, 1"
    rate = as_real(name, value)
    if not 0 <= rate < 1:
        raise value_error(name, value, expected)
    if round(rate * 65536) == 65536:
        raise value_error(name, value, f"{expected}, in steps of 1 / 65536: the step nearest to it is 1")
    return rate


def rounded_rate(rate: float) -> float:
    """The multiple of 1 / 65536 nearest to a rate of dropout: 16 random bits decide about a weight."""
    return round(rate * 65536) / 65536


def check_random(seed: object, offset: object) -> tuple[int, int]:
    """The key and the offset of random numbers, checked."""

    def check(name: str, value: object, bits: int) -> int:
        number = as_integer(name, value, "an integer, which dropout needs")
        if not 0 <= number < 2**bits:
            raise value_error(name, value, f"0 to 2**{bits} - 1")
        return number

    return check("seed", seed, 64), check("offset", offset, 32)


def _check_window_side(side: str, value: object) -> int | None:
    if value is None:
        return None
    number = as_integer(f"window {side}", value, "None or an integer")
    if number < 0:
        raise value_error(f"window {side}", value, "None (no bound) or an integer >= 0")
    return number


def check_block_size(value: object) -> tuple[int, int]:
    """Rows and keys of the blocks of a block mask, checked; one number stands for both."""
    sides = value if isinstance(value, (tuple, list)) else (value, value)
    if len(sides) != 2:
        raise value_error("block_size", value, "an integer or two of them, (rows, keys)")
    rows, keys = (as_integer(f"block_size {what}", side) for what, side in zip(("rows", "keys"), sides, strict=True))
    for what, side in (("rows", rows), ("keys", keys)):
        if side % 16 or not 16 <= side <= MAX_BLOCK:
            raise value_error(f"block_size {what}", side, f"a multiple of 16 from 16 to {MAX_BLOCK}")
    return rows, keys


def check_choice(name: str, value: object, choices: tuple[str, str]) -> None:
    """Check one of two words."""
    expected = f"{choices[0]!r} or {choices[1]!r}"
    if not isinstance(value, str):
        raise type_error(name, typed(value), expected)
    if value not in choices:
        raise value_error(name, repr(value), expected)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The static options of `cuflash.FlashAttention`, checked; see there for their meaning."""

    causal: bool | Literal["top_left"] = False
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    layout: str = "bhsd"
    deterministic: bool = False
    precision: str = "highest"
    dropout: float = 0.0
    block_size: int | tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"block_size": check_block_size(self.block_size)}
        if not isinstance(self.causal, str):
            checked["causal"] = as_bool("causal", self.causal, CAUSAL)
        elif self.causal != "top_left":
            raise value_error("causal", repr(self.causal), CAUSAL)
        if self.scale is not None:
            checked["scale"] = as_real("scale", self.scale, "None or a real number")
        if self.window is not None:
            if not isinstance(self.window, (tuple, list)):
                raise type_error("window", typed(self.window), "None or (left, right)")
            if len(self.window) != 2:
                raise value_error("window", self.window, "two entries (left, right)")
            left, right = self.window
            checked["window"] = (_check_window_side("left", left), _check_window_side("right", right))
        if self.softcap is not None:
            checked["softcap"] = as_real("softcap", self.softcap, "None or a real number")
            if checked["softcap"] <= 0:
                raise value_error("softcap", checked["softcap"], "None or a number > 0")
        check_choice("layout", self.layout, LAYOUTS)
        checked["deterministic"] = as_bool("deterministic", self.deterministic)
        check_choice("precision", self.precision, PRECISIONS)
        checked["dropout"] = check_dropout(self.dropout)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))

    def __hash__(self) -> int:
        """Made once: every call looks its launch up by it."""
        return self._hash  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One array as kernels see it: four axes, strides in elements, stride 0 on broadcast axes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = 16  # bytes that its address is a multiple of, up to 16; of a bias only, others are looked at together

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements: broadcast axes count once."""
        sizes = [n for n, stride in zip(self.shape, self.strides, strict=True) if stride or n <= 1]
        return math.prod(sizes) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention problem; the fields follow the names of docs/design.md. Frozen and hashable: it keys plans."""

    dtype: str
    layout: str
    ndim: int
    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    softcap: float | None
    alignment: Literal["bottom_right", "top_left"]  # of the diagonal
    diagonal: int  # 0 for packed sequences, each of which has its own
    window_left: int | None
    window_right: int | None
    deterministic: bool
    precision: str
    dropout: float  # a multiple of 1 / 65536
    q: Operand
    k: Operand
    v: Operand
    bias: Operand | None = None
    mask: Operand | None = None
    kv_lengths: Operand | None = None
    alibi_slopes: Operand | None = None
    sinks: Operand | None = None
    block_mask: Operand | None = None
    block_size: tuple[int, int] = (0, 0)  # (rows, keys) of the blocks of the block mask; zeros without one
    block_table: Operand | None = None  # k and v are then pools of pages: (num_pages, num_heads_kv, page_size, dim)
    cu_seqlens_q: Operand | None = None
    cu_seqlens_k: Operand | None = None

    @property
    def options(self) -> Options:
        """Options with which the same arrays make this problem again."""
        window = (self.window_left, self.window_right)
        return Options(
            causal="top_left" if self.alignment == "top_left" else False,
            scale=self.scale,
            window=None if window == (None, None) else window,
            softcap=self.softcap,
            layout=self.layout,  # type: ignore[arg-type]
            deterministic=self.deterministic,
            precision=self.precision,
            dropout=self.dropout,
            block_size=self.block_size if self.block_mask is not None else Options.block_size,
        )

    @property
    def follows_lengths(self) -> bool:
        """Whether the diagonal of entry b is kv_lengths[b] - seqlen_q."""
        return self.block_table is not None and self.alignment == "bottom_right"

    @property
    def page_size(self) -> int:
        """Keys of a page; 0 where the keys of an entry lie in one piece."""
        return self.k.shape[2] if self.block_table is not None else 0

    def aligned_to(self, length: int) -> Problem:
        """The problem with the diagonal of an entry that has so many keys."""
        return replace(self, diagonal=length - self.seqlen_q) if self.follows_lengths else self

    def of_length(self, seqlen_k: int) -> Problem:
        """The problem with so many keys, and the same bounds of the window."""
        if seqlen_k == self.seqlen_k:
            return self
        keeps_diagonal = self.is_packed or self.alignment == "top_left"
        diagonal = self.diagonal if keeps_diagonal else self.diagonal + seqlen_k - self.seqlen_k
        return replace(self, seqlen_k=seqlen_k, diagonal=diagonal)

    @property
    def is_packed(self) -> bool:
        """Whether the arrays hold sequences one behind the other."""
        return self.cu_seqlens_q is not None

    @property
    def array_batch(self) -> int:
        """Length of the batch axis of the arrays."""
        return 1 if self.is_packed else self.batch

    def of_sequence(self, seqlen_q: int, seqlen_k: int) -> Problem:
        """The problem of one packed sequence of these lengths, with the strides of all of them."""
        return replace(
            self,
            batch=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            diagonal=seqlen_k - seqlen_q if self.alignment == "bottom_right" else 0,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
        )

    @property
    def mean_sequence(self) -> Problem:
        """The problem itself; of packed sequences one of them, of mean length, rounded up: plans are made for that."""
        if not self.is_packed:
            return self
        return self.of_sequence(*(-(-n // max(self.batch, 1)) for n in (self.seqlen_q, self.seqlen_k)))

    @property
    def softmax_dtype(self) -> str:
        """dtype of scores, lse and delta: float64 for float64 inputs, else float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_heads_kv if self.num_heads_kv else 1

    @property
    def kept_scale(self) -> float:
        """What a weight that dropout keeps is multiplied by."""
        return 1 / (1 - self.dropout)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out and dout as the caller sees them."""
        return user_shape(self.batch, self.num_heads, self.seqlen_q, self.head_dim_v, self.ndim, self.layout)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse as the caller sees it: (..., heads, seqlen_q) in every layout."""
        return (self.batch, self.num_heads, self.seqlen_q)[4 - self.ndim :]

    def key_range(self, row: int) -> tuple[int, int]:
        """First and one past the last key that the window lets query `row` see, within [0, seqlen_k]."""
        first = 0 if self.window_left is None else row + self.diagonal - self.window_left
        stop = self.seqlen_k if self.window_right is None else row + self.diagonal + self.window_right + 1
        stop = min(max(stop, 0), self.seqlen_k)
        return min(max(first, 0), stop), stop

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs inside the window, over all heads; masks and `kv_lengths` are not looked into.

        Packed sequences are taken as equally long.
        """
        import numpy as np

        if self.is_packed:
            return self.batch * self.mean_sequence.visible_pairs
        rows = np.arange(self.seqlen_q, dtype=np.int64) + self.diagonal
        first = np.zeros_like(rows) if self.window_left is None else np.clip(rows - self.window_left, 0, self.seqlen_k)
        stop = np.full_like(rows, self.seqlen_k)
        if self.window_right is not None:
            stop = np.clip(rows + self.window_right + 1, 0, self.seqlen_k)
        return int(np.maximum(stop - first, 0).sum()) * self.batch * self.num_heads

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the two products of the forward pass over visible pairs."""
        return 2 * self.visible_pairs * (self.head_dim + self.head_dim_v)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of the five products of the backward pass over visible pairs."""
        return 2 * self.visible_pairs * (3 * self.head_dim + 2 * self.head_dim_v)

    @property
    def forward_bytes(self) -> int:
        """Fewest bytes the forward pass moves through device memory: inputs read once, out and lse written once."""
        terms = (self.bias, self.mask, self.block_mask, self.kv_lengths, self.alibi_slopes, self.sinks)
        inputs = [self.q, *terms, self.block_table, self.cu_seqlens_q, self.cu_seqlens_k]
        keys_bytes = self.k.nbytes + self.v.nbytes
        if self.block_table is not None:  # pages of others are not read
            rows = self.batch * self.num_heads_kv * self.seqlen_k
            keys_bytes = rows * (self.head_dim + self.head_dim_v) * ITEMSIZE[self.dtype]
        return sum(x.nbytes for x in inputs if x is not None) + keys_bytes + self._out_bytes + self._lse_bytes

    @property
    def backward_bytes(self) -> int:
        """Fewest bytes the backward pass moves: its inputs, out, dout and lse read once, dq, dk and dv written once."""
        gradients = self.q.nbytes + self.k.nbytes + self.v.nbytes
        return self.forward_bytes + self._out_bytes + gradients

    @property
    def naive_bytes(self) -> int:
        """Bytes of one seqlen_q x seqlen_k matrix of scores over all heads, which the plain formula stores.

        Packed sequences are taken as equally long.
        """
        if self.is_packed:
            return self.batch * self.mean_sequence.naive_bytes
        return self.batch * self.num_heads * self.seqlen_q * self.seqlen_k * ITEMSIZE[self.softmax_dtype]

    @property
    def _out_bytes(self) -> int:
        return math.prod(self.out_shape) * ITEMSIZE[self.dtype]

    @property
    def _lse_bytes(self) -> int:
        return math.prod(self.lse_shape) * ITEMSIZE[self.softmax_dtype]


def user_shape(batch: int, heads: int, seqlen: int, dim: int, ndim: int, layout: str) -> tuple[int, ...]:
    """Shape of an operand as the caller wrote it: without the axes that an `ndim`-dimensional array does not have."""
    if layout == "bshd" and ndim >= 3:
        return (batch, seqlen, heads, dim)[4 - ndim :]
    return (batch, heads, seqlen, dim)[4 - ndim :]


def view_4d(array: Any, layout: str) -> Any:
    """The (batch, heads, seqlen, dim) view of a 2-D to 4-D NumPy or CuPy operand."""
    if layout == "bshd" and array.ndim >= 3:
        array = array.swapaxes(-3, -2)
    return array[(None,) * (4 - array.ndim)]


def view_rows(array: Any) -> Any:
    """The (batch, heads, seqlen_q) view of an lse-shaped NumPy or CuPy array."""
    return array[(None,) * (3 - array.ndim)]


def layout_of(array: Any, layout: str) -> Operand:
    """(batch, heads, seqlen, dim) shape and element strides of a 2-D to 4-D operand.

    An axis of length 1 has stride 0: whatever stride it came with leads nowhere, and need not be aligned.
    """
    itemsize = array.dtype.itemsize
    shape = list(array.shape)
    strides = [s // itemsize if n > 1 else 0 for n, s in zip(shape, array.strides, strict=True)]
    while len(shape) < 4:
        at = 1 if layout == "bshd" and len(shape) == 2 else 0  # the head axis of a 2-D bshd array goes in the middle
        shape.insert(at, 1)
        strides.insert(at, 0)
    if layout == "bshd":
        shape[1], shape[2] = shape[2], shape[1]
        strides[1], strides[2] = strides[2], strides[1]
    return Operand(shape=tuple(shape), strides=tuple(strides), dtype=array.dtype.name)


def rows_of(array: Any) -> Operand:
    """(batch, heads, seqlen_q) shape and element strides of an lse-shaped array."""
    missing = 3 - len(array.shape)
    strides = tuple(s // array.dtype.itemsize for s in array.strides)
    return Operand(shape=(1,) * missing + tuple(array.shape), strides=(0,) * missing + strides, dtype=array.dtype.name)


def broadcast_operand(
    name: str, array: Any, target: tuple[int, ...], axes: str = "(batch, num_heads, seqlen_q, seqlen_k)"
) -> Operand:
    """Shape and element strides of `array` broadcast to `target`, as NumPy broadcasts. `axes` are those of `target`."""
    if len(array.shape) > len(target) or any(
        n not in (1, m) for n, m in zip(reversed(array.shape), reversed(target), strict=False)
    ):
        expected = f"a shape that broadcasts to {axes} = {target}"
        raise value_error(name, f"shape {tuple(array.shape)}", expected)
    missing = len(target) - len(array.shape)
    strides = [0] * missing + [
        0 if n == 1 else s // array.dtype.itemsize for n, s in zip(array.shape, array.strides, strict=True)
    ]
    return Operand(shape=target, strides=tuple(strides), dtype=array.dtype.name)


def _check_dtype(name: str, array: Any, expected: tuple[str, ...], why: str = "") -> None:
    if array.dtype.name not in expected:
        raise type_error(name, f"dtype {array.dtype}", " or ".join(expected) + why)


def make_problem(options: Options, q: Any, k: Any, v: Any, **terms: Unpack[Terms]) -> Problem:
    """Validate the inputs of one call against each other.

    Raises TypeError (a dtype), ValueError (a shape, a size) or NotImplementedError (a combination), naming the
    argument, what was got and what is expected. Values are not looked at.
    """
    given = {name: array for name in NAMES if (array := terms.get(name)) is not None}
    block_table, block_mask = given.get("block_table"), given.get("block_mask")
    is_packed = "cu_seqlens_q" in given or "cu_seqlens_k" in given
    if block_table is not None and is_packed:
        raise not_packed_error("block_table")
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.name not in DTYPES:
            raise type_error(name, f"dtype {array.dtype}", "float16, bfloat16, float32 or float64")
        if not 2 <= len(array.shape) <= 4:
            raise value_error(name, f"{len(array.shape)}-D shape {tuple(array.shape)}", "a 2-D, 3-D or 4-D array")
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise type_error(name, f"dtype {array.dtype}", f"{q.dtype} as q has")
        if len(array.shape) != len(q.shape):
            raise value_error(name, f"{len(array.shape)}-D shape {tuple(array.shape)}", f"{len(q.shape)}-D as q is")
    layout = options.layout
    q4, k4, v4 = layout_of(q, layout), layout_of(k, layout), layout_of(v, layout)
    batch, num_heads, seqlen_q, head_dim = q4.shape
    _, num_heads_kv, seqlen_k, _ = k4.shape
    as_q, as_k = [("k", k4, 0, "batch"), ("v", v4, 0, "batch")], [(1, "num_heads_kv"), (2, "seqlen_k")]
    if block_table is not None:
        seqlen_k = _check_pool(block_table, given.get("kv_lengths"), q, k, k4, batch)
        as_q, as_k = [], [(0, "num_pages"), (1, "num_heads_kv"), (2, "page_size")]
    for name, operand, axis, what in (*as_q, ("k", k4, 3, "head_dim")):
        if operand.shape[axis] != q4.shape[axis]:
            raise value_error(name, f"{what} {operand.shape[axis]}", f"{what} {q4.shape[axis]} as q has")
    for axis, what in as_k:
        if v4.shape[axis] != k4.shape[axis]:
            raise value_error("v", f"{what} {v4.shape[axis]}", f"{what} {k4.shape[axis]} as k has")
    for name, operand in (("q", q4), ("v", v4)):
        if operand.shape[3] < 1:
            raise value_error(name, f"last axis of length {operand.shape[3]}", "a head dimension of at least 1")
    for name, seqlen in (("q", seqlen_q), ("k" if block_table is None else "block_table", seqlen_k)):
        if seqlen > MAX_SEQLEN:
            raise value_error(name, f"seqlen {seqlen}", f"at most {MAX_SEQLEN}")
    if num_heads % num_heads_kv if num_heads_kv else num_heads:
        raise value_error("k", counted(num_heads_kv, "head"), f"a divisor of the {counted(num_heads, 'head')} of q")

    if is_packed:
        batch = _number_of_sequences(len(q.shape), given.get("cu_seqlens_q"), given.get("cu_seqlens_k"))
        for name in given:
            if not BY_NAME[name].goes_packed:
                raise not_packed_error(name)
    softmax_dtype = "float64" if q4.dtype == "float64" else "float32"
    scale, softcap = _numbers_in(softmax_dtype, options, q4)
    sizes = {"batch": batch, "num_heads": num_heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    operands = {
        name: _term_operand(BY_NAME[name], array, q4.dtype, softmax_dtype, sizes) for name, array in given.items()
    }
    block_size = (0, 0)
    if block_mask is not None:
        if block_table is not None:
            raise NotImplementedError(
                "block_mask: got it together with block_table, expected one of them; give the pairs of its blocks as a "
                "boolean mask"
            )
        block_size = check_block_size(options.block_size)
        operands["block_mask"] = _block_mask_operand(block_mask, block_size, sizes)

    is_top_left = options.causal == "top_left"
    left, right = window_of(options, seqlen_q, seqlen_k)
    return Problem(
        dtype=q4.dtype,
        layout=layout,
        ndim=len(q.shape),
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=v4.shape[3],
        scale=scale,
        softcap=softcap,
        alignment="top_left" if is_top_left else "bottom_right",
        diagonal=0 if is_top_left or is_packed else seqlen_k - seqlen_q,
        window_left=left,
        window_right=right,
        deterministic=options.deterministic,
        precision=options.precision,
        dropout=rounded_rate(options.dropout),
        q=q4,
        k=k4,
        v=v4,
        block_size=block_size,
        **operands,
    )


def _term_operand(term: Term, array: Any, dtype: str, softmax_dtype: str, sizes: Mapping[str, int]) -> Operand:
    """A term as kernels see it, checked against its row."""
    spelled = {"input": dtype, "softmax": softmax_dtype}
    _check_dtype(term.name, array, tuple(dict.fromkeys(spelled.get(x, x) for x in term.dtypes)), term.hint)
    targets = [tuple(sizes[axis] for axis in shape) for shape in term.shapes]
    if term.shapes and not term.broadcasts and tuple(array.shape) not in targets:
        named = (f"({', '.join(shape)}{',' * (len(shape) == 1)})" for shape in term.shapes)
        expected = " or ".join(f"{axes} = {target}" for axes, target in zip(named, targets, strict=True))
        raise value_error(term.name, f"shape {tuple(array.shape)}", expected)
    return broadcast_operand(term.name, array, targets[-1] if targets else tuple(array.shape))


def _block_mask_operand(array: Any, block_size: tuple[int, int], sizes: Mapping[str, int]) -> Operand:
    """A block mask over (batch, heads, blocks of q, blocks of k)."""
    num_blocks = (-(-sizes["seqlen_q"] // block_size[0]), -(-sizes["seqlen_k"] // block_size[1]))
    # The last two axes are blocks: broadcast, they would be a mask of other blocks.
    if tuple(array.shape[-2:]) != num_blocks:
        expected = f"(..., ceil(seqlen_q / {block_size[0]}), ceil(seqlen_k / {block_size[1]})) = (..., "
        expected += f"{num_blocks[0]}, {num_blocks[1]}), for block_size={block_size}"
        raise value_error("block_mask", f"shape {tuple(array.shape)}", expected)
    target = (sizes["batch"], sizes["num_heads"], *num_blocks)
    return broadcast_operand("block_mask", array, target, "(batch, num_heads, blocks of q, blocks of k)")


def window_of(options: Options, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
    """The bounds (left, right) of the window that `causal` and `window` make; None for one that hides nothing.

    Of packed sequences, the longest that there may be are as long as all of them.
    """
    left, right = options.window or (None, None)
    if options.causal:
        right = 0 if right is None else min(right, 0)
    first_row = 0 if options.causal == "top_left" else seqlen_k - seqlen_q  # as a key position
    if left is not None and first_row + seqlen_q - 1 - left <= 0:
        left = None  # even the last row sees the first key
    if right is not None and first_row + right >= seqlen_k - 1:
        right = None  # even the first row sees the last key
    return left, right


def _numbers_in(softmax_dtype: str, options: Options, q: Operand) -> tuple[float, float | None]:
    """scale and softcap of a problem, checked to be in the range of its dtype."""
    exponent = OPTION_EXPONENT[softmax_dtype]
    scale, softcap = q.shape[3] ** -0.5 if options.scale is None else options.scale, options.softcap
    if abs(scale) > 2.0**exponent:
        raise value_error("scale", scale, f"-2**{exponent} to 2**{exponent} for {q.dtype} arrays")
    highest = SOFTCAP_EXPONENT.get(q.dtype, exponent)
    if softcap is not None and not 2.0**-exponent <= softcap <= 2.0**highest:
        raise value_error("softcap", softcap, f"2**-{exponent} to 2**{highest} for {q.dtype} arrays")
    # Kernels treat a scale of 0 in their own way, and what they get is rounded to float32.
    return 0.0 if softmax_dtype == "float32" and abs(scale) < SMALLEST_SCALE else scale, softcap


def counted(count: int, noun: str) -> str:
    """The number and the noun: 1 head, 2 heads."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _check_pool(block_table: Any, kv_lengths: Any, q: Any, k: Any, pool: Operand, batch: int) -> int:
    """Check a block table and the shape of the pool that it leads into; the number of keys that it has room for."""
    _check_dtype("block_table", block_table, ("int32",))
    if len(block_table.shape) != 2 or block_table.shape[0] != batch:
        expected = f"(batch, max_pages), with batch = {batch}"
        raise value_error("block_table", f"shape {tuple(block_table.shape)}", expected)
    if kv_lengths is None:
        raise value_error("kv_lengths", "None", f"lengths of shape (batch,) = ({batch},), which a block_table needs")
    if len(q.shape) != 4:
        raise value_error("q", f"{len(q.shape)}-D shape {tuple(q.shape)}", "a 4-D array, which a block_table needs")
    num_pages, _, page_size, _ = pool.shape
    if num_pages < 1:
        raise value_error("k", f"shape {tuple(k.shape)}", "a pool of at least one page, which a block_table needs")
    if page_size not in PAGE_SIZES:
        expected = f"{', '.join(map(str, PAGE_SIZES[:-1]))} or {PAGE_SIZES[-1]} keys a page"
        raise value_error("k", f"{counted(page_size, 'key')} a page in shape {tuple(k.shape)}", expected)
    return int(block_table.shape[1]) * page_size


def check_pages(problem: Problem, block_table: Any, kv_lengths: Any) -> None:
    """Check the entries of a block table in host memory, those of keys that exist."""
    import numpy as np

    num_pages, first_keys = problem.k.shape[0], np.arange(0, problem.seqlen_k, problem.page_size)
    pages = block_table[first_keys < kv_lengths[:, None]]
    outside = pages[(pages < 0) | (pages >= num_pages)]
    if outside.size:
        expected = f"0 to num_pages - 1 = {num_pages - 1}, where kv_lengths say that there are keys"
        raise value_error("block_table", f"an entry {outside[0]}", expected)


def _number_of_sequences(ndim: int, cu_seqlens_q: Any, cu_seqlens_k: Any) -> int:
    """Of packed arrays, from where their sequences start."""
    both = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    for (name, starts), (other, _) in zip(both, reversed(both), strict=True):
        if starts is None:
            raise value_error(name, "None", f"an array, which {other} needs beside it")
    if ndim != 3:
        raise value_error("q", f"a {ndim}-D array", "a 3-D one, of packed sequences, since there is a cu_seqlens_q")
    for name, starts in both:
        _check_dtype(name, starts, ("int32",))
        if len(starts.shape) != 1 or starts.shape[0] < 1:
            raise value_error(name, f"shape {tuple(starts.shape)}", "(sequences + 1,)")
    (count_q,), (count_k,) = cu_seqlens_q.shape, cu_seqlens_k.shape
    if count_q != count_k:
        raise value_error("cu_seqlens_k", f"shape ({count_k},)", f"({count_q},) as cu_seqlens_q has")
    return int(count_q) - 1


def vector_of(array: Any) -> Operand:
    """Shape and element stride of a 1-D array."""
    (stride,) = array.strides
    return Operand(shape=tuple(array.shape), strides=(stride // array.dtype.itemsize,), dtype=array.dtype.name)


def gradient_operand(name: str, problem: Problem, array: Any) -> Operand:
    """dbias or dalibi_slopes as kernels see it: stride 0 on the axes that it is summed over."""
    shape = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    return broadcast_operand(name, array, shape if name == "dbias" else shape[:2])


def check_array(name: str, array: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Check an array whose shape and dtype follow from the problem: dout, out, lse and the `out=`-style results."""
    if array.dtype.name != dtype:
        raise type_error(name, f"dtype {array.dtype}", dtype)
    if tuple(array.shape) != shape:
        raise value_error(name, f"shape {tuple(array.shape)}", f"{shape}")
