"""Counters, spans and scalars of calls: each call is told once, and none where nobody asked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
import memstore.aio
from memstore import _telling as telling
from memstore import metrics
from memstore.metrics import CallCount
from tests.distributed.serving.agents import two_hosts


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    yield
    metrics.stop_calls()


def since(before: dict[str, CallCount]) -> dict[str, int]:
    """How many calls were counted since then."""
    found = {name: one.count - before.get(name, CallCount()).count for name, one in metrics.calls().items()}
    return {name: count for name, count in found.items() if count}


def test_calls_are_counted_with_their_bytes_and_seconds(root: str, tmp_path: Path) -> None:
    metrics.count_calls()
    before = metrics.calls()
    with memstore.open(root) as store:
        store.put("policy", torch.zeros(20_000))
        store.put_many({"a": 1, "b": 2})
        store.get("policy")
        store.get_many(["a", "b"])
        store.ref("policy").get()
        store.view("policy")
        store.wait("policy")
        model = torch.nn.Linear(3, 3)
        snapshot = memstore.Snapshot.take(tmp_path / "one", {"model": model})
        snapshot.restore({"model": model})
        memstore.Snapshot.async_take(tmp_path / "two", {"model": model}).wait()
        for _ in range(3):
            store.put("policy", torch.zeros(20_000))
        store.gc()
        store.put("model", model.state_dict())
        with memstore.follow(store, "model", model) as follower:
            follower.wait(timeout=60)
    counted = since(before)
    assert counted.pop("sweep") >= 1
    assert counted.pop("follow") == 1 and counted.pop("wait") >= 2
    assert counted == {"put": 6, "get": 4, "view": 1, "take": 1, "restore": 1, "async_take": 1}
    found, was = metrics.calls(), before.get("get", CallCount())
    assert found["get"].nbytes - was.nbytes >= 160_000
    assert 0 < found["get"].seconds - was.seconds < 60
    assert found["take"].nbytes - before.get("take", CallCount()).nbytes >= 48


def test_tasks_are_counted_too(root: str) -> None:
    async def use() -> None:
        async with memstore.aio.open(root) as store:
            await store.put("a", torch.zeros(20_000))
            await store.get("a")
            await store.wait("a")

    metrics.count_calls()
    before = metrics.calls()
    asyncio.run(use())
    assert since(before) == {"put": 1, "get": 1, "wait": 1}


def test_a_version_that_goes_for_lack_of_room_is_counted(root: str) -> None:
    metrics.count_calls()
    before = metrics.calls()
    with memstore.open(root, capacity="30MiB") as store:
        for _ in range(6):
            store.put("policy", torch.zeros(1 << 21), history=10)
    assert since(before)["evict"] >= 1


def test_waits_before_a_rate_limiter_are_counted(root: str) -> None:
    metrics.count_calls()
    before = metrics.calls()
    with memstore.open(root) as store:
        limiter = memstore.RateLimiter(1.0, 4, 8.0)
        buffer = memstore.ReplayBuffer(store, "b", {"x": ((), torch.int64)}, capacity=8, rate_limiter=limiter)
        with pytest.raises(memstore.StoreTimeoutError):
            buffer.sample(2, timeout=0.05)
        assert "replay wait" not in since(before), "a wait in vain is an error, and not counted"
        writer = threading.Timer(0.3, lambda: buffer.extend({"x": torch.arange(6)}))
        writer.start()
        buffer.sample(2, timeout=60)
        writer.join()
    assert since(before)["replay wait"] == 1


def test_counting_begins_anew_unless_it_goes_on(root: str) -> None:
    with memstore.open(root) as store:
        metrics.count_calls()
        store.put("a", 1)
        metrics.count_calls()
        store.put("a", 2)
        assert metrics.calls()["put"].count == 2
        metrics.stop_calls()
        assert metrics.calls()["put"].count == 2
        metrics.count_calls()
        store.put("a", 3)
        assert metrics.calls()["put"].count == 1


def test_nothing_is_told_where_nobody_asked(root: str) -> None:
    assert telling.listening.observer is None
    before = metrics.calls()
    with memstore.open(root) as store:
        store.put("a", torch.zeros(20_000))
        store.get("a")
        metrics.count_calls()  # too late for the gets of this store
        store.get("a")
        metrics.stop_calls()
        store.put("a", 1)
    assert since(before) == {}


def test_neither_spans_nor_counters_are_imported_unasked() -> None:
    program = "import memstore, sys; memstore.open; found = [n for n in sys.modules if 'metrics' in n or n.startswith"
    program += "('opentelemetry')]; assert not found, found"
    subprocess.run([sys.executable, "-c", program], check=True)


# --- spans ------------------------------------------------------------------------------------------------------------


def spans_of() -> tuple[Any, Any]:
    """An exporter that keeps spans in memory, and its provider."""
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter, provider = memory.InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    return exporter, provider


def test_each_call_is_a_span_within_the_one_around_it(root: str, tmp_path: Path) -> None:
    exporter, provider = spans_of()
    metrics.trace_calls(provider)
    model = torch.nn.Linear(3, 3)
    with memstore.open(root) as store:
        with provider.get_tracer("test").start_as_current_span("step"):
            store.put("policy", torch.zeros(20_000))
            store.get("policy")
            store.put_many({"a": 1, "b": 2})
        memstore.Snapshot.take(tmp_path / "one", {"model": model}).restore({"model": model})
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"step", "memstore.put", "memstore.get", "memstore.take", "memstore.restore"}
    get, step = spans["memstore.get"], spans["step"]
    assert dict(get.attributes) == {"memstore.root": root, "memstore.key": "policy", "memstore.nbytes": 80_000}
    assert get.parent.span_id == step.context.span_id
    assert step.start_time <= get.start_time <= get.end_time <= step.end_time
    assert spans["memstore.put"].attributes["memstore.keys"] == ("a", "b")
    assert spans["memstore.take"].attributes["memstore.root"] == str(tmp_path / "one")
    assert spans["memstore.take"].parent is None


def test_spans_without_their_package_say_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(memstore.MissingPackageError, match="pip install opentelemetry-api"):
        metrics.trace_calls()
    assert telling.listening.observer is None


@pytest.mark.full
def test_bytes_of_another_host_are_a_transfer(scratch: str, tmp_path: Path) -> None:
    exporter, provider = spans_of()
    metrics.count_calls()
    metrics.trace_calls(provider)
    with two_hosts(Path(scratch).parent, tmp_path) as (_, second, store, other):
        store.put("policy", torch.zeros(1 << 18))
        before = metrics.calls()
        exporter.clear()
        other.get("policy")
        assert since(before) == {"fetch": 1, "get": 1}
        assert metrics.calls()["fetch"].nbytes - before.get("fetch", CallCount()).nbytes == 1 << 20
        spans = {span.name: span for span in exporter.get_finished_spans()}
        assert set(spans) == {"memstore.fetch", "memstore.get"}
        fetch, get = spans["memstore.fetch"], spans["memstore.get"]
        of_both = {"memstore.root": second.root, "memstore.key": "policy", "memstore.nbytes": 1 << 20}
        assert dict(fetch.attributes) == of_both == dict(get.attributes)
        assert get.start_time <= fetch.start_time < fetch.end_time <= get.end_time
        before = metrics.calls()
        other.get("policy")
        assert since(before) == {"get": 1}, "the copy is there"


# --- scalars ----------------------------------------------------------------------------------------------------------


def test_scalars_are_logged_as_values_and_rates(root: str) -> None:
    told: list[tuple[dict[str, float], int]] = []
    metrics.count_calls()
    with memstore.open(root) as store:
        log = metrics.ScalarLogger(store, lambda figures, step: told.append((dict(figures), step)), every=0.0)
        assert log(0)
        store.put("policy", torch.zeros(20_000))
        store.get("policy")
        assert log(7)
    (first, _), (second, step) = told
    assert step == 7 and first["memstore/keys"] == 0 and second["memstore/keys"] == 1
    assert second["memstore/live_bytes"] > 80_000
    assert not [name for name in first if name.endswith("_per_second")]
    assert second["memstore/versions_per_second"] > 0 and second["memstore/bytes/put_per_second"] > 0
    assert second["memstore/calls/get_per_second"] == pytest.approx(second["memstore/versions_per_second"])


def test_a_log_in_between_returns_at_once(root: str) -> None:
    told: list[int] = []
    with memstore.open(root) as store:
        log = metrics.ScalarLogger(store, lambda figures, step: told.append(step), every=1000.0)
        assert [log(0), log(1), log(2)] == [True, False, False]
    assert told == [0]


def test_runs_of_wandb_get_a_dict_and_their_step(root: str) -> None:
    class Run:
        def log(self, data: dict[str, Any], step: int) -> None:
            self.told = data, step

    run = Run()
    with memstore.open(root) as store:
        metrics.ScalarLogger(store, run, prefix="store/")(3)
    assert run.told[0]["store/keys"] == 0 and run.told[1] == 3


def test_tensorboard_reads_what_is_logged(root: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with memstore.open(root) as store, SummaryWriter(str(tmp_path)) as writer:
        store.put("a", 1)
        metrics.ScalarLogger(store, writer)(5)
    found = reader.EventAccumulator(str(tmp_path)).Reload()
    (event,) = found.Scalars("memstore/keys")
    assert (event.step, event.value) == (5, 1.0)


def test_what_is_no_logger_is_refused(root: str) -> None:
    with memstore.open(root) as store:
        with pytest.raises(TypeError, match="SummaryWriter"):
            metrics.ScalarLogger(store, "runs/1")
        with pytest.raises(ValueError, match="every"):
            metrics.ScalarLogger(store, print, every=-1)
