"""Methods that prepare a call: they give its plan, compile its kernels, and tune its tiles."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, overload

from cuflash import dispatch
from cuflash.arrays.array_info import softmax_dtype_of
from cuflash.arrays.checks import value_error
from cuflash.arrays.dlpack import module_of, on_device
from cuflash.bound import BoundForward
from cuflash.spec.batch_axes import shape_of_lse
from cuflash.spec.call import Call, prepare
from cuflash.spec.inputs import INPUTS, NAMES, OptionalArrays, WithTangents
from cuflash.spec.options import Options
from cuflash.spec.outputs import DEFAULT_NEED, GRADIENTS, OUTPUTS, AllPassArrays, PassArrays
from cuflash.spec.passes import (
    COLUMN_MAX,
    COLUMN_SUMS,
    COLUMN_SUMS_BACKWARD,
    DEFAULT_PASSES,
    FORWARD,
    JVP,
    REDUCTIONS,
    TOP_KEYS,
    Pass,
)
from cuflash.spec.reductions import (
    NOT_OF_COLUMN_SUMS,
    OF_COLUMN_SUMS,
    ColumnSums,
    checked_count,
    checked_of_reduction,
    gradients_wanted,
    keys_of,
    prepare_reduction,
)
from cuflash.spec.results import Array, ForwardResult, checked_passes, needed
from cuflash.spec.score_args import check_tangent_names, checked_with_score_args
from cuflash.spec.streamed import Streamed
from cuflash.spec.type_variables import FunctionT, WithFunction

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.cpu.backend import CpuPlan
    from cuflash.gpu.backend import Plans
    from cuflash.gpu.tuning import Tuning
    from cuflash.spec.outputs import NamedForwardResult, PlannedArrays, PreparedArrays
    from cuflash.streaming import StreamPlan


class Preparation(Generic[FunctionT]):
    """The methods of `cuflash.FlashAttention` that compute nothing."""

    __slots__ = ("options",)

    options: Options

    # fmt: off
    @overload
    def plan(
        self: Preparation[None], q: Array, k: Array, v: Array, *, passes: Collection[str] = ...,
        need: Collection[str] = ..., **arrays: Unpack[PlannedArrays],
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
        """What calls would run on these arrays, and why; nothing is computed.

        Parameters
        ----------
        q, k, v : array
            As `forward` takes them; only shapes, strides and dtypes matter. Reductions of the attention weights do not
            look at v.
        passes : collection of str, default ("forward", "backward")
            The calls to plan: "forward", "backward", "jvp", "backward_jvp", and the reductions of the attention weights
            "column_sums", "column_max", "top_keys", "column_sums_backward".
        need : collection of str, default ("dq", "dk", "dv")
            Gradients that `backward` and `column_sums_backward` are to give, and whose tangents `backward_jvp` is to
            give.
        **arrays : array, optional
            The other arrays of these passes, by the names of their arguments: bias, mask and so on, and dout, out, dq
            and so on, which count as contiguous if they are not given; those that `score` and `mask` read; and, for
            "jvp" and "backward_jvp", the tangents that the calls will have, at least one: kernels are made for these.
            With a block_table, or with fp8 k and v, there is no backward pass. For reductions of the attention weights
            what their methods take: lse, weights, dsums, and `count`, which "top_keys" needs.

        Returns
        -------
        CpuPlan, cuflash.gpu.backend.Plans or cuflash.streaming.StreamPlan
            For arrays in host memory, on a GPU, or of `cuflash.streamed`; ``describe()`` of each says it in words. The
            gradients of column sums are planned as the passes that make them: a backward pass, of which the gradients
            of the sums are the values, and a forward pass for dlse and dweights.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `forward` does.

        See Also
        --------
        compile : Compiles what is planned.
        tune : Times tiles that might be faster.
        """
        wanted = _WantedPasses.of(passes)
        plans: list[Any] = []
        if wanted.passes:
            of_functions, others = self.options.score_gradients, wanted.arrays_of_passes(arrays, ("lse",))
            given = {"q": q, "k": k, "v": v} | self._by_name("plan", wanted.passes, others, of_functions)
            results = {name: given.get(name) for name in (*GRADIENTS, *of_functions)}
            names = needed(wanted.need_of_passes(need), given | self.options.numbers, results, of_functions)
            call = prepare(self.options, given, INPUTS, names)
            plan = dispatch.backend_of(call.backend).plan(call.options, call.arrays, call.need, wanted.passes)
            plans.append(plan if call.rewrite is None else plan.noted(call.rewrite.describe(self.options, call.given)))
        for one in self._prepared_reductions(wanted, q, k, arrays, need, computes=False):
            plan = one.plan()
            rewrite = one.call.rewrite
            plans.append(plan if rewrite is None else plan.noted(rewrite.describe(self.options, one.call.given)))
        return functools.reduce(lambda plan, other: plan.joined(other), plans)  # type: ignore[no-any-return]

    # fmt: off
    @overload
    def bind(
        self: Preparation[Any], q: Array, k: Array, v: Array, *, want: Collection[str], **optional_inputs: Any
    ) -> BoundForward[NamedForwardResult[Any, Any]]: ...
    @overload
    def bind(
        self: Preparation[None], q: Array, k: Array, v: Array, **optional_inputs: Unpack[OptionalArrays]
    ) -> BoundForward[ForwardResult[Any, Any]]: ...
    @overload
    def bind(
        self: Preparation[WithFunction], q: Array, k: Array, v: Array, **optional_inputs: Any
    ) -> BoundForward[ForwardResult[Any, Any]]: ...
    # fmt: on

    def bind(
        self, q: Array, k: Array, v: Array, *, want: Collection[str] = (), **optional_inputs: Array
    ) -> BoundForward[Any]:
        """`forward` for arrays of one form, with less work for the host in each call.

        A small call on CuPy arrays takes the host longer than the GPU. What is returned is called as `forward` is, on
        other arrays of the same shapes, strides and dtypes, and gives the same results. It has compiled and loaded its
        kernels, and nothing is looked up. k and v may have another length in each call, as caches that grow.

        Parameters
        ----------
        q, k, v : array
            As `forward` takes them; only shapes, strides, dtypes and devices matter.
        want : collection of str, default ()
            Row reductions that calls are to give, as `forward` takes it.
        **optional_inputs : array, optional
            bias, mask and so on, as `forward` takes them, and what `score` and `mask` read. Calls are to give the same.

        Returns
        -------
        BoundForward
            ``call(q, k, v, **optional_inputs)``.

        Raises
        ------
        TypeError, ValueError, ImportError
            As `forward` does.
        NotImplementedError
            As `forward` does, and for keys of `cuflash.streamed`, whose copies take longer than what this would save.

        See Also
        --------
        compile : Compiles the kernels of several passes.
        """
        return BoundForward(self.options, {"q": q, "k": k, "v": v, **optional_inputs}, want)

    # fmt: off
    @overload
    def compile(
        self: Preparation[None], q: Array, k: Array, v: Array, *, passes: Collection[str] = ...,
        need: Collection[str] = ..., **optional_inputs: Unpack[PreparedArrays],
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
            As `plan` takes it.
        **optional_inputs : array, optional
            bias, mask and so on, as `forward` takes them; what `score` and `mask` read; and tangents, and what
            reductions of the attention weights take, as `plan` takes them. With a block_table, and fp8 k and v, there
            is no backward pass.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError
            As `forward` does.

        See Also
        --------
        plan : What will run.
        tune : Times tiles that might be faster.
        """
        wanted = _WantedPasses.of(passes)
        if wanted.passes:
            others = wanted.arrays_of_passes(optional_inputs)
            arrays = {"q": q, "k": k, "v": v} | self._by_name("compile", wanted.passes, others)
            of_functions = self.options.score_gradients
            absent = dict.fromkeys((*GRADIENTS, *of_functions))
            names = needed(wanted.need_of_passes(need), arrays | self.options.numbers, absent, of_functions)
            call = prepare(self.options, arrays, INPUTS, names)
            dispatch.backend_of(call.backend).compile(call.options, call.arrays, call.need, wanted.passes)
        for one in self._prepared_reductions(wanted, q, k, optional_inputs, need, computes=True):
            one.compile()

    # fmt: off
    @overload
    def tune(
        self: Preparation[None], q: Array, k: Array, v: Array, *, dout: Array | None = None, seed: int | None = None,
        offset: int | None = None, passes: Collection[str] = ..., remember: bool = True, forget: bool = False,
        **optional_inputs: Unpack[PreparedArrays],
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
            bias, mask and so on, as `forward` takes them; what `score` and `mask` read; and tangents, and what
            reductions of the attention weights take, as `plan` takes them. With a block_table, and fp8 k and v, there
            is no backward pass.

        Returns
        -------
        cuflash.gpu.tuning.Tuning or None
            ``forward``, ``backward`` and so on, by the names of passes, have the candidates, the winner and its gain,
            or are None, and ``describe()`` says it in words. None with `forget`.

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
        wanted, how = _WantedPasses.of(passes), {"remember": remember, "forget": forget}
        found: list[Any] = []
        if own_passes := wanted.passes:
            others = wanted.arrays_of_passes(optional_inputs)
            arrays = {"q": q, "k": k, "v": v} | self._by_name("tune", own_passes, others) | {"dout": dout}
            if arrays.get("block_table") is not None and FORWARD in own_passes:
                own_passes = (FORWARD,)
            random = self.options.random(*((0 if x is None else x) for x in (seed, offset)))
            call = prepare(self.options, arrays, INPUTS, DEFAULT_NEED)
            backend = dispatch.backend_of(call.backend)
            found.append(backend.tune(call.options, call.arrays, random, passes=own_passes, **how))
        for one in self._prepared_reductions(wanted, q, k, optional_inputs, OF_SUMS_BY_DEFAULT, computes=True):
            found.append(one.tune(**how))
        return None if forget else functools.reduce(lambda tuning, other: tuning.joined(other), found)

    def _prepared_reductions(
        self,
        wanted: _WantedPasses,
        q: Array,
        k: Array,
        arrays: Mapping[str, Any],
        need: Collection[str],
        *,
        computes: bool,
    ) -> Iterator[PreparedReduction]:
        """The reductions that are wanted, on arrays of a backend; lse is computed if it is not given."""
        for pass_ in wanted.reductions:
            arguments = {name: arrays.get(name) for name in TAKEN_BY_REDUCTIONS[pass_]}
            others = {name: x for name, x in arrays.items() if name not in wanted.all_taken}
            if wanted.passes:  # which also take what reductions do not
                others = {name: x for name, x in others.items() if name in (*NAMES, *self.options.score_args)}
            inputs = {"q": q, "k": k} | checked_of_reduction(pass_.name, self.options, others)
            yield PreparedReduction.of(pass_, self.options, inputs, arguments, need, computes=computes)

    def _by_name(
        self, method: str, wanted: tuple[Pass, ...], given: Mapping[str, Array], results: tuple[str, ...] = ()
    ) -> dict[str, Array | None]:
        """The arrays of a method by name, None for those that are not given; tangents only where a pass takes some."""
        is_plan = method == "plan"
        if not any(pass_.has_tangents for pass_ in wanted):
            return checked_with_score_args(
                method, PassArrays if is_plan else OptionalArrays, self.options, given, results
            )
        check_tangent_names(self.options)
        tangents_of_score_args = tuple(f"t{name[1:]}" for name in self.options.score_gradients)
        arrays = checked_with_score_args(
            method,
            AllPassArrays if is_plan else WithTangents,
            self.options,
            given,
            (*results, *(f"t{name}" for name in results), *tangents_of_score_args),
        )
        if all(arrays[name] is None for name in (*JVP.takes, *tangents_of_score_args)):
            raise value_error("tq", "no tangent", "tq, tk or another tangent: kernels are made for those of the calls")
        return arrays


# What the methods of reductions take besides q, k and optional inputs.
TAKEN_BY_REDUCTIONS: dict[Pass, tuple[str, ...]] = {
    COLUMN_SUMS: ("lse", "weights"),
    COLUMN_MAX: ("lse",),
    TOP_KEYS: ("lse", "count"),
    COLUMN_SUMS_BACKWARD: ("lse", "weights", "dsums"),
}
OF_SUMS_BY_DEFAULT = ("dq", "dk")


class _WantedPasses(NamedTuple):
    """The passes that are wanted: those over q, k and v, and reductions of the attention weights."""

    passes: tuple[Pass, ...]
    reductions: tuple[Pass, ...]

    @classmethod
    def of(cls, passes: Collection[str]) -> _WantedPasses:
        wanted = checked_passes(passes)
        reductions = tuple(pass_ for pass_ in wanted if pass_ in REDUCTIONS)
        return cls(tuple(pass_ for pass_ in wanted if pass_ not in reductions), reductions)

    @property
    def all_taken(self) -> set[str]:
        """What these reductions take besides q, k and optional inputs."""
        return {name for pass_ in self.reductions for name in TAKEN_BY_REDUCTIONS[pass_]}

    def arrays_of_passes(self, arrays: Mapping[str, Any], shared: Collection[str] = ()) -> dict[str, Any]:
        """The arrays for the passes over q, k and v: without those that only reductions take, unless `shared`."""
        only_reductions_take = self.all_taken.difference(shared)
        return {name: x for name, x in arrays.items() if name not in only_reductions_take}

    def need_of_passes(self, need: Collection[str]) -> Collection[str]:
        """The gradients of `backward`, without those that only column sums have."""
        is_collection = isinstance(need, Collection) and not isinstance(need, str)
        if COLUMN_SUMS_BACKWARD not in self.reductions or not is_collection:
            return need
        return [name for name in need if name not in OF_COLUMN_SUMS]


class PreparedReduction(NamedTuple):
    """A reduction of the attention weights that is planned, compiled or tuned."""

    pass_: Pass
    call: Call  # of a backend
    # Of the functions of `dispatch.reductions_of`, after the pass; or the gradients that only column sums have.
    arguments: tuple[Any, ...]
    sums: ColumnSums | None = None  # whose gradients are wanted

    @classmethod
    def of(
        cls,
        pass_: Pass,
        options: Options,
        inputs: dict[str, Any],
        arguments: dict[str, Any],
        need: Collection[str],
        *,
        computes: bool,
    ) -> PreparedReduction:
        """From the inputs and the other arguments of a method by name, where None is absent."""
        count = (checked_count(arguments.pop("count")),) if "count" in arguments else ()
        names: tuple[str, ...] = ()
        gradients_of_sums: tuple[str, ...] = ()
        if pass_ is COLUMN_SUMS_BACKWARD:
            need = [name for name in need if name not in NOT_OF_COLUMN_SUMS or name not in DEFAULT_NEED]
            names, gradients_of_sums = gradients_wanted(options, inputs, need)
        arrays = inputs | arguments | {"k": keys_of(inputs["k"]), "v": None}
        call = prepare(replace(options, dropout=0.0), arrays, INPUTS, names)
        inputs = {name: x for name, x in call.arrays.items() if name not in arguments}
        arguments = {name: call.arrays.get(name) for name in arguments}
        if arguments["lse"] is None:
            arguments["lse"] = _lse_of(call, inputs, computes=computes)
        if pass_ is COLUMN_SUMS_BACKWARD:
            if arguments["dsums"] is None:
                arguments["dsums"] = _ones_of_keys(call.options.layout, inputs["k"], arguments["lse"])
            call = call._replace(arrays=inputs | arguments)
            return cls(pass_, call, gradients_of_sums, ColumnSums(call, dispatch.backend_of(call.backend)))
        reduction = prepare_reduction(pass_.name, call.options, inputs | arguments)
        return cls(pass_, call, (reduction.options, reduction.arrays, *count))

    def plan(self) -> Any:
        """The plan of its backend."""
        module = dispatch.reductions_of(self.call.backend)
        if self.sums is None:
            return module.plan(self.pass_, *self.arguments)
        passes = self.sums.passes(self.arguments)
        return module.plan_gradients(self.call.options, self.sums.given, self.call.need, passes)

    def compile(self) -> None:
        """Compile its kernels, and let the memory pool grow to what a call needs."""
        if self.sums is None:
            dispatch.reductions_of(self.call.backend).compile(self.pass_, *self.arguments)
        elif self.call.backend == "numpy":
            self.plan()
        else:
            self.sums.gradients(self.arguments)

    def tune(self, *, remember: bool, forget: bool) -> Any:
        """What tuning finds, or None where it is forgotten."""
        module = dispatch.reductions_of(self.call.backend)
        if self.sums is None:
            return module.tune(self.pass_, *self.arguments, remember=remember, forget=forget)
        options, given, passes = self.call.options, self.sums.given, self.sums.passes(self.arguments)
        return module.tune_gradients(options, given, passes=passes, remember=remember, forget=forget)


def _lse_of(call: Call, arrays: dict[str, Any], *, computes: bool) -> Any:
    """lse of a call without values; only its shape and dtype, unless the caller `computes`."""
    if computes:
        return dispatch.backend_of(call.backend).compute(FORWARD, call.options, arrays, OUTPUTS)[OUTPUTS.index("lse")]
    plain = {name: x.array if isinstance(x, Streamed) else x for name, x in arrays.items()}
    dtype = softmax_dtype_of(plain["q"].dtype.name)
    with on_device(plain["q"]):
        return module_of(plain["q"]).empty(shape_of_lse(call.options.layout, plain), dtype)


def _ones_of_keys(layout: str, k: Any, lse: Any) -> Any:
    """A gradient with respect to column sums, in the memory of k."""
    keys = k.array if isinstance(k, Streamed) else k
    rows = keys.shape[-3 if layout == "bshd" and keys.ndim > 2 else -2]
    with on_device(keys):
        return module_of(keys).ones((*lse.shape[:-1], rows), lse.dtype)
