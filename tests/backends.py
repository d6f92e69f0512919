"""The backends on which one list of cases of a feature runs: the core, its fallback, emulated kernels and a device.

    @on_backends({"core": ("float32",), "emulated 8.0": ("bfloat16",), "device": ("float16",)})
    def test_something(backend, dtype):
        out, lse, gradients = backend(options, arrays, need)

Cases on a device have the mark ``gpu``.
"""

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
from tests.sampling import examples

Results = tuple[Any, Any, Mapping[str, Any]]  # out, lse and gradients by name
CORE, FALLBACK, EMULATED, DEVICE = "core", "fallback", "emulated", "device"


class Backend(NamedTuple):
    """Both passes by NumPy arrays by name, `dout` among them, wherever they are computed."""

    name: str
    run: Callable[[Options, dict[str, Any], tuple[str, ...]], Results]

    def __call__(self, options: Options, arrays: dict[str, Any], need: tuple[str, ...]) -> Results:
        return self.run(options, arrays, need)

    def draw(self, count: int, check: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> None:
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


def make(name: str, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend of a name; the test is skipped where this machine has none."""
    from cuflash.cpu import core
    from tests.emulate.attention import on_kernels

    if name.startswith(EMULATED):
        if find_compiler() is None:
            pytest.skip("no C++ compiler: g++ is not on the path")
        return Backend(name, on_kernels(name.removeprefix(f"{EMULATED} ")))
    if name == DEVICE:
        return Backend(name, by_interface(pytest.importorskip("cupy").asarray))
    if name == FALLBACK:
        monkeypatch.setattr(core, "why_not", lambda problem=None: "a test of the fallback")
    elif (reason := core.why_not()) is not None:
        pytest.skip(f"no compiled core: {reason}")
    return Backend(name, by_interface(np.asarray))


def on_backends(
    dtypes: Mapping[str, Sequence[str]], *, emulated: int = 12, device: int | None = None
) -> pytest.MarkDecorator:
    """Parametrize a test with `backend` and `dtype`, of which `emulated` and `device` are marked ``one_in`` so many."""

    def marks_of(name: str) -> list[Any]:
        if name == DEVICE:
            return [pytest.mark.gpu, *([] if device is None else [pytest.mark.one_in(device)])]
        return [pytest.mark.one_in(emulated)] if name.startswith(EMULATED) else []

    pairs = [pytest.param(name, dtype, marks=marks_of(name)) for name, own in dtypes.items() for dtype in own]
    return pytest.mark.parametrize(("backend", "dtype"), pairs, indirect=["backend"])
