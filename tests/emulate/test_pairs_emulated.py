"""Every pair of options by the real kernels: those for all devices, and those of compute capability 9.0."""

from typing import Any

import pytest

from tests import pairs
from tests.emulate.checks import judge_both_passes
from tests.emulate.reduced import reduced

pytestmark = pytest.mark.one_in(8)


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("setting", pairs.settings(), ids=str)
def test_agrees_with_the_oracle_or_is_refused(setting, arch):
    for pass_ in pairs.PASSES:
        pairs.assert_as_recorded(arch, setting, pass_, pairs.by_emulator(arch))


@pytest.mark.one_in(24)
@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("setting", pairs.settings(), ids=str)
def test_reductions_agree_with_the_oracle(setting, arch):
    setting = pairs.served(setting, arch)
    options: dict[str, Any] = {"deterministic": setting.deterministic, "precision": setting.precision}
    if setting.case.axes is None and setting.precision == "highest":
        judge_both_passes(pairs.with_row_reductions(setting), arch, setting.deterministic)
    if pairs.reduces_weights(setting, arch):
        pairs.judge_weights(setting, *reduced(setting.case, arch, 16, **options))


@pytest.mark.one_in(24)
@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("setting", pairs.settings(), ids=str)
def test_tangents_agree_with_the_oracle_or_are_refused(setting, arch):
    for pass_ in pairs.WITH_TANGENTS:
        pairs.assert_as_recorded(arch, setting, pass_, pairs.by_emulator(arch))
