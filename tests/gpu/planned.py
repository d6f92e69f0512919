"""What is planned and tuned for arrays on the device, as tests read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuflash import FlashAttention
from cuflash.gpu.tuning import PassTuning, Tuning
from cuflash.plan import LaunchPlan
from cuflash.spec.passes import Pass

if TYPE_CHECKING:
    from cuflash.gpu.backend import Plans


def is_sm90() -> bool:
    """Whether calls get the kernels of compute capability 9.0: not where `CUFLASH_ARCH` names an earlier one."""
    import cupy

    from cuflash.gpu.device import device_spec

    return device_spec(cupy.cuda.Device().id).arch == 90


def plans_of(attn: FlashAttention, *arrays: Any, **options: Any) -> Plans:
    from cuflash.gpu.backend import Plans

    q, k, v = arrays
    plans = attn.plan(q, k, v, **options)
    assert isinstance(plans, Plans), "arrays are on the device"
    return plans


def plan_of(pass_: Pass, attn: FlashAttention, *arrays: Any, **options: Any) -> LaunchPlan:
    plan: LaunchPlan | None = getattr(plans_of(attn, *arrays, **options), pass_.name)
    assert plan is not None
    return plan


def both_passes(tuning: Tuning | None) -> tuple[PassTuning, PassTuning]:
    assert tuning is not None and tuning.forward is not None and tuning.backward is not None
    return tuning.forward, tuning.backward
