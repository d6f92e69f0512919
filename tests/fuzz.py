"""Problems drawn over the whole space of options, run by the public interface on a device and held against the oracle.

    python -m tests.fuzz GROUP [FIRST]

runs the problems of one group, from the FIRST on, and prints a line of JSON before and after each. A group is what the
same kernels serve, or nearly so: dtype, head dimensions, options, strides, and which gradients are wanted. There is one
for every set of gradients; some with pages or with fp8 arrays, which have none; some with random functions as score or
mask; some that ranks compute, which are threads on one device; and some of jvp and backward_jvp, with tangents of the
same inputs, also over ranks and with streamed keys; and some with reductions of rows and of the attention weights. In a
group sizes, values, broadcast axes and the results that the caller gives arrays for differ from problem to problem.
Some problems have an axis of length 0, and some the values of
`cuflash.testing.REGIMES`.

A mistake in a kernel may leave the CUDA context of its process unusable. So `failures_of_group` runs a group in a
process of its own, and where that ends too early, names the problem and goes on with the next one in another process.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.arrays.array_info import FLOAT8
from cuflash.gpu.progress import Bar
from cuflash.plan import DeviceSpec, LaunchPlan, choose_plan
from cuflash.spec.inputs import INPUTS
from cuflash.spec.options import LAYOUTS
from cuflash.spec.outputs import DEFAULT_NEED, GRADIENTS, MOVABLE, model_of
from cuflash.spec.passes import BACKWARD_JVP, JVP
from cuflash.spec.problem import Problem, make_problem
from cuflash.testing.float8 import assert_float8
from cuflash.testing.rule import yardsticks_of
from cuflash.testing.strategies import BIAS_MASKS, SCORE_MEANS, factors_of
from cuflash.testing.tangents import COTANGENTS, Moved
from cuflash.testing.tangents import yardsticks_of as yardsticks_of_tangents
from tests import scored
from tests.pairs import Setting, assert_reductions, judge
from tests.ranks import Ranks, Whole, compute, compute_tangents
from tests.row_reductions import gap_is_clear
from tests.scored import Functions

ROOT = Path(__file__).resolve().parents[1]
NEEDS = tuple(itertools.chain(*(itertools.combinations(GRADIENTS, n) for n in range(1, len(GRADIENTS) + 1))))
CATEGORIES = {
    "gradients": len(NEEDS),
    "pages": 25,
    "float8": 35,
    "functions": 60,
    "ranks": 15,
    "tangents": 60,
    "tangents of ranks": 20,
    "tangents of streamed keys": 20,
    "reductions": 40,
}  # groups of each category
OF_RANKS, OF_STREAMED_KEYS = ("ranks", "tangents of ranks"), "tangents of streamed keys"
OF_REDUCTIONS = "reductions"  # of rows, and of the attention weights, of streamed keys in one group of four
WITH_TANGENTS = ("tangents", "tangents of ranks", OF_STREAMED_KEYS)
IN_HOST_MEMORY = ("k", "v", "tk", "tv", "tdk", "tdv")  # where keys are streamed
GROUPS = sum(CATEGORIES.values())
GRANULARITIES = (None, "tensor", "head", "block", "token")
PROBLEMS = 10  # of a group
LONGEST, LONGEST_OF_ALL = 400, 3000  # queries, or keys: of most problems, and of one in ten
MAX_SCORES = {"float16": 2**18, "bfloat16": 2**18, "float32": 2**18, "float64": 2**16}
HEAD_DIMS = (64, 64, 64, 128, 128, 128, 1, 3, 8, 16, 17, 24, 32, 40, 48, 72, 80, 96, 113, 160, 192, 255, 256)
WIDE_HEAD_DIMS = (264, 320, 512, 576, 704, 1024)  # of half precision
OF_BYTES = ("kv_dtype", "q_float8", "q_scale", "k_scale", "v_scale", "scale_block")
PAGE_SIZES = (16, 32, 64, 128)
# Head dimensions of jvp and backward_jvp on compute capability 8.0 and 9.0.
WIDEST_WITH_TANGENTS = {"float64": (192, 128), "float32": (256, 256), "bfloat16": (576, 320), "float16": (576, 320)}
SECONDS = 300  # that a group may take


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One drawn problem, and what a `Case` does not know of."""

    name: str
    case: ct.Case
    deterministic: bool
    precision: Literal["highest", "tf32"]
    need: tuple[str, ...]
    given: tuple[str, ...]  # results that the caller has arrays for
    ranks: int = 0  # that compute it; 0: one call
    functions: Functions | None = field(default=None, compare=False)
    moved: Moved | None = None  # what has tangents, in a call of jvp and backward_jvp
    chunk: int = 0  # keys of a chunk, where they are streamed

    @property
    def keywords(self) -> dict[str, Any]:
        """Of `cuflash.FlashAttention`."""
        options = {**self.case.keywords, "deterministic": self.deterministic, "precision": self.precision}
        if self.functions is None:
            return options
        return options | {"score": self.functions.score, "mask": self.functions.mask}

    @functools.cached_property
    def score_args(self) -> dict[str, np.ndarray]:
        """What the functions read; of some problems with strides below 0."""
        case, functions = self.case, self.functions
        if functions is None:
            return {}
        arrays = functions.arrays((case.batch, case.num_heads, case.seqlen_q, case.seqlen_k), case.dtype, case.seed)
        return {name: ct.lay_out(x, "flipped", np.asarray) if case.seed % 3 == 0 else x for name, x in arrays.items()}

    def arrays(self, convert: Callable[[Any], Any] = np.asarray) -> dict[str, Any]:
        """All arrays of a call by name, those that functions read too."""
        strides = "flipped" if self.case.seed % 3 == 0 else "contiguous"
        tangents = self.moved.arrays(self.case, convert) if self.moved else {}
        score_args = {n: ct.lay_out(x, strides, convert) for n, x in self.score_args.items()}
        found = self.case.arrays(convert) | score_args | tangents
        if not self.chunk or convert is np.asarray:
            return found
        return found | {name: x for name, x in self.arrays().items() if name in IN_HOST_MEMORY}

    @property
    def problem(self) -> Problem:
        """The problem of the NumPy arrays; with axes that of `Case.spread`."""
        if self.case.axes is not None:
            return self.case.problem
        arrays, options = self.arrays(), cuflash.FlashAttention(**self.keywords).options
        return make_problem(options, *ct.qkv(arrays), score_args=self.score_args, **ct.optional(arrays))

    @functools.cached_property
    def yardsticks(self) -> dict[str, ct.Yardstick]:
        """Of all results."""
        if self.functions is None:
            return yardsticks_of(self.case) | (yardsticks_of_tangents(self.case, self.moved) if self.moved else {})
        return ct.yardsticks(self.problem, self.arrays(), **self.case.random)

    def __str__(self) -> str:
        default = ct.Case(seqlen_q=1, seqlen_k=1, head_dim=1)
        values = {field.name: getattr(self.case, field.name) for field in fields(self.case)}
        said = [f"{name}={x!r}" for name, x in values.items() if x != getattr(default, name)]
        said += [f"deterministic={self.deterministic}", f"precision={self.precision!r}", f"need={self.need}"]
        others = {"ranks": self.ranks, "functions": self.functions, "moved": self.moved, "chunk": self.chunk}
        said += [f"{name}={x}" for name, x in others.items() if x]
        return f"{self.name}: {', '.join(said)}, given={self.given}"


# ---- What is drawn ---------------------------------------------------------------------------------------------------


@functools.cache
def trials_of_group(number: int) -> list[Trial]:
    """The problems of a group: always the same."""
    rng = random.Random(number)
    category = category_of(number)
    functions = Functions.drawn(number) if category == "functions" else None
    need = NEEDS[number] if category == "gradients" else _need_of_ranks(rng) if category == "ranks" else ()
    is_float8 = category == "float8" or (category == "pages" and rng.random() < 0.5)
    fixed = _fixed(rng, need, category, is_float8=is_float8)
    if functions is not None:
        fixed |= _beside(rng, functions)
        need = _need_of_functions(rng, functions, fixed)
    precisions: tuple[Literal["highest", "tf32"], ...] = ("highest", "highest", "tf32")
    deterministic, precision = rng.random() < 0.4, rng.choice(precisions)
    ranks = rng.choice((2, 3)) if category in OF_RANKS else 0
    moves, of_tangents = _moves(rng, fixed, category) if category in WITH_TANGENTS else ((), ())
    trials: list[Trial] = []
    for index in range(PROBLEMS):
        keywords: dict[str, Any] = {"deterministic": deterministic and not ranks, "precision": precision}
        case = _case(rng, fixed)
        own = () if case.hidden_keys else need  # such a case has no gradients
        moved = _moved(rng, case, moves) if moves else None
        if moved is not None:
            own = of_tangents
        names = () if ranks else (*(JVP.default if moved else ("out", "lse")), *own)
        given = tuple(name for name in names if rng.random() < 0.3)
        keywords |= {"need": own, "given": given, "ranks": ranks, "functions": functions, "moved": moved}
        if category == OF_REDUCTIONS:
            case = replace(case, row_reductions=("max", "entropy"), has_values=rng.random() < 0.7 or bool(case.axes))
        if category in ("ranks", "functions") and number % 3 == 0:
            both = category == "ranks" and gap_is_clear(case)  # which takes the scores of functions for products
            case = replace(case, row_reductions=("max", "entropy") if both else ("entropy",))
        if category == OF_STREAMED_KEYS or (category == OF_REDUCTIONS and _may_stream(number, case)):
            keywords["chunk"] = _chunk(rng, case)
        trials.append(Trial(name=f"{number}-{index}", case=case, **keywords))
    return trials


def category_of(number: int) -> str:
    """The category of a group."""
    for category, count in CATEGORIES.items():
        if number < count:
            return category
        number -= count
    raise IndexError(number)


def _need_of_functions(rng: random.Random, functions: Functions, fixed: Mapping[str, Any]) -> tuple[str, ...]:
    """Any of the gradients that a score has, or none."""
    case = ct.Case(seqlen_q=2, seqlen_k=2, head_dim=1, dtype=fixed["dtype"], sinks=fixed["sinks"])
    options = cuflash.FlashAttention(score=functions.score, mask=functions.mask).options
    arrays, score_args = case.arrays(), functions.arrays((1, 1, 2, 2), case.dtype, 0)
    names = ct.gradients_of(make_problem(options, *ct.qkv(arrays), score_args=score_args, **ct.optional(arrays)))
    always = rng.choice((("dq", "dk", "dv"), ("dk",), ()))
    return tuple(name for name in names if name in always or rng.random() < 0.6) if rng.random() < 0.8 else ()


def _moves(rng: random.Random, fixed: Mapping[str, Any], category: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What has tangents in a group, and the results of backward_jvp that are wanted."""
    chance = 0.3 if category == "tangents" else 0.8  # of each of the others: fewer groups have to show all
    present = {"q", "k", "v", "scale", *(name for name in MOVABLE if fixed.get(name))}
    names = tuple(name for name in MOVABLE if name in present)
    moves = names[:3] if rng.random() < 0.3 else tuple(name for name in names if rng.random() < 0.6) or names[:1]
    widest = max(fixed["head_dim"], fixed["head_dim_v"])
    if widest > WIDEST_WITH_TANGENTS[fixed["dtype"]][1]:
        return moves, ()
    always = rng.choice((("q", "k", "v"), ("q", "k", "v"), ("k",), ("q",), ()))
    models = [model_of(name) for name in GRADIENTS]
    need = tuple(f"td{name}" for name in models if name in present and (name in always or rng.random() < chance))
    return moves, need


def _moved(rng: random.Random, case: ct.Case, moves: tuple[str, ...]) -> Moved:
    """The tangents of a problem."""
    cotangents = [name for name in COTANGENTS if rng.random() < 0.3 and (name != "tdlse" or case.dlse)]
    return Moved(
        names=moves,
        cotangents=tuple(cotangents),
        common=rng.choice((0.0, 0.0, 10.0, 100.0)),
        seed=rng.randrange(2**16),
    )


def _may_stream(number: int, case: ct.Case) -> bool:
    """Whether the keys of a group with reductions are streamed."""
    return number % 4 == 0 and case.cu_seqlens_q is None and case.causal != "lengths"


def _chunk(rng: random.Random, case: ct.Case) -> int:
    """The keys of a chunk: mostly so many that there are several."""
    step = math.lcm(16 if case.dropout else 1, case.block_size[1] if case.block_mask is not None else 1)
    return step * max(1, round(case.seqlen_k * rng.choice((0.05, 0.15, 0.4, 1.2)) / step))


def _need_of_ranks(rng: random.Random) -> tuple[str, ...]:
    return rng.choice((DEFAULT_NEED, DEFAULT_NEED, ("dq", "dv"), ("dk",), (*DEFAULT_NEED, "dscale"), GRADIENTS))


def _beside(rng: random.Random, functions: Functions) -> dict[str, Any]:
    """What goes with functions: a score takes the place of what makes scores, and none has batch axes here.

    Most groups are served by the kernels of compute capability 9.0, whose sums of gradients of arrays differ the most.
    """
    without = ("softcap", "alibi_slopes", "bias") if functions.score is not None else ()
    found = dict.fromkeys(without) | {"has_axes": False, "score_mean": False, "factors": False}
    if functions.score is scored.barrier:  # it divides by 0, and a scale of 0 would make NaN of that
        found["scale"] = False
    if rng.random() < 0.7:
        head_dim = rng.choice((64, 64, 128, 128, 8, 72, 256))
        found |= {"dtype": rng.choice(("float16", "bfloat16")), "head_dim": head_dim, "strides": "contiguous"}
        found |= {"head_dim_v": rng.choice((0, 0, 0, 72)), "dropout": 0.0}
    return found


def _fixed(rng: random.Random, need: tuple[str, ...], category: str, *, is_float8: bool) -> dict[str, Any]:
    """What the problems of a group have in common: fields of `Case`, and a choice or True where values differ."""

    def maybe(value: Any, otherwise: Any = None, *, wanted_by: str = "", chance: float = 0.3) -> Any:
        return value if wanted_by in need or rng.random() < chance else otherwise

    has_pages, goes_whole = category == "pages", category not in ("pages", *OF_RANKS)
    has_tangents = category in WITH_TANGENTS  # whose oracle knows no batch axes
    dtype = rng.choice(("bfloat16",) * (12 if is_float8 else 4) + ("float16",) * 4 + ("float32",) * 2 + ("float64",))
    dims = [n for n in HEAD_DIMS if dtype in ("bfloat16", "float16") or n <= 128 or rng.random() < 0.2]
    if dtype in ("bfloat16", "float16") and not is_float8 and rng.random() < 0.12:
        dims = list(WIDE_HEAD_DIMS)
    if has_tangents:
        dims = [n for n in dims if n <= WIDEST_WITH_TANGENTS[dtype][0]]
    is_packed = goes_whole and "dbias" not in need and rng.random() < 0.15 and category != OF_STREAMED_KEYS
    fixed = {
        "dtype": dtype,
        "head_dim": rng.choice(dims),
        "head_dim_v": maybe(rng.choice(dims), 0, chance=0.15),
        "score_mean": not is_float8,
        "factors": not is_float8 and not has_tangents,
        "may_be_empty": category not in OF_RANKS,
        "costs": 4 if has_tangents else 1,  # the oracle, per score
        "follows_lengths": category not in (*OF_RANKS, OF_STREAMED_KEYS),
        "may_hide_keys": category in ("gradients", "functions"),
        "right": maybe(True, False, chance=0.5),
        "left": maybe(True, False),
        "softcap": maybe(True, False, wanted_by="dsoftcap"),
        "scale": category not in OF_RANKS and maybe(True, False),
        "dropout": maybe(rng.choice((0.1, 0.5, 0.9)), 0.0, chance=0.2),
        "alibi_slopes": maybe(True, False, wanted_by="dalibi_slopes"),
        "sinks": maybe(True, False, wanted_by="dsinks"),
        "strides": rng.choice((*ct.STRIDES, "contiguous", "contiguous")),
        "score_spread": rng.choice((1.0, 1.0, 8.0, 30.0)),
        "is_packed": is_packed,
        "page_size": rng.choice(PAGE_SIZES) if has_pages else 0,
        "dlse": maybe(True, False),
    }
    others = {
        "bias": maybe(rng.choice(("softmax", "input")), wanted_by="dbias"),
        "bias_axes": tuple(rng.random() < 0.6 for _ in range(4)),  # that it has; kernels of dbias are made for them
        "mask": maybe(True, False),
        "kv_lengths": "int32" if has_pages else maybe(rng.choice(("int32", "int64"))),
        "block_size": maybe((rng.choice((16, 48, 64, 128, 256)), rng.choice((16, 32, 64, 128)))),
    }
    if is_packed:  # goes with none of these
        others = dict.fromkeys(others)
    if has_pages:
        others["block_size"] = None
    others["has_axes"] = not is_packed and goes_whole and not has_tangents and rng.random() < 0.2
    return fixed | others | (_float8(rng, fixed["dtype"], others["has_axes"]) if is_float8 else {})


def _float8(rng: random.Random, dtype: str, has_axes: bool) -> dict[str, Any]:
    """What fp8 numbers have in common in a group. `cuflash.testing.float8` knows bounds of q without axes."""
    q_float8 = dtype == "bfloat16" and not has_axes and rng.random() < 0.7
    few: dict[str, Any] = {}
    if q_float8 and rng.random() < 0.6:  # the options with which bytes are multiplied
        few = dict.fromkeys(("softcap", "alibi_slopes", "bias", "mask", "is_packed")) | {"dropout": 0.0}
        few |= {"strides": "contiguous", "head_dim": rng.choice((32, 64, 96, 128, 192, 256)), "head_dim_v": 0}
    return few | {
        "kv_dtype": rng.choice(FLOAT8),
        "q_float8": q_float8,
        "q_scale": rng.choice(GRANULARITIES) if q_float8 else None,
        "k_scale": rng.choice(GRANULARITIES[:4] if few else GRANULARITIES),
        "v_scale": rng.choice(GRANULARITIES[:4] if few else GRANULARITIES),
        "scale_block": rng.choice((64, 128) if few else (16, 64, 128)),
    }


def _case(rng: random.Random, fixed: dict[str, Any]) -> ct.Case:
    """A problem of a group."""
    is_packed, page_size = fixed["is_packed"], fixed["page_size"]
    ndim = 3 if is_packed else 4 if page_size or fixed["has_axes"] else rng.choice((4, 4, 4, 3, 2))
    num_heads_kv = rng.choice((1, 2, 3)) if ndim > 2 else 1
    num_heads = num_heads_kv * (rng.choice((1, 1, 2, 4)) if ndim > 2 else 1)
    batch = rng.choice((1, 2, 3)) if ndim == 4 or is_packed else 1
    most = MAX_SCORES[fixed["dtype"]] // (num_heads * (batch if ndim == 4 else 1))
    most //= 1 + fixed["head_dim"] // 256
    most //= fixed["costs"]
    lengths = [rng.randint(1, LONGEST), rng.randint(1, LONGEST)]
    if rng.random() < 0.1:
        lengths[rng.randrange(2)] = rng.randint(LONGEST, LONGEST_OF_ALL)
    if not fixed["may_be_empty"]:  # each rank has rows
        lengths = [max(n, 32) for n in lengths]
    if "kv_dtype" in fixed and rng.random() < 0.4:  # as in decoding
        lengths = [rng.randint(1, 16), rng.randint(500, 1500)]
    while lengths[0] * lengths[1] > max(most, 1):
        cut = min(n for n in lengths if n > 1)
        lengths[lengths.index(cut)] = cut * 2 // 3
    if fixed["may_be_empty"] and rng.random() < 0.06:
        num_heads, num_heads_kv, batch = _without_something(rng, lengths, num_heads, num_heads_kv, batch, ndim)
    seqlen_q, seqlen_k = lengths
    if page_size:
        seqlen_k = -(-seqlen_k // page_size) * page_size
    scores_shape = (batch, num_heads, seqlen_q, seqlen_k)

    def broadcast(axes: Sequence[bool]) -> tuple[int, ...]:
        return tuple(n if axis else 1 for n, axis in zip(scores_shape, axes, strict=True))

    def starts(seqlen: int) -> tuple[int, ...]:
        cuts = sorted(rng.randint(0, seqlen) for _ in range(batch - 1))
        return (0, *cuts, rng.choice((seqlen, rng.randint(cuts[-1] if cuts else 0, seqlen))))

    causal: Any = False
    left = rng.randint(0, max(0, min(lengths) - 2)) if fixed["left"] else None
    right = None
    if fixed["right"]:
        causal = rng.choice((True, True, "top_left", False))
        right = None if causal else rng.randint(0, max(0, min(lengths) - 2))
        if (
            fixed["follows_lengths"] and fixed["kv_lengths"] == "int64"
        ):  # a group has one kind of diagonal that depends on lengths, or none
            causal, right = "lengths", None
    case = ct.Case(
        **{name: fixed[name] for name in ("dtype", "head_dim", "head_dim_v", "strides", "score_spread", "dropout")},
        **{name: fixed[name] for name in OF_BYTES if name in fixed},
        sinks=fixed["sinks"],
        dlse=fixed["dlse"],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        ndim=ndim,
        layout=rng.choice(LAYOUTS),
        causal=causal,
        window=(left, right) if (left, right) != (None, None) else None,
        softcap=rng.choice((0.5, 5.0, 50.0)) if fixed["softcap"] else None,
        scale=rng.choice((0.0, -0.25, -1.0)) if fixed["scale"] else None,
        bias=broadcast(fixed["bias_axes"]) if fixed["bias"] else None,
        bias_dtype=fixed["bias"] or "softmax",
        bias_holes=rng.random() < 0.5,
        mask=broadcast([rng.random() < 0.6 for _ in range(4)]) if fixed["mask"] else None,
        kv_lengths=tuple(rng.randint(0, seqlen_k) for _ in range(batch)) if fixed["kv_lengths"] else None,
        kv_lengths_dtype=fixed["kv_lengths"] or "int32",
        page_size=page_size,
        alibi_slopes=rng.choice(((num_heads,), (batch, num_heads))) if fixed["alibi_slopes"] else None,
        block_mask=rng.choice(((), (num_heads,), (batch, 1), (batch, num_heads))) if fixed["block_size"] else None,
        block_size=fixed["block_size"] or (128, 128),
        blocks_kept=rng.choice((0.2, 0.5, 0.9, 1.0)),
        cu_seqlens_q=starts(seqlen_q) if is_packed else None,
        cu_seqlens_k=starts(seqlen_k) if is_packed else None,
        seed=rng.randrange(2**16),
        **_values(rng, fixed),
    )
    return ct.over_axes(case, rng.choice) if fixed["has_axes"] else case


def _without_something(
    rng: random.Random, lengths: list[int], num_heads: int, num_heads_kv: int, batch: int, ndim: int
) -> tuple[int, int, int]:
    """The numbers of heads and of batch entries, of which one, or a length, became 0."""
    what = rng.choice(("queries", "keys", "batch", "heads", "heads of q"))
    if what in ("queries", "keys"):
        lengths[what == "keys"] = 0
    if what == "batch" and ndim == 4:
        batch = 0
    if what in ("heads", "heads of q") and ndim > 2:
        num_heads, num_heads_kv = 0, num_heads_kv if what == "heads of q" else 0
    return num_heads, num_heads_kv, batch


def _values(rng: random.Random, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Values at which kernels failed that were right elsewhere: each in few problems."""
    drawn: dict[str, Any] = {
        "bias_mask": rng.choice(BIAS_MASKS) if fixed["bias"] and rng.random() < 0.3 else 0.0,
        "score_mean": rng.choice(SCORE_MEANS) if fixed["score_mean"] and rng.random() < 0.1 else 0.0,
        "distinct_keys": rng.choice((1, 2, 7, 65)) if rng.random() < 0.1 else 0,
        "factors": rng.choice(_factors_of(fixed["dtype"])) if fixed["factors"] and rng.random() < 0.1 else (),
    }
    if fixed["mask"] and fixed["may_hide_keys"] and not fixed["has_axes"] and rng.random() < 0.2:
        drawn["hidden_keys"] = rng.choice(("nan", "inf", "-inf"))
    return drawn


def _factors_of(dtype: str) -> list[tuple[tuple[str, float], ...]]:
    """Those at which kernels keep all bits: docs/semantics.md says what float32 loses below."""
    every = factors_of(dtype)
    return [x for x in every if min(factor for _, factor in x) >= 2.0**-110] if dtype == "float32" else every


def scores_of(trial: Trial) -> int:
    """How many scores a problem has."""
    return trial.case.batch * trial.case.num_heads * trial.case.seqlen_q * trial.case.seqlen_k


def smallest(groups: Iterable[int]) -> Trial:
    """Of the problems of these groups the one with the fewest scores, but some."""
    return min((trial for number in groups for trial in trials_of_group(number) if scores_of(trial)), key=scores_of)


# ---- What happens ----------------------------------------------------------------------------------------------------


def failure_of(trial: Trial, convert: Callable[[Any], Any]) -> str | None:
    """What is wrong with the results of a problem by the public interface, on arrays that `convert` makes."""
    if trial.case.row_reductions and trial.functions is None and not trial.ranks:
        return _failure_of_reductions(trial, convert)
    arrays = trial.arrays(convert)
    on_host = IN_HOST_MEMORY if trial.chunk else ()
    given = {
        name: ct.lay_out(x, trial.case.strides, np.asarray if name in on_host else convert)
        for name, x in _poisoned(trial).items()
    }
    if trial.ranks:
        results = _by_ranks(trial, arrays)
    elif trial.moved is not None:
        results = _with_tangents(trial, trial.moved, arrays, given)
    else:
        results = _by_calls(trial, arrays, given)
    for name, x in given.items():
        if name in results and results[name] is not x:
            return f"{name}: another array than the given one came back"
    for name, before in trial.arrays().items():
        if ct.to_numpy(arrays[name]).tobytes() != before.tobytes():
            return f"{name} was written to"
    try:
        if trial.case.kv_dtype and _multiplies_float8(trial, arrays):
            assert_float8(trial.case, results["out"], results["lse"])
        else:
            judge(trial, results)
    except AssertionError as error:
        return str(error)
    return None


def _failure_of_reductions(trial: Trial, convert: Callable[[Any], Any]) -> str | None:
    options: dict[str, Any] = {"deterministic": trial.deterministic, "precision": trial.precision}
    setting = Setting(case=trial.case, chosen={}, **options)
    try:
        assert_reductions(setting, "cpu" if convert is np.asarray else "9.0", convert, trial.chunk)
    except AssertionError as error:
        return str(error)
    return None


def _by_calls(trial: Trial, arrays: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The results of both passes by name."""
    case, inputs = trial.case, ct.qkv(arrays)
    attn = cuflash.FlashAttention(**trial.keywords)
    read = {name: arrays[name] for name in trial.score_args}
    of_forward = {name: x for name, x in given.items() if name in ("out", "lse")}
    optional = ct.optional(arrays) | read | case.random | of_forward
    results = attn.forward(*inputs, want=case.row_reductions, **optional)._asdict()
    if trial.need:
        of_backward = {name: x for name, x in given.items() if name in trial.need}
        optional = {**ct.optional_backward(arrays), **read, **case.random, **of_backward}
        optional |= {"entropy": results["entropy"]} if "dentropy" in optional else {}
        out, lse = results["out"], results["lse"]
        results |= attn.backward(arrays["dout"], *inputs, out, lse, **optional, need=trial.need)._asdict()
    return results


def _with_tangents(trial: Trial, moved: Moved, arrays: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The results of the passes with tangents by name."""
    case, attn = trial.case, cuflash.FlashAttention(**trial.keywords)
    call = {name: arrays[name] for name in INPUTS} | ct.optional(arrays) | case.random
    if trial.chunk:
        call |= cuflash.streamed(call["k"], call["v"], chunk=trial.chunk)._asdict()
    tangents = {f"t{name}": arrays[f"t{name}"] for name in moved.names}
    results = attn.jvp(**call, **tangents, **{name: x for name, x in given.items() if name in JVP.default})._asdict()
    need = served_need(trial, on_device=not isinstance(arrays["q"], np.ndarray))
    if need:
        others = {name: arrays[name] for name in ("dlse", *moved.cotangents) if name in arrays}
        own = {name: x for name, x in given.items() if name in need}
        found = attn.backward_jvp(arrays["dout"], **call, **results, **tangents, **others, **own, need=need)
        results |= found._asdict()
    return results


def served_need(trial: Trial, *, on_device: bool, arch: str = "9.0") -> tuple[str, ...]:
    """The tangents of gradients that are wanted, on a device without those that no kernel makes."""

    def is_served(name: str) -> bool:
        try:
            choose_plan(trial.problem, DeviceSpec.for_arch(arch), BACKWARD_JVP, need=(name,))
        except NotImplementedError as error:
            if str(error).startswith("need:"):
                return False
            raise
        return True

    return tuple(name for name in trial.need if not on_device or is_served(name))


def _by_ranks(trial: Trial, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The same by ranks that are threads, which have shards of the rows."""
    whole = Whole(trial.problem, dict(arrays), trial.keywords, trial.case.random)
    splits = [cd.zigzag(n, trial.ranks) for n in (trial.case.seqlen_q, trial.case.seqlen_k)]
    need, call = trial.need, compute
    if trial.moved is not None:
        need, call = served_need(trial, on_device=not isinstance(arrays["q"], np.ndarray)), compute_tangents
    return Ranks(timeout=60).results(whole, *splits, need=need, call=call)


def _multiplies_float8(trial: Trial, arrays: Mapping[str, Any]) -> bool:
    """Whether a kernel multiplies fp8 q, k and v without widening them, which rounds the weights to fp8, too."""
    attn = cuflash.FlashAttention(**trial.keywords)
    read = {name: arrays[name] for name in trial.score_args}
    q, k, v = ct.qkv(arrays)
    plan = getattr(attn.plan(q, k, v, **ct.optional(arrays), **read), "forward", None)
    return plan is not None and multiplies_float8(plan)  # of NumPy arrays there is none


def multiplies_float8(plan: LaunchPlan) -> bool:
    """Whether a plan has a kernel whose products are of fp8 numbers."""
    return any(kernel.source == "sm90/forward_float8.cu" for kernel in plan.kernels)


def _poisoned(trial: Trial) -> dict[str, np.ndarray]:
    """Arrays full of NaN for the results that the caller gives."""
    case, problem = trial.case, trial.problem
    arrays = trial.arrays()
    out_shape, lse_shape = problem.out_shape, problem.lse_shape
    if case.axes is not None:
        out_shape, lse_shape = (*case.axes, *out_shape[-3:]), (*case.axes, *lse_shape[-2:])
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {}
    shapes |= {"out": (out_shape, ct.numpy_dtype(case.dtype)), "lse": (lse_shape, problem.softmax_dtype)}
    shapes |= {name: ((), problem.softmax_dtype) for name in ("dscale", "dsoftcap")}
    shapes |= {f"d{name}": (x.shape, x.dtype) for name, x in arrays.items()}
    shapes |= {f"t{name}": x for name, x in shapes.items()}
    return {name: np.full(shapes[name][0], np.nan, shapes[name][1]) for name in trial.given}


def failures_of_group(number: int) -> list[str]:
    """What failed in a group, run in a process of its own, or in more where one ends too early."""
    names = [trial.name for trial in trials_of_group(number)]
    failures, first = [], 0
    while first < len(names):
        command = [sys.executable, "-m", "tests.fuzz", str(number), str(first)]
        try:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
            output, status = ended.stdout, f"the process ended with status {ended.returncode}: {ended.stderr[-2000:]}"
        except subprocess.TimeoutExpired as expired:
            output, status = (expired.stdout or b"").decode(), f"no end after {SECONDS} s"
        done = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        failures += [f"{line['trial']}: {line['failure']}" for line in done if line["failure"]]
        first += len(done)
        if first < len(names) and not (done and done[-1]["is_fatal"]):
            failures.append(f"{names[first]}: {status}")
            first += 1
    return failures


def main(number: int, first: int) -> None:
    """Run the problems of a group on the current device, from the `first` on, until CUDA is no longer usable."""
    import cupy

    trials = trials_of_group(number)[first:]
    with Bar(f"fuzz, group {number}", total=len(trials)) as bar:
        for trial in trials:
            failure, is_fatal = None, False
            try:
                failure = failure_of(trial, cupy.asarray)
                cupy.cuda.Device().synchronize()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                is_fatal = type(error).__module__.startswith(("cupy", "cuda"))
            said = failure and f"{failure}\n{trial}"
            bar.print(json.dumps({"trial": trial.name, "failure": said, "is_fatal": is_fatal}))
            bar.advance()
            if is_fatal:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]), int((*sys.argv[2:], "0")[0]))
