"""How tests of every tier hold results against yardsticks, and against other results; arrays may be on a device."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import cuflash.testing as ct


def assert_within(results: Mapping[str, Any], yardsticks: Mapping[str, Any]) -> None:
    """Hold results by name to the oracle rule, for arrays that no `Case` makes."""
    measured = [ct.measure(name, x, yardsticks[name]) for name, x in results.items()]
    assert not any(m.failure for m in measured), "\n".join(map(str, measured))


def assert_oracle(case: ct.Case, results: Mapping[str, Any]) -> tuple[Any, ...]:
    """Hold the results of a case to the oracle rule, those of both passes by name; returns what was measured."""
    of_forward = [name for name in results if not name.startswith("d")]
    gradients = {name: x for name, x in results.items() if name not in of_forward}
    measured = ct.assert_forward(case, **{name: results[name] for name in of_forward})
    return (*measured, *(ct.assert_backward(case, **gradients) if gradients else ()))


def bits(results: Mapping[str, Any] | Iterable[Any]) -> list[bytes]:
    """Those of each result, down to the sign of zero and the payload of NaN."""
    values = results.values() if isinstance(results, Mapping) else results
    return [np.ascontiguousarray(ct.to_numpy(x)).tobytes() for x in values]


def assert_same_bits(found: Any, expected: Any) -> None:
    """Hold results against those of the same names, or at the same positions."""
    if isinstance(expected, Mapping):
        assert {name: bits([found[name]]) for name in expected} == {name: bits([x]) for name, x in expected.items()}
    else:
        assert bits(found) == bits(expected)
