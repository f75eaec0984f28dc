"""Who comes first: readers wait for a store that is to be made; and for the next one, where a folder was cleared."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

import memstore
import memstore.aio
from memstore.store import opening
from memstore.store.opening import when_there
from tests.children import Child, Wire
from tests.support import faults
from tests.users import GROUP, USER, as_user, needs_root

pytestmark = pytest.mark.embedded


def follow(wire: Wire, root: str, mode: str) -> float:
    wire.send("about to open")
    with memstore.open(root, mode, wait=100.0) as store:  # type: ignore[arg-type]
        store.wait("policy", timeout=100.0)
        return float(store.get("policy").sum())


@pytest.mark.parametrize("mode", ["r", pytest.param("r+", marks=pytest.mark.full)])
@pytest.mark.parametrize("there", ["no folder", "no parent", "an empty folder", "a store that is half made"])
def test_a_follower_may_start_first(scratch: str, mode: str, there: str) -> None:
    root = f"{scratch}/a/b" if there == "no parent" else scratch
    if there == "an empty folder":
        os.mkdir(root, mode=0o700)
    elif there == "a store that is half made":
        memstore.open(root).close()
        os.unlink(f"{root}/memstore.json")
        shutil.rmtree(f"{root}/catalog")
    with Child(follow, root, mode) as follower:
        assert follower.receive() == "about to open"
        os.makedirs(os.path.dirname(root), exist_ok=True)
        with memstore.open(root) as store:
            store.put("policy", torch.ones(3))
            assert follower.receive() == 3.0


def looks(*actions: Callable[[], None]) -> Callable[[str], Callable[[float], memstore.Store]]:
    """What opens a store; before each look the next of the actions is done."""
    todo = iter(actions)

    def opener(root: str) -> Callable[[float], memstore.Store]:
        def open_now(_: float) -> memstore.Store:
            for action in todo:
                action()
                break
            return memstore.open(root, "r")

        return open_now

    return opener


def test_each_look_sees_what_is_there_by_then(scratch: str) -> None:
    done: list[str] = []
    steps: tuple[Callable[[], None], ...] = (
        lambda: done.append("nothing"),
        lambda: os.mkdir(scratch, mode=0o700),
        lambda: done.append("a folder"),
        lambda: memstore.open(scratch).close(),
    )
    with when_there(scratch, 100.0, looks(*steps)(scratch), 30.0) as store:
        assert len(store) == 0 and done == ["nothing", "a folder"]


def test_a_store_that_is_being_removed_is_waited_out(scratch: str) -> None:
    memstore.open(scratch).close()
    shutil.rmtree(f"{scratch}/segments")  # and memstore.json is there still
    steps: tuple[Callable[[], None], ...] = (
        lambda: None,
        lambda: shutil.rmtree(scratch),
        lambda: memstore.open(scratch).close(),
    )
    with when_there(scratch, 100.0, looks(*steps)(scratch), 30.0) as store:
        assert len(store) == 0


def test_one_that_stays_half_removed_is_damaged(scratch: str) -> None:
    memstore.open(scratch).close()
    shutil.rmtree(f"{scratch}/segments")
    with pytest.raises(memstore.CorruptionError, match="segments is missing"):
        memstore.open(scratch, "r", wait=0.05)


@pytest.mark.parametrize("wait", [0, 0.05])
def test_it_says_what_was_there_when_its_time_is_over(scratch: str, wait: float) -> None:
    with pytest.raises(memstore.StoreTimeoutError, match=f"doesn't exist.*nobody has made a store.*{wait} s"):
        memstore.open(scratch, "r", wait=wait)
    os.mkdir(scratch, mode=0o700)
    with pytest.raises(memstore.StoreTimeoutError, match="it has no memstore.json.*nobody has made"):
        memstore.open(scratch, "r", wait=wait)
    assert os.listdir(scratch) == []


def test_what_can_be_no_store_is_not_waited_for(scratch: str) -> None:
    """Else these would wait for ever."""
    forever = float("inf")
    with open(scratch, "w"):
        pass
    for path in (scratch, f"{scratch}/store"):
        with pytest.raises(memstore.NotAStoreError):
            memstore.open(path, "r", wait=forever)
    os.unlink(scratch)
    os.mkdir(scratch, mode=0o700)
    with open(f"{scratch}/memstore.json", "w") as file:
        file.write("{}")
    with pytest.raises(memstore.NotAStoreError):
        memstore.open(scratch, "r", wait=forever)


def join_group(wire: Wire, root: str, closed_at_most: float) -> int:
    """As another user of the group, who tells when the folder was closed to it."""
    os.setgroups([GROUP])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    opening.CLOSED_AT_MOST = closed_at_most
    told: list[str] = []

    def open_now(_: float) -> memstore.Store:
        try:
            return memstore.open(root, "r")
        except memstore.PermissionDeniedError:
            if not told:
                told.append("closed")
                wire.send("closed")
            raise

    with when_there(root, float("inf"), open_now, 30.0) as store:
        return store.wait("policy", timeout=100.0)


@needs_root
def test_a_follower_of_the_group_waits_until_the_folder_is_open_to_it(scratch: str) -> None:
    """`open` makes the folder for its own user, and gives it to the group afterwards."""
    os.chmod(os.path.dirname(scratch), 0o755)
    os.mkdir(scratch, mode=0o700)
    with Child(join_group, scratch, 1000.0) as follower:
        assert follower.receive() == "closed"
        with memstore.open(scratch, unix_group=GROUP, file_mode=0o660) as store:
            version = store.put("policy", 1)
            assert follower.receive() == version


@needs_root
def test_a_folder_that_stays_closed_is_not_waited_for(scratch: str) -> None:
    os.chmod(os.path.dirname(scratch), 0o755)
    os.mkdir(scratch, mode=0o700)
    with Child(join_group, scratch, 0.05) as follower:
        assert follower.receive() == "closed"
        with pytest.raises(memstore.PermissionDeniedError, match="Permission denied"):
            follower.receive()


@needs_root
def test_a_store_that_is_not_open_to_this_user_is_refused_at_once(scratch: str) -> None:
    os.chmod(os.path.dirname(scratch), 0o755)
    memstore.open(scratch).close()
    os.chmod(scratch, 0o755)
    with Child(join_group, scratch, 1000.0) as follower:
        assert follower.receive() == "closed"
        with pytest.raises(memstore.PermissionDeniedError, match="Permission denied"):
            follower.receive()


@pytest.mark.parametrize("mode", ["a", "x"])
def test_who_makes_the_store_has_nothing_to_wait_for(scratch: str, mode: str) -> None:
    with pytest.raises(ValueError, match=r"wait= is for modes 'r' and 'r\+'"):
        memstore.open(scratch, mode, wait=1.0)  # type: ignore[arg-type]
    assert not os.path.exists(scratch)


@pytest.mark.parametrize("wait", ["soon", float("nan"), []])
def test_a_wait_is_a_number_of_seconds(scratch: str, wait: object) -> None:
    with pytest.raises((TypeError, ValueError), match="number of seconds"):
        memstore.open(scratch, "r", wait=wait)  # type: ignore[arg-type]


def test_a_store_that_is_there_is_opened_at_once(root: str) -> None:
    with memstore.open(root) as store, memstore.open(root, "r", wait=0) as reader:
        store.put("key", 1)
        assert reader.get("key") == 1


# --- restarts, and folders that are cleared ---------------------------------------------------------------------------


def train(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        step = store.get("policy", {"step": 0})["step"]
        while True:
            step += 1
            store.put("policy", {"w": torch.full((10_000,), float(step)), "step": step})
            wire.send(step)
            wire.receive()


def test_a_follower_outlives_its_trainers(root: str) -> None:
    with Child(train, root) as first:
        assert first.receive() == 1
        store = memstore.open(root, "r", wait=100.0)
        version = store.wait("policy")
        held = store.get("policy")
        first.kill()
    with Child(train, root) as second:
        assert second.receive() == 2
        newer = store.wait("policy", newer_than=version, timeout=100.0)
        policy = store.get("policy")
        assert newer > version and policy["step"] == 2 and (policy["w"] == 2).all()
        assert held["step"] == 1 and (held["w"] == 1).all()
    store.close()


@pytest.mark.parametrize("cleared", ["removed", "emptied", "made anew"])
def test_a_follower_goes_on_in_the_next_store(scratch: str, cleared: str) -> None:
    trainer = memstore.open(scratch)
    trainer.put("policy", torch.ones(10_000))
    follower = memstore.open(scratch, "r", wait=0)
    held = follower.get("policy")
    trainer.close()
    if cleared == "emptied":
        for entry in os.scandir(scratch):
            shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)
    else:
        shutil.rmtree(scratch)
    again = memstore.open(scratch) if cleared == "made anew" else None
    with pytest.raises(memstore.NotAStoreError, match="open the store again"):
        follower.wait("policy", newer_than=1, timeout=100.0)
    assert (held == 1).all()
    follower.close()
    again = again or memstore.open(scratch)
    with memstore.open(scratch, "r", wait=100.0) as follower:
        assert "policy" not in follower
        assert again.put("policy", torch.zeros(3)) == follower.wait("policy", timeout=100.0)
    again.close()


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_tasks_wait_too(scratch: str) -> None:
    async def main() -> int:
        follower = memstore.aio.open(scratch, "r", wait=100.0)
        with memstore.open(scratch) as store:
            version = store.put("policy", 1)
        async with follower as opened:
            assert await opened.version("policy") == version
            return await opened.get("policy")

    assert asyncio.run(main()) == 1


def test_a_task_is_told_that_nobody_made_it(scratch: str) -> None:
    async def main() -> None:
        with pytest.raises(memstore.StoreTimeoutError, match="nobody has made a store"):
            await memstore.aio.open(scratch, "r", wait=0.02)
        with pytest.raises(ValueError, match="wait= is for"):
            await memstore.aio.open(scratch, wait=1.0)

    asyncio.run(main())


# --- what is in the way -----------------------------------------------------------------------------------------------


def _stop_in_creation(wire: Wire, root: str) -> None:
    """Stops itself while it holds the lock under which stores are made and opened."""
    with faults.at_step(8, lambda: os.kill(os.getpid(), signal.SIGSTOP)):
        wire.send("about to create")
        memstore.open(root).close()


def test_a_creator_that_is_stopped_is_named_in_time(scratch: str) -> None:
    memstore.open(f"{scratch}.warm").close()  # imports
    with Child(_stop_in_creation, scratch) as child:
        child.receive()
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        started = time.monotonic()
        with pytest.raises(memstore.StoreTimeoutError, match=rf"pid {child.pid} .*stopped.*finish opening"):
            memstore.open(scratch, "r", wait=0.3)
        assert 0.25 < time.monotonic() - started < 10
        os.kill(child.pid, signal.SIGCONT)
        memstore.open(scratch, "r", wait=60.0).close()


def test_what_can_never_be_a_store_is_not_waited_for(scratch: str) -> None:
    memstore.Snapshot.take(f"{scratch}/step-1", {})
    os.symlink(f"{scratch}/loop", f"{scratch}/loop")
    for path, text in {
        f"{scratch}/step-1": "is a snapshot, and no store",
        f"{scratch}/{'x' * 300}": "File name too long",
        f"{scratch}/loop": "Too many levels of symbolic links|is a link to",
    }.items():
        with pytest.raises(memstore.NotAStoreError, match=text):
            memstore.open(path, "r", wait=60.0)
    with pytest.raises(ValueError, match="has a NUL"):
        memstore.open(f"{scratch}/a\0b", "r", wait=60.0)


def test_where_a_link_leads_a_store_may_come(scratch: str) -> None:
    os.mkdir(scratch, mode=0o700)
    os.symlink(f"{scratch}/run-7", current := f"{scratch}/current")
    for mode in ("r", "a"):
        with pytest.raises(memstore.NotAStoreError, match="is a link to .*run-7, where nothing is"):
            memstore.open(current, mode)  # type: ignore[arg-type]
    with Child(follow, current, "r") as follower:
        follower.receive()
        with memstore.open(f"{scratch}/run-7") as store:
            store.put("policy", torch.ones(3))
            assert follower.receive() == 3.0


@needs_root
def test_a_store_below_a_closed_folder_is_no_missing_one(scratch: str) -> None:
    os.makedirs(f"{scratch}/home", mode=0o700)
    memstore.open(f"{scratch}/home/run").close()
    os.chmod(scratch, 0o755)
    for path in (f"{scratch}/home/run", f"{scratch}/home/nothing"):
        error = as_user(USER, [], _error_of_opening, path)
        assert "can't be reached: a folder above it is closed to this user" in error


def _error_of_opening(path: str) -> str:
    with pytest.raises(memstore.PermissionDeniedError) as caught:
        memstore.open(path, "r")
    return str(caught.value)


def test_seconds_may_be_any_number(scratch: str) -> None:
    for seconds in (np.float32(0.01), Fraction(1, 100), torch.tensor(0.01)):
        with pytest.raises(memstore.StoreTimeoutError, match=r"within 0\.01 s"):
            memstore.open(scratch, "r", wait=seconds)  # type: ignore[arg-type]


def test_a_path_may_have_any_bytes(scratch: str) -> None:
    os.mkdir(scratch, mode=0o700)
    path = os.fsdecode(os.fsencode(scratch) + b"/caf\xe9")
    with memstore.open(path) as store:
        store.put("key", torch.ones(1000))
    with memstore.open(path, "r") as store:
        assert store.get("key").sum() == 1000
