"""Every pair of options, on every backend: in few cases, each of which has many options at once.

    python -m tests.pairs

runs them on the CPU path and on the emulated kernels, and writes which pairs are served to tests/support.json and
the last column of the table in docs/options.md. The tests of each tier run the same cases, and hold what happens
against that file.

A new option is one more entry of `OPTIONS`.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import cuflash
import cuflash.testing as ct
from cuflash.gpu.progress import Bar
from cuflash.spec.without_values import OF_VALUES
from cuflash.testing.rule import yardsticks_of
from cuflash.testing.tangents import Moved, movable
from cuflash.testing.tangents import yardsticks_of as tangents_of
from tests.reductions import judge as judge_reductions
from tests.reductions import weights_reduced
from tests.row_reductions import gap_is_clear, results_of

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support.json"
PAGE = ROOT / "docs" / "options.md"
BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"
PASSES = ("forward", "backward")
# It takes the options that the backward pass takes, and what jvp gives, so that both are tried; the oracle of tangents
# has no batch axes.
WITH_TANGENTS = ("backward_jvp",)
OF_ONE_BATCH = ("axes",)
BACKENDS = {"cpu": "NumPy arrays", "8.0": "CuPy arrays, 8.0", "9.0": "CuPy arrays, 9.0"}

COTANGENTS = ("dout", "dlse", "tdout", "tdlse")

# Long enough for every kernel of 9.0 but that of few queries, and no multiple of a tile; the keys are whole pages.
SIZES = {"seqlen_q": 195, "seqlen_k": 208, "batch": 2, "num_heads": 2, "head_dim": 32}
SEQLEN_Q, SEQLEN_K = SIZES["seqlen_q"], SIZES["seqlen_k"]


@dataclass(frozen=True, eq=False)
class Option:
    """An option of the interface, by the name that messages give it, and values to try: fields of `Setting`, or of its
    `Case`. Not to have it at all is tried too, unless it is one that every call has.
    """

    name: str
    values: tuple[dict[str, Any], ...]
    passes: tuple[str, ...] = PASSES
    always: bool = False


OPTIONS = (
    Option("dtype", tuple({"dtype": x} for x in ("bfloat16", "float16", "float32", "float64")), always=True),
    Option("causal", ({"causal": True}, {"causal": "top_left"}, {"causal": "lengths"})),
    Option("scale", ({"scale": -0.2},)),
    Option("window", ({"window": (40, 9)}, {"window": (70, None)})),
    Option("softcap", ({"softcap": 5.0},)),
    Option("layout", ({"layout": "bshd"},)),
    Option("deterministic", ({"deterministic": True},), ("backward",)),
    Option("precision", ({"precision": "tf32"},)),
    Option("dropout", ({"dropout": 0.2},)),
    Option("bias", ({"bias": (1, 2, SEQLEN_Q, SEQLEN_K)}, {"bias": (2, 1, SEQLEN_K), "bias_dtype": "input"})),
    Option("mask", ({"mask": (SEQLEN_Q, SEQLEN_K)}, {"mask": (2, 1, 1, SEQLEN_K)})),
    Option("block_mask", ({"block_mask": (2,), "block_size": (64, 64)}, {"block_mask": (), "block_size": (128, 32)})),
    Option("kv_lengths", ({"kv_lengths": (SEQLEN_K, 70)}, {"kv_lengths": (0, 100), "kv_lengths_dtype": "int64"})),
    Option("block_table", ({"page_size": 16},), ("forward",)),
    Option("cu_seqlens_q", ({"cu_seqlens_q": (0, 70, SEQLEN_Q), "cu_seqlens_k": (0, 60, SEQLEN_K)},)),
    Option("k_scale", ({"kv_dtype": "float8_e4m3fn", "k_scale": "token"}, {"kv_dtype": "float8_e5m2"}), ("forward",)),
    Option("v_scale", ({"kv_dtype": "float8_e4m3fn", "v_scale": "token"},), ("forward",)),
    Option("alibi_slopes", ({"alibi_slopes": (2,)},)),
    Option("sinks", ({"sinks": True},)),
    Option("dlse", ({"dlse": True},), ("backward",)),
    Option("num_heads_kv", ({"num_heads_kv": 1},)),
    Option("head_dim_v", ({"head_dim_v": 48},)),
    Option("v=None", ({"has_values": False, "dlse": True},)),
    # Keys that broadcast; and rows of a model of structures, which share a per-pair bias and have a mask of keys each.
    Option("axes", ({"axes": (1, 2), "batch_axes": (("k", (1, 1)), ("v", (1, 1)))}, {"axes": (1, 2)})),
    Option("strides", ({"strides": "padded"}, {"strides": "transposed"})),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A problem with several options, and what a `Case` does not know of."""

    case: ct.Case
    deterministic: bool = False
    precision: Literal["highest", "tf32"] = "highest"
    chosen: dict[Option, dict[str, Any]] = field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Of its options."""
        return tuple(option.name for option in self.chosen)

    @property
    def yardsticks(self) -> dict[str, ct.Yardstick]:
        """Of all results."""
        return yardsticks_of(self.case)

    @property
    def moved(self) -> Moved:
        """What has tangents in passes with tangents: everything."""
        return Moved(names=tuple(movable(self.case)), cotangents=("tdout", "tdlse") if self.case.dlse else ("tdout",))

    @classmethod
    def of(cls, chosen: dict[Option, dict[str, Any]]) -> Setting:
        """The setting of these values."""
        fields = {name: x for value in chosen.values() for name, x in value.items()}
        own = {name: fields.pop(name) for name in ("deterministic", "precision") if name in fields}
        return cls(case=ct.Case(**SIZES | fields), chosen=chosen, **own)

    def __str__(self) -> str:
        return "-".join((self.case.dtype, *self.names[1:]))


# ---- Which cases -----------------------------------------------------------------------------------------------------


def covering_array(levels: Sequence[int], *, seed: int = 0, attempts: int = 30) -> list[tuple[int, ...]]:
    """Rows of numbers below `levels`, few of them, in which every two columns have every pair of numbers.

    Greedy, as in Cohen, Dalal, Fredman, Patton: The AETG system (1997): each row is the best of several, which begin
    with a pair that no row has yet and take for one column after another the number that makes the most new pairs.
    """
    rng = random.Random(seed)
    columns = range(len(levels))
    missing = {
        frozenset({(i, a), (j, b)})
        for i, j in itertools.combinations(columns, 2)
        for a, b in itertools.product(range(levels[i]), range(levels[j]))
    }
    rows = []
    while missing:
        tried = []
        pairs = sorted(missing, key=sorted)
        for _ in range(attempts):
            row = dict(rng.choice(pairs))
            for i in rng.sample(columns, len(levels)):
                if i not in row:
                    new = [
                        sum(frozenset({(i, a), value}) in missing for value in row.items()) for a in range(levels[i])
                    ]
                    row[i] = rng.choice([a for a, count in enumerate(new) if count == max(new)])
            tried.append(tuple(row[i] for i in columns))
        best = max(tried, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        rows.append(best)
    return rows


def _pairs(row: Sequence[int]) -> set[frozenset[tuple[int, int]]]:
    return {frozenset(pair) for pair in itertools.combinations(enumerate(row), 2)}


@functools.cache
def settings(options: Sequence[Option] = OPTIONS) -> list[Setting]:
    """Cases in which every two values of two options come together, and each also without the other."""
    choices = [(*(() if option.always else (None,)), *option.values) for option in options]
    rows = covering_array([len(values) for values in choices])
    return [_setting(options, [values[a] for values, a in zip(choices, row, strict=True)]) for row in rows]


def _setting(options: Sequence[Option], values: Sequence[dict[str, Any] | None]) -> Setting:
    return Setting.of({option: x for option, x in zip(options, values, strict=True) if x is not None})


# ---- What happens ----------------------------------------------------------------------------------------------------

Run = Callable[[Setting, str], dict[str, Any]]  # results of a pass by name


def unserved_pair(setting: Setting, pass_: str, run: Run) -> tuple[str, str] | None:
    """The two options of the setting that the backend refuses together, which its message names first; None if its
    results are right.

    AssertionError if they are wrong, or if the refusal does not name two options.
    """
    try:
        results = run(setting, pass_)
    except NotImplementedError as error:
        found_at = {match.start(): name for name in setting.names if (match := re.search(rf"\b{name}\b", str(error)))}
        assert len(found_at) >= 2, f"{setting}: two of {setting.names} should be named in: {error}"
        first, second, *_ = (found_at[at] for at in sorted(found_at))
        return first, second
    judge(setting, results, tangents_of(setting.case, setting.moved) if pass_ in WITH_TANGENTS else None)
    return None


class Posed(Protocol):
    """A problem, and how precise its results are to be."""

    @property
    def case(self) -> ct.Case: ...
    @property
    def precision(self) -> Literal["highest", "tf32"]: ...
    @property
    def yardsticks(self) -> Mapping[str, ct.Yardstick]: ...


def judge(setting: Posed, results: dict[str, Any], yardsticks: Mapping[str, ct.Yardstick] | None = None) -> None:
    """Hold results against the oracle: where precision is TF32's, in units of a number of 11 bits, not 24.

    Without `yardsticks`, those of the setting.
    """
    expected = setting.yardsticks if yardsticks is None else yardsticks
    bits = 24 - 11 if setting.precision == "tf32" and setting.case.dtype == "float32" else 0
    for name, x in results.items():
        measurement = ct.measure(name, x, expected[name].looser(2.0**bits))
        assert not measurement.failure, f"{setting}: {measurement}"


def without(setting: Setting, name: str) -> Setting:
    """The setting without one of its options, which is not one that every call has."""
    return Setting.of({option: value for option, value in setting.chosen.items() if option.name != name})


def unserved_pairs(setting: Setting, pass_: str, run: Run) -> Iterator[tuple[str, str]]:
    """All refusals that a setting meets: after one, the setting goes on without either of the two.

    With no options but some of those that were served together it would meet none: that is left out. The backward pass
    goes without what it has not, and passes with tangents do; the forward pass takes what is of the backward pass
    alone.
    """
    if pass_ != "forward":
        for option in OPTIONS:
            is_left_out = "backward" not in option.passes or (pass_ in WITH_TANGENTS and option.name in OF_ONE_BATCH)
            if option.name in setting.names and is_left_out:
                setting = without(setting, option.name)
    always = {option.name for option in OPTIONS if option.always}
    waiting = deque([setting])
    served: list[set[str]] = []
    while waiting:
        setting = waiting.popleft()
        if any(names.issuperset(setting.names) for names in served):
            continue
        pair = unserved_pair(setting, pass_, run)
        if pair is None:
            served.append(set(setting.names))
        else:
            yield pair
            waiting += (without(setting, name) for name in pair if name not in always)


def by_interface(convert: Callable[[Any], Any]) -> Run:
    """Runs settings by the public interface, on arrays that `convert` makes of NumPy's."""

    def run(setting: Setting, pass_: str) -> dict[str, Any]:
        case = setting.case
        own: Callable[..., dict[str, Any]] = dict if case.has_values else _without_values
        arrays = own(case.arrays(convert))
        attn: Any = cuflash.FlashAttention(
            **case.keywords, deterministic=setting.deterministic, precision=setting.precision
        )
        if pass_ in WITH_TANGENTS:
            tangents = own(setting.moved.arrays(case, convert))
            return _given(_with_tangents(attn, setting, arrays, tangents))
        inputs = ct.qkv(arrays)
        out, lse = attn.forward(*inputs, **ct.optional(arrays) | case.random)
        if pass_ == "forward":
            return _given({"out": out, "lse": lse})
        need = ct.gradients_of(case.problem)
        optional = {**ct.optional_backward(arrays), **case.random, "need": need}
        return _given(dict(zip(need, attn.backward(arrays["dout"], *inputs, out, lse, **optional), strict=True)))

    return run


def _without_values(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a call with ``v=None``, which takes none of those over the columns of v."""
    return {name: None if name in ("v", *OF_VALUES) else x for name, x in arrays.items()}


def _given(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results without those that are None, as out is without v."""
    return {name: x for name, x in results.items() if x is not None}


def _with_tangents(
    attn: Any, setting: Setting, arrays: Mapping[str, Any], tangents: Mapping[str, Any]
) -> dict[str, Any]:
    """tout, tlse and the tangents of the gradients that arrays of this kind have."""
    case = setting.case
    given = dict(zip("qkv", ct.qkv(arrays), strict=True)) | ct.optional(arrays) | case.random
    of_inputs = {name: x for name, x in tangents.items() if name not in ("tdout", "tdlse")}
    results = attn.jvp(**given, **of_inputs)._asdict()
    need = tuple(f"t{name}" for name in ct.gradients_of(case.problem))
    given |= {"dlse": arrays["dlse"]} if "dlse" in arrays else {}
    found = attn.backward_jvp(arrays["dout"], **given, **tangents, **results, need=need)._asdict()
    return {name: results[name] for name in ("tout", "tlse")} | found


def by_emulator(arch: str) -> Run:
    """Runs settings by the real kernels for a compute capability, in the emulator."""
    from cuflash.emulator import passes as emulated
    from tests.emulate import attention

    def run(setting: Setting, pass_: str) -> dict[str, Any]:
        case = setting.case
        arrays = case.arrays()
        options: dict[str, Any] = {"deterministic": setting.deterministic, "precision": setting.precision}
        if case.axes is not None:
            return attention.by_calls(case, arrays, pass_, arch=arch, **options)
        problem = attention.problem_of(case, arrays, **options)
        if pass_ in WITH_TANGENTS:
            tangents: Any = setting.moved.arrays(case)
            given = {name: x for name, x in (arrays | tangents).items() if name not in COTANGENTS}
            names = ("out", "lse", "tout", "tlse")
            results = dict(zip(names, emulated.jvp(problem, given, arch=arch, **case.random), strict=True))
            need = tuple(f"t{name}" for name in ct.gradients_of(case.problem))
            every = arrays | tangents | results
            found = emulated.backward_jvp(problem, every, need=need, arch=arch, **case.random)
            return {name: results[name] for name in names[2:]} | dict(zip(need, found, strict=True))
        if pass_ == "forward":
            return dict(zip(("out", "lse"), attention.forward(problem, arrays, arch=arch, **case.random), strict=True))
        out, lse = attention.forward_by_oracle(problem, arrays, **case.random)
        gradients = attention.backward(problem, arrays, out, lse, arch=arch, **case.random)
        return dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False))

    return run


# ---- Reductions ----


def served(setting: Setting, backend: str) -> Setting:
    """The setting without one option of each recorded pair that the backend refuses."""
    always = {option.name for option in OPTIONS if option.always}
    for pass_ in PASSES:
        for pair in recorded()["unserved"][backend][pass_]:
            if set(pair) <= set(setting.names):
                setting = without(setting, next(name for name in pair if name not in always))
    return setting


def with_row_reductions(setting: Setting) -> ct.Case:
    """The case of a setting, with reductions of rows: the gradient of a maximum only where it is clear whose it is."""
    case = replace(setting.case, row_reductions=("max", "entropy"))
    return case if gap_is_clear(case) else replace(case, row_reductions=("entropy",))


def reduces_weights(setting: Setting, backend: str) -> bool:
    """Whether the oracle of reductions of weights knows the options of a setting, and a backend serves them."""
    return setting.case.axes is None and (backend == "cpu" or not setting.case.page_size)


def judge_weights(setting: Setting, weights: Any, sums: Any, largest: Any, top: Any) -> None:
    """Hold column sums, the column maximum and the strongest keys against the oracle."""
    is_tf32 = setting.precision == "tf32" and setting.case.dtype == "float32"
    found = (ct.to_numpy(sums), ct.to_numpy(largest), tuple(map(ct.to_numpy, top)))
    judge_reductions(setting.case, weights, found[0], found[1], found[2], looser=2.0**11 if is_tf32 else 1.0)


def assert_reductions(setting: Setting, backend: str, convert: Callable[[Any], Any], chunk: int = 0) -> None:
    """All reductions of a setting by the public interface, on arrays that `convert` makes of NumPy's.

    With a `chunk`, the keys are streamed.
    """

    def streamed(k: Any, v: Any) -> Any:
        return cuflash.streamed(*(None if x is None else ct.to_numpy(x) for x in (k, v)), chunk=chunk)

    options: dict[str, Any] = {"deterministic": setting.deterministic, "precision": setting.precision}
    case = with_row_reductions(setting)
    found = results_of(case, convert, streamed if chunk else lambda k, v: (k, v), **options)
    results = {**found.forward, **found.gradients}
    judge(replace(setting, case=case), {name: x for name, x in results.items() if name != "out" or case.has_values})
    if reduces_weights(setting, backend):
        own_keys = (lambda k: streamed(k, None).k) if chunk else (lambda k: k)
        judge_weights(setting, *weights_reduced(setting.case, convert, own_keys, **options))


# ---- The table -------------------------------------------------------------------------------------------------------


def recorded() -> dict[str, Any]:
    """What the last run of the command found: options, and by backend and pass the pairs that are refused."""
    return json.loads(SUPPORT.read_text())


def assert_as_recorded(backend: str, setting: Setting, pass_: str, run: Run) -> None:
    """What a setting meets is right, or a refusal that the file has; and it has no other of these options."""
    found = {tuple(sorted(pair)) for pair in unserved_pairs(setting, pass_, run)}
    said = {tuple(pair) for pair in recorded()["unserved"][backend][pass_] if set(pair) <= set(setting.names)}
    assert found == said, f"{setting}: not as recorded, refused {found}, recorded {said}: run python -m tests.pairs"


def excluded(option: str, found: dict[str, Any]) -> str:
    """The options that do not go with one, in a cell of a table: with the backend or the pass that refuses, if only one
    does. That an option has no backward pass at all is not said of every other one."""
    backends = list(found["unserved"])
    refusals: dict[str, set[tuple[str, str]]] = {}
    for backend, pass_ in itertools.product(backends, PASSES):
        for pair in found["unserved"][backend][pass_]:
            if option in pair:
                other = next((name for name in pair if name != option), option)
                refusals.setdefault(other, set()).add((backend, pass_))
    cells = []
    for other, where in sorted(refusals.items()):
        passes = [x for x in PASSES if x in found["options"][option] and x in found["options"][other]]
        only = [x for x in backends if any((x, y) in where for y in passes)]
        if where >= set(itertools.product(backends, passes)):
            cells.append(f"`{other}`")
        elif where >= set(itertools.product(only, passes)):
            cells.append(f"`{other}` ({', '.join(only)})")
        else:
            cells.append(f"`{other}` ({', '.join(f'{x} {y}' for x, y in sorted(where))})")
    return ", ".join(cells) or "-"


def in_page(text: str, found: dict[str, Any]) -> str:
    """The page with the last column of its table as it should be."""
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    lines = []
    for line in table.splitlines():
        cells = line.split("|")
        option = re.match(r"\| `([\w=]+)`", line)
        if option and option.group(1) in found["options"]:
            cells[-2] = f" {excluded(option.group(1), found)} "
        lines.append("|".join(cells))
    return "\n".join([f"{before}{BEGIN}", *lines[1:], f"{END}{after}"])


def main() -> int:
    """Run every case on the backends of this machine, and write down what is refused."""
    runs = {name: by_interface(lambda x: x) if name == "cpu" else by_emulator(name) for name in BACKENDS}
    unserved: dict[str, dict[str, list]] = {name: {} for name in runs}
    every = settings()
    for (backend, run), pass_ in itertools.product(runs.items(), (*PASSES, *WITH_TANGENTS)):
        found = set()
        with Bar(f"{BACKENDS[backend]}, {pass_}", total=len(every)) as bar:
            for setting in every:
                found |= {tuple(sorted(pair)) for pair in unserved_pairs(setting, pass_, run)}
                bar.advance()
        unserved[backend][pass_] = [list(pair) for pair in sorted(found)]
    options = {option.name: list(option.passes) for option in OPTIONS}
    SUPPORT.write_text(json.dumps({"options": options, "unserved": unserved}, indent=1) + "\n")
    PAGE.write_text(in_page(PAGE.read_text(), recorded()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
