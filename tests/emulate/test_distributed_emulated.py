"""Copies of rows for the same bits on any number of ranks, of arrays where the emulator has them.

Results of ranks by emulated kernels are in tests/features/test_ranks_on_backends.py.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays.memory_ranges import Band
from tests.emulate.launcher import allocated
from tests.emulate.slices import EmulatedSlices


@given(st.sampled_from((8, 16, 20)), st.integers(0, 20), st.integers(1, 60), st.sampled_from((1, 2)), st.booleans())
def test_rows_are_copied_for_the_same_bits_only_where_accesses_would_be_narrower(columns, first, rows, heads, front):
    """Of arrays of float16; those over one head are contiguous as they are."""
    case = ct.Case(seqlen_q=100, seqlen_k=140, num_heads=heads, head_dim=columns, dtype="float16")
    memory, random = allocated(heads * 100 * columns * 2), np.random.default_rng(0)
    whole = memory.view(np.float16).reshape(1, heads, 100, columns)
    whole[...] = random.standard_normal(whole.shape)
    own, out = whole[:, :, first : first + rows], np.zeros_like(whole)
    slices = EmulatedSlices(
        options=cuflash.FlashAttention().options,
        band=Band(0, None, None),
        problem=case.problem,
        random=(0, 0),
        arrays={},
        is_fixed=True,
    )
    begins_wide = first * columns * 2 % 16 == 0
    is_like_copy = begins_wide and (heads == 1 or columns % 8 == 0)
    seen = []

    def call(arrays):
        seen.append(arrays["q"])
        assert arrays["q"].flags.c_contiguous or is_like_copy
        if "out" in arrays:
            arrays["out"][...] = arrays["q"]
        return {"out": arrays.get("out", arrays["q"])}

    target = out[:, :, first + front : first + rows]
    slices.into({"out": target}, {"q": own}, call, front=int(front))
    assert (seen[0] is own) == is_like_copy
    np.testing.assert_array_equal(target, own[:, :, int(front) :])
