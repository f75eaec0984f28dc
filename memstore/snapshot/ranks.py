"""The ranks that take or restore a snapshot together: a process group, or this process alone.

Only small messages pass here, through the store of the group; no collective is called. A call goes in steps, which all
ranks make in the same order (`together`, `at_first`, `end`):

    1. each rank runs the step, and says how it went
    2. rank 0 hears all of them, and says them to all
    3. after the last step, rank 0 waits until all have heard that: its process may have the store, and end

A step that fails on one rank fails on all: the others' error names the rank. So does that of ranks which wait for one
that has died, left the call between two steps, or doesn't come (`Exchange`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import msgspec
import torch

from memstore import errors
from memstore._group_call import LONGEST_PAUSE, SHORTEST_PAUSE, GroupCall
from memstore.engine import boot_id, deadline_after, syscalls
from memstore.errors import MemstoreError, StoreTimeoutError, error_of_lack

# --- Steps -----------------------------------------------------------------------------------------------------------


TIMEOUT = 1800.0  # seconds for the other ranks in each step, of which the writing of all bytes is one
_LAST_WORDS = 30.0  # seconds for all ranks to have heard how the last step went
_ALL, _END = "all", "end"  # words


class _StepOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How a step went on a rank: the type and text of what it raised, or what it returned."""

    kind: str
    text: str
    found: bytes


class RankGroup:
    """The members of a process group, in one call that all of them make.

    Args:
        group: a ProcessGroup; None: the default one, if torch.distributed is initialised, else no other rank.
        timeout: seconds to wait for the other ranks in each step.

    Attributes:
        rank, size: of this process, and of the group.
        timeout: as it was given.
        all_know: a step has failed, and every rank knows it: none goes on to the next one.
    """

    def __init__(self, group: Any = None, timeout: float = TIMEOUT) -> None:
        deadline_after(timeout)  # raises for what is no number of seconds
        self._group, self.timeout = group, timeout
        self._exchange: Exchange | None = None
        self._step = 0
        self._said: list[str] = []  # on rank 0: words that are needed no more once all ranks have come to the next step
        self.all_know = False
        self.rank, self.size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._group = torch.distributed.group.WORLD if group is None else group
            self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
            if self.rank < 0:
                raise ValueError("this process is no member of the process group that it passed")

    @property
    def lost(self) -> bool:
        """Another rank doesn't answer any more, or has left the call."""
        return self._exchange is not None and self._exchange.lost

    def together(self, step: Callable[[], bytes]) -> list[bytes]:
        """Runs the step on every rank, and returns what it returned on each.

        Raises:
            Exception: what the step raised here; or, if it raised on other ranks, a MemstoreError of the same type
                that names the first of them and its reason.
            StoreTimeoutError: a rank didn't come; it is named.
            MemstoreError: a rank has died; it is named.
        """
        if self.size == 1:
            return [step()]
        mine, raised = _run(step)
        try:
            outcomes = self._gather(mine)
        except MemstoreError as lost:
            if raised is not None:
                raise raised from lost
            raise
        self.all_know = any(outcome.kind for outcome in outcomes)
        if self.all_know:
            self.end()
        if raised is not None:
            raise raised
        for rank, outcome in enumerate(outcomes):
            if outcome.kind:
                raise error_of_rank(rank, outcome.kind, outcome.text)
        return [outcome.found for outcome in outcomes]

    def at_first(self, step: Callable[[], bytes]) -> bytes:
        """Runs the step on rank 0, which waits for nobody; all get what it returned. Raises as `together`."""
        if self.size == 1:
            return step()
        exchange = self._begun()
        self._step += 1
        word = f"{self._step}/{_ALL}"
        raised: Exception | None = None
        if self.rank == 0:
            mine, raised = _run(step)
            exchange.say(word, mine)
            self._said.append(word)
            exchange.call.forget_in_next(*self._said)
        else:
            mine = msgspec.msgpack.decode(exchange.hear(word, 0), type=_StepOutcome)
            if mine.kind:
                raised = error_of_rank(0, mine.kind, mine.text)
        if raised is None:
            return mine.found
        self._gather(mine)  # after this, rank 0 knows that all have heard it
        self.all_know = True
        self.end()
        raise raised

    def end(self) -> None:
        """After the last step: rank 0 waits until all have heard what it said. Who is lost now changes nothing."""
        if self.size == 1:
            return
        exchange = self._begun()
        words = [f"{_END}/{rank}" for rank in range(self.size)]
        with contextlib.suppress(MemstoreError):
            if self.rank:
                exchange.say(words[self.rank], None)
                return
            for rank in range(1, self.size):
                exchange.hear(words[rank], rank, words, at_most=_LAST_WORDS)
            exchange.call.forget(*words)

    def leave(self, error: BaseException) -> None:
        """Tells the others that this rank makes no more steps of this call, unless they know it."""
        if self._exchange is not None and not self.all_know and not self.lost:
            self._exchange.leave(error)

    def _begun(self) -> Exchange:
        if self._exchange is None:
            self._exchange = Exchange(self._group, self.timeout)
            self._exchange.begin()
        return self._exchange

    def _gather(self, mine: _StepOutcome) -> list[_StepOutcome]:
        exchange = self._begun()
        self._step += 1
        words = [f"{self._step}/{rank}" for rank in range(self.size)]
        to_all = f"{self._step}/{_ALL}"
        exchange.say(words[self.rank], mine)
        if self.rank:
            return msgspec.msgpack.decode(exchange.hear(to_all, 0, words), type=list[_StepOutcome])
        heard = [exchange.hear(words[rank], rank, words) for rank in range(1, self.size)]
        outcomes = [mine, *(msgspec.msgpack.decode(text, type=_StepOutcome) for text in heard)]
        if self._said:
            exchange.call.forget(*self._said)
        else:
            exchange.call.forget_earlier()
        exchange.say(to_all, outcomes)
        self._said = [*words, to_all]
        exchange.call.forget_in_next(*self._said)
        return outcomes


def _run(step: Callable[[], bytes]) -> tuple[_StepOutcome, Exception | None]:
    try:
        return _StepOutcome("", "", step()), None
    except Exception as raised:
        error = error_of_lack(raised, "this rank") or raised  # of a type that the other ranks can raise, too
        return _StepOutcome(type(error).__name__, str(error) or repr(error), b""), error


# --- Words -----------------------------------------------------------------------------------------------------------
# What the ranks of one call hear of each other: words that are waited for, and why one isn't said any more.
#
# Who waits for a word of a rank gets it, or learns, by an error that names the rank: that one has left the call between
# two steps, or that its process has ended (which only its own host can know), or that the time is over. Who learns of
# the last two tells the others.


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


# --- Processes of this host: whether one that took part has ended ----------------------------------------------------


_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat, counted behind the program's name (proc(5): 3 and 22)


class Process(msgspec.Struct, frozen=True):
    """A process, told apart from all others, also from later ones of its number.

    Attributes:
        host: the boot of its machine, and its namespace of pids; None if its /proc shows another namespace.
        pid: its number there.
        started: when, in ticks since that boot.
    """

    host: tuple[bytes, int] | None
    pid: int
    started: int


def this_process() -> Process:
    _, started = _look_up("self")
    return Process(_host(), os.getpid(), started)


def has_ended(process: Process, mine: Process) -> bool:
    """Whether it surely has: of one on another host, or in another namespace, nobody here can know.

    Args:
        mine: this process.
    """
    if process.host is None or process.host != mine.host:
        return False
    try:
        os.kill(process.pid, 0)
        state, started = _look_up(str(process.pid))
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or hidden in /proc
        return False
    return started != process.started or state in "ZX"  # dead, and nobody has waited for it yet


def _host() -> tuple[bytes, int] | None:
    if os.readlink("/proc/self") != str(os.getpid()):
        return None
    return boot_id(), syscalls.pid_namespace()


def _look_up(process: str) -> tuple[str, int]:
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[_STATE], int(fields[_STARTED])
