"""The architectures that have kernels of their own, and the order in which their families are asked.

A new architecture is a folder next to `sm80` and `sm90`, and its line here.
"""

from __future__ import annotations

from typing import Any

from cuflash.plan.families import (
    BackwardFamily,
    BackwardJvpFamily,
    BiasFamily,
    DqFamily,
    Family,
    ForwardFamily,
    MaximaFamily,
    ReductionFamily,
    ScoresFamily,
)
from cuflash.plan.sm80.architecture import SM80
from cuflash.plan.sm90.architecture import SM90
from cuflash.plan.tiles import Tile

ARCHITECTURES = (SM90, SM80)  # the one to prefer first; the last serves every device

# Families of decode are asked before all others.
FORWARD_FAMILIES: tuple[ForwardFamily[Any], ...] = (
    *(family for arch in ARCHITECTURES for family in arch.decode),
    *(family for arch in ARCHITECTURES for family in arch.forward),
)
JVP_FAMILIES: tuple[ForwardFamily[Any], ...] = tuple(x for arch in ARCHITECTURES for x in arch.jvp)
BACKWARD_JVP_FAMILIES: tuple[BackwardJvpFamily[Any], ...] = tuple(
    x for arch in ARCHITECTURES for x in arch.backward_jvp
)
DQ_JVP_FAMILIES: tuple[ForwardFamily[Any], ...] = tuple(x for arch in ARCHITECTURES for x in arch.dq_jvp)
SCORES_JVP_FAMILIES: tuple[ScoresFamily[Any], ...] = tuple(x for arch in ARCHITECTURES for x in arch.scores_jvp)
BACKWARD_FAMILIES: tuple[BackwardFamily[Any], ...] = tuple(x for arch in ARCHITECTURES for x in arch.backward)
DQ_FAMILIES: tuple[DqFamily[Any], ...] = tuple(x for arch in ARCHITECTURES for x in arch.dq)
SCORES_FAMILIES: tuple[ScoresFamily[Any], ...] = tuple(x for arch in ARCHITECTURES for x in arch.scores)
BIAS_FAMILIES: tuple[BiasFamily[Any], ...] = tuple(x for arch in ARCHITECTURES for x in arch.bias)
MAXIMA_FAMILIES: tuple[MaximaFamily[Any], ...] = tuple(x for arch in ARCHITECTURES for x in arch.maxima)
COLUMN_FAMILIES: tuple[ReductionFamily[Any], ...] = tuple(x for arch in ARCHITECTURES for x in arch.columns)
TOP_FAMILIES: tuple[ReductionFamily[Any], ...] = tuple(x for arch in ARCHITECTURES for x in arch.top)
# By the type of their rows.
FAMILIES: dict[type[Tile], Family[Any]] = {family.tile: family for arch in ARCHITECTURES for family in arch.families}
