"""The table of second derivatives: speeds, times as multiples of those of the first order, and peers."""

from __future__ import annotations

from collections.abc import Sequence

from .cases import ALL_PASSES, SECOND
from .report import TITLES, Record, Table, label, notes, number

BASES = {"jvp": "forward", "backward_jvp": "backward", "double_backward": "backward"}
NAMES = {"backward_jvp": "backward_jvp", "double_backward": "double backward"}


def markdown(records: Sequence[Record]) -> str:
    """A row for each case: cuflash's speeds, the ratios of its times, the peers' speeds."""
    table = Table(records)
    passes = [x for x in ALL_PASSES if any(key[2] == x for key in table.cells)]
    second = [x for x in SECOND if x in passes]
    peers = {
        peer: [x for x in second if any((c, peer, x) in table.cells for c in table.problems)] for peer in table.peers
    }
    heads = ["head_dim", "seqlen", "batch x heads", "mask", "dtype", *(NAMES.get(x, x) for x in passes)]
    heads += [f"{NAMES.get(x, x)} : {BASES[x]}, time" for x in second]
    heads += [f"{TITLES.get(peer, peer)}, {' / '.join(NAMES.get(x, x) for x in own)}" for peer, own in peers.items()]
    heads += [f"cuflash : best, {' / '.join(NAMES.get(x, x) for x in second)}"] * bool(peers)
    heads += [f"error : formula's, {' / '.join(NAMES.get(x, x) for x in second)}"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for case, problem in table.problems.items():
        cells = label(problem)
        cells += [number(table.value(case, table.mine, x)) for x in passes]
        cells += [number(_multiple(table, case, x), 2) for x in second]
        cells += [" / ".join(number(table.value(case, peer, x)) for x in own) for peer, own in peers.items()]
        if peers:
            cells += [" / ".join(number(table.ratio(case, x, table.peers), 2) for x in second)]
        cells += [" / ".join(number(table.error_ratio(case, x), 2) for x in second)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines + notes(table))


def _multiple(table: Table, case: str, pass_: str) -> float | None:
    """The time of a pass as a multiple of that of the pass that it is the tangent of."""
    of_pass, of_base = (table.cells.get((case, table.mine, x), {}).get("median_us") for x in (pass_, BASES[pass_]))
    return of_pass / of_base if of_pass and of_base else None
