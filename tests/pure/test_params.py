"""The kernels' argument: the description in Python against kernels/common/io/params.cuh, and what is filled in."""

import ctypes
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cuflash.testing as ct
from cuflash.arrays.array_info import layout_of, rows_of
from cuflash.gpu.compiler import kernel_directory
from cuflash.gpu.params import (
    PARAMS,
    POINTER_WORD,
    ROW_REDUCTIONS,
    TANGENTS,
    Argument,
    Frame,
    kept_frames,
    parameters,
    pointer_words,
)
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.argument import PARAMS_BYTES, ROW_REDUCTION_ARRAYS, TANGENT_ARRAYS, maps_offset
from cuflash.plan.sm90.backward import BACKWARD_HEAD_SECTION
from cuflash.score_mod.program import Traced
from cuflash.spec.options import MAX_SEQLEN, Options
from cuflash.spec.passes import BACKWARD, FORWARD, PASSES_WITHOUT_TANGENTS
from cuflash.spec.problem import make_problem

SCALARS = {
    "i32": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "u64": np.uint64,
    "float": np.float32,
    "double": np.float64,
}


def structs_of(text, more=""):
    """Name -> [(type, name of the field)] of every struct in a header, in passes with more arrays or without."""
    text = re.sub(r"//[^\n]*", "", text)
    for macro in ("CUFLASH_ROW_REDUCTIONS", "CUFLASH_TANGENTS"):
        text = re.sub(rf"#if {macro}\n(.*?)#endif\n", r"\1" if macro == more else "", text, flags=re.DOTALL)
    text = re.sub(r"#if CUFLASH_HAS_FUNCTIONS\n.*?#endif\n", "", text, flags=re.DOTALL)  # what follows in such kernels
    structs: dict[str, list[tuple[str, str]]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        structs[name] = []
        for statement in body.split(";")[:-1]:
            declaration = re.fullmatch(r"\s*((?:const )?\w+ ?\*?)\s*(.*?)\s*", statement, re.DOTALL)
            assert declaration, statement
            ctype, names = declaration.groups()
            structs[name] += [(ctype.strip(), field.strip()) for field in names.split(",")]
    return structs


HEADER = (kernel_directory() / "common/io/params.cuh").read_text()
STRUCTS = structs_of(HEADER)


def laid_out(fields, start=0):
    """[(type, name, offset)] of the fields of a struct, as C lays them out, and where it ends."""
    offsets, offset, widest = [], start, 1
    for ctype, name in fields:
        if ctype in STRUCTS:
            inner, end, alignment = laid_out(STRUCTS[ctype])
            offset = -(-offset // alignment) * alignment
            offsets += [(inner_ctype, f"{name}.{field}", offset + at) for inner_ctype, field, at in inner]
            size = end
        else:
            size = alignment = 8 if ctype.endswith("*") else np.dtype(SCALARS[ctype]).itemsize
            offset = -(-offset // alignment) * alignment
            offsets.append((ctype, name, offset))
        offset += size
        widest = max(widest, alignment)
    return offsets, -(-offset // widest) * widest, widest


FIELDS, SIZE, _ = laid_out(STRUCTS["Params"])


def test_the_header_is_understood():
    assert STRUCTS["Tensor"] == [
        ("void*", "data"),
        ("i64", "batch_stride"),
        ("i64", "head_stride"),
        ("i64", "row_stride"),
    ]
    assert FIELDS[:2] == [("void*", "q.data", 0), ("i64", "q.batch_stride", 8)]


def test_sizes_agree():
    assert SIZE == PARAMS.itemsize == PARAMS_BYTES


def test_every_field_lies_where_the_kernels_look_for_it():
    described: dict[int, Any] = {}
    for name, (ctype, offset, *_) in dict(PARAMS.fields or {}).items():
        base = ctype.base if ctype.subdtype else ctype
        for n in range(ctype.itemsize // base.itemsize):
            described[offset + n * base.itemsize] = (base, name)
    for ctype, name, offset in FIELDS:
        base, ours = described.pop(offset)
        array, _, member = name.partition(".")
        if ctype.endswith("*"):
            assert (base, ours) == (np.uint64, array)
        elif member:
            assert (base, ours) == (np.int64, f"{array}_strides")
        elif name.endswith("_stride"):
            assert (base, ours) == (np.int64, f"{name}s")
        else:
            assert (base, ours) == (SCALARS[ctype], name)
    assert not described


@pytest.mark.parametrize(
    ("macro", "dtype", "arrays"),
    [("CUFLASH_ROW_REDUCTIONS", ROW_REDUCTIONS, ROW_REDUCTION_ARRAYS), ("CUFLASH_TANGENTS", TANGENTS, TANGENT_ARRAYS)],
)
def test_reductions_and_tangents_follow_all_other_fields(macro, dtype, arrays):
    every, size, _ = laid_out(structs_of(HEADER, macro)["Params"])
    assert every[: len(FIELDS)] == FIELDS and size == PARAMS_BYTES + dtype.itemsize
    offsets = {name: offset - PARAMS_BYTES for _, name, offset in every[len(FIELDS) :]}
    described = dict(dtype.fields or {})
    for name, num_strides in arrays:
        pointer = offsets.get(f"{name}.data", offsets.get(name))
        assert described[name][1] == pointer
        if num_strides:
            first = f"{name}.batch_stride" if f"{name}.data" in offsets else f"{name}_stride"
            assert described[f"{name}_strides"][1] == offsets[first] == pointer + 8
    assert len(offsets) == sum(1 + num_strides for _, num_strides in arrays)


def test_strides_come_in_the_order_of_the_axes():
    assert [name for _, name in STRUCTS["Tensor"][1:]] == ["batch_stride", "head_stride", "row_stride"]
    assert [name for _, name in STRUCTS["ScoreTensor"][1:]] == [
        "batch_stride",
        "head_stride",
        "row_stride",
        "key_stride",
    ]


def test_words_of_pointers():
    pointers = {name.removesuffix(".data"): offset for ctype, name, offset in FIELDS if ctype.endswith("*")}
    assert {name: 8 * word for name, word in POINTER_WORD.items()} == pointers


# ---- What is filled in -----------------------------------------------------------------------------------------------


def filled(pass_=FORWARD, layout="bhsd", **options):
    """Parameters of a small problem, its plan, and its arrays."""
    rng = np.random.default_rng(0)
    axes = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
    arrays: dict[str, Any] = {
        "q": np.zeros((2, 4, 70, 24), np.float16).transpose(axes),
        "k": np.zeros((2, 2, 90, 24), np.float16).transpose(axes),
        "v": np.zeros((2, 2, 90, 48), np.float16)[..., :40].transpose(axes),
        "out": np.zeros((2, 4, 70, 40), np.float16).transpose(axes),
        "lse": np.zeros((2, 4, 70), np.float32),
    }
    optional = {
        "bias": rng.standard_normal((4, 1, 90)).astype(np.float32),
        "mask": np.ones((2, 1, 70, 180), bool)[..., ::2],
        "kv_lengths": np.full(4, 50)[::2],
        "alibi_slopes": np.ones(4, np.float32),
        "sinks": np.ones(12, np.float32)[::3],
        "block_mask": np.ones((4, 1, 2), bool)[..., ::2][..., [0]],
    }
    problem = make_problem(Options(layout=layout, **options), *ct.qkv(arrays), **optional)
    plan = choose_plan(problem, DeviceSpec.for_arch("9.0"), pass_)
    operands = {"out": layout_of(arrays["out"], layout), "lse": rows_of(arrays["lse"])}
    return parameters(plan, operands), plan, arrays


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides_are_those_of_the_arrays(layout):
    params, _, _ = filled(layout=layout)
    assert params.shape == (1,)
    expected = {
        "q": [4 * 70 * 24, 70 * 24, 24],
        "k": [2 * 90 * 24, 90 * 24, 24],
        "v": [2 * 90 * 48, 90 * 48, 48],
        "out": [4 * 70 * 40, 70 * 40, 40],
        "lse": [4 * 70, 70, 1],
        "bias": [0, 90, 0, 1],
        "mask": [70 * 180, 0, 180, 2],
        "kv_lengths": [2],
        "alibi_slopes": [0, 1, 0],
        "sinks": [3],
        "block_mask": [0, 1, 0, 0],
    }
    for name, strides in expected.items():
        assert params[f"{name}_strides"][0].tolist() == strides, name
    for name in ("dout", "dq", "dk", "dv"):
        assert not params[f"{name}_strides"].any()


def test_pointers_are_left_open():
    params, _, _ = filled()
    for name in POINTER_WORD:
        assert params[name] == 0
    params.view(np.uint64)[POINTER_WORD["mask"]] = 2**40 + 3
    assert params["mask"] == 2**40 + 3


def test_numbers_are_those_of_the_problem():
    params, plan, _ = filled(BACKWARD, scale=-0.5, softcap=3.0, causal=True, window=(7, None))
    problem = plan.problem
    for name in ("batch", "num_heads", "num_heads_kv", "seqlen_q", "seqlen_k", "diagonal"):
        assert params[name] == getattr(problem, name)
    assert params["diagonal"] == params["right_offset"] == 20
    assert params["left_offset"] == 13
    assert params["scale"] == -0.5
    assert params["softcap"] == params["softcap_float64"] == 3.0
    assert params["scale_float64"] == -0.5
    assert params["stats_rows"] == plan.run_time.stats_rows >= 70
    assert params["group_splits"] == plan.run_time.group_splits == 2
    assert params["clear_ahead"] == plan.run_time.clear_ahead == 0
    assert params["whole_tiles"] == plan.run_time.whole_tiles == 0
    assert params["tail_splits"] == plan.run_time.tail_splits == 1
    assert params["head_section"] == plan.run_time.head_section == BACKWARD_HEAD_SECTION


def test_dropout():
    q = np.zeros((5, 16), np.float16)
    plan = choose_plan(make_problem(Options(dropout=0.1), q, q, q), DeviceSpec.for_arch("8.0"))
    operands = {"out": layout_of(q, "bhsd"), "lse": rows_of(np.zeros(5, np.float32))}
    seed, offset = 0x123456789ABCDEF0, 0xFEDCBA98
    params = parameters(plan, operands, seed, offset)
    assert [params[name] for name in ("seed_low", "seed_high", "offset")] == [0x9ABCDEF0, 0x12345678, offset]
    assert params["dropout_threshold"] == 6554
    assert params["kept_scale"] == np.float32(65536 / 58982)
    assert params["kept_scale_float64"] == 65536 / 58982


@given(data=st.data())
def test_argument_of_a_call(data):
    """Word by word, and what a launch is given."""
    q = np.zeros((2, 130, data.draw(st.sampled_from((64, 17)))), np.float16)
    causal = data.draw(st.sampled_from((False, True, "top_left")))
    window = data.draw(st.sampled_from((None, (5, None), (None, 7), (40, 3))))
    score = data.draw(st.sampled_from((None, Traced.of(lambda s, i, j, *, a, b: s + a[i] * b[j], "score"))))
    score_args = {} if score is None else {name: np.zeros(130, np.float32) for name in "ab"}
    options = Options(causal=causal, window=window, dropout=data.draw(st.sampled_from((0.0, 0.3))), score=score)
    pass_ = data.draw(st.sampled_from(PASSES_WITHOUT_TANGENTS))
    plan = choose_plan(make_problem(options, q, q, q, score_args=score_args), DeviceSpec.for_arch("9.0"), pass_)
    pointer_word = pointer_words(plan.problem)
    names = ["q", "k", "v", "out", "lse", *(("dout", "dq", "dk", "dv") if pass_ is BACKWARD else ())]
    operands = {name: layout_of(q, "bhsd") for name in names if name != "lse"} | {"lse": rows_of(q[..., 0])}
    names = data.draw(st.permutations([*names, *score_args, *(name for name, _ in plan.scratch)]))
    rows = [data.draw(st.sampled_from((0, 77))) for _ in plan.tensor_maps]

    def map_of(pointer, count):
        return f"{pointer} {count}".encode().ljust(128)

    argument = Argument(plan, operands, names, tuple((map_of, n, count) for n, count in enumerate(rows)))
    words = st.integers(0, 2**64 - 1)
    addresses = [data.draw(st.lists(words, min_size=len(names), max_size=len(names))) for _ in range(2)]
    kept_frames.clear()
    in_use: list[Frame] = []
    for _ in range(6):
        pointers = data.draw(st.sampled_from(addresses))
        mapped = data.draw(st.sampled_from((130, 256)))
        maps = [map_of(pointers[n], count or mapped) for n, count in enumerate(rows)]
        seed, offset = data.draw(words), data.draw(st.integers(0, 2**32 - 1))
        seqlen_k = data.draw(st.sampled_from((130, 131, 200)) if plan.any_length else st.just(130))
        of_length = replace(plan, problem=plan.problem.of_length(seqlen_k))
        call = data.draw(st.integers(0, 2**48 - 1))
        expected = parameters(of_length, operands, seed, offset, call)
        for name, pointer in zip(names, pointers, strict=True):
            expected.view(np.uint64)[pointer_word[name]] = pointer
        content = expected.tobytes()
        if maps:
            content = content.ljust(maps_offset(plan.problem), b"\0") + b"".join(maps)
        key = (argument.number, *pointers)
        frame = kept_frames.pop(key) if key in kept_frames else argument.frame(key)
        argument.fill(frame, mapped, (seed, offset), seqlen_k, call)
        assert ctypes.c_uint64.from_address(frame.address).value == frame.address + 8
        assert ctypes.string_at(frame.address + 8, len(content)) == content == frame.bytes[8:]
        assert all(frame is not other for other in in_use), "a frame belongs to one call"
        if data.draw(st.booleans()):
            kept_frames[key] = frame
        else:
            in_use.append(frame)


def test_the_frames_used_last_are_kept(monkeypatch):
    monkeypatch.setattr("cuflash.gpu.params.MOST_FRAMES", 8)
    q = np.zeros((5, 16), np.float16)
    plan = choose_plan(make_problem(Options(), q, q, q), DeviceSpec.for_arch("8.0"))
    operands = {"out": layout_of(q, "bhsd"), "lse": rows_of(np.zeros(5, np.float32))}
    argument, other = (Argument(plan, operands, ("q", "k")) for _ in range(2))
    assert argument.number != other.number
    kept_frames.clear()
    often = (argument.number, 0, 0)
    for n in range(1, 40):
        for key in (often, (other.number, n, n)):
            kept_frames[key] = kept_frames.pop(key) if key in kept_frames else argument.frame(key)
        assert len(kept_frames) <= 8
        assert often in kept_frames
    assert {n for _, n, _ in kept_frames} > {0, 38, 39}
    assert min(n for _, n, _ in kept_frames if n) >= 33


def test_bounds_that_do_not_exist_are_zero():
    params, plan, _ = filled()
    assert plan.problem.window_left is plan.problem.window_right is None
    assert params["left_offset"] == params["right_offset"] == params["softcap"] == 0
    assert params["scale"] == np.float32(24**-0.5)
    assert params["scale_float64"] == 24**-0.5


@example((None, 2**31 - 1), False)
@example((2**70, 0), True)
@given(st.tuples(*[st.none() | st.integers(0, 2**70)] * 2), st.sampled_from([False, True, "top_left"]))
def test_kernels_add_positions_to_bounds_of_any_number(window, causal):
    """In 32 bits. With batch_invariant, bounds stay that hide nothing in this call and may do so in another one."""
    params, plan, _ = filled(window=window, causal=causal, batch_invariant=True)
    bounds = {"left": window[0], "right": 0 if causal else window[1]}
    for side, given_bound in bounds.items():
        bound = getattr(plan.problem, f"window_{side}")
        assert bound == (None if given_bound is None or given_bound >= MAX_SEQLEN else given_bound)
        # Of as many keys as there may be, the last of which the diagonal has in the last row.
        most = abs(params[f"{side}_offset"].item()) + plan.problem.seqlen_q - 1
        assert most - plan.problem.seqlen_k + MAX_SEQLEN < 2**31


def test_matrices_have_one_head_and_one_batch_entry():
    q, k = np.zeros((5, 16), np.float16), np.zeros((7, 16), np.float16)
    plan = choose_plan(make_problem(Options(), q, k, k), DeviceSpec.for_arch("8.0"))
    params = parameters(plan, {"out": layout_of(q, "bhsd"), "lse": rows_of(np.zeros(5, np.float32))})
    assert params["q_strides"][0].tolist() == params["out_strides"][0].tolist() == [0, 0, 16]
    assert params["lse_strides"][0].tolist() == [0, 0, 1]
    assert params["batch"] == params["num_heads"] == params["num_heads_kv"] == 1
