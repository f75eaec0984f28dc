"""Attempts: sharded puts, whose parts become one version at one moment, or never. Decision 012 has the rules.

The rules stand here once, over the rows of one transaction (`AttemptRows`), and whoever has the rows calls them: a
store that nobody serves by `TransactionRows`, in a hold of its mutex; in a cluster the owner of the key, in the
transactions of memstore/distributed/rules/sharded.py. How a rank waits and asks differs, and stands there and in
`sharded_put.py`.

1. *Prepare* (`take_in`): a rank fills a segment as in any put. Then, in one transaction, its row becomes *prepared*,
   and a row of `pending` keeps it from now on, so that the rank may exit. A kill before leaves what a put leaves; after
   it, a part that waits for the others until its time is over.
2. *Publish* (`parts_to_publish`, then the commit, then `settle`): who finds all parts there merges them outside of any
   transaction. The one that makes the version looks first: the attempt must have no outcome, and its parts must be
   those that were merged. Their rows go, and the version becomes the outcome. Here the commit is steps 4 and 5 of a put
   (`put.py`), and a kill before it leaves headers that say live: the mutex's next owner puts them back, since rows of
   `pending` still name the segments (`recovery.py`).
3. *Give up* (`give_up`): a timeout, an error of a rank, or `abort` ends an attempt, unless it has an outcome: its
   segments are retired, and the error becomes its outcome. So what raised never publishes later.
4. *Expire* (`expire`): what is over is ended in the same way, by whoever prepares or sweeps next. Who waits puts that
   off (`renew`).

Whatever completes, publishes or ends an attempt counts as a publication and rings the key's doorbell, so that a death
right after the commit is made up for as after a put. What became of an attempt is kept (`AttemptOutcome`): the version
that it is, or the error that every rank of it gets.

Below the rules are the holds of steps 3 and 4, which sweeps and recoveries take too; `sharded_put.py` has 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import (
    AttemptOutcome,
    Counters,
    Failure,
    FailureDetails,
    Now,
    PendingPart,
    Place,
    Transaction,
)
from memstore.engine.files.segments import ClaimedFile, SealedSegment
from memstore.engine.format.records import PREPARED, RETIRED, SegmentRow
from memstore.engine.protocols.change import Content, MembershipChanged, missing
from memstore.engine.protocols.reuse import retire
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import Refusal, boot_clock, boot_id
from memstore.errors import (
    KeyNotFoundError,
    MutableEntryError,
    PartialCommitError,
    ShardMismatchError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)

Result = TypeVar("Result")

Merge = Callable[[Sequence[PendingPart], Sequence[bytes]], Content]
"""Makes one value of an attempt's parts, which are given by rank, and of what they say. Its ShardMismatchError or
PartialCommitError ends the attempt.
"""


class Participant(NamedTuple):
    """A rank's place in an attempt.

    Attributes:
        waits: seconds that its part waits for the others.
        number: of the attempt, once the rank's part is there; 0 before. It tells attempts of one name apart.
        owner: of a store on several hosts, the member that has the rank's part; empty: none has, or this one.
    """

    key: bytes
    attempt: str
    rank: int
    world_size: int
    waits: float
    number: int = 0
    owner: bytes = b""


# --- the rules --------------------------------------------------------------------------------------------------------


SHORTEST_MEMORY = 60_000_000_000  # nanoseconds that an outcome is kept for ranks that ask late
_DROPPED = 16  # outcomes that a prepare looks at: each attempt leaves one, so more go than come
FORGOTTEN = "nothing is known of it any more: this rank looked later than its lease, or its rows were repaired since"


class AttemptRows(Protocol):
    """The parts of sharded puts and what became of them, in one transaction. Times are those of `now`."""

    def now(self) -> int: ...  # nanoseconds of this host's clock since boot
    def new_number(self) -> int: ...  # that no put, session or attempt of this host has
    def parts(self, key: bytes | None = None, attempt: str | None = None) -> list[PendingPart]: ...  # by rank
    def put_part(self, part: PendingPart, content: bytes | None) -> None: ...  # None: it stays. A segment is kept by it
    def delete_part(self, part: PendingPart) -> None: ...
    def has_bytes(self, part: PendingPart) -> bool: ...  # its segment, if it lies here, was not given back
    def drop_bytes(self, part: PendingPart) -> None: ...  # nothing names its segment any more
    def outcome(self, key: bytes, attempt: str) -> AttemptOutcome | None: ...
    def put_outcome(self, outcome: AttemptOutcome) -> None: ...
    def drop_outcomes(self, limit: int) -> None: ...  # those that are over, of so many rows
    def tell(self, key: bytes) -> None: ...  # who waits for an attempt of it is to look, once this is committed


class OverAlready(Refusal):
    """Raised within a transaction that finds the outcome of its attempt."""

    def __init__(self, outcome: AttemptOutcome) -> None:
        super().__init__()
        self.outcome = outcome


class OtherParts(Refusal):
    """Raised within a transaction that finds other parts than it was to change."""


class NothingKnown(Refusal):
    """Raised within a transaction that finds neither an outcome nor a part of an attempt: its outcome was dropped."""


def find(rows: AttemptRows, key: bytes, attempt: str, number: int) -> tuple[AttemptOutcome | None, list[PendingPart]]:
    """Returns the outcome of an attempt, if it has one, or its parts by rank. `number` 0: whichever has this name."""
    outcome = rows.outcome(key, attempt)
    if outcome is not None and number in (0, outcome.number):
        return outcome, []
    return None, [part for part in rows.parts(key, attempt) if number in (0, part.number)]


def find_parts(
    rows: AttemptRows, key: bytes, attempt: str, number: int, only: Sequence[Place] | None = None
) -> list[PendingPart]:
    """Returns the parts of an attempt that isn't over. Without a number there may be none: it never began.

    Args:
        only: the places of the parts that it must have; None: whatever they are.

    Raises OverAlready, NothingKnown, OtherParts.
    """
    outcome, parts = find(rows, key, attempt, number)
    if outcome is not None:
        raise OverAlready(outcome)
    if number and not parts:
        raise NothingKnown
    if only is not None and places_of(parts) != tuple(only):
        raise OtherParts
    return parts


# Rule 1: a part comes.


def take_in(rows: AttemptRows, part: PendingPart, content: bytes) -> int | AttemptOutcome | Failure:
    """Takes in a rank's part, and ends what is over. Returns the attempt's number, or the outcome that it has already.

    A `Failure` has changed nothing of the attempt, which goes on. The number of the attempt is new with its first part,
    and its expiry is the latest that any of them asked for.
    """
    expire(rows)
    rows.drop_outcomes(_DROPPED)
    outcome, there = find(rows, part.key, part.attempt, 0)
    if outcome is not None:
        return outcome
    for other in there:
        if other.world_size != part.world_size:
            return _other_world(part, other)
    if part.segment and not rows.has_bytes(part):
        return Failure("StoreTimeoutError", f"{_name(part)}: its time was over, and its bytes have been given back")
    for other in there:
        if other.rank == part.rank:
            drop_part(rows, other)
    part = msgspec.structs.replace(
        part,
        number=there[0].number if there else rows.new_number(),
        put_id=part.put_id if part.segment else rows.new_number(),
        expires=max([rows.now() + part.waits_ns, *[other.expires for other in there]]),
    )
    rows.put_part(part, content)
    if len({part.rank, *[other.rank for other in there]}) == part.world_size:
        rows.tell(part.key)
    return part.number


def needs_renewal(part: PendingPart, now: int) -> bool:
    """Returns whether half of a part's time is over. Then its rank, if it waits, renews it."""
    return part.expires - now < part.waits_ns // 2


def renew(rows: AttemptRows, key: bytes, attempt: str, number: int, rank: int) -> None:
    """Lets the time of a rank's part begin anew."""
    for part in rows.parts(key, attempt):
        if part.rank == rank and part.number == number:
            expires = max(part.expires, rows.now() + part.waits_ns)
            rows.put_part(msgspec.structs.replace(part, expires=expires), None)


# Rule 2: all parts become a version.


def parts_to_publish(
    rows: AttemptRows, key: bytes, attempt: str, number: int, merged: Sequence[Place]
) -> list[PendingPart]:
    """Returns the parts of an attempt, if they are those that were merged, and all of them.

    Raises OverAlready, NothingKnown, OtherParts.
    """
    parts = find_parts(rows, key, attempt, number, only=merged)
    if not is_complete(parts):
        raise OtherParts
    return parts


def expected_version(parts: Sequence[PendingPart]) -> int | None:
    """Returns the version that the parts expect the key to be at. Raises VersionConflictError if they differ."""
    expected = {part.expect: part.rank for part in parts if part.expect is not None}
    if len(expected) > 1:
        said = ", ".join(f"rank {rank} {version}" for version, rank in expected.items())
        text = f"{_text(parts[0].key)}: the ranks expect different versions: {said}"
        raise VersionConflictError(text, key=_decoded(parts[0].key))
    return next(iter(expected), None)


def settle(rows: AttemptRows, parts: Sequence[PendingPart], version: int) -> AttemptOutcome:
    """Writes what became of an attempt, in the transaction that makes a version of its parts.

    Older attempts of the key end with it.
    """
    for part in parts:
        rows.delete_part(part)
    first = parts[0]
    outcome = _put_outcome(rows, first.key, first.attempt, parts, version=version)
    older = [part for part in rows.parts(first.key) if part.number < first.number]
    for others in by_attempt(older):
        end(rows, others, given_up(others, f"attempt {first.attempt!r}, begun later, was published first"))
    return outcome


# Rules 3 and 4: it is given up, or over.


def give_up(
    rows: AttemptRows,
    key: bytes,
    attempt: str,
    number: int,
    failure: Failure,
    *,
    only: Sequence[Place] | None = None,
    waits: int = 0,
) -> AttemptOutcome:
    """Ends an attempt with an error.

    Args:
        number: 0: the rank has no part, or doesn't know. The attempt may have begun all the same, or never will.
        only: as of `find_parts`.
        waits: nanoseconds that the rank would have waited.

    Raises OverAlready, NothingKnown, OtherParts.
    """
    parts = find_parts(rows, key, attempt, number, only)
    for part in parts:
        drop_part(rows, part)
    return _put_outcome(rows, key, attempt, parts, failure=failure, waits=waits)


def expire(rows: AttemptRows) -> None:
    """Ends the attempts whose parts are all over."""
    for parts in expired(rows):
        end_late(rows, parts)


def expired(rows: AttemptRows) -> list[list[PendingPart]]:
    """Returns the parts of the attempts of which all parts are over."""
    now, there = rows.now(), rows.parts()
    if not [part for part in there if part.expires <= now]:  # each prepare comes here
        return []
    return [parts for parts in by_attempt(there) if all(part.expires <= now for part in parts)]


def end_late(rows: AttemptRows, parts: Sequence[PendingPart]) -> None:
    end(rows, parts, given_up(parts, "its lease was over before all ranks had put their parts"))


def end(rows: AttemptRows, parts: Sequence[PendingPart], failure: Failure) -> AttemptOutcome:
    """Ends the attempt that has these parts."""
    for part in parts:
        drop_part(rows, part)
    return _put_outcome(rows, parts[0].key, parts[0].attempt, parts, failure=failure)


def drop_part(rows: AttemptRows, part: PendingPart) -> None:
    rows.delete_part(part)
    rows.drop_bytes(part)


def _put_outcome(
    rows: AttemptRows,
    key: bytes,
    attempt: str,
    parts: Sequence[PendingPart],
    *,
    version: int = 0,
    failure: Failure | None = None,
    waits: int = 0,
) -> AttemptOutcome:
    """Writes an outcome. It is kept for as long as one of them waits, and as long as the parts were to be."""
    longest = max([SHORTEST_MEMORY, waits, *[part.waits_ns for part in parts]])
    said = failure or Failure("", "")
    outcome = AttemptOutcome(
        key=key,
        attempt=attempt,
        number=parts[0].number if parts else 0,
        version=version,
        error=said.error,
        message=said.text,
        details=said.details,
        expires=max([rows.now() + longest, *[part.expires for part in parts]]),
    )
    rows.put_outcome(outcome)
    rows.tell(key)
    return outcome


# What is there, and what is said of it.


def is_complete(parts: Sequence[PendingPart]) -> bool:
    return bool(parts) and len(parts) == parts[0].world_size


def missing_ranks(parts: Sequence[PendingPart], world_size: int) -> tuple[int, ...]:
    there = {part.rank for part in parts}
    return tuple(rank for rank in range(world_size) if rank not in there)


def places_of(parts: Sequence[PendingPart]) -> tuple[Place, ...]:
    """Returns what tells these parts from others, also from those that the same ranks have put again."""
    return tuple([part.place for part in parts])


def by_attempt(parts: Sequence[PendingPart]) -> list[list[PendingPart]]:
    found: dict[tuple[bytes, str], list[PendingPart]] = {}
    for part in parts:
        found.setdefault((part.key, part.attempt), []).append(part)
    return list(found.values())


AttemptFailure = StoreTimeoutError | ShardMismatchError | PartialCommitError | VersionConflictError | MutableEntryError

_ERRORS: dict[str, type[AttemptFailure]] = {
    kind.__name__: kind
    for kind in (StoreTimeoutError, ShardMismatchError, PartialCommitError, VersionConflictError, MutableEntryError)
}


def failure_of(error: AttemptFailure) -> Failure:
    details = {name: value for name, value in vars(error).items() if name in FailureDetails.__struct_fields__}
    return Failure(type(error).__name__, str(error), FailureDetails(**details))


def error_of(failure: Failure, key: bytes) -> AttemptFailure:
    error = _ERRORS.get(failure.error, PartialCommitError)(failure.text, key=_decoded(key))
    for name in vars(error).keys() & set(FailureDetails.__struct_fields__):
        setattr(error, name, getattr(failure.details, name))
    return error


def version_of_outcome(outcome: AttemptOutcome) -> int:
    """Returns the version that an attempt became. Raises the error that ended it."""
    if outcome.version:
        return outcome.version
    raise error_of(Failure(outcome.error, outcome.message, outcome.details), outcome.key)


def ended(member: Participant | PendingPart, parts: Sequence[PendingPart], why: str) -> PartialCommitError:
    """Makes the error of an attempt that was given up."""
    text = f"{_name(member)} was given up: {why}"
    return PartialCommitError(text, key=_decoded(member.key), missing_ranks=missing_ranks(parts, member.world_size))


def given_up(parts: Sequence[PendingPart], why: str) -> Failure:
    return failure_of(ended(parts[0], parts, why))


def unknown_outcome(member: Participant | PendingPart, why: str = FORGOTTEN) -> UnknownOutcomeError:
    text = f"{_name(member)}: {why}: the key says whether it was published"
    return UnknownOutcomeError(text, key=_decoded(member.key))


def no_version_yet(key: bytes, parts: Sequence[PendingPart]) -> KeyNotFoundError | PartialCommitError:
    """Makes the error for a key that doesn't exist. If it has parts that wait for others, that is another one."""
    if not parts:
        return missing(key)
    first, name = parts[0], key.decode()
    ranks = missing_ranks([part for part in parts if part.number == first.number], first.world_size)
    named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    who = f"waits for {named}" if ranks else "is about to be published"
    text = (
        f"{name!r} has no version yet: attempt {first.attempt!r} {who}; abort({name!r}, {first.attempt!r}) gives it up"
    )
    return PartialCommitError(text, key=name, missing_ranks=ranks)


def _other_world(part: PendingPart, other: PendingPart) -> Failure:
    text = (
        f"{_name(part)} has {other.world_size} ranks by rank {other.rank}, and {part.world_size} by rank {part.rank}: "
        "name another attempt after a restart with other ranks"
    )
    return Failure("ShardMismatchError", text)


def _name(member: Participant | PendingPart) -> str:
    return f"{_text(member.key)}: attempt {member.attempt!r}"


def _text(key: bytes) -> str:
    return repr(_decoded(key))


def _decoded(key: bytes) -> str:
    return key.decode(errors="replace")  # another host may have sent it


# --- the rows of a store that nobody serves ---------------------------------------------------------------------------


_UNREAD = Counters()  # of rows that are only read: nothing looks at them


class TransactionRows:
    """The rows of attempts in a transaction of this host's catalog. All segments lie here.

    Args:
        counters: the store's, to be changed in place; None: the rows are only read.
        sealed: the segment of a part that is to be taken in, which this process has filled.

    Attributes:
        keys: whose ranks are to be woken.
        is_change: whether something was written that the counters tell of.
    """

    now = staticmethod(boot_clock)

    def __init__(
        self, transaction: Transaction, counters: Counters | None = None, sealed: SealedSegment | None = None
    ) -> None:
        self._transaction, self._sealed, self._boot = transaction, sealed, boot_id()
        self.counters = _UNREAD if counters is None else counters
        self.keys: list[bytes] = []
        self.is_change = False

    def new_number(self) -> int:
        self.counters.number += 1
        return self.counters.number

    def parts(self, key: bytes | None = None, attempt: str | None = None) -> list[PendingPart]:
        boot = self._boot
        found = tables.parts_of(self._transaction, key, attempt)
        return [part if part.boot == boot else msgspec.structs.replace(part, expires=0) for part in found]

    def put_part(self, part: PendingPart, content: bytes | None) -> None:
        transaction = self._transaction
        if content is None:
            tables.renew_part(transaction, part)
            return
        self.is_change = True
        tables.put_part(transaction, part, content)
        if self._sealed is not None:
            transaction.put_segment(part.segment, SegmentRow(part.key, part.put_id, PREPARED, part.size))
            transaction.delete_number("filling", part.segment)
            if isinstance(self._sealed.file, ClaimedFile):
                self._sealed.file.unlock()  # before the commit: who reads it, once it is live, must not find it locked

    def delete_part(self, part: PendingPart) -> None:
        tables.delete_part(self._transaction, part)

    def has_bytes(self, part: PendingPart) -> bool:
        return True  # this process has locked the file

    def drop_bytes(self, part: PendingPart) -> None:
        row = self._transaction.segment(part.segment) if part.segment else None
        if row is not None and row.state == PREPARED and row.put_id == part.put_id:
            self.is_change = True
            self.counters.filling -= row.nbytes
            self._transaction.put_segment(part.segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
            retire(self._transaction, self.counters, part.segment, row.nbytes)

    def outcome(self, key: bytes, attempt: str) -> AttemptOutcome | None:
        return tables.outcome_of(self._transaction, key, attempt)

    def put_outcome(self, outcome: AttemptOutcome) -> None:
        self.is_change = True
        tables.put_outcome(self._transaction, msgspec.structs.replace(outcome, boot=self._boot))

    def drop_outcomes(self, limit: int) -> None:
        tables.drop_outcomes(self._transaction, Now(boot_clock(), self._boot), limit)

    def tell(self, key: bytes) -> None:
        self.keys.append(key)


# --- holds of the mutex -----------------------------------------------------------------------------------------------


_MOST = 1 << 20  # rows


def change_attempts(
    root: Root,
    action: Callable[[TransactionRows], Result],
    deadline: float,
    *,
    sealed: SealedSegment | None = None,
    is_delete: bool = False,
) -> Result:
    """Calls `action` in one transaction of a store that nobody serves, and wakes the ranks of its keys.

    Raises what the action raises, and then nothing has changed; MembershipChanged if the store is served by now.
    """
    result, bells = root.mutex.run(_change_locked, deadline, root, action, sealed, is_delete=is_delete)
    for bell in bells:
        root.doorbell.wake(bell)
    return result


def _change_locked(
    root: Root,
    action: Callable[[TransactionRows], Result],
    sealed: SealedSegment | None = None,
    *,
    is_delete: bool,
    is_sweep: bool = False,
) -> tuple[Result, list[int]]:
    """Changes attempts under the mutex. Returns also the bells to be woken after it."""
    if not is_sweep:
        root.glance()  # the wait for the mutex may have been long: in a store that was moved nothing is changed

    def apply(transaction: Transaction) -> tuple[Result, TransactionRows]:
        rows = TransactionRows(transaction, transaction.counters(), sealed)
        if rows.counters.membership and not is_sweep:
            raise MembershipChanged
        result = action(rows)
        if rows.is_change or rows.keys:
            rows.counters.publications += bool(rows.keys)
            transaction.put_counters(rows.counters)
        return result, rows

    result, rows = root.catalog.update(apply, is_delete=is_delete)
    bells = [root.doorbell.bell(key) for key in rows.keys]
    for bell in bells:
        root.doorbell.change(bell)
    if bells:
        root.mutex.notes.publications_rung = rows.counters.publications
    return result, bells


def give_up_here(
    root: Root, member: Participant, failure: AttemptFailure, deadline: float, only: Sequence[Place] | None = None
) -> AttemptOutcome:
    """Ends an attempt with an error, unless it has an outcome. Returns the outcome that it has then.

    Args:
        member: without a number, the rank has put nothing yet.
        only: as of `find_parts`.

    Raises NothingKnown, OtherParts; MembershipChanged.
    """
    said, waits = failure_of(failure), nanoseconds(member.waits)

    def act(rows: TransactionRows) -> AttemptOutcome:
        return give_up(rows, member.key, member.attempt, member.number, said, only=only, waits=waits)

    try:
        return change_attempts(root, act, deadline, is_delete=True)
    except OverAlready as over:
        return over.outcome


def end_expired(root: Root, deadline: float) -> None:
    """Ends all attempts that are over, and drops all outcomes that are. If there are none, nothing is written."""
    bells = root.mutex.run(end_expired_locked, deadline, root)
    for bell in bells:
        root.doorbell.wake(bell)


def end_expired_locked(root: Root) -> list[int]:
    """Ends attempts that have expired, under the mutex. Returns the bells to wake after it."""
    moment = Now(boot_clock(), boot_id())

    def has_expired(transaction: Transaction) -> bool:
        outcomes = tables.all_outcomes(transaction)
        return bool(_expired_here(TransactionRows(transaction))) or any(one.is_over(moment) for one in outcomes)

    def act(rows: TransactionRows) -> None:
        for parts in _expired_here(rows):
            end_late(rows, parts)
        rows.drop_outcomes(_MOST)

    if not root.catalog.view(has_expired):
        return []
    return _change_locked(root, act, is_delete=True, is_sweep=True)[1]


def _expired_here(rows: TransactionRows) -> list[list[PendingPart]]:
    """Returns attempts that are over. One that has parts of other hosts is left to who serves the store."""
    return [parts for parts in expired(rows) if not any(part.host for part in parts)]


def forget_other_boots(transaction: Transaction, counters: Counters) -> bool:
    """Drops parts and outcomes of other boots: nobody waits for them any more. Returns whether there were any."""
    boot, rows = boot_id(), TransactionRows(transaction, counters)
    parts = [part for part in tables.parts_of(transaction) if part.boot != boot and not part.host]
    for part in parts:
        drop_part(rows, part)
    outcomes = [outcome for outcome in tables.all_outcomes(transaction) if outcome.boot != boot]
    for outcome in outcomes:
        tables.delete_outcome(transaction, outcome)
    return bool(parts or outcomes)


# --- what is there ----------------------------------------------------------------------------------------------------


_LONGEST_WAIT = 1e9  # seconds; infinity has no number of nanoseconds


def nanoseconds(seconds: float) -> int:
    return int(min(max(seconds, 0), _LONGEST_WAIT) * 1e9)


def new_part(
    member: Participant, expect: int | None, segment: SealedSegment | None = None, host: bytes = b""
) -> PendingPart:
    """Makes a rank's part, which is to be taken in.

    Args:
        host: as of `PendingPart`.
    """
    return PendingPart(
        key=member.key,
        attempt=member.attempt,
        number=0,
        rank=member.rank,
        world_size=member.world_size,
        put_id=0 if segment is None else segment.put_id,
        segment=0 if segment is None else segment.segment,
        size=0 if segment is None else segment.size,
        start=0 if segment is None else segment.start,
        expect=expect,
        waits_ns=nanoseconds(member.waits),
        boot=boot_id(),
        host=host,
    )


def find_attempt(transaction: Transaction, member: Participant) -> tuple[AttemptOutcome | None, list[PendingPart]]:
    """Finds an attempt in this host's catalog: see `find`."""
    return find(TransactionRows(transaction), member.key, member.attempt, member.number)


def look_into_attempt(root: Root, member: Participant) -> tuple[AttemptOutcome | None, list[PendingPart], list[bytes]]:
    """Does what `find_attempt` does, and returns what the parts say of the value, too."""

    def read(transaction: Transaction) -> tuple[AttemptOutcome | None, list[PendingPart], list[bytes]]:
        outcome, parts = find_attempt(transaction, member)
        return outcome, parts, [tables.content_of(transaction, part) for part in parts]

    return root.catalog.view(read)


def parts_here(root: Root, key: bytes | None) -> list[tuple[PendingPart, float]]:
    """Returns the parts of the attempts of a key, or of all, each with the seconds until it is over.

    What is over counts until it is ended; but nobody is left who could wait for what is of another boot.
    """
    now, boot = boot_clock(), boot_id()
    parts = root.catalog.view(lambda transaction: tables.parts_of(transaction, key))
    return [(part, (part.expires - now) / 1e9) for part in parts if part.boot == boot]
