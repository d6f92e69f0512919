"""What is left of recorded waits: everything comes after what it came after before."""

import types
from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuflash.gpu.replay import _needed, _Step, reach

STREAMS = 4
KINDS = st.sampled_from(["work", "mark", "wait"])


def pasts(steps):
    """By work, which of the earlier ones it comes after, and last those that the stream of the call waits for."""
    past, at, found = defaultdict(set), {}, {}
    for step in steps:
        if step.op == "work":
            past[step.stream].add(step.locations)
            found[step.locations] = frozenset(past[step.stream])
        elif step.op == "mark":
            at[id(step.event)] = frozenset(past[step.stream])
        else:
            past[step.stream] |= at[id(step.event)]
    return found, past[0]


@given(st.lists(st.tuples(KINDS, st.integers(0, STREAMS - 1), st.integers(0, 9)), max_size=40))
def test_waits_that_order_nothing_are_left_out(drawn):
    """Work has numbers, in place of addresses."""
    events, steps = [object()], [_Step("work", 0, locations=((-1, 0),))]
    steps.append(_Step("mark", 0, events[0]))
    for number, (op, stream, which) in enumerate(drawn):
        if op == "work":
            steps.append(_Step("work", stream, locations=((number, 0),)))
        elif op == "mark":
            events.append(object())
            steps.append(_Step("mark", stream, events[-1]))
        else:
            steps.append(_Step("wait", stream, events[which % len(events)]))
    kept = _needed(steps)
    assert pasts(kept) == pasts(steps)
    rest = iter(steps)
    assert all(step in rest for step in kept)  # in their order
    marked = [id(step.event) for step in kept if step.op == "mark"]
    assert set(marked) == {id(step.event) for step in kept if step.op == "wait"}


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([(1, 1), (-1, 1), (1, -1)]))
def test_the_bytes_that_an_array_reaches(rows, columns, signs):
    steps = (signs[0] * 64, signs[1] * 4)
    array = types.SimpleNamespace(
        shape=(rows, columns), strides=steps, dtype=np.dtype("float32"), data=types.SimpleNamespace(ptr=1000)
    )
    locations = [1000 + i * steps[0] + j * steps[1] for i in range(rows) for j in range(columns)]
    assert reach(array) == (min(locations), max(locations) + 4)
