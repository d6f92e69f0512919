"""What every function of ``kernels/ptx/arithmetic.cuh`` computes, in NumPy: the other checks of ``conformance.cu``."""

import ml_dtypes
import numpy as np

from tests.emulate.conformance import ELEMENTS, WARP, ones, random_bits, threads_of


def check_exp2_approx(run):
    x = np.concatenate([np.linspace(-125.5, 127.5, 4001), np.linspace(-1, 1, 999)]).astype(np.float32)
    got = run("exp2_approx", source=x, destination=ones(np.float32, len(x)), **threads_of(x))
    np.testing.assert_allclose(got, np.exp2(x.astype(np.float64)), rtol=2.0**-22)

    special = np.array([0, -0.0, 1, -1, -np.inf, np.inf, np.nan, 128, -127, -149, 1e-40, -1e-40], np.float32)
    expected = np.array([1, 1, 2, 0.5, 0, np.inf, np.nan, np.inf, 0, 0, 1, 1], np.float32)
    got = run("exp2_approx", source=special, destination=ones(np.float32, len(special)), **threads_of(special))
    np.testing.assert_array_equal(got, expected)


def check_reciprocal_approx(run):
    x = np.concatenate([np.geomspace(1.2e-38, 8e37, 4001), np.linspace(-4, -0.25, 999)]).astype(np.float32)
    got = run("reciprocal_approx", source=x, destination=ones(np.float32, len(x)), **threads_of(x))
    np.testing.assert_allclose(got, 1 / x.astype(np.float64), rtol=2.0**-23)

    special = np.array([0, -0.0, 1, np.inf, -np.inf, np.nan, 1e-40, 3e38], np.float32)
    expected = np.array([np.inf, -np.inf, 1, 0, -0.0, np.nan, np.inf, 0], np.float32)
    got = run("reciprocal_approx", source=special, destination=ones(np.float32, len(special)), **threads_of(special))
    np.testing.assert_array_equal(got, expected)


def check_sqrt_approx(run):
    x = np.geomspace(1.2e-38, 3e38, 5000).astype(np.float32)
    got = run("sqrt_approx", source=x, destination=ones(np.float32, len(x)), **threads_of(x))
    np.testing.assert_allclose(got, np.sqrt(x.astype(np.float64)), rtol=2.0**-22)

    special = np.array([0, -0.0, 1, np.inf, -1, np.nan, 1e-40], np.float32)
    expected = np.array([0, -0.0, 1, np.inf, np.nan, np.nan, 0], np.float32)
    got = run("sqrt_approx", source=special, destination=ones(np.float32, len(special)), **threads_of(special))
    np.testing.assert_array_equal(got, expected)


def with_floors():
    """Numbers of all magnitudes, and those between which floors change."""
    rng = np.random.default_rng(9)
    magnitudes = np.concatenate([np.geomspace(1e-40, 2.0**30.9, 3000), np.arange(1000) / 4])
    special = [0.0, 1e-45, 0.5, 2.0**22 + 0.5, 2.0**23 - 0.5, 2.0**23, 2.0**24 - 1]
    special += [2.0**31 - 128, 2.0**31, 2.0**31 + 256, 2.0**63, 3e38, np.inf]
    x = np.concatenate([magnitudes * rng.choice([-1, 1], len(magnitudes)), special, np.negative(special), [np.nan]])
    return x.astype(np.float32)


def check_floor_to_float(run):
    x = with_floors()
    got = run("floor_to_float", source=x, destination=ones(np.float32, len(x)), **threads_of(x))
    np.testing.assert_array_equal(got, np.floor(x))
    np.testing.assert_array_equal(np.signbit(got[:-1]), np.signbit(np.floor(x[:-1])))  # zeros keep their signs


def check_floor_to_int(run):
    x = with_floors()
    expected = np.clip(np.floor(np.nan_to_num(x.astype(np.float64))), -(2.0**31), 2.0**31 - 1).astype(np.int32)
    got = run("floor_to_int", source=x, destination=ones(np.int32, len(x)), **threads_of(x))
    np.testing.assert_array_equal(got, expected)


def check_log2_approx(run):
    x = np.concatenate([np.geomspace(1e-44, 3e38, 4001), np.linspace(0.5, 2, 999)]).astype(np.float32)
    got = run("log2_approx", source=x, destination=ones(np.float32, len(x)), **threads_of(x))
    np.testing.assert_allclose(got, np.log2(x.astype(np.float64)), rtol=2.0**-22, atol=2.0**-22)

    special = np.array([0, -0.0, 1, np.inf, -1, np.nan], np.float32)
    expected = np.array([-np.inf, -np.inf, 0, np.inf, np.nan, np.nan], np.float32)
    got = run("log2_approx", source=special, destination=ones(np.float32, len(special)), **threads_of(special))
    np.testing.assert_array_equal(got, expected)


def check_log2_of_normal(run):
    x = np.concatenate([np.geomspace(2.0**-126, 3e38, 4001), np.linspace(0.5, 2, 999)]).astype(np.float32)
    got = run("log2_of_normal", source=x, destination=ones(np.float32, len(x)), **threads_of(x))
    np.testing.assert_allclose(got, np.log2(x.astype(np.float64)), rtol=2.0**-22, atol=2.0**-22)

    special = np.array([0, -0.0, 1, np.inf, -1, np.nan, 2.0**-127, 2.0**-149], np.float32)  # the last are flushed
    expected = np.array([-np.inf, -np.inf, 0, np.inf, np.nan, np.nan, -np.inf, -np.inf], np.float32)
    got = run("log2_of_normal", source=special, destination=ones(np.float32, len(special)), **threads_of(special))
    np.testing.assert_array_equal(got, expected)


def check_multiply(run):
    factors = np.random.default_rng(0).standard_normal((1000, 2)).astype(np.float32)
    product = factors[:, 0] * factors[:, 1]
    # The rounded product minus itself is zero; a product fused into the sum would leave its rounding error.
    source = np.column_stack([factors, -product])
    got = run("multiply", source=source, destination=ones(np.float32, len(source)), **threads_of(source))
    np.testing.assert_array_equal(got, 0)


def check_limit_magnitude(run):
    x = np.concatenate([np.random.default_rng(0).standard_normal(500), [np.inf, -np.inf, 0.0, 3e38, np.nan]])
    most = np.concatenate([np.random.default_rng(1).uniform(0, 2, 500), [1.0, 3e38, 1.0, 3e38, 2.0]])
    source = np.column_stack([x, most]).astype(np.float32)
    got = run("limit_magnitude", source=source, destination=ones(np.float32, len(source)), **threads_of(source))
    np.testing.assert_array_equal(got[:-1], np.clip(source[:-1, 0], -source[:-1, 1], source[:-1, 1]))
    assert abs(got[-1]) == 2.0


def check_fma_saturated(run):
    factors = np.random.default_rng(0).standard_normal((1000, 3)).astype(np.float32)
    special = [[np.inf, -np.inf, 1], [np.inf, np.inf, 1], [np.inf, 0, 1], [np.nan, 1, 1], [-1, 1, 1], [-0.5, 0.5, 1]]
    source = np.concatenate([factors, np.array(special, np.float32)])
    got = run("fma_saturated", source=source, destination=ones(np.float32, len(source)), **threads_of(source))
    a, b, c = factors.astype(np.float64).T
    np.testing.assert_allclose(got[:-6], np.clip(a * b + c, 0, 1), rtol=2.0**-23, atol=1e-38)
    np.testing.assert_array_equal(got[-6:], [0, 1, 0, 0, 0, 0.75])


def check_at_least_u16x2(run):
    a, b = random_bits(np.uint32, 2, 1000)
    b[::4] = a[::4]  # equal, in both halves or in one
    b[1::4] = a[1::4] & np.uint32(0xFFFF) | b[1::4] & np.uint32(0xFFFF0000)
    a[-4:], b[-4:] = (0, 0xFFFFFFFF, 0x7FFF8000, 0x80007FFF), 0x80008000
    source = np.column_stack([a, b])
    got = run("at_least_u16x2", source=source, destination=np.full((1000, 2), 9, np.uint32), **threads_of(source))
    np.testing.assert_array_equal(got[:, 0], (a & 0xFFFF) >= (b & 0xFFFF))
    np.testing.assert_array_equal(got[:, 1], a >> 16 >= b >> 16)


def check_multiply_double(run):
    # Integers of 30 bits: their product has more bits than float64, the sum is what rounding left of it.
    factors = np.random.default_rng(0).integers(2**29, 2**30, (1000, 2)) | 1
    factors = factors.astype(np.float64)
    source = np.column_stack([factors, -factors[:, 0] * factors[:, 1]])
    got = run("multiply_double", source=source, destination=ones(np.float64, len(source)), **threads_of(source))
    np.testing.assert_array_equal(got, 0)


def check_fused(run):
    _check_fused(run, "fused", np.float32, 2**11)


def check_fused_double(run):
    _check_fused(run, "fused_double", np.float64, 2**26)


def _check_fused(run, kernel, dtype, smallest):
    # Integers of which a product has more bits than the type, but less than twice as many: the sum is what rounding
    # would lose, exactly.
    factors = np.random.default_rng(0).integers(smallest, 2 * smallest, (1000, 2)) * 2 + 1
    rounded = (factors[:, 0].astype(dtype) * factors[:, 1].astype(dtype)).astype(dtype)
    exact = [int(x) * int(y) - int(z) for (x, y), z in zip(factors, rounded, strict=True)]
    assert any(exact)
    source = np.column_stack([factors.astype(dtype), -rounded])
    got = run(kernel, source=source, destination=ones(dtype, len(source)), **threads_of(source))
    np.testing.assert_array_equal(got, np.array(exact, dtype))


def check_round_to_tf32(run):
    numbers = np.arange(0, 2**18, 61, dtype=np.uint32) << 13  # those of TF32, finite and not
    around = np.concatenate([numbers, numbers + 0xFFF, numbers + 0x1000, numbers + 0x1001])
    x = np.concatenate([around, around | np.uint32(2**31)]).view(np.float32)
    x = x[~np.isnan(x)]
    away_from_zero = ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    got = run("round_to_tf32", source=x, destination=ones(np.float32, len(x)), **threads_of(x))
    np.testing.assert_array_equal(got, np.where(np.isinf(x), x, away_from_zero))


def check_bits(run):
    for name, dtype in (("float", np.uint32), ("double", np.uint64)):
        bits = random_bits(dtype, 1000)
        got = run(f"bits_{name}", source=bits, destination=np.zeros(1000, dtype), **threads_of(bits))
        np.testing.assert_array_equal(got, bits)


def check_infinity(run):
    assert run("infinity", destination=np.zeros(1, np.float32), threads=WARP)[0] == np.inf


def check_to_float32(run):
    bits = np.arange(2**16, dtype=np.uint16)
    for element, dtype in ELEMENTS.items():
        got = run("to_float32", source=bits, destination=ones(np.float32, 2**16), element=element, **threads_of(bits))
        expected = bits.view(dtype).astype(np.float32)
        np.testing.assert_array_equal(got, expected)
        assert (np.signbit(got) == np.signbit(expected))[~np.isnan(expected)].all()


def check_to_float16x2(run):
    """From compute capability 8.9 on."""
    bits = np.arange(2**16, dtype=np.uint16)
    for name, dtype in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        destination = ones(np.float16, 2**16, 2)
        got = run(f"to_float16x2_{name}", source=bits, destination=destination, **threads_of(bits))
        expected = bits.view(np.uint8).view(dtype).astype(np.float32).reshape(-1, 2)
        np.testing.assert_array_equal(got.astype(np.float32), expected)
        assert (np.signbit(got) == np.signbit(expected))[~np.isnan(expected)].all()
        # Of two pairs, from both ends.
        destination = ones(np.float16, 2**16, 2, 2)
        both = run(f"to_float16x4_{name}", source=bits, destination=destination, **threads_of(bits))
        np.testing.assert_array_equal(both.view(np.uint16), np.stack([got, got[::-1]], axis=1).view(np.uint16))


def check_to_float8x2(run):
    """From compute capability 8.9 on."""
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    around = [numbers, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    positive = np.concatenate([*around, np.array([449, 464, 500, 3e38, 1e-45, 1e-40, np.inf], np.float32)])
    values = np.concatenate([positive, -positive, np.array([np.nan, 0], np.float32)])
    pairs = np.stack([values, np.roll(values, 1)], axis=1)
    got = run("to_float8x2", source=pairs, destination=ones(np.uint16, len(pairs)), **threads_of(pairs))
    _assert_float8_pairs(got, pairs)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    pairs = np.stack([halves, np.roll(halves, 77)], axis=1)
    got = run("halves_to_float8x2", source=pairs, destination=ones(np.uint16, len(pairs)), **threads_of(pairs))
    _assert_float8_pairs(got, pairs.astype(np.float32))


def _assert_float8_pairs(got, pairs):
    with np.errstate(invalid="ignore"):
        expected = np.clip(pairs, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    numbers_got = got.view(np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(-1, 2).astype(np.float32)
    np.testing.assert_array_equal(numbers_got, expected.astype(np.float32))
    is_number = ~np.isnan(pairs)
    np.testing.assert_array_equal(np.signbit(numbers_got)[is_number], np.signbit(pairs)[is_number])


def check_clamped_sum(run):
    """From compute capability 9.0 on. Sums wrap before they are clamped."""
    words = random_bits(np.int32, 3000, 3)
    words[:1000] >>= 16
    words[1000:1500, 1] = -0x4B000000
    words[1000:2000, 2] = 0x7FFF
    got = run("clamped_sum", source=words, destination=ones(np.int32, 3000), **threads_of(words))
    wrapped = words[:, 0] + words[:, 1]  # of int32, so it wraps
    np.testing.assert_array_equal(got, np.maximum(np.minimum(wrapped, words[:, 2]), 0))


def check_permute_bytes(run):
    words = random_bits(np.uint32, 3000, 3)
    words[:, 2] &= 0x7777
    bytes_ = words[:, :2].copy().view(np.uint8)
    chosen = np.stack([bytes_[np.arange(3000), words[:, 2] >> 4 * i & 7] for i in range(4)], axis=1)
    got = run("permute_bytes", source=words, destination=ones(np.uint32, 3000), **threads_of(words))
    np.testing.assert_array_equal(got.view(np.uint8).reshape(-1, 4), chosen)


def check_multiply_f16x2(run):
    factors = random_bits(np.float16, 4000, 2, 2)
    with np.errstate(all="ignore"):
        expected = (factors[:, 0].astype(np.float32) * factors[:, 1].astype(np.float32)).astype(np.float16)
    got = run("multiply_f16x2", source=factors, destination=ones(np.float16, 4000, 2), **threads_of(factors))
    np.testing.assert_array_equal(got, expected)


def _values_around_rounding(dtype):
    """Every 64th number of `dtype`, the middle to its neighbour, and the float32 numbers next to that middle."""
    numbers = np.arange(0, 2**15, 64, dtype=np.uint16)
    here = numbers.view(dtype).astype(np.float64)
    next_ = (numbers + 1).astype(np.uint16).view(dtype).astype(np.float64)
    finite = np.isfinite(here) & np.isfinite(next_)
    middle = ((here + next_) / 2)[finite].astype(np.float32)
    beyond = float(ml_dtypes.finfo(dtype).max) * np.array([1.0, 1.0002, 1.0003, 1.001, 1.003])
    around = [here, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf)), beyond]
    positive = np.concatenate([*around, [np.inf, 3.4e38, 1e-45, 1e-40]]).astype(np.float32)
    return np.concatenate([positive, -positive, [np.nan]]).astype(np.float32)


def check_pack(run):
    for element, dtype in ELEMENTS.items():
        with np.errstate(over="ignore", invalid="ignore"):
            values = _values_around_rounding(dtype)
            pairs = np.stack([values, np.roll(values, 1)], axis=1)
            expected = pairs.astype(dtype)
        destination = ones(np.uint16, len(pairs), 2)
        bits = run("pack", source=pairs, destination=destination, element=element, **threads_of(pairs))
        is_nan = np.isnan(pairs)
        assert np.isnan(bits.view(dtype)[is_nan].astype(np.float32)).all()
        assert (bits == expected.view(np.uint16))[~is_nan].all()


CHECKS = tuple(value for name, value in list(globals().items()) if name.startswith("check_"))
