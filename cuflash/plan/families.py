"""Families of kernels: each serves some problems on some devices, says why not others, and adds its kernels to a plan.

`cuflash.plan.architectures` lists the architectures, each of which lists its families.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar, get_args

from cuflash.plan.block_index import add_block_index
from cuflash.plan.draft import Draft
from cuflash.plan.tiles import Row, Tile, choose_row
from cuflash.plan.traffic import Model
from cuflash.spec.outputs import OUTPUTS
from cuflash.spec.problem import Problem

# How sequences may be stored. With `batch_invariant` a sequence has the same bits in each of these ways, so a family
# has to serve all of them, also in a call that has none.
_PACKED, _PAGES = "packed sequences", "pages"
ANY_CALL = ", which a call that is batch_invariant has to count on"
# What some families do not serve, besides optional inputs: its name in plans, and whether a problem has it.
_FEATURES: dict[str, Callable[[Problem], bool]] = {
    "dropout": lambda problem: problem.dropout > 0,
    _PACKED: lambda problem: problem.is_packed,
    _PAGES: lambda problem: problem.page_size > 0,
}

BACK_SECTION = 16  # this many heads that iterate backwards (`BackwardFamily.reversed_one_in`) are side by side


class Family(ABC, Generic[Row]):
    """A way to compute a pass: a main kernel, named `kernel`, with tiles of type `tile`, and its helper kernels."""

    kernel: ClassVar[str]
    tile: ClassVar[type[Tile]]  # as `Row` of its base class says
    rows: ClassVar[tuple[Any, ...]] = ()  # all of its table, where that is the same for every problem
    tf32_rows: ClassVar[tuple[Any, ...]] = ()  # with precision="tf32", where that differs
    has_functions: ClassVar[bool] = False  # it serves score_mod and mask_mod
    serves_no_values: ClassVar[bool] = False  # it serves ``v=None``
    has_float8: ClassVar[bool] = False  # q, k and v may be fp8, which it makes wider
    multiplies_float8: ClassVar[bool] = False  # they are all fp8, which it multiplies as they are
    reads_keys_once: ClassVar[bool] = False  # it reads a key once for all query heads that share it
    model: ClassVar[Model | None] = None  # how `cuflash.plan.traffic` models what its main kernel moves, if it does
    known: tuple[str, ...] | None = None  # `Architecture.known`
    # The row reductions that it makes, or in the backward pass takes the gradients of.
    row_reductions: ClassVar[tuple[str, ...]] = ()
    unknown: ClassVar[tuple[str, ...]] = ()  # optional inputs, numbers and `_FEATURES` that it does not know

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        rows = [x for base in vars(cls).get("__orig_bases__", ()) for x in get_args(base) if isinstance(x, type)]
        if rows and "tile" not in vars(cls):
            cls.tile = rows[0]

    @property
    def source(self) -> str:
        """The file of the main kernel."""
        return f"{self.kernel}.cu"

    def table(self, problem: Problem) -> tuple[Row, ...]:
        """The rows to choose from."""
        return self.tf32_rows if self.tf32_rows and problem.precision == "tf32" else self.rows

    def alternatives(self, problem: Problem) -> tuple[Tile, ...]:
        """Rows of all tables that compute the problem as its own do: from the same products, in the same precision."""
        return (*self.rows, *self.tf32_rows) or self.table(problem)

    def accumulator_layout(self, main: Row) -> Tile:
        """The tile whose fragments tell the helper kernels how its results are laid out in memory."""
        return main

    def why_unknown(self, problem: Problem) -> str | None:
        """Which options of a problem it does not know; None if it knows all."""
        features = [name for name in self.unknown if name in _FEATURES and _FEATURES[name](problem)]
        unknown = [*problem.given(name for name in self.unknown if name not in _FEATURES), *features]
        if unknown:
            return f"it knows no {' and no '.join(unknown)}"
        if not problem.batch_invariant:
            return None
        # No decode kernel serves packed sequences, and none for tangents on 9.0 reads pages.
        storages = (*[_PACKED] * (not self.reads_keys_once), *[_PAGES] * (problem.moved is None))
        unknown = [name for name in storages if name in self.unknown]
        return f"it knows no {' and no '.join(unknown)}{ANY_CALL}" if unknown else None

    def why_not(self, draft: Draft) -> str | None:
        """Why it does not serve a problem: None if it does, "" if the plan need not tell."""
        return None

    def why_not_served(self, draft: Draft) -> str | None:
        """The same, including score_mod and mask_mod, fp8 numbers and ``v=None``."""
        if draft.problem.head_dim_v == 0 and not self.serves_no_values:
            return "it needs values"
        if unknown := [name for name in draft.problem.row_reductions if name not in self.row_reductions]:
            return f"it knows no {' and no '.join(unknown)}"
        if draft.problem.has_functions and not self.has_functions:
            return "it knows no functions that make scores or hide pairs"
        if unknown := [name for name in draft.problem.acting if self.known is not None and name not in self.known]:
            return f"it knows no {' and no '.join(unknown)}"
        if draft.problem.multiplies_float8 and not (self.has_float8 or self.multiplies_float8):
            return ""
        why_not = self.why_not(draft)
        if why_not is None and draft.problem.has_float8 and not (self.has_float8 or self.multiplies_float8):
            return "it knows no fp8 keys and values"
        return why_not


class ForwardFamily(Family[Row]):
    """A family of the forward pass, of that with tangents, or of tdq. Most have blocks that own queries."""

    outputs: ClassVar[tuple[str, ...]] = OUTPUTS  # the results that it can make, besides reductions
    # Of a pass with tangents: it also makes partial results, in the dtype of sums, and reads keys in pages.
    serves_all_tangents: ClassVar[bool] = False

    def why_not_served(self, draft: Draft) -> str | None:
        if unmade := [name for name in draft.need if name not in (*self.outputs, *self.row_reductions)]:
            return f"it makes no {' and no '.join(unmade)}"
        if draft.problem.moved is not None and not self.serves_all_tangents:
            if draft.problem.wide:
                return "it rounds results to the dtype of q, and these are to be merged or added"
            if draft.problem.page_size:
                return "it reads no pages"
        return super().why_not_served(draft)

    def draft(self, draft: Draft, tile: Row) -> None:
        """Add the kernels of the pass: unless a family says otherwise, one with a block for each tile of queries."""
        add_block_index(draft, tile, "key_index")
        blocks = draft.heads * draft.tiles_of(draft.problem.seqlen_q, tile.block_m)
        draft.add_main(self.source, tile, blocks)


class KeysFamily(Family[Row]):
    """A family of a backward pass, whose blocks own keys."""

    defines: ClassVar[dict[str, int]] = {}  # of all kernels of the pass: how the main one reads memory
    makes_dq_alone: ClassVar[bool] = False  # where it alone of dq, dk and dv (or their tangents) is wanted

    def configured(self, main: Row, draft: Draft) -> Row:
        """The row as this problem needs it."""
        return main

    def dq_in_order(self, main: Row) -> bool:
        """Whether blocks add to dq, or to tdq, in a fixed order."""
        return False

    def head_section(self, draft: Draft, main: Row) -> int:
        """How many heads have their blocks side by side in the launch order."""
        return draft.run_time.head_section

    def reversed_one_in(self, problem: Problem, main: Row) -> int:
        """One head of this many runs backwards from the last query, 0: none (kernels/common/softmax/backward.cuh)."""
        return 0

    def clear_ahead(self, draft: Draft, main: Row) -> int:
        """How many heads ahead in launch order a block clears accumulators of dq; 0: a kernel clears them.

        At least as many as are side by side (splits of a group count as heads): then all blocks of a head have
        started before the first block of the head whose accumulators they clear.
        """
        return 0


def may_make_dq_alone(families: Iterable[KeysFamily[Any]], draft: Draft) -> bool:
    """Whether one of these serves a problem, and makes dq, or tdq, alone: rather than a family of dq."""
    return any(family.makes_dq_alone and family.why_not_served(draft) is None for family in families)


class BackwardJvpFamily(KeysFamily[Row], ForwardFamily[Row]):
    """A family of the tangents of gradients: of those of dk and dv and, in some, of that of dq."""

    def adds_to_tdq(self, draft: Draft, main: Row) -> bool:
        """Whether blocks add to tdq in memory; otherwise tdq has a kernel of its own."""
        return not draft.problem.deterministic or self.dq_in_order(main)

    def draft(self, draft: Draft, tile: Row) -> None:
        """Add the kernel, whose blocks own keys."""
        add_block_index(draft, tile, "query_index")
        problem = draft.problem
        blocks = problem.array_batch * problem.num_heads_kv * draft.tiles_of(problem.seqlen_k, tile.block_n)
        draft.add_main(self.source, tile, blocks)


class BackwardFamily(KeysFamily[Row]):
    """A family of the backward pass: its blocks make dk and dv, and most add to dq, unless it has its own kernel."""

    makes_dq: ClassVar[bool] = True  # whether it can add to dq; otherwise dq has a kernel of its own
    stores_dq: ClassVar[bool] = False  # it adds up dq in a fixed order, and stores it rounded
    # Whether blocks may share the work of a tile of keys: then another kernel adds up what they leave, and rounds it.
    shares_tiles: ClassVar[bool] = True
    makes_both: ClassVar[bool] = False  # it makes both dk and dv, even if only one is wanted
    splits_tail: ClassVar[bool] = False  # blocks may share the queries of the last tiles of keys
    # With a block mask, of which a plan does not know how much it hides, they share tiles of at least so many steps.
    min_shared_steps: ClassVar[int] = 0  # 0: with a block mask, blocks share tiles of keys only where these are few
    orders_tiles: ClassVar[bool] = False  # its tiles of keys may start in an order by length
    writes_dbias: ClassVar[bool] = False  # of score gradients it makes dbias alone, which it writes tile by tile

    def heads_of_block(self, draft: Draft, main: Row) -> int:
        """The most query heads of a group that a block should go through."""
        return draft.problem.group_size

    def why_not_summed(self, draft: Draft, main: Row, name: str) -> str | None:
        """Why its main kernel does not sum the score gradient `name`: None if it does."""
        return ""

    def summing(self, main: Row, names: tuple[str, ...]) -> Row:
        """The row for a main kernel that sums these score gradients."""
        return main

    def why_not_score_args(self, draft: Draft, main: Row) -> str | None:
        """Why its main kernel does not sum the wanted gradients of arrays that the score reads: None if it does."""
        return "it sums no gradients of arrays that the score reads"

    def summing_score_args(self, draft: Draft, main: Row) -> Row:
        """The row for a main kernel that sums these."""
        return main

    def prepare(self, draft: Draft, main: Row) -> None:
        """Add what the main kernel needs: tensor maps, and kernels that make its operands."""

    def add(self, draft: Draft, main: Row, blocks: int, makes: Collection[str], options: Mapping[str, int]) -> None:
        """Add the main kernel, which makes these score gradients, too."""
        draft.add_main(self.source, main, blocks, makes, **options)


class DqFamily(Family[Row]):
    """A family of kernels that make dq alone, in a fixed order. Their blocks own queries."""

    def add(self, draft: Draft, tile: Row, blocks: int, makes: Collection[str], options: Mapping[str, int]) -> None:
        """Add the kernel."""
        draft.add_main(self.source, tile, blocks, makes, **options)


class ScoresFamily(Family[Row]):
    """A family of kernels that make score gradients, which no other kernel of the pass makes."""


class BiasFamily(Family[Row]):
    """A family of kernels that make the gradient of a per-pair bias alone."""

    @abstractmethod
    def configured(self, tile: Row, problem: Problem) -> Row:
        """The row, configured for the problem."""

    @abstractmethod
    def choose(self, draft: Draft, main: Tile | None) -> Row | None:
        """The row that serves together with that of the main kernel, if there is one; None if none does."""

    @abstractmethod
    def add(self, draft: Draft, tile: Row, main: Tile | None, stored: Collection[str]) -> None:
        """Add the kernel, after the main one."""


class MaximaFamily(Family[Row]):
    """A family of kernels that find the first key with the largest score of each row, for its gradient."""

    @abstractmethod
    def choose(self, draft: Draft, main: Tile | None) -> Row | None:
        """The row that serves together with that of the main kernel; None if the kernel of delta finds the keys."""

    @abstractmethod
    def add(self, draft: Draft, tile: Row, main: Any) -> None:
        """Add the kernel, before the main one, whose tensor maps it shares."""


class ReductionFamily(Family[Row]):
    """A family of reductions of the attention weights."""

    def configured(self, tile: Row, draft: Draft) -> Row:
        """The row as this call needs it."""
        return tile

    @abstractmethod
    def draft(self, draft: Draft, tile: Row) -> None:
        """Add the kernel of the reduction, after those of what it reads."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The families of one architecture, by what they compute, each list with the one to prefer first.

    `known` are the options that act on scores in its kernels; None stands for all that there are.
    """

    known: tuple[str, ...] | None = None
    decode: tuple[ForwardFamily[Any], ...] = ()
    forward: tuple[ForwardFamily[Any], ...] = ()
    jvp: tuple[ForwardFamily[Any], ...] = ()
    backward_jvp: tuple[BackwardJvpFamily[Any], ...] = ()
    dq_jvp: tuple[ForwardFamily[Any], ...] = ()
    scores_jvp: tuple[ScoresFamily[Any], ...] = ()
    backward: tuple[BackwardFamily[Any], ...] = ()
    dq: tuple[DqFamily[Any], ...] = ()
    scores: tuple[ScoresFamily[Any], ...] = ()
    bias: tuple[BiasFamily[Any], ...] = ()
    maxima: tuple[MaximaFamily[Any], ...] = ()
    columns: tuple[ReductionFamily[Any], ...] = ()
    top: tuple[ReductionFamily[Any], ...] = ()

    def __post_init__(self) -> None:
        for family in self.families:
            family.known = self.known

    @property
    def families(self) -> tuple[Family[Any], ...]:
        """All of them."""
        return tuple(family for row in fields(self) if row.name != "known" for family in getattr(self, row.name))


FamilyT = TypeVar("FamilyT", bound=Family[Any])


def family_of(families: Sequence[FamilyT], tile: Tile) -> FamilyT:
    """The family whose row this is."""
    return next(family for family in families if isinstance(tile, family.tile))


def given_or_chosen(
    families: Sequence[FamilyT], draft: Draft, tiles: tuple[Tile, ...] | None
) -> tuple[FamilyT, Any, str]:
    """The family and the row that the caller gives, or those that `choose_family` finds, and the reasons."""
    return (family_of(families, tiles[0]), tiles[0], draft.origin) if tiles else choose_family(families, draft)


def choose_family(families: Sequence[FamilyT], draft: Draft) -> tuple[FamilyT, Any, str]:
    """The first family that serves the problem, the row of its table, and the reasons for both."""
    reasons_against: list[str] = []
    for family in families:
        why_not = family.why_not_served(draft)
        if why_not is None:
            break
        if why_not:
            reasons_against.append(f"not {family.kernel}: {why_not}")
    # The last family serves all that no other one does.
    problem = draft.problem if family.reads_keys_once else draft.problem.typical
    tile, reason = choose_row(family.table(draft.problem), problem, draft.device)
    if draft.problem.multiplies_float8 and not family.multiplies_float8:
        reasons_against.append("fp8 q, k and v become half precision, exactly, and are multiplied so")
    return family, tile, "\n".join([reason, *reasons_against])
