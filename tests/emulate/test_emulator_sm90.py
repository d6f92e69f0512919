"""The emulator reports the mistakes of ``planted_bugs_sm90.cu``, at the right line."""

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.emulator import SCHEDULES, EmulationError, build, guarded_array, tensor_map
from cuflash.emulator.building import HERE as EMULATOR
from cuflash.gpu.compiler import kernel_directory
from tests.sampling import examples

HERE = Path(__file__).resolve().parent
KERNELS = kernel_directory()

SOURCE = HERE / "planted_bugs_sm90.cu"
PARAMS = np.dtype(
    [
        ("map", np.uint64, 16),
        ("source", np.uint64),
        ("destination", np.uint64),
        ("count", np.uint32),
        ("padding", np.uint32, 11),
    ]
)
WARPGROUP = 128
SHARED_BYTES = 1024 + 2 * 64 * 128 + 16 + 1024

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def launch(kernel, *, grid=1, threads=WARPGROUP, **options):
    source = guarded_array(1024, np.uint8, fill=0)
    destination = guarded_array((8, 64), np.uint16, fill=0)
    params = np.zeros((), PARAMS)
    address = destination.ctypes.data
    params["map"] = tensor_map(address, 2, (64, 8, 1, 1), (128, 1024, 1024), (64, 8, 1, 1))
    params["source"], params["destination"], params["count"] = source.ctypes.data, address, 1
    build(SOURCE).launch(kernel, params, grid=grid, threads=threads, shared_bytes=SHARED_BYTES, **options)


@functools.cache
def marked_line(kernel):
    """The number of the line marked ``caught: kernel``, or None."""
    for number, line in enumerate(SOURCE.read_text().splitlines(), 1):
        if re.search(rf"// caught: {kernel}$", line):
            return number
    return None


# Which of two accesses that nothing orders comes second is a matter of the schedule.
UNORDERED = "data race: (reads|writes) .* with no barrier between"
BOX_READ = (
    "data race: (reads|writes) .* a barrier_wait, or a barrier behind it, is missing|"
    f"reads .* in flight: a barrier_wait is missing|{UNORDERED}"
)
# Kernel, and what the report says.
BUGS = [
    ("barrier_without_init", "no barrier at offset .* a barrier_init is missing"),
    ("barrier_made_twice", "a barrier at offset .* already"),
    ("barrier_used_at_once", "no barrier at offset|data race: uses the barrier .* made at planted_bugs_sm90.cu:"),
    ("barrier_written_over", "the barrier at offset .* was written over"),
    ("too_many_arrivals", "one more than the 1 arrivals"),
    (
        "missing_arrival",
        r"deadlock: .*\n  threads 0 to 127 wait in barrier_wait \(barrier at offset \d+, parity 0; missing in this "
        r"phase: 1 arrivals of 4, 0 bytes\) at planted_bugs_sm90.cu:",
    ),
    ("arrival_of_one", UNORDERED),
    (
        "named_counts_differ",
        "named barrier 1: (64|128) threads take part, others said (64|128)|deadlock: .*\n.* in sync_named",
    ),
    ("named_half_warps", "divergent warp: only some lanes took part in named barrier 1"),
    ("named_arrival_repeated", "arrives twice at named barrier 3 before it opens"),
    ("named_deadlock", r"deadlock: .*\n  threads 0 to 63 wait in sync_named \(barrier 2; 64 of 128 threads"),
    ("named_any_of_some", "named barrier 1: the thread calls sync_named(_any)? here, which others"),
    ("named_zero", "there is no named barrier 0"),
    ("read_after_arrival", UNORDERED),
    ("wrong_parity", BOX_READ),
    ("missing_barrier_wait", BOX_READ),
    ("unannounced_bytes", "more bytes than announced|bytes more than announced"),
    ("too_few_bytes", "can never end: copies bring 16 bytes more than announced"),
    ("too_many_bytes", r"deadlock: (.*\n)*.*missing in this phase: 0 arrivals of 1, 16 bytes\)"),
    ("missing_fence_barrier_init", "missing fence_barrier_init"),
    ("tile_in_use", f"data race: writes .* which thread .* read at|{BOX_READ}"),
    ("tile_freed_early", "data race: writes .* which thread .* read at"),
    ("missing_fence_before_load", "missing fence_async_proxy: overwrites .* wrote at"),
    ("missing_fence_after_reads", "missing fence_async_proxy: overwrites .* read at"),
    ("load_overrun", "invalid memory access|out of bounds"),
    ("load_misaligned", "misaligned shared address: .* multiple of 128"),
    ("load_of_odd_column", "column 4 of a tensor copy .* illegal instruction"),
    ("no_tensor_map", "tensor map"),
    ("missing_fence_before_store", "missing fence_async_proxy: reads"),
    ("missing_barrier_before_store", f"{UNORDERED}|.* bulk_wait_read"),
    ("store_to_negative", "coordinate -1 of a tensor copy is negative"),
    ("store_source_changed", "data race: writes .* reads: a bulk_wait_read, or a barrier behind it, is missing"),
    ("store_wait_too_short", "data race: writes .* reads: a bulk_wait_read, or a barrier behind it, is missing"),
    ("store_left", "exits with this copy in flight: a bulk_wait_read is missing"),
    ("addition_of_16_bits", "adds elements of 2 bytes: only float32 is emulated"),
    ("store_uncommitted", "exits with this copy in flight: a bulk_commit is missing"),
    ("missing_fence_before_product", "missing fence_async_proxy: reads"),
    ("missing_wait_before_product", BOX_READ),
    ("operand_overwritten", "data race: writes .* reads: a wgmma_wait, or a barrier behind it, is missing"),
    ("load_over_operand", "data race: writes .* reads: a wgmma_wait, or a barrier behind it, is missing"),
    ("accumulator_written", "the accumulator of this product was written while it was in flight"),
    ("accumulators_overlap", "the accumulator overlaps that of the product in flight"),
    ("product_left", "exits with this product in flight: a wgmma_wait is missing"),
    ("missing_fence_products", "missing wgmma_fence before the first product"),
    ("missing_second_fence", "missing wgmma_fence: the accumulator"),
    ("register_operand_changed", "the operand in registers of this product changed while it was in flight"),
    ("products_differ", "divergent warpgroup: the thread issues another product"),
    ("descriptor_unswizzled", "without the 128-byte swizzle"),
    ("descriptor_past_line", "the operand starts at byte 112 of its lines, and takes 32 bytes"),
    ("descriptor_misaligned", "both must be multiples of 1024"),
    ("descriptor_past_shared", "out of bounds"),
    ("negative_kept", "the value is negative, -1"),
    ("matrices_overlap", "data race: writes .* wrote at"),
    (
        "too_many_registers",
        r"deadlock: (.*\n)*.* wait in increase_registers \(of 240 registers a thread; \d+ of the block",
    ),
    ("increase_to_less", "a thread of 168 registers cannot have 24"),
    ("registers_of_some_warps", "deadlock: .*(.*\n)*.* wait in decrease_registers"),
]
THREADS = {"too_many_registers": 3 * WARPGROUP, "increase_to_less": 3 * WARPGROUP}


@pytest.mark.one_of("schedule")
@every_schedule
@pytest.mark.parametrize(("kernel", "words"), BUGS, ids=[row[0] for row in BUGS])
def test_planted_bug_is_reported(kernel, words, schedule):
    with pytest.raises(EmulationError, match=words) as caught:
        launch(kernel, schedule=schedule, threads=THREADS.get(kernel, WARPGROUP))
    error = caught.value
    assert error.kernel == kernel
    line = marked_line("bad_descriptor" if kernel.startswith("descriptor_") else kernel)
    if line:
        assert (Path(error.file).name, error.line) == (SOURCE.name, line)


def test_a_load_that_nobody_waits_for_is_reported():
    with pytest.raises(EmulationError, match="the block ends with this load in flight") as caught:
        launch("load_left")
    assert caught.value.line == marked_line("load_left")


@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule.asynchrony == "late"], ids=str)
def test_an_accumulator_read_in_flight_is_reported(schedule):
    with pytest.raises(EmulationError, match="uses an accumulator of a product in flight") as caught:
        launch("accumulator_read", schedule=schedule)
    assert caught.value.line == marked_line("accumulator_read")


# The same of kernels whose blocks are clusters of two.
BUGS_IN_CLUSTERS = [
    ("cluster_not_ready", "no barrier at offset|data race: uses the barrier .* made at planted_bugs_sm90.cu:"),
    ("cluster_left", "block [01] of the cluster (may exit before the arrival|has exited)"),
    ("cluster_arrival_missing", r"(?s)deadlock: .* missing in this phase: 1 arrivals of 2, 0 bytes"),
    ("cluster_box_in_use", f"{UNORDERED}|data race: (reads|writes) .* is missing|(reads|writes) .* in flight"),
    ("remote_misplaced", "a store to another block counts on a barrier of that block, not of block [01]"),
    ("remote_in_use", f"{UNORDERED}|data race: writes .* is missing|(reads|writes) .* in flight"),
    ("remote_not_waited_for", "uninitialised|data race: (reads|writes)|(reads|writes) .* in flight"),
]


@pytest.mark.one_of("schedule")
@every_schedule
@pytest.mark.parametrize(("kernel", "words"), BUGS_IN_CLUSTERS, ids=[row[0] for row in BUGS_IN_CLUSTERS])
def test_a_bug_planted_in_a_cluster_is_reported(kernel, words, schedule):
    with pytest.raises(EmulationError, match=words) as caught:
        launch(kernel, grid=2, schedule=schedule)
    if kernel not in ("cluster_box_in_use", "remote_in_use", "remote_not_waited_for"):  # where either block reads
        assert caught.value.line == marked_line(kernel)


def test_clusters_are_whole():
    with pytest.raises(EmulationError, match="blocks, in clusters: 3, allowed 2"):
        launch("cluster_left", grid=3)


@every_schedule
def test_no_mistake_is_not_reported(schedule):
    launch("no_mistake", schedule=schedule)


def test_every_planted_bug_is_tested():
    kernels = set(re.findall(r"^CUFLASH_DEFINE_(?:CLUSTER_)?KERNEL\((\w+)", SOURCE.read_text(), re.MULTILINE))
    buggy = {kernel for kernel, _ in (*BUGS, *BUGS_IN_CLUSTERS)}
    assert kernels == buggy | {"load_left", "accumulator_read", "no_mistake", "script"}


# ---- Order, against a definition of it -------------------------------------------------------------------------------

STEP = np.dtype([("action", np.uint32), ("actor", np.uint32), ("offset", np.uint32), ("barrier", np.uint32)])
SYNC, COLLECTIVE, HAND_OVER, LOAD, STORE, ARRIVE, WAIT, FENCE, COPY = range(9)
WARP, CELL_BYTES, BARRIERS = 32, 16, 6

threads = st.sampled_from([0, 1, 31, 32, 63])
steps = st.one_of(
    st.tuples(st.sampled_from([LOAD, STORE]), threads, st.sampled_from([0, 6, 16]), st.just(0)),
    st.tuples(st.sampled_from([LOAD, STORE]), threads, st.sampled_from([0, 6, 16]), st.just(0)),
    st.tuples(st.sampled_from([ARRIVE, WAIT]), threads, st.just(0), st.integers(0, BARRIERS - 1)),
    st.tuples(st.just(COPY), threads, st.sampled_from([0, 16]), st.integers(0, BARRIERS - 1)),
    st.tuples(st.just(FENCE), threads, st.just(0), st.just(0)),
    st.tuples(st.sampled_from([COLLECTIVE, HAND_OVER]), st.integers(0, 1), st.just(0), st.just(0)),
    st.just((SYNC, 0, 0, 0)),
)


def runnable(script):
    """The script with one phase of each barrier, no waits for what does not come, and waits for every copy."""
    used, kept, copied = set(), [], []
    for step in script:
        action, _, _, barrier = step
        if (action in (ARRIVE, COPY) and barrier in used) or (action == WAIT and barrier not in used):
            continue
        if action in (ARRIVE, COPY):
            used.add(barrier)
        if action == COPY:
            copied.append(barrier)
        kept.append(step)
    return kept + [(WAIT, 0, 0, barrier) for barrier in copied]


def is_wrong(script):
    """Whether two accesses, one of them a write, are not ordered, or a copy overwrites what no fence follows."""
    known: list[set[int]] = [set() for _ in range(2 * WARP)]  # steps that happened before what the thread does next
    at_barrier = {}
    warps = [range(WARP), range(WARP, 2 * WARP)]

    def together(learning, telling):
        passed_on = set().union(*(known[thread] for thread in telling))
        for thread in learning:
            known[thread] |= passed_on

    for i, (action, actor, offset, barrier) in enumerate(script):
        if action == SYNC:
            together(range(2 * WARP), range(2 * WARP))
        elif action == COLLECTIVE:
            together(warps[actor], warps[actor])
        elif action == HAND_OVER:
            together(warps[1 - actor], range(2 * WARP))
        elif action == ARRIVE:
            at_barrier[barrier] = set(known[actor])
        elif action == WAIT:
            known[actor] |= at_barrier[barrier]
        elif action == FENCE:
            known[actor].add(i)
        else:
            touched = set(range(offset, offset + (CELL_BYTES if action == COPY else 2)))
            unfenced = set(touched)
            for j in range(i - 1, -1, -1):
                action_0, actor_0, offset_0, _ = script[j]
                bytes_0 = set(range(offset_0, offset_0 + {LOAD: 2, STORE: 2, COPY: CELL_BYTES}.get(action_0, 0)))
                if bytes_0 & touched and (action, action_0) != (LOAD, LOAD) and j not in known[actor]:
                    return True
                if action == COPY and action_0 in (LOAD, STORE) and bytes_0 & unfenced:
                    fences = (k for k in range(j + 1, i) if script[k][:2] == (FENCE, actor_0))
                    if not any(k in known[actor] for k in fences):
                        return True
                if action_0 in (STORE, COPY):
                    unfenced -= bytes_0
            if action == COPY:
                at_barrier[barrier] = known[actor] | {i}
            else:
                known[actor].add(i)
    return False


@settings(max_examples=examples(1000))
@given(script=st.lists(steps, max_size=14).map(runnable), schedule=st.sampled_from(SCHEDULES))
def test_what_is_not_ordered_is_reported_whatever_the_schedule(script, schedule):
    source = np.array(script or [(SYNC, 0, 0, 0)], STEP)
    params = np.zeros((), PARAMS)
    placed = guarded_array(source.shape, STEP)
    placed[...] = source
    params["source"], params["count"] = placed.ctypes.data, len(script)

    def run():
        build(SOURCE).launch("script", params, grid=1, threads=2 * WARP, shared_bytes=SHARED_BYTES, schedule=schedule)

    if is_wrong(script):
        with pytest.raises(EmulationError, match=r"data race|missing fence_async_proxy|in flight"):
            run()
    else:
        run()


def test_the_definition_tells_right_from_wrong():
    copy_and_read = [(STORE, 0, 0, 0), (FENCE, 0, 0, 0), (COPY, 0, 0, 1), (WAIT, 32, 0, 1), (LOAD, 32, 6, 0)]
    assert not is_wrong(copy_and_read)
    assert is_wrong([step for step in copy_and_read if step[0] != FENCE])
    assert is_wrong([step for step in copy_and_read if step[0] != WAIT])
    assert is_wrong([*copy_and_read, (COPY, 32, 0, 2)])
    assert not is_wrong([*copy_and_read, (FENCE, 32, 0, 0), (COPY, 32, 0, 2)])


# ---- Tensor maps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": 8}, "address must be a multiple of 16"),
        ({"dims": (64, 0, 1, 1)}, "dims must lie between"),
        ({"dims": (64, 8, 1)}, "4 dims, 3 strides"),
        ({"strides": (120, 1024, 1024)}, "strides must be positive multiples of 16"),
        ({"strides": (-128, 1024, 1024)}, "strides must be positive multiples of 16"),
        ({"box": (64, 257, 1, 1)}, "box sizes must lie between 1 and 256"),
        ({"box": (128, 8, 1, 1)}, "a row of the box must have"),
        ({"box": (60, 8, 1, 1)}, "a row of the box must have"),
    ],
)
def test_tensor_map_refuses_what_the_driver_refuses(change, words):
    right: dict[str, Any] = {
        "address": 0,
        "element_bytes": 2,
        "dims": (64, 8, 1, 1),
        "strides": (128,) * 3,
        "box": (64, 8, 1, 1),
    }
    assert tensor_map(**right).nbytes == 128
    with pytest.raises(ValueError, match=words):
        tensor_map(**{**right, **change})


# ---- Completeness ----------------------------------------------------------------------------------------------------


def functions_of(*paths):
    """Names of the functions defined in namespace ptx."""
    text = "\n".join(path.read_text() for path in paths)
    return set(re.findall(r"^\s*CUFLASH_DEVICE (?:constexpr )?\w+ (\w+)\(", text, re.MULTILINE))


def test_every_function_is_emulated_and_checked():
    functions = functions_of(*(KERNELS / "ptx" / f"{part}.cuh" for part in ("tma", "wgmma")))
    assert functions - {"descriptor"} == functions_of(EMULATOR / "ptx_sm90_emulated.h")
    used = set(re.findall(r"ptx::(\w+)", (HERE / "conformance_sm90.cu").read_text()))
    assert functions <= used
