"""Rows written into a dataset: in place, in pages that the process knows; and behind the rows that are there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import torch

from tests.benchmarks.measure import Contestant, compare
from tests.benchmarks.peers.written_rows import MemmapWrites, PlainMapping, StoreWrites, WritingPeer
from tests.benchmarks.report import Series, Workload
from tests.benchmarks.session import Session

FRAME, WRITTEN, ROWS, FEW_ROWS = (84, 84, 4), 256, 8_192, 1_024
KIB = 28
KINDS: tuple[type[WritingPeer], ...] = (StoreWrites, MemmapWrites, PlainMapping)


def measure(session: Session) -> Workload:
    rows = FEW_ROWS if session.quick else ROWS
    batch = torch.empty(WRITTEN, *FRAME, dtype=torch.uint8)
    batch.flatten().view(torch.int64).random_()
    with session.started(KINDS) as (peers, absent):
        for peer in peers:
            peer.make(rows, FRAME)
            check(peer, batch, rows)
        in_place = _in_place(session, peers, batch, rows)
        behind = _behind(session, [peer for peer in peers if peer.extends], batch, rows)
    return Workload(
        id="dataset",
        title="Rows written into a dataset",
        text=f"{WRITTEN} rows of {KIB} KiB: in place, at other rows of {rows:,} each time; and behind the rows that "
        "are there, into room that was reserved, whose pages the process meets for the first time.",
        series=[in_place, behind],
        goals=[],
        absent=absent,
    )


def check(peer: WritingPeer, batch: torch.Tensor, rows: int) -> None:
    """Meets every page once, and ends the run if other bytes stand there than were written."""
    for start in range(0, rows, WRITTEN):
        peer.write(start, batch)
        if not torch.equal(peer.read(start, start + WRITTEN), batch):
            raise SystemExit(f"{peer.name}: rows from {start} on differ from what was written")


def _in_place(session: Session, peers: Sequence[WritingPeer], batch: torch.Tensor, rows: int) -> Series:
    def contestant(peer: WritingPeer) -> Contestant:
        starts = cycle(range(0, rows, WRITTEN))
        return Contestant(peer.name, peer.role, lambda: peer.write(next(starts), batch), note=peer.settings)

    title = f"{WRITTEN} rows of {KIB} KiB, in place"
    return compare("in-place", title, list(map(contestant, peers)), rounds=session.rounds, reference="memstore")


def _behind(session: Session, peers: Sequence[WritingPeer], batch: torch.Tensor, rows: int) -> Series:
    def contestant(peer: WritingPeer) -> Contestant:
        room = [0]

        def before() -> None:
            if not room[0]:
                peer.renew(rows, FRAME)
                room[0] = rows
            room[0] -= WRITTEN

        return Contestant(peer.name, peer.role, lambda: peer.extend(batch), before=before, note=peer.settings)

    title = f"{WRITTEN} rows of {KIB} KiB, behind the others"
    return compare("extend", title, list(map(contestant, peers)), rounds=session.rounds, reference="memstore")
