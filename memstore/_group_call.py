"""What the ranks of one call tell each other, through the store of their process group.

No collective is called: collectives know no timeout of a call, and a rank that failed would leave the others in theirs.
Each rank counts the calls of a name, so that those of one call meet under one number, also after calls that failed. So
all ranks make their calls of a name in the same order.

A store may outlive its group, and then has words left of it. So rank 0 makes a token for each group, which is part of
all names, and a rank that has heard a token takes it for no later group.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 0.01  # seconds between looks of one who waits; a look takes 50 µs
_TOKEN = "memstore/token"
_PIECE = 4 << 20  # bytes: torch's store of TCP refuses values of 8 MiB


class _Life:
    """The state of a process group in this process.

    Attributes:
        token: of the group.
        counts: how many calls of each name this rank has made.
        stale: on rank 0, for each name, words of the last call.
    """

    def __init__(self) -> None:
        self.token: str | None = None
        self.counts: dict[str, Iterator[int]] = {}
        self.stale: dict[str, list[str]] = {}


_lives: WeakKeyDictionary[Any, _Life] = WeakKeyDictionary()
_heard: set[str] = set()  # tokens of groups that this process has, or had
_lock = threading.Lock()  # of these


class GroupCall:
    """One call that the ranks of a process group make together. Its methods raise RuntimeError if the store is gone.

    Args:
        group: of torch.distributed, with this process among its ranks.
        name: of the calls that are counted together.

    Attributes:
        rank, world_size: this rank, and how many there are, in the group.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        with _lock:
            self._life = _lives.setdefault(group, _Life())
            counter = self._life.counts.setdefault(name, itertools.count(1))
        self._name, self._number = name, next(counter)
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank == 0:
            self._begin_life()

    def has_begun(self) -> bool:
        """Returns whether rank 0 has made the group's token, without which the others can't say anything.

        A token that this process knows of another group is left of that.
        """
        if self._life.token is None and self._store.check([_TOKEN]):
            token = self._store.get(_TOKEN).decode()
            with _lock:
                if self._life.token is None and token not in _heard:
                    _heard.add(token)
                    self._life.token = token
        return self._life.token is not None

    def say(self, word: str, message: bytes, *, lasting: bool = False) -> None:
        """Tells it all ranks that ask for this word, once `has_begun`. `lasting`: in later calls of this name, too."""
        name = self._full(word, lasting)
        pieces = [message[start : start + _PIECE] for start in range(0, len(message), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{name}/{number}", piece)
        self._store.set(name, str(len(pieces)))  # last: who finds this finds all of it

    def hear(self, word: str, *, lasting: bool = False) -> bytes | None:
        """Returns what was said; None if nothing was said yet."""
        # Never the store's `wait`: it would keep other threads from the store, and Ctrl-C from this one, and when its
        # time is over torch prints warnings.
        if not self.is_said(word, lasting=lasting):
            return None
        name = self._full(word, lasting)
        count = int(self._store.get(name))
        return b"".join([bytes(self._store.get(f"{name}/{number}")) for number in range(count)])

    def is_said(self, word: str, *, lasting: bool = False) -> bool:
        """Returns whether `hear` would find it."""
        return self.has_begun() and bool(self._store.check([self._full(word, lasting)]))

    def count(self, word: str) -> int:
        """Counts the ranks that have called this."""
        return int(self._store.add(self._full(word), 1))

    def forget(self, *words: str) -> None:
        """Removes what was said."""
        self._remove(map(self._full, words))

    def forget_count(self, word: str) -> None:
        self._store.delete_key(self._full(word))

    def forget_in_next(self, *words: str) -> None:
        """Lets the next call of this name remove what was said, once all ranks have come to it. Rank 0 calls it."""
        self._life.stale[self._name] = [self._full(word) for word in words]

    def forget_earlier(self) -> None:
        """Removes the words of the last call.

        Rank 0 calls it when all ranks have come to this call, so nobody asks for them.
        """
        self._remove(self._life.stale.pop(self._name, ()))

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            count = int(self._store.get(name)) if self._store.check([name]) else 0
            for number in range(count):
                self._store.delete_key(f"{name}/{number}")
            self._store.delete_key(name)

    def _full(self, word: str, lasting: bool = False) -> str:
        call = self._name if lasting else f"{self._name}/{self._number}"
        return f"memstore/{self._life.token}/{call}/{word}"

    def _begin_life(self) -> None:
        """Makes the group's token, in the first call of rank 0."""
        with _lock:
            if self._life.token is None:
                token = uuid.uuid4().hex
                self._store.set(_TOKEN, token)
                self._life.token = token
