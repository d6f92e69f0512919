"""The ways in which NumPy arrays are computed; the fixture `way` of tests/pure/conftest.py takes one."""

import pytest

FALLBACK, CORE = "fallback", "core"  # by NumPy, or by the compiled core
every_way = pytest.mark.parametrize("way", [FALLBACK, CORE], indirect=True)
