"""The public interface: `ContextParallel`, with the calls of `cuflash.FlashAttention` on each rank's part.

The short story of a call:

1. All ranks agree that they make the same call (`agreement`), and how many rows each of them has.
2. Who computes what, and what travels for it, follows from these numbers and the options alone (`schedule`).
3. Rows travel (`transports`), while those that came before are computed with by the functions that compute every other
   call (`execution`). A result is computed whole on the rank that holds its rows, or in parts that are not rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from cuflash import host, interop
from cuflash.binding import INPUTS, Contiguous, Pass
from cuflash.cpu.packed import check_starts
from cuflash.distributed.agreement import agreed, digest, together
from cuflash.distributed.arguments import SPLITS, checked_split, not_served, positive, transport_of
from cuflash.distributed.execution import Execution
from cuflash.distributed.packed import Packing
from cuflash.distributed.schedule import Schedule, make_schedule
from cuflash.distributed.split import Split
from cuflash.operands import numpy_dtype, view_4d, view_rows
from cuflash.options import ORIGIN_STEP, Options, diagonal_of, window_of
from cuflash.problem import Problem, make_problem
from cuflash.results import Array, ForwardResult, Gradients, named_tuple_of, needed
from cuflash.spans import Band
from cuflash.terms import BROADCAST, DEFAULT_NEED, GRADIENTS, NAMES, TERMS, NamedGradients, OfNumbers, Terms, checked
from cuflash.values import as_real, counted, type_error, typed, value_error

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BACKWARD_INPUTS = (*INPUTS, "dout", "out", "lse")
ALL_ROWS = "all"  # what an array without an axis of queries says instead of their number
# Arrays that all ranks have alike: those without axes of rows.
_OF_ALL = tuple(term.name for term in TERMS if term.own_axes in (0, 1))
# Options that are not served, and what serves instead.
_REMEDIES = {
    "block_mask": "the pairs of its blocks as a boolean mask of this rank's queries and all keys",
    "block_table": "contiguous keys; each rank's pages gathered into them",
    "q_scale": "q of 16 bits a number or more",
    "k_scale": "k of 16 bits a number or more",
    "v_scale": "v of 16 bits a number or more",
}
_STARTS = ("cu_seqlens_q", "cu_seqlens_k")


class _Call(NamedTuple):
    """What a rank knows of its own call before it knows that of others."""

    borrowed: interop.Borrowed
    given: dict[str, Any]  # the arrays that there are
    need: tuple[str, ...]
    random: tuple[int, int]  # seed and offset
    starts: tuple[tuple[int, ...], ...]  # of packed sequences, and the end of the last one; of q and of k


class ContextParallel:
    """Exact attention over sequences of which each rank has a part, and its gradients.

    Parameters
    ----------
    comm : communicator
        Of mpi4py, of NCCL (CuPy's ``cupy.cuda.nccl.NcclCommunicator`` or ``cupyx.distributed.NCCLBackend``, or
        nccl4py's), one of `cuflash.distributed.threads`, or a `cuflash.distributed.Transport`. All ranks of it make
        the same calls in the same order.
    split : "zigzag", "contiguous" or Split, default "zigzag"
        Which queries each rank holds: `cuflash.distributed.zigzag` gives all ranks equal work under a causal mask,
        `cuflash.distributed.contiguous` needs few transfers with a window, and a `Split` may be anything.
    split_k : "zigzag", "contiguous" or Split, optional
        Which keys each rank holds; as `split` says, unless given.
    chunks : int, default 16
        With ``deterministic=True``, into how many pieces both sequences are cut. Every span of a rank must consist of
        whole ones: 16 do for zigzag splits over 1, 2, 4 and 8 ranks.
    steps : int, default 8
        In how many groups of key/value heads rows travel, at most; rows of a group are on their way while those of the
        group before are computed with.
    timeout : float, default 60.0
        Seconds after which a rank that waits for another one raises TimeoutError, where the communicator allows. Longer
        than any rank computes in a step: in host memory ranks wait for one another that long.
    check : bool, default True
        Whether each call begins by finding out that all ranks make the same one. Without, which needs two `Split`, a
        call on CuPy arrays does not wait on the host, and ranks that disagree may hang.
    causal, window, layout : optional
        As `cuflash.FlashAttention` takes them, of the whole sequences.
    deterministic : bool, default False
        Results are bitwise the same for any number of ranks and any splits into whole chunks, and run after run.
        Each chunk is computed by calls of its own, on copies of its arrays.
    precision : {"highest", "tf32"}, default "highest"
        As `cuflash.FlashAttention` takes it.
    dropout : float, default 0.0
        As `cuflash.FlashAttention` takes it: what is dropped is what one device drops. Spans of ranks, and chunks, then
        begin at multiples of 16, as ``cuflash.distributed.zigzag(seqlen, ranks, multiple=16)`` cuts them, and all heads
        travel at once.
    score, mask : callable, optional
        Not served.
    **numbers : float, optional
        `scale`, and all other numbers that act on scores, as `cuflash.FlashAttention` takes them.

    Attributes
    ----------
    options : cuflash.options.Options
        The checked options.
    rank, size : int
        The rank, and how many there are.

    Raises
    ------
    TypeError, ValueError
        An option of the wrong type or out of range; a communicator of no known kind.
    NotImplementedError
        A function for scores or for the mask.

    Notes
    -----
    out and lse are computed whole where the queries are, from keys and values that travel; dk and dv where the keys
    are, from queries that travel, and each is rounded once. dq comes in parts from there, in the dtype of lse, and is
    added in the order of ranks. With `deterministic`, or where other gradients than dq, dk and dv are needed, it is
    computed as out is, which makes seven products in all where one device makes five. Gradients of numbers, of terms
    that have a number for each head, and of a bias that is the same for all queries are added in the dtype of lse, in
    the order of queries.

    Examples
    --------
    Two ranks that are threads:

    >>> import concurrent.futures, numpy as np, cuflash, cuflash.distributed as cd
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64))
    >>> split = cd.zigzag(100, 2)
    >>> def work(comm):
    ...     parts = [split.part(x, comm.rank) for x in (q, k, v)]
    ...     return cd.ContextParallel(comm, causal=True).forward(*parts).out
    >>> with concurrent.futures.ThreadPoolExecutor(2) as pool:
    ...     outs = list(pool.map(work, cd.threads(2)))
    >>> np.allclose(split.whole(outs), cuflash.attention(q, k, v, causal=True))
    True
    """

    def __init__(
        self,
        comm: Any,
        *,
        split: Literal["zigzag", "contiguous"] | Split = "zigzag",
        split_k: Literal["zigzag", "contiguous"] | Split | None = None,
        chunks: int = 16,
        steps: int = 8,
        timeout: float = 60.0,
        check: bool = True,
        causal: bool | Literal["top_left"] = False,
        window: tuple[int | None, int | None] | None = None,
        layout: Literal["bhsd", "bshd"] = "bhsd",
        deterministic: bool = False,
        precision: Literal["highest", "tf32"] = "highest",
        dropout: float = 0.0,
        score: Any = None,
        mask: Any = None,
        **numbers: Unpack[OfNumbers],
    ) -> None:
        for name, function in (("score", score), ("mask", mask)):
            if function is not None:
                raise not_served(name, typed(function), "a bias and a boolean mask of this rank's queries and all keys")
        self.options = Options(
            causal=causal,
            window=window,
            layout=layout,
            deterministic=deterministic,
            precision=precision,
            dropout=dropout,
            **checked("ContextParallel", OfNumbers, numbers),
        )
        self._splits = (
            checked_split("split", split),
            checked_split("split_k", split if split_k is None else split_k),
        )
        self._chunks, self._steps = (positive(name, x) for name, x in (("chunks", chunks), ("steps", steps)))
        self._timeout = as_real("timeout", timeout)
        if self._timeout <= 0:
            raise value_error("timeout", timeout, "a number of seconds > 0")
        if not isinstance(check, bool):
            raise type_error("check", typed(check), "a bool")
        if not check and not all(isinstance(x, Split) for x in self._splits):
            raise value_error("check", False, "True, or two Split, which say how many rows each rank has")
        self._check = check
        self._transport = transport_of(comm)
        self.rank, self.size = self._transport.rank, self._transport.size
        self._calls = 0

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        seed: int | None = None,
        offset: int | None = None,
        **terms: Unpack[Terms],
    ) -> ForwardResult:
        """Attention of this rank's queries over the keys of all ranks.

        Parameters
        ----------
        q, k, v : array
            This rank's rows, its spans one after the other, in shapes as `cuflash.FlashAttention.forward` takes them.
        bias, mask : array, optional
            Broadcast to (batch, num_heads, rows of this rank's queries, keys of all ranks). An axis of queries of
            length 1 on all ranks, or none, stands for all queries of all of them, which then have the same array;
            but where each rank has one query, an axis of length 1 is that query's.
        seed, offset : int, optional
            As `cuflash.FlashAttention.forward` takes them: the same on all ranks.
        cu_seqlens_q, cu_seqlens_k : array, optional
            As `cuflash.FlashAttention.forward` takes them, of the rows of all ranks: the same on all of them. On the
            GPU they are read, which waits for the device.
        block_mask, block_table, q_scale, k_scale, v_scale : array, optional
            Not served.
        **terms : array, optional
            Its other arrays, as `cuflash.FlashAttention.forward` takes them, of the whole problem: the same on all
            ranks.

        Returns
        -------
        ForwardResult
            ``out`` and ``lse`` of this rank's queries, as `cuflash.FlashAttention.forward` returns them.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `cuflash.FlashAttention.forward` does; ValueError also where a rank makes another call than rank 0.
        RuntimeError
            The call is wrong on another rank, whose error the message has.
        TimeoutError
            A rank did not come in time. The communicator is then of no more use.
        """
        arrays = {"q": q, "k": k, "v": v} | checked("forward", Terms, terms)
        call, run = self._begin("forward", arrays, INPUTS, (seed, offset))
        with _on_device(run.arrays["q"]):
            out = run.xp.empty(run.problem.out_shape, run.arrays["q"].dtype)
            lse = run.xp.empty(run.problem.lse_shape, numpy_dtype(run.problem.softmax_dtype))
            run.forward(view_4d(out, self.options.layout), view_rows(lse))
        return ForwardResult(*(call.borrowed.give_back(x, None) for x in (out, lse)))

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        *,
        dlse: Array | None = None,
        need: Collection[str] = DEFAULT_NEED,
        seed: int | None = None,
        offset: int | None = None,
        **terms: Unpack[Terms],
    ) -> Gradients | NamedGradients:
        """Gradients of the sum over all ranks of ``sum(dout * out) + sum(dlse * lse)``.

        Parameters
        ----------
        dout : array
            Gradient with respect to this rank's out, of its shape and dtype.
        q, k, v : array
            As `forward` took them.
        out, lse : array
            As `forward` returned them.
        dlse : array, optional
            Gradient with respect to this rank's lse, of its shape and dtype: on all ranks or on none.
        need : collection of str, default ("dq", "dk", "dv")
            Gradients that are wanted, as `cuflash.FlashAttention.backward` takes it: the same on all ranks.
        seed, offset : int, optional
            As `forward` took them.
        block_mask, block_table, q_scale, k_scale, v_scale : array, optional
            Not served.
        **terms : array, optional
            The other arrays, as `forward` took them.

        Returns
        -------
        Gradients
            As `cuflash.FlashAttention.backward` returns them: dq, dk, dv and dbias of this rank's part, and what
            belongs to all ranks (the others, and dbias of a bias that is the same for all queries) in full and the same
            on all of them.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `forward` does.
        """
        arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
        arrays |= checked("backward", Terms, terms)

        def names(given: Mapping[str, Any]) -> tuple[str, ...]:
            return needed(need, {**given, **self.options.numbers}, dict.fromkeys(GRADIENTS))

        call, run = self._begin("backward", arrays, _BACKWARD_INPUTS, (seed, offset), names)
        with _on_device(run.arrays["q"]):
            results = {name: self._empty(name, run, call) for name in call.need}
            views = {
                name: view_4d(x, self.options.layout) if name in DEFAULT_NEED else x for name, x in results.items()
            }
            if "dbias" in views:
                views["dbias"] = _of_pairs(views["dbias"])
            run.backward(call.need, views)
        return named_tuple_of(call.need)(*(call.borrowed.give_back(x, None) for x in results.values()))

    def decode(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        seed: int | None = None,
        offset: int | None = None,
        **terms: Unpack[Terms],
    ) -> ForwardResult:
        """Attention of queries that all ranks have over keys of which each has a part: for a few queries.

        Each rank attends to its own keys, and what it finds goes to all others: keys and values stay where they are.
        The parts are merged in the dtype of lse, in which they travel, in the order of keys.

        Parameters
        ----------
        q : array
            All queries, the same on all ranks.
        k, v : array
            This rank's rows, as `forward` takes them.
        bias, mask : array, optional
            Broadcast to (batch, num_heads, seqlen_q, rows of this rank's keys).
        seed, offset : int, optional
            As `forward` takes them.
        block_mask, block_table, cu_seqlens_q, cu_seqlens_k, q_scale, k_scale, v_scale : array, optional
            Not served.
        **terms : array, optional
            The other arrays, as `forward` takes them.

        Returns
        -------
        ForwardResult
            ``out`` and ``lse`` of all queries, the same on all ranks.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `forward` does.
        """
        arrays = {"q": q, "k": k, "v": v} | checked("decode", Terms, terms)
        call, run = self._begin("decode", arrays, INPUTS, (seed, offset))
        with _on_device(run.arrays["q"]):
            out = run.xp.empty(run.problem.out_shape, run.arrays["q"].dtype)
            lse = run.xp.empty(run.problem.lse_shape, numpy_dtype(run.problem.softmax_dtype))
            run.decode(view_4d(out, self.options.layout), view_rows(lse))
        return ForwardResult(*(call.borrowed.give_back(x, None) for x in (out, lse)))

    def plan(self, q: Array, k: Array, v: Array) -> Schedule:
        """Who computes what in `forward` and `backward` of such arrays, and what travels for it.

        All ranks call it, as all others. `cuflash.distributed.Schedule.describe` says it in words.

        Parameters
        ----------
        q, k, v : array
            As `forward` takes them; only shapes and dtypes matter.

        Returns
        -------
        Schedule
            The same on all ranks.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `forward` does.
        """
        arrays = {"q": q, "k": k, "v": v} | dict.fromkeys(NAMES)
        return self._begin("plan", arrays, INPUTS, (0, 0))[1].schedule

    # ---- before anything is computed ---------------------------------------------------------------------------------

    def _begin(
        self,
        method: str,
        arrays: dict[str, Any],
        required: tuple[str, ...],
        random: tuple[int | None, int | None],
        need_of: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda given: (),
    ) -> tuple[_Call, Execution]:
        """What this rank is to do, after all ranks have agreed on it."""
        self._calls += 1

        def own() -> tuple[_Call, dict[str, Any]]:
            call = self._own_call(arrays, required, random, need_of)
            return call, self._facts(method, call)

        if not self._check:
            call, own_facts = own()
            return call, self._execution(method, call, self._splits, [own_facts])
        call, facts = agreed(self._transport, self._timeout, own)
        splits = [
            split if isinstance(split, Split) else SPLITS[split](sum(fact[rows] for fact in facts), self.size)
            for split, rows in zip(self._splits, ("_rows of q", "_rows of k"), strict=True)
        ]
        return call, together(self._transport, self._timeout, lambda: self._execution(method, call, splits, facts))

    def _own_call(
        self,
        arrays: dict[str, Any],
        required: tuple[str, ...],
        random: tuple[int | None, int | None],
        need_of: Callable[[Mapping[str, Any]], tuple[str, ...]],
    ) -> _Call:
        """This rank's arrays, as far as they can be checked without those of others."""
        for name, remedy in _REMEDIES.items():
            if arrays.get(name) is not None:
                raise not_served(name, type(arrays[name]).__name__, remedy)
        borrowed = interop.borrow(arrays, required=required)
        given = {name: x for name, x in borrowed.arrays.items() if x is not None}
        q, k, v = (given[name] for name in INPUTS)
        make_problem(self.options, q, k, v, **{name: given[name] for name in (*_OF_ALL, *_STARTS) if name in given})
        if _STARTS[0] in given and self.options.dropout:
            raise not_served("dropout", f"{self.options.dropout:g} with packed sequences", "dropout=0.0")
        starts = tuple(tuple(_on_host(given[name]).tolist()) for name in _STARTS if name in given)
        return _Call(borrowed, given, need_of(given), self.options.random(*random), starts)

    def _facts(self, method: str, call: _Call) -> dict[str, Any]:
        """What has to be the same on all ranks, and the numbers of rows."""
        axis = _axis_of_rows(call.given["q"], self.options.layout)
        facts: dict[str, Any] = {
            "call": f"{self._calls}, of {method}",
            **{field.name: repr(getattr(self.options, field.name)) for field in fields(Options)},
            **{name: repr(x) for name, x in zip(("split", "split_k"), self._splits, strict=True)},
            "chunks": str(self._chunks),
            "steps": str(self._steps),
            "need": ", ".join(call.need),
            "seed": str(call.random[0]),
            "offset": str(call.random[1]),
            "arrays": f"{', '.join(call.given)} of {call.borrowed.kind}",
            "_rows of q": call.given["q"].shape[axis],
            "_rows of k": call.given["k"].shape[axis],
        }
        for name in INPUTS:
            shape = list(call.given[name].shape)
            del shape[axis]
            facts[name] = f"{call.given[name].dtype.name} {tuple(shape)} beside rows"
        for name, x in call.given.items():
            if name in _OF_ALL or (method == "decode" and name == "q"):
                facts[name] = digest(x)
            elif name in _STARTS:
                facts[name] = digest(_on_host(x))
            elif name in BROADCAST:
                shape = [*(1,) * (4 - x.ndim), *x.shape]
                facts[f"_rows of {name}"] = shape.pop(2) if x.ndim > 1 else ALL_ROWS
                facts[name] = f"{x.dtype.name} {tuple(shape[: 2 if method == 'decode' else 3])} beside rows"
        return facts

    def _execution(self, method: str, call: _Call, splits: Sequence[Any], facts: list[dict[str, Any]]) -> Execution:
        """What this rank is to do, if all that it was given fits what other ranks have."""
        given, axis, (split_q, split_k) = call.given, _axis_of_rows(call.given["q"], self.options.layout), splits
        if method == "decode":  # the queries of all ranks are those of the first
            split_q = Split([[(0, given["q"].shape[axis])], *[[] for _ in range(self.size - 1)]])
        for name, argument, split in (("q", "split", split_q), ("k", "split_k", split_k)):
            if split.ranks != self.size:
                raise value_error(argument, counted(split.ranks, "rank"), f"{self.size} as comm has")
            rows = given[name].shape[axis]
            if rows != split.rows(self.rank) and not (method == "decode" and name == "q"):
                expected = f"{split.rows(self.rank)}, which rank {self.rank} has of {split.seqlen}"
                raise value_error(name, counted(rows, "row"), expected)
        problem = self._problem(method, call, split_q, split_k)
        left, right = window_of(self.options, split_q.seqlen, split_k.seqlen)
        schedule = make_schedule(
            split_q,
            split_k,
            Band(diagonal_of(self.options, split_q.seqlen, split_k.seqlen), left, right),
            chunks=self._chunks if self.options.deterministic else None,
            num_heads_kv=view_4d(given["k"], self.options.layout).shape[1],
            # Random bits belong to a head by its number among all.
            steps=1 if self.options.dropout else self._steps,
            step=ORIGIN_STEP if self.options.dropout else 1,
            packing=Packing.of(self.options, *call.starts) if call.starts else None,
        )
        return Execution(
            transport=self._transport,
            timeout=self._timeout,
            schedule=schedule,
            options=self.options,
            problem=problem,
            random=call.random,
            arrays={name: self._seen(name, x) for name, x in given.items()},
            broadcasts_rows=frozenset(
                name
                for name in BROADCAST
                if name in given and method != "decode" and self._broadcasts_rows(name, split_q, facts)
            ),
        )

    def _problem(self, method: str, call: _Call, split_q: Split, split_k: Split) -> Problem:
        """This rank's queries against the keys of all; to decode, all queries against this rank's keys."""
        given, axis = call.given, _axis_of_rows(call.given["q"], self.options.layout)
        of_all = {name: _longer(given[name], axis, split_k.seqlen) for name in ("k", "v")}
        if call.starts:
            return self._packed_problem(method, call, split_q, of_all)

        def problem_of(pass_: Pass, arrays: Mapping[str, Any]) -> Problem:
            if call.borrowed.kind == "numpy":
                return host.bound(pass_, self.options, arrays, call.need).problem
            likes = tuple((name, tuple(x.shape), tuple(x.strides), x.dtype) for name, x in arrays.items())
            return host.bind_arrays_like(pass_, self.options, likes, call.need).problem

        if method == "decode":
            problem_of("forward", {name: given[name] for name in ("q", *_OF_ALL) if name in given} | of_all)
            return problem_of("forward", {name: x for name, x in given.items() if name != "kv_lengths"})
        return problem_of("backward" if method == "backward" else "forward", given | of_all)

    def _packed_problem(self, method: str, call: _Call, split_q: Split, of_all: dict[str, Contiguous]) -> Problem:
        """This rank's queries against the keys of all, checked as all queries are."""
        given, axis = call.given, _axis_of_rows(call.given["q"], self.options.layout)
        if method == "decode":
            raise not_served("cu_seqlens_q", "packed sequences in decode", "forward, or a call for each sequence")
        for name in ("q", "dout", "out", "lse", "dlse"):
            if name in given:
                rows = given[name].ndim - 1 if name in ("lse", "dlse") else axis
                of_all[name] = _longer(given[name], rows, split_q.seqlen)
        likes = tuple((name, tuple(x.shape), tuple(x.strides), x.dtype) for name, x in (given | of_all).items())
        pass_: Pass = "backward" if method == "backward" else "forward"
        problem = host.bind_arrays_like(pass_, self.options, likes, call.need).problem
        check_starts(problem, *(np.array(starts, np.int32) for starts in call.starts))
        return replace(problem, seqlen_q=split_q.rows(self.rank))

    def _broadcasts_rows(self, name: str, split_q: Split, facts: list[dict[str, Any]]) -> bool:
        """Whether a bias or mask is the same for all queries of all ranks, by what each rank says of its rows."""
        own = [split_q.rows(rank) for rank in range(self.size)]
        rows = [fact[f"_rows of {name}"] for fact in facts]
        if rows[0] == ALL_ROWS and len(set(rows)) == 1:
            return True
        if not self._check:
            if 1 in own:
                expected = f"check=True, because of a rank with one query, whose {name} may be that of all queries"
                raise value_error("check", False, expected)
            own = [own[self.rank]]
        if rows == own:
            return False
        if set(rows) <= {1, ALL_ROWS}:
            return True
        raise value_error(name, f"{rows} rows on the ranks", f"1 on all of them, or their queries, {own}")

    def _seen(self, name: str, array: Array) -> Array:
        """An array with all four axes, of lse and dlse three, where it has axes of rows."""
        if name in (*_OF_ALL, *_STARTS):
            return array
        if name in BROADCAST:
            return _of_pairs(array)
        return view_rows(array) if name in ("lse", "dlse") else view_4d(array, self.options.layout)

    def _empty(self, name: str, run: Execution, call: _Call) -> Array:
        """Room for a gradient."""
        like = call.given.get(name[1:])
        if like is None:  # of a number
            return run.xp.empty((), numpy_dtype(run.problem.softmax_dtype))
        return run.xp.empty(like.shape, like.dtype)


def _axis_of_rows(array: Array, layout: str) -> int:
    return int(array.ndim) - (3 if layout == "bshd" and array.ndim > 2 else 2)


def _of_pairs(array: Array) -> Array:
    return array[(None,) * (4 - array.ndim)]


def _longer(array: Array, axis: int, rows: int) -> Contiguous:
    """An array that does not exist, with so many rows."""
    shape = list(array.shape)
    shape[axis] = rows
    return Contiguous(tuple(shape), array.dtype)


def _on_host(array: Array) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()


def _on_device(array: Array) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if isinstance(array, np.ndarray) else array.device
