"""Products of q and k by NumPy, for scores that are no sum of the scaled product and a number, and their gradients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu.parts import Tile, slices

Array = NDArray[Any]

PRODUCT_LIMIT = 400_000  # multiplications in one product: OpenBLAS takes a second thread from 2**19 on
PRODUCT_BLOCK = 64  # rows and columns of a product
PRODUCT_DEPTH = PRODUCT_LIMIT // PRODUCT_BLOCK**2


class Products:
    """The products of the rows q of a part and the keys k, in the dtype of the softmax.

    Attributes
    ----------
    scaled : array
        The products times `scale`, a number for each pair, as far as `write` has been called.
    """

    def __init__(self, q: Array, k: Array, scaled: Array, scale: float) -> None:
        batch, heads, *_ = k.shape
        self.scaled, self._scale = scaled, scaled.dtype.type(scale)
        self._k = k[:, :, None]
        self._q = q.astype(scaled.dtype).reshape(batch, heads, -1, *q.shape[2:])  # heads that share keys have an axis

    def write(self, tile: Tile) -> None:
        """Compute those of a tile."""
        q, k = self._operands(tile)
        multiply(q * self._scale, k.swapaxes(-2, -1), self._by_keys(self.scaled, tile))

    def gradients(self, tile: Tile, dscaled: Array, wanted: Collection[str]) -> dict[str, Array]:
        """What a tile adds to those of dq and dk that are wanted, from the gradients of all scaled products."""
        (q, k), own = self._operands(tile), self._by_keys(dscaled, tile) * self._scale
        found = {}
        if "dq" in wanted:
            dq = product(own, k)
            found["dq"] = dq.reshape(len(dq), -1, *dq.shape[3:])
        if "dk" in wanted:
            found["dk"] = product(own.swapaxes(-2, -1), q).sum(axis=2)
        return found

    def _operands(self, tile: Tile) -> tuple[Array, Array]:
        return self._q[..., tile.own_rows, :], self._k[..., tile.own_keys, :].astype(self._q.dtype)

    def _by_keys(self, x: Array, tile: Tile) -> Array:
        """A view of the numbers of a tile, with an axis for heads that share keys."""
        return x.reshape(*self._q.shape[:4], -1)[tile.place]


def product(a: Array, b: Array) -> Array:
    """A product of matrices, as `multiply` computes it."""
    found = np.empty((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), a.dtype)
    multiply(a, b, found)
    return found


def multiply(a: Array, b: Array, out: Array) -> None:
    """Write a product of matrices by stacks of products, each so small that a BLAS starts no threads for it.

    Jobs are threads already: on two cores, threads of both kinds made backward passes take 590 ms that take 170 so.
    """
    for own, height in _blocks(a.shape[-2]):
        for of, width in _blocks(b.shape[-1]):
            for terms in slices(a.shape[-1], PRODUCT_DEPTH):
                x = _split(a[..., own, terms], -2, height)[..., :, None, :, :]
                y = _split(b[..., terms, of], -1, width).swapaxes(-3, -2)[..., None, :, :, :]
                if y.strides[-1] > y.strides[-2]:  # OpenBLAS: 146 us for 128 x 64 by 64 x 512; 86 so, and 13 for a copy
                    y = np.ascontiguousarray(y)
                z = _split(_split(out[..., own, of], -1, width), -3, height).swapaxes(-3, -2)
                if terms.start == 0:
                    np.matmul(x, y, out=z)
                else:
                    z += x @ y


def _blocks(length: int) -> list[tuple[slice, int]]:
    """The whole blocks of an axis, and the rest, with the length of each block; those that there are."""
    whole = length // PRODUCT_BLOCK * PRODUCT_BLOCK
    found = [(slice(0, whole), PRODUCT_BLOCK), (slice(whole, length), length - whole)]
    return [(part, size) for part, size in found if part.start < part.stop]


def _split(x: Array, axis: int, size: int) -> Array:
    """A view with an axis, counted from the end, split into blocks of a size: (..., blocks, size, ...)."""
    end = x.ndim + axis
    return x.reshape(*x.shape[:end], -1, size, *x.shape[end + 1 :])
