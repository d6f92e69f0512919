"""Docstrings against the code: parameters, results, errors, examples and pictures."""

import doctest
import inspect
import re
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash import distributed, flash_attention, functional, plan
from cuflash.arrays import array_info, dlpack
from cuflash.cpu.backend import CpuPlan
from cuflash.distributed import context, split, transports
from cuflash.gpu import compiler
from cuflash.shards import merge as merging
from cuflash.spec import array_imports
from cuflash.testing import reference

METHODS = ("forward", "backward", "plan", "compile")
RANKS = (
    distributed.ContextParallel,
    distributed.Split,
    distributed.zigzag,
    distributed.contiguous,
    distributed.threads,
)


CALLABLES = {
    "attention": cuflash.attention,
    "FlashAttention": cuflash.FlashAttention,
    "merge": cuflash.merge,
    "merge_backward": cuflash.merge_backward,
    "streamed": cuflash.streamed,
    **{f"FlashAttention.{name}": getattr(cuflash.FlashAttention, name) for name in METHODS},
}


def documented_parameters(function):
    """Names in the Parameters section of a numpydoc docstring, in order."""
    section = re.search(r"\nParameters\n-+\n(.*?)(?:\n\n?\w[\w ]*\n-+\n|\Z)", inspect.getdoc(function) or "", re.DOTALL)
    lines = section.group(1).splitlines() if section else []
    return [
        name
        for line in lines
        if (m := re.match(r"(?:\*\*)?(\w+(?:, \w+)*) :", line))
        for name in m.group(1).split(", ")
    ]


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", CALLABLES)
def test_every_parameter_is_documented_and_the_reverse(name):
    assert documented_parameters(CALLABLES[name]) == parameters(CALLABLES[name])


@pytest.mark.parametrize("name", CALLABLES)
def test_docstrings_say_what_is_returned_and_raised(name):
    doc = inspect.getdoc(CALLABLES[name]) or ""
    assert "\nRaises\n------\n" in doc
    assert ("\nReturns\n-------\n" in doc) == (name not in ("FlashAttention", "FlashAttention.compile"))


@pytest.mark.parametrize("function", RANKS, ids=lambda function: function.__name__)
def test_docstrings_of_ranks_have_every_parameter(function):
    assert documented_parameters(function) in (parameters(function), [])
    assert "\nRaises\n------\n" in (inspect.getdoc(function) or "")


def test_docstrings_elsewhere_name_no_parameter_that_does_not_exist():
    checked = 0
    for module in (compiler, dlpack, array_imports, array_info, plan.choose, reference, ct):
        for name, function in inspect.getmembers(module, callable):
            if function.__module__.startswith(module.__name__) and documented_parameters(function):
                assert set(documented_parameters(function)) <= set(parameters(function)), f"{module.__name__}.{name}"
                checked += 1
    assert checked >= 5


def test_static_options_are_keywords_and_arrays_come_first():
    for function in CALLABLES.values():
        kinds = [p.kind.name for name, p in inspect.signature(function).parameters.items() if name != "self"]
        arrays = kinds.count("POSITIONAL_OR_KEYWORD")
        expected = {"FlashAttention": 0, "backward": 6, "merge": 2, "merge_backward": 5, "streamed": 2}
        assert arrays == expected.get(function.__name__, 3)
        others = kinds[arrays:]
        assert kinds[:arrays] == ["POSITIONAL_OR_KEYWORD"] * arrays
        assert others == ["KEYWORD_ONLY"] * (len(others) - 1) + [others[-1]] and others[-1] in (
            "KEYWORD_ONLY",
            "VAR_KEYWORD",
        )


def test_examples_in_docstrings_run():
    for module in (cuflash, flash_attention, functional, merging, distributed, context, split, transports):
        assert doctest.testmod(module).failed == 0
    assert doctest.testmod(flash_attention).attempted + doctest.testmod(functional).attempted >= 5


def pictures():
    """The 0/1 pictures of the docstring of FlashAttention: (title of the column, rows)."""
    lines = (inspect.getdoc(cuflash.FlashAttention) or "").splitlines()
    found: dict[str, list[list[list[int]]]] = {}
    for at, line in enumerate(lines):
        for m in re.finditer(r'True:|"top_left":|window=\(\S+ \S+\), seqlen_q', line):
            start = m.start()
            rows: list[list[int]] = []
            for below in lines[at + 1 :]:
                (text, *_) = re.findall(r"^[01 ]*", below[start : start + 14])
                numbers = [int(x) for x in text.split()]
                if rows and not numbers:
                    break
                rows += [numbers] if numbers else []
            found.setdefault(m.group(), []).append(rows)
    return found


def test_pictures_of_masks_are_true():
    drawn = pictures()
    sizes = [(2, 5), (5, 2)]
    expected = [(causal, None, *size) for causal in ("True:", '"top_left":') for size in sizes]
    checked = 0
    for title, rows in [(t, p) for t, ps in drawn.items() for p in ps]:
        seqlen_q, seqlen_k = len(rows), len(rows[0])
        options: dict[str, Any] = {"causal": title == "True:" or "top_left"}
        if title.startswith("window"):
            ((left, right),) = re.findall(r"^window=\((\S+), (\S+)\)", title)
            options = {"window": tuple(None if x == "None" else int(x) for x in (left, right))}
        else:
            assert (title, None, seqlen_q, seqlen_k) in expected
        q, k = np.ones((seqlen_q, 1)), np.ones((seqlen_k, 1))
        plan = cuflash.FlashAttention(**options).plan(q, k, k)
        assert isinstance(plan, CpuPlan)
        for row, visible in enumerate(rows):
            first, stop = plan.problem.key_range(row)
            assert visible == [int(first <= j < stop) for j in range(seqlen_k)], (title, row)
        checked += 1
    assert checked == len(expected) + 2
