"""The backends on which one list of cases of a feature runs: the core, its fallback, emulated kernels and a device.

    @on_backends({"core": ("float32",), "emulated 8.0": ("bfloat16",), "device": ("float16",)})
    def test_something(backend, dtype):
        out, lse, gradients = backend(options, arrays, need)

Cases on a device have the mark ``gpu``. "emulated 9.0 of 2 SMs" is a device that has so few.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.emulator import SCHEDULES, find_compiler
from cuflash.plan import DeviceSpec
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED
from tests.reductions import weights_reduced
from tests.row_reductions import results_of
from tests.sampling import examples

Results = tuple[Any, Any, Mapping[str, Any]]  # out, lse and gradients by name
CORE, FALLBACK, EMULATED, DEVICE = "core", "fallback", "emulated", "device"


class Backend(NamedTuple):
    """Calls with NumPy arrays, wherever they are computed.

    `run` takes arrays by name, `dout` among them. `judge` holds both passes of a case to the oracle rule, all gradients
    and row reductions among their results. `reduce` gives what `tests.reductions.judge` takes for a case and a number
    of keys. `jvp` takes arrays and tangents by name, and gives out, lse and their tangents. `convert` makes an array
    of the backend of one of NumPy.
    """

    name: str
    run: Callable[..., Results]
    judge: Callable[..., None]
    reduce: Callable[[ct.Case, int], tuple[Any, ...]]
    jvp: Callable[[Options, dict[str, Any]], dict[str, Any]]
    convert: Callable[[Any], Any] = np.asarray
    device: DeviceSpec | None = None  # that is emulated

    def __call__(self, options: Options, arrays: dict[str, Any], need: tuple[str, ...]) -> Results:
        return self.run(options, arrays, need)

    @property
    def is_cpu(self) -> bool:
        return self.name in (CORE, FALLBACK)

    @property
    def schedules(self) -> Sequence[dict[str, Any]]:
        """Options of `results`, under each of which these are the same: orders of threads in the emulator."""
        return [{"schedule": x} for x in SCHEDULES] if self.name.startswith(EMULATED) else [{}]

    def results(
        self,
        case: ct.Case,
        arrays: dict[str, Any] | None = None,
        *,
        need: Sequence[str] | None = None,
        deterministic: bool = False,
        into_nan: bool = False,
        **how: Any,
    ) -> dict[str, Any]:
        """Results of both passes by name, of the arrays of a case or of others; by default dq, dk, dv and dsinks.

        There are no gradients where a case has no dout. With `into_nan`, out and lse are written to arrays that are
        given, full of NaN, as those of emulated kernels always are.
        """
        arrays = case.arrays(self.convert) if arrays is None else arrays
        if into_nan and not self.name.startswith(EMULATED):
            shapes = {"out": (case.problem.out_shape, arrays["q"].dtype), "lse": (case.problem.lse_shape, np.float32)}
            if case.dtype == "float64":
                shapes["lse"] = (case.problem.lse_shape, np.float64)
            full = {name: self.convert(np.full(shape, np.nan, dtype)) for name, (shape, dtype) in shapes.items()}
            arrays = arrays | full
        if need is None:
            need = (*DEFAULT_NEED, *(["dsinks"] if case.sinks else [])) if "dout" in arrays else ()
        options = replace(case.options, deterministic=deterministic)
        out, lse, gradients = self.run(options, arrays, tuple(need), **case.random, **how)
        return {"out": out, "lse": lse, **gradients}

    def draw(self, count: int, check: Callable[..., None], /, **strategies: st.SearchStrategy[Any]) -> None:
        """Check so many examples, of emulated kernels, most of which are compiled for one of them, at most three."""
        own = min(3 if self.device else count, examples(count))
        settings(max_examples=own, suppress_health_check=[HealthCheck.too_slow])(given(**strategies)(check))()


def by_interface(convert: Callable[[Any], Any]) -> Callable[..., Results]:
    """Both passes of `cuflash.FlashAttention` on arrays that `convert` makes of NumPy's; results in host memory."""

    def run(options: Options, arrays: dict[str, Any], need: tuple[str, ...], **random: Any) -> Results:
        attn: Any = cuflash.FlashAttention()
        attn.options = options
        own = {name: convert(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()} | random
        dout = own.pop("dout", None)
        of_rows = {name: own.pop(name) for name in ("dlse", "dmax") if name in own}
        given = {name: own.pop(name) for name in ("out", "lse") if name in own}
        inputs = [own.pop(name) for name in "qkv"]
        out, lse = attn.forward(*inputs, **own, **given)
        gradients = attn.backward(dout, *inputs, out, lse, **own, **of_rows, need=need) if need else ()
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

    def jvp(options: Options, arrays: dict[str, Any]) -> dict[str, Any]:
        attn: Any = cuflash.FlashAttention()
        attn.options = options
        found = attn.jvp(**{name: convert(x) for name, x in arrays.items()})
        return {name: ct.to_numpy(x) for name, x in found._asdict().items()}

    return Backend(name, by_interface(convert), judge, reduce, jvp, convert)


def on_device(x: Any) -> Any:
    """An array in memory of the device, of fp8 too."""
    cupy = pytest.importorskip("cupy")
    is_fp8 = x.dtype.name.startswith("float8")
    return cuflash.fp8(cupy.asarray(x.view(np.uint8)), x.dtype) if is_fp8 else cupy.asarray(x)


def make(name: str, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend of a name; the test is skipped where this machine has none."""
    from cuflash.cpu import core
    from tests.emulate.attention import jvp_on_kernels, on_kernels
    from tests.emulate.checks import judge_both_passes
    from tests.emulate.reduced import reduced

    if name.startswith(EMULATED):
        if find_compiler() is None:
            pytest.skip("no C++ compiler: g++ is not on the path")
        arch, _, count = name.removeprefix(f"{EMULATED} ").removesuffix(" SMs").partition(" of ")
        device = DeviceSpec.for_arch(arch)
        device = replace(device, num_sms=int(count)) if count else device
        judge = functools.partial(judge_both_passes, arch=device)
        jvp = functools.partial(jvp_on_kernels, device)
        reduce = functools.partial(reduced, arch=device)
        return Backend(
            name, on_kernels(device), judge, lambda case, count: reduce(case, count=count), jvp, device=device
        )
    if name == DEVICE:
        pytest.importorskip("cupy")
        return on_arrays(name, on_device)
    if name == FALLBACK:
        monkeypatch.setattr(core, "why_not", lambda problem=None: "a test of the fallback")
    elif (reason := core.why_not()) is not None:
        pytest.skip(f"no compiled core: {reason}")
    return on_arrays(name, np.asarray)


def on_backends(
    values: Mapping[str, Sequence[Any]] | Sequence[str],
    *,
    of: str = "dtype",
    emulated: int = 12,
    device: int | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test with `backend` and the argument `of`, by default `dtype`.

    Those of emulated kernels and of a device are marked ``one_in(emulated)`` and ``one_in(device)``. Without values of
    the argument, with `backend` alone.
    """

    def marks_of(name: str) -> list[Any]:
        if name == DEVICE:
            return [pytest.mark.gpu, *([] if device is None else [pytest.mark.one_in(device)])]
        return [pytest.mark.one_in(emulated)] if name.startswith(EMULATED) else []

    if not isinstance(values, Mapping):
        names = [pytest.param(name, marks=marks_of(name)) for name in values]
        return pytest.mark.parametrize("backend", names, indirect=True)
    pairs = [
        pytest.param(name, value, marks=marks_of(name), id=f"{name}-{value}".replace("'", ""))
        for name, own in values.items()
        for value in own
    ]
    return pytest.mark.parametrize(("backend", of), pairs, indirect=["backend"])
