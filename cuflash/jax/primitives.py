"""The passes as primitives of JAX, their derivatives in terms of each other, and their batching."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cuflash.flash_attention import FlashAttention
from cuflash.frameworks import (
    PassCall,
    call,
    cupy_stream,
    forward_twice_error,
    result_shapes,
    third_order_error,
    vmapped_shapes,
)
from cuflash.spec.outputs import model_of

Array = Any
# The operand with seed and offset, of which dropout makes its numbers: 32 bits each, 64 of the seed. Its name is no
# identifier, so that no array of a caller has it.
RANDOM = "dropout.random"
# The tangent of `jvp` along a second direction. It is a primitive, too: no pass computes it, but one its transpose.
_FORWARD_TWICE = "forward_twice"


def _primitive(pass_name: str) -> Primitive:
    primitive = Primitive(f"cuflash_{pass_name}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(_eager, pass_name))
    primitive.def_abstract_eval(functools.partial(_abstract, pass_name))
    batching.primitive_batchers[primitive] = functools.partial(_batched, pass_name, primitive)
    for platform, rule in (("cpu", _on_cpu), ("cuda", _on_gpu)):
        function = functools.partial(rule, pass_name)
        mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True), platform=platform)
    return primitive


# ---- passes ----------------------------------------------------------------------------------------------------------


def _by_name(call: PassCall, operands: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(call.names, operands, strict=True))


def _keywords(pass_name: str, call: PassCall, arrays: Sequence[Array]) -> dict[str, Any]:
    """The keyword arguments of a pass. The primitive of `jvp` has out and lse, which only its transpose needs."""
    keywords = _by_name(call, arrays)
    if RANDOM in keywords:
        low, high, offset = (int(x) for x in np.asarray(keywords.pop(RANDOM)))
        keywords |= {"seed": low | high << 32, "offset": offset}
    if pass_name == "jvp":
        keywords = {name: x for name, x in keywords.items() if name not in ("out", "lse")}
    return keywords | ({"need": call.need} if call.need else {})


def _result_names(pass_name: str, call: PassCall) -> tuple[str, ...]:
    """The names of those results of a pass that its primitive gives."""
    return call.need or (("out", "lse") if pass_name == "forward" else ("tout", "tlse"))


def _compute(pass_name: str, call: PassCall, arrays: Sequence[Array]) -> list[Array]:
    results = getattr(call.attn, pass_name)(**_keywords(pass_name, call, arrays))
    return [getattr(results, name) for name in _result_names(pass_name, call)]


def _eager(pass_name: str, *operands: Array, call: PassCall) -> list[Array]:
    """The results for arrays with values."""
    if pass_name == _FORWARD_TWICE:
        raise forward_twice_error()
    # Constants of JAX are arrays of NumPy.
    arrays = [x if isinstance(x, jax.Array) else jax.numpy.asarray(np.asarray(x)) for x in operands]
    devices = arrays[0].devices()
    if len(devices) > 1:
        expected = "one on a single device: call it within jax.shard_map, where each device has its shard"
        raise NotImplementedError(f"{call.names[0]}: got an array over {len(devices)} devices, expected {expected}")
    results = _compute(pass_name, call, arrays)
    # Host memory may be that of several devices, of which DLPack says nothing.
    return [x if x.devices() == devices else jax.device_put(x, *devices) for x in results]


def _abstract(pass_name: str, *operands: Any, call: PassCall) -> list[Any]:
    """Shapes and dtypes of results; shapes that do not fit are refused here, where the function is traced."""
    arrays = _by_name(call, operands)
    if pass_name == "forward":
        empty = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in arrays.items() if name != RANDOM}
        call.attn.plan(**empty)
    shapes = result_shapes("jvp", call, {name: x.shape for name, x in arrays.items()})
    names = _result_names(pass_name, call)
    if call.need:
        dtypes = [arrays[model_of(name)].dtype for name in names]
    else:
        q_dtype = arrays["q"].dtype
        out_dtype = jax.numpy.bfloat16 if q_dtype.itemsize == 1 else q_dtype
        of_forward = {"out": out_dtype, "lse": np.float64 if out_dtype == np.float64 else np.float32}
        dtypes = [of_forward[name.removeprefix("t")] for name in names]
    return [_typed(operands[0], shapes[name], dtype) for name, dtype in zip(names, dtypes, strict=True)]


def _typed(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result, which varies over the axes of `jax.shard_map` over which an array varies."""
    like = like if isinstance(like, jax.core.ShapedArray) else jax.typeof(like)
    if not _varying(like):
        return jax.core.ShapedArray(shape, dtype)
    sharding = like.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _varying(x: Any) -> frozenset[str]:
    """The axes of `jax.shard_map` over which an array may differ, as far as JAX keeps record of them."""
    return x.manual_axis_type.varying  # type: ignore[no-any-return]


def _on_cpu(pass_name: str, *operands: Array, call: PassCall) -> list[Array]:
    """The results within `jax.jit`, which calls the host back."""
    if pass_name == _FORWARD_TWICE:
        raise forward_twice_error()

    def compute(*arrays: Array) -> list[Array]:
        return _compute(pass_name, call, [np.asarray(x) for x in arrays])

    return list(jax.pure_callback(compute, _result_types(pass_name, operands, call), *operands))


def _on_gpu(pass_name: str, *operands: Array, call: PassCall) -> list[Array]:
    """The same on a GPU: the host launches on the stream of the computation, into buffers that XLA allocates."""
    if pass_name == _FORWARD_TWICE:
        raise forward_twice_error()
    try:
        from jax.experimental.buffer_callback import buffer_callback
    except ImportError as error:
        raise NotImplementedError(
            f"attention: got a GPU within jax.jit and JAX {jax.__version__}, expected JAX 0.6 or later, which has "
            "jax.experimental.buffer_callback; or call it outside of jax.jit"
        ) from error

    def compute(context: Any, results: Sequence[Any], *buffers: Any) -> None:
        import cupy

        with cupy_stream(context.stream, cupy.cuda.Device().id):
            arrays = [cupy.from_dlpack(x) for x in buffers]
            if RANDOM in call.names:
                arrays[-1] = arrays[-1].get()
            views = map(cupy.from_dlpack, results)
            results_by_name = dict(zip(_result_names(pass_name, call), views, strict=True))
            getattr(call.attn, pass_name)(**_keywords(pass_name, call, arrays), **results_by_name)

    return list(buffer_callback(compute, _result_types(pass_name, operands, call))(*operands))


def _result_types(pass_name: str, operands: Sequence[Any], call: PassCall) -> list[Any]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _abstract(pass_name, *operands, call=call)]


def _batched(
    pass_name: str, primitive: Primitive, operands: Sequence[Array], dims: Sequence[Any], **parameters: Any
) -> Any:
    """The batching rule: one pass with one more batch axis, or one for each entry (`vmapped_shapes`)."""
    call: PassCall = parameters["call"]
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    entry_shapes = {
        name: x.shape if d is None else (*x.shape[:d], *x.shape[d + 1 :])
        for name, x, d in zip(call.names, operands, dims, strict=True)
    }
    batched_names = [name for name, d in zip(call.names, dims, strict=True) if d is not None]
    wider_shapes = vmapped_shapes(call, entry_shapes, batched_names)
    if wider_shapes is None:
        results = _for_each_entry(primitive, operands, dims, **parameters)
    else:
        named = zip(call.names, operands, dims, strict=True)
        wider = primitive.bind(*(_widened(x, d, wider_shapes.get(name), size) for name, x, d in named), **parameters)
        result_names, shapes = _result_names(pass_name, call), result_shapes("jvp", call, entry_shapes)
        results = [x.reshape(size, *shapes[name]) for name, x in zip(result_names, wider, strict=True)]
    return results, [0] * len(results)


def _for_each_entry(
    primitive: Primitive, operands: Sequence[Array], dims: Sequence[Any], **parameters: Any
) -> list[Array]:
    batched = [jax.numpy.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None]

    def compute_entry(entry: list[Array]) -> list[Array]:
        of_entry = iter(entry)
        return list(
            primitive.bind(
                *(x if d is None else next(of_entry) for x, d in zip(operands, dims, strict=True)), **parameters
            )
        )

    return list(jax.lax.map(compute_entry, batched))


def _widened(x: Array, dim: int | None, shape: tuple[int, ...] | None, size: int) -> Array:
    """An array with an axis of vmap in front of such a shape of an entry; as it is, where there is no shape."""
    if shape is None:
        return x
    x = x[None] if dim is None else jax.numpy.moveaxis(x, dim, 0)
    return jax.numpy.broadcast_to(x.reshape(x.shape[0], *shape), (size, *shape))


# ---- derivatives -----------------------------------------------------------------------------------------------------

FORWARD, _backward, _jvp, _backward_jvp, _forward_twice = map(
    _primitive, ("forward", "backward", "jvp", "backward_jvp", _FORWARD_TWICE)
)


def bind(primitive: Primitive, attn: FlashAttention, arrays: Mapping[str, Array], need: Sequence[str] = ()) -> Any:
    """The results of the primitive of a pass, in order, for arrays by name."""
    names = sorted(arrays, key=lambda name: name == RANDOM)  # last, so that it is not in the way of results' shapes
    return primitive.bind(*_varying_alike([arrays[x] for x in names]), call=call(attn, tuple(names), tuple(need)))


def _varying_alike(arrays: Sequence[Array]) -> Sequence[Array]:
    """Arrays that all vary over the same axes of `jax.shard_map`, so that gradients are summed over those added."""
    axes_of_each = [_varying(jax.typeof(x)) for x in arrays]
    all_axes = frozenset[str]().union(*axes_of_each)
    if not all_axes:
        return arrays
    missing = [tuple(sorted(all_axes - axes)) for axes in axes_of_each]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]


def _moved(call: PassCall, tangents: Sequence[Any]) -> dict[str, Array]:
    """The tangents that are not zero, by the names of what they are tangents of (`PassCall.moved`)."""
    named = _by_name(call, tangents).items()
    return call.moved({name: t for name, t in named if type(t) is not ad.Zero and t.dtype != jax.dtypes.float0})


def _prefixed(by_name: Mapping[str, Array]) -> dict[str, Array]:
    return {f"t{name}": x for name, x in by_name.items()}


def _inputs(call: PassCall, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """What the forward pass takes."""
    return {name: arrays[name] for name in (*call.inputs, RANDOM) if name in arrays}


def _inputs_and_results(call: PassCall, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """What the forward pass takes and gives: what every other pass takes."""
    return _inputs(call, arrays) | {"out": arrays["out"], "lse": arrays["lse"]}


def _zero(x: Array) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _split(call: PassCall, operands: Sequence[Any]) -> tuple[dict[str, Array], list[str]]:
    """The arrays by name, and the names of the operands with respect to which a primitive is transposed."""
    linear = [name for name, x in _by_name(call, operands).items() if ad.is_undefined_primal(x)]
    return {name: x for name, x in _by_name(call, operands).items() if name not in linear}, linear


def _nonzero(cotangents: Sequence[Any], result_names: Sequence[str]) -> dict[str, Array]:
    return {name: c for name, c in zip(result_names, cotangents, strict=True) if type(c) is not ad.Zero}


def _row_cotangents(arrays: Mapping[str, Array], cotangents: Mapping[str, Array]) -> dict[str, Array]:
    """dout and dlse, from the cotangents of out and lse, or of tout and tlse."""
    by_name = {name.removeprefix("t"): c for name, c in cotangents.items()}
    dout = by_name.get("out")
    dout = jax.numpy.zeros_like(arrays["out"]) if dout is None else dout
    return {"dout": dout} | ({"dlse": by_name["lse"]} if "lse" in by_name else {})


def _in_order(call: PassCall, by_name: Mapping[str, Any]) -> list[Any]:
    """For each operand its cotangent, None for those without one."""
    return [by_name.get(name) for name in call.names]


# forward


def _jvp_of_forward(primals: Any, tangents: Any, *, call: PassCall) -> Any:
    arrays, moved = _by_name(call, primals), _moved(call, tangents)
    out, lse = bind(FORWARD, call.attn, arrays)
    if not moved:
        return (out, lse), [_zero(x) for x in (out, lse)]
    return (out, lse), bind(_jvp, call.attn, arrays | {"out": out, "lse": lse} | _prefixed(moved))


# jvp: (tout, tlse), linear in the tangents of the inputs


def _jvp_of_jvp(primals: Any, tangents: Any, *, call: PassCall) -> Any:
    arrays, moved = _by_name(call, primals), _moved(call, tangents)
    tout, tlse = bind(_jvp, call.attn, arrays)
    fixed = _inputs_and_results(call, arrays)
    moved_inputs = {name: t for name, t in moved.items() if name in call.inputs}
    moved_tangents = {name: t for name, t in moved.items() if name not in fixed and name[1:] in call.inputs}
    result_tangents: list[Any] = [_zero(x) for x in (tout, tlse)]
    if moved_tangents:
        result_tangents = bind(_jvp, call.attn, fixed | moved_tangents)
    if moved_inputs:
        directions = {f"u{name}": u for name, u in moved_inputs.items()}
        second = bind(_forward_twice, call.attn, arrays | {"tout": tout, "tlse": tlse} | directions)
        result_tangents = [ad.add_tangents(x, y) for x, y in zip(result_tangents, second, strict=True)]
    return (tout, tlse), result_tangents


def _transpose_of_jvp(cotangents: Any, *operands: Any, call: PassCall) -> Any:
    arrays, linear = _split(call, operands)
    if not (nonzero := _nonzero(cotangents, ("tout", "tlse"))):
        return _in_order(call, {})
    taken = _inputs_and_results(call, arrays) | _row_cotangents(arrays, nonzero)
    gradients = bind(_backward, call.attn, taken, [f"d{name[1:]}" for name in linear])
    return _in_order(call, dict(zip(linear, gradients, strict=True)))


# forward_twice: the part of the tangents of (tout, tlse) that is linear in `u...`, tangents of the inputs. No pass
# computes it, but its transpose is a pass.


def _jvp_of_forward_twice(primals: Any, tangents: Any, *, call: PassCall) -> Any:
    raise third_order_error("a derivative of forward mode over forward mode")


def _transpose_of_forward_twice(cotangents: Any, *operands: Any, call: PassCall) -> Any:
    """The gradient of a Jacobian-vector product with respect to the inputs, as `cuflash.jvp_backward` has it."""
    arrays, linear = _split(call, operands)
    if not (nonzero := _nonzero(cotangents, ("tout", "tlse"))):
        return _in_order(call, {})
    taken = arrays | _row_cotangents(arrays, nonzero)
    gradients = bind(_backward_jvp, call.attn, taken, [f"td{name[1:]}" for name in linear])
    return _in_order(call, dict(zip(linear, gradients, strict=True)))


# backward: the gradients that are needed, linear in dout and dlse


def _jvp_of_backward(primals: Any, tangents: Any, *, call: PassCall) -> Any:
    arrays, moved, attn = _by_name(call, primals), _moved(call, tangents), call.attn
    gradients = bind(_backward, attn, arrays, call.need)
    moved_inputs = _prefixed({name: t for name, t in moved.items() if name in call.inputs})
    moved_rows = {name: t for name, t in moved.items() if name in ("dout", "dlse")}
    if moved_inputs:
        if {"out", "lse"} <= moved.keys():
            tout, tlse = moved["out"], moved["lse"]
        else:
            tout, tlse = bind(_jvp, attn, _inputs_and_results(call, arrays) | moved_inputs)
        taken = arrays | {"tout": tout, "tlse": tlse} | moved_inputs | _prefixed(moved_rows)
        return gradients, bind(_backward_jvp, attn, taken, [f"t{name}" for name in call.need])
    if moved_rows:
        fixed = {name: x for name, x in arrays.items() if name != "dlse"}
        zero = {"dout": jax.numpy.zeros_like(arrays["dout"])}
        return gradients, bind(_backward, attn, fixed | zero | moved_rows, call.need)
    return gradients, [_zero(x) for x in gradients]


def _transpose_of_backward(cotangents: Any, *operands: Any, call: PassCall) -> Any:
    """The pass is linear in dout and dlse, whose gradients are the tangents of out and lse."""
    arrays, linear = _split(call, operands)
    if not (nonzero := _nonzero(cotangents, call.need)):
        return _in_order(call, {})
    directions = {f"t{name[1:]}": c for name, c in nonzero.items()}
    tout, tlse = bind(_jvp, call.attn, _inputs_and_results(call, arrays) | directions)
    return _in_order(call, {name: x for name, x in (("dout", tout), ("dlse", tlse)) if name in linear})


# backward_jvp: the tangents of gradients, linear in the tangents of the inputs, tdout and tdlse


def _jvp_of_backward_jvp(primals: Any, tangents: Any, *, call: PassCall) -> Any:
    arrays, moved = _by_name(call, primals), _moved(call, tangents)
    inputs = _inputs(call, arrays)
    if wrong := [name for name in moved if name in inputs or name in ("dout", "dlse")]:
        raise third_order_error(f"a derivative of backward_jvp with respect to {wrong[0]}")
    results = bind(_backward_jvp, call.attn, arrays, call.need)
    linear = {name for name in call.names if name.startswith("t") and name not in inputs}
    moved_linear = {name: t for name, t in moved.items() if name in linear}
    if not moved_linear:
        return results, [_zero(x) for x in results]
    fixed = {name: x for name, x in arrays.items() if name not in linear}
    zeros = {name: jax.numpy.zeros_like(arrays[name]) for name in ("tout", "tlse")}
    return results, bind(_backward_jvp, call.attn, fixed | zeros | moved_linear, call.need)


def _transpose_of_backward_jvp(cotangents: Any, *operands: Any, call: PassCall) -> Any:
    """The Hessian is symmetric. What goes through tout and tlse is in the gradients of the other tangents."""
    arrays, linear = _split(call, operands)
    if not (nonzero := _nonzero(cotangents, call.need)):
        return _in_order(call, {})
    fixed = _inputs_and_results(call, arrays)
    directions = {f"t{name[2:]}": c for name, c in nonzero.items()}
    tout, tlse = bind(_jvp, call.attn, fixed | directions)
    gradients = {name: x for name, x in (("tdout", tout), ("tdlse", tlse)) if name in linear}
    if input_tangents := [name for name in linear if name[1:] in call.inputs]:
        rows = {name: arrays[name] for name in ("dout", "dlse") if name in arrays}
        taken = fixed | rows | {"tout": tout, "tlse": tlse} | directions
        product = bind(_backward_jvp, call.attn, taken, [f"td{name[1:]}" for name in input_tangents])
        gradients |= dict(zip(input_tangents, product, strict=True))
    return _in_order(call, gradients)


ad.primitive_jvps.update(
    {
        FORWARD: _jvp_of_forward,
        _backward: _jvp_of_backward,
        _jvp: _jvp_of_jvp,
        _backward_jvp: _jvp_of_backward_jvp,
        _forward_twice: _jvp_of_forward_twice,
    }
)
ad.primitive_transposes.update(
    {
        _backward: _transpose_of_backward,
        _jvp: _transpose_of_jvp,
        _backward_jvp: _transpose_of_backward_jvp,
        _forward_twice: _transpose_of_forward_twice,
    }
)
