"""Backends of the manager: what writes the files of a step.

`SnapshotBackend` takes snapshots; `dcp.py` has the other one, which needs more of torch, and so is imported when it is
needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from memstore.snapshot import AppState, Snapshot
from memstore.snapshot.increments import LATEST


class BackendOptions(NamedTuple):
    """The options of all backends.

    Attributes:
        replicated: as of `Snapshot.take`.
        storage: `storage_options` as of `Snapshot`.
    """

    replicated: Sequence[str] | None
    storage: Mapping[str, Any]

    @property
    def allow_pickle(self) -> bool:
        return bool(self.storage.get("allow_pickle"))


class PendingSave(Protocol):
    """A save that goes on while training does."""

    def wait(self, timeout: float | None = None) -> object: ...

    def done(self) -> bool: ...


class CheckpointBackend(Protocol):
    """What writes the files of a step. Every rank makes these calls."""

    def save(self, paths: Sequence[str], app_state: AppState, increment: bool) -> None:
        """Saves to all of these folders, and returns when all ranks have.

        Args:
            increment: whether it shares what is unchanged with the newest step; the same on all ranks.
        """
        ...

    def start(self, paths: Sequence[str], app_state: AppState, increment: bool) -> PendingSave:
        """Saves, and returns when the objects may change."""
        ...


class SnapshotBackend:
    """Snapshots."""

    def __init__(self, options: BackendOptions) -> None:
        self._given: dict[str, Any] = {
            "replicated": None if options.replicated is None else list(options.replicated),
            "storage_options": dict(options.storage),
            "allow_pickle": options.allow_pickle,
        }

    def save(self, paths: Sequence[str], app_state: AppState, increment: bool) -> None:
        Snapshot.take(paths[0], app_state, base=LATEST if increment else None, then=paths[1:], **self._given)

    def start(self, paths: Sequence[str], app_state: AppState, increment: bool) -> PendingSave:
        return Snapshot.async_take(
            paths[0], app_state, base=LATEST if increment else None, then=paths[1:], **self._given
        )
