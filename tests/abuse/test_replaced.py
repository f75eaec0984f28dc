"""A store that is removed, moved or made anew while it is open: every call of who has it open says so."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import memstore
from tests.abuse.replacing import (
    INLINE,
    SEGMENT,
    WAYS,
    begin_anew,
    empty_and_make_anew,
    look_again,
    make,
    make_anew,
    move_and_make_anew,
    move_away,
    remove_slowly,
)
from tests.abuse.test_closed import CALLS
from tests.children import Child, Wire, in_child
from tests.crash.blockers import waiting_for_mutexes
from tests.inside import root_of
from tests.namespaces import MOUNTS, bind_mount, in_namespaces, mount_overlay, mount_tmpfs, unmount
from tests.overlay import on_overlay
from tests.support import faults
from tests.users import USER, as_user, needs_root

# What a call makes of a store that isn't there any more, beside those that a closed one refuses too.
ALL_CALLS: dict[str, Callable[[memstore.Store, str], object]] = {
    **{name: lambda store, _, call=call: call(store) for name, call in CALLS.items()},
    "put of a segment": lambda store, _: store.put("key", SEGMENT),
    "put with a version": lambda store, _: store.put("key", 2, expect_version=1),
    "get of a segment": lambda store, _: store.get("segment"),
    "get of no key": lambda store, _: store.get("missing", None),
    "in of no key": lambda store, _: "missing" in store,
    "wait for what is there": lambda store, _: store.wait("key"),
    "view": lambda store, _: store.view("segment"),
    "ref of a segment": lambda store, _: store.ref("segment"),
    "keys": lambda store, _: list(store.keys("k")),
    "attach": lambda store, files: store.attach("key", f"{files}/a.npy"),
    "attach a copy": lambda store, files: store.attach("key", f"{files}/a.npy", copy=True),
    "export": lambda store, files: store.export("segment", f"{files}/out.safetensors"),
    "verify": lambda store, _: store.verify(),
    "verify of a key": lambda store, _: store.verify(["key"]),
}


@pytest.fixture
def home(scratch: str, tmp_path: Path) -> Iterator[str]:
    """A path for a store whose parent may be moved too."""
    os.mkdir(parent := f"{scratch}.parent")
    yield f"{parent}/store"


@pytest.fixture
def files(tmp_path: Path) -> str:
    np.save(tmp_path / "a.npy", np.arange(4))
    return str(tmp_path)


# --- every call says so -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["a", "r"])
@pytest.mark.parametrize("way", WAYS)
def test_every_call_says_so(home: str, files: str, way: Callable[[str], None], mode: Any) -> None:
    make(home)
    store = memstore.open(home, mode)
    keys = store.keys()
    list(store.keys())
    in_child(way, home)
    answered = {}
    for name, call in {**ALL_CALLS, "an iteration": lambda *_: next(keys)}.items():
        try:
            answered[name] = call(store, files)
        except memstore.NotAStoreError as error:
            assert home in str(error) and "open the store again" in str(error), name
        except memstore.ReadOnlyError:
            assert mode == "r", name
    assert answered == {}
    assert os.listdir(files) == ["a.npy"]
    store.close()
    if way in (make_anew, empty_and_make_anew, move_and_make_anew, begin_anew):
        with memstore.open(home) as other:
            assert torch.equal(other.get("key"), INLINE)


CALLS_OF_ROWS: dict[str, Callable[[memstore.Dataset, memstore.ReplayBuffer], object]] = {
    "extend": lambda data, _: data.extend({"x": torch.ones(2)}),
    "a row": lambda data, _: data[0],
    "rows": lambda data, _: data[0:1],
    "read_rows": lambda data, _: data.read_rows([0]),
    "a batch": lambda data, _: data.__getitems__([0]),
    "a row that is written": lambda data, _: data.__setitem__(0, {"x": torch.tensor(1.0)}),
    "flush": lambda data, _: data.flush(),
    "seal": lambda data, _: data.seal(),
    "add": lambda _, replay: replay.add({"x": torch.tensor(1.0)}),
    "extend of a buffer": lambda _, replay: replay.extend({"x": torch.ones(3)}),
    "sample": lambda _, replay: replay.sample(1),
    "flush of a buffer": lambda _, replay: replay.flush(),
}


@pytest.mark.parametrize("way", WAYS)
def test_calls_for_rows_say_so_too(home: str, way: Callable[[str], None]) -> None:
    make(home)
    spec = {"x": ((), torch.float32)}
    with memstore.open(home) as store:
        data = store.create_dataset("rows", spec, capacity=8)
        data.extend({"x": torch.ones(2)})
        replay = memstore.ReplayBuffer(store, "replay", spec, capacity=8)
        replay.extend({"x": torch.ones(2)})
        in_child(way, home)
        for name, call in CALLS_OF_ROWS.items():
            with pytest.raises(memstore.NotAStoreError, match="open the store again"):
                print(name, call(data, replay))


def test_a_sample_that_waits_for_rows_hears_that_the_store_was_removed(home: str) -> None:
    make(home)
    with memstore.open(home) as store:
        replay = memstore.ReplayBuffer(store, "replay", {"x": ((), torch.float32)}, capacity=8)
        remover = threading.Timer(0.1, shutil.rmtree, [home])
        remover.start()
        with pytest.raises(memstore.NotAStoreError):
            replay.sample(1, timeout=60.0)
        remover.join()


@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_get_during_which_it_is_made_anew_tells_of_no_damage(scratch: str, mode: Any) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        steps = len(faults.record(lambda: store.get("segment")))
    refused = 0
    for number in range(1, steps + 1):
        with memstore.open(scratch, mode) as store, faults.at_step(number, lambda: make_anew(scratch)):
            try:
                assert torch.equal(store.get("segment"), SEGMENT)
            except memstore.NotAStoreError:
                refused += 1
    assert 0 < refused < steps


def test_a_verify_during_which_it_is_made_anew_tells_of_no_damage(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        looks = iter([lambda: make_anew(scratch)])
        with pytest.raises(memstore.NotAStoreError):
            store.verify(progress=lambda *_: next(looks, lambda: None)())


@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_store_that_is_removed_file_by_file_tells_of_no_damage(scratch: str, mode: Any) -> None:
    """As of a large one: `rm -r` takes a while, and what it removes last is not in its hand."""
    with memstore.open(scratch) as store:
        keys = [f"key-{number}" for number in range(8)]
        store.put_many({key: SEGMENT + number for number, key in enumerate(keys)})
        store.create_dataset_from("rows", {"x": torch.zeros(2, 3)})
    with memstore.open(scratch, mode) as store:
        remover = threading.Thread(target=remove_slowly, args=(scratch,))
        remover.start()
        try:
            with pytest.raises(memstore.NotAStoreError, match="was removed or moved while the store was open"):
                while True:
                    for key in keys:
                        store.get(key)
                    store.open_dataset("rows", "r")
        finally:
            remover.join()


@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_missing_file_of_a_store_that_stays_is_damage(scratch: str, mode: Any) -> None:
    make(scratch)
    with memstore.open(scratch, mode) as store:
        for name in os.listdir(f"{scratch}/segments"):
            os.unlink(f"{scratch}/segments/{name}")
        for _ in range(3):  # and only the first look waits for what else vanishes
            with pytest.raises(memstore.CorruptionError, match="the file is missing"):
                store.get("segment")


def test_a_reference_into_a_store_that_was_moved_and_opened_anew_says_so(home: str) -> None:
    make(home)
    with memstore.open(home) as old:
        ref = old.ref("segment")
        os.rename(home, f"{home}.moved")
        with memstore.open(f"{home}.moved") as store:
            assert torch.equal(store.get("segment"), SEGMENT)
            for call in (ref.get, lambda: old.get("segment"), lambda: old.put("key", 1)):
                with pytest.raises((memstore.NotAStoreError, memstore.VersionGoneError), match="moved"):
                    call()
        os.rename(f"{home}.moved", home)
        with pytest.raises(memstore.NotAStoreError, match="opened anew since"):
            old.get("segment")


def test_the_same_process_may_have_both_open(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as old:
        held, ref, view = old.get("segment"), old.ref("key"), old.view("segment")
        in_child(make_anew, scratch)
        with memstore.open(scratch) as new:
            new.put("key", 7)
            for _ in range(3):
                with pytest.raises(memstore.NotAStoreError, match="replaced meanwhile"):
                    old.put("key", 8)
                assert new.get("key") == 7
            old.close()
            new.put("segment", SEGMENT + 1)
            assert torch.equal(new.get("segment"), SEGMENT + 1)
        assert torch.equal(held, SEGMENT) and torch.equal(view[:], SEGMENT) and torch.equal(ref.get(), INLINE)


@pytest.mark.parametrize("way", [shutil.rmtree, make_anew, move_and_make_anew])
def test_what_is_sent_from_it_would_not_arrive(scratch: str, way: Callable[[str], None]) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        sent = [store.ref("segment"), store.ref("key"), store.view("segment"), store.view("key")]
        in_child(way, scratch)
        for one in sent:
            with pytest.raises(
                memstore.VersionGoneError, match=f"in {scratch} is gone: .*(removed|replaced)"
            ) as caught:
                pickle.dumps(one)
            assert caught.value.key in ("key", "segment")


def test_a_store_that_was_moved_and_moved_back_goes_on(home: str) -> None:
    make(home)
    with memstore.open(home) as store:
        for path in (home, os.path.dirname(home)):
            os.rename(path, f"{path}.aside")
            look_again(store)
            with pytest.raises(memstore.NotAStoreError):
                store.get("key")
            with pytest.raises(memstore.NotAStoreError):
                store.put("key", 1)
            os.rename(f"{path}.aside", path)
            assert torch.equal(store.get("key"), INLINE)
            assert store.put("segment", SEGMENT) > 2


def test_waits_end(scratch: str) -> None:
    make(scratch)
    ended: list[BaseException] = []

    def wait(store: memstore.Store, timeout: float) -> None:
        try:
            store.wait("key", newer_than=99, timeout=timeout)
        except BaseException as error:
            ended.append(error)

    with memstore.open(scratch) as store, memstore.open(scratch, "r") as reader:
        threads = [
            threading.Thread(target=wait, args=(one, timeout))
            for one, timeout in ((store, 20.0), (reader, float("inf")))
        ]
        for thread in threads:
            thread.start()
        in_child(make_anew, scratch)
        for thread in threads:
            thread.join(100)
    assert [type(error) for error in ended] == [memstore.NotAStoreError] * 2


# --- forks ------------------------------------------------------------------------------------------------------------


def test_a_child_that_was_forked_before(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        refs, views = [store.ref("key")], [store.view("segment"), store.view("key")]
        with Child(_use_after_removal, store, refs, views) as child:
            child.receive()
            shutil.rmtree(scratch)
            child.send()
            assert child.receive() == []
        with Child(_use_after_removal, store, refs, views) as child:
            child.receive()
            make(scratch)
            child.send()
            assert child.receive() == []


def _use_after_removal(wire: Wire, store: memstore.Store, refs: list[memstore.Ref], views: list[Any]) -> list[str]:
    wire.send()
    wire.receive()
    assert torch.equal(refs[0].get(), INLINE) and torch.equal(refs[0].view()[:], INLINE)
    assert torch.equal(views[0].sum(), SEGMENT.sum()) and torch.equal(views[1][2:], INLINE[2:])
    answered: list[str] = []
    for name, call in ALL_CALLS.items():
        try:
            call(store, store.root)
        except memstore.NotAStoreError:
            continue
        answered.append(name)
    return answered


# --- during puts: what is acknowledged is in the store that the path names --------------------------------------------


class Change(NamedTuple):
    make: Callable[[memstore.Store], object]
    commits: int  # that of a claim, and its own
    keys: tuple[str, ...]


CHANGES = {
    "inline": Change(lambda store: store.put("key", INLINE + 1), 1, ("key",)),
    "segment": Change(lambda store: store.put("segment", SEGMENT + 1), 2, ("segment",)),
    "batch": Change(lambda store: store.put_many({"key": INLINE + 1, "segment": SEGMENT + 1}), 2, ("key", "segment")),
    "delete": Change(lambda store: store.delete_many(["key", "segment"]), 1, ("key", "segment")),
}


def steps_until_its_commit(change: Change, root: str) -> int:
    make(root)
    with memstore.open(root) as store:
        change.make(store)
        make(root)
        steps = faults.record(lambda: change.make(store))
    return [number for number, name in enumerate(steps, 1) if name == faults.COMMIT][change.commits - 1]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_not_acknowledged_if_the_store_moved_before_its_commit(scratch: str, name: str) -> None:
    """Nor right after it. When the store comes back, the change is there, or not, as a whole."""
    change = CHANGES[name]
    steps, seen = steps_until_its_commit(change, scratch), set[int | None]()
    with memstore.open(scratch) as store:
        for number, after in itertools.product(range(1, steps + 1), (False, True)):
            make(scratch)
            with (
                faults.at_step(number, lambda: move_away(store), after=after),
                pytest.raises(memstore.NotAStoreError, match="removed or moved"),
            ):
                change.make(store)
            os.rename(f"{scratch}.aside", scratch)
            found = {
                None if value is None else int(value[0]) for value in (store.get(key, None) for key in change.keys)
            }
            assert len(found) == 1, f"moved at step {number}"
            seen |= found
        store.gc()
        assert store.verify().ok and store.stats().filling_bytes == 0
    assert 0 in seen


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_not_acknowledged_if_the_store_was_made_anew_before_its_commit(scratch: str, name: str) -> None:
    """No error but ours, and nothing of it in the new store."""
    change = CHANGES[name]
    for number in range(1, steps_until_its_commit(change, scratch) + 1):
        make(scratch)
        with (
            memstore.open(scratch) as store,
            faults.at_step(number, lambda: make_anew(scratch), after=True),
            pytest.raises(memstore.NotAStoreError, match="replaced meanwhile"),
        ):
            change.make(store)
        with memstore.open(scratch, "r") as store:
            assert sorted(store) == ["key", "segment"] and sorted(os.listdir(store.root + "/segments")) == [
                SEGMENT_FILE
            ]
            assert torch.equal(store.get("key"), INLINE) and torch.equal(store.get("segment"), SEGMENT)
        shutil.rmtree(scratch)


SEGMENT_FILE = f"{1:016x}.safetensors"


def test_a_put_that_waits_for_the_mutex_meanwhile(scratch: str) -> None:
    make(scratch)
    ended: list[object] = []

    def put(store: memstore.Store, value: torch.Tensor) -> None:
        try:
            ended.append(store.put("key", value))
        except BaseException as error:
            ended.append(type(error))

    with memstore.open(scratch) as store:
        threads = [threading.Thread(target=put, args=(store, value)) for value in (INLINE + 1, SEGMENT + 1)]

        def hold() -> None:
            for thread in threads:
                thread.start()
            while waiting_for_mutexes() < len(threads):
                time.sleep(0.001)
            in_child(move_and_make_anew, scratch)

        root_of(store).mutex.run(hold, time.monotonic() + 20)
        for thread in threads:
            thread.join(100)
    assert ended == [memstore.NotAStoreError] * 2
    with memstore.open(scratch) as new, memstore.open(f"{scratch}.aside") as moved:
        assert torch.equal(new.get("key"), INLINE) and torch.equal(moved.get("key"), INLINE)


Journal = list[tuple[str, int, float, float]]  # key, stamp, when the put began, and when it was acknowledged


@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.full)])
def test_a_writer_loses_nothing_while_its_store_is_swapped_again_and_again(scratch: str, count: int) -> None:
    """What is acknowledged between two swaps is in the store that was there between them."""
    make(scratch)
    since = [time.monotonic()]  # each store's first moment, and last
    until: list[float] = []
    with Child(_put_and_journal, scratch) as writer:
        assert writer.receive() == "opened"
        for number in range(count):
            make(f"{scratch}.new")
            until.append(time.monotonic())
            os.rename(scratch, f"{scratch}.{number}")
            os.rename(f"{scratch}.new", scratch)
            since.append(time.monotonic())
            assert writer.receive() == "opened"
        writer.send()
        journal: Journal = writer.receive()
    os.rename(scratch, f"{scratch}.{count}")
    until.append(time.monotonic())
    for number in range(count + 1):
        mine = [entry for entry in journal if since[number] <= entry[2] and entry[3] <= until[number]]
        with memstore.open(f"{scratch}.{number}", "r") as store:
            for key in ("key", "segment"):
                last = max((stamp for name, stamp, *_ in mine if name == key), default=0)
                assert int(store.get(key)[0]) >= last, f"store {number} has lost the put of {last}"
    assert len(journal) > count


def _put_and_journal(wire: Wire, root: str) -> Journal:
    journal: Journal = []
    stamps = itertools.count(1)
    while True:
        try:
            store = memstore.open(root, "r+")
        except memstore.NotAStoreError:  # between two renames
            continue
        with store:
            wire.send("opened")
            for stamp in stamps:
                if wire.has_message:
                    return journal
                key, value = ("key", INLINE) if stamp % 2 else ("segment", SEGMENT)
                began = time.monotonic()
                try:
                    store.put(key, value + stamp)
                except memstore.NotAStoreError:
                    break
                journal.append((key, stamp, began, time.monotonic()))


# --- what is the same store still, though its path, or what it is looked up by, has changed ---------------------------


def use(store: memstore.Store) -> None:
    """For long enough that it looks what its path names."""
    for number in range(3):
        look_again(store)
        store.put("key", number)
        store.put("segment", SEGMENT + number)
        look_again(store)
        assert store.get("key") == number and int(store.get("segment")[0]) == number
        assert store.wait("key") > 0
        store.delete("segment")


def test_a_relative_path_and_another_working_directory(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.path.dirname(scratch))
    with memstore.open("store") as store:
        monkeypatch.chdir("/")
        use(store)


def test_a_link_that_names_another_folder_by_now(scratch: str) -> None:
    """The store is where it was, and `store.root` says where."""
    for name in ("one", "other"):
        make(f"{scratch}.{name}")
    os.symlink(f"{scratch}.one", scratch)
    with memstore.open(scratch) as store:
        os.unlink(scratch)
        os.symlink(f"{scratch}.other", scratch)
        use(store)
        assert store.root == f"{scratch}.one"
        with memstore.open(scratch) as other:
            assert torch.equal(other.get("key"), INLINE)


def test_a_store_that_was_moved_and_opened_where_it_is(scratch: str) -> None:
    with memstore.open(scratch) as old:
        old.put("key", INLINE)
        os.rename(scratch, f"{scratch}.aside")
        with memstore.open(f"{scratch}.aside") as store:
            assert store.root == f"{scratch}.aside" and torch.equal(store.get("key"), INLINE)
            use(store)
            with pytest.raises(memstore.NotAStoreError):
                old.get("key")


def test_a_bind_mount(scratch: str) -> None:
    in_namespaces(MOUNTS, _in_a_bind_mount, scratch)


def _in_a_bind_mount(scratch: str) -> None:
    make(scratch)
    for path in (f"{scratch}.mounted", f"{scratch}.too"):
        os.mkdir(path)
        bind_mount(path, scratch)
    with memstore.open(f"{scratch}.mounted") as store, memstore.open(scratch) as same, memstore.open(f"{scratch}.too"):
        use(store)
        use(same)
        unmount(f"{scratch}.mounted")
        with pytest.raises(memstore.NotAStoreError):
            use(store)
    with memstore.open(scratch) as again:
        use(again)
    unmount(f"{scratch}.too")


@pytest.mark.parametrize("one_file_system", [True, False])
def test_an_overlay(one_file_system: bool) -> None:
    on_overlay(_on_overlay, one_file_system=one_file_system)


def _on_overlay(root: str) -> None:
    with memstore.open(root) as store:
        use(store)
        in_child(make_anew, root)
        with pytest.raises(memstore.NotAStoreError):
            store.put("key", 1)


@pytest.mark.parametrize("options", ["", ",xino=off"])
def test_an_overlay_whose_lower_layer_has_the_store(options: str) -> None:
    """As in an image of a container. A folder that is written to is copied up, and the same still."""
    folder = tempfile.mkdtemp(prefix="memstore-overlay-")
    try:
        in_namespaces(MOUNTS, _above_a_lower_layer, folder, options)
    finally:
        os.rmdir(folder)


def _above_a_lower_layer(folder: str, options: str) -> None:
    mount_tmpfs(folder, "size=256m,mode=700")
    lower, upper, work, merged = (f"{folder}/{name}" for name in ("lower", "upper", "work", "merged"))
    for path in (lower, upper, work, merged):
        os.mkdir(path)
    if options:
        mount_tmpfs(lower)
    make(f"{lower}/store")
    mount_overlay(merged, lower, upper, work, options)
    with memstore.open(f"{merged}/store") as store:
        use(store)
        in_child(_reopen_and_use, f"{merged}/store")
        use(store)
    unmount(folder)


def _reopen_and_use(root: str) -> None:
    with memstore.open(root) as store:
        use(store)


@needs_root
def test_a_parent_that_may_not_be_entered_any_more(shared: str) -> None:
    """That says nothing of the store, and isn't said of it."""
    as_user(USER, [], _forbid_the_parent, f"{shared}.parent")


def _forbid_the_parent(parent: str) -> None:
    os.mkdir(parent)
    with memstore.open(f"{parent}/store") as store:
        use(store)
        os.chmod(parent, 0)
        for call in (lambda: store.put("key", 1), lambda: store.version("key"), lambda: store.wait("key")):
            look_again(store)
            with pytest.raises(memstore.PermissionDeniedError, match="may not look.*x bits"):
                call()
        os.chmod(parent, 0o700)
        use(store)
