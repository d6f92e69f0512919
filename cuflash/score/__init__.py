"""Scores and masks that callers write: Python functions, traced once, and texts of CUDA."""

from cuflash.score.hoisting import hoisted_program_of, is_of_diagonals
from cuflash.score.places import COUNTED, ORIGIN
from cuflash.score.program import KINDS_OF_READS, Program, ScoreFunction, Traced, index_class, program_of
from cuflash.score.tables import Loaded, Table
from cuflash.score.text import FIRST_LINE, Score

__all__ = [
    "COUNTED",
    "FIRST_LINE",
    "KINDS_OF_READS",
    "ORIGIN",
    "Loaded",
    "Program",
    "Score",
    "ScoreFunction",
    "Table",
    "Traced",
    "hoisted_program_of",
    "index_class",
    "is_of_diagonals",
    "program_of",
]
