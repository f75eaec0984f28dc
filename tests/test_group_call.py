"""What ranks say to each other through the store of their group: of any length, and gone when all have heard it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import memstore
from memstore import Snapshot, StateDict
from memstore._ranks import RankCall, RankStore
from memstore.snapshot import ranks
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
