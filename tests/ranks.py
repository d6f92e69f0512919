"""Problems split into what each rank holds, computed by ranks, and put together again."""

import concurrent.futures
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.spec.outputs import ROW_REDUCTIONS
from cuflash.spec.problem import Problem
from tests.judging import assert_within
from tests.scored import Scored

PAIR_OPTIONS = ("bias", "mask")
REQUIRED = ("q", "k", "v", "out", "lse", "dout", "dlse", "dmax", "dentropy")


class Whole(NamedTuple):
    """The problem of all ranks."""

    problem: Problem
    arrays: dict[str, Any]
    keywords: dict[str, Any]  # of `ContextParallel`
    random: dict[str, Any]

    @classmethod
    def of(cls, case: ct.Case | Scored) -> "Whole":
        if isinstance(case, ct.Case):
            return cls(case.problem, case.arrays(), case.keywords, case.random)
        options = case.attention.options
        names = set(inspect.signature(cuflash.FlashAttention).parameters) - {"mask", "deterministic"}
        keywords = {name: getattr(options, name) for name in names} | {"mask": options.mask_function}
        return cls(case.problem, case.arrays, keywords, case.random)


class Shards:
    """Where the rows of a problem's arrays are, of a split of its queries and one of its keys."""

    def __init__(self, whole: Whole, split_q: cd.Split, split_k: cd.Split) -> None:
        problem, arrays = whole.problem, whole.arrays
        self.whole_problem, self.split_q, self.split_k = whole, split_q, split_k
        axis = -3 if problem.layout == "bshd" and problem.ndim > 2 else -2
        self.split_axes = {name: (split_q, axis) for name in ("q", "dout", "out", "dq")}
        self.split_axes |= {name: (split_k, axis) for name in ("k", "v", "dk", "dv")}
        self.split_axes |= {name: (split_q, -1) for name in ("lse", "dlse", "max", "entropy", "dmax", "dentropy")}
        for name in PAIR_OPTIONS:
            shape: tuple[int, ...] = arrays[name].shape if name in arrays else ()
            if len(shape) > 1 and (shape[-2] != 1 or problem.seqlen_q == 1):
                self.split_axes |= {name: (split_q, -2), f"d{name}": (split_q, -2)}

    def of(self, rank: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of one rank, by name."""
        found = dict(arrays)
        for name, (split, axis) in self.split_axes.items():
            if name in found:
                found[name] = split.part(found[name], rank, axis)
        return found

    def whole(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The results of all ranks put together; those that are not of rows are the same on all of them."""
        found = {}
        for name in results[0]:
            shards = [np.asarray(ct.to_numpy(result[name])) for result in results]
            if name in self.split_axes:
                split, axis = self.split_axes[name]
                found[name] = split.whole(shards, axis)
            else:
                found[name] = shards[0]
                for shard in shards:
                    np.testing.assert_array_equal(shard, shards[0], err_msg=name)
        return found


class OfRank(NamedTuple):
    """The arrays of one rank, which has its rows already."""

    whole_problem: Whole

    def of(self, rank: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return dict(arrays)


def compute(
    attn: Any, shards: Shards | OfRank, arrays: Mapping[str, Any], need: Sequence[str] | None = None
) -> dict[str, Any]:
    """All results of both passes on one rank, or those gradients that are needed, of the arrays of all ranks."""
    problem, random = shards.whole_problem.problem, shards.whole_problem.random
    own = shards.of(attn.rank, arrays)
    inputs, need = ct.qkv(own), ct.gradients_of(problem) if need is None else need
    optional = {name: x for name, x in own.items() if name not in REQUIRED} | random
    want = [name for name in ROW_REDUCTIONS if f"d{name}" in own]
    found = attn.forward(*inputs, want=want, **optional)._asdict()
    of_rows: dict[str, Any] = {name: own[name] for name in ("dlse", "dmax", "dentropy") if name in own}
    of_rows |= {"entropy": found["entropy"]} if "dentropy" in own else {}
    gradients = attn.backward(own["dout"], *inputs, found["out"], found["lse"], need=need, **optional, **of_rows)
    return found | dict(zip(need, gradients, strict=True))


def on_threads(ranks: int, work: Callable[[cd.Transport], Any]) -> list[Any]:
    """What `work` gives for each rank, on as many threads; of errors, that of the lowest rank."""
    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(work, comm) for comm in cd.threads(ranks)]]


def results_of(
    case: ct.Case | Scored,
    split_q: cd.Split,
    split_k: cd.Split,
    *,
    need: Sequence[str] | None = None,
    calls: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """All results of a case, computed by threads.

    Where there are several equal calls, the results are those of the last one, and ranks hear of each other meanwhile.
    """
    whole = Whole.of(case)
    shards = Shards(whole, split_q, split_k)

    def work(comm: cd.Transport) -> dict[str, Any]:
        comm.gathers_meanwhile = calls > 1
        keywords = {"split": split_q, "split_k": split_k, "timeout": 30, "steps": 3, **whole.keywords, **options}
        attn = cd.ContextParallel(comm, **keywords)
        return [compute(attn, shards, whole.arrays, need) for _ in range(calls)][-1]

    return shards.whole(on_threads(split_q.ranks, work))


def judge(case: ct.Case | Scored, results: Mapping[str, Any]) -> None:
    """Hold results against the oracle."""
    if isinstance(case, Scored):
        judges = ct.yardsticks(case.problem, case.arrays, **case.random)
        assert_within(results, judges)
        return
    of_forward = {name: x for name, x in results.items() if name in ("out", "lse", *ROW_REDUCTIONS)}
    ct.assert_forward(case, **of_forward)
    ct.assert_backward(case, **{name: x for name, x in results.items() if name not in of_forward})
