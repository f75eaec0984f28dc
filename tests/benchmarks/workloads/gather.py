"""The data set of `gather-warm` and `gather-cold`: 100,000 rows of 28 KiB on a disk, written once for both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict

from tests.benchmarks import pages
from tests.benchmarks.peers.rows import KEY, LEAF, Bytes, MemmapRows, RowPeer, StoreRows, TorchrlRows
from tests.benchmarks.report import Absent
from tests.benchmarks.session import Session

ROWS, FEW_ROWS, FRAME, PICKED = 100_000, 8_000, (84, 84, 4), 256
TEXT = (
    f"{PICKED} rows at random, other ones each time, out of {{rows:,}} rows of {'x'.join(map(str, FRAME))} uint8 "
    "(28 KiB each), in a TensorDict on {where}. memstore reads into a batch that is there (`out=`); what the peers "
    "return is new memory each time."
)


@dataclass(frozen=True, slots=True)
class DataSet:
    """`sample` are rows of it that were kept apart, to compare with."""

    rows: int
    peers: list[RowPeer]
    absent: list[Absent]
    index: torch.Tensor
    sample: torch.Tensor
    bytes: Bytes

    def check(self) -> None:
        """Ends the run if a contestant has other rows than were put."""
        for peer in self.peers:
            peer.open()
            if not torch.equal(peer.rows(self.index), self.sample):
                raise SystemExit(f"{peer.name}: rows differ from what was put")
            peer.shut()

    @property
    def store(self) -> StoreRows:
        return next(peer for peer in self.peers if isinstance(peer, StoreRows))

    def some_rows(self) -> Picks:
        return Picks(self.rows, seed=1)


class Picks:
    """Random rows, call by call: each contestant has its own, and all have the same."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._generator = rows, torch.Generator().manual_seed(seed)
        self.next()

    def next(self) -> None:
        self.index = torch.randint(self._rows, (PICKED,), generator=self._generator)


def data_set(session: Session) -> DataSet:
    return session.shared("rows", lambda: _make(session))


def _make(session: Session) -> DataSet:
    rows = FEW_ROWS if session.quick else ROWS
    kinds = (StoreRows, MemmapRows, TorchrlRows)
    peers, absent = session.until_end.enter_context(session.started(kinds, where=session.disk))
    frames = torch.empty(rows, *FRAME, dtype=torch.uint8)
    frames.flatten().view(torch.int64).random_()
    for peer in peers:
        peer.put(KEY, TensorDict({LEAF: frames}, batch_size=[rows]))
        for path in peer.files():
            pages.flush(path)
    index = Picks(rows, seed=0).index
    store = next(peer for peer in peers if isinstance(peer, StoreRows))
    return DataSet(rows, peers, absent, index, frames[index], Bytes(store, (rows, *FRAME)))
