"""The families of compute capability 9.0."""

from __future__ import annotations

from cuflash.plan.families import Architecture
from cuflash.plan.sm90.backward import Backward, BackwardFloat32
from cuflash.plan.sm90.backward_bias import BiasGradient
from cuflash.plan.sm90.backward_jvp import BackwardJvp, BackwardJvpFloat32, BackwardJvpFloat32Wide
from cuflash.plan.sm90.backward_wide import BackwardWide, DqWide
from cuflash.plan.sm90.chunked import BackwardChunked, ForwardChunked
from cuflash.plan.sm90.decode import Decode, DecodeFloat8, DecodeWide
from cuflash.plan.sm90.forward import Forward, ForwardFloat8, ForwardFloat32, ForwardWide
from cuflash.plan.sm90.jvp import Jvp, JvpFloat32, JvpFloat32Wide, JvpWide
from cuflash.plan.sm90.reductions import Columns, FirstMaxima, Top

SM90 = Architecture(
    known=("softcap", "alibi_slopes", "bias", "mask", "block_mask", "kv_lengths", "sinks"),
    decode=(
        DecodeFloat8(),  # before Decode, because its tiles are tiles of Decode, too
        Decode(),
        DecodeWide(),  # before ForwardWide, because its tiles are tiles of ForwardWide, too
    ),
    forward=(ForwardFloat32(), ForwardFloat8(), ForwardWide(), Forward(), ForwardChunked()),
    jvp=(JvpFloat32(), JvpFloat32Wide(), Jvp(), JvpWide()),
    backward_jvp=(BackwardJvpFloat32(), BackwardJvpFloat32Wide(), BackwardJvp()),
    backward=(BackwardFloat32(), BackwardWide(), Backward(), BackwardChunked()),
    dq=(DqWide(),),
    bias=(BiasGradient(),),
    maxima=(FirstMaxima(),),
    columns=(Columns(),),
    top=(Top(),),
)
