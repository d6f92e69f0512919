"""Context parallel calls on devices: ranks that are threads, on one device or on several, and ranks of NCCL."""

import concurrent.futures
from typing import Any

import numpy as np
import pytest

import cuflash.distributed as cd
import cuflash.testing as ct
from tests.ranks import Parts, Whole, compute, judge

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {
    "seqlen_q": 300,
    "seqlen_k": 300,
    "num_heads": 4,
    "num_heads_kv": 2,
    "head_dim": 64,
    "causal": True,
}
CASES = (
    ct.Case(**SIZES, dtype="bfloat16"),
    ct.Case(**SIZES, dtype="float32", window=(100, None), sinks=True),
    ct.Case(**SIZES, dtype="bfloat16", bias=(4, 300, 300), alibi_slopes=(4,), dlse=True),
)


def devices_for(ranks):
    """A device for each rank; skips where there are fewer."""
    import cupy

    found = cupy.cuda.runtime.getDeviceCount()
    if found < ranks:
        pytest.skip(f"{found} devices, and the test needs {ranks}")
    return list(range(ranks))


def results_of(case, comms, devices, need=None, **options):
    """Results of a case by ranks, each of them a thread with a device; all gradients, or those that are needed."""
    import cupy

    split = cd.zigzag(case.seqlen_q, len(comms))
    parts = Parts(Whole.of(case), split, split)

    def work(rank):
        with cupy.cuda.Device(devices[rank]):
            attn = cd.ContextParallel(comms[rank], timeout=60, **case.keywords, **options)
            arrays = {name: cupy.asarray(x) for name, x in case.arrays().items()}
            results = compute(attn, parts, arrays, need)
            return {name: cupy.asnumpy(x) for name, x in results.items()}

    with concurrent.futures.ThreadPoolExecutor(len(comms)) as pool:
        return parts.whole(list(pool.map(work, range(len(comms)))))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("need", [None, ("dq", "dk", "dv")], ids=["all", "dq in parts"])
def test_threads_on_one_device(case, need):
    judge(case, results_of(case, cd.threads(2), [0, 0], need))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("need", [None, ("dq", "dk", "dv")], ids=["all", "dq in parts"])
def test_threads_on_two_devices(case, need):
    judge(case, results_of(case, cd.threads(2), devices_for(2), need))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_nccl(case, ranks):
    from cupy.cuda import nccl

    devices = devices_for(ranks)
    comms = nccl.NcclCommunicator.initAll(devices)
    for need in (None, ("dq", "dk", "dv")):
        judge(case, results_of(case, comms, devices, need))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_the_number_of_ranks(case):
    expected = results_of(case, cd.threads(1), [0], deterministic=True)
    judge(case, expected)
    for ranks in (2, 4, 8):
        for name, x in results_of(case, cd.threads(ranks), [0] * ranks, deterministic=True).items():
            assert x.tobytes() == expected[name].tobytes(), f"{name} of {ranks} ranks"


def test_decoding_over_two_ranks():
    import cupy

    case = ct.Case(seqlen_q=1, seqlen_k=3000, num_heads=8, num_heads_kv=2, head_dim=64, dtype="float32")
    split, arrays = cd.contiguous(3000, 2), case.arrays()

    def work(comm):
        q, k, v = (cupy.asarray(arrays[name]) for name in "qkv")
        attn = cd.ContextParallel(comm, split_k=split)
        return [cupy.asnumpy(x) for x in attn.decode(q, split.part(k, comm.rank), split.part(v, comm.rank))]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, cd.threads(2))
    ct.assert_forward(case, *first)
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)
