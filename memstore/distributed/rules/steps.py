"""How rules of several steps are written, and what they ask of a host's catalog.

Rules are generators that say what they need, and are given it. No step does I/O, waits, or looks at a clock: whoever
drives it does. A store's processes and the index process drive it with links and the catalog; the simulation with a
scheduler, which may end it at each step.

What is done in one `Transact` is one transaction under the store's mutex: it is there wholly or not at all, also after
a kill. The engine's catalog has `Tables`, and the simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from memstore.distributed.rules.messages import Answer, Place, Request
from memstore.distributed.rules.nouns import Backup, Entry, Grant, Member, Ownership, Standing
from memstore.engine import AttemptOutcome, AttemptRows, KeptVersion, PendingPart
from memstore.errors import CorruptionError

Result = TypeVar("Result")


class Send(msgspec.Struct, frozen=True):
    """Send a request. None as its answer: nobody knows whether it came; NOT_SENT: it didn't, and won't.

    Attributes:
        member: that must answer there; None: whoever does.
        within: seconds that the answer may take, at most; None: as long as there is time. It is for requests that may
            be repeated: None as the answer means that this time has passed, and a link that broke is as NOT_SENT.
    """

    address: str
    member: bytes | None
    request: Request
    within: float | None = None


class Race(msgspec.Struct, frozen=True):
    """Send several requests at once. What comes first, and its answer, is the answer; the others are given up."""

    sends: tuple[Send, ...]


class Gather(msgspec.Struct, frozen=True):
    """Send several requests at once, and wait for all of them. Their answers are a list, in this order.

    Attributes:
        meanwhile: steps that are taken while the answers are on their way; they send nothing.
    """

    sends: tuple[Send, ...]
    meanwhile: Any = None


class Transact(msgspec.Struct, frozen=True):
    """Call this in one transaction of the host's catalog.

    Attributes:
        is_read: it changes nothing, so the store's mutex isn't needed. A read by a new grant may find that it has to
            serve what was handed over: then it is called again, in a transaction that changes.
    """

    action: Callable[[Tables], Any]
    is_read: bool = False


class Pause(msgspec.Struct, frozen=True):
    seconds: float


Steps = Generator[Send | Race | Gather | Transact | Pause, Any, Result]


class NotSent:
    """As an answer: there was no connection."""


NOT_SENT = NotSent()


def send(to: Member | str, request: Request) -> Steps[Answer | None]:
    """Returns the answer, if there is one."""
    answer = yield from sent(to, request)
    return None if isinstance(answer, NotSent) else answer


def sent(to: Member | str, request: Request) -> Steps[Answer | NotSent | None]:
    """Sends as `send` does, for whom it matters whether the request may have come."""
    if isinstance(to, str):
        return (yield Send(to, None, request))
    return (yield Send(to.address, to.id, request))


def send_all(
    requests: Sequence[tuple[Member, Request]], meanwhile: Steps[None] | None = None
) -> Steps[list[Answer | None]]:
    """Sends to several members at once. Returns their answers in this order; None: there is none.

    Args:
        meanwhile: as of `Gather`.
    """
    if not requests:
        if meanwhile is not None:
            yield from meanwhile
        return []
    answers = yield Gather(tuple(Send(to.address, to.id, request) for to, request in requests), meanwhile)
    return [None if isinstance(answer, NotSent) else answer for answer in answers]


def side_by_side(all_steps: Sequence[Steps[Result]]) -> Steps[list[Result]]:
    """Runs several steps whose messages go at once, each round of them. All else is done one after the other.

    Returns their results in this order.
    """
    results: dict[int, Result] = {}
    values: dict[int, Any] = dict.fromkeys(range(len(all_steps)))
    try:
        while values:
            sends: dict[int, Send] = {}
            for number, value in values.items():
                try:
                    action = all_steps[number].send(value)
                    while not isinstance(action, Send):
                        action = all_steps[number].send((yield action))
                    sends[number] = action
                except StopIteration as end:
                    results[number] = end.value
            answers: list[Any] = []
            if len(sends) == 1:
                answers.append((yield next(iter(sends.values()))))
            elif sends:
                answers += yield Gather(tuple(sends.values()))
            values = dict(zip(sends, answers, strict=True))
    finally:
        for steps in all_steps:
            steps.close()
    return [results[number] for number in range(len(all_steps))]


def transact(action: Callable[[Tables], Result]) -> Steps[Result]:
    return (yield Transact(action))


def view(action: Callable[[Tables], Result]) -> Steps[Result]:
    """Transacts what changes nothing."""
    return (yield Transact(action, is_read=True))


def pause(seconds: float) -> Steps[None]:
    yield Pause(seconds)


def own_standing(tables: Tables) -> Standing:
    """Returns what this host, which is a member, knows of its cluster."""
    standing = tables.standing()
    assert standing is not None, "a member stays one"
    return standing


# --- the catalog ------------------------------------------------------------------------------------------------------


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """A segment of this host that a record of another owner names, or may name soon.

    Attributes:
        owner: the member that was asked to name it.
        session, lane, number: of the call that asks for it; session 0: there is none, the group was handed over.
        until: on this host's clock since boot; nobody asks after it before.
    """

    key: bytes
    owner: bytes
    session: int = 0
    lane: int = 0
    number: int = 0
    until: int = 0


class LastCall(msgspec.Struct, frozen=True, array_like=True):
    """The last call of a lane, with what it was answered."""

    number: int
    answer: Answer


class Remembered(msgspec.Struct, frozen=True, array_like=True):
    """The memory of a key that isn't there: see `remembering.py`.

    Attributes:
        former: the removed member with which its last version was lost; empty: it was deleted, or lost otherwise.
        version: that one.
        number: of the grant by which this host owned its group then.
    """

    former: bytes = b""
    version: int = 0
    number: int = 0


class LeavingGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group of this host that is being handed over: see `directory.py`.

    Attributes:
        taker: the member that is to own it.
        of: the number of this host's grant.
        grant: the taker's, once the records here go; None: they are all here.
        served: the epoch in which the taker was when it served the group; 0: it doesn't yet.
    """

    taker: bytes
    of: int
    grant: Grant | None = None
    served: int = 0


class KeptGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group that this host is being handed: its records are kept beside those of this host, and not served.

    Attributes:
        of: the number of the giver's grant.
        version: as of `Give`; None: more records are to come.
        is_free: the giver has none of its records any more.
    """

    giver: bytes
    of: int
    version: int | None = None
    is_free: bool = False


class ReplacedRow(NamedTuple):
    """A version that was replaced and is kept, under the name of its row."""

    name: bytes
    key: bytes
    entry: Entry


class Tables(AttemptRows, Protocol):
    """One transaction. Parts of sharded puts name the hosts of their segments, this one too."""

    is_shared: bool  # all hosts read one storage, so bytes of members that were removed are there still

    @property
    def version(self) -> int: ...  # the last one that was assigned here
    @version.setter
    def version(self, version: int) -> None: ...

    # the records of the keys that this host owns, sorted
    def record(self, key: bytes) -> Entry | None: ...
    def head(self, key: bytes) -> Entry | None: ...  # the record, its body perhaps left out
    def put_record(self, key: bytes, entry: Entry) -> None: ...
    def put_records(self, entries: Sequence[tuple[bytes, Entry]]) -> dict[bytes, CorruptionError]: ...
    # Many at once, whom nobody is woken for. Returns which can't be records: they are not put
    def tell_all(self) -> None: ...  # whoever waits for a key here looks again
    def delete_record(self, key: bytes) -> None: ...
    def hold_to_quotas(self, keys: Sequence[bytes]) -> None: ...
    # If these take more from here on than their quotas allow, the transaction raises QuotaExceededError at its end
    def page(self, after: bytes, limit: int, prefix: bytes = b"") -> list[tuple[bytes, Entry | None]]: ...
    def heads(self, after: bytes, limit: int, prefix: bytes = b"") -> list[tuple[bytes, Entry | None]]: ...
    # A damaged record is a CorruptionError of `record`, and None in a page. Heads are entries without their bodies
    def groups(self, start: bytes, limit: int) -> tuple[list[bytes], bytes | None]: ...
    # Groups of keys from `start` on, and where the next ones begin (None: there are none). One may come twice
    def raise_version(self, key: bytes, version: int) -> None: ...  # the record stays as it is otherwise
    def put_damaged(self, key: bytes) -> None: ...  # what came in place of its record, from the owner before
    def pass_over(self, key: bytes, why: CorruptionError) -> None: ...  # people are told, once

    # versions that were replaced, and stay readable: see history.py
    def keep_replaced(self, key: bytes) -> None: ...  # the present version, which another one takes the place of
    def replaced_versions(self, key: bytes) -> list[KeptVersion]: ...  # the oldest first
    def replaced_version(self, key: bytes, version: int) -> Entry | None: ...
    def drop_replaced(self, key: bytes, version: int) -> Entry | None: ...  # its body perhaps left out; None: damaged
    def put_replaced(self, key: bytes, entry: Entry) -> None: ...  # its segments here are live, and lent no more
    def all_replaced(self, after: bytes, limit: int) -> list[ReplacedRow]: ...  # beyond a name, without bodies
    def pinned(self, key: bytes) -> frozenset[int]: ...  # versions that stay whatever is put

    # the cluster
    def standing(self) -> Standing | None: ...
    def put_standing(self, standing: Standing) -> None: ...
    @property
    def early_promise(self) -> tuple[bytes, int]: ...  # a cluster, and the term promised to it before it was a member
    @early_promise.setter
    def early_promise(self, promise: tuple[bytes, int]) -> None: ...
    def membership(self) -> int: ...  # a number that changes when this host begins or ends to own, or a group leaves it

    # what this host owns, and what is on its way from it or to it
    def owned(self, group: bytes) -> Grant | None: ...
    def put_owned(self, group: bytes, grant: Grant) -> None: ...
    def drop_owned(self, group: bytes) -> None: ...  # another `membership`
    def all_owned(self, after: bytes | None, limit: int) -> list[tuple[bytes, Grant]]: ...  # by group
    def leaving(self, group: bytes) -> LeavingGroup | None: ...
    def put_leaving(self, group: bytes, leaving: LeavingGroup) -> None: ...  # another `membership`
    def drop_leaving(self, group: bytes) -> None: ...
    def all_leaving(self) -> list[tuple[bytes, LeavingGroup]]: ...
    def kept(self, group: bytes) -> KeptGroup | None: ...
    def put_kept(self, group: bytes, kept: KeptGroup) -> None: ...
    def drop_kept(self, group: bytes) -> None: ...  # with all that is kept of it
    def all_kept(self, after: bytes | None = None, limit: int = 1 << 20) -> list[tuple[bytes, KeptGroup]]: ...
    def keep(self, rows: Mapping[bytes, Entry | None]) -> None: ...  # None: its record is damaged
    def kept_page(self, group: bytes, limit: int) -> list[tuple[bytes, Entry | None]]: ...
    def kept_of(self, keys: Sequence[bytes]) -> dict[bytes, Entry | None]: ...  # those that are kept
    def take_kept(self, group: bytes, limit: int) -> list[tuple[bytes, Entry | None]]: ...  # and keeps them no more

    # the directory, of the seed and its deputies
    @property
    def granted(self) -> int: ...  # the last number of a grant that was given here
    @granted.setter
    def granted(self, number: int) -> None: ...
    @property
    def mirrored(self) -> tuple[int, int]: ...  # a term, and up to which number all of its seed's rows are here
    @mirrored.setter
    def mirrored(self, mirrored: tuple[int, int]) -> None: ...
    def ownership(self, group: bytes) -> Ownership | None: ...
    def ownerships_of(self, groups: Sequence[bytes]) -> dict[bytes, Ownership]: ...  # that have a row
    def put_ownerships(self, rows: Sequence[Ownership]) -> None: ...
    def drop_ownership(self, group: bytes) -> None: ...
    def ownerships(self, after: int, limit: int) -> list[Ownership]: ...  # by number, beyond that one

    # sessions, and the last call of each of their lanes
    def new_session(self) -> int: ...
    def has_session(self, session: int) -> bool: ...
    def end_session(self, session: int) -> None: ...
    def sessions(self, after: int, limit: int) -> list[int]: ...  # by number, beyond that one
    def last_call(self, session: int, lane: int) -> LastCall | None: ...
    def put_last_call(self, session: int, lane: int, call: LastCall) -> None: ...

    # segments of this host
    def own(self, place: Place, key: bytes) -> None: ...  # a record here names it: it is live, and lent no more
    def lend(self, place: Place, lent: Lent) -> None: ...  # a record elsewhere names it: it is live
    def is_there(self, place: Place) -> bool: ...  # filled, and not retired
    def retire(self, place: Place) -> None: ...  # nothing names it; nothing happens if it is gone
    def lent(self, place: Place) -> Lent | None: ...
    def all_lent(self, after: int, limit: int) -> list[tuple[Place, Lent]]: ...  # beyond a put id

    # what this host has put, and others own; and what others keep of what this host owns: see recovery.py
    def backup(self, key: bytes) -> Backup | None: ...
    def put_backup(self, key: bytes, backup: Backup) -> None: ...
    def drop_backup(self, key: bytes) -> None: ...
    def backups_of(self, group: bytes, after: bytes, limit: int) -> list[tuple[bytes, Backup]]: ...  # beyond that key
    def all_backups(self, after: bytes, limit: int) -> list[tuple[bytes, Backup]]: ...
    def void(self, key: bytes) -> tuple[int, int]: ...  # no version up to this one is to be kept; and since when: or 0
    def put_void(self, key: bytes, version: int) -> None: ...
    def has_voids(self, until: int) -> bool: ...  # that are older than a time on this host's clock
    def drop_voids(self, until: int, limit: int) -> None: ...
    def keepers(self, key: bytes) -> tuple[tuple[bytes, int], ...]: ...  # hosts, and which version each may keep
    def put_keepers(self, key: bytes, keepers: Sequence[tuple[bytes, int]]) -> None: ...  # none: the row goes
    def keepers_of(self, keys: Sequence[bytes]) -> dict[bytes, tuple[tuple[bytes, int], ...]]: ...  # that have any
    def put_keepers_of(self, rows: Mapping[bytes, Sequence[tuple[bytes, int]]]) -> None: ...
    def all_keepers(self, after: bytes, limit: int) -> list[tuple[bytes, tuple[tuple[bytes, int], ...]]]: ...
    def is_unnoted(self, key: bytes) -> bool: ...  # a keeper may have an older version
    def put_unnoted(self, key: bytes, unnoted: bool) -> None: ...
    def all_unnoted(self, after: bytes, limit: int) -> list[bytes]: ...
    def lacking(self, key: bytes) -> bool | None: ...  # it is to have a replica, and has none; True: notes wait for it
    def put_lacking(self, key: bytes, holds: bool | None, batch: int = 0) -> None: ...  # None: none
    def batch_of(self, key: bytes) -> int: ...  # the call that put it with others, if it lacks a replica; 0: none
    def batch(self, number: int) -> tuple[bytes, ...]: ...  # the keys of such a call
    def put_batch(self, number: int, keys: Sequence[bytes]) -> None: ...  # none: the row goes
    def all_batches(self, after: int, limit: int) -> list[int]: ...  # beyond that number
    def all_lacking(self, after: bytes, limit: int) -> list[bytes]: ...
    def replica(self, key: bytes) -> tuple[bytes, int] | None: ...  # a host that has said so, and of which version
    def put_replica(self, key: bytes, replica: tuple[bytes, int] | None) -> None: ...

    def have_more(self, keys: Sequence[bytes]) -> frozenset[bytes]: ...

    # Which of these this host keeps a backup of, or notes that they lack a replica, or have one

    # names of what was lost with hosts that were removed, for people: LOST_LIMIT at most
    def note_lost(self, name: bytes, who: str) -> None: ...
    def count_lost(self) -> int: ...

    def drop_lost(self, name: bytes, who: str) -> None: ...  # unless it was lost with another host; "": whichever

    # keys that aren't there any more, while removed members may come back
    def remembers(self) -> bool: ...  # whether deletions are remembered
    def put_remembers(self, remembers: bool) -> None: ...
    def remembered(self, key: bytes) -> Remembered | None: ...  # a damaged row is one that lets nothing come back
    def put_remembered(self, key: bytes, row: Remembered) -> None: ...
    def forget(self, key: bytes) -> None: ...  # nothing happens if there is no row
    def all_remembered(self, limit: int) -> list[bytes]: ...
    def count_remembered(self) -> int: ...

    # segments of other hosts that are to be told that nothing names them
    def owe(self, place: Place) -> None: ...
    def settle(self, place: Place) -> None: ...
    def owed(self, limit: int) -> list[Place]: ...

    # sharded puts whose keys are owned here: the rest is `AttemptRows`
    def content(self, part: PendingPart) -> bytes: ...
    def outcomes(self) -> list[AttemptOutcome]: ...
