"""The emulator reports the mistakes of ``planted_bugs_sm90.cu``, in the right place."""

import functools
import re
from pathlib import Path

import emulator
import numpy as np
import pytest
from emulator import HERE, SCHEDULES, EmulationError, build, find_compiler, guarded_array, tensor_map

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: g++ is not on the path")

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


def launch(kernel, *, threads=WARPGROUP, **options):
    source = guarded_array(1024, np.uint8, fill=0)
    destination = guarded_array((8, 64), np.uint16, fill=0)
    params = np.zeros((), PARAMS)
    address = destination.ctypes.data
    params["map"] = tensor_map(address, 2, (64, 8, 1, 1), (128, 1024, 1024), (64, 8, 1, 1))
    params["source"], params["destination"], params["count"] = source.ctypes.data, address, 1
    build(SOURCE).launch(kernel, params, grid=1, threads=threads, shared_bytes=SHARED_BYTES, **options)


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
PLANTED = [
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
    ("missing_fence_before_load", "missing fence_async_proxy: overwrites"),
    ("load_overrun", "invalid memory access|out of bounds"),
    ("load_misaligned", "misaligned shared address: .* multiple of 128"),
    ("load_of_odd_column", "column 4 of a tensor copy .* illegal instruction"),
    ("no_tensor_map", "tensor map"),
    ("missing_fence_before_store", "missing fence_async_proxy: reads"),
    ("missing_barrier_before_store", f"{UNORDERED}|.* bulk_wait_read"),
    ("store_to_negative", "coordinate -1 of a tensor store is negative"),
    ("store_source_changed", "data race: writes .* reads: a bulk_wait_read, or a barrier behind it, is missing"),
    ("store_wait_too_short", "data race: writes .* reads: a bulk_wait_read, or a barrier behind it, is missing"),
    ("store_left", "exits with this copy in flight: a bulk_wait_read is missing"),
    ("store_uncommitted", "exits with this copy in flight: a bulk_commit is missing"),
    ("reduction_misaligned", "bulk copy of 16 bytes at .*: both are multiples of 16"),
    ("missing_fence_before_product", "missing fence_async_proxy: reads"),
    ("missing_wait_before_product", BOX_READ),
    ("operand_overwritten", "data race: writes .* reads: a wait_products, or a barrier behind it, is missing"),
    ("load_over_operand", "data race: writes .* reads: a wait_products, or a barrier behind it, is missing"),
    ("accumulator_written", "the accumulator of this product was written while it was in flight"),
    ("accumulators_overlap", "the accumulator overlaps that of the product in flight"),
    ("product_left", "exits with this product in flight: a wait_products is missing"),
    ("missing_fence_products", "missing fence_products before the first product"),
    ("missing_second_fence", "missing fence_products: the accumulator"),
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


@every_schedule
@pytest.mark.parametrize(("kernel", "words"), PLANTED, ids=[row[0] for row in PLANTED])
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


@every_schedule
def test_no_mistake_is_not_reported(schedule):
    launch("no_mistake", schedule=schedule)


def test_every_planted_bug_is_tested():
    kernels = set(re.findall(r"^CUFLASH_DEFINE_KERNEL\((\w+)", SOURCE.read_text(), re.MULTILINE))
    assert kernels == {kernel for kernel, _ in PLANTED} | {"load_left", "accumulator_read", "no_mistake"}


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
    right = {"address": 0, "element_bytes": 2, "dims": (64, 8, 1, 1), "strides": (128,) * 3, "box": (64, 8, 1, 1)}
    assert tensor_map(**right).nbytes == 128
    with pytest.raises(ValueError, match=words):
        tensor_map(**{**right, **change})


def functions_of(*paths):
    """Names of the functions defined in namespace ptx."""
    text = "\n".join(path.read_text() for path in paths)
    return set(re.findall(r"^\s*CUFLASH_DEVICE (?:constexpr )?\w+ (\w+)\(", text, re.MULTILINE))


def test_every_function_is_emulated_and_checked():
    functions = functions_of(*(emulator.KERNELS / f"ptx_{part}.cuh" for part in ("sm90", "wgmma")))
    assert functions - {"descriptor"} == functions_of(HERE / "ptx_sm90_emulated.h")
    used = set(re.findall(r"ptx::(\w+)", (HERE / "conformance_sm90.cu").read_text()))
    assert functions <= used
