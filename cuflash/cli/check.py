"""``check``: kinds of problem on this device, or by the kernels in the emulator, against the oracle."""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from cuflash import FlashAttention, testing
from cuflash.arrays.units import in_seconds
from cuflash.cli import here
from cuflash.cli.arguments import add_backend_argument, add_problem_arguments, natural, of_pass, passes, problems
from cuflash.cli.documents import Document, add_json_argument, print_document
from cuflash.cli.here import Failure
from cuflash.cli.parser import Several
from cuflash.cli.plans import compiled
from cuflash.emulator import SCHEDULES, EmulationError, Schedule, building
from cuflash.emulator import passes as emulated
from cuflash.emulator.launching import ORDERS
from cuflash.gpu.progress import Bar
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.spec.inputs import INPUTS
from cuflash.spec.outputs import DEFAULT_NEED, OUTPUT_TANGENTS, SOFTMAX_GRADIENTS
from cuflash.spec.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Pass
from cuflash.spec.problem import Problem
from cuflash.testing import reference, reference_tangents
from cuflash.testing.tangents import Moved, assert_tangents, everything, tangents_by

VERDICTS = {"passed": "passed", "failed": "FAILED", "not_served": "not served"}  # and how they are printed


def add_check_arguments(command: argparse.ArgumentParser) -> None:
    add_backend_argument(command)
    add_json_argument(command)
    command.add_argument("--seed", type=natural, default=0, metavar="N", help="of the random inputs (default: 0)")
    command.add_argument("--quick", action="store_true", help="a few kinds of problem only: seconds, not minutes")
    command.add_argument(
        "--emulate",
        action="store_true",
        help="run the CUDA kernels on the CPU, with every access and barrier checked; what is below goes with it",
    )
    command.add_argument(
        "--schedule",
        nargs="+",
        action=Several,
        choices=ORDERS,
        default=ORDERS,
        metavar="ORDER",
        help=f"who runs next where a GPU leaves it open (default: {' '.join(ORDERS)})",
    )
    add_problem_arguments(command, head_dim=64, seqlen=200, num_heads=2)


def check(args: argparse.Namespace) -> int:
    refuse_stray_arguments(args)
    found = check_emulated(args) if args.emulate else check_here(args)
    counts = Counter(row["verdict"] for row in found.rows)
    if args.json:
        print_document("check", {"on": found.where, "checks": found.rows, **{name: counts[name] for name in VERDICTS}})
    elif not args.emulate:
        print(", ".join(f"{counts[name]} {text}" for name, text in VERDICTS.items() if counts[name]))
    return 1 if counts["failed"] or not counts["passed"] else 0


@dataclass(frozen=True)
class Checks:
    """The checks that were made, and where."""

    where: str
    rows: list[Document] = field(default_factory=list)


def check_here(args: argparse.Namespace) -> Checks:
    xp = here.array_module(args.backend)
    found = Checks(here.describe_here(xp))
    if not args.json:
        print(f"on {found.where}", flush=True)
    cases = list(testing.self_test_cases(args.seed, quick=args.quick))
    width = max(len(name) for name, _ in cases) + len(", with tangents") + 2
    trials = [
        (name, case, with_tangents)
        for name, case in cases
        for with_tangents in (False, True)
        if not with_tangents or ("dout" in case.arrays() and case.axes is None)
    ]
    with Bar("check", total=len(trials)) as bar:
        for name, case, with_tangents in trials:
            row = {"name": name, "dtype": case.dtype, "tangents": with_tangents, **checked(case, with_tangents, xp)}
            found.rows.append(row)
            if not args.json:
                name += ", with tangents" if with_tangents else ""
                bar.print(f"{VERDICTS[row['verdict']]:<12}{case.dtype:<10}{name:<{width}}{row['detail']}")
            bar.advance()
    return found


def checked(case: testing.Case, with_tangents: bool, xp: ModuleType) -> Document:
    """The verdict on a case, and its result that is closest to its bound, or what is wrong."""
    worst: testing.Measurement | None = None
    try:
        if with_tangents:
            moved = everything(case)
            report = assert_tangents(
                case, moved, tangents_by(FlashAttention(**case.keywords), case, moved, convert=xp.asarray)
            )
        else:
            forward, gradients = calls_of(case)
            report = testing.check(forward, case, gradients=gradients, convert=xp.asarray)
    except AssertionError as error:
        verdict, detail = "failed", str(error)
    except NotImplementedError as error:
        verdict, detail = "not_served", str(error)
    else:
        verdict, worst = "passed", max(report, key=lambda m: m.ratio)
        detail = f"{worst.name} closest to its bound: {worst.error:.1e} of {worst.tolerance:.1e}"
    return {
        "verdict": verdict,
        "result": worst and worst.name,
        "error": worst and worst.error,
        "tolerance": worst and worst.tolerance,
        "detail": detail,
    }


def calls_of(case: testing.Case) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What `testing.check` calls for the results, and for the gradients, of a case."""
    attn, random = FlashAttention(**case.keywords), case.random

    def forward(q: Any, k: Any, v: Any, **keywords: Any) -> tuple[Any, ...]:
        return tuple(attn.forward(q, k, v, **testing.optional(keywords), **random))

    def gradients(dout: Any, q: Any, k: Any, v: Any, **keywords: Any) -> tuple[Any, ...]:
        out, lse = attn.forward(q, k, v, **testing.optional(keywords), **random)
        need = (*DEFAULT_NEED, *(name for name in SOFTMAX_GRADIENTS if name[1:] in keywords))
        return attn.backward(dout, q, k, v, out, lse, **testing.optional_backward(keywords), **random, need=need)

    return forward, gradients


def refuse_stray_arguments(args: argparse.Namespace) -> None:
    """Arguments that the kind of check does not look at are mistakes."""
    others = {"backend", "quick"}
    stray = args.given & others if args.emulate else args.given - others - {"seed", "emulate", "json"}
    for name in sorted(stray):
        option = "--" + {"passes": "pass"}.get(name, name.replace("_", "-"))
        raise Failure(f"{option} goes {'without' if args.emulate else 'with'} --emulate")


def check_forward(case: testing.Case, problem: Problem, arrays: dict[str, Any], options: dict[str, Any]) -> None:
    testing.assert_forward(case, *emulated.forward(problem, arrays, **options))


def check_backward(case: testing.Case, problem: Problem, arrays: dict[str, Any], options: dict[str, Any]) -> None:
    results = exact_results(FORWARD, case, problem, arrays)
    testing.assert_backward(case, *emulated.backward(problem, arrays, *results.values(), **options))


def check_jvp(case: testing.Case, problem: Problem, arrays: dict[str, Any], options: dict[str, Any]) -> None:
    moved = Moved(names=problem.moved or ())
    given = {name: x for name, x in arrays.items() if name not in BACKWARD.takes}
    results = dict(zip(JVP.default, emulated.jvp(problem, given | moved.arrays(case), **options), strict=True))
    assert_tangents(case, moved, {name: results[name] for name in OUTPUT_TANGENTS})


def check_backward_jvp(case: testing.Case, problem: Problem, arrays: dict[str, Any], options: dict[str, Any]) -> None:
    moved = Moved(names=problem.moved or ())
    given = arrays | moved.arrays(case) | exact_results(JVP, case, problem, arrays)
    found = emulated.backward_jvp(problem, given, **options)
    assert_tangents(case, moved, dict(zip(BACKWARD_JVP.default, found, strict=True)))


CHECKS = {FORWARD: check_forward, BACKWARD: check_backward, JVP: check_jvp, BACKWARD_JVP: check_backward_jvp}


def exact_results(pass_: Pass, case: testing.Case, problem: Problem, arrays: dict[str, Any]) -> dict[str, Any]:
    """The results of the pass before one of gradients, in float64 and then rounded."""
    given = {name: arrays[name] for name in INPUTS} | testing.optional(arrays) | case.random
    exact: tuple[Any, ...] = reference.forward(problem, **given)
    if pass_.has_tangents:
        tangents = {name[1:]: x for name, x in Moved(names=problem.moved or ()).arrays(case).items()}
        exact += reference_tangents.jvp(problem, tangents=tangents, **given)
    dtypes = itertools.cycle((arrays["q"].dtype, problem.softmax_dtype))
    return {name: x.astype(dtype) for name, x, dtype in zip(pass_.default, exact, dtypes, strict=False)}


def check_emulated(args: argparse.Namespace) -> Checks:
    if building.find_compiler() is None:
        raise Failure(f"there is no compiler for the emulator: {building.NO_COMPILER}")
    schedules = [replace(s, seed=s.seed + args.seed) for s in SCHEDULES if s.order in args.schedule]
    trials = list(itertools.product(problems(args), args.arch or ["9.0"], passes(args)))
    found = Checks("the emulator")
    with Bar("check", total=len(trials) * len(schedules)) as bar:
        for named, arch, pass_ in trials:
            device, problem = DeviceSpec.for_arch(arch), of_pass(args, named, pass_)
            plan = choose_plan(problem, device, pass_)
            if not args.json:
                bar.print(compiled(plan).describe())
            case = testing.Case.from_problem(named, seed=args.seed)
            arrays = case.arrays()
            for schedule in schedules:
                row = emulated_by(schedule, pass_, case, problem, arrays, device)
                found.rows.append({"kernels": [kernel.name for kernel in plan.kernels], **row})
                if not args.json:
                    bar.print(f"{VERDICTS[row['verdict']]:<12}{row['name']:<20}{row['detail']}")
                bar.advance()
            if not args.json:
                bar.print("")
    return found


def emulated_by(
    schedule: Schedule, pass_: Pass, case: testing.Case, problem: Problem, arrays: dict[str, Any], device: DeviceSpec
) -> Document:
    """The verdict on the kernels of a pass, run in one order by the emulator."""
    start = time.perf_counter()
    try:
        CHECKS[pass_](case, problem, arrays, {"arch": device, "schedule": schedule, **case.random})
    except (AssertionError, EmulationError) as error:
        verdict, detail = "failed", str(error)
    else:
        verdict, detail = "passed", in_seconds(time.perf_counter() - start)
    return {
        "name": f"{schedule.order}, {schedule.asynchrony}",
        "dtype": problem.dtype,
        "pass": pass_.name,
        "capability": f"{device.arch / 10:.1f}",
        "verdict": verdict,
        "seconds": time.perf_counter() - start,
        "detail": detail,
    }
