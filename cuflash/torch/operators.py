"""The passes as operators of PyTorch, ``torch.ops.cuflash``, and their derivatives in terms of each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cuflash.flash_attention import FlashAttention
from cuflash.frameworks import (
    PassCall,
    call,
    call_of,
    check_movable,
    forward_twice_error,
    result_shapes,
    third_order_error,
    vmapped_shapes,
)
from cuflash.torch.tensors import Tensors, empty_results, run

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


# ---- operators -------------------------------------------------------------------------------------------------------

_library = torch.library.Library("cuflash", "DEF")
_SCHEMAS = {
    "forward": "(Tensor out, Tensor lse)",
    "backward": "Tensor[]",
    "jvp": "(Tensor out, Tensor lse, Tensor tout, Tensor tlse)",
    "backward_jvp": "Tensor[]",
}


def _define(which: str) -> None:
    """Define the operator of a pass: what it computes, and what a compiler knows of that."""
    _library.define(f"{which}(Tensor[] arrays, str call, SymInt? seed, SymInt? offset) -> {_SCHEMAS[which]}")
    of_list = _SCHEMAS[which] == "Tensor[]"

    def kernel(arrays: list[Tensor], token: str, seed: int | None, offset: int | None) -> Any:
        found = run(which, call_of(token), seed, offset, arrays)
        return list(found) if of_list else found

    def fake(arrays: list[Tensor], token: str, seed: int | None, offset: int | None) -> Any:
        own = call_of(token)
        shapes = result_shapes(which, own, {name: x.shape for name, x in zip(own.names, arrays, strict=True)})
        found = tuple(empty_results(own, arrays, shapes).values())
        return list(found) if of_list else found

    def differentiable(arrays: list[Tensor], token: str, seed: int | None, offset: int | None) -> Any:
        found = _FUNCTIONS[which].apply(call_of(token), seed, offset, *arrays)
        return list(found) if of_list else found

    _library.impl(which, kernel, "CPU")
    _library.impl(which, kernel, "CUDA")
    _library.impl(which, differentiable, "Autograd")
    _library.impl(which, differentiable, "FuncTorchDynamicLayerFrontMode")  # transforms of torch.func
    torch.library.register_fake(f"cuflash::{which}", fake, lib=_library)


def _is_plain(tensors: Tensors) -> bool:
    """Whether these are tensors with memory and nobody traces what is computed."""
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    for x in tensors:  # noqa: SIM110 (all() of a generator takes three times as long)
        if type(x) not in _PLAIN:
            return False
    return True


def _is_recorded(tensors: Tensors) -> bool:
    """Whether autograd, or its forward mode, has to know of a pass over these."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return True
    return False


def _compute(which: str, call: PassCall, seed: int | None, offset: int | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    if _is_plain(tensors):
        return run(which, call, seed, offset, tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return tuple(getattr(torch.ops.cuflash, which)(list(tensors), call.token, seed, offset))


# ---- derivatives -----------------------------------------------------------------------------------------------------


class _Pass(torch.autograd.Function):  # type: ignore[misc]  # PyTorch's types are left out
    """A pass as a differentiable function of a `PassCall`, seed and offset, and the tensors that the call names.

    Of tensors that have no gradient, and of those that are results of an earlier pass, gradients are None.
    """

    which: str

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As that of the base, which looks at the signature of `forward` in every call; that takes 40 microseconds.

        Where nothing is differentiated, the pass is computed without autograd's records.
        """
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        if not _is_recorded(args[3:]):
            return cls.forward(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

    @classmethod
    def of(cls, attn: FlashAttention, need: tuple[str, ...], random: Any, given: Mapping[str, Tensor]) -> Any:
        return cls.apply(call(attn, tuple(given), need), *random, *given.values())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *random = inputs[:3]
        ctx.random = tuple(random)
        ctx.set_materialize_grads(False)
        tensors = (*inputs[3:], *(output if not ctx.call.need else ()))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *args: Any) -> Any:
        """One pass with one more batch axis, or one for each entry where that cannot be (`vmapped_shapes`)."""
        which, head, tensors = args[0], args[:3], args[3:]
        if which.attn.options.dropout and info.randomness == "different":
            raise NotImplementedError(
                "dropout: got randomness='different' of torch.vmap, expected 'same' or 'error': all entries have one "
                "seed; as a batch axis of q, in place of vmap, they drop other weights"
            )
        dims, size = in_dims[3:], info.batch_size
        own = [x.shape if d is None else x.select(d, 0).shape for x, d in zip(tensors, dims, strict=True)]
        shapes = dict(zip(which.names, own, strict=True))
        mapped = [name for name, d in zip(which.names, dims, strict=True) if d is not None]
        if (wider := vmapped_shapes(which, shapes, mapped)) is not None:
            given = zip(which.names, tensors, dims, strict=True)
            found = cls.apply(*head, *(_widened(x, d, wider.get(name), size) for name, x, d in given))
            right = result_shapes(cls.which, which, shapes)
            results = tuple(x.reshape(size, *shape) for x, shape in zip(found, right.values(), strict=True))
            return results, (0,) * len(results)
        found = []
        for entry in range(size):
            of_entry = (x if d is None else x.select(d, entry) for x, d in zip(tensors, dims, strict=True))
            found.append(cls.apply(*head, *of_entry))
        stacked = tuple(torch.stack(entries) for entries in zip(*found, strict=True))
        return stacked, (0,) * len(stacked)


def _widened(x: Tensor, dim: int | None, shape: tuple[int, ...] | None, size: int) -> Tensor:
    """A tensor with an axis of vmap in front of such a shape of an entry; as it is, where there is no shape."""
    if shape is None:
        return x
    if dim is None:
        return x.reshape(1, *shape).expand(size, *shape)
    return x.movedim(dim, 0).reshape(size, *shape)


def _named(ctx: Any) -> dict[str, Tensor]:
    return dict(zip(ctx.call.names, ctx.saved_tensors, strict=False))


def _inputs(ctx: Any) -> dict[str, Tensor]:
    return dict(zip(ctx.call.inputs, ctx.saved_tensors, strict=False))  # which come first


def _moved(ctx: Any, tangents: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The tangents that there are, by the names of what they are tangents of (`PassCall.moved`)."""
    named = zip(ctx.call.names, tangents[3:], strict=True)
    return ctx.call.moved({name: t for name, t in named if t is not None})  # type: ignore[no-any-return]


def _wanted(ctx: Any) -> tuple[str, ...]:
    """The names of inputs that have gradients and need them."""
    needs = dict(zip(ctx.call.names, ctx.needs_input_grad[3:], strict=True))
    check_movable(ctx.call, [name for name, needs_one in needs.items() if needs_one])
    return tuple(name for name in ctx.call.inputs if name in ctx.call.movable and needs[name])


def _reached(ctx: Any) -> list[str]:
    """The names of tensors whose gradients the running backward pass goes on to, of all that need one."""
    found, edges = [], ctx.next_functions
    for name, needs, (node, _) in zip(ctx.call.names, ctx.needs_input_grad[3:], edges, strict=True):
        if needs and node is not None:
            try:
                is_reached = torch._C._will_engine_execute_node(node)
            except RuntimeError:  # a leaf that is asked for
                is_reached = True
            found += [name] * is_reached
    return found


def _in_order(ctx: Any, by_name: Mapping[str, Any]) -> tuple[Any, ...]:
    return (None, None, None, *(by_name.get(name) for name in ctx.call.names))


class Forward(_Pass):
    which = "forward"
    forward = staticmethod(functools.partial(_compute, which))

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        *inputs, out, lse = ctx.saved_tensors  # each look at these takes a microsecond for a tensor
        given = dict(zip(ctx.call.names, inputs, strict=True))
        given |= {"dout": torch.zeros_like(out) if dout is None else dout, "out": out, "lse": lse}
        given |= {} if dlse is None else {"dlse": dlse}
        found = _by_input(_Backward, ctx.call.attn, _wanted(ctx), ctx.random, given)
        return _in_order(ctx, found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        moved = {f"t{name}": t for name, t in _moved(ctx, tangents).items()}
        _, _, tout, tlse = _Jvp.of(ctx.call.attn, (), ctx.random, _inputs(ctx) | moved)
        return tout, tlse


def _by_input(
    pass_: type[_Pass], attn: FlashAttention, wanted: Sequence[str], random: Any, given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """By the name of each wanted input, its gradient, or the tangent of that by `_BackwardJvp`."""
    prefix = "td" if pass_ is _BackwardJvp else "d"
    found = pass_.of(attn, tuple(f"{prefix}{name}" for name in wanted), random, given) if wanted else ()
    return dict(zip(wanted, found, strict=True))


class _Backward(_Pass):
    which = "backward"
    forward = staticmethod(functools.partial(_compute, which))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """The gradients of ``sum(c * g)``: `cuflash.double_backward` says why these are they."""
        given, inputs = _named(ctx), _inputs(ctx)
        moved = {f"t{name[1:]}": c for name, c in zip(ctx.call.need, cotangents, strict=True) if c is not None}
        if not moved:
            return _in_order(ctx, {})
        _, _, tout, tlse = _Jvp.of(ctx.call.attn, (), ctx.random, inputs | moved)
        own = given | {"tout": tout, "tlse": tlse} | moved
        found = _by_input(_BackwardJvp, ctx.call.attn, _wanted(ctx), ctx.random, own)
        return _in_order(ctx, found | {"dout": tout, "dlse": tlse})

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        given, random, attn = _named(ctx), ctx.random, ctx.call.attn
        moved = {f"t{name}": t for name, t in _moved(ctx, tangents).items()}
        of_inputs = {name: t for name, t in moved.items() if name[1:] in ctx.call.inputs}
        if not of_inputs:
            linear = {"dout": moved.get("tdout", torch.zeros_like(given["dout"]))}
            linear |= {"dlse": moved["tdlse"]} if "tdlse" in moved else {}
            own = {name: x for name, x in given.items() if name != "dlse"} | linear
            return tuple(_Backward.of(attn, ctx.call.need, random, own))
        _, _, tout, tlse = _Jvp.of(attn, (), random, _inputs(ctx) | of_inputs)
        own = given | moved | {"tout": tout, "tlse": tlse}
        return tuple(_BackwardJvp.of(attn, tuple(f"t{name}" for name in ctx.call.need), random, own))


class _Jvp(_Pass):
    which = "jvp"
    forward = staticmethod(functools.partial(_compute, which))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Pass.setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[:2])

    @staticmethod
    def backward(ctx: Any, _dout: None, _dlse: None, dtout: Tensor | None, dtlse: Tensor | None) -> Any:
        """As `cuflash.jvp_backward`."""
        *_, out, lse, tout, tlse = ctx.saved_tensors
        inputs, attn, random = _inputs(ctx), ctx.call.attn, ctx.random
        results = {"out": out, "lse": lse, "dout": torch.zeros_like(tout) if dtout is None else dtout}
        results |= {} if dtlse is None else {"dlse": dtlse}
        moved = {name: x for name, x in _named(ctx).items() if name not in inputs}
        own = inputs | moved | results | {"tout": tout, "tlse": tlse}
        found = _by_input(_BackwardJvp, attn, _wanted(ctx), random, own)
        needs = dict(zip(ctx.call.names, ctx.needs_input_grad[3:], strict=True))
        of_tangents = _by_input(_Backward, attn, [name[1:] for name in moved if needs[name]], random, inputs | results)
        return _in_order(ctx, found | {f"t{name}": x for name, x in of_tangents.items()})

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        moved = _moved(ctx, tangents)
        inputs = _inputs(ctx)
        if moved.keys() & inputs.keys():
            raise forward_twice_error()
        _, _, tout, tlse = _Jvp.of(ctx.call.attn, (), ctx.random, inputs | moved)
        return None, None, tout, tlse


class _BackwardJvp(_Pass):
    which = "backward_jvp"
    forward = staticmethod(functools.partial(_compute, which))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """The pass is a symmetric matrix, the Hessian, times the tangents, and linear in tdout and tdlse."""
        given, inputs, attn, random = _named(ctx), _inputs(ctx), ctx.call.attn, ctx.random
        moved = {name for name in ctx.call.names if name[1:] in inputs}
        linear = moved | {"tdout", "tdlse"}
        of_earlier = {"out", "lse", "tout", "tlse"}
        if wrong := [name for name in _reached(ctx) if name not in linear | of_earlier]:
            raise third_order_error(f"a gradient of backward_jvp with respect to {wrong[0]}")
        own = {f"t{name[2:]}": c for name, c in zip(ctx.call.need, cotangents, strict=True) if c is not None}
        if not own:
            return _in_order(ctx, {})
        _, _, tout, tlse = _Jvp.of(attn, (), random, inputs | own)
        fixed = {name: x for name, x in given.items() if name not in linear}
        found = _by_input(
            _BackwardJvp, attn, [name[1:] for name in moved], random, fixed | own | {"tout": tout, "tlse": tlse}
        )
        return _in_order(ctx, {f"t{name}": x for name, x in found.items()} | {"tdout": tout, "tdlse": tlse})

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Where nothing moves but what the pass is linear in."""
        given, inputs, attn, random = _named(ctx), _inputs(ctx), ctx.call.attn, ctx.random
        moved = _moved(ctx, tangents)
        if moved.keys() & {*inputs, "dout", "dlse"}:
            raise third_order_error("a tangent of backward_jvp")
        own = {name: t for name, t in moved.items() if name[1:] in inputs}
        _, _, tout, tlse = _Jvp.of(attn, (), random, inputs | own)
        fixed = {name: given[name] for name in ("dout", "dlse", "out", "lse") if name in given}
        return tuple(
            _BackwardJvp.of(attn, ctx.call.need, random, inputs | fixed | moved | {"tout": tout, "tlse": tlse})
        )


_FUNCTIONS: dict[str, type[_Pass]] = {f.which: f for f in (Forward, _Backward, _Jvp, _BackwardJvp)}
for _which in _SCHEMAS:
    _define(_which)
