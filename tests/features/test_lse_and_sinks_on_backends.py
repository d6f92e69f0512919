"""Gradients with respect to lse, and sinks, in every kernel: by the oracle rule."""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.plan import choose_plan
from cuflash.spec import passes
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.judging import assert_oracle, assert_within

DTYPES = ("float16", "bfloat16", "float32", "float64")
# Long enough for the kernel that splits float32, and with rows that attend to no key.
SIZES: dict[str, Any] = {"seqlen_q": 150, "seqlen_k": 140, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
CASE = ct.Case(**SIZES, causal=True, dlse=True)
LENGTHS = ((5, 9), (113, 203), (300, 1000), (3, 2000))  # on a device; the longer ones take kernels that split float32


class Row(NamedTuple):
    """Options of a case, and the kernel that serves it in the emulator."""

    options: dict[str, Any]
    kernel: str = ""
    deterministic: bool = False

    def __str__(self):
        return self.kernel or ",".join(f"{name}={x}" for name, x in self.options.items())

    def case(self, **more):
        return replace(CASE, **self.options | more)

    def assert_served(self, backend, case, pass_):
        if self.kernel:
            problem = replace(case.problem, deterministic=self.deterministic)
            plan = choose_plan(problem, backend.device, pass_)
            assert self.kernel.split()[0] + ".cu" in {kernel.source for kernel in plan.kernels}
            assert "decode" not in self.kernel or len(plan.kernels) == 1


BACKWARD = {
    "emulated 8.0": [
        Row({"dtype": "float16"}, "sm80/backward"),
        Row({"strides": "flipped"}, "sm80/backward float32"),
    ],
    "emulated 8.6": [Row({"dtype": "bfloat16", "layout": "bshd"}, "sm80/backward_dq", True)],
    "emulated 9.0": [
        Row({"dtype": "bfloat16"}, "sm90/backward"),
        Row({"dtype": "float16", "kv_lengths": (100,)}, "sm90/backward in order", True),
        Row({"num_heads_kv": 1}, "sm90/backward_fp32"),
        Row({"dtype": "float64", "ndim": 3}, "sm80/backward float64"),
    ],
}
WITH: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"mask": (4, 1, 1)}, {"kv_lengths": (0, 9)}, {"strides": "padded"},
)  # fmt: skip
ON_DEVICE = [
    Row({"seqlen_q": m, "seqlen_k": n, "batch": 2, "dtype": dtype, "causal": False, **own}, deterministic=deterministic)
    for (m, n), own, dtype, deterministic in itertools.product(
        ((5, 9), (113, 203), (300, 1000)),
        WITH,
        DTYPES,
        (False, True),
    )
]


@on_backends(BACKWARD | {DEVICE: ON_DEVICE}, of="row", emulated=16, device=1)
def test_gradient_of_lse(backend, row):
    def holds(spread, seed, how):
        case = row.case(score_spread=spread, seed=seed)
        row.assert_served(backend, case, passes.BACKWARD)
        arrays = case.arrays(backend.convert)
        lse = backend.results(case, arrays, need=())["lse"]
        # Of rows that attend to no key it counts for nothing.
        arrays["dlse"][backend.convert(np.isneginf(lse))] = np.nan
        assert_oracle(case, backend.results(case, arrays, deterministic=row.deterministic, **how))

    if backend.name == DEVICE:
        holds(1.0, 0, {})
    else:
        drawn: dict[str, Any] = {"spread": st.sampled_from([1.0, 8.0]), "seed": st.integers(0, 2**16)}
        backend.draw(40, holds, how=st.sampled_from(backend.schedules), **drawn)


@on_backends(BACKWARD, of="row", emulated=16)
def test_lse_alone(backend, row):
    """With dout = 0, dv is 0 and dq, dk are gradients of lse."""
    case = row.case()
    arrays = case.arrays()
    arrays["dout"][...] = 0
    results = backend.results(case, arrays, deterministic=row.deterministic)
    assert_within(results, ct.yardsticks(case.problem, arrays))
    assert not results["dv"].any() and results["dq"].any()


MERGED: dict[str, tuple[str, ...]] = dict.fromkeys((CORE, FALLBACK, DEVICE), DTYPES)
MERGED |= {"emulated 8.0": ("float32",), "emulated 9.0": ("bfloat16", "float64")}


@on_backends(MERGED, emulated=16)
@pytest.mark.parametrize("causal", [False, True])
def test_splits_merged_are_the_whole(backend, dtype, causal):
    """Forward, and gradients by the weights of the splits."""
    spread = 1.0 if backend.name == DEVICE else 4.0
    for m, n in LENGTHS if backend.name == DEVICE else ((150, 140),):
        case = replace(CASE, seqlen_q=m, seqlen_k=n, dtype=dtype, causal=causal, score_spread=spread)
        arrays, options = case.arrays(backend.convert), replace(case.options, causal=False)
        keys = np.array_split(np.random.default_rng(0).permutation(case.seqlen_k), 3)
        inputs = ct.split_keys(case, keys)
        outs, lses = zip(*(map(backend.convert, backend.run(options, x, ())[:2]) for x in inputs), strict=True)
        out, lse = cuflash.merge(outs, lses)
        assert (type(out), out.dtype, lse.dtype) == (type(outs[0]), arrays["q"].dtype, arrays["dlse"].dtype)
        ct.assert_forward(case, out, lse)
        given = cuflash.merge_backward(arrays["dout"], outs, lses, out, lse, dlse=arrays["dlse"])
        found = {name: np.zeros(arrays[name[1:]].shape) for name in ("dq", "dk", "dv")}
        for some, x, dout, dlse in zip(keys, inputs, *given, strict=True):
            own = {"dout": ct.to_numpy(dout), "dlse": ct.to_numpy(dlse)}
            gradients = backend.run(options, x | own, ("dq", "dk", "dv"))[2]
            found["dq"] += gradients["dq"]
            found["dk"][:, :, some], found["dv"][:, :, some] = gradients["dk"], gradients["dv"]
        expected = ct.yardsticks(case.problem, case.arrays())
        assert_within(found, {name: expected[name].looser(3) for name in found})  # the splits are rounded too


# ---- sinks -----------------------------------------------------------------------------------------------------------

FORWARD = {
    "emulated 8.0": [
        Row({"dtype": "float16", "strides": "flipped"}, "sm80/forward"),
        Row({"head_dim": 40}, "sm80/forward float32"),
        Row({"dtype": "float32", "seqlen_q": 3, "seqlen_k": 700, "kv_lengths": (40,)}, "sm80/decode"),
    ],
    "emulated 9.0 of 1 SMs": [
        Row({"dtype": "bfloat16", "seqlen_q": 3, "seqlen_k": 600, "batch": 2}, "sm90/decode of one split"),
    ],
    "emulated 9.0": [
        Row({"dtype": "float64", "softcap": 5.0}, "sm80/forward float64"),
        Row({"dtype": "bfloat16"}, "sm90/forward"),
        Row({"dtype": "float16", "bias": (150, 140), "layout": "bshd"}, "sm90/forward scores"),
        Row({"num_heads_kv": 1}, "sm90/forward_fp32"),
        Row({"dtype": "float16", "seqlen_q": 3, "seqlen_k": 700, "kv_lengths": (40,)}, "sm90/decode shared"),
        Row({"dtype": "float64", "seqlen_q": 1, "seqlen_k": 700, "batch": 2}, "sm80/decode float64"),
        Row(
            {"dtype": "float16", "seqlen_q": 16, "seqlen_k": 700, "num_heads_kv": 1, "head_dim_v": 256},
            "helpers/split_combine",
        ),
    ],
}


@on_backends(FORWARD, of="row", emulated=16)
def test_sinks(backend, row):
    def holds(spread, seed, how):
        case = row.case(sinks=True, score_spread=spread, seed=seed)
        row.assert_served(backend, case, passes.FORWARD)
        assert_oracle(case, backend.results(case, need=(), **how))

    drawn: dict[str, Any] = {"spread": st.sampled_from([1.0, 8.0, 30.0]), "seed": st.integers(0, 2**16)}
    backend.draw(40, holds, how=st.sampled_from(backend.schedules), **drawn)


# In rows that attend to keys and in rows that attend to none.
ON_CPU = [Row({"seqlen_k": 70, "head_dim": 8, "dtype": dtype}) for dtype in DTYPES[1:]]
# Keys shared by blocks, whose results are combined, or left to one block.
DECODING = [
    Row({"seqlen_q": n, "seqlen_k": 1500, "batch": batch, "dtype": "bfloat16"}) for n in (1, 3) for batch in (1, 200)
]


@on_backends(FORWARD | {CORE: ON_CPU, FALLBACK: ON_CPU, DEVICE: DECODING}, of="row", emulated=16)
def test_sinks_of_any_size(backend, row):
    """Those that outweigh all keys, that count for nothing, and none at all; and the drawn ones."""
    case = row.case(sinks=True)
    need = ct.gradients_of(case.problem) if backend.is_cpu else ()
    for sinks in ([20.0, -300.0, -np.inf, 0.0], [70.0, 30.0, -30.0, -200.0], None):
        arrays = case.arrays()
        if sinks is not None:
            arrays["sinks"][...] = sinks
        results = backend.results(case, arrays, need=need)
        assert_within(results, ct.yardsticks(case.problem, arrays))


@on_backends(BACKWARD, of="row", emulated=16)
def test_gradients_of_sinks(backend, row):
    def holds(dlse, spread, seed, how):
        case = row.case(sinks=True, dlse=dlse, batch=1 if "ndim" in row.options else 2, score_spread=spread, seed=seed)
        case = replace(case, kv_lengths=case.kv_lengths and (100, 0))
        assert_oracle(case, backend.results(case, deterministic=row.deterministic, **how))

    drawn: dict[str, Any] = {"spread": st.sampled_from([1.0, 8.0]), "seed": st.integers(0, 2**16)}
    backend.draw(40, holds, dlse=st.booleans(), how=st.sampled_from(backend.schedules), **drawn)
