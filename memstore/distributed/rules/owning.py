"""The owner of a group: what it answers, calls that are made once or never, and how lent segments are let go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import repeat

import msgspec

from memstore.distributed.rules import history, remembering
from memstore.distributed.rules.history import dispose, is_here, passing_over
from memstore.distributed.rules.messages import (
    BYTES_LIMIT,
    ROWS_LIMIT,
    Answer,
    Commit,
    Committed,
    Done,
    Ended,
    Failed,
    FindOwners,
    FindVersions,
    Found,
    GiveUp,
    IsAt,
    IsNamed,
    Later,
    List,
    Listed,
    Lookup,
    Named,
    Never,
    NoSession,
    NotOwner,
    Owners,
    Place,
    Prepare,
    Prepared,
    Refused,
    Release,
    Request,
    Resolve,
    Stale,
    Wait,
    WaitAny,
)
from memstore.distributed.rules.nouns import (
    EPOCH_BITS,
    Call,
    Change,
    Entry,
    Grant,
    Member,
    Ownership,
    Standing,
    group_of,
    groups_of,
)
from memstore.distributed.rules.recovery import (
    ToKeep,
    are_there,
    drop_named,
    due,
    keep,
    let_go,
    note_batch,
    note_change,
    note_lacking,
)
from memstore.distributed.rules.steps import LastCall, Lent, Steps, Tables, own_standing, send, transact, view
from memstore.errors import CorruptionError, MemstoreError

# --- Answers and calls -----------------------------------------------------------------------------------------------
# Answers of an owner for the groups that it owns, and calls that are made once, or never.
#
# **Ownership.** What an owner's records hold, no other host may change. So a record that is found is right; who finds
# none asks whether this host owns the group. A request from elsewhere names the grant by which its sender knows the
# owner, and `admit` compares numbers:
#
# - the number is that of `owned`: it is the owner;
# - it is larger, of the present term, and above the floor: the directory has given it since, and its claimer may have
#   died. A change records it; a read need not;
# - else it is dead for good, and was not done: `NotOwner`.
#
# **Calls.** A client that wants changes of an owner opens a session there. In each lane of it one call is under way at
# a time, and the owner keeps the last call of each lane with its answer, which is written in the transaction of the
# change. So nothing is kept for longer than the session, and a repeated call finds its answer after any death of the
# index process.
#
# - A call of no session is refused for ever: session numbers never repeat.
# - A call below the last one of its lane is an old duplicate: its client has had an answer, or gave up, since it went
# on.
# - The last one itself gets its answer again, whoever owns the group by now.
#
# A session ends when its client says so, or when it has had no connection for an hour: no network keeps a message for
# so long. The hour is counted by looks, in memory: an index process that is started again begins anew. Between two
# looks it counts LOOK nanoseconds at most. So a process that was stopped, a host that slept, or a clock that jumps,
# which all keep clients from coming back too, ends nobody's session.


LAST = 3_600_000_000_000  # nanoseconds that a session lasts without a connection
LOOK = 60_000_000_000  # nanoseconds between two looks, as they are counted
_REPLICAS_EVERY = 8  # passes of an audit
_ENDED_AT_ONCE = 16  # sessions in one transaction: each has up to 256 calls
_SEALED_BY_NOBODY = "it was deleted while it was sealed: nothing was put"
_IS_MUTABLE = "it is a dataset or a replay buffer, whose rows are written in place: open it as such, or delete it"
REMOVED = Refused("this host was removed from the cluster", is_removed=True)


# --- is it the owner --------------------------------------------------------------------------------------------------


def admit(
    tables: Tables, standing: Standing, groups: Iterable[bytes], grants: Iterable[Grant], *, changes: bool
) -> Answer | None:
    """Returns why requests with these grants can't be answered here, or not yet; None if they can.

    Args:
        changes: it is for a change, which a group that leaves this host has none of any more.
    """
    if not standing.may_change:
        return REMOVED
    pairs = list(zip(groups, grants, strict=True))
    if any(is_unclaimed(tables, standing, group) for group, _ in pairs):
        return Later()
    for group, grant in pairs:
        own = tables.owned(group)
        if own is not None and own.number == grant.number:
            if changes and tables.leaving(group) is not None:
                return Later()
            continue
        if grant.term > standing.roster.term:
            return Later()  # it will hear of that seed
        if grant.term < standing.roster.term or grant.number <= max(standing.floor, own.number if own else 0):
            return NotOwner()
        if tables.leaving(group) is not None or not _is_open(tables, standing, group, grant):
            return Later()
    if changes:
        for group, grant in pairs:
            record_grant(tables, group, grant)
    return None


def record_grant(tables: Tables, group: bytes, grant: Grant) -> None:
    """Records a group as owned. Versions go on above those of any owner before, also of one that could not be asked."""
    own = tables.owned(group)
    if own is None or own.number < grant.number:
        tables.put_owned(group, grant)
        tables.version = max(tables.version, grant.epoch << EPOCH_BITS)


def _is_open(tables: Tables, standing: Standing, group: bytes, grant: Grant) -> bool:
    """Serves a page of what this host was handed of a group. Returns whether that was all, or there is nothing.

    The giver says when it has none of it any more: before that, its own processes may still read records there. One
    that was removed says nothing, and has nothing to say.
    """
    kept = tables.kept(group)
    if kept is None or tables.owned(group) is not None:
        return True
    if kept.of != grant.after:  # what was never handed over to the end
        tables.drop_kept(group)
        return True
    is_free = kept.is_free or kept.giver not in standing.roster.ids
    if (
        kept.version is None or not is_free or grant.epoch > standing.roster.epoch
    ):  # records may name hosts that are new
        return False
    page = tables.take_kept(group, ROWS_LIMIT)
    whole: dict[bytes, Entry] = {}
    for key, entry in page:
        if entry is None:
            tables.put_damaged(key)
        elif not entry.places or are_there(tables, standing, entry.places):
            whole[key] = entry
        else:  # that host was removed while the group was on its way
            with passing_over(tables, key):
                dispose(tables, standing, entry.places)
                for one in entry.replaced:
                    dispose(tables, standing, one.places)
            remembering.note(tables, Change(key, None))
            note_change(tables, standing, Change(key, None), 0)
    for key, error in tables.put_records(list(whole.items())).items():  # what can't be a record stops no other
        tables.pass_over(key, error)
        tables.put_damaged(key)
        del whole[key]
    for key, entry in whole.items():
        history.put_replaced(tables, standing, key, entry.replaced)
    more = whole if standing.roster.policy_of(group) is not None else tables.have_more(list(whole))
    for key, entry in whole.items():
        if key in more:
            let_go(tables, key, entry.places)
            note_lacking(tables, standing, Change(key, b"", is_mutable=entry.is_mutable), is_alone=False)
        for place in entry.places:
            if is_here(standing, place):
                with passing_over(tables, key):
                    tables.own(place, key)
    if len(page) == ROWS_LIMIT:
        return False
    tables.version = max(tables.version, kept.version)
    tables.drop_kept(group)
    record_grant(
        tables, group, grant
    )  # also for a read: nothing else says any more that these records were handed over
    first = group_heads(tables, group, b"", 1)
    if page and first and first[0][0] == page[0][0]:
        for key in whole:
            tables.tell(key)
    else:  # it had more than one page
        tables.tell_all()
    return True


# --- reading ----------------------------------------------------------------------------------------------------------


def look_up(tables: Tables, standing: Standing, request: Lookup) -> Answer:
    refused = admit(tables, standing, groups_of(request.keys), request.grants, changes=False)
    if refused is not None:
        return refused
    entries: list[Entry | None] = []
    nbytes = 0
    for entry in map(history.find, repeat(tables), request.keys, request.versions or repeat(0)):
        if request.brief:
            entries.append(entry and Entry(entry.version, b""))
            continue
        nbytes += 0 if entry is None else entry.nbytes
        if nbytes > BYTES_LIMIT and entries:
            break
        entries.append(entry)
    return Found(tuple(entries))


def find_versions(tables: Tables, standing: Standing, request: FindVersions) -> Answer:
    refused = admit(tables, standing, [group_of(request.key)], [request.grant], changes=False)
    return refused or Found(tuple(Entry(version, b"") for version in history.versions_of(tables, request.key)))


def version_of(tables: Tables, standing: Standing, request: Wait) -> Answer:
    """Returns the version, or 0 if there is none that the wait is for."""
    refused = admit(tables, standing, [group_of(request.key)], [request.grant], changes=False)
    if refused is not None:
        return refused
    entry = tables.head(request.key)
    return IsAt(entry.version if entry is not None and entry.version > request.newer_than else 0)


def list_page(tables: Tables, standing: Standing, request: List) -> Answer:
    refused = _admit_listing(tables, standing, request)
    if refused is not None:
        return refused
    page = tables.heads(request.after, request.limit, request.prefix)
    return Listed(tuple((key, entry.version if entry else 0) for key, entry in page), tables.version)


def news(tables: Tables, standing: Standing, request: WaitAny) -> Answer:
    """Returns a version of a key with a prefix, or 0 if none is new."""
    refused = _admit_listing(tables, standing, request)
    if refused is not None or tables.version <= request.newer_than:
        return refused or IsAt(0)
    after: bytes = b""
    while page := tables.heads(after, ROWS_LIMIT, request.prefix):
        after = page[-1][0]
        for _, entry in page:
            if entry is not None and entry.version > request.newer_than:
                return IsAt(entry.version)
    return IsAt(0)


def _admit_listing(tables: Tables, standing: Standing, request: List | WaitAny) -> Answer | None:
    """Compares the epoch, or with a "/" in the prefix the grant.

    A hand-over ends with an epoch. Until this host has heard of it, what it has given away would be missing here, and
    may be missing at the new owner, which was perhaps asked before it served it.
    """
    if request.grant is not None:
        return admit(tables, standing, [group_of(request.prefix)], [request.grant], changes=False)
    if standing.is_removed:
        return REMOVED
    position = request.term, request.epoch
    if position != standing.roster.position:
        return Stale(*standing.roster.position) if position < standing.roster.position else Later()
    is_on_its_way = any(leaving.grant is not None for _, leaving in tables.all_leaving())
    if standing.is_joining or is_on_its_way or any(one.heir == standing.member for one in standing.roster.departed):
        return Later()
    is_left = any(kept.giver not in standing.roster.ids for _, kept in tables.all_kept())
    return Later() if is_left else None


def are_named(tables: Tables, standing: Standing, request: Named) -> Answer:
    """Answers whether a record names a place, or a part that waits for others."""
    refused = admit(tables, standing, [group_of(request.key)], [request.grant], changes=False)
    return refused or IsNamed(is_named(tables, request.key, request.place) or _is_kept(tables, request))


def _is_kept(tables: Tables, request: Named) -> bool:
    """Returns whether a place has what its host is to keep of the key: the present version, in bytes of its own."""
    entry = tables.head(request.key)
    is_present = entry is not None and request.keeps == entry.version
    return is_present and (request.place.host, request.keeps) in tables.keepers(request.key)


def is_named(tables: Tables, key: bytes, place: Place) -> bool:
    try:
        entry = tables.head(key)
    except CorruptionError as error:  # it may name the place: that stays
        tables.pass_over(key, error)
        return True
    if (entry is not None and place in entry.places) or history.names(tables, key, place):
        return True
    return any(part.place == place for part in tables.parts(key))


def group_page(tables: Tables, group: bytes, after: bytes, limit: int) -> list[tuple[bytes, Entry | None]]:
    """Returns the next records of a group, in order. A damaged one is None."""
    return _of_group(tables.page, group, after, limit)


def group_heads(tables: Tables, group: bytes, after: bytes, limit: int) -> list[tuple[bytes, Entry | None]]:
    """Returns what `group_page` does, without bodies."""
    return _of_group(tables.heads, group, after, limit)


def _of_group(
    page: Callable[[bytes, int, bytes], list[tuple[bytes, Entry | None]]], group: bytes, after: bytes, limit: int
) -> list[tuple[bytes, Entry | None]]:
    found: list[tuple[bytes, Entry | None]] = []
    if group and not after:
        found = [row for row in page(b"", 1, group) if row[0] == group]
    return found + page(after, limit, group + b"/")


def is_unclaimed(tables: Tables, standing: Standing, group: bytes) -> bool:
    """Whether a root that joins has keys of a group that it must claim, or drop, before anything is said of it."""
    return standing.is_joining and tables.owned(group) is None and bool(group_heads(tables, group, b"", 1))


# --- changing ---------------------------------------------------------------------------------------------------------


def commit(tables: Tables, standing: Standing, request: Commit, copied: Sequence[Change] | None = None) -> Answer:
    """Makes a commit that another host has sent.

    Args:
        copied: its changes, with bytes that were copied to this host.
    """
    answered = answer_again(tables, request.call)
    if answered is not None:
        return answered
    keys = [change.key for change in request.changes]
    places = [place for change in request.changes for place in change.places]
    strange = are_strange(standing, request.call, places, keys[0])
    if any(_is_unheard(standing, request.call, change) for change in request.changes):
        return Later()
    if request.keeper not in (None, *standing.roster.ids) and request.call.epoch > standing.roster.epoch:
        return Later()  # who keeps it is new, and would be taken for one that is gone
    if isinstance(strange, Later):
        return strange
    refused = admit(tables, standing, groups_of(keys), request.grants, changes=strange is None)
    if refused is not None:
        return refused
    keepers = (request.keeper,) if request.keeper in standing.roster.ids else ()  # one that is gone keeps nothing
    answer = strange or apply(tables, standing, copied or request.changes, keepers)
    if isinstance(answer, Committed) and request.keeper is not None:
        answer = Committed(answer.versions, tuple(due(tables, keys).get(request.keeper, ())))
    return keep_answer(tables, request.call, answer)


def _is_unheard(standing: Standing, call: Call, change: Change) -> bool:
    """Returns whether this host hasn't heard yet that somebody brings back what a removed member had."""
    one = change.returns
    return (
        one is not None and (one.former, one.by) not in standing.roster.returns and call.epoch > standing.roster.epoch
    )


def are_strange(standing: Standing, call: Call, places: Iterable[Place], key: bytes) -> Failed | Later | None:
    """Returns why no record may name these bytes, which another host says that it has lent.

    Those of a host that is no member would stay for ever: what was removed is looked for once, after its removal.
    """
    places = tuple(places)
    hosts = {place.host for place in places}
    if any(not place.segment and standing.roster.is_leaver(place.host) for place in places):
        return Failed("CrossHostError", "its files are attached on a host that is being drained: they stay there", key)
    if standing.member in hosts:
        return Failed("CorruptionError", "its bytes are said to lie with the owner, which never put them", key)
    if hosts <= standing.roster.ids:
        return None
    if call.epoch > standing.roster.epoch:
        return Later()  # it will hear of that host
    return Failed("StaleMembershipError", "its bytes lie on a host that was removed from the cluster", key)


def commit_here(
    tables: Tables, membership: int, changes: Sequence[Change], grants: Sequence[tuple[bytes, Grant]] = ()
) -> Answer | None:
    """Makes a commit of a process of this host. Returns None if the groups may have left it: look again.

    Args:
        membership: under which the process found that this host owns all other groups.
        grants: of groups that this host is to own from now on.
    """
    if tables.membership() != membership:
        return None
    standing = tables.standing()
    if standing is not None and grants:
        refused = admit(tables, standing, *zip(*grants, strict=True), changes=True)
        if refused is not None:
            return refused
    return apply(tables, standing, changes)


def apply(
    tables: Tables,
    standing: Standing | None,
    changes: Sequence[Change],
    keepers: Collection[bytes] = (),
    *,
    is_alone: bool = True,
) -> Committed | Failed:
    """Makes all changes, or none.

    Args:
        standing: None where nobody serves the root.
        keepers, is_alone: hosts that keep what is put: see `recovery.note_change`.
    """
    found = [tables.head(change.key) for change in changes]
    here = ((one.key, place) for one in changes for place in one.places if is_here(standing, place))
    refused = next(filter(None, map(refused_change, changes, found)), None) or bytes_gone(tables, here)
    if refused is None and standing is not None:
        refused = next(filter(None, (_refused_return(tables, standing, change) for change in changes)), None)
    if refused is not None:
        return refused
    tables.hold_to_quotas([change.key for change in changes])
    versions: list[int] = []
    batch = 0 if standing is None or len(changes) == 1 else note_batch(tables, standing, changes)
    for change, old in zip(changes, found, strict=True):
        if standing is not None:
            remembering.note(tables, change)
        limits, is_kept = change.history, False
        if old is not None and not change.renews and (old.history is not None or limits is not None):
            limits = limits or (None if change.body is None else old.history)
            limits, is_kept = history.keep_replaced(tables, standing, change.key, limits), True
        elif limits is not None and limits[0] == 1:
            limits = None
        if change.body is None:
            versions.append(old.version if old is not None else 0)
            tables.delete_record(change.key)
            if standing is not None:
                note_change(tables, standing, change, 0)
        else:
            tables.version += 1
            versions.append(tables.version)
            if standing is not None:
                note_change(tables, standing, change, tables.version, keepers, is_alone=is_alone, batch=batch)
            whole = tables.record(change.key) if change.renews else None
            if whole is not None:
                tables.put_record(change.key, msgspec.structs.replace(whole, version=tables.version))
                continue
            entry = Entry(tables.version, change.body, change.places, change.is_mutable, limits)
            tables.put_record(change.key, entry)
            for place in change.places:
                if is_here(standing, place):
                    tables.own(place, change.key)
        if old is not None and not is_kept:
            dispose(tables, standing, old.places)
    return Committed(tuple(versions))


def refused_change(change: Change, old: Entry | None) -> Failed | None:
    """Returns why a change can't be made to what was found."""
    mutable = old.places[0].put_id if old is not None and old.is_mutable and old.places else 0
    if change.body is not None and (change.seals or not change.is_mutable) and change.seals != mutable:
        return Failed("MutableEntryError", _SEALED_BY_NOBODY if change.seals else _IS_MUTABLE, change.key)
    at = old.version if old is not None else 0
    if change.expect is not None and change.expect != at:
        return Failed("VersionConflictError", "", change.key, change.expect, at)
    if change.body is None and old is None and not change.missing_ok:
        return Failed("KeyNotFoundError", "", change.key)
    return None


def _refused_return(tables: Tables, standing: Standing, change: Change) -> Failed | None:
    if change.returns is None or remembering.may_return(tables, standing, change.key, change.returns):
        return None
    return Failed("VersionConflictError", "it was put or deleted since, or may have been", change.key)


def bytes_gone(tables: Tables, places: Iterable[tuple[bytes, Place]]) -> Failed | None:
    """Looks whether bytes of keys are here still. Returns why they can't be named, if they aren't.

    An audit gives back what was lent for longer than its call was to take, also if the client was only stopped.
    """
    for key, place in places:
        if not tables.is_there(place):
            return Failed("StoreTimeoutError", "its time was over, and its bytes have been given back", key)
    return None


# --- calls ------------------------------------------------------------------------------------------------------------


def answer_again(tables: Tables, call: Call | Resolve) -> Answer | None:
    """Returns what a call has been answered, or why it can't be made any more. None: it is a new one."""
    if not tables.has_session(call.session):
        return NoSession()
    last = tables.last_call(call.session, call.lane)
    if last is None or last.number < call.number:
        return None
    return last.answer if last.number == call.number else NoSession()


def session_of(request: Request) -> int | None:
    """Returns the session by which a client asks for a change. (Audits resolve calls of others.)"""
    call = request.call if isinstance(request, Commit | Prepare | GiveUp) else None
    return None if call is None else call.session


def keep_answer(tables: Tables, call: Call | Resolve, answer: Answer) -> Answer:
    tables.put_last_call(call.session, call.lane, LastCall(call.number, answer))
    return answer


def resolve(tables: Tables, request: Resolve) -> Answer:
    """Returns what became of a call. One that never came is over from here on."""
    return answer_again(tables, request) or keep_answer(tables, request, Never())


class Sessions:
    """Which sessions have had no connection, and for how long, since the index process was started.

    Args:
        clock: nanoseconds, of a clock that nobody sets.
        last, look: see LAST and LOOK.
    """

    def __init__(self, clock: Callable[[], int], *, last: int = LAST, look: int = LOOK) -> None:
        self._clock, self._last, self._look = clock, last, look
        self._looked = clock()
        self._counted = 0  # nanoseconds
        self._idle_since: dict[int, int] = {}  # in what was counted

    def run(self, connected: Callable[[], Collection[int]]) -> Steps[None]:
        """Looks once, and ends those whose time is over.

        Args:
            connected: sessions that have a connection, or had one since this was last called.
        """
        now = self._clock()
        self._counted += min(max(now - self._looked, 0), self._look)
        self._looked = now
        found, after = list[int](), 0
        while page := (yield from view(lambda tables, start=after: tables.sessions(start, ROWS_LIMIT))):
            found += page
            after = page[-1]
        here = connected()
        self._idle_since = {
            session: self._idle_since.get(session, self._counted) for session in found if session not in here
        }
        over = [session for session, since in self._idle_since.items() if self._counted - since >= self._last]
        for first in range(0, len(over), _ENDED_AT_ONCE):
            some = over[first : first + _ENDED_AT_ONCE]
            yield from transact(lambda tables, some=some: self._end(tables, some, connected()))

    def _end(self, tables: Tables, over: Collection[int], connected: Collection[int]) -> None:
        """Ends sessions, but for those whose clients have come back just now."""
        for session in connected:
            self._idle_since.pop(session, None)
        for session in over:
            if session not in connected:
                tables.end_session(session)


# --- Lent segments ---------------------------------------------------------------------------------------------------
# Segments of this host that records of other owners name: how they are let go.
#
# An owner that replaces a value owes its host a *release*, and tells it until it is acknowledged. What a client has
# lent for a put and never heard of again, or whose owner is gone, is found by an *audit*: the call is resolved, so that
# it can't be made any more, and the group's owner is asked whether it names the segment. If nobody owns the group,
# nothing names it.


log = logging.getLogger("memstore")


def give_back(places: Sequence[Place]) -> Steps[None]:
    """Gives back what was filled, or lent, for a call that has failed. It raises nothing: the real error is the
    call's."""

    def retire(tables: Tables) -> None:
        standing = tables.standing()
        for place in places:
            if is_here(standing, place):
                tables.retire(place)

    try:
        yield from transact(retire)
    except (MemstoreError, OSError) as error:  # the store may be what failed
        log.warning("bytes of a call that failed are left to an audit, or a sweep: %s", str(error))


def release(tables: Tables, standing: Standing, request: Release) -> Answer:
    """Retires what is lent. What records of this host name by now is not: the release is an old one then.

    A record has named a replica, too, until its owner had copied the bytes.
    """
    for place in request.places:
        with passing_over(tables, b"segment %016x" % place.segment):
            lent = tables.lent(place) if place.host == standing.member else None
            if lent is not None and not _is_replica(tables, lent.key, place):
                drop_named(tables, lent.key, place)
                tables.retire(place)
    return Done()


def _is_replica(tables: Tables, key: bytes, place: Place) -> bool:
    """Returns whether bytes are a replica's, which goes when its owner says that the version is replaced."""
    backup = tables.backup(key)
    return backup is not None and backup.is_replica and place in backup.places


def pay(is_pinned: Callable[[Place], bool]) -> Steps[None]:
    """Tells other hosts what they are owed, once."""
    standing, owed, untold = yield from view(
        lambda tables: (
            tables.standing(),
            tables.owed(ROWS_LIMIT),
            set(due(tables, tables.all_unnoted(b"", ROWS_LIMIT))),
        )
    )
    if standing is None:
        return
    for host in sorted({place.host for place in owed} - untold):  # what it keeps it is told of first
        places = tuple(place for place in owed if place.host == host and not is_pinned(place))
        member = standing.roster.member(host)
        answer = Done() if member is None else None
        if member is not None and places:
            answer = yield from send(member, Release(places))
        if isinstance(answer, Done):
            yield from transact(lambda tables, paid=places: [tables.settle(place) for place in paid])


class Audit:
    """Which lent segments are really named by records of other owners, since the index process was started.

    Args:
        clock: this host's clock since boot.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._losses = self._passes = 0
        self._seen: dict[Place, int] = {}  # and the version that this host keeps there; 0: none
        self._refused: dict[bytes, int] = {}  # of groups, the number of the grant that their owner has refused

    def run(self) -> Steps[None]:
        """Looks at what is due, once; at all of it again when a member was removed."""
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or standing.is_removed or standing.is_joining:
            return
        if self._losses != standing.losses:
            self._seen.clear()
        self._losses = standing.losses
        self._passes += 1
        now, after = self._clock(), 0
        while rows := (yield from view(lambda tables, start=after: tables.all_lent(start, ROWS_LIMIT))):
            after = rows[-1][0].put_id
            if standing.roster.policies and self._passes % _REPLICAS_EVERY == 0:
                yield from self._forget_replaced(rows)
            for place, lent in rows:
                if place not in self._seen and lent.until <= now:
                    yield from self._look_at(standing, place, lent)

    def look_again(self, places: Iterable[Place]) -> None:
        """Notes that these may be named no more."""
        for place in places:
            self._seen.pop(place, None)

    def _forget_replaced(self, rows: Sequence[tuple[Place, Lent]]) -> Steps[None]:
        """Looks again at bytes of which this host has kept a version, and keeps it no longer: no record named them."""
        kept = [(place, lent.key) for place, lent in rows if place in self._seen]
        found = yield from view(lambda tables: [_keeps(tables, key, place) for place, key in kept])
        self.look_again(place for (place, _), keeps in zip(kept, found, strict=True) if keeps != self._seen.get(place))

    def _look_at(self, standing: Standing, place: Place, lent: Lent) -> Steps[None]:
        if lent.session and not (yield from self._resolved(standing, lent)):
            return
        group = group_of(lent.key)
        answer = yield from send(standing.seed, FindOwners((group,), (self._refused.pop(group, 0),)))
        if not isinstance(answer, Owners) or not answer.rows:
            return
        row = answer.rows[0]
        if row is None or _has_nothing(standing, row):
            yield from transact(lambda tables: self._retire(tables, place, lent))
            return
        keeps = yield from view(lambda tables: _keeps(tables, lent.key, place))
        request = Named(lent.key, place, row.grant, keeps)
        owner = standing.roster.member(row.owner)
        if row.owner == standing.member:
            answer = yield from transact(lambda tables: are_named(tables, own_standing(tables), request))
        else:
            answer = None if owner is None else (yield from send(owner, request))
        if isinstance(answer, NotOwner):  # it was never recorded, and others since
            self._refused[group] = row.grant.number
        elif answer == IsNamed(named=False):
            yield from transact(lambda tables: self._retire(tables, place, lent))
        elif isinstance(answer, IsNamed):
            if owner is not None and owner.id != standing.member:
                yield from self._keep(owner, row, place, lent)
            self._seen[place] = keeps

    def _keep(self, owner: Member, row: Ownership, place: Place, lent: Lent) -> Steps[None]:
        """Keeps what the owner names, if the process that put it was killed before it could."""
        backup, now = yield from view(lambda tables: (tables.backup(lent.key), tables.now()))
        if backup is None or place not in backup.places:
            yield from keep(owner, [ToKeep(lent.key, 0, row.grant, place=place)], now, tries=1)

    def _resolved(self, standing: Standing, lent: Lent) -> Steps[bool]:
        """Returns whether it is known that the call isn't under way any more."""
        member = standing.roster.member(lent.owner)
        if member is None:
            return True
        if member.id == standing.member:
            request = Resolve(lent.session, lent.lane, lent.number)
            yield from transact(lambda tables: resolve(tables, request))
            return True
        answer = yield from send(member, Resolve(lent.session, lent.lane, lent.number))
        return isinstance(answer, Committed | Failed | Never | NoSession | Prepared | Ended)

    def _retire(self, tables: Tables, place: Place, lent: Lent) -> None:
        """Retires it, unless its client has lent it anew meanwhile, or a record here names it, or a part does."""
        with passing_over(tables, lent.key):
            if tables.lent(place) == lent and not is_named(tables, lent.key, place):
                drop_named(tables, lent.key, place)
                tables.retire(place)


def _keeps(tables: Tables, key: bytes, place: Place) -> int:
    """Returns the version that this host keeps in these bytes; 0: none."""
    backup = tables.backup(key)
    return backup.version if backup is not None and place in backup.places else 0


def _has_nothing(standing: Standing, row: Ownership) -> bool:
    """Returns whether this host owns a group without keys: it is drained, and who took the group was removed."""
    return row.owner == standing.member and standing.is_sealed
