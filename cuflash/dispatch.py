"""From the arrays of a call to the backend that computes them, and back to arrays of the caller."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.cpu import backend as cpu_backend
from cuflash.cpu import reductions as reductions_on_numpy
from cuflash.spec.array_imports import is_cupy
from cuflash.spec.backends import PassBackend, ReductionBackend
from cuflash.spec.call import Backend, prepare
from cuflash.spec.options import Options
from cuflash.spec.passes import Pass
from cuflash.streaming import calls as streaming_backend
from cuflash.streaming import reductions as reductions_of_streamed


def compute(
    pass_: Pass,
    options: Options,
    arrays: dict[str, Any],
    required: Sequence[str],
    need: tuple[str, ...],
    random: tuple[int, int],
) -> Sequence[Any]:
    """The results `need` of a pass, as arrays of the caller: from a call like an earlier one, or after all checks.

    Parameters are those of `prepare` and of `PassBackend.compute`.
    """
    backend: Backend | None = "numpy" if type(arrays["q"]) is np.ndarray else "cupy" if is_cupy(arrays["q"]) else None
    if backend is not None:
        module: Any = backend_of(backend)
        repeated = module.repeated(pass_, options, arrays, need, random)
        if repeated is not None:
            return repeated
    call = prepare(options, arrays, required, need, need)
    results = backend_of(call.backend).compute(pass_, call.options, call.arrays, call.need, random)
    if not call.is_direct:
        return call.exported(results, arrays)
    if call.backend == "numpy":
        cpu_backend.remembered(pass_, options, arrays, need)
    return results


@functools.cache
def backend_of(backend: Backend) -> PassBackend:
    """The module that computes with arrays of one backend; importing the one for CuPy's arrays imports CuPy."""
    if backend == "numpy":
        return cpu_backend
    if backend == "streamed":
        return streaming_backend
    from cuflash.gpu import backend as gpu_backend

    return gpu_backend


@functools.cache
def reductions_of(backend: Backend) -> ReductionBackend:
    """The module that reduces the attention weights of arrays of one backend."""
    if backend == "numpy":
        return reductions_on_numpy
    if backend == "streamed":
        return reductions_of_streamed
    from cuflash.gpu import reductions as reductions_on_cupy

    return reductions_on_cupy
