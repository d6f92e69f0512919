"""Trials of jvp and backward_jvp: cases of several options, with tangents of all they have, by the oracle rule."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuflash.emulator import SCHEDULES, Schedule
from cuflash.plan import DeviceSpec
from cuflash.plan.sm90.jvp import JvpSm90Tile, JvpWideSm90Tile
from cuflash.plan.sm90.tiles import (
    BACKWARD_JVP_FLOAT32_SM90_TILES,
    BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES,
    JVP_FLOAT32_WIDE_SM90_TILES,
    JvpFloat32Sm90Tile,
)
from cuflash.plan.tiles import Tile
from cuflash.testing import Case
from cuflash.testing.tangents import Moved, everything, movable
from tests.cuda_scores import CUDA_SCORES
from tests.emulate.tangents import (
    Float32Tile,
    check,
    check_float32,
    check_functions,
    check_jvp,
    check_partials,
    movable_of,
)
from tests.scored import few_tiles
from tests.second_derivatives import CASES, PACKED

SIZES: dict[str, Any] = {
    **{"seqlen_q": 90, "seqlen_k": 150, "head_dim": 64, "num_heads": 4, "num_heads_kv": 2, "batch": 1},
    "dtype": "bfloat16",
}
OF_PACKED_SM90 = {**PACKED, "head_dim": 64, "cu_seqlens_q": (0, 40, 60, 85), "causal": True, "dtype": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class TangentTrial:
    """Both passes of one case."""

    case: Case
    moved: Moved | None = None  # everything, where none is said
    arch: str | DeviceSpec = "8.0"
    is_partial: bool = False  # results are not rounded
    deterministic: bool = False  # tdq has a kernel of its own, or blocks add to it in order

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        run = check_partials if self.is_partial else check
        run(self.case, self.moved or everything(self.case), self.arch, self.deterministic, kernels=kernels)


@dataclass(frozen=True, kw_only=True)
class FunctionTangentTrial:
    """Both passes of a problem whose scores are a function."""

    score: str
    mask: str | None = None
    dtype: str = "float64"
    moved: tuple[str, ...] = ()  # all that the problem has, where it is empty
    seed: int = 0  # of tangents

    def run(self, kernels: Path | None = None) -> None:
        """As `TangentTrial.run`."""
        case = few_tiles((self.score, self.mask), self.dtype)
        check_functions(case, self.moved or movable_of(case), seed=self.seed, kernels=kernels)


# Of sm90/backward_jvp.cu.
OF_SM90 = {
    "tangents sm90": Case(**SIZES, causal=True, dropout=0.3, dlse=True),
    "tangents sm90 roles": Case(**{**SIZES, "head_dim": 128}, window=(120, 30)),
    "tangents sm90 wide": Case(**{**SIZES, "head_dim": 256, "seqlen_q": 140}, causal=True),
    "tangents sm90 of pairs": Case(
        **{**SIZES, "head_dim": 72}, softcap=1.5, scale=0.3, bias=(4, 90, 150), alibi_slopes=(4,), dropout=0.2
    ),
    "tangents sm90 of large scores": Case(**{**SIZES, "head_dim": 40}, score_mean=3e3),
    "tangents sm90 of packed": Case(**OF_PACKED_SM90),
}

IN_ORDER = ("tangents sm90", "tangents sm90 wide")
OF_TDOUT = ("tangents sm90", "tangents sm90 roles", "tangents sm90 wide", "tangents sm90 of pairs")


def sm90(case: Case, *cotangents: str) -> TangentTrial:
    """With tangents of q, k and v; of all that there is only with a soft cap: then weights are made pair by pair."""
    names = ("q", "k", "v") if case.softcap is None else tuple(movable(case))
    moved = Moved(names=names, cotangents=(*cotangents, *["tdlse"] * case.dlse))
    return TangentTrial(case=case, moved=moved, arch="9.0")


@dataclass(frozen=True, kw_only=True)
class JvpSm90Trial:
    """jvp on compute capability 9.0, on so few SMs that blocks take several tiles of queries."""

    case: Case
    moved: tuple[str, ...] = ("q", "k", "v")  # all that the case has, where it is empty
    common: float = 0.0
    block_n: int = 32
    overlaps_tiles: bool = False
    ping_pong: bool = True
    schedules: tuple[Schedule, ...] = SCHEDULES[:1]

    @property
    def tile(self) -> Tile:
        return JvpSm90Tile(
            max_dim=128,
            block_m=128,
            block_n=self.block_n,
            num_stages=2,
            ping_pong=self.ping_pong,
            q_stages=1,
            overlaps_tiles=self.overlaps_tiles,
            origin="of a trial",
        )

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        device = replace(DeviceSpec.for_arch("9.0"), num_sms=1)
        moved = Moved(names=self.moved, common=self.common) if self.moved else everything(self.case)
        for schedule in self.schedules:
            check_jvp(self.case, moved, arch=device, tiles=(self.tile,), kernels=kernels, schedule=schedule)


@dataclass(frozen=True, kw_only=True)
class JvpWideSm90Trial(JvpSm90Trial):
    """The same of head dimensions above 128."""

    @property
    def tile(self) -> Tile:
        return JvpWideSm90Tile(max_dim=256, num_stages=2, origin="of a trial")


@dataclass(frozen=True, kw_only=True)
class JvpFloat32Sm90Trial(JvpSm90Trial):
    """The same of float32, by one stage of terms."""

    @property
    def tile(self) -> Tile:
        return JvpFloat32Sm90Tile(
            max_dim=64, block_n=self.block_n, num_stages=1, ping_pong=self.ping_pong, origin="of a trial"
        )


@dataclass(frozen=True, kw_only=True)
class JvpFloat32WideSm90Trial(JvpSm90Trial):
    """The same of head dimensions above 64."""

    @property
    def tile(self) -> Tile:
        return JVP_FLOAT32_WIDE_SM90_TILES[0]


@dataclass(frozen=True, kw_only=True)
class BackwardJvpFloat32Sm90Trial:
    """backward_jvp in float32 on compute capability 9.0: tangents of q, k and v, or of all that there is."""

    case: Case
    of_everything: bool = False
    tile: Float32Tile = BACKWARD_JVP_FLOAT32_SM90_TILES[0]
    schedules: tuple[Schedule, ...] = SCHEDULES

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        moved = everything(self.case) if self.of_everything else Moved(names=("q", "k", "v"))
        for schedule in self.schedules:
            check_float32(self.case, moved, self.tile, kernels=kernels, schedule=schedule)


@dataclass(frozen=True, kw_only=True)
class SinkTrial:
    """A sink has more weight than the first keys, and what keys have in common is large."""

    def run(self, kernels: Path | None = None) -> None:
        """Raise EmulationError or AssertionError where the kernels of the folder are wrong."""
        case = Case(seqlen_q=9, seqlen_k=200, head_dim=1, num_heads=4, batch=1, dtype="bfloat16", sinks=True, seed=376)
        check_jvp(case, Moved(names=("k",), common=1000.0, seed=376), arch="8.0", kernels=kernels)


_GROUPS = Case(
    dtype="bfloat16", seqlen_q=190, seqlen_k=230, head_dim=72, head_dim_v=80, num_heads=2, num_heads_kv=1, causal=True
)
_FLOAT32 = replace(_GROUPS, dtype="float32", head_dim=64, head_dim_v=40)
_LONG_SUMS = replace(_FLOAT32, head_dim=128, head_dim_v=128, causal=False, score_spread=12.0, seed=2)
_LONG_SUMS = replace(_LONG_SUMS, seqlen_q=128, seqlen_k=90, num_heads=4, num_heads_kv=2)
_FEW = Case(**{**SIZES, "dtype": "float32", "num_heads": 2, "num_heads_kv": 1, "head_dim_v": 40}, causal=True)
_OF_PAIRS = replace(_FEW, softcap=1.5, scale=0.3, alibi_slopes=(2,), dropout=0.2)
_OF_BOXES = replace(_FEW, seqlen_q=135, seqlen_k=150, head_dim=128, head_dim_v=72, batch=1)
_WIDE = replace(_GROUPS, seqlen_k=300, head_dim=136, head_dim_v=200)
AnyTrial = TangentTrial | FunctionTangentTrial | JvpSm90Trial | BackwardJvpFloat32Sm90Trial | SinkTrial
TRIALS: dict[str, AnyTrial] = {
    "jvp sm90": JvpSm90Trial(case=replace(_GROUPS, score_spread=8.0), schedules=SCHEDULES),
    "jvp sm90 overlap": JvpSm90Trial(
        case=replace(_GROUPS, kv_lengths=(180,)), overlaps_tiles=True, schedules=SCHEDULES
    ),
    "jvp sm90 window": JvpSm90Trial(case=replace(_GROUPS, causal=False, window=(70, 10), num_heads=1), block_n=16),
    "jvp sm90 options": JvpSm90Trial(
        case=replace(_GROUPS, dtype="float16", softcap=2.0, sinks=True, dropout=0.3, kv_lengths=(111,), num_heads=1),
        moved=(),
    ),
    "jvp sm90 slopes": JvpSm90Trial(
        case=replace(_GROUPS, alibi_slopes=(2,), bias=(1, 2, 190, 230)), moved=("q", "k", "v", "bias", "alibi_slopes")
    ),
    "jvp sm90 packed": JvpSm90Trial(
        case=replace(_GROUPS, cu_seqlens_q=(0, 70, 190), cu_seqlens_k=(0, 130, 225), sinks=True)
    ),
    "jvp sm90 sharp": JvpSm90Trial(
        case=Case(dtype="float16", seqlen_q=256, seqlen_k=1024, head_dim=64, num_heads=1, score_spread=16.0, seed=3),
        block_n=96,
        common=10.0,
    ),
    "jvp sm90 common": JvpSm90Trial(case=replace(_GROUPS, causal=False, seqlen_q=70, score_spread=8.0)),
    "jvp float32": JvpFloat32Sm90Trial(case=replace(_FLOAT32, score_spread=8.0), schedules=SCHEDULES),
    "jvp float32 of many keys": JvpFloat32Sm90Trial(case=replace(_FLOAT32, seqlen_q=90), block_n=64),
    "jvp float32 window": JvpFloat32Sm90Trial(
        case=replace(_FLOAT32, causal=False, window=(70, 10), num_heads=1), block_n=16
    ),
    "jvp float32 options": JvpFloat32Sm90Trial(
        case=replace(_FLOAT32, softcap=2.0, sinks=True, dropout=0.3, kv_lengths=(111,), num_heads=1), moved=()
    ),
    "jvp float32 few keys": JvpFloat32Sm90Trial(case=replace(_FLOAT32, seqlen_k=40), schedules=SCHEDULES),
    "wide jvp float32": JvpFloat32WideSm90Trial(
        case=replace(_FLOAT32, seqlen_q=135, head_dim=128, head_dim_v=128, score_spread=8.0), schedules=SCHEDULES
    ),
    "wide jvp float32 of options": JvpFloat32WideSm90Trial(
        case=replace(_FLOAT32, head_dim=72, softcap=2.0, sinks=True, dropout=0.3, kv_lengths=(111,), num_heads=1),
        moved=(),
    ),
    "wide jvp float32 of long sums": JvpFloat32WideSm90Trial(case=_LONG_SUMS),
    "tangents float32": BackwardJvpFloat32Sm90Trial(case=_FEW),
    "tangents float32 with one stage": BackwardJvpFloat32Sm90Trial(
        case=_FEW, tile=replace(BACKWARD_JVP_FLOAT32_SM90_TILES[0], num_stages=1)
    ),
    "tangents float32 of pairs": BackwardJvpFloat32Sm90Trial(
        case=_OF_PAIRS, of_everything=True, schedules=SCHEDULES[:1]
    ),
    "tangents float32 of large scores": BackwardJvpFloat32Sm90Trial(
        case=replace(_FEW, score_mean=3e3), schedules=SCHEDULES[:1]
    ),
    "tangents float32 of pairs of large scores": BackwardJvpFloat32Sm90Trial(
        case=replace(_FEW, alibi_slopes=(2,), score_mean=3e3), of_everything=True, schedules=SCHEDULES[:1]
    ),
    "wide tangents float32": BackwardJvpFloat32Sm90Trial(case=_OF_BOXES, tile=BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES[0]),
    "wide tangents float32 of pairs": BackwardJvpFloat32Sm90Trial(
        case=replace(_OF_BOXES, softcap=1.5, scale=0.3, dropout=0.2),
        of_everything=True,
        tile=BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES[0],
        schedules=SCHEDULES[:1],
    ),
    "wide tangents float32 of large scores": BackwardJvpFloat32Sm90Trial(
        case=replace(_OF_BOXES, score_mean=3e3),
        tile=BACKWARD_JVP_FLOAT32_WIDE_SM90_TILES[0],
        schedules=SCHEDULES[:1],
    ),
    "jvp wide": JvpWideSm90Trial(case=replace(_WIDE, score_spread=8.0), schedules=SCHEDULES),
    "jvp wide window": JvpWideSm90Trial(case=replace(_WIDE, causal=False, window=(70, 10), num_heads=1)),
    "jvp wide options": JvpWideSm90Trial(
        case=replace(_WIDE, dtype="float16", softcap=2.0, sinks=True, dropout=0.3, kv_lengths=(211,), num_heads=1),
        moved=(),
    ),
    "jvp wide few keys": JvpWideSm90Trial(case=replace(_WIDE, seqlen_k=100, kv_lengths=(77,)), schedules=SCHEDULES),
    "jvp wide packed": JvpWideSm90Trial(
        case=replace(_WIDE, cu_seqlens_q=(0, 70, 190), cu_seqlens_k=(0, 130, 295), sinks=True)
    ),
    "tangents": TangentTrial(case=replace(CASES[0], dtype="float32")),
    "tangents of windows": TangentTrial(case=CASES[1]),
    "tangents of three steps": TangentTrial(
        case=Case(dtype="float32", seqlen_q=40, seqlen_k=70, head_dim=40, num_heads=2, batch=1, causal=True)
    ),
    "tangents of queries": TangentTrial(
        case=Case(dtype="bfloat16", seqlen_q=40, seqlen_k=70, head_dim=80, num_heads=2, batch=1, causal=True)
    ),
    "tangents of shared scores": TangentTrial(
        case=Case(dtype="bfloat16", seqlen_q=40, seqlen_k=70, head_dim=136, num_heads=2, batch=1, causal=True)
    ),
    "tangents in order": TangentTrial(case=replace(CASES[0], dtype="float32"), deterministic=True),
    "tangents of windows in order": TangentTrial(case=CASES[1], deterministic=True),
    "tangents of biases": TangentTrial(case=CASES[2]),
    "tangents of large scores": TangentTrial(case=CASES[6]),
    "tangents without a scale": TangentTrial(case=replace(CASES[9], dtype="float32")),
    "tangents of many keys": TangentTrial(
        case=Case(dtype="float64", seqlen_q=3, seqlen_k=900, head_dim=8, score_spread=3.0),
        moved=Moved(names=("q", "k")),
    ),
    "tangents of blocks": TangentTrial(case=CASES[5]),
    "tangents of blocks and a mask": TangentTrial(case=replace(CASES[5], mask=(37, 203))),
    "tangents of packed": TangentTrial(case=CASES[10]),
    "tangents of functions": FunctionTangentTrial(score="distance"),
    **{f"tangents of {name} in CUDA": FunctionTangentTrial(score=name) for name in CUDA_SCORES},
    "tangents of half precision": FunctionTangentTrial(score="softcapped", dtype="bfloat16"),
    "tangents of few keys first": FunctionTangentTrial(score="counted", dtype="bfloat16", moved=("q",)),
    "tangents of steep caps": FunctionTangentTrial(
        score="softcapped", mask="documents", dtype="float32", moved=("temperature",), seed=3
    ),
    "tangents of a barrier": FunctionTangentTrial(score="barrier"),
    **{name: sm90(own) for name, own in OF_SM90.items()},
    # On one SM; the first keys are attended to by no query.
    "tangents sm90 clears": replace(
        sm90(Case(**{**SIZES, "seqlen_q": 70, "seqlen_k": 300, "num_heads": 6, "num_heads_kv": 6}, window=(10, None))),
        arch=replace(DeviceSpec.for_arch("9.0"), num_sms=1),
    ),
    **{f"{name} and tdout": sm90(OF_SM90[name], "tdout") for name in OF_TDOUT},
    **{f"{name} in order": replace(sm90(OF_SM90[name]), deterministic=True) for name in IN_ORDER},
    "tangents beside a sink": SinkTrial(),
    "partial tangents": TangentTrial(case=replace(CASES[3], head_dim=40, head_dim_v=16), is_partial=True),
    "partial tangents in order": TangentTrial(
        case=replace(CASES[3], head_dim=40, head_dim_v=16), is_partial=True, deterministic=True
    ),
    "tangents of 16 bits": TangentTrial(case=replace(CASES[3], head_dim=40, head_dim_v=16)),
}
