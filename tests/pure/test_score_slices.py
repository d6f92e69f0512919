"""Functions of slices of longer problems: they are those of the whole, and kernels know of them what they knew."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.score_mod import COUNTED, ORIGIN, READ_CLASSES, Traced, hoisted_program_of, index_class, program_of
from cuflash.score_mod.evaluation import evaluate
from cuflash.score_mod.indexing import LARGEST_ORIGIN
from tests import expressions
from tests.expressions import hoistable_scores, masks, scores
from tests.sampling import examples
from tests.scored import SCORES, score_args_of

ORIGINS = st.tuples(*(st.integers(0, 40) for _ in COUNTED))
ROWS, KEYS = np.arange(7)[:, None], np.arange(5)[None, :]
S = np.random.default_rng(1).standard_normal((7, 5))


def value(traced, given, inputs):
    return np.broadcast_to(evaluate([traced.typed(given)], inputs, given, np.float64)[0], S.shape)


def types_of(given):
    return tuple((name, x.ndim, x.dtype.name) for name, x in given.items())


@settings(max_examples=examples(80))
@given(scores() | hoistable_scores() | masks(), ORIGINS)
def test_a_slice_counts_from_where_it_begins(function, origin):
    traced = Traced.of(function, "score" if function.__code__.co_argcount == 3 else "mask")
    given = expressions.arrays()
    row, key, head, batch = origin
    of_whole = value(traced, given, {"s": S, "i": ROWS + row, "j": KEYS + key, "head": head + 1, "batch": batch + 1})
    own = traced.of_slice()
    assert (ORIGIN in own.arrays) == traced.depends_on(*COUNTED)
    given |= {ORIGIN: np.array(origin, np.int32)}
    np.testing.assert_array_equal(of_whole, value(own, given, {"s": S, "i": ROWS, "j": KEYS, "head": 1, "batch": 1}))


@settings(max_examples=examples(80))
@given(hoistable_scores() | st.sampled_from([f for f in SCORES.values() if f is not None]))
def test_kernels_know_the_same_of_a_slice(function):
    """Which indices reads follow from, which subexpressions become tables; and integers keep 32 bits."""
    traced, given = Traced.of(function, "score"), expressions.arrays()
    given |= score_args_of((function,), (2, 3, 9, 11), "float64", 0)
    given = {name: x for name, x in given.items() if name in traced.arrays}
    of_slice_given = given | {ORIGIN: np.zeros(4, np.int32)}
    found = []
    for own, arrays in ((traced, given), (traced.of_slice(), of_slice_given)):
        arrays = {name: x for name, x in arrays.items() if name in own.arrays}
        program, hoisted = (make(own, None, types_of(arrays), *more) for make, more in PROGRAMS)
        classes = {
            name: [READ_CLASSES.get(index_class(load.at)) for load in loads] for name, loads in program.loads.items()
        }
        body = re.split(r"\bscore_function\b", hoisted.header())[1].split("\n}\n")[0]
        found.append((classes, [table.by for table in hoisted.tables], body.count("const i64 ")))
    (classes, tables, long), (classes_of_slice, tables_of_slice, long_of_slice) = found
    assert classes_of_slice == classes
    assert sorted(tables_of_slice) == sorted(tables)
    assert long_of_slice <= long


PROGRAMS = ((program_of, ()), (hoisted_program_of, ("float64", True)))


def test_slices_share_an_expression():
    traced = Traced.of(lambda s, i, j, *, a: s + a[i - j], "score")
    assert traced.of_slice() == Traced.of(lambda s, i, j, *, a: s + a[i - j], "score").of_slice()
    alone = Traced.of(lambda s, i, j, *, a: s * a, "score")
    assert alone.of_slice() is alone
    assert repr(traced.of_slice()).count(ORIGIN) == 2


@pytest.mark.parametrize("which", range(4))
def test_sums_do_not_wrap_around(which):
    traced = Traced.of(lambda s, i, j, *, head, batch: s + (i, j, head, batch)[which], "score")
    given = {ORIGIN: np.full(4, LARGEST_ORIGIN, np.int32)}
    largest = 2**30 if which < 2 else 2**31 - 1
    inputs = {"s": np.zeros((1, 1)), **dict.fromkeys(COUNTED, np.array([[largest]]))}
    (got,) = evaluate([traced.of_slice().typed(given)], inputs, given, np.float64)
    assert got[0, 0] == 2**31 - 1
    header = program_of(traced.of_slice(), None, types_of(given)).header()
    assert "i64 t" not in header.split("score_function")[1]


def test_a_difference_is_one_of_the_whole():
    for function in (lambda i, j: i - j < 3, lambda i, j: j >= i, lambda i, j: i == j):
        traced = Traced.of(function, "mask").of_slice()
        given = {ORIGIN: np.array([10, 4, 0, 0], np.int32)}
        got = value(traced, given, {"i": ROWS, "j": KEYS, "head": 0, "batch": 0})
        np.testing.assert_array_equal(got, function(ROWS + 10, KEYS + 4))
    assert cuflash.FlashAttention(score=lambda s, i, j: s + (i < j)).options.score is not None
