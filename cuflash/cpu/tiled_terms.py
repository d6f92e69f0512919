"""Gradients of the other operands of scores, beside q and k, and of the sink, by tiles of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import cap, sink, tiles
from cuflash.cpu.jobs import Workspace, run
from cuflash.cpu.tiled_backward import BackwardQueries, backward_tile
from cuflash.terms import OF_NUMBERS, OF_SCORES

Array = NDArray[Any]


def write(call: tiles.Call, threads: int) -> None:
    """Write the gradients of `terms.OF_SCORES` that are wanted.

    A job is a tile of rows of one head. As many jobs as threads are computed at a time; then this thread adds their
    parts of gradients, in the order of the jobs.
    """
    problem, wanted = call.problem, call.wanted
    sums = {name: np.zeros(x.shape, call.dtype) for name, x in wanted.items()}
    dbias = sums["dbias"][(None,) * (4 - sums["dbias"].ndim)] if "dbias" in sums else None
    jobs = [
        (heads, range(i, min(i + call.query_tile, problem.seqlen_q)))
        for group in tiles.heads_by_length(problem, problem.num_heads, call.kv_lengths)
        for heads in group.split(1, group.count)
        for i in range(0, problem.seqlen_q, call.query_tile)
    ]
    for first in range(0, len(jobs), threads):
        parts: list[dict[str, Array]] = [{} for _ in jobs[first : first + threads]]
        work = [(*job, part) for job, part in zip(jobs[first : first + threads], parts, strict=True)]
        run(lambda *job: _compute_rows(call, *job), work, threads, call.dtype)
        for (heads, rows), part in zip(jobs[first : first + threads], parts, strict=True):
            ((b, h),) = heads
            with np.errstate(all="ignore"):
                if dbias is not None:
                    its_rows = slice(rows.start, rows.stop) if dbias.shape[2] > 1 else slice(None)
                    columns = slice(heads.num_keys) if dbias.shape[3] > 1 else slice(None)
                    dbias[b % dbias.shape[0], h % dbias.shape[1], its_rows, columns] += part["dbias"]
                if "dalibi_slopes" in sums:
                    sums["dalibi_slopes"][(b, h)[-sums["dalibi_slopes"].ndim :]] += part["dalibi_slopes"]
                for name in sums.keys() & set(OF_NUMBERS):
                    sums[name] += part[name]
    with np.errstate(all="ignore"):
        for name in sums.keys() & set(OF_SCORES):
            wanted[name][...] = sums[name]


def _compute_rows(
    call: tiles.Call,
    workspace: Workspace,
    heads: tiles.Heads,
    rows: range,
    part: dict[str, Array],
) -> None:
    """Compute the part of some rows of one head in these gradients, summed over axes that the bias does not have."""
    call = call.aligned_to(heads.num_keys)
    problem, wanted = call.problem, call.wanted
    queries = BackwardQueries(call, heads, rows)
    shape = (len(rows), heads.num_keys)
    bias_shape = call.bias.shape[2:] if call.bias is not None and "dbias" in wanted else (1, 1)
    part["dbias"] = dbias = np.zeros(
        tuple(n if m > 1 else 1 for n, m in zip(shape, bias_shape, strict=True)), call.dtype
    )
    part |= {name: np.zeros((), call.dtype) for name in OF_SCORES if name != "dbias"}
    key_tile = tiles.clamp(
        call.tile // queries.padded // tiles.KEY_BLOCK * tiles.KEY_BLOCK, tiles.KEY_BLOCK, tiles.KEY_TILE
    )
    for tile in tiles.key_tiles(0, heads.num_keys, key_tile):
        for keys in tile.seen_by(queries).runs(call, queries):
            visible = tiles.visible_scores(call, queries, keys)
            if visible is False:
                continue
            of_keys, span = call.sharing(heads), range(keys.start, keys.stop)
            k, v = (keys.blocks(call.stage(x, of_keys, span, ones=1), keys.start) for x in (call.k, call.v))

            def take_scores(ds: Array, tanh: Array | None, keys: tiles.Keys = keys, k: Array = k) -> None:
                pairs = ds[0].transpose(1, 3, 0, 2).reshape(queries.padded, keys.stop - keys.start)[: len(rows)]
                if "dbias" in wanted:
                    summed = tuple(axis for axis, n in enumerate(bias_shape) if n == 1)
                    columns = slice(keys.start, keys.stop) if bias_shape[1] > 1 else slice(None)
                    dbias[:, columns] += pairs.sum(axis=summed, keepdims=True) if summed else pairs
                if "dalibi_slopes" in wanted:
                    i = np.arange(rows.start, rows.stop)[:, None] + problem.diagonal
                    distance = np.abs(i - np.arange(keys.start, keys.stop)).astype(call.dtype)
                    part["dalibi_slopes"] -= (pairs * distance).sum()
                if cap.GRADIENT in wanted and tanh is not None:
                    x = np.matmul(k, queries.q_t[:, None])
                    part[cap.GRADIENT] += (ds * cap.derivative_by_softcap(x, tanh)).sum()

            backward_tile(call, queries, keys, k, v, visible, workspace, "dscale" in wanted, take_scores=take_scores)
    if "dscale" in wanted:
        q = queries.blocks(call.stage(call.q, heads, rows, padded=queries.padded))
        part["dscale"] += (queries.dq_t.swapaxes(2, 3) * q).sum()


def write_of_softmax(call: tiles.Call) -> None:
    """Write the gradient of the sink of each head, if it is wanted."""
    result, dlse = call.wanted.get(sink.GRADIENT), call.dlse
    if result is None or not call.sink:
        return
    for head in range(len(result)):
        result[head] = 0
        for batch in range(len(call.lse)):
            dO, O, L = (x[batch, head].astype(result.dtype) for x in (call.dout, call.out, call.lse))  # noqa: E741
            with np.errstate(all="ignore"):
                delta = np.einsum("...d,...d->...", dO, O) - (0 if dlse is None else dlse[batch, head])
                result[head] += call.sink.gradient(head, L, delta)
