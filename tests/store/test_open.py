"""open: its modes, and what is fixed when a store is created."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import memstore
from tests.children import Wire, children, in_child
from tests.inside import root_of
from tests.support import faults

pytestmark = pytest.mark.embedded


def test_modes(root: str) -> None:
    for mode in ("r", "r+"):
        with pytest.raises(memstore.NotAStoreError, match="doesn't exist.*mode 'a'"):
            memstore.open(root, mode)
        assert not os.path.exists(root)
    with memstore.open(root, "x") as store:
        store.put("key", 1)
    with pytest.raises(memstore.AlreadyExistsError) as caught:
        memstore.open(root, "x")
    assert isinstance(caught.value, FileExistsError)
    for mode in ("r", "r+", "a"):
        with memstore.open(root, mode) as store:
            assert store.get("key") == 1


def test_an_empty_folder_is_no_store_yet(root: str) -> None:
    os.mkdir(root)
    for mode in ("r", "r+"):
        with pytest.raises(memstore.NotAStoreError, match="mode 'a' creates one"):
            memstore.open(root, mode)
    memstore.open(root, "x").close()


@pytest.mark.parametrize("mode", ["wb", "rw", "", None, "A", 3])
def test_another_mode_is_refused(root: str, mode: object) -> None:
    with pytest.raises(ValueError, match="mode is 'r'"):
        memstore.open(root, mode)  # type: ignore[arg-type]
    assert not os.path.exists(root)


def test_a_path_object_or_a_relative_path_will_do(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.path.dirname(root))
    with memstore.open(Path(root)) as store, memstore.open(os.path.basename(root)) as other:
        assert store.root == other.root == root
        monkeypatch.chdir("/")
        store.put("key", 1)
        assert other.get("key") == 1


@pytest.mark.parametrize("path", ["", b"/tmp/bytes", 3, None, "with\0nul"])
def test_what_is_no_path_is_refused(path: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError, memstore.NotAStoreError)):
        memstore.open(path)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("created", "others"),
    [
        ({"checksum": True}, {"checksum": False}),
        ({}, {"checksum": True}),
        ({"inline_limit": 100}, {"inline_limit": 101}),
        ({}, {"inline_limit": 0}),
        ({}, {"durability": "disk"}),
    ],
)
def test_what_is_fixed_at_creation_stays(root: str, created: dict, others: dict) -> None:
    memstore.open(root, **created).close()
    memstore.open(root).close()
    memstore.open(root, **created).close()
    (name,) = others
    for mode in ("a", "r+", "r"):
        with pytest.raises(ValueError, match=f"created with {name}=.*can't be changed"):
            memstore.open(root, mode, **others)


def test_disk_is_fixed_too(disk_root: str) -> None:
    with memstore.open(disk_root, durability="disk") as store:
        store.put("key", torch.zeros(1000))
    memstore.open(disk_root).close()
    for others in ({"durability": "process"}, {"checksum": False}):
        with pytest.raises(ValueError, match="created with .*can't be changed"):
            memstore.open(disk_root, **others)
    memstore.open(disk_root, durability="disk", checksum=True).close()


NONSENSE = [
    {"durability": "ram"}, {"inline_limit": -1}, {"inline_limit": 1 << 20}, {"inline_limit": 5.5}, {"capacity": "lots"},
    {"file_mode": 0o777}, {"file_mode": 0o1600}, {"file_mode": 0}, {"file_mode": 0o400}, {"file_mode": "rw"},
    {"checksum": "yes"}, {"inline_limit": "5"},
]  # fmt: skip


@pytest.mark.parametrize("timeout", ["x", None, []], ids=str)
def test_a_timeout_is_a_number(root: str, timeout: object) -> None:
    with pytest.raises(TypeError, match="a timeout is a number of seconds"):
        memstore.open(root, timeout=timeout)  # type: ignore[arg-type]
    assert not os.path.exists(root)


@pytest.mark.parametrize("options", NONSENSE, ids=str)
def test_settings_that_make_no_sense_are_refused(root: str, options: dict) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        memstore.open(root, **options)
    assert not os.path.exists(f"{root}/memstore.json")
    memstore.open(root).close()
    memstore.open(root, "r").close()


def test_mode_r_writes_nothing(store: memstore.Store) -> None:
    store.put_many({"a": 1, "b": torch.zeros(1000)})
    with memstore.open(store.root, "r") as reader:
        before = _contents(store.root)
        assert reader.get("b").shape == (1000,)
        assert list(reader) == ["a", "b"] and reader.info("a") and reader.stats().keys == 2
        for call in (
            lambda: reader.put("c", 1),
            lambda: reader.put_many({}),
            lambda: reader.delete("a"),
            lambda: reader.delete("missing", missing_ok=True),
            lambda: reader.delete_many([]),
            lambda: reader.update({}),
            lambda: reader.__setitem__("a", 2),
            lambda: reader.__delitem__("a"),
            lambda: reader.gc(),
            lambda: reader.pop("a"),
            lambda: reader.pop("missing", 1),
            lambda: reader.setdefault("a", 1),
        ):
            with pytest.raises(memstore.ReadOnlyError, match="mode 'r'.*'r\\+' or 'a'"):
                call()
        assert _contents(store.root) == before


def _contents(root: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(root).rglob("*")) if path.is_file()}


def test_opening_and_closing_changes_no_store(root: str) -> None:
    with memstore.open(root) as store:
        store.put_many({"a": 1, "b": torch.zeros(1000)})
    before = _contents(root)
    memstore.open(root, "r").close()
    memstore.open(root, "a").close()
    after = _contents(root)
    for name in before:
        assert after[name] == before[name] or name.endswith("lock.mdb"), name
    assert after.keys() == before.keys()


def test_many_create_it_at_once_and_all_get_the_same(scratch: str) -> None:
    with children(4, _create_and_put, scratch) as creators:
        assert [child.receive() for child in creators] == list(range(4))
    with memstore.open(scratch, "r") as store:
        assert dict(store.items()) == {f"{number}": number for number in range(4)}


def _create_and_put(_: Wire, number: int, root: str) -> int:
    with memstore.open(root) as store:
        store.put(f"{number}", number)
    return number


def test_threads_create_it_at_once_and_all_get_the_same(root: str) -> None:
    stores: list[memstore.Store] = []
    threads = [threading.Thread(target=lambda: stores.append(memstore.open(root))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[0].put("key", 1)
    assert [store.get("key") for store in stores] == [1] * 8
    for store in stores:
        store.close()


def test_stores_of_one_process_are_apart_in_what_they_may(root: str) -> None:
    with memstore.open(root) as writer, memstore.open(root, "r") as reader:
        writer.put("key", 1)
        with pytest.raises(memstore.ReadOnlyError):
            reader.put("key", 2)
        reader.close()
        assert writer.get("key") == 1


def test_two_stores_are_two(root: str) -> None:
    with memstore.open(root) as one, memstore.open(f"{root}2") as other:
        one.put("key", torch.zeros(1000))
        other.put("key", torch.ones(1000))
        assert one.get("key").sum() == 0 and other.get("key").sum() == 1000


def test_a_link_to_a_store_is_the_store(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", 1)
        os.symlink(root, f"{root}.link")
        with memstore.open(f"{root}.link", "r+") as other:
            assert other.get("key") == 1
            other.put("key", 2)
        assert store.get("key") == 2


@contextmanager
def busy(root: str) -> Iterator[None]:
    """A store whose folder is locked, as by a process that opens it."""
    memstore.open(root).close()
    fd = os.open(root, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_a_busy_folder_is_waited_for_no_longer_than_asked_and_its_user_named(root: str, timeout: float) -> None:
    with busy(root):
        started = time.monotonic()
        with pytest.raises(memstore.StoreTimeoutError, match=rf"(?s)(?=.*opening).*{os.getpid()}"):
            memstore.open(root, timeout=timeout)
        assert timeout <= time.monotonic() - started < 20


def test_a_thread_that_waits_for_one_store_keeps_nobody_from_another(root: str) -> None:
    opened: list[memstore.Store] = []
    waiting = threading.Thread(target=lambda: opened.append(memstore.open(root)))
    with busy(root):
        waiting.start()
        with memstore.open(f"{root}2", timeout=5.0) as other:
            other.put("key", 1)
            assert in_child(_get, f"{root}2") == 1
    waiting.join()
    opened[0].close()


def _get(root: str) -> object:
    with memstore.open(root, "r") as store:
        return store.get("key")


def test_it_gives_back_what_a_killed_writer_filled(root: str) -> None:
    with pytest.raises(RuntimeError, match="exit code -9"):
        in_child(_die_before_publication, root)
    assert len(os.listdir(f"{root}/segments")) == 2
    with memstore.open(root) as store:
        assert [f"{root}/segments/{name}" for name in os.listdir(f"{root}/segments")] == [*store.info("key").files]
        assert (store.get("key") == 1).all()


def _die_before_publication(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", torch.ones(5000))
        with faults.at_step(2, faults.die, names=frozenset({faults.COMMIT})):  # the first claims the file
            store.put("key", torch.zeros(5000))


def test_it_finishes_what_a_killed_writer_published(root: str) -> None:
    with pytest.raises(RuntimeError, match="exit code -9"):
        in_child(_die_after_publication, root)
    with memstore.open(root) as store:
        opened = root_of(store)
        with opened.guard:
            publications = opened.catalog.view(lambda transaction: transaction.counters()).publications
        assert (opened.mutex.notes.batch, opened.mutex.notes.publications_rung) == (0, publications)
        live = [os.path.basename(path) for path in store.info("key").files]
        for name in os.listdir(f"{root}/segments"):
            with open(f"{root}/segments/{name}", "rb") as file:
                assert (b" state=live " in file.read(128)) == (name in live)
        assert not store.get("key").any()


def _die_after_publication(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", torch.ones(5000))
        with faults.at_step(2, faults.die, after=True, names=frozenset({faults.COMMIT})):
            store.put("key", torch.zeros(5000))
