"""A manager whose root is a URL: steps in a bucket are whole or not there, found again, kept by rules, and removed."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch

from memstore import CheckpointManager, Snapshot, StateDict
from memstore.checkpoints import buckets, folders
from memstore.checkpoints.buckets import StepObjects, steps_at
from memstore.errors import MemstoreError, NoSnapshotError, PermissionDeniedError
from memstore.snapshot.buckets import open_bucket, parse_url
from memstore.snapshot.manifest import MANIFEST
from tests.support.buckets import FaultProxy, Request
from tests.support.fork_server import ForkServer


def objects_of(step: int = 0) -> dict[str, Any]:
    torch.manual_seed(step)
    return {"model": torch.nn.Linear(3, 2), "progress": StateDict(step=step)}


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and request.name == MANIFEST


@pytest.mark.parametrize("backend", ["snapshot", pytest.param("dcp", marks=pytest.mark.full)])
def test_a_run_in_a_bucket_keeps_its_newest_steps_and_continues(
    backend: Any, url: str, s3_options: dict[str, Any]
) -> None:
    app_state = objects_of()
    given: dict[str, Any] = {"backend": backend, "storage_options": s3_options}
    with CheckpointManager(url, keep_last=1, keep_best=1, best="min", save_every=10, **given) as manager:
        assert manager.latest() is None
        for step in range(1, 41):
            app_state["progress"]["step"] = step
            manager.save(step, app_state, {"loss": abs(step - 20)})
    assert (manager.root, manager.steps(), manager.latest(), manager.best()) == (url, [20, 40], 40, 20)
    names = open_bucket(parse_url(url), s3_options).list_all(parse_url(url).key)
    assert {name.partition("/")[0] for name in names} == {"step-000020", "step-000040"}
    found = objects_of(1)
    assert CheckpointManager(url, **given).restore(found) == 40
    assert found["progress"]["step"] == 40
    assert torch.equal(found["model"].weight, app_state["model"].weight)
    assert CheckpointManager(url, **given).restore(found, 20) == 20
    with pytest.raises(NoSnapshotError, match="step 7"):
        manager.restore(found, 7)


def test_a_save_that_fails_is_no_step_and_the_next_removes_it(
    url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    manager = CheckpointManager(url, async_=False, storage_options=s3_options)
    s3_proxy.fail(is_manifest, 403, "AccessDenied", times=1)
    with pytest.raises(PermissionDeniedError):
        manager.save(1, objects_of(1))
    assert manager.steps() == []
    assert manager.save(2, objects_of(2))
    assert manager.steps() == [2]
    assert [saved.step for saved in steps_at(url, s3_options).steps()] == [2]


def test_an_unfinished_step_of_another_process_stays_for_a_day(
    url: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    StepObjects(url, s3_options).claim(5, {}, None, "snapshot")  # of a job that has died, or goes on
    manager = CheckpointManager(url, async_=False, storage_options=s3_options)
    manager.save(5, objects_of(5))
    assert {saved.name for saved in steps_at(url, s3_options).steps()} == {"step-000005", "step-000005.2"}
    assert manager.restore(objects_of()) == 5
    monkeypatch.setattr(buckets, "_OLD", -1.0)
    manager.save(6, objects_of(6))
    assert {saved.name for saved in steps_at(url, s3_options).steps()} == {"step-000005.2", "step-000006"}


def test_a_removal_that_was_cut_off_is_ended_by_the_next(
    url: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(url, async_=False, keep_last=1, storage_options=s3_options)
    manager.save(1, objects_of(1))
    (saved,) = steps_at(url, s3_options).steps()

    def die(*_: object) -> None:
        raise MemstoreError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("memstore.snapshot.objects.ObjectStorage.remove_all", die)
        assert not StepObjects(url, s3_options).remove(saved)
    assert manager.latest() is None  # its manifest is gone
    manager.save(2, objects_of(2))
    assert [saved.step for saved in steps_at(url, s3_options).steps()] == [2]


def test_steps_of_others_are_found_and_never_removed(url: str, s3_options: dict[str, Any]) -> None:
    Snapshot.take(f"{url}/step-7", objects_of(7), storage_options=s3_options)
    bucket, key = open_bucket(parse_url(url), s3_options), parse_url(url).key
    bucket.put(f"{key}/step-8/.metadata", b"of torch")
    bucket.put(f"{key}/2024/notes", b"of nobody")
    manager = CheckpointManager(url, async_=False, keep_last=1, storage_options=s3_options)
    assert manager.steps() == [7]
    assert manager.restore(objects_of()) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (9, 10):
            manager.save(step, objects_of(step))
    assert manager.steps() == [7, 10]
    assert {saved.format for saved in steps_at(url, s3_options).steps()} == {"memstore", "dcp in a bucket"}


def test_two_managers_that_claim_one_step_get_two_names(url: str, s3_options: dict[str, Any]) -> None:
    first, second = StepObjects(url, s3_options), StepObjects(url, s3_options)
    assert first.steps() == second.steps() == []
    real = second.steps
    second.steps = list  # type: ignore[method-assign] - it has looked before the other's claim
    names = {first.claim(3, {}, None, "snapshot").name, second.claim(3, {}, None, "snapshot").name}
    assert names == {"step-000003", "step-000003.1"}
    assert len(real()) == 2


def test_a_path_is_a_folder_and_a_url_a_bucket(url: str, root: str, s3_options: dict[str, Any]) -> None:
    assert isinstance(steps_at(root), folders.StepFolders)
    assert isinstance(steps_at(url, s3_options), StepObjects)
    with pytest.raises(ValueError):
        steps_at("hdfs://somewhere/run")


# --- leases -----------------------------------------------------------------------------------------------------------


def is_lease(request: Request) -> bool:
    return request.method == "PUT" and ".lease-" in request.name


def is_mark(request: Request) -> bool:
    return request.method == "PUT" and ".removed-" in request.name


def is_read(request: Request) -> bool:
    return request.method == "GET" and ".safetensors." in request.name


def objects_in(url: str, options: dict[str, Any]) -> list[str]:
    return sorted(open_bucket(parse_url(url), options).list_all(parse_url(url).key))


@pytest.mark.parametrize("backend", ["snapshot", "dcp"])
def test_a_step_that_a_manager_restores_is_not_removed_by_another(
    backend: Any, url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    given: dict[str, Any] = {"async_": False, "backend": backend, "storage_options": s3_options}
    trainer = CheckpointManager(url, keep_last=1, **given)
    trainer.save(1, objects_of(1))

    def save_two(_: Request) -> None:
        trainer.save(2, objects_of(2))
        trainer.save(3, objects_of(3))

    s3_proxy.call(is_read, save_two)
    found = objects_of()
    assert CheckpointManager(url, **given).restore(found, 1) == 1
    assert torch.equal(found["model"].weight, objects_of(1)["model"].weight)
    assert trainer.steps() == [1, 3]
    trainer.save(4, objects_of(4))
    assert trainer.steps() == [4] and {name.partition("/")[0] for name in objects_in(url, s3_options)} == {
        "step-000004"
    }


def test_whoever_removes_looks_for_leases_once_more_behind_its_mark(
    url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    manager = CheckpointManager(url, async_=False, keep_last=1, storage_options=s3_options)
    manager.save(1, objects_of(1))
    other = StepObjects(url, s3_options)
    (saved,) = other.steps()
    held: list[Any] = []
    s3_proxy.call(is_mark, lambda _: held.append(other.hold(saved.name)))
    remover = StepObjects(url, s3_options)
    assert not remover.remove(saved) and held[0] is not None
    assert other.steps() == [saved] and other.is_held(saved)  # it is whole again
    held[0].close()
    assert remover.remove(saved) and not objects_in(url, s3_options)


def test_a_reader_takes_a_step_with_a_mark_for_gone_whoever_takes_his_own_mark_away(
    url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """Else the second who removes, and has looked before the lease was there, would remove what is read."""
    CheckpointManager(url, async_=False, storage_options=s3_options).save(1, objects_of(1))
    first, second, reader = (StepObjects(url, s3_options) for _ in range(3))
    (saved,) = reader.steps()
    is_about_to, may = threading.Event(), threading.Event()

    def stop(_: Request) -> None:
        is_about_to.set()
        assert may.wait(60)

    s3_proxy.call(lambda one: one.method == "DELETE" or "delete" in one.path, stop)
    removed: list[bool] = []
    thread = threading.Thread(target=lambda: removed.append(second.remove(saved)))
    thread.start()
    held: list[Any] = []
    try:
        assert is_about_to.wait(60)
        s3_proxy.call(is_mark, lambda _: held.append(reader.hold(saved.name)))
        assert not first.remove(saved) and held[0] is not None
        assert not [one for one in reader.steps() if one.is_whole]
        held[0].close()
    finally:
        may.set()
        thread.join(60)
    assert removed == [True]


def test_a_lease_is_put_again_and_ends_with_its_reader(
    url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_RENEWED", 0.02)
    CheckpointManager(url, async_=False, storage_options=s3_options).save(1, objects_of(1))
    steps = StepObjects(url, s3_options)
    (saved,) = steps.steps()
    held = steps.hold(saved.name)
    assert held is not None
    deadline = time.monotonic() + 60
    while sum(map(is_lease, s3_proxy.requests)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    held.close()
    assert not [name for name in objects_in(url, s3_options) if ".lease-" in name]
    held = steps.hold(saved.name)
    assert held is not None
    monkeypatch.setattr(buckets, "_LEASE_SECONDS", -1.0)  # as if it were so old: its reader has died
    assert StepObjects(url, s3_options).remove(saved)
    held.close()


def test_whoever_may_not_write_restores_without_a_lease(
    url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "memstore")
    manager = CheckpointManager(url, async_=False, storage_options=s3_options)
    manager.save(1, objects_of(1))
    s3_proxy.fail(is_lease, 403, "AccessDenied")
    assert manager.restore(objects_of()) == 1
    assert "without a lease" in caplog.text


def save_until_stopped(channel: Any, url: str, options: dict[str, Any]) -> None:
    app_state = objects_of()
    with CheckpointManager(url, save_every=1000, storage_options=options) as manager:
        manager.save_on_signal()
        for step in range(1, 100_000):
            app_state["progress"]["step"] = step
            manager.save(step, app_state)
            if step == 5:
                channel.send(step)
            if manager.stopping:
                break
            time.sleep(0.01)
    channel.send(step)


@pytest.mark.full
def test_a_signal_saves_the_next_step_into_a_bucket(
    url: str, s3_options: dict[str, Any], rank_server: ForkServer
) -> None:
    with rank_server.start(save_until_stopped, url, s3_options) as trainer:
        assert trainer.recv(60.0) == 5
        os.kill(trainer.pid, signal.SIGTERM)
        stopped = trainer.recv(60.0)
        assert trainer.wait(timeout=60.0) == 0
    found = objects_of(1)
    manager = CheckpointManager(url, storage_options=s3_options)
    assert manager.steps() == [stopped]
    assert manager.restore(found) == found["progress"]["step"] == stopped
