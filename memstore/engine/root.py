"""Root: one opened store folder in this process. All Store objects of a process on one folder share one Root.

`opening.py` makes them, and `registry.py` counts their users.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from memstore.engine import syscalls
from memstore.engine.catalog import Catalog
from memstore.engine.folder import SEGMENTS, Settings
from memstore.engine.lockfile import OwnedFile
from memstore.engine.pages import Doorbell, LockPage
from memstore.engine.spares import Spares
from memstore.errors import PermissionDeniedError, StoreClosedError


@dataclass(eq=False)
class Root:
    """The parts of an opened store that the protocols work on."""

    path: str
    settings: Settings
    lock: LockPage | None  # None where this process may only read
    doorbell: Doorbell
    catalog: Catalog
    on_tmpfs: bool
    locks_need_files: bool  # a mapping keeps none there: see `filesystem.mappings_keep_locks`
    segments_folder: OwnedFile  # whatever its path names by now
    guard: threading.RLock = field(default_factory=threading.RLock)  # every transaction, and every lock fd's opening
    users: int = 0
    spares: Spares = field(default_factory=Spares)
    looked_at_held: float = 0.0  # when this process last did, monotonic
    looked_for_dead: float = 0.0  # when this process last came to the end of the filling rows, monotonic
    last_filling: int = 0  # the row where it stopped

    @property
    def segments(self) -> str:
        return f"{self.path}/{SEGMENTS}"

    @property
    def segments_fd(self) -> int:
        fd = self.segments_folder.fd
        if fd < 0:  # by another thread
            raise StoreClosedError(f"the store {self.path} was closed: memstore.open it again")
        return fd

    def sync_unlinked(self) -> None:
        """Before their rows go: a file that a crash of the host brings back, and no row names, nobody gives back."""
        if self.settings.durable:
            syscalls.sync(self.segments_fd)

    def is_in_place(self) -> bool:
        """Whether the path still names the folder that was opened."""
        try:
            return os.path.samestat(os.stat(self.segments), os.fstat(self.segments_fd))
        except (OSError, StoreClosedError):
            return False

    @property
    def mutex(self) -> LockPage:
        if self.lock is None:
            raise PermissionDeniedError(f"{self.path}: this process may only read the store")
        return self.lock
