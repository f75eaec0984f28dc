"""Takes and restores that are killed, fail, or meet another: a whole snapshot is there or none, and the next works."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import msgspec
import pytest
import torch

import memstore
from memstore import Snapshot, StateDict
from memstore.snapshot import ranks
from memstore.snapshot.ranks import Process, RankGroup, RankStep, has_ended, this_process
from tests.children import Child, Wire, in_child
from tests.small_tmpfs import free_bytes, on_small_tmpfs
from tests.snapshot.leftovers import MANIFEST, app_state, check_whats_left, number_in, take
from tests.snapshot.ranks import all_right, on_ranks
from tests.support import faults
from tests.support.equality import assert_same

FILES = ["memstore_snapshot.json", "model.safetensors", "state.safetensors"]


def steps(chosen: frozenset[str] = faults.STEPS) -> list[str]:
    """Those of a take by one process, from a path that isn't there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return faults.record(lambda: take(f"{folder}/s", 1.0), names=chosen)


def _die_at(path: str, step: int, after: bool) -> None:
    with faults.at_step(step, faults.die, after=after):
        take(path, 1.0)


def die_at(path: str, step: int, after: bool) -> None:
    with pytest.raises(RuntimeError, match="-9"):
        in_child(_die_at, path, step, after)


def test_a_take_that_is_killed_at_a_step(path: str) -> None:
    names = steps()
    assert names.count("link") == 2 and "sync" in names, names
    for i, step in enumerate([3, names.index("truncate") + 1, len(names) - 8, len(names) - 4, len(names)]):
        die_at(f"{path}{i}", step, after=True)
        check_whats_left(f"{path}{i}")


def test_a_take_whose_manifest_has_vanished_is_not_told_as_published(path: str) -> None:
    """Another take was first, and removed it as its own leftover; then that snapshot was removed, too."""
    links = frozenset({"link"})
    gone = faults.raising(FileNotFoundError(errno.ENOENT, "injected"))
    with (
        faults.at_step(len(steps(links)), gone, names=links),
        pytest.raises(memstore.AlreadyExistsError, match="gone by now"),
    ):
        take(path, 1.0)
    assert not os.path.exists(f"{path}/{MANIFEST}")
    take(path, 2.0)
    assert number_in(path) == 2.0


@pytest.mark.full
def test_a_take_that_is_killed_at_every_step(path: str) -> None:
    for step in range(1, len(steps()) + 1):
        for after in (False, True):
            die_at(f"{path}{step}{after}", step, after)
            check_whats_left(f"{path}{step}{after}")


def test_takes_that_are_killed_again_and_again(path: str) -> None:
    names = steps()
    publication = len(names) - names[::-1].index("link")
    for step in range(5, publication - 2, 5):
        die_at(path, step, after=False)
    check_whats_left(path)


def test_a_take_that_fails_at_every_step_leaves_nothing(path: str) -> None:
    chosen = faults.STEPS - faults.CLEANUPS
    names = steps(chosen)
    for step, name in enumerate(names, 1):
        there = f"{path}{step}"
        failing = faults.at_step(step, faults.raising(OSError(errno.EIO, "injected")), names=chosen)
        with contextlib.suppress(OSError, memstore.MemstoreError), failing:
            take(there, 1.0)
        if os.path.exists(f"{there}/{MANIFEST}"):  # it failed once it was published
            assert number_in(there) == 1.0
        else:
            left = os.listdir(there) if os.path.exists(there) else []
            assert not left or (name == "unlink" and len(left) == 1), (step, name, left)
            take(there, 2.0)
            assert number_in(there) == 2.0


# --- two jobs ---------------------------------------------------------------------------------------------------------


def _racer(wire: Wire, path: str, number: float, asynchronous: bool) -> str:
    wire.send("ready")
    wire.receive()
    try:
        if asynchronous:
            Snapshot.async_take(path, app_state(number)).wait()
        else:
            take(path, number)
    except memstore.AlreadyExistsError as error:
        assert path in str(error)
        return "was late"
    return "won"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["take", "async_take"])
def test_of_jobs_that_take_to_one_path_one_wins(path: str, asynchronous: bool) -> None:
    for attempt in range(1 if asynchronous else 3):
        there = f"{path}{attempt}"
        racers = [Child(_racer, there, float(number), asynchronous) for number in range(3)]
        try:
            for racer in racers:
                assert racer.receive() == "ready"
            for racer in racers:
                racer.send()
            outcomes = [racer.receive() for racer in racers]
        finally:
            for racer in racers:
                racer.__exit__()
        assert outcomes.count("won") == 1
        assert number_in(there) == float(outcomes.index("won"))
        assert len([name for name in os.listdir(there) if name.endswith(".safetensors")]) == 2, os.listdir(there)
        assert not [name for name in os.listdir(there) if "part" in name or name.endswith((".claim", ".new"))]


def _take_in_the_middle(path: str) -> str:
    """Another job publishes right before this one links its manifest."""
    links = frozenset({"link"})  # of the claim, and of the manifest
    with faults.at_step(2, lambda: in_child(take, path, 2.0), names=links):
        try:
            take(path, 1.0)
        except memstore.AlreadyExistsError as error:
            return str(error)
    return ""


def test_a_take_that_is_late_by_a_step_loses_and_leaves_nothing(path: str) -> None:
    assert "was first" in in_child(_take_in_the_middle, path)
    assert number_in(path) == 2.0
    assert len(os.listdir(path)) == 5, os.listdir(path)  # two files, the index, the manifest, the sums of boxes


def test_files_that_are_there_already_are_neither_written_over_nor_removed(path: str) -> None:
    os.makedirs(path)
    for name in ("model.safetensors", "config.json", "state.safetensors", "model.safetensors.index.json"):
        with open(f"{path}/{name}", "w") as file:
            file.write("of somebody else")
    take(path, 1.0)
    assert number_in(path) == 1.0
    with open(f"{path}/model.safetensors") as file:
        assert file.read() == "of somebody else"
    with open(f"{path}/model.safetensors.index.json") as file:
        assert file.read() == "of somebody else"


def test_a_users_file_that_is_called_as_a_takes_stays(path: str) -> None:
    os.makedirs(path)
    theirs = ("model-00112233aabbccdd.safetensors", "state-00001-of-00002-0123456789abcdef.safetensors")
    for name in theirs:
        open(f"{path}/{name}", "w").close()
    for step in (12, 20):  # takes that have left a trace, too
        die_at(path, step, after=False)
    assert len([name for name in os.listdir(path) if name.endswith(".safetensors")]) > 2
    take(path, 2.0)
    assert number_in(path) == 2.0
    left = {name for name in os.listdir(path) if not name.endswith((".json", ".sums"))}
    assert set(theirs) < left and len(left) == 4, left


# --- a full disk ------------------------------------------------------------------------------------------------------


def _fill_up(folder: str, asynchronous: bool) -> None:
    room = free_bytes(folder)
    state = {"state": StateDict(x=torch.zeros(room // 3), y=torch.zeros(room // 3, dtype=torch.int64))}
    path = f"{folder}/snapshot"
    for _ in range(2):
        with pytest.raises(memstore.StoreFullError):
            if asynchronous:
                Snapshot.async_take(path, state).wait()
            else:
                Snapshot.take(path, state)
        assert not os.path.exists(path)
        assert free_bytes(folder) > room - (1 << 17)
    take(path, 1.0)
    assert number_in(path) == 1.0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["take", "async_take"])
def test_a_full_disk_is_an_error_and_leaves_nothing(asynchronous: bool) -> None:
    on_small_tmpfs(4, _fill_up, asynchronous)


def test_what_a_restore_gives_does_not_depend_on_the_files_any_more(path: str) -> None:
    take(path, 1.0)
    state = app_state(-1.0)
    Snapshot(path).restore(state)
    for name in os.listdir(path):
        os.truncate(f"{path}/{name}", 0)
    assert_same(torch.full((5,), 1.0), state["state"]["x"])


# --- ranks that are killed, fail, leave or never come: the others learn which one, soon -------------------------------


def ranks_state(rank: int, number: float) -> dict[str, Any]:
    state = StateDict(number=number, x=torch.full((5,), number), own=torch.full((3,), number + rank))
    return {"model": app_state(number)["model"], "state": state}


def _ranks_steps(rank: int, path: str) -> int:
    Snapshot.take(f"{path}-first", {})
    return len(faults.record(lambda: Snapshot.take(path, ranks_state(rank, 1.0), replicated=["model/*"])))


def _rank_dies(rank: int, path: str, victim: int, step: int) -> None:
    Snapshot.take(f"{path}-first", {})  # from which the ranks know each other's processes
    if rank == victim:
        with faults.at_step(step, faults.die):
            Snapshot.take(path, ranks_state(rank, 1.0), replicated=["model/*"])
    Snapshot.take(path, ranks_state(rank, 1.0), replicated=["model/*"])


def _ranks_take(rank: int, path: str, number: float) -> None:
    Snapshot.take(path, ranks_state(rank, number), replicated=["model/*"])


def _ranks_restore(rank: int, path: str) -> tuple[float, float]:
    state = ranks_state(rank, -1.0)
    Snapshot(path).restore(state)
    return state["state"]["number"], state["state"]["own"][0].item() - rank


def _rank_1_dies_after_its_file(rank: int, path: str) -> None:
    if rank == 1:
        end_step = RankGroup.end_step

        def die_after_writing(self: RankGroup, step: RankStep, raised: BaseException | None) -> None:
            if os.path.exists(f"{path}/state-00002-of-00002.safetensors"):
                faults.die()
            end_step(self, step, raised)

        RankGroup.end_step = die_after_writing
    Snapshot.take(path, ranks_state(rank, 1.0))


def test_the_files_of_a_rank_that_died_go_with_the_next_take(path: str) -> None:
    survivor, _ = on_ranks(2, _rank_1_dies_after_its_file, path, dead=(1,))
    assert "died" in str(survivor)
    assert "state-00002-of-00002.safetensors" in os.listdir(path)
    check_whats_left(path)


def check_rank_dies(path: str, victim: int, step: int) -> None:
    outcomes = on_ranks(2, _rank_dies, path, victim, step, dead=(victim,))
    survivor = outcomes[1 - victim]
    if os.path.exists(f"{path}/{MANIFEST}"):
        assert all_right(on_ranks(2, _ranks_restore, path)) == [(1.0, 1.0)] * 2
        return
    assert isinstance(survivor, memstore.MemstoreError) and f"rank {victim}" in str(survivor), survivor
    all_right(on_ranks(2, _ranks_take, path, 2.0))
    assert all_right(on_ranks(2, _ranks_restore, path)) == [(2.0, 2.0)] * 2
    Snapshot(path).verify()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_that_is_killed_in_a_take(path: str, victim: int) -> None:
    counts = all_right(on_ranks(2, _ranks_steps, f"{path}-counts"))
    assert min(counts) > 5
    check_rank_dies(path, victim, counts[victim] // 2)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_at_every_step_of_a_take(path: str, victim: int) -> None:
    counts = all_right(on_ranks(2, _ranks_steps, f"{path}-counts"))
    for step in range(1, counts[victim] + 1):
        check_rank_dies(f"{path}{step}", victim, step)


def _async_steps(rank: int, path: str) -> int:
    Snapshot.take(f"{path}-first", {})
    steps = faults.record(lambda: Snapshot.async_take(path, ranks_state(rank, 1.0)))
    return len(steps)


def _rank_dies_asynchronously(rank: int, path: str, victim: int, step: int) -> None:
    Snapshot.take(f"{path}-first", {})
    if rank == victim:
        with faults.at_step(step, faults.die):
            Snapshot.async_take(path, ranks_state(rank, 1.0))
        faults.die()
    Snapshot.async_take(path, ranks_state(rank, 1.0)).wait(4.0)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_at_every_step_of_an_asynchronous_take(path: str, victim: int) -> None:
    counts = all_right(on_ranks(2, _async_steps, f"{path}-counts"))
    published: list[bool] = []
    for step in range(1, counts[victim] + 2):  # the last one comes after async_take
        there = f"{path}{step}"
        survivor = on_ranks(2, _rank_dies_asynchronously, there, victim, step, dead=(victim,))[1 - victim]
        published.append(os.path.exists(f"{there}/{MANIFEST}"))
        if not published[-1]:
            assert isinstance(survivor, memstore.MemstoreError), survivor
            assert re.search(rf"ranks? {victim}\b", str(survivor)), survivor
            all_right(on_ranks(2, _ranks_take, there, 1.0))
        assert all_right(on_ranks(2, _ranks_restore, there)) == [(1.0, 1.0)] * 2
    assert published[-1] and not published[0]


def _the_manifest_fails(rank: int, path: str) -> tuple[str, list[str]]:
    state = {"model": torch.nn.Linear(3, 2)}
    steps: list[str] = []
    failing = faults.raising(OSError(errno.ENOSPC, "injected"))
    watched = frozenset({"link"})
    with faults.watching(lambda _, name: steps.append(name), lambda *_: None, names=frozenset({"link", "sync"})):
        Snapshot.take(f"{path}-whole", state)
    try:
        with faults.at_step(3 if rank == 0 else 99, failing, names=watched):  # of the claim, the index, the manifest
            Snapshot.take(path, state)
    except (OSError, memstore.MemstoreError) as error:
        return str(error), steps
    return "", steps


def test_the_index_is_as_durable_as_the_manifest_and_goes_if_that_fails(path: str) -> None:
    (first, steps), (second, _) = all_right(on_ranks(2, _the_manifest_fails, path))
    assert steps[-8:] == ["sync", "sync", "link", "sync"] * 2, steps
    assert "rank 0" in second and first, (first, second)
    assert not os.path.exists(path) or not os.listdir(path)


def _gives_up_beside_the_publication(rank: int, path: str) -> str:
    """Rank 1 waits no longer, while rank 0 is about to link the manifest."""

    def wait_for_rank_1() -> None:
        deadline = time.monotonic() + 60
        while not os.path.exists(f"{path}-lost") and time.monotonic() < deadline:
            time.sleep(0.01)

    state = StateDict(x=torch.full((100,), float(rank)))
    links = frozenset({"link"})
    try:
        with faults.at_step(2 if rank == 0 else 99, wait_for_rank_1, names=links):
            Snapshot.take(path, {"state": state}, storage_options={"timeout": 2.0 if rank == 1 else 60.0})
    except memstore.UnknownOutcomeError as error:
        open(f"{path}-lost", "w").close()
        return str(error)
    return "published"


def test_a_rank_that_loses_the_others_leaves_its_files_to_a_publication_that_is_under_way(path: str) -> None:
    first, second = on_ranks(2, _gives_up_beside_the_publication, path)
    assert first == "published" and "rank 0" in second and MANIFEST in second, (first, second)
    Snapshot(path).verify()
    for rank in range(2):
        assert Snapshot(path).read_object(f"{rank}/state/x").unique().tolist() == [float(rank)]


def _restore_steps(rank: int, path: str) -> int:
    return len(faults.record(lambda: Snapshot(path).restore(ranks_state(rank, -1.0))))


def _rank_dies_in_restore(rank: int, path: str, victim: int, step: int) -> float:
    Snapshot(path).restore(ranks_state(rank, 0.0))  # from which the ranks know each other's processes
    if rank == victim:
        with faults.at_step(step, faults.die):
            Snapshot(path).restore(ranks_state(rank, -1.0))
    state = ranks_state(rank, -1.0)
    Snapshot(path).restore(state)
    return state["state"]["number"]


def check_rank_dies_in_restore(path: str, victim: int, step: int) -> bool:
    """Returns whether the other rank was told of it. It isn't where the victim had made all its steps."""
    before = contents(path)
    survivor = on_ranks(2, _rank_dies_in_restore, path, victim, step, dead=(victim,))[1 - victim]
    assert contents(path) == before
    if survivor == 1.0:
        return False
    assert isinstance(survivor, memstore.MemstoreError), survivor
    assert f"rank {victim} (process" in str(survivor) and "died" in str(survivor)
    return True


def contents(path: str) -> dict[str, bytes]:
    return {name: open(f"{path}/{name}", "rb").read() for name in os.listdir(path)}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_a_restore_is_told_and_the_snapshot_stays(path: str, victim: int) -> None:
    all_right(on_ranks(2, _ranks_take, path, 1.0))
    assert check_rank_dies_in_restore(path, victim, 4)
    assert all_right(on_ranks(2, _ranks_restore, path)) == [(1.0, 1.0)] * 2


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_at_every_step_of_a_restore(path: str, victim: int) -> None:
    all_right(on_ranks(2, _ranks_take, path, 1.0))
    counts = all_right(on_ranks(2, _restore_steps, path))
    assert min(counts) > 5
    told = [check_rank_dies_in_restore(path, victim, step) for step in range(1, counts[victim] + 1)]
    assert told == sorted(told, reverse=True) and sum(told) > 0.9 * len(told), told
    assert all_right(on_ranks(2, _ranks_restore, path)) == [(1.0, 1.0)] * 2


# -- a rank that leaves, or never comes --------------------------------------------------------------------------------


def _rank_1_comes_late(rank: int, path: str) -> list[str]:
    """Rank 1 comes when rank 0 has given up; then both call again."""
    said: list[str] = []
    if rank == 1:
        while not os.path.exists(f"{path}-given-up"):
            time.sleep(0.01)
    for number in range(2):
        options = {"timeout": 60.0 if number or rank else 0.3}
        try:
            Snapshot.take(f"{path}{number}", ranks_state(rank, 1.0), storage_options=options)
        except memstore.StoreTimeoutError as error:
            said.append(str(error))
            open(f"{path}-given-up", "w").close()
    return said


def test_a_rank_that_never_comes_is_named_and_the_next_call_works(path: str) -> None:
    (first,), (second,) = all_right(on_ranks(2, _rank_1_comes_late, path))
    assert "0.3 s for rank 1, which did not come" in first and first == second
    assert not os.path.exists(f"{path}0")
    assert all_right(on_ranks(2, _ranks_restore, f"{path}1")) == [(1.0, 1.0)] * 2


def _only_rank_1_restores(rank: int, path: str) -> str:
    """Rank 0, which the others wait for, never comes; rank 2 waits longer than rank 1."""
    if rank == 0:
        deadline = time.monotonic() + 60
        while not (os.path.exists(f"{path}-1") and os.path.exists(f"{path}-2")) and time.monotonic() < deadline:
            time.sleep(0.01)
        return ""
    calls: list[int] = []
    real = ranks.SnapshotCall
    ranks.SnapshotCall = lambda *arguments: calls.append(1) or real(*arguments)
    with pytest.raises(memstore.StoreTimeoutError) as raised:
        Snapshot(path, storage_options={"timeout": 0.2}).restore(ranks_state(rank, -1.0))
    assert calls == [1]  # else this rank would be a call ahead of the others from now on
    open(f"{path}-{rank}", "w").close()
    return str(raised.value)


def test_rank_0_may_be_the_one_that_never_comes(path: str) -> None:
    Snapshot.take(path, ranks_state(0, 1.0))
    _, first, second = all_right(on_ranks(3, _only_rank_1_restores, path))
    assert "for rank 0, which did not come" in first and "for rank 0, which did not come" in second


class _Interrupted(StateDict):
    """Ctrl-C comes while its state dict is asked for."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyboardInterrupt


def _rank_1_is_interrupted(rank: int, path: str, call: str) -> str:
    state = {"state": _Interrupted() if rank else StateDict(x=torch.ones(3))}
    try:
        if call == "restore":
            Snapshot(path).restore(state)
        else:
            getattr(Snapshot, call)(f"{path}-{call}", state)
    except (KeyboardInterrupt, memstore.MemstoreError) as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.parametrize("call", ["take", "async_take", "restore"])
def test_a_rank_that_is_interrupted_keeps_nobody_waiting(path: str, call: str) -> None:
    Snapshot.take(path, {"state": StateDict(x=torch.ones(3))})
    first, second = all_right(on_ranks(2, _rank_1_is_interrupted, path, call))
    assert second.startswith("KeyboardInterrupt")
    assert first.startswith("MemstoreError rank 1 failed: KeyboardInterrupt"), first


# --- whether a process has ended: only what is sure is said -----------------------------------------------------------


def _tell(wire: Wire) -> None:
    wire.send(this_process())
    wire.receive()


def test_a_process_that_runs_has_not_ended_and_one_that_was_killed_has() -> None:
    mine = this_process()
    assert mine.pid == os.getpid() and not has_ended(mine, mine)
    with Child(_tell) as child:
        theirs: Process = child.receive()
        assert not has_ended(theirs, mine)
        assert has_ended(msgspec.structs.replace(theirs, started=theirs.started - 1), mine)  # a later one of its number
        child.kill()
        assert has_ended(theirs, mine)


def test_a_dead_process_that_nobody_has_waited_for_has_ended() -> None:
    mine = this_process()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with open(f"/proc/{process.pid}/stat") as file:
            started = int(file.read().rpartition(")")[2].split()[19])
        theirs = Process(mine.host, process.pid, started)
        assert not has_ended(theirs, mine)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert has_ended(theirs, mine)


def test_of_a_process_of_another_host_or_namespace_nothing_is_known() -> None:
    mine = this_process()
    assert mine.host is not None
    boot, namespace = mine.host
    for host in ((bytes(16), namespace), (boot, namespace + 1), None):
        elsewhere = Process(host, 1 << 22, 0)  # a number that no process here has
        assert not has_ended(elsewhere, mine) and not has_ended(elsewhere, msgspec.structs.replace(mine, host=None))
    assert has_ended(Process(mine.host, 1 << 22, 0), mine)
