"""The ranks that take or restore a snapshot together: a process group, or this process alone.

A call goes in steps, blocks of a `with` that all ranks run in the same order (`together`, `at_first`, `end`):

    1. each rank runs the block, and says how it went (`RankStep`)
    2. rank 0 hears all of them, and says them to all (`RankGroup.end_step`)
    3. after the last step, rank 0 waits until all have heard that: its process may have the store, and end

A step that fails on one rank fails on all: the others' error names the rank. So does that of ranks which wait for one
that has died, left the call between two steps, or doesn't come (`SnapshotCall`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from memstore._ranks import LONGEST_PAUSE, RankCall, RankError, RankStore
from memstore._wording import first_of
from memstore.engine import boot_id, deadline_after, syscalls
from memstore.errors import MemstoreError, StoreTimeoutError, error_of_lack

# --- Steps -----------------------------------------------------------------------------------------------------------


TIMEOUT = 1800.0  # seconds for the other ranks in each step, of which the writing of all bytes is one
_LAST_WORDS = 30.0  # seconds for all ranks to have heard how the last step went
_END, _LEFT, _PROCESS = "end", "left", "process"  # words


class StepOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a step on one rank: what it said, or the error that it raised."""

    said: bytes = b""
    error: RankError | None = None


class RankStep:
    """A step, as a block that all ranks run. Made by `RankGroup.together` and `RankGroup.at_first`.

    Attributes:
        is_at_first: rank 0 waits for nobody.
        said: what this rank tells the others; the block sets it.
        heard: what each rank has told, when the block is over; after one of `at_first` what rank 0 has told.
    """

    __slots__ = ("_ranks", "heard", "is_at_first", "said")

    def __init__(self, ranks: RankGroup, is_at_first: bool) -> None:
        self._ranks, self.is_at_first = ranks, is_at_first
        self.said = b""
        self.heard: list[bytes] = []

    def __enter__(self) -> RankStep:
        return self

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        self._ranks.end_step(self, raised)


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
        self._group: Any = group
        self.timeout = timeout
        self._call: SnapshotCall | None = None
        self._step = 0
        self.all_know = False
        self.rank, self.size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._group = torch.distributed.group.WORLD if group is None else group
            self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
            if self.rank < 0:
                raise ValueError("this process is no member of the process group that it passed")

    @property
    def lost(self) -> bool:
        """Tells whether another rank doesn't answer any more, or has left the call."""
        return self._call is not None and self._call.lost

    def together(self) -> RankStep:
        """Returns a step in which each rank tells something to all.

        Raises, at the end of its block:
            Exception: what the block raised here; or, if it raised on other ranks, a MemstoreError of the same type
                that names the first of them and its reason.
            StoreTimeoutError: a rank didn't come; it is named.
            MemstoreError: a rank has died; it is named.
        """
        return RankStep(self, False)

    def at_first(self) -> RankStep:
        """Returns a step in which rank 0 alone acts, waits for nobody, and tells something to all."""
        return RankStep(self, True)

    def end_step(self, step: RankStep, raised: BaseException | None) -> None:
        """Ends the block of a step, which calls this itself. What this raises takes the place of `raised`."""
        if self.size == 1:
            step.heard = [step.said]
            return
        if raised is not None and not isinstance(raised, Exception):
            return  # of a signal's handler: `leave` tells it
        mine, error = StepOutcome(step.said), raised
        if raised is not None:
            error = error_of_lack(raised, "this rank") or raised  # of a type that the other ranks can raise, too
            mine = StepOutcome(error=RankError(type(error).__name__, str(error) or repr(error), self.rank))
        if step.is_at_first:
            mine = self._said_at_first(mine)
            if mine.error is None:
                step.heard = [mine.said]
                return
        try:
            outcomes = self._tell_all(mine)  # after this, rank 0 knows that all have heard it
        except MemstoreError as lost:
            if error is not None:
                raise error from lost
            raise
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        self.all_know = bool(errors)
        if errors:
            self.end()
            raise error or errors[0].as_error()
        step.heard = [outcome.said for outcome in outcomes]

    def _said_at_first(self, mine: StepOutcome) -> StepOutcome:
        """Says the outcome of rank 0 to all ranks, and returns it on each."""
        call = self._begun()
        self._step += 1
        word = f"{self._step}/first"
        if self.rank:
            return call.hear(word, StepOutcome, deadline_after(self.timeout))
        call.say(word, mine)
        call.forget_later(word)
        return mine

    def end(self) -> None:
        """Ends the call: rank 0 waits until all have heard what it said. Who is lost now changes nothing."""
        if self.size == 1:
            return
        call = self._begun()
        words = [f"{_END}/{rank}" for rank in range(self.size)]
        with contextlib.suppress(MemstoreError):
            if self.rank:
                call.say(words[self.rank], True)
                return
            for rank in range(1, self.size):
                call.hear(words[rank], bool, deadline_after(min(self.timeout, _LAST_WORDS)), rank, words)
            call.forget(*words[1:])

    def leave(self, error: BaseException) -> None:
        """Tells the others that this rank makes no more steps of this call, unless they know it."""
        if self._call is not None and not self.all_know and not self.lost:
            self._call.leave(RankError(type(error).__name__, str(error) or repr(error), self.rank))

    def _tell_all(self, mine: StepOutcome) -> list[StepOutcome]:
        call = self._begun()
        self._step += 1
        return call.together(str(self._step), mine, StepOutcome, float(self.timeout))

    def _begun(self) -> SnapshotCall:
        if self._call is None:
            self._call = SnapshotCall(RankStore.of_group(self._group), self.timeout)
            self._call.begin(deadline_after(self.timeout))
            self._call.say_once(f"{_PROCESS}/{self.rank}", self._call.process)
        return self._call


# --- One call's waits, and what ends them ----------------------------------------------------------------------------


_MANY = 64  # ranks, from which on each looks less often: one process answers all of them
_LISTED = 20  # ranks in one message


class SnapshotCall(RankCall):
    """One take or restore.

    Who waits for a word of a rank gets it, or learns, by an error that names the rank: that one has left the call
    between two steps, or that its process has ended (which only its own host can know), or that the time is over. Who
    learns of the last two tells the others.

    Args:
        timeout: seconds to wait for a word.

    Attributes:
        process: this one.
        lost: a word is missing: its rank doesn't answer any more, or the group's store doesn't.
    """

    looks_around_every = 0.05

    def __init__(self, ranks: RankStore, timeout: float) -> None:
        self._timeout = timeout
        self.lost = False
        self.process = this_process()
        self.longest_pause = LONGEST_PAUSE * (1 + ranks.world_size / _MANY)
        super().__init__(ranks, "snapshot")

    def leave(self, why: RankError) -> None:
        """Tells all that a rank says no more."""
        lost = self.lost
        with contextlib.suppress(MemstoreError):  # the group's store is gone, which the others see
            if self.has_begun():
                self.say(_LEFT, why)
        self.lost = lost

    def late(self, missing: Sequence[int], word: str, waited: float) -> StoreTimeoutError:
        names = first_of(list(map(str, missing)), _LISTED)
        text = f"rank {self.rank} has waited {self._timeout:g} s for rank {names}, which did not come"
        hint = 'every rank of the process group takes part; storage_options={"timeout": seconds} sets how long to wait'
        error = StoreTimeoutError(f"{text}: {hint}")
        self._tell_loss(error)
        return error

    def cut_off(self, error: Exception) -> MemstoreError:
        self.lost = True
        why = str(error).partition("\n")[0]
        return MemstoreError(
            f"the store of the process group is gone: rank 0, which has it mostly, may have died: {why}"
        )

    def look_around(self, word: str, rank: int) -> None:
        """Raises if a rank has left the call, or this one's process has ended, and the word wasn't said before."""
        why = self.look(_LEFT, RankError)
        if why is not None and not self.is_said(word):
            self.lost = True
            raise why.as_error()
        process = self.look_once(f"{_PROCESS}/{rank}", Process)
        if process is not None and has_ended(process, self.process) and not self.is_said(word):
            text = f"rank {rank} (process {process.pid}) died, or ended, while the other ranks need it"
            error = MemstoreError(text)
            self._tell_loss(error)
            raise error

    def _tell_loss(self, error: MemstoreError) -> None:
        """Tells the others of an error whose text names the rank that is lost."""
        self.lost = True
        self.leave(RankError(type(error).__name__, str(error)))


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
    """Returns this process. A forked child is another one than its parent, so nothing of it is kept."""
    is_own_namespace = os.readlink("/proc/self") == str(os.getpid())
    host = (boot_id(), syscalls.pid_namespace()) if is_own_namespace else None
    _, started = _look_up("self")
    return Process(host, os.getpid(), started)


def has_ended(process: Process, mine: Process) -> bool:
    """Tells whether a process surely has ended. Of one on another host, or in another namespace, nobody here knows it.

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


def _look_up(process: str) -> tuple[str, int]:
    """Returns the state of a process, as a letter, and when it was started."""
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[_STATE], int(fields[_STARTED])
