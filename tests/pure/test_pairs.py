"""Pairs of options: what the cases cover, that all are right on the CPU, and that the page on options has the table."""

import itertools
import re
from inspect import signature
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from tests import pairs
from tests.compiled import INSTRUCTION_SETS, NUMPY, way_taken
from tests.pairs import OF_ONE_BATCH, OPTIONS, PASSES, WITH_TANGENTS, Option, Setting, covering_array, settings
from tests.sampling import sample

SETTINGS = settings()


# ---- Which cases -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 99))
def test_every_two_columns_have_every_pair(levels, seed):
    rows = covering_array(levels, seed=seed, attempts=3)
    assert all(0 <= a < n for row in rows for a, n in zip(row, levels, strict=True))
    for i, j in itertools.combinations(range(len(levels)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(range(levels[i]), range(levels[j])))


def test_they_are_few():
    at_least = max(len(a.values) * len(b.values) for a, b in itertools.combinations(OPTIONS, 2))
    assert at_least <= len(SETTINGS) <= 30


def test_every_pair_of_options_comes_together_and_apart():
    names = [option.name for option in OPTIONS]
    assert len(set(names)) == len(names)
    always = {option.name for option in OPTIONS if option.always}
    for one, other in itertools.permutations(names, 2):
        assert any({one, other} <= set(setting.names) for setting in SETTINGS)
        if other not in always:
            assert any(one in setting.names and other not in setting.names for setting in SETTINGS)


def test_every_argument_of_the_interface_is_among_them():
    """Beside results, the arrays that every call has, and what belongs to one of the options."""
    attention = cuflash.FlashAttention
    parameters = {x for f in (attention, attention.forward, attention.backward) for x in signature(f).parameters}
    others = {
        "self",
        "q",
        "k",
        "v",
        "dout",
        "out",
        "lse",
        "q_scale",  # of fp8 q, whose dtype is no other: tests/features/test_drawn_on_backends.py
        "batch_invariant",  # with which results are those of other calls: tests/invariance.py
        "want",  # row reductions, which every setting is computed with
        "max",
        "entropy",
        "dmax",
        "dentropy",
        "dq",
        "dk",
        "dv",
        "dbias",
        "dalibi_slopes",
        "dscale",
        "dsoftcap",
        "dsinks",
        "need",
        "seed",
        "offset",
        "block_size",
        "cu_seqlens_k",
        "score",  # functions have problems of their own: tests/scored.py
        "score_args",
    }
    assert parameters - others <= {option.name for option in OPTIONS}


def test_a_setting_loses_an_option():
    for setting in SETTINGS:
        for name in set(setting.names) - {"dtype"}:
            less = pairs.without(setting, name)
            assert set(less.names) == set(setting.names) - {name}
            assert less != setting
    assert pairs.without(Setting.of({OPTIONS[0]: {"dtype": "float32"}, OPTIONS[1]: {"causal": True}}), "causal") == (
        Setting.of({OPTIONS[0]: {"dtype": "float32"}})
    )


# ---- What happens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_on_the_cpu(setting):
    for pass_ in PASSES:
        pairs.assert_as_recorded("cpu", setting, pass_, pairs.by_interface(lambda x: x))


@pytest.mark.parametrize("setting", sample(SETTINGS, 5), ids=str)
def test_with_tangents_on_the_cpu(setting):
    for pass_ in WITH_TANGENTS:
        pairs.assert_as_recorded("cpu", setting, pass_, pairs.by_interface(lambda x: x))


@pytest.mark.parametrize("setting", sample(SETTINGS, 2), ids=str)
@pytest.mark.parametrize(("name", "way"), sample((*INSTRUCTION_SETS, NUMPY), 1), ids=str)
def test_reductions_on_the_cpu(name, way, setting):
    with way_taken(way):
        pairs.assert_reductions(pairs.served(setting, "cpu"), "cpu", lambda x: x)


# One that is served, and so has neither pages nor packed sequences.
MANY = max(
    (x for x in SETTINGS if not {"block_table", "cu_seqlens_q"} & {*x.names}), key=lambda setting: len(setting.names)
)


def refusing(*names):
    """A backend that is right, but for settings that have these options."""
    run = pairs.by_interface(lambda x: x)

    def refuse(setting, pass_):
        if set(names) <= set(setting.names):
            raise NotImplementedError(f"{names[0]}: not with {names[-1]}; leave it out")
        return run(setting, pass_)

    return refuse


def test_a_refusal_is_found_and_everything_else_is_still_tried():
    one, other = MANY.names[1], MANY.names[3]
    tried = []
    run = refusing(one, other)

    def counting(setting, pass_):
        tried.append(setting.names)
        return run(setting, pass_)

    assert list(pairs.unserved_pairs(MANY, "forward", counting)) == [(one, other)]
    assert set(tried) == {MANY.names, *(tuple(x for x in MANY.names if x != name) for name in (one, other))}
    with pytest.raises(AssertionError, match="not as recorded"):
        pairs.assert_as_recorded("cpu", MANY, "forward", run)


def test_a_refusal_that_names_one_option_is_a_failure():
    with pytest.raises(AssertionError, match="should be named in"):
        list(pairs.unserved_pairs(MANY, "forward", refusing(MANY.names[2])))


@pytest.mark.parametrize("pass_", PASSES)
def test_a_wrong_result_is_a_failure(pass_):
    run = pairs.by_interface(lambda x: x)

    def wrong(setting, pass_):
        return {name: x + np.asarray(0.5, x.dtype) for name, x in run(setting, pass_).items()}

    with pytest.raises(AssertionError, match=r"(out|dq)"):
        list(pairs.unserved_pairs(MANY, pass_, wrong))


# ---- The table -------------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_of_these_options():
    found = pairs.recorded()
    assert found["options"] == {option.name: list(option.passes) for option in OPTIONS}
    assert {backend: set(by_pass) for backend, by_pass in found["unserved"].items()} == {
        backend: {*PASSES, *WITH_TANGENTS} for backend in pairs.BACKENDS
    }
    names = found["options"].keys()
    assert all(
        set(pair) <= names and pair == sorted(pair)
        for by_pass in found["unserved"].values()
        for every in by_pass.values()
        for pair in every
    )


@pytest.mark.parametrize("pass_", WITH_TANGENTS)
def test_passes_with_tangents_go_with_what_the_backward_pass_goes_with(pass_):
    """So the table need not say it again."""
    for by_pass in pairs.recorded()["unserved"].values():
        assert by_pass[pass_] == [pair for pair in by_pass["backward"] if not {*pair} & {*OF_ONE_BATCH}]


def test_the_page_has_the_table():
    text, found = pairs.PAGE.read_text(), pairs.recorded()
    assert pairs.in_page(text, found) == text, "python -m tests.pairs writes it"
    table = text[text.index(pairs.BEGIN) : text.index(pairs.END)]
    # Functions have problems of their own, tests/scored.py, and so have fp8 products, reductions and batch_invariant.
    rows = set(re.findall(r"^\| `([\w=]+)`", table, re.MULTILINE))
    assert rows == found["options"].keys() | {"score", "q_scale", "want", "dmax", "column_sums", "batch_invariant"}


def test_the_table_says_what_is_refused():
    found: dict[str, Any] = {
        "options": {"causal": ["forward", "backward"], "dlse": ["backward"], "mask": ["forward", "backward"]},
        "unserved": {name: {"forward": [], "backward": []} for name in pairs.BACKENDS},
    }
    found["options"]["block_table"] = ["forward"]
    for by_pass in found["unserved"].values():
        by_pass["forward"] = [["block_table", "mask"]]
    found["unserved"]["9.0"]["backward"] = [["causal", "dlse"]]
    found["unserved"]["8.0"]["forward"].append(["causal", "mask"])
    assert pairs.excluded("dlse", found) == "`causal` (9.0)"
    assert pairs.excluded("mask", found) == "`block_table`, `causal` (8.0 forward)"
    assert pairs.excluded("block_table", found) == "`mask`"
    table = "\n| `mask` | hides | old |\n| `other` | a | b |\n| `dlse` | x | |\n"
    text = f"# Title\n{pairs.BEGIN}{table}{pairs.END}\ntail\n"
    new = pairs.in_page(text, found)
    assert new.splitlines()[2:5] == [
        "| `mask` | hides | `block_table`, `causal` (8.0 forward) |",
        "| `other` | a | b |",
        "| `dlse` | x | `causal` (9.0) |",
    ]
    assert pairs.in_page(new, found) == new and new.endswith("\ntail\n")


def test_an_option_that_is_added_is_covered_at_little_cost():
    more = settings((*OPTIONS, Option("another", ({"seed": 3},)), Option("one more", ({"score_spread": 4.0},))))
    assert len(more) <= len(SETTINGS) + 4
