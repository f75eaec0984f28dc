"""Explores all states of a model, breadth first, so that the way to the first fault found is the shortest.

A model is a state (hashable) and a function that gives its successors, each with the name of the step that leads there.
It raises `Fault` where a step does what must never happen; so does the check of a state.

::

    found = explore(0, lambda n: [("add", n + 1), ("double", 2 * n)] if n < 9 else [], check, is_end=lambda n: n >= 9)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

State = TypeVar("State", bound=Hashable)
Item = TypeVar("Item")


class Fault(Exception):
    """Something happened that must never happen.

    Attributes:
        what: what happened.
        steps: the names of the steps that lead there.
    """

    def __init__(self, what: str, steps: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.what, self.steps = what, steps

    def __str__(self) -> str:
        return "\n  ".join([self.what, *self.steps])


def with_(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    """Returns a tuple with another item in one place, as a step of a model needs it."""
    return (*items[:index], item, *items[index + 1 :])


def is_bad_luck(name: str) -> bool:
    """Returns whether a step's name stands in parentheses: for models whose deaths and failures have such names."""
    return name.startswith("(")


@dataclass(frozen=True)
class Explored:
    """What was visited. Made by `explore`.

    Attributes:
        states: how many states there are.
        steps: how many steps lead from one of them to another.
        names: the names of the steps that were taken.
    """

    states: int
    steps: int
    names: frozenset[str]


def explore(
    start: State,
    successors: Callable[[State], Iterable[tuple[str, State]]],
    check: Callable[[State], None],
    *,
    is_end: Callable[[State], bool],
    is_bad_luck: Callable[[str], bool] = lambda name: False,
    limit: int = 10_000_000,
) -> Explored:
    """Visits every state that can be reached from `start`.

    Args:
        start: the first state.
        successors: the states that one step leads to from a state, each with the name of the step.
        check: called with each state; raises `Fault` for one that must never be.
        is_end: whether the model may stop in a state.
        is_bad_luck: whether a step of this name may be taken, but must not be needed to reach an end.
        limit: the most states that are visited.

    Returns:
        How many states and steps there are.

    Raises:
        Fault: a check or a step raised it; or from a state no end can be reached any more.
        MemoryError: there are more than `limit` states.
    """
    numbers: dict[State, int] = {start: 0}
    states = [start]
    came: list[tuple[int, str]] = [(0, "")]
    before: list[list[int]] = [[]]  # the states from which each is reached
    ends: list[int] = []
    names: set[str] = set()
    steps = 0
    for number, state in enumerate(states):  # it grows meanwhile
        try:
            check(state)
            following = list(successors(state))
        except Fault as fault:
            raise Fault(fault.what, (*_way(came, number), *fault.steps)) from None
        if is_end(state):
            ends.append(number)
        for name, following_state in following:
            steps += 1
            names.add(name)
            found = numbers.get(following_state)
            if found is None:
                found = numbers[following_state] = len(states)
                if found >= limit:
                    raise MemoryError(f"more than {limit:,} states")
                states.append(following_state)
                came.append((number, name))
                before.append([])
            if not is_bad_luck(name):
                before[found].append(number)
    _check_progress(came, before, ends)
    return Explored(len(states), steps, frozenset(names))


def _check_progress(came: list[tuple[int, str]], before: list[list[int]], ends: list[int]) -> None:
    reaching, waiting = set(ends), list(ends)
    while waiting:
        for number in before[waiting.pop()]:
            if number not in reaching:
                reaching.add(number)
                waiting.append(number)
    for number in range(len(came)):
        if number not in reaching:
            raise Fault("no way on: from here no end can be reached", _way(came, number))


def _way(came: list[tuple[int, str]], number: int) -> tuple[str, ...]:
    names: list[str] = []
    while number:
        number, name = came[number]
        names.append(name)
    return tuple(reversed(names))
