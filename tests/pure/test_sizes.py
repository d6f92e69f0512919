"""Files and functions stay short enough to be read at once. (ruff counts branches and statements of functions.)"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_FILE, LONGEST_FUNCTION = 600, 100  # lines; those of docstrings count in files alone
FILES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("cuflash", "kernels", "bench")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".cu", ".cuh", ".h", ".cc", ".cpp"}
}


TESTS = {
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "*/*.py", "*/*/*.py")  # not deeper, where the caches of tests are
    for path in (ROOT / "tests").glob(pattern)
}


@pytest.mark.parametrize("name", sorted({*FILES, *TESTS}))
def test_no_file_is_long(name):
    assert len((ROOT / name).read_text().splitlines()) <= LONGEST_FILE


def lengths_of_functions(text):
    """(name, lines without the docstring) of every function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node) is not None
            yield node.name, lines_of(node) - (lines_of(node.body[0]) if documented else 0)


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("name", sorted(name for name in FILES if name.endswith(".py")))
def test_no_function_is_long(name):
    long = {f: n for f, n in lengths_of_functions(FILES[name].read_text()) if n > LONGEST_FUNCTION}
    assert not long


def test_lines_are_counted():
    text = "def f():\n" + '    """Of\n    two lines."""\n' + "    x = 1\n" * 99 + "\n\ndef g():\n" + "    x = 1\n" * 100
    assert dict(lengths_of_functions(text)) == {"f": 100, "g": 101}
