"""jvp and backward_jvp of CuPy arrays: by the oracle rule, on streams, in graphs, and on batch axes."""

import itertools
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.testing import Case, check_gradients
from cuflash.testing.tangents import Moved, assert_tangents, movable, tangents_by
from tests.gpu.planned import is_sm90

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


def computed(case, moved):
    """The results of both passes by name."""
    return tangents_by(cuflash.FlashAttention(**case.keywords), case, moved, convert=cupy.asarray)


# sm90/backward_jvp.cu: each consumer has keys of its own, or both share them, or stages hold half a tile of queries.
OF_SM90 = [
    {"causal": True},
    {"window": (200, 50), "dtype": "float16", "dropout": 0.2},
    {"kv_lengths": (333, 100), "sinks": True, "dlse": True},
    {"bias": (4, 333, 413), "alibi_slopes": (4,), "softcap": 5.0},
    {"score_spread": 30.0},
]


SIZES: dict[str, Any] = {"seqlen_q": 333, "seqlen_k": 413, "num_heads": 4, "num_heads_kv": 2, "batch": 2}
DIMS = (40, 64, 96, 128, 192, 256)
WITHOUT_TDOUT = [
    *itertools.product(({},), DIMS, (0.0, 10.0, 100.0)),
    # The kernels of bf16 terms: for enough scores that splitting pays.
    *itertools.product(({"dtype": "float32"},), (20, 64, 96, 128), (0.0, 10.0)),
]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("dtype", "head_dim", "common"), WITHOUT_TDOUT)
@pytest.mark.parametrize("own", OF_SM90, ids=str)
def test_without_tdout(own, dtype, head_dim, common):
    case = Case(**{**SIZES, "dtype": "bfloat16", "head_dim": head_dim, **own, **dtype})
    names = tuple(movable(case)) if case.softcap is not None else ("q", "k", "v")
    moved = Moved(names=names, cotangents=("tdlse",) if case.dlse else (), common=common)
    assert_tangents(case, moved, computed(case, moved))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_float32_results_have_the_same_bits_whatever_is_needed(head_dim, causal):
    """But tdq: it is a sum of atomic additions, in no fixed order."""
    if not is_sm90():
        pytest.skip("float32 is served by the kernels of bf16 terms on compute capability 9.0 alone")
    q, k, v, dout, tq, tk, tv = cupy.random.default_rng(0).standard_normal((7, 2, 4, 1000, head_dim), dtype=np.float32)
    attention, tangents = cuflash.FlashAttention(causal=causal), {"tq": tq, "tk": tk, "tv": tv}
    given = (dout, q, k, v, *attention.jvp(q, k, v, **tangents))
    whole = attention.backward_jvp(*given, **tangents)
    for need in itertools.chain.from_iterable(itertools.combinations(("tdq", "tdk", "tdv"), n) for n in (1, 2)):
        part = attention.backward_jvp(*given, **tangents, need=need)
        for name in need:
            x, y = getattr(part, name), getattr(whole, name)
            if name == "tdq":
                assert float(abs(x - y).max()) <= 1e-6 * float(abs(y).max())
            else:
                cupy.testing.assert_array_equal(x, y, err_msg=f"{name} of {need}")


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("tdout", "deterministic"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("own", OF_SM90, ids=str)
def test_with_tdout_or_in_order(own, head_dim, tdout, deterministic):
    case = Case(**{**SIZES, "dtype": "bfloat16", "head_dim": head_dim, **own})
    moved = Moved(names=("q", "k", "v"), cotangents=(*["tdout"] * tdout, *["tdlse"] * case.dlse))
    attention = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
    assert_tangents(case, moved, tangents_by(attention, case, moved, convert=cupy.asarray))


@pytest.mark.parametrize("heads_kv", [40, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_wait_for_their_turns_repeat_results(causal, head_dim, heads_kv):
    """With more blocks than the device runs at a time."""
    random = cupy.random.default_rng(0)
    of_q, of_k = (40, 1100, head_dim), (heads_kv, 1100, head_dim)
    shapes = (of_q, of_k, of_k, of_q, of_k, of_k, of_q)
    q, k, v, tq, tk, tv, dout = (random.standard_normal((1, *x), dtype=np.float32).astype(np.float16) for x in shapes)
    tangents = {"tq": tq, "tk": tk, "tv": tv}
    fast, fixed = (cuflash.FlashAttention(causal=causal, deterministic=x) for x in (False, True))
    results = fast.jvp(q, k, v, **tangents)
    right, first, *others = (a.backward_jvp(dout, q, k, v, *results, **tangents) for a in (fast, *[fixed] * 5))
    for x, y in zip(first, right, strict=True):
        x, y = x.astype(np.float32), y.astype(np.float32)
        assert float(abs(x - y).max()) <= 4e-3 * float(abs(y).max())
    for other in others:
        for x, y in zip(other, first, strict=True):
            cupy.testing.assert_array_equal(x, y)


def test_what_blocks_add_to_memory_differs_in_the_last_digits_alone():
    random = cupy.random.default_rng(0)
    q, k, v, tq, tk, tv, dout = random.standard_normal((7, 2, 3, 700, 64), dtype=np.float32).astype(np.float16)
    tangents = {"tq": tq, "tk": tk, "tv": tv}
    fast, fixed = (cuflash.FlashAttention(causal=True, deterministic=x) for x in (False, True))
    results = fast.jvp(q, k, v, **tangents)
    one, two, right = (a.backward_jvp(dout, q, k, v, *results, **tangents) for a in (fast, fast, fixed))
    for name in ("tdk", "tdv"):
        cupy.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    for x, y in zip((*one, *two), (*right, *right), strict=True):
        x, y = x.astype(np.float32), y.astype(np.float32)
        assert float(abs(x - y).max()) <= 4e-3 * float(abs(y).max())


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("bias", [(3, 2, 1, 17, 19), (2, 2, 17, 19), (2, 1, 1, 19)])
def test_batch_axes_that_broadcast(dtype, bias):
    random = np.random.default_rng(1)
    shapes = {"q": (3, 1, 2, 17, 8), "k": (2, 2, 19, 8), "v": (1, 2, 19, 4), "bias": bias}
    point, tangents = (
        {f"{prefix}{name}": random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        for prefix in ("", "t")
    )
    dout = random.standard_normal((3, 2, 2, 17, 4)).astype(dtype)
    attention = cuflash.FlashAttention()

    def both(convert):
        given, moved = ({name: convert(x) for name, x in own.items()} for own in (point, tangents))
        results = attention.jvp(**given, **moved)
        need = ("tdq", "tdk", "tdv", "tdbias", "tdscale")
        return (*results, *attention.backward_jvp(convert(dout), **given, **results._asdict(), **moved, need=need))

    limit = 1e-11 if dtype == "float64" else 1e-2
    for x, y in zip(both(cupy.asarray), both(np.asarray), strict=True):
        np.testing.assert_allclose(x.get().astype(float), y.astype(float), rtol=limit, atol=limit * np.abs(y).max())


def test_a_graph_replays_and_results_repeat():
    random = cupy.random.default_rng(0)
    q, k, v, tq, tk, tv, dout = random.standard_normal((7, 2, 3, 200, 64), dtype=np.float32).astype(np.float16)
    attention = cuflash.FlashAttention(causal=True, deterministic=True)

    def run():
        results = attention.jvp(q, k, v, tq=tq, tk=tk, tv=tv)
        return (*results, *attention.backward_jvp(dout, q, k, v, *results, tq=tq, tk=tk, tv=tv))

    expected = run()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        run()
        stream.begin_capture()
        captured = run()
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    for x, y, z in zip(expected, captured, run(), strict=True):
        cupy.testing.assert_array_equal(x, y)
        cupy.testing.assert_array_equal(x, z)


@pytest.mark.parametrize("options", [{"causal": True, "softcap": 2.0}, {"window": (30, 9), "scale": -0.3}], ids=str)
def test_the_double_backward_pass_is_that_of_differences(options):
    random = cupy.random.default_rng(4)
    q, k, v = (random.standard_normal(shape) for shape in ((2, 4, 70, 16), (2, 2, 90, 16), (2, 2, 90, 24)))
    found = check_gradients(
        cuflash.FlashAttention(**options, deterministic=True), q, k, v, order=2, sinks=random.standard_normal(4)
    )
    assert set(found) == {"tout", "tlse", "tdq", "tdk", "tdv", "tdsinks"}
