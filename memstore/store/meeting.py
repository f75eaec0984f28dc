"""What the ranks of one call tell each other, through the store of their process group.

No collective is called: collectives know no timeout, and a rank that failed would leave the others in theirs. Each rank
counts the calls of a kind for a key, so that those of one call meet under one number, also after calls that failed. So
all ranks make their calls for a key in the same order. Calls that are named, by `attempt`, meet by their names.

A store may outlive its group, and then has words left of it. So rank 0 makes a token for each group, which is part of
all names, and a rank that has heard a token takes it for no later group.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch.distributed as dist

from memstore.errors import PartialCommitError, StoreTimeoutError

if TYPE_CHECKING:
    from memstore.engine import Root

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 0.01  # seconds between looks; a look takes 50 µs
_TOKEN = "memstore/token"
_MessageT = TypeVar("_MessageT")


class _Life:
    """What this process knows of a process group: its token, and how many calls of each kind it has made."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.counts: dict[str, Iterator[int]] = {}


_lives: WeakKeyDictionary[Any, _Life] = WeakKeyDictionary()
_heard: set[str] = set()  # tokens of groups that this process has, or had
_lock = threading.Lock()  # of these


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
        name = f"{kind}/{root.settings.store}/{(key, attempt)!r}"
        with _lock:
            self._life = _lives.setdefault(group, _Life())
            counter = self._life.counts.setdefault(name, itertools.count(1))
        self._name = f"{name}/{next(counter)}"
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._kind, self.key, self._path = kind, key, root.path
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank == 0:
            self._begin_life()

    def say(self, word: str, message: msgspec.Struct) -> None:
        """Tells it all ranks that ask for this word."""
        try:
            self._store.set(self._full(word), msgspec.msgpack.encode(message))
        except (dist.DistError, RuntimeError) as error:
            raise self._cut_off(error) from None

    def hear(self, word: str, kind: type[_MessageT], deadline: float, rank: int = 0) -> _MessageT:
        """Waits for what a rank says.

        Raises:
            StoreTimeoutError: it said nothing by the deadline.
            PartialCommitError: the group's store is out of reach.
        """
        started, pause = time.monotonic(), _SHORTEST_PAUSE
        try:
            # Not `wait`: it would keep other threads from the group's store, and Ctrl-C from this one, and when its
            # time is over torch prints warnings.
            while not (self._knows_token() and self._store.check([self._full(word)])):
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if time.monotonic() >= deadline:
                    waited = f"rank {self.rank} waited {round(max(deadline - started, 0), 1):g} s for rank {rank}"
                    where = f"in the store at {self._path}, or went to another store"
                    text = f"{self.key!r}: {waited}, which did not come to this {self._kind} {where}"
                    raise StoreTimeoutError(text, key=self.key)
            return msgspec.msgpack.decode(self._store.get(self._full(word)), type=kind)
        except (dist.DistError, RuntimeError) as error:
            raise self._cut_off(error) from None

    def _full(self, word: str) -> str:
        return f"memstore/{self._life.token}/{self._name}/{word}"

    def _begin_life(self) -> None:
        """On rank 0: makes the group's token, in its first call."""
        with _lock:
            if self._life.token is None:
                token = uuid.uuid4().hex
                try:
                    self._store.set(_TOKEN, token)
                except (dist.DistError, RuntimeError) as error:
                    raise self._cut_off(error) from None
                self._life.token = token

    def _knows_token(self) -> bool:
        """On the other ranks: looks for the token. One that this process knows of another group is left of that."""
        if self._life.token is None and self._store.check([_TOKEN]):
            token = self._store.get(_TOKEN).decode()
            with _lock:
                if self._life.token is None and token not in _heard:
                    _heard.add(token)
                    self._life.token = token
        return self._life.token is not None

    def leave(self, words: Sequence[str], ranks: int) -> None:
        """Says that this rank has heard all; the last of so many ranks removes what was said."""
        try:
            if self._store.add(self._full("left"), 1) == ranks:
                for word in (*words, "left"):
                    self._store.delete_key(self._full(word))
        except (dist.DistError, RuntimeError) as error:
            raise self._cut_off(error) from None

    def _cut_off(self, error: Exception) -> PartialCommitError:
        why = str(error).partition("\n")[0]
        text = f"{self.key!r}: rank {self.rank} can't reach the store of its process group: {why}"
        return PartialCommitError(text, key=self.key)
