"""Step 1 of `attempts.py`: a rank puts its part, which the catalog keeps from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memstore.engine.catalog import Counters, Now, Outcome, Part, Transaction, attempts
from memstore.engine.files import ClaimedFile, SealedSegment, SegmentWriter
from memstore.engine.format import PREPARED, SegmentRow
from memstore.engine.protocols.attempt_ends import drop_expired, retire_part
from memstore.engine.protocols.attempt_outcomes import OverAlready
from memstore.engine.protocols.attempts import Member, find, nanoseconds, now, ring
from memstore.engine.protocols.change import MembershipChanged
from memstore.engine.protocols.features import need_boxes
from memstore.engine.protocols.put import Draft, clean_up, close_published, write
from memstore.engine.root import Root
from memstore.errors import ShardMismatchError

_DROPPED = 16  # outcomes that a prepare looks at: each attempt leaves one, so more go than come


Enter = Callable[[Root, Member, Draft, SealedSegment | None, bytes, float], Outcome | Member]
"""Takes in a part whose segment, if it has one, is filled: `enter`, or another host's home does."""


def prepare(
    root: Root, member: Member, draft: Draft, content: Callable[[], bytes], enter: Enter, deadline: float
) -> Outcome | Member:
    """Puts one rank's part. Returns the member with the attempt's number.

    If the attempt has an outcome already, it returns that instead, and has put nothing.

    Args:
        draft: of the rank's own bytes; without a header, the rank holds none.
        content: what the part says of the value, asked for once the bytes are written.

    Raises:
        ShardMismatchError: other ranks say that the attempt has another number of ranks.
        StoreFullError, ResourceLimitError, StoreTimeoutError, NotAStoreError.
    """
    need_boxes(root, deadline)
    writers: list[SegmentWriter] = []
    try:
        change = write(root, draft, writers, deadline)
        said = content()
        segment = change.segments[0] if change.segments else None
        found = enter(root, member, draft, segment, said, deadline)
        if isinstance(found, Outcome):
            raise OverAlready(found)
    except BaseException as error:
        clean_up(root, writers, error)
        if isinstance(error, OverAlready):
            return error.outcome
        raise
    close_published(root, writers)
    root.check_in_place()
    return found


def enter(
    root: Root, member: Member, draft: Draft, segment: SealedSegment | None, content: bytes, deadline: float
) -> Outcome | Member:
    """Of a store on one host. Raises MembershipChanged if it is served to others."""
    found, bells = root.mutex.run(lambda: _prepare_locked(root, member, draft, segment, content), deadline)
    for bell in bells:
        root.doorbell.wake(bell)
    return found if isinstance(found, Outcome) else member._replace(number=found)


def _prepare_locked(
    root: Root, member: Member, draft: Draft, segment: SealedSegment | None, content: bytes
) -> tuple[Outcome | int, list[int]]:
    """The attempt's number, or the outcome that it has already; and the bells to wake, of attempts that are complete
    or over.
    """
    root.glance()
    moment = now()

    def apply(transaction: Transaction) -> tuple[Outcome | int, list[bytes], Counters]:
        counters = transaction.counters()
        if counters.membership:
            raise MembershipChanged
        rung = drop_expired(transaction, counters, moment)
        attempts.drop_outcomes(transaction, moment, _DROPPED)
        outcome, there = find(transaction, member)
        number = 0
        if outcome is None:
            part = _part(member, draft, segment, counters, there, moment)
            _enter(transaction, counters, part, content, there)
            number = part.number
            if len({part.rank, *[other.rank for other in there]}) == part.world_size:
                rung.append(member.key)
        if outcome is None or rung:
            counters.publications += bool(rung)
            transaction.put_counters(counters)
        if outcome is None and segment is not None and isinstance(segment.file, ClaimedFile):
            segment.file.unlock()  # before the commit: who reads the segment, once it is live, must not find it locked
        return outcome or number, rung, counters

    with root.guard:
        found, rung, counters = root.catalog.update(apply)
    return found, [ring(root, key, counters) for key in rung]


def _enter(transaction: Transaction, counters: Counters, part: Part, content: bytes, there: Sequence[Part]) -> None:
    """Writes the rows of a part beside those of the others of its attempt; what the rank has put before is retired."""
    for other in there:
        if other.world_size != part.world_size:
            raise _other_world(part, other)
    for other in there:
        if other.rank == part.rank:
            retire_part(transaction, counters, other)
    if part.segment:
        transaction.put_segment(part.segment, SegmentRow(part.key, part.put_id, PREPARED, part.size))
        transaction.delete_number("filling", part.segment)
    attempts.put_part(transaction, part, content)


def _part(
    member: Member,
    draft: Draft,
    segment: SealedSegment | None,
    counters: Counters,
    there: Sequence[Part],
    moment: Now,
) -> Part:
    """The attempt's number is new with its first part. Its expiry is the latest that any of them asked for."""
    if segment is None:
        counters.number += 1
    put_id = counters.number if segment is None else segment.put_id
    if not there:
        counters.number += 1
    lease = nanoseconds(member.lease)
    return Part(
        key=member.key,
        attempt=member.attempt,
        number=there[0].number if there else counters.number,
        rank=member.rank,
        world_size=member.world_size,
        put_id=put_id,
        segment=segment.segment if segment else 0,
        size=segment.size if segment else 0,
        start=segment.start if segment else 0,
        expect=draft.expect,
        lease=lease,
        expires=max([moment.clock + lease, *[other.expires for other in there]]),
        boot=moment.boot,
    )


def _other_world(part: Part, other: Part) -> ShardMismatchError:
    key = part.key.decode()
    return ShardMismatchError(
        f"{key!r}: attempt {part.attempt!r} has {other.world_size} ranks by rank {other.rank}, and "
        f"{part.world_size} by rank {part.rank}: name another attempt after a restart with other ranks",
        key=key,
    )
