"""The tables of arguments in docs/options.md, made from docstrings and the rows of `cuflash.spec`.

    python -m tests.options_table

writes it; tests/pure/test_options_table.py holds the page against it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuflash
import cuflash.testing as ct
from cuflash.spec.inputs import FP8_SCALES, NUMBERS, OPTIONAL_INPUTS, OptionalInput
from cuflash.spec.outputs import MOVABLE, OF_ROW_REDUCTIONS, OUTPUTS, TAKEN_BY_BACKWARD
from cuflash.spec.passes import FORWARD, PASSES, Pass
from cuflash.spec.problem import Problem
from tests.pairs import OPTIONS, SIZES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
BEGIN, END = "<!-- options:begin (python -m tests.options_table) -->", "<!-- options:end -->"
# What an option is, and where it is defined.
MEANINGS = {
    "causal": ("hides later keys", "semantics.md#diagonals-causal-masks-and-windows"),
    "scale": ("factor of q k^T", ""),
    "window": ("(left, right): keys around the diagonal", ""),
    "softcap": ("scores s become `softcap * tanh(s / softcap)`", ""),
    "layout": ("order of axes", "semantics.md#shapes-and-results"),
    "deterministic": ("gradients are bitwise equal run after run", ""),
    "batch_invariant": ("a sequence has the same bits in any batch", "semantics.md#equal-bits"),
    "precision": ("of float32 products on the GPU", ""),
    "dropout": ("probability that an attention weight is dropped", "semantics.md#dropout"),
    "block_size": ("queries and keys of a block of `block_mask`", ""),
    "score": ("score_mod", "score.md"),
    "mask function": ("mask_mod", "score.md"),
    "bias": ("is added to scores", ""),
    "mask": ("True is visible", "semantics.md#per-pair-masks"),
    "kv_lengths": ("number of keys of each batch entry", "semantics.md#kv-lengths"),
    "alibi_slopes": ("ALiBi's slopes", ""),
    "sinks": ("a score of each head without a value", "semantics.md#sinks"),
    "block_mask": ("True is visible", "semantics.md#block-masks"),
    "block_table": ("k and v are pools of pages", "semantics.md#paged-kv-caches"),
    "cu_seqlens_q": ("starts of packed sequences", "semantics.md#packed-sequences-varlen"),
    "cu_seqlens_k": ("the same for keys", ""),
    "q_scale": ("scales of fp8 q", "semantics.md#fp8-keys-and-values"),
    "k_scale": ("scales of fp8 k", ""),
    "v_scale": ("scales of fp8 v", ""),
    "dlse": ("gradient with respect to lse", ""),
    "want": ("row reductions besides out and lse", "semantics.md#maximum-and-entropy-of-rows"),
    "dmax": ("gradient with respect to max", ""),
    "entropy": ("what `forward` returned, for `dentropy`", ""),
    "dentropy": ("gradient with respect to entropy", ""),
    "need": ("names of the gradients that are wanted", "semantics.md#gradients"),
    "seed": ("of dropout", ""),
    "offset": ("of dropout, for calls with the same seed", ""),
}
# Shapes that follow from more than the sizes of a problem.
SHAPES = {
    "block_mask": "(batch, num_heads, blocks of queries, blocks of keys)",
    "block_table": "(batch, max_pages)",
    "cu_seqlens_q": "(sequences + 1,)",
    "cu_seqlens_k": "(sequences + 1,)",
    "q_scale": "(batch, num_heads, blocks of queries)",
    "k_scale": "(batch, num_heads_kv, blocks of keys)",
    "v_scale": "(batch, num_heads_kv, blocks of keys)",
}
# Inputs that broadcast to their shape, and those of which only the batch axes do.
BROADCAST = (*(row.name for row in OPTIONAL_INPUTS if row.broadcasts), "block_mask", *FP8_SCALES)
DTYPES = {"input": "dtype of q", "softmax": "dtype of lse"}


def types_of(function: Callable[..., Any]) -> dict[str, str]:
    """The types of parameters, as the docstring of a function has them."""
    doc = inspect.getdoc(function) or ""
    (section,) = re.findall(r"\nParameters\n-+\n(.*?)\n\n\w+\n-+\n", doc, re.DOTALL)
    heads = re.findall(r"^([\w, ]+) : (.+)$", section, re.MULTILINE)
    return {name: type_ for names, type_ in heads for name in names.split(", ")}


def passes_with(name: str) -> tuple[Pass, ...]:
    """The passes that have an option: those that do not refuse a problem with it."""
    if name == "want":
        return (FORWARD,)
    if name == "need":
        return tuple(pass_ for pass_ in PASSES if pass_.gives_gradients)
    if name == "deterministic":
        return tuple(pass_ for pass_ in PASSES if pass_.adds_to_memory)
    if name in TAKEN_BY_BACKWARD and name not in OUTPUTS:
        return tuple(pass_ for pass_ in PASSES if name in pass_.takes)
    values = next((option.values[0] for option in OPTIONS if option.name == name), {})
    values = {"kv_dtype": "float8_e4m3fn", "q_float8": True} if name == "q_scale" else values
    of_case = {key: x for key, x in values.items() if key not in ("deterministic", "precision")}
    problem = ct.Case(**SIZES | {"dtype": "bfloat16"} | of_case).problem
    return tuple(pass_ for pass_ in PASSES if serves(pass_, problem))


def serves(pass_: Pass, problem: Problem) -> bool:
    """Whether a pass takes a problem."""
    try:
        pass_.check(problem)
    except NotImplementedError:
        return False
    return True


def shape_and_dtype(row: OptionalInput) -> str:
    """Of an optional input."""
    shapes = [f"({', '.join(shape)}{',' if len(shape) == 1 else ''})" for shape in row.shapes] or [SHAPES[row.name]]
    dtypes = " or ".join(DTYPES.get(dtype, dtype) for dtype in row.dtypes)
    return (
        f"{' or '.join(shapes)}{', broadcast' if row.name in BROADCAST else ''}; {dtypes}{row.hint.partition(' (')[0]}"
    )


Line = tuple[str, str, str, str, str]


def line(name: str, values: str, derivatives: str = "-", key: str = "") -> Line:
    """A row of a table."""
    passes, (meaning, link) = passes_with(name), MEANINGS[key or name]
    named = "all" if passes == PASSES else ", ".join(f"`{pass_}`" for pass_ in passes)
    return f"[`{name}`]({link})" if link else f"`{name}`", meaning, values, derivatives, named


def of_constructor() -> Iterator[Line]:
    """The arguments of `cuflash.FlashAttention`."""
    for name, values in types_of(cuflash.FlashAttention).items():
        derivatives = (
            f"`d{name}`, `t{name}`" if name in NUMBERS else "of arrays that it reads" if name == "score" else "-"
        )
        yield line(name, values, derivatives, "mask function" if name == "mask" else name)


def of_calls() -> Iterator[Line]:
    """The arguments of its passes, besides inputs, results and tangents."""
    for row in OPTIONAL_INPUTS:
        derivatives = f"`{row.gradient}`, `t{row.name}`" if row.name in MOVABLE else "-"
        yield line(row.name, shape_and_dtype(row), derivatives)
    yield line("dlse", "shape and dtype of lse", "-, `tdlse`")
    yield line("want", types_of(cuflash.FlashAttention.forward)["want"])
    for name in OF_ROW_REDUCTIONS:
        yield line(name, "shape and dtype of lse")
    types = types_of(cuflash.FlashAttention.backward)
    for name in ("need", "seed", "offset"):
        yield line(name, types[name])


def tables() -> str:
    """Both tables in Markdown."""
    found = []
    for of, values, lines in (
        ("the constructor", "values", of_constructor),
        ("calls", "shape and dtype, or values", of_calls),
    ):
        header = (f"option of {of}", "what it is", values, "gradient, tangent", "passes")
        rows = [header, ("---",) * len(header), *lines()]
        found.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(found)


def in_page(text: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(in_page(PAGE.read_text()))
