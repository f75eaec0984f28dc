"""Members by hand: what a host hears that was removed, that others go on, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.distributed.rules import Change, Entry, Member, Place, Send, Steps, giving, joining, reading
from memstore.distributed.rules.messages import Ask, Commit, Give, IsView, Lookup, Open, Refused, Release, Remove
from memstore.errors import HomeUnavailableError, StaleMembershipError
from tests.distributed.rules.scenes import CALM
from tests.distributed.rules.world import Host, Process, World


def cluster(hosts: int) -> World:
    world = World(0, CALM)
    for number in range(hosts):
        world.serve(world.add_host(f"h{number}"), "h0")
    world.run(10)
    return world


def run(world: World, process: Process, steps: Any, seconds: float = 5) -> Any:
    """The result of a call; it raises its error."""
    ends: list[tuple[Any, BaseException | None]] = []
    world.call(process, steps, seconds, lambda result, error: ends.append((result, error)))
    world.run(2 * seconds)
    ((result, error),) = ends
    if error is not None:
        raise error
    return result


def key_at(host: Host) -> bytes:
    """A key whose home it is, wherever it is asked."""
    standing = host.tables.standing()
    assert standing is not None
    return next(key for key in (f"g{number}".encode() for number in range(1000)) if standing.is_home_of(key))


def put(process: Process, key: bytes, body: bytes = b"x") -> Steps[tuple[int, ...]]:
    return process.client.commit([Change(key, body)], 1 << 62)


def test_members_that_come_and_go_know_the_same_view() -> None:
    world = cluster(4)
    standings = [host.tables.standing() for host in world.hosts.values()]
    views = {one.view for one in standings if one is not None}
    assert len(views) == 1
    assert [member.address for member in views.pop().members] == ["h0", "h1", "h2", "h3"] or len(standings) == 4


def test_keys_whose_home_is_here_go_on_when_nobody_else_answers() -> None:
    world = cluster(3)
    host = world.hosts["h1"]
    process, key = world.start_process(host), key_at(host)
    for one in world.hosts.values():
        world.kill_index(one)
    (version,) = run(world, process, put(process, key))
    (entry,) = run(world, process, reading.look_up([key]))
    assert entry == Entry(version, b"x")
    with pytest.raises(HomeUnavailableError):
        run(world, process, reading.look_up([key_at(world.hosts["h2"])]))
    for prefix, keys in ((b"", "^all keys"), (key_at(world.hosts["h2"]) + b"/", "^the keys that start with '")):
        with pytest.raises(HomeUnavailableError, match=f"{keys}.* can't be listed: h. at h. is the home of some"):
            run(world, process, reading.page(prefix, b""))


def test_a_host_that_was_removed_hears_of_it_and_the_others_have_its_keys() -> None:
    world = cluster(3)
    removed, other = world.hosts["h1"], world.start_process(world.hosts["h2"])
    process, key = world.start_process(removed), key_at(removed)
    (before,) = run(world, other, put(other, key))
    world.cut("h0", "h1")
    world.cut("h1", "h2")
    seed = world.hosts["h0"]
    assert seed.index is not None
    answer = world.answer(seed, seed.index, Remove(removed.id))
    assert isinstance(answer, IsView) and removed.id not in answer.view.ids
    world.run(5)
    run(world, process, put(process, key))  # it can't know
    (after,) = run(world, other, put(other, key))
    assert after > before

    world.heal()
    world.run(5)
    for steps in (put(process, key), reading.look_up([b"nothing"]), put(process, key_at(seed))):
        with pytest.raises(StaleMembershipError):
            run(world, process, steps)
    (entry,) = run(world, other, reading.look_up([key]))
    assert entry == Entry(after, b"x")


def test_a_removed_host_stays_away_whatever_it_had_asked_for() -> None:
    world = cluster(4)
    seed, leaver = world.hosts["h0"], world.hosts["h1"]
    assert seed.index is not None
    for other in ("h0", "h2", "h3"):
        world.cut(other, "h1")
    first = world.answer(seed, seed.index, Remove(world.hosts["h3"].id))  # so that changes wait until all have settled
    assert isinstance(first, IsView)
    member = first.view.member(leaver.id)
    assert member is not None
    member = Member(member.id, member.address, member.name, is_home=False)
    world.answer(seed, seed.index, Ask(member, first.view.cluster, first.view.epoch, True, 0))
    world.answer(seed, seed.index, Remove(leaver.id))
    world.run(10)
    standing = seed.tables.standing()
    assert standing is not None and [one.address for one in standing.view.members] == ["h0", "h2"]


def test_who_is_no_member_any_more_is_told_so_and_the_seed_stays() -> None:
    world = cluster(2)
    seed, other = world.hosts["h0"], world.hosts["h1"]
    assert seed.index is not None and other.index is not None
    assert isinstance(world.answer(seed, seed.index, Remove(seed.id)), Refused)
    assert isinstance(world.answer(other, other.index, Remove(seed.id)), Refused)
    world.answer(seed, seed.index, Remove(other.id))
    asked = Ask(other.index.member, b"C" * 16, 2, True, 0)
    answer = world.answer(seed, seed.index, asked)
    assert isinstance(answer, Refused) and answer.is_removed


def test_a_root_of_another_cluster_and_a_copied_root_are_refused() -> None:
    world = cluster(2)
    seed, other = world.hosts["h0"], world.hosts["h1"]
    assert seed.index is not None and other.index is not None
    member = other.index.member
    for ask in (
        Ask(member, b"D" * 16, 2, True, 0),
        Ask(type(member)(member.id, "elsewhere"), b"C" * 16, 2, True, 0),
        Ask(type(member)(seed.id, "h0", is_home=False), b"C" * 16, 2, True, 0),
    ):
        answer = world.answer(seed, seed.index, ask)
        assert isinstance(answer, Refused) and not answer.is_removed


def test_bytes_that_are_pinned_stay_until_the_pin_is_over() -> None:
    world = cluster(2)
    home, data = world.hosts["h0"], world.hosts["h1"]
    assert home.index is not None
    process, key = world.start_process(data), key_at(home)
    place = Place(data.id, data.tables.fill(7))
    run(world, process, process.client.commit([Change(key, b"", (place,))], 1 << 62))
    standing = home.tables.standing()
    assert standing is not None
    world.answer(home, home.index, Lookup(standing.view.epoch, (key,), pin=True))
    run(world, process, put(process, key), seconds=2)
    assert place.put_id in data.tables.segments
    world.run(12)
    assert place.put_id not in data.tables.segments


def test_a_late_release_leaves_alone_what_is_owned() -> None:
    world = cluster(2)
    home = world.hosts["h0"]
    assert home.index is not None
    process, key = world.start_process(home), key_at(home)
    place = Place(home.id, home.tables.fill(7))
    run(world, process, process.client.commit([Change(key, b"", (place,))], 1 << 62))
    world.answer(home, home.index, Release((place,)))
    assert place.put_id in home.tables.segments


def test_a_get_that_meets_replaced_bytes_looks_again_and_then_pins() -> None:
    world = cluster(2)
    home, reader = world.hosts["h0"], world.start_process(world.hosts["h1"])
    key, tries = key_at(home), list[Entry]()
    run(world, reader, put(reader, key))

    def fetch(entry: Entry) -> Steps[bytes | None]:
        tries.append(entry)
        return entry.body if len(tries) > 3 else None
        yield Send("", None, Lookup(0, (key,)))  # a generator

    assert run(world, reader, reading.read(key, fetch)) == (tries[-1].version, b"x")
    assert len(tries) == 4


def test_keys_that_a_root_had_are_registered_unless_others_have_put_them() -> None:
    world = cluster(2)
    joining, other = world.add_host("h2"), world.start_process(world.hosts["h0"])
    (version,) = run(world, other, put(other, b"both", b"theirs"))
    for key in (b"both", b"ours"):
        place = Place(joining.id, joining.tables.fill(7))
        joining.tables.put_record(key, Entry(1, b"ours", (place,)))
        joining.tables.own(place, key)
    world.serve(joining, "h0")
    world.run(10)
    theirs, ours = (run(world, other, reading.look_up([key]))[0] for key in (b"both", b"ours"))
    assert theirs == Entry(version, b"theirs")
    assert ours is not None and ours.body == b"ours" and ours.version > 1
    assert [Place(joining.id, put_id) for put_id in joining.tables.segments] == list(ours.places)
    standing = joining.tables.standing()
    assert standing is not None and joining.id in standing.view.homes


def test_a_home_that_has_forgotten_what_it_registered_has_it_once() -> None:
    """As after a repair of its catalog, while the host that registers is away."""
    world = cluster(1)
    home, coming = world.hosts["h0"], world.add_host("h1")
    places = {key: Place(coming.id, coming.tables.fill(7)) for key in (b"a", b"b")}
    for key, place in places.items():
        coming.tables.put_record(key, Entry(1, b"ours", (place,)))
        coming.tables.own(place, key)
    forgotten, answer = list[Any](), world.answer

    def answered(host: Host, index: Any, request: Any) -> Any:
        found = answer(host, index, request)
        if isinstance(request, Commit) and not forgotten:
            forgotten.append(request)
            for session in list(home.tables.lasting_sessions):
                home.tables.end_session(session)
            world.cut("h0", "h1")  # its answer is lost
            world.at(5, world.heal)
        return found

    world.answer = answered
    world.serve(coming, "h0")
    world.run(30)
    standing = coming.tables.standing()
    assert standing is not None and not standing.is_joining
    process = world.start_process(home)
    for key, place in places.items():
        (entry,) = run(world, process, reading.look_up([key]))
        assert entry is not None and entry.places == (place,) and place.put_id in coming.tables.segments


def test_what_registered_keys_closes_its_sessions() -> None:
    world = cluster(2)
    coming = world.add_host("h2")
    for number in range(8):
        coming.tables.put_record(f"own{number}".encode(), Entry(1, b"y"))
    world.serve(coming, "h0")
    opened, answer = list[str](), world.answer

    def answered(host: Host, index: Any, request: Any) -> Any:
        opened.extend([host.address] * (isinstance(request, Open) and request.lasts))
        return answer(host, index, request)

    world.answer = answered
    world.run(20)
    assert opened and set(opened) <= {"h0", "h1"}
    assert not any(host.tables.lasting_sessions for host in world.hosts.values())


def test_large_records_are_given_and_registered_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message of them all would be more than a link takes: the member would never settle."""
    for module in (giving, joining):
        monkeypatch.setattr(module, "BYTES_LIMIT", 5000)
    world = cluster(1)
    first, process = world.hosts["h0"], world.start_process(world.hosts["h0"])
    keys = [f"g{number}".encode() for number in range(20)]
    for key in keys:
        run(world, process, put(process, key, b"x" * (6000 if key == b"g0" else 2000)))
    coming = world.add_host("h1")
    for number in range(10):
        coming.tables.put_record(f"own{number}".encode(), Entry(1, b"y" * 2000))
    world.serve(coming, "h0")
    sent = list[int]()
    answer = world.answer

    def answered(host: Host, index: Any, request: Any) -> Any:
        if isinstance(request, Give | Commit):
            entries = [entry for _, entry in request.rows] if isinstance(request, Give) else request.changes
            sent.append(sum(entry.nbytes for entry in entries))
            assert len(entries) == 1 or sent[-1] <= 5000
        return answer(host, index, request)

    monkeypatch.setattr(world, "answer", answered)
    world.run(20)
    assert len(sent) > 5 + 2
    for host in (first, coming):
        standing = host.tables.standing()
        assert standing is not None and standing.view.homes == tuple(one.id for one in standing.view.members)
        assert not standing.missing and not standing.is_joining
    for key in [*keys, *[f"own{number}".encode() for number in range(10)]]:
        assert run(world, process, reading.look_up([key]))[0] is not None


def test_a_root_is_a_store_by_itself_until_it_is_admitted() -> None:
    world = cluster(1)
    joining = world.add_host("h1")
    joining.tables.put_record(b"ours", Entry(1, b"ours"))
    joining.tables.version = 1
    process = world.start_process(joining)
    world.cut("h0", "h1", one_way=True)
    world.serve(joining, "h0")
    (version,) = run(world, process, put(process, b"ours", b"2"))  # nobody serves it yet: it is a store by itself
    assert version == 2
    world.heal()
    world.run(10)
    (version,) = run(world, process, put(process, b"ours", b"3"))
    assert version >> 40
    (entry,) = run(world, process, reading.look_up([b"ours"]))
    assert entry == Entry(version, b"3")
