"""The backward pass: which kernels compute which gradients, in which order, and how their blocks share the work."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from cuflash.plan.architectures import (
    BACKWARD_FAMILIES,
    BIAS_FAMILIES,
    DQ_FAMILIES,
    MAXIMA_FAMILIES,
    SCORES_FAMILIES,
)
from cuflash.plan.block_index import add_block_index, add_tile_order, may_leave_out_tiles
from cuflash.plan.draft import SUMS_SCORE_ARGS, Draft
from cuflash.plan.families import (
    BACK_SECTION,
    BackwardFamily,
    KeysFamily,
    choose_family,
    family_of,
    may_make_dq_alone,
)
from cuflash.plan.scores import (
    ScoreGradients,
    add_key_sums,
    add_score_arg_helpers,
    add_scores,
    needs,
    num_summed,
    score_gradients,
    stored_and_sums,
)
from cuflash.plan.tiles import PAIR_BY_PAIR, ROLES, Role, Tile, tile_bytes, tiles_at_once
from cuflash.spec.inputs import OPTIONAL_INPUTS
from cuflash.spec.outputs import ROW_REDUCTION_SCRATCH

# Where more blocks cost extra work, a grid should have this many times the number of blocks that are resident at once.
# The first number is for blocks of equal length, the second for a causal mask. Measured on an H200 with one key/value
# head for 16 query heads, seqlen 4096, in TFLOP/s by the number of blocks that share the head: head_dim 64, full: 2
# blocks 549, 4 542, 8 532, 3 516, 5 488; head_dim 128, causal: 2 blocks 416, 4 468, 8 475, 16 451, 5 391. Eight of
# these heads have two waves of tiles: head_dim 128, causal: 1 block 522, 2 492, 4 473.
WAVES, CAUSAL_WAVES = 1.9, 4.0
# What it costs to share a tile of keys, in units of one step from a tile of queries to the next. Each block takes
# SPLIT_STEPS to begin and to end. The kernel that adds the partial sums takes SUM_STEPS, and SUM_STEPS_PER_PARTIAL for
# each; SUM_STEPS counts twice where only the tiles after whole waves are shared, because their blocks do not all end at
# the same time. On an H200 the numbers of blocks that follow from this are within 1 % of the best of 2 to 16 (2 heads
# of head_dim 256, seqlen 1024: 6 %). The pass is faster than without sharing by 2.9 % where 4 of 4096 tiles are shared
# (head_dim 64, seqlen 16384), by 2.2 % with 68 of 2048 (head_dim 128), by 0.8 % at seqlen 4096, and by 43 % with all of
# 64 tiles (causal, seqlen 4096, head_dim 64; 46 % at 128).
SPLIT_STEPS, SUM_STEPS, SUM_STEPS_PER_PARTIAL = 3, 6, 1
# Warps that an SM has at least in the preprocess kernel, which bounds the registers of each. Products of float64 need
# more registers, and so does Q, which stays in them while the first maxima of rows are found.
PREPROCESS_WARPS = {"float64": 16, "float32": 24, "others": 32}
PREPROCESS_WARPS_MAXIMA = 16
SOFTMAX_WARPS = 16  # warps of a block of the kernels that make gradients of softmax inputs
OF_KEYS = ("dk", "dv")  # gradients whose rows are keys
# The kernels that make the gradients of softmax inputs, one each.
SOFTMAX_KERNELS = {row.gradient: f"helpers/{row.name}.cu" for row in OPTIONAL_INPUTS if row.gradient_via == "softmax"}

# Defines of kernels of gradients in passes without a main kernel.
WITHOUT_MAIN = {
    **{f"CUFLASH_{name}": 0 for name in ("PAIRS_STATS", "SPLITS_GROUP", "SPLITS_TAIL", "CLEARS_AHEAD")},
    **{f"CUFLASH_{name}": 0 for name in ("DQ_BY_REDUCTION", "DQ_IN_ORDER", "REVERSED_ONE_IN")},
    "CUFLASH_BACK_SECTION": BACK_SECTION,
    **needs(()),
}


class _Main(NamedTuple):
    """The main kernel, whose blocks own keys: it makes dk and dv, and mostly dq."""

    family: BackwardFamily[Any]
    tile: Any
    summed: tuple[str, ...] = ()  # score gradients that it sums
    sums_score_args: bool = False  # whether it also sums the gradients of arrays that the score reads
    reduces_dq: bool = False  # whether its blocks add to the dq accumulator
    n_blocks: int = 0  # how many tiles of keys it has

    @property
    def writes_dbias(self) -> bool:
        """Whether its blocks write dbias, tile by tile."""
        return self.family.writes_dbias and "dbias" in self.summed


class _Rows(NamedTuple):
    """The main kernel, and the rows of the others, by `tiles.Role`; None where there is no such kernel."""

    main: _Main | None
    dq: Any
    scores: Any
    bias: Any
    maxima: Any
    of_bias: tuple[str, ...]  # the gradient that `bias` makes
    of_scores: ScoreGradients  # those that `scores` makes

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The rows that there are."""
        main = None if self.main is None else self.main.tile
        return tuple(tile for tile in (main, self.dq, self.scores, self.bias, self.maxima) if tile is not None)


def draft_backward(draft: Draft, tiles: tuple[Tile, ...] | None) -> None:
    """Add the kernels of the backward pass, with the tiles that are given, or those of the tables."""
    rows = _rows(draft, tiles)
    main, draft.tiles = rows.main, rows.tiles
    draft.defines |= {**WITHOUT_MAIN, "CUFLASH_NEEDS_DK": 1, "CUFLASH_NEEDS_DV": 1}
    if main is not None:
        _share_work(draft, main)
        draft.defines |= {
            "CUFLASH_NEEDS_DK": int("dk" in draft.need),
            "CUFLASH_NEEDS_DV": int("dv" in draft.need),
            "CUFLASH_SPLITS_GROUP": int(draft.run_time.group_splits > 1 or _leaves_wide_keys(draft, main.family)),
            "CUFLASH_SPLITS_TAIL": int(draft.run_time.tail_splits > 1),
        }
        set_order(draft, main.family, main.tile, reduces_dq=main.reduces_dq)
    if not draft.tiles and not SOFTMAX_KERNELS.keys() & set(draft.need):
        return

    may_be_ordered = _may_be_ordered(rows)
    if main is not None and may_be_ordered:  # before the preprocess kernel, which clears what an order needs
        _prepare_main(draft, main, rows.maxima)
        if draft.run_time.group_splits == 1:
            add_tile_order(draft, main.tile, "query_index")
    helper = _add_delta(draft, rows)
    if rows.scores is not None:
        _add_scores(draft, rows)
    if main is not None:
        if main.sums_score_args:
            add_score_arg_helpers(draft, helper, SUMS_SCORE_ARGS, stores=False)
        if not may_be_ordered:
            _prepare_main(draft, main, rows.maxima)
        _add_main(draft, main, helper)
    if rows.bias is not None:
        _add_bias(draft, rows)
    if rows.dq is not None:
        _add_dq(draft, rows)
    if main is not None:
        add_postprocess(draft, main.family, main.tile, helper, main.n_blocks, main.reduces_dq)


def set_order(draft: Draft, family: KeysFamily[Any], main: Any, *, reduces_dq: bool) -> None:
    """Set in which order the blocks that own keys start, and how they add to dq, or to tdq."""
    draft.set(head_section=family.head_section(draft, main))
    draft.set(clear_ahead=family.clear_ahead(draft, main) if reduces_dq else 0)
    draft.defines |= {
        "CUFLASH_DQ_BY_REDUCTION": int(reduces_dq),
        "CUFLASH_DQ_IN_ORDER": int(family.dq_in_order(main)),
        "CUFLASH_REVERSED_ONE_IN": family.reversed_one_in(draft.problem, main),
        "CUFLASH_CLEARS_AHEAD": int(draft.run_time.clear_ahead > 0),
        **family.defines,
    }


# ---- rows ------------------------------------------------------------------------------------------------------------


def _rows(draft: Draft, tiles: tuple[Tile, ...] | None) -> _Rows:
    """The rows that are given, or those of the tables: first that of the main kernel, then of what it leaves."""
    given: dict[Role, Any] = {tile.role: tile for tile in tiles or ()}
    main_row, dq, scores, bias, maxima = (given.get(role) for role in ROLES)
    main = _main_of(draft, main_row, chooses=not tiles)
    dq = _dq_row(draft, main, dq)
    if main is not None:
        main = _with_sums(draft, main, dq, may_sum=scores is None)
        left = ScoreGradients.of(draft, main.summed, of_args=not main.sums_score_args)
    else:
        left = ScoreGradients.of(draft)
    main_row = None if main is None else main.tile
    bias = _bias_row(draft, main_row, bias, left, chooses=scores is None)
    of_scores = left if bias is None else left._replace(stored=())
    scores = _scores_row(draft, scores, of_scores)
    if "max" not in draft.problem.row_reductions or scores is not None:  # whose kernels run before the main one
        maxima = None
    elif maxima is None:
        maxima = _first(family.choose(draft, main_row) for family in MAXIMA_FAMILIES)
    return _Rows(main, dq, scores, bias, maxima, left.stored, of_scores)


def _first(tiles: Iterable[Any]) -> Any:
    """The first tile that is not None."""
    return next((tile for tile in tiles if tile is not None), None)


def _main_of(draft: Draft, row: Any, *, chooses: bool) -> _Main | None:
    """The main kernel, if there is one: by the given row, or the one that this chooses."""
    need, family = set(draft.need), None
    if not chooses:
        draft.reasons.append(draft.origin)
        family = None if row is None else family_of(BACKWARD_FAMILIES, row)
    elif need & {"dk", "dv"} or ("dq" in need and may_make_dq_alone(BACKWARD_FAMILIES, draft)):
        family, row, reason = choose_family(BACKWARD_FAMILIES, draft)
        draft.reasons.append(reason)
    if family is None or not need & {"dq", "dk", "dv"}:
        return None
    missing = " and ".join(name for name in OF_KEYS if name not in need)
    if missing and family.makes_both:
        draft.reasons.append(f"{missing}: not stored, but computed; that kernel makes the products of both")
    return _Main(family, family.configured(row, draft))


def _dq_row(draft: Draft, main: _Main | None, dq: Any) -> Any:
    """The row of the kernel that makes dq alone, if there is one: the given row, or the one that this chooses."""
    if "dq" not in draft.need or (main is not None and _makes_dq(draft, main)):
        return None
    if dq is None:
        _, dq, reason = choose_family(DQ_FAMILIES, draft)
        draft.reasons.append(reason)
    if main is None:
        draft.reasons.append("dq alone has a kernel of its own, which makes three products and not five")
    return dq


def _makes_dq(draft: Draft, main: _Main) -> bool:
    """Whether the main kernel makes dq: not if dq has to be deterministic and its blocks add to it in any order."""
    family = main.family
    in_order = family.dq_in_order(main.tile) or family.stores_dq
    return family.makes_dq and (in_order or not draft.problem.deterministic)


def _with_sums(draft: Draft, main: _Main, dq: Any, *, may_sum: bool) -> _Main:
    """The main kernel with all that it sums: score gradients, if it may sum these, and dq without a kernel of dq."""
    family, problem = main.family, draft.problem
    summed = _summed_by_main(draft, main) if may_sum else ()
    sums_score_args = may_sum and _sums_score_args(draft, main)
    tile = family.summing(main.tile, summed)
    tile = family.summing_score_args(draft, tile) if sums_score_args else tile
    reduces_dq = "dq" in draft.need and dq is None and not family.stores_dq
    n_blocks = problem.array_batch * problem.num_heads_kv * draft.tiles_of(problem.seqlen_k, tile.block_n)
    return _Main(family, tile, summed, sums_score_args, reduces_dq, n_blocks)


def _sums_score_args(draft: Draft, main: _Main) -> bool:
    """Whether the main kernel sums the wanted gradients of arrays that the score reads."""
    if not draft.score_arg_gradients:
        return False
    why_not = main.family.why_not_score_args(draft, main.tile)
    hoisted, unhoisted = draft.program, draft.problem.unhoisted
    if hoisted.tables and (why_not is not None or hoisted.reads_pairs):
        draft.program = unhoisted
        if main.family.why_not_score_args(draft, main.tile) is None:
            reason = why_not or "per-row and per-key values, and sums of gradients, leave few registers for tables"
            draft.reasons.append(f"score: nothing is hoisted where its gradients are summed: {reason}")
            return True
        draft.program = hoisted
    if why_not is not None:
        draft.reasons.append(f"{', '.join(draft.score_arg_gradients)}: not by {main.family.kernel}: {why_not}")
    return why_not is None


def _summed_by_main(draft: Draft, main: _Main) -> tuple[str, ...]:
    """The score gradients that the main kernel makes: the stored one, and all wanted sums or none."""
    family = main.family
    summed: list[str] = []
    for names in stored_and_sums(score_gradients(draft)):
        reasons_against = {name: family.why_not_summed(draft, main.tile, name) for name in names}
        if all(why_not is None for why_not in reasons_against.values()):
            summed += names
        draft.reasons += [f"{name}: not by {family.kernel}: {why}" for name, why in reasons_against.items() if why]
    return tuple(summed)


def _bias_row(draft: Draft, main: Any, bias: Any, left: ScoreGradients, *, chooses: bool) -> Any:
    """The row of the kernel that makes the stored gradient alone, if the main one does not and there is a kernel."""
    if not left.stored:
        return None
    if bias is not None:
        return family_of(BIAS_FAMILIES, bias).configured(bias, draft.problem)
    return _first(family.choose(draft, main) for family in BIAS_FAMILIES) if chooses else None


def _scores_row(draft: Draft, scores: Any, gradients: ScoreGradients) -> Any:
    """The row of the kernels that make these, if there are any: the given row, or the one that this chooses."""
    if not any(gradients):
        return None
    if scores is None:
        _, scores, reason = choose_family(SCORES_FAMILIES, draft)
        draft.reasons.append(reason)
    return scores


# ---- how blocks share the work ---------------------------------------------------------------------------------------


def _share_work(draft: Draft, main: _Main) -> None:
    """Where tiles are few, split the query heads of a key/value head, or the queries of a tile of keys."""
    family, n_blocks = main.family, main.n_blocks
    # Whether tiles are few depends on other batch entries, and sums of partial results have other bits than those of
    # one block. So with `batch_invariant` blocks share nothing.
    if n_blocks == 0 or not family.shares_tiles or draft.problem.batch_invariant:
        return
    draft.set(group_splits=_group_splits(draft, family, main.tile, n_blocks))
    if draft.run_time.group_splits == 1 and family.splits_tail and not draft.has_wide(*OF_KEYS):
        _share_tail(draft, main, n_blocks)


def _group_splits(draft: Draft, family: BackwardFamily[Any], main: Tile, n_blocks: int) -> int:
    """Where tiles of keys are few: how many blocks split the query heads of a key/value head evenly."""
    problem, resident = draft.problem, tiles_at_once(main, draft.device)
    waves = WAVES if n_blocks >= WAVES * resident or problem.window_right is None else CAUSAL_WAVES
    most = family.heads_of_block(draft, main)
    divisors = (n for n in range(1, problem.group_size + 1) if problem.group_size % n == 0)
    enough = (n for n in divisors if n * n_blocks >= waves * resident and n * most >= problem.group_size)
    return next(enough, max(1, problem.group_size))  # without query heads, blocks clear dk and dv


def _share_tail(draft: Draft, main: _Main, n_blocks: int) -> None:
    """Let blocks share the tiles of keys that do not fill the device (all, or the last wave), if that is faster."""
    problem, resident = draft.problem, tiles_at_once(main.tile, draft.device)
    steps = draft.steps_of_tile(main.tile)
    tiles = problem.batch * problem.num_heads_kv * -(-problem.mean_sequence.seqlen_k // main.tile.block_n)
    # What a block mask leaves of a tile is known on the device. It decides by tile, where tiles are many.
    shares_many = tiles >= 2 * resident and not (main.summed or main.sums_score_args or problem.dropout)
    min_shared_steps = main.family.min_shared_steps if problem.block_mask is not None and shares_many else 0
    # Under a causal mask the longest tiles start first, so that only short ones are left at the end.
    are_equal = (problem.window_left is None) == (problem.window_right is None)
    are_equal = are_equal and (problem.block_mask is None or min_shared_steps > 0)
    shared = tiles % resident if are_equal else tiles
    if shared == 0 or steps == 0:
        return

    def duration(splits: int) -> float:
        waves, longest = -(-shared * splits // resident), steps / splits
        loop_steps = waves * longest if are_equal else max(longest, shared * steps / 2 / resident)
        if splits == 1:
            return waves * SPLIT_STEPS + loop_steps
        sums = SUM_STEPS * (1 if shared == tiles else 2) + SUM_STEPS_PER_PARTIAL * splits
        return waves * SPLIT_STEPS + loop_steps + sums

    splits = min(range(1, min(steps, resident) + 1), key=duration)
    if splits > 1:
        # Packed: the same fraction of the table is shared as of the tiles.
        draft.set(whole_tiles=n_blocks - n_blocks * shared // tiles, tail_splits=splits)
        if min_shared_steps > 0:
            draft.defines["CUFLASH_MIN_SHARED_STEPS"] = min_shared_steps


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _add_delta(draft: Draft, rows: _Rows) -> Tile:
    """Add the preprocess kernel, whose delta all others read, and the kernels of gradients of softmax inputs.

    Returns the tile whose fragments tell the helper kernels how accumulators are laid out in memory.
    """
    first = draft.tiles[0] if draft.tiles else choose_family(SCORES_FAMILIES, draft)[1]
    draft.add_tables(first)
    helper = first
    if rows.main is not None:
        helper = rows.main.family.accumulator_layout(first)
    elif rows.dq is not None:
        helper = family_of(DQ_FAMILIES, rows.dq).accumulator_layout(first)
    delta = helper
    if rows.dq is not None:  # the preprocess kernel has one block for each tile of the kernels that read delta
        delta = helper.changed(block_m=max(helper.block_m, rows.dq.block_m))
    clears = rows.main is not None and rows.main.writes_dbias and (num_summed(draft) > 1 or may_leave_out_tiles(draft))
    add_preprocess(draft, first, delta, draft.need, finds_maxima=rows.maxima is None, clears_dbias=clears)
    return helper


def add_preprocess(
    draft: Draft,
    first: Tile,
    delta: Tile,
    need: Collection[str],
    *,
    finds_maxima: bool = False,
    clears_dbias: bool = False,
) -> None:
    """Add the preprocess kernel, which makes delta, and the kernels of gradients of softmax inputs in `need`.

    Its blocks serve the rows of the tile `delta`; `first` is the tile of the first main kernel. With `finds_maxima`, it
    finds the first keys with the largest scores of rows, if their gradients are taken. With `clears_dbias` it clears
    dbias, which the main kernel writes.
    """
    problem = draft.problem
    dims = {"CUFLASH_DIM_MULTIPLE": first.dim_multiple}
    rows = draft.tiles_of(problem.seqlen_q, delta.block_m) * delta.block_m
    draft.set(stats_rows=rows)
    draft.defines["CUFLASH_STATS_BLOCK"] = delta.block_m
    draft.scratch["row_stats"] = draft.heads * rows * 2
    draft.scratch["row_sums"] = draft.heads * rows * 2
    if problem.row_reductions:
        draft.scratch |= dict.fromkeys(ROW_REDUCTION_SCRATCH, draft.heads * rows)
    # Many warps have loads under way at a time; what rows of large lse need beyond these registers is spilled.
    warps = PREPROCESS_WARPS.get(problem.dtype, PREPROCESS_WARPS["others"])
    finds_maxima = finds_maxima and "max" in problem.row_reductions
    if finds_maxima:
        warps = min(warps, PREPROCESS_WARPS_MAXIMA)
    defines = {
        **dims,
        **PAIR_BY_PAIR,
        "CUFLASH_MIN_BLOCKS": max(1, warps // delta.num_warps),
        **{name: first.defines().get(name, 1) for name in ("CUFLASH_BF16_TERMS", "CUFLASH_COLUMN_BLOCKS")},
        "CUFLASH_LSE_HAS_SINKS": int(draft.has_sinks),
    }
    defines |= {"CUFLASH_FINDS_MAXIMA": 1} if finds_maxima else {}
    defines |= {"CUFLASH_CLEARS_DBIAS": 1} if clears_dbias else {}
    draft.add("helpers/backward_preprocess.cu", delta, draft.heads * (rows // delta.block_m), 0, **defines)
    softmax_defines = {**dims, "CUFLASH_NUM_WARPS": SOFTMAX_WARPS, "CUFLASH_MIN_BLOCKS": 1}
    for source in (source for name, source in SOFTMAX_KERNELS.items() if name in need):
        draft.add(source, delta, problem.num_heads, 16 * SOFTMAX_WARPS, **softmax_defines)


def _add_scores(draft: Draft, rows: _Rows) -> None:
    """Add the kernels of the score gradients that no other kernel makes."""
    family = family_of(SCORES_FAMILIES, rows.scores)
    draft.models.append(family.model)
    add_scores(draft, rows.scores, family.source, rows.of_scores)


def _add_bias(draft: Draft, rows: _Rows) -> None:
    """Add the kernel that makes the stored gradient alone."""
    family = family_of(BIAS_FAMILIES, rows.bias)
    draft.models.append(family.model)
    family.add(draft, rows.bias, None if rows.main is None else rows.main.tile, rows.of_bias)


def _may_be_ordered(rows: _Rows) -> bool:
    """Whether the blocks that own keys might start in another order: nothing but dq, dk and dv depends on it."""
    main = rows.main
    if main is None or main.summed or main.sums_score_args:
        return False
    return main.family.orders_tiles and all(row is None for row in (rows.scores, rows.bias, rows.maxima))


def _prepare_main(draft: Draft, main: _Main, maxima: Any) -> None:
    """Add what the kernel whose blocks own keys reads: tensor maps, operands, row maxima, the block-sparse index."""
    main.family.prepare(draft, main.tile)
    if maxima is not None:
        family_of(MAXIMA_FAMILIES, maxima).add(draft, maxima, main.tile)
    add_block_index(draft, main.tile, "query_index")


def _add_main(draft: Draft, main: _Main, helper: Tile) -> None:
    """Add the kernel whose blocks own keys, and those that end the sums that it makes."""
    family, tile, summed, run_time = main.family, main.tile, main.summed, draft.run_time
    shared = (main.n_blocks - run_time.whole_tiles) * run_time.group_splits * run_time.tail_splits
    blocks = shared + run_time.whole_tiles
    makes = (*summed, "score_args") if main.sums_score_args else summed
    options = needs(summed) | {"CUFLASH_NEEDS_SCORE_ARGS": SUMS_SCORE_ARGS if main.sums_score_args else 0}
    if main.writes_dbias:
        adds = num_summed(draft) > 1
        options["CUFLASH_ADDS_DBIAS"] = int(adds)
        how = "adds tiles of dS to it, in any order" if adds else "stores it, tile by tile"
        draft.reasons.append(f"dbias: the main kernel {how}")
    draft.models.append(family.model)
    family.add(draft, tile, blocks, makes, options)
    if summed and not family.writes_dbias:
        add_key_sums(draft, helper, blocks, summed)
    if main.sums_score_args:
        _store_score_args(draft, helper)


def _store_score_args(draft: Draft, helper: Tile) -> None:
    """Add the kernels that turn the main kernel's exact sums into gradients of what the score reads."""
    if any(filled.table.name in draft.summed_score_args for filled in draft.tables):
        draft.add_table_helper(helper, "led_on", CUFLASH_NEEDS_SCORE_ARGS=SUMS_SCORE_ARGS)
    add_score_arg_helpers(draft, helper, SUMS_SCORE_ARGS, stores=True)
    names = ", ".join(draft.score_arg_gradients)
    draft.reasons.append(f"{names}: summed by the main kernel: exact sums, whose order does not matter")


def _add_dq(draft: Draft, rows: _Rows) -> None:
    """Add the kernel that makes dq alone."""
    dq, is_wide = rows.dq, draft.has_wide("dq")
    m_blocks = draft.heads * draft.tiles_of(draft.problem.seqlen_q, dq.block_m)
    add_block_index(draft, dq, "key_index")
    makes, options = ("wide_dq",) if is_wide else (), {"CUFLASH_DQ_WIDE": int(is_wide)}
    family = family_of(DQ_FAMILIES, dq)
    draft.models.append(family.model)
    family.add(draft, dq, m_blocks, makes, options)
    if rows.main is not None and rows.main.family.makes_dq:
        draft.reasons.append(
            "deterministic: dq has a kernel of its own that adds in a fixed order and recomputes the weights"
        )


def add_postprocess(
    draft: Draft,
    family: KeysFamily[Any],
    main: Tile,
    helper: Tile,
    n_blocks: int,
    reduces_dq: bool,
) -> None:
    """Add the postprocess kernel, which turns the sums or partial sums of the blocks of `main` into results."""
    # How many warps store a partial dk or dv: all warps, where they divide both; otherwise one for each 16 keys.
    partial_warps = helper.num_warps if helper is main else main.block_n // 16
    of_keys = _postprocess_keys(draft, family, main, n_blocks, partial_warps // helper.num_warps)
    of_dq = _postprocess_dq(draft, family, main) if reduces_dq else _Postprocess()
    shared_bytes = max(of_keys.shared_bytes, of_dq.shared_bytes)
    if shared_bytes:
        defines = {"CUFLASH_DIM_MULTIPLE": main.dim_multiple, "CUFLASH_TILE_WARPS": partial_warps}
        wide = tuple(name for name in ("dq", *OF_KEYS) if draft.has_wide(name))
        defines |= {f"CUFLASH_{name.upper()}_WIDE": int(name in wide) for name in ("dq", *OF_KEYS)}
        makes = tuple(f"wide_{name}" for name in wide)
        blocks = of_keys.blocks + of_dq.blocks
        draft.add("helpers/backward_postprocess.cu", helper, blocks, shared_bytes, makes, **defines)


class _Postprocess(NamedTuple):
    """What the postprocess kernel needs to turn sums into results."""

    blocks: int = 0
    shared_bytes: int = 0


def _postprocess_keys(draft: Draft, family: KeysFamily[Any], main: Tile, n_blocks: int, divisors: int) -> _Postprocess:
    """Add scratch memory for the sums that blocks leave of dk and dv, if they do; `divisors` blocks round a tile."""
    run_time, (dim, dim_v) = draft.run_time, draft.padded_dims(main)
    splits = max(run_time.group_splits, run_time.tail_splits)
    results = len(set(draft.need) & set(OF_KEYS))
    is_wide = _leaves_wide_keys(draft, family)
    if not results or (splits == 1 and not is_wide):
        return _Postprocess()
    shared = n_blocks - run_time.whole_tiles
    draft.scratch["dkv_partials"] = shared * splits * main.block_n * (dim + dim_v)
    if splits > 1:
        loop = "query heads of a key/value head" if run_time.group_splits > 1 else "queries of a tile of keys"
        last = "the last " if run_time.whole_tiles else ""
        draft.reasons.append(f"{splits} blocks share the {loop}: {last}{shared} tiles of keys are few")
    if is_wide:
        draft.reasons.append("dk and dv leave blocks as sums: not all of them are rounded to the dtype of k and v")
    shared_bytes = tile_bytes(main.block_n // divisors, max(dim, dim_v), main.element_bytes)
    return _Postprocess(shared * divisors * results, shared_bytes)


def _postprocess_dq(draft: Draft, family: KeysFamily[Any], main: Tile) -> _Postprocess:
    """Add the dq accumulator, with what its order and its clearing take."""
    problem, run_time, (dim, _) = draft.problem, draft.run_time, draft.padded_dims(main)
    m_blocks = draft.heads * (run_time.stats_rows // main.block_m)
    elements = draft.heads * run_time.stats_rows * dim
    if run_time.clear_ahead:
        elements += problem.array_batch * problem.num_heads_kv * run_time.group_splits
        draft.reasons.append(f"blocks clear the dq accumulator {run_time.clear_ahead} heads ahead of its use")
    if family.dq_in_order(main):
        elements += m_blocks + int(problem.is_packed)  # packed: a word that says whether sequences overlap
        name = "tdq" if draft.pass_.has_tangents else "dq"
        draft.reasons.append(f"deterministic: tiles of keys add to {name} in order")
    draft.scratch["dq_accumulator"] = elements
    return _Postprocess(m_blocks, tile_bytes(main.block_m, dim, main.element_bytes))


def _leaves_wide_keys(draft: Draft, family: KeysFamily[Any]) -> bool:
    """Whether blocks leave sums of dk and dv because not all are rounded to the dtype of k and v."""
    stores = isinstance(family, BackwardFamily) and not family.shares_tiles
    return not stores and draft.has_wide(*OF_KEYS)
