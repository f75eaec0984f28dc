"""Replay: events, run on real tensors.

1. `needed` finds the events on which the wanted storages depend.
2. They run in their order. Storages that no later event needs are let go.
3. What draws random numbers gets them from its place in its stream.

Each replay makes all memory anew, so that what was made before may have been written since.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memstore.deferred_init.events import Event, generator_of, needed, now
from memstore.fake import Mark, TensorRef, over_storage, tensors_in
from memstore.structure import modes

_lock = threading.RLock()  # a generator that isn't ours is borrowed, and what was made is noted on tensors
_aten: Any = torch.ops.aten
# They draw as many numbers for a tensor whatever is in it.
_FILLS = {
    _aten.uniform_.default,
    _aten.normal_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.cauchy_.default,
    _aten.log_normal_.default,
    _aten.geometric_.default,
    _aten.random_.default,
    _aten.random_.to,
    _aten.random_.__getattr__("from"),
}


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def one_at_a_time() -> Generator[None]:
    """Threads make deferred tensors real one after the other, so that all get the same."""
    with _lock:
        yield


@contextmanager
def _alone() -> Generator[None]:
    """Keeps modes, transforms, autocast and gradients of the caller away from the operators."""
    no_autocast: Any = torch._C._DisableAutocast()
    with _lock, modes.put_aside(entirely=True), no_autocast, torch.inference_mode(False), torch.no_grad():
        yield


class Replay:
    """Real storages for marks, for one replay. Each is given as a tensor over it."""

    def __init__(self) -> None:
        self._made: dict[Mark, torch.Tensor] = {}

    def run(self, wanted: Sequence[tuple[Mark, int]], user: Event | None = None) -> dict[Mark, torch.Tensor]:
        """Tensors over real storages of these marks, each as it is at a moment.

        Of marks that are wanted as of several moments, the last one counts.
        """
        with _alone():
            events = needed(wanted, user)
            keep = {mark for mark, _ in wanted}
            last: dict[Mark, Event] = {mark: event for event in events for mark in event.inputs}
            for event in events:
                self.perform(event)
                for mark in {*event.inputs, *(ref.mark for _, ref in event.made)}:
                    if last.get(mark, event) is event and mark not in keep:
                        self._made.pop(mark, None)
            return {mark: self._made[mark] for mark, _ in wanted}

    def perform(self, event: Event) -> Any:
        """Runs one event, and keeps what it makes."""
        args, options = event.arguments(self._tensor)
        result = _run(event, args, options)
        if event.made:
            found = list(tensors_in((result,)))
            for number, ref in event.made:
                self._made[ref.mark] = _laid_out(found[number], ref)
        return result

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        return over_storage(self._made[ref.mark], ref)


def values_of(ref: TensorRef) -> torch.Tensor:
    """Returns the values of a deferred tensor as of now, in memory of their own."""
    made = Replay().run([(ref.mark, now())])
    with modes.put_aside(), torch.no_grad():
        return over_storage(made[ref.mark], ref)


def compute(event: Event) -> Any:
    """Computes what an event's operator returns now."""
    replay, moment = Replay(), now()
    replay.run([(mark, moment) for mark in event.inputs], event)
    with _alone():
        return replay.perform(event)


def _call(event: Event, args: list[Any], options: dict[str, Any]) -> Any:
    """Calls an operator, under the default dtype that it was called under."""
    before = torch.get_default_dtype()
    if before == event.default_dtype:
        return event.operator(*args, **options)
    torch.set_default_dtype(event.default_dtype)
    try:
        return event.operator(*args, **options)
    finally:
        torch.set_default_dtype(before)


def _laid_out(found: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Lays a result out as it was laid out on meta tensors: other tensors show parts of that."""
    is_same = (found.dtype, tuple(found.shape)) == (ref.dtype, ref.size)
    assert is_same, f"{ref} became {found.dtype}{tuple(found.shape)}"
    if (found.stride(), found.storage_offset()) == (ref.stride, ref.offset) and not found._is_view():
        return found
    made = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device=found.device)
    if ref.offset:
        room = torch.empty(ref.offset + made.untyped_storage().nbytes() // made.itemsize, dtype=ref.dtype)
        made = room.to(found.device).as_strided(ref.size, ref.stride, ref.offset)
    return made.copy_(found)


# --- random numbers ---------------------------------------------------------------------------------------------------


def _run(event: Event, args: list[Any], options: dict[str, Any]) -> Any:
    draw = event.draw
    if draw is None:
        return _call(event, args, options)
    stream = draw.stream
    result, state = _run_from(event, args, options, stream.state(draw.number, skip), stream.device)
    stream.learn(draw.number + 1, state)
    return result


def _run_from(
    event: Event, args: list[Any], options: dict[str, Any], state: torch.Tensor, device: torch.device
) -> tuple[Any, torch.Tensor]:
    """Runs an operator that draws, from a state on; returns the state behind it too."""
    device = _drawn_on(args, options, device)
    if any(one.name == "generator" for one in event.operator._schema.arguments):
        own = torch.Generator(device)
        own.set_state(state)
        result = _call(event, args, {**options, "generator": own})
        return result, own.get_state()
    borrowed = generator_of(device)
    before = borrowed.get_state()
    try:
        borrowed.set_state(state)
        result = _call(event, args, options)
        return result, borrowed.get_state()
    finally:
        borrowed.set_state(before)


def _drawn_on(args: list[Any], options: dict[str, Any], device: torch.device) -> torch.device:
    """Says where an operator draws: "cuda" without an index may mean another device than when it was recorded."""
    if device.type == "cpu":
        return device
    asked = options.get("device")
    return next((one.device for one in tensors_in(args)), device) if asked is None else asked


def skip(event: Event, state: torch.Tensor) -> torch.Tensor:
    """Draws for nothing what an event would draw from a state on, and returns the state behind it."""
    assert event.draw is not None, "it draws"
    if event.moment is None:  # it failed: nothing was drawn
        return state
    with _alone():
        if event.operator in _FILLS:
            args, options = event.arguments(_scratch)
        else:
            replay = Replay()
            assert event.moment is not None, "it is recorded"
            replay.run([(mark, event.moment) for mark in event.inputs], event)
            args, options = event.arguments(replay._tensor)
        return _run_from(event, args, options, state, event.draw.stream.device)[1]


def _scratch(ref: TensorRef) -> torch.Tensor:
    return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device=ref.mark.device)
