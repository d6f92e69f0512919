"""Thousands of problems drawn over the whole space of options, both passes, on the device: pytest -m fuzz."""

import pytest

from tests import fuzz

pytestmark = pytest.mark.fuzz


@pytest.mark.parametrize("number", range(fuzz.GROUPS))
def test_drawn_problems_agree_with_the_oracle(number):
    failures = fuzz.failures_of_group(number)
    assert not failures, "\n".join(failures)
