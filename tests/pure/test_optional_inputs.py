"""The rows of the optional inputs, and that whatever has to spell the names out spells all of them."""

import inspect
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

import cuflash
import cuflash.testing as ct
from cuflash.cli.main import make_parser
from cuflash.cpu import core
from cuflash.plan import choose_plan
from cuflash.plan.architectures import FORWARD_FAMILIES
from cuflash.plan.argument import ARRAYS, ROW_REDUCTION_ARRAYS
from cuflash.plan.sm90.architecture import SM90
from cuflash.spec.inputs import (
    ACTING,
    BY_NAME,
    CAPS,
    FP8_SCALES,
    NAMES,
    NUMBERS,
    OPTIONAL_INPUTS,
    NamedGradients,
    OptionalArrays,
)
from cuflash.spec.outputs import (
    DEFAULT_NEED,
    FORWARD_ROWS,
    GRADIENT_ROWS,
    GRADIENTS,
    INPUT_OF_GRADIENT,
    OF_ROW_REDUCTIONS,
    OUTPUTS,
    REQUIRED_BY_BACKWARD,
    ROW_REDUCTIONS,
    TAKEN_BY_BACKWARD,
    OfGradients,
    OfThreeGradients,
    PassArrays,
)
from cuflash.spec.problem import Problem
from cuflash.spec.results import ForwardResult, Gradients
from tests.problems import H200, problem_of

if TYPE_CHECKING:
    from cuflash.plan.draft import Draft


def parameters(function):
    return set(inspect.signature(function).parameters)


def test_every_signature_has_every_term():
    assert set(OptionalArrays.__annotations__) == set(NAMES)
    assert set(NAMES) <= {field.name for field in fields(Problem)}
    for function in (cuflash.attention, cuflash.FlashAttention.forward, cuflash.FlashAttention.backward):
        assert set(NAMES) <= parameters(function)
    assert set(NAMES) - {"block_table"} <= {field.name for field in fields(ct.Case)}  # its cases have a page_size


def test_every_signature_has_every_gradient():
    assert tuple(NamedGradients.__annotations__) == GRADIENTS
    assert set(GRADIENTS) <= parameters(cuflash.FlashAttention.backward)
    assert set(OfThreeGradients.__annotations__) == {*NAMES, *DEFAULT_NEED, "dlse", *OF_ROW_REDUCTIONS}
    assert set(OfGradients.__annotations__) == {*NAMES, *GRADIENTS, "dlse", *OF_ROW_REDUCTIONS}
    of_rows = {"dlse", "dout", "out", "lse", *ROW_REDUCTIONS, *OF_ROW_REDUCTIONS}
    assert set(PassArrays.__annotations__) == {*NAMES, *GRADIENTS, *of_rows}


@pytest.mark.parametrize("row", (*FORWARD_ROWS, *GRADIENT_ROWS), ids=lambda row: row.name)
def test_a_result_is_what_its_row_says(row):
    bias, slopes = (1, 3, 5, 7), (3,)
    case = ct.Case(
        batch=2, num_heads=3, num_heads_kv=1, seqlen_q=5, seqlen_k=7, head_dim=4, head_dim_v=6, dtype="float16",
        layout="bshd", bias=bias, alibi_slopes=slopes, sinks=True, softcap=9.0,
    )  # fmt: skip
    arrays, problem = case.arrays(), case.problem
    attn = cuflash.FlashAttention(**case.keywords)
    found = attn.forward(*ct.qkv(arrays), want=ROW_REDUCTIONS, **ct.optional(arrays))
    out, lse, *_ = found
    need = () if row in FORWARD_ROWS else (row.name,)
    gradients = attn.backward(out, *ct.qkv(arrays), out, lse, **ct.optional(arrays), need=need)
    got = {**found._asdict(), **gradients._asdict()}[row.name]
    if row.dtype == "like":
        assert (got.shape, got.dtype) == (arrays[row.gradient_of].shape, arrays[row.gradient_of].dtype)
    else:
        dtype = {"input": problem.dtype, "softmax": problem.softmax_dtype}[row.dtype]
        assert (got.shape, got.dtype.name) == (problem.shape_of(row), dtype)
    assert dict((*ARRAYS, *ROW_REDUCTION_ARRAYS))[row.name] == row.strides


def test_signatures_follow_the_rows():
    assert ForwardResult._fields == OUTPUTS and Gradients._fields == DEFAULT_NEED
    assert set(OUTPUTS) <= parameters(cuflash.FlashAttention.forward)
    taken = inspect.signature(cuflash.FlashAttention.backward).parameters
    assert {name for name, x in taken.items() if x.default is x.empty} >= {"q", "k", "v", *REQUIRED_BY_BACKWARD}
    assert set(TAKEN_BY_BACKWARD) <= set(taken)


def test_the_command_line_names_every_term_but_those_of_other_shapes():
    given = vars(make_parser().parse_args(["plan"]))
    assert set(NAMES) - given.keys() == {"block_table", "cu_seqlens_q", "cu_seqlens_k", *FP8_SCALES}


def test_terms_act_one_after_another():
    assert [BY_NAME[name].acts for name in ACTING] == list(range(1, len(ACTING) + 1))


@pytest.mark.parametrize("row", OPTIONAL_INPUTS, ids=lambda row: row.name)
def test_a_row_agrees_with_itself(row):
    assert (row.gradient in GRADIENTS) == bool(row.gradient_via)
    assert INPUT_OF_GRADIENT.get(row.gradient, "") == (row.name if row.gradient_via else "")
    assert not (row.has_keys and row.goes_packed), "no array over all keys is one over those of a sequence"
    assert not row.define or row.acts, "kernels are specialised on inputs that act"
    assert not row.broadcasts or len(row.shapes) == 1
    assert {len(shape) - ("batch" in shape) for shape in row.shapes} <= {row.own_axes}
    assert not row.lacks_batch or row.may_lack_batch


def test_numbers_have_gradients():
    assert {f"d{name}" for name in NUMBERS} <= set(GRADIENTS)


def test_what_makes_no_other_result_says_so():
    """A result that a call returns only if it is asked to: families that do not know it leave it out."""
    for family in FORWARD_FAMILIES:
        problem = SimpleNamespace(has_float8=family.has_float8)
        asked = SimpleNamespace(need=(*OUTPUTS, "other"), problem=problem)
        assert family.why_not_served(cast("Draft", asked)) == "it makes no other"


def test_kernels_that_do_not_know_an_option_are_not_taken(monkeypatch):
    """A new option that acts on scores is served by the kernels of every device alone, until others know it."""
    assert SM90.known is not None and {*CAPS, *ACTING} == {*SM90.known} == {*core.KNOWN}
    problem = replace(problem_of(), softcap=3.0)
    assert choose_plan(problem, H200).kernels[0].source == "sm90/forward.cu"
    for family in SM90.forward:
        monkeypatch.setattr(family, "known", ("bias",))
    plan = choose_plan(problem, H200)
    monkeypatch.setattr(core, "KNOWN", ("bias",))
    assert core.why_not() is not None or core.why_not(problem) == "it knows no softcap"
    of_rows = replace(problem_of(), row_reductions=("max", "other"))
    assert core.why_not() is not None or core.why_not(of_rows) == "it knows no other"
    assert plan.kernels[0].source == "sm80/forward.cu" and "not sm90/forward: it knows no softcap" in plan.reason
