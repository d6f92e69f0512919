"""Subexpressions of scores that become tables: which they are, and that values and derivatives stay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.arrays.units import in_bytes
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.score_mod import READ_CLASSES, Traced, hoisted_program_of, index_class, program_of
from cuflash.score_mod.evaluation import clamped, evaluate
from cuflash.score_mod.nodes import Node, in_order, node
from cuflash.score_mod.tables import MARGIN
from cuflash.spec.passes import BACKWARD
from tests import expressions
from tests.expressions import BATCH, HEADS, SEQLEN_K, SEQLEN_Q, hoistable_scores, scores
from tests.sampling import examples
from tests.scored import SCORES, of_functions

SHAPE = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
S = np.random.default_rng(1).standard_normal(SHAPE) * 2


def inputs(shape=SHAPE):
    batch, head, i, j = np.ogrid[tuple(map(slice, shape))]
    return {"s": S, "i": i, "j": j, "head": head, "batch": batch}


def programs(score, given, of_batch=True):
    arrays = tuple((name, x.ndim, x.dtype.name) for name, x in given.items())
    traced = Traced.of(score, "score")
    return program_of(traced, None, arrays), hoisted_program_of(traced, None, arrays, "float64", of_batch)


def rows_of(table):
    """Inputs for all entries of a table, and the position of the first."""
    batch, heads, positions = table.size(*SHAPE)
    batch, head, position = np.ogrid[:batch, :heads, :positions]
    first = table.first(SEQLEN_K)
    position = position + first
    i = {"i": position, "j": 0 * position, "i - j": np.maximum(position, 0)}[table.by]
    j = {"i": 0 * position, "j": position, "i - j": i - position}[table.by]
    return {"i": i, "j": j, "head": head, "batch": batch}, first


def counted_from_first(root, tables):
    """The expression with positions of tables as NumPy counts them."""
    first = {table.name: table.first(SEQLEN_K) for table in tables}
    done: dict[Node, Node] = {}
    for at in in_order([root]):
        args = [done[arg] for arg in at.args]
        if at.op == "load" and at.payload in first:
            args[-1] = node("sub", (args[-1], node("constant", (), first[at.payload], "int")), None, "int")
        done[at] = node(at.op, tuple(args), at.payload, at.type)
    return done[root]


def filled(tables, given):
    found = {}
    for table in tables:
        (values,) = evaluate([table.of], rows_of(table)[0], given, np.float64)
        found[table.name] = np.broadcast_to(values, table.size(*SHAPE)).astype(table.dtype)
    return found


@settings(max_examples=examples(150))
@given(st.one_of(hoistable_scores(), hoistable_scores(), scores()))
def test_values_and_derivatives_are_those_of_the_whole_score(score):
    given = expressions.arrays()
    whole, hoisted = programs(score, given)
    every = given | filled(hoisted.tables, given)
    own = [counted_from_first(x, hoisted.tables) for x in (hoisted.score, hoisted.by_s)]
    for one, other in zip((whole.score, whole.by_s), own, strict=True):
        expected, got = (evaluate([x], inputs(), a, np.float64)[0] for x, a in ((one, given), (other, every)))
        np.testing.assert_allclose(np.broadcast_to(got, SHAPE), np.broadcast_to(expected, SHAPE), 1e-9, 1e-9)
    for name in whole.loads:
        expected, got = gradient(whole, name, given), led_on(hoisted, name, every)
        np.testing.assert_allclose(got, expected, 1e-7, 1e-7 * max(1, np.abs(expected).max()))


def gradient(made, name, arrays, ds=1.0, at=None, loads=None):
    """That of the sum of scores, times `ds`: of what reads an array."""
    total, at = np.zeros(arrays[name].shape or 1), at or inputs()
    for load in made.loads[name] if loads is None else loads:
        indices = evaluate([counted_from_first(x, made.tables) for x in load.at.args], at, arrays, np.float64)
        if load.at.payload in {table.name for table in made.tables}:
            indices = evaluate(counted_from_first(load.at, made.tables).args, at, arrays, np.float64)
        (slope,) = evaluate([counted_from_first(load.derivative, made.tables)], at, arrays, np.float64)
        shape = np.broadcast_shapes(np.shape(ds), S.shape if at.get("s") is not None else slope.shape)
        positions = tuple(np.broadcast_to(x, shape) for x in clamped(indices or [np.array(0)], total.shape))
        with np.errstate(all="ignore"):
            np.add.at(total, positions, np.broadcast_to(np.where(ds == 0, 0, ds * slope), shape))
    return total.reshape(arrays[name].shape)


def led_on(hoisted, name, every):
    """The same, of an array that tables read, too."""
    total = gradient(hoisted, name, every)
    for table in hoisted.tables:
        if table.reads([name]):
            of_table, at = gradient(hoisted, table.name, every), rows_of(table)[0]
            total = total + gradient(hoisted, name, every, of_table, at, table.loads[name])
    return total


def t5(s, i, j, *, head, table):
    n = cuflash.abs(i - j)
    far = 8 + cuflash.floor(cuflash.log(cuflash.maximum(n, 1) / 8) / np.log(128 / 8) * 8)
    bucket = cuflash.where(n < 8, n, cuflash.minimum(far, 15)) + cuflash.where(j > i, 16, 0)
    return s + table[head, bucket]


def of_difference(kind="float64", of_head=False):
    return "i - j", of_head, False, kind


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (t5, [of_difference(of_head=True)]),
        (lambda s, i, j, *, head, of_head: s - of_head[head] * cuflash.abs(i - j), []),
        (lambda s, i, j, *, of_key: s + of_key[j, 0], []),
        (lambda s, i, j, *, pairs: s + cuflash.exp(pairs[i, j]), []),
        # What is the same for a head stays outside, so that heads share the table.
        (
            lambda s, i, j, *, head, of_head: s - (of_head[head] * cuflash.log(1.0 + cuflash.abs(i - j)) + of_head[0]),
            [of_difference()],
        ),
        (lambda s, i, j, *, batch, scalar: s * cuflash.exp(-scalar * i * batch), [("i", False, True, "float64")]),
        (lambda s, i, j, *, of_key: s * cuflash.tanh(of_key[j, 0]), [("j", False, False, "float64")]),
        # An index, and a condition, whose reads belong to pairs.
        (lambda s, i, j, *, table, doc: s + table[(i - j) // 7 % 3, doc[j]], [of_difference("int32")]),
        (lambda s, i, j, *, pairs: cuflash.where((2 * i - 2 * j) % 7 == 1, s, pairs[i, j]), [of_difference("bool")]),
        (
            lambda s, i, j: s + cuflash.sin(i + 3 < j) + cuflash.sin(cuflash.sin(i * 1.0)),
            [("i", False, False, "float64"), of_difference()],
        ),
        (lambda s, i, j: s + cuflash.sin(i + j), []),
        (lambda s, i, j: s + cuflash.sin(i * 2**61 < j * 2**61), []),  # which may have wrapped around
        (lambda s, i, j: cuflash.exp(s), []),
    ],
)
def test_what_is_hoisted(score, expected):
    given = {name: x for name, x in expressions.arrays().items() if name in score.__code__.co_varnames}
    _, made = programs(score, given)
    assert [(t.by, t.of_head, t.of_batch, t.dtype) for t in made.tables] == expected
    assert {index_class(table.load) for table in made.tables} <= READ_CLASSES.keys()
    _, kept = programs(score, given, of_batch=False)
    assert not any(table.of_batch for table in kept.tables)


def test_the_costliest_subexpressions_are_taken_where_there_are_many():
    def many(s, i, j):
        for n in range(12):
            s = s * cuflash.sin((i if n < 11 else i - j) + n + 0.5) if n else s
        return s * cuflash.sin(cuflash.cos(i - j + 0.25))

    _, made = programs(many, {})
    assert len(made.tables) == 3 and made.tables[0].by == "i - j"


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
def test_a_plan_names_tables_and_their_memory(arch):
    problem = of_functions(("t5", None), "bfloat16", 64, 1000)
    plan = choose_plan(problem, DeviceSpec.for_arch(arch))
    positions = plan.tables[0].shape[2]
    assert positions >= 2 * (1000 + MARGIN)
    assert plan.scratch_sizes["hoisted.0"] == 4 * 2 * positions
    assert plan.kernels[0].source == "helpers/hoisted.cu" and plan.kernels[0].grid == -(-2 * positions // 256)
    assert "hoisted.0[head, i - j] = table[head, " in plan.describe(verbose=True, width=0)
    assert f"hoisted.0: a table of {in_bytes(8 * positions)}, which a kernel fills" in plan.describe(
        verbose=True, width=0
    )


PREPROCESS, POSTPROCESS, OF_ARGS = "backward_preprocess", "backward_postprocess", "score_args_gradients"
BY_PAIRS = [OF_ARGS, "backward_scores", "backward_scores", OF_ARGS]


@pytest.mark.parametrize(
    ("score", "arch", "head_dim", "sources"),
    [
        ("t5", "9.0", 64, ["hoisted", PREPROCESS, OF_ARGS, "backward", "hoisted", OF_ARGS, POSTPROCESS]),
        # The kernels that sum over pairs index the arrays themselves.
        ("t5", "8.0", 64, ["hoisted", PREPROCESS, *BY_PAIRS, "backward", POSTPROCESS]),
        # Sums along diagonals do not fit, those of a head do.
        ("decay", "9.0", 256, [PREPROCESS, OF_ARGS, "backward", OF_ARGS, POSTPROCESS]),
    ],
)
def test_kernels_of_gradients_of_what_tables_read(score, arch, head_dim, sources):
    problem = of_functions((score, None), "bfloat16", head_dim)
    need = ("dq", "dk", "dv", *problem.score_arg_gradients)
    plan = choose_plan(problem, DeviceSpec.for_arch(arch), BACKWARD, need=need)
    assert [kernel.source.split("/")[1].removesuffix(".cu") for kernel in plan.kernels] == sources
    assert ("nothing is hoisted" in plan.reason) == (score == "decay")
    # The kernel of delta may make scores again, whatever is needed.
    alone = choose_plan(problem, DeviceSpec.for_arch(arch), BACKWARD, need=need[3:])
    assert [kernel.source for kernel in alone.kernels[:2]] == ["helpers/hoisted.cu", "helpers/backward_preprocess.cu"]


def test_scores_without_such_subexpressions_have_no_tables():
    for name in ("alibi", "capped", "without_s"):
        problem = of_functions((name, None), "bfloat16", 64)
        assert problem.hoisted == problem.program, SCORES[name]
