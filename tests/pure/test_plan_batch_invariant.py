"""With ``batch_invariant=True`` plans have the same tiles, whatever else is in a call."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cuflash.arrays.array_info import numpy_dtype
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.options import Options
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, COLUMN_SUMS, FORWARD, JVP, TOP_KEYS
from cuflash.spec.problem import make_problem
from tests.problems import contiguous, is_served, problem_of
from tests.sampling import examples

PASSES = (FORWARD, BACKWARD, JVP, BACKWARD_JVP, COLUMN_SUMS, TOP_KEYS)


def packed(problem, sequences):
    """The problem with such sequences one after the other in place of its own."""
    rows = sequences * problem.seqlen_q
    q, k, v = (
        contiguous((heads, rows, dim), numpy_dtype(problem.dtype))
        for heads, dim in (
            (problem.num_heads, problem.head_dim),
            (problem.num_heads_kv, problem.head_dim),
            (problem.num_heads_kv, problem.head_dim_v),
        )
    )
    starts = np.zeros(sequences + 1, np.int32)
    return make_problem(problem.options, q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)


def row_of(plan):
    """What decides about the bits of a row: tiles, and how work on a row is divided."""
    splits = max(int(dict(kernel.defines).get("CUFLASH_SPLIT_TILES", 0)) for kernel in plan.kernels)
    order = {dict(kernel.defines).get("CUFLASH_REVERSED_ONE_IN", 0) for kernel in plan.kernels}
    return plan.tiles, splits, order, plan.run_time.group_splits, plan.run_time.tail_splits


SIZES = st.sampled_from([1, 2, 7, 64, 65, 100, 500, 1024, 3000, 9000])
DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("pass_", PASSES, ids=str)
def test_tiles_do_not_depend_on_other_sequences(pass_):
    @settings(max_examples=examples(400))
    @given(
        st.sampled_from(["7.5", "8.0", "9.0"]),
        st.sampled_from(DTYPES[:3] if pass_ in (JVP, BACKWARD_JVP) else DTYPES),
        st.sampled_from([16, 64, 128]),
        st.sampled_from([{}, {"causal": True}, {"window": (64, 0)}, {"window": (None, 3)}]),
        st.sampled_from([1, 2, 8]),
        st.tuples(SIZES, SIZES, st.integers(1, 300), st.integers(1, 20)),
        st.tuples(SIZES, SIZES, st.integers(1, 300), st.integers(1, 20)),
    )
    def holds(arch, dtype, dim, options, group, one, other):
        device = DeviceSpec.for_arch(arch)

        def found(queries, keys, batch, heads):
            sizes = {"batch": batch, "heads": heads * group, "heads_kv": heads, "dtype": dtype}
            return problem_of(queries, keys, dim, dim, **sizes, **options, batch_invariant=True)

        first, second = found(*one), found(one[0], *other[1:])
        assume(is_served(first, arch, BACKWARD))
        if pass_ is FORWARD and group * one[0] > 64:  # decode of packed sequences has other kernels
            second = found(*other) if group * other[0] > 64 else second
            packed_rows = row_of(choose_plan(packed(first, 3), device, pass_))
            assert packed_rows == row_of(choose_plan(first, device, pass_))
        assert row_of(choose_plan(first, device, pass_)) == row_of(choose_plan(second, device, pass_))

    holds()


def test_splits_of_keys_follow_from_the_keys():
    """A cache of any capacity is split at the same keys, and a head has two splits at least."""
    device = DeviceSpec.for_arch("9.0")
    for batch, keys in ((1, 100), (1, 4000), (64, 4000), (3, 100000)):
        problem = problem_of(1, keys, batch=batch, heads=8, heads_kv=2, batch_invariant=True)
        plan = choose_plan(problem, device)
        assert plan.key_splits == max(2, -(-plan.problem.seqlen_k // 1024)) or plan.key_splits > -(-keys // 1024)
        assert dict(plan.kernels[0].defines)["CUFLASH_SPLIT_TILES"] == 1024 // plan.tiles[0].block_n


def test_too_many_heads_are_refused_by_name():
    problem = problem_of(1, 2**16, batch=2**12, heads=8, heads_kv=8, batch_invariant=True)
    with pytest.raises(NotImplementedError, match=r"^batch_invariant: got 32768 key/value heads .* expected at most"):
        choose_plan(problem, DeviceSpec.for_arch("9.0"))


def test_functions_are_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"^score: got a function together with batch_invariant=True"):
        from cuflash import FlashAttention

        FlashAttention(batch_invariant=True, score=lambda s, i, j: s)


def test_it_brings_determinism_along():
    assert Options(batch_invariant=True).deterministic
    assert not replace(Options(), batch_invariant=False).deterministic
