"""Random numbers: each event that draws some gets those that it would have got when it was recorded.

A recording draws nothing. It counts draws along a *stream*: the numbers that a generator gives from one state on. The
state at a place of a stream is known at its start, and behind draws that were made; to get to another place, the draws
between are made and thrown away.

Behind each draw that is recorded, the generator itself gets a state of its own, a *token*: a fresh seed. So

- whoever finds a token goes on at its place in the stream: the next `deferred_init`, or code that has restored a state
  which it saved (`fork_rng`);
- whoever finds another state begins a stream: the code has seeded, or somebody has drawn for real;
- what is drawn for real afterwards is independent of what is deferred.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import xxhash

Skip = Callable[[Any, torch.Tensor], torch.Tensor]  # of an event
_KEPT_EVERY = 16  # states of 5 kB
_SEEDS = 1 << 63
_DEEPEST = 200  # streams whose starts aren't known, one after the other


class Owner(Protocol):
    """A recording.

    Attributes:
        streams: how many it has begun.
    """

    streams: int


class Draw:
    """One event's place in a stream."""

    __slots__ = ("__weakref__", "number", "stream")

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream, self.number = stream, number


class Stream:
    """The numbers that one recording draws of a generator, from one state on.

    Args:
        owner: the recording.
        device: the generator's.
        start: the first state; or the stream and the place in it where that is to be found, later.
        twin: how many streams of the recording there are already, so that generators with one seed have other tokens.

    Attributes:
        draws: what the table of tokens knows weakly.
        depth: how many streams have to be gone along to know the first state.
    """

    def __init__(
        self, owner: object, device: torch.device, start: torch.Tensor | tuple[Stream, int], twin: int = 0
    ) -> None:
        self.owner, self.device = owner, device
        self.draws: list[Draw] = []
        self._events: list[Any] = []
        self._states: dict[int, torch.Tensor] = {}
        self._fixed: set[int] = {0}
        self._before: tuple[Stream, int] | None = None
        self._branches = 0
        if isinstance(start, tuple):
            before, number = start
            self._before, self.depth = start, before.depth + 1
            before._branches += 1
            text = f"{before.seed(number)} child {before._branches}"
            self._seed = xxhash.xxh3_64_intdigest(text.encode())
        else:
            self._states[0], self.depth = start, 0
            self._seed = xxhash.xxh3_64_intdigest(_bytes(start), seed=twin)

    def add(self, event: Any) -> Draw:
        draw = Draw(self, len(self._events))
        self._events.append(event)
        self.draws.append(draw)
        return draw

    def __len__(self) -> int:
        return len(self._events)

    def seed(self, number: int) -> int:
        """That of the token behind a draw."""
        return xxhash.xxh3_64_intdigest(f"{self._seed} {number} memstore".encode()) % _SEEDS

    def state(self, number: int, skip: Skip) -> torch.Tensor:
        """The state before a draw.

        Args:
            skip: makes an event's draw for nothing, from a state on, and returns the state behind it.
        """
        if self._before is not None:
            before, place = self._before
            self._states[0] = before.state(place, skip)
            self._before, self.depth = None, 0
        known = number
        while known not in self._states:
            known -= 1
        state = self._states[known]
        for one in range(known, number):
            state = skip(self._events[one], state)
            self.learn(one + 1, state)
        return state

    def learn(self, number: int, state: torch.Tensor) -> None:
        """Keeps the state before a draw, and forgets the one before that, unless it is one of a few."""
        self._states[number] = state
        if (number - 1) % _KEPT_EVERY and number - 1 not in self._fixed:
            self._states.pop(number - 1, None)

    def fix(self, number: int) -> None:
        """Keeps a known state for good: the draw before it can't be made again."""
        self._fixed.add(number)


_tokens: weakref.WeakValueDictionary[int, Draw] = weakref.WeakValueDictionary()
_last: dict[torch.device, Stream] = {}  # modules that are made one by one go on in it, also when the former is gone


def next_draw(owner: Owner, generator: torch.Generator, event: Any, skip: Skip) -> Draw:
    """The place of the next draw of a generator, which gets a token. Nothing is drawn."""
    state = generator.get_state()
    before = _tokens.get(_digest(state))
    if before is None:
        stream = Stream(owner, generator.device, state, owner.streams)
        owner.streams += 1
    else:
        stream, number = before.stream, before.number + 1
        if stream.owner is not owner or number < len(stream):  # another recording, or a state that was restored
            stream = Stream(owner, generator.device, (stream, number))
            if stream.depth > _DEEPEST:
                stream.state(0, skip)
    draw = stream.add(event)
    generator.manual_seed(stream.seed(draw.number))
    _tokens[_digest(generator.get_state())] = draw
    _last[generator.device] = stream
    return draw


def generator_of(device: torch.device) -> torch.Generator:
    """The one that operators on a device draw from."""
    if device.type == "cuda":
        torch.cuda.init()
        index = cast("int | None", device.index)  # torch says that it is never None
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    return torch.default_generator


def _digest(state: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(_bytes(state))


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
