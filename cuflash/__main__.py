"""``python -m cuflash``: the main job, what there is here, what would run, filling the cache, a self-test."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import math
import os
import platform
import re
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuflash import FlashAttention, __version__, compiler, cpu, kernel_cache, nvrtc, reference, tuning
from cuflash.cpu.jobs import count_cores
from cuflash.flash_attention import Causal, CpuPlan
from cuflash.operands import DTYPES, user_shape
from cuflash.options import LAYOUTS, PRECISIONS, Options
from cuflash.planning import DeviceSpec, KernelSpec, LaunchPlan, choose_plan
from cuflash.problem import Problem, make_problem
from cuflash.progress import Bar
from cuflash.tuning import tuned_plan
from cuflash.values import counted

Array = NDArray[Any]

PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings")
CAUSAL: dict[str, Causal] = {"no": False, "yes": True, "top_left": "top_left"}
ORDERS = ("fifo", "lifo", "reversed", "random")  # of the threads that can run, in the emulator
NUM_SAMPLES = 6  # rows, and keys, whose results the demo checks
NO_GPU = "there is no GPU here"
NAME_ONE = "for one that is elsewhere give its compute capability, such as --arch 9.0"
QUICK = ("plain", "one query", "pages", "cu_seqlens")  # cases of `check --quick`
INTERRUPTED, PIPE_CLOSED = 128 + 2, 128 + 13  # exit codes, as shells give them to what these signals end


class Failure(Exception):
    """Why a command cannot do what it was asked to, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 is success, 1 failure, 130 an interruption, 141 a reader of the output that has gone. Arguments that cannot be
    parsed exit with 2.
    """
    try:
        try:
            return run_command(make_parser().parse_args(argv))
        finally:
            sys.stdout.flush()  # a closed pipe shows here, and not when Python ends, which would complain of it
    except BrokenPipeError:
        # What is still to be written goes nowhere. (An output that is no file, as in tests, needs nothing.)
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def run_command(args: argparse.Namespace) -> int:
    """Run it; what is known to go wrong is said in one line."""
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except BrokenPipeError:
        raise
    except (Failure, NotImplementedError, ImportError, MemoryError, OSError, ValueError) as error:
        print(f"python -m cuflash {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
    except compiler.CompileError as error:
        print(error, file=sys.stderr)
    return 1


# ---- Arguments ------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Says what is wrong in the last line, and in place of all arguments how they are shown."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog} --help shows all arguments\n{self.prog}: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``python -m cuflash``; ``args.run`` is the command."""
    parser = Parser(
        prog="python -m cuflash", description="Exact attention and its gradients for CuPy and NumPy arrays."
    )
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, add_arguments, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run=run)
        add_arguments(command)
    return parser


def add_demo_arguments(command: argparse.ArgumentParser) -> None:
    add_backend_argument(command)
    command.add_argument("--seqlen", type=positive, help="queries and keys (default: 65536 on a GPU, 16384 on a CPU)")
    command.add_argument("--num-heads", type=positive, help="heads (default: 16 on a GPU, 8 on a CPU)")
    command.add_argument("--head-dim", type=positive, help="head dimension (default: 128 on a GPU, 64 on a CPU)")
    command.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")


def add_check_arguments(command: argparse.ArgumentParser) -> None:
    add_backend_argument(command)
    command.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    command.add_argument("--quick", action="store_true", help="a few kinds of problem only: seconds, not minutes")
    command.add_argument(
        "--emulate",
        action="store_true",
        help="in a checkout: run the CUDA kernels on the CPU, with every access and barrier checked; what is below "
        "goes with it",
    )
    command.add_argument(
        "--schedule",
        nargs="+",
        choices=ORDERS,
        default=ORDERS,
        help=f"who runs next where a GPU leaves it open (default: {' '.join(ORDERS)})",
    )
    add_problem_arguments(command, head_dim=64, seqlen=200, num_heads=2)


def add_backend_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--backend", choices=("gpu", "cpu"), help="default: gpu where there is one, else cpu")


def add_problem_arguments(
    command: argparse.ArgumentParser, head_dim: int = 128, seqlen: int = 4096, num_heads: int = 16
) -> None:
    command.add_argument(
        "--arch",
        nargs="+",
        type=capability,
        metavar="X.Y",
        help="compute capabilities, e.g. 8.0 8.6 9.0 12.0 (default: what is here); 9 is 9.0",
    )
    command.add_argument("--pass", dest="passes", choices=("forward", "backward"), help="default: both passes")
    group = command.add_argument_group(
        "problems", "All combinations of the values given to --dtype, --head-dim and --causal."
    )
    group.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="default: bfloat16")
    group.add_argument(
        "--head-dim", nargs="+", type=positive, default=[head_dim], metavar="D", help=f"default: {head_dim}"
    )
    group.add_argument(
        "--causal",
        nargs="*",
        choices=CAUSAL,
        default=["no"],
        help="alone it means yes; default: no",
    )
    group.add_argument("--batch", type=positive, default=1, help="default: 1")
    group.add_argument("--seqlen", type=positive, default=seqlen, help=f"queries, and keys (default: {seqlen})")
    group.add_argument("--seqlen-k", type=positive, help="keys, if they are more or fewer")
    group.add_argument("--num-heads", type=positive, default=num_heads, help=f"default: {num_heads}")
    group.add_argument("--num-heads-kv", type=positive, help="heads of k and v, if they are fewer")
    group.add_argument("--head-dim-v", type=positive, help="head dimension of v, if it differs")
    group.add_argument("--window", type=window, metavar="LEFT,RIGHT", help="e.g. 1023,0; no bound is none: 1023,none")
    group.add_argument("--softcap", type=number, metavar="C", help="scores are capped at C (default: they are not)")
    group.add_argument("--layout", choices=LAYOUTS, default="bhsd", help="default: bhsd")
    group.add_argument("--dropout", type=number, default=0.0, metavar="RATE", help="default: 0")
    group.add_argument("--block-size", type=positive, default=128, help="of a block mask (default: 128)")
    group.add_argument("--deterministic", action="store_true", help="gradients bitwise equal run after run")
    group.add_argument("--precision", choices=PRECISIONS, default="highest", help="of float32 (default: highest)")
    for name in ("bias", "mask", "kv-lengths", "alibi-slopes", "sinks", "block-mask"):
        group.add_argument(f"--{name}", action="store_true", help=f"{name.replace('-', '_')} is given")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def capability(text: str) -> str:
    """A compute capability; a major version alone is that with the minor version 0."""
    return f"{text}.0" if text.isdecimal() and int(text) < 80 else text


def window(text: str) -> tuple[int | None, int | None]:
    try:
        left, right = (None if side.strip() == "none" else int(side) for side in text.split(","))
    except ValueError:
        form = "LEFT,RIGHT with an integer or none on each side, such as 1023,0 or 1023,none"
        raise argparse.ArgumentTypeError(f"{text} is not of the form {form}") from None
    return left, right


class Shape(NamedTuple):
    """As much of an array as a problem is made of."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def strides(self) -> tuple[int, ...]:
        """Those of a contiguous array."""
        return tuple(math.prod(self.shape[axis + 1 :]) * self.dtype.itemsize for axis in range(len(self.shape)))


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    """The problems that the arguments of `add_problem_arguments` name."""
    for options, shapes in calls(args):
        yield make_problem(options, **shapes)


def calls(args: argparse.Namespace) -> Iterator[tuple[Options, dict[str, Any]]]:
    """The options of these problems, and the shapes of the arrays by name."""
    seqlen_k, num_heads_kv = args.seqlen_k or args.seqlen, args.num_heads_kv or args.num_heads
    for dtype_name, head_dim, causal in itertools.product(args.dtype, args.head_dim, args.causal or ["yes"]):
        options = Options(
            causal=CAUSAL[causal],
            window=args.window,
            softcap=args.softcap,
            layout=args.layout,
            deterministic=args.deterministic,
            precision=args.precision,
            dropout=args.dropout,
            block_size=args.block_size,
        )
        dtype, softmax_dtype = numpy_dtype(dtype_name), np.dtype("f8" if dtype_name == "float64" else "f4")
        q, k, v = (
            Shape(user_shape(args.batch, heads, seqlen, dim, 4, args.layout), dtype)
            for heads, seqlen, dim in (
                (args.num_heads, args.seqlen, head_dim),
                (num_heads_kv, seqlen_k, head_dim),
                (num_heads_kv, seqlen_k, args.head_dim_v or head_dim),
            )
        )
        scores_shape = (args.batch, args.num_heads, args.seqlen, seqlen_k)
        terms = {
            "bias": Shape(scores_shape, softmax_dtype),
            "mask": Shape(scores_shape, np.dtype(bool)),
            "kv_lengths": Shape((args.batch,), np.dtype(np.int32)),
            "alibi_slopes": Shape((args.num_heads,), softmax_dtype),
            "sinks": Shape((args.num_heads,), softmax_dtype),
            "block_mask": Shape((-(-args.seqlen // args.block_size), -(-seqlen_k // args.block_size)), np.dtype(bool)),
        }
        yield options, {"q": q, "k": k, "v": v} | {name: x for name, x in terms.items() if getattr(args, name)}


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


# ---- What there is here ---------------------------------------------------------------------------------------------


def find_gpu() -> tuple[ModuleType | None, str]:
    """CuPy, if it is here and sees a device, and else why not."""
    try:
        import cupy
    except ImportError as error:
        return None, f"CuPy is not importable ({error})"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return None, f"CuPy sees no device ({error})"
    return cupy, ""


def array_module(backend: str | None) -> ModuleType:
    """CuPy or NumPy, as `--backend` says; without it CuPy where there is a device."""
    if backend == "cpu":
        return np
    cupy, reason = find_gpu()
    if cupy is None and backend == "gpu":
        raise Failure(f"{NO_GPU}: {reason}")
    return cupy or np


def local_device() -> DeviceSpec | None:
    """The current device of CuPy, None without one."""
    cupy, _ = find_gpu()
    if cupy is None:
        return None
    from cuflash import launch

    return launch.device_spec(cupy.cuda.Device().id)


def describe_here(xp: ModuleType) -> str:
    if xp is np:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return f"the CPU, {cores} cores, NumPy {np.__version__}"
    properties = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)
    return f"{properties['name'].decode()}, CuPy {xp.__version__}"


def info(args: argparse.Namespace) -> int:
    rows = [("cuflash", f"{version_of('cuflash')}, kernels in {compiler.kernel_directory()}")]
    rows.append(("Python", f"{platform.python_version()}, {platform.platform()}"))
    rows.extend((name, version) for name in PACKAGES if (version := version_of(name)))
    rows.append(("CPU", f"{count_cores()} threads, {cpu.describe()}"))
    try:
        found = f"{compiler.nvrtc_version()}, compiles for {' '.join(compiler.supported_archs())}"
    except nvrtc.NvrtcNotFoundError as error:
        found = f"none: {' '.join(str(error).split())}"
    rows.append(("NVRTC", found))
    rows.append(("cache", f"{kernel_cache.cache_directory()}, {cached_kernels()}"))
    cupy, reason = find_gpu()
    if cupy is None:
        rows.append(("GPU", f"none: {reason}"))
    else:
        runtime = cupy.cuda.runtime
        rows.append(("CUDA", f"driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}"))
        rows.extend((f"GPU {i}", describe_device(cupy, i)) for i in range(runtime.getDeviceCount()))
    print_rows(rows)
    return 0


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Names and what there is to say about them, in two columns."""
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        print(f"{name:<{width}}{text}")


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed" if package == "cuflash" else None


def describe_device(cupy: ModuleType, index: int) -> str:
    from cuflash import launch

    p = cupy.cuda.runtime.getDeviceProperties(index)
    return (
        f"{p['name'].decode()}, compute capability {p['major']}.{p['minor']} ({served(launch.device_spec(index))}), "
        f"{in_bytes(p['totalGlobalMem'])}, {p['multiProcessorCount']} multiprocessors, "
        f"{p['sharedMemPerBlockOptin']} bytes of shared memory a block and {p['sharedMemPerMultiprocessor']} a "
        f"multiprocessor, L2 {in_bytes(p['l2CacheSize'])}"
    )


def served(device: DeviceSpec) -> str:
    """Which kernels serve a plain problem of each dtype on a device."""
    dtypes: dict[str, list[str]] = {}
    for dtype in DTYPES:
        q = Shape((1, 16, 4096, 128), numpy_dtype(dtype))
        problem = make_problem(Options(), q, q, q)
        try:
            plans = (choose_plan(problem, device, "forward"), choose_plan(problem, device, "backward"))
        except NotImplementedError as error:
            dtypes.setdefault(f"not served: {error}", []).append(dtype)
            continue
        families = {name for plan in plans for x in plan.kernels for name in re.findall(r"^(sm\d+)/", x.source)}
        dtypes.setdefault(f"by {' and '.join(sorted(families))} kernels", []).append(dtype)
    return "; ".join(f"{', '.join(names)} {kernels}" for kernels, names in dtypes.items())


# ---- plan, compile --------------------------------------------------------------------------------------------------


def devices(args: argparse.Namespace) -> list[DeviceSpec]:
    """The devices that `--arch` names, or the one here; none without either."""
    if args.arch:
        return [DeviceSpec.for_arch(arch) for arch in args.arch]
    device = local_device()
    return [] if device is None else [device]


def plan(args: argparse.Namespace) -> int:
    chosen = devices(args)
    for problem in problems(args):
        if not chosen:
            print(CpuPlan(problem=problem).describe(), end="\n\n")
        for device in chosen:
            for pass_ in passes(args):
                print(compiled(tuned_plan(problem, device, pass_)).describe(), end="\n\n")
    if not chosen:
        print(f"{NO_GPU}: {find_gpu()[1]}; {NAME_ONE}")
    return 0


def compiled(plan: LaunchPlan) -> LaunchPlan:
    """The plan with the registers of its kernels, where the compiler is here and knows the architecture."""
    try:
        return compiler.with_resources(plan)
    except (nvrtc.NvrtcNotFoundError, NotImplementedError):
        return plan


def fill_cache(args: argparse.Namespace) -> int:
    chosen = devices(args)
    if not chosen:
        raise Failure(f"{NO_GPU}: {find_gpu()[1]}; {NAME_ONE}")
    compiler.nvrtc_version()  # where NVRTC is missing, that is said before the head of the table is printed
    specs: dict[KernelSpec, None] = {}  # a set in order
    for problem, device, pass_ in itertools.product(problems(args), chosen, passes(args)):
        specs |= dict.fromkeys(tuned_plan(problem, device, pass_).kernels)
    print(f"{'arch':<8}{'seconds':>8}{'registers':>11}{'spilled':>9}{'stack':>7}{'shared':>8}  kernel")
    for spec in specs:
        kernel = compiler.compile_kernel(spec.source, spec.name, dict(spec.defines), spec.target)
        r = kernel.resources
        spilled = r.spill_stores_bytes + r.spill_loads_bytes
        numbers = f"{r.seconds:>8.2f}{r.registers:>11}{spilled:>9}{r.stack_bytes:>7}"
        print(f"{spec.target:<8}{numbers}{spec.shared_bytes + r.static_shared_bytes:>8}  {spec.name}", flush=True)
    print(
        "Registers, and bytes of spills and stack, are per thread, bytes of shared memory per block. Seconds are those "
        f"of the compilation, which may have been an earlier one. Cache: {kernel_cache.cache_directory()}"
    )
    return 0


def passes(args: argparse.Namespace) -> tuple[Any, ...]:
    return (args.passes,) if args.passes else ("forward", "backward")


# ---- cache ----------------------------------------------------------------------------------------------------------


def add_cache_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--clear", action="store_true", help="remove the compiled kernels")
    command.add_argument("--tuned", action="store_true", help="with --clear: also what tuning remembers")


def cache(args: argparse.Namespace) -> int:
    if args.tuned and not args.clear:
        raise Failure("--tuned goes with --clear")
    if args.clear:
        removed = kernel_cache.clear_cache(kernel_cache.cache_directory())
        forgotten = f", and {counted(tuning.forget_all(), 'tuned problem')}" if args.tuned else ""
        print(f"removed {kernels_among(removed)}{forgotten}")
        return 0
    rows = [("directory", str(kernel_cache.cache_directory())), ("kernels", cached_kernels())]
    print_rows([*rows, ("tuning", f"{counted(len(tuning.remembered()), 'tuned problem')}, not counted above")])
    return 0


def cached_kernels() -> str:
    """How many there are, what they take, and what they may take."""
    files = kernel_cache.cached_files(kernel_cache.cache_directory())
    return f"{kernels_among(files)} of at most {in_bytes(kernel_cache.cache_limit())}"


def kernels_among(files: list[kernel_cache.CachedFile]) -> str:
    kernels = sum(file.path.suffix == ".cubin" for file in files)
    return f"{counted(kernels, 'kernel')}, {in_bytes(sum(file.size_bytes for file in files))}"


# ---- tune -----------------------------------------------------------------------------------------------------------


def add_tune_arguments(command: argparse.ArgumentParser) -> None:
    add_problem_arguments(command)
    command.add_argument("--forget", action="store_true", help="forget what was found, instead of tuning")
    command.add_argument("--dry-run", action="store_true", help="only list the candidates; --arch may name a GPU")


def tune(args: argparse.Namespace) -> int:
    if args.dry_run:
        return list_candidates(args)
    if args.arch:
        raise Failure("--arch goes with --dry-run: tuning is of the GPU that is here")
    cupy, reason = find_gpu()
    if cupy is None:
        raise Failure(f"{NO_GPU}: {reason}; the CPU path has nothing to tune")
    for options, shapes in calls(args):
        arrays = {name: filled(cupy, name, shape, args) for name, shape in shapes.items()}
        attn = FlashAttention(**{field.name: getattr(options, field.name) for field in fields(options)})
        problem = make_problem(options, **shapes)
        sizes = f"batch {problem.batch}, {problem.num_heads} heads, seqlen {problem.seqlen_q} x {problem.seqlen_k}"
        print(f"{problem.dtype}, {sizes}, head_dim {problem.head_dim}, {attn}", flush=True)
        found = attn.tune(**arrays, passes=passes(args), forget=args.forget)
        print("forgotten" if found is None else found.describe(), end="\n\n", flush=True)
    return 0


def list_candidates(args: argparse.Namespace) -> int:
    chosen = devices(args)
    if not chosen:
        raise Failure(f"{NO_GPU}: {find_gpu()[1]}; {NAME_ONE}")
    for problem, device, pass_ in itertools.product(problems(args), chosen, passes(args)):
        plans = tuning.candidates(problem, device, pass_)
        print(f"{pass_} pass on {device.name}, {len(plans)} candidates, the table's row first:")
        print("\n".join(f"  {tuning.Trial(plan=plan).label}" for plan in plans), end="\n\n")
    return 0


def filled(xp: ModuleType, name: str, shape: Shape, args: argparse.Namespace) -> Any:
    """An array of this name and shape: random numbers, whole lengths, slopes of the usual size."""
    rng = xp.random.default_rng(0)
    if name in ("mask", "block_mask"):
        return rng.random(shape.shape, xp.float32) < 0.7
    if name == "kv_lengths":
        return xp.full(shape.shape, args.seqlen_k or args.seqlen, shape.dtype)
    if name == "alibi_slopes":
        return xp.linspace(0.004, 0.5, *shape.shape).astype(shape.dtype)
    return rng.standard_normal(shape.shape, xp.float32).astype(shape.dtype)


# ---- demo -----------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What one pass took."""

    seconds: float
    extra_bytes: int  # at the peak, beside inputs and results


@dataclass
class Sampled:
    """Errors of one result at the sampled places, and those of the plain formula in the dtype of the inputs.

    The formula in float64 being the judge, its own error is that in float32 times the ratio of the rounding units.
    """

    name: str
    dtype: np.dtype[Any]
    noise: float = 0.0  # what rounding lse, and scores of its size, does to lse and, relatively, to the weights
    error: float = 0.0
    plain_error: float = 0.0
    scale: float = 0.0

    def add(self, got: Array, exact: Array, plain: Array) -> None:
        self.error = max(self.error, largest(got - exact))
        plain_unit = epsilon(self.dtype) / epsilon(plain.dtype) if self.dtype == np.float64 else 1
        self.plain_error = max(self.plain_error, plain_unit * largest(plain - exact))
        self.scale = max(self.scale, largest(exact))

    @property
    def allowed(self) -> float:
        unit = epsilon(self.dtype) * self.scale
        return 2 * self.plain_error + unit + self.noise * (1 if self.name == "lse" else self.scale)


def epsilon(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def largest(x: Array) -> float:
    """Largest absolute value; infinite where there is a NaN, so that no comparison overlooks it."""
    value = float(np.abs(x.astype(np.float64)).max(initial=0))
    return math.inf if math.isnan(value) else value


def demo(args: argparse.Namespace) -> int:
    xp = array_module(args.backend)
    on_gpu = xp is not np
    num_heads, head_dim = args.num_heads or (16 if on_gpu else 8), args.head_dim or (128 if on_gpu else 64)
    dtype = numpy_dtype(args.dtype or ("bfloat16" if on_gpu else "float32"))
    seqlen = args.seqlen or (longest_that_fits(xp, num_heads * head_dim * dtype.itemsize) if on_gpu else 16384)
    print(f"causal attention of {num_heads} heads, seqlen {seqlen}, head_dim {head_dim}, {dtype.name}")
    print(f"forward and backward on {describe_here(xp)}\n", flush=True)
    rng = xp.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((num_heads, seqlen, head_dim), xp.float32).astype(dtype) for _ in range(4))
    out, dq, dk, dv = (xp.empty_like(q) for _ in range(4))
    options = Options(causal=True)
    problem = make_problem(options, q, k, v)
    lse = xp.empty(problem.lse_shape, problem.softmax_dtype)
    # On the CPU one head at a time, which takes as long as all at once and lets the bar move.
    parts = [slice(None)] if on_gpu else [slice(head, head + 1) for head in range(num_heads)]
    attn = FlashAttention(causal=True)

    def forward(h: slice) -> None:
        attn.forward(q[h], k[h], v[h], out=out[h], lse=lse[h])

    def backward(h: slice) -> None:
        attn.backward(dout[h], q[h], k[h], v[h], out[h], lse[h], dq=dq[h], dk=dk[h], dv=dv[h])

    measure = measure_on_gpu if on_gpu else measure_on_cpu
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    with Bar(total=1 + 2 * len(parts) + 2 * NUM_SAMPLES) as bar:
        attn.compile(q, k, v)
        bar.advance()
        costs = {run.__name__: measure(run, parts, bar) for run in (forward, backward)}
        sampled = sample_errors(options, arrays, bar)
    print_costs(problem, costs)
    print_errors(dtype.name, sampled)
    if any(s.error > s.allowed for s in sampled.values()):
        raise Failure("a result is further from the oracle than the plain formula's error allows")
    return 0


def print_costs(problem: Problem, costs: dict[str, Cost]) -> None:
    print(f"{'':<10}{'time':>12}{'rate':>16}{'extra memory':>16}")
    for name, flops in (("forward", problem.forward_flops), ("backward", problem.backward_flops)):
        seconds, extra_bytes = costs[name]
        print(f"{name:<10}{in_seconds(seconds):>12}{in_flops(flops / seconds):>16}{in_bytes(extra_bytes):>16}")
    print(f"\nInputs, results and gradients take {in_bytes(8 * problem.q.nbytes)}. The plain formula stores")
    print(f"one matrix of scores forward, {in_bytes(problem.naive_bytes)}, and several backward.\n")


def print_errors(dtype: str, sampled: dict[str, Sampled]) -> None:
    print(f"Largest errors at {NUM_SAMPLES} sampled rows and {NUM_SAMPLES} sampled keys, against float64:")
    print(f"{'':<10}{'error':>12}{f'plain {dtype}':>16}{'allowed':>16}")
    for name, s in sampled.items():
        verdict = "" if s.error <= s.allowed else "  FAILED"
        print(f"{name:<10}{s.error:>12.2e}{s.plain_error:>16.2e}{s.allowed:>16.2e}{verdict}")


def longest_that_fits(xp: ModuleType, bytes_per_row: int) -> int:
    """65536, or less on a GPU whose free memory does not hold the arrays of such a problem twice."""
    seqlen = 65536
    while seqlen > 1024 and 2 * 10 * seqlen * bytes_per_row > xp.cuda.Device().mem_info[0]:
        seqlen //= 2
    return seqlen


def measure_on_cpu(run: Callable[[slice], None], parts: list[slice], bar: Bar) -> Cost:
    tracemalloc.start()  # NumPy reports what it allocates
    start = time.perf_counter()
    for part in parts:
        run(part)
        bar.advance()
    seconds = time.perf_counter() - start
    extra_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Cost(seconds, extra_bytes)


def measure_on_gpu(run: Callable[[slice], None], parts: list[slice], bar: Bar) -> Cost:
    import cupy

    pool = cupy.cuda.MemoryPool()  # an empty one, so that it ends up as large as what the call needed
    times = []
    with cupy.cuda.using_allocator(pool.malloc):
        for _ in range(4):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            for part in parts:
                run(part)
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    for _ in parts:
        bar.advance()
    return Cost(statistics.median(times[1:]), pool.total_bytes())


def sample_errors(options: Options, arrays: dict[str, Any], bar: Bar) -> dict[str, Sampled]:
    """Errors of out, lse and dq at some rows, and of dk and dv at some keys, the first and the last among them."""
    num_heads, seqlen, _ = arrays["q"].shape
    sampled = {name: Sampled(name, np.dtype(arrays[name].dtype)) for name in ("out", "lse", "dq", "dk", "dv")}
    dtype = np.dtype(arrays["out"].dtype)
    plain_dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
    rng = np.random.default_rng(1)
    for place in (0, seqlen - 1, *map(int, rng.integers(seqlen, size=NUM_SAMPLES - 2))):
        index = int(rng.integers(num_heads))
        head = {name: to_numpy(x[index]) for name, x in arrays.items()}
        noise = epsilon(sampled["lse"].dtype) * (1 + largest(head["lse"]))
        rows = row_results(options, head, place, np.float64), row_results(options, head, place, plain_dtype)
        keys = key_results(head, place, np.float64), key_results(head, place, plain_dtype)
        for exact, plain in (rows, keys):
            for name in exact:
                sampled[name].add(head[name][place], exact[name], plain[name])
                sampled[name].noise = max(sampled[name].noise, noise)
            bar.advance()
        dq_scale, dk_scale = gradient_scales(head, place)
        sampled["dq"].scale = max(sampled["dq"].scale, dq_scale)
        sampled["dk"].scale = max(sampled["dk"].scale, dk_scale)
    return sampled


def row_results(options: Options, head: dict[str, Array], row: int, dtype: Any) -> dict[str, Array]:
    """out, lse and dq of one row of a causal problem, by the plain formula in `dtype` on the keys that it sees."""
    q, dout = head["q"][row : row + 1], head["dout"][row : row + 1]
    k, v = head["k"][: row + 1], head["v"][: row + 1]
    problem = make_problem(options, q, k, v)
    out, lse = reference.forward(problem, q, k, v, dtype=dtype)
    dq, _, _ = reference.backward(problem, dout, q, k, v, dtype=dtype)
    return {"out": out[0], "lse": lse[0], "dq": dq[0]}


def key_results(head: dict[str, Array], key: int, dtype: Any) -> dict[str, Array]:
    """dk and dv of one key of a causal problem, by the plain formula in `dtype` over the rows that see it.

    What the weights of those rows add up to is taken from lse (which is rounded) and from out.
    """
    rows = slice(key, None)
    P, dP, delta = weights_of(head, rows, slice(key, key + 1), np.float64 if dtype == np.float64 else np.float32)
    P, dS = (x.astype(dtype).astype(x.dtype) for x in (P, P * (dP - delta)))
    q, dout = (head[name][rows].astype(P.dtype) for name in ("q", "dout"))
    return {"dk": (q.shape[1] ** -0.5 * (dS.T @ q))[0].astype(dtype), "dv": (P.T @ dout)[0].astype(dtype)}


def gradient_scales(head: dict[str, Array], place: int) -> tuple[float, float]:
    """Sizes of dq of a row and dk of a key before anything cancels: roots of the sums of squares of what is summed."""

    def scale(rows: slice, keys: slice, name: str) -> float:
        P, dP, delta = weights_of(head, rows, keys, np.float64)
        squares = (P**2 * (dP**2 + delta**2)).reshape(-1)
        others = head[name][keys if name == "k" else rows].astype(np.float64)
        return math.sqrt(largest(squares @ others**2) / others.shape[1])

    before, after, here = slice(0, place + 1), slice(place, None), slice(place, place + 1)
    return scale(here, before, "k"), scale(after, here, "q")


def weights_of(head: dict[str, Array], rows: slice, keys: slice, dtype: Any) -> tuple[Array, Array, Array]:
    """P, dP and delta of some rows and the keys they see, from lse and out."""
    q, dout, out, lse = (head[name][rows].astype(dtype) for name in ("q", "dout", "out", "lse"))
    k, v = (head[name][keys].astype(dtype) for name in ("k", "v"))
    P = np.exp(q.shape[1] ** -0.5 * (q @ k.T) - lse[:, None])
    return P, dout @ v.T, (dout * out).sum(axis=-1, keepdims=True)


def to_numpy(array: Any) -> Array:
    return array if isinstance(array, np.ndarray) else array.get()


# ---- check ----------------------------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> int:
    refuse_stray_arguments(args)
    if args.emulate:
        return check_emulated(args)
    xp = array_module(args.backend)
    testing = import_testing()
    print(f"on {describe_here(xp)}", flush=True)
    counts = {"passed": 0, "FAILED": 0, "not served": 0}
    cases = list(self_test_cases(testing.Case, args.seed, QUICK if args.quick else None))
    width = max(len(name) for name, _ in cases) + 2
    for name, case in cases:
        attn = FlashAttention(**case.keywords)

        random = case.random

        def forward(q: Any, k: Any, v: Any, attn: Any = attn, random: Any = random, **keywords: Any) -> Any:
            return tuple(attn.forward(q, k, v, **testing.optional(keywords), **random))

        def gradients(
            dout: Any, q: Any, k: Any, v: Any, attn: Any = attn, random: Any = random, **keywords: Any
        ) -> Any:
            out, lse = attn.forward(q, k, v, **testing.optional(keywords), **random)
            terms = testing.optional_backward(keywords) | random
            need = ("dq", "dk", "dv", *(("dsinks",) if "sinks" in keywords else ()))
            return attn.backward(dout, q, k, v, out, lse, **terms, need=need)

        try:
            report = testing.check(forward, case, gradients=gradients, convert=xp.asarray)
        except AssertionError as error:
            verdict, detail = "FAILED", str(error)
        except NotImplementedError as error:
            verdict, detail = "not served", str(error)
        else:
            worst = max(report, key=lambda m: m.error / m.tolerance if m.tolerance else 0)
            verdict, detail = "passed", f"{worst.name} closest to its bound: {worst.error:.1e} of {worst.tolerance:.1e}"
        counts[verdict] += 1
        print(f"{verdict:<12}{case.dtype:<10}{name:<{width}}{detail}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    return 1 if counts["FAILED"] or not counts["passed"] else 0


def self_test_cases(
    make_case: Callable[..., Any], seed: int, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Any]]:
    """(name, `cuflash.testing.Case`): plain problems in every dtype, every option in a 16-bit type and in float32.

    Those of some names only, if any are given.
    """
    plain: dict[str, dict[str, Any]] = {
        "plain": {},
        "one query": {"seqlen_q": 1},
        "causal": {"causal": True},
        "head_dim 256": {"head_dim": 256},
        "seqlen 1000": {"seqlen_q": 1000, "seqlen_k": 1000, "causal": True},
    }
    options: dict[str, dict[str, Any]] = {
        'causal="top_left"': {"causal": "top_left"},
        "causal, 203 queries, 113 keys": {"seqlen_q": 203, "seqlen_k": 113, "causal": True},
        "window": {"window": (20, 5)},
        "causal, window": {"window": (20, None), "causal": True},
        "softcap": {"softcap": 1.5},
        "scale": {"scale": -0.1},
        "alibi_slopes": {"alibi_slopes": (6,)},
        "bias": {"bias": (1, 6, 113, 203), "bias_holes": True},
        "mask": {"mask": (2, 1, 113, 203)},
        "kv_lengths": {"kv_lengths": (0, 150)},
        "pages": {"kv_lengths": (40, 203), "page_size": 16, "seqlen_k": 208, "causal": True},
        "sinks": {"sinks": True},
        "dlse": {"dlse": True},
        "block_mask": {"block_mask": (2, 6), "block_size": (32, 64)},
        "cu_seqlens": {"cu_seqlens_q": (0, 30, 113), "cu_seqlens_k": (0, 120, 190), "causal": True},
        "head_dim 40, head_dim_v 72": {"head_dim": 40, "head_dim_v": 72},
        "layout bshd": {"layout": "bshd"},
        "dropout": {"dropout": 0.1, "causal": True},
        "strides": {"strides": "transposed"},
        "large scores": {"score_spread": 30.0},
        "everything": {
            "causal": True,
            "window": (100, None),
            "softcap": 5.0,
            "alibi_slopes": (2, 6),
            "bias": (203,),
            "mask": (113, 203),
            "kv_lengths": (7, 203),
            "sinks": True,
            "dlse": True,
        },
    }
    sizes = {"batch": 2, "num_heads": 6, "num_heads_kv": 2, "seqlen_q": 113, "seqlen_k": 203, "head_dim": 64}
    for group, dtypes in ((plain, DTYPES), (options, ("bfloat16", "float32"))):
        chosen = [(name, changes) for name, changes in group.items() if names is None or name in names]
        for (name, changes), dtype in itertools.product(chosen, dtypes):
            yield name, make_case(**(sizes | changes | {"dtype": dtype, "seed": seed}))


def refuse_stray_arguments(args: argparse.Namespace) -> None:
    """Arguments that the kind of check does not look at are mistakes."""
    defaults = vars(make_parser().parse_args(["check"]))
    stray = {"backend", "quick"} if args.emulate else defaults.keys() - {"backend", "quick", "seed", "emulate"}
    for name in sorted(name for name in stray if getattr(args, name) != defaults[name]):
        option = "--" + {"passes": "pass"}.get(name, name.replace("_", "-"))
        raise Failure(f"{option} goes {'without' if args.emulate else 'with'} --emulate")


def import_testing() -> ModuleType:
    try:
        from cuflash import testing
    except ImportError as error:
        raise Failure(
            f'the self-test needs what the tests need, which is missing here ({error}): pip install "cuflash[test]"'
        ) from error
    return testing


def check_emulated(args: argparse.Namespace) -> int:
    testing, (attention, emulator) = import_testing(), import_emulator()
    if emulator.find_compiler() is None:
        raise Failure("the emulator compiles the kernels with g++, which is not on the path")
    schedules = [replace(s, seed=s.seed + args.seed) for s in emulator.SCHEDULES if s.order in args.schedule]
    failed = 0
    for problem, arch, pass_ in itertools.product(problems(args), args.arch or ["9.0"], passes(args)):
        device = DeviceSpec.for_arch(arch)
        print(compiled(choose_plan(problem, device, pass_)).describe(), flush=True)
        case = testing.Case.from_problem(problem, seed=args.seed)
        arrays = case.arrays()
        given = [arrays[name] for name in ("q", "k", "v")]
        terms = {**testing.optional(arrays), **case.random}
        exact = reference.forward(problem, *given, **terms)
        out, lse = (x.astype(dtype) for x, dtype in zip(exact, (given[0].dtype, problem.softmax_dtype), strict=True))
        for schedule in schedules:
            options = {"arch": device, "schedule": schedule, **case.random}
            start = time.perf_counter()
            try:
                if pass_ == "forward":
                    results = attention.forward(problem, arrays, **options)
                    testing.assert_forward(case, *results)
                else:
                    results = attention.backward(problem, arrays, out, lse, **options)
                    testing.assert_backward(case, *results)
            except (AssertionError, emulator.EmulationError) as error:
                verdict, detail = "FAILED", str(error)
            else:
                verdict, detail = "passed", in_seconds(time.perf_counter() - start)
            failed += verdict == "FAILED"
            print(f"{verdict:<12}{schedule.order + ', ' + schedule.asynchrony:<20}{detail}", flush=True)
        print()
    return 1 if failed else 0


def import_emulator() -> tuple[ModuleType, ModuleType]:
    """(attention, emulator) of the test suite: no part of an installed package."""
    folder = compiler.kernel_directory().parent / "tests" / "emulate"
    if not (folder / "emulator.py").is_file():
        raise Failure(
            f"the emulator belongs to a checkout of cuflash, and {folder} has none: in a checkout, run "
            f"pip install -e '.[test]' and this command again"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("attention"), importlib.import_module("emulator")


# ---- Numbers for people ---------------------------------------------------------------------------------------------


def in_bytes(count: float) -> str:
    return with_prefix(count, "B", "-kMGT")


def in_flops(per_second: float) -> str:
    return with_prefix(per_second / 1e9, "FLOP/s", "GTP")


def in_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def with_prefix(value: float, unit: str, prefixes: str) -> str:
    """Three digits and a decimal prefix; `prefixes` are those of 1, 1000, and so on, "-" for none."""
    steps = min(max(int(math.log10(value) // 3), 0), len(prefixes) - 1) if value else 0
    return f"{value / 1000**steps:.3g} {prefixes[steps].strip('-')}{unit}"


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None], str]] = {
    "demo": (demo, add_demo_arguments, "the main job: a long causal problem forward and backward, timed and checked"),
    "info": (info, lambda command: None, "devices and their limits, versions, the compiler and its cache"),
    "plan": (plan, add_problem_arguments, "what would run for a problem and why, also on a GPU that is not here"),
    "compile": (fill_cache, add_problem_arguments, "compile kernels into the cache, for GPUs that need not be here"),
    "tune": (
        tune,
        add_tune_arguments,
        "find the fastest tiles for a problem on the GPU that is here, and remember them",
    ),
    "cache": (cache, add_cache_arguments, "where compiled kernels are kept, how many, how large; and to clear it"),
    "check": (check, add_check_arguments, "a self-test: many kinds of problem on this device, against the oracle"),
}


if __name__ == "__main__":
    sys.exit(main())
