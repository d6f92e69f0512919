"""That all ranks make the same call, found out before anything travels: so a rank that errs stops all of them."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from cuflash.distributed.transports import RankFailed, Transport
from cuflash.values import value_error

Result = TypeVar("Result")


def together(transport: Transport, timeout: float, work: Callable[[], Result]) -> Result:
    """Do something that may fail on one rank, and fail on all of them if it does on any."""
    return agreed(transport, timeout, lambda: (work(), {}))[0]


def agreed(
    transport: Transport, timeout: float, work: Callable[[], tuple[Result, Mapping[str, Any]]]
) -> tuple[Result, list[dict[str, Any]]]:
    """Do something that gives facts too, and tell the other ranks: its result, and what each rank says, by rank.

    Facts whose names begin with an underscore may differ from rank to rank.

    Raises
    ------
    Exception
        What `work` raises here.
    RuntimeError
        It failed on another rank.
    ValueError
        A fact of a rank is not that of rank 0.
    TimeoutError
        A rank did not call in time.
    """
    result, facts, failure = None, {}, None
    try:
        result, given = work()
        facts = dict(given)
    except Exception as error:  # whatever it is, the others have to hear of it
        failure = error
    said = {"failed": failure and spelled(failure), "facts": facts}
    with telling(transport):
        heard = [json.loads(text) for text in transport.share(json.dumps(said).encode(), timeout)]
    if failure is not None:
        raise failure
    for rank, other in enumerate(heard):
        if other["failed"]:
            raise RankFailed(rank, other["failed"])
    expected = heard[0]["facts"]
    for rank, other in enumerate(heard):
        for name in (*expected, *other["facts"]):
            got, wanted = other["facts"].get(name, "nothing"), expected.get(name, "nothing")
            if not name.startswith("_") and got != wanted:
                raise value_error(name, f"{got} on rank {rank}", f"{wanted} as on rank 0")
    return result, [other["facts"] for other in heard]  # type: ignore[return-value]


@contextlib.contextmanager
def telling(transport: Transport) -> Iterator[None]:
    """Let the other ranks know if this one fails, or hears of one that did."""
    try:
        yield
    except RankFailed as error:
        transport.fail(error.rank, error.text)
        raise
    except TimeoutError:  # as the others find themselves
        raise
    except BaseException as error:  # whatever it is, the others wait
        transport.fail(transport.rank, spelled(error))
        raise


def spelled(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def digest(array: Any) -> str:
    """dtype and shape of an array that all ranks have, and a checksum of its values where it is in host memory."""
    text = f"{array.dtype.name} {tuple(array.shape)}"
    if isinstance(array, np.ndarray):
        text += f" with checksum {zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"
    return text
