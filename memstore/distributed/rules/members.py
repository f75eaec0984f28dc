"""Who is a member of the cluster, and which member is the home of a key.

All of it follows from the view, which the seed alone changes: so every member that has the same view knows the same
homes, and whom a home has to hear before it begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from memstore.distributed.rules.terms import Id

EPOCH_BITS = 40  # versions that a home assigns in an epoch are above `epoch << EPOCH_BITS`
MOST_EPOCHS = 1 << 22  # what a root that joins may have seen: as many are left, of the numbers below 2^63


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A root that takes part.

    Attributes:
        id: the store id in its `memstore.json`, 16 bytes. A root that was lost never comes back under the same one.
        address: where its index process listens.
        is_home: False: no key has its home there; its processes use the store, and their bytes lie there.
    """

    id: Id
    address: Annotated[str, Meta(max_length=128)]
    name: Annotated[str, Meta(max_length=256)] = ""
    is_home: bool = True


class View(msgspec.Struct, frozen=True, array_like=True):
    """The members of an epoch.

    Attributes:
        before: ids of the homes of the last epoch that all members had settled in. What they held is on its way to the
            homes of this one.
        seed: the id of the member that the cluster began with.
    """

    cluster: bytes
    epoch: int
    members: tuple[Member, ...]
    before: tuple[bytes, ...]
    seed: bytes = b""

    @property
    def ids(self) -> frozenset[bytes]:
        return frozenset(member.id for member in self.members)

    @property
    def homes(self) -> tuple[bytes, ...]:
        return tuple(member.id for member in self.members if member.is_home)

    @property
    def version_floor(self) -> int:
        return self.epoch << EPOCH_BITS

    def member(self, member: bytes) -> Member | None:
        return next((one for one in self.members if one.id == member), None)

    @property
    def seed_address(self) -> str:
        seed = self.member(self.seed)
        return "" if seed is None else seed.address

    def home_of(self, key: bytes) -> bytes:
        return highest(self.homes, group_of(key))

    def home_before(self, key: bytes) -> bytes:
        return highest(self.before, group_of(key))


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """What a member knows of the cluster and of itself: the row `cluster` of its catalog.

    Attributes:
        missing: ids of members that have not yet given all that has its home here now.
        is_joining: the root had keys when it was first served, and some aren't at their homes yet.
        is_removed: the seed has said that this root is no member any more.
    """

    member: bytes
    view: View
    missing: tuple[bytes, ...] = ()
    is_joining: bool = False
    is_removed: bool = False

    def is_home_of(self, key: bytes) -> bool:
        return self.view.home_of(key) == self.member

    def is_ready_for(self, key: bytes) -> bool:
        """Whether all that was put under this key before the move is here. Only of a key that is at home here."""
        return not self.missing or self.view.home_before(key) not in self.missing

    def has_all_of(self, key: bytes) -> bool:
        """Whether it is at home here, with all that was put under it before."""
        is_member = not self.is_removed and not self.is_joining
        return is_member and self.is_home_of(key) and self.is_ready_for(key)


def group_of(key: bytes) -> bytes:
    """The part of a key that decides where its home is."""
    return key.partition(b"/")[0]


def highest(members: Iterable[bytes], group: bytes) -> bytes:
    """Rendezvous hashing: without one member, only its groups go elsewhere."""
    return _highest(tuple(members), group)


@functools.lru_cache(maxsize=1 << 12)
def _highest(members: tuple[bytes, ...], group: bytes) -> bytes:
    return max(members, key=lambda member: (xxhash.xxh3_64_intdigest(member + group), member))


def givers_to(view: View, member: bytes) -> tuple[bytes, ...]:
    """The members that may hold what is at home at `member` now.

    A new home gets its share from all that were homes before. An old one gets what was at home at members that are
    homes no longer. Those that are no members any more give nothing.
    """
    if member not in view.homes:
        return ()
    before = [one for one in view.before if one in view.ids and one != member]
    if member in view.before:
        before = [one for one in before if one not in view.homes]
    return tuple(before)


def takers_from(view: View, member: bytes) -> tuple[bytes, ...]:
    """The members that wait for `member`."""
    return tuple(one for one in view.homes if member in givers_to(view, one))
