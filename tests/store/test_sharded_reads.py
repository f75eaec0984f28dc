"""What ranks have put, each a part, is read whole, in parts and through views."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict

import memstore
from memstore import TensorShard
from memstore.sharding import Box, narrow_to
from tests.boxed import grid
from tests.support.equality import assert_same

pytestmark = pytest.mark.embedded


_attempts = itertools.count()


@pytest.fixture(params=[False, True], ids=["plain", "checksums"])
def shared(root: str, request: pytest.FixtureRequest) -> Iterator[memstore.Store]:
    with memstore.open(root, checksum=request.param, verify=request.param) as store:
        yield store


def shard(tensor: torch.Tensor, box: Box) -> TensorShard:
    return TensorShard(narrow_to(tensor, box).clone(), tuple(tensor.shape), box.offsets)


def put_in_boxes(store: memstore.Store, key: str, tensor: torch.Tensor, boxes: Sequence[Box], **more: Any) -> int:
    """A rank for each box; rank 0 also puts what else there is."""
    attempt = f"attempt {next(_attempts)}"
    puts: list[Any] = [
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


_WITHOUT_TENSORS: dict[str, Any] = {
    "dict": {"a": 1},
    "empty dict": {},
    "nested": {"b": {"a": 1, "c": [1, 2]}, "d": {}},
    "list": [1, 2],
    "list of dicts": [{"lr": 1.0, "params": [0, 1]}],
    "tuple with dicts": ({"a": ({"b": {}},)}, [{}]),
    "ordered": OrderedDict({"a": 1, "b": OrderedDict({"c": 2})}),
    "keys": {1: 2, 2.5: 3, (1, 2): {"a": 4}},
    "object": SimpleNamespace(a=1, b=[2]),
    "deque": deque([1, {"a": 2}]),
    "tensordict": TensorDict({}),
    "beside tensors": {"t": torch.ones(2), "c": {"d": {"e": 1}}, "l": [torch.ones(1), {"z": 1}]},
}


@pytest.mark.parametrize("meta", _WITHOUT_TENSORS.values(), ids=list(_WITHOUT_TENSORS))
def test_containers_without_tensors_meet_those_of_targets(store: memstore.Store, meta: Any) -> None:
    value = torch.randn(4, 2)
    put_in_boxes(store, "key", value, grid(2)(0, (4, 2)) or (), meta=meta)
    expected = {"w": value, "meta": meta}
    for target in (store.get("key"), {"w": torch.zeros(4, 2), "meta": copy.deepcopy(meta)}):
        assert_same(store.get("key", like=target), expected)
        assert_same(store.get("key", out=target), expected)
    part_of_it = {"w": shard(torch.zeros(4, 2), Box((1, 0), (2, 2))), "meta": copy.deepcopy(meta)}
    got = store.get("key", out=part_of_it)
    assert_same(got["meta"], meta)
    assert torch.equal(got["w"].local, value[1:3])
    assert_same(store.get("key", like=part_of_it)["meta"], meta)


def test_the_state_of_an_optimizer_is_filled(store: memstore.Store) -> None:
    def stepped() -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.randn(4, 2))
        optimizer = torch.optim.AdamW([weight], lr=torch.rand(()).item())
        weight.grad = torch.randn(4, 2)
        cast("Any", optimizer).step()
        return optimizer.state_dict()

    saved, other = stepped(), stepped()
    put_in_boxes(store, "key", torch.ones(4, 2), grid(2)(0, (4, 2)) or (), optimizer=saved)
    store.get("key", out={"w": torch.zeros(4, 2), "optimizer": other})
    assert_same(other, saved)
    without_tensors = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5).state_dict()
    put_in_boxes(store, "key", torch.ones(4, 2), grid(2)(0, (4, 2)) or (), optimizer=without_tensors)
    changed = copy.deepcopy(without_tensors)
    changed["param_groups"][0]["lr"] = 0.25
    store.get("key", out={"w": shard(torch.ones(4, 2), Box((0, 0), (1, 2))), "optimizer": changed})
    assert changed == without_tensors


def test_a_rank_fills_a_dict_of_which_others_have_the_tensors(store: memstore.Store) -> None:
    put: Any = None
    for rank, held in enumerate(({"step": 3}, {"t": torch.ones(2)})):
        put = store.put_sharded(
            "key", {"w": shard(torch.ones(2, 2), Box((rank, 0), (1, 2))), "m": held},
            attempt="one", rank=rank, world_size=2, wait=False,
        )  # fmt: skip
    put.wait(10)
    out = {"w": shard(torch.zeros(2, 2), Box((0, 0), (1, 2))), "m": {"step": 0}}
    assert store.get("key", out=out)["m"] == {"step": 3}


def test_weights_are_put_together_one_after_the_other(shared: memstore.Store) -> None:
    size = 4 << 20
    tied = torch.nn.Parameter(torch.randn(1 << 20))
    whole = {f"w{i}": torch.randn(1 << 10, 1 << 10) for i in range(6)}
    for rank in range(2):
        value: dict[str, Any] = {n: shard(w, Box((0, rank * 512), (1 << 10, 512))) for n, w in whole.items()}
        if not rank:
            value |= {"bias": tied, "head": tied, "step": 3}
        put = store_part(shared, value, rank)
    put.wait(10)
    weights = memstore.iter_weights(shared, "model", prefix="w", names=lambda name: None if name == "3" else name)
    for name in "01245":
        before = memstore.bytes_read()
        found, weight = next(weights)
        read = memstore.bytes_read() - before
        assert found == name and torch.equal(weight, whole[f"w{name}"])
        assert read <= 2 * size, "checked and read, and no other"
        assert weight.untyped_storage().nbytes() == size
    assert next(weights, None) is None
    everything = dict(memstore.iter_weights(shared, "model"))
    assert everything["bias"] is everything["head"] and torch.equal(everything["bias"], tied)
    assert isinstance(everything["bias"], torch.nn.Parameter)
    everything["w0"].zero_()
    assert torch.equal(dict(memstore.iter_weights(shared, "model"))["w0"], whole["w0"])


def store_part(store: memstore.Store, value: Any, rank: int) -> Any:
    return store.put_sharded("model", value, attempt="weights", rank=rank, world_size=2, wait=False)
