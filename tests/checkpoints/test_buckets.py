"""A manager whose root is a URL: steps in a bucket are whole or not there, found again, kept by rules, and removed."""

from __future__ import annotations

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
