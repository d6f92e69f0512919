"""Files and functions stay short enough to be read at once.

(ruff counts branches and statements of functions.)
"""

import ast
import re
from pathlib import Path

from tests.many_cases import each

ROOT = Path(__file__).parents[2]
LONGEST_FILE, LONGEST_FUNCTION = 800, 100  # lines; those of docstrings count in files alone
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


@each(sorted({*FILES, *TESTS}))
def test_no_file_is_long(name):
    assert len((ROOT / name).read_text().splitlines()) <= LONGEST_FILE


OF_C = (".cu", ".cuh", ".h", ".cc", ".cpp")
SOURCES = {name: path for name, path in FILES.items() if path.suffix in OF_C} | {
    path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").glob("*/*") if path.suffix in OF_C
}


@each(sorted(SOURCES))
def test_lines_are_short(name):
    """Those of comments and strings, which clang-format leaves as they are; ruff looks at Python."""
    long = [number for number, line in enumerate(SOURCES[name].read_text().splitlines(), 1) if len(line) > 120]
    assert not long


def lengths_of_functions(text):
    """(name, lines without the docstring) of every function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node) is not None
            yield node.name, lines_of(node) - (lines_of(node.body[0]) if documented else 0)


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@each(sorted(name for name in FILES if name.endswith(".py")))
def test_no_function_is_long(name):
    long = {f: n for f, n in lengths_of_functions(FILES[name].read_text()) if n > LONGEST_FUNCTION}
    assert not long


LONGEST_STEP = 45  # lines of a function of the kernels
# Roles that are longer, because they come out with other instructions where parts of them are functions: the products
# of dQ by slices, and those of dP' by chunks. With P' made by a function, the consumer of dV has 2 % more instructions
# with dropout, and spills 20 bytes in place of 16 with a bias and per-key values. With its steps in a struct, the
# deterministic dQ of sm80 spills 84 bytes in place of 28 (float32, head_dim 256), and 188 in place of 96 with dropout.
LONG_ROLES = {
    ("kernels/sm80/backward_dq.cu", "backward_dq"),
    ("kernels/sm90/backward_dq.cuh", "accumulate_dq"),
    ("kernels/sm90/backward_fp32.cu", "make_dk"),
    ("kernels/sm90/backward_fp32.cu", "make_dv"),
}
NO_CODE = re.compile(r"//[^\n]*|^\s*#(?:[^\n]*\\\n)*[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.MULTILINE)
NO_FUNCTION = re.compile(r"\b(struct|class|union|enum|namespace)\b|=\s*$|^[^(]*$")


def lengths_of_c_functions(text):
    """(name, lines from brace to brace) of every function of C++ and CUDA; lambdas are part of what they stand in."""
    code = NO_CODE.sub(lambda found: "\n" * found.group().count("\n"), text)
    blocks: list[tuple[bool, str, int, int, int]] = []  # whether it is a function, its name and lines; the scope around
    parens, start = 0, 0
    for found in re.finditer(r"[(){};]", code):
        if found.group() in "()":
            parens += 1 if found.group() == "(" else -1
            continue
        if found.group() == "{":
            head = re.sub(r"<[^<>]*>", "", code[start : found.start()])
            is_function = parens == 0 and not any(block[0] for block in blocks) and not NO_FUNCTION.search(head)
            name = head.split("(")[0].split()[-1] if is_function else ""
            blocks.append((is_function, name, found.start(), parens, start))
            parens = 0
        elif found.group() == "}":
            is_function, name, begin, parens, start = blocks.pop()
            if is_function:
                yield name, code.count("\n", begin, found.end()) + 1
        if parens == 0:
            start = found.end()


def longer_functions(folder, limit):
    """(file, function) of every function of C++ and CUDA that has more lines."""
    return {
        (name, function)
        for name, path in FILES.items()
        if name.startswith(folder) and not name.endswith(".py")
        for function, lines in lengths_of_c_functions(path.read_text())
        if lines > limit
    }


def test_no_function_of_kernels_is_long():
    assert not longer_functions("", LONGEST_FUNCTION)


def test_steps_of_kernels_are_short():
    assert longer_functions("kernels/", LONGEST_STEP) == LONG_ROLES


def test_lines_are_counted():
    text = "def f():\n" + '    """Of\n    two lines."""\n' + "    x = 1\n" * 99 + "\n\ndef g():\n" + "    x = 1\n" * 100
    assert dict(lengths_of_functions(text)) == {"f": 100, "g": 101}
    kernel = "struct S {\n  template <class T>\n  void f(int x = {}) const {\n"
    kernel += "    auto g = [&](int) {\n      // }\n    };\n  }\n"
    kernel += '  void h() { s = "{"; }\n};\n#define F(x) {\nint a[] = {1};\nS::S(int x)\n    : y(x) {\n}\n'
    assert list(lengths_of_c_functions(kernel)) == [("f", 5), ("h", 1), ("S::S", 2)]
