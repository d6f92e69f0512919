"""Ranks check that they all make the same call before anything is exchanged, so that an error on one rank stops all."""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cuflash.arrays.checks import value_error
from cuflash.distributed.transports import RankFailed, Transport

Result = TypeVar("Result")


class Facts(NamedTuple):
    """What a rank says of its call. Facts must agree on all ranks unless their names begin with an underscore."""

    of_call: Mapping[str, str]
    lasting: str = "{}"  # as JSON: facts that are the same whenever such a call is made again


class Heard(Exception):
    """Raised when the ranks do not agree on a call, or do not say of it what this rank expected."""

    def __init__(self, error: Exception | None, lasting: tuple[str, ...] = ()) -> None:
        """Either an error, which the other ranks know too, or lasting facts that agree but were not expected."""
        super().__init__(error or "other lasting facts")
        self.error, self.lasting = error, lasting


@contextlib.contextmanager
def as_of_all() -> Iterator[None]:
    """Errors in arguments that are not compared, which every rank finds in its own."""
    try:
        yield
    except Exception as error:
        raise Heard(error) from None


class Pending:
    """What a rank waits for before its first rows of a call are exchanged, and after its last ones."""

    def __init__(
        self,
        barrier: Callable[[], None],
        hear: Callable[[], tuple[str, ...]] | None = None,
        expected: tuple[str, ...] = (),
    ) -> None:
        """`barrier` waits for the ranks of this process, where they have to (`Transport.barrier`).

        `hear` waits for the lasting facts of all ranks, which should equal `expected`, and raises if ranks disagree; it
        is None where this rank has heard them already, or never does.
        """
        self._barrier, self._hear, self._expected = barrier, hear, expected
        self._may_be_sent = False

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has not heard yet what all ranks say."""
        return self._hear is not None

    def hear(self) -> None:
        """Wait for what the ranks say. Only the first call waits.

        Raises
        ------
        Heard
            The ranks do not agree, or they agree on other facts than this rank expected.
        """
        if self._hear is None:
            return
        hear, self._hear = self._hear, None
        lasting = hear()
        if lasting != self._expected:
            raise Heard(None, lasting)

    def before_rows(self) -> None:
        """Wait until rows may be exchanged. Only the first call waits."""
        self.hear()
        if not self._may_be_sent:
            self._barrier()
            self._may_be_sent = True

    def after_rows(self) -> None:
        """Wait until all rows of the ranks of this process are exchanged."""
        self.before_rows()
        self._barrier()


def together(transport: Transport, timeout: float, work: Callable[[], Result]) -> Result:
    """Do work that may fail on one rank; if it fails on any rank, this raises on all of them."""
    result, _, hear = begin_to_agree(transport, timeout, lambda: (work(), Facts({})))
    hear()
    return result


def begin_to_agree(
    transport: Transport, timeout: float, work: Callable[[], tuple[Result, Facts]]
) -> tuple[Result, Facts, Callable[[], tuple[str, ...]]]:
    """Do work that gives a result and facts, and send the facts to the other ranks.

    Returns the result, the facts, and a function that waits for all ranks and returns their lasting facts by rank. If
    the work fails, `begin_to_agree` itself waits for the other ranks, and then raises `Heard` with an error of which
    all ranks know: what `work` raises here, RankFailed if it failed on another rank, or ValueError if a fact of some
    rank differs from that of rank 0.
    """
    result, facts, failure = None, Facts({}), None
    try:
        result, facts = work()
    except Exception as error:  # whatever it is, because the others have to hear of it
        failure = error
    of_call = json.dumps([failure and spelled(failure), facts.of_call])
    listen = transport.begin_all_gather(f"{of_call}\n{facts.lasting}".encode(), timeout)

    def hear() -> tuple[str, ...]:
        heard = [payload.decode().partition("\n") for payload in listen()]
        if failure is not None:
            raise Heard(failure)
        if any(facts != of_call for facts, *_ in heard):
            of_calls = [json.loads(facts) for facts, *_ in heard]
            for rank, (failed, _) in enumerate(of_calls):
                if failed:
                    raise Heard(RankFailed(rank, failed))
            _check_alike([found for _, found in of_calls])
        lasting = tuple(facts for *_, facts in heard)
        facts_of(lasting)
        return lasting

    if failure is not None:
        hear()
    return result, facts, hear  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def facts_of(lasting: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """The lasting facts by rank and name, after a check that they agree, of whose failure all ranks know."""
    found = tuple(json.loads(facts) for facts in lasting)
    _check_alike(found)
    return found


def _check_alike(facts: Sequence[Mapping[str, Any]]) -> None:
    for rank, other in enumerate(facts):
        for name in (*facts[0], *other):
            got, wanted = other.get(name, "nothing"), facts[0].get(name, "nothing")
            if not name.startswith("_") and got != wanted:
                raise Heard(value_error(name, f"{got} on rank {rank}", f"{wanted} as on rank 0"))


@contextlib.contextmanager
def telling(transport: Transport) -> Iterator[None]:
    """Tell the other ranks if this one fails or is interrupted, or if it hears of another one that failed."""
    try:
        yield
    except RankFailed as error:
        transport.fail(error.rank, error.message)
        raise
    except (TimeoutError, Heard):  # the others notice these themselves
        raise
    except BaseException as error:  # whatever it is, because the others wait for this rank
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
