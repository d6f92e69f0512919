"""Checks of the arguments that `ContextParallel` is made from: a communicator, splits and numbers."""

from __future__ import annotations

from typing import Any

from cuflash.arrays.checks import as_integer, check_choice, type_error, typed, value_error
from cuflash.distributed.mpi import Mpi, is_mpi
from cuflash.distributed.nccl import Nccl, is_nccl
from cuflash.distributed.split import Split, contiguous, zigzag
from cuflash.distributed.transports import Transport

SPLITS = {"contiguous": contiguous, "zigzag": zigzag}


_EXPECTED = (
    "'contiguous' (rank r has the r-th span of rows), 'zigzag' (a span from the front and one from the back, which is "
    "equal work under a causal mask) or a cuflash.distributed.Split (any spans)"
)


def checked_split(name: str, split: object) -> Any:
    if split is None:
        raise type_error(name, "nothing", f"which rows each rank has: {_EXPECTED}")
    if not isinstance(split, (str, Split)):
        raise type_error(name, typed(split), _EXPECTED)
    return check_choice(name, split, (*SPLITS,), _EXPECTED) if isinstance(split, str) else split


def positive(name: str, value: object) -> int:
    number = as_integer(name, value)
    if number < 1:
        raise value_error(name, value, "an integer >= 1")
    return number


def not_served(name: str, got: object, remedy: str) -> NotImplementedError:
    return NotImplementedError(f"{name}: got {got}, which is not served over ranks; expected {remedy}")


def transport_of(comm: Any) -> Transport:
    """The transport for a communicator that a user has."""
    if isinstance(comm, Transport):
        return comm
    if is_mpi(comm):
        return Mpi(comm)
    if is_nccl(comm):
        return Nccl(comm)
    expected = "one of threads(), a communicator of mpi4py, or one of NCCL by CuPy or nccl4py"
    raise type_error("comm", type(comm).__name__, expected)
