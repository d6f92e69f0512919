"""The public interface: `ContextParallel`, with the calls of `cuflash.FlashAttention` on each rank's shard.

The short story of a call:

1. All ranks check that they make the same call, and learn how many rows each of them has (`agreement`).
2. The schedule, that is, which rank computes what and which rows are exchanged for it, follows from these numbers and
   the options alone (`schedule`).
3. Rows are exchanged (`exchange`, `transports`) while the rank computes with its own rows and with those that came
   before, by the functions that compute every other call (`execution`). Partial results are merged and added before
   they are rounded (`reduce`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from cuflash.arrays.checks import as_real, type_error, typed, value_error
from cuflash.distributed import passes
from cuflash.distributed.arguments import checked_split, positive, transport_of
from cuflash.distributed.calls import RankCalls
from cuflash.distributed.reductions import RankReductions
from cuflash.distributed.schedule import Schedule
from cuflash.distributed.second_derivatives import SecondDerivatives
from cuflash.distributed.split import Split
from cuflash.distributed.transports import LONGEST_TIMEOUT
from cuflash.shards.slices import steps_of
from cuflash.spec.inputs import INPUTS, NamedGradients, OfNumbers
from cuflash.spec.keywords import checked
from cuflash.spec.options import BLOCK_SIZE, Function, Options
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.results import Array, ForwardResult, Gradients, wanted_results
from cuflash.spec.score_args import check_names
from cuflash.spec.type_variables import ArrayT, FunctionT, KeyT, ValueT, WithFunction

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.spec.inputs import OptionalArrays, ScoreGradients
    from cuflash.spec.options import OptionsWithoutCausal
    from cuflash.spec.outputs import NamedForwardResult, WithDlse
    from cuflash.spec.results import NumpyForwardResult
    from cuflash.spec.type_variables import Integer, NumpyArray, ScalarT

    class RankArguments(OptionsWithoutCausal, total=False):
        """The keyword arguments of `ContextParallel`, but for functions."""

        split: Literal["contiguous", "zigzag"] | Split | None
        split_k: Literal["contiguous", "zigzag"] | Split | None
        chunks: int
        steps: int | None
        timeout: float
        check: bool
        causal: bool | Literal["top_left"]


class ContextParallel(RankReductions[FunctionT], SecondDerivatives[FunctionT]):
    """Exact attention and its gradients, for sequences of which each rank has a shard.

    Parameters
    ----------
    comm : communicator
        One of mpi4py, of NCCL (CuPy's ``cupy.cuda.nccl.NcclCommunicator`` or ``cupyx.distributed.NCCLBackend``, or
        nccl4py's), of `cuflash.distributed.threads`, or another `cuflash.distributed.Transport`. All of its ranks must
        make the same calls in the same order.
    split : "contiguous", "zigzag" or Split
        Which queries each rank holds, or in `decode` which keys. It has no default, because a sequence that was cut in
        another way gives wrong results. `cuflash.distributed.contiguous` is one span for each rank, in the order of
        ranks; it needs few transfers with a window. `cuflash.distributed.zigzag` gives all ranks equal work under a
        causal mask. A `Split` may be anything.
    split_k : "contiguous", "zigzag" or Split, optional
        Which keys each rank holds; by default the same as `split`.
    chunks : int, default 16
        With ``deterministic=True``, the number of chunks into which both sequences are cut. Every span of a rank must
        consist of whole chunks: 16 chunks suit zigzag splits over 1, 2, 4 and 8 ranks.
    steps : int, optional
        The most groups of key/value heads in which rows are exchanged. The rows of a group are exchanged while the rank
        computes with those of the group before; the first group is exchanged while it computes with its own rows. More
        steps take less memory, and more time of the host. By default there are up to 3, depending on how many bytes are
        exchanged, and in a backward pass as many as leave 256 MiB to a group.
    timeout : float, default 60.0
        Seconds after which a rank that waits for another one raises TimeoutError, where the communicator allows this.
        It must be longer than any rank computes in a step, because in host memory ranks wait for one another that long.
        On devices, ranks that compile kernels for a first call are waited for up to ten minutes longer.
    check : bool, default True
        Whether each call begins with a check that all ranks make the same call. ``check=False`` needs two `Split`: then
        a call on CuPy arrays does not wait on the host, ranks that disagree may hang, and `backward` goes by the
        rounded lse of rows whose scores are large (docs/distributed.md).
    causal, window, layout : optional
        As `cuflash.FlashAttention` takes them, for the whole sequences, but for ``causal="lengths"``.
    deterministic : bool, default False
        If True, results are bitwise the same for any number of ranks, for any splits into whole chunks, and in every
        run. Each chunk is computed by calls of its own, with all rows that it needs.
    batch_invariant : bool, default False
        As `cuflash.FlashAttention` takes it, of the batch entries and heads of all ranks; `deterministic` comes along.
    precision : {"highest", "tf32"}, default "highest"
        As `cuflash.FlashAttention` takes it.
    dropout : float, default 0.0
        As `cuflash.FlashAttention` takes it; the ranks drop the same weights as one device would. Spans that begin at
        multiples of 16, as ``cuflash.distributed.zigzag(seqlen, ranks, multiple=16)`` cuts them, save copies.
    block_size : int or (int, int), default (128, 128)
        As `cuflash.FlashAttention` takes it. Spans that begin at multiples of the block size save copies, too.
    score, mask : callable, optional
        As `cuflash.FlashAttention` takes them: their indices are those of the whole problem. All ranks must pass
        functions with the same expression.
    **numbers : float, optional
        `scale`, and all other numbers that act on scores, as `cuflash.FlashAttention` takes them.

    Attributes
    ----------
    options : cuflash.spec.options.Options
        The checked options.
    rank, size : int
        The number of this rank, and the number of ranks.

    Raises
    ------
    TypeError, ValueError
        No `split`; an option of the wrong type or out of range; a communicator of no known kind; a function that cannot
        be traced.

    See Also
    --------
    contiguous, zigzag, Split : Which rows each rank has.
    threads, Mpi, Transport : Communicators.
    cuflash.FlashAttention : The same on one device.
    cuflash.merge : How partial results are put together.

    Notes
    -----
    Each rank computes out and lse of its queries, first from its own keys and then from those that it receives. It
    computes dk and dv of its keys, first from its own queries and then from those that it receives. Partial results are
    merged and added in the dtype of lse, in this order, and rounded once. The calls for dk and dv also give partial dq
    in the dtype of lse, which are sent back to the ranks of the queries and are added there in the order of ranks. With
    `deterministic`, or where other gradients than dq, dk and dv are needed, dq is computed as out is; this takes seven
    matrix products in all, where one device takes five. The gradients of numbers, of optional inputs with a value for
    each head, of arrays that the score reads, and of a bias that is the same for all queries are added in the dtype of
    lse, in the order of queries. `jvp` and `backward_jvp` go by the same schedules: tk and tv are exchanged as k and v
    are, and the tangents of rows as rows are.

    References
    ----------
    - Liu, Zaharia, Abbeel: Ring attention with blockwise transformers (2023), https://arxiv.org/abs/2310.01889.
    - Brandon and others: Striped attention (2023), https://arxiv.org/abs/2311.09431 (equal work under a causal mask).

    Examples
    --------
    Two ranks that are threads:

    >>> import concurrent.futures, numpy as np, cuflash, cuflash.distributed as cd
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64))
    >>> split = cd.zigzag(100, 2)
    >>> def work(comm):
    ...     parts = [split.part(x, comm.rank) for x in (q, k, v)]
    ...     return cd.ContextParallel(comm, split=split, causal=True).forward(*parts).out
    >>> with concurrent.futures.ThreadPoolExecutor(2) as pool:
    ...     outs = list(pool.map(work, cd.threads(2)))
    >>> np.allclose(split.whole(outs), cuflash.attention(q, k, v, causal=True))
    True
    """

    # fmt: off
    @overload
    def __init__(
        self: ContextParallel[WithFunction], comm: Any, *, score: Function, mask: Function | None = None,
        **arguments: Unpack[RankArguments],
    ) -> None: ...
    @overload
    def __init__(
        self: ContextParallel[WithFunction], comm: Any, *, mask: Function, score: None = None,
        **arguments: Unpack[RankArguments],
    ) -> None: ...
    @overload
    def __init__(
        self: ContextParallel[None], comm: Any, *, score: None = None, mask: None = None,
        **arguments: Unpack[RankArguments],
    ) -> None: ...
    @overload
    def __init__(
        self: ContextParallel[WithFunction], comm: Any, *, score: Function | None = None,
        mask: Function | None = None, **arguments: Unpack[RankArguments],
    ) -> None: ...
    # fmt: on

    def __init__(
        self,
        comm: Any,
        *,
        split: Literal["contiguous", "zigzag"] | Split | None = None,
        split_k: Literal["contiguous", "zigzag"] | Split | None = None,
        chunks: int = 16,
        steps: int | None = None,
        timeout: float = 60.0,
        check: bool = True,
        causal: bool | Literal["top_left"] = False,
        window: tuple[int | None, int | None] | None = None,
        layout: Literal["bhsd", "bshd"] = "bhsd",
        deterministic: bool = False,
        batch_invariant: bool = False,
        precision: Literal["highest", "tf32"] = "highest",
        dropout: float = 0.0,
        block_size: int | tuple[int, int] = BLOCK_SIZE,
        score: Function | None = None,
        mask: Function | None = None,
        **numbers: Unpack[OfNumbers],
    ) -> None:
        self.options = Options(
            causal=causal,
            window=window,
            layout=layout,
            deterministic=deterministic,
            batch_invariant=batch_invariant,
            precision=precision,
            dropout=dropout,
            block_size=block_size,
            score=score,  # type: ignore[arg-type]  # Options replaces a function by its trace
            mask_function=mask,  # type: ignore[arg-type]
            shares_device=True,  # calls overlap, and while rows are exchanged
            **checked("ContextParallel", OfNumbers, numbers),
        )
        check_names(self.options)
        steps_of(self.options, has_block_mask=False)  # refuses what goes with no ranks
        splits = checked_split("split", split), checked_split("split_k", split if split_k is None else split_k)
        chunks, steps = positive("chunks", chunks), None if steps is None else positive("steps", steps)
        seconds = min(as_real("timeout", timeout), LONGEST_TIMEOUT)
        if seconds <= 0:
            raise value_error("timeout", timeout, "a number of seconds > 0")
        if not isinstance(check, bool):
            raise type_error("check", typed(check), "a bool")
        if not check and not all(isinstance(x, Split) for x in splits):
            raise value_error("check", False, "True, or two Split, which say how many rows each rank has")
        transport = transport_of(comm)
        self.rank, self.size = transport.rank, transport.size
        self._calls = self._calls_of_weights = RankCalls(
            options=self.options,
            splits=splits,
            chunks=chunks,
            steps=steps,
            timeout=seconds,
            check=check,
            transport=transport,
        )
        if dropout:  # weights that are reduced are those before it
            self._calls_of_weights = replace(self._calls, options=replace(self.options, dropout=0.0))

    # fmt: off
    @overload
    def forward(
        self: ContextParallel[None], q: NumpyArray[ScalarT], k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **optional_inputs: Unpack[OptionalArrays],
    ) -> NumpyForwardResult[ScalarT]: ...
    @overload
    def forward(
        self: ContextParallel[None], q: ArrayT, k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **optional_inputs: Unpack[OptionalArrays],
    ) -> ForwardResult[ArrayT, ArrayT]: ...
    @overload
    def forward(
        self: ContextParallel[Any], q: ArrayT, k: Array, v: Array, *, want: Collection[str], **optional_inputs: Any
    ) -> NamedForwardResult[ArrayT, ArrayT]: ...
    @overload
    def forward(
        self: ContextParallel[WithFunction], q: NumpyArray[ScalarT], k: Array, v: Array, **optional_inputs: Any
    ) -> NumpyForwardResult[ScalarT]: ...
    @overload
    def forward(
        self: ContextParallel[WithFunction], q: ArrayT, k: Array, v: Array, **optional_inputs: Any
    ) -> ForwardResult[ArrayT, ArrayT]: ...
    # fmt: on

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        seed: int | None = None,
        offset: int | None = None,
        want: Collection[str] = (),
        **optional_inputs: Array,
    ) -> ForwardResult | NamedForwardResult:
        """Attention of this rank's queries over the keys of all ranks.

        Parameters
        ----------
        q, k, v : array
            This rank's rows, its spans one after the other, in the shapes that `cuflash.FlashAttention.forward` takes.
        bias, mask : array, optional
            Broadcast to (batch, num_heads, rows of this rank's queries, keys of all ranks). If the axis of queries is
            missing or has length 1 on all ranks, the array is the same on all ranks and stands for all queries. But if
            each rank has one query, an axis of length 1 belongs to that query.
        seed, offset : int, optional
            As `cuflash.FlashAttention.forward` takes them: the same on all ranks.
        cu_seqlens_q, cu_seqlens_k : array, optional
            As `cuflash.FlashAttention.forward` takes them, for the rows of all ranks: the same on all of them. The host
            reads them, so if they are on the GPU it waits for the device.
        want : collection of {"max", "entropy"}, optional
            Row reductions, as `cuflash.FlashAttention.forward` takes it: the same on all ranks.
        block_table : array, optional
            Not served.
        q_scale, k_scale, v_scale : array, optional
            One number for the array, or (..., num_heads, 1): the same on all ranks. Blocks of rows are not served.
        **optional_inputs : array, optional
            The other arrays that `cuflash.FlashAttention.forward` takes, for the whole problem: the same on all ranks.
            The arrays that `score` and `mask` read are among them, and so is a block_mask.

        Returns
        -------
        ForwardResult
            ``out`` and ``lse`` of this rank's queries, and the reductions that are wanted, as
            `cuflash.FlashAttention.forward` returns them.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `cuflash.FlashAttention.forward` does; ValueError also if a rank makes another call than rank 0.
        RuntimeError
            The call failed on another rank; the message holds its error.
        TimeoutError
            A rank, which the message names, did not respond in time. After that the communicator cannot be used any
            more.

        See Also
        --------
        backward : Gradients, from out and lse.
        decode : Queries that all ranks have.
        plan : Which rank computes what.
        cuflash.FlashAttention.forward : The same on one device.
        """
        arrays, names = {"q": q, "k": k, "v": v}, wanted_results(want, {})
        return passes.forward(self._calls, "forward", arrays, optional_inputs, (seed, offset), names)  # type: ignore[no-any-return]

    # fmt: off
    @overload
    def backward(
        self: ContextParallel[None], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, *,
        entropy: Array = ..., dentropy: Array = ..., seed: Integer = None, offset: Integer = None,
        **optional_inputs: Unpack[WithDlse],
    ) -> Gradients[ArrayT, KeyT, ValueT]: ...
    @overload
    def backward(
        self: ContextParallel[None], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, *,
        need: Collection[str], entropy: Array = ..., dentropy: Array = ..., seed: Integer = None,
        offset: Integer = None, **optional_inputs: Unpack[WithDlse],
    ) -> NamedGradients[ArrayT, KeyT, ValueT]: ...
    @overload
    def backward(
        self: ContextParallel[WithFunction], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array,
        **optional_inputs: Any,
    ) -> ScoreGradients[ArrayT, KeyT, ValueT]: ...
    # fmt: on

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
        dmax: Array | None = None,
        entropy: Array | None = None,
        dentropy: Array | None = None,
        need: Collection[str] = DEFAULT_NEED,
        seed: int | None = None,
        offset: int | None = None,
        **optional_inputs: Array,
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
        dmax : array, optional
            Gradient with respect to the maximum of this rank's rows, like dlse.
        entropy, dentropy : array, optional
            The entropy of this rank's rows that `forward` returned, which dentropy needs, and the gradient with respect
            to it, like dlse.
        need : collection of str, default ("dq", "dk", "dv")
            Gradients that are wanted, as `cuflash.FlashAttention.backward` takes it: the same on all ranks.
        seed, offset : int, optional
            As `forward` took them.
        block_table : array, optional
            Not served.
        **optional_inputs : array, optional
            The other arrays, as `forward` took them.

        Returns
        -------
        Gradients
            As `cuflash.FlashAttention.backward` returns them: dq, dk, dv and dbias are those of this rank's shard. All
            other gradients, and dbias of a bias that is the same for all queries, are complete and the same on all
            ranks.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `forward` does.

        See Also
        --------
        forward : Gives out and lse.
        backward_jvp : The derivatives of these gradients in a direction.
        cuflash.FlashAttention.backward : The same on one device.
        """
        arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
        arrays |= {"dmax": dmax} if dentropy is None else {"dmax": dmax, "entropy": entropy, "dentropy": dentropy}
        return passes.backward(self._calls, arrays, optional_inputs, (seed, offset), need)  # type: ignore[no-any-return]

    # fmt: off
    @overload
    def decode(
        self: ContextParallel[None], q: NumpyArray[ScalarT], k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **optional_inputs: Unpack[OptionalArrays],
    ) -> NumpyForwardResult[ScalarT]: ...
    @overload
    def decode(
        self: ContextParallel[None], q: ArrayT, k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **optional_inputs: Unpack[OptionalArrays],
    ) -> ForwardResult[ArrayT, ArrayT]: ...
    @overload
    def decode(
        self: ContextParallel[Any], q: ArrayT, k: Array, v: Array, *, want: Collection[str], **optional_inputs: Any
    ) -> NamedForwardResult[ArrayT, ArrayT]: ...
    @overload
    def decode(
        self: ContextParallel[WithFunction], q: NumpyArray[ScalarT], k: Array, v: Array, **optional_inputs: Any
    ) -> NumpyForwardResult[ScalarT]: ...
    @overload
    def decode(
        self: ContextParallel[WithFunction], q: ArrayT, k: Array, v: Array, **optional_inputs: Any
    ) -> ForwardResult[ArrayT, ArrayT]: ...
    # fmt: on

    def decode(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        seed: int | None = None,
        offset: int | None = None,
        want: Collection[str] = (),
        **optional_inputs: Array,
    ) -> ForwardResult | NamedForwardResult:
        """Decode: attention of queries that all ranks have, over keys of which each rank has a shard.

        Each rank attends to its own keys and sends its partial result to all others; keys and values are not
        exchanged. These are merged in the dtype of lse, in the order of keys.

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
        want : collection of {"max", "entropy"}, optional
            As `forward` takes it.
        block_table, cu_seqlens_q, cu_seqlens_k : array, optional
            Not served.
        **optional_inputs : array, optional
            The other arrays, as `forward` takes them.

        Returns
        -------
        ForwardResult
            ``out`` and ``lse`` of all queries, and the reductions that are wanted, the same on all ranks.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `forward` does.

        See Also
        --------
        forward : Queries of which each rank has a shard.
        cuflash.merge : The same merge, for splits that the caller makes.

        References
        ----------
        Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference (2023),
        https://pytorch.org/blog/flash-decoding/: splits of the keys, here on ranks.
        """
        arrays, names = {"q": q, "k": k, "v": v}, wanted_results(want, {})
        return passes.forward(self._calls, "decode", arrays, optional_inputs, (seed, offset), names)  # type: ignore[no-any-return]

    # fmt: off
    @overload
    def plan(
        self: ContextParallel[None], q: Array, k: Array, v: Array, **optional_inputs: Unpack[OptionalArrays]
    ) -> Schedule: ...
    @overload
    def plan(
        self: ContextParallel[WithFunction], q: Array, k: Array, v: Array, **optional_inputs: Any
    ) -> Schedule: ...
    # fmt: on

    def plan(self, q: Array, k: Array, v: Array, **optional_inputs: Array) -> Schedule:
        """Which rank computes what in `forward` and `backward` of such arrays, and which rows are exchanged for it.

        All ranks must call it, as they must call the other methods. `cuflash.distributed.Schedule.describe` gives the
        schedule in words.

        Parameters
        ----------
        q, k, v : array
            As `forward` takes them; only shapes and dtypes matter.
        **optional_inputs : array, optional
            The other arrays, as `forward` takes them.

        Returns
        -------
        Schedule
            The same on all ranks.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError, TimeoutError
            As `forward` does.

        See Also
        --------
        Schedule : What it returns.
        cuflash.FlashAttention.plan : The kernels of one device.
        """
        arrays = {"q": q, "k": k, "v": v}
        return self._calls.carry_out("plan", arrays, optional_inputs, INPUTS, (0, 0), lambda call, run: run.schedule)
