"""Attempts: sharded puts, whose parts become one version at one moment, or never. Decision 012 has the rules.

1. *Prepare* (`sharded_put.prepare`): a rank fills a segment as in any put. Then, in one hold of the store's mutex, its
   row becomes *prepared*, and a row of `pending` keeps it from now on, so that the rank may exit. A kill before leaves
   what a put leaves; after it, a part that waits for the others until its lease is over.
2. *Publish* (`sharded_put.outcome_of`): who finds all parts there merges them outside of the mutex, and commits them by
   steps 4 and 5 of a put (`put.py`), with its own transaction: the attempt must have no outcome, and its parts must
   be those that were merged; their rows go, and the version becomes the outcome. A kill before the commit leaves
   headers that say live: the mutex's next owner puts them back, since rows of `pending` still name the segments
   (`recovery.py`).
3. *Give up* (`give_up_here`): a timeout, an error of a rank, or `abort` ends an attempt, unless it has an outcome:
   its segments are retired, and the error becomes its outcome. So what raised never publishes later.
4. *Expire* (`end_expired`): what is over is ended in the same way, by whoever prepares or sweeps next. Who waits puts
   that off.

Whatever completes, publishes or ends an attempt counts as a publication and rings the key's doorbell, so that a death
right after the commit is made up for as after a put. What became of an attempt is kept (`make_outcome`): the version
that it is, or the error that every rank of it gets.

Here are steps 3 and 4, which sweeps and recoveries take too, who takes part, and what is there; `sharded_put.py` has
steps 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import AttemptOutcome, Counters, Now, PendingPart, Transaction
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

_LONGEST_LEASE = 1e9  # seconds


Merge = Callable[[Sequence[PendingPart], Sequence[bytes]], Content]
"""Makes one value of an attempt's parts, which are given by rank, and of what they say. Its ShardMismatchError or
PartialCommitError ends the attempt.
"""


class Participant(NamedTuple):
    """A rank's place in an attempt.

    Attributes:
        lease: seconds that its part waits for the others.
        number: of the attempt, once the rank's part is there; 0 before. It tells attempts of one name apart.
        home: of a store on several hosts, the member that has the rank's part; empty: none has, or this one.
    """

    key: bytes
    attempt: str
    rank: int
    world_size: int
    lease: float
    number: int = 0
    home: bytes = b""


def nanoseconds(lease: float) -> int:
    return int(min(max(lease, 0), _LONGEST_LEASE) * 1e9)


def now() -> Now:
    return Now(boot_clock(), boot_id())


def find_attempt(transaction: Transaction, member: Participant) -> tuple[AttemptOutcome | None, list[PendingPart]]:
    """The outcome of an attempt, if it has one, or its parts by rank."""
    outcome = tables.outcome_of(transaction, member.key, member.attempt)
    if outcome is not None and member.number in (0, outcome.number):
        return outcome, []
    parts = tables.parts_of(transaction, member.key, member.attempt)
    return None, [part for part in parts if member.number in (0, part.number)]


def look_into_attempt(root: Root, member: Participant) -> tuple[AttemptOutcome | None, list[PendingPart], list[bytes]]:
    """Does what `find_attempt` does, and returns what the parts say of the value, too."""

    def read(transaction: Transaction) -> tuple[AttemptOutcome | None, list[PendingPart], list[bytes]]:
        outcome, parts = find_attempt(transaction, member)
        return outcome, parts, [tables.content_of(transaction, part) for part in parts]

    return root.catalog.view(read)


def parts_here(root: Root, key: bytes | None) -> list[tuple[PendingPart, float]]:
    """The parts of the attempts of a key, or of all, each with the seconds until it is over.

    What is over counts until it is ended; but nobody is left who could wait for what is of another boot.
    """
    moment = now()
    parts = root.catalog.view(lambda transaction: tables.parts_of(transaction, key))
    return [(part, (part.expires - moment.clock) / 1e9) for part in parts if part.boot == moment.boot]


def no_version_yet(key: bytes, parts: Sequence[PendingPart]) -> KeyNotFoundError | PartialCommitError:
    """The error for a key that doesn't exist. If it has parts that wait for others, that is another one."""
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


def missing_ranks(parts: Sequence[PendingPart], world_size: int) -> tuple[int, ...]:
    there = {part.rank for part in parts}
    return tuple(rank for rank in range(world_size) if rank not in there)


def ring_for_attempt(root: Root, key: bytes, counters: Counters) -> int:
    """Rings, after the commit of what completes or ends an attempt. Returns the bell, to be woken after the mutex."""
    bell = root.doorbell.bell(key)
    root.doorbell.change(bell)
    root.mutex.notes.publications_rung = counters.publications
    return bell


def are_same(parts: Sequence[PendingPart], others: Sequence[PendingPart]) -> bool:
    return [part.put_id for part in parts] == [part.put_id for part in others]


_MOST = 1 << 20  # rows

# --- given up ---------------------------------------------------------------------------------------------------------


def give_up_here(root: Root, member: Participant, failure: AttemptFailure, deadline: float) -> AttemptOutcome:
    """Ends an attempt with an error, unless it has an outcome. Returns the outcome that it has then.

    Args:
        member: without a number, the rank has put nothing yet: the attempt may have begun all the same, or never will.

    Raises:
        UnknownOutcomeError: there is neither an outcome of this attempt nor a part, so its outcome was dropped.
    """
    outcome = give_up_if(root, member, None, failure, deadline)
    if outcome is None:
        raise unknown_outcome(member)
    return outcome


def give_up_if(
    root: Root, member: Participant, only: Sequence[PendingPart] | None, failure: AttemptFailure, deadline: float
) -> AttemptOutcome | None:
    """Ends an attempt; but changes nothing, and returns None, if its parts are not `only` those, or there are none."""

    def apply(transaction: Transaction) -> tuple[AttemptOutcome | None, Counters | None]:
        outcome, parts = find_attempt(transaction, member)
        is_gone = member.number and not parts
        if outcome is not None or is_gone or (only is not None and not are_same(parts, only)):
            return outcome, None
        counters = transaction.counters()
        if counters.membership:
            raise MembershipChanged
        outcome = end_attempt(transaction, counters, parts, failure, now(), member)
        counters.publications += 1
        transaction.put_counters(counters)
        return outcome, counters

    def act() -> tuple[AttemptOutcome | None, int | None]:
        root.glance()
        with root.guard:
            outcome, counters = root.catalog.update(apply, is_delete=True)
        return outcome, None if counters is None else ring_for_attempt(root, member.key, counters)

    outcome, bell = root.mutex.run(act, deadline)
    if bell is not None:
        root.doorbell.wake(bell)
    return outcome


def end_attempt(
    transaction: Transaction,
    counters: Counters,
    parts: Sequence[PendingPart],
    failure: AttemptFailure,
    moment: Now,
    member: Participant | None = None,
) -> AttemptOutcome:
    """Retires the segments of the parts, and writes what became of the attempt."""
    for part in parts:
        retire_part(transaction, counters, part)
        tables.delete_part(transaction, part)
    outcome = make_outcome(member or parts[0], parts, moment, failure=failure)
    tables.put_outcome(transaction, outcome)
    return outcome


def retire_part(transaction: Transaction, counters: Counters, part: PendingPart) -> None:
    row = transaction.segment(part.segment) if part.segment else None
    if row is not None and row.state == PREPARED and row.put_id == part.put_id:
        counters.filling -= row.nbytes
        transaction.put_segment(part.segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
        retire(transaction, counters, part.segment, row.nbytes)


# --- expired ----------------------------------------------------------------------------------------------------------


def end_expired(root: Root, deadline: float) -> None:
    """Ends all attempts that are over, and drops all outcomes that are. If there are none, nothing is written."""
    bells = root.mutex.run(end_expired_locked, deadline, root)
    for bell in bells:
        root.doorbell.wake(bell)


def end_expired_locked(root: Root) -> list[int]:
    """Ends attempts that have expired, under the mutex. Returns the bells to wake after it."""
    moment = now()
    if not root.catalog.view(lambda transaction: _has_expired(transaction, moment)):
        return []

    def apply(transaction: Transaction) -> tuple[list[bytes], Counters]:
        counters = transaction.counters()
        ended_keys = drop_expired(transaction, counters, moment)
        tables.drop_outcomes(transaction, moment, _MOST)
        counters.publications += bool(ended_keys)
        transaction.put_counters(counters)
        return ended_keys, counters

    keys, counters = root.catalog.update(apply, is_delete=True)
    return [ring_for_attempt(root, key, counters) for key in keys]


def _has_expired(transaction: Transaction, moment: Now) -> bool:
    outcomes = tables.all_outcomes(transaction)
    return bool(_expired(transaction, moment)) or any(outcome.is_over(moment) for outcome in outcomes)


def _expired(transaction: Transaction, moment: Now) -> list[list[PendingPart]]:
    """The parts of each attempt whose parts are all over. One that has parts of other hosts is left to who serves."""
    found: dict[tuple[bytes, str], list[PendingPart]] = {}
    for part in tables.parts_of(transaction):
        found.setdefault((part.key, part.attempt), []).append(part)
    return [parts for parts in found.values() if all(part.is_over(moment) and not part.host for part in parts)]


def drop_expired(transaction: Transaction, counters: Counters, moment: Now) -> list[bytes]:
    """Ends attempts that are over. Returns their keys."""
    expired = _expired(transaction, moment)
    for parts in expired:
        failure = ended(parts[0], parts, "its lease was over before all ranks had put their parts")
        end_attempt(transaction, counters, parts, failure, moment)
    return [parts[0].key for parts in expired]


def forget_other_boots(transaction: Transaction, counters: Counters) -> bool:
    """Drops parts and outcomes of other boots: nobody waits for them any more. Returns whether there were any."""
    boot = boot_id()
    parts = [part for part in tables.parts_of(transaction) if part.boot != boot and not part.host]
    for part in parts:
        retire_part(transaction, counters, part)
        tables.delete_part(transaction, part)
    outcomes = [outcome for outcome in tables.all_outcomes(transaction) if outcome.boot != boot]
    for outcome in outcomes:
        tables.delete_outcome(transaction, outcome)
    return bool(parts or outcomes)


# --- outcomes --------------------------------------------------------------------------------------------------------


AttemptFailure = StoreTimeoutError | ShardMismatchError | PartialCommitError | VersionConflictError | MutableEntryError

_SHORTEST_MEMORY = 60.0  # seconds that an outcome is kept for ranks that ask late


class OverAlready(Refusal):
    """Raised within a transaction that finds the outcome of its attempt."""

    def __init__(self, outcome: AttemptOutcome) -> None:
        super().__init__()
        self.outcome = outcome


def make_outcome(
    member: Participant | PendingPart,
    parts: Sequence[PendingPart],
    moment: Now,
    *,
    version: int = 0,
    failure: AttemptFailure | None = None,
) -> AttemptOutcome:
    """It is kept for a lease, and as long as the parts were to be."""
    leases = [nanoseconds(_SHORTEST_MEMORY), *[part.lease for part in parts]]
    if isinstance(member, Participant):
        leases.append(nanoseconds(member.lease))
    details: dict[str, Any] = {}
    if failure is not None:
        details = {name: value for name, value in vars(failure).items() if name in _DETAILS}
    return AttemptOutcome(
        key=member.key,
        attempt=member.attempt,
        number=member.number or max((part.number for part in parts), default=0),
        version=version,
        error="" if failure is None else type(failure).__name__,
        message="" if failure is None else str(failure),
        details=details,
        expires=max([moment.clock + max(leases), *[part.expires for part in parts]]),
        boot=moment.boot,
    )


_DETAILS = ("expected", "found", "missing_ranks", "missing_boxes")
_ERRORS: dict[str, type[AttemptFailure]] = {
    kind.__name__: kind
    for kind in (StoreTimeoutError, ShardMismatchError, PartialCommitError, VersionConflictError, MutableEntryError)
}


def version_of_outcome(outcome: AttemptOutcome) -> int:
    """The version that an attempt became. Raises the error that ended it."""
    if outcome.version:
        return outcome.version
    error = _ERRORS.get(outcome.error, PartialCommitError)(outcome.message, key=outcome.key.decode())
    for name, value in outcome.details.items():
        if name in _DETAILS:
            setattr(error, name, _as_tuples(value))
    raise error


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, cast("list[Any]", value))) if isinstance(value, list) else value


def ended(member: Participant | PendingPart, parts: Sequence[PendingPart], why: str) -> PartialCommitError:
    """The error of an attempt that was given up."""
    key = member.key.decode()
    text = f"{key!r}: attempt {member.attempt!r} was given up: {why}"
    return PartialCommitError(text, key=key, missing_ranks=missing_ranks(parts, member.world_size))


def unknown_outcome(member: Participant) -> UnknownOutcomeError:
    key = member.key.decode()
    return UnknownOutcomeError(
        f"{key!r}: nothing is known of attempt {member.attempt!r} any more, since this rank looked later than its "
        "lease: the key says whether it was published",
        key=key,
    )
