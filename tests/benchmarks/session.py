"""One run of the benchmarks: its folder, how long it may take, and which peers are here."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers import Peer
from tests.benchmarks.report import Absent

logger = logging.getLogger(__name__)

NEEDED_BYTES = 8 << 30  # the largest workload: files of the store and its peers side by side
FRESH_BYTES = 1 << 29  # what one contestant may put into new space: that is slow to take and to give back


@dataclass(slots=True)
class Session:
    root: Path
    quick: bool = False
    peers: frozenset[str] | None = None  # ids; None: all that are here

    @property
    def rounds(self) -> int:
        return 5 if self.quick else 25

    def fresh_calls(self, nbytes: int) -> int:
        """How many puts that take new space are affordable."""
        return max(self.rounds + 8, FRESH_BYTES // max(nbytes, 1))

    @contextmanager
    def started(self, kinds: Iterable[type[Peer]]) -> Iterator[tuple[list[Peer], list[Absent]]]:
        """Starts the peers that are here, says why the others are not, and closes all at the end."""
        running: list[Peer] = []
        absent: list[Absent] = []
        with ExitStack() as stack:
            for kind in kinds:
                if self.peers is not None and kind.role == "peer" and kind.id not in self.peers:
                    absent.append(Absent(kind.name, "not asked for in this run"))
                    continue
                reason = kind.missing()
                if reason is None:
                    folder = Path(tempfile.mkdtemp(prefix=f"{kind.id}-", dir=self.root))
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                    peer = kind(folder)
                    stack.callback(peer.close)
                    reason = _start(peer)
                    if reason is None:
                        running.append(peer)
                if reason is not None:
                    absent.append(Absent(kind.name, reason))
            yield running, absent


def _start(peer: Peer) -> str | None:
    """A peer that is installed and still can't run is listed with its reason; memstore and the limits must run."""
    if peer.role != "peer":
        peer.setup()
        return None
    try:
        peer.setup()
    except Exception as error:
        logger.warning("%s can't run here", peer.name, exc_info=True)
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def session(where: Path, *, quick: bool, peers: frozenset[str] | None) -> Iterator[Session]:
    free = shutil.disk_usage(where).free
    if free < NEEDED_BYTES:
        raise SystemExit(
            f"{where} has {free / 2**30:.1f} GiB free, the benchmarks need {NEEDED_BYTES >> 30}: use --root"
        )
    root = Path(tempfile.mkdtemp(prefix="memstore-bench-", dir=where))
    try:
        yield Session(root, quick=quick, peers=peers)
    finally:
        shutil.rmtree(root, ignore_errors=True)
