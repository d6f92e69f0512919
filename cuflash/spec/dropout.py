"""Which weights dropout drops: random bits that depend on seed, offset and the position of a weight alone.

The bits are those of Philox-4x32-7 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, 2011).
Its key is the seed, low word first. A call makes four words, which are 16 bits each for 8 weights of one head: rows i
and i + 8 of a block of 16 rows, and columns j, j + 1, j + 8 and j + 9, j even, of a block of 16 columns. The words of
the counter are

    columns   4 * (j // 16) + j % 8 // 2
    rows      8 * (i // 16) + i % 8
    head      batch entry * num_heads + head
    offset

The weight of row i and column j has 16 bits of word 2 * (j % 2) + j % 16 // 8: the low ones if i % 16 < 8, else the
high ones. It is dropped if they are, as a number, less than 65536 * rate, where rate is rounded to a multiple of
1 / 65536.

Tensor cores deal rows and columns to threads in such a way that a call has what one thread needs, and that one exchange
between neighbours is enough where rows and columns are swapped, in the backward pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.checks import as_integer, value_error
from cuflash.spec.options import check_dropout, check_random, rounded_rate

Array = NDArray[Any]

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7  # the fewest with which the authors saw it pass all tests of BigCrush
ROWS_AT_ONCE = 512


def dropout_mask(
    seed: int, offset: int, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, rate: float
) -> NDArray[np.bool_]:
    """The weights that ``FlashAttention(dropout=rate)`` keeps, on every device: those of the others are zero.

    Parameters
    ----------
    seed, offset : int
        As `FlashAttention.forward` and `FlashAttention.backward` take them.
    batch, num_heads, seqlen_q, seqlen_k : int
        Sizes of the problem. The mask of larger sizes begins with that of smaller ones, except for num_heads of
        several batch entries.
    rate : float
        Probability that a weight is dropped, as `FlashAttention` takes it: rounded to a multiple of 1 / 65536.

    Returns
    -------
    numpy.ndarray
        bool, (batch, num_heads, seqlen_q, seqlen_k): True is kept.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type or out of range.

    See Also
    --------
    FlashAttention : The option `dropout`.

    References
    ----------
    - Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov: Dropout (2014).
    - Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (2011): Philox-4x32, here with 7 rounds.

    Examples
    --------
    >>> import cuflash
    >>> cuflash.dropout_mask(1, 0, 1, 1, 2, 8, 0.5).astype(int)[0, 0]
    array([[1, 1, 0, 1, 1, 0, 1, 1],
           [1, 1, 1, 0, 1, 1, 1, 0]])
    """
    seed, offset = check_random(seed, offset)
    rate = rounded_rate(check_dropout(rate, "rate"))
    sizes = {"batch": batch, "num_heads": num_heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = tuple(as_integer(name, n) for name, n in sizes.items())
    for name, n in zip(sizes, shape, strict=True):
        if n < 0:
            raise value_error(name, n, "an integer >= 0")
    batch, num_heads, seqlen_q, seqlen_k = shape
    mask = np.empty(shape, np.bool_)
    for b, h in np.ndindex(batch, num_heads):
        for i in range(0, seqlen_q, ROWS_AT_ONCE):
            rows = range(i, min(i + ROWS_AT_ONCE, seqlen_q))
            mask[b, h, i : rows.stop] = kept_weights(rate, seed, offset, b * num_heads + h, rows, range(seqlen_k))
    return mask


def kept_weights(
    rate: float, seed: int | None, offset: int | None, head: int | Array, rows: range, columns: range
) -> NDArray[np.bool_]:
    """Whether weights of some neighbouring rows and columns are kept, (rows, columns) after the axes of `head`.

    `head` counts the heads of all batch entries; `rate` is a multiple of 1 / 65536.
    """
    seed, offset = check_random(seed, offset)
    first_row, first_column = rows.start // 16, columns.start // 16
    num_rows, num_columns = -(-rows.stop // 16) - first_row, -(-columns.stop // 16) - first_column
    counter = (
        np.arange(4 * first_column, 4 * (first_column + num_columns), dtype=np.uint64),
        np.arange(8 * first_row, 8 * (first_row + num_rows), dtype=np.uint64)[:, None],
        np.asarray(head, np.uint64)[..., None, None],
        np.array(offset, np.uint64),
    )
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    threshold = round(65536 * rate)
    heads = np.shape(head)
    kept = np.empty((*heads, num_rows, 2, 8, num_columns, 2, 4, 2), np.bool_)
    for i, word in enumerate(words):
        word = word.reshape(*heads, num_rows, 8, num_columns, 4)
        kept[..., 0, :, :, i % 2, :, i // 2] = word & np.uint32(0xFFFF) >= threshold
        kept[..., 1, :, :, i % 2, :, i // 2] = word >> np.uint32(16) >= threshold
    i, j = rows.start - 16 * first_row, columns.start - 16 * first_column
    return kept.reshape(*heads, 16 * num_rows, 16 * num_columns)[..., i : i + len(rows), j : j + len(columns)]


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Philox-4x32-7 of words of 32 bits in arrays of uint64, which broadcast; its four words as arrays of uint32."""
    c0, c1, c2, c3 = counter
    low = np.uint64(0xFFFFFFFF)
    for i in range(ROUNDS):
        k0, k1 = (np.uint64((word + i * step) & 0xFFFFFFFF) for word, step in zip(key, KEY_STEPS, strict=True))
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & low, (product0 >> 32) ^ c3 ^ k1, product0 & low
    words = np.broadcast_arrays(c0, c1, c2, c3)
    return tuple(word.astype(np.uint32) for word in words)  # type: ignore[return-value]
