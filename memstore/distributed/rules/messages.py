"""Messages of hosts to each other: requests, and their answers. Decision 029 has the table.

All are msgpack arrays. Messages begin with a number, so that a message is of one kind and has its fields checked, types
and bounds, when it is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from memstore.distributed.rules.nouns import (
    KEY_LIMIT,
    LANES,
    Backup,
    Call,
    Change,
    Duration,
    Entry,
    Grant,
    Group,
    Id,
    Key,
    Member,
    Number,
    Ownership,
    Policy,
    Rank,
    Returning,
    Roster,
)
from memstore.engine import AttemptOutcome, Failure, PendingPart, Place, tables

ROWS_LIMIT = 1024  # rows of one message, where who sends it may send several
PORTION = 128  # rows that one transaction writes, of what may be long: puts of its host wait for it, some 5 ms
BYTES_LIMIT = 16 << 20  # of the entries of one message, where who sends it may send several; one may have more
CALL_BYTES_LIMIT = 120 << 20  # of the changes of one call: a message has 128 MiB at most
BATCH_LIMIT = 1 << 16  # keys of a call, which is one message, of one moment
LONGEST_WAIT = 10_000  # milliseconds that a host keeps a question
CONTENTS_LIMIT = 32 << 20  # bytes of what parts say, of one answer; a part's own may be more
LARGEST_CONTENT = 64 << 20
LONGEST_NAME = 1 << 16  # characters, of an attempt
LONGEST_TEXT = 1 << 16  # characters of a sharded put's error
LARGEST_DETAILS = 1 << 18  # bytes
OUTCOMES_LIMIT = 64  # of one message

Prefix = Annotated[bytes, Meta(max_length=KEY_LIMIT)]
Text = Annotated[str, Meta(max_length=4096)]
Milliseconds = Annotated[int, Meta(ge=0, le=LONGEST_WAIT)]
Limit = Annotated[int, Meta(ge=1, le=ROWS_LIMIT)]
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Body = Annotated[bytes, Meta(max_length=LARGEST_CONTENT)]
Keys = Annotated[tuple[Key, ...], Meta(min_length=1, max_length=BATCH_LIMIT)]
Grants = Annotated[tuple[Grant, ...], Meta(max_length=BATCH_LIMIT)]  # in the order of `groups_of` the message's keys
Groups = Annotated[tuple[Group, ...], Meta(max_length=BATCH_LIMIT)]
Rows = Annotated[tuple[tuple[Key, Entry], ...], Meta(max_length=ROWS_LIMIT)]


# --- requests to an owner ---------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Asks for a new session. Its answer is `Opened`."""


class Close(msgspec.Struct, frozen=True, array_like=True, tag=2):
    session: Number


class Lookup(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Asks for the records of one moment.

    Attributes:
        pin: their bytes are to stay for a while.
        brief: only their versions are asked for.
        versions: which version of each key, the present one or one that was replaced and is kept; none: the present
            ones.
    """

    keys: Keys
    grants: Grants
    pin: bool = False
    brief: bool = False
    versions: Annotated[tuple[Number, ...], Meta(max_length=BATCH_LIMIT)] = ()

    def __post_init__(self) -> None:
        if self.versions and len(self.versions) != len(self.keys):
            raise ValueError(f"{len(self.versions)} versions of {len(self.keys)} keys")


class Wait(msgspec.Struct, frozen=True, array_like=True, tag=4):
    key: Key
    grant: Grant
    newer_than: Number
    milliseconds: Milliseconds


class List(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Asks for the next keys that a member owns.

    Attributes:
        term, epoch: of the listing, which asks all members in one epoch.
        grant: of the group of a prefix with a "/": its owner alone is asked, in any epoch.
    """

    prefix: Prefix
    after: Prefix
    limit: Limit
    term: Number = 0
    epoch: Number = 0
    grant: Grant | None = None


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Asks for changes.

    Attributes:
        keeper: the host that asks. Once it is answered it keeps what it has put, and drops what it has replaced; None:
            none does.
    """

    call: Call
    changes: Annotated[tuple[Change, ...], Meta(min_length=1, max_length=BATCH_LIMIT)]
    grants: Grants
    keeper: Id | None = None


class Resolve(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Asks what became of a call. If it never came, it never will be made."""

    session: Number
    lane: Annotated[int, Meta(ge=0, lt=LANES)]
    number: Number


class Named(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Asks whether the record of this key names this place. Its answer is `IsNamed`.

    Attributes:
        keeps: the version that its host keeps there; 0: it keeps none. The present one is as good as named.
    """

    key: Key
    place: Place
    grant: Grant
    keeps: Number = 0


class Release(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Tells the host of these places that nothing names them any more."""

    places: Annotated[tuple[Place, ...], Meta(max_length=ROWS_LIMIT)]


class WaitAny(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Waits until a key with this prefix has a version above a number; `term`, `epoch`, `grant` as of `List`."""

    prefix: Prefix
    newer_than: Number
    milliseconds: Milliseconds
    term: Number = 0
    epoch: Number = 0
    grant: Grant | None = None


class FindVersions(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Asks for the versions of a key that can be read. Its answer is `Found`: them in order, without bodies."""

    key: Key
    grant: Grant


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Brings a rank's part, whose segment is lent to the owner. Its answer is `Prepared`, or `Ended`.

    Attributes:
        content: what the part says of the value, opaque here.
    """

    call: Call
    part: PendingPart
    content: Body
    grant: Grant

    def __post_init__(self) -> None:
        if len(self.part.attempt) > LONGEST_NAME:
            raise ValueError(f"attempt has {len(self.part.attempt):,} characters, and may have {LONGEST_NAME:,}")


class Look(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Asks what has become of an attempt. Its answer is `Ended`, `Pending` or `Forgotten`.

    Attributes:
        key, attempt: None: of all keys, or of all attempts of the key.
        number: 0: whatever attempt has this name.
        milliseconds: that the owner may wait until the attempt is over, or complete.
        was_complete: the rank knows that it is; only its end is news.
        contents: the parts are to come with what they say.
        rank: the first one whose part is asked for.
    """

    key: Key | None
    attempt: Name | None = None
    number: Number = 0
    milliseconds: Milliseconds = 0
    was_complete: bool = False
    contents: bool = False
    rank: Rank = 0


class Renew(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Says that this rank still waits: its part's time begins anew. Its answer is `Done`, whatever there is."""

    key: Key
    attempt: Name
    number: Number
    rank: Rank


class Publish(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Brings all parts, merged. Its answer is `Ended`, `PartsChanged` or `Forgotten`.

    Attributes:
        parts: the places of those that were merged, by rank.
        body: of the record.
    """

    key: Key
    attempt: Name
    number: Number
    parts: Annotated[tuple[Place, ...], Meta(max_length=tables.MOST_RANKS)]
    body: Body


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Ends an attempt, unless it is over. Its answer is `Ended`, `PartsChanged` or `Forgotten`.

    Attributes:
        number: 0: the rank has no part, or doesn't know. The attempt may have begun all the same, or never will.
        call, grant: without a number. The call goes by the lane of the part that was sent and never answered: so that
            one can't come any more.
        parts: it is to be ended only if its parts are these; None: whatever they are.
        waits: nanoseconds that the rank would have waited.
    """

    key: Key
    attempt: Name
    number: Number
    failure: Failure
    call: Call | None = None
    parts: Annotated[tuple[Place, ...], Meta(max_length=tables.MOST_RANKS)] | None = None
    waits: Duration = 0
    grant: Grant | None = None


# --- requests to the seed ---------------------------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Says who this is, and which roster it has; kept until there is another one. Its answer is `IsRoster`, or `Done`.

    Attributes:
        cluster: that its root belongs to; None: to none yet.
        versions: no version of its root is larger.
        promised: as of `Standing`.
        brings: the number under which the seed has noted the groups of a root that has keys; 0: it has none.
        moved: the root is served at another address from now on.
    """

    member: Member
    cluster: Id | None
    term: Number
    epoch: Number
    versions: Number = 0
    promised: Number = 0
    brings: Number = 0
    moved: bool = False
    milliseconds: Milliseconds = 0


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Says that this member is dead, and won't come back."""

    member: Id


class ClaimGroups(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Asks for all of these groups, or none. Its answer is `Owners`.

    Attributes:
        member: that is to own them; None: whoever owns some of them already, else one that the seed chooses.
    """

    groups: Groups
    member: Id | None


class FindOwners(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Asks who owns these groups. Its answer is `Owners`.

    Attributes:
        refused: for each group, the number of the grant that its owner has refused; 0: none.
    """

    groups: Groups
    refused: Annotated[tuple[Number, ...], Meta(max_length=BATCH_LIMIT)]


class WatchGroup(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """Waits until a group has an owner. Its answer is `Owners`."""

    group: Group
    milliseconds: Milliseconds


class HandOver(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """Asks that a group that `giver` owns be owned by `taker`, which has all of its records. Its answer is `Owners`.

    Attributes:
        of: the number of the giver's grant.
        taker: the giver itself, if the one that was to get it was removed.
    """

    group: Group
    giver: Id
    of: Number
    taker: Id


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=38):
    """Says that a host has no record any more of groups that it has handed over: they are never its own again.

    Its answer is `Owners`.

    Attributes:
        rows: groups, each with the number of the grant by which the host owned it.
    """

    giver: Id
    rows: Annotated[tuple[tuple[Group, Number], ...], Meta(min_length=1, max_length=ROWS_LIMIT)]


class Finish(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """Asks for an epoch beyond this one, in which a group was handed over. Its answer is `IsRoster`."""

    epoch: Number


class BringGroups(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """Says which groups a root has that is to be admitted: they are its own once it is a member.

    Its answer is `Brought`; `Refused` if others own some; `Stale` if the number is no longer good: begin anew.

    Attributes:
        number: of the answer to the first message, which names no groups and no number (0).
        versions: no version of the root is larger.
    """

    member: Id
    number: Number = 0
    groups: Annotated[tuple[Group, ...], Meta(max_length=ROWS_LIMIT)] = ()
    versions: Number = 0


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=28):
    """Says that a member is to leave, when it has given away all that it has. Its answer is `IsRoster`, or `Refused`.

    Attributes:
        to: the member that is to take its groups; None: any that stays.
        cancels: it stays: that member says so itself.
    """

    member: Id
    to: Id | None = None
    cancels: bool = False


# --- requests between members -----------------------------------------------------------------------------------------


class Mirror(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """Tells a deputy rows of the directory: all whose numbers are above `after`, and at most `upto`."""

    term: Number
    after: Number
    upto: Number
    rows: Annotated[tuple[Ownership, ...], Meta(max_length=ROWS_LIMIT)]


class Promise(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """Asks a member to obey no seed of an older term any more. Its answer is `Promised`, or `Stale`."""

    cluster: Id
    term: Number


class Obey(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """Tells a member of a new seed. Its answer is `Promised`, or `Stale`."""

    roster: Roster


class Announce(msgspec.Struct, frozen=True, array_like=True, tag=43):
    """Asks a member that has the new seed what it owns, by groups beyond `after`. Its answer is `Announced`."""

    term: Number
    seed: Id
    after: Group | None


class Give(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """Brings records of a group that is being handed over, which are kept and not served.

    Attributes:
        of: the number of the giver's grant.
        damaged: keys whose records can't be read. They stay where they are, and the new owner knows that they were.
        version: with the last message: no version of the group is larger. None: more follow.
    """

    group: Group
    giver: Id
    of: Number
    rows: Rows
    outcomes: Annotated[tuple[AttemptOutcome, ...], Meta(max_length=OUTCOMES_LIMIT)] = ()
    damaged: Annotated[tuple[Key, ...], Meta(max_length=ROWS_LIMIT)] = ()
    version: Number | None = None


class Serve(msgspec.Struct, frozen=True, array_like=True, tag=45):
    """Tells the new owner of a group that the old one has none of its records any more.

    Its answer is `Later`, or once the group is served `IsAt`, with the epoch of the new owner.
    """

    group: Group
    of: Number


class Stay(msgspec.Struct, frozen=True, array_like=True, tag=48):
    """Asks a member that is to leave to stay. Its answer is `Done`, once it is none that leaves; or `Refused`.

    Attributes:
        term, epoch: of a roster that it must have heard of.
    """

    term: Number
    epoch: Number


class TakeOver(msgspec.Struct, frozen=True, array_like=True, tag=47):
    """Asks a member to copy to its own host what its records name on one that leaves.

    Its answer is `Done`, once it has looked through all of its records in this round; until then `Later`; or `Failed`,
    for the first one that it can't take.
    """

    member: Id
    round: Number


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=50):
    """Asks the seed of a term whether it is there. Its answer is `Alive`, or `Stale`. `fence.py` says what it is for.

    Attributes:
        epoch: of the asker's roster.
        promised: as of `Standing`.
        obeys: nanoseconds of the lease that the asker's processes obey; 0: they obey none.
        began, stamp: of the answer to its last heartbeat; zeros: it had none.
    """

    member: Id
    term: Number
    epoch: Number = 0
    promised: Number = 0
    obeys: Number = 0
    began: Number = 0
    stamp: Number = 0


class AskSilence(msgspec.Struct, frozen=True, array_like=True, tag=51):
    """Asks a member for how long it hasn't heard the seed of a term. Its answer is `Silence`."""

    cluster: Id
    term: Number


class Note(msgspec.Struct, frozen=True, array_like=True, tag=55):
    """Tells a host which keeps versions of these keys that they are replaced: up to this one. Its answer is `Done`.

    Attributes:
        owner: who tells it. A host that doesn't know it as a member drops nothing, and answers `Later`.
    """

    rows: Annotated[tuple[tuple[Key, Number], ...], Meta(max_length=ROWS_LIMIT)]
    owner: Id


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=56):
    """Says that a host is to keep a version of a key, and asks for its record.

    Its answer is `Found`, with nothing if the version is no longer the present one.
    """

    key: Key
    version: Number
    grant: Grant
    keeper: Id


class KeepAll(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """Says that a host is to have replicas of the present versions of keys, and asks for their records, of one moment.

    Its answer is `Found`, with nothing for a key that is there no more; `Later`, if others are to be kept with them.

    Attributes:
        rows: keys, each with the grant by which the sender knows the owner.
    """

    rows: Annotated[tuple[tuple[Key, Grant], ...], Meta(min_length=1, max_length=ROWS_LIMIT)]
    keeper: Id


class Inherit(msgspec.Struct, frozen=True, array_like=True, tag=57):
    """Asks the seed which groups a removed member owned, by the numbers of their grants. Its answer is `Inherited`."""

    member: Id
    after: Number


class FindBackups(msgspec.Struct, frozen=True, array_like=True, tag=58):
    """Asks a member what it keeps of groups of a removed one. Its answer is `BackedUp`.

    Attributes:
        groups: sorted.
        after: a key of the first of them, beyond which the answer goes on; empty: from the beginning.
    """

    member: Id
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=ROWS_LIMIT)]
    after: Prefix = b""


class Recovered(msgspec.Struct, frozen=True, array_like=True, tag=59):
    """Tells the seed that the heir of a removed member has heard all members. Its answer is `IsRoster`.

    Attributes:
        is_over: it has opened all of the groups, too.
    """

    member: Id
    heir: Id
    is_over: bool


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=60):
    """Tells a member by name what was lost with a removed one, for people. Its answer is `Done`.

    Attributes:
        who: the removed member, for people.
        names: keys; and groups that it owned, of which what it has put itself is lost.
    """

    who: Text
    names: Annotated[tuple[Key, ...], Meta(max_length=ROWS_LIMIT)]


class Return(msgspec.Struct, frozen=True, array_like=True, tag=110):
    """Asks the seed whether a member may bring back what a removed one had. Its answer is `IsRoster`, or why not.

    Attributes:
        is_over: it has brought back all that may come back.
    """

    former: Id
    by: Id
    is_over: bool = False


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=111):
    """Asks an owner which versions that were lost may come back. Its answer is `Offered`."""

    keys: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=ROWS_LIMIT)]
    grants: Grants
    rows: Annotated[tuple[Returning, ...], Meta(min_length=1, max_length=ROWS_LIMIT)]


class CameBack(msgspec.Struct, frozen=True, array_like=True, tag=112):
    """Tells a member which names are no longer lost with a removed member. Its answer is `Done`."""

    who: Text
    names: Annotated[tuple[Key, ...], Meta(max_length=ROWS_LIMIT)]


class SetPolicy(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """Says how many hosts are to have the values of a group. Its answer is `IsRoster`, or `Refused`.

    Attributes:
        drops: the group is to have no policy of its own any more.
    """

    policy: Policy
    drops: bool = False


class SetQuota(msgspec.Struct, frozen=True, array_like=True, tag=39):
    """Says how many bytes the keys with a prefix may take. Its answer is `IsRoster`, or `Refused`.

    Attributes:
        limit: None: as many as they like, from now on.
    """

    prefix: Key
    limit: Number | None


class Replicate(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """Asks a host to have replicas of the present values of these keys; or tells their owner that the sender has some.

    Its answer is `Replicated`, when that is done, or `Refused`.

    Attributes:
        owner: of the keys.
        rows: keys, each with the grant by which the sender knows the owner.
        sender: the host that asks.
        kept: to the owner: the version of each key that the sender keeps; 0: none.
        is_whole: of all of them at one moment, or of none: they were put by one call.
    """

    owner: Id
    rows: Annotated[tuple[tuple[Key, Grant], ...], Meta(min_length=1, max_length=ROWS_LIMIT)]
    sender: Id
    kept: Annotated[tuple[Number, ...], Meta(max_length=ROWS_LIMIT)] = ()
    is_whole: bool = False

    def __post_init__(self) -> None:
        if self.kept and len(self.kept) != len(self.rows):
            raise ValueError(f"{len(self.kept)} versions of {len(self.rows)} keys")


class Meet(msgspec.Struct, frozen=True, array_like=True, tag=46):
    """Asks a host who it is, and says which cluster the asker knows. Its answer is `Met`.

    Attributes:
        roster: of the asker's cluster; None: it has none yet.
        member: the asker.
    """

    member: Member
    roster: Roster | None


# --- answers ----------------------------------------------------------------------------------------------------------


class Done(msgspec.Struct, frozen=True, array_like=True, tag=64):
    """It is done, and there is nothing more to say."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=65):
    session: Number


class Found(msgspec.Struct, frozen=True, array_like=True, tag=66):
    """One for each key that was asked for, or for the first ones, as many as a message has room for.

    None: there is no such key.
    """

    entries: Annotated[tuple[Entry | None, ...], Meta(max_length=BATCH_LIMIT)]


class IsAt(msgspec.Struct, frozen=True, array_like=True, tag=67):
    """The version that a wait was for; 0: there was none within its time."""

    version: Number


class Listed(msgspec.Struct, frozen=True, array_like=True, tag=68):
    """Keys in order. `version`: the last one that was assigned there."""

    rows: Annotated[tuple[tuple[Key, Number], ...], Meta(max_length=ROWS_LIMIT)]
    version: Number = 0


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=69):
    """New versions; of deletions the old ones, or 0.

    Attributes:
        replaced: keys of which the host that has asked may keep older versions, and up to which version it drops them,
            before it says that the changes were made.
    """

    versions: Annotated[tuple[Number, ...], Meta(max_length=BATCH_LIMIT)]
    replaced: Annotated[tuple[tuple[Key, Number], ...], Meta(max_length=BATCH_LIMIT)] = ()


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=70):
    """An error that has changed nothing: the name of its class, its text, and its attributes.

    Of a QuotaExceededError `expected` is the quota, and `found` what is used.
    """

    error: Annotated[str, Meta(max_length=64)]
    text: Text
    key: Key | None = None
    expected: Number = 0
    found: Number = 0
    prefix: Prefix = b""
    requested: Number = 0


class Never(msgspec.Struct, frozen=True, array_like=True, tag=71):
    """The call was not made, and never will be."""


class IsNamed(msgspec.Struct, frozen=True, array_like=True, tag=72):
    named: bool


class IsRoster(msgspec.Struct, frozen=True, array_like=True, tag=73):
    """The present roster.

    Attributes:
        admits: the root that had no cluster is in it for good.
        brought: the number under which its groups were noted: it owns all of them. 0: nobody knows which.
    """

    roster: Roster
    admits: bool = False
    brought: Number = 0


_Ids = tuple[Id, ...]


class RosterChange(msgspec.Struct, frozen=True, array_like=True, tag=114):
    """The present roster, for who has another one: what is different. See `IsRoster`.

    Attributes:
        since: the position of the roster that it has.
        rest: the present one, without members, voters and leased.
        members: those that are gone since, and those that are new, or others than they were.
        voters: which of the members since then are none, and who is one beside them.
        leased: the same, of those since then.
    """

    since: tuple[Number, Number]
    rest: Roster
    members: tuple[_Ids, tuple[Member, ...]]
    voters: tuple[_Ids, _Ids]
    leased: tuple[_Ids, _Ids]
    admits: bool = False
    brought: Number = 0

    @classmethod
    def between(cls, old: Roster, answer: IsRoster) -> RosterChange | None:
        """Returns what is different; None: it can't be said, or not in fewer words."""
        new, ids = answer.roster, [member.id for member in old.members]
        known = set(old.members)
        members = (tuple(old.ids - new.ids), tuple(member for member in new.members if member not in known))
        rest = msgspec.structs.replace(new, members=(), voters=(), leased=())
        voters, leased = _difference(ids, new.voters), _difference(old.leased, new.leased)
        change = cls(old.position, rest, members, voters, leased, answer.admits, answer.brought)
        if sum(map(len, (*members, *voters, *leased))) > len(new.members) // 2:
            return None
        return change if change.whole(old) == answer else None

    def whole(self, old: Roster) -> IsRoster | None:
        """Returns the roster, of that which it is a change of; None: this is another one."""
        if (old.cluster, old.position) != (self.rest.cluster, self.since):
            return None
        gone, new = self.members
        outdated = {*gone, *(member.id for member in new)}
        members = (*(member for member in old.members if member.id not in outdated), *new)
        voters = _patched([member.id for member in old.members], self.voters)
        leased = _patched(old.leased, self.leased)
        roster = msgspec.structs.replace(self.rest, members=members, voters=voters, leased=leased)
        return IsRoster(roster, self.admits, self.brought)


def _difference(old: Sequence[bytes], new: Sequence[bytes]) -> tuple[_Ids, _Ids]:
    known = set(old)
    return tuple(known.difference(new)), tuple(one for one in new if one not in known)


def _patched(old: Sequence[bytes], change: tuple[_Ids, _Ids]) -> _Ids:
    gone, new = set(change[0]), change[1]
    return (*(one for one in old if one not in gone), *new)


class Stale(msgspec.Struct, frozen=True, array_like=True, tag=74):
    """The request is of an older epoch or term than this one. It was not done, and never will be."""

    term: Number
    epoch: Number = 0


class Later(msgspec.Struct, frozen=True, array_like=True, tag=75):
    """Not yet: this host waits for something. Send the same request again."""


class NoSession(msgspec.Struct, frozen=True, array_like=True, tag=76):
    """The session has ended, or the call is older than the last one of its lane. It will not be made again."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=77):
    """This root can't be a member. `is_removed`: it was one, and never will be again."""

    why: Text
    is_removed: bool = False


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag=78):
    """The owner keeps the part. `number` is the attempt's."""

    number: Number


class Pending(msgspec.Struct, frozen=True, array_like=True, tag=79):
    """The parts that are there, by rank; with what they say, as far as one answer has room."""

    parts: Annotated[tuple[PendingPart, ...], Meta(max_length=tables.MOST_RANKS)]
    contents: Annotated[tuple[Body, ...], Meta(max_length=tables.MOST_RANKS)] = ()
    now: Number = 0  # on the owner's clock since boot


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=80):
    outcome: AttemptOutcome


class PartsChanged(msgspec.Struct, frozen=True, array_like=True, tag=81):
    """The parts are others than those that were named: look again. Nothing was changed."""


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag=82):
    """There is neither a part nor an outcome of that number: it is over, and its outcome was dropped."""


class NotOwner(msgspec.Struct, frozen=True, array_like=True, tag=83):
    """One of the grants is dead for good: the request was not done, and never will be. Ask the directory."""


class Owners(msgspec.Struct, frozen=True, array_like=True, tag=84):
    """The owner of each of the groups; None: nobody owns it."""

    rows: Annotated[tuple[Ownership | None, ...], Meta(max_length=BATCH_LIMIT)]


class Mirrored(msgspec.Struct, frozen=True, array_like=True, tag=85):
    """The deputy has all rows of this term's seed whose numbers are at most `upto`."""

    upto: Number


class Promised(msgspec.Struct, frozen=True, array_like=True, tag=86):
    """The newest roster that the member has; None: a roster names it, and it hasn't been told of any."""

    roster: Roster | None


class Announced(msgspec.Struct, frozen=True, array_like=True, tag=87):
    """Rows in the order of their groups; no version of the member is above `versions`. No rows: that was all."""

    rows: Annotated[tuple[Ownership, ...], Meta(max_length=ROWS_LIMIT)]
    versions: Number


class Met(msgspec.Struct, frozen=True, array_like=True, tag=88):
    """The host that answers there, and its roster. `names`: hosts that it was told of, if it has no cluster yet."""

    member: Member
    roster: Roster | None
    names: tuple[str, ...] = ()


class Brought(msgspec.Struct, frozen=True, array_like=True, tag=89):
    """The groups are noted, under that number. `grants` are theirs, from the admission on."""

    number: Number
    grants: Annotated[tuple[Grant, ...], Meta(max_length=ROWS_LIMIT)] = ()


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=52):
    """This is the seed of that term, and the asker is a member.

    Attributes:
        began: when this process began the term, on its host's clock since boot.
        stamp: that clock, now.
        age: for so many nanoseconds at most no majority may have obeyed it; None: it doesn't hear one.
    """

    began: Number = 0
    stamp: Number = 0
    age: Number | None = None


class Silence(msgspec.Struct, frozen=True, array_like=True, tag=53):
    """For how long the member hasn't heard the seed that was named. 0: it has, or it knows of a later one."""

    nanoseconds: Number


class Inherited(msgspec.Struct, frozen=True, array_like=True, tag=100):
    """Groups of a removed member, by the numbers of their grants.

    Attributes:
        after: where the next ones begin; 0: that was all.
    """

    rows: Annotated[tuple[Ownership, ...], Meta(max_length=ROWS_LIMIT)]
    after: Number = 0


class BackedUp(msgspec.Struct, frozen=True, array_like=True, tag=101):
    """Versions that a host keeps, by the groups that were asked for.

    Attributes:
        after: the last key, if there is more of its group or of those behind it; empty: that was all.
    """

    rows: Annotated[tuple[tuple[Key, Backup], ...], Meta(max_length=ROWS_LIMIT)]
    after: Prefix = b""


class Replicated(msgspec.Struct, frozen=True, array_like=True, tag=105):
    """The outcome for each key: the version of which there is a replica now; 0: there is none.

    Attributes:
        nbytes: that were copied.
        why: of the first key without a replica; None: it is deleted, or another host owns it now.
    """

    versions: Annotated[tuple[Number, ...], Meta(max_length=ROWS_LIMIT)]
    nbytes: Number = 0
    why: Failed | None = None


MAY_RETURN, STAYS_AWAY, IS_PUT_SINCE, IS_THERE = range(4)  # what becomes of a version that is offered


class Offered(msgspec.Struct, frozen=True, array_like=True, tag=113):
    """The fate of each version that was offered, as above. `IS_THERE`: it never was lost."""

    fates: Annotated[tuple[Annotated[int, Meta(ge=0, le=IS_THERE)], ...], Meta(max_length=ROWS_LIMIT)]


Request = (
    Open | Close | Lookup | FindVersions | Wait | List | Commit | Resolve | Named | Release | WaitAny
    | Prepare | Look | Renew | Publish | GiveUp
    | Ask | Remove | Drain | ClaimGroups | FindOwners | WatchGroup | HandOver | Dropped | Finish | BringGroups
    | Mirror | Promise | Obey | Announce | Give | Serve | TakeOver | Stay | Meet | Heartbeat | AskSilence
    | Note | Keep | KeepAll | Inherit | FindBackups | Recovered | Lost | Return | Offer | CameBack
    | SetPolicy | SetQuota | Replicate
)  # fmt: skip
Answer = (
    Done | Opened | Found | IsAt | Listed | Committed | Failed | Never | IsNamed | IsRoster | Stale | Later | NoSession
    | Refused | Prepared | Pending | Ended | PartsChanged | Forgotten | NotOwner | Owners | Mirrored | Promised
    | Announced | Met | Brought | Alive | Silence | Inherited | BackedUp | Offered | Replicated | RosterChange
)  # fmt: skip
