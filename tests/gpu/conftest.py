"""The specialisations that the GPU tests are made of, and their compilation, all at once, before the first test.

Every combination of dtype, head dimensions, options and alignment is a kernel of its own, and compiling one takes
seconds: so tests draw sizes and values freely, but these combinations from a list.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import pytest
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct

SEQLENS = (2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 97, 113, 127, 128, 129, 203, 255, 257, 509)
MAX_SCORES = 2**17


@dataclass(frozen=True, kw_only=True)
class Specialisation:
    """What makes kernels differ. `cases` draws problems that the same kernels serve."""

    dtype: str
    head_dim: int
    head_dim_v: int = 0
    strides: str = "contiguous"
    right: bool = False
    left: bool = False
    softcap: float | None = None
    scale: float | None = None
    bias: str | None = None  # its dtype: "softmax" or "input"
    mask: bool = False
    kv_lengths: str | None = None  # their dtype
    alibi_slopes: bool = False

    def __str__(self):
        others = [f for f in fields(self) if f.name not in ("dtype", "head_dim")]
        on = [f"{f.name}={getattr(self, f.name)}" for f in others if getattr(self, f.name) is not f.default]
        return ",".join((self.dtype, f"d={self.head_dim}", *(x.removesuffix("=True") for x in on)))

    @property
    def fixed(self):
        """Arguments that all cases of this specialisation have in common."""
        names = ("dtype", "head_dim", "head_dim_v", "strides", "softcap", "scale")
        common = {name: getattr(self, name) for name in names}
        return common | {"bias_dtype": self.bias or "softmax", "kv_lengths_dtype": self.kv_lengths or "int32"}

    def cases(self):
        """Strategy for cases of this specialisation."""
        return _cases(self)

    def examples(self):
        """Cases of this specialisation: one, but two where the length decides about the kernel."""
        return [self.example(65, 70), *([self.example(300, 310)] if self.dtype == "float32" else [])]

    def example(self, seqlen_q, seqlen_k):
        """One case of this specialisation."""
        return ct.Case(
            **self.fixed,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            causal=self.right,
            window=(9, None) if self.left else None,
            bias=(seqlen_q, seqlen_k) if self.bias else None,
            mask=(seqlen_q, seqlen_k) if self.mask else None,
            kv_lengths=(seqlen_k,) if self.kv_lengths else None,
            alibi_slopes=(1,) if self.alibi_slopes else None,
        )


@st.composite
def _cases(draw, what):
    def pick(values):
        return draw(st.sampled_from(list(values)))

    ndim, layout = pick((4, 4, 4, 3, 2)), pick(("bhsd", "bshd"))
    num_heads_kv = pick((1, 2)) if ndim > 2 else 1
    num_heads = num_heads_kv * (pick((1, 2, 3)) if ndim > 2 else 1)
    batch = pick((1, 2, 3)) if ndim == 4 else 1
    longest = MAX_SCORES // (batch * num_heads)
    seqlen_q = pick(SEQLENS)
    seqlen_k = pick(n for n in SEQLENS if n * seqlen_q <= longest)
    # A bound that hides nothing would be another specialisation; a side of at most this hides something.
    side = st.integers(0, min(seqlen_q, seqlen_k) - 2)
    causal, window = False, (draw(side) if what.left else None, None)
    if what.right:
        causal = pick((True, "top_left", False))
        window = (window[0], None if causal else draw(side))
    scores_shape = (batch, num_heads, seqlen_q, seqlen_k)
    broadcast = st.tuples(*(st.sampled_from([1, n]) for n in scores_shape))
    return ct.Case(
        **what.fixed,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        ndim=ndim,
        layout=layout,
        causal=causal,
        window=window if what.left or what.right else None,
        bias=draw(broadcast) if what.bias else None,
        bias_holes=draw(st.booleans()),
        mask=draw(broadcast) if what.mask else None,
        kv_lengths=tuple(draw(st.integers(0, seqlen_k)) for _ in range(batch)) if what.kv_lengths else None,
        alibi_slopes=pick([(num_heads,), (batch, num_heads)]) if what.alibi_slopes else None,
        score_spread=pick((1.0, 1.0, 8.0, 30.0)),
        seed=draw(st.integers(0, 2**16)),
    )


def _specialisations():
    half, brain = "float16", "bfloat16"
    for n, head_dim in enumerate((1, 3, 8, 17, 32, 40, 72, 96, 113, 160, 192, 255)):
        yield Specialisation(dtype=(half, brain)[n % 2], head_dim=head_dim)
    for head_dim in (64, 128, 256):
        for dtype in (half, brain):
            yield Specialisation(dtype=dtype, head_dim=head_dim)
            yield Specialisation(dtype=dtype, head_dim=head_dim, right=True)
    for head_dim, head_dim_v in ((64, 128), (192, 128), (5, 256), (96, 7)):
        yield Specialisation(dtype=brain, head_dim=head_dim, head_dim_v=head_dim_v, right=True)
    for strides, head_dim in (("padded", 64), ("padded", 113), ("transposed", 40), ("flipped", 64)):
        yield Specialisation(dtype=half, head_dim=head_dim, strides=strides)
    yield Specialisation(dtype=brain, head_dim=128, left=True)
    yield Specialisation(dtype=half, head_dim=64, left=True, right=True)
    yield Specialisation(dtype=half, head_dim=64, softcap=5.0)
    yield Specialisation(dtype=half, head_dim=64, scale=-0.2)
    yield Specialisation(dtype=brain, head_dim=64, scale=0.0)
    yield Specialisation(dtype=half, head_dim=64, bias="softmax")
    yield Specialisation(dtype=brain, head_dim=128, bias="input")
    yield Specialisation(dtype=half, head_dim=64, mask=True)
    yield Specialisation(dtype=half, head_dim=64, kv_lengths="int64")
    yield Specialisation(dtype=brain, head_dim=256, kv_lengths="int32", right=True)
    yield Specialisation(dtype=half, head_dim=64, alibi_slopes=True)
    yield Specialisation(dtype=brain, head_dim=80, alibi_slopes=True, softcap=20.0, right=True)
    everything: dict[str, Any] = {
        "left": True,
        "right": True,
        "softcap": 30.0,
        "bias": "softmax",
        "mask": True,
        "alibi_slopes": True,
    }
    yield Specialisation(dtype=half, head_dim=48, head_dim_v=72, kv_lengths="int32", **everything)
    yield Specialisation(dtype=brain, head_dim=128, kv_lengths="int64", strides="padded", **everything)
    for dtype in ("float32", "float64"):
        for head_dim in (1, 40, 64, 113, 128, 256):
            yield Specialisation(dtype=dtype, head_dim=head_dim, right=head_dim == 64)
        yield Specialisation(dtype=dtype, head_dim=192, head_dim_v=128, right=True)
        yield Specialisation(dtype=dtype, head_dim=64, strides="padded")
        yield Specialisation(dtype=dtype, head_dim=48, head_dim_v=72, kv_lengths="int32", **everything)
    # Compute capability 9.0 has a kernel of its own for strides that its TMA unit can take: both get every option.
    for n, head_dim in enumerate((64, 96, 128, 192, 256)):
        dtypes = (half, brain) if n % 2 else (brain, half)
        optional: dict[str, Any] = {"softcap": 30.0, "bias": ("input", "softmax")[n % 2], "alibi_slopes": True}
        yield Specialisation(dtype=dtypes[0], head_dim=head_dim, kv_lengths="int32", **everything)
        yield Specialisation(dtype=dtypes[1], head_dim=head_dim, right=head_dim > 128, **optional)
    yield Specialisation(dtype=half, head_dim=192, left=True)
    yield Specialisation(dtype=brain, head_dim=96, right=True)
    yield Specialisation(dtype=brain, head_dim=128, strides="flipped", right=True)
    yield Specialisation(dtype=half, head_dim=256, strides="flipped", kv_lengths="int64", **everything)


@pytest.fixture(scope="session")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def capture(cupy):
    """Captures what a function launches in a graph, once another one has compiled it; gives results and a replay."""
    pools = []

    def captured(work, compiled):
        stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
        pools.append(pool)
        cupy.cuda.Device().synchronize()
        with cupy.cuda.using_allocator(pool.malloc), stream:
            compiled()
            stream.begin_capture()
            results = work()
            graph = stream.end_capture()

        def replay():
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()

        return results, replay

    return captured


SPECIALISED = ("specialisation", "deterministic_specialisation")  # the fixtures that tests take them from
SPECIALISATIONS = tuple(_specialisations())
DETERMINISTIC = tuple(
    x
    for n, x in enumerate(SPECIALISATIONS)
    if n % 4 == 0 or (x.head_dim in (64, 128, 256) and x.right) or x.softcap or x.strides == "padded"
)


@pytest.fixture(scope="session", params=SPECIALISATIONS, ids=str)
def specialisation(request):
    return request.param


@pytest.fixture(scope="session", params=DETERMINISTIC, ids=str)
def deterministic_specialisation(request):
    return request.param


@pytest.fixture(scope="session", autouse=True)
def compiled(request):
    """Fill the cache of compiled kernels for the tests that were selected, on as many threads as there are cores.

    Not where pytest-xdist runs many processes, each of which has but some of these tests.
    """
    import cupy

    if "PYTEST_XDIST_WORKER" in os.environ:
        return

    tasks = set()
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        tasks |= {(params[name], name != "specialisation") for name in SPECIALISED if name in params}

    def compile_one(task):
        specialisation, deterministic = task
        for case in specialisation.examples():
            arrays = case.arrays(cupy.asarray)
            attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
            attn.compile(*ct.qkv(arrays), **ct.optional(arrays))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, tasks))
