"""Random rows out of a large data set whose pages are in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.benchmarks.measure import Contestant, compare
from tests.benchmarks.peers.rows import Bytes
from tests.benchmarks.report import Role, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.gather import FRAME, PICKED, TEXT, DataSet, data_set
from tests.benchmarks.workloads.put_get import times_faster

CHUNK = 64 << 20
NEW = "memstore, into new memory"
MAPPED = "index_select(out=) on a mapped file"


def measure(session: Session) -> Workload:
    data = data_set(session)
    data.check()
    for peer in data.peers:
        for path in peer.files():
            with path.open("rb", buffering=0) as file:
                while file.read(CHUNK):
                    pass
        peer.open()
    contestants = [_contestant(data, peer.name, peer.role, peer.rows, peer.settings) for peer in data.peers]
    contestants.append(_contestant(data, NEW, "memstore", data.store.new_rows))
    contestants.append(_contestant(data, MAPPED, "limit", _mapped(data.bytes)))
    series = compare(
        "gather-warm", f"{PICKED} rows, in memory", contestants, rounds=session.rounds, reference="memstore"
    )
    del contestants  # and with them the mapping of the file
    for peer in data.peers:
        peer.shut()
    data.check()
    return Workload(
        id="gather-warm",
        title=f"{PICKED} random rows, in memory",
        text=TEXT.format(rows=data.rows, where="a disk, all in the page cache" if session.disk else "tmpfs"),
        series=[series],
        goals=times_faster(f"{PICKED} rows in memory", series, 3),
        absent=data.absent,
    )


def _contestant(
    data: DataSet, name: str, role: Role, rows: Callable[[torch.Tensor], torch.Tensor], note: str = ""
) -> Contestant:
    picks = data.some_rows()
    return Contestant(name, role, lambda: rows(picks.index), before=picks.next, note=note)


def _mapped(bytes: Bytes) -> Callable[[torch.Tensor], torch.Tensor]:
    every, out = bytes.open_mapped(), torch.empty(PICKED, *FRAME, dtype=torch.uint8)
    return lambda index: torch.index_select(every, 0, index, out=out)
