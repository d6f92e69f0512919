"""What calls on two streams come after, and how long they keep memory: on streams that know what came before them."""

import contextlib
import types
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuflash.distributed.streams import CudaStreams, StreamsOfDevice, copy_rows, wide_layout


class Stream:
    """What is done on it, and what it has waited for, as names."""

    current: "Stream"

    def __init__(self, non_blocking=False):
        self.past = set()

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


def begun():
    """The caller's stream, and streams beside it."""
    Stream.current = main = Stream()
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(Stream=Stream, Event=Event, get_current_stream=lambda: Stream.current)
    )
    main.do("before")
    return main, CudaStreams(cupy).begin()


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5))
def test_calls_come_after_rows_and_before_what_follows(steps):
    """`steps` has the numbers of the calls of each."""
    main, streams = begun()
    for step, calls in enumerate(steps):
        main.do(f"copied {step}")
        mark = streams.mark()
        main.do(f"later {step}")
        streams.arrive(lambda step=step: Stream.current.do(f"rows {step}"), mark)
        for call in calls:
            with streams.of_call(call):
                assert {"before", f"copied {step}", f"rows {step}"} <= Stream.current.past
                assert (Stream.current is main) == (call % 2 == 0)
                Stream.current.do(f"call {step} {call}")
        streams.next_step()
    streams.end()
    assert {f"call {step} {call}" for step, calls in enumerate(steps) for call in calls} <= main.past


def test_a_stream_does_not_wait_for_the_calls_of_the_other_in_the_same_step():
    _, streams = begun()
    with streams.of_call(0):
        Stream.current.do("long")
    with streams.of_call(1):
        assert "long" not in Stream.current.past


@given(st.integers(1, 6))
def test_memory_lives_until_neither_stream_needs_it(steps):
    main, streams = begun()
    kept = {}
    for step in range(steps):
        memory = Memory()
        streams.keep(memory)
        kept[step] = weakref.ref(memory)
        del memory
        for call in range(2):
            with streams.of_call(call):
                Stream.current.do(f"call {step} {call}")
        streams.next_step()
        pasts = []
        for call in range(2):
            with streams.of_call(call):
                pasts.append(Stream.current.past)
        for done, reference in kept.items():
            is_over = all({f"call {done} 0", f"call {done} 1"} <= past for past in pasts)
            assert reference() is not None or is_over
        assert sum(reference() is not None for reference in kept.values()) <= 2
    streams.end()
    assert all(reference() is None for reference in kept.values())
    with streams.of_call(1):
        assert Stream.current.past >= main.past


def test_host_memory_has_no_lanes():
    streams, log = StreamsOfDevice().begin(np.zeros(3)), []
    streams.arrive(lambda: log.append("rows"), streams.mark())
    streams.keep(log)
    with streams.of_call(1):
        log.append("call")
    streams.next_step()
    streams.end()
    assert log == ["rows", "call"]


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


def test_a_device_copies_elements_of_16_bytes(monkeypatch):
    """Where rows allow; others as they are."""
    copied = []

    class OnDevice:
        def __init__(self, shape, dtype, memptr=None, strides=None):
            self.shape, self.dtype, self.itemsize = tuple(shape), np.dtype(dtype), np.dtype(dtype).itemsize
            self.data = memptr or types.SimpleNamespace(ptr=4096)
            self.strides = strides or np.empty(shape, dtype).strides

        def __setitem__(self, index, source):
            copied.append((self.dtype.name, self.shape, source.dtype.name, source.shape))

    monkeypatch.setattr("cuflash.distributed.streams.module_of", lambda array: types.SimpleNamespace(ndarray=OnDevice))
    copy_rows(OnDevice((2, 3, 64), np.float16), OnDevice((2, 3, 64), np.float16))
    copy_rows(OnDevice((2, 3, 5), np.float16), OnDevice((2, 3, 5), np.float16))
    assert copied == [
        ("complex128", (2, 3, 8), "complex128", (2, 3, 8)),
        ("float16", (2, 3, 5), "float16", (2, 3, 5)),
    ]
