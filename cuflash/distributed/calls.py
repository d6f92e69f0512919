"""How a call begins on one rank: it checks the arguments, agrees on them with all ranks, and prepares the execution."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cuflash.arrays import dlpack
from cuflash.arrays.array_info import numpy_dtype, view_4d, view_rows
from cuflash.arrays.cached import cached_property
from cuflash.arrays.checks import counted, value_error
from cuflash.arrays.fp8 import bits_of
from cuflash.arrays.memory_ranges import Band
from cuflash.cpu import backend as cpu_backend
from cuflash.cpu.packed import check_starts
from cuflash.distributed.agreement import (
    Disagreement,
    Facts,
    Pending,
    begin_to_agree,
    digest,
    facts_of,
    reporting_failures,
    run_together,
    same_on_all_ranks,
)
from cuflash.distributed.arguments import SPLITS, not_served
from cuflash.distributed.execution import Execution
from cuflash.distributed.packed import Packing
from cuflash.distributed.schedule import make_schedule
from cuflash.distributed.split import Split
from cuflash.distributed.streams import StreamsOfDevice
from cuflash.distributed.transports import Transport
from cuflash.shards.slices import steps_of
from cuflash.spec import array_imports
from cuflash.spec import call as spec
from cuflash.spec.batch_axes import BatchCalls, as_one_call
from cuflash.spec.binding import Contiguous
from cuflash.spec.inputs import (
    FP8_SCALES,
    INPUTS,
    MOVABLE_BROADCAST,
    NUMBERS,
    OPTIONAL_INPUTS,
    PER_HEAD_INPUTS,
    OptionalArrays,
    WithTangents,
)
from cuflash.spec.options import Options, diagonal_of, window_of
from cuflash.spec.outputs import MOVABLE_OF_KEYS, MOVABLE_OVER_ROWS, OF_QUERIES, OUTPUTS, model_of
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, COLUMN_MAX, COLUMN_SUMS, FORWARD, JVP, TOP_KEYS
from cuflash.spec.problem import Problem, make_problem
from cuflash.spec.results import Array
from cuflash.spec.rewrites import Equivalent, equivalent
from cuflash.spec.row_sums import bound_of, has_large
from cuflash.spec.score_args import checked_with_score_args

Result = TypeVar("Result")
ALL_ROWS = "all"  # what an array without an axis of queries says instead of their number
# Optional inputs that are the same on all ranks, because they have no axes of rows.
_REPLICATED = (*(row.name for row in OPTIONAL_INPUTS if row.own_axes in (0, 1)), *FP8_SCALES)
# Optional inputs whose value for a pair depends on the indices of its rows in the whole sequence.
_BY_ROW_INDEX = frozenset(row.name for row in OPTIONAL_INPUTS if row.gradient_via != "softmax")
_PASS_OF_METHOD = {
    "forward": FORWARD,
    "decode": FORWARD,
    "plan": FORWARD,
    "backward": BACKWARD,
    "jvp": JVP,
    "backward_jvp": BACKWARD_JVP,
    "column_sums": COLUMN_SUMS,
    "column_max": COLUMN_MAX,
    "top_keys": TOP_KEYS,
}
# Tangents that are the same on all ranks.
_REPLICATED_TANGENTS = tuple(f"t{name}" for name in (*(row.name for row in PER_HEAD_INPUTS), *NUMBERS))
_STARTS = ("cu_seqlens_q", "cu_seqlens_k")
_LARGE_ROWS = "_large rows"
MAX_KNOWN = 256  # calls whose preparation is kept
WARM_UP = 600.0  # seconds by which ranks on devices wait longer for one another, while kernels may be compiled
# Optional inputs that may replace a function that spells them out. A bias is not among them: each rank has other rows
# of it.
_MAY_REPLACE_FUNCTIONS = tuple(row.name for row in PER_HEAD_INPUTS if row.gradient_via == "scores")


class RankCall(NamedTuple):
    """The call of one rank, with all that follows from its own arguments."""

    local: spec.Call  # on the arrays that are given, with options in place of functions where ranks agreed on these
    random: tuple[int, int]  # seed and offset
    starts: tuple[tuple[int, ...], ...]  # starts of packed sequences and the end of the last; for q, and for k
    layouts: tuple[Any, ...]  # names, shapes, strides and dtypes of the arrays
    batch_axes: BatchCalls | None = None  # the batch axes that are merged to the batch axis of the given arrays

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays to compute with."""
        return self.local.arrays

    @property
    def need(self) -> tuple[str, ...]:
        """The results to compute."""
        return self.local.need

    def exported(self, results: Sequence[Array]) -> Sequence[Array]:
        """Results as arrays of the caller's library, with all batch axes."""
        renamed = self.local.renamed(results)
        if self.batch_axes is not None:
            renamed = self.batch_axes.collect(lambda *_: tuple(renamed))
        return self.local.as_callers(renamed, dict.fromkeys(self.local.wanted))

    def empty(self, name: str, problem: Problem) -> Array:
        """A new array for a gradient."""
        xp, model = dlpack.module_of(self.arrays["q"]), self.arrays.get(model_of(name))
        if model is None:  # the gradient of a number
            return xp.empty((), numpy_dtype(problem.softmax_dtype))
        return xp.empty(model.shape, model.dtype)


class PreparedCall(NamedTuple):
    """What similar calls have in common."""

    execution: Execution  # without arrays
    rewrite: Equivalent | None  # the options and optional inputs that functions spell out


@dataclass(kw_only=True)
class RankCalls:
    """What all calls of one `ContextParallel` have in common."""

    options: Options
    splits: tuple[Any, Any]  # for queries and for keys, each a `Split` or its name
    chunks: int
    steps: int | None
    timeout: float
    check: bool
    transport: Transport
    streams: StreamsOfDevice = field(default_factory=StreamsOfDevice)
    count: int = field(default=0, init=False)  # how many calls were made
    # The latest kinds of calls on which all ranks agreed, by the lasting facts of all ranks.
    known: dict[tuple[str, ...], PreparedCall] = field(default_factory=dict, init=False)
    # From this rank's lasting facts to those of all ranks in the last such call.
    _expected: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)
    # This rank's lasting facts, by all that they depend on. (In host memory they depend on values, too: not kept.)
    _known_facts: dict[Any, str] = field(default_factory=dict, init=False)

    @property
    def _replicated(self) -> tuple[str, ...]:
        """The arrays that are the same on all ranks."""
        score_args = self.options.score_args
        return (*_REPLICATED, "block_mask", *score_args, *_REPLICATED_TANGENTS, *(f"t{name}" for name in score_args))

    def carry_out(
        self,
        method: str,
        arrays: dict[str, Any],
        optional_inputs: dict[str, Any],
        required: tuple[str, ...],
        random: tuple[int | None, int | None],
        compute: Callable[[RankCall, Execution], Result],
        need_of: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda arrays: OUTPUTS,
    ) -> Result:
        """Compute this rank's share of a call, if all ranks agree on the call.

        If this rank has made such a call before, and its transport can share while the rank computes, it begins with
        its own rows before it knows the facts of the others.
        """
        self.count += 1
        if array_imports.are_cupy(arrays, INPUTS) and dlpack.is_captured(bits_of(arrays["q"])):
            self._check_capture(optional_inputs)

        def local_call() -> tuple[RankCall, Facts]:
            accepted: type = OptionalArrays
            tangents: tuple[str, ...] = ()
            if _PASS_OF_METHOD[method].has_tangents:
                accepted, tangents = WithTangents, tuple(f"t{name[1:]}" for name in self.options.score_gradients)
            checked = checked_with_score_args(method, accepted, self.options, optional_inputs, tangents)
            call = self._local_call(arrays | checked, required, random, need_of)
            return call, self._facts(method, call)

        try:
            with reporting_failures(self.transport):
                # Before this rank loads kernels, to copy arrays or for a warm-up run.
                self.transport.barrier(self.timeout)
                return self._agreed(method, local_call, compute)
        except Disagreement as disagreement:
            assert disagreement.error is not None
            raise disagreement.error from None

    @np.errstate(all="ignore")  # in warm-up runs, too: these compute with memory that no rank has sent anything to
    def _agreed(
        self,
        method: str,
        local_call: Callable[[], tuple[RankCall, Facts]],
        compute: Callable[[RankCall, Execution], Result],
    ) -> Result:
        """This rank's results for a call, once all ranks agree on it."""
        if not self.check:
            with same_on_all_ranks():
                call, facts = local_call()
            return self._computed(
                call, self._prepared_by_facts(method, call, facts, (facts.lasting,), compute), compute
            )
        call, facts, gather = begin_to_agree(self.transport, self.timeout, local_call)
        expected = self._expected.get(facts.lasting)
        if expected in self.known and self.transport.gathers_meanwhile:
            try:
                return self._computed(call, self.known[expected], compute, gather, expected)
            except Disagreement as disagreement:
                if disagreement.error is not None:
                    raise
                lasting = disagreement.lasting
        else:
            lasting = gather()
        return self._computed(call, self._prepared_by_facts(method, call, facts, lasting, compute), compute)

    def _prepared_by_facts(
        self,
        method: str,
        call: RankCall,
        facts: Facts,
        lasting: tuple[str, ...],
        compute: Callable[[RankCall, Execution], Result],
    ) -> PreparedCall:
        """What such calls have in common, looked up by the lasting facts of all ranks.

        If it is not known yet, ranks prepare it together: devices have loaded all kernels before any rows are
        exchanged.
        """
        prepared = self.known.get(lasting)
        if prepared is None:

            def prepare() -> PreparedCall:
                with contextlib.nullcontext() if self.check else same_on_all_ranks():
                    new = self._prepared(method, call, facts_of(lasting))
                rewritten, run = self._run(call, new)
                with dlpack.on_device(run.arrays["q"]):
                    self._warm_up(rewritten, run, compute)
                return new

            prepared = run_together(self.transport, self._patience(call), prepare) if self.check else prepare()
            self.known[lasting] = prepared
            if len(self.known) > MAX_KNOWN:
                del self.known[next(iter(self.known))]
        if len(self._expected) >= MAX_KNOWN:
            self._expected.clear()
        self._expected[facts.lasting] = lasting
        return prepared

    def _patience(self, call: RankCall) -> float:
        """How long ranks wait for one that prepares such a call."""
        return self.timeout + (0 if call.local.backend == "numpy" else WARM_UP)

    def _run(self, call: RankCall, prepared: PreparedCall) -> tuple[RankCall, Execution]:
        """What this rank has to do in a call, and the call with what it computes instead of functions."""
        run, rewrite = prepared
        call = call._replace(local=call.local.rewritten(rewrite))
        arrays = {name: self._with_all_axes(name, x) for name, x in call.arrays.items()}
        return call, replace(run, arrays=arrays, random=call.random)

    def _warm_up(self, call: RankCall, run: Execution, compute: Callable[[RankCall, Execution], Result]) -> None:
        """Run the first call on such arrays of a device once without transfers, before any rows are exchanged.

        CUDA may wait for all work of a device while it loads a kernel or allocates memory, and hold a lock meanwhile.
        If that work is to receive rows, and the rank that sends them needs the lock, neither comes to an end.
        """
        if not run.is_warm and not dlpack.is_captured(run.arrays["q"]):
            compute(call, run.without_transfers())

    def _computed(
        self,
        call: RankCall,
        prepared: PreparedCall,
        compute: Callable[[RankCall, Execution], Result],
        gather: Callable[[], tuple[str, ...]] | None = None,
        expected: tuple[str, ...] = (),
    ) -> Result:
        """This rank's results for the arrays of a call; `gather`, if given, waits for the facts of all ranks."""
        barrier = functools.partial(self.transport.barrier, self._patience(call))
        agreement = Pending(barrier, gather, expected)
        call, run = self._run(call, prepared)
        with dlpack.on_device(run.arrays["q"]):
            if not run.is_warm:  # arrays lie otherwise than in earlier calls
                agreement.wait()
                self._warm_up(call, run, compute)
            result = compute(call, replace(run, agreement=agreement))
            agreement.wait()
            return result

    def _check_capture(self, optional_inputs: Mapping[str, Any]) -> None:
        """Refuse a call in which the host does work that a CUDA graph would not replay."""
        captured = "while a CUDA graph is captured"
        if not self.transport.goes_into_graphs:
            got = f"{type(self.transport).__name__} {captured}"
            raise NotImplementedError(f"comm: got {got}, expected a communicator of NCCL, which needs no host")
        if self.check:
            raise value_error("check", f"True {captured}", "False, and two Split: ranks agree by way of the host")
        for name in _STARTS:
            if optional_inputs.get(name) is not None:
                raise NotImplementedError(f"{name}: got an array {captured}, expected none: the host reads it")

    def _local_call(
        self,
        arrays: dict[str, Any],
        required: tuple[str, ...],
        random: tuple[int | None, int | None],
        need_of: Callable[[Mapping[str, Any]], tuple[str, ...]],
    ) -> RankCall:
        """This rank's call, with all checks that need no arrays of other ranks."""
        if arrays.get("block_table") is not None:
            got = type(arrays["block_table"]).__name__
            raise not_served("block_table", got, "contiguous keys; each rank's pages gathered into them")
        local = spec.prepare(self.options, arrays, required, (), rewrites=False)
        if local.backend == "streamed":
            raise not_served("k", "Streamed", "keys and values where q is: each rank has only a shard of them")
        arrays = _without_none(local.arrays)
        for name in FP8_SCALES:
            if name in arrays and arrays[name].shape[-1:] not in ((), (1,)):
                got = f"shape {tuple(arrays[name].shape)}, factors of blocks of rows"
                raise not_served(name, got, "one factor for the array, (), or for each head, (num_heads, 1)")
        need = need_of(arrays)
        batch_axes = as_one_call(self.options, arrays, need, dlpack.module_of(arrays["q"]))
        if batch_axes is not None:
            arrays = _without_none(batch_axes.inputs((0,) * len(batch_axes.axes.lengths)))
        layouts = tuple((name, x.shape, x.strides, x.dtype.name) for name, x in arrays.items())
        starts = tuple(tuple(dlpack.on_host(arrays[name]).tolist()) for name in _STARTS if name in arrays)
        local = local._replace(arrays=arrays, given=arrays, need=need, wanted=need)
        return RankCall(local, self.options.random(*random), starts, layouts, batch_axes)

    def _check(self, arrays: Mapping[str, Any]) -> None:
        """Refuse arrays that do not fit each other."""
        score_args = {name: arrays[name] for name in self.options.score_args}
        optional_inputs = {name: arrays[name] for name in (*_REPLICATED, *_STARTS) if name in arrays}
        problem = make_problem(
            self.options, *(arrays[name] for name in INPUTS), score_args=score_args, **optional_inputs
        )
        if problem.has_functions:
            problem.program  # noqa: B018 (raises where arrays do not fit the functions)

    @cached_property
    def _facts_of_all_calls(self) -> dict[str, str]:
        return {
            **{field.name: repr(getattr(self.options, field.name)) for field in fields(Options)},
            **{name: repr(x) for name, x in zip(("split", "split_k"), self.splits, strict=True)},
            "chunks": str(self.chunks),
            "steps": str(self.steps),
        }

    def _facts(self, method: str, call: RankCall) -> Facts:
        """What must agree on all ranks, and the numbers of rows; this checks that the arrays fit each other."""
        seed, offset = call.random
        of_call = {"call": str(self.count), "seed": str(seed), "offset": str(offset)}
        large = self._has_large_rows(call)
        if call.local.backend == "numpy" or call.starts:
            self._check(call.arrays)
            return Facts(of_call, self._lasting_facts(method, call, large))
        key = (method, call.need, call.local.backend, call.layouts, large)
        lasting = self._known_facts.get(key)
        if lasting is None:
            self._check(call.arrays)
            if len(self._known_facts) >= MAX_KNOWN:
                self._known_facts.clear()
            self._known_facts[key] = lasting = self._lasting_facts(method, call, large)
        return Facts(of_call, lasting)

    def _has_large_rows(self, call: RankCall) -> bool:
        """Whether lse of some row is so large that ranks find row sums; on a device, this waits for lse.

        With ``check=False`` ranks exchange no facts, so that they cannot find row sums together.
        """
        if "lse" not in call.arrays or not self.check:
            return False
        on_device = call.local.backend != "numpy"
        with dlpack.on_device(call.arrays["q"]):
            return has_large(call.arrays["lse"], bound_of(call.arrays["q"].dtype, on_device=on_device))

    def _lasting_facts(self, method: str, call: RankCall, has_large_rows: bool) -> str:
        axis = _axis_of_rows(call.arrays["q"], self.options.layout)
        names = sorted(call.arrays, key=lambda name: "" if name in INPUTS else name)  # with values or without
        facts: dict[str, Any] = {
            "method": method,
            **self._facts_of_all_calls,
            "need": ", ".join(call.need),
            "arrays": f"{', '.join(names)} of {call.local.backend}",
            "_rows of q": call.arrays["q"].shape[axis],
            "_rows of k": call.arrays["k"].shape[axis],
            "_layouts": repr(call.layouts),
        }
        for name in INPUTS:
            shape = list(call.arrays[name].shape)
            del shape[axis]
            facts[name] = f"{call.arrays[name].dtype.name} {tuple(shape)} besides rows"
        if not call.local.has_values:
            facts["v"] = None
        for name, x in call.arrays.items():
            if name in self._replicated or (method == "decode" and name == "q"):
                facts[name] = digest(x)
            elif name in _STARTS:
                facts[name] = digest(dlpack.on_host(x))
            elif name in MOVABLE_BROADCAST:
                shape = [*(1,) * (4 - x.ndim), *x.shape]
                if shape[3 if method == "decode" else 2] == 1:  # for all rows of all ranks, unless ranks have one each
                    facts[f"_content of {name}"] = digest(x)
                facts[f"_columns of {name}"] = shape[3]
                facts[f"_rows of {name}"] = shape.pop(2) if x.ndim > 1 else ALL_ROWS
                facts[name] = f"{x.dtype.name} {tuple(shape[: 2 if method == 'decode' else 3])} besides rows"
        if has_large_rows:
            facts[_LARGE_ROWS] = True  # then ranks find row sums first, all of them
        return json.dumps(facts)

    def _prepared(self, method: str, call: RankCall, facts: Sequence[dict[str, Any]]) -> PreparedCall:
        """What this rank has to do in such calls; this checks that its arguments fit those of the other ranks."""
        splits = [
            split if isinstance(split, Split) else SPLITS[split](sum(fact[rows] for fact in facts), self.transport.size)
            for split, rows in zip(self.splits, ("_rows of q", "_rows of k"), strict=True)
        ]
        if method == "decode":  # the queries of all ranks are those of the first
            rows = call.arrays["q"].shape[_axis_of_rows(call.arrays["q"], self.options.layout)]
            splits = [Split([[(0, rows)], *[[] for _ in range(self.transport.size - 1)]]), splits[1]]
        rewrite = self._rewrite_of(call, splits)
        call = call._replace(local=call.local.rewritten(rewrite))
        rewritten = self if rewrite is None else replace(self, options=rewrite.options)
        return PreparedCall(rewritten._execution_of(method, call, splits, facts), rewrite)

    def _rewrite_of(self, call: RankCall, splits: Sequence[Any]) -> Equivalent | None:
        """The options and optional inputs that the call computes instead of functions, the same on all ranks."""
        whole, axis = dict(call.arrays), _axis_of_rows(call.arrays["q"], self.options.layout)
        for name, split in zip(INPUTS, (splits[0], splits[1], splits[1]), strict=True):
            whole[name] = _longer(call.arrays[name], axis, split.seqlen)
        if len(set(call.starts)) == 1:
            whole |= dict.fromkeys(_STARTS, call.arrays[_STARTS[0]])
        return equivalent(self.options, whole, _MAY_REPLACE_FUNCTIONS)

    def _execution_of(
        self, method: str, call: RankCall, splits: Sequence[Any], facts: Sequence[dict[str, Any]]
    ) -> Execution:
        """What this rank has to do, without further rewriting of functions."""
        arrays, axis, (split_q, split_k) = call.arrays, _axis_of_rows(call.arrays["q"], self.options.layout), splits
        for name, argument, split in (("q", "split", split_q), ("k", "split_k", split_k)):
            if split.ranks != self.transport.size:
                raise value_error(argument, counted(split.ranks, "rank"), f"{self.transport.size} as comm has")
            rows = arrays[name].shape[axis]
            if rows != split.rows(self.transport.rank) and not (method == "decode" and name == "q"):
                expected = f"{split.rows(self.transport.rank)}, which rank {self.transport.rank} has of {split.seqlen}"
                raise value_error(name, counted(rows, "row"), expected)
        problem = self._problem(method, call, split_q, split_k)
        shared = frozenset(
            name
            for name in MOVABLE_BROADCAST
            if name in arrays and self._is_shared(name, method, split_q, split_k, facts)
        )
        for name in shared:
            for rank, fact in enumerate(facts):
                content, expected = fact[f"_content of {name}"], facts[0][f"_content of {name}"]
                if content != expected:
                    raise value_error(name, f"{content} on rank {rank}", f"{expected} as on rank 0")
        batch, num_heads_kv, *_ = view_4d(bits_of(arrays["k"]), self.options.layout).shape
        row_bytes = batch * (problem.head_dim + problem.head_dim_v) * arrays["k"].dtype.itemsize
        left, right = window_of(self.options, split_q.seqlen, split_k.seqlen)
        schedule = make_schedule(
            split_q,
            split_k,
            Band(diagonal_of(self.options, split_q.seqlen, split_k.seqlen), left, right),
            chunks=self.chunks if self.options.deterministic else None,
            num_heads_kv=num_heads_kv,
            steps=self.steps,
            row_bytes=(row_bytes, row_bytes * problem.group_size),  # of k and v, or of q and dout
            step=steps_of(self.options, "block_mask" in arrays),
            packing=Packing.of(self.options, *call.starts) if call.starts else None,
            joins=not self.options.dropout and not problem.has_functions and _BY_ROW_INDEX.isdisjoint(arrays),
            why_one_round="keys stay where they are" if method == "decode" else None,
        )
        return Execution(
            transport=self.transport,
            streams=self.streams,
            timeout=self.timeout,
            schedule=schedule,
            options=self.options,
            problem=problem,
            random=(0, 0),
            arrays={},
            broadcasts_rows=frozenset() if method == "decode" else shared,
            has_large_rows=any(fact.get(_LARGE_ROWS) for fact in facts),
        )

    def _problem(self, method: str, call: RankCall, split_q: Split, split_k: Split) -> Problem:
        """This rank's queries against the keys of all ranks; in `decode`, all queries against this rank's keys."""
        arrays, axis = call.arrays, _axis_of_rows(call.arrays["q"], self.options.layout)
        whole = {name: _longer(arrays[name], axis, split_k.seqlen) for name in MOVABLE_OF_KEYS if name in arrays}
        if call.starts:
            return self._packed_problem(method, call, split_q, whole)
        if "block_mask" in arrays:
            plain, q = replace(self.options, score=None, mask_function=None), _longer(arrays["q"], axis, split_q.seqlen)
            optional_inputs = {name: arrays[name] for name in ("block_mask", *FP8_SCALES) if name in arrays}
            block_size = make_problem(plain, q, whole["k"], whole["v"], **optional_inputs).block_size
            unmasked = {name: x for name, x in arrays.items() if name != "block_mask"}
            call = call._replace(local=call.local._replace(arrays=unmasked))
            return replace(self._problem(method, call, split_q, split_k), block_size=block_size)

        pass_ = _PASS_OF_METHOD[method]

        def problem_of(inputs: Mapping[str, Any]) -> Problem:
            if call.local.backend == "numpy":
                return cpu_backend.bound(pass_, self.options, inputs, call.need).problem
            signature = tuple((name, tuple(x.shape), tuple(x.strides), x.dtype) for name, x in inputs.items())
            return cpu_backend.bind_signature(pass_, self.options, signature, call.need).problem

        if method == "decode":
            problem_of({name: arrays[name] for name in ("q", *self._replicated) if name in arrays} | whole)
            return problem_of({name: x for name, x in arrays.items() if name != "kv_lengths"})
        return problem_of(arrays | whole)

    def _packed_problem(self, method: str, call: RankCall, split_q: Split, whole: dict[str, Contiguous]) -> Problem:
        """This rank's queries against the keys of all ranks, after a check of the problem with all queries."""
        arrays, axis = call.arrays, _axis_of_rows(call.arrays["q"], self.options.layout)
        if method == "decode":
            raise not_served("cu_seqlens_q", "packed sequences in decode", "forward, or a call for each sequence")
        for name in OF_QUERIES:
            if name in arrays:
                rows = arrays[name].ndim - 1 if name in MOVABLE_OVER_ROWS else axis
                whole[name] = _longer(arrays[name], rows, split_q.seqlen)
        signature = tuple((name, tuple(x.shape), tuple(x.strides), x.dtype) for name, x in (arrays | whole).items())
        pass_, need = _PASS_OF_METHOD[method], call.need
        problem = cpu_backend.bind_signature(pass_, self.options, signature, need).problem
        check_starts(problem, *(np.array(starts, np.int32) for starts in call.starts))
        return replace(problem, seqlen_q=split_q.rows(self.transport.rank))

    def _is_shared(
        self, name: str, method: str, split_q: Split, split_k: Split, facts: Sequence[dict[str, Any]]
    ) -> bool:
        """Whether a bias or mask is the same for all queries of all ranks, or in `decode` for all of their keys.

        The numbers of rows of all ranks tell.
        """
        if method == "decode":
            has_keys = any(split_k.rows(rank) > 1 for rank in range(self.transport.size))
            return has_keys and all(fact[f"_columns of {name}"] == 1 for fact in facts)
        query_counts = [split_q.rows(rank) for rank in range(self.transport.size)]
        rows = [fact[f"_rows of {name}"] for fact in facts]
        if rows[0] == ALL_ROWS and len(set(rows)) == 1:
            return True
        if not self.check:
            if 1 in query_counts:
                expected = f"check=True, because of a rank with one query, whose {name} may be that of all queries"
                raise value_error("check", False, expected)
            query_counts = [query_counts[self.transport.rank]]
        if rows == query_counts:
            return False
        if set(rows) <= {1, ALL_ROWS}:
            return True
        raise value_error(name, f"{rows} rows on the ranks", f"1 on all of them, or their queries, {query_counts}")

    def _with_all_axes(self, name: str, array: Array) -> Array:
        """A view with all four axes (lse and dlse: three); arrays without axes of rows stay as they are.

        CuPy's arrays of float8 are seen as bytes, as which they are sent.
        """
        if name in (*MOVABLE_BROADCAST, "block_mask"):
            return of_pairs(array)
        if name in (*self._replicated, *_STARTS):
            return array
        return view_rows(array) if name in MOVABLE_OVER_ROWS else view_4d(bits_of(array), self.options.layout)


def _without_none(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in arrays.items() if x is not None}


def _axis_of_rows(array: Array, layout: str) -> int:
    return int(array.ndim) - (3 if layout == "bshd" and array.ndim > 2 else 2)


def of_pairs(array: Array) -> Array:
    return array[(None,) * (4 - array.ndim)]


def _longer(array: Array, axis: int, rows: int) -> Contiguous:
    """A stand-in for an array like this one, but with another number of rows."""
    shape = list(array.shape)
    shape[axis] = rows
    return Contiguous(tuple(shape), array.dtype)
