"""What the arrays of a launch are like: how a call finds out, without a key of all their properties, that it is theirs.

Reading shape and strides of a CuPy array takes a tenth of a microsecond each, which is most of what is left of a bound
call besides the launch. So they are read once, by one function of C, and compared as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cuflash.spec.binding import Growing, same_plan
from cuflash.spec.options import Options

# What a launch depends on of an array, besides its address: shape, strides, dtype and device.
Form = tuple[tuple[int, ...], tuple[int, ...], Any, int]
form_of: Callable[[Any], Form] = operator.attrgetter("shape", "strides", "dtype", "data.device_id")


class Signature(NamedTuple):
    """What the arrays of a launch are like, in the order of its names."""

    device_id: int
    forms: list[Form]
    alignments: list[int]  # addresses modulo 16
    k_and_v: tuple[int, int]  # indices of these
    is_v_at_k: bool  # whether they begin at one address: then v may be the first columns of k
    # Of each array whose axis of keys, or of pages, may have another length: its index, its lengths before and after
    # this axis, and the rest of its form.
    growing: tuple[tuple[int, tuple[int, ...], tuple[int, ...], tuple[Any, ...]], ...]
    axis: int
    lengths: tuple[int, int]  # the smallest and the largest that the launch serves
    keys: int  # for each element of the axis

    @classmethod
    def of(cls, options: Options, arrays: Mapping[str, Any], seqlen_q: int, growing: Growing) -> Signature:
        """The signature of the arrays that a launch was made for; None stands for an absent one."""
        given = {name: x for name, x in arrays.items() if x is not None}
        order, pointers = list(given), [x.data.ptr for x in given.values()]
        forms = [*map(form_of, given.values())]
        names, axis, seqlen_k, _ = growing
        keys, lengths = 0, (0, 0)
        if names:
            keys = seqlen_k // given[names[0]].shape[axis]
            first, last = same_plan(options, seqlen_q, seqlen_k)
            lengths = max(-(-first // keys), 2), last // keys  # of an axis of length 1 the stride may be any
        k, v = order.index("k"), order.index("v")

        def grown(name: str) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
            index = order.index(name)
            shape, *rest_of_form = forms[index]
            return index, shape[:axis], shape[axis + 1 :], tuple(rest_of_form)

        return cls(
            device_id=given["q"].data.device_id,
            forms=forms,
            alignments=[x & 15 for x in pointers],
            k_and_v=(k, v),
            is_v_at_k=pointers[k] == pointers[v],
            growing=tuple(map(grown, names)),
            axis=axis,
            lengths=lengths,
            keys=keys,
        )

    def seqlen_k_of(self, forms: list[Form]) -> int | None:
        """The number of keys of arrays that differ at most in it; None if the launch does not serve them."""
        if not self.growing or len(shape := forms[self.growing[0][0]][0]) <= self.axis:
            return None
        length = shape[self.axis]
        if not self.lengths[0] <= length <= self.lengths[1]:
            return None
        expected = list(self.forms)
        for index, before, after, rest_of_form in self.growing:
            expected[index] = ((*before, length, *after), *rest_of_form)  # type: ignore[assignment]
        return length * self.keys if forms == expected else None

    def has_addresses(self, pointers: list[int]) -> bool:
        """Whether these, and maybe others after them, are addresses that the launch serves."""
        k, v = self.k_and_v
        alignments = [x & 15 for x in pointers[: len(self.alignments)]]
        return (pointers[k] == pointers[v]) is self.is_v_at_k and alignments == self.alignments
