"""Scores and masks that callers write as Python functions: traced once, evaluated, differentiated and emitted."""

from cuflash.score.hoisting import hoisted_program_of
from cuflash.score.places import COUNTED, ORIGIN, of_part
from cuflash.score.program import KINDS_OF_READS, Program, Traced, index_class, program_of
from cuflash.score.tables import Loaded, Table

__all__ = [
    "COUNTED",
    "KINDS_OF_READS",
    "ORIGIN",
    "Loaded",
    "Program",
    "Table",
    "Traced",
    "hoisted_program_of",
    "index_class",
    "of_part",
    "program_of",
]
