"""The named problems that are measured, their floating-point operations and bytes, and the suites they form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cuflash.block_masks import random
from cuflash.operands import numpy_dtype

from .functions import DOCUMENTS, FUNCTIONS

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
PASSES = ("forward", "backward")
BLOCK = 128  # rows, and keys, of a block of a block mask
THREADS = (1, 2, 4, 8)  # of the CPU path, where some are left out
VISIBLE = 0.9  # the fraction of a random mask that is True

# What a case may have beside `causal`, in words: a contender names those that it is run without. Names of cases and
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
    """Those of SUFFIXES that `values` has, each with its axes or its number behind `joint`."""
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

    def __post_init__(self) -> None:
        for name, default in (("num_heads_kv", "num_heads"), ("seqlen_k", "seqlen_q"), ("head_dim_v", "head_dim")):
            object.__setattr__(self, name, getattr(self, name) or getattr(self, default))
        if self.function and self.seqlen_q != self.seqlen_k:
            raise ValueError("function: got seqlen_q != seqlen_k, expected a square problem (alignments differ)")
        hiding = [name for name in ("blocks_kept", "mask", "causal") if getattr(self, name)]
        if hiding[1:]:
            raise ValueError(f"{hiding[0]}: got {hiding[1]} as well, expected one of them (rows might see nothing)")
        if self.mask and "k" not in self.mask:
            raise ValueError(f'mask: got axes {self.mask!r}, expected "k" among them (rows would see nothing)')
        if self.window and not self.causal:
            raise ValueError("window: got no causal, expected it as well")
        longest = max(self.lengths, default=0)
        if self.lengths and (len(self.lengths), longest, longest) != (self.batch, self.seqlen_q, self.seqlen_k):
            raise ValueError(
                f"lengths: got {self.lengths}, expected {self.batch}, of which {self.seqlen_q} the longest"
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
        dims = self.head_dim + self.head_dim_v
        if pass_ == "backward":
            dims = 3 * self.head_dim + 2 * self.head_dim_v
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
        """Fewest bytes through device memory: each input read once, each result written once. Keys that no query sees,
        for a window or a block mask, are not read.
        """
        keys = sum(math.prod(shape) for shape in (self.k_shape, self.v_shape)) * self._seen_keys // self.seqlen_k
        inputs = math.prod(self.q_shape) + keys
        out = math.prod(self.out_shape)
        lse_bytes = math.prod(self.out_shape[:3]) * ITEMSIZE[self.softmax_dtype]
        elements = inputs + out if pass_ == "forward" else 2 * (inputs + out)
        padded_bytes = elements * ITEMSIZE[self.dtype] + lse_bytes
        padded_bytes += sum(math.prod(shape) * numpy_dtype(dtype).itemsize for shape, dtype in self.terms.values())
        return padded_bytes * sum(self.lengths) // (self.batch * self.seqlen_q) if self.lengths else padded_bytes


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cases measured the same way. `kind`: "gpu" (device time), "host" (host time of a call), "cpu" (NumPy arrays).

    Peers in `only` are run on those of the cases alone, unless they are asked for by name.
    """

    kind: str
    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    passes: tuple[str, ...] = PASSES
    only: Mapping[str, tuple[Case, ...]] = field(default_factory=dict)
    about: str


def _row(head_dim: int, seqlen: int, causal: bool, dtype: str = "bfloat16") -> Case:
    """One row of the usual table: 16384 tokens in all and a model width of 2048."""
    batch, num_heads = 16384 // seqlen, 2048 // head_dim
    return Case(head_dim=head_dim, seqlen_q=seqlen, batch=batch, num_heads=num_heads, causal=causal, dtype=dtype)


def _fp(dtype: str, head_dim: int, seqlen: int, causal: bool = False) -> Case:
    return Case(dtype=dtype, head_dim=head_dim, seqlen_q=seqlen, batch=2, num_heads=16, causal=causal)


def _decode(batch: int, seqlen_k: int, seqlen_q: int) -> Case:
    return Case(head_dim=128, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=batch, num_heads=32, num_heads_kv=8)


def _host(dtype: str, head_dim: int, seqlen: int, causal: bool) -> Case:
    """A row of the CPU path: one batch entry and a model width of 512."""
    return Case(dtype=dtype, head_dim=head_dim, seqlen_q=seqlen, batch=1, num_heads=512 // head_dim, causal=causal)


# Sixteen lengths between 57 and 6400, 16 x 2048 in all.
MIXED = (57, 6400, 731, 2048, 1290, 3605, 402, 2960, 1777, 119, 4410, 863, 2511, 3333, 1500, 762)


def _packed(head_dim: int, causal: bool, lengths: tuple[int, ...] = ()) -> Case:
    """16 sequences of 2048 rows, or of such lengths."""
    seqlen = max(lengths, default=2048)
    return Case(
        head_dim=head_dim, seqlen_q=seqlen, batch=16, num_heads=2048 // head_dim, causal=causal, lengths=lengths
    )


def _options(full: Case) -> tuple[Case, ...]:
    """A row without options, full and causal, and a row for each option."""
    causal = replace(full, causal=True)
    return (
        full,
        causal,
        replace(full, softcap=20.0),
        replace(causal, alibi=True),
        *(replace(full, bias=axes) for axes in ("hqk", "qk", "bk")),
        *(replace(full, mask=axes) for axes in ("qk", "bk")),
        replace(causal, window=full.seqlen_q // 4),
        replace(full, dropout=0.1),
        replace(causal, sinks=True),
        replace(full, kv_lengths=True),
    )


def _structure(seqlen: int, num_heads: int, head_dim: int, dtype: str = "bfloat16") -> Case:
    """Triangle attention: as many rows as residues, which share a bias of pairs, and a mask of keys for each row."""
    return Case(
        head_dim=head_dim,
        seqlen_q=seqlen,
        batch=seqlen,
        num_heads=num_heads,
        dtype=dtype,
        bias="hqk",
        mask="bk",
    )


def _decode_options() -> tuple[Case, ...]:
    """One query without options, in every dtype, and a row for each option."""
    plain = _decode(1, 131072, 1)
    return (
        *(replace(plain, dtype=dtype) for dtype in ("bfloat16", "float16", "float32", "float64")),
        replace(plain, softcap=20.0),
        replace(plain, alibi=True),
        *(replace(plain, bias=axes) for axes in ("k", "hqk")),
        *(replace(plain, mask=axes) for axes in ("k", "hqk")),
        replace(plain, causal=True, window=65536),
        replace(plain, blocks_kept=0.5),
        replace(plain, dropout=0.1),
        replace(plain, sinks=True),
        replace(plain, kv_lengths=True),
        *(replace(plain, dtype=dtype, mask="hqk") for dtype in ("float32", "float64")),
    )


FA2 = tuple(_row(d, n, causal) for d in (64, 128, 256) for causal in (False, True) for n in (1024, 4096, 16384))
GROUPED = (
    Case(head_dim=128, seqlen_q=8192, batch=2, num_heads=32, num_heads_kv=8, causal=True),
    Case(head_dim=64, seqlen_q=4096, batch=4, num_heads=16, num_heads_kv=1, causal=True, dtype="float16"),
)
ODD = (
    Case(head_dim=64, seqlen_q=113, seqlen_k=203, batch=2, num_heads=3),
    Case(head_dim=128, seqlen_q=1, seqlen_k=17, batch=1, num_heads=1),
    Case(head_dim=128, seqlen_q=1000, batch=4, num_heads=16, causal=True),
    Case(head_dim=40, seqlen_q=1024, batch=4, num_heads=8),
    Case(head_dim=72, seqlen_q=1024, batch=4, num_heads=8, dtype="float16", causal=True),
    Case(head_dim=1, seqlen_q=512, batch=2, num_heads=4),
    Case(head_dim=192, head_dim_v=128, seqlen_q=2048, batch=2, num_heads=16, causal=True),
)

_ONE = Case(head_dim=64, seqlen_q=512, batch=1, num_heads=16)
RUNTIME = tuple(
    replace(_ONE, seqlen_q=512 << n, seqlen_k=512 << n, **options)
    for options, lengths in (({}, 8), ({"causal": True}, 8), ({"mask": "qk"}, 6), ({"dropout": 0.1}, 6))
    for n in range(lengths)
)
OPTION_ROWS = (*_options(_row(64, 4096, False)), *_options(_row(128, 4096, False)))
HOST_DTYPES = ("float32", "float64", "bfloat16", "float16")

SUITES = {
    "quick": Suite(
        kind="gpu",
        cases=(_row(64, 4096, True), _row(128, 1024, False), _row(128, 4096, True), _row(256, 4096, False)),
        peers=("cudnn", "fa2"),
        about="four rows of fa2, for work on a kernel",
    ),
    "fa2": Suite(
        kind="gpu",
        cases=FA2,
        peers=("cudnn", "fa2"),
        about="bfloat16, batch x seqlen = 16384, heads x head_dim = 2048",
    ),
    "grouped": Suite(
        kind="gpu", cases=GROUPED, peers=("cudnn", "fa2"), about="several query heads to one key/value head"
    ),
    "targets": Suite(
        kind="gpu", cases=FA2 + GROUPED, peers=("cudnn", "fa2"), about="the usual rows, and grouped heads"
    ),
    "runtime": Suite(
        kind="gpu",
        cases=RUNTIME,
        peers=("naive", "math", "fa2", "cudnn"),
        about="batch 1, 16 heads of 64, at every length; with a mask and with dropout as far as scores can be stored",
    ),
    "odd": Suite(kind="gpu", cases=ODD, peers=("cudnn", "fa2", "efficient", "math"), about="small and odd shapes"),
    "dims": Suite(
        kind="gpu",
        cases=tuple(
            Case(head_dim=d, head_dim_v=d_v, seqlen_q=4096, batch=4, num_heads=2048 // d, causal=causal)
            for d, d_v in ((40, 40), (80, 80), (96, 96), (192, 128), (320, 320), (512, 512), (576, 512))
            for causal in (False, True)
        ),
        peers=("cudnn", "fa2"),
        about="head dimensions between the usual ones, and above them",
    ),
    "flex": Suite(
        kind="gpu",
        cases=tuple(
            _row(d, 4096, causal, dtype)
            for dtype in ("bfloat16", "float16")
            for d in (64, 128)
            for causal in (False, True)
        ),
        peers=("flex", "cudnn", "fa2", "jax-pallas", "efficient", "math", "naive"),
        about="every peer at four shapes, JAX Pallas in float16 only",
    ),
    "sparse": Suite(
        kind="gpu",
        cases=tuple(
            Case(head_dim=d, seqlen_q=16384, batch=1, num_heads=2048 // d, blocks_kept=kept)
            for d in (64, 128)
            for kept in (0.05, 0.125, 0.25, 0.5, 1.0)
        ),
        peers=("cuflash-mask", "cuflash-dense", "flex"),
        about="time with a fraction of all blocks of 128 x 128, at random, as blocks and as pairs, and without a mask",
    ),
    "bias": Suite(
        kind="gpu",
        cases=tuple(replace(_row(d, 4096, False), bias=axes) for d in (64, 128) for axes in ("hqk", "bhqk", "k")),
        peers=("cuflash-dbias", "efficient", "efficient-dbias", "math-dbias"),
        about="a bias of some axes, without and with its gradient",
    ),
    "options": Suite(
        kind="gpu",
        cases=OPTION_ROWS,
        peers=("cuflash-dscale", "cuflash-dbias", "cudnn", "fa2", "fa4", "efficient", "flex"),
        only={
            "cuflash-dscale": tuple(case for case in OPTION_ROWS if not case.options),
            "cuflash-dbias": tuple(case for case in OPTION_ROWS if case.bias),
            # It is compiled for each case, which takes longer than all the rest.
            "flex": tuple(
                case
                for case in OPTION_ROWS
                if case.head_dim == 128
                and (case.softcap or case.alibi or case.bias in ("hqk", "qk") or case.mask == "qk" or case.window)
            ),
        },
        about=f"each option beside the plain call; masks are random and show {VISIBLE:.0%} of the pairs or keys",
    ),
    "structures": Suite(
        kind="gpu",
        cases=(
            *(_structure(*sizes) for sizes in ((256, 4, 32), (512, 4, 32), (768, 4, 32), (512, 8, 64))),
            _structure(384, 4, 32, "float32"),
        ),
        peers=("cuflash-dbias", "cuequivariance", "cudnn", "efficient", "efficient-dbias"),
        about="models of structures: rows that share a bias of pairs, each with a mask of keys; cuDNN and the efficient"
        " kernel get both as one array of all rows",
    ),
    "functions": Suite(
        kind="gpu",
        cases=tuple(
            replace(_row(d, 4096, causal), function=name)
            for d in (64, 128)
            for name in FUNCTIONS
            for causal in (False, True)
        ),
        peers=("cuflash-plain", "cuflash-gradients", "cuflash-packed", "flex"),
        about="scores and masks as functions beside the plain call and FlexAttention: "
        + "; ".join(f"{name}, {function.about}" for name, function in FUNCTIONS.items()),
    ),
    "float32": Suite(
        kind="gpu",
        cases=tuple(_fp("float32", d, 4096, causal) for d in (64, 128) for causal in (False, True)),
        peers=("cuflash-tf32", "efficient", "math", "flex", "naive"),
        about="float32 at float32 accuracy, and at that of TF32",
    ),
    "float64": Suite(
        kind="gpu",
        cases=tuple(_fp("float64", d, 2048, causal) for d in (64, 128) for causal in (False, True)),
        peers=("math", "flex", "naive"),
        about="float64",
    ),
    "decode": Suite(
        kind="gpu",
        cases=tuple(_decode(b, n, m) for b, n in ((16, 8192), (1, 131072)) for m in (1, 4, 16)),
        peers=("cudnn", "fa2"),
        passes=("forward",),
        about="few queries against a long cache; read the bytes per second",
    ),
    "decode-options": Suite(
        kind="gpu",
        cases=_decode_options(),
        peers=("cuflash-sm80", "cuflash-pages16"),
        passes=("forward",),
        about="one query against a long cache: every dtype, and each option beside the plain call, by the kernels that "
        "the device gets and by those that every device has; a mask is random and shows "
        f"{VISIBLE:.0%}, half of the blocks, and of the keys by a window, are seen",
    ),
    "paged": Suite(
        kind="gpu",
        cases=(_decode(16, 8192, 1), _decode(16, 8192, 4), _decode(2, 8192, 512)),
        peers=("cuflash-pages16", "cuflash-pages64", "cuflash-pages256"),
        passes=("forward",),
        about="keys in pages of 16, 64 and 256 beside keys in one piece; few queries, and many",
    ),
    "float8": Suite(
        kind="gpu",
        cases=tuple(_row(d, n, causal) for d in (64, 128, 256) for n in (4096, 16384) for causal in (False, True)),
        peers=("cuflash-fp8", "cudnn-fp8"),
        passes=("forward",),
        about="products of q, k and v of one byte a number (float8_e4m3fn), with scales of heads, beside bfloat16; out "
        "of cuDNN has one byte, too, and its scales are of whole arrays",
    ),
    "float8-decode": Suite(
        kind="gpu",
        cases=tuple(_decode(batch, n, 1) for batch in (1, 16) for n in (8192, 32768, 131072)),
        peers=("cuflash-fp8-cache", "cuflash-fp8"),
        passes=("forward",),
        about="one query against a cache of one byte a number (float8_e4m3fn), with scales of heads, beside bfloat16",
    ),
    "packed": Suite(
        kind="gpu",
        cases=tuple(
            _packed(d, causal, lengths) for lengths in ((), MIXED) for d in (64, 128) for causal in (False, True)
        ),
        peers=("cuflash-packed",),
        about="16 sequences of 2048 rows as a batch and packed, and as many rows in sequences of mixed lengths",
    ),
    "host": Suite(
        kind="host",
        cases=(
            Case(head_dim=64, seqlen_q=256, batch=1, num_heads=8),
            Case(head_dim=128, seqlen_q=256, batch=1, num_heads=8, num_heads_kv=2, causal=True),
        ),
        peers=("cuflash-alloc", "empty-launch", "cudnn", "fa2"),
        about="host time of one repeated call, in microseconds",
    ),
    "steps": Suite(
        kind="host",
        cases=tuple(_decode(batch, 2048, 1) for batch in (1, 16)),
        peers=("cuflash-alloc", "cuflash-steps", "cuflash-kv-lengths", "cuflash-pages16", "empty-launch"),
        passes=("forward",),
        about="host time of a step of decoding, in microseconds: the same keys again, into given arrays or new ones; a "
        "key more each time; lengths in an array; pages",
    ),
    "cpu": Suite(
        kind="cpu",
        cases=(
            *(_host(dtype, 64, n, causal) for dtype in HOST_DTYPES for causal in (False, True) for n in (1024, 4096)),
            *(_host(dtype, 128, 4096, causal) for dtype in ("float32", "bfloat16") for causal in (False, True)),
        ),
        peers=("naive", "torch-cpu"),
        about="NumPy arrays, batch 1, 8 heads of 64 or 4 of 128",
    ),
    "cpu-options": Suite(
        kind="cpu",
        cases=tuple(x for dtype in HOST_DTYPES for x in _options(_host(dtype, 64, 2048, False))),
        peers=(),
        about="NumPy arrays: each option beside the plain call; masks are random and show "
        f"{VISIBLE:.0%} of the pairs or keys",
    ),
    "cpu-decode": Suite(
        kind="cpu",
        cases=(
            *(
                Case(dtype=dtype, head_dim=128, seqlen_q=1, seqlen_k=32768, batch=1, num_heads=8)
                for dtype in HOST_DTYPES
            ),
            *(replace(_decode(1, 32768, 1), dtype=dtype) for dtype in HOST_DTYPES),
        ),
        peers=("torch-cpu",),
        passes=("forward",),
        about="NumPy arrays, one query against many keys",
    ),
    "cpu-threads": Suite(
        kind="cpu",
        cases=tuple(_host(dtype, 64, 4096, causal) for dtype in ("float32", "bfloat16") for causal in (False, True)),
        peers=tuple(f"cuflash-threads{n}" for n in THREADS),
        about="NumPy arrays, on all cores and on some of them",
    ),
    "small": Suite(
        kind="cpu",
        cases=tuple(
            Case(dtype="float32", head_dim=d, seqlen_q=n, batch=batch, num_heads=heads)
            for d, n, batch, heads in (
                (16, 1, 1, 1),
                (16, 16, 1, 4),
                (16, 16, 64, 16),
                (64, 2, 128, 128),
                (64, 64, 1, 1),
                (64, 64, 1, 8),
                (64, 64, 32, 12),
                (64, 128, 1, 32),
                (64, 128, 8, 8),
                (128, 128, 1, 1),
                (128, 128, 4, 16),
            )
        ),
        peers=("naive", "torch-cpu"),
        about="NumPy arrays, many small problems in one call, or a single one; the formula keeps P for its backward "
        "pass, cuflash does not",
    ),
}
