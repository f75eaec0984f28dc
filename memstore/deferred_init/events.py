"""Events: what was done with the storages of deferred tensors, in the order in which it was done.

An event is an operator that made storages or wrote some. What only shows a storage in another way (a view, a Parameter,
`.data`) needs none: a tensor is what it shows of its storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from memstore.deferred_init.constants import Constant
from memstore.deferred_init.randomness import Draw
from memstore.errors import UnsupportedValueError
from memstore.fake import Mark, Recorder, Ref, kind_of

T = TypeVar("T")

_moments = itertools.count()
_lift: Any = torch.ops.aten.clone.default


def now() -> int:
    """A moment behind all events that there are."""
    return next(_moments)


class Event:
    """An operator and its arguments.

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
        self.inputs = [ref.mark for ref in those_in((*self.args, *self.options.values()), Ref)]
        self.made: Sequence[tuple[int, Ref]] = ()
        self.moment: int | None = None
        self.draw: Draw | None = None
        self.default_dtype = torch.get_default_dtype()

    def keep(self) -> None:
        """It is recorded: real tensors that it was given stay what they are now."""
        for one in those_in((*self.args, *self.options.values()), Constant):
            one.keep()

    @property
    def is_random(self) -> bool:
        return kind_of(self.operator).random

    def arguments(self, tensor_of: Callable[[Ref], torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The operator's arguments, with tensors for refs and constants."""

        options = {name: _given(one, self.operator, tensor_of) for name, one in self.options.items()}
        return [_given(one, self.operator, tensor_of) for one in self.args], options


class Past:
    """What was done with one storage: the history of its mark.

    Args:
        begin: makes a recorder.

    Attributes:
        events: those that made and wrote it, in order.
        is_over: it was materialized, so it must not be written any more.
        writes: how often it was written.
    """

    __slots__ = ("_begin", "events", "is_over", "writes")

    def __init__(self, begin: Callable[[], Recorder]) -> None:
        self.events: list[Event] = []
        self.is_over = False
        self.writes = 0
        self._begin = begin

    def recorder(self) -> Recorder:
        return self._begin()


def those_in(values: Sequence[Any], kind: type[T]) -> Iterator[T]:
    """What is of this kind among values, and in the lists and tuples among them."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif type(value) is list or type(value) is tuple:
            yield from those_in(value, kind)  # pyright: ignore[reportUnknownArgumentType]


def needed(wanted: Sequence[tuple[Mark, int]], user: Event | None = None) -> list[Event]:
    """The events on which storages depend, each as it is at a moment; in order.

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


def _given(value: Any, operator: Any, tensor_of: Callable[[Ref], torch.Tensor]) -> Any:
    if isinstance(value, Ref):
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
