"""Sharded puts and gets as ranks make them: what tests/ranks runs on them."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import memstore
from memstore import TensorShard
from tests.ranks.meshes import mesh_of


def shard(rows: int = 2, columns: int = 3, value: float | None = None) -> TensorShard:
    """This rank's rows of a tensor whose values are the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    local = torch.full((rows, columns), float(rank) if value is None else value)
    return TensorShard(local, (rows * size, columns), (rows * rank, 0))


@contextmanager
def warnings_of_memstore() -> Any:
    """The texts that memstore logs meanwhile."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("memstore")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def put(root: str, key: str = "key", **options: Any) -> Any:
    with memstore.open(root) as store:
        return store.put_sharded(key, {"w": shard()}, **options)


# --- values that not all ranks hold alike -----------------------------------------------------------------------------


def put_stages(root: str) -> Any:
    """Each rank holds other layers, and all a few."""
    rank = dist.get_rank()
    value = {
        "layers": {f"layer{rank}": {"weight": torch.full((3, 2), rank), "name": f"stage {rank}"}},
        "norm": torch.arange(4.0),
        "sizes": [1, 2, 3],
    }
    with memstore.open(root) as store:
        return store.put_sharded("key", value)


def put_buffers(root: str, differs_on: int) -> tuple[Any, list[str]]:
    value = {"mean": torch.full((3,), float(dist.get_rank() == differs_on)), "steps": 7 + (dist.get_rank() == 1)}
    with memstore.open(root) as store, warnings_of_memstore() as texts:
        return store.put_sharded("key", value), texts


def put_replicas(root: str, differs_on: int | None) -> Any:
    """Rows on two ranks, and each of them on two more."""
    mesh = mesh_of((2, 2))
    local = torch.arange(6.0).reshape(2, 3)
    if dist.get_rank() == differs_on:
        local[1, 1] = 99
    tensor = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    with memstore.open(root) as store:
        return store.put_sharded("key", {"layer": {"w": tensor}})


def put_parameters(root: str) -> int:
    local = torch.full((1, 3), float(dist.get_rank()))
    spread = DTensor.from_local(local, mesh_of((4,)), [Shard(0)], run_check=False)
    value = {"parameter": torch.nn.Parameter(spread), "frozen": torch.nn.Parameter(spread.detach(), False)}
    with memstore.open(root) as store:
        return store.put("key", value)  # a put of DTensors is a put_sharded


# --- calls that fail --------------------------------------------------------------------------------------------------


def put_partial(root: str, timeout: float) -> Any:
    tensor = DTensor.from_local(torch.ones(2, 2), mesh_of((4,)), [Partial()], run_check=False)
    with memstore.open(root) as store:
        return store.put("key", {"a": {"w": tensor}}, timeout=timeout)  # a put_sharded, of what it refuses too


def put_unless(root: str, bad: int, timeout: float) -> Any:
    """One rank's value can't be stored."""
    value = {"w": shard(), "other": threading.Lock() if dist.get_rank() == bad else 1}
    with memstore.open(root) as store:
        return store.put_sharded("key", value, timeout=timeout)


def put_more_than_there_is_room_for(root: str, bad: int) -> Any:
    large = {"large": torch.ones(4 << 20)} if dist.get_rank() == bad else {}
    with memstore.open(root) as store:
        return store.put_sharded("key", {"w": shard(), **large}, timeout=600)


def put_shapes(root: str, other: int) -> Any:
    columns = 4 if dist.get_rank() == other else 3
    with memstore.open(root) as store:
        return store.put_sharded("key", {"w": shard(columns=columns)}, timeout=60)


def put_and_look(root: str, count: int) -> list[int]:
    """Many puts; those whose number is odd fail on one rank, or are given up."""
    versions: list[int] = []
    with memstore.open(root) as store:
        for i in range(count):
            bad = i % 2 == 1 and dist.get_rank() == i % dist.get_world_size()
            value = {"w": shard(value=float(i)), "other": threading.Lock() if bad else i}
            try:
                versions.append(int(store.put_sharded("key", value, timeout=60)))  # type: ignore[arg-type]
            except (memstore.errors.PartialCommitError, memstore.errors.UnsupportedValueError):
                versions.append(0)
    return versions


def put_expecting(root: str, expected: int) -> Any:
    return put(root, expect_version=expected, timeout=60)


# --- process groups ---------------------------------------------------------------------------------------------------


def put_named_steps(root: str, left_out: int) -> list[list[float]]:
    """What is stored after each of four steps, of which rank 1 leaves one out."""
    seen: list[list[float]] = []
    with memstore.open(root) as store:
        for i in range(4):
            if i == left_out and dist.get_rank() == 1:
                continue
            try:
                store.put_sharded(
                    "key", {"w": shard(value=float(i))}, attempt=f"step {i}", timeout=1 + 4 * (i != left_out)
                )
            except memstore.errors.StoreTimeoutError as error:
                assert i == left_out and f"attempt 'step {i} " in str(error), error
            else:
                seen.append(store.get("key")["w"].unique().tolist())
    return seen


def put_in_groups(root: str) -> tuple[int, int]:
    """The even and the odd ranks put at once, each in a group of their own."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    value = TensorShard(torch.full((1, 2), float(rank)), (2, 2), (rank // 2, 0))
    with memstore.open(root) as store:
        own = int(store.put_sharded(f"group{rank % 2}", {"w": value}, process_group=groups[rank % 2]))  # type: ignore[arg-type]
        all_of_them = int(store.put_sharded("all", {"w": shard()}))  # type: ignore[arg-type]
    return own, all_of_them


def put_in_a_later_group(root: str) -> int:
    """Two groups, one after the other, with one store. In each a rank has put alone, in the later one rank 1 first."""
    rank, world = dist.get_rank(), dist.distributed_c10d
    one, two = dist.new_group(), dist.new_group()
    assert isinstance(one, dist.ProcessGroup) and isinstance(two, dist.ProcessGroup)
    shared, groups = world._get_process_group_store(one), world._world.pg_map  # pyright: ignore[reportPrivateUsage]
    groups[two] = (groups[two][0], shared)
    put(root, process_group=one)
    for group, alone in ((one, 0), (two, 1), (two, 0)):
        if rank == alone:
            with pytest.raises(memstore.errors.StoreTimeoutError):
                put(root, process_group=group, timeout=0.1)
        dist.barrier()
    return put(root, process_group=two)


def put_in_a_group_of_others(root: str) -> Any:
    """A group that this process isn't in: an error at once."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    with memstore.open(root) as store:
        return store.put_sharded("key", {"w": shard()}, process_group=groups[1 - dist.get_rank()])


def put_by_threads(root: str, count: int) -> dict[str, list[int]]:
    """Two threads put at once, each its own key: in what order they come is another on each rank."""
    versions: dict[str, list[int]] = {"one": [], "two": []}
    with memstore.open(root) as store:

        def run(key: str) -> None:
            for i in range(count):
                versions[key].append(int(store.put_sharded(key, {"w": shard(value=float(i))})))  # type: ignore[arg-type]

        threads = [threading.Thread(target=run, args=(key,)) for key in sorted(versions, reverse=dist.get_rank() == 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return versions


def begin_again(path: str) -> None:
    """Ends the default process group, and begins another, as a script does that trains twice."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)


_stores: dict[int, dist.TCPStore] = {}


def begin_again_in_one_store(port: int, prefix: str) -> None:
    """As `begin_again`, but all groups have one store, which outlives them; each with a prefix, as by torchrun.

    Without prefixes torch's own ranks mix: one may connect to where another has listened in the former group.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if port not in _stores:
        _stores[port] = dist.TCPStore("localhost", port, None, False)
    dist.destroy_process_group()
    store = dist.PrefixStore(prefix, _stores[port])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


# --- processes that go ------------------------------------------------------------------------------------------------


def put_and_exit(root: str) -> None:
    store = memstore.open(root)
    store.put_sharded("key", {"w": shard()}, wait=False)
    os._exit(0)


def put_without_waiting(root: str) -> tuple[int, bool]:
    with memstore.open(root) as store:
        pending = store.put_sharded("key", {"w": shard()}, wait=False)
        assert isinstance(pending, memstore.PendingPut)
        return pending.wait(60), pending.done()
