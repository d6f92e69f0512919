"""Wide fragments are read without bank conflicts. The emulator counts those of ldmatrix; here are those of pairs."""

from pathlib import Path

import numpy as np
import pytest

from cuflash import emulator
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.tiles import round_up
from cuflash.spec.options import Options
from cuflash.spec.problem import make_problem

HERE = Path(__file__).resolve().parent

LINE = 128  # bytes that shared memory delivers at once


def passes_of(addresses, access):
    """How often one instruction of a warp asks shared memory: once for every 128 bytes, if there are no conflicts.

    Lanes are served in order, as many at once as fill a line; each of them gets its `access` bytes at once.
    """
    passes = 0
    for lanes in addresses.reshape(-1, LINE // access):
        banks = (lanes[:, None] + np.arange(0, access, 4)) % LINE // 4
        _, counts = np.unique(banks, return_counts=True)
        passes += counts.max()
    return passes


@pytest.mark.parametrize("head_dim", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pairs_are_read_without_conflicts(dtype, head_dim):
    x = np.zeros((3, head_dim), dtype)
    plan = choose_plan(make_problem(Options(), x, x, x), DeviceSpec.for_arch("9.0"))
    (kernel,) = plan.kernels
    dim = round_up(head_dim, plan.tiles[0].dim_multiple)
    addresses = emulator.guarded_array((dim // 16 * 4, 32), np.uint32)
    module = emulator.build(HERE / "pair_addresses.cu", dict(kernel.defines))
    params = np.array([addresses.ctypes.data], np.uint64)
    module.launch(kernel.name, params, grid=1, threads=32, shared_bytes=16)
    access = 2 * x.itemsize
    for pattern in addresses:
        assert len(set(pattern.tolist())) == 32
        assert not (pattern % access).any()
        assert passes_of(pattern, access) == 32 * access // LINE


def test_conflicts_are_counted():
    assert passes_of(8 * np.arange(32), 8) == 2
    assert passes_of(128 * np.arange(32), 8) == 32
    assert passes_of(np.concatenate([16 * np.arange(16), 16 * np.arange(16)]), 16) == 4
