"""Builds the mutants that the command line names and prints how each was caught, and the score."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from cuflash.gpu.progress import Bar
from tests.emulate.mutants import MIN_CAUGHT, MUTANTS, TRIALS, Mutant


def _run(trial: str) -> None:
    TRIALS[trial].run()


def main() -> int:
    os.environ.setdefault("CUFLASH_CACHE_DIR", str(Path(__file__).parents[2] / ".cache"))
    lines, words = sys.argv[1:2] == ["--lines"], " ".join(x for x in sys.argv[1:] if x != "--lines")
    chosen = [mutant for mutant in MUTANTS if words in f"{mutant.file} {mutant.what}"]
    if not chosen:
        print(f"no mutant's description holds {words!r}")
        return 1
    if lines:
        for mutant in sorted(chosen, key=lambda mutant: (mutant.file, mutant.line)):
            print(f"kernels/{mutant.file}:{mutant.line}: {mutant.what}")
        return 0
    caught = 0
    # What notices a mistake passes without it.
    trials = sorted({trial for mutant in chosen for trial in mutant.trials})
    total = len(trials) + len(chosen)
    with ProcessPoolExecutor(os.cpu_count()) as pool, Bar("mutants", total=total) as bar:
        for _ in pool.map(_run, trials):
            bar.advance()
        for mutant, report in zip(chosen, pool.map(Mutant.caught, chosen), strict=True):
            caught += report is not None
            verdict = "escaped" if report is None else " ".join(report.split())[:120]
            reason = f" ({mutant.escapes})" if mutant.escapes else ""
            bar.print(f"{mutant.file:20} {mutant.what}: {verdict}{reason}")
            bar.advance()
    print(f"{caught} of {len(chosen)} caught")
    return int(caught < MIN_CAUGHT * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
