"""Prometheus text: each figure is the store's, and a parser that isn't ours reads it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import memstore
from memstore.distributed.serving import cluster_of
from memstore.metrics import prometheus, scalars
from tests.children import Wire, children
from tests.distributed.serving.agents import eventually, two_hosts

ODD = 'a "key"\\ with\n<b>lines</b> and {braces}'


def figures(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Each value of a text by its name and labels, as Prometheus' own parser reads it."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = parser.text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def value(text: str, name: str, **labels: str) -> float:
    return figures(text)[name, tuple(sorted(labels.items()))]


def test_each_figure_is_the_stores(scratch: str) -> None:
    with memstore.open(scratch, capacity="1GiB") as store:
        before = time.time()
        version = store.put("policy", torch.zeros(1000))
        store.put(ODD, 1)
        store.put("policy", torch.zeros(1000))
        store.set_quota("pol", "1MiB")
        text, stats = prometheus(store), store.stats()
        assert value(text, "memstore_keys") == 2
        assert value(text, "memstore_key_version", key="policy") == version + 2 == store.version("policy")
        assert value(text, "memstore_key_bytes", key="policy") == 4000
        assert before <= value(text, "memstore_key_created_seconds", key="policy") <= time.time()
        assert value(text, "memstore_key_version", key=ODD) == store.version(ODD)
        assert value(text, "memstore_bytes", state="live") == stats.live_bytes > 4000
        assert value(text, "memstore_bytes", state="catalog") == stats.catalog_bytes
        assert value(text, "memstore_capacity_bytes") == 1 << 30
        assert value(text, "memstore_quota_bytes", prefix="pol") == 1 << 20
        assert 4000 <= value(text, "memstore_quota_used_bytes", prefix="pol") < 1 << 16
        assert value(text, "memstore_versions_total") == 3
        store.put_many({"x": 1, "y": 2})
        again = prometheus(store)
        assert value(again, "memstore_versions_total") == 5, "the rate of puts is this one's growth"
        assert value(again, "memstore_publications_total") == value(text, "memstore_publications_total") + 1


def test_rows_are_counted_without_torch(scratch: str) -> None:
    with memstore.open(scratch) as store:
        buffer = memstore.ReplayBuffer(
            store, "buffer", {"x": ((), torch.int64)}, capacity=8, rate_limiter=memstore.RateLimiter(1.0, 1, 100.0)
        )
        buffer.extend({"x": torch.arange(8)})
        buffer.extend({"x": torch.arange(3)})
        buffer.sample(5)
        rows = store.create_dataset("rows", {"x": ((), torch.int64)}, capacity=100, length=3)
        rows.extend({"x": torch.arange(4)})
        program = "import memstore, sys; from memstore.listing import open_keyspace as o; s = o(sys.argv[1], 'r')"
        program += "; sys.stdout.write(memstore.metrics.prometheus(s)); assert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", program, scratch], capture_output=True, text=True, check=True)
    text = done.stdout
    assert value(text, "memstore_rows", key="buffer") == 8 == value(text, "memstore_rows_capacity", key="buffer")
    assert value(text, "memstore_rows_added_total", key="buffer") == 11
    assert value(text, "memstore_rows_sampled_total", key="buffer") == 5
    assert value(text, "memstore_rows", key="rows") == 7
    assert ("memstore_rows_added_total", (("key", "rows"),)) not in figures(text)


def _hold(wire: Wire, _: int, root: str) -> str:
    with memstore.open(root) as store:
        held = store.get("policy")
        wire.send("holds")
        wire.receive()
        return str(held.sum().item())


def test_who_lags_behind_is_told(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put("policy", torch.zeros(20_000))
        with children(1, _hold, scratch) as (child,):
            child.receive()
            pid = str(child.pid)
            assert value(prometheus(store), "memstore_held_bytes", pid=pid) >= 80_000
            assert value(prometheus(store), "memstore_held_replaced_keys", pid=pid) == 0
            store.put("policy", torch.ones(20_000))
            assert value(prometheus(store), "memstore_held_replaced_keys", pid=pid) == 1
            assert value(prometheus(store), "memstore_held_replaced_bytes", pid=pid) >= 80_000
            child.send("end")
            assert child.receive() == "0.0"


def test_how_far_a_follower_lags_is_told(scratch: str) -> None:
    model, name = torch.nn.Linear(2, 2), "memstore_follower_lag_seconds"
    with memstore.open(scratch) as store:
        version = store.put("model", model.state_dict())
        store.put("model/longer", 1)
        assert (name, (("key", "model"),)) not in figures(prometheus(store))
        with memstore.follow(store, "model", model) as follower:
            follower.wait(timeout=60)
            assert value(prometheus(store), name, key="model") == 0 == scalars(store)["lag/model"]
            with follower.use():  # the copy waits
                version, began = store.put("model", model.state_dict()), time.time()
                lag = eventually(lambda: value(prometheus(store), name, key="model"), "it lags behind")
                assert 0 < lag < time.time() - began + 1 and scalars(store)["lag/model"] >= lag
            follower.wait(newer_than=version - 1, timeout=60)
            assert value(prometheus(store), name, key="model") == 0
            store.delete("model")
            assert value(prometheus(store), name, key="model") == 0 == follower.status().lag
        assert (name, (("key", "model"),)) not in figures(prometheus(store))


def test_only_the_first_keys_have_figures_of_their_own(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put_many({f"{number:04}": number for number in range(1500)})
        found = {name for name, labels in figures(prometheus(store, keys=1200)) if labels}
        told = [labels for name, labels in figures(prometheus(store, keys=1200)) if name == "memstore_key_version"]
        assert len(told) == 1200 and (("key", "1199"),) in told and "memstore_key_version" in found
        assert value(prometheus(store, keys=0), "memstore_keys") == 1500


def test_checkpoints_are_told(scratch: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with memstore.CheckpointManager(tmp_path / "run", async_=False) as manager:
        manager.save(100, {"model": model})
        manager.save(200, {"model": model})
    (tmp_path / "run" / "step-000300").mkdir()
    run = str(tmp_path / "run")
    with memstore.open(scratch) as store:
        text = prometheus(store, checkpoints=[run])
        assert value(text, "memstore_checkpoints", root=run) == 2
        assert value(text, "memstore_checkpoints_unfinished", root=run) == 1
        assert value(text, "memstore_checkpoint_step", root=run) == 200


def test_the_command_says_the_same(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put("policy", torch.zeros(1000))
        command = [sys.executable, "-m", "memstore", "metrics", scratch, "--keys", "5"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert value(done.stdout, "memstore_key_version", key="policy") == 1
        gone = subprocess.run([*command[:4], f"{scratch}2"], capture_output=True, text=True)
        assert gone.returncode == 3 and not gone.stdout


@pytest.mark.full
def test_hosts_are_told(scratch: str, tmp_path: Path) -> None:
    with two_hosts(Path(scratch).parent, tmp_path) as (first, second, store, other):
        store.put("policy", torch.zeros(1 << 18))
        other.get("policy")
        eventually(lambda: value(prometheus(store), "memstore_host_sent_bytes_total", host=first.address) > 0, "")
        text = prometheus(store)
        assert value(text, "memstore_host_up", host=first.address) == 1
        assert value(text, "memstore_host_up", host=second.address) == 1
        assert value(text, "memstore_host_keys", host=first.address) == 1
        assert value(text, "memstore_lost_keys") == 0
        other.put_many({"theirs/a": 1, "also theirs/a": 1})
        second.process.kill()
        second.process.wait()
        assert value(prometheus(store), "memstore_host_up", host=second.address) == 0
        cluster_of(first.root).remove(second.address)
        eventually(lambda: value(prometheus(store), "memstore_lost_keys") == 2, "both groups are lost")
