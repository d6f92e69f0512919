"""Block masks: what the builders make, what attention makes of them, what is not computed, and what the plan says."""

import re
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import cuflash
import cuflash.testing as ct
from cuflash import block_masks
from cuflash.block_masks import from_mask, global_blocks, local, random, strided
from cuflash.cpu import fallback
from cuflash.plan import DeviceSpec, block_index, choose_plan
from cuflash.plan.block_index import LOOK_FLOPS, LOOK_KEYS
from cuflash.spec.options import Options
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS
from cuflash.spec.problem import make_problem
from cuflash.testing import reference
from tests.sampling import examples

counts = st.integers(0, 9)
LOOKS = ("helpers/mask_tiles.cu", "helpers/block_index.cu")  # in this order


# ---- builders --------------------------------------------------------------------------------------------------------


def pictures():
    """(call, rows of 0 and 1) of every picture in the docstrings of builders that is headed by a call."""
    for function in (local, strided, global_blocks, random):
        for call, rows in re.findall(
            rf"({function.__name__}\([^)]*\))\n\n((?: +(?:[01] ?)+\n)+)", function.__doc__ or ""
        ):
            yield call, np.array([row.split() for row in rows.splitlines()], int)


@pytest.mark.parametrize(("call", "picture"), list(pictures()))
def test_pictures(call, picture):
    np.testing.assert_array_equal(eval(call), picture)


def test_every_builder_has_a_picture():
    assert len(list(pictures())) == 4


@given(m=counts, n=counts, width=counts)
def test_local(m, n, width):
    expected = [[abs(i + n - m - j) <= width for j in range(n)] for i in range(m)]
    np.testing.assert_array_equal(local(m, n, width), np.array(expected, bool).reshape(m, n))


@given(m=counts, n=counts, stride=st.integers(1, 9))
def test_strided(m, n, stride):
    expected = [[(i + n - m - j) % stride == 0 for j in range(n)] for i in range(m)]
    np.testing.assert_array_equal(strided(m, n, stride), np.array(expected, bool).reshape(m, n))


@given(m=counts, n=counts, count=counts)
def test_global_blocks(m, n, count):
    expected = [[i < count or j < count for j in range(n)] for i in range(m)]
    np.testing.assert_array_equal(global_blocks(m, n, count), np.array(expected, bool).reshape(m, n))


@given(m=counts, n=st.integers(1, 9), seed=st.integers(0, 2**16), data=st.data())
def test_random(m, n, seed, data):
    count = data.draw(st.integers(0, n))
    mask = random(m, n, count, seed)
    assert mask.dtype == bool and mask.shape == (m, n)
    assert (mask.sum(axis=1) == count).all()
    np.testing.assert_array_equal(mask, random(m, n, count, seed))


def test_random_blocks_are_as_likely_as_others():
    frequency = random(4000, 10, 3, 0).mean(axis=0)
    assert np.abs(frequency - 0.3).max() < 0.04  # five standard deviations
    assert (random(50, 50, 5, 0) != random(50, 50, 5, 1)).any()


@given(shape=st.tuples(st.integers(0, 100), st.integers(0, 100)), seed=st.integers(0, 2**16))
def test_from_mask(shape, seed):
    pairs = np.random.default_rng(seed).random((2, *shape)) < 0.002
    blocks = from_mask(pairs, (16, 48))
    assert blocks.shape == (2, -(-shape[0] // 16), -(-shape[1] // 48))
    for h, i, j in np.ndindex(blocks.shape):
        assert blocks[h, i, j] == pairs[h, 16 * i : 16 * i + 16, 48 * j : 48 * j + 48].any()


def test_named_patterns_are_a_line():
    lines = re.findall(r"^    \w+ = (.+)$", block_masks.__doc__, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        mask = eval(line, vars(block_masks) | {"m": 12, "n": 12})
        assert mask[0].all() and mask[:, 0].all() and mask.diagonal().all()
        assert 0 < mask.mean() < 1


@pytest.mark.parametrize("convert", [np.uint8, np.array, Decimal])
def test_integers_of_any_type(convert):
    """Unsigned ones, whose differences would wrap around, too."""
    for build, numbers in (
        (local, (7, 5, 1)),
        (strided, (7, 5, 2)),
        (global_blocks, (7, 5, 1)),
        (random, (7, 5, 3, 1)),
    ):
        mask = build(*map(convert, numbers))
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, build(*numbers))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: local(3, 3, -1), ValueError, "width: got -1, expected 0 or more"),
        (
            lambda: local(3.0, 3, 1),  # type: ignore[arg-type]  # what is tested
            TypeError,
            "m: got float 3.0, expected an integer",
        ),
        (lambda: local(3, -3, 1), ValueError, "n: got -3, expected 0 or more"),
        (lambda: strided(3, 3, 0), ValueError, "stride: got 0, expected 1 or more"),
        (lambda: global_blocks(3, 3, True), TypeError, "count: got bool True, expected an integer"),
        (lambda: random(3, 3, 4, 0), ValueError, "count: got 4, expected at most n = 3"),
        (lambda: random(3, 3, 2, -1), ValueError, "seed: got -1, expected 0 or more"),
        (lambda: from_mask(np.ones((4, 4))), TypeError, "mask: got dtype float64, expected bool"),
        (lambda: from_mask(np.ones(4, bool)), ValueError, r"mask: got shape (4,), expected (..., seqlen_q, seqlen_k)"),
        (
            lambda: from_mask(np.ones((4, 4), bool), 24),
            ValueError,
            "block_size rows: got 24, expected a multiple of 16",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


# ---- attention -------------------------------------------------------------------------------------------------------


def run(case, **changes):
    """out, lse and all gradients of the CPU path."""
    arrays, attn = case.arrays() | changes, cuflash.FlashAttention(**case.keywords)
    inputs = ct.qkv(arrays)
    out, lse = attn.forward(*inputs, **ct.optional(arrays))
    need = ct.gradients_of(case.problem)
    return out, lse, *attn.backward(arrays["dout"], *inputs, out, lse, **ct.optional_backward(arrays), need=need)


BLOCKS = ct.Case(
    seqlen_q=300,
    seqlen_k=410,
    batch=2,
    num_heads=4,
    num_heads_kv=2,
    head_dim=16,
    dtype="float64",
    block_mask=(2, 4),
    block_size=(48, 80),
)

OPTIONS = {"softcap": 5.0, "bias": (4, 1, 410), "alibi_slopes": (4,), "causal": True}


def pairs_of(case):
    block_mask, (rows, keys) = case.arrays()["block_mask"], case.block_size
    pairs = np.repeat(np.repeat(block_mask, rows, axis=-2), keys, axis=-1)
    return pairs[..., : case.seqlen_q, : case.seqlen_k]


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (60, 3)}, {"kv_lengths": (410, 97)}, OPTIONS], ids=str
)
def test_it_is_a_mask_of_pairs(options):
    case = replace(BLOCKS, **options)
    keywords = {name: x for name, x in case.keywords.items() if name != "block_size"}
    arrays, attn = case.arrays(), cuflash.FlashAttention(**keywords)
    inputs = ct.qkv(arrays)
    optional = {name: x for name, x in ct.optional(arrays).items() if name != "block_mask"} | {"mask": pairs_of(case)}
    out, lse = attn.forward(*inputs, **optional)
    need = ct.gradients_of(case.problem)
    expected = (out, lse, *attn.backward(arrays["dout"], *inputs, out, lse, **optional, need=need))
    for x, y in zip(run(case), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


def test_the_oracle_looks_blocks_up():
    case = replace(BLOCKS, batch=1, num_heads=1, num_heads_kv=1, block_mask=())
    pairs = reference.pairs_of_blocks(case.problem, case.arrays()["block_mask"])
    np.testing.assert_array_equal(pairs, pairs_of(case))
    assert 0.2 < pairs.mean() < 0.8


@pytest.mark.usefixtures("way")
def test_only_blocks_that_are_left_are_computed(monkeypatch):
    """Scores of tiles, counted: those of blocks that are on, and no others."""
    computed = []
    scores = fallback.Job.scores

    def counted(job, tile):
        computed.append(job.heads.size * len(job.rows) * len(tile.keys))
        return scores(job, tile)

    monkeypatch.setattr(fallback.Job, "scores", counted)
    q = np.random.default_rng(0).standard_normal((1, 2048, 16)).astype(np.float32)
    block_mask, attn = random(16, 16, 2, 0), cuflash.FlashAttention()
    out, lse = attn.forward(q, q, q, block_mask=block_mask)
    assert sum(computed) == block_mask.sum() * 128 * 128
    for need in (("dq", "dk", "dv"), ("dscale",)):
        computed.clear()
        attn.backward(out, q, q, q, out, lse, block_mask=block_mask, need=need)
        assert sum(computed) == block_mask.sum() * 128 * 128


# ---- plans -----------------------------------------------------------------------------------------------------------


def plan_of(pass_=FORWARD, arch="9.0", deterministic=False, **options):
    sizes = {"seqlen_q": 1000, "seqlen_k": 1500, "num_heads": 4, "head_dim": 64}
    case = ct.Case(**sizes | {"dtype": "bfloat16", "block_mask": (4,)} | options)
    arrays = case.arrays()
    problem = make_problem(replace(case.options, deterministic=deterministic), *ct.qkv(arrays), **ct.optional(arrays))
    return choose_plan(problem, DeviceSpec.for_arch(arch), pass_)


def sources(plan):
    return [kernel.source for kernel in plan.kernels]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("arch", ["8.0", "8.6", "9.0", "12.0"])
def test_block_indices_come_before_the_kernels_that_read_them(arch, dtype):
    for pass_ in PASSES_WITHOUT_TANGENTS:
        with_blocks, plain = (sources(plan_of(pass_, arch, dtype=dtype, block_mask=x)) for x in ((4,), None))
        assert with_blocks.count("helpers/block_index.cu") == 1 and "helpers/block_index.cu" not in plain
        assert [x for x in with_blocks if x != "helpers/block_index.cu"] == plain
        main = next(i for i, x in enumerate(with_blocks) if re.match(rf"sm\d+/{pass_}(_fp32)?\.cu", x))
        assert with_blocks.index("helpers/block_index.cu") < main


def test_scratch_memory_of_lists_is_stated():
    tile = plan_of().tiles[0]
    m_blocks, n_blocks = -(-1000 // tile.block_m), -(-1500 // tile.block_n)
    for batches, options in ((1, {}), (3, {"kv_lengths": (5, 6, 7)}), (3, {"block_mask": (3, 1)})):
        heads = 1 if "block_mask" in options else 4
        plan = plan_of(batch=3, **options)
        (lists,) = (size for name, size in plan.scratch if name == "key_index")
        needed = batches * heads * m_blocks * (2 + n_blocks)
        assert (plan.run_time.index_batches, plan.run_time.index_heads) == (batches, heads)
        assert needed <= lists < needed + 4
        assert plan.scratch_layout.sizes == (4 * lists,)
        assert "block_mask: block-sparse index of tiles of keys, " in plan.describe(verbose=True, width=0)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, (128, 128)), (128, (128, 128)), (64, (256, 1024))])
def test_tiles_do_not_cut_blocks_where_they_need_not(head_dim, block_size):
    tile = plan_of(head_dim=head_dim, block_size=block_size, seqlen_k=5000).tiles[0]
    assert block_size[0] % tile.block_m == 0 and block_size[1] % tile.block_n == 0
    assert plan_of(head_dim=head_dim, block_mask=None).tiles[0].serves != "lists"


def test_small_blocks_have_the_tiles_of_masks_of_pairs():
    plan = plan_of(block_size=(16, 16))
    assert plan.tiles == plan_of(block_mask=None, mask=(1000, 1500)).tiles
    assert plan.tiles[0].mask_by_bits and "helpers/mask_bits.cu" in sources(plan)


def test_what_other_kernels_serve_is_said():
    deterministic = plan_of(BACKWARD, deterministic=True)
    assert sources(deterministic).count("helpers/block_index.cu") == 2
    assert {"sm90/backward.cu", "sm80/backward_dq.cu"} <= set(sources(deterministic))
    assert "dq has a kernel of its own that adds in a fixed order" in deterministic.describe(verbose=True, width=0)
    few_queries = plan_of(seqlen_q=1)
    assert "sm90/decode.cu" not in sources(few_queries)
    assert "not sm90/decode: it knows no block_mask" in few_queries.describe(verbose=True, width=0)


def test_blocks_do_not_add_to_dq_in_turn():
    """Because turns count every tile of keys."""
    chosen = plan_of(BACKWARD, deterministic=True)
    given = choose_plan(chosen.problem, DeviceSpec.for_arch("9.0"), BACKWARD, tiles=plan_of(BACKWARD).tiles)
    assert given.tiles == chosen.tiles and not chosen.tiles[0].dq_in_order
    assert sources(given) == sources(chosen) and "helpers/backward_postprocess.cu" not in sources(chosen)


@pytest.mark.parametrize("options", [{"block_size": (16, 16)}, {"mask": (1000, 1500)}], ids=["small blocks", "mask"])
def test_pairs_that_are_bits_are_seen_by_no_kernel_of_dq(options):
    few = plan_of(BACKWARD, deterministic=True, **options)
    assert {"sm80/backward.cu", "sm80/backward_dq.cu"} <= set(sources(few))
    assert "not sm90/backward: the order of dq counts tiles that block_mask hides" in few.describe(
        verbose=True, width=0
    )
    tiles = plan_of(BACKWARD, **options).tiles
    with pytest.raises(NotImplementedError, match=r"^tiles: got a BackwardSm90Tile with deterministic=True and pairs "):
        choose_plan(few.problem, DeviceSpec.for_arch("9.0"), BACKWARD, tiles=tiles)


def test_no_list_for_nothing():
    assert all(kernel.grid == 0 for kernel in plan_of(seqlen_q=0).kernels)
    assert [
        kernel.grid for kernel in plan_of(BACKWARD, seqlen_k=0).kernels if kernel.source == "helpers/block_index.cu"
    ] == [0]


# ---- masks that are looked at beforehand -----------------------------------------------------------------------------


@given(
    arch=st.sampled_from(["7.5", "8.0", "8.6", "9.0", "12.0"]),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    pass_=st.sampled_from(PASSES_WITHOUT_TANGENTS),
    heads=st.sampled_from([4, 8]),
    keys=st.sampled_from([1500, 2100]),
    axes=st.tuples(*[st.booleans()] * 4),
    causal=st.booleans(),
    deterministic=st.booleans(),
)
@settings(max_examples=examples(25), deadline=None)
def test_masks_are_looked_at_where_that_pays(arch, dtype, pass_, heads, keys, axes, causal, deterministic):
    mask = tuple(n if on else 1 for n, on in zip((2, heads, 1000, keys), axes, strict=True))
    sizes = {"batch": 2, "num_heads": heads, "seqlen_k": keys, "head_dim": 40}
    plan = plan_of(pass_, arch, deterministic, **sizes, block_mask=None, mask=mask, dtype=dtype, causal=causal)
    found, text = sources(plan), plan.describe(verbose=True, width=0)
    in_order = pass_ is BACKWARD and deterministic
    # A mask of keys goes by tile into the kernels of float32, too, whose dq has no order.
    by_tile = arch == "9.0" and (dtype == "float16" or (dtype == "float32" and not axes[2] and not in_order))
    if by_tile and axes[2]:
        assert "helpers/mask_bits.cu" in found and "helpers/mask_tiles.cu" not in found
        assert ("helpers/block_index.cu" in found) == (not in_order)
        assert ("mask: tiles that it hides are computed: the order of dq counts them" in text) == in_order
        return
    pays = plan.problem.forward_flops >= LOOK_FLOPS
    if by_tile:
        pays = pays and not in_order and not causal and keys >= LOOK_KEYS
    assert ("helpers/mask_tiles.cu" in found) == pays
    assert ("mask: tiles that it hides are computed: " in text) == (not pays)
    assert ("mask: block-sparse index of tiles of keys, " in text) == (pays and (pass_ is FORWARD or in_order))
    if not pays:
        assert "helpers/block_index.cu" not in found
        return
    main_kernels = [i for i, x in enumerate(found) if re.match(rf"sm\d+/{pass_}(_fp32|_dq)?\.cu", x)]
    assert [found[i - 2 : i] for i in main_kernels[-1:]] in (
        [list(LOOKS)],
        [["helpers/block_index.cu", "helpers/split_fp32.cu"]],
    )
    assert found.count(LOOKS[0]) == found.count(LOOKS[1]) == len(main_kernels)
    assert all(dict(plan.kernels[i].defines)["CUFLASH_HAS_BLOCK_INDEX"] for i in main_kernels)
    own = (plan.run_time.index_batches, plan.run_time.index_heads)
    assert own == mask[:2]
    tile = plan.tiles[-1]
    tile_classes = own[0] * own[1] * -(-1000 // tile.block_m) * -(-keys // tile.block_n)
    assert plan.scratch_sizes["mask_blocks"] >= tile_classes


@given(
    arch=st.sampled_from(["7.5", "8.0", "9.0", "12.0"]),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    pass_=st.sampled_from(PASSES_WITHOUT_TANGENTS),
    axes=st.tuples(*[st.booleans()] * 4),
    head_dim=st.sampled_from([40, 90]),
    options=st.sampled_from(
        [{}, {"causal": True}, {"alibi_slopes": (4,)}, {"kv_lengths": (7, 2100)}, {"block_mask": (2, 1)}]
    ),
    mask=st.sampled_from([None, (2, 1, 1, 2100), (2, 1, 1000, 2100)]),
    deterministic=st.booleans(),
)
@settings(max_examples=examples(25), deadline=None)
def test_biases_are_looked_at_where_that_pays(arch, dtype, pass_, axes, head_dim, options, mask, deterministic):
    bias = tuple(n if on else 1 for n, on in zip((2, 4, 1000, 2100), axes, strict=True))
    sizes = {"batch": 2, "num_heads": 4, "seqlen_k": 2100, "head_dim": head_dim, "mask": mask, "block_mask": None}
    sizes |= {"dtype": dtype, "bias": bias, "bias_dtype": "input"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_index, "LOOK_BIAS_FLOPS", 3e9)
        plan = plan_of(pass_, arch, deterministic, **sizes | options)
    problem, text = plan.problem, plan.describe(verbose=True, width=0)
    if not axes[2] or not axes[3]:
        assert "bias: tiles" not in text and "bias_blocks" not in plan.scratch_sizes
        return
    main = next(kernel for kernel in reversed(plan.kernels) if not kernel.source.startswith("helpers/"))
    # Kernels that add masks of keys to scores have no block-sparse index besides bounds.
    adds_mask = (arch, dtype) == ("9.0", "float16") and mask == (2, 1, 1, 2100)
    has_block_index = "block_mask" in options or (mask is not None and not (adds_mask and "causal" in options))
    if problem.forward_flops < 3e9:
        why = "a look at it beforehand pays from 3 GFLOP on"
    elif dict(main.defines).get("CUFLASH_DQ_IN_ORDER"):
        why = "the order of dq counts them"
    else:
        why = ""
    computed = "bias: tiles that it hides are computed: "
    assert (computed + why in text) if why else (computed not in text)
    names = [kernel.name for kernel in plan.kernels if kernel.source == LOOKS[0]]
    looking = [name for name in names if "_bias" in name]
    assert bool(looking) == (not why)
    chosen = [kernel for kernel in plan.kernels if dict(kernel.defines)["CUFLASH_CHOSEN_BY_BIAS"]]
    twice = [kernel for kernel in chosen if kernel.source != LOOKS[1]]
    assert (text.count("unless they are so few") == len(chosen) - len(twice)) and (
        not chosen or not (why or has_block_index)
    )
    if why:
        return
    # With an index for nothing else, a kernel that has it and one that has not are launched, and one of them computes.
    assert has_block_index or [dict(kernel.defines)["CUFLASH_HAS_BLOCK_INDEX"] for kernel in twice] == [0, 1] * (
        len(twice) // 2
    )
    assert has_block_index or len(twice) in (2, 4)  # dq has a kernel of its own where it is made in order
    assert len({kernel.name for kernel in twice}) == len(twice)
    assert "helpers/block_index.cu" in sources(plan)
    assert re.search(
        r"^  (mask and |block_mask and )?bias: block-sparse index of tiles of (keys|queries), ", text, re.MULTILINE
    )
    own = (plan.run_time.index_batches, plan.run_time.index_heads)
    of_masks = (plan.run_time.mask_batches, plan.run_time.mask_heads)
    assert own == tuple(max(n, m) for n, m in zip(of_masks, bias[:2], strict=True))
    assert of_masks == (1 if mask is None and not {"block_mask", "kv_lengths"} & set(options) else 2, 1)
    tile = plan.tiles[0]
    tile_classes = bias[0] * bias[1] * -(-1000 // tile.block_m) * -(-2100 // tile.block_n)
    assert plan.scratch_sizes["bias_blocks"] * (8 if dtype == "float64" else 4) >= tile_classes


@example(log_heads=8, log_seqlens=(20, 20), dtype="float16", arch="9.0", pass_=FORWARD, head_dim=40)
@given(
    log_heads=st.integers(0, 8),
    log_seqlens=st.tuples(*[st.integers(17, 21)] * 2),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    arch=st.sampled_from(["7.0", "8.0", "9.0", "12.0"]),
    pass_=st.sampled_from(PASSES_WITHOUT_TANGENTS),
    head_dim=st.sampled_from([40, 192]),
)
def test_tiles_of_a_bias_are_counted_in_32_bits(log_heads, log_seqlens, dtype, arch, pass_, head_dim):
    """A view, such as the diagonals of a Toeplitz matrix, has any number of pairs."""
    heads, (seqlen_q, seqlen_k) = 1 << log_heads, (1 << n for n in log_seqlens)
    number = np.zeros((), ct.numpy_dtype(dtype))

    def view(shape, *strides):  # nothing is read of it
        return as_strided(number, shape, [stride * number.itemsize for stride in strides])

    q, k = (view((heads, n, head_dim), head_dim * n, head_dim, 1) for n in (seqlen_q, seqlen_k))
    bias = view((heads, seqlen_q, seqlen_k), seqlen_q + seqlen_k, 1, 1)
    plan = choose_plan(make_problem(Options(), q, k, k, bias=bias), DeviceSpec.for_arch(arch), pass_)
    assert plan.scratch_sizes.get("bias_blocks", 0) < 2**32
    few = heads * seqlen_q * seqlen_k < 2**40
    assert ("bias_blocks" in plan.scratch_sizes) == few or "the order of dq counts them" in plan.reason
    assert few or "bias: tiles that it hides are computed: it has 1099511627776 pairs or more" in plan.reason


def test_usual_biases_are_not_looked_at():
    """Few queries, and problems for which two kernels more take time that shows."""
    for sizes in ({"seqlen_q": 4, "seqlen_k": 8192, "batch": 1}, {"seqlen_q": 1000, "seqlen_k": 1500}):
        bias = (1, sizes["seqlen_q"], sizes["seqlen_k"])
        for pass_ in PASSES_WITHOUT_TANGENTS:
            plan = plan_of(pass_, **sizes, block_mask=None, bias=bias)
            assert not {*LOOKS} & set(sources(plan))


def test_completion_shows_masks_only():
    assert sorted(dir(block_masks)) == sorted(block_masks.__all__)
    assert all(callable(getattr(block_masks, name)) for name in block_masks.__all__)
