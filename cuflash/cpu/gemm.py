"""Products of q and k by NumPy, for scores that are no sum of the scaled product and a number, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu.score_tiles import Tile

Array = NDArray[Any]

PRODUCT_LIMIT = 400_000  # multiplications in one product: OpenBLAS takes a second thread from 2**19 on
PRODUCT_BLOCK = 64  # rows and columns of a product
PRODUCT_DEPTH = PRODUCT_LIMIT // PRODUCT_BLOCK**2


class Products(NamedTuple):
    """The products of the rows q of a slice and the keys k, in the dtype of the softmax.

    q and k, and their tangents, have an axis for the heads that share keys. `scaled` has the products times `scale` as
    far as `write` has been called, `moved` the tangents of these, if there are any.
    """

    scaled: Array
    scale: Any  # a number of the dtype, as its tangent
    q: Array
    k: Array
    moved: Array | None = None
    tscale: Any = 0
    tq: Array | None = None
    tk: Array | None = None

    def write(self, tile: Tile) -> None:
        """Compute those of a tile."""
        shape, q, k = (*self.q.shape[:4], -1), self.q[..., tile.own_rows, :], self.k[..., tile.own_keys, :]
        scaled = self.scaled.reshape(shape)[tile.index]
        multiply(q, k.swapaxes(-2, -1), scaled)
        scaled *= self.scale  # after the sum: rounded elements of scaled q would tell equal products apart
        if self.moved is None:
            return
        moved = self.moved.reshape(shape)[tile.index]
        tq = q * self.tscale
        if self.tq is not None:
            tq += self.tq[..., tile.own_rows, :] * self.scale
        multiply(tq, k.swapaxes(-2, -1), moved)
        if self.tk is not None:
            moved += product(q * self.scale, self.tk[..., tile.own_keys, :].swapaxes(-2, -1))

    def tangents_of_gradients(
        self, tile: Tile, dscaled: Array, moved: Array, wanted: Collection[str]
    ) -> dict[str, Array]:
        """What a tile adds to tdq and tdk, if they are `wanted`.

        `dscaled` and `moved` are the gradients of all scaled products and the tangents of these gradients.
        """
        shape, q, k = (*self.q.shape[:4], -1), self.q[..., tile.own_rows, :], self.k[..., tile.own_keys, :]
        ds, tds = (x.reshape(shape)[tile.index] for x in (dscaled, moved))
        dX, tdX, addends = ds * self.scale, tds * self.scale + ds * self.tscale, {}
        if "tdq" in wanted:
            tdq = product(tdX, k)
            if self.tk is not None:
                tdq += product(dX, self.tk[..., tile.own_keys, :])
            addends["tdq"] = tdq.reshape(len(tdq), -1, *tdq.shape[3:])
        if "tdk" in wanted:
            tdk = product(tdX.swapaxes(-2, -1), q)
            if self.tq is not None:
                tdk += product(dX.swapaxes(-2, -1), self.tq[..., tile.own_rows, :])
            addends["tdk"] = tdk.sum(axis=2)
        return addends

    def gradients(self, tile: Tile, dscaled: Array, wanted: Collection[str]) -> dict[str, Array]:
        """What a tile adds to those of dq and dk that are wanted, from the gradients of all scaled products."""
        q, k = self.q[..., tile.own_rows, :], self.k[..., tile.own_keys, :]
        dX = dscaled.reshape(*self.q.shape[:4], -1)[tile.index] * self.scale
        addends = {}
        if "dq" in wanted:
            dq = np.empty(q.shape, dX.dtype)
            multiply(dX, k, dq)
            addends["dq"] = dq.reshape(len(dq), -1, *dq.shape[3:])
        if "dk" in wanted:
            dk = np.empty((*dX.shape[:3], *k.shape[3:]), dX.dtype)
            multiply(dX.swapaxes(-2, -1), q, dk)
            addends["dk"] = dk.sum(axis=2)
        return addends


def product(a: Array, b: Array) -> Array:
    """A product of matrices, as `multiply` computes it."""
    out = np.empty((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), a.dtype)
    multiply(a, b, out)
    return out


def multiply(a: Array, b: Array, out: Array) -> None:
    """Write a product of matrices by stacks of products, each so small that a BLAS starts no threads for it.

    Jobs are threads already: on two cores, with BLAS threads besides, backward passes took 590 ms in place of 170.
    """
    depth = a.shape[-1]
    for rows, m, height in _blocks(a.shape[-2], PRODUCT_BLOCK):
        for columns, n, width in _blocks(b.shape[-1], PRODUCT_BLOCK):
            for first in range(0, max(depth, 1), PRODUCT_DEPTH):  # of no terms, the sum is 0
                terms, count = slice(first, first + PRODUCT_DEPTH), min(PRODUCT_DEPTH, depth - first)
                x = a[..., rows, terms].reshape(*a.shape[:-2], m, 1, height, count)
                y = b[..., terms, columns].reshape(*b.shape[:-2], 1, count, n, width).swapaxes(-3, -2)
                if y.strides[-1] > y.strides[-2]:  # OpenBLAS: 146 us for 128 x 64 by 64 x 512; 86 so, and 13 for a copy
                    y = np.ascontiguousarray(y)
                z = out[..., rows, columns].reshape(*out.shape[:-2], m, height, n, width).swapaxes(-3, -2)
                if first == 0:
                    np.matmul(x, y, out=z)
                else:
                    z += x @ y


@functools.lru_cache(maxsize=256)
def _blocks(length: int, size: int) -> tuple[tuple[slice, int, int], ...]:
    """The whole blocks of an axis, and the rest, those that there are: their slice, their number and their length."""
    whole = length // size * size
    blocks = ((slice(0, whole), whole // size, size), (slice(whole, length), 1, length - whole))
    return tuple([block for block in blocks if block[0].start < block[0].stop])
