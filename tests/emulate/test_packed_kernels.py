"""Packed sequences through the real kernels: against the oracle, and bitwise as each sequence would be alone."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.spec.problem import make_problem
from tests.emulate import attention

pytestmark = pytest.mark.one_in(32)


@dataclass(frozen=True)
class Kernels:
    """Which kernels run, and what they are compiled for."""

    dtype: str
    arch: str
    head_dim: int = 16
    causal: object = False
    options: tuple = ()  # of the case
    deterministic: bool = False
    group: int = 1
    num_sms: int = 2
    backward: bool = True

    def __str__(self):
        parts = (self.dtype, self.arch, f"d{self.head_dim}", f"causal={self.causal}" * bool(self.causal))
        names = (*parts, *(name for name, _ in self.options), "deterministic" * self.deterministic)
        return "-".join(filter(None, names))

    @property
    def device(self):
        return replace(DeviceSpec.for_arch(self.arch), num_sms=self.num_sms)


CONFIGURATIONS = [
    Kernels("float32", "8.0", causal=True),
    Kernels("float16", "8.0", options=(("alibi_slopes", True), ("sinks", True), ("dropout", 0.5)), group=2),
    Kernels("float32", "8.0", causal="top_left", options=(("window", (9, None)),), deterministic=True),
    # Both passes of compute capability 9.0: pairs of tiles, dq in order, split roles, large head dimensions.
    Kernels("bfloat16", "9.0", 64, causal=True, options=(("sinks", True),)),
    Kernels("float16", "9.0", 128, options=(("softcap", 5.0), ("alibi_slopes", True), ("dropout", 0.5)), group=2),
    Kernels("bfloat16", "9.0", 64, causal=True, deterministic=True, num_sms=132),
    Kernels("float16", "9.0", 256, options=(("window", (40, 10)),), deterministic=True),
]


@st.composite
def cases_of(draw, what):
    """Cases whose sequences end around the edges of tiles; some are empty."""
    lengths = st.lists(st.sampled_from((0, 1, 16, 40, 63, 64, 65, 100, 129, 200)), min_size=1, max_size=4)
    of_queries = draw(lengths)
    of_keys = [draw(st.sampled_from((n, 0, 7, 64, 130))) for n in of_queries]
    rest = draw(st.sampled_from((0, 5, 70)))
    options = dict(what.options)
    if options.pop("alibi_slopes", False):
        options["alibi_slopes"] = draw(st.sampled_from([(2,), (len(of_queries), 2)]))
    return ct.Case(
        **attention.packed_sizes(of_queries, of_keys, rest),
        num_heads=2,
        num_heads_kv=2 // what.group,
        head_dim=what.head_dim,
        dtype=what.dtype,
        layout=draw(st.sampled_from(("bhsd", "bshd"))),
        causal=what.causal,
        dlse=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        **options,
    )


def both_passes(what, case, schedule, arrays=None):
    """Results by name."""
    arrays = case.arrays() if arrays is None else arrays
    options = replace(case.options, deterministic=what.deterministic)
    problem = make_problem(options, *ct.qkv(arrays), **ct.optional(arrays))
    common = {"arch": what.device, "schedule": schedule, **case.random}
    out, lse = attention.forward(problem, arrays, **common)
    gradients = attention.backward(problem, arrays, out, lse, **common) if what.backward else ()
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False))


@settings(max_examples=4)
@pytest.mark.parametrize("what", CONFIGURATIONS, ids=str)
@given(data=st.data())
def test_against_the_oracle(what, data):
    case, schedule = data.draw(cases_of(what)), data.draw(st.sampled_from(SCHEDULES))
    results = both_passes(what, case, schedule)
    ct.assert_forward(case, results.pop("out"), results.pop("lse"))
    if what.backward:
        ct.assert_backward(case, **results)


@settings(max_examples=2)
@pytest.mark.parametrize("what", CONFIGURATIONS, ids=str)
@given(data=st.data())
def test_neighbours_change_nothing(what, data):
    """Not a bit, though they are NaN: neither a sequence's results, nor what follows the last one."""
    lengths = [(70, 40), (100, 129), (13, 30)]
    starts_q, starts_k = (tuple(np.cumsum([0, *x]).tolist()) for x in zip(*lengths, strict=True))
    case = replace(
        data.draw(cases_of(what)), alibi_slopes=None, seqlen_q=starts_q[-1] + 20, seqlen_k=starts_k[-1] + 9,
        cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, batch=3,
    )  # fmt: skip
    case = replace(case, alibi_slopes=(3, 2)) if dict(what.options).get("alibi_slopes") else case
    schedule = data.draw(st.sampled_from(SCHEDULES))
    clean, poisoned = case.arrays(), case.arrays()
    rows, keys = (slice(starts[1], starts[2]) for starts in (starts_q, starts_k))
    for name in ("q", "k", "v", "dout"):
        axis = 0 if case.layout == "bshd" else 1
        inside = [slice(None)] * 3
        inside[axis] = keys if name in "kv" else rows
        poisoned[name] = np.full_like(clean[name], np.nan)
        poisoned[name][tuple(inside)] = clean[name][tuple(inside)]
    before, after = (both_passes(what, case, schedule, arrays) for arrays in (clean, poisoned))
    exact = {"out", "lse", "dk", "dv"} | ({"dq"} if what.deterministic else set())
    for name in exact & before.keys():
        axis = 0 if case.layout == "bshd" and name != "lse" else 1
        index = [slice(None)] * before[name].ndim
        index[axis] = keys if name in ("dk", "dv") else rows
        np.testing.assert_array_equal(after[name][tuple(index)], before[name][tuple(index)])
        index[axis] = slice(starts_k[-1] if name in ("dk", "dv") else starts_q[-1], None)
        assert np.all(after[name][tuple(index)] == (-np.inf if name == "lse" else 0))
    if "dq" in before:
        index = [slice(None)] * 3
        index[0 if case.layout == "bshd" else 1] = rows
        assert np.isfinite(after["dq"][tuple(index)].astype(np.float32)).all()


# Lengths of sequences, and the rows after the last one. Lanes of a warp look at 32 entries at once, these rows too.
SHORT = tuple(i * 5 % 9 for i in range(70))  # 0, 5, 1, 6, ...
MANY = {
    "none": ((), 70),
    "all empty": ((0,) * 33, 0),
    "all empty but rows behind": ((0,) * 32, 9),
    "31": (SHORT[:31], 5),
    "32": (SHORT[:32], 0),
    "33": (SHORT[:33], 5),
    "70": (SHORT, 40),
    "one long": ((*SHORT[:40], 400, *SHORT[40:], 0, 0), 5),
}
FOR_MANY = [
    Kernels("float32", "8.0", causal=True),
    Kernels("bfloat16", "9.0", 64, causal=True),
    Kernels("bfloat16", "9.0", 64, options=(("window", (40, 10)),), deterministic=True),
]


def case_of(what, lengths, rest, num_heads=2):
    return ct.Case(
        **attention.packed_sizes(lengths, lengths, rest), num_heads=num_heads,
        num_heads_kv=num_heads // what.group, head_dim=what.head_dim, dtype=what.dtype, causal=what.causal,
        **dict(what.options),
    )  # fmt: skip


@pytest.mark.parametrize(("what", "name"), list(itertools.product(FOR_MANY, MANY)), ids=str)
def test_many_sequences(what, name):
    case = case_of(what, *MANY[name])
    results = both_passes(what, case, SCHEDULES[-1])
    ct.assert_forward(case, results.pop("out"), results.pop("lse"))
    ct.assert_backward(case, **results)


@pytest.mark.parametrize("arch", ["8.0", "9.0"])
def test_more_than_32_times_32_sequences(arch):
    what = Kernels("float16", arch, 64)
    case = case_of(what, (*(0,) * 500, 70, *(0,) * 539, 3, 2, *(0,) * 40, 1), 4, num_heads=1)
    results = both_passes(what, case, SCHEDULES[0])
    ct.assert_forward(case, results.pop("out"), results.pop("lse"))
    ct.assert_backward(case, **results)


def test_sections_of_heads():
    """More heads than are interleaved: the loop over sequences starts over."""
    what = Kernels("float16", "9.0", 64, group=9, num_sms=5, backward=False)
    case = case_of(what, SHORT[:40], 5, num_heads=18)
    results = both_passes(what, case, SCHEDULES[0])
    ct.assert_forward(case, results.pop("out"), results.pop("lse"))


WILD = [
    ((-5, 10**6, 3, 80), (0, 2**31 - 1, -(2**31), 7)),
    ((0, 300, 0, 10, 300), (0, 300, 0, 10, 300)),  # places of tiles meet: nobody may wait for a turn that never comes
    ((0, *(300, 0) * 40), (0, *(300, 0) * 40)),  # more rows than there are, after the first 32 sequences too
]


@pytest.mark.parametrize(
    ("what", "starts_q", "starts_k"), [(what, *starts) for what in CONFIGURATIONS for starts in WILD], ids=str
)
def test_nothing_outside_is_touched_whatever_the_starts(what, starts_q, starts_k):
    """Arrays and scratch memory end at pages that cannot be accessed."""
    options = dict(what.options)
    case = ct.Case(
        seqlen_q=300, seqlen_k=300, num_heads=2, num_heads_kv=2 // what.group, head_dim=what.head_dim, dtype=what.dtype,
        causal=what.causal, cu_seqlens_q=(0, 300), cu_seqlens_k=(0, 300),
        **options | ({"alibi_slopes": (2,)} if "alibi_slopes" in options else {}),
    )  # fmt: skip
    arrays = case.arrays() | {
        "cu_seqlens_q": np.array(starts_q, np.int32),
        "cu_seqlens_k": np.array(starts_k, np.int32),
    }
    both_passes(what, case, SCHEDULES[0], arrays)
