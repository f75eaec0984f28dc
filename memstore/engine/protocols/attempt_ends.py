"""How attempts end that are not published, steps 3 and 4 of `attempts.py`; and what became of an attempt.

All that changes something runs under the store's mutex.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from memstore.engine.catalog import Counters, Now, Outcome, Part, Transaction, attempts
from memstore.engine.format import PREPARED, RETIRED, SegmentRow
from memstore.engine.protocols.change import missing
from memstore.engine.protocols.reuse import retire
from memstore.engine.root import Root
from memstore.engine.sync import boot_clock, boot_id
from memstore.errors import (
    KeyNotFoundError,
    PartialCommitError,
    ShardMismatchError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)

_MOST = 1 << 20  # rows
_LONGEST_LEASE = 1e9  # seconds
_SHORTEST_MEMORY = 60.0  # seconds that an outcome is kept for ranks that ask late

Failure = StoreTimeoutError | ShardMismatchError | PartialCommitError | VersionConflictError


class Member(NamedTuple):
    """A rank's place in an attempt.

    Attributes:
        lease: seconds that its part waits for the others.
        number: of the attempt, once the rank's part is there; 0 before. It tells attempts of one name apart.
    """

    key: bytes
    attempt: str
    rank: int
    world_size: int
    lease: float
    number: int = 0


def nanoseconds(lease: float) -> int:
    return int(min(max(lease, 0), _LONGEST_LEASE) * 1e9)


def now() -> Now:
    return Now(boot_clock(), boot_id())


# --- what is there ----------------------------------------------------------------------------------------------------


def find(transaction: Transaction, member: Member) -> tuple[Outcome | None, list[Part]]:
    """The outcome of an attempt, if it has one, or its parts by rank."""
    outcome = attempts.outcome_of(transaction, member.key, member.attempt)
    if outcome is not None and member.number in (0, outcome.number):
        return outcome, []
    parts = attempts.parts_of(transaction, member.key, member.attempt)
    return None, [part for part in parts if member.number in (0, part.number)]


def look_into(root: Root, member: Member) -> tuple[Outcome | None, list[Part], list[bytes]]:
    """As `find`, with what the parts say of the value."""

    def read(transaction: Transaction) -> tuple[Outcome | None, list[Part], list[bytes]]:
        outcome, parts = find(transaction, member)
        return outcome, parts, [attempts.content_of(transaction, part) for part in parts]

    return root.catalog.view(read)


def pending_parts(root: Root, key: bytes | None) -> list[tuple[Part, float]]:
    """The parts of the attempts of a key, or of all, each with the seconds until it is over.

    What is over counts until it is ended; but nobody is left who could wait for what is of another boot.
    """
    moment = now()
    parts = root.catalog.view(lambda transaction: attempts.parts_of(transaction, key))
    return [(part, (part.expires - moment.clock) / 1e9) for part in parts if part.boot == moment.boot]


def no_version(root: Root, key: bytes) -> KeyNotFoundError | PartialCommitError:
    """The error for a key that doesn't exist. If it has parts that wait for others, that is another one."""
    parts = [part for part, _ in pending_parts(root, key)]
    if not parts:
        return missing(key)
    first, name = parts[0], key.decode()
    ranks = missing_ranks([part for part in parts if part.number == first.number], first.world_size)
    who = f"waits for ranks {', '.join(map(str, ranks))}" if ranks else "is about to be published"
    text = f"{name!r} has no version yet: attempt {first.attempt!r} {who}"
    return PartialCommitError(text, key=name, missing_ranks=ranks)


def missing_ranks(parts: Sequence[Part], world_size: int) -> tuple[int, ...]:
    there = {part.rank for part in parts}
    return tuple(rank for rank in range(world_size) if rank not in there)


def ring(root: Root, key: bytes, counters: Counters) -> int:
    """Rings, after the commit of what completes or ends an attempt. Returns the bell, to be woken after the mutex."""
    bell = root.doorbell.bell(key)
    root.doorbell.change(bell)
    root.mutex.publications_rung = counters.publications
    return bell


# --- the end of an attempt --------------------------------------------------------------------------------------------


def give_up(root: Root, member: Member, failure: Failure, deadline: float) -> Outcome:
    """Ends an attempt with an error, unless it has an outcome. Returns the outcome that it has then.

    Args:
        member: without a number, the rank has put nothing yet: the attempt may have begun all the same, or never will.

    Raises:
        UnknownOutcomeError: there is neither an outcome of this attempt nor a part, so its outcome was dropped.
    """
    outcome = give_up_if(root, member, None, failure, deadline)
    if outcome is None:
        raise unknown(member)
    return outcome


def give_up_if(
    root: Root, member: Member, only: Sequence[Part] | None, failure: Failure, deadline: float
) -> Outcome | None:
    """As `give_up`, but that it changes nothing and returns None if the parts are not `only` those, or none."""

    def apply(transaction: Transaction) -> tuple[Outcome | None, Counters | None]:
        outcome, parts = find(transaction, member)
        is_gone = member.number and not parts
        if outcome is not None or is_gone or (only is not None and not are_same(parts, only)):
            return outcome, None
        counters = transaction.counters()
        outcome = end(transaction, counters, parts, failure, now(), member)
        counters.publications += 1
        transaction.put_counters(counters)
        return outcome, counters

    def act() -> tuple[Outcome | None, int | None]:
        root.glance()
        with root.guard:
            outcome, counters = root.catalog.update(apply, is_delete=True)
        return outcome, None if counters is None else ring(root, member.key, counters)

    outcome, bell = root.mutex.run(act, deadline)
    if bell is not None:
        root.doorbell.wake(bell)
    return outcome


def unknown(member: Member) -> UnknownOutcomeError:
    key = member.key.decode()
    return UnknownOutcomeError(
        f"{key!r}: nothing is known of attempt {member.attempt!r} any more, since this rank looked later than its "
        "lease: the key says whether it was published",
        key=key,
    )


def are_same(parts: Sequence[Part], others: Sequence[Part]) -> bool:
    return [part.put_id for part in parts] == [part.put_id for part in others]


def end_expired(root: Root, deadline: float) -> None:
    """Ends all attempts that are over, and drops all outcomes that are. If there are none, nothing is written."""
    bells = root.mutex.run(lambda: end_expired_locked(root), deadline)
    for bell in bells:
        root.doorbell.wake(bell)


def end_expired_locked(root: Root) -> list[int]:
    """As `end_expired`, for the mutex's owner, who wakes the bells that it returns after the mutex."""
    moment = now()
    if not root.catalog.view(lambda transaction: _has_expired(transaction, moment)):
        return []

    def apply(transaction: Transaction) -> tuple[list[bytes], Counters]:
        counters = transaction.counters()
        ended_keys = drop_expired(transaction, counters, moment)
        attempts.drop_outcomes(transaction, moment, _MOST)
        counters.publications += bool(ended_keys)
        transaction.put_counters(counters)
        return ended_keys, counters

    keys, counters = root.catalog.update(apply, is_delete=True)
    return [ring(root, key, counters) for key in keys]


def _has_expired(transaction: Transaction, moment: Now) -> bool:
    outcomes = attempts.all_outcomes(transaction)
    return bool(_expired(transaction, moment)) or any(outcome.is_over(moment) for outcome in outcomes)


def _expired(transaction: Transaction, moment: Now) -> list[list[Part]]:
    """The parts of each attempt whose parts are all over."""
    found: dict[tuple[bytes, str], list[Part]] = {}
    for part in attempts.parts_of(transaction):
        found.setdefault((part.key, part.attempt), []).append(part)
    return [parts for parts in found.values() if all(part.is_over(moment) for part in parts)]


def drop_expired(transaction: Transaction, counters: Counters, moment: Now) -> list[bytes]:
    """Ends attempts that are over. Returns their keys."""
    expired = _expired(transaction, moment)
    for parts in expired:
        failure = ended(parts[0], parts, "its lease was over before all ranks had put their parts")
        end(transaction, counters, parts, failure, moment)
    return [parts[0].key for parts in expired]


def forget_other_boots(transaction: Transaction, counters: Counters) -> bool:
    """Drops parts and outcomes of other boots: nobody waits for them any more. Returns whether there were any."""
    boot = boot_id()
    parts = [part for part in attempts.parts_of(transaction) if part.boot != boot]
    for part in parts:
        retire_part(transaction, counters, part)
        attempts.delete_part(transaction, part)
    outcomes = [outcome for outcome in attempts.all_outcomes(transaction) if outcome.boot != boot]
    for outcome in outcomes:
        attempts.delete_outcome(transaction, outcome)
    return bool(parts or outcomes)


def ended(member: Member | Part, parts: Sequence[Part], why: str) -> PartialCommitError:
    """The error of an attempt that was given up."""
    key = member.key.decode()
    text = f"{key!r}: attempt {member.attempt!r} was given up: {why}"
    return PartialCommitError(text, key=key, missing_ranks=missing_ranks(parts, member.world_size))


def end(
    transaction: Transaction,
    counters: Counters,
    parts: Sequence[Part],
    failure: Failure,
    moment: Now,
    member: Member | None = None,
) -> Outcome:
    """Retires the segments of the parts, and writes what became of the attempt."""
    for part in parts:
        retire_part(transaction, counters, part)
        attempts.delete_part(transaction, part)
    outcome = make_outcome(member or parts[0], parts, moment, failure=failure)
    attempts.put_outcome(transaction, outcome)
    return outcome


def retire_part(transaction: Transaction, counters: Counters, part: Part) -> None:
    row = transaction.segment(part.segment) if part.segment else None
    if row is not None and row.state == PREPARED and row.put_id == part.put_id:
        counters.filling -= row.nbytes
        transaction.put_segment(part.segment, SegmentRow(row.key, row.put_id, RETIRED, row.nbytes))
        retire(transaction, counters, part.segment, row.nbytes)


# --- outcomes ---------------------------------------------------------------------------------------------------------


def make_outcome(
    member: Member | Part, parts: Sequence[Part], moment: Now, *, version: int = 0, failure: Failure | None = None
) -> Outcome:
    """It is kept for a lease, and as long as the parts were to be."""
    leases = [nanoseconds(_SHORTEST_MEMORY), *[part.lease for part in parts]]
    if isinstance(member, Member):
        leases.append(nanoseconds(member.lease))
    details: dict[str, Any] = {}
    if failure is not None:
        details = {name: value for name, value in vars(failure).items() if name in _DETAILS}
    return Outcome(
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
_ERRORS: dict[str, type[Failure]] = {
    kind.__name__: kind for kind in (StoreTimeoutError, ShardMismatchError, PartialCommitError, VersionConflictError)
}


def version_of_outcome(outcome: Outcome) -> int:
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
