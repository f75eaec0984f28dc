"""Records that can't be read any more: they keep nothing else from moving, being listed, or being asked after."""

from __future__ import annotations

import pytest

from memstore.distributed.rules import Change, Entry, Lent, Place, reading
from memstore.distributed.rules.members import group_of, highest
from memstore.distributed.rules.messages import AreNamed, Failed, IsAt, Named, Wait
from memstore.errors import CorruptionError
from tests.distributed.rules.test_membership import cluster, put, run
from tests.distributed.rules.world import Host, World

KEYS = [f"g{number}/k".encode() for number in range(40)]


def spoil(host: Host, key: bytes) -> None:
    del host.tables.records[key]
    host.tables.damaged.add(key)


def home_after(first: Host, second: Host, key: bytes) -> Host:
    """Which of the two is its home, when both are."""
    return first if highest([first.id, second.id], group_of(key)) == first.id else second


def filled(hosts: int) -> World:
    world = cluster(hosts)
    process = world.start_process(world.hosts["h0"])
    for key in KEYS:
        run(world, process, put(process, key, key), seconds=1)
    return world


def keys_of(world: World, host: Host) -> list[tuple[bytes, bool]]:
    """As they are listed there, and whether their versions are known."""
    process, after = world.start_process(host), b""
    found: list[tuple[bytes, bool]] = []
    while rows := run(world, process, reading.page(b"", after, 7), seconds=1):
        found += [(key, bool(version)) for key, version in rows]
        after = rows[-1][0]
    return found


def test_a_damaged_record_stays_and_all_others_move() -> None:
    world = filled(1)
    first = world.hosts["h0"]
    second = world.add_host("h1")
    world.serve(second, "h0")
    # of its home after the move, and of the one that stays
    moving, staying = (next(key for key in KEYS if (home_after(first, second, key) is second) == it) for it in (1, 0))
    for key in (moving, staying):
        spoil(first, key)
    world.run(10)

    standing = second.tables.standing()
    assert standing is not None and not standing.missing and second.id in standing.view.homes
    assert first.tables.damaged == {moving, staying} and second.tables.damaged == {moving}
    whole = [key for key in KEYS if key not in (moving, staying)]
    assert set(first.tables.records) | set(second.tables.records) == set(whole)
    for host in (first, second):
        process = world.start_process(host)
        assert keys_of(world, host) == sorted((key, key in whole) for key in KEYS)
        for key in whole:
            (entry,) = run(world, process, reading.look_up([key]), seconds=1)
            assert entry is not None and entry.body == key
        for key in (moving, staying):
            for steps in (
                reading.look_up([key]),
                put(process, key),
                process.client.commit([Change(key, None)], 1 << 62),
            ):
                with pytest.raises(CorruptionError) as caught:
                    run(world, process, steps, seconds=1)
                assert caught.value.key == key.decode()


def test_a_key_that_comes_back_is_as_damaged_as_it_was() -> None:
    world = filled(1)
    first, second = world.hosts["h0"], world.add_host("h1")
    key = next(key for key in KEYS if home_after(first, second, key) is second)
    spoil(first, key)
    world.serve(second, "h0")
    world.run(10)
    world.kill_index(second)
    world.serve(second, "h0", is_home=False)
    world.run(10)
    standing = first.tables.standing()
    assert standing is not None and standing.view.homes == (first.id,)
    process = world.start_process(second)
    assert len(keys_of(world, second)) == len(KEYS)
    with pytest.raises(CorruptionError):
        run(world, process, reading.look_up([key]), seconds=1)


def test_a_root_joins_with_all_but_what_is_damaged() -> None:
    world = cluster(1)
    joining = world.add_host("h1")
    for key in KEYS:
        joining.tables.put_record(key, Entry(1, key))
    joining.tables.damaged |= set(KEYS[:3])
    for key in KEYS[:3]:
        del joining.tables.records[key]
    world.serve(joining, "h0")
    world.run(10)
    standing = joining.tables.standing()
    assert standing is not None and not standing.is_joining and joining.id in standing.view.homes
    process = world.start_process(world.hosts["h0"])
    for key in KEYS[3:]:
        (entry,) = run(world, process, reading.look_up([key]), seconds=1)
        assert entry is not None and entry.body == key
    assert joining.tables.damaged == set(KEYS[:3])


def test_bytes_that_a_damaged_record_may_name_stay() -> None:
    world = cluster(2)
    home, data = world.hosts["h0"], world.hosts["h1"]
    standing = home.tables.standing()
    assert standing is not None and home.index is not None
    key = next(key for key in KEYS if standing.is_home_of(key))
    home.tables.damaged.add(key)
    place = Place(data.id, data.tables.fill(7))
    data.tables.lend(place, Lent(key, home.id))
    answer = world.answer(home, home.index, Named(standing.view.epoch, ((key, place),)))
    assert answer == AreNamed((True,))
    world.run(20)
    assert place.put_id in data.tables.segments


def test_who_waits_for_a_damaged_key_is_told_and_the_others_wait() -> None:
    world = cluster(1)
    host = world.hosts["h0"]
    index, standing = host.index, host.tables.standing()
    assert index is not None and standing is not None
    for ticket, key in enumerate((b"one", b"damaged", b"other")):
        index.keep(ticket, Wait(standing.view.epoch, key, 0, 1000))
    host.tables.damaged.add(b"damaged")
    host.tables.put_record(b"other", Entry(5, b"x"))
    ended = dict(index.ended_waits(host.tables))
    assert set(ended) == {1, 2} and ended[2] == IsAt(5)
    assert isinstance(ended[1], Failed) and (ended[1].error, ended[1].key) == ("CorruptionError", b"damaged")
    assert index.ended_waits(host.tables) == []
