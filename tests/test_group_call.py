"""What ranks say to each other through the store of their group: of any length, and gone when all have heard it."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch.distributed as dist

from memstore import Snapshot, StateDict
from memstore.group_call import GroupCall
from tests.children import Child, Wire

LONG = b"x" * (9 << 20)  # more than torch's TCPStore takes at once


def over_tcp(world_size: int, function: Any, *arguments: Any) -> list[Any]:
    """`function(rank, store, *arguments)` on ranks whose group has a TCPStore, as torchrun's have."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = [Child(_rank, rank, world_size, port, function, arguments) for rank in range(world_size)]
    try:
        return [child.receive(60) for child in children]
    finally:
        for child in children:
            child.__exit__()


def _rank(wire: Wire, rank: int, world_size: int, port: int, function: Any, arguments: tuple[Any, ...]) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = function(rank, store, *arguments)
    dist.barrier()  # rank 0 has the store
    return found


def _say_and_forget(rank: int, store: Any) -> tuple[bool, int, int]:
    assert dist.group.WORLD is not None
    call = GroupCall(dist.group.WORLD, "test")
    if rank == 0:
        before = store.num_keys()
        call.say("long", LONG)
        while not call.is_said("heard"):
            time.sleep(0.001)
        call.forget("long", "heard", "never said")
        return True, before, store.num_keys()
    while (heard := call.hear("long")) is None:
        time.sleep(0.001)
    call.say("heard", b"")
    return heard == LONG, 0, 0


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


def test_snapshots_leave_no_more_words_in_the_store_than_the_first_one(tmp_path: Any) -> None:
    counts, _ = over_tcp(2, _take_again_and_again, str(tmp_path))
    assert len(set(counts[1:])) == 1, counts
