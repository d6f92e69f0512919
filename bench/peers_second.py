"""Contenders of second order: jvp, backward_jvp and the double backward pass, by the dense formula and by others.

`calls["jvp"]` returns (tout,), `calls["backward_jvp"]` (tdq, tdk, tdv), and `calls["double_backward"]` all four: the
gradients of tdq dq + tdk dk + tdv dv, summed, with respect to dout, q, k and v. Each of these peers has what it can of
them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cuflash.arrays.array_info import numpy_dtype
from cuflash.spec.problem import Problem
from cuflash.testing import reference

from .cases import Case
from .contender import Absent, Calls, Contender, refuse
from .inputs import Inputs, keywords_of, problem_of
from .peers_torch import on_torch

MATRICES = 12  # of the size of the scores, that a graph or the dense formula holds at a time
HEADS_AT_ONCE = 8
HEAD_DIMS = (16, 32, 64, 128, 256)  # of jvp_flash_attention


def _check_memory(case: Case, free: int, needed: int) -> None:
    if needed > free:
        raise Absent(f"would need about {needed / 1e9:.0f} GB")


def cuflash_tangents(case: Case, inputs: Inputs) -> Contender:
    """cuflash, which keeps nothing between its calls: they allocate all that they give."""
    from cuflash import FlashAttention, double_backward

    refuse(case)
    if not inputs.tangents:
        raise Absent("needs tangents")
    attn, operands = FlashAttention(**keywords_of(case)), (inputs.q, inputs.k, inputs.v)
    cotangents = {f"d{name[1:]}": x for name, x in inputs.tangents.items()}

    def both() -> tuple[Any, ...]:
        found = double_backward(attn, cotangents, inputs.dout, *operands)
        return (found.ddout, *found.gradients)

    return Contender({"jvp": lambda: (attn.jvp(*operands, **inputs.tangents).tout,), "double_backward": both})


def naive(case: Case, inputs: Inputs) -> Contender:
    """The dense formula on whole matrices of scores, of some heads at a time, 16-bit operands in float32.

    backward_jvp gets P and its tangent from an earlier call, as the backward pass of the formula does.
    """
    refuse(case)
    xp = inputs.xp
    if not inputs.tangents:
        raise Absent("needs tangents")
    if case.group_size > 1:
        raise Absent("has no grouped heads")
    if xp.__name__ == "cupy":
        of_head = case.scores_bytes // max(case.batch * case.num_heads, 1)
        needed = 2 * case.scores_bytes + (MATRICES - 2) * HEADS_AT_ONCE * of_head
        _check_memory(case, xp.cuda.runtime.memGetInfo()[0], needed)
    dtype, compute = numpy_dtype(case.dtype), numpy_dtype(case.softmax_dtype)
    problem = problem_of(case, inputs.q, inputs.k, inputs.v, {})
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout, **inputs.tangents}
    heads = case.batch * case.num_heads

    def entries() -> Iterator[dict[str, Any]]:
        for first in range(0, heads, HEADS_AT_ONCE):
            yield {
                name: x.reshape(heads, *x.shape[2:])[first : first + HEADS_AT_ONCE].astype(compute, copy=False)
                for name, x in named.items()
            }

    def joined(rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        whole = (xp.concatenate(column) for column in zip(*rows, strict=True))
        return tuple(x.astype(dtype).reshape(case.batch, case.num_heads, *x.shape[1:]) for x in whole)

    saved: list[tuple[Any, Any]] = []  # by the first call of backward_jvp

    def backward_jvp() -> tuple[Any, ...]:
        if not saved:
            saved.extend(_weights(problem, own) for own in entries())
        return joined([_gradients(problem.scale, own, *both) for own, both in zip(entries(), saved, strict=True)])

    def jvp() -> tuple[Any, ...]:
        return joined([(_tangent(own, *_weights(problem, own)),) for own in entries()])

    def double_backward() -> tuple[Any, ...]:
        saved.clear()
        rows = []
        for own in entries():
            both = _weights(problem, own)
            rows.append((_tangent(own, *both), *_gradients(problem.scale, own, *both)))
        return joined(rows)

    return Contender({"jvp": jvp, "backward_jvp": backward_jvp, "double_backward": double_backward})


def _transposed(x: Any) -> Any:
    return x.swapaxes(-1, -2)


def _weights(problem: Problem, own: Mapping[str, Any]) -> tuple[Any, Any]:
    """P, and its tangent: P times the tangent of the scores less its mean."""
    scores = own["q"] @ _transposed(own["k"])
    scores *= problem.scale
    p = reference.softmax(reference.scores(problem, scores)[0])[0]
    tp = own["tq"] @ _transposed(own["k"])
    tp += own["q"] @ _transposed(own["tk"])
    tp *= problem.scale
    tp -= (p * tp).sum(axis=-1, keepdims=True)  # hidden pairs have P = 0
    tp *= p
    return p, tp


def _tangent(own: Mapping[str, Any], p: Any, tp: Any) -> Any:
    """The tangent of out."""
    found = tp @ own["v"]
    found += p @ own["tv"]
    return found


def _gradients(scale: float, own: Mapping[str, Any], p: Any, tp: Any) -> tuple[Any, Any, Any]:
    """The tangents of dq, dk and dv."""
    dout = own["dout"]
    ds = dout @ _transposed(own["v"])
    ds -= (dout * (p @ own["v"])).sum(axis=-1, keepdims=True)
    tds = dout @ _transposed(own["tv"])
    tds -= (dout * _tangent(own, p, tp)).sum(axis=-1, keepdims=True)
    tds *= p
    tds += tp * ds
    ds *= p
    tdq = scale * (tds @ own["k"] + ds @ own["tk"])
    tdk = scale * (_transposed(tds) @ own["q"] + _transposed(ds) @ own["tq"])
    return tdq, tdk, _transposed(tp) @ dout


def math_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, tangents: dict[str, Any]) -> Calls:
    """PyTorch's unfused attention, the only one that it differentiates twice: torch.func.jvp, and create_graph=True.

    The graph of the gradients is built once and kept, so that its time does not count.
    """
    attention = importlib.import_module("torch.nn.attention")
    if q.device.type == "cuda":
        needed = MATRICES * case.scores_bytes * q.element_size() // 4
        _check_memory(case, torch.cuda.mem_get_info()[0], needed)
    directions = tuple(tangents[name] for name in ("tq", "tk", "tv"))

    def run(q: Any, k: Any, v: Any) -> Any:
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=case.group_size > 1
            )

    leaves = [x.detach().requires_grad_() for x in (dout, q, k, v)]
    saved: list[Any] = []

    def double_backward() -> Any:
        if not saved:
            if "cupy" in sys.modules:  # whose pool may hold the memory that the graph needs
                sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
            saved.extend(torch.autograd.grad(run(*leaves[1:]), leaves[1:], leaves[0], create_graph=True))
        return torch.autograd.grad(saved, leaves, directions, retain_graph=True)

    return {
        "jvp": lambda: (torch.func.jvp(run, (q, k, v), directions)[1],),
        "double_backward": double_backward,
    }


def jvp_flash_attention_calls(
    torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, tangents: dict[str, Any]
) -> Calls:
    """The Triton kernel of jvp_flash_attention, by its function for dual numbers."""
    if case.dtype == "float64" or case.group_size > 1 or case.head_dim != case.head_dim_v:
        raise Absent("needs one head dimension, as many KV heads, and no float64")
    if case.head_dim not in HEAD_DIMS:
        raise Absent(f"needs a head dimension of {', '.join(map(str, HEAD_DIMS))}")
    try:
        library = importlib.import_module("jvp_flash_attention.jvp_attention")
    except ImportError as error:
        raise Absent(f"jvp_flash_attention: {error}") from None
    dual = torch.autograd.forward_ad
    operands = [x.contiguous() for x in (q, k, v)]
    directions = [tangents[name].contiguous() for name in ("tq", "tk", "tv")]

    def with_options(**options: bool) -> Callable[[], Any]:
        def jvp() -> Any:
            with dual.dual_level():
                pairs = [dual.make_dual(x, t) for x, t in zip(operands, directions, strict=True)]
                return (dual.unpack_dual(library.JVPAttn.fwd_dual(*pairs, causal=case.causal, **options)).tangent,)

        return jvp

    refusals = []
    for options in ({}, {"warp_specialize": False}, {"warp_specialize": False, "USE_TMA": False}):
        jvp = with_options(**options)
        try:
            jvp()
        except Exception as error:  # of the compiler, which has many types of them
            refusals.append(f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}")
            continue
        return {"jvp": jvp}
    raise Absent(f"does not run here: {refusals[-1]}")


ADAPTERS: dict[str, Callable[[Case, Inputs], Contender]] = {
    "cuflash-tangents": cuflash_tangents,
    "naive-second": naive,
    "math-second": on_torch(math_calls, device=None, needs_tangents=True),
    "jvp-flash-attention": on_torch(jvp_flash_attention_calls, needs_tangents=True),
}
