"""One run of the benchmarks: its folder, how long it may take, and which peers are here."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.benchmarks.pages import can_drop_pages
from tests.benchmarks.peers import Peer
from tests.benchmarks.report import Absent

T = TypeVar("T")
P = TypeVar("P", bound=Peer)
logger = logging.getLogger(__name__)

NEEDED_BYTES = 8 << 30  # the largest workload: files of the store and its peers side by side
NEEDED_ON_DISK = 10 << 30  # three times 100,000 rows
FRESH_BYTES = 1 << 29  # what one contestant may put into new space: that is slow to take and to give back


@dataclass(slots=True)
class Session:
    root: Path
    quick: bool = False
    peers: frozenset[str] | None = None  # ids; None: all that are here
    disk: Path | None = None  # a folder whose pages can be dropped, where there is one
    until_end: ExitStack = field(default_factory=ExitStack)
    _shared: dict[str, Any] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return 5 if self.quick else 25

    def fresh_calls(self, nbytes: int) -> int:
        """How many puts that take new space are affordable."""
        return max(self.rounds + 8, FRESH_BYTES // max(nbytes, 1))

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """What several workloads measure: made by the first, and kept to the end of the run."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    @contextmanager
    def started(
        self, kinds: Iterable[type[P]], *arguments: Any, where: Path | None = None
    ) -> Generator[tuple[list[P], list[Absent]]]:
        """Starts the peers that are here, says why the others are not, and closes all at the end.

        They are made of a folder of their own and these arguments.
        """
        running: list[P] = []
        absent: list[Absent] = []
        with ExitStack() as stack:
            for kind in kinds:
                if self.peers is not None and kind.role == "peer" and kind.id not in self.peers:
                    absent.append(Absent(kind.name, "not asked for in this run"))
                    continue
                reason = kind.missing()
                if reason is None:
                    folder = Path(tempfile.mkdtemp(prefix=f"{kind.id}-", dir=where or self.root))
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                    peer = kind(folder, *arguments)
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
def session(where: Path, disk: Path, *, quick: bool, peers: frozenset[str] | None) -> Iterator[Session]:
    free = shutil.disk_usage(where).free
    if free < NEEDED_BYTES:
        raise SystemExit(
            f"{where} has {free / 2**30:.1f} GiB free, the benchmarks need {NEEDED_BYTES >> 30}: use --root"
        )
    root = Path(tempfile.mkdtemp(prefix="memstore-bench-", dir=where))
    disk.mkdir(parents=True, exist_ok=True)
    on_disk = Path(tempfile.mkdtemp(prefix="memstore-bench-", dir=disk))
    has_room = shutil.disk_usage(on_disk).free > NEEDED_ON_DISK
    try:
        run = Session(root, quick=quick, peers=peers, disk=on_disk if has_room and can_drop_pages(on_disk) else None)
        with run.until_end:
            yield run
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(on_disk, ignore_errors=True)
