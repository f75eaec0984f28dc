"""Scripts and mutations of storage that hosts share: the files of a host that is lost are there still."""

from __future__ import annotations

from typing import Any

from memstore.distributed.rules import Change, Entry, Place, draining, owning, recovery, roster
from memstore.distributed.rules.messages import Done, Drain, Later, TakeOver
from tests.distributed.rules.mutations import Patch, mutation
from tests.distributed.rules.replicating import MUTATIONS, SCRIPTS
from tests.distributed.rules.scripts import Play, die, got, script
from tests.distributed.rules.tables import SimTables
from tests.distributed.rules.test_membership import run

__all__ = ["MUTATIONS", "SCRIPTS"]


class SharedPlay(Play):
    """Of some hosts with files on one storage."""

    def __init__(self, hosts: int = 4) -> None:
        super().__init__(hosts, is_shared=True)

    def put_file(self, host: int, key: bytes, value: int) -> int:
        process = self.processes[host]
        place = Place(process.host.id, process.host.tables.fill(value), 1)
        steps = process.client.commit([Change(key, b"", (place,))], 1 << 62)
        return run(self.world, process, steps, seconds=2)[0]

    def delete(self, host: int, key: bytes) -> None:
        process = self.processes[host]
        run(self.world, process, process.client.commit([Change(key, None)], 1 << 62), seconds=2)

    def must_be(self, key: bytes, value: int | None, version: int | None = None) -> Entry | None:
        """What a file has, as the first host reads it."""
        entry = got(self, key)
        found = None if entry is None else self.world.file_of(entry.places[0])
        self.must(found == value, f"{key!r} is {entry}, whose file has {found}, and not {value}")
        self.must(version is None or entry is None or entry.version == version, f"{key!r} has another version: {entry}")
        return entry


@script("a host with files on shared storage dies")
def _() -> None:
    """It has put into its own groups, and into another's. What it replaced, deleted, or put without a file is gone."""
    play = SharedPlay()
    version = play.put_file(1, b"g/k", 1)
    play.put_file(1, b"g/replaced", 2)
    play.put_file(1, b"g/replaced", 3)
    play.put_file(1, b"g/deleted", 4)
    play.delete(1, b"g/deleted")
    play.put_file(1, b"g/small", 5)
    play.put(1, b"g/small", b"small")
    play.put_file(1, b"g/over", 6)
    play.put_file(2, b"g/over", 7)
    play.put_file(1, b"g/gone", 8)
    play.delete(2, b"g/gone")
    play.put(2, b"o/k")
    lent = play.put_file(1, b"o/lent", 9)
    flat = play.put_file(1, b"flat", 10)
    dead = die(play, 1)
    play.world.run(5)
    play.must_be(b"g/k", 1, version)
    play.must_be(b"g/replaced", 3)
    for key in (b"g/deleted", b"g/small", b"g/gone"):
        play.must(got(play, key) is None, f"{key!r} comes back")
    play.must_be(b"g/over", 7)
    play.must_be(b"o/lent", 9, lent)
    play.must_be(b"flat", 10, flat)
    lost = {name for host in play.hosts for name in host.tables.lost}
    play.must(b"flat" not in lost and b"o/lent" not in lost and b"g" in lost, f"it is told that these are lost: {lost}")
    play.must(play.put_file(3, b"g/k", 11) > version, "versions go down")

    # its next life removes the folder, once nobody names it
    play.world.serve(play.hosts[1], "h0")
    play.world.run(10)
    play.must(dead not in play.world.graves, "its folder stays")
    play.must_be(b"g/replaced", 3)
    play.must_be(b"o/lent", 9, lent)
    play.must_be(b"flat", 10, flat)


@script("a host on shared storage that is removed while it runs")
def _() -> None:
    """It is only read: what it goes on to do is its own affair."""
    play = SharedPlay()
    version = play.put_file(1, b"g/k", 1)
    play.cut_off(1)
    before = {put_id: (one.state, one.header) for put_id, one in play.hosts[1].tables.segments.items()}
    play.world.gone.add(play.hosts[1].id)
    play.world.remove(play.hosts[1].id)
    play.world.run(5)
    play.must_be(b"g/k", 1, version)
    after = {put_id: (one.state, one.header) for put_id, one in play.hosts[1].tables.segments.items()}
    play.must(before == after, "its files are changed")


@script("a group of shared storage that is handed over and back")
def _() -> None:
    """Its next owner has deleted a key, whose file's host dies before it hears that it is to go."""
    play = SharedPlay()
    play.put_file(1, b"g/k", 1)
    play.hand_over(b"g", 1, 2)
    tables = play.hosts[1].tables
    files = dict(tables.segments)
    play.delete(2, b"g/k")
    play.hand_over(b"g", 2, 1)
    play.must(b"g" in tables.own_groups and not tables.segments, "it is handed back")
    tables.segments |= files  # as if all that had taken a moment
    die(play, 1)
    play.world.run(5)
    play.must(got(play, b"g/k") is None, "a deleted key comes back")


@script("a record that is handed over while a dead host's folder is to go")
def _() -> None:
    """The one has looked, and then it gets a group of another one, whose record names the folder."""
    play = SharedPlay(5)
    play.put(2, b"o/k")
    play.put_file(1, b"o/lent", 9)
    dead = die(play, 1)
    play.world.run(5)
    taker, begun = play.hosts[3], list[bytes]()
    play.world.stop(play.hosts[2], "take_over")

    def hand(host: Any, request: Any, answer: Any) -> None:
        if isinstance(request, TakeOver) and isinstance(answer, Done) and host is taker and not begun:
            begun.append(dead)
            assert isinstance(play.answer(0, Drain(play.hosts[2].id, taker.id)), Later)
        if not play.hosts[2].tables.own_groups:
            play.world.stopped.clear()

    play.after = hand
    play.world.serve(play.hosts[1], "h0")
    play.world.run(40)
    play.must(begun and dead not in play.world.graves, "its folder stays")
    play.must_be(b"o/lent", 9)


@mutation("records of a dead host's files are dropped", "a host with files on shared storage dies")
def _(patch: Patch) -> None:
    def are_there(tables: Any, standing: Any, places: Any) -> bool:
        return all(place.host in standing.roster.ids | {standing.member} for place in places)

    for module in (owning, roster):
        patch.setattr(module, "are_there", are_there)


@mutation("a file doesn't say that it was replaced", "a host with files on shared storage dies")
def _(patch: Patch) -> None:
    left = SimTables.left

    def all_of_them(tables: SimTables) -> Any:
        segments, tables.segments = tables.segments, {**tables.retired, **tables.segments}
        try:
            return left(tables)
        finally:
            tables.segments = segments

    patch.setattr(SimTables, "left", all_of_them)


@mutation("files of a group that was handed over count", "a group of shared storage that is handed over and back")
def _(patch: Patch) -> None:
    backup = recovery._left_backup  # pyright: ignore[reportPrivateUsage]

    def whatever(row: Any, entry: Entry) -> Any:
        return recovery.Backup(entry.version, row.grant.number, entry.body, entry.places) or backup(row, entry)

    patch.setattr(recovery, "_left_backup", whatever)


@mutation("a dead host's folder goes at once", "a host with files on shared storage dies")
def _(patch: Patch) -> None:
    def clear(one: Any, former: bytes, now: int) -> Any:
        return True
        yield

    patch.setattr(draining.Takeovers, "clear", clear)


@mutation(
    "hosts look once for records of a dead host's folder",
    "a record that is handed over while a dead host's folder is to go",
)
def _(patch: Patch) -> None:
    def clear(one: Any, former: bytes, now: int) -> Any:
        one._asked.setdefault(former, ((0, 0), now))
        position, number = one._asked[former]
        standing = yield from draining.view(draining.own_standing)
        others = [member for member in standing.roster.members if member.id != standing.member]
        request = TakeOver(former, number)
        answers = yield from draining.send_all([(member, request) for member in others])
        return all(isinstance(each, draining.Done) for each in (*answers, one.answer(standing, request)))

    patch.setattr(draining.Takeovers, "clear", clear)
    patch.setattr(draining, "_are_to_come", lambda tables, leaver: False)  # pyright: ignore
