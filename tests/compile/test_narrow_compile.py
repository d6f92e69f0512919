"""The kernel of narrow heads without values compiles with every option, and spills registers with few of them."""

import itertools
from typing import Any

import pytest

from cuflash.gpu.compiler import compile_spec
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm80.narrow import FORWARD_NARROW_TILES
from cuflash.spec.passes import FORWARD
from cuflash.testing import Case
from tests.sampling import sample

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": (1, 512)},
    {"bias": (512, 512), "causal": True, "softcap": 3.0},
    {"mask": (512, 512), "alibi_slopes": (1,), "window": (64, 9)},
)
MOST_SPILLED = {"window": 448}  # bytes of a thread, where each pair has a mask, a slope and two bounds
ROWS = itertools.product(("7.5", "8.0", "9.0", "12.0"), (1, 3, FORWARD_NARROW_TILES[0].max_dim), OPTIONS)


@pytest.mark.parametrize(("arch", "head_dim", "options"), sample(list(ROWS), 4), ids=str)
def test_few_registers_are_spilled(arch, head_dim, options):
    case = Case(seqlen_q=512, seqlen_k=512, head_dim=head_dim, dtype="float32", has_values=False, **options)
    kernel = choose_plan(case.problem, DeviceSpec.for_arch(arch), FORWARD).kernels[-1]
    assert kernel.source == "sm80/forward_narrow.cu"
    most = max((MOST_SPILLED.get(name, 0) for name in options), default=0)
    assert compile_spec(kernel).resources.spill_stores_bytes <= most
