"""Which kernels run for a problem, with which tiles, on which device: pure data and pure functions.

`choose_plan` asks each family of kernels (`families`), in order of preference, why it does not serve the problem. The
first one that serves it takes a row of its table of tiles, and adds its kernels to the plan. `LaunchPlan.reason` says
which row was taken, and why the ones before it were not. `sm80` and `sm90` have what is particular to an architecture.
"""

from cuflash.plan.choose import check_served, choose_plan
from cuflash.plan.device import DeviceSpec
from cuflash.plan.launch_plan import KernelSpec, LaunchPlan, RunTime, ScratchLayout

__all__ = ["DeviceSpec", "KernelSpec", "LaunchPlan", "RunTime", "ScratchLayout", "check_served", "choose_plan"]
