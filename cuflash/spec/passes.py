"""The passes: what each takes, reads and makes, and how it differs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from operator import attrgetter

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.spec.inputs import INPUTS
from cuflash.spec.options import Options
from cuflash.spec.outputs import (
    COLUMN_MAX_ROWS,
    COLUMN_SUMS_ROWS,
    FORWARD_ROWS,
    GRADIENT_ROWS,
    GRADIENT_TANGENT_ROWS,
    MOVABLE,
    REQUIRED_BY_BACKWARD,
    REQUIRED_BY_BACKWARD_JVP,
    ROW_REDUCTION_ROWS,
    TAKEN_BY_BACKWARD,
    TAKEN_BY_BACKWARD_JVP,
    TANGENT_ROWS,
    TOP_KEYS_ROWS,
    Output,
)
from cuflash.spec.problem import Problem, check_differentiable, check_movable


def _names(rows: tuple[Output, ...]) -> tuple[str, ...]:
    return tuple(row.name for row in rows)


_JVP_ROWS = (*(row for row in FORWARD_ROWS if row.is_default), *TANGENT_ROWS)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Pass:
    """One pass. There is one object for each, so that it is compared, and keys tables and caches, by identity."""

    name: str  # as users and plans spell it
    rows: tuple[Output, ...]  # its results, except gradients of arrays that a score reads
    required: tuple[str, ...]  # what it cannot do without, besides q, k and v
    takes: tuple[str, ...]  # all that it takes besides q, k, v and the optional inputs
    flops: Callable[[Problem], int]  # floating-point operations of its products over visible pairs of a problem
    least_bytes: Callable[[Problem], int]  # fewest bytes that it moves through device memory for a problem
    # Raises NotImplementedError for a problem that does not have this pass.
    check: Callable[[Problem], None] = lambda problem: None
    any_length: bool = False  # whether a plan may serve other values of seqlen_k than that of its problem
    reads_keys_once: bool = False  # whether decode kernels read each key once, so that it may stay in host memory
    adds_to_memory: bool = False  # whether blocks add to results in memory, in an order that `deterministic` fixes
    # Whether it takes tangents of inputs and numbers, `outputs.MOVABLE` and arrays of a score.
    has_tangents: bool = False

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        """The name of the variable that holds it, so that copies, and what is unpickled, are the one object."""
        return self.name.upper()

    @property
    def default(self) -> tuple[str, ...]:
        """The names of the results that it gives by default."""
        return _names(tuple(row for row in self.rows if row.is_default))

    @property
    def gives_gradients(self) -> bool:
        """Whether its results are gradients, or tangents of these."""
        return bool(self.rows[0].gradient_of)

    def results_of(self, options: Options) -> tuple[str, ...]:
        """The names of all results for some options, in the order in which it gives them."""
        return (*_names(self.rows), *(self.results_for(options.score_gradients) if self.gives_gradients else ()))

    def results_in(self, problem: Problem) -> tuple[str, ...]:
        """The same for a problem, whose dtypes tell which arrays of a score have no gradients."""
        return (*_names(self.rows), *(self.results_for(problem.score_arg_gradients) if self.gives_gradients else ()))

    def row_reductions_of(self, names: Collection[str]) -> tuple[str, ...]:
        """The row reductions that a call with results and arrays of these names makes, or whose gradients it takes."""
        taken = self.gives_gradients
        return _names(tuple(row for row in ROW_REDUCTION_ROWS if (row.gradient if taken else row.name) in names))

    def results_for(self, need: Collection[str]) -> tuple[str, ...]:
        """The names of its results in a call that wants these gradients: they, their tangents, or the default."""
        if not self.gives_gradients:
            return self.default
        return tuple(f"t{name}" if self.has_tangents else name for name in need)

    @property
    def written(self) -> tuple[str, ...]:
        """The names of those of its results that lie over a head dimension."""
        return _names(tuple(row for row in self.rows if row.has_head_dim))

    @property
    def read(self) -> tuple[str, ...]:
        """The names of the arrays over a head dimension that it reads."""
        taken = {row.name for row in FORWARD_ROWS if row.has_head_dim}
        return (*INPUTS, *(name for name in self.takes if {name, name.removeprefix("d")} & taken))


FORWARD = Pass(
    name="forward",
    rows=FORWARD_ROWS,
    required=(),
    takes=(),
    flops=attrgetter("forward_flops"),
    least_bytes=attrgetter("forward_bytes"),
    any_length=True,
    reads_keys_once=True,
)
BACKWARD = Pass(
    name="backward",
    rows=GRADIENT_ROWS,
    required=REQUIRED_BY_BACKWARD,
    takes=TAKEN_BY_BACKWARD,
    check=check_differentiable,
    flops=attrgetter("backward_flops"),
    least_bytes=attrgetter("backward_bytes"),
    adds_to_memory=True,
)
JVP = Pass(
    name="jvp",
    rows=_JVP_ROWS,
    required=(),
    takes=tuple(f"t{name}" for name in MOVABLE),
    check=check_movable,
    flops=attrgetter("jvp_flops"),
    # The forward pass, tangents, tout and tlse.
    least_bytes=lambda problem: problem.forward_bytes + problem.tangent_bytes + problem.results_bytes,
    has_tangents=True,
)
BACKWARD_JVP = Pass(
    name="backward_jvp",
    rows=GRADIENT_TANGENT_ROWS,
    required=REQUIRED_BY_BACKWARD_JVP,
    takes=(*TAKEN_BY_BACKWARD_JVP, *JVP.takes),
    check=check_differentiable,
    flops=attrgetter("backward_jvp_flops"),
    least_bytes=lambda problem: problem.backward_bytes + problem.tangent_bytes + problem.results_bytes,
    adds_to_memory=True,
    has_tangents=True,
)


def _bytes_of_columns(problem: Problem) -> int:
    """Those of a reduction over queries: inputs and lse are read, and columns written. Factors are not counted."""
    columns = problem.array_batch * problem.num_heads * problem.seqlen_k
    return problem.forward_bytes + columns * ITEMSIZE[problem.softmax_dtype]


def _reduction(
    name: str, rows: tuple[Output, ...], *takes: str, least_bytes: Callable[[Problem], int] = _bytes_of_columns
) -> Pass:
    """A pass that reduces the attention weights, which it recomputes from lse."""
    return Pass(
        name=name,
        rows=rows,
        required=("lse",),
        takes=("lse", *takes),
        flops=lambda problem: 2 * problem.visible_pairs * problem.head_dim,
        least_bytes=least_bytes,
    )


# Reductions of the weights, which users call by methods of their own. The weights of rows in a column sum are in the
# place of dlse.
COLUMN_SUMS = _reduction("column_sums", COLUMN_SUMS_ROWS, "dlse")
COLUMN_MAX = _reduction("column_max", COLUMN_MAX_ROWS)
TOP_KEYS = _reduction("top_keys", TOP_KEYS_ROWS, least_bytes=attrgetter("forward_bytes"))  # without its results
# The gradients of column sums are those of a call with a column of values for each query head of a group.
COLUMN_SUMS_BACKWARD = replace(
    BACKWARD,
    name="column_sums_backward",
    flops=lambda problem: problem.with_values(problem.group_size).backward_flops,
    least_bytes=lambda problem: problem.with_values(problem.group_size).backward_bytes,
)
REDUCTIONS = (COLUMN_SUMS, COLUMN_MAX, TOP_KEYS, COLUMN_SUMS_BACKWARD)
PASSES = (FORWARD, BACKWARD, JVP, BACKWARD_JVP)
PASS_NAMES = tuple(pass_.name for pass_ in PASSES)
PASSES_WITH_TANGENTS = tuple(pass_ for pass_ in PASSES if pass_.has_tangents)
PASSES_WITHOUT_TANGENTS = tuple(pass_ for pass_ in PASSES if not pass_.has_tangents)
# What `plan`, `compile`, `tune` and the command line take, and what they prepare unless they are told otherwise.
PREPARED = (*PASSES, *REDUCTIONS)
PREPARED_NAMES = tuple(pass_.name for pass_ in PREPARED)
DEFAULT_PASSES = tuple(pass_.name for pass_ in PASSES_WITHOUT_TANGENTS)
