"""A store that is removed, moved or made anew while it is open: every call of who has it open says so."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    remove_slowly,
)
from tests.abuse.test_closed import CALLS
from tests.children import Child, Wire, in_child
from tests.support import faults

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
