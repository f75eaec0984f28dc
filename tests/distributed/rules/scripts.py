"""Schedules by hand, each for a rule that random ones seldom need. A script raises Fault if the rule is left out."""

from __future__ import annotations

import contextlib
import copy as copy_module
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec

from memstore.distributed.rules import (
    Change,
    Entry,
    Index,
    Lent,
    Place,
    Send,
    Steps,
    Transact,
    directory,
    draining,
    owning,
    promotion,
    reading,
    recovery,
    roster,
)
from memstore.distributed.rules.directory import give
from memstore.distributed.rules.messages import (
    Ask,
    ClaimGroups,
    Commit,
    Committed,
    Done,
    Drain,
    Failed,
    FindBackups,
    Give,
    HandOver,
    IsAt,
    Later,
    List,
    Lookup,
    NotOwner,
    Owners,
    Refused,
    Release,
    Remove,
    Serve,
    Stale,
    Stay,
    TakeOver,
)
from memstore.distributed.rules.nouns import Backup, Grant
from memstore.errors import HomeUnavailableError, MemstoreError, StoreTimeoutError
from tests.distributed.rules.checks import check_directory
from tests.distributed.rules.test_membership import cluster, get, put, remove, root_with, run
from tests.distributed.rules.world import Host, Process, World
from tests.support.explore import Fault

SCRIPTS: dict[str, Callable[[], None]] = {}


def script(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(play: Callable[[], None]) -> Callable[[], None]:
        SCRIPTS[name] = play
        return play

    return add


class Play:
    """A cluster of a few hosts and a process on each. `before` is called with each request before it is answered."""

    def __init__(
        self, hosts: int, promote_after: float = 0, remove_after: float = 0, *, is_shared: bool = False
    ) -> None:
        self.world: World = cluster(hosts, promote_after, remove_after, is_shared=is_shared)
        self.hosts = list(self.world.hosts.values())
        self.processes = [self.world.start_process(host) for host in self.hosts]
        self.before: Callable[[Host, Any], None] = lambda host, request: None
        self.after: Callable[[Host, Any, Any], None] = lambda host, request, answer: None
        answer = self.world.answer

        def answered(host: Host, index: Any, request: Any) -> Any:
            self.before(host, request)
            found = answer(host, index, request)
            self.after(host, request, found)
            return found

        self.world.answer = answered

    def add_host(self, *, is_owner: bool, seed: str | None) -> None:
        """Adds a host with a process. `seed`: as of `World.serve`; None: it isn't served yet."""
        host = self.world.add_host(f"h{len(self.hosts)}")
        self.hosts.append(host)
        self.processes.append(self.world.start_process(host))
        if seed is not None:
            self.world.serve(host, seed, is_owner=is_owner)

    def put(self, host: int, key: bytes, body: bytes = b"x") -> int:
        return run(self.world, self.processes[host], put(self.processes[host], key, body), seconds=2)[0]

    def get(self, host: int, key: bytes) -> Entry | None:
        return get(self.world, self.processes[host], key)

    def begin(self, process: Process, steps: Any, seconds: float = 60) -> list[Any]:
        ends: list[Any] = []
        self.world.call(process, steps, seconds, lambda result, error: ends.append(error or result))
        return ends

    def hand_over(self, group: bytes, giver: int, taker: int, seconds: float = 5) -> None:
        directory.begin(self.hosts[giver].tables, group, self.hosts[taker].id)
        self.world.run(seconds)

    def cut_off(self, host: int) -> None:
        for other in self.hosts:
            if other is not self.hosts[host]:
                self.world.cut(other.address, self.hosts[host].address)

    def answer(self, host: int, request: Any) -> Any:
        index = self.hosts[host].index
        assert index is not None
        return self.world.answer(self.hosts[host], index, request)

    def claim(self, group: bytes, host: int) -> Grant:
        """A claim whose client dies before it commits."""
        seed = next(at for at, one in enumerate(self.hosts) if (it := one.tables.standing()) and it.is_seed)
        for _ in range(100):
            answer = self.answer(seed, ClaimGroups((group,), self.hosts[host].id))
            if isinstance(answer, Owners):
                row = answer.rows[0]
                assert row is not None
                return row.grant
            self.world.run(0.1)
        raise Fault("a claim isn't answered", tuple(self.world.trace))

    def commit(self, host: int, key: bytes, grant: Grant) -> Any:
        """A call of another host, in a session of its own."""
        tables = self.hosts[host].tables
        call = owning.Call(tables.new_session(), 0, 1, 1)
        return self.answer(host, Commit(call, (Change(key, b"late"),), (grant,)))

    def drain(self, host: int, seconds: float = 0) -> None:
        self.world.drain(self.hosts[host].id)
        self.world.run(seconds)

    def at_once(self, host: int, steps: Any, until: Callable[[Any], bool] = lambda request: False) -> Any:
        """Runs a call to its end, or up to the message that it would send next, while nothing else happens."""
        value: Any = None
        try:
            while True:
                step = steps.send(value)
                value = None
                if isinstance(step, Transact):
                    value = step.action(self.hosts[host].tables)
                elif isinstance(step, Send):
                    if until(step.request):
                        return step.request
                    asked = next(at for at, one in enumerate(self.hosts) if one.address == step.address)
                    value = self.answer(asked, step.request)
        except StopIteration as end:
            return end.value
        except MemstoreError as error:
            return error

    def must(self, holds: object, what: str) -> None:
        if not holds:
            raise Fault(what, tuple(self.world.trace))


@script("a hand-over that is begun again to the same host")
def _() -> None:
    """The first time it was cancelled, when the taker had all records."""
    play = Play(3)
    play.put(1, b"g/k", b"old")
    play.world.cut("h1", "h0", one_way=True)
    play.hand_over(b"g", 1, 2, 2)
    directory.cancel(play.hosts[1].tables, b"g")
    play.world.heal()
    play.world.run(3)
    play.put(1, b"g/k", b"new")
    play.hand_over(b"g", 1, 2)
    found = play.get(0, b"g/k")
    play.must(b"g" in play.hosts[2].tables.own_groups, "it is handed over")
    play.must(found is not None and found.body == b"new", f"a put is lost: {found}")


@script("an owner that dies after it was handed a group")
def _() -> None:
    """What others put there since is there; it isn't the group of who gave it, who may have nothing of it."""
    play = Play(4)
    play.put(1, b"g/before")
    play.hand_over(b"g", 1, 2)
    version = play.put(3, b"g/after", b"new")
    die(play, 2)
    play.world.run(10)
    entry = got(play, b"g/after")
    play.must(entry is not None and (entry.version, entry.body) == (version, b"new"), f"it is there: {entry}")


@script("a group that is handed over while its bytes are taken over")
def _() -> None:
    """The next owner has got the record, and nobody else knows of it yet."""
    play = Play(4)
    play.put(1, b"g/k")
    place = lend(play, 2, b"g/k")
    play.world.kill_index(play.hosts[2])
    play.drain(2, 5)
    play.world.cut("h1", "h0", one_way=True)
    play.hand_over(b"g", 1, 3, 2)
    play.world.serve(play.hosts[2], "h0")
    play.world.run(5)
    play.world.heal()
    play.world.run(20)
    found = play.get(0, b"g/k")
    play.must(found is not None and found.places != (place,), f"its bytes are gone, and {found} names them")
    play.must(has_left(play, 2), "the drain doesn't end")


@script("a put while the bytes of the version before are taken over")
def _() -> None:
    play = lending()
    changed = list[Any]()

    def change(host: Host, what: str) -> None:
        standing = play.hosts[1].tables.standing()
        if what == "Fetch is answered" and not changed:
            changed.append(owning.apply(play.hosts[1].tables, standing, [Change(b"g/k", b"new")]))

    play.world.stepped = change
    play.drain(2, 20)
    found = play.get(0, b"g/k")
    play.must(changed and found is not None and found.body == b"new", f"a put is lost: {found}")
    play.must(has_left(play, 2), "the drain doesn't end")


@script("a put when its host is about to be removed")
def _() -> None:
    """The host has asked for it, and a process there puts a value of another owner."""
    play = lending()
    told = list[Any]()

    def put_late(host: Host, request: Any) -> None:
        if isinstance(request, Remove) and not told:
            place = Place(play.hosts[2].id, play.hosts[2].tables.fill(7), 1)
            commit = play.processes[2].client.commit([Change(b"g/late", b"", (place,))], 1 << 62)
            told.append(play.at_once(2, commit))

    play.before = put_late
    play.drain(2, 20)
    play.must(told and has_left(play, 2), "the drain doesn't end")
    play.must(isinstance(told[0], MemstoreError) or play.get(0, b"g/late") is not None, "a put is lost")


@script("a commit that is on its way when its host is to leave")
def _() -> None:
    play = lending()
    place = Place(play.hosts[2].id, play.hosts[2].tables.fill(7), 1)
    late = play.at_once(
        2,
        play.processes[2].client.commit([Change(b"g/late", b"", (place,))], 1 << 62),
        lambda request: isinstance(request, Commit),
    )
    told = list[Any]()

    def arrive(host: Host, request: Any) -> None:
        if isinstance(request, Remove) and not told:
            told.append(play.answer(1, late))

    play.before = arrive
    play.drain(2, 20)
    was_put = told and isinstance(told[0], Committed)
    play.must(not was_put or play.get(0, b"g/late") is not None, "a put is lost")


@script("a grant that is used when its host is to own nothing more")
def _() -> None:
    play = Play(3)
    play.put(1, b"g/k")
    grant = play.claim(b"n", 2)
    told, done = list[Any](), set[tuple[int, str]]()

    def use(host: Host, request: Any, answer: Any) -> None:
        if isinstance(request, TakeOver) and isinstance(answer, Done):
            done.add((request.round, host.address))
            if {(request.round, "h0"), (request.round, "h1")} <= done and not told:
                told.append(play.commit(2, b"n/k", grant))

    play.after = use
    play.drain(2, 25)
    play.must(told and isinstance(told[0], Committed), "it is good until then")
    play.must(play.get(0, b"n/k") is not None, "a put is lost")
    play.must(has_left(play, 2), "the drain doesn't end")


@script("a host that took a group of one that leaves, and is lost")
def _() -> None:
    """The group is the leaver's again, which owns nothing more. It has lent bytes for it to a call that never came."""
    play = Play(5)
    play.put(2, b"g/k")
    told, lost = list[Any](), list[bytes]()
    taker, tables = play.hosts[1], play.hosts[2].tables

    def lend_late(host: Host, request: Any, answer: Any) -> None:
        if isinstance(request, TakeOver) and isinstance(answer, Done) and host is taker and not told:
            place = Place(tables.member, tables.fill(7), 1)
            commit = play.processes[2].client.commit([Change(b"g/late", b"", (place,))], tables.clock() + 5_000_000_000)
            told.append(play.at_once(2, commit, lambda request: isinstance(request, Commit)))

    def lose(host: Host, what: str) -> None:
        standing = tables.standing()
        if standing is not None and standing.is_sealed and not lost:
            for one in play.hosts:  # as of a hand-over of an older version, whose rows name the giver for ever
                row = one.tables.directory.get(b"g")
                if row is not None:
                    one.tables.directory[b"g"] = msgspec.structs.replace(row, giver=tables.member)
            lost.append(taker.id)
            play.world.lose(taker)
            play.world.remove(lost[0])

    play.after, play.world.stepped = lend_late, lose
    assert isinstance(play.answer(0, Drain(play.hosts[2].id, play.hosts[1].id)), Later)
    play.world.run(40)
    play.must(lost and told and isinstance(told[0], Commit), "its bytes are lent")
    play.must(has_left(play, 2), "the drain doesn't end")


@script("files of others on a host that leaves")
def _() -> None:
    """They lie in no segment, so nobody lends them. One key names such a file before, and one is on its way."""
    play = Play(3)
    play.put(1, b"g/k")
    client, tables = play.processes[2].client, play.hosts[2].tables
    names = [Place(tables.member, tables.fill(7)) for _ in range(2)]
    play.at_once(2, client.commit([Change(b"g/file", b"", (names[0],))], 1 << 62))
    late = play.at_once(
        2, client.commit([Change(b"g/late", b"", (names[1],))], 1 << 62), lambda request: isinstance(request, Commit)
    )
    tables.lendings.clear()
    told = list[Any]()

    def arrive(host: Host, request: Any) -> None:
        if isinstance(request, Remove) and not told:
            told.append(play.answer(1, late))

    play.before = arrive
    play.drain(2, 15)
    trouble = play.hosts[2].index and play.hosts[2].index.leaver.trouble
    play.must(not has_left(play, 2) and play.get(0, b"g/file") is not None, "a key is lost")
    play.must(trouble and trouble.failed.error == "CrossHostError" and trouble.failed.key == b"g/file", f"{trouble}")
    run(play.world, play.processes[0], play.processes[0].client.commit([Change(b"g/file", None)], 1 << 62))
    play.world.run(15)
    play.must(told and has_left(play, 2), "the drain doesn't go on when the key is deleted")
    play.must(not isinstance(told[0], Committed) or play.get(0, b"g/late") is not None, "a put is lost")


@script("a host that takes nothing")
def _() -> None:
    """It answers that it can't, or nothing at all: a group that nobody takes can be written."""
    play = Play(3)
    play.put(2, b"g/k")
    answer = play.world.answer

    def refuse(host: Host, index: Any, request: Any) -> Any:
        if isinstance(request, Give):
            return Failed("StoreFullError", "no room") if host is play.hosts[1] else Later()
        return answer(host, index, request)

    play.world.answer = refuse
    play.drain(2, 1)
    for number in range(4):
        client = play.processes[number % 2].client
        try:
            run(play.world, play.processes[number % 2], client.commit([Change(b"g/k", b"x")], 1 << 62), seconds=8)
        except MemstoreError as error:
            raise Fault(f"a group that nobody takes can't be written: {error}", tuple(play.world.trace)) from error
    play.must(b"g/k" in play.hosts[2].tables.records, "nobody else has it")
    index, said = play.hosts[2].index, set[str]()
    for _ in range(30):
        trouble = None if index is None else index.leaver.trouble
        said |= set() if trouble is None else {trouble.failed.error}
        play.world.run(0.5)
    play.must({"StoreFullError", "HomeUnavailableError"} & said, f"what keeps it from going on is not said: {said}")
    play.world.answer = answer
    play.world.run(30)
    play.must(has_left(play, 2) and play.get(0, b"g/k") is not None, "the drain doesn't go on when there is room")


@script("a drain is cancelled")
def _() -> None:
    """Some groups have gone, some are on their way, and some still there. What has gone stays where it is."""
    play = Play(3)
    for number in range(40):
        play.put(2, b"own%d/k" % number)

    def hold(host: Host, request: Any) -> None:
        if isinstance(request, Give) and host is not play.hosts[2] and not is_cut and len(gone()) >= 20:
            is_cut.append(play.cut_off(2))

    def gone() -> set[bytes]:
        return groups - play.hosts[2].tables.own_groups.keys()

    groups, is_cut = set[bytes](play.hosts[2].tables.own_groups), list[None]()
    at_once, draining.AT_ONCE = draining.AT_ONCE, 10
    try:
        play.before = hold
        play.drain(2, 6)
    finally:
        draining.AT_ONCE = at_once
    moved = gone()
    play.must(is_cut and 20 <= len(moved) <= 30 and play.hosts[2].tables.leaving_groups, "it is in the middle")
    stays = list[bool]()
    play.world.cancel_drain(play.hosts[2], stays.append)
    play.world.run(2)
    play.world.heal()
    play.world.run(10)
    standing = play.hosts[2].tables.standing()
    play.must(stays == [True] and standing is not None and not standing.roster.leavers, f"it leaves: {standing}")
    play.world.run(10)
    play.must(moved == gone() and not has_left(play, 2), "it goes on")
    play.put(2, b"new/k")
    play.must(b"new" in play.hosts[2].tables.own_groups, "it is no owner any more")
    for number in range(40):
        play.put(2, b"own%d/k" % number)


@script("a drain is cancelled when all has gone")
def _() -> None:
    """The host has heard so, and the seed hasn't, when it would end what its processes change."""
    play = Play(3)
    play.put(2, b"own/k")
    answer, cancelled = play.world.answer, list[None]()

    def deaf(host: Host, index: Any, request: Any) -> Any:
        if isinstance(request, TakeOver) and not cancelled:
            cancelled.append(play.world.cancel_drain(play.hosts[2]))
        return Stale(0) if isinstance(request, Drain) and request.cancels else answer(host, index, request)

    play.world.answer = deaf
    play.drain(2, 10)
    play.must(cancelled, "it has come to its last steps")
    play.world.answer = answer
    play.world.run(10)
    ends = play.begin(play.processes[2], put(play.processes[2], b"new/k"), 5)
    play.world.run(8)
    play.must(ends and not isinstance(ends[0], MemstoreError), f"a host that stays can't put: {ends}")


@script("a drain is cancelled too late")
def _() -> None:
    """The host is about to ask to be removed. A late word that it stays, from before, comes to the seed."""
    play = Play(3)
    play.put(2, b"own/k")
    left = play.hosts[2].id

    def cancel(host: Host, request: Any) -> None:
        standing = play.hosts[2].tables.standing()
        if isinstance(request, TakeOver) and standing is not None and standing.is_sealed and not asked:
            asked.append(play.answer(2, Stay(*play.hosts[0].tables.standing().roster.position)))  # pyright: ignore
            asked.append(play.answer(0, Drain(left, cancels=True)))

    asked = list[Any]()
    play.before = cancel
    play.drain(2, 20)
    play.must(asked and isinstance(asked[0], Refused), f"a host that is about to leave stays: {asked}")
    play.must(has_left(play, 2), "it doesn't leave")


def lend(play: Play, host: int, key: bytes) -> Place:
    """Puts a value whose bytes lie on that host, and whose owner is another one."""
    process = play.processes[host]
    place = Place(process.host.id, process.host.tables.fill(7), 1)
    run(play.world, process, process.client.commit([Change(key, b"", (place,))], 1 << 62))
    return place


def lending() -> Play:
    """Makes a cluster of three: the second host owns `g/k`, whose bytes lie on the third."""
    play = Play(3)
    play.put(1, b"g/k")
    lend(play, 2, b"g/k")
    return play


def has_left(play: Play, host: int) -> bool:
    return any(f"h{host} has left" in line for line in play.world.trace)


@script("a grant that comes after the directory's restart")
def _() -> None:
    """Others have claimed meanwhile, also the same group for themselves, and an epoch has begun."""
    play = Play(4)
    grant = play.claim(b"g", 1)
    play.world.kill_index(play.hosts[0])
    play.world.run(1)
    play.world.serve(play.hosts[0], "h0")
    play.put(2, b"other/k")
    play.add_host(is_owner=True, seed="h0")
    play.world.run(5)
    play.put(3, b"g/k", b"of another")  # it is told who the owner is
    play.must(b"g" in play.hosts[1].tables.own_groups, "the group was given to another host")
    play.must(isinstance(play.commit(1, b"g/late", grant), Committed), "the grant isn't good any more")
    for reader in range(5):
        found = play.get(reader, b"g/k")
        play.must(found is not None and found.body == b"of another", f"a put is lost: {found}")


@script("a grant whose claimer is killed before it commits")
def _() -> None:
    play = Play(4)
    play.claim(b"g", 1)
    play.must(not play.hosts[1].tables.own_groups, "nobody has recorded it")
    play.must(play.get(2, b"g/k") is None, "there is no such key")
    play.world.kill_index(play.hosts[1])
    play.world.serve(play.hosts[1], "h0")
    play.put(3, b"g/k")
    play.must(b"g" in play.hosts[1].tables.own_groups, "the group was given to another host")


@script("a folder that was copied")
def _() -> None:
    """Both are served, first the copy beside the living one, and then with --moved once that is dead."""
    play = Play(3)
    play.put(2, b"g/k", b"mine")
    original = play.hosts[2]
    copy = play.world.add_host("h3")
    copy.tables = _copied(original.tables)
    play.world._set_up(copy)  # pyright: ignore[reportPrivateUsage]
    copy.tables.owns = _is_no_other  # two that have one id are no two owners
    play.hosts.append(copy)
    play.processes.append(play.world.start_process(copy))
    play.world.serve(copy, names=())
    play.world.run(20)
    assert copy.index is not None
    play.must(copy.index.refusal is not None and not copy.index.refusal.is_removed, "a copy is let in")
    play.put(2, b"g/k", b"more")
    play.put(0, b"g/k", b"of another")
    play.must(copy.tables.records[b"g/k"].body == b"mine", "a put went to the copy")
    for host in (original, copy):
        play.world.kill_index(host)
    play.world.run(5)
    moved = play.hosts[3].tables = _copied(original.tables)  # as it is now
    play.world._set_up(play.hosts[3])  # pyright: ignore[reportPrivateUsage]
    moved.owns = _is_no_other
    play.world.serve(copy, names=(), moved=True)
    play.world.run(20)
    play.world.serve(original, names=())
    play.world.run(20)
    assert original.index is not None
    play.must(original.index.refusal is not None, "the one that was left is let in beside it")
    found = play.get(0, b"g/k")
    play.must(found is not None and found.body == b"of another", f"a put is lost: {found}")


def _is_no_other(group: bytes) -> None:
    pass


def _copied(tables: Any) -> Any:
    """As `cp -r` does."""
    clock, owns = tables.clock, tables.owns
    tables.clock = tables.owns = None
    try:
        return copy_module.deepcopy(tables)
    finally:
        tables.clock, tables.owns = clock, owns


@script("a commit that comes after a hand-over")
def _() -> None:
    play = Play(3)
    grant = play.claim(b"g", 1)
    play.put(1, b"g/k")
    play.hand_over(b"g", 1, 2)
    play.must(isinstance(play.commit(1, b"g/late", grant), NotOwner), "a grant from before is good")


@script("a process that is stopped during a hand-over")
def _() -> None:
    """It has seen that the group is owned here, and commits when it is another host's."""
    play = Play(3)
    play.put(1, b"g/k")
    tables, client = play.hosts[1].tables, play.processes[1].client
    steps: Any = client.commit([Change(b"g/k", b"late")], 1 << 62)
    commit = steps.send(next(steps).action(tables))
    play.hand_over(b"g", 1, 2)
    play.must(commit.action(tables) is None and not tables.records, "a record is put where the group isn't owned")


@script("a process that is stopped between two owners")
def _() -> None:
    """The first one has refused its call, and an audit has given its bytes back."""
    play = Play(3)
    play.put(1, b"g/k")
    play.put(2, b"g/k")  # so that it has a session there
    tables, client = play.hosts[2].tables, play.processes[2].client
    place, commits = Place(tables.member, tables.fill(7)), 0
    steps: Any = client.commit([Change(b"g/k", b"", (place,))], 1 << 62)
    value: Any = None
    try:
        while True:
            step = steps.send(value)
            value = None
            if isinstance(step, Transact):
                value = step.action(tables)
            elif isinstance(step, Send) and isinstance(step.request, Commit):
                commits += 1
                tables.retire(place)
                value = NotOwner() if commits == 1 else Committed((1,))
            elif isinstance(step, Send):
                value = Owners((play.hosts[0].tables.directory[b"g"],))
    except StopIteration:
        raise Fault("bytes are put that were given back", tuple(play.world.trace)) from None
    except StoreTimeoutError:
        pass


@script("a batch of two groups, one of them new")
def _() -> None:
    play = Play(3)
    play.put(1, b"one/k", b"old")
    owner, seed = play.hosts[1].tables, play.hosts[0].tables
    lookups = list[Lookup]()

    def batch(host: Host, request: Any) -> None:
        if isinstance(request, Lookup) and not lookups:
            lookups.append(request)
            standing = seed.standing()
            assert standing is not None
            owning.record_grant(owner, b"two", give(seed, standing.roster, b"two", play.hosts[1].id).grant)
            owning.apply(owner, standing, [Change(b"one/k", b"new"), Change(b"two/k", b"new")])

    play.before = batch
    client = play.processes[2].client
    entries = run(play.world, play.processes[2], reading.look_up(client, [b"one/k", b"two/k"]))
    play.must(lookups and len({entry and entry.body for entry in entries}) == 1, f"half of a batch: {entries}")


@script("bytes of a host that was removed")
def _() -> None:
    play = Play(4)
    play.put(2, b"g/k")
    play.put(1, b"g/k")  # so that it knows the owner
    play.world.cut("h0", "h1")
    remove(play.world, play.hosts[1])
    play.world.run(10)
    place = Place(play.hosts[1].id, play.hosts[1].tables.fill(7))
    play.begin(play.processes[1], play.processes[1].client.commit([Change(b"g/k", b"", (place,))], 1 << 62))
    play.world.run(5)
    play.must(play.hosts[2].tables.records[b"g/k"].places != (place,), "a record names what is gone for ever")


@script("bytes that are lent by a grant that is dead")
def _() -> None:
    """The call never came, so the owner has not recorded the group; it has handed over another one since."""
    play = Play(3)
    play.put(1, b"other")
    grant = play.claim(b"g", 1)
    data = play.hosts[2].tables
    place = Place(data.member, data.fill(7))
    play.hand_over(b"other", 1, 0)
    data.lend(place, Lent(b"g/k", play.hosts[1].id))
    play.must(grant.number < play.hosts[1].tables.standing().floor, "the floor")  # pyright: ignore
    play.world.run(10)
    play.must(not data.is_there(place), "nobody gives back bytes that nothing names")


@script("a release that is lost")
def _() -> None:
    play = Play(3)
    play.put(1, b"g/k")
    data = play.hosts[2].tables
    place = Place(data.member, data.fill(7))
    run(play.world, play.processes[2], play.processes[2].client.commit([Change(b"g/k", b"", (place,))], 1 << 62))
    play.world.run(5)  # an audit finds that it is named
    send, lost = play.world.send, list[Send]()

    def lose(host: Host, one: Send, is_alive: Callable[[], bool], reply: Callable[[Any], None]) -> None:
        if isinstance(one.request, Release) and not lost:
            lost.append(one)
            play.world.at(1, lambda: reply(None))
        else:
            send(host, one, is_alive, reply)

    play.world.send = lose
    play.put(1, b"g/k")
    play.world.run(5)
    play.must(lost and not data.is_there(place), "nobody gives back bytes that nothing names")


def promote(play: Play, host: int, *, forced: bool = False) -> None:
    done = list[bool]()
    for _ in range(20):
        play.world.promote(play.hosts[host], done.append, forced=forced)
        play.world.run(6)
        if done and done[-1]:
            return
    raise Fault("nobody can be the seed", tuple(play.world.trace))


def deputies(play: Play) -> list[int]:
    standing = play.hosts[0].tables.standing()
    assert standing is not None
    return [at for at, host in enumerate(play.hosts) if host.id in standing.roster.deputies]


@script("an old seed denies")
def _() -> None:
    """It is cut off from all but the host of one client."""
    play = Play(5)
    new = deputies(play)[0]
    others = [at for at in range(1, 5) if at != new]
    silent = others[-1]
    for at in range(1, 5):
        if at != silent:
            play.world.cut("h0", f"h{at}")
            play.world.cut(f"h{silent}", f"h{at}")
    silent_after, promotion.SILENT = promotion.SILENT, 1 << 62  # the old seed doesn't look whether its deputies answer
    try:
        promote(play, new)
        play.put(others[0], b"g/k")
    finally:
        promotion.SILENT = silent_after
    client = play.processes[silent].client
    ends = play.begin(play.processes[silent], reading.look_up(client, [b"g/k"]), 5)
    play.world.run(8)
    play.must(ends and not (isinstance(ends[0], tuple) and ends[0] == (None,)), f"a put is lost: {ends}")


@script("an old seed is asked for all keys")
def _() -> None:
    """It is the one owner that a host of its side knows. On the other side an owner has joined."""
    play = Play(0)
    for number in range(6):
        play.add_host(is_owner=number == 0, seed="h0" if number < 5 else None)
    play.world.run(10)
    new = deputies(play)[0]
    near = others_than_deputies(play)
    for at in range(1, 6):
        if at != near:
            play.world.cut("h0", f"h{at}")
            play.world.cut(f"h{near}", f"h{at}")
    silent_after, promotion.SILENT = promotion.SILENT, 1 << 62
    try:
        promote(play, new)
        play.world.serve(play.hosts[5], f"h{new}")
        play.world.run(8)
        play.put(5, b"g/k")
    finally:
        promotion.SILENT = silent_after
    ends = play.begin(play.processes[near], reading.page(play.processes[near].client, b"", b""), 5)
    play.world.run(8)
    play.must(ends and isinstance(ends[0], MemstoreError), f"a put is on no page: {ends}")


@script("members that own nothing are cut off")
def _() -> None:
    """They are more than half, and came before another owner did."""
    play = Play(0)
    for number in range(5):
        play.add_host(is_owner=number in (0, 4), seed="h0")
        play.world.run(5)
    play.world.run(5)
    for visitor in (1, 2, 3):
        for owner in (0, 4):
            play.world.cut(f"h{visitor}", f"h{owner}")
    for owner in (0, 4):
        ends = play.begin(play.processes[owner], put(play.processes[owner], b"of-%d" % owner), 5)
        play.world.run(8)
        play.must(ends and not isinstance(ends[0], MemstoreError), f"a put waits for who owns nothing: {ends}")


@script("a deputy that is to own nothing any more")
def _() -> None:
    """It stays one, as the others that came: there is no other owner."""
    play = Play(0)
    for number in range(3):
        play.add_host(is_owner=number == 0, seed="h0")
        play.world.run(5)
    (deputy,) = deputies(play)
    play.world.kill_index(play.hosts[deputy])
    play.world.run(10)
    (other,) = deputies(play)
    play.must(other != deputy, "a silent deputy is left out, and another one is there")


@script("a row that one deputy knows")
def _() -> None:
    """The old seed has told it of a hand-over, and nobody else; the other deputy is promoted."""
    play = Play(4)
    one, new = deputies(play)
    giver = others_than_deputies(play)
    play.put(giver, b"g/k")
    play.world.run(2)
    play.world.cut("h0", f"h{new}")
    directory.begin(play.hosts[giver].tables, b"g", play.hosts[one].id)
    while play.hosts[one].tables.directory[b"g"].owner != play.hosts[one].id:
        play.world.run(0.01)
    play.world.kill_index(play.hosts[0])
    go_on, directory.go_on = directory.go_on, _nothing
    try:
        promote(play, new)
        play.world.run(10)
    finally:
        directory.go_on = go_on
    rows = [play.hosts[at].tables.directory[b"g"] for at in (one, new)]
    play.must(rows[0] == rows[1], f"a deputy keeps what the seed hasn't: {rows}")


@script("a drained host leaves, and another one is lost")
def _() -> None:
    """Without the vote of the one that leaves there is no majority."""
    play = Play(4)
    left, lost = play.hosts[3].id, play.hosts[2].id

    def after(host: Host, request: Any, answer: Any) -> None:
        if isinstance(request, Remove) and request.member == left and play.hosts[2].id == lost:
            play.world.lose(play.hosts[2])

    play.after = after
    play.drain(3, 5)
    play.must(play.hosts[2].id != lost, "the drained host asks to be removed")
    play.world.remove(lost)
    play.world.run(15)
    standing = play.hosts[0].tables.standing()
    play.must(standing is not None and not {left, lost} & standing.roster.ids, f"nobody is removed: {standing}")


@script("a host that is removed, and isn't")
def _() -> None:
    """It hears so from the old seed, which nobody else hears; the others have a new seed, and it is a member."""
    play = Play(5)
    new, _ = deputies(play)
    kept = others_than_deputies(play)
    data = play.hosts[kept].tables
    place = Place(data.member, data.fill(7), 1)
    client = play.processes[kept].client
    run(play.world, play.processes[kept], client.commit([Change(b"g/k", b"", (place,))], 1 << 62))
    for at in range(1, 5):
        if at != kept:
            play.world.cut("h0", f"h{at}")
            play.world.cut(f"h{kept}", f"h{at}")
    silent_after, promotion.SILENT = promotion.SILENT, 1 << 62  # the old seed doesn't look whether its deputies answer
    try:
        play.answer(0, Remove(data.member))
        play.world.run(5)
        promote(play, new)
    finally:
        promotion.SILENT = silent_after
    play.world.heal()
    play.world.run(5)
    entry = play.get(new, b"g/k")
    play.must(entry is not None and data.is_there(place), f"a member has dropped what it owns: {entry}")


@script("a group that is handed to a seed that was replaced")
def _() -> None:
    """It doesn't know so yet, and its own directory names an owner from before the one that gives it the group."""
    play = Play(4)
    first, second = deputies(play)
    other = others_than_deputies(play)
    play.put(other, b"g/k")
    play.world.cut("h0", f"h{first}")
    promote(play, first)
    play.hand_over(b"g", other, second)
    play.hand_over(b"g", second, 0)
    play.world.heal()
    play.world.run(20)
    play.must(play.get(other, b"g/k") is not None, "a put is lost")


@script("a host that can't be the seed is promoted again and again")
def _() -> None:
    play = Play(4)
    other = others_than_deputies(play)
    for number in range(5):
        play.world.promote(play.hosts[other])
        play.world.run(1)
        ends = play.begin(play.processes[1], put(play.processes[1], b"new-%d/k" % number), 2)
        play.world.run(3)
        play.must(ends and not isinstance(ends[0], MemstoreError), f"a put waits for who can't be the seed: {ends}")


@script("the seed is promoted again and again")
def _() -> None:
    """Each new term gives a deputy, which is lost, its time anew."""
    play = Play(4)
    play.world.lose(play.hosts[deputies(play)[0]])
    for _ in range(6):
        play.world.promote(play.hosts[0])
        play.world.run(2)
    ends = play.begin(play.processes[0], put(play.processes[0], b"g/k"), 1)
    play.world.run(2)
    play.must(ends and not isinstance(ends[0], MemstoreError), f"a put waits for a deputy that is lost: {ends}")


@script("a promise that was given in between")
def _() -> None:
    """The old seed leaves out the candidate, after that has its majority and before it begins."""
    play = Play(5)
    new, other = deputies(play)
    first, second = (at for at in range(1, 5) if at not in (new, other))
    play.world.cut("h0", f"h{new}")
    play.world.cut(f"h{other}", f"h{new}")
    begin, held = promotion._begin_term, list[Any]()  # pyright: ignore[reportPrivateUsage]

    def hold(*arguments: Any) -> bool:
        held.append(arguments)
        return False

    silent_after, promotion.SILENT = promotion.SILENT, 1 << 62
    promotion._begin_term = hold  # pyright: ignore[reportPrivateUsage]
    try:
        play.world.promote(play.hosts[new])
        while not held:
            play.world.run(0.1)
    finally:
        promotion._begin_term, promotion.SILENT = begin, silent_after  # pyright: ignore[reportPrivateUsage]
    play.world.run(6)  # the old seed finds that its deputy is silent
    play.begin(play.processes[first], put(play.processes[first], b"g/k"), 5)
    play.world.run(5)
    begin(*held[0])
    play.world.run(5)
    play.begin(play.processes[second], put(play.processes[second], b"g/k"), 5)
    play.world.run(5)
    play.must(sum(b"g" in host.tables.own_groups for host in play.hosts) == 1, "nobody, or two own a group")


@script("a seed that is cut off adds and removes")
def _() -> None:
    play = Play(3)
    play.cut_off(0)
    for host in play.hosts[1:] * 2:
        play.answer(0, Remove(host.id))
        play.world.run(4)
    promote(play, deputies(play)[0] if deputies(play) else 1)
    play.world.run(5)
    first = play.begin(play.processes[0], put(play.processes[0], b"g/k"), 5)
    play.put(1, b"g/k")
    play.world.run(5)
    play.must(isinstance(first[0], MemstoreError), f"two hosts own a group: {first}")


@script("a root with keys of a host that was removed")
def _() -> None:
    play = Play(3)
    play.put(1, b"g/k")
    before = play.put(1, b"g/k")
    removed = play.hosts[1].id
    play.world.lose(play.hosts[1])
    play.world.remove(removed)
    play.world.run(5)
    joining = root_with(play.world, "h3", b"g/k")
    play.world.serve(joining, "h0")
    play.world.run(10)
    entry = play.get(0, b"g/k")
    play.must(entry is not None and entry.version > before, f"a version goes down from {before}: {entry}")


def join(play: Play, *keys: bytes) -> Host:
    """Serves a root with keys, which is to be admitted."""
    joining = root_with(play.world, f"h{len(play.hosts)}", *keys)
    play.hosts.append(joining)
    play.processes.append(play.world.start_process(joining))
    play.world.serve(joining, "h0")
    return joining


def once_noted(play: Play, late: Callable[[Ask], None]) -> list[Ask]:
    """Calls `late` before the first question of a root that the seed has noted the groups of."""
    asks = list[Ask]()

    def before(host: Host, request: Any) -> None:
        if isinstance(request, Ask) and request.brings and host is play.hosts[0] and not asks:
            asks.append(request)
            late(request)

    play.before = before
    return asks


@script("a group of a root that joins is claimed")
def _() -> None:
    play = Play(3)
    asks = once_noted(play, lambda ask: play.answer(0, ClaimGroups((b"g",), play.hosts[1].id)))
    joining = join(play, b"g/k", b"ours")
    play.world.run(5)
    play.put(1, b"g/k", b"theirs")
    play.must(asks and joining.tables.standing() is None, "a root is admitted with a group of another host")
    play.must(joining.index is not None and joining.index.refusal is not None, "it isn't told why")


@script("a deputy looks for rows of removed members while a root joins")
def _() -> None:
    play = Play(4)

    def look(ask: Ask) -> None:
        for at in deputies(play):
            host, value = play.hosts[at], None
            assert host.index is not None
            steps: Any = roster.drop_lost(host.index.seed)
            with contextlib.suppress(StopIteration):
                while True:
                    step = steps.send(value)
                    value = step.action(host.tables) if isinstance(step, Transact) else None

    asks = once_noted(play, look)
    joining = join(play, b"g/k", b"ours")
    play.world.run(10)
    play.must(asks and set(joining.tables.own_groups) == {b"g", b"ours"}, "it isn't admitted")
    check_directory(play.world, play.hosts)


@script("a root that joins at the second try")
def _() -> None:
    """The first one has come to nothing, since another host has put one of its keys. That was deleted here then."""
    play = Play(3)
    asks = once_noted(play, lambda ask: play.answer(0, ClaimGroups((b"g",), play.hosts[1].id)))
    joining = join(play, b"g/k", b"ours")
    play.world.run(5)
    play.put(1, b"g/k", b"theirs")
    joining.tables.delete_record(b"g/k")
    joining.tables.retire(Place(joining.id, 1))
    play.world.run(10)
    play.must(asks and set(joining.tables.own_groups) == {b"ours"}, f"it owns {set(joining.tables.own_groups)}")


@script("a root that is admitted by a question that comes late")
def _() -> None:
    """The seed was killed, and has forgotten what it has noted, before another host claims one of the groups."""
    play = Play(3)

    def late(ask: Ask) -> None:
        seed = play.hosts[0].index
        assert seed is not None
        seed.seed.newcomers.clear()
        play.answer(0, ClaimGroups((b"g",), play.hosts[1].id))
        play.answer(0, directory.msgspec.structs.replace(ask, brings=0))

    asks = once_noted(play, late)
    joining = join(play, b"g/k", b"ours")
    play.world.run(10)
    play.put(1, b"g/k", b"theirs")
    play.world.run(5)
    play.must(asks and set(joining.tables.own_groups) == {b"ours"}, f"it owns {set(joining.tables.own_groups)}")
    play.must(set(joining.tables.records) == {b"ours"}, "it has records of another host's group")


@script("a root that puts while it joins")
def _() -> None:
    """It has put a key after it had named its groups, and another host has claimed that group before the admission."""
    play = Play(3)

    def late(ask: Ask) -> None:
        joining.tables.put_record(b"late/k", Entry(1 << 50, b"ours"))
        play.answer(0, ClaimGroups((b"late",), play.hosts[1].id))

    asks = once_noted(play, late)
    finish, roster.finish_joining = roster.finish_joining, _nothing
    try:
        joining = join(play, b"ours")
        play.world.run(5)
        play.must(asks and joining.tables.standing() is not None, "it isn't admitted")
        play.put(3, b"ours", b"new")
        play.put(1, b"late/k", b"theirs")
        ends = play.begin(play.processes[3], put(play.processes[3], b"late/k", b"new"), 2)
        play.world.run(3)
        entry = None if isinstance(ends[0], MemstoreError) else play.get(3, b"late/k")
        play.must(entry is None or entry.body == b"new", f"a process doesn't see what it has put: {entry}")
    finally:
        roster.finish_joining = finish
    play.world.run(5)
    play.put(3, b"late/k", b"new")
    entry = play.get(3, b"late/k")
    play.must(entry is not None and entry.body == b"new" and b"late/k" not in joining.tables.records, f"{entry}")


def others_than_deputies(play: Play) -> int:
    return next(at for at in range(1, len(play.hosts)) if at not in deputies(play))


@script("a deputy that owns nothing any more")
def _() -> None:
    """It is the one that the seed chose last."""
    for one in (0, 1):
        play = Play(4)
        other, gone = others_than_deputies(play), deputies(play)[one]
        play.world.kill_index(play.hosts[gone])
        play.world.serve(play.hosts[gone], "h0", is_owner=False)
        play.world.run(12)
        standing = play.hosts[0].tables.standing()
        play.must(other in deputies(play) and gone not in deputies(play), f"{standing}")
        play.world.run(12)
        after = play.hosts[0].tables.standing()
        play.must(after == standing, f"the seed goes on to change it: {after}")


@script("a directory that is lost")
def _() -> None:
    """A host announces late what it owns."""
    play = Play(4)
    new = others_than_deputies(play)
    late = deputies(play)[0]
    play.put(late, b"g/k")
    play.world.kill_index(play.hosts[0])
    play.cut_off(late)
    promote(play, new, forced=True)
    ends = play.begin(play.processes[new], put(play.processes[new], b"g/k"), 5)
    play.world.run(8)
    play.must(ends and isinstance(ends[0], MemstoreError), f"what another host owns is granted: {ends}")
    play.world.heal()
    play.world.serve(play.hosts[0], "h0")
    play.world.run(20)
    play.put(new, b"g/k")
    play.must(b"g" in play.hosts[late].tables.own_groups, "it isn't the owner any more")


@script("a host that joins while another seed is forced")
def _() -> None:
    """The old seed lives, and admits it. The new one is cut off meanwhile, and hears of it afterwards."""
    play = Play(4)
    new = others_than_deputies(play)
    play.cut_off(new)
    play.add_host(is_owner=True, seed="h0")
    play.world.run(5)
    play.put(4, b"late/k", b"joined")
    promote(play, new, forced=True)
    play.world.heal()
    play.world.run(20)
    standing = play.hosts[4].tables.standing()
    play.must(standing is not None and not standing.is_removed, f"a host was removed by nobody: {standing}")
    play.must(play.hosts[new].index is not None and standing.seed.id == play.hosts[new].id, f"{standing}")
    entry = play.get(1, b"late/k")
    play.must(entry is not None and entry.body == b"joined", f"{entry}")


@script("a grant of the old term")
def _() -> None:
    """It was never recorded, and the directory is lost."""
    play = Play(4)
    new = others_than_deputies(play)
    claimed, other = deputies(play)
    grant = play.claim(b"g", claimed)
    play.world.kill_index(play.hosts[0])
    promote(play, new, forced=True)
    play.world.serve(play.hosts[0], "h0")
    play.world.run(10)
    play.put(other, b"g/k")
    play.commit(claimed, b"g/k", grant)


@script("a taker that is asked early")
def _() -> None:
    """The giver doesn't hear that the directory has the new owner, and has its records still."""
    play = Play(3)
    play.put(1, b"g/k", b"old")

    def silence(host: Host, request: Any, answer: Any) -> None:
        if isinstance(request, HandOver) and host is play.hosts[0]:
            play.world.cut("h0", "h1", one_way=True)

    play.after = silence
    play.hand_over(b"g", 1, 2)
    ends = play.begin(play.processes[2], put(play.processes[2], b"g/k", b"new"), 5)
    play.world.run(8)
    entry = play.get(1, b"g/k")
    play.must(isinstance(ends[0], MemstoreError) or entry is None or entry.body == b"new", f"an old value: {entry}")


@script("a giver that is lost")
def _() -> None:
    """Half of its records are at the taker, which is given the group anew."""
    play = Play(4)
    keys = [b"g/1", b"g/2"]
    run(play.world, play.processes[1], play.processes[1].client.commit([Change(key, b"x") for key in keys], 1 << 62))
    gives = list[Give]()

    def lose(host: Host, request: Any) -> None:
        if isinstance(request, Give):
            gives.append(request)
            if request.version is not None and play.hosts[1].id not in play.world.gone:
                play.world.cut("h1", "h2")

    play.before = lose
    play.hosts[2].tables.put_kept(
        b"g", directory.KeptGroup(play.hosts[1].id, play.hosts[1].tables.own_groups[b"g"].number)
    )
    play.hosts[2].tables.keep({b"g/1": play.hosts[1].tables.records[b"g/1"]})
    removed = play.hosts[1].id
    play.world.lose(play.hosts[1])
    play.world.remove(removed)
    settle = directory.settle_kept
    directory.settle_kept = _nothing  # it doesn't come to ask before the group is put
    try:
        play.world.run(3)
        play.put(2, b"g/3")
    finally:
        directory.settle_kept = settle
    play.must(play.get(2, b"g/1") is None, "half of a batch comes back")


def _nothing(*arguments: Any) -> Any:
    return
    yield


@script("a hand-over that is asked for late")
def _() -> None:
    play = Play(3)
    play.put(1, b"g/k")
    asked = list[HandOver]()

    def note(host: Host, request: Any) -> None:
        if isinstance(request, HandOver):
            asked.append(request)

    play.before = note
    play.hand_over(b"g", 1, 2)
    play.hand_over(b"g", 2, 1)
    play.answer(0, asked[0])
    play.world.run(2)
    owner = play.hosts[0].tables.directory[b"g"].owner
    play.must(owner == play.hosts[1].id, "the group is given to a host that has nothing of it")


@script("a listing of a hand-over")
def _() -> None:
    """The new owner is asked for its page before it serves, and the old one after it has dropped the records."""
    play = Play(3)
    play.put(1, b"g/k")
    lister = play.processes[0]
    order = sorted(play.hosts, key=lambda host: host.id != play.hosts[2].id)  # the taker is asked first
    for host in play.hosts:
        standing = host.tables.standing()
        assert standing is not None
        members = tuple(one for first in order for one in standing.roster.members if one.id == first.id)
        host.tables.own_standing = directory.msgspec.structs.replace(
            standing, roster=directory.msgspec.structs.replace(standing.roster, members=members)
        )
    lists = list[Host]()

    def wait(host: Host, request: Any) -> None:
        """The page of the giver is made only when the hand-over is over, but for its last step."""
        if isinstance(request, List):
            if host is play.hosts[1] and play.hosts[2] in lists and host not in lists:
                for _ in range(200):
                    if b"g" in play.hosts[2].tables.own_groups and not play.hosts[1].tables.records:
                        break
                    play.world.run(0.05)
            lists.append(host)

    play.before = wait
    ends = play.begin(lister, reading.page(lister.client, b"g", b""), 30)
    directory.begin(play.hosts[1].tables, b"g", play.hosts[2].id)
    play.world.run(30)
    play.must(ends and [key for key, _ in ends[0]] == [b"g/k"], f"a key is missing: {ends}")


@script("a directory that is lost in a hand-over")
def _() -> None:
    """The giver hears that the taker has the grant, and then of a seed that knows nothing of it."""
    play = Play(4)
    new = others_than_deputies(play)
    giver, taker = deputies(play)
    play.put(giver, b"g/k", b"old")
    drop, go_on, late = directory._drop, directory.go_on, list[Any]()  # pyright: ignore[reportPrivateUsage]

    def later(*arguments: Any) -> None:
        late.append(arguments)
        directory.go_on = _nothing

    directory._drop = later  # pyright: ignore[reportPrivateUsage]
    try:
        play.hand_over(b"g", giver, taker, 2)
        play.world.kill_index(play.hosts[0])
        promote(play, new, forced=True)
        play.world.serve(play.hosts[0], "h0")
        play.world.run(10)
    finally:
        directory._drop, directory.go_on = drop, go_on  # pyright: ignore[reportPrivateUsage]
    drop(*late[0])
    play.world.run(15)
    try:
        found = play.get(new, b"g/k")
    except MemstoreError as error:
        found = raise_fault(play, error)
    play.must(found is not None, "what was put is lost")


def raise_fault(play: Play, error: MemstoreError) -> None:
    raise Fault(f"a key can't be read: {error}", tuple(play.world.trace))


@script("a taker that is lost")
def _() -> None:
    """The directory has given it the group, and the giver has not heard of it."""
    play = Play(4)
    play.put(1, b"g/k")
    play.put(1, b"g/stays")

    def silence(host: Host, request: Any, answer: Any) -> None:
        if isinstance(request, HandOver) and host is play.hosts[0] and request.taker != request.giver:
            play.world.cut("h0", "h1", one_way=True)

    play.after = silence
    play.hand_over(b"g", 1, 2, 3)
    lost = play.hosts[2].id
    play.world.lose(play.hosts[2])
    with mock.patch.object(recovery, "crc32", lambda member: 2):
        play.world.remove(lost)
        play.world.run(5)
    play.world.heal()
    play.world.run(0.2)
    play.world.cut("h0", "h1", one_way=True)
    ends = play.begin(play.processes[3], put(play.processes[3], b"g/k"), 20)
    play.world.run(6)
    play.world.heal()
    play.world.run(25)
    play.must(ends and not isinstance(ends[0], MemstoreError), f"{ends}")
    play.must(play.get(3, b"g/stays") is not None, "what the giver has is lost")


@script("a taker whose removal doesn't count")
def _() -> None:
    """The giver alone hears of it, from a seed that is cut off from all others."""
    play = Play(5)
    new = deputies(play)[0]
    giver, taker, other = (at for at in range(1, 5) if at != new)
    play.put(giver, b"g/k")
    asked = list[HandOver]()

    def silence(host: Host, request: Any, answer: Any) -> None:
        if isinstance(request, HandOver) and not asked:
            asked.append(request)
            play.world.cut("h0", f"h{giver}", one_way=True)

    play.after = silence
    play.hand_over(b"g", giver, taker, 3)
    go_on, directory.go_on = directory.go_on, _nothing
    play.world.run(4)
    play.world.heal()
    for at in (new, taker, other):
        play.world.cut("h0", f"h{at}")
        play.world.cut(f"h{giver}", f"h{at}")
    play.answer(0, Remove(play.hosts[taker].id))
    play.world.run(2)
    directory.go_on = go_on
    play.world.run(5)
    promote(play, new)
    play.world.heal()
    play.world.run(20)
    try:
        found = play.get(other, b"g/k")
    except MemstoreError as error:
        found = raise_fault(play, error)
    play.must(found is not None, "what was put is lost")


@script("a hand-over of many versions")
def _() -> None:
    play = Play(3)
    before = [play.put(1, b"g/k") for _ in range(5)][-1]
    play.hand_over(b"g", 1, 2)
    after = play.put(2, b"g/k")
    play.must(after > before, f"versions go from {before} to {after}")


@script("a group that comes back before its giver is done")
def _() -> None:
    """The answer that the taker serves is lost, and the giver deletes its records once more."""
    play = Play(3)
    play.put(1, b"g/k")

    def lose_it(host: Host, request: Any, answer: Any) -> None:
        if isinstance(request, Serve) and isinstance(answer, IsAt) and host is play.hosts[2]:
            play.world.cut("h2", "h1", one_way=True)

    play.after = lose_it
    play.hand_over(b"g", 1, 2, 3)
    play.hand_over(b"g", 2, 1, 3)
    play.after = lambda host, request, answer: None
    play.world.heal()
    play.world.run(15)
    play.must(play.get(0, b"g/k") is not None, "what was put is lost")


# --- a death ----------------------------------------------------------------------------------------------------------


def die(play: Play, host: int) -> bytes:
    """A host is lost, and a person removes it."""
    lost = play.hosts[host].id
    play.world.lose(play.hosts[host])
    play.world.remove(lost)
    return lost


def die_with_heir(play: Play, host: int) -> None:
    """Its heir is the first of those behind it, of which the first host is none."""
    with mock.patch.object(recovery, "crc32", lambda member: 1):
        die(play, host)
        play.world.run(3)


def got(play: Play, key: bytes) -> Entry | None:
    try:
        return play.get(0, key)
    except HomeUnavailableError as error:
        raise Fault(f"a key can't be read: {error}", tuple(play.world.trace)) from None


def asked_to_keep(play: Play, host: int, key: bytes) -> Any:
    """Steps of a put, up to the transaction in which its host is to write what it keeps."""
    steps = play.processes[host].client.commit([Change(key, b"late")], 1 << 62)
    value: Any = None
    while True:
        step = steps.send(value)
        value = None
        if isinstance(step, Transact):
            if not step.is_read:
                return steps, step
            value = step.action(play.hosts[host].tables)
        elif isinstance(step, Send):
            asked = next(at for at, one in enumerate(play.hosts) if one.address == step.address)
            value = play.answer(asked, step.request)


def go_on(play: Play, host: int, begun: tuple[Any, Any]) -> Any:
    steps, step = begun
    try:
        value = step.action(play.hosts[host].tables)
        while True:
            step = steps.send(value)
            value = None
            if isinstance(step, Transact):
                value = step.action(play.hosts[host].tables)
            elif isinstance(step, Send):
                asked = next(at for at, one in enumerate(play.hosts) if one.address == step.address)
                value = play.answer(asked, step.request)
    except StopIteration as end:
        return end.value
    except MemstoreError as error:
        return error


@script("a put that is heard of after a recovery")
def _() -> None:
    """Its owner has made it, and its host was asked before it knew. It may not say that it was put."""
    play = Play(4)
    play.put(1, b"g/own")
    play.put(2, b"g/k", b"old")
    late = asked_to_keep(play, 2, b"g/k")
    die(play, 1)
    play.world.run(10)
    told = go_on(play, 2, late)
    found = got(play, b"g/k")
    was_put = not isinstance(told, MemstoreError)
    play.must(found is not None and found.body == (b"late" if was_put else b"old"), f"{told}, and {found}")


@script("a member that hears of a removal late")
def _() -> None:
    play = Play(6)
    play.put(1, b"g/own")
    play.put(3, b"g/k", b"old")
    ask = Index.ask
    behind = play.hosts[3].index

    def held_up(index: Index) -> Steps[None]:
        if index is not behind:
            yield from ask(index)

    with mock.patch.object(Index, "ask", held_up):
        play.world.run(15)  # for the question that is open at the seed
        late = asked_to_keep(play, 3, b"g/k")
        die_with_heir(play, 1)
        play.world.run(4)
        told = go_on(play, 3, late)
    play.world.run(15)
    found = got(play, b"g/k")
    was_put = not isinstance(told, MemstoreError)
    play.must(found is not None and found.body == (b"late" if was_put else b"old"), f"{told}, and {found}")


@script("a put that is heard of after it was replaced")
def _() -> None:
    replaced(0)


@script("a put that is heard of long after it was replaced")
def _() -> None:
    replaced(60)


def replaced(seconds: float) -> None:
    play = Play(4)
    play.put(1, b"g/own")
    play.put(2, b"g/k", b"old")
    late = asked_to_keep(play, 2, b"g/k")
    run(play.world, play.processes[1], play.processes[1].client.commit([Change(b"g/k", None)], 1 << 62))
    play.world.run(seconds)
    go_on(play, 2, late)
    die(play, 1)
    play.world.run(10)
    found = got(play, b"g/k")
    play.must(found is None, f"what was deleted comes back: {found}")


@script("an owner that dies right after a delete")
def _() -> None:
    play = Play(4)
    play.put(1, b"g/own")
    play.put(2, b"g/k", b"old")
    told = play.at_once(1, play.processes[1].client.commit([Change(b"g/k", None)], 1 << 62))
    die(play, 1)
    play.must(not isinstance(told, MemstoreError), f"{told}")
    play.world.run(10)
    found = got(play, b"g/k")
    play.must(found is None, f"what was deleted comes back: {found}")


@script("an owner that dies right after another host's delete")
def _() -> None:
    """The host that deletes keeps the value, or a third one does."""
    for putter in (2, 3):
        play = Play(4)
        play.put(1, b"g/own")
        play.put(putter, b"g/k", b"old")
        ends = play.begin(play.processes[2], play.processes[2].client.commit([Change(b"g/k", None)], 1 << 62))
        while not ends:
            play.world.run(0.001)
        die(play, 1)
        play.must(not isinstance(ends[0], MemstoreError), f"{ends}")
        play.world.run(10)
        found = got(play, b"g/k")
        play.must(found is None, f"what was deleted comes back: {found}")


@script("a put of another process whose row is late")
def _() -> None:
    """A second process of its host deletes the key meanwhile, and the owner tells nobody."""
    play = Play(4)
    play.put(1, b"g/own")
    late = asked_to_keep(play, 2, b"g/k")
    other = play.world.start_process(play.hosts[2])
    told = play.at_once(2, other.client.commit([Change(b"g/k", None)], 1 << 62))
    play.must(not isinstance(told, MemstoreError), f"{told}")
    go_on(play, 2, late)
    die(play, 1)
    play.world.run(10)
    found = got(play, b"g/k")
    play.must(found is None, f"what was deleted comes back: {found}")


@script("a member that says late what it keeps")
def _() -> None:
    """Meanwhile somebody puts a new key of the group."""
    play = Play(6)
    play.put(1, b"g/own")
    play.put(3, b"g/k", b"kept")
    answer, is_held = play.world.answer, [True]

    def late(host: Host, index: Any, request: Any) -> Any:
        is_late = is_held[0] and host is play.hosts[3] and isinstance(request, FindBackups)
        return Later() if is_late else answer(host, index, request)

    play.world.answer = late
    die_with_heir(play, 1)
    ends = play.begin(play.processes[4], put(play.processes[4], b"g/new"), 40)
    play.world.run(8)
    is_held[0] = False
    play.world.run(15)
    found = got(play, b"g/k")
    play.must(found is not None and found.body == b"kept", f"a put is lost: {found}")
    play.must(ends and not isinstance(ends[0], Exception), f"a put waits: {ends}")


@script("a key that is deleted when its bytes were taken over")
def _() -> None:
    """The host that keeps it has not heard of that, nor is it paid in time what it is owed."""
    play = Play(4)
    play.put(1, b"g/k")
    lend(play, 2, b"g/k")
    play.world.stop(play.hosts[1], "pay")
    recovery.forget_keepers(play.hosts[1].tables, b"g/k")
    process = play.processes[1]
    run(play.world, process, process.client.commit([Change(b"g/k", None)], 1 << 62), seconds=1)
    die(play, 1)
    play.world.run(5)
    play.must(got(play, b"g/k") is None, "it comes back")


@script("bytes that are taken over, of which another host has a record")
def _() -> None:
    """As that of a rank of a sharded put."""
    play = Play(4)
    play.put(1, b"g/own")
    place = Place(play.hosts[2].id, play.hosts[2].tables.fill(7), 1)
    (version,) = run(
        play.world, play.processes[2], play.processes[2].client.commit([Change(b"g/k", b"", (place,))], 1 << 62)
    )
    owner, rank = play.hosts[1].tables, play.hosts[3].tables
    rank.put_backup(b"g/k", Backup(version, owner.own_groups[b"g"].number, b"", (place,)))
    owner.put_keepers(b"g/k", (*owner.keepers(b"g/k"), (rank.member, version)))
    play.drain(2, 20)
    play.must(has_left(play, 2), "the drain doesn't end")
    play.must(not rank.backups, f"it names bytes that are gone: {rank.backups}")


@script("a group that comes back to an owner which dies")
def _() -> None:
    play = Play(7)
    play.put(1, b"g/own")
    play.put(2, b"g/k", b"old")
    play.hand_over(b"g", 1, 3)
    run(play.world, play.processes[3], play.processes[3].client.commit([Change(b"g/k", None)], 1 << 62))
    play.hand_over(b"g", 3, 1)
    play.must(b"g" in play.hosts[1].tables.own_groups, "it is handed over")
    die(play, 3)
    play.world.run(10)
    die(play, 1)
    play.world.run(10)
    found = got(play, b"g/k")
    play.must(found is None, f"what was deleted comes back: {found}")


@script("an heir that dies")
def _() -> None:
    """Before it has heard all; and the next one when it owns the group."""
    play = Play(6)
    play.put(1, b"g/own")
    play.put(0, b"g/k", b"kept")
    play.world.cut("h2", "h5")
    die_with_heir(play, 1)
    play.world.run(5)
    die_with_heir(play, 2)
    play.world.heal()
    play.world.run(20)
    found = got(play, b"g/k")
    play.must(found is not None and found.body == b"kept", f"a put is lost: {found}")
    play.must(b"g" in play.hosts[3].tables.own_groups, "the next one is the heir")
    die(play, 3)
    play.world.run(20)
    found = got(play, b"g/k")
    play.must(found is not None and found.body == b"kept", f"a put is lost: {found}")


@script("a keeper that is silent")
def _() -> None:
    """It isn't waited for, and is told when it answers: a change of an owner needs nobody else for long."""
    play = Play(4)
    play.put(1, b"g/own")
    play.put(2, b"g/k", b"old")
    play.put(2, b"g/other", b"old")
    play.world.kill_index(play.hosts[2])
    for key in (b"g/k", b"g/other"):
        ends = play.begin(play.processes[1], put(play.processes[1], key, b"new"), 10)
        play.world.run(5)
        play.must(ends and not isinstance(ends[0], Exception), f"a put waits for a dead host: {ends}")
    there = play.begin(play.processes[3], put(play.processes[3], b"g/k", b"newer"), 10)
    play.world.run(6)
    play.must(there and not isinstance(there[0], Exception), f"a put waits for a dead host: {there}")
    play.world.serve(play.hosts[2], "h0")
    play.world.run(5)
    play.must(not play.hosts[1].tables.unnoted and not play.hosts[2].tables.backups, "it is never told")


@script("a history goes on with puts of other hosts")
def _() -> None:
    """Bytes of the versions lie where they were put, until these go."""
    play = Play(3)
    play.put(1, b"g/other")
    versions = [_put_with_history(play, 2, b"g/k", (3, 0))]
    for host in (0, 1, 2, 0, 2):
        versions.append(_put_with_history(play, host, b"g/k", None))
    for process in play.processes:
        found = run(play.world, process, reading.versions_of(process.client, b"g/k"), seconds=1)
        play.must(found == tuple(versions[-3:]), f"{found} are kept of {versions}")
        for version in versions:
            steps = reading.look_up_versions(process.client, b"g/k", [version])
            (entry,) = run(play.world, process, steps, seconds=1)
            play.must((entry is None) == (version not in found), f"version {version} is {entry}")
            play.must(entry is None or entry.version == version, f"version {version} is {entry}")
    play.world.run(10)
    left = [len(host.tables.segments) for host in play.hosts]
    play.must(left == [1, 0, 2], f"of three versions {left} files are left")
    (deleted,) = run(play.world, play.processes[0], play.processes[0].client.commit([Change(b"g/k", None)], 1 << 62))
    play.must(deleted == versions[-1], "it is deleted")
    found = run(play.world, play.processes[1], reading.versions_of(play.processes[1].client, b"g/k"), seconds=1)
    play.world.run(10)
    play.must(not found and not any(host.tables.segments for host in play.hosts), f"{found} are left")


def _put_with_history(play: Play, host: int, key: bytes, limits: tuple[int, int] | None) -> int:
    process, tables = play.processes[host], play.hosts[host].tables
    place = Place(process.host.id, tables.fill(7), 1)
    change, until = Change(key, b"", (place,), history=limits), tables.clock() + 5_000_000_000
    (version,) = run(play.world, process, process.client.commit([change], until), seconds=1)
    return version


@script("a version is replaced while its host is looked for")
def _() -> None:
    """That host was removed. The version is kept then, and nobody would look for it again."""
    play = Play(3)
    play.put(1, b"g/other")
    _put_with_history(play, 2, b"g/k", (2, 0))
    owner = play.hosts[1]
    standing = owner.tables.standing()
    assert standing is not None and owner.index is not None
    members = tuple(member for member in standing.roster.members if member.id != play.hosts[2].id)
    gone = msgspec.structs.replace(standing.roster, members=members)
    owner.tables.own_standing = msgspec.structs.replace(standing, roster=gone)
    steps: Any = roster.drop_lost(owner.index.seed)
    with contextlib.suppress(StopIteration):
        value, is_put = None, False
        while True:
            step = steps.send(value)
            value = step.action(owner.tables) if isinstance(step, Transact) else []
            if not is_put:
                owning.apply(owner.tables, owner.tables.standing(), [Change(b"g/k", b"new")])
                is_put = True
    play.must(not owner.tables.replaced, f"{owner.tables.replaced} are left")
    entry = owner.tables.record(b"g/k")
    play.must(entry is not None and entry.body == b"new", f"the key has {entry}")


@script("replaced versions of a host that is drained")
def _() -> None:
    """The owner, and then a host that has bytes of them."""
    play = Play(5)
    play.put(1, b"g/other")
    versions = [_put_with_history(play, host, b"g/k", (4, 0)) for host in (1, 2, 1, 3)]
    for host in (1, 2):
        play.drain(host, 25)
        play.must(has_left(play, host), "the drain doesn't end")
        process = play.processes[4]
        found = run(play.world, process, reading.versions_of(process.client, b"g/k"), seconds=1)
        play.must(found == tuple(versions), f"{found} are left of {versions}")
        entries = run(play.world, process, reading.look_up_versions(process.client, b"g/k", versions), seconds=1)
        places = [place for entry in entries if entry is not None for place in entry.places]
        play.must(
            len(places) == len(set(places)) == len(versions), f"each is where it was put, or copied to: {entries}"
        )
        for place in places:
            at = next((one for one in play.hosts if one.id == place.host and one.index is not None), None)
            play.must(at is not None and place.put_id in at.tables.segments, f"{place} is gone")
    versions.append(_put_with_history(play, 3, b"g/k", None))
    found = run(play.world, play.processes[0], reading.versions_of(play.processes[0].client, b"g/k"), seconds=1)
    play.must(found == tuple(versions[-4:]), "the history goes on")


@script("an heir goes on with a history")
def _() -> None:
    """As the last put has asked for it. What was replaced is lost with its owner, and its bytes are given back."""
    play = Play(4)
    play.put(1, b"g/other")
    for _ in range(3):
        _put_with_history(play, 2, b"g/k", (3, 0))
    die(play, 1)
    play.world.run(20)
    reader = play.processes[3]
    found = run(play.world, reader, reading.versions_of(reader.client, b"g/k"), seconds=1)
    play.must(len(found) == 1, f"{found} are there")
    play.must(len(play.hosts[2].tables.segments) == 1, "bytes of the others stay")
    versions = [*found, *(_put_with_history(play, 2, b"g/k", None) for _ in range(3))]
    found = run(play.world, reader, reading.versions_of(reader.client, b"g/k"), seconds=1)
    play.must(found == tuple(versions[-3:]), f"{found} are left of {versions}")
