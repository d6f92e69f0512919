"""The emulator reports the bugs of ``planted_bugs.cu``, at the right line, and no others."""

import ctypes
import functools
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import emulator
from cuflash.emulator import (
    SCHEDULES,
    EmulationError,
    Schedule,
    Scratch,
    build,
    building,
    find_compiler,
    guarded_array,
)
from cuflash.emulator.building import HERE as EMULATOR
from cuflash.gpu.compiler import kernel_directory
from cuflash.gpu.kernel_cache import private_directory
from cuflash.plan import ScratchLayout
from tests.sampling import examples

HERE = Path(__file__).resolve().parent
KERNELS = kernel_directory()

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: g++ is not on the path")

SOURCE = HERE / "planted_bugs.cu"
PARAMS = np.dtype(
    [("source", np.uint64), ("destination", np.uint64), ("count", np.uint32), ("padding", np.uint32)], align=True
)
WARP, BLOCK = 32, 64
ARRAY_LENGTH = 4 * WARP

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def launch(kernel, *, source=None, destination=None, count=0, grid=1, threads=WARP, shared_bytes=1024, **options):
    source = guarded_array(ARRAY_LENGTH, np.float32, fill=0) if source is None else source
    destination = guarded_array(ARRAY_LENGTH, np.float32) if destination is None else destination
    module = build(SOURCE, sanitizer=options.pop("sanitizer", None))
    params = np.array((source.ctypes.data, destination.ctypes.data, count, count), PARAMS)
    return module.launch(kernel, params, grid=grid, threads=threads, shared_bytes=shared_bytes, **options)


@functools.cache
def marked_line(kernel):
    """The number of the line marked ``caught: kernel``, or None."""
    for number, line in enumerate(SOURCE.read_text().splitlines(), 1):
        if re.search(rf"// caught: {kernel}$", line):
            return number
    return None


# Kernel, arguments of its launch, and what the report says.
BUGS: list[tuple[str, dict[str, Any], str]] = [
    ("missing_barrier_before_read", {"threads": BLOCK}, "data race: .* with no barrier between"),
    ("missing_barrier_before_overwrite", {"threads": BLOCK}, "data race: .* with no barrier between"),
    ("two_writers", {"threads": BLOCK}, "data race: writes .* wrote at planted_bugs.cu:"),
    ("divergent_barrier", {"threads": BLOCK}, "divergent barrier: .* others wait in it at planted_bugs.cu:"),
    (
        "skipped_barrier",
        {"threads": BLOCK},
        r"deadlock: .*\n  threads 0 to 31 wait in sync_block .*\n  .* 63 have exited",
    ),
    ("deadlock", {"threads": BLOCK}, "deadlock: .*(\n.*)*wait in sync_block at planted_bugs.cu:"),
    ("deadlock", {"threads": BLOCK}, "deadlock: .*(\n.*)*wait in shuffle_xor at planted_bugs.cu:"),
    ("shared_overrun", {"count": 1024}, "out of bounds: 2 bytes at offset 1024 of 1024"),
    ("shared_overrun", {"count": 64, "shared_bytes": 65}, "out of bounds: 2 bytes at offset 64 of 65"),
    ("shared_underrun", {}, "out of bounds: 4 bytes at offset -4"),
    ("shared_misaligned", {}, "misaligned shared address"),
    ("shared_unwritten", {"trap_unwritten": True}, "uninitialised: reads shared memory at offset"),
    ("matrix_overrun", {"shared_bytes": 496}, "out of bounds: 16 bytes at offset 496 of 496"),
    ("divergent_shuffle", {}, "divergent warp: .* others of its warp wait in shuffle_xor at planted_bugs.cu:"),
    ("exited_lane", {}, "divergent warp: .* exit"),
    ("missing_wait", {}, "reads .* cp.async .* is in flight: a copy_async_wait is missing"),
    ("missing_commit", {}, "reads .* cp.async .* is in flight"),
    ("short_wait", {}, "reads .* cp.async .* is in flight"),
    ("exit_in_flight", {}, "exits with this cp.async in flight: a copy_async_wait is missing"),
    ("missing_barrier_after_wait", {"threads": BLOCK}, "data race: reads|reads .* in flight|writes .* which"),
    ("missing_barrier_before_copy", {"threads": BLOCK}, "data race|in flight"),
    ("copy_to_misaligned_place", {}, "misaligned shared address: 0x408 is not a multiple of 16"),
    ("copy_from_misaligned_place", {}, "misaligned source of cp.async"),
    ("copy_too_long", {}, "cp.async of 4 bytes reads 8"),
    ("turn_of_later_block", {"in_turn": True}, "waits until 1 blocks have had their turn, .* and 0 had one"),
    ("addition_before_turn", {"in_turn": True}, "adds before its turn: .* the wait at planted_bugs.cu:"),
    ("count_of_later_block", {"counted": True}, "waits for a count of 1, .* and it is 0"),
    ("addition_before_count", {"counted": True}, "adds without having waited for a count"),
    ("turn_ended_early", {}, "ends the turn too early: nothing orders .* adds at planted_bugs.cu:"),
    ("early_arrival", {}, r"nothing orders this (behind what thread \d+ stores|and the arrival) at planted_bugs.cu:"),
    ("result_misaligned", {}, "misaligned address in global memory"),
    ("source_changed", {}, "source of a cp.async changed"),
    ("global_read_overrun", {"count": ARRAY_LENGTH - WARP + 1}, "invalid memory access"),
    ("global_write_overrun", {"count": ARRAY_LENGTH - WARP + 1}, "invalid memory access"),
    ("global_copy_overrun", {"count": ARRAY_LENGTH - WARP + 1}, "invalid memory access"),
    ("reduction_misaligned", {}, "misaligned reduction"),
    ("integer_division", {}, "integer division by zero"),
    ("endless_loop", {"watchdog_seconds": 0.05}, "watchdog: .* endless loop"),
    ("endless_barriers", {"watchdog_seconds": 0.05}, "watchdog: .* endless loop"),
    ("register_index", {"count": 4, "sanitizer": "undefined"}, "undefined behaviour"),
]


@pytest.mark.one_of("schedule")
@every_schedule
@pytest.mark.parametrize(("kernel", "arguments", "words"), BUGS, ids=[row[0] for row in BUGS])
def test_planted_bug_is_reported(kernel, arguments, words, schedule):
    with pytest.raises(EmulationError, match=words) as caught:
        launch(kernel, schedule=schedule, **arguments)
    error = caught.value
    assert error.kernel == kernel
    assert error.block == 0
    assert error.thread is not None and 0 <= error.thread < arguments.get("threads", WARP)
    if marked_line(kernel):
        assert (Path(error.file).name, error.line) == (SOURCE.name, marked_line(kernel))


def test_report_names_block_and_thread():
    with pytest.raises(EmulationError, match=r"planted_bugs.cu:\d+: kernel global_write_overrun, block 0, thread 31: "):
        launch("global_write_overrun", count=ARRAY_LENGTH - WARP + 1)


def test_report_is_the_same_in_another_process():
    with pytest.raises(EmulationError) as caught:
        launch("global_write_overrun", count=ARRAY_LENGTH - WARP + 1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and vars(again) == vars(caught.value)


def test_scratch_arrays_are_as_aligned_as_on_a_device():
    layout = ScratchLayout(("a", "b", "c"), (20, 0, 5000))
    scratch = Scratch(layout, 0xFF)
    for address, offset in zip(scratch.addresses, layout.offsets, strict=True):
        assert (address - offset) % Scratch.MODULUS == 0
    scratch.check("kernel")


@pytest.mark.parametrize(("name", "at", "message"), [("b", -1, "before the start"), ("a", 20, "0 bytes past the end")])
def test_writes_around_scratch_arrays_are_reported(name, at, message):
    layout = ScratchLayout(("a", "b"), (20, 300))
    scratch = Scratch(layout, 0xFF)
    ctypes.c_uint8.from_address(scratch.addresses["ab".index(name)] + at).value = 1
    with pytest.raises(EmulationError, match=rf"kernel k: wrote {message} of scratch array {name}"):
        scratch.check("k")


def test_launch_after_a_failure_is_clean():
    with pytest.raises(EmulationError):
        launch("deadlock", threads=BLOCK)
    launch("shared_overrun", count=0)


@every_schedule
def test_unwritten_shared_memory_reads_as_nan(schedule):
    destination = guarded_array(WARP, np.float32, fill=0)
    launch("shared_unwritten", destination=destination, schedule=schedule)
    assert np.isnan(destination).all()


@every_schedule
def test_uninitialised_registers_read_as_nan(schedule):
    destination = guarded_array(ARRAY_LENGTH, np.float32, fill=0)
    for _ in range(2):  # the second launch finds stacks that were used
        launch("uninitialised_accumulator", destination=destination, schedule=schedule)
        assert np.isnan(destination).all()


def test_address_sanitizer_reports_registers_past_their_end():
    code = "from test_emulator import launch; launch('register_index', count=4, sanitizer='address')"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=HERE,
        env={**emulator.sanitizer_environment(), "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert "AddressSanitizer: stack-buffer-overflow" in result.stderr
    assert f"{SOURCE.name}:{marked_line('register_index')}" in result.stderr


# ---- The launch itself -----------------------------------------------------------------------------------------------


def test_launch_refuses_what_the_machine_refuses():
    for arguments, words in [
        ({"threads": 40}, "threads of a block"),
        ({"threads": 64}, "threads of a block"),
        ({"shared_bytes": 300_000}, "bytes of shared memory"),
    ]:
        with pytest.raises(EmulationError, match=words):
            launch("shared_overrun", **arguments)
    with pytest.raises(EmulationError, match="no such kernel"):
        launch("nothing")
    with pytest.raises(EmulationError, match="size of the parameter struct: 3, allowed 24"):
        build(SOURCE).launch("two_writers", b"123", grid=1, threads=BLOCK, shared_bytes=0)


def test_empty_grid_runs_nothing():
    launch("deadlock", grid=0, threads=BLOCK)


def test_schedule_validates():
    with pytest.raises(ValueError, match="order"):
        Schedule("sorted")
    with pytest.raises(ValueError, match="asynchrony"):
        Schedule("fifo", "never")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [(Schedule("fifo"), range(5)), (Schedule("lifo"), range(5)), (Schedule("reversed"), range(4, -1, -1))],
)
def test_order_of_blocks(schedule, expected):
    destination = guarded_array(6, np.uint32, fill=0)
    launch("block_order", destination=destination, grid=5, schedule=schedule)
    assert list(destination) == [5, *expected]


def test_random_order_depends_on_the_seed_alone():
    def order(seed):
        destination = guarded_array(21, np.uint32, fill=0)
        launch("block_order", destination=destination, grid=20, schedule=Schedule("random", seed=seed))
        return list(destination[1:])

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(20))


def test_loads_that_an_arrival_does_not_precede_are_reported():
    """Where the thread that arrives runs first."""
    with pytest.raises(
        EmulationError, match=r"loads results of other blocks too early: .* the arrival at planted_bugs"
    ):
        launch("early_load", threads=BLOCK, schedule=Schedule("fifo"))


@every_schedule
def test_arrivals_are_seen_at_once_or_late(schedule):
    """A block that has not counted yet may see what the count was before the launch; then it attends to all counts."""
    notes = guarded_array((5, 2), np.uint32)
    launch("seen_arrivals", destination=notes, grid=5, schedule=schedule)
    before, after = notes[np.argsort(notes[:, 1])].T
    np.testing.assert_array_equal(after, range(1, 6))
    np.testing.assert_array_equal(before, range(5) if schedule.asynchrony == "eager" else 0)


@pytest.mark.parametrize(("stride", "conflicts"), [(0, 0), (16, 0), (80, 0), (32, 4 * 1), (64, 4 * 3), (128, 4 * 7)])
def test_bank_conflicts_are_counted(stride, conflicts):
    statistics = launch("matrix_with_stride", count=stride, shared_bytes=8192)
    assert statistics.matrix_loads == 1
    assert statistics.matrix_load_conflicts == conflicts


# ---- Races, against a definition of them -----------------------------------------------------------------------------

STEP = np.dtype([("action", np.uint32), ("actor", np.uint32), ("offset", np.uint32), ("bytes", np.uint32)])
SYNC, COLLECTIVE, LOAD, STORE = range(4)

accesses = st.builds(
    lambda action_and_size, actor, place: (
        action_and_size[0],
        actor,
        place // action_and_size[1] * action_and_size[1],
        action_and_size[1],
    ),
    st.sampled_from([(LOAD, 2), (LOAD, 16), (STORE, 2), (STORE, 4), (STORE, 16)]),
    st.sampled_from([0, 1, 31, 32, 63]),
    st.integers(0, 31),
)
steps = st.one_of(
    accesses,
    accesses,
    accesses,
    st.just((SYNC, 0, 0, 0)),
    st.builds(lambda warp: (COLLECTIVE, warp, 0, 0), st.integers(0, 1)),
)


def has_race(script):
    """Two threads touch the same byte, one of them writing, and nothing between orders them."""
    for j, (action, actor, offset, size) in enumerate(script):
        if action < LOAD:
            continue
        for i, (action_0, actor_0, offset_0, size_0) in enumerate(script[:j]):
            if action_0 < LOAD or actor_0 == actor or STORE not in (action, action_0):
                continue
            if offset + size <= offset_0 or offset_0 + size_0 <= offset:
                continue
            between = script[i + 1 : j]
            same_warp = actor // WARP == actor_0 // WARP
            ordered = any(
                step[0] == SYNC or (step[0] == COLLECTIVE and same_warp and step[1] == actor // WARP)
                for step in between
            )
            if not ordered:
                return True
    return False


@settings(max_examples=examples(300))
@given(script=st.lists(steps, max_size=12), schedule=st.sampled_from(SCHEDULES))
def test_races_are_reported_whatever_the_schedule(script, schedule):
    source = np.array(script, STEP)
    arguments = {"source": source, "count": len(script), "threads": BLOCK, "shared_bytes": 32, "schedule": schedule}
    if has_race(script):
        with pytest.raises(EmulationError, match="data race"):
            launch("script", **arguments)
    else:
        launch("script", **arguments)


# ---- Completeness ----------------------------------------------------------------------------------------------------


def functions_of(text):
    """Names of the functions defined in namespace ptx."""
    return set(re.findall(r"^CUFLASH_DEVICE \w+ (\w+)\(", text[text.index("namespace ptx {") :], re.MULTILINE))


def test_every_function_is_emulated_and_checked():
    functions = {x for name in ("base", "arithmetic") for x in functions_of((KERNELS / f"ptx/{name}.cuh").read_text())}
    assert functions == functions_of((EMULATOR / "ptx_emulated.h").read_text())
    used = set(re.findall(r"ptx::(\w+)", (HERE / "conformance.cu").read_text()))
    assert functions == used


# ---- Building --------------------------------------------------------------------------------------------------------


def test_build_is_cached_by_content(tmp_path):
    source, header = tmp_path / "kernel.cu", tmp_path / "inner.cuh"
    header.write_text("constexpr int kOne = 1;\n")
    source.write_text('#include "ptx/base.cuh"\n#include "inner.cuh"\nstatic_assert(kOne == VALUE, "");\n')
    library = build(source, {"VALUE": 1}).library
    assert build(source, {"VALUE": True}).library == library
    header.write_text("constexpr int kOne = 2;\n")
    with pytest.raises(EmulationError, match=r"does not compile(.|\n)*static assertion failed"):
        build(source, {"VALUE": 1})
    assert build(source, {"VALUE": 2}).library != library


def test_a_cache_that_cannot_be_made_warns_once_and_works(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(building, "_RUNTIME_FLAGS", ("-O0",))  # the runtime is compiled again
    source = tmp_path / "kernel.cu"
    source.write_text('#include "ptx/base.cuh"\n#include "own.cuh"\nstatic_assert(kOwn == VALUE, "");\n')
    with pytest.warns(RuntimeWarning, match="CUFLASH_CACHE_DIR") as caught:
        first = build(source, {"VALUE": 1}, headers={"own.cuh": "constexpr int kOwn = VALUE;\n"})
        build(source, {"VALUE": 2}, headers={"own.cuh": "constexpr int kOwn = VALUE;\n"})
    assert len(caught) == 1 and str(tmp_path / "file") in str(caught[0].message)
    assert first.library.is_file() and first.library.is_relative_to(private_directory())


def test_sources_are_read_in_any_locale():
    """They are UTF-8, and three have signs that ASCII has not."""
    code = """if True:
        from cuflash.gpu.compiler import kernel_directory
        from cuflash.emulator import building
        folder = kernel_directory()
        sources = sorted(folder.glob("sm*/*.cu"))
        print(len(building._included_files([*sources, building.HERE / "ptx_emulated.h"], [folder, building.HERE])))
        print(building._run(["printf", r"\\xe2\\x80\\xa6 \\xff"]).stdout.encode("ascii", "backslashreplace").decode())
    """
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    count, printed = done.stdout.splitlines()
    assert int(count) > 50 and printed == r"\u2026 \ufffd"


def test_build_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setattr("cuflash.emulator.building.find_compiler", lambda: None)
    with pytest.raises(EmulationError, match="no C\\+\\+ compiler"):
        build(SOURCE)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("shape", [(), 5, (3, 7), (0, 4), (2, 64, 128)])
def test_guarded_array(shape, dtype):
    array = guarded_array(shape, dtype)
    assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert array.dtype == dtype
    assert (np.atleast_1d(array).view(np.uint8) == 0xFF).all()
    array[...] = 1
    assert (array == 1).all()
    assert array.ctypes.data % 16 == 0
