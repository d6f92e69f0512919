"""Trials of the mutants of the decode kernel of every device."""

from dataclasses import replace
from typing import Any

from cuflash import emulator
from cuflash.plan.sm80.decode import DecodeTile
from tests.emulate.decode_problem import CASE
from tests.emulate.mutants.trial import Trial


def _tiles(**fields: Any) -> tuple[DecodeTile]:
    usual = {"element_bytes": 2, "max_dim": 128, "block_m": 16, "block_n": 16, "warp_groups": 2, "num_stages": 2}
    return (DecodeTile(**usual | fields, min_blocks=1, fragments_ahead=1, origin="of a trial"),)


_LATE = emulator.Schedule("random", "late", seed=1)
_BYTES: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "k_scale": "token", "v_scale": "token"}
_OF_BYTES = {**_BYTES, "dtype": "bfloat16", "q_float8": True, "q_scale": "token"}
_BLOCKS = replace(CASE, kv_lengths=None, causal=False, block_mask=(2, 8), block_size=(16, 32), blocks_kept=0.3)
TRIALS = {
    "decode sm80": Trial(case=CASE, tiles=_tiles(), arch="8.0", num_sms=16),
    "decode sm80 whole": Trial(case=CASE, tiles=_tiles(), arch="8.0", num_sms=1, schedule=_LATE),
    "decode sm80 uneven": Trial(case=CASE, tiles=_tiles(warp_groups=1), arch="8.0", num_sms=7, schedule=_LATE),
    "decode sm80 afterwards": Trial(case=CASE, tiles=_tiles(), arch="8.0", num_sms=7, combines=False),
    "decode sm80 without values": Trial(
        case=replace(CASE, has_values=False), tiles=_tiles(), arch="8.0", num_sms=7, combines=False
    ),
    "decode sm80 of one stage": Trial(case=CASE, tiles=_tiles(num_stages=1), arch="8.0", num_sms=3, schedule=_LATE),
    "decode sm80 of warp_groups": Trial(
        case=replace(CASE, seqlen_q=7, head_dim=24, head_dim_v=120),
        tiles=_tiles(block_m=32, warp_groups=3),
        arch="8.0",
        num_sms=3,
        schedule=_LATE,
    ),
    "decode sm80 of columns": Trial(
        case=replace(CASE, dtype="float32"), tiles=_tiles(element_bytes=4, warps_d=2), arch="8.0", num_sms=3
    ),
    "decode sm80 float64": Trial(
        case=replace(CASE, dtype="float64"), tiles=_tiles(element_bytes=8), arch="9.0", num_sms=7
    ),
    "decode sm80 odd": Trial(case=replace(CASE, head_dim_v=7), tiles=_tiles(), arch="8.0", num_sms=3),
    "decode sm80 lines": Trial(case=replace(CASE, head_dim=64), tiles=_tiles(), arch="8.0", num_sms=3),
    "decode sm80 dropout": Trial(
        case=replace(CASE, dropout=0.4, seqlen_q=13, num_heads=4), tiles=_tiles(block_m=32), arch="8.0", num_sms=3
    ),
    "decode sm80 in a window": Trial(case=replace(CASE, window=(60, None)), tiles=_tiles(), arch="8.0", num_sms=3),
    "decode sm80 lengths": Trial(case=replace(CASE, kv_lengths=(0, 230)), tiles=_tiles(), arch="8.0", num_sms=3),
    "decode sm80 sinks": Trial(case=replace(CASE, sinks=True), tiles=_tiles(), arch="8.0", num_sms=1),
    "decode sm80 blocks": Trial(case=_BLOCKS, tiles=_tiles(), arch="8.0", num_sms=7),
    "decode sm80 many blocks": Trial(
        case=replace(_BLOCKS, seqlen_k=1500, blocks_kept=0.1), tiles=_tiles(), arch="8.0", num_sms=1
    ),
    "decode sm80 pages": Trial(
        case=replace(CASE, page_size=16, seqlen_k=304, kv_lengths=(130, 303)),
        tiles=_tiles(block_n=32),
        arch="8.0",
        num_sms=3,
    ),
    "decode sm80 short table": Trial(
        case=replace(CASE, batch=1, page_size=16, seqlen_k=64, kv_lengths=(60,)),
        tiles=_tiles(block_n=48),
        arch="8.0",
        num_sms=1,
    ),
    "decode sm80 bytes": Trial(case=replace(CASE, **_BYTES), tiles=_tiles(key_bytes=1), arch="8.9", num_sms=3),
    "decode sm80 of bytes": Trial(case=replace(CASE, **_OF_BYTES), tiles=_tiles(key_bytes=1), arch="8.0", num_sms=3),
}
