"""Random rows out of a large data set whose pages are on the disk."""

from __future__ import annotations

import torch

from tests.benchmarks import pages
from tests.benchmarks.measure import WARM_UP_CALLS, Contestant, compare
from tests.benchmarks.peers.rows import Bytes, RowPeer
from tests.benchmarks.report import Absent, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.gather import FRAME, PICKED, TEXT, Picks, data_set
from tests.benchmarks.workloads.put_get import times_faster

READ = "the rows named to the kernel, then pread"
TITLE = f"{PICKED} random rows, from the disk"
MOST_ROUNDS = 7  # a peer takes a second or two a call


def measure(session: Session) -> Workload:
    if session.disk is None:
        reason = "no folder with 10 GiB free whose pages can be dropped: name one on a disk with --disk"
        return Workload("gather-cold", TITLE, "", [], [], absent=[Absent("any of it", reason)])
    data = data_set(session)
    data.check()
    rounds = min(session.rounds, MOST_ROUNDS)
    most = rounds + WARM_UP_CALLS  # a call a round
    contestants = [_contestant(peer, data.some_rows(), most) for peer in data.peers]
    contestants.append(_limit(data.bytes, data.some_rows(), most))
    series = compare("gather-cold", f"{PICKED} rows, from the disk", contestants, rounds=rounds, reference="memstore")
    for peer in data.peers:
        peer.shut()
    data.check()
    return Workload(
        id="gather-cold",
        title=TITLE,
        text=TEXT.format(rows=data.rows, where="a disk") + " Before each call the data set is closed, its files' own "
        "pages are dropped from memory, and it is opened again, outside the time.",
        series=[series],
        goals=times_faster(f"{PICKED} rows from the disk", series, 20),
        absent=data.absent,
    )


def _contestant(peer: RowPeer, picks: Picks, most: int) -> Contestant:
    def before() -> None:
        picks.next()
        peer.shut()
        for path in peer.files():
            pages.drop(path)
            if pages.are_in_memory(path):
                raise SystemExit(f"{peer.name}: pages of {path} can't be dropped: somebody has them mapped")
        peer.open()

    return Contestant(
        peer.name, peer.role, lambda: peer.rows(picks.index), before=before, most=most, note=peer.settings
    )


def _limit(bytes: Bytes, picks: Picks, most: int) -> Contestant:
    out = torch.empty(PICKED, *FRAME, dtype=torch.uint8)

    def before() -> None:
        picks.next()
        pages.drop(bytes.path)

    return Contestant(READ, "limit", lambda: bytes.read(picks.index, out), before=before, most=most)
