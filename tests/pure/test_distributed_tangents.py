"""jvp and backward_jvp of ranks on threads against the oracle, and bit for bit over numbers of ranks."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.distributed.streams import Streams
from cuflash.testing.tangents import Moved
from tests.pure.test_distributed import CASE, PLAIN, SMALL, SPLITS, is_clear
from tests.pure.test_schedule import of_chunks, splits
from tests.ranks import Whole, on_threads
from tests.ranks_with_tangents import WithTangents, everything, judge, results_of
from tests.sampling import examples
from tests.second_derivatives import moved_by

NEEDS = st.sampled_from((("tdq", "tdk", "tdv"), None, ("tdq", "tdv"), ("tdk", "tdv"), ("tdq",)))
LARGE: list[dict[str, Any]] = [
    {"score_mean": 3e3, "bias": (1, 1, 13, 1), "dropout": 0.1, "sinks": True, "dlse": True},
    {"bias": (4, 13, 50), "bias_mask": -1e9, "sinks": True, "dlse": True},
    {"dtype": "bfloat16", "score_mean": 5e3, "window": (30, 0)},
]


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), ct.cases(**SMALL), st.integers(1, 8), st.integers(1, 3), NEEDS, st.integers(1, 2), st.booleans())
def test_any_split_of_any_case_keeps_the_oracle_rule(data, case, ranks, steps, need, calls, goes_on):
    split_q, split_k = (data.draw(splits(n, ranks)) for n in (case.seqlen_q, case.seqlen_k))
    assume(is_clear(case, split_q))
    moved = data.draw(moved_by(case))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streams, "goes_on", goes_on)
        judge(case, moved, results_of(case, moved, split_q, split_k, need=need, steps=steps, calls=calls))


@settings(max_examples=examples(20), deadline=None)
@given(st.data(), ct.cases(**{**SMALL, "features": PLAIN}), st.integers(2, 8), NEEDS)
def test_own_rows_of_several_spans_in_one_call_keep_the_oracle_rule(data, case, ranks, need):
    moved = data.draw(moved_by(case))
    both = (cd.zigzag(n, ranks) for n in (case.seqlen_q, case.seqlen_k))
    judge(case, moved, results_of(case, moved, *both, need=need))


@settings(max_examples=examples(15), deadline=None)
@given(
    st.data(),
    ct.cases(**{**SMALL, "features": ("packed", "causal", "window", "sinks", "alibi_slopes", "dropout", "gqa")}),
)
def test_packed_sequences_keep_the_oracle_rule(data, case):
    ranks = data.draw(st.integers(1, 4))
    split_q, split_k = (data.draw(splits(n, ranks)) for n in (case.seqlen_q, case.seqlen_k))
    moved = data.draw(moved_by(case))
    judge(case, moved, results_of(case, moved, split_q, split_k))


@pytest.mark.parametrize("options", LARGE, ids=str)
@pytest.mark.parametrize("need", [None, ("tdq", "tdk", "tdv")])
def test_rows_of_large_scores_keep_the_oracle_rule(options, need):
    case = ct.Case(**{"seqlen_q": 13, "seqlen_k": 50, "num_heads": 4, "num_heads_kv": 2, "head_dim": 8} | options)
    moved = everything(case)
    judge(case, moved, results_of(case, moved, cd.zigzag(13, 3), cd.contiguous(50, 3), need=need))


@settings(max_examples=examples(10), deadline=None)
@given(st.data(), ct.cases(**SMALL), st.integers(1, 8))
def test_bits_do_not_depend_on_the_number_of_ranks(data, case, ranks):
    """Zigzag over 1, 2 and 4 ranks, and chunks dealt to any number of ranks."""
    dealt = [data.draw(of_chunks(n, ranks, 16)) for n in (case.seqlen_q, case.seqlen_k)]
    pairs = [[cd.zigzag(n, ranks) for n in (case.seqlen_q, case.seqlen_k)] for ranks in (1, 2, 4)]
    assume(all(is_clear(case, split_q) for split_q, _ in (*pairs, dealt)))
    moved = data.draw(moved_by(case))
    expected = results_of(case, moved, *pairs[0], deterministic=True)
    judge(case, moved, expected)
    for split_q, split_k in (*pairs[1:], dealt):
        for name, x in results_of(case, moved, split_q, split_k, deterministic=True).items():
            assert x.tobytes() == expected[name].tobytes(), f"{name} of {split_q.ranks} ranks"


def test_rows_of_many_ranks_are_added_in_one_order():
    """The same call gives the same bits; partial results are added in the dtype of the softmax, not in 16 bits."""
    case = replace(CASE, dtype="bfloat16", seqlen_q=160, seqlen_k=160)
    moved, both = everything(case), (cd.zigzag(160, 8), cd.zigzag(160, 8))
    first, second = (results_of(case, moved, *both, need=("tdq", "tdk", "tdv"), steps=2) for _ in range(2))
    judge(case, moved, first)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_without_check_two_splits_say_all():
    case = replace(CASE, bias=(17,), sinks=True)
    moved = everything(case)
    judge(case, moved, results_of(case, moved, *SPLITS.values(), check=False))


def gamma_score(s, i, j, *, gamma, x, head):
    return cuflash.where(x[i] > 0, s * x[j], cuflash.tanh(gamma[head] * s))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_functions_and_batch_axes(dtype, deterministic):
    """As one device: the tangents of gradients of arrays that functions read are complete on all ranks."""
    random = np.random.default_rng(7)
    point: dict[str, Any] = {"q": random.standard_normal((2, 3, 2, 32, 8))}
    point |= {name: random.standard_normal((3, 2, 32, 8)) for name in ("k", "v")}
    point |= {"gamma": random.standard_normal(2), "x": random.standard_normal(32)}
    t = {f"t{name}": random.standard_normal(x.shape).astype(dtype) for name, x in point.items()}
    point = {name: x.astype(dtype) for name, x in point.items()}
    dout = random.standard_normal((2, 3, 2, 32, 8)).astype(dtype)
    need = tuple(f"td{name}" for name in point)
    whole: Any = cuflash.FlashAttention(causal=True, score=gamma_score)
    expected = whole.jvp(**point, **t)._asdict()
    expected |= whole.backward_jvp(dout, **point, **expected, need=need, **t)._asdict()
    split = cd.zigzag(32, 2)
    axes = {"lse": -1, "tlse": -1}
    of_rows = ("q", "k", "v", "tq", "tk", "tv", "dout", "out", "tout", "lse", "tlse", "tdq", "tdk", "tdv")

    def work(comm):
        own = {
            name: split.part(x, comm.rank, axes.get(name, -2)) if name in of_rows else x
            for name, x in (point | t | {"dout": dout}).items()
        }
        attn: Any = cd.ContextParallel(
            comm, split=split, causal=True, score=gamma_score, deterministic=deterministic, timeout=30
        )
        of_dout = own.pop("dout")
        results = attn.jvp(**own)
        return results._asdict() | attn.backward_jvp(of_dout, **own, **results._asdict(), need=need)._asdict()

    found = on_threads(2, work)
    bound = 1e-11 if dtype == "float64" else 2e-2
    for name, y in expected.items():
        shards = [own[name] for own in found]
        x = split.whole(shards, axes.get(name, -2)) if name in of_rows else shards[0]
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(
            x.astype(float), y.astype(float), rtol=bound, atol=bound * np.abs(y.astype(float)).max(), err_msg=name
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own.update(tq=own["tq"][:, :, 1:]), r"^tq: got shape .*, expected "),
        (lambda own: own.pop("tv"), r"arrays: got .* on rank 1, expected .* as on rank 0"),
        (lambda own: own.update(tscale=np.array(2.0)), r"^tscale: got .* on rank 1, expected .* as on rank 0"),
        (lambda own: own.update(tcolour=own["tq"]), r"jvp\(\) got an unexpected keyword argument 'tcolour'"),
        (lambda own: own.update(tbias=own["tq"]), r"^arrays: got .*, tbias.* on rank 1, expected "),
    ],
)
def test_tangents_that_do_not_agree_stop_all_ranks(change, message):
    case = replace(CASE, dtype="float64")
    shards = WithTangents(Whole.of(case), **SPLITS)
    arrays = case.arrays() | Moved(names=("q", "k", "v", "scale")).arrays(case)
    del arrays["dout"]

    def work(comm):
        attn: Any = cd.ContextParallel(comm, split="zigzag", causal=True, timeout=30)
        own = shards.of(comm.rank, arrays)
        if comm.rank == 1:
            change(own)
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            attn.jvp(**own)
        return str(error.value)

    assert any(re.search(message, found) for found in on_threads(2, work))


def test_hessian_vector_products_and_the_double_backward_pass_go_over_ranks():
    """They need no more of an attention than the methods that ranks have."""
    random = np.random.default_rng(0)
    names = ("q", "k", "v", "dout", "tq", "tk", "tv")
    arrays: dict[str, Any] = dict(zip(names, random.standard_normal((7, 2, 40, 8)), strict=True))
    split, whole = cd.zigzag(40, 2), cuflash.FlashAttention(causal=True)
    cotangents = {f"d{name}": arrays[f"t{name}"] for name in "qkv"}

    def results_of(attn: Any, own: dict[str, Any], of_gradients: dict[str, Any]) -> tuple[Any, ...]:
        inputs = {name: own[name] for name in ("dout", "q", "k", "v")}
        product = cuflash.hessian_vector_product(attn, **own)
        ddout, ddlse, gradients = cuflash.double_backward(attn, of_gradients, **inputs)
        return (*product, ddout, *gradients, ddlse)

    def work(comm):
        own, of_gradients = ({n: split.part(x, comm.rank) for n, x in of.items()} for of in (arrays, cotangents))
        return results_of(cd.ContextParallel(comm, split=split, causal=True, timeout=30), own, of_gradients)

    for i, (shards, expected) in enumerate(
        zip(zip(*on_threads(2, work), strict=True), results_of(whole, arrays, cotangents), strict=True)
    ):
        np.testing.assert_allclose(split.whole(shards, -1 if i == 7 else -2), expected, rtol=1e-10, atol=1e-10)
