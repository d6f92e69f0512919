"""The gradient of a per-pair bias of float32 by the main kernel, which adds tiles of dbias to memory or stores them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.emulator import SCHEDULES
from cuflash.plan import DeviceSpec
from cuflash.plan.sm90.tiles import BACKWARD_FLOAT32_SM90_TILES, BACKWARD_TF32_SM90_TILES
from cuflash.spec.passes import BACKWARD
from tests.calls import shifted
from tests.emulate import attention, checks
from tests.emulate.attention import forward_by_oracle, inputs_of, problem_of
from tests.emulate.checks import FEW
from tests.judging import bits

pytestmark = pytest.mark.one_in(3)

DEVICE = DeviceSpec.for_arch("9.0")
FEW_SMS = replace(DEVICE, num_sms=3)  # blocks then split no heads of a group, and few of the tiles of keys
NEED = ("dq", "dk", "dv", "dbias")
NARROW, WIDE = BACKWARD_FLOAT32_SM90_TILES
TILES = {
    "as planned": None,
    "one stage": (replace(NARROW, num_stages=1, num_buffers=1),),
    "late dq": (replace(NARROW, dq_late=True),),
    "row of wide heads": (WIDE,),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal, sinks": {"causal": True, "sinks": True},
    "window": {"window": (120, 20)},
    "mask of keys": {"mask": (2, 1, 1, 152), "dlse": True},
    "mask of pairs": {"mask": (1, 4, 150, 152)},
    "lengths": {"kv_lengths": (100, 0), "bias_holes": True},
    "slopes": {"alibi_slopes": (4,), "causal": "top_left"},
    "dropout": {"dropout": 0.3},
    "blocks": {"seqlen_k": 256, "block_mask": (4,), "block_size": (64, 64)},
}


def case_of(options=(), **changes):
    sizes: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 150, "seqlen_k": 152}
    given = {"head_dim": 40, "dtype": "float32", "bias": (4, 150, 152)} | dict(options) | changes
    return ct.Case(**sizes | given)


def plan_of(problem, arrays, out, *, need=NEED, device=DEVICE, tiles=None):
    return attention.plan_for(problem, BACKWARD, arrays | {"out": out}, device, tiles, need)


def is_written(plan):
    """Whether the main kernel writes dbias, and no other kernel does."""
    makers = [kernel.source for kernel in plan.kernels if "_dbias" in kernel.name]
    return makers == len(makers) * ["sm90/backward_fp32.cu"] and makers != []


def run(case, *, need=NEED, device=DEVICE, tiles=None, deterministic=False, **options):
    problem, arrays = inputs_of(case, deterministic=deterministic)
    out, lse = forward_by_oracle(problem, arrays, **case.random)
    assert is_written(plan_of(problem, arrays, out, need=need, device=device, tiles=tiles))
    given = {"arch": device, "tiles": tiles, **case.random, **options}
    return dict(zip(need, attention.backward(problem, arrays, out, lse, need=need, **given), strict=True))


@pytest.mark.parametrize("kind", OPTIONS)
@FEW
@given(data=st.data())
def test_against_the_oracle(kind, data):
    """Whatever axes the bias has, and whatever hides pairs."""
    options = dict(OPTIONS[kind])
    seqlen_k = options.get("seqlen_k", 152)
    batch, heads = data.draw(st.sampled_from(((2, 4), (1, 4), (2, 1), (1, 1))))
    case = case_of(
        options,
        bias=(batch, heads, 150, seqlen_k),
        head_dim=data.draw(st.integers(1, 64)),
        head_dim_v=data.draw(st.integers(1, 64)),
        num_heads_kv=data.draw(st.sampled_from((1, 2, 4))),
        score_spread=data.draw(st.sampled_from((1.0, 8.0, 30.0))),
        seed=data.draw(st.integers(0, 2**16)),
    )
    schedule, device = data.draw(st.sampled_from(SCHEDULES)), data.draw(st.sampled_from((DEVICE, FEW_SMS)))
    ct.assert_backward(case, **run(case, device=device, schedule=schedule))


@FEW
@given(data=st.data())
def test_lengths_around_the_edges_of_tiles(data):
    """Rows of dbias of multiples of 16 bytes, which TMA writes."""
    seqlen_q, seqlen_k = data.draw(st.sampled_from((2, 63, 64, 65, 130))), data.draw(st.sampled_from((60, 64, 68, 132)))
    batch = data.draw(st.integers(2, 3))
    axes = data.draw(st.sampled_from(((1, 4), (batch, 4))))
    case = case_of(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        bias=(*axes, seqlen_q, seqlen_k),
        head_dim=data.draw(st.sampled_from((8, 64))),
        causal=data.draw(st.booleans()),
        num_heads_kv=1,
        seed=data.draw(st.integers(0, 99)),
    )
    problem, arrays = inputs_of(case)
    out, lse = forward_by_oracle(problem, arrays)
    tiles = (NARROW,)  # short calls are others' by the tables
    assert is_written(plan_of(problem, arrays, out, tiles=tiles))
    found = attention.backward(problem, arrays, out, lse, need=NEED, tiles=tiles)
    ct.assert_backward(case, **dict(zip(NEED, found, strict=True)))


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("kind", ["mask of keys", "dropout"])
@FEW
@given(need=st.sampled_from((NEED, ("dk", "dbias"), ("dq", "dbias"))), seed=st.integers(0, 99))
def test_rows_that_are_not_in_the_table(kind, tiles, need, seed):
    """And some of the gradients."""
    dims = {"head_dim": 65, "head_dim_v": 16} if tiles == (WIDE,) else {}
    case = case_of(OPTIONS[kind] | dims, seed=seed)
    ct.assert_backward(case, **run(case, need=need, tiles=tiles))


@FEW
@given(tile=st.sampled_from((None, *BACKWARD_TF32_SM90_TILES[:1])), seed=st.integers(0, 99))
def test_tf32_split(tile, seed):
    case = case_of(OPTIONS["mask of keys"], seed=seed)
    problem, arrays = inputs_of(case, precision="tf32")
    out, lse = forward_by_oracle(problem, arrays)
    tiles = tile and (tile,)
    assert is_written(plan_of(problem, arrays, out, tiles=tiles))
    found = attention.backward(problem, arrays, out, lse, need=NEED, tiles=tiles)
    attention.assert_tf32_split(problem, arrays, dict(zip(NEED, found, strict=True)))


def test_without_values():
    """dbias of lse alone."""
    case = case_of(has_values=False, dlse=True)
    ct.assert_backward(case, **run(case, need=("dq", "dk", "dbias")))


@pytest.mark.parametrize("kind", ["lengths", "blocks"])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_lies_in_memory_changes_no_bit(kind, batch):
    """dbias is cleared where tiles are left out, or added."""
    options = OPTIONS[kind]
    case = case_of(options, bias=(batch, 4, 150, options.get("seqlen_k", 152)))
    first = run(case, need=("dk", "dbias"), fill=0xFF)
    for schedule in SCHEDULES:
        assert bits(run(case, need=("dk", "dbias"), fill=0x3F, schedule=schedule)) == bits(first)


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_terms_have_the_same_sum_in_any_order(deterministic):
    """Batch entries add to zero in their order, so that exchanging them exchanges the terms."""
    need = ("dk", "dbias")
    problem, arrays = inputs_of(case_of(), deterministic=deterministic)
    out, lse = forward_by_oracle(problem, arrays)
    assert is_written(plan_of(problem, arrays, out, need=need))
    exchanged = {name: x if name == "bias" else np.ascontiguousarray(x[::-1]) for name, x in arrays.items()}
    _, dbias = attention.backward(problem, arrays, out, lse, need=need)
    _, other = attention.backward(problem, exchanged, out[::-1].copy(), lse[::-1].copy(), need=need)
    np.testing.assert_array_equal(dbias, other)


def test_three_terms_are_added_in_order_if_deterministic():
    for bias in ((150, 152), (2, 1, 150, 152)):
        problem, arrays = inputs_of(case_of(bias=bias), deterministic=True)
        out, _ = forward_by_oracle(problem, arrays)
        plan = plan_of(problem, arrays, out, need=("dk", "dbias"))
        assert not is_written(plan)
        assert "dbias: not by sm90/backward_fp32: it adds to dbias in no fixed order" in plan.reason


@pytest.mark.parametrize(
    "options", [{"kv_lengths": (70, 0)}, {"mask": (2, 1, 1, 152)}, {"mask": (4, 150, 152)}], ids=str
)
def test_what_is_hidden_may_be_no_number(options):
    """TMA loads keys that a mask hides with the others: dbias is zero there, and finite elsewhere."""
    problem, arrays = inputs_of(case_of(options))
    if "mask" in options:
        arrays["mask"][..., 70:] = False
    else:
        arrays["k"][1] = arrays["v"][1] = np.nan
    out, lse = forward_by_oracle(problem, arrays)
    arrays["k"][:, :, 70:] = arrays["v"][:, :, 70:] = np.nan
    assert is_written(plan_of(problem, arrays, out))
    *_, dbias = attention.backward(problem, arrays, out, lse, need=NEED)
    assert np.isfinite(dbias).all()
    assert not dbias[..., 70:].any()
    assert dbias[..., :70].any()


@pytest.mark.parametrize("bias", [(4, 70, 84), (2, 4, 70, 84)], ids=str)
def test_results_stay_inside_their_arrays(bias):
    case = case_of(seqlen_q=70, seqlen_k=84, bias=bias)
    problem, arrays = inputs_of(case)
    forward = forward_by_oracle(problem, arrays)
    frames: list[np.ndarray] = []
    inside: dict[str, Any] = {"need": NEED, "tiles": (NARROW,), "allocate": checks.framed(frames)}
    assert is_written(plan_of(problem, arrays, forward[0], tiles=(NARROW,)))
    found = attention.backward(problem, arrays, *forward, **inside)
    ct.assert_backward(case, **dict(zip(NEED, found, strict=True)))
    checks.assert_only_noise(frames, len(arrays) + 2 + len(NEED))


def test_offsets_take_64_bits():
    """Of an array of which rows, heads and batch entries are far apart."""
    case = case_of(seqlen_q=18, seqlen_k=20, bias=(2, 4, 18, 20), head_dim=16, kv_lengths=(20, 11))
    problem, arrays = inputs_of(case)
    forward = forward_by_oracle(problem, arrays)
    far: dict[str, Any] = {"need": NEED, "tiles": (NARROW,), "allocate": attention.far_apart}
    found = attention.backward(problem, arrays, *forward, **far)
    ct.assert_backward(case, **dict(zip(NEED, found, strict=True)))


@pytest.mark.parametrize("by", [1, 2, 4])
def test_dbias_at_any_address(by):
    """It begins so many elements past a multiple of 64 bytes; TMA writes from multiples of 16 bytes on."""
    case = case_of()
    problem, arrays = inputs_of(case)
    out, lse = forward_by_oracle(problem, arrays)
    plan = plan_of(problem, arrays | {"dbias": shifted(arrays["bias"], by)}, out)
    why_not = f"dbias: not by sm90/backward_fp32: dbias is aligned to {4 * by} bytes only, not 16"
    assert is_written(plan) == (by == 4) == (why_not not in plan.reason)

    def allocate(array):
        is_dbias = array.shape == arrays["bias"].shape and array is not arrays["bias"]
        return attention.guarded(shifted(array, by) if is_dbias else array)

    found = attention.backward(problem, arrays, out, lse, need=NEED, allocate=allocate)
    ct.assert_backward(case, **dict(zip(NEED, found, strict=True)))


@pytest.mark.parametrize(
    ("changes", "why_not"),
    [
        ({"softcap": 5.0}, "its dS has the derivative of softcap, too"),
        ({"seqlen_k": 151, "bias": (4, 150, 151)}, "tiles of dbias take the place of tiles of bias"),
        ({"head_dim": 128}, "tiles of dbias take the place of tiles of bias"),
        ({"bias": (4, 150, 152), "strided": True}, "dbias is not contiguous along the keys"),
    ],
    ids=str,
)
def test_another_kernel_makes_dbias(changes, why_not):
    strided = changes.get("strided", False)
    case = case_of({name: x for name, x in changes.items() if name != "strided"})
    arrays = case.arrays()
    problem = problem_of(case, arrays)
    out, _ = forward_by_oracle(problem, arrays)
    if strided:
        arrays = arrays | {"dbias": np.zeros((4, 150, 304), np.float32)[..., ::2]}
    plan = plan_of(problem, arrays, out)
    assert not is_written(plan)
    assert f"dbias: not by sm90/backward_fp32: {why_not}" in plan.reason
