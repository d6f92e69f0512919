"""What compiles kernels is skipped where there is no compiler for them."""

import pytest

from cuflash.emulator import building


@pytest.fixture(autouse=True)
def skips_without_compiler(monkeypatch):
    if building.find_compiler() is None:
        monkeypatch.setattr(building, "_built_in", lambda *_: pytest.skip("no C++ compiler: g++ is not on the path"))
