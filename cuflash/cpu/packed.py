"""Packed sequences on NumPy arrays: each is a problem of its own, on views of the rows that are its own.

The CPU path computes one sequence on all cores where it is long enough for that, and short ones side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import view_4d
from cuflash.arrays.checks import value_error
from cuflash.spec.outputs import DEFAULT_NEED, DEFAULT_NEED_TANGENTS, MOVABLE_OVER_HEAD_DIM, MOVABLE_OVER_ROWS
from cuflash.spec.problem import Problem

Array = NDArray[Any]

OF_KEYS = ("k", "v", "dk", "dv", "tk", "tv", "tdk", "tdv")
_OF_ROWS = (*MOVABLE_OVER_HEAD_DIM, *MOVABLE_OVER_ROWS, "row_sums")


@dataclass(frozen=True)
class Sequence:
    """One of the packed sequences."""

    index: int
    problem: Problem
    rows: slice
    keys: slice

    def of_rows(self, array: Array, name: str) -> Array:
        """The slice of the 3-D array `name`, or of the 2-D array lse or dlse, that is this sequence's."""
        own = self.keys if name in OF_KEYS else self.rows
        return array[own] if array.ndim == 3 and self.problem.layout == "bshd" else array[:, own]

    def of_call(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The slice of a call's arrays, but for score_mod args, that is this sequence's."""
        rows = {name: self.of_rows(x, name) for name, x in arrays.items() if name in _OF_ROWS}
        return rows | self.optional_inputs_of({name: x for name, x in arrays.items() if name not in rows})

    def optional_inputs_of(self, optional_inputs: Mapping[str, Array | None]) -> dict[str, Array]:
        """The optional inputs of this sequence: its row of those over (sequences, heads), and its k and v scales."""
        given = {name: x for name, x in optional_inputs.items() if x is not None and not name.startswith("cu_seqlens")}
        of_keys = {name: given.pop(name)[..., self.keys] for name in ("k_scale", "v_scale") if name in given}
        return of_keys | {name: x if x.ndim < 2 else x[self.index] for name, x in given.items()}


def clear_rows_of_no_sequence(problem: Problem, results: Mapping[str, Array], cu_seqlens_q: Array) -> None:
    """Write what rows after the last sequence get in results of `forward` or `jvp` by name."""
    last = int(cu_seqlens_q[-1])
    for name, x in results.items():
        if name in MOVABLE_OVER_ROWS:
            x[:, last:] = -np.inf if name in ("lse", "max") else 0
        else:
            view_4d(x, problem.layout)[:, :, last:] = 0


def clear_gradients_of_no_sequence(problem: Problem, arrays: Mapping[str, Array]) -> None:
    """Write what rows and keys after the last sequence get in dq, dk, dv and their tangents, if given: zeros."""
    for name in arrays.keys() & {*DEFAULT_NEED, *DEFAULT_NEED_TANGENTS}:
        ends = arrays["cu_seqlens_k" if name in OF_KEYS else "cu_seqlens_q"]
        view_4d(arrays[name], problem.layout)[:, :, int(ends[-1]) :] = 0


def sequences(problem: Problem, cu_seqlens_q: Array, cu_seqlens_k: Array) -> Iterator[Sequence]:
    """The packed sequences of a problem, in order."""
    rows, keys = (itertools.pairwise(cu.tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
    of_lengths: dict[tuple[int, int], Problem] = {}
    for index, ((q0, q1), (k0, k1)) in enumerate(zip(rows, keys, strict=True)):
        lengths = (q1 - q0, k1 - k0)
        if lengths not in of_lengths:
            of_lengths[lengths] = problem.of_sequence(*lengths)
        yield Sequence(index, of_lengths[lengths], slice(q0, q1), slice(k0, k1))


def check_starts(problem: Problem, cu_seqlens_q: Array, cu_seqlens_k: Array) -> None:
    """Raise ValueError unless both begin with 0, never decrease, and stay within the rows that there are."""
    for name, cu, total, heads in (
        ("cu_seqlens_q", cu_seqlens_q, problem.seqlen_q, problem.num_heads),
        ("cu_seqlens_k", cu_seqlens_k, problem.seqlen_k, problem.num_heads_kv),
    ):
        if cu[0] != 0:
            raise value_error(name, f"a first entry {cu[0]}", "0")
        falls = np.flatnonzero(cu[1:] < cu[:-1])
        if falls.size:
            at = int(falls[0])
            raise value_error(name, f"an entry {cu[at + 1]} after {cu[at]}", "entries that do not decrease")
        if cu[-1] > total:
            expected = f"at most {total}, the length of the axis of sequences in layout {problem.layout!r}"
            if cu[-1] <= heads:
                other = "bshd" if problem.layout == "bhsd" else "bhsd"
                expected += f"; with layout={other!r} that axis has length {heads}"
            raise value_error(name, f"a last entry {cu[-1]}", expected)
