"""How a root becomes a member, and who it is: looked at once, when its index process starts.

1. A root that is a member asks the seed that its view names, under the address that it has there.
2. A new root whose address is the seed's begins a cluster.
3. Any other new root looks whether the cluster has keys of the same names as its own, and then asks.
"""

from __future__ import annotations

import os
import socket
import time

import msgspec

from memstore.distributed.catalog import CatalogTables, run
from memstore.distributed.links import Hello, parse_address
from memstore.distributed.rules import Index, Member, Refused, Standing, found
from memstore.distributed.serving.driving import MUTEX_WITHIN, Driver
from memstore.distributed.serving.options import Options
from memstore.distributed.serving.reporting import standing_of
from memstore.distributed.serving.taken_keys import SHOWN, taken_keys
from memstore.engine import Root
from memstore.errors import NotServedError

_ANOTHER = "serve an empty folder to make another host of it"


class Place(msgspec.Struct, frozen=True):
    """This host in its cluster."""

    member: Member
    seed: str


def place_of(root: Root, options: Options) -> Place:
    """Raises NotServedError where the root is of another cluster, or another host."""
    address, seed = str(parse_address(options.address)), str(parse_address(options.seed))
    member = Member(root.member_id(), address, socket.gethostname(), options.is_home)
    standing = standing_of(root)
    if standing is None:
        return Place(member, seed)
    check_standing(root, standing)
    view = standing.view
    known = view.member(member.id)
    if known is not None and known.address != address:
        raise NotServedError(
            f"{root.path} is the host {known.address} of its cluster, which can't become {address}: serve it at "
            f"{known.address}; or, if it is a copy, {_ANOTHER}"
        )
    if seed not in (address, view.seed_address):  # its own: it was told none
        raise NotServedError(
            f"{root.path} belongs to the cluster of the seed {view.seed_address}, not to that of {seed}: {_ANOTHER}"
        )
    return Place(member, view.seed_address)


def check_standing(root: Root, standing: Standing) -> None:
    if standing.is_removed:
        raise NotServedError(f"{root.path} was removed from its cluster: {_ANOTHER}")


def begin(root: Root, place: Place, driver: Driver) -> None:
    """What a new root does before it asks. Raises NotServedError, naming keys that the cluster has too."""
    if standing_of(root) is not None:
        return
    if place.seed == place.member.address:
        run(root, lambda tables: _found(tables, place.member), time.monotonic() + MUTEX_WITHIN)
        return
    if not root.catalog.view(lambda transaction: transaction.count("entries")):
        return
    taken = driver.run(taken_keys(place.seed, place.member), is_patient=False)
    if isinstance(taken, Refused):
        raise refused(root, place, taken.why)
    if taken:
        more = " and more" if len(taken) == SHOWN else ""
        raise NotServedError(
            f"{root.path} and the cluster of {place.seed} both have {', '.join(map(repr, taken))}{more}: delete them, "
            "or put them under other names, on one side first"
        )


def _found(tables: CatalogTables, member: Member) -> None:
    if tables.standing() is None:
        found(tables, member, os.urandom(16))


def _other_storage(root: Root, hello: Hello) -> str | None:
    """None: both have the same storage, or none that hosts share."""
    own = "" if root.settings.shared is None else root.settings.shared.store
    if own == hello.storage:
        return None
    if not own:
        return (
            f"has its store on storage that hosts share (store {hello.storage}): mount that here, and serve the same "
            "folder with --shared"
        )
    if not hello.storage:
        return "serves a store that is not on storage that hosts share: serve it with --shared too, or this one without"
    return (
        f"has another store on its storage ({hello.storage}) than {root.path} has here ({own}): is the same storage "
        "mounted on both?"
    )


def refused(root: Root, place: Place, why: str) -> NotServedError:
    return NotServedError(f"{root.path} at {place.member.address}: {place.seed} says: {why}")


def refusal_of(
    root: Root, place: Place, index: Index, driver: Driver, hello: Hello | None, *, is_member: bool
) -> NotServedError | None:
    """Why this root can't become a member, or is one no longer. None: nothing stands in the way but time.

    Args:
        hello: what the seed has said of itself, if it did.
    """
    if hello is not None and not is_member and place.seed != place.member.address:
        other = _other_storage(root, hello)
        if other is not None:
            return NotServedError(f"{root.path} at {place.member.address}: the seed {place.seed} {other}")
    if index.refusal is not None and (index.refusal.is_removed or not is_member):
        return refused(root, place, index.refusal.why)
    if place.seed in driver.refused and not is_member:
        return NotServedError(f"{root.path} at {place.member.address}: {driver.refused[place.seed]}")
    return None
