"""That all ranks make the same call, found out before anything travels: so a rank that errs stops all of them."""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cuflash.distributed.transports import RankFailed, Transport
from cuflash.values import value_error

Result = TypeVar("Result")


class Facts(NamedTuple):
    """What a rank says of its call. Of names that begin with an underscore each rank may say something else."""

    of_call: Mapping[str, str]
    lasting: str = "{}"  # as JSON: the same whenever such a call is made


class Heard(Exception):
    """What ranks said of a call while this one computed already, where that is not what it expected of them."""

    def __init__(self, error: Exception | None, lasting: tuple[str, ...] = ()) -> None:
        """An error, of which the others know, or lasting facts that agree."""
        super().__init__(error or "other lasting facts")
        self.error, self.lasting = error, lasting


class Pending:
    """What all ranks say of a call, which is heard at the latest when something is to travel."""

    def __init__(self, hear: Callable[[], tuple[str, ...]], expected: tuple[str, ...]) -> None:
        """`hear` waits for the lasting facts, and raises where ranks do not agree; they are expected to be some."""
        self._hear, self._expected = hear, expected
        self.is_over = False

    def hear(self) -> None:
        """Wait for what ranks say, the first time.

        Raises
        ------
        Heard
            They do not agree, or on something else.
        """
        if self.is_over:
            return
        self.is_over = True
        try:
            lasting = self._hear()
        except Exception as error:
            raise Heard(error) from None
        if lasting != self._expected:
            raise Heard(None, lasting)


def together(transport: Transport, timeout: float, work: Callable[[], Result]) -> Result:
    """Do something that may fail on one rank, and fail on all of them if it does on any."""
    result, _, hear = begin_to_agree(transport, timeout, lambda: (work(), Facts({})))
    hear()
    return result


def begin_to_agree(
    transport: Transport, timeout: float, work: Callable[[], tuple[Result, Facts]]
) -> tuple[Result, Facts, Callable[[], tuple[str, ...]]]:
    """Do something that gives facts too, and tell the other ranks.

    Its result, the facts, and a function that waits for all ranks and gives their lasting facts, by rank. Where the
    work fails, this waits for them at once, too.

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
    result, facts, failure = None, Facts({}), None
    try:
        result, facts = work()
    except Exception as error:  # whatever it is, the others have to hear of it
        failure = error
    of_call = json.dumps([failure and spelled(failure), facts.of_call])
    with telling(transport):
        listen = transport.begin_sharing(f"{of_call}\n{facts.lasting}".encode(), timeout)

    def hear() -> tuple[str, ...]:
        with telling(transport):
            heard = [text.decode().partition("\n") for text in listen()]
        if failure is not None:
            raise failure
        if any(text != of_call for text, *_ in heard):
            of_calls = [json.loads(text) for text, *_ in heard]
            for rank, (failed, _) in enumerate(of_calls):
                if failed:
                    raise RankFailed(rank, failed)
            _check_alike([found for _, found in of_calls])
        lasting = tuple(text for *_, text in heard)
        facts_of(lasting)
        return lasting

    if failure is not None:
        hear()
    return result, facts, hear  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def facts_of(lasting: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """The lasting facts by rank and name, which are alike."""
    found = tuple(json.loads(text) for text in lasting)
    _check_alike(found)
    return found


def _check_alike(facts: Sequence[Mapping[str, Any]]) -> None:
    for rank, other in enumerate(facts):
        for name in (*facts[0], *other):
            got, wanted = other.get(name, "nothing"), facts[0].get(name, "nothing")
            if not name.startswith("_") and got != wanted:
                raise value_error(name, f"{got} on rank {rank}", f"{wanted} as on rank 0")


@contextlib.contextmanager
def telling(transport: Transport) -> Iterator[None]:
    """Let the other ranks know if this one fails, or hears of one that did."""
    try:
        yield
    except RankFailed as error:
        transport.fail(error.rank, error.text)
        raise
    except (TimeoutError, Heard):  # as the others find themselves
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
