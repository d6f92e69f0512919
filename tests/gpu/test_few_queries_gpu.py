"""Few queries against many keys on the device by the kernel of every device: every dtype, and every option."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.spec.passes import FORWARD
from tests.gpu.planned import plan_of
from tests.sampling import examples
from tests.scored import MASKS, SCORES, Scored, score_args_of

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32", "float64")
SIZES: dict[str, Any] = {"seqlen_q": 2, "seqlen_k": 3000, "batch": 2, "num_heads": 8, "num_heads_kv": 2}
FLOAT8: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "k_scale": "token", "v_scale": "head"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "seqlen_q": 8},
    "window": {"window": (1500, 0)},
    "lengths": {"kv_lengths": (2999, 17), "causal": True},
    "softcap": {"softcap": 9.0},
    "slopes": {"alibi_slopes": (2, 8), "causal": True},
    "bias of keys": {"bias": (3000,)},
    "per-pair bias": {"bias": (2, 8, 2, 3000), "bias_dtype": "input"},
    "mask of keys": {"mask": (2, 1, 1, 3000)},
    "mask of pairs": {"mask": (8, 2, 3000)},
    "blocks": {"block_mask": (2, 8), "block_size": (16, 128), "blocks_kept": 0.2},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.3},
    "pages": {"page_size": 16, "seqlen_k": 3008, "kv_lengths": (3001, 1000)},
    "bytes": FLOAT8,
    "one head to a group": {"num_heads_kv": 8, "seqlen_q": 3},
    "64 rows": {"seqlen_q": 16},
    "all at once": {
        "bias": (8, 2, 3000),
        "mask": (3000,),
        "alibi_slopes": (8,),
        "softcap": 9.0,
        "sinks": True,
        "window": (2500, None),
        "dropout": 0.2,
        "block_mask": (),
    },
}


@pytest.fixture
def of_every_device(cupy, monkeypatch):
    """Plans are for compute capability 8.0, or that of the device if it is an earlier one."""
    from cuflash.gpu import launch_cache
    from cuflash.gpu.device import device_spec

    def plan_anew():
        device_spec.cache_clear()
        launch_cache.forget_launches()

    if int(cupy.cuda.Device().compute_capability) >= 80:
        monkeypatch.setenv("CUFLASH_ARCH", "8.0")
    plan_anew()
    yield
    monkeypatch.undo()
    plan_anew()


def run(cupy, case, *, times=1):
    """The results of some calls, and the sources of the kernels."""
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(**case.keywords)
    optional = ct.optional(arrays) | case.random
    results = [attn.forward(*ct.qkv(arrays), **optional) for _ in range(times)]
    plan = plan_of(FORWARD, attn, *ct.qkv(arrays), **ct.optional(arrays))
    return results, [kernel.source for kernel in plan.kernels]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(cupy, of_every_device, name, head_dim, dtype):
    """Within the oracle rule, and bitwise the same whenever it is called."""
    case = ct.Case(**SIZES | {"head_dim": head_dim, "dtype": dtype} | OPTIONS[name])
    results, sources = run(cupy, case, times=3)
    assert "sm80/decode.cu" in sources
    ct.assert_forward(case, *results[0])
    first = [np.ascontiguousarray(ct.to_numpy(x)).tobytes() for x in results[0]]
    for again in results[1:]:
        assert [np.ascontiguousarray(ct.to_numpy(x)).tobytes() for x in again] == first


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("head_dim", [8, 33, 96, 256])
def test_head_dimensions(cupy, head_dim, dtype):
    """With the instructions of the device itself."""
    case = ct.Case(**SIZES | {"head_dim": head_dim, "head_dim_v": head_dim + 3, "dtype": dtype}, causal=True)
    results, _ = run(cupy, case)
    ct.assert_forward(case, *results[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen_k", [600, 131072])
def test_many_blocks_share_a_head(cupy, of_every_device, seqlen_k, dtype):
    """And few, whose last one combines their results."""
    case = ct.Case(seqlen_q=1, seqlen_k=seqlen_k, num_heads=4, num_heads_kv=1, head_dim=64, dtype=dtype, sinks=True)
    results, sources = run(cupy, case, times=2)
    assert "sm80/decode.cu" in sources
    ct.assert_forward(case, *results[0])
    assert all((x == y).all() for x, y in zip(*results, strict=True))


@st.composite
def cases(draw, dtype):
    # The oracle of float64 computes with long doubles, without BLAS.
    most_heads, most_pairs = (5, 2**19) if dtype == "float64" else (40, 2**22)
    group, num_heads_kv, batch = (draw(st.sampled_from(x)) for x in ([1, 4, 3, 8], [1, 2, most_heads], [1, 2, 5]))
    num_heads, seqlen_q = group * num_heads_kv, draw(st.integers(1, 64 // group))
    most = most_pairs // (batch * num_heads * seqlen_q)  # keys, so that the oracle takes a second
    seqlen_k = draw(st.integers(512, max(512, min(5000, most))))
    pairs = st.sampled_from([None, None, (num_heads, seqlen_q, seqlen_k), (batch, 1, 1, seqlen_k)])
    return ct.Case(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        head_dim=draw(st.sampled_from([8, 33, 64, 72, 128])),
        dtype=dtype,
        layout=draw(st.sampled_from(["bhsd", "bshd"])),
        causal=draw(st.sampled_from([False, True, "top_left"])),
        kv_lengths=draw(st.one_of(st.none(), st.tuples(*[st.integers(0, seqlen_k)] * batch))),
        softcap=draw(st.sampled_from([None, 3.0])),
        bias=draw(pairs),
        mask=draw(pairs),
        block_mask=draw(st.sampled_from([None, (), (batch, 1)])),
        alibi_slopes=draw(st.sampled_from([None, (batch, num_heads)])),
        sinks=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(100))  # most of them compile a kernel of their own
@given(data=st.data())
def test_any_case(cupy, dtype, data):
    case = data.draw(cases(dtype))
    results, _ = run(cupy, case)
    ct.assert_forward(case, *results[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("score", "mask"), [("distance", None), ("alibi", "documents"), (None, "near")])
def test_functions(cupy, of_every_device, score, mask, dtype):
    functions = (SCORES[score] if score else None, MASKS[mask] if mask else None)
    random, shapes = np.random.default_rng(7), {"q": (2, 6, 2, 64), "k": (2, 2, 2000, 64), "v": (2, 2, 2000, 32)}
    arrays = {name: random.standard_normal(shape).astype(ct.numpy_dtype(dtype)) for name, shape in shapes.items()}
    arrays |= score_args_of(functions, (2, 6, 2, 2000), dtype, 7)
    attn = cuflash.FlashAttention(score=functions[0], mask=functions[1])
    problem = Scored(attn, arrays, {}, "").problem
    given = {name: cupy.asarray(x) for name, x in arrays.items()}
    out, lse = attn.forward(**given)
    yardsticks = ct.yardsticks(problem, arrays)
    for name, x in (("out", out), ("lse", lse)):
        measurement = ct.measure(name, ct.to_numpy(x), yardsticks[name])
        assert not measurement.failure, str(measurement)
