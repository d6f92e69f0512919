"""Reductions of the attention weights of a case by the kernels in the emulator."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.emulator import passes
from cuflash.spec.passes import COLUMN_MAX, COLUMN_SUMS, TOP_KEYS
from cuflash.spec.problem import make_problem
from tests.reductions import attention_of, inputs_of, lse_of, weights_of


def reduced(case, arch, count, deterministic=False, precision="highest", column_tiles=None, **options):
    """The weights of rows, and the column sums, the column maximum and the strongest keys of a case."""
    attn, arrays = attention_of(case), inputs_of(case)
    lse = lse_of(attn, arrays)
    arrays["v"] = arrays["k"][..., :0]
    optional = {name: x for name, x in arrays.items() if name not in ("q", "k", "v")}
    static = replace(case.options, dropout=0.0, deterministic=deterministic, precision=precision)
    problem = make_problem(static, arrays["q"], arrays["k"], arrays["v"], **optional)
    weights = weights_of(case, lse)
    inputs = {**arrays, "lse": lse}
    call: Any = functools.partial(passes._call, arch=arch, **options)
    factors = {} if case.seed % 2 else {"dlse": weights}
    (sums,) = call(COLUMN_SUMS, problem, inputs | factors, COLUMN_SUMS.default, tiles=column_tiles)
    (largest,) = call(COLUMN_MAX, problem, inputs, COLUMN_MAX.default, tiles=column_tiles)
    shape = (*lse.shape, count)
    of_top = {"key_indices": np.empty(shape, np.int32), "key_weights": np.empty(shape, lse.dtype)}
    return weights, sums, largest, call(TOP_KEYS, problem, inputs | of_top, TOP_KEYS.default)
