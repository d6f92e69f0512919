"""Methods that prepare a call: they give its plan, compile its kernels, and tune its tiles."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, overload

from cuflash.arrays.checks import value_error
from cuflash.cpu import backend as cpu_backend
from cuflash.spec.call import Backend, prepare
from cuflash.spec.inputs import INPUTS, OptionalArrays, WithTangents
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED, GRADIENTS, AllPassArrays, PassArrays
from cuflash.spec.passes import DEFAULT_PASSES, FORWARD, JVP, Pass
from cuflash.spec.results import Array, checked_passes, needed
from cuflash.spec.score_args import check_tangent_names, checked_with_score_args
from cuflash.spec.type_variables import FunctionT, WithFunction
from cuflash.streaming import calls as streaming_backend

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.cpu.backend import CpuPlan
    from cuflash.gpu.backend import Plans
    from cuflash.gpu.tuning import Tuning
    from cuflash.streaming import StreamPlan


class Preparation(Generic[FunctionT]):
    """The methods of `cuflash.FlashAttention` that compute nothing."""

    __slots__ = ("options",)

    options: Options

    # fmt: off
    @overload
    def plan(
        self: Preparation[None], q: Array, k: Array, v: Array, *, passes: Collection[str] = ...,
        need: Collection[str] = ..., **arrays: Unpack[AllPassArrays],
    ) -> CpuPlan | Plans | StreamPlan: ...
    @overload
    def plan(
        self: Preparation[WithFunction], q: Array, k: Array, v: Array, **arrays: Any
    ) -> CpuPlan | Plans | StreamPlan: ...
    # fmt: on

    def plan(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        passes: Collection[str] = DEFAULT_PASSES,
        need: Collection[str] = DEFAULT_NEED,
        **arrays: Array,
    ) -> CpuPlan | Plans | StreamPlan:
        """What `forward`, `backward`, `jvp` and `backward_jvp` would run on these arrays, and why; nothing is computed.

        Parameters
        ----------
        q, k, v : array
            As `forward` takes them; only shapes, strides and dtypes matter.
        passes : collection of str, default ("forward", "backward")
            The passes to plan: "forward", "backward", "jvp", "backward_jvp".
        need : collection of str, default ("dq", "dk", "dv")
            Gradients that `backward` is to give, and whose tangents `backward_jvp` is to give.
        **arrays : array, optional
            The other arrays of these passes, by the names of their arguments: bias, mask and so on, and dout, out, dq
            and so on, which count as contiguous if they are not given; those that `score` and `mask` read; and, for
            "jvp" and "backward_jvp", the tangents that the calls will have, at least one: kernels are made for these.
            With a block_table, or with fp8 k and v, there is no backward pass.

        Returns
        -------
        CpuPlan, cuflash.gpu.backend.Plans or cuflash.streaming.StreamPlan
            For arrays in host memory, on a GPU, or of `cuflash.streamed`; ``describe()`` of each says it in words.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `forward` does.

        See Also
        --------
        compile : Compiles what is planned.
        tune : Times tiles that might be faster.
        """
        of_functions, wanted = self.options.score_gradients, checked_passes(passes)
        given = {"q": q, "k": k, "v": v} | self._checked("plan", wanted, arrays, of_functions)
        results = {name: given.get(name) for name in (*GRADIENTS, *of_functions)}
        need = needed(need, given | self.options.numbers, results, of_functions)
        call = prepare(self.options, given, INPUTS, need)
        plans: CpuPlan | Plans | StreamPlan
        plans = backend_of(call.backend).plan(call.options, call.arrays, call.need, wanted)
        return plans if call.rewrite is None else plans.noted(call.rewrite.describe(self.options, call.given))

    # fmt: off
    @overload
    def compile(
        self: Preparation[None], q: Array, k: Array, v: Array, *, passes: Collection[str] = ...,
        need: Collection[str] = ..., **optional_inputs: Unpack[WithTangents],
    ) -> None: ...
    @overload
    def compile(
        self: Preparation[WithFunction], q: Array, k: Array, v: Array, **optional_inputs: Any
    ) -> None: ...
    # fmt: on

    def compile(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        passes: Collection[str] = DEFAULT_PASSES,
        need: Collection[str] = DEFAULT_NEED,
        **optional_inputs: Array,
    ) -> None:
        """Make everything ready that passes over such arrays need: later calls compile nothing.

        Call it before something is timed, or before a CUDA graph is captured. Before a capture, call it within the
        graph's own memory pool, which the capture uses too: a replay goes on writing to that memory, scratch memory
        included. For arrays in host memory the arguments are checked and there is nothing else to do.

        Parameters
        ----------
        q, k, v : array
            As `forward` takes them; only shapes, strides and dtypes matter.
        passes : collection of str, default ("forward", "backward")
            The passes to prepare, of the names that `plan` takes, and those whose results they read.
        need : collection of str, default ("dq", "dk", "dv")
            Gradients that `backward` is to give, and whose tangents `backward_jvp` is to give.
        **optional_inputs : array, optional
            bias, mask and so on, as `forward` takes them; what `score` and `mask` read; and tangents, as `plan` takes
            them. With a block_table, and fp8 k and v, there is no backward pass.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `forward` does.

        See Also
        --------
        plan : What will run.
        tune : Times tiles that might be faster.
        """
        wanted = checked_passes(passes)
        arrays = {"q": q, "k": k, "v": v} | self._checked("compile", wanted, optional_inputs)
        of_functions = self.options.score_gradients
        absent = dict.fromkeys((*GRADIENTS, *of_functions))
        need = needed(need, arrays | self.options.numbers, absent, of_functions)
        call = prepare(self.options, arrays, INPUTS, need)
        backend_of(call.backend).compile(call.options, call.arrays, call.need, wanted)

    # fmt: off
    @overload
    def tune(
        self: Preparation[None], q: Array, k: Array, v: Array, *, dout: Array | None = None, seed: int | None = None,
        offset: int | None = None, passes: Collection[str] = ..., remember: bool = True, forget: bool = False,
        **optional_inputs: Unpack[WithTangents],
    ) -> Tuning | None: ...
    @overload
    def tune(
        self: Preparation[WithFunction], q: Array, k: Array, v: Array, **optional_inputs: Any
    ) -> Tuning | None: ...
    # fmt: on

    def tune(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        dout: Array | None = None,
        seed: int | None = None,
        offset: int | None = None,
        passes: Collection[str] = DEFAULT_PASSES,
        remember: bool = True,
        forget: bool = False,
        **optional_inputs: Array,
    ) -> Tuning | None:
        """Time tiles that might be faster for these arrays than those of the tables, and remember the fastest.

        This takes seconds to minutes, mostly to compile some tens of kernels, and memory for two sets of results. It
        shows a bar if standard error is a terminal, and elsewhere writes a line a minute there. The results of each
        candidate are compared with those of the table's row before it is timed. Its time is the median of several runs,
        and the L2 cache is filled with other data before each run.

        The fastest tiles are remembered in a file next to the compiled kernels (``python -m cuflash info`` says where),
        for this device, these sources, and problems of the same dtype, head dimensions, options, mask, alignment and
        size, up to the next power of two. From then on these passes and `compile` use them, in this process and in
        those that start later, and `plan` says so. Tiles of another size add up the same products in another
        order: the bits of the results may differ from those before, but errors stay within the same bounds.

        Parameters
        ----------
        q, k, v : array
            As `forward` takes them, on a GPU; of `cuflash.streamed` keys the problem of the longest chunk is tuned, of
            which a copy is made on the device.
        dout : array, optional
            As `backward` takes it; out by default.
        seed, offset : int, optional
            Of dropout; 0 by default.
        passes : collection of str, default ("forward", "backward")
            The passes to tune, of the names that `plan` takes.
        remember : bool, default True
            Whether to write the file. Without it nothing changes.
        forget : bool, default False
            Instead of tuning, remove what is remembered for such arrays.
        **optional_inputs : array, optional
            bias, mask and so on, as `forward` takes them; what `score` and `mask` read; and tangents, as `plan` takes
            them. With a block_table, and fp8 k and v, there is no backward pass.

        Returns
        -------
        cuflash.gpu.tuning.Tuning or None
            ``forward``, ``backward``, ``jvp`` and ``backward_jvp`` have the candidates, the winner and its gain, or are
            None, and ``describe()`` says it in words. None with `forget`.

        Raises
        ------
        NotImplementedError
            Arrays in host memory: the CPU path has nothing to tune. And as `forward` does.
        TypeError, ValueError, ImportError
            As `forward` does.

        See Also
        --------
        plan : Says which tiles are used, and why.
        compile : Compiles the kernels with them.
        """
        wanted = checked_passes(passes)
        arrays = {"q": q, "k": k, "v": v} | self._checked("tune", wanted, optional_inputs) | {"dout": dout}
        if arrays.get("block_table") is not None and FORWARD in wanted:
            wanted = (FORWARD,)
        random = self.options.random(*((0 if x is None else x) for x in (seed, offset)))
        call = prepare(self.options, arrays, INPUTS, DEFAULT_NEED)
        tuning: Tuning | None = backend_of(call.backend).tune(
            call.options, call.arrays, random, passes=wanted, remember=remember, forget=forget
        )
        return tuning

    def _checked(
        self, method: str, wanted: tuple[Pass, ...], given: Mapping[str, Array], results: tuple[str, ...] = ()
    ) -> dict[str, Array | None]:
        """The arrays of a method by name, None for those that are not given; tangents only where a pass takes some."""
        is_plan = method == "plan"
        if not any(pass_.has_tangents for pass_ in wanted):
            return checked_with_score_args(
                method, PassArrays if is_plan else OptionalArrays, self.options, given, results
            )
        check_tangent_names(self.options)
        own = tuple(f"t{name[1:]}" for name in self.options.score_gradients)
        arrays = checked_with_score_args(
            method,
            AllPassArrays if is_plan else WithTangents,
            self.options,
            given,
            (*results, *(f"t{name}" for name in results), *own),
        )
        if all(arrays[name] is None for name in (*JVP.takes, *own)):
            raise value_error("tq", "no tangent", "tq, tk or another tangent: kernels are made for those of the calls")
        return arrays


@functools.cache
def backend_of(backend: Backend) -> ModuleType:
    """The module that computes with arrays of one backend; importing the one for CuPy's arrays imports CuPy."""
    if backend == "numpy":
        return cpu_backend
    if backend == "streamed":
        return streaming_backend
    from cuflash.gpu import backend as gpu_backend

    return gpu_backend
