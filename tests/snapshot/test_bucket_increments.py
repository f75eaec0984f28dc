"""Increments in a bucket: what is unchanged is copied by the service, and each snapshot is whole by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memstore import CheckpointManager, Snapshot, StateDict
from memstore.errors import MemstoreError, PermissionDeniedError
from memstore.snapshot import objects, publishing
from memstore.snapshot.chunks import CHUNK
from tests.support.buckets import FaultProxy, Request

LEAVES, EACH = 40, 50_000  # of 200 KB


@pytest.fixture
def options(s3_options: dict[str, Any]) -> dict[str, Any]:
    return s3_options


@pytest.fixture
def run(url: str) -> str:
    return url.rpartition("/")[0]


def weights() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((EACH,), float(i)) for i in range(LEAVES)}


def is_copy(request: Request) -> bool:
    return request.method == "PUT" and "x-amz-copy-source" in request.headers


def sent(proxy: FaultProxy) -> int:
    return sum(one.sent for one in proxy.requests)


def check(url: str, options: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    snapshot = Snapshot(url, storage_options=options)
    snapshot.verify()
    found = StateDict()
    snapshot.restore({"state": found})
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_is_unchanged_is_not_put_and_the_base_may_go(
    is_async: bool, run: str, options: dict[str, Any], s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_async:
        monkeypatch.setattr(objects, "PIECE", CHUNK)
    state = weights()
    Snapshot.take(f"{run}/step-1", {"state": StateDict(state)}, storage_options=options)
    expected = dict(state)
    for step in (2, 3):
        state[f"w{step}"] = expected[f"w{step}"] = torch.full((EACH,), -float(step))
        s3_proxy.clear()
        app_state, base = {"state": StateDict(state)}, "latest" if step == 2 else f"{run}/step-2"
        if is_async:
            Snapshot.async_take(f"{run}/step-{step}", app_state, storage_options=options, base=base).wait(60.0)
        else:
            Snapshot.take(f"{run}/step-{step}", app_state, storage_options=options, base=base)
        assert any(map(is_copy, s3_proxy.requests))
        assert sent(s3_proxy) < 2 * 4 * EACH  # the leaf, a manifest, and sums of boxes
        check(f"{run}/step-{step}", options, expected)
    first = objects.storage_at(f"{run}/step-1", options)
    first.remove_all(first.names())
    check(f"{run}/step-2", options, {**expected, "w3": weights()["w3"]})
    check(f"{run}/step-3", options, expected)
    assert publishing.prune(f"{run}/step-3", options, older_than=0.0).objects == 0
    check(f"{run}/step-3", options, expected)


@pytest.mark.full
def test_a_base_whose_objects_vanish_is_written_whole(run: str, options: dict[str, Any], s3_proxy: FaultProxy) -> None:
    Snapshot.take(f"{run}/step-1", {"state": StateDict(weights())}, storage_options=options)

    def remove(_: Request) -> None:
        storage = objects.storage_at(f"{run}/step-1", options)
        storage.remove_all(storage.names())

    s3_proxy.call(is_copy, remove)
    Snapshot.take(f"{run}/step-2", {"state": StateDict(weights())}, storage_options=options, base=f"{run}/step-1")
    check(f"{run}/step-2", options, weights())


def test_a_copy_that_is_gone_before_the_manifest_is_put_is_missed(
    run: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """As by somebody who prunes: a manifest must not name what isn't there."""
    Snapshot.take(f"{run}/step-1", {"state": StateDict(weights())}, storage_options=options)

    def prune(_: Request) -> None:
        storage = objects.storage_at(f"{run}/step-2", options)
        storage.remove_all([name for name in storage.names() if ".safetensors." in name])

    s3_proxy.call(lambda one: one.is_listing and any(map(is_copy, s3_proxy.requests)), prune)
    with pytest.raises(MemstoreError, match="is gone"):
        Snapshot.take(f"{run}/step-2", {"state": StateDict(weights())}, storage_options=options, base="latest")
    Snapshot.take(f"{run}/step-2", {"state": StateDict(weights())}, storage_options=options, base="latest")
    check(f"{run}/step-2", options, weights())


def test_an_increment_that_failed_leaves_copies_that_the_next_one_uses_or_removes(
    run: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    state = weights()
    Snapshot.take(f"{run}/step-1", {"state": StateDict(state)}, storage_options=options)
    state["w1"] = torch.zeros(EACH)
    s3_proxy.fail(
        lambda one: one.method == "PUT" and ".safetensors." in one.name and not is_copy(one), 403, "AccessDenied"
    )
    with pytest.raises(PermissionDeniedError):
        Snapshot.take(f"{run}/step-2", {"state": StateDict(state)}, storage_options=options, base=f"{run}/step-1")
    left = objects.storage_at(f"{run}/step-2", options).names()
    assert left
    s3_proxy.clear()
    Snapshot.take(f"{run}/step-2", {"state": StateDict(state)}, storage_options=options, base=f"{run}/step-1")
    assert not any(map(is_copy, s3_proxy.requests))
    check(f"{run}/step-2", options, state)
    # without a base, they are nobody's
    storage = objects.storage_at(f"{run}/step-2", options)
    storage.remove_all([name for name in storage.names() if not name.startswith("state-")])
    Snapshot.take(f"{run}/step-2", {"state": StateDict(state)}, storage_options=options)
    assert not [name for name in storage.names() if name.startswith("state-")]
    check(f"{run}/step-2", options, state)


@pytest.mark.full
def test_a_manager_saves_increments_and_removes_any_step(
    run: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    state = StateDict(weights())
    with CheckpointManager(run, keep_last=2, incremental=True, storage_options=options) as manager:
        for step in range(1, 5):
            state["w0"] = torch.full((EACH,), float(step))
            manager.save(step, {"state": state})
            manager.wait()
            if step == 1:
                s3_proxy.clear()
    assert sent(s3_proxy) < 3 * 3 * 4 * EACH
    assert manager.steps() == [3, 4]
    check(f"{run}/step-000003", options, {**state, "w0": torch.full((EACH,), 3.0)})
    check(f"{run}/step-000004", options, dict(state))


def test_a_folder_and_a_bucket_share_nothing(run: str, path: str, options: dict[str, Any]) -> None:
    app_state = {"state": StateDict(weights())}
    Snapshot.take(path, app_state)
    with pytest.raises(ValueError, match="can't share files"):
        Snapshot.take(f"{run}/step-1", app_state, storage_options=options, base=path)
    with pytest.raises(ValueError, match="can't share files"):
        Snapshot.take(path + "2", app_state, base=f"{run}/step-1")
    # a tier in a bucket has a base of its own
    for step in (1, 2):
        place = f"{path}-tier/step-{step}"
        Snapshot.take(place, app_state, then=[f"{run}/step-{step}"], storage_options=options, base="latest")
        check(f"{run}/step-{step}", options, weights())
