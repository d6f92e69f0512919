"""The operands and results of a call of the NumPy path, whether stacks or tiles compute it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import exponentials
from cuflash.cpu.sink import Sink
from cuflash.operands import view_4d, view_rows
from cuflash.problem import Problem
from cuflash.terms import DEFAULT_NEED, GRADIENTS

Array = NDArray[Any]

FLOAT32 = np.dtype(np.float32)


class Call:
    """The arrays of one call: operands and results as (batch, heads, seqlen, dim), and terms, None for absent ones.

    Attributes
    ----------
    k_scale, v_scale : Array or None
        The scales of keys and values of one byte: (batch or pages, heads of k and v, keys).
    out, lse : Array
        Results of the forward pass, and operands of the backward pass; lse, as dlse, is (batch, heads, seqlen_q).
    dout, dlse : Array or None
        None in the forward pass. dlse is None, too, where nothing was computed from lse.
    wanted : dict
        Gradients to be written, by name, in the order of `GRADIENTS` and in the shapes of the caller.
    unit : float
        The factor of scores while they are computed. Added terms may be large and nearly cancel, so with them it is 1,
        and `exponential` multiplies by `UNIT` later.
    first_head : int
        Number of the first head for dropout, which counts the heads of all packed sequences.
    """

    def __init__(
        self,
        problem: Problem,
        arrays: Mapping[str, Array | None],
        seed: int | None,
        offset: int | None,
        sequence: int | None,
    ) -> None:
        layout, given = problem.layout, arrays.get
        self.problem = problem
        self.q, self.k, self.v, self.out = (view_4d(arrays[name], layout) for name in ("q", "k", "v", "out"))
        self.k_scale, self.v_scale = given("k_scale"), given("v_scale")
        self.lse = view_rows(arrays["lse"])
        dout, dlse = given("dout"), given("dlse")
        self.dout: Any = None if dout is None else view_4d(dout, layout)
        self.dlse = None if dlse is None else view_rows(dlse)
        self.wanted = {} if dout is None else {name: x for name in GRADIENTS if (x := given(name)) is not None}
        self.bias, self.mask, self.kv_lengths = given("bias"), given("mask"), given("kv_lengths")
        self.slopes, self.sink = given("alibi_slopes"), Sink(arrays)
        self.seed, self.offset = seed, offset
        self.first_head = problem.origin.head + (sequence or 0) * problem.origin.num_heads
        self.dtype = self.q.dtype if self.q.dtype.itemsize > 2 else FLOAT32
        self.unit = 1.0 if problem.has_added_terms else exponentials.UNIT

    @property
    def gradients_of_operands(self) -> dict[str, Array]:
        """dq, dk and dv, those that are wanted."""
        layout = self.problem.layout
        return {name: view_4d(self.wanted[name], layout) for name in DEFAULT_NEED if name in self.wanted}
