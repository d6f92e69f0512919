"""Context parallel calls on devices: ranks that are threads, on one device or on several, and ranks of NCCL."""

import contextlib
import faulthandler
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.distributed.reduce import add_up, minus_delta
from cuflash.shards.merge import merge_into
from tests.ranks import OfRank, Shards, Whole, compute, judge
from tests.scored import MASKS, SCORES, Scored, score_args_of

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
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
    ct.Case(**SIZES, dtype="float16", block_mask=(4,), block_size=(64, 32), dropout=0.2),
    ct.Case(**SIZES, dtype="bfloat16", dropout=0.2, cu_seqlens_q=(0, 41, 300), cu_seqlens_k=(0, 90, 290)),
)


# Seconds for all ranks of a test, in which some compile kernels; then for the test, after which the process ends.
RANKS_LIMIT, LIMIT = 240, 400


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


def on_ranks(ranks, work, comms=()):
    """What `work` gives for each rank, on as many threads.

    If they do not end in time, this fails with the stack of each, and aborts the communicators, so that others may end.
    """
    found, errors = {}, {}

    def watched(rank):
        try:
            found[rank] = work(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=watched, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + RANKS_LIMIT
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    frames = sys._current_frames()
    stacks = {
        rank: "".join(traceback.format_stack(frames[thread.ident or 0]))
        for rank, thread in enumerate(threads)
        if thread.is_alive()
    }
    if stacks:
        for comm in comms:
            comm.abort()
        pytest.fail("\n".join(f"rank {rank} did not end in {RANKS_LIMIT} s:\n{text}" for rank, text in stacks.items()))
    for _, error in sorted(errors.items()):
        raise error
    return [found[rank] for rank in range(ranks)]


def devices_for(ranks):
    """A device for each rank; skips where there are fewer."""
    import cupy

    found = cupy.cuda.runtime.getDeviceCount()
    if found < ranks:
        pytest.skip(f"{found} devices, and the test needs {ranks}")
    return list(range(ranks))


def results_of(case, comms, devices, need=None, calls=1, **options):
    """Results of a case by ranks, each of them a thread with a device; all gradients, or those that are needed.

    Of several calls, those of the last one.
    """
    import cupy

    split = cd.zigzag(case.seqlen_q, len(comms))
    shards, all_ready = Shards(Whole.of(case), split, split), threading.Barrier(len(comms))

    def work(rank):
        with cupy.cuda.Device(devices[rank]):
            attn = cd.ContextParallel(comms[rank], split=split, timeout=60, steps=3, **case.keywords, **options)
            own = {name: cupy.asarray(x) for name, x in shards.of(rank, case.arrays()).items()}
            all_ready.wait(60)  # before the first call, ranks do not know that they are of one process
            results = [compute(attn, OfRank(shards.whole_problem), own, need) for _ in range(calls)][-1]
            return {name: cupy.asnumpy(x) for name, x in results.items()}

    is_of_nccl = not isinstance(comms[0], cd.Transport)
    return shards.whole(on_ranks(len(comms), work, comms if is_of_nccl else ()))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("need", [None, ("dq", "dk", "dv")], ids=["all", "partial dq"])
def test_threads_on_one_device(case, need):
    judge(case, results_of(case, cd.threads(2), [0, 0], need))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("need", [None, ("dq", "dk", "dv")], ids=["all", "partial dq"])
def test_threads_on_two_devices(case, need):
    judge(case, results_of(case, cd.threads(2), devices_for(2), need))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nccl(case, ranks):
    """Also calls in which ranks begin before they hear of each other."""
    from cupy.cuda import nccl

    devices = devices_for(ranks)
    comms = nccl.NcclCommunicator.initAll(devices)
    for need in (None, ("dq", "dk", "dv")):
        judge(case, results_of(case, comms, devices, need, calls=3))


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_the_number_of_ranks(case):
    expected = results_of(case, cd.threads(1), [0], deterministic=True)
    judge(case, expected)
    for ranks in (2, 4, 8):
        for name, x in results_of(case, cd.threads(ranks), [0] * ranks, deterministic=True).items():
            assert x.tobytes() == expected[name].tobytes(), f"{name} of {ranks} ranks"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_graph_holds_the_calls_of_a_rank(ranks):
    import cupy
    from cupy.cuda import nccl

    case, devices, split = CASES[0], devices_for(ranks), cd.zigzag(300, ranks)
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

    judge(case, shards.whole(on_ranks(ranks, work, comms)))


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


@pytest.mark.parametrize(("score", "mask", "dtype"), [("t5", None, "bfloat16"), ("distance", "documents", "float32")])
def test_functions_of_threads_on_one_device(score, mask, dtype):
    """They count queries, keys and heads of all ranks."""
    import cupy

    functions = (SCORES[score], MASKS[mask] if mask else None)
    random, split = np.random.default_rng(0), cd.zigzag(300, 2)
    arrays = {name: random.standard_normal((1, 4, 300, 64)).astype(ct.numpy_dtype(dtype)) for name in ("q", "k", "v")}
    arrays["dout"] = random.standard_normal((1, 4, 300, 64)).astype(ct.numpy_dtype(dtype))
    arrays |= score_args_of(functions, (1, 4, 300, 300), dtype, 0)
    attn: Any = cuflash.FlashAttention(score=functions[0], mask=functions[1], causal=True)
    case = Scored(attn, arrays, {}, score)
    whole = Whole.of(case)
    shards = Shards(whole, split, split)

    comms = cd.threads(2)

    def work(rank):
        with cupy.cuda.Device(0):
            attn = cd.ContextParallel(comms[rank], split=split, **whole.keywords)
            results = compute(attn, shards, {name: cupy.asarray(x) for name, x in arrays.items()})
            return {name: cupy.asnumpy(x) for name, x in results.items()}

    judge(case, shards.whole(on_ranks(2, work)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_over_two_ranks(dtype):
    """Three steps, of which the later ones repeat what the first one did, on other numbers."""
    import cupy

    case = ct.Case(seqlen_q=1, seqlen_k=3000, num_heads=8, num_heads_kv=2, head_dim=64, dtype=dtype, kv_lengths=(2900,))
    split, seeded, comms = cd.contiguous(3000, 2), [replace(case, seed=seed) for seed in range(3)], cd.threads(2)

    def work(rank):
        comm, found = comms[rank], []
        attn = cd.ContextParallel(comm, split=split)
        for one in seeded:
            arrays = {name: cupy.asarray(x) for name, x in one.arrays().items()}
            q, k, v = (arrays[name] if name == "q" else split.part(arrays[name], comm.rank) for name in "qkv")
            found.append([cupy.asnumpy(x) for x in attn.decode(q, k, v, kv_lengths=arrays["kv_lengths"])])
        return found

    of_ranks = on_ranks(2, work)
    for one, first, second in zip(seeded, *of_ranks, strict=True):
        ct.assert_forward(one, *first)
        for x, y in zip(first, second, strict=True):
            np.testing.assert_array_equal(x, y)


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
