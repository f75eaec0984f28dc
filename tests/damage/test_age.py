"""A catalog that has gone back in time is refused before anything is swept, and its files outlive it."""

from __future__ import annotations

import logging
import os
import shutil
import struct
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memstore
from memstore.engine import syscalls
from memstore.engine.files.segments import write_slots, write_state
from memstore.engine.format.headers import HeaderSlots
from memstore.engine.format.records import LIVE, RETIRED
from memstore.engine.sync.pages import publications_rung
from tests.children import in_child
from tests.damage.stores import CATALOG, copy, files_of, flip, overwrite
from tests.examples import one_in
from tests.inside import root_of
from tests.support import faults
from tests.support.equality import is_same

PAGE = 4096
STATE_AT = 16 + 24 + 2 * 48 + 8  # in each of the two pages that start a state of the catalog: its number
META_SIZE = STATE_AT + 8

Change = Callable[[memstore.Store], object]
CHANGES: dict[str, Change] = {
    "inline": lambda store: store.put("inline", 2),
    "new-inline": lambda store: store.put("new", 2),
    "inline-gone": lambda store: store.delete("inline"),
    "segment": lambda store: store.put("segment", torch.ones(5000)),
    "new-segment": lambda store: store.put("new", torch.ones(5000)),
    "segment-gone": lambda store: store.delete("segment"),
    "segment-to-inline": lambda store: store.put("segment", 2),
}


def build(root: str, change: Change) -> dict[str, object]:
    """A store, changed once. Returns what is in it, as it was put last."""
    with memstore.open(root, checksum=True) as store:
        store.put("inline", 1)
        store.put("segment", torch.zeros(5000))
        store.put("other", torch.full((3000,), 7))
        change(store)
        return {key: store.get(key) for key in store}


def is_refused(root: str, mode: str) -> bool:
    try:
        memstore.open(root, mode).close()  # type: ignore[arg-type]
    except memstore.CorruptionError as error:
        assert error.path == f"{root}/{CATALOG}" and "memstore.repair" in error.detail, error
        return True
    return False


def check_repaired(root: str, last: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    """Values that have files are as they were put last. Those in the catalog may be old, which is told."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "memstore"):
        report = memstore.repair(root)
    with memstore.open(root, verify=True) as store:
        assert store.verify().ok
        old = {key for key in store if key not in last or not is_same(last[key], store.get(key))}
        assert old <= {"inline"}, (old, report)
        assert {key for key in last if torch.is_tensor(last[key])} <= set(store), report
        told = "\n".join(caplog.messages)
        assert not old or ("older" in told and repr("inline") in told), told
        assert set(last) <= {*store, *report.lost} or "nobody can say which" in told
        assert store.put("inline", 3) > 1 << 32


@pytest.mark.parametrize("lock", [pytest.param("kept", marks=pytest.mark.full), "lost"])
@pytest.mark.parametrize("name", one_in(3, CHANGES))
def test_the_state_before(scratch: str, name: str, lock: str, caplog: pytest.LogCaptureFixture) -> None:
    """The newest page of the two that start one is flipped, so that LMDB takes the other.

    Where the lock page is lost as well, it is these pages alone that tell.
    """
    last = build(f"{scratch}0", CHANGES[name])
    states = [state_of(f"{scratch}0", page) for page in (0, 1)]
    newest = states.index(max(states))
    copy(f"{scratch}0", scratch)
    flip(f"{scratch}/{CATALOG}", 8 * (newest * PAGE + STATE_AT) + max(states).bit_length() - 1)
    if lock == "lost":
        overwrite(f"{scratch}/lock", 0, bytes(PAGE))
    files = files_of(scratch)
    assert all(is_refused(scratch, mode) for mode in ("r+", "a", "r"))
    assert files_of(scratch) == files
    check_repaired(scratch, last, caplog)


def state_of(root: str, page: int) -> int:
    with open(f"{root}/{CATALOG}", "rb") as file:
        return struct.unpack_from("<Q", file.read(2 * PAGE), page * PAGE + STATE_AT)[0]


@pytest.mark.parametrize("name", one_in(3, CHANGES))
def test_an_older_copy(scratch: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    last = build(scratch, lambda store: older_copy(store, CHANGES[name]))
    shutil.copyfile(f"{scratch}.old", f"{scratch}/{CATALOG}")
    os.unlink(f"{scratch}.old")
    files = files_of(scratch)
    assert all(is_refused(scratch, mode) for mode in ("r", "r+", "a"))
    assert files_of(scratch) == files
    check_repaired(scratch, last, caplog)


def older_copy(store: memstore.Store, change: Change) -> None:
    """Nothing changes the store while it is copied."""
    shutil.copyfile(f"{store.root}/{CATALOG}", f"{store.root}.old")
    change(store)


@pytest.mark.parametrize("boot", ["same", "another"])
def test_an_older_copy_with_its_lock_page(
    scratch: str, boot: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The lock page says nothing: it is as old. But files that may be swept say what the catalog can't know."""
    with memstore.open(scratch, checksum=True) as store:
        store.put("inline", 1)
        for number in range(4):
            store.put("segment", torch.full((5000,), number))
        for name in (CATALOG, "lock"):
            shutil.copyfile(f"{scratch}/{name}", f"{scratch}.{os.path.basename(name)}")
        for number in range(9):  # some in files that were retired, some in new ones
            store.put(f"{number % 3}", torch.full((5000,), number))
        last: dict[str, object] = {key: store.get(key) for key in store}
    for name in (CATALOG, "lock"):
        shutil.move(f"{scratch}.{os.path.basename(name)}", f"{scratch}.moved")
        with open(f"{scratch}.moved", "rb") as file:
            overwrite(f"{scratch}/{name}", 0, file.read())
        os.unlink(f"{scratch}.moved")
    if boot == "another":
        reboot(monkeypatch, tmp_path)
    files = files_of(scratch)
    assert is_refused(scratch, "r+") and is_refused(scratch, "a")
    assert files_of(scratch) == files
    check_repaired(scratch, last, caplog)


def reboot(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    boot = uuid.uuid4()
    (folder / f"boot-{boot}").write_text(f"{boot}\n")
    monkeypatch.setattr(syscalls, "BOOT_ID", str(folder / f"boot-{boot}"))


def test_no_sweep_unlinks_what_the_catalog_cant_know(scratch: str) -> None:
    """Where no opening has looked at it."""
    with memstore.open(scratch) as store:
        store.put("key", torch.zeros(5000))
        (path,) = store.info("key").files
        store.put("key", torch.ones(5000))
        with open(path, "r+b") as file:
            write_slots(file.fileno(), HeaderSlots(999, LIVE, 999, 999, 1))
        with pytest.raises(memstore.CorruptionError, match="999"):
            store.gc()
        assert os.path.exists(path)


def test_a_value_whose_file_says_that_it_was_replaced(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put("key", torch.ones(5000))
        (path,) = store.info("key").files
        fd = os.open(path, os.O_RDWR)
        write_state(fd, RETIRED)
        os.close(fd)
        for mode in ("r+", "r"):
            with memstore.open(scratch, mode) as other, pytest.raises(memstore.CorruptionError) as caught:  # type: ignore[arg-type]
                other.get("key")
            assert (caught.value.key, caught.value.path) == ("key", path)
            del caught  # its traceback keeps the store open
        assert [error.key for error in store.verify().damaged] == ["key"]
    memstore.repair(scratch)
    with memstore.open(scratch) as store:
        assert (store.get("key") == 1).all()


def test_verify_reports_it(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put("key", 1)
        root_of(store).mutex.notes.publications_rung += 1
        (error,) = store.verify().damaged
        assert error.path == f"{scratch}/{CATALOG}" and "older" in error.detail


# --- no false alarms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("where", ["copy", "boot"])
def test_a_kill_at_any_step_is_no_reason_to_refuse(
    scratch: str, where: str, stride: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the lock page is another's by then: the store was copied, or the machine was booted."""
    with memstore.open(f"{scratch}0", checksum=True) as store:
        for number in range(3):
            store.put("key", torch.full((5000,), number))
        store.put("inline", 1)
    copy(f"{scratch}0", scratch)
    steps = in_child(steps_of, scratch)
    assert faults.COMMIT in steps
    for half in range(0, 2 * len(steps), stride):
        number, after = half // 2 + 1, half % 2 == 1
        copy(f"{scratch}0", scratch)
        with pytest.raises(RuntimeError, match="exit code -9"):
            in_child(put_and_die, scratch, number, after)
        if where == "copy":
            os.rename(scratch, f"{scratch}1")
            copy(f"{scratch}1", scratch)
            shutil.rmtree(f"{scratch}1")
        else:
            reboot(monkeypatch, tmp_path)
        for mode in ("r", "r+"):
            with memstore.open(scratch, mode) as store:  # type: ignore[arg-type]
                assert store.get("key")[0] in (2, 3), (number, steps[number - 1])


def steps_of(root: str) -> list[str]:
    with memstore.open(root) as store:
        return faults.record(lambda: store.put("key", torch.full((5000,), 3)))


def put_and_die(root: str, number: int, after: bool) -> None:
    with memstore.open(root) as store, faults.at_step(number, faults.die, after=after):
        store.put("key", torch.full((5000,), 3))


def test_a_backup_that_took_the_place_of_the_folder(scratch: str) -> None:
    build(scratch, CHANGES["segment"])
    copy(scratch, f"{scratch}.backup")
    with memstore.open(scratch) as store:
        store.put("segment", torch.zeros(5000))
        store.put("inline", 7)
    copy(f"{scratch}.backup", scratch)
    with memstore.open(scratch) as store:
        assert store.get("inline") == 1 and store.get("segment").sum() == 5000
        store.put("segment", torch.zeros(5000))
        assert store.verify().ok


def test_a_lock_page_of_nobody_says_nothing(scratch: str) -> None:
    build(scratch, CHANGES["segment"])
    overwrite(f"{scratch}/lock", 0, b"\xff" * PAGE)
    with memstore.open(scratch) as store:
        assert store.verify().ok


def test_who_may_only_read_the_lock_page_reads_the_same(scratch: str) -> None:
    with memstore.open(scratch) as store:
        for number in range(3):
            store.put("key", number)
            assert publications_rung(f"{scratch}/lock") == root_of(store).mutex.notes.publications_rung > number


# --- every bit of the pages that start it -----------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [997, pytest.param(7, marks=[pytest.mark.full, pytest.mark.timeout(3000)])])
def test_flips_of_the_pages_that_start_it(scratch: str, stride: int, caplog: pytest.LogCaptureFixture) -> None:
    """While nobody has it open. LMDB may end who opens it then; but it never gives an older value."""
    last = build(f"{scratch}0", lambda store: (CHANGES["inline"](store), CHANGES["segment"](store)))
    for bit in range(0, 2 * 8 * META_SIZE, stride):
        page, rest = divmod(bit, 8 * META_SIZE)
        copy(f"{scratch}0", scratch)
        flip(f"{scratch}/{CATALOG}", 8 * page * PAGE + rest)
        try:
            in_child(read_whats_last, scratch, last)
        except RuntimeError as error:
            assert "exit code -" in str(error), (bit, error)
        check_repaired(scratch, last, caplog)


def read_whats_last(root: str, last: dict[str, object]) -> None:
    try:
        with memstore.open(root, verify=True, timeout=5.0) as store:
            for key, value in last.items():
                try:
                    assert is_same(value, store.get(key)), key
                except memstore.CorruptionError:
                    continue
    except memstore.CorruptionError:
        pass
