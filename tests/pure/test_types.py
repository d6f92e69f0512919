"""What type checkers say of code that uses cuflash: of the pages' examples, of results, and of misspelt keywords.

Checkers find the package where `pip install` puts it, from a wheel and from an editable one.
"""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import cuflash
import cuflash.distributed
from cuflash.spec import inputs, outputs
from tests.packages import CHECKOUT, builder
from tests.sampling import sample

PAGES = (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md")))
# What the examples of a kind begin with, and those of which other kinds run before them. Not those for Ray: without
# Ray, checkers do not know what its decorators make of a class.
BEFORE = {
    "python": ("", ()),
    "python gpu": ("import cuflash; import numpy as np", ()),
    "python mpi": ("", ()),
    "python dask": ("", ()),
    "python torch": ("", ("python",)),
    "python jax": ("", ("python",)),
}
# Functions on pages have no annotations; what they do is checked.
MYPY = ("--strict", "--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls")
MYPY_CONFIG = """
[mypy]
[mypy-cupy.*,cupyx.*,mpi4py.*,dask.*,distributed.*,sklearn.*,bench.*]
ignore_missing_imports = true
[mypy-torch.*,jax.*]
ignore_missing_imports = true
follow_imports = skip
"""
PYRIGHT_CONFIG = {
    "reportMissingImports": False,
    "reportMissingModuleSource": False,
    "reportUnnecessaryTypeIgnoreComment": True,
    "exclude": ["*_torch.py", "*_jax.py"],  # to read the types of these takes minutes
}


def examples(text, kind):
    """A module of the examples of a kind, at the lines that they have on a page; empty without any."""
    start, before = BEFORE[kind]
    lines = [start, *[""] * text.count("\n")]
    found = [match for match in re.finditer(r"^```(.+)\n((?s:.*?))^```", text, re.MULTILINE) if match[1] == kind]
    for match in found and re.finditer(r"^```(.+)\n((?s:.*?))^```", text, re.MULTILINE):
        if match[1] in (kind, *before):
            first = text.count("\n", 0, match.start(2))
            for number, line in enumerate(match[2].splitlines(), first):
                lines[number] = line
    return "\n".join(lines).rstrip() + "\n" if found else ""


RESULTS = """
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy  # has no types
import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import cuflash
import cuflash.distributed as cd


class Tensor: ...


def results(
    half: NDArray[np.float16],
    k: NDArray[np.float64],
    v: NDArray[np.float32],
    other: Tensor,
    ranks: cd.ContextParallel[None],
) -> cuflash.ForwardResult:
    attn = cuflash.FlashAttention(causal=True)
    shaped = np.zeros((5, 4), np.float16)
    for own in (attn, cuflash.FlashAttention(score=lambda s, i, j, *, x: s * x[i]), ranks):
        assert_type(own.forward(half, k, v).out, NDArray[np.float16])
        assert_type(own.forward(half, k, v).lse, NDArray[Any])
        assert_type(own.forward(shaped, k, v).lse, NDArray[Any])
        assert_type(own.jvp(half, k, v, tq=half).tout, NDArray[np.float16])
        assert_type(own.jvp(half, k, v, tq=half).tlse, NDArray[Any])
        assert_type(own.forward(other, other, other).lse, Tensor)
        assert_type(own.backward(half, half, k, v, half, v).dq, NDArray[np.float16])
        assert_type(own.backward(half, half, k, v, half, v, need=("dk",)).dk, NDArray[np.float64])
        assert_type(own.backward_jvp(half, half, k, v, half, v, half, v, tq=half).tdv, NDArray[np.float32])
        bias = {"bias": half}
        own.forward(half, k, v, seed=np.int64(1), **bias)
        own.backward(half, half, k, v, half, v, **bias)
        own.jvp(half, k, v, **bias, tq=half)
        on_device = cupy.zeros((5, 4))
        assert_type(own.forward(on_device, on_device, on_device).out, Any)
        assert_type(own.backward(on_device, on_device, on_device, on_device, on_device, on_device).dq, Any)
        own.forward(on_device, on_device, on_device).lse.get()
    dq, dk, dv = attn.backward(half, half, k, v, half, v)
    assert_type(dq, NDArray[np.float16])
    assert_type(dk, NDArray[np.float64])
    assert_type(dv, NDArray[np.float32])
    attn.backward(half, half, k, v, half, v).dbias  # type: ignore
    attn.backward(half, half, k, v, half, v, need=("dbias",)).dbias
    attn.backward(half, half, k, v, half, v, need=("dbias",)).dbais  # type: ignore
    assert_type(cuflash.attention(half, k, v, mask=k > 0), NDArray[np.float16])
    assert_type(cuflash.attention(other, k, v), Tensor)
    assert_type(cuflash.merge([half], [v]).out, NDArray[np.float16])
    assert_type(cuflash.merge_backward(half, [half], [v], half, v).dlses, tuple[NDArray[np.float32], ...])
    split = cd.zigzag(5, 2)
    assert_type(split.part(half, 0), NDArray[np.float16])
    assert_type(split.whole([other, other]), Tensor)
    assert_type(cuflash.hessian_vector_product(attn, half, half, k, v, tq=half).tdk, NDArray[np.float64])
    out = attn.forward(half, *cuflash.streamed(k, v)).out
    assert_type(out, NDArray[np.float16])
    return attn.forward(half, k, v)


def scored(
    q: NDArray[np.float64],
    attn: cuflash.FlashAttention,
    options: dict[str, Any],
    maybe: Callable[..., Any] | None,
) -> None:
    x = {"x": q}
    own = cuflash.FlashAttention(score=lambda s, i, j, *, x: s * x[i])
    out, lse = own.forward(q, q, q, **x)
    own.backward(out, q, q, q, out, lse, **x, need=("dx",)).dx
    own.jvp(q, q, q, **x, tx=q)
    own.plan(q, q, q, **x)
    cuflash.FlashAttention(mask=lambda i, j, *, x: x[i] == x[j]).forward(q, q, q, **x)
    cuflash.FlashAttention(**options).forward(q, q, q, x=q)
    attn.forward(q, q, q, x=q)  # of any kind
    cuflash.FlashAttention(score=maybe).forward(q, q, q, x=q)
    cuflash.FlashAttention(mask=maybe).forward(q, q, q, x=q)
    attn.forward(q, q, q, bias=q)
    cuflash.attention(q, q, q, score=lambda s, i, j, *, x: s * x[i], x=q)
"""

# How many arrays a method takes without keywords.
POSITIONAL = {
    **dict.fromkeys(("forward", "decode", "plan", "compile", "tune", "jvp"), 3),
    "backward": 6,
    "backward_jvp": 8,
}
OPTIONS = {
    "causal": True, "scale": 1.0, "window": (1, None), "softcap": 1.0, "layout": "bshd", "deterministic": True,
    "batch_invariant": True, "precision": "tf32", "dropout": 0.5, "block_size": 64,
}  # fmt: skip
VALUES = {"seed": 1, "offset": 2, "need": ["dq"], "passes": ["jvp"], "remember": False, "forget": True}


class Method(NamedTuple):
    """A method, and the keywords that it has without a score or a mask function."""

    owner: str
    name: str
    keywords: tuple[str, ...]

    def call(self, **keywords):
        given = "".join(f", {name}={value}" for name, value in keywords.items())
        return f"    {self.owner}.{self.name}({', '.join('q' * POSITIONAL[self.name])}{given})"


def keywords_of(owner, method, *typed_dicts):
    """Those of the signature but for positional ones, and those of typed dictionaries, which say what `**` takes."""
    parameters = inspect.signature(getattr(owner, method)).parameters.values()
    own = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
    return tuple(dict.fromkeys((*own, *(name for x in typed_dicts for name in x.__annotations__))))


METHODS = [
    Method(owner, name, keywords_of(of, name, *typed_dicts))
    for owner, of, methods in (
        (
            "attn",
            cuflash.FlashAttention,
            {
                "forward": (),
                "backward": (),
                "jvp": (outputs.JvpArrays,),
                "backward_jvp": (outputs.BackwardJvpArrays,),
                "plan": (outputs.AllPassArrays,),
                "compile": (inputs.WithTangents,),
                "tune": (inputs.WithTangents,),
            },
        ),
        (
            "ranks",
            cuflash.distributed.ContextParallel,
            {
                "forward": (inputs.OptionalArrays,),
                "decode": (inputs.OptionalArrays,),
                "backward": (inputs.OptionalArrays,),
                "jvp": (inputs.WithTangents,),
                "backward_jvp": (inputs.WithTangents,),
                "plan": (inputs.OptionalArrays,),
            },
        ),
    )
    for name, typed_dicts in methods.items()
]


def misspelt(keyword):
    """With its two last letters swapped, or its last one doubled."""
    swapped = keyword[:-2] + keyword[-1] + keyword[-2]
    return swapped if swapped != keyword else keyword + keyword[-1]


# Keywords that a method has only to say that it does not serve them: checkers must refuse them, too.
REFUSED = {("ranks", "backward"): ("dmax",)}


def keyword_calls():
    """A module that gives all keywords to each method, and has errors that checkers must find: misspelt ones."""
    lines = [
        "from typing import Any",
        "import cuflash",
        "import cuflash.distributed as cd",
        "def calls(q: Any, ranks: cd.ContextParallel[None]) -> None:",
        "    attn = cuflash.FlashAttention()",
    ]
    for method in METHODS:
        refused = REFUSED.get((method.owner, method.name), ())
        values = {name: VALUES.get(name, "q") for name in method.keywords if name not in refused}
        lines.append(method.call(**values))
        lines += [f"{method.call(**{name: 'q'})}  # type: ignore" for name in refused]
        for name in sample(values, 4):
            lines.append(f"{method.call(**{misspelt(name): values[name]})}  # type: ignore")
    for name, value in OPTIONS.items():
        for call in ("cuflash.FlashAttention(", "cuflash.attention(q, q, q, ", "cd.ContextParallel(q, "):
            if "attention" not in call or name != "deterministic":
                lines.append(f"    {call}{name}={value!r})")
            lines.append(f"    {call}{misspelt(name)}={value!r})  # type: ignore")
    return "\n".join(lines) + "\n"


OF_TORCH = """
from typing import Any

import cuflash
import cuflash.jax
import cuflash.torch


def calls(x: Any, attn: cuflash.FlashAttention[None]) -> None:
    for attention in (cuflash.torch.attention, cuflash.jax.attention):
        attention(x, x, x, causal=True, window=(1, None), deterministic=True, bias=x, mask=x, kv_lengths=x, seed=x)
        attention(x, x, x, casual=True)  # type: ignore
        attention(x, x, x, return_lse=True, bais=x)  # type: ignore
        attention(x, x, x, attn=attn, bias=x)
        attention(x, x, x, attn=attn, y=x)  # type: ignore
        attention(x, x, x, score=lambda s, i, j, *, y: s * y[i], y=x)
        attention(x, x, x, mask=lambda i, j, *, y: y[i] == y[j], y=x, return_lse=True)
        attention(x, x, x, attn=cuflash.FlashAttention(score=lambda s, i, j, *, y: s * y[i]), y=x)
"""


def has(checker):
    return pytest.mark.skipif(importlib.util.find_spec(checker) is None, reason=f"{checker} is not installed")


class Project(NamedTuple):
    """A folder with code of a user, and the Python that it is for."""

    folder: Path
    python: Path

    def check(self, checker, *arguments):
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
        command = [sys.executable, "-m", checker, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    def mypy(self, *files):
        return self.check("mypy", "--python-executable", str(self.python), *MYPY, *files)

    def pyright(self):
        return self.check("pyright")


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """`tests.packages.builder`."""
    pytest.importorskip("setuptools", minversion="77", reason="the wheel is built with setuptools 77 or later")
    return builder(tmp_path_factory)


@pytest.fixture(scope="module", params=["editable", "wheel"])
def project(request, build, tmp_path_factory):
    """One for an environment with cuflash as `pip install` puts it there, and with all else that is installed here."""
    unpacked = build(request.param, "/no/such/compiler").unpacked
    folder = tmp_path_factory.mktemp("project")
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    paths = {name: str(venv) for name in ("base", "platbase", "installed_base", "installed_platbase")}
    purelib = Path(sysconfig.get_path("purelib", "venv", paths))
    for path in unpacked.iterdir():
        path.rename(purelib / path.name)
    here = sysconfig.get_path("purelib")
    numpy = Path(np.__file__).parents[1]
    (purelib / "of_this_environment.pth").write_text(f"{here}\n{numpy}\n")
    modules = {"results.py": RESULTS, "keywords.py": keyword_calls(), "keywords_torch.py": OF_TORCH}
    for path in PAGES:
        for kind in BEFORE:
            name = re.sub(r"\W", "_", f"{path.relative_to(CHECKOUT).with_suffix('')} {kind}")
            modules[f"{name}.py"] = examples(path.read_text(), kind)
    for name, text in modules.items():
        if text:
            (folder / name).write_text(text)
    (folder / "mypy.ini").write_text(MYPY_CONFIG)
    # By these pyright reads the environment itself, and runs no Python.
    where = {"venvPath": str(venv.parent), "venv": venv.name, "pythonVersion": sysconfig.get_python_version()}
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT_CONFIG | where))
    return Project(folder, venv / "bin" / "python")


@has("mypy")
@pytest.mark.one_in(2)
def test_mypy_has_nothing_to_say(project):
    code, said = project.mypy(".")
    assert code == 0, said


@has("pyright")
@pytest.mark.one_in(2)
def test_pyright_has_nothing_to_say(project):
    code, said = project.pyright()
    assert code == 0, said
