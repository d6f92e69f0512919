"""The families that serve every device, compute capability 7.0 and later."""

from __future__ import annotations

from cuflash.plan.families import Architecture
from cuflash.plan.sm80.backward import Backward, Dq, Scores
from cuflash.plan.sm80.decode import Decode
from cuflash.plan.sm80.forward import Forward
from cuflash.plan.sm80.jvp import BackwardJvp, DqJvp, Jvp, ScoresJvp
from cuflash.plan.sm80.reductions import Columns, Top

SM80 = Architecture(
    decode=(Decode(),),
    forward=(Forward(),),
    jvp=(Jvp(),),
    backward_jvp=(BackwardJvp(),),
    dq_jvp=(DqJvp(),),
    scores_jvp=(ScoresJvp(),),
    backward=(Backward(),),
    dq=(Dq(),),
    scores=(Scores(),),
    columns=(Columns(),),
    top=(Top(),),
)
