"""Calls as users make them: arrays of any strides and alignment, some results given, any gradients wanted."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.spec.passes import BACKWARD, FORWARD
from cuflash.testing import STRIDES, lay_out

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout", "pages", "packed")


def address(array):
    return array.ctypes.data


def results_of(case, arrays, pass_, need):
    """Arrays for the results of a pass, by name."""
    problem = case.problem
    shapes = {"out": (problem.out_shape, case.dtype), "lse": (problem.lse_shape, problem.softmax_dtype)}
    if pass_ is BACKWARD:
        shapes = {name: (arrays[name[1:]].shape, arrays[name[1:]].dtype) for name in need if name[1:] in arrays}
        shapes |= {name: ((), problem.softmax_dtype) for name in ("dscale", "dsoftcap") if name in need}
    return {name: np.empty(shape, ct.numpy_dtype(str(dtype))) for name, (shape, dtype) in shapes.items()}


def shifted(array, by):
    """A copy whose first element lies `by` elements past a multiple of 64 bytes, strides kept."""
    reaches = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    low, high = sum(r for r in reaches if r < 0), sum(r for r in reaches if r > 0)
    storage = np.zeros(high - low + array.itemsize + 64, np.uint8)
    offset = -low + (by * array.itemsize - storage.ctypes.data + low) % 64
    copy = np.ndarray(array.shape, array.dtype, storage, offset, array.strides)
    copy[...] = array
    return copy


@st.composite
def calls(draw, pass_, features=FEATURES):
    """Arrays of a call, as it may be given them, and which gradients it wants."""
    case = draw(ct.cases(features=features, max_scores=2**10, max_seqlen=65))
    if case.page_size and pass_ is BACKWARD:
        case = replace(case, page_size=0)
    if case.page_size:
        case = replace(case, block_mask=None)
    arrays = case.arrays()
    need = tuple(draw(st.lists(st.sampled_from(ct.gradients_of(case.problem)), min_size=1, unique=True)))
    given_arrays = {name: x for name, x in arrays.items() if pass_ is BACKWARD or name not in ("dout", "dlse")}
    if pass_ is BACKWARD:
        given_arrays |= results_of(case, arrays, FORWARD, ())
    strides = draw(st.sampled_from(STRIDES))
    results = {name: lay_out(x, strides, np.array) for name, x in results_of(case, arrays, pass_, need).items()}
    given_arrays |= {name: x for name, x in results.items() if draw(st.booleans())}
    for name, array in given_arrays.items():
        by = draw(st.sampled_from((0, 0, 0, 1, 2, 4, 8)))
        if by and array.size:
            given_arrays[name] = shifted(array, by)
    options = replace(
        case.options,
        deterministic=draw(st.booleans()),
        precision=draw(st.sampled_from(("highest", "tf32"))),
    )
    return case, options, given_arrays, need
