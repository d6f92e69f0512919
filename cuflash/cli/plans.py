"""``plan`` and ``compile``: what would run for a problem, and compiling it."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

from cuflash.cli import here
from cuflash.cli.arguments import add_problem_arguments, moved, of_pass, passes, problems
from cuflash.cli.here import NAME_ONE, NO_GPU, Failure
from cuflash.cpu.backend import CpuPlan
from cuflash.gpu import compiler, kernel_cache
from cuflash.gpu.nvrtc import NvrtcNotFoundError
from cuflash.gpu.tuning import tuned_plan
from cuflash.plan import KernelSpec, LaunchPlan


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    add_problem_arguments(command)
    command.add_argument(
        "--verbose", action="store_true", help="also the tiles and kernels that were not taken, and why"
    )


def plan(args: argparse.Namespace) -> int:
    chosen = here.devices(args)
    for problem in problems(args):
        if not chosen:
            with_tangents = replace(problem, moved=moved(args, problem))
            print(CpuPlan(problem=with_tangents, passes=passes(args)).describe(args.verbose), end="\n\n")
        for device in chosen:
            for pass_ in passes(args):
                found = tuned_plan(of_pass(args, problem, pass_), device, pass_)
                print(compiled(found).describe(args.verbose), end="\n\n")
    if not chosen:
        print(f"{NO_GPU}: {here.find_gpu()[1]}; {NAME_ONE}")
    return 0


def compiled(plan: LaunchPlan) -> LaunchPlan:
    """The plan with the registers of its kernels, where the compiler is here and knows the architecture."""
    try:
        return compiler.with_resources(plan)
    except (NvrtcNotFoundError, NotImplementedError):
        return plan


def fill_cache(args: argparse.Namespace) -> int:
    chosen = here.devices(args)
    if not chosen:
        raise Failure(f"{NO_GPU}: {here.find_gpu()[1]}; {NAME_ONE}")
    compiler.nvrtc_version()  # where NVRTC is missing, that is said before the head of the table is printed
    specs: dict[KernelSpec, None] = {}  # a set in order
    for problem, device, pass_ in itertools.product(problems(args), chosen, passes(args)):
        specs |= dict.fromkeys(tuned_plan(of_pass(args, problem, pass_), device, pass_).kernels)
    print(f"{'arch':<8}{'seconds':>8}{'registers':>11}{'spilled':>9}{'stack':>7}{'shared':>8}  kernel")
    for spec in specs:
        kernel = compiler.compile_spec(spec)
        r = kernel.resources
        spilled = r.spill_stores_bytes + r.spill_loads_bytes
        numbers = f"{r.seconds:>8.2f}{r.registers:>11}{spilled:>9}{r.stack_bytes:>7}"
        print(f"{spec.target:<8}{numbers}{spec.shared_bytes + r.static_shared_bytes:>8}  {spec.name}", flush=True)
    print(
        "Registers, and bytes of spills and stack, are per thread, bytes of shared memory per block. Seconds are those "
        f"of the compilation, which may have been an earlier one. Cache: {kernel_cache.cache_directory()}"
    )
    return 0
