"""Packed sequences on every backend: by the oracle rule, alone or packed, whatever lies around them."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

import cuflash.testing as ct
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.emulate.attention import packed_sizes
from tests.judging import assert_oracle, assert_same_bits


class What(NamedTuple):
    """What kernels are compiled for: options of a case, and whether dq has a fixed order."""

    options: dict[str, Any]
    deterministic: bool = False

    def case(self, lengths, rest=0, **more):
        """Sequences with so many queries and keys, and so many rows after the last one."""
        of_queries, of_keys = zip(*lengths, strict=True) if lengths else ((), ())
        sizes = {"num_heads": 2, "num_heads_kv": 2, "head_dim": 16, "batch": len(lengths)}
        return ct.Case(**sizes | packed_sizes(of_queries, of_keys, rest) | self.options | more)

    def __str__(self):
        return ",".join(f"{name}={x}" for name, x in self.options.items()) + ",deterministic" * self.deterministic


ON_CPU = [
    What({"dtype": "float32", "causal": True}),
    What({"dtype": "bfloat16", "dropout": 0.5, "sinks": True, "num_heads_kv": 1, "layout": "bshd"}),
]
LARGE = {"num_heads": 4, "head_dim": 64, "dtype": "bfloat16"}
CONFIGURATIONS = {
    CORE: ON_CPU,
    FALLBACK: ON_CPU,
    "emulated 8.0 of 2 SMs": [
        What({"dtype": "float32", "causal": True}),
        What({"dtype": "float16", "alibi_slopes": (2,), "sinks": True, "dropout": 0.5, "num_heads_kv": 1}),
        What({"dtype": "float32", "causal": "top_left", "window": (9, None)}, True),
    ],
    # Both passes of compute capability 9.0: pairs of tiles, dq in order, split roles, large head dimensions.
    "emulated 9.0 of 2 SMs": [
        What({"dtype": "bfloat16", "head_dim": 64, "causal": True, "sinks": True}),
        What({
            "dtype": "float16", "head_dim": 128, "softcap": 5.0, "alibi_slopes": (2,), "dropout": 0.5, "num_heads_kv": 1
        }),
        What({"dtype": "float16", "head_dim": 256, "window": (40, 10)}, True),
    ],
    "emulated 9.0": [What({"dtype": "bfloat16", "head_dim": 64, "causal": True}, True)],
    DEVICE: [
        What(LARGE | {"dtype": dtype, "causal": causal, "head_dim": head_dim}, True)
        for dtype, head_dim in (("float16", 64), ("float16", 128), ("float16", 256), ("float32", 64))
        for causal in (False, True)
    ],
}  # fmt: skip


@st.composite
def cases_of(draw, what):
    """Cases whose sequences end around the edges of tiles; some are empty."""
    lengths = st.lists(st.sampled_from((0, 1, 16, 40, 63, 64, 65, 100, 129, 200)), min_size=1, max_size=4)
    sequences = [(n, draw(st.sampled_from((n, 0, 7, 64, 130)))) for n in draw(lengths)]
    more: dict[str, Any] = {"dlse": draw(st.booleans()), "seed": draw(st.integers(0, 2**16))}
    if "alibi_slopes" in what.options:
        more["alibi_slopes"] = draw(st.sampled_from([(2,), (len(sequences), 2)]))
    return what.case(
        sequences, draw(st.sampled_from((0, 5, 70))), layout=draw(st.sampled_from(("bhsd", "bshd"))), **more
    )


@on_backends(
    {name: rows for name, rows in CONFIGURATIONS.items() if name.startswith("emulated")}, of="what", emulated=32
)
def test_oracle(backend, what):
    def holds(case, how):
        assert_oracle(case, backend.results(case, deterministic=what.deterministic, **how))

    backend.draw(40, holds, case=cases_of(what), how=st.sampled_from(backend.schedules))


LENGTHS = [(300, 300), (0, 40), (65, 129), (1, 70), (128, 0), (513, 600)]


@on_backends({DEVICE: ("bfloat16", "float32")})
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left", "layout": "bshd", "dlse": True},
        {"window": (100, 30), "softcap": 5.0},
        {"causal": True, "alibi_slopes": (6, 4), "sinks": True, "dlse": True},
        {"dropout": 0.3, "layout": "bshd"},
    ],
    ids=str,
)
def test_options(backend, dtype, options, deterministic):
    case = What(LARGE).case(LENGTHS, rest=77, num_heads_kv=2, **options | {"dtype": dtype})
    need = ct.gradients_of(case.problem)
    assert_oracle(case, backend.results(case, need=need, deterministic=deterministic))


@on_backends({DEVICE: ("float16", "float64")})
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [24, 128, 192, 256])
def test_head_dims(backend, dtype, head_dim, causal):
    own = {"num_heads_kv": 2, "dtype": dtype, "head_dim": head_dim, "causal": causal}
    case = What(LARGE).case(LENGTHS, rest=30, **own)
    for deterministic in (False, True):
        assert_oracle(case, backend.results(case, deterministic=deterministic))


@on_backends(CONFIGURATIONS, of="what", emulated=32)
def test_neighbours_change_nothing(backend, what):
    """Not a bit, though they are NaN: neither a sequence's results, nor what follows the last one."""
    lengths = LENGTHS if backend.name == DEVICE else [(70, 40), (100, 129), (13, 30)]
    case = what.case(lengths, rest=9)
    if "alibi_slopes" in what.options:
        case = replace(case, alibi_slopes=(len(lengths), 2))
    axis = 0 if case.layout == "bshd" else 1
    clean = case.arrays()
    before = backend.results(case, clean, deterministic=what.deterministic, **backend.schedules[-1])

    def rows_of(x, name, rows):
        return x[rows] if axis == 0 and name != "lse" else x[:, rows]

    for at in range(len(lengths)) if backend.name == DEVICE else (1,):
        of_rows, of_keys = (slice(*starts[at : at + 2]) for starts in (case.cu_seqlens_q, case.cu_seqlens_k))
        poisoned = clean | {name: np.full_like(clean[name], np.nan) for name in ("q", "k", "v", "dout")}
        for name in ("q", "k", "v", "dout"):
            own = of_keys if name in "kv" else of_rows
            rows_of(poisoned[name], name, own)[...] = rows_of(clean[name], name, own)
        after = backend.results(case, poisoned, deterministic=what.deterministic, **backend.schedules[-1])
        for name in before.keys() - {"dsinks"}:
            own, end = (of_keys, case.cu_seqlens_k) if name in ("dk", "dv") else (of_rows, case.cu_seqlens_q)
            if name == "dq" and not what.deterministic:
                assert np.isfinite(rows_of(after[name], name, own).astype(np.float32)).all()
            else:
                assert_same_bits([rows_of(after[name], name, own)], [rows_of(before[name], name, own)])
            assert np.all(rows_of(after[name], name, slice(end[-1], None)) == (-np.inf if name == "lse" else 0))


# Lengths of sequences, and the rows after the last one. Lanes of a warp look at 32 entries at once, these rows too.
SHORT = tuple(i * 5 % 9 for i in range(70))  # 0, 5, 1, 6, ...
LONGER = tuple(i * 37 % 90 for i in range(32))
MANY: dict[str, tuple[tuple[int, ...], int]] = {
    "none": ((), 70),
    "all empty": ((0,) * 33, 0),
    "all empty but rows behind": ((0,) * 32, 9),
    "31": (SHORT[:31], 5),
    "32": (SHORT[:32], 0),
    "33": (SHORT[:33], 5),
    "70": (SHORT, 40),
    "one long": ((*SHORT[:40], 400, *SHORT[40:], 0, 0), 5),
    "long and short": ((1000, *(10,) * 29), 10),
}
MANY_LONGER: dict[str, tuple[tuple[int, ...], int]] = {
    "31": (LONGER[:31], 30),
    "32": (LONGER, 30),
    "100 with a long one": ((*(i % 40 for i in range(60)), 1500, *(i * 53 % 130 for i in range(39))), 30),
    "1100": ((*(i % 3 for i in range(1000)), 300, *(0,) * 99), 30),
    "empty": ((0,) * 70, 30),
}
# Long ones are shared by all threads, short ones computed side by side.
LONG_AND_SHORT = (What({"dtype": "float32", "head_dim": 32, "sinks": True, "dlse": True}), "long and short")
OF_KERNELS = [name for name in MANY if name != "long and short"]
FOR_MANY = {
    CORE: [LONG_AND_SHORT],
    FALLBACK: [LONG_AND_SHORT],
    "emulated 8.0 of 2 SMs": [(What({"dtype": "float32", "causal": True}), name) for name in OF_KERNELS],
    "emulated 9.0 of 2 SMs": [
        (what, name)
        for what in (
            What({"dtype": "bfloat16", "head_dim": 64, "causal": True}),
            What({"dtype": "bfloat16", "head_dim": 64, "window": (40, 10)}, True),
        )
        for name in OF_KERNELS
    ],
    DEVICE: [
        (What(LARGE | {"num_heads_kv": 2} | options, deterministic), name)
        for options in ({}, {"causal": True}, {"window": (100, 30), "num_heads": 20})
        for deterministic in (False, True)
        for name in MANY_LONGER
    ],
}


@on_backends(FOR_MANY, of="many", emulated=32)
def test_many_sequences(backend, many):
    what, name = many
    lengths, rest = (MANY_LONGER if backend.name == DEVICE else MANY)[name]
    few_heads = {"num_heads": 2, "num_heads_kv": 1} if name == "1100" else {}  # the oracle goes over them one by one
    case = what.case([(n, n) for n in lengths], rest, **few_heads)
    assert_oracle(case, backend.results(case, deterministic=what.deterministic, **backend.schedules[-1]))


OF_1083 = (*(0,) * 500, 70, *(0,) * 539, 3, 2, *(0,) * 40, 1)
LOOPS: dict[str, Any] = {
    "emulated 8.0 of 2 SMs": ["1083 sequences"],
    "emulated 9.0 of 2 SMs": ["1083 sequences"],
    "emulated 9.0 of 5 SMs": ["18 heads"],
}


@on_backends(LOOPS, of="name", emulated=32)
def test_loops_over_sequences(backend, name):
    """More sequences than lanes look at in two steps, and more heads than are interleaved."""
    heads, heads_kv, lengths = (18, 2, SHORT[:40]) if name == "18 heads" else (1, 1, OF_1083)
    what = What({"dtype": "float16", "head_dim": 64, "num_heads": heads, "num_heads_kv": heads_kv})
    case = what.case([(n, n) for n in lengths], 5)
    assert_oracle(case, backend.results(case, need=() if name == "18 heads" else None))


WILD = [
    ((-5, 10**6, 3, 80), (0, 2**31 - 1, -(2**31), 7)),
    ((0, 300, 0, 10, 300), (0, 300, 0, 10, 300)),  # places of tiles meet: nobody may wait for a turn that never comes
    ((0, *(300, 0) * 40), (0, *(300, 0) * 40)),  # more rows than there are, after the first 32 sequences too
    ((900, 700, 500, 300, 100, 50, 0), (-7, 1, 2, 3, 4, 5, 2**30)),
]
OF_WILD = {name: rows for name, rows in CONFIGURATIONS.items() if name not in (CORE, FALLBACK)}
OF_WILD[DEVICE] = [
    What(LARGE | {"dtype": dtype, "causal": causal}, deterministic)
    for dtype in ("bfloat16", "float32")
    for causal in (False, True)
    for deterministic in (False, True)
]


@on_backends(OF_WILD, of="what", emulated=32)
def test_nothing_outside_is_touched_whatever_the_starts(backend, what):
    """In the emulator memory ends where arrays do. Results are undefined, and a later call is as right as before."""
    case = what.case([(300, 300)])
    for starts in WILD:
        names = ("cu_seqlens_q", "cu_seqlens_k")
        wild = {name: np.array(x, np.int32) for name, x in zip(names, starts, strict=True)}
        backend.results(case, case.arrays() | wild, deterministic=what.deterministic)
    assert_oracle(case, backend.results(case, deterministic=what.deterministic))
