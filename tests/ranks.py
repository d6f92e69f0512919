"""Cases taken apart into what each rank holds, computed by ranks, and put together again."""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import cuflash.distributed as cd
import cuflash.testing as ct

OF_PAIRS = ("bias", "mask")


class Parts:
    """Where the rows of a case's arrays are, of a split of its queries and one of its keys."""

    def __init__(self, case: ct.Case, split_q: cd.Split, split_k: cd.Split) -> None:
        self.case, self.split_q, self.split_k = case, split_q, split_k
        axis = -3 if case.layout == "bshd" and case.ndim > 2 else -2
        self.places = {name: (split_q, axis) for name in ("q", "dout", "out", "dq")}
        self.places |= {name: (split_k, axis) for name in ("k", "v", "dk", "dv")}
        self.places |= {name: (split_q, -1) for name in ("lse", "dlse")}
        for name in OF_PAIRS:
            shape = getattr(case, name)
            if shape is not None and len(shape) > 1 and (shape[-2] != 1 or case.seqlen_q == 1):
                self.places |= {name: (split_q, -2), f"d{name}": (split_q, -2)}

    def of(self, rank: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of one rank, by name."""
        found = dict(arrays)
        for name, (split, axis) in self.places.items():
            if name in found:
                found[name] = split.part(found[name], rank, axis)
        return found

    def whole(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The results of all ranks put together; those that are not of rows are the same on all of them."""
        found = {}
        for name in results[0]:
            parts = [np.asarray(ct.to_numpy(result[name])) for result in results]
            if name in self.places:
                split, axis = self.places[name]
                found[name] = split.whole(parts, axis)
            else:
                found[name] = parts[0]
                for part in parts:
                    np.testing.assert_array_equal(part, parts[0], err_msg=name)
        return found


def compute(attn: Any, parts: Parts, arrays: Mapping[str, Any], need: Sequence[str] | None = None) -> dict[str, Any]:
    """All results of both passes on one rank, or those gradients that are needed, of the arrays of all ranks."""
    own = parts.of(attn.rank, arrays)
    inputs, need = ct.qkv(own), ct.gradients_of(parts.case.problem) if need is None else need
    out, lse = attn.forward(*inputs, **ct.optional(own), **parts.case.random)
    terms = ct.optional_backward(own) | parts.case.random
    gradients = attn.backward(own["dout"], *inputs, out, lse, need=need, **terms)
    return {"out": out, "lse": lse, **dict(zip(need, gradients, strict=True))}


def on_threads(ranks: int, work: Callable[[cd.Transport], Any]) -> list[Any]:
    """What `work` gives for each rank, on as many threads; of errors, that of the lowest rank."""
    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(work, comm) for comm in cd.threads(ranks)]]


def results_of(
    case: ct.Case, split_q: cd.Split, split_k: cd.Split, *, need: Sequence[str] | None = None, **options: Any
) -> dict[str, Any]:
    """All results of a case, computed by threads."""
    parts, arrays = Parts(case, split_q, split_k), case.arrays()

    def work(comm: cd.Transport) -> dict[str, Any]:
        attn = cd.ContextParallel(comm, split=split_q, split_k=split_k, timeout=30, **case.keywords, **options)
        return compute(attn, parts, arrays, need)

    return parts.whole(on_threads(split_q.ranks, work))


def judge(case: ct.Case, results: Mapping[str, Any]) -> None:
    """Hold results against the oracle."""
    gradients = {name: x for name, x in results.items() if name not in ("out", "lse")}
    ct.assert_forward(case, results["out"], results["lse"])
    ct.assert_backward(case, **gradients)
