"""Who may know whom: imports run one way, heavy modules stay where they belong, and GPU words stay in the PTX room."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cuflash"
# By their dotted names within the package; a folder's own is that of the folder.
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
KERNELS = {path.relative_to(ROOT / "kernels").as_posix(): path for path in (ROOT / "kernels").rglob("*.cu*")}

# The folders of the kernels, and what each may include besides itself. mma.sync runs on every device: sm90 has it too.
FOLDERS = {
    "ptx": set(),
    "common": {"ptx"},
    "sm80": {"ptx", "common"},
    "sm90": {"ptx", "common", "sm80"},
    "around": {"ptx", "common", "sm80"},
}

# A module imports only modules to the left of it.
ORDER = [
    "values", "row_sums", "spans", "score.nodes", "score.tracing", "score.functions", "score.kinds", "score.evaluation",
    "score.ranges", "score.derivatives", "score.factors", "score.intervals", "score.emission", "score.tile_bounds",
    "score.tables",
    "score.places", "score.program", "score.text", "score.hoisting", "score",
    "operands", "terms", "options", "captured", "problem", "block_masks", "dropout", "reference",
    "cpu.jobs", "cpu.packed", "cpu.parts", "cpu.part_products", "cpu.fallback", "cpu.core", "cpu.functions_as_terms",
    "cpu", "float8",
    "scalars", "interop", "quantization", "recording", "elementwise", "merging",
    "tensor_map", "binding", "equivalents", "leading", "kernel_cache", "nvrtc",
    "planning.device", "planning.tiles", "planning.traffic", "planning.launch_plan", "planning.argument",
    "planning.draft", "planning.key_splits", "planning.families", "planning.sm80", "planning.sm80_decode",
    "planning.scores", "planning.sm90", "planning.sm90.scored", "planning.sm90.tiles", "planning.sm90.decode_tiles",
    "planning.sm90.wide_tiles",
    "planning.sm90.copies", "planning.sm90.bf16_split", "planning.sm90.mask_bits", "planning.sm90.forward",
    "planning.sm90.decode", "planning.sm90.backward", "planning.sm90.backward_bias", "planning.sm90.backward_wide",
    "planning.forward", "planning.backward", "planning.choose", "planning",
    "params", "compiler", "tuning", "launch", "stopwatch", "progress", "host", "parts", "results",
    "streaming.source", "streaming.chunks", "streaming.belts", "streaming.cuda", "streaming.execution",
    "streaming.memory", "streaming.calls", "streaming", "preparation",
    "flash_attention",
    "functional", "__init__",
    "distributed.split", "distributed.packed", "distributed.schedule", "distributed.transports", "distributed.mpi",
    "distributed.nccl", "distributed.arguments", "distributed.agreement", "distributed.streams",
    "distributed.run", "distributed.travel", "distributed.sums", "distributed.execution", "distributed.calls",
    "distributed.context", "distributed",
    "emulator.launching", "emulator.building", "emulator.memory", "emulator.passes", "emulator",
    "testing.arrays", "testing.leading", "testing.case", "testing.strategies", "testing.scales", "testing.rule",
    "testing.float8",
    "testing.differences", "testing",
    "cli", "cli.numbers", "cli.arguments", "cli.here", "cli.cache", "cli.info", "cli.plans", "cli.tune", "cli.sampled",
    "cli.demo", "cli.check", "cli.main", "__main__",
]  # fmt: skip

# What each module may import at import time besides the standard library, and what only when it is needed.
ALWAYS = {
    "values": set(),
    "row_sums": {"numpy"},
    "operands": set(),
    "spans": set(),
    "options": set(),
    "terms": set(),
    "score": {"numpy"},
    "captured": set(),
    "problem": set(),
    "block_masks": {"numpy"},
    "dropout": {"numpy"},
    "tensor_map": set(),
    "binding": {"numpy"},
    "equivalents": set(),
    "leading": set(),
    "planning": set(),
    "params": {"numpy"},
    "kernel_cache": set(),
    "recording": set(),
    "nvrtc": set(),
    "compiler": set(),
    "tuning": set(),
    "launch": {"cupy", "numpy"},
    "stopwatch": {"numpy", "cupy"},
    "progress": set(),
    "reference": {"numpy", "ml_dtypes", "typing_extensions"},
    "cpu.jobs": {"numpy"},
    "cpu.packed": {"numpy"},
    "cpu.fallback": {"numpy"},
    "cpu.core": {"numpy"},
    "cpu": {"numpy"},
    "scalars": {"numpy"},
    "interop": {"numpy", "ml_dtypes"},
    "float8": {"numpy", "ml_dtypes"},
    "quantization": {"numpy"},
    "elementwise": {"numpy"},
    "merging": {"numpy"},
    "flash_attention": set(),
    "__init__": set(),
    "testing": {"numpy", "ml_dtypes", "hypothesis"},
    "host": {"numpy"},
    "parts": {"numpy"},
    "results": set(),
    "streaming": {"numpy"},
    "functional": set(),
    "distributed": {"numpy"},
    "preparation": set(),
    "emulator": {"numpy"},
    "cli": {"numpy", "ml_dtypes"},
    "__main__": set(),
}
WHEN_NEEDED = {
    "operands": {"numpy", "ml_dtypes"},
    "planning.tiles": {"typing_extensions"},  # for a type checker
    "planning.sm90.scored": {"typing_extensions"},  # for a type checker
    "values": {"numpy"},
    "problem": {"numpy", "typing_extensions"},  # for a type checker
    "flash_attention": {"typing_extensions"},
    "preparation": {"typing_extensions"},
    "tuning": {"typing_extensions"},
    "tensor_map": {"cuda"},
    "nvrtc": {"cuda", "cupy", "cupy_backends"},
    "stopwatch": {"ml_dtypes"},
    "distributed.context": {"typing_extensions"},  # for a type checker
    "distributed.transports": {"cupy"},
    "cli.here": {"cupy"},
    "cli.demo": {"cupy"},
}

# Words of the GPU that only the PTX room says. (Comments may.)
GPU_WORDS = re.compile(
    r"\basm\b|\b__shared__\b|\b__syncthreads\w*|\b__syncwarp\b|\bthreadIdx\b|\bblockIdx\b|\bblockDim\b|\bgridDim\b"
    r"|\b__(?:shfl|ballot|any|all|activemask|match)_?\w*_?sync\b|\batomic[A-Z]\w+|\b__ld(?:g|cs|cg)\b|\b__global__\b"
)


def imports(path):
    """(module, names imported from it, whether at import time) of every import in a file."""
    tree = ast.parse(path.read_text())
    inside = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    checking = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    inside |= {id(node) for block in checking for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, (), id(node) not in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield node.module, tuple(alias.name for alias in node.names), id(node) not in inside


def own_imports(path):
    """Modules of cuflash that a file imports."""
    for module, names, _ in imports(path):
        if module == "cuflash" or module.startswith("cuflash."):
            room = module.removeprefix("cuflash").removeprefix(".")
            for name in names or ("",):
                within = f"{room}.{name}".strip(".")
                yield within if within in MODULES else room or "__init__"


def test_every_module_has_its_place():
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_run_one_way(name):
    before = ORDER[: ORDER.index(name)]
    wrong = [other for other in own_imports(MODULES[name]) if other not in before]
    assert not wrong, f"{name} imports {wrong}"


ROOMS_OF_THE_CPU = {name for name in MODULES if name.startswith("cpu")}


@pytest.mark.parametrize("name", ["reference", *sorted(ROOMS_OF_THE_CPU)])
def test_the_cpu_side_knows_only_the_problem_and_what_is_dropped(name):
    others = {other for other in MODULES if other.startswith("score")}
    others |= set() if name == "reference" else ROOMS_OF_THE_CPU | {"row_sums"}
    assert set(own_imports(MODULES[name])) <= {"values", "operands", "options", "terms", "problem", "dropout"} | others


@pytest.mark.parametrize("name", sorted(name for name in MODULES if not name.startswith(("__", "cli"))))
def test_nothing_but_the_front_door_imports_the_interface(name):
    behind = {"flash_attention"} if name == "functional" else set()
    assert {"flash_attention", "functional", "__init__"} & set(own_imports(MODULES[name])) <= behind


@pytest.mark.parametrize("name", sorted(MODULES))
def test_heavy_modules_stay_where_they_belong(name):
    foreign = {
        (module.split(".")[0], always)
        for module, _, always in imports(MODULES[name])
        if module.split(".")[0] not in {*sys.stdlib_module_names, "cuflash"}
    }
    at_import = {module for module, always in foreign if always}
    later = {module for module, always in foreign if not always}
    always = ALWAYS[name if name in ALWAYS else name.split(".")[0]]
    assert at_import <= always
    assert later <= always | WHEN_NEEDED.get(name, set())


# ---- kernels ---------------------------------------------------------------------------------------------------------


def code_of(path):
    """The text without comments, line numbers kept."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), path.read_text(), flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def includes(name):
    return re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', code_of(KERNELS[name]), re.MULTILINE)


@pytest.mark.parametrize("name", sorted(n for n in KERNELS if not n.startswith("ptx/")))
def test_words_of_the_gpu_stay_in_the_ptx_room(name):
    lines = code_of(KERNELS[name]).splitlines()
    said = [f"{name}:{number}: {m.group()}" for number, line in enumerate(lines, 1) for m in GPU_WORDS.finditer(line)]
    assert not said


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernels_include_headers_by_their_folder(name):
    wrong = [other for other in includes(name) if other not in KERNELS or not other.endswith(".cuh")]
    assert not wrong


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_folders_of_kernels_know_only_those_before_them(name):
    folder = name.split("/")[0]
    assert {other.split("/")[0] for other in includes(name)} <= FOLDERS[folder] | {folder}


def test_headers_do_not_include_in_circles_and_are_all_used():
    reachable = {}

    def walk(name, trail):
        assert name not in trail, f"includes in a circle: {' > '.join((*trail, name))}"
        if name not in reachable:
            reachable[name] = set().union(*({x} | walk(x, (*trail, name)) for x in includes(name)), set())
        return reachable[name]

    sources = [name for name in KERNELS if name.endswith(".cu")]
    used = set().union(*(walk(name, ()) for name in sources))
    assert used == {name for name in KERNELS if name.endswith(".cuh")}


@pytest.mark.parametrize("name", sorted(n for n in KERNELS if n.endswith(".cuh")))
def test_headers_are_read_once(name):
    assert "#pragma once" in KERNELS[name].read_text()


def test_the_word_list_finds_what_it_is_for():
    for words in (
        "asm volatile(",
        "__shared__ float",
        "__syncthreads();",
        "threadIdx.x",
        "__shfl_xor_sync(",
        "atomicAdd(",
    ):
        assert GPU_WORDS.search(words)
    assert not GPU_WORDS.search("ptx::shuffle_xor(value, 1); thread_index(); plasma_asm2")
