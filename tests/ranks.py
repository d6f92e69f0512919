"""Problems split into what each rank holds, computed by ranks, and put together again: on the CPU, by emulated kernels
and on devices."""

import contextlib
import functools
import importlib
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.spec.outputs import ROW_REDUCTIONS
from cuflash.spec.problem import Problem
from cuflash.testing.tangents import COTANGENTS, Moved, assert_tangents
from tests.judging import assert_same_bits, assert_within
from tests.scored import Scored
from tests.second_derivatives import has_gradient

PAIR_OPTIONS = ("bias", "mask")
REQUIRED = ("q", "k", "v", "out", "lse", "dout", "dlse", "dmax", "dentropy")
OF_ROWS = ("lse", "dlse", "max", "entropy", "dmax", "dentropy", "weights", "dweights")
OF_KEYS = ("column_sums", "column_max", "dsums")
SECONDS = 240  # for all ranks of a test, some of which compile kernels


class Whole(NamedTuple):
    """The problem of all ranks."""

    problem: Problem
    arrays: dict[str, Any]
    keywords: dict[str, Any]  # of `ContextParallel`
    random: dict[str, Any]

    @classmethod
    def of(cls, case: "AnyCase") -> "Whole":
        if isinstance(case, Whole):
            return case
        if isinstance(case, ct.Case):
            return cls(case.problem, case.arrays(), case.keywords, case.random)
        options = case.attention.options
        names = set(inspect.signature(cuflash.FlashAttention).parameters) - {"mask", "deterministic"}
        keywords = {name: getattr(options, name) for name in names} | {"mask": options.mask_function}
        return cls(case.problem, case.arrays, keywords, case.random)


AnyCase = ct.Case | Scored | Whole


class Shards:
    """Where the rows of a problem's arrays and their tangents are, of a split of its queries and one of its keys."""

    def __init__(self, whole: Whole, split_q: cd.Split, split_k: cd.Split) -> None:
        problem, arrays = whole.problem, whole.arrays
        axis = axis_of_rows(problem)
        self.split_axes = {name: (split_q, axis) for name in ("q", "dout", "out", "dq")}
        self.split_axes |= {name: (split_k, axis) for name in ("k", "v", "dk", "dv")}
        self.split_axes |= {name: (split_q, -1) for name in OF_ROWS} | {name: (split_k, -1) for name in OF_KEYS}
        self.split_axes |= {name: (split_q, -2) for name in ("indices", "key_weights")}
        for name in PAIR_OPTIONS:
            shape: tuple[int, ...] = arrays[name].shape if name in arrays else ()
            if len(shape) > 1 and (shape[-2] != 1 or problem.seqlen_q == 1):
                self.split_axes |= {name: (split_q, -2), f"d{name}": (split_q, -2)}
        self.split_axes |= {f"t{name}": where for name, where in self.split_axes.items()}

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


def axis_of_rows(problem: Problem) -> int:
    return -3 if problem.layout == "bshd" and problem.ndim > 2 else -2


def compute(attn: Any, case: AnyCase, own: Mapping[str, Any], need: Sequence[str] | None = None) -> dict[str, Any]:
    """All results of both passes on one rank, or those gradients that are needed, of its arrays."""
    inputs, need = (own["q"], own["k"], own.get("v")), ct.gradients_of(case.problem) if need is None else need
    optional = {name: x for name, x in own.items() if name not in REQUIRED} | case.random
    want = [name for name in ROW_REDUCTIONS if f"d{name}" in own]
    found: dict[str, Any] = attn.forward(*inputs, want=want, **optional)._asdict()
    if not need:
        return found
    of_rows: dict[str, Any] = {name: own[name] for name in ("dlse", "dmax", "dentropy") if name in own}
    of_rows |= {"entropy": found["entropy"]} if "dentropy" in own else {}
    gradients = attn.backward(own.get("dout"), *inputs, found["out"], found["lse"], need=need, **optional, **of_rows)
    return found | dict(zip(need, gradients, strict=True))


def compute_tangents(
    attn: Any, case: AnyCase, own: Mapping[str, Any], need: Sequence[str] | None = None
) -> dict[str, Any]:
    """The same of jvp and backward_jvp; among the arrays are tangents."""
    if need is None:
        assert isinstance(case, ct.Case)
        need = tuple(f"t{name}" for name in case.problem.gradients if has_gradient(case, name))
    given = {name: x for name, x in own.items() if name not in ("dout", "dlse", *COTANGENTS)} | case.random
    results: dict[str, Any] = attn.jvp(**given)._asdict()
    if not need:
        return results
    given |= {name: own[name] for name in ("dlse", *COTANGENTS) if name in own}
    gradients: dict[str, Any] = attn.backward_jvp(own["dout"], **given, **results, need=need)._asdict()
    return results | gradients


def reduce_weights(
    attn: Any, case: AnyCase, own: Mapping[str, Any], need: Sequence[str] | None = (), count: int = 3
) -> dict[str, Any]:
    """Reductions of the attention weights, with those gradients of column sums that are needed."""
    others = {name: x for name, x in own.items() if name not in ("q", "k", "lse", "weights", "dsums")}
    q, k, lse, weights = own["q"], own["k"], own["lse"], own.get("weights")
    found = {"column_sums": attn.column_sums(q, k, lse, weights, **others)}
    found["column_max"] = attn.column_max(q, k, lse, **others)
    found["indices"], found["key_weights"] = attn.top_keys(q, k, lse, count, **others)
    if need:
        found |= attn.column_sums_backward(own["dsums"], q, k, lse, weights, need=need, **others)._asdict()
    return found


def on_ranks(comms: Sequence[Any], work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives for each rank, on as many threads; of errors, that of the lowest rank.

    If they do not end in time, this fails with the stack of each, and aborts what NCCL does, so that others may end.
    """
    found: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def watched(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=watched, args=(rank,), daemon=True) for rank in range(len(comms))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    frames = sys._current_frames()
    stacks = {
        rank: "".join(traceback.format_stack(frames[thread.ident or 0]))
        for rank, thread in enumerate(threads)
        if thread.is_alive()
    }
    if stacks:
        for comm in comms:
            if hasattr(comm, "abort"):
                comm.abort()
        pytest.fail("\n".join(f"rank {rank} did not end in {SECONDS} s:\n{text}" for rank, text in stacks.items()))
    for _, error in sorted(errors.items()):
        raise error
    return [found[rank] for rank in range(len(comms))]


def on_threads(ranks: int, work: Callable[[cd.Transport], Any]) -> list[Any]:
    """What `work` gives for the transport of each rank."""
    comms = cd.threads(ranks)
    return on_ranks(comms, lambda rank: work(comms[rank]))


def on_host(rank: int) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


class Ranks(NamedTuple):
    """Calls by ranks, of arrays in host memory; results come back there."""

    placed: Callable[[dict[str, Any]], dict[str, Any]] = dict  # the arrays of a rank, where it computes
    to_numpy: Callable[[Any], Any] = ct.to_numpy
    device: Callable[[int], contextlib.AbstractContextManager[Any]] = on_host
    comms: Callable[[int], Sequence[Any]] = cd.threads
    timeout: float = 30

    def each(
        self,
        cases: Sequence[AnyCase],
        split_q: cd.Split,
        split_k: cd.Split,
        *,
        moved: Moved | None = None,
        need: Sequence[str] | None = None,
        meanwhile: bool = False,
        call: Callable[..., dict[str, Any]] = compute,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """All results of cases that differ in their numbers alone, by calls one after the other.

        Of jvp and backward_jvp where inputs are `moved`, else of what `call` does as `compute` does. `meanwhile`, ranks
        that are threads hear of each other while they compute.
        """
        wholes = [Whole.of(case) for case in cases]
        arrays = [whole.arrays for whole in wholes]
        if moved is not None:
            arrays = [own | moved.arrays(case) for own, case in zip(arrays, cases, strict=True)]  # type: ignore[arg-type]
        shards = Shards(wholes[0], split_q, split_k)
        comms, all_ready = self.comms(split_q.ranks), threading.Barrier(split_q.ranks)
        call = call if moved is None else compute_tangents
        keywords: dict[str, Any] = {"split": split_q, "split_k": split_k, "timeout": self.timeout, "steps": 3}
        keywords |= {**wholes[0].keywords, **options}

        def work(rank: int) -> list[dict[str, Any]]:
            with self.device(rank):
                if meanwhile and isinstance(comms[rank], cd.Transport):
                    comms[rank].gathers_meanwhile = True
                attn = cd.ContextParallel(comms[rank], **keywords)
                own = [self.placed(shards.of(rank, x)) for x in arrays]
                all_ready.wait(60)  # before the first call, ranks do not know that they are of one process
                found = [call(attn, case, x, need) for case, x in zip(cases, own, strict=True)]
                return [{name: self.to_numpy(x) for name, x in one.items() if x is not None} for one in found]

        return [shards.whole(of_ranks) for of_ranks in zip(*on_ranks(comms, work), strict=True)]

    def results(
        self, case: AnyCase, split_q: cd.Split, split_k: cd.Split, *, calls: int = 1, **how: Any
    ) -> dict[str, Any]:
        """All results of a case, of several equal calls those of the last one."""
        return self.each([case] * calls, split_q, split_k, meanwhile=calls > 1 and self.device is on_host, **how)[-1]

    def same_bits(self, case: AnyCase, splits: Sequence[Sequence[cd.Split]], **how: Any) -> dict[str, Any]:
        """The results by each pair of splits, all of which have the same bits."""
        expected, *others = (self.results(case, *pair, deterministic=True, **how) for pair in splits)
        for found in others:
            assert_same_bits(found, expected)
        return expected

    def decoded(self, cases: Sequence[AnyCase], split: cd.Split, **options: Any) -> list[dict[str, Any]]:
        """out and lse of steps of decoding, the same on all ranks."""
        wholes = [Whole.of(case) for case in cases]
        comms, axis = self.comms(split.ranks), axis_of_rows(wholes[0].problem)
        keywords = {"split": split, "timeout": self.timeout, **wholes[0].keywords, **options}

        def shard_of(rank: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
            own = {name: x for name, x in arrays.items() if name not in REQUIRED or name in ("q", "k", "v")}
            own |= {name: split.part(own[name], rank, axis) for name in "kv" if name in own}
            of_keys = (name for name in PAIR_OPTIONS if name in own and own[name].shape[-1] == split.seqlen != 1)
            return own | {name: split.part(own[name], rank, -1) for name in of_keys}

        def work(rank: int) -> list[dict[str, Any]]:
            with self.device(rank):
                attn: Any = cd.ContextParallel(comms[rank], **keywords)
                found = []
                for own in [self.placed(shard_of(rank, whole.arrays)) | whole.random for whole in wholes]:
                    result = attn.decode(own.pop("q"), own.pop("k"), own.pop("v", None), **own)
                    found.append({name: self.to_numpy(x) for name, x in result._asdict().items() if x is not None})
                return found

        first, *others = on_ranks(comms, work)
        for found in others:
            for x, y in zip(found, first, strict=True):
                assert_same_bits(x, y)
        return first


def without_columns(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays but values and gradients without columns, for which a call takes None."""
    return {name: x for name, x in arrays.items() if name not in ("v", "dout") or x.shape[-1]}


ON_CPU = Ranks()
WITHOUT_VALUES = Ranks(without_columns)
results_of = ON_CPU.results


def on_devices(devices: Sequence[int], comms: Callable[[int], Sequence[Any]] = cd.threads) -> Ranks:
    """Ranks that compute on these devices."""
    import cupy

    def placed(arrays: dict[str, Any]) -> dict[str, Any]:
        return {name: cupy.asarray(x) for name, x in arrays.items()}

    return Ranks(placed, cupy.asnumpy, lambda rank: cupy.cuda.Device(devices[rank]), comms, timeout=60)


@contextlib.contextmanager
def emulated(arch: str) -> Iterator[Ranks]:
    """Ranks that compute by emulated kernels; NumPy merges."""
    from cuflash.distributed import rank
    from cuflash.shards import merge as merging
    from cuflash.spec import call
    from tests.emulate.launcher import launcher
    from tests.emulate.slices import CUPY, EmulatedSlices

    def of_numpy(arrays: Any) -> list[Any]:
        return [x.view(np.ndarray) for x in arrays]

    merge = merging.merge
    with launcher(arch, computes=True) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "merge", lambda outs, lses: merge(of_numpy(outs), of_numpy(lses)))
        patch.setattr(call.Call, "as_callers", lambda self, results, own: of_numpy(results))
        patch.setattr(importlib.import_module("cuflash.gpu.reductions"), "module_of", lambda array: CUPY)
        patch.setattr(rank, "Slices", functools.partial(EmulatedSlices, module=found.backend))
        yield Ranks(to_numpy=np.asarray, timeout=300)


@contextlib.contextmanager
def ranking(backend: str) -> Iterator[Ranks]:
    """Ranks of a backend of `tests.backends`, on one device where it is that."""
    if backend == "device":
        yield on_devices([0] * 8)
    elif backend.startswith("emulated"):
        with emulated(backend.removeprefix("emulated ")) as ranks:
            yield ranks
    else:
        yield ON_CPU


def judge(case: AnyCase, results: Mapping[str, Any], moved: Moved | None = None) -> None:
    """Hold results against the oracle."""
    if not isinstance(case, ct.Case):
        assert_within(results, ct.yardsticks(case.problem, case.arrays, **case.random))
        return
    of_forward = {name: x for name, x in results.items() if name in ("out", "lse", *ROW_REDUCTIONS)}
    others = {name: x for name, x in results.items() if name not in of_forward}
    if "out" not in of_forward:  # it has no columns
        of_forward["out"] = case.arrays()["dout"]
    ct.assert_forward(case, **of_forward)
    if moved is not None:
        assert_tangents(case, moved, others)
    elif others:
        ct.assert_backward(case, **others)
