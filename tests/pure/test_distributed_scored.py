"""Scores and masks as functions over ranks that are threads: single properties, and what goes wrong."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
import cuflash.distributed as cd
from tests.ranks import judge, on_threads, results_of
from tests.scored import MASKS, SCORES, Scored, score_args_of


def case_of(score=None, mask=None, seqlen=160, dtype="float32", seed=0, **options):
    """Two heads whose score and mask have these names."""
    functions = (SCORES[score] if score else None, MASKS[mask] if mask else None)
    random = np.random.default_rng(seed)
    arrays = {name: random.standard_normal((1, 2, seqlen, 8)).astype(dtype) for name in ("q", "k", "v", "dout")}
    arrays |= score_args_of(functions, (1, 2, seqlen, seqlen), dtype, seed)
    return Scored(cuflash.FlashAttention(score=functions[0], mask=functions[1], **options), arrays, {}, "")


def test_the_gradient_of_a_cap_is_summed_over_ranks():
    """Of many pairs, with which luck does not decide (tests/scored.py)."""
    case = case_of("capped")
    judge(case, results_of(case, *[cd.zigzag(160, 3)] * 2))


@pytest.mark.parametrize("score", ["t5", "with_pairs"])
def test_gradients_of_arrays_of_16_bits_are_added_before_they_are_rounded(score):
    case, name = case_of(score, dtype="bfloat16"), "table" if score == "t5" else "pairs"
    wide = replace(case, arrays=case.arrays | {name: case.arrays[name].astype(np.float32)})
    split, need = cd.zigzag(160, 8), (f"d{name}",)
    narrow, exact = (results_of(x, split, split, need=need, chunks=16, deterministic=True) for x in (case, wide))
    judge(case, narrow)
    np.testing.assert_array_equal(narrow[need[0]], exact[need[0]].astype(narrow[need[0]].dtype))


def test_rows_in_front_of_a_piece_have_no_weight():
    """Those that there are for dropout, where the score of a query of zeros is NaN, and large."""
    case = case_of("barrier", seqlen=40)
    dropped = cuflash.FlashAttention(score=SCORES["barrier"], dropout=0.3)
    case = Scored(dropped, case.arrays, {"seed": 3, "offset": 1}, "")
    judge(case, results_of(case, *[cd.contiguous(40, 3)] * 2))
    arrays = {name: x for name, x in case.arrays.items() if name != "room"}
    arrays["bias"] = np.linspace(990, 1000, 40, dtype=np.float32)
    case = Scored(cuflash.FlashAttention(dropout=0.3), arrays, {"seed": 3, "offset": 1}, "")
    judge(case, results_of(case, *[cd.contiguous(40, 3)] * 2))


def spelled(s, i, j, *, head, slopes):
    return 5 * cuflash.tanh(s / 5) - slopes[head] * cuflash.abs(i - j)


def test_functions_that_spell_out_options_are_computed_as_these():
    """So the rows that are exchanged are those of a window; a bias of all pairs is no option of a rank."""
    random, split = np.random.default_rng(0), cd.contiguous(60, 3)
    q, k, v, dout = random.standard_normal((4, 2, 60, 8))
    slopes = np.array([0.1, 0.2])

    def results(comm, optional, need, **options):
        attn = cd.ContextParallel(comm, split=split, **options)
        own_q, own_k, own_v, own_dout = (split.part(x, comm.rank) for x in (q, k, v, dout))
        out, lse = attn.forward(own_q, own_k, own_v, **optional)
        gradients = attn.backward(own_dout, own_q, own_k, own_v, out, lse, need=need, **optional)
        return attn.plan(own_q, own_k, own_v, **optional), out, lse, *gradients

    functions = {"score": spelled, "mask": lambda i, j: (i >= j) & (i - j < 9)}
    found = on_threads(3, lambda comm: results(comm, {"slopes": slopes}, ("dq", "dk", "dslopes"), **functions))
    options = {"softcap": 5.0, "window": (8, 0)}
    need = ("dq", "dk", "dalibi_slopes")
    expected = on_threads(3, lambda comm: results(comm, {"alibi_slopes": slopes}, need, **options))
    for (plan, *own), (plan_of_options, *of_options) in zip(found, expected, strict=True):
        assert plan.by_queries.transfers == plan_of_options.by_queries.transfers
        assert [(x.source, x.target) for x in plan.by_queries.transfers] == [(0, 1), (1, 2)]
        for x, y in zip(own, of_options, strict=True):
            np.testing.assert_array_equal(x, y)
    case = case_of("alibi", "documents", seqlen=40)
    judge(case, results_of(case, *[cd.contiguous(40, 3)] * 2))


def test_slopes_of_packed_sequences_count_from_the_start_of_each():
    """Also where these have more keys than queries, so that the diagonal of masks would be another one."""
    arrays = {name: x[0] for name, x in case_of("alibi", seqlen=40).arrays.items() if name != "slopes"}
    arrays |= {"slopes": np.array([0.3, 0.1], np.float32)}
    arrays |= {"cu_seqlens_q": np.array([0, 13, 20], np.int32), "cu_seqlens_k": np.array([0, 30, 40], np.int32)}
    case = Scored(cuflash.FlashAttention(score=SCORES["alibi"]), arrays, {}, "")
    for ranks in (1, 3):
        judge(case, results_of(case, *[cd.contiguous(40, ranks)] * 2))


def test_a_bias_of_all_pairs_stays_a_function():
    arrays = case_of(seqlen=40).arrays | {"pairs": np.random.default_rng(1).standard_normal((40, 40)).astype("f4")}
    attn = cuflash.FlashAttention(score=lambda s, i, j, *, pairs: s + pairs[i, j], mask=lambda i, j: i - j < 9)
    case = Scored(attn, arrays, {}, "")
    judge(case, results_of(case, *[cd.contiguous(40, 3)] * 2))


@pytest.mark.parametrize("same", [False, True])
def test_packed_sequences_may_be_given_by_one_array_or_by_two(same):
    """Ranks do not have to agree on that: they all compute the same."""
    starts = np.array([0, 13, 40], np.int32)
    arrays = {name: x[0] for name, x in case_of(seqlen=40).arrays.items()}
    arrays |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts if same else starts.copy()}
    attn = cuflash.FlashAttention(causal=True, mask=lambda i, j: i - j < 9)
    case = Scored(attn, arrays, {}, "")
    judge(case, results_of(case, *[cd.zigzag(40, 2)] * 2))
    (comm,) = cd.threads(1)
    plan = cd.ContextParallel(comm, split="zigzag", causal=True, mask=lambda i, j: i - j < 9).plan(
        *(arrays[name] for name in ("q", "k", "v")), **{name: arrays[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    )
    assert plan.packing is not None
    assert (plan.packing.left, plan.packing.right) == (8, 0)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def errors_of(change, score=SCORES["decay"], **options):
    """What two ranks raise, the second of which has other arguments."""
    case = case_of("decay", seqlen=12)
    split = cd.contiguous(12, 2)

    def work(comm):
        arrays = {name: split.part(case.arrays[name], comm.rank) for name in ("q", "k", "v")}
        optional = {"gamma": case.arrays["gamma"]}
        keywords = {"score": score, "timeout": 5, **options}
        if comm.rank == 1:
            change(keywords, optional)
        try:
            cd.ContextParallel(comm, split=split, **keywords).forward(*arrays.values(), **optional)
        except Exception as error:
            return error

    return on_threads(2, work)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda options, optional: optional.clear(), "missing keyword argument 'gamma'"),
        (
            lambda options, optional: options.update(score=lambda s, i, j, *, head, gamma: s * gamma[head]),
            r"^score: got <score 's \* gamma\[head\]'> on rank 1, expected <score 's \+ \(3 \* exp",
        ),
        (
            lambda options, optional: optional.update(gamma=2 * optional["gamma"]),
            r"^gamma: got float32 \(2,\) with checksum \w+ on rank 1, expected float32 \(2,\) with checksum ",
        ),
        (
            lambda options, optional: optional.update(gamma=optional["gamma"][:, None]),
            "gamma: got an array of 2 axes, expected",
        ),
        (lambda options, optional: optional.update(other=optional["gamma"]), "unexpected keyword argument 'other'"),
    ],
)
def test_ranks_that_disagree_raise_on_all_of_them(change, message):
    first, second = errors_of(change)
    with pytest.raises((ValueError, TypeError), match=message):
        raise second
    with pytest.raises((ValueError, RuntimeError), match=f"^rank 1 failed: .*{message}|{message}"):
        raise first


@pytest.mark.parametrize(
    ("options", "optional", "error", "message"),
    [
        ({"score": abs}, {}, TypeError, "^score: got "),
        ({"score": lambda s, i, j, *, k: s + k[j]}, {}, ValueError, "^score: got an array named k, expected another "),
        ({"score": lambda s, i, j: 2 * s, "softcap": 3.0}, {}, NotImplementedError, "^softcap: got it together with "),
        (
            {"score": lambda s, i, j: 2 * s},
            {"bias": np.zeros((12, 12), np.float32)},
            NotImplementedError,
            "^bias: got it together with score, expected one of them",
        ),
        ({"score": SCORES["decay"]}, {}, TypeError, "missing keyword argument 'gamma'"),
    ],
)
def test_bad_arguments(options, optional, error, message):
    (comm,) = cd.threads(1)
    x = np.zeros((2, 12, 8), np.float32)
    with pytest.raises(error, match=message):
        cd.ContextParallel(comm, split="zigzag", **options).forward(x, x, x, **optional)
