"""The search for the moments at which the operations on one key happened: an order in which each could be answered so.

After Wing and Gong, and Lowe: from the start on, one of those operations happens next that started before the first end
of those left. What has happened, and how the key stands, is a state; none is visited twice. Four rules keep them few:

1. A read that is answered right happens at once: it changes nothing.
2. Puts whose versions are known happen in the order of their versions.
3. Of deletes that differ only in their times, the one that ends first happens first.
4. What is not known to have happened does so right before an operation that shows it, or never.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from memstore.testing.history.operation import Operation

_ABSENT, _UNTOLD, _OLD = -1, -2, -3  # what a read shows, where it isn't the value of a put known by its index
_MOST_STATES = 2_000_000


class _State(NamedTuple):
    done: int  # a bit for each operation
    present: int  # the put whose value the key has, or _ABSENT
    least: int  # the version of the key is this one or a later one; where it is absent: the last that it had
    most: float  # and not a later one than this
    ordered: int  # how many of the puts with known versions are done


class Search:
    """Over the operations on one key.

    Args:
        operations: those that are known, and those changes whose outcome is not.
        versions: of values, where known.
    """

    def __init__(self, operations: Sequence[Operation], versions: Mapping[int | str, int]) -> None:
        known = sorted((one for one in operations if one.is_known), key=lambda one: one.start)
        unknown = sorted((one for one in operations if not one.is_known), key=lambda one: one.start)
        self._operations = [*known, *unknown]
        self._known = len(known)
        puts = {one.value: number for number, one in enumerate(self._operations) if one.kind == "put"}
        self._versions = {puts[value]: version for value, version in versions.items()}
        self._in_order = sorted(self._versions, key=lambda number: self._versions[number])
        by_version = {version: number for number, version in self._versions.items()}
        self._shows = [self._shown_by(one, puts, by_version) for one in self._operations]
        self._observed = set(self._shows)
        self._furthest = _State(0, _ABSENT, 0, 0, 0)

    def succeeds(self) -> bool:
        waiting = [self._furthest]
        seen = set(waiting)
        while waiting:
            state = self._read_all(waiting.pop())
            if state.done.bit_count() > self._furthest.done.bit_count():
                self._furthest = state
            if self._lowest_left(state.done) >= self._known:
                return True
            steps = sorted(self._steps(state), key=lambda step: -self._operations[step[0]].end)  # the last is the next
            for _, following in steps:
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
            if len(seen) > _MOST_STATES:
                raise MemoryError(f"more than {_MOST_STATES:,} states; {self.explain()}")
        return False

    def explain(self) -> str:
        """Names an operation for which no place was found, and how the key stands where it would be due."""
        state = self._furthest
        left = [number for number in range(self._known) if not state.done >> number & 1]
        due = self._operations[min(left, key=lambda number: self._operations[number].end)]
        stands = "there is no such key" if state.present == _ABSENT else str(self._operations[state.present])
        return f"no moment fits {due}; the furthest that others lead to is: {stands}"

    def _shown_by(self, one: Operation, puts: Mapping[int | str | None, int], by_version: Mapping[int, int]) -> int:
        if one.changes:
            return _UNTOLD
        if one.value is not None:
            return puts[one.value]
        if one.version is None:
            return _OLD if one.kind == "wait" else _UNTOLD
        return by_version.get(one.version, _UNTOLD) if one.version else _ABSENT

    def _lowest_left(self, done: int) -> int:
        return (~done & (done + 1)).bit_length() - 1

    def _candidates(self, done: int) -> list[int]:
        """Those left that started before the first end among them."""
        first_end = float("inf")
        found: list[int] = []
        for number in range(self._lowest_left(done), self._known):
            one = self._operations[number]
            if one.start > first_end:
                break
            if not done >> number & 1:
                first_end = min(first_end, one.end)
                found.append(number)
        found.extend(number for number in range(self._known, len(self._operations)) if not done >> number & 1)
        return [number for number in found if self._operations[number].start <= first_end]

    # --- Reads --------------------------------------------------------------------------------------------------------

    def _read_all(self, state: _State) -> _State:
        while fitting := [number for number in self._candidates(state.done) if self._fits(number, state)]:
            for number in fitting:
                state = state._replace(done=state.done | 1 << number)
        return state

    def _fits(self, number: int, state: _State) -> bool:
        one, shown = self._operations[number], self._shows[number]
        if one.changes:
            return False
        if shown == _OLD:
            return state.present == _ABSENT or state.most <= one.newer_than
        if shown == _UNTOLD:
            return one.version is None or (state.present != _ABSENT and state.least == state.most == one.version)
        return shown == state.present

    # --- Changes ------------------------------------------------------------------------------------------------------

    def _steps(self, state: _State) -> Iterator[tuple[int, _State]]:
        candidates = self._candidates(state.done)
        for number in self._worth_trying(candidates, state):
            one = self._operations[number]
            for bound in self._as_expected(one, state):
                done = bound.done | 1 << number
                if one.kind == "put":
                    yield from self._put(number, bound._replace(done=done))
                elif one.kind == "delete" and one.changes:
                    yield number, bound._replace(done=done, present=_ABSENT, most=bound.least)
                else:  # a read that tells of the version of a put that did not
                    yield number, bound._replace(done=done)

    def _worth_trying(self, candidates: Sequence[int], state: _State) -> list[int]:
        every = [self._operations[number] for number in candidates]
        wanted = {self._shows[number] for number in candidates if not self._operations[number].changes}
        expected = {one.expect_version for one in every if one.changes}
        wants_absence = bool(wanted & {_ABSENT, _OLD}) or 0 in expected
        wants_version = _UNTOLD in wanted or bool(expected - {0, None})
        wants_presence = state.present == _ABSENT and any(one.kind == "delete" and one.changes for one in every)
        found: list[int] = []
        alike: dict[tuple[object, ...], int] = {}
        for number, one in zip(candidates, every, strict=True):
            is_known = number < self._known
            if not one.changes:
                if self._shows[number] in (_UNTOLD, _OLD):
                    found.append(number)
            elif one.kind == "delete":
                if is_known or wants_absence:
                    group = ("delete", is_known, one.expect_version)
                    alike[group] = min(number, alike.get(group, number), key=lambda each: self._operations[each].end)
            elif is_known or number in self._versions or number in wanted or wants_version:
                found.append(number)
            elif wants_presence and number not in self._observed:
                alike.setdefault(("put", one.expect_version), number)
        return [*found, *alike.values()]

    def _as_expected(self, one: Operation, state: _State) -> Iterator[_State]:
        """The state, if the key is as `one` needs it; with what `one` tells of its version."""
        expected = one.expect_version if one.changes else one.version
        is_present = state.present != _ABSENT
        if expected is None and not one.changes:
            if state.least <= one.newer_than:
                yield state._replace(most=min(state.most, one.newer_than))
        elif expected is None:
            if one.kind == "put" or is_present:
                yield state
        elif expected == 0:
            if not is_present:
                yield state
        elif is_present and state.least <= expected <= state.most:
            yield state._replace(least=expected, most=expected)

    def _put(self, number: int, state: _State) -> Iterator[tuple[int, _State]]:
        version = self._versions.get(number)
        if version is None:
            yield number, state._replace(present=number, least=state.least + 1, most=float("inf"))
        elif number == self._in_order[state.ordered] and version > state.least:
            yield number, _State(state.done, number, version, version, state.ordered + 1)
