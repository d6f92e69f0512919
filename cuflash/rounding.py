"""How kernels of CuPy, made of a line of text, read and write numbers of the dtypes of calls.

bfloat16 goes as its bits: not every version of CuPy has a type for it in such kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

_ROUNDED = """
__device__ unsigned short cuflash_bits(float x) {  // to the nearest one, ties to even
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
"""


class Storing(NamedTuple):
    """A dtype in such a kernel."""

    type: str  # of an argument
    is_bits: bool

    @property
    def preamble(self) -> str:
        return _ROUNDED if self.is_bits else ""

    def of(self, number: str) -> str:
        """A number of the dtype of the softmax, rounded."""
        return f"cuflash_bits({number})" if self.is_bits else number

    def read(self, name: str) -> str:
        """An argument, in the dtype of the softmax."""
        if self.is_bits:
            return f"__uint_as_float((unsigned){name} << 16)"
        return f"float({name})" if self.type == "float16" else name

    def view(self, array: Any) -> Any:
        """An array as the kernel takes it."""
        return array.view(np.uint16) if self.is_bits else array


def storing(dtype: str) -> Storing:
    """A dtype by its name."""
    is_bits = dtype == "bfloat16"
    return Storing("uint16" if is_bits else dtype, is_bits)
