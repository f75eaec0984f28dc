"""Histories: what the clients of a store did and found, and whether one store could have answered so.

::

    recorder = Recorder("history/client-3.jsonl")       # in each client, a file of its own
    with recorder.put("key", 42) as outcome:            # each put has a value that no other has
        outcome.version = store.put("key", torch.full((1000,), 42))
    with recorder.get("key") as outcome:
        outcome.value = the_one_value_of(store.get("key"))

    check(read_history(Path("history").iterdir()))      # afterwards; raises NotLinearizableError

A store is linearizable a key: each operation seems to happen at one moment between its start and its end, once. An
operation whose outcome is not known (its client was killed, or got `UnknownOutcomeError`) happens at one moment after
its start, or never.

A *loss* stands for the death of a host, as far as promise P8 lets it be seen: with it goes a value that lay there, and
of a key that the host owned a change that nobody has acknowledged.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from memstore.errors import (
    KeyNotFoundError,
    MemstoreError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)

# --- Operations ------------------------------------------------------------------------------------------------------


Kind = Literal["put", "get", "delete", "wait", "loss"]
UNKNOWN = float("inf")  # an end: the operation may have happened, or may happen yet


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on one key, and what came of it.

    Attributes:
        kind: a "get" is whatever tells of a value, a version, or that there is none; a "put" or "delete" that was
            refused for its `expect_version` is a "get" of the version that was found.
        key: of the store.
        start: when it was called: seconds of a clock that all clients share.
        end: when it returned; UNKNOWN: it did not, or its outcome is not known.
        value: what a put put, and no other put of the key; what a get found; None: not looked at.
        version: given to a put; found by a get or wait, where 0 means no such key; 0 of a delete: there was nothing.
            None: not told; of a wait that ended: nothing newer came.
        expect_version: of puts and deletes, as in `Store.put`; 0: no such key.
        newer_than: of waits.
        client: who did it, for messages.
        lost: of a loss: the values that may be gone. With the end UNKNOWN it may not be seen at all.
        undoes: of a loss: changes that were not acknowledged may be undone.
    """

    kind: Kind
    key: str
    start: float
    end: float
    value: int | str | None = None
    version: int | None = None
    expect_version: int | None = None
    newer_than: int = 0
    client: str = ""
    lost: tuple[int | str, ...] = ()
    undoes: bool = False

    @property
    def is_known(self) -> bool:
        return self.end != UNKNOWN

    @property
    def changes(self) -> bool:
        """Whether it changes the key, where it happens."""
        return self.kind in ("put", "loss") or (self.kind == "delete" and self.version != 0)

    def __str__(self) -> str:
        told = [
            f"{name} {value!r}"
            for name, value in (("value", self.value), ("version", self.version))
            if value is not None
        ]
        if self.expect_version is not None:
            told.append(f"expecting version {self.expect_version}")
        if self.kind == "wait":
            told.append(f"newer than {self.newer_than}")
        who = f"{self.kind} {self.key!r} by {self.client or 'a client'}"
        end = f"to {self.end:.6f}" if self.is_known else "with an unknown outcome"
        return f"{who} from {self.start:.6f} {end}: {', '.join(told) or 'done'}"


# --- Record ----------------------------------------------------------------------------------------------------------
# Operations, written to a file as they start and as they end: a client that is killed leaves one that never ended.


@dataclass(slots=True)
class Outcome:
    """What came of an operation. Set its attributes in the `with` of the recorder.

    Attributes:
        value: as `Operation` has it.
        version: as `Operation` has it.
    """

    value: int | str | None = None
    version: int | None = None


class Recorder:
    """Records what one client does. Not thread-safe: each thread is a client.

    Each method is a context manager: make the call in its `with`, and set what came of it in the `Outcome` that the
    `with` gives. An error that is raised in the `with` is passed on, and says what became of the operation. After an
    UnknownOutcomeError, or an error that isn't memstore's, it may have happened. KeyNotFoundError and
    VersionConflictError say what they found. After any other error of memstore nothing happened.

    Args:
        path: a new file of this client's.
        client: its name in messages; else the file's.
        clock: seconds, the same for all clients: by default the machine's, since its start, also on hosts of tests.
    """

    def __init__(
        self, path: str | os.PathLike[str], client: str | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._clock = clock
        self._count = 0
        self._client = client or Path(path).stem

    @contextmanager
    def put(self, key: str, value: int | str, *, expect_version: int | None = None) -> Generator[Outcome]:
        """Records a put. `value` stands for what is put: no other put of the key has it. Set `version`."""
        with self._record("put", key, value=value, expect_version=expect_version) as outcome:
            yield outcome

    @contextmanager
    def get(self, key: str) -> Generator[Outcome]:
        """Records a get. Set `value`, `version`, or both; set `version` to 0 if the key doesn't exist."""
        with self._record("get", key) as outcome:
            yield outcome

    @contextmanager
    def delete(self, key: str, *, expect_version: int | None = None) -> Generator[Outcome]:
        """Records a delete. Set nothing; set `version` to 0 if the key didn't exist and the call raised no error."""
        with self._record("delete", key, expect_version=expect_version) as outcome:
            yield outcome

    @contextmanager
    def wait(self, key: str, *, newer_than: int = 0) -> Generator[Outcome]:
        """Records a wait. Set `version`. A StoreTimeoutError says that for a moment there was nothing newer."""
        with self._record("wait", key, newer_than=newer_than) as outcome:
            yield outcome

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _record(self, kind: Kind, key: str, **fields: Any) -> Generator[Outcome]:
        number = self._count = self._count + 1
        told = {name: value for name, value in fields.items() if value is not None}
        self._write(
            {"number": number, "client": self._client, "kind": kind, "key": key, "start": self._clock(), **told}
        )
        outcome = Outcome()
        try:
            yield outcome
        except KeyNotFoundError:
            self._end(number, {"version": 0} if kind != "put" else {"failed": True})
            raise
        except VersionConflictError as error:
            self._end(number, {"kind": "get", "version": error.found, "value": None, "expect_version": None})
            raise
        except UnknownOutcomeError:
            raise
        except StoreTimeoutError:
            self._end(number, {} if kind == "wait" else {"failed": True})
            raise
        except MemstoreError:
            self._end(number, {"failed": True})
            raise
        filled = {"version": outcome.version, "value": outcome.value}
        self._end(number, {name: value for name, value in filled.items() if value is not None})

    def _end(self, number: int, outcome: dict[str, Any]) -> None:
        self._write({"number": number, "end": self._clock(), **outcome})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")  # whole, or not at all


def read_history(paths: Iterable[str | os.PathLike[str]]) -> list[Operation]:
    """The operations of all clients, but for those that failed.

    Raises:
        ValueError: a file is no recorder's.
    """
    return [operation for path in paths for operation in _read(Path(path))]


def _read(path: Path) -> list[Operation]:
    found: dict[int, dict[str, Any]] = {}
    try:
        for line in msgspec.json.Decoder(dict[str, Any]).decode_lines(path.read_bytes()):
            found.setdefault(line.pop("number"), {"end": UNKNOWN}).update(line)
        happened = [fields for fields in found.values() if not fields.pop("failed", False)]
        return msgspec.convert(happened, list[Operation])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by a Recorder: {error}") from error


# --- Check -----------------------------------------------------------------------------------------------------------


class NotLinearizableError(AssertionError):
    """No store that does one operation at a time could have answered so. The message names an operation."""


def check(history: Iterable[Operation]) -> None:
    """Checks a history, a key at a time.

    Args:
        history: operations in any order. Those that failed, and so did not happen, are not in it.

    Raises:
        NotLinearizableError: a value was never put, is torn, old, lost or back again; or a version went back.
        ValueError: two puts of a key have one value, so that nobody can tell which one was read; or an operation ends
            before it starts.
    """
    keys: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in history:
        if operation.end < operation.start:
            raise ValueError(f"it ends before it starts: {operation}")
        keys[operation.key].append(operation)
    for operations in keys.values():
        # A read whose outcome isn't known tells nothing.
        told = [one for one in operations if one.is_known or one.changes]
        _check_key(told)


def _check_key(operations: Sequence[Operation]) -> None:
    putting = _puts_by_value(operations)
    versions = _versions_of_values(operations, putting)
    for operation in operations:
        _check_alone(operation, putting, versions)
    search = Search(operations, versions)
    if not search.succeeds():
        raise NotLinearizableError(search.explain())


def _puts_by_value(operations: Iterable[Operation]) -> dict[int | str, Operation]:
    found: dict[int | str, Operation] = {}
    for operation in operations:
        if operation.kind != "put":
            continue
        if operation.value is None or operation.value in found:
            raise ValueError(f"each put of a key needs a value that no other has: {operation}")
        found[operation.value] = operation
    return found


def _versions_of_values(operations: Iterable[Operation], putting: dict[int | str, Operation]) -> dict[int | str, int]:
    """The versions of values, by the puts that gave them or the gets that found both. Each is another."""
    versions: dict[int | str, int] = {}
    values: dict[int, int | str] = {}
    for operation in operations:
        value, version = operation.value, operation.version
        if value is None or not version or value not in putting:
            continue
        if versions.setdefault(value, version) != version or values.setdefault(version, value) != value:
            others = f"value {value!r} is version {versions[value]}, version {version} is value {values.get(version)!r}"
            raise NotLinearizableError(f"{operation}; but {others}")
    return versions


def _check_alone(operation: Operation, putting: dict[int | str, Operation], versions: dict[int | str, int]) -> None:
    if operation.kind == "get" and operation.value is not None:
        put = putting.get(operation.value)
        if put is None or operation.version == 0:
            raise NotLinearizableError(f"a value that was never put, or whose put failed: {operation}")
        if put.start > operation.end:
            raise NotLinearizableError(f"{operation}; but it was put later: {put}")
    if operation.kind in ("get", "wait") and operation.value is None and operation.version:
        may_be = any(put.version is None and value not in versions for value, put in putting.items())
        if operation.version not in versions.values() and not may_be:
            raise NotLinearizableError(f"a version that no put was given: {operation}")
    if operation.kind == "wait" and operation.version is not None and operation.version <= operation.newer_than:
        raise NotLinearizableError(f"a wait that found what is not newer: {operation}")


# --- Search ----------------------------------------------------------------------------------------------------------
# The search for the moments at which the operations on one key happened: an order in which each could be answered so.
#
# After Wing and Gong, and Lowe: from the start on, one of those operations happens next that started before the first
# end of those left. What has happened, and how the key stands, is a state; none is visited twice. Four rules keep them
# few:
#
# 1. A read that is answered right happens at once: it changes nothing.
# 2. Puts whose versions are known happen in the order of their versions.
# 3. Of deletes that differ only in their times, the one that ends first happens first.
# 4. What is not known to have happened does so right before an operation that shows it, or never.


_ABSENT, _UNTOLD, _OLD = -1, -2, -3  # what a read shows, where it isn't the value of a put known by its index
_MOST_STATES = 2_000_000


class _State(NamedTuple):
    done: int  # a bit for each operation
    present: int  # the put whose value the key has, or _ABSENT
    least: int  # the version of the key is this one or a later one; where it is absent: the last that it had
    most: float  # and not a later one than this
    ordered: int  # how many of the puts with known versions are done
    sure: int  # as `present`, after the last change that was acknowledged


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
        self._lost = [frozenset(puts[value] for value in one.lost if value in puts) for one in self._operations]
        self._furthest = _State(0, _ABSENT, 0, 0, 0, _ABSENT)

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
                elif one.kind == "loss":
                    yield from self._lose(number, bound._replace(done=done))
                elif one.kind == "delete" and one.changes:
                    sure = _ABSENT if one.is_known else bound.sure
                    yield number, bound._replace(done=done, present=_ABSENT, most=bound.least, sure=sure)
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
            elif one.kind == "loss":
                if is_known or (wants_absence and state.present in self._lost[number]):
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
            if one.kind in ("put", "loss") or is_present:
                yield state
        elif expected == 0:
            if not is_present:
                yield state
        elif is_present and state.least <= expected <= state.most:
            yield state._replace(least=expected, most=expected)

    def _put(self, number: int, state: _State) -> Iterator[tuple[int, _State]]:
        version = self._versions.get(number)
        sure = number if number < self._known else state.sure
        if version is None:
            yield number, state._replace(present=number, least=state.least + 1, most=float("inf"), sure=sure)
        elif number == self._in_order[state.ordered] and version > state.least:
            yield number, _State(state.done, number, version, version, state.ordered + 1, sure)

    def _lose(self, number: int, state: _State) -> Iterator[tuple[int, _State]]:
        """The ways in which a key may stand afterwards: as before, without its value, or as it was acknowledged."""
        one = self._operations[number]
        if one.is_known:
            yield number, state._replace(sure=state.present)
        if state.present in self._lost[number] or (one.undoes and state.present != state.sure):
            yield number, state._replace(present=_ABSENT, most=state.least, sure=_ABSENT)
        if one.undoes and state.present != state.sure and state.sure not in (_ABSENT, *self._lost[number]):
            least = self._versions.get(state.sure, 0)
            most = least or float("inf")
            yield number, state._replace(present=state.sure, least=least, most=most)
