"""Asynchronous takes, and progress: tensors may change at once, failures come out in wait, writers outlive trainers."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import memstore
from memstore import Snapshot, StateDict
from memstore.convert import convert
from memstore.snapshot import staging, writer
from memstore.snapshot.storage import FileStorage
from tests.children import Child, Wire, in_child
from tests.snapshot.ranks import all_right, on_ranks

MANIFEST = "memstore_snapshot.json"


def state_of(number: float, rank: int = 0) -> dict[str, Any]:
    model = torch.nn.Linear(300, 200)
    torch.nn.init.constant_(model.weight, number)
    strided = torch.full((40, 30), number).t()
    return {"model": model, "state": StateDict(number=number, own=torch.full((3,), number + rank), strided=strided)}


def numbers_in(path: str, rank: int = 0) -> tuple[float, float]:
    state = state_of(-1.0)
    Snapshot(path).restore(state)
    (number,) = {*state["model"].weight.unique().tolist(), *state["state"]["strided"].unique().tolist()}
    assert number == state["state"]["number"]
    return number, state["state"]["own"][0].item() - rank


def test_tensors_may_change_as_soon_as_it_returns(path: str) -> None:
    app_state = state_of(1.0)
    waiting = []
    for i in range(5):
        waiting.append(Snapshot.async_take(f"{path}{i}", app_state))
        with torch.no_grad():
            app_state["model"].weight += 1
            app_state["state"]["strided"] += 1
        app_state["state"]["number"] += 1
    for i, one in enumerate(waiting):
        assert one.path == f"{path}{i}"
        one.wait().verify()
        assert one.done() and numbers_in(one.path)[0] == float(i + 1)


def test_progress_and_options(path: str) -> None:
    told: list[tuple[int, int]] = []
    waiting = Snapshot.async_take(
        path,
        {"state": StateDict(x=torch.ones(9), y=complex)},
        progress=lambda done, total: told.append((done, total)),
        durability="process",
        checksum=False,
        allow_pickle=True,
    )
    snapshot = waiting.wait(60)
    assert told and told[-1][0] == told[-1][1] == snapshot.metadata.nbytes and not snapshot.metadata.checksum
    assert snapshot.get_state_dict_for_key("state")["y"] is complex


def test_a_manifest_may_be_longer_than_a_message(path: str) -> None:
    state = {f"layer.{i}": torch.tensor(float(i)) for i in range(5000)}
    snapshot = Snapshot.async_take(path, {"state": StateDict(**state)}, durability="process").wait()
    assert os.path.getsize(f"{path}/{MANIFEST}") > 1 << 16
    assert snapshot.get_state_dict_for_key("state") == state


def test_a_snapshot_that_was_removed_before_the_wait_says_so(path: str) -> None:
    pending = Snapshot.async_take(path, {"state": StateDict(x=torch.ones(3))}, durability="process")
    other = Snapshot.async_take(f"{path}2", {"state": StateDict(x=torch.ones(3))}, durability="process")
    other.wait()  # which the same writer makes after the first one
    os.remove(f"{path}/{MANIFEST}")
    with pytest.raises(memstore.NotAStoreError, match="removed since"):
        pending.wait()


def test_what_can_be_told_at_once_is(path: str) -> None:
    Snapshot.take(path, state_of(1.0))
    with pytest.raises(memstore.AlreadyExistsError):
        Snapshot.async_take(path, state_of(2.0))


def test_a_take_that_another_one_overtakes_raises_in_wait(path: str) -> None:
    first = Snapshot.async_take(path, state_of(1.0))
    try:
        Snapshot.take(path, state_of(2.0))
    except memstore.AlreadyExistsError:
        first.wait()
        assert numbers_in(path)[0] == 1.0
    else:
        with pytest.raises(memstore.AlreadyExistsError):
            first.wait()
        assert numbers_in(path)[0] == 2.0
    assert len([name for name in os.listdir(path) if name.endswith(".safetensors")]) == 2


def _ranks_take(rank: int, path: str) -> float:
    app_state = state_of(1.0, rank)
    waiting = Snapshot.async_take(path, app_state, replicated=["model/*"])
    with torch.no_grad():
        app_state["model"].weight.zero_()
    snapshot = waiting.wait(100)
    assert waiting.done()
    return snapshot.metadata.created


def _ranks_read(rank: int, path: str) -> tuple[float, float]:
    return numbers_in(path, rank)


def test_the_last_of_several_ranks_publishes(path: str) -> None:
    created = all_right(on_ranks(3, _ranks_take, path))
    assert len(set(created)) == 1
    assert all_right(on_ranks(3, _ranks_read, path)) == [(1.0, 1.0)] * 3
    Snapshot(path).verify()
    left = os.listdir(path)
    assert not [name for name in left if "part" in name or name.endswith(".claim")], left


def _rotated_before_it_waits(rank: int, path: str) -> str:
    waiting = Snapshot.async_take(path, state_of(1.0, rank))
    if rank == 0:
        waiting.wait(60)
        torch.distributed.barrier()  # the writer of rank 1 may have been the last
        shutil.rmtree(path)
        torch.distributed.barrier()
        return ""
    waiting._take._tiers[0]._write.wait(60)
    torch.distributed.barrier()
    torch.distributed.barrier()
    assert waiting.done()
    try:
        snapshot = waiting.wait(5)
    except memstore.MemstoreError as error:
        return str(error)
    with pytest.raises(memstore.NotAStoreError):
        snapshot.verify()
    return "removed: it was this rank that published"


def test_a_snapshot_that_was_removed_before_a_rank_waits(path: str) -> None:
    _, second = all_right(on_ranks(2, _rotated_before_it_waits, path))
    assert "removed" in second, second


def test_a_folder_knows_that_it_is_removed(path: str) -> None:
    there = FileStorage.create(path, durable=False)
    assert not there.is_removed
    os.rename(path, f"{path}2")
    os.mkdir(path)
    assert not there.is_removed
    os.rmdir(f"{path}2")
    assert there.is_removed


def _die_after_staging(rank: int, path: str) -> None:
    Snapshot.async_take(path, state_of(1.0, rank), replicated=["model/*"])
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for(there: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(there):
        assert time.monotonic() < deadline, os.listdir(os.path.dirname(there))
        time.sleep(0.01)


def test_writers_complete_a_snapshot_whose_trainers_died(path: str) -> None:
    on_ranks(2, _die_after_staging, path, dead=(0, 1))
    _wait_for(f"{path}/{MANIFEST}")
    assert all_right(on_ranks(2, _ranks_read, path)) == [(1.0, 1.0)] * 2
    Snapshot(path).verify()


def _a_writer_fails(rank: int, path: str) -> None:
    write = staging.StagedTensors.write

    def write_where_something_is(self: Any, folder: str, files: Any, **options: Any) -> Any:
        with open(f"{folder}/{files[-1].name}", "w") as file:
            file.write("of somebody else")
        return write(self, folder, files, **options)

    if rank == 1:
        staging.StagedTensors.write = write_where_something_is
    Snapshot.async_take(path, state_of(1.0, rank)).wait(100)


def test_a_failure_of_one_writer_raises_in_wait_on_all_ranks(path: str) -> None:
    first, second = on_ranks(2, _a_writer_fails, path)
    assert isinstance(first, memstore.AlreadyExistsError) and str(first).startswith("rank 1: "), first
    assert isinstance(second, memstore.AlreadyExistsError) and "state-00002" in str(second), second
    left = [name for name in os.listdir(path) if "failure" not in name]
    assert left == ["state-00002-of-00002.safetensors"]
    Snapshot.take(path, state_of(2.0))
    assert numbers_in(path)[0] == 2.0
    with open(f"{path}/state-00002-of-00002.safetensors") as file:
        assert file.read() == "of somebody else"


def _one_never_comes(rank: int, path: str) -> str:
    prepared_only = rank == 1
    waiting = Snapshot.async_take(path, state_of(1.0, rank)) if not prepared_only else None
    if waiting is None:
        _stage_and_die(path, rank)
        return ""
    waiting._take._tiers[0]._write.wait(60)
    try:
        waiting.wait(0.1)
    except memstore.StoreTimeoutError as error:
        return str(error)
    return "published"


def _stage_and_die(path: str, rank: int) -> None:
    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    staging.StagedTensors.write = die
    Snapshot.async_take(path, state_of(1.0, rank))


def test_a_rank_that_died_before_its_writer_had_the_bytes_is_named(path: str) -> None:
    first, _ = on_ranks(2, _one_never_comes, path, dead=(1,))
    assert "rank 1 has not written its part: it may have died" in str(first), first
    assert not os.path.exists(f"{path}/{MANIFEST}")
    Snapshot.take(path, state_of(2.0))
    assert numbers_in(path)[0] == 2.0
    assert len([name for name in os.listdir(path) if name.endswith(".safetensors")]) == 2


def _kill_the_writer(wire: Wire, path: str) -> str:
    waiting = Snapshot.async_take(f"{path}1", state_of(1.0))
    waiting.wait(60)
    writer = waiting._take._tiers[0]._write.writer
    os.kill(writer, signal.SIGSTOP)
    waiting = Snapshot.async_take(f"{path}2", state_of(2.0))
    with pytest.raises(memstore.StoreTimeoutError):
        waiting.wait(0.05)
    assert not waiting.done()
    os.kill(writer, signal.SIGKILL)
    with pytest.raises(memstore.UnknownOutcomeError):
        waiting.wait(60)
    assert not os.path.exists(f"{path}2")
    Snapshot.async_take(f"{path}2", state_of(3.0)).wait(60)
    return "done"


def test_a_killed_writer_raises_in_wait_and_the_next_take_has_a_new_one(path: str) -> None:
    with Child(_kill_the_writer, path) as child:
        assert child.receive() == "done"
    assert numbers_in(f"{path}2")[0] == 3.0


def test_what_the_writer_loads_needs_no_torch() -> None:
    code = (
        "import memstore.snapshot.publishing, sys; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# --- progress: each rank's own bytes, as they pass; a bar on a terminal; callbacks that raise -------------------------


MIB = 1 << 20


def state(mib: int = 40) -> dict[str, Any]:
    return {"state": StateDict(x=torch.ones(mib * MIB, dtype=torch.uint8), step=3)}


class Told(list[tuple[int, int]]):
    """What a callback was told."""

    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))

    def check(self, total: int) -> None:
        done = [found for found, _ in self]
        assert done == sorted(done) and done[-1] == total and {found for _, found in self} == {total}, self


def test_takes_and_restores_tell_their_bytes_as_they_pass(path: str) -> None:
    wrote, read = Told(), Told()
    snapshot = Snapshot.take(path, state(), progress=wrote)
    wrote.check(snapshot.metadata.nbytes)
    snapshot.restore(state(), progress=read)
    read.check(40 * MIB)
    assert len(wrote) > 2 and len(read) > 2


def test_a_state_without_bytes_is_done_at_once(path: str) -> None:
    told = Told()
    snapshot = Snapshot.take(path, {"state": StateDict(step=3)})
    snapshot.restore({"state": StateDict()}, progress=told)
    assert told == [(0, 0)]


def _own_bytes(rank: int, path: str) -> tuple[Told, Told]:
    wrote, read = Told(), Told()
    snapshot = Snapshot.take(path, state(rank + 1), progress=wrote)
    snapshot.restore(state(rank + 1), progress=read)
    return wrote, read


def test_each_rank_is_told_of_its_own_bytes(path: str) -> None:
    for rank, (wrote, read) in enumerate(all_right(on_ranks(2, _own_bytes, path))):
        assert 0 <= wrote[-1][1] - (rank + 1) * MIB < 4096
        wrote.check(wrote[-1][1])
        read.check((rank + 1) * MIB)


def _told_by_the_writer(path: str) -> tuple[Told, int]:
    # a writer that tells every piece, and not ten times a second
    writer._CODE = writer._CODE.replace("import main;", "import main; import memstore.snapshot.writer as p;")
    writer._CODE = writer._CODE.replace("main(int", "p._INTERVAL = 0.0; main(int")
    told = Told()
    snapshot = Snapshot.async_take(path, state(100), progress=told, durability="process").wait()
    return told, snapshot.metadata.nbytes


def test_an_asynchronous_take_is_told_as_its_writer_writes(path: str) -> None:
    told, total = in_child(_told_by_the_writer, path)
    told.check(total)
    assert len(told) > 4


class TooSlow(Exception):
    pass


def cancel(done: int, total: int) -> None:
    raise TooSlow(f"{done} of {total}")


def test_a_callback_that_raises_ends_a_take_which_leaves_nothing(path: str) -> None:
    with pytest.raises(TooSlow):
        Snapshot.take(path, state(), progress=cancel)
    assert not os.path.exists(path)
    Snapshot.take(path, state()).verify()


def test_a_callback_that_raises_ends_a_restore(path: str) -> None:
    snapshot = Snapshot.take(path, state())
    with pytest.raises(TooSlow):
        snapshot.restore(state(), progress=cancel)
    snapshot.restore(state())


class Frozen(OSError):
    """As a frozen exception of attrs: Python may set what it needs."""

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("__"):
            raise AttributeError(f"{name} can't be set")
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [OSError, Frozen])
def test_what_a_callback_raises_stays_as_it_is(path: str, scratch: str, kind: type[OSError]) -> None:
    """It may be out of room elsewhere, which is no lack of the snapshot's."""
    full = kind(errno.ENOSPC, "no room for the log")

    def fail(*_: Any) -> None:
        raise full

    taken = Snapshot.take(path, state())
    torch.save(torch.ones(3), f"{path}.pt")
    with memstore.open(scratch) as store:
        store.put("key", torch.ones(3))
        for call in (
            lambda: Snapshot.take(f"{path}-2", state(), progress=fail),
            lambda: taken.restore(state(), progress=fail),
            lambda: taken.verify(progress=fail),
            lambda: store.export("key", f"{path}.safetensors", progress=fail),
            lambda: store.verify(progress=fail),
            lambda: convert(f"{path}.pt", f"{path}-2.safetensors", progress=fail),
        ):
            with pytest.raises(OSError) as raised:
                call()
            assert raised.value is full
    os.remove(f"{path}.pt")


def _rank_1_cancels(rank: int, path: str) -> str:
    try:
        Snapshot.take(path, state(2), progress=cancel if rank else None)
    except (TooSlow, memstore.MemstoreError) as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_a_callback_that_raises_on_one_rank_ends_the_take_on_all(path: str) -> None:
    first, second = all_right(on_ranks(2, _rank_1_cancels, path))
    assert second.startswith("TooSlow") and first.startswith("MemstoreError rank 1 failed: TooSlow"), (first, second)
    assert not os.path.exists(path)


@pytest.mark.parametrize("error", [TooSlow, SystemExit])
def test_a_callback_that_raises_costs_no_asynchronous_snapshot(path: str, error: type[BaseException]) -> None:
    calls: list[int] = []

    def fail(done: int, total: int) -> None:
        calls.append(done)
        raise error("of the callback")

    pending = Snapshot.async_take(path, state(), progress=fail)
    with pytest.warns(RuntimeWarning, match="of the callback"):
        snapshot = pending.wait()
    snapshot.verify()
    assert len(calls) == 1 and pending.wait().path == path


def _on_a_terminal(path: str) -> str:
    ours, theirs = os.openpty()
    sys.stderr = open(theirs, "w")  # noqa: SIM115
    snapshot = Snapshot.take(path, state(), progress=True)
    snapshot.restore(state(), progress=True)
    Snapshot.async_take(f"{path}-2", state(), progress=True).wait()
    sys.stderr.close()
    sys.stderr = sys.__stderr__
    text = b""
    with contextlib.suppress(OSError):  # which is how a terminal ends; each read has what has come through by then
        while part := os.read(ours, 1 << 16):
            text += part
    return text.decode()


def test_a_terminal_has_a_bar_with_bytes_and_rate(path: str) -> None:
    text = in_child(_on_a_terminal, path)
    assert text.count("100%") == 3 and text.count("writing") >= 2 and "reading" in text
    assert "40.0 MiB of 40.0 MiB" in text and ("MiB/s" in text or "GiB/s" in text), text


def test_where_there_is_no_terminal_there_is_no_bar(path: str, capfd: pytest.CaptureFixture[str]) -> None:
    Snapshot.take(path, state(1), progress=True).restore(state(1), progress=True)
    assert capfd.readouterr().err == ""
