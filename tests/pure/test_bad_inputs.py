"""Every wrong input raises the right error, and the message names the argument, what was got and what is expected."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.spec.options import MAX_SEQLEN

BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K, DIM, DIM_V = 2, 4, 2, 5, 6, 8, 3


def good_arrays():
    """Arguments of a forward call that works, with every optional input and result."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    return {
        "q": normal(BATCH, HEADS, SEQLEN_Q, DIM),
        "k": normal(BATCH, HEADS_KV, SEQLEN_K, DIM),
        "v": normal(BATCH, HEADS_KV, SEQLEN_K, DIM_V),
        "bias": normal(HEADS, 1, SEQLEN_K),
        "mask": np.ones((SEQLEN_Q, SEQLEN_K), bool),
        "kv_lengths": np.array([6, 2]),
        "alibi_slopes": normal(HEADS),
        "sinks": normal(HEADS),
        "block_mask": np.ones((BATCH, HEADS, 1, 1), bool),
        "out": np.zeros((BATCH, HEADS, SEQLEN_Q, DIM_V), np.float32),
        "lse": np.zeros((BATCH, HEADS, SEQLEN_Q), np.float32),
    }


def good_backward_arrays():
    arrays = good_arrays()
    inputs = {name: x for name, x in arrays.items() if name not in ("out", "lse")}
    arrays["out"], arrays["lse"] = cuflash.FlashAttention(softcap=5.0).forward(**inputs)
    arrays["dout"], arrays["dlse"] = np.ones_like(arrays["out"]), np.ones_like(arrays["lse"])
    for name in ("q", "k", "v", "bias", "alibi_slopes", "sinks"):
        arrays[f"d{name}"] = np.zeros_like(arrays[name])
    arrays["dscale"], arrays["dsoftcap"] = np.zeros((), np.float32), np.zeros((), np.float32)
    return arrays


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def repeated(x):
    """An array of x's shape whose first axis is one entry over and over."""
    return np.lib.stride_tricks.as_strided(x.copy(), x.shape, (0, *x.strides[1:]))


def crossed(x):
    """An array of x's shape whose second axis has the steps of the third, so that rows of heads lie in one another."""
    strides = (x.nbytes, x.strides[2], *x.strides[2:])
    return np.lib.stride_tricks.as_strided(np.zeros(2 * x.size, x.dtype), x.shape, strides)


class Halfway:
    """Speaks half of the protocol."""

    def __dlpack__(self):
        raise NotImplementedError


class Elsewhere:
    """An array on a device that is neither the host nor a CUDA device."""

    def __dlpack_device__(self):
        return (8, 0)

    def __dlpack__(self, **how):
        raise BufferError


class Subclass(np.ndarray):
    pass


class Frame:
    """A table, as those of pandas."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Sparse:
    """A sparse matrix, as those of SciPy."""

    def toarray(self):
        raise NotImplementedError


ARRAY = "a NumPy or CuPy array, or one with __dlpack__"
PLAIN = "a plain numpy.ndarray: numpy.asarray("
DTYPES = "float16, bfloat16, float32 or float64"
OF_Q = "float32 as q has, or float8_e4m3fn or float8_e5m2"
CAUSAL = "False, True (bottom-right aligned), 'top_left' or 'lengths'"
SCORES = "a shape that broadcasts to (batch, num_heads, seqlen_q, seqlen_k) = (2, 4, 5, 6)"
IS_BOOL = "bool (True takes part; additive terms go into bias)"

# Argument, a bad value of it, the error, what was got, what is expected.
BAD_OPTIONS = [
    ("causal", "bottom_right", ValueError, "'bottom_right'", CAUSAL),
    ("causal", "length", ValueError, "'length'", CAUSAL),
    ("causal", 1, TypeError, "int 1", CAUSAL),
    ("causal", np.ones(2, bool), TypeError, "ndarray array([ True, True])", CAUSAL),
    ("causal", None, TypeError, "None", CAUSAL),
    ("scale", "0.1", TypeError, "str '0.1'", "None or a real number"),
    ("scale", True, TypeError, "bool True", "None or a real number"),
    ("scale", 1j, TypeError, "complex 1j", "None or a real number"),
    ("scale", np.ones(2), TypeError, "ndarray array([1., 1.])", "None or a real number"),
    ("scale", np.array(True), TypeError, "ndarray array(True)", "None or a real number"),
    ("scale", np.False_, TypeError, "bool np.False_", "None or a real number"),
    ("scale", 10**400, ValueError, "int 1" + 195 * "0" + "...", "a finite number that float64 holds"),
    ("scale", 10**5000, ValueError, "int of thousands of digits", "a finite number that float64 holds"),
    ("scale", Decimal("1e400"), ValueError, "1E+400", "a finite number that float64 holds"),
    ("scale", Decimal("sNaN"), ValueError, "Decimal('sNaN')", "a finite number that float64 holds"),
    ("scale", Fraction(10**400, 3), ValueError, "Fraction(1" + 190 * "0" + "...", "a finite number that float64 holds"),
    ("scale", float("nan"), ValueError, "nan", "a finite number"),
    ("scale", float("-inf"), ValueError, "-inf", "a finite number"),
    ("window", 3, TypeError, "int 3", "None or (left, right)"),
    ("window", "ab", TypeError, "str 'ab'", "None or (left, right)"),
    ("window", (1,), ValueError, "(1,)", "two entries (left, right)"),
    ("window", (1, 2, 3), ValueError, "(1, 2, 3)", "two entries (left, right)"),
    ("window left", (-1, 0), ValueError, "-1", "None (no bound) or an integer >= 0"),
    ("window right", (0, -1), ValueError, "-1", "None (no bound) or an integer >= 0"),
    ("window left", (1.0, None), TypeError, "float 1.0", "None or an integer"),
    ("window right", (None, True), TypeError, "bool True", "None or an integer"),
    ("window left", (np.True_, None), TypeError, "bool np.True_", "None or an integer"),
    ("window left", (np.float64(1), None), TypeError, "np.float64(1.0)", "None or an integer"),
    ("window left", (Decimal("1.5"), None), ValueError, "Decimal('1.5')", "None or an integer"),
    ("window right", (0, Fraction(7, 2)), ValueError, "Fraction(7, 2)", "None or an integer"),
    ("window right", (0, Decimal("Infinity")), ValueError, "Decimal('Infinity')", "None or an integer"),
    ("softcap", 0, ValueError, "0.0", "None or a number > 0"),
    ("softcap", -30.0, ValueError, "-30.0", "None or a number > 0"),
    ("softcap", float("inf"), ValueError, "inf", "a finite number"),
    ("softcap", "30", TypeError, "str '30'", "None or a real number"),
    ("layout", "sbhd", ValueError, "'sbhd'", "'bhsd' or 'bshd'"),
    ("layout", "BHSD", ValueError, "'BHSD'", "'bhsd' or 'bshd'"),
    ("layout", None, TypeError, "None", "'bhsd' or 'bshd'"),
    ("deterministic", 1, TypeError, "int 1", "a bool"),
    ("deterministic", None, TypeError, "None", "a bool"),
    ("batch_invariant", 1, TypeError, "int 1", "a bool"),
    ("precision", "high", ValueError, "'high'", "'highest' or 'tf32'"),
    ("precision", None, TypeError, "None", "'highest' or 'tf32'"),
    ("block_size rows", "128", TypeError, "str '128'", "an integer"),
    ("block_size rows", 64.0, TypeError, "float 64.0", "an integer"),
    ("block_size rows", Decimal("64.5"), ValueError, "Decimal('64.5')", "an integer"),
    ("block_size keys", (64, True), TypeError, "bool True", "an integer"),
    ("block_size", (64,), ValueError, "(64,)", "an integer or two of them, (rows, keys)"),
    ("block_size rows", 0, ValueError, "0", "a multiple of 16 from 16 to 1024"),
    ("block_size keys", (64, 72), ValueError, "72", "a multiple of 16 from 16 to 1024"),
    ("block_size keys", (64, 1040), ValueError, "1040", "a multiple of 16 from 16 to 1024"),
]

# The value is made from the good one, `x`, where it is a function.
BAD_INPUTS = [
    # No array, or not one that means what it says.
    ("q", None, TypeError, "None", "an array"),
    ("q", lambda x: x.tolist(), TypeError, "list", f"{ARRAY}: numpy.asarray(q)"),
    ("k", (1, 2), TypeError, "tuple", f"{ARRAY}: numpy.asarray(k)"),
    ("v", lambda x: Frame(x), TypeError, "test_bad_inputs.Frame", f"{ARRAY}: numpy.asarray(v)"),
    ("q", lambda x: memoryview(x), TypeError, "memoryview", f"{ARRAY}: numpy.asarray(q)"),
    ("k", lambda x: Sparse(), TypeError, "test_bad_inputs.Sparse", f"{ARRAY}: k.toarray()"),
    ("k", lambda x: cuflash.quantize(x), TypeError, "cuflash.Quantized", f"{ARRAY}: k.array, and k_scale=k.scale"),
    ("v", 1.0, TypeError, "float 1.0", ARRAY),
    ("q", np.float32(1), TypeError, "numpy.float32", ARRAY),
    ("k", "k", TypeError, "str 'k'", ARRAY),
    ("v", np.ndarray, TypeError, "type", ARRAY),
    ("q", Halfway(), TypeError, "test_bad_inputs.Halfway", ARRAY),
    ("v", Elsewhere(), TypeError, "test_bad_inputs.Elsewhere", "an array of numpy as q is"),
    ("q", np.ma.asarray, TypeError, "numpy.MaskedArray", f"{PLAIN}q), which leaves out what the subclass adds"),
    ("k", lambda x: x[0, 0].view(np.matrix), TypeError, "numpy.matrix", f"{PLAIN}k)"),
    ("v", lambda x: x.view(Subclass), TypeError, "test_bad_inputs.Subclass", f"{PLAIN}v)"),
    ("mask", np.ma.asarray, TypeError, "numpy.MaskedArray", f"{PLAIN}mask)"),
    # dtypes
    ("q", lambda x: x.astype(object), TypeError, "dtype object", DTYPES),
    ("q", lambda x: x.astype(np.int64), TypeError, "dtype int64", DTYPES),
    ("k", lambda x: x > 0, TypeError, "dtype bool", OF_Q),
    ("k", lambda x: x.astype(np.int32), TypeError, "dtype int32", OF_Q),
    ("v", lambda x: x.astype(np.complex64), TypeError, "dtype complex64", OF_Q),
    (
        "k",
        lambda x: x.view(np.uint8),
        TypeError,
        "dtype uint8",
        f"{OF_Q}: cuflash.fp8(k, 'e4m3') for bytes that are fp8",
    ),
    (
        "q",
        lambda x: x.view(np.uint8),
        TypeError,
        "dtype uint8",
        f"{DTYPES}, or float8_e4m3fn or float8_e5m2: cuflash.fp8(q",
    ),
    ("v", lambda x: x.astype(ml_dtypes.float8_e4m3fn), TypeError, "dtype float8_e4m3fn", "float32 as q has"),
    ("q", lambda x: x.view(np.dtype([("x", np.float32)])), TypeError, "dtype [('x', '<f4')]", DTYPES),
    ("q", lambda x: x.astype(">f4"), TypeError, "dtype >f4", "native byte order: q.astype('float32')"),
    ("k", lambda x: x.astype(np.float64), TypeError, "dtype float64", "float32 as q has"),
    ("v", lambda x: x.astype(np.float16), TypeError, "dtype float16", "float32 as q has"),
    ("v", lambda x: x.astype(ml_dtypes.bfloat16), TypeError, "dtype bfloat16", "float32 as q has"),
    # shapes
    ("q", lambda x: x[0, 0, 0], ValueError, "1-D shape (8,)", "an array of two axes or more"),
    ("k", np.array(1.0, np.float32), ValueError, "0-D shape ()", "an array of two axes or more"),
    (
        *("v", lambda x: np.repeat(x, 2, 0), ValueError, "batch axes (4,) in shape (4, 2, 6, 3)"),
        "batch axes that broadcast with (2,), which those before it have",
    ),
    ("k", lambda x: x[..., :7], ValueError, "head_dim 7", "head_dim 8 as q has"),
    ("v", lambda x: x[:, :1], ValueError, "num_heads_kv 1", "num_heads_kv 2 as k has"),
    ("v", lambda x: x[:, :, :5], ValueError, "seqlen_k 5", "seqlen_k 6 as k has"),
    # bias
    ("bias", lambda x: x.tolist(), TypeError, "list", ARRAY),
    ("bias", "0.0", TypeError, "str '0.0'", ARRAY),
    ("bias", 1e39, ValueError, "float 1e+39", "a number that float32 holds"),
    ("bias", 10**400, ValueError, "int 1" + 195 * "0" + "...", "a number that float32 holds"),
    ("bias", True, TypeError, "dtype bool", "float32"),
    ("bias", np.int64(0), TypeError, "dtype int64", "float32"),
    ("bias", np.complex64(0), TypeError, "dtype complex64", "float32"),
    ("bias", lambda x: x > 0, TypeError, "dtype bool", "float32"),
    ("bias", lambda x: x.astype(np.float64), TypeError, "dtype float64", "float32"),
    ("bias", lambda x: x.astype(np.float16), TypeError, "dtype float16", "float32"),
    ("bias", lambda x: x.astype(">f4"), TypeError, "dtype >f4", "native byte order"),
    ("bias", lambda x: x[:3], ValueError, "shape (3, 1, 6)", SCORES),
    ("bias", lambda x: x[None, None], ValueError, "shape (1, 1, 4, 1, 6)", SCORES),
    ("bias", lambda x: x[..., :5], ValueError, "shape (4, 1, 5)", SCORES),
    # mask
    ("mask", 1, TypeError, "dtype int64", IS_BOOL),
    ("mask", 1.0, TypeError, "dtype float64", IS_BOOL),
    ("mask", lambda x: x.astype(np.float32), TypeError, "dtype float32", IS_BOOL),
    ("mask", lambda x: x.astype(np.uint8), TypeError, "dtype uint8", IS_BOOL),
    ("mask", lambda x: x.T, ValueError, "shape (6, 5)", SCORES),
    ("mask", lambda x: np.ones((4, 2, 1, 1), bool), ValueError, "shape (4, 2, 1, 1)", SCORES),
    (
        "mask",
        np.ones((2, 6), bool),
        ValueError,
        "shape (2, 6)",
        f"{SCORES}: mask[:, None, None, :], if it is one of keys",
    ),
    # kv_lengths
    ("kv_lengths", [6, 2], TypeError, "list", ARRAY),
    ("kv_lengths", 6.0, TypeError, "dtype float64", "int32 or int64"),
    ("kv_lengths", 2**63, ValueError, "int 9223372036854775808", "a number that int64 holds"),
    ("kv_lengths", 7, ValueError, "an entry 7", "0 to seqlen_k = 6"),
    ("kv_lengths", lambda x: x.astype(np.float32), TypeError, "dtype float32", "int32 or int64"),
    ("kv_lengths", lambda x: x.astype(np.uint64), TypeError, "dtype uint64", "int32 or int64"),
    ("kv_lengths", lambda x: x.astype(">i8"), TypeError, "dtype >i8", "native byte order"),
    ("kv_lengths", lambda x: x[:, None], ValueError, "shape (2, 1)", "(batch,) = (2,)"),
    ("kv_lengths", np.array([3, -1]), ValueError, "an entry -1", "0 to seqlen_k = 6"),
    ("kv_lengths", np.array([7, 3], np.int32), ValueError, "an entry 7", "0 to seqlen_k = 6"),
    # alibi_slopes
    ("alibi_slopes", lambda x: x.tolist(), TypeError, "list", ARRAY),
    ("alibi_slopes", lambda x: x.astype(np.float64), TypeError, "dtype float64", "float32"),
    ("alibi_slopes", lambda x: x[:2], ValueError, "shape (2,)", "(num_heads,) = (4,) or (batch, num_heads) = (2, 4)"),
    ("alibi_slopes", lambda x: x[:, None], ValueError, "shape (4, 1)", "(num_heads,) = (4,) or"),
    # sinks
    ("sinks", lambda x: x.tolist(), TypeError, "list", ARRAY),
    ("sinks", 0.0, ValueError, "shape ()", "(num_heads,) = (4,)"),
    ("sinks", lambda x: x.astype(np.float16), TypeError, "dtype float16", "float32"),
    ("sinks", lambda x: x[:2], ValueError, "shape (2,)", "(num_heads,) = (4,)"),
    ("sinks", lambda x: np.stack([x, x]), ValueError, "shape (2, 4)", "(num_heads,) = (4,)"),
    # block_mask
    ("block_mask", lambda x: x.tolist(), TypeError, "list", ARRAY),
    ("block_mask", lambda x: x.astype(np.uint8), TypeError, "dtype uint8", "bool"),
    ("block_mask", lambda x: x[0, 0, 0], ValueError, "shape (1,)", "(..., ceil(seqlen_q / 128), ceil("),
    ("block_mask", lambda x: np.ones((5, 6), bool), ValueError, "shape (5, 6)", "(..., ceil(seqlen_q / 128),"),
    ("block_mask", lambda x: x[:, :3], ValueError, "shape (2, 3, 1, 1)", "a shape that broadcasts to (batch,"),
    ("block_mask", lambda x: x[None], ValueError, "shape (1, 2, 4, 1, 1)", "a shape that broadcasts to (batch,"),
]

BAD_RESULTS = [
    ("out", lambda x: x.tolist(), TypeError, "list", ARRAY),
    ("out", lambda x: x.astype(np.float64), TypeError, "dtype float64", "float32"),
    ("out", lambda x: x.astype(">f4"), TypeError, "dtype >f4", "native byte order"),
    ("out", lambda x: x[..., :2], ValueError, "shape (2, 4, 5, 2)", "(2, 4, 5, 3)"),
    ("out", lambda x: x.swapaxes(1, 2), ValueError, "shape (2, 5, 4, 3)", "(2, 4, 5, 3)"),
    ("out", lambda x: x.reshape(-1), ValueError, "shape (120,)", "(2, 4, 5, 3)"),
    ("out", read_only, ValueError, "a read-only array", "a writable one"),
    ("out", repeated, ValueError, "strides (0, 60, 12, 4)", "an array whose elements are all distinct in memory"),
    ("out", crossed, ValueError, "strides (480, 12, 12, 4)", "an array whose elements are all distinct in memory"),
    ("lse", lambda x: np.ones_like(x, np.float16), TypeError, "dtype float16", "float32"),
    ("lse", lambda x: x[..., None], ValueError, "shape (2, 4, 5, 1)", "(2, 4, 5)"),
    ("lse", read_only, ValueError, "a read-only array", "a writable one"),
]

BAD_BACKWARD = [
    ("dout", None, TypeError, "None", "an array"),
    ("dout", lambda x: x.tolist(), TypeError, "list", ARRAY),
    ("dout", lambda x: x.astype(np.float64), TypeError, "dtype float64", "float32"),
    ("dout", lambda x: x[..., :1], ValueError, "shape (2, 4, 5, 1)", "(2, 4, 5, 3): numpy.broadcast_to(dout, (2, "),
    ("dout", lambda x: x[:1], ValueError, "shape (1, 4, 5, 3)", "(2, 4, 5, 3): numpy.broadcast_to(dout, (2, "),
    ("dout", lambda x: x[0], ValueError, "shape (4, 5, 3)", "(2, 4, 5, 3): numpy.broadcast_to(dout, (2, 4, 5, 3)), if"),
    ("out", lambda x: x[0], ValueError, "shape (4, 5, 3)", "(2, 4, 5, 3): numpy.broadcast_to(out, (2, 4, 5, 3)), if"),
    ("lse", lambda x: x[:1], ValueError, "shape (1, 4, 5)", "(2, 4, 5): numpy.broadcast_to(lse, (2, 4, 5)), if that"),
    ("dlse", lambda x: x[1], ValueError, "shape (4, 5)", "(2, 4, 5): numpy.broadcast_to(dlse, (2, 4, 5)), if that is"),
    ("out", None, TypeError, "None", "an array"),
    ("out", lambda x: x.astype(np.float16), TypeError, "dtype float16", "float32"),
    ("lse", None, TypeError, "None", "an array"),
    ("lse", lambda x: x.astype(np.float64), TypeError, "dtype float64", "float32"),
    ("lse", lambda x: x[:, 0], ValueError, "shape (2, 5)", "(2, 4, 5)"),
    ("lse", lambda x: x.swapaxes(1, 2), ValueError, "shape (2, 5, 4)", "(2, 4, 5)"),
    ("dlse", lambda x: x.tolist(), TypeError, "list", ARRAY),
    ("dlse", 1.0, TypeError, "float 1.0", ARRAY),
    ("dlse", lambda x: x.astype(np.float64), TypeError, "dtype float64", "float32"),
    ("dlse", lambda x: x[..., None], ValueError, "shape (2, 4, 5, 1)", "(2, 4, 5)"),
    ("q", lambda x: x.astype(np.int32), TypeError, "dtype int32", DTYPES),
    ("kv_lengths", np.array([-1, 3]), ValueError, "an entry -1", "0 to seqlen_k = 6"),
    ("dq", lambda x: x[:, :2], ValueError, "shape (2, 2, 5, 8)", "(2, 4, 5, 8)"),
    ("dq", lambda x: x.astype(ml_dtypes.bfloat16), TypeError, "dtype bfloat16", "float32"),
    ("dk", read_only, ValueError, "a read-only array", "a writable one"),
    ("dk", lambda x: np.repeat(x, 2, 1), ValueError, "shape (2, 4, 6, 8)", "(2, 2, 6, 8)"),
    ("dv", "dv", TypeError, "str 'dv'", ARRAY),
    ("dv", repeated, ValueError, "strides (0, 72, 12, 4)", "an array whose elements are all distinct in memory"),
    ("dk", crossed, ValueError, "strides (768, 32, 32, 4)", "an array whose elements are all distinct in memory"),
    ("dsinks", lambda x: x[:2], ValueError, "shape (2,)", "(4,)"),
    ("dsinks", lambda x: x.astype(np.float64), TypeError, "dtype float64", "float32"),
    ("dsinks", read_only, ValueError, "a read-only array", "a writable one"),
    ("need", "dsinks", TypeError, "str 'dsinks'", "a collection of names of gradients"),
    ("need", 3, TypeError, "int 3", "a collection of names of gradients"),
    ("need", ("dq", "dmask"), ValueError, "'dmask'", "'dq', 'dk', 'dv', 'dbias', 'dalibi_slopes', 'dscale', 'dsoft"),
    ("dbias", lambda x: x[0], ValueError, "shape (1, 6)", "(4, 1, 6)"),
    ("dbias", lambda x: x.astype(np.float16), TypeError, "dtype float16", "float32"),
    ("dalibi_slopes", lambda x: np.stack([x, x]), ValueError, "shape (2, 4)", "(4,)"),
    ("dscale", lambda x: x[None], ValueError, "shape (1,)", "()"),
    ("dscale", np.float32(0), TypeError, "numpy.float32", ARRAY),
    ("dsoftcap", lambda x: x.astype(np.float64), TypeError, "dtype float64", "float32"),
    ("dsoftcap", read_only, ValueError, "a read-only array", "a writable one"),
]


def title(row):
    name, value, *_ = row
    return f"{name}-{value.__name__ if hasattr(value, '__name__') else type(value).__name__}"


def numbered(rows):
    return [pytest.param(*row, id=f"{n:02}-{title(row)}") for n, row in enumerate(rows)]


def made(value, good):
    return value(good) if callable(value) and not isinstance(value, type) else value


def assert_complains(call, error, name, got, expected):
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    message = str(raised.value)
    assert re.match(r"(\w+ ?\w*): got .+, expected .+", message), message
    got_words, expected_words = message.split(", expected ", 1)
    assert got_words.endswith(f": got {got}"), message
    assert expected_words.startswith(expected), message
    assert message.startswith(f"{name}: got"), message


def test_the_good_arrays_are_good():
    cuflash.FlashAttention().forward(**good_arrays())
    cuflash.FlashAttention(softcap=5.0).backward(**good_backward_arrays())


@pytest.mark.parametrize(("name", "value", "error", "got", "expected"), numbered(BAD_OPTIONS))
def test_option(name, value, error, got, expected):
    option = {name.split()[0]: value}
    assert_complains(lambda: cuflash.FlashAttention(**option), error, name, got, expected)
    if name not in ("deterministic", "precision"):
        q = np.ones((3, 4))
        assert_complains(lambda: cuflash.attention(q, q, q, **option), error, name, got, expected)


@pytest.mark.parametrize(("name", "value", "error", "got", "expected"), numbered(BAD_INPUTS))
def test_input(name, value, error, got, expected):
    arrays = good_arrays()
    arrays[name] = made(value, arrays[name])
    attn = cuflash.FlashAttention()
    assert_complains(lambda: attn.forward(**arrays), error, name, got, expected)
    del arrays["lse"]
    assert_complains(lambda: cuflash.attention(**arrays), error, name, got, expected)
    del arrays["out"]
    for method in (attn.plan, attn.compile):
        assert_complains(lambda method=method: method(**arrays), error, name, got, expected)


@pytest.mark.parametrize(("name", "value", "error", "got", "expected"), numbered(BAD_RESULTS))
def test_result(name, value, error, got, expected):
    arrays = good_arrays()
    arrays[name] = made(value, arrays[name])
    assert_complains(lambda: cuflash.FlashAttention().forward(**arrays), error, name, got, expected)


@pytest.mark.parametrize(("name", "value", "error", "got", "expected"), numbered(BAD_BACKWARD))
def test_backward(name, value, error, got, expected):
    arrays = good_backward_arrays()
    arrays[name] = made(value, arrays.get(name))
    assert_complains(lambda: cuflash.FlashAttention(softcap=5.0).backward(**arrays), error, name, got, expected)


@pytest.mark.parametrize("given", ["need", "result"])
@pytest.mark.parametrize("of", ["bias", "alibi_slopes", "softcap", "sinks"])
def test_gradients_of_what_is_not_there(of, given):
    arrays = good_backward_arrays()
    arrays |= {} if of == "softcap" else {of: None}
    arrays |= {f"d{of}": None, "need": ("dq", f"d{of}")} if given == "need" else {}
    attn = cuflash.FlashAttention(softcap=None if of == "softcap" else 5.0)
    expected = "FlashAttention(softcap=...)" if of == "softcap" else f"the {of} that forward took"
    complaint = (ValueError, "need" if given == "need" else f"d{of}", f"d{of} without {of}", expected)
    assert_complains(lambda: attn.backward(**arrays), *complaint)


@pytest.mark.parametrize("result", ["out", "lse"])
@pytest.mark.parametrize("other", ["q", "k", "v", "bias", "mask", "kv_lengths", "alibi_slopes", "sinks", "block_mask"])
def test_result_overlaps_an_argument(result, other):
    arrays = good_arrays()
    arrays[result], arrays[other] = overlapping(arrays[result], arrays[other])
    complaint = (ValueError, result, f"memory shared with {other}", "memory of its own")
    assert_complains(lambda: cuflash.FlashAttention().forward(**arrays), *complaint)


@pytest.mark.parametrize("result", ["out", "lse"])
@pytest.mark.parametrize("other", ["cu_seqlens_q", "cu_seqlens_k", "block_table", "kv_lengths"])
def test_result_overlaps_what_says_where_rows_lie(result, other):
    if other.startswith("cu"):
        q: Any = np.ones((2, 16, 4), np.float32)
        arrays: dict[str, Any] = {"q": q, "k": q, "v": q} | {
            f"cu_seqlens_{x}": np.array([0, 9, 16], np.int32) for x in "qk"
        }
    else:
        q, pool = np.ones((1, 2, 16, 4), np.float32), np.ones((3, 2, 16, 4), np.float32)
        table = {"block_table": np.array([[2, 0]], np.int32), "kv_lengths": np.array([20])}
        arrays = {"q": q, "k": pool, "v": pool} | table
    arrays |= {"out": np.empty_like(q), "lse": np.empty(q.shape[:-1], np.float32)}
    arrays[result], arrays[other] = overlapping(arrays[result], arrays[other])
    complaint = (ValueError, result, f"memory shared with {other}", "memory of its own")
    assert_complains(lambda: cuflash.FlashAttention().forward(**arrays), *complaint)


@pytest.mark.parametrize("result", ["dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks"])
@pytest.mark.parametrize("other", ["q", "k", "v", "bias", "dout", "out", "lse", "dlse", "sinks"])
def test_gradient_overlaps_an_argument(result, other):
    arrays = good_backward_arrays()
    arrays[result], arrays[other] = overlapping(arrays[result], arrays[other])
    complaint = (ValueError, result, f"memory shared with {other}", "memory of its own")
    assert_complains(lambda: cuflash.FlashAttention(softcap=5.0).backward(**arrays), *complaint)


@pytest.mark.parametrize(
    ("method", "arrays", "first", "second"),
    [
        ("forward", good_arrays, "out", "lse"),
        ("backward", good_backward_arrays, "dq", "dk"),
        ("backward", good_backward_arrays, "dq", "dv"),
        ("backward", good_backward_arrays, "dk", "dv"),
    ],
)
def test_results_overlap_each_other(method, arrays, first, second):
    arrays = arrays()
    arrays[first], arrays[second] = overlapping(arrays[first], arrays[second])
    complaint = (ValueError, second, f"memory shared with {first}", "memory of its own")
    assert_complains(lambda: getattr(cuflash.FlashAttention(softcap=5.0), method)(**arrays), *complaint)


def overlapping(*arrays):
    """The same arrays in memory whose last and first bytes they share."""
    shared = np.zeros(sum(x.nbytes for x in arrays) - 8, np.uint8)
    first, second = arrays
    flat = shared[: first.nbytes].view(first.dtype), shared[-second.nbytes :].view(second.dtype)
    views = [view.reshape(x.shape) for view, x in zip(flat, arrays, strict=True)]
    views[0][...], views[1][...] = first, second
    return views


def test_no_device_that_cuflash_knows():
    x = Elsewhere()
    complaint = (TypeError, "q", "DLPack device type 8 (number 0)", "host memory (1, 3) or CUDA memory (2, 13)")
    assert_complains(lambda: cuflash.attention(x, x, x), *complaint)


@pytest.mark.parametrize(("heads", "heads_kv"), [(3, 2), (1, 2), (2, 4), (2, 0)])
def test_heads_that_do_not_divide(heads, heads_kv):
    q, k = np.ones((heads, 3, 4)), np.ones((heads_kv, 3, 4))
    of_q = "1 head" if heads == 1 else f"{heads} heads"
    complaint = (ValueError, "k", f"{heads_kv} heads", f"a divisor of the {of_q} of q")
    assert_complains(lambda: cuflash.attention(q, k, k), *complaint)


def test_vectors_are_no_matrices():
    q = np.ones(4)
    expected = "an array of two axes or more, (..., heads, seqlen, head_dim)"
    for arrays in ((q, q, q), (q, np.ones((3, 4)), np.ones((3, 4)))):
        complaint = (ValueError, "q", "1-D shape (4,)", expected)
        assert_complains(lambda arrays=arrays: cuflash.attention(*arrays), *complaint)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_arrays_in_the_other_layout(layout):
    """Where the numbers of rows and heads tell."""
    other = "bshd" if layout == "bhsd" else "bhsd"
    q, k, same = (np.ones((n, heads, 8)) for n, heads in ((100, 4), (70, 2), (100, 4)))
    q, k, same = (x.swapaxes(0, 1) if layout == "bshd" else x for x in (q, k, same))
    expected = f"a divisor of the 100 heads of q; with layout='{other}' q has 4 heads, and k 2"
    complaint = (ValueError, "k", "70 heads", expected)
    assert_complains(lambda: cuflash.attention(q, k, k, layout=layout), *complaint)
    starts = np.array([0, 40, 70])
    keywords = {"layout": layout, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    expected = (
        f"at most 4, the length of the axis of sequences in layout '{layout}'; with layout='{other}' that axis has"
    )
    complaint = (ValueError, "cu_seqlens_q", "a last entry 70", expected)
    assert_complains(lambda: cuflash.attention(q, same, same, **keywords), *complaint)


def test_sequence_beyond_32_bit_positions():
    q = np.broadcast_to(np.float32(0), (2**31, 1))
    for name, arrays in (("q", (q, q[:1], q[:1])), ("k", (q[:1], q, q))):
        complaint = (ValueError, name, "seqlen 2147483648", f"at most {MAX_SEQLEN}")
        assert_complains(lambda arrays=arrays: cuflash.FlashAttention().plan(*arrays), *complaint)


@pytest.mark.parametrize(
    "call",
    [
        lambda attn, q: attn.forward(q, q),
        lambda attn, q: attn.forward(q, q, q, q),
        lambda attn, q: attn.forward(q, q, q, causal=True),
        lambda attn, q: attn.backward(q, q, q, q),
        lambda attn, q: cuflash.attention(q, q, q, True),  # type: ignore[call-overload]  # what is tested, here and below
        lambda attn, q: cuflash.attention(q, q, q, attn_mask=q),  # type: ignore[call-overload]
        lambda attn, q: cuflash.FlashAttention(True),  # type: ignore[call-overload]
        lambda attn, q: cuflash.FlashAttention(drop=0.1),  # type: ignore[call-overload]
    ],
)
def test_unknown_and_misplaced_arguments(call):
    with pytest.raises(TypeError, match="argument"):
        call(cuflash.FlashAttention(), np.ones((3, 4)))


def test_a_refused_call_leaves_its_results_alone():
    arrays = good_arrays()
    arrays["out"][...], arrays["lse"] = 7, arrays["lse"][:1]
    with pytest.raises(ValueError, match="lse"):
        cuflash.FlashAttention().forward(**arrays)
    assert (arrays["out"] == 7).all()


def test_there_are_enough_of_them():
    distinct = {(name, got) for name, _, _, got, _ in BAD_OPTIONS + BAD_INPUTS + BAD_RESULTS + BAD_BACKWARD}
    assert len(distinct) >= 60


@pytest.mark.parametrize(
    "names", [np.zeros((2, 2)), np.zeros(()), np.array([0.5, 1.5]), (np.zeros(2),), np.array("max")]
)
@pytest.mark.parametrize("argument", ["want", "need", "passes", "per", "cotangents"])
def test_arrays_in_place_of_names(argument, names):
    attn, arrays = cuflash.FlashAttention(), {name: np.ones((1, 2, 3, 4), np.float32) for name in "qkv"}
    out, lse = attn.forward(**arrays)
    unnamed, planner = cast("Any", ({0: names}, attn))
    calls = {
        "want": lambda: attn.forward(**arrays, want=names),
        "need": lambda: attn.backward(out, **arrays, out=out, lse=lse, need=names),
        "passes": lambda: planner.plan(**arrays, passes=names),
        "per": lambda: cuflash.quantize(arrays["k"], per=names),
        "cotangents": lambda: cuflash.double_backward(attn, unnamed, out, **arrays),
    }
    with pytest.raises((TypeError, ValueError), match=f"^{argument}: got .*, expected "):
        calls[argument]()
