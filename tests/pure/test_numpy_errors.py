"""Whatever numbers arrays have, NumPy's settings for floating-point errors decide nothing, and stay what they were."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.block_masks import local
from cuflash.distributed.rank import Run
from cuflash.score_mod import Traced, program_of
from tests.sampling import examples
from tests.scored import scored
from tests.ways import every_way

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


def extreme(shape, dtype, seed=0):
    """Numbers of every size that the dtype has, subnormal, infinite and NaN; tiny ones in all heads but the first."""
    random, info = np.random.default_rng(seed), ml_dtypes.finfo(dtype)
    special = [0.0, -0.0, 1.0, -3.0, float(info.max), -float(info.max), float(info.smallest_normal)]
    special += [float(info.smallest_subnormal), np.inf, -np.inf, np.nan]
    x = random.standard_normal(shape)
    x = np.where(random.random(shape) < 0.3, random.choice(special, shape), x)
    if x.ndim > 2:
        x[..., 1:, :, :] = float(info.smallest_normal) * random.uniform(0, 4, x[..., 1:, :, :].shape)
    return x.astype(dtype)


def strictly(call):
    """The results of a call where NumPy raises for every error, compared to those where it ignores them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with np.errstate(all="ignore"):
            expected = call()
        with np.errstate(all="raise"):
            before = np.geterr()
            found = call()
            assert np.geterr() == before
    for x, y in zip(found, expected, strict=True):
        x, y = (np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in (x, y))
        np.testing.assert_array_equal(x, y)
    return found


def both_passes(attn, q, k, v, *, random=None, need=("dq", "dk", "dv"), **optional):
    random = random or {}
    out, lse = attn.forward(q, k, v, **optional, **random)
    return out, lse, *attn.backward(out, q, k, v, out, lse, **optional, **random, need=need)


@every_way
@every_dtype
@pytest.mark.usefixtures("way")
def test_attention(dtype):
    real = np.float64 if dtype == np.float64 else np.float32
    q, k, v = (extreme((2, 4, 30, 8), dtype, seed) for seed in range(3))
    bias, slopes = extreme((4, 30, 30), real, 3), np.full(4, 0.5, real)
    attn = cuflash.FlashAttention(softcap=3.0, causal=True, dropout=0.2)
    need = ("dq", "dk", "dv", "dbias", "dalibi_slopes", "dscale", "dsoftcap")
    optional: dict[str, Any] = {"bias": bias, "alibi_slopes": slopes, "random": {"seed": 1, "offset": 2}}
    strictly(lambda: both_passes(attn, q, k, v, **optional, need=need))
    strictly(lambda: both_passes(cuflash.FlashAttention(window=(5, 0)), q[:, 0], k[:, 0], v[:, 0]))
    strictly(lambda: [cuflash.attention(q, k, v)])
    # Batch axes of which one takes several passes, whose partial sums are added.
    attn = cuflash.FlashAttention()
    wide, narrow = extreme((2, 3, 4, 20, 8), dtype, 4), extreme((3, 1, 20, 8), dtype, 5)
    bias = extreme((2, 1, 4, 20, 20), dtype, 6)
    strictly(lambda: both_passes(attn, wide, narrow, narrow, bias=bias, need=("dq", "dk", "dv", "dbias")))
    starts = np.array([0, 10, 10, 28], np.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    strictly(lambda: both_passes(attn, q[0], k[0], v[0], **packed, sinks=extreme(4, real, 7), need=("dq", "dsinks")))
    strictly(lambda: both_passes(attn, q, k, v, block_mask=local(1, 1, 1), kv_lengths=np.array([30, 5])))


@every_way
@every_dtype
@pytest.mark.usefixtures("way")
def test_sums_over_batch_axes(dtype):
    """Of several passes, which are rounded to half precision: subnormal there, or infinite."""

    @settings(max_examples=examples(100))
    @given(st.integers(0, 99), st.integers(-14, 14), st.booleans())
    def check(seed, exponent, has_values):
        random = np.random.default_rng(seed)
        q, k, v, bias = (
            random.standard_normal(shape).astype(dtype)
            for shape in ((2, 3, 4, 9, 8), (3, 1, 11, 8), (3, 1, 11, 8), (2, 1, 4, 9, 11))
        )
        dout = (random.standard_normal(q.shape) * 2.0**exponent).astype(dtype)
        attn: Any = cuflash.FlashAttention()
        optional: dict[str, Any] = {"bias": bias, "dlse": dout[..., 0].astype(np.result_type(dtype, np.float32))}

        def passes():
            given = (dout, q, k, v) if has_values else (None, q, k, None)
            moved = attn.jvp(*given[1:], bias=bias, tk=k, tbias=bias)
            need = ("dq", "dk", "dbias")
            found = attn.backward(*given, *moved[:2], **optional, need=need)
            tneed = tuple(f"t{name}" for name in need)
            found += attn.backward_jvp(*given, *moved, **optional, tk=k, tbias=bias, need=tneed)
            return [x for x in (*moved, *found) if x is not None]

        strictly(passes)

    check()


@every_way
@every_dtype
@pytest.mark.usefixtures("way")
def test_functions_that_spell_out_options(dtype):
    real = np.float64 if dtype == np.float64 else np.float32
    q, k, v = (extreme((4, 30, 8), dtype, seed) for seed in range(3))

    def spelled(s, i, j, *, head, slopes, pairs):
        return 30 * cuflash.tanh(s / 30) - slopes[head] * cuflash.abs(i - j) + pairs[i, j]

    optional = {"slopes": extreme(4, real, 4), "pairs": extreme((30, 30), dtype, 5)}
    attn = cuflash.FlashAttention(score=spelled, mask=lambda i, j: i >= j)
    strictly(lambda: both_passes(attn, q, k, v, **optional, need=("dq", "dslopes", "dpairs")))


@every_way
@pytest.mark.usefixtures("way")
def test_functions():
    @settings(max_examples=examples(25))
    @given(scored(max_seqlen=40))
    def check(case):
        arrays = {name: extreme(x.shape, x.dtype) for name, x in case.arrays.items() if name in ("q", "k", "v")}
        optional = {n: extreme(x.shape, x.dtype) if x.dtype.kind not in "biu" else x for n, x in case.optional.items()}
        need = ("dq", "dk", "dv", *case.problem.score_arg_gradients)
        strictly(lambda: both_passes(case.attention, *arrays.values(), **optional, random=case.random, need=need))

    check()


@every_way
@every_dtype
@pytest.mark.parametrize("float8", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.usefixtures("way")
def test_fp8(dtype, float8):
    # float64 numbers beyond float8 times the scales of float32 are refused.
    largest = 1e40 if np.dtype(dtype) == np.float64 else np.inf
    q, k, v = (np.clip(extreme((2, 30, 16), dtype, seed), -largest, largest) for seed in range(3))
    for per in ("tensor", "head", "block", "token"):
        for rotate in (False, True):
            strictly(lambda per=per, rotate=rotate: cuflash.quantize(k, float8, per=per, block=4, rotate=rotate))
    strictly(lambda: [cuflash.rotate(q)])
    (k8, k_scale), (v8, v_scale), (q8, q_scale) = (cuflash.quantize(x, float8) for x in (k, v, q))
    scales = {"k_scale": extreme(k_scale.shape, np.float32), "v_scale": v_scale}
    strictly(lambda: [cuflash.dequantize(k8, scales["k_scale"], dtype=np.dtype(dtype).name, rotate=True)])
    strictly(lambda: [cuflash.attention(q, k8, v8, **scales)])
    strictly(lambda: [cuflash.attention(q8, k8, v8, q_scale=extreme(q_scale.shape, np.float32, 9), **scales)])


@every_dtype
def test_merging_streaming_and_ranks(dtype):
    q, k, v, dout = (extreme((2, 30, 8), dtype, seed) for seed in range(4))
    attn = cuflash.FlashAttention()
    outs, lses = zip(*(attn.forward(q, k[:, keys], v[:, keys]) for keys in (slice(0, 9), slice(9, 30))), strict=True)
    out, lse = strictly(lambda: cuflash.merge(outs, lses))
    strictly(lambda: [x for group in cuflash.merge_backward(dout, outs, lses, out, lse, dlse=lse) for x in group])
    strictly(lambda: both_passes(attn, q, *cuflash.streamed(k, v, chunk=8)))

    def ranks():
        here = np.geterr()  # each thread has settings of its own

        def rank(comm):
            split = cd.contiguous(30, 2)
            own = [split.part(x, comm.rank) for x in (q, k, v)]
            with np.errstate(**here):
                return both_passes(cd.ContextParallel(comm, split=split, causal=True), *own)

        with ThreadPoolExecutor(2) as pool:
            return [x for results in pool.map(rank, cd.threads(2)) for x in results]

    strictly(ranks)


def all_reductions(attn, q, k, v, dout, lse_of=lambda lse: lse, **optional):
    """Those of rows and of the attention weights, and their gradients."""
    out, lse, largest, entropy = attn.forward(q, k, v, want=("max", "entropy"), **optional)
    of_rows = {"dlse": lse, "dmax": largest, "dentropy": entropy, "entropy": entropy}
    found = [out, lse, largest, entropy, *attn.backward(dout, q, k, v, out, lse, **of_rows, **optional)]
    own, need = lse_of(lse), ("dq", "dk", "dlse", "dweights")
    sums = attn.column_sums(q, k, own, own, **optional)
    found += [sums, attn.column_max(q, k, own, **optional), *attn.top_keys(q, k, own, 3, **optional)]
    return [*found, *attn.column_sums_backward(sums, q, k, own, own, need=need, **optional)]


def both_tangents(attn, q, k, v, dout, **optional):
    tangents = {"tq": q[..., ::-1, :], "tv": dout}
    found = attn.jvp(q, k, v, **tangents, **optional)
    return *found, *attn.backward_jvp(dout, q, k, v, *found, **tangents, **optional, tdout=dout, dlse=found.lse)


@every_way
@every_dtype
@pytest.mark.usefixtures("way")
def test_reductions_and_tangents(dtype):
    """Also over streamed keys and ranks, and by an lse that is not that of the keys."""
    real = np.float64 if dtype == np.float64 else np.float32
    q, k, v, dout = (extreme((2, 30, 8), dtype, seed) for seed in range(4))
    optional = {"bias": extreme((2, 30, 30), real, 4), "sinks": extreme(2, real, 5)}
    attn, wide = cuflash.FlashAttention(causal=True), extreme((2, 30), real, 6)
    for own_k, own_v in ((k, v), cuflash.streamed(k, v, chunk=8)):
        how: dict[str, Any] = {"q": q, "k": own_k, "v": own_v, "dout": dout, **optional}
        strictly(lambda how=how: all_reductions(attn, **how))
        strictly(lambda how=how: all_reductions(attn, **how, lse_of=lambda lse: wide))
        strictly(lambda how=how: both_tangents(attn, **how))

    def ranks():
        here = np.geterr()

        def rank(comm):
            split = cd.contiguous(30, 2)
            own = [split.part(x, comm.rank) for x in (q, k, v, dout)]
            with np.errstate(**here):
                over_ranks = cd.ContextParallel(comm, split=split, causal=True)
                return *all_reductions(over_ranks, *own), *both_tangents(over_ranks, *own)

        with ThreadPoolExecutor(2) as pool:
            return [x for results in pool.map(rank, cd.threads(2)) for x in results]

    strictly(ranks)


@every_dtype
def test_merging_reductions_and_tangents(dtype):
    q, k, v, dout = (extreme((2, 30, 8), dtype, seed) for seed in range(4))
    attn: Any = cuflash.FlashAttention()
    slices = slice(0, 9), slice(9, 30)
    of_slices = [attn.forward(q, k[:, keys], v[:, keys], want=("max", "entropy")) for keys in slices]
    outs, lses, maxes, entropies = zip(*of_slices, strict=True)
    rows: dict[str, Any] = {"maxes": maxes, "entropies": entropies}
    whole = strictly(lambda: cuflash.merge(outs, lses, **rows))
    of_rows = {"dmax": whole.max, "dentropy": whole.entropy, "entropy": whole.entropy, **rows}
    results: Any = (dout, outs, lses, whole.out, whole.lse)
    strictly(lambda: [x for group in cuflash.merge_backward(*results, **of_rows) for x in group])
    outs, lses, touts, tlses = zip(*(attn.jvp(q, k[:, x], v[:, x], tq=q) for x in slices), strict=True)
    tangents: dict[str, Any] = {"touts": touts, "tlses": tlses}
    moved = strictly(lambda: cuflash.merge(outs, lses, **tangents))
    tangents |= {"tout": moved.tout, "tlse": moved.tlse}
    results = dout, outs, lses, moved.out, moved.lse
    strictly(lambda: [x for group in cuflash.merge_backward(*results, **tangents) for x in group])


@every_dtype
def test_warm_up_runs_of_ranks(dtype, monkeypatch):
    """Those of devices: nothing is received, so that arrays from other ranks have whatever numbers memory has."""
    monkeypatch.setattr(Run, "is_warm", property(lambda run: False))
    q, k, v = (extreme((2, 30, 8), dtype, seed) for seed in range(3))

    def rank(comm):
        split = cd.contiguous(30, 2)
        own = [split.part(x, comm.rank) for x in (q, k, v)]
        with np.errstate(all="raise"):
            return both_passes(cd.ContextParallel(comm, split=split), *own)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, cd.threads(2)))


def test_constants_of_any_size():
    mask = Traced.of(lambda i, j: (i * 1e300 < j) | (i < 1e-300) | (j < float("inf")), "mask")
    score = Traced.of(lambda s, i, j: s * 1e-300 + 1e300 * i, "score")
    strictly(lambda: [np.array(program_of(score, mask, ()).header())])


@every_dtype
def test_random_bits_and_the_oracle(dtype):
    strictly(lambda: [cuflash.dropout_mask(2**64 - 1, 2**32 - 1, 2, 3, 40, 50, 0.3)])
    name = np.dtype(dtype).name
    case = ct.Case(seqlen_q=20, seqlen_k=30, head_dim=8, dtype=name, causal=True, softcap=2.0, score_spread=30.0)

    def judged():
        arrays = case.arrays()
        results = both_passes(cuflash.FlashAttention(**case.keywords), *ct.qkv(arrays))
        yardsticks = ct.yardsticks(case.problem, arrays | {"q": extreme(arrays["q"].shape, dtype)})
        found: list[object] = [
            x for yardstick in yardsticks.values() for x in (yardstick.expected, yardstick.tolerance)
        ]
        found.append(ct.measure("out", results[0], yardsticks["out"]).error)
        return [np.asarray(x).astype(np.float64) for x in found]  # bytes of long doubles have gaps

    strictly(judged)
