"""What is to be computed: shapes, dtypes, strides and the mask of one attention problem, validated once.

A `Problem` is plain data, made from the static `Options` and from anything with `shape`, `strides` and `dtype` (NumPy
and CuPy arrays alike). Everything downstream (the oracle, the CPU path, plans, kernels) reads the mask from it in one
form: row i attends to key j where

    i + diagonal - window_left <= j <= i + diagonal + window_right        (a bound that is None does not exist)
    and j < kv_lengths[batch] and mask[batch, head, i, j]
    and block_mask[batch, head, i // block_size[0], j // block_size[1]].

Where the diagonal follows `kv_lengths`, `diagonal` is that of an entry with all seqlen_k keys; others have their own
(`aligned_to`).

For packed sequences, each of which has its own diagonal, `batch` is their number; `seqlen_q` and `seqlen_k` are the
rows of all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from cuflash.arrays.array_info import (
    DTYPES,
    FLOAT8,
    ITEMSIZE,
    Operand,
    Shaped,
    block_of_scales,
    broadcast_operand,
    check_dtype,
    layout_of,
    softmax_dtype_of,
    user_shape,
)
from cuflash.arrays.checks import counted, type_error, value_error
from cuflash.score_mod import (
    Program,
    ScoreFunction,
    ScoreTangents,
    Traced,
    hoisted_program_of,
    program_of,
    tangents_of,
)
from cuflash.spec.inputs import BY_NAME, FP8_SCALES, NAMES, NUMBER_ROWS, Given, OptionalArrays, OptionalInput
from cuflash.spec.options import (
    MAX_SEQLEN,
    Options,
    Origin,
    check_block_size,
    diagonal_of,
    rounded_rate,
    window_of,
)
from cuflash.spec.outputs import BY_NAME as OUTPUT_ROWS
from cuflash.spec.outputs import GRADIENTS, Output
from cuflash.spec.score_args import check_alone, operands_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

SMALLEST_SCALE = 2.0**-149  # in float32: a scale that is closer to 0 counts as 0
PAGE_SIZES = (16, 32, 64, 128, 256)
TYPICAL_HEADS, TYPICAL_SEQLEN = 128, 4096  # of the problem for which tiles are chosen with batch_invariant


def not_packed_error(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: got it together with cu_seqlens_q, expected one of them; for {name}, pad the sequences to one length "
        "and make them the entries of a batch"
    )


@dataclass(frozen=True, kw_only=True)
class Problem(Given):
    """One attention problem; the fields follow the names of docs/design.md. Frozen and hashable: it keys plans."""

    dtype: str
    layout: str
    ndim: int
    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    # Of the diagonal: it ends at the last key, begins at the first one, or ends at the last key that exists.
    alignment: Literal["bottom_right", "top_left", "lengths"]
    diagonal: int  # 0 for packed sequences, each of which has its own
    window_left: int | None
    window_right: int | None
    deterministic: bool
    precision: str
    dropout: float  # a multiple of 1 / 65536
    origin: Origin  # of what dropout counts; zeros without dropout
    q: Operand
    k: Operand
    v: Operand
    block_size: tuple[int, int] = (0, 0)  # (rows, keys) of the blocks of the block mask; zeros without one
    score: ScoreFunction | None = None  # the caller's functions: one makes scores, the other hides pairs
    mask_function: Traced | None = None
    score_args: tuple[tuple[str, Operand], ...] = ()  # the arrays that they read, by name
    wide: tuple[str, ...] = ()  # those of out, dq, dk and dv that are given in the dtype of the softmax, to be added up
    # The inputs, numbers and score_mod args that have tangents, in a pass that takes some; None in all others.
    moved: tuple[str, ...] | None = None
    # The row reductions (`outputs.ROW_REDUCTIONS`) that a forward pass gives, or whose gradients a backward pass takes.
    row_reductions: tuple[str, ...] = ()
    shares_device: bool = False  # whether other kernels run at the same time, as transfers of ranks do
    batch_invariant: bool = False  # whether the bits of a sequence depend on nothing but the sequence

    @property
    def options(self) -> Options:
        """Options with which the same arrays make this problem again."""
        window = (self.window_left, self.window_right)
        is_fixed, hides_later = self.alignment == "top_left", self.window_right == 0 or self.seqlen_k <= 1
        is_top_left = is_fixed and self.diagonal == 0 and hides_later
        follows = self.follows_lengths and self.block_table is None  # with a block table it does so without a word
        return Options(
            causal="top_left" if is_top_left else "lengths" if follows else False,
            window=None if window == (None, None) else window,
            layout=self.layout,  # type: ignore[arg-type]
            deterministic=self.deterministic,
            batch_invariant=self.batch_invariant,
            precision=self.precision,
            dropout=self.dropout,
            block_size=self.block_size if self.block_mask is not None else Options.block_size,
            diagonal=self.diagonal if is_fixed and not is_top_left else None,
            score=self.score,
            mask_function=self.mask_function,
            **self.numbers,
            origin=self.origin,
            wide=self.wide,
            shares_device=self.shares_device,
        )

    @property
    def has_functions(self) -> bool:
        """Whether a score_mod makes scores or hides pairs."""
        return self.score is not None or self.mask_function is not None

    @property
    def program(self) -> Program:
        """The program of these functions, for the dtypes of the arrays that they read."""
        return program_of(self.score, self.mask_function, self._score_arg_types)

    def score_tangents(self, moved: Collection[str]) -> ScoreTangents:
        """The tangents of the score and of its derivatives where scaled products, and the arrays `moved`, have some."""
        assert self.score is not None
        names = tuple(name for name in self.program.on_numpy().differentiable if name in moved)
        return tangents_of(self.score, self._score_arg_types, names, True)

    @property
    def hoisted(self) -> Program:
        """The program with tables in place of subexpressions of the score that take few values, for any lengths.

        Packed sequences share a row of a table that is as long as all of them, because only the device knows how long
        each is.
        """
        if self.moved is not None and self.score is not None:
            return self._with_tangents
        functions = (self.score, self.mask_function, self._score_arg_types)
        return hoisted_program_of(*functions, self.softmax_dtype, not self.is_packed)

    @property
    def moved_score_args(self) -> tuple[str, ...]:
        """The arrays that the score reads that have tangents."""
        return tuple(name for name, _ in self.score_args if name in (self.moved or ()))

    @property
    def _with_tangents(self) -> Program:
        """The program with the tangents of the score, for an argument that has tangents of arrays after these."""
        types = {name: (axes, dtype) for name, axes, dtype in self._score_arg_types}
        arrays = tuple((f"t{name}", *types[name]) for name in self.moved_score_args)
        is_expression = self.score is not None and self.score.root is not None
        return replace(
            self.program,
            arrays=(*self.program.arrays, *arrays),
            moved=self.moved_score_args,
            tangents=self.score_tangents(self.moved or ()) if is_expression else None,
        )

    @property
    def unhoisted(self) -> Program:
        """The program without tables, for the argument of the one with tables."""
        if self.moved is not None and self.score is not None:
            return self._with_tangents
        return self.program.with_space_for(self.hoisted.tables)

    @property
    def _score_arg_types(self) -> tuple[tuple[str, int, str], ...]:
        return tuple((name, len(operand.shape), operand.dtype) for name, operand in self.score_args)

    @property
    def score_arg_gradients(self) -> tuple[str, ...]:
        """The gradients of arrays that the score reads."""
        return tuple(f"d{name}" for name in self.program.differentiable) if self.score is not None else ()

    @property
    def score_arg_tangents(self) -> tuple[str, ...]:
        """The names of tangents of arrays that the score reads."""
        return tuple(f"t{name[1:]}" for name in self.score_arg_gradients)

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of all gradients, in the order in which `backward` gives them."""
        return (*GRADIENTS, *self.score_arg_gradients)

    @property
    def follows_lengths(self) -> bool:
        """Whether the diagonal of entry b is kv_lengths[b] - seqlen_q."""
        return self.alignment == "lengths"

    @property
    def why_no_gradients(self) -> str | None:
        """What keeps the problem from having a backward pass; None if it has one."""
        if self.block_table is not None:
            return "a block_table"
        if not self.has_float8:
            return None
        return f"fp8 {'q, k' if self.multiplies_float8 else 'k'} and v"

    @property
    def has_float8(self) -> bool:
        """Whether k and v are fp8, times k_scale and v_scale."""
        return self.k.dtype in FLOAT8

    @property
    def multiplies_float8(self) -> bool:
        """Whether q is fp8, too, times q_scale: out is then bfloat16, and products may be fp8."""
        return self.q.dtype in FLOAT8

    def scale_block(self, name: str) -> int:
        """How many neighbouring keys, of a page if there are pages, share one number of `k_scale` or `v_scale`.

        0 if all keys of a head share one, and without such an array. The same holds for queries and `q_scale`.
        """
        operand: Operand | None = getattr(self, name)
        if operand is None or operand.strides[2] == 0:
            return self.page_size if operand is not None and operand.strides[0] and name != "q_scale" else 0
        return block_of_scales(operand.shape[2], getattr(self, name[0]).shape[2])

    @property
    def page_size(self) -> int:
        """Keys of a page; 0 where the keys of an entry lie in one piece."""
        return self.k.shape[2] if self.block_table is not None else 0

    def aligned_to(self, length: int) -> Problem:
        """The problem with the diagonal of an entry that has so many keys."""
        return replace(self, diagonal=length - self.seqlen_q) if self.follows_lengths else self

    def of_length(self, seqlen_k: int) -> Problem:
        """The problem with so many keys, and the same bounds of the window."""
        if seqlen_k == self.seqlen_k:
            return self
        keeps_diagonal = self.is_packed or self.alignment == "top_left"
        diagonal = self.diagonal if keeps_diagonal else self.diagonal + seqlen_k - self.seqlen_k
        return replace(self, seqlen_k=seqlen_k, diagonal=diagonal)

    def with_values(self, columns: int) -> Problem:
        """The problem with contiguous values of so many columns."""
        batch, heads, rows, _ = self.k.shape
        of_axes = (rows * heads, 1, heads) if self.layout == "bshd" else (heads * rows, rows, 1)
        strides = (*(columns * stride for stride in of_axes), 1)
        v = Operand(shape=(batch, heads, rows, columns), strides=strides, dtype=self.k.dtype)
        return replace(self, head_dim_v=columns, v=v, v_scale=None)

    @property
    def is_packed(self) -> bool:
        """Whether the arrays hold packed sequences, one after the other."""
        return self.cu_seqlens_q is not None

    @property
    def has_pairs(self) -> bool:
        """Whether there is any pair of a query and a key; else arrays that functions read may have no elements."""
        return all((self.batch, self.num_heads, self.seqlen_q, self.seqlen_k))

    @property
    def counts_as_packed(self) -> bool:
        """Whether the sequences are packed, or must have the bits that they would have if they were."""
        return self.is_packed or self.batch_invariant

    @property
    def typical(self) -> Problem:
        """The problem that tiles are chosen for: with `batch_invariant` one of sizes that tell nothing of the call.

        It fills every device, and its sequences are long, because that is where time matters.
        """
        if not self.batch_invariant or not self.num_heads_kv:
            return self
        return replace(
            self,
            batch=1,
            num_heads=TYPICAL_HEADS * self.group_size,
            num_heads_kv=TYPICAL_HEADS,
            seqlen_q=TYPICAL_SEQLEN,
            seqlen_k=TYPICAL_SEQLEN,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
        )

    @property
    def array_batch(self) -> int:
        """Length of the batch axis of the arrays."""
        return 1 if self.is_packed else self.batch

    def of_sequence(self, seqlen_q: int, seqlen_k: int) -> Problem:
        """The problem of one packed sequence of these lengths, with the strides of all of them."""
        return replace(
            self,
            batch=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            diagonal=seqlen_k - seqlen_q if self.alignment == "bottom_right" else 0,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
        )

    @property
    def mean_sequence(self) -> Problem:
        """The problem itself, or one packed sequence of mean length, rounded up: plans are made for that."""
        if not self.is_packed:
            return self
        return self.of_sequence(*(-(-n // max(self.batch, 1)) for n in (self.seqlen_q, self.seqlen_k)))

    @property
    def softmax_dtype(self) -> str:
        """dtype of scores, lse and delta: float64 for float64 inputs, else float32."""
        return softmax_dtype_of(self.dtype)

    def dtype_of(self, name: str) -> str:
        """dtype of an array over head dimensions, or of its tangent."""
        return self.softmax_dtype if name.removeprefix("t") in self.wide else self.dtype

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_heads_kv if self.num_heads_kv else 1

    @property
    def kept_scale(self) -> float:
        """The factor of a weight that dropout keeps."""
        return 1 / (1 - self.dropout)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out and dout as the caller gets them."""
        return self.shape_of(OUTPUT_ROWS["out"])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse as the caller gets it: (..., heads, seqlen_q) in every layout."""
        return self.shape_of(OUTPUT_ROWS["lse"])

    def shape_of(self, result: Output) -> tuple[int, ...]:
        """Shape of a result as the caller gets it, except of gradients of optional arrays, which have theirs."""
        like: Operand | None = getattr(self, result.gradient_of) if result.has_head_dim and result.gradient_of else None
        sizes = tuple(getattr(self, axis) for axis in result.axes or ()) if like is None else like.shape
        if not result.has_head_dim:
            return sizes[4 - self.ndim :]
        batch, heads, rows, columns = sizes
        return user_shape(batch, heads, rows, columns, self.ndim, self.layout)

    @property
    def has_window(self) -> bool:
        """Whether all queries attend to equally many keys, except for those near the first key or the last one."""
        return self.window_left is not None and self.window_right is not None

    def key_range(self, row: int) -> tuple[int, int]:
        """First and one past the last key that the window lets query `row` attend to, within [0, seqlen_k]."""
        first = 0 if self.window_left is None else row + self.diagonal - self.window_left
        stop = self.seqlen_k if self.window_right is None else row + self.diagonal + self.window_right + 1
        stop = min(max(stop, 0), self.seqlen_k)
        return min(max(first, 0), stop), stop

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs inside the window, over all heads; masks and `kv_lengths` are not looked into.

        Packed sequences are taken as equally long.
        """
        if self.is_packed:
            return self.batch * self.mean_sequence.visible_pairs

        def keys_before(distance: int) -> int:
            """Summed over queries: the keys that come before the one at this distance from the diagonal."""
            return _sum_of_clipped(self.diagonal + distance, self.seqlen_q, self.seqlen_k)

        hidden = 0 if self.window_left is None else keys_before(-self.window_left)
        stop = self.seqlen_q * self.seqlen_k if self.window_right is None else keys_before(self.window_right + 1)
        return max(stop - hidden, 0) * self.batch * self.num_heads

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the two products of the forward pass over visible pairs."""
        return 2 * self.visible_pairs * (self.head_dim + self.head_dim_v)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of the five products of the backward pass over visible pairs."""
        return 2 * self.visible_pairs * (3 * self.head_dim + 2 * self.head_dim_v)

    @property
    def jvp_flops(self) -> int:
        """Those of jvp: 6 products if q, k and v have tangents, 2 if nothing has."""
        of_qk = 1 + self._moves("q", "scale") + self._moves("k")
        of_pv = 1 + (not set(self.moved or ()) <= {"v"}) + self._moves("v")
        return 2 * self.visible_pairs * (of_qk * self.head_dim + of_pv * self.head_dim_v)

    @property
    def backward_jvp_flops(self) -> int:
        """Those of backward_jvp: 10 products if q, k and v have tangents."""
        of_q, of_k = self._moves("q", "scale"), self._moves("k")
        of_head_dim, of_head_dim_v = 3 + 2 * of_q + 2 * of_k, 2 + self._moves("v")
        return 2 * self.visible_pairs * (of_head_dim * self.head_dim + of_head_dim_v * self.head_dim_v)

    def _moves(self, *names: str) -> bool:
        return not set(names).isdisjoint(self.moved or ())

    @property
    def forward_bytes(self) -> int:
        """Fewest bytes the forward pass moves through device memory: inputs read once, out and lse written once."""
        inputs = [self.q, *(getattr(self, name) for name in NAMES), *(operand for _, operand in self.score_args)]
        keys_bytes = self.k.nbytes + self.v.nbytes
        if self.block_table is not None:  # pages of others are not read
            rows = self.batch * self.num_heads_kv * self.seqlen_k
            keys_bytes = rows * (self.head_dim + self.head_dim_v) * ITEMSIZE[self.k.dtype]
        return sum(x.nbytes for x in inputs if x is not None) + keys_bytes + self.results_bytes

    @property
    def backward_bytes(self) -> int:
        """Fewest bytes the backward pass moves: its inputs, out, dout and lse read once, dq, dk and dv written once."""
        dout = math.prod(self.out_shape) * ITEMSIZE[self.dtype]
        return self.forward_bytes + dout + self.q.nbytes + self.k.nbytes + self.v.nbytes

    @property
    def results_bytes(self) -> int:
        """Bytes of out and lse."""
        return (
            math.prod(self.out_shape) * ITEMSIZE[self.dtype] + math.prod(self.lse_shape) * ITEMSIZE[self.softmax_dtype]
        )

    @property
    def tangent_bytes(self) -> int:
        """Bytes of the tangents of inputs, numbers and score_mod args."""
        score_args = dict(self.score_args)
        models = [score_args.get(name) or getattr(self, name) for name in self.moved or ()]
        return sum(x.nbytes if isinstance(x, Operand) else ITEMSIZE[self.softmax_dtype] for x in models)

    @property
    def naive_bytes(self) -> int:
        """Bytes of one seqlen_q x seqlen_k matrix of scores over all heads, which the plain formula stores.

        Packed sequences are taken as equally long.
        """
        if self.is_packed:
            return self.batch * self.mean_sequence.naive_bytes
        return self.batch * self.num_heads * self.seqlen_q * self.seqlen_k * ITEMSIZE[self.softmax_dtype]


def make_problem(
    options: Options,
    q: Shaped,
    k: Shaped,
    v: Shaped,
    *,
    score_args: Any = None,
    **optional_inputs: Unpack[OptionalArrays],
) -> Problem:
    """Validate the inputs of one call against each other.

    `score_args` maps names to the arrays that score_mod and mask_mod read.

    Raises TypeError (a dtype), ValueError (a shape, a size) or NotImplementedError (a combination), naming the
    argument, what was got and what is expected. Values are not looked at.
    """
    given = {name: cast("Shaped", array) for name in NAMES if (array := optional_inputs.get(name)) is not None}
    block_table, block_mask = given.get("block_table"), given.get("block_mask")
    is_packed = "cu_seqlens_q" in given or "cu_seqlens_k" in given
    if block_table is not None and is_packed:
        raise not_packed_error("block_table")
    _check_dtypes_and_axes(q, k, v, "cu_seqlens_q" if is_packed else None if block_table is None else "block_table")
    layout = options.layout
    q4, k4, v4 = layout_of(q, layout), layout_of(k, layout), layout_of(v, layout)
    batch, num_heads, seqlen_q, head_dim = q4.shape
    _, num_heads_kv, seqlen_k, _ = k4.shape
    if block_table is not None:
        seqlen_k = _check_pool(block_table, given.get("kv_lengths"), q, k, k4, batch)
    _check_shapes(q4, k4, v4, has_pages=block_table is not None)
    _check_sizes(layout, q4, k4, {"q": seqlen_q, "k" if block_table is None else "block_table": seqlen_k})

    if is_packed:
        batch = _number_of_sequences(len(q.shape), given.get("cu_seqlens_q"), given.get("cu_seqlens_k"))
        for name in given:
            if not BY_NAME[name].goes_packed:
                raise not_packed_error(name)
    check_alone(options, given)
    dtype = "bfloat16" if q4.dtype in FLOAT8 else q4.dtype
    softmax_dtype = softmax_dtype_of(dtype)
    sizes = {"batch": batch, "num_heads": num_heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    operands: dict[str, Any] = {
        name: _input_operand(BY_NAME[name], array, dtype, sizes)
        for name, array in given.items()
        if name not in FP8_SCALES
    }
    operands |= _scale_operands(given, q4, k4, v4)
    block_size = _block_size(options, given)
    if block_mask is not None:
        operands["block_mask"] = _block_mask_operand(block_mask, block_size, sizes)

    left, right = window_of(options, seqlen_q, seqlen_k)
    has_pairs = all((batch, num_heads, seqlen_q, seqlen_k))
    return Problem(
        dtype=dtype,
        layout=layout,
        ndim=len(q.shape),
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=v4.shape[3],
        alignment=_alignment(options, given, batch),
        diagonal=0 if is_packed else diagonal_of(options, seqlen_q, seqlen_k),
        window_left=left,
        window_right=right,
        deterministic=options.deterministic,
        batch_invariant=options.batch_invariant,
        precision=options.precision,
        dropout=rounded_rate(options.dropout),
        origin=options.origin_of(num_heads),
        q=q4,
        k=k4,
        v=v4,
        block_size=block_size,
        **_numbers_in(dtype, softmax_dtype, options, head_dim),
        **operands,
        score=options.score,
        mask_function=options.mask_function,
        score_args=operands_of(options, score_args or {}, dtype, has_pairs=has_pairs),
        wide=options.wide,
        shares_device=options.shares_device,
    )


def _check_shapes(q: Operand, k: Operand, v: Operand, *, has_pages: bool) -> None:
    """Check that q, k and v have the same lengths of the axes that they share."""
    as_q, as_k = [("k", k, 0, "batch"), ("v", v, 0, "batch")], [(1, "num_heads_kv"), (2, "seqlen_k")]
    if has_pages:
        as_q, as_k = [], [(0, "num_pages"), (1, "num_heads_kv"), (2, "page_size")]
    for name, operand, axis, what in (*as_q, ("k", k, 3, "head_dim")):
        if operand.shape[axis] != q.shape[axis]:
            raise value_error(name, f"{what} {operand.shape[axis]}", f"{what} {q.shape[axis]} as q has")
    for axis, what in as_k:
        if v.shape[axis] != k.shape[axis]:
            raise value_error("v", f"{what} {v.shape[axis]}", f"{what} {k.shape[axis]} as k has")


def _check_sizes(layout: str, q: Operand, k: Operand, seqlens: Mapping[str, int]) -> None:
    """Check the head dimension, the lengths of sequences, by the array that has them, and the numbers of heads."""
    num_heads, num_heads_kv, head_dim = q.shape[1], k.shape[1], q.shape[3]
    if head_dim < 1:
        raise value_error("q", f"last axis of length {head_dim}", "a head dimension of at least 1")
    for name, seqlen in seqlens.items():
        if seqlen > MAX_SEQLEN:
            raise value_error(name, f"seqlen {seqlen}", f"at most {MAX_SEQLEN}")
    if num_heads % num_heads_kv if num_heads_kv else num_heads:
        raise value_error("k", counted(num_heads_kv, "head"), _divisors(layout, q, k))


def _block_size(options: Options, given: Collection[str]) -> tuple[int, int]:
    """Queries and keys of a block of the block mask; (0, 0) without one."""
    if "block_mask" not in given:
        return (0, 0)
    if "block_table" in given:
        raise NotImplementedError(
            "block_mask: got it together with block_table, expected one of them; give the pairs of its blocks as a "
            "boolean mask"
        )
    return check_block_size(options.block_size)


def _divisors(layout: str, q: Operand, k: Operand) -> str:
    """What a message expects as the number of heads of k."""
    (_, heads, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
    expected = f"a divisor of the {counted(heads, 'head')} of q"
    if 0 < seqlen_k < heads_kv and seqlen_q < heads and seqlen_q % seqlen_k == 0:
        other = "bshd" if layout == "bhsd" else "bhsd"
        expected += f"; with layout={other!r} q has {counted(seqlen_q, 'head')}, and k {seqlen_k}"
    return expected


def _alignment(options: Options, given: Collection[str], batch: int) -> Literal["bottom_right", "top_left", "lengths"]:
    """How the diagonal lies. Packed sequences have no other keys than those that exist."""
    is_packed, by_lengths = "cu_seqlens_q" in given, options.causal == "lengths"
    if by_lengths and not is_packed and "kv_lengths" not in given:
        expected = f"lengths of shape (batch,) = ({batch},), which causal='lengths' needs"
        raise value_error("kv_lengths", "None", expected)
    if options.causal == "top_left" or options.diagonal is not None:
        return "top_left"
    return "lengths" if "block_table" in given or (by_lengths and not is_packed) else "bottom_right"


def _check_axes(name: str, array: Shaped, other: str | None) -> None:
    """Refuse more or fewer axes than one pass takes; `other` is an input that rules out any further batch axes."""
    count = len(array.shape)
    if count > 4 and other is not None:
        raise NotImplementedError(
            f"{name}: got {count - 3} batch axes before that of the heads together with {other}, expected one of "
            "them; reshape them to a batch, as one axis"
        )
    if not 2 <= count <= 4:
        expected = "an array of two axes or more, (..., heads, seqlen, head_dim)" if count < 2 else "at most 4 axes"
        raise value_error(name, f"{count}-D shape {tuple(array.shape)}", expected)


def _check_dtypes_and_axes(q: Shaped, k: Shaped, v: Shaped, other: str | None) -> None:
    """Check dtypes and numbers of axes, of each array and against each other; `other` is as in `_check_axes`."""
    given = {"q": q, "k": k, "v": v}
    for name, array in given.items():
        if array.dtype.name not in (*DTYPES, *FLOAT8):
            allowed = f"float16, bfloat16, float32 or float64, or {' or '.join(FLOAT8)}"
            if name != "q":  # which is one of these
                allowed = str(q.dtype) if q.dtype.name in FLOAT8 else f"{q.dtype} as q has, or {' or '.join(FLOAT8)}"
            remedy = f": cuflash.fp8({name}, 'e4m3') for bytes that are fp8" if array.dtype.name == "uint8" else ""
            raise type_error(name, f"dtype {array.dtype}", allowed + remedy)
        _check_axes(name, array, other)
    model, expected = ("k", k.dtype) if k.dtype.name in FLOAT8 and q.dtype.name not in FLOAT8 else ("q", q.dtype)
    for name in ("k", "v"):
        array = given[name]
        if array.dtype != expected:
            raise type_error(name, f"dtype {array.dtype}", f"{expected} as {model} has")
        if len(array.shape) != len(q.shape):
            raise value_error(name, f"{len(array.shape)}-D shape {tuple(array.shape)}", f"{len(q.shape)}-D as q is")


def check_differentiable(problem: Problem) -> None:
    """Refuse the backward pass of pages, and of fp8 k and v."""
    check_movable(problem, "the backward pass", "gradients")
    if problem.block_table is not None:
        raise NotImplementedError(
            "block_table: got one for the backward pass, expected None: gradients are not given in pages; gather "
            "the pages of each batch entry into contiguous k and v"
        )


def check_movable(problem: Problem, pass_: str = "jvp", derivatives: str = "tangents") -> None:
    """Refuse derivatives with respect to fp8 k and v."""
    if problem.has_float8:
        raise NotImplementedError(
            f"k: got dtype {problem.k.dtype} for {pass_}, expected numbers of at least 16 bits: {derivatives} of k and "
            f"v would be rounded to fp8, to 3 or 4 significant bits; give cuflash.dequantize(k, k_scale), and the "
            f"others likewise, to all passes"
        )


def _input_operand(row: OptionalInput, array: Shaped, dtype: str, sizes: Mapping[str, int]) -> Operand:
    """An optional input as kernels read it, checked against its row."""
    check_dtype(row.name, array, row.dtypes_with(dtype), row.hint)
    targets = [tuple(sizes[axis] for axis in shape) for shape in row.shapes]
    if row.shapes and not row.broadcasts and tuple(array.shape) not in targets:
        named = (f"({', '.join(shape)}{',' * (len(shape) == 1)})" for shape in row.shapes)
        expected = " or ".join(f"{axes} = {target}" for axes, target in zip(named, targets, strict=True))
        raise value_error(row.name, f"shape {tuple(array.shape)}", expected)
    return broadcast_operand(row.name, array, targets[-1] if targets else tuple(array.shape))


def _block_mask_operand(array: Shaped, block_size: tuple[int, int], sizes: Mapping[str, int]) -> Operand:
    """A block mask over (batch, heads, blocks of q, blocks of k)."""
    num_blocks = (-(-sizes["seqlen_q"] // block_size[0]), -(-sizes["seqlen_k"] // block_size[1]))
    # The last two axes are blocks: broadcast, they would be a mask of other blocks.
    if tuple(array.shape[-2:]) != num_blocks:
        expected = f"(..., ceil(seqlen_q / {block_size[0]}), ceil(seqlen_k / {block_size[1]})) = (..., "
        expected += f"{num_blocks[0]}, {num_blocks[1]}), for block_size={block_size}"
        raise value_error("block_mask", f"shape {tuple(array.shape)}", expected)
    target = (sizes["batch"], sizes["num_heads"], *num_blocks)
    return broadcast_operand("block_mask", array, target, "(batch, num_heads, blocks of q, blocks of k)")


def _scale_operands(given: Mapping[str, Shaped], q: Operand, k: Operand, v: Operand) -> dict[str, Operand]:
    """Those of `FP8_SCALES` that are given, each of which an fp8 array requires."""
    operands = {}
    for name, of in zip(FP8_SCALES, (q, k, v), strict=True):
        if name in given:
            first = "num_pages" if "block_table" in given and of is not q else "batch"
            operands[name] = _scale_operand(name, given[name], of, first)
        elif of.dtype in FLOAT8:
            expected = f"the scale of {name[0]}, whose dtype is {of.dtype}: {name}=1.0 if its numbers have none"
            raise value_error(name, "None", expected)
    return operands


def _scale_operand(name: str, array: Shaped, of: Operand, first: str) -> Operand:
    """One of `FP8_SCALES` over the first two axes of q, k or v and blocks of its rows."""
    if of.dtype not in FLOAT8:
        raise value_error(name, "an array", f"None, since {name[0]} has dtype {of.dtype}: multiply by it instead")
    check_dtype(name, array, BY_NAME[name].dtypes)
    keys = of.shape[2]
    count = array.shape[-1] if array.shape else 1
    heads, rows = ("num_heads", "queries") if name[0] == "q" else ("num_heads_kv", "keys")
    axes = f"({first}, {heads}, ceil({rows} / block)), where block is a power of two and {rows} = {keys}"
    if count not in (1, keys) and not block_of_scales(count, keys):
        raise value_error(name, f"shape {tuple(array.shape)}", f"a shape that broadcasts to {axes}")
    return broadcast_operand(name, array, (*of.shape[:2], count), axes)


def _numbers_in(dtype: str, softmax_dtype: str, options: Options, head_dim: int) -> dict[str, Any]:
    """The numbers of a problem by name, checked to be in the ranges of its dtype; None for those that are not given."""
    numbers = dict(options.numbers)
    if numbers["scale"] is None:
        numbers["scale"] = head_dim**-0.5
    for row in NUMBER_ROWS:
        smallest, largest, expected = row.range_of(dtype)
        if (number := numbers[row.name]) is not None and not smallest <= number <= largest:
            raise value_error(row.name, number, expected)
    # Kernels treat a scale of 0 as a case of its own, and they get the scale rounded to float32.
    if softmax_dtype == "float32" and abs(numbers["scale"]) < SMALLEST_SCALE:
        numbers["scale"] = 0.0
    return numbers


def _check_pool(block_table: Shaped, kv_lengths: Shaped | None, q: Shaped, k: Shaped, pool: Operand, batch: int) -> int:
    """Check a block table and the shape of its pool, and return the number of keys that fit into the table."""
    check_dtype("block_table", block_table, ("int32",), BY_NAME["block_table"].hint)
    if len(block_table.shape) != 2 or block_table.shape[0] != batch:
        expected = f"(batch, max_pages), with batch = {batch}"
        raise value_error("block_table", f"shape {tuple(block_table.shape)}", expected)
    if kv_lengths is None:
        raise value_error("kv_lengths", "None", f"lengths of shape (batch,) = ({batch},), which a block_table needs")
    if len(q.shape) != 4:
        raise value_error("q", f"{len(q.shape)}-D shape {tuple(q.shape)}", "a 4-D array, which a block_table needs")
    num_pages, _, page_size, _ = pool.shape
    if num_pages < 1:
        raise value_error("k", f"shape {tuple(k.shape)}", "a pool of at least one page, which a block_table needs")
    if page_size not in PAGE_SIZES:
        expected = f"{', '.join(map(str, PAGE_SIZES[:-1]))} or {PAGE_SIZES[-1]} keys a page"
        raise value_error("k", f"{counted(page_size, 'key')} a page in shape {tuple(k.shape)}", expected)
    return int(block_table.shape[1]) * page_size


def _sum_of_clipped(first: int, count: int, most: int) -> int:
    """The sum of so many consecutive integers, each of which is clipped to [0, most]."""
    start, stop = (min(max(x, 0), most) for x in (first, first + count))
    return (start + stop - 1) * (stop - start) // 2 + most * max(0, first + count - max(first, most))


def check_pages(problem: Problem, block_table: NDArray[Any], kv_lengths: NDArray[Any]) -> None:
    """Check those entries of a block table in host memory that belong to keys that exist."""
    import numpy as np

    num_pages, first_keys = problem.k.shape[0], np.arange(0, problem.seqlen_k, problem.page_size)
    pages = block_table[first_keys < kv_lengths[:, None]]
    outside = pages[(pages < 0) | (pages >= num_pages)]
    if outside.size:
        expected = f"0 to num_pages - 1 = {num_pages - 1}, where kv_lengths say that there are keys"
        raise value_error("block_table", f"an entry {outside[0]}", expected)


def scales_of_rows(problem: Problem, name: str, scale: NDArray[Any] | None) -> NDArray[Any] | None:
    """One of `FP8_SCALES` as (batch or pages, heads, rows of q, k or v), a view where no two rows share one."""
    import numpy as np

    operand: Operand | None = getattr(problem, name)
    if scale is None or operand is None:
        return None
    block, rows = problem.scale_block(name), getattr(problem, name[0]).shape[2]
    whole = np.broadcast_to(scale, operand.shape)
    if block > 1:
        return whole.repeat(block, axis=2)[:, :, :rows]
    return whole if block else np.broadcast_to(whole[:, :, :1], (*operand.shape[:2], rows))


def _number_of_sequences(ndim: int, cu_seqlens_q: Shaped | None, cu_seqlens_k: Shaped | None) -> int:
    """The number of packed sequences, from the arrays that say where they start."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        names = ("cu_seqlens_q", "cu_seqlens_k")
        missing, other = names if cu_seqlens_q is None else reversed(names)
        raise value_error(missing, "None", f"an array, which {other} needs as well")
    both = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    if ndim != 3:
        raise value_error("q", f"a {ndim}-D array", "a 3-D one, of packed sequences, since there is a cu_seqlens_q")
    for name, starts in both:
        check_dtype(name, starts, ("int32",), BY_NAME[name].hint)
        if len(starts.shape) != 1 or starts.shape[0] < 1:
            raise value_error(name, f"shape {tuple(starts.shape)}", "(sequences + 1,)")
    (count_q,), (count_k,) = cu_seqlens_q.shape, cu_seqlens_k.shape
    if count_q != count_k:
        raise value_error("cu_seqlens_k", f"shape ({count_k},)", f"({count_q},) as cu_seqlens_q has")
    return int(count_q) - 1


def gradient_operand(row: OptionalInput, problem: Problem, array: Shaped) -> Operand:
    """The gradient of an optional input as kernels read it: stride 0 on the axes that it is summed over."""
    return broadcast_operand(row.gradient, array, tuple(getattr(problem, axis) for axis in row.shapes[-1]))
