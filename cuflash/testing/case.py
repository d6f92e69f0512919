"""Cases: attention problems as plain frozen data that makes its arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import DTYPES, numpy_dtype, user_shape, view_4d
from cuflash.arrays.cached import cached_property
from cuflash.arrays.fp8 import LARGEST
from cuflash.spec.inputs import CAPS, FP8_SCALES, NAMES, Numbers
from cuflash.spec.options import Options
from cuflash.spec.outputs import OVER_ROWS, ROW_REDUCTION_ROWS
from cuflash.spec.problem import Problem, make_problem
from cuflash.testing import reference
from cuflash.testing.arrays import lay_out
from cuflash.testing.batch_axes import Spread

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Case(Numbers):
    """One attention problem to test, arrays included: the same case makes the same arrays everywhere.

    Parameters
    ----------
    seqlen_q, seqlen_k, head_dim : int
        Sizes of the problem.
    batch, num_heads, num_heads_kv, head_dim_v : int
        Default to 1, 1, `num_heads` and `head_dim` (0 stands for these two).
    has_values : bool
        Whether there are values; without them `head_dim_v` is 0, and v and dout have no columns.
    dtype : str
        "float16", "bfloat16", "float32" (default) or "float64".
    ndim : int
        Axes of q, k and v, 2 to 4 (default); 3 needs ``batch == 1``, 2 needs one head as well.
    axes : tuple of int, optional
        Lengths of the batch axes of the scores, any number of them, in place of one for the batch: `batch` is set to
        their product, `ndim` to their number and 3.
    batch_axes : tuple of (str, tuple of int)
        The batch axes of q, k, v, kv_lengths or sinks, by name, where these are not `axes`: some of them are 1, or
        missing at the front. Those of bias, mask, block_mask and alibi_slopes are in their shapes. There are as many
        `kv_lengths` as their axes have indices.
    scale, softcap, layout, causal, window :
        As `cuflash.FlashAttention` takes them.
    bias : tuple of int, optional
        Shape of the additive bias, broadcast to (batch, num_heads, seqlen_q, seqlen_k).
    bias_dtype : {"softmax", "input"}
        Its dtype: float32 (float64 for float64), or that of q.
    bias_holes : bool
        Some entries of the bias are -inf.
    bias_mask : float
        A finite number in place of some rows of the bias, and of some entries of others, as models mask by: -1e9, or
        the lowest number. Cut to the range of the dtype of the bias. 0 (default): none.
    mask : tuple of int, optional
        Shape of the boolean mask, broadcast likewise. Some of its rows are all False; of more than one block of 64 x 64
        pairs, some are all True or all False.
    kv_lengths : tuple of int, optional
        Number of keys of each batch entry; all of them with ``causal="lengths"``. What lies after them is NaN.
    kv_lengths_dtype : {"int32", "int64"}
        Their dtype.
    page_size : int
        k and v are pools of pages of so many keys, 4-D, and there is a block table. `seqlen_k` is a multiple of it;
        `kv_lengths` are those of all keys unless given. Pages are shuffled; some are nobody's, and full of NaN; the
        table has -1 after the lengths. All batch entries have one page in common where it is whole in each: that of
        their first keys. Such a case has no gradients. 0 (default): no pages.
    kv_dtype : str
        "float8_e4m3fn" or "float8_e5m2", which k and v then have: such a case has no gradients. Empty (default): that
        of q.
    q_float8 : bool
        q has it, too; `dtype` is that of out then, bfloat16.
    q_scale, k_scale, v_scale : {"tensor", "head", "block", "token"}, optional
        What has a number of its own by which q, k and v are multiplied; where they are float8, None (default) is a 1
        for all. After the lengths these are NaN.
    scale_block : int
        Keys, or queries, of such a block.
    alibi_slopes : tuple of int, optional
        Shape of the slopes: (num_heads,) or (batch, num_heads).
    sinks : bool
        Every head of q has a sink.
    cu_seqlens_q, cu_seqlens_k : tuple of int, optional
        Where packed sequences start, and where the last one ends: `batch` is set to their number, `ndim` to 3, and
        seqlen_q and seqlen_k are those of all sequences. What is of none of them in q, k, v and dout is NaN.
    dlse : bool
        There is a gradient with respect to lse.
    row_reductions : tuple of str
        Row reductions that are wanted of the forward pass, such as "max": there are gradients with respect to those
        that have one, too.
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
    v_in_k : bool
        v is the first columns of k, in the same memory.
    score_spread : float
        Standard deviation of ``scale * q @ k.T``; large values make weights of zero and one.
    score_mean : float
        What their last column, in which all rows of q and of k are alike, adds to all of these products. Last, because
        sums of products that begin with the largest one are rounded at its size in every step.
    distinct_keys : int
        So many keys follow one another again and again: many scores are equal. 0 (default): all keys differ.
    hidden_keys : {"", "nan", "inf", "-inf"}
        With a mask, and without `axes` and pages: what is in the keys that it hides from all queries. Such a case has
        no gradients, since 0 times that is NaN in those of q.
    factors : tuple of (str, float)
        By what q, k, v or dout, by name, are multiplied, up to the largest number of their dtype.
    seed : int
        Of the random numbers.

    Raises
    ------
    TypeError, ValueError
        Fields that do not go together, when `problem`, `options` or the arrays are asked for.

    See Also
    --------
    cases : Draws cases.
    check : Runs an implementation on one.
    """

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    batch: int = 1
    num_heads: int = 1
    num_heads_kv: int = 0
    head_dim_v: int = 0
    has_values: bool = True
    dtype: str = "float32"
    ndim: int = 4
    axes: tuple[int, ...] | None = None
    batch_axes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    layout: str = "bhsd"
    causal: bool | Literal["top_left", "lengths"] = False
    window: tuple[int | None, int | None] | None = None
    bias: tuple[int, ...] | None = None
    bias_dtype: str = "softmax"
    bias_holes: bool = False
    bias_mask: float = 0.0
    mask: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    kv_lengths_dtype: str = "int32"
    page_size: int = 0
    kv_dtype: str = ""
    q_float8: bool = False
    q_scale: str | None = None
    k_scale: str | None = None
    v_scale: str | None = None
    scale_block: int = 16
    alibi_slopes: tuple[int, ...] | None = None
    sinks: bool = False
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None
    dlse: bool = False
    row_reductions: tuple[str, ...] = ()
    dropout: float = 0.0
    block_mask: tuple[int, ...] | None = None
    block_size: tuple[int, int] = (128, 128)
    blocks_kept: float = 0.5
    strides: str = "contiguous"
    v_in_k: bool = False
    score_spread: float = 1.0
    score_mean: float = 0.0
    distinct_keys: int = 0
    hidden_keys: str = ""
    factors: tuple[tuple[str, float], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_heads_kv", self.num_heads_kv or self.num_heads)
        object.__setattr__(self, "head_dim_v", (self.head_dim_v or self.head_dim) if self.has_values else 0)
        if self.axes is not None:
            object.__setattr__(self, "batch", math.prod(self.axes))
            object.__setattr__(self, "ndim", len(self.axes) + 3)
        if self.page_size and self.seqlen_k % self.page_size:
            raise ValueError(f"page_size: got {self.page_size}, expected a divisor of seqlen_k = {self.seqlen_k}")
        follows_lengths = self.causal == "lengths" and self.cu_seqlens_q is None
        if (self.page_size or follows_lengths) and self.kv_lengths is None:
            object.__setattr__(self, "kv_lengths", (self.seqlen_k,) * self.batch)
        if self.cu_seqlens_q is not None:
            object.__setattr__(self, "batch", len(self.cu_seqlens_q) - 1)
            object.__setattr__(self, "ndim", 3)

    @property
    def spread(self) -> Spread | None:
        """The arrays with one axis for the batch in place of all batch axes; None of a case without `axes`."""
        return None if self.axes is None else Spread(self.axes, self.arrays())

    @classmethod
    def from_problem(cls, problem: Problem, *, seed: int = 0) -> Case:
        """A case of the same sizes, dtype and options; arrays are contiguous and random.

        Parameters
        ----------
        problem : cuflash.spec.problem.Problem
                Its sizes, dtype, options and which axes broadcast are taken.
        seed : int, default 0
            Of the random numbers.

        Returns
        -------
        Case
            With arrays of its own.

        See Also
        --------
        check : Takes a problem, too.
        """
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
            has_values=problem.head_dim_v > 0,
            dtype=problem.dtype,
            ndim=problem.ndim,
            bias=distinct("bias", scores_shape),
            bias_dtype="softmax" if problem.bias and problem.bias.dtype == problem.softmax_dtype else "input",
            mask=distinct("mask", scores_shape),
            kv_lengths=None if problem.kv_lengths is None else _spread_lengths(problem.batch, problem.seqlen_k),
            kv_lengths_dtype="int32" if problem.kv_lengths is None else problem.kv_lengths.dtype,
            page_size=problem.page_size,
            kv_dtype=problem.k.dtype if problem.has_float8 else "",
            q_float8=problem.multiplies_float8,
            q_scale=_granularity(problem, "q_scale"),
            k_scale=_granularity(problem, "k_scale"),
            v_scale=_granularity(problem, "v_scale"),
            scale_block=max([2, *(problem.scale_block(x) for x in FP8_SCALES if _granularity(problem, x) == "block")]),
            alibi_slopes=None if slopes is None else slopes if slopes == scores_shape[:2] else (problem.num_heads,),
            sinks=problem.sinks is not None,
            cu_seqlens_q=(0, *_spread_lengths(problem.batch, problem.seqlen_q)) if problem.is_packed else None,
            cu_seqlens_k=(0, *_spread_lengths(problem.batch, problem.seqlen_k)) if problem.is_packed else None,
            block_mask=None if blocks is None else blocks[:2],
            seed=seed,
            **{name: getattr(options, name) for name in OPTIONS},
        )

    @property
    def options(self) -> Options:
        """The static options, as `make_problem` takes them."""
        return Options(**{name: getattr(self, name) for name in OPTIONS})

    @property
    def keywords(self) -> dict[str, Any]:
        """The static options that differ from their defaults, as keyword arguments of `cuflash.FlashAttention`."""
        defaults = Options()
        return {name: getattr(self, name) for name in OPTIONS if getattr(self, name) != getattr(defaults, name)}

    @property
    def random(self) -> dict[str, Any]:
        """With dropout its seed and offset, as keyword arguments of `cuflash.FlashAttention.forward`; else nothing."""
        if not self.dropout:
            return {}
        return {"seed": (self.seed + 1) * 0x9E3779B97F4A7C15 % 2**64, "offset": self.seed * 0x9E3779B9 % 2**32}

    @cached_property
    def problem(self) -> Problem:
        """The validated `Problem`, with the strides of the arrays; with `axes` that of `spread`."""
        arrays, options, spread = self.arrays(), self.options, self.spread
        if spread is not None:
            arrays, options = spread.arrays, replace(options, wide=spread.wide)
        return make_problem(options, *qkv(arrays), **optional(arrays))

    def arrays(self, convert: Callable[[Array], Any] = np.asarray) -> dict[str, Any]:
        """Inputs of the case by name: q, k, v, those of `NAMES` that it has, and gradients of results.

        Parameters
        ----------
        convert : callable
            Makes another library's array of a C-contiguous NumPy array: ``cupy.asarray``, `through_dlpack`. It is given
            whole buffers; the views that `strides` asks for are made of its results, by indexing and transposing.

        Returns
        -------
        dict of str to array
            Of the library that `convert` makes arrays of.

        Raises
        ------
        ValueError
            An unknown `strides`.

        See Also
        --------
        check
        """
        arrays = {name: lay_out(x, self.strides, convert) for name, x in self._values().items()}
        if self.v_in_k:
            arrays["v"] = arrays["k"][..., : self.head_dim_v]
        return arrays

    def _values(self) -> dict[str, Array]:
        """All arrays, C-contiguous."""
        rng = np.random.default_rng(self.seed)
        values = self._qkv_and_dout(rng)
        values |= self._optional_inputs(rng)
        if self.hidden_keys and self.mask is not None and self.axes is None and not self.page_size:
            self._fill_hidden_keys(values)
        return values | self._gradients_of_rows(rng) | self._cu_seqlens()

    def _normal(self, rng: np.random.Generator, *shape: int) -> Array:
        return rng.standard_normal(shape, np.float64 if self.dtype == "float64" else np.float32)

    def _entries(self, name: str) -> int:
        """The length of the first of an array's four axes."""
        if self._has_axes(name):
            return math.prod(self._batch_axes(name))
        return self.batch if self.cu_seqlens_q is None else 1

    def _qkv_and_dout(self, rng: np.random.Generator) -> dict[str, Array]:
        """q, k, v and dout, with the table of pages and the scales of float8, in the shapes and dtypes of the case."""
        scale = self.head_dim**-0.5 if self.scale is None else abs(self.scale)
        spread = self.score_spread / (scale * math.sqrt(self.head_dim)) if scale else 1.0
        sizes = {
            "q": (self.num_heads, self.seqlen_q, self.head_dim),
            "k": (self.num_heads_kv, self.seqlen_k, self.head_dim),
            "v": (self.num_heads_kv, self.seqlen_k, self.head_dim_v),
            "dout": (self.num_heads, self.seqlen_q, self.head_dim_v),
        }
        values = {name: self._normal(rng, self._entries(name), *shape) for name, shape in sizes.items()}
        for name in ("q", "k"):
            values[name] = values[name] * spread**0.5
        self._shape_scores(values, scale)
        self._hide_keys(values)
        if self.page_size and self.cu_seqlens_q is not None:
            values["block_table"] = np.zeros((self.batch, 1), np.int32)  # nothing takes both
        elif self.page_size:
            values |= self._pages(values["k"], values["v"])
        if self.kv_dtype:
            values |= self._float8(values)
        if self.kv_dtype or self.page_size:
            del values["dout"]
        dtype, factors = numpy_dtype(self.dtype), dict(self.factors)
        for name in values.keys() & sizes.keys():
            x = self._as_caller(name, values[name])
            is_float8 = self.kv_dtype and (name in ("k", "v") or (name == "q" and self.q_float8))
            if name in factors:
                x = _within(dtype, x.astype(np.float64) * factors[name])
            values[name] = x.astype(numpy_dtype(self.kv_dtype) if is_float8 else dtype)
        return values

    def _optional_inputs(self, rng: np.random.Generator) -> dict[str, Array]:
        """Bias, masks, lengths, slopes and sinks, as far as the case has them."""
        softmax_dtype, values = reference.compute_dtype(self.dtype), {}
        if self.bias is not None:
            bias_dtype = numpy_dtype(self.dtype) if self.bias_dtype == "input" else softmax_dtype
            values["bias"] = self._masked(self._normal(rng, *self.bias), bias_dtype, rng)
        if self.mask is not None:
            mask = rng.random(self.mask) < 0.7
            mask[rng.random(self.mask[:-1]) < 0.2] = False
            values["mask"] = _with_whole_blocks(mask, rng)
        if self.kv_lengths is not None:
            values["kv_lengths"] = np.array(self.kv_lengths, self.kv_lengths_dtype)
            if self.axes is not None:
                values["kv_lengths"] = values["kv_lengths"].reshape(self._batch_axes("kv_lengths"))
        if self.alibi_slopes is not None:
            values["alibi_slopes"] = np.abs(self._normal(rng, *self.alibi_slopes)).astype(softmax_dtype) / 4
        if self.sinks:
            shape = (*dict(self.batch_axes).get("sinks", ()), self.num_heads)
            values["sinks"] = (self.score_spread * self._normal(rng, *shape)).astype(softmax_dtype)
        if self.block_mask is not None:
            lengths = (self.seqlen_q, self.seqlen_k)
            num_blocks = [-(-n // size) for n, size in zip(lengths, self.block_size, strict=True)]
            values["block_mask"] = rng.random((*self.block_mask, *num_blocks)) < self.blocks_kept
        return values

    def _gradients_of_rows(self, rng: np.random.Generator) -> dict[str, Array]:
        """dlse, and the gradients with respect to the row reductions of the case."""
        names = ["dlse"] if self.dlse else []
        names += [row.gradient for row in ROW_REDUCTION_ROWS if row.upstream and row.name in self.row_reductions]
        rows = {name: self._normal(rng, self._entries(name), self.num_heads, self.seqlen_q, 1) for name in names}
        dtype = reference.compute_dtype(self.dtype)
        return {name: self._as_caller(name, x)[..., 0].astype(dtype) for name, x in rows.items()}

    def _cu_seqlens(self) -> dict[str, Array]:
        starts = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}
        return {name: np.array(x, np.int32) for name, x in starts.items() if x is not None}

    def _hide_keys(self, values: dict[str, Array]) -> None:
        """Fill rows that belong to nothing with NaN."""
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            for name, x in values.items():
                x[:, :, (self.cu_seqlens_k if name in "kv" else self.cu_seqlens_q)[-1] :] = np.nan
        if self.kv_lengths is not None and self.cu_seqlens_q is None:
            for name in ("k", "v"):
                for b, length in enumerate(self._lengths_of(name)):
                    values[name][b, :, length:] = np.nan

    def _shape_scores(self, values: dict[str, Array], scale: float) -> None:
        """Give the products of q and k the mean asked for, and let keys recur."""
        if self.score_mean and scale:
            column = math.sqrt(abs(self.score_mean) / scale)
            values["q"][..., -1:] = column
            values["k"][..., -1:] = math.copysign(column, self.score_mean * (self.scale or 1.0))
        if self.distinct_keys:
            values["k"] = values["k"][:, :, np.arange(self.seqlen_k) % self.distinct_keys]

    def _masked(self, bias: Array, dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
        """The bias in its dtype, with what masks rows and keys; NaN where no key is."""
        if self.bias_holes:
            bias[rng.random(bias.shape) < 0.2] = -np.inf
        if self.bias_mask:
            is_masked = (rng.random(bias.shape) < 0.1) | (rng.random((*bias.shape[:-1], 1)) < 0.2)
            bias = np.where(is_masked, _within(dtype, self.bias_mask), bias.astype(np.float64))
        if self.kv_lengths is not None and bias.shape[-1:] == (self.seqlen_k,) != (1,):
            bias[..., max(self.kv_lengths, default=0) :] = np.nan
        return bias.astype(dtype)

    def _fill_hidden_keys(self, values: dict[str, Array]) -> None:
        """Fill keys that the mask hides from all queries with what is not finite."""
        shape = (self.batch, self.num_heads, self.seqlen_q, self.seqlen_k)
        visible = np.broadcast_to(values["mask"], shape).any(axis=2)
        group = self.num_heads // max(self.num_heads_kv, 1)
        of_group = visible.reshape(self.batch, self.num_heads_kv, group, self.seqlen_k).any(axis=2)
        view_4d(values["k"], self.layout)[~of_group] = float(self.hidden_keys)
        values.pop("dout", None)

    def _as_caller(self, name: str, x: Array) -> Array:
        """An array of four axes in the layout, and with the batch axes, that the caller gives it."""
        layout = "bhsd" if name in OVER_ROWS else self.layout
        entries, heads, seqlen, dim = x.shape
        shape = user_shape(entries, heads, seqlen, dim, min(self.ndim, 4), layout)
        if self._has_axes(name):
            shape = (*self._batch_axes(name), *user_shape(1, heads, seqlen, dim, 3, layout))
        return (x.swapaxes(1, 2) if layout == "bshd" else x).reshape(shape)

    def _has_axes(self, name: str) -> bool:
        """Whether an array has batch axes of its own, as pools of pages, which nothing takes with them, have not."""
        return self.axes is not None and not (self.page_size and name in ("k", "v"))

    def _batch_axes(self, name: str) -> tuple[int, ...]:
        """The batch axes of an array of a case with `axes`."""
        return dict(self.batch_axes).get(name, self.axes or ())

    def _lengths_of(self, name: str) -> list[int]:
        """How many keys at least one batch entry attends to of each entry of k, or of v."""
        lengths: Array = np.array(self.kv_lengths)
        if self.axes is not None:
            whole = np.broadcast_to(lengths.reshape(self._batch_axes("kv_lengths")), self.axes)
            own = (*(1,) * (len(self.axes) - len(self._batch_axes(name))), *self._batch_axes(name))
            lengths = whole.max(axis=tuple(axis for axis, n in enumerate(own) if n == 1), keepdims=True, initial=0)
        return [int(n) for n in lengths.reshape(-1)]

    def _float8(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """q, k and v over their scales, and these; pools of pages have scales of pages.

        Numbers reach from the largest of their dtype, as `cuflash.quantize` makes them, to a quarter of it.
        """
        rng = np.random.default_rng(self.seed + 2)
        values = {name: arrays[name] for name in "qkv"}
        for name in ("k", "v", "q"):
            per = getattr(self, f"{name}_scale")
            if name == "q" and not self.q_float8:
                continue
            if per is None:
                values[f"{name}_scale"] = np.ones((), np.float32)
                continue
            entries, heads, keys, _ = values[name].shape
            block = {"token": 1, "block": self.scale_block}.get(per, max(keys, 1))
            shape = (1, 1, 1) if per == "tensor" else (entries, heads, -(-keys // block))
            largest = np.nanmax(abs(values[name]), initial=1e-3)
            scale = (1.001 * largest / LARGEST[self.kv_dtype] * np.exp2(rng.uniform(0, 2, shape))).astype(np.float32)
            whole = np.broadcast_to(scale.repeat(block, axis=2)[:, :, :keys], values[name].shape[:3])
            values[name] = values[name] / whole[..., None]
            hides = name != "q" and self.kv_lengths is not None and per == "token"
            if hides and not self.page_size and self.cu_seqlens_q is None:
                for b, length in enumerate(self._lengths_of(name)):
                    scale[b, :, length:] = np.nan
            own = (*self._batch_axes(name), *shape[1:]) if self._has_axes(name) else shape[max(4 - self.ndim, 0) :]
            values[f"{name}_scale"] = scale.reshape(() if per == "tensor" else own)
        return values

    def _pages(self, k: Array, v: Array) -> dict[str, Array]:
        """Pools of pages with the keys and values, and the table that leads there."""
        lengths, size = np.asarray(self.kv_lengths, np.int64).reshape(-1), self.page_size
        rng = np.random.default_rng(self.seed + 1)
        used = np.arange(self.seqlen_k // size) < -(-lengths // size)[:, None]
        table = np.full(used.shape, -1, np.int32)
        shares_page = self.batch > 1 and lengths.min() >= size
        if shares_page:
            used[1:, 0] = False
        pages = rng.permutation(np.count_nonzero(used) + 3)  # the last three are nobody's
        table[used] = pages[:-3]
        if shares_page:
            table[1:, 0] = table[0, 0]
        pools = {"block_table": table}
        for name, x in (("k", k), ("v", v)):
            pools[name] = np.full((len(pages), self.num_heads_kv, size, x.shape[3]), np.nan, x.dtype)
            for b, page in np.argwhere(used):
                pools[name][table[b, page]] = x[b, :, page * size : (page + 1) * size]
        return pools


# The static options that a case has.
OPTIONS = tuple(option.name for option in fields(Options) if option.name in {field.name for field in fields(Case)})


def _with_whole_blocks(mask: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.bool_]:
    """The mask with some blocks of 64 x 64 pairs all True, and some all False, where there is more than one."""
    coarse = tuple(-(-n // 64) for n in mask.shape[-2:])
    if coarse in ((), (1,), (1, 1)):
        return mask
    drawn = rng.integers(0, 4, mask.shape[:-2] + coarse)
    for axis, n in enumerate(mask.shape[-2:], start=mask.ndim - len(coarse)):
        drawn = drawn.repeat(64, axis).take(np.arange(n), axis)
    return np.where(drawn == 0, True, np.where(drawn == 1, False, mask))


def _within(dtype: np.dtype[Any], x: Any) -> Any:
    """Numbers cut to the range of a dtype."""
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return np.clip(x, -largest, largest)


def _granularity(problem: Problem, name: str) -> str | None:
    """What has a number of k_scale or v_scale of its own."""
    operand = getattr(problem, name)
    if operand is None:
        return None
    if operand.strides[2] == 0:
        return "head" if any(operand.strides) else "tensor"
    return "token" if problem.scale_block(name) == 1 else "block"


def gather_pages(arrays: Mapping[str, Any], layout: str = "bhsd") -> dict[str, Any]:
    """The NumPy arrays of a case with pages, k and v as contiguous arrays; NaN where the table has no page.

    Parameters
    ----------
    arrays : dict of str to numpy.ndarray
        What `Case.arrays` gives for a case with pages.
    layout : {"bhsd", "bshd"}, default "bhsd"
        That of the case.

    Returns
    -------
    dict of str to numpy.ndarray
        Without block_table; k and v are 4-D, and scales of fp8 numbers are those of the keys of an entry.

    Raises
    ------
    KeyError
        There is no block_table.

    See Also
    --------
    split_keys
    cuflash.FlashAttention.forward : Takes the pages as they are.
    """
    table, gathered = arrays["block_table"], {name: x for name, x in arrays.items() if name != "block_table"}
    for name in ("k", "v"):
        pages = view_4d(arrays[name], layout)[table]  # batch, page, heads, keys, dim
        pages[table < 0] = np.nan
        batch, count, heads, keys, dim = pages.shape
        rows = pages.swapaxes(1, 2).reshape(batch, heads, count * keys, dim)
        gathered[name] = np.ascontiguousarray(rows.swapaxes(1, 2) if layout == "bshd" else rows)
    for name in gathered.keys() & set(FP8_SCALES):
        if gathered[name].ndim:
            scales = gathered[name][table].swapaxes(1, 2)  # batch, heads, page, blocks of a page
            gathered[name] = scales.reshape(*scales.shape[:2], math.prod(scales.shape[2:]))
    return gathered


def qkv(arrays: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The positional arguments of a call, from the arrays of a case.

    Parameters
    ----------
    arrays : dict of str to array
        What `Case.arrays` gives.

    Returns
    -------
    tuple of array
        (q, k, v).

    Raises
    ------
    KeyError
        One of them is missing.

    See Also
    --------
    optional
    """
    return arrays["q"], arrays["k"], arrays["v"]


def optional(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the forward pass, from the arrays of a case: those of `NAMES` that it has.

    Parameters
    ----------
    arrays : dict of str to array
        What `Case.arrays` gives.

    Returns
    -------
    dict of str to array
        bias, mask and so on, as `cuflash.FlashAttention.forward` takes them.

    See Also
    --------
    qkv
    optional_backward
    """
    return {name: arrays[name] for name in NAMES if name in arrays}


def optional_backward(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the backward pass, from arrays of a case: `optional`, dlse, those of reductions.

    To a gradient such as dentropy belongs the entropy that the forward pass gave.

    Parameters
    ----------
    arrays : dict of str to array
        What `Case.arrays` gives.

    Returns
    -------
    dict of str to array
        As `cuflash.FlashAttention.backward` takes them.

    See Also
    --------
    optional
    """
    return {name: arrays[name] for name in (*NAMES, *OVER_ROWS) if name in arrays}


def split_keys(
    case: Case, parts: Sequence[Array], convert: Callable[[Array], Any] = np.asarray
) -> list[dict[str, Any]]:
    """The inputs of attention over splits of the keys, which `cuflash.merge` puts together to the attention of a case.

    Parameters
    ----------
    case : Case
        4-D, of layout "bhsd", without kv_lengths and alibi_slopes.
    parts : sequence of numpy.ndarray
        The keys of each split, in any order; each key is in one of them.
    convert : callable
        Makes another library's array of a NumPy array.

    Returns
    -------
    list of dict
        q, k, v, mask and bias of each split by name. What `causal` and `window` hide, the masks do.

    Raises
    ------
    ValueError
        As `Case.arrays` does.

    See Also
    --------
    cuflash.merge
    """
    arrays, keys = case.arrays(), np.arange(case.seqlen_k)
    ranges = np.array([case.problem.key_range(i) for i in range(case.seqlen_q)]).reshape(-1, 2, 1)
    visible = (keys >= ranges[:, 0]) & (keys < ranges[:, 1]) & arrays.get("mask", True)

    def inputs_of(some: Array) -> dict[str, Any]:
        split = {"k": arrays["k"][:, :, some], "v": arrays["v"][:, :, some], "mask": visible[..., some]}
        if "bias" in arrays:
            split["bias"] = arrays["bias"] if arrays["bias"].shape[-1] == 1 else arrays["bias"][..., some]
        return {name: convert(np.ascontiguousarray(x)) for name, x in {"q": arrays["q"], **split}.items()}

    return [inputs_of(some) for some in parts]


def _spread_lengths(batch: int, seqlen_k: int) -> tuple[int, ...]:
    return tuple(seqlen_k * (b + 1) // batch for b in range(batch))


# Names of the cases that a quick self-test has.
QUICK = ("plain", "one query", "pages", "cu_seqlens")


def self_test_cases(seed: int = 0, *, quick: bool = False) -> Iterator[tuple[str, Case]]:
    """(name, case): plain problems in every dtype, every option in half precision and in float32.

    Parameters
    ----------
    seed : int, default 0
        Of the random numbers of all cases.
    quick : bool, default False
        Whether to give only those with the names `QUICK`.

    Returns
    -------
    iterator of (str, Case)
        What ``python -m cuflash check`` runs.

    See Also
    --------
    check
    cases : Draws others.
    """
    plain: dict[str, dict[str, Any]] = {
        "plain": {},
        "one query": {"seqlen_q": 1},
        "causal": {"causal": True},
        "head_dim 256": {"head_dim": 256},
        "seqlen 1000": {"seqlen_q": 1000, "seqlen_k": 1000, "causal": True},
    }
    options: dict[str, dict[str, Any]] = {
        'causal="top_left"': {"causal": "top_left"},
        'causal="lengths"': {"causal": "lengths", "kv_lengths": (60, 170)},
        "causal, 203 queries, 113 keys": {"seqlen_q": 203, "seqlen_k": 113, "causal": True},
        "window": {"window": (20, 5)},
        "causal, window": {"window": (20, None), "causal": True},
        **{name: {name: 1.5} for name in CAPS},
        "scale": {"scale": -0.1},
        "alibi_slopes": {"alibi_slopes": (6,)},
        "bias": {"bias": (1, 6, 113, 203), "bias_holes": True},
        "mask": {"mask": (2, 1, 113, 203)},
        "kv_lengths": {"kv_lengths": (0, 150)},
        "pages": {"kv_lengths": (40, 203), "page_size": 16, "seqlen_k": 208, "causal": True},
        "float8": {"kv_dtype": "float8_e4m3fn", "k_scale": "token", "v_scale": "head"},
        "sinks": {"sinks": True},
        "dlse": {"dlse": True},
        "no values": {"dlse": True, "has_values": False, "causal": True},
        "block_mask": {"block_mask": (2, 6), "block_size": (32, 64)},
        "cu_seqlens": {"cu_seqlens_q": (0, 30, 113), "cu_seqlens_k": (0, 120, 190), "causal": True},
        "head_dim 40, head_dim_v 72": {"head_dim": 40, "head_dim_v": 72},
        "layout bshd": {"layout": "bshd"},
        "batch axes": {"axes": (2, 3), "bias": (2, 1, 6, 113, 203), "batch_axes": (("k", (1, 3)), ("v", (2, 1)))},
        "dropout": {"dropout": 0.1, "causal": True},
        "strides": {"strides": "transposed"},
        "large scores": {"score_spread": 30.0},
        "everything": {
            "causal": True,
            "window": (100, None),
            **dict.fromkeys(CAPS, 5.0),
            "alibi_slopes": (2, 6),
            "bias": (203,),
            "mask": (113, 203),
            "kv_lengths": (7, 203),
            "sinks": True,
            "dlse": True,
        },
    }
    sizes = {"batch": 2, "num_heads": 6, "num_heads_kv": 2, "seqlen_q": 113, "seqlen_k": 203, "head_dim": 64}
    for group, dtypes in ((plain, DTYPES), (options, ("bfloat16", "float32"))):
        chosen = [(name, changes) for name, changes in group.items() if not quick or name in QUICK]
        for (name, changes), dtype in itertools.product(chosen, dtypes):
            yield name, Case(**(sizes | changes | {"dtype": dtype, "seed": seed}))
