"""Problems that are measured, their floating-point operations and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.arrays.array_info import numpy_dtype
from cuflash.block_masks import random

from .functions import DOCUMENTS, FUNCTIONS

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
PASSES = ("forward", "backward")
SECOND = ("jvp", "backward_jvp", "double_backward")  # the last is the two before
ALL_PASSES = (*PASSES, *SECOND)
# Of each pass: products over head_dim and over head_dim_v.
PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "jvp": (3, 3), "backward_jvp": (7, 3), "double_backward": (10, 6)}
# How often it reads or writes something as large as q, k and v together, as out, and as lse.
ARRAYS = {
    "forward": (1, 1, 1),
    "backward": (2, 2, 1),
    "jvp": (2, 2, 2),
    "backward_jvp": (3, 3, 2),
    "double_backward": (3, 2, 1),
}
BLOCK = 128  # rows, and keys, of a block of a block mask
THREADS = (1, 2, 4, 8)  # of the CPU path, where some are left out
VISIBLE = 0.9  # the fraction of a random mask that is True

# What a case may have besides `causal`, in words: a contender names those that it is run without. Names of cases and
# tables end with those of SUFFIXES.
SUFFIXES = {
    "bias": "a bias",
    "softcap": "a soft cap",
    "alibi": "ALiBi slopes",
    "mask": "a mask",
    "window": "a window",
    "dropout": "dropout",
    "sinks": "sinks",
    "kv_lengths": "kv_lengths",
    "function": "a function",
}
OPTIONS = {
    "blocks_kept": "a block mask",
    "lengths": "sequences of different lengths",
    "is_aligned": "a diagonal that ends with the last key",
    **SUFFIXES,
}


def suffixes(values: Mapping[str, Any], joint: str) -> list[str]:
    """Those of SUFFIXES that `values` has, each with its axes or its number after `joint`."""
    found = {name: values[name] for name in SUFFIXES if values.get(name)}
    return [
        name if x is True else f"{name}{joint}{x}" if isinstance(x, str) else f"{name}{joint}{x:g}"
        for name, x in found.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem in layout bhsd with contiguous operands and the default scale."""

    head_dim: int
    seqlen_q: int
    batch: int
    num_heads: int
    causal: bool = False
    dtype: str = "bfloat16"
    num_heads_kv: int = 0  # 0: as num_heads
    seqlen_k: int = 0  # 0: as seqlen_q
    head_dim_v: int = 0  # 0: as head_dim
    blocks_kept: float = 0.0  # the fraction of the blocks of a random block mask that is on; 0: no block mask
    bias: str = ""  # axes of a bias of the dtype of q, of "bhqk"; the others broadcast
    softcap: float = 0.0  # 0: none
    alibi: bool = False  # slopes of 2 ** -(8 / num_heads), its square and so on
    mask: str = ""  # axes of a random boolean mask, as those of the bias
    window: int = 0  # the most keys that a row of a causal problem sees; 0: all that it may
    dropout: float = 0.0
    sinks: bool = False
    kv_lengths: bool = False  # lengths of the keys in an array, all of them whole
    function: str = ""  # a name in `functions.FUNCTIONS`
    lengths: tuple[int, ...] = ()  # of the batch entries, where they differ: arrays are padded to the longest
    v_in_k: bool = False  # v is the first columns of k, in the same memory

    def __post_init__(self) -> None:
        for name, default in (("num_heads_kv", "num_heads"), ("seqlen_k", "seqlen_q"), ("head_dim_v", "head_dim")):
            object.__setattr__(self, name, getattr(self, name) or getattr(self, default))
        if self.function and self.seqlen_q != self.seqlen_k:
            raise ValueError("function: got seqlen_q != seqlen_k, expected a square problem (alignments differ)")
        hiding = [name for name in ("blocks_kept", "mask", "causal") if getattr(self, name)]
        if hiding[1:]:
            raise ValueError(
                f"{hiding[0]}: got {hiding[1]} as well, expected one of them (rows might attend to nothing)"
            )
        if self.mask and "k" not in self.mask:
            raise ValueError(f'mask: got axes {self.mask!r}, expected "k" among them (rows would attend to nothing)')
        if self.window and not self.causal:
            raise ValueError("window: got no causal, expected it as well")
        longest = max(self.lengths, default=0)
        if self.lengths and (len(self.lengths), longest, longest) != (self.batch, self.seqlen_q, self.seqlen_k):
            raise ValueError(
                f"lengths: got {self.lengths}, expected {self.batch}, of which {self.seqlen_q} the longest"
            )
        if self.v_in_k and self.head_dim_v > self.head_dim:
            raise ValueError(
                f"v_in_k: got a v of {self.head_dim_v} columns, expected at most {self.head_dim}, as k has"
            )
        if self.num_heads % self.num_heads_kv:
            raise ValueError(f"num_heads_kv: got {self.num_heads_kv}, expected a divisor of {self.num_heads}")

    @classmethod
    def of_record(cls, problem: Mapping[str, Any]) -> Case:
        """The case whose fields a record has."""
        return cls(**{**problem, "lengths": tuple(problem.get("lengths", ()))})

    @property
    def name(self) -> str:
        """Unique short name, made of the parts that a `--case` filter may name."""
        dim = f"d{self.head_dim}" + (f"x{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        dim += "ink" if self.v_in_k else ""
        heads = f"h{self.num_heads}" + (f"kv{self.num_heads_kv}" if self.num_heads_kv != self.num_heads else "")
        seqlen = f"s{self.seqlen_q}" + (f"k{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else "")
        seqlen += "mixed" if self.lengths else ""
        mask = "causal" if self.causal else f"blocks{100 * self.blocks_kept:g}" if self.blocks_kept else "full"
        parts = (SHORT[self.dtype], dim, f"b{self.batch}", heads, seqlen, mask)
        return "-".join((*parts, *suffixes(vars(self), "_")))

    @property
    def diagonal(self) -> int:
        """The key at which the first query stands, where the last one stands at the last key."""
        return self.seqlen_k - self.seqlen_q

    @property
    def is_aligned(self) -> bool:
        """Whether it matters that queries stand at the last keys: peers disagree on that."""
        return self.diagonal != 0 and (self.causal or self.alibi)

    @property
    def options(self) -> tuple[str, ...]:
        """The names in OPTIONS of what the case has."""
        return tuple(name for name in OPTIONS if getattr(self, name))

    def block_mask(self) -> np.ndarray:
        """A mask in which every block of rows sees the same number of blocks of keys."""
        kept, n = self._blocks_of_a_row
        return random(-(-self.seqlen_q // BLOCK), n, kept, seed=0)

    @property
    def _blocks_of_a_row(self) -> tuple[int, int]:
        """Those that are on, and all."""
        n = -(-self.seqlen_k // BLOCK)
        return max(1, round(self.blocks_kept * n)), n

    @property
    def _seen_keys(self) -> int:
        """Those that some query sees."""
        if self.blocks_kept:
            seen = self.block_mask().any(axis=0)
            return int(sum(min(BLOCK, self.seqlen_k - BLOCK * int(j)) for j in np.flatnonzero(seen)))
        return min(self.window + self.seqlen_q - 1, self.seqlen_k) if self.window else self.seqlen_k

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_heads_kv

    @property
    def q_shape(self) -> tuple[int, ...]:
        return (self.batch, self.num_heads, self.seqlen_q, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        return (self.batch, self.num_heads_kv, self.seqlen_k, self.head_dim)

    @property
    def v_shape(self) -> tuple[int, ...]:
        return (self.batch, self.num_heads_kv, self.seqlen_k, self.head_dim_v)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.batch, self.num_heads, self.seqlen_q, self.head_dim_v)

    @property
    def terms(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the optional arrays, the block mask left out, by the names of cuflash's arguments."""

        def with_axes(axes: str) -> tuple[int, ...]:
            sizes = (self.batch, self.num_heads, self.seqlen_q, self.seqlen_k)
            return tuple(n if axis in axes else 1 for axis, n in zip("bhqk", sizes, strict=True))

        rows = (
            ("bias", self.bias, with_axes(self.bias), self.dtype),
            ("alibi_slopes", self.alibi, (self.num_heads,), self.softmax_dtype),
            ("mask", self.mask, with_axes(self.mask), "bool"),
            ("kv_lengths", self.kv_lengths, (self.batch,), "int32"),
            ("sinks", self.sinks, (self.num_heads,), self.softmax_dtype),
        )
        found = {name: (shape, dtype) for name, given, shape, dtype in rows if given}
        if self.function:
            function = FUNCTIONS[self.function]
            dtype = "int32" if function.is_mask else self.softmax_dtype
            found |= {name: (shape, dtype) for name, shape in function.sized(self.num_heads, self.seqlen_q).items()}
        return found

    @property
    def softmax_dtype(self) -> str:
        """dtype of lse."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def scores_bytes(self) -> int:
        """Bytes of the matrix of scores that the plain formula stores."""
        return self.batch * self.num_heads * self.seqlen_q * self.seqlen_k * ITEMSIZE[self.softmax_dtype]

    def flops(self, pass_: str) -> int:
        """Floating-point operations of the matrix products. A causal problem counts half, as the literature does, one
        with a window the pairs in it, and one with a block mask the fraction that it keeps; other masks count as none.
        """
        of_head_dim, of_head_dim_v = PRODUCTS[pass_]
        dims = of_head_dim * self.head_dim + of_head_dim_v * self.head_dim_v
        scores = sum(n * n for n in self.lengths) or self.batch * self.seqlen_q * self.seqlen_k
        if self.function == "documents":
            scores //= DOCUMENTS
        if self.window:
            # Rows, of which each sees a key more than the one before; the others see whole windows.
            first = max(0, min(self.window - self.diagonal, self.seqlen_q))
            rising = first * self.diagonal + first * (first + 1) // 2
            scores = self.batch * (rising + (self.seqlen_q - first) * min(self.window, self.seqlen_k))
            return 2 * self.num_heads * scores * dims
        full = 2 * self.num_heads * scores * dims
        if self.blocks_kept:
            kept, n = self._blocks_of_a_row
            return full * kept // n
        return full // 2 if self.causal else full

    def ideal_bytes(self, pass_: str) -> int:
        """Fewest bytes through device memory: each input read once, each result written once.

        Keys that no query attends to, because of a window or a block mask, are not read.
        """
        of_keys = (self.k_shape,) if self.v_in_k else (self.k_shape, self.v_shape)
        keys = sum(map(math.prod, of_keys)) * self._seen_keys // self.seqlen_k
        inputs = math.prod(self.q_shape) + keys
        out = math.prod(self.out_shape)
        lse_bytes = math.prod(self.out_shape[:3]) * ITEMSIZE[self.softmax_dtype]
        of_inputs, of_out, of_lse = ARRAYS[pass_]
        padded_bytes = (of_inputs * inputs + of_out * out) * ITEMSIZE[self.dtype] + of_lse * lse_bytes
        padded_bytes += sum(math.prod(shape) * numpy_dtype(dtype).itemsize for shape, dtype in self.terms.values())
        return padded_bytes * sum(self.lengths) // (self.batch * self.seqlen_q) if self.lengths else padded_bytes
