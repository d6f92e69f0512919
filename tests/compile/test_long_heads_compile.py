"""The wgmma kernels of long heads without values compile with every option, and spill registers with few of them."""

from typing import Any

import pytest

from cuflash.gpu.compiler import compile_spec
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm90.chunked import BACKWARD_CHUNKED_SM90_TILES, FORWARD_CHUNKED_SM90_TILES
from cuflash.spec.passes import BACKWARD, FORWARD
from cuflash.testing import Case
from tests.sampling import sample

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": (1, 512)},
    {"causal": True, "sinks": True},
    {"causal": True, "softcap": 3.0},
    {"bias": (512, 512), "alibi_slopes": (1,), "sinks": True},
    {"mask": (512, 512), "window": (64, 9)},
)
MOST_SPILLED = {"bias": 128, "mask": 256}  # bytes of a thread, which looks up pairs, or a bias of keys


@pytest.mark.parametrize(
    ("tile", "options"),
    sample(
        [  # three consumers serve neither bias nor masks nor soft caps
            (tile, x)
            for tile in FORWARD_CHUNKED_SM90_TILES
            for x in OPTIONS
            if tile.rows == 128 or not {"bias", "mask", "softcap"} & x.keys()
        ],
        3,
    ),
    ids=str,
)
def test_few_registers_are_spilled(tile, options):
    case = Case(seqlen_q=512, seqlen_k=512, head_dim=2048, dtype="bfloat16", has_values=False, **options)
    kernel = choose_plan(case.problem, DeviceSpec.for_arch("9.0"), FORWARD, tiles=(tile,)).kernels[-1]
    assert kernel.source == "sm90/forward_chunked.cu"
    resources = compile_spec(kernel).resources
    assert resources.spill_stores_bytes <= max((MOST_SPILLED.get(name, 0) for name in options), default=0)
    assert "wgmma.mma_async instructions are serialized" not in resources.log


OF_GRADIENTS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"bias": (1, 512)},
    {"softcap": 3.0, "window": (9, 9)},
)


@pytest.mark.parametrize(
    ("tile", "options"),
    sample([(tile, x) for tile in BACKWARD_CHUNKED_SM90_TILES for x in OF_GRADIENTS], 3),
    ids=str,
)
def test_few_registers_of_gradients_are_spilled(tile, options):
    case = Case(seqlen_q=512, seqlen_k=512, head_dim=2048, dtype="bfloat16", has_values=False, dlse=True, **options)
    plan = choose_plan(case.problem, DeviceSpec.for_arch("9.0"), BACKWARD, tiles=(tile,))
    ds, products = plan.kernels[-2:]
    assert (ds.source, products.source) == ("sm90/backward_chunked_ds.cu", "sm90/backward_chunked.cu")
    for kernel, most in ((ds, MOST_SPILLED["bias"] if options else 0), (products, 0)):
        resources = compile_spec(kernel).resources
        assert resources.spill_stores_bytes <= most
        assert "wgmma.mma_async instructions are serialized" not in resources.log
