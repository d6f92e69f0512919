"""The commands of ``cuflash``, which is ``python -m cuflash``, and how one is run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from cuflash import __version__
from cuflash.cli.arguments import add_problem_arguments
from cuflash.cli.cache import add_cache_arguments, cache
from cuflash.cli.check import add_check_arguments, check
from cuflash.cli.demo import add_demo_arguments, demo
from cuflash.cli.documents import add_json_argument
from cuflash.cli.here import Failure
from cuflash.cli.info import info
from cuflash.cli.parser import Parser, by_name, exit_code, program
from cuflash.cli.plans import add_plan_arguments, fill_cache, plan
from cuflash.cli.tune import add_tune_arguments, tune
from cuflash.gpu.compiler import CompileError
from cuflash.spec import keywords

# What others call sizes, devices and passes on their command lines. `keywords.meant_by` knows names of options.
_FOREIGN = by_name(
    {
        "seqlen": "seq seq_len seqlen_q seqlens sequence_length n_ctx context_length max_seqlen max_seqlen_q",
        "seqlen_k": "seqlen_kv seq_len_k seq_len_kv kv_len kv_seqlen max_seqlen_k max_seqlen_kv num_keys",
        "num_heads": "nheads n_heads heads q_heads num_q_heads num_attention_heads num_qo_heads",
        "num_heads_kv": "kv_heads n_kv_heads num_kv_heads nheads_k nheads_kv num_heads_k num_key_value_heads",
        "head_dim": "headdim hdim dim d_head dhead head_size embed_dim",
        "head_dim_v": "headdim_v hdim_v dv d_v v_head_dim",
        "batch": "batch_size batchsize bs",
        "arch": "sm cc compute_capability capability gpu_arch target device gpu",
        "dtype": "type data_type",
        "pass": "passes mode direction fwd bwd forward backward",
        "deterministic": "determinism reproducible",
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 is success, 1 failure, 130 an interruption, 141 a reader of the output that has gone. Arguments that cannot be
    parsed exit with 2.
    """
    return exit_code(lambda: run_command(make_parser(), argv))


def run_command(parser: Parser, argv: Sequence[str] | None) -> int:
    """Run the command that is named, or show which there are; what is known to go wrong is said in one line."""
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        if getattr(args, "json", False) and sys.stdout is None:  # which the process was started without
            raise Failure("--json: got no standard output, expected one that takes the document")
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except BrokenPipeError:
        raise
    except (Failure, NotImplementedError, ImportError, MemoryError, OSError, ValueError) as error:
        print(f"{parser.prog} {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
    except CompileError as error:
        print(error, file=sys.stderr)
    return 1


class CuflashParser(Parser):
    """Knows what other libraries call options and sizes."""

    def meant_by(self, name: str) -> tuple[str, str]:
        """As of `Parser`."""
        return (_FOREIGN[name], "") if name in _FOREIGN else keywords.meant_by(name)


def make_parser() -> Parser:
    """The parser of all commands; ``args.run`` is the command."""
    about = "Exact attention and its gradients for CuPy and NumPy arrays."
    parser = CuflashParser(prog=program("cuflash"), description=about)
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (run, add_arguments, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(run=run)
        add_arguments(command)
    return parser


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None], str]] = {
    "demo": (demo, add_demo_arguments, "a long causal problem forward and backward, timed and checked"),
    "info": (info, add_json_argument, "devices and their limits, versions, the compiler and its cache"),
    "plan": (plan, add_plan_arguments, "what would run for a problem and why, also on a GPU that is not here"),
    "compile": (fill_cache, add_problem_arguments, "compile kernels into the cache, for GPUs that need not be here"),
    "tune": (
        tune,
        add_tune_arguments,
        "find the fastest tiles for a problem on the GPU that is here, and remember them",
    ),
    "cache": (cache, add_cache_arguments, "where compiled kernels are kept, how many, how large; and to clear it"),
    "check": (check, add_check_arguments, "a self-test: many problems on this device, against the float64 reference"),
}
