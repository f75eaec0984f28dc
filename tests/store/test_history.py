"""Versions that were replaced stay readable as long as the key's history says so, and no longer."""

from __future__ import annotations

import errno
import os
import pickle
from typing import Any

import msgspec
import pytest
import torch

import memstore
from memstore.errors import CrossHostError, FormatVersionError, StoreFullError, VersionGoneError
from tests.children import Child, Wire
from tests.inside import root_of
from tests.store.backends import open_store
from tests.support import faults
from tests.support.equality import assert_same

SIZES = {"object": 0, "inline": 100, "segment": 20_000, "mapped": 300_000}  # int64s; beyond 64 KiB in files


def value(kind: str, number: int) -> Any:
    return [number, "text"] if kind == "object" else {"x": torch.full((SIZES[kind],), number), "n": number}


@pytest.fixture(params=SIZES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def put_all(store: memstore.Store, kind: str, numbers: range, **options: Any) -> list[int]:
    return [store.put("k", value(kind, number), **options) for number in numbers]


def files(store: memstore.Store) -> int:
    store.gc()
    return len(os.listdir(f"{store.root}/segments"))


@pytest.mark.embedded
@pytest.mark.parametrize("options", [{"history": 2}, {"delta_of": True}])
def test_the_first_such_put_says_that_the_disk_is_full(store: memstore.Store, options: dict[str, Any]) -> None:
    """It notes in memstore.json that the store has such versions, before it does anything else."""

    def fail(number: int, what: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    leaves = [torch.zeros(1 << 16) for _ in range(8)]
    store.put("k", leaves)
    full = faults.watching(fail, lambda *_: None, names=frozenset({"write_at"}))
    with full, pytest.raises(StoreFullError, match="no room for 'k'"):
        store.put("k", leaves, **options)
    assert store.get("k", version=store.put("k", leaves, **options)) is not None


def test_the_last_versions_are_read(store: memstore.Store, kind: str) -> None:
    first = put_all(store, kind, range(1))
    assert store.versions("k") == tuple(first)
    versions = first + put_all(store, kind, range(1, 6), history=3)
    assert store.versions("k") == tuple(versions[-3:])
    for number in (3, 4, 5):
        version = versions[number]
        assert_same(value(kind, number), store.get("k", version=version))
        assert_same(value(kind, number), store.get("k", None, version=version))
        if kind != "object":
            assert (store.view("k", version=version)["x"][3:5] == number).all()
    assert_same(value(kind, 5), store.get("k"))
    assert store.verify().ok


def test_later_puts_go_on_with_it(store: memstore.Store, kind: str) -> None:
    """Of any process, and of any kind of value."""
    versions = put_all(store, kind, range(1), history=2)
    with Child(_put, store.root, kind) as child:
        versions += [child.receive()]
    assert_same(value(kind, 0), store.get("k", version=versions[0]))
    versions += [*store.put_many({"k": 7, "other": 8}).values()][:1]
    assert_same(value(kind, 100), store.get("k", version=versions[1]))
    assert store.versions("k") == tuple(versions[-2:]) and store.get("k") == 7
    versions.append(store.put("k", value(kind, 9), expect_version=versions[-1]))
    assert store.get("k", version=versions[-2]) == 7
    assert store.versions("other") == (store.version("other"),)


def _put(wire: Wire, path: str, kind: str) -> None:
    with open_store(path) as store:
        wire.send(store.put("k", value(kind, 100)))


def test_a_version_that_is_gone_says_so(store: memstore.Store, kind: str) -> None:
    versions = put_all(store, kind, range(4), history=2)
    with pytest.raises(
        VersionGoneError, match=f"'k' has no version {versions[0]}: it has 2, .* {versions[-1]}: put"
    ) as raised:
        store.get("k", version=versions[0])
    assert raised.value.key == "k"
    for call in (store.get, store.view):
        with pytest.raises(VersionGoneError):
            call("k", version=versions[1])
        with pytest.raises(VersionGoneError, match="it is at version .* yet: wait"):
            call("k", version=versions[-1] + 1)
        with pytest.raises(memstore.KeyNotFoundError):
            call("none", version=1)
    assert store.get("k", "gone", version=versions[0]) == "gone"
    assert store.get("none", "gone", version=1) == "gone"
    with pytest.raises(memstore.KeyNotFoundError):
        store.versions("none")


@pytest.mark.embedded
def test_one_version_ends_a_history(store: memstore.Store, kind: str) -> None:
    versions = put_all(store, kind, range(4), history=4)
    versions += put_all(store, kind, range(1), history=1)
    assert store.versions("k") == (versions[-1],)
    assert files(store) == (kind in ("segment", "mapped"))
    versions += put_all(store, kind, range(1))
    assert store.versions("k") == (versions[-1],)


@pytest.mark.embedded
def test_fewer_versions_are_fewer_at_once(store: memstore.Store, kind: str) -> None:
    versions = put_all(store, kind, range(6), history=6)
    versions += put_all(store, kind, range(1), history=3)
    assert store.versions("k") == tuple(versions[-3:])
    assert files(store) == 3 * (kind in ("segment", "mapped"))


def test_bytes_bound_it(store: memstore.Store) -> None:
    """The oldest go first; one that is larger alone than the bound is not kept, nor what is older."""
    versions = put_all(store, "segment", range(6), history=6, history_bytes=600_000)
    assert store.versions("k") == tuple(versions[-4:])  # of 160 kB each
    versions += put_all(store, "mapped", range(2))
    assert store.versions("k") == (versions[-1],)
    versions += put_all(store, "inline", range(3))
    assert store.versions("k") == tuple(versions[-3:])


@pytest.mark.embedded
def test_a_delete_takes_all_of_it(store: memstore.Store, kind: str) -> None:
    versions = put_all(store, kind, range(3), history=3)
    held = store.get("k", version=versions[0])
    store.delete("k")
    with pytest.raises(memstore.KeyNotFoundError):
        store.get("k", version=versions[1])
    with pytest.raises(memstore.KeyNotFoundError):
        store.versions("k")
    assert_same(value(kind, 0), held)
    del held
    assert files(store) == 0 and store.stats().live_bytes == 0
    version = store.put("k", value(kind, 5))
    assert store.put("k", value(kind, 6)) > version
    assert store.versions("k") == (store.version("k"),), "a new key has no history"


@pytest.mark.embedded
def test_clear_and_pop_do_too(store: memstore.Store, kind: str) -> None:
    put_all(store, kind, range(3), history=3)
    assert store.clear() == 1 and files(store) == 0
    put_all(store, kind, range(3), history=3)
    assert_same(value(kind, 2), store.pop("k"))
    assert files(store) == 0 and store.stats().live_bytes == 0


def test_gc_leaves_it(store: memstore.Store, kind: str) -> None:
    versions = put_all(store, kind, range(3), history=3)
    store.gc()
    assert store.versions("k") == tuple(versions)
    assert_same(value(kind, 0), store.get("k", version=versions[0]))


@pytest.mark.embedded
def test_its_files_are_used_again(store: memstore.Store) -> None:
    """A history of three takes four or five files, however often its key is put."""
    put_all(store, "segment", range(40), history=3)
    assert len(os.listdir(f"{store.root}/segments")) <= 5


def test_a_held_version_never_changes(store: memstore.Store, kind: str) -> None:
    """Nor does a view, or a ref, when it leaves the history."""
    versions = put_all(store, kind, range(3), history=3)
    held = store.get("k", version=versions[0])
    seen = store.view("k", version=versions[1]) if kind != "object" else None
    ref = pickle.loads(pickle.dumps(store.ref("k")))
    put_all(store, kind, range(10, 20))
    assert_same(value(kind, 0), held)
    assert_same(value(kind, 2), ref.get())
    assert seen is None or (seen["x"][:] == 1).all()


def test_no_version_is_expected_but_the_present_one(store: memstore.Store) -> None:
    versions = put_all(store, "segment", range(3), history=3)
    for call in (
        lambda: store.put("k", 1, expect_version=versions[0]),
        lambda: store.delete("k", expect_version=versions[1]),
    ):
        with pytest.raises(memstore.VersionConflictError):
            call()
    assert store.wait("k", newer_than=versions[1]) == versions[2]
    with pytest.raises(memstore.StoreTimeoutError):
        store.wait("k", newer_than=versions[2], timeout=0)
    assert store.versions("k") == tuple(versions)


@pytest.mark.embedded
def test_a_full_store_gives_up_the_oldest(root: str) -> None:
    """Before a put fails; of all keys."""
    with memstore.open(root, capacity="1MiB", inline_limit=0) as store:
        versions = {key: [] for key in ("a", "b")}
        for number in range(12):
            for key, found in versions.items():
                found.append(store.put(key, torch.full((12_000,), number), history=10))
        kept = {key: store.versions(key) for key in versions}
        assert all(kept[key] == tuple(found[-len(kept[key]) :]) for key, found in versions.items())
        assert 7 <= sum(map(len, kept.values())) <= 10, kept
        oldest = min(kept["a"] + kept["b"])
        assert all(version in kept[key] for key, found in versions.items() for version in found if version >= oldest)
        with pytest.raises(memstore.StoreFullError):
            store.put("large", torch.zeros(1 << 18))
        assert {key: store.versions(key) for key in versions} == kept, "it would not have fitted anyway"
        store.put("large", torch.zeros(90_000))
        assert 2 <= sum(len(store.versions(key)) for key in versions) < sum(map(len, kept.values()))
        assert (store.get("large") == 0).all()
        assert store.verify().ok


@pytest.mark.embedded
def test_a_full_disk_says_that_earlier_versions_went(root: str) -> None:
    """Nobody can tell beforehand whether they are enough there. With a capacity somebody can, and none goes."""

    def fail(number: int, what: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with memstore.open(root, inline_limit=0) as store:
        versions = put_all(store, "segment", range(3), history=3)
        for outcome in ("earlier versions went to make room, and nothing else was changed", "nothing was changed"):
            full = faults.watching(fail, lambda *_: None, names=frozenset({"allocate", "populate"}))
            with full, pytest.raises(StoreFullError, match=f"; {outcome}$"):
                store.put("large", torch.zeros(1 << 20))
            assert store.versions("k") == tuple(versions[-1:])
        assert "large" not in store and store.version("k") == versions[-1]


def test_it_is_there_when_the_store_is_opened_again(root: str, kind: str) -> None:
    with open_store(root) as store:
        versions = put_all(store, kind, range(3), history=3)
    with open_store(root, "r") as store:
        assert store.versions("k") == tuple(versions)
        assert_same(value(kind, 1), store.get("k", version=versions[1]))


def test_a_reader_that_opened_before_sees_it(root: str, kind: str) -> None:
    with open_store(root) as store, open_store(root, "r") as reader:
        assert len(reader) == 0
        versions = put_all(store, kind, range(3), history=3)
        with Child(_read, store.root, versions[0]) as child:
            assert child.receive() == 3
        assert_same(value(kind, 0), reader.get("k", version=versions[0]))


def _read(wire: Wire, path: str, version: int) -> None:
    with open_store(path, "r") as store:
        store.get("k", version=version)
        wire.send(len(store.versions("k")))


def test_attached_files_have_one(store: memstore.Store, tmp_path: Any) -> None:
    torch.save({"x": torch.ones(1000)}, tmp_path / "one.pt")
    first = store.attach("k", tmp_path / "one.pt")
    second = store.put("k", 2, history=2)
    assert store.versions("k") == (first, second)
    assert (store.get("k", version=first)["x"] == 1).all()


@pytest.mark.embedded
def test_sharded_puts_go_on_with_it(store: memstore.Store) -> None:
    versions = put_all(store, "segment", range(1), history=2)
    for attempt in range(3):
        for rank in range(2):
            shard = memstore.TensorShard(torch.full((1, 9000), attempt), global_shape=(2, 9000), offsets=(rank, 0))
            pending = store.put_sharded("k", shard, attempt=str(attempt), rank=rank, world_size=2, wait=False)
        versions.append(pending.wait())
        assert store.versions("k") == tuple(versions[-2:])
    assert (store.get("k", version=versions[-2]) == 1).all()
    assert store.verify().ok
    store.delete("k")
    assert files(store) == 0


def test_datasets_have_none(store: memstore.Store) -> None:
    version = store.put("other", 1, history=2)
    data = store.create_dataset("k", ((2,), torch.float32), capacity=10)
    data.extend(torch.ones(3, 2))
    with pytest.raises(memstore.MutableEntryError):
        store.put("k", 1, history=3)
    with pytest.raises(memstore.MutableEntryError):
        store.get("k", version=store.version("k"))
    sealed = data.seal()
    assert store.versions("k") == (sealed,) and store.versions("other") == (version,)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"history": 0}, "1 to 1,000, and not 0"),
        ({"history": 1001}, "1 to 1,000, and not 1001"),
        ({"history": 2.0}, "a whole number"),
        ({"history": True}, "a whole number"),
        ({"history_bytes": 100}, "give both"),
        ({"history": 3, "history_bytes": 0}, "a size is"),
        ({"history": 3, "history_bytes": "much"}, "a size is"),
    ],
)
def test_what_is_no_history_is_refused(store: memstore.Store, options: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        store.put("k", 1, **options)
    assert "k" not in store


def test_what_is_no_version_is_refused(store: memstore.Store) -> None:
    store.put("k", 1)
    for call in (store.get, store.view):
        for version in (0, -1, 1 << 63):
            with pytest.raises(ValueError, match="version is one that put returned"):
                call("k", version=version)
        with pytest.raises(TypeError):
            call("k", version="1")


@pytest.mark.embedded
def test_earlier_versions_of_memstore_refuse_such_a_store(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with memstore.open(root) as store:
        store.put("k", 1)
        assert root_of(store).settings.features == ()
        store.put("k", 1, history=2)
        assert root_of(store).settings.features == ("history",)
    monkeypatch.setattr("memstore.engine.root.folder.get_args", lambda _: ("sharded", "mutable", "owners", "shared"))
    with pytest.raises(FormatVersionError, match="the feature history"):
        memstore.open(root)


@pytest.mark.embedded
def test_a_store_with_a_history_may_be_served(root: str) -> None:
    from memstore.engine import deadline_after, need_cluster

    with memstore.open(root) as store:
        versions = [store.put("k", number, history=2) for number in range(3)]
        need_cluster(root_of(store), deadline_after(10))
        assert store.versions("k") == tuple(versions[-2:])
        versions.append(store.put("k", 3, history=3))
        assert store.versions("k") == tuple(versions[-3:])


@pytest.mark.embedded
def test_a_store_on_storage_that_hosts_share_has_none(root: str) -> None:
    from memstore.engine.root.folder import HISTORY, Shared, check_one_host

    with memstore.open(root) as store:
        settings = msgspec.structs.replace(root_of(store).settings, shared=Shared("s"))
    with pytest.raises(CrossHostError, match="on storage that hosts share, and replaced versions aren't kept there"):
        check_one_host(root, settings, HISTORY)
