"""Arguments that several commands have, and the problems that they name."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from typing import Any

from cuflash.arrays.array_info import DTYPES, Operand, as_it_is, numpy_dtype, softmax_dtype_of, user_shape
from cuflash.cli.here import Failure
from cuflash.cli.parser import Several
from cuflash.spec.binding import Contiguous
from cuflash.spec.inputs import INPUTS, NUMBERS, OPTIONAL_INPUTS
from cuflash.spec.options import LAYOUTS, PRECISIONS, Causal, Options
from cuflash.spec.outputs import MOVABLE
from cuflash.spec.passes import DEFAULT_PASSES, PREPARED, PREPARED_NAMES, REDUCTIONS, TOP_KEYS, Pass
from cuflash.spec.problem import Problem, make_problem
from cuflash.spec.reductions import MOST_KEYS

CAUSAL: dict[str, Causal] = {"no": False, "yes": True, "top_left": "top_left", "lengths": "lengths"}


# Optional inputs that are named alone: their shapes follow from the sizes, or from them and the block size.
NAMED = tuple(row for row in OPTIONAL_INPUTS if row.shapes or row.has_keys)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        several = f"; several are written with spaces: {text.replace(',', ' ')}" if "," in text else ""
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer{several}")
    return int(text)


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer or 0")
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


def add_backend_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--backend", choices=("gpu", "cpu"), help="default: gpu where there is one, else cpu")


def add_problem_arguments(
    command: argparse.ArgumentParser, head_dim: int = 128, seqlen: int = 4096, num_heads: int = 16
) -> None:
    several: Any = {"nargs": "+", "action": Several}
    command.add_argument(
        "--arch",
        **several,
        type=capability,
        metavar="X.Y",
        help="compute capabilities, e.g. 8.0 8.6 9.0 12.0 (default: what is here); 9 is 9.0",
    )
    command.add_argument(
        "--pass",
        dest="passes",
        **several,
        choices=PREPARED_NAMES,
        metavar="PASS",
        help=f"of {', '.join(PREPARED_NAMES)} (default: {' '.join(DEFAULT_PASSES)})",
    )
    command.add_argument(
        "--tangents",
        **several,
        choices=MOVABLE,
        default=list(INPUTS),
        metavar="NAME",
        help=f"what has tangents in jvp and backward_jvp, of {', '.join(MOVABLE)} (default: {' '.join(INPUTS)})",
    )
    of_count = "keys of each query that top_keys finds (default: 16)"
    command.add_argument("--count", type=positive, default=16, metavar="N", help=of_count)
    group = command.add_argument_group(
        "problems", "All combinations of the values given to --dtype, --head-dim and --causal."
    )
    dtypes = f"of {', '.join(DTYPES)} (default: bfloat16)"
    group.add_argument("--dtype", **several, choices=DTYPES, default=["bfloat16"], metavar="DTYPE", help=dtypes)
    of_head_dim = f"default: {head_dim}"
    group.add_argument("--head-dim", **several, type=positive, default=[head_dim], metavar="D", help=of_head_dim)
    group.add_argument(
        "--causal",
        nargs="*",
        action=Several,
        const="yes",
        choices=CAUSAL,
        default=["no"],
        metavar="HOW",
        help=f"of {', '.join(CAUSAL)}; alone it means yes; lengths brings --kv-lengths along (default: no)",
    )
    for name, default, text in (
        ("batch", 1, "default: 1"),
        ("seqlen", seqlen, f"queries, and keys (default: {seqlen})"),
        ("seqlen-k", None, "keys, if they are more or fewer"),
        ("num-heads", num_heads, f"default: {num_heads}"),
        ("num-heads-kv", None, "heads of k and v, if they are fewer"),
    ):
        group.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=text)
    of_values = "head dimension of v, if it differs; 0: no v, lse alone"
    group.add_argument("--head-dim-v", type=natural, metavar="N", help=of_values)
    group.add_argument("--window", type=window, metavar="LEFT,RIGHT", help="e.g. 1023,0; no bound is none: 1023,none")
    for name in NUMBERS:
        group.add_argument(f"--{name}", type=number, metavar="X", help="default: that of FlashAttention")
    group.add_argument("--layout", choices=LAYOUTS, default="bhsd", help="default: bhsd")
    group.add_argument("--dropout", type=number, default=0.0, metavar="RATE", help="default: 0")
    of_mask = "of a block mask, given with --block-mask (default: 128)"
    group.add_argument("--block-size", type=positive, default=128, metavar="N", help=of_mask)
    group.add_argument("--deterministic", action="store_true", help="gradients bitwise equal run after run")
    of_batch = "the same bits of a sequence in any batch; brings --deterministic along"
    group.add_argument("--batch-invariant", action="store_true", help=of_batch)
    group.add_argument("--precision", choices=PRECISIONS, default="highest", help="of float32 (default: highest)")
    for row in NAMED:
        group.add_argument(f"--{row.name.replace('_', '-')}", action="store_true", help=f"{row.name} is given")


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    """The problems that the arguments of `add_problem_arguments` name."""
    for options, shapes in calls(args):
        yield make_problem(options, **shapes)


def calls(args: argparse.Namespace) -> Iterator[tuple[Options, dict[str, Contiguous]]]:
    """The options of these problems, and the shapes of the arrays by name. Raises Failure for unused arguments."""
    _require_used(args)
    given = {option.name: getattr(args, option.name) for option in fields(Options) if hasattr(args, option.name)}
    for dtype, head_dim, causal in itertools.product(args.dtype, args.head_dim, args.causal):
        options = Options(**given | {"causal": CAUSAL[causal]})
        names = {row.name for row in NAMED if getattr(args, row.name)}
        if causal == "lengths":
            names.add("kv_lengths")
        yield options, _qkv(args, dtype, head_dim) | _optional_inputs(args, names, dtype)


def _require_used(args: argparse.Namespace) -> None:
    """Raise Failure for an argument that goes with another, which is missing, and for one out of its range."""
    if "tangents" in args.given and not any(pass_.has_tangents for pass_ in passes(args)):
        raise Failure("--tangents goes with --pass jvp or backward_jvp")
    if "count" in args.given and TOP_KEYS not in passes(args):
        raise Failure("--count goes with --pass top_keys")
    if args.count > MOST_KEYS:
        raise Failure(f"--count: got {args.count}, expected 1 to {MOST_KEYS}")
    if "block_size" in args.given and not args.block_mask:
        raise Failure("--block-size goes with --block-mask")
    if args.precision == "tf32" and "float32" not in args.dtype:
        raise Failure("--precision tf32 goes with --dtype float32")


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    """The sizes of a problem by the names of axes that `cuflash.spec.inputs` has."""
    return {
        "batch": args.batch,
        "num_heads": args.num_heads,
        "num_heads_kv": args.num_heads_kv or args.num_heads,
        "seqlen_q": args.seqlen,
        "seqlen_k": args.seqlen_k or args.seqlen,
    }


def _qkv(args: argparse.Namespace, dtype: str, head_dim: int) -> dict[str, Contiguous]:
    sizes, head_dim_v = _sizes(args), head_dim if args.head_dim_v is None else args.head_dim_v

    def array(heads: str, seqlen: str, dim: int) -> Contiguous:
        shape = user_shape(sizes["batch"], sizes[heads], sizes[seqlen], dim, 4, args.layout)
        return Contiguous(shape, numpy_dtype(dtype))

    return {
        "q": array("num_heads", "seqlen_q", head_dim),
        "k": array("num_heads_kv", "seqlen_k", head_dim),
        "v": array("num_heads_kv", "seqlen_k", head_dim_v),
    }


def _optional_inputs(args: argparse.Namespace, names: Collection[str], dtype: str) -> dict[str, Contiguous]:
    """Those of `NAMED` with these names: in their first shape, or with an entry for each block."""
    sizes = _sizes(args)
    num_blocks = tuple(-(-sizes[axis] // args.block_size) for axis in ("seqlen_q", "seqlen_k"))
    arrays = {}
    for row in NAMED:
        if row.name in names:
            shape = tuple(sizes[axis] for axis in row.shapes[0]) if row.shapes else num_blocks
            dtype_of_row = softmax_dtype_of(dtype) if "softmax" in row.dtypes else row.dtypes[0]
            arrays[row.name] = Contiguous(shape, numpy_dtype(dtype_of_row))
    return arrays


def passes(args: argparse.Namespace) -> tuple[Pass, ...]:
    return tuple(pass_ for pass_ in PREPARED if pass_.name in (args.passes or DEFAULT_PASSES))


def operands(args: argparse.Namespace, problem: Problem, pass_: Pass) -> dict[str, Operand]:
    """Arrays of a pass whose shapes do not follow from the problem."""
    if pass_ is not TOP_KEYS:
        return {}
    shape = (problem.array_batch, problem.num_heads, problem.seqlen_q, args.count)
    dtypes = ("int32", problem.softmax_dtype)
    arrays = (Contiguous(shape, numpy_dtype(dtype)) for dtype in dtypes)
    return {name: as_it_is(array) for name, array in zip(pass_.default, arrays, strict=True)}


def moved(args: argparse.Namespace, problem: Problem) -> tuple[str, ...]:
    """What has tangents in a problem, in order. Raises ValueError for what the problem does not have."""
    for name in args.tangents:
        if name not in INPUTS and getattr(problem, name) is None:
            raise ValueError(f"--tangents: got {name}, expected --{name.replace('_', '-')} next to it")
    return tuple(name for name in MOVABLE if name in args.tangents)


def of_pass(args: argparse.Namespace, problem: Problem, pass_: Pass) -> Problem:
    """The problem as a pass has it: with tangents, if it takes some; without values and dropout, if it has none."""
    if pass_ in REDUCTIONS:
        return replace(problem, dropout=0.0).with_values(0)
    return replace(problem, moved=moved(args, problem)) if pass_.has_tangents else problem
