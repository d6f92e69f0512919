"""Tiles: what the rows of all tables have in common, and how one of them is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, get_args

from cuflash.arrays.array_info import ITEMSIZE
from cuflash.arrays.checks import counted
from cuflash.plan.device import DeviceSpec
from cuflash.plan.tensor_map import CHUNK
from cuflash.spec.problem import Problem

if TYPE_CHECKING:
    from typing import Self

# Fields that the kernels of all rows get as defines.
COMMON_DEFINES = (
    "block_m",
    "block_n",
    "num_warps",
    "num_stages",
    "min_blocks",
    "dim_multiple",
    "fragments_ahead",
)
# Defines of a kernel that looks up masks and biases pair by pair, in a pass whose main kernel may load them by tile.
PAIR_BY_PAIR = {
    "CUFLASH_BIAS_OF_PAIRS": 0,
    "CUFLASH_BIAS_OF_KEYS": 0,
    "CUFLASH_MASK_OF_KEYS": 0,
    "CUFLASH_MASK_BY_BITS": 0,
    "CUFLASH_HAS_BLOCK_INDEX": 0,
    "CUFLASH_HAS_TILE_CLASSES": 0,
    "CUFLASH_HAS_BIAS_TILE_CLASSES": 0,
    "CUFLASH_CHOSEN_BY_BIAS": 0,
}
# Which kernel of a pass a tile is for: the main one or, in the backward pass, another one. Those make dq alone,
# score gradients, or the gradient of a per-pair bias, or find the first keys with the largest scores of rows.
Role = Literal["main", "dq", "scores", "bias", "maxima"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Fit:
    """A row of a table with a problem and a device: what conditions are about."""

    tile: Any
    problem: Problem
    device: DeviceSpec


@dataclass(frozen=True)
class Condition:
    """What a row of a table is meant for: a test, and the same in words."""

    name: str
    test: Callable[[Any], bool]  # of the row's `Fit`
    words: str


ANY = Condition("any", lambda fit: True, "any problem")


def by_name(*conditions: Condition) -> dict[str, Condition]:
    """Conditions as `Tile.conditions` has them."""
    return {condition.name: condition for condition in conditions}


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tile_bytes(rows: int, columns: int, element_bytes: int) -> int:
    """Shared memory of a tile, in lines of 128 bytes or fractions of one; kernels/common/config.cuh has the same."""
    row = columns * element_bytes
    if row == 0:
        return 0
    if element_bytes > 2 or row > 64:
        return rows * round_up(row, 128)
    return rows * (64 if row > 32 else 32)


def chunked_bytes(rows: int, columns: int) -> int:
    """Shared memory of a tile in chunks of `CHUNK` columns; kernels/sm90/tiles.cuh has the same."""
    return -(-columns // CHUNK) * rows * CHUNK * 2


# Candidates that a row keeps for its strongest keys, if at most a quarter as many keys are wanted; else twice as many.
FEW_CANDIDATES = 64


def candidate_bytes(capacity: int, element_bytes: int) -> int:
    """Shared memory of a warp for its candidates; kernels/common/softmax/candidates.cuh has the same."""
    return 32 * capacity * max(element_bytes, 4)


@dataclass(frozen=True)
class Tile:
    """A way to cut a pass into tiles: a row of a table, which serves head dimensions up to its `max_dim`.

    What all rows have is declared here; a row says in `defined` which of its other fields kernels get as defines.
    """

    defined: ClassVar[tuple[str, ...]] = ()
    # Which kernel of a pass the row is for. A plan has at most one row of each.
    role: ClassVar[Role] = "main"
    # What `serves` may name. Rows of tables without conditions serve any problem.
    conditions: ClassVar[Mapping[str, Condition]] = {}
    # Whether its kernel cannot compute what `why_not` rules out: then tuning does not try the row either.
    serves_nothing_else: ClassVar[bool] = False
    # Values that tuning may change fields to, one at a time.
    variations: ClassVar[dict[str, tuple[int, ...]]] = {}

    if TYPE_CHECKING:

        @property
        def element_bytes(self) -> int: ...
        @property
        def max_dim(self) -> int: ...
        @property
        def block_m(self) -> int: ...
        @property
        def block_n(self) -> int: ...
        @property
        def num_warps(self) -> int: ...
        @property
        def num_stages(self) -> int: ...
        @property
        def min_blocks(self) -> int:
            """Blocks that must be resident on one SM."""

        @property
        def fragments_ahead(self) -> int:
            """Fragments of B that are loaded ahead of the product that needs them."""

        @property
        def dim_multiple(self) -> int:
            """Head dimensions are padded to a multiple of this."""

        @property
        def serves(self) -> str:
            """The name of the condition under which the row is taken."""

        @property
        def origin(self) -> str:
            """The measurement or the arithmetic that put the row here."""

    @property
    def cluster(self) -> int:
        """The number of blocks that share a tile: those of a cluster."""
        return 1

    @property
    def maps_bias(self) -> bool:
        """Whether the kernel loads a per-pair bias by TMA."""
        return False

    def __post_init__(self) -> None:
        has_condition = not self.conditions or self.serves in self.conditions
        for holds, rule in (*self.rules(), (has_condition, f"one of {', '.join(self.conditions)} in serves")):
            if not holds:
                raise ValueError(f"{self}: expected {rule}")

    def rules(self) -> tuple[tuple[bool, str], ...]:
        """Conditions that must hold, each with its words."""
        return ()

    def why_not(self, problem: Problem, device: DeviceSpec) -> str | None:
        """Why the row is not meant for a problem whose head dimensions it serves; None where it is."""
        condition = self.conditions[self.serves] if self.conditions else ANY
        return None if condition.test(self.fit(problem, device)) else f"for {condition.words}"

    def fit(self, problem: Problem, device: DeviceSpec) -> Fit:
        """What its conditions look at."""
        return Fit(self, problem, device)

    def changed(self, **changes: Any) -> Self:
        """The row with other values of some fields."""
        copy: Any = replace(cast("Any", self), **changes)
        return copy  # type: ignore[no-any-return]

    def shared_bytes(self, dim: int, dim_v: int) -> int:
        """Shared memory of a block, for padded head dimensions."""
        raise NotImplementedError

    def padded_dims(self, problem: Problem) -> tuple[int, int]:
        """Head dimensions as the kernel reads them."""
        return round_up(problem.head_dim, self.dim_multiple), round_up(problem.head_dim_v, self.dim_multiple)

    def defines(self) -> dict[str, str | int]:
        """What the kernel is compiled with: numbers, and names of enumerators."""
        values = {name: getattr(self, name) for name in (*COMMON_DEFINES, *self.defined)}
        return {f"CUFLASH_{name.upper()}": x if isinstance(x, str) else int(x) for name, x in values.items()}

    @property
    def label(self) -> str:
        """The tile in words."""
        return (
            f"{type(self).__name__} {self.block_m} x {self.block_n}, {self.num_warps} warps, "
            f"{counted(self.num_stages, 'stage')}, {counted(self.min_blocks, 'resident block')}"
        )


Row = TypeVar("Row", bound=Tile)


def serves_dims(tile: Tile, problem: Problem) -> bool:
    """Whether the tile is of elements of this size and large enough for the head dimensions."""
    return tile.element_bytes == ITEMSIZE[problem.dtype] and max(tile.padded_dims(problem)) <= tile.max_dim


def largest_dim(table: Iterable[Tile]) -> int:
    """The largest head dimension that rows of a table serve."""
    return max(row.max_dim for row in table)


def exceeds(problem: Problem, table: Iterable[Tile]) -> bool:
    """Whether a head dimension is above those of a table."""
    return max(problem.head_dim, problem.head_dim_v) > largest_dim(table)


def why_too_wide(problem: Problem, table: Iterable[Tile]) -> str | None:
    """Which head dimensions a table serves, if a problem has larger ones."""
    return f"it serves head dimensions up to {largest_dim(table)}" if exceeds(problem, table) else None


def tiles_at_once(tile: Tile, device: DeviceSpec, cluster: int | None = None) -> int:
    """How many tiles a device computes at the same time: one at least, even if it is smaller than a cluster."""
    return max(1, device.num_sms // (cluster or tile.cluster)) * tile.min_blocks


def why_too_large(tile: Tile, problem: Problem, device: DeviceSpec) -> str | None:
    """Why as many blocks as the tile promises do not fit on an SM; None where they do."""
    shared = tile.shared_bytes(*tile.padded_dims(problem))
    of_sm = tile.min_blocks * (shared + device.shared_bytes_reserved)
    if shared <= device.shared_bytes_per_block and of_sm <= device.shared_bytes_per_sm:
        return None
    return f"{shared} bytes for each exceed the {device.shared_bytes_per_sm} bytes of shared memory of an SM"


def choose_row(table: Iterable[Row], problem: Problem, device: DeviceSpec) -> tuple[Row, str]:
    """The first row that serves the head dimensions and fits the device, and why it was taken, and others not."""
    rejected = []
    for tile in table:
        if not serves_dims(tile, problem):
            continue
        why_not = tile.why_not(problem, device) or why_too_large(tile, problem, device)
        if why_not is not None:
            rejected.append(f"not {tile.label}: {why_not}")
            continue
        return tile, "\n".join([f"{tile.label}: {tile.origin}", *rejected])
    raise NotImplementedError(
        f"device: no tile of {problem.dtype} at head dimensions {problem.head_dim} and {problem.head_dim_v} fits "
        f"{device.name}, got {device.shared_bytes_per_block} bytes of shared memory a block, expected more; NumPy "
        "arrays are served on the CPU"
    )


# ---- rows of tables, and their measurements ----------------------------------------------------------------


def maker(row_type: type[Row], fields: str) -> Callable[..., Row]:
    """A function that makes rows from these fields by position, so that a table of rows is easy to read."""

    def make(*values: Any, **others: Any) -> Row:
        return row_type(**dict(zip(fields.split(), values, strict=True)), **others)

    return make


def h200(cuflash: str, flash_attention_2: str) -> str:
    """The origin of a row of half precision that was measured on an H200."""
    return (
        f"on an H200 {cuflash} TFLOP/s, FlashAttention-2: {flash_attention_2} (seqlen 4096 full / causal, 1024 "
        "full / causal; bfloat16, batch x seqlen 16384, heads x head_dim 2048)"
    )


def h200_decode(short: float, heads_of_short: str, long: float, heads_of_long: str) -> str:
    """The origin of a row of decode: bytes of k and v per second, of a short and of a long KV cache."""
    return (
        f"on an H200 {short} TB/s (batch x heads {heads_of_short}, 8192 keys, one query) and {long} ({heads_of_long}, "
        "131072 keys, 16 queries), while the L2 cache wrote back what others had left"
    )


def h200_float32(cuflash: str, torch: str) -> str:
    """The origin of a row of float32."""
    return (
        f"on an H200 {cuflash} TFLOP/s, PyTorch's efficient attention {torch} (batch 2, heads 16, seqlen 4096, full / "
        "causal)"
    )


def h200_float64(cuflash: float, torch: float) -> str:
    """The origin of a row of float64."""
    return (
        f"on an H200 {cuflash} TFLOP/s, PyTorch's N x N formula {torch} (batch 2, heads 16, seqlen 2048, head_dim "
        "max_dim)"
    )


SMALL = "for 100 KiB of shared memory; by arithmetic, not measured"
MEDIUM = "for 164 KiB of shared memory; by arithmetic, not measured"
MEDIUM_OR_SMALL = "for 164 or 100 KiB of shared memory; by arithmetic, not measured"
TINY = "for 64 KiB of shared memory; by arithmetic, not measured"
ARITHMETIC = "by arithmetic, not measured"
