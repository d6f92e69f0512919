"""A call, from the arrays of a caller to what a backend computes.

`prepare` is the only door of `FlashAttention.forward`, `backward`, `plan`, `compile` and `tune`: it finds out whose
arrays these are, and replaces functions by the options that they spell out. Backends bind what comes out of it
(`cuflash.spec.binding`), and split leading axes (`cuflash.spec.batch_axes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from cuflash.arrays.dlpack import Borrowed
from cuflash.spec.borrowing import are_cupy, borrow, numpy_arrays
from cuflash.spec.options import Options
from cuflash.spec.rewrites import Equivalent, equivalent
from cuflash.spec.streamed import borrow_beside_host, is_streamed

Kind = Literal["numpy", "cupy", "streamed"]
OUTPUTS = ("out", "lse")  # of the forward pass, in its order


class Call(NamedTuple):
    """What a backend computes for a call, and the way back."""

    kind: Kind  # of which backend
    options: Options
    arrays: dict[str, Any]  # by name; for NumPy only those that are given
    need: tuple[str, ...]  # names of the results, in the order in which the backend returns them
    wanted: tuple[str, ...]  # names of the results of the caller
    given: dict[str, Any]  # the arrays by the names of the caller
    rewrite: Equivalent | None
    borrowed: Borrowed | None  # None where the arrays of the caller are those of the backend
    is_direct: bool  # what the backend computes are the results of the caller

    def give_back(self, computed: Sequence[Any], own: Mapping[str, Any]) -> Sequence[Any]:
        """Results of a backend as those of the caller, whose arrays by name are `own`: in order, shape and library."""
        if self.need != self.wanted and self.rewrite is not None:
            computed = self.rewrite.gradients(computed, self.given, self.wanted)
        if self.borrowed is None:
            return computed
        libraries = dict.fromkeys(self.wanted, self.borrowed)
        if self.kind == "streamed":
            libraries |= {"dk": self.given["k"].borrowed, "dv": self.given["v"].borrowed}
        return [libraries[name].give_back(x, own[name]) for name, x in zip(self.wanted, computed, strict=True)]


def prepare(
    options: Options,
    arrays: dict[str, Any],
    required: Sequence[str],
    wanted: tuple[str, ...],
    written: Sequence[str] = (),
) -> Call:
    """The call that computes the results `wanted` of a pass.

    `arrays` are those of the caller by name, where None stands for an absent one; `written` names those among them
    that results are written to, `required` those that have to be there. Raises as `borrow` does.
    """
    borrowed, given = None, arrays
    if are_cupy(arrays, required):
        kind: Kind = "cupy"
    elif own := numpy_arrays(arrays, required, written):
        kind, given = "numpy", own
    elif is_streamed(arrays):
        kind = "streamed"
        borrowed, given = borrow_beside_host(arrays, required, written)
    else:
        borrowed = borrow(arrays, required=required, written=written)
        kind, given = borrowed.kind, borrowed.of_backend
    rewrite = equivalent(options, given)
    if rewrite is None:
        return Call(kind, options, given, wanted, wanted, given, None, borrowed, borrowed is None)
    need = wanted if wanted == OUTPUTS else rewrite.need(wanted)
    return Call(kind, rewrite.options, rewrite.arrays(given), need, wanted, given, rewrite, borrowed, False)
