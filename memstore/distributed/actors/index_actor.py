"""The index actor, as Monarch calls it. Importing this imports Monarch, which takes seconds."""

from __future__ import annotations

from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from memstore.distributed.actors.desk import Desk

_desks: list[Desk] = []  # of this process: Monarch makes the actor, and would pickle what it were given


def stand_at(desk: Desk) -> None:
    """The actor of this process will be at this desk."""
    _desks[:] = [desk]


class IndexActor(Actor):
    """One a process, and only in a process that has called `stand_at`."""

    @concurrent_endpoint
    async def take(self, note: bytes) -> bytes:
        """See `notes`. A request that waits holds up no other."""
        return await _desks[0].take(note)

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """Who asked may be dead by now. That is nothing to end for, as it would be by default."""
        return True
