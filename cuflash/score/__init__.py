"""Scores and masks that callers write as Python functions: traced once, evaluated, differentiated and emitted."""

from cuflash.score.program import Loaded, Program, Traced, index_class, program_of

__all__ = ["Loaded", "Program", "Traced", "index_class", "program_of"]
