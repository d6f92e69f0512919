"""Many small cases in one test: as tests of their own they would cost several times what they do."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(cases: Iterable[Any]) -> Callable[[Callable[[Any], None]], Any]:
    """Make of a function one test that calls it with each of the cases, and names all that fail.

    The function itself is the attribute `of_one` of the test. A case that skips is left out.
    """
    every = list(cases)

    def test_of(function: Callable[[Any], None]) -> Any:
        def test() -> None:
            assert every, "there are no cases"
            failed = []
            for case in every:
                try:
                    function(case)
                except pytest.skip.Exception:
                    continue
                except Exception as error:
                    failed.append(f"{case}: {type(error).__name__}: {error}")
            assert not failed, "\n".join(failed)

        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        test.of_one = function  # type: ignore[attr-defined]
        return test

    return test_of
