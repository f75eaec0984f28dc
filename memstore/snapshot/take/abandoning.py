"""What becomes of the files of a take that failed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from memstore.errors import MemstoreError
from memstore.snapshot.format import CLAIM, INDEX, LIMIT, MANIFEST, Manifest, claim_name, read_manifest
from memstore.snapshot.parts import Take, claimant
from memstore.snapshot.storage import FileStorage


def published(storage: FileStorage, take: Take) -> Manifest | None:
    """The manifest of this take, if it is there, and can be read."""
    with contextlib.suppress(MemstoreError, OSError):
        if storage.size(MANIFEST) is not None:
            found = read_manifest(take.path, storage.read_bytes(MANIFEST, LIMIT))
            return found if found.id == take.id else None
    return None


def abandon(storage: FileStorage, take: Take, written: Sequence[str], rank: int, *, all_ended: bool) -> None:
    """Removes what a take has written that failed; what is published stays, and so does what can't be removed.

    Args:
        written: this rank's files.
        all_ended: whether every other rank writes no more, and removes its files. Else (one may have died) the claim
            stays: by that the next take that is published in the folder knows whose they are.
    """
    if published(storage, take) is not None:
        return
    for name in written:
        with contextlib.suppress(OSError):
            storage.remove(name)
    if rank == 0:
        with contextlib.suppress(OSError):
            own = claimant(storage) == take.id
            if own:
                storage.remove(INDEX)  # first: while the claim is there, it is known whose it is
            if all_ended or take.world_size == 1:
                storage.remove(claim_name(take.id))
                if own:
                    storage.remove(CLAIM)
        with contextlib.suppress(OSError):
            os.rmdir(take.path)  # only if it is empty; to look takes a descriptor, and there may be none
