"""What the compiler makes of the decode kernel of every device: every row that a device takes, no spills."""

from dataclasses import dataclass
from typing import Any

import pytest

import cuflash.testing as ct
from cuflash.gpu.compiler import compile_spec, supported_archs
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm80.decode import DECODE_TILES, DecodeTile
from cuflash.plan.tiles import round_up
from tests.compile.test_plans import REGISTERS_OF_SM
from tests.sampling import sample
from tests.scored import of_functions

# Those with different instructions or sizes of shared memory.
ARCHS = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
PLAIN: dict[str, Any] = {}
PAGES: dict[str, Any] = {"page_size": 16, "kv_lengths": (1900,)}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "causal": {"causal": True, "kv_lengths": (1900,)},
    "softcap": {"softcap": 20.0},
    "slopes": {"alibi_slopes": (8,), "causal": True},
    "bias": {"bias": (1, 2048)},
    "mask": {"mask": (1, 2048)},
    "blocks": {"block_mask": ()},
    "dropout": {"dropout": 0.1},
    "sinks": {"sinks": True},
    "narrow": {"strides": "padded"},
    "pages": PAGES,
    "bytes": {"kv_dtype": "float8_e4m3fn", "k_scale": "token", "v_scale": "token"},
    "bytes of heads in pages": PAGES | {"kv_dtype": "float8_e5m2", "k_scale": "head", "v_scale": "head"},
    "options": {
        "causal": True,
        "window": (900, None),
        "softcap": 5.0,
        "bias": (8, 1, 2048),
        "mask": (8, 1, 2048),
        "kv_lengths": (2000,),
        "kv_lengths_dtype": "int64",
        "alibi_slopes": (8,),
        "sinks": True,
        "dropout": 0.2,
    },
}
# Bytes that a thread spills at most, by variant, bytes of an element and max_dim: what NVRTC 13.5 reports for the worst
# of the devices and of the numbers of rows, and a small margin. All others spill nothing.
SPILLS = {
    ("bias", 2, 256): 40,
    ("mask", 2, 256): 8,
    ("blocks", 2, 256): 64,
    ("dropout", 2, 256): 24,
    ("options", 2, 256): 20,
    ("bias", 4, 128): 24,
    ("blocks", 4, 128): 12,
    ("causal", 4, 256): 12,
    ("slopes", 4, 256): 8,
    ("bias", 4, 256): 136,
    ("mask", 4, 256): 8,
    ("blocks", 4, 256): 24,
    ("options", 4, 256): 12,
    ("blocks", 8, 64): 12,
    ("options", 8, 64): 12,
    ("blocks", 8, 128): 180,
}
SHAPES = sorted({(tile.element_bytes, tile.max_dim, tile.block_m) for tile in DECODE_TILES})


@dataclass(frozen=True, kw_only=True)
class Target:
    """The row that a device of `arch` takes for as many queries, and columns, as the shape has."""

    arch: str
    shape: tuple[int, int, int]
    variant: str = "plain"

    def __str__(self) -> str:
        return f"{self.arch}-{self.shape[0]}B-{self.shape[1]}x{self.shape[2]}-{self.variant}"

    def plan(self):
        """None where the kernel for many queries serves."""
        size, dim, rows = self.shape
        dtype = {2: "float16" if self.arch == "7.5" else "bfloat16", 4: "float32", 8: "float64"}[size]
        sizes = {"seqlen_q": rows // 8, "seqlen_k": 2048, "num_heads": 8, "num_heads_kv": 1, "head_dim": dim}
        problem = ct.Case(**sizes | VARIANTS[self.variant] | {"dtype": dtype}).problem
        if self.arch == "9.0" and size == 2:  # which other kernels serve that read by TMA
            device = DeviceSpec.for_arch("9.0").as_arch("8.0")
        else:
            device = DeviceSpec.for_arch(self.arch)
        try:
            plan = choose_plan(problem, device)
        except NotImplementedError:
            return None
        return plan if isinstance(plan.tiles[0], DecodeTile) else None


USUAL = [Target(arch=arch, shape=shape) for arch in ARCHS for shape in SHAPES]
OTHERS = [
    Target(arch=arch, shape=shape, variant=variant)
    for arch in ("7.5", "8.0", "9.0", "12.0")
    for shape in SHAPES
    for variant in VARIANTS
    if variant != "plain" and shape[1] <= 256 and (arch != "7.5" or shape[0] == 2)
]


@pytest.mark.parametrize("target", [*sample(USUAL, 40), *sample(OTHERS, 60)], ids=str)
def test_row(target):
    plan = target.plan()
    if plan is None:
        pytest.skip("its shared memory is too small")
    (tile,) = plan.tiles
    for kernel in plan.kernels:
        if kernel.target not in supported_archs():
            pytest.skip(f"this NVRTC does not know {kernel.target}")
        resources = compile_spec(kernel).resources
        assert round_up(resources.registers, 8) * kernel.threads * tile.min_blocks <= REGISTERS_OF_SM
        assert resources.static_shared_bytes == 0 and resources.warnings == ()
        allowed = SPILLS.get((target.variant, *target.shape[:2]), 0) if kernel.source.startswith("sm80/") else 0
        assert resources.spill_stores_bytes <= allowed, kernel.name
        assert resources.stack_bytes <= resources.spill_stores_bytes + 28, kernel.name


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("score", "mask"), [("distance", None), ("alibi", "documents"), (None, "near")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_functions(score, mask, dtype):
    problem = of_functions((score, mask), dtype, 128, 2048, seqlen_q=1)
    kernels = choose_plan(problem, DeviceSpec.for_arch("8.0")).kernels
    (kernel,) = (kernel for kernel in kernels if kernel.source == "sm80/decode.cu")
    assert compile_spec(kernel).resources.spill_stores_bytes == 0
    assert ("helpers/mask_tiles.cu" in {kernel.source for kernel in kernels}) == (mask is not None)
