"""Operations of kernels/helpers/merge.cu in the emulator compared with those of NumPy, for one problem."""

from pathlib import Path

import numpy as np

from cuflash.gpu import merging
from cuflash.shards import partial_results
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
    partial_results.merge_into(outs, lses, out, lse)
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
        partial_results.merge_backward_into(gradients[0], gradients[1], *reads)
        merging.merge_backward(got_out, got_lse, *map(on_device, reads))
        close(got_out, gradients[0])
        close(got_lse, gradients[1])
        _check_steps(outs, lses, out, lse)
        _check_pairs(outs)
        _check_tangents(outs, lses)


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


def _check_tangents(outs: list[np.ndarray], lses: list[np.ndarray]) -> None:
    """At once, one after the other, and those of gradients."""
    random = np.random.default_rng(1)
    touts = [random.standard_normal(x.shape).astype(np.float32) for x in outs]
    tlses = [random.standard_normal(x.shape).astype(np.float32) for x in lses]
    for lse, tout, tlse in zip(lses, touts, tlses, strict=True):
        tout[lse == -np.inf] = tlse[lse == -np.inf] = np.nan
    partials = dict(zip(("out", "lse", "tout", "tlse"), (outs, lses, touts, tlses), strict=True))
    merged = {name: np.zeros_like(own[0]) for name, own in partials.items()}
    tangents = merging.Tangents(merged["tout"], merged["tlse"], touts, tlses)
    partial_results.merge_into(outs, lses, merged["out"], merged["lse"], (), tangents)
    there = {name: list(map(on_device, own)) for name, own in partials.items()}
    got = {name: on_device(x) for name, x in merged.items()}
    results = merging.Tangents(got["tout"], got["tlse"], there["tout"], there["tlse"])
    merging.merge(got["out"], got["lse"], there["out"], there["lse"], results)
    steps = {name: on_device(x) for name, x in merged.items()}
    row_sum, factor, weight, shift, own_shift, tlse = (on_device(np.zeros_like(lses[0])) for _ in range(6))
    row_max, total, tangent = on_device(np.full_like(lses[0], -np.inf)), *(on_device(0 * merged["out"]) for _ in "ot")
    for out, lse, tout, own_tlse in zip(*there.values(), strict=True):
        merging.softmax_step(row_max, row_sum, factor, weight, lse, (tlse, shift, own_shift, own_tlse))
        merging.rescale_and_add(total, out, factor, weight, (tangent, tout, shift, own_shift))
    for name, sums in (("out", total), ("tout", tangent)):
        merging.normalize(steps[name], steps["lse"], sums, row_max, row_sum)
    for name in ("tout", "tlse"):
        for x in (got, steps | {"tlse": tlse}):
            np.testing.assert_allclose(np.asarray(x[name]), merged[name], rtol=1e-5, atol=1e-5, err_msg=name)
    _check_tangents_of_gradients(partials, merged)


def _check_tangents_of_gradients(partials: dict[str, list[np.ndarray]], merged: dict[str, np.ndarray]) -> None:
    random = np.random.default_rng(2)
    optional = {name: random.standard_normal(ROWS).astype(np.float32) for name in ("dlse", "tdlse")}
    optional["tdout"], dout = (random.standard_normal(merged["out"].shape).astype(np.float32) for _ in range(2))
    given = merged | optional | {"dout": dout}
    there = {name: on_device(x) for name, x in given.items()}
    for i in range(len(partials["out"])):
        own = [partials[name][i] for name in ("out", "lse", "tout", "tlse")]
        right = [np.zeros_like(x) for x in own]
        both = (dout, own[0], merged["out"], own[1], merged["lse"], optional["dlse"])
        partial_results.merge_backward_into(right[0], right[1], *both)
        partial_results.merge_backward_tangents_into(right, own, given)
        got = [on_device(x) for x in right[2:]]
        names = ("out", "tout", "lse", "tlse")
        reads = (there["dout"], *(x for name in names for x in (on_device(partials[name][i]), there[name])))
        of_optional = (there[name] for name in optional)
        merging.merge_backward_tangents(got[0], got[1], reads, *of_optional)
        for x, y in zip(got, right[2:], strict=True):
            np.testing.assert_allclose(np.asarray(x), y, rtol=1e-5, atol=1e-4)
