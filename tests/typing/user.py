"""A user's file that uses every public call, as strict type checkers read it. It is checked, and never run.

`assert_type` says what each call returns; where that is a user's value, it is `Any`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict

import torch
from tensordict import TensorDict
from typing_extensions import assert_type

import memstore
import memstore.aio
import memstore.convert
import memstore.fake
import memstore.ui


class Policy(TypedDict):
    w: torch.Tensor
    step: int


class Counter:
    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def advance(done: int, total: int) -> None:
    print(done, total)


def stores() -> None:
    with memstore.open("/dev/shm/typed", "w", durability="process", checksum=True, capacity="8GiB", wait=None) as store:
        assert_type(store, memstore.Store)
        assert_type(store.root, str)
        assert_type(len(store), int)
        assert_type("policy" in store, bool)
        assert_type(list(store), list[str])
    for found in memstore.stores():
        assert_type(found, memstore.StoreSummary)
        assert_type(found.nbytes, int)
    report = memstore.repair("/dev/shm/typed", progress=advance)
    assert_type(report, memstore.RepairReport)
    assert_type(report.recovered, tuple[str, ...])
    memstore.destroy("/dev/shm/typed")


def puts_and_gets(store: memstore.Store) -> None:
    tensor = torch.zeros(3)
    assert_type(store.put("policy", {"w": tensor}, dtype=torch.bfloat16, expect_version=0, history=3), int)
    assert_type(store.put_many({"a": tensor, "b": 1}, atomic=False), dict[str, int])
    assert_type(store.update({"a": 1}), dict[str, int])
    assert_type(store.get("policy", as_type=torch.Tensor), torch.Tensor)
    assert_type(store.get("policy", as_type=TensorDict), TensorDict)
    assert_type(store.get("policy", as_type=Policy)["step"], int)
    assert_type(store.get("policy", as_type=dict[str, torch.Tensor])["w"], torch.Tensor)
    assert_type(store.get("policy", None, as_type=torch.Tensor), torch.Tensor | None)
    assert_type(store.get("policy", as_type=TensorDict, device="cpu", version=3), TensorDict)
    value: dict[str, torch.Tensor] = store.get("policy", out={"w": tensor}, strict=False, cast=True, timeout=1.0)
    print(value, store["policy"], store.get("policy", 5))
    store["policy"] = tensor
    store.setdefault("seed", 7)
    store.pop("seed", None)
    assert_type(store.get_many(["a", "b"]), dict[str, Any])
    assert_type(list(store.items()), list[tuple[str, Any]])
    assert_type(list(store.values()), list[Any])
    assert_type(list(store.keys("run/", partial=True)), list[str])
    assert_type(store.delete("a", missing_ok=True), bool)
    assert_type(store.delete_many(["a", "b"]), int)
    assert_type(store.clear("run/"), int)
    del store["b"]


def looks(store: memstore.Store) -> None:
    assert_type(store.version("policy"), int)
    assert_type(store.versions("policy"), tuple[int, ...])
    assert_type(store.wait("policy", newer_than=3, timeout=1.0), int)
    assert_type(store.wait_any(["a", "b"], newer_than={"a": 1}), dict[str, int])
    info = store.info("policy")
    assert_type(info, memstore.EntryInfo)
    for leaf in info.leaves:
        assert_type(leaf, memstore.LeafInfo)
        assert_type(leaf.dtype, torch.dtype)
        for shard in leaf.shards:
            assert_type(shard, memstore.ShardInfo)
    assert_type(store.stats(), memstore.StoreStats)
    assert_type(store.stats().capacity, int | None)
    assert_type(store.set_quota("run/", "8GiB"), memstore.QuotaInfo | None)
    assert_type(store.quotas(), tuple[memstore.QuotaInfo, ...])
    assert_type(store.gc(), int)
    assert_type(str(store.tree("run/")), str)
    assert_type(store.verify(["policy"], progress=advance), memstore.VerifyReport)


def references_and_views(store: memstore.Store) -> None:
    ref = store.ref("policy", lease=60.0)
    assert_type(ref, memstore.Ref)
    assert_type(ref.get(as_type=torch.Tensor), torch.Tensor)
    print(ref.get(default=None), ref.view())
    with store.pin("policy") as pin:
        assert_type(pin, memstore.Pin)
        assert_type(pin.version, int)
        assert_type(pin.key, str)
        assert_type(pin.root, str)
    pin.close()
    lazy = store.view("policy", as_type=memstore.StoredTensor)
    assert_type(lazy, memstore.StoredTensor)
    assert_type(store.view("policy", as_type=dict[str, memstore.StoredTensor])["w"], memstore.StoredTensor)
    print(store.view("policy", version=3))
    assert_type(memstore.bytes_read(), int)
    memstore.prefetch_rows(lazy, [1, 2])
    print(memstore.read_rows(lazy, [1, 2]))


def files(store: memstore.Store) -> None:
    assert_type(store.attach("weights", "model.safetensors", copy=False), int)
    store.export("weights", "other.safetensors", max_shard_size="5GB")
    store.export_hf("model", "folder", config={"model_type": "gpt2"}, dtype=torch.bfloat16)
    converted = memstore.convert.convert("in.pt", "out.safetensors")
    assert_type(converted, memstore.convert.Converted)


def models_and_shards(store: memstore.Store) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    assert_type(store.save_model("model", model, optimizer, dtype=torch.bfloat16), int)
    assert_type(store.load_model("model", model, optimizer, strict=False, cast=True, newer_than=3), int)
    for name, tensor in memstore.iter_weights(store, "model", prefix="model."):
        assert_type(name, str)
        assert_type(tensor, torch.Tensor)
    shard = memstore.TensorShard(torch.zeros(2), (4,), (0,))
    assert_type(store.put_sharded("sharded", shard, attempt="1", rank=0, world_size=2), int)
    pending = store.put_sharded("sharded", shard, attempt="1", rank=0, world_size=2, wait=False)
    assert_type(pending, memstore.PendingPut)
    assert_type(pending.wait(1.0), int)
    assert_type(pending.done(), bool)
    assert_type(store.pending("sharded"), tuple[memstore.PendingInfo, ...])
    assert_type(store.abort("sharded", "1"), bool)


def followers(store: memstore.Store) -> None:
    model = torch.nn.Linear(2, 2)
    with memstore.follow(store, "model", model, every=1.0) as follower:
        assert_type(follower, memstore.Follower[torch.nn.Linear])
        assert_type(follower.wait(newer_than=3), int)
        assert_type(follower.status(), memstore.FollowerStatus)
        with follower.use() as (module, version):
            assert_type(module, torch.nn.Linear)
            assert_type(version, int)
        assert_type(follower.model, torch.nn.Linear)
        assert_type(follower.version, int)
        assert_type(follower.error, Exception | None)
        assert_type(follower.key, str)
        follower.close(timeout=1.0)


def rows(store: memstore.Store) -> None:
    spec = {"obs": ((4,), torch.float32), "done": ((), torch.bool)}
    dataset = store.create_dataset("rows", spec, capacity=100)
    assert_type(dataset, memstore.Dataset)
    assert_type(store.open_dataset("rows", "r"), memstore.Dataset)
    assert_type(store.create_dataset_from("copy", {"x": torch.zeros(3)}), memstore.Dataset)
    assert_type(dataset.extend({"obs": torch.zeros(2, 4)}), range)
    assert_type(len(dataset), int)
    assert_type(dataset.seal(), int)
    dataset.flush()
    limiter = memstore.RateLimiter(4.0, 100, 400.0)
    buffer = memstore.ReplayBuffer(store, "replay", spec, capacity=100, sampler="prioritized", rate_limiter=limiter)
    assert_type(buffer.sample(32), TensorDict)
    assert_type(buffer.sample_slices(8, 3), TensorDict)
    assert_type(buffer.extend({"obs": torch.zeros(2, 4)}), torch.Tensor)
    assert_type(buffer.add({"obs": torch.zeros(4)}, priority=1.0), int)
    assert_type(buffer.update_priority(torch.tensor([1]), torch.tensor([0.5])), int)
    assert_type(buffer.cursor, int)
    loader = torch.utils.data.DataLoader(memstore.StoreDataset(store, "rows"), sampler=memstore.BlockShuffle(100))
    print(loader)


def checkpoints() -> None:
    state: memstore.AppState = {"model": torch.nn.Linear(2, 2), "progress": memstore.StateDict(step=7)}
    state |= {"random": memstore.RNGState(), "counter": Counter()}
    counter: memstore.Stateful = Counter()
    print(counter)
    snapshot = memstore.Snapshot.take("/checkpoints/1", state, progress=advance, base="latest", then=["/disk/1"])
    assert_type(snapshot, memstore.Snapshot)
    pending = memstore.Snapshot.async_take("/checkpoints/2", state)
    assert_type(pending, memstore.PendingSnapshot)
    assert_type(pending.wait(), memstore.Snapshot)
    snapshot.restore(state, strict=False)
    snapshot.verify()
    print(snapshot.read_object("0/model/weight"), snapshot.get_manifest(), snapshot.metadata)
    assert_type(snapshot.view(), dict[str, Any])
    assert_type(snapshot.get_state_dict_for_key("model"), dict[str, Any])
    assert_type(snapshot.copy("/disk/1", durability="process", progress=advance), memstore.Snapshot)
    with memstore.CheckpointManager("/checkpoints", keep_last=3, keep_best=2, best="min", metric="loss") as manager:
        manager.save_on_signal()
        assert_type(manager.save(100, state, metrics={"loss": 0.1}, force=True), bool)
        assert_type(manager.restore(state), int)
        assert_type(manager.latest(), int | None)
        assert_type(manager.best(), int | None)
        assert_type(manager.steps(), list[int])
        assert_type(manager.stopping, bool)
        assert_type(manager.root, str)
        manager.wait(timeout=1.0)
    manager.close()


def deferred() -> None:
    model = memstore.deferred_init.deferred_init(torch.nn.Linear, 2, 2)
    assert_type(model, torch.nn.Linear)
    memstore.deferred_init.materialize_module(model)
    with memstore.fake.fake_mode():
        assert_type(memstore.fake.is_fake(torch.zeros(3)), bool)


def hosts() -> None:
    cluster = memstore.join("/dev/shm/typed")
    assert_type(cluster, memstore.Cluster)
    status = cluster.status()
    assert_type(status, memstore.ClusterStatus)
    assert_type(status.hosts, tuple[memstore.HostStatus, ...])
    assert_type(memstore.Cluster.at("tcp://10.0.0.1:7411", secret=b"secret"), memstore.Cluster)
    assert_type(cluster.root, str)
    assert_type(cluster.hosts, tuple[str, ...])
    assert_type(cluster.address, str)
    assert_type(cluster.secret, bytes | None)
    assert_type(cluster.roster().epoch, int)
    assert_type(cluster.settled(["tcp://10.0.0.1:7411"]), list[str])
    cluster.set_policy("run/", replicas=2, on_missing="warn")
    cluster.set_quota("run/", 1 << 30)
    assert_type(cluster.drain("trainer", progress=advance), str)
    assert_type(cluster.cancel_drain("trainer"), str)
    assert_type(cluster.promote(), str)
    assert_type(cluster.remove("trainer", force=True), str)
    cluster.stop()


def figures(store: memstore.Store) -> None:
    memstore.metrics.count_calls()
    memstore.metrics.trace_calls()
    memstore.metrics.stop_calls()
    assert_type(memstore.metrics.calls(), dict[str, memstore.metrics.CallCount])
    assert_type(memstore.metrics.prometheus(store, keys=10), str)
    assert_type(memstore.metrics.scalars(store), dict[str, float])

    def show(found: Any, step: int) -> None:
        print(found, step)

    assert_type(memstore.metrics.ScalarLogger(store, show)(3), bool)
    with memstore.ui.serve("/dev/shm/typed", port=0) as page:
        assert_type(page.url, str)


def errors(store: memstore.Store) -> None:
    try:
        store.get("nothing")
    except memstore.KeyNotFoundError as error:
        assert_type(error.key, str | None)
    except memstore.StoreFullError as error:
        assert_type(error.needed, int | None)
    except (memstore.MemstoreError, memstore.CorruptionError, memstore.StoreTimeoutError) as error:
        print(error)


async def tasks() -> None:
    async with memstore.aio.open("/dev/shm/typed") as store:
        assert_type(store, memstore.aio.AsyncStore)
        assert_type(await store.put("policy", torch.zeros(3)), int)
        assert_type(await store.get("policy", as_type=torch.Tensor), torch.Tensor)
        assert_type(await store.get("policy", None, as_type=torch.Tensor), torch.Tensor | None)
        assert_type(await store.view("policy", as_type=memstore.StoredTensor), memstore.StoredTensor)
        assert_type(await store.wait("policy"), int)
        assert_type(await store.stats(), memstore.StoreStats)
        async for key in store.keys():
            assert_type(key, str)
        async with memstore.aio.follow(store, "model", torch.nn.Linear(2, 2)) as follower:
            assert_type(follower, memstore.aio.AsyncFollower[torch.nn.Linear])
            assert_type(await follower.wait(newer_than=3), int)
            async with follower.use() as (module, version):
                assert_type(module, torch.nn.Linear)
                assert_type(version, int)


def names(store: memstore.Store) -> Iterator[str]:
    yield from store.keys()
