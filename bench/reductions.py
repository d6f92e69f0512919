"""lse alone and reductions of the weights: their times as multiples of the passes that have them as a by-product."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cuflash import FlashAttention
from cuflash.arrays.array_info import numpy_dtype
from cuflash.gpu.progress import Bar

from .cases import Case
from .contender import Absent
from .logsumexp import Machine
from .report import Record, number
from .run import failure_of
from .timing import time_interleaved

COUNT = 16
STRONGEST = f"{COUNT} strongest keys"  # of a row
CLASSES = {"gpu": (8192, 128256, 2048), "cpu": (512, 8192, 256)}  # rows, classes and columns of a cross-entropy
# Errors relative to the largest number of a result: more is a wrong result, of float32 or rounded to half precision.
LARGEST_ERROR, LARGEST_ROUNDED = 1e-4, 0.02

CASES = {
    "gpu": tuple(
        Case(head_dim=d, seqlen_q=4096, batch=4, num_heads=2048 // d, causal=causal)
        for d in (64, 128)
        for causal in (False, True)
    ),
    "cpu": tuple(
        Case(dtype="float32", head_dim=64, seqlen_q=1024, batch=1, num_heads=8, causal=causal)
        for causal in (False, True)
    ),
}
# What each call is compared with, in the order of the table's rows.
BASES = {
    "forward": "forward",
    "lse alone": "forward",
    "max": "forward",
    "entropy": "forward",
    "max and entropy": "forward",
    "column sums": "forward",
    "column sums, flash-colreduce": "forward",
    "column max": "forward",
    STRONGEST: "forward",
    "backward": "backward",
    "backward of lse alone": "backward",
    "backward with dmax": "backward",
    "backward with dentropy": "backward",
    "three products": "three products",
    "cross-entropy, both passes": "three products",
}


@dataclass(frozen=True)
class Call:
    """A call, and what is compared with the formula: the part of its results that belongs to the first head."""

    run: Callable[[], Any]
    first_head: Callable[[Any], Any] | None = None
    largest_error: float = LARGEST_ERROR


Calls = dict[str, Call]


def normal(xp: Any, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Random numbers, made on the device that has them."""
    return xp.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(numpy_dtype(dtype))


def calls_of(case: Case, xp: Any) -> Calls:
    """cuflash's calls for a case."""
    attn = FlashAttention(causal=case.causal)
    q, k, v, dout = (normal(xp, case.q_shape, case.dtype, seed) for seed in range(4))
    out, lse = attn.forward(q, k, v)[:2]
    of_rows = normal(xp, lse.shape, case.softmax_dtype, 4)
    rounded = LARGEST_ERROR if case.dtype == "float32" else LARGEST_ROUNDED
    largest, spread = (attn.forward(q, k, v, want=(name,)) for name in ("max", "entropy"))
    return {
        "forward": Call(lambda: attn.forward(q, k, v), lambda found: found.out[0, 0], rounded),
        "lse alone": Call(lambda: attn.forward(q, k, None), lambda found: found.lse[0, 0]),
        "max": Call(lambda: attn.forward(q, k, v, want=("max",)), lambda found: found.max[0, 0]),
        "entropy": Call(lambda: attn.forward(q, k, v, want=("entropy",)), lambda found: found.entropy[0, 0]),
        "max and entropy": Call(
            lambda: attn.forward(q, k, v, want=("max", "entropy")), lambda found: found.entropy[0, 0]
        ),
        "column sums": Call(lambda: attn.column_sums(q, k, lse), lambda found: found[0, 0]),
        "column max": Call(lambda: attn.column_max(q, k, lse), lambda found: found[0, 0]),
        STRONGEST: Call(lambda: attn.top_keys(q, k, lse, COUNT), lambda found: found.weights[0, 0]),
        "backward": Call(lambda: attn.backward(dout, q, k, v, out, lse)),
        "backward of lse alone": Call(
            lambda: attn.backward(None, q, k, None, None, lse, dlse=of_rows), lambda found: found.dq[0, 0], rounded
        ),
        "backward with dmax": Call(lambda: attn.backward(dout, q, k, v, *largest[:2], dmax=of_rows)),
        "backward with dentropy": Call(
            lambda: attn.backward(dout, q, k, v, *spread[:2], entropy=spread.entropy, dentropy=of_rows)
        ),
    }


def colreduce(case: Case, xp: Any) -> Calls:
    """That of flash-colreduce, which finds lse, too."""
    if xp.__name__ != "cupy":
        raise Absent("flash-colreduce is run on a GPU")
    torch, library = (importlib.import_module(name) for name in ("torch", "flash_colreduce"))
    q, k = (torch.from_dlpack(normal(xp, case.q_shape, "float32", i)).to(getattr(torch, case.dtype)) for i in (0, 1))
    return {
        "column sums, flash-colreduce": Call(
            lambda: library.flash_colreduce(q, k, "sum", is_causal=case.causal),
            lambda found: xp.from_dlpack(found[0, 0].float()),
            LARGEST_ROUNDED,
        )
    }


def expected(case: Case, xp: Any) -> dict[str, Any]:
    """Results of the first head by the formula, in float32."""
    q, k, v, _ = (normal(xp, case.q_shape, case.dtype, seed)[0, 0].astype("float32") for seed in range(4))
    of_rows = normal(xp, case.q_shape[:3], case.softmax_dtype, 4)[0, 0]
    scale = case.head_dim**-0.5
    scores = q @ k.T * scale
    if case.causal:
        scores = xp.where(xp.tri(*scores.shape, dtype=bool), scores, -xp.inf)
    largest = scores.max(axis=1)
    weights = xp.exp(scores - largest[:, None])
    lse = xp.log(weights.sum(axis=1)) + largest
    weights /= weights.sum(axis=1, keepdims=True)
    entropy = lse - (weights * xp.where(weights > 0, scores, 0)).sum(axis=1)
    sums = weights.sum(axis=0)
    return {
        "forward": weights @ v,
        "lse alone": lse,
        "max": largest,
        "entropy": entropy,
        "max and entropy": entropy,
        "column sums": sums,
        "column sums, flash-colreduce": sums,
        "column max": weights.max(axis=0),
        STRONGEST: -xp.sort(-weights, axis=1)[:, :COUNT],
        "backward of lse alone": scale * (of_rows[:, None] * weights) @ k,
    }


def cross_entropy(xp: Any, sizes: tuple[int, int, int]) -> Calls:
    """lse of rows over classes and its gradients, and the products that are in them."""
    rows, classes, columns = sizes
    attn = FlashAttention(scale=1.0)
    x, w = (normal(xp, (1, 1, n, columns), "bfloat16" if xp.__name__ == "cupy" else "float32", n) for n in sizes[:2])
    x *= columns**-0.5
    of_rows = xp.ones((1, 1, rows), "float32")
    scores = xp.empty((rows, classes), x.dtype)

    def both() -> None:
        lse = attn.forward(x, w, None).lse
        attn.backward(None, x, w, None, None, lse, dlse=of_rows)

    def products() -> None:
        xp.matmul(x[0, 0], w[0, 0].T, out=scores)
        xp.matmul(scores, w[0, 0])
        xp.matmul(scores.T, x[0, 0])

    return {"three products": Call(products), "cross-entropy, both passes": Call(both)}


def measure(
    write: Callable[..., None],
    machine: Machine,
    cases: Iterable[Case],
    classes: tuple[int, int, int],
    budget_s: float = 0.15,
) -> None:
    """Write a record for each call of each case, those of a case timed in turn; `classes` are a case of their own."""
    cases = list(cases)
    with Bar("reductions", total=len(cases) + 1) as bar:
        for case in cases:
            makers = (lambda case=case: calls_of(case, machine.xp), lambda case=case: colreduce(case, machine.xp))
            _measure(write, machine, case.name, makers, expected(case, machine.xp), budget_s)
            bar.advance()
        name = "classes-" + "x".join(map(str, classes))
        _measure(write, machine, name, (lambda: cross_entropy(machine.xp, classes),), {}, budget_s)
        bar.advance()


def _measure(
    write: Callable[..., None],
    machine: Machine,
    name: str,
    makers: Iterable[Callable[[], Calls]],
    formula: dict[str, Any],
    budget_s: float,
) -> None:
    calls: Calls = {}
    errors: dict[str, float] = {}
    for make in makers:
        try:
            made = make()
            with ThreadPoolExecutor() as pool:  # kernels compile side by side
                results = list(pool.map(lambda call: call.run(), made.values()))
            for (what, call), result in zip(made.items(), results, strict=True):
                if call.first_head is not None:
                    difference = abs(call.first_head(result).astype("float32") - formula[what])
                    errors[what] = float(difference.max() / abs(formula[what]).max())
                calls[what] = call
        except Exception as error:  # a peer may refuse with any type; the reason goes into the record
            write("reductions", case=name, call="", **failure_of(error))
    right = {what: call.run for what, call in calls.items() if errors.get(what, 0.0) < call.largest_error}
    times = time_interleaved(right, machine.clock, budget_s=budget_s, limit_s=20 * budget_s, at_most=50)
    for what in calls:
        fields: Record = {"status": "ok" if what in right else "wrong", "error": errors.get(what)}
        if what in times:
            fields |= {"us": times[what].median_us, "repeats": times[what].repeats}
        write("reductions", case=name, call=what, **fields)


def markdown(records: Sequence[Record]) -> str:
    """A row for each call: milliseconds, and the multiple of the time of what it is compared with, in each case."""
    rows = [r for r in records if r["record"] == "reductions"]
    cases = list(dict.fromkeys(r["case"] for r in rows))
    times = {(r["case"], r["call"]): r["us"] for r in rows if "us" in r}
    lines = ["| | " + " | ".join(cases) + " |", "|" + "---|" * (len(cases) + 1)]
    for call, base in BASES.items():
        of_cases = [(times.get((case, call)), times.get((case, base))) for case in cases]
        if any(a and b for a, b in of_cases):
            cells = (f"{number(a / 1e3, 2)}, {number(a / b, 2)}" if a and b else "-" for a, b in of_cases)
            said = call if call == base else f"{call} : {base}"
            lines.append(f"| {said} | " + " | ".join(cells) + " |")
    lines += [""]
    lines += [
        f"- {r['call'] or 'one of the others'}, {r['case']}: {r['status']}, {r.get('reason', r.get('error'))}"
        for r in rows
        if r["status"] != "ok"
    ]
    return "\n".join(lines).rstrip()
