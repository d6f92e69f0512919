"""Reductions of the attention weights over splits of the keys: the strongest keys of all."""

from __future__ import annotations

from typing import Any

from cuflash.arrays import dlpack

Array = Any


def merge_top_keys(
    indices: Array, weights: Array, own_indices: Array, own_weights: Array, *, first_key: int = 0
) -> None:
    """Take the strongest keys of a split into account, in place; its indices count from `first_key`.

    Of equal weights the lower index comes first.
    """
    xp, count = dlpack.module_of(weights), weights.shape[-1]
    every = xp.concatenate([indices, xp.where(own_indices < 0, -1, own_indices + first_key)], axis=-1)
    both = xp.concatenate([weights, own_weights], axis=-1)
    by_index = xp.argsort(every, axis=-1)
    every, both = (xp.take_along_axis(x, by_index, axis=-1) for x in (every, both))
    order = xp.argsort(xp.where(every < 0, 1, -both), axis=-1, kind="stable")[..., :count]
    indices[...] = xp.take_along_axis(every, order, axis=-1)
    weights[...] = xp.take_along_axis(both, order, axis=-1)
