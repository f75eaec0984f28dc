"""What the ranks of one call tell each other, through the store of their process group.

No collective is called: collectives know no timeout, and a rank that failed would leave the others in theirs. Each rank
counts the calls of a kind for a key, so that those of one call meet under one number, also after calls that failed. So
all ranks make their calls for a key in the same order.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch.distributed as dist

from memstore.errors import PartialCommitError, StoreTimeoutError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 0.01  # seconds between looks; a look takes 50 µs
_MessageT = TypeVar("_MessageT")

_counts: WeakKeyDictionary[Any, dict[str, Iterator[int]]] = WeakKeyDictionary()  # of the calls of each process group


def meet(process_group: Any, kind: str, key: str, store: str) -> Meeting | None:
    """The meeting of a call; None if this process is no rank of torch.distributed. Arguments as of `Meeting`."""
    if dist.is_available() and dist.is_initialized():
        return Meeting(process_group, kind, key, store)
    if process_group is not None:
        raise TypeError(f"{key!r}: process_group is given, and torch.distributed is not initialized")
    return None


class Meeting:
    """One call that the ranks of a process group make together.

    Attributes:
        key: what it is about.
        rank, world_size: this rank, and how many there are, in the group.
    """

    def __init__(self, process_group: Any, kind: str, key: str, store: str) -> None:
        """
        Args:
            process_group: of torch.distributed; None: the default one.
            kind: of the call: "put" or "load".
            key, store: what it is about; the store by its id.

        Raises:
            TypeError: this is no process group, or this process is none of its ranks.
        """
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            what = "this process is none of its ranks" if group is dist.GroupMember.NON_GROUP_MEMBER else repr(group)
            raise TypeError(f"{key!r}: process_group must be one of torch.distributed, and have this process: {what}")
        name = f"memstore/{kind}/{store}/{key}"
        counter = _counts.setdefault(group, {}).setdefault(name, itertools.count(1))
        self._name = f"{name}/{next(counter)}"
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._kind, self.key = kind, key
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def say(self, word: str, message: msgspec.Struct) -> None:
        """Tells it all ranks that ask for this word."""
        try:
            self._store.set(f"{self._name}/{word}", msgspec.msgpack.encode(message))
        except (dist.DistError, RuntimeError) as error:
            raise self._cut_off(error) from None

    def hear(self, word: str, kind: type[_MessageT], deadline: float, rank: int = 0) -> _MessageT:
        """Waits for what a rank says.

        Raises:
            StoreTimeoutError: it said nothing by the deadline.
            PartialCommitError: the group's store is out of reach.
        """
        name, started = f"{self._name}/{word}", time.monotonic()
        pause = _SHORTEST_PAUSE
        try:
            # Not `wait`: it would keep other threads from the group's store, and Ctrl-C from this one, and when its
            # time is over torch prints warnings.
            while not self._store.check([name]):
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if time.monotonic() >= deadline:
                    waited = f"rank {self.rank} waited {max(deadline - started, 0):.3g} s for rank {rank}"
                    text = f"{self.key!r}: {waited}, which did not come to this {self._kind}"
                    raise StoreTimeoutError(text, key=self.key)
            return msgspec.msgpack.decode(self._store.get(name), type=kind)
        except (dist.DistError, RuntimeError) as error:
            raise self._cut_off(error) from None

    def leave(self, words: Sequence[str], ranks: int) -> None:
        """Says that this rank has heard all; the last of so many ranks removes what was said."""
        try:
            if self._store.add(f"{self._name}/left", 1) == ranks:
                for word in (*words, "left"):
                    self._store.delete_key(f"{self._name}/{word}")
        except (dist.DistError, RuntimeError) as error:
            raise self._cut_off(error) from None

    def _cut_off(self, error: Exception) -> PartialCommitError:
        why = str(error).partition("\n")[0]
        text = f"{self.key!r}: rank {self.rank} can't reach the store of its process group: {why}"
        return PartialCommitError(text, key=self.key)
