"""``plan`` and ``compile``: what would run for a problem, and compiling it."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cuflash import cpu
from cuflash.arrays.units import wrapped
from cuflash.cli import here
from cuflash.cli.arguments import add_problem_arguments, moved, of_pass, operands, passes, problems
from cuflash.cli.documents import Document, add_json_argument, print_document
from cuflash.cli.here import NAME_ONE, NO_GPU, Failure
from cuflash.cli.rates import about_seconds
from cuflash.cpu.backend import CpuPlan
from cuflash.gpu import compiler, kernel_cache
from cuflash.gpu.nvrtc import NvrtcNotFoundError
from cuflash.gpu.progress import Bar
from cuflash.gpu.tuning import tuned_plan
from cuflash.plan import DeviceSpec, KernelSpec, LaunchPlan
from cuflash.plan.launch_plan import option_names
from cuflash.spec.outputs import DEFAULT_NEED
from cuflash.spec.passes import REDUCTIONS, Pass
from cuflash.spec.problem import Problem


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    add_problem_arguments(command)
    add_json_argument(command)
    command.add_argument(
        "--verbose", action="store_true", help="also the tiles and kernels that were not taken, and why"
    )


def plan(args: argparse.Namespace) -> int:
    chosen = here.devices(args)
    all_problems, all_passes = list(problems(args)), passes(args)
    with Bar("plan", total=len(all_problems) * max(1, len(chosen)) * len(all_passes)) as bar:
        if args.json:
            documents = list(plan_documents(args, all_problems, chosen, bar))
        else:
            print_plans(args, all_problems, chosen, bar)
    if args.json:
        print_document("plan", {"plans": documents, "why_no_gpu": why_no_gpu(chosen)})
    elif not chosen:
        print(wrapped([f"{NO_GPU}: {why_no_gpu(chosen)}; {NAME_ONE}"], here.columns()))
    return 0


def print_plans(
    args: argparse.Namespace, all_problems: Sequence[Problem], chosen: Sequence[DeviceSpec], bar: Bar
) -> None:
    """A plan of every pass on every device in words, or one of all passes on the CPU."""
    width, all_passes = here.columns(), passes(args)
    for problem in all_problems:
        if not chosen:
            bar.print(cpu_plan(args, problem, all_passes).describe(args.verbose, width) + "\n")
            for _ in all_passes:
                bar.advance()
        for device, pass_ in itertools.product(chosen, all_passes):
            launches = compiled(gpu_plan(args, problem, device, pass_))
            bar.print(launches.describe(args.verbose, width) + "\n")
            bar.advance()


def cpu_plan(args: argparse.Namespace, problem: Problem, all_passes: Sequence[Pass]) -> CpuPlan:
    """A plan of these passes on the CPU: those over values together."""
    groups: dict[Problem, list[Pass]] = {}
    if any(pass_.has_tangents for pass_ in all_passes):
        problem = replace(problem, moved=moved(args, problem))
    for pass_ in all_passes:
        groups.setdefault(of_pass(args, problem, pass_) if pass_ in REDUCTIONS else problem, []).append(pass_)
    plans = (
        CpuPlan(problem=p, passes=tuple(passes), seconds=tuple(about_seconds(p, pass_, args.count) for pass_ in passes))
        for p, passes in groups.items()
    )
    return functools.reduce(CpuPlan.joined, plans)


def gpu_plan(args: argparse.Namespace, problem: Problem, device: DeviceSpec, pass_: Pass) -> LaunchPlan:
    """The plan of a pass on a device, with tiles that tuning found."""
    of_this_pass = of_pass(args, problem, pass_)
    return tuned_plan(of_this_pass, device, pass_, operands=operands(args, of_this_pass, pass_))


def why_no_gpu(chosen: Sequence[DeviceSpec]) -> str | None:
    """Why plans are those of the CPU; None if they are those of devices."""
    return None if chosen else here.find_gpu()[1]


def plan_documents(
    args: argparse.Namespace, all_problems: Sequence[Problem], chosen: Sequence[DeviceSpec], bar: Bar
) -> Iterator[Document]:
    """A plan of every pass of every problem, on every device or on the CPU."""
    for problem, device, pass_ in itertools.product(all_problems, chosen or (None,), passes(args)):
        of_this_pass = of_pass(args, problem, pass_)
        common = {"pass": pass_.name, "problem": problem_document(of_this_pass), "flops": pass_.flops(of_this_pass)}
        if device is None:
            why_not = of_this_pass.why_no_gradients if pass_.gives_gradients else None
            core = cpu.describe(of_this_pass, DEFAULT_NEED, (pass_,))
            about = None if why_not else about_seconds(of_this_pass, pass_, args.count)
            why_not = why_not and f"no {pass_} pass with {why_not}"
            yield {"backend": "cpu", **common, "about_seconds": about, "core": core, "why_not": why_not}
        else:
            yield {"backend": "gpu", **common, **launch_document(gpu_plan(args, problem, device, pass_))}
        bar.advance()


def problem_document(p: Problem) -> Document:
    sizes = ("batch", "num_heads", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
    document: Document = {"dtype": p.dtype, **{name: getattr(p, name) for name in sizes}}
    options = [name for name in option_names(p) if not name.endswith("_bound")]
    return document | {"window": [p.window_left, p.window_right], "options": options, "tangents": list(p.moved or ())}


def launch_document(launches: LaunchPlan) -> Document:
    traffic = launches.traffic
    return {
        "device": launches.device.name,
        "capability": f"{launches.device.arch / 10:.1f}",
        "least_seconds": launches.least_seconds,
        "about_seconds": launches.about_seconds,
        "extra_bytes": launches.extra_bytes,
        "memory_model": traffic
        and {
            "read_bytes": traffic.read,
            "written_bytes": traffic.written,
            "least_bytes": traffic.least,
            "tile_bytes": traffic.tiles,
            "dq_atomics_bytes": traffic.added,
        },
        "kernels": [kernel_document(kernel) for kernel in launches.kernels],
        "scratch": launches.scratch_sizes,
        "notes": launches.reason.splitlines(),
    }


def resources_of(kernel: KernelSpec) -> compiler.Resources | None:
    """What the compiler reports, where it is here and knows the architecture."""
    try:
        return compiler.compile_spec(kernel).resources
    except (NvrtcNotFoundError, NotImplementedError):
        return None


def kernel_document(kernel: KernelSpec) -> Document:
    """A kernel; what only the compiler knows is null without one."""
    resources = resources_of(kernel)
    return {
        "name": kernel.name,
        "source": kernel.source,
        "target": kernel.target,
        "grid": kernel.grid,
        "threads": kernel.threads,
        "shared_bytes": kernel.shared_bytes,
        "registers": resources and resources.registers,
        "spill_bytes": resources and resources.spill_stores_bytes + resources.spill_loads_bytes,
    }


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
        specs |= dict.fromkeys(gpu_plan(args, problem, device, pass_).kernels)
    print(f"{'arch':<8}{'seconds':>8}{'registers':>11}{'spilled':>9}{'stack':>7}{'shared':>8}  kernel", flush=True)
    with Bar("compiling", total=len(specs)) as bar:
        for spec in specs:
            r = compiler.compile_spec(spec).resources
            spilled = r.spill_stores_bytes + r.spill_loads_bytes
            numbers = f"{r.seconds:>8.2f}{r.registers:>11}{spilled:>9}{r.stack_bytes:>7}"
            bar.print(f"{spec.target:<8}{numbers}{spec.shared_bytes + r.static_shared_bytes:>8}  {spec.name}")
            bar.advance()
    print(
        "Registers, and bytes of spills and stack, are per thread, bytes of shared memory per block. Seconds are those "
        f"of the compilation, which may have been an earlier one. Cache: {kernel_cache.cache_directory()}"
    )
    return 0
