"""Scores and masks that callers write as Python functions: traced once, evaluated, differentiated and emitted."""

from cuflash.score.program import KINDS_OF_READS, Loaded, Program, Traced, index_class, program_of

__all__ = ["KINDS_OF_READS", "Loaded", "Program", "Traced", "index_class", "program_of"]
