"""Attention and its gradients by NumPy, where there is no compiled core: small heads in stacks, others by tiles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import stacks, tiled_backward, tiled_forward, tiled_terms, tiles
from cuflash.cpu.packed import Sequence, clear_rows_of_no_sequence, for_each, sequences
from cuflash.operands import view_4d, view_rows
from cuflash.problem import Problem
from cuflash.terms import DEFAULT_NEED, GRADIENTS, OF_SCORES, Terms, checked

Array = NDArray[Any]


def forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    *,
    seed: int | None = None,
    offset: int | None = None,
    sequence: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    **terms: Any,
) -> tuple[Array, Array]:
    """Attention with online softmax (FlashAttention-2, algorithm 1); bitwise repeatable.

    Parameters
    ----------
    problem : Problem
        From `cuflash.problem.make_problem` on the same arrays.
    q, k, v : numpy.ndarray
        As `cuflash.attention` takes them, validated, of any strides.
    seed, offset : int, optional
        With dropout: which weights are dropped, as `cuflash.dropout_mask` says.
    sequence : int, optional
        Which of packed sequences this is: it is computed beside others, and dropout counts them.
    out, lse : numpy.ndarray, optional
        Written to and returned: shape `problem.out_shape` and dtype of q, shape `problem.lse_shape` and
        `problem.softmax_dtype`; any strides.
    **terms : numpy.ndarray, optional
        Those of `cuflash.terms`, as `cuflash.attention` takes them. `kv_lengths` is clamped to 0..seqlen_k.

    Returns
    -------
    out, lse : numpy.ndarray
        lse is the natural logarithm of the sum of exponentials. In a row that sees no key, out is 0, and lse is -inf or
        the sink.
    """
    terms = checked("forward", Terms, terms)
    out = np.empty(problem.out_shape, q.dtype) if out is None else out
    lse = np.empty(problem.lse_shape, problem.softmax_dtype) if lse is None else lse
    if problem.is_packed:
        arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}

        def forward_of(one: Sequence) -> None:
            own = {name: one.of_rows(x, name) for name, x in arrays.items()}
            forward(one.problem, **own, **one.of_terms(terms), seed=seed, offset=offset, sequence=one.index)

        clear_rows_of_no_sequence(problem, out, lse, terms["cu_seqlens_q"])
        _for_each_sequence(problem, terms, forward_of, 2, lambda p: p.forward_flops)
    elif stacks.serves(problem):
        stacks.forward(stacks.Call(problem, q, k, v, terms, seed, offset, sequence), out, lse)
    else:
        tiled_forward.forward(tiles.Call(problem, q, k, v, terms, seed, offset, sequence), out, lse)
    return out, lse


def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    need: Collection[str] = DEFAULT_NEED,
    seed: int | None = None,
    offset: int | None = None,
    sequence: int | None = None,
    **others: Any,
) -> tuple[Array, ...]:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` (FlashAttention-2, algorithm 2); bitwise repeatable.

    Parameters
    ----------
    problem, q, k, v, seed, offset, sequence :
        As `forward` takes them.
    dout, out, lse : numpy.ndarray
        The gradient with respect to out, and what `forward` returned.
    dlse : numpy.ndarray, optional
        The gradient with respect to lse.
    need : collection of str, optional
        The gradients that are wanted, names of `terms.GRADIENTS`; without it dq, dk, dv.
    **others : numpy.ndarray, optional
        The terms, as `forward` takes them, and arrays for gradients by name, which are written to and returned if
        wanted: shapes and dtypes of what they are gradients of, shape () and dtype of lse for numbers; any strides.

    Returns
    -------
    tuple of numpy.ndarray
        The gradients that are wanted, in the order of `terms.GRADIENTS`. In dk and dv, keys that no query sees, those
        past `kv_lengths` and those of no sequence among them, get zero.
    """
    terms = checked("backward", Terms, {name: x for name, x in others.items() if name not in GRADIENTS})
    wanted = gradients_for(problem, need, {"q": q, "k": k, "v": v, **terms}, others)
    if problem.is_packed:
        arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        arrays |= {} if dlse is None else {"dlse": dlse}
        _backward_of_sequences(problem, arrays, terms, wanted, seed, offset)
    elif stacks.serves(problem):
        stacks.backward(stacks.Call(problem, q, k, v, terms, seed, offset, sequence), dout, out, lse, dlse, wanted)
    else:
        call = tiles.Call(problem, q, k, v, terms, seed, offset, sequence)
        of_rows = None if dlse is None else view_rows(dlse)
        rows = (view_4d(dout, problem.layout), view_4d(out, problem.layout), view_rows(lse), of_rows)
        threads = tiles.count_threads(problem.backward_flops)
        if wanted.keys() & set(DEFAULT_NEED):
            results = {name: view_4d(wanted[name], problem.layout) for name in DEFAULT_NEED if name in wanted}
            tiled_backward.write(call, threads, rows, **results)
        if wanted.keys() & set(OF_SCORES):
            tiled_terms.write(call, threads, rows, wanted)
        tiled_terms.write_of_softmax(call, rows, wanted)
    return tuple(wanted.values())


def gradients_for(
    problem: Problem,
    need: Collection[str],
    models: Mapping[str, Array | None],
    given: Mapping[str, Array | None],
) -> dict[str, Array]:
    """Arrays for the gradients that are wanted, in order: those given, and new ones like what they are gradients of."""
    wanted: dict[str, Array] = {}
    for name in GRADIENTS:
        if name in need:
            result, model = given.get(name), models.get(name[1:])
            if result is None:
                result = np.empty((), problem.softmax_dtype) if model is None else np.empty(model.shape, model.dtype)
            wanted[name] = result
    return wanted


# ---- packed sequences ------------------------------------------------------------------------------------------------


def _backward_of_sequences(
    problem: Problem,
    arrays: Mapping[str, Array],
    terms: Mapping[str, Any],
    wanted: Mapping[str, Array],
    seed: int | None,
    offset: int | None,
) -> None:
    """Write the gradients that are wanted, of which those of terms are sums over sequences."""
    arrays = {**arrays, **{name: wanted[name] for name in DEFAULT_NEED if name in wanted}}
    heads = (problem.batch, problem.num_heads)
    parts = {
        name: np.zeros(heads if wanted[name].ndim else heads[:1], problem.softmax_dtype)
        for name in wanted.keys() - set(DEFAULT_NEED)
    }

    def backward_of(one: Sequence) -> None:
        own: dict[str, Any] = {name: one.of_rows(x, name) for name, x in arrays.items()} | one.of_terms(terms)
        own |= {"seed": seed, "offset": offset, "sequence": one.index}
        for name, gradient in zip(wanted, backward(one.problem, **own, need=tuple(wanted)), strict=True):
            if name in parts:
                parts[name][one.index] = gradient

    ends = {"dq": terms["cu_seqlens_q"], "dk": terms["cu_seqlens_k"], "dv": terms["cu_seqlens_k"]}
    for name in ends.keys() & wanted.keys():
        view_4d(wanted[name], problem.layout)[:, :, int(ends[name][-1]) :] = 0
    _for_each_sequence(problem, terms, backward_of, 5, lambda p: p.backward_flops)
    with np.errstate(all="ignore"):
        for name, part in parts.items():
            wanted[name][...] = part if wanted[name].shape == part.shape == heads else part.sum(axis=0)


def _for_each_sequence(
    problem: Problem,
    terms: Mapping[str, Any],
    work: Callable[[Sequence], None],
    num_products: int,
    flops: Callable[[Problem], int],
) -> None:
    def is_short(own: Problem) -> bool:
        return stacks.is_short(own, num_products) if stacks.serves(own) else flops(own) < tiles.SERIAL_FLOPS

    every = list(sequences(problem, terms["cu_seqlens_q"], terms["cu_seqlens_k"]))
    for_each(every, work, is_short, tiles.count_threads(flops(problem)))
