"""All kernels of a call are loaded, and its memory is there, before its first rows are exchanged.

The stand-in for CUDA is as strict as it may be: whoever loads a kernel or allocates memory waits until no device of the
process has work, and holds a lock meanwhile, without which nobody launches. The stand-in for NCCL works until the other
ranks have launched, too. So ranks that are threads wait for ever if one of them loads at the wrong time.
"""

import contextlib
import itertools
import sys
import threading
import weakref
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash.distributed as cd
import cuflash.testing as ct
from cuflash.distributed.nccl import Nccl
from cuflash.distributed.transports import Threads
from tests.emulate import device
from tests.emulate.device import Memory, OnDevice, extend, get_current_stream
from tests.emulate.launcher import launcher
from tests.nccl_stand_ins import Wires, communicators, memory
from tests.ranks import Shards, Whole
from tests.sampling import examples

SIZES: dict[str, Any] = {"seqlen_q": 96, "seqlen_k": 96, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
CASES = {
    "9.0": ct.Case(**SIZES, causal=True, dtype="bfloat16"),
    "9.0 bias": ct.Case(**SIZES, dtype="bfloat16", bias=(4, 96, 96), sinks=True, dlse=True),
    "9.0 packed": ct.Case(
        **SIZES, causal=True, dtype="float16", cu_seqlens_q=(0, 5, 11, 96), cu_seqlens_k=(0, 9, 20, 90)
    ),
    "8.0 dropout": ct.Case(**{**SIZES, "seqlen_q": 90}, dtype="float16", dropout=0.3, mask=(1, 96), layout="bshd"),
    "8.0 blocks": ct.Case(**SIZES, dtype="float32", block_mask=(), block_size=(16, 32), kv_lengths=(70,)),
}
WAIT = 10.0  # seconds after which ranks wait for ever
RANKS = 4  # at most


class Driver(Wires):
    """CUDA and NCCL for threads with a device each, and what these do, by device."""

    def __init__(self) -> None:
        super().__init__(waits=False)
        self.locks = [threading.Lock() for _ in range(RANKS)]
        self.log: dict[int, list[str]] = defaultdict(list)
        self.loaded: set[Any] = set()
        self.copies: dict[int, list[Any]] = defaultdict(list)  # by stream
        self.pools = [Pool(self.grow) for _ in range(RANKS)]

    shares_lock = True  # whether all devices are of one process, whose threads share a lock

    def launching(self, rank):
        return self.locks[rank if not self.shares_lock else 0]

    def say(self, what):
        self.log[device._of_thread.device].append(what)

    def wait(self, what):
        """Do what waits for all devices of the process."""
        self.say(what)
        own = device._of_thread.device
        of_process = range(RANKS) if self.shares_lock else (own,)
        with self.launching(own), self.changed:
            is_idle = self.changed.wait_for(lambda: not any(map(self.under_way, of_process)), WAIT)
        assert is_idle, f"device {own} waits for ever, to {what}"

    def kernel(self, *kind):
        """Launch a kernel of CUDA; the first time it is loaded."""
        key = (device._of_thread.device, *kind)
        if key not in self.loaded:
            self.loaded.add(key)
            self.wait(f"load {kind}")

    def grow(self, nbytes):
        self.wait(f"grow by {nbytes}")
        return device_memory(nbytes)

    def copy(self, target, source, nbytes, kind, stream):
        """On a stream, after what NCCL does on it."""
        groups = [group for group in self.under_way(device._of_thread.device) if group.stream == stream]
        self.copies[stream].append((groups, target, source, nbytes))
        self.go_on(stream)

    def go_on(self, stream):
        while self.copies[stream] and all(group.is_over for group in self.copies[stream][0][0]):
            _, target, source, nbytes = self.copies[stream].pop(0)
            memory(target, nbytes)[...] = memory(source, nbytes)


device_memory = device._memory


class Pool:
    """CuPy's: the smallest free piece that is large enough on the stream, or new memory; neighbours are joined."""

    def __init__(self, allocate):
        self._allocate, self._free, self._total = allocate, defaultdict(list), 0

    def malloc(self, nbytes):
        size = -(-max(nbytes, 1) // 512) * 512
        pieces = self._free[get_current_stream()]
        fitting = [piece for piece in pieces if piece[2] - piece[1] >= size]
        if fitting:
            block, start, stop = found = min(fitting, key=lambda piece: piece[2] - piece[1])
            pieces.remove(found)
        else:
            block, start, stop = self._allocate(size), 0, size
            self._total += size
        if start + size < stop:
            pieces.append((block, start + size, stop))
        allocated = Memory(block.ptr + start, None)
        weakref.finalize(allocated, self._take_back, pieces, block, start, start + size)
        return allocated

    @staticmethod
    def _take_back(pieces, block, start, stop):
        for piece in [piece for piece in pieces if piece[0] is block]:
            if piece[2] == start or piece[1] == stop:
                pieces.remove(piece)
                start, stop = min(start, piece[1]), max(stop, piece[2])
        pieces.append((block, start, stop))

    def free_all_blocks(self):
        for pieces in self._free.values():
            pieces.clear()  # whole blocks, as calls leave them
        self._total = 0

    def total_bytes(self):
        return self._total


@pytest.fixture
def driver(monkeypatch):
    return standing_in(monkeypatch)


def standing_in(monkeypatch):
    """A driver, which CuPy and `cuflash.gpu.backend` use once they are `driven`."""
    driver, streams = Driver(), itertools.count(1)
    called = device._called

    class Stream(device.Stream):
        def __init__(self, non_blocking=False, priority=0):
            super().__init__()
            self.ptr = next(streams)

    class Event(device.Event):
        def record(self, stream=None):
            self.is_recorded, self.stream = True, (stream or get_current_stream()).ptr
            under_way = driver.under_way(device._of_thread.device)
            self.groups = [group for group in under_way if group.stream == self.stream]

        @property
        def done(self):
            driver.go_on(self.stream)
            return all(group.is_over for group in self.groups)

    class Kernel:
        def __init__(self, *text, **more):
            self.text = text

        def __call__(self, *arrays, **how):
            driver.kernel(self.text, *((x.dtype.name, x.ndim) for x in arrays))

    def logged(function, owner, *args, **keywords):
        found = called(function, owner, *args, **keywords)
        if isinstance(found, OnDevice) and (owner is None or not np.may_share_memory(found.host, args_host(function))):
            driver.kernel(function.__name__, found.dtype.name, found.ndim)
        return found

    def args_host(function):
        return getattr(function, "__self__", np.empty(0))

    def assigned(name):
        method = getattr(OnDevice, name)

        def assign(array, *args):
            driver.kernel(name, array.dtype.name, array.ndim, *(getattr(x, "ndim", None) for x in args))
            return method(array, *args)

        return assign

    monkeypatch.setattr(device, "_called", logged)
    monkeypatch.setattr(device, "Stream", Stream)
    monkeypatch.setattr(device, "Event", Event)
    monkeypatch.setattr(device, "_memory", lambda nbytes: driver.pools[device._of_thread.device].malloc(nbytes))
    monkeypatch.setattr(device, "ElementwiseKernel", Kernel)
    for name in ("__setitem__", "__iadd__", "__imul__"):
        monkeypatch.setattr(OnDevice, name, assigned(name))
    for kind in (Nccl, Threads):
        monkeypatch.setattr(kind, "start", logs_rows(driver, kind.start))
    return driver


def logs_rows(driver, start):
    def logged(transport, *messages):
        driver.say("rows")
        return start(transport, *messages)

    return logged


@contextlib.contextmanager
def driven(driver, arch, monkeypatch):
    with launcher(arch, computes=False) as found:
        cupy: Any = sys.modules["cupy"]
        extend(cupy)
        cupy.cuda.MemoryPool = Pool
        cupy.cuda.alloc_pinned_memory = pinned(driver)
        cupy.cuda.runtime.memcpyAsync = driver.copy
        functions: dict[Any, Any] = {}

        def function(spec, device_id):
            driver.kernel(spec.name, spec.defines)
            return functions.setdefault((spec, device_id), found.load(spec, device_id))

        sys.modules["cuflash.gpu.device"].load_function = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", driver.module())
        yield


def pinned(driver):
    def allocate(nbytes):
        driver.wait(f"pin {nbytes}")
        return bytearray(nbytes)

    return allocate


def on_device(array, offset=0):
    """A copy of an array, `offset` bytes past a multiple of 16."""
    storage = device.alloc(array.nbytes + 16)
    found = OnDevice(array.shape, array.dtype, Memory(storage.ptr + offset, storage))
    found.host[...] = array
    return found


def passes_of(attn, own, random, need):
    """The passes of a rank on its arrays, by name."""
    inputs = [own[name] for name in "qkv"]
    optional = ct.optional(own) | random
    if need == "decode":
        return {"decode": lambda: attn.decode(*inputs, **optional)}
    results: list[Any] = []
    of_lse = {"dlse": own["dlse"]} if "dlse" in own else {}
    return {
        "forward": lambda: results.extend(attn.forward(*inputs, **optional)),
        "backward": lambda: attn.backward(own["dout"], *inputs, *results, need=need, **optional, **of_lse),
    }


def run(driver, comms, case, need, **options):
    """What each device does in each call: in a first one, a second one, and one on arrays that lie otherwise there."""
    ranks, errors = len(comms), []
    logs: list[dict[tuple[int, str], list[str]]] = [{} for _ in comms]
    split_q = cd.zigzag(case.seqlen_q, ranks)
    split_k = cd.contiguous(case.seqlen_k, ranks)
    shards, arrays = Shards(Whole.of(case), split_q, split_k), case.arrays()
    all_ready = threading.Barrier(ranks)

    def own_arrays(rank, offset):
        own = shards.of(rank, arrays)
        if need == "decode":
            own = {name: x for name, x in own.items() if name not in ("bias", "mask")} | {"q": arrays["q"]}
        return {name: on_device(x, offset) for name, x in own.items()}

    def work(rank):
        device._of_thread.device = rank
        keywords = {"split": split_q, "split_k": split_k, "steps": 2, "timeout": 3 * WAIT, **case.keywords}
        attn = cd.ContextParallel(comms[rank], **keywords, **options)
        for call, offset in enumerate((0, 0, 8 if rank == ranks - 1 else 0)):
            own = own_arrays(rank, offset)
            if call == 0:  # before the first exchange, ranks do not know that they are of one process
                all_ready.wait(WAIT)
            for name, make in passes_of(attn, own, case.random, need).items():
                before = len(driver.log[rank])
                make()
                logs[rank][call, name] = driver.log[rank][before:]
                driver.wait("go on")  # as the caller may between calls

    def watched(rank):
        try:
            work(rank)
        except BaseException as error:
            errors.append(f"rank {rank}: {error!r}")

    threads = [threading.Thread(target=watched, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * WAIT)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    return logs


def check(logs):
    """Nothing is loaded or allocated once rows are exchanged, nor loaded in a second call; a first call does load."""
    for log in logs:
        for (call, name), whats in log.items():
            after = list(itertools.dropwhile(lambda what: what != "rows", whats))
            assert set(after) <= {"rows"}, (call, name)
            loads = [what for what in whats if what.startswith("load")]
            assert call != 1 or not loads, name
    assert all(any(what.startswith("load") for what in log[next(iter(log))]) for log in logs)


@pytest.mark.parametrize("need", [("dq", "dk", "dv"), None, "decode"], ids=["partial dq", "all", "decode"])
@pytest.mark.parametrize("kind", ["threads", "nccl", "processes of nccl"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_and_memory_are_there_before_rows_travel(name, kind, need, driver, monkeypatch):
    case = CASES[name]
    if need == "decode" and case.cu_seqlens_q is not None:
        pytest.skip("packed sequences are not decoded")
    judge(driver, kind, name[:3], case, need, 3, monkeypatch)


def judge(driver, kind, arch, case, need, ranks, monkeypatch, **options):
    if kind == "processes of nccl":
        driver.shares_lock = False
        monkeypatch.setattr("cuflash.distributed.nccl.os", SimpleNamespace(getpid=lambda: device._of_thread.device))
    need = ct.gradients_of(case.problem) if need is None else need
    with driven(driver, arch, monkeypatch):
        comms = cd.threads(ranks) if kind == "threads" else communicators(ranks, driver)
        logs = run(driver, comms, case, need, **options)
    check(logs)


FEATURES = (*ct.FEATURES, "sinks", "dlse", "dropout", "block_mask", "packed")
SMALL: dict[str, Any] = {"min_seqlen": 16, "max_seqlen": 130, "max_head_dim": 64, "max_scores": 2**15}


@settings(max_examples=examples(15), deadline=None)
@given(
    st.sampled_from(["8.0", "9.0"]),
    ct.cases(features=FEATURES, **SMALL) | ct.with_axes(ct.cases(features=FEATURES, ndims=(4,), **SMALL)),
    st.sampled_from(["threads", "nccl", "processes of nccl"]),
    st.integers(1, 4),
    st.sampled_from([("dq", "dk", "dv"), None, ("dk",), "decode"]),
    st.booleans(),
    st.booleans(),
)
def test_any_call_loads_first(arch, case, kind, ranks, need, check, deterministic):
    assume(need != "decode" or case.cu_seqlens_q is None)
    with pytest.MonkeyPatch.context() as patch:
        options = {"check": check, "deterministic": deterministic, "chunks": 4 * ranks}
        judge(standing_in(patch), kind, arch, case, need, ranks, patch, **options)
