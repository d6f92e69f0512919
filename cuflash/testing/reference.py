"""Attention and its gradients as the formulas are written: the oracle that everything else is measured against.

In the letters of Dao et al. (FlashAttention, 2022, section 2 and appendix B), for one head, options in between::

    S = scale Q K^T ; softcap ; - slope |i + d - j| ; + bias ; hidden keys, hidden blocks of them: -inf
    P = softmax(S),  O = (P o Z) V,  L = log sum exp S
    dV = (P o Z)^T dO,  dP = (dO V^T) o Z,  D = rowsum(dO o O),  dS = P o (dP - D + dL)
    dQ = scale dS K,  dK = scale dS^T Q

The softcap c stands between scale Q K^T and S: with X = scale Q K^T / c and T = tanh X, dS is multiplied by 1 - T^2 on
its way to dQ and dK. The other operands of S, next to Q and K, have gradients too, sums over what they are broadcast
to::

    dbias = dS,  dslope = -sum dS o |i + d - j|,
    dscale = sum dS o (1 - T^2) o Q K^T,  dc = sum dS o (T - X o (1 - T^2))

Without dropout, Z is 1. With it, Z is 0 where a weight is dropped and 1 / (1 - dropout) elsewhere.

dL is the gradient with respect to L; the derivative of L by S is P. The row reductions are its largest score, whose
derivative by S is 1 at the first key that has it, and the entropy H = L - sum P S = -sum P log P, whose derivative is
-P o (log P + H). A sink z is the score of one more key, whose value
is zero: L = log (exp z + sum exp S), P = exp(S - L), and dz = sum exp(z - L) (dL - D) over the rows of its head.
Nothing is tiled and nothing is clever; one head's matrices are held at a time, or some of their rows. The same lines
run in a lower precision give "the plain formula in that dtype", whose error is the yardstick for all others
(`cuflash.testing`).

Arrays are NumPy's or CuPy's, and so are the results. Of CuPy's, score_mod, mask_mod, dropout's random bits and fp8
numbers are evaluated on the host, since NumPy defines their values. `scores`, `softmax`, `output` and `gradients` take
matrices with any batch axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuflash.arrays.array_info import FLOAT8, user_shape, view_4d, view_rows
from cuflash.arrays.dlpack import module_of, on_host
from cuflash.arrays.fp8 import Float8Array
from cuflash.score_mod.evaluation import clamped, evaluate
from cuflash.spec.dropout import kept_weights
from cuflash.spec.inputs import NAMES, NUMBERS, OPTIONAL_INPUTS
from cuflash.spec.outputs import DEFAULT_NEED, ROW_REDUCTION_ROWS
from cuflash.spec.problem import Problem, scales_of_rows

if TYPE_CHECKING:
    from cuflash.spec.inputs import OptionalArrays

Array = NDArray[Any]  # or CuPy's
Heads = Iterable[tuple[int, int]]  # (batch entry or sequence, head of q)

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
    heads: Heads | None = None,
    rows_at_once: int | None = None,
    want: Collection[str] = (),
    **terms: Any,
) -> tuple[Array, ...]:
    """Attention by the plain formula.

    Parameters
    ----------
    problem : Problem
        From `cuflash.spec.problem.make_problem` on the same arrays.
    q, k, v : numpy.ndarray or cupy.ndarray
        As `cuflash.attention` takes them.
    seed, offset : int, optional
        With dropout: which weights are dropped, as `cuflash.dropout_mask` says.
    dtype : dtype, default float64
        Precision to compute in. float64 is the oracle, and longdouble that of float64 itself, with 64 bits on x86 but
        no BLAS. For float16 and bfloat16, products accumulate and the softmax runs in float32, and the weights are
        rounded to `dtype` before they meet `v`: the plain 16-bit implementation.
    heads : iterable of (int, int), optional
        The heads to compute, each a batch entry (a packed sequence) and a head of `q`; by default all. Results of other
        heads are 0, and their lse -inf.
    rows_at_once : int, optional
        How many rows of a head's scores to hold at a time; by default all.
    want : collection of str, optional
        Names of `outputs.ROW_REDUCTIONS` to give, too.
    **terms : numpy.ndarray or cupy.ndarray, optional
        bias, mask and so on, as `cuflash.attention` takes them, and what functions read. Entries of
        `kv_lengths` outside 0..seqlen_k are clamped.

    Returns
    -------
    out : numpy.ndarray or cupy.ndarray
        Shape `problem.out_shape`, of `dtype`.
    lse : numpy.ndarray or cupy.ndarray
        Natural logarithm of the sum of exponentials, shape `problem.lse_shape`, float64 or float32 with `dtype`.
    *reductions : numpy.ndarray or cupy.ndarray
        Those that are wanted, in the order of `outputs.ROW_REDUCTIONS`, like lse.

    See Also
    --------
    backward : Its gradients.
    cuflash.FlashAttention.forward : The same in tiles.

    References
    ----------
    Dao, Fu, Ermon, Rudra, Re: FlashAttention (2022), https://arxiv.org/abs/2205.14135, section 2.1 and appendix B.
    """
    xp, dtype, compute = module_of(q), np.dtype(dtype), compute_dtype(dtype)
    out = xp.zeros((problem.array_batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v), dtype)
    lse = xp.full(problem.lse_shape, -np.inf, compute)
    wanted = (row for row in ROW_REDUCTION_ROWS if row.name in want)  # also of rows of no sequence
    reductions = {row.name: xp.full(problem.lse_shape, row.of_no_keys, compute) for row in wanted}
    for head in each_head(problem, q, k, v, compute, seed, offset, heads=heads, rows_at_once=rows_at_once, **terms):
        with np.errstate(all="ignore"):
            out[head.index] = output(head.P, head.Z, head.V, dtype).astype(dtype)
        view_rows(lse)[head.index] = head.L
        for name, x in reductions.items():
            view_rows(x)[head.index] = getattr(head, name)[:, 0]
    return as_caller(problem, out), lse, *reductions.values()


def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    dmax: Array | None = None,
    dentropy: Array | None = None,
    need: Collection[str] = DEFAULT_NEED,
    seed: int | None = None,
    offset: int | None = None,
    dtype: DTypeLike = np.float64,
    heads: Heads | None = None,
    rows_at_once: int | None = None,
    **terms: Any,
) -> tuple[Array, ...]:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` by the plain formula.

    Parameters
    ----------
    problem : Problem
        As `forward` takes it.
    dout : numpy.ndarray or cupy.ndarray
        Gradient with respect to out, of shape `problem.out_shape`.
    q, k, v : numpy.ndarray or cupy.ndarray
        As `forward` takes them.
    dlse : numpy.ndarray or cupy.ndarray, optional
        Gradient with respect to lse, of shape `problem.lse_shape`; without effect in rows that attend to no
        key.
    dmax, dentropy : numpy.ndarray or cupy.ndarray, optional
        Those with respect to the reductions, likewise.
    need : collection of str
        The gradients that are wanted.
    seed, offset : int, optional
        As `forward` takes them.
    dtype : dtype, default float64
        As `forward` takes it. In a 16-bit dtype the output, the weights and the gradient of the scores are rounded
        to it before each use, and gradients are summed over a group of heads in float32.
    heads : iterable of (int, int), optional
        As `forward` takes them: gradients are those of their part of the sum.
    rows_at_once : int, optional
        As `forward` takes it.
    **terms : numpy.ndarray or cupy.ndarray, optional
        As `forward` takes them.

    Returns
    -------
    tuple of numpy.ndarray or cupy.ndarray
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

    See Also
    --------
    forward : The results whose gradients these are.
    cuflash.FlashAttention.backward : The same in tiles.

    References
    ----------
    Dao, Fu, Ermon, Rudra, Re: FlashAttention (2022), https://arxiv.org/abs/2205.14135, section 2.1 and appendix B.
    """
    xp, dtype, compute = module_of(q), np.dtype(dtype), compute_dtype(dtype)
    has_dm, has_dH = dmax is not None, dentropy is not None
    dlse, dmax, dentropy = (xp.zeros(problem.lse_shape) if x is None else x for x in (dlse, dmax, dentropy))
    dq, dk, dv = (xp.zeros(view_4d(x, problem.layout).shape, compute) for x in (q, k, v))
    dsinks = xp.zeros(problem.num_heads, compute)
    of_scores = ScoreSums(problem, terms, compute, xp)
    given = terms | ({"dmax": dmax} if has_dm else {})
    score_args = {f"d{name}": xp.zeros(operand.shape, compute) for name, operand in problem.score_args}
    for head in each_head(problem, q, k, v, compute, seed, offset, heads=heads, rows_at_once=rows_at_once, **given):
        dO = cast(view_4d(dout, problem.layout)[head.index], compute)
        dL, dm, dH = (
            _replace(cast(view_rows(x)[head.index], compute), xp.isneginf(head.L), 0)[:, None]
            for x in (dlse, dmax, dentropy)
        )
        with np.errstate(all="ignore"):
            O = _round(output(head.P, head.Z, head.V, dtype), dtype)  # noqa: E741 (the paper's letter)
            D = (dO * O).sum(axis=-1, keepdims=True)
            operands = (head.Q, head.K, head.V, dO, head.P, D)
            of_entropy, of_sink = (x * dH if has_dH else 0 for x in (head.of_log(), log_of(head.P_sink, head.entropy)))
            dQ, dK, dV, dS_bias, dS = gradients(
                problem.scale,
                *operands,
                dtype,
                Z=head.Z,
                cap_slope=head.cap_slope,
                dL=dL - of_entropy,
                dS_max=dm * head.is_first_max if has_dm else None,
            )
            dq[head.index] += dQ
            dk[head.index_kv] += dK
            dv[head.index_kv] += dV
            dsinks[head.index[1]] += (head.P_sink * (dL - of_sink - D)).sum()
            if not of_scores.totals.keys().isdisjoint(need):
                of_scores.add(head, _round(dS_bias, dtype), dS * head.QK)
            for name, entry, derivative in head.reads:
                xp.add.at(score_args[f"d{name}"].reshape(-1), entry, _round(dS_bias, dtype) * derivative)
    with np.errstate(all="ignore"):
        results = {
            name: as_caller(problem, x if name in problem.wide else x.astype(dtype))
            for name, x in zip(DEFAULT_NEED, (dq, dk, dv), strict=True)
        }
        for name, total in of_scores.totals.items():
            of_term = getattr(terms.get(name[1:]), "dtype", None)
            is_input = of_term is not None and of_term.itemsize == dtype.itemsize
            results[name] = total.value.astype(dtype if is_input else compute)
    results["dsinks"] = dsinks
    results |= score_args
    return tuple(results[name] for name in problem.gradients if name in need)


class BroadcastSum:
    """The gradient of something that is broadcast to `shape`: zeros of its shape, that sums over the other axes."""

    def __init__(self, of: Array | None, shape: tuple[int, ...], compute: np.dtype[Any], xp: Any) -> None:
        self.value = xp.zeros(() if of is None else of.shape, compute)
        missing = (None,) * (len(shape) - self.value.ndim)
        self.view = self.value[missing] if missing else self.value
        self.shape, self.xp = shape, xp

    def add(self, index: tuple[int, ...], addend: Array, first_row: int) -> None:
        """Add an array that has `index` on the first axes, and on the others the rows from `first_row` on."""
        own = (slice(i, i + 1) if n > 1 else slice(None) for i, n in zip(index, self.view.shape, strict=False))
        index_here = (*own, ...)
        here = self.view[index_here]
        if len(self.shape) == len(index):
            here += addend.sum()
            return
        # Keys past kv_lengths add nothing; they come last.
        whole = self.xp.zeros(self.shape[len(index) :], addend.dtype)
        whole[first_row : first_row + addend.shape[0], : addend.shape[1]] = addend
        summed = tuple(axis for axis, n in enumerate(here.shape[len(index) :]) if n == 1)
        here += whole.sum(axis=summed, keepdims=True) if summed else whole


class ScoreSums:
    """`outputs.SCORE_GRADIENTS`: gradients of scores, times derivatives of the scores, summed over all heads."""

    def __init__(self, problem: Problem, terms: Mapping[str, Any], compute: np.dtype[Any], xp: Any = np) -> None:
        self.totals = {f"d{name}": BroadcastSum(None, (), compute, xp) for name in NUMBERS}
        for term in OPTIONAL_INPUTS:
            if term.gradient_via == "scores":
                shape = tuple(getattr(problem, axis) for axis in term.shapes[-1])
                self.totals[term.gradient] = BroadcastSum(terms.get(term.name), shape, compute, xp)

    def add(self, head: Head, dS: Array, of_scale: Array, power: int = 1) -> None:
        """Add the part of one head: dS times the derivatives, to a power, and the terms of the gradient of scale."""
        for name, derivative in head.derivatives.items():
            total = self.totals[name]
            total.add(head.index_scores[: len(total.shape)], dS * derivative**power, head.first_row)
        self.totals["dscale"].add((), of_scale, head.first_row)


@dataclass(frozen=True, kw_only=True)
class Head:
    """The matrices of one head, of a batch entry or a packed sequence, in the precision of the computation.

    Keys past `kv_lengths` are cut off. Of a head whose rows are computed in chunks, those of one chunk.
    """

    index: tuple[int, int, slice]  # of q, out, lse and their gradients: [batch, head, queries]
    index_kv: tuple[int, int, slice]  # of k, v and their gradients: [batch, head of k and v, keys]
    index_scores: tuple[int, int]  # of bias, slopes and their gradients: [batch entry or sequence, head]
    first_row: int  # the first of these rows, counted from that of the batch entry or sequence
    Q: Array
    K: Array
    V: Array
    P: Array  # weights, (seqlen_q, keys); a row that attends to no key is zero
    P_sink: Array  # weight of the sink, (seqlen_q, 1); zero without one
    S: Array  # scores, (seqlen_q, keys); -inf where a pair is hidden
    L: Array  # log sum exp of the scores, (seqlen_q,); -inf for such a row
    Z: Array | float  # what dropout multiplies the weights by; 1.0 without it
    cap_slope: Array | float  # derivative of the scores by scale Q K^T; 1.0 without softcap and score_mod
    QK: Array  # Q K^T
    derivatives: dict[str, Array]  # of the scores by their other operands, by the names of these gradients
    reads: list[tuple[str, Array, Array]]  # of arrays that a function reads: name, entries, derivatives by them

    @property
    def max(self) -> Array:
        """The largest score of each row, (seqlen_q, 1); -inf of none."""
        return self.S.max(axis=-1, keepdims=True, initial=-np.inf)  # type: ignore[no-any-return]

    @property
    def is_first_max(self) -> Array:
        """1 where a score is the first of its row that is the largest, else 0."""
        return first_max(self.S).astype(self.S.dtype)  # type: ignore[no-any-return]

    @property
    def entropy(self) -> Array:
        """That of the weights of each row, that of the sink among them, (seqlen_q, 1); 0 of none."""
        of_sink = self.P_sink * log_of(self.P_sink)
        return -(self.P * log_of(self.P)).sum(axis=-1, keepdims=True) - of_sink  # type: ignore[no-any-return]

    def of_log(self) -> Array:
        """log P + H: the derivative of the entropy by the scores is -P times it; 0 where P is."""
        return log_of(self.P, self.entropy)


def first_max(S: Array) -> Array:
    """Whether a score is the first of its row that is the largest; none of a row that attends to no key."""
    is_max = (S.max(axis=-1, keepdims=True, initial=-np.inf) == S) & ~module_of(S).isneginf(S)
    return is_max & (is_max.cumsum(axis=-1) == 1)  # type: ignore[no-any-return]


def log_of(P: Array, offset: Array | float = 0.0) -> Array:
    """log P + offset; 0 where P is."""
    xp = module_of(P)
    return _replace(xp.log(_replace(P, P == 0, 1)) + offset, P == 0, 0)


def each_head(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    compute: DTypeLike,
    seed: int | None = None,
    offset: int | None = None,
    heads: Heads | None = None,
    rows_at_once: int | None = None,
    dmax: Array | None = None,
    **arrays: Any,
) -> Iterator[Head]:
    """Softmax weights of every head, with operands converted to the `compute` dtype.

    `arrays` are the terms, and what score_mod and mask_mod read; `heads` and `rows_at_once` are those of `forward`.
    With `dmax`, the maxima of rows have derivatives, even where a sink leaves them no weight.
    """
    xp = module_of(q)
    terms: OptionalArrays = {name: x for name, x in arrays.items() if name in NAMES}  # type: ignore[assignment]
    q, k, v = (view_4d(_with_dtype(x), problem.layout) for x in (q, k, v))
    q, k, v = (xp.asarray(dequantised(problem, name, x, terms)) for name, x in (("q", q), ("k", k), ("v", v)))
    score_args = {name: on_host(arrays[name]) for name, _ in problem.score_args}
    bias, mask, slopes = _broadcast(problem, terms)
    sinks, block_table = terms.get("sinks"), terms.get("block_table")
    for b, h in np.ndindex(problem.batch, problem.num_heads) if heads is None else heads:
        entry, rows, keys, entry_problem = _part_of(problem, terms, b)
        index_kv = (entry, h // problem.group_size, keys)
        if block_table is None:
            K, V = k[index_kv], v[index_kv]
        else:
            K, V = (_gather(x[:, index_kv[1]], block_table[b], keys.stop) for x in (k, v))
        K, V = cast(K, compute), cast(V, compute)
        num_rows = max(rows.stop - rows.start, 1)
        step = rows_at_once or num_rows
        for first_row in range(0, num_rows, step):
            here = slice(first_row, first_row + step)
            index = (entry, h, slice(rows.start + first_row, min(rows.start + first_row + step, rows.stop)))
            Q = cast(q[index], compute)
            with np.errstate(all="ignore"):
                QK = product(Q, K.T)
                S, cap_slope, derivatives = scores(
                    entry_problem,
                    problem.scale * QK,
                    first_row,
                    slope=None if slopes is None else cast(slopes[b, h], compute),
                    bias=None if bias is None else cast(bias[b, h][here, keys], compute),
                    mask=None if mask is None else mask[b, h][here, keys],
                )
                S, cap_slope, reads = _by_functions(entry_problem, S, first_row, cap_slope, score_args, b, h)
                P, P_sink, L = softmax(S.copy(), -np.inf if sinks is None else cast(sinks[h], compute))
                if problem.has_functions:  # a pair without a gradient contributes nothing, whatever its derivative
                    has_none = _has_no_gradient(P, S, None if dmax is None else view_rows(dmax)[index][:, None])
                    cap_slope = _replace(xp.broadcast_to(xp.asarray(cap_slope, P.dtype), P.shape), has_none, 0)
                    reads = [(name, entry, _replace(x, has_none, 0)) for name, entry, x in reads]
            operands = {"Q": Q, "K": K, "V": V, "P": P, "P_sink": P_sink, "L": L, "QK": QK, "cap_slope": cap_slope}
            operands["S"] = S
            indices = {"index": index, "index_kv": index_kv, "index_scores": (b, h), "first_row": first_row}
            Z = _kept(problem, seed, offset, b, h, first_row, P)
            yield Head(derivatives=derivatives, reads=reads, Z=Z, **indices, **operands)  # type: ignore[arg-type]


def _broadcast(problem: Problem, terms: OptionalArrays) -> tuple[Array | None, Array | None, Array | None]:
    """bias, mask (with the block mask) and slopes, each of every head; None where there is none."""
    shape = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)

    def broadcast(name: str, shape: tuple[int, ...]) -> Array | None:
        x = terms.get(name)
        return None if x is None else module_of(x).broadcast_to(x, shape)

    mask = broadcast("mask", shape)
    if (block_mask := terms.get("block_mask")) is not None:
        in_blocks = module_of(block_mask).broadcast_to(pairs_of_blocks(problem, block_mask), shape)
        mask = in_blocks if mask is None else mask & in_blocks
    return broadcast("bias", shape), mask, broadcast("alibi_slopes", shape[:2])


def _part_of(problem: Problem, terms: OptionalArrays, b: int) -> tuple[int, slice, slice, Problem]:
    """Where batch entry b lies: the index of the arrays' first axis, rows and keys; and the problem of these alone."""
    cu_seqlens_q, cu_seqlens_k = terms.get("cu_seqlens_q"), terms.get("cu_seqlens_k")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        return 0, rows, keys, problem.of_sequence(rows.stop - rows.start, keys.stop - keys.start)
    rows, kv_lengths = slice(0, problem.seqlen_q), terms.get("kv_lengths")
    if kv_lengths is None:
        return b, rows, slice(0, problem.seqlen_k), problem
    length = min(max(int(kv_lengths[b]), 0), problem.seqlen_k)
    return b, rows, slice(0, length), problem.aligned_to(length)


def _has_no_gradient(P: Array, S: Array, dm: Array | None) -> Array:
    """Pairs without weight, but for the maxima of rows that have a gradient."""
    return P == 0 if dm is None else (P == 0) & ~(first_max(S) & (dm != 0))


def _kept(
    problem: Problem, seed: int | None, offset: int | None, batch: int, head: int, first_row: int, P: Array
) -> Array | float:
    """Z of rows of one head whose weights are P."""
    if not problem.dropout:
        return 1.0
    origin = problem.origin
    first_row += origin[0]
    rows, keys = range(first_row, first_row + P.shape[0]), range(origin[1], origin[1] + P.shape[1])
    number = origin.head + batch * origin.num_heads + head
    kept = module_of(P).asarray(kept_weights(problem.dropout, seed, offset, number, rows, keys))
    return kept.astype(P.dtype) * P.dtype.type(problem.kept_scale)


def dequantised(problem: Problem, name: str, x: Array, terms: Mapping[str, Any]) -> Array:
    """q, k or v, (batch, heads, rows, dim), as the numbers it stands for: fp8 numbers times their scales."""
    if getattr(problem, name).dtype not in FLOAT8:
        return x
    with np.errstate(all="ignore"):
        scale = terms.get(f"{name}_scale")
        scales = scales_of_rows(problem, f"{name}_scale", None if scale is None else on_host(scale))
        return x.astype(np.float64) * (1.0 if scales is None else scales[..., None].astype(np.float64))


def weights_from_lse(
    problem: Problem, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dtype: DTypeLike
) -> tuple[Array, Array, Array]:
    """P, dP and D of rows and some of their keys, 2-D arrays of one head, where lse stands for the other keys."""
    dO, Q, K, V, O, L = (x.astype(dtype) for x in (dout, q, k, v, out, lse))  # noqa: E741 (the paper's letter)
    S, *_ = scores(problem, problem.scale * product(Q, K.T))
    return np.exp(S - L[:, None]), product(dO, V.T), (dO * O).sum(axis=-1, keepdims=True)


def pairs_of_blocks(problem: Problem, block_mask: Array) -> Array:
    """A block mask as a mask of pairs (query, key): entry [i, j] is block_mask[i // block rows, j // block keys]."""
    rows, keys = problem.block_size
    xp = module_of(block_mask)
    i, j = xp.arange(problem.seqlen_q), xp.arange(problem.seqlen_k)
    return block_mask[..., (i // rows)[:, None], j // keys]


def _gather(pool: Array, table: Array, length: int) -> Array:
    """The first `length` rows of the pages of a table; `pool` has (num_pages, page_size, dim) of one head."""
    page_size, dim = pool.shape[1:]
    num_pages = -(-length // page_size)
    return pool[table[:num_pages]].reshape(num_pages * page_size, dim)[:length]


def scores(
    problem: Problem,
    S: Array,
    first_row: int = 0,
    *,
    slope: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
) -> tuple[Array, Array | float, dict[str, Array]]:
    """S of scale Q K^T, rows from `first_row` on, with -inf at hidden keys; cap_slope and derivatives, as in `Head`."""
    xp = module_of(S)
    cap_slope: Array | float = 1.0
    derivatives = {}
    if problem.softcap is not None:
        X = S / problem.softcap
        T = xp.tanh(X)
        S, cap_slope = problem.softcap * T, 1 - T * T
        derivatives["dsoftcap"] = T - X * cap_slope
    i, j = xp.arange(first_row, first_row + S.shape[-2])[:, None], xp.arange(S.shape[-1])
    if slope is not None:
        distance = xp.abs(j - i - problem.diagonal).astype(S.dtype)
        S = S - slope * distance
        derivatives["dalibi_slopes"] = -distance
    if bias is not None:
        S = S + bias
        derivatives["dbias"] = xp.ones((1, 1), S.dtype)
    if problem.window_left is not None:
        S = _replace(S, j < i + (problem.diagonal - problem.window_left), -np.inf)
    if problem.window_right is not None:
        S = _replace(S, j > i + (problem.diagonal + problem.window_right), -np.inf)
    if mask is not None:
        S = _replace(S, ~mask, -np.inf)
    return S, cap_slope, derivatives


def _by_functions(
    problem: Problem,
    S: Array,
    first_row: int,
    slope: Array | float,
    score_args: Mapping[str, Array],
    batch: int,
    head: int,
) -> tuple[Array, Array | float, list[tuple[str, Array, Array]]]:
    """Scores of one head as score_mod and mask_mod leave them, their derivative by S, and `Head.reads`.

    Values are those of the function itself, called on NumPy arrays; in float32, of its expression. S already has -inf
    where other options hide a pair.
    """
    if not problem.has_functions:
        return S, slope, []
    xp, S = module_of(S), on_host(S)
    i, j = np.arange(first_row, first_row + S.shape[0])[:, None], np.arange(S.shape[1])[None, :]
    inputs: dict[str, Any] = {"s": S, "i": i, "j": j, "head": head, "batch": batch}
    reads, hidden = [], np.isneginf(S)
    if problem.score is not None:
        inputs["s"] = S = _replace(S, hidden, 0)
        program = problem.program.on_numpy()
        loads = [(name, load) for name, found in program.loads.items() for load in found]
        nodes = [x for x in (program.by_s, *(load.derivative for _, load in loads)) if x is not None]
        by_s, *others = evaluate(nodes, inputs, score_args, S.dtype)
        slope = xp.asarray(by_s)
        for (name, load), derivative in zip(loads, others, strict=True):
            shape, entry = score_args[name].shape, np.zeros(S.shape, np.int64)
            indices = evaluate(load.at.args, inputs, score_args, S.dtype)
            for index, length in zip(clamped(indices, shape), shape, strict=True):
                entry = entry * length + index
            derivative = np.broadcast_to(derivative, S.shape).astype(S.dtype)
            reads.append((name, xp.asarray(entry), xp.asarray(derivative)))
        if S.dtype == np.float32 and program.score is not None:
            # NumPy makes float64 of an integer times a float32: the formula in float32 is that of the expression.
            (found,) = evaluate((program.score,), inputs, score_args, S.dtype)
        else:
            found = problem.score.on_numpy()(inputs, score_args, S.dtype)
        S = np.broadcast_to(found, S.shape).astype(S.dtype)
    if problem.mask_function is not None:
        hidden = hidden | ~np.broadcast_to(problem.mask_function(inputs, score_args, S.dtype), S.shape).astype(bool)
    return xp.asarray(_replace(S, hidden, -np.inf)), slope, reads


def softmax(S: Array, sink: Array | float = -np.inf) -> tuple[Array, Array, Array]:
    """P, in the memory of S, the weight of the sink and L; a row of nothing but -inf has P = 0 and L = -inf."""
    xp = module_of(S)
    m = S.max(axis=-1, keepdims=True) if S.shape[-1] else xp.full((*S.shape[:-1], 1), -np.inf, S.dtype)
    m = xp.maximum(m, sink)
    m = _replace(m, m == -np.inf, 0)
    S -= m
    P, P_sink = xp.exp(S, out=S), xp.exp(sink - m)
    l = P.sum(axis=-1, keepdims=True) + P_sink  # noqa: E741 (the paper's letter)
    L = m + xp.log(l)
    l = _replace(l, l == 0, 1)  # noqa: E741
    P /= l
    return P, P_sink / l, L[..., 0]


def output(P: Array, Z: Array | float, V: Array, dtype: np.dtype[Any]) -> Array:
    """O, of weights that are rounded to dtype."""
    return product(_round(_times(P, Z), dtype), V)


def gradients(
    scale: float,
    Q: Array,
    K: Array,
    V: Array,
    dO: Array,
    P: Array,
    D: Array,
    dtype: np.dtype[Any],
    *,
    Z: Array | float = 1.0,
    cap_slope: Array | float = 1.0,
    dL: Array | None = None,
    dS_max: Array | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """dQ, dK and dV of these rows; dS without cap_slope, and with it, rounded to dtype.

    dL is what P multiplies besides dP - D, and dS_max what dS has besides P times that.
    """
    dS = _times(product(dO, V.swapaxes(-1, -2)), Z)
    dS -= D
    if dL is not None:
        dS += dL
    dS_bias = P * dS
    if dS_max is not None:
        dS_bias += dS_max
    dS = _round(_times(dS_bias, cap_slope), dtype)
    dQ, dK = scale * product(dS, K), scale * product(dS.swapaxes(-1, -2), Q)
    dV = product(_round(_times(P, Z), dtype).swapaxes(-1, -2), dO)
    return dQ, dK, dV, dS_bias, dS


def product(A: Array, B: Array) -> Array:
    """A B. No BLAS multiplies long doubles: if there are many, rows of A are dealt to the cores."""
    if A.dtype != np.longdouble:
        return A @ B
    columns = np.asfortranarray(B)
    if A.size * B.shape[1] < LONG_PRODUCT:
        return A @ columns
    with ThreadPoolExecutor() as pool:
        products = pool.map(lambda rows: np.ascontiguousarray(rows) @ columns, np.array_split(A, min(len(A), 64)))
        return np.concatenate(list(products))


def cast(x: Array, dtype: DTypeLike) -> Array:
    """x in dtype, bfloat16 by way of float32, the only cast that CuPy has for it."""
    return (x.astype(np.float32) if x.dtype.name == "bfloat16" else x).astype(dtype)


def compute_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """dtype of sums and softmax: float64 for float64, longdouble for itself, else float32."""
    return np.dtype(dtype if np.dtype(dtype) in (np.float64, np.longdouble) else np.float32)


def as_caller(problem: Problem, x: Array) -> Array:
    """A (batch, heads, seqlen, dim) result in the caller's layout and number of axes."""
    batch, heads, seqlen, dim = x.shape
    shape = user_shape(batch, heads, seqlen, dim, problem.ndim, problem.layout)
    return module_of(x).ascontiguousarray(x.swapaxes(1, 2) if problem.layout == "bshd" else x).reshape(shape)


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


def _with_dtype(x: Array) -> Array:
    """An array of fp8 numbers on the host if it is CuPy's, which has no such dtype; others as they are."""
    return on_host(x.bits).view(x.dtype) if isinstance(x, Float8Array) else x


def _round(x: Array, dtype: np.dtype[Any]) -> Array:
    """x rounded to dtype, in the dtype it had."""
    return x if x.dtype == dtype else x.astype(dtype).astype(x.dtype)


def _times(x: Array, factor: Array | float) -> Array:
    """x times what is 1.0 where there is nothing to multiply by."""
    return x if isinstance(factor, float) else x * factor


def _replace(x: Array, where: Array, value: float) -> Array:
    return module_of(x).where(where, x.dtype.type(value), x)  # type: ignore[no-any-return]
