"""The backends on which one list of cases of a feature runs: the core, its fallback, emulated kernels and a device.

    @on_backends({"core": ("float32",), "emulated 8.0": ("bfloat16",), "device": ("float16",)})
    def test_something(backend, dtype):
        out, lse, gradients = backend(options, arrays, need)

Cases on a device have the mark ``gpu``.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.emulator import find_compiler
from cuflash.spec.options import Options
from tests.reductions import weights_reduced
from tests.row_reductions import results_of
from tests.sampling import examples

Results = tuple[Any, Any, Mapping[str, Any]]  # out, lse and gradients by name
CORE, FALLBACK, EMULATED, DEVICE = "core", "fallback", "emulated", "device"


class Backend(NamedTuple):
    """Calls with NumPy arrays, wherever they are computed.

    `run` takes arrays by name, `dout` among them. `judge` holds both passes of a case to the oracle rule, all gradients
    and row reductions among their results. `reduce` gives what `tests.reductions.judge` takes for a case and a number
    of keys.
    """

    name: str
    run: Callable[[Options, dict[str, Any], tuple[str, ...]], Results]
    judge: Callable[..., None]
    reduce: Callable[[ct.Case, int], tuple[Any, ...]]

    def __call__(self, options: Options, arrays: dict[str, Any], need: tuple[str, ...]) -> Results:
        return self.run(options, arrays, need)

    def draw(self, count: int, check: Callable[..., None], /, **strategies: st.SearchStrategy[Any]) -> None:
        """Check so many examples, of emulated kernels, most of which are compiled for one of them, three."""
        own = 3 if self.name.startswith(EMULATED) else examples(count)
        settings(max_examples=own, suppress_health_check=[HealthCheck.too_slow])(given(**strategies)(check))()


def by_interface(convert: Callable[[Any], Any]) -> Callable[[Options, dict[str, Any], tuple[str, ...]], Results]:
    """Both passes of `cuflash.FlashAttention` on arrays that `convert` makes; results in host memory."""

    def run(options: Options, arrays: dict[str, Any], need: tuple[str, ...]) -> Results:
        attn: Any = cuflash.FlashAttention()
        attn.options = options
        own = {name: convert(x) for name, x in arrays.items()}
        dout = own.pop("dout")
        inputs = [own.pop(name) for name in "qkv"]
        out, lse = attn.forward(*inputs, **own)
        gradients = attn.backward(dout, *inputs, out, lse, **own, need=need) if need else ()
        return ct.to_numpy(out), ct.to_numpy(lse), dict(zip(need, map(ct.to_numpy, gradients), strict=True))

    return run


def on_arrays(name: str, convert: Callable[[Any], Any]) -> Backend:
    """The backend of the interface on arrays that `convert` makes."""

    def judge(case: ct.Case, **options: Any) -> None:
        found = results_of(case, convert, **options)
        ct.assert_forward(case, **found.forward)
        ct.assert_backward(case, **found.gradients)

    def reduce(case: ct.Case, count: int) -> tuple[Any, ...]:
        weights, *others, top = weights_reduced(case, convert, count=count)
        return weights, *map(ct.to_numpy, others), [*map(ct.to_numpy, top)]

    return Backend(name, by_interface(convert), judge, reduce)


def on_device(x: Any) -> Any:
    """An array in memory of the device, of fp8 too."""
    cupy = pytest.importorskip("cupy")
    is_fp8 = x.dtype.name.startswith("float8")
    return cuflash.fp8(cupy.asarray(x.view(np.uint8)), x.dtype) if is_fp8 else cupy.asarray(x)


def make(name: str, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend of a name; the test is skipped where this machine has none."""
    from cuflash.cpu import core
    from tests.emulate.attention import on_kernels
    from tests.emulate.checks import judge_both_passes
    from tests.emulate.reduced import reduced

    if name.startswith(EMULATED):
        if find_compiler() is None:
            pytest.skip("no C++ compiler: g++ is not on the path")
        arch = name.removeprefix(f"{EMULATED} ")
        judge = functools.partial(judge_both_passes, arch=arch)
        return Backend(name, on_kernels(arch), judge, lambda case, count: reduced(case, arch, count))
    if name == DEVICE:
        pytest.importorskip("cupy")
        return on_arrays(name, on_device)
    if name == FALLBACK:
        monkeypatch.setattr(core, "why_not", lambda problem=None: "a test of the fallback")
    elif (reason := core.why_not()) is not None:
        pytest.skip(f"no compiled core: {reason}")
    return on_arrays(name, np.asarray)


def on_backends(
    dtypes: Mapping[str, Sequence[str]] | Sequence[str], *, emulated: int = 12, device: int | None = None
) -> pytest.MarkDecorator:
    """Parametrize a test with `backend` and `dtype`, of which `emulated` and `device` are marked ``one_in`` so many.

    Without dtypes, with `backend` alone.
    """

    def marks_of(name: str) -> list[Any]:
        if name == DEVICE:
            return [pytest.mark.gpu, *([] if device is None else [pytest.mark.one_in(device)])]
        return [pytest.mark.one_in(emulated)] if name.startswith(EMULATED) else []

    if not isinstance(dtypes, Mapping):
        names = [pytest.param(name, marks=marks_of(name)) for name in dtypes]
        return pytest.mark.parametrize("backend", names, indirect=True)
    pairs = [pytest.param(name, dtype, marks=marks_of(name)) for name, own in dtypes.items() for dtype in own]
    return pytest.mark.parametrize(("backend", "dtype"), pairs, indirect=["backend"])
