"""``batch_invariant=True`` on the kernels, in the emulator: a sequence has the same bits alone and among any others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuflash.emulator.passes import backward_jvp, jvp
from cuflash.plan import DeviceSpec
from cuflash.spec.options import Options
from cuflash.spec.problem import make_problem
from tests.emulate import attention
from tests.invariance import BATCHINGS, Sequences, assert_invariant, sequences
from tests.sampling import examples

# What kernels are compiled for; the rest is drawn. Decode of packed sequences has other kernels.
MANY: dict[str, Any] = {"queries": (65, 70, 97), "keys": (40, 80, 129), "most_pairs": 2**15}
FEW: dict[str, Any] = {"queries": (1, 2), "keys": (5, 300, 1030, 2100), "most_pairs": 2**15}
GRADIENTS = ("dq", "dk", "dv")
KERNELS: dict[str, tuple[str, str, int, dict[str, Any], dict[str, Any]]] = {
    "8.0, half precision": ("8.0", "bfloat16", 64, {"causal": True}, MANY),
    "8.0, float32": ("8.0", "float32", 16, {"window": (60, None)}, MANY),
    "8.0, float64": ("8.0", "float64", 16, {}, MANY),
    "7.5, half precision": ("7.5", "float16", 16, {}, MANY),
    "9.0, half precision": ("9.0", "bfloat16", 64, {"causal": True}, MANY),
    "9.0, window": ("9.0", "float16", 64, {"causal": True, "window": (60, None)}, MANY),
    "9.0, full, wider": ("9.0", "float16", 128, {}, MANY),
    "9.0, float32": ("9.0", "float32", 16, {"causal": True}, MANY),
    "8.0, decode": ("8.0", "bfloat16", 64, {"causal": True}, FEW),
    "8.0, decode of float32": ("8.0", "float32", 16, {}, FEW),
    "9.0, decode": ("9.0", "bfloat16", 64, {"causal": True}, FEW),
    "9.0, decode of a window": ("9.0", "float16", 64, {"causal": True, "window": (600, None)}, FEW),
}


def on_kernels(arch: str | DeviceSpec) -> Any:
    """Passes by the kernels for a device, as `tests.invariance.by_calls` names them."""

    def compute(options: dict[str, Any], arrays: dict[str, Any], passes: Sequence[str]) -> dict[str, Any]:
        given = {name: x for name, x in arrays.items() if name != "dout"}
        others = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
        problem = make_problem(Options(**options), given["q"], given["k"], given["v"], **others)
        wanted = ("max", "entropy") if "want" in passes else ()
        names = ("out", "lse", *wanted)
        found = dict(zip(names, attention.forward(problem, given, want=wanted, arch=arch), strict=True))
        if "backward" in passes:
            gradients = attention.backward(problem, arrays, found["out"], found["lse"], arch=arch, need=GRADIENTS)
            found |= dict(zip(GRADIENTS, gradients, strict=True))
        if "tangents" in passes:
            moved = {"tq": given["q"], "tv": given["v"]}
            names = ("out", "lse", "tout", "tlse")
            of_jvp = dict(zip(names, jvp(problem, given | moved, arch=arch), strict=True))
            tangents = backward_jvp(problem, arrays | moved | of_jvp, arch=arch)
            found |= {"tout": of_jvp["tout"], "tlse": of_jvp["tlse"]} | dict(
                zip(("tdq", "tdk", "tdv"), tangents, strict=True)
            )
        return found

    return compute


def drawn_for(name: str) -> Any:
    """Strategy for sequences of the kernels of this name."""
    _, dtype, dim, options, sizes = KERNELS[name]

    def of_kernel(drawn: Sequences) -> Sequences:
        return replace(drawn, options=options, sinks=False, slopes=False, head_dim=dim, head_dim_v=dim)

    return sequences(dtypes=(dtype,), **sizes).map(of_kernel)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", KERNELS)
def test_a_sequence_has_the_same_bits_among_others(name):
    arch, sizes = KERNELS[name][0], KERNELS[name][-1]
    batchings = BATCHINGS if sizes is MANY else tuple(x for x in BATCHINGS if x != "packed")
    passes = st.sampled_from([("backward",), ("want",), ("tangents",)] if sizes is MANY else [()])

    @settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(drawn_for(name), passes, st.sampled_from([1, 3, 132]))
    def holds(drawn, passes, num_sms):
        device = replace(DeviceSpec.for_arch(arch), num_sms=num_sms)
        assert_invariant(drawn, passes, on_kernels(device), batchings)

    holds()


ONE = Sequences(
    lengths=((1, 1100), (1, 300)), heads_kv=1, group=2, head_dim=64, head_dim_v=64, dtype="bfloat16", options={}
)
DIFFERENT: dict[str, tuple[str, Sequences, str, tuple[str, ...]]] = {
    "splits of keys": ("9.0", ONE, "batch", ()),
    "splits of keys, every device": ("8.0", ONE, "batch", ()),
    "shared tiles of keys": ("9.0", replace(ONE, lengths=((1300, 100), (70, 40)), group=1), "batch", ("backward",)),
    "shared heads of a group": ("8.0", replace(ONE, lengths=((97, 150), (70, 40))), "batch", ("backward",)),
    "float32 as bf16 terms": (
        "9.0",
        replace(ONE, lengths=((200, 200), (70, 40)), group=1, dtype="float32", head_dim=16, head_dim_v=16),
        "packed",
        (),
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", DIFFERENT)
def test_without_the_option_bits_differ(name):
    """So the test above would notice a plan that ignores the option."""
    arch, drawn, batching, passes = DIFFERENT[name]
    plain = replace(drawn, options={"batch_invariant": False, "deterministic": True})
    with pytest.raises(AssertionError, match=f"{batching} and alone"):
        device = replace(DeviceSpec.for_arch(arch), num_sms=3 if passes else 132)
        assert_invariant(plain, passes, on_kernels(device), (batching,))
