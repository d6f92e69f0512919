"""Rows whose scores are large, by the kernels: what mutants of them are tried on."""

import pytest

from cuflash.emulator import find_compiler
from tests.emulate.mutants.trials_masked import TRIALS

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: g++ is not on the path")


@pytest.mark.parametrize("trial", TRIALS)
def test_rows_of_large_scores_agree_with_the_oracle(trial):
    TRIALS[trial].run()
