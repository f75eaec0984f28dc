"""What a root asks where its store goes on beyond this host: the engine's `Elsewhere`, by the rules.

A process has one for each root, with its own session at each home, and its own connections. A forked child makes
another.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from memstore.distributed import catalog, rules
from memstore.distributed.actors import ActorLinks, used_actors
from memstore.distributed.client.begun_wait import BegunWait
from memstore.distributed.client.bytes_of import Bytes, name_of
from memstore.distributed.client.driving import drive
from memstore.distributed.client.homes import KnownHomes
from memstore.distributed.client.seen import Seen
from memstore.distributed.client.sharded import ShardedPuts
from memstore.distributed.links import CLIENT, Links, hello_of_this_process, secret_of
from memstore.distributed.rules import (
    BATCH_LIMIT,
    CALL_BYTES_LIMIT,
    KEY_LIMIT,
    ROWS_LIMIT,
    Client,
    DeadlinePassed,
    Entry,
    Member,
    Place,
    Steps,
    is_unsealed,
    look_up,
    page,
    read_all,
    wait_there,
)
from memstore.engine import (
    AttemptFailure,
    AttemptOutcome,
    Change,
    MappedEntry,
    Merge,
    PendingPart,
    Record,
    Root,
    SealedSegment,
    boot_clock,
)
from memstore.engine import Participant as AttemptMember
from memstore.errors import CrossHostError, HomeUnavailableError, UnknownOutcomeError

Result = TypeVar("Result")

_LONGEST_LENT = 600.0  # seconds that no audit asks after what was lent for a put
_TO_ASK = 0.1  # seconds that a call has at least which asks another host, also with a timeout of 0
_TO_END = 0.5  # seconds for the homes to hear that a session ends


def open_elsewhere(root: Root) -> OtherHosts:
    """Raises SecretError where the secret's file can't be used."""
    links = Links(secret=secret_of(root.state), kind=CLIENT, hello=hello_of_this_process())
    handed = used_actors()
    return OtherHosts(root, ActorLinks(links, handed) if handed else links)


class OtherHosts:
    """See `engine.Elsewhere`, which this is."""

    def __init__(self, root: Root, links: Links | ActorLinks) -> None:
        self._root, self._links = root, links
        self._member = root.member_id()
        self._known = KnownHomes(root)
        self._client = Client()
        self._sharded = ShardedPuts(root, links, self._client, self._known.home_of)
        self._bytes = Bytes(root, links, self._known.member_of)
        self._seen = Seen()

    # --- who the homes are --------------------------------------------------------------------------------------------

    def take_in(self, deadline: float | None = None) -> None:
        self._known.take_in(deadline)

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def membership(self) -> int:
        return 0 if self._known.homes is None else self._known.homes.membership

    def membership_for(self, keys: Sequence[bytes], deadline: float | None = None) -> int | None:
        homes = self._known.homes or self._known.take_in(deadline)
        if len(keys) == 1 and keys[0].partition(b"/")[0] in homes.here:  # every put comes here
            return homes.membership
        return homes.membership if homes.are_here(keys) else None

    def home_of(self, key: bytes, deadline: float | None = None) -> bytes:
        return self._known.home_of(key, deadline)

    def cluster(self) -> bytes:
        return self._known.cluster()

    def name_of(self, member: bytes) -> str:
        return name_of(self._known.member_of(member))

    def is_member(self, member: bytes) -> bool:
        return self._known.member_of(member) is not None

    # --- changes ------------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], deadline: float) -> list[int]:
        keys, deadline = [change.key for change in changes], _at_least(deadline)
        _check_count(keys)
        asked = [catalog.change_of(change, self._member) for change in changes]
        _check_bytes(asked)
        sealed = tuple(itertools.chain.from_iterable(change.segments for change in changes))
        steps = self._client.commit(asked, self._begin_change(deadline))
        try:
            return list(drive(steps, self._root, self._links, deadline, sealed=sealed))
        finally:
            self._seen.forget(keys)

    def _begin_change(self, deadline: float) -> int:
        """Returns when its time is over, on this host's clock since boot."""
        now, left = boot_clock(), min(max(deadline - time.monotonic(), 0.0), _LONGEST_LENT)
        return now + int(left * 1e9)

    def is_unsealed(self, key: bytes, segment: int, put_id: int, deadline: float) -> bool:
        deadline = _at_least(deadline)
        place = Place(self._member, put_id, segment)
        steps = is_unsealed(self._client, key, place, self._begin_change(deadline))
        try:
            return drive(steps, self._root, self._links, deadline)
        except (HomeUnavailableError, UnknownOutcomeError) as error:
            name = key.decode()
            raise HomeUnavailableError(
                f"{name!r}: a seal of it was cut off, and only the key's home knows whether it was made, so nobody may "
                f"write rows until that answers: {error}",
                key=name,
            ) from error

    # --- reads --------------------------------------------------------------------------------------------------------

    def hold(
        self,
        keys: Sequence[bytes],
        deadline: float,
        *,
        may_lock: bool = True,
        lazily: bool = False,
        max_age: float | None = None,
    ) -> list[MappedEntry | None]:
        deadline = _at_least(deadline)
        reading = self._bytes.reading(deadline, may_lock=may_lock, lazily=lazily)
        if max_age and len(keys) == 1:
            entry = self._seen.within(keys[0], max_age)
            held = None if entry is None else reading.map(keys[0], entry)
            if held is not None:
                return [held]
        looked = time.monotonic()

        def fetch(key: bytes, entry: Entry) -> Steps[MappedEntry | None]:
            held = reading.map(key, entry)
            if held is not None and max_age:
                self._seen.note(key, entry, looked)
            return held
            yield  # steps, as the rules want it, and none of them

        found = self._drive(read_all(keys, fetch), deadline)
        return [None if one is None else one[1] for one in found]

    def seen_from_here(self, member: bytes, record: Record) -> Record:
        return catalog.record_of(catalog.entry_of(record, member), self._member)

    def hold_version(self, key: bytes, record: Record, deadline: float, *, lazily: bool) -> MappedEntry | None:
        return self._bytes.hold_version(key, record, _at_least(deadline), lazily=lazily)

    def records(self, keys: Sequence[bytes], deadline: float) -> list[Record | None]:
        found: dict[bytes, Record | None] = {}
        parts: dict[bytes, list[bytes]] = {}
        for key in keys:
            parts.setdefault(self.home_of(key, deadline), []).append(key)
        for part in parts.values():
            for start in range(0, len(part), ROWS_LIMIT):
                asked = part[start : start + ROWS_LIMIT]
                entries = self._drive(look_up(asked), deadline)
                found.update(zip(asked, map(self._record_of, entries), strict=True))
        return [found[key] for key in keys]

    def _record_of(self, entry: Entry | None) -> Record | None:
        return None if entry is None else catalog.record_of(entry, self._member)

    def keys(self, prefix: bytes, after: bytes, limit: int, deadline: float) -> list[tuple[bytes, int]]:
        if len(prefix) > KEY_LIMIT:  # no key starts with it, and no message may say it
            return []
        return self._drive(page(prefix, after, min(limit, ROWS_LIMIT)), deadline)

    def wait(self, key: bytes, newer_than: int, deadline: float) -> int | None:
        try:
            return drive(wait_there(key, newer_than), self._root, self._links, deadline)
        except DeadlinePassed:
            return None

    def begin_wait(self, key: bytes, newer_than: int, told: Callable[[], None], deadline: float) -> BegunWait | None:
        links = self._links
        return BegunWait(self._root, links, key, newer_than, told, deadline) if isinstance(links, Links) else None

    def _drive(self, steps: Steps[Result], deadline: float) -> Result:
        return drive(steps, self._root, self._links, _at_least(deadline))

    # --- sharded puts: see sharded.py ---------------------------------------------------------------------------------

    def prepare(
        self, member: AttemptMember, expect: int | None, segment: SealedSegment | None, content: bytes, deadline: float
    ) -> AttemptOutcome | AttemptMember:
        return self._sharded.prepare(member, expect, segment, content, deadline)

    def outcome_of(
        self, member: AttemptMember, merge: Merge, waits_until: float, deadline: float
    ) -> AttemptOutcome | None:
        return self._sharded.outcome_of(member, merge, waits_until, deadline)

    def give_up(self, member: AttemptMember, failure: AttemptFailure, deadline: float) -> AttemptOutcome:
        return self._sharded.give_up(member, failure, deadline)

    def pending(self, key: bytes | None, deadline: float) -> list[tuple[PendingPart, float]]:
        return self._sharded.pending(key, deadline)

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        def connected(home: bytes) -> Member | None:
            homes = self._known.homes
            member = None if homes is None else homes.standing.view.member(home)
            return None if member is None or self._links.hello_of(member.address) is None else member

        try:
            self._drive(self._client.end(connected), time.monotonic() + _TO_END)
        finally:
            self._bytes.close()
            self._links.close()


def _at_least(deadline: float) -> float:
    return max(deadline, time.monotonic() + _TO_ASK)


def _check_bytes(changes: Sequence[rules.Change]) -> None:
    nbytes = sum(change.nbytes for change in changes)
    if nbytes > CALL_BYTES_LIMIT:
        raise CrossHostError(
            f"{len(changes):,} keys in one call, from {changes[0].key.decode()!r} on: their home is on another host, "
            f"and their records take {nbytes:,} bytes; one message has {CALL_BYTES_LIMIT:,}: make several calls"
        )


def _check_count(keys: Sequence[bytes]) -> None:
    if len(keys) > BATCH_LIMIT:
        raise CrossHostError(
            f"{len(keys):,} keys in one call, from {keys[0].decode()!r} on: their home is on another host, which takes "
            f"up to {BATCH_LIMIT:,} at one moment: make several calls"
        )
