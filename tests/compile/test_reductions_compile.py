"""Every row of the tables of reductions compiles, and spills no registers, or few in the backward pass."""

from dataclasses import replace
from typing import Any

import pytest

from cuflash.gpu.compiler import compile_spec
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm80.tiles import COLUMN_TILES, TOP_TILES, TopTile
from cuflash.plan.sm90.reduction_tiles import COLUMN_SM90_TILES, MAXIMA_SM90_TILES, TOP_SM90_TILES, TopSm90Tile
from cuflash.plan.tiles import why_too_large
from cuflash.spec.passes import BACKWARD, COLUMN_MAX, COLUMN_SUMS, TOP_KEYS
from cuflash.testing import Case
from tests.compile.test_plans import SERIALIZED
from tests.sampling import sample

SM90_TILES = (*COLUMN_SM90_TILES, *TOP_SM90_TILES)
DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}
# Bytes that a thread spills, by bytes of an element, max_dim, block_m and block_n.
SPILLS: dict[tuple[int, ...], int] = {}


def main_kernel(tile, arch, pass_, **options):
    dtype = DTYPES[tile.element_bytes]
    problem = Case(seqlen_q=512, seqlen_k=512, head_dim=tile.max_dim, dtype=dtype, has_values=False, **options).problem
    device = DeviceSpec.for_arch(arch)
    if why_too_large(tile, problem, device):
        return None
    plan = choose_plan(problem, device, pass_, tiles=(tile,))
    (kernel,) = (kernel for kernel in plan.kernels if "helpers" not in kernel.source)
    return kernel


@pytest.mark.one_of("arch")
@pytest.mark.parametrize("options", [{}, {"causal": True, "alibi_slopes": (1,)}], ids=str)
@pytest.mark.parametrize("arch", ["8.0", "9.0"])
@pytest.mark.parametrize("tile", sample((*COLUMN_TILES, *TOP_TILES, *SM90_TILES), 4), ids=str)
def test_every_row_compiles(tile, arch, options):
    is_sm90 = tile in SM90_TILES
    own: dict[str, Any] = {} if tile in COLUMN_SM90_TILES else options
    for pass_ in (TOP_KEYS,) if isinstance(tile, (TopTile, TopSm90Tile)) else (COLUMN_SUMS, COLUMN_MAX):
        kernel = main_kernel(tile, "9.0" if is_sm90 else arch, pass_, **own)
        if kernel is None:
            continue
        compiled = compile_spec(kernel)
        known = SPILLS.get((tile.element_bytes, tile.max_dim, tile.block_m, tile.block_n), 0)
        assert SERIALIZED not in compiled.resources.log
        assert compiled.resources.spill_stores_bytes <= known, (pass_, compiled.resources.spill_stores_bytes)


# Bytes that a thread of the main kernel spills, by head dimension. Where roles are split, the consumer that makes dS
# has no registers for logarithms.
SPILLS_OF_GRADIENTS = {(128, "max"): 16, (128, "entropy"): 32, (256, "entropy"): 224, (256, "max", "entropy"): 8}


@pytest.mark.one_of("want")
@pytest.mark.parametrize("want", [("max",), ("entropy",), ("max", "entropy")], ids=str)
@pytest.mark.parametrize("tile", MAXIMA_SM90_TILES, ids=str)
def test_gradients_of_row_reductions_compile(tile, want):
    case = Case(seqlen_q=512, seqlen_k=512, head_dim=tile.max_dim, dtype="bfloat16")
    plan = choose_plan(replace(case.problem, row_reductions=want), DeviceSpec.for_arch("9.0"), BACKWARD)
    *first, main = (kernel for kernel in plan.kernels if "helpers" not in kernel.source)
    assert [kernel.source for kernel in first] == ["sm90/first_maxima.cu"] * ("max" in want)
    assert main.source == "sm90/backward.cu"
    assert (tile in plan.tiles) == ("max" in want)
    for kernel, known in (*((x, 0) for x in first), (main, SPILLS_OF_GRADIENTS.get((tile.max_dim, *want), 0))):
        compiled = compile_spec(kernel)
        assert SERIALIZED not in compiled.resources.log
        assert compiled.resources.spill_stores_bytes <= known, kernel.source


@pytest.mark.parametrize("options", [{"mask": (512, 512)}, {"bias": (512, 512), "causal": True}], ids=str)
def test_first_maxima_of_looked_up_pairs_compile(options):
    problem = replace(
        Case(seqlen_q=512, seqlen_k=512, head_dim=64, dtype="float16", **options).problem, row_reductions=("max",)
    )
    plan = choose_plan(problem, DeviceSpec.for_arch("9.0"), BACKWARD)
    (kernel,) = (kernel for kernel in plan.kernels if "first_maxima" in kernel.source)
    assert compile_spec(kernel).resources.spill_stores_bytes == 0


def test_every_head_dimension_of_the_forward_pass_is_served():
    for dtype, most in (("bfloat16", 1024), ("float32", 1024), ("float64", 384)):
        problem = Case(seqlen_q=64, seqlen_k=64, head_dim=most, dtype=dtype, has_values=False).problem
        for pass_ in (COLUMN_SUMS, COLUMN_MAX, TOP_KEYS):
            choose_plan(problem, DeviceSpec.for_arch("9.0"), pass_)
