"""jvp and backward_jvp of ranks that are threads, on one device or on two, held to the oracle."""

import threading
from typing import Any

import pytest

import cuflash.distributed as cd
import cuflash.testing as ct
from tests.gpu.test_distributed_gpu import SIZES, devices_for, on_ranks
from tests.ranks import Whole
from tests.ranks_with_tangents import WithTangents, compute, everything, judge

pytestmark = pytest.mark.gpu
CASES = (
    ct.Case(**SIZES, dtype="bfloat16", sinks=True, dlse=True, dropout=0.2),
    ct.Case(**SIZES, dtype="float32", window=(100, None), bias=(4, 300, 300)),
    ct.Case(**SIZES, dtype="float16", layout="bshd", score_mean=4e3, alibi_slopes=(4,)),
    ct.Case(**{**SIZES, "head_dim": 32}, dtype="float64", cu_seqlens_q=(0, 41, 300), cu_seqlens_k=(0, 90, 290)),
)
NEED = ("tdq", "tdk", "tdv")


def results_of(case, ranks, devices, calls=1, need=NEED, **options):
    """Results of a case by ranks, each of them a thread with a device; of several calls those of the last one."""
    import cupy

    split, comms, moved = cd.zigzag(case.seqlen_q, ranks), cd.threads(ranks), everything(case)
    shards, all_ready = WithTangents(Whole.of(case), split, split), threading.Barrier(ranks)
    arrays = case.arrays() | moved.arrays(case)

    def work(rank):
        with cupy.cuda.Device(devices[rank]):
            attn: Any = cd.ContextParallel(comms[rank], split=split, timeout=60, steps=3, **case.keywords, **options)
            own = {name: cupy.asarray(x) for name, x in shards.of(rank, arrays).items()}
            all_ready.wait(60)
            results = [compute(attn, case, own, need) for _ in range(calls)][-1]
            return {name: cupy.asnumpy(x) for name, x in results.items()}

    return moved, shards.whole(on_ranks(ranks, work))


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_on_one_device(case, calls):
    """Also of calls that repeat what a warm-up run recorded."""
    judge(case, *results_of(case, 2, [0, 0], calls, (*NEED, "tdsinks") if case.sinks and calls == 1 else NEED))


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_threads_on_two_devices(case):
    judge(case, *results_of(case, 2, devices_for(2)))


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_bits_do_not_depend_on_the_number_of_ranks(case):
    one, two = (results_of(case, ranks, [0, 0], deterministic=True, chunks=4) for ranks in (1, 2))
    judge(case, *one)
    for name, x in one[1].items():
        assert x.tobytes() == two[1][name].tobytes(), name
