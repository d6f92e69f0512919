"""Lists of options on kernels, in both passes by the oracle rule: dropout, block masks, and what makes scores."""

import itertools
from typing import Any

import pytest

import cuflash.testing as ct
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.judging import assert_oracle, assert_same_bits

DTYPES = ("float16", "bfloat16", "float32", "float64")
SIZES: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
LENGTHS: dict[str, Any] = {"seqlen_q": 300, "seqlen_k": 421}
BLOCKS: dict[str, Any] = {"seqlen_q": 700, "seqlen_k": 900, "block_mask": (2, 4)}


def case_of(options):
    """ "m" and "n" in shapes are the numbers of queries and keys."""
    own = SIZES | LENGTHS | options
    lengths = {"m": own["seqlen_q"], "n": own["seqlen_k"]}
    own |= {name: tuple(lengths.get(n, n) for n in own[name]) for name in {"bias", "mask"} & own.keys()}
    return ct.Case(**own)


def each(dtypes, *options):
    return [{"dtype": dtype, **own} for dtype in dtypes for own in options]


def served(rows):
    """Without heads of float64 for which the backward pass needs too much shared memory."""
    return [own for own in rows if own["dtype"] != "float64" or own.get("head_dim", 64) <= 128]


DROPOUT: list[dict[str, Any]] = [
    {"head_dim": head_dim, "causal": causal, "dropout": rate, "strides": strides, "seed": head_dim}
    for head_dim, causal, rate, strides in itertools.product(
        (64, 128, 256), (False, True), (0.1, 0.9), ("contiguous", "padded")
    )
]
BLOCK_MASKS: list[dict[str, Any]] = [
    {"block_size": (128, 128)},
    {"block_size": (64, 48), "causal": True},
    {"block_size": (16, 16), "window": (300, 50), "block_mask": (4,)},
    {"block_size": (128, 64), "kv_lengths": (0, 700), "layout": "bshd", "block_mask": (2, 1)},
    {"block_size": (256, 128), "mask": (2, 1, 1, 900), "bias": (4, 1, 1), "softcap": 5.0, "block_mask": ()},
    {"block_size": (128, 128), "dropout": 0.3, "causal": True, "blocks_kept": 0.2},
    {"block_size": (128, 128), "strides": "padded", "sinks": True, "alibi_slopes": (4,)},
]
# A bias of every axis, and of few of them; with what else acts on scores.
SCORES: list[dict[str, Any]] = [
    {"bias": (2, 4, 1, 1), "causal": True},
    {"bias": (4, "m", "n"), "window": (40, 3), "alibi_slopes": (4,), "softcap": 5.0, "dlse": True},
    {"bias": (2, 1, "m", "n"), "bias_holes": True, "mask": (2, 4, 1, "n"), "alibi_slopes": (2, 4), "strides": "padded"},
    {"bias": ("n",), "kv_lengths": (0, 7), "layout": "bshd", "softcap": 50.0, "bias_dtype": "input"},
    {"bias": ("m", 1), "dropout": 0.3, "causal": "top_left", "softcap": 0.5, "sinks": True},
    {"bias": (1, 1), "scale": -0.25, "strides": "flipped", "alibi_slopes": (4,)},
    {"bias": (4, "m", 1), "block_mask": (2, 4), "block_size": (48, 80), "alibi_slopes": (4,), "softcap": 5.0},
]
ON_DEVICE = each(
    DTYPES,
    *DROPOUT,
    *(BLOCKS | own for own in BLOCK_MASKS),
    *({"seqlen_q": m, "seqlen_k": n, **own} for m, n in ((5, 9), (113, 203), (300, 1000)) for own in SCORES),
)
SMALL: dict[str, Any] = {"seqlen_q": 150, "seqlen_k": 200, "num_heads": 2, "num_heads_kv": 1}
PLAIN, CAPPED = SMALL | {"dropout": 0.25}, SMALL | {"dropout": 0.25, "softcap": 2.0}
HIDING = SMALL | {"dropout": 0.25, "kv_lengths": (70, 200), "mask": (150, 200)}
# A sink is never dropped, and what dropout does to dP is done before delta and dlse join it.
WITH_SINKS: dict[str, Any] = {
    "seqlen_q": 150, "seqlen_k": 140, "causal": True, "kv_lengths": (100, 0), "sinks": True, "dlse": True,
    "dropout": 0.3, "score_spread": 4.0,
}  # fmt: skip
ROWS = {
    "emulated 8.0": [
        *each(("float16", "float64"), PLAIN), *each(("bfloat16",), CAPPED), *each(("float32",), HIDING),
        *each(("float64",), WITH_SINKS),
    ],
    "emulated 9.0": [
        *each(("bfloat16",), PLAIN, WITH_SINKS), *each(("float16", "float64"), CAPPED), *each(("float32",), HIDING),
        *each(("float32",), WITH_SINKS),
    ],
    DEVICE: served(ON_DEVICE),
}  # fmt: skip


@on_backends(ROWS, of="options", emulated=8, device=1)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_gradient(backend, options, deterministic):
    backend.judge(case_of(options), deterministic=deterministic)


OTHERS: list[dict[str, Any]] = [
    {"window": (70, 9)},
    {"softcap": 3.0, "alibi_slopes": (4,)},
    {"bias": ("m", "n"), "mask": (4, "m", "n")},
    {"kv_lengths": (7, 400), "layout": "bshd"},
    {"head_dim_v": 40},
]
LONG: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_heads_kv": 2, "seqlen_q": 1500, "seqlen_k": 2049}
HEADS: dict[str, Any] = {"bias": (4, "m", "n"), "softcap": 5.0, "alibi_slopes": (4,), "seqlen_q": 200, "seqlen_k": 333}
CAUSAL_BLOCKS: dict[str, Any] = BLOCKS | {"seqlen_q": 500, "seqlen_k": 600, "block_size": (128, 128), "causal": True}
SOME = [
    *each(("bfloat16", "float32"), *({"dropout": 0.2, "seed": 1, **own} for own in OTHERS)),
    *each(("bfloat16", "float32"), *(LONG | {"head_dim": n, "causal": True, "dropout": 0.1} for n in (64, 128))),
    {"dtype": "float16", "seqlen_q": 100, "seqlen_k": 90, "head_dim": 40, "dropout": 0.4, "strides": "transposed"},
    {"dtype": "bfloat16", "seqlen_q": 3, "seqlen_k": 3000, "batch": 1, "num_heads": 8, "head_dim": 128, "dropout": 0.1},
    *each(DTYPES, *(CAUSAL_BLOCKS | {"head_dim": n} for n in (16, 128, 192, 256))),
    *each(DTYPES, BLOCKS | {"seqlen_q": 3, "seqlen_k": 3000, "block_size": (16, 128), "causal": True}),
]


@on_backends({DEVICE: SOME}, of="options")
def test_gradients_of_inputs(backend, options):
    case = case_of(options)
    assert_oracle(case, backend.results(case))


# The last one sums over more tiles than the device has blocks.
OF_SCORES = [
    *each(DTYPES, *(HEADS | {"head_dim": n} for n in (24, 128, 256))),
    {
        "dtype": "bfloat16", "batch": 3, "seqlen_q": 1000, "seqlen_k": 3000, "bias": (1, 1, 1, "n"),
        "alibi_slopes": (4,), "window": (500, 0),
    },
]  # fmt: skip


@on_backends({DEVICE: OF_SCORES}, of="options")
def test_gradients_of_scores(backend, options):
    case = case_of(options)
    need = [name for name in ct.gradients_of(case.problem) if name not in ("dq", "dk", "dv")]
    assert_oracle(case, backend.results(case, need=need))


# ---- Lengths and heads -----------------------------------------------------------------------------------------------


def product(base, **values):
    """Options of `base` with each choice of the others, whose values are options themselves or of their name."""
    for choice in itertools.product(*values.values()):
        own = dict(base)
        for name, x in zip(values, choice, strict=True):
            own |= x if isinstance(x, dict) else {name: x}
        yield own


def heads(num_heads, num_heads_kv, **options):
    return {"batch": 1, "num_heads": num_heads, "num_heads_kv": num_heads_kv, **options}


DIMS, SHORT = (64, 128, 256), (1, 2, 130)
LONG_KEYS = heads(2, 1, seqlen_q=1500, seqlen_k=2049)
OF_FORWARD = [
    *product(LONG_KEYS, head_dim=DIMS, causal=(False, True), dtype=DTYPES),
    # From 2048 keys on, some devices have tiles of their own.
    *product(
        heads(2, 2, seqlen_q=333, seqlen_k=2111, dtype="bfloat16"),
        head_dim=(96, 128, 256), own=({}, {"causal": True}, {"softcap": 9.0}),
    ),
    *product(
        heads(6, 2, batch=3, seqlen_k=2100, dtype="float16", causal=True),
        seqlen_q=(1, 2, 3, 5, 8, 15, 16), head_dim=DIMS,
    ),
    # Blocks that stay take several tiles of queries, in pairs under a causal mask: odd and even numbers of them.
    *product(
        heads(26, 13, batch=7, seqlen_k=200), dtype=("bfloat16", "float32"), causal=(False, "top_left"),
        own=[
            {"head_dim": dim, "seqlen_q": n} for dim, n in ((64, 500), (64, 700), (128, 500), (128, 700), (256, 300))
        ],
    ),
    *product(
        heads(1, 1, batch=3, dtype="float16"), seqlen_q=SHORT, seqlen_k=SHORT, causal=(False, True, "top_left")
    ),
]  # fmt: skip


@on_backends({DEVICE: OF_FORWARD}, of="options")
def test_forward(backend, options):
    case = case_of(options)
    assert_oracle(case, backend.results(case, need=()))


MANY_KEYS = 8192
# Splits of the keys of which some are empty, or end within a tile.
FEW_KEYS: list[dict[str, Any]] = [
    {"kv_lengths": (0, 1, 4095, MANY_KEYS)},
    {"kv_lengths": (64, 65, 130, 8191), "causal": True},
    {"causal": "top_left", "kv_lengths": (2, 3, 4, 5)},
    {"causal": "lengths", "kv_lengths": (2, 65, 4095, MANY_KEYS), "window": (2000, None)},
    {"window": (1000, None)},
    {"window": (2000, 0), "kv_lengths": (MANY_KEYS, 100, 7000, 0)},
    {"score_spread": 30.0},
    {"scale": -0.2},
    {"softcap": 3.0, "score_spread": 8.0},
    {"alibi_slopes": (4, 8), "causal": True},
    {"bias": (8, 4, MANY_KEYS), "bias_dtype": "input"},
    {"bias": (4, 1, 1, MANY_KEYS), "softcap": 20.0, "sinks": True},
]
DECODING = [
    *product(
        {"seqlen_k": MANY_KEYS, "head_dim": 128, "causal": True}, seqlen_q=(1, 3, 4, 8, 16),
        own=[heads(2 * group, 2, batch=2) for group in (1, 4, 8)], dtype=("float16", "bfloat16"),
    ),
    *product(
        heads(6, 2, batch=3, seqlen_q=4, seqlen_k=3001, dtype="bfloat16"), layout=("bhsd", "bshd"),
        own=[{"head_dim": m, "head_dim_v": n} for m, n in ((64, 64), (96, 40), (192, 128), (256, 256))],
    ),
    *product(
        heads(8, 2, batch=4, seqlen_q=4, seqlen_k=MANY_KEYS, head_dim=128, dtype="float16"), own=FEW_KEYS
    ),
    # From many blocks that share the keys of a head to many heads of a block.
    *product(
        heads(16, 4, seqlen_k=1500, head_dim=128, dtype="float16", causal=True),
        batch=(1, 8, 33, 50, 64, 99), seqlen_q=(1, 7),
    ),
]  # fmt: skip


@on_backends({DEVICE: DECODING}, of="options")
def test_decoding(backend, options):
    """And the same bits once more, in arrays of the caller."""
    case = case_of(options)
    results = backend.results(case, need=())
    assert_oracle(case, results)
    assert_same_bits(backend.results(case, need=(), into_nan=True), results)


BETWEEN = ((16, 8), (16, 16), (32, 32), (24, 64), (80, 80), (96, 128), (160, 160))
OF_BACKWARD = [
    *product(
        LONG_KEYS, causal=(False, True), deterministic=(False, True),
        own=[*each(("float16", "float32", "float64"), {"head_dim": 64}), {"head_dim": 128, "dtype": "bfloat16"},
             {"head_dim": 256, "dtype": "float16"}],
    ),
    *(
        own
        for own in product(
            heads(4, 2, seqlen_q=403, seqlen_k=700, dtype="bfloat16"), deterministic=(False, True),
            dims=[{"head_dim": m, "head_dim_v": n} for m, n in BETWEEN],
            own=({"causal": True}, {"bias": (4, 403, 1)}, {"mask": (403, 700)}),
        )
        if not (own["deterministic"] and "mask" in own)
    ),
    *product(
        heads(1, 1, batch=3, dtype="float16"), seqlen_q=SHORT, seqlen_k=SHORT, deterministic=(False, True),
        causal=(False, True),
    ),
]  # fmt: skip


@on_backends({DEVICE: OF_BACKWARD}, of="options")
def test_backward(backend, options):
    deterministic = options["deterministic"]
    case = case_of({name: x for name, x in options.items() if name != "deterministic"})
    assert_oracle(case, backend.results(case, deterministic=deterministic))


@on_backends((CORE, FALLBACK))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seqlen_k", [1, 9])
def test_the_gradient_of_a_bias_of_one_number_is_a_sum_over_many_rows(backend, dtype, seqlen_k):
    """Rounded row by row, it is farther from the oracle than the plain formula, whose sums are those of NumPy."""
    sizes: dict[str, Any] = {"seqlen_q": 600, "seqlen_k": seqlen_k, "batch": 2, "num_heads": 8, "head_dim": 8}
    for seed in range(4):
        case = ct.Case(**sizes, dtype=dtype, bias=(2, 1, 1, 1), has_values=False, dlse=True, seed=seed)
        assert_oracle(case, backend.results(case, need=("dbias",)))
