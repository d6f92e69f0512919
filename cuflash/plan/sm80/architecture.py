"""The families that serve every device, compute capability 7.0 and later."""

from __future__ import annotations

from cuflash.plan.families import Architecture
from cuflash.plan.sm80.backward import Backward, BackwardChunked, Dq, DqChunked, Scores, ScoresChunked
from cuflash.plan.sm80.decode import Decode
from cuflash.plan.sm80.forward import Forward, ForwardChunked, ForwardNarrow
from cuflash.plan.sm80.jvp import BackwardJvp, DqJvp, Jvp, ScoresJvp
from cuflash.plan.sm80.reductions import Columns, Top

SM80 = Architecture(
    decode=(Decode(),),
    forward=(ForwardNarrow(), ForwardChunked(), Forward()),
    jvp=(Jvp(),),
    backward_jvp=(BackwardJvp(),),
    dq_jvp=(DqJvp(),),
    scores_jvp=(ScoresJvp(),),
    backward=(BackwardChunked(), Backward()),
    dq=(DqChunked(), Dq()),
    scores=(ScoresChunked(), Scores()),
    columns=(Columns(),),
    top=(Top(),),
)
