"""A load of a model, in two steps: who awaits it waits between them for a newer version, and no thread does.

1. Made, it has its place in the order in which the ranks of a process group match their loads (`meeting.py`).
2. `fill` takes the version, on the rank that leads, and fills the modules of all ranks (`models.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from memstore.errors import MemstoreError
from memstore.store.model_state import is_spread
from memstore.store.models import decline, load_alone, load_together

if TYPE_CHECKING:
    import torch

    from memstore.engine import Pin
    from memstore.store.meeting import Meeting


class ModelLoad:
    """One `load_model` of this process. Any thread may go on with it.

    Args:
        meeting: with the other ranks; None: this process is no rank.
        take: takes the key's current version. Its argument: whether what lies on other hosts may come when it is read.
        receive: maps the version that rank 0 has packed, in the same ways.

    Attributes:
        is_alone: there are no other ranks.
        leads: it takes the version, for all.
    """

    def __init__(
        self, meeting: Meeting | None, take: Callable[[bool], Pin], receive: Callable[[bytes, bool], Pin]
    ) -> None:
        self._meeting, self._take, self._receive = meeting, take, receive
        self.is_alone = meeting is None or meeting.world_size == 1
        self.leads = meeting is None or meeting.rank == 0

    def fill(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        strict: bool,
        cast: bool,
        wait: Callable[[], object] | None,
        deadline: float,
        timeout: float,
    ) -> int:
        """Returns the version. Raises as `Store.load_model`.

        Args:
            wait: is called first, where this rank leads. The other ranks are told what it raises.
            deadline: monotonic, until which this rank's copy is to begin.
            timeout: seconds for the other ranks, once it is done.
        """
        lazily = is_spread(model)  # this rank needs some of the bytes; else its host keeps a copy of all of them

        def take() -> Pin:
            if wait is not None:
                wait()
            return self._take(lazily)

        if self._meeting is None or self.is_alone:
            pin = take()
            load_alone(pin, model, optimizer, strict=strict, cast=cast)
            return pin.record.version
        return load_together(
            self._meeting,
            take,
            lambda packed: self._receive(packed, lazily),
            model,
            optimizer,
            strict=strict,
            cast=cast,
            deadline=deadline,
            timeout=timeout,
        )

    def give_up(self) -> None:
        """Nobody fills: the other ranks are told, if this one leads, and else learn by their timeouts."""
        if self._meeting is not None and self.leads and not self.is_alone:
            with suppress(MemstoreError):
                decline(self._meeting)
