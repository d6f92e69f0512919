"""Hypothesis strategies that draw cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
from hypothesis import strategies as st

from cuflash.arrays.array_info import DTYPES, FLOAT8, numpy_dtype
from cuflash.spec.inputs import CAPS, NUMBERS, PER_HEAD_INPUTS, OptionalInput
from cuflash.spec.options import LAYOUTS
from cuflash.testing.arrays import STRIDES
from cuflash.testing.case import Case

# What `cases` draws by default, and what it draws on request.
FEATURES = (
    *("causal", "window", *NUMBERS, "bias", "mask", "kv_lengths"),
    *(row.name for row in PER_HEAD_INPUTS if row.gradient_via == "scores"),
    *("gqa", "head_dim_v"),
)
MORE_FEATURES = (*(row.name for row in PER_HEAD_INPUTS if row.gradient_via == "softmax"), "dlse", "block_mask")
# Values and sizes at which implementations fail that are right elsewhere, drawn on request: fields of `Case`, and
# "empty".
REGIMES = ("bias_mask", "score_mean", "distinct_keys", "factors", "empty")
BIAS_MASKS = (-1e4, -1e9, -2.5e38, -1.7e308, 1e9, 1.7e308)  # cut to the largest numbers of the dtype of the bias
SCORE_MEANS = (-300.0, 3e3, -3e4, 1e6)
SEQLENS = (1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 113, 127, 128, 129, 203, 255, 256, 257, 509)
MOST_ENTRIES = 8  # of all batch axes
HEAD_DIMS = (1, 2, 3, 7, 8, 13, 16, 17, 24, 31, 32, 40, 48, 64, 72, 80, 96, 113, 128, 160, 192, 255, 256)

FLOAT8_ARRAYS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "kv_dtype": st.sampled_from(FLOAT8),
        "scale_block": st.sampled_from((16, 2, 64)),
        **dict.fromkeys(("k_scale", "v_scale"), st.sampled_from((None, "tensor", "head", "block", "token"))),
    }
)


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
        for implementations that drop what `cuflash.dropout_mask` says, "pages" for those that take a block table,
        "packed" for those of packed sequences, "lengths" for those of ``causal="lengths"``, and "float8" for those of
        fp8 k and v, in cases that have no gradients; "hidden_keys", which with a mask have none either. And `REGIMES`:
        rows and keys masked by finite numbers, scores of large size, equal scores, numbers at both ends of the range of
        their dtype, and no batch entries, no heads or no heads of q.
    max_seqlen, max_head_dim : int
        Largest lengths, in elements.
    max_scores : int
        Largest number of scores, over all heads: bounds the time that a case takes.
    min_seqlen : int
        Shortest sequence; 0 makes empty ones too.

    Returns
    -------
    hypothesis.strategies.SearchStrategy of Case
        Simple cases first: it shrinks to small sizes and few options.

    Raises
    ------
    ImportError
        hypothesis is not installed.

    See Also
    --------
    Case
    check : Runs an implementation on a case.
    """
    own = _Draws(draw, features)
    has, pick = own.has, own.pick
    is_packed = "packed" in features and 3 in ndims and draw(st.booleans())
    ndim = 3 if is_packed else pick(ndims)
    batch, num_heads, num_heads_kv = own.heads(ndim, is_packed)
    lengths = [n for n in ((0,) if min_seqlen == 0 else ()) + SEQLENS if min_seqlen <= n <= max_seqlen]
    seqlen_q, seqlen_k = own.lengths(lengths, max_scores // max(num_heads * (batch if ndim == 4 else 1), 1))
    page_size = pick([16, 32, 64]) if ndim == 4 and has("pages") else 0
    if page_size:
        seqlen_k = -(-seqlen_k // page_size) * page_size
    head_dims = [n for n in HEAD_DIMS if n <= max_head_dim]
    follows_lengths = not is_packed and has("lengths")
    side = st.none() | st.integers(0, max(seqlen_k, 1)) | st.integers(0, 3)
    dtype = pick(dtypes)
    scores_shape = (batch, num_heads, seqlen_q, seqlen_k)
    arrays: dict[str, Any] = {
        name: own.broadcast_shape(scores_shape) if not is_packed and has(name) else None for name in ("bias", "mask")
    }
    return Case(
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=pick(head_dims),
        head_dim_v=pick(head_dims) if has("head_dim_v") else 0,
        dtype=dtype,
        **(draw(FLOAT8_ARRAYS) if has("float8") else {}),
        ndim=ndim,
        layout=pick(layouts),
        causal="lengths" if follows_lengths else pick([True, "top_left"]) if has("causal") else False,
        scale=pick([0.0, -0.25, 0.125, 1.0]) if has("scale") else None,
        window=draw(st.tuples(side, side)) if has("window") else None,
        **{name: pick([0.5, 5.0, 50.0]) for name in CAPS if has(name)},
        **arrays,
        bias_dtype=pick(["softmax", "input"]),
        bias_holes=draw(st.booleans()),
        kv_lengths=tuple(draw(st.integers(0, seqlen_k)) for _ in range(batch))
        if page_size or follows_lengths or (not is_packed and has("kv_lengths"))
        else None,
        kv_lengths_dtype=pick(["int32", "int64"]),
        page_size=page_size,
        **{row.name: own.of_heads(row, batch, num_heads) for row in PER_HEAD_INPUTS if has(row.name)},
        cu_seqlens_q=own.starts(batch, seqlen_q) if is_packed else None,
        cu_seqlens_k=own.starts(batch, seqlen_k) if is_packed else None,
        dlse=has("dlse"),
        dropout=pick([0.1, 0.5, 0.9]) if has("dropout") else 0.0,
        **(own.block_mask(batch, num_heads) if not is_packed and has("block_mask") else {}),
        strides=pick(strides),
        score_spread=pick(score_spreads),
        **own.regimes(dtype, arrays),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass
class _Draws:
    """What `cases` draws of parts of a case."""

    draw: st.DrawFn
    features: Collection[str]  # that may be present

    def has(self, feature: str) -> bool:
        return feature in self.features and self.draw(st.booleans())

    def pick(self, values: Collection[Any]) -> Any:
        return self.draw(st.sampled_from(list(values)))

    def heads(self, ndim: int, is_packed: bool) -> tuple[int, int, int]:
        """The batch, and the numbers of heads of q and of k."""
        num_heads_kv = self.pick([1, 2, 3]) if ndim > 2 else 1
        num_heads = num_heads_kv * (self.pick([2, 3, 4]) if ndim > 2 and self.has("gqa") else 1)
        batch = self.pick([1, 2, 3]) if ndim == 4 else self.pick([1, 2, 3, 5, 0]) if is_packed else 1
        if self.has("empty") and ndim > 2:
            num_heads, num_heads_kv = self.pick([(num_heads, num_heads_kv), (0, 0), (0, num_heads_kv)])
            batch = self.pick([batch, 0]) if ndim == 4 else batch
        return batch, num_heads, num_heads_kv

    def lengths(self, allowed: Collection[int], most_scores: int) -> tuple[int, int]:
        """How many queries and keys there are, with so many scores of a head at most."""
        if most_scores >= 113 * 203 and max(allowed) >= 203 and self.draw(st.booleans()):
            return self.pick([(113, 203), (203, 113)])  # type: ignore[no-any-return]
        seqlen_q = self.pick([n for n in allowed if n <= most_scores])
        return seqlen_q, self.pick([n for n in allowed if n * max(seqlen_q, 1) <= most_scores])

    def broadcast_shape(self, scores_shape: tuple[int, ...]) -> tuple[int, ...]:
        shape = [self.pick([1, n]) for n in scores_shape]
        while len(shape) > 1 and shape[0] == 1 and self.draw(st.booleans()):
            del shape[0]
        return tuple(shape)

    def of_heads(self, row: OptionalInput, batch: int, num_heads: int) -> Any:
        sizes = {"batch": batch, "num_heads": num_heads}
        shapes = [tuple(sizes[axis] for axis in shape) for shape in row.shapes]
        return self.pick(shapes) if len(shapes) > 1 else True

    def block_mask(self, batch: int, num_heads: int) -> dict[str, Any]:
        shapes = [(), (num_heads,), (1, num_heads), (batch, 1), (batch, num_heads)]
        size = (self.pick([16, 48, 64, 128, 256]), self.pick([16, 32, 64, 80, 128]))
        return {
            "block_mask": self.pick(shapes),
            "block_size": size,
            "blocks_kept": self.pick([0.5, 0.2, 0.8, 1.0, 0.0]),
        }

    def starts(self, batch: int, seqlen: int) -> tuple[int, ...]:
        """Where packed sequences begin, and where the last one ends."""
        cuts = sorted(self.draw(st.lists(st.integers(0, seqlen), min_size=batch, max_size=batch)))
        return (0, *cuts[:-1], self.pick((seqlen, cuts[-1]))) if batch else (0,)

    def regimes(self, dtype: str, given: dict[str, Any]) -> dict[str, Any]:
        """Fields of `Case` for the `REGIMES` of values."""
        choices: dict[str, Collection[Any]] = {
            "bias_mask": BIAS_MASKS if given["bias"] is not None else (0.0,),
            "score_mean": (0.0, *SCORE_MEANS),
            "distinct_keys": (0, 1, 2, 7),
            "hidden_keys": ("nan", "inf", "-inf") if given["mask"] is not None else ("",),
            "factors": ((), *factors_of(dtype)),
        }
        return {name: self.pick(values) for name, values in choices.items() if self.has(name)}


def factors_of(dtype: str) -> list[tuple[tuple[str, float], ...]]:
    """`Case.factors` for numbers at the ends of the range of a dtype, whose products are ordinary, but with small q."""
    finfo = ml_dtypes.finfo(numpy_dtype(dtype))  # type: ignore[no-untyped-call]
    lowest, highest = max(-200, int(finfo.minexp)), min(200, int(finfo.maxexp))  # of float64, what squares of it have
    # For what dropout makes of values, and for their sums in float32, where weights of bfloat16 are up to 2^32.
    margin = {"float16": 8, "bfloat16": 44}.get(dtype, 12)
    large, below, middle = (2.0**n for n in (highest - margin, lowest - 3, highest // 2))
    small = 2.0 ** min(20, highest // 4) / large  # so far from the smallest numbers that next to none is subnormal
    return [
        (("v", large), ("dout", small)),
        (("v", below), ("dout", middle)),
        (("q", 2.0**lowest),),
        (("q", 1 / small), ("k", small)),
        (("q", small), ("k", 1 / small)),
    ]


@st.composite
def with_axes(draw: st.DrawFn, of: st.SearchStrategy[Case]) -> Case:
    """Strategy for 4-D cases as `of` draws them, with any number of batch axes, along which some arrays broadcast.

    Parameters
    ----------
    of : hypothesis.strategies.SearchStrategy of Case
        ``cases(ndims=[4])``, say.

    Returns
    -------
    hypothesis.strategies.SearchStrategy of Case
        Cases with `axes`.

    Raises
    ------
    ImportError
        hypothesis is not installed.

    See Also
    --------
    cases
    over_axes
    """
    return over_axes(draw(of), lambda values: draw(st.sampled_from(values)))


def over_axes(case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
    """A 4-D case with batch axes, of which `choose` takes one of several values at a time, the simplest first.

    Parameters
    ----------
    case : Case
        4-D, without batch axes of its own.
    choose : callable
        Takes a sequence of values, the simplest first, and returns one of them.

    Returns
    -------
    Case
        With `axes` and `batch_axes`.

    See Also
    --------
    with_axes : The same as a strategy.
    """
    axes = tuple(choose((2, 1, 3, 2, 1, 3, 2, 1, 3, 0)) for _ in range(choose(range(5))))
    while math.prod(axes) > MOST_ENTRIES:
        axes = axes[1:]

    def some() -> tuple[int, ...]:
        own = [choose((n, 1)) for n in axes]
        while own and own[0] == 1 and choose((False, True)):
            del own[0]
        return tuple(own)

    def of_scores(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return shape if shape is None or len(shape) < 3 else (*some(), *shape[-3:])

    batch_axes = {name: some() for name in ("q", "k", "kv_lengths")}
    batch_axes[choose(("q", "k"))] = axes
    batch_axes |= {row.name: (1,) * choose((0, len(axes))) for row in PER_HEAD_INPUTS if row.lacks_batch}
    batch_axes["v"] = choose((axes, batch_axes["k"]))
    given = [row.name for row in PER_HEAD_INPUTS if not row.lacks_batch and getattr(case, row.name) is not None]
    of_heads: dict[str, Any] = {name: (*some(), case.num_heads) for name in given}
    lengths = range(case.seqlen_k + 1)
    return replace(
        case,
        axes=axes,
        batch_axes=tuple(batch_axes.items()),
        bias=of_scores(case.bias),
        mask=of_scores(case.mask),
        **of_heads,
        block_mask=None if case.block_mask is None else (*some(), *case.block_mask[-1:]) if case.block_mask else (),
        kv_lengths=None
        if case.kv_lengths is None
        else tuple(choose(lengths) for _ in range(math.prod(batch_axes["kv_lengths"]))),
    )
