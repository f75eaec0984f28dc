"""How a process finds the owner of a key, and changes keys, wherever they are owned.

A put of a new group claims it for this host. What is owned here is changed in one transaction, which compares
`membership`: the number changes when a group leaves this host. Owners elsewhere are remembered with their grants, which
they compare; absence is never remembered.

Whoever drives these steps throws `DeadlinePassed` into them when the call's time is over: in place of a message, which
isn't sent then, or of a pause. A change that may have been made by then raises UnknownOutcomeError; all other errors
say that nothing was changed, and won't be.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from memstore import errors
from memstore._wording import conflict, no_key
from memstore.distributed.rules import owning, replicas
from memstore.distributed.rules.messages import (
    BATCH_LIMIT,
    CALL_BYTES_LIMIT,
    ROWS_LIMIT,
    Answer,
    ClaimGroups,
    Close,
    Commit,
    Committed,
    Done,
    Failed,
    FindOwners,
    Later,
    Never,
    NoSession,
    NotOwner,
    Open,
    Opened,
    Owners,
    Place,
    Refused,
    Replicate,
    Replicated,
    Request,
)
from memstore.distributed.rules.nouns import (
    KEY_LIMIT,
    LANES,
    Backup,
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
from memstore.distributed.rules.owning import give_back
from memstore.distributed.rules.recovery import ToKeep, is_kept, keep, tell_keepers
from memstore.distributed.rules.steps import Lent, NotSent, Steps, Tables, pause, send, sent, transact, view
from memstore.errors import (
    CrossHostError,
    HomeUnavailableError,
    MemstoreError,
    NotReplicatedError,
    StaleMembershipError,
    UnknownOutcomeError,
    VersionConflictError,
)

AGAIN = 0.01  # seconds
FOR_HEIR = 0.1  # seconds between two questions for a group that is being recovered
_REMEMBERED = 1 << 16  # groups
_LONGEST = 4096  # characters of an error

log = logging.getLogger("memstore")


class DeadlinePassed(Exception):
    """Thrown into the steps of a call whose time is over. Its text is why the last message had no answer, if known."""


# --- this host's catalog ----------------------------------------------------------------------------------------------


class CatalogView(msgspec.Struct):
    """One moment of this host's catalog.

    Attributes:
        owned: the grants of the groups that this host owns, of those that were asked for.
        leaving: those of them that are being handed over: they can be read here, and not be changed.
        is_unclaimed: this root joins, and has keys of one of the groups that it hasn't claimed yet.
    """

    entries: tuple[Entry | None, ...]
    standing: Standing | None
    membership: int
    owned: dict[bytes, Grant] = {}
    leaving: frozenset[bytes] = frozenset()
    is_unclaimed: bool = False
    now: int = 0  # on this host's clock since boot


def look_at(tables: Tables, keys: Sequence[bytes], groups: Sequence[bytes] | None = None) -> CatalogView:
    """Reads keys, and who owns their groups; or other groups than those of keys."""
    entries = tuple(tables.record(key) for key in keys)
    owned: dict[bytes, Grant] = {}
    standing = tables.standing()
    if standing is not None and not all(entry is not None for entry in entries or (None,)):
        for group in groups_of(keys) if groups is None else groups:
            grant = tables.owned(group)
            if grant is not None:
                owned[group] = grant
    leaving = frozenset(group for group in owned if tables.leaving(group) is not None)
    is_unclaimed = False
    if standing is not None and standing.is_joining:
        asked = groups_of(keys) if groups is None else groups
        is_unclaimed = any(owning.is_unclaimed(tables, standing, group) for group in asked)
    now = 0 if standing is None else tables.now()
    return CatalogView(entries, standing, tables.membership(), owned, leaving, is_unclaimed, now)


# --- owners -----------------------------------------------------------------------------------------------------------


class GroupOwner(msgspec.Struct):
    """The owner of the groups of a call.

    Attributes:
        member: None: nobody owns any.
        grants: of the groups that have an owner.
        nobody: the groups that have none.
    """

    member: Member | None
    grants: dict[bytes, Grant]
    nobody: tuple[bytes, ...] = ()

    def of(self, keys: Sequence[bytes]) -> tuple[Grant, ...]:
        """Returns the grants that a message with these keys names."""
        return tuple(self.grants[group] for group in groups_of(keys))


class Seed(msgspec.Struct, frozen=True):
    """The seed, as who was asked: who owns what, or with `owns`, as the owner of the key."""

    member: Member
    owns: bool = False


class Heir(msgspec.Struct, frozen=True):
    """Whoever is waited for to recover the groups of a member that was removed."""

    member: Member
    dead: Member


Asked = Member | Seed | Heir | None


def asked_of(standing: Standing, member: Member) -> Member | Seed:
    """Returns a member that is asked for keys that it owns, as errors name it: the seed can't be removed."""
    return Seed(member, owns=True) if member.id == standing.roster.seed else member


class Client:
    """One process of a host. It has sessions of its own: a forked child makes another Client.

    Attributes:
        asked: whom a question was sent to last, for errors; None: this host.
        silent: hosts that keep what this host has replaced, and gave no answer: see `recovery.tell_keepers`.
        keeps_nothing: hosts that gave no answer when they were to have a replica: see `replicas.secure`.
    """

    def __init__(self) -> None:
        self.silent: set[bytes] = set()
        self.keeps_nothing: set[bytes] = set()
        self._owners: dict[bytes, Ownership] = {}
        self._refused: dict[bytes, int] = {}  # the number of the grant that a group's owner has refused
        self._sessions: dict[bytes, int] = {}
        self._numbers = itertools.count(1)
        self._free_lanes = list(range(LANES))
        self._seed_gave_none = False
        self.asked: Asked = None

    def owner_of(self, seen: CatalogView, groups: Sequence[bytes], *, claims: bool = False) -> Steps[GroupOwner | None]:
        """Finds the one owner of groups: here, as remembered, or by the directory.

        Args:
            claims: groups that nobody owns are claimed, for this host or the owner of the others.

        Returns:
            None, after a pause, if it can't be told yet: look at the catalog anew.

        Raises:
            CrossHostError: they have several owners.
            StaleMembershipError.
        """
        standing = seen.standing
        assert standing is not None, "who isn't served asks nobody"
        rows = yield from self.locate(seen, standing, groups, claims=claims)
        if rows is None:
            return None
        owners = {row.owner: row.group for row in rows.values() if row is not None}
        nobody = tuple(group for group in groups if rows[group] is None)
        if len(owners) > 1:
            raise _several(standing, owners)
        if nobody and claims:
            return None  # some had owners, and nothing was claimed: the others are claimed for their owner
        member = next((standing.roster.member(owner) for owner in owners), None)
        if owners and member is None:
            yield from pause(AGAIN)  # it is removed, or new, and this host will hear of it
            return None
        self.asked = None if member is None or member.id == standing.member else asked_of(standing, member)
        return GroupOwner(member, {group: row.grant for group, row in rows.items() if row is not None}, nobody)

    def owners_of(self, groups: Sequence[bytes]) -> Steps[dict[bytes, bytes | None]]:
        """Finds the owner of each group, which may be several members. None: nobody owns it.

        Raises:
            HomeUnavailableError: the directory gave no answer.
            StaleMembershipError.
        """
        self.asked = None
        try:
            while True:
                seen = yield from view(lambda tables: look_at(tables, [], groups))
                if seen.standing is None:
                    return dict.fromkeys(groups)
                rows = yield from self.locate(seen, seen.standing, groups)
                if rows is not None:
                    return {group: None if row is None else row.owner for group, row in rows.items()}
        except DeadlinePassed as why:
            raise unavailable(groups[0], self.asked, why) from None

    def check_one_owner(self, groups: Sequence[bytes]) -> Steps[None]:
        """Raises CrossHostError if groups have several owners. What is remembered of them is asked for anew."""
        for group in groups:
            self._owners.pop(group, None)
        found = yield from self.owners_of(groups)
        owners = {owner: group for group, owner in found.items() if owner is not None}
        standing = yield from view(lambda tables: tables.standing())
        if len(owners) > 1 and standing is not None:
            raise _several(standing, owners)

    def known_grant(self, group: bytes) -> Grant | None:
        """Returns the grant of that owner."""
        row = self._owners.get(group)
        return None if row is None else row.grant

    def known_owner(self, group: bytes) -> bytes | None:
        """Returns the member that was the owner when the directory was asked last. It may be another one by now."""
        row = self._owners.get(group)
        return None if row is None else row.owner

    def locate(
        self, seen: CatalogView, standing: Standing, groups: Sequence[bytes], *, claims: bool = False
    ) -> Steps[dict[bytes, Ownership | None] | None]:
        """Finds the row of each group: here, as remembered, or by the directory. None, after a pause: not yet."""
        if not standing.may_change:
            raise removed(standing)
        if seen.is_unclaimed:
            yield from pause(AGAIN)
            return None
        rows: dict[bytes, Ownership | None] = {}
        for group in groups:
            if group in seen.owned:
                rows[group] = Ownership(group, standing.member, seen.owned[group])
            elif (row := self._owners.get(group)) is not None and row.owner in standing.roster.ids:
                rows[group] = row
        unknown = tuple(group for group in groups if group not in rows)
        if unknown:
            owners = {row.owner for row in rows.values() if row is not None}
            located = yield from self._ask_directory(standing, unknown, owners, claims=claims)
            if located is None:
                return None
            rows.update(zip(unknown, located.rows, strict=True))
        return rows

    def _ask_directory(
        self, standing: Standing, groups: tuple[bytes, ...], owners: set[bytes], *, claims: bool
    ) -> Steps[Owners | None]:
        """Asks for all groups, a message for as many as it has room for. None, after a pause: not yet."""
        own, seed = standing.roster.member(standing.member), standing.seed
        is_owner = own in standing.roster.takers
        claimer = next(iter(owners)) if owners else (standing.member if is_owner else None)
        rows: list[Ownership | None] = []
        for first in range(0, len(groups), BATCH_LIMIT):
            some = groups[first : first + BATCH_LIMIT]
            refused = tuple(self._refused.get(group, 0) for group in some)
            request = ClaimGroups(some, claimer) if claims and not any(refused) else FindOwners(some, refused)
            if not isinstance(self.asked, Heir):
                self.asked = Seed(seed)
            answer = yield from send(seed, request)
            if answer is None and self._seed_gave_none:  # the first may be one that the call's end cut off
                self.asked = Seed(seed)
            self._seed_gave_none = answer is None
            if not isinstance(answer, Owners) or len(answer.rows) != len(some):
                waiting = next((one for one in standing.roster.departed if not one.is_ready), None)
                if isinstance(answer, Later) and waiting is not None:
                    heir = standing.roster.member(waiting.heir)
                    self.asked = Seed(seed) if heir is None else Heir(heir, waiting.member)
                    yield from pause(FOR_HEIR)
                    return None
                yield from try_again(answer)
                return None
            for group, row in zip(some, answer.rows, strict=True):
                self._refused.pop(group, None)
                if row is not None and row.owner != standing.member:
                    self._remember(row)
            rows += answer.rows
        return Owners(tuple(rows))

    def _remember(self, row: Ownership) -> None:
        while len(self._owners) >= _REMEMBERED:
            self._owners.pop(next(iter(self._owners)), None)
        self._owners[row.group] = row

    def refuse(self, owner: GroupOwner) -> None:
        """Forgets an owner that has refused one of the grants; the directory is told so."""
        for group, grant in owner.grants.items():
            self._owners.pop(group, None)
            self._refused[group] = grant.number

    # --- changes ------------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], until: int) -> Steps[tuple[int, ...]]:
        """Makes changes of keys that have one owner at one moment, or none of them. Returns the versions.

        Their segments lie on this host, filled. After an error they are given back, at once or by an audit.

        Args:
            until: when the call's time is over, on this host's clock since boot.

        Raises:
            UnknownOutcomeError: the changes may have been made, or will be.
            NotReplicatedError: they were made, and no other host has the values, which are to be on two.
            VersionConflictError, KeyNotFoundError, CrossHostError, HomeUnavailableError, StaleMembershipError.
        """
        attempt = _Attempt(changes, until)
        try:
            versions = yield from self._commit(attempt)
        except DeadlinePassed as passed:
            why: Exception = passed
            if attempt.is_made:
                raise unknown_replaced(changes[0].key, passed) from None
            is_same = isinstance(self.asked, Seed) and self.asked.member == attempt.owner
            asked = self.asked if is_same or attempt.owner is None else attempt.owner
            error: MemstoreError = unavailable(changes[0].key, asked, passed)
        except MemstoreError as failure:
            why = error = failure
        else:
            yield from self._replicate(attempt, versions)
            return versions
        if attempt.is_sent and attempt.owner is not None and not isinstance(error, UnknownOutcomeError):
            error = unknown(changes[0].key, attempt.owner, why)
        if not isinstance(error, UnknownOutcomeError):
            yield from give_back([place for change in changes for place in change.places])
        raise error

    def _replicate(self, attempt: _Attempt, versions: Sequence[int]) -> Steps[None]:
        """Waits until a second host has what was put, where that is to be: see `replicas.py`."""
        standing = yield from view(lambda tables: tables.standing())
        puts = [
            (change.key, version)
            for change, version in zip(attempt.changes, versions, strict=True)
            if change.body is not None and not change.is_mutable and replicas.is_sync(standing, change.key)
        ]
        if standing is None or not puts:
            return
        keys, owner, why = [key for key, _ in puts], attempt.owner, Failed("StoreTimeoutError", "within the timeout")
        missing: dict[bytes, Failed] = {}
        try:
            if owner is None:
                missing = yield from replicas.secure(keys, self.keeps_nothing)
            else:
                missing = yield from self._report(standing, owner, puts, attempt.grants)
            yield from replicas.go_on_without(missing if owner is None else ())
            if owner is None:
                yield from tell_keepers(keys, self.silent)
        except DeadlinePassed:
            missing = missing or dict.fromkeys(keys, why)
            if owner is None:
                yield from replicas.go_on_without(missing)
                if (yield from view(lambda tables: any(map(tables.is_unnoted, keys)))):
                    raise not_replicated(keys[0], versions[0], why.text) from None
        for key, failed in missing.items():
            policy = standing.roster.policy_of(group_of(key))
            version = dict(puts)[key]
            error = not_replicated(key, version, failed.text)
            if policy is None or policy.fails:
                raise error
            log.warning("%s", str(error))

    def _report(
        self, standing: Standing, owner: Member, puts: Sequence[tuple[bytes, int]], grants: Mapping[bytes, Grant]
    ) -> Steps[dict[bytes, Failed]]:
        """Tells the owner what this host keeps. Returns the keys that are on no second host, and why."""
        missing: dict[bytes, Failed] = {}
        for first in range(0, len(puts), ROWS_LIMIT):
            some = puts[first : first + ROWS_LIMIT]
            rows = tuple((key, grants[group_of(key)]) for key, _ in some)
            kept = yield from view(lambda tables, some=some: tuple(replicas.kept(tables, *put) for put in some))
            request = Replicate(owner.id, rows, standing.member, kept)
            while True:
                answer = yield from send(owner, request)
                if isinstance(answer, Replicated) and len(answer.versions) == len(some):
                    break
                if isinstance(answer, Refused):
                    answer = Replicated((0,) * len(some), 0, Failed("HomeUnavailableError", answer.why))
                    break
                yield from pause(AGAIN)
            for (key, _), at in zip(some, answer.versions, strict=True):
                if not at and answer.why is not None:
                    missing[key] = answer.why
        return missing

    def _commit(self, attempt: _Attempt) -> Steps[tuple[int, ...]]:
        changes, self.asked = attempt.changes, None
        groups = groups_of(change.key for change in changes)
        claims = any(change.may_create for change in changes)
        while True:
            attempt.owner = None
            seen = yield from view(lambda tables: look_at(tables, [], groups))
            if seen.standing is None:
                answer = yield from transact(
                    lambda tables, now=seen: owning.commit_here(tables, now.membership, changes)
                )
            else:
                owner = yield from self.owner_of(seen, groups, claims=claims)
                if owner is None:
                    continue
                if owner.nobody and not claims and (yield from view(lambda tables: _is_remembered(tables, changes))):
                    claims = True
                    continue
                if owner.nobody and owner.member is None:
                    answer = _of_nothing(changes)
                elif owner.nobody:  # all of it is to be of one moment
                    claims = True
                    continue
                elif owner.member is not None and owner.member.id == seen.standing.member:
                    answer = yield from self._commit_here(seen, owner, attempt)
                else:
                    answer = yield from self._commit_there(seen, owner, attempt)
            if isinstance(answer, Committed):
                return answer.versions
            if isinstance(answer, Failed):
                raise error_of(answer, attempt.owner)

    def _commit_here(self, seen: CatalogView, owner: GroupOwner, attempt: _Attempt) -> Steps[Answer | None]:
        """A put of a new group records the grant in the transaction of the commit."""
        if seen.leaving:
            yield from pause(AGAIN)
            return None
        new = [(group, grant) for group, grant in owner.grants.items() if group not in seen.owned]
        answer = yield from transact(lambda tables: owning.commit_here(tables, seen.membership, attempt.changes, new))
        if isinstance(answer, Committed):
            attempt.is_made = True
            yield from tell_keepers([change.key for change in attempt.changes], self.silent)
        return (yield from self.heard(answer, owner))

    def _commit_there(self, seen: CatalogView, owner: GroupOwner, attempt: _Attempt) -> Steps[Answer | None]:
        """Returns the definite answer of another host. None: it has not made the changes, and won't: look again."""
        assert seen.standing is not None and owner.member is not None
        member, changes = owner.member, tuple(attempt.changes)
        _check_size(changes)
        attempt.owner = member
        lane = yield from self.take_lane()
        try:
            call = yield from self.call(member, lane, seen.standing.roster.epoch)
            if call is None:
                return None
            lent = [
                (place, Lent(change.key, member.id, call.session, call.lane, call.number, attempt.until))
                for change in changes
                for place in change.places
                if owning.is_here(seen.standing, place)
            ]
            if lent:
                answer = yield from transact(lambda tables: lend(tables, seen.membership, lent))
                if not isinstance(answer, Done):
                    return answer
            attempt.grants = owner.grants
            keys = [change.key for change in changes]
            request = Commit(call, changes, owner.of(keys), seen.standing.member)
            answer = yield from repeated(member, request, attempt)
        finally:
            # Also if nobody knows what became of the call: the lane's next one has a larger number, and once the owner
            # has heard that, this one is refused.
            self.free_lane(lane)
        if answer is None or isinstance(answer, NoSession):
            self.forget(member, call)
            if attempt.is_sent:  # it may have been made, and forgotten with its session, or with the owner
                raise unknown(changes[0].key, member)
            yield from pause(AGAIN)
            return None
        attempt.is_sent = False
        if isinstance(answer, Never):
            return Failed("StoreTimeoutError", "its time was over before its owner had heard of it")
        if isinstance(answer, Committed):
            attempt.is_sent = True
            rows = _to_keep(changes, owner, answer, seen.standing)
            if not (yield from keep(member, rows, seen.now, replaced=answer.replaced)):
                raise unknown(changes[0].key, member, DeadlinePassed("it was removed"))
            attempt.is_sent = False
        return (yield from self.heard(answer, owner))

    def heard(self, answer: Answer | None, owner: GroupOwner) -> Steps[Answer | None]:
        """Returns a definite answer; None, after a pause, if another owner is to be asked, or this one once more."""
        if isinstance(answer, NotOwner | Refused):  # or it was removed, of which this host will hear
            self.refuse(owner)
        elif answer is not None and not isinstance(answer, Later):
            return answer
        yield from pause(AGAIN)
        return None

    # --- calls --------------------------------------------------------------------------------------------------------

    def take_lane(self) -> Steps[int]:
        while True:
            try:
                return self._free_lanes.pop()
            except IndexError:  # other threads have them all
                yield from pause(AGAIN)

    def free_lane(self, lane: int) -> None:
        self._free_lanes.append(lane)

    def call(self, owner: Member, lane: int, epoch: int) -> Steps[Call | None]:
        """Makes a new call of this process at an owner, in a lane that it has taken. None, after a pause: not yet."""
        session = self._sessions.get(owner.id)
        if session is None:
            answer = yield from send(owner, Open())
            if not isinstance(answer, Opened):
                yield from try_again(answer)
                return None
            session = self._sessions[owner.id] = answer.session
        return Call(session, lane, next(self._numbers), epoch)

    def forget(self, owner: Member, call: Call) -> None:
        """Notes that the owner doesn't know the session of this call any more."""
        if self._sessions.get(owner.id) == call.session:
            del self._sessions[owner.id]

    def end(self, members: Callable[[bytes], Member | None]) -> Steps[None]:
        """Tells owners that nothing more will come. One that doesn't hear it finds out in an hour."""
        sessions, self._sessions = self._sessions, {}
        with contextlib.suppress(DeadlinePassed):
            for owner, session in sessions.items():
                member = members(owner)
                if member is not None:
                    yield from send(member, Close(session))


class Delivery:
    """A call on its way. `is_sent`: nobody knows whether it was made."""

    def __init__(self) -> None:
        self.is_sent = False


class _Attempt(Delivery):
    """A commit under way. `owner`: that was asked last; None: this host. `is_made`: this host has made it."""

    def __init__(self, changes: Sequence[Change], until: int) -> None:
        super().__init__()
        self.changes, self.until = changes, until
        self.owner: Member | None = None
        self.grants: Mapping[bytes, Grant] = {}
        self.is_made = False


def _to_keep(changes: Sequence[Change], owner: GroupOwner, answer: Committed, standing: Standing) -> list[ToKeep]:
    """Returns what this host keeps of changes that another host has made."""
    rows: list[ToKeep] = []
    for change, version in zip(changes, answer.versions, strict=True):
        if change.body is not None and is_kept(change):
            grant = owner.grants[group_of(change.key)]
            is_replica = bool(change.places) and not change.is_mutable and replicas.is_sync(standing, change.key)
            said = change.body, change.places, change.is_mutable
            backup = Backup(version, grant.number, *said, is_replica, change.history)
            own = backup if is_replica else None
            rows.append(ToKeep(change.key, version, grant, None if change.renews else backup, replica=own))
    return rows


def repeated(owner: Member, request: Request, delivery: Delivery) -> Steps[Answer | None]:
    """Sends the same call until it is answered for good. None: the owner was removed before.

    If the first answer is that there is no such session, the call was not made, and never will be: the session had
    ended before, since this process had no connection for an hour. `delivery.is_sent` is as it was then.
    """
    while True:
        answer = yield from sent(owner, request)
        if not isinstance(answer, NotSent | NoSession):
            delivery.is_sent = True
        if not (answer is None or isinstance(answer, NotSent | Later)):
            return answer
        yield from pause(AGAIN)
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or standing.roster.member(owner.id) is None:
            return None


def lend(tables: Tables, membership: int, lent: Sequence[tuple[Place, Lent]]) -> Done | Failed | None:
    """Notes whom segments of this host are lent to, and by which call. None: groups may have left this host."""
    if tables.standing() is None or tables.membership() != membership:
        return None
    failed = owning.bytes_gone(tables, ((one.key, place) for place, one in lent))
    if failed is not None:
        return failed
    for place, one in lent:
        tables.lend(place, one)
    return Done()


def _check_size(changes: Sequence[Change]) -> None:
    """Raises CrossHostError unless one message has room for the changes."""
    first, nbytes = changes[0].key.decode(errors="replace"), sum(change.nbytes for change in changes)
    if len(changes) > BATCH_LIMIT:
        raise CrossHostError(
            f"{len(changes):,} keys in one call, from {first!r} on: they belong to another host, which takes up to "
            f"{BATCH_LIMIT:,} at one moment: make several calls"
        )
    if nbytes > CALL_BYTES_LIMIT:
        raise CrossHostError(
            f"{len(changes):,} keys in one call, from {first!r} on: they belong to another host, and their records "
            f"take {nbytes:,} bytes; one message has {CALL_BYTES_LIMIT:,}: make several calls"
        )


def _is_remembered(tables: Tables, changes: Sequence[Change]) -> bool:
    """Returns whether somebody must own groups to remember deletions of keys that aren't there.

    *Schedule (found):* a host is removed, and nobody owns its group; one of its keys is deleted, and it comes back.
    """
    standing = tables.standing()
    deletes = any(change.body is None and change.missing_ok for change in changes)
    return deletes and standing is not None and bool(standing.roster.returns)


def _of_nothing(changes: Sequence[Change]) -> Answer:
    """Answers changes of keys of groups that nobody owns, which create none."""
    refused = next(filter(None, (owning.refused_change(change, None) for change in changes)), None)
    return refused or Committed((0,) * len(changes))


def try_again(answer: Answer | None) -> Steps[None]:
    if isinstance(answer, Failed):
        raise error_of(answer)
    yield from pause(AGAIN)


# --- errors -----------------------------------------------------------------------------------------------------------

_STATUS = "repeat the call; `memstore status` says which hosts answer, and"
_LOST = f"{_STATUS} `memstore remove` gives up one that is lost"
_LOST_SEED = f"{_STATUS} `memstore promote` makes another one the seed if that is lost"
_LOST_OWNER = f"{_LOST_SEED}: then `memstore remove` gives it up"
_KINDS: dict[str, type[MemstoreError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, MemstoreError) and not name.startswith("_")
}


def _several(standing: Standing, owners: dict[bytes, bytes]) -> CrossHostError:
    def name(owner: bytes, group: bytes) -> str:
        member = standing.roster.member(owner)
        return f"{group.decode(errors='replace')!r} to {'a host' if member is None else member.label}"

    names = ", ".join(name(owner, group) for owner, group in list(owners.items())[:3])
    return CrossHostError(
        f"the keys of one call belong to one host, and of these {names}. Keys with the same text before the first '/' "
        "belong to the host that put one of them first. put_many and delete_many take keys host by host with "
        "atomic=False; get such keys one by one"
    )


def unavailable(what: bytes, owner: Asked, why: DeadlinePassed) -> HomeUnavailableError:
    """Makes what a call ends with that has changed nothing.

    Args:
        what: the key.
        owner: who was asked, or waited for; None: this host.
    """
    key = what.decode(errors="replace")
    return HomeUnavailableError(
        f"{key!r}: {no_answer(owner, why)}, and nothing was changed: {_what_to_do(owner)}", key=key
    )


def no_answer(owner: Asked, why: DeadlinePassed) -> str:
    """Makes the part of an error that names the host which was waited for. None: this host."""
    return f"{_name(owner)} did not answer within the timeout{_reason(why)}"


def not_listed(prefix: bytes, owner: Asked, why: DeadlinePassed, what: str = "") -> HomeUnavailableError:
    """Makes what a listing of the keys with this prefix ends with.

    Args:
        owner: as of `unavailable`.
        what: else than keys was to be listed.
    """
    keys = what or (f"the keys that start with {prefix.decode(errors='replace')!r}" if prefix else "all keys")
    if owner is None:
        who = "this host, if it still gets its keys, may own some, and"
    elif isinstance(owner, Heir) or (isinstance(owner, Seed) and not owner.owns):
        who = _name(owner)
    else:
        member, too = (owner.member, ", which is the seed too,") if isinstance(owner, Seed) else (owner, "")
        who = f"{member.label}{too} may own some, and"
    return HomeUnavailableError(
        f"{keys} can't be listed: {who} did not answer within the timeout{_reason(why)}: {_what_to_do(owner)}"
    )


def unknown(what: bytes, owner: Member, why: Exception | None = None) -> UnknownOutcomeError:
    key = what.decode()
    return UnknownOutcomeError(
        f"{key!r}: {_name(owner)} was asked to change it and gave no answer{_reason(why)}, so nobody knows whether it "
        "has: look at the version, or repeat the call, which is safe with expect_version",
        key=key,
    )


def unknown_replaced(what: bytes, why: Exception) -> UnknownOutcomeError:
    key = what.decode(errors="replace")
    return UnknownOutcomeError(
        f"{key!r}: it was changed here, and a host that keeps the version before could not be told of it within the "
        f"timeout{_reason(why)}: that may come back if this host is removed now",
        key=key,
    )


def not_replicated(what: bytes, version: int, why: str) -> NotReplicatedError:
    key = what.decode(errors="replace")
    return NotReplicatedError(
        f"{key!r}: it was put, as version {version}, and no other host has it, which its policy asks for ({why}): it "
        "gets its replica when a host can have it (memstore status); to put it again is safe",
        key=key,
        version=version,
    )


def _reason(why: Exception | None) -> str:
    return f" ({why})" if why is not None and str(why) else ""


def _what_to_do(owner: Asked) -> str:
    if isinstance(owner, Seed):
        return _LOST_OWNER if owner.owns else _LOST_SEED
    return _LOST


def _name(owner: Asked) -> str:
    if owner is None:
        return "its owner (this host, if it is being handed over)"
    if isinstance(owner, Heir):
        return f"{owner.member.label}, which recovers what {owner.dead.label} owned before it was removed,"
    if isinstance(owner, Seed) and owner.owns:
        return f"its owner, {owner.member.label}, which is the seed too,"
    if isinstance(owner, Seed):
        return f"the seed, {owner.member.label}, which says who owns what,"
    return f"its owner, {owner.label},"


def removed(standing: Standing) -> StaleMembershipError:
    if standing.is_sealed:
        return StaleMembershipError("this host was drained, and leaves the cluster: all that it had is on other hosts")
    return StaleMembershipError("this host was removed from the cluster: serve the folder again, as a new host")


def failed_of(error: Exception) -> Failed:
    """Makes what another host is told of an error that has changed nothing."""
    if not isinstance(error, MemstoreError):
        return Failed("MemstoreError", _sendable(str(error)))
    key = (error.key or "").encode(errors="backslashreplace")
    failed = Failed(type(error).__name__, _sendable(str(error)), key if 0 < len(key) <= KEY_LIMIT else None)
    if isinstance(error, errors.QuotaExceededError):
        said = {"expected": error.quota, "found": error.used, "requested": error.requested}
        return msgspec.structs.replace(failed, prefix=error.prefix.encode(), **said)
    return failed


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()[:_LONGEST]


def error_of(failed: Failed, owner: Member | None = None) -> MemstoreError:
    """Makes the error that an owner has answered. A name that this version doesn't know is a MemstoreError.

    Args:
        owner: None: this host.
    """
    key = None if failed.key is None else failed.key.decode(errors="replace")
    if failed.error == "VersionConflictError":
        text = conflict(key or "", failed.expected, failed.found)
        return VersionConflictError(text, key=key, expected=failed.expected, found=failed.found)
    if failed.error == "KeyNotFoundError" and key is not None:
        return errors.KeyNotFoundError(no_key(key), key=key)
    says_key = key is None or repr(key) in failed.text
    text = failed.text if says_key else f"{key!r}: {failed.text}"
    if failed.error == "QuotaExceededError":
        said = {"quota": failed.expected, "used": failed.found, "requested": failed.requested}
        return errors.QuotaExceededError(text, key=key, prefix=failed.prefix.decode(errors="replace"), **said)
    if failed.error == "StoreFullError" and owner is not None:
        says_outcome = text.endswith("was changed")  # that host knows whether kept versions went to make room
        outcome = "" if says_outcome else "; nothing was changed"
        full = errors.StoreFullError(f"{_name(owner)} has no room: {text}{outcome}", key=key)
        full.host = owner.address
        return full
    return _KINDS.get(failed.error, MemstoreError)(text, key=key)
