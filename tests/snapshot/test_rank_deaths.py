"""Ranks that are killed, fail, leave or never come: the others learn which one, soon, and nothing is damaged."""

from __future__ import annotations

import errno
import os
import re
import time
from typing import Any

import pytest
import torch

import memstore
from memstore import Snapshot, StateDict
from memstore.snapshot import ranks
from memstore.snapshot.ranks import RankGroup, RankStep
from tests.snapshot.leftovers import MANIFEST, app_state, check_whats_left
from tests.snapshot.ranks import all_right, on_ranks
from tests.support import faults


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


# --- a rank that leaves, or never comes -------------------------------------------------------------------------------


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
