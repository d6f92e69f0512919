"""Gradients against differences: a check of any score, mask or option, of which nothing else has to be known."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from cuflash.arrays.checks import value_error
from cuflash.arrays.dlpack import module_of
from cuflash.spec.outputs import DEFAULT_NEED, INPUT_OF_GRADIENT
from cuflash.spec.scalars import array_of, is_scalar

STEP = 1e-5  # of each element, times a number of a normal distribution


class Change(NamedTuple):
    """How a sum of results changes with an array along one direction: by differences, and by its gradient."""

    by_differences: float
    by_gradient: float
    scale: float  # root of the sum of squares of what each element contributes


def check_gradients(
    attn: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    need: Collection[str] | None = None,
    seed: int = 0,
    rtol: float = 1e-6,
    **arrays: Any,
) -> dict[str, Change]:
    """Hold the gradients of `attn.backward` against differences of `attn.forward` along a random direction each.

    The sum is ``sum(dout * out) + sum(dlse * lse)`` with random dout and dlse, lse being that of rows that attend to a
    key. It changes by ``sum(gradient * direction)`` times a small step, and by what two calls of `forward` say.
    Elements at a kink, such as that of ``abs(x)`` at 0, break this.

    Parameters
    ----------
    attn : cuflash.FlashAttention
        The options, with `score` and `mask` if there are functions.
    q, k, v : array
        Of float64, of NumPy or CuPy: differences leave nothing of the digits of other dtypes.
    need : collection of str, optional
        The gradients to check; by default those of q, k and v, and of all arrays given that have one.
    seed : int, default 0
        Of dout, dlse and the directions.
    rtol : float, default 1e-6
        How far apart the two may be, relative to `Change.scale`.
    **arrays : array
        All others of `attn.forward`, and seed and offset of dropout under the names dropout_seed and dropout_offset.

    Returns
    -------
    dict of str to Change
        By the names of the gradients.

    Raises
    ------
    AssertionError
        Where the two differ by more; the message names all gradients that do.
    ValueError
        Inputs of another dtype, and gradients of options that are numbers.
    """
    if q.dtype != np.float64:
        raise value_error("q", f"dtype {q.dtype}", "float64, of which differences leave enough digits")
    random = {name: arrays.pop(f"dropout_{name}") for name in ("seed", "offset") if f"dropout_{name}" in arrays}
    for name in [name for name, x in arrays.items() if is_scalar(x)]:
        arrays[name] = module_of(q).asarray(array_of(name, arrays[name], "float64"))
    given = {"q": q, "k": k, "v": v, **arrays}
    if need is None:
        of_terms = [gradient for gradient, name in INPUT_OF_GRADIENT.items() if name in arrays]
        of_functions = [name for name in attn.options.score_gradients if arrays[name[1:]].dtype.kind == "f"]
        need = (*DEFAULT_NEED, *of_terms, *of_functions)
    for name in need:
        if name[1:] not in given:
            raise value_error("need", repr(name), "gradients of arrays of the call")
    numbers = np.random.default_rng(seed)

    def normal(x: Any) -> Any:
        return module_of(x).asarray(numbers.standard_normal(x.shape))

    def called(moved: dict[str, Any]) -> Any:
        return attn.forward(moved["q"], moved["k"], moved["v"], **{n: moved[n] for n in arrays}, **random)

    out, lse = called(given)
    dout, dlse = normal(out), normal(lse)
    sees_keys = lse > -math.inf

    def total(moved: dict[str, Any]) -> float:
        out, lse = called(moved)
        return float((dout * out).sum() + (dlse * lse)[sees_keys].sum())

    gradients = attn.backward(dout, q, k, v, out, lse, need=need, dlse=dlse, **arrays, **random)._asdict()
    found: dict[str, Change] = {}
    for name, gradient in gradients.items():
        direction, x = normal(gradient), given[name[1:]]
        after, before = (total(given | {name[1:]: _moved(x, sign * STEP * direction)}) for sign in (1, -1))
        terms = gradient * direction
        found[name] = Change((after - before) / (2 * STEP), float(terms.sum()), float((terms * terms).sum()) ** 0.5)
    wrong = [
        f"{name}: got {own.by_gradient:.9g} by the gradient, expected {own.by_differences:.9g} by differences "
        f"(scale {own.scale:.3g})"
        for name, own in found.items()
        if not abs(own.by_gradient - own.by_differences) <= rtol * own.scale
    ]
    if wrong:
        raise AssertionError("\n".join(wrong))
    return found


def _moved(x: Any, step: Any) -> Any:
    """The sum, as an array: of arrays without axes NumPy makes a number."""
    moved = x.copy()
    moved += step
    return moved
