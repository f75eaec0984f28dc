"""Datasets whose processes die, fail or stop in the middle: what was acknowledged is there, and others go on."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from tests.children import Child, Wire, children, in_child
from tests.crash.leftovers import left_after_gc
from tests.leaks import find_leaks, open_files
from tests.overlay import on_overlay
from tests.replay.rows import write_data
from tests.small_tmpfs import on_small_tmpfs
from tests.support import faults

SPEC = {"x": ((1000,), torch.float32), "y": ((), torch.int64)}


def batch(count: int, number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((count, 1000), float(number)), "y": torch.full((count,), number)}


def rows_of(store: memstore.Store) -> list[int] | None:
    """What a reader sees: the rows, whether it is sealed or not; None if there is no key. Each row is whole."""
    if "data" not in store:
        return None
    is_dataset = store.info("data").kind == "dataset"
    rows = store.open_dataset("data")[:] if is_dataset else store.get("data")
    assert torch.equal(rows["x"], rows["y"][:, None].float().expand(-1, 1000))
    return [int(number) for number in rows["y"]]


# --- the first dataset of a store -------------------------------------------------------------------------------------


def _create_and_die(_: Wire, path: str, number: int) -> None:
    with memstore.open(path) as store, faults.at_step(number, faults.die, after=True):
        store.create_dataset("data", SPEC, capacity=8)


def test_a_kill_while_the_store_learns_of_datasets_leaves_one_that_opens(tmp_path: Path) -> None:
    """The other operations are killed in tests/crash; this one a store sees once."""
    with memstore.open(str(tmp_path / "counted")) as store:
        names = faults.record(lambda: store.create_dataset("data", SPEC, capacity=8))
    rename = names.index("rename") + 1
    for number in range(1, names.index("mutex_unlock") + 2):
        path = str(tmp_path / str(number))
        memstore.open(path).close()
        with Child(_create_and_die, path, number) as child:
            child.process.join(60)
            assert child.process.exitcode == -signal.SIGKILL, names[number - 1]
        assert ('"mutable"' in Path(path, "memstore.json").read_text()) is (number >= rename), names[number - 1]
        with memstore.open(path, timeout=10.0) as store:
            assert store.put("other", 1) and "data" not in store
            store.create_dataset("data", SPEC, capacity=8).extend(batch(2, 5))
            assert rows_of(store) == [5, 5]
        assert find_leaks(path) == []
        assert not Path(path, ".memstore.json.new").exists()


# --- several at once --------------------------------------------------------------------------------------------------

_ROUNDS = 40


def _extend(wire: Wire, number: int, path: str) -> list[range]:
    data = memstore.open(path).open_dataset("data")
    wire.send()
    wire.receive()
    return [data.extend(batch(1 + i % 3, number)) for i in range(_ROUNDS)]


def test_rows_of_many_writers_stay_together(root: str) -> None:
    with memstore.open(root) as store:
        data = store.create_dataset("data", SPEC, capacity=1000)
        with children(3, _extend, root) as writers:
            for writer in writers:
                writer.receive()
            for writer in writers:
                writer.send()
            added = [writer.receive() for writer in writers]
        numbers = data[:]["y"].tolist()
        assert sum(map(len, (one for ranges in added for one in ranges))) == len(data)
        for number, ranges in enumerate(added):
            assert all(numbers[one.start : one.stop] == [number] * len(one) for one in ranges)


def _stop_in_extend(wire: Wire, path: str) -> None:
    data = memstore.open(path).open_dataset("data")
    wire.send()

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def lock(_: int, name: str) -> None:
        if name == "mutex_lock":
            stop()

    with faults.watching(lambda *_: None, lock):
        data.extend(batch(1, 1))
    wire.send()


def test_a_stopped_writer_is_named_and_its_rows_come_later(root: str) -> None:
    with memstore.open(root) as store:
        data = store.create_dataset("data", SPEC, capacity=10)
        with Child(_stop_in_extend, root) as child:
            child.receive()
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            with pytest.raises(memstore.StoreTimeoutError, match=f"pid {child.pid} "):
                data.extend(batch(1, 2), timeout=0.05)
            assert len(data) == 0
            data[:]
            os.kill(child.pid, signal.SIGCONT)
            child.receive()
            assert data.extend(batch(1, 2)) == range(1, 2)


def test_the_next_takes_over_from_one_that_was_killed_in_an_extend(root: str) -> None:
    with memstore.open(root) as store:
        data = store.create_dataset("data", SPEC, capacity=10)
        with Child(_stop_in_extend, root) as child:
            child.receive()
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert data.extend(batch(1, 2)) == range(1)


# --- no room, other boots ---------------------------------------------------------------------------------------------


def _fill_up(folder: str) -> None:
    with memstore.open(f"{folder}/store") as store:
        with pytest.raises(memstore.StoreFullError, match="has no room for 'large'"):
            store.create_dataset("large", ((1 << 20,), torch.uint8), capacity=100)
        assert "large" not in store
        data = store.create_dataset("data", ((1 << 20,), torch.uint8), capacity=12)
        data.extend(torch.ones(10, 1 << 20, dtype=torch.uint8))
        with pytest.raises(memstore.StoreFullError, match="has no room"):  # for the copy
            data.seal()
        assert data.extend(torch.ones(2, 1 << 20, dtype=torch.uint8)) == range(10, 12)
        assert data[:].sum() == 12 << 20


def test_room_is_looked_for_when_it_is_created() -> None:
    on_small_tmpfs(26, _fill_up)


BOOT_AT, LENGTH_AT, MAGIC_AT, GONE_AT = 72, 192, 64, 128
OTHER_BOOT = b"another boot!!!!"


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_in_another_boot_of_a_disk_the_flushed_rows_are_there(disk_root: str, mode: Any) -> None:
    with memstore.open(disk_root, durability="disk") as store:
        data = store.create_dataset("data", SPEC, capacity=10)
        data.extend(batch(3, 1))
        data.flush()
        data.extend(batch(2, 2))
        del data
        write_data(store, "data", 0, b"\xff" * 64)  # a mutex that a dead boot has left
        write_data(store, "data", BOOT_AT, OTHER_BOOT)
        data = store.open_dataset("data", mode)
        assert data[:]["y"].tolist() == [1, 1, 1]
        if mode == "r+":
            assert data.extend(batch(1, 3)) == range(3, 4)


def test_in_another_boot_of_a_store_for_processes_all_rows_are_there(disk_root: str) -> None:
    with memstore.open(disk_root) as store:
        store.create_dataset("data", SPEC, capacity=10).extend(batch(3, 1))
        write_data(store, "data", 0, b"\xff" * 64)
        write_data(store, "data", BOOT_AT, OTHER_BOOT)
        data = store.open_dataset("data")
        assert data.extend(batch(1, 2)) == range(3, 4)


@pytest.mark.parametrize(("gone", "state"), [(1, 0), (0, 1), (0, 2), (1, 2)])
def test_a_page_of_another_boot_is_not_asked_whether_its_entry_lives(root: str, gone: int, state: int) -> None:
    """A folder that was copied meanwhile, or files of which a crash has kept one and not the other."""
    with memstore.open(root) as store:
        store.create_dataset("data", SPEC, capacity=10).extend(batch(3, 1))
        write_data(store, "data", GONE_AT, gone.to_bytes(8, "little") + state.to_bytes(8, "little"))
        write_data(store, "data", BOOT_AT, OTHER_BOOT)
        data = store.open_dataset("data")
        assert data.extend(batch(1, 2)) == range(3, 4)
        data[0:1] = batch(1, 3)
        assert data.seal() and rows_of(store) == [3, 1, 1, 2]


def test_a_deletion_is_told_to_who_writes_the_page_anew_at_the_same_time(root: str) -> None:
    with memstore.open(root) as store, Child(_when_told, root, "delete") as child:
        store.create_dataset("data", SPEC, capacity=10).extend(batch(3, 1))
        write_data(store, "data", BOOT_AT, OTHER_BOOT)
        with _asking_at("mutex_lock", child):
            data = store.open_dataset("data")
        with pytest.raises(memstore.MutableEntryError, match="was deleted"):
            data.extend(batch(1, 2))


# --- others come in between -------------------------------------------------------------------------------------------


def _when_told(wire: Wire, path: str, what: str) -> None:
    with memstore.open(path) as store:
        wire.receive()
        if what == "seal":
            store.open_dataset("data").seal()
        else:
            store.delete("data")
        if what == "create anew":
            store.create_dataset("data", SPEC, capacity=3)
        wire.send()


@contextlib.contextmanager
def _asking_at(step: str, child: Child) -> Generator[None]:
    """The child does what it is for, when this thread comes to that step for the first time."""
    is_done = False

    def ask(_: int, name: str) -> None:
        nonlocal is_done
        if name == step and not is_done:
            is_done = True
            child.send()
            child.receive()

    with faults.watching(ask, lambda *_: None):
        yield
    assert is_done


def test_a_view_of_one_that_is_sealed_meanwhile_is_of_the_sealed_version(root: str) -> None:
    with memstore.open(root) as store, Child(_when_told, root, "seal") as child:
        store.create_dataset("data", SPEC, capacity=10).extend(batch(3, 1))
        with _asking_at("map_into", child):  # the record is read
            view = store.view("data")
        assert view["y"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("what", ["delete", "create anew"])
def test_who_creates_one_gets_no_other(root: str, what: str) -> None:
    gone = pytest.raises(memstore.VersionGoneError, match="'data' was created")
    with memstore.open(root) as store, Child(_when_told, root, what) as child, gone, _asking_at("futex_wake", child):
        store.create_dataset("data", SPEC, capacity=10)


def test_what_is_there_already_is_told_before_room_is_looked_for(root: str) -> None:
    with memstore.open(root, capacity=4 << 20) as store:
        data = store.create_dataset("data", ((1 << 20,), torch.uint8), capacity=3)
        for call in (
            lambda: store.create_dataset("data", ((1 << 20,), torch.uint8), capacity=3),
            lambda: store.create_dataset_from("data", torch.zeros(2, 1 << 20, dtype=torch.uint8)),
        ):
            with pytest.raises(memstore.AlreadyExistsError, match="open_dataset"):
                call()
        assert len(data) == 0


def test_a_large_put_is_refused_before_it_is_copied(root: str) -> None:
    with memstore.open(root) as store:
        store.create_dataset("data", SPEC, capacity=10)
        large = torch.empty(16 << 20, dtype=torch.uint8)

        def put() -> None:
            with pytest.raises(memstore.MutableEntryError, match="open_dataset"):
                store.put_many({"other": torch.zeros(1000), "data": large})

        assert faults.record(put) == []


# --- forks ------------------------------------------------------------------------------------------------------------


def test_a_child_that_is_forked_in_an_extend_leaves_it_to_its_parent(root: str) -> None:
    """By a signal handler, for instance. It can't know whether its parent has published the rows."""
    with memstore.open(root) as store:
        data = store.create_dataset("data", SPEC, capacity=10)
        pids: list[int] = []

        def fork(_: int, name: str) -> None:
            if name == "mutex_lock" and not pids:
                pids.append(os.fork())

        try:
            with faults.watching(lambda *_: None, fork):
                data.extend(batch(1, 1))
            assert pids[0], "the child goes on"
        except memstore.ContentionError:
            os._exit(7 if data.extend(batch(2, 2)) == range(1, 3) else 1)
        finally:
            if not pids[0]:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 7
        assert rows_of(store) == [1, 2, 2]


def test_a_child_that_is_forked_in_another_threads_extend_goes_on(root: str) -> None:
    with memstore.open(root) as store:
        data = store.create_dataset("data", SPEC, capacity=10)
        inside, go_on = threading.Event(), threading.Event()

        def extend() -> None:
            def stay(_: int, name: str) -> None:
                if name == "mutex_lock":
                    inside.set()
                    go_on.wait(100)

            with faults.watching(lambda *_: None, stay):
                data.extend(batch(1, 1))

        thread = threading.Thread(target=extend)
        thread.start()
        inside.wait(100)
        with Child(lambda wire: (wire.send(), data.extend(batch(2, 2)))[1]) as child:
            child.receive()
            child.wait_until_it_sleeps_on_a_futex()
            go_on.set()
            thread.join()
            assert child.receive() == range(1, 3)
        assert data.extend(batch(1, 3)) == range(3, 4)
        assert rows_of(store) == [1, 2, 2, 3]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "data"), [(MAGIC_AT, b"nothing!"), (LENGTH_AT, (11).to_bytes(8, "little"))])
def test_a_damaged_control_page_is_told(scratch: str, offset: int, data: bytes) -> None:
    with memstore.open(scratch) as store:
        opened = store.create_dataset("data", SPEC, capacity=10)
        write_data(store, "data", offset, data)
        with pytest.raises(memstore.CorruptionError, match="control page"):
            store.open_dataset("data")
        (damage,) = store.verify().damaged
        assert "control page" in damage.detail
        if offset == LENGTH_AT:
            with pytest.raises(memstore.CorruptionError, match="11 rows"):
                len(opened)


# --- several processes at one dataset ---------------------------------------------------------------------------------


LONG_ROWS = {"x": ((4096,), torch.int64), "y": ((), torch.int64)}  # 32 KiB a row: long enough to be torn


def long_rows(*numbers: int) -> dict[str, torch.Tensor]:
    y = torch.tensor(numbers)
    return {"x": y[:, None].expand(-1, 4096), "y": y}


def check_whole(rows: dict[str, torch.Tensor]) -> list[int]:
    assert torch.equal(rows["x"], rows["y"][:, None].expand(-1, 4096)), "a torn row"
    return rows["y"].tolist()


# -- a seal ------------------------------------------------------------------------------------------------------------


def _overwrite(wire: Wire, row: int, path: str, rounds: int) -> None:
    """Writes growing numbers to its row until that is refused. Sends the last that was acknowledged."""
    with memstore.open(path) as store:
        for _ in range(rounds):
            wire.receive()
            data = store.open_dataset("data")
            wire.send()
            done = 0
            with contextlib.suppress(memstore.MutableEntryError):
                while True:
                    data[row : row + 1] = long_rows(done + 1)
                    done += 1
            wire.send(done)
            del data


@pytest.mark.parametrize("rounds", [15, pytest.param(300, marks=pytest.mark.full)])
def test_a_seal_has_every_write_that_was_acknowledged(root: str, rounds: int) -> None:
    with memstore.open(root, timeout=60.0) as store, children(2, _overwrite, root, rounds) as writers:
        for number in range(rounds):
            data = store.create_dataset("data", LONG_ROWS, capacity=2, length=2)
            for writer in writers:
                writer.send()
            for writer in writers:
                writer.receive()
            while min(data[:]["y"].tolist()) < 1 + number % 5:
                time.sleep(0)
            data.seal()
            acknowledged = [writer.receive() for writer in writers]
            sealed = store.get("data")["y"].tolist()
            # what was refused may be there
            assert all(done <= there <= done + 1 for done, there in zip(acknowledged, sealed, strict=True))
            del data
            store.delete("data")


# -- a reader ----------------------------------------------------------------------------------------------------------


def _extend_by_chance(wire: Wire, number: int, path: str, count: int) -> list[int]:
    chance = random.Random(number)
    data = memstore.open(path).open_dataset("data", wait=60.0)
    first = number << 32
    while first % (1 << 32) < count:
        size = min(chance.randrange(1, 6), count - first % (1 << 32))
        data.extend(long_rows(*range(first, first + size)))
        first += size
    return [number << 32, first]


def test_a_reader_sees_whole_rows_that_stay(root: str) -> None:
    count = 150
    with memstore.open(root, timeout=60.0) as store, children(2, _extend_by_chance, root, count) as writers:
        data = store.create_dataset("data", LONG_ROWS, capacity=2 * count)
        seen: list[int] = []
        while len(seen) < 2 * count:
            length = len(data)
            assert length >= len(seen)
            found = seen + check_whole(data[len(seen) : length])
            assert len(found) == length and found[: len(seen)] == seen
            view = store.view("data")
            assert len(view["y"]) >= length
            seen = found
        for writer in writers:
            first, end = writer.receive()
            assert [row for row in seen if first <= row < end] == list(range(first, end))
        assert check_whole(data[:]) == seen


# -- kills -------------------------------------------------------------------------------------------------------------


def _extend_on(wire: Wire, path: str, first: int) -> None:
    data = memstore.open(path, timeout=60.0).open_dataset("data")
    while True:
        added = data.extend(long_rows(first, first + 1))
        wire.send((added.start, first))
        first += 2
        if added.stop > data.capacity - 8:
            wire.receive()  # until it is killed


def _acknowledged(child: Child) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    with contextlib.suppress(RuntimeError):  # it ended
        while True:
            found.append(child.receive())
    return found


@pytest.mark.parametrize("rounds", [12, pytest.param(100, marks=pytest.mark.full)])
def test_rows_of_writers_that_are_killed_at_random_are_whole_or_absent(root: str, rounds: int) -> None:
    chance = random.Random(rounds)
    with memstore.open(root, timeout=60.0) as store:
        for _ in range(rounds):
            data = store.create_dataset("data", LONG_ROWS, capacity=1000)
            with Child(_extend_on, root, 0) as one, Child(_extend_on, root, 1 << 32) as other:
                expected = [child.receive() for child in (one, other)]
                time.sleep(chance.random() / 100)  # long enough for nothing: any moment will do
                for child in (one, other):
                    child.kill()
                for child in (one, other):
                    expected += _acknowledged(child)
            rows = check_whole(data[:])
            assert all(rows[at : at + 2] == [first, first + 1] for at, first in expected)
            assert rows[::2] == [row - 1 for row in rows[1::2]], "half a batch"
            assert data.extend(long_rows(7, 8)) == range(len(rows), len(rows) + 2)
            del data
            store.delete("data")
        assert left_after_gc(store) == []


# --- datasets in a repaired store: kept with header and control page, and set aside without ---------------------------


def make(root: str) -> str:
    """A store with a dataset of three rows. Returns the path of its file."""
    with memstore.open(root) as store:
        store.put("other", torch.ones(10_000))
        store.create_dataset("data", {"x": ((1000,), torch.int16)}, capacity=8).extend(
            {"x": torch.ones(3, 1000, dtype=torch.int16)}
        )
        (path,) = store.info("data").files
        return path


@pytest.mark.parametrize("is_lost", [False, True], ids=["sound", "without its catalog"])
def test_a_repair_keeps_a_dataset_and_its_rows(root: str, is_lost: bool) -> None:
    make(root)
    if is_lost:
        with open(f"{root}/catalog/local/data.mdb", "r+b") as file:
            file.write(os.urandom(1 << 14))
    report = memstore.repair(root)
    assert report.recovered == ("data", "other") and not report.lost
    with memstore.open(root) as store:
        data = store.open_dataset("data")
        assert data[:]["x"].sum() == 3000
        assert data.extend({"x": torch.ones(1, 1000, dtype=torch.int16)}) == range(3, 4)
        assert store.info("data").kind == "dataset"


def test_one_without_a_whole_control_page_is_set_aside(scratch: str) -> None:
    path = make(scratch)
    with open(path, "r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start + LENGTH_AT)
        file.write(b"\xff" * 8)
    report = memstore.repair(scratch)
    assert (report.recovered, report.lost) == (("other",), ("data",))
    assert os.path.exists(f"{path}.damaged")
    with memstore.open(scratch) as store:
        assert "data" not in store


def test_a_store_with_a_dataset_names_the_feature(root: str) -> None:
    with memstore.open(root) as store:
        before = Path(root, "memstore.json").read_text()
        store.create_dataset("data", ((), torch.int8), capacity=1)
    assert "mutable" not in before
    assert '"mutable"' in Path(root, "memstore.json").read_text()


# --- on overlay, as a container's own folders are: there a mapping keeps no lock, so files stay open ------------------


@pytest.mark.parametrize("one_file_system", [True, False])
def test_a_dataset_lives_as_elsewhere(one_file_system: bool) -> None:
    on_overlay(_live, one_file_system=one_file_system)


def _live(root: str) -> None:
    with memstore.open(root) as store:
        data = store.create_dataset("data", ((1000,), torch.float32), capacity=100)
        assert in_child(_extend_twice, root, pickle.dumps(data)) == range(2)
        assert data.extend(torch.full((1, 1000), 2.0)) == range(2, 3)
        data.flush()
        held, view = data[1:3], store.view("data")
        assert data[:][:, 0].tolist() == view[:, 0].tolist() == [1, 1, 2]
        data.seal()
        with pytest.raises(memstore.MutableEntryError):
            data.extend(torch.zeros(1, 1000))
        for number in range(3):  # none of them takes the file of what is held
            store.put("other", torch.full((100, 1000), float(number)))
            store.gc()
        assert held[:, 0].tolist() == [1, 2] and store.get("data")[:, 0].tolist() == [1, 1, 2]
        del data, held, view
        assert [path for path in open_files(root) if "/segments/" in path] == []
    assert find_leaks(root) == []


def _extend_twice(root: str, packed: bytes) -> range:
    with memstore.open(root) as store:
        added = store.open_dataset("data").extend(torch.ones(1, 1000))
        pickle.loads(packed).extend(torch.ones(1, 1000))
        return range(added.start, added.stop + 1)
