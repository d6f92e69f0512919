"""Which cases of a long list run: a share of them, or all with `pytest --exhaustive`."""

import zlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

Case = TypeVar("Case")

# Whether all of them do; conftest.py says so before test modules are imported.
exhaustive = False


def share(cases: Iterable[Case], one_in: int) -> Sequence[Case]:
    """About one in `one_in` of the cases, by their names: a case that is added does not change which others run."""
    cases = list(cases)
    chosen = [case for case in cases if exhaustive or zlib.crc32(str(case).encode()) % one_in == 0]
    assert chosen, f"none of {len(cases)} cases is in the share of one in {one_in}"
    return chosen
