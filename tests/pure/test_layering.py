"""Who may know whom: imports run one way, and heavy modules stay where they belong.

Words of the GPU stay in `kernels/ptx`, and those of other instruction sets in `cuflash/cpu/core/simd`.
"""

import ast
import functools
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from tests.many_cases import each

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cuflash"
# By their dotted names within the package; a folder's own is that of the folder.
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
CORE = {
    path.relative_to(PACKAGE / "cpu" / "core").as_posix(): path
    for path in (PACKAGE / "cpu" / "core").rglob("*")
    if path.suffix in (".h", ".cpp")
}
KERNELS = {path.relative_to(ROOT / "kernels").as_posix(): path for path in (ROOT / "kernels").rglob("*.cu*")}

# The folders of the kernels, and what each may include besides itself. mma.sync runs on every device: sm90 has it too.
FOLDERS = {
    "ptx": set(),
    "common": {"ptx"},
    "sm80": {"ptx", "common"},
    "sm90": {"ptx", "common", "sm80"},
    "helpers": {"ptx", "common", "sm80"},
}

# What the modules of a folder may import besides each other. "" are those at the root, the public face; `cli` may
# import all.
MAY_IMPORT: dict[str, set[str]] = {
    "arrays": set(),
    "score_mod": {"arrays"},
    "spec": {"arrays", "score_mod"},
    "plan": {"arrays", "score_mod", "spec"},
    "cpu": {"arrays", "score_mod", "spec"},
    "testing": {"arrays", "score_mod", "spec"},
    "gpu": {"arrays", "score_mod", "spec", "plan"},
    "emulator": {"arrays", "spec", "plan", "gpu"},
    "shards": {"arrays", "score_mod", "spec", "cpu", "gpu"},
    "streaming": {"arrays", "score_mod", "spec", "plan", "cpu", "shards"},
    "distributed": {"arrays", "spec", "cpu", "gpu", "shards"},
    "": {"arrays", "score_mod", "spec", "cpu", "gpu", "shards", "streaming", "distributed"},
}
# What other frameworks see of the public face.
MAY_IMPORT["torch"] = MAY_IMPORT["jax"] = {"", "arrays", "score_mod", "spec"}
MAY_IMPORT["cli"] = MAY_IMPORT[""] | {"", "plan", "testing", "emulator", "distributed"}

# What modules import from elsewhere besides the standard library: always, and only when it is needed. A process that
# plans or compiles loads no CUDA library, one that computes on the CPU no CuPy.
ALWAYS: dict[str, set[str]] = {
    "plan": set(),
    "arrays": {"numpy", "ml_dtypes"},
    "testing": {"numpy", "ml_dtypes", "typing_extensions", "hypothesis"},
    "cli": {"numpy", "ml_dtypes"},
    "gpu.backend": {"cupy"},
    "gpu.bound": {"cupy"},
    "gpu.device": {"cupy"},
    "gpu.launch": {"cupy"},
    "gpu.repeated_launches": {"cupy"},
    "gpu.timing": {"numpy", "cupy"},
    "torch": {"numpy", "ml_dtypes", "torch"},
    "jax": {"numpy", "jax"},
}
ALWAYS_ELSEWHERE = {"numpy"}
WHEN_NEEDED: dict[str, set[str]] = {
    "plan.tensor_map": {"cuda"},
    "gpu.nvrtc": {"cuda", "cupy", "cupy_backends"},
    "gpu.timing": {"ml_dtypes"},
    "distributed.transports": {"cupy"},
    "cli.here": {"cupy"},
    "cli.demo": {"cupy"},
    "torch.tensors": {"cupy"},
    "jax.primitives": {"cupy"},
    "frameworks": {"cupy"},
}
FOR_TYPES = {"typing_extensions"}  # for a type checker

# Words of the GPU that only `kernels/ptx` says. (Comments may.)
GPU_WORDS = re.compile(
    r"\basm\b|\b__shared__\b|\b__syncthreads\w*|\b__syncwarp\b|\bthreadIdx\b|\bblockIdx\b|\bblockDim\b|\bgridDim\b"
    r"|\b__(?:shfl|ballot|any|all|activemask|match)_?\w*_?sync\b|\batomic[A-Z]\w+|\b__ld(?:g|cs|cg)\b|\b__global__\b"
)

# Intrinsics of the CPU and their headers, and conditions on instruction sets and architectures.
CPU_WORDS = re.compile(
    r"\b_(?:mm\d*|tile)_\w+|\b__m(?:mask)?\d+\w*|\b__builtin_(?:ia32|cpu|neon|aarch64)\w*|\basm\b"
    r"|\bv[a-z0-9]+(?:_[a-z0-9]+)*_[fusp](?:8|16|32|64)\b|\b(?:float|u?int|poly)\d+x\d+(?:x\d)?_t\b"
    r"|<(?:\w*intrin|arm_\w+|cpuid)\.h>|\b__(?:AVX|SSE|FMA|F16C|AMX|ARM_|x86_64|aarch64|i386|arm)\w*|\bUSES_\w+"
)


@functools.cache
def imports(path):
    """(module, names imported from it, whether at import time) of every import in a file."""
    return tuple(_imports(path))


def _imports(path):
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
            folder = module.removeprefix("cuflash").removeprefix(".")
            for name in names or ("",):
                within = f"{folder}.{name}".strip(".")
                yield within if within in MODULES else folder or "__init__"


def folder_of(name):
    return name.split(".")[0] if (PACKAGE / name.split(".")[0]).is_dir() else ""


def test_every_folder_is_in_the_order():
    assert {folder_of(name) for name in MODULES} == set(MAY_IMPORT)


@each(sorted(set(MODULES) - {"__main__"}))
def test_imports_run_one_way(name):
    folder = folder_of(name)
    wrong = [other for other in own_imports(MODULES[name]) if folder_of(other) not in MAY_IMPORT[folder] | {folder}]
    assert not wrong, f"{name} imports {wrong}"


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: {other for other in own_imports(path) if other != name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


@each(sorted(MODULES))
def test_heavy_modules_stay_where_they_belong(name):
    foreign = {
        (module.split(".")[0], always)
        for module, _, always in imports(MODULES[name])
        if module.split(".")[0] not in {*sys.stdlib_module_names, "cuflash"}
    }
    at_import = {module for module, always in foreign if always}
    later = {module for module, always in foreign if not always}
    always = ALWAYS.get(name, ALWAYS.get(folder_of(name), ALWAYS_ELSEWHERE))
    assert at_import <= always
    assert later <= always | WHEN_NEEDED.get(name, set()) | FOR_TYPES


# ---- kernels ---------------------------------------------------------------------------------------------------------


def code_of(path):
    """The text without comments, line numbers kept."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), path.read_text(), flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def includes(name):
    return re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', code_of(KERNELS[name]), re.MULTILINE)


@each(sorted(n for n in KERNELS if not n.startswith("ptx/")))
def test_words_of_the_gpu_stay_in_the_ptx_folder(name):
    lines = code_of(KERNELS[name]).splitlines()
    said = [f"{name}:{number}: {m.group()}" for number, line in enumerate(lines, 1) for m in GPU_WORDS.finditer(line)]
    assert not said


@each(sorted(KERNELS))
def test_kernels_include_headers_by_their_folder(name):
    wrong = [other for other in includes(name) if other not in KERNELS or not other.endswith(".cuh")]
    assert not wrong


@each(sorted(KERNELS))
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


@each(sorted(n for n in KERNELS if n.endswith(".cuh")))
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


# ---- the compiled core -----------------------------------------------------------------------------------------------


@each(sorted(n for n in CORE if not n.startswith("simd/")))
def test_words_of_instruction_sets_stay_in_the_simd_folder(name):
    lines = code_of(CORE[name]).splitlines()
    said = [f"{name}:{number}: {m.group()}" for number, line in enumerate(lines, 1) for m in CPU_WORDS.finditer(line)]
    assert not said


@each(sorted(n for n in CORE if n.startswith("simd/")))
def test_the_simd_folder_knows_no_attention(name):
    own = re.findall(r'^\s*#\s*include\s+"([^"]+)"', code_of(CORE[name]), re.MULTILINE)
    assert {f"simd/{other}" for other in own} <= set(CORE)


@each(sorted(n for n in CORE if n.endswith(".h")))
def test_headers_of_the_core_are_read_once(name):
    assert "#pragma once" in CORE[name].read_text()


def test_the_word_list_of_instruction_sets_finds_what_it_is_for():
    for words in (
        "_mm256_max_ps(x, y)",
        "__m512bh both",
        "__mmask16",
        "_tile_release()",
        "vfmaq_f32(sum, x, y)",
        "vcvt_f32_f16(x)",
        "vmulq_n_f32(x, y)",
        "float32x4_t x",
        "#include <arm_neon.h>",
        "#if defined(__AVX512BF16__)",
        "#elif defined(__x86_64__)",
        'asm volatile("yield")',
        "__builtin_ia32_pause()",
    ):
        assert CPU_WORDS.search(words)
    assert not CPU_WORDS.search(
        "add_product(sum, x, y); Vector<float> value; values_of_32; __builtin_prefetch(p, 0, 2)"
    )
