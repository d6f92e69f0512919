"""What type checkers infer of a call: the types of its arrays, and whether it has functions that read arrays.

The array type of q is that of out, also where a library has no types, as CuPy has none: arrays of any type give arrays
of any type. lse has another shape and dtype, which the types of NumPy arrays may hold; so calls of NumPy arrays have an
overload of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

# Python has defaults of type variables since 3.13. With them a class is annotated without its parameters.
if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import TypeVar

    ArrayT = TypeVar("ArrayT", default=Any)  # of q, and so of out and dq
    KeyT = TypeVar("KeyT", default=Any)  # of k and dk
    ValueT = TypeVar("ValueT", default=Any)  # of v and dv
    LseT = TypeVar("LseT", default=Any)
    ScalarT = TypeVar("ScalarT", bound=np.generic)  # of a NumPy array
    FunctionT = TypeVar("FunctionT", default=Any)
    NumpyArray = np.ndarray[Any, np.dtype[ScalarT]]
    # Python's or NumPy's integer, or None. As Any, so that ``**inputs`` may be a dictionary of arrays.
    Integer = Any
else:
    from typing import TypeVar

    ArrayT, KeyT, ValueT, LseT, FunctionT = map(TypeVar, ("ArrayT", "KeyT", "ValueT", "LseT", "FunctionT"))

# What FunctionT is with a score or a mask function, which reads arrays of any names; without one it is None, and then
# type checkers know all keywords of a call.
WithFunction = Callable[..., Any]


class NamedResults(tuple[Any, ...]):
    """A named tuple of the results that a call was asked for; the others are no attributes of it."""

    __slots__ = ()

    if TYPE_CHECKING:
        _fields: ClassVar[tuple[str, ...]]

        def _asdict(self) -> dict[str, Any]: ...
