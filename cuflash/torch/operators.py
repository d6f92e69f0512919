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


def _define(pass_name: str) -> None:
    """Define the operator of a pass: what it computes, and what a compiler knows of that."""
    schema = _SCHEMAS[pass_name]
    _library.define(f"{pass_name}(Tensor[] arrays, str call, SymInt? seed, SymInt? offset) -> {schema}")
    as_schema = list if schema == "Tensor[]" else tuple

    def kernel(arrays: list[Tensor], token: str, seed: int | None, offset: int | None) -> Any:
        return as_schema(run(pass_name, call_of(token), seed, offset, arrays))

    def fake(arrays: list[Tensor], token: str, seed: int | None, offset: int | None) -> Any:
        call = call_of(token)
        shapes = result_shapes(pass_name, call, {name: x.shape for name, x in zip(call.names, arrays, strict=True)})
        return as_schema(empty_results(call, arrays, shapes).values())

    def differentiable(arrays: list[Tensor], token: str, seed: int | None, offset: int | None) -> Any:
        return as_schema(_FUNCTIONS[pass_name].apply(call_of(token), seed, offset, *arrays))

    _library.impl(pass_name, kernel, "CPU")
    _library.impl(pass_name, kernel, "CUDA")
    _library.impl(pass_name, differentiable, "Autograd")
    _library.impl(pass_name, differentiable, "FuncTorchDynamicLayerFrontMode")  # transforms of torch.func
    torch.library.register_fake(f"cuflash::{pass_name}", fake, lib=_library)


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


def _compute(
    pass_name: str, call: PassCall, seed: int | None, offset: int | None, *tensors: Tensor
) -> tuple[Tensor, ...]:
    if _is_plain(tensors):
        return run(pass_name, call, seed, offset, tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return tuple(getattr(torch.ops.cuflash, pass_name)(list(tensors), call.token, seed, offset))


# ---- derivatives -----------------------------------------------------------------------------------------------------


class _Pass(torch.autograd.Function):  # type: ignore[misc]  # PyTorch's types are left out
    """A pass as a differentiable function of a `PassCall`, seed and offset, and the tensors that the call names.

    Of tensors that have no gradient, and of those that are results of an earlier pass, gradients are None.
    """

    pass_name: str

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
    def of(cls, attn: FlashAttention, need: tuple[str, ...], random: Any, arrays: Mapping[str, Tensor]) -> Any:
        """The pass of tensors by name, with seed and offset of another one."""
        return cls.apply(call(attn, tuple(arrays), need), *random, *arrays.values())

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
        (call, *random), tensors, dims, size = args[:3], args[3:], in_dims[3:], info.batch_size
        if call.attn.options.dropout and info.randomness == "different":
            raise NotImplementedError(
                "dropout: got randomness='different' of torch.vmap, expected 'same' or 'error': all entries have one "
                "seed; as a batch axis of q, in place of vmap, they drop other weights"
            )
        named = list(zip(call.names, tensors, dims, strict=True))
        entry_shapes = {name: x.shape if d is None else x.select(d, 0).shape for name, x, d in named}
        wider_shapes = vmapped_shapes(call, entry_shapes, [name for name, _, d in named if d is not None])
        if wider_shapes is None:
            entries = [
                cls.apply(call, *random, *(x if d is None else x.select(d, entry) for _, x, d in named))
                for entry in range(size)
            ]
            results = tuple(torch.stack(of_entries) for of_entries in zip(*entries, strict=True))
        else:
            wider = cls.apply(call, *random, *(_widened(x, d, wider_shapes.get(name), size) for name, x, d in named))
            shapes = result_shapes(cls.pass_name, call, entry_shapes).values()
            results = tuple(x.reshape(size, *shape) for x, shape in zip(wider, shapes, strict=True))
        return results, (0,) * len(results)


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


def _inputs_to_differentiate(ctx: Any) -> tuple[str, ...]:
    """The names of inputs that have gradients and need them."""
    needs = dict(zip(ctx.call.names, ctx.needs_input_grad[3:], strict=True))
    check_movable(ctx.call, [name for name, needs_gradient in needs.items() if needs_gradient])
    return tuple(name for name in ctx.call.inputs if name in ctx.call.movable and needs[name])


def _reached(ctx: Any) -> list[str]:
    """The names of tensors whose gradients the running backward pass goes on to, of all that need one."""
    reached = []
    for name, needs, (node, _) in zip(ctx.call.names, ctx.needs_input_grad[3:], ctx.next_functions, strict=True):
        if needs and node is not None:
            try:
                is_reached = torch._C._will_engine_execute_node(node)
            except RuntimeError:  # a leaf that is asked for
                is_reached = True
            if is_reached:
                reached.append(name)
    return reached


def _in_order(ctx: Any, by_name: Mapping[str, Any]) -> tuple[Any, ...]:
    """For each argument of `apply` its gradient, None for those without one."""
    return (None, None, None, *(by_name.get(name) for name in ctx.call.names))


class Forward(_Pass):
    pass_name = "forward"
    forward = staticmethod(functools.partial(_compute, pass_name))

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        *inputs, out, lse = ctx.saved_tensors  # each look at these takes a microsecond for a tensor
        taken = dict(zip(ctx.call.names, inputs, strict=True))
        taken |= {"out": out, "lse": lse} | _row_gradients(out, dout, dlse)
        gradients = _by_input(_Backward, ctx.call.attn, _inputs_to_differentiate(ctx), ctx.random, taken)
        return _in_order(ctx, gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        moved = {f"t{name}": t for name, t in _moved(ctx, tangents).items()}
        _, _, tout, tlse = _Jvp.of(ctx.call.attn, (), ctx.random, _inputs(ctx) | moved)
        return tout, tlse


def _row_gradients(out: Tensor, dout: Tensor | None, dlse: Tensor | None) -> dict[str, Tensor]:
    """What passes take for the gradients with respect to out and lse, or tout and tlse, None where these are zero."""
    gradients = {"dout": torch.zeros_like(out) if dout is None else dout}
    return gradients if dlse is None else gradients | {"dlse": dlse}


def _by_input(
    pass_: type[_Pass], attn: FlashAttention, inputs: Sequence[str], random: Any, arrays: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """By the names of some inputs, their gradients, or the tangents of these by `_BackwardJvp`."""
    prefix = "td" if pass_ is _BackwardJvp else "d"
    results = pass_.of(attn, tuple(f"{prefix}{name}" for name in inputs), random, arrays) if inputs else ()
    return dict(zip(inputs, results, strict=True))


class _Backward(_Pass):
    pass_name = "backward"
    forward = staticmethod(functools.partial(_compute, pass_name))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """The gradients of ``sum(c * g)``: `cuflash.double_backward` says why these are they."""
        directions = {f"t{name[1:]}": c for name, c in zip(ctx.call.need, cotangents, strict=True) if c is not None}
        if not directions:
            return _in_order(ctx, {})
        _, _, tout, tlse = _Jvp.of(ctx.call.attn, (), ctx.random, _inputs(ctx) | directions)
        taken = _named(ctx) | {"tout": tout, "tlse": tlse} | directions
        gradients = _by_input(_BackwardJvp, ctx.call.attn, _inputs_to_differentiate(ctx), ctx.random, taken)
        return _in_order(ctx, gradients | {"dout": tout, "dlse": tlse})

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        arrays, random, attn = _named(ctx), ctx.random, ctx.call.attn
        moved = {f"t{name}": t for name, t in _moved(ctx, tangents).items()}
        moved_inputs = {name: t for name, t in moved.items() if name[1:] in ctx.call.inputs}
        if not moved_inputs:  # the pass is linear in dout and dlse
            fixed = {name: x for name, x in arrays.items() if name != "dlse"}
            moved_rows = _row_gradients(arrays["dout"], moved.get("tdout"), moved.get("tdlse"))
            return tuple(_Backward.of(attn, ctx.call.need, random, fixed | moved_rows))
        _, _, tout, tlse = _Jvp.of(attn, (), random, _inputs(ctx) | moved_inputs)
        taken = arrays | moved | {"tout": tout, "tlse": tlse}
        return tuple(_BackwardJvp.of(attn, tuple(f"t{name}" for name in ctx.call.need), random, taken))


class _Jvp(_Pass):
    pass_name = "jvp"
    forward = staticmethod(functools.partial(_compute, pass_name))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Pass.setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[:2])

    @staticmethod
    def backward(ctx: Any, _dout: None, _dlse: None, dtout: Tensor | None, dtlse: Tensor | None) -> Any:
        """As `cuflash.jvp_backward`."""
        *_, out, lse, tout, tlse = ctx.saved_tensors
        inputs, attn, random = _inputs(ctx), ctx.call.attn, ctx.random
        results = {"out": out, "lse": lse} | _row_gradients(tout, dtout, dtlse)
        directions = {name: x for name, x in _named(ctx).items() if name not in inputs}
        taken = inputs | directions | results | {"tout": tout, "tlse": tlse}
        of_inputs = _by_input(_BackwardJvp, attn, _inputs_to_differentiate(ctx), random, taken)
        needs = dict(zip(ctx.call.names, ctx.needs_input_grad[3:], strict=True))
        moved = [name[1:] for name in directions if needs[name]]
        of_directions = _by_input(_Backward, attn, moved, random, inputs | results)
        return _in_order(ctx, of_inputs | {f"t{name}": x for name, x in of_directions.items()})

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        moved = _moved(ctx, tangents)
        inputs = _inputs(ctx)
        if moved.keys() & inputs.keys():
            raise forward_twice_error()
        _, _, tout, tlse = _Jvp.of(ctx.call.attn, (), ctx.random, inputs | moved)
        return None, None, tout, tlse


class _BackwardJvp(_Pass):
    pass_name = "backward_jvp"
    forward = staticmethod(functools.partial(_compute, pass_name))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """The pass is a symmetric matrix, the Hessian, times the tangents, and linear in tdout and tdlse."""
        arrays, inputs, attn, random = _named(ctx), _inputs(ctx), ctx.call.attn, ctx.random
        input_tangents = [name for name in ctx.call.names if name[1:] in inputs]
        linear = {*input_tangents, "tdout", "tdlse"}
        earlier_results = {"out", "lse", "tout", "tlse"}
        if wrong := [name for name in _reached(ctx) if name not in linear | earlier_results]:
            raise third_order_error(f"a gradient of backward_jvp with respect to {wrong[0]}")
        directions = {f"t{name[2:]}": c for name, c in zip(ctx.call.need, cotangents, strict=True) if c is not None}
        if not directions:
            return _in_order(ctx, {})
        _, _, tout, tlse = _Jvp.of(attn, (), random, inputs | directions)
        fixed = {name: x for name, x in arrays.items() if name not in linear}
        taken = fixed | directions | {"tout": tout, "tlse": tlse}
        gradients = _by_input(_BackwardJvp, attn, [name[1:] for name in input_tangents], random, taken)
        return _in_order(ctx, {f"t{name}": x for name, x in gradients.items()} | {"tdout": tout, "tdlse": tlse})

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Where nothing moves but what the pass is linear in."""
        arrays, inputs, attn, random = _named(ctx), _inputs(ctx), ctx.call.attn, ctx.random
        moved = _moved(ctx, tangents)
        if moved.keys() & {*inputs, "dout", "dlse"}:
            raise third_order_error("a tangent of backward_jvp")
        directions = {name: t for name, t in moved.items() if name[1:] in inputs}
        _, _, tout, tlse = _Jvp.of(attn, (), random, inputs | directions)
        fixed = {name: arrays[name] for name in ("dout", "dlse", "out", "lse") if name in arrays}
        taken = inputs | fixed | moved | {"tout": tout, "tlse": tlse}
        return tuple(_BackwardJvp.of(attn, ctx.call.need, random, taken))


_FUNCTIONS: dict[str, type[_Pass]] = {f.pass_name: f for f in (Forward, _Backward, _Jvp, _BackwardJvp)}
for _pass_name in _SCHEMAS:
    _define(_pass_name)
