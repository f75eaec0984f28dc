"""Snapshots in buckets: whole or not at all, resumed by what is there, read by ranges; what goes wrong is told.

Requests go through a proxy of ours to moto's server, a process of its own.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstore
from memstore import Snapshot, StateDict
from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    CredentialsError,
    MemstoreError,
    NoBucketError,
    NoSnapshotError,
    PermissionDeniedError,
    StorageError,
    ThrottledError,
    UnknownOutcomeError,
)
from memstore.snapshot import buckets, objects, publishing
from memstore.snapshot.buckets import error_of, parse_url, path_or_url
from memstore.snapshot.chunks import CHUNK, FilePart
from memstore.snapshot.manifest import MANIFEST, encode_manifest, load_manifest, sums_name
from memstore.snapshot.objects import ObjectStorage, file_of
from tests.support.buckets import FaultProxy, Request, options_for
from tests.support.fork_server import ForkServer

QUICK: dict[str, Any] = {"request_timeout": 20.0, "retry_timeout": 1.0}


@pytest.fixture
def options(s3_options: dict[str, Any]) -> dict[str, Any]:
    return s3_options


def state(size: int = 1000, fill: float = 1.0) -> dict[str, Any]:
    return {"state": StateDict(step=7, weight=torch.full((size,), fill), other=torch.arange(10))}


def is_piece(request: Request) -> bool:
    return request.method == "PUT" and ".safetensors." in request.name


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and request.name == MANIFEST


def is_claim(request: Request) -> bool:
    return request.method == "PUT" and request.name.endswith(".claim")


def check(url: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    """The snapshot is whole, and has what was saved."""
    snapshot = Snapshot(url, storage_options=options)
    snapshot.verify()
    found = StateDict(step=0)
    snapshot.restore({"state": found})
    saved = expected["state"]
    assert found["step"] == saved["step"]
    assert torch.equal(found["weight"], saved["weight"])
    assert torch.equal(found["other"], saved["other"])


# --- takes and reads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("scheme", ["memory", "s3"])
def test_what_is_taken_is_restored(scheme: str, is_async: bool, url: str, options: dict[str, Any]) -> None:
    place, given = (url, options) if scheme == "s3" else (url.replace("s3://", "memory://"), {})
    app_state = state()
    if is_async:
        taken = Snapshot.async_take(place, app_state, storage_options=given)
        app_state["state"]["weight"].add_(0)
        snapshot = taken.wait(60.0)
        assert taken.done()
    else:
        snapshot = Snapshot.take(place, app_state, storage_options=given)
    assert snapshot.path == place
    check(place, given, app_state)
    assert torch.equal(snapshot.read_object("0/state/other"), torch.arange(10))
    assert snapshot.read_object("0/state/step") == 7
    assert torch.equal(snapshot.get_state_dict_for_key("state")["weight"], app_state["state"]["weight"])
    storage = objects.storage_at(place, given)
    names = [sums_name(load_manifest(place, given).id), MANIFEST, "state.safetensors"]  # no claim, no part
    assert [file_of(name) for name in storage.names()] == names


def test_a_file_is_several_objects_put_straight_from_the_tensor(
    url: str, options: dict[str, Any], s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PIECE", CHUNK)
    weight = torch.randn(2 * CHUNK // 8, dtype=torch.float64)
    app_state = {"state": StateDict(step=7, weight=weight, other=torch.arange(10))}
    told: list[tuple[int, int]] = []
    Snapshot.take(url, app_state, storage_options=options, progress=lambda *said: told.append(said))
    puts = s3_proxy.puts(".safetensors.")
    assert sorted(one.sent for one in puts)[1:] == [CHUNK] * 2
    assert all("partNumber" not in one.path and "uploads" not in one.path for one in s3_proxy.requests)
    assert told[-1][0] == told[-1][1] == sum(one.sent for one in puts)
    check(url, options, app_state)


def test_a_take_makes_few_requests(url: str, options: dict[str, Any], s3_proxy: FaultProxy) -> None:
    Snapshot.take(url, state(), storage_options=options)
    made = ["list" if one.is_listing else one.method for one in s3_proxy.requests]
    assert made == [
        "list",
        "PUT",
        "PUT",
        "list",
        "PUT",
        "PUT",
        "list",
        "POST",
    ]  # claim, piece; sums, manifest; leftovers


def test_a_memory_budget_bounds_what_is_put_together(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns lie otherwise in memory than in a file: they pass through buffers."""
    at_once: list[int] = []
    running = 0
    lock = threading.Lock()
    put = buckets.Bucket.put

    def counted(self: Any, name: str, data: Any) -> None:
        nonlocal running
        with lock:
            running += 1
            at_once.append(running)
        put(self, name, data)
        with lock:
            running -= 1

    monkeypatch.setattr(buckets.Bucket, "put", counted)
    monkeypatch.setattr(objects, "PIECE", CHUNK)
    app_state = {"state": StateDict(x=[torch.zeros(CHUNK // 2 + 1, dtype=torch.uint8) for _ in range(10)])}
    Snapshot.take(url.replace("s3", "memory"), app_state, memory_budget_bytes=CHUNK)
    assert max(at_once) == 1
    with pytest.raises(ValueError, match="memory_budget_bytes"):
        Snapshot.take(url.replace("s3", "memory") + "x", app_state, memory_budget_bytes=0)


def test_a_tensor_that_changes_during_its_put_is_put_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(CHUNK // 8, dtype=torch.float64)
    put = buckets.Bucket.put
    changed: list[str] = []

    def change(self: Any, name: str, data: Any) -> None:
        put(self, name, data)
        if not changed and isinstance(data, list):
            changed.append(name)
            weight.fill_(3.0)

    monkeypatch.setattr(objects, "PIECE", CHUNK)
    monkeypatch.setattr(buckets.Bucket, "put", change)
    place = url.replace("s3", "memory")
    storage = ObjectStorage(place)
    sums = storage.write("x", CHUNK, [FilePart(0, weight.view(torch.uint8).numpy())], durable=True)
    assert changed
    storage.know([_file("x", CHUNK, sums)])
    found = bytearray(CHUNK)
    storage.read("x", [FilePart(0, found)], sums=sums)
    assert np.frombuffer(found, np.float64)[0] == 3.0
    assert len(storage.names()) == 1


class _file:
    def __init__(self, name: str, size: int, sums: bytes) -> None:
        self.name, self.size, self.sums = name, size, sums


def test_a_part_is_read_by_its_ranges(url: str, options: dict[str, Any], s3_proxy: FaultProxy) -> None:
    weight = torch.arange(6 << 20, dtype=torch.float32).reshape(-1, 1024)  # 24 MiB
    Snapshot.take(url, {"state": StateDict(weight=weight)}, storage_options=options)
    s3_proxy.clear()
    view = Snapshot(url, storage_options=options).view()
    rows = view["state"]["weight"][3000:3064]
    assert torch.equal(rows, weight[3000:3064])
    assert torch.equal(view["state"]["weight"][3000:3064] + 1, rows + 1)  # what was fetched is there
    assert s3_proxy.fetched < 64 * 4096 + (256 << 10)
    picked = view["state"]["weight"][[17, 5000, 17]]
    assert torch.equal(picked, weight[[17, 5000, 17]])
    assert s3_proxy.fetched < 1 << 20
    far = pickle.loads(pickle.dumps(view["state"]["weight"][10:12]))
    assert torch.equal(far, weight[10:12])
    # a quarter, as one of four ranks has it
    s3_proxy.clear()
    quarter = memstore.TensorShard(torch.zeros(1536, 1024), (6144, 1024), (1536, 0))
    Snapshot(url, storage_options=options).restore({"state": StateDict(weight=quarter)})
    assert torch.equal(quarter.local, weight[1536:3072])
    assert s3_proxy.fetched < 1.05 * quarter.local.nbytes + (64 << 10)


@pytest.mark.parametrize(("gap", "requests"), [((256 << 10) - 1, 1), ((256 << 10) + 1, 2)])
def test_ranges_near_each_other_are_one_request(
    gap: int, requests: int, url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    storage = ObjectStorage(url, options)
    data = np.random.default_rng(0).bytes(1 << 20)
    sums = storage.write("x", len(data), [FilePart(0, data)], durable=True)
    storage.know([_file("x", len(data), sums)])
    s3_proxy.clear()
    first, second = bytearray(1000), bytearray(1000)
    storage.read("x", [FilePart(500, first), FilePart(1500 + gap, second)], sums=sums)
    assert (first, second) == (data[500:1500], data[1500 + gap : 2500 + gap])
    assert [one.method for one in s3_proxy.requests] == ["GET"] * requests
    assert s3_proxy.fetched == (2000 + gap if requests == 1 else 2000)


def test_a_view_says_when_its_snapshot_is_gone(url: str, options: dict[str, Any]) -> None:
    Snapshot.take(url, state(), storage_options=options)
    view = Snapshot(url, storage_options=options).view()
    sent = pickle.dumps(view["state"]["weight"])
    storage = objects.storage_at(url, options)
    storage.remove_all(storage.names())
    with pytest.raises(memstore.VersionGoneError):
        view["state"]["weight"].sum()
    with pytest.raises(memstore.VersionGoneError):
        pickle.loads(sent)


def test_only_urls_import_the_library_and_a_forked_process_cant_use_it(url: str, options: dict[str, Any]) -> None:
    Snapshot.take(url, state(), storage_options=options)
    code = textwrap.dedent(f"""
        import os, sys, memstore
        options = {options!r}
        memstore.Snapshot, memstore.CheckpointManager
        assert not {{"obstore", "boto3"}} & set(sys.modules)
        memstore.Snapshot({url!r}, storage_options=options).metadata
        pid = os.fork()
        if not pid:
            try:
                memstore.Snapshot({url!r}, storage_options=options).metadata
            except memstore.MemstoreError as error:
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(2)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 7


# --- takes that meet, die, or fail ------------------------------------------------------------------------------------


def test_a_take_replaces_no_snapshot(url: str, options: dict[str, Any]) -> None:
    app_state = state()
    Snapshot.take(url, app_state, storage_options=options)
    with pytest.raises(AlreadyExistsError, match="has a snapshot"):
        Snapshot.take(url, state(fill=2.0), storage_options=options)
    check(url, options, app_state)


def test_of_two_takes_to_one_path_one_wins(url: str, options: dict[str, Any], s3_proxy: FaultProxy) -> None:
    """The other's manifest comes in the moment before this one's put; both have pieces in common."""
    theirs = state(fill=2.0)
    theirs["state"]["other"] = torch.arange(10)
    s3_proxy.call(is_manifest, lambda _: Snapshot.take(url, theirs, storage_options=options))
    with pytest.raises(AlreadyExistsError, match="another take to this path was first"):
        Snapshot.take(url, state(), storage_options=options)
    check(url, options, theirs)


def test_a_service_without_conditional_puts_has_a_fallback(
    url: str, options: dict[str, Any], s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_UNTIL_SETTLED", 0.1)
    given = {**options, "conditional_put": "disabled"}
    app_state = state()
    Snapshot.take(url, app_state, storage_options=given)
    check(url, given, app_state)
    with pytest.raises(AlreadyExistsError):
        Snapshot.take(url, app_state, storage_options=given)
    # Another's manifest comes right after this one's: the later one stays, and the earlier one's take is told so.
    other = parse_url(url + "b")
    theirs = b"of another take"
    put = buckets.open_bucket(other, given).put
    s3_proxy.call(
        lambda one: one.method == "GET" and one.name == MANIFEST, lambda _: put(f"{other.key}/{MANIFEST}", theirs)
    )
    with pytest.raises(AlreadyExistsError, match="meanwhile"):
        ObjectStorage(str(other), given).publish(MANIFEST, b"mine", durable=True)
    assert ObjectStorage(str(other), given).read_bytes(MANIFEST, 1 << 20) == theirs


def test_a_repeated_take_puts_only_what_is_missing(
    url: str, options: dict[str, Any], s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PIECE", CHUNK)
    monkeypatch.setattr(objects, "_MOST_AT_ONCE", 1)  # in order
    app_state = {"state": StateDict(step=7, weight=torch.randn(2 * CHUNK // 4), other=torch.arange(10))}
    s3_proxy.fail(lambda one: is_piece(one) and ".00001-" in one.name, 403, "AccessDenied")
    with pytest.raises(PermissionDeniedError, match="s3:PutObject"):
        Snapshot.take(url, app_state, storage_options=options)
    assert not is_there(url, options)
    put = {one.name for one in s3_proxy.puts(".safetensors.")}
    assert len(put) == 1
    s3_proxy.clear()
    Snapshot.take(url, app_state, storage_options=options)
    assert not put & {one.name for one in s3_proxy.puts()}
    check(url, options, app_state)


def is_there(url: str, options: dict[str, Any]) -> bool:
    try:
        load_manifest(url, options)
    except NoSnapshotError:
        return False
    return True


def take_and_die(_: object, url: str, options: dict[str, Any], step: str) -> None:
    """Takes a snapshot, and ends before or after the first put of some kind."""

    def kind_of(name: str) -> str:
        return "manifest" if name.endswith(".json") else "claim" if "claim" in name else "piece"

    def dying(real: Any) -> Any:
        def put(self: Any, name: str, data: Any) -> None:
            if step == f"before {kind_of(name)}":
                os._exit(9)
            real(self, name, data)
            if step == f"after {kind_of(name)}":
                os._exit(9)

        return put

    buckets.Bucket.put, buckets.Bucket.create = dying(buckets.Bucket.put), dying(buckets.Bucket.create)
    Snapshot.take(url, state(fill=5.0), storage_options=options)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("before claim", marks=pytest.mark.full),
        "after claim",
        pytest.param("before piece", marks=pytest.mark.full),
        "after piece",
        "before manifest",
        "after manifest",
    ],
)
def test_a_take_that_dies_leaves_nothing_or_all(
    step: str, url: str, options: dict[str, Any], rank_server: ForkServer
) -> None:
    assert rank_server.start(take_and_die, url, options, step).wait(timeout=100.0) == 9
    expected = state(fill=5.0)
    if step == "after manifest":
        check(url, options, expected)
        with pytest.raises(AlreadyExistsError):
            Snapshot.take(url, expected, storage_options=options)
    else:
        assert not is_there(url, options)
        Snapshot.take(url, state(fill=6.0), storage_options=options)  # which removes what the dead one has left
        check(url, options, state(fill=6.0))
        assert len(objects.storage_at(url, options).names()) == 3  # a piece, the manifest, the sums of boxes


def test_what_dead_takes_left_is_pruned_and_what_lives_is_not(
    url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    storage = ObjectStorage(url, options)
    storage.write("state.safetensors", 5, [FilePart(0, b"12345")], durable=True)
    storage.publish("memstore_snapshot.0123456789abcdef.claim", b"", durable=True)
    storage.publish("notes.txt", b"of others", durable=True)
    found = publishing.prune(url, options)
    assert (found.objects, found.kept) == (0, 2)
    assert len(storage.names()) == 3
    assert publishing.prune(url, options, older_than=0.0).objects == 2
    assert storage.names() == ["notes.txt"]
    app_state = state()
    Snapshot.take(url, app_state, storage_options=options)
    storage.write("model.safetensors", 5, [FilePart(0, b"12345")], durable=True)
    assert publishing.prune(url, options, older_than=0.0).objects == 1
    check(url, options, app_state)


def test_pieces_that_are_pruned_during_a_take_are_missed_before_it_is_published(
    url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    def prune(_: Request) -> None:
        storage = ObjectStorage(url, options)
        storage.remove_all([name for name in storage.names() if ".safetensors." in name])

    s3_proxy.call(lambda one: one.is_listing and any(map(is_piece, s3_proxy.requests)), prune)
    with pytest.raises(UnknownOutcomeError, match="is gone"):
        Snapshot.take(url, state(), storage_options=options)
    assert not is_there(url, options)
    Snapshot.take(url, state(), storage_options=options)


# --- what networks and services do ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500", "503", "cut", pytest.param("slow", marks=pytest.mark.full)])
def test_requests_are_repeated(fault: str, url: str, options: dict[str, Any], s3_proxy: FaultProxy) -> None:
    given = {**options, "request_timeout": 1.0} if fault == "slow" else options
    for when in (is_piece, lambda one: one.method == "GET" and "?" not in one.path):
        if fault == "cut":
            s3_proxy.cut(when, times=2)
        elif fault == "slow":
            s3_proxy.delay(when, 2.0)
        else:
            s3_proxy.fail(when, int(fault), "InternalError" if fault == "500" else "SlowDown", times=2)
    app_state = state()
    Snapshot.take(url, app_state, storage_options=given)
    check(url, given, app_state)


def test_an_answer_that_is_cut_in_the_middle_is_asked_for_again(
    url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    app_state = state(100_000)
    Snapshot.take(url, app_state, storage_options=options)
    s3_proxy.cut(lambda one: one.method == "GET" and ".safetensors." in one.name, after=1000)
    check(url, options, app_state)


@pytest.mark.parametrize("code", [500, 503])
def test_a_manifest_that_was_put_and_told_as_failed_is_published(
    code: int, url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    s3_proxy.fail(is_manifest, code, "InternalError", acts_first=True)
    app_state = state()
    Snapshot.take(url, app_state, storage_options=options)
    check(url, options, app_state)


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (403, "AccessDenied", PermissionDeniedError, "s3:PutObject"),
        (403, "ExpiredToken", CredentialsError, "renew"),
        (403, "InvalidAccessKeyId", CredentialsError, "wrong"),
        (403, "RequestTimeTooSkewed", CredentialsError, "clock"),
        (404, "NoSuchBucket", NoBucketError, "no bucket"),
        (503, "SlowDown", ThrottledError, "fewer requests"),
        (500, "InternalError", StorageError, "call again"),
    ],
)
def test_what_a_service_refuses_is_typed_and_names_the_url(
    status: int, code: str, kind: type[Exception], says: str, url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    s3_proxy.fail(is_piece, status, code, times=100)
    with pytest.raises(kind, match=says) as caught:
        Snapshot.take(url, state(), storage_options={**options, **QUICK})
    assert url in str(caught.value)
    assert type(caught.value) is kind
    s3_proxy.clear()
    Snapshot.take(url, state(), storage_options=options)


@pytest.mark.parametrize(
    ("status", "code", "kind"), [(503, "SlowDown", ThrottledError), (500, "InternalError", StorageError)]
)
def test_a_claim_that_fails_is_as_any_request(
    status: int, code: str, kind: type[Exception], url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """It is the first that a take puts, and publishes nothing."""
    s3_proxy.fail(is_claim, status, code, times=100)
    with pytest.raises(kind) as caught:
        Snapshot.take(url, state(), storage_options={**options, **QUICK})
    assert type(caught.value) is kind and url in str(caught.value)


def test_a_manifest_that_the_service_does_not_take_may_be_there(
    url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    s3_proxy.fail(is_manifest, 500, "InternalError", times=100)
    with pytest.raises(UnknownOutcomeError, match="may have been put"):
        Snapshot.take(url, state(), storage_options={**options, **QUICK})
    s3_proxy.clear()
    Snapshot.take(url, state(), storage_options=options)
    check(url, options, state())


def test_a_writer_process_tells_what_a_service_refuses(url: str, options: dict[str, Any], s3_proxy: FaultProxy) -> None:
    s3_proxy.fail(is_piece, 403, "ExpiredToken", times=100)
    with pytest.raises(CredentialsError, match="renew"):
        Snapshot.async_take(url, state(), storage_options=options).wait(60.0)
    s3_proxy.clear()
    Snapshot.async_take(url, state(), storage_options=options).wait(60.0)
    check(url, options, state())


def test_a_writer_process_gets_renewed_credentials(
    url: str, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, s3_environment: None
) -> None:
    """It was started before, with the environment of then."""
    for number, key in enumerate(["first", "second"]):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        s3_proxy.clear()
        Snapshot.async_take(f"{url}{number}", state()).wait(60.0)
        used = {one.headers["authorization"].partition("Credential=")[2].partition("/")[0] for one in s3_proxy.requests}
        assert used == {key}


def test_a_listing_may_be_stale(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what was removed, and lacks what was put."""
    place = url.replace("s3", "memory")
    storage = ObjectStorage(place)
    storage.write("state.safetensors", 5, [FilePart(0, b"12345")], durable=True)
    stale = buckets.open_bucket(parse_url(place)).list(parse_url(place).key)
    storage.remove_all(storage.names())
    monkeypatch.setattr(buckets.Bucket, "list", lambda *_: dict(stale))
    again = ObjectStorage(place)
    sums = again.write("state.safetensors", 5, [FilePart(0, b"12345")], durable=True)
    more = again.write("model.safetensors", 5, [FilePart(0, b"54321")], durable=True)
    again.confirm([_file("state.safetensors", 5, sums), _file("model.safetensors", 5, more)])
    found = bytearray(5)
    again.read("state.safetensors", [FilePart(0, found)], sums=sums)
    assert found == b"12345"


def test_a_bucket_that_is_missing_or_vanishes_is_named(s3_proxy: FaultProxy, options: dict[str, Any]) -> None:
    with pytest.raises(NoBucketError, match="nowhere"):
        Snapshot.take("s3://nowhere/step-1", state(), storage_options=options)
    with pytest.raises(NoBucketError, match="nowhere"):
        Snapshot("s3://nowhere/step-1", storage_options=options).restore(state())


def test_no_answer_ends_in_time(url: str) -> None:
    given = options_for("http://127.0.0.1:9", **QUICK)
    with pytest.raises(StorageError, match="can't be reached") as caught:
        Snapshot.take(url, state(), storage_options=given)
    assert caught.value.path is not None and url in caught.value.path


@pytest.mark.parametrize("fault", ["cut", "silent"])
@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_what_fails_for_ever_ends_in_the_given_time_and_names_the_url(
    method: str, fault: str, url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    given = {**options, "request_timeout": 0.5, "retry_timeout": 0.5}
    Snapshot.take(url, state(), storage_options=options)

    def is_met(request: Request) -> bool:
        return request.method == method and ".safetensors." in request.name

    if fault == "cut":
        s3_proxy.cut(is_met, times=1000)
    else:
        s3_proxy.delay(is_met, 30.0, times=1000)
    started = time.monotonic()
    with pytest.raises(StorageError, match=f"{url}.*safetensors") as caught:
        if method == "PUT":
            Snapshot.take(url + "b", state(), storage_options=given)
        else:
            Snapshot(url, storage_options=given).restore(state())
    assert type(caught.value) is StorageError
    assert time.monotonic() - started < 20.0  # and not 30: a busy machine may need some of it
    assert not is_there(url + "b", options)


def test_a_server_that_takes_connections_and_never_answers_is_given_up(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = options_for(f"http://127.0.0.1:{silent.getsockname()[1]}", request_timeout=0.5, retry_timeout=0.1)
        for call in (
            lambda: Snapshot.take(url, state(), storage_options=given),
            lambda: Snapshot(url, storage_options=given).restore(state()),
            lambda: Snapshot(url, storage_options=given).verify(),
        ):
            started = time.monotonic()
            with pytest.raises(StorageError, match=url):
                call()
            assert time.monotonic() - started < 20.0


def test_missing_credentials_are_told_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setattr(buckets, "_PROBE", 0.05)
    with pytest.raises(CredentialsError, match="AWS_ACCESS_KEY_ID"):
        Snapshot.take(url, state())


def test_the_missing_package_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(buckets, "_buckets", {})
    with pytest.raises(memstore.MissingPackageError, match=r"pip install 'memstore-torch\[cloud\]'"):
        Snapshot.take(url, state())


# --- damage -----------------------------------------------------------------------------------------------------------


def test_damage_is_found(url: str, options: dict[str, Any]) -> None:
    place = url.replace("s3", "memory")
    Snapshot.take(place, state())
    storage = ObjectStorage(place)
    (piece,) = (name for name in storage.names() if ".safetensors." in name)
    bucket, key = buckets.open_bucket(parse_url(place)), parse_url(place).key
    data, _ = bucket.fetch_all(f"{key}/{piece}", 1 << 30)
    for damaged in (data[:-1] + b"\xff", data[:-1], data + b"x"):
        bucket.put(f"{key}/{piece}", damaged)
        with pytest.raises(CorruptionError, match="state.safetensors"):
            Snapshot(place).verify()
        with pytest.raises(CorruptionError):
            Snapshot(place).restore({"state": StateDict()})
    bucket.remove([f"{key}/{piece}"])
    with pytest.raises(CorruptionError, match="missing"):
        Snapshot(place).verify()


def test_every_byte_of_a_manifest_counts(url: str) -> None:
    place = url.replace("s3", "memory")
    Snapshot.take(place, state())
    bucket, key = buckets.open_bucket(parse_url(place)), parse_url(place).key
    text, _ = bucket.fetch_all(f"{key}/{MANIFEST}", 1 << 20)
    for at in range(len(text)):
        bucket.put(f"{key}/{MANIFEST}", text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(memstore.MemstoreError):
            load_manifest(place)


def test_a_manifest_without_checksums_names_no_objects(url: str) -> None:
    place = url.replace("s3", "memory")
    Snapshot.take(place, state(), checksum=False)  # which has no effect: checksums are the names
    manifest = load_manifest(place)
    assert all(file.sums for file in manifest.files)
    import msgspec

    bare = tuple(msgspec.structs.replace(file, sums=b"") for file in manifest.files)
    bucket, key = buckets.open_bucket(parse_url(place)), parse_url(place).key
    bucket.put(f"{key}/{MANIFEST}", encode_manifest(msgspec.structs.replace(manifest, files=bare)))
    with pytest.raises(CorruptionError, match="no checksums"):
        Snapshot(place).verify()


# --- URLs and options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s3://b/a/c/", "s3://b/a/c"),
        ("S3://b/a", "s3://b/a"),
        ("gcs://b/a", "gs://b/a"),
        ("gs://b/a", "gs://b/a"),
        ("az://b/a", "az://b/a"),
        ("memory://b/a", "memory://b/a"),
        ("file:///tmp/a", "/tmp/a"),
        ("file://localhost/tmp/a", "/tmp/a"),
        ("/tmp/a", "/tmp/a"),
        (Path("/tmp/a"), "/tmp/a"),
    ],
)
def test_urls_are_written_in_one_way(given: Any, expected: str) -> None:
    assert path_or_url(given) == expected


@pytest.mark.parametrize(
    "given",
    ["s3://", "s3://b", "s3://b/", "s3:///a", "s3://b/a//c", "s3://b/../c", "s3://b/a?x", "s3://b/a#x", "http://b/a"]
    + ["hdfs://b/a", "://a", Path("s3://b/a")],
)
def test_what_is_no_url_is_refused(given: Any) -> None:
    with pytest.raises(ValueError):
        path_or_url(given)
    with pytest.raises(ValueError):
        Snapshot.take(given, state())
    assert not [name for name in os.listdir() if name.endswith(":")]


def test_options_are_checked(url: str, options: dict[str, Any], path: str) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        Snapshot.take(url, state(), storage_options={**options, "nonsense": "1"})
    with pytest.raises(TypeError, match="region"):
        Snapshot.take(path, state(), storage_options={"region": "1"})
    with pytest.raises(ValueError, match="request_timeout"):
        Snapshot.take(url, state(), storage_options={**options, "request_timeout": -1})
    assert not os.path.exists(path)


def test_errors_of_other_services_are_told_too() -> None:
    google, azure = parse_url("gs://b/a"), parse_url("az://b/a")
    for url, text, kind in (
        (google, "Generic GCS error: Error performing token request: GET http://169.254.169.254/x", CredentialsError),
        (azure, "status code: 404 Not Found: <Error><Code>ContainerNotFound</Code></Error>", NoBucketError),
        (azure, "status code: 403 Forbidden: <Error><Code>AuthenticationFailed</Code></Error>", CredentialsError),
        (google, "status code: 429 Too Many Requests: ", ThrottledError),
        (google, "HTTP error: operation timed out", StorageError),
    ):
        error = error_of(url, str(url), RuntimeError(text))
        assert type(error) is kind
        assert isinstance(error, MemstoreError)
        assert str(url) in error.message
