"""Replay: the operators that made or wrote the storages of deferred tensors, and how they run again on real tensors.

An `Event` is an operator with its arguments. A view, a Parameter or `.data` only shows a storage in another way, and
needs no event. `Constant` keeps a real tensor that was an argument; `Draw` is an event's place in a stream of random
numbers.

1. `needed` finds the events on which the wanted storages depend.
2. They run in their order. Storages that no later event needs are let go.
3. What draws random numbers gets them from its place in its stream.

Each replay makes all memory anew, so that what was made before may have been written since.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import xxhash

from memstore._compat import DisableAutocast, is_view, schema_of, version_of
from memstore.errors import UnsupportedValueError
from memstore.fake import Mark, Recorder, TensorRef, kind_of, over_storage, tensors_in
from memstore.structure import modes

# --- Events ----------------------------------------------------------------------------------------------------------


T = TypeVar("T")

_moments = itertools.count()


def now() -> int:
    """Returns a moment behind all events that there are."""
    return next(_moments)


class Event:
    """Operator and its arguments.

    Attributes:
        moment: when it was; None: not recorded yet.
        args, options: with refs for deferred tensors, and constants for real ones.
        inputs: the storages that it reads or writes.
        made: the number among the returned tensors, and the ref, of each that has a new storage.
        draw: the random numbers that it gets, if any.
        default_dtype: torch's, when it was called.
    """

    __slots__ = ("args", "default_dtype", "draw", "inputs", "made", "moment", "operator", "options")

    def __init__(self, operator: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.operator = operator
        self.args = [_kept(one) for one in args]
        self.options = {name: _kept(one) for name, one in options.items() if name != "generator"}
        self.inputs = [ref.mark for ref in those_in((*self.args, *self.options.values()), TensorRef)]
        self.made: Sequence[tuple[int, TensorRef]] = ()
        self.moment: int | None = None
        self.draw: Draw | None = None
        self.default_dtype = torch.get_default_dtype()

    def keep(self) -> None:
        """Keeps the values of now of real tensors that it was given, because it is recorded."""
        for one in those_in((*self.args, *self.options.values()), Constant):
            one.keep()

    def arguments(self, tensor_of: Callable[[TensorRef], torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the operator's arguments, with tensors for refs and constants."""
        options = {name: _given(one, self.operator, tensor_of) for name, one in self.options.items()}
        return [_given(one, self.operator, tensor_of) for one in self.args], options


class Past:
    """History of a storage's mark: what was done with the storage.

    Attributes:
        events: those that made and wrote it, in order.
        is_over: it was materialized, so it must not be written any more.
        writes: how often it was written.
    """

    __slots__ = ("events", "is_over", "writes")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_over = False
        self.writes = 0

    def recorder(self) -> Recorder:
        return Recording()


def those_in(values: Sequence[Any], kind: type[T]) -> Iterator[T]:
    """Yields what is of a kind among values, and in the lists and tuples among them."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif type(value) is list or type(value) is tuple:
            yield from those_in(value, kind)  # pyright: ignore[reportUnknownArgumentType]


def needed(wanted: Sequence[tuple[Mark, int]], user: Event | None = None) -> list[Event]:
    """Returns the events on which storages depend, each as it is at a moment, in their order.

    Raises:
        UnsupportedValueError: they depend on a fake tensor without a past; the message names the operator.
    """
    found: set[Event] = set()
    until: dict[Mark, int] = {}
    todo: list[tuple[Mark, int, Event | None]] = [(mark, moment, user) for mark, moment in wanted]
    while todo:
        mark, moment, by = todo.pop()
        past = mark.history
        if not isinstance(past, Past):
            what = "it" if by is None else f"{by.operator}"
            raise UnsupportedValueError(
                f"{what} needs a fake tensor that was made in fake_mode, of which nobody knows the values: make it "
                "inside of deferred_init"
            )
        before = until.get(mark, -1)
        if moment <= before:
            continue
        until[mark] = moment
        for event in past.events:
            at = event.moment
            assert at is not None, "it is recorded"
            if at >= moment:
                break
            if at >= before and event not in found:
                found.add(event)
                todo.extend((one, at, event) for one in event.inputs)
    return sorted(found, key=_moment_of)


def _moment_of(event: Event) -> int:
    assert event.moment is not None, "it is recorded"
    return event.moment


def _given(value: Any, operator: Any, tensor_of: Callable[[TensorRef], torch.Tensor]) -> Any:
    if isinstance(value, TensorRef):
        return tensor_of(value)
    if isinstance(value, Constant):
        return value.get(operator)
    if type(value) is list or type(value) is tuple:
        return type(value)(_given(one, operator, tensor_of) for one in value)
    return value


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Constant(value)
    if type(value) is list or type(value) is tuple:
        return type(value)(_kept(one) for one in value)
    return value


# --- Constants -------------------------------------------------------------------------------------------------------
# Real tensors that recorded operators were given. They have to be what they were when the operators run again.
#
# Small ones are copied. Large ones must not change: a digest of their bytes tells whether they have, also by numpy or
# by another process. Where bytes can't be had, torch's count of writes does.


_COPIED = 64 << 10  # bytes


class Constant:
    """Real tensor that an operator was given. Until `keep` it is just itself: what is not recorded may write it."""

    __slots__ = ("_is_kept", "_sign", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._is_kept = tensor, False
        self._sign: int | None = None  # None: nothing can change it; or nobody would know

    def keep(self) -> None:
        """Keeps the values of now, because the operator is recorded."""
        if self._tensor.is_meta or _is_plain(self._tensor) and self._tensor.nbytes <= _COPIED:
            self._tensor = self._tensor.detach().clone()
        else:
            self._is_kept, self._sign = True, _sign(self._tensor)

    def get(self, operator: Any) -> torch.Tensor:
        """Returns the tensor.

        Raises:
            UnsupportedValueError: it isn't what it was, or nobody knows whether it is.
        """
        tensor = self._tensor
        if not self._is_kept:
            return tensor
        if self._sign is None:
            raise UnsupportedValueError(
                f"{operator} was given an inference tensor, whose changes can't be seen: give it a clone that was "
                "made outside of inference mode"
            )
        if _sign(tensor) != self._sign:
            raise UnsupportedValueError(
                f"{operator} was given a tensor of shape {tuple(tensor.shape)} that has been written since: "
                "materialize before that, or give it a clone"
            )
        return tensor


def _sign(tensor: torch.Tensor) -> int | None:
    """Returns a number that changes when the tensor gets other values; None if there is no such number."""
    if _is_plain(tensor) and tensor.device.type == "cpu":
        values = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return xxhash.xxh3_64_intdigest(values.view(-1).view(torch.uint8).numpy().data)
    return None if tensor.is_inference() else version_of(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has bytes, as torch's own tensors and Parameters do."""
    is_torchs = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_torchs and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


# --- Random numbers --------------------------------------------------------------------------------------------------
# Random numbers: each event that draws some gets those that it would have got when it was recorded.
#
# A recording draws nothing. It counts draws along a *stream*: the numbers that a generator gives from one state on.
# The state at a place of a stream is known at its start, and behind draws that were made; to get to another place, the
# draws between are made and thrown away.
#
# Behind each draw that is recorded, the generator itself gets a state of its own, a *token*: a fresh seed. So
#
# - whoever finds a token goes on at its place in the stream: the next `deferred_init`, or code that has restored a
#   state which it saved (`fork_rng`);
# - whoever finds another state begins a stream: the code has seeded, or somebody has drawn for real;
# - what is drawn for real afterwards is independent of what is deferred.


Skip = Callable[[Any, torch.Tensor], torch.Tensor]  # of an event
_KEPT_EVERY = 16  # states of 5 kB
_SEEDS = 1 << 63
_DEEPEST = 200  # streams whose starts aren't known, one after the other


class Draw:
    """Place of one event in a stream."""

    __slots__ = ("__weakref__", "number", "stream")

    def __init__(self, stream: RandomStream, number: int) -> None:
        self.stream, self.number = stream, number


class RandomStream:
    """Numbers that one recording draws of a generator, from one state on.

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
        self, owner: Recording, device: torch.device, start: torch.Tensor | tuple[RandomStream, int], twin: int = 0
    ) -> None:
        self.owner, self.device = owner, device
        self.draws: list[Draw] = []
        self._events: list[Any] = []
        self._states: dict[int, torch.Tensor] = {}
        self._fixed: set[int] = {0}
        self._before: tuple[RandomStream, int] | None = None
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
        """Returns the seed of the token behind a draw."""
        return xxhash.xxh3_64_intdigest(f"{self._seed} {number} memstore".encode()) % _SEEDS

    def state(self, number: int, skip: Skip) -> torch.Tensor:
        """Returns the state before a draw.

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
# By device: modules that are made one by one go on in a stream, also when the former module is gone.
_last: dict[torch.device, RandomStream] = {}


def next_draw(owner: Recording, generator: torch.Generator, event: Any, skip: Skip) -> Draw:
    """Returns the place of the next draw of a generator, which gets a token. It draws nothing."""
    state = generator.get_state()
    before = _tokens.get(_digest(state))
    if before is None:
        stream = RandomStream(owner, generator.device, state, owner.streams)
        owner.streams += 1
    else:
        stream, number = before.stream, before.number + 1
        if stream.owner is not owner or number < len(stream):  # another recording, or a state that was restored
            stream = RandomStream(owner, generator.device, (stream, number))
            if stream.depth > _DEEPEST:
                stream.state(0, skip)
    draw = stream.add(event)
    generator.manual_seed(stream.seed(draw.number))
    _tokens[_digest(generator.get_state())] = draw
    _last[generator.device] = stream
    return draw


def generator_of(device: torch.device) -> torch.Generator:
    """Returns the generator that operators on a device draw from."""
    if device.type == "cuda":
        torch.cuda.init()
        index = cast("int | None", device.index)  # torch says that it is never None
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    return torch.default_generator


def _digest(state: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(_bytes(state))


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


# --- Replay ----------------------------------------------------------------------------------------------------------


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
    """Lets threads make deferred tensors real one after the other, so that all get the same."""
    with _lock:
        yield


@contextmanager
def _alone() -> Generator[None]:
    """Keeps modes, transforms, autocast and gradients of the caller away from the operators."""
    with _lock, modes.put_aside(entirely=True), DisableAutocast(), torch.inference_mode(False), torch.no_grad():
        yield


class Replay:
    """One replay: real storages for marks, each given as a tensor over it."""

    def __init__(self) -> None:
        self._made: dict[Mark, torch.Tensor] = {}

    def run(self, wanted: Sequence[tuple[Mark, int]], user: Event | None = None) -> dict[Mark, torch.Tensor]:
        """Returns tensors over real storages of these marks, each as it is at a moment.

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
        args, options = event.arguments(self.tensor_of)
        result = _run(event, args, options)
        if event.made:
            found = list(tensors_in((result,)))
            for number, ref in event.made:
                self._made[ref.mark] = _laid_out(found[number], ref)
        return result

    def tensor_of(self, ref: TensorRef) -> torch.Tensor:
        """Returns the tensor over the real storage that a ref means."""
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
    if (found.stride(), found.storage_offset()) == (ref.stride, ref.offset) and not is_view(found):
        return found
    made = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device=found.device)
    if ref.offset:
        room = torch.empty(ref.offset + made.untyped_storage().nbytes() // made.itemsize, dtype=ref.dtype)
        made = room.to(found.device).as_strided(ref.size, ref.stride, ref.offset)
    return made.copy_(found)


# --- Replay of random numbers ----------------------------------------------------------------------------------------


def _run(event: Event, args: list[Any], options: dict[str, Any]) -> Any:
    """Runs an event's operator, with the random numbers that are its own."""
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
    if any(one.name == "generator" for one in schema_of(event.operator).arguments):
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
            args, options = event.arguments(replay.tensor_of)
        return _run_from(event, args, options, state, event.draw.stream.device)[1]


def _scratch(ref: TensorRef) -> torch.Tensor:
    return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device=ref.mark.device)


# --- Recording -------------------------------------------------------------------------------------------------------


class Recording:
    """Recorder (see `memstore.fake`) that keeps what it hears in the pasts of the tensors' storages.

    Attributes:
        streams: how many streams of random numbers it has begun.
    """

    def __init__(self) -> None:
        self.streams = 0

    def new_history(self) -> Past:
        return Past()

    def begin(self, operator: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Event:
        event = Event(operator, args, options)
        if kind_of(operator).random:
            event.draw = next_draw(self, _generator(args, options), event, skip)
        return event

    def commit(self, event: Event, made: Sequence[tuple[int, TensorRef]], written: Sequence[Mark]) -> None:
        event.made = tuple(made)
        event.keep()
        pasts = [mark.history for mark in written if isinstance(mark.history, Past)]
        if any(past.is_over for past in pasts):
            raise UnsupportedValueError(
                f"{event.operator} would write a deferred tensor that was materialized before: write into what "
                "materialize_tensor returned"
            )
        for past in pasts:
            past.writes += 1
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

    def values(self, ref: TensorRef) -> torch.Tensor:
        return values_of(ref)


def _generator(args: Sequence[Any], options: Mapping[str, Any]) -> torch.Generator:
    """Returns the generator that an operator with these arguments draws from."""
    given = options.get("generator")
    if given is not None:
        return given
    device = options.get("device")
    if device is None:
        refs = list(those_in((*args, *options.values()), TensorRef))
        devices = [one.device for one in args if isinstance(one, torch.Tensor)]
        device = refs[0].mark.device if refs else next(iter(devices), torch.device("cpu"))
    with modes.put_aside():
        return generator_of(device)
