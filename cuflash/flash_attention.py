"""The public interface: `FlashAttention` for forward, backward, jvp, backward_jvp, plan, compile and tune.

Two passes close all of second order. With ``phi = sum(dout * out) + sum(dlse * lse)``, `FlashAttention.backward` gives
the gradient of phi. Its derivative in a direction t is the Hessian of phi times t, and phi's own derivative in that
direction is ``sum(dout * tout) + sum(dlse * tlse)``. So `FlashAttention.jvp` and `FlashAttention.backward_jvp` give
Hessian-vector products, the double backward pass, and the gradients of a Jacobian-vector product.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, overload

from cuflash import dispatch
from cuflash.reductions import Reductions
from cuflash.score_mod import Score
from cuflash.spec.inputs import INPUTS, NamedGradients, NamedGradientTangents
from cuflash.spec.keywords import explains_keywords
from cuflash.spec.options import BLOCK_SIZE, Causal, Function, Options, Window
from cuflash.spec.outputs import (
    DEFAULT_NEED,
    DEFAULT_NEED_TANGENTS,
    OUTPUTS,
    REQUIRED_BY_BACKWARD,
    REQUIRED_BY_BACKWARD_JVP,
    BackwardJvpArrays,
    JvpArrays,
)
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP
from cuflash.spec.results import (
    Array,
    ForwardResult,
    Gradients,
    GradientTangents,
    JvpResult,
    named_tuple,
    needed,
    wanted_results,
)
from cuflash.spec.score_args import check_given, check_names, check_tangent_names, checked_with_score_args
from cuflash.spec.type_variables import ArrayT, FunctionT, KeyT, ValueT, WithFunction

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.spec.inputs import ScoreGradients, ScoreGradientTangents
    from cuflash.spec.options import OptionArguments
    from cuflash.spec.outputs import ForwardArrays, NamedForwardResult, OfGradients, OfThreeGradients, OfThreeTangents
    from cuflash.spec.results import NumpyForwardResult, NumpyJvpResult
    from cuflash.spec.type_variables import Integer, NumpyArray, ScalarT

_BACKWARD_INPUTS = (*INPUTS, *REQUIRED_BY_BACKWARD)
_BACKWARD_JVP_INPUTS = (*INPUTS, *REQUIRED_BY_BACKWARD_JVP)


class FlashAttention(Reductions[FunctionT]):
    """Exact attention with fixed options, ``softmax(scale * q @ k.T) @ v`` of every head, and its gradients.

    Parameters
    ----------
    causal : bool, "top_left" or "lengths", default False
        Query i attends to key j only if ``j <= i + d``. ``True`` aligns the diagonal to the bottom right, the last
        query with the last key: ``d = seqlen_k - seqlen_q``. ``"top_left"`` aligns the first query with the first key:
        ``d = 0``. The two agree for square problems, and `kv_lengths` moves neither. ``"lengths"`` aligns the last
        query with the last key that exists, ``d = kv_lengths[b] - seqlen_q`` in batch entry b: this is for queries that
        are the newest tokens of a KV cache with capacity for more, and needs `kv_lengths`. With a `block_table`, and of
        packed sequences,
        ``True`` means the same. Queries before the first key attend to nothing. Visible pairs are 1::

            seqlen_q = 2, seqlen_k = 5                      seqlen_q = 5, seqlen_k = 2

            True:             "top_left":                   True:       "top_left":
              1 1 1 1 0         1 0 0 0 0                     0 0         1 0
              1 1 1 1 1         1 1 0 0 0                     0 0         1 1
                                                              0 0         1 1
                                                              1 0         1 1
                                                              1 1         1 1

    scale : float, optional
        Factor of ``q @ k.T``, ``head_dim ** -0.5`` by default. May be zero or negative. Its absolute value is at most
        ``2 ** 48``, with float64 arrays ``2 ** 384``, so that scores do not overflow.
    window : (int or None, int or None), optional
        (left, right): query i attends to key j only if ``i + d - left <= j <= i + d + right``, d as above (that of
        ``True`` without `causal`). None on a side sets no bound there. With `causal`, a right above 0 counts as 0::

            window=(1, 0), seqlen_q = seqlen_k = 4          window=(None, 1), seqlen_q = 3, seqlen_k = 4

              1 0 0 0                                         1 1 1 0
              1 1 0 0                                         1 1 1 1
              0 1 1 0                                         1 1 1 1
              0 0 1 1

    softcap : float, optional
        Positive c: scaled scores s become ``c * tanh(s / c)``. With float16 and bfloat16 arrays, c is from ``2 ** -48``
        to ``2 ** 16``, and the GPU computes this to ``1e-7 * c``. With float32, c is from ``2 ** -48`` to ``2 ** 48``,
        and with float64 from ``2 ** -384`` to ``2 ** 384``.
    layout : {"bhsd", "bshd"}, default "bhsd"
        Order of the axes of q, k, v and out: (batch, heads, seqlen, head_dim) or (batch, seqlen, heads, head_dim).
        For the batch there may be any number of batch axes, which broadcast as those of `numpy.matmul` do. A 3-D
        array is one batch entry, a 2-D array (seqlen, head_dim) one head.
    deterministic : bool, default False
        Gradients are bitwise equal run after run. `forward` always is, and so is the CPU path.
    batch_invariant : bool, default False
        A sequence has the same bits alone and in any other call ("Equal bits" in docs/semantics.md), run after run.
    precision : {"highest", "tf32"}, default "highest"
        Of products of float32 arrays on the GPU; nothing else changes. "highest": results are as close to the exact
        ones as those of the formula in float32. "tf32" is faster: products are at least as accurate as those of factors
        rounded to the nearest number of TF32's 11 bits, and are summed in float32. Each score is then off by up to
        ``2 ** -10 * abs(scale) * sum(abs(q[i]) * abs(k[j]))``, and each result, besides what that changes, by 2 ** -10
        of the sum of the absolute values of its terms. On compute capability 9.0, where `plan` says that arrays are
        split into two bf16 terms, which are 16 bits, both bounds are 2 ** -14; elsewhere factors are rounded to
        TF32. On the CPU "tf32" is computed as "highest" is.
    dropout : float, default 0.0
        Probability that an attention weight is dropped, at least 0 and below 1; rounded to a multiple of 1 / 65536,
        which must be below 1, too. `forward` and `backward` then take a `seed` and an `offset`, which decide which
        weights are dropped: `cuflash.dropout_mask` shows them all.
    block_size : int or (int, int), default (128, 128)
        Rows and keys of the blocks of a `block_mask`, without effect where none is given: multiples of 16 from 16 to
        1024, one number for both. Tiles of 128 rows and 128 keys are the fastest: where they cut blocks, pairs are
        looked up one by one. Entry [i, j] is the block that begins at query ``128 * i`` and key ``128 * j``::

            seqlen_q = seqlen_k = 400     400 queries by 400 keys, x visible

              1 0 0 0                       x128 .    .    .
              1 1 0 0                       x128 x128 .    .
              0 1 1 0                       .    x128 x128 .
              1 0 0 1                       x128 .    .    x16     (rows 384 to 399)

    score : callable or cuflash.Score, optional
        ``score(s, i, j, *, head, batch, ...)``: the score of query i and key j, made of the scaled product s. Of the
        arguments after the ``*``, `head` and `batch` are integers; all others are arrays that the calls are given. It
        is called once, with symbols, and returns an expression of these and of `cuflash.exp`, `cuflash.where` and so
        on: docs/score.md has the rules. It takes the place of softcap, bias and alibi_slopes, and cannot be combined
        with them. A `cuflash.Score` is such a function written in CUDA.
    mask : callable, optional
        ``mask(i, j, *, head, batch, ...)``: whether query i attends to key j, as such an expression. It acts in
        addition to all else that hides keys.

    Attributes
    ----------
    options : cuflash.spec.options.Options
        The checked options.

    Raises
    ------
    TypeError, ValueError
        An option of the wrong type or out of range; the message names it, what was got and what is expected. Numbers
        may be NumPy's, `decimal.Decimal` or `fractions.Fraction`, but nothing is rounded to an integer, and a bool is
        no number. Ranges that depend on the dtype of the arrays are checked by each call.

    See Also
    --------
    attention : The same in one call, without gradients.
    merge : Attention over all keys from that over splits of them.
    streamed : Keys and values that stay in host memory.
    cuflash.distributed.ContextParallel : The same for sequences that are sharded over ranks.
    cuflash.torch.attention, cuflash.jax.attention : The same for autograd and JAX's transformations.

    Notes
    -----
    In the order in which they act on the score of query i and key j::

        s = scale * dot(q[i], k[j])
        s = softcap * tanh(s / softcap)
        s = s - alibi_slopes[head] * abs(i + d - j)
        s = s + bias[i, j]
        s = -inf  where causal, window, mask, block_mask or kv_lengths hide the pair

    and then the head's sink, if there is one, joins the sum of exponentials::

        lse[i] = log(exp(sink) + sum_j exp(s))
        out[i] = sum_j exp(s - lse[i]) * v[j]

    A query that attends to no key has out = 0, lse = -inf (or the sink) and adds nothing to the gradients of q, k and
    v. For any other query, NaN and infinities in what it attends to reach the output as in the formula.

    With dropout, the weights of `out` are divided by ``1 - dropout`` where they are kept and zero elsewhere; `lse` is
    that of the weights before dropout. Whether a weight is kept depends only on seed, offset and its position (batch
    entry, head, i, j): it is the same on every device, and on the CPU. The random numbers are those of Philox-4x32-7,
    with the seed as the key.

    Instances hold no arrays, are cheap to make, and may be shared between threads. Those with equal options are equal.

    docs/options.md has all options, those of the calls too, in a table: shapes, dtypes, gradients and passes.

    References
    ----------
    - Dao, Fu, Ermon, Rudra, Re: FlashAttention (2022), https://arxiv.org/abs/2205.14135, algorithms 1 and 4.
    - Dao: FlashAttention-2 (2023), https://arxiv.org/abs/2307.08691, algorithms 1 and 2.
    - Xiao, Tian, Chen, Han, Lewis: Efficient streaming language models with attention sinks (2023),
      https://arxiv.org/abs/2309.17453 (its "zero sink" is a sink of 0).
    - Child, Gray, Radford, Sutskever: Generating long sequences with sparse transformers (2019),
      https://arxiv.org/abs/1904.10509 (block masks).
    - OpenAI: gpt-oss-120b & gpt-oss-20b model card (2025), https://arxiv.org/abs/2508.10925 (learnable sinks).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 100, 64), np.float32)
    >>> attn = cuflash.FlashAttention(causal=True)
    >>> out, lse = attn.forward(q, k, v)
    >>> dq, dk, dv = attn.backward(np.ones_like(out), q, k, v, out, lse)
    >>> dq.shape, lse.shape
    ((2, 8, 100, 64), (2, 8, 100))
    """

    __slots__ = ()

    # fmt: off
    @overload
    def __init__(
        self: FlashAttention[WithFunction], *, score: Function | Score, mask: Function | None = None,
        **options: Unpack[OptionArguments],
    ) -> None: ...
    @overload
    def __init__(
        self: FlashAttention[WithFunction], *, mask: Function, score: None = None, **options: Unpack[OptionArguments]
    ) -> None: ...
    @overload
    def __init__(
        self: FlashAttention[None], *, score: None = None, mask: None = None, **options: Unpack[OptionArguments]
    ) -> None: ...
    @overload
    def __init__(
        self: FlashAttention[WithFunction], *, score: Function | Score | None = None, mask: Function | None = None,
        **options: Unpack[OptionArguments],
    ) -> None: ...
    # fmt: on

    @explains_keywords("FlashAttention")
    def __init__(
        self,
        *,
        causal: Causal = False,
        scale: float | None = None,
        window: Window | None = None,
        softcap: float | None = None,
        layout: Literal["bhsd", "bshd"] = "bhsd",
        deterministic: bool = False,
        batch_invariant: bool = False,
        precision: Literal["highest", "tf32"] = "highest",
        dropout: float = 0.0,
        block_size: int | tuple[int, int] = BLOCK_SIZE,
        score: Function | Score | None = None,
        mask: Function | None = None,
    ) -> None:
        self.options = Options(
            causal=causal,
            scale=scale,
            window=window,
            softcap=softcap,
            layout=layout,
            deterministic=deterministic,
            batch_invariant=batch_invariant,
            precision=precision,
            dropout=dropout,
            block_size=block_size,
            score=score,  # type: ignore[arg-type]  # a function becomes what it is traced to
            mask_function=mask,  # type: ignore[arg-type]
        )
        check_names(self.options)

    def __repr__(self) -> str:
        functions = {"score": self.options.score, "mask": self.options.mask_function}
        names = [name for name in inspect.signature(FlashAttention).parameters if functions.get(name, name)]
        shown = (f"{name}={functions.get(name) or getattr(self.options, name)!r}" for name in names)
        return f"FlashAttention({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        # An object of a subclass may compute something else, and caches must not mix the two up.
        return self.options == other.options if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.options)

    # fmt: off
    @overload
    def forward(
        self: FlashAttention[None], q: NumpyArray[ScalarT], k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **arrays: Unpack[ForwardArrays],
    ) -> NumpyForwardResult[ScalarT]: ...
    @overload
    def forward(
        self: FlashAttention[Any], q: ArrayT, k: Array, v: Array, *, want: Collection[str], **arrays: Any
    ) -> NamedForwardResult[ArrayT, ArrayT]: ...
    @overload
    def forward(
        self: FlashAttention[None], q: ArrayT, k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **arrays: Unpack[ForwardArrays],
    ) -> ForwardResult[ArrayT, ArrayT]: ...
    @overload
    def forward(
        self: FlashAttention[WithFunction], q: NumpyArray[ScalarT], k: Array, v: Array, **arrays: Any
    ) -> NumpyForwardResult[ScalarT]: ...
    @overload
    def forward(
        self: FlashAttention[WithFunction], q: ArrayT, k: Array, v: Array, **arrays: Any
    ) -> ForwardResult[ArrayT, ArrayT]: ...
    # fmt: on

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        bias: Array | None = None,
        mask: Array | None = None,
        kv_lengths: Array | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        block_mask: Array | None = None,
        block_table: Array | None = None,
        cu_seqlens_q: Array | None = None,
        cu_seqlens_k: Array | None = None,
        q_scale: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        seed: int | None = None,
        offset: int | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        max: Array | None = None,
        entropy: Array | None = None,
        want: Collection[str] = (),
        **score_args: Array,
    ) -> ForwardResult | NamedForwardResult:
        """Attention, and the logarithm of the sum of exponentials that `backward` needs.

        All arrays of a call are of one library, and so are the results: NumPy (computed on the CPU), CuPy
        (computed on their device, on CuPy's current stream, without a synchronisation), or another library's with
        ``__dlpack__`` (likewise, by the memory it is in; nothing is copied or moved). A class whose library has no
        ``from_dlpack`` gets NumPy or CuPy arrays back. Besides arrays of any library, a scalar of Python or NumPy
        stands for an array without axes: ``bias=0.0``, ``k_scale=1.0``, a parameter of a score. A Python float gets the
        dtype of lse, and so does ``numpy.float64``, which is one; other NumPy scalars keep their dtype, or get one that
        holds all its values.

        Parameters
        ----------
        q : array
            (..., num_heads, seqlen_q, head_dim) for layout "bhsd"; float16, bfloat16 (`ml_dtypes`), float32 or float64.
            Any strides, of this and every other array; on the GPU, q, k or v whose last axis is not contiguous is
            copied first. A float16, bfloat16 or float32 problem accumulates in float32. The batch axes of q, k and v
            broadcast to those that "batch" stands for below, and so do those of the optional arrays, which may be 1 or
            missing.
        k : array
            (..., num_heads_kv, seqlen_k, head_dim), dtype of q, or float8_e4m3fn or float8_e5m2 (`ml_dtypes`, or what
            `cuflash.fp8` makes): then its numbers are these times `k_scale`. Query head h reads key/value head
            ``h // (num_heads // num_heads_kv)``; num_heads_kv divides num_heads. `cuflash.streamed` makes k and v stay
            in host memory and come in chunks to a GPU, where q is.
        v : array
            (..., num_heads_kv, seqlen_k, head_dim_v), dtype of k. With None, lse is computed alone, and out is None.
        bias : array, optional
            Added to the scores; dtype of q or of lse. Broadcasts to (batch, num_heads, seqlen_q, seqlen_k), without a
            copy. -inf hides a key.
        mask : array, optional
            bool, True is visible; broadcasts as bias does.
        kv_lengths : array, optional
            (batch,), int32 or int64: only the first ``kv_lengths[b]`` keys of entry b exist, the rest is never read.
            Within 0..seqlen_k; on the GPU, where looking would be a synchronisation, clamped to it. It does not move
            the diagonal of ``causal=True``, which ends at key seqlen_k - 1: if the queries are the newest tokens of a
            KV cache, ``causal="lengths"`` is meant.
        alibi_slopes : array, optional
            (num_heads,) or (batch, num_heads), dtype of lse: ``slope * abs(i + d - j)`` is subtracted from the scores.
        sinks : array, optional
            (num_heads,), dtype of lse: for each query head the score of one more key, which every row attends to and
            whose value is zero. It joins the sum of exponentials and nothing else, neither scale nor mask apply to it,
            and lse includes it. A row that attends to no other key has out = 0 and lse = the sink.
        block_mask : array, optional
            bool, (..., ceil(seqlen_q / rows), ceil(seqlen_k / keys)) for ``block_size=(rows, keys)``; the axes before
            these broadcast to (batch, num_heads), without a copy. False hides all pairs of a block, whatever other
            arguments say. Hidden blocks are neither loaded nor computed: the time is that of the blocks that are left.
            `cuflash.block_masks` makes such masks. Not with a `block_table`.
        block_table : array, optional
            (batch, max_pages), int32, or int64, of which a copy is made: k and v are pools of pages that are shared by
            all batch entries, and key j of entry b is row ``j % page_size`` of page ``block_table[b, j // page_size]``.
            All arrays of heads are then 4-D, and k has shape (num_pages, num_heads_kv, page_size, head_dim), or for
            layout "bshd" (num_pages, page_size, num_heads_kv, head_dim); v likewise. page_size is 16, 32, 64, 128 or
            256, and seqlen_k is ``max_pages * page_size``. `kv_lengths` are needed too, and the diagonal of entry b
            follows them: ``d = kv_lengths[b] - seqlen_q`` (0 with "top_left"). A page may belong to several entries. Of
            the table only the pages of keys that exist are looked up; they are in 0..num_pages - 1, which is checked on
            the CPU; on the GPU others are clamped.
        cu_seqlens_q, cu_seqlens_k : array, optional
            (sequences + 1,), int32, or int64, of which a copy is made: q, k and v are 3-D and hold packed sequences,
            one after the other along the axis of seqlen. Rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1`` of q
            attend to keys ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1] - 1``, as a problem of their own, with a d of
            its own. A sequence may be empty; (batch, ...) stands for (sequences, ...). They start with 0, do not
            decrease, and end within the axis, which is checked on the CPU. A check on the GPU would be a
            synchronisation: there other values give undefined results, but nothing outside of the arrays is touched.
            Rows after the last sequence belong to none: out = 0, lse = -inf. Not together with bias, mask, block_mask,
            kv_lengths and block_table.
        q_scale, k_scale, v_scale : array, optional
            float32: the factors of q, k and v, required where these are fp8: 1.0 if their numbers have none. Each
            broadcasts to (batch, num_heads_kv, ceil(seqlen_k / block)), in every layout. The block size is inferred:
            the power of two for which seqlen_k keys make as many blocks as the last axis has. So () is one number for
            the array, (num_heads_kv, 1) one for each head, and (num_heads_kv, seqlen_k) one for each key. With a
            `block_table` they are those of the pool: (num_pages, num_heads_kv, ceil(page_size / block)); with packed
            sequences, blocks are of all rows. That of q has num_heads and seqlen_q instead.
        seed, offset : int, optional
            They decide which weights dropout drops: needed with dropout, without effect otherwise. 0 to ``2 ** 64 - 1``
            and 0 to ``2 ** 32 - 1``. Calls that differ in either drop other weights: the seed may be the number of a
            layer, and the offset that of a step. A CUDA graph keeps those that it was captured with.
        out, lse, max, entropy : array, optional
            Written to and returned, as ``out=`` of NumPy's functions is: shape and dtype of the result, any strides,
            no memory in common with another argument.
        want : collection of {"max", "entropy"}, optional
            Row reductions to return besides out and lse. "max": the largest score of each row; the sink does not count.
            "entropy": ``-sum(P * log(P))`` of the weights before dropout, with the weight of the sink among them.
        **score_args : array
            The arrays that `score` and `mask` read, by the names that these have for them: of the dtype of q or of lse,
            int32, int64 or bool, any strides, up to four axes. An index outside of an axis counts as the nearest one.

        Returns
        -------
        ForwardResult
            ``out``: shape of q with head_dim_v as last axis and all batch axes, dtype of q. ``lse``: (..., num_heads,
            seqlen_q) in every layout, natural logarithm, float32 (float64 for float64). ``max``, ``entropy``: if
            wanted, like lse; -inf and 0 in a row that attends to no key.

        Raises
        ------
        TypeError
            Not an array, arrays of several libraries, a wrong dtype, an array that DLPack cannot export. These
            messages and the next begin with the argument's name and say what was got and what is expected.
        ValueError
            Shapes that do not fit, a value out of range, a result that is read-only or overlaps another argument.
        NotImplementedError
            Something the kernels do not do; the message names the limit and the remedy.
        ImportError
            Arrays of another library in CUDA memory, without CuPy; or a kernel to compile, without NVRTC.

        See Also
        --------
        backward : Gradients, from out and lse.
        jvp : The same, and its derivative in a direction.
        plan : Which kernels such a call runs.
        attention : The same in one call.

        References
        ----------
        Dao: FlashAttention-2 (2023), https://arxiv.org/abs/2307.08691, algorithm 1. The Notes
        of `FlashAttention` have the options.
        """
        arrays = {
            "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "kv_lengths": kv_lengths, "alibi_slopes": alibi_slopes,
            "sinks": sinks, "block_mask": block_mask, "block_table": block_table, "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "out": out,
            "lse": lse,
        }  # fmt: skip
        if score_args or self.options.score or self.options.mask_function:
            arrays |= check_given("forward", self.options, score_args)
        random = self.options.random(seed, offset)
        names: tuple[str, ...] = OUTPUTS
        if type(want) is not tuple or want or max is not None or entropy is not None:
            arrays |= {"max": max, "entropy": entropy}
            names = wanted_results(want, arrays)
        result_type = ForwardResult if names is OUTPUTS else named_tuple(ForwardResult, names)
        return result_type(*dispatch.compute(FORWARD, self.options, arrays, INPUTS, names, random))

    # fmt: off
    @overload
    def backward(
        self: FlashAttention[None], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, *,
        seed: Integer = None, offset: Integer = None, **arrays: Unpack[OfThreeGradients],
    ) -> Gradients[ArrayT, KeyT, ValueT]: ...
    @overload
    def backward(
        self: FlashAttention[None], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, *,
        need: Collection[str] = ..., seed: Integer = None, offset: Integer = None, **arrays: Unpack[OfGradients],
    ) -> NamedGradients[ArrayT, KeyT, ValueT]: ...
    @overload
    def backward(
        self: FlashAttention[WithFunction], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array,
        **arrays: Any,
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
        bias: Array | None = None,
        mask: Array | None = None,
        kv_lengths: Array | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        block_mask: Array | None = None,
        block_table: Array | None = None,
        cu_seqlens_q: Array | None = None,
        cu_seqlens_k: Array | None = None,
        q_scale: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        dlse: Array | None = None,
        dmax: Array | None = None,
        entropy: Array | None = None,
        dentropy: Array | None = None,
        need: Collection[str] = DEFAULT_NEED,
        seed: int | None = None,
        offset: int | None = None,
        dq: Array | None = None,
        dk: Array | None = None,
        dv: Array | None = None,
        dbias: Array | None = None,
        dalibi_slopes: Array | None = None,
        dscale: Array | None = None,
        dsoftcap: Array | None = None,
        dsinks: Array | None = None,
        **score_args: Array,
    ) -> Gradients | NamedGradients:
        """Gradients of ``sum(dout * out) + sum(dlse * lse)`` with respect to q, k, v, and what else is asked for.

        Scores S are computed again from q and k, tile by tile (algorithm 4 of the paper below): ``P = exp(S - lse)``,
        ``dV = P^T dO``, ``dP = dO V^T``, ``dS = P * (dP - delta)`` with ``delta = rowsum(dO * O) - dlse``,
        ``dQ = scale dS K``, ``dK = scale dS^T Q``. With grouped heads, dk and dv are sums over the group. The gradient
        of a sink is the sum of ``-exp(sink - lse) * delta`` over all rows of its head. Dropout acts on P where it makes
        dV, and on dP. The gradient of the bias is dS, summed over the axes along which the bias broadcasts; that of a
        slope is ``-sum(dS * abs(i + d - j))``. With x = ``scale * dot(q[i], k[j])``, t = ``tanh(x / softcap)`` and
        ``1 - t ** 2`` a factor of dS on its way to dQ, dK and here (1 without softcap), those of scale and softcap are
        ``sum(dS * (1 - t ** 2) * dot(q[i], k[j]))`` and ``sum(dS * (t - x / softcap * (1 - t ** 2)))``. With dmax and
        dentropy, ``dmax * max + dentropy * entropy`` adds to the sum, ``-P * (log(P) + entropy) * dentropy`` to dS.

        Parameters
        ----------
        dout : array
            Gradient with respect to out, of its shape and dtype. If v is None, dout and out are None, too, and so is
            dv. dout, out, lse and dlse do not broadcast: pass ``numpy.broadcast_to(dout, out.shape)``.
        q, k, v : array
            As `forward` took them.
        out, lse : array
            As `forward` returned them.
        bias, mask, kv_lengths, alibi_slopes, sinks, block_mask : array, optional
            As `forward` took them.
        block_table : array, optional
            Not served: gradients are those of contiguous keys and values.
        cu_seqlens_q, cu_seqlens_k : array, optional
            As `forward` took them.
        q_scale, k_scale, v_scale : array, optional
            Not served: there are no gradients of fp8 k and v.
        dlse : array, optional
            Gradient with respect to lse, of its shape and dtype, if anything was computed from lse. Rows whose lse is
            -inf get nothing from it.
        dmax : array, optional
            Gradient with respect to max, like lse: the first of the keys with the largest score gets it.
        entropy, dentropy : array, optional
            The entropy that `forward` returned, which dentropy needs, and the gradient with respect to it, like lse.
        need : collection of str, default ("dq", "dk", "dv")
            Gradients that are wanted, in any order; only these are computed. "dscale" may always be among them, and
            "dbias", "dalibi_slopes", "dsoftcap" and "dsinks" where there is a bias, and so on.
        seed, offset : int, optional
            As `forward` took them.
        dq, dk, dv, dbias, dalibi_slopes, dscale, dsoftcap, dsinks : array, optional
            Written to and returned: shapes and dtypes as below, no memory in common with another argument. A gradient
            with an array to write to is wanted, whatever `need` says.
        **score_args : array
            The arrays that `score` and `mask` read, as `forward` took them, and arrays for their gradients: that of an
            array named gamma is dgamma. Those of real numbers that `score` reads may be among `need`.

        Returns
        -------
        Gradients
            A named tuple of the gradients that are wanted, in this order. ``dq``, ``dk``, ``dv``: shapes and dtypes of
            q, k and v, in the memory that these are in, sums over the batch axes along which these broadcast; keys
            that no query attends to get zero. ``dbias``, ``dalibi_slopes``: shapes and dtypes of bias and alibi_slopes,
            as they were given; pairs that are hidden, be it by a bias of -inf, count for nothing. ``dscale``,
            ``dsoftcap``: shape (), dtype of lse. ``dsinks``: shape and dtype of sinks. All but the first three are
            always summed in the same order.

        Raises
        ------
        TypeError, ValueError, ImportError
            As `forward` does.
        NotImplementedError
            As `forward` does, and also with a `block_table`, or if k and v are fp8.

        See Also
        --------
        forward : Gives out and lse.
        backward_jvp : The derivatives of these gradients in a direction.
        double_backward : Their gradients.
        cuflash.testing.check_gradients : Holds them against differences.

        References
        ----------
        - Dao, Fu, Ermon, Rudra, Re: FlashAttention (2022), https://arxiv.org/abs/2205.14135, algorithm 4.
        - Dao: FlashAttention-2 (2023), https://arxiv.org/abs/2307.08691, algorithm 2.
        """
        if block_table is not None:
            raise NotImplementedError(
                f"block_table: got {type(block_table).__name__}, expected None: gradients are not given in pages; "
                "gather the pages of each batch entry into contiguous k and v and call forward and backward with these"
            )
        arrays = {
            "q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "bias": bias, "mask": mask,
            "kv_lengths": kv_lengths, "alibi_slopes": alibi_slopes, "sinks": sinks, "block_mask": block_mask,
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "q_scale": q_scale, "k_scale": k_scale,
            "v_scale": v_scale, "dlse": dlse,
        }  # fmt: skip
        if dmax is not None or entropy is not None or dentropy is not None:
            arrays |= {"dmax": dmax, "entropy": entropy, "dentropy": dentropy}
        results: dict[str, Array | None] = {"dq": dq, "dk": dk, "dv": dv}
        result_type: Callable[..., Gradients | NamedGradients] = Gradients
        of_functions = self.options.score_gradients
        if score_args or self.options.score or self.options.mask_function:
            given = check_given("backward", self.options, score_args, of_functions)
            results |= {name: x for name in of_functions if (x := given.pop(name)) is not None}
            arrays |= given
        plain = dbias is dalibi_slopes is dscale is dsoftcap is dsinks is None and len(results) == len(DEFAULT_NEED)
        if need is not DEFAULT_NEED or not plain:
            results |= {
                "dbias": dbias, "dalibi_slopes": dalibi_slopes, "dscale": dscale, "dsoftcap": dsoftcap,
                "dsinks": dsinks,
            }  # fmt: skip
            names = needed(need, arrays | self.options.numbers, results, of_functions)
            results, result_type = {name: results.get(name) for name in names}, named_tuple(Gradients, names)
        arrays |= results
        need = tuple(results)
        random = self.options.random(seed, offset)
        return result_type(*dispatch.compute(BACKWARD, self.options, arrays, _BACKWARD_INPUTS, need, random))

    # fmt: off
    @overload
    def jvp(
        self: FlashAttention[None], q: NumpyArray[ScalarT], k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **arrays: Unpack[JvpArrays],
    ) -> NumpyJvpResult[ScalarT]: ...
    @overload
    def jvp(
        self: FlashAttention[None], q: ArrayT, k: Array, v: Array, *, seed: Integer = None,
        offset: Integer = None, **arrays: Unpack[JvpArrays],
    ) -> JvpResult[ArrayT, ArrayT]: ...
    @overload
    def jvp(
        self: FlashAttention[WithFunction], q: NumpyArray[ScalarT], k: Array, v: Array, **arrays: Any
    ) -> NumpyJvpResult[ScalarT]: ...
    @overload
    def jvp(
        self: FlashAttention[WithFunction], q: ArrayT, k: Array, v: Array, **arrays: Any
    ) -> JvpResult[ArrayT, ArrayT]: ...
    # fmt: on

    def jvp(
        self, q: Array, k: Array, v: Array, *, seed: int | None = None, offset: int | None = None, **arrays: Array
    ) -> JvpResult:
        """Attention, and its derivative in the direction of tangents: a Jacobian-vector product.

        With ``P = softmax(S)``, ``tS = scale * (tq @ k.T + q @ tk.T) + tbias + ...`` through the soft cap or `score`:
        ``tlse = rowsum(P * tS)`` and ``tout = (P * (tS - tlse)) @ v + P @ tv``, in one pass over the keys. Pairs that
        are hidden count for nothing, whatever their tangents are.

        Parameters
        ----------
        q, k, v : array
            As `forward` takes them.
        seed, offset : int, optional
            As `forward` takes them. The tangent of lse is that before dropout, as lse is.
        **arrays : array, optional
            bias, mask and so on, and what `score` and `mask` read, as `forward` takes them; out, lse, tout and tlse, to
            be written to. And the tangents, of which one that is not given is zero and saves its products: tq, tk, tv,
            tbias, talibi_slopes, tsinks, and for an array gamma of real numbers that `score` reads tgamma, with the
            shapes and dtypes of what they are tangents of; tscale and tsoftcap, of shape () and the dtype of lse. With
            `cuflash.streamed` k and v, tk and tv are arrays in host memory, which are streamed with them.

        Returns
        -------
        JvpResult
            ``out`` and ``lse``, as `forward` gives them; ``tout`` and ``tlse``, like these. In a row that attends to no
            key both are 0, or tlse is the tangent of the sink.

        Raises
        ------
        TypeError, ValueError, ImportError
            As `forward` does.
        NotImplementedError
            As `backward` does, except that `jvp` takes a `block_table`, tk and tv being pools of pages as k and v are;
            and for CuPy arrays with head dimensions without a tile (`backward_jvp`: 512, 256 of float32 and 192 of
            float64 are the largest).

        See Also
        --------
        forward : The same without tangents.
        backward_jvp : The derivatives of gradients.
        hessian_vector_product : Both, one after the other.

        References
        ----------
        - Pearlmutter: Fast exact multiplication by the Hessian (1994), https://doi.org/10.1162/neco.1994.6.1.147.
        - These equations with dropout: docs/second-derivatives.md, "Definitions".
        """
        own = self.options.score_gradients
        tangents = tuple(f"t{name[1:]}" for name in own)
        check_tangent_names(self.options)
        given = checked_with_score_args("jvp", JvpArrays, self.options, arrays, tangents)
        by_name = {"q": q, "k": k, "v": v, **given}
        random = self.options.random(seed, offset)
        return JvpResult(*dispatch.compute(JVP, self.options, by_name, INPUTS, JVP.default, random))

    # fmt: off
    @overload
    def backward_jvp(
        self: FlashAttention[None], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, tout: Array,
        tlse: Array, *, seed: Integer = None, offset: Integer = None, **arrays: Unpack[OfThreeTangents],
    ) -> GradientTangents[ArrayT, KeyT, ValueT]: ...
    @overload
    def backward_jvp(
        self: FlashAttention[None], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array, tout: Array,
        tlse: Array, *, need: Collection[str] = ..., seed: Integer = None, offset: Integer = None,
        **arrays: Unpack[BackwardJvpArrays],
    ) -> NamedGradientTangents[ArrayT, KeyT, ValueT]: ...
    @overload
    def backward_jvp(
        self: FlashAttention[WithFunction], dout: Array, q: ArrayT, k: KeyT, v: ValueT, out: Array, lse: Array,
        tout: Array, tlse: Array, **arrays: Any,
    ) -> ScoreGradientTangents[ArrayT, KeyT, ValueT]: ...
    # fmt: on

    def backward_jvp(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        tout: Array,
        tlse: Array,
        *,
        need: Collection[str] = DEFAULT_NEED_TANGENTS,
        seed: int | None = None,
        offset: int | None = None,
        **arrays: Array,
    ) -> GradientTangents | NamedGradientTangents:
        """The derivatives of what `backward` gives, in the direction of tangents.

        With ``dS = P * (dP - delta)``: ``tdS = (tS - tlse) * dS + P * (tdP - tdelta)``, where ``tdP = dout @ tv.T +
        tdout @ v.T`` and ``tdelta = rowsum(dout * tout + tdout * out) - tdlse``; then ``tdq = scale * (tdS @ k + dS @
        tk)``, ``tdk = scale * (tdS.T @ q + dS.T @ tq)`` and ``tdv = (P * (tS - tlse)).T @ dout + P.T @ tdout``.

        Parameters
        ----------
        dout, q, k, v, out, lse : array
            As `backward` takes them.
        tout, tlse : array
            As `jvp` returned them for the same tangents.
        need : collection of str, default ("tdq", "tdk", "tdv")
            What is wanted, in any order: t and the name of a gradient of `backward`.
        seed, offset : int, optional
            As `forward` took them.
        **arrays : array, optional
            bias, mask and so on, what functions read, and the tangents, as `jvp` took them; dlse as `backward` takes
            it; tdout and tdlse, tangents of dout and dlse, zero if not given; and arrays to write results to.

        Returns
        -------
        GradientTangents
            A named tuple of what is wanted, in the order of the gradients, with their shapes and dtypes.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `jvp` does.

        See Also
        --------
        jvp : Gives tout and tlse.
        backward : The gradients themselves.
        hessian_vector_product, double_backward, jvp_backward : What this pass is used for.

        References
        ----------
        - Pearlmutter: Fast exact multiplication by the Hessian (1994), https://doi.org/10.1162/neco.1994.6.1.147.
        - These equations with dropout: docs/second-derivatives.md, "Definitions".
        """
        gradients = self.options.score_gradients
        check_tangent_names(self.options)
        own = tuple(f"t{name}" for name in gradients)
        given = checked_with_score_args(
            "backward_jvp", BackwardJvpArrays, self.options, arrays, (*(f"t{name[1:]}" for name in gradients), *own)
        )
        by_name = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "tout": tout, "tlse": tlse, **given}
        results = {name: by_name.pop(name) for name in (*(row.name for row in BACKWARD_JVP.rows), *own)}
        names = needed(need, by_name | self.options.numbers, results, gradients, prefix="t")
        by_name |= {name: results[name] for name in names}
        random = self.options.random(seed, offset)
        return named_tuple(GradientTangents, names)(
            *dispatch.compute(BACKWARD_JVP, self.options, by_name, _BACKWARD_JVP_INPUTS, names, random)
        )
