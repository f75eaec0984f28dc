"""Nouns of a cluster: members and their roster, grants of groups, records and their changes.

All are msgpack arrays, which lie in rows of a host's catalog and in messages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from memstore._arguments import MOST_VERSIONS
from memstore.engine import Place, tables

KEY_LIMIT = 500  # bytes
LANES = 256
POLICIES_LIMIT = QUOTAS_LIMIT = 256
EPOCH_BITS = 40  # versions that are assigned under a grant are above `epoch << EPOCH_BITS`
MOST_EPOCHS = 1 << 22  # that a root which joins may have seen: as many are left, of the numbers below 2^63
TERM_BITS = 36  # a grant's number is its term, and then a counter of this many bits
SEED_BITS = 12  # a term is a counter, and then this many bits that tell one member from another
_PLACE, _NUMBERS = 40, 64  # bytes, at most

Key = Annotated[bytes, Meta(min_length=1, max_length=KEY_LIMIT)]
Group = Annotated[bytes, Meta(max_length=KEY_LIMIT)]
Id = tables.Id
Number = tables.Number
Duration = tables.Duration
Rank = tables.Rank
Limits = tuple[Annotated[int, Meta(ge=1, le=MOST_VERSIONS)], Number]  # as of `Record.history`


def group_of(key: bytes) -> bytes:
    """Returns the part of a key that has one owner."""
    return key.partition(b"/")[0]


def groups_of(keys: Iterable[bytes]) -> tuple[bytes, ...]:
    """Returns the groups of keys, each once, in the order of their first keys: grants of a message stand in it."""
    return tuple(dict.fromkeys(map(group_of, keys)))


# --- members ----------------------------------------------------------------------------------------------------------


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A root that takes part.

    Attributes:
        id: the store id in its `memstore.json`, 16 bytes. A root that was lost never comes back under the same one.
        address: where its index process listens.
        is_owner: False: what its processes put first is owned by another member; their bytes lie here. The seed gives
            it no group, unless there is no other member to give it to, or it had the group before.
    """

    id: Id
    address: Annotated[str, Meta(max_length=128)]
    name: Annotated[str, Meta(max_length=256)] = ""
    is_owner: bool = True

    @property
    def label(self) -> str:
        """Returns its name and address, for people."""
        return f"{self.name or 'the host'} at {self.address}"


class Departed(msgspec.Struct, frozen=True, array_like=True):
    """A member that was removed, and whose groups have no owner yet: see `recovery.py`.

    Attributes:
        heir: the member that is to own them.
        is_ready: all members have told the heir what they keep of them: it opens them.
    """

    member: Member
    heir: Id
    is_ready: bool = False


Returns = tuple[tuple[bytes, bytes], ...]


class Policy(msgspec.Struct, frozen=True, array_like=True):
    """How many hosts are to have the values of a group: see `replicas.py`.

    Attributes:
        group: None: every group that has no policy of its own.
        replicas: hosts that have each value, its owner among them: 1 or 2.
        is_async: a put returns before the second host has its value.
        fails: a put that finds no second host fails; else it goes on, and says so.
    """

    group: Group | None
    replicas: Annotated[int, Meta(ge=1, le=2)]
    is_async: bool = False
    fails: bool = True


class Quota(msgspec.Struct, frozen=True, array_like=True):
    """How many bytes the keys with a prefix may take together. All of them are of one group, whose owner counts.

    Each member has the same quotas, so a group that goes to another owner needs none to be handed over: who takes a
    record counts it.
    """

    prefix: Key
    limit: Number


class Roster(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The members of an epoch. Only the seed makes another one.

    Attributes:
        term: begins with each new seed. No two members of a roster make the same one.
        epoch: grows with each change, also from term to term.
        seed: the id of the member that keeps the directory.
        deputies: ids of the members that have all of the directory, before it says anything of it.
        voters: ids of the members of the roster before. It counts once a majority of them has it.
        holders: ids of members with `is_owner` False that may own groups all the same: they had some before.
        leavers: members that are drained, each with the one that is to take its groups; empty: whoever stays.
        base: of a term that was forced, until its directory is whole: the newest position that its seed has heard of.
        lease: nanoseconds of the leases that members hold, of three members or more; 0: none. See `fence.py`.
        leased: ids of members that obey it for sure: the seed removes no other one by itself.
        departed: members that were removed, until their groups have owners again.
        returns: members that were removed and may come back, each with the member that brings back what it had (empty:
            none yet). See `returning.py`.
        policies: how many hosts are to have the values of groups: POLICIES_LIMIT at most.
        quotas: of prefixes: QUOTAS_LIMIT at most.
    """

    cluster: bytes
    term: Number
    epoch: Number
    members: tuple[Member, ...]
    seed: bytes
    deputies: tuple[bytes, ...] = ()
    voters: tuple[bytes, ...] = ()
    holders: tuple[bytes, ...] = ()
    leavers: tuple[tuple[bytes, bytes], ...] = ()
    base: tuple[Number, Number] = (0, 0)
    lease: Number = 0
    leased: tuple[bytes, ...] = ()
    departed: tuple[Departed, ...] = ()
    returns: Returns = ()
    policies: tuple[Policy, ...] = ()
    quotas: tuple[Quota, ...] = ()

    @property
    def owners(self) -> tuple[Member, ...]:
        """Returns the members that may own groups: no other one does in this epoch."""
        return tuple(member for member in self.members if member.is_owner or member.id in self.holders)

    @property
    def takers(self) -> tuple[Member, ...]:
        """Returns the members that new groups are given to, if there are any."""
        return tuple(member for member in self.members if member.is_owner and not self.is_leaver(member.id))

    def is_leaver(self, member: bytes) -> bool:
        return any(member == leaver for leaver, _ in self.leavers)

    @property
    def position(self) -> tuple[int, int]:
        """The term and the epoch: of two rosters, the one with the larger position is the newer one."""
        return self.term, self.epoch

    @functools.cached_property
    def ids(self) -> frozenset[bytes]:
        return frozenset(self._by_id)

    @functools.cached_property
    def _by_id(self) -> dict[bytes, Member]:
        return {member.id: member for member in self.members}

    def member(self, member: bytes) -> Member | None:
        return self._by_id.get(member)

    def departed_of(self, member: bytes) -> Departed | None:
        """Returns a member that was removed, if its groups have no owner yet."""
        return next((one for one in self.departed if one.member.id == member), None)

    def may_return(self, member: bytes) -> bool:
        """Returns whether a member that was removed may come back."""
        return any(member == former for former, _ in self.returns)

    def policy_of(self, group: bytes) -> Policy | None:
        """Returns the policy of a group whose values are to have replicas; None: they are to have none."""
        if not self.policies:
            return None
        rows = {policy.group: policy for policy in self.policies}
        found = rows.get(group) or rows.get(None)
        return None if found is None or found.replicas < 2 else found

    @property
    def seed_address(self) -> str:
        seed = self.member(self.seed)
        return "" if seed is None else seed.address


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """A member's knowledge of the cluster and of itself: the row `cluster` of its catalog.

    Attributes:
        floor: a grant whose number is at most this, and that isn't in `owned`, is dead for good.
        promised: it obeys no seed of an older term.
        is_joining: the root had keys when it was admitted, and some may be of groups that it hasn't claimed.
        is_removed: the seed has said that this root is no member any more.
        unheard: of a seed that has no directory: ids of members that have not announced yet what they own.
        losses: how often a roster came without some member of the one before.
        is_sealed: it is drained, and owns nothing: it will own nothing any more, and its processes change nothing.
        stays: its drain is cancelled, and the seed hasn't said that it has heard so. It isn't sealed then.
    """

    member: bytes
    roster: Roster
    floor: int = 0
    promised: int = 0
    is_joining: bool = False
    is_removed: bool = False
    unheard: tuple[bytes, ...] = ()
    losses: Number = 0
    is_sealed: bool = False
    stays: bool = False

    @property
    def may_change(self) -> bool:
        """Whether this host may own groups, and its processes may change keys."""
        return not self.is_removed and not self.is_sealed

    @property
    def is_seed(self) -> bool:
        return self.roster.seed == self.member

    @property
    def seed(self) -> Member:
        """Returns the member that has the directory."""
        seed = self.roster.member(self.roster.seed)
        assert seed is not None, "the seed is a member"
        return seed


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The right to own a group.

    Attributes:
        number: `term << TERM_BITS`, and a counter of the seed on top. It never repeats.
        epoch: in which it was given. Versions that are assigned under it are above `epoch << EPOCH_BITS`.
        after: the number of the grant whose records its member was handed; 0: the group was new.
        recovered: versions below `recovered << EPOCH_BITS` were recovered after their owner was removed.
    """

    number: Number
    epoch: Number
    after: Number = 0
    recovered: Number = 0

    @property
    def term(self) -> int:
        return self.number >> TERM_BITS


class Ownership(msgspec.Struct, frozen=True, array_like=True):
    """A row of the directory: who owns a group, by which grant.

    Attributes:
        giver: who hands it over, and may have it still. If the owner is removed, it is the giver's again.
        since: the number of the first grant from which on other hosts' backups of the group count: the owner has told
            them of each change since. 0: this grant's.
        former: the removed member that owned it last: nobody has changed its keys between that and this grant, and this
            owner remembers what is deleted. None: nobody knows.
    """

    group: Group
    owner: Id
    grant: Grant
    giver: Id | None = None
    since: Number = 0
    former: Id | None = None

    @property
    def first(self) -> int:
        return self.since or self.grant.number


# --- records ----------------------------------------------------------------------------------------------------------


class OlderVersion(msgspec.Struct, frozen=True, array_like=True):
    """A replaced version that is kept, as a hand-over brings it with the present one. Its fields are as of `Entry`."""

    version: Number
    body: bytes
    places: Annotated[tuple[Place, ...], Meta(max_length=1 << 16)] = ()


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A version of a key.

    Attributes:
        body: what the record says beside that, opaque here.
        places: where its bytes lie; none, if the body has them.
        is_mutable: its rows are written in place, on the host of its only place; no ordinary value is put over it.
        history: how many of the key's last versions stay readable, this one among them, and how many bytes the replaced
            ones may take (0: any); None: this one alone. See `history.py`.
        replaced: the replaced ones, the oldest first, where a hand-over brings them.
    """

    version: Number
    body: bytes
    places: Annotated[tuple[Place, ...], Meta(max_length=1 << 16)] = ()
    is_mutable: bool = False
    history: Limits | None = None
    replaced: Annotated[tuple[OlderVersion, ...], Meta(max_length=MOST_VERSIONS)] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in a message, with its key, at most."""
        nbytes = len(self.body) + _PLACE * len(self.places) + KEY_LIMIT + _NUMBERS
        return nbytes + sum([len(one.body) + _PLACE * len(one.places) + _NUMBERS for one in self.replaced])


class Returning(msgspec.Struct, frozen=True, array_like=True):
    """A version that comes back: it counts only if nobody has put or deleted its key since it was lost.

    Attributes:
        former: the removed member that had it.
        by: the member that brings it back.
        version: that it had.
        under: the number of the grant of a group that `former` owned last, as the directory says; 0: it was put into
            the group of another owner.
    """

    former: Id
    by: Id
    version: Number
    under: Number = 0


class Change(msgspec.Struct, frozen=True, array_like=True):
    """One key's part of a commit: its new content, or with `body` None its deletion.

    Attributes:
        expect: the version that the key must have; 0: it must not exist; None: whatever it has.
        is_mutable: as of `Entry`.
        seals: the put id of the mutable entry that the key must have; 0: it must have none. With `is_mutable`, that
            entry gets a new version, and nothing else changes.
        returns: it is put only if it may come back.
        history: as of `Entry`, from this version on; None: as the key has it.
    """

    key: Key
    body: bytes | None
    places: Annotated[tuple[Place, ...], Meta(max_length=1 << 16)] = ()
    expect: Number | None = None
    missing_ok: bool = False
    is_mutable: bool = False
    seals: Number = 0
    returns: Returning | None = None
    history: Limits | None = None

    @property
    def renews(self) -> bool:
        return self.is_mutable and self.seals != 0

    @property
    def may_create(self) -> bool:
        """Whether it may succeed where there is no such key. Only such a change claims its group."""
        return self.body is not None and not self.expect and not self.seals

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in a message, at most."""
        return len(self.body or b"") + _PLACE * len(self.places) + KEY_LIMIT + _NUMBERS


class Backup(msgspec.Struct, frozen=True, array_like=True):
    """A version as a host keeps it that has put it, where another host owns it.

    Attributes:
        number: of the grant by which the owner was asked.
        body, places, is_mutable, history: as of `Entry`; the history that its put has asked for.
        is_replica: the bytes are a replica, which no record of the owner names.
    """

    version: Number
    number: Number
    body: bytes
    places: Annotated[tuple[Place, ...], Meta(max_length=1 << 16)] = ()
    is_mutable: bool = False
    is_replica: bool = False
    history: Limits | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in a message, with its key, at most."""
        return len(self.body) + _PLACE * len(self.places) + KEY_LIMIT + _NUMBERS


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The number that makes a request happen once: see `owning.py`. The epoch is its sender's, when it was made."""

    session: Number
    lane: Annotated[int, Meta(ge=0, lt=LANES)]
    number: Number
    epoch: Number
