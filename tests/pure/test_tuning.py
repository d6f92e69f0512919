"""Tuning without a device: what is tried, how it is judged by a runner that is none, what is remembered and found."""

import functools
import importlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.cli.main import main
from cuflash.gpu import compiler, tuning
from cuflash.gpu.compiler import CompileError
from cuflash.gpu.tuning import MARGIN, candidates, size_class, tune, tuned_plan
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.architectures import FAMILIES
from cuflash.plan.families import Family
from cuflash.plan.sm80.decode import DecodeTile
from cuflash.plan.sm80.tiles import ForwardTile
from cuflash.plan.sm90.decode_tiles import DecodeFloat8Sm90Tile
from cuflash.plan.sm90.tiles import (
    BackwardFloat32Sm90Tile,
    ForwardFloat8Sm90Tile,
    ForwardFloat32Sm90Tile,
    ForwardSm90Tile,
)
from cuflash.plan.sm90.wide_tiles import DecodeWideSm90Tile
from cuflash.plan.tiles import round_up
from cuflash.spec.passes import BACKWARD, FORWARD, JVP, PASSES, PASSES_WITHOUT_TANGENTS
from cuflash.testing import Case
from tests.problems import problem_of
from tests.sampling import examples

H200 = DeviceSpec.for_arch("9.0")
PADDED: dict[str, Any] = {
    "batch": 3,
    "num_heads": 4,
    "num_heads_kv": 4,
    "seqlen_q": 300,
    "seqlen_k": 300,
    "head_dim": 64,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    """An empty store of this test alone, of which nothing has been read."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_recalled", {})
    return tmp_path / "tuned"


class FakeDevice:
    """Takes `times` in order, then ever longer; `wrong` are the numbers of the plans whose results differ."""

    def __init__(self, times=(), wrong=()):
        self.times = list(times)
        self.wrong = wrong
        self.seen = []

    def why_wrong(self, plan):
        self.seen.append(plan)
        return "out differs" if len(self.seen) - 1 in self.wrong else None

    def seconds(self, plan):
        return self.times.pop(0) if self.times else 100.0 + len(self.seen)


tune_quietly = functools.partial(tune, spills=lambda plan: 0)


def moving(problem, pass_):
    """The problem with tangents of q, k and v, if the pass takes some."""
    return replace(problem, moved=("q", "k", "v")) if pass_.has_tangents else problem


def forgotten_here():
    """As a process that starts now: nothing read yet."""
    tuning._recalled.clear()


# ---- What is tried ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale", ["head", "block"])
@pytest.mark.parametrize(
    ("changes", "type_"),
    [
        ({"q_float8": True}, ForwardFloat8Sm90Tile),
        ({"q_float8": True, "causal": True}, ForwardFloat8Sm90Tile),
        ({"q_float8": True, "seqlen_q": 3}, DecodeFloat8Sm90Tile),
        ({"q_float8": True, "bias": (1024,)}, ForwardTile),
        ({}, ForwardTile),
    ],
)
def test_candidates_for_fp8_read_bytes(changes, type_, scale, head_dim):
    sizes = {"seqlen_q": 1024, "seqlen_k": 1024, "num_heads": 8, "head_dim": head_dim, "scale_block": 64}
    of_bytes = {"kv_dtype": "float8_e4m3fn", "k_scale": scale, "v_scale": "head", "dtype": "bfloat16"}
    problem = Case(**sizes | of_bytes | changes).problem
    plans = candidates(problem, H200)
    assert len(plans) > 1 and plans[0] == choose_plan(problem, H200)
    for plan in plans:
        (tile,) = plan.tiles
        assert type(tile) is type_
        if isinstance(tile, ForwardTile):
            assert tile.key_bytes == 1
        elif isinstance(tile, ForwardFloat8Sm90Tile):
            assert problem.scale_block("k_scale") % tile.block_n == 0


@pytest.mark.parametrize(("heads", "rows"), [(16, 64), (128, 128)])
def test_candidates_for_few_queries_of_wide_heads_have_rows_for_all(heads, rows):
    plans = candidates(problem_of(1, 2**16, 576, 512, batch=1, heads=heads, heads_kv=1), H200)
    of_few = {plan.tiles[0].block_m for plan in plans if isinstance(plan.tiles[0], DecodeWideSm90Tile)}
    assert of_few == {rows}


def test_every_family_is_one_of_an_architecture():
    """Tuning, traffic and the plans of both passes know no others."""
    folder = Path(cuflash.__file__).parent / "plan"
    modules = [path.relative_to(folder.parents[1]) for path in folder.glob("sm*/*.py")]
    known = [importlib.import_module(".".join(path.with_suffix("").parts)) for path in modules]
    families = {x for own in known for x in vars(own).values() if isinstance(x, type) and issubclass(x, Family)}
    listed = {type(family) for family in FAMILIES.values()}
    assert {family for family in families if hasattr(family, "tile")} == listed


@pytest.mark.parametrize("tile", FAMILIES, ids=lambda tile: tile.__name__)
def test_rows_of_every_family_are_tried(tile):
    problems = (problem_of(), problem_of(1, 4096), problem_of(dtype="float8_e4m3fn"))
    assert any(type(row) is tile for problem in problems for row in FAMILIES[tile].alternatives(problem))


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
def test_candidates_for_wide_heads(pass_):
    plans = candidates(problem_of(512, 512, 512, 512), H200, pass_)
    sources = {kernel.source for plan in plans for kernel in plan.kernels if kernel.source.startswith("sm90/")}
    assert sources == {f"sm90/{pass_}_wide.cu"}
    assert len(plans) > 1


@pytest.mark.parametrize("kv_dtype", ["", "float8_e4m3fn"])
@pytest.mark.parametrize("seqlen_q", [1, 16, 30, 64])
@pytest.mark.parametrize("arch", ["7.5", "8.0", "12.0"])
def test_candidates_for_few_queries_hold_them(arch, seqlen_q, kv_dtype):
    problem = Case(seqlen_q=seqlen_q, seqlen_k=4096, head_dim=64, dtype="float16", kv_dtype=kv_dtype).problem
    tiles = [plan.tiles[0] for plan in candidates(problem, DeviceSpec.for_arch(arch))]
    of_few = [tile for tile in tiles if isinstance(tile, DecodeTile)]
    assert of_few[0] == tiles[0] and 1 < len(of_few) < 32
    assert {tile.block_m for tile in of_few} == {max(16, 1 << (seqlen_q - 1).bit_length())}
    assert {tile.key_bytes for tile in of_few} == {1 if kv_dtype else 0}
    assert arch != "7.5" or {tile.num_stages for tile in of_few} == {1}


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("arch", ["8.0", "8.6", "9.0", "12.0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_candidates_begin_with_the_table_and_fit(pass_, arch, dtype, deterministic):
    device = DeviceSpec.for_arch(arch)
    for dim in (64,) if pass_.has_tangents and dtype == "float64" else (64, 128, 160):
        problem = moving(problem_of(1024, 1024, dim, dim, dtype=dtype, deterministic=deterministic), pass_)
        plans = candidates(problem, device, pass_)
        assert plans[0] == choose_plan(problem, device, pass_)
        assert len({plan.kernels for plan in plans}) == len(plans)
        for plan in plans:
            for tile in plan.tiles:
                shared = tile.shared_bytes(*(round_up(dim, tile.dim_multiple),) * 2)
                assert shared <= device.shared_bytes_per_block
                assert tile.min_blocks * (shared + device.shared_bytes_reserved) <= device.shared_bytes_per_sm


@settings(max_examples=examples(30))
@given(ct.cases(ndims=(4,), features=("bias", "mask", "kv_lengths", "softcap")), st.sampled_from(PASSES))
@example(
    Case(bias=(1, 4, 300, 300), mask=(3, 1, 1, 300), **PADDED), FORWARD
)  # its tiles of bias leave 256 x 64 no space
def test_kernels_of_candidates_fit(case, pass_):
    for plan in candidates(moving(case.problem, pass_), H200, pass_):
        assert all(kernel.shared_bytes <= H200.shared_bytes_per_block for kernel in plan.kernels), plan.describe(
            verbose=True, width=0
        )


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"causal": True}], ids=str)
@pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", 128), ("float32", 64)])
def test_there_is_something_to_try(pass_, options, dtype, dim):
    plans = candidates(moving(problem_of(4096, 4096, dim, dim, dtype=dtype, **options), pass_), H200, pass_)
    assert len(plans) >= 2, [plan.tiles for plan in plans]


def test_rows_of_other_kernels_are_tried():
    types = {type(plan.tiles[0]).__name__ for plan in candidates(problem_of(dim=128, dim_v=128), H200)}
    assert types == {"ForwardSm90Tile", "ForwardTile"}


@pytest.mark.parametrize("pass_", PASSES_WITHOUT_TANGENTS)
def test_the_precision_of_products_stays(pass_):
    """bf16 terms of float32 are as many as the table's row has, and no other kernel takes its place."""
    for precision in ("highest", "tf32"):
        problem = problem_of(2048, 2048, 64, 64, dtype="float32", precision=precision)
        plans = candidates(problem, H200, pass_)
        type_ = ForwardFloat32Sm90Tile if pass_ is FORWARD else BackwardFloat32Sm90Tile
        terms = [tile.bf16_terms for plan in plans for tile in plan.tiles if isinstance(tile, type_)]
        assert terms == [3 if precision == "highest" else 2] * len(plans)


def test_tiles_are_those_of_the_tangents_that_there_are(store):
    """Other tangents are other kernels, which are tuned by themselves."""
    plans = candidates(moving(problem_of(), JVP), H200, JVP)
    winner = tune_quietly(plans, FakeDevice([3e-3, 1e-3])).winner
    forgotten_here()
    assert tuned_plan(moving(problem_of(), JVP), H200, JVP).tiles == winner.plan.tiles
    of_q = replace(problem_of(), moved=("q",))
    assert tuned_plan(of_q, H200, JVP) == choose_plan(of_q, H200, JVP)


def test_what_no_kernel_serves_is_not_tuned():
    with pytest.raises(NotImplementedError, match="1025"):
        candidates(problem_of(dim=1025), H200)


# ---- How it is judged ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_", PASSES)
def test_the_fastest_wins_and_is_found_again(pass_, store):
    problem = moving(problem_of(), pass_)
    plans = candidates(problem, H200, pass_)
    found = tune_quietly(plans, FakeDevice([3e-3, 2e-3, 1e-3]))
    assert found.winner.plan == plans[2]
    assert found.gain == pytest.approx(2)
    assert found.winner.tflops == pytest.approx(pass_.flops(problem) / 1e-3 / 1e12)
    (file,) = store.iterdir()
    assert str(file) in found.describe()
    forgotten_here()
    plan = tuned_plan(problem, H200, pass_)
    assert plan.tiles == plans[2].tiles
    assert plan.kernels == plans[2].kernels
    expected = (f"tuned: {found.winner.tflops:.1f} TFLOP/s on H200", f"the table's row {found.trials[0].tflops:.1f}")
    assert all(words in plan.reason for words in (*expected, plans[0].tiles[0].label))
    assert plan.reason in "\n".join(line.strip() for line in plan.describe(verbose=True, width=0).splitlines())
    assert plan.about_seconds == pytest.approx(1e-3)
    assert ", about 1 ms, " in plan.describe(width=0).splitlines()[0]
    assert plans[0].about_seconds is None and "about" not in plans[0].describe(width=0).splitlines()[0]


@pytest.mark.parametrize("need", [("dq",), ("dscale",), ("dk", "dscale")])
def test_some_gradients_have_winners_of_their_own(need):
    plans = candidates(problem_of(), H200, BACKWARD, need=need)
    changed = next(plan for plan in plans if plan.tiles[-1] != plans[0].tiles[-1])
    tune_quietly(plans, FakeDevice([1.0 + (plan is not changed) for plan in plans]))
    forgotten_here()
    plan = tuned_plan(problem_of(), H200, BACKWARD, need=need)
    assert (plan.tiles, plan.kernels, plan.need) == (changed.tiles, changed.kernels, need)
    assert plan.reason.count("tuned: ") == 1
    assert "tuned: " not in tuned_plan(problem_of(), H200, BACKWARD).reason


def test_the_first_stays_unless_something_is_faster_by_more_than_noise():
    plans = candidates(problem_of(), H200)
    found = tune_quietly(plans, FakeDevice([1.0, 1 / (1 + MARGIN / 2)]))
    assert found.winner is found.trials[0]
    assert "the table's row stays" in found.describe()
    forgotten_here()
    plan = tuned_plan(problem_of(), H200)
    assert plan.tiles == plans[0].tiles
    assert plan.reason.startswith(plans[0].reason)
    assert "the table's row is the fastest" in plan.reason
    assert ", about 1 s, " in plan.describe(width=0).splitlines()[0]


def test_what_is_wrong_or_spills_or_does_not_compile_is_not_timed():
    plans = candidates(problem_of(dim=128, dim_v=128), H200)[:4]

    def spills(plan):
        if plan == plans[3]:
            raise CompileError("static assertion", "log", ())
        return {plans[0]: 8, plans[1]: 8, plans[2]: 9}[plan]

    device = FakeDevice([5.0, 1.0], wrong=[1])
    found = tune(plans, device, spills=spills)
    assert device.seen == [plans[0], plans[1]]
    assert [trial.why_not for trial in found.trials] == [None, "out differs", "spills 9 bytes", "does not compile"]
    assert found.winner is found.trials[0]
    text = found.describe()
    assert all(words in text for words in ("out differs", "spills 9 bytes", "does not compile", "4 candidates"))


def test_a_table_whose_row_does_not_compile_is_an_error():
    def spills(plan):
        raise CompileError("static assertion", "log", ())

    with pytest.raises(CompileError):
        tune(candidates(problem_of(), H200)[:2], FakeDevice(), spills=spills)


def test_a_device_that_does_not_agree_with_itself_is_an_error(store):
    with pytest.raises(RuntimeError, match="out differs"):
        tune_quietly(candidates(problem_of(), H200)[:2], FakeDevice(wrong=[0]))
    assert not store.exists()


def test_progress_counts_what_is_compiled_and_what_is_timed():
    plans, advanced = candidates(problem_of(), H200), []
    tune_quietly(plans, FakeDevice(), advance=lambda: advanced.append(1))
    assert len(advanced) == 2 * len(plans)


def test_the_report_lists_the_fastest_first():
    plans = candidates(problem_of(), H200)[:3]
    text = tune_quietly(plans, FakeDevice([3.0, 1.0, 2.0])).describe()
    rates = [float(line.split()[line.split().index("TFLOP/s") + 1]) for line in text.splitlines() if "TFLOP/s" in line]
    assert rates == [1000.0, 2000.0, 3000.0]
    assert text.splitlines()[1].startswith("*")
    assert "200.0% faster" in text


# ---- What is remembered ----------------------------------------------------------------------------------------------


def remember_the_last(problem, pass_=FORWARD, device=H200):
    plans = candidates(problem, device, pass_)
    tune_quietly(plans, FakeDevice([float(len(plans) - n) for n in range(len(plans))]))
    forgotten_here()
    return plans[-1].tiles


def is_tuned(problem, pass_=FORWARD, device=H200):
    return "tuned: " in tuned_plan(problem, device, pass_).reason


def test_it_is_good_for_problems_of_about_this_size_alone():
    remember_the_last(problem_of(1000, 1000, batch=3))
    assert is_tuned(problem_of(1000, 1000, batch=3))
    assert is_tuned(problem_of(1024, 513, batch=4))
    assert is_tuned(problem_of(1024, 513, batch=4, deterministic=False))
    for other in (
        problem_of(1025, 1000, batch=3),
        problem_of(512, 1000, batch=3),
        problem_of(1000, 1000, batch=5),
        problem_of(1000, 1000, 72, batch=3),
        problem_of(1000, 1000, batch=3, dtype="float16"),
        problem_of(1000, 1000, batch=3, causal=True),
        problem_of(1000, 1000, batch=3, softcap=5.0),
        problem_of(1000, 1000, batch=3, heads_kv=4),
    ):
        assert not is_tuned(other), other
    assert not is_tuned(problem_of(1000, 1000, batch=3), BACKWARD)
    assert not is_tuned(problem_of(1000, 1000, batch=3), device=replace(H200, num_sms=131))


def test_windows_of_other_sizes_are_others():
    remember_the_last(problem_of(window=(100, 0)))
    assert is_tuned(problem_of(window=(127, 0)))
    assert not is_tuned(problem_of(window=(130, 0)))
    assert not is_tuned(problem_of(window=(100, 5)))


def test_the_size_class():
    assert [size_class(n) for n in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [0, 1, 2, 4, 4, 8, 1024, 2048]


def test_other_kernels_forget(monkeypatch):
    remember_the_last(problem_of())
    assert is_tuned(problem_of())
    monkeypatch.setattr(tuning, "kernels_fingerprint", lambda: "another")
    tuning._file_name.cache_clear()  # as in a process that starts now
    assert not is_tuned(problem_of())
    tuning._file_name.cache_clear()


def test_sinks_that_have_a_gradient_or_not_are_one_problem(store):
    sinks = np.zeros(4, np.float32)
    q = np.zeros((1, 4, 64, 64), np.float16)
    problem = cuflash.spec.problem.make_problem(cuflash.spec.options.Options(), q, q, q, sinks=sinks)
    plans = candidates(problem, H200, BACKWARD, operands={})
    tune_quietly(plans, FakeDevice([2.0, 1.0]))
    assert tuned_plan(problem, H200, BACKWARD).tiles == plans[1].tiles


def test_it_can_be_forgotten(store):
    plan = choose_plan(problem_of(), H200)
    assert not tuning.forget(plan)
    remember_the_last(problem_of())
    assert is_tuned(problem_of())
    assert tuning.forget(plan)
    assert not is_tuned(problem_of())
    assert not list(store.iterdir())


def test_without_remembering_nothing_changes(store):
    tune_quietly(candidates(problem_of(), H200), FakeDevice([2.0, 1.0]), remember=False)
    assert not store.exists()
    assert not is_tuned(problem_of())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"tiles": [{"kind": "NoTile"}]}', b'{"tiles": [1]}', b"\xff"]
)
def test_a_damaged_file_is_said_and_not_used(store, content):
    remember_the_last(problem_of())
    (file,) = store.iterdir()
    file.write_bytes(content)
    plan = tuned_plan(problem_of(), H200)
    assert plan.tiles == choose_plan(problem_of(), H200).tiles
    assert f"not tuned: {file} cannot be read" in plan.reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text(max_size=5), own, max_size=3),
    max_leaves=6,
)


def paths_in(content, path=()):
    """The paths of all values within a JSON value."""
    yield path
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield from paths_in(value, (*path, key))


def test_whatever_a_file_says_there_is_a_plan(store):
    """One value of a file is another one, or missing; or all bytes are others."""
    problem, of_table = problem_of(), choose_plan(problem_of(), H200).tiles
    remember_the_last(problem)
    (file,) = store.iterdir()
    good = file.read_bytes()

    @settings(max_examples=examples(300))
    @given(st.data())
    @example(None)
    def every_content(data):
        content = json.loads(good)
        if data is None:
            file.write_bytes(b"[" * 200_000)
        elif data.draw(st.booleans()) and data.draw(st.booleans()):
            file.write_bytes(data.draw(st.binary(max_size=50)))
        else:
            paths = [path for path in paths_in(content) if not path or path[0] in ("tiles", "tflops", "table_tflops")]
            *above, last = data.draw(st.sampled_from(paths)) or ("tiles",)
            at = functools.reduce(lambda value, key: value[key], above, content)
            if data.draw(st.booleans()):
                at[last] = data.draw(JSON)
            elif isinstance(at, dict):
                del at[last]
            file.write_text(json.dumps(content))
        tuning._recalled.clear()
        plan = tuned_plan(problem, H200)
        assert plan.tiles == of_table or "tuned:" in plan.reason
        assert plan.kernels

    every_content()
    file.write_bytes(b'{"tiles": [], "tflops": 1' + b"0" * 400 + b', "table_tflops": 1}')
    tuning._recalled.clear()
    assert "OverflowError" in tuned_plan(problem, H200).reason


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_is_not_used(store, what):
    remember_the_last(problem_of())
    (file,) = store.iterdir()
    assert store.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
    (store if what == "folder" else file).chmod(0o777)
    tuning._recalled.clear()
    plan = tuned_plan(problem_of(), H200)
    assert plan.tiles == choose_plan(problem_of(), H200).tiles
    assert f"not tuned: {file} cannot be read (PermissionError" in plan.reason and "others may write" in plan.reason
    if what == "folder":
        found = tune_quietly(candidates(problem_of(), H200), FakeDevice())
        assert "remembered by this process alone: " in found.remembered and "others may write" in found.remembered


def test_a_row_that_breaks_its_own_rules_is_not_used(store):
    remember_the_last(problem_of())
    (file,) = store.iterdir()
    content = json.loads(file.read_text())
    content["tiles"][0]["block_n"] = 7
    file.write_text(json.dumps(content))
    assert "cannot be read" in tuned_plan(problem_of(), H200).reason


@pytest.mark.parametrize(
    ("tile", "words"),
    [
        (ForwardSm90Tile, "exceed the 233472 bytes"),
        (None, "computes other products"),
    ],
)
def test_a_tile_that_cannot_stand_for_the_row_is_not_used(store, tile, words):
    dtype = "bfloat16" if tile else "float32"
    problem = problem_of(1024, 1024, 64, 64, dtype=dtype)
    remember_the_last(problem)
    (file,) = store.iterdir()
    content = json.loads(file.read_text())
    if tile:
        (row,) = choose_plan(problem, H200).tiles
        content["tiles"] = [{"kind": "ForwardSm90Tile", **tuning._values(row.changed(num_stages=40))}]
    else:
        content["tiles"][0]["bf16_terms"] = 2
    file.write_text(json.dumps(content))
    plan = tuned_plan(problem, H200)
    assert words in plan.reason and "not the tuned" in plan.reason
    assert plan.tiles == choose_plan(problem, H200).tiles


def test_a_store_that_cannot_be_written_is_said(store):
    store.parent.mkdir(exist_ok=True)
    store.write_text("a file where the folder should be")
    found = tune_quietly(candidates(problem_of(), H200), FakeDevice([2.0, 1.0]))
    assert "remembered by this process alone" in found.describe()
    assert is_tuned(problem_of())


def test_what_others_find_later_does_not_change_a_plan_of_this_process(store):
    assert not is_tuned(problem_of())
    plans = candidates(problem_of(), H200)
    recalled = dict(tuning._recalled)
    tune_quietly(plans, FakeDevice([2.0, 1.0]))
    tuning._recalled.clear()
    tuning._recalled.update(recalled)
    assert not is_tuned(problem_of())
    forgotten_here()
    assert is_tuned(problem_of())


def test_many_writers_leave_a_whole_file(store):
    plans = candidates(problem_of(), H200)[:2]
    writers = [
        threading.Thread(target=lambda: tune_quietly(plans, FakeDevice([2.0, 1.0])))
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [file.suffix for file in store.iterdir()] == [".json"]
    forgotten_here()
    assert is_tuned(problem_of())


# ---- The interface ---------------------------------------------------------------------------------------------------


def test_the_cpu_path_has_nothing_to_tune():
    q = np.zeros((2, 5, 8), np.float32)
    with pytest.raises(NotImplementedError, match=r"q: got an array in host memory.*no tiles to tune"):
        cuflash.FlashAttention().tune(q, q, q)
    with pytest.raises(ValueError, match="k: got head_dim 4"):
        cuflash.FlashAttention().tune(q, q[..., :4], q)


@pytest.mark.parametrize(
    ("passes", "error"), [("forward", TypeError), (3, TypeError), (["sideways"], ValueError), ((), ValueError)]
)
def test_passes_are_checked(passes, error):
    q = np.zeros((2, 5, 8), np.float32)
    with pytest.raises(error, match=r"^passes: got"):
        cuflash.FlashAttention().tune(q, q, q, passes=passes)


def test_candidates_on_the_command_line(capsys):
    assert main(["tune", "--dry-run", "--arch", "9.0", "8.0", "--head-dim", "64", "--pass", "forward"]) == 0
    output = capsys.readouterr().out
    assert output.count("the table's row first") == 2
    assert "ping_pong False" in output


def test_the_plan_of_the_command_line_is_the_tuned_one(capsys, monkeypatch):
    monkeypatch.setattr(compiler, "with_resources", lambda plan: plan)
    main(["plan", "--arch", "9.0", "--pass", "forward"])
    problem = problem_of(4096, 4096, 128, 128, batch=1, heads=16, heads_kv=16)
    assert "tuned" not in capsys.readouterr().out
    forgotten_here()
    remember_the_last(problem)
    main(["plan", "--arch", "9.0", "--pass", "forward"])
    assert "tuned: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("tune", "the CPU path has nothing to tune"),
        ("tune --arch 9.0", "--arch goes with --dry-run"),
        ("tune --dry-run", "give its compute capability, such as --arch 9.0"),
    ],
)
def test_errors_of_the_command_line(capsys, monkeypatch, command, words):
    monkeypatch.setattr("cuflash.cli.here.find_gpu", lambda: (None, "none in this test"))
    assert main(command.split()) == 1
    assert words in capsys.readouterr().err
