"""Property-based tests of anybody's attention: cases, strategies that draw them, and the rule that judges results.

    from hypothesis import given, settings
    import cuflash.testing as ct

    @settings(deadline=None)
    @given(ct.cases(dtypes=["float32"]))
    def test_mine(case):
        ct.check(my_attention, case)

A `Case` is plain frozen data: an attention problem, the optional arrays that come with it, how the arrays lie in memory
and a seed. It makes the arrays; `assert_forward` and `assert_backward` judge what an implementation made of them.

The oracle rule: on the same inputs, the error against the oracle (`cuflash.testing.reference` in float64, or in long
double for float64) of each entry of a result is at most twice the error of the plain formula computed in the dtype of
the inputs (once, for float32), plus one unit in the last place of the entry's scale, plus the unavoidable effect of
rounding the scores of its row. `Yardstick` has the definitions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuflash.arrays.array_info import numpy_dtype
from cuflash.testing.arrays import STRIDES, lay_out, through_dlpack, to_numpy
from cuflash.testing.case import (
    Case,
    gather_pages,
    optional,
    optional_backward,
    qkv,
    self_test_cases,
    split_keys,
)
from cuflash.testing.differences import Change, check_gradients
from cuflash.testing.rule import (
    Measurement,
    Report,
    Yardstick,
    assert_backward,
    assert_forward,
    check,
    gradients_of,
    measure,
    yardsticks,
)

if TYPE_CHECKING:
    from cuflash.testing.strategies import FEATURES, MORE_FEATURES, REGIMES, cases, over_axes, with_axes

__all__ = [
    "FEATURES",
    "MORE_FEATURES",
    "REGIMES",
    "STRIDES",
    "Case",
    "Change",
    "Measurement",
    "Report",
    "Yardstick",
    "assert_backward",
    "assert_forward",
    "cases",
    "check",
    "check_gradients",
    "gather_pages",
    "gradients_of",
    "lay_out",
    "measure",
    "numpy_dtype",
    "optional",
    "optional_backward",
    "over_axes",
    "qkv",
    "self_test_cases",
    "split_keys",
    "through_dlpack",
    "to_numpy",
    "with_axes",
    "yardsticks",
]


def __getattr__(name: str) -> Any:
    """What draws cases is imported when it is asked for, because it alone needs hypothesis."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from cuflash.testing import strategies
    except ImportError as error:
        raise ImportError(
            f"cuflash.testing.{name} draws cases with hypothesis: pip install hypothesis ({error})"
        ) from error
    return getattr(strategies, name)
