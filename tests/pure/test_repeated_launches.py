"""Launches of `cuflash.torch` that are repeated by addresses: when, and that kernels get what they get the usual way.

There is no GPU: tensors are shapes, strides and addresses, and kernels are what a stand-in for the driver is given.
"""

import contextlib
import ctypes
import itertools
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.gpu
from cuflash import dispatch
from cuflash.frameworks import call
from cuflash.gpu.replay import of_thread
from tests.emulate.launcher import launcher
from tests.sampling import examples

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cuflash.torch import tensors as of_torch  # noqa: E402

PACKAGE = str(Path(cuflash.__file__).parent)
BEFORE = 1 << 20  # the first address of what a call allocates


@dataclass
class Tensor:
    """A tensor in CUDA memory, as far as a pass looks at it."""

    shape: Any  # torch.Size
    dtype: Any
    address: int
    strides: tuple[int, ...]
    index: int = 0
    negative: bool = False
    memory: Any = None

    is_cpu, is_cuda = False, True
    device = property(lambda self: torch.device("cuda", self.index))

    def numel(self):
        return self.shape.numel()

    def stride(self):
        return self.strides

    def data_ptr(self):
        return self.address

    def get_device(self):
        return self.index

    def is_neg(self):
        return self.negative

    def resolve_neg(self):
        return replace(self, negative=False, address=self.memory.allocate(self.numel() * self.dtype.itemsize))

    def new_empty(self, shape, dtype=None):
        shape, dtype = torch.Size(shape), dtype or self.dtype
        address = self.memory.allocate(shape.numel() * dtype.itemsize)
        return Tensor(shape, dtype, address, contiguous(shape), self.index, memory=self.memory)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function is torch.empty_like
        return replace(args[0].new_empty(args[0].shape), strides=args[0].strides)


def contiguous(shape):
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


class View:
    """A tensor as an array of CuPy."""

    __cuda_array_interface__: Any = None  # which says whose array this is

    def __init__(self, shape, dtype, pointer, strides):
        self.shape, self.dtype, self.data, self.strides = tuple(shape), np.dtype(dtype), pointer, strides
        self.ndim, self.itemsize = len(shape), self.dtype.itemsize
        self.size = int(np.prod(shape))

    def __getitem__(self, index):
        """A view of the last axes, at indices of those before."""
        *indices, _ = index
        offset = sum(i * step for i, step in zip(indices, self.strides, strict=False))
        pointer = SimpleNamespace(**{**vars(self.data), "ptr": self.data.ptr + offset})
        return View(self.shape[len(indices) :], self.dtype, pointer, self.strides[len(indices) :])

    def __setitem__(self, index, value):
        assert index is Ellipsis


class Memory:
    """What a call allocates: by the same requests the same addresses, if it begins anew."""

    def __init__(self):
        self.next, self.in_use, self.step, self.lock = BEFORE, [], 512, threading.Lock()

    def allocate(self, nbytes, stream=0):
        with self.lock:
            found, self.next = self.next, self.next + max(nbytes + self.step - 1, 1) // self.step * self.step
            return found

    def scratch(self, nbytes, stream):
        address = self.allocate(nbytes)
        self.in_use.append((address, stream))
        return address

    def free(self, address):
        (found,) = (x for x in self.in_use if x[0] == address)
        self.in_use.remove(found)


class Device:
    def __init__(self, number, thread):
        self.id, self._thread, self._before = number, thread, getattr(thread, "device", 0)

    def __enter__(self):
        self.use()

    def __exit__(self, *error):
        self._thread.device = self._before

    def use(self):
        self._thread.device = self.id


class Machine:
    """Modules of `cuflash.gpu`, and what they give a driver."""

    def __init__(self, monkeypatch, arch):
        self.memory, self.launched, self.calls = Memory(), [], 0
        self.stream, self.current = SimpleNamespace(ptr=0), 7
        self.thread = threading.local()  # has a device
        self._patch, self.arch = monkeypatch, arch

    def __enter__(self):
        self._context = launcher(self.arch, computes=False)
        launches = self._context.__enter__()
        self.launch, self.launch_cache = launches.launch, launches.launch_cache
        self.repeated_launches = launches.repeated_launches
        cupy: Any = sys.modules["cupy"]
        cupy.ndarray = View
        cupy.empty = self._empty
        cupy.lib = SimpleNamespace(
            stride_tricks=SimpleNamespace(as_strided=lambda x, shape, strides: View(shape, x.dtype, x.data, strides))
        )
        cuda = cupy.cuda
        cuda.UnownedMemory = lambda address, size, owner, device: SimpleNamespace(ptr=address, size=size, device=device)
        cuda.MemoryPointer = lambda memory, offset: SimpleNamespace(
            ptr=memory.ptr + offset, device_id=memory.device, mem=memory
        )
        cuda.using_allocator = lambda allocator: contextlib.nullcontext()
        cuda.alloc = self._alloc
        cuda.get_current_stream = lambda: self.stream
        cuda.Device = self._device
        cuda.runtime.getDevice = lambda: getattr(self.thread, "device", 0)
        cuda.runtime.setDevice = lambda device: setattr(self.thread, "device", device)
        cuda.PythonFunctionAllocator = lambda allocate, free: SimpleNamespace(malloc=None)
        cuda.driver = SimpleNamespace(launchKernel=self._launch)
        for name, function in {
            "_cuda_getCurrentRawStream": lambda device: self.current,
            "_cuda_cudaCachingAllocator_raw_alloc": self.memory.scratch,
            "_cuda_cudaCachingAllocator_raw_delete": self.memory.free,
        }.items():
            self._patch.setattr(torch._C, name, function, raising=False)
        self._patch.setattr(of_torch, "cupy_stream", self._on_stream)
        usual = self.launch.Launch.run

        def count(*args, **keywords):
            self.calls += 1
            return usual(*args, **keywords)

        self._patch.setattr(self.launch.Launch, "run", count)
        self._forget()
        return self

    def __exit__(self, *error):
        self._context.__exit__(*error)
        self._forget()

    def _forget(self):
        for cached in (dispatch.backend_of, of_torch._cupy, of_torch._repeated_launches, of_torch._allocator):
            cached.cache_clear()

    def _empty(self, shape, dtype):
        strides = tuple(step * dtype.itemsize for step in contiguous(shape))
        address = self.memory.allocate(int(np.prod(shape)) * dtype.itemsize)
        return View(shape, dtype, SimpleNamespace(ptr=address, device_id=0, mem=None), strides)

    def _alloc(self, nbytes):
        return SimpleNamespace(ptr=self.memory.allocate(nbytes))

    def _device(self, device):
        return Device(device, self.thread)

    @contextlib.contextmanager
    def _on_stream(self, pointer, device):
        before, self.stream = self.stream, SimpleNamespace(ptr=pointer)
        try:
            yield
        finally:
            self.stream = before

    def _launch(self, handle, grid, _y, _z, threads, _ty, _tz, shared_bytes, stream, argument, _extra):
        device = getattr(self.thread, "device", 0)
        content = ctypes.string_at(ctypes.c_uint64.from_address(argument).value, self.sizes[handle])
        self.launched.append((handle, grid, threads, shared_bytes, stream, device, content))

    @property
    def sizes(self):
        """The bytes of the argument, by kernel."""
        repeated = self.repeated_launches._repeated
        return {
            kernel.handle: len(launch.argument._content)
            for launch in [*self.launch_cache._launches.values(), *(x.launch for x in repeated.values())]
            for kernel in launch.kernels
        }

    def run(self, which, own, tensors, seed=None, offset=None):
        """What a call launches, with its results, and whether it went the usual way."""
        self.memory.next, self.launched, before = BEFORE, [], self.calls
        self.launch._call_numbers = itertools.count(5)
        results = of_torch.run(which, own, seed, offset, tensors)
        assert not self.memory.in_use
        assert self.stream.ptr == 0
        found = [(x.shape, x.dtype, x.address, x.strides) for x in results]
        return (found, self.launched), self.calls != before

    def usual(self, *args, **keywords):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.repeated_launches, "_repeated", {})
            self.launch_cache._known.clear()
            found, was_usual = self.run(*args, **keywords)
        assert was_usual
        return found


@pytest.fixture(params=["8.0", "9.0"])
def machine(request, monkeypatch):
    with Machine(monkeypatch, request.param) as made:
        yield made


FIRST = 1 << 32  # addresses of inputs begin here


def tensor(memory, shape, dtype=torch.bfloat16, address=FIRST):
    return Tensor(torch.Size(shape), dtype, address, contiguous(shape), memory=memory)


def at(tensors, number):
    """Tensors of the same signature, elsewhere."""
    found = [replace(x, address=x.address + (number << 24) * (1 + n)) for n, x in enumerate(tensors)]
    if tensors[1].address == tensors[2].address:
        found[2].address = found[1].address
    return found


def gradual(s, i, j, *, head, table):
    return s + table[head] * cuflash.minimum(cuflash.abs(i - j), 5)


# Options, shapes of q, k and v, and of other inputs with their dtypes.
SHAPES = {"q": (2, 4, 130, 64), "k": (2, 2, 150, 64), "v": (2, 2, 150, 64)}
FLOAT32, INT32 = torch.float32, torch.int32
CASES: dict[str, Any] = {
    "plain": ({}, {}, {}),
    "causal": ({"causal": True, "deterministic": True}, {}, {}),
    "bshd": ({"layout": "bshd"}, {"q": (2, 130, 4, 64), "k": (2, 150, 2, 64), "v": (2, 150, 2, 64)}, {}),
    "heads": ({}, {"q": (4, 130, 64), "k": (4, 150, 64), "v": (4, 150, 64)}, {}),
    "transposed": ({}, {}, {}),  # q and k lie as in the layout "bshd"
    "decode": ({"causal": True}, {"q": (2, 4, 1, 64)}, {"kv_lengths": ((2,), INT32)}),
    "bias": ({"softcap": 3.0}, {}, {"bias": ((4, 130, 150), FLOAT32), "sinks": ((4,), FLOAT32)}),
    "dropout": ({"dropout": 0.25}, {}, {"mask": ((130, 150), torch.bool)}),
    "score": ({"score": gradual}, {}, {"table": ((4,), FLOAT32)}),
    "lse alone": ({"causal": True}, {"v": (2, 2, 150, 0)}, {}),
    "no queries": ({}, {"q": (2, 4, 0, 64)}, {}),
    "pages": (
        {},
        {"k": (9, 2, 64, 64), "v": (9, 2, 64, 64)},
        {"block_table": ((2, 3), INT32), "kv_lengths": ((2,), INT32)},
    ),
    "fp8": (
        {},
        {},
        {
            "k": ((2, 2, 150, 64), torch.float8_e4m3fn),
            "v": ((2, 2, 150, 64), torch.float8_e4m3fn),
            "k_scale": ((2, 2), FLOAT32),
            "v_scale": ((2, 2), FLOAT32),
        },
    ),
    "packed": (
        {"causal": True},
        {"q": (4, 130, 64), "k": (2, 150, 64), "v": (2, 150, 64)},
        {"cu_seqlens_q": ((3,), INT32), "cu_seqlens_k": ((3,), INT32)},
    ),
}
PASSES = ("forward", "backward", "jvp", "backward_jvp")


def problem(name, which, memory, dtype=torch.bfloat16):
    """A call and its tensors."""
    options, changed, others = CASES[name]
    of_case = SHAPES | changed
    shapes: dict[str, Any] = {own: (shape, dtype) for own, shape in of_case.items()} | others
    out = (*of_case["q"][:-1], of_case["v"][-1])
    rows = out[:-1] if options.get("layout") != "bshd" else (out[0], out[2], out[1])
    need: tuple[str, ...] = ()
    tangents = {"tk": shapes["k"]} if which in ("jvp", "backward_jvp") else {}
    if which in ("backward", "backward_jvp"):
        shapes |= {"dout": (out, dtype), "out": (out, dtype), "lse": (rows, FLOAT32)}
        need = ("dq", "dk", "dv", *(f"d{own}" for own in others if own in ("bias", "sinks", "table")))
    if tangents:
        shapes |= tangents
    if which == "backward_jvp":
        shapes |= {"tout": (out, dtype), "tlse": (rows, FLOAT32)}
        need = tuple(f"t{own}" for own in need)
    own = call(cuflash.FlashAttention(**options), tuple(shapes), need)
    tensors = [tensor(memory, like, of, FIRST + (n << 36)) for n, (like, of) in enumerate(shapes.values())]
    if name == "transposed":
        for x in tensors[:2]:
            _, heads, seqlen, columns = x.shape
            x.strides = (heads * seqlen * columns, columns, heads * columns, 1)
    return own, tensors


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("name", CASES)
def test_a_repeated_launch_gives_kernels_what_the_usual_way_gives_them(name, which, machine):
    own, first = problem(name, which, machine.memory)
    random = {"seed": 3, "offset": 4} if name == "dropout" else {}
    try:
        _, was_usual = machine.run(which, own, first, **random)
    except NotImplementedError:
        assert name in ("pages", "fp8")
        pytest.skip("no such pass")
    assert was_usual
    is_kept = len(machine.repeated_launches._repeated) == 1
    assert is_kept or name == "score"  # which may be other options, on other arrays
    for number in (0, 1, 2):
        own_random = {"seed": number + 2**40, "offset": number} if random else {}
        machine.current, there = number, at(first, number)
        found, was_usual = machine.run(which, own, there, **own_random)
        assert was_usual != is_kept
        assert found == machine.usual(which, own, there, **own_random)
        assert found[1] or name == "no queries"
        assert all(launch[4] == number for launch in found[1])


CHANGES = {
    "shape": lambda x: replace(x, shape=torch.Size((*x.shape[:-2], x.shape[-2] - 1, x.shape[-1]))),
    "stride": lambda x: replace(x, strides=(x.strides[0] * 2, *x.strides[1:])),
    "dtype": lambda x: replace(x, dtype=torch.float16),
    "alignment": lambda x: replace(x, address=x.address + 8),
    "device": lambda x: replace(x, index=1),
    "negative": lambda x: replace(x, negative=True),
}


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("change", [*CHANGES, "v in k", "need", "options", "pass"])
def test_the_signature_has_every_property(change, which):
    """Each on its own makes another signature, for whichever tensor; other addresses do not."""
    memory = Memory()
    own, first = problem("plain", which, memory)
    signature, addresses = of_torch._signature_of(which, own, first)
    assert addresses == [x.address for x in first]
    for number in range(len(first)):
        other, there, other_which = own, at(first, 1 + number), which
        assert of_torch._signature_of(which, own, there) == (signature, [x.address for x in there])
        if change in CHANGES:
            there[number] = CHANGES[change](there[number])
        elif change == "v in k":
            there[2].address = there[1].address
        elif change == "pass":
            other_which = "jvp"
        else:
            attn = cuflash.FlashAttention(causal=change == "options")
            other = call(attn, own.names, ("dv",) if change == "need" else own.need)
        other_signature, _ = of_torch._signature_of(other_which, other, there)
        assert other_signature != signature
        hash(other_signature)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*CHANGES]), st.integers(0, 2)), unique=True, max_size=4),
    st.lists(st.tuples(st.sampled_from([*CHANGES]), st.integers(0, 2)), unique=True, max_size=4),
)
def test_signatures_are_equal_if_all_properties_are(some, others):
    own, first = problem("plain", "forward", Memory())

    def changed(changes, tensors):
        for change, number in changes:
            tensors[number] = CHANGES[change](tensors[number])
        return tensors

    x, y = changed(some, at(first, 1)), changed(others, at(first, 2))
    properties = [[(a.shape, a.strides, a.dtype, a.index, a.address % 16, a.negative) for a in own] for own in (x, y)]
    signatures = [of_torch._signature_of("forward", own, tensors)[0] for tensors in (x, y)]
    assert (signatures[0] == signatures[1]) == (properties[0] == properties[1])


@pytest.mark.parametrize("change", [change for change in CHANGES if change != "device"])
def test_another_signature_goes_the_usual_way(change, machine):
    own, first = problem("plain", "forward", machine.memory)
    machine.run("forward", own, first)
    changed: list[Any] = [CHANGES[change](x) for x in first]
    for n in range(2):
        found, was_usual = machine.run("forward", own, changed)
        assert was_usual or (n and change != "negative")
        assert found == machine.usual("forward", own, changed)
    assert not machine.run("forward", own, at(first, 1))[1]


@pytest.mark.parametrize(
    "name", ["two launches", "merged axes", "copies", "another order", "an array made by the call"]
)
def test_what_a_launch_alone_does_not_do_goes_the_usual_way(name, machine):
    names: tuple[str, ...] = ("q", "k", "v")
    shapes: list[tuple[int, ...]] = [(2, 3, 4, 130, 64)] * 3
    if name == "another order":
        names, shapes = ("k", "q", "v"), [(2, 4, 130, 64)] * 3
    elif name == "copies":
        shapes = [(2, 4, 130, 64)] * 3
    elif name == "an array made by the call":  # int32 of int64
        names, shapes = (*names, "cu_seqlens_q", "cu_seqlens_k"), [(4, 130, 64)] * 3 + [(3,)] * 2
    tensors = [tensor(machine.memory, x, address=FIRST + (n << 36)) for n, x in enumerate(shapes)]
    if name == "copies":
        tensors[0].strides = (*tensors[0].strides[:-2], 1, 130)
    elif name == "two launches":
        tensors[1].strides = (0, *tensors[1].strides[1:])
    for x in tensors[3:]:
        x.dtype = torch.int64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(View, "astype", lambda self, dtype: machine._empty(self.shape, np.dtype(dtype)), raising=False)
        for _ in range(2):
            found, was_usual = machine.run("forward", call(cuflash.FlashAttention(), names), tensors)
            assert found[1] and was_usual
    assert not machine.repeated_launches._repeated


def test_recorded_calls_and_other_allocators_go_the_usual_way(machine):
    own, first = problem("plain", "forward", machine.memory)
    machine.run("forward", own, first)
    recording: Any = SimpleNamespace(work=lambda *args: None, spoil=lambda: None)
    of_thread.recording = recording
    try:
        assert machine.run("forward", own, first)[1]
    finally:
        of_thread.recording = None
    machine.memory.step = 8  # so that results are not aligned
    machine.memory.allocate(8)
    start = machine.memory.next
    before, machine.calls = machine.calls, 0
    machine.memory.next = start
    of_torch.run("forward", own, None, None, first)
    assert machine.calls
    machine.calls = before


def test_wrong_tensors_and_numbers_are_refused_as_ever(machine):
    own, first = problem("dropout", "forward", machine.memory)
    machine.run("forward", own, first, seed=1, offset=2)
    for seed, kind in ((-1, ValueError), (None, TypeError), ("1", TypeError)):
        messages = []
        for way in (machine.run, machine.usual):
            with pytest.raises((TypeError, ValueError)) as error:
                way("forward", own, first, seed=seed, offset=0)
            messages.append((error.type, str(error.value)))
        assert messages[0] == messages[1] and kind in (messages[0][0], TypeError)
    with pytest.raises(TypeError, match=r"^k: got a tensor on cuda:1, expected one on cuda:0 as q is"):
        machine.run("forward", own, [first[0], replace(first[1], index=1), *first[2:]], seed=1, offset=2)


def test_the_device_is_current_in_every_thread(machine):
    """And afterwards the one that was."""
    own, first = problem("plain", "backward", machine.memory)
    there = [replace(x, index=1) for x in first]
    machine.run("backward", own, there)
    found, was_usual = machine.run("backward", own, there)
    assert not was_usual
    assert {launch[5] for launch in found[1]} == {1}
    assert machine.thread.device == 0
    results = []
    thread = threading.Thread(target=lambda: results.append(machine.run("backward", own, there)))
    thread.start()
    thread.join()
    assert results == [(found, False)]


def test_launches_are_forgotten_and_bounded(machine, monkeypatch):
    own, first = problem("plain", "forward", machine.memory)
    for _ in range(2):
        assert machine.run("forward", own, first)[1]
        assert not machine.run("forward", own, first)[1]
        machine.launch_cache.forget_launches()
    monkeypatch.setattr(machine.launch_cache, "MAX_LAUNCHES", 4)
    for n in range(9):
        tensors = [replace(x, shape=torch.Size((2, x.shape[1], 40 + n, 64))) for x in first]
        assert machine.run("forward", own, tensors)[1]
        assert not machine.run("forward", own, tensors)[1]
        assert len(machine.repeated_launches._repeated) <= 4


def test_a_failing_launch_frees_scratch_memory_and_keeps_the_device(machine, monkeypatch):
    own, first = problem("plain", "backward", machine.memory)
    machine.run("backward", own, first)

    def fail(*args):
        raise RuntimeError("no launch")

    monkeypatch.setattr(machine.launch.Launch, "_launch_kernels", fail)
    machine.thread.device = 3
    with pytest.raises(RuntimeError, match="no launch"):
        of_torch.run("backward", own, None, None, first)
    assert not machine.memory.in_use
    assert machine.thread.device == 3


def calls_of(compute):
    """How many functions of the package a call enters, without comprehensions and lambdas."""
    entered = []

    def enter(frame, event, _):
        code = frame.f_code
        is_own = code.co_filename.startswith(PACKAGE) and "emulator" not in code.co_filename  # which encodes maps here
        if event == "call" and is_own and not code.co_name.startswith("<"):
            entered.append(code.co_name)

    sys.setprofile(enter)
    try:
        compute()
    finally:
        sys.setprofile(None)
    return entered


MOST = 12  # functions of the package that a repeated call enters; the usual way enters 35 to 55


@pytest.mark.parametrize("which", PASSES)
def test_a_repeated_call_enters_few_functions(which, machine):
    own, first = problem("plain", which, machine.memory)
    machine.run(which, own, first)
    entered = calls_of(lambda: of_torch.run(which, own, None, None, first))
    assert len(entered) <= MOST, entered
    usual = calls_of(lambda: machine.usual(which, own, first))
    assert len(usual) > 2 * len(entered)


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    strides=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    dtype=st.sampled_from([torch.bfloat16, FLOAT32, torch.float64]),
)
def test_a_view_is_said_to_have_the_memory_that_it_reaches(shape, strides, dtype):
    """Not more, of expanded tensors: tensor maps reach over keys after the last one if there is memory."""
    found = []
    cuda = SimpleNamespace(
        UnownedMemory=lambda address, size, owner, device: found.append((address, size)),
        MemoryPointer=lambda memory, offset: None,
    )
    x = Tensor(torch.Size(shape), dtype, FIRST, tuple(strides[: len(shape)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_torch, "_cupy", lambda: SimpleNamespace(cuda=cuda, ndarray=View))
        of_torch.cupy_view(x)
    offsets = [sum(i * step for i, step in zip(at, x.strides, strict=True)) for at in np.ndindex(*shape)]
    assert found == [(FIRST, (max(offsets) + 1) * dtype.itemsize if offsets else 0)]


def test_kernels_that_overlap_are_launched_on_the_stream_of_the_call(machine, monkeypatch):
    """By cuLaunchKernelEx, with the argument of the usual way."""
    found: list[Any] = []

    def launch(config, handle, argument, _extra):
        found.append((config, ctypes.string_at(ctypes.c_uint64.from_address(argument).value, machine.sizes[handle])))
        return (0,)

    runtime: Any = sys.modules["cupy"].cuda.runtime  # type: ignore[attr-defined]
    device: Any = sys.modules["cuflash.gpu.device"]
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: device.OVERLAP_IN_GRAPHS)
    monkeypatch.setattr(machine.launch, "cuda_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(device, "_overlapping_config", lambda *sizes_and_stream: sizes_and_stream)
    own, first = problem("causal", "backward", machine.memory)
    machine.run("backward", own, first)
    overlaps = [kernel for x in machine.launch_cache._launches.values() for kernel in x.kernels if kernel.config_of]
    assert overlaps or machine.arch == "8.0"
    for machine.current in (3, 4):
        launched = []
        for way in (machine.run, machine.usual):
            found.clear()
            way("backward", own, at(first, 1))
            launched.append(tuple(found))
        assert launched[0] == launched[1]
        assert len(launched[0]) == len(overlaps)
        assert all(config[-1] == machine.current for config, _ in launched[0])
