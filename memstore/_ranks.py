"""Ranks' talk: what the ranks of one call tell each other, through the store of their process group.

    say         tells it all ranks that ask for this word
    hear        waits for what a rank says
    together    each rank says something, and all ranks get what each has said

No collective is called. A collective knows no timeout of a call, and a rank that failed would leave the others in
theirs. Sharded puts, loads of models, snapshots and TorchStore's API need the following of it.

*A name for a round that can't be mixed up with another's.* Each rank counts the calls of a name, so that the ranks of
one call meet under one number, also after calls that failed. So all ranks make their calls of a name in the same order.
The name of a put or a load has the store, the key and, if the caller gave one, the attempt; all snapshots have one
name. A torch store may outlive its group, and then has words left of it: the ranks of a restarted job, or of a later
group over the same store, must not take them for their own. So rank 0 makes a token for each group, which is part of
all names, and a rank that has heard a token takes it for no later group. In a put of TorchStore's API no rank waits for
another, and rank 0's token may not be there yet: `RankStore.name_among` names these rounds another way.

*A deadline, and who is missing.* A put or a load has one deadline for all that it hears. In a load the others wait a
second longer than rank 0, so that they learn why it gave up. A snapshot waits so many seconds for each rank in each
step; its error names all ranks that are missing, and is told to the others, who raise it too. `initialize_spmd` waits
until its `rendezvous_timeout`. The texts belong to the callers (`RankCall.late`).

*An error of one rank that all get.* It goes as a RankError, which names the rank. Each rank raises it as an error of
the same class, if that is one of memstore's. Who fails tells the others, so that nobody waits for a word that won't be
said.

*Ranks that die.* Rank 0's process mostly has the store. If the store is gone, every verb raises what
`RankCall.cut_off` makes of that. A put learns of other deaths by its attempt, which doesn't need this module; a load by
its deadline; a snapshot by a look at the processes of its own host, every 50 ms of a wait (`RankCall.look_around`).

*Words that don't pile up.* A training run makes millions of calls with one store. The last rank that has heard all of a
put or a load removes its words (`done_with`): a later call of the same key may never come. A step of a snapshot removes
the words of the step before, or of the last step of the snapshot before (`forget_later`), since all ranks have come to
the new one. Rank 0 waits for the last words of a snapshot: its process may end, and the store with it.

*Subgroups.* Any group that has this process will do; its store is its own. TorchStore's API needs the ranks of some
meshes, for which there may be no group: it uses the default group's store, and the ranks' numbers in the name.

*Threads, and asyncio.* Several threads may be in calls at once. So nobody calls the store's `wait`: it would keep other
threads from the store, and Ctrl-C from this one, and when its time is over torch prints warnings. A look takes some
50 µs, and the pauses between looks grow to 10 ms. A load whose task was cancelled raises when it looks around next.

*Forked children.* A child has a copy of what its parent knew, and of the parent's connection to the store, which two
processes can't use. It can begin a process group of its own, for which all is made anew.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch.distributed as dist

from memstore import errors
from memstore._compat import store_of_group
from memstore.errors import MemstoreError

_SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 0.01  # seconds between looks
_TOKEN = "memstore/token"
_PIECE = 4 << 20  # bytes: torch's store of TCP refuses values of 8 MiB
_ALL = "all"

_T = TypeVar("_T")


# --- Errors of one rank that all get ---------------------------------------------------------------------------------


class RankError(msgspec.Struct, frozen=True, array_like=True):
    """An error of one rank, as the others are told of it.

    Attributes:
        kind: the name of its class.
        text: its message.
        rank: whose it is; None: the text says that.
    """

    kind: str
    text: str
    rank: int | None = None

    def as_error(self, key: str | None = None) -> MemstoreError:
        """Returns an error of the same class, if that is one of memstore's, and a MemstoreError otherwise."""
        found = getattr(errors, self.kind, None)
        known = found if isinstance(found, type) and issubclass(found, MemstoreError) else None
        text = self.text
        if self.rank is not None:
            text = f"rank {self.rank} failed: {self.kind}: {text}" if known is None else f"rank {self.rank}: {text}"
        error = (known or MemstoreError)(text)
        error.key = key
        return error


# --- The store of some ranks -----------------------------------------------------------------------------------------


class RankStore:
    """A store of torch.distributed that some ranks share, and what this process knows of it.

    Args:
        token: a part of all names that is known to all ranks; None: rank 0 makes one.

    Attributes:
        rank, world_size: this rank, and how many there are.
        token: as the argument; None until this process has heard it.
        once: what was said or heard by `say_once` and `look_once`, by full names.
        stale: on rank 0, for each name of calls: full names of words that the next step of such a call removes.
    """

    def __init__(self, store: Any, rank: int, world_size: int, token: str | None = None) -> None:
        self.store, self.rank, self.world_size, self.token = store, rank, world_size, token
        self.once: dict[str, Any] = {}
        self.stale: dict[str, list[str]] = {}
        self._counts: dict[Hashable, Iterator[int]] = {}
        self._names: dict[str, str] = {}

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> RankStore:
        """Returns the store of a process group that has this process among its ranks."""
        rank = dist.get_rank(group)  # raises for a group that was destroyed, also if it is known here
        with _lock:
            if group not in _of_groups:
                _of_groups[group] = cls(store_of_group(group), rank, dist.get_world_size(group))
            return _of_groups[group]

    def next_number(self, name: Hashable) -> int:
        """Returns how many calls of this name this rank has made, with this one."""
        with _lock:
            return next(self._counts.setdefault(name, itertools.count(1)))

    def name_among(self, prefix: str, ranks: tuple[int, ...]) -> str:
        """Returns a name that these ranks get alike, with no wait for each other, and that ranks of later groups don't.

        It has a token, which whoever comes first makes, and how many lives this rank has had in this store. A *life* is
        the time of one process group: so the ranks of a job that starts again with the store of the old one begin their
        second life, and no name of the first comes again.
        """
        word = f"{prefix}/{hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"
        with _lock:
            if word not in self._names:
                token = bytes(self.store.compare_set(word, "", uuid.uuid4().hex)).decode()
                self._names[word] = f"{token}/{self.store.add(f'{word}/{self.rank}', 1)}"
            return self._names[word]


_lock = threading.Lock()  # of the following, and of what each RankStore counts
_of_groups: WeakKeyDictionary[Any, RankStore] = WeakKeyDictionary()
_heard: set[str] = set()  # tokens of groups that this process has, or had


# --- One call of the ranks -------------------------------------------------------------------------------------------


class RankCall:
    """One call that ranks make together.

    Subclasses say what their callers are told (`late`, `cut_off`), and what else may end a wait (`look_around`).

    Args:
        ranks: whose call it is.
        name: of the calls that are counted together.

    Attributes:
        rank, world_size: this rank, and how many there are.
        longest_pause: seconds between two looks of a long wait.
        looks_around_every: seconds of a wait between two calls of `look_around`.
    """

    longest_pause = LONGEST_PAUSE
    looks_around_every = 0.0

    def __init__(self, ranks: RankStore, name: str) -> None:
        self._ranks, self._name, self._number = ranks, name, ranks.next_number(name)
        self.rank, self.world_size = ranks.rank, ranks.world_size
        if self.rank == 0:
            with _lock:
                if ranks.token is None:
                    token = uuid.uuid4().hex
                    self._ask(ranks.store.set, _TOKEN, token)
                    ranks.token = token

    # --- what subclasses say

    def late(self, missing: Sequence[int], word: str, waited: float) -> Exception:
        """Returns the error for ranks that have not said this word, after a wait of so many seconds."""
        raise NotImplementedError

    def cut_off(self, error: Exception) -> Exception:
        """Returns the error for a store that is gone, mostly with the process of rank 0. `error` is torch's."""
        return error

    def look_around(self, word: str, rank: int) -> None:
        """Raises if a wait for this word of this rank is in vain."""

    # --- verbs

    def begin(self, deadline: float) -> None:
        """Waits for rank 0, without whose token no other rank can say anything. Whoever hears first does so anyway."""
        pauses = self._pauses("", 0, (), deadline)
        while not self.has_begun():
            next(pauses)

    def has_begun(self) -> bool:
        """Returns whether this process has the token that rank 0 has made for the group.

        A token that this process knows of another group is left of that.
        """
        ranks = self._ranks
        if ranks.token is None and self._ask(ranks.store.check, [_TOKEN]):
            token = self._ask(ranks.store.get, _TOKEN).decode()
            with _lock:
                if ranks.token is None and token not in _heard:
                    _heard.add(token)
                    ranks.token = token
        return ranks.token is not None

    def say(self, word: str, message: Any) -> None:
        """Tells all ranks that ask for this word. The message is anything that msgpack encodes, but not None."""
        self._set(self._full(word), message)

    def hear(self, word: str, kind: type[_T], deadline: float, rank: int = 0, by_ranks: Sequence[str] = ()) -> _T:
        """Waits for what a rank says.

        Args:
            deadline: monotonic.
            rank: who says it.
            by_ranks: words that each of the ranks says first, from which `late` learns who is missing.

        Raises:
            Exception: see `late`, `cut_off` and `look_around`.
        """
        pauses = self._pauses(word, rank, by_ranks, deadline)
        while (said := self.look(word, kind)) is None:
            next(pauses)
        return said

    def hear_all(self, word: str, kind: type[_T], deadline: float) -> list[_T]:
        """Waits for what each rank except 0 says as WORD/RANK, and returns it in their order."""
        return [self.hear(f"{word}/{rank}", kind, deadline, rank) for rank in range(1, self.world_size)]

    def together(self, step: str, mine: _T, kind: type[_T], seconds: float) -> list[_T]:
        """Tells all ranks what each says in this step, and returns it in their order.

        1. Each rank says its own.
        2. Rank 0 hears all of them. A rank that dies before leaves the others waiting for it: `late` and `look_around`.
        3. All ranks have come to this step, so none asks for words of the step before: rank 0 removes them.
        4. Rank 0 says all to all.

        Args:
            seconds: to wait for each rank.
        """
        words = [f"{step}/{rank}" for rank in range(self.world_size)]
        to_all = f"{step}/{_ALL}"
        self.say(words[self.rank], mine)
        if self.rank:
            return self.hear(to_all, list[kind], time.monotonic() + seconds, 0, words)
        said = [mine]
        for rank in range(1, self.world_size):
            said.append(self.hear(words[rank], kind, time.monotonic() + seconds, rank, words))
        self._remove(self._ranks.stale.pop(self._name, ()))
        self.say(to_all, said)
        self.forget_later(*words, to_all)
        return said

    def look(self, word: str, kind: type[_T]) -> _T | None:
        """Returns what was said, without a wait; None if nothing was yet."""
        return self._get(self._full(word), kind) if self.has_begun() else None

    def is_said(self, word: str) -> bool:
        """Returns whether `look` would find it."""
        return self.has_begun() and bool(self._ask(self._ranks.store.check, [self._full(word)]))

    def say_once(self, word: str, message: Any) -> None:
        """Tells it the ranks in this and all later calls of this name. Says nothing if that was said before."""
        name = self._full(word, once=True)
        if self._ranks.once.setdefault(name, message) is message:
            self._set(name, message)

    def look_once(self, word: str, kind: type[_T]) -> _T | None:
        """Returns what was said by `say_once`, and asks for it no more once it has come."""
        if not self.has_begun():
            return None
        name = self._full(word, once=True)
        if name not in self._ranks.once and (said := self._get(name, kind)) is not None:
            self._ranks.once[name] = said
        return self._ranks.once.get(name)

    # --- words that are needed no more

    def forget(self, *words: str) -> None:
        """Removes what was said."""
        self._remove(map(self._full, words))

    def forget_later(self, *words: str) -> None:
        """Removes what was said when all ranks have come to the next step, of this call or the next of its name.

        Rank 0 calls this.
        """
        self._ranks.stale.setdefault(self._name, []).extend(map(self._full, words))

    def done_with(self, *words: str) -> None:
        """Says that this rank has heard all. The last of the ranks except 0 removes these words."""
        name = self._full("left")
        if int(self._ask(self._ranks.store.add, name, 1)) == self.world_size - 1:
            self.forget(*words)
            self._ask(self._ranks.store.delete_key, name)

    # --- the store

    def _pauses(self, word: str, rank: int, by_ranks: Sequence[str], deadline: float) -> Iterator[None]:
        """Sleeps at each `next`, for longer and longer. Raises when it looks around and finds something, or is late."""
        now = started = time.monotonic()
        pause, next_look = _SHORTEST_PAUSE, started + self.looks_around_every
        while True:
            if now >= next_look:
                self.look_around(word, rank)
                next_look = now + self.looks_around_every
            if now >= deadline:
                missing = [other for other, its_word in enumerate(by_ranks) if not self.is_said(its_word)]
                raise self.late(missing or [rank], word, max(deadline - started, 0.0))
            time.sleep(pause)
            yield
            now, pause = time.monotonic(), min(2 * pause, self.longest_pause)

    def _set(self, name: str, message: Any) -> None:
        """Sets a message in pieces: with the first one stands how many others there are."""
        data = msgspec.msgpack.encode(message)
        others = range(_PIECE, len(data), _PIECE)
        for number, start in enumerate(others, 1):
            self._ask(self._ranks.store.set, f"{name}/{number}", data[start : start + _PIECE])
        # The first comes last: who finds it finds all of them.
        self._ask(self._ranks.store.set, name, b"%d " % len(others) + data[:_PIECE])

    def _get(self, name: str, kind: type[_T]) -> _T | None:
        store = self._ranks.store
        if not self._ask(store.check, [name]):
            return None
        others, _, first = bytes(self._ask(store.get, name)).partition(b" ")
        pieces = [bytes(self._ask(store.get, f"{name}/{number}")) for number in range(1, int(others) + 1)]
        return msgspec.msgpack.decode(b"".join([first, *pieces]), type=kind)

    def _remove(self, names: Iterable[str]) -> None:
        store = self._ranks.store
        for name in names:
            self._ask(store.delete_key, name)
            number = 1
            while self._ask(store.check, [f"{name}/{number}"]):  # a FileStore says of all keys that it deleted them
                self._ask(store.delete_key, f"{name}/{number}")
                number += 1

    def _full(self, word: str, *, once: bool = False) -> str:
        call = self._name if once else f"{self._name}/{self._number}"
        return f"memstore/{self._ranks.token}/{call}/{word}"

    def _ask(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the store. Only here torch's errors are caught: some of memstore's are RuntimeErrors as well."""
        try:
            return operation(*arguments)
        except RuntimeError as error:  # a DistError is one
            raise self.cut_off(error) from None
