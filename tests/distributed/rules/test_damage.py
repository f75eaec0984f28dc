"""Records that can't be read any more: they keep nothing else from moving, being listed, or being asked after."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.distributed.rules import Change, Entry, Lent, Place, directory, reading
from memstore.distributed.rules.messages import Failed, IsAt, IsNamed, Named, Wait
from memstore.errors import CorruptionError
from tests.distributed.rules.test_membership import cluster, get, key_at, put, run
from tests.distributed.rules.world import Host, World

KEYS = [f"g/{number:02}".encode() for number in range(20)]


def spoil(host: Host, key: bytes) -> None:
    del host.tables.records[key]
    host.tables.damaged.add(key)


def filled(hosts: int) -> World:
    world = cluster(hosts)
    process = world.start_process(world.hosts["h0"])
    run(world, process, process.client.commit([Change(key, key) for key in KEYS], 1 << 62), seconds=1)
    return world


def hand_over(world: World, giver: str, taker: str) -> None:
    directory.begin(world.hosts[giver].tables, b"g", world.hosts[taker].id)
    world.run(10)
    assert b"g" in world.hosts[taker].tables.own_groups


def keys_of(world: World, host: Host) -> list[tuple[bytes, bool]]:
    """As they are listed there, and whether their versions are known."""
    process, after = world.start_process(host), b""
    found: list[tuple[bytes, bool]] = []
    while rows := run(world, process, reading.page(process.client, b"", after, 7), seconds=1):
        found += [(key, bool(version)) for key, version in rows]
        after = rows[-1][0]
    return found


def test_a_damaged_record_stays_and_all_others_are_handed_over() -> None:
    world = filled(2)
    first, second = world.hosts["h0"], world.hosts["h1"]
    spoil(first, KEYS[3])
    hand_over(world, "h0", "h1")
    assert first.tables.damaged == second.tables.damaged == {KEYS[3]}
    whole = [key for key in KEYS if key != KEYS[3]]
    assert not first.tables.records and set(second.tables.records) == set(whole)
    for host in (first, second):
        process = world.start_process(host)
        assert keys_of(world, host) == sorted((key, key in whole) for key in KEYS)
        for key in whole:
            entry: Any = get(world, process, key)
            assert entry.body == key
        for steps in (
            reading.look_up(process.client, [KEYS[3]]),
            put(process, KEYS[3]),
            process.client.commit([Change(KEYS[3], None)], 1 << 62),
        ):
            with pytest.raises(CorruptionError) as caught:
                run(world, process, steps, seconds=1)
            assert caught.value.key == KEYS[3].decode()


def test_a_key_that_comes_back_is_as_damaged_as_it_was() -> None:
    world = filled(2)
    spoil(world.hosts["h0"], KEYS[3])
    hand_over(world, "h0", "h1")
    hand_over(world, "h1", "h0")
    process = world.start_process(world.hosts["h1"])
    assert len(keys_of(world, world.hosts["h1"])) == len(KEYS)
    with pytest.raises(CorruptionError):
        get(world, process, KEYS[3])


def test_a_root_joins_with_what_is_damaged() -> None:
    world = cluster(1)
    joining = world.add_host("h1")
    for key in KEYS:
        joining.tables.put_record(key, Entry(1, key))
    spoil(joining, KEYS[3])
    world.serve(joining, "h0")
    world.run(10)
    process = world.start_process(world.hosts["h0"])
    entry: Any = get(world, process, KEYS[4])
    assert entry.body == KEYS[4]
    with pytest.raises(CorruptionError):
        get(world, process, KEYS[3])


def test_bytes_that_a_damaged_record_may_name_stay() -> None:
    world = cluster(2)
    owner, data = world.hosts["h0"], world.hosts["h1"]
    key = key_at(world, owner)
    assert owner.index is not None
    owner.tables.damaged.add(key)
    place = Place(data.id, data.tables.fill(7))
    data.tables.lend(place, Lent(key, owner.id))
    answer = world.answer(owner, owner.index, Named(key, place, owner.tables.own_groups[key]))
    assert answer == IsNamed(named=True)
    world.run(20)
    assert place.put_id in data.tables.segments


def test_who_waits_for_a_damaged_key_is_told_and_the_others_wait() -> None:
    world = cluster(1)
    host = world.hosts["h0"]
    index, keys = host.index, [b"g/one", b"g/damaged", b"g/other"]
    process = world.start_process(host)
    run(world, process, put(process, b"g"))
    assert index is not None
    for ticket, key in enumerate(keys):
        index.keep(ticket, Wait(key, host.tables.own_groups[b"g"], 0, 1000))
    host.tables.damaged.add(b"g/damaged")
    host.tables.put_record(b"g/other", Entry(5, b"x"))
    ended = dict(index.ended_waits(host.tables))
    assert set(ended) == {1, 2} and ended[2] == IsAt(5)
    assert isinstance(ended[1], Failed) and (ended[1].error, ended[1].key) == ("CorruptionError", b"g/damaged")
    for ticket in ended:
        index.forget(ticket)
    assert index.ended_waits(host.tables) == []
