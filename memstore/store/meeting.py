"""What the ranks of one call of a Store tell each other: typed messages, with deadlines (group_call.py carries them).

Calls for a key meet in their order; those that are named, by `attempt`, meet by their names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch.distributed as dist

from memstore.abandoned import ABANDONED, check_abandoned
from memstore.engine import shared_id
from memstore.errors import PartialCommitError, StoreTimeoutError
from memstore.group_call import LONGEST_PAUSE, SHORTEST_PAUSE, GroupCall

if TYPE_CHECKING:
    from memstore.engine import Root

_MessageT = TypeVar("_MessageT")


def meet(process_group: Any, kind: str, key: str, root: Root, attempt: str | None = None) -> Meeting | None:
    """The meeting of a call; None if this process is no rank of torch.distributed. Arguments as of `Meeting`."""
    if dist.is_available() and dist.is_initialized():
        return Meeting(process_group, kind, key, root, attempt)
    if process_group is not None:
        raise TypeError(f"{key!r}: process_group is given, and torch.distributed is not initialized")
    return None


class Meeting:
    """One call that the ranks of a process group make together.

    Attributes:
        key: what it is about.
        rank, world_size: this rank, and how many there are, in the group.
    """

    def __init__(self, process_group: Any, kind: str, key: str, root: Root, attempt: str | None) -> None:
        """
        Args:
            process_group: of torch.distributed; None: the default one.
            kind: of the call: "put" or "load".
            key, root: what it is about.
            attempt: a name that the caller has given to the call; None: it goes by the order of the calls.

        Raises:
            TypeError: this is no process group, or this process is none of its ranks.
        """
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            what = "this process is none of its ranks" if group is dist.GroupMember.NON_GROUP_MEMBER else repr(group)
            raise TypeError(f"{key!r}: process_group must be one of torch.distributed, and have this process: {what}")
        self._kind, self.key, self._path = kind, key, root.path
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        try:
            self._call = GroupCall(group, f"{kind}/{shared_id(root)}/{(key, attempt)!r}")
        except (dist.DistError, RuntimeError) as error:
            raise self._cut_off(error) from None

    def say(self, word: str, message: msgspec.Struct) -> None:
        """Tells it all ranks that ask for this word."""
        try:
            self._call.say(word, msgspec.msgpack.encode(message))
        except (dist.DistError, RuntimeError) as error:
            raise self._cut_off(error) from None

    def hear(self, word: str, kind: type[_MessageT], deadline: float, rank: int = 0) -> _MessageT:
        """Waits for what a rank says.

        Raises:
            StoreTimeoutError: it said nothing by the deadline.
            AbandonedError: this is a load, and its task was cancelled. (A put goes on to where it can tell the others.)
            PartialCommitError: the group's store is out of reach.
        """
        started, pause = time.monotonic(), SHORTEST_PAUSE
        try:
            while (said := self._call.hear(word)) is None:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                if ABANDONED and self._kind == "load":
                    check_abandoned()
                if time.monotonic() >= deadline:
                    waited = f"rank {self.rank} waited {round(max(deadline - started, 0), 1):g} s for rank {rank}"
                    where = f"in the store at {self._path}, or went to another store"
                    text = f"{self.key!r}: {waited}, which did not come to this {self._kind} {where}"
                    raise StoreTimeoutError(text, key=self.key)
            return msgspec.msgpack.decode(said, type=kind)
        except (dist.DistError, RuntimeError) as error:
            raise self._cut_off(error) from None

    def leave(self, words: Sequence[str], ranks: int) -> None:
        """Says that this rank has heard all; the last of so many ranks removes what was said."""
        try:
            if self._call.count("left") == ranks:
                self._call.forget(*words)
                self._call.forget_count("left")
        except (dist.DistError, RuntimeError) as error:
            raise self._cut_off(error) from None

    def _cut_off(self, error: Exception) -> PartialCommitError:
        why = str(error).partition("\n")[0]
        text = f"{self.key!r}: rank {self.rank} can't reach the store of its process group: {why}"
        return PartialCommitError(text, key=self.key)
