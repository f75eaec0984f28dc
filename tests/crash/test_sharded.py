"""Sharded puts whose ranks are killed, or wait for who died or is stopped: one version of all ranks, or none."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

import memstore
from memstore.engine.protocols import sharded_put
from memstore.store import sharded
from tests.children import in_child
from tests.crash import blockers, shards
from tests.crash.blockers import NEVER, sleepers
from tests.crash.leftovers import headers_not_live, headers_unlike_rows, left_after_gc
from tests.crash.shards import (
    KEY,
    KEYS,
    NEW,
    OLD,
    PLAIN,
    RANKS,
    SCENES,
    Scene,
    be_a_rank,
    put,
    put_all,
    read_on,
    stamp_at,
    stamp_of_whole,
    value_of,
    write_plainly,
)
from tests.crash.test_kill_at_steps import FIRST, KILLED
from tests.crash.test_stopped import until_stopped
from tests.crash.values import INLINE, SMALL, stamp_of, stamped
from tests.inside import root_of
from tests.patience import wait_until
from tests.support import faults
from tests.support.fork_server import ForkServer, Worker

# --- ranks are killed before and after each of their steps ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "durability", "stride"),
    [
        *(pytest.param(name, "process", 25, id=name) for name in SCENES),
        pytest.param("last-over-sharded", "disk", 25, id="last-over-sharded-disk"),
        *(pytest.param(name, "process", 1, id=f"{name}-whole", marks=pytest.mark.full) for name in SCENES),
        *(pytest.param(name, "disk", 1, id=f"{name}-disk-whole", marks=pytest.mark.full) for name in SCENES),
    ],
)
def test_kill_at_each_step(
    name: str, durability: str, stride: int, request: pytest.FixtureRequest, server: ForkServer
) -> None:
    """Kills before a step and after it in turn; with a stride of 1 both."""
    store: memstore.Store = request.getfixturevalue("store" if durability == "process" else "disk_store")
    scene = SCENES[name]
    put_all(store, OLD, "the first one of the store")
    scene.reset(store, name)
    with server.start(shards.steps_of, store.root, name, name) as worker:
        names = worker.recv()
        worker.join()
    check_and_go_on(store, scene, name, 0, f"{name}, to its end")

    outcomes: list[str] = []
    for half in [*range(stride // 2, 2 * len(names) - 1, stride), 2 * len(names) - 1]:
        number, after = half // 2 + 1, half % 2 == 1
        what = f"{name}, killed {'after' if after else 'before'} step {number} of {names}: {names[number - 1]}"
        attempt = f"{name} {half}"
        before = scene.reset(store, attempt)
        with server.start(shards.die_at, store.root, name, attempt, number, after) as worker:
            assert worker.wait() == KILLED, what
        FIRST[half // stride % len(FIRST)](store, server)
        assert stamp_at(store) in (NEW, OLD if scene.over != "none" else None), what
        store.put("other", stamped(6, INLINE))  # who gets the mutex next recovers
        assert headers_unlike_rows(store) == [], what
        outcomes.append(check_and_go_on(store, scene, attempt, before, what))
    # Once it has ended, it stays so.
    assert outcomes == sorted(outcomes, reverse=True), outcomes
    assert outcomes[-1] == ("ended" if scene.ends else "published")


def check_and_go_on(store: memstore.Store, scene: Scene, attempt: str, before: int, what: str) -> str:
    """The ranks put their parts again, and all get one answer; the next attempt works, and nothing is left over."""
    found = [answer(store, rank, attempt) for rank in (0, 1)]
    found[0] = answer(store, 0, attempt)
    assert found[0] == found[1], f"{what}: the ranks were told {found}"
    version = found[0]
    if isinstance(version, int):
        assert (stamp_at(store), store.version(KEY)) == (NEW, version), what
        assert version > before, what
    else:
        assert stamp_at(store) == (OLD if scene.over != "none" else None), what
    assert put_all(store, NEW + 1, f"{attempt}, next") == store.version(KEY), what
    assert stamp_at(store) == NEW + 1 and store.pending() == (), what
    store.put("other", stamped(5, SMALL))
    assert left_after_gc(store) == [], what
    assert headers_not_live(store) == [], what
    assert root_of(store).mutex.owner() == 0, what
    return "published" if isinstance(version, int) else "ended"


def answer(store: memstore.Store, rank: int, attempt: str) -> int | str | None:
    """What a rank is told that is started again, and puts its part: a version, an error, or that others are missing."""
    try:
        pending = put(store, rank, NEW, attempt)
        return pending.wait(10.0) if pending.done() else None
    except (memstore.PartialCommitError, memstore.ShardMismatchError, memstore.StoreTimeoutError) as error:
        return str(error)


# --- ranks that wait: for who died, for who is stopped, in forked children, in a store that goes away -----------------


QUICKLY = 0.2  # seconds, not one, after which a rank that waits looks by itself
DEATHS = [(2, True), (3, False), (3, True)]  # right after its part is there, and right before and after it publishes


def test_who_waits_goes_on_for_the_dead(
    store: memstore.Store, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one dies, and rings nobody: those who sleep look by themselves, publish, and get the version."""
    monkeypatch.setattr(sharded_put, "LOOK_EVERY", QUICKLY)
    keys = [f"{commit} {after}" for commit, after in DEATHS]
    put_all(store, NEW, "so that the store is no new one")
    with ThreadPoolExecutor(len(keys)) as pool:
        waiting = [pool.submit(put(store, 0, NEW, "first", key=key).wait, 60.0) for key in keys]
        wait_until(lambda: sleepers(store) == len(keys))
        for key, (commit, after) in zip(keys, DEATHS, strict=True):
            with server.start(shards.die_as_the_last, store.root, key, commit, after) as worker:
                assert worker.wait() == KILLED
        versions = [one.result(30) for one in waiting]
    assert [store.version(key) for key in keys] == versions
    assert [stamp_at(store, key) for key in keys] == [NEW] * len(keys)
    assert left_after_gc(store) == []


def test_the_next_owner_rings_for_the_dead(
    store: memstore.Store, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here nobody looks by itself, and whoever should have rung is dead."""
    put_all(store, NEW, "so that the store is no new one")
    monkeypatch.setattr(sharded_put, "LOOK_EVERY", NEVER)
    with ThreadPoolExecutor(2) as pool:
        published = pool.submit(put(store, 0, NEW, "first", key="published").wait, 60.0)
        aborted = pool.submit(put(store, 0, NEW, "first", key="aborted").wait, 60.0)
        wait_until(lambda: sleepers(store) == 2)
        with server.start(shards.die_as_the_last, store.root, "published", 3, True) as worker:
            assert worker.wait() == KILLED
        store.put("other", 1)
        assert published.result(30) == store.version("published")
        wait_until(lambda: sleepers(store) == 1)
        with server.start(shards.die_in_an_abort, store.root, "aborted") as worker:
            assert worker.wait() == KILLED
        store.put("other", 2)
        with pytest.raises(memstore.PartialCommitError, match=r"Store\.abort was called"):
            aborted.result(30)


def test_a_part_of_a_process_that_is_stopped(store: memstore.Store, server: ForkServer) -> None:
    """It has let go of its file by then: others publish it, and read it."""
    first = put(store, 0, NEW, "first")
    with server.start(shards.stop_as_the_last, store.root) as worker:
        until_stopped(worker)
        version = first.wait(30.0)
        assert stamp_at(store) == NEW
        with memstore.open(store.root, "r") as reader:
            assert stamp_at(reader) == NEW
        worker.kill(18)
        assert worker.recv() == version


def test_ranks_of_several_processes_get_one_version(store: memstore.Store, server: ForkServer) -> None:
    with (
        server.start(shards.put_on, store.root, 0, "first") as first,
        server.start(shards.put_on, store.root, 1, "first") as second,
    ):
        for worker in (first, second):
            assert worker.recv() == "opened"
        for worker in (second, first):
            worker.send("go")
        assert [worker.recv() for worker in (first, second)] == [store.wait(KEY, timeout=0)] * 2
    assert stamp_at(store) == NEW


# -- a process is stopped, and holds the mutex -------------------------------------------------------------------------


def test_a_stopped_owner(store: memstore.Store, server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits end in time and say who it is. Who put nothing, and can't say so, doesn't know what the others will do."""
    monkeypatch.setattr(sharded, "GIVE_UP_WITHIN", 0.1)
    monkeypatch.setattr(sharded_put, "LOOK_EVERY", QUICKLY)
    pending = put(store, 0, NEW, "first")
    with server.start(blockers.hold_mutex, store.root) as owner:
        assert owner.recv() == "held"
        owner.kill(19)
        until_stopped(owner)
        assert not pending.done() and store.pending()[0].ranks == (0,)
        with pytest.raises(memstore.StoreTimeoutError, match="rank 1 of 2 had put nothing within"):
            pending.wait(QUICKLY / 4)
        started = time.monotonic()
        with pytest.raises(memstore.StoreTimeoutError, match=rf"held by pid {owner.pid}\b.*stopped"):
            pending.wait(3 * QUICKLY)
        assert time.monotonic() - started < 9
        with pytest.raises(memstore.UnknownOutcomeError, match="could not be given up"):
            put(store, 1, NEW, "first", timeout=0.2)
        owner.kill(18)
        owner.send("release")
        assert owner.recv() == "released"
    assert put(store, 1, NEW, "first").wait(10.0) == pending.wait(10.0)


def test_a_part_is_in_where_its_publication_has_to_wait(store: memstore.Store, server: ForkServer) -> None:
    """With wait=False nothing is raised then: the attempt may be published as soon as the mutex is free."""
    put(store, 0, NEW, "steps")
    steps = faults.record(lambda: put(store, 1, NEW, "steps"))
    third = [number for number, name in enumerate(steps, 1) if name == "mutex_lock"][2]
    first = put(store, 0, NEW, "first")
    with server.start(blockers.hold_mutex, store.root) as owner:
        with faults.at_step(third, lambda: owner.recv() == "held" or pytest.fail("it is not held")):
            second = put(store, 1, NEW, "first", timeout=0.2)
        assert isinstance(second, memstore.PendingPut)
        owner.send("release")
        assert second.wait(10.0) == first.wait(10.0) == store.version(KEY)


def test_a_rank_that_is_started_again_gets_the_version(store: memstore.Store, server: ForkServer) -> None:
    """Also where the mutex is not to be had for its part: the one that it has put before is in the version."""
    version = put_all(store, NEW, "first")
    with server.start(blockers.hold_mutex, store.root) as owner, ThreadPoolExecutor(1) as pool:
        assert owner.recv() == "held"
        again = pool.submit(put, store, 0, NEW, "first", wait=True, timeout=0.1)
        with pytest.raises(TimeoutError):
            again.result(0.3)
        owner.send("release")
        assert again.result(30) == version == store.version(KEY)


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.full)])
def test_fork_at_each_step_of_another_threads_put(stride: int, store: memstore.Store, server: ForkServer) -> None:
    with server.start(shards.fork_at_steps, store.root, stride) as worker:
        assert worker.recv(250).count("mutex_lock") >= 3
        worker.join(250)
    assert left_after_gc(store) == []


def test_a_forked_child_of_a_rank_waits_for_its_put(store: memstore.Store) -> None:
    first = put(store, 0, NEW, "first")
    version = in_child(lambda: (put(store, 1, NEW, "first"), first.wait(20.0))[1])
    assert first.wait(0.0) == version and first.done()


# -- the store goes away -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["moved", "removed", "closed"])
def test_a_store_that_goes_away_ends_a_wait(scratch: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_put, "LOOK_EVERY", QUICKLY)
    store = memstore.open(scratch, timeout=10.0)
    first = put(store, 0, NEW, "first")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(put, store, 0, NEW, "second", wait=True, timeout=60.0)
        wait_until(lambda: sleepers(store) == 1)
        if how == "closed":
            store.close()
        elif how == "moved":
            os.rename(scratch, f"{scratch}.moved")
        else:
            shutil.rmtree(scratch)
        expected = memstore.StoreClosedError if how == "closed" else memstore.NotAStoreError
        with pytest.raises((expected, memstore.UnknownOutcomeError)):
            waiting.result(30)
        with pytest.raises(expected):
            first.wait(3.0)
    store.close()


def test_a_moved_store_keeps_what_it_had(scratch: str) -> None:
    with memstore.open(scratch) as store:
        put(store, 0, NEW, "first")
        os.rename(scratch, f"{scratch}.moved")
        with pytest.raises(memstore.NotAStoreError):
            put(store, 1, NEW, "first")
    with memstore.open(f"{scratch}.moved") as store:
        assert [one.ranks for one in store.pending()] == [(0,)] and KEY not in store
        assert put(store, 1, NEW, "first").wait(10.0) == 1
        assert stamp_at(store) == NEW


def test_what_is_held_outlives_attempts(store: memstore.Store) -> None:
    """Neither an attempt that ends nor one that is published touches what a reader has."""
    put_all(store, 1, "first")
    held = store.get(KEY)
    for number in range(2, 8):
        put(store, 0, 100, f"given up {number}").abort()
        put_all(store, number, f"attempt {number}")
        assert {stamp_of(leaf) for leaf in held.values()} == {1}
        assert stamp_at(store) == number


# --- ranks are killed at random times, while others put, read and sweep -----------------------------------------------


TOLD = {"PartialCommitError", "StoreTimeoutError"}


class Ranks:
    """The processes that are the ranks. Who dies is started anew, in the attempt that it died in or in the next."""

    def __init__(self, store: memstore.Store, server: ForkServer, chance: random.Random, stack: ExitStack) -> None:
        self._store, self._server, self._chance, self._stack = store, server, chance, stack
        self._workers: list[Worker] = [self._start(rank) for rank in range(RANKS)]
        self.kills = 0

    def _start(self, rank: int) -> Worker:
        seed = self._chance.getrandbits(32)
        worker = self._server.start(be_a_rank, self._store.root, rank, seed)
        return self._stack.enter_context(worker)

    def put(self, key: str, stamp: int) -> list[int | str]:
        """What the ranks that live say of an attempt."""
        chance = self._chance
        sizes = chance.choice([512, 700, 20_000])
        for worker in chance.sample(self._workers, RANKS):
            worker.send((key, stamp, sizes))
        victims = [rank for rank in range(RANKS) if chance.random() < 0.15]
        if victims:
            time.sleep(chance.uniform(0, 0.01))
        for rank in victims:
            self._workers[rank].kill()
            assert self._workers[rank].wait() == KILLED
            self._workers[rank].close()
            self._workers[rank] = self._start(rank)
            self.kills += 1
            if chance.random() < 0.7:  # its launcher puts it into the same attempt
                self._workers[rank].send((key, stamp, sizes))
                victims = [other for other in victims if other != rank]
        return list(self._answers(victims, stamp))

    def _answers(self, dead: list[int], stamp: int) -> Iterator[int | str]:
        for rank, worker in enumerate(self._workers):
            if rank not in dead:
                said, found = worker.recv()
                assert said == stamp
                yield found


@pytest.mark.parametrize("attempts", [25, pytest.param(3000, marks=[pytest.mark.full, pytest.mark.timeout(2400)])])
def test_kill_ranks_at_random(attempts: int, store: memstore.Store, server: ForkServer, chance: random.Random) -> None:
    published = ended = unknown = 0
    last = dict.fromkeys(KEYS, 0)
    with ExitStack() as stack:
        others = [
            stack.enter_context(server.start(function, store.root, number))
            for number, function in enumerate((read_on, read_on, write_plainly))
        ]
        ranks = Ranks(store, server, chance, stack)
        for stamp in range(1, attempts + 1):
            key = chance.choice(KEYS)
            found = ranks.put(key, stamp)
            versions = {one for one in found if isinstance(one, int)}
            errors = {one for one in found if isinstance(one, str)}
            assert len(versions) <= 1, f"one attempt, two versions: {found}"
            assert not (versions and errors), f"ranks were told different things: {found}"
            assert errors <= {*TOLD, "UnknownOutcomeError"}, found
            published, ended = published + bool(versions), ended + bool(errors)
            unknown += "UnknownOutcomeError" in errors
            for version in versions:
                assert version > last[key], "versions grow"
                last[key] = version
        for other in others:
            other.send("end")
        counts = [other.recv() for other in others]
    print(f"{attempts} attempts, {ranks.kills} kills: {published} published, {ended} ended, {unknown} unknown", counts)
    assert min(published, ended, ranks.kills) > attempts // 12 and min(counts) > attempts, "this tests little"
    _check_the_end(store, attempts)


def _check_the_end(store: memstore.Store, stamp: int) -> None:
    for one in store.pending():
        store.abort(one.key, one.attempt)
    for key in KEYS:
        value = store.get(key, None)
        assert value is None or stamp_of_whole(value) <= stamp or stamp_of_whole(value) > PLAIN
        del value
        for rank in range(RANKS):
            value = value_of(rank, stamp + 1, 700)
            store.put_sharded(key, value, attempt="the last", rank=rank, world_size=RANKS, wait=False)
        assert stamp_of_whole(store.get(key)) == stamp + 1
    assert store.verify().ok
    assert left_after_gc(store) == []
    assert headers_not_live(store) == []
