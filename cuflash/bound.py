"""`forward` for arrays of one form, with less work for the host in each call: what `FlashAttention.bind` returns."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cuflash import dispatch
from cuflash.arrays.checks import type_error, value_error
from cuflash.cpu import backend as cpu_backend
from cuflash.spec.call import Call, prepare
from cuflash.spec.inputs import FP8_SCALES, INPUTS, WITH_KEYS, OptionalArrays
from cuflash.spec.keywords import unexpected_keyword
from cuflash.spec.options import Options
from cuflash.spec.passes import FORWARD
from cuflash.spec.results import Array, ForwardResult, named_tuple, wanted_results
from cuflash.spec.score_args import checked_with_score_args
from cuflash.spec.streamed import Streamed

if TYPE_CHECKING:
    from cuflash.gpu.bound import BoundLaunch

ResultT = TypeVar("ResultT", bound=tuple[Any, ...])


class BoundForward(Generic[ResultT]):
    """`FlashAttention.forward` on arrays of one form: what `FlashAttention.bind` returns.

    A call takes arrays with the shapes and dtypes that were bound, of the same library; k, v and the arrays that have
    an axis of keys may have another number of keys. It gives what `forward` gives. On CuPy arrays with the bound
    strides, on the bound device, it only compares these and launches; on NumPy arrays with the bound shapes and strides
    it compares these and computes. With other strides, after batch axes or rewritten functions, and on arrays of other
    libraries it takes the host longer than `forward` does. Several threads may use a bound call.

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
        return self._after_checks(given, seed, offset)

    def __getstate__(self) -> tuple[Any, ...]:
        """What another process can use: launches hold addresses of this one, and are bound again there."""
        return self.options, self._want, self._forms

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.options, self._want, self._forms = state
        self._launches, self._result = {}, named_tuple(ForwardResult, self._want)

    def _after_checks(self, given: Mapping[str, Array], seed: int | None, offset: int | None) -> ResultT:
        """The results of a call on arrays that may have another form, or belong to another library."""
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
        computed = dispatch.backend_of(call.backend).compute(FORWARD, call.options, call.arrays, call.need, random)
        arrays = dict.fromkeys(self._want) | given
        results = computed if call.is_direct else call.exported(computed, arrays)
        return self._result(*results)  # type: ignore[no-any-return]

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
        elif names not in self._launches:
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
