"""What reductions of attention weights should be, by the oracle rule: those of float32 for numbers of 16 bits, too.

A column sum is dv of one column of dout, and weights are dv where dout is the unit matrix: the rule of reductions is
that of dv.
"""

from dataclasses import replace
from typing import Any

import numpy as np

import cuflash
import cuflash.testing as ct
from cuflash.arrays.array_info import numpy_dtype
from cuflash.spec.outputs import TAKEN_BY_BACKWARD
from cuflash.spec.problem import make_problem

SCALES = ("q_scale", "k_scale", "v_scale")


def axis_of(case, axis):
    """An axis of q, counted from the end of layout "bhsd"."""
    return {-3: -2, -2: -3}.get(axis, axis) if case.layout == "bshd" and case.ndim > 2 else axis


def inputs_of(case, convert=np.asarray):
    """q, k and the optional inputs of a case, by name."""
    arrays, others = case.arrays(convert), ("v", "v_scale", *TAKEN_BY_BACKWARD)
    return {name: x for name, x in arrays.items() if name not in others}


def attention_of(case):
    attn: Any = cuflash.FlashAttention(**case.keywords)
    return attn


def lse_of(attn, arrays):
    given = {name: x for name, x in arrays.items() if name not in ("q", "k")}
    random = {"seed": 0, "offset": 0} if attn.options.dropout else {}
    return attn.forward(arrays["q"], arrays["k"], None, **given, **random).lse


class Expected:
    """The yardsticks of a case, with the key/value heads repeated, and no fp8, pages or numbers of 16 bits."""

    def __init__(self, case, weights, looser=1.0):
        self.looser = looser
        arrays = inputs_of(case)
        if case.page_size:
            arrays = ct.gather_pages(arrays | {"v": arrays["k"]}, case.layout)
            arrays = {name: x for name, x in arrays.items() if name not in ("v", "v_scale", "block_table")}
        own = {name: _widened(case, name, x, arrays) for name, x in arrays.items() if name not in SCALES}
        if case.ndim > 2 and case.num_heads_kv:
            own["k"] = np.repeat(own["k"], case.num_heads // case.num_heads_kv, axis=axis_of(case, -3))
        self.case, self.arrays, self.dtype = case, own, own["q"].dtype
        self.options = replace(case.options, dropout=0.0)
        if case.page_size and case.causal is True:  # the diagonal follows the lengths, as without pages it may not
            self.options = replace(self.options, causal="lengths")
        self.weights = weights.astype(self.dtype)

    def _yardsticks(self, **more):
        arrays = self.arrays | more
        inputs = ("q", "k", "v", "dout")
        problem = make_problem(
            self.options, *(arrays[x] for x in inputs[:3]), **{k: x for k, x in arrays.items() if k not in inputs}
        )
        return ct.yardsticks(problem, arrays)

    def sums(self):
        """Expected column sums, their tolerance, and which are exactly zero: (..., heads, keys)."""
        return tuple(x[..., 0] for x in self._gradients_of_values(self.weights[..., None]))

    def weight_matrix(self):
        """Expected weights and their tolerance, (..., heads, queries, keys)."""
        queries = self.weights.shape[-1]
        unit = np.broadcast_to(np.eye(queries, dtype=self.dtype), (*self.weights.shape, queries))
        own, tolerance, _ = self._gradients_of_values(unit)
        return own.swapaxes(-2, -1).astype(np.float64), tolerance.swapaxes(-2, -1)

    def _gradients_of_values(self, dout):
        """Expected dv for such a dout (..., heads, queries, columns), its tolerance, and where it is exactly zero."""
        dout = dout if self.case.ndim > 2 else dout.reshape(dout.shape[-2:])
        v = np.zeros((*self.arrays["k"].shape[:-1], dout.shape[-1]), self.dtype)
        own = self._yardsticks(v=v, dout=np.ascontiguousarray(self._by_heads(dout)))["dv"]
        found = (own.expected, own.tolerance * self.looser, own.zero)
        return [self._by_heads(np.broadcast_to(x, own.expected.shape)) for x in found]

    @property
    def _swaps(self):
        return self.case.layout == "bshd" and self.case.ndim > 2

    def _by_heads(self, x):
        return x.swapaxes(-3, -2) if self._swaps else x


def _widened(case, name, x, arrays):
    if name in ("q", "k") and x.dtype.name.startswith("float8"):
        dtype = case.problem.softmax_dtype
        return cuflash.dequantize(x, arrays.get(f"{name}_scale"), dtype=dtype, layout=case.layout)
    is_half = x.dtype in (np.float16, numpy_dtype("bfloat16"))
    return x.astype(np.float32) if is_half else x


def judge(case, weights, sums=None, largest=None, top=None, looser=1.0):
    """Hold column sums, the column maximum, and indices and weights of the strongest keys against the oracle.

    Tolerances are so many times as large: 1, unless scores are products of TF32.
    """
    expected = Expected(case, weights, looser)
    if sums is not None:
        own, tolerance, zero = expected.sums()
        assert sums.shape == own.shape
        assert not sums[zero].any()
        _assert_within(sums, own, tolerance)
    if largest is None and top is None:
        return
    matrix, tolerance = expected.weight_matrix()
    if largest is not None:
        assert largest.shape == (*matrix.shape[:-2], matrix.shape[-1])
        assert (largest <= (matrix + tolerance).max(axis=-2, initial=0)).all()
        assert (largest >= (matrix - tolerance).max(axis=-2, initial=0)).all()
    if top is not None:
        _judge_top(top[0], top[1], matrix, tolerance)
        if case.distinct_keys and not (case.bias or case.alibi_slopes or case.k_scale in ("block", "token")):
            _judge_ties(top[0], matrix, case.distinct_keys)


def _assert_within(x, expected, tolerance):
    errors = np.abs(x - expected)
    assert (errors <= tolerance).all(), f"{(errors / np.maximum(tolerance, 1e-300)).max()} of the tolerance"


def _judge_top(indices, weights, matrix, tolerance):
    count = indices.shape[-1]
    assert indices.dtype == np.int32
    assert indices.shape == weights.shape == (*matrix.shape[:-1], count)
    assert (indices < matrix.shape[-1]).all()
    is_key = indices >= 0
    assert not weights[~is_key].any()
    assert (is_key.sum(axis=-1) >= np.minimum(count, (matrix > 0).sum(axis=-1))).all(), "fewer keys than there are"
    assert (is_key[..., 1:] <= is_key[..., :-1]).all()  # nothing follows where there are no more keys
    assert (weights[..., 1:] <= weights[..., :-1]).all()
    ordered = np.sort(np.where(is_key, indices, -1 - np.arange(count)), axis=-1)
    assert (np.diff(ordered, axis=-1) > 0).all(), "a key twice"
    at = np.maximum(indices, 0)
    own, allowed = (np.take_along_axis(x, at, -1) if x.shape[-1] else np.zeros(at.shape) for x in (matrix, tolerance))
    _assert_within(np.where(is_key, weights, 0), np.where(is_key, own, 0), np.where(is_key, allowed, 0))
    is_taken = (indices[..., None] == np.arange(matrix.shape[-1])).any(axis=-2)
    rest = np.where(is_taken, 0, matrix - tolerance)
    allowed = np.where(is_key, allowed, 0).max(axis=-1, initial=0)
    assert (rest.max(axis=-1, initial=0) <= weights[..., -1] + allowed).all(), "a key is left out"


def _judge_ties(indices, matrix, distinct):
    """Of keys that are alike, every `distinct` keys, a row has the first ones that it attends to, in order."""
    keys = np.arange(matrix.shape[-1])
    for row, weights in zip(indices.reshape(-1, indices.shape[-1]), matrix.reshape(-1, keys.size), strict=True):
        for which in range(distinct):
            alike = keys[(weights > 0) & (keys % distinct == which)]
            own = row[(row >= 0) & (row % distinct == which)]
            assert (own[: alike.size] == alike[: own.size]).all(), "of equal scores a later key"


def weights_of(case, lse):
    """Those of the rows of a case: all 1 for odd seeds, which are the same as none."""
    weights = np.random.default_rng(case.seed).standard_normal(lse.shape).astype(lse.dtype)
    return np.ones_like(weights) if case.seed % 2 else weights


def weights_reduced(case, convert=np.asarray, keys_of=lambda k: k, count=16, **options):
    """The weights of rows, and by the interface the column sums, the column maximum and the strongest keys of a case.

    `keys_of` makes what a call takes of k.
    """
    attn: Any = cuflash.FlashAttention(**case.keywords, **options)
    arrays = inputs_of(case, convert)
    others = {name: x for name, x in arrays.items() if name not in ("q", "k")}
    lse = lse_of(attn, arrays)
    weights = weights_of(case, ct.to_numpy(lse))
    inputs = (arrays["q"], keys_of(arrays["k"]), lse)
    sums = attn.column_sums(*inputs, None if case.seed % 2 else convert(weights), **others)
    largest = attn.column_max(*inputs, **others)
    return weights, sums, largest, attn.top_keys(*inputs, count, **others)


def given_of(case):
    """The arrays of a case, with lse and weights of its rows."""
    arrays = inputs_of(case)
    lse = lse_of(attention_of(case), arrays)
    weights = np.random.default_rng(case.seed).standard_normal(lse.shape).astype(lse.dtype)
    return arrays | {"lse": lse, "weights": weights}


def gradient_problem(dtype):
    """A case, dsums, q, k, lse and weights, and the gradients that `judge_gradients` knows."""
    case = ct.Case(
        seqlen_q=150, seqlen_k=230, batch=2, num_heads=4, num_heads_kv=2, head_dim=64, dtype=dtype, causal=True
    )
    arrays, rng = inputs_of(case), np.random.default_rng(0)
    lse = lse_of(attention_of(case), arrays)
    dsums = rng.standard_normal((*lse.shape[:-1], case.seqlen_k), np.float32)
    weights = rng.standard_normal(lse.shape, np.float32)
    return case, (dsums, arrays["q"], arrays["k"], lse, weights), ("dq", "dk", "dscale", "dlse", "dweights")


def judge_gradients(case, weights, dsums, found):
    """Hold gradients of column sums to what the rule leaves each weight: errors of weights add up.

    The case has no options but bounds, and layout "bhsd". dS is P w dsums, because lse is an input of its own. The
    passes that make gradients take w and dsums in the dtype of q, and so is dS for its products: three roundings, each
    by half a unit of that dtype.
    """
    expected = Expected(case, weights)
    p, p_tolerance = expected.weight_matrix()
    q, k = (expected.arrays[name].astype(np.float64) for name in "qk")
    scale, w, d = case.problem.scale, weights.astype(np.float64)[..., None], dsums.astype(np.float64)[..., None, :]
    ds, s = p * w * d, q @ k.swapaxes(-2, -1)
    eps = float(np.finfo(inputs_of(case)["q"].dtype).eps)
    tolerance = p_tolerance * abs(w * d) + 3 * eps / 2 * abs(ds)
    groups = (*k.shape[:-3], case.num_heads_kv, -1, *k.shape[-2:])
    right = {
        "dq": (scale * ds @ k, scale * tolerance @ abs(k)),
        "dk": tuple(
            scale * (x.swapaxes(-2, -1) @ y).reshape(groups).sum(axis=-3) for x, y in ((ds, q), (tolerance, abs(q)))
        ),
        "dscale": (np.sum(ds * s), np.sum(tolerance * abs(s))),
        "dlse": (-ds.sum(axis=-1), tolerance.sum(axis=-1)),
        "dweights": ((p * d).sum(axis=-1), ((p_tolerance + eps * p) * abs(d)).sum(axis=-1)),
    }
    for name, x in found.items():
        value, allowed = right[name]
        rounding = float(np.finfo(x.dtype).eps) * abs(value)
        _assert_within(x.astype(np.float64), value, allowed + rounding)
