"""Each step of a sharded put fails or is interrupted, the disk is full, the machine is booted: one version, or none."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import lmdb
import pytest
import torch

import memstore
from memstore._wording import size
from tests.children import in_child
from tests.crash.leftovers import held_locks, left_after_gc, open_fds, shared_mappings
from tests.crash.shards import KEY, NEW, OLD, SCENES, put, put_all, shard, stamp_at
from tests.crash.test_failures_at_steps import CAN_FAIL
from tests.crash.test_sharded import answer, check_and_go_on
from tests.damage.stores import copy
from tests.damage.test_age import reboot
from tests.inside import root_of
from tests.small_tmpfs import fill, on_small_tmpfs
from tests.support import faults

FAILURES = {
    "EIO": OSError(errno.EIO, os.strerror(errno.EIO)),
    "EMFILE": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "ENOSPC": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "interrupt": KeyboardInterrupt(),
}
NOT_TO_BE_ENDED = {"abort", "expire"}  # they end what others have begun


pytestmark = pytest.mark.usefixtures("no_collections")


@pytest.mark.parametrize(
    ("name", "stride"),
    [*((name, 7) for name in SCENES), *(pytest.param(name, 1, marks=pytest.mark.full) for name in SCENES)],
)
def test_failures_at_each_step(name: str, stride: int, store: memstore.Store) -> None:
    """What raised is never published later, by nobody; unless it says that it doesn't know."""
    scene = SCENES[name]
    put_all(store, OLD, "the first one of the store")
    scene.reset(store, name)
    names = faults.record(lambda: scene.run(store, name), names=CAN_FAIL)
    check_and_go_on(store, scene, name, 0, name)
    cases = [(number, what) for number in range(1, len(names) + 1) for what in [*FAILURES, "interrupt after"]]
    raised_at_all = 0
    for number, failure in cases[stride // 2 :: stride]:
        step, attempt = names[number - 1], f"{name} {number} {failure}"
        what = f"{name}, {failure} at step {number} of {names}: {step}"
        before = scene.reset(store, attempt)
        fds = open_fds(but_ahead=store)
        raised = _fail(store, name, attempt, number, failure, step)
        assert held_locks(store) == [], what
        assert open_fds(but_ahead=store) == fds, what
        assert shared_mappings(store) == [], what
        found = check_and_go_on(store, scene, attempt, before, what)
        raised_at_all += raised is not None
        if name not in NOT_TO_BE_ENDED and raised is not None and not isinstance(raised, memstore.UnknownOutcomeError):
            # an interrupt may come when all is done
            assert found == "ended" or isinstance(raised, KeyboardInterrupt), f"{what}: it raised {raised!r}"
    assert raised_at_all, "nothing failed: this tests nothing"


def _fail(store: memstore.Store, name: str, attempt: str, number: int, failure: str, step: str) -> BaseException | None:
    error = FAILURES[failure.split()[0]]
    if step == faults.COMMIT and isinstance(error, OSError):
        error = lmdb.DiskError("injected") if error.errno == errno.ENOSPC else lmdb.Error("injected")
    try:
        with faults.at_step(number, faults.raising(error), after=failure.endswith("after"), names=CAN_FAIL):
            SCENES[name].run(store, attempt)
    except (OSError, memstore.MemstoreError, KeyboardInterrupt) as raised:
        raised = raised.with_traceback(None)
        raised.__context__ = raised.__cause__ = None
        return raised
    return None


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_attempt_for_all_ranks() -> None:
    on_small_tmpfs(24, _fill_up_for_a_part)


def _fill_up_for_a_part(folder: str) -> None:
    with memstore.open(f"{folder}/store") as store:
        put_all(store, OLD, "old")
        first = put(store, 0, NEW, "first")
        ballast = fill(folder, 1 << 20)
        big = shard(1, NEW, elements=1 << 18)
        with pytest.raises(memstore.StoreFullError, match="in sharded puts that wait"):
            store.put_sharded(KEY, big, attempt="first", rank=1, world_size=2)
        with pytest.raises(memstore.PartialCommitError, match="rank 1 failed: StoreFullError"):
            first.wait(5.0)
        assert stamp_at(store) == OLD and store.pending() == ()
        fill(folder)
        with pytest.raises(memstore.StoreFullError):
            store.put_sharded(KEY, big, attempt="without room", rank=0, world_size=2, wait=False)
        assert stamp_at(store) == OLD and store.pending() == ()
        os.unlink(ballast)
        assert put_all(store, NEW, "second") == store.version(KEY)
        assert stamp_at(store) == NEW
        assert left_after_gc(store) == []


def test_parts_that_are_there_are_published_on_a_full_disk() -> None:
    on_small_tmpfs(24, _fill_up_for_a_publication)


def _fill_up_for_a_publication(folder: str) -> None:
    with memstore.open(f"{folder}/store") as store:
        store.put("spare", torch.zeros(700 * 4))
        put(store, 0, NEW, "first")
        other = put(store, 0, NEW, "to be given up", key="other")
        store.delete("spare")
        fill(folder)
        with pytest.raises(memstore.StoreFullError):
            store.put("too large", torch.zeros(1 << 20))
        other.abort()
        assert put(store, 1, NEW, "first", wait=True, timeout=5.0) == store.version(KEY)
        assert stamp_at(store) == NEW
        assert left_after_gc(store) == []


def test_a_full_store_says_what_waits(root: str) -> None:
    with memstore.open(root, capacity=256 << 10) as store:
        first = put(store, 0, NEW, "first")
        assert store.stats().pending_bytes > 0
        with pytest.raises(
            memstore.StoreFullError, match=f"{size(store.stats().pending_bytes)} in sharded puts that wait"
        ):
            store.put("plain", torch.zeros(58_000))
        first.abort()
        assert store.stats().pending_bytes == 0
        store.put("plain", torch.zeros(1 << 15))


# --- a reboot ---------------------------------------------------------------------------------------------------------


def test_after_a_reboot_an_attempt_begins_anew(scratch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under the same name too: neither parts nor outcomes of another boot count."""
    with memstore.open(scratch) as store:
        put_all(store, OLD, "published")
        put(store, 0, 100, "pending")
        put(store, 0, 100, "given up").abort()
    reboot(monkeypatch, tmp_path)
    with memstore.open(scratch, "r") as store:
        assert stamp_at(store) == OLD
    with memstore.open(scratch) as store:
        assert store.pending() == () and stamp_at(store) == OLD
        assert left_after_gc(store) == []
        for number, attempt in enumerate(("pending", "given up", "published"), NEW):
            first = put(store, 0, number, attempt)
            assert not first.done() and [one.ranks for one in store.pending()] == [(0,)]
            assert put(store, 1, number, attempt).wait(5.0) == first.wait(5.0) == store.version(KEY)
            assert stamp_at(store) == number
        assert left_after_gc(store) == []


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("where", ["copy", "boot"])
def test_a_kill_at_any_step_before_a_reboot_or_a_copy(
    scratch: str, where: str, stride: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The lock page is written anew, and has lost the note of what was being published."""
    _put_the_first(scratch)
    steps = in_child(_steps_of_the_last, scratch)
    published = 0
    for half in range(stride - 1, 2 * len(steps), stride):
        number, after = half // 2 + 1, half % 2 == 1
        what = f"killed {'after' if after else 'before'} step {number} of {steps}: {steps[number - 1]}"
        _put_the_first(scratch)
        with pytest.raises(RuntimeError, match="exit code -9"):
            in_child(_die_as_the_last, scratch, number, after)
        if where == "copy":
            os.rename(scratch, f"{scratch}1")
            copy(f"{scratch}1", scratch)
            shutil.rmtree(f"{scratch}1")
        else:
            reboot(monkeypatch, tmp_path)
        with memstore.open(scratch, "r") as store:
            assert stamp_at(store) in (OLD, NEW), what
        with memstore.open(scratch) as store:
            is_published = stamp_at(store) == NEW
            published += is_published
            if where == "boot":
                assert store.pending() == (), what
                put(store, 0, NEW, "first")
            assert isinstance(answer(store, 1, "first"), int) or is_published, what
            assert put_all(store, NEW + 1, "second") == store.version(KEY), what
            assert stamp_at(store) == NEW + 1, what
            for one in store.pending():
                assert store.abort(one.key, one.attempt)
            assert left_after_gc(store) == [], what
            assert store.verify().ok, what
    assert published, "it was never published: this tests nothing"


def _put_the_first(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with memstore.open(path) as store:
        put_all(store, OLD, "old")
        put(store, 0, NEW, "first")


def _steps_of_the_last(path: str) -> list[str]:
    with memstore.open(path) as store:
        return faults.record(lambda: put(store, 1, NEW, "first"))


def _die_as_the_last(path: str, number: int, after: bool) -> None:
    with memstore.open(path) as store, faults.at_step(number, faults.die, after=after):
        put(store, 1, NEW, "first")


def test_a_rolled_back_catalog_is_refused_where_parts_of_another_boot_are_dropped(
    scratch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To drop them counts as a publication, which must not stand for one that was lost."""
    with memstore.open(scratch) as store:
        put_all(store, OLD, "old")
        put(store, 0, NEW, "first")
        root_of(store).mutex.notes.publications_rung += 1
    reboot(monkeypatch, tmp_path)
    with pytest.raises(memstore.CorruptionError, match="memstore.repair"):
        memstore.open(scratch)
