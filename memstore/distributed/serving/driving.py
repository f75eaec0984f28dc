"""Drives the rules' steps in the index process: transactions by its catalog, messages by its links.

A client's steps are driven elsewhere (`client/`): those have a deadline, these end with the process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from memstore.distributed.actors import FoundActor
from memstore.distributed.catalog import look, run
from memstore.distributed.links import Links
from memstore.distributed.rules import Answer, Send, Steps, Transact
from memstore.distributed.serving.ending import Ended, Ending
from memstore.distributed.serving.messages import Reported, decode_answer, encode
from memstore.distributed.serving.silence import Silences
from memstore.engine import Root
from memstore.errors import CorruptionError, HomeUnavailableError, LinkRefusedError

Result = TypeVar("Result")

MUTEX_WITHIN = 5.0  # seconds that a transaction waits for the store's mutex
ANSWER_WITHIN = 5.0  # seconds

log = logging.getLogger("memstore")


class Driver:
    """Thread-safe.

    Args:
        changed: called after each transaction that may have changed something.

    Attributes:
        refused: by address, why a listener there would not speak with this process.
        ended_by: the address whose refusal ends this process, which then says it as the reason; empty: none does.
    """

    def __init__(self, root: Root, links: Links, ending: Ending, changed: Callable[[], None]) -> None:
        self._root, self._links, self._ending, self._changed = root, links, ending, changed
        self.refused: dict[str, str] = {}
        self.ended_by = ""
        self._silences = Silences(log.warning)

    def run(self, steps: Steps[Result], *, is_patient: bool = True) -> Result:
        """Runs steps to their end.

        Args:
            is_patient: False: a LinkRefusedError is raised. Else it is as no answer, and is tried again.

        Raises:
            Ended: the process ends.
            StoreTimeoutError, and what else a transaction raises: the steps are given up then.
        """
        try:
            action = next(steps)
            while True:
                if self._ending.is_set:
                    raise Ended
                if isinstance(action, Send):
                    result: object = self._send(action, is_patient=is_patient)
                elif isinstance(action, Transact):
                    result = self._transact(action)
                else:
                    result = self._ending.pause(action.seconds)
                action = steps.send(result)
        except StopIteration as end:
            return end.value
        finally:
            steps.close()

    def _transact(self, action: Transact) -> object:
        deadline = time.monotonic() + MUTEX_WITHIN
        if action.is_read:
            return look(self._root, action.action, deadline)
        result = run(self._root, action.action, deadline)
        self._changed()
        return result

    def _send(self, action: Send, *, is_patient: bool) -> Answer | None:
        deadline = time.monotonic() + ANSWER_WITHIN
        try:
            received = self._received(action, deadline)
            self.refused.pop(action.address, None)
            if received is None:
                self._silences.begin(action.address, self._links.trouble_of(action.address))
                return None
            self._silences.end(action.address)
            answer = decode_answer(received)
        except (LinkRefusedError, CorruptionError) as error:
            self._silences.end(action.address)
            is_told = is_patient and action.address != self.ended_by
            if is_told and self.refused.get(action.address) != str(error):
                log.warning("%s", str(error) if action.address in str(error) else f"{action.address}: {error}")
            self.refused[action.address] = str(error)
            if not is_patient:
                raise
            return None
        return None if isinstance(answer, Reported | FoundActor) else answer

    def _received(self, action: Send, deadline: float) -> bytes | None:
        try:
            return self._links.send(action.address, action.member, encode(action.request), deadline)
        except HomeUnavailableError:
            return None
