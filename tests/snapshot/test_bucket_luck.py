"""Bad luck with buckets: ranks and managers that die at any request, what vanishes or expires meanwhile, full disks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memstore
from memstore import CheckpointManager, Snapshot, StateDict
from memstore.errors import CredentialsError, MemstoreError, NoBucketError, NoSnapshotError, UnknownOutcomeError
from memstore.snapshot import buckets, objects
from memstore.snapshot.chunks import CHUNK
from memstore.snapshot.manifest import MANIFEST, load_manifest, sums_name
from memstore.snapshot.objects import ObjectStorage
from tests.small_tmpfs import fill, on_small_tmpfs
from tests.snapshot.ranks import all_right, on_ranks
from tests.support.buckets import FaultProxy, Request, S3Server, options_for
from tests.support.fork_server import ForkServer

REQUESTS = ("put", "create", "copy", "remove", "list", "look")


@pytest.fixture
def options(s3_options: dict[str, Any]) -> dict[str, Any]:
    return s3_options


@contextlib.contextmanager
def at_request(number: int | None, then: Any = None) -> Iterator[list[str]]:
    """Counts the requests that change or list something, and does something before the one of this number, from 1."""
    made: list[str] = []
    real = {name: getattr(buckets.Bucket, name) for name in REQUESTS}

    def counting(name: str) -> Any:
        def request(self: Any, *arguments: Any) -> Any:
            made.append(name)
            if len(made) == number:
                then()
            return real[name](self, *arguments)

        return request

    for name in REQUESTS:
        setattr(buckets.Bucket, name, counting(name))
    try:
        yield made
    finally:
        for name, request in real.items():
            setattr(buckets.Bucket, name, request)


def die() -> None:
    os._exit(9)


def is_piece(request: Request) -> bool:
    return request.method == "PUT" and ".safetensors." in request.name


# --- a rank dies in each step of an upload ----------------------------------------------------------------------------


def state_of(rank: int, number: float) -> dict[str, Any]:
    return {"state": StateDict(number=number, own=torch.full((1000,), number + rank))}


def take_on_rank(rank: int, url: str, options: dict[str, Any], number: float) -> int:
    with at_request(None) as made:
        Snapshot.take(url, state_of(rank, number), storage_options={**options, "timeout": 60.0})
    return len(made)


def take_and_die_on_rank(rank: int, url: str, options: dict[str, Any], victim: int, request: int) -> None:
    with at_request(request if rank == victim else None, die):
        Snapshot.take(url, state_of(rank, 1.0), storage_options={**options, "timeout": 60.0})


def restore_on_rank(rank: int, url: str, options: dict[str, Any]) -> float:
    state = state_of(rank, -1.0)
    Snapshot(url, storage_options=options).restore(state)
    assert state["state"]["own"].unique().item() == state["state"]["number"] + rank
    return state["state"]["number"]


def call_on_ranks(channel: Any, function: Any, arguments: tuple[Any, ...], dead: tuple[int, ...]) -> None:
    channel.send(on_ranks(2, function, *arguments, dead=dead))


def on_two_ranks(server: ForkServer, function: Any, *arguments: Any, dead: tuple[int, ...] = ()) -> list[Any]:
    """Calls a function on two ranks, which aren't forked from this process: it has used an object store."""
    with server.start(call_on_ranks, function, arguments, dead) as worker:
        return worker.recv(200.0)


@pytest.mark.full
@pytest.mark.parametrize(("victim", "third"), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 3)])
def test_a_rank_that_dies_at_a_request_leaves_the_snapshot_or_none(
    third: int, victim: int, url: str, options: dict[str, Any], rank_server: ForkServer
) -> None:
    """At the first request, at the last one, and of rank 0, which makes most of them, at two between them."""
    counts = all_right(on_two_ranks(rank_server, take_on_rank, url + "-counts", options, 0.0))
    assert counts[0] >= 4 and counts[1] >= 2
    request = 1 + (counts[victim] - 1) * third // 3
    arguments = url, options, victim, request
    survivor = on_two_ranks(rank_server, take_and_die_on_rank, *arguments, dead=(victim,))[1 - victim]
    try:
        load_manifest(url, options)
        expected = 1.0
    except NoSnapshotError:
        assert isinstance(survivor, MemstoreError) and f"rank {victim}" in str(survivor), survivor
        all_right(on_two_ranks(rank_server, take_on_rank, url, options, 2.0))
        expected = 2.0
        left = ObjectStorage(url, options).names()
        assert len(left) == 4, left  # a piece of each rank, the manifest, the sums of boxes
    assert all_right(on_two_ranks(rank_server, restore_on_rank, url, options)) == [expected] * 2
    Snapshot(url, storage_options=options).verify()


# --- the trainer of an asynchronous take is killed, or its writer -----------------------------------------------------


def two_files(number: float) -> dict[str, Any]:
    model = torch.nn.Linear(30, 20)
    torch.nn.init.constant_(model.weight, number)
    torch.nn.init.constant_(model.bias, number)
    return {"model": model, **state_of(0, number)}


def take_asynchronously(channel: Any, url: str, options: dict[str, Any]) -> None:
    """Tells who writes; then kills it when it is told to, and takes again."""
    pending = Snapshot.async_take(url, two_files(1.0), storage_options=options)
    writer = pending._take._tiers[0]._write.writer
    channel.send(writer)
    channel.recv()
    os.kill(writer, signal.SIGKILL)
    try:
        pending.wait(100.0)
    except MemstoreError as error:
        channel.send(error)
    Snapshot.async_take(url, two_files(1.0), storage_options=options).wait(100.0)
    channel.send("taken")


def check_two_files(url: str, options: dict[str, Any]) -> None:
    Snapshot(url, storage_options=options).verify()
    found = two_files(-1.0)
    Snapshot(url, storage_options=options).restore(found)
    assert found["state"]["number"] == 1.0
    assert found["model"].weight.unique().tolist() == [1.0]


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100.0
    while not is_so():
        assert time.monotonic() < deadline, "this didn't come"
        time.sleep(0.02)


@pytest.mark.full
def test_a_trainer_that_is_killed_during_an_upload_leaves_it_to_the_writer(
    url: str, options: dict[str, Any], s3_proxy: FaultProxy, rank_server: ForkServer
) -> None:
    slow = s3_proxy.delay(lambda one: is_piece(one) and one.name.startswith("state."), 5.0)
    with rank_server.start(take_asynchronously, url, options) as trainer:
        trainer.recv(60.0)
        wait_until(lambda: slow.met)
        trainer.kill()
        assert trainer.wait(timeout=60.0) == -signal.SIGKILL
    assert MANIFEST not in ObjectStorage(url, options).names()
    wait_until(lambda: MANIFEST in ObjectStorage(url, options).names())
    check_two_files(url, options)


@pytest.mark.full
def test_a_writer_that_is_killed_during_an_upload_is_told_and_the_next_take_goes_on(
    url: str, options: dict[str, Any], s3_proxy: FaultProxy, rank_server: ForkServer
) -> None:
    slow = s3_proxy.delay(lambda one: is_piece(one) and one.name.startswith("state."), 5.0)
    with rank_server.start(take_asynchronously, url, options) as trainer:
        trainer.recv(60.0)
        wait_until(lambda: slow.met and s3_proxy.puts("model.safetensors."))
        trainer.send("kill it")
        error = trainer.recv(100.0)
        assert isinstance(error, UnknownOutcomeError) and "killed by signal 9" in str(error), error
        assert trainer.recv(100.0) == "taken"
    assert len(s3_proxy.puts("model.safetensors.")) == 1  # it was there
    check_two_files(url, options)


# --- a manager is killed while it removes, and two managers have one root ---------------------------------------------


def save_and_die(_: object, url: str, options: dict[str, Any], request: int) -> None:
    with CheckpointManager(url, keep_last=1, async_=False, storage_options=options) as manager:
        manager.save(1, {"progress": StateDict(step=1)})
        with at_request(request, die):
            manager.save(2, {"progress": StateDict(step=2)})
    os._exit(7)


@pytest.mark.full
def test_a_manager_that_is_killed_at_any_request_leaves_a_whole_step(
    url: str, options: dict[str, Any], rank_server: ForkServer
) -> None:
    for request in range(1, 100):
        root = f"{url}-{request}"
        code = rank_server.start(save_and_die, root, options, request).wait(timeout=100.0)
        with CheckpointManager(root, keep_last=1, async_=False, storage_options=options) as manager:
            newest = manager.latest()
            assert newest in (1, 2), (request, newest)
            found = StateDict(step=0)
            assert manager.restore({"progress": found}) == newest == found["step"]
            manager.save(3, {"progress": StateDict(step=3)})
            assert manager.latest() == 3
            assert 1 not in manager.steps()
        if code == 7:
            assert request > 10, "this tests nothing"
            return
        assert code == 9


def test_two_managers_on_one_root_remove_by_their_rules_and_leave_the_newest(url: str, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both = [
            CheckpointManager(url, keep_last=1, incremental=True, async_=False, storage_options=options)
            for _ in range(2)
        ]
        for step in range(1, 4):
            for number, manager in enumerate(both):
                manager.save(step, {"state": StateDict(step=step, by=number, w=torch.full((1000,), float(step)))})
    for manager in both:
        found = StateDict(step=0, by=-1)
        assert manager.steps() == [3]
        assert manager.restore({"state": found}) == 3
        assert (found["step"], found["by"], found["w"][0].item()) == (3, 1, 3.0)


# --- what vanishes, expires or fills up meanwhile ---------------------------------------------------------------------


def test_a_bucket_that_vanishes_in_the_middle_is_named(
    s3_server: S3Server, s3_proxy: FaultProxy, options: dict[str, Any]
) -> None:
    s3_server.make_bucket("vanishing")
    url = "s3://vanishing/run/step-1"

    def vanish(_: Request) -> None:
        storage = ObjectStorage(url, options)
        storage.remove_all(storage.names())
        request = urllib.request.Request(f"{s3_server.url}/vanishing", method="DELETE")
        urllib.request.urlopen(request, timeout=30).close()

    s3_proxy.call(is_piece, vanish)
    with pytest.raises(NoBucketError, match="vanishing"):
        Snapshot.take(url, state_of(0, 1.0), storage_options=options)
    s3_server.make_bucket("vanishing")
    Snapshot.take(url, state_of(0, 1.0), storage_options=options)
    s3_proxy.call(lambda one: one.method == "GET" and ".safetensors." in one.name, vanish)
    with pytest.raises((NoBucketError, memstore.VersionGoneError)):
        Snapshot(url, storage_options=options).restore(state_of(0, 2.0))


def test_credentials_that_expire_in_the_middle_are_renewed_and_the_rest_is_put(
    url: str, options: dict[str, Any], s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PIECE", CHUNK)
    monkeypatch.setattr(objects, "_MOST_AT_ONCE", 1)  # in order
    app_state = {"state": StateDict(w=torch.arange(2 * CHUNK // 4 + 100, dtype=torch.float32))}
    old, new = ({**options, "session_token": name} for name in ("old", "new"))

    def has_expired(request: Request) -> bool:
        return request.headers.get("x-amz-security-token") == "old"

    s3_proxy.fail(lambda one: is_piece(one) and ".00001-" in one.name, 403, "ExpiredToken")
    s3_proxy.fail(
        lambda one: has_expired(one) and len(s3_proxy.puts(".safetensors.")) == 1, 403, "ExpiredToken", times=99
    )
    with pytest.raises(CredentialsError, match="renew"):
        Snapshot.take(url, app_state, storage_options=old)
    put = {one.name for one in s3_proxy.puts(".safetensors.")}
    assert len(put) == 1
    Snapshot.take(url, app_state, storage_options=new)
    again = [one.name for one in s3_proxy.puts(".safetensors.")]
    assert len(again) == len(set(again)) == 3
    # so do reads
    s3_proxy.clear()
    s3_proxy.fail(lambda one: one.method == "GET" and ".00001-" in one.name, 403, "ExpiredToken")
    found = StateDict()
    with pytest.raises(CredentialsError, match="renew"):
        Snapshot(url, storage_options=new).restore({"state": found})
    Snapshot(url, storage_options=new).restore({"state": found})
    assert torch.equal(found["w"], app_state["state"]["w"])


def test_a_base_whose_sums_an_older_memstore_has_pruned_is_written_whole(
    url: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """To an older version the sums of boxes in a bucket are what a dead take has left."""
    Snapshot.take(url, state_of(0, 1.0), storage_options=options)
    ObjectStorage(url, options).remove(sums_name(load_manifest(url, options).id))
    Snapshot.take(url + "-2", state_of(0, 1.0), storage_options=options, base=url)
    assert "written whole" in caplog.text
    Snapshot(url + "-2", storage_options=options).verify()
    found = state_of(0, 0.0)
    Snapshot(url + "-2", storage_options=options).restore(found)
    assert found["state"]["number"] == 1.0


def take_on_full_disk(folder: str, url: str, options: dict[str, Any]) -> None:
    fill(folder, leave=1 << 20)
    state = state_of(0, 1.0) | {"large": StateDict(x=torch.zeros(2 << 20, dtype=torch.uint8))}
    with pytest.warns(RuntimeWarning, match="there is no snapshot in"):
        found = Snapshot.async_take(f"{folder}/step-1", state, then=[url], storage_options=options).wait(100.0)
    assert found.path == url
    assert not os.path.exists(f"{folder}/step-1/{MANIFEST}")


def take_on_small_tmpfs(_: object, url: str, options: dict[str, Any]) -> None:
    on_small_tmpfs(4, take_on_full_disk, url, options)


@pytest.mark.full
def test_a_disk_that_fills_up_leaves_the_upload(url: str, s3_server: S3Server, rank_server: ForkServer) -> None:
    options = options_for(s3_server.url)
    rank_server.start(take_on_small_tmpfs, url, options).join(100.0)
    Snapshot(url, storage_options=options).verify()
    found = state_of(0, 0.0)
    Snapshot(url, storage_options=options).restore(found)
    assert found["state"]["number"] == 1.0
