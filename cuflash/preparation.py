"""Methods that prepare a call: they give its plan, compile its kernels, and tune its tiles."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

import numpy as np

from cuflash.arrays.array_info import softmax_dtype_of
from cuflash.arrays.checks import type_error, value_error
from cuflash.arrays.dlpack import module_of, on_device
from cuflash.cpu import backend as cpu_backend
from cuflash.cpu import reductions as reductions_on_numpy
from cuflash.spec.array_imports import is_cupy
from cuflash.spec.backends import PassBackend, ReductionBackend
from cuflash.spec.batch_axes import shape_of_lse
from cuflash.spec.call import Backend, Call, prepare
from cuflash.spec.inputs import FP8_SCALES, INPUTS, NAMES, WITH_KEYS, OptionalArrays, WithTangents
from cuflash.spec.keywords import unexpected_keyword
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
from cuflash.spec.results import (
    Array,
    ForwardResult,
    checked_passes,
    named_tuple,
    needed,
    wanted_results,
)
from cuflash.spec.score_args import check_tangent_names, checked_with_score_args
from cuflash.spec.streamed import Streamed
from cuflash.spec.type_variables import FunctionT, WithFunction
from cuflash.streaming import calls as streaming_backend
from cuflash.streaming import reductions as reductions_of_streamed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.cpu.backend import CpuPlan
    from cuflash.gpu.backend import Plans
    from cuflash.gpu.bound import BoundLaunch
    from cuflash.gpu.tuning import Tuning
    from cuflash.spec.outputs import NamedForwardResult, PlannedArrays, PreparedArrays
    from cuflash.streaming import StreamPlan


ResultT = TypeVar("ResultT", bound=tuple[Any, ...])


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
        wanted = _Wanted.of(passes)
        plans: list[Any] = []
        if wanted.passes:
            of_functions, others = self.options.score_gradients, wanted.of_passes(arrays, ("lse",))
            given = {"q": q, "k": k, "v": v} | self._checked("plan", wanted.passes, others, of_functions)
            results = {name: given.get(name) for name in (*GRADIENTS, *of_functions)}
            names = needed(wanted.need_of_passes(need), given | self.options.numbers, results, of_functions)
            call = prepare(self.options, given, INPUTS, names)
            plan = backend_of(call.backend).plan(call.options, call.arrays, call.need, wanted.passes)
            plans.append(plan if call.rewrite is None else plan.noted(call.rewrite.describe(self.options, call.given)))
        for one in self._prepared(wanted, q, k, arrays, need, computes=False):
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
        wanted = _Wanted.of(passes)
        if wanted.passes:
            others = wanted.of_passes(optional_inputs)
            arrays = {"q": q, "k": k, "v": v} | self._checked("compile", wanted.passes, others)
            of_functions = self.options.score_gradients
            absent = dict.fromkeys((*GRADIENTS, *of_functions))
            names = needed(wanted.need_of_passes(need), arrays | self.options.numbers, absent, of_functions)
            call = prepare(self.options, arrays, INPUTS, names)
            backend_of(call.backend).compile(call.options, call.arrays, call.need, wanted.passes)
        for one in self._prepared(wanted, q, k, optional_inputs, need, computes=True):
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
        wanted, how = _Wanted.of(passes), {"remember": remember, "forget": forget}
        found: list[Any] = []
        if own_passes := wanted.passes:
            others = wanted.of_passes(optional_inputs)
            arrays = {"q": q, "k": k, "v": v} | self._checked("tune", own_passes, others) | {"dout": dout}
            if arrays.get("block_table") is not None and FORWARD in own_passes:
                own_passes = (FORWARD,)
            random = self.options.random(*((0 if x is None else x) for x in (seed, offset)))
            call = prepare(self.options, arrays, INPUTS, DEFAULT_NEED)
            found.append(backend_of(call.backend).tune(call.options, call.arrays, random, passes=own_passes, **how))
        for one in self._prepared(wanted, q, k, optional_inputs, OF_SUMS_BY_DEFAULT, computes=True):
            found.append(one.tune(**how))
        return None if forget else functools.reduce(lambda tuning, other: tuning.joined(other), found)

    def _prepared(
        self, wanted: _Wanted, q: Array, k: Array, arrays: Mapping[str, Any], need: Collection[str], *, computes: bool
    ) -> Iterator[PreparedReduction]:
        """The reductions that are wanted, on arrays of a backend; lse is computed if it is not given."""
        for pass_ in wanted.reductions:
            own = {name: arrays.get(name) for name in TAKEN_BY_REDUCTIONS[pass_]}
            others = {name: x for name, x in arrays.items() if name not in wanted.all_taken}
            if wanted.passes:  # which also take what reductions do not
                others = {name: x for name, x in others.items() if name in (*NAMES, *self.options.score_args)}
            given = checked_of_reduction(pass_.name, self.options, others)
            yield PreparedReduction.of(pass_, self.options, {"q": q, "k": k} | given, own, need, computes=computes)

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


class BoundForward(Generic[ResultT]):
    """`FlashAttention.forward` on arrays of one form: what `FlashAttention.bind` returns.

    A call takes arrays with the shapes and dtypes that were bound, of the same library; k, v and the arrays that have
    an axis of keys may have another number of keys. It gives what `forward` gives. On CuPy arrays with the bound
    strides, on the bound device, it only compares these and launches; on NumPy arrays with the bound shapes and strides
    it compares these and computes. With other strides, after batch axes or rewritten functions, and on arrays of other
    libraries it takes the host longer than `forward` does. A bound call may
    be used by several threads.

    Parameters
    ----------
    options : Options
        The options of the `FlashAttention` whose `bind` makes it.
    arrays : mapping of str to array
        Those of `forward` by the names of their arguments, q, k and v among them.
    want : collection of str
        Row reductions that calls are to give, as `forward` takes it.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `FlashAttention.bind` does.

    See Also
    --------
    FlashAttention.forward : What a call computes.
    """

    __slots__ = ("_forms", "_launches", "_result", "_want", "options")

    def __init__(self, options: Options, arrays: Mapping[str, Array], want: Collection[str]) -> None:
        self.options, self._want = options, wanted_results(want, {})
        for name in INPUTS[1:]:
            if isinstance(arrays[name], Streamed):
                raise NotImplementedError(
                    f"{name}: got keys of cuflash.streamed, expected arrays on one device in bind: copying them takes "
                    "longer than what a bound call saves; call forward"
                )
        given = {name: x for name, x in arrays.items() if x is not None}
        self._forms = {name: _form_of(name, x, options) for name, x in given.items()}
        # By the names of the arrays that are given; None where calls are more than one launch on these arrays, or have
        # to look at numbers in them.
        self._launches: dict[tuple[str, ...], BoundLaunch | cpu_backend.BoundCall | None] = {}
        self._result = named_tuple(ForwardResult, self._want)
        self._bound(given)

    def __call__(
        self, q: Array, k: Array, v: Array, *, seed: int | None = None, offset: int | None = None, **arrays: Array
    ) -> ResultT:
        """out, lse and what is wanted.

        Parameters
        ----------
        q, k, v, seed, offset, **arrays
            As `FlashAttention.forward` takes them, with ``out`` and other arrays that results are written to.

        Raises
        ------
        TypeError
            For an array that was not bound, or one that was and is missing.
        ValueError
            For another shape or dtype than was bound; and as `forward` does.
        """
        given = {"q": q, "k": k, "v": v, **arrays}
        launch = self._launches.get(tuple(given))
        if launch is not None:
            results = launch(given, self.options.random(seed, offset))
            if results is not None:
                return self._result(*results)  # type: ignore[no-any-return]
        return self._checked(given, seed, offset)

    def __getstate__(self) -> tuple[Any, ...]:
        """What another process can use: launches hold addresses of this one, and are bound again there."""
        return self.options, self._want, self._forms

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.options, self._want, self._forms = state
        self._launches, self._result = {}, named_tuple(ForwardResult, self._want)

    def _checked(self, given: Mapping[str, Array], seed: int | None, offset: int | None) -> ResultT:
        """The results of arrays of which nothing is known."""
        given = {name: x for name, x in given.items() if x is not None or name == "v"}
        for name in (*self._forms, *given):
            expected, x = self._forms.get(name), given.get(name)
            if name in self._want:
                continue  # what results are written to is checked with the results
            if expected is None and x is not None:
                if name not in OptionalArrays.__annotations__:
                    accepted = (*OptionalArrays.__annotations__, *self.options.score_args)
                    raise unexpected_keyword("call", name, accepted)
                raise type_error(name, "an array", "none, as in bind: bind again with it, or call forward")
            if expected is not None and x is None:
                raise type_error(name, "None", "an array, as in bind: bind again without it, or call forward")
            if expected is not None and (got := _form_of(name, x, self.options)) != expected:
                raise value_error(name, got, f"{expected}, as in bind: bind again with it, or call forward")
        random = self.options.random(seed, offset)
        call = self._bound(given)
        computed = backend_of(call.backend).compute(FORWARD, call.options, call.arrays, call.need, random)
        own = dict.fromkeys(self._want) | given
        return self._result(*(computed if call.is_direct else call.exported(computed, own)))  # type: ignore[no-any-return]

    def _bound(self, given: Mapping[str, Array]) -> Call:
        """The call of arrays; if it is one launch, later calls on arrays of the same form are only that launch."""
        optional = {name: x for name, x in given.items() if name not in (*INPUTS, *self._want)}
        arrays: dict[str, Any] = {name: given.get(name) for name in INPUTS}
        arrays |= checked_with_score_args("bind", OptionalArrays, self.options, optional)
        arrays |= {name: given.get(name) for name in self._want}
        call = prepare(self.options, arrays, INPUTS, self._want, self._want)
        names = tuple(given)
        launch = self._launches.get(names)
        is_numpy = call.backend == "numpy"
        arrays = {name: call.arrays[name] for name in names} if is_numpy and call.is_direct else call.arrays
        if launch is not None:
            if call.is_direct:
                launch.bind(arrays)
        elif names not in self._launches and (call.is_direct or not is_numpy):
            kind = cpu_backend.BoundCall if is_numpy else importlib.import_module("cuflash.gpu.bound").BoundLaunch
            launch = kind(call.options, arrays, call.need)
            self._launches[names] = launch if call.is_direct and launch.is_bound else None
        return call


def _form_of(name: str, x: Any, options: Options) -> str:
    """Shape and dtype of an array in words; of an axis of keys or of pages only that it is there."""
    if not hasattr(x, "dtype"):
        return f"a {type(x).__name__}"
    shape = [str(size) for size in x.shape]
    if name in INPUTS[1:] and len(shape) > 1:
        shape[-3 if len(shape) > 2 and options.layout == "bshd" else -2] = "keys"
    elif shape and name in ("block_table", *FP8_SCALES[1:], *WITH_KEYS):
        shape[-1] = "keys"
    return f"shape ({', '.join(shape)}) and dtype {x.dtype} in {type(x).__module__.split('.')[0]}"


# What the methods of reductions take besides q, k and optional inputs.
TAKEN_BY_REDUCTIONS: dict[Pass, tuple[str, ...]] = {
    COLUMN_SUMS: ("lse", "weights"),
    COLUMN_MAX: ("lse",),
    TOP_KEYS: ("lse", "count"),
    COLUMN_SUMS_BACKWARD: ("lse", "weights", "dsums"),
}
OF_SUMS_BY_DEFAULT = ("dq", "dk")


class _Wanted(NamedTuple):
    """The passes that are wanted: those over q, k and v, and reductions of the attention weights."""

    passes: tuple[Pass, ...]
    reductions: tuple[Pass, ...]

    @classmethod
    def of(cls, passes: Collection[str]) -> _Wanted:
        wanted = checked_passes(passes)
        reductions = tuple(pass_ for pass_ in wanted if pass_ in REDUCTIONS)
        return cls(tuple(pass_ for pass_ in wanted if pass_ not in reductions), reductions)

    @property
    def all_taken(self) -> set[str]:
        """What these reductions take besides q, k and optional inputs."""
        return {name for pass_ in self.reductions for name in TAKEN_BY_REDUCTIONS[pass_]}

    def of_passes(self, arrays: Mapping[str, Any], shared: Collection[str] = ()) -> dict[str, Any]:
        """The arrays of the other passes, among them those that reductions take, too."""
        own = self.all_taken.difference(shared)
        return {name: x for name, x in arrays.items() if name not in own}

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
    arguments: tuple[
        Any, ...
    ]  # of the functions of `reductions_of`, after the pass; or the gradients besides those of passes
    sums: ColumnSums | None = None  # whose gradients are wanted

    @classmethod
    def of(
        cls,
        pass_: Pass,
        options: Options,
        given: dict[str, Any],
        own: dict[str, Any],
        need: Collection[str],
        *,
        computes: bool,
    ) -> PreparedReduction:
        """From the arrays of a caller: the inputs, and what the method takes besides them, where None is absent."""
        count = (checked_count(own.pop("count")),) if "count" in own else ()
        names: tuple[str, ...] = ()
        own_gradients: tuple[str, ...] = ()
        if pass_ is COLUMN_SUMS_BACKWARD:
            need = [name for name in need if name not in NOT_OF_COLUMN_SUMS or name not in DEFAULT_NEED]
            names, own_gradients = gradients_wanted(options, given, need)
        arrays = given | own | {"k": keys_of(given["k"]), "v": None}
        call = prepare(replace(options, dropout=0.0), arrays, INPUTS, names)
        found = {name: x for name, x in call.arrays.items() if name not in own}
        of_call = {name: call.arrays.get(name) for name in own}
        if of_call["lse"] is None:
            of_call["lse"] = _lse_of(call, found, computes=computes)
        if pass_ is COLUMN_SUMS_BACKWARD:
            if of_call["dsums"] is None:
                of_call["dsums"] = _ones_of_keys(call.options.layout, found["k"], of_call["lse"])
            call = call._replace(arrays=found | of_call)
            return cls(pass_, call, own_gradients, ColumnSums(call, backend_of(call.backend)))
        reduction = prepare_reduction(pass_.name, call.options, found | of_call)
        return cls(pass_, call, (reduction.options, reduction.arrays, *count))

    def plan(self) -> Any:
        """The plan of its backend."""
        module = reductions_of(self.call.backend)
        if self.sums is None:
            return module.plan(self.pass_, *self.arguments)
        passes = self.sums.passes(self.arguments)
        return module.plan_gradients(self.call.options, self.sums.given, self.call.need, passes)

    def compile(self) -> None:
        """Compile its kernels, and let the memory pool grow to what a call needs."""
        if self.sums is None:
            reductions_of(self.call.backend).compile(self.pass_, *self.arguments)
        elif self.call.backend == "numpy":
            self.plan()
        else:
            self.sums.gradients(self.arguments)

    def tune(self, *, remember: bool, forget: bool) -> Any:
        """What tuning finds, or None where it is forgotten."""
        module = reductions_of(self.call.backend)
        if self.sums is None:
            return module.tune(self.pass_, *self.arguments, remember=remember, forget=forget)
        options, given, passes = self.call.options, self.sums.given, self.sums.passes(self.arguments)
        return module.tune_gradients(options, given, passes=passes, remember=remember, forget=forget)


def _lse_of(call: Call, arrays: dict[str, Any], *, computes: bool) -> Any:
    """lse of a call without values; only its shape and dtype, unless the caller `computes`."""
    if computes:
        return backend_of(call.backend).compute(FORWARD, call.options, arrays, OUTPUTS)[OUTPUTS.index("lse")]
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


@functools.cache
def reductions_of(backend: Backend) -> ReductionBackend:
    """The module that reduces the attention weights of arrays of one backend."""
    if backend == "numpy":
        return reductions_on_numpy
    if backend == "streamed":
        return reductions_of_streamed
    from cuflash.gpu import reductions as reductions_on_cupy

    return reductions_on_cupy


def results_of(
    pass_: Pass,
    options: Options,
    arrays: dict[str, Any],
    required: Sequence[str],
    need: tuple[str, ...],
    random: tuple[int, int],
) -> Sequence[Any]:
    """The results `need` of a pass, as arrays of the caller; parameters are those of `prepare` and of `compute`."""
    backend: Backend | None = "numpy" if type(arrays["q"]) is np.ndarray else "cupy" if is_cupy(arrays["q"]) else None
    if backend is not None:
        own: Any = backend_of(backend)
        repeated = own.repeated(pass_, options, arrays, need, random)
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
