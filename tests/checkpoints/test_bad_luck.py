"""Managers that are killed, meet another, find no room, or get a signal: the newest whole step is always there."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memstore
from memstore import CheckpointManager, StateDict
from memstore.engine import syscalls
from memstore.errors import NoSnapshotError
from tests.checkpoints.states import check_all, folders, save, state, step_in, whole
from tests.children import Child, Wire, in_child
from tests.small_tmpfs import fill, free_bytes, on_small_tmpfs
from tests.snapshot.ranks import all_right, on_ranks
from tests.support import faults


def plain(root: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"async_": False, "keep_last": 1, **options})


def wait_until(is_so: Callable[[], object], seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "this didn't come"
        time.sleep(0.002)


# --- killed while it saves, and while it removes ---------------------------------------------------------------------


def steps_of_a_save(folder: str) -> list[str]:
    """The calls to the kernel of a save that also removes the step before."""
    manager = plain(f"{folder}/recorded")
    save(manager, 1)
    return faults.record(lambda: save(manager, 2))


def _die_in_a_save(root: str, number: int, after: bool) -> None:
    manager = plain(root)
    with faults.at_step(number, faults.die, after=after):
        manager.save(2, state(2))


def die_in_a_save(root: str, number: int, after: bool = True) -> None:
    save(plain(root), 1)
    with pytest.raises(RuntimeError, match="-9"):
        in_child(_die_in_a_save, root, number, after)
    # What is there is whole, and the newest one is that before the save, or that of it.
    names, manager = whole(root), plain(root)
    assert names and names <= {"step-000001", "step-000002"}
    check_all(root)
    assert step_in(manager) == (2 if "step-000002" in names else 1)
    # The next save, of another process, removes what is unfinished.
    step_in(manager)
    save(manager, 3)
    assert folders(root) == ["step-000003"]
    assert step_in(plain(root)) == 3


def test_a_manager_that_is_killed_while_it_saves_or_removes(root: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        names = steps_of_a_save(folder)
    unlinks = [number for number, name in enumerate(names, 1) if name == "unlink"]
    publication = len(names) - names[::-1].index("link")
    removal = [number for number in unlinks if number > publication]
    assert names.count("link") == 3 and names[-1] != "link" and "remove_folder" in names[publication:], names
    claimed = names.index("link") + 1  # the record has its name
    chosen = [claimed, publication - 1, publication, removal[-4], removal[-2], removal[-1], len(names)]
    for i, number in enumerate(chosen):
        die_in_a_save(f"{root}-{i}", number)


@pytest.mark.full
def test_a_manager_that_is_killed_at_every_step_of_a_save(root: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        names = steps_of_a_save(folder)
    for number in range(1, len(names) + 1):
        for after in (False, True):
            die_in_a_save(f"{root}-{number}-{after}", number, after)


def test_a_save_that_fails_at_every_step_leaves_the_newest(root: str) -> None:
    chosen = faults.STEPS - faults.CLEANUPS
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        manager = plain(f"{folder}/recorded")
        save(manager, 1)
        names = faults.record(lambda: save(manager, 2), names=chosen)
    for number in range(1, len(names) + 1):
        there = f"{root}-{number}"
        manager = plain(there)
        save(manager, 1)
        failing = faults.at_step(number, faults.raising(OSError(errno.EIO, "injected")), names=chosen)
        with contextlib.suppress(OSError, memstore.MemstoreError), failing:
            manager.save(2, state(2))
        assert step_in(manager) in (1, 2), (number, names[number - 1])
        check_all(there)
        save(manager, 3)
        assert folders(there) == ["step-000003"], (number, names[number - 1])


# --- a trainer dies while its writer still writes --------------------------------------------------------------------


def _die_while_its_writer_writes(wire: Wire, root: str) -> None:
    manager = CheckpointManager(root, keep_last=1)
    save(manager, 1)
    manager.wait()
    large = state(2) | {"large": StateDict(x=torch.zeros(128 << 20, dtype=torch.uint8))}
    assert manager.save(2, large)
    wire.send(manager._running.pending._take._tiers[0]._write.writer)  # type: ignore[union-attr] # pyright: ignore
    wire.receive()


def test_a_step_whose_trainer_died_is_completed_by_its_writer_and_removed_by_nobody(root: str) -> None:
    with Child(_die_while_its_writer_writes, root) as trainer:
        writer = trainer.receive()
        wait_until(lambda: [name for name in folders(f"{root}/step-000002") if name.endswith(".safetensors")])
        os.kill(writer, signal.SIGSTOP)
        is_written = whole(root) == {"step-000001", "step-000002"}
    try:
        manager = plain(root, keep_last=2)
        assert step_in(manager) == (2 if is_written else 1)
        save(manager, 3)
        assert "step-000002" in folders(root)
    finally:
        os.kill(writer, signal.SIGCONT)
    wait_until(lambda: "step-000002" in whole(root))
    assert manager.steps() == [2, 3] if is_written else [1, 2, 3] and manager.latest() == 3


# --- two managers on one root ----------------------------------------------------------------------------------------


def _save_many(wire: Wire, number: int, root: str) -> int:
    manager = CheckpointManager(root, keep_last=2, async_=False)
    wire.send()
    wire.receive()
    with contextlib.suppress(RuntimeWarning):
        for step in range(1, 16):
            save(manager, step)  # the other one saves the same steps
    return number


@pytest.mark.filterwarnings("ignore:.*restored none")
def test_two_managers_on_one_root_do_each_other_no_harm(root: str) -> None:
    jobs = [Child(_save_many, number, root) for number in range(2)]
    try:
        for job in jobs:
            job.receive()
        for job in jobs:
            job.send()
        for job in jobs:
            job.receive()
    finally:
        for job in jobs:
            job.__exit__()
    manager = plain(root, keep_last=2)
    check_all(root)
    assert manager.latest() == 15 and 1 <= len(manager.steps()) <= 3
    step_in(manager)
    save(manager, 16)
    assert len(folders(root)) == 2 and whole(root) == set(folders(root))


# --- a reader beside a run that removes ------------------------------------------------------------------------------


def _restore_again_and_again(wire: Wire, root: str) -> int:
    manager, count = CheckpointManager(root), 0
    wire.send()
    while not wire.has_message:
        assert manager.latest() is not None and manager.steps()
        step_in(manager)  # the newest: it is never removed, nor while it is read
        count += 1
        with contextlib.suppress(NoSnapshotError):  # by number it may be gone before it was chosen; not in between
            step_in(manager, manager.steps()[0])
    return count


def test_restores_beside_a_run_that_removes_read_whole_steps(root: str) -> None:
    manager = plain(root)
    save(manager, 1)
    with Child(_restore_again_and_again, root) as reader:
        reader.receive()
        for step in range(2, 80):
            save(manager, step)
            if reader.has_message:
                reader.receive()  # raises what it raised
        reader.send()
        assert reader.receive() > 3
    save(manager, 80)
    assert folders(root) == ["step-000080"]


def _save_and_pause_in_the_removal(wire: Wire, root: str) -> None:
    def pause(number: int, name: str) -> None:
        if number == 1:  # the record is locked, and nothing is removed yet
            wire.send()
            wire.receive()

    with faults.watching(lambda *_: None, pause, names=frozenset({"lock_exclusive"})):
        save(plain(root), 2)


@pytest.mark.filterwarnings("ignore:.*restored none")
def test_a_step_that_is_just_about_to_be_removed_is_gone_for_a_restore(root: str) -> None:
    save(plain(root), 1)
    with Child(_save_and_pause_in_the_removal, root) as other:
        other.receive()
        later = threading.Timer(0.2, other.send)
        later.start()
        with pytest.raises(NoSnapshotError, match="no checkpoint of step 1; it has 2"):
            CheckpointManager(root).restore(state(), 1)
        later.join()
        other.receive()
    assert folders(root) == ["step-000002"]


# --- no room, and no locks -------------------------------------------------------------------------------------------


def _run_out_of_room(folder: str, async_: bool) -> None:
    def large(step: int) -> dict[str, Any]:
        return state(step) | {"large": StateDict(x=torch.zeros(1 << 20, dtype=torch.uint8))}

    root = f"{folder}/run"
    manager = plain(root, keep_last=2, async_=async_)
    for step in (1, 2):
        manager.save(step, large(step))
    manager.wait()
    ballast = fill(folder, leave=1 << 19)
    before = free_bytes(folder)
    with pytest.raises(memstore.StoreFullError):
        manager.save(3, large(3))
        manager.wait()
    assert folders(root) == ["step-000001", "step-000002"] and free_bytes(folder) >= before
    os.truncate(ballast, 0)
    assert step_in_large(manager) == 2
    manager.save(4, large(4))
    manager.wait()
    assert folders(root) == ["step-000002", "step-000004"]


def step_in_large(manager: CheckpointManager) -> int:
    objects = state() | {"large": StateDict(x=torch.ones(1 << 20, dtype=torch.uint8))}
    return manager.restore(objects)


@pytest.mark.parametrize("async_", [False, True])
def test_a_full_disk_leaves_the_steps_that_are_there(async_: bool) -> None:
    on_small_tmpfs(8, _run_out_of_room, async_)


def _find_the_room_that_an_unfinished_step_takes(folder: str) -> None:
    root = f"{folder}/run"
    save(plain(root), 1)
    claimed = CheckpointManager(root)._storage.claim(2, {}, None, "snapshot")
    with open(f"{root}/step-000002/model.safetensors", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(folder) - (1 << 16))
    claimed.held.close()  # its process has died
    manager = plain(root, keep_last=2)
    step_in(manager)
    manager.save(3, state(3) | {"large": StateDict(x=torch.zeros(1 << 20, dtype=torch.uint8))})
    assert folders(root) == ["step-000001", "step-000003"]


def test_an_unfinished_step_is_removed_before_the_next_one_needs_its_room() -> None:
    on_small_tmpfs(8, _find_the_room_that_an_unfinished_step_takes)


def test_a_file_system_without_locks(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> bool:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(syscalls, "lock_shared", refuse)
    monkeypatch.setattr(syscalls, "lock_exclusive", refuse)
    manager = plain(root)
    for step in (1, 2, 3):
        save(manager, step)
    assert folders(root) == ["step-000003"] and step_in(manager) == 3
    os.remove(f"{root}/step-000003/memstore_snapshot.json")
    save(manager, 4)
    assert folders(root) == ["step-000003", "step-000004"]  # it may be about to be whole, as far as anyone can tell


def test_what_cannot_be_removed_stays_and_is_told(root: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = plain(root)
    save(manager, 1)
    with faults.watching(_refuse_removals(f"{root}/step-000001"), lambda *_: None, names=frozenset({"unlink"})):
        save(manager, 2)
    assert manager.latest() == 2 and "couldn't be removed" in caplog.text
    save(manager, 3)
    assert folders(root) == ["step-000003"]


def _refuse_removals(path: str) -> Callable[[int, str], None]:
    def hook(number: int, name: str) -> None:
        if os.path.exists(f"{path[:-1]}2/memstore_snapshot.json"):  # the new step is whole: now the old one goes
            raise OSError(errno.EACCES, "injected")

    return hook


# --- signals ---------------------------------------------------------------------------------------------------------


def _train(wire: Wire, root: str, async_: bool) -> int:
    progress, large = StateDict(step=0), StateDict(x=torch.zeros(16 << 20, dtype=torch.uint8))
    with CheckpointManager(root, keep_last=2, save_every=5, async_=async_) as manager:
        manager.save_on_signal()
        start = manager.restore({"progress": progress}) if manager.latest() is not None else 0
        for step in range(start + 1, start + 100_000):
            progress["step"] = step
            if manager.save(step, {"progress": progress, "large": large}) and step >= start + 10:
                wire.send(step)
            time.sleep(0.001)
            if manager.stopping:
                break
    return progress["step"]


@pytest.mark.parametrize("async_", [False, True])
def test_a_signal_while_a_save_is_under_way_saves_the_next_step_and_a_restart_continues_there(
    root: str, async_: bool
) -> None:
    stopped = 0
    for _ in range(2):
        with Child(_train, root, async_) as trainer:
            begun = trainer.receive()  # a save has just begun, or is just over
            os.kill(trainer.pid, signal.SIGTERM)
            wait_until(lambda: not trainer.process.is_alive())
            assert trainer.process.exitcode == 0
            *_, last = _all_of(trainer)
        assert begun > stopped and last > stopped + 9
        stopped = last
        assert CheckpointManager(root).latest() == stopped
        assert whole(root) == set(folders(root))


def _all_of(child: Child) -> list[int]:
    """What a child has sent that has ended; as the last one its result."""
    found: list[int] = []
    with contextlib.suppress(EOFError, RuntimeError):
        while True:
            found.append(child.receive())
    return found


def _signalled(root: str) -> tuple[bool, list[int], Any]:
    earlier = signal.getsignal(signal.SIGUSR1)
    manager = CheckpointManager(root, save_every=100, keep_last=None)
    manager.save_on_signal(signal.SIGUSR1)
    assert not manager.save(1, state(1)) and not manager.stopping
    with Child(_sleep) as child:  # a forked child has the handler, and is ended by the signal all the same
        child.receive()  # a signal that comes in the middle of a fork is lost
        os.kill(child.pid, signal.SIGUSR1)
        child.process.join(60)
        assert child.process.exitcode == -signal.SIGUSR1
    assert not manager.save(2, state(2))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not manager.stopping and manager.save(3, state(3)) and manager.stopping
    assert not manager.save(4, state(4))
    manager.close()
    return signal.getsignal(signal.SIGUSR1) == earlier, manager.steps(), manager.latest()


def _sleep(wire: Wire) -> None:
    wire.send()
    wire.receive()


def test_a_signal_is_answered_by_the_next_save_and_once(root: str) -> None:
    assert in_child(_signalled, root) == (True, [3], 3)


# --- ranks -----------------------------------------------------------------------------------------------------------


def _train_on_ranks(rank: int, root: str, backend: Any, dies_at: int | None, signalled: int | None) -> Any:
    manager = CheckpointManager(root, keep_last=2, save_every=5, backend=backend)
    manager.save_on_signal()
    start = manager.restore(state(rows=3)) if manager.latest() is not None else 0
    for step in range(start + 1, start + 24):
        torch.distributed.barrier()
        if rank == 1 and step == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        app_state = state(step)
        if rank == 1 and step == dies_at:
            app_state["progress"] = _Deadly()
        try:
            manager.save(step, app_state, {"loss": float(step + rank)})
        except memstore.MemstoreError as error:
            return str(error)
        if manager.stopping:
            return step
    manager.close()
    torch.distributed.barrier()  # rank 0 has removed by now what was to go
    return manager.steps()


class _Deadly(StateDict):
    def state_dict(self) -> Any:
        faults.die()


@pytest.mark.parametrize("backend", ["snapshot", "dcp"])
def test_ranks_save_together_and_rank_0_removes(root: str, backend: Any) -> None:
    found = all_right(on_ranks(2, _train_on_ranks, root, backend, None, None))
    assert found == [[15, 20], [15, 20]] and folders(root) == ["step-000015", "step-000020"]
    check_all(root)
    assert CheckpointManager(root, best="min").best() == 15  # by rank 0's metrics


def test_a_rank_that_dies_in_a_save_leaves_the_step_before_and_the_next_run_cleans_up(root: str) -> None:
    text, _ = on_ranks(2, _train_on_ranks, root, "snapshot", 15, None, dead=(1,))
    assert "rank 1" in text and "died" in text
    manager = CheckpointManager(root)
    assert manager.latest() == 10
    assert all_right(on_ranks(2, _train_on_ranks, root, "snapshot", None, None)) == [[25, 30], [25, 30]]
    assert folders(root) == ["step-000025", "step-000030"]


@pytest.mark.parametrize("signalled", [7, 10])
def test_a_signal_to_one_rank_stops_all_at_one_step(root: str, signalled: int) -> None:
    found = all_right(on_ranks(2, _train_on_ranks, root, "snapshot", None, signalled))
    assert found[0] == found[1] and found[0] in (signalled, signalled + 1)
    manager = CheckpointManager(root)
    assert manager.latest() == found[0]
    check_all(root)


def _save_other_steps(rank: int, root: str) -> str:
    manager = CheckpointManager(root)
    with pytest.raises(ValueError, match="different steps") as caught:
        manager.save(10 + rank, state())
    return str(caught.value)


def test_ranks_that_save_different_steps_are_told(root: str) -> None:
    first, second = all_right(on_ranks(2, _save_other_steps, root))
    assert first == second and "10 on rank 0, 11 on rank 1" in first
    assert folders(root) == []
