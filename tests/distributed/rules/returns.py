"""Scripts, and rules left out, of removed hosts that come back with what they had."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

from memstore.distributed.rules import (
    Change,
    Entry,
    Place,
    client,
    directory,
    draining,
    index,
    owning,
    recovery,
    remembering,
    returning,
)
from memstore.distributed.rules.messages import Later, Offer, Refused, Return, Stale
from memstore.distributed.rules.nouns import Returning
from memstore.distributed.rules.steps import Remembered
from tests.distributed.rules import checks
from tests.distributed.rules.fencing import MUTATIONS, SCRIPTS
from tests.distributed.rules.mutations import Patch, mutation
from tests.distributed.rules.scripts import Play, got, has_left, script
from tests.distributed.rules.tables import SimTables
from tests.distributed.rules.test_membership import put, run
from tests.distributed.rules.world import FormerTables, Host

__all__ = ["MUTATIONS", "SCRIPTS"]  # with those of this file


def go_down(play: Play, host: int, seconds: float = 10) -> FormerTables:
    """All processes of a host end, and a person removes it. Its folder stays."""
    down = play.hosts[host]
    play.world.comes_back = True
    play.world.kill_index(down)
    for process in down.clients:
        process.is_alive = False
    down.clients.clear()
    play.world.remove(down.id)
    play.world.run(seconds)
    return FormerTables(down, down.tables)


def come_back(play: Play, host: int, seconds: float = 15) -> returning.Returns:
    """It is served again, and hears that it was removed."""
    back, roots = play.hosts[host], play.hosts[host].roots
    play.world.serve(back, "h0")
    play.world.run(seconds)
    play.must(back.roots == roots + 1 and back.index is not None, "it hears of its removal")
    play.processes[host] = play.world.start_process(back)
    assert back.index is not None
    (found,) = back.index.returns
    play.must(found.is_over, "its return comes to an end")
    return found


def delete(play: Play, host: int, key: bytes) -> None:
    process = play.processes[host]
    run(play.world, process, process.client.commit([Change(key, None, missing_ok=True)], 1 << 62), seconds=2)


def put_bytes(play: Play, host: int, key: bytes, value: int) -> int:
    """Puts a value whose bytes lie on the host."""
    process = play.processes[host]
    place = Place(process.host.id, process.host.tables.fill(value), 1)
    steps = process.client.commit([Change(key, b"", (place,))], 1 << 62)
    return run(play.world, process, steps, seconds=2)[0]


def must_be(play: Play, key: bytes, body: bytes | None) -> Entry | None:
    found = got(play, key)
    play.must((found and found.body) == body, f"{key!r} is {found}, and not {body!r}")
    return found


@script("a host that comes back with its keys")
def _() -> None:
    """The owner of a group, which another host has put into; and it has put into another owner's."""
    play = Play(4)
    version = play.put(1, b"g/own", b"own")
    play.put(1, b"alone/k", b"alone")
    play.put(2, b"g/theirs", b"theirs")
    play.put(3, b"other/k", b"x")
    put_bytes(play, 1, b"other/bytes", 7)
    go_down(play, 1)
    must_be(play, b"g/own", None)
    must_be(play, b"other/bytes", None)
    found = come_back(play, 1)
    entry = must_be(play, b"g/own", b"own")
    play.must(entry is not None and entry.version > version, f"its version goes down: {entry}")
    must_be(play, b"alone/k", b"alone")
    must_be(play, b"g/theirs", b"theirs")
    must_be(play, b"other/bytes", b"")
    (former,) = play.hosts[1].formers
    play.must(found.count == 3 and not former.page(b"", 9), f"all is back: {found.said()}")
    play.world.run(5)
    for host in play.hosts:
        tables = host.tables
        play.must(not tables.lost, f"{host.address} says that it is lost: {tables.lost}")
        play.must(not tables.remembers() and not tables.memory, f"{host.address} remembers {tables.memory}")


@script("keys that were deleted while their host was away")
def _() -> None:
    """One was put before that, the other one wasn't there. And one is deleted by a process of the owner's host."""
    play = Play(4)
    for name in (b"a", b"b", b"c", b"d"):
        play.put(1, b"g/" + name, b"old")
    play.put(2, b"g/theirs", b"x")
    go_down(play, 1)
    play.put(3, b"g/a", b"new")
    for host, name in ((3, b"a"), (2, b"b"), (0, b"c")):
        delete(play, host, b"g/" + name)
    found = come_back(play, 1)
    for name in (b"a", b"b", b"c"):
        must_be(play, b"g/" + name, None)
    must_be(play, b"g/d", b"old")
    play.must([*found.left] == [b"g/a", b"g/b", b"g/c"], f"others are listed: {found.said()}")
    lost = [set(host.tables.lost) for host in play.hosts]
    play.must(all(one == {b"g/a", b"g/b", b"g/c"} for one in lost), f"all hosts are told: {lost}")


@script("a key of nobody's group that was deleted while its host was away")
def _() -> None:
    play = Play(4)
    play.put(1, b"g/a", b"old")
    play.put(1, b"g/b", b"old")
    go_down(play, 1)
    play.must(not any(b"g" in host.tables.own_groups for host in play.hosts if host.index), "nobody owns its group")
    delete(play, 2, b"g/a")
    found = come_back(play, 1)
    must_be(play, b"g/a", None)
    must_be(play, b"g/b", b"old")
    play.must([*found.left] == [b"g/a"], f"it is listed: {found.said()}")


@mutation(
    "a deletion claims no group that nobody owns", "a key of nobody's group that was deleted while its host was away"
)
def _(patch: Patch) -> None:
    patch.setattr(client, "_is_remembered", lambda tables, changes: False)


@mutation("deletions aren't remembered", "keys that were deleted while their host was away")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "remembers", lambda tables: False)  # pyright: ignore


@mutation("who comes back puts whatever it had", "keys that were deleted while their host was away")
def _(patch: Patch) -> None:
    patch.setattr(remembering, "may_return", lambda tables, standing, key, one: tables.head(key) is None)  # pyright: ignore


@script("a value that was replaced while its host was silent")
def _() -> None:
    """Its owner goes on without the host that keeps it, and the new value is deleted before that is removed."""
    play = Play(4)
    play.put(1, b"g/own")
    put_bytes(play, 2, b"g/k", 7)
    play.world.kill_index(play.hosts[2])
    with mock.patch.object(recovery, "NOTE_TRIES", 1):
        play.put(1, b"g/k", b"new")
        delete(play, 1, b"g/k")
    go_down(play, 2)
    found = come_back(play, 2)
    must_be(play, b"g/k", None)
    play.must([*found.left] == [b"g/k"], f"it is listed: {found.said()}")


@mutation(
    "what was put at another owner comes back unless it was deleted",
    "a value that was replaced while its host was silent",
)
def _(patch: Patch) -> None:
    may_return = remembering.may_return

    def unless(tables: Any, standing: Any, key: bytes, one: Returning) -> bool:
        own = tables.owned(owning.group_of(key))
        if not one.under and own is not None and tables.remembered(key) is None:
            return tables.head(key) is None
        return may_return(tables, standing, key, one)

    patch.setattr(remembering, "may_return", unless)


@script("a group that was elsewhere while a host was away")
def _() -> None:
    """Its owner has dropped a value with the host; another owner has put and deleted the key since."""
    play = Play(5)
    play.put(1, b"g/own")
    put_bytes(play, 2, b"g/k", 7)
    go_down(play, 2)
    play.hand_over(b"g", 1, 3)
    play.put(3, b"g/k", b"new")
    delete(play, 3, b"g/k")
    play.hand_over(b"g", 3, 1)
    play.must(b"g" in play.hosts[1].tables.own_groups, "it is handed over")
    come_back(play, 2)
    must_be(play, b"g/k", None)


@mutation("what an owner remembers counts after a hand-over", "a group that was elsewhere while a host was away")
def _(patch: Patch) -> None:
    remembered = SimTables.remembered

    def of_now(tables: SimTables, key: bytes) -> Remembered | None:
        row, own = remembered(tables, key), tables.owned(owning.group_of(key))
        return row if row is None or not row.former or own is None else Remembered(row.former, row.version, own.number)

    patch.setattr(SimTables, "remembered", of_now)


@script("a group of a removed host that was handed over since")
def _() -> None:
    """Its heir remembers that a key was deleted. The next owner doesn't."""
    play = Play(5)
    play.put(1, b"g/k", b"old")
    play.put(2, b"g/theirs", b"x")
    go_down(play, 1)
    heir = next(at for at in range(5) if at != 1 and b"g" in play.hosts[at].tables.own_groups)
    delete(play, heir, b"g/k")
    play.hand_over(b"g", heir, next(at for at in range(2, 5) if at != heir))
    found = come_back(play, 1)
    must_be(play, b"g/k", None)
    play.must([*found.left] == [b"g/k"], f"it is listed: {found.said()}")


@mutation(
    "the next owner of a group is taken for who remembers", "a group of a removed host that was handed over since"
)
def _(patch: Patch) -> None:
    give = directory.give

    def keep(tables: Any, roster: Any, group: bytes, *arguments: Any, **named: Any) -> Any:
        known = tables.ownership(group)
        if len(arguments) < 5:  # else it says whom it takes for that
            named.setdefault("former", known and known.former)
        return give(tables, roster, group, *arguments, **named)

    patch.setattr(directory, "give", keep)


@script("a key that was put since, and lost with a third host")
def _() -> None:
    play = Play(5)
    play.put(1, b"g/k", b"old")
    play.put(2, b"g/theirs", b"x")
    go_down(play, 1)
    third = next(at for at in range(2, 5) if b"g" not in play.hosts[at].tables.own_groups)
    put_bytes(play, third, b"g/k", 7)
    go_down(play, third)
    must_be(play, b"g/k", None)
    come_back(play, 1)
    must_be(play, b"g/k", None)
    come_back(play, third)
    must_be(play, b"g/k", b"")


@mutation("an owner doesn't remember what it drops", "a key that was put since, and lost with a third host")
def _(patch: Patch) -> None:
    patch.setattr(remembering, "note_loss", lambda tables, standing, key, entry: None)  # pyright: ignore


@script("a key that is put and deleted while it is offered")
def _() -> None:
    play = Play(4)
    play.put(1, b"g/k", b"old")
    play.put(2, b"g/theirs", b"x")
    go_down(play, 1)
    heir = next(at for at in range(4) if at != 1 and b"g" in play.hosts[at].tables.own_groups)
    met: list[Any] = []

    def between(host: Any, request: Any, answer: Any) -> None:
        if isinstance(request, Offer) and not met:
            met.append(answer)
            client = play.processes[heir].client
            for change in (Change(b"g/k", b"new"), Change(b"g/k", None)):
                play.at_once(heir, client.commit([change], 1 << 62))

    play.after = between
    come_back(play, 1)
    play.must(met and met[0].fates == (0, 3), f"it may come back: {met}")
    must_be(play, b"g/k", None)


@mutation(
    "a commit doesn't look again whether a key may come back", "a key that is put and deleted while it is offered"
)
def _(patch: Patch) -> None:
    patch.setattr(owning, "_refused_return", lambda tables, standing, change: None)  # pyright: ignore


@script("a copy of a folder that comes back, too")
def _() -> None:
    """The first one has come back, and what it has brought is deleted."""
    play = Play(4)
    play.put(1, b"g/k", b"old")
    copied = FormerTables(play.hosts[1], copy.copy(play.hosts[1].tables))
    copied.tables.records = dict(play.hosts[1].tables.records)
    go_down(play, 1)
    come_back(play, 1)
    must_be(play, b"g/k", b"old")
    delete(play, 1, b"g/k")
    other = play.hosts[3]
    assert other.index is not None
    other.formers.append(copied)
    play.world.bring_back(other, copied)
    play.world.run(15)
    must_be(play, b"g/k", None)
    (found,) = other.index.returns
    play.must(found.is_over and [*found.left] == [b"g/k"], f"it is listed: {found.said()}")


@mutation("a host comes back as often as it likes", "a copy of a folder that comes back, too")
def _(patch: Patch) -> None:
    answer_return = returning.answer_return

    def again(tables: Any, standing: Any, seed: Any, request: Any) -> Any:
        answer = answer_return(tables, standing, seed, request)
        if isinstance(answer, Refused) and seed.is_settled(standing):
            back = ((request.former, request.by), *standing.roster.returns)
            returning.propose(tables, standing, is_settled=True, returns=back)
            return returning.Later()
        return answer

    patch.setattr(index.returning, "answer_return", again)


@script("two copies of a folder that come back at once")
def _() -> None:
    play = Play(4)
    for number in range(3):
        play.put(1, b"g%d/k" % number, b"old")
    copied = FormerTables(play.hosts[1], copy.copy(play.hosts[1].tables))
    copied.tables.records = dict(play.hosts[1].tables.records)
    go_down(play, 1)
    other = play.hosts[3]
    assert other.index is not None
    other.formers.append(copied)
    play.world.bring_back(other, copied)
    first = come_back(play, 1)
    (second,) = other.index.returns
    counts = sorted((first.count, second.count))
    play.must(second.is_over and counts == [0, 3], f"one of them comes back: {first.said()}, {second.said()}")
    for number in range(3):
        must_be(play, b"g%d/k" % number, b"old")


@script("a host that is removed while it comes back")
def _() -> None:
    """It is the same folder that comes back once more, with what it has brought, and with what is left."""
    play = Play(4)
    play.put(1, b"g/k", b"old")
    play.put(1, b"h/k", b"old")
    play.put(2, b"h/theirs", b"x")
    go_down(play, 1)
    back = play.hosts[1]
    roots, is_cut = back.roots, list[bool]()

    def cut(host: Any, request: Any, answer: Any) -> None:
        if isinstance(request, Offer) and host is not back and not is_cut:
            is_cut.append(True)
            play.world.kill_index(back)
            play.world.remove(back.id)

    play.after = cut
    play.world.serve(back, "h0")
    play.world.run(15)
    play.must(is_cut and back.roots == roots + 1, "it is removed while it comes back")
    play.world.serve(back, "h0")
    play.world.run(20)
    must_be(play, b"g/k", b"old")
    must_be(play, b"h/k", b"old")
    assert back.index is not None
    play.must(all(one.is_over for one in back.index.returns), "both come to an end")


@mutation("who has begun to bring back is the only one for ever", "a host that is removed while it comes back")
def _(patch: Patch) -> None:
    answer_return = returning.answer_return

    def for_ever(tables: Any, standing: Any, seed: Any, request: Any) -> Any:
        by = dict(standing.roster.returns).get(request.former)
        return (
            Refused("another host")
            if by not in (None, b"", request.by)
            else answer_return(tables, standing, seed, request)
        )

    patch.setattr(index.returning, "answer_return", for_ever)


@script("a return of whose end nobody hears")
def _() -> None:
    play = Play(3)
    play.put(1, b"g/k", b"old")
    go_down(play, 1)
    answer, unheard = play.world.answer, [3]

    def deaf(host: Host, index: Any, request: Any) -> Any:
        if isinstance(request, Return) and request.is_over and unheard[0]:
            unheard[0] -= 1
            return Stale(0)  # as an answer that says nothing: the message is lost
        return answer(host, index, request)

    play.world.answer = deaf
    come_back(play, 1, 30)
    play.world.run(5)
    for host in play.hosts:
        play.must(not host.tables.remembers(), f"{host.address} remembers deletions for nobody")


@mutation("that a return is over is said once", "a return of whose end nobody hears")
def _(patch: Patch) -> None:
    end = returning.Returns._end  # pyright: ignore[reportPrivateUsage]

    def once(self: Any, standing: Any, why: str) -> Any:
        former = next(one for one, by in standing.roster.returns if by == standing.member)
        yield from end(self, standing, why)
        yield from returning.send(standing.seed, Return(former, standing.member, is_over=True))
        self.is_over = True

    patch.setattr(returning.Returns, "_end", once)


@script("a removed host that never comes back")
def _() -> None:
    play = Play(3)
    play.put(1, b"g/k", b"old")
    with mock.patch.object(returning, "AWAY", 20_000_000_000):
        go_down(play, 1)
        delete(play, 2, b"g/k")
        play.must(any(host.tables.remembers() for host in play.hosts), "deletions are remembered")
        play.world.run(30)
    for host in (play.hosts[0], play.hosts[2]):
        play.must(not host.tables.remembers() and not host.tables.memory, f"{host.address} remembers for ever")
    found = come_back(play, 1)
    play.must([*found.left] == [b"g/k"], f"it comes too late: {found.said()}")


@mutation("members are waited for as long as they are away", "a removed host that never comes back")
def _(patch: Patch) -> None:
    patch.setattr(returning, "AWAY", 1 << 62)

    def nothing(seed: Any) -> Any:
        return
        yield

    patch.setattr(index.returning, "give_up", nothing)


@script("more is deleted than is remembered")
def _() -> None:
    play = Play(3)
    play.put(1, b"g/k", b"old")
    play.put(2, b"g/theirs", b"x")
    with mock.patch.object(remembering, "MOST", 3):
        go_down(play, 1)
        for number in range(4):
            delete(play, 2, b"g/%d" % number)
        delete(play, 2, b"g/k")
        for number in range(4):
            play.put(2, b"g/%d" % number)
        found = come_back(play, 1)
    must_be(play, b"g/k", None)
    play.must([*found.left] == [b"g/k"], f"it is listed: {found.said()}")


@mutation("a host that can't remember all forgets that", "more is deleted than is remembered")
def _(patch: Patch) -> None:
    def note(tables: Any, change: Change) -> None:
        if change.body is not None:
            tables.forget(change.key)
        elif tables.remembers():
            remembering._remember(tables, change.key, Remembered())  # pyright: ignore

    patch.setattr(remembering, "note", note)


@script("a host that is drained while it brings back what it had")
def _() -> None:
    """Another member doesn't answer meanwhile: it owns what comes back."""
    play = Play(4)
    play.put(1, b"g/k", b"old")
    put_bytes(play, 1, b"alone/k", 7)
    play.put(2, b"g/theirs", b"x")
    go_down(play, 1)
    heir = next(at for at in range(4) if at != 1 and b"g" in play.hosts[at].tables.own_groups)
    back, is_silent = play.hosts[1], [True]
    answer = play.world.answer
    play.world.answer = lambda host, index, request: (
        Later()
        if is_silent[0] and isinstance(request, Offer) and host is play.hosts[heir]
        else answer(host, index, request)
    )
    play.world.serve(back, "h0")
    play.world.run(8)
    roots = back.roots
    play.drain(1, 10)
    play.must(back.roots == roots, "it leaves before it has brought back all")
    is_silent[0] = False
    play.world.run(20)
    play.must(back.roots == roots + 1, "it leaves")
    must_be(play, b"g/k", b"old")
    must_be(play, b"alone/k", b"")
    checks.check_gone(play.world, [host for host in play.hosts if host is not back])


@mutation("a host leaves though it brings back more", "a host that is drained while it brings back what it had")
def _(patch: Patch) -> None:
    patch.setattr(
        draining.Leaver, "brings_back", property(lambda leaver: False, lambda leaver, so: None), raising=False
    )


@script("a host that has left")
def _() -> None:
    """Others had put into its groups, and it into theirs, while it was drained, too."""
    play = Play(4)
    for number in range(4):
        play.put(3, b"own%d/k" % number)
        put_bytes(play, 3, b"own%d/bytes" % number, 100 + number)
        put_bytes(play, 2, b"own%d/theirs" % number, 200 + number)
    play.put(1, b"other/own")
    play.put(3, b"other/small")
    put_bytes(play, 3, b"other/bytes", 7)
    play.drain(3)
    puts: dict[bytes, list[Any]] = {}
    for number in range(8):
        for host, key in ((3, b"other/new%d"), (3, b"own%d/also"), (1, b"own%d/new")):
            steps = put(play.processes[host], key % number, b"new")
            play.world.at(
                number / 8,
                lambda host=host, key=key % number, steps=steps: puts.update(
                    {key: play.begin(play.processes[host], steps)}
                ),
            )
    play.world.run(30)
    play.must(has_left(play, 3), "it leaves")
    checks.check_gone(play.world, play.hosts[:3])
    checks.check_bytes(play.world, play.hosts[:3])
    told = [key for key, ends in puts.items() if ends and not isinstance(ends[0], Exception)]
    play.must(len(told) > 8, f"of {len(puts)} puts only {told} are made")
    names = [name % number for number in range(4) for name in (b"own%d/k", b"own%d/bytes", b"own%d/theirs")]
    for key in (*names, b"other/small", b"other/bytes", *told):
        play.must(got(play, key) is not None, f"{key!r} is lost")
    standing = play.hosts[0].tables.standing()
    play.must(standing is not None and not standing.roster.returns, "it doesn't come back")
    for host in play.hosts[:3]:
        rows = [row for row in host.tables.directory.values() if row.owner not in (one.id for one in play.hosts[:3])]
        play.must(not rows, f"{host.address} says that it owns {rows}")


@mutation("who kept something stays known", "a host that has left")
def _(patch: Patch) -> None:
    def nothing() -> Any:
        return
        yield

    patch.setattr(draining, "forget_gone", nothing)
