"""python -m bench run | report | accuracy | draw | list"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from cuflash.cli.parser import Parser, exit_code

from .cases import ALL_PASSES, ITEMSIZE
from .suites import SUITES

EVIDENCE = (
    *("memory", "memory-second", "traffic", "training", "pathfinder", "rounding", "streamed", "logsumexp", "ranks"),
    "frameworks",
    "first-call",
    "reductions",
)

# Arguments of `run` by where they are kept, of suites of times and of those of other evidence.
OF_SUITES = {"peers": "peers", "passes": "pass", "case": "case", "seconds": "seconds", "devices": "devices"}
OF_EVIDENCE = {"backend": "backend", "scale": "scale"}

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
SECOND = ROOT / "docs" / "second-derivatives.md"
RANKS = ROOT / "docs" / "notes" / "distributed-measurements.md"


def _names(text: str) -> tuple[str, ...]:
    """Names of a comma-separated list; "none" is the empty one."""
    return () if text == "none" else tuple(filter(None, text.split(",")))


def parser() -> Parser:
    top = Parser(prog="python -m bench", description="Measure cuflash next to its peers.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help="check and time a suite, append JSON lines, print the table")
    run.add_argument("--suite", choices=(*SUITES, *EVIDENCE), default="quick")
    run.add_argument("--backend", choices=("cpu", "gpu"), default="gpu", help=f"of {', '.join(EVIDENCE)}")
    run.add_argument(
        "--peers",
        type=_names,
        metavar="A,B",
        help="contenders next to cuflash, on all cases (default: the suite's; or none)",
    )
    run.add_argument("--pass", dest="passes", choices=(*ALL_PASSES, "all"), default="all")
    run.add_argument("--case", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    run.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the JSON lines")
    run.add_argument("--seconds", type=float, default=0.15, help="time for one measurement (at least 10 runs)")
    run.add_argument("--cores", type=int, metavar="N", help="use the first N cores only")
    run.add_argument("--devices", type=int, default=1, metavar="N", help="GPUs that share the cases of a suite")
    run.add_argument("--scale", type=float, default=1.0, metavar="X", help="times the seconds that pathfinder learns")
    run.add_argument("--revision", help="what to record as the revision, where there is no git checkout")
    report = commands.add_parser("report", help="render tables and plots into docs/ and the README")
    report.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    report.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md", help="gets the tables of speeds")
    report.add_argument("--readme", type=Path, default=ROOT / "README.md", help="gets the headline")
    report.add_argument("--training", type=Path, default=ROOT / "docs" / "training.md", help="gets loss curves")
    report.add_argument("--float8", type=Path, default=ROOT / "docs" / "float8.md", help="gets errors of rounding")
    report.add_argument("--ranks", type=Path, default=RANKS, help="gets several devices")
    report.add_argument("--streamed", type=Path, default=ROOT / "docs" / "streamed.md", help="gets keys in host memory")
    report.add_argument("--evidence", type=Path, default=ROOT / "docs" / "evidence.md", help="gets all evidence")
    report.add_argument("--second", type=Path, default=SECOND, help="gets memory of second derivatives")
    report.add_argument("--print", action="store_true", help="print the tables, leave the pages alone")
    accuracy = commands.add_parser("accuracy", help="errors on many random problems, as a histogram")
    accuracy.add_argument("--dtype", choices=ITEMSIZE, default="float32")
    accuracy.add_argument("--precision", choices=("highest", "tf32"), default="highest")
    accuracy.add_argument("--problems", type=int, default=200, metavar="N")
    accuracy.add_argument("--backend", choices=("cpu", "gpu"), default="gpu")
    accuracy.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the JSON lines")
    accuracy.add_argument("--revision", help="what to record as the revision, where there is no git checkout")
    draw = commands.add_parser("draw", help="run the pages of docs/examples and draw their pictures")
    draw.add_argument("pages", nargs="*", metavar="PAGE", help="names of pages (default: all)")
    commands.add_parser("list", help="print suites and cases")
    return top


def _limit_cores(count: int | None) -> None:
    """Go on with so many cores, as a new process: threads that NumPy has started keep the cores that they had."""
    if count is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        sys.exit("--cores: not possible on this system")
    allowed = sorted(os.sched_getaffinity(0))
    if count < 1 or count > len(allowed):
        sys.exit(f"--cores: got {count}, expected 1 to {len(allowed)}, which this process may use")
    if count < len(allowed):
        os.sched_setaffinity(0, allowed[:count])
        os.execv(sys.executable, sys.orig_argv)


def _refuse_unused(args: argparse.Namespace) -> None:
    """Arguments of `run` that the suite does not look at are mistakes."""
    is_evidence = args.suite in EVIDENCE
    unused = OF_SUITES if is_evidence else OF_EVIDENCE
    for name in sorted(args.given & unused.keys()):
        takers = "a suite of times, which python -m bench list shows with cases" if is_evidence else ", ".join(EVIDENCE)
        sys.exit(f"--{unused[name]}: got --suite {args.suite}, expected {takers}")
    if "scale" in args.given and args.suite != "pathfinder":
        sys.exit(f"--scale: got --suite {args.suite}, expected pathfinder")


def _run_evidence(args: argparse.Namespace) -> int:
    from .evidence import run, shown

    try:
        records = run(args.suite, args.backend, out=args.out, revision=args.revision, scale=args.scale)
    except (ValueError, ImportError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"\n{shown(args.suite, records)}")
    return 0


def _run(args: argparse.Namespace) -> int:
    _refuse_unused(args)
    _limit_cores(args.cores)
    if args.suite in EVIDENCE:
        return _run_evidence(args)
    suite = SUITES[args.suite]
    from .report import heading, markdown
    from .run import failures, run_suite

    passes = ALL_PASSES if args.passes == "all" else (args.passes,)
    try:
        records = run_suite(
            args.suite,
            suite,
            out=args.out,
            peers=args.peers,
            passes=passes,
            match=args.case,
            seconds=args.seconds,
            revision=args.revision,
            devices=args.devices,
        )
    except (ValueError, ImportError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"\n{heading(records)}\n\n{markdown(records)}")
    wrong = failures(records)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _report(args: argparse.Namespace) -> int:
    from .evidence import draw_all, page_sections, sections
    from .report import plot, readme_section, runs, section, update

    try:
        texts = {
            (args.readme, ""): readme_section(args.results),
            (args.page, ""): section(args.results, args.page),
            (args.page, "frameworks"): sections("frameworks", args.results, args.page),
            (args.page, "first-call"): sections("first-call", args.results, args.page),
            (args.page, "logsumexp"): sections("logsumexp", args.results, args.page),
            (args.page, "reductions"): sections("reductions", args.results, args.page),
            (args.training, ""): sections("training", args.results, args.training),
            (args.float8, ""): sections("rounding", args.results, args.float8),
            (args.ranks, ""): sections("ranks", args.results, args.ranks),
            (args.streamed, ""): sections("streamed", args.results, args.streamed),
            (args.second, ""): sections("memory-second", args.results, args.second),
            **{(args.evidence, name): text for name, text in page_sections(args.results, args.evidence).items()},
        }
        if args.print:
            print(*filter(None, texts.values()), sep="\n\n")
            return 0
        for records in runs(args.results).values():
            plot(records, args.results)
        draw_all(args.results)
        changed = [path for (path, name), text in texts.items() if text and update(path, text, name)]
        for path in dict.fromkeys(changed):
            print(f"updated {path}")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    return 0


def _accuracy(args: argparse.Namespace) -> int:
    from .accuracy import append, histogram, measure, random_cases, record

    gpu = args.backend == "gpu"
    try:
        xp = importlib.import_module("cupy" if gpu else "numpy")
    except ImportError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    measurements = measure(xp, list(random_cases(args.dtype, args.problems)), args.precision)
    row = record(measurements, gpu=gpu, dtype=args.dtype, precision=args.precision, revision=args.revision)
    append(args.out, row)
    print(histogram(row))
    failed = any(found["outside"] for found in row["results"].values())
    return 1 if failed and args.precision == "highest" else 0


def _draw(args: argparse.Namespace) -> int:
    from .examples import draw

    try:
        draw(args.pages)
    except (ValueError, ImportError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    return 0


def _list() -> int:
    for name, suite in SUITES.items():
        print(f"{name}: {suite.about} (peers: {', '.join(suite.peers)})")
        print(*(f"  {case.name}" for case in suite.cases), sep="\n")
    from .evidence import EVIDENCE as found

    for name, evidence in found.items():
        print(f"{name}: {evidence.about} (backends: {', '.join(evidence.backends)})")
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: _run_command(parser(), argv))


def _run_command(top: Parser, argv: list[str] | None) -> int:
    args = top.parse_args(argv)
    if args.command is None:
        top.print_help()
        return 0
    if args.command == "run":
        return _run(args)
    if args.command == "accuracy":
        return _accuracy(args)
    if args.command == "draw":
        return _draw(args)
    return _report(args) if args.command == "report" else _list()


if __name__ == "__main__":
    sys.exit(main())
