"""Calls on NumPy arrays that differ from earlier ones in one thing: each gives what it gives where nothing is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.cpu import backend, core
from cuflash.spec.options import Options
from cuflash.spec.passes import BACKWARD, FORWARD
from cuflash.testing import STRIDES, lay_out
from tests.calls import FEATURES, calls, shifted
from tests.compiled import INSTRUCTION_SETS, NUMPY, much_work, way_taken
from tests.sampling import examples

Outcome = str | dict[str, tuple[Any, ...] | None]


@dataclass(frozen=True, kw_only=True)
class OneCall:
    """A call, and how it is computed."""

    options: Options
    arrays: dict[str, Any]
    keywords: dict[str, Any]  # need or want, seed and offset
    way: int
    threads: int

    @property
    def attention(self) -> cuflash.FlashAttention[Any]:
        attn: cuflash.FlashAttention[Any] = cuflash.FlashAttention()
        attn.options = self.options
        return attn

    @property
    def results(self) -> Collection[str]:
        """Names of arrays that the call writes to, if they are given."""
        return self.keywords.get("need", ("out", "lse"))

    @property
    def inputs(self) -> dict[str, Any]:
        return {name: x for name, x in self.arrays.items() if name not in ("out", "lse")}

    def compute(self) -> Any:
        """The results of the method that takes these keywords."""
        method = self.attention.backward if "need" in self.keywords else self.attention.forward
        return method(**self.arrays, **self.keywords)

    def compute_bound(self, bound: Any) -> Any:
        """The results of a bound call on these arrays."""
        keywords = {name: x for name, x in self.keywords.items() if name != "want"}
        return bound(**self.arrays, **keywords)

    def outcome(self, compute: Callable[[], Any]) -> Outcome:
        """The bits of the results of this call, some of which may be NaN, or what it raises."""
        try:
            with cuflash.cpu_threads(self.threads):
                results = compute()._asdict()
        except (TypeError, ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        for name, x in results.items():
            assert self.arrays.get(name) is None or x is self.arrays[name]
        return {name: x if x is None else (x.dtype, x.shape, x.tobytes()) for name, x in results.items()}


class Subclass(np.ndarray):
    """Of arrays that are no plain ones."""


def cut(draw: Any, x: np.ndarray) -> np.ndarray:
    axis, first = draw(st.integers(0, x.ndim - 1)), draw(st.integers(0, 1))
    return x[(slice(None),) * axis + (slice(first, None) if first else slice(0),)]


def misaligned(draw: Any, x: np.ndarray) -> np.ndarray:
    """Each element of which begins one byte past a multiple of its size."""
    storage = np.empty(x.nbytes + 1, np.uint8)
    copy = np.ndarray(x.shape, x.dtype, storage, 1)
    copy[...] = x
    return copy


def read_only(draw: Any, x: np.ndarray) -> np.ndarray:
    view = x.view()
    view.flags.writeable = False
    return view


def with_other_dtype(draw: Any, x: np.ndarray) -> np.ndarray:
    dtype = draw(st.sampled_from((np.float32, np.float64, np.float16, ">f4", bool, np.int32)))
    return np.where(np.isfinite(x), x, 0).astype(dtype)


# What differs in one array.
CHANGES_OF_ARRAYS: dict[str, Callable[[Any, np.ndarray], Any]] = {
    "None": lambda draw, x: None,
    "shape": lambda draw, x: cut(draw, x) if x.ndim else x[None],
    "number of axes": lambda draw, x: x[None],
    "strides": lambda draw, x: lay_out(x, draw(st.sampled_from(STRIDES)), np.array),
    "alignment": lambda draw, x: shifted(x, draw(st.integers(0, 3))),
    "misaligned": misaligned,
    "dtype": with_other_dtype,
    "dtype object": lambda draw, x: x.view(np.dtype(x.dtype, metadata={"an": "equal one"})),
    "values": lambda draw, x: np.roll(x, 1).reshape(x.shape),
    "read-only": read_only,
    "subclass": lambda draw, x: x.view(Subclass),
    "list": lambda draw, x: x.tolist(),
}
# Values of options that are set one at a time.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "causal": (False, True, "top_left"),
    "window": (None, (3, None), (None, 0), (20, 5)),
    "scale": (None, 1.0, -1.0, 0.0, -0.0),
    "softcap": (None, 2.0),
    "dropout": (0.0, 0.5),
    "layout": ("bhsd", "bshd"),
    "deterministic": (False, True),
    "batch_invariant": (False, True),
    "precision": ("highest", "tf32"),
    "diagonal": (None, 2),
    "block_size": (64, 128),
}
OTHERS = ("nothing", "way", "threads", "wanted", "random", "keys", "absent", "shared memory")
CHANGES = st.one_of(*(st.sampled_from(list(names)) for names in (OTHERS, OPTIONS, CHANGES_OF_ARRAYS)))
# What calls may have whose arrays alone say that the core computes them as they are.
REPEATABLE = tuple(name for name in FEATURES if name not in ("kv_lengths", "packed", "pages"))
ORDERS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda order: [0, *order, 1])
WANTED = ((), ("max",), ("entropy", "max"))


@st.composite
def similar_calls(draw: Any, pass_: Any) -> tuple[OneCall, OneCall]:
    """Two calls of a pass that differ in one thing."""
    case, options, arrays, need = draw(calls(pass_, draw(st.sampled_from((REPEATABLE, REPEATABLE, FEATURES)))))
    keywords = {"need": need} if pass_ is BACKWARD else {"want": draw(st.sampled_from(WANTED))}
    keywords |= {"seed": case.seed, "offset": 5} if options.dropout else {}
    ways = [number for _, number in (*INSTRUCTION_SETS, NUMPY)]
    one = OneCall(
        options=replace(options, batch_invariant=draw(st.booleans())),
        arrays=arrays,
        keywords=keywords,
        way=draw(st.sampled_from([ways[0]] * len(ways) + ways)),
        threads=draw(st.sampled_from([1, 3])),
    )
    return one, changed(draw, one, draw(CHANGES), ways)


def changed(draw: Any, one: OneCall, what: str, ways: list[int]) -> OneCall:
    arrays, keywords = one.arrays, one.keywords
    if what in OPTIONS:
        values = [x for x in OPTIONS[what] if repr(x) != repr(getattr(one.options, what))]
        return replace(one, options=replace(one.options, **{what: draw(st.sampled_from(values))}))
    if what == "nothing":
        return replace(one)
    if what == "way":
        return replace(one, way=draw(st.sampled_from(ways)))
    if what == "threads":
        return replace(one, threads=3 if one.threads == 1 else 1)
    if what == "random":
        return replace(one, keywords=keywords | {"seed": draw(st.integers(0, 3)), "offset": 1})
    if what == "wanted" and "need" in keywords:
        count = draw(st.integers(1, len(keywords["need"])))
        return replace(one, keywords=keywords | {"need": draw(st.permutations(keywords["need"]))[:count]})
    if what == "wanted":
        others = [x for x in WANTED if x != keywords["want"]]
        return replace(one, keywords=keywords | {"want": draw(st.sampled_from(others))})
    if what == "keys":
        return replace(one, arrays=arrays | {name: arrays[name][..., :-1, :] for name in ("k", "v")})
    written = [name for name in arrays if name in one.results and what in ("read-only", "shared memory")]
    name = draw(st.sampled_from(written or list(arrays)))
    if what == "absent" and name not in ("q", "k", "v", "dout", "out", "lse"):
        return replace(one, arrays={other: x for other, x in arrays.items() if other != name})
    x = arrays[draw(st.sampled_from(list(arrays)))] if what == "shared memory" else arrays[name]
    if what in CHANGES_OF_ARRAYS:
        x = CHANGES_OF_ARRAYS[what](draw, x)
    return replace(one, arrays=arrays | {name: x})


def forget() -> None:
    """Forget all calls."""
    backend._known.clear()
    backend._repeatable.cache_clear()
    backend.bind_signature.cache_clear()


def alone(call: OneCall, compute: Callable[[], Any]) -> Outcome:
    """The outcome of a call before which there was none."""
    forget()
    with way_taken(call.way):
        return call.outcome(compute)


@pytest.fixture(autouse=True)
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    much_work(monkeypatch)


@pytest.mark.skipif(core.why_not() is not None, reason=f"no compiled core: {core.why_not()}")
@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD], ids=str)
def test_a_call_gives_what_it_gives_alone(pass_):
    @settings(max_examples=examples(600))
    @given(similar_calls(pass_), ORDERS)
    def holds(both, order):
        expected = [alone(call, call.compute) for call in both]
        forget()
        for number in order:
            with way_taken(both[number].way):
                assert both[number].outcome(both[number].compute) == expected[number]
        results_are_new = all(call.arrays.get(name) is None for call in both for name in call.results)
        if results_are_new and both[0].way == both[1].way:
            with way_taken(both[0].way), ThreadPoolExecutor(3) as pool:
                found = list(pool.map(lambda number: both[number].outcome(both[number].compute), order * 2))
            assert found == [expected[number] for number in order * 2]

    holds()


@pytest.mark.skipif(core.why_not() is not None, reason=f"no compiled core: {core.why_not()}")
@settings(max_examples=examples(600))
@given(similar_calls(FORWARD), ORDERS)
def test_a_bound_call_gives_what_forward_gives(both, order):
    """A bound call, which refuses arrays of another form, and nothing else that `forward` takes."""
    one, two = both[0], replace(both[1], options=both[0].options)
    try:
        forget()
        with way_taken(one.way):
            bound = one.attention.bind(**one.inputs, want=one.keywords["want"])
    except (TypeError, ValueError, NotImplementedError):
        return
    calls = [replace(call, keywords=call.keywords | {"want": one.keywords["want"]}) for call in (one, two)]
    expected = [alone(call, call.compute) for call in calls]
    forget()
    for number in order:
        call = calls[number]
        with way_taken(call.way):
            found = call.outcome(lambda call=call: call.compute_bound(bound))
        is_refused = isinstance(found, str) and "as in bind" in found
        assert found == expected[number] or (is_refused and number == 1), both
