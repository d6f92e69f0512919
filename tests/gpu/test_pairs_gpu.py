"""Every pair of options by the public interface on the device."""

import pytest

from tests import pairs
from tests.gpu.planned import is_sm90

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("setting", pairs.settings(), ids=str)
def test_agrees_with_the_oracle_or_is_refused(setting):
    cupy = pytest.importorskip("cupy")
    arch = "9.0" if is_sm90() else "8.0"
    for pass_ in (*pairs.PASSES, *pairs.WITH_TANGENTS):
        pairs.assert_as_recorded(arch, setting, pass_, pairs.by_interface(cupy.asarray))


@pytest.mark.parametrize("setting", pairs.settings(), ids=str)
def test_reductions(setting):
    cupy = pytest.importorskip("cupy")
    arch = "9.0" if is_sm90() else "8.0"
    pairs.assert_reductions(pairs.served(setting, arch), arch, cupy.asarray)
