"""What calls bind: how arrays lie in memory, what is copied first, where scratch lies, which lengths share a plan."""

import itertools
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays.array_info import ITEMSIZE
from cuflash.plan import DeviceSpec, ScratchLayout, choose_plan
from cuflash.plan.launch_plan import SCRATCH_ALIGNMENT
from cuflash.spec.binding import FIXED, Contiguous, bind, growing_keys, planned_length
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, PASSES_WITHOUT_TANGENTS
from tests.calls import address, calls, shifted
from tests.problems import is_served

WIDEST = 16  # bytes that a kernel reads or writes at once, in scratch memory and in arrays of a tensor map
ARCHS = ("8.0", "8.6", "9.0", "12.0")


# ---- alignment -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
def test_every_array_is_as_aligned_as_kernels_want(pass_):
    @given(calls(pass_), st.sampled_from(ARCHS), st.integers(0, 3))
    def every_call(call, arch, first):
        _, options, arrays, need = call
        binding = bind(pass_, options, arrays, need=need, address_of=address)
        assume(is_served(binding.problem, arch, pass_))
        plan = choose_plan(binding.problem, DeviceSpec.for_arch(arch), pass_, **binding.layout)
        # A new allocation lies at some multiple of what an allocation is aligned to.
        allocated = [name for name, _, _ in binding.allocated]
        addresses = {name: (first + n) * SCRATCH_ALIGNMENT for n, name in enumerate((*allocated, *binding.copied))}
        layout = plan.scratch_layout
        addresses |= {
            name: first * SCRATCH_ALIGNMENT + offset for name, offset in zip(layout.names, layout.offsets, strict=True)
        }
        addresses = {name: address(array) for name, array in arrays.items()} | addresses
        operands = dict(binding.operands) | {name: getattr(binding.problem, name) for name in "qkv"}
        read = ("q", "k", "v", *(("out", "dout") if pass_ is BACKWARD else ()))
        written = [name for name in ("out", "dq", "dk", "dv") if name in binding.results]
        for names, width in ((read, binding.load_bytes), (written, binding.store_bytes)):
            for name in names:
                operand = operands[name]
                steps = [s for n, s in zip(operand.shape[:3], operand.strides[:3], strict=True) if n > 1]
                assert all(step * ITEMSIZE[operand.dtype] % width == 0 for step in steps), name
                assert name not in addresses or addresses[name] % width == 0, name
        for kernel in plan.kernels:
            defines = dict(kernel.defines)
            assert (defines["CUFLASH_LOAD_BYTES"], defines["CUFLASH_STORE_BYTES"]) == (
                binding.load_bytes,
                binding.store_bytes,
            )
        for name in layout.names:
            assert addresses[name] % WIDEST == 0, name
        for spec in plan.tensor_maps:
            assert spec.name not in addresses or addresses[spec.name] % WIDEST == 0, spec.name
            assert all(stride % WIDEST == 0 for stride in spec.strides_bytes), spec.name

    every_call()


TANGENTS = ("tq", "tk", "tv", "tout", "tdout")


@example(steps=dict.fromkeys(TANGENTS, 0) | {"tout": 1}, dtype="float16", arch="8.0")
@example(steps=dict.fromkeys(TANGENTS, 0) | {"tdout": 2}, dtype="float32", arch="9.0")
@given(
    steps=st.fixed_dictionaries({name: st.sampled_from((None, 0, 0, 1, 2, 4, 8)) for name in TANGENTS}),
    dtype=st.sampled_from(("float16", "float32", "float64")),
    arch=st.sampled_from(ARCHS),
)
def test_tangents_are_as_aligned_as_kernels_want(steps, dtype, arch):
    """Wherever they begin, so many elements past a multiple of 64 bytes; None for a tangent that is not given."""
    rows = shifted(np.ones((2, 2, 40, 32), dtype), 0)
    arrays = dict.fromkeys(("q", "k", "v", "out", "dout"), rows)
    arrays["lse"] = arrays["tlse"] = np.ones((2, 2, 40), np.float64 if dtype == "float64" else np.float32)
    arrays |= {name: shifted(rows, by) for name, by in steps.items() if by is not None}
    arrays.setdefault("tout", rows)
    for pass_ in (JVP, BACKWARD_JVP):
        given = {name: x for name, x in arrays.items() if name in ("q", "k", "v", *pass_.takes)}
        binding = bind(pass_, Options(), given, address_of=address)
        for name in given.keys() - {"lse", "tlse"}:
            assert address(given[name]) % binding.load_bytes == 0, name
        assert binding.load_bytes == math.gcd(16, *(address(x) for x in given.values() if x.ndim == 4))
        for kernel in choose_plan(binding.problem, DeviceSpec.for_arch(arch), pass_, **binding.layout).kernels:
            assert dict(kernel.defines)["CUFLASH_LOAD_BYTES"] == binding.load_bytes, kernel.name


@given(st.lists(st.integers(0, 5000), max_size=6))
def test_scratch_arrays_do_not_meet(sizes):
    layout = ScratchLayout(tuple("abcdef"[: len(sizes)]), tuple(sizes))
    assert len(layout.offsets) == len(sizes)
    stops = [start + size for start, size in zip(layout.offsets, sizes, strict=True)]
    assert all(stop <= start for stop, start in zip(stops, layout.offsets[1:], strict=False))
    assert all(start % SCRATCH_ALIGNMENT == 0 for start in layout.offsets)
    assert max(stops, default=0) <= layout.nbytes < sum(sizes) + SCRATCH_ALIGNMENT * len(sizes) + 1


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("k", lambda x: np.frombuffer(b"\0" + bytes(x.nbytes), x.dtype, offset=1, count=x.size).reshape(x.shape)),
        ("lse", lambda x: np.zeros(x.shape, [("a", "i1"), ("x", x.dtype)])["x"]),
        ("bias", lambda x: np.zeros(x.shape, [("a", "i1"), ("x", x.dtype)])["x"]),
    ],
)
def test_elements_that_are_not_aligned_are_refused(name, make):
    """Such arrays are rare, and a kernel that read one would destroy the CUDA context."""
    q = np.zeros((2, 10, 16), np.float32)
    arrays = {"q": q, "k": q, "v": q, "bias": np.zeros((10, 10), np.float32), "lse": np.zeros((2, 10), np.float32)}
    arrays[name] = make(arrays[name])
    bind(FORWARD, Options(), arrays)
    with pytest.raises(ValueError, match=rf"^{name}: got address .* expected multiples of the 4 bytes of a float32"):
        bind(FORWARD, Options(), arrays, address_of=address)


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
def test_a_call_is_planned_as_one_on_its_copies(pass_):
    @given(calls(pass_), st.sampled_from(ARCHS))
    def every_call(call, arch):
        _, options, arrays, need = call
        binding = bind(pass_, options, arrays, need=need, address_of=address)
        assume(is_served(binding.problem, arch, pass_))
        copies = {name: np.ascontiguousarray(arrays[name]) for name in binding.copied}

        def address_on_device(array):  # where allocations are aligned better than NumPy's
            own = [number for number, copy in enumerate(copies.values()) if array is copy]
            return SCRATCH_ALIGNMENT * own[0] if own else address(array)

        of_copies = bind(pass_, options, arrays | copies, need=need, address_of=address_on_device)
        device = DeviceSpec.for_arch(arch)
        plans = [choose_plan(x.problem, device, pass_, **x.layout) for x in (binding, of_copies)]
        assert plans[0] == plans[1]
        assert not of_copies.copied
        rows = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        for name in binding.copied:
            assert name in rows and arrays[name].strides[-1] != arrays[name].itemsize

    every_call()


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2), st.booleans(), st.sampled_from(["bhsd", "bshd"]))
def test_whether_v_is_the_first_columns_of_k(dim, dim_v, first, of_its_own, layout):
    """By where it begins and its strides; nothing is known of addresses that nobody tells."""
    k = np.zeros((2, 3, 4, 8), np.float16)[..., :dim]
    v = (k.copy() if of_its_own else k)[..., first : first + dim_v]
    assume(v.shape[-1])
    arrays = {"q": k, "k": k, "v": v}
    options = Options(layout=layout)
    assert bind(FORWARD, options, arrays, address_of=address).problem.v.in_k == (not of_its_own and first == 0)
    assert not bind(FORWARD, options, arrays).problem.v.in_k


def test_arrays_that_do_not_exist_yet_are_contiguous():
    array = np.zeros((2, 3, 5), np.float64)
    assert Contiguous(array.shape, array.dtype).strides == array.strides
    q = np.zeros((1, 2, 10, 16), np.float16)
    planned = bind(BACKWARD, Options(), {"q": q, "k": q, "v": q})
    given_all = {"q": q, "k": q, "v": q, "out": q, "dout": q, "lse": np.zeros(q.shape[:3], np.float32)}
    assert planned == bind(BACKWARD, Options(), given_all)
    assert planned.results == DEFAULT_NEED


@given(st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(lambda shape: 0 in shape))
def test_a_result_may_be_empty(shape):
    """NumPy gives it strides of 0."""
    q, out = np.zeros((*shape, 16), np.float32), np.zeros((*shape, 16), np.float32)
    binding = bind(FORWARD, Options(), {"q": q, "k": q, "v": q, "out": out}, address_of=address)
    assert [name for name, _, _ in binding.allocated] == ["lse"]


# ---- caches that grow ------------------------------------------------------------------------------------------------


def grown(arrays, names, axis, length):
    """The arrays with axes of another length, as a slice of a longer cache has it: strides stay."""
    changed = dict(arrays)
    for name in names:
        shape = list(arrays[name].shape)
        shape[axis] = length
        changed[name] = np.lib.stride_tricks.as_strided(arrays[name], shape, arrays[name].strides)
    return changed


@given(calls(FORWARD), st.sampled_from(ARCHS), st.integers(0, 3000))
def test_lengths_that_are_alike_have_one_plan(call, arch, more):
    """All of a plan but the problem's numbers, and the rows of the maps of k and v, which calls fill in."""
    _, options, arrays, _ = call
    every = dict.fromkeys(("bias", "mask", "block_mask", "block_table"), None) | arrays
    growing = growing_keys(options, every)
    if growing == FIXED:
        return
    names, axis, seqlen_k, _ = growing
    device = DeviceSpec.for_arch(arch)
    axis_length = arrays[names[0]].shape[axis]
    of_one = seqlen_k // axis_length  # keys of a page, or one

    def planned(length):
        arrays_now = grown(every, names, axis, length)
        binding = bind(FORWARD, options, arrays_now)
        assume(is_served(binding.problem, arch, FORWARD))
        plan = choose_plan(binding.problem, device, **binding.layout)
        *_, planned_for = growing_keys(options, arrays_now)
        return planned_for, plan, binding

    planned_for, plan, binding = planned(axis_length + more)
    last = planned_length((axis_length + more) * of_one) // of_one
    for length in {max(2, last - 128 // of_one + 1), max(2, last - 1), last}:
        other_planned_for, other, other_binding = planned(length)
        if other_planned_for != planned_for or not plan.any_length or binding.copied:
            continue
        assert other.any_length
        assert other_binding.operands == binding.operands
        for field in fields(plan):
            if field.name not in ("problem", "tensor_maps"):
                assert getattr(other, field.name) == getattr(plan, field.name), field.name
        rows = other.problem.seqlen_k
        for ours, theirs in itertools.zip_longest(plan.tensor_maps, other.tensor_maps):
            if ours.name in names:
                ours = replace(ours, shape=(ours.shape[0], rows, *ours.shape[2:]))
            assert ours == theirs
        assert plan.problem.of_length(rows) == replace(other.problem, k=plan.problem.k, v=plan.problem.v) or (
            names == ("block_table",)
        )


@given(st.integers(0, 2**30))
def test_planned_lengths_are_a_little_longer(seqlen_k):
    planned = planned_length(seqlen_k)
    assert seqlen_k <= planned <= max(seqlen_k + 127, seqlen_k * 9 / 8)
    assert planned_length(planned) == planned and planned % 128 == 0
    assert planned <= 2**30


def test_what_grows():
    q, k = np.zeros((2, 4, 1, 16), np.float16), np.zeros((2, 4, 300, 16), np.float16)
    arrays = {"q": q, "k": k, "v": k, "bias": None, "mask": None, "block_mask": None, "block_table": None}
    assert growing_keys(Options(), arrays) == (("k", "v"), 2, 300, (384,))
    assert growing_keys(Options(causal=True), arrays) == (("k", "v"), 2, 300, (384,))
    assert growing_keys(Options(window=(200, 5)), arrays) == (("k", "v"), 2, 300, (384, 200, None))
    assert growing_keys(Options(window=(299, 5)), arrays) == (("k", "v"), 2, 300, (384, None, None))
    assert growing_keys(Options(causal="top_left"), arrays) == (("k", "v"), 2, 300, (384, None, 0))
    swapped = {name: x if x is None else x.swapaxes(1, 2) for name, x in arrays.items()}
    assert growing_keys(Options(layout="bshd"), swapped) == (("k", "v"), 1, 300, (384,))
    pages = arrays | {"block_table": np.zeros((2, 7), np.int32), "k": k[:, :, :32], "v": k[:, :, :32]}
    assert growing_keys(Options(), pages) == (("block_table",), 1, 7 * 32, (256,))
    for name in ("bias", "mask", "block_mask"):
        assert growing_keys(Options(), arrays | {name: np.zeros(1)}) == FIXED
    for changed in ({"k": k[:, :, :1], "v": k[:, :, :1]}, {"v": k[:, :, :299]}, {"k": k[0], "v": k[0]}):
        assert growing_keys(Options(), arrays | changed) == FIXED


@given(ct.cases(features=("causal", "window", "gqa", "head_dim_v", "alibi_slopes", "sinks"), strides=["contiguous"]))
def test_a_problem_alone_is_planned_as_a_call_on_contiguous_arrays(case):
    """`choose_plan` assumes of arrays that it is not given what `bind` finds of them."""
    arrays, device = case.arrays(), DeviceSpec.for_arch("9.0")
    for pass_ in PASSES_WITHOUT_TANGENTS:
        need = ct.gradients_of(case.problem)
        of_pass = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}
        binding = bind(pass_, case.options, of_pass, need=need)
        with_layout = choose_plan(binding.problem, device, pass_, **binding.layout)
        assert choose_plan(binding.problem, device, pass_, need=need) == with_layout


ENDS: dict[str, Any] = {"se": lambda s, i, j, *, se: s + se[i], "ut": lambda s, i, j, *, ut: s + ut[i]}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_the_name_of_a_result_may_name_an_array(name):
    """lse and out are not the gradients of arrays that a score calls se and ut; integers have none."""
    options = cuflash.FlashAttention(score=ENDS[name]).options
    q, numbers = np.ones((1, 1, 4, 8), np.float32), np.ones(4, np.int32)
    given = {"q": q, "k": q, "v": q, name: numbers, "dout": q, "out": q, "lse": q[..., 0]}
    assert bind(BACKWARD, options, given).results == BACKWARD.default
    with pytest.raises(ValueError, match=f"^need: got d{name} of an array of int32"):
        bind(BACKWARD, options, given, need=(f"d{name}",))
