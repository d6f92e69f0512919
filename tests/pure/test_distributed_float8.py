"""Context parallel calls on k and v, or q, k and v, of float8: what is refused or compared."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash.distributed as cd
from tests.ranks import on_threads

X = np.ones((2, 6, 8), ml_dtypes.float8_e4m3fn)
NO_SCALES: dict[str, Any] = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}


@pytest.mark.parametrize(
    ("optional", "error", "message"),
    [
        (
            {"k_scale": np.ones((2, 6), np.float32)},
            NotImplementedError,
            r"^k_scale: got shape \(2, 6\), factors of bloc",
        ),
        (
            {"q_scale": np.ones(3, np.float32)},
            NotImplementedError,
            r"^q_scale: got shape \(3,\), factors of blocks of r",
        ),
        (
            {"k_scale": np.ones((3, 1), np.float32)},
            ValueError,
            r"^k_scale: got shape \(3, 1\), expected a shape that b",
        ),
    ],
)
def test_scales_that_are_refused(optional, error, message):
    (comm,) = cd.threads(1)
    with pytest.raises(error, match=message):
        cd.ContextParallel(comm, split="contiguous").forward(X, X, X, **NO_SCALES | optional)


def test_scales_of_ranks_are_compared():
    def work(comm):
        scale = np.full((2, 1), 1 + comm.rank, np.float32)
        cd.ContextParallel(comm, split="contiguous", timeout=5).forward(X, X, X, **NO_SCALES | {"v_scale": scale})

    with pytest.raises(ValueError, match=r"^v_scale: got float32 \(2, 1\) with checksum \w+ on rank 1, expected "):
        on_threads(2, work)


def test_gradients_are_refused():
    (comm,) = cd.threads(1)
    x, lse = X.astype(ml_dtypes.bfloat16), np.ones((2, 6), np.float32)
    with pytest.raises(NotImplementedError, match=r"^k: got dtype float8_e4m3fn for the backward pass, expected "):
        cd.ContextParallel(comm, split="contiguous").backward(x, X, X, X, x, lse, **NO_SCALES)
