"""Scores and masks of a caller, in Python and in CUDA, on every backend: by the oracle rule, with all gradients."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.arrays.array_info import DTYPES
from cuflash.emulator import Schedule
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.passes import BACKWARD, PASSES_WITHOUT_TANGENTS
from cuflash.testing.rule import gradients_of
from tests.backends import CORE, DEVICE, FALLBACK, on_backends
from tests.cuda_scores import CUDA_SCORES, HEAD
from tests.judging import assert_within
from tests.scored import DRAWN, SCORES, SCORES_AND_TEXTS, STEEP, Scored, few_tiles, score_args_of, scored, steep

H100 = DeviceSpec.for_arch("9.0")


def by_own_kernels(case: Scored) -> bool:
    """Whether both passes have main kernels for compute capability 9.0."""
    plans = [choose_plan(case.problem, H100, pass_) for pass_ in PASSES_WITHOUT_TANGENTS]
    return all(any(kernel.source.startswith("sm90/") for kernel in plan.kernels) for plan in plans)


def sums_arrays(case: Scored) -> bool:
    """Whether the main kernel of the backward pass makes gradients of arrays that the score reads."""
    need = ("dq", "dk", "dv", *case.problem.score_arg_gradients)
    kernels = choose_plan(case.problem, H100, BACKWARD, need=need).kernels
    return any(kernel.source == "sm90/backward.cu" and "_score_args" in kernel.name for kernel in kernels)


def of_9_0(head_dim: int, *scores: str) -> st.SearchStrategy[Scored]:
    """Problems for which compute capability 9.0 has kernels of its own."""
    sizes: dict[str, Any] = {"max_seqlen": 130, "min_seqlen": 40, "head_dims": (head_dim,)}
    cases = scored(dtypes=("float16", "bfloat16"), scores=scores, follows_lengths=True, **sizes)
    return cases.filter(by_own_kernels)


TEXTS = (*CUDA_SCORES,)
STRATEGIES: dict[str, dict[str, st.SearchStrategy[Scored]]] = {
    CORE: {"any": scored(follows_lengths=True), "texts": scored(scores=TEXTS)},
    FALLBACK: {"any": scored(follows_lengths=True)},
    "emulated 8.0": {
        "any": scored(max_seqlen=130, follows_lengths=True),
        "tables": scored(max_seqlen=130, scores=("t5", "decay", "of_rows", "hoistable")),
        "texts": scored(max_seqlen=130, min_seqlen=40, scores=TEXTS).filter(lambda case: case.problem.score),
    },
    "emulated 9.0": {
        "16, arrays": of_9_0(16, "drawn", "distance", "tempered").filter(sums_arrays),
        "72, arrays": of_9_0(72, "drawn", "distance", "box").filter(sums_arrays),
        "72": of_9_0(72, "with_pairs"),
        "136": of_9_0(136, "capped", "drawn"),
        "16, tables": of_9_0(16, "t5", "decay", "of_rows"),
        "16, tables and arrays": of_9_0(16, "hoistable").filter(sums_arrays),
        "72, tables and arrays": of_9_0(72, "hoistable").filter(sums_arrays),
        "16, texts": of_9_0(16, *TEXTS),
    },
    DEVICE: {
        f"{dtype}, {name}": scored((dtype,), max_seqlen=600, scores=scores)
        for dtype in DTYPES
        for name, scores in (("any", (*SCORES, *DRAWN)), ("texts", TEXTS))
    },
}  # fmt: skip


def judge(backend, case, **how):
    """Hold both passes to the oracle rule, and their gradients to the bits of a second call."""
    # Emulated passes that have functions give no gradient of sinks: its kernel has none.
    need = [name for name in gradients_of(case.problem) if not (backend.device and name == "dsinks")]

    def results():
        out, lse, gradients = backend.run(case.attention.options, case.arrays, tuple(need), **case.random, **how)
        return {"out": out, "lse": lse, **gradients}

    found = results()
    assert_within(found, ct.yardsticks(case.problem, case.arrays, **case.random))
    if backend.device is None:
        with cuflash.cpu_threads(3):
            again = results()
        for name in need if backend.is_cpu else case.problem.score_arg_gradients:  # in any order of additions
            np.testing.assert_array_equal(again[name], found[name])


@on_backends({name: list(own) for name, own in STRATEGIES.items()}, of="name", emulated=24)
def test_drawn_functions(backend, name):
    case = STRATEGIES[backend.name][name]
    backend.draw(100 if backend.name == DEVICE else 25, lambda case: judge(backend, case), case=case)


class Few(NamedTuple):
    """A problem of a few tiles."""

    score: str
    dtype: str
    head_dim: int = 16
    mask: str | None = None


FEW = {
    CORE: [Few(score, "float32") for score in TEXTS],
    FALLBACK: [Few(score, "float32") for score in TEXTS],
    "emulated 8.0": [Few(score, dtype) for score in TEXTS for dtype in DTYPES],
    "emulated 9.0": [
        Few("softcapped", "bfloat16", 64), Few("polynomial", "bfloat16", 72), Few("branching", "bfloat16"),
        Few("counted", "bfloat16", 136), Few("branching", "float16", mask="documents"),
    ],
}  # fmt: skip


@on_backends(FEW, of="few", emulated=48)
def test_texts(backend, few):
    case = few_tiles((few.score, few.mask), few.dtype, few.head_dim)
    assert backend.name != "emulated 9.0" or few.mask or by_own_kernels(case)
    judge(backend, case)


IN_ANY_ORDER = {
    "emulated 8.0": [Few("counted", "float32"), Few("distance", "float32"), Few("interpolated", "float32")],
    "emulated 9.0": [Few("distance", "float16")],
    DEVICE: [
        Few(score, "float16", head_dim)
        for score in ("alibi", "distance", "box", "tempered", "t5", "decay", *TEXTS)
        for head_dim in (64, 128)
    ],
}


@on_backends(IN_ANY_ORDER, of="few", emulated=4)
def test_gradients_of_arrays_do_not_depend_on_the_order_of_blocks_and_threads(backend, few):
    sizes = (2, 4, 700, 900) if backend.name == DEVICE else (1, 2, 140, 140)
    score, random = SCORES_AND_TEXTS[few.score], np.random.default_rng(3)
    lengths = {"q": sizes[2], "k": sizes[3], "v": sizes[3], "dout": sizes[2]}
    arrays = {
        name: random.standard_normal((*sizes[:2], n, few.head_dim)).astype(few.dtype) for name, n in lengths.items()
    }
    arrays |= score_args_of((score,), sizes, few.dtype, 3)
    case = Scored(cuflash.FlashAttention(score=score), arrays, {}, few.score)
    assert backend.name != "emulated 9.0" or sums_arrays(case)
    names = case.problem.score_arg_gradients
    need = (*(() if backend.name == "emulated 8.0" else ("dq", "dk", "dv")), *names)

    def gradients(arrays, **how):
        return backend.run(case.attention.options, arrays, need, **how)[2]

    schedules: list[dict[str, Any]] = [{"schedule": Schedule("random", seed=3)}]
    first = gradients(arrays)
    assert_within(first, ct.yardsticks(case.problem, arrays))
    for how in schedules if backend.device else [{}] * 4:
        again = gradients(arrays, **how)
        for name in names:
            np.testing.assert_array_equal(again[name], first[name])
    if backend.device and few.score == "distance":
        power = 2.0**-60 if few.dtype == "float32" else 2.0**3
        scaled = gradients(arrays | {"dout": arrays["dout"] * np.dtype(few.dtype).type(power)})
        for name in names:  # sums are as exact at any scale
            np.testing.assert_array_equal(first[name] * first[name].dtype.type(power), scaled[name])
        arrays["dout"][0, 1, 3, 2] = np.inf  # a term that is infinite leaves nothing to tell
        assert np.isnan(gradients(arrays)["dgamma"]).all()


every_tier = on_backends({CORE: ["float32"], FALLBACK: ["float32"], "emulated 8.0": ["float32"]})


@every_tier
def test_derivatives_of_pairs_without_weight_do_not_count(backend, dtype):
    random = np.random.default_rng(5)
    arrays = {name: np.ones((1, 1, 70, 16), dtype) for name in "qk"}
    arrays |= {name: random.standard_normal((1, 1, 70, 16)).astype(dtype) for name in ("v", "dout")}
    arrays["q"] *= np.linspace(-1, 1, 70, dtype=dtype)[:, None]
    arrays |= score_args_of((SCORES["barrier"], None), (1, 1, 70, 70), dtype, 5)
    judge(backend, Scored(cuflash.FlashAttention(score=SCORES["barrier"]), arrays, {}, ""))


@on_backends({CORE: ["float32"], FALLBACK: ["float32"], "emulated 8.0": ["float32"], "emulated 9.0": ["float16"]})
@pytest.mark.parametrize("score", [steep, STEEP], ids=["traced", "text"])
def test_gradients_where_the_chain_rule_meets_0_times_infinity(backend, dtype, score):
    random = np.random.default_rng(5)
    arrays = {name: random.standard_normal((1, 2, 70, 16)).astype(dtype) for name in ("q", "k", "v", "dout")}
    arrays["pos"] = random.standard_normal((70, 2)).astype(np.float32)
    arrays |= {"power": np.array([1.5, 0.75], np.float32), "gamma": np.array([0.5, 0.0], np.float32)}
    judge(backend, Scored(cuflash.FlashAttention(score=score), arrays, {}, ""))


@on_backends({CORE: ["float64"], FALLBACK: ["float64"], "emulated 8.0": ["float64"]})
def test_sums_have_space_for_every_read(backend, dtype):
    """Of CUDA source that reads one entry many times, where all terms are equal, so that none cancel."""
    reads = 100
    source = f"{HEAD} {{\n  T sum = 0;\n  for (int n = 0; n < {reads}; ++n) sum += given.a(-n);\n  return s + sum;\n}}"
    score = cuflash.Score(cuda=source, arrays=["a"], python=lambda s, i, j, *, a: s + reads * a[0] * 1.0)
    arrays = {name: np.zeros((1, 1, 40, 8), dtype) for name in ("q", "k")} | {"a": np.array([0.5, 3.0])}
    arrays["v"] = arrays["dout"] = np.ones((1, 1, 40, 8))
    arrays["dlse"] = np.ones((1, 1, 40))
    judge(backend, Scored(cuflash.FlashAttention(score=score), arrays, {}, ""))
