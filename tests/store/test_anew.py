"""A store that is begun anew, cleared or destroyed; and the stores of a machine."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pickle
import shutil
import stat
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
import memstore.aio
from tests.children import in_child
from tests.support import faults
from tests.support.fork_server import ForkServer

pytestmark = pytest.mark.embedded  # a folder, begun anew: no other backend has one

KILLED = -9
OLD, NEW = torch.arange(5000), torch.arange(7000)


def make(root: str, value: torch.Tensor = OLD) -> None:
    with memstore.open(root) as store:
        store.put("key", value)


# --- mode "w" ---------------------------------------------------------------------------------------------------------


def test_a_second_run_that_begins_anew_sees_no_key_of_the_first(scratch: str) -> None:
    for run in range(2):
        with memstore.open(scratch, "w") as store:
            assert list(store) == []
            assert store.put("key", run) == 1


def test_what_was_got_stays_valid_and_the_old_store_says_that_it_is_gone(scratch: str) -> None:
    make(scratch)
    old = memstore.open(scratch)
    value, view = old.get("key"), old.view("key")
    with memstore.open(scratch, "w") as new:
        new.put("key", NEW)
        with pytest.raises(memstore.NotAStoreError, match="open the store again"):
            old.put("key", OLD)
        assert torch.equal(value, OLD) and torch.equal(view[3:5], OLD[3:5])
        assert torch.equal(new.get("key"), NEW)


def test_the_options_of_the_call_are_those_of_the_new_store(scratch: str) -> None:
    memstore.open(scratch, checksum=True, inline_limit=0).close()
    with memstore.open(scratch, "w", inline_limit=7, file_mode=0o660):
        pass
    assert stat.S_IMODE(os.stat(f"{scratch}/memstore.json").st_mode) == 0o660
    with memstore.open(scratch, checksum=False, inline_limit=7):
        pass


@pytest.mark.parametrize("options", [{"durability": "disk"}, {"unix_group": "no group"}, {"capacity": "much"}])
def test_an_option_that_is_refused_leaves_the_old_store(scratch: str, options: dict[str, Any]) -> None:
    make(scratch)
    with pytest.raises((ValueError, memstore.UnsupportedFilesystemError, memstore.PermissionDeniedError)):
        memstore.open(scratch, "w", **options)
    with memstore.open(scratch, "r") as store:
        assert torch.equal(store.get("key"), OLD)


@pytest.mark.parametrize("end", [lambda root: memstore.open(root, "w"), memstore.destroy])
@pytest.mark.parametrize("name", ["notes.txt", "config.new"])
def test_other_peoples_files_are_never_removed(scratch: str, end: Callable[[str], object], name: str) -> None:
    make(scratch)
    Path(f"{scratch}/{name}").write_text("mine")
    with pytest.raises(memstore.NotAStoreError, match=f"has '{name}' beside"):
        end(scratch)
    with memstore.open(scratch, "r") as store:
        assert torch.equal(store.get("key"), OLD)
    os.unlink(f"{scratch}/memstore.json")
    with pytest.raises(memstore.NotAStoreError):
        end(scratch)
    assert Path(f"{scratch}/{name}").read_text() == "mine" and os.path.isdir(f"{scratch}/segments")


def test_a_member_of_a_cluster_is_not_begun_anew(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put("key", OLD)
    settings = Path(f"{scratch}/memstore.json")
    text = settings.read_text().replace('"format": 1', '"format": 2').replace("\n}", ',\n  "features": ["owners"]\n}')
    settings.write_text(text)
    with pytest.raises(memstore.NotServedError, match="several hosts"):
        memstore.open(scratch, "w")
    assert os.listdir(f"{scratch}/segments")


def test_two_that_begin_anew_at_once_end_with_one_store(scratch: str) -> None:
    make(scratch)
    stores: list[memstore.Store] = []

    def begin_anew() -> None:
        with contextlib.suppress(memstore.NotAStoreError):  # another one was faster still
            stores.append(memstore.open(scratch, "w"))

    threads = [threading.Thread(target=begin_anew) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = 0
    for store in stores:
        try:
            store.put("key", answers)
            answers += 1
        except memstore.NotAStoreError:
            pass
    assert answers == 1


def test_a_pickled_store_does_not_begin_anew(scratch: str) -> None:
    with memstore.open(scratch, "w") as store:
        store.put("key", 1)
        with pickle.loads(pickle.dumps(store)) as other:
            assert other.get("key") == 1
    with pytest.raises(TypeError, match="begin it anew"):
        pickle.dumps(memstore.aio.open(scratch, "w"))


# --- a kill at each step ----------------------------------------------------------------------------------------------


def steps_of(channel: Connection, root: str, way: str) -> None:
    gc.disable()
    channel.send(faults.record(lambda: WAYS[way](root)))


def die_at(channel: Connection, root: str, way: str, number: int) -> None:
    gc.disable()
    with faults.at_step(number, faults.die, after=True):
        WAYS[way](root)


WAYS: dict[str, Callable[[str], object]] = {"w": lambda root: memstore.open(root, "w"), "destroy": memstore.destroy}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stride", [30, pytest.param(1, marks=pytest.mark.full)])
def test_a_kill_leaves_the_old_store_or_none_or_the_new_one(
    way: str, stride: int, scratch: str, fork_server: ForkServer
) -> None:
    make(scratch)
    with fork_server.start(steps_of, scratch, way) as worker:
        names = worker.recv()
        worker.join()
    found: list[str] = []
    moment = names.index("rename") + 1
    for number in sorted({*range(1, len(names) + 1, stride), moment - 1, moment, len(names)}):
        memstore.destroy(scratch) if os.path.exists(f"{scratch}/memstore.json") else None
        make(scratch)
        reader = memstore.open(scratch, "r")
        with fork_server.start(die_at, scratch, way, number) as worker:
            assert worker.wait() == KILLED, names[number - 1]
        found.append(_state(scratch))
        assert (found[-1] == "old") == (number < moment), names[number - 1]
        if found[-1] != "old":
            with pytest.raises(memstore.NotAStoreError):
                reader.version("key")
        reader.close()
        with memstore.open(scratch) as store:  # whatever was left, the next one goes on
            assert list(store) == (["key"] if found[-1] == "old" else [])
            store.put("key", NEW)
            assert torch.equal(store.get("key"), NEW)
        assert not os.path.exists(f"{scratch}/segments.discarded")
    assert {"old", "none"} <= set(found) and found[-1] == ("new" if way == "w" else "none"), found


def _state(root: str) -> str:
    try:
        with memstore.open(root, "r") as store:
            return "old" if "key" in store else "new"
    except memstore.NotAStoreError:
        return "none"


# --- destroy, clear, and what fails -----------------------------------------------------------------------------------


def test_a_destroyed_store_is_gone_and_what_was_got_stays(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        value = store.get("key")
        in_child(memstore.destroy, scratch)
        assert not os.path.exists(scratch) and torch.equal(value, OLD)
        with pytest.raises(memstore.NotAStoreError, match="removed"):
            store.put("other", 1)
    with pytest.raises(memstore.NotAStoreError, match="nothing was removed"):
        memstore.destroy(scratch)


def test_clear_deletes_what_starts_with_the_prefix(scratch: str) -> None:
    spec = {"x": ((), torch.float32)}
    shard = memstore.TensorShard(torch.arange(4.0), (8,), (0,))
    with memstore.open(scratch) as store:
        store.put_many({"a/1": 1, "a/2": OLD, "b": 2})
        store.create_dataset("a/rows", spec, capacity=4)
        memstore.ReplayBuffer(store, "a/replay", spec, capacity=4)
        for key in ("a/sharded", "c"):
            store.put_sharded(key, {"w": shard}, attempt="one", rank=0, world_size=2, wait=False)
        assert store.clear("a/") == 4
        assert list(store) == ["b"] and [one.key for one in store.pending()] == ["c"]
        assert store.clear() == 1 and store.clear() == 0
    with memstore.open(scratch, "r") as store, pytest.raises(memstore.ReadOnlyError):
        store.clear()


def test_clear_goes_on_beyond_one_step(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put_many({f"key {number}": number for number in range(5000)})
        assert store.clear("key") == 5000 and len(store) == 0


def _no_room() -> None:
    raise OSError(28, "full")


def test_an_opening_that_fails_leaves_no_folder(scratch: str) -> None:
    with faults.at_step(20, _no_room), pytest.raises(memstore.StoreFullError, match="no room"):
        memstore.open(scratch)
    assert not os.path.exists(scratch)
    os.mkdir(scratch, 0o700)
    with faults.at_step(20, _no_room), pytest.raises(memstore.StoreFullError, match="no room"):
        memstore.open(scratch)
    assert os.listdir(scratch) == []


def test_an_opening_that_fails_leaves_the_folder_to_who_creates_a_store_in_it(scratch: str) -> None:
    held: list[int] = []

    def create_another() -> None:
        held.append(os.open(scratch, os.O_RDONLY))
        fcntl.flock(held[0], fcntl.LOCK_EX)  # as who has found the folder, and has made nothing yet

    made = faults.at_step(1, create_another, names=frozenset({"make_folder"}), after=True)
    with made, pytest.raises(memstore.StoreTimeoutError):
        memstore.open(scratch, timeout=0.1)
    assert os.listdir(scratch) == []
    os.close(held[0])


# --- the stores of a machine ------------------------------------------------------------------------------------------


def test_stores_leaves_out_what_only_looks_like_one(scratch: str) -> None:
    make(scratch)
    os.makedirs(f"{scratch}-odd/catalog")
    for name in ("memstore.json", "segments"):
        Path(f"{scratch}-odd/{name}").write_text("a file")
    try:
        roots = {one.root for one in memstore.stores()}
    finally:
        shutil.rmtree(f"{scratch}-odd")
    assert scratch in roots and f"{scratch}-odd" not in roots


def test_stores_lists_what_is_there_and_who_has_it_open(scratch: str, tmp_path: Path) -> None:
    os.makedirs(f"{scratch}/deep")
    closed, opened, on_disk = f"{scratch}/closed", f"{scratch}/deep/opened", str(tmp_path / "disk")
    for root in (closed, on_disk):
        make(root)
    with memstore.open(opened), memstore.open(on_disk):
        found = {one.root: one for one in memstore.stores()}
        assert found[opened].pids == (os.getpid(),) == found[on_disk].pids
        assert found[closed].pids == () and found[closed].nbytes >= OLD.nbytes
        assert found[closed].created <= found[closed].changed
    assert on_disk not in {one.root for one in memstore.stores()}
    memstore.destroy(closed)
    assert closed not in {one.root for one in memstore.stores()}
