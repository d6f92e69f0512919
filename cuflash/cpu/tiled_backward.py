"""dq, dk and dv by tiles of NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import tiles
from cuflash.cpu.cap import has_cap
from cuflash.cpu.exponentials import exponential
from cuflash.cpu.jobs import Workspace, run
from cuflash.problem import Problem

Array = NDArray[Any]
MAX_RANGES = 16  # ranges of keys of a head, for as many threads; each takes the memory of a dq


def write(
    call: tiles.Call,
    threads: int,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
) -> None:
    """Write those of dq, dk and dv that there are arrays for."""
    problem = call.problem
    groups = tiles.heads_by_length(problem, problem.num_heads_kv, call.kv_lengths)
    # A job is a range of keys of some heads: all keys, unless that leaves threads idle. Every range makes a dq of its
    # own, and these are added in order, which is repeatable, and linear in memory.
    bounds = _equal_key_ranges(problem, _count_ranges(threads, problem.batch * problem.num_heads_kv))
    partial_dqs: list[Array | None] = [dq] * (len(bounds) - 1)
    if dq is not None and len(bounds) > 2:
        partial_dqs = list(np.zeros((len(bounds) - 1, *dq.shape), call.dtype))
    jobs = [
        (heads, range(min(j0, group.num_keys), min(j1, group.num_keys)), partial_dq)
        for group in groups
        for heads in group.split(call.tile // max(1, problem.seqlen_q * group.num_keys), 4 * threads)
        for j0, j1, partial_dq in zip(bounds[:-1], bounds[1:], partial_dqs, strict=True)
    ]
    for group in groups:
        for of_keys in (dk, dv):
            if of_keys is not None:
                of_keys[group.batch, group.head, group.num_keys :] = 0
    run(lambda *job: _compute_keys(call, dk, dv, *job), jobs, threads, call.dtype)
    if dq is not None and len(bounds) > 2:
        with np.errstate(all="ignore"):
            for head in np.ndindex(dq.shape[:2]):
                dq[head] = sum(partial_dq[head] for partial_dq in partial_dqs if partial_dq is not None)


def _count_ranges(threads: int, num_heads: int) -> int:
    """Into how many ranges to cut the keys of every head, so that all threads have the same number of them."""
    if num_heads >= 4 * threads or num_heads == 0:
        return 1
    return min(threads // math.gcd(threads, num_heads), MAX_RANGES)


def _equal_key_ranges(problem: Problem, count: int) -> list[int]:
    """Bounds of ranges of keys that are seen by about equally many rows."""
    last = problem.seqlen_k
    if count == 1 or last == 0:
        return [0, last]
    beyond = problem.seqlen_q + problem.seqlen_k
    left, right = (beyond if x is None else x for x in (problem.window_left, problem.window_right))
    keys = np.arange(last) - problem.diagonal
    first_row, stop_row = (np.clip(x, 0, problem.seqlen_q) for x in (keys - right, keys + left + 1))
    seen = np.cumsum(np.maximum(stop_row - first_row, 0))
    inner = np.searchsorted(seen, seen[-1] * np.arange(1, count) / count)
    inner = (inner + tiles.KEY_BLOCK - 1) // tiles.KEY_BLOCK * tiles.KEY_BLOCK
    return [0, *np.unique(inner[(inner > 0) & (inner < last)]).tolist(), last]


def _compute_keys(
    call: tiles.Call,
    dk: Array | None,
    dv: Array | None,
    workspace: Workspace,
    heads: tiles.Heads,
    span: range,
    dq: Array | None,
) -> None:
    """Compute dk and dv of a span of the keys of some heads of k and v, and what that span contributes to dq."""
    call = call.aligned_to(heads.num_keys)
    problem = call.problem
    k, v = (call.stage(x, heads, span, ones=1) for x in (call.k, call.v))
    dk_sum = None if dk is None else np.zeros_like(k[:, :, :-1])
    dv_sum = None if dv is None else np.zeros_like(v[:, :, :-1])
    for member in range(problem.group_size):
        group = tiles.Heads(heads.batch, heads.head * problem.group_size + member, heads.num_keys)
        for i in range(0, problem.seqlen_q, call.query_tile):
            rows = range(i, min(i + call.query_tile, problem.seqlen_q))
            queries = BackwardQueries(call, group, rows)
            key_tile = call.tile // (heads.count * queries.padded) // tiles.KEY_BLOCK * tiles.KEY_BLOCK
            for tile in tiles.key_tiles(span.start, span.stop, tiles.clamp(key_tile, tiles.KEY_BLOCK, tiles.KEY_TILE)):
                for keys in tile.seen_by(queries).runs(call, queries):
                    visible = tiles.visible_scores(call, queries, keys)
                    if visible is False:
                        continue
                    k_blocks, v_blocks = (keys.blocks(x, span.start) for x in (k, v))
                    dk_blocks, dv_blocks = (None if x is None else keys.blocks(x, span.start) for x in (dk_sum, dv_sum))
                    backward_tile(
                        call,
                        queries,
                        keys,
                        k_blocks,
                        v_blocks,
                        visible,
                        workspace,
                        dq is not None,
                        dk_blocks,
                        dv_blocks,
                    )
            if dq is not None:
                queries.write(dq, problem.scale * queries.dq_t.swapaxes(2, 3))
    for result, total in ((dk, dk_sum), (dv, dv_sum)):
        if result is not None:
            result[heads.batch, heads.head, span.start : span.stop] = total


class BackwardQueries(tiles.Queries):
    """A tile of rows of q, and the operands of the backward pass that belong to them.

    Attributes
    ----------
    dout : (heads, blocks, queries, head_dim_v)
        Where scores are small, it is multiplied by exp(-L), and so is dL: weights and their gradients are linear in
        these, and S is more exact than S - L.
    dout_t : (heads, blocks, head_dim_v + 1, queries)
        The same, transposed. The last row, which meets the column of ones after V, is ``dL - D``, D = rowsum(dO o O),
        or 0 with dropout, which comes between.
    minus_delta : (heads, blocks, queries)
        ``dL - D``.
    dq_t : (heads, blocks, head_dim, queries)
        The sum of dS K so far, transposed.
    """

    def __init__(self, call: tiles.Call, heads: tiles.Heads, rows: range) -> None:
        super().__init__(call, heads, rows)
        lse, dlse = call.lse, call.dlse
        staged_dout = call.stage(call.dout, heads, rows, padded=self.padded)
        row_lse, row_dlse = np.zeros((2, heads.count, self.padded), call.dtype)
        row_lse[:, : len(rows)] = lse[heads.batch, heads.head, rows.start : rows.stop]
        if dlse is not None:
            row_dlse[:, : len(rows)] = dlse[heads.batch, heads.head, rows.start : rows.stop]
            row_dlse[row_lse == -np.inf] = 0
        row_lse[row_lse == -np.inf] = np.inf  # a row that sees no key: its weights are exp(-inf)
        if self.small:
            staged_dout *= np.exp(-row_lse)[:, :, None]
            row_dlse *= np.exp(-row_lse)
        else:
            self.shift = self.blocks(row_lse * -call.unit)
        self.dout = self.blocks(staged_dout)
        self.dout_t = np.empty((*self.dout.shape[:2], self.dout.shape[3] + 1, self.block), call.dtype)
        np.copyto(self.dout_t[:, :, :-1], self.dout.swapaxes(2, 3))
        out = self.blocks(call.stage(call.out, heads, rows, padded=self.padded))
        delta = np.einsum("...d,...d->...", self.dout, out)
        self.minus_delta = np.subtract(self.blocks(row_dlse), delta)
        self.dout_t[:, :, -1] = 0 if call.problem.dropout else self.minus_delta
        self.dq_t = np.zeros((*self.q_t.shape[:2], call.problem.head_dim, self.block), call.dtype)


def backward_tile(
    call: tiles.Call,
    queries: BackwardQueries,
    keys: tiles.Keys,
    k: Array,
    v: Array,
    visible: Array | bool,
    workspace: Workspace,
    needs_dq: bool,
    dk: Array | None = None,
    dv: Array | None = None,
    take_scores: Callable[[Array, Array | None], None] | None = None,
) -> None:
    """Add what a tile contributes to dk and dv, where these are wanted, and to `queries.dq_t`.

    `take_scores` gets the gradient of the scores as (heads, key blocks, query blocks, keys, queries), and their tanh.
    """
    problem = call.problem
    num_heads, across = queries.heads.count, (keys.num_blocks, queries.num_blocks)
    tile_shape = (num_heads, *across, keys.block, queries.block)
    p, ds = (workspace.take(name, *tile_shape) for name in ("p", "ds"))
    tanh = workspace.take("tanh", *tile_shape) if has_cap(problem) else None
    tiles.scores_of(call, queries, keys, k, workspace, out=p, tanh=tanh)
    exponential(p, call.unit, small=queries.small)
    tiles.hide(p, visible, 0)
    kept = tiles.kept_scores(call, queries, keys, workspace, tile_shape) if problem.dropout else None
    if dv is not None:
        weights = p if kept is None else np.multiply(p, kept, out=ds)
        parts = workspace.take("parts", num_heads, *across, keys.block, problem.head_dim_v)
        dv += np.matmul(weights, queries.dout[:, None], out=parts).sum(axis=2, keepdims=True)
    if dk is None and not needs_dq and take_scores is None:
        return
    np.matmul(v, queries.dout_t[:, None], out=ds)
    if kept is not None:
        ds *= kept
        ds += queries.minus_delta[:, None, :, None]
    ds *= p
    if take_scores is not None:
        take_scores(ds, tanh)
    if tanh is not None:
        tanh *= tanh
        np.subtract(1, tanh, out=tanh)
        ds *= tanh
    if dk is not None:
        parts = workspace.take("parts", num_heads, *across, keys.block, problem.head_dim)
        dk += np.matmul(ds, queries.rows[:, None], out=parts).sum(axis=2, keepdims=True)
    if needs_dq:
        parts = workspace.take("parts", num_heads, *across, problem.head_dim, queries.block)
        queries.dq_t += np.matmul(k[..., :-1].swapaxes(3, 4), ds, out=parts).sum(axis=1)
