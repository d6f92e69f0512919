"""Masks that kernels read pair by pair, or key by key, biases of -inf, and the block-sparse indices of the tiles that
they leave.

What is compiled comes from a fixed list; hypothesis draws sizes, values, strides and schedules.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays.array_info import numpy_dtype
from cuflash.emulator import SCHEDULES
from cuflash.emulator.building import build
from cuflash.emulator.memory import Scratch
from cuflash.gpu.params import parameters
from cuflash.plan import DeviceSpec
from cuflash.spec.binding import bind
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS
from tests import expressions
from tests.emulate import attention
from tests.sampling import examples
from tests.scored import MASKS, Scored, score_args_of

few = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
LISTS = ("helpers/mask_tiles.cu", "helpers/block_index.cu")
# An entry of a block-sparse index: IndexEntry of kernels/common/schedule/schedule.cuh.
IS_LAST, NEEDS_MASK, ASKS_FUNCTION, INDEX = 1 << 31, 1 << 30, 1 << 29, (1 << 28) - 1

# The device, the axes of the mask, and what else the problem has.
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "sm80": ("8.0", ("one", "one", "q", "k"), {"dtype": "float16", "sinks": True}),
    "sm80, heads, causal": ("8.6", ("one", "heads", "q", "k"), {"causal": True, "num_heads_kv": 1}),
    "sm80, batch, lengths": ("8.0", ("batch", "one", "q", "k"), {"kv_lengths": (1, 150), "softcap": 5.0}),
    "sm80, keys": ("8.0", ("batch", "one", "one", "k"), {"dtype": "float16", "bias": ("one", "heads", "q", "k")}),
    "sm80, cut blocks": ("8.0", ("one", "one", "q", "k"), {"block_mask": (2,), "block_size": (16, 48)}),
    "sm80, float64": ("9.0", ("one", "one", "q", "k"), {"dtype": "float64", "window": (70, 40), "head_dim": 16}),
    "sm80, in order": ("8.6", ("batch", "heads", "q", "one"), {"dtype": "float16"}),
    "sm90, float32": ("9.0", ("one", "heads", "q", "k"), {"dtype": "float32"}),
    "sm90, keys": ("9.0", ("batch", "one", "one", "k"), {"num_heads_kv": 1}),
    "sm90, keys, bias": ("9.0", ("batch", "one", "one", "k"), {"bias": ("one", "heads", "q", "k")}),
}


@pytest.fixture(autouse=True)
def small_masks_are_looked_at(monkeypatch):
    monkeypatch.setattr("cuflash.plan.block_index.LOOK_FLOPS", 0)
    monkeypatch.setattr("cuflash.plan.block_index.LOOK_KEYS", 0)


def sizes(draw, multiple, least):
    found = {"one": 1, "heads": 2, "batch": 2}
    keys = st.integers(-(-least // multiple), 320 // multiple)
    return found | {"q": draw(st.integers(max(least, 2), 300)), "k": multiple * draw(keys)}


@st.composite
def cases(draw, arch, shape, options):
    # Operands of float32 are split where there are enough scores.
    size = sizes(draw, 8 if arch == "9.0" else 1, 200 if options.get("dtype") == "float32" else 100)
    options = dict(options)
    if "kv_lengths" in options:
        options["kv_lengths"] = tuple(min(n, size["k"]) for n in options["kv_lengths"])
    if "bias" in options:
        options["bias"] = tuple(size[name] for name in options["bias"])
    case = ct.Case(
        seqlen_q=size["q"],
        seqlen_k=size["k"],
        mask=tuple(size[name] for name in shape),
        seed=draw(st.integers(0, 2**16)),
        **{"batch": 2, "num_heads": 2, "head_dim": 64, "dtype": "bfloat16", "bias_dtype": "input"} | options,
    )
    return case, draw(st.sampled_from(SCHEDULES))


@pytest.mark.one_in(40)
@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
@few
def test_oracle(name, data):
    arch, shape, options = CASES[name]
    case, schedule = data.draw(cases(arch, shape, options))
    problem, arrays = attention.inputs_of(case, deterministic="in order" in name)
    how: dict[str, Any] = {"arch": replace(DeviceSpec.for_arch(arch), num_sms=1), "schedule": schedule}
    results = {"out": arrays["dout"], **{f"d{name}": arrays[name] for name in "qkv"}}
    for pass_ in PASSES_WITHOUT_TANGENTS:
        plan = attention.plan_for(problem, pass_, arrays | results, how["arch"])
        sources = [kernel.source for kernel in plan.kernels]
        assert name.split(",")[0] in {source.partition("/")[0] for source in sources}
        assert [sources.count(source) for source in LISTS] == [1 + ("in order" in name and pass_ is BACKWARD)] * 2
    seen = attention.with_true_as(data.draw(st.sampled_from([1, 2, 128, 255])), arrays)
    ct.assert_forward(case, *attention.forward(problem, seen, **how))
    out, lse = attention.forward_by_oracle(problem, arrays)
    gradients = attention.backward(problem, seen, out, lse, need=("dq", "dk", "dv"), **how)
    ct.assert_backward(case, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


@st.composite
def masks(draw):
    """A problem with a mask of blocks, its arrays, and what is visible of each head."""
    arch, dtype = draw(st.sampled_from([("8.0", "float16"), ("9.0", "float32"), ("9.0", "float16")]))
    axes = [draw(st.sampled_from(pair)) for pair in (("one", "batch"), ("one", "heads"), ("one", "q"), ("one", "k"))]
    if (arch, dtype) == ("9.0", "float16"):
        axes[2:] = "one", "k"  # pairs are seen as bits there
    size = sizes(draw, 8 if arch == "9.0" else 1, 1)
    shape = tuple(size[axis] for axis in axes)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    coarse = rng.random((*shape[:2], *(-(-n // 64) for n in shape[2:]))) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    mask = coarse.repeat(64, 2)[:, :, : shape[2]].repeat(64, 3)[..., : shape[3]]
    flips = draw(st.sampled_from([0, 1, 5]))
    mask = mask ^ (rng.permutation(mask.size).reshape(shape) < flips)
    lengths = draw(st.sampled_from([None, (1, 150), (0, 320)]))
    lengths = lengths and tuple(min(n, size["k"]) for n in lengths)
    case = ct.Case(
        seqlen_q=size["q"], seqlen_k=size["k"], batch=2, num_heads=2, head_dim=32, dtype=dtype, kv_lengths=lengths,
        mask=shape,
    )  # fmt: skip
    arrays = case.arrays()
    laid = np.asarray(mask, order=draw(st.sampled_from("CF")))
    wide = np.zeros((*shape[:3], -(-shape[3] // 16) * 16), bool)
    wide[..., : shape[3]] = mask
    arrays["mask"] = draw(st.sampled_from([laid, wide[..., : shape[3]], np.flip(np.flip(mask, 3).copy(), 3)]))
    keys = np.arange(size["k"]) < np.array(lengths or (size["k"],) * 2)[:, None]
    visible = np.broadcast_to(mask & keys[:, None, None], (2, 2, size["q"], size["k"]))
    return arch, attention.problem_of(case, arrays), arrays, visible, keys


def assert_listed(arch, problem, arrays, visible, keys, shown=None, *, schedule):
    """The tiles with a visible pair are listed, those without a hidden one first.

    With a bias, `shown` are the pairs of which it is not -inf: without any, a tile is not listed.
    """
    noting = {"helpers/mask_bits.cu", *LISTS}
    results = {"out": arrays["dout"], "lse": np.empty(problem.lse_shape, problem.softmax_dtype)}
    results |= {f"d{name}": arrays[name] for name in "qkv"}
    for pass_, name in zip(PASSES_WITHOUT_TANGENTS, ("key_index", "query_index"), strict=True):
        plan = attention.plan_for(problem, pass_, arrays | results, arch)
        need = ("dq", "dk", "dv") if pass_ is BACKWARD else ()
        every = arrays | results if need else {x: y for x, y in (arrays | results).items() if x != "dout"}
        binding = bind(pass_, problem.options, every, need=need, address_of=lambda array: array.ctypes.data)
        scratch = Scratch(plan.scratch_layout, 0xFF)
        small = replace(plan, kernels=tuple(kernel for kernel in plan.kernels if kernel.source in noting))
        assert len(small.kernels) == 1 + (problem.bias is not None) + (
            problem.mask is not None or problem.has_functions
        )
        attention.run(small, binding, every, schedule, scratch=scratch)
        tile, own = plan.tiles[0], (plan.run_time.index_batches, plan.run_time.index_heads)
        m_blocks, n_blocks = -(-problem.seqlen_q // tile.block_m), -(-problem.seqlen_k // tile.block_n)
        rows, length = (m_blocks, n_blocks) if name == "key_index" else (n_blocks, m_blocks)
        found = scratch.array(name, np.int32)[: own[0] * own[1] * rows * (2 + length)]
        tiles = listed_tiles = 0
        of_keys = bool(tile.defines().get("CUFLASH_MASK_OF_KEYS"))
        for (batch, head, block), listed in zip(np.ndindex(*own, rows), found.reshape(-1, 2 + length), strict=True):
            full: list[int] = []
            cut: list[int] = []
            asked: set[int] = set()
            for other in range(length):
                m, n = (block, other) if name == "key_index" else (other, block)
                columns = slice(n * tile.block_n, (n + 1) * tile.block_n)
                pairs = visible[batch, head, m * tile.block_m : (m + 1) * tile.block_m, columns]
                whole = keys[batch, columns].all() and (n + 1) * tile.block_n <= problem.seqlen_k
                of_bias = shown is None or shown[batch, head, m * tile.block_m : (m + 1) * tile.block_m, columns].any()
                if pairs.any() and of_bias:
                    (full if whole and (of_keys or pairs.all()) else cut).append(other)
                    asked |= set() if pairs[:, keys[batch, columns]].all() else {other}
                tiles += keys[batch, columns].any()
            assert listed[:2].tolist() == [len(full) + len(cut), len(full)]
            entries = listed[2 : 2 + len(full) + len(cut)].view(np.uint32)
            assert (entries & INDEX).tolist() == full + cut
            assert (entries & NEEDS_MASK > 0).tolist() == [False] * len(full) + [True] * len(cut)
            assert (entries & IS_LAST > 0).nonzero()[0].tolist() == ([len(entries) - 1] if len(entries) else [])
            if problem.mask_function is not None:
                assert (entries & ASKS_FUNCTION > 0).tolist() == [other in asked for other in full + cut]
            listed_tiles += len(full) + len(cut)
        if ("CUFLASH_CHOSEN_BY_BIAS", 1) in small.kernels[-1].defines:
            assert scratch.array("bias_blocks", np.uint32)[:2].tolist() == [tiles, tiles - listed_tiles]


@given(drawn=masks(), schedule=st.sampled_from(SCHEDULES))
@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
def test_the_tiles_with_a_visible_pair_are_listed(drawn, schedule):
    assert_listed(*drawn, schedule=schedule)


INDEX_OF_TILE = """
#include "helpers/mask_tiles.cu"

struct PlaceParams {
  Params common;
  i64 index;
  i32* found;
};

CUFLASH_DEVICE void find_place(const PlaceParams& params) {
  const ClassifiedTile tile(params.common, params.index);
  if (ptx::thread_index() == 0)
    params.found[0] = tile.exists, params.found[1] = tile.m_block, params.found[2] = tile.n_block;
}

CUFLASH_DEFINE_KERNEL(place_of_tile, PlaceParams, 32, 1, find_place)
"""


@pytest.mark.parametrize("index", [1, 2**31 - 1, 2**31, 2**32 + 7, 2**33 - 1])
def test_a_head_may_have_more_tiles_than_31_bits_count(index, tmp_path):
    """As with 8 million queries and as many keys."""
    problem, arrays = attention.inputs_of(ct.Case(seqlen_q=64, seqlen_k=64, head_dim=16, dtype="float16", mask=(64, 1)))
    plan = attention.plan_for(problem, FORWARD, arrays, "8.0")
    kernel = next(kernel for kernel in plan.kernels if kernel.source == "helpers/mask_tiles.cu")
    source = tmp_path / "place_of_tile.cu"
    source.write_text(INDEX_OF_TILE)
    tile, n_blocks = plan.tiles[0], 2**18
    params = parameters(plan, bind(FORWARD, problem.options, arrays).operands)
    params["seqlen_q"], params["seqlen_k"] = 2**15 * tile.block_m, n_blocks * tile.block_n
    found = np.zeros(3, np.int32)
    own = np.array([index, found.ctypes.data], np.uint64)
    argument = np.frombuffer(params.tobytes() + own.tobytes(), np.uint8)
    build(source, dict(kernel.defines)).launch("place_of_tile", argument, grid=1, threads=32, shared_bytes=0)
    assert found.tolist() == [1, *divmod(index, n_blocks)]


# Functions whose bounds need every operation that there is, besides those of problems.
BOUNDED: dict[str, Any] = MASKS | {
    "checkers": lambda i, j: (i // 64 + j // 32) % 2 == 0,
    "diamonds": lambda i, j, *, head: cuflash.abs(i % 96 - 48) + cuflash.abs(-j % 96 - 48) <= 40 + head * i,
    "a triangle": lambda i, j: cuflash.minimum(i, j) * 2 + 1 > cuflash.maximum(i, 100) - cuflash.where(j > 77, 9, j),
    "a curve": lambda i, j: cuflash.exp(-i / 50.0) * 80 + cuflash.sqrt(j + 1.0) > cuflash.log(j + 2) * cuflash.tanh(i),
    "floors": lambda i, j: cuflash.floor(i / 33.0 + 0.5) != cuflash.floor(cuflash.minimum(j, i + 0.5) / 33.0 + 0.5),
    "flags": lambda i, j, *, flag: ~flag[i] & (flag[j] | (i > 100)) ^ (j < 5),
    "a hole": lambda i, j, *, position: (position[i] - position[j]) ** 2 > 0.3,
    "waves": lambda i, j: cuflash.sin(i * 0.1) < cuflash.cos(j * 0.05),
    "a spot": lambda i, j, *, spot, length: spot[(7 * i + j) % length[0]],
}  # fmt: skip


@st.composite
def functions(draw, name, arch):
    dtype = {"8.0": "float16", "9.0": "bfloat16"}[arch]
    size = sizes(draw, 8 if arch == "9.0" else 1, 1)
    size["q"] = draw(st.sampled_from([size["q"], size["k"]]))
    shapes = {"q": size["q"], "k": size["k"], "v": size["k"], "dout": size["q"]}
    arrays: dict[str, Any] = {
        operand: np.zeros((2, 2, length, 32), numpy_dtype(dtype)) for operand, length in shapes.items()
    }
    seed = draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)
    if name == "drawn":
        function, own = draw(expressions.masks()), expressions.arrays(seed, "float32")
    else:
        function, own = BOUNDED[name], score_args_of((BOUNDED[name],), (2, 2, size["q"], size["k"]), dtype, seed)
    longest = max(size["q"], size["k"])
    positions = np.sort(random.standard_normal(longest)).astype(np.float32)
    positions[: random.integers(0, 3)] = np.nan
    more = {"flag": np.sort(random.random(longest) < 0.5), "position": positions}
    # All entries are within the bounds of a tile, of which lanes look at several at once. One differs from the others.
    length = draw(st.sampled_from([1, 31, 32, 33, 255, 256, 257, 287, 288, 289, 511, 512, 513]))
    others = draw(st.booleans())
    spot = np.full(length, others)
    spot[draw(st.one_of(st.just(length - 1), st.integers(0, length - 1)))] = not others
    more |= {"spot": spot, "length": np.array([length], np.int32)}
    own |= {key: x for key, x in more.items() if key in function.__code__.co_varnames}
    problem = Scored(cuflash.FlashAttention(mask=function), arrays | own, {}, "").problem
    assert problem.mask_function is not None
    i, j = np.arange(size["q"])[:, None], np.arange(size["k"])
    each = [
        [problem.mask_function({"i": i, "j": j, "batch": batch, "head": head}, own, np.float32) for head in range(2)]
        for batch in range(2)
    ]
    visible = np.stack([np.stack([np.broadcast_to(x, (size["q"], size["k"])) for x in row]) for row in each])
    return arch, problem, arrays | own, visible, np.ones((2, size["k"]), bool)


@pytest.mark.one_in(1)  # a compilation each
@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("name", [*BOUNDED, "drawn"])
@given(data=st.data())
@settings(few, max_examples=examples(8))
def test_the_tiles_that_a_function_leaves_are_listed(name, arch, data):
    assert_listed(*data.draw(functions(name, arch)), schedule=data.draw(st.sampled_from(SCHEDULES)))


# ---- biases of -inf --------------------------------------------------------------------------------------------------

# The device, the batch axes of the bias, what else the problem has, and gradients.
BIASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {
    "sm80": ("8.0", ("one", "heads"), {"dtype": "float16", "sinks": True}, ("dq", "dk", "dv", "dbias", "dscale")),
    "sm80, in order": ("8.6", ("batch", "one"), {"causal": True, "bias_dtype": "softmax"}, ("dq", "dk", "dv")),
    "sm80, float64": ("9.0", ("one", "one"), {"dtype": "float64", "head_dim": 16}, ("dq", "dk", "dv", "dbias")),
    "sm90, float32": ("9.0", ("batch", "heads"), {"dtype": "float32"}, ("dq", "dk", "dv")),
    "sm90": ("9.0", ("one", "heads"), {"num_heads_kv": 1}, ("dq", "dk", "dv", "dbias")),
    "sm90, causal": ("9.0", ("one", "one"), {"causal": True}, ("dq", "dk", "dv")),
    "sm90, slopes": ("9.0", ("one", "one"), {"alibi_slopes": (2,)}, ("dq", "dk", "dv")),
    "sm90, wide": ("9.0", ("one", "one"), {"head_dim": 272}, ("dq", "dk", "dv")),
    "sm90, mask of keys": ("9.0", ("one", "one"), {"mask": "keys", "kv_lengths": (300, 150)}, ("dk", "dv", "dbias")),
    "sm90, mask of pairs": ("9.0", ("one", "heads"), {"mask": "pairs", "bias_dtype": "softmax"}, ("dq", "dk", "dv")),
}
# Keys that the bias hides from all queries, and those of them that no tile of these kernels has next to other keys.
HIDDEN, NO_NUMBERS = slice(64, 288), slice(128, 256)


@pytest.fixture
def small_biases_are_looked_at(monkeypatch):
    monkeypatch.setattr("cuflash.plan.block_index.LOOK_BIAS_FLOPS", 0)


def with_holes(bias, rng, kept):
    """A copy of a bias whose blocks of 64 x 64 pairs are -inf but for such a sample of them."""
    coarse = rng.random((*bias.shape[:2], *(-(-n // 64) for n in bias.shape[2:]))) >= kept
    hidden = coarse.repeat(64, 2)[:, :, : bias.shape[2]].repeat(64, 3)[..., : bias.shape[3]]
    return np.where(hidden, np.array(-np.inf, bias.dtype), bias)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("name", BIASES)
@given(data=st.data())
@settings(few, max_examples=2)
@pytest.mark.usefixtures("small_biases_are_looked_at")
def test_tiles_that_a_bias_hides_are_not_computed(name, hides, data):
    """Keys that the bias hides from all queries may be no numbers; and all else is as it was, to the bit.

    Where it hides no tile, the kernel without block-sparse index computes, in its own order.
    """
    arch, axes, options, need = BIASES[name]
    size = {"one": 1, "heads": 2, "batch": 2, "q": data.draw(st.integers(200, 260)), "k": 320}
    masks = {"keys": (2, 1, 1, 320), "pairs": (2, 1, size["q"], 320)}
    keywords: dict[str, Any] = {"batch": 2, "num_heads": 2, "head_dim": 64, "dtype": "bfloat16", "bias_dtype": "input"}
    keywords |= options | ({"mask": masks[options["mask"]]} if "mask" in options else {})
    case = ct.Case(
        seqlen_q=size["q"],
        seqlen_k=320,
        bias=(*(size[axis] for axis in axes), size["q"], 320),
        seed=data.draw(st.integers(0, 2**16)),
        **keywords,
    )
    arrays = case.arrays()
    rng = np.random.default_rng(case.seed)
    if hides:
        arrays["bias"] = with_holes(arrays["bias"], rng, data.draw(st.sampled_from([0.5, 0.8])))
        arrays["bias"][..., : data.draw(st.sampled_from([70, 0])), :] = -np.inf  # queries that attend to nothing
        arrays["bias"][..., HIDDEN] = -np.inf
    arrays["bias"].reshape(-1)[rng.integers(0, arrays["bias"].size, 3)] = -np.inf
    problem = attention.problem_of(case, arrays, deterministic="in order" in name)
    out, lse = attention.forward_by_oracle(problem, arrays)
    how: dict[str, Any] = {"arch": replace(DeviceSpec.for_arch(arch), num_sms=1)}
    how["schedule"] = data.draw(st.sampled_from(SCHEDULES))

    # The other one has no block-sparse index for a bias.
    passes = PASSES_WITHOUT_TANGENTS[1:] if name == "sm90, wide" else PASSES_WITHOUT_TANGENTS

    def results_of(arrays):
        found = dict(zip(need, attention.backward(problem, arrays, out, lse, need=need, **how), strict=True))
        if FORWARD in passes:
            found |= dict(zip(("out", "lse"), attention.forward(problem, arrays, **how), strict=True))
        return found

    every = arrays | {"out": out, **{x: arrays[x[1:]] for x in need if x != "dscale"}}
    for pass_ in passes:
        plan = attention.plan_for(problem, pass_, every, how["arch"], None, need if pass_ is BACKWARD else ())
        sources = [kernel.source for kernel in plan.kernels]
        assert name.split(",")[0] in {source.partition("/")[0] for source in sources}
        assert set(LISTS) <= set(sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cuflash.plan.block_index.LOOK_BIAS_FLOPS", 1 << 60)
        expected = results_of(arrays)
    yardsticks = ct.yardsticks(problem, arrays)
    nowhere = {x: arrays[x].copy() for x in "kv"}
    for x in nowhere.values():
        x[:, :, NO_NUMBERS if hides else []] = np.nan
    found = results_of(arrays | nowhere)
    for x, result in found.items():
        measurement = ct.measure(x, result, yardsticks[x])
        assert not measurement.failure, str(measurement)
        # Lists have the tiles that bounds cut last, and slopes nothing before, so that sums have another order.
        assert (hides and (case.causal or case.alibi_slopes)) or result.tobytes() == expected[x].tobytes(), x


@st.composite
def biases(draw):
    """A problem with a bias of blocks, maybe a mask, its arrays, and what each leaves of each head."""
    arch, dtype = draw(
        st.sampled_from([("8.0", "float16"), ("9.0", "float32"), ("9.0", "bfloat16"), ("8.0", "float64")])
    )
    size = sizes(draw, 8 if arch == "9.0" else 1, 100)
    shape = (draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), size["q"], size["k"])
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    mask = draw(st.sampled_from([None, (2, 1, 1, size["k"]), (1, 1, size["q"], size["k"])]))
    lengths = draw(st.sampled_from([None, (1, 150)]))
    lengths = lengths and tuple(min(n, size["k"]) for n in lengths)
    case = ct.Case(
        seqlen_q=size["q"], seqlen_k=size["k"], batch=2, num_heads=2, head_dim=32, dtype=dtype, kv_lengths=lengths,
        mask=mask, bias=shape, bias_dtype=draw(st.sampled_from(["input", "softmax"])),
    )  # fmt: skip
    arrays = case.arrays()
    bias = with_holes(arrays["bias"].reshape(shape), rng, draw(st.sampled_from([0.1, 0.5, 0.9])))
    others = rng.permutation(bias.size)[: draw(st.sampled_from([0, 1, 5]))]
    bias.reshape(-1)[others] = rng.choice(np.array([0, np.nan, np.inf, -np.inf]), len(others))
    wide = np.zeros((*shape[:3], -(-shape[3] // 16) * 16), bias.dtype)
    wide[..., : shape[3]] = bias
    arrays["bias"] = draw(st.sampled_from([bias, wide[..., : shape[3]], np.flip(np.flip(bias, 3).copy(), 3)]))
    keys = np.arange(size["k"]) < np.array(lengths or (size["k"],) * 2)[:, None]
    every = (2, 2, size["q"], size["k"])
    visible = np.broadcast_to(arrays.get("mask", True) & keys[:, None, None], every)
    shown = np.broadcast_to(~np.isneginf(bias.astype(np.float64)), every)
    return arch, attention.problem_of(case, arrays), arrays, visible, keys, shown


@given(drawn=biases(), schedule=st.sampled_from(SCHEDULES))
@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.usefixtures("small_biases_are_looked_at")
def test_tiles_that_a_bias_hides_are_not_listed(drawn, schedule):
    assert_listed(*drawn, schedule=schedule)
