"""PendingSnapshot: what a user has of a snapshot that is being written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memstore.snapshot.manifest import Manifest
from memstore.snapshot.pending import PendingTake

if TYPE_CHECKING:
    from memstore.snapshot.snapshot import Snapshot


class PendingSnapshot:
    """A snapshot that is being written. Made by `Snapshot.async_take`.

    Attributes:
        path: of its folder.
    """

    def __init__(self, take: PendingTake, snapshot_of: Callable[[Manifest], Snapshot]) -> None:
        self.path: str = take.path
        self._take, self._snapshot_of = take, snapshot_of

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Waits until the snapshot of all ranks is there, and returns it.

        Args:
            timeout: seconds; None: as long as this rank's bytes take, and then half an hour, or the `storage_options`'
                "timeout", for the other ranks.

        Raises:
            StoreTimeoutError: it takes longer; the message says which ranks are missing. It goes on, and `wait` can be
                called again.
            AlreadyExistsError: another take to this path was faster.
            UnknownOutcomeError: the folder has been removed since.
            MemstoreError, OSError: what failed in the writer of this rank, or, naming it, of another.
        """
        return self._snapshot_of(self._take.wait(timeout))

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._take.done()

    def __repr__(self) -> str:
        return f"memstore.PendingSnapshot({self.path!r}, done={self.done()})"
