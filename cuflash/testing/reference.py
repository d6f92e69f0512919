"""Attention and its gradients as the formulas are written: the oracle that everything else is measured against.

In the letters of Dao et al. (FlashAttention, 2022, section 2 and appendix B), for one head, options in between:

    S = scale Q K^T ; softcap ; - slope |i + d - j| ; + bias ; hidden keys, hidden blocks of them: -inf
    P = softmax(S),  O = (P o Z) V,  L = log sum exp S
    dV = (P o Z)^T dO,  dP = (dO V^T) o Z,  D = rowsum(dO o O),  dS = P o (dP - D + dL)
    dQ = scale dS K,  dK = scale dS^T Q

The softcap c stands between scale Q K^T and S: with X = scale Q K^T / c and T = tanh X, dS is multiplied by 1 - T^2 on
its way to dQ and dK. The other operands of S, beside Q and K, have gradients too, sums over what they are broadcast to:

    dbias = dS,  dslope = -sum dS o |i + d - j|,
    dscale = sum dS o (1 - T^2) o Q K^T,  dc = sum dS o (T - X o (1 - T^2))

Without dropout, Z is 1. With it, Z is 0 where a weight is dropped and 1 / (1 - dropout) elsewhere.

dL is the gradient with respect to L; the derivative of L by S is P. A sink z is the score of one more key, whose value
is zero: L = log (exp z + sum exp S), P = exp(S - L), and dz = sum exp(z - L) (dL - D) over the rows of its head.
Nothing is tiled and nothing is clever; one head's matrices are held at a time. The same lines run in a lower precision
give "the plain formula in that dtype", whose error is the yardstick for all others (`cuflash.testing`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuflash.arrays.array_info import FLOAT8, user_shape, view_4d, view_rows
from cuflash.score_mod.evaluation import clamped, evaluate
from cuflash.spec.dropout import kept_weights
from cuflash.spec.inputs import NAMES, NUMBERS, OPTIONAL_INPUTS
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.problem import Problem, scales_of_rows

if TYPE_CHECKING:
    from cuflash.spec.inputs import OptionalArrays

Array = NDArray[Any]

LONG_PRODUCT = 2**26  # multiplications of long doubles, a quarter of a second of one core


def forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    *,
    seed: int | None = None,
    offset: int | None = None,
    dtype: DTypeLike = np.float64,
    **terms: Any,
) -> tuple[Array, Array]:
    """Attention by the plain formula.

    Parameters
    ----------
    problem : Problem
        From `cuflash.spec.problem.make_problem` on the same arrays.
    q, k, v : numpy.ndarray
        As `cuflash.attention` takes them.
    seed, offset : int, optional
        With dropout: which weights are dropped, as `cuflash.dropout_mask` says.
    dtype : dtype, default float64
        Precision to compute in. float64 is the oracle, and longdouble that of float64 itself, with 64 bits on x86 but
        no BLAS. For float16 and bfloat16, products accumulate and the softmax runs in float32, and the weights are
        rounded to `dtype` before they meet `v`: the plain 16-bit implementation.
    **terms : numpy.ndarray, optional
        bias, mask and so on, as `cuflash.attention` takes them, and what functions read. Entries of
        `kv_lengths` outside 0..seqlen_k are clamped.

    Returns
    -------
    out : numpy.ndarray
        Shape `problem.out_shape`, of `dtype`.
    lse : numpy.ndarray
        Natural logarithm of the sum of exponentials, shape `problem.lse_shape`, float64 or float32 with `dtype`.
    """
    dtype, compute = np.dtype(dtype), compute_dtype(dtype)
    out = np.zeros((problem.array_batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v), dtype)
    lse = np.full(problem.lse_shape, -np.inf, compute)
    for head in each_head(problem, q, k, v, compute, seed, offset, **terms):
        with np.errstate(all="ignore"):
            O = product(_round(head.P * head.Z, dtype), head.V)  # noqa: E741 (the paper's letter)
            out[head.index] = O.astype(dtype)
        view_rows(lse)[head.index] = head.L
    return as_caller(problem, out), lse


def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    need: Collection[str] = DEFAULT_NEED,
    seed: int | None = None,
    offset: int | None = None,
    dtype: DTypeLike = np.float64,
    **terms: Any,
) -> tuple[Array, ...]:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` by the plain formula.

    Parameters are those of `forward`, with `dout` of shape `problem.out_shape`, and `dlse`, if there is one, of shape
    `problem.lse_shape`; in a row that attends to no key it counts for nothing. In a 16-bit `dtype` the output, the
    weights and the gradient of the scores are rounded to it before each use, and gradients are summed over a group of
    heads in float32. `need` names the gradients that are wanted.

    Returns
    -------
    tuple of numpy.ndarray
        In the order of `outputs.GRADIENTS`, those of

        dq, dk, dv
            Shapes of `q`, `k` and `v`, of `dtype`, or of that of lse if `problem.wide` has them. Keys that nothing
            sees, past `kv_lengths` or of no sequence for one, get zero.
        dbias
            Shape of `bias`, of `dtype` or, where `bias` has it, of that of lse.
        dalibi_slopes, dsinks
            Shapes of `alibi_slopes` and `sinks`, dtype of lse.
        dscale, dsoftcap
            Shape (), dtype of lse.
    """
    dtype, compute = np.dtype(dtype), compute_dtype(dtype)
    dlse = np.zeros(problem.lse_shape) if dlse is None else dlse
    dq, dk, dv = (np.zeros(view_4d(x, problem.layout).shape, compute) for x in (q, k, v))
    dsinks = np.zeros(problem.num_heads, compute)
    of_scores = ScoreSums(problem, terms, compute)
    score_args = {f"d{name}": np.zeros(operand.shape, compute) for name, operand in problem.score_args}
    for head in each_head(problem, q, k, v, compute, seed, offset, **terms):
        dO = view_4d(dout, problem.layout)[head.index].astype(compute)
        dL = _replace(view_rows(dlse)[head.index].astype(compute), np.isneginf(head.L), 0)[:, None]
        with np.errstate(all="ignore"):
            P = _round(head.P * head.Z, dtype)
            O = _round(product(P, head.V), dtype)  # noqa: E741 (the paper's letter)
            D = (dO * O).sum(axis=-1, keepdims=True)
            dP = product(dO, head.V.T) * head.Z
            dS_bias = head.P * (dP - D + dL)
            dS = _round(dS_bias * head.cap_slope, dtype)
            dv[head.index_kv] += product(P.T, dO)
            dq[head.index] += problem.scale * product(dS, head.K)
            dk[head.index_kv] += problem.scale * product(dS.T, head.Q)
            dsinks[head.index[1]] += (head.P_sink * (dL - D)).sum()
            of_scores.add(head, _round(dS_bias, dtype), dS * head.QK)
            for name, entry, derivative in head.reads:
                np.add.at(score_args[f"d{name}"].reshape(-1), entry, _round(dS_bias, dtype) * derivative)
    with np.errstate(all="ignore"):
        gradients = {
            name: as_caller(problem, x if name in problem.wide else x.astype(dtype))
            for name, x in zip(DEFAULT_NEED, (dq, dk, dv), strict=True)
        }
        for name, total in of_scores.totals.items():
            term = terms.get(name[1:])
            is_input = isinstance(term, np.ndarray) and term.dtype.itemsize == dtype.itemsize
            gradients[name] = total.value.astype(dtype if is_input else compute)
    gradients["dsinks"] = dsinks
    gradients |= score_args
    return tuple(gradients[name] for name in problem.gradients if name in need)


class BroadcastSum:
    """The gradient of something that is broadcast to `shape`: zeros of its shape, that sums over the other axes."""

    def __init__(self, of: Array | None, shape: tuple[int, ...], compute: np.dtype[Any]) -> None:
        self.value = np.zeros(() if of is None else of.shape, compute)
        missing = (None,) * (len(shape) - self.value.ndim)
        self.view = self.value[missing] if missing else self.value
        self.shape = shape

    def add(self, index: tuple[int, ...], part: Array) -> None:
        """Add a part that has `index` on the first axes, and all of the others."""
        own = (slice(i, i + 1) if n > 1 else slice(None) for i, n in zip(index, self.view.shape, strict=False))
        place = (*own, ...)
        here = self.view[place]
        if len(self.shape) == len(index):
            part = part.sum()
        # Keys past kv_lengths have no part; they come last.
        whole = np.zeros(self.shape[len(index) :], part.dtype)
        whole[tuple(slice(n) for n in part.shape)] = part
        summed = tuple(axis for axis, n in enumerate(here.shape[len(index) :]) if n == 1)
        here += whole.sum(axis=summed, keepdims=True)


class ScoreSums:
    """`outputs.SCORE_GRADIENTS`: gradients of scores, times derivatives of the scores, summed over all heads."""

    def __init__(self, problem: Problem, terms: Mapping[str, Any], compute: np.dtype[Any]) -> None:
        self.totals = {f"d{name}": BroadcastSum(None, (), compute) for name in NUMBERS}
        for term in OPTIONAL_INPUTS:
            if term.gradient_via == "scores":
                shape = tuple(getattr(problem, axis) for axis in term.shapes[-1])
                self.totals[term.gradient] = BroadcastSum(terms.get(term.name), shape, compute)

    def add(self, head: Head, dS: Array, of_scale: Array, power: int = 1) -> None:
        """Add the part of one head: dS times the derivatives, to a power, and the terms of the gradient of scale."""
        for name, derivative in head.derivatives.items():
            total = self.totals[name]
            total.add(head.index_scores[: len(total.shape)], dS * derivative**power)
        self.totals["dscale"].add((), of_scale)


@dataclass(frozen=True, kw_only=True)
class Head:
    """The matrices of one head, of a batch entry or a packed sequence, in the precision of the computation.

    Keys past `kv_lengths` are cut off.
    """

    index: tuple[int, int, slice]  # of q, out, lse and their gradients: [batch, head, queries]
    index_kv: tuple[int, int, slice]  # of k, v and their gradients: [batch, head of k and v, keys]
    index_scores: tuple[int, int]  # of bias, slopes and their gradients: [batch entry or sequence, head]
    Q: Array
    K: Array
    V: Array
    P: Array  # weights, (seqlen_q, keys); a row that attends to no key is zero
    P_sink: Array  # weight of the sink, (seqlen_q, 1); zero without one
    L: Array  # log sum exp of the scores, (seqlen_q,); -inf for such a row
    Z: Array  # what dropout multiplies the weights by
    cap_slope: Array  # derivative of the scores by scale Q K^T: other than one through softcap, or a function
    QK: Array  # Q K^T
    derivatives: dict[str, Array]  # of the scores by their other operands, by the names of these gradients
    reads: list[tuple[str, Array, Array]]  # of arrays that a function reads: name, entries, derivatives by them


def each_head(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    compute: DTypeLike,
    seed: int | None = None,
    offset: int | None = None,
    **arrays: Any,
) -> Iterator[Head]:
    """Softmax weights of every head, with operands converted to the `compute` dtype.

    `arrays` are the terms, and what score_mod and mask_mod read.
    """
    terms: OptionalArrays = {name: x for name, x in arrays.items() if name in NAMES}  # type: ignore[assignment]
    q, k, v = (view_4d(x, problem.layout) for x in (q, k, v))
    q, k, v = (dequantised(problem, name, x, terms) for name, x in (("q", q), ("k", k), ("v", v)))
    scores_shape = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    bias, mask, kv_lengths = terms.get("bias"), terms.get("mask"), terms.get("kv_lengths")
    alibi_slopes, sinks = terms.get("alibi_slopes"), terms.get("sinks")
    score_args = {name: arrays[name] for name, _ in problem.score_args}
    block_mask, block_table = terms.get("block_mask"), terms.get("block_table")
    cu_seqlens_q, cu_seqlens_k = terms.get("cu_seqlens_q"), terms.get("cu_seqlens_k")
    bias = None if bias is None else np.broadcast_to(bias, scores_shape)
    mask = None if mask is None else np.broadcast_to(mask, scores_shape)
    if block_mask is not None:
        in_blocks = np.broadcast_to(pairs_of_blocks(problem, block_mask), scores_shape)
        mask = in_blocks if mask is None else mask & in_blocks
    slopes = None if alibi_slopes is None else np.broadcast_to(alibi_slopes, scores_shape[:2])
    sinks = np.full(problem.num_heads, -np.inf) if sinks is None else sinks
    for b, h in np.ndindex(scores_shape[:2]):
        rows, keys, entry, own = slice(0, problem.seqlen_q), slice(0, problem.seqlen_k), b, problem
        if kv_lengths is not None:
            keys = slice(0, min(max(int(kv_lengths[b]), 0), problem.seqlen_k))
            own = problem.aligned_to(keys.stop)
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
            entry, own = 0, problem.of_sequence(rows.stop - rows.start, keys.stop - keys.start)
        index, index_kv = (entry, h, rows), (entry, h // problem.group_size, keys)
        if block_table is None:
            K, V = k[index_kv], v[index_kv]
        else:
            K, V = (_gather(x[:, index_kv[1]], block_table[b], keys.stop) for x in (k, v))
        Q, K, V = (x.astype(compute) for x in (q[index], K, V))
        with np.errstate(all="ignore"):
            S, QK, cap_slope, derivatives = _scores(
                own,
                Q,
                K,
                slope=None if slopes is None else slopes[b, h].astype(compute),
                bias=None if bias is None else bias[b, h][:, keys].astype(compute),
                mask=None if mask is None else mask[b, h][:, keys],
            )
            S, cap_slope, reads = _by_functions(own, S, cap_slope, score_args, b, h)
            P, P_sink, L = _softmax(S, sinks[h].astype(compute))
            if problem.has_functions:  # a pair without weight contributes nothing, whatever its derivative
                cap_slope = _replace(np.broadcast_to(cap_slope, P.shape), P == 0, 0)
                reads = [(name, entry, _replace(x, P == 0, 0)) for name, entry, x in reads]
        Z = np.ones((1, 1), P.dtype)
        if problem.dropout:
            origin = problem.origin
            numbers = (range(first, first + n) for first, n in zip(origin[:2], S.shape, strict=True))
            kept = kept_weights(problem.dropout, seed, offset, origin.head + b * origin.num_heads + h, *numbers)
            Z = kept.astype(P.dtype) * P.dtype.type(problem.kept_scale)
        operands = {"Q": Q, "K": K, "V": V, "P": P, "P_sink": P_sink, "L": L, "Z": Z}
        operands |= {"QK": QK, "cap_slope": cap_slope}
        places = {"index": index, "index_kv": index_kv, "index_scores": (b, h)}
        yield Head(derivatives=derivatives, reads=reads, **places, **operands)  # type: ignore[arg-type]


def dequantised(problem: Problem, name: str, x: Array, terms: Mapping[str, Any]) -> Array:
    """q, k or v, (batch, heads, rows, dim), as the numbers it stands for: fp8 numbers times their scales."""
    if getattr(problem, name).dtype not in FLOAT8:
        return x
    with np.errstate(all="ignore"):
        scales = scales_of_rows(problem, f"{name}_scale", terms.get(f"{name}_scale"))
        return x.astype(np.float64) * (1.0 if scales is None else scales[..., None].astype(np.float64))


def weights_from_lse(
    problem: Problem, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dtype: DTypeLike
) -> tuple[Array, Array, Array]:
    """P, dP and D of rows and some of their keys, 2-D arrays of one head, where lse stands for the other keys."""
    dO, Q, K, V, O, L = (x.astype(dtype) for x in (dout, q, k, v, out, lse))  # noqa: E741 (the paper's letter)
    S, *_ = _scores(problem, Q, K, slope=None, bias=None, mask=None)
    return np.exp(S - L[:, None]), product(dO, V.T), (dO * O).sum(axis=-1, keepdims=True)


def pairs_of_blocks(problem: Problem, block_mask: Array) -> Array:
    """A block mask as a mask of pairs (query, key): entry [i, j] is block_mask[i // block rows, j // block keys]."""
    rows, keys = problem.block_size
    i, j = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    return block_mask[..., (i // rows)[:, None], j // keys]


def _gather(pool: Array, table: Array, length: int) -> Array:
    """The first `length` rows of the pages of a table; `pool` has (num_pages, page_size, dim) of one head."""
    page_size, dim = pool.shape[1:]
    num_pages = -(-length // page_size)
    return pool[table[:num_pages]].reshape(num_pages * page_size, dim)[:length]


def unit_of_scores(problem: Problem) -> float:
    """The unit of terms of scores when their rounding is judged: a softcap below 1, or 1."""
    return min(1.0, problem.softcap or 1.0)


def _scores(
    problem: Problem, Q: Array, K: Array, *, slope: Array | None, bias: Array | None, mask: Array | None
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """S of one head with -inf at hidden keys; QK, cap_slope and derivatives, fields of `Head`."""
    QK = product(Q, K.T)
    S = problem.scale * QK
    cap_slope = np.ones((1, 1), S.dtype)
    derivatives = {}
    if problem.softcap is not None:
        X = S / problem.softcap
        T = np.tanh(X)
        S, cap_slope = problem.softcap * T, 1 - T * T
        derivatives["dsoftcap"] = T - X * cap_slope
    j_minus_i = np.arange(S.shape[1]) - np.arange(S.shape[0])[:, None] - problem.diagonal
    if slope is not None:
        distance = np.abs(j_minus_i).astype(S.dtype)
        S = S - slope * distance
        derivatives["dalibi_slopes"] = -distance
    if bias is not None:
        S = S + bias
        derivatives["dbias"] = np.ones((1, 1), S.dtype)
    if problem.window_left is not None:
        S = _replace(S, j_minus_i < -problem.window_left, -np.inf)
    if problem.window_right is not None:
        S = _replace(S, j_minus_i > problem.window_right, -np.inf)
    if mask is not None:
        S = _replace(S, ~mask, -np.inf)
    return S, QK, cap_slope, derivatives


def _by_functions(
    problem: Problem, S: Array, slope: Array, score_args: Mapping[str, Array], batch: int, head: int
) -> tuple[Array, Array, list[tuple[str, Array, Array]]]:
    """Scores of one head as score_mod and mask_mod leave them, their derivative by S, and `Head.reads`.

    Values are those of the function itself, called on NumPy arrays. S already has -inf where other options hide a pair.
    """
    i, j = np.arange(S.shape[0])[:, None], np.arange(S.shape[1])[None, :]
    inputs: dict[str, Any] = {"s": S, "i": i, "j": j, "head": head, "batch": batch}
    reads, hidden = [], np.isneginf(S)
    if problem.score is not None:
        inputs["s"] = S = _replace(S, hidden, 0)
        program = problem.program.on_numpy()
        loads = [(name, load) for name, found in program.loads.items() for load in found]
        nodes = [x for x in (program.by_s, *(load.derivative for _, load in loads)) if x is not None]
        slope, *others = evaluate(nodes, inputs, score_args, S.dtype)
        for (name, load), derivative in zip(loads, others, strict=True):
            shape, entry = score_args[name].shape, np.zeros(S.shape, np.int64)
            indices = evaluate(load.at.args, inputs, score_args, S.dtype)
            for index, length in zip(clamped(indices, shape), shape, strict=True):
                entry = entry * length + index
            reads.append((name, entry, np.broadcast_to(derivative, S.shape).astype(S.dtype)))
        S = np.broadcast_to(problem.score.on_numpy()(inputs, score_args, S.dtype), S.shape).astype(S.dtype)
    if problem.mask_function is not None:
        hidden = hidden | ~np.broadcast_to(problem.mask_function(inputs, score_args, S.dtype), S.shape).astype(bool)
    return _replace(S, hidden, -np.inf), slope, reads


def _softmax(S: Array, sink: Array) -> tuple[Array, Array, Array]:
    """P, the weight of the sink and L of the rows of S; a row of nothing but -inf has P = 0 and L = -inf."""
    m = np.maximum(S.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    m = _replace(m, m == -np.inf, 0)
    P, P_sink = np.exp(S - m), np.exp(sink - m)
    l = P.sum(axis=-1, keepdims=True) + P_sink  # noqa: E741 (the paper's letter)
    L = m + np.log(l)
    l = _replace(l, l == 0, 1)  # noqa: E741
    return P / l, P_sink / l, L[:, 0]


def product(A: Array, B: Array) -> Array:
    """A B. No BLAS multiplies long doubles: if there are many, rows of A are dealt to the cores."""
    if A.dtype != np.longdouble:
        return A @ B
    columns = np.asfortranarray(B)
    if A.size * B.shape[1] < LONG_PRODUCT:
        return A @ columns
    with ThreadPoolExecutor() as pool:
        parts = pool.map(lambda rows: np.ascontiguousarray(rows) @ columns, np.array_split(A, min(len(A), 64)))
        return np.concatenate(list(parts))


def compute_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """dtype of sums and softmax: float64 for float64, longdouble for itself, else float32."""
    return np.dtype(dtype if np.dtype(dtype) in (np.float64, np.longdouble) else np.float32)


def as_caller(problem: Problem, x: Array) -> Array:
    """A (batch, heads, seqlen, dim) result in the caller's layout and number of axes."""
    batch, heads, seqlen, dim = x.shape
    shape = user_shape(batch, heads, seqlen, dim, problem.ndim, problem.layout)
    return np.ascontiguousarray(x.swapaxes(1, 2) if problem.layout == "bshd" else x).reshape(shape)


def error_fractions(errors: Array, unit: Array, noise: Array) -> tuple[float, float]:
    """The largest errors of a result as a fraction of its unit in the last place, and as one of the noise.

    An error counts as what is larger in its entry. Which entries have the largest fractions is luck, so errors like
    these may be met with in any entry: ``of_unit * unit + of_noise * noise``. That is no less than the error in the
    same place; where both are the same in all entries it is the largest error; and an entry of large noise raises
    others in proportion to theirs.
    """
    with np.errstate(all="ignore"):
        of_unit = np.where((errors > 0) & (noise < unit), errors / unit, 0).max(initial=0)
        of_noise = np.where((errors > 0) & (noise >= unit), errors / noise, 0).max(initial=0)
    return of_unit, of_noise


def _round(x: Array, dtype: np.dtype[Any]) -> Array:
    """x rounded to dtype, in the dtype it had."""
    return x.astype(dtype).astype(x.dtype)


def _replace(x: Array, where: Array, value: float) -> Array:
    return np.where(where, np.asarray(value, x.dtype), x)
