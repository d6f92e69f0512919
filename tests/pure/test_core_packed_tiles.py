"""Tiles of keys that each thread of the compiled core packs once, and holds for the blocks of a head that it takes."""

import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.cpu import core
from tests.compiled import INSTRUCTION_SETS, much_work, run, way_taken
from tests.judging import assert_oracle, assert_same_bits
from tests.sampling import examples

if core.why_not() is not None:
    pytest.skip(f"no compiled core: {core.why_not()}", allow_module_level=True)

PACKING = [way for name, way in INSTRUCTION_SETS if name in ("AVX-512", "AVX2", "SSE2")]
if not PACKING:
    pytest.skip("no instruction set with which threads hold tiles", allow_module_level=True)

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", "pages", "packed", "lengths", "float8")
DTYPES = ("float16", "bfloat16", "float32", "float64")
# Scales so small that their limits of exponents overflow, and scales that turn the order of scores around.
MASKED = ct.Case(num_heads=2, seqlen_q=150, seqlen_k=260, head_dim=16, causal=True, scale=1.5e-37, dtype="float32")
NEGATIVE = ct.Case(num_heads=2, seqlen_q=150, seqlen_k=260, head_dim=16, window=(70, 3), scale=-0.5, dtype="float32")
LENGTHS = ct.Case(
    batch=3, num_heads=4, num_heads_kv=2, seqlen_q=90, seqlen_k=400, head_dim=24, kv_lengths=(400, 0, 133)
)


def is_served(case):
    return not (case.page_size and (case.cu_seqlens_q is not None or case.block_mask is not None))


@settings(max_examples=examples(100))
@given(
    ct.cases(min_seqlen=0, features=FEATURES, max_seqlen=600, max_scores=2**18, max_head_dim=40).filter(is_served),
    st.sampled_from(PACKING),
)
@example(MASKED, PACKING[0])
@example(NEGATIVE, PACKING[0])
@example(LENGTHS, PACKING[0])
def test_every_option(case, way):
    """On three threads, and the same bits on one."""
    with way_taken(way), pytest.MonkeyPatch.context() as patch:
        much_work(patch)
        with cuflash.cpu_threads(3):
            results = run(case)
        assert_oracle(case, results)
        with cuflash.cpu_threads(1):
            assert_same_bits(run(case), results)


@settings(max_examples=examples(100))
@given(
    st.sampled_from(PACKING), st.sampled_from(DTYPES), st.sampled_from([1, 2, 5]), st.integers(130, 500),
    st.integers(129, 600), st.sampled_from([8, 17, 64, 130]), st.integers(9, 24), st.data(),
)  # fmt: skip
def test_rows_do_not_depend_on_others(way, dtype, num_heads, seqlen_q, seqlen_k, head_dim, count, data):
    """Few rows are one block, which packs its own tiles; all rows are several, whose threads hold them: the same bits.

    Fewer than 9 rows are decode, and fewer than 129 keys a small head, which have sums of their own.
    """
    first = data.draw(st.integers(0, seqlen_q - count))
    case = ct.Case(num_heads=num_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, dtype=dtype)
    q, k, v = ct.qkv(case.arrays())
    with way_taken(way):
        attention = cuflash.FlashAttention()
        out, lse = attention.forward(q, k, v)
        few = attention.forward(q[..., first : first + count, :], k, v)
    assert_same_bits(
        {"out": few[0], "lse": few[1]},
        {"out": out[..., first : first + count, :], "lse": lse[..., first : first + count]},
    )


@pytest.mark.parametrize("way", PACKING)
def test_calls_at_the_same_time_have_tiles_of_their_own(way):
    """Calls of all sizes, with more tiles than threads hold, too."""
    sizes = [(1, 200, 200), (3, 400, 900), (2, 300, 5000), (1, 200, 20000), (1, 150, 140)]
    rng = np.random.default_rng(0)
    inputs = [[rng.standard_normal((h, n, 64)).astype(np.float32) for n in (s_q, s_k, s_k)] for h, s_q, s_k in sizes]
    attention = cuflash.FlashAttention()
    with way_taken(way):
        expected = [attention.forward(*x)[0].copy() for x in inputs]
        failures = []

        def compute(order):
            for i in order:
                if not np.array_equal(attention.forward(*inputs[i])[0], expected[i]):
                    failures.append(i)

        orders = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 1, 3, 0, 2]]
        threads = [threading.Thread(target=compute, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
