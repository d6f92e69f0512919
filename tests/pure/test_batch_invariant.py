"""``batch_invariant=True`` on NumPy arrays: a sequence has the same bits alone and among any others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from tests.compiled import INSTRUCTION_SETS, NUMPY, much_work, way_taken
from tests.invariance import assert_invariant, sequences
from tests.sampling import examples

WAYS = (*INSTRUCTION_SETS, NUMPY)
PASSES = ("want", "backward", "tangents", "column_sums")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_a_sequence_has_the_same_bits_among_others(way):
    @settings(max_examples=examples(400))
    @given(sequences(), st.sampled_from([(), *((name,) for name in PASSES)]), st.sampled_from([1, 7]))
    def holds(drawn, passes, threads):
        with way_taken(way[1]), pytest.MonkeyPatch.context() as patch, cuflash.cpu_threads(threads):
            much_work(patch)
            assert_invariant(drawn, passes)

    holds()
