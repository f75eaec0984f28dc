"""What saves leave that die or fail goes before the next one writes; what lives is left alone."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from memstore.integrations.dcp import StorageWriter
from memstore.snapshot.publishing import begin_save, new_id, sweep_saves
from tests.children import in_child
from tests.integrations.dcp import failing_on_ranks
from tests.integrations.dcp.states import number_in, save, save_number
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
        "import os, sys\n"
        "while True:\n"
        "    for call in os.mkdir, os.rmdir:\n"
        "        try: call(sys.argv[1])\n"
        "        except OSError: pass\n"
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
    told = ranks4.run(failing_on_ranks.fail_again_and_again, scratch)
    assert told == [(["2: ResourceLimitError"] * 3, [3] * 3)] * 4
    assert len(os.listdir(scratch)) == 5 and ranks4.run(failing_on_ranks.load_rows, scratch, None) == [3.0] * 4
