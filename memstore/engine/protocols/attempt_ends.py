"""Steps 3 and 4 of `attempts.py`: how attempts end that are not published. All of it runs under the store's mutex."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.engine.catalog import Counters, Now, Outcome, Part, Transaction, attempts
from memstore.engine.format import PREPARED, RETIRED, SegmentRow
from memstore.engine.protocols.attempt_outcomes import Failure, ended, make_outcome, unknown
from memstore.engine.protocols.attempts import Member, are_same, find, now, ring
from memstore.engine.protocols.change import MembershipChanged
from memstore.engine.protocols.reuse import retire
from memstore.engine.root import Root
from memstore.engine.sync import boot_id

_MOST = 1 << 20  # rows

# --- given up ---------------------------------------------------------------------------------------------------------


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
        if counters.membership:
            raise MembershipChanged
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


# --- expired ----------------------------------------------------------------------------------------------------------


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
    """The parts of each attempt whose parts are all over. One that has parts of other hosts is left to who serves."""
    found: dict[tuple[bytes, str], list[Part]] = {}
    for part in attempts.parts_of(transaction):
        found.setdefault((part.key, part.attempt), []).append(part)
    return [parts for parts in found.values() if all(part.is_over(moment) and not part.host for part in parts)]


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
    parts = [part for part in attempts.parts_of(transaction) if part.boot != boot and not part.host]
    for part in parts:
        retire_part(transaction, counters, part)
        attempts.delete_part(transaction, part)
    outcomes = [outcome for outcome in attempts.all_outcomes(transaction) if outcome.boot != boot]
    for outcome in outcomes:
        attempts.delete_outcome(transaction, outcome)
    return bool(parts or outcomes)
