"""Everything public has a docstring with the sections that a reader of the API reference looks for."""

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from tests.many_cases import each
from tests.pure.test_docstrings import documented_parameters, parameters

PROPERTY = (property, functools.cached_property)
DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "api.rst").read_text()
TEMPLATE = (DOCS / "_templates" / "autosummary" / "class.rst").read_text()
SECTIONS = ("Parameters", "Attributes", "Returns", "Raises", "See Also", "Notes", "References", "Examples")
# What is from a paper says from which one.
PUBLISHED = (
    "cuflash.FlashAttention", "cuflash.FlashAttention.backward", "cuflash.FlashAttention.backward_jvp",
    "cuflash.FlashAttention.jvp", "cuflash.attention", "cuflash.block_masks.global_blocks", "cuflash.block_masks.local",
    "cuflash.block_masks.random", "cuflash.block_masks.strided", "cuflash.distributed.ContextParallel",
    "cuflash.distributed.ContextParallel.decode", "cuflash.distributed.zigzag", "cuflash.double_backward",
    "cuflash.dropout_mask", "cuflash.hessian_vector_product", "cuflash.merge", "cuflash.quantize", "cuflash.rotate",
    "cuflash.streamed", "cuflash.testing.reference.forward", "cuflash.testing.reference.backward",
)  # fmt: skip


# What no caller makes, and what fails in no way that a caller could act on.
RESULTS = ("Measurement", "Report", "Schedule", "Yardstick")
NEVER_RAISE = (
    "Case.from_problem", "Schedule.describe", "Transport.fail", "Mpi.fail", "Yardstick.looser", "gradients_of",
    "measure", "optional", "optional_backward", "over_axes", "reference.backward", "reference.forward",
    "self_test_cases", "through_dlpack", "yardsticks",
)  # fmt: skip


def listed():
    """The names in docs/api.rst, with their modules."""
    module = ""
    for line in REFERENCE.splitlines():
        if found := re.match(r"\.\. currentmodule:: (\S+)$", line):
            module = found[1]
        elif found := re.match(r"   ([A-Za-z_][\w.]*)$", line):
            yield module, found[1]


# Members of classes that pages leave out: they are for other modules.
HIDDEN = dict(re.findall(r'objname == "(\w+)" %}\s+:exclude-members: (.*)', TEMPLATE))
LISTED = tuple(f"{module}.{name}" for module, name in listed())
MODULES = sorted({module for module, _ in listed()}, key=len, reverse=True)


def public(name):
    """What a name of the reference stands for; the test is skipped where its library is not installed."""
    module = next(module for module in MODULES if name.startswith(f"{module}."))
    if module in ("cuflash.torch", "cuflash.jax"):
        pytest.importorskip(module.removeprefix("cuflash."))
    found = importlib.import_module(module)
    for part in name.removeprefix(f"{module}.").split("."):
        found = getattr(found, part)
    return found


def members(name):
    """The methods and properties of a class that its page shows."""
    cls = public(name) if not name.startswith(("cuflash.torch", "cuflash.jax")) else None
    if not inspect.isclass(cls) or hasattr(cls, "_fields"):
        return
    hidden = HIDDEN.get(name.rpartition(".")[2], "").split(", ")
    for attribute, value in inspect.getmembers(cls):
        is_shown = not attribute.startswith("_") and not hasattr(tuple, attribute) and attribute not in hidden
        if is_shown and (inspect.isroutine(value) or isinstance(value, PROPERTY)):
            yield f"{name}.{attribute}"


MEMBERS = tuple(member for name in LISTED for member in members(name))
CALLABLES = (*LISTED, *(name for name in MEMBERS if not isinstance(public(name), PROPERTY)))
PROPERTIES = tuple(name for name in MEMBERS if isinstance(public(name), PROPERTY))


def sections(doc):
    """The sections of a numpydoc docstring by title, in order, the summary under "Summary"."""
    titles = r"^(\w[\w ]*)\n-{3,}$"
    summary, *parts = re.split(titles, doc, flags=re.MULTILINE)
    return {"Summary": summary.strip()} | dict(zip(parts[::2], parts[1::2], strict=True))


def entries(section):
    """(head, description) of each entry of a section."""
    heads = re.split(r"^(?=\S)", section.strip("\n"), flags=re.MULTILINE)
    for entry in filter(None, heads):
        head, _, body = entry.partition("\n")
        yield head, body.strip()


def raw(name):
    return inspect.getdoc(public(name)) or ""


@each((*LISTED, *MEMBERS))
def test_the_summary_is_one_sentence_on_one_line(name):
    first, *others = raw(name).split("\n")
    assert first.endswith((".", ".'")) and not any(others[:1]), first


@each(CALLABLES)
def test_sections_are_known_and_in_order(name):
    titles = [title for title in sections(raw(name)) if title != "Summary"]
    assert titles == sorted(titles, key=SECTIONS.index)


@each(CALLABLES)
def test_parameters_have_types_and_descriptions(name):
    what = public(name)
    if hasattr(what, "_fields") or name.endswith(RESULTS) or inspect.isabstract(what):
        return
    found = sections(raw(name)).get("Parameters", "")
    own = [parameter for parameter in parameters(what) if parameter != "cls"]
    documented = set(documented_parameters(what))
    # What ** takes may be documented by its names, too.
    assert documented >= set(own) and (_variadic(what) or documented <= set(own))
    for head, body in entries(found):
        assert re.match(r"[*\w, ]+ : \S|[*\w, ]+ :$" if "," in head or "*" in head else r"\w+ : \S", head) and body


def _variadic(function):
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name for name, x in inspect.signature(function).parameters.items() if x.kind in kinds}


@each(CALLABLES)
def test_fields_of_named_tuples_have_shapes_and_dtypes(name):
    what = public(name)
    if hasattr(what, "_fields"):
        described = dict(entries(sections(raw(name))["Attributes"]))
        assert [x for head in described for x in head.partition(" : ")[0].split(", ")] == list(what._fields)
        assert all(described.values())


@each(CALLABLES)
def test_what_is_returned_is_documented(name):
    what = public(name)
    if inspect.isclass(what):
        return
    returns = inspect.signature(what).return_annotation
    has_section = any(title in sections(raw(name)) for title in ("Returns", "Yields"))
    assert has_section == (returns not in (None, "None"))


@each(CALLABLES)
def test_errors_are_documented(name):
    is_result = hasattr(public(name), "_fields") or name.endswith(RESULTS)
    if name.endswith(NEVER_RAISE) or is_result or inspect.isabstract(public(name)):
        assert "Raises" not in sections(raw(name))
        return
    assert all(body for _, body in entries(sections(raw(name))["Raises"]))


@each(CALLABLES)
def test_related_names_are_in_the_reference(name):
    """Under the names that Sphinx makes links of: whole, or within the module or class of the page."""
    module = next(module for module in MODULES if name.startswith(f"{module}."))
    owner = name.rpartition(".")[0]
    related = [x for head, _ in entries(sections(raw(name))["See Also"]) for x in head.partition(" : ")[0].split(", ")]
    assert related
    for other in related:
        assert {other, f"{module}.{other}", f"{owner}.{other}"} & {*LISTED, *MEMBERS}, other
        assert f"{module}.{other}" != name, other


@each(PUBLISHED)
def test_what_is_published_names_its_source(name):
    assert re.search(r"\(\d{4}\)", sections(raw(name))["References"])


X = np.ones((2, 8, 16))
ANY: Any = cuflash  # of arguments that type checkers refuse
SPLIT = cd.zigzag(10, 2)
SIZES: dict[str, Any] = {"seqlen_q": 3, "seqlen_k": 3, "head_dim": 4}
WRONG = (
    ("cuflash.FlashAttention", lambda: cuflash.FlashAttention(softcap=-1)),
    ("cuflash.FlashAttention.forward", lambda: cuflash.FlashAttention().forward(X, X, X[0, 0])),
    ("cuflash.Score", lambda: ANY.Score(cuda=3)),
    ("cuflash.Score", lambda: cuflash.Score(cuda="x")),
    ("cuflash.block_masks.local", lambda: cuflash.block_masks.local(2, 2, -1)),
    ("cuflash.cpu_threads", lambda: cuflash.cpu_threads(0).__enter__()),
    ("cuflash.dequantize", lambda: cuflash.dequantize(X)),
    ("cuflash.dequantize", lambda: cuflash.dequantize(cuflash.quantize(X).array, np.ones((5, 7), np.float32))),
    ("cuflash.distributed.Mpi", lambda: cd.Mpi(3)),
    ("cuflash.distributed.Split", lambda: cd.Split([[(0, 3)], [(2, 5)]])),
    ("cuflash.distributed.Split.local", lambda: SPLIT.local(0, (2, 9))),
    ("cuflash.distributed.Split.part", lambda: SPLIT.part(X, 0)),
    ("cuflash.distributed.Split.rows", lambda: SPLIT.rows(5)),
    ("cuflash.distributed.Split.whole", lambda: SPLIT.whole([X])),
    ("cuflash.distributed.zigzag", lambda: cd.zigzag(-1, 2)),
    ("cuflash.dropout_mask", lambda: ANY.dropout_mask("a", 0, 1, 1, 2, 8, 0.5)),
    ("cuflash.exp", lambda: cuflash.exp("a")),
    ("cuflash.floor", lambda: cuflash.floor("a")),
    ("cuflash.fp8", lambda: cuflash.fp8(X, "e4m3")),
    ("cuflash.fp8", lambda: cuflash.fp8(X.view(np.uint8), "x")),
    ("cuflash.merge", lambda: cuflash.merge([X], [X])),
    ("cuflash.minimum", lambda: cuflash.FlashAttention(score=lambda s, i, j: cuflash.minimum(s, "a"))),
    ("cuflash.quantize", lambda: ANY.quantize(X, block=2.5)),
    ("cuflash.quantize", lambda: ANY.quantize(X, per="x")),
    ("cuflash.rotate", lambda: cuflash.rotate(np.ones(()))),
    ("cuflash.streamed", lambda: cuflash.streamed(X, X, chunk=0)),
    ("cuflash.testing.Case", lambda: ct.Case(**SIZES, bias=(7, 7)).problem),
    ("cuflash.testing.assert_backward", lambda: ct.assert_backward(ct.Case(**SIZES), foo=1)),
    ("cuflash.testing.gather_pages", lambda: ct.gather_pages({})),
    ("cuflash.testing.lay_out", lambda: ct.lay_out(X, "x", np.asarray)),
    ("cuflash.testing.numpy_dtype", lambda: ct.numpy_dtype("float7")),
    ("cuflash.testing.qkv", lambda: ct.qkv({})),
    ("cuflash.testing.to_numpy", lambda: ct.to_numpy("a")),
)


@pytest.mark.parametrize(("name", "call"), WRONG)
def test_errors_are_those_that_are_documented(name, call):
    documented = {error for head, _ in entries(sections(raw(name))["Raises"]) for error in head.split(", ")}
    with pytest.raises(Exception) as caught:
        call()
    assert documented & {cls.__name__ for cls in type(caught.value).__mro__}


FAILING = (
    ("Two\nlines.", test_the_summary_is_one_sentence_on_one_line),
    ("One.\n\nRaises\n------\nOSError\n    A.\n\nReturns\n-------\nint\n    B.", test_sections_are_known_and_in_order),
    ("One.\n\nParameters\n----------\nx : int\n", test_parameters_have_types_and_descriptions),
    ("One.\n\nParameters\n----------\nx :\n    It.\n", test_parameters_have_types_and_descriptions),
    ("One.\n\nParameters\n----------\ny : int\n    It.\n", test_parameters_have_types_and_descriptions),
    ("One.\n\nParameters\n----------\nx : int\n    It.", test_what_is_returned_is_documented),
    ("One.\n\nRaises\n------\nTypeError\n", test_errors_are_documented),
    ("One.\n\nSee Also\n--------\nmerge_forward : Nothing.\n", test_related_names_are_in_the_reference),
    ("One.\n\nReferences\n----------\nNobody: Nothing.\n", test_what_is_published_names_its_source),
)


@pytest.mark.parametrize(("doc", "check"), FAILING)
def test_the_checks_can_fail(doc, check, monkeypatch):
    def merge(x: int) -> int:
        return x

    merge.__doc__ = doc
    monkeypatch.setattr("cuflash.merge", merge)
    with pytest.raises((AssertionError, KeyError)):
        check.of_one("cuflash.merge")
