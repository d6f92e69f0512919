"""Property-based tests of anybody's attention: cases, strategies that draw them, and the rule that judges results.

    from hypothesis import given
    import cuflash.testing as ct

    @given(ct.cases(dtypes=["float32"]))
    def test_mine(case):
        ct.check(my_attention, case)

A `Case` is plain frozen data: an attention problem, the optional arrays that come with it, how the arrays lie in memory
and a seed. It makes the arrays; `assert_forward` and `assert_backward` judge what an implementation made of them.

The oracle rule: on the same inputs, the largest error against the oracle (`cuflash.reference` in float64, or in long
double for float64) is at most twice the error of the plain formula computed in the dtype of the inputs (once, for
float32), plus one unit in the last place of the result's scale. `Yardstick` has the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from cuflash import interop, reference
from cuflash.operands import DTYPES, user_shape, view_4d, view_rows
from cuflash.options import LAYOUTS, Options
from cuflash.problem import Problem, make_problem
from cuflash.terms import DEFAULT_NEED, GRADIENTS, NAMES, OF_OPTIONS

Array = NDArray[Any]

STRIDES = ("contiguous", "padded", "transposed", "flipped")
# What `cases` draws unless told otherwise, and what it draws only when told to.
FEATURES = ("causal", "window", "softcap", "scale", "bias", "mask", "kv_lengths", "alibi_slopes", "gqa", "head_dim_v")
MORE_FEATURES = ("sinks", "dlse", "block_mask")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy dtype of a dtype name of cuflash, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem to test, arrays included: the same case makes the same arrays everywhere.

    Parameters
    ----------
    seqlen_q, seqlen_k, head_dim : int
    batch, num_heads, num_heads_kv, head_dim_v : int
        Default to 1, 1, `num_heads` and `head_dim` (0 stands for these two).
    dtype : str
        "float16", "bfloat16", "float32" (default) or "float64".
    ndim : int
        Axes of q, k and v, 2 to 4 (default); 3 needs ``batch == 1``, 2 needs one head as well.
    layout, causal, scale, window, softcap :
        As `cuflash.FlashAttention` takes them.
    bias : tuple of int, optional
        Shape of the additive bias, broadcast to (batch, num_heads, seqlen_q, seqlen_k).
    bias_dtype : {"softmax", "input"}
        Its dtype: float32 (float64 for float64), or that of q.
    bias_holes : bool
        Some entries of the bias are -inf.
    mask : tuple of int, optional
        Shape of the boolean mask, broadcast likewise. Some of its rows are all False.
    kv_lengths : tuple of int, optional
        Number of keys of each batch entry. What lies behind them is NaN.
    kv_lengths_dtype : {"int32", "int64"}
    page_size : int
        k and v are pools of pages of so many keys, 4-D, and there is a block table. `seqlen_k` is a multiple of it;
        `kv_lengths` are those of all keys unless given. Pages are shuffled; some are nobody's, and full of NaN; the
        table has -1 behind the lengths. All batch entries have one page in common where it is whole in each: that of
        their first keys. Such a case has no gradients. 0 (default): no pages.
    alibi_slopes : tuple of int, optional
        Shape of the slopes: (num_heads,) or (batch, num_heads).
    sinks : bool
        Every head of q has a sink.
    cu_seqlens_q, cu_seqlens_k : tuple of int, optional
        Where packed sequences start, and where the last one ends: `batch` is set to their number, `ndim` to 3, and
        seqlen_q and seqlen_k are those of all sequences. What is of none of them in q, k, v and dout is NaN.
    dlse : bool
        There is a gradient with respect to lse.
    dropout : float
        Probability that a weight is dropped. `random` has the seed and the offset of what is dropped.
    block_mask : tuple of int, optional
        Shape of the block mask without its last two axes, which are blocks: () to (batch, num_heads), broadcast.
    block_size : (int, int)
        Rows and keys of these blocks.
    blocks_kept : float
        The fraction of the blocks that is on.
    strides : {"contiguous", "padded", "transposed", "flipped"}
        How every array lies in memory. "padded": every axis is cut out of a longer one, NaN (True in a mask) around it.
        "transposed": the axes are stored in reverse order. "flipped": all strides are negative.
    score_spread : float
        Standard deviation of ``scale * q @ k.T``; large values make weights of zero and one.
    seed : int
        Of the random numbers.
    """

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    batch: int = 1
    num_heads: int = 1
    num_heads_kv: int = 0
    head_dim_v: int = 0
    dtype: str = "float32"
    ndim: int = 4
    layout: str = "bhsd"
    causal: bool | Literal["top_left"] = False
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    bias: tuple[int, ...] | None = None
    bias_dtype: str = "softmax"
    bias_holes: bool = False
    mask: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    kv_lengths_dtype: str = "int32"
    page_size: int = 0
    alibi_slopes: tuple[int, ...] | None = None
    sinks: bool = False
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None
    dlse: bool = False
    dropout: float = 0.0
    block_mask: tuple[int, ...] | None = None
    block_size: tuple[int, int] = (128, 128)
    blocks_kept: float = 0.5
    strides: str = "contiguous"
    score_spread: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_heads_kv", self.num_heads_kv or self.num_heads)
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        if self.page_size and self.seqlen_k % self.page_size:
            raise ValueError(f"page_size: got {self.page_size}, expected a divisor of seqlen_k = {self.seqlen_k}")
        if self.page_size and self.kv_lengths is None:
            object.__setattr__(self, "kv_lengths", (self.seqlen_k,) * self.batch)
        if self.cu_seqlens_q is not None:
            object.__setattr__(self, "batch", len(self.cu_seqlens_q) - 1)
            object.__setattr__(self, "ndim", 3)

    @classmethod
    def from_problem(cls, problem: Problem, *, seed: int = 0) -> Case:
        """A case of the same sizes, dtype and options; arrays are contiguous and random."""
        options = problem.options
        scores_shape = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)

        def distinct(name: str, target: tuple[int, ...]) -> tuple[int, ...] | None:
            operand = getattr(problem, name)
            if operand is None:
                return None
            return tuple(n if stride else 1 for n, stride in zip(target, operand.strides, strict=True))

        slopes = distinct("alibi_slopes", scores_shape[:2])
        blocks = None if problem.block_mask is None else distinct("block_mask", problem.block_mask.shape)
        return cls(
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            head_dim=problem.head_dim,
            batch=problem.batch,
            num_heads=problem.num_heads,
            num_heads_kv=problem.num_heads_kv,
            head_dim_v=problem.head_dim_v,
            dtype=problem.dtype,
            ndim=problem.ndim,
            layout=options.layout,
            causal=options.causal,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            bias=distinct("bias", scores_shape),
            bias_dtype="softmax" if problem.bias and problem.bias.dtype == problem.softmax_dtype else "input",
            mask=distinct("mask", scores_shape),
            kv_lengths=None if problem.kv_lengths is None else _spread_lengths(problem.batch, problem.seqlen_k),
            kv_lengths_dtype="int32" if problem.kv_lengths is None else problem.kv_lengths.dtype,
            page_size=problem.page_size,
            alibi_slopes=None if slopes is None else slopes if slopes == scores_shape[:2] else (problem.num_heads,),
            sinks=problem.sinks is not None,
            cu_seqlens_q=(0, *_spread_lengths(problem.batch, problem.seqlen_q)) if problem.is_packed else None,
            cu_seqlens_k=(0, *_spread_lengths(problem.batch, problem.seqlen_k)) if problem.is_packed else None,
            dropout=options.dropout,
            block_mask=None if blocks is None else blocks[:2],
            block_size=options.block_size,  # type: ignore[arg-type]
            seed=seed,
        )

    @property
    def options(self) -> Options:
        """The static options, as `make_problem` takes them."""
        return Options(
            causal=self.causal,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            layout=self.layout,
            dropout=self.dropout,
            block_size=self.block_size,
        )

    @property
    def keywords(self) -> dict[str, Any]:
        """The static options that differ from their defaults, as keyword arguments of `cuflash.FlashAttention`."""
        defaults = Options()
        names = ("causal", "scale", "window", "softcap", "layout", "dropout", "block_size")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(defaults, name)}

    @property
    def random(self) -> dict[str, Any]:
        """With dropout its seed and offset, as keyword arguments of `cuflash.FlashAttention.forward`; else nothing."""
        if not self.dropout:
            return {}
        return {"seed": (self.seed + 1) * 0x9E3779B97F4A7C15 % 2**64, "offset": self.seed * 0x9E3779B9 % 2**32}

    @property
    def problem(self) -> Problem:
        """The validated `Problem`, with the strides of the arrays."""
        arrays = self.arrays()
        return make_problem(self.options, arrays["q"], arrays["k"], arrays["v"], **optional(arrays))

    def arrays(self, convert: Callable[[Array], Any] = np.asarray) -> dict[str, Any]:
        """Inputs of the case by name: q, k, v, dout (without pages), and those of `NAMES` and dlse it has.

        Parameters
        ----------
        convert : callable
            Makes another library's array of a C-contiguous NumPy array: ``cupy.asarray``, `through_dlpack`. It is given
            whole buffers; the views that `strides` asks for are made of its results, by indexing and transposing.
        """
        return {name: lay_out(x, self.strides, convert) for name, x in self._values().items()}

    def _values(self) -> dict[str, Array]:
        rng = np.random.default_rng(self.seed)
        dtype, softmax_dtype = numpy_dtype(self.dtype), reference.compute_dtype(self.dtype)
        scores_shape = (self.batch, self.num_heads, self.seqlen_q, self.seqlen_k)

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape, np.float64 if self.dtype == "float64" else np.float32)

        batch = self.batch if self.cu_seqlens_q is None else 1  # of the arrays
        scale = self.head_dim**-0.5 if self.scale is None else abs(self.scale)
        spread = self.score_spread / (scale * math.sqrt(self.head_dim)) if scale else 1.0
        values = {
            "q": normal(batch, self.num_heads, self.seqlen_q, self.head_dim) * spread**0.5,
            "k": normal(batch, self.num_heads_kv, self.seqlen_k, self.head_dim) * spread**0.5,
            "v": normal(batch, self.num_heads_kv, self.seqlen_k, self.head_dim_v),
            "dout": normal(batch, self.num_heads, self.seqlen_q, self.head_dim_v),
        }
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            for name, x in values.items():
                x[:, :, (self.cu_seqlens_k if name in "kv" else self.cu_seqlens_q)[-1] :] = np.nan
        if self.kv_lengths is not None and self.cu_seqlens_q is None:
            for b, length in enumerate(self.kv_lengths):
                values["k"][b, :, length:] = np.nan
                values["v"][b, :, length:] = np.nan
        if self.page_size and self.cu_seqlens_q is not None:
            values["block_table"] = np.zeros((self.batch, 1), np.int32)  # nothing takes both
        elif self.page_size:
            values |= self._pages(values["k"], values["v"])
            del values["dout"]
        for name in values.keys() & {"q", "k", "v", "dout"}:
            x = values[name]
            entries, heads, seqlen, dim = x.shape
            x = x.swapaxes(1, 2) if self.layout == "bshd" else x
            values[name] = x.reshape(user_shape(entries, heads, seqlen, dim, self.ndim, self.layout)).astype(dtype)
        if self.bias is not None:
            bias = normal(*self.bias)
            if self.bias_holes:
                bias[rng.random(self.bias) < 0.2] = -np.inf
            if self.kv_lengths is not None and self.bias[-1:] == scores_shape[-1:] != (1,):
                bias[..., max(self.kv_lengths, default=0) :] = np.nan
            values["bias"] = bias.astype(dtype if self.bias_dtype == "input" else softmax_dtype)
        if self.mask is not None:
            mask = rng.random(self.mask) < 0.7
            mask[rng.random(self.mask[:-1]) < 0.2] = False
            values["mask"] = mask
        if self.kv_lengths is not None:
            values["kv_lengths"] = np.array(self.kv_lengths, self.kv_lengths_dtype)
        if self.alibi_slopes is not None:
            values["alibi_slopes"] = np.abs(normal(*self.alibi_slopes)).astype(softmax_dtype) / 4
        if self.sinks:
            values["sinks"] = (self.score_spread * normal(self.num_heads)).astype(softmax_dtype)
        if self.block_mask is not None:
            num_blocks = [-(-n // size) for n, size in zip(scores_shape[2:], self.block_size, strict=True)]
            values["block_mask"] = rng.random((*self.block_mask, *num_blocks)) < self.blocks_kept
        if self.dlse:
            rows = normal(batch, self.num_heads, self.seqlen_q)
            values["dlse"] = rows.reshape(rows.shape[4 - self.ndim :]).astype(softmax_dtype)
        for name, starts in (("cu_seqlens_q", self.cu_seqlens_q), ("cu_seqlens_k", self.cu_seqlens_k)):
            if starts is not None:
                values[name] = np.array(starts, np.int32)
        return values

    def _pages(self, k: Array, v: Array) -> dict[str, Array]:
        """Pools of pages with the keys and values, and the table that leads there."""
        lengths, size = np.asarray(self.kv_lengths, np.int64).reshape(-1), self.page_size
        rng = np.random.default_rng(self.seed + 1)
        used = np.arange(self.seqlen_k // size) < -(-lengths // size)[:, None]
        table = np.full(used.shape, -1, np.int32)
        shares = self.batch > 1 and lengths.min() >= size
        if shares:
            used[1:, 0] = False
        pages = rng.permutation(np.count_nonzero(used) + 3)  # the last three are nobody's
        table[used] = pages[:-3]
        if shares:
            table[1:, 0] = table[0, 0]
        pools = {"block_table": table}
        for name, x in (("k", k), ("v", v)):
            pools[name] = np.full((len(pages), self.num_heads_kv, size, x.shape[3]), np.nan, x.dtype)
            for b, page in np.argwhere(used):
                pools[name][table[b, page]] = x[b, :, page * size : (page + 1) * size]
        return pools


def gather_pages(arrays: Mapping[str, Any], layout: str = "bhsd") -> dict[str, Any]:
    """The NumPy arrays of a case with pages, k and v as contiguous arrays; NaN where the table has no page."""
    table, gathered = arrays["block_table"], {name: x for name, x in arrays.items() if name != "block_table"}
    for name in ("k", "v"):
        pages = view_4d(arrays[name], layout)[table]  # batch, page, heads, keys, dim
        pages[table < 0] = np.nan
        batch, _, heads, _, dim = pages.shape
        rows = pages.swapaxes(1, 2).reshape(batch, heads, -1, dim)
        gathered[name] = np.ascontiguousarray(rows.swapaxes(1, 2) if layout == "bshd" else rows)
    return gathered


def optional(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arrays of a case, the ones that are keyword arguments: those of `NAMES`."""
    return {name: arrays[name] for name in NAMES if name in arrays}


def optional_backward(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arrays of a case, the keyword arguments of the backward pass: those of `optional`, and dlse."""
    return {name: arrays[name] for name in (*NAMES, "dlse") if name in arrays}


def split_keys(
    case: Case, parts: Sequence[Array], convert: Callable[[Array], Any] = np.asarray
) -> list[dict[str, Any]]:
    """The inputs of attention over parts of the keys, which `cuflash.merge` puts together to the attention of a case.

    Parameters
    ----------
    case : Case
        4-D, of layout "bhsd", without kv_lengths and alibi_slopes.
    parts : sequence of numpy.ndarray
        The keys of each part, in any order; each key is in one of them.
    convert : callable
        Makes another library's array of a NumPy array.

    Returns
    -------
    list of dict
        q, k, v, mask and bias of each part by name. What `causal` and `window` hide, the masks do.
    """
    arrays, keys = case.arrays(), np.arange(case.seqlen_k)
    ranges = np.array([case.problem.key_range(i) for i in range(case.seqlen_q)]).reshape(-1, 2, 1)
    visible = (keys >= ranges[:, 0]) & (keys < ranges[:, 1]) & arrays.get("mask", True)

    def part_of(part: Array) -> dict[str, Any]:
        split = {"k": arrays["k"][:, :, part], "v": arrays["v"][:, :, part], "mask": visible[..., part]}
        if "bias" in arrays:
            split["bias"] = arrays["bias"] if arrays["bias"].shape[-1] == 1 else arrays["bias"][..., part]
        return {name: convert(np.ascontiguousarray(x)) for name, x in {"q": arrays["q"], **split}.items()}

    return [part_of(part) for part in parts]


def _spread_lengths(batch: int, seqlen_k: int) -> tuple[int, ...]:
    return tuple(seqlen_k * (b + 1) // batch for b in range(batch))


def lay_out(values: Array, strides: str, convert: Callable[[Array], Any]) -> Any:
    """The values as a view with the strides asked for, made of a contiguous buffer."""
    if strides == "contiguous" or values.ndim == 0:
        return convert(values.copy())
    if strides == "padded":
        filler = True if values.dtype == bool else 0 if values.dtype.kind == "i" else np.nan
        buffer = np.full([n + 3 if n > 1 else n for n in values.shape], filler, values.dtype)
        inside = tuple(slice(1, n + 1) if n > 1 else slice(None) for n in values.shape)
        buffer[inside] = values
        return convert(buffer)[inside]
    if strides == "transposed":
        axes = tuple(reversed(range(values.ndim)))
        buffer = convert(np.ascontiguousarray(values.transpose(axes)))
        return buffer.permute(axes) if hasattr(buffer, "permute") else buffer.transpose(axes)
    if strides == "flipped":
        backwards = (slice(None, None, -1),) * values.ndim
        return convert(np.ascontiguousarray(values[backwards]))[backwards]
    raise ValueError(f"strides: got {strides!r}, expected one of {STRIDES}")


def through_dlpack(from_dlpack: Callable[[Any], Any]) -> Callable[[Array], Any]:
    """The `convert` of another library by its ``from_dlpack``; bfloat16, which NumPy does not lend, included."""
    return lambda array: interop.Borrowed("numpy", {}, from_dlpack).give_back(array, None)


def to_numpy(array: Any) -> Array:
    """A NumPy array of any library's array, from host or device memory; bfloat16 stays bfloat16."""
    array = array.detach() if hasattr(array, "detach") else array
    borrowed = interop.borrow({"array": array}, required=["array"])
    view = borrowed.arrays["array"]
    return np.asarray(view.get() if borrowed.kind == "cupy" else view)


# ---- strategies ------------------------------------------------------------------------------------------------------

SEQLENS = (1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 113, 127, 128, 129, 203, 255, 256, 257, 509)
HEAD_DIMS = (1, 2, 3, 7, 8, 13, 16, 17, 24, 31, 32, 40, 48, 64, 72, 80, 96, 113, 128, 160, 192, 255, 256)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = DTYPES,
    layouts: Sequence[str] = LAYOUTS,
    ndims: Sequence[int] = (2, 3, 4),
    strides: Sequence[str] = STRIDES,
    features: Collection[str] = FEATURES,
    max_seqlen: int = 257,
    max_head_dim: int = 256,
    max_scores: int = 2**16,
    score_spreads: Sequence[float] = (1.0, 1.0, 8.0, 30.0),
    min_seqlen: int = 1,
) -> Case:
    """Strategy for cases: lengths of 1, primes, 113 x 203 and around the edges of tiles, every option, every layout.

    Parameters
    ----------
    dtypes, layouts, ndims, strides, score_spreads : sequence
        What to draw from, simplest first.
    features : collection of str
        Which of `FEATURES` and `MORE_FEATURES` may be present; each is absent about half of the time. And "dropout",
        for implementations that drop what `cuflash.dropout_mask` says, "pages" for those that take a block table, and
        "packed" for those of packed sequences.
    max_seqlen, max_head_dim : int
        Largest lengths, in elements.
    max_scores : int
        Largest number of scores, over all heads: bounds the time that a case takes.
    min_seqlen : int
        Shortest sequence; 0 makes empty ones too.
    """

    def has(feature: str) -> bool:
        return feature in features and draw(st.booleans())

    def pick(values: Collection[Any]) -> Any:
        return draw(st.sampled_from(list(values)))

    is_packed = "packed" in features and 3 in ndims and draw(st.booleans())
    ndim = 3 if is_packed else pick(ndims)
    num_heads_kv = pick([1, 2, 3]) if ndim > 2 else 1
    num_heads = num_heads_kv * (pick([2, 3, 4]) if ndim > 2 and has("gqa") else 1)
    batch = pick([1, 2, 3]) if ndim == 4 else pick([1, 2, 3, 5, 0]) if is_packed else 1
    lengths = [n for n in ((0,) if min_seqlen == 0 else ()) + SEQLENS if min_seqlen <= n <= max_seqlen]
    longest = max_scores // (num_heads * (batch if ndim == 4 else 1))
    if longest >= 113 * 203 and max_seqlen >= 203 and draw(st.booleans()):
        seqlen_q, seqlen_k = pick([(113, 203), (203, 113)])
    else:
        seqlen_q = pick([n for n in lengths if n <= longest])
        seqlen_k = pick([n for n in lengths if n * max(seqlen_q, 1) <= longest])
    page_size = pick([16, 32, 64]) if ndim == 4 and has("pages") else 0
    if page_size:
        seqlen_k = -(-seqlen_k // page_size) * page_size
    head_dims = [n for n in HEAD_DIMS if n <= max_head_dim]
    scores_shape = (batch, num_heads, seqlen_q, seqlen_k)

    def broadcast_shape() -> tuple[int, ...]:
        shape = [pick([1, n]) for n in scores_shape]
        while len(shape) > 1 and shape[0] == 1 and draw(st.booleans()):
            del shape[0]
        return tuple(shape)

    def block_masks() -> dict[str, Any]:
        return {
            "block_mask": pick([(), (num_heads,), (1, num_heads), (batch, 1), (batch, num_heads)]),
            "block_size": (pick([16, 48, 64, 128, 256]), pick([16, 32, 64, 80, 128])),
            "blocks_kept": pick([0.5, 0.2, 0.8, 1.0, 0.0]),
        }

    def starts(seqlen: int) -> tuple[int, ...] | None:
        cuts = sorted(draw(st.lists(st.integers(0, seqlen), min_size=batch, max_size=batch)))
        return (0, *cuts[:-1], draw(st.sampled_from((seqlen, cuts[-1])))) if batch else (0,)

    side = st.none() | st.integers(0, max(seqlen_k, 1)) | st.integers(0, 3)
    return Case(
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=pick(head_dims),
        head_dim_v=pick(head_dims) if has("head_dim_v") else 0,
        dtype=pick(dtypes),
        ndim=ndim,
        layout=pick(layouts),
        causal=pick([True, "top_left"]) if has("causal") else False,
        scale=pick([0.0, -0.25, 0.125, 1.0]) if has("scale") else None,
        window=draw(st.tuples(side, side)) if has("window") else None,
        softcap=pick([0.5, 5.0, 50.0]) if has("softcap") else None,
        bias=broadcast_shape() if not is_packed and has("bias") else None,
        bias_dtype=pick(["softmax", "input"]),
        bias_holes=draw(st.booleans()),
        mask=broadcast_shape() if not is_packed and has("mask") else None,
        kv_lengths=tuple(draw(st.integers(0, seqlen_k)) for _ in range(batch))
        if page_size or (not is_packed and has("kv_lengths"))
        else None,
        kv_lengths_dtype=pick(["int32", "int64"]),
        page_size=page_size,
        alibi_slopes=pick([(num_heads,), (batch, num_heads)]) if has("alibi_slopes") else None,
        sinks=has("sinks"),
        cu_seqlens_q=starts(seqlen_q) if is_packed else None,
        cu_seqlens_k=starts(seqlen_k) if is_packed else None,
        dlse=has("dlse"),
        dropout=pick([0.1, 0.5, 0.9]) if has("dropout") else 0.0,
        **(block_masks() if not is_packed and has("block_mask") else {}),
        strides=pick(strides),
        score_spread=pick(score_spreads),
        seed=draw(st.integers(0, 2**16)),
    )


# ---- the oracle rule -------------------------------------------------------------------------------------------------


SMALLEST_WEIGHT = {"float32": 2.0**-100, "float64": 2.0**-960}  # by the dtype of the softmax


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What one result should be, and how far from it an implementation may be.

    ``strict_tolerance = factor * plain_error + ulp * scale`` and
    ``tolerance = strict_tolerance + softmax_ulp * noise * scale``, where

    factor
        1 for float32, which has no excuse to be worse than the plain formula; 2 for the others.
    plain_error
        Largest error of the plain formula computed in the dtype of the inputs (`cuflash.reference` in that dtype).
    ulp * scale
        One unit in the last place of the result's scale. Scale is the largest absolute value of the result, or of the
        root of the sum of squares of the terms that it is a sum of: what cancellation leaves of a gradient is no scale.
        For lse it is at least 1. The unit is that of the dtype of the result; of gradients, which are made of out as it
        was rounded, that of the inputs; what is subnormal there counts as the smallest normal number, since its unit is
        that of this number. A weight counts as at least ``SMALLEST_WEIGHT`` over a unit in the last place:
        implementations may take smaller weights for zero, to stay clear of subnormal numbers.
    softmax_ulp * noise
        What the order of summation, not quality, decides about a weight ``exp(S - lse)``: one unit in the last place of
        the exponential, one of lse, and one of the terms of the scores, ``scale * abs(q) @ abs(k)`` (in units of a
        softcap below 1). Largest errors are a matter of luck, more so where results are few, and this keeps the rule
        from being one: the strict tolerance holds on the average of several seeds, this one always. The difference is
        next to nothing for 16-bit types, whose softmax runs in float32.
    """

    name: str
    expected: Array  # float64, or longdouble for float64
    zero: Array  # where the result is exactly zero: rows that see no key, and keys that no row sees
    plain_error: float
    scale: float
    strict_tolerance: float
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How far one result was from the oracle, in the words of `Yardstick`."""

    name: str
    error: float
    plain_error: float
    strict_tolerance: float
    tolerance: float
    failure: str | None = None

    @property
    def strict_ratio(self) -> float:
        """Error over strict tolerance, whose average over several seeds should not be above 1."""
        return self.error / self.strict_tolerance if self.error else 0.0

    def __str__(self) -> str:
        numbers = f"max error {self.error:.3g}, plain formula {self.plain_error:.3g}, allowed {self.tolerance:.3g}"
        return f"{self.name:<4} {numbers}" + (f"  FAILED: {self.failure}" if self.failure else "")


class Report(tuple[Measurement, ...]):
    """Measurements of the results of one case."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    @property
    def passed(self) -> bool:
        return not any(m.failure for m in self)


def measure(name: str, got: Any, yardstick: Yardstick) -> Measurement:
    """Compare one result, of any library, with what it should be.

    NaN and infinities must be where the oracle has them, and zeros where `Yardstick.zero` says.
    """
    values = to_numpy(got)
    expected = yardstick.expected
    failure = None
    error = math.nan
    if values.shape != expected.shape:
        failure = f"got shape {values.shape}, expected {expected.shape}"
    else:
        values = values.astype(expected.dtype)
        ordinary = np.isfinite(expected)
        same = np.array_equal(values[~ordinary], expected[~ordinary], equal_nan=True)
        differences = np.abs(values[ordinary] - expected[ordinary])
        error = float(differences.max(initial=0))
        if not same:
            failure = "NaN or infinities are not where they should be"
        elif not error <= yardstick.tolerance:  # NaN too
            at = tuple(int(i) for i in np.argwhere(ordinary)[np.argmax(differences)])
            failure = f"at {at} got {values[at]:.9g}, expected {expected[at]:.9g}"
        elif np.any(values[yardstick.zero]):
            failure = "a row that sees no key, or a key that no row sees, is not exactly zero"
    return Measurement(
        name=name,
        error=error,
        plain_error=yardstick.plain_error,
        strict_tolerance=yardstick.strict_tolerance,
        tolerance=yardstick.tolerance,
        failure=failure,
    )


def yardsticks(problem: Problem, arrays: Mapping[str, Array], **random: Any) -> dict[str, Yardstick]:
    """The yardsticks of out and lse, and of all gradients if `dout` is among the NumPy `arrays`.

    With dropout, `random` is the `seed` and the `offset`.
    """
    expected = _compute(problem, arrays, np.longdouble if problem.dtype == "float64" else np.float64, random)
    plain = _compute(problem, arrays, arrays["q"].dtype, random)
    with np.errstate(invalid="ignore"):  # -inf in both
        plain_errors = {name: _max_finite(plain[name].astype(x.dtype) - x) for name, x in expected.items()}
    scales, zeros, noise = _scales(problem, arrays, expected, random)
    factor = 1 if problem.dtype == "float32" else 2
    softmax_ulp = _ulp(problem.softmax_dtype)

    def yardstick(name: str) -> Yardstick:
        ulp = softmax_ulp if name == "lse" else _ulp(arrays["q"].dtype)
        strict = factor * plain_errors[name] + ulp * scales[name]
        return Yardstick(
            name=name,
            expected=expected[name],
            zero=zeros[name],
            plain_error=plain_errors[name],
            scale=scales[name],
            strict_tolerance=strict,
            tolerance=strict + softmax_ulp * noise * (1 if name == "lse" else scales[name]),
        )

    return {name: yardstick(name) for name in expected}


def _compute(problem: Problem, arrays: Mapping[str, Array], dtype: Any, random: Mapping[str, Any]) -> dict[str, Array]:
    """Results of the plain formula by name."""
    inputs = (arrays["q"], arrays["k"], arrays["v"])
    keywords = {**optional(arrays), **random}
    out, lse = reference.forward(problem, *inputs, dtype=dtype, **keywords)
    results = {"out": out, "lse": lse}
    if "dout" in arrays:
        keywords |= optional_backward(arrays)
        need = gradients_of(problem)
        gradients = reference.backward(problem, arrays["dout"], *inputs, need=need, dtype=dtype, **keywords)
        results |= zip(need, gradients, strict=True)
    return results


def gradients_of(problem: Problem) -> tuple[str, ...]:
    """All gradients that a problem has, names of `terms.GRADIENTS`."""
    return tuple(name for name in GRADIENTS if name not in OF_OPTIONS or getattr(problem, OF_OPTIONS[name]) is not None)


def _scales(
    problem: Problem, arrays: Mapping[str, Array], expected: Mapping[str, Array], random: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, Array], float]:
    """Scale of every result, where it is exactly zero, and the noise of the weights in units in the last place."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    bias, alibi_slopes = arrays.get("bias"), arrays.get("alibi_slopes")
    dout = view_4d(arrays["dout"], problem.layout) if "dout" in arrays else None
    dlse = view_rows(arrays["dlse"] if "dlse" in arrays else np.zeros(problem.lse_shape))
    out = view_4d(expected["out"].astype(np.float64), problem.layout)
    O2 = np.where(out != 0, np.maximum(np.abs(out), float(ml_dtypes.finfo(q.dtype).smallest_normal)), 0) ** 2
    scales = {name: _max_finite(x) for name, x in expected.items()}
    sees_something = np.zeros(out.shape[:3], bool)
    is_seen = np.zeros((problem.array_batch, problem.num_heads_kv, problem.seqlen_k), bool)
    dsinks2, dscale2, dsoftcap2 = np.zeros(problem.num_heads), 0.0, 0.0
    scores_shape = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    dbias2 = reference.BroadcastSum(bias, scores_shape, np.dtype(np.float64))
    dslopes2 = reference.BroadcastSum(alibi_slopes, scores_shape[:2], np.dtype(np.float64))
    has_part = reference.BroadcastSum(bias, scores_shape, np.dtype(np.float64))
    scores = 0.0
    smallest = SMALLEST_WEIGHT[problem.softmax_dtype] / _ulp(problem.softmax_dtype)

    def grow(name: str, squares: Array) -> None:
        scales[name] = max(scales[name], math.sqrt(_max_finite(squares)))

    for head in reference.each_head(problem, q, k, v, np.float64, **random, **optional(arrays)):
        scores = max(scores, abs(problem.scale) * _max_finite(np.abs(head.Q) @ np.abs(head.K).T))
        visible = head.P != 0
        P2 = np.where(visible, np.maximum(head.P, smallest), 0) ** 2
        P_sink2 = np.where(head.P_sink != 0, np.maximum(head.P_sink, smallest), 0) ** 2
        sees_something[head.index] = visible.any(axis=1)
        is_seen[head.index_kv] |= visible.any(axis=0)
        with np.errstate(all="ignore"):
            V2, Z2 = head.V**2, head.Z**2
            grow("out", (P2 * Z2) @ V2)
            if dout is not None:
                dO2 = dout[head.index].astype(np.float64) ** 2
                D2 = (dO2 * O2[head.index]).sum(axis=-1, keepdims=True)
                dL2 = dlse[head.index].astype(np.float64)[:, None] ** 2
                dS_bias2 = P2 * ((dO2 @ V2.T) * Z2 + D2 + dL2)
                dS2 = (problem.scale * head.cap_slope) ** 2 * dS_bias2
                grow("dq", dS2 @ head.K**2)
                grow("dk", dS2.T @ head.Q**2)
                grow("dv", (P2 * Z2).T @ dO2)
                dsinks2[head.index[1]] += (P_sink2 * (D2 + dL2)).sum()
                dbias2.add(head.index_scores, dS_bias2)
                has_part.add(head.index_scores, visible.astype(np.float64))
                dslopes2.add(head.index_scores, (dS_bias2 * head.distance**2).sum())
                dscale2 += (dS_bias2 * (head.cap_slope * head.QK) ** 2).sum()
                dsoftcap2 += (dS_bias2 * head.softcap_slope**2).sum()
    sums = {"dbias": dbias2.value, "dalibi_slopes": dslopes2.value, "dscale": dscale2, "dsoftcap": dsoftcap2}
    for name, squares in {**sums, "dsinks": dsinks2}.items():
        if name in expected:
            grow(name, np.asarray(squares))
    noise = 1 + scales["lse"] + scores / min(1.0, problem.softcap or 1.0)
    scales["lse"] = max(scales["lse"], 1.0)
    zeros = {name: np.zeros(x.shape, bool) for name, x in expected.items()}
    if "dbias" in expected:
        zeros["dbias"] = has_part.value == 0
    for name, nonzero in (("out", sees_something), ("dq", sees_something), ("dk", is_seen), ("dv", is_seen)):
        if name in expected:
            shape = (*nonzero.shape, view_4d(expected[name], problem.layout).shape[-1])
            zeros[name] = reference.as_caller(problem, np.broadcast_to(~nonzero[..., None], shape))
    return scales, zeros, noise


def _ulp(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _max_finite(x: Array) -> float:
    x = np.abs(x)
    return float(np.max(x, where=np.isfinite(x), initial=0))


@lru_cache(maxsize=8)
def _yardsticks_of(case: Case) -> dict[str, Yardstick]:
    return yardsticks(case.problem, case.arrays(), **case.random)


def _always_given(arrays: Mapping[str, Any]) -> tuple[str, ...]:
    return (*DEFAULT_NEED, "dsinks") if "sinks" in arrays else DEFAULT_NEED


def _judge(case: Case, results: Mapping[str, Any]) -> Report:
    judges = _yardsticks_of(case)
    report = Report(measure(name, x, judges[name]) for name, x in results.items())
    if not report.passed:
        raise AssertionError(f"outside the oracle rule\n{report}\n{case}")
    return report


def assert_forward(case: Case, out: Any, lse: Any = None) -> Report:
    """Judge the output of an implementation, of any array library, and its lse if it has one.

    Returns the measurements, or raises AssertionError that shows them.
    """
    return _judge(case, {"out": out} if lse is None else {"out": out, "lse": lse})


def assert_backward(
    case: Case,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    *,
    dbias: Any = None,
    dalibi_slopes: Any = None,
    dscale: Any = None,
    dsoftcap: Any = None,
) -> Report:
    """Judge gradients of ``sum(dout * out)``, those given, as `assert_forward` judges the output; dlse counts."""
    gradients = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dalibi_slopes": dalibi_slopes, "dscale": dscale}
    gradients |= {"dsoftcap": dsoftcap, "dsinks": dsinks}
    return _judge(case, {name: x for name, x in gradients.items() if x is not None})


def check(
    attention: Callable[..., Any],
    case: Case | Problem,
    *,
    gradients: Callable[..., Any] | None = None,
    convert: Callable[[Array], Any] = np.asarray,
) -> Report:
    """Run somebody's attention on a case and judge what it returns.

    Parameters
    ----------
    attention : callable
        Called as ``attention(q, k, v, **options)``, where options are the keyword arguments of `cuflash.attention` that
        the case needs, by those names: causal, scale, window, softcap, layout, block_size, and those of the terms. With
        dropout, also that, seed and offset, which drop what `cuflash.dropout_mask` says. An implementation without
        options is checked on cases without `features`. Returns out, or a tuple (out, lse), as arrays of any library
        that speaks DLPack.
    case : Case or Problem
        A problem stands for a case of its sizes and options on random arrays.
    gradients : callable, optional
        Called as ``gradients(dout, q, k, v, **options)``, with dlse among the options if the case has it, unless it
        has pages; returns (dq, dk, dv), and dsinks as a fourth if the case has sinks.
    convert : callable
        Makes the arrays that `attention` takes of NumPy arrays: ``cupy.asarray``, or
        ``through_dlpack(torch.from_dlpack)``.

    Returns
    -------
    Report
        A tuple of `Measurement`; ``str()`` is a line for each.

    Raises
    ------
    AssertionError
        A result is outside the oracle rule, has not the shape or dtype that it should have, or an input was changed.

    Examples
    --------
    >>> def plain(q, k, v):
    ...     weights = np.exp(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)
    ...     return weights / weights.sum(axis=-1, keepdims=True) @ v
    >>> check(plain, Case(seqlen_q=113, seqlen_k=203, head_dim=64)).passed
    True
    """
    case = Case.from_problem(case) if isinstance(case, Problem) else case
    arrays = case.arrays(convert)
    inputs = [arrays[name] for name in ("q", "k", "v")]
    keywords = case.keywords | optional(arrays) | case.random
    result = attention(*inputs, **keywords)
    out, lse = result if isinstance(result, tuple) else (result, None)
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    if gradients is not None and "dout" in arrays:
        keywords |= optional_backward(arrays)
        results |= zip(_always_given(arrays), gradients(arrays["dout"], *inputs, **keywords), strict=True)
    for name, x in results.items():
        dtype = case.problem.softmax_dtype if name in ("lse", "dsinks") else case.dtype
        if to_numpy(x).dtype != numpy_dtype(dtype):
            raise AssertionError(f"{name} has dtype {to_numpy(x).dtype}, expected {dtype}\n{case}")
    for name, before in case.arrays().items():
        if not np.array_equal(to_numpy(arrays[name]).astype(before.dtype), before, equal_nan=before.dtype.kind != "b"):
            raise AssertionError(f"{name} was written to\n{case}")
    return _judge(case, results)
