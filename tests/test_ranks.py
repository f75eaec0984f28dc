"""What ranks say to each other through the store of their group: of any length, and gone when all have heard it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import memstore
from memstore import Snapshot, StateDict
from memstore._ranks import RankCall, RankError, RankStore
from memstore.snapshot.ranks import SnapshotCall
from tests.children import Child, Wire
from tests.support import faults

LONG = b"x" * (9 << 20)  # more than torch's TCPStore takes at once


def over_tcp(world_size: int, function: Any, *arguments: Any, dead: tuple[int, ...] = ()) -> list[Any]:
    """`function(rank, store, *arguments)` on ranks whose group has a TCPStore, in rank 0; those in `dead` will die."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = [Child(_rank, rank, world_size, port, function, arguments) for rank in range(world_size)]
    try:
        return [None if rank in dead else child.receive(60) for rank, child in enumerate(children)]
    finally:
        for child in children:
            child.__exit__()


def _rank(wire: Wire, rank: int, world_size: int, port: int, function: Any, arguments: tuple[Any, ...]) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return function(rank, store, *arguments)


def _say_and_forget(rank: int, store: Any) -> tuple[bool, int, int]:
    assert dist.group.WORLD is not None
    call = RankCall(RankStore.of_group(dist.group.WORLD), "test")
    deadline = time.monotonic() + 60
    if rank == 0:
        before = store.num_keys()
        call.say("long", LONG)
        call.hear("heard", bytes, deadline, 1)
        call.forget("long", "heard", "never said")
        return True, before, store.num_keys()
    is_whole = call.hear("long", bytes, deadline) == LONG
    call.say("heard", b"")
    return is_whole, 0, 0


def test_a_message_may_be_longer_than_the_store_takes_and_leaves_nothing() -> None:
    (_, before, after), (is_whole, _, _) = over_tcp(2, _say_and_forget)
    assert is_whole and before == after


class _Call(RankCall):
    """A call whose errors name who is missing."""

    def late(self, missing: Sequence[int], word: str, waited: float) -> TimeoutError:
        return TimeoutError(f"{word}: {missing}")


class _CountingStore:
    """A HashStore that counts what it is asked for, but not looks in vain."""

    def __init__(self) -> None:
        self.store, self.count = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.store, name)

        def call(*arguments: Any) -> Any:
            found = operation(*arguments)
            self.count += name != "check" or bool(found)
            return found

        return call


def in_threads(world_size: int, store: Any, function: Callable[[RankStore], Any]) -> list[Any]:
    """Calls the function on ranks that are threads of this process, and share this store."""

    def run(rank: int) -> Any:
        return function(RankStore(store, rank, world_size, token="token"))

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(run, range(world_size)))


def test_all_ranks_get_what_each_says_and_the_next_step_removes_it() -> None:
    store = _CountingStore()

    def steps(ranks: RankStore) -> list[list[int]]:
        calls = [_Call(ranks, "test") for _ in range(3)]
        return [call.together(f"{step}", 10 * step + ranks.rank, int, 60.0) for call in calls for step in range(3)]

    assert in_threads(4, store, steps) == [[[10 * step + rank for rank in range(4)] for step in range(3)] * 3] * 4
    assert store.store.num_keys() == 4 + 1  # the last step of the last call


def test_a_step_takes_no_more_messages_than_it_must() -> None:
    store = _CountingStore()
    in_threads(4, store, lambda ranks: _Call(ranks, "test").together("step", "short", str, 60.0))
    said, heard = 4 + 1, 3 + 3
    assert store.count == said + 2 * heard


def test_who_is_missing_in_a_step_is_told() -> None:
    def step(ranks: RankStore) -> str:
        if ranks.rank == 2:
            return ""
        with pytest.raises(TimeoutError) as raised:
            _Call(ranks, "test").together("step", 1, int, 0.2)
        return str(raised.value)

    assert in_threads(3, dist.HashStore(), step) == ["step/2: [2]", "step/all: [2]", ""]


def test_the_last_rank_that_has_heard_all_removes_the_words() -> None:
    store = dist.HashStore()

    def hear(ranks: RankStore) -> Any:
        call = _Call(ranks, "test")
        if ranks.rank == 0:
            return call.say("word", [1, 2])
        found = call.hear("word", list[int], time.monotonic() + 60)
        call.done_with("word")
        return found

    assert in_threads(3, store, hear) == [None, [1, 2], [1, 2]] and store.num_keys() == 0


@pytest.mark.parametrize("kind", ["CorruptionError", "NoSuchPathError", "KeyboardInterrupt"])
def test_an_error_of_a_rank_that_leaves_is_that_error_for_all(kind: str) -> None:
    """Also one that is a RuntimeError, as torch's error for a store that is gone."""

    def step(ranks: RankStore) -> BaseException | None:
        snapshot = SnapshotCall(ranks, 60.0)
        if ranks.rank == 1:
            return snapshot.leave(RankError(kind, "why", 1))
        with pytest.raises(memstore.MemstoreError) as raised:
            snapshot.hear("word", int, time.monotonic() + 60, 1)
        assert snapshot.lost
        return raised.value

    error, _ = in_threads(2, dist.HashStore(), step)
    known = getattr(memstore.errors, kind, None)
    assert type(error) is (known or memstore.MemstoreError) and "rank 1" in str(error) and "why" in str(error)


def _take_again_and_again(rank: int, store: Any, folder: str) -> list[int]:
    counts: list[int] = []
    for number in range(4):
        snapshot = Snapshot.take(f"{folder}/{number}", {"state": StateDict(rank=rank)})
        snapshot.restore({"state": StateDict()})
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def _rank_0_ends_at_once(rank: int, store: Any, folder: str, fails: bool) -> str:
    """It has the group's store, and the other rank hears slowly."""
    if rank == 1:
        pause = time.sleep
        time.sleep = lambda _: pause(0.1)  # type: ignore[assignment]
    state = {"state": StateDict(rank=rank), **({"other": StateDict()} if fails and rank == 0 else {})}
    try:
        snapshot = Snapshot.take(f"{folder}/{fails}", {"state": StateDict(rank=rank)})
        snapshot.restore(state)
    except memstore.MemstoreError as error:
        return str(error)
    return "restored"


def test_rank_0_may_end_when_a_call_returns_and_takes_the_store_with_it(tmp_path: Path) -> None:
    for fails, want in ((False, "restored"), (True, "other: the snapshot has nothing of this name")):
        outcomes = over_tcp(2, _rank_0_ends_at_once, str(tmp_path), fails)
        assert all(want in outcome for outcome in outcomes), outcomes


def test_snapshots_leave_no_more_words_in_the_store_than_the_first_one(tmp_path: Path) -> None:
    counts, _ = over_tcp(2, _take_again_and_again, str(tmp_path))
    assert len(set(counts[1:])) == 1, counts


def _rank_0_dies(rank: int, store: Any, folder: str) -> str:
    state: dict[str, Any] = {"state": _Deadly() if rank == 0 else StateDict()}
    try:
        Snapshot.take(f"{folder}/snapshot", state)
    except memstore.MemstoreError as error:
        return str(error)
    return ""


class _Deadly(StateDict):
    def state_dict(self) -> dict[str, Any]:
        faults.die()
        return {}


def test_when_rank_0_dies_with_the_store_the_others_are_told_at_once(tmp_path: Path) -> None:
    _, said = over_tcp(2, _rank_0_dies, str(tmp_path), dead=(0,))
    assert "rank 0" in said and "died" in said
