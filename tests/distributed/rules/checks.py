"""What must hold when all is quiet."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.distributed.rules import Place, group_of
from tests.distributed.rules.world import Host, World
from tests.support.explore import Fault


def check_settled(world: World, hosts: Sequence[Host]) -> None:
    standings = [host.tables.standing() for host in hosts]
    rosters = {None if one is None else one.roster for one in standings}
    if len(rosters) > 1 or any(one is None or one.is_joining or one.is_removed or one.unheard for one in standings):
        raise Fault(f"the members don't settle: {standings}", tuple(world.trace))
    roster = next(one.roster for one in standings if one is not None)
    if set(roster.ids) != {host.id for host in hosts}:
        raise Fault(f"not all are members: {roster}", tuple(world.trace))
    if roster.leavers or any(one is not None and (one.stays or one.is_sealed) for one in standings):
        raise Fault(f"a drain doesn't end: {standings}", tuple(world.trace))
    steady = {member.id for member in roster.owners} - {roster.seed}
    if len(roster.deputies) < (min(2, len(steady)) or min(1, len(hosts) - 1)):
        raise Fault(f"too few have the directory: {roster}", tuple(world.trace))
    if steady and not steady.issuperset(roster.deputies):
        raise Fault(f"deputies are no owners: {roster}", tuple(world.trace))
    if roster.departed:
        raise Fault(f"a recovery doesn't end: {roster}", tuple(world.trace))
    if any(host.tables.unnoted for host in hosts):
        raise Fault(f"hosts aren't told: {[host.tables.unnoted for host in hosts]}", tuple(world.trace))
    if any(host.tables.lacks for host in hosts):
        raise Fault(f"replicas are missing: {[host.tables.lacks for host in hosts]}", tuple(world.trace))
    check_backups(world, hosts, roster.seed)
    if roster.policies:
        check_replicas(world, hosts)
    on_their_way = [*(host.tables.leaving_groups for host in hosts), *(host.tables.kept_groups for host in hosts)]
    if any(on_their_way):
        raise Fault(f"hand-overs don't end: {on_their_way}", tuple(world.trace))
    if any(host.index is not None and not all(one.is_over for one in host.index.returns) for host in hosts):
        raise Fault(f"a return doesn't end: {roster.returns}", tuple(world.trace))
    check_directory(world, hosts)


def check_directory(world: World, hosts: Sequence[Host]) -> None:
    """Every group that is owned stands in the directory, and deputies have all of it."""
    standing = hosts[0].tables.standing()
    assert standing is not None
    directories = {host.id: host.tables.directory for host in hosts}
    rows = directories[standing.roster.seed]
    owners = {member.id for member in standing.roster.owners}
    for host in hosts:
        if host.tables.own_groups and host.id not in owners:
            raise Fault(f"{host.address} owns groups, and nobody asks it: {standing.roster}", tuple(world.trace))
        for group, grant in host.tables.own_groups.items():
            row = rows.get(group)
            if row is None or row.owner != host.id or row.grant.number < grant.number:
                raise Fault(
                    f"{host.address} owns {group!r} by {grant}, and the directory says {row}", tuple(world.trace)
                )
    for deputy in standing.roster.deputies:
        missing = {row for row in rows.values() if row.owner in standing.roster.ids} - {*directories[deputy].values()}
        if missing:
            raise Fault(f"{deputy!r} hasn't {missing}", tuple(world.trace))


def check_backups(world: World, hosts: Sequence[Host], seed: bytes) -> None:
    """What a host keeps of another's group is what that has, and the owner knows who keeps it.

    Or it is an older version, where the process that has put the present one was killed before it wrote what it keeps.
    """
    tables = {host.id: host.tables for host in hosts}
    for host in hosts:
        for key, backup in host.tables.backups.items():
            row = tables[seed].directory.get(group_of(key))
            if row is None or backup.number < row.first or row.owner in (host.id, *world.gone):
                continue
            record = tables[row.owner].records.get(key)
            is_it = record is not None and record.version == backup.version
            is_it = is_it and (record.places == backup.places or {place.host for place in backup.places} == {host.id})
            if record is None or not (is_it or backup.version < record.version):
                raise Fault(f"{host.address} keeps {backup} of {key!r}, and its owner {record}", tuple(world.trace))
            if (host.id, record.version) not in tables[row.owner].keeping.get(key, ()):
                raise Fault(f"nobody knows that {host.address} keeps {key!r}", tuple(world.trace))


def check_replicas(world: World, hosts: Sequence[Host]) -> None:
    """Each value lies with its owner, and whole on another host that keeps it."""
    for host in hosts:
        for key, entry in host.tables.records.items():
            values = {host.tables.segments[place.put_id].value for place in entry.places if place.host == host.id}
            keepers = [
                (one, it) for one in hosts if (it := one.tables.backups.get(key)) and it.version == entry.version
            ]
            copies = [
                {one.tables.segments[place.put_id].value for place in it.places}
                for one, it in keepers
                if all(place.host == one.id and place.put_id in one.tables.segments for place in it.places)
            ]
            if any(place.host != host.id for place in entry.places) or values not in copies:
                raise Fault(f"{key!r} of {host.address} has {entry}, and copies are {keepers}", tuple(world.trace))


def check_gone(world: World, hosts: Sequence[Host]) -> None:
    """Nobody has anything of members that have left, but that they gave a group, or were asked for a segment.

    A late message may have brought a row of the directory, too, which counts for nothing.
    """
    standing = hosts[0].tables.standing()
    assert standing is not None
    for host in hosts:
        tables = host.tables
        named = {
            "records": [place.host for entry in tables.records.values() for place in entry.places],
            "replaced": [place.host for row in tables.all_replaced(b"", 1 << 20) for place in row.entry.places],
            "kept": [place.host for entry in tables.kept_records.values() if entry for place in entry.places],
            "backups": [place.host for backup in tables.backups.values() for place in backup.places],
            "keepers": [keeper for rows in tables.keeping.values() for keeper, _ in rows],
            "leaving": [leaving.taker for leaving in tables.leaving_groups.values()],
            "owed": [place.host for place in tables.debts],
            "parts": [part.host for part in tables.parts()],
        }
        for what, hosts_named in named.items():
            may = world.graves.keys() if what in ("records", "kept", "backups") else ()
            if gone := set(hosts_named) - standing.roster.ids - set(may):
                raise Fault(f"{host.address} has {what} of {gone}", tuple(world.trace))


def check_bytes(world: World, hosts: Sequence[Host]) -> None:
    """Every byte has one record that names it, and every record its bytes."""
    named = {
        Place(place.host, place.put_id): key
        for host in hosts
        for key, entry in host.tables.records.items()
        for place in entry.places
    }
    named |= {
        Place(place.host, place.put_id): key
        for host in hosts
        for key, backup in host.tables.backups.items()
        for place in backup.places
        if place.host == host.id
    }
    named |= {
        Place(place.host, place.put_id): row.key
        for host in hosts
        for row in host.tables.all_replaced(b"", 1 << 20)
        for place in row.entry.places
    }
    waiting = [part for host in hosts for part in host.tables.parts()]
    if waiting:
        raise Fault(f"attempts don't end: {waiting}", tuple(world.trace))
    there = {Place(host.id, put_id) for host in hosts for put_id in host.tables.segments}
    there |= {Place(one, put_id) for one, (_, tables) in world.graves.items() for put_id in tables.segments}
    filling = {
        Place(host.id, put_id)
        for host in hosts
        for put_id, segment in host.tables.segments.items()
        if not segment.state
    }
    if set(named) - there:
        raise Fault(f"bytes are missing: {set(named) - there}", tuple(world.trace))
    left = {
        place: (host.address, host.tables.segments[place.put_id].state, host.tables.lendings.get(place))
        for host in hosts
        for place in there - set(named) - filling
        if place.host == host.id
    }
    if left:
        raise Fault(f"nobody gives back {left}", tuple(world.trace))
    for host in hosts:
        strays = [key for key in host.tables.records if group_of(key) not in host.tables.own_groups]
        if strays or host.tables.debts:
            raise Fault(f"{host.address} still has {strays}, and owes {host.tables.debts}", tuple(world.trace))
        for key, kept in host.tables.replaced.items():
            record = host.tables.records.get(key)
            if len(kept) >= (record.history[0] if record is not None and record.history is not None else 1):
                raise Fault(f"{host.address} keeps {kept} of {key!r}, which is {record}", tuple(world.trace))


def check_sessions(world: World, hosts: Sequence[Host]) -> None:
    """Each is of a client that is there."""
    for host in hosts:
        stay = host.tables.open_sessions - world.connected(host)
        if stay:
            raise Fault(f"{host.address} keeps the sessions {stay} of clients that are gone", tuple(world.trace))
