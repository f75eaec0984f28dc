"""The ranks that take or restore a snapshot together: a process group, or this process alone.

Only small messages pass here. A step that fails on one rank fails on all: the others' error names the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from memstore import errors
from memstore.errors import MemstoreError


class Ranks:
    """The members of a process group.

    Args:
        group: a ProcessGroup; None: the default one, if torch.distributed is initialised, else no other rank.

    Attributes:
        rank, size: of this process, and of the group.
        all_know: a step has failed, and every rank knows it: none goes on to the next one.
        lost: another rank doesn't answer any more.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.all_know = self.lost = False
        self.rank, self.size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
            if self.rank < 0:
                raise ValueError("this process is no member of the process group that it passed")

    def together(self, step: Callable[[], bytes]) -> list[bytes]:
        """Runs the step on every rank, and returns what it returned on each.

        Raises:
            Exception: what the step raised here; or, if it raised on other ranks, a MemstoreError of the same type
                that names the first of them and its reason.
        """
        if self.size == 1:
            return [step()]
        mine, failure, raised = b"", ("", ""), None
        try:
            mine = step()
        except Exception as error:
            raised, failure = error, (type(error).__name__, str(error) or repr(error))
        try:
            outcomes = self._gather((*failure, mine))
        except MemstoreError as lost:
            if raised is not None:
                raise raised from lost
            raise
        self.all_know = any(kind for kind, _, _ in outcomes)
        if raised is not None:
            raise raised
        for rank, (kind, text, _) in enumerate(outcomes):
            if kind:
                raise error_of_rank(rank, kind, text)
        return [found for _, _, found in outcomes]

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            self._gather(("", "", b""))

    def _gather(self, mine: tuple[str, str, bytes]) -> list[tuple[str, str, bytes]]:
        found: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(found, msgspec.msgpack.encode(mine), group=self._group)
        except RuntimeError as error:  # torch's errors of lost peers and of timeouts are RuntimeErrors
            self.lost = True
            raise MemstoreError(f"rank {self.rank} lost the others, one of which may have died: {error}") from error
        return [msgspec.msgpack.decode(text, type=tuple[str, str, bytes]) for text in found]


def error_of_rank(rank: int, kind: str, text: str) -> MemstoreError:
    """What failed on another rank, as an error of the same type here."""
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, MemstoreError)):
        return MemstoreError(f"rank {rank} failed: {kind}: {text}")
    return found(f"rank {rank}: {text}")
