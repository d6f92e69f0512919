"""What `cuflash.torch` and `cuflash.jax` share: a pass with its options and the names of its arrays, and messages.

`FlashAttention.forward`, `backward`, `jvp` and `backward_jvp` are closed under transposition up to second order. So a
framework has one operator for each pass, and the derivative of an operator is made of operators. Results of an earlier
pass that a later one takes (out and lse, tout and tlse) count as functions of the inputs there: what goes through them
is part of the gradients of the inputs.
"""

from __future__ import annotations

import functools
import inspect
import json
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuflash.arrays.cached import cached_property
from cuflash.arrays.checks import type_error, typed, value_error
from cuflash.flash_attention import FlashAttention
from cuflash.spec.inputs import FP8_SCALES, INPUTS, NAMES, OPTIONAL_INPUTS
from cuflash.spec.keywords import DIFFERENCES_OF, unexpected_keyword
from cuflash.spec.outputs import model_of

OPTION_NAMES = tuple(inspect.signature(FlashAttention).parameters)
_MOVABLE = (*INPUTS, *(row.name for row in OPTIONAL_INPUTS if row.gradient_via))
_FUNCTIONS = ("score", "mask")
_kept = functools.lru_cache(maxsize=256, typed=True)(FlashAttention)


@dataclass(frozen=True, eq=False)
class PassCall:
    """One pass of a `FlashAttention`, but for its arrays and random numbers.

    `names` are those of the arrays, in order; `need` are those of the results of `backward` and `backward_jvp`.
    """

    attn: FlashAttention
    names: tuple[str, ...]
    need: tuple[str, ...] = ()

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of those arrays that `FlashAttention.forward` takes, which come first."""
        taken = {*INPUTS, *NAMES, *self.attn.options.score_args}
        return tuple(name for name in self.names if name in taken)

    @cached_property
    def movable(self) -> tuple[str, ...]:
        """The names of those arrays that have gradients."""
        differentiable = {*_MOVABLE, *(name[1:] for name in self.attn.options.score_gradients)}
        return tuple(name for name in self.names if name in differentiable)

    def moved(self, tangents: Mapping[str, Any]) -> dict[str, Any]:
        """The tangents, by the names of what they are tangents of, that results depend on.

        Those of arrays that only comparisons and masks read are left out: there results are constant, but for steps.
        Raises NotImplementedError for tangents of arrays that have none.
        """
        check_movable(self, tangents)
        return {name: t for name, t in tangents.items() if name in self.movable or name not in self.inputs}

    @cached_property
    def token(self) -> str:
        """The call as text, by which a compiled graph names it; `call_of` gives it back.

        A graph may be kept for another process, where the text is enough to make the options again. It does not hold
        the functions of a score or a mask: with these it names an object of this process.
        """
        options = {name: getattr(self.attn.options, name) for name in OPTION_NAMES if name not in _FUNCTIONS}
        functions = self.attn.options.score, self.attn.options.mask_function
        own_type = type(self.attn)
        if functions != (None, None) or own_type is not FlashAttention:
            options["process"] = f"{_PROCESS}: {own_type.__module__}.{own_type.__qualname__} {functions}"
        token = json.dumps([options, self.names, self.need])
        _calls.setdefault(token, self)
        return token


def check_movable(call: PassCall, names: Iterable[str]) -> None:
    """Refuse derivatives with respect to scales of fp8 arrays."""
    for name in names:
        if name in FP8_SCALES and name in call.inputs:
            raise NotImplementedError(
                f"{name}: got a derivative with respect to it, expected none: fp8 arrays and their scales have no "
                "gradients; give cuflash.dequantize of the arrays"
            )


_PROCESS = uuid.uuid4().hex
_calls: dict[str, PassCall] = {}


@functools.lru_cache(maxsize=1024)
def call(attn: FlashAttention, names: tuple[str, ...], need: tuple[str, ...] = ()) -> PassCall:
    """The one call of an equal `FlashAttention` with such arrays and results."""
    return PassCall(attn, names, need)


def call_of(token: str) -> PassCall:
    """The call that `PassCall.token` spells."""
    known_call = _calls.get(token)
    if known_call is None:
        options, names, need = json.loads(token)
        if "process" in options:
            raise RuntimeError(
                "score: got a graph that another process compiled, expected one of this process, which has the "
                "function; compile again with an empty cache"
            )
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
        known_call = _calls[token] = call(FlashAttention(**options), tuple(names), tuple(need))
    return known_call


def _attn_of(options: Mapping[str, Any]) -> FlashAttention:
    """The `FlashAttention` of options. A function is traced by each call: what it reads may have changed."""
    if not options.keys().isdisjoint(_FUNCTIONS):
        return FlashAttention(**options)
    try:
        return _kept(**options)
    except TypeError:  # an option that has no hash, or is wrong
        return FlashAttention(**options)


def forward_call(
    attn: FlashAttention | None, names: tuple[str, ...], options: Mapping[str, Any], function: str = "attention"
) -> PassCall:
    """The forward pass of a function with options as keywords, or `attn` in place of these.

    `names` are those of its arrays. What is left of the keywords is no array, and an option or wrong.
    """
    check_attn(attn)
    if attn is None:
        for name, x in options.items():
            if name not in OPTION_NAMES or (name == "mask" and not callable(x)):
                raise _keyword_error(function, name, x)
        attn = _attn_of(options)
    elif options:
        name, x = next(iter(options.items()))
        if name not in OPTION_NAMES or (name == "mask" and not callable(x)):
            raise _keyword_error(function, name, x)
        raise TypeError(f"{name}: got it together with attn, expected one of them; give it to attn")
    forward = call(attn, names)
    if len(forward.inputs) != len(names):
        unknown = next(name for name in names if name not in forward.inputs)
        if unknown in OPTION_NAMES:
            raise TypeError(
                f"{unknown}: got an array, expected a Python value, because options have no gradients here: give "
                f"{unknown}.item(), or for the gradient of a scale q * scale with scale=1.0"
            )
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}")
    return forward


def add_keywords(
    arrays: dict[str, Any],
    keywords: Mapping[str, Any],
    types: tuple[type, ...],
    expected: str,
    values_of: Callable[[Any], Any],
) -> dict[str, Any]:
    """Add the arrays among the keywords of a function to its q, k and v, and return the options among them.

    Arrays are of one of the types. Where there is no v, it becomes values without columns, which `values_of` makes for
    k, and of which lse is computed alone.
    """
    for name, x in arrays.items():
        if not isinstance(x, types):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a {expected}")
    if "v" not in arrays:
        arrays["v"] = values_of(arrays["k"])
        if "k_scale" in keywords:
            keywords = {**keywords, "v_scale": keywords["k_scale"]}
    arrays |= {name: x for name, x in keywords.items() if isinstance(x, types)}
    return {name: x for name, x in keywords.items() if x is not None and name not in arrays}


def check_attn(attn: object) -> None:
    """Refuse what is no `FlashAttention` in its place."""
    if attn is not None and not isinstance(attn, FlashAttention):
        raise type_error("attn", typed(attn), "None or a cuflash.FlashAttention, such as FlashAttention(causal=True)")


def check_lse_keywords(attn: FlashAttention | None, keywords: Mapping[str, Any]) -> None:
    """Refuse what a `logsumexp` does not take: what belongs to values, and dropout, which does not change lse."""
    if wrong := keywords.keys() & {"v", "v_scale", "dropout", "seed", "offset", "return_lse"}:
        raise unexpected_keyword("logsumexp", min(wrong), {"q", "k", "attn", *OPTION_NAMES, *NAMES})
    check_attn(attn)
    if attn is not None and attn.options.dropout:
        raise value_error("attn", f"dropout={attn.options.dropout}", "one without dropout, which does not change lse")


def _keyword_error(function: str, name: str, x: object) -> TypeError:
    if name in NAMES:
        return TypeError(f"{name}: got {type(x).__name__}, expected an array of the library of q")
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def result_shapes(pass_name: str, call: PassCall, shapes: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """The shapes of what a pass gives, by name, for arrays of such shapes, whose sizes may be a compiler's symbols."""
    if call.need:
        return {name: tuple(shapes[model_of(name)]) for name in call.need}
    q, k, v = (shapes[name] for name in INPUTS)
    ndim = max(len(q), len(k), len(v))
    is_bshd = call.attn.options.layout == "bshd"
    heads, seqlen = (1, q[-2]) if len(q) == 2 else (q[-2], q[-3]) if is_bshd else (q[-3], q[-2])
    pooled = "block_table" in call.names
    batch = _broadcast([x[:-3] for x in ((q,) if pooled else (q, k, v))])
    rows = (heads, seqlen) if ndim > 2 else (seqlen,)
    of_out = (seqlen, heads) if ndim > 2 and is_bshd else rows
    of_forward = {"out": (*batch, *of_out, v[-1]), "lse": (*batch, *rows)}
    if pass_name == "forward":
        return of_forward
    return of_forward | {f"t{name}": shape for name, shape in of_forward.items()}


def vmapped_shapes(
    call: PassCall, shapes: Mapping[str, Sequence[int]], mapped: Collection[str]
) -> dict[str, tuple[int, ...]] | None:
    """How one pass computes all entries of a vmap: the shapes of the arrays of an entry, after an axis of entries.

    That axis is one more batch axis, so arrays get the axes between it and their own. Sinks, which all entries share,
    are left out. None where it cannot be one: dropout and functions depend on the batch entry, packed sequences and
    pages have no batch axes, and sinks that differ between entries, or their gradient, have none either. `mapped` are
    the arrays that differ between entries.
    """
    options = call.attn.options
    if options.dropout or options.score or options.mask_function:
        return None
    base = {name: _without_prefix(name) for name in (*call.names, *call.need)}
    if not set(base.values()) <= _OWN_AXES.keys() or any(base[name] == "sinks" for name in (*mapped, *call.need)):
        return None
    full = {name: _with_own_axes(options.layout, base[name], x) for name, x in shapes.items() if base[name] != "sinks"}
    batch = max(len(x) - _OWN_AXES[base[name]] for name, x in full.items())
    return {name: (1,) * (batch + _OWN_AXES[base[name]] - len(x)) + x for name, x in full.items()}


_OWN_AXES = {"out": 3, "lse": 2, **dict.fromkeys(INPUTS, 3)} | {
    row.name: row.own_axes for row in OPTIONAL_INPUTS if row.own_axes is not None and row.name not in FP8_SCALES
}


def _without_prefix(name: str) -> str:
    """The array whose gradient, tangent, or both, a name says."""
    return next(base for base in (name, name[1:], name[2:]) if base in _OWN_AXES or base == name[2:])


def _with_own_axes(layout: str, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with all axes of an array but those of the batch: one head where it has no axis of heads."""
    missing = _OWN_AXES[name] - len(shape)
    if missing <= 0:
        return tuple(shape)
    if layout == "bshd" and name in (*INPUTS, "out"):
        return shape[0], 1, shape[1]
    return (*(1,) * missing, *shape)


def _broadcast(shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """As `numpy.broadcast_shapes`, but shapes that do not fit are left to the pass, which names the argument."""
    sizes = [1] * max(map(len, shapes))
    for shape in shapes:
        for axis, size in enumerate(shape, start=len(sizes) - len(shape)):
            if sizes[axis] == 1:
                sizes[axis] = size
    return tuple(sizes)


class _StreamPointer:
    """A stream of CUDA by its address, in the protocol by which libraries pass streams on."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@functools.lru_cache(maxsize=256)
def cupy_stream(pointer: int, device: int) -> Any:
    """A stream of another library as one of CuPy, which is a context in which kernels run on it."""
    import cupy

    with cupy.cuda.Device(device):
        if hasattr(cupy.cuda.Stream, "from_external"):
            return cupy.cuda.Stream.from_external(_StreamPointer(pointer))
        return cupy.cuda.ExternalStream(pointer, device)


def third_order_error(what: str) -> NotImplementedError:
    """The error for a derivative that no pass gives."""
    return NotImplementedError(
        f"attention: got a third derivative, {what}, expected at most second ones; "
        + DIFFERENCES_OF.format("second derivatives")
    )


def forward_twice_error() -> NotImplementedError:
    """The error for forward mode on top of forward mode, of which no pass is the derivative."""
    return NotImplementedError(
        "attention: got forward mode over forward mode, expected reverse mode for one of the two derivatives: forward "
        "mode over reverse mode, as in jacfwd(jacrev(f)) and hessian(f), or reverse mode over forward mode"
    )
