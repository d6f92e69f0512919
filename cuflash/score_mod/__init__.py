"""Scores and masks that callers write: Python functions, traced once, and CUDA source."""

from cuflash.score_mod.cuda_source import FIRST_LINE, Score
from cuflash.score_mod.hoisting import hoisted_program_of, is_of_diagonals
from cuflash.score_mod.indexing import COUNTED, ORIGIN
from cuflash.score_mod.program import (
    READ_CLASSES,
    Program,
    ScoreFunction,
    ScoreTangents,
    Traced,
    index_class,
    program_of,
    tangents_of,
)
from cuflash.score_mod.tables import Loaded, Table

__all__ = [
    "COUNTED",
    "FIRST_LINE",
    "ORIGIN",
    "READ_CLASSES",
    "Loaded",
    "Program",
    "Score",
    "ScoreFunction",
    "ScoreTangents",
    "Table",
    "Traced",
    "hoisted_program_of",
    "index_class",
    "is_of_diagonals",
    "program_of",
    "tangents_of",
]
