"""Operations of kernels/helpers/merge.cu in the emulator compared with those of NumPy, for one problem."""

from pathlib import Path

import numpy as np

from cuflash.gpu import merging
from cuflash.shards import merge as shards_merge
from tests.emulate.launcher import DeviceArray, launcher

ROWS = (2, 3, 5)


def on_device(array: np.ndarray) -> DeviceArray:
    found = DeviceArray(array.shape, array.dtype)
    found[...] = array
    return found


def check(columns: int, kernels: Path | None = None) -> None:
    """Raise AssertionError where an operation of a folder of kernels is wrong."""
    random = np.random.default_rng(0)
    outs = [random.standard_normal((*ROWS, columns)).astype(np.float32) for _ in range(3)]
    lses = [(3 * i + random.standard_normal(ROWS)).astype(np.float32) for i in range(3)]
    outs[1][0], lses[1][0] = np.nan, -np.inf
    lses[0][0, 0, 0] = lses[2][0, 0, 0] = -np.inf
    lses[2][1, 0, 0] = lses[0][1, 0, 0] + 200
    dout, dlse = outs[0] + outs[2], random.standard_normal(ROWS).astype(np.float32)
    out, lse = np.empty_like(dout), np.empty_like(dlse)
    shards_merge.merge_into(outs, lses, out, lse)
    with launcher("8.0", computes=True) as found, np.errstate(all="ignore"):
        found.kernels = kernels
        got_out, got_lse = on_device(out), on_device(lse)

        def close(x: np.ndarray, y: np.ndarray) -> None:
            np.testing.assert_allclose(np.asarray(x), y, rtol=1e-5, atol=1e-5)

        merging.merge(got_out, got_lse, list(map(on_device, outs)), list(map(on_device, lses)))
        close(got_out, out)
        close(got_lse, lse)
        merging.add(got_out, [on_device(x) for x in (dout, outs[2])])
        close(got_out, dout + outs[2])
        merging.minus_delta(got_lse, on_device(dout), on_device(outs[2]), on_device(dlse))
        close(got_lse, dlse - (dout * outs[2]).sum(-1))
        gradients = np.empty_like(out), np.empty_like(lse)
        reads = (dout, outs[2], out, lses[2], lse, dlse)
        shards_merge._merge_backward(gradients[0], gradients[1], *reads)
        merging.merge_backward(got_out, got_lse, *map(on_device, reads))
        close(got_out, gradients[0])
        close(got_lse, gradients[1])
        _check_steps(outs, lses, out, lse)
        _check_pairs(outs)


def _check_steps(outs: list[np.ndarray], lses: list[np.ndarray], out: np.ndarray, lse: np.ndarray) -> None:
    total, row_sum = on_device(np.zeros_like(out)), on_device(np.zeros_like(lse))
    row_max, factor, weight = (on_device(np.full_like(lse, -np.inf)) for _ in range(3))
    for x, own in zip(outs, lses, strict=True):
        merging.softmax_step(row_max, row_sum, factor, weight, on_device(own))
        merging.rescale_and_add(total, on_device(x), factor, weight)
    got = on_device(out), on_device(lse)
    merging.normalize(*got, total, row_max, row_sum)
    for x, y in zip(got, (out, lse), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-5, atol=1e-5)


def _check_pairs(outs: list[np.ndarray]) -> None:
    """Rows of large lse, whose partial results weigh what the second numbers of pairs say; and one that has no key."""
    pairs = [np.stack([np.full(ROWS, -1e9), np.full(ROWS, rest)], axis=-1).astype(np.float32) for rest in (0.5, 2.0)]
    for x in pairs:
        x[1, 0, 0] = -np.inf, 0
    weights = np.exp([0.5, 2.0]) / np.exp([0.5, 2.0]).sum()
    expected = weights[0] * outs[0] + weights[1] * outs[2]
    expected[1, 0, 0] = 0
    got, lse = on_device(np.empty_like(outs[0])), on_device(np.empty_like(pairs[0]))
    merging.merge(got, lse, [on_device(outs[0]), on_device(outs[2])], list(map(on_device, pairs)))
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-5)
    rest = np.full(ROWS, np.log(np.exp([0.5, 2.0]).sum()), np.float32)
    rest[1, 0, 0] = 0
    np.testing.assert_allclose(np.asarray(lse)[..., 1], rest, rtol=1e-5)
