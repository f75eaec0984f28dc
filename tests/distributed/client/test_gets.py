"""Gets, listings and waits of keys whose home is elsewhere: who is asked, and what comes of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstore
import memstore.aio
from memstore.distributed.rules import Answer, Entry, Lookup, Wait, owning, reading
from memstore.distributed.rules.messages import FindOwners, Found, WaitAny, WatchGroup
from tests.children import in_child
from tests.distributed.catalog.operations import flipped
from tests.distributed.client.hosts import Cluster, await_, cluster_of, hand_over
from tests.distributed.client.test_puts import big
from tests.inside import root_of

CrossHostError = memstore.errors.CrossHostError


def lookups(cluster: Cluster) -> int:
    return sum(isinstance(one, Lookup) for home in cluster.homes for one in home.asked)


def test_a_get_of_another_hosts_key_is_one_lookup(pair: Cluster) -> None:
    here, there = pair.stores
    there.put("k", {"x": 1})
    assert here.get("k") == {"x": 1}
    assert lookups(pair) == 1
    assert here.get("missing", "no") == "no"
    with pytest.raises(memstore.KeyNotFoundError, match="no key 'missing'"):
        here.get("missing")
    assert "k" in here and "missing" not in here
    assert here.info("k").version == there.version("k")


def test_bytes_of_another_host_come_here_once(pair: Cluster) -> None:
    here, there = pair.stores
    there.put("k", big(1))
    assert torch.equal(here.get("k"), big(1))
    assert torch.equal(in_child(lambda: here.get("k").clone()), big(1))
    there.put("k", big(2))
    assert torch.equal(here.get("k"), big(2))
    assert torch.equal(here.get("k", out=torch.zeros(5000)), big(2))


def test_a_store_that_only_reads_gets_them_too(pair: Cluster) -> None:
    pair.stores[1].put_many({"small": 1, "big": big(1)})
    with memstore.open(pair.stores[0].root, "r") as reader:
        assert reader.get("small") == 1
        assert torch.equal(reader.get("big"), big(1))
        assert list(reader) == ["big", "small"]
        with pytest.raises(memstore.ReadOnlyError):
            reader.put("small", 2)


def test_with_max_age_the_home_is_asked_now_and_then(pair: Cluster) -> None:
    here, there = pair.stores
    there.put("k", 1)
    assert [here.get("k", max_age=60) for _ in range(3)] == [1, 1, 1]
    assert lookups(pair) == 1
    there.put("k", 2)
    assert here.get("k", max_age=60) == 1
    assert here.get("k", max_age=0) == here.get("k") == 2
    assert here.get("k", max_age=60) == 1  # of the first look: those without it are not kept
    here.put("k", 3)
    assert here.get("k", max_age=60) == 3
    time.sleep(0.01)
    assert here.get("k", max_age=0.001) == 3


def test_several_keys_are_got_of_one_moment(pair: Cluster) -> None:
    here, there = pair.stores
    there.put_many({"a": 1, "b": big(1)})
    assert [torch.as_tensor(one).sum().item() for one in here.get_many(["b", "a"]).values()] == [5000, 1]
    with pytest.raises(memstore.KeyNotFoundError, match="'c'"):
        here.get_many(["a", "c"])
    over = threading.Event()

    def write() -> None:
        number = 1
        while not over.is_set():
            number += 1
            there.put_many({"a": number, "b": big(number)})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            one, other = here.get_many(["a", "b"]).values()
            assert other[0] == other[-1] == one
    finally:
        over.set()
        writer.join()


def test_keys_of_all_homes_are_listed_in_order(scratch: str) -> None:
    with cluster_of(scratch, True, True, False) as made:
        names = sorted(f"{number}/{name}" for number in range(20) for name in "abc")
        for number, name in enumerate(names):
            made.stores[number % 3].put(name, number)
        for store in made.stores:
            assert list(store) == names
            assert len(store) == len(names)
            assert list(store.keys("1")) == [name for name in names if name.startswith("1")]
            assert list(store.keys("7/")) == ["7/a", "7/b", "7/c"]
        assert dict(made.stores[0].items()) == {name: number for number, name in enumerate(names)}
        made.homes[1].silent = True
        store = memstore.open(made.stores[2].root, timeout=0.5)
        with store, pytest.raises(memstore.errors.HomeUnavailableError, match=made.homes[1].member.address):
            list(store)


def test_a_put_at_the_home_wakes_who_waits_elsewhere(pair: Cluster) -> None:
    here, there = pair.stores
    version = there.put("k", 1)
    assert here.wait("k") == version
    woken: list[int] = []
    waiter = threading.Thread(target=lambda: woken.append(here.wait("k", newer_than=version, timeout=20)))
    waiter.start()
    await_(lambda: any(isinstance(one, Wait) for one in pair.homes[1].asked))
    assert woken == []
    later = there.put("k", 2)
    waiter.join()
    assert woken == [later]
    with pytest.raises(memstore.StoreTimeoutError, match=f"is at version {later}: no version newer"):
        here.wait("k", newer_than=later, timeout=0.5)
    with pytest.raises(memstore.StoreTimeoutError, match="doesn't exist"):
        here.wait("missing", timeout=0)


def test_a_wait_for_any_key_hears_of_all_homes(homes: Cluster) -> None:
    here, there = homes.stores[0], homes.stores[1]
    mine, theirs = homes.key_at(0), homes.key_at(1)
    seen: dict[str, int] = {}
    for putter, key in ((here, mine), (there, theirs), (here, theirs)):
        woken: list[dict[str, int]] = []

        def wait(keys: list[str] | None, prefix: str | None, woken: Any = woken, seen: Any = seen) -> None:
            woken.append(here.wait_any(keys, prefix=prefix, newer_than=seen, timeout=20))

        waiters = [threading.Thread(target=wait, args=one) for one in (([mine, theirs], None), (None, ""))]
        for waiter in waiters:
            waiter.start()
        new = {key: putter.put(key, 1)}
        for waiter in waiters:
            waiter.join(60)
        assert woken == [new, new]
        seen = {**seen, **new}
    with pytest.raises(memstore.StoreTimeoutError):
        here.wait_any([mine, theirs], newer_than=seen, timeout=0.2)


def test_a_wait_follows_a_key_whose_home_moves(homes: Cluster) -> None:
    """Who sleeps on this host's doorbell hears of no put of another one."""
    here, there = homes.stores
    key = homes.key_at(0)
    version = here.put(key, 1)
    woken: list[int] = []
    waiter = threading.Thread(target=lambda: woken.append(here.wait(key, newer_than=version, timeout=20)))
    waiter.start()
    time.sleep(0.05)
    hand_over(homes, key, 1)
    later = there.put(key, 2)
    waiter.join()
    assert woken == [later]


def test_a_put_expects_a_version_that_its_new_home_has(homes: Cluster) -> None:
    here, there = homes.stores
    key = homes.key_at(0)
    here.put(key, 1)
    hand_over(homes, key, 1)
    version = there.put(key, 2)
    assert here.put(key, 3, expect_version=version) > version


def test_a_wait_at_a_home_that_is_silent_ends_in_time(pair: Cluster) -> None:
    here = pair.stores[0]
    pair.homes[1].silent = True
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        here.wait("k", timeout=0.5)
    assert time.monotonic() - started < 10


def test_refs_and_views_of_another_hosts_value_stay(pair: Cluster) -> None:
    here, there = pair.stores
    there.put("k", {"x": big(1)})
    ref, view = here.ref("k"), here.view("k")
    assert torch.equal(view["x"][3:5], torch.ones(2))
    there.put("k", {"x": big(2)})
    assert torch.equal(ref.get()["x"], big(1))
    assert torch.equal(here.get("k")["x"], big(2))


def test_attached_files_stay_on_their_host(pair: Cluster, tmp_path: Path) -> None:
    here, there = pair.stores
    path = tmp_path / "x.npy"
    np.save(path, np.arange(6.0))
    here.attach("k", path)
    assert torch.equal(here.get("k"), torch.arange(6.0, dtype=torch.float64))
    assert here.info("k").kind == there.info("k").kind == "adopted"
    with pytest.raises(CrossHostError, match=pair.homes[0].member.address):
        there.get("k")
    here.put("k", 1)
    assert there.get("k") == 1


def test_rows_are_written_on_their_host(pair: Cluster) -> None:
    here, there = pair.stores
    spec = {"x": ((2,), torch.float32)}
    dataset = here.create_dataset("k", spec, capacity=10)
    dataset.extend({"x": torch.ones(3, 2)})
    assert len(here.open_dataset("k")) == 3
    with pytest.raises(CrossHostError, match=f"dataset on .*{pair.homes[0].member.address}"):
        there.open_dataset("k")
    for store in pair.stores:
        with pytest.raises(memstore.errors.MutableEntryError):
            store.get("k")
        with pytest.raises(memstore.errors.MutableEntryError):
            store.put("k", 1)
        with pytest.raises(memstore.errors.AlreadyExistsError):
            store.create_dataset("k", spec, capacity=10)
    version = dataset.seal()
    assert there.version("k") == version
    assert torch.equal(here.get("k")["x"], torch.ones(3, 2))
    assert torch.equal(there.get("k")["x"], torch.ones(3, 2))


def test_a_dataset_that_is_deleted_elsewhere_is_gone(pair: Cluster) -> None:
    here, there = pair.stores
    dataset = here.create_dataset("k", {"x": ((2,), torch.float32)}, capacity=10)
    there.delete("k")

    def refused() -> bool:
        try:
            dataset.extend({"x": torch.ones(1, 2)})
        except memstore.errors.MutableEntryError:
            return True
        return False

    await_(refused)


def test_a_replay_buffer_works_where_it_was_made(pair: Cluster) -> None:
    here, there = pair.stores
    buffer = memstore.ReplayBuffer(here, "k", {"x": ((), torch.int64)}, capacity=16)
    buffer.extend({"x": torch.arange(8)})
    assert len(memstore.ReplayBuffer(here, "k")) == 8
    with pytest.raises(CrossHostError):
        memstore.ReplayBuffer(there, "k")


def test_verify_looks_at_the_bytes_that_lie_here(scratch: str) -> None:
    for number in range(2):
        memstore.open(f"{scratch}-{number}", checksum=True).close()
    with cluster_of(scratch, False, True) as pair:
        here, there = pair.stores
        here.put_many({"a": big(1), "b": big(2), "small": 1})
        there.put("c", big(3))
        report = here.verify()
        assert (report.ok, report.checked) == (True, 2)
        assert there.verify().ok
        (segment,) = here.info("a").files
        with open(segment, "r+b") as file:
            file.seek(os.path.getsize(segment) // 2)
            file.write(b"\xff")
        damaged = [error.key for error in here.verify().damaged]
        assert damaged == ["a"]
        assert [error.key for error in here.verify(["a", "b", "x"]).damaged] == ["a", "x"]


def test_bytes_that_are_missing_are_damage(pair: Cluster) -> None:
    here = pair.stores[0]
    here.put("k", big(1))
    root = root_of(here)
    (path,) = here.info("k").files
    assert path.startswith(root.segments)
    os.unlink(path)
    with pytest.raises(memstore.CorruptionError) as caught:
        here.get("k", timeout=10)
    assert caught.value.path == path


@pytest.mark.parametrize("how", ["missing", "older"])
def test_bytes_on_another_host_that_are_not_those_that_were_put_are_damage(pair: Cluster, how: str) -> None:
    """As on one host; and not a home that doesn't answer. An older file is what a backup brings back."""
    here, there = pair.stores
    here.put("k", big(1))
    (path,) = here.info("k").files
    with open(path, "rb") as file:
        older = file.read()
    here.put("k", big(2))
    (path,) = here.info("k").files
    if how == "missing":
        os.unlink(path)
    else:
        with open(path, "r+b") as file:
            file.write(older)
    for store in (there, here):
        with pytest.raises(memstore.CorruptionError, match="missing") as caught:
            store.get("k")
        assert caught.value.key == "k", store
    here.put("k", big(3))
    assert torch.equal(there.get("k"), big(3))


def test_a_damaged_record_is_an_error_of_its_key_alone(pair: Cluster) -> None:
    here, there = pair.stores
    there.put_many({"a": 1, "b": big(2), "c": 3})
    root = root_of(there)
    root.mutex.run(lambda: root.catalog.update(flipped("entries", b"b")), 1e18)
    for store in (here, there):
        assert list(store) == ["a", "b", "c"] and len(store) == 3
        assert store.get_many(["a", "c"]) == {"a": 1, "c": 3}
        calls: list[Callable[[], object]] = [
            lambda of=store: of.get("b"),
            lambda of=store: of.version("b"),
            lambda of=store: of.delete("b"),
            lambda of=store: of.put("b", 5),
        ]
        for call in calls:
            with pytest.raises(memstore.CorruptionError, match="'b'") as caught:
                call()
            assert caught.value.key == "b"
        with pytest.raises(memstore.CorruptionError):
            store.get_many(["a", "b"])
    assert [error.key for error in there.verify().damaged] == ["b"]


def test_more_keys_than_a_message_has_room_for_are_got(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair.stores
    values = {f"{number:03}": "x" * (number % 7) for number in range(300)}
    there.put_many(values)
    monkeypatch.setattr(reading, "BATCH_LIMIT", 100)
    monkeypatch.setattr(owning, "BYTES_LIMIT", 20_000)
    assert here.get_many(list(values)) == values
    assert 3 + 3 <= lookups(pair) < 30
    assert here.get_many(list(values)[:20]) == dict(list(values.items())[:20])


def test_a_home_that_answers_what_no_record_can_be_is_damage(pair: Cluster) -> None:
    here, home = pair.stores[0], pair.homes[1]
    here.put("k", 1)

    def spoil(answer: Answer) -> Answer:
        if not isinstance(answer, Found) or answer.entries[0] is None:
            return answer
        entry = answer.entries[0]
        return Found((Entry(entry.version, b"\x00" + entry.body),))

    home.spoil = spoil
    with pytest.raises(memstore.CorruptionError, match="another host"):
        here.get("k")


def test_a_store_that_nobody_serves_loads_nothing_for_other_hosts(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put_many({"k": 1, "x": 2})
    code = (  # without torch, whose import takes seconds
        "import sys\n"
        "from memstore.listing import open_keyspace\n"
        f"with open_keyspace({scratch!r}, 'r+') as store:\n"
        "    assert list(store.keys()) == ['k', 'x'] and len(store) == 2 and 'no' not in store and store.delete('k')\n"
        "assert not [name for name in sys.modules if name.startswith('memstore.distributed')]\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


class _Thing:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Thing)

    def __hash__(self) -> int:
        return 1


def test_objects_in_pickle_are_refused_where_that_is_not_allowed(pair: Cluster) -> None:
    here, there = pair.stores
    with memstore.open(here.root, allow_pickle=True) as trusting:
        for key, value in (("small", {"o": _Thing()}), ("large", {"o": _Thing(), "x": big(1)})):
            trusting.put(key, value)
            calls: list[Callable[[str], Any]] = [
                there.get,
                there.view,
                lambda key: there.get_many([key]),
                lambda key: there.ref(key).get(),
            ]
            for call in calls:
                with pytest.raises(memstore.UnsupportedValueError, match="allow_pickle=True"):
                    call(key)
            with memstore.open(there.root, allow_pickle=True) as also:
                assert also.get(key)["o"] == _Thing()


def test_a_get_without_time_asks_all_the_same(pair: Cluster) -> None:
    here, there = pair.stores
    there.put("k", big(1))

    def got() -> bool:
        try:
            return torch.equal(here.get("k", timeout=0), big(1))
        except memstore.errors.HomeUnavailableError:  # a tenth of a second is short, on a busy machine
            return False

    await_(got)


def test_a_key_says_who_owns_it(homes: Cluster) -> None:
    here, there = homes.stores
    here.put("mine/k", 1)
    there.put("theirs/k", 1)
    for store in (here, there):
        for key, home in zip(("mine/k", "theirs/k"), homes.homes, strict=True):
            assert store.info(key).owner == f"{home.member.name} at {home.member.address}"


def test_a_partial_listing_goes_on_without_hosts_that_do_not_answer(homes: Cluster) -> None:
    here, there = homes.stores
    here.put_many({"mine/a": 1, "mine/b": 2})
    there.put("theirs/k", 1)
    assert list(here.keys(partial=True)) == ["mine/a", "mine/b", "theirs/k"]
    homes.homes[1].close()
    with pytest.warns(UserWarning, match=f"none of the keys of .*{homes.homes[1].member.address}"):
        assert list(here.keys(partial=True)) == ["mine/a", "mine/b"]
    assert list(here.keys("mine/")) == ["mine/a", "mine/b"], "nobody else is asked"
    with memstore.open(here.root, timeout=0.5) as hasty, pytest.raises(memstore.errors.HomeUnavailableError):
        len(hasty)


def test_a_host_that_owns_nothing_is_not_asked_for_its_keys(scratch: str) -> None:
    with cluster_of(scratch, True, True, False) as cluster:
        for number, store in enumerate(cluster.stores):
            store.put(f"{number}/k", number)
        cluster.homes[2].close()
        began = time.monotonic()
        assert list(cluster.stores[0].keys()) == list(cluster.stores[1].keys()) == ["0/k", "1/k", "2/k"]
        assert not cluster.stores[0].pending()
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("is_async", [False, True])
def test_a_wait_for_any_of_several_keys_is_one_question_at_each_owner(homes: Cluster, is_async: bool) -> None:
    here, there = homes.stores
    keys = [homes.key_at(0), homes.key_at(1), "nobody/k"]
    woken: list[dict[str, int]] = []

    async def in_a_task(seen: dict[str, int]) -> dict[str, int]:
        async with memstore.aio.open(here.root, "r+") as store:
            return await store.wait_any(keys, newer_than=seen, timeout=20)

    def wait(seen: dict[str, int]) -> None:
        woken.append(asyncio.run(in_a_task(seen)) if is_async else here.wait_any(keys, newer_than=seen, timeout=20))

    def count(*kinds: type[Any]) -> int:
        return sum(isinstance(one, kinds) for home in homes.homes for one in home.asked)

    seen: dict[str, int] = {}
    for key, putter in (("nobody/k", there), (keys[1], there), (keys[0], here)):
        for home in homes.homes:
            home.asked.clear()
        waiter = threading.Thread(target=wait, args=(seen,))
        waiter.start()
        is_owned = "nobody/k" in seen
        await_(lambda is_owned=is_owned: count(Wait) >= 2 + is_owned and count(WatchGroup) >= (not is_owned))
        time.sleep(0.5)
        assert count(Lookup, FindOwners) <= 8 and count(Wait) <= 4, "nobody asks again and again"
        assert not woken
        began = time.monotonic()
        seen[key] = putter.put(key, 1)
        waiter.join(30)
        assert time.monotonic() - began < 5
        assert woken.pop() == {key: seen[key]}


def test_a_wait_for_a_prefix_is_one_message_a_host_and_passes_over_datasets(homes: Cluster) -> None:
    here, there = homes.stores
    woken: list[dict[str, int]] = []
    waiter = threading.Thread(target=lambda: woken.append(here.wait_any(prefix="", timeout=20)))
    waiter.start()
    await_(lambda: any(isinstance(one, WaitAny) for one in homes.homes[1].asked))
    there.create_dataset("rows/k", {"x": ((2,), torch.float32)}, capacity=10)
    time.sleep(0.3)
    assert sum(isinstance(one, WaitAny) for home in homes.homes for one in home.asked) <= 8
    version = there.put("new/k", 1)
    waiter.join()
    assert woken == [{"new/k": version}]
