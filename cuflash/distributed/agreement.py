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
    """What a rank sends of its call. Facts must agree on all ranks unless their names begin with an underscore."""

    of_call: Mapping[str, str]
    lasting: str = "{}"  # as JSON: facts that are the same whenever such a call is made again


class Disagreement(Exception):
    """Raised when the ranks do not agree on a call, or agree on other facts than this rank expected."""

    def __init__(self, error: Exception | None, lasting: tuple[str, ...] = ()) -> None:
        """Either an error, which the other ranks raise too, or lasting facts that agree but were not expected."""
        super().__init__(error or "other lasting facts")
        self.error, self.lasting = error, lasting


@contextlib.contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """A context for errors in arguments that every rank finds by itself, so that no rank reports them to others."""
    try:
        yield
    except Exception as error:
        raise Disagreement(error) from None


class Pending:
    """What a rank waits for before its first rows of a call are exchanged, and after its last ones."""

    def __init__(
        self,
        barrier: Callable[[], None],
        gather: Callable[[], tuple[str, ...]] | None = None,
        expected: tuple[str, ...] = (),
    ) -> None:
        """`barrier` waits for the ranks of this process, where they have to (`Transport.barrier`).

        `gather` waits for the lasting facts of all ranks, which should equal `expected`, and raises if ranks disagree;
        it is None where this rank has them already, or does without.
        """
        self._barrier, self._gather, self._expected = barrier, gather, expected
        self._may_be_sent = False

    @property
    def is_waiting(self) -> bool:
        """Whether the facts of all ranks are not gathered yet."""
        return self._gather is not None

    def wait(self) -> None:
        """Wait for the facts of all ranks. Only the first call waits.

        Raises
        ------
        Disagreement
            The ranks do not agree, or they agree on other facts than this rank expected.
        """
        if self._gather is None:
            return
        gather, self._gather = self._gather, None
        lasting = gather()
        if lasting != self._expected:
            raise Disagreement(None, lasting)

    def before_rows(self) -> None:
        """Wait until rows may be exchanged. Only the first call waits."""
        self.wait()
        if not self._may_be_sent:
            self._barrier()
            self._may_be_sent = True

    def after_rows(self) -> None:
        """Wait until all rows of the ranks of this process are exchanged."""
        self.before_rows()
        self._barrier()


def run_together(transport: Transport, timeout: float, work: Callable[[], Result]) -> Result:
    """Do work that may fail on one rank; if it fails on any rank, this raises on all of them."""
    result, _, gather = begin_to_agree(transport, timeout, lambda: (work(), Facts({})))
    gather()
    return result


def begin_to_agree(
    transport: Transport, timeout: float, work: Callable[[], tuple[Result, Facts]]
) -> tuple[Result, Facts, Callable[[], tuple[str, ...]]]:
    """Do work that gives a result and facts, and send the facts to the other ranks.

    Returns the result, the facts, and a function that waits for all ranks and returns their lasting facts by rank. If
    the work fails, `begin_to_agree` itself waits for the other ranks, and then raises `Disagreement` with an error that
    all ranks raise: what `work` raises here, RankFailed if it failed on another rank, or ValueError if a fact of some
    rank differs from that of rank 0.
    """
    result, facts, failure = None, Facts({}), None
    try:
        result, facts = work()
    except Exception as error:  # whatever it is, because the other ranks have to raise it, too
        failure = error
    of_call = json.dumps([failure and _described(failure), facts.of_call])
    receive = transport.begin_all_gather(f"{of_call}\n{facts.lasting}".encode(), timeout)

    def gather() -> tuple[str, ...]:
        received = [payload.decode().partition("\n") for payload in receive()]
        if failure is not None:
            raise Disagreement(failure)
        if any(facts != of_call for facts, *_ in received):
            of_calls = [json.loads(facts) for facts, *_ in received]
            for rank, (failed, _) in enumerate(of_calls):
                if failed:
                    raise Disagreement(RankFailed(rank, failed))
            _check_equal([facts_of_call for _, facts_of_call in of_calls])
        lasting = tuple(facts for *_, facts in received)
        facts_of(lasting)
        return lasting

    if failure is not None:
        gather()
    return result, facts, gather  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def facts_of(lasting: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """The lasting facts by rank and name, after a check that they agree; if it fails, it fails on all ranks."""
    by_rank = tuple(json.loads(facts) for facts in lasting)
    _check_equal(by_rank)
    return by_rank


def _check_equal(facts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse facts that differ from those of rank 0; names that begin with an underscore may."""
    for rank, of_rank in enumerate(facts):
        for name in (*facts[0], *of_rank):
            got, expected = of_rank.get(name, "nothing"), facts[0].get(name, "nothing")
            if not name.startswith("_") and got != expected:
                raise Disagreement(value_error(name, f"{got} on rank {rank}", f"{expected} as on rank 0"))


@contextlib.contextmanager
def reporting_failures(transport: Transport) -> Iterator[None]:
    """A context that reports to the other ranks if this one fails or is interrupted, or learns that another failed."""
    try:
        yield
    except RankFailed as error:
        transport.fail(error.rank, error.message)
        raise
    except (TimeoutError, Disagreement):  # the others notice these themselves
        raise
    except BaseException as error:  # whatever it is, because the others wait for this rank
        transport.fail(transport.rank, _described(error))
        raise


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def digest(array: Any) -> str:
    """dtype and shape of an array that all ranks have, and a checksum of its values where it is in host memory."""
    text = f"{array.dtype.name} {tuple(array.shape)}"
    if isinstance(array, np.ndarray):
        text += f" with checksum {zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"
    return text
