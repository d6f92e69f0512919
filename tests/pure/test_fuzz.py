"""The problems that `pytest -m fuzz` draws, on the CPU path, and what it does when a process ends too early."""

import functools
import itertools
import json
import subprocess
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.outputs import GRADIENTS, MOVABLE
from cuflash.spec.passes import FORWARD, JVP
from cuflash.testing.tangents import COTANGENTS
from tests import fuzz, pairs
from tests.scored import SCORES


@functools.cache
def every():
    """All problems."""
    return [trial for number in range(fuzz.GROUPS) for trial in fuzz.trials_of_group(number)]


def test_there_are_thousands_and_always_the_same():
    assert len(every()) >= 3000
    assert len({trial.name for trial in every()}) == len(every())
    for number in (17, fuzz.GROUPS - 20):
        assert [*map(str, fuzz.trials_of_group.__wrapped__(number))] == [*map(str, fuzz.trials_of_group(number))]


def of_category(category):
    groups = [number for number in range(fuzz.GROUPS) if fuzz.category_of(number) == category]
    return [trial for number in groups for trial in fuzz.trials_of_group(number)]


def test_every_set_of_gradients_is_wanted():
    assert {trial.need for trial in of_category("gradients")} == {*fuzz.NEEDS, ()}
    assert all(trial.need or trial.case.hidden_keys for trial in of_category("gradients"))
    assert not any(trial.need for category in ("pages", "float8") for trial in of_category(category))
    assert len(fuzz.NEEDS) == 255


def test_functions_of_all_kinds_are_drawn_and_what_they_read_is_differentiated():
    trials = of_category("functions")
    groups = Counter((trial.functions.score is not None, trial.functions.mask is not None) for trial in trials)
    assert set(groups) == {(True, False), (True, True), (False, True)} and min(groups.values()) >= 20
    scores = {trial.functions.score for trial in trials}
    assert len(scores & {*SCORES.values()}) >= 10 and len(scores - {*SCORES.values()}) >= 15
    score_args = [set(trial.need) - set(GRADIENTS) for trial in trials]
    assert np.mean([bool(names) for names in score_args]) > 0.3
    without = [trial for trial in trials if trial.functions.score is SCORES["steps"] and trial.need]
    assert without, "arrays that no derivative is by"


def test_wide_heads_ranks_and_axes_of_length_0_are_drawn():
    wide = [trial for trial in every() if trial.case.head_dim > 256]
    assert {trial.case.head_dim for trial in wide} == {*fuzz.WIDE_HEAD_DIMS}
    assert len(of_category("ranks")) >= 100 and {trial.ranks for trial in of_category("ranks")} == {2, 3}
    sizes = ("batch", "num_heads", "num_heads_kv", "seqlen_q", "seqlen_k")
    for name in sizes:
        assert sum(getattr(trial.case, name) == 0 for trial in every()) >= 10, name
    assert any(trial.case.num_heads == 0 < trial.case.num_heads_kv for trial in every())


def test_tangents_of_everything_are_drawn():
    trials = of_category("tangents")
    assert len(trials) >= 500
    moved = [trial for category in fuzz.WITH_TANGENTS for trial in of_category(category)]
    assert all(trial.moved for trial in moved) and sum(bool(trial.moved) for trial in every()) == len(moved)
    for name in MOVABLE:
        assert sum(name in trial.moved.names for trial in trials) >= 20, name
    assert {name for trial in trials for name in trial.moved.cotangents} == {*COTANGENTS}
    wanted = Counter(name for trial in trials for name in trial.need)
    assert set(wanted) == {f"t{name}" for name in GRADIENTS} and min(wanted.values()) >= 20
    assert any(trial.need == () for trial in trials) and any(trial.moved.names == ("q",) for trial in trials)
    assert {name for trial in trials for name in trial.given} >= {*JVP.default, "tdq", "tdk", "tdv"}
    assert any(trial.moved.common for trial in trials)


def test_ranks_and_streamed_keys_with_tangents_are_drawn():
    of_ranks, streamed = of_category("tangents of ranks"), of_category(fuzz.OF_STREAMED_KEYS)
    assert len(of_ranks) >= 100 and {trial.ranks for trial in of_ranks} == {2, 3}
    assert len(streamed) >= 100 and all(trial.chunk for trial in streamed)
    assert np.mean([trial.case.seqlen_k > 2 * trial.chunk for trial in streamed]) > 0.3
    assert {name for trial in streamed for name in trial.given} >= {*JVP.default, "tdq", "tdk", "tdv"}
    for trials in (of_ranks, streamed):
        assert {name for trial in trials for name in trial.moved.names} == {*MOVABLE}
        assert {name for trial in trials for name in trial.need} == {f"t{name}" for name in GRADIENTS}


@pytest.mark.parametrize("regime", ["bias_mask", "score_mean", "distinct_keys", "factors", "hidden_keys"])
def test_values_that_hid_mistakes_are_drawn(regime):
    dtypes = {trial.case.dtype for trial in every() if getattr(trial.case, regime)}
    assert dtypes >= {"float16", "bfloat16", "float32"}


def test_lengths_are_odd_ones_and_some_are_long():
    lengths = [n for trial in every() for n in (trial.case.seqlen_q, trial.case.seqlen_k)]
    assert set(range(257)) <= set(lengths)
    longest = [max(trial.case.seqlen_q, trial.case.seqlen_k) for trial in every()]
    assert 0.05 < np.mean([n > fuzz.LONGEST for n in longest]) < 0.2
    assert 2500 < max(longest) <= fuzz.LONGEST_OF_ALL + max(fuzz.PAGE_SIZES)


DRAWN_ELSEWHERE = {"v=None"}  # tests/pure/test_without_values.py


def options_of(trial):
    """Names of the options of a problem, as `tests.pairs` has them."""
    case = trial.case
    present = {
        "dtype": True,
        "causal": case.causal,
        "scale": case.scale is not None,
        "window": case.window,
        "softcap": case.softcap,
        "layout": case.layout == "bshd",
        "deterministic": trial.deterministic,
        "precision": trial.precision == "tf32",
        "dropout": case.dropout,
        "bias": case.bias is not None,
        "mask": case.mask is not None,
        "block_mask": case.block_mask is not None,
        "kv_lengths": case.kv_lengths is not None,
        "block_table": case.page_size,
        "cu_seqlens_q": case.cu_seqlens_q,
        "alibi_slopes": case.alibi_slopes is not None,
        "sinks": case.sinks,
        "dlse": case.dlse and trial.need,
        "num_heads_kv": case.num_heads_kv != case.num_heads,
        "head_dim_v": case.head_dim_v != case.head_dim,
        "k_scale": case.kv_dtype and case.k_scale,
        "v_scale": case.kv_dtype and case.v_scale,
        "axes": case.axes is not None,
        "strides": case.strides != "contiguous",
    }
    assert present.keys() == {option.name for option in pairs.OPTIONS} - DRAWN_ELSEWHERE
    return {name for name, on in present.items() if on}


def test_every_pair_that_is_served_is_drawn():
    drawn = {pair for trial in every() for pair in itertools.combinations(sorted(options_of(trial)), 2)}
    recorded = pairs.recorded()
    unserved = {tuple(pair) for of_pass in recorded["unserved"]["9.0"].values() for pair in of_pass}
    passes = recorded["options"]
    for pair in itertools.combinations(sorted(passes.keys() - DRAWN_ELSEWHERE), 2):
        in_one_pass = set(passes[pair[0]]) & set(passes[pair[1]])
        assert not in_one_pass or pair in drawn or pair in unserved, pair


def test_fp8_reaches_every_kernel_for_it():
    device = DeviceSpec.for_arch("9.0")
    found = Counter(
        (kernel.source, trial.case.page_size > 0)
        for trial in every()
        if trial.case.q_float8
        for kernel in choose_plan(trial.case.problem, device, FORWARD).kernels
    )
    main = ("sm90/forward_float8.cu", "sm80/forward.cu")
    assert all(found[source, False] >= 10 for source in (*main, "sm90/decode_float8.cu")), found
    assert all(found[source, True] >= 10 for source in main), found


@pytest.mark.parametrize("first", range(0, fuzz.GROUPS, 10))
def test_the_cpu_path_agrees_with_the_oracle(first):
    trial = fuzz.smallest(range(first, min(first + 10, fuzz.GROUPS)))
    assert fuzz.failure_of(trial, np.asarray) is None, trial


def double_results(monkeypatch, backend, name):
    """A backend whose results of one pass are wrong."""
    right = backend.compute

    def compute(pass_, *args):
        results = right(pass_, *args)
        return tuple(2 * x for x in results) if pass_.name == name else results

    monkeypatch.setattr(backend, "compute", compute)


@pytest.mark.parametrize("category", fuzz.WITH_TANGENTS)
@pytest.mark.parametrize(("name", "result"), [("jvp", "tout"), ("backward_jvp", "tdk")])
def test_a_mistake_in_tangents_is_found(monkeypatch, name, result, category):
    trials = (trial for trial in of_category(category) if "tdk" in trial.need and not trial.given)
    trial = next(x for x in trials if fuzz.scores_of(x) < 2 * 10**4 and x.yardsticks[result].expected.any())
    from cuflash.cpu import backend as cpu_backend

    assert fuzz.failure_of(trial, np.asarray) is None
    double_results(monkeypatch, cpu_backend, name)
    assert "got" in str(fuzz.failure_of(trial, np.asarray))


def test_a_mistake_is_found(monkeypatch):
    smallest = map(fuzz.smallest, zip(range(fuzz.GROUPS)))
    trials = (trial for trial in smallest if "dbias" in trial.need and not trial.given)
    trial = next(trial for trial in trials if trial.yardsticks["out"].expected.any())
    from cuflash.cpu import backend as cpu_backend

    double_results(monkeypatch, cpu_backend, "forward")
    assert "got" in str(fuzz.failure_of(trial, np.asarray))


# ---- Processes that end too early ------------------------------------------------------------------------------------


def ended_after(count, *, fatal=None, failure=None):
    """What a process prints that ends after so many problems: `fatal` is the one that CUDA did not survive."""

    def run(command, **keywords):
        number, first = int(command[-2]), int(command[-1])
        names = [trial.name for trial in fuzz.trials_of_group(number)][first:]
        lines = []
        for n, name in enumerate(names[:count], first):
            lines.append({"trial": name, "failure": failure if n == fatal else None, "is_fatal": n == fatal})
            if n == fatal:
                break
        return SimpleNamespace(stdout="\n".join(map(json.dumps, lines)), stderr="Segmentation fault", returncode=-11)

    return run


def test_a_process_that_dies_names_the_problem_and_others_follow(monkeypatch):
    monkeypatch.setattr(subprocess, "run", ended_after(4))
    assert fuzz.failures_of_group(3) == [
        "3-4: the process ended with status -11: Segmentation fault",
        "3-9: the process ended with status -11: Segmentation fault",
    ]


def test_a_context_that_is_lost_names_the_problem_and_others_follow(monkeypatch):
    monkeypatch.setattr(subprocess, "run", ended_after(fuzz.PROBLEMS, fatal=4, failure="cudaErrorMisalignedAddress"))
    assert fuzz.failures_of_group(3) == ["3-4: cudaErrorMisalignedAddress"]


def test_a_process_that_hangs_is_named(monkeypatch):
    def run(command, **keywords):
        raise subprocess.TimeoutExpired(command, fuzz.SECONDS)

    monkeypatch.setattr(subprocess, "run", run)
    assert fuzz.failures_of_group(3) == [f"3-{n}: no end after {fuzz.SECONDS} s" for n in range(fuzz.PROBLEMS)]
