"""`cuflash.torch` on tensors in CUDA memory: results of the passes, derivatives, streams, memory and compilers."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cuflash

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cuflash.gpu import launch_cache, repeated_launches  # noqa: E402
from cuflash.torch import attention, logsumexp  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def normal(*shape, dtype="float64", seed=0):
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=torch.float64, generator=random).to(getattr(torch, dtype))


def problem(dtype):
    """q, k, v, sinks and a mask."""
    q, k, v = normal(2, 4, 130, 64, dtype=dtype), normal(2, 2, 150, 64, dtype=dtype, seed=1), normal(150, 64, seed=2)
    sinks = normal(4, dtype="float64" if dtype == "float64" else "float32", seed=3)
    return q, k, v.to(q.dtype).expand(1, 2, 150, 64), sinks, normal(130, 150, seed=4) > -1


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients_are_those_of_the_passes(dtype):
    q, k, v, sinks, mask = problem(dtype)
    attn, how = cuflash.FlashAttention(causal=True, dropout=0.25, deterministic=True), {"seed": 1, "offset": 2}
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    out, lse = attention(*leaves[:3], sinks=leaves[3], mask=mask, attn=attn, return_lse=True, **how)
    dout = normal(*out.shape, dtype=dtype, seed=5)
    found = torch.autograd.grad(out, leaves, dout)
    right = attn.forward(q, k, v, sinks=sinks, mask=mask, **how)
    gradients = attn.backward(dout, q, k, v, *right, sinks=sinks, mask=mask, need=("dq", "dk", "dv", "dsinks"), **how)
    for got, expected in zip((out, lse, *found), (*right, *gradients), strict=True):
        assert torch.equal(got.detach(), expected)


def test_first_and_second_derivatives():
    q, k, v = (normal(1, heads, n, 4, seed=heads).requires_grad_() for heads, n in ((4, 5), (2, 6), (2, 6)))
    sinks, mask = normal(4, seed=3).requires_grad_(), normal(5, 6, seed=4) > -1

    def f(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, mask=mask, causal=True, softcap=2.0, deterministic=True, return_lse=True)

    how = {"fast_mode": True}
    assert torch.autograd.gradcheck(f, (q, k, v, sinks), check_forward_ad=True, **how)
    assert torch.autograd.gradgradcheck(f, (q, k, v, sinks), check_fwd_over_rev=True, **how)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tangents_are_those_of_the_passes(dtype):
    q, k, v, _, mask = problem(dtype)
    tk, dout = normal(*k.shape, dtype=dtype, seed=7), normal(*q.shape, dtype=dtype, seed=8)
    attn = cuflash.FlashAttention(deterministic=True)
    right = attn.jvp(q, k, v, tk=tk, mask=mask)
    _, tout = torch.func.jvp(lambda k: attention(q, k, v, mask=mask, attn=attn), (k,), (tk,))
    assert torch.equal(tout, right.tout)
    back = torch.func.grad(lambda k: (attention(q, k, v, mask=mask, attn=attn) * dout).sum())
    _, tdk = torch.func.jvp(back, (k,), (tk,))
    product = attn.backward_jvp(dout, q, k, v, *right, tk=tk, mask=mask, need=("tdk",))
    atol = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-13}[dtype]
    torch.testing.assert_close(tdk, product.tdk, rtol=atol, atol=atol)  # another kernel: q and v have tangents of 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_and_its_gradients_are_those_of_the_passes_without_values(dtype):
    q, k, _, sinks, mask = problem(dtype)
    attn = cuflash.FlashAttention(causal=True, deterministic=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, sinks)]
    lse = logsumexp(*leaves[:2], sinks=leaves[2], mask=mask, attn=attn)
    right = attn.forward(q, k, None, sinks=sinks, mask=mask).lse
    assert torch.equal(lse.detach(), right)
    dlse = normal(*lse.shape, seed=5).to(lse.dtype)
    found = torch.autograd.grad(lse, leaves, dlse)
    how = {"sinks": sinks, "mask": mask, "need": ("dq", "dk", "dsinks")}
    expected = attn.backward(None, q, k, None, None, right, dlse=dlse, **how)
    for got, x in zip(found, (expected.dq, expected.dk, expected.dsinks), strict=True):
        assert torch.equal(got, x)


def test_derivatives_of_lse():
    q, k = (normal(1, heads, n, 4, seed=heads).requires_grad_() for heads, n in ((4, 5), (2, 6)))

    def f(q, k):
        return logsumexp(q, k, causal=True, softcap=2.0, deterministic=True)

    how = {"fast_mode": True}
    assert torch.autograd.gradcheck(f, (q, k), check_forward_ad=True, **how)
    assert torch.autograd.gradgradcheck(f, (q, k), check_fwd_over_rev=True, **how)
    torch.compiler.reset()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    found, right = (torch.autograd.grad(g(q, k).sin().sum(), (q, k)) for g in (compiled, f))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_kernels_run_on_the_current_stream():
    """Tensors are written late on a stream of PyTorch, and results are read there at once."""
    q, k, v = (normal(2, 4, 129, 64, dtype="float16", seed=n) for n in range(3))
    expected = attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            late = torch.full_like(q, torch.nan)
            torch.cuda._sleep(200_000_000)  # clock cycles: a tenth of a second
            late.copy_(q)
            copied = attention(late, k, v, causal=True).clone()
            late.fill_(torch.nan)
        torch.cuda.synchronize()
        torch.testing.assert_close(copied, expected, rtol=0, atol=0)


def test_results_are_memory_of_pytorch():
    q = normal(2, 4, 1024, 64, dtype="float16")
    attention(q, q, q)
    before, pool = torch.cuda.memory_allocated(), cupy.get_default_memory_pool()
    used = pool.used_bytes()
    out = attention(q, q, q)
    assert torch.cuda.memory_allocated() - before == out.nbytes  # lse is freed
    assert pool.used_bytes() == used


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cuda_graph_of_pytorch_repeats_both_passes(dtype):
    """And writes to no memory but its own, scratch memory included."""
    xs = tuple(normal(2, 4, 256, 64, dtype=dtype, seed=n).requires_grad_() for n in range(3))
    attn = cuflash.FlashAttention(causal=True, deterministic=True)

    def both():
        out = attention(*xs, attn=attn)
        return (out, *torch.autograd.grad(out, xs, torch.ones_like(out)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = both()
    others = [cupy.full(2**20, 7.0, np.float32) for _ in range(32)], [normal(2**17, seed=n) for n in range(32)]
    kept = [x.clone() for x in others[1]]
    with torch.no_grad():
        xs[0].copy_(normal(2, 4, 256, 64, dtype=dtype, seed=9))
    graph.replay()
    torch.cuda.synchronize()
    for got, right in zip(results, both(), strict=True):
        assert torch.equal(got, right)
    assert all((x == 7).all() for x in others[0])
    assert all(torch.equal(x, y) for x, y in zip(others[1], kept, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_function_is_one_graph(backend):
    xs = tuple(normal(2, 4, 130, 64, dtype="bfloat16", seed=n).requires_grad_() for n in range(3))

    def f(q, k, v):
        return attention(q * 2, k, v, causal=True, deterministic=True).float().sin()

    torch.compiler.reset()
    found, right = (
        (out := g(*xs), *torch.autograd.grad(out.sum(), xs))
        for g in (torch.compile(f, backend=backend, fullgraph=True), f)
    )
    torch.testing.assert_close(found, right)


def test_autocast():
    q = normal(2, 4, 65, 64, dtype="float32").requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        out = attention(q, q, q)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_vmap_is_a_loop():
    q, k, v = normal(3, 4, 17, 8), normal(4, 19, 8), normal(4, 19, 8)
    found = torch.func.vmap(lambda q: attention(q, k, v))(q)
    torch.testing.assert_close(found, torch.stack([attention(x, k, v) for x in q]), rtol=0, atol=0)


def test_tensors_of_both_sides_are_refused():
    q = normal(2, 4, 8)
    with pytest.raises(TypeError, match=r"^k: got a tensor on cpu, expected one on cuda:0 as q is"):
        attention(q, q.cpu(), q)
    with pytest.raises(TypeError, match=r"^v: got a tensor on cuda:0, expected one on cpu as q is"):
        attention(q.cpu(), q.cpu(), q)
    assert np.isfinite(attention(q.cpu(), q.cpu(), q.cpu()).numpy()).all()


# ---- launches that are repeated by the addresses of tensors ----------------------------------------------------------


@pytest.fixture
def repeats(monkeypatch):
    """The launches that are repeated from now on; those of earlier tests are forgotten."""
    launch_cache.forget_launches()
    found = []
    run = repeated_launches.RepeatedLaunch.run

    def count(self, *args):
        found.append(self)
        run(self, *args)

    monkeypatch.setattr(repeated_launches.RepeatedLaunch, "run", count)
    return found


def usual(compute):
    """What a function computes if no launch is repeated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_launches, "repeated_launch", lambda signature: None)
        return compute()


def assert_bits(found, right):
    for x, y in zip(found, right, strict=True):
        assert torch.equal(x.detach(), y.detach())


ATTN = cuflash.FlashAttention(causal=True, deterministic=True)


def xs_of(dtype, seed, shape=(2, 4, 130, 64)):
    return tuple(normal(*shape, dtype=dtype, seed=10 * seed + n).requires_grad_() for n in range(3))


def passes_of(xs, attn=ATTN, **how):
    """out, lse and the gradients; these come from the thread of autograd."""
    out, lse = attention(*xs, attn=attn, return_lse=True, **how)
    return out, lse, *torch.autograd.grad(out, xs, torch.ones_like(out))


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_launches_have_the_bits_of_the_usual_way(dtype, repeats):
    kept = []  # so that every call has tensors at other addresses
    for seed in range(4):
        xs = xs_of(dtype, seed)
        kept.append(xs)
        found = passes_of(xs)
        assert len(repeats) == 2 * seed
        assert_bits(found, usual(lambda xs=xs: passes_of(xs)))
        assert len(repeats) == 2 * seed


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_repeated_launches_of_tangents_have_the_bits_of_the_usual_way(dtype, repeats):
    def second(xs):
        out = attention(*xs, attn=ATTN)
        gradients = torch.autograd.grad(out, xs, out.detach(), create_graph=True)
        return torch.autograd.grad(gradients, xs, [x.detach() for x in xs])

    for seed in range(3):
        xs = xs_of(dtype, seed)
        before = len(repeats)
        found = second(xs)
        assert seed == 0 or len(repeats) > before  # the double backward pass repeats some of the first one's, too
        assert_bits(found, usual(lambda xs=xs: second(xs)))


def test_repeated_launches_with_every_seed_and_option(repeats):
    q, k, v, sinks, mask = problem("bfloat16")
    v = v.expand(2, 2, 150, 64)  # several batch axes go the usual way
    attn = cuflash.FlashAttention(causal=True, dropout=0.25, deterministic=True)
    results = []
    for seed in range(4):

        def compute(seed=seed):
            how = {"seed": seed, "offset": 2 * seed, "sinks": sinks, "mask": mask}
            return attention(q, k, v, attn=attn, return_lse=True, **how)

        results.append(compute())
        assert_bits(results[-1], usual(compute))
    assert len(repeats) == 3
    assert not torch.equal(results[2][0], results[3][0])


def test_misaligned_tensors_and_values_in_keys_are_other_signatures(repeats):
    """Each is launched by kernels of its own, also where the others are remembered."""
    (q, k, v), shape = (x.detach() for x in xs_of("bfloat16", 0)), (2, 4, 130, 64)
    shifted = torch.cat([q.new_zeros(1), q.reshape(-1)])[1:].view(shape)
    cases = [(q, k, v), (shifted, k, v), (q, k, k), (q, k, k.clone()), (q, k[:, :, 1:], v[:, :, 1:])]
    right = [usual(lambda xs=xs: attention(*xs, attn=ATTN, return_lse=True)) for xs in cases]
    for number in range(3):
        for xs, expected in zip(cases, right, strict=True):
            assert_bits(attention(*xs, attn=ATTN, return_lse=True), expected)
        assert len(repeats) >= number * len(cases)


def test_repeated_launches_run_on_the_current_stream(repeats):
    q, k, v = (x.detach() for x in xs_of("bfloat16", 0, (2, 4, 129, 64)))
    expected = attention(q, k, v, attn=ATTN)
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            late = torch.full_like(q, torch.nan)
            torch.cuda._sleep(200_000_000)  # clock cycles: a tenth of a second
            late.copy_(q)
            copied = attention(late, k, v, attn=ATTN).clone()
            late.fill_(torch.nan)
        torch.cuda.synchronize()
        assert torch.equal(copied, expected)
    assert len(repeats) == 3


def test_repeated_launches_of_threads(repeats):
    """At once, on streams of their own."""
    problems = [xs_of("bfloat16", seed) for seed in range(4)]
    right = [passes_of(xs) for xs in problems]
    torch.cuda.synchronize()

    def compute(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [passes_of(problems[number]) for _ in range(20)]
            torch.cuda.synchronize()
        for one in found:
            assert_bits(one, right[number])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compute, range(4)))
    assert len(repeats) > 100


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cuda_graph_of_repeated_launches(dtype, repeats):
    xs = xs_of(dtype, 0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            passes_of(xs)
    before, graph = len(repeats), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = passes_of(xs)
    assert len(repeats) == before + 2
    for seed in (1, 2):
        with torch.no_grad():
            for x, y in zip(xs, xs_of(dtype, seed), strict=True):
                x.copy_(y)
        others = [normal(2**17, seed=n) for n in range(32)]  # in what scratch memory would be if it were free
        kept = [x.clone() for x in others]
        graph.replay()
        torch.cuda.synchronize()
        assert_bits(results, usual(lambda: passes_of(xs)))
        assert_bits(others, kept)


def test_repeated_launches_keep_no_memory_and_are_forgotten(repeats):
    xs = [x.detach() for x in xs_of("bfloat16", 0)]
    attention(*xs, attn=ATTN)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        attention(*xs, attn=ATTN)
    assert torch.cuda.memory_allocated() == before
    assert len(repeats) == 3
    launch_cache.forget_launches()
    found = attention(*xs, attn=ATTN)
    assert len(repeats) == 3
    assert_bits([found], [attention(*xs, attn=ATTN)])
    assert len(repeats) == 4
