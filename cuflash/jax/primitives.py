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


def _primitive(which: str) -> Primitive:
    primitive = Primitive(f"cuflash_{which}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(_computed, which))
    primitive.def_abstract_eval(functools.partial(_abstract, which))
    batching.primitive_batchers[primitive] = functools.partial(_batched, which, primitive)
    for platform, rule in (("cpu", _on_cpu), ("cuda", _on_gpu)):
        function = functools.partial(rule, which)
        mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True), platform=platform)
    return primitive


# ---- passes ----------------------------------------------------------------------------------------------------------


def _keywords(which: str, call: PassCall, arrays: Sequence[Array]) -> dict[str, Array]:
    """The keyword arguments of a pass: `jvp` and what is linear take out and lse for their transposes alone."""
    given = dict(zip(call.names, arrays, strict=True))
    if RANDOM in given:
        low, high, offset = (int(x) for x in np.asarray(given.pop(RANDOM)))
        given |= {"seed": low | high << 32, "offset": offset}
    if which == "jvp":
        given = {name: x for name, x in given.items() if name not in ("out", "lse")}
    return given | ({"need": call.need} if call.need else {})


def _names(which: str, call: PassCall) -> tuple[str, ...]:
    """The names of what a primitive gives of the results of a pass."""
    return call.need or (("out", "lse") if which == "forward" else ("tout", "tlse"))


def _computed(which: str, *arrays: Array, call: PassCall) -> list[Array]:
    """The results for arrays with values."""
    if which == "second":
        raise forward_twice_error()
    own = [x if isinstance(x, jax.Array) else jax.numpy.asarray(np.asarray(x)) for x in arrays]  # JAX's constants
    devices = own[0].devices()
    if len(devices) > 1:
        expected = "one on a single device: call it within jax.shard_map, where each device has its shard"
        raise NotImplementedError(f"{call.names[0]}: got an array over {len(devices)} devices, expected {expected}")
    found = getattr(call.attn, which)(**_keywords(which, call, own))
    results = [getattr(found, name) for name in _names(which, call)]
    # Host memory may be that of several devices, of which DLPack says nothing.
    return [x if x.devices() == devices else jax.device_put(x, *devices) for x in results]


def _abstract(which: str, *arrays: Any, call: PassCall) -> list[Any]:
    """Shapes and dtypes of results; shapes that do not fit are refused here, where the function is traced."""
    given = dict(zip(call.names, arrays, strict=True))
    if which == "forward":
        empty = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in given.items() if name != RANDOM}
        call.attn.plan(**empty)
    shapes = result_shapes("jvp", call, {name: x.shape for name, x in given.items()})
    dtype = jax.numpy.bfloat16 if given["q"].dtype.itemsize == 1 else given["q"].dtype
    of_forward = {"out": dtype, "lse": np.float64 if dtype == np.float64 else np.float32}
    dtypes = [given[model_of(x)].dtype if call.need else of_forward[x.removeprefix("t")] for x in _names(which, call)]
    return [_typed(arrays[0], shapes[x], d) for x, d in zip(_names(which, call), dtypes, strict=True)]


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


def _on_cpu(which: str, *arrays: Array, call: PassCall) -> list[Array]:
    if which == "second":
        raise forward_twice_error()

    names = _names(which, call)

    def compute(*arrays: Array) -> list[Array]:
        given = [np.asarray(x) for x in arrays]
        found = getattr(call.attn, which)(**_keywords(which, call, given))
        return [getattr(found, name) for name in names]

    result_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _abstract(which, *arrays, call=call)]
    return list(jax.pure_callback(compute, result_types, *arrays))


def _on_gpu(which: str, *arrays: Array, call: PassCall) -> list[Array]:
    if which == "second":
        raise forward_twice_error()
    try:
        from jax.experimental.buffer_callback import buffer_callback
    except ImportError as error:
        raise NotImplementedError(
            f"attention: got a GPU within jax.jit and JAX {jax.__version__}, expected JAX 0.6 or later, which has "
            "jax.experimental.buffer_callback; or call it outside of jax.jit"
        ) from error
    result_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _abstract(which, *arrays, call=call)]
    names = _names(which, call)

    def compute(context: Any, results: Sequence[Any], *buffers: Any) -> None:
        import cupy

        with cupy_stream(context.stream, cupy.cuda.Device().id):
            given = [cupy.from_dlpack(x) for x in buffers]
            if RANDOM in call.names:
                given[-1] = given[-1].get()
            own = dict(zip(names, (cupy.from_dlpack(x) for x in results), strict=True))
            getattr(call.attn, which)(**_keywords(which, call, given), **own)

    return list(buffer_callback(compute, result_types)(*arrays))


def _batched(which: str, primitive: Primitive, arrays: Sequence[Array], dims: Sequence[Any], **parameters: Any) -> Any:
    """The batching rule: one pass with one more batch axis, or one for each entry (`vmapped_shapes`)."""
    call: PassCall = parameters["call"]
    is_batched = [d is not None for d in dims]
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    shapes = {
        name: x.shape if d is None else (*x.shape[:d], *x.shape[d + 1 :])
        for name, x, d in zip(call.names, arrays, dims, strict=True)
    }
    mapped = [name for name, b in zip(call.names, is_batched, strict=True) if b]
    if (wider := vmapped_shapes(call, shapes, mapped)) is not None:
        given = zip(call.names, arrays, dims, strict=True)
        results = primitive.bind(*(_widened(x, d, wider.get(name), size) for name, x, d in given), **parameters)
        right, names = result_shapes("jvp", call, shapes), _names(which, call)
        return [x.reshape(size, *right[name]) for name, x in zip(names, results, strict=True)], [0] * len(names)
    moved = [jax.numpy.moveaxis(x, d, 0) for x, d, b in zip(arrays, dims, is_batched, strict=True) if b]

    def one(entry: list[Array]) -> list[Array]:
        entries = iter(entry)
        own = [next(entries) if b else x for x, b in zip(arrays, is_batched, strict=True)]
        return list(primitive.bind(*own, **parameters))

    found = jax.lax.map(one, moved)
    return found, [0] * len(found)


def _widened(x: Array, dim: int | None, shape: tuple[int, ...] | None, size: int) -> Array:
    """An array with an axis of vmap in front of such a shape of an entry; as it is, where there is no shape."""
    if shape is None:
        return x
    x = x[None] if dim is None else jax.numpy.moveaxis(x, dim, 0)
    return jax.numpy.broadcast_to(x.reshape(x.shape[0], *shape), (size, *shape))


# ---- derivatives -----------------------------------------------------------------------------------------------------

FORWARD, _backward, _jvp, _backward_jvp, _second = map(
    _primitive, ("forward", "backward", "jvp", "backward_jvp", "second")
)


def bind(primitive: Primitive, attn: FlashAttention, given: Mapping[str, Array], need: Sequence[str] = ()) -> Any:
    own = tuple(name for name in given if name != RANDOM)  # last, so that it is not in the way of results' shapes
    names = (*own, *((RANDOM,) if RANDOM in given else ()))
    arrays = _varying_alike([given[name] for name in names])
    return primitive.bind(*arrays, call=call(attn, names, tuple(need)))


def _varying_alike(arrays: Sequence[Array]) -> Sequence[Array]:
    """Arrays that all vary over the same axes of `jax.shard_map`, so that gradients are summed over those added."""
    own = [_varying(jax.typeof(x)) for x in arrays]
    every = frozenset[str]().union(*own)
    if not every:
        return arrays
    missing = [tuple(sorted(every - axes)) for axes in own]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]


def _moved(call: PassCall, tangents: Sequence[Any]) -> dict[str, Array]:
    """The tangents that are not zero, by the names of what they are tangents of (`PassCall.moved`)."""
    named = zip(call.names, tangents, strict=True)
    return call.moved({name: t for name, t in named if type(t) is not ad.Zero and t.dtype != jax.dtypes.float0})


def _prefixed(by_name: Mapping[str, Array]) -> dict[str, Array]:
    return {f"t{name}": x for name, x in by_name.items()}


def _inputs(call: PassCall, given: Mapping[str, Array]) -> dict[str, Array]:
    """What the forward pass takes."""
    return {name: given[name] for name in (*call.inputs, RANDOM) if name in given}


def _zero(x: Array) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _forward_jvp(primals: Any, tangents: Any, *, call: PassCall) -> Any:
    given, moved = dict(zip(call.names, primals, strict=True)), _moved(call, tangents)
    out, lse = bind(FORWARD, call.attn, given)
    if not moved:
        return (out, lse), [_zero(x) for x in (out, lse)]
    return (out, lse), bind(_jvp, call.attn, given | {"out": out, "lse": lse} | _prefixed(moved))


def _split(call: PassCall, arrays: Sequence[Any]) -> tuple[dict[str, Array], list[str]]:
    """The arrays by name, and the names of those with respect to which a primitive is transposed."""
    given = dict(zip(call.names, arrays, strict=True))
    linear = [name for name, x in given.items() if ad.is_undefined_primal(x)]
    return {name: x for name, x in given.items() if name not in linear}, linear


def _cotangents(found: Sequence[Any], names: Sequence[str]) -> dict[str, Array]:
    return {name: c for name, c in zip(names, found, strict=True) if type(c) is not ad.Zero}


def _of_rows(given: Mapping[str, Array], cotangents: Mapping[str, Array]) -> dict[str, Array]:
    """dout and dlse, from the cotangents of out and lse, or of tout and tlse."""
    by_name = {name.removeprefix("t"): c for name, c in cotangents.items()}
    dout = by_name.get("out")
    own = {"dout": jax.numpy.zeros_like(given["out"]) if dout is None else dout}
    return own | ({"dlse": by_name["lse"]} if "lse" in by_name else {})


def _in_order(call: PassCall, by_name: Mapping[str, Any]) -> list[Any]:
    return [by_name.get(name) for name in call.names]


def _jvp_transpose(cotangents: Any, *arrays: Any, call: PassCall) -> Any:
    given, linear = _split(call, arrays)
    if not (own := _cotangents(cotangents, ("tout", "tlse"))):
        return _in_order(call, {})
    rows = _inputs(call, given) | {"out": given["out"], "lse": given["lse"]} | _of_rows(given, own)
    found = bind(_backward, call.attn, rows, [f"d{name[1:]}" for name in linear])
    return _in_order(call, dict(zip(linear, found, strict=True)))


def _jvp_jvp(primals: Any, tangents: Any, *, call: PassCall) -> Any:
    given, moved = dict(zip(call.names, primals, strict=True)), _moved(call, tangents)
    tout, tlse = bind(_jvp, call.attn, given)
    inputs = _inputs(call, given)
    fixed = inputs | {"out": given["out"], "lse": given["lse"]}
    of_tangents = {name: t for name, t in moved.items() if name[1:] in inputs and name not in fixed}
    of_inputs = {name: t for name, t in moved.items() if name in inputs}
    found: list[Any] = [_zero(x) for x in (tout, tlse)]
    if of_tangents:
        found = bind(_jvp, call.attn, fixed | of_tangents)
    if of_inputs:
        directions = {f"u{name}": u for name, u in of_inputs.items()}
        second = bind(_second, call.attn, given | {"tout": tout, "tlse": tlse} | directions)
        found = [ad.add_tangents(x, y) for x, y in zip(found, second, strict=True)]
    return (tout, tlse), found


def _second_transpose(cotangents: Any, *arrays: Any, call: PassCall) -> Any:
    """The gradient of a Jacobian-vector product with respect to the inputs, as `cuflash.jvp_backward` has it."""
    given, linear = _split(call, arrays)
    if not (own := _cotangents(cotangents, ("tout", "tlse"))):
        return _in_order(call, {})
    found = bind(_backward_jvp, call.attn, given | _of_rows(given, own), [f"td{name[1:]}" for name in linear])
    return _in_order(call, dict(zip(linear, found, strict=True)))


def _backward_of_jvp(primals: Any, tangents: Any, *, call: PassCall) -> Any:
    given, moved, attn = dict(zip(call.names, primals, strict=True)), _moved(call, tangents), call.attn
    gradients = bind(_backward, attn, given, call.need)
    inputs = _inputs(call, given)
    of_inputs = _prefixed({name: t for name, t in moved.items() if name in inputs})
    of_rows = {name: t for name, t in moved.items() if name in ("dout", "dlse")}
    if of_inputs:
        if {"out", "lse"} <= moved.keys():
            tout, tlse = moved["out"], moved["lse"]
        else:
            tout, tlse = bind(_jvp, attn, inputs | {"out": given["out"], "lse": given["lse"]} | of_inputs)
        own = given | {"tout": tout, "tlse": tlse} | of_inputs | _prefixed(of_rows)
        found = bind(_backward_jvp, attn, own, [f"t{name}" for name in call.need])
    elif of_rows:
        fixed = {name: x for name, x in given.items() if name != "dlse"}
        zero = {"dout": jax.numpy.zeros_like(given["dout"])}
        found = bind(_backward, attn, fixed | zero | of_rows, call.need)
    else:
        found = [_zero(x) for x in gradients]
    return gradients, found


def _backward_transpose(cotangents: Any, *arrays: Any, call: PassCall) -> Any:
    """The pass is linear in dout and dlse, whose gradients are the tangents of out and lse."""
    given, _ = _split(call, arrays)
    if not (own := _cotangents(cotangents, call.need)):
        return _in_order(call, {})
    fixed = _inputs(call, given) | {"out": given["out"], "lse": given["lse"]}
    tout, tlse = bind(_jvp, call.attn, fixed | {f"t{name[1:]}": c for name, c in own.items()})
    linear = [name for name in ("dout", "dlse") if name in call.names and name not in given]
    return _in_order(call, {name: x for name, x in (("dout", tout), ("dlse", tlse)) if name in linear})


def _backward_jvp_transpose(cotangents: Any, *arrays: Any, call: PassCall) -> Any:
    """The Hessian is symmetric. What goes through tout and tlse is in the gradients of the other tangents."""
    given, linear = _split(call, arrays)
    if not (own := _cotangents(cotangents, call.need)):
        return _in_order(call, {})
    fixed = _inputs(call, given) | {"out": given["out"], "lse": given["lse"]}
    directions = {f"t{name[2:]}": c for name, c in own.items()}
    tout, tlse = bind(_jvp, call.attn, fixed | directions)
    found = {name: x for name, x in (("tdout", tout), ("tdlse", tlse)) if name in linear}
    if tangents := [name for name in linear if name[1:] in call.inputs]:
        rows = {name: given[name] for name in ("dout", "dlse") if name in given}
        results = {"tout": tout, "tlse": tlse}
        product = bind(_backward_jvp, call.attn, fixed | rows | results | directions, [f"td{x[1:]}" for x in tangents])
        found |= dict(zip(tangents, product, strict=True))
    return _in_order(call, found)


def _backward_jvp_jvp(primals: Any, tangents: Any, *, call: PassCall) -> Any:
    given, moved = dict(zip(call.names, primals, strict=True)), _moved(call, tangents)
    inputs = _inputs(call, given)
    if wrong := [name for name in moved if name in inputs or name in ("dout", "dlse")]:
        raise third_order_error(f"a derivative of backward_jvp with respect to {wrong[0]}")
    results = bind(_backward_jvp, call.attn, given, call.need)
    linear = {name for name in call.names if name.startswith("t") and name not in inputs}
    own = {name: t for name, t in moved.items() if name in linear}
    if not own:
        return results, [_zero(x) for x in results]
    fixed = {name: x for name, x in given.items() if name not in linear}
    zeros = {name: jax.numpy.zeros_like(given[name]) for name in ("tout", "tlse")}
    return results, bind(_backward_jvp, call.attn, fixed | zeros | own, call.need)


def _second_jvp(primals: Any, tangents: Any, *, call: PassCall) -> Any:
    raise third_order_error("a derivative of forward mode over forward mode")


ad.primitive_jvps.update(
    {
        FORWARD: _forward_jvp,
        _backward: _backward_of_jvp,
        _jvp: _jvp_jvp,
        _backward_jvp: _backward_jvp_jvp,
        _second: _second_jvp,
    }
)
ad.primitive_transposes.update(
    {
        _backward: _backward_transpose,
        _jvp: _jvp_transpose,
        _backward_jvp: _backward_jvp_transpose,
        _second: _second_transpose,
    }
)
