"""The engine's `Elsewhere`: a root asks it where the store goes on beyond this host, by the rules.

A process has one for each root, with its own session at each owner, and its own connections. A forked child makes
another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from memstore import engine
from memstore.distributed import catalog, rules
from memstore.distributed.client.driving import BegunWait, drive
from memstore.distributed.links import CLIENT, Links, hello_of_this_process, secret_of
from memstore.distributed.rules import (
    KEY_LIMIT,
    LONGEST_NAME,
    ROWS_LIMIT,
    Client,
    DeadlinePassed,
    Entry,
    Member,
    Place,
    PutPart,
    Standing,
    Steps,
    Tables,
    fitting,
    give_up_part,
    group_of,
    groups_of,
    is_unsealed,
    look_up,
    look_up_versions,
    own_standing,
    page,
    put_part,
    read_all,
    read_version,
    turn,
    versions_of,
    wait_any,
    wait_any_of,
    wait_there,
    waiting,
)
from memstore.distributed.transfers import Transfers
from memstore.engine import (
    LOOK_EVERY,
    MOST_FOR_VALUES,
    SMALL,
    AttemptOutcome,
    Change,
    Failure,
    MappedEntry,
    Merge,
    Participant,
    PendingPart,
    Record,
    Root,
    SealedSegment,
    boot_clock,
    damaged_entry,
    deadline_after,
    files_of,
    map_entry,
)
from memstore.errors import (
    CorruptionError,
    CrossHostError,
    HomeUnavailableError,
    PartialCommitError,
    ShardMismatchError,
    StaleMembershipError,
    StorageError,
    StoreTimeoutError,
    UnknownOutcomeError,
)

Result = TypeVar("Result")

_GROUPS = 1 << 16  # that are remembered
_TO_ASK = 0.1  # seconds that a call has at least which asks another host, also with a timeout of 0
_TO_END = 0.5  # seconds for the owners to hear that a session ends
_TO_OPEN = 5.0  # seconds for the store's mutex, when tables are opened that came since, of a call without a deadline
_SEEN_KEYS = 1024
_LARGEST_SEEN = 1 << 16  # bytes of an entry that is kept
_LONGEST_LENT = 600.0  # seconds that no audit asks after what was lent for a change
_MOST_UNANSWERED = 64
_TO_ANSWER = 0.25  # seconds for an owner to say, at the end of a wait, that there is nothing yet
_A_LOOK = 0.1  # seconds that one more look may take


def open_elsewhere(root: Root) -> OtherHosts:
    """Raises SecretError where the secret's file can't be used."""
    return OtherHosts(root, Links(secret=secret_of(root.state), kind=CLIENT, hello=hello_of_this_process()))


# --- what this host owns ----------------------------------------------------------------------------------------------


class OwnedHere:
    """One reading of the catalog. It is never changed, but for the groups, of which more come.

    Attributes:
        membership: the number of the catalog's counters that it was read under. While the catalog has it, no group of
            these has left this host.
        may_commit: this host is a member.
        groups: that were asked after, and that this host owns. Puts look into it.
        roster: of that moment, if values of some groups are to lie on a second host.
    """

    def __init__(self, membership: int, standing: Standing) -> None:
        self.membership = membership
        self.may_commit = standing.may_change
        self.roster = standing.roster if standing.roster.policies else None
        self.groups: set[bytes] = set()


def _read_owned(tables: Tables, groups: Sequence[bytes], known: OwnedHere | None) -> OwnedHere | None:
    """Adds to what is known the groups that this host owns, and that don't leave it. None: nobody serves the root."""
    if known is None or tables.membership() != known.membership:
        standing = tables.standing()
        if standing is None:
            return None
        known = OwnedHere(tables.membership(), standing)
    if len(known.groups) >= _GROUPS:
        known = OwnedHere(known.membership, own_standing(tables))
    known.groups.update(group for group in groups if tables.owned(group) is not None and tables.leaving(group) is None)
    return known


# --- gets with `max_age` ----------------------------------------------------------------------------------------------


class SeenEntries:
    """Entries that this process has looked up lately. Thread-safe: a step is one call into C, or may be lost."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, tuple[float, Entry]] = OrderedDict()

    def note(self, key: bytes, entry: Entry, looked: float) -> None:
        """`looked` is when its owner was asked, monotonic: the entry is not older."""
        if len(entry.body) <= _LARGEST_SEEN:
            self._entries[key] = (looked, entry)
            if len(self._entries) > _SEEN_KEYS:
                self._entries.popitem(last=False)

    def within(self, key: bytes, max_age: float) -> Entry | None:
        """Returns an entry that was the present one less than `max_age` seconds ago."""
        looked, entry = self._entries.get(key, (0.0, None))
        return entry if time.monotonic() - looked < max_age else None

    def forget(self, keys: Sequence[bytes]) -> None:
        """Notes that this process has changed them."""
        for key in keys:
            self._entries.pop(key, None)


# --- bytes of entries, mapped -----------------------------------------------------------------------------------------


class EntryReading:
    """One call that maps entries, and looks them up again where their bytes are gone.

    Args:
        may_be_replaced: versions that were replaced, and are kept, are read too.
    """

    def __init__(
        self,
        root: Root,
        members: Callable[[bytes], Member | None],
        transfers: Transfers,
        deadline: float,
        *,
        may_lock: bool,
        lazily: bool,
        may_be_replaced: bool = False,
    ) -> None:
        self._root, self._members, self._transfers = root, members, transfers
        self._deadline, self._may_lock, self._lazily = deadline, may_lock, lazily
        self._is_live = not may_be_replaced
        self._misfits: set[tuple[bytes, Entry]] = set()

    def map(self, key: bytes, entry: Entry) -> MappedEntry | None:
        """Maps an entry. Returns None where its bytes aren't there: replaced since the lookup, at a first try.

        Raises:
            CrossHostError: its bytes lie in files of others, on another host.
            CorruptionError: the entry can't be one; or its bytes aren't what it says.
        """
        record = catalog.record_of(entry, self._root.member_id())
        reads_lazily = self._lazily and not self._root.storage.maps_at_once
        if record.hosts is None and not (reads_lazily and record.segments):
            with self._root.reading():
                held = map_entry(self._root, key, record, live=self._is_live)
            return held or self._missed(key, entry, record)
        if record.is_mutable:
            return MappedEntry(record)  # its reader refuses it, or opens it in place
        held = self._transfers.hold(key, record, self._deadline, may_lock=self._may_lock, lazily=self._lazily)
        return held or self._missed(key, entry, record)

    def _missed(self, key: bytes, entry: Entry, record: Record) -> None:
        """Its bytes are not there. The first time they may have been replaced.

        Hosts are told to let go of a version after it was replaced. So one that is still the present version after its
        bytes were missed was the present one then, too.
        """
        if (key, entry) not in self._misfits:
            self._misfits.add((key, entry))
        elif record.hosts is None:
            raise damaged_entry(self._root, key, record)
        elif self._root.storage.sees_all_hosts:
            self._check_may_come(key, record)
        else:
            raise self._damaged_elsewhere(key, record.hosts)

    def _check_may_come(self, key: bytes, record: Record) -> None:
        """Files of other hosts come into sight when the storage likes. Raises StorageError when the time is over."""
        self._root.check_in_place()
        if time.monotonic() + _A_LOOK < self._deadline:
            return
        name, paths = key.decode(), files_of(self._root, record)
        raise StorageError(
            f"{name!r}: what another host has put can't be seen on host {os.uname().nodename} within the timeout, or "
            f"not whole: {' or '.join(paths)}: is the same storage mounted on both? Does it cache for longer than the "
            "timeout (NFS: actimeo)? memstore verify on that host tells whether the files are whole",
            key=name,
            path=paths[0],
            host=os.uname().nodename,
        )

    def _damaged_elsewhere(self, key: bytes, hosts: Sequence[bytes]) -> CorruptionError:
        name, where = key.decode(), " or ".join(_label_of(self._members(host)) for host in dict.fromkeys(hosts))
        return CorruptionError(
            f"{name!r}: its bytes are missing, or another put's, on {where}, and no newer version has replaced it: run "
            "memstore verify there",
            key=name,
        )


def _label_of(member: Member | None) -> str:
    return "a host that was removed" if member is None else member.label


# --- the questions ----------------------------------------------------------------------------------------------------


class _Standings:
    """Reads the catalog's row of the cluster. It refers to nothing of what asks it.

    So what a closed store had goes at once, its files too, and not when Python next looks for circles.
    """

    def __init__(self, root: Root) -> None:
        self._root = root

    def read(self) -> Standing:
        """Raises StaleMembershipError."""
        standing = catalog.look(self._root, lambda tables: tables.standing(), deadline_after(_TO_OPEN))
        if standing is None:
            raise _unknown_cluster(self._root)
        return standing

    def member_of(self, member: bytes) -> Member | None:
        """Finds a member as the catalog says now."""
        return self.read().roster.member(member)


def _unknown_cluster(root: Root) -> StaleMembershipError:
    return StaleMembershipError(f"{root.path} is served, and doesn't say by whom: serve it anew")


class OtherHosts:
    """The way to other hosts of a root, in one process: an `engine.Elsewhere`."""

    def __init__(self, root: Root, links: Links) -> None:
        self._root, self._links = root, links
        self._member = root.member_id()
        self._standings = _Standings(root)
        self._owned: OwnedHere | None = None
        self._client = Client()
        self._unanswered: OrderedDict[tuple[bytes, str, int], PutPart] = OrderedDict()  # parts
        self._transfers = Transfers(root, links, self._standings.member_of)
        self._seen = SeenEntries()

    # --- who the owners are -------------------------------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def membership(self) -> int:
        return 0 if self._owned is None else self._owned.membership

    def take_in(self, deadline: float | None = None) -> None:
        self._take_in((), deadline)

    def _take_in(self, groups: Sequence[bytes], deadline: float | None) -> OwnedHere:
        until = deadline_after(_TO_OPEN) if deadline is None else deadline
        known = self._owned
        owned = catalog.look(self._root, lambda tables: _read_owned(tables, groups, known), until)
        if owned is None:
            raise _unknown_cluster(self._root)
        self._owned = owned
        return owned

    def membership_for(self, keys: Sequence[bytes], deadline: float | None = None) -> int | None:
        owned = self._owned
        if owned is not None and len(keys) == 1 and keys[0].partition(b"/")[0] in owned.groups:  # every put comes here
            return owned.membership if owned.may_commit else None
        groups = groups_of(keys)
        if owned is None or not owned.groups.issuperset(groups):
            owned = self._take_in(groups, deadline)
        return owned.membership if owned.may_commit and owned.groups.issuperset(groups) else None

    def replicates(self, keys: Sequence[bytes]) -> bool:
        roster = None if self._owned is None else self._owned.roster
        return roster is not None and any(roster.policy_of(group) is not None for group in groups_of(keys))

    def check_one_owner(self, keys: Sequence[bytes], deadline: float) -> None:
        groups, owned = groups_of(keys), self._owned
        if owned is None or not owned.groups.issuperset(groups):
            owned = self._take_in(groups, deadline)
        own, client = self._member, self._client
        owners = {own if group in owned.groups else client.known_owner(group) for group in groups}
        if len(owners - {None}) > 1:
            self._drive(client.check_one_owner(groups), deadline)

    def known_owner(self, key: bytes) -> bytes | None:
        owner = self._client.known_owner(group_of(key))
        if owner is None and self.membership_for((key,)) is not None:
            owner = self._member
        return owner

    def is_recovered(self, key: bytes, version: int) -> bool:
        group = group_of(key)
        grant = catalog.look(self._root, lambda tables: tables.owned(group), deadline_after(_TO_OPEN))
        grant = grant or self._client.known_grant(group)
        return grant is not None and version >> rules.EPOCH_BITS < grant.recovered

    def owners_of(self, keys: Sequence[bytes], deadline: float) -> list[bytes | None]:
        found = self._drive(self._client.owners_of(groups_of(keys)), deadline)
        return [found[group_of(key)] for key in keys]

    def cluster(self) -> bytes:
        return self._standings.read().roster.cluster

    def name_of(self, member: bytes) -> str:
        return _label_of(self._standings.member_of(member))

    def is_member(self, member: bytes) -> bool:
        return self._standings.member_of(member) is not None

    # --- changes ------------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], deadline: float) -> list[int]:
        keys, deadline = [change.key for change in changes], _at_least(deadline)
        asked = [catalog.change_of(change, self._member) for change in changes]
        sealed = tuple(itertools.chain.from_iterable(change.segments for change in changes))
        steps = self._client.commit(asked, _audited_from(deadline))
        values = [len(change.content.inline or b"") for change in changes if change.content is not None]
        most = MOST_FOR_VALUES if max(values, default=0) > SMALL else None
        try:
            return list(drive(steps, self._root, self._links, deadline, sealed=sealed, most=most))
        finally:
            self._seen.forget(keys)

    def is_unsealed(self, key: bytes, segment: int, put_id: int, deadline: float) -> bool:
        deadline = _at_least(deadline)
        place = Place(self._member, put_id, segment)
        steps = is_unsealed(self._client, key, place, _audited_from(deadline))
        try:
            return drive(steps, self._root, self._links, deadline)
        except (HomeUnavailableError, UnknownOutcomeError) as error:
            name = key.decode()
            raise HomeUnavailableError(
                f"{name!r}: a seal of it was cut off, and only the key's owner knows whether it was made, so nobody "
                f"may write rows until that answers: {error}",
                key=name,
            ) from error

    # --- reads --------------------------------------------------------------------------------------------------------

    def hold(
        self,
        keys: Sequence[bytes],
        deadline: float,
        *,
        may_lock: bool = True,
        lazily: bool = False,
        max_age: float | None = None,
    ) -> list[MappedEntry | None]:
        deadline = _at_least(deadline)
        member_of, transfers = self._standings.member_of, self._transfers
        reading = EntryReading(self._root, member_of, transfers, deadline, may_lock=may_lock, lazily=lazily)
        if max_age and len(keys) == 1:
            entry = self._seen.within(keys[0], max_age)
            held = None if entry is None else reading.map(keys[0], entry)
            if held is not None:
                return [held]
        looked = time.monotonic()

        def fetch(key: bytes, entry: Entry) -> Steps[MappedEntry | None]:
            held = reading.map(key, entry)
            if held is not None and max_age:
                self._seen.note(key, entry, looked)
            return held
            yield  # steps, as the rules want it, and none of them

        found = self._drive(read_all(self._client, keys, fetch), deadline)
        return [None if one is None else one[1] for one in found]

    def hold_one(
        self, key: bytes, version: int, deadline: float, *, may_lock: bool = True, lazily: bool = False
    ) -> MappedEntry | None:
        deadline = _at_least(deadline)
        members, transfers = self._standings.member_of, self._transfers
        reading = EntryReading(
            self._root, members, transfers, deadline, may_lock=may_lock, lazily=lazily, may_be_replaced=True
        )

        def fetch(key: bytes, entry: Entry) -> Steps[MappedEntry | None]:
            return reading.map(key, entry)
            yield  # steps, as the rules want it, and none of them

        self._root.catalog.open_optional()
        return self._drive(read_version(self._client, key, version, fetch), deadline)

    def versions(self, key: bytes, deadline: float) -> list[int]:
        self._root.catalog.open_optional()
        return list(self._drive(versions_of(self._client, key), deadline))

    def version_records(self, key: bytes, deadline: float) -> list[Record]:
        versions = self.versions(key, deadline)
        entries = self._drive(look_up_versions(self._client, key, versions), deadline)
        return [catalog.record_of(entry, self._member) for entry in entries if entry is not None]

    def seen_from_here(self, member: bytes, record: Record) -> Record:
        return catalog.record_of(catalog.entry_of(record, member), self._member)

    def hold_version(self, key: bytes, record: Record, deadline: float, *, lazily: bool) -> MappedEntry | None:
        may_lock, deadline, held = self._root.lock is not None, _at_least(deadline), None
        left: HomeUnavailableError | None = None
        try:
            held = self._transfers.hold(key, record, deadline, may_lock=may_lock, lazily=lazily)
        except HomeUnavailableError as error:
            if not record.description or all(map(self.is_member, record.hosts or ())):
                raise
            left = error
        if held is not None or not record.description:
            return held
        (entry,) = self._drive(look_up_versions(self._client, key, [record.version]), deadline)
        if entry is None:
            if left is not None:
                raise left
            return None
        members, transfers = self._standings.member_of, self._transfers  # its host was drained: the version has moved
        reading = EntryReading(
            self._root, members, transfers, deadline, may_lock=may_lock, lazily=lazily, may_be_replaced=True
        )
        return reading.map(key, entry)

    def records(self, keys: Sequence[bytes], deadline: float) -> list[Record | None]:
        found: dict[bytes, Record | None] = {}
        left: list[bytes] = list(keys)
        while left:
            owner_of: dict[bytes, bytes | None] = dict.fromkeys(left)
            if len(groups_of(left)) > 1:
                owner_of = dict(zip(left, self.owners_of(left, deadline), strict=True))
            part = [key for key in left if owner_of[key] == owner_of[left[0]]][:ROWS_LIMIT]
            try:
                entries = self._drive(look_up(self._client, part), deadline)
            except CrossHostError:  # they got owners meanwhile
                if len(groups_of(part)) == 1:
                    raise
                continue
            found.update(zip(part, map(self._record_of, entries), strict=True))
            left = [key for key in left if key not in found]
        return [found[key] for key in keys]

    def _record_of(self, entry: Entry | None) -> Record | None:
        return None if entry is None else catalog.record_of(entry, self._member)

    def keys(
        self, prefix: bytes, after: bytes, limit: int, deadline: float, silent: dict[bytes, str] | None = None
    ) -> list[tuple[bytes, int]]:
        if len(prefix) > KEY_LIMIT:  # no key starts with it, and no message may say it
            return []
        left_out: dict[bytes, Member] | None = None
        if silent is not None:
            members = {member: self._standings.member_of(member) for member in silent}
            left_out = {id: member for id, member in members.items() if member is not None}
        found = self._drive(page(self._client, prefix, after, min(limit, ROWS_LIMIT), left_out), deadline)
        if silent is not None and left_out is not None:
            silent.update({id: member.label for id, member in left_out.items()})
        return found

    def wait(self, key: bytes, newer_than: int, deadline: float) -> int | None:
        try:
            return drive(wait_there(self._client, key, newer_than), self._root, self._links, deadline)
        except DeadlinePassed:
            return None

    def begin_wait(self, key: bytes, newer_than: int, told: Callable[[], None], deadline: float) -> BegunWait:
        steps = wait_there(self._client, key, newer_than)
        return BegunWait(self._root, self._links, steps, told, deadline)

    def wait_any(self, prefix: bytes, newer_than: Mapping[bytes, int] | int, deadline: float) -> dict[bytes, int]:
        return self._drive(wait_any(self._client, prefix, newer_than), deadline)

    def begin_wait_any(
        self, prefix: bytes, newer_than: Mapping[bytes, int] | int, told: Callable[[], None], deadline: float
    ) -> BegunWait:
        def steps() -> Steps[int]:
            found = yield from wait_any(self._client, prefix, newer_than)
            return max(found.values())

        return BegunWait(self._root, self._links, steps(), told, deadline)

    def wait_any_of(self, keys: Sequence[bytes], newer_than: Mapping[bytes, int] | int, deadline: float) -> None:
        with contextlib.suppress(DeadlinePassed):
            drive(wait_any_of(self._client, keys, newer_than), self._root, self._links, deadline)

    def begin_wait_any_of(
        self, keys: Sequence[bytes], newer_than: Mapping[bytes, int] | int, told: Callable[[], None], deadline: float
    ) -> BegunWait:
        return BegunWait(self._root, self._links, wait_any_of(self._client, keys, newer_than), told, deadline)

    def _drive(self, steps: Steps[Result], deadline: float) -> Result:
        return drive(steps, self._root, self._links, _at_least(deadline))

    # --- the share of this process's ranks in sharded puts: rules/sharded.py ------------------------------------------

    def prepare(
        self, member: Participant, expect: int | None, segment: SealedSegment | None, content: bytes, deadline: float
    ) -> AttemptOutcome | Participant:
        if len(member.attempt) > LONGEST_NAME:
            raise ValueError(f"attempt has {len(member.attempt):,} characters, and may have {LONGEST_NAME:,}")
        part = engine.attempts.new_part(member, expect, segment, self._member)
        own = PutPart(part)
        steps = put_part(self._client, own, content, _audited_from(deadline))
        try:
            sealed = () if segment is None else (segment,)
            outcome = drive(steps, self._root, self._links, deadline, sealed=sealed)
        except StoreTimeoutError as error:  # its file may be lent: the next put must not take it for its own
            raise HomeUnavailableError(str(error), key=member.key.decode()) from error
        finally:
            if own.lane is not None:
                self._note_unanswered((member.key, member.attempt, member.rank), own)
        if outcome is not None:
            return outcome
        assert own.owner is not None, "a part that was taken in has an owner"
        return member._replace(number=own.number, owner=own.owner)

    def _note_unanswered(self, name: tuple[bytes, str, int], own: PutPart) -> None:
        """Notes a part until it is given up. Those that nobody gives up leave their lanes to later calls."""
        before = self._unanswered.pop(name, None)
        self._unanswered[name] = own
        if before is None and len(self._unanswered) > _MOST_UNANSWERED:
            before = self._unanswered.popitem(last=False)[1]
        if before is not None and before.lane is not None:
            self._client.free_lane(before.lane)

    def _put_part(self, member: Participant) -> PutPart:
        """Makes what a process knows of its part. An attempt without an owner began before this host was served."""
        owner = member.owner or (self._member if member.number else None)
        return PutPart(engine.attempts.new_part(member, None, host=self._member), owner, member.number)

    def outcome_of(
        self, member: Participant, merge: Merge, waits_until: float, deadline: float
    ) -> AttemptOutcome | None:
        """Looks at the attempt until it has an outcome, or nobody waits any more.

        Who finds all parts later than at its first look leaves them to who put the last.
        """
        own, body_of = self._put_part(member), self._body_of(member, merge)
        doorbell = self._root.doorbell
        bell = doorbell.bell(member.key)
        publish_at, milliseconds, was_complete = time.monotonic(), 0, False
        while True:
            seen = doorbell.load(bell)
            publishes = time.monotonic() >= min(publish_at, waits_until)
            steps = turn(self._client, own, body_of, milliseconds, was_complete=was_complete, publishes=publishes)
            found = drive(steps, self._root, self._links, max(waits_until + _TO_ANSWER, deadline))
            if isinstance(found, AttemptOutcome):
                return found
            left = waits_until - time.monotonic()
            if left <= 0:
                return None
            if not was_complete:
                publish_at = time.monotonic() + LOOK_EVERY
            was_complete = len(found.parts) == member.world_size
            if own.owner == self._member:
                doorbell.wait(bell, seen, min(LOOK_EVERY, left))
            else:
                milliseconds = max(int(min(LOOK_EVERY, left) * 1000), 1)

    def _body_of(self, member: Participant, merge: Merge) -> rules.Merge:
        def body_of(parts: Sequence[PendingPart], contents: Sequence[bytes]) -> bytes | Failure:
            try:
                content = merge(parts, contents)
            except (ShardMismatchError, PartialCommitError) as failure:
                return fitting(engine.attempts.failure_of(failure))
            body = catalog.change_of(engine.Change(member.key, content), self._member).body
            assert body is not None, "a content has a body"
            return body

        return body_of

    def give_up(self, member: Participant, failure: engine.AttemptFailure, deadline: float) -> AttemptOutcome:
        own = self._unanswered.pop((member.key, member.attempt, member.rank), None)
        if own is None or member.number:
            own = self._put_part(member)
        steps = give_up_part(self._client, own, fitting(engine.attempts.failure_of(failure)))
        return drive(steps, self._root, self._links, deadline)

    def pending(self, key: bytes | None, deadline: float) -> list[tuple[PendingPart, float]]:
        found = drive(waiting(self._client, key), self._root, self._links, deadline)
        return [(part, (part.expires - one.now) / 1e9) for one in found for part in one.parts]

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        def connected(owner: bytes) -> Member | None:
            member = self._standings.member_of(owner)
            return None if member is None or self._links.hello_of(member.address) is None else member

        try:
            self._drive(self._client.end(connected), time.monotonic() + _TO_END)
        finally:
            self._transfers.close()
            self._links.close()


def _at_least(deadline: float) -> float:
    return max(deadline, time.monotonic() + _TO_ASK)


def _audited_from(deadline: float) -> int:
    """Returns when the time of a change is over, on this host's clock since boot."""
    now, left = boot_clock(), min(max(deadline - time.monotonic(), 0.0), _LONGEST_LENT)
    return now + int(left * 1e9)
