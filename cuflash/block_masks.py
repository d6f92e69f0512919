"""Block masks for `cuflash.FlashAttention.forward`: which blocks of queries attend to which blocks of keys.

All are NumPy arrays of bool, (blocks of queries, blocks of keys), and are put together by ``|`` and ``&``. With
``m = n = ceil(seqlen / block_size)``, Longformer [1]_ and BigBird [2]_ are a line each::

    longformer = local(m, n, 2) | global_blocks(m, n, 1)
    bigbird = local(m, n, 1) | global_blocks(m, n, 1) | random(m, n, 3, seed=0)

The Sparse Transformer [3]_ is ``local(m, n, w) | strided(m, n, s)``, with ``causal=True`` as well, which hides pairs
one by one. For CuPy arrays the mask has to be on their device: ``cupy.asarray(longformer)``. Where m and n differ, the
last block of queries lines up with the last block of keys, as with ``causal=True``.

.. [1] Beltagy, Peters, Cohan: Longformer: the long-document transformer (2020), https://arxiv.org/abs/2004.05150
.. [2] Zaheer and others: Big Bird: transformers for longer sequences (2020), https://arxiv.org/abs/2007.14062
.. [3] Child, Gray, Radford, Sutskever: Generating long sequences with sparse transformers (2019),
   https://arxiv.org/abs/1904.10509
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.checks import as_integer, type_error, value_error
from cuflash.spec.options import check_block_size

__all__ = ["from_mask", "global_blocks", "local", "random", "strided"]

BlockMask = NDArray[np.bool_]


def __dir__() -> list[str]:
    """What completion shows: the masks, and nothing that is imported for them."""
    return list(__all__)


def local(m: int, n: int, width: int) -> BlockMask:
    """Blocks at most `width` blocks away from the diagonal; a sliding window.

    ::

        local(5, 5, 1)

          1 1 0 0 0
          1 1 1 0 0
          0 1 1 1 0
          0 0 1 1 1
          0 0 0 1 1

    Parameters
    ----------
    m, n : int
        Blocks of queries and of keys.
    width : int
        Blocks on each side, 0 or more.

    Returns
    -------
    numpy.ndarray
        bool, (m, n).

    Raises
    ------
    TypeError, ValueError
        A number that is no integer, or is negative.

    See Also
    --------
    strided, global_blocks, random : Others, which ``|`` combines with it.
    cuflash.FlashAttention : The option `window` bounds single pairs.

    References
    ----------
    Beltagy, Peters, Cohan: Longformer (2020), https://arxiv.org/abs/2004.05150, section 3.1.
    """
    return np.abs(_distances(m, n)) <= _count("width", width)


def strided(m: int, n: int, stride: int) -> BlockMask:
    """Blocks whose distance from the diagonal is a multiple of `stride`.

    ::

        strided(5, 5, 2)

          1 0 1 0 1
          0 1 0 1 0
          1 0 1 0 1
          0 1 0 1 0
          1 0 1 0 1

    Parameters
    ----------
    m, n : int
        Blocks of queries and of keys.
    stride : int
        1 or more.

    Returns
    -------
    numpy.ndarray
        bool, (m, n).

    Raises
    ------
    TypeError, ValueError
        A number that is no integer, or is too small.

    See Also
    --------
    local, global_blocks, random : Others, which ``|`` combines with it.

    References
    ----------
    Child, Gray, Radford, Sutskever: Generating long sequences with sparse transformers (2019),
    https://arxiv.org/abs/1904.10509, section 4.
    """
    return _distances(m, n) % _count("stride", stride, least=1) == 0


def global_blocks(m: int, n: int, count: int) -> BlockMask:
    """The first `count` blocks attend to every block, and every block to them.

    ::

        global_blocks(5, 5, 1)

          1 1 1 1 1
          1 0 0 0 0
          1 0 0 0 0
          1 0 0 0 0
          1 0 0 0 0

    Parameters
    ----------
    m, n : int
        Blocks of queries and of keys.
    count : int
        0 or more.

    Returns
    -------
    numpy.ndarray
        bool, (m, n).

    Raises
    ------
    TypeError, ValueError
        A number that is no integer, or is negative.

    See Also
    --------
    local, strided, random : Others, which ``|`` combines with it.

    References
    ----------
    - Beltagy, Peters, Cohan: Longformer (2020), https://arxiv.org/abs/2004.05150, section 3.1.
    - Zaheer and others: Big Bird (2020), https://arxiv.org/abs/2007.14062, section 2.
    """
    rows, columns = np.arange(_count("m", m)), np.arange(_count("n", n))
    count = _count("count", count)
    return (rows < count)[:, None] | (columns < count)


def random(m: int, n: int, count: int, seed: int) -> BlockMask:
    """For each block of queries `count` different blocks of keys, all of them equally likely.

    ::

        random(5, 5, 2, seed=1)

          0 0 1 0 1
          0 0 1 0 1
          0 0 1 1 0
          1 0 0 0 1
          1 0 1 0 0

    Parameters
    ----------
    m, n : int
        Blocks of queries and of keys.
    count : int
        0 to n.
    seed : int
        Seed of the random numbers, 0 or more: equal seeds make equal masks.

    Returns
    -------
    numpy.ndarray
        bool, (m, n).

    Raises
    ------
    TypeError, ValueError
        A number that is no integer, or is out of range.

    See Also
    --------
    local, strided, global_blocks : Others, which ``|`` combines with it.

    References
    ----------
    Zaheer and others: Big Bird (2020), https://arxiv.org/abs/2007.14062, section 2.
    """
    shape = (_count("m", m), _count("n", n))
    if (count := _count("count", count)) > shape[1]:
        raise value_error("count", count, f"at most n = {n}")
    permutations = np.random.default_rng(_count("seed", seed)).random(shape).argsort(axis=1, kind="stable")
    return permutations < count


def from_mask(mask: Any, block_size: int | tuple[int, int] = (128, 128)) -> BlockMask:
    """Blocks in which a mask shows any pair; where it hides other pairs of these blocks, give the mask itself, too.

    ::

        mask                block_size of 2, were it allowed

          1 1 0 0 0           1 0 0
          1 1 0 0 0           1 0 1
          0 1 0 0 0           0 1 0
          0 0 0 0 1
          0 0 1 0 0

    Parameters
    ----------
    mask : array_like
        bool, (..., seqlen_q, seqlen_k).
    block_size : int or (int, int)
        As `cuflash.FlashAttention` takes it.

    Returns
    -------
    numpy.ndarray
        bool, (..., ceil(seqlen_q / rows), ceil(seqlen_k / keys)).

    Raises
    ------
    TypeError, ValueError
        A mask that is not bool or has less than two axes, or a wrong block_size.

    See Also
    --------
    cuflash.FlashAttention.forward : Takes `block_mask` and `mask`, both or one.
    local, strided, global_blocks, random : Masks by rule.
    """
    rows, keys = check_block_size(block_size)
    mask = np.asarray(mask)
    if mask.dtype != bool:
        raise type_error("mask", f"dtype {mask.dtype}", "bool (True takes part)")
    if mask.ndim < 2:
        raise value_error("mask", f"shape {mask.shape}", "(..., seqlen_q, seqlen_k)")
    for axis, size in ((-2, rows), (-1, keys)):
        starts = np.arange(0, mask.shape[axis], size)
        if len(starts):
            mask = np.logical_or.reduceat(mask, starts, axis=axis)
    return mask


def _distances(m: int, n: int) -> NDArray[np.int64]:
    """How far the block in row i and column j lies left of the diagonal, in blocks."""
    rows, columns = np.arange(_count("m", m)), np.arange(_count("n", n))
    return rows[:, None] + (len(columns) - len(rows)) - columns


def _count(name: str, value: object, *, least: int = 0) -> int:
    number = as_integer(name, value)
    if number < least:
        raise value_error(name, value, f"{least} or more")
    return number
