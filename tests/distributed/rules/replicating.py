"""Scripts and mutations of replicas: what random schedules seldom need, and rules left out on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.distributed.rules import client, directory, owning, recovery, replicas
from memstore.distributed.rules.messages import Committed, Note, Place
from memstore.distributed.rules.nouns import Change, Policy
from tests.distributed.rules.mutations import mutation
from tests.distributed.rules.returns import MUTATIONS, SCRIPTS
from tests.distributed.rules.scripts import Play, die, got, script
from tests.distributed.rules.tables import SimTables
from tests.distributed.rules.test_membership import key_at
from tests.distributed.rules.test_replicas import replicas_of, state
from tests.distributed.rules.world import Host
from tests.support.explore import Fault

__all__ = ["MUTATIONS", "SCRIPTS"]

Patch = pytest.MonkeyPatch
LONG = 60  # seconds: longer than a mark lasts


class ReplicatedPlay(Play):
    """Values lie on two hosts. `key` is owned by the host 1, and has a value there, of which `keeper` has a replica."""

    def __init__(self, hosts: int = 4, **policy: Any) -> None:
        super().__init__(hosts)
        state(self.world, Policy(None, 2, **policy))
        self.key = key_at(self.world, self.hosts[1])
        self.version = self.put_bytes(1, 7)
        (self.keeper,) = replicas_of(self.hosts, self.key)

    def change(self, host: int, value: int) -> Change:
        at = self.hosts[host]
        return Change(self.key, b"", (Place(at.id, at.tables.fill(value), 1),))

    def put_bytes(self, host: int, value: int) -> int:
        ends = self.begin(self.processes[host], self.processes[host].client.commit([self.change(host, value)], 1 << 62))
        self.world.run(5)
        return ends[0][0]

    def value(self, key: bytes | None = None) -> int | None:
        """What a recovery leaves of the key, as the host 0 reads it; None: nothing."""
        entry = got(self, key or self.key)
        if entry is None:
            return None
        for host in self.hosts:
            for place in entry.places:
                if place.host == host.id:
                    return host.tables.segments[place.put_id].value
        raise Fault("its bytes are gone", tuple(self.world.trace))

    def expect(self, *values: int | None, owner: int = 1) -> None:
        die(self, owner)
        found = self.value()
        if found not in values:
            raise Fault(f"{found} is there, and {values} may be", tuple(self.world.trace))


@script("an owner that dies while a value is copied")
def _() -> None:
    play = ReplicatedPlay()
    for host in play.hosts:
        silence(host)
    play.begin(play.processes[1], play.processes[1].client.commit([play.change(1, 8)], 1 << 62))
    play.world.run(3)
    play.expect(7)


class PairPlay(ReplicatedPlay):
    """`pair` are two keys that the host 1 puts with one call; the second one's bytes take a minute to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = [self.key + b"/a", self.key + b"/b"]
        self.put_pair(7)
        self.world.run(5)
        for host in self.hosts:
            slow_for(host, self.pair[1])

    def put_pair(self, value: int) -> None:
        at = self.hosts[1]
        changes = [Change(key, b"", (Place(at.id, at.tables.fill(value), 1),)) for key in self.pair]
        self.begin(self.processes[1], self.processes[1].client.commit(changes, 1 << 62))

    def expect_one(self, *values: int | None) -> None:
        """Both keys have the same value after the owner's death, one of these."""
        die(self, 1)
        found = [self.value(key) for key in self.pair]
        if found[0] != found[1] or found[0] not in values:
            raise Fault(f"{found} are there, of one put", tuple(self.world.trace))


def slow_for(host: Host, key: bytes) -> None:
    assert host.index is not None
    replicate = host.index.replicate

    def slowly(request: Any, fetch: Any) -> Any:
        def fetched(entries: Any, settle: Any) -> Any:
            if any(one == key for one, _ in entries):
                yield from client.pause(60)
            return (yield from fetch(entries, settle))

        return (yield from replicate(request, fetched))

    host.index.replicate = slowly  # pyright: ignore


@script("an owner that dies while one of two values is copied")
def _() -> None:
    play = PairPlay()
    play.put_pair(8)
    play.world.run(3)
    play.expect_one(7)


@script("an owner that dies while one of two values is copied, whose putter was killed")
def _() -> None:
    play = PairPlay()
    play.put_pair(8)
    play.world.run(0.1)
    play.processes[1].is_alive = False
    play.world.run(20)  # its index process goes on
    play.expect_one(7)


@script("an owner that dies while one of two values is copied, and the other one was put again")
def _() -> None:
    play = PairPlay()
    play.put_pair(8)
    play.world.run(0.1)
    at, other = play.hosts[1], play.world.start_process(play.hosts[1])
    change = Change(play.pair[0], b"", (Place(at.id, at.tables.fill(9), 1),))
    play.begin(other, other.client.commit([change], 1 << 62))
    play.world.run(3)
    die(play, 1)
    found = [play.value(key) for key in play.pair]
    if found != [9, 7]:  # what was put with a call of its own is there, and nothing of the other one
        raise Fault(f"{found} are there", tuple(play.world.trace))


def silence(host: Host) -> None:
    """Its index process begins copies, and ends none."""

    def never(*_: Any) -> Any:
        while True:
            yield from client.pause(1)

    assert host.index is not None
    host.index.replicate = never  # pyright: ignore


def _wait_for(seconds: float) -> Any:
    """Makes copies that take so long."""

    def slow(fetch: Any) -> Any:
        def fetched(entries: Any, settle: Any) -> Any:
            def late(copies: Any) -> Any:
                yield from client.pause(seconds)
                return (yield from settle(copies))

            return (yield from fetch(entries, late))

        return fetched

    return slow


def deleted_while_it_is_copied(seconds: float) -> None:
    """A delete is acknowledged while a host copies the value; the copy is there when the mark may be forgotten."""
    play = ReplicatedPlay(is_async=True)
    for host in play.hosts:
        assert host.index is not None
        replicate, slow = host.index.replicate, _wait_for(seconds)
        host.index.replicate = lambda request, fetch, it=replicate, by=slow: it(request, by(fetch))  # pyright: ignore
    play.put_bytes(1, 8)
    play.begin(play.processes[1], play.processes[1].client.commit([Change(play.key, None)], 1 << 62))
    for _ in range(int(10 * seconds)):
        play.world.run(0.1)
        if replicas_of(play.hosts, play.key):  # before an audit looks
            break
    play.expect(None)


@script("a value that is deleted while it is copied")
def _() -> None:
    deleted_while_it_is_copied(8)


@script("a value that is deleted while it is copied for long")
def _() -> None:
    deleted_while_it_is_copied(LONG)


@script("a put that goes on without a second host")
def _() -> None:
    play = ReplicatedPlay(fails=False)
    for host in play.hosts:
        if host is not play.hosts[1]:
            refuse(host)
    play.put_bytes(1, 8)
    play.expect(None)


def refuse(host: Host) -> None:
    def no(*_: Any) -> Any:
        return replicas.Refused("no")
        yield

    assert host.index is not None
    host.index.replicate = no  # pyright: ignore


@script("a putter that dies before it was told")
def _() -> None:
    play = ReplicatedPlay()
    dies = next(number for number in (2, 3) if play.hosts[number] is not play.keeper)
    play.put(dies, play.key + b"/other")  # it has a session
    stays = play.world.weather.loss

    def cut(host: Host, request: Any, answer: Any) -> None:
        if isinstance(answer, Committed):
            play.world.cut("h1", f"h{dies}")

    play.after = cut
    play.begin(play.processes[dies], play.processes[dies].client.commit([play.change(dies, 8)], 1 << 62))
    play.world.run(0.5)
    die(play, dies)
    play.world.heal()
    play.world.run(20)
    assert not stays
    if play.value() not in (7, 8):
        raise Fault(f"{play.value()} is there", tuple(play.world.trace))


@script("an owner that dies which has taken over from one that was drained")
def _() -> None:
    play = ReplicatedPlay(5)
    play.world.drain(play.hosts[1].id)
    play.world.run(40)
    (owner,) = [number for number, host in enumerate(play.hosts) if host.tables.owned(play.key) is not None]
    if owner == 0:  # the seed
        return
    play.expect(7, owner=owner)


@script("a note of an owner that was removed")
def _() -> None:
    play = ReplicatedPlay()
    lost = die(play, 1)
    play.world.run(10)  # its heir has had a replica made
    before = replicas_of(play.hosts, play.key)
    for host in before:
        assert host.index is not None
        play.world.answer(host, host.index, Note(((play.key, play.version + 1),), lost))
    if not before or replicas_of(play.hosts, play.key) != before:
        raise Fault(f"{before} had a replica, and a late note took it", tuple(play.world.trace))


@script("a note of the version of which a host has a replica")
def _() -> None:
    play = ReplicatedPlay()
    owner, told = play.hosts[1], [(play.key, play.version)]
    assert play.keeper.index is not None
    play.world.answer(play.keeper, play.keeper.index, Note(tuple(told), owner.id))
    recovery.noted(owner.tables, play.keeper.id, told)
    play.world.run(10)
    if not replicas_of(play.hosts, play.key):
        raise Fault("nobody has a replica any more", tuple(play.world.trace))


# --- mutations --------------------------------------------------------------------------------------------------------


@mutation("notes don't wait for a replica", "an owner that dies while a value is copied")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "lacking", lambda tables, key: False if key in tables.lacks else None)  # pyright: ignore


@mutation("keys of one put get their replicas one by one", "an owner that dies while one of two values is copied")
def _(patch: Patch) -> None:
    patch.setattr(replicas, "_together", lambda tables, key: ([key], []))  # pyright: ignore


@mutation(
    "an index process goes on with one key of a put",
    "an owner that dies while one of two values is copied, whose putter was killed",
)
def _(patch: Patch) -> None:
    patch.setattr(recovery, "note_batch", lambda tables, standing, changes: 0)  # pyright: ignore
    patch.setattr(owning, "note_batch", lambda tables, standing, changes: 0)  # pyright: ignore


@mutation("keys of one put get their replicas one by one, in schedules", "replicas and deaths of slow hosts")
def _(patch: Patch) -> None:
    patch.setattr(replicas, "_together", lambda tables, key: ([key], []))  # pyright: ignore


@mutation("a note that comes while a value is copied is not looked at", "a value that is deleted while it is copied")
def _(patch: Patch) -> None:
    write = replicas._write  # pyright: ignore[reportPrivateUsage]

    def anyway(tables: Any, *arguments: Any) -> Any:
        tables.voids.clear()
        return write(tables, *arguments)

    patch.setattr(replicas, "_write", anyway)


@mutation("a copy that took long is not asked for again", "a value that is deleted while it is copied for long")
def _(patch: Patch) -> None:
    patch.setattr(replicas, "WINDOW", 1 << 62)


@mutation("a note of anybody is taken", "a note of an owner that was removed")
def _(patch: Patch) -> None:
    patch.setattr(recovery, "is_known", lambda standing, member: True)  # pyright: ignore


@mutation("who is told is believed to have its replica still", "a note of the version of which a host has a replica")
def _(patch: Patch) -> None:
    patch.setattr(recovery, "doubt_replica", lambda tables, key: None)  # pyright: ignore


@mutation("a put that goes on leaves what it replaced", "a put that goes on without a second host")
def _(patch: Patch) -> None:
    def nothing(keys: Any) -> Any:
        return
        yield

    patch.setattr(replicas, "go_on_without", nothing)


@mutation("a record names the bytes of who puts it", "a putter that dies before it was told")
def _(patch: Patch) -> None:
    patch.setattr(replicas, "is_copied_first", lambda standing, request: False)  # pyright: ignore


@mutation("keepers of a group that was handed over count", "replicas")
def _(patch: Patch) -> None:
    drop = directory._drop_page  # pyright: ignore[reportPrivateUsage]

    def keeps(tables: Any, *arguments: Any) -> Any:
        before = dict(tables.keeping)
        after = drop(tables, *arguments)
        tables.keeping.update(before)
        return after

    patch.setattr(directory, "_drop_page", keeps)


@mutation("a put returns before a second host has its value", "replicas and deaths")
def _(patch: Patch) -> None:
    def nothing(*_: Any) -> Any:
        return {}
        yield

    patch.setattr(replicas, "secure", nothing)


@mutation("who has put a value is believed to keep it", "replicas, deaths and cuts")
def _(patch: Patch) -> None:
    patch.setattr(replicas, "kept", lambda tables, key, version: version)  # pyright: ignore


@mutation("a release takes a replica", "replicas")
def _(patch: Patch) -> None:
    patch.setattr(owning, "_is_replica", lambda tables, key, place: False)  # pyright: ignore


@mutation("an heir takes whichever record comes first", "replicas, deaths and kills")
def _(patch: Patch) -> None:
    merge = recovery._merge  # pyright: ignore[reportPrivateUsage]

    def first(tables: Any, dead: bytes, host: bytes, groups: Any, rows: Any) -> None:
        known = {key: it.version for key, it in tables.kept_records.items() if it is not None}
        merge(tables, dead, host, groups, [row for row in rows if known.get(row[0], 0) < row[1].version])

    patch.setattr(recovery, "_merge", first)


@mutation("a host that was asked for a replica is believed to have it", "replicas, deaths and kills")
def _(patch: Patch) -> None:
    def believed(tables: Any, key: bytes) -> Any:
        entry, ids = tables.records.get(key), tables.own_standing.roster.ids
        hosts = [host for host, at in tables.keepers(key) if entry and at == entry.version and host in ids]
        return (hosts[0], entry.version) if hosts else None

    patch.setattr(SimTables, "replica", believed)
