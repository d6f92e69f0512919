"""Every option and shape on NumPy arrays, by the compiled core and by the fallback."""

import pytest
from hypothesis import given

import cuflash.testing as ct
from tests.compiled import INSTRUCTION_SETS, NUMPY, run, way_taken
from tests.judging import assert_oracle

WAYS = [way for _, way in (*INSTRUCTION_SETS[:1], NUMPY)]  # the core as it is here, if there is one, and the fallback


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_option_and_shape(dtype):
    """Each case by every way, because the oracle takes longer than these do."""

    @given(ct.cases(dtypes=[dtype], min_seqlen=0, features=(*ct.FEATURES, *ct.MORE_FEATURES, "dropout")))
    def every_case(case):
        for way in WAYS:
            with way_taken(way):
                assert_oracle(case, run(case))

    every_case()
