"""fp8 keys and values: formats, scales, rotation, and attention of what they stand for."""

import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays import dlpack
from cuflash.arrays.array_info import FLOAT8, block_of_scales, numpy_dtype
from cuflash.arrays.fp8 import LARGEST, Float8Array, encode
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec import array_imports
from cuflash.spec.binding import bind
from cuflash.spec.options import Options
from cuflash.spec.passes import FORWARD
from cuflash.spec.problem import make_problem
from cuflash.spec.quantization import PER
from cuflash.testing import Case, reference
from tests.features.test_drawn_on_backends import DRAWN
from tests.features.test_float8_on_backends import CASE, PACKED
from tests.sampling import examples

every_dtype = pytest.mark.parametrize("dtype", FLOAT8)


def run(case, arrays=None):
    arrays = case.arrays() if arrays is None else arrays
    q, k, v = ct.qkv(arrays)
    return cuflash.FlashAttention(**case.keywords).forward(q, k, v, **ct.optional(arrays), **case.random)


# ---- Attention -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(30))
@given(DRAWN["float8"])
def test_the_oracle_is_that_of_dequantised_numbers(case):
    """Pages are gathered first: the lengths move the diagonal of pages only, so causal cases are left out."""
    if case.page_size:
        case = dataclasses.replace(case, page_size=0)
    arrays = case.arrays()
    q, k, v = ct.qkv(arrays)
    expected = reference.forward(case.problem, q, k, v, **ct.optional(arrays), **case.random)
    optional = {name: x for name, x in ct.optional(arrays).items() if not name.endswith("_scale")}
    k, v = (cuflash.dequantize(arrays[n], arrays.get(f"{n}_scale"), dtype="float64", layout=case.layout) for n in "kv")
    if case.q_float8:
        q = cuflash.dequantize(q, arrays.get("q_scale"), dtype="float64", layout=case.layout)
    q = q.astype(np.float64)
    for name in optional.keys() & {"bias", "alibi_slopes", "sinks"}:
        optional[name] = optional[name].astype(np.float64)
    problem = make_problem(case.options, q, k, v, **optional)
    for got, x in zip(reference.forward(problem, q, k, v, **optional, **case.random), expected, strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_have_scales_of_their_own(page_size):
    case = Case(batch=2, num_heads=4, num_heads_kv=2, seqlen_q=3, seqlen_k=192, head_dim=24, kv_lengths=(100, 192))
    case = dataclasses.replace(case, page_size=page_size, kv_dtype="float8_e4m3fn", k_scale="token", v_scale="block")
    arrays = case.arrays()
    assert arrays["k_scale"].shape == arrays["k"].shape[:3]
    for paged, contiguous in zip(run(case, arrays), run(case, ct.gather_pages(arrays)), strict=True):
        np.testing.assert_array_equal(paged, contiguous)


@given(st.integers(0, 300), st.integers(0, 9))
def test_the_number_of_blocks_tells_their_length(keys, shift):
    count = -(-keys // 2**shift)
    lengths = {2**n for n in range(12) if -(-keys // 2**n) == count}
    if count > 1:
        assert lengths == {2**shift} == {block_of_scales(count, keys)}
    assert count == 1 or block_of_scales(count + 1, keys) in (0, *(2**n for n in range(shift)))


def test_plans_say_what_is_served():
    """Decoding has kernels of its own, longer queries the sm80 kernels."""
    few, many = (
        dataclasses.replace(CASE, seqlen_k=4096, kv_lengths=None),
        dataclasses.replace(CASE, seqlen_q=1000, seqlen_k=1000, kv_lengths=None),
    )
    sources = [choose_plan(case.problem, DeviceSpec.for_arch("9.0"), FORWARD).kernels[0].source for case in (few, many)]
    assert sources == ["sm90/decode_float8.cu", "sm80/forward.cu"]
    plan = choose_plan(many.problem, DeviceSpec.for_arch("9.0"), FORWARD)
    assert "not sm90/forward: it knows no fp8 keys and values" in plan.reason
    assert "float8_e4m3fn" in plan.kernels[0].name
    # fp8 q, too: fp8 products where they have all options, and else the same two kernels.
    few, long = (dataclasses.replace(case, dtype="bfloat16", q_float8=True, q_scale="token") for case in (few, many))
    whole = dataclasses.replace(long, k_scale="head", v_scale="head")
    others: dict[str, tuple[dict[str, Any], str]] = {
        "bias": ({"bias": (1000,)}, "it knows no bias"),
        "pages": (
            {"page_size": 16, "seqlen_k": 1008, "kv_lengths": (1000,) * 3},  # whose scales differ
            "it knows no k_scale of 16 keys each",
        ),
        "dropout": ({"dropout": 0.1}, "it knows no dropout"),
        "packed": (PACKED, "it knows no packed sequences"),
        "blocks": ({"k_scale": "block"}, "it knows no k_scale of 16 keys each"),
        "keys": ({"v_scale": "token"}, "it knows no v_scale of 1 keys each"),
    }
    for changes, why in others.values():
        plan = choose_plan(dataclasses.replace(whole, **changes).problem, DeviceSpec.for_arch("9.0"), FORWARD)
        assert plan.kernels[-1].source == "sm80/forward.cu" and f"not sm90/forward_float8: {why}" in plan.reason
        assert "fp8 q, k and v become half precision" in plan.reason
    for case, arch, source in (
        (whole, "9.0", "sm90/forward_float8.cu"),
        (few, "9.0", "sm90/decode_float8.cu"),
        (whole, "8.9", "sm80/forward.cu"),
    ):
        plan = choose_plan(case.problem, DeviceSpec.for_arch(arch), FORWARD)
        assert plan.kernels[0].source == source
        assert ("become half precision" in plan.reason) == (source != "sm90/forward_float8.cu")
    few = dataclasses.replace(few, dtype="float16", q_float8=False, q_scale=None)
    # Rows that TMA does not reach, and heads that are too wide.
    for other in (dataclasses.replace(few, strides="padded"), dataclasses.replace(few, head_dim=320)):
        plan = choose_plan(other.problem, DeviceSpec.for_arch("9.0"), FORWARD)
        assert plan.kernels[0].source == "sm80/decode.cu"


# ---- Quantizing ------------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_rounding_is_that_of_ml_dtypes(dtype, wide):
    """Between two numbers of float32, ml_dtypes rounds float64 twice: there the nearest number is known otherwise."""
    named = numpy_dtype(dtype)
    every = np.arange(256, dtype=np.uint8).view(named).astype(np.float32)
    numbers = np.sort(every[np.isfinite(every)])
    between = (numbers[1:] + numbers[:-1]) / 2
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            *(every, between, np.nextafter(between, np.float32(np.inf)), np.nextafter(between, np.float32(-np.inf))),
            (rng.standard_normal(4096) * 2.0 ** rng.integers(-25, 25, 4096)).astype(np.float32),
            np.array([0, -0.0, np.inf, -np.inf, np.nan, 464, 464.1, 61439, 61440, 1e30, -1e30, 1e-40], np.float32),
        ]
    )
    with np.errstate(all="ignore"):
        expected, got = x.astype(named).astype(wide), encode(np, x.astype(wide), named).view(named).astype(wide)
    np.testing.assert_array_equal(got, expected)
    is_number = ~np.isnan(x)
    assert (np.signbit(got) == np.signbit(x))[is_number].all()
    for nearest, direction in ((numbers[1:], np.inf), (numbers[:-1], -np.inf)):
        got = encode(np, np.nextafter(between.astype(wide), wide(direction)), named).view(named).astype(wide)
        np.testing.assert_array_equal(got, nearest)


@settings(max_examples=examples(60))
@given(
    ct.cases(features=(), max_head_dim=96, min_seqlen=0),
    *map(st.sampled_from, (PER, [1, 16, 64], FLOAT8)),
    st.booleans(),
)
def test_quantizing_is_undone_but_for_rounding(case, per, block, dtype, rotates):
    k = case.arrays()["k"]
    k8, scale = cuflash.quantize(k, dtype, per=per, block=block, layout=case.layout, rotate=rotates)
    assert (k8.dtype, k8.shape, scale.dtype) == (numpy_dtype(dtype), k.shape, np.float32)
    back = cuflash.dequantize(k8, scale, dtype="float64", layout=case.layout, rotate=rotates)
    exact = cuflash.rotate(k.astype(np.float64)) if rotates else k.astype(np.float64)
    rounded = cuflash.rotate(back) if rotates else back
    digits = 4 if dtype == "float8_e4m3fn" else 3
    smallest = np.abs(exact).max(initial=0) * 2.0**-17
    error = np.abs(rounded - exact)
    assert (error <= 2.0**-digits * np.abs(exact) * (1 + 1e-6) + smallest).all()
    make_problem(Options(layout=case.layout), case.arrays()["q"].astype(np.float32), k8, k8, k_scale=scale, v_scale=ONE)


@pytest.mark.parametrize(("per", "shape"), [("tensor", ()), ("head", (2, 3, 1)), ("block", (2, 3, 3)), ("token", None)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_largest_number_of_what_has_a_scale_becomes_the_largest(per, shape, layout):
    x = np.random.default_rng(1).standard_normal((2, 3, 40, 8))
    given_x = x.swapaxes(1, 2) if layout == "bshd" else x
    k8, scale = cuflash.quantize(given_x, per=per, block=16, layout=layout)
    assert scale.shape == ((2, 3, 40) if shape is None else shape)
    k8 = k8.swapaxes(1, 2) if layout == "bshd" else k8
    by_block = {"tensor": [slice(None)], "head": [slice(None)], "token": [slice(j, j + 1) for j in range(40)]}
    for keys in by_block.get(per, [slice(0, 16), slice(16, 32), slice(32, 40)]):
        largest = np.abs(k8[:, :, keys].astype(np.float32)).max(axis=None if per == "tensor" else (2, 3))
        assert (largest == LARGEST["float8_e4m3fn"]).all()


@every_dtype
@settings(max_examples=examples(40))
@given(
    st.sampled_from(PER), st.floats(-3, 3), st.booleans(), st.integers(0, 99), st.sampled_from(["float64", "float32"])
)
def test_a_scale_is_finite_or_an_error(dtype, per, digits, rotates, seed, of):
    """Near the largest numbers that have a scale; those of float32 have one."""
    limit = LARGEST[dtype] * float(np.finfo(np.float32).max)
    largest = min(limit * (1 + 10.0**digits * (-1) ** seed / 1e3), np.inf if of == "float64" else 3e37)
    x = np.random.default_rng(seed).uniform(-1, 1, (2, 40, 8))
    x = (x / np.abs(cuflash.rotate(x) if rotates else x).max() * largest).astype(of)
    exact = cuflash.rotate(x) if rotates else x
    found_largest = float(np.abs(exact).max())
    if found_largest / LARGEST[dtype] >= 2.0**128 * (1 - 2.0**-25):
        with pytest.raises(ValueError, match=r"^x: got a number of magnitude .*, expected at most .*: divide x by"):
            cuflash.quantize(x, dtype, per=per, rotate=rotates)
        return
    k8, scale = cuflash.quantize(x, dtype, per=per, rotate=rotates)
    assert np.isfinite(scale).all()
    back = cuflash.dequantize(k8, scale, dtype="float64")
    assert (np.abs(back - exact) <= 2.0**-3 * np.abs(exact) + 2.0**-16 * found_largest).all()


def test_numbers_that_are_none_spoil_nothing_but_themselves():
    x = np.ones((1, 4, 2), np.float32)
    x[0, 0, 0], x[0, 1, 1], x[0, 3] = np.nan, np.inf, 0
    for dtype, infinity in (("e4m3", np.nan), ("e5m2", np.inf)):
        back = cuflash.dequantize(*cuflash.quantize(x, dtype, per="token"))
        np.testing.assert_allclose(back, np.where(np.isinf(x), infinity, x), rtol=1e-6)
    zeros, scale = cuflash.quantize(np.zeros((3, 5)))
    assert not zeros.astype(np.float32).any() and scale == 1


@settings(max_examples=examples(40))
@given(st.integers(1, 256), st.sampled_from(["float16", "bfloat16", "float32", "float64"]), st.integers(0, 99))
def test_a_rotation_keeps_scores_and_is_its_own_inverse(dim, dtype, seed):
    q, k = np.random.default_rng(seed).standard_normal((2, 5, dim)).astype(numpy_dtype(dtype))
    ulp = float(ml_dtypes.finfo(q.dtype).eps)
    close = 8 * ulp * dim**0.5
    back = cuflash.rotate(cuflash.rotate(q))
    assert back.dtype == q.dtype
    np.testing.assert_allclose(back.astype(float), q.astype(float), atol=close)
    scores = cuflash.rotate(q).astype(float) @ cuflash.rotate(k).astype(float).T
    np.testing.assert_allclose(scores, q.astype(float) @ k.astype(float).T, atol=close * dim**0.5)
    matrix = cuflash.rotate(np.eye(dim)) * (dim & -dim) ** 0.5
    np.testing.assert_allclose(np.abs(matrix), np.kron(np.eye(dim // (dim & -dim)), np.ones((dim & -dim,) * 2)))


@every_dtype
def test_a_rotation_saves_scores_from_a_channel_that_is_large_in_both(dtype):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 200, 64)).astype(np.float32)
    q[:, 5] *= 10
    k[:, 5] *= 10
    errors = []
    for rotates in (False, True):
        rows = cuflash.dequantize(*cuflash.quantize(k, dtype, rotate=rotates))
        scores = (cuflash.rotate(q) if rotates else q) @ rows.T
        errors.append(np.sqrt(np.mean((scores - q @ k.T) ** 2)))
    assert errors[1] < errors[0] / 3


# ---- CuPy arrays -----------------------------------------------------------------------------------------------------


def test_bytes_of_numpy_are_viewed():
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    for spelled in ("e4m3", "float8_e4m3fn", ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)):
        viewed = cuflash.fp8(codes[:, ::2], spelled)
        assert viewed.dtype == numpy_dtype("float8_e4m3fn") and np.shares_memory(viewed, codes)


@every_dtype
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_cupy_arrays_are_quantised_to_the_same_bytes(dtype, layout, fake_cupy, monkeypatch):
    k = np.random.default_rng(0).standard_normal((2, 70, 24)).astype(np.float32)
    options: dict[str, Any] = {"per": "block", "block": 16, "layout": layout, "rotate": True}
    expected, expected_scale = cuflash.quantize(k, dtype, **options)
    expected_back = cuflash.dequantize(expected, expected_scale, layout=layout, rotate=True)
    monkeypatch.setattr(dlpack, "_library_of", lambda name, array: "cupy")
    k8, scale = cuflash.quantize(k.view(fake_cupy.ndarray), dtype, **options)
    assert isinstance(k8, Float8Array) and k8.dtype == expected.dtype
    np.testing.assert_array_equal(k8.bits, expected.view(np.uint8))
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(cuflash.dequantize(k8, scale, layout=layout, rotate=True), expected_back)


def test_bytes_of_cupy_take_part_in_a_call(fake_cupy):
    """As far as a launch: they bind, and are taken with CuPy arrays only."""
    k = Float8Array(np.arange(2 * 64 * 16, dtype=np.uint8).reshape(1, 2, 64, 16), numpy_dtype("float8_e5m2"))
    arrays: dict[str, Any] = {
        "q": np.zeros((1, 2, 3, 16), np.float16),
        "k": k,
        "v": k[:, :, :, :8],
        "mask": None,
        **ONES,
    }
    binding = bind(FORWARD, Options(), arrays)
    assert (binding.problem.k.dtype, binding.problem.k.strides[2]) == ("float8_e5m2", 16)
    assert binding.load_bytes == 16 and not binding.copied
    scattered = Float8Array(np.zeros((1, 2, 9, 64), np.uint8), k.dtype).transpose(0, 1, 3, 2)
    assert bind(FORWARD, Options(), arrays | {"v": scattered}).copied == ("v",)
    with pytest.raises(TypeError, match=r"k: got cuflash.Float8Array, expected an array of numpy as q is"):
        cuflash.attention(arrays["q"], k, k)
    with pytest.raises(TypeError, match="array: got Float8Array, expected a NumPy or CuPy array of uint8"):
        cuflash.fp8(k, "e5m2")
    fake_cupy.ndarray = np.ndarray
    assert array_imports.are_cupy(arrays, ("q", "k", "v"))


@pytest.mark.parametrize(
    ("offset", "row", "size", "load_bytes"),
    [(0, 64, 2, 16), (8, 64, 2, 8), (4, 64, 2, 8), (2, 64, 2, 4), (1, 64, 2, 2), (0, 68, 2, 8), (0, 65, 4, 4)],
)
def test_accesses_are_of_as_many_numbers_as_are_aligned(offset, row, size, load_bytes):
    """Two of float16 with two of fp8, and so on; 16 bytes are promised for both."""
    q = np.zeros((1, 1, 3, 64), {2: np.float16, 4: np.float32}[size])
    k = np.zeros((1, 1, 9, row), ml_dtypes.float8_e5m2)[..., :64]
    where = {id(k): offset}
    binding = bind(FORWARD, Options(), {"q": q, "k": k, "v": k, **ONES}, address_of=lambda x: where.get(id(x), 0))
    assert binding.load_bytes == load_bytes


class Exporter:
    """An array of another library, whose fp8 numbers have the type codes of DLPack 1.1."""

    def __init__(self, array, code=0):
        self.array, self.code = array, code

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, stream=None, **how):
        capsule = self.array.__dlpack__(stream=stream, **how)
        managed = dlpack._managed(capsule)
        assert managed is not None
        managed.tensor.dtype.code = self.code or managed.tensor.dtype.code
        return capsule


@pytest.mark.parametrize(("code", "dtype"), [(10, "float8_e4m3fn"), (12, "float8_e5m2")])
def test_other_libraries_lend_fp8(code, dtype):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 30, 16)).astype(np.float32)
    k8, scale = cuflash.quantize(k, dtype)
    arrays_by_dlpack = [Exporter(q), *(Exporter(k8.view(np.uint8), code) for _ in range(2))]
    np.testing.assert_array_equal(
        cuflash.attention(*arrays_by_dlpack, k_scale=Exporter(scale), v_scale=1.0),
        cuflash.attention(q, k8, k8, k_scale=scale, v_scale=1.0),
    )


def test_what_is_no_number_of_one_byte_is_refused():
    with pytest.raises(TypeError, match="array: got dtype int8, expected uint8"):
        cuflash.fp8(np.zeros(3, np.int8), "e4m3")
    with pytest.raises(TypeError, match="array: got list"):
        cuflash.fp8([1, 2], "e4m3")
    with pytest.raises(ValueError, match="dtype: got 'e3m4', expected 'float8_e4m3fn'"):
        cuflash.fp8(np.zeros(3, np.uint8), "e3m4")


# ---- What is refused -------------------------------------------------------------------------------------------------

Q, K = np.zeros((1, 4, 5, 8), np.float32), np.zeros((1, 2, 100, 8), ml_dtypes.float8_e4m3fn)


ONE = np.ones((), np.float32)
ONES: dict[str, Any] = {"k_scale": ONE, "v_scale": ONE}


def scales(*shape, dtype=np.float32):
    return {"k_scale": np.ones(shape, dtype)}


@pytest.mark.parametrize("shape", [(), (1,), (100,), (4,), (2, 1), (2, 7), (1, 2, 100), (1, 1, 50), (1, 1, 1)])
def test_shapes_of_scales(shape):
    plain = cuflash.attention(Q, K, K, k_scale=1.0, v_scale=1.0)
    np.testing.assert_array_equal(cuflash.attention(Q, K, K, **scales(*shape), v_scale=1), plain)


@pytest.mark.parametrize(
    ("q", "k", "v", "optional", "error", "message"),
    [
        (
            Q,
            K,
            K,
            scales(3, 1),
            ValueError,
            "k_scale: got shape (3, 1), expected a shape that broadcasts to (batch, num",
        ),
        (
            Q,
            K,
            K,
            {},
            ValueError,
            "k_scale: got None, expected the scale of k, whose dtype is float8_e4m3fn: k_scale=1.0 if",
        ),
        (
            Q,
            K,
            K,
            scales(),
            ValueError,
            "v_scale: got None, expected the scale of v, whose dtype is float8_e4m3fn: v_sca",
        ),
        (
            K,
            K,
            K,
            ONES,
            ValueError,
            "q_scale: got None, expected the scale of q, whose dtype is float8_e4m3fn: q_scale=",
        ),
        (Q, K, K, scales(3), ValueError, "k_scale: got shape (3,), expected a shape that broadcasts to (batch, num_he"),
        (Q, K, K, scales(1, 2, 0), ValueError, "k_scale: got shape (1, 2, 0), expected"),
        (Q, K, K, scales(1, 2, 101), ValueError, "k_scale: got shape (1, 2, 101), expected"),
        (Q, K, K, scales(1, 1, 2, 1), ValueError, "k_scale: got shape (1, 1, 2, 1), expected"),
        (Q, K, K, scales(2, 1, dtype=np.float64), TypeError, "k_scale: got dtype float64, expected float32"),
        (
            Q,
            *[K.astype(np.float32)] * 2,
            scales(),
            ValueError,
            "k_scale: got an array, expected None, since k has dtype",
        ),
        (Q, K, K.astype(ml_dtypes.float8_e5m2), {}, TypeError, "v: got dtype float8_e5m2, expected float8_e4m3fn as k"),
        (Q, K.astype(np.float32), K, {}, TypeError, "v: got dtype float8_e4m3fn, expected float32 as q has"),
        (
            K[:, :, :5].astype(ml_dtypes.float8_e5m2),
            K,
            K,
            {},
            TypeError,
            "k: got dtype float8_e4m3fn, expected float8_e5m2 as q has",
        ),
        (
            K[:, :, :5],
            K,
            K,
            {"q_scale": np.ones((1, 3, 5), np.float32)},
            ValueError,
            "q_scale: got shape (1, 3, 5), exp",
        ),
        (
            Q,
            K,
            K,
            {"q_scale": np.ones((), np.float32), **ONES},
            ValueError,
            "q_scale: got an array, expected None, since q has dtype",
        ),
    ],
)
def test_messages(q, k, v, optional, error, message):
    for call in (cuflash.attention, cuflash.FlashAttention().plan, cuflash.FlashAttention().compile):
        with pytest.raises(error, match=re.escape(message)):
            call(q, k, v, **optional)


def test_gradients_are_refused_with_the_reason():
    out, lse = cuflash.FlashAttention().forward(Q, K, K, **ONES)
    with pytest.raises(
        NotImplementedError, match="k: got dtype float8_e4m3fn for the backward pass, expected numbers of at"
    ):
        cuflash.FlashAttention().backward(out, Q, K, K, out, lse, **ONES)
    with pytest.raises(
        NotImplementedError, match=r"^k: got dtype float8_e4m3fn for jvp, expected .*: tangents of k and"
    ):
        cuflash.FlashAttention().jvp(Q, K, K, tq=Q, **ONES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cuflash.quantize(Q, per="row"),  # type: ignore[arg-type]
            "per: got 'row', expected 'tensor' or 'head' or 'block' or 'token'",
        ),
        (lambda: cuflash.quantize(Q, per="block", block=48), "block: got 48, expected a power of two"),
        (
            lambda: cuflash.quantize(Q[0, 0, 0]),
            "x: got 1-D shape (8,), expected an array (..., heads, keys, dim) of two axes or more",
        ),
        (lambda: cuflash.quantize(K), "x: got dtype float8_e4m3fn, expected float16 or bfloat16 or float32 or float64"),
        (lambda: cuflash.dequantize(Q), "x: got dtype float32, expected float8_e4m3fn or float8_e5m2"),
        (
            lambda: cuflash.dequantize(K, np.ones((3, 1), np.float32)),
            "scale: got shape (3, 1), expected a shape that br",
        ),
        (
            lambda: cuflash.dequantize(K, np.ones(3, np.float32)),
            "scale: got shape (3,), expected a shape that broadcas",
        ),
        (lambda: cuflash.dequantize(K, np.ones(100)), "scale: got dtype float64, expected float32"),
        (lambda: cuflash.dequantize(K, True), "scale: got dtype bool, expected float32"),
        (lambda: cuflash.dequantize(K, [1.0]), "scale: got list [1.0], expected a number or an array of float32"),
        (lambda: cuflash.dequantize(K, dtype="int8"), "dtype: got 'int8', expected float16 or bfloat16"),
        (lambda: cuflash.dequantize(K, dtype=1.5), "dtype: got float 1.5, expected float16 or bfloat16"),
    ],
)
def test_messages_of_quantizing(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


@given(
    scale=st.floats(width=32, allow_nan=False) | st.integers(-1000, 1000), scalar=st.sampled_from((None, np.float32))
)
def test_a_number_is_the_scale_of_all(scale, scalar):
    """As it is of attention."""
    expected = cuflash.dequantize(K, np.asarray(scale, np.float32))
    np.testing.assert_array_equal(cuflash.dequantize(K, scalar(scale) if scalar else scale), expected)


@pytest.mark.parametrize("keys", [0, 1, 20, 64])
def test_blocks_may_be_longer_than_the_sequence(keys):
    """They take no memory of their length."""
    x = np.linspace(-1, 1, keys * 4).reshape(1, keys, 4)
    for block in (64, 2**40, 2**70):
        found, right = cuflash.quantize(x, per="block", block=block), cuflash.quantize(x, per="block", block=64)
        np.testing.assert_array_equal(found.array.view(np.uint8), right.array.view(np.uint8))
        np.testing.assert_array_equal(found.scale, right.scale)
        assert found.scale.shape == (1, min(keys, 1))
