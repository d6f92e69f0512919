"""Context parallel calls on several devices: ranks that are threads, ranks of NCCL, and CUDA graphs.

Ranks on one device are in tests/features/test_ranks_on_backends.py.
"""

import contextlib
import faulthandler
import importlib.util
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.distributed.reduce import add_up, minus_delta
from cuflash.shards.partial_results import merge_into
from cuflash.testing.tangents import everything
from tests.backends import DEVICE
from tests.features.test_ranks_on_backends import CASES as CASES_OF_RANKS
from tests.features.test_ranks_on_backends import WITH_TANGENTS
from tests.ranks import Shards, Whole, judge, on_devices, on_ranks

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
CASES = {name: CASES_OF_RANKS[DEVICE][name] for name in ("bfloat16", "float32", "pairs", "blocks", "packed")}

LIMIT = 400  # seconds for a test, after which the process ends


@pytest.fixture(autouse=True)
def time_limit(request):
    """A test that does not end is a failure: the process ends with the stacks of all threads, even from within CUDA."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        error_stream = os.dup(2)
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=error_stream)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(error_stream)


def devices_for(ranks):
    """A device for each rank; skips where there are fewer."""
    import cupy

    found = cupy.cuda.runtime.getDeviceCount()
    if found < ranks:
        pytest.skip(f"{found} devices, and the test needs {ranks}")
    return list(range(ranks))


by_name = pytest.mark.parametrize("name", CASES)


@by_name
@pytest.mark.parametrize("need", [None, ("dq", "dk", "dv")], ids=["all", "partial dq"])
def test_threads_on_two_devices(name, need):
    case, split = CASES[name], cd.zigzag(300, 2)
    judge(case, on_devices(devices_for(2)).results(case, split, split, need=need))


@pytest.mark.parametrize("name", ["sinks", "bias"])
def test_tangents_of_threads_on_two_devices(name):
    case, split = WITH_TANGENTS[DEVICE][name], cd.zigzag(300, 2)
    moved, need = everything(case), ("tdq", "tdk", "tdv")
    judge(case, on_devices(devices_for(2)).results(case, split, split, moved=moved, need=need), moved)


@by_name
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nccl(name, ranks):
    """Also calls in which ranks begin before they hear of each other."""
    from cupy.cuda import nccl

    case, devices, split = CASES[name], devices_for(ranks), cd.zigzag(300, ranks)
    comms = nccl.NcclCommunicator.initAll(devices)
    for need in (None, ("dq", "dk", "dv")):
        judge(case, on_devices(devices, lambda _: comms).results(case, split, split, need=need, calls=3))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("columns", [64, 20, 5])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_kernels_add_and_merge_partials_as_numpy_does(dtype, columns, count):
    """Of arrays whose rows lie together, and of slices of longer ones.

    Sums have the same bits. The exp and log of CUDA are within 2 units in the last place, so merged results may differ
    in some: of 1 in lse, where a log of 3 at most is added, and of the largest number in out, because weights sum to 1.
    """
    import cupy

    random, of_sums = np.random.default_rng(0), np.float64 if dtype == "float64" else np.float32
    outs, lses = random.standard_normal((count, 2, 3, 7, columns)), random.standard_normal((count, 2, 3, 7))
    lses[:, 0, 1], lses[0, 1, 2] = -np.inf, -np.inf
    of_host = [x.astype(of_sums) for x in outs], [x.astype(of_sums) for x in lses]
    on_device = [[cupy.asarray(x) for x in own] for own in of_host]
    for rows in (slice(None), slice(2, 6)):
        target = np.zeros((2, 3, 7, columns), ct.numpy_dtype(dtype))
        into = cupy.asarray(target)
        partials, numbers = ([x[:, :, rows] for x in own] for own in on_device)
        add_up(into[:, :, rows], partials)
        add_up(target[:, :, rows], [x[:, :, rows] for x in of_host[0]])
        np.testing.assert_array_equal(cupy.asnumpy(into), target)
        lse, got = (xp.zeros((2, 3, 7), of_sums) for xp in (np, cupy))
        merge_into(
            [x[:, :, rows] for x in of_host[0]],
            [x[:, :, rows] for x in of_host[1]],
            target[:, :, rows],
            lse[:, :, rows],
        )
        merge_into(partials, numbers, into[:, :, rows], got[:, :, rows])
        units, eps = 8 * float(np.finfo(of_sums).eps), float(ml_dtypes.finfo(target.dtype).eps)
        np.testing.assert_allclose(cupy.asnumpy(got), lse, rtol=0, atol=units)
        found, expected = (x.astype(np.float64) for x in (cupy.asnumpy(into), target))
        np.testing.assert_allclose(found, expected, rtol=eps, atol=units * float(abs(outs).max()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("columns", [64, 20, 5])
def test_what_is_sent_in_place_of_out(dtype, columns):
    import cupy

    of_sums = np.dtype(np.float64 if dtype == "float64" else np.float32)
    out, dout = np.random.default_rng(0).standard_normal((2, 1, 2, 300, columns)).astype(ct.numpy_dtype(dtype))
    for dlse in (None, np.ones((1, 2, 300), of_sums)):
        expected = minus_delta(out, dout, dlse, of_sums)
        given: Any = [None if x is None else cupy.asarray(x) for x in (out, dout, dlse)]
        found = cupy.asnumpy(minus_delta(given[0], given[1], given[2], of_sums))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_graph_holds_the_calls_of_a_rank(ranks):
    import cupy
    from cupy.cuda import nccl

    case, devices, split = CASES["bfloat16"], devices_for(ranks), cd.zigzag(300, ranks)
    comms = nccl.NcclCommunicator.initAll(devices)
    old, new = (replace(case, seed=seed).arrays() for seed in (1, 0))
    shards, all_ready = Shards(Whole.of(case), split, split), threading.Barrier(ranks)

    def work(rank):
        with cupy.cuda.Device(devices[rank]):
            attn = cd.ContextParallel(comms[rank], split=split, check=False, **case.keywords)
            own, contents = ({n: cupy.asarray(x) for n, x in shards.of(rank, x).items()} for x in (old, new))
            stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
            cupy.cuda.Device().synchronize()

            def both_passes():
                out, lse = attn.forward(*ct.qkv(own))
                gradients = attn.backward(own["dout"], *ct.qkv(own), out, lse)
                return {"out": out, "lse": lse, **gradients._asdict()}

            with cupy.cuda.using_allocator(pool.malloc), stream:
                all_ready.wait(60)
                both_passes()
                stream.begin_capture()
                results = both_passes()
                graph = stream.end_capture()
                graph.upload(stream)
                for name, x in contents.items():
                    own[name][...] = x
                all_ready.wait(60)  # once rows are exchanged, no rank may load or allocate
                for _ in range(2):
                    graph.launch(stream)
                stream.synchronize()
                return {name: cupy.asnumpy(x) for name, x in results.items()}

    judge(case, shards.whole(on_ranks(comms, work)))


def test_what_a_graph_does_not_replay_is_refused():
    import cupy

    (comm,), split = cd.threads(1), cd.zigzag(8, 1)
    x, stream = cupy.zeros((1, 8, 64), cupy.float16), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(NotImplementedError, match=r"^comm: got Threads while a CUDA graph is captured"):
            cd.ContextParallel(comm, split=split, check=False).forward(x, x, x)
        stream.end_capture()


@pytest.mark.parametrize(("engine", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_the_programs_of_the_page_run(engine, module, tmp_path):
    devices_for(2)
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    page = (ROOT / "docs" / "workers.md").read_text()
    (program,) = re.findall(rf"^```python {engine}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, path], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
