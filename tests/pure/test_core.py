"""The compiled core of the CPU path: every instruction set, memory, and who computes what."""

import ctypes
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash import cpu
from cuflash.cpu import core
from cuflash.spec.problem import make_problem
from cuflash.testing import measure, yardsticks
from tests.compiled import INSTRUCTION_SETS, functions, much_work, run, run_python, take_way, way_taken
from tests.judging import assert_oracle, assert_same_bits
from tests.sampling import examples

if core.why_not() is not None:
    pytest.skip(f"no compiled core: {core.why_not()}", allow_module_level=True)

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", "pages", "packed", "lengths")


@pytest.fixture(params=[limit for _, limit in INSTRUCTION_SETS], ids=[name for name, _ in INSTRUCTION_SETS])
def instruction_set(request, monkeypatch):
    take_way(monkeypatch, request.param)
    return request.param


def is_served(case):
    """Whether these options go together."""
    return not (case.page_size and (case.cu_seqlens_q is not None or case.block_mask is not None))


# ---- against the oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_option_on_every_instruction_set(dtype):
    @settings(max_examples=examples(60))
    @given(ct.cases(dtypes=[dtype], min_seqlen=0, features=FEATURES).filter(is_served))
    def every_case(case):
        judge_by_every_instruction_set(case)

    every_case()


def judge_by_every_instruction_set(case, **options):
    """The oracle takes longer than they do."""
    for _, way in INSTRUCTION_SETS:
        with way_taken(way):
            assert_oracle(case, run(case, **options))


def judge_on_threads(case):
    """Within the oracle rule on three threads, and the same bits on one."""
    with pytest.MonkeyPatch.context() as patch:
        much_work(patch)
        with cuflash.cpu_threads(3):
            results = run(case)
        assert_oracle(case, results)
        with cuflash.cpu_threads(1):
            assert_same_bits(run(case), results)


@settings(max_examples=examples(60))
@given(ct.cases(min_seqlen=0, features=FEATURES, max_seqlen=600, max_scores=2**18, max_head_dim=16).filter(is_served))
def test_several_tiles_on_several_threads(case):
    with pytest.MonkeyPatch.context() as patch:
        much_work(patch)
        with cuflash.cpu_threads(3):
            assert_oracle(case, run(case))


MANY_ROWS = st.tuples(st.sampled_from([(16, 16), (32, 4), (9, 1)]), st.integers(380, 600), st.integers(1, 200))
MANY_KEYS = st.tuples(st.sampled_from([(32, 32), (32, 16), (12, 12)]), st.integers(1, 150), st.integers(380, 600))


@settings(max_examples=examples(60))
@given(
    MANY_ROWS | MANY_KEYS, st.sampled_from([5, 16]), st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    st.booleans(), st.sampled_from(["", "mask", "block_mask", "bias", "alibi_slopes", "softcap", "dropout", "window"]),
)  # fmt: skip
def test_long_blocks_and_long_tiles(sizes, head_dim, dtype, causal, more):
    """Many heads have blocks of more rows and tiles of more keys. Jobs that begin last have fewer rows."""
    heads, seqlen_q, seqlen_k = sizes
    options: dict[str, Any] = {
        "mask": (seqlen_q, seqlen_k), "block_mask": (heads[0],), "bias": (heads[0], 1, seqlen_k),
        "alibi_slopes": (heads[0],), "softcap": 3.0, "dropout": 0.3, "window": (90, None if causal else 70),
    }  # fmt: skip
    case = ct.Case(
        num_heads=heads[0], num_heads_kv=heads[1], seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, dtype=dtype,
        causal=causal, block_size=(64, 80), blocks_kept=0.5,
        **{name: x for name, x in options.items() if name == more},
    )  # fmt: skip
    judge_on_threads(case)


BROADCAST = st.tuples(*[st.booleans()] * 4)


@settings(max_examples=examples(80))
@given(
    st.integers(1, 3), st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)]), st.integers(1, 280), st.integers(1, 280),
    BROADCAST, st.sampled_from(["float32", "bfloat16", "float64"]), st.sampled_from([None, (40, 0), (3, 70)]),
    st.sampled_from([None, (16, 48), (64, 64), (32, 160), (112, 16)]), st.sampled_from(["", "lengths", "softcap"]),
)  # fmt: skip
def test_gradients_of_broadcast_biases(batch, heads, seqlen_q, seqlen_k, has_axes, dtype, window, block_size, more):
    """Sums over entries, heads and rows, made by many jobs, some of whose keys are hidden: the same on any threads."""
    whole = (batch, heads[0], seqlen_q, seqlen_k)
    case = ct.Case(
        batch=batch, num_heads=heads[0], num_heads_kv=heads[1], seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=8,
        dtype=dtype, bias=tuple(n if has else 1 for n, has in zip(whole, has_axes, strict=True)), window=window,
        block_mask=None if block_size is None else (heads[0],), block_size=block_size or (16, 16), blocks_kept=0.5,
        kv_lengths=tuple(seqlen_k // (n + 1) for n in range(batch)) if more == "lengths" else None,
        softcap=3.0 if more == "softcap" else None,
    )  # fmt: skip
    judge_on_threads(case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("head_dim", [257, 513, 1024, 1025, 2500])
def test_large_head_dims(head_dim, dtype):
    case = ct.Case(seqlen_q=70, seqlen_k=90, head_dim=head_dim, head_dim_v=2600 - head_dim, dtype=dtype, causal=True)
    judge_by_every_instruction_set(case)


@settings(max_examples=examples(30))
@given(
    st.sampled_from([way for _, way in INSTRUCTION_SETS]),
    st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(1, 40), (3, 600), (33, 40), (70, 20)]),
    st.sampled_from([(1, 1), (4, 2)]), st.sampled_from(ct.STRIDES), st.sampled_from(["", "bias", "mask", "softcap"]),
)  # fmt: skip
@example(0, "bfloat16", 1024, 1023, (70, 20), (1, 1), "contiguous", "")
@example(0, "bfloat16", 2048, 4096, (33, 40), (1, 1), "contiguous", "")
@example(0, "float16", 2048, 2047, (33, 40), (1, 1), "padded", "")
def test_any_head_dim(way, dtype, head_dim, head_dim_v, lengths, heads, strides, more):
    """Rows are copied in pieces, whole or not, and tiles have fewer rows and keys; nothing is left out."""
    options: dict[str, Any] = {"bias": lengths, "mask": lengths, "softcap": 3.0}
    case = ct.Case(
        num_heads=heads[0], num_heads_kv=heads[1], seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim,
        head_dim_v=head_dim_v, dtype=dtype, strides=strides, **{name: x for name, x in options.items() if name == more},
    )  # fmt: skip
    with way_taken(way):
        assert_oracle(case, run(case))


@pytest.mark.parametrize("num_heads", [1, 4, 7])
@pytest.mark.parametrize("seqlen_q", [1, 2, 5])
def test_decoding(num_heads, seqlen_q):
    """Few queries against many keys, which several jobs share."""
    case = ct.Case(
        seqlen_q=seqlen_q, seqlen_k=9001, head_dim=32, num_heads=num_heads, num_heads_kv=1, sinks=True, causal=True,
        seed=1,
    )  # fmt: skip
    assert_oracle(case, run(case))
    assert_oracle(
        case := dataclasses.replace(case, head_dim=33, bias=(num_heads, 1, 9001), strides="padded"), run(case)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_few_rows_read_keys_where_they_lie(dtype, instruction_set):
    """Rows of k and v that are whole vectors, and others, in pages and apart; up to a last tile that is not full."""

    @settings(max_examples=examples(40 if instruction_set else 80))
    @given(
        st.integers(1, 8), st.integers(1, 1100), st.sampled_from([16, 32, 40, 64, 72, 128, 256]),
        st.sampled_from([16, 64, 96]), st.sampled_from([0, 16, 64, 256]), st.sampled_from(["bhsd", "bshd"]),
        st.sampled_from(["contiguous", "padded", "transposed", "flipped"]), st.booleans(), st.booleans(),
    )  # fmt: skip
    def every_case(rows, seqlen_k, head_dim, head_dim_v, page_size, layout, strides, causal, dropout):
        heads = next(n for n in (4, 2, 1) if rows % n == 0)
        case = ct.Case(
            seqlen_q=rows // heads, seqlen_k=-(-seqlen_k // page_size) * page_size if page_size else seqlen_k,
            head_dim=head_dim, head_dim_v=head_dim_v, num_heads=2 * heads, num_heads_kv=2, dtype=dtype, layout=layout,
            page_size=page_size, kv_lengths=(seqlen_k,) if page_size else None, strides=strides, causal=causal,
            dropout=0.3 if dropout else 0.0,
        )  # fmt: skip
        arrays = case.arrays()
        out, lse = cpu.forward(case.problem, *ct.qkv(arrays), **ct.optional(arrays) | case.random)
        ct.assert_forward(case, out, lse)

    every_case()


def test_dq_of_16_bits_without_space_for_its_sums():
    """A slice of a long problem is a short problem, where a window says how far anybody looks."""
    long = ct.Case(seqlen_q=150_000, seqlen_k=150_000, head_dim=64, window=(20, 0), dtype="bfloat16")
    short = dataclasses.replace(long, seqlen_q=2000, seqlen_k=2000)
    attn, arrays = cuflash.FlashAttention(window=(20, 0)), long.arrays()
    assert long.problem.q.nbytes * 2 > 32 << 20 > short.problem.q.nbytes * 2

    def gradients(arrays):
        out, lse = attn.forward(*ct.qkv(arrays))
        return attn.backward(arrays["dout"], *ct.qkv(arrays), out, lse)

    own = {name: x[:, :, 70_000:72_000] for name, x in arrays.items()}
    for of_long, of_short in zip(gradients(arrays), gradients(own), strict=True):
        middle = slice(100, 1900)
        got, expected = of_long[:, :, 70_000:72_000][:, :, middle], of_short[:, :, middle]
        np.testing.assert_allclose(got.astype("f4"), expected.astype("f4"), rtol=0.02, atol=0.02)


@settings(max_examples=examples(10))
@given(st.integers(1, 130), st.sampled_from((1, 2)), st.sampled_from((None, 5.0)), st.sampled_from((32, 64)))
@example(16, 1, None, 64)
@example(48, 2, 5.0, 32)
def test_dq_of_16_bits_of_few_keys_without_space_for_its_sums(seqlen_k, heads, softcap, head_dim):
    """Rows of dq do not depend on each other: those of a slice of the queries are the same, and fit."""
    rows = (32 << 20) // (4 * heads * head_dim) + 1000
    sizes = {"seqlen_q": rows, "seqlen_k": seqlen_k, "num_heads": heads, "num_heads_kv": 1, "head_dim": head_dim}
    case = ct.Case(**sizes, softcap=softcap, dtype="float16")
    arrays, attn = case.arrays(), cuflash.FlashAttention(**case.keywords)

    def dq(first, stop):
        own = {name: x if name in "kv" else np.ascontiguousarray(x[:, :, first:stop]) for name, x in arrays.items()}
        out, lse = attn.forward(*ct.qkv(own))
        return attn.backward(own["dout"], *ct.qkv(own), out, lse, need=("dq",)).dq.astype("f4")

    whole = dq(0, rows)
    for first in (0, rows // 2, rows - 700):
        np.testing.assert_allclose(whole[:, :, first : first + 700], dq(first, first + 700), rtol=0.02, atol=0.02)


@settings(max_examples=examples(20))
@given(st.integers(1, 2), st.integers(1, 200), st.integers(1, 200), st.integers(2, 255), st.booleans())
@example(1, 40, 40, 255, False)
@example(1, 200, 200, 2, True)
def test_true_of_a_mask_is_any_byte_but_zero(heads, rows, keys, byte, is_whole):
    """Views of other bytes have such, and NumPy takes them as True."""
    case = ct.Case(num_heads=heads, seqlen_q=rows, seqlen_k=keys, head_dim=16, mask=(rows, keys))
    arrays = case.arrays()
    mask = np.ones_like(arrays["mask"]) if is_whole else arrays["mask"]
    seen = (mask * np.uint8(byte)).view(bool)
    assert_same_bits(run(case, mask=seen), run(case, mask=mask))


NOT_OF_SMALL_HEADS = ("dscale", "dsoftcap")
SMALL_FEATURES = ("causal", "window", "gqa", "sinks", "kv_lengths", "lengths", "dlse", "head_dim_v", "scale")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_small_heads(dtype):
    @settings(max_examples=examples(60))
    @given(ct.cases(dtypes=[dtype], features=SMALL_FEATURES, ndims=(4,), max_seqlen=128, max_scores=2**14))
    def every_case(case):
        judge_by_every_instruction_set(case, without=NOT_OF_SMALL_HEADS)

    every_case()


@pytest.mark.parametrize("seed", [0, 11, 23, 51])
def test_small_heads_whose_values_cancel(instruction_set, seed):
    """What out has lost to cancellation, D has lost: so dk is off by more than its own size says."""
    case = ct.Case(seqlen_q=2, seqlen_k=128, head_dim=1, batch=2, dtype="float32", seed=seed)
    assert_oracle(case, run(case))


def test_small_heads_whose_last_keys_are_seen(instruction_set):
    """Keys are computed some at a time, from the first that is seen on: nothing is written after the last."""
    for seqlen_q, seqlen_k, dtype in itertools.product((1, 2, 4), range(11, 18), ("float32", "float64")):
        case = ct.Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=1, dtype=dtype, window=(0, None))
        assert_oracle(case, run(case))


@settings(max_examples=examples(60))
@given(
    st.sampled_from([1, 2, 3, 5, 8, 16, 17, 33]), st.sampled_from([1, 2, 7, 16, 40]), st.sampled_from([16, 24, 64]),
    st.sampled_from(["bfloat16", "float32", "float64"]), st.booleans(), st.sampled_from([1, 2]),
)  # fmt: skip
def test_what_is_computed_beside_a_head_changes_no_bit(seqlen_q, seqlen_k, head_dim, dtype, causal, group):
    """Queries of several heads fill a vector: each head gets what it gets by itself."""
    case = ct.Case(
        batch=3, num_heads=4 * group, num_heads_kv=4, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim,
        dtype=dtype, causal=causal, dlse=True, sinks=True,
    )  # fmt: skip
    arrays, together = case.arrays(), run(case, without=NOT_OF_SMALL_HEADS)
    assert_oracle(case, together)
    attn, names = cuflash.FlashAttention(causal=causal), ("dq", "dk", "dv")
    for b, h in ((0, 0), (2, 3)):
        heads = slice(h * group, (h + 1) * group)
        own = {name: arrays[name][b, heads] for name in ("q", "dout", "dlse")}
        own |= {name: arrays[name][b, h : h + 1] for name in ("k", "v")} | {"sinks": arrays["sinks"][heads]}
        qkv, dout, dlse, sinks = ct.qkv(own), own["dout"], own["dlse"], own["sinks"]
        out, lse = attn.forward(*qkv, sinks=sinks)
        alone = {"out": out, "lse": lse, **attn.backward(dout, *qkv, out, lse, dlse=dlse, sinks=sinks)._asdict()}
        indices = {name: slice(h, h + 1) if name in ("dk", "dv") else heads for name in ("out", "lse", *names)}
        assert_same_bits({name: together[name][b, index] for name, index in indices.items()}, alone)


@settings(max_examples=examples(60))
@given(
    st.integers(40, 128), st.integers(40, 128), st.sampled_from([33, 64, 128]),
    st.sampled_from(["bfloat16", "float32", "float64"]), st.booleans(), st.booleans(), st.sampled_from([1, 2]),
)  # fmt: skip
def test_slices_of_a_small_head_are_those_of_the_whole(seqlen_q, seqlen_k, head_dim, dtype, causal, is_short, group):
    """Threads share the queries of few heads, and take those of many as they are; zeros may have other signs."""
    case = ct.Case(
        num_heads=group, num_heads_kv=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, dtype=dtype,
        window=(20, None) if is_short and not causal else None, causal=causal, sinks=True, dlse=True,
        kv_lengths=(seqlen_k - 30,) if is_short else None,
    )  # fmt: skip
    judge_on_threads(case)
    arrays, attn, many = case.arrays(), cuflash.FlashAttention(**case.keywords), 40
    optional = ct.optional(arrays)
    out, lse = attn.forward(*ct.qkv(arrays), **optional)
    if is_short:
        optional["kv_lengths"] = np.repeat(optional["kv_lengths"], many)
    of_many = attn.forward(*(np.repeat(x, many, axis=0) for x in ct.qkv(arrays)), **optional)
    assert (of_many.out[-1:] == out).all() and (of_many.lse[-1:] == lse).all()


def test_the_gradient_of_a_sink_is_one_sum_of_all_rows(instruction_set):
    """After a row of a large term come thousands of terms that are each less than half a unit in its last place."""
    q, v = np.ones((1, 1, 4000, 8)), np.ones((1, 1, 1, 8))
    dout = np.full_like(q, 0.4 * 2.0**-54)
    dout[:, :, 0] = 1
    arrays = {"q": q, "k": v, "v": v, "dout": dout, "sinks": np.zeros(1)}
    attn: Any = cuflash.FlashAttention(scale=0.0)
    out, lse = attn.forward(q, v, v, sinks=arrays["sinks"])
    (dsinks,) = attn.backward(dout, q, v, v, out, lse, sinks=arrays["sinks"], need=("dsinks",))
    problem = make_problem(attn.options, q, v, v, sinks=arrays["sinks"])
    measurement = measure("dsinks", dsinks, yardsticks(problem, arrays)["dsinks"])
    assert measurement.failure is None, measurement


def test_no_sequences():
    case = ct.Case(
        seqlen_q=0, seqlen_k=3, head_dim=2, num_heads=2, alibi_slopes=(2,), sinks=True, cu_seqlens_q=(0,),
        cu_seqlens_k=(0,),
    )  # fmt: skip
    assert_oracle(case, run(case))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("rows", [200, 8])
def test_float16_that_is_not_finite(instruction_set, name, value, rows):
    """It reaches results as in float32, also where finite numbers are multiplied as sums of two."""
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {key: random.standard_normal((2, 3, 600, 64)).astype("f2") for key in "qkv"}
    arrays["q"] = arrays["q"][:, :, :rows]
    arrays[name][1, 2, 5, 3] = value
    got = cuflash.attention(**arrays)
    with np.errstate(invalid="ignore"):
        expected = cuflash.attention(**{key: x.astype("f4") for key, x in arrays.items()})
    np.testing.assert_allclose(got.astype("f4"), expected, rtol=2.0**-10, atol=2.0**-12)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(1)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the size of the process")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("head_dim", [64, 256, 6400])
def test_memory_beside_inputs_and_results(head_dim, dtype):
    code = f"""
import numpy as np, ml_dtypes, cuflash
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
q = np.ones((2, {12_800_000 // head_dim}, {head_dim}), {"ml_dtypes.bfloat16" if dtype == "bfloat16" else f"np.{dtype}"})
attn, threads = cuflash.FlashAttention(window=(30, 0)), 2
out, lse = np.ones_like(q), np.ones(q.shape[:2], np.float64 if q.dtype == np.float64 else np.float32)
dq, dk, dv = np.ones_like(q), np.ones_like(q), np.ones_like(q)
attn.forward(q[:, :9], q[:, :9], q[:, :9])
before = peak()
with cuflash.cpu_threads(threads):
    attn.forward(q, q, q, out=out, lse=lse)
    attn.forward(q[:, :1], q, q)
    attn.backward(q, q, q, q, out, lse, dq=dq, dk=dk, dv=dv)
print(peak() - before, 2**26 + threads * max(2**22, 2560 * {head_dim}))
"""
    taken, allowed = map(int, run_python(code).split())
    assert taken < allowed


# ---- exponentials ----------------------------------------------------------------------------------------------------


EXP2, TANH, LOG, EXP2_OF_HALF_LESS, ROUGH_TANH, EXP2_BY_TABLE = range(6)


def needs_pairs(instruction_set):
    if dict((limit, name) for name, limit in INSTRUCTION_SETS)[instruction_set] not in ("AVX-512 with bfloat16", "AMX"):
        pytest.skip("no products of pairs")


def evaluate(x, instruction_set, name=EXP2):
    function, out = functions().cuflash_evaluate, np.empty_like(x)
    function(instruction_set, x.dtype == np.float64, name, *(ctypes.c_void_p(y.ctypes.data) for y in (x, out)), x.size)
    return out


def units(got, exact):
    return float(np.max(np.abs(got - exact) / np.spacing(np.abs(exact).astype(got.dtype))))


def test_exponentials_of_all_exponents(instruction_set):
    """At most one unit in the last place, where products and sums are rounded once; a little more elsewhere."""
    most = 1.25 if dict((limit, name) for name, limit in INSTRUCTION_SETS)[instruction_set] == "SSE2" else 1.0
    for sign in (0, 1):
        for exponent in range(256):
            rng = np.random.default_rng(exponent)
            bits = (sign << 31 | exponent << 23) + rng.integers(0, 2**23, 20_000, dtype=np.uint32)
            bits[:2] = sign << 31 | exponent << 23, sign << 31 | exponent << 23 | 0x7FFFFF
            x = bits.astype(np.uint32).view(np.float32)
            with np.errstate(all="ignore"):
                got, exact = evaluate(x, instruction_set), np.exp2(x.astype(np.float64))
            ordinary = (x >= -100) & (x < 127)  # and no weight is above 2**9
            if ordinary.any():
                assert units(got[ordinary], exact[ordinary]) <= most
            assert not got[x < -100].any()
            assert np.isinf(got[x >= 128]).all()
            assert np.isnan(got[np.isnan(x)]).all()
    x = np.concatenate([np.linspace(-960, 1023, 400_000), np.geomspace(1e-20, 1, 1000)])
    assert units(evaluate(x, instruction_set), np.exp2(x.astype(np.longdouble))) <= most
    x = np.array([-np.inf, -961, np.inf, 1025, np.nan])
    np.testing.assert_array_equal(evaluate(x, instruction_set), [0, 0, np.inf, np.inf, np.nan])


def test_exponentials_by_a_table(instruction_set):
    """2^x, next to multiples of 1/32 and of 1/64, too: at most 1.8 units in the last place, 1.25 with AVX2."""
    name = dict((limit, name) for name, limit in INSTRUCTION_SETS)[instruction_set]
    if name != "AVX2" and "AVX-512" not in name:
        pytest.skip("no table")
    most = 1.25 if name == "AVX2" else 1.8
    rng = np.random.default_rng(0)
    steps = np.arange(-100, 12, 1 / 64)[:, None] + np.r_[0.0, np.geomspace(1e-9, 1 / 128, 300), rng.random(300) / 64]
    x = np.concatenate([steps.ravel(), np.geomspace(1e-30, 1, 1000), -np.geomspace(1e-30, 1, 1000)]).astype(np.float32)
    x = x[x >= -100]
    assert units(evaluate(x, instruction_set, EXP2_BY_TABLE), np.exp2(x.astype(np.float64))) <= most
    assert evaluate(np.zeros(1, np.float32), instruction_set, EXP2_BY_TABLE) == 1
    x = np.array([-np.inf, -3e38, -1e30, -1e6, -101, -100.02, np.nan], np.float32)
    np.testing.assert_array_equal(evaluate(x, instruction_set, EXP2_BY_TABLE), [0, 0, 0, 0, 0, 0, np.nan])


def test_exponentials_of_weights_that_are_rounded(instruction_set):
    """2^(x - 1/2), where products of bfloat16 take pairs: at most 2.5 units in the last place."""
    needs_pairs(instruction_set)
    rng = np.random.default_rng(0)
    steps = np.arange(-100, 127, 0.5)[:, None] + np.r_[0.0, np.geomspace(1e-7, 0.5, 500), rng.random(500)]
    x = np.concatenate([steps.ravel(), np.geomspace(1e-30, 1, 1000), -np.geomspace(1e-30, 1, 1000)]).astype(np.float32)
    assert units(evaluate(x, instruction_set, EXP2_OF_HALF_LESS), np.exp2(x.astype(np.float64) - 0.5)) <= 2.5
    x = np.array([-np.inf, -1e30, -101, np.inf, 1e30, np.nan], np.float32)
    np.testing.assert_array_equal(evaluate(x, instruction_set, EXP2_OF_HALF_LESS), [0, 0, 0, np.inf, np.inf, np.nan])


def check_tangents(dtype, instruction_set, function, most):
    x = np.concatenate([np.geomspace(1e-30, 50, 100_000), [0, np.inf]]).astype(dtype)
    exact = np.tanh(x.astype(np.longdouble))
    assert units(evaluate(x, instruction_set, function), exact) <= most
    assert np.array_equal(evaluate(-x, instruction_set, function), -evaluate(x, instruction_set, function))
    assert np.isnan(evaluate(np.array([np.nan], dtype), instruction_set, function)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hyperbolic_tangents(dtype, instruction_set):
    check_tangents(dtype, instruction_set, TANH, 2.5)


def test_hyperbolic_tangents_for_bfloat16(instruction_set):
    """Where products of bfloat16 take pairs."""
    needs_pairs(instruction_set)
    check_tangents(np.float32, instruction_set, ROUGH_TANH, 5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logarithms(dtype, instruction_set):
    x = np.concatenate([np.linspace(0.5, 2, 200_000), np.geomspace(1, 1e30, 200_000), np.arange(1, 129)]).astype(dtype)
    x = x[x != 1]
    assert units(evaluate(x, instruction_set, LOG), np.log(x.astype(np.longdouble))) <= 2.5
    np.testing.assert_array_equal(evaluate(np.array([1, np.nan], dtype), instruction_set, LOG), [0, np.nan])


# ---- who computes what -----------------------------------------------------------------------------------------------


def test_the_core_and_numpy_agree(monkeypatch):
    case = ct.Case(num_heads=4, num_heads_kv=2, seqlen_q=600, seqlen_k=700, head_dim=48, causal=True, softcap=5.0)
    arrays = case.arrays()
    qkv, results = ct.qkv(arrays), run(case)
    monkeypatch.setattr(core, "why_not", lambda problem=None: "a test of both ways")
    out, lse = cpu.forward(case.problem, *qkv)
    need = ct.gradients_of(case.problem)
    gradients = cpu.backward(case.problem, arrays["dout"], *qkv, out, lse, need=need)
    for name, x in zip(("out", "lse", *need), (out, lse, *gradients), strict=True):
        np.testing.assert_allclose(results[name], x, rtol=2e-4, atol=2e-5)


def test_what_runs_is_said():
    q = np.ones((2, 5, 4), np.float32)
    plan = cuflash.FlashAttention().plan
    assert f"compiled core, {core.processor()}" in plan(q, q, q).describe()
    wide = np.ones((2, 5, 3000), np.float32)
    assert f"compiled core, {core.processor()}" in plan(wide, wide, wide).describe()
    np.testing.assert_allclose(cuflash.attention(wide, wide, wide), 1, rtol=1e-6)


@pytest.fixture
def unloaded():
    core._load.cache_clear()
    yield
    core._load.cache_clear()


def test_without_a_library(monkeypatch, tmp_path, unloaded):
    monkeypatch.setattr(core, "LIBRARY", tmp_path / "none.so")
    q = np.ones((2, 5, 4), np.float32)
    assert "it was not built when cuflash was installed: nothing says why" in cuflash.FlashAttention().plan(
        q, q, q
    ).describe(verbose=True, width=0)
    np.testing.assert_allclose(cuflash.attention(q, q, q), 1, rtol=1e-6)
    assert core.processor() == ""


def test_a_library_that_cannot_be_loaded(monkeypatch, tmp_path, unloaded):
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setattr(core, "LIBRARY", tmp_path / "broken.so")
    assert "it cannot be loaded" in str(core.why_not())


def test_a_library_of_other_sources(monkeypatch, unloaded):
    class OtherCall(ctypes.Structure):
        _fields_ = (*core._Call._fields_, ("more", ctypes.c_int64))

    monkeypatch.setattr(core, "_Call", OtherCall)
    assert "it was built of other sources" in str(core.why_not())


def test_a_library_of_older_sources(monkeypatch, unloaded):
    monkeypatch.setattr(core, "_hash_of_sources", lambda: "0" * 64)
    assert "pip install -e ." in str(core.why_not())


@settings(max_examples=examples(80))
@given(
    st.integers(1, 5), st.integers(1, 8), st.integers(0, 24), st.sampled_from([1, -1]), st.sampled_from(["out", "dq"])
)
def test_results_between_rows_of_operands(seqlen, head_dim, start, step, name):
    """They may lie there, and are refused where they share memory, by the first call and by those after it."""
    memory = np.random.default_rng(0).standard_normal((2, seqlen, 32))
    q, result = memory[..., :head_dim], memory[:, ::step, start : start + head_dim]
    k, v, dout = np.random.default_rng(1).standard_normal((3, 2, seqlen, head_dim))
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q.copy(), k, v)
    expected = {"out": out, "dq": attn.backward(dout, q.copy(), k, v, out, lse).dq}
    for _ in range(2):
        write = {
            "out": lambda: attn.forward(q, k, v, out=result),
            "dq": lambda: attn.backward(dout, q, k, v, out, lse, dq=result),
        }[name]
        if np.shares_memory(q, result):
            with pytest.raises(ValueError, match=f"{name}: got memory shared with q"):
                write()
        else:
            write()
            assert_same_bits({name: result}, {name: expected[name]})


def test_elements_that_are_not_aligned():
    case = ct.Case(seqlen_q=20, seqlen_k=30, head_dim=8, dtype="float64")
    arrays, expected = case.arrays(), run(case)

    def unaligned(x):
        buffer = np.empty(x.nbytes + 3, np.uint8)[3:].view(x.dtype).reshape(x.shape)
        buffer[...] = x
        return buffer

    moved = {name: unaligned(x) for name, x in arrays.items()}
    assert not any(x.flags.aligned for x in moved.values())
    assert_same_bits(run(case, **moved), expected)
    out, lse = unaligned(expected["out"] * 0), unaligned(expected["lse"] * 0)
    cpu.forward(case.problem, *ct.qkv(moved), out=out, lse=lse)
    assert_same_bits({"out": out, "lse": lse}, {name: expected[name] for name in ("out", "lse")})


@settings(max_examples=examples(20))
@given(st.tuples(*[st.integers(0, 2)] * 4), st.integers(0, 2), st.sampled_from((1, 3)), st.sampled_from(("f4", "f8")))
@example((1, 2, 0, 3), 2, 1, "f4")
@example((1, 2, 3, 0), 2, 3, "f4")
@example((1, 0, 2, 2), 2, 1, "f8")
def test_no_elements_that_are_not_aligned(sizes, head_dim, before, dtype):
    """NumPy calls arrays without elements aligned, whatever their strides."""
    batch, heads, rows, keys = sizes
    record = np.dtype([("before", np.uint8, before), ("x", dtype)])
    q, k = (np.ones((batch, heads, n, head_dim + 1), record)["x"] for n in (rows, keys))
    attn = cuflash.FlashAttention()
    out, lse = attn.forward(q, k, k)
    gradients = attn.backward(out, q, k, k, out, lse)
    expected_out, expected_lse = attn.forward(q.copy(), k.copy(), k.copy())
    expected = attn.backward(expected_out, q.copy(), k.copy(), k.copy(), expected_out, expected_lse)
    for x, y in zip((out, lse, *gradients[:3]), (expected_out, expected_lse, *expected[:3]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_where_arrays_do_not_say_where_their_data_is(monkeypatch, unloaded):
    case = ct.Case(seqlen_q=20, seqlen_k=30, head_dim=8, bias=(20, 30))
    expected = run(case)
    monkeypatch.setattr(core, "_find_head_bytes", lambda: -1)
    core._load.cache_clear()
    assert_same_bits(run(case), expected)
