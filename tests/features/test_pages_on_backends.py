"""Paged key/value caches on every backend: by the oracle rule, and as the same keys are in one piece."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.spec.problem import PAGE_SIZES
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.judging import assert_oracle, assert_same_bits

FEW, MANY = 3, 150  # queries: by the kernels of decode, and by those of tiles of queries
SIZES: dict[str, Any] = {"batch": 3, "num_heads": 4, "num_heads_kv": 2, "head_dim": 72, "head_dim_v": 40}
ON_CPU = {CORE: ("float32", "bfloat16"), FALLBACK: ("float32", "bfloat16")}
EVERYWHERE: dict[str, Any] = ON_CPU | {
    "emulated 9.0": ("float16",), "emulated 8.0": ("float16", "float32"), DEVICE: ("bfloat16", "float32")
}  # fmt: skip
every_backend = on_backends(EVERYWHERE, emulated=8)
few_and_many = pytest.mark.parametrize("seqlen_q", [FEW, MANY])


def case_of(backend, dtype, seqlen_q, **options):
    """Lengths end within a page, with a page, and after one key; on a device there are more keys."""
    keys = 2048 if backend.name == DEVICE else 576
    lengths = (keys * 2 // 3 + 5, 1, keys)
    sizes: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_k": keys, "kv_lengths": lengths, "page_size": 64}
    return ct.Case(**SIZES | sizes | {"dtype": dtype} | options)


def assert_right(backend, case):
    """By the oracle rule, and with the same bits once more, in arrays of the caller."""
    results = backend.results(case)
    assert_oracle(case, results)
    assert_same_bits(backend.results(case, into_nan=True), results)


@on_backends((DEVICE,), device=1)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seqlen_q", [1, 5, 300])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sizes(backend, head_dim, seqlen_q, page_size):
    own = {"head_dim": head_dim, "head_dim_v": head_dim, "causal": True, "page_size": page_size}
    layout = "bshd" if page_size in (32, 128) else "bhsd"
    assert_right(backend, case_of(backend, "bfloat16", seqlen_q, layout=layout, **own))


@on_backends({DEVICE: ("float16", "float32", "float64")})
@pytest.mark.parametrize(
    "options",
    [
        {"causal": "top_left"},
        {"window": (300, 0), "layout": "bshd"},
        {"softcap": 3.0, "alibi_slopes": (3, 4), "bias": (1, 4, 70, 2048), "mask": (3, 1, 1, 2048), "causal": True},
        {"sinks": True, "causal": True, "dropout": 0.2},
        {"strides": "padded", "causal": True},
        {"strides": "transposed"},
        {"kv_lengths_dtype": "int64", "head_dim": 40, "head_dim_v": 72},
    ],
    ids=str,
)
def test_options(backend, dtype, options):
    assert_right(backend, case_of(backend, dtype, 70, **{"head_dim": 64, "head_dim_v": 64, "page_size": 32} | options))


@on_backends(EVERYWHERE | {DEVICE: ("bfloat16",)}, emulated=8)
@few_and_many
@pytest.mark.parametrize("head_dim", [72, 70])  # rows of 70 are no multiples of 16 bytes: other kernels
def test_bits_are_those_of_keys_in_one_piece(backend, dtype, seqlen_q, head_dim):
    """A tile may start within a page. The first query of an entry attends to its last key, as without pages."""
    keys = {} if backend.name == DEVICE else {"seqlen_k": 768, "kv_lengths": (619, 768, 7)}
    sizes = PAGE_SIZES if backend.is_cpu else PAGE_SIZES[::2]
    for page_size, layout in itertools.product(sizes, ("bhsd", "bshd") if backend.is_cpu else ("bhsd",)):
        own = {"head_dim": head_dim, "page_size": page_size, "layout": layout}
        case = case_of(backend, dtype, seqlen_q, **own | keys)
        whole = ct.gather_pages(case.arrays(), layout)
        assert_same_bits(backend.results(case), backend.results(case, whole))


@every_backend
@few_and_many
def test_entries_behind_the_lengths_are_never_looked_up(backend, dtype, seqlen_q):
    case = case_of(backend, dtype, seqlen_q)
    arrays = case.arrays()
    expected = backend.results(case, arrays)
    table = arrays["block_table"]
    behind = table < 0
    assert behind.any()
    assert_same_bits(backend.results(case, arrays | {"block_table": np.where(behind, 2**31 - 1, table)}), expected)


@on_backends((CORE, FALLBACK))
def test_where_pages_lie_does_not_matter(backend):
    def holds(case, random):
        arrays = case.arrays()
        expected = backend.results(case, arrays)
        order = np.array(random.sample(range(len(arrays["k"])), len(arrays["k"])))
        table = arrays["block_table"]
        moved = np.where(table < 0, table, np.argsort(order).astype(np.int32)[table])
        pools = {name: arrays[name][order] for name in "kv"}
        assert_same_bits(backend.results(case, arrays | pools | {"block_table": moved}), expected)

    cases = ct.cases(features=("causal", "window", "pages"), ndims=[4], max_head_dim=40)
    random = st.randoms(use_true_random=False)
    backend.draw(30, holds, case=cases.filter(lambda case: case.page_size), random=random)


kernels = on_backends({name: own for name, own in EVERYWHERE.items() if name not in ON_CPU}, emulated=8)


@kernels
@few_and_many
def test_entries_that_are_no_page_are_moved_to_one(backend, dtype, seqlen_q):
    """Looking at them would synchronise."""
    case = case_of(backend, dtype, seqlen_q, causal=backend.name != DEVICE)
    arrays = case.arrays()
    arrays["k"], arrays["v"] = (np.nan_to_num(arrays[name]) for name in "kv")
    last, table = len(arrays["k"]) - 1, arrays["block_table"]
    table[0, :3], table[2, 1:3] = (-1, last + 1, 2**31 - 1), (-(2**31), last)
    wild = backend.results(case, arrays)
    table[0, :3], table[2, 1:3] = (0, last, last), (0, last)
    assert_same_bits(backend.results(case, arrays), wild)


@kernels
@few_and_many
def test_lengths_out_of_range_are_clamped(backend, dtype, seqlen_q):
    case = case_of(backend, dtype, seqlen_q)
    case = replace(case, kv_lengths=(0, case.seqlen_k, case.seqlen_k))
    arrays = case.arrays()
    tame = backend.results(case, arrays)
    arrays["kv_lengths"][...] = (-7, case.seqlen_k + 1, 2**31 - 1)
    assert_same_bits(backend.results(case, arrays), tame)


# ---- Tangents --------------------------------------------------------------------------------------------------------


def entry_of(x, b, batch, keys=None):
    """What an array that broadcasts to (batch, ...) has for one entry, with so many keys."""
    x = x[b : b + 1] if x.ndim == 4 and x.shape[0] == batch > 1 else x
    return x[..., :keys] if keys is not None and x.shape[-1] > 1 else x


def check_tangents(backend, case):
    """They are those of each entry by itself, with as many keys as it has; tk and tv are pools, as k and v are."""
    arrays, random = case.arrays(), np.random.default_rng(0)
    arrays = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
    moving = [name for name in ("q", "k", "v", "bias", "alibi_slopes", "sinks") if name in arrays]
    tangents = {f"t{name}": random.standard_normal(arrays[name].shape).astype(arrays[name].dtype) for name in moving}
    found = backend.jvp(case.options, arrays | tangents)
    pools = {"k": tangents["tk"], "v": tangents["tv"]}
    whole, moved = (ct.gather_pages(arrays | own, case.layout) for own in ({}, pools))
    close = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-3, "bfloat16": 4e-2}[case.dtype] * case.score_spread
    for b, length in enumerate(case.kv_lengths):
        first = np.s_[b : b + 1, :, :length] if case.layout == "bhsd" else np.s_[b : b + 1, :length]
        own: dict[str, Any] = {"q": whole["q"][b : b + 1], "tq": tangents["tq"][b : b + 1]}
        own |= {name: np.ascontiguousarray(whole[name][first]) for name in "kv"}
        own |= {f"t{name}": np.ascontiguousarray(moved[name][first]) for name in "kv"}
        for name in {"bias", "mask", "tbias"} & (arrays | tangents).keys():
            own[name] = entry_of((arrays | tangents)[name], b, case.batch, length)
        for name in {"sinks", "tsinks", "alibi_slopes", "talibi_slopes"} & (arrays | tangents).keys():
            x = (arrays | tangents)[name]
            own[name] = x[b] if x.ndim == 2 else x
        for name, x in backend.jvp(case.options, own).items():
            expected, got = x.astype(float), found[name][b : b + 1].astype(float)
            size = np.abs(expected, where=np.isfinite(expected), out=np.ones(expected.shape)).max(initial=1)
            np.testing.assert_allclose(got, expected, rtol=close, atol=close * size)


WITH_SINKS: dict[str, Any] = {"softcap": 3.0, "sinks": True, "causal": True}
OF_TANGENTS: dict[str, Any] = {
    "emulated 8.0": [
        {"dtype": "float16", **WITH_SINKS}, {"dtype": "float64", "layout": "bshd", "window": (60, 3)}
    ],
    DEVICE: [{"dtype": dtype, **WITH_SINKS} for dtype in ("bfloat16", "float32", "float64")],
}  # fmt: skip


@on_backends(OF_TANGENTS, of="options", emulated=8)
def test_tangents(backend, options):
    case = case_of(backend, seqlen_q=70, **options)
    check_tangents(backend, replace(case, kv_lengths=(203, 3, 130), seqlen_k=256))


@on_backends((CORE, FALLBACK))
def test_tangents_of_drawn_problems(backend):
    features = ("causal", "window", "softcap", "bias", "mask", "alibi_slopes", "gqa", "head_dim_v", "sinks", "pages")
    cases = ct.cases(features=features, ndims=[4], max_head_dim=40, dtypes=["float64"], strides=["contiguous"])
    backend.draw(40, lambda case: check_tangents(backend, case), case=cases.filter(lambda case: case.page_size))
