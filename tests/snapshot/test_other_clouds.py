"""Azure, by azurite, and a stub of Google's interface: what services of theirs do otherwise than S3."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from memstore import CheckpointManager, Snapshot, StateDict
from memstore.errors import (
    AlreadyExistsError,
    CredentialsError,
    NoBucketError,
    NoSnapshotError,
    PermissionDeniedError,
)
from memstore.snapshot import objects, publishing
from memstore.snapshot.chunks import CHUNK
from memstore.snapshot.manifest import MANIFEST
from memstore.snapshot.objects import ObjectStorage
from tests.support.buckets import AzureServer, FaultProxy, GoogleStub, azurite


class Cloud(NamedTuple):
    """A service: where a run may be, the options for it, and the proxy in front of it."""

    url: str
    options: dict[str, Any]
    proxy: FaultProxy

    def at(self, name: str) -> str:
        return f"{self.url}/{name}"


@pytest.fixture(scope="module", params=["gs", pytest.param("az", marks=pytest.mark.full)])
def service(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    if request.param == "az":
        try:
            azurite()
        except RuntimeError as error:
            pytest.skip(str(error))
    server = AzureServer() if request.param == "az" else GoogleStub()
    try:
        if isinstance(server, AzureServer):
            server.make_bucket("bucket")
        proxy = FaultProxy(server)
        yield Cloud(f"{request.param}://bucket", server.options(proxy.url), proxy)
        proxy.close()
    finally:
        server.close()


@pytest.fixture
def cloud(service: Cloud, url: str) -> Cloud:
    service.proxy.clear()
    return service._replace(url=f"{service.url}/{url.split('/')[3]}")


def state(fill: float = 1.0) -> dict[str, Any]:
    return {"state": StateDict(step=7, weight=torch.full((5000,), fill), other=torch.arange(10))}


def check(cloud: Cloud, name: str, fill: float = 1.0) -> None:
    snapshot = Snapshot(cloud.at(name), storage_options=cloud.options)
    snapshot.verify()
    found = StateDict(step=0)
    snapshot.restore({"state": found})
    assert found["step"] == 7
    assert torch.equal(found["weight"], torch.full((5000,), fill))


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_is_taken_is_restored_and_read_by_ranges(
    is_async: bool, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PIECE", CHUNK)
    if is_async:
        Snapshot.async_take(cloud.at("a"), state(), storage_options=cloud.options).wait(60.0)
    else:
        weight = torch.arange(5 << 20, dtype=torch.float32).reshape(-1, 1024)  # 20 MiB: two objects
        Snapshot.take(cloud.at("large"), {"state": StateDict(weight=weight)}, storage_options=cloud.options)
        cloud.proxy.clear()
        view = Snapshot(cloud.at("large"), storage_options=cloud.options).view()
        assert torch.equal(view["state"]["weight"][4090:4110] + 0, weight[4090:4110])  # of both
        assert cloud.proxy.fetched < 1 << 19
        Snapshot.take(cloud.at("a"), state(), storage_options=cloud.options)
    check(cloud, "a")


def test_of_takes_at_once_one_wins(cloud: Cloud) -> None:
    with pytest.raises(AlreadyExistsError):
        for _ in range(2):
            Snapshot.take(cloud.at("a"), state(), storage_options=cloud.options)
    storage = ObjectStorage(cloud.at("b"), cloud.options)
    won: list[bytes] = []

    def publish(text: bytes) -> None:
        try:
            storage.publish(MANIFEST, text, durable=True)
            won.append(text)
        except AlreadyExistsError:
            pass

    threads = [threading.Thread(target=publish, args=(b"%d" % number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [storage.read_bytes(MANIFEST, 100)]


def test_an_object_is_replaced_if_it_is_the_one_that_was_read(cloud: Cloud) -> None:
    """As DCP's saves do."""
    first, second = (ObjectStorage(cloud.at("a"), cloud.options) for _ in range(2))
    first.publish(MANIFEST, b"1", durable=True)
    for storage in (first, second):
        assert storage.read_bytes(MANIFEST, 100) == b"1"
    first.replace(MANIFEST, b"2", durable=True)
    with pytest.raises(AlreadyExistsError):
        second.replace(MANIFEST, b"3", durable=True)
    assert second.read_bytes(MANIFEST, 100) == b"2"


@pytest.mark.parametrize(
    "fault",
    [pytest.param("cut", marks=pytest.mark.full), pytest.param("failed", marks=pytest.mark.full), "told as failed"],
)
def test_requests_that_fail_are_repeated(fault: str, cloud: Cloud) -> None:
    for name in (".safetensors.", MANIFEST):

        def when(request: Any, name: str = name) -> bool:
            return request.method == "PUT" and name in request.path

        if fault == "cut":
            cloud.proxy.cut(when)
        else:
            cloud.proxy.fail(when, 503, "ServerBusy", acts_first=fault == "told as failed")
    Snapshot.take(cloud.at("a"), state(), storage_options=cloud.options)
    check(cloud, "a")


def test_increments_and_managers(cloud: Cloud) -> None:
    options = cloud.options
    app_state = state()
    app_state["state"]["more"] = torch.arange(10_000)
    with CheckpointManager(cloud.at("run"), keep_last=1, incremental=True, storage_options=options) as manager:
        for step in (1, 2):
            app_state["state"]["weight"].fill_(step)
            manager.save(step, app_state)
    assert manager.steps() == [2]
    check(cloud, "run/step-000002", 2.0)
    names = ObjectStorage(cloud.at("run/step-000002"), options).names()
    assert len([name for name in names if name.startswith("state-")]) == 1  # which the service has copied


def test_what_a_dead_take_leaves_is_pruned(cloud: Cloud) -> None:
    storage = ObjectStorage(cloud.at("a"), cloud.options)
    storage.publish("memstore_snapshot.0123456789abcdef.claim", b"", durable=True)
    storage.publish("notes.txt", b"of others", durable=True)
    assert publishing.prune(cloud.at("a"), cloud.options, older_than=-1e9).objects == 1
    assert storage.names() == ["notes.txt"]


def test_what_is_missing_or_refused_is_typed(cloud: Cloud) -> None:
    with pytest.raises(NoBucketError, match="nowhere"):
        Snapshot.take(f"{cloud.url[:2]}://nowhere/a", state(), storage_options=cloud.options)
    with pytest.raises(NoSnapshotError):
        Snapshot(cloud.at("nothing"), storage_options=cloud.options).restore(state())
    if cloud.url.startswith("az"):
        for key in ("A" * 86 + "==", "A" * 84 + "=="):  # another one, and one that is none
            with pytest.raises(CredentialsError, match="wrong"):
                Snapshot.take(cloud.at("b"), state(), storage_options={**cloud.options, "account_key": key})
    cloud.proxy.fail(lambda one: one.method == "PUT", 403, "AccessDenied", times=9)
    with pytest.raises(PermissionDeniedError, match="storage.objects.create|Blob Data Contributor"):
        Snapshot.take(cloud.at("b"), state(), storage_options=cloud.options)


@pytest.mark.parametrize(
    ("url", "given", "says"),
    [
        ("gs://bucket/a", {}, "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://bucket/a", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
        ("az://bucket/a", {"account_name": "name"}, "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_missing_credentials_are_told(
    url: str, given: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are looked for at an address of the cloud around this host: here there is none."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    nowhere = {"request_timeout": 1.0, "retry_timeout": 0.2, "client_options": {"proxy_url": "http://127.0.0.1:9"}}
    for call in (lambda: Snapshot.take(url, state(), storage_options={**nowhere, **given}),
                 lambda: Snapshot(url, storage_options={**nowhere, **given}).restore(state())):  # fmt: skip
        with pytest.raises(CredentialsError, match=says) as caught:
            call()
        assert url in str(caught.value)
