"""How a process reads keys, wherever they are owned.

A record that is found in this host's catalog is right. One that isn't there, of a group that this host owns, doesn't
exist. Else the owner is asked; if the directory says that nobody owns the group, the key doesn't exist either.

Whoever drives these steps throws `DeadlinePassed` into them when the call's time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from memstore.distributed.rules import history, owning
from memstore.distributed.rules.client import (
    AGAIN,
    CatalogView,
    Client,
    DeadlinePassed,
    GroupOwner,
    Seed,
    asked_of,
    look_at,
    not_listed,
    removed,
    try_again,
    unavailable,
)
from memstore.distributed.rules.messages import (
    BATCH_LIMIT,
    LONGEST_WAIT,
    ROWS_LIMIT,
    Answer,
    FindOwners,
    FindVersions,
    Found,
    IsAt,
    List,
    Listed,
    Lookup,
    NotOwner,
    Owners,
    Place,
    Wait,
    WaitAny,
    WatchGroup,
)
from memstore.distributed.rules.nouns import Change, Entry, Grant, Member, Standing, group_of, groups_of
from memstore.distributed.rules.steps import Race, Send, Steps, Tables, own_standing, pause, send, view
from memstore.errors import MutableEntryError, StoreTimeoutError, VersionConflictError

_TRIES_WITHOUT_PIN = 2

Value = TypeVar("Value")


# --- lookups ----------------------------------------------------------------------------------------------------------


def look_up(client: Client, keys: Sequence[bytes], *, pin: bool = False) -> Steps[tuple[Entry | None, ...]]:
    """Returns the entries of keys that have one owner, at one moment.

    Raises:
        CrossHostError: they have several owners.
        HomeUnavailableError, StaleMembershipError.
        CorruptionError: a record is damaged.
    """
    groups = groups_of(keys)
    client.asked = None
    try:
        while True:
            seen = yield from view(lambda tables: look_at(tables, keys))
            if seen.standing is None:
                return seen.entries
            if None not in seen.entries:
                entries = (yield from _pinned(client, seen, keys)) if pin else seen.entries
                if None not in entries:
                    return entries
                continue  # their group has left this host meanwhile
            owner = yield from client.owner_of(seen, groups)
            if owner is None:
                continue
            if owner.member is None or owner.member.id == seen.standing.member:
                if len(seen.owned) == len(groups) or owner.member is None:
                    return seen.entries
                found = yield from _look_up_here(owner, _owned(keys, owner))
            else:
                found = yield from look_up_at(owner.member, owner, _owned(keys, owner), pin=pin)
            answer = yield from client.heard(found, owner)
            if not isinstance(answer, Found):
                yield from try_again(answer)
                continue
            if owner.nobody and not (yield from _are_still_nobodys(client, owner.nobody)):
                continue
            found_of = dict(zip(_owned(keys, owner), answer.entries, strict=True))
            return tuple(found_of.get(key) for key in keys)
    except DeadlinePassed as why:
        raise unavailable(keys[0], client.asked, why) from None


def _owned(keys: Sequence[bytes], owner: GroupOwner) -> Sequence[bytes]:
    return [key for key in keys if group_of(key) in owner.grants] if owner.nobody else keys


def _look_up_here(owner: GroupOwner, keys: Sequence[bytes]) -> Steps[Answer]:
    """Reads keys of groups of which this host has grants that it hasn't recorded. Few of them exist."""

    def action(tables: Tables) -> Answer:
        entries: list[Entry | None] = []
        while len(entries) < len(keys):
            some = tuple(keys[len(entries) : len(entries) + BATCH_LIMIT])
            answer = owning.look_up(tables, own_standing(tables), Lookup(some, owner.of(some)))
            if not isinstance(answer, Found):
                return answer
            entries += answer.entries
        return Found(tuple(entries))

    return (yield from view(action))


def _are_still_nobodys(client: Client, groups: tuple[bytes, ...]) -> Steps[bool]:
    """Whether keys of groups that nobody owned didn't exist when the others were read, after that.

    A group never loses its owner while no member is removed: so who has none now had none then.
    """
    seen = yield from view(lambda tables: look_at(tables, [], groups))
    owner = None if seen.owned else (yield from client.owner_of(seen, groups))
    return owner is not None and owner.member is None


def _pinned(client: Client, seen: CatalogView, keys: Sequence[bytes]) -> Steps[tuple[Entry | None, ...]]:
    """Reads entries that are owned here. What is pinned this host's index process knows: without it, nothing is."""
    assert seen.standing is not None
    own = seen.standing.roster.member(seen.standing.member)
    groups = groups_of(keys)
    grants = yield from view(lambda tables: {group: tables.owned(group) for group in groups})
    owned = {group: grant for group, grant in grants.items() if grant is not None}
    answer: Answer | None = None
    if own is not None and len(owned) == len(groups):
        answer = yield from look_up_at(own, GroupOwner(own, owned), keys, pin=True)
    if isinstance(answer, Found):
        return answer.entries
    return (yield from view(lambda tables: look_at(tables, keys))).entries


def look_up_at(member: Member, owner: GroupOwner, keys: Sequence[bytes], *, pin: bool = False) -> Steps[Answer | None]:
    """Returns the entries of all keys, in a `Found` of any length; or what the owner says instead.

    Several answers are of several moments. So when all entries are there, the owner is asked for their versions once
    more: keys that don't exist first. A version never comes again; so what still has its version had it all the time,
    and then there was a moment when all was as it was found: that of the first of these answers. What has changed is
    asked for anew. (Beyond 65,536 keys that don't exist, one of them may have been put and deleted in between.)
    """
    found: dict[bytes, Entry | None] = {}
    missing = list(keys)
    while missing:
        while missing:
            answer = yield from _asked(member, owner, missing, pin=pin)
            if not isinstance(answer, Found):
                return answer
            found.update(zip(missing, answer.entries, strict=False))
            missing = missing[len(answer.entries) :]
            if len(answer.entries) == len(keys):
                return answer
        left = sorted(found, key=lambda key: found[key] is not None)
        while left:
            answer = yield from _asked(member, owner, left, brief=True)
            if not isinstance(answer, Found):
                return answer
            pairs = zip(left, answer.entries, strict=False)
            missing += [key for key, entry in pairs if _version(entry) != _version(found[key])]
            left = left[len(answer.entries) :]
    return Found(tuple(found[key] for key in keys))


def _asked(
    member: Member, owner: GroupOwner, keys: Sequence[bytes], *, pin: bool = False, brief: bool = False
) -> Steps[Answer | None]:
    """Asks once. A `Found` has one entry at least, and no more than were asked for; else the answer says nothing."""
    some = tuple(keys[:BATCH_LIMIT])
    answer = yield from send(member, Lookup(some, owner.of(some), pin, brief))
    fits = not isinstance(answer, Found) or 0 < len(answer.entries) <= len(some)
    return answer if fits else None


def _version(entry: Entry | None) -> int:
    return 0 if entry is None else entry.version


# --- values -----------------------------------------------------------------------------------------------------------


def read_all(
    client: Client, keys: Sequence[bytes], fetch: Callable[[bytes, Entry], Steps[Value | None]]
) -> Steps[tuple[tuple[int, Value] | None, ...]]:
    """Reads keys that have one owner, at one moment. If one of them was replaced, all are looked up again.

    Args:
        fetch: makes what is returned of an entry's bytes; None: these are there no more, the version was replaced.

    Returns:
        Versions, with what `fetch` has made; None: there is no such key.
    """
    tries = 0
    try:
        while True:
            entries = yield from look_up(client, keys, pin=tries >= _TRIES_WITHOUT_PIN)
            found: list[tuple[int, Value] | None] = []
            for key, entry in zip(keys, entries, strict=True):
                value = None if entry is None else (yield from fetch(key, entry))
                if entry is not None and value is None:
                    break
                found.append(None if entry is None or value is None else (entry.version, value))
            else:
                return tuple(found)
            tries += 1
            yield from pause(AGAIN)
    except DeadlinePassed as why:
        raise unavailable(keys[0], None, why) from None


# --- versions ---------------------------------------------------------------------------------------------------------


def read_version(
    client: Client, key: bytes, version: int, fetch: Callable[[bytes, Entry], Steps[Value | None]]
) -> Steps[Value | None]:
    """Reads one version of a key, the present one or one that was replaced and is kept. None: there is none.

    Args:
        fetch: as of `read_all`.
    """
    try:
        while True:
            (entry,) = yield from look_up_versions(client, key, (version,))
            value = None if entry is None else (yield from fetch(key, entry))
            if entry is None or value is not None:
                return value
            yield from pause(AGAIN)
    except DeadlinePassed as why:
        raise unavailable(key, None, why) from None


def look_up_versions(client: Client, key: bytes, versions: Sequence[int]) -> Steps[tuple[Entry | None, ...]]:
    """Returns versions of a key, not of one moment. None: there is none. Errors as of `look_up`."""
    found: list[Entry | None] = []
    while len(found) < len(versions):
        some = tuple(versions[len(found) : len(found) + BATCH_LIMIT])

        def here(tables: Tables, some: tuple[int, ...] = some) -> tuple[Entry | None, ...]:
            return tuple(history.find(tables, key, one) for one in some)

        def request(grant: Grant, some: tuple[int, ...] = some) -> Lookup:
            return Lookup((key,) * len(some), (grant,), versions=some)

        entries = yield from _asked_of_owner(client, key, here, request)
        found += entries[: len(some)] or (None,) * len(some)
    return tuple(found)


def versions_of(client: Client, key: bytes) -> Steps[tuple[int, ...]]:
    """Returns the versions of a key that can be read, sorted; none: there is no such key. Errors as of `look_up`."""

    def here(tables: Tables) -> tuple[Entry, ...]:
        return tuple(Entry(version, b"") for version in history.versions_of(tables, key))

    entries = yield from _asked_of_owner(client, key, here, lambda grant: FindVersions(key, grant))
    return tuple(entry.version for entry in entries if entry is not None)


def _asked_of_owner(
    client: Client,
    key: bytes,
    here: Callable[[Tables], tuple[Entry | None, ...]],
    request: Callable[[Grant], Lookup | FindVersions],
) -> Steps[tuple[Entry | None, ...]]:
    """Returns what the key's owner finds: this host by `here`, another one by a request. Empty: nobody owns the key."""
    group = group_of(key)

    def look(tables: Tables) -> tuple[CatalogView, tuple[Entry | None, ...]]:
        seen = look_at(tables, [], [group])
        return seen, here(tables) if seen.standing is None or seen.owned else ()

    client.asked = None
    try:
        while True:
            seen, found = yield from view(look)
            if seen.standing is None or seen.owned:
                return found
            owner = yield from client.owner_of(seen, [group])
            if owner is None:
                continue
            if owner.member is None:
                return ()
            asked = request(owner.grants[group])
            if owner.member.id == seen.standing.member:  # by a grant that it hasn't recorded
                answer = yield from view(lambda tables, asked=asked: _answered_here(tables, asked))
            else:
                answer = yield from send(owner.member, asked)
            answer = yield from client.heard(answer, owner)
            if isinstance(answer, Found):
                return answer.entries
            yield from try_again(answer)
    except DeadlinePassed as why:
        raise unavailable(key, client.asked, why) from None


def _answered_here(tables: Tables, request: Lookup | FindVersions) -> Answer:
    standing = own_standing(tables)
    if isinstance(request, Lookup):
        return owning.look_up(tables, standing, request)
    return owning.find_versions(tables, standing, request)


# --- waits ------------------------------------------------------------------------------------------------------------


def wait_there(client: Client, key: bytes, newer_than: int) -> Steps[int | None]:
    """Waits as long as the key is owned elsewhere, or by nobody; None: it is here. It lets DeadlinePassed through."""
    group = group_of(key)
    while True:
        seen = yield from view(lambda tables: look_at(tables, [key]))
        standing, entry = seen.standing, seen.entries[0]
        if entry is not None and entry.version > newer_than:
            return entry.version
        if standing is None or entry is not None or seen.owned:
            return None
        owner = yield from client.owner_of(seen, [group])
        if owner is None:
            continue
        if owner.member is None:
            yield from _watch(client, standing, group)
        elif owner.member.id == standing.member:
            return None
        else:
            request = Wait(key, owner.grants[group], newer_than, LONGEST_WAIT)
            answer = yield from client.heard((yield from send(owner.member, request)), owner)
            if isinstance(answer, IsAt):
                if answer.version:
                    return answer.version
            elif answer is not None:
                yield from try_again(answer)


def _watch(client: Client, standing: Standing, group: bytes) -> Steps[None]:
    """Waits until somebody owns a group."""
    client.asked = Seed(standing.seed)
    answer = yield from send(standing.seed, WatchGroup(group, LONGEST_WAIT))
    if not isinstance(answer, Owners):
        yield from try_again(answer)


# --- listings ---------------------------------------------------------------------------------------------------------


def page(
    client: Client, prefix: bytes, after: bytes, limit: int = ROWS_LIMIT, silent: dict[bytes, Member] | None = None
) -> Steps[list[tuple[bytes, int]]]:
    """Returns the next keys in order, with their versions, of all members in one epoch. Empty: there are no more.

    Keys whose records are damaged are among them, as they are among those of one host, with version 0.

    Args:
        silent: members that gave no answer, which aren't asked; others that give none are added. None: all are to
            answer.
    """
    try:
        while True:
            listed = yield from _round(client, prefix, after, limit, silent)
            if listed is not None:
                return listed.rows
    except DeadlinePassed as why:
        raise not_listed(prefix, client.asked, why) from None


class _Listing:
    """A page of all who were asked, and how to wait for what is newer than it."""

    def __init__(self, standing: Standing | None, rows: list[tuple[bytes, int]]) -> None:
        self.standing, self.rows = standing, rows
        self.waits: list[tuple[Member, int, Grant | None]] = []  # whom to ask, what was assigned there last


def _round(
    client: Client, prefix: bytes, after: bytes, limit: int, silent: dict[bytes, Member] | None = None
) -> Steps[_Listing | None]:
    """Asks each member that may own groups once, or the owner of a prefix with a "/".

    Where it leaves out members, these may know of a later roster, in which others own groups. So the seed is asked too:
    it has this epoch, and its deputies obey it. None, after a pause: they were of several epochs.
    """
    groups = [group_of(prefix)] if b"/" in prefix else []
    seen = yield from view(lambda tables: look_at(tables, [], groups))
    standing = seen.standing
    if standing is None:
        rows = yield from view(lambda tables: tables.page(after, limit, prefix))
        return _Listing(None, [(key, entry.version if entry else 0) for key, entry in rows])
    if standing.is_removed:
        raise removed(standing)
    owner: GroupOwner | None = None
    if standing.is_joining:
        yield from pause(AGAIN)
        return None
    owners, seed = standing.roster.owners, standing.seed
    needs_seed = not groups and silent is None and len(owners) < len(standing.roster.members)
    if needs_seed and seed not in owners:
        owners = (*owners, seed)
    asked: list[tuple[Member, Grant | None]] = [(member, None) for member in owners]
    if groups:
        owner = yield from client.owner_of(seen, groups)
        if owner is None:
            return None
        if owner.member is None:
            return _Listing(standing, [])
        asked = [(owner.member, owner.grants[groups[0]])]
    pages: list[Listed] = []
    listing = _Listing(standing, [])
    for member, grant in asked:
        request = List(prefix, after, limit, *((0, 0) if grant else standing.roster.position), grant)
        client.asked = asked_of(standing, member)
        if silent is not None and member.id in silent:
            continue
        if member.id == standing.member:
            answer = yield from view(lambda tables, it=request: owning.list_page(tables, own_standing(tables), it))
        else:
            answer = yield from send(member, request)
        if answer is None and silent is not None:
            silent[member.id] = member
            continue
        if not isinstance(answer, Listed):
            if isinstance(answer, NotOwner) and owner is not None:
                client.refuse(owner)
            yield from pause(AGAIN)
            return None
        pages.append(answer)
        listing.waits.append((member, answer.version, grant))
    if needs_seed:
        client.asked = Seed(seed)
        answer = yield from send(seed, FindOwners((), ()))
        if not isinstance(answer, Owners):
            yield from try_again(answer)
            return None
    listing.rows = _merge(pages, limit)
    return listing


def _merge(pages: list[Listed], limit: int) -> list[tuple[bytes, int]]:
    """Merges in order, up to where every page goes: beyond the last key of a full one there may be more.

    A key that is being handed over may be on two of them.
    """
    ends = [page.rows[-1][0] for page in pages if len(page.rows) == limit]
    rows = sorted(dict(sorted(row for page in pages for row in page.rows)).items())
    return [row for row in rows if not ends or row[0] <= min(ends)]


def wait_any(client: Client, prefix: bytes, newer_than: Mapping[bytes, int] | int) -> Steps[dict[bytes, int]]:
    """Waits until keys with a prefix have newer versions. Returns all that do; raises StoreTimeoutError.

    It lists the keys, and then waits at all members, or at the owner, for a version above the last one that was
    assigned there: also of groups that they come to own. Where the roster changes, it lists them once more.
    """
    first: _Listing | None = None
    try:
        while True:
            new: dict[bytes, int] = {}
            after: bytes = b""
            first = None
            while True:
                listing = yield from _round(client, prefix, after, ROWS_LIMIT)
                if listing is None:
                    continue
                first = first or listing
                if not listing.rows:
                    break
                after = listing.rows[-1][0]
                for key, version in listing.rows:
                    known = newer_than if isinstance(newer_than, int) else newer_than.get(key, 0)
                    if version > known:
                        new[key] = version
            if new:
                return new
            yield from _news(client, prefix, first)
    except DeadlinePassed as why:
        if first is None:
            raise not_listed(prefix, client.asked, why) from None
        name = prefix.decode(errors="replace")
        raise StoreTimeoutError(f"no key that starts with {name!r} has a newer version") from None


def _news(client: Client, prefix: bytes, listing: _Listing) -> Steps[None]:
    standing = listing.standing
    if standing is None:
        yield from pause(AGAIN)  # a process of the store sleeps on the doorbell instead
    elif not listing.waits:
        yield from _watch(client, standing, group_of(prefix))
    else:
        sends: list[Send] = []
        for member, version, grant in listing.waits:
            position = (0, 0) if grant else standing.roster.position
            request = WaitAny(prefix, version, LONGEST_WAIT, *position, grant)
            sends.append(Send(member.address, member.id, request))
        answer = yield Race(tuple(sends))
        if not isinstance(answer, IsAt):
            yield from pause(AGAIN)


def wait_any_of(client: Client, keys: Sequence[bytes], newer_than: Mapping[bytes, int] | int) -> Steps[None]:
    """Waits until one of these keys may have a newer version: look at them then. It lets DeadlinePassed through.

    One question is open at the owner of each key, and one at the seed for each group that nobody owns.
    """
    groups = groups_of(keys)
    while True:
        seen = yield from view(lambda tables: look_at(tables, [], groups))
        standing = seen.standing
        if standing is None:
            return
        rows = yield from client.locate(seen, standing, groups)
        if rows is None:
            continue
        seed = standing.seed
        sends = [Send(seed.address, seed.id, WatchGroup(one, LONGEST_WAIT)) for one in groups if rows[one] is None]
        for key in keys:
            row = rows[group_of(key)]
            member = None if row is None else standing.roster.member(row.owner)
            if row is not None and member is not None:
                known = newer_than if isinstance(newer_than, int) else newer_than.get(key, 0)
                sends.append(Send(member.address, member.id, Wait(key, row.grant, known, LONGEST_WAIT)))
        if not sends:
            yield from pause(AGAIN)  # the owner was removed, or is new: this host will hear of it
            continue
        answer = yield Race(tuple(sends))
        if not (isinstance(answer, Owners) or answer == IsAt(0)):
            return  # a lookup asks each owner by itself, and so finds which of them is another one now


# --- seals ------------------------------------------------------------------------------------------------------------


def is_unsealed(client: Client, key: bytes, place: Place, until: int) -> Steps[bool]:
    """Whether the key still has the mutable entry whose rows lie there, and no seal can be made that was begun before.

    It is asked by the host that has the rows, when a sealer died, or had no answer. The seal was a call to the owner,
    and may be on its way still. It expects the version that the entry had. So the entry gets a new one, under the same
    name and with the same rows: once that is done, the seal is refused whenever it comes. If this host owns the key,
    its record says all: a call to an owner before is dead, since its grant is.

    Args:
        place: on this host.
        until: as of `Client.commit`.

    Raises:
        HomeUnavailableError, UnknownOutcomeError: nobody knows.
        StaleMembershipError.
    """
    while True:
        seen = yield from view(lambda tables: look_at(tables, [key]))
        entry = seen.entries[0]
        is_here = seen.standing is None or entry is not None or group_of(key) in seen.owned
        if not is_here:
            (entry,) = yield from look_up(client, [key])
        if entry is None or not entry.is_mutable or entry.places != (place,):
            return False
        if is_here:
            return True
        renewal = Change(key, b"", expect=entry.version, is_mutable=True, seals=place.put_id)
        try:
            yield from client.commit([renewal], until)
        except (VersionConflictError, MutableEntryError):
            continue  # it was changed meanwhile
        return True
