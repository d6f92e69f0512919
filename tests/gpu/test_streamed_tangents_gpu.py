"""jvp and backward_jvp of streamed keys on a device, held to the oracle."""

from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.testing.tangents import Moved, assert_tangents, movable
from tests.gpu.test_streamed_gpu import SIZES, in_host_memory

pytestmark = pytest.mark.gpu
CASES = (
    ct.Case(**SIZES, dtype="bfloat16", sinks=True, dlse=True, dropout=0.25),
    ct.Case(**SIZES, dtype="float16", window=(500, None), layout="bshd", alibi_slopes=(4,), softcap=20.0),
    ct.Case(**SIZES, dtype="float32", bias=(300, 1), kv_lengths=(1000, 300)),
    ct.Case(**{**SIZES, "head_dim": 32}, dtype="float64", score_mean=3e3),
)


@pytest.mark.parametrize("way", ["pinned", "pageable"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_with_tangents_keep_the_oracle_rule(case, way):
    cupy = pytest.importorskip("cupy")
    names = ("k", "v", "tk", "tv")
    moved = Moved(names=tuple(movable(case)), cotangents=("tdout", "tdlse") if case.dlse else ("tdout",), common=10.0)
    every = case.arrays() | moved.arrays(case)
    hosts: Any = {name: in_host_memory(way, every[name], None) for name in names}
    own: Any = {name: cupy.asarray(x) for name, x in every.items() if name not in names}
    keys = cuflash.streamed(hosts["k"], hosts["v"], chunk=320)
    attn: Any = cuflash.FlashAttention(**case.keywords)
    given = {name: x for name, x in own.items() if name not in ("q", "dout", "dlse", "tdout", "tdlse")}
    given |= case.random | {"tk": hosts["tk"], "tv": hosts["tv"]}
    results = attn.jvp(own["q"], *keys, **given)
    given |= {name: own[name] for name in ("dlse", "tdout", "tdlse") if name in own}
    need = ("tdq", "tdk", "tdv", *(("tdsinks",) if case.sinks else ()))
    found = attn.backward_jvp(own["dout"], own["q"], *keys, *results, need=need, **given)
    assert all(isinstance(x, np.ndarray) for x in (found.tdk, found.tdv))
    ct.assert_forward(case, results.out, results.lse)
    assert_tangents(case, moved, {"tout": results.tout, "tlse": results.tlse} | found._asdict())
