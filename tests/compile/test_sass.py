"""What the assembler made of kernels: whether the softmax of compute capability 9.0 overlaps the products, and more.

The rows of the table are measured with the exponentials of a step between its two waits: after the one for S, in front
of the one for O. The assembler may sink them after the second, where nothing runs at their side any more; results stay
right, only slower.
"""

import itertools
import re
import shutil
import subprocess
from dataclasses import replace
from importlib import metadata

import pytest

import cuflash.testing as ct
from cuflash.gpu.compiler import Compiler, compile_spec, kernel_directory, supported_archs
from cuflash.gpu.nvrtc import Nvrtc
from cuflash.plan import DeviceSpec, choose_plan
from cuflash.plan.sm90.jvp import JVP_SM90_TILES, JVP_WIDE_SM90_TILES
from cuflash.plan.sm90.tiles import FORWARD_SM90_TILES
from cuflash.spec.passes import BACKWARD, FORWARD, JVP
from tests.compile.test_plans import SERIALIZED, takes_values
from tests.sampling import sample


def find_nvdisasm():
    """The disassembler on the path, or of its wheel; None if there is none."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or ()
    except metadata.PackageNotFoundError:
        files = ()
    in_wheel = [str(path.locate()) for path in files if path.name == "nvdisasm"]
    return shutil.which("nvdisasm") or next(iter(in_wheel), None)


pytestmark = [
    pytest.mark.skipif(find_nvdisasm() is None, reason="no nvdisasm: nvidia-cuda-nvdisasm is not installed"),
    pytest.mark.skipif("sm_90" not in supported_archs(), reason="this NVRTC does not know sm_90"),
]

KEEPING = tuple(tile for tile in FORWARD_SM90_TILES if tile.ping_pong and takes_values(tile))


def kernels_of(head_dim, tiles=None, pass_=FORWARD, **options):
    """Those of a small problem."""
    case = ct.Case(seqlen_q=64, seqlen_k=64, head_dim=head_dim, dtype="bfloat16", **options)
    return kernels_of_case(case, tiles, pass_)


def kernels_of_case(case, tiles=None, pass_=FORWARD, **options):
    problem = replace(case.problem, **options)
    return choose_plan(problem, DeviceSpec.for_arch("9.0"), pass_, tiles=tiles).kernels


def instructions(kernel, compile=compile_spec):
    """Those of a kernel in the order of their addresses."""
    compiled = compile(kernel)
    assert SERIALIZED not in compiled.resources.log
    command = [find_nvdisasm(), "--print-code", str(compiled.path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text, re.MULTILINE)


def exponentials(code):
    """(in front of the wait for O, after it) of every step: of its exponentials up to the next product."""
    waits = [i for i, text in enumerate(code) if re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", text)]
    for start in waits:
        stop = next((i for i in range(start, len(code)) if "HGMMA" in code[i]), len(code))
        step = code[start:stop]
        wait_for_o = next(i for i, text in enumerate(step) if re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", text))
        yield tuple(sum("MUFU.EX2" in text for text in part) for part in (step[:wait_for_o], step[wait_for_o:]))


@pytest.mark.one_in(24)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window": (30, None)}], ids=["full", "causal", "window"]
)
@pytest.mark.parametrize("tile", KEEPING, ids=lambda tile: f"{tile.max_dim}-{tile.block_m}x{tile.block_n}")
def test_exponentials_stay_beside_the_product(tile, options):
    (kernel,) = kernels_of(tile.max_dim, (tile,), **options)
    steps = list(exponentials(instructions(kernel)))
    assert len(steps) == 2 + ("window" in options)  # with the mask, without, and with that of the left edge
    for before, after in steps:
        assert before >= tile.block_n // 2  # of the two rows of a lane, a quarter of the columns
        assert after == 0


@pytest.mark.parametrize("tile", sample(JVP_SM90_TILES, 2), ids=str)
def test_exponentials_stay_beside_the_product_of_tangents(tile):
    """In both loops they are in front of the wait for tX. After it there are those of factors alone."""
    case = ct.Case(seqlen_q=64, seqlen_k=64, head_dim=tile.max_dim, dtype="bfloat16")
    (kernel,) = kernels_of_case(case, (tile,), JVP, moved=("q", "k", "v"))
    steps = exponentials(instructions(kernel))
    assert sum(before >= tile.block_n // 2 and after <= 4 for before, after in steps) == 2


def test_tangents_are_weighed_beside_the_products_of_values():
    """In both loops of sm90/jvp_wide.cu: after the wait for these products O and A are rescaled, nothing is added."""
    case = ct.Case(seqlen_q=64, seqlen_k=64, head_dim=256, dtype="bfloat16")
    (kernel,) = kernels_of_case(case, JVP_WIDE_SM90_TILES, JVP, moved=("q", "k", "v"))
    code = instructions(kernel)
    barriers = [i for i, text in enumerate(code) if "BAR.SYNC" in text]
    steps = []
    for before, after in itertools.pairwise(barriers):
        waits = [i for i in range(before, after) if re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", code[i])]
        if waits and code[after].endswith("0x100"):  # the barrier of both consumers, before P is written
            steps.append(
                [sum("FADD" in text for text in part) for part in (code[before : waits[0]], code[waits[0] : after])]
            )
    assert len(steps) == 2
    assert all(before >= 32 and after == 0 for before, after in steps)


def test_left_to_itself_the_assembler_moves_them(tmp_path):
    """Else the kernel need not ask, and the test above proves nothing."""
    shutil.copytree(kernel_directory(), tmp_path / "kernels")
    source = tmp_path / "kernels" / "sm90" / "forward.cu"
    asking = source.read_text()
    source.write_text(re.sub(r"^.*\bptx::keep_before\(.*$", "", asking, flags=re.MULTILINE))
    assert source.read_text() != asking
    compiler = Compiler(tmp_path / "kernels", tmp_path / "cache", Nvrtc())

    def compile(kernel):
        return compiler.compile(kernel.source, kernel.name, dict(kernel.defines), kernel.target)

    for tile in sample(KEEPING, 5):
        (kernel,) = kernels_of(tile.max_dim, (tile,))
        steps = list(exponentials(instructions(kernel, compile)))
        assert any(after > 0 for _, after in steps), tile


def test_kernels_that_follow_wait_before_they_load():
    first, *others = kernels_of(64, pass_=BACKWARD, num_heads=4, num_heads_kv=1)
    assert len(others) == 2
    assert not any("ACQBULK" in text for text in instructions(first))
    for kernel in others:
        code = instructions(kernel)
        (wait,) = (i for i, text in enumerate(code) if "ACQBULK" in text)
        assert not any(re.search(r"\b(LDG?|STG?|UBLKCP|UTMALDG|RED|ATOMG?)\b", text) for text in code[:wait])


@pytest.mark.parametrize(
    ("dtype", "precision", "kv_dtype"),
    [("bfloat16", "highest", ""), ("bfloat16", "highest", "float8_e5m2"), ("float32", "tf32", "float8_e5m2")],
)
def test_dropout_compares_halves_where_no_other_register_has_halves(dtype, precision, kv_dtype):
    """ptxas of CUDA 13.0 lets that instruction overwrite a half that is still to be read (common/score/dropout.cuh)."""
    case = ct.Case(seqlen_q=256, seqlen_k=256, head_dim=64, dtype=dtype, kv_dtype=kv_dtype, dropout=0.1, softcap=50.0)
    (kernel,) = [k for k in kernels_of_case(case, precision=precision) if "forward" in k.source]
    compares = [line for line in instructions(kernel) if "VIMNMX.U16x2" in line]
    assert bool(compares) == (kv_dtype == "")
