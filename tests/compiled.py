"""Calls of the compiled core of the CPU path, and its library."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cuflash.testing as ct
from cuflash import cpu
from cuflash.cpu import core

CHECKOUT = Path(__file__).parents[1]


def functions():
    """Those of the library."""
    library = core._load()
    assert not isinstance(library, str), library
    return library.functions


def instruction_sets():
    """The instruction sets that there is code for here, by how many better ones are left out."""
    return [] if core.why_not() is not None else list(core.instruction_sets().items())


INSTRUCTION_SETS = instruction_sets()
NUMPY = ("NumPy", -1)  # a way like these


def take_way(patch, way):
    """Have calls computed with an instruction set, or by NumPy."""
    if way == NUMPY[1]:
        patch.setattr(core, "why_not", lambda problem=None: "a test of NumPy")
    else:
        patch.setattr(core, "SKIPPED_INSTRUCTION_SETS", way)


@contextlib.contextmanager
def way_taken(way):
    """The same within a statement."""
    with pytest.MonkeyPatch.context() as patch:
        take_way(patch, way)
        yield


def run(case, without=(), **replaced):
    """out, lse and every gradient that there is, by name."""
    arrays, problem = case.arrays() | replaced, case.problem
    inputs, need = ct.qkv(arrays), [x for x in ct.gradients_of(problem) if x not in without]
    out, lse = cpu.forward(problem, *inputs, **ct.optional(arrays) | case.random)
    results = {"out": out, "lse": lse}
    if "dout" in arrays:
        optional = {**ct.optional_backward(arrays), **case.random, "need": need}
        gradients = cpu.backward(problem, arrays["dout"], *inputs, out, lse, **optional)
        results |= zip(need, gradients, strict=True)
    return results


def much_work(patch):
    """Work of any size is worth any number of threads."""
    patch.setattr(core, "SERIAL_NS", -1)
    patch.setattr(core, "THREAD_NS", 1e-3)


def run_python(code, *args, **environment):
    command = [sys.executable, "-c", code, *args]
    paths = (str(CHECKOUT), os.environ.get("PYTHONPATH", ""))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, f"status {ended.returncode}\n{ended.stderr[-4000:]}"
    return ended.stdout
