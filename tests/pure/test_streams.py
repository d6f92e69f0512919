"""What calls on two streams come after, and how long they keep memory: on streams that know what came before them."""

import contextlib
import functools
import sys
import types
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuflash.distributed import streams as distributed_streams
from cuflash.distributed.streams import AT_ONCE, STEPS_APART, CudaStreams, StreamsOfDevice, copy_all
from cuflash.gpu.elementwise import wide_layout


class Stream:
    """What is done on it, and what it has waited for, as names."""

    current: "Stream"

    def __init__(self, non_blocking=False, priority=0):
        self.past, self.priority = set(), priority

    def do(self, name):
        self.past.add(name)

    def wait_event(self, event):
        self.past |= event.past

    @contextlib.contextmanager
    def _made_current(self):
        before, Stream.current = Stream.current, self
        yield
        Stream.current = before

    def __enter__(self):
        self._entered = self._made_current()
        self._entered.__enter__()

    def __exit__(self, *error):
        self._entered.__exit__(*error)


class Event:
    past: frozenset[str] = frozenset()

    def __init__(self, disable_timing=False):
        assert disable_timing

    def record(self, stream):
        self.past = frozenset(stream.past)


class Memory:
    pass


CUPY = types.SimpleNamespace(
    cuda=types.SimpleNamespace(Stream=Stream, Event=Event, get_current_stream=lambda: Stream.current)
)


def begun():
    """The caller's stream, and other streams."""
    Stream.current = main = Stream()
    main.do("before")
    return main, CudaStreams(CUPY).begin()


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5))
def test_calls_come_after_rows_and_before_what_follows(steps):
    """`steps` has the numbers of the calls of each."""
    main, streams = begun()
    for step, calls in enumerate(steps):
        main.do(f"later {step}")
        with streams.rows():
            assert "before" in Stream.current.past
            assert step == 0 or f"later {step}" not in Stream.current.past
            Stream.current.do(f"rows {step}")
        streams.arrived()
        for call in calls:
            with streams.of_call(call):
                assert {"before", f"rows {step}"} <= Stream.current.past
                Stream.current.do(f"call {step} {call}")
        with streams.returns():
            assert {f"call {step} {call}" for call in calls} <= Stream.current.past
            Stream.current.do(f"returned {step}")
        streams.next_step()
    streams.end()
    assert {f"call {step} {call}" for step, calls in enumerate(steps) for call in calls} <= main.past
    assert {f"returned {step}" for step in range(len(steps))} <= main.past


def test_a_stream_does_not_wait_for_the_calls_of_the_other():
    """In the same step, and in the next one."""
    _, streams = begun()
    with streams.of_call(0):
        Stream.current.do("long")
    with streams.of_call(1):
        assert "long" not in Stream.current.past
    with streams.returns():
        Stream.current.do("returned")
    streams.next_step()
    with streams.of_call(0):
        assert "long" not in Stream.current.past
    for call in range(2):
        with streams.of_call(call):
            assert "returned" not in Stream.current.past


@given(st.integers(1, 6))
def test_calls_of_steps_in_turn_come_after_those_of_the_step_before(steps):
    _, streams = begun()
    for step in range(steps):
        streams.arrived(in_turn=True)
        for call in range(2):
            with streams.of_call(call):
                assert {f"call {before} {other}" for before in range(step) for other in range(2)} <= Stream.current.past
                assert f"call {step} {1 - call}" not in Stream.current.past
                Stream.current.do(f"call {step} {call}")
        streams.next_step()


@given(st.integers(1, 6))
def test_memory_lives_until_no_stream_needs_it(steps):
    main, streams = begun()
    streams_of = [functools.partial(streams.of_call, 0), functools.partial(streams.of_call, 1), streams.rows]
    kept = {}
    for step in range(steps):
        memory = Memory()
        streams.keep(memory)
        kept[step] = weakref.ref(memory)
        del memory
        for number, stream in enumerate([*streams_of, streams.returns]):
            with stream():
                Stream.current.do(f"use {step} {number}")
        streams.next_step()
        pasts = []
        for stream in streams_of:
            with stream():
                pasts.append(set(Stream.current.past))
        for done, reference in kept.items():
            is_over = all({f"use {done} {number}" for number in range(4)} <= past for past in pasts)
            assert reference() is not None or is_over
        assert sum(reference() is not None for reference in kept.values()) < STEPS_APART
    streams.end()
    assert all(reference() is None for reference in kept.values())
    for stream in streams_of:
        with stream():
            assert Stream.current.past >= main.past


def test_what_is_of_an_earlier_step_goes_before_what_is_of_a_later_one():
    _, streams = begun()
    found = []
    for _ in range(4):
        of_step = []
        for call in range(3):
            with streams.of_call(call):
                of_step.append(Stream.current)
        assert of_step[0] is of_step[2] is not of_step[1]
        found.append(of_step)
        streams.next_step()
    priorities = [[stream.priority for stream in of_step] for of_step in found]
    assert priorities == sorted(priorities)
    assert found[2][0] is not found[3][0]
    for of_all in (streams.rows, streams.returns):
        with of_all():
            assert Stream.current.priority < priorities[0][0]


def test_each_device_has_streams_of_its_own(monkeypatch):
    monkeypatch.setattr(distributed_streams, "module_of", lambda array: CUPY)
    Stream.current, of_devices = Stream(), StreamsOfDevice()
    arrays = [types.SimpleNamespace(device=types.SimpleNamespace(id=device)) for device in (0, 1, 0)]
    first, other, again = (of_devices.begin(array) for array in arrays)
    assert first is again is not other


def test_host_memory_has_no_streams():
    streams, log = StreamsOfDevice().begin(np.zeros(3)), []
    with streams.rows():
        log.append("rows")
    streams.arrived()
    streams.keep(log)
    with streams.of_call(1):
        log.append("call")
    with streams.returns():
        log.append("returned")
    streams.next_step()
    streams.end()
    assert log == ["rows", "call", "returned"]


@given(st.data(), st.sampled_from([np.float16, np.float32, np.float64]))
def test_rows_in_elements_of_16_bytes_are_the_same_memory(data, dtype):
    shape = [*data.draw(st.lists(st.integers(1, 3), max_size=3)), data.draw(st.sampled_from([1, 4, 8, 10, 16, 24]))]
    numbers = np.random.default_rng(0).standard_normal((*(n + 1 for n in shape[:-1]), shape[-1] + 8)).astype(dtype)
    order = (*data.draw(st.permutations(range(len(shape) - 1))), len(shape) - 1)
    array = numbers[tuple(slice(n) for n in shape)].transpose(order)
    start = data.draw(st.sampled_from([0, 0, 1]))  # of the allocation, in elements
    layout = wide_layout(array.shape, array.strides, array.itemsize, start * array.itemsize)
    own = [step for step, n in zip(array.strides[:-1], array.shape[:-1], strict=True) if n > 1]
    bytes_of_row = array.shape[-1] * array.itemsize
    assert (layout is not None) == (start == 0 and all(x % 16 == 0 for x in (bytes_of_row, *own)))
    if layout is not None:
        found = np.ndarray(layout[0], np.complex128, buffer=numbers, strides=layout[1])
        np.testing.assert_array_equal(np.ascontiguousarray(found).view(dtype).reshape(array.shape), array)


def test_a_device_copies_elements_of_16_bytes_of_several_arrays_at_once(monkeypatch):
    """Where rows allow; others as they are."""
    copied = []

    class OnDevice:
        def __init__(self, shape, dtype, memptr=None, strides=None):
            self.shape, self.dtype, self.itemsize = tuple(shape), np.dtype(dtype), np.dtype(dtype).itemsize
            self.data = memptr or types.SimpleNamespace(ptr=4096)
            self.strides = strides or np.empty(shape, dtype).strides

        def __setitem__(self, index, source):
            copied.append([(self.dtype.name, self.shape)])

    def kernel(sources, targets, code, name):
        count = len(code.split(";"))
        assert len(sources.split(",")) == len(targets.split(",")) == count <= AT_ONCE
        return lambda *arrays: copied.append([(x.dtype.name, x.shape) for x in arrays[count:]])

    fake = types.ModuleType("cupy")
    fake.__dict__.update(ndarray=OnDevice, ElementwiseKernel=kernel)
    monkeypatch.setattr("cuflash.distributed.streams.module_of", lambda array: fake)
    monkeypatch.setitem(sys.modules, "cupy", fake)

    def pairs(shape, count):
        return [(OnDevice(shape, np.float16), OnDevice(shape, np.float16)) for _ in range(count)]

    copy_all([*pairs((2, 3, 64), 2), *pairs((2, 3, 5), 2), *pairs((7, 64), AT_ONCE + 1), *pairs((2, 3, 64), 1)])
    assert sorted(copied, key=str) == sorted(
        [
            [("float16", (2, 3, 5))], [("float16", (2, 3, 5))],
            [("complex128", (2, 3, 8))] * 3, [("complex128", (7, 8))] * AT_ONCE, [("complex128", (7, 8))],
        ],
        key=str,
    )  # fmt: skip


def test_host_memory_is_copied_as_it_is():
    sources, targets = ([np.full((2, 3), x + i) for i in range(3)] for x in (1, 5))
    copy_all(list(zip(targets, sources, strict=True)))
    np.testing.assert_array_equal(targets, sources)
