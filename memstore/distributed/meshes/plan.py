"""Finds the hosts of a mesh: one for each folder, the cluster that these belong to already, and its secret.

Decided from what the index actors have seen, before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memstore.distributed.links import parse_address
from memstore.distributed.meshes.messages import Reached, Seen
from memstore.distributed.rules import Roster
from memstore.errors import NotServedError

_ANOTHER = "take another root, or end the agents, and remove the old folders"


@dataclass(frozen=True, slots=True)
class Plan:
    """Ranks are those of the meshes.

    Attributes:
        leaders: of the hosts of the store, in the meshes' order: of ranks that see one folder, the first.
        seed: the rank whose host is the seed; None: the seed is on none of these hosts, which join it.
        roster: of the cluster that exists already; None: none does.
        addresses: of ranks whose hosts have one already, or take a lost one's.
        secret: that the cluster has; empty: it has none yet.
        replaced: ids of members whose folders are lost, and whose places hosts with empty ones take.
    """

    leaders: tuple[int, ...]
    seed: int | None
    roster: Roster | None
    addresses: Mapping[int, str]
    secret: bytes
    replaced: tuple[bytes, ...] = ()

    @property
    def new(self) -> tuple[int, ...]:
        """Ranks whose hosts have no address yet."""
        return tuple(rank for rank in self.leaders if rank not in self.addresses)


def plan_of(seen: Mapping[int, Seen], join: Roster | None = None, secret: bytes | None = None) -> Plan:
    """Decides who is who.

    Args:
        seen: by rank.
        join: the cluster that these hosts are to belong to; None: that of their roots, or a new one of them alone.
        secret: of `join`.

    Raises NotServedError: roots are of several clusters, or of one with other hosts than these; or were removed.
    """
    leaders = _leaders(seen)
    old = {rank: seen[rank].roster for rank in leaders}
    rosters = {rank: roster for rank, roster in old.items() if roster is not None}
    for rank in rosters:
        if seen[rank].is_removed:
            raise NotServedError(f"{seen[rank].name}: its root was removed from its cluster: {_ANOTHER}")
    if not rosters and join is None:
        return Plan(leaders, leaders[0], None, {}, b"")
    known = [*rosters.values(), *(() if join is None else (join,))]
    if len({roster.cluster for roster in known}) > 1:
        names = [f"{seen[rank].name} to that of {roster.seed_address}" for rank, roster in rosters.items()]
        names += [] if join is None else [f"and join= is that of {join.seed_address}"]
        raise NotServedError(f"the roots belong to several clusters, {', '.join(names)}: {_ANOTHER}")
    roster = max(known, key=lambda one: one.position)
    addresses, lost = _addresses(seen, rosters, roster)
    seed = next((rank for rank, one in addresses.items() if one == roster.seed_address and rank in rosters), None)
    if join is None and lost:
        raise NotServedError(
            f"the cluster of the seed {roster.seed_address} has other hosts than the mesh: {', '.join(lost)} too. "
            "Serve these as further hosts of it, serve(mesh, root, join=cluster); or a mesh of all; or remove those "
            f"that are dead (memstore remove); or {_ANOTHER}"
        )
    if seed is None and join is None:
        raise NotServedError(
            f"the roots belong to the cluster of the seed {roster.seed_address}, whose own root is not on these "
            f"hosts, or is lost: {_ANOTHER}"
        )
    new = [seen[rank].name for rank in leaders if rank not in addresses]
    if new and parse_address(roster.seed_address).is_loopback:
        raise NotServedError(
            f"{', '.join(new)} can't join the host that was served for itself alone, at {roster.seed_address}: "
            f"{_ANOTHER}"
        )
    secrets = {*(seen[rank].secret for rank in rosters), *(() if join is None else (secret or b"",))}
    if len(secrets) > 1:
        raise NotServedError("the hosts of the cluster have several secrets: end the agents, and copy one ROOT/secret")
    taken = {addresses[rank] for rank in addresses if rank not in rosters}
    replaced = tuple(member.id for member in roster.members if member.address in taken)
    return Plan(leaders, seed, roster, addresses, secrets.pop(), replaced)


def _leaders(seen: Mapping[int, Seen]) -> tuple[int, ...]:
    first: dict[object, int] = {}
    for rank in sorted(seen):
        first.setdefault(seen[rank].folder, rank)
    return tuple(first.values())


def _addresses(
    seen: Mapping[int, Seen], rosters: Mapping[int, Roster], roster: Roster
) -> tuple[dict[int, str], list[str]]:
    """Returns the addresses of members, and those of members that aren't among these hosts.

    A host that came back with an empty folder takes the place that was its own.
    """
    found: dict[int, str] = {}
    for rank in rosters:
        member = roster.member(seen[rank].member)
        if member is None:
            raise NotServedError(f"{seen[rank].name}: its root was removed from its cluster: {_ANOTHER}")
        found[rank] = member.address
    lost = [member.address for member in roster.members if member.address not in found.values()]
    for rank in _leaders(seen):
        if rank not in found:
            place = next((one for one in lost if parse_address(one).ip in seen[rank].ips), None)
            if place is not None:
                found[rank] = place
                lost.remove(place)
    return found, lost


def reached_by_all(seed: str, addresses: Sequence[str], tried: Mapping[str, Reached]) -> int:
    """Which of the seed's addresses all others have reached: the first such one.

    Args:
        seed: its name.
        tried: by host's name, in the order of the addresses.

    Raises NotServedError: there is none; it names the hosts, and what they met.
    """
    for number in range(len(addresses)):
        if all(one.froms[number] for one in tried.values()):
            return number
    met = "; ".join(
        f"{name}: "
        + ", ".join(f"{address} {why or 'reached'}" for address, why in zip(addresses, one.whys, strict=True))
        for name, one in tried.items()
        if not all(one.froms)
    )
    raise NotServedError(
        f"the first host of the mesh, {seed}, has no address at which all others reach it ({met}): open the port "
        "between the hosts; or name its address by MEMSTORE_ADDRESS, in the environment of its worker"
    )
