"""A mistake at one position of one kernel file, a copy of the kernels that has it, and what notices it."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from cuflash import emulator
from cuflash.gpu.compiler import kernel_directory
from tests.emulate.mutants.trials import TRIALS

KERNELS = kernel_directory()

COPIES = Path(__file__).resolve().parents[1] / ".cache" / "mutants"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mistake: `old` becomes `new` in a file of kernels/. `escapes` is the reason why no trial can notice it."""

    what: str
    file: str
    old: str
    new: str
    trials: tuple[str, ...]
    escapes: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """The file with the mistake."""
        before = (KERNELS / self.file).read_text()
        if before.count(self.old) != 1:
            raise ValueError(f"{self.what}: {self.file} has the text {before.count(self.old)} times: {self.old!r}")
        return before.replace(self.old, self.new)

    @property
    def line(self) -> int:
        """The first line of the file that the mistake changes."""
        lines = ((KERNELS / self.file).read_text().split("\n"), self.text.split("\n"))
        return next(number for number, (old, new) in enumerate(zip(*lines, strict=False), 1) if old != new)

    def write(self) -> Path:
        """A copy of kernels/ with the mistake; always the same folder, so that what was compiled is found again."""
        text = self.text
        folder = COPIES / "".join(c if c.isalnum() else "_" for c in f"{self.file} {self.what}")
        folder.mkdir(parents=True, exist_ok=True)
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            if not (KERNELS / path.relative_to(folder)).exists():
                path.unlink()
        shutil.copytree(KERNELS, folder, dirs_exist_ok=True)
        (folder / self.file).write_text(text)
        return folder

    def caught(self) -> str | None:
        """What the first trial that fails says; None if none does."""
        folder = self.write()
        for name in self.trials:
            try:
                TRIALS[name].run(folder)
            except (emulator.EmulationError, AssertionError) as error:
                return f"{name}: {error}"
        return None


def mutant(what: str, file: str, old: str, new: str, *trials: str, escapes: str = "") -> Mutant:
    return Mutant(what=what, file=file, old=old, new=new, trials=trials, escapes=escapes)
