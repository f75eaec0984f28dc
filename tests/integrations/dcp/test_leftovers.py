"""What saves leave that die or fail goes before the next one writes; what lives, and is read, is left alone."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import memstore
from memstore import Snapshot, StateDict
from memstore.convert import convert
from memstore.errors import AlreadyExistsError, AmbiguousCheckpointError, CorruptionError, VersionGoneError
from memstore.integrations.dcp import StorageReader, StorageWriter, storage
from memstore.snapshot import load_manifest
from memstore.snapshot.publishing import begin_save, new_id, sweep_saves
from tests.children import in_child
from tests.integrations.dcp import on_ranks
from tests.integrations.dcp.states import load, number_in, save, save_number
from tests.ranks.launcher import Ranks


def files(path: str) -> list[str]:
    return sorted(one.name for one in Path(path).glob("*.safetensors"))


def touch(path: str, *names: str) -> None:
    for name in names:
        Path(path, name).touch()


# --- what a folder may have -------------------------------------------------------------------------------------------


def test_only_files_of_saves_that_nobody_takes_part_in_are_removed(scratch: str) -> None:
    save_number(scratch, 1.0)
    published = files(scratch)
    dead, living, take, unknown = (new_id() for _ in range(4))
    kept = begin_save(scratch, living, durable=False)
    touch(scratch, f"memstore_snapshot.{dead}.save", f"memstore_snapshot.{take}.claim")
    touch(scratch, *(f"state-{one}.safetensors" for one in (dead, living, take, unknown)), f"{dead}.txt")
    sweep_saves(scratch)
    others = [f"state-{one}.safetensors" for one in (living, take, unknown)]
    assert files(scratch) == sorted([*published, *others])
    assert Path(scratch, f"{dead}.txt").exists() and not Path(scratch, f"memstore_snapshot.{dead}.save").exists()
    kept.close()
    sweep_saves(scratch)
    assert f"state-{living}.safetensors" not in files(scratch) and number_in(scratch) == 1.0


def test_what_the_manifest_names_stays_though_a_trace_of_it_is_there(scratch: str) -> None:
    save_number(scratch, 1.0)
    (file,) = files(scratch)
    touch(scratch, f"memstore_snapshot.{file.removeprefix('state-').removesuffix('.safetensors')}.save")
    sweep_saves(scratch)
    assert files(scratch) == [file] and number_in(scratch) == 1.0


def test_a_save_begins_in_a_folder_that_one_that_fails_removes(scratch: str) -> None:
    """Who has made a folder and fails removes it while it is empty; it may be another rank's of the same save."""
    text = (
        "import os, random, sys, time\n"
        "while True:\n"
        "    for call in os.mkdir, os.rmdir:\n"
        "        try: call(sys.argv[1])\n"
        "        except OSError: pass\n"
        "    time.sleep(random.random() / 1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", text, scratch]) as other:
        try:
            for _ in range(300):
                begin_save(scratch, new_id(), durable=False).close()
                for trace in os.listdir(scratch):
                    os.unlink(f"{scratch}/{trace}")
        finally:
            other.kill()


def test_nothing_is_removed_beside_a_manifest_that_cannot_be_read(scratch: str) -> None:
    save_number(scratch, 1.0)
    dead = new_id()
    touch(scratch, f"memstore_snapshot.{dead}.save", f"state-{dead}.safetensors")
    Path(scratch, "memstore_snapshot.json").write_bytes(b"{}")
    before = os.listdir(scratch)
    sweep_saves(scratch)
    assert sorted(os.listdir(scratch)) == sorted(before)


# --- saves ------------------------------------------------------------------------------------------------------------


class Looking(StorageWriter):
    """Notes which files of tensors are there when it is about to write, and then fails."""

    found: list[str]

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.found = files(str(self.checkpoint_id))
        raise ArithmeticError("looked")


def look(path: str) -> list[str]:
    writer = Looking(path)
    with pytest.raises(CheckpointException, match="looked"):
        save({"w": torch.ones(100)}, writer)
    return writer.found


class Dying(StorageWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _die(path: str) -> None:
    save({"w": torch.ones(100)}, Dying(path))


def test_what_a_save_has_left_that_was_killed_goes_before_the_next_one_writes(scratch: str) -> None:
    save_number(scratch, 1.0)
    earlier = files(scratch)
    with pytest.raises(RuntimeError, match="-9"):
        in_child(_die, scratch)
    assert len(files(scratch)) == 2
    assert look(scratch) == earlier and number_in(scratch) == 1.0


class Failing(StorageWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        raise ArithmeticError("in finish")


def test_a_retry_in_an_except_clause_finds_the_disk_free(scratch: str) -> None:
    try:
        save({"w": torch.ones(100)}, Failing(scratch))
    except CheckpointException as error:
        assert len(files(scratch)) == 1 and error.failures
        assert look(scratch) == []
    else:
        pytest.fail("it did not fail")


def test_and_so_does_one_to_another_path(scratch: str) -> None:
    with contextlib.suppress(CheckpointException):
        save({"w": torch.ones(100)}, Failing(f"{scratch}/1"))
    assert len(files(f"{scratch}/1")) == 1
    gc.collect()  # the error refers to the writer, by its traceback
    save_number(f"{scratch}/2", 2.0)
    assert os.listdir(f"{scratch}/1") == [] and number_in(f"{scratch}/2") == 2.0


def test_a_save_of_another_process_is_not_touched(scratch: str) -> None:
    class Late(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            assert len(in_child(look, scratch)) == 1, "what this one has written"
            super().finish(metadata, results)

    save({"w": torch.full((1000,), 3.0), "n": 3.0}, Late(scratch))
    assert number_in(scratch) == 3.0


def test_nor_is_one_of_another_thread(scratch: str) -> None:
    written, looked = threading.Event(), threading.Event()

    class Late(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            written.set()
            assert looked.wait(60)
            super().finish(metadata, results)

    thread = threading.Thread(target=save, args=({"w": torch.full((1000,), 3.0), "n": 3.0}, Late(scratch)), daemon=True)
    thread.start()
    assert written.wait(60) and len(look(scratch)) == 1
    looked.set()
    thread.join(60)
    assert number_in(scratch) == 3.0


def test_saves_of_ranks_that_fail_again_and_again_take_no_more_room(ranks4: Ranks, scratch: str) -> None:
    """One rank may not write: what the other three have written is there once, however often it is tried."""
    told = ranks4.run(on_ranks.fail_again_and_again, scratch)
    assert told == [(["2: ResourceLimitError"] * 3, [3] * 3)] * 4
    assert len(os.listdir(scratch)) == 6 and ranks4.run(on_ranks.load_rows, scratch, None) == [3.0] * 4


# --- loads beside a trainer that overwrites its checkpoint ------------------------------------------------------------


class Overtaken(StorageReader):
    """A reader that has opened the checkpoint when something happens to it."""

    happens: Any

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        found = super().read_metadata(*args, **kwargs)
        self.happens()
        return found


def load_beside(path: str, happens: Any, state: dict[str, Any]) -> BaseException:
    reader = Overtaken(path)
    reader.happens = happens
    with pytest.raises(CheckpointException) as raised:
        load(state, reader)
    return raised.value.failures[0][0]


@pytest.mark.parametrize("name", ["w", "n"])
def test_a_load_of_what_is_overwritten_meanwhile_is_not_told_of_damage(scratch: str, name: str) -> None:
    save_number(scratch, 1.0)
    state = {"w": torch.zeros(1000)} if name == "w" else {"n": 0.0}
    error = load_beside(scratch, lambda: save_number(scratch, 2.0), state)
    assert isinstance(error, VersionGoneError), error
    assert "was overwritten while it was read (the file is missing): open it again" in str(error)
    assert number_in(scratch) == 2.0


def test_a_load_of_what_is_removed_meanwhile_says_so(scratch: str) -> None:
    save_number(scratch, 1.0)
    error = load_beside(scratch, lambda: shutil.rmtree(scratch), {"w": torch.zeros(1000)})
    assert isinstance(error, VersionGoneError) and "was removed while it was read" in str(error)


def test_damage_is_damage_while_the_manifest_stays(scratch: str) -> None:
    save_number(scratch, 1.0)
    (file,) = [one.name for one in load_manifest(scratch).files]

    def damage() -> None:
        with open(f"{scratch}/{file}", "r+b") as found:
            found.truncate(100)

    assert isinstance(load_beside(scratch, damage, {"w": torch.zeros(1000)}), CorruptionError)


def test_snapshots_that_are_open_say_it_too(scratch: str) -> None:
    save_number(scratch, 1.0)
    snapshot = Snapshot(scratch)
    snapshot.get_manifest()
    save_number(scratch, 2.0)
    with pytest.raises(VersionGoneError, match="was overwritten"):
        snapshot.view()
    with pytest.raises(VersionGoneError, match="was overwritten"):
        snapshot.get_state_dict_for_key("state")
    snapshot.verify()


# -- checkpoints of other libraries in the folder ----------------------------------------------------------------------


def torch_saves(path: str, number: float) -> None:
    torch_dcp.save({"w": torch.full((1000,), number), "n": number}, checkpoint_id=path, no_dist=True)


def torch_loads(path: str) -> float:
    target = {"w": torch.zeros(1000), "n": 0.0}
    torch_dcp.load(target, checkpoint_id=path, no_dist=True)
    return target["n"]


def failure_of(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(CheckpointException) as raised:
        call()
    return raised.value.failures[0][0]


def test_a_save_without_overwrite_refuses_torchs_checkpoint(scratch: str) -> None:
    torch_saves(scratch, 1.0)
    before = sorted(os.listdir(scratch))
    error = failure_of(lambda: save({"n": 2.0}, StorageWriter(scratch, overwrite=False)))
    assert isinstance(error, AlreadyExistsError) and ".metadata" in str(error)
    assert sorted(os.listdir(scratch)) == before and torch_loads(scratch) == 1.0


def test_a_save_replaces_torchs_checkpoint_whole_and_nothing_else(scratch: str) -> None:
    torch_saves(scratch, 1.0)
    for name in ("notes.txt", "model.safetensors", "__x.distcp"):
        open(f"{scratch}/{name}", "w").close()
    save_number(scratch, 2.0)
    names = set(os.listdir(scratch))
    assert {"notes.txt", "model.safetensors", "__x.distcp"} < names
    assert not {".metadata", "__0_0.distcp"} & names
    assert number_in(scratch) == 2.0
    with pytest.raises(CheckpointException):
        torch_loads(scratch)


def test_a_rank_that_saves_by_itself_replaces_torchs_checkpoint_too(scratch: str) -> None:
    torch_saves(scratch, 1.0)
    writer = StorageWriter(scratch, overwrite=False)
    with pytest.raises(AlreadyExistsError, match="torch"):
        torch_dcp.save({"n": 2.0}, storage_writer=writer, use_collectives=False)
    torch_dcp.save({"n": 2.0}, storage_writer=StorageWriter(scratch), use_collectives=False)
    assert os.listdir(scratch) == ["rank-0"]
    target = {"n": 0.0}
    torch_dcp.load(target, storage_reader=StorageReader(scratch), no_dist=True)
    assert target["n"] == 2.0
    torch_dcp.save({"n": 3.0}, checkpoint_id=scratch, use_collectives=False)
    error = failure_of(lambda: torch_dcp.load({"n": 0.0}, storage_reader=StorageReader(scratch), no_dist=True))
    assert isinstance(error, AssertionError) and "two checkpoints" in str(error), error


def test_a_save_that_is_killed_before_torchs_metadata_goes_leaves_both_and_readers_say_so(
    scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state in between; the next save mends it."""
    torch_saves(scratch, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr("memstore.snapshot.publishing.remove_torchs", lambda path, durable: None)
        save_number(scratch, 2.0)
    assert torch_loads(scratch) == 1.0
    error = failure_of(lambda: load({"n": 0.0}, StorageReader(scratch)))
    assert "two checkpoints are there" in str(error), error
    save_number(scratch, 3.0)
    assert number_in(scratch) == 3.0 and not os.path.exists(f"{scratch}/.metadata")


def test_readers_of_a_folder_that_torch_saved_over_say_that_two_are_there(scratch: str) -> None:
    path = f"{scratch}/latest"
    save_number(path, 1.0)
    torch_saves(path, 2.0)
    with memstore.open(f"{scratch}/store") as store:
        calls: list[Callable[[], Any]] = [
            lambda: StorageReader(path).read_metadata(),
            lambda: Snapshot(path).restore({"m": StateDict()}),
            lambda: Snapshot(path).view(),
            lambda: Snapshot(path).verify(),
            lambda: store.attach("k", path),
            lambda: store.attach("k", path, copy=True),
            lambda: convert(path, f"{scratch}/new"),
            lambda: convert(path, f"{scratch}/new", source_as="memstore-dcp"),
        ]
        for call in calls:
            with pytest.raises(AmbiguousCheckpointError, match=r"latest/memstore_snapshot\.json.*latest/\.metadata"):
                call()
        assert "k" not in store
    error = failure_of(lambda: save({"n": 3.0}, StorageWriter(path, overwrite=False)))
    assert isinstance(error, AlreadyExistsError)
    convert(path, f"{scratch}/torchs.pt", source_as="dcp")
    assert torch.load(f"{scratch}/torchs.pt")["n"] == 2.0
    os.remove(f"{path}/.metadata")
    assert number_in(path) == 1.0


@pytest.mark.parametrize("mark", [".metadata", "__3.metadata", ".snapshot_metadata"])
def test_no_snapshot_is_taken_beside_another_librarys_checkpoint(scratch: str, mark: str) -> None:
    os.makedirs(f"{scratch}/c")
    open(f"{scratch}/c/{mark}", "w").close()
    for take in (Snapshot.take, Snapshot.async_take):
        with pytest.raises(AlreadyExistsError, match=mark.replace(".", r"\.")):
            take(f"{scratch}/c", {"m": StateDict(w=torch.ones(3))})
    assert os.listdir(f"{scratch}/c") == [mark]


def test_a_take_that_another_library_overtakes_is_refused_and_leaves_nothing(scratch: str) -> None:
    class Late(StateDict):
        def state_dict(self) -> dict[str, Any]:  # after the take has looked at the folder
            torch_saves(f"{scratch}/c", 1.0)
            return super().state_dict()

    for take in (Snapshot.take, lambda *given: Snapshot.async_take(*given).wait()):
        shutil.rmtree(f"{scratch}/c", ignore_errors=True)
        with pytest.raises(AlreadyExistsError, match="saved there meanwhile"):
            take(f"{scratch}/c", {"m": Late(w=torch.ones(3))})
        assert sorted(os.listdir(f"{scratch}/c")) == [".metadata", "__0_0.distcp"]


def test_a_save_never_replaces_a_snapshot_of_torchsnapshot(scratch: str) -> None:
    os.mkdir(scratch)
    open(f"{scratch}/.snapshot_metadata", "w").close()
    error = failure_of(lambda: save_number(scratch, 1.0))
    assert isinstance(error, AlreadyExistsError) and "torchsnapshot" in str(error)
    assert os.listdir(scratch) == [".snapshot_metadata"]


# --- what a process remembers of its saves, and plans that planners remember ------------------------------------------


def test_a_path_may_have_bytes_that_are_no_text(scratch: str) -> None:
    path = os.fsdecode(os.fsencode(scratch) + b"/\xff")
    save({"w": torch.ones(3)}, StorageWriter(path), checkpoint_id=path)
    target = {"w": torch.zeros(3)}
    load(target, StorageReader(path))
    assert torch.equal(target["w"], torch.ones(3))
    meta = StorageReader(path).read_metadata().storage_meta
    assert meta is not None and meta.checkpoint_id == f"{scratch}/\ufffd"


class Caching(DefaultSavePlanner):
    def __init__(self, name: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = name  # torch takes the name of the class, for the whole process


def test_plans_that_a_planner_has_cached_of_another_storage_are_refused_with_the_reason(scratch: str) -> None:
    state = {"w": torch.ones(3)}
    save(state, FileSystemWriter(f"{scratch}/theirs"), planner=Caching(scratch))
    with pytest.raises(CheckpointException, match="a _StoragePrefix, of another storage: a planner that caches plans"):
        save(state, StorageWriter(f"{scratch}/ours"), planner=Caching(scratch))


def test_what_a_failed_save_with_cached_plans_told_its_ranks_is_gone_after_the_next_save(scratch: str) -> None:
    class Failing(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            raise ArithmeticError("in finish")

    state = {"w": torch.ones(3)}
    with memstore.open(scratch) as store:
        save(state, StorageWriter(store, key="c"), planner=Caching(scratch))
        writer = Failing(store, key="c")
        with pytest.raises(CheckpointException, match="in finish"):
            save(state, writer, planner=Caching(scratch))
        assert sorted(store.keys()) == ["c", "c/dcp-save"]
        writer.reset()
        save(state, StorageWriter(store, key="another"))
        assert sorted(store.keys()) == ["another", "c"] and store.pending() == ()


def test_a_cached_plan_that_is_used_stays_known_however_many_saves_come_between() -> None:
    mine = ("a save", 0)
    assert not storage.carry_out_plan(mine)
    for i in range(3):
        for other in range(3000):
            assert not storage.carry_out_plan((f"{i} {other}", 0))
        assert storage.carry_out_plan(mine)
    assert not storage.carry_out_plan(("0 0", 0)), "what is old is forgotten"


def test_saves_that_begin_at_once_give_back_each_earlier_one_once() -> None:
    given: list[str] = []
    place: Any = SimpleNamespace(abandon=given.append)
    names = [str(i) for i in range(2000)]
    for name in names:
        storage.coordinate_save(StorageWriter("/nowhere"), place, name)
    threads = [threading.Thread(target=storage.abandon_saves) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(names) <= set(given) and len(given) == len(set(given))
