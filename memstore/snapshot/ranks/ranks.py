"""The ranks that take or restore a snapshot together: a process group, or this process alone.

Only small messages pass here, through the store of the group; no collective is called. A call goes in steps, which all
ranks make in the same order:

    1. each rank runs the step, and says how it went
    2. rank 0 hears all of them, and says them to all
    3. after the last step, rank 0 waits until all have heard that: its process may have the store, and end

A step that fails on one rank fails on all: the others' error names the rank. So does that of ranks which wait for one
that has died, left the call between two steps, or doesn't come (exchange.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from memstore.engine import deadline_after
from memstore.errors import MemstoreError, error_of_lack
from memstore.snapshot.ranks.exchange import Exchange, error_of_rank

TIMEOUT = 1800.0  # seconds for the other ranks in each step, of which the writing of all bytes is one
_LAST_WORDS = 30.0  # seconds for all ranks to have heard how the last step went
_ALL, _END = "all", "end"  # words


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """How a step went on a rank: the type and text of what it raised, or what it returned."""

    kind: str
    text: str
    found: bytes


class Ranks:
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
            mine = msgspec.msgpack.decode(exchange.hear(word, 0), type=_Outcome)
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

    def _gather(self, mine: _Outcome) -> list[_Outcome]:
        exchange = self._begun()
        self._step += 1
        words = [f"{self._step}/{rank}" for rank in range(self.size)]
        to_all = f"{self._step}/{_ALL}"
        exchange.say(words[self.rank], mine)
        if self.rank:
            return msgspec.msgpack.decode(exchange.hear(to_all, 0, words), type=list[_Outcome])
        heard = [exchange.hear(words[rank], rank, words) for rank in range(1, self.size)]
        outcomes = [mine, *(msgspec.msgpack.decode(text, type=_Outcome) for text in heard)]
        if self._said:
            exchange.call.forget(*self._said)
        else:
            exchange.call.forget_earlier()
        exchange.say(to_all, outcomes)
        self._said = [*words, to_all]
        exchange.call.forget_in_next(*self._said)
        return outcomes


def _run(step: Callable[[], bytes]) -> tuple[_Outcome, Exception | None]:
    try:
        return _Outcome("", "", step()), None
    except Exception as raised:
        error = error_of_lack(raised, "this rank") or raised  # of a type that the other ranks can raise, too
        return _Outcome(type(error).__name__, str(error) or repr(error), b""), error
