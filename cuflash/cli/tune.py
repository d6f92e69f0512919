"""``tune``: the fastest tiles for a problem on the GPU that is here."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import fields
from types import ModuleType
from typing import Any

from cuflash import FlashAttention
from cuflash.arrays.array_info import numpy_dtype
from cuflash.cli import here
from cuflash.cli.arguments import add_problem_arguments, calls, moved, of_pass, operands, passes, problems
from cuflash.cli.here import NAME_ONE, NO_GPU, Failure
from cuflash.gpu import tuning
from cuflash.spec.binding import Contiguous
from cuflash.spec.inputs import BY_NAME
from cuflash.spec.passes import TOP_KEYS
from cuflash.spec.problem import make_problem


def add_tune_arguments(command: argparse.ArgumentParser) -> None:
    add_problem_arguments(command)
    command.add_argument("--forget", action="store_true", help="forget what was found, instead of tuning")
    command.add_argument("--dry-run", action="store_true", help="only list the candidates; --arch may name a GPU")


def tune(args: argparse.Namespace) -> int:
    if args.dry_run and args.forget:
        raise Failure("--forget goes without --dry-run")
    if args.dry_run:
        return list_candidates(args)
    if args.arch:
        raise Failure("--arch goes with --dry-run: tuning is of the GPU that is here")
    cupy, reason = here.find_gpu()
    if cupy is None:
        raise Failure(f"{NO_GPU}: {reason}; the CPU path has nothing to tune")
    for options, shapes in calls(args):
        arrays = {name: filled(cupy, name, shape, args) for name, shape in shapes.items()}
        attn = FlashAttention(**{field.name: getattr(options, field.name) for field in fields(options)})
        problem = make_problem(options, **shapes)
        if any(pass_.has_tangents for pass_ in passes(args)):
            number = Contiguous((), numpy_dtype(problem.softmax_dtype))
            for name in moved(args, problem):
                arrays[f"t{name}"] = filled(cupy, name, shapes.get(name, number), args)
        sizes = f"batch {problem.batch}, {problem.num_heads} heads, seqlen {problem.seqlen_q} x {problem.seqlen_k}"
        print(f"{problem.dtype}, {sizes}, head_dim {problem.head_dim}, {attn}", flush=True)
        count = {"count": args.count} if TOP_KEYS in passes(args) else {}
        found = attn.tune(**arrays, **count, passes=[pass_.name for pass_ in passes(args)], forget=args.forget)
        print("forgotten" if found is None else found.describe(), end="\n\n", flush=True)
    return 0


def list_candidates(args: argparse.Namespace) -> int:
    chosen = here.devices(args)
    if not chosen:
        raise Failure(f"{NO_GPU}: {here.find_gpu()[1]}; {NAME_ONE}")
    for problem, device, pass_ in itertools.product(problems(args), chosen, passes(args)):
        own = of_pass(args, problem, pass_)
        plans = tuning.candidates(own, device, pass_, operands=operands(args, own, pass_))
        print(f"{pass_} pass on {device.name}, {len(plans)} candidates, the table's row first:")
        print("\n".join(f"  {tuning.Trial(plan=plan).label}" for plan in plans), end="\n\n")
    return 0


def filled(xp: ModuleType, name: str, shape: Contiguous, args: argparse.Namespace) -> Any:
    """An array of this name and shape: whole lengths, or random numbers, of which optional inputs get small ones."""
    rng = xp.random.default_rng(0)
    if name in ("mask", "block_mask"):
        return rng.random(shape.shape, xp.float32) < 0.7
    if name == "kv_lengths":
        return xp.full(shape.shape, args.seqlen_k or args.seqlen, shape.dtype)
    size = 0.01 if name in BY_NAME else 1.0  # times distances, slopes are large all the same
    return (size * rng.standard_normal(shape.shape, xp.float32)).astype(shape.dtype)
