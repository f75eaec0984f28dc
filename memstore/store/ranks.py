"""The ranks of a sharded put: who this process is among them, and the name that they give to their attempt.

With torch.distributed, rank 0 chooses the name and tells the others (`meeting.py`).
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from memstore.arguments import whole_number
from memstore.engine import Path
from memstore.store.meeting import Meeting, meet

if TYPE_CHECKING:
    from memstore.engine import Root

_BEGIN = "begin"
_MOST_RANKS = 1 << 16


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of a put know of each other."""

    attempt: str
    plain: tuple[Path, ...] = ()  # plain leaves and objects that rank 0 writes, so that the others need not


class Place:
    """A rank, whose attempt the caller has named."""

    def __init__(self, attempt: str, rank: int, world_size: int) -> None:
        if not (isinstance(attempt, str) and attempt):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"attempt is a text that is not empty, and not {attempt!r}")
        try:
            attempt.encode()
        except UnicodeEncodeError:
            raise ValueError(f"attempt has a lone surrogate: {attempt!r} is no Unicode text") from None
        rank, world_size = whole_number("rank", rank), whole_number("world_size", world_size)
        if not 0 <= rank < world_size <= _MOST_RANKS:
            raise ValueError(f"rank {rank} of {world_size}: ranks count from 0, and there are {_MOST_RANKS:,} at most")
        self._attempt, self.rank, self.world_size = attempt, rank, world_size

    def agree(self, plain: tuple[Path, ...], deadline: float) -> Agreement:
        """`plain` are the plain leaves and the objects that this rank holds."""
        return Agreement(self._attempt)


class DistributedPlace(Place):
    """A rank of torch.distributed."""

    def __init__(self, meeting: Meeting, attempt: str | None = None) -> None:
        if not (attempt is None or (isinstance(attempt, str) and attempt)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"attempt is a text that is not empty, and not {attempt!r}")
        self._meeting = meeting
        unique = uuid.uuid4().hex  # names may come again, as after a restart
        name = unique if attempt is None else f"{attempt} {unique}"
        super().__init__(name, meeting.rank, meeting.world_size)

    def agree(self, plain: tuple[Path, ...], deadline: float) -> Agreement:
        """Raises StoreTimeoutError if rank 0 says nothing."""
        if self.rank:
            said = self._meeting.hear(_BEGIN, Agreement, deadline)
            self._meeting.leave([_BEGIN], self.world_size - 1)
            return said
        own = Agreement(self._attempt, plain)
        if self.world_size > 1:
            self._meeting.say(_BEGIN, own)
        return own


def find_place(
    attempt: str | None, rank: int | None, world_size: int | None, process_group: Any, key: str, root: Root
) -> Place:
    """Raises TypeError unless torch.distributed, or the caller, says who this rank is."""
    if attempt is not None and rank is not None and world_size is not None:
        return Place(attempt, rank, world_size)
    if rank is not None or world_size is not None:
        text = "a sharded put takes attempt=, rank= and world_size= together, or attempt= alone, or none of them"
        raise TypeError(f"{key!r}: {text}")
    meeting = meet(process_group, "put", key, root, attempt)
    if meeting is None:
        raise TypeError(
            f"{key!r}: the value is sharded, and this process is no rank of torch.distributed: call put_sharded with "
            "attempt= (a text that all ranks of this put share, and no other put has), rank= and world_size="
        )
    return DistributedPlace(meeting, attempt)
