"""Problems whose scores and masks are functions, drawn by hypothesis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import cuflash
from cuflash.arrays.array_info import numpy_dtype
from cuflash.score_mod.program import Traced
from cuflash.score_mod.tracing import score_arg_names
from cuflash.spec.inputs import NAMES
from cuflash.spec.problem import Problem, make_problem
from tests import expressions
from tests.cuda_scores import CUDA_SCORES, HEAD

Array = np.ndarray[Any, Any]


def distance(s, i, j, *, head, pos_q, pos_k, gamma, table):  # type: ignore[no-untyped-def]
    r2 = (pos_q[i, 0] - pos_k[j, 0]) ** 2 + (pos_q[i, 1] - pos_k[j, 1]) ** 2
    return s - gamma[head] * cuflash.sqrt(r2 + 1e-6) + table[head, cuflash.clip(i - j, -3, 3) + 3]


def plane(s, i, j, *, head, pos_q, pos_k, gamma):  # type: ignore[no-untyped-def]
    """Distances of points."""
    r2 = (pos_q[i, 0] - pos_k[j, 0]) ** 2 + (pos_q[i, 1] - pos_k[j, 1]) ** 2
    return s - gamma[head] * cuflash.sqrt(r2 + 1e-6)


def gated(s, i, j, *, pos_q, pos_k, gate):  # type: ignore[no-untyped-def]
    """Squared distances of points, each key with a weight of its own."""
    return s - gate[j] ** 2 * ((pos_q[i, 0] - pos_k[j, 0]) ** 2 + (pos_q[i, 1] - pos_k[j, 1]) ** 2)


def box(s, i, j, *, pos_q, pos_k, side):  # type: ignore[no-untyped-def]
    """The distance in a periodic box."""
    x = pos_q[i, 0] - pos_k[j, 0]
    return s - (x - side * cuflash.floor(x / side + 0.5)) ** 2


def capped(s, i, j, *, cap):  # type: ignore[no-untyped-def]
    return cap * cuflash.tanh(s / cap)


def tempered(s, i, j, *, head, batch, temperature):  # type: ignore[no-untyped-def]
    return s / temperature[batch, head]


def alibi(s, i, j, *, head, slopes):  # type: ignore[no-untyped-def]
    return s - slopes[head] * cuflash.abs(i - j)


def with_pairs(s, i, j, *, head, pairs, gate):  # type: ignore[no-untyped-def]
    return cuflash.where(i >= j, s * cuflash.exp(-cuflash.abs(gate[j])), s) + 0.5 * pairs[i, j]


def gathered(s, i, j, *, table, kind_q, kind_k):  # type: ignore[no-untyped-def]
    return s + table[kind_q[i] % 2, (kind_k[j] + i // 3) % 7]


def without_s(s, i, j, *, pairs):  # type: ignore[no-untyped-def]
    return pairs[i, j] * 2.0


def barrier(s, i, j, *, room):  # type: ignore[no-untyped-def]
    """-inf where there is no room, with a derivative that is infinite."""
    return -cuflash.abs(s) / room[j]


def t5(s, i, j, *, head, table):  # type: ignore[no-untyped-def]
    """Buckets of distances, which are longer the farther they are."""
    n = cuflash.abs(i - j)
    far = 1 + cuflash.floor(cuflash.log(cuflash.maximum(n, 1) / 2) / np.log(16))
    return s + table[head, cuflash.where(n < 2, n, cuflash.minimum(far, 3)) + cuflash.where(j > i, 3, 0)]


def decay(s, i, j, *, head, gamma):  # type: ignore[no-untyped-def]
    return s + 3 * cuflash.exp(-gamma[head] * cuflash.abs(i - j) / 20)


def fade(s, i, j, *, batch, head, temperature):  # type: ignore[no-untyped-def]
    """The same with a rate for each batch entry."""
    return s + 3 * cuflash.exp(-cuflash.abs(temperature[batch, head] * (i - j)) / 20)


def steps(s, i, j, *, head, gamma, gate):  # type: ignore[no-untyped-def]
    """Arrays that decide branches alone: none has a derivative."""
    return s - cuflash.where(gamma[head] * cuflash.abs(i - j) > 9, 1.0, 0.0) + cuflash.floor(gate[j])


def of_rows(s, i, j, *, batch, head, temperature, pos_q, gate, kind_k, table):  # type: ignore[no-untyped-def]
    """Slices of queries and of keys, and an index that is one of differences."""
    own = cuflash.exp(-cuflash.abs(pos_q[i, 0]) * temperature[batch, head])
    return s * own + cuflash.tanh(gate[j]) * own + table[head, (i - j) // 5 % 4 + kind_k[j]]


def steep(s, i, j, *, head, pos, power, gamma):  # type: ignore[no-untyped-def]
    """Distances of 0, whose roots and powers have infinite slopes or logarithms; it is drawn nowhere."""
    r2 = (pos[i, 0] - pos[j, 0]) ** 2 + (pos[i, 1] - pos[j, 1]) ** 2
    return s - gamma[head] * cuflash.sqrt(r2) - 0.1 * cuflash.abs(i - j) ** power[head]


STEEP = cuflash.Score(
    cuda=f"""
    {HEAD} {{
      const T x = given.pos(i, 0) - given.pos(j, 0), y = given.pos(i, 1) - given.pos(j, 1);
      return s - given.gamma(head) * sqrt(x * x + y * y) - T(0.1) * pow(T(i < j ? j - i : i - j), given.power(head));
    }}
    """,
    arrays=["pos", "power", "gamma"],
    python=steep,
)


SCORES: dict[str, Callable[..., Any] | None] = {
    f.__name__: f
    for f in (
        *(distance, plane, gated, box, capped, tempered, alibi, with_pairs, gathered, without_s, barrier),
        *(t5, decay, fade, steps, of_rows),
    )
}
SCORES_AND_TEXTS = {**SCORES, **CUDA_SCORES}
DRAWN = {"drawn": expressions.smooth_scores(), "hoistable": expressions.hoistable_scores()}
# Without those whose functions of long distances, such as sines, are as exact as float32 has them and no more. And
# without the gradient of a cap: where scores are small it is a difference of two numbers that are nearly equal. With
# few pairs, luck then decides how exact it is, and how exact the plain formula's is.
CONDITIONED = (*(name for name in SCORES if name != "capped"), "drawn")
MASKS: dict[str, Callable[..., Any] | None] = {
    "documents": lambda i, j, *, kind_q, kind_k: kind_q[i] == kind_k[j],
    "dilated": lambda i, j: ((i - j) % 3 == 0) & (i >= j),
    "prefix": lambda i, j, *, batch, prefix: (j < prefix[batch]) | (j <= i),
    "near": lambda i, j, *, pos_q, pos_k: cuflash.abs(pos_q[i, 0] - pos_k[j, 0]) < 1.0,
}


@dataclass(frozen=True, eq=False)
class Scored:
    """A problem with functions, and its arrays."""

    attention: cuflash.FlashAttention
    arrays: dict[str, Array]
    random: dict[str, int]
    spelled: str

    @property
    def inputs(self) -> tuple[Array, ...]:
        return tuple(self.arrays[name] for name in ("q", "k", "v"))

    @property
    def optional(self) -> dict[str, Array]:
        """All arrays of `forward` but the inputs."""
        return {name: x for name, x in self.arrays.items() if name not in ("q", "k", "v", "dout", "dlse")}

    @functools.cached_property
    def problem(self) -> Problem:
        given = {name: x for name, x in self.arrays.items() if name in NAMES}
        score_args = {name: x for name, x in self.arrays.items() if name not in NAMES}
        return make_problem(self.attention.options, *self.inputs, score_args=score_args, **given)

    def __repr__(self) -> str:
        return self.spelled


@dataclass(frozen=True)
class Functions:
    """A score, a mask or both."""

    score: Callable[..., Any] | None
    mask: Callable[..., Any] | None

    @classmethod
    def drawn(cls, number: int) -> Functions:
        """Those of a number: of a name, or random ones."""
        random = np.random.default_rng(number)

        def one(named: dict[str, Any], strategies: Sequence[Any], without: float) -> Callable[..., Any] | None:
            draw = random.random()
            if draw < without:
                return None
            if draw < (1 + without) / 2:
                return expressions.drawn(strategies[int(random.integers(len(strategies)))], number)
            return named[sorted(named)[int(random.integers(len(named)))]]

        score = one(SCORES, [*DRAWN.values()], 0.15)
        return cls(score, one(MASKS, [expressions.exact_masks()], 0.0 if score is None else 0.5))

    def __str__(self) -> str:
        options = cuflash.FlashAttention(score=self.score, mask=self.mask).options
        return f"score {options.score!r}, mask {options.mask_function!r}"

    def arrays(self, sizes: tuple[int, int, int, int], dtype: str, seed: int) -> dict[str, Array]:
        """What they read, for (batch, heads, seqlen_q, seqlen_k)."""
        functions = (self.score, self.mask)
        every = score_args_of(functions, sizes, dtype, seed)
        if any(f is not None and "doc" in _names(f) for f in functions):  # drawn: indices are clamped, so any size does
            every |= expressions.arrays(seed, "float64" if dtype == "float64" else "float32")
        read = [name for f in functions if f is not None for name in _names(f)]
        return {name: every[name] for name in read if name in every}


def score_args_of(
    functions: tuple[Callable[..., Any] | cuflash.Score | None, ...],
    sizes: tuple[int, int, int, int],
    dtype: str,
    seed: int,
) -> dict[str, Array]:
    """The arrays that functions read, for (batch, heads, seqlen_q, seqlen_k)."""
    batch, heads, seqlen_q, seqlen_k = sizes
    random = np.random.default_rng(seed)
    real = "float64" if dtype == "float64" else "float32"

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape)

    every = {
        "pos_q": normal(seqlen_q, 2), "pos_k": normal(seqlen_k, 2), "gamma": random.uniform(0.5, 1, heads),
        "table": normal(max(heads, 2), 7), "side": np.array(2.0), "cap": np.array(3.0),
        "temperature": random.uniform(0.5, 2, (batch, heads)), "slopes": random.uniform(0.01, 0.2, heads),
        "pairs": normal(seqlen_q, seqlen_k), "gate": normal(seqlen_k),
        "room": np.arange(seqlen_k) % 5 / 2.0,
    }  # fmt: skip
    arrays = {name: x.astype(numpy_dtype(dtype if name in ("table", "pairs") else real)) for name, x in every.items()}
    arrays["kind_q"] = np.sort(random.integers(0, 3, seqlen_q)).astype(np.int32)
    arrays["kind_k"] = np.sort(random.integers(0, 3, seqlen_k))
    arrays["prefix"] = random.integers(0, seqlen_k + 1, batch)
    names = [name for f in functions if f for name in _names(f)]
    return {name: arrays[name] for name in names if name in arrays}


def _names(function: Callable[..., Any] | cuflash.Score) -> Sequence[str]:
    if isinstance(function, cuflash.Score):
        return function.arrays
    return score_arg_names(function, "score", ("",) * function.__code__.co_argcount)


def of_functions(
    names: tuple[str | None, str | None], dtype: str, head_dim: int, seqlen: int = 256, seqlen_q: int = 0
) -> Problem:
    """A problem of two heads with a score and a mask, of these names; as many queries as keys unless given."""
    functions = (SCORES_AND_TEXTS[names[0]] if names[0] else None, MASKS[names[1]] if names[1] else None)
    rows = {"q": seqlen_q or seqlen, "k": seqlen, "v": seqlen}
    arrays = {name: np.zeros((1, 2, n, head_dim), numpy_dtype(dtype)) for name, n in rows.items()}
    arrays |= score_args_of(functions, (1, 2, rows["q"], seqlen), dtype, 0)
    attn = cuflash.FlashAttention(score=functions[0], mask=functions[1])
    return Scored(attn, arrays, {}, "").problem


def few_tiles(names: tuple[str | None, str | None], dtype: str, head_dim: int = 16) -> Scored:
    """A problem of a few tiles, the last ones not whole, with a score and a mask of these names."""
    functions = (SCORES_AND_TEXTS[names[0]] if names[0] else None, MASKS[names[1]] if names[1] else None)
    random = np.random.default_rng(7)
    sizes = {"q": (2, 2, 70), "k": (2, 1, 130), "v": (2, 1, 130), "dout": (2, 2, 70)}
    arrays = {x: random.standard_normal((*n, head_dim)).astype(numpy_dtype(dtype)) for x, n in sizes.items()}
    arrays |= score_args_of(functions, (2, 2, 70, 130), dtype, 7)
    return Scored(cuflash.FlashAttention(score=functions[0], mask=functions[1]), arrays, {}, "")


@st.composite
def beside_masks(
    draw: st.DrawFn, sizes: tuple[int, int, int, int], dtype: str, is_packed: bool, seed: int
) -> dict[str, Array]:
    """What makes scores where only the mask is a function."""
    (batch, heads, seqlen_q, seqlen_k), arrays = sizes, {}
    random, real = np.random.default_rng(seed + 1), "float64" if dtype == "float64" else "float32"
    if draw(st.booleans()):
        slopes = random.uniform(0, 0.3, draw(st.sampled_from([(heads,), (batch, heads)])))
        arrays["alibi_slopes"] = slopes.astype(real)
    if not is_packed and draw(st.booleans()):
        shapes = [(seqlen_q, seqlen_k), (seqlen_k,), (batch, 1, 1, seqlen_k), (heads, seqlen_q, 1)]
        bias = random.standard_normal(draw(st.sampled_from(shapes)))
        arrays["bias"] = bias.astype(numpy_dtype(draw(st.sampled_from([dtype, real]))))
    return arrays


def _of_lengths(k: Array, v: Array, random: np.random.Generator) -> dict[str, Array]:
    """Lengths of keys, and keys and values that are NaN past these: nobody may read them."""
    lengths = random.integers(0, k.shape[2] + 1, len(k))
    past = (np.arange(k.shape[2]) >= lengths[:, None])[:, None, :, None]
    own = {name: np.where(past, np.array(np.nan, x.dtype), x) for name, x in (("k", k), ("v", v))}
    return {"kv_lengths": lengths, **own}


@st.composite
def scored(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = ("float32", "float64", "float16", "bfloat16"),
    max_seqlen: int = 300,
    scores: tuple[str, ...] = (*SCORES, *DRAWN),
    packs: bool = True,
    head_dims: tuple[int, ...] = (8, 16),
    min_seqlen: int = 1,
    follows_lengths: bool = False,
) -> Scored:
    """Problems with a score, a mask or both, and options that go with them.

    Their diagonals may follow the lengths of keys only with `follows_lengths`, which slices of problems have not.
    """
    pick = st.sampled_from
    score = draw(pick([*scores, None]))
    mask = draw(pick([*MASKS, None] if score else [*MASKS]))
    function = draw(DRAWN[score]) if score in DRAWN else SCORES_AND_TEXTS[score] if score else None
    functions = (function, MASKS[mask] if mask else None)
    dtype = draw(pick(dtypes))
    is_packed = packs and draw(st.booleans()) and draw(st.booleans())
    heads_kv, group = draw(pick([1, 2])), draw(pick([1, 2]))
    heads, batch = heads_kv * group, draw(pick([1, 2]))
    seqlen_q, seqlen_k = (
        draw(pick([n for n in (1, 7, 40, 130, max_seqlen) if min_seqlen <= n <= max_seqlen])) for _ in range(2)
    )
    head_dim = draw(pick(head_dims))
    seed = draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)

    def normal(*shape: int, of: str = dtype) -> Array:
        return random.standard_normal(shape).astype(numpy_dtype(of))

    lead = () if is_packed else (batch,)
    arrays = {
        "q": normal(*lead, heads, seqlen_q, head_dim), "k": normal(*lead, heads_kv, seqlen_k, head_dim),
        "v": normal(*lead, heads_kv, seqlen_k, head_dim), "dout": normal(*lead, heads, seqlen_q, head_dim),
        "dlse": normal(*lead, heads, seqlen_q, of="float64" if dtype == "float64" else "float32"),
    }  # fmt: skip
    options: dict[str, Any] = {
        "score": functions[0],
        "mask": functions[1],
        "causal": draw(pick([False, True, "top_left"])),
    }
    options["window"] = draw(pick([None, (50, 30), (200, None)]))
    options["dropout"] = draw(pick([0.0, 0.0, 0.3]))
    options["scale"] = draw(pick([None, 0.7]))
    options["deterministic"] = draw(pick([False, False, True]))
    if is_packed:
        cuts = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in (seqlen_q, seqlen_k)]
        for name, (start, stop) in zip(("cu_seqlens_q", "cu_seqlens_k"), cuts, strict=True):
            arrays[name] = np.array([0, start, stop], np.int32)
        batch = 2
    else:
        if draw(st.booleans()):
            arrays |= _of_lengths(arrays["k"], arrays["v"], random)
            options |= {"causal": "lengths"} if follows_lengths and draw(st.booleans()) else {}
        if draw(st.booleans()):
            arrays["mask"] = random.random((1, heads, seqlen_q, seqlen_k)) < 0.8
        if draw(st.booleans()):
            options["block_size"] = (16, 64)
            arrays["block_mask"] = random.random((-(-seqlen_q // 16), -(-seqlen_k // 64))) < 0.7
    if score is None:
        options["softcap"] = draw(pick([None, 0.5, 5.0]))
        arrays |= draw(beside_masks((batch, heads, seqlen_q, seqlen_k), dtype, is_packed, seed))
    if draw(st.booleans()):
        arrays["sinks"] = normal(heads, of="float64" if dtype == "float64" else "float32")
    score_args = score_args_of(functions, (batch, heads, seqlen_q, seqlen_k), dtype, seed)
    if score in DRAWN:  # indices are clamped, so that arrays of any size do
        score_args |= expressions.arrays(seed, "float64" if dtype == "float64" else "float32")
    if draw(st.booleans()):  # steps back in memory, for which offsets have 64 bits
        score_args = {name: np.flip(np.flip(x).copy()) if x.ndim else x for name, x in score_args.items()}
    arrays |= score_args
    kwargs = {"seed": 3, "offset": 1} if options["dropout"] else {}
    if score in DRAWN and callable(function):
        score = f"{score} {Traced.of(function, 'score')!r}"
    spelled = f"score {score}, mask {mask}, {options}, " + ", ".join(
        f"{n} {x.dtype}{x.shape}" for n, x in arrays.items()
    )
    return Scored(cuflash.FlashAttention(**options), arrays, kwargs, spelled)
