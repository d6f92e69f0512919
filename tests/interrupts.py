"""Errors at any line of some files: KeyboardInterrupt, as Ctrl-C raises it there, and others."""

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import cuflash


class Interrupt:
    """Counts the lines of this thread that are run in files, and raises an error at one of them."""

    def __init__(
        self, files: Callable[[str], bool], line: int | None = None, error: type[BaseException] = KeyboardInterrupt
    ) -> None:
        self.files, self.line, self.error = files, line, error
        self.functions: list[str] = []  # that of each line
        self._entered: dict[FrameType, set[int]] = {}  # lines by frame
        self.where = ""  # the function that was interrupted

    @property
    def lines(self) -> int:
        return len(self.functions)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self.files(frame.f_code.co_filename):
            return None
        if event == "return":
            self._entered.pop(frame, None)
        if event == "line" and not self._leaves_context(frame):
            self.functions.append(frame.f_code.co_name)
            if self.lines == self.line:
                self.where = self.functions[-1]
                raise self.error
        return self._trace

    def _leaves_context(self, frame: FrameType) -> bool:
        """Whether the line is that of a with statement again, which releases a lock, say, before any signal comes."""
        entered = self._entered.setdefault(frame, set())
        is_known, line = frame.f_lineno in entered, frame.f_lineno
        entered.add(line)
        return is_known and linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("with ")


def of_package(*names: str) -> Callable[[str], bool]:
    """Files of these modules and folders of the package."""
    package = Path(cuflash.__file__).parent
    missing = [name for name in names if not (package / name).exists()]
    assert not missing, f"of the package, {missing} do not exist"
    return lambda path: any(f"/cuflash/{name}" in path for name in names)
