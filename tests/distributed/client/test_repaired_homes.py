"""The home of keys is repaired whose bytes, or parts, lie on other hosts: its records still name them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

import memstore
from memstore import TensorShard
from memstore.errors import UnknownOutcomeError
from tests.distributed.client.hosts import await_
from tests.distributed.homes import Home, join

BIG = torch.arange(5000.0)
ROWS, COLUMNS = 4, 1000


def shard(rank: int, world: int = 2) -> dict[str, TensorShard]:
    return {"w": TensorShard(torch.full((ROWS, COLUMNS), float(rank)), (ROWS * world, COLUMNS), (ROWS * rank, 0))}


def put(store: memstore.Store, key: str, rank: int, **options: Any) -> Any:
    return store.put_sharded(key, shard(rank), attempt="one", rank=rank, world_size=2, **options)


def test_values_and_parts_of_other_hosts_are_there_after_a_repair_of_their_home(scratch: str) -> None:
    paths = [f"{scratch}-{name}" for name in "ab"]
    with ExitStack() as stack:
        here = stack.enter_context(memstore.open(paths[0], timeout=20.0))
        other = stack.enter_context(Home(paths[0], is_owner=False))
        with Home(paths[1]) as home, memstore.open(paths[1], timeout=20.0) as there:
            join([other, home])
            version = here.put("there", BIG)
            there.put("mine", BIG + 1)
            kept = [(here, there)[number % 2].put("kept", BIG + number, history=3) for number in range(4)]
            pending = put(here, "sharded", 0, wait=False)
            whole = put(there, "sharded", 1)
            assert pending.wait() == whole
            waiting = put(here, "waits", 0, wait=False)
            address = home.member.address
        del home, there  # they keep the lock page mapped
        report = memstore.repair(paths[1])
        assert report.lost == () and {"there", "mine", "sharded"} <= set(report.recovered)

        with Home(paths[1], address), memstore.open(paths[1], timeout=20.0) as there:
            for store in (here, there):
                assert store.version("there") == version and torch.equal(store.get("there"), BIG)
                assert torch.equal(store.get("mine"), BIG + 1)
                assert store.versions("kept") == tuple(kept[1:])
                for number in range(1, 4):
                    assert torch.equal(store.get("kept", version=kept[number]), BIG + number)
                assert store.version("sharded") == whole
                assert torch.equal(store.get("sharded")["w"], shard_values())
                assert store.verify().ok
            with pytest.raises(UnknownOutcomeError, match="attempt 'one'"):  # no catalog says of it any more
                waiting.wait(timeout=20.0)
            assert "waits" not in there
            assert here.put("there", BIG + 2, expect_version=version) > version
            for key in ("there", "sharded", "mine", "kept"):
                here.delete(key)
            await_(lambda: lent(other) <= {b"waits"})  # an audit asks for that one when its put's time is over


def lent(home: Home) -> set[bytes]:
    return {one.key for _, one in home.look(lambda tables: tables.all_lent(0, 10))}


def shard_values() -> torch.Tensor:
    return torch.arange(2.0).repeat_interleave(ROWS)[:, None].expand(-1, COLUMNS)
