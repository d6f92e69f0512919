"""One test of many cases fails where one of them does, and names it."""

import pytest

from tests.many_cases import each


@each(range(5))
def small(number):
    if number == 1:
        pytest.skip("not here")
    assert number not in (0, 3), "too much"


def test_all_that_fail_are_named():
    with pytest.raises(AssertionError, match=r"^0: AssertionError: too much[^\n]*\n(?s:.*)3: AssertionError: too much"):
        small()
    assert small.of_one(2) is None


def test_without_cases_it_fails():
    with pytest.raises(AssertionError, match="there are no cases"):
        each(())(print)()
