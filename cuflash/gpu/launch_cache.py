"""Which launch a call finds: the caches that make all calls but the first of a problem cheap.

The first call of a problem binds its arrays, plans it and compiles or loads its kernels. The key under which the
`Launch` is kept has everything that it depends on: options, shapes, strides, dtypes, pointer alignment, device. Later
calls compare their arrays with those of the latest launches for such arguments (`repeated`), and look up the key if
none serves them (`find_launch`).

The number of keys is an exception. A forward pass whose k and v grow by a row with each call, as they do in decoding,
finds the launch of the call before: the key has only those properties of the number of keys that a plan depends on.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from cuflash.gpu.device import device_spec
from cuflash.gpu.launch import Launch, bind_on_device
from cuflash.gpu.replay import current_launches, forget_recordings
from cuflash.gpu.signature import Signature, form_of
from cuflash.gpu.tuning import tuned_plan
from cuflash.spec.batch_axes import Axes, axes_of
from cuflash.spec.binding import FIXED, Growing, growing_keys
from cuflash.spec.options import Options
from cuflash.spec.passes import Pass

MAX_LAUNCHES = 1024  # launches that are kept; each takes 10 KB
MOST_KNOWN = 2048  # keys of launches that a call looks up before it checks its arrays

_launches: dict[tuple, Launch] = {}
# The latest launch by pass, options, results, names and types of the arrays, and the shape of the first one, q. So a
# cache may have grown. For calls that alternate there is a launch by the forms of all arrays, too.
_known: dict[tuple, Launch] = {}
# Caches by which calls find these launches without their keys; values are launches, or have one as `launch`.
shortcuts: list[dict[tuple, Any]] = [_known]
bound_launches: set[weakref.ref[Any]] = set()  # those of `cuflash.gpu.bound` that are alive


# ---- By a key of all properties --------------------------------------------------------------------------------------


def find_launch(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], results: tuple[str, ...]
) -> tuple[Launch, list[int], int] | Axes:
    """The launch of a call, the pointers of its arrays, which are on the current device, and its number of keys.

    Where its batch axes need several launches, these axes instead.
    """
    names, axis, seqlen_k, planned_for = growing = growing_keys(options, arrays) if pass_.any_length else FIXED
    key: list[Any] = [pass_, options, results, planned_for]
    pointers: list[int] = []
    for name, array in arrays.items():
        if array is not None:
            memory, shape = array.data, array.shape
            pointer = memory.ptr
            pointers.append(pointer)
            if name in names:
                key += (shape[:axis], shape[axis + 1 :])
            else:
                key.append(shape)
            key += (name, array.strides, array.dtype, pointer & 15, memory.device_id)
    key.append(arrays["k"].data.ptr == arrays["v"].data.ptr)  # then v may be the first columns of k
    any_length_key = tuple(key)
    launch = _launches.get(any_length_key) or _launches.get((any_length_key, seqlen_k))
    if launch is None:
        axes = axes_of(options, arrays, results)
        if axes is not None:
            return axes
        while True:
            before = current_launches()
            launch = _planned(pass_, options, arrays, results, growing)
            if before is current_launches():
                break  # else another thread has tuned meanwhile, and this may be the plan of before
        serves_any = launch.any_length or not names
        keep(_launches, any_length_key if serves_any else (any_length_key, seqlen_k), launch)
    return launch, pointers, seqlen_k or launch.seqlen_k


def _planned(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], results: tuple[str, ...], growing: Growing
) -> Launch:
    """A new launch, for calls like this one."""
    binding = bind_on_device(pass_, options, arrays, results)
    plan = tuned_plan(binding.problem, device_spec(arrays["q"].data.device_id), pass_, **binding.layout)
    launch = Launch.of(binding, plan, arrays, growing)
    seqlen_q = plan.problem.seqlen_q
    launch.signature = Signature.of(options, arrays, seqlen_q, growing if launch.any_length else FIXED)
    launch.latest = launch.signature.forms, launch.seqlen_k
    return launch


def keep(cache: dict[tuple, Any], key: tuple, launch: Any) -> None:
    """Keep a launch, or what has one as `launch`, in a cache. If there are too many, the half used last stays."""
    if len(cache) >= MAX_LAUNCHES:
        by_use = sorted(list(cache.items()), key=lambda item: item[1].last_call)
        for old_key, _ in by_use[: MAX_LAUNCHES // 2]:
            cache.pop(old_key, None)
        alive = {*_launches.values()}
        for shortcut in shortcuts:  # by which calls would find, and keep, the launches that are gone
            for old_key, old in [*shortcut.items()]:
                if getattr(old, "launch", old) not in alive:
                    shortcut.pop(old_key, None)
    cache[key] = launch


# ---- By a comparison with the latest calls ---------------------------------------------------------------------------


def repeated(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], need: tuple[str, ...], random: tuple[int, int]
) -> tuple[Any, ...] | None:
    """What `cuflash.gpu.backend.compute` gives for arrays like those of a recent call, which are CuPy's, or None.

    Arrays that are None are absent. The others may be of any library. This compares the arrays with those of the latest
    call with such a q. `compute` takes the host twice as long: it checks their libraries, and builds a key of all their
    properties.
    """
    present = {name: x for name, x in arrays.items() if x is not None}
    values = [*present.values()]
    key = (pass_, options, need, *present, *map(type, values), values[0].shape)
    launch = _known.get(key)
    if launch is None:
        return None
    forms = [*map(form_of, values)]
    results = launch.repeat(values, forms, random)
    if results is None and (launch := _known.get((*key, *forms))) is not None:
        results = launch.repeat(values, forms, random)
    return results


def remember(
    pass_: Pass, options: Options, arrays: Mapping[str, Any], results: tuple[str, ...], launch: Launch
) -> None:
    """Let later calls on arrays like these find the launch before they are checked."""
    present = {name: x for name, x in arrays.items() if x is not None}
    if (options.score or options.mask_function) and "cu_seqlens_q" in present:
        return  # whether options take the place of functions depends on whether the starts of keys are the same array
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    values = [*present.values()]
    key = (pass_, options, results, *present, *map(type, values), values[0].shape)
    _known[key] = _known[(*key, *map(form_of, values))] = launch


def forget_launches() -> None:
    """Forget all launches, so that later calls are planned again, bound and recorded ones among them."""
    _launches.clear()
    for shortcut in shortcuts:
        shortcut.clear()
    for reference in [*bound_launches]:
        if (bound := reference()) is not None:
            bound.forget()
    forget_recordings()
