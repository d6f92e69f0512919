"""Mutants of the project's kernels, one at a time, and whether the emulator or the oracle notices.

    python -m tests.emulate.mutants [--lines] [words]

runs those whose description holds the words, or all, and prints the score; with ``--lines`` it only lists them by the
lines of kernels/ that they change, in the form that editors open. A mutant replaces one passage of one file:
the text has to occur there exactly once, so that the table follows the kernels.
"""

from tests.emulate.mutants import (
    common,
    decode,
    float8,
    fp32,
    functions,
    helpers,
    reductions,
    row_reductions,
    sm80,
    sm90_backward,
    sm90_backward_jvp,
    sm90_backward_jvp_fp32,
    sm90_backward_jvp_fp32_wide,
    sm90_bias,
    sm90_chunked,
    sm90_forward,
    sm90_jvp_fp32_wide,
    sm90_wide,
    tangents,
)
from tests.emulate.mutants.mutant import Mutant
from tests.emulate.mutants.trial import Trial
from tests.emulate.mutants.trials import TRIALS

MUTANTS = (
    *common.MUTANTS,
    *decode.MUTANTS,
    *sm80.MUTANTS,
    *sm90_forward.MUTANTS,
    *sm90_wide.MUTANTS,
    *sm90_backward.MUTANTS,
    *sm90_backward_jvp.MUTANTS,
    *sm90_backward_jvp_fp32.MUTANTS,
    *sm90_backward_jvp_fp32_wide.MUTANTS,
    *sm90_jvp_fp32_wide.MUTANTS,
    *sm90_bias.MUTANTS,
    *sm90_chunked.MUTANTS,
    *fp32.MUTANTS,
    *helpers.MUTANTS,
    *functions.MUTANTS,
    *reductions.MUTANTS,
    *row_reductions.MUTANTS,
    *float8.MUTANTS,
    *tangents.MUTANTS,
)
MIN_CAUGHT = 0.9

__all__ = ["MIN_CAUGHT", "MUTANTS", "TRIALS", "Mutant", "Trial"]
