"""Contenders that compute on PyTorch's tensors: its own kernels, and libraries that build on it.

FlashAttention-2 and the efficient kernel get (batch, seqlen, heads, dim) memory: they copy other layouts of dout and
out first, which would count against them. Terms are tensors by the names of `Case.terms`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from .cases import BLOCK, Case
from .contender import Absent, Calls, Contender, refuse, without_results
from .functions import FUNCTIONS
from .inputs import Inputs

Terms = Mapping[str, Any]


def additive(torch: Any, case: Case, terms: Terms, dtype: Any) -> Any:
    """The bias, or the mask as one that is 0 or -inf, as of each pair of every head, without a copy; None without."""
    bias = terms.get("bias")
    if case.mask:
        hidden = torch.zeros(terms["mask"].shape, dtype=dtype, device=terms["mask"].device)
        hidden.masked_fill_(~terms["mask"], float("-inf"))
        bias = hidden if bias is None else bias + hidden
    return None if bias is None else bias.expand(case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)


def fa2_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """FlashAttention-2 as PyTorch carries it."""
    if case.window:
        return _fa2_window_calls(torch, case, q, k, v, dout)
    aten = torch.ops.aten
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))

    def forward() -> Any:
        return aten._scaled_dot_product_flash_attention(q, k, v, case.dropout, case.causal, False)

    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = forward()

    def backward() -> Any:
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, case.dropout, case.causal, seed, offset
        )

    return {"forward": lambda: forward()[:1], "backward": backward}


def _fa2_window_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any) -> Calls:
    """The same kernels below the functions that know no window; their layout is (batch, seqlen, heads, dim)."""
    aten = torch.ops.aten
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout))
    sizes = (None, None, case.seqlen_q, case.seqlen_k, case.dropout, case.causal)
    window = {"window_size_left": case.window - 1, "window_size_right": 0}

    def forward() -> Any:
        return aten._flash_attention_forward(q, k, v, *sizes, False, **window)

    out, lse, random, unused, _ = forward()

    def backward() -> Any:
        gradients = aten._flash_attention_backward(dout, q, k, v, out, lse, *sizes, random, unused, **window)
        return tuple(x.transpose(1, 2) for x in gradients)

    return {"forward": lambda: (forward()[0].transpose(1, 2),), "backward": backward}


def cudnn_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """cuDNN's fused attention as PyTorch calls it, with lse as in training."""
    aten = torch.ops.aten
    bias = additive(torch, case, terms, q.dtype)

    def forward() -> Any:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, case.dropout, case.causal, False)

    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = forward()

    def backward() -> Any:
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, case.dropout, case.causal
        )

    return {"forward": lambda: forward()[:1], "backward": backward}


def efficient_calls(
    torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms, *, dbias: bool = False
) -> Calls:
    """PyTorch's memory-efficient attention; its dbias is that of a whole bias, and summed after it."""
    if case.group_size > 1:
        raise Absent("has no grouped heads")
    aten = torch.ops.aten
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))

    whole = additive(torch, case, terms, q.dtype)
    summed = [axis for axis, name in enumerate("bhqk") if name not in case.bias]

    def forward() -> Any:
        return aten._scaled_dot_product_efficient_attention(q, k, v, whole, True, case.dropout, case.causal)

    out, lse, seed, offset = forward()

    def backward() -> Any:
        wanted = [True, True, True, dbias]
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, whole, out, lse, seed, offset, case.dropout, wanted, case.causal
        )
        if dbias and summed:
            gradients[3].sum(summed)
        return gradients[:3]

    return {"forward": lambda: forward()[:1], "backward": backward}


def torch_cpu_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """PyTorch's flash attention for the CPU."""
    if case.group_size > 1:
        raise Absent("has no grouped heads")
    aten = torch.ops.aten

    def forward() -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, case.causal)

    out, lse = forward()

    def backward() -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, case.causal)

    return {"forward": lambda: forward()[:1], "backward": backward}


def torch_cpu_avx2_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """The same by AVX2, which PyTorch is limited to before it is imported."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        raise Absent("needs ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2 in the environment")
    return torch_cpu_calls(torch, case, q, k, v, dout, terms)


def _autograd_calls(torch: Any, run: Callable[..., Any], q: Any, k: Any, v: Any, dout: Any, *more: Any) -> Calls:
    """For libraries whose gradient kernels only autograd can reach: the graph is built once and kept.

    `more` are inputs whose gradients are computed, and not returned.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *more)]
    saved: list[Any] = []  # made by the first backward call: the graph of the math kernel is large

    def backward() -> Any:
        if not saved:
            saved.append(run(*leaves))
        return torch.autograd.grad(saved[0], leaves, dout, retain_graph=True)[:3]

    return {"forward": lambda: (run(*leaves),), "backward": backward}


def math_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """PyTorch's unfused attention; with a bias, its gradient too."""
    if case.causal and case.bias:
        raise Absent("takes a causal mask or a bias, not both")
    attention = importlib.import_module("torch.nn.attention")
    needed = 6 * case.scores_bytes
    if q.device.type == "cuda" and needed > torch.cuda.mem_get_info()[0]:
        raise Absent(f"would need about {needed / 1e9:.0f} GB")

    def run(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=case.causal, enable_gqa=case.group_size > 1
            )

    return _autograd_calls(torch, run, q, k, v, dout, *terms.values())


def flex_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """FlexAttention, compiled for this case."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    functorch_config: Any = importlib.import_module("torch._functorch.config")
    functorch_config.donated_buffer = False  # the graph of a run is used again
    torch._dynamo.reset()  # else the limit on recompilations is met after a few cases
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    added, visible = _flex_scores(torch, case, terms), _flex_pairs(torch, case, terms, q.device)
    if case.function and FUNCTIONS[case.function].is_mask:
        own, before = FUNCTIONS[case.function].flex(torch, terms), visible
        visible = own if before is None else lambda b, h, i, j: own(b, h, i, j) & before(b, h, i, j)
    block_mask = None
    if visible is not None:
        block_mask = flex.create_block_mask(
            visible,
            *(case.batch if "b" in case.mask else None, case.num_heads if "h" in case.mask else None),
            *(case.seqlen_q, case.seqlen_k),
            device=q.device.type,
            BLOCK_SIZE=BLOCK,
        )

    def run(q: Any, k: Any, v: Any) -> Any:
        return compiled(q, k, v, score_mod=added, block_mask=block_mask, enable_gqa=case.group_size > 1)

    return _autograd_calls(torch, run, q, k, v, dout)


def _flex_scores(torch: Any, case: Case, terms: Terms) -> Callable[..., Any] | None:
    """What FlexAttention is to make of a score; None where it stays as it is."""
    steps: list[Callable[..., Any]] = []
    if case.softcap:
        steps.append(lambda s, b, h, i, j: case.softcap * torch.tanh(s / case.softcap))
    if case.alibi:
        slopes = terms["alibi_slopes"]
        steps.append(lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
    if case.bias:
        bias = _indexed(terms["bias"], case.bias)
        steps.append(lambda s, b, h, i, j: s + bias(b, h, i, j))
    if case.function and not FUNCTIONS[case.function].is_mask:
        steps.append(FUNCTIONS[case.function].flex(torch, terms))
    if not steps:
        return None

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for step in steps:
            s = step(s, b, h, i, j)
        return s

    return score


def _flex_pairs(torch: Any, case: Case, terms: Terms, device: Any) -> Callable[..., Any] | None:
    """Which pairs FlexAttention is to see; None for all."""
    tests: list[Callable[..., Any]] = []
    if case.causal:
        tests.append(lambda b, h, i, j: i >= j)
    if case.window:
        tests.append(lambda b, h, i, j: i - j < case.window)
    if case.mask:
        tests.append(_indexed(terms["mask"], case.mask))
    if case.blocks_kept:
        blocks = torch.from_numpy(case.block_mask()).to(device)
        tests.append(lambda b, h, i, j: blocks[i // BLOCK, j // BLOCK])
    if not tests:
        return None

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = tests[0](b, h, i, j)
        for test in tests[1:]:
            seen = seen & test(b, h, i, j)
        return seen

    return visible


def _indexed(array: Any, axes: str) -> Callable[..., Any]:
    """An element of a broadcast array, of which `axes` are those that it has."""
    kept = [at for at, axis in enumerate("bhqk") if axis in axes]
    own = array.reshape([array.shape[at] for at in kept])
    return lambda *index: own[tuple([index[at] for at in kept])]


def fa3_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """The forward pass of FlashAttention-3 (the fa3-fwd wheel); the layout is (batch, seqlen, heads, dim)."""
    try:
        interface = importlib.import_module("fa3_fwd_interface")
    except ImportError as error:
        raise Absent(f"fa3-fwd: {error}") from None
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    options: dict[str, Any] = {"causal": case.causal, "softcap": case.softcap or 0.0}
    if case.window:
        options["window_size"] = (case.window - 1, 0)

    def forward() -> tuple[Any, ...]:
        result = interface.flash_attn_func(q, k, v, **options)
        return ((result[0] if isinstance(result, tuple) else result).transpose(1, 2),)

    return {"forward": forward}


def _seqlen_first_calls(torch: Any, attention: Callable[..., Any], q: Any, k: Any, v: Any, dout: Any) -> Calls:
    """Of a library whose layout is (batch, seqlen, heads, dim), by autograd; it may return more than out."""
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))

    def run(q: Any, k: Any, v: Any) -> Any:
        result = attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    return _autograd_calls(torch, run, q, k, v, dout)


def fa4_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """FlashAttention-4 (the flash-attn-4 wheel)."""
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise Absent(f"flash-attn-4: {error}") from None
    options: dict[str, Any] = {"causal": case.causal}
    if case.softcap:
        options["softcap"] = case.softcap
    if case.window:
        options["window_size"] = (case.window - 1, 0)
    return _seqlen_first_calls(torch, functools.partial(interface.flash_attn_func, **options), q, k, v, dout)


def fold_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """FoldAttention: the forward pass of FlashAttention-4, and a backward pass that adds integers in any order."""
    try:
        library = importlib.import_module("fold_attention")
    except ImportError as error:
        raise Absent(f"fold-attention: {error}") from None
    attention = functools.partial(library.fold_attn_func, causal=case.causal)
    return _seqlen_first_calls(torch, attention, q, k, v, dout)


def cudnn_flex_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """Interval masks of the cuDNN frontend; the plan is made once."""
    if case.function and not FUNCTIONS[case.function].is_mask:
        raise Absent("takes masks, and no functions of scores")
    try:
        library = importlib.import_module("cudnn.flex_attention")
    except ImportError as error:
        raise Absent(f"nvidia-cudnn-frontend: {error}") from None
    ends = _interval_ends(torch, _visible_pairs(torch, case, terms, q.device)).repeat(1, case.batch)
    leaves = (x.transpose(1, 2).contiguous().detach().requires_grad_() for x in (q, k, v))
    plan = library.create_mask_plan(ends[None].contiguous(), *leaves, build_backward=True)
    return _seqlen_first_calls(torch, functools.partial(library.flex_attn_func, mask_plan=plan), q, k, v, dout)


def _visible_pairs(torch: Any, case: Case, terms: Terms, device: Any) -> Any:
    """The pairs that are seen, (seqlen_q, seqlen_k), of a mask that all batch entries and heads share."""
    i, j = torch.arange(case.seqlen_q, device=device)[:, None], torch.arange(case.seqlen_k, device=device)[None]
    pairs = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=device)
    tests = [_flex_pairs(torch, case, terms, device)]
    if case.function:
        tests.append(FUNCTIONS[case.function].flex(torch, terms))
    for test in filter(None, tests):
        pairs &= test(0, 0, i, j)
    return pairs


def _interval_ends(torch: Any, pairs: Any) -> Any:
    """Ends F of the intervals [0, F0), [F1, F2), ... of the keys that each query sees, (ends, seqlen_q), int32.

    Queries with fewer intervals than others have empty ones at their end.
    """
    padded = torch.nn.functional.pad(pairs, (1, 1))
    rows, edges = (padded[:, 1:] != padded[:, :-1]).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(pairs))
    first = counts.cumsum(0) - counts
    shift = torch.where(pairs[:, 0], -1, 1)  # the first interval begins at key 0, and is empty where that is hidden
    places = torch.arange(len(rows), device=pairs.device) - first[rows] + shift[rows]
    ends = torch.zeros(len(pairs), int((counts + shift).max()), dtype=torch.int32, device=pairs.device)
    kept = places >= 0
    ends[rows[kept], places[kept]] = edges[kept].to(torch.int32)
    return ends.cummax(1).values.T


def cuequivariance_calls(torch: Any, case: Case, q: Any, k: Any, v: Any, dout: Any, terms: Terms) -> Calls:
    """cuEquivariance's triangle attention, whose rows of structures share a bias; its gradient is always computed.

    The bias is float32, which the kernel reads: other dtypes are cast in each call.
    """
    if case.bias != "hqk" or case.mask not in ("", "bk"):
        raise Absent("needs a bias of axes hqk, and a mask of axes bk if any")
    if case.group_size > 1:
        raise Absent("has no grouped heads")
    try:
        library = importlib.import_module("cuequivariance_ops_torch")
    except ImportError as error:
        raise Absent(f"cuequivariance-ops-torch: {error}") from None
    mask = terms["mask"][None] if case.mask else None

    def run(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return library.triangle_attention(q[None], k[None], v[None], bias[None], mask)[0]

    return _autograd_calls(torch, run, q, k, v, dout, terms["bias"].float())


def _torch_contender(
    make_calls: Callable[..., Calls],
    case: Case,
    inputs: Inputs,
    *,
    device: str | None,
    takes: tuple[str, ...],
    needs_bias: bool,
    needs_tangents: bool,
) -> Contender:
    """Torch tensors over the same memory as `inputs`, on CuPy's stream; `device` is the one that the kernel needs.

    It takes cases with the options `takes`. With dropout, results depend on random numbers of its own: they are not
    checked.
    """
    refuse(case, *takes)
    if needs_bias and not case.bias:
        raise Absent("needs a bias")
    if needs_tangents and not inputs.tangents:
        raise Absent("needs tangents")
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise Absent(f"torch: {error}") from None
    on_gpu = inputs.xp.__name__ == "cupy"
    if device is not None and on_gpu != (device == "cuda"):
        raise Absent(f"needs arrays on a {device} device")
    if on_gpu:
        if not torch.cuda.is_available():
            raise Absent("this torch has no CUDA device")
        if torch.cuda.current_stream().cuda_stream != inputs.xp.cuda.get_current_stream().ptr:
            raise Absent("torch and CuPy are on different streams")

    def tensor(x: Any) -> Any:
        if x.dtype == bool:  # not every library exports those
            return torch.from_dlpack(x.view("uint8")).view(torch.bool)
        if not on_gpu and x.dtype.name == "bfloat16":  # nor NumPy these
            return torch.from_dlpack(x.view("uint16")).view(torch.bfloat16)
        return torch.from_dlpack(x)

    def array(x: Any) -> Any:
        x = x.detach()
        if not on_gpu and x.dtype == torch.bfloat16:
            return inputs.xp.from_dlpack(x.view(torch.uint16)).view(inputs.q.dtype)
        return inputs.xp.from_dlpack(x)

    operands = (tensor(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    others = inputs.tangents if needs_tangents else inputs.terms
    calls = make_calls(torch, case, *operands, {name: tensor(x) for name, x in others.items()})
    if case.dropout:
        calls = without_results(calls)
    return Contender(calls, to_array=array)


def on_torch(
    make_calls: Callable[..., Calls],
    *takes: str,
    device: str | None = "cuda",
    needs_bias: bool = False,
    needs_tangents: bool = False,
) -> Callable[[Case, Inputs], Contender]:
    """An adapter of calls on tensors; those that need tangents get these in place of the terms of a case."""
    return functools.partial(
        _torch_contender,
        make_calls,
        device=device,
        takes=takes,
        needs_bias=needs_bias,
        needs_tangents=needs_tangents,
    )


ADAPTERS: dict[str, Callable[[Case, Inputs], Contender]] = {
    "cudnn": on_torch(cudnn_calls, "bias", "mask", "dropout"),
    "fa2": on_torch(fa2_calls, "window", "dropout"),
    "fa3": on_torch(fa3_calls, "softcap", "window"),
    "fa4": on_torch(fa4_calls, "softcap", "window"),
    "fold": on_torch(fold_calls),
    "cudnn-flex": on_torch(cudnn_flex_calls, "blocks_kept", "window", "function"),
    "efficient": on_torch(efficient_calls, "bias", "mask", "dropout"),
    "efficient-dbias": on_torch(functools.partial(efficient_calls, dbias=True), "bias", "mask", needs_bias=True),
    "math": on_torch(math_calls, device=None),
    "math-dbias": on_torch(math_calls, "bias", device=None, needs_bias=True),
    "cuequivariance": on_torch(cuequivariance_calls, "bias", "mask", needs_bias=True),
    "flex": on_torch(flex_calls, "blocks_kept", "softcap", "alibi", "bias", "mask", "window", "function"),
    "torch-cpu": on_torch(torch_cpu_calls, device="cpu"),
    "torch-cpu-avx2": on_torch(torch_cpu_avx2_calls, device="cpu"),
}
