"""What the ranks of one call hear of each other: words that are waited for, and why one isn't said any more.

Who waits for a word of a rank gets it, or learns, by an error that names the rank: that one has left the call between
two steps, or that its process has ended (which only its own host can know), or that the time is over. Who learns of the
last two tells the others.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import msgspec

from memstore import errors
from memstore.engine import deadline_after
from memstore.errors import MemstoreError, StoreTimeoutError
from memstore.group_call import LONGEST_PAUSE, SHORTEST_PAUSE, GroupCall
from memstore.snapshot.ranks.processes import Process, has_ended, this_process

_LEFT, _PROCESS = "left", "process"  # words
_LOOK = 0.05  # seconds between looks for losses
_MANY = 64  # ranks, from which on each looks less often: one process answers all of them
_LISTED = 20  # ranks in one message

_processes: WeakKeyDictionary[Any, dict[int, Process]] = WeakKeyDictionary()  # of the ranks of a group


class _Left(msgspec.Struct, frozen=True, array_like=True):
    """Why a rank makes no more steps of a call. `is_whole`: the text names the rank whose fault it is."""

    rank: int
    kind: str
    text: str
    is_whole: bool


class Exchange:
    """The words of one call.

    Args:
        group: a ProcessGroup, with this process.
        timeout: seconds to wait for a word.

    Attributes:
        call: which carries the words.
        lost: a word is missing: its rank doesn't answer any more, or the group's store doesn't.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self._timeout = timeout
        self.lost = False
        try:
            self.call = GroupCall(group, "snapshot")
            self._known = _processes.setdefault(group, {})
        except RuntimeError as error:
            raise self._cut_off(error) from error
        self._mine = this_process()

    def begin(self) -> None:
        """Waits for rank 0, without which nobody can say anything, and tells the others which process this one is."""
        try:
            self._wait(self.call.has_begun, "", 0, (), self._timeout)
            if self._known.setdefault(self.call.rank, self._mine) is self._mine:
                self.call.say(f"{_PROCESS}/{self.call.rank}", msgspec.msgpack.encode(self._mine), lasting=True)
        except RuntimeError as error:
            raise self._cut_off(error) from error

    def say(self, word: str, message: Any) -> None:
        try:
            self.call.say(word, msgspec.msgpack.encode(message))
        except RuntimeError as error:
            raise self._cut_off(error) from error

    def hear(self, word: str, rank: int, by_ranks: Sequence[str] = (), *, at_most: float = math.inf) -> bytes:
        """Waits for what a rank says, `at_most` so many seconds. `by_ranks`: words that all ranks say meanwhile.

        Whose words are missing, the error tells.

        Raises:
            StoreTimeoutError: the time is over.
            MemstoreError: the rank has ended, or some rank has left the call.
        """
        try:
            self._wait(lambda: self.call.is_said(word), word, rank, by_ranks, min(self._timeout, at_most))
            return self.call.hear(word) or b""
        except RuntimeError as error:
            raise self._cut_off(error) from error

    def _wait(
        self, is_there: Callable[[], bool], word: str, rank: int, by_ranks: Sequence[str], timeout: float
    ) -> None:
        pause, deadline = SHORTEST_PAUSE, deadline_after(timeout)
        next_look = time.monotonic() + _LOOK
        while not is_there():
            now = time.monotonic()
            if now >= next_look:
                self._look_for_losses(word, rank)
                next_look = now + _LOOK
            if now >= deadline:
                self._give_up(rank, by_ranks)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE * (1 + self.call.world_size / _MANY))

    def leave(self, error: BaseException) -> None:
        """Tells all that this rank says no more."""
        self._leave(_Left(self.call.rank, type(error).__name__, str(error) or repr(error), is_whole=False))

    def _look_for_losses(self, word: str, rank: int) -> None:
        left = self.call.hear(_LEFT)
        if left is not None and not self.call.is_said(word):
            self.lost = True
            why = msgspec.msgpack.decode(left, type=_Left)
            raise _error(why.kind, why.text) if why.is_whole else error_of_rank(why.rank, why.kind, why.text)
        if rank not in self._known:
            said = self.call.hear(f"{_PROCESS}/{rank}", lasting=True)
            if said is not None:
                self._known[rank] = msgspec.msgpack.decode(said, type=Process)
        elif has_ended(self._known[rank], self._mine) and not self.call.is_said(word):
            pid = self._known[rank].pid
            self._lose(MemstoreError(f"rank {rank} (process {pid}) died, or ended, while the other ranks need it"))

    def _give_up(self, rank: int, by_ranks: Sequence[str]) -> NoReturn:
        missing = [other for other, word in enumerate(by_ranks) if not self.call.is_said(word)] or [rank]
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        names = ", ".join(map(str, missing[:_LISTED]))
        text = f"rank {self.call.rank} has waited {self._timeout:g} s for rank {names}{more}, which did not come"
        hint = 'every rank of the process group takes part; storage_options={"timeout": seconds} sets how long to wait'
        self._lose(StoreTimeoutError(f"{text}: {hint}"))

    def _lose(self, error: MemstoreError) -> NoReturn:
        self.lost = True
        self._leave(_Left(self.call.rank, type(error).__name__, str(error), is_whole=True))
        raise error

    def _leave(self, why: _Left) -> None:
        with contextlib.suppress(RuntimeError):  # the group's store is gone, which the others see
            if self.call.has_begun():
                self.call.say(_LEFT, msgspec.msgpack.encode(why))

    def _cut_off(self, error: Exception) -> MemstoreError:
        self.lost = True
        why = str(error).partition("\n")[0]
        return MemstoreError(
            f"the store of the process group is gone: rank 0, which has it mostly, may have died: {why}"
        )


def error_of_rank(rank: int, kind: str, text: str) -> MemstoreError:
    """What failed on another rank, as an error of the same type here."""
    if _type_named(kind) is None:
        return MemstoreError(f"rank {rank} failed: {kind}: {text}")
    return _error(kind, f"rank {rank}: {text}")


def _error(kind: str, text: str) -> MemstoreError:
    return (_type_named(kind) or MemstoreError)(text)


def _type_named(kind: str) -> type[MemstoreError] | None:
    found = getattr(errors, kind, None)
    return found if isinstance(found, type) and issubclass(found, MemstoreError) else None
