"""What tests of jvp and backward_jvp over ranks have in common, on the CPU, in the emulator and on devices."""

from collections.abc import Mapping, Sequence
from typing import Any

import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.testing.tangents import Moved, assert_tangents, movable
from tests.ranks import Shards, Whole, on_threads
from tests.second_derivatives import has_gradient


def everything(case: ct.Case) -> Moved:
    """Tangents of all that a case has."""
    return Moved(names=tuple(movable(case)), cotangents=("tdout", "tdlse") if case.dlse else ("tdout",))


class WithTangents(Shards):
    """Shards whose tangents lie as what they are tangents of does."""

    def __init__(self, whole: Whole, split_q: cd.Split, split_k: cd.Split) -> None:
        super().__init__(whole, split_q, split_k)
        self.split_axes |= {f"t{name}": where for name, where in self.split_axes.items()}


def results_of(
    case: ct.Case,
    moved: Moved,
    split_q: cd.Split,
    split_k: cd.Split,
    *,
    need: Sequence[str] | None = None,
    calls: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """All tangents of a case, and out and lse, computed by threads; of several equal calls those of the last one."""
    shards = WithTangents(Whole.of(case), split_q, split_k)
    arrays = case.arrays() | moved.arrays(case)

    def work(comm: cd.Transport) -> dict[str, Any]:
        comm.gathers_meanwhile = calls > 1
        keywords = {"split": split_q, "split_k": split_k, "timeout": 30, "steps": 3, **case.keywords, **options}
        attn = cd.ContextParallel(comm, **keywords)
        return [compute(attn, case, shards.of(comm.rank, arrays), need) for _ in range(calls)][-1]

    return shards.whole(on_threads(split_q.ranks, work))


def compute(attn: Any, case: ct.Case, own: dict[str, Any], need: Sequence[str] | None = None) -> dict[str, Any]:
    """The results of both passes on one rank, whose arrays and tangents are `own`."""
    if need is None:
        need = tuple(f"t{name}" for name in case.problem.gradients if has_gradient(case, name))
    given = {name: x for name, x in own.items() if name not in ("dout", "dlse", "tdout", "tdlse")} | case.random
    results = attn.jvp(**given)._asdict()
    if not need:
        return results
    given |= {name: own[name] for name in ("dlse", "tdout", "tdlse") if name in own}
    return results | attn.backward_jvp(own["dout"], **given, **results, need=need)._asdict()


def judge(case: ct.Case, moved: Moved, results: Mapping[str, Any]) -> None:
    """Hold results against the oracle."""
    ct.assert_forward(case, results["out"], results["lse"])
    assert_tangents(case, moved, {name: x for name, x in results.items() if name not in ("out", "lse")})
