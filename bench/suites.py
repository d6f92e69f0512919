"""The named problems that are measured, and the suites that they form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .cases import ALL_PASSES, PASSES, THREADS, VISIBLE, Case
from .functions import FUNCTIONS


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


def _latent(batch: int, num_heads: int, seqlen_k: int) -> tuple[Case, Case]:
    """One query of wide heads, all of which share keys and values: as two arrays, and as one."""
    separate = Case(
        head_dim=576,
        head_dim_v=512,
        seqlen_q=1,
        seqlen_k=seqlen_k,
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=1,
    )
    return separate, replace(separate, v_in_k=True)


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
    """Triangle attention: as many rows as residues, which share a per-pair bias, and a mask of keys for each row."""
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
SECOND_ROWS = (  # the most important first, in case that a run is cut off
    *(_row(d, 4096, causal) for d in (128, 64) for causal in (False, True)),
    *(_fp("float32", d, 2048) for d in (128, 64)),
    *(_row(256, 4096, causal) for causal in (False, True)),
    _fp("float64", 64, 1024),
)
FUNCTION_ROWS = tuple(
    replace(_row(d, 4096, causal), function=name) for d in (64, 128) for name in FUNCTIONS for causal in (False, True)
)
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
        kind="gpu",
        cases=FA2 + GROUPED,
        peers=("cuflash-deterministic", "cudnn", "fa2", "fa3", "fa3-jax", "fa4"),
        about="the usual rows, and grouped heads",
    ),
    "deterministic": Suite(
        kind="gpu",
        cases=tuple(case for case in FA2 if case.head_dim < 256),
        peers=("cuflash-deterministic", "fold", "cudnn", "fa4"),
        about="gradients with the same bits in every run, of cuflash and of FoldAttention, compared with faster ones",
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
            for d, d_v in ((40, 40), (80, 80), (96, 96), (192, 128))
            for causal in (False, True)
        ),
        peers=("cudnn", "fa2"),
        about="head dimensions between the usual ones",
    ),
    "small-dims": Suite(
        kind="gpu",
        cases=tuple(
            Case(head_dim=d, seqlen_q=4096, batch=4, num_heads=64, causal=causal)
            for d in (2, 3, 8, 16, 32)
            for causal in (False, True)
        ),
        peers=("cudnn", "fa2", "efficient"),
        about="small head dimensions; all have as many pairs of queries and keys, so that times of all rows compare",
    ),
    "wide-dims": Suite(
        kind="gpu",
        cases=tuple(
            Case(head_dim=d, head_dim_v=d_v, seqlen_q=4096, batch=4, num_heads=2048 // d, causal=causal)
            for d, d_v in ((256, 256), (320, 320), (512, 512), (576, 512), (768, 768), (1024, 1024))
            for causal in (False, True)
        ),
        peers=("cudnn", "fa2", "efficient"),
        about="wide head dimensions compared with 256",
    ),
    "architectures": Suite(
        kind="gpu",
        cases=tuple(_row(d, 4096, causal, "float16") for d in (64, 128, 256) for causal in (False, True)),
        peers=("cuflash-sm75", "cuflash-sm80", "fa2"),
        about="kernels for compute capability 7.5 and 8.0 on a later device, compared with those that it gets; 16384 "
        "rows, heads x head_dim = 2048",
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
        peers=("cuflash-mask", "cuflash-dense", "flex", "cudnn-flex"),
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
        about=f"each option compared with the plain call; masks are random and show {VISIBLE:.0%} of the pairs or keys",
    ),
    "structures": Suite(
        kind="gpu",
        cases=(
            *(_structure(*sizes) for sizes in ((256, 4, 32), (512, 4, 32), (768, 4, 32), (512, 8, 64))),
            _structure(384, 4, 32, "float32"),
        ),
        peers=("cuflash-dbias", "cuequivariance", "cudnn", "efficient", "efficient-dbias"),
        about="models of structures: rows that share a per-pair bias, each with a mask of keys; cuDNN and the efficient"
        " kernel get both as one array of all rows",
    ),
    "functions": Suite(
        kind="gpu",
        cases=FUNCTION_ROWS,
        peers=("cuflash-plain", "cuflash-gradients", "cuflash-packed", "cuflash-deterministic", "flex", "cudnn-flex"),
        only={"cudnn-flex": tuple(case for case in FUNCTION_ROWS if FUNCTIONS[case.function].is_mask)},
        about="scores and masks as functions, compared with the plain call and FlexAttention: "
        + "; ".join(f"{name}, {function.about}" for name, function in FUNCTIONS.items()),
    ),
    "second": Suite(
        kind="gpu",
        cases=SECOND_ROWS,
        peers=("jvp-flash-attention", "math-second", "naive-second"),
        # Those that store scores compute hidden pairs as well.
        only={name: tuple(x for x in SECOND_ROWS if not x.causal) for name in ("math-second", "naive-second")},
        passes=ALL_PASSES,
        about="second derivatives with tangents of q, k and v, over 6, 10 and 16 products; the double backward pass is "
        "jvp and backward_jvp; bfloat16, batch x seqlen = 16384, heads x head_dim = 2048, and wide dtypes",
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
        about="decode against a long KV cache; read the bytes per second",
    ),
    "decode-wide": Suite(
        kind="gpu",
        cases=(*_latent(32, 16, 8192), *_latent(8, 128, 16384), *_latent(1, 128, 65536)),
        peers=("cudnn", "fa2"),
        passes=("forward",),
        about="one query of heads of 576 and 512 columns, which share keys and values, these in an array of their own "
        "or the first columns of the keys; for each byte, 128 heads make 128 operations, or 242",
    ),
    "decode-options": Suite(
        kind="gpu",
        cases=_decode_options(),
        peers=("cuflash-sm80", "cuflash-pages16"),
        passes=("forward",),
        about="one query against a long cache: every dtype, and each option compared with the plain call, by the "
        "kernels that the device gets and by those that every device has; a mask is random and shows "
        f"{VISIBLE:.0%}, half of the blocks, and of the keys by a window, are seen",
    ),
    "paged": Suite(
        kind="gpu",
        cases=(_decode(16, 8192, 1), _decode(16, 8192, 4), _decode(2, 8192, 512)),
        peers=("cuflash-pages16", "cuflash-pages64", "cuflash-pages256"),
        passes=("forward",),
        about="keys in pages of 16, 64 and 256, compared with keys in one piece; decode and prefill",
    ),
    "float8": Suite(
        kind="gpu",
        cases=tuple(_row(d, n, causal) for d in (64, 128, 256) for n in (4096, 16384) for causal in (False, True)),
        peers=("cuflash-fp8", "cudnn-fp8"),
        passes=("forward",),
        about="products of fp8 q, k and v (float8_e4m3fn), with scales of heads, compared with bfloat16; out "
        "of cuDNN is fp8, too, and its scales are of whole arrays",
    ),
    "float8-decode": Suite(
        kind="gpu",
        cases=tuple(_decode(batch, n, 1) for batch in (1, 16) for n in (8192, 32768, 131072)),
        peers=("cuflash-fp8-cache", "cuflash-fp8"),
        passes=("forward",),
        about="one query against an fp8 cache (float8_e4m3fn), with scales of heads, compared with bfloat16",
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
        peers=("cuflash-bound", "cuflash-alloc", "empty-launch", "cudnn", "fa2"),
        about="host time of one repeated call, in microseconds",
    ),
    "steps": Suite(
        kind="host",
        cases=tuple(_decode(batch, 2048, 1) for batch in (1, 16)),
        peers=(
            "cuflash-bound",
            "cuflash-alloc",
            "cuflash-steps",
            "cuflash-bound-steps",
            "cuflash-kv-lengths",
            "cuflash-pages16",
            "empty-launch",
        ),
        passes=("forward",),
        about="host time of a step of decoding, in microseconds: the same keys again, into given arrays or new ones; a "
        "key more each time; bound calls; lengths in an array; pages",
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
    "cpu-avx2": Suite(
        kind="cpu",
        cases=(
            *(_host("float32", d, n, causal) for d in (64, 128) for causal in (False, True) for n in (256, 1024)),
            *(
                Case(dtype="float32", head_dim=d, seqlen_q=n, batch=1, num_heads=heads, causal=causal)
                for d, n, heads in ((64, 4096, 1), (128, 4096, 1), (64, 1024, 16))
                for causal in (False, True)
            ),
            Case(dtype="float32", head_dim=64, seqlen_q=128, batch=16, num_heads=12),
            *(_host(dtype, 64, 1024, causal) for dtype in HOST_DTYPES[1:] for causal in (False, True)),
        ),
        peers=("torch-cpu", "onnxruntime", "openvino"),
        about="NumPy arrays, on a processor with AVX2 and no AVX-512; threads of no library spin between calls",
    ),
    "cpu-options": Suite(
        kind="cpu",
        cases=tuple(x for dtype in HOST_DTYPES for x in _options(_host(dtype, 64, 2048, False))),
        peers=(),
        about="NumPy arrays: each option compared with the plain call; masks are random and show "
        f"{VISIBLE:.0%} of the pairs or keys",
    ),
    "cpu-second": Suite(
        kind="cpu",
        cases=tuple(_host(dtype, 64, 1024, causal) for dtype in HOST_DTYPES for causal in (False, True)),
        peers=("math-second", "naive-second"),
        passes=ALL_PASSES,
        about="NumPy arrays: second derivatives with tangents of q, k and v, over 6, 10 and 16 products",
    ),
    "cpu-functions": Suite(
        kind="cpu",
        cases=tuple(
            replace(_host(dtype, 64, 1024, causal), function=name)
            for dtype in ("float32", "bfloat16")
            for name in FUNCTIONS
            for causal in (False, True)
        ),
        peers=("cuflash-plain", "cuflash-gradients"),
        about="NumPy arrays: scores and masks as functions, those of the suite functions, compared with the plain call",
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
