"""Ranks on two hosts put parts of one value: published at one moment, or never, and each byte is somebody's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import memstore
from memstore import TensorShard
from memstore.distributed.catalog import look
from memstore.distributed.links import Links
from memstore.distributed.rules import Place
from memstore.distributed.transfers import sending
from memstore.errors import (
    HomeUnavailableError,
    MemstoreError,
    PartialCommitError,
    ShardMismatchError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)
from memstore.integrations.torchstore.calls import fill_common
from tests.children import Child, Wire
from tests.distributed.client import hosts
from tests.distributed.home_server import HomeServer, ask
from tests.distributed.homes import Home, join
from tests.inside import root_of
from tests.patience import least_seconds

ROWS, COLUMNS = 4, 1000


class Cluster(hosts.Cluster):
    """Two hosts, and a store on each."""

    def __init__(self, root: str, stack: ExitStack) -> None:
        homes = [stack.enter_context(Home(f"{root}-{name}")) for name in "ab"]
        roster = join(homes)
        stores = [stack.enter_context(memstore.open(home.root.path, timeout=20.0)) for home in homes]
        super().__init__(homes, stores, roster)

    def key(self, home: int) -> str:
        return self.key_at(home, "weights")

    def come_to_rest(self) -> None:
        """Waits until no part waits, no host is owed anything, and no byte is live that no record names."""
        deadline = time.monotonic() + 10
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left

    def left(self) -> list[object]:
        left: list[object] = []
        places = {
            place
            for home in self.homes
            for _, entry in home.look(lambda tables: tables.page(b"", 100))
            for place in (entry.places if entry else ())
        }
        for home in self.homes:
            parts, owed = home.look(lambda tables: tables.parts()), home.look(lambda tables: tables.owed(10))
            lent = [place for place, _ in home.look(lambda tables: tables.all_lent(0, 10)) if place not in places]
            left += [*parts, *owed, *lent]
        return left


@pytest.fixture
def cluster(root: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(root, stack)


def shard(rank: int, world: int, value: float | None = None) -> dict[str, TensorShard]:
    local = torch.full((ROWS, COLUMNS), float(rank) if value is None else value)
    return {"w": TensorShard(local, (ROWS * world, COLUMNS), (ROWS * rank, 0))}


def whole(world: int) -> torch.Tensor:
    return torch.arange(float(world)).repeat_interleave(ROWS)[:, None].expand(-1, COLUMNS)


def together(calls: list[Callable[[], int]]) -> list[int | MemstoreError]:
    def call(one: Callable[[], int]) -> int | MemstoreError:
        try:
            return one()
        except MemstoreError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize(
    "ranks",
    [pytest.param((0, 1), marks=pytest.mark.full), (0, 1, 1), pytest.param((1, 1), marks=pytest.mark.full)],
    ids=str,
)
def test_parts_of_several_hosts_become_one_version(cluster: Cluster, home: int, ranks: tuple[int, ...]) -> None:
    key, world = cluster.key(home), len(ranks)

    def put(rank: int) -> Callable[[], int]:
        store = cluster.stores[ranks[rank]]
        return lambda: store.put_sharded(key, shard(rank, world), attempt="one", rank=rank, world_size=world)  # pyright: ignore

    versions = together([put(rank) for rank in range(world)])
    assert len(set(map(repr, versions))) == 1 and isinstance(versions[0], int), versions
    for store in cluster.stores:
        assert torch.equal(store.get(key)["w"], whole(world))
        assert store.info(key).version == versions[0]
        report = store.verify()  # each host looks at the parts that lie there
        assert report.ok, report.damaged
        assert store.verify([key]).ok, "the home has no other opinion of the parts of others"
    for store in cluster.stores:
        store.delete(key, missing_ok=True)
    cluster.come_to_rest()


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("damaged", [0, 1])
def test_each_host_finds_damage_in_the_parts_that_lie_there(cluster: Cluster, home: int, damaged: int) -> None:
    key = cluster.key(home)
    together([put(cluster, key, rank, rank) for rank in range(2)])
    root = root_of(cluster.stores[damaged])
    (file,) = [one for one in Path(root.segments).iterdir() if key.encode() in one.read_bytes()]
    with open(file, "r+b") as segment:
        segment.seek(20)  # in its header
        segment.write(b"\0" * 200)
    reports = [store.verify() for store in cluster.stores]
    assert [error.key for error in reports[damaged].damaged] == [key]
    assert reports[1 - damaged].checked + reports[1 - damaged].unchecked <= 1


def put(cluster: Cluster, key: str, at: int, rank: int, world: int = 2, **options: Any) -> Callable[[], int]:
    value = options.pop("value", None) or shard(rank, world)
    store, options = cluster.stores[at], {"attempt": "one", **options}
    return lambda: store.put_sharded(key, value, rank=rank, world_size=world, **options)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("home", [0, 1])
def test_parts_that_disagree_are_no_version_on_any_host(cluster: Cluster, home: int) -> None:
    key = cluster.key(home)
    values = [{"w": TensorShard(torch.full((2, 3), value), (2, 3), (0, 0))} for value in (1.0, 2.0)]
    errors = together([put(cluster, key, rank, rank, value=values[rank]) for rank in (0, 1)])
    assert [type(error) for error in errors] == [ShardMismatchError] * 2
    assert "ranks 0 and 1" in str(errors[0]) and str(errors[0]) == str(errors[1])
    assert all(key not in store for store in cluster.stores)
    cluster.come_to_rest()


def test_what_no_rank_holds_is_named_on_all_hosts(cluster: Cluster) -> None:
    key = cluster.key(0)
    value = {"w": TensorShard(torch.zeros(ROWS, COLUMNS), (4 * ROWS, COLUMNS), (3 * ROWS, 0))}
    errors = together([put(cluster, key, 0, 0), put(cluster, key, 1, 1, value=value)])
    assert [type(error) for error in errors] == [ShardMismatchError] * 2  # the shapes differ
    value = {"v": TensorShard(torch.zeros(ROWS, COLUMNS), (2 * ROWS, COLUMNS), (0, 0))}
    first = {"w": torch.zeros(3)}
    errors = together(
        [put(cluster, key, 0, 0, value=first, attempt="two"), put(cluster, key, 1, 1, value=value, attempt="two")]
    )
    for error in errors:
        assert isinstance(error, PartialCommitError)
        assert error.missing_boxes == (("value['v']", (ROWS, 0), (ROWS, COLUMNS)),)
    cluster.come_to_rest()


@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_waits_in_vain_gives_up_for_all(cluster: Cluster, at: int) -> None:
    key = cluster.key(0)
    with pytest.raises(StoreTimeoutError, match="rank 1 of 2 had put nothing"):
        put(cluster, key, at, 0, timeout=1.5)()
    late = together([put(cluster, key, 1 - at, 1, timeout=5.0)])
    assert isinstance(late[0], StoreTimeoutError) and "rank 1 of 2 had put nothing" in str(late[0])
    cluster.come_to_rest()


def test_another_version_than_was_expected_is_refused_for_all(cluster: Cluster) -> None:
    key = cluster.key(1)
    version = cluster.stores[0].put(key, torch.zeros(3))
    errors = together([put(cluster, key, rank, rank, expect_version=version + 1) for rank in (0, 1)])
    for error in errors:
        assert isinstance(error, VersionConflictError)
        assert (error.expected, error.found) == (version + 1, version)
    after = together([put(cluster, key, rank, rank, expect_version=version, attempt="two") for rank in (0, 1)])
    assert after[0] == after[1] and isinstance(after[0], int)
    cluster.come_to_rest()


def test_a_part_is_pending_on_all_hosts_until_its_attempt_is_aborted_from_any(cluster: Cluster) -> None:
    key = cluster.key(0)
    pending = cluster.stores[1].put_sharded(key, shard(1, 2), attempt="one", rank=1, world_size=2, wait=False)
    assert not isinstance(pending, int) and not pending.done()
    for store in cluster.stores:
        (found,) = store.pending(key)
        assert (found.attempt, found.ranks, found.world_size) == ("one", (1,), 2)
        with pytest.raises(PartialCommitError, match="waits for rank 0;"):
            store.get(key)
    assert cluster.stores[0].abort(key, "one")
    with pytest.raises(PartialCommitError, match="abort was called"):
        pending.wait()
    assert not cluster.stores[1].abort(key, "one")
    cluster.come_to_rest()


def test_a_rank_that_has_left_is_not_needed(cluster: Cluster) -> None:
    key = cluster.key(0)
    pending = cluster.stores[1].put_sharded(key, shard(1, 2), attempt="one", rank=1, world_size=2, wait=False)
    version = put(cluster, key, 0, 0)()
    assert not isinstance(pending, int) and pending.wait() == version
    assert torch.equal(cluster.stores[0].get(key)["w"], whole(2))


def test_a_rank_that_is_started_again_puts_again(cluster: Cluster) -> None:
    key = cluster.key(0)
    for value in (5.0, 1.0):
        cluster.stores[1].put_sharded(key, shard(1, 2, value), attempt="one", rank=1, world_size=2, wait=False)
    version = put(cluster, key, 0, 0)()
    assert torch.equal(cluster.stores[0].get(key)["w"], whole(2))
    assert put(cluster, key, 1, 1)() == version  # what was published is not put again
    cluster.come_to_rest()


def test_a_home_that_is_silent_is_no_publication(cluster: Cluster) -> None:
    key = cluster.key(0)
    cluster.homes[0].silent = True
    with pytest.raises(MemstoreError) as found:
        put(cluster, key, 1, 1, timeout=0.5)()
    assert isinstance(found.value, UnknownOutcomeError)
    cluster.homes[0].silent = False
    cluster.come_to_rest()


CALLS: dict[str, Callable[[memstore.Store, str, float], object]] = {
    "put_sharded": lambda store, key, timeout: store.put_sharded(
        key, shard(1, 2), attempt="new", rank=1, world_size=2, timeout=timeout
    ),
    "without waiting": lambda store, key, timeout: store.put_sharded(
        key, shard(1, 2), attempt="new", rank=1, world_size=2, wait=False, timeout=timeout
    ),
    "pending of all": lambda store, key, timeout: store.pending(timeout=timeout),
    "pending": lambda store, key, timeout: store.pending(key, timeout=timeout),
    "abort": lambda store, key, timeout: store.abort(key, "one", timeout=timeout),
}


@pytest.mark.parametrize("name", [*CALLS, "PendingPut.wait", "PendingPut.abort"])
def test_a_call_that_a_silent_home_leaves_without_an_answer_ends_in_time_and_names_it(
    name: str, cluster: Cluster
) -> None:
    key, store = cluster.key(0), cluster.stores[1]
    pending = store.put_sharded(key, shard(1, 2), attempt="one", rank=1, world_size=2, wait=False)
    assert not isinstance(pending, int)
    calls: dict[str, Callable[[memstore.Store, str, float], object]] = {
        **CALLS,
        "PendingPut.wait": lambda _, __, timeout: pending.wait(timeout),
        "PendingPut.abort": lambda _, __, timeout: pending.abort(timeout=timeout),
    }
    timeout, late_by = 0.3, 0.8
    errors: list[MemstoreError] = []

    def refused() -> None:
        with pytest.raises((HomeUnavailableError, StoreTimeoutError, UnknownOutcomeError)) as found:
            calls[name](store, key, timeout)
        errors.append(found.value)

    cluster.homes[0].silent = True
    assert timeout <= least_seconds(refused, timeout + late_by) < timeout + late_by
    cluster.homes[0].silent = False
    for error in errors:
        assert cluster.homes[0].member.address in str(error), error
        assert name == "pending of all" or (key in str(error) and error.key == key), error


def test_an_attempt_ends_when_its_group_is_handed_over(cluster: Cluster) -> None:
    key = cluster.key(1)
    pending = [
        cluster.stores[at].put_sharded(key, shard(at, 3), attempt="one", rank=at, world_size=3, wait=False)
        for at in (0, 1)
    ]
    hosts.hand_over(cluster, key, 0)
    for one in pending:
        assert not isinstance(one, int)
        with pytest.raises(PartialCommitError, match="is handed over to another host"):
            one.wait()
    cluster.come_to_rest()
    late = together([put(cluster, key, 0, 2, world=3, timeout=5.0)])
    assert isinstance(late[0], PartialCommitError) and "is handed over" in str(late[0])
    versions = together([put(cluster, key, rank, rank, attempt="two") for rank in (0, 1)])
    assert versions[0] == versions[1] and isinstance(versions[0], int)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each answer that a host sends."""
    found, send_all = list[int](), sending.send_all

    def count(stream: Any, parts: Sequence[memoryview]) -> None:
        found.append(sum(map(len, parts)))
        send_all(stream, parts)

    monkeypatch.setattr(sending, "send_all", count)
    return found


def test_a_reader_gets_the_boxes_that_it_needs_and_no_more(cluster: Cluster, sent: list[int]) -> None:
    key = cluster.key(0)
    together([put(cluster, key, rank, rank) for rank in (0, 1)])
    sent.clear()
    own = TensorShard(torch.zeros(ROWS, COLUMNS), (2 * ROWS, COLUMNS), (0, 0))
    assert torch.equal(cluster.stores[0].get(key, like={"w": own})["w"].local, whole(2)[:ROWS])
    assert not sent
    columns = TensorShard(torch.zeros(2 * ROWS, 10), (2 * ROWS, COLUMNS), (0, 20))
    assert torch.equal(cluster.stores[0].get(key, like={"w": columns})["w"].local, whole(2)[:, 20:30])
    assert ROWS * 10 * 4 <= sum(sent) <= ROWS * 10 * 4 + 256


def test_a_state_dict_of_which_a_reader_has_a_part_is_fetched_once_and_cast(cluster: Cluster, sent: list[int]) -> None:
    key = cluster.key(0)
    together([put(cluster, key, rank, rank) for rank in (0, 1)])
    sent.clear()
    columns = TensorShard(torch.zeros(2 * ROWS, 10).bfloat16(), (2 * ROWS, COLUMNS), (0, 20))
    target: dict[str, Any] = {"w": columns, "other": torch.zeros(3)}
    found = fill_common(cluster.stores[0], key, target)
    assert found["w"] is columns and torch.equal(columns.local, whole(2)[:, 20:30].bfloat16())
    assert list(found) == ["w"] and ROWS * 10 * 4 <= sum(sent) <= ROWS * 10 * 4 + 256


# --- ranks are killed -------------------------------------------------------------------------------------------------

PREPARE, LOOK, PUBLISH = 14, 15, 17  # the numbers that messages begin with


def put_and_die(wire: Wire, path: str, key: str, kind: int, after: bool) -> None:
    """Rank 1, which is killed as its first message of this kind goes out, or as its answer has come."""
    send = Links.send

    def die(links: Links, address: str, member: bytes | None, message: bytes, deadline: float) -> bytes | None:
        is_it = msgspec.msgpack.decode(message)[0] == kind
        if is_it and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = send(links, address, member, message, deadline)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    Links.send = die  # pyright: ignore[reportAttributeAccessIssue]
    with memstore.open(path, timeout=2.0) as store:
        store.put_sharded(key, shard(1, 2), attempt="one", rank=1, world_size=2)


@pytest.mark.full
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [PREPARE, LOOK, PUBLISH])
def test_a_rank_that_is_killed_leaves_a_part_or_nothing(root: str, kind: int, after: bool) -> None:
    server = HomeServer()
    paths = [f"{root}-{name}" for name in "ab"]
    for path in paths:
        memstore.open(path).close()
    ask(server.address, "serve", *paths)
    with memstore.open(paths[1], timeout=20.0) as home, memstore.open(paths[0], timeout=20.0) as other:
        if kind != PREPARE:  # so that the killed one comes last, and publishes
            home.put_sharded("key", shard(0, 2), attempt="one", rank=0, world_size=2, wait=False)
        with Child(put_and_die, paths[0], "key", kind, after) as child, pytest.raises(RuntimeError, match="-9"):
            child.receive()
        is_kept = kind != PREPARE or after
        outcomes = together(
            [lambda: home.put_sharded("key", shard(0, 2), attempt="one", rank=0, world_size=2, timeout=3.0)]  # pyright: ignore
        )
        if is_kept:
            assert isinstance(outcomes[0], int), outcomes
            for store in (home, other):
                assert torch.equal(store.get("key")["w"], whole(2))
        else:
            assert isinstance(outcomes[0], StoreTimeoutError) and "rank 1" in str(outcomes[0])
        deadline = time.monotonic() + 20  # a part that nobody keeps is found by an audit
        while len(lent(other)) != is_kept and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(lent(other)) == is_kept
    server.close()


def lent(store: memstore.Store) -> list[Place]:
    return [place for place, _ in look(root_of(store), lambda tables: tables.all_lent(0, 10), time.monotonic() + 10)]
