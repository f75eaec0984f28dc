"""What must hold when all is quiet."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.distributed import Place
from memstore.testing.explore import Fault
from tests.distributed.world import Host, World


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
    named = {place: key for host in hosts for key, entry in host.tables.records.items() for place in entry.places}
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
