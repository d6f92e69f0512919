"""The forward pass by tiles of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu import tiles
from cuflash.cpu.exponentials import exponential
from cuflash.cpu.jobs import Workspace, run

Array = NDArray[Any]

TILES_PER_JOB = 4  # query tiles that share the conversion of a key tile
SUM_LIMIT = 2.0  # mean weight of the keys of a tile: a larger one says that the maximum has risen


def write(call: tiles.Call) -> None:
    """Write out and lse."""
    problem = call.problem
    threads = tiles.count_threads(problem.forward_flops)
    num_tiles = problem.batch * problem.num_heads * tiles.ceil_div(problem.seqlen_q, call.query_tile)
    rows_per_job = call.query_tile * tiles.clamp(num_tiles // (4 * threads), 1, TILES_PER_JOB)
    jobs = [
        (heads, range(i, min(i + rows_per_job, problem.seqlen_q)))
        for all_heads in tiles.heads_by_length(problem, problem.num_heads, call.kv_lengths)
        for heads in all_heads.split(call.tile // max(1, problem.seqlen_q * all_heads.num_keys), 4 * threads)
        for i in range(0, problem.seqlen_q, rows_per_job)
    ]

    def seen(job: tuple[tiles.Heads, range]) -> int:
        heads, rows = job
        aligned = problem.aligned_to(heads.num_keys)
        return heads.count * (min(heads.num_keys, aligned.key_range(rows[-1])[1]) - aligned.key_range(rows[0])[0])

    jobs.sort(key=seen, reverse=True)  # no long job starts last
    run(lambda *job: _compute_rows(call, *job), jobs, threads, call.dtype)


def _compute_rows(call: tiles.Call, workspace: Workspace, heads: tiles.Heads, rows: range) -> None:
    """Compute out and lse of some rows of some heads."""
    call = call.aligned_to(heads.num_keys)
    head_dim_v = call.problem.head_dim_v
    starts = rows[:: call.query_tile]
    all_queries = [tiles.Queries(call, heads, range(i, min(i + call.query_tile, rows.stop))) for i in starts]
    # The transposed, not yet normalised output O of every tile, and below it l, the sums of weights.
    sums = [np.zeros((heads.count, x.num_blocks, head_dim_v + 1, x.block), call.dtype) for x in all_queries]
    start = min(x.first_key for x in all_queries) // tiles.KEY_BLOCK * tiles.KEY_BLOCK
    stop = min(heads.num_keys, tiles.ceil_div(max(x.stop_key for x in all_queries), tiles.KEY_BLOCK) * tiles.KEY_BLOCK)
    key_tile = call.tile // (heads.count * all_queries[0].padded) // tiles.KEY_BLOCK * tiles.KEY_BLOCK
    for tile in tiles.key_tiles(start, max(start, stop), tiles.clamp(key_tile, tiles.KEY_BLOCK, tiles.KEY_TILE)):
        k = v = None
        for queries, total in zip(all_queries, sums, strict=True):
            for keys in tile.seen_by(queries).runs(call, queries):
                visible = tiles.visible_scores(call, queries, keys)
                if visible is False:
                    continue
                if k is None or v is None:
                    of_keys = call.sharing(heads)
                    k, v = (call.stage(x, of_keys, range(tile.start, tile.stop), ones=1) for x in (call.k, call.v))
                k_blocks, v_blocks = (keys.blocks(x, tile.start) for x in (k, v))
                _add_tile(call, queries, keys, k_blocks, v_blocks, visible, total, workspace)
    for queries, total in zip(all_queries, sums, strict=True):
        if call.sink:
            queries.shift = call.sink.join(heads.head, call.unit, queries.shift, total)
        l = total[:, :, head_dim_v]  # noqa: E741 (the paper's letter)
        o = total[:, :, :head_dim_v] / np.where(l == 0, 1, l)[:, :, None]
        queries.write(call.out, o.swapaxes(2, 3))
        queries.write(call.lse, np.log(l) - queries.shift / call.unit)


def _add_tile(
    call: tiles.Call,
    queries: tiles.Queries,
    keys: tiles.Keys,
    k: Array,
    v: Array,
    visible: Array | bool,
    total: Array,
    workspace: Workspace,
) -> None:
    """Add O and l of a tile to `total`."""
    num_heads = queries.heads.count
    scores = workspace.take("scores", num_heads, keys.num_blocks, queries.num_blocks, keys.block, queries.block)
    parts = workspace.take("parts", num_heads, keys.num_blocks, *total.shape[1:])
    l = total[:, :, -1].reshape(num_heads, queries.padded)[:, : queries.num_rows]  # noqa: E741
    careful = queries.restless or (not queries.small and bool((l == 0).any()))
    while True:
        tiles.scores_of(call, queries, keys, k, workspace, out=scores, shifted=not careful)
        if careful:
            tiles.hide(scores, visible, -np.inf)
            _raise_maximum(call, queries, scores, total)
        exponential(scores, call.unit, small=queries.small)
        tiles.hide(scores, visible, 0)
        sums = None
        if call.problem.dropout:
            sums = scores.sum(axis=(1, 3))
            scores *= tiles.kept_scores(call, queries, keys, workspace, scores.shape)
        np.matmul(v.swapaxes(3, 4), scores, out=parts)
        added = parts[:, 0] if keys.num_blocks == 1 else np.add.reduce(parts, axis=1)
        if sums is not None:
            added[:, :, -1] = sums
        if careful or queries.small or not (added[:, :, -1] > SUM_LIMIT * (keys.stop - keys.start)).any():
            break
        careful = queries.restless = True
    total += added


def _raise_maximum(call: tiles.Call, queries: tiles.Queries, scores: Array, total: Array) -> None:
    """Subtract m after moving it up to the largest score of the tile; in rows that saw no key yet, m is that score."""
    largest = scores.max(axis=(1, 3))
    unseen = total[:, :, -1] == 0
    m = np.where(unseen, largest, np.maximum(largest, -queries.shift))
    m[m == -np.inf] = 0
    scores -= m[:, None, :, None]
    total *= np.where(unseen, 1, np.exp((-queries.shift - m) / call.unit))[:, :, None]
    queries.shift = -m
