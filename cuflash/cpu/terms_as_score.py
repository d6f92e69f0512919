"""Terms of scores as a score function, so that a mask function beside them takes the same path as score functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.problem import Problem
from cuflash.score import Program, Traced, program_of
from cuflash.score.nodes import Node, node
from cuflash.terms import OF_FUNCTIONS, OF_HEADS

Array = NDArray[Any]

(_CAP,) = OF_FUNCTIONS
(_SLOPES,) = (term.name for term in OF_HEADS if term.part_of == "scores")
# Of the call, of the packed sequence, or of each batch entry; no array of a caller has such a name.
_DIAGONAL = "own.diagonal"
_AXES = ("batch", "head", "i", "j")  # of scores


def program_and_arrays(problem: Problem, arrays: Mapping[str, Array]) -> tuple[Program, dict[str, Array]]:
    """The program of a call's functions and of the terms beside a mask function; and the arrays it reads, by name.

    A term keeps its own name, so that its gradient does, too. An index outside of an axis is clamped, which broadcasts.
    """
    captured = {name: arrays[name] for name, _ in problem.captured}
    names = () if problem.score is not None else problem.given((_CAP, _SLOPES, "bias"))
    if not names:
        return problem.program.on_numpy(), captured
    captured |= {name: arrays[name] for name in names if name != _CAP}
    if _CAP in names:
        captured[_CAP] = np.array(getattr(problem, _CAP), problem.softmax_dtype)
    if _SLOPES in names:
        captured[_DIAGONAL] = np.array(problem.diagonal)
        if problem.follows_lengths:
            captured[_DIAGONAL] = np.clip(arrays["kv_lengths"], 0, problem.seqlen_k) - problem.seqlen_q
    root = _score({name: x.ndim for name, x in captured.items()}, names)
    kinds = tuple((name, x.ndim, x.dtype.name) for name, x in captured.items())
    return program_of(Traced(what="score", root=root, arrays=names), problem.mask_function, kinds), captured


def _score(axes: Mapping[str, int], names: tuple[str, ...]) -> Node:
    inputs = {name: node("input", (), name) for name in ("s", *_AXES)}

    def load(name: str, of: tuple[str, ...]) -> Node:
        return node("load", tuple(inputs[axis] for axis in of[len(of) - axes[name] :]), name)

    score = inputs["s"]
    if _CAP in names:
        cap = load(_CAP, ())
        score = node("mul", (cap, node("tanh", (node("div", (score, cap)),))))
    if _SLOPES in names:
        distance = node("abs", (node("sub", (node("add", (inputs["i"], load(_DIAGONAL, _AXES[:1]))), inputs["j"])),))
        score = node("sub", (score, node("mul", (load(_SLOPES, _AXES[:2]), distance))))
    if "bias" in names:
        score = node("add", (score, load("bias", _AXES)))
    return score
