"""Tangents of attention and of its gradients as the formulas are written: the oracle of second order.

Letters are those of `cuflash.testing.reference`; a small t before one is a tangent. For one head, with f the soft cap
or the function of a caller and X = scale Q K^T:

    tX = scale (tQ K^T + Q tK^T) + tscale Q K^T,  tS = f'(X) tX + tbias - tslope |i + d - j| + df/da ta
    tL = rowsum(P o tS) + P_sink tsink,  U = tS - tL,  tO = (Z o P o U) V + (Z o P) tV

    tdP = Z o (dO tV^T + tdO V^T),  tD = rowsum(dO o tO + tdO o O),  tdS = U o dS + P o (tdP - tD + tdL)
    dX = f' o dS,  tdX = t(f') o dS + f' o tdS
    tdV = (Z o P o U)^T dO + (Z o P)^T tdO,  tdK = scale (tdX^T Q + dX^T tQ) + tscale dX^T Q,  and so on

L has no Z in it, because it is that of the weights before dropout. The gradient of any other operand a of f is
sum(df/da o dS), whose tangent is sum(t(df/da) o dS + df/da o tdS).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuflash.arrays.array_info import view_4d, view_rows
from cuflash.arrays.dlpack import module_of
from cuflash.score_mod.evaluation import evaluate
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.problem import Problem
from cuflash.testing.reference import BroadcastSum, Head, as_caller, cast, compute_dtype, each_head, product

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class HeadTangents:
    """The tangents of the matrices of one head; zeros of shape (1, 1) where nothing moves."""

    Q: Array
    K: Array
    V: Array
    scale: Array
    U: Array  # tS - tL, 0 where a pair has no weight
    L: Array  # (seqlen_q, 1), 0 in a row that attends to no key
    slope: Array  # of f', the derivative of the scores by X
    sink: Array  # of the sink less tL, (seqlen_q, 1)
    added_size: Array  # what is in tS besides f' tX, as absolute values of its terms
    derivatives: dict[str, Array]  # of those of `Head.derivatives`
    reads: list[Array]  # of the derivatives of `Head.reads`, in their order


def jvp(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    tangents: Mapping[str, Array],
    *,
    seed: int | None = None,
    offset: int | None = None,
    dtype: DTypeLike = np.float64,
    **others: Any,
) -> tuple[Array, Array]:
    """Tangents of out and lse by the plain formula.

    `tangents` are those of q, k, v and the optional inputs, by the names of these; the other parameters are those of
    `cuflash.testing.reference.forward`. In a 16-bit `dtype` P and its tangent are rounded to it before each product.

    Returns
    -------
    tout, tlse : numpy.ndarray
        Shapes and dtypes of out and lse. In a row that attends to no key both are 0, or tlse is the tangent of the
        sink.
    """
    xp, dtype, compute = module_of(q), np.dtype(dtype), compute_dtype(dtype)
    tout = xp.zeros((problem.array_batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v), dtype)
    tlse = xp.zeros(problem.lse_shape, compute)
    for head in each_head(problem, q, k, v, compute, seed, offset, **others):
        with np.errstate(all="ignore"):
            t = head_tangents(problem, head, tangents, others, compute)
            tout[head.index] = cast(_tO(head, t, dtype), dtype)
        view_rows(tlse)[head.index] = t.L[:, 0]
    return as_caller(problem, tout), tlse


def backward_jvp(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    tangents: Mapping[str, Array],
    *,
    dlse: Array | None = None,
    tdout: Array | None = None,
    tdlse: Array | None = None,
    need: Collection[str] = DEFAULT_NEED,
    seed: int | None = None,
    offset: int | None = None,
    dtype: DTypeLike = np.float64,
    **others: Any,
) -> tuple[Array, ...]:
    """Tangents of the gradients of ``sum(dout * out) + sum(dlse * lse)`` by the plain formula.

    `tangents` are as `jvp` takes them, `tdout` and `tdlse` those of dout and dlse, and the other parameters those of
    `cuflash.testing.reference.backward`. In a 16-bit `dtype` out and its tangent, P, dX and their tangents are rounded
    to it before each use.

    Returns
    -------
    tuple of numpy.ndarray
        The tangents of the gradients in `need`, in the order of `Problem.gradients`, with their shapes and dtypes.
    """
    xp, dtype, compute = module_of(q), np.dtype(dtype), compute_dtype(dtype)
    zeros = xp.zeros(problem.lse_shape)
    dlse, tdlse = (zeros if x is None else x for x in (dlse, tdlse))
    tdout = xp.zeros(dout.shape, dout.dtype) if tdout is None else tdout
    tdq, tdk, tdv = (xp.zeros(view_4d(x, problem.layout).shape, compute) for x in (q, k, v))
    tdsinks = xp.zeros(problem.num_heads, compute)
    totals = {
        "dscale": BroadcastSum(None, (), compute, xp),
        "dsoftcap": BroadcastSum(None, (), compute, xp),
        "dbias": BroadcastSum(others.get("bias"), _sizes(problem, "seqlen_q", "seqlen_k"), compute, xp),
        "dalibi_slopes": BroadcastSum(others.get("alibi_slopes"), _sizes(problem), compute, xp),
    }
    score_args = {f"d{name}": xp.zeros(operand.shape, compute) for name, operand in problem.score_args}
    for head in each_head(problem, q, k, v, compute, seed, offset, **others):
        dO, tdO = (cast(view_4d(x, problem.layout)[head.index], compute) for x in (dout, tdout))
        is_empty = xp.isneginf(head.L)
        dL, tdL = (xp.where(is_empty, 0, cast(view_rows(x)[head.index], compute))[:, None] for x in (dlse, tdlse))
        with np.errstate(all="ignore"):
            t = head_tangents(problem, head, tangents, others, compute)
            P, tP = (_round(x, dtype) for x in (head.P * head.Z, head.P * head.Z * t.U))
            O = _round(product(P, head.V), dtype)  # noqa: E741 (the paper's letter)
            tO = _round(_tO(head, t, dtype), dtype)
            D = (dO * O).sum(axis=-1, keepdims=True) - dL
            tD = (dO * tO + tdO * O).sum(axis=-1, keepdims=True) - tdL
            dS = head.P * (product(dO, head.V.T) * head.Z - D)
            tdP = (product(dO, t.V.T) + product(tdO, head.V.T)) * head.Z
            tdS = t.U * dS + head.P * (tdP - tD)
            dX = _round(head.cap_slope * dS, dtype)
            tdX = _round(t.slope * dS + head.cap_slope * tdS, dtype)
            tdv[head.index_kv] += product(tP.T, dO) + product(P.T, tdO)
            tdk[head.index_kv] += problem.scale * (product(tdX.T, head.Q) + product(dX.T, t.Q))
            tdk[head.index_kv] += t.scale * product(dX.T, head.Q)
            tdq[head.index] += problem.scale * (product(tdX, head.K) + product(dX, t.K))
            tdq[head.index] += t.scale * product(dX, head.K)
            tdsinks[head.index[1]] -= (head.P_sink * (t.sink * D + tD)).sum()
            of_scale = tdX * head.QK + dX * (product(t.Q, head.K.T) + product(head.Q, t.K.T))
            totals["dscale"].add((), of_scale, head.first_row)
            for name, derivative in head.derivatives.items():
                total = totals[name]
                terms = tdS * derivative + dS * t.derivatives.get(name, 0)
                total.add(head.index_scores[: len(total.shape)], terms, head.first_row)
            for (name, entry, derivative), moved in zip(head.reads, t.reads, strict=True):
                xp.add.at(score_args[f"d{name}"].reshape(-1), entry, tdS * derivative + dS * moved)
    with np.errstate(all="ignore"):
        gradients = {
            name: as_caller(problem, cast(x, dtype)) for name, x in zip(DEFAULT_NEED, (tdq, tdk, tdv), strict=True)
        }
        for name, total in totals.items():
            term = others.get(name[1:])
            is_input = term is not None and term.dtype.itemsize == dtype.itemsize
            gradients[name] = total.value.astype(dtype if is_input else compute)
    gradients["dsinks"] = tdsinks
    gradients |= score_args
    return tuple(gradients[name] for name in problem.gradients if name in need)


def _sizes(problem: Problem, *more_axes: str) -> tuple[int, ...]:
    return tuple(getattr(problem, axis) for axis in ("batch", "num_heads", *more_axes))


def _round(x: Array, dtype: np.dtype[Any]) -> Array:
    return cast(cast(x, dtype), x.dtype)


def _tO(head: Head, t: HeadTangents, dtype: np.dtype[Any]) -> Array:
    P, tP = (_round(x, dtype) for x in (head.P * head.Z, head.P * head.Z * t.U))
    return product(tP, head.V) + product(P, t.V)


def head_tangents(
    problem: Problem, head: Head, tangents: Mapping[str, Array], others: Mapping[str, Any], compute: np.dtype[Any]
) -> HeadTangents:
    """The tangents of the matrices of a head; `others` are the optional inputs, and what functions read."""
    xp, (b, h) = module_of(head.Q), head.index_scores
    none = xp.zeros((1, 1), compute)

    def rows_of(name: str, rows: Array) -> Array:
        if name not in tangents:
            return xp.zeros(rows.shape, rows.dtype)
        index = head.index if name == "q" else head.index_kv
        return cast(view_4d(tangents[name], problem.layout)[index], compute)

    def number(name: str) -> Array:
        return xp.asarray(tangents.get(name, 0), compute)

    tQ, tK, tV = (rows_of(name, x) for name, x in (("q", head.Q), ("k", head.K), ("v", head.V)))
    tX = problem.scale * (product(tQ, head.K.T) + product(head.Q, tK.T)) + number("scale") * head.QK
    tS, slope, added_size = head.cap_slope * tX, none, none
    derivatives: dict[str, Array] = {}
    reads: list[Array] = []
    if problem.softcap is not None:
        X = problem.scale * head.QK / problem.softcap
        T, tX_by_cap = xp.tanh(X), (tX - X * number("softcap")) / problem.softcap
        by_cap = head.derivatives["dsoftcap"] * number("softcap")
        tS, added_size = tS + by_cap, added_size + abs(by_cap)
        slope = -2 * T * head.cap_slope * tX_by_cap
        derivatives["dsoftcap"] = 2 * X * T * head.cap_slope * tX_by_cap
    if "alibi_slopes" in tangents:
        tslope = xp.broadcast_to(tangents["alibi_slopes"], _sizes(problem))[b, h].astype(compute)
        by_slope = head.derivatives["dalibi_slopes"] * tslope
        tS, added_size = tS + by_slope, added_size + abs(by_slope)
    if "bias" in tangents:
        of_head = xp.broadcast_to(tangents["bias"], _sizes(problem, "seqlen_q", "seqlen_k"))[b, h]
        tbias = cast(of_head[head.first_row : head.first_row + head.Q.shape[0], : head.K.shape[0]], compute)
        tS, added_size = tS + tbias, added_size + abs(tbias)
    if problem.score is not None:
        tS, slope, added_size, reads = _by_function(problem, head, tX, tangents, others, compute)
    tS = xp.where(head.P == 0, 0, tS)
    tsink = xp.asarray(tangents["sinks"][h] if "sinks" in tangents else 0, compute)
    tL = (head.P * tS).sum(axis=-1, keepdims=True) + head.P_sink * tsink
    return HeadTangents(
        Q=tQ, K=tK, V=tV, scale=number("scale"), U=xp.where(head.P == 0, 0, tS - tL), L=tL, slope=slope,
        sink=tsink - tL, added_size=added_size, derivatives=derivatives, reads=reads,
    )  # fmt: skip


def _by_function(
    problem: Problem,
    head: Head,
    tX: Array,
    tangents: Mapping[str, Array],
    others: Mapping[str, Any],
    compute: np.dtype[Any],
) -> tuple[Array, Array, Array, list[Array]]:
    """Tangents of what the function of a caller makes: of scores, of their slope, and of the derivatives of reads.

    The third is what tangents of single arrays make of scores, as absolute values.
    """
    assert problem.score is not None
    i, j = np.arange(head.Q.shape[0])[:, None], np.arange(head.K.shape[0])[None, :]
    b, h = head.index_scores
    arrays = {name: others[name] for name, _ in problem.score_args}
    moved = tuple(name for name in problem.program.on_numpy().differentiable if name in tangents)
    of_score = problem.score_tangents(moved)
    roots = [of_score.score, of_score.by_s, *(x for of_array in of_score.reads.values() for x in of_array)]
    inputs = {"s": problem.scale * head.QK, "ts": tX, "i": i, "j": j, "head": h, "batch": b}
    arrays |= {f"t{name}": tangents[name] for name in moved}
    tS, slope, *reads = (np.where(head.P == 0, 0, x) for x in evaluate(roots, inputs, arrays, compute))
    sizes = np.zeros_like(tS)
    for name in moved:
        alone = evaluate([problem.score_tangents((name,)).score], inputs | {"ts": np.zeros_like(tX)}, arrays, compute)
        sizes = sizes + np.where(head.P == 0, 0, np.abs(alone[0]))
    return tS, slope, sizes, reads
