"""The static options of a call, checked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from cuflash.arrays.cached import cached_property
from cuflash.arrays.checks import as_bool, as_integer, as_real, check_choice, type_error, typed, value_error
from cuflash.score_mod import Score, ScoreFunction, Traced
from cuflash.spec.inputs import NUMBER_ROWS, SCORE_OPTIONS, Numbers, OfNumbers, OptionalArrays

Function = Callable[..., Any] | Traced  # it makes scores or hides pairs
Causal = bool | Literal["top_left", "lengths"]
Window = tuple[int | None, int | None]
LAYOUTS = ("bhsd", "bshd")
PRECISIONS = ("highest", "tf32")
MAX_SEQLEN = 2**30  # positions and their sums are 32-bit in the kernels
ORIGIN_STEP = 16  # random bits belong to blocks of so many rows and columns
MAX_BLOCK = 1024  # rows, or keys, of a block of a block mask
BLOCK_SIZE = (128, 128)  # the default; this object is not checked, because small calls take microseconds
CAUSAL = "False, True (bottom-right aligned), 'top_left' or 'lengths'"


class OptionsOfForward(OfNumbers, total=False):
    """The options that concern the forward pass, but for `causal`, as keyword arguments."""

    window: Window | None
    layout: Literal["bhsd", "bshd"]
    batch_invariant: bool
    precision: Literal["highest", "tf32"]
    dropout: float
    block_size: int | tuple[int, int]


class OptionsWithoutCausal(OptionsOfForward, total=False):
    """The options that `cuflash.FlashAttention` and `ContextParallel` take alike, as keyword arguments."""

    deterministic: bool


class OptionArguments(OptionsWithoutCausal, total=False):
    """The options of `cuflash.FlashAttention` as keyword arguments, but for functions."""

    causal: Causal


class ForwardKeywords(OptionsOfForward, OptionalArrays, total=False):
    """The options and optional inputs of `cuflash.attention`, as keyword arguments."""

    causal: Causal


class AttentionKeywords(OptionArguments, OptionalArrays, total=False):
    """The options and optional inputs of attention for PyTorch and JAX, as keyword arguments."""


class Origin(NamedTuple):
    """Where a slice of a longer problem begins, as dropout counts.

    `query` and `key` are its first query and its first key, multiples of `ORIGIN_STEP`. `head` is its first head among
    those of all batch entries. `num_heads` is how many of these an entry of the whole has, 0 for as many as the slice.
    """

    query: int = 0
    key: int = 0
    head: int = 0
    num_heads: int = 0


@dataclass(frozen=True, kw_only=True)
class Options(Numbers):
    """The static options of `cuflash.FlashAttention`, checked; see there for their meaning."""

    causal: bool | Literal["top_left", "lengths"] = False
    window: tuple[int | None, int | None] | None = None
    layout: str = "bhsd"
    deterministic: bool = False
    batch_invariant: bool = False
    precision: str = "highest"
    dropout: float = 0.0
    block_size: int | tuple[int, int] = BLOCK_SIZE
    # For a slice of a longer problem, which `cuflash.distributed` computes: query i stands at key position i +
    # diagonal. None if `causal` decides that. It is no keyword of `cuflash.FlashAttention`, which prints itself as its
    # options.
    diagonal: int | None = field(default=None, repr=False)
    # Traced functions, or CUDA source for the score. `mask_function` is the argument `mask` of
    # `cuflash.FlashAttention`.
    score: ScoreFunction | None = field(default=None, repr=False)
    mask_function: Traced | None = field(default=None, repr=False)
    # Where such a slice begins. It is no keyword either.
    origin: Origin = field(default=Origin(), repr=False)
    # Those of out, dq, dk and dv that others are added to: on the GPU, passes give them in the dtype of the softmax. Of
    # lse, they give what its rounding leaves, too, in the element after each one.
    wide: tuple[str, ...] = field(default=(), repr=False)
    # Whether other kernels run on the device at the same time, as they do for `cuflash.distributed`.
    shares_device: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {}
        if self.block_size is not BLOCK_SIZE:
            checked["block_size"] = check_block_size(self.block_size)
        if isinstance(self.causal, str):
            checked["causal"] = check_choice("causal", self.causal, ("top_left", "lengths"), CAUSAL)
        else:
            checked["causal"] = as_bool("causal", self.causal, CAUSAL)
        for row in NUMBER_ROWS:
            if (value := getattr(self, row.name)) is not None:
                checked[row.name] = as_real(row.name, value, "None or a real number")
                if row.is_positive and checked[row.name] <= 0:
                    raise value_error(row.name, checked[row.name], "None or a number > 0")
        if self.window is not None:
            if not isinstance(self.window, (tuple, list)):
                raise type_error("window", typed(self.window), "None or (left, right)")
            if len(self.window) != 2:
                raise value_error("window", self.window, "two entries (left, right)")
            left, right = self.window
            checked["window"] = (_check_window_side("left", left), _check_window_side("right", right))
        checked["layout"] = check_choice("layout", self.layout, LAYOUTS)
        checked["batch_invariant"] = as_bool("batch_invariant", self.batch_invariant)
        checked["deterministic"] = as_bool("deterministic", self.deterministic) or checked["batch_invariant"]
        checked["precision"] = check_choice("precision", self.precision, PRECISIONS)
        checked["dropout"] = check_dropout(self.dropout)
        if self.diagonal is not None:
            checked["diagonal"] = as_integer("diagonal", self.diagonal)
        checked["score"] = self.score if isinstance(self.score, Score) else _traced("score", self.score)
        checked["mask_function"] = _traced("mask", self.mask_function)
        if self.score is not None:
            for name in SCORE_OPTIONS:
                if getattr(self, name, None) is not None:
                    raise beside_score_error(name)
        if min(self.origin) < 0 or any(index % ORIGIN_STEP for index in self.origin[:2]):
            raise value_error("origin", self.origin, f"multiples of {ORIGIN_STEP}, and numbers of heads, at least 0")
        if self.batch_invariant:
            for name, function in (("score", self.score), ("mask", self.mask_function)):
                if function is not None:
                    raise NotImplementedError(
                        f"{name}: got a function together with batch_invariant=True, expected one of them; which tiles "
                        "a function is evaluated for depends on the whole call"
                    )
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_hash", hash(tuple(vars(self).values())))

    @cached_property
    def score_args(self) -> tuple[str, ...]:
        """The names of the arrays that the functions of a call read, in order."""
        functions = (self.score, self.mask_function)
        return tuple(dict.fromkeys(name for function in functions if function for name in function.arrays))

    @cached_property
    def score_gradients(self) -> tuple[str, ...]:
        """The names of gradients, one for each array that the score reads, although integers and bools have none."""
        if self.score is None:
            return ()
        read = self.score.read
        return tuple(f"d{name}" for name in self.score.arrays if name in read)

    def random(self, seed: object, offset: object) -> tuple[int, int]:
        """Seed and offset of a call, checked; zeros where nothing is random and the caller gives none."""
        if not self.dropout:
            if seed is None and offset is None:
                return 0, 0
            seed, offset = (0 if x is None else x for x in (seed, offset))
        return check_random(seed, offset)

    def origin_of(self, num_heads: int) -> Origin:
        """Where a call with so many heads begins, as dropout counts; zeros where nothing is dropped."""
        if not rounded_rate(self.dropout):
            return Origin()
        return self.origin._replace(num_heads=self.origin.num_heads or num_heads)

    def __reduce__(self) -> tuple[Any, ...]:
        """Options are made again when they are loaded, because hashes of strings differ from process to process."""
        return functools.partial(Options, **{field.name: getattr(self, field.name) for field in fields(self)}), ()

    def __hash__(self) -> int:
        """The hash is computed once, because every call looks up its launch by it."""
        return self._hash  # type: ignore[attr-defined, no-any-return]


def beside_score_error(name: str) -> NotImplementedError:
    """The error for an option that makes scores, together with a function that does."""
    return NotImplementedError(
        f"{name}: got it together with score, expected one of them; write it in the function: what that returns is the "
        "score"
    )


def _traced(what: Literal["score", "mask"], function: Any) -> Traced | None:
    if function is None or isinstance(function, Traced):
        return function
    return Traced.of(function, what)


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


def _check_window_side(side: str, value: object) -> int | None:
    if value is None:
        return None
    number = as_integer(f"window {side}", value, "None or an integer")
    if number < 0:
        raise value_error(f"window {side}", value, "None (no bound) or an integer >= 0")
    return number


def window_of(options: Options, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
    """The bounds (left, right) of the window that `causal` and `window` make; None for one that hides nothing.

    For packed sequences, the lengths are those of all of them together, because one of them may be as long. With
    `batch_invariant` bounds that hide nothing stay, unless they do so in every call: whether they do depends on other
    sequences of a call.
    """
    left, right = options.window or (None, None)
    if options.causal:
        right = 0 if right is None else min(right, 0)
    if options.batch_invariant:
        left, right = (None if side is not None and side >= MAX_SEQLEN else side for side in (left, right))
        return left, right
    first_row = diagonal_of(options, seqlen_q, seqlen_k)
    if left is not None and first_row + seqlen_q - 1 - left <= 0:
        left = None  # even the last row attends to the first key
    if right is not None and first_row + right >= seqlen_k - 1:
        right = None  # even the first row attends to the last key
    return left, right


def diagonal_of(options: Options, seqlen_q: int, seqlen_k: int) -> int:
    """The position of the first query among the keys; if it follows `kv_lengths`, that of an entry with all keys."""
    if options.diagonal is not None:
        return options.diagonal
    return 0 if options.causal == "top_left" else seqlen_k - seqlen_q
