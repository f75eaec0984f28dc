"""Histories for tests of their checker: of a store that does one operation at a time, spoilt ones, and slow answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from tests.support.history import UNKNOWN, Operation


class Key(NamedTuple):
    """As a store has it."""

    value: int | str | None = None
    version: int = 0
    last: int = 0  # the highest version given
    sure: tuple[int | str | None, int] = (None, 0)  # value and version, after the last change that was acknowledged


@st.composite
def good_histories(draw: st.DrawFn, most: int = 8) -> list[Operation]:
    """Each operation happens at a moment, one after the other; clients see it start before and end after that."""
    key = Key()
    operations: list[Operation] = []
    for number in range(draw(st.integers(1, most))):
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        one, key = draw(_operations(key, number))
        operations.append(replace(one, start=number - before, end=min(one.end, number + after)))
    for number in range(draw(st.integers(0, 2))):  # these never happened
        start, is_put = draw(st.integers(0, most)), draw(st.booleans())
        lost = Operation("put" if is_put else "delete", "key", start, UNKNOWN, value=-number - 1 if is_put else None)
        operations.append(lost)
    return draw(st.permutations(operations))


@st.composite
def _operations(draw: st.DrawFn, key: Key, number: int) -> tuple[Operation, Key]:
    kind = draw(st.sampled_from(["put", "get", "delete", "wait", "get", "put"]))
    known = UNKNOWN if kind in ("put", "delete") and draw(st.integers(0, 3)) == 0 else number
    found = key.version
    expected = draw(st.sampled_from([None, None, found]))
    if kind == "put":
        version = key.last + draw(st.integers(1, 2))
        told = draw(st.sampled_from([version, version, None])) if known != UNKNOWN else None
        after = Key(number, version, version)
        return Operation("put", "key", number, known, value=number, version=told, expect_version=expected), after
    if kind == "delete" and found:
        return Operation("delete", "key", number, known, expect_version=expected), Key(last=key.last)
    if kind == "wait":
        newer_than = draw(st.integers(0, found + 1))
        told = found if found > newer_than else None
        return Operation("wait", "key", number, number, version=told, newer_than=newer_than), key
    if kind == "delete" or not found:
        return Operation("get" if kind == "get" else "delete", "key", number, number, version=0), key
    told, value = draw(st.sampled_from([(found, key.value), (found, None), (None, key.value)]))
    return Operation("get", "key", number, number, value=value, version=told), key


@st.composite
def spoilt_histories(draw: st.DrawFn, most: int = 5) -> list[Operation]:
    """Good ones, of which some operations tell something else; many are good still."""
    operations = draw(good_histories(most))
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(operations) - 1))
        operations[place] = draw(_spoilt(operations[place]))
    return operations


@st.composite
def _spoilt(draw: st.DrawFn, one: Operation) -> Operation:
    number = draw(st.integers(0, 6))
    what = draw(st.sampled_from(["times", "outcome", "version", "value"]))
    if what == "times":
        start, end = sorted((number, draw(st.integers(0, 6))))
        return replace(one, start=start, end=end if one.end != UNKNOWN else UNKNOWN)
    if one.end == UNKNOWN:
        return replace(one, end=max(number, one.start))
    if what == "outcome" and one.changes:
        return replace(one, end=UNKNOWN, version=None)
    if what == "version" or one.kind != "get":
        least = {"put": 1, "wait": one.newer_than + 1}.get(one.kind, 0)
        return replace(one, version=0 if one.kind == "delete" else max(number, least))
    return replace(one, value=number, version=None)


def has_an_order(operations: Sequence[Operation]) -> bool:
    """Tries all orders: slow, and plain to see that it is right."""
    named = sorted({version or 0 for one in operations for version in (one.version, one.expect_version)})

    def goes_on(left: frozenset[int], key: Key) -> bool:
        ends = [operations[number].end for number in left]
        if all(end == UNKNOWN for end in ends):
            return True
        return any(
            goes_on(left - {number}, after)
            for number in left
            if operations[number].start <= min(ends)
            for after in _happening(operations[number], key, named)
        )

    return goes_on(frozenset(range(len(operations))), Key())


def _happening(one: Operation, key: Key, named: Sequence[int]) -> Iterator[Key]:
    """How the key may stand after it."""
    if one.expect_version is not None and one.changes and one.expect_version != key.version:
        return
    if one.kind == "put":
        given = [one.version] if one.version is not None else [key.last + 1, *named]
        for version in given:
            if version > key.last:
                sure = (one.value, version) if one.end != UNKNOWN else key.sure
                yield Key(one.value, version, version, sure)
    elif one.kind == "delete":
        if (one.version == 0) == (key.version == 0):
            yield Key(last=key.last, sure=(None, 0) if one.end != UNKNOWN else key.sure)
    elif one.kind == "loss":
        is_undone = one.undoes and key.sure != (key.value, key.version)
        if one.end != UNKNOWN:
            yield key._replace(sure=(key.value, key.version))
        if is_undone or key.value in one.lost:
            yield Key(last=key.last)
        if is_undone and key.sure[0] is not None and key.sure[0] not in one.lost:
            yield Key(*key.sure, key.last, key.sure)
    elif one.kind == "wait":
        if one.version == key.version > one.newer_than or (one.version is None and key.version <= one.newer_than):
            yield key
    elif one.version in (None, key.version) and one.value in (None, key.value):
        yield key
