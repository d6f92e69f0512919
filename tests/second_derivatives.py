"""Cases of second derivatives that tests of all backends share: every option, several at once, with enough keys."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from cuflash import where
from cuflash.testing import Case
from cuflash.testing.rule import Report, measure
from cuflash.testing.tangents import Moved, movable, tangent_yardsticks
from tests.scored import Scored

SIZES: dict[str, Any] = {"seqlen_q": 37, "seqlen_k": 203, "head_dim": 24, "num_heads": 4, "num_heads_kv": 2, "batch": 2}
# Options with a function by whose array x no result moves: it is only compared, or not read.
CONSTANT: dict[str, Any] = {
    "a mask": {"mask": lambda i, j, *, x: x[i] >= x[j]},
    "a comparison": {"score": lambda s, i, j, *, x: where(x[i] >= x[j], s, 2 * s)},
    "nothing": {"score": lambda s, i, j, *, x: s * 2},
}
OPTIONS: list[dict[str, Any]] = [
    {"causal": True, "softcap": 2.0, "sinks": True, "dropout": 0.3, "dlse": True},
    {"dtype": "float64", "window": (60, 20), "softcap": 0.5, "scale": -0.4, "score_spread": 8.0, "dlse": True},
    {"dtype": "float64", "bias": (4, 37, 203), "bias_holes": True, "alibi_slopes": (4,), "dropout": 0.5},
    {"dtype": "bfloat16", "bias": (2, 1, 1, 203), "bias_dtype": "input", "mask": (37, 203), "sinks": True},
    {"dtype": "float16", "kv_lengths": (203, 65), "causal": "lengths", "alibi_slopes": (2, 4), "head_dim_v": 40},
    {"dtype": "float64", "block_mask": (4,), "block_size": (16, 32), "layout": "bshd", "strides": "flipped"},
    {"score_mean": 3e3, "bias": (1, 1, 37, 1), "strides": "padded", "dropout": 0.1, "sinks": True, "dlse": True},
    {"bias": (4, 37, 203), "bias_mask": -1e9, "score_spread": 30.0, "strides": "transposed"},
    {"dtype": "bfloat16", "distinct_keys": 3, "softcap": 50.0, "causal": "top_left", "head_dim_v": 8},
    {"dtype": "bfloat16", "scale": 0.0, "causal": True},
]
PACKED: dict[str, Any] = {"seqlen_q": 90, "seqlen_k": 300, "head_dim": 16, "num_heads": 4}
PACKED |= {"cu_seqlens_k": (0, 70, 70, 290)}
OF_PACKED: list[dict[str, Any]] = [
    {"cu_seqlens_q": (0, 40, 60, 85), "dtype": "float64", "causal": True, "sinks": True, "dropout": 0.2, "dlse": True},
    {"cu_seqlens_q": (0, 0, 50, 90), "alibi_slopes": (3, 4), "softcap": 3.0, "layout": "bshd", "window": (50, None)},
]
CASES = [Case(**SIZES, **own) for own in OPTIONS] + [Case(**PACKED, **own) for own in OF_PACKED]
# Of what `cuflash.testing.cases` draws.
FEATURES = (
    *("causal", "window", "scale", "softcap", "bias", "mask", "kv_lengths", "alibi_slopes", "gqa", "head_dim_v"),
    *("sinks", "dlse", "block_mask", "dropout", "packed", "lengths"),
)
NAMES = [", ".join(map(str, own)) for own in (*OPTIONS, *OF_PACKED)]


@st.composite
def moved_by(draw, case):
    """What moves in a case."""
    names = movable(case)
    cotangents = ["tdout", *(["tdlse"] if case.dlse else [])]
    return Moved(
        names=tuple(draw(st.lists(st.sampled_from(names), unique=True))) if draw(st.booleans()) else tuple(names),
        cotangents=tuple(draw(st.lists(st.sampled_from(cotangents), unique=True))),
        common=draw(st.sampled_from((0.0, 0.0, 10.0, 100.0))),
        seed=draw(st.integers(0, 9)),
    )


def moves_of(case: Case) -> Iterator[Moved]:
    """Tangents of everything, and of single inputs."""
    cotangents = ("tdout", "tdlse") if case.dlse else ("tdout",)
    yield Moved(names=tuple(movable(case)), cotangents=cotangents)
    for name in movable(case):
        yield Moved(names=(name,))


def judge_functions(case: Scored, tangents: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Hold tangents of results of a problem whose scores or masks are functions to the oracle rule."""
    judges = tangent_yardsticks(replace(case.problem, moved=None), case.arrays, tangents, **case.random)
    report = Report(measure(name, x, judges[name]) for name, x in results.items() if name not in ("out", "lse"))
    assert report.passed, f"outside the oracle rule\n{report}\n{case}"


def has_gradient(case: Case, gradient: str) -> bool:
    name = gradient[1:]
    return name in ("q", "k", "v", "scale") or getattr(case.problem, name, None) is not None
