"""Recording: what one call of `deferred_init`, or one operator after it, does with deferred tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memstore.deferred_init.events import Event, Past, now, those_in
from memstore.deferred_init.randomness import generator_of, next_draw
from memstore.deferred_init.replay import compute, skip, values_of
from memstore.errors import UnsupportedValueError
from memstore.fake import Mark, Ref
from memstore.structure import modes


class Recording:
    """A recorder (see `memstore.fake`), which keeps what it hears in the pasts of the tensors' storages."""

    def __init__(self) -> None:
        self.streams = 0

    def new_history(self) -> Past:
        return Past(Recording)

    def begin(self, operator: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Event:
        event = Event(operator, args, options)
        if event.is_random:
            event.draw = next_draw(self, _generator(args, options), event, skip)
        return event

    def commit(self, event: Event, made: Sequence[tuple[int, Ref]], written: Sequence[Mark]) -> None:
        event.made = tuple(made)
        event.keep()
        for mark in written:
            past = mark.history
            if isinstance(past, Past) and past.is_over:
                raise UnsupportedValueError(
                    f"{event.operator} would write a deferred tensor that was materialized before: write into what "
                    "materialize_tensor returned"
                )
        for mark in written:
            if isinstance(mark.history, Past):
                mark.history.writes += 1
        event.moment = now()
        for mark in dict.fromkeys([*(ref.mark for _, ref in made), *written]):
            if isinstance(mark.history, Past):
                mark.history.events.append(event)

    def compute(self, event: Event) -> Any:
        return compute(event)

    def run_real(self, event: Event) -> Any:
        result = compute(event)
        assert event.draw is not None, "it draws"
        event.draw.stream.fix(event.draw.number + 1)
        return result

    def values(self, ref: Ref) -> torch.Tensor:
        return values_of(ref)


def _generator(args: Sequence[Any], options: Mapping[str, Any]) -> torch.Generator:
    """The one that an operator with these arguments draws from."""
    given = options.get("generator")
    if given is not None:
        return given
    device = options.get("device")
    if device is None:
        refs = list(those_in((*args, *options.values()), Ref))
        device = refs[0].mark.device if refs else next(iter(_devices(args)), torch.device("cpu"))
    with modes.put_aside():
        return generator_of(device)


def _devices(args: Sequence[Any]) -> list[torch.device]:
    return [one.device for one in args if isinstance(one, torch.Tensor)]
