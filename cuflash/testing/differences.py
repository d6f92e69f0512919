"""Gradients against differences: a check of any score, mask or option, of which nothing else has to be known."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuflash.arrays.checks import type_error, value_error
from cuflash.arrays.dlpack import module_of
from cuflash.spec.keywords import DIFFERENCES_OF
from cuflash.spec.outputs import DEFAULT_NEED, INPUT_OF_GRADIENT, model_of
from cuflash.spec.scalars import array_of, is_scalar

_DERIVATIVE_BY = {"tout": "dout", "tlse": "dlse"}  # tangents of results are derivatives by what `backward` takes
ROUNDING = 16  # units in the last place of the sum of absolute values by which a sum may be off
STEP = 1e-5  # by which each element moves, times a number of a normal distribution


class Change(NamedTuple):
    """How a sum of results changes with an array along one direction: by differences, and by its gradient.

    Attributes
    ----------
    by_differences, by_gradient : float
        The change that two calls give, and the one that the gradient predicts.
    scale : float
        Root of the sum of squares of what each element contributes.

    See Also
    --------
    check_gradients
    """

    by_differences: float
    by_gradient: float
    scale: float


def check_gradients(
    attn: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    need: Collection[str] | None = None,
    order: int = 1,
    seed: int = 0,
    rtol: float = 1e-6,
    **arrays: Any,
) -> dict[str, Change]:
    """Hold the gradients of `attn.backward` against differences of `attn.forward` along a random direction each.

    The sum is ``sum(dout * out) + sum(dlse * lse)`` with random dout and dlse, lse being that of rows that attend to a
    key. It changes by ``sum(gradient * direction)`` times a small step, and by what two calls of `forward` say.
    Elements at a kink, such as that of ``abs(x)`` at 0, break this.

    With ``order=2`` the double backward pass is held against differences of `attn.backward`: the sum is that of all
    gradients times random arrays, and its gradients are tout, tlse and the tangents of gradients that `attn.jvp` and
    `attn.backward_jvp` give, as `cuflash.double_backward` says.

    Parameters
    ----------
    attn : cuflash.FlashAttention
        The options, with `score` and `mask` if there are functions.
    q, k, v : array
        Of float64, of NumPy or CuPy: differences leave nothing of the digits of other dtypes. With None for v the sum
        is that of lse alone.
    need : collection of str, optional
        The gradients to check; by default those of q, k and v, and of all arrays given that have one.
    order : {1, 2}, default 1
        Whether to check gradients, or gradients of gradients.
    seed : int, default 0
        Of dout, dlse and the directions.
    rtol : float, default 1e-6
        How far apart the two may be, relative to `Change.scale`.
    **arrays : array
        All others of `attn.forward`, and seed and offset of dropout under the names dropout_seed and dropout_offset.

    Returns
    -------
    dict of str to Change
        By the names of the gradients; of the second order "tdq" and so on, and "tout" and "tlse" for dout and dlse.

    Raises
    ------
    AssertionError
        Where the two differ by more; the message names all gradients that do.
    TypeError
        No dropout_seed or dropout_offset for dropout; and as `attn.forward` does.
    ValueError
        Inputs of another dtype, gradients of options that are numbers, and another order.
    NotImplementedError
        The third order.

    See Also
    --------
    check : Holds results against the oracle.
    cuflash.double_backward : What ``order=2`` checks.
    """
    _require_what_can_be_checked(q, order)
    random = _random_of(attn, arrays)
    for name in [name for name, x in arrays.items() if is_scalar(x)]:
        arrays[name] = module_of(q).asarray(array_of(name, arrays[name], "float64"))
    inputs = {"q": q, "k": k, "v": v, **arrays}
    passes = _Passes(attn, tuple(inputs), _need_of(attn, inputs, need), random)
    numbers = np.random.default_rng(seed)

    def normal(x: Any) -> Any:
        return None if x is None else module_of(x).asarray(numbers.standard_normal(x.shape))

    out, lse = passes.forward(inputs)
    attends = lse > -math.inf
    point = inputs | {"dout": normal(out), "dlse": normal(lse)}

    def terms_of_results(point: dict[str, Any]) -> list[Any]:
        out, lse = passes.forward(point)
        return [*([] if out is None else [point["dout"] * out]), (point["dlse"] * lse)[attends]]

    def terms_of_gradients(point: dict[str, Any]) -> list[Any]:
        return [weights[name] * x for name, x in passes.backward(point).items() if x is not None]

    if order == 1:
        terms, gradients = terms_of_results, passes.backward(point)
    else:
        weights = {name: normal(inputs[name[1:]]) for name in passes.need}
        terms, gradients = terms_of_gradients, passes.double_backward(point, weights)
    changes = {
        name: _change_along(normal(gradient), name, gradient, point, terms)
        for name, gradient in gradients.items()
        if gradient is not None  # of v or out, which are None
    }
    size = sum(float(abs(x).sum()) for x in terms(point))
    unresolved = ROUNDING * float(np.finfo(np.float64).eps) * size / STEP
    _require_agreement(changes, rtol, unresolved)
    return changes


@dataclass(frozen=True)
class _Passes:
    """The passes of a function at points: a point is the inputs by name, with dout and dlse."""

    attn: Any
    inputs: tuple[str, ...]
    need: tuple[str, ...]
    random: dict[str, Any]

    def forward(self, point: dict[str, Any]) -> Any:
        return self.attn.forward(**self._inputs_at(point), **self.random)

    def backward(self, point: dict[str, Any]) -> dict[str, Any]:
        """The gradients of the sum of dout * out and dlse * lse."""
        out, lse = self.forward(point)
        upstream = {name: x for name, x in point.items() if name in ("dout", "dlse")}
        arrays = {**self._inputs_at(point), **upstream, "out": out, "lse": lse}
        gradients: dict[str, Any] = self.attn.backward(**arrays, need=self.need, **self.random)._asdict()
        return gradients

    def double_backward(self, point: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
        """The gradients of the sum of all gradients times their weights: by dout, dlse and the inputs in `need`."""
        tangents = {f"t{name[1:]}": x for name, x in weights.items()}
        results = self.attn.jvp(**self._inputs_at(point), **tangents, **self.random)._asdict()
        need = tuple(f"t{name}" for name in self.need)
        gradients = self.attn.backward_jvp(**point, **results, **tangents, **self.random, need=need)._asdict()
        return {name: results[name] for name in _DERIVATIVE_BY} | gradients

    def _inputs_at(self, point: dict[str, Any]) -> dict[str, Any]:
        return {name: point[name] for name in self.inputs}


def _require_what_can_be_checked(q: Any, order: int) -> None:
    if order == 3:
        remedy = DIFFERENCES_OF.format("second derivatives")
        raise NotImplementedError(f"order: got 3, expected 1 or 2: there are no third derivatives; {remedy}")
    if order not in (1, 2):
        raise value_error("order", repr(order), "1 or 2")
    if q.dtype != np.float64:
        raise value_error("q", f"dtype {q.dtype}", "float64, of which differences leave enough digits")


def _need_of(attn: Any, inputs: dict[str, Any], need: Collection[str] | None) -> tuple[str, ...]:
    """The gradients to check: those given, or those of all inputs that have one."""
    if need is None:
        of_terms = [gradient for gradient, name in INPUT_OF_GRADIENT.items() if name in inputs]
        of_functions = [name for name in attn.options.score_gradients if inputs[name[1:]].dtype.kind == "f"]
        return (*DEFAULT_NEED, *of_terms, *of_functions)
    for name in need:
        if name[1:] not in inputs:
            raise value_error("need", repr(name), "gradients of arrays of the call")
    return tuple(need)


def _change_along(
    direction: Any, name: str, gradient: Any, point: dict[str, Any], terms: Callable[[dict[str, Any]], list[Any]]
) -> Change:
    """How the sum of the terms changes where what has this gradient moves along a direction."""
    moved = _DERIVATIVE_BY.get(name) or model_of(name)
    after, before = (
        sum(float(y.sum()) for y in terms(point | {moved: _sum_of(point[moved], sign * STEP * direction)}))
        for sign in (1, -1)
    )
    products = gradient * direction
    return Change((after - before) / (2 * STEP), float(products.sum()), float((products * products).sum()) ** 0.5)


def _require_agreement(changes: dict[str, Change], rtol: float, unresolved: float) -> None:
    """Raise AssertionError where a gradient and differences disagree by more than `rtol` and what these leave open."""
    wrong = [
        f"{name}: got {change.by_gradient:.9g} by the gradient, expected {change.by_differences:.9g} by differences "
        f"(scale {change.scale:.3g})"
        for name, change in changes.items()
        if not abs(change.by_gradient - change.by_differences) <= rtol * change.scale + unresolved
    ]
    if wrong:
        raise AssertionError("\n".join(wrong))


def _random_of(attn: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """seed and offset of dropout, which it removes from the arrays."""
    random = {name: arrays.pop(f"dropout_{name}") for name in ("seed", "offset") if f"dropout_{name}" in arrays}
    if attn.options.dropout and (missing := {"seed", "offset"} - random.keys()):
        expected = "an integer, which dropout needs: `seed` is that of dout, dlse and the directions"
        raise type_error(f"dropout_{max(missing)}", "None", expected)
    return random


def _sum_of(x: Any, step: Any) -> Any:
    """x + step as an array: of arrays without axes NumPy makes a number."""
    moved = x.copy()
    moved += step
    return moved
