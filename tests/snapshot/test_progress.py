"""Progress of takes and restores: each rank's own bytes, as they pass; a bar on a terminal; callbacks that raise."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any

import pytest
import torch

import memstore
from memstore import Snapshot, StateDict
from memstore.convert import convert
from memstore.snapshot import writer
from tests.children import in_child
from tests.snapshot.ranks import all_right, on_ranks

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
