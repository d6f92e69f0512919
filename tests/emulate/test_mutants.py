"""The emulator notices mistakes in the project's kernels: each mutant of a long list."""

import pytest

from cuflash.gpu.compiler import kernel_directory
from tests.emulate import mutants
from tests.emulate.mutants import MIN_CAUGHT, MUTANTS, TRIALS
from tests.many_cases import each
from tests.sampling import sample

KERNELS = kernel_directory()


CHOSEN = sample(MUTANTS, 120)  # a compilation and more each
# Those that have to notice the mistakes below, and a sample of the others: all of them where all mutants are run.
TRIALS_CHOSEN = sorted({trial for mutant in CHOSEN for trial in mutant.trials} | {*sample(TRIALS, 10)})


@pytest.mark.parametrize("trial", TRIALS_CHOSEN)
def test_without_a_mistake_the_trial_passes(trial):
    """Else mutants would be caught for nothing: python -m tests.emulate.mutants checks that of its trials first."""
    TRIALS[trial].run()


@each(MUTANTS)
def test_mutants_are_mistakes_in_the_kernels_as_they_are(mutant):
    assert mutant.line > 0
    assert mutant.text != (KERNELS / mutant.file).read_text()


@pytest.mark.parametrize("mutant", CHOSEN, ids=lambda mutant: f"{mutant.file}: {mutant.what}")
def test_mutant_is_caught(mutant):
    report = mutant.caught()
    if mutant.escapes:
        assert report is None, f"said to escape ({mutant.escapes}), but is caught"
    else:
        assert report is not None, "no trial fails"
        assert "does not compile" not in report


def test_the_list_is_long_and_wide_enough():
    assert len(MUTANTS) >= 60
    assert sum(not mutant.escapes for mutant in MUTANTS) >= MIN_CAUGHT * len(MUTANTS)
    assert len({(mutant.file, mutant.what) for mutant in MUTANTS}) == len(MUTANTS)
    assert {trial for mutant in MUTANTS for trial in mutant.trials} == set(TRIALS)
    without_code = {
        "common/io/params.cuh",
        "sm90/backward_jvp_layout.cuh",
        *(f"ptx/{name}.cuh" for name in ("arithmetic", "base", "tma", "wgmma")),
    }
    files = {path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu*")}
    assert {mutant.file for mutant in MUTANTS} == files - without_code


def test_a_mutant_whose_text_is_gone_is_an_error():
    mutant = mutants.Mutant(
        what="nothing", file="common/score/mask.cuh", old="no such text", new="", trials=("forward",)
    )
    with pytest.raises(ValueError, match=r"nothing: common/score/mask.cuh has the text 0 times: 'no such text'"):
        mutant.write()
