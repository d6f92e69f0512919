"""Arrays that TMA cannot read, which are copied first, and results that it cannot write: where, and what plans say."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.arrays.array_info import Operand
from cuflash.plan import choose_plan
from cuflash.plan.sm90.copies import COPY_MIN_PAIRS, COPY_MIN_PAIRS_IN_ALL
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS
from tests.problems import H200, biased, problem_of

LONG = {"seqlen_q": 4096, "seqlen_k": 4096}
READ = {FORWARD: "qkv", BACKWARD: ("q", "k", "v", "dout")}
ALONE = {
    FORWARD: ["sm90/forward.cu"],
    BACKWARD: ["helpers/backward_preprocess.cu", "sm90/backward.cu", "helpers/backward_postprocess.cu"],
}


def sources(plan):
    return [kernel.source for kernel in plan.kernels]


def copied(plan):
    """The arrays that are copied, and the columns of their rows in bytes."""
    maps = {spec.name.removesuffix("_copy"): spec for spec in plan.tensor_maps if spec.name.endswith("_copy")}
    return {name: spec.strides_bytes[0] for name, spec in maps.items()}


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
@given(st.integers(1, 256), st.integers(1, 256))
def test_rows_of_any_number_of_columns(pass_, dim, dim_v):
    plan = choose_plan(problem_of(**LONG, dim=dim, dim_v=dim_v), H200, pass_)
    widths = {"q": dim, "k": dim, "v": dim_v, "dout": dim_v}
    odd = {name: widths[name] for name in READ[pass_] if widths[name] % 8}
    assert copied(plan) == {name: -(-width // 8) * 16 for name, width in odd.items()}
    assert [x for x in sources(plan) if x != "helpers/copy_rows.cu"] == ALONE[pass_]
    assert ("helpers/copy_rows.cu" in sources(plan)) == bool(odd)
    by_rows = dim_v % 8 > 0 or (pass_ is BACKWARD and dim % 8 > 0)
    main = next(kernel for kernel in plan.kernels if kernel.source.startswith("sm90/"))
    assert dict(main.defines)["CUFLASH_STORES_BY_ROWS"] == by_rows
    results = {"out"} if pass_ is FORWARD else {"dk", "dv"}
    assert {spec.name for spec in plan.tensor_maps} >= results or by_rows
    assert not by_rows or not results & {spec.name for spec in plan.tensor_maps}


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
@given(st.sampled_from(["q", "k", "v", "out", "dout", "dk", "dv", "dq"]), st.sampled_from([0, 1, 2]), st.data())
def test_only_what_tma_refuses_is_copied(pass_, name, axis, data):
    """Strides that are negative, zero or no multiple of 16 bytes, and addresses."""
    problem = problem_of(**LONG, heads_kv=4)
    good = problem.q
    stride = data.draw(st.sampled_from([-64, 0, 68, 2**39]))
    strides = tuple(stride if i == axis else s for i, s in enumerate(good.strides))
    lying = data.draw(st.sampled_from([{"strides": strides}, {"alignment": 2}]))
    if name in ("out", "dk", "dv", "dq") and lying.get("strides", (1,) * 3)[axis] == 0:
        return  # no result has elements that share memory
    operands = {x: good for x in ("out", "dout", "dk", "dv", "dq")} | {name: replace(good, **lying)}
    q, k, v = (replace(good, **lying) if x == name else good for x in "qkv")
    problem = replace(problem, q=q, k=k, v=v)
    plan = choose_plan(problem, H200, pass_, operands=operands)
    assert list(copied(plan)) == ([name] if name in READ[pass_] else [])
    stored = name in (("out",) if pass_ is FORWARD else ("dk", "dv"))
    assert (f"{name}: stored row by row: " in plan.reason) == stored
    assert (f"{name}: copied to rows" in plan.reason) == (name in READ[pass_])


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
@pytest.mark.parametrize("dim", [2, 3, 66, 255])
def test_memory_and_blocks_of_copies(pass_, dim):
    problem = problem_of(**LONG, dim=dim, dim_v=dim, batch=3, heads=6, heads_kv=2)
    plan = choose_plan(problem, H200, pass_)
    kernel = next(kernel for kernel in plan.kernels if kernel.source == "helpers/copy_rows.cu")
    width, block_m = -(-dim // 8) * 8, int(dict(kernel.defines)["CUFLASH_BLOCK_M"])
    rows = {"q": 6, "k": 2, "v": 2, "dout": 6}
    bytes_of = {f"{name}_copy": 2 * 3 * rows[name] * 4096 * width for name in READ[pass_]}
    assert {name: size for name, size in plan.scratch_sizes.items() if name in bytes_of} == bytes_of
    assert kernel.grid == 3 * sum(rows[name] for name in READ[pass_]) * math.ceil(4096 / block_m)
    assert dict(kernel.defines)["CUFLASH_COPIED"] == 2 ** len(READ[pass_]) - 1
    assert (block_m % 64 == 0 and 512 < block_m * width // 8 <= 1024) or block_m == 64


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
def test_few_pairs_are_not_worth_copies(pass_):
    """Either for each row, or in all."""
    long = problem_of(**LONG, dim=3, dim_v=3)
    short = [problem_of(64, 64, 3, 3, batch=512), problem_of(1024, 1024, 3, 3, batch=1, heads=1, heads_kv=1)]
    assert "helpers/copy_rows.cu" in sources(choose_plan(long, H200, pass_))
    for problem in short:
        plan = choose_plan(problem, H200, pass_)
        assert f"sm80/{pass_}.cu" in sources(plan)
        rows = 4 * 64 * 512 * 2 if pass_ is FORWARD else 6 * 2 * 64 * 512
        fewest = (
            max(COPY_MIN_PAIRS_IN_ALL, COPY_MIN_PAIRS[pass_] * rows) if problem is short[0] else COPY_MIN_PAIRS_IN_ALL
        )
        assert (
            f"TMA cannot serve; for fewer than {fewest} pairs of queries and keys, copies take too long" in plan.reason
        )


def test_pages_are_not_copied():
    problem = problem_of(300, 4096, batch=64)
    pool = Operand(shape=(512, 2, 64, 64), strides=(2 * 64 * 68, 64 * 68, 68, 1), dtype="bfloat16")
    table = Operand(shape=(64, 64), strides=(64, 1), dtype="int32")
    paged = replace(problem, k=pool, v=pool, block_table=table)
    plan = choose_plan(paged, H200)
    assert sources(plan) == ["sm80/forward.cu"]
    assert "a copy would be of all pages of the pool" in plan.reason


def test_a_plan_with_copies_of_keys_serves_one_number_of_them():
    for dim, any_length in ((64, True), (60, False)):
        assert choose_plan(problem_of(**LONG, dim=dim, dim_v=64), H200).any_length == any_length
        assert choose_plan(problem_of(**LONG, dim=64, dim_v=dim), H200).any_length == any_length


@pytest.mark.parametrize("need", [("dbias",), ("dq", "dk", "dv", "dbias")])
def test_the_gradient_of_a_bias_reads_the_copies(need):
    """Those of the main kernel, or its own."""
    problem = replace(biased(64, "bfloat16"), batch=2)
    q = replace(problem.q, alignment=4)
    plan = choose_plan(replace(problem, q=q, num_heads=64), H200, BACKWARD, need=need)
    assert sources(plan).count("helpers/copy_rows.cu") <= 1
    assert list(copied(plan)) == (["q"] if "sm90/backward_bias.cu" in sources(plan) else [])


@pytest.mark.parametrize(("dim", "dim_v"), [(258, 258), (1001, 333), (576, 511)])
def test_wide_heads_in_the_forward_pass(dim, dim_v):
    plan = choose_plan(problem_of(**LONG, dim=dim, dim_v=dim_v), H200)
    assert sources(plan) == ["helpers/copy_rows.cu", "sm90/forward_wide.cu"]
    assert set(copied(plan)) == ({"v"} if dim == 576 else {"q", "k", "v"})
    assert dict(plan.kernels[1].defines)["CUFLASH_STORES_BY_ROWS"]
