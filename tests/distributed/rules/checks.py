"""What must hold when all is quiet."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.distributed.rules import Place
from tests.distributed.rules.world import Host, World
from tests.support.explore import Fault


def check_settled(world: World, hosts: Sequence[Host]) -> None:
    standings = [host.tables.standing() for host in hosts]
    epochs = {None if one is None else one.view.epoch for one in standings}
    if len(epochs) > 1 or None in epochs or any(one is None or one.missing or one.is_removed for one in standings):
        raise Fault(f"the members don't settle: {standings}", tuple(world.trace))
    view = next(one.view for one in standings if one is not None)
    if set(view.ids) != {host.id for host in hosts}:
        raise Fault(f"not all are members: {view}", tuple(world.trace))


def check_bytes(world: World, hosts: Sequence[Host]) -> None:
    """Every byte has one record that names it, and every record its bytes."""
    named = {
        Place(place.host, place.put_id): key
        for host in hosts
        for key, entry in host.tables.records.items()
        for place in entry.places
    }
    waiting = [part for host in hosts for part in host.tables.parts()]
    if waiting:
        raise Fault(f"attempts don't end: {waiting}", tuple(world.trace))
    there = {Place(host.id, put_id) for host in hosts for put_id in host.tables.segments}
    filling = {
        Place(host.id, put_id)
        for host in hosts
        for put_id, segment in host.tables.segments.items()
        if not segment.state
    }
    if set(named) - there:
        raise Fault(f"bytes are missing: {set(named) - there}", tuple(world.trace))
    if there - set(named) - filling:
        raise Fault(f"nobody gives back {there - set(named) - filling}", tuple(world.trace))
    for host in hosts:
        standing = host.tables.standing()
        assert standing is not None
        strays = [key for key in host.tables.records if not standing.is_home_of(key)]
        if strays or host.tables.debts:
            raise Fault(f"{host.address} still has {strays}, and owes {host.tables.debts}", tuple(world.trace))


def check_sessions(world: World, hosts: Sequence[Host]) -> None:
    """Each is of a client that is there, but for those that last: a host that was killed may have forgotten some."""
    for host in hosts:
        stay = host.tables.open_sessions - host.tables.lasting_sessions - world.connected(host)
        if stay:
            raise Fault(f"{host.address} keeps the sessions {stay} of clients that are gone", tuple(world.trace))
