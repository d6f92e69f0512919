"""The rows of the terms, and that whatever has to spell the names out spells all of them."""

import inspect
from dataclasses import fields

import pytest

import cuflash
import cuflash.testing as ct
from cuflash.cli.main import make_parser
from cuflash.spec.inputs import (
    ACTING,
    BY_NAME,
    DEFAULT_NEED,
    FP8_SCALES,
    GRADIENTS,
    INPUT_OF_GRADIENT,
    NAMES,
    NUMBERS,
    TERMS,
    NamedGradients,
    OfGradients,
    OfThreeGradients,
    PassArrays,
    Terms,
)
from cuflash.spec.problem import Problem


def parameters(function):
    return set(inspect.signature(function).parameters)


def test_every_signature_has_every_term():
    assert set(Terms.__annotations__) == set(NAMES)
    assert set(NAMES) <= {field.name for field in fields(Problem)}
    for function in (cuflash.attention, cuflash.FlashAttention.forward, cuflash.FlashAttention.backward):
        assert set(NAMES) <= parameters(function)
    assert set(NAMES) - {"block_table"} <= {field.name for field in fields(ct.Case)}  # its cases have a page_size


def test_every_signature_has_every_gradient():
    assert tuple(NamedGradients.__annotations__) == GRADIENTS
    assert set(GRADIENTS) <= parameters(cuflash.FlashAttention.backward)
    assert set(OfThreeGradients.__annotations__) == {*NAMES, *DEFAULT_NEED, "dlse"}
    assert set(OfGradients.__annotations__) == {*NAMES, *GRADIENTS, "dlse"}
    assert set(PassArrays.__annotations__) == {*NAMES, *GRADIENTS, "dlse", "dout", "out", "lse"}


def test_the_command_line_names_every_term_but_those_of_other_shapes():
    given = vars(make_parser().parse_args(["plan"]))
    assert set(NAMES) - given.keys() == {"block_table", "cu_seqlens_q", "cu_seqlens_k", *FP8_SCALES}


def test_terms_act_one_after_another():
    assert [BY_NAME[name].acts for name in ACTING] == list(range(1, len(ACTING) + 1))


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_row_agrees_with_itself(term):
    assert (term.gradient in GRADIENTS) == bool(term.part_of)
    assert INPUT_OF_GRADIENT.get(term.gradient, "") == (term.name if term.part_of else "")
    assert not (term.has_keys and term.goes_packed), "no array over all keys is one over those of a sequence"
    assert not term.define or term.acts, "kernels are told of what they do"
    assert not term.broadcasts or len(term.shapes) == 1
    assert {len(shape) - ("batch" in shape) for shape in term.shapes} <= {term.own_axes}
    assert not term.lacks_batch or term.may_lack_batch


def test_numbers_have_gradients():
    assert {f"d{name}" for name in NUMBERS} <= set(GRADIENTS)
