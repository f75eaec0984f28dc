"""What ranks have put, each a part, is read whole, in parts and through views."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstore
from memstore import TensorShard
from memstore.sharding import Box, part
from memstore.testing.equality import assert_same
from tests.boxed import grid, partitions

pytestmark = pytest.mark.embedded


_attempts = itertools.count()


@pytest.fixture(params=[False, True], ids=["plain", "checksums"])
def shared(root: str, request: pytest.FixtureRequest) -> Iterator[memstore.Store]:
    with memstore.open(root, checksum=request.param, verify=request.param) as store:
        yield store


def shard(tensor: torch.Tensor, box: Box) -> TensorShard:
    return TensorShard(part(tensor, box).clone(), tuple(tensor.shape), box.offsets)


def put_in_boxes(store: memstore.Store, key: str, tensor: torch.Tensor, boxes: Sequence[Box], **more: Any) -> int:
    """A rank for each box; rank 0 also puts what else there is."""
    attempt = f"attempt {next(_attempts)}"
    puts = [
        store.put_sharded(
            key,
            {"w": shard(tensor, box)} | (more if not rank else {}),
            attempt=attempt,
            rank=rank,
            world_size=len(boxes),
            wait=False,
        )
        for rank, box in enumerate(boxes)
    ]
    return puts[-1].wait(10)


def test_whole_gets(shared: memstore.Store, reads: Callable[[], Any]) -> None:
    value = torch.randn(9, 8)
    more = {"bias": torch.randn(5), "epoch": 3, "p": torch.nn.Parameter(torch.randn(2, 3).T)}
    put_in_boxes(shared, "key", value, grid(2, 2)(0, (9, 8)) or (), **more)
    with reads() as count:
        assert_same(shared.get("key"), {"w": value, **more})
        assert count() == value.nbytes
    assert_same(shared.ref("key").get(), {"w": value, **more})
    assert_same(shared.get_many(["key"])["key"], {"w": value, **more})
    assert torch.equal(shared.get("key", dtype=torch.float64)["w"], value.double())
    assert shared.verify().ok
    got = shared.get("key")
    got["w"].zero_()
    shared.put("key", 1)
    assert not got["w"].any()


def test_a_pending_put_doesnt_pickle(shared: memstore.Store) -> None:
    put = shared.put_sharded("key", 1, attempt="one", rank=0, world_size=2, wait=False)
    with pytest.raises(TypeError, match=r"store.pending\(key\)"):
        pickle.dumps(put)


def test_targets_and_views(shared: memstore.Store, reads: Callable[[], Any]) -> None:
    value = torch.randn(9, 8)
    put_in_boxes(shared, "key", value, grid(3, 2)(0, (9, 8)) or (), bias=torch.randn(5))
    out = {"w": shard(torch.zeros(9, 8), Box((2, 3), (4, 5)))}
    for source in (shared, shared.ref("key")):
        options: tuple[str, ...] = ("key",) if source is shared else ()
        out["w"].local.zero_()
        with reads() as count:
            source.get(*options, out=out)
            assert count() == 4 * 5 * 4
        assert torch.equal(out["w"].local, value[2:6, 3:])
        assert torch.equal(source.get(*options, like=out)["w"].local, value[2:6, 3:])
        leaf = source.view(*options)["w"]
        for one in (leaf, pickle.loads(pickle.dumps(leaf)), pickle.loads(pickle.dumps(leaf[1:]))):
            assert torch.equal(one, value[9 - len(one) :])
            assert torch.equal(one[2:7, ::3].T, value[9 - len(one) :][2:7, ::3].T)
        assert torch.equal(memstore.read_rows(leaf, [8, 0, 3]), value[[8, 0, 3]])
    held = pickle.dumps(shared.view("key"))
    leaf = shared.view("key")["w"]
    shared.put("key", 2)
    assert torch.equal(leaf, value)
    assert torch.equal(pickle.loads(held)["w"], value)  # its lease keeps all segments


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_from_any_layout(store: memstore.Store, data: Any, shape: tuple[int, ...]) -> None:
    value = torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.bfloat16)
    put_in_boxes(store, "key", value, data.draw(partitions(shape, 3)))
    assert_same(store.get("key"), {"w": value})
    assert torch.equal(store.view("key")["w"], value)
    for box in data.draw(partitions(shape, 3)):
        out = {"w": shard(torch.zeros_like(value), box)}
        assert torch.equal(store.get("key", out=out)["w"].local, part(value, box))
    store.delete("key")


def test_the_damaged_box_is_named(scratch: str) -> None:
    value = torch.ones(8, 4)
    with memstore.open(scratch, checksum=True, verify=True) as store:
        put_in_boxes(store, "key", value, grid(4)(0, (8, 4)) or ())
        path = store.info("key").files[2]
        with open(path, "r+b") as file:
            file.seek(file.read().index(torch.ones(8).numpy().tobytes()) + 5)
            file.write(b"\x01")
        for read in (
            lambda: store.get("key"),
            lambda: store.view("key")["w"].sum(),
            lambda: store.get("key", out={"w": shard(value, Box((3, 0), (2, 4)))}),
        ):
            with pytest.raises(memstore.CorruptionError, match=r"'key'.*box .*at \[4, 0\].* rank 2"):
                read()
        assert store.view("key")["w"][:4].sum() == 16
        assert store.get("key", out={"w": shard(value, Box((0, 0), (2, 4)))})["w"].local.all()
        (damaged,) = store.verify().damaged
        assert damaged.key == "key"
