"""What the log says: of openings, whether something was recovered; at the level DEBUG, of puts, gets, waits and gc."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import memstore
import memstore.aio
from memstore.engine import syscalls
from tests.children import Wire, children, in_child
from tests.support import faults

pytestmark = pytest.mark.embedded

# --- what the log says of an opening ----------------------------------------------------------------------------------

BOOT_AT, NAMESPACE_AT = syscalls.MUTEX_SIZE + 8, syscalls.MUTEX_SIZE + 40  # in the lock page


def _log_of(action: Callable[[], object]) -> list[str]:
    """What memstore logs meanwhile, without the path that comes first."""
    log, lines, level = logging.getLogger("memstore"), list[str](), logging.getLogger("memstore").level
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage().partition(": ")[2])
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        action()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return lines


def _log_of_a_store(root: str, action: Callable[[memstore.Store], object]) -> list[str]:
    """As `_log_of`, of a store that is opened meanwhile: it asks then whether its gets and waits are logged."""

    def use() -> None:
        with memstore.open(root) as store:
            action(store)

    return _log_of(use)


def _of_openings(action: Callable[[], object]) -> list[str]:
    """Those that say in which state a store was found."""
    return [line for line in _log_of(action) if re.search("recovered|for the first time|anew", line)]


def _use(root: str, mode: str = "a") -> None:
    with memstore.open(root, mode) as store:
        store.put("key", torch.ones(5000))
    gc.collect()  # the lock page is in use as long as it is mapped


def _overwrite(root: str, at: int) -> None:
    with open(f"{root}/lock", "r+b") as file:
        file.seek(at)
        file.write(b"another!")


def _copy(root: str) -> None:
    shutil.copytree(root, f"{root}.copy")
    os.rename(root, f"{root}.old")
    os.rename(f"{root}.copy", root)


def _repair(root: str) -> None:
    memstore.repair(root)


OPENINGS: dict[str, tuple[Callable[[str], object], str | None]] = {
    "as it was": (lambda root: None, None),
    "begun anew": (lambda root: _use(root, "w"), None),
    "destroyed": (lambda root: memstore.destroy(root), None),
    "repaired": (_repair, None),
    "moved": (lambda root: (os.rename(root, f"{root}2"), os.rename(f"{root}2", root)), None),
    "copied": (_copy, "the store was copied or moved here, and is opened for the first time"),
    "another boot": (
        lambda root: _overwrite(root, BOOT_AT),
        "the store is opened for the first time since this host started",
    ),
    "another pid namespace": (
        lambda root: _overwrite(root, NAMESPACE_AT),
        "the store is opened for the first time in this pid namespace",
    ),
    "damaged page": (lambda root: _overwrite(root, BOOT_AT - 8), "the page was damaged, and is written anew"),
}


def test_a_new_store_has_recovered_from_nothing(scratch: str) -> None:
    assert _of_openings(lambda: _use(scratch)) == []


@pytest.mark.parametrize("name", OPENINGS)
def test_no_recovery_is_told_where_no_process_died(scratch: str, name: str) -> None:
    change, words = OPENINGS[name]
    _use(scratch)
    assert _of_openings(lambda: change(scratch)) == []
    assert _of_openings(lambda: _use(scratch)) == ([words] if words else [])
    assert _of_openings(lambda: _use(scratch)) == []


def test_who_creates_it_at_the_same_time_recovers_from_nothing(scratch: str) -> None:
    with children(4, _create_and_log, scratch) as creators:
        assert [child.receive() for child in creators] == [[]] * 4


def _create_and_log(_: Wire, number: int, root: str) -> list[str]:
    return _of_openings(lambda: _use(root))


def test_a_recovery_says_whether_a_process_died_or_a_call_failed(scratch: str) -> None:
    _use(scratch)
    with pytest.raises(RuntimeError, match="exit code -9"):
        in_child(_die_before_publication, scratch)
    assert _of_openings(lambda: _use(scratch)) == ["recovered after a process died while it held the store's mutex"]
    failed = ["recovered after a call failed while it held the store's mutex"]
    assert _of_openings(lambda: _fail_before_publication(scratch)) == failed


def _fail_before_publication(root: str) -> None:
    failing = faults.at_step(2, faults.raising(OSError("no")), names=frozenset({faults.COMMIT}))
    with memstore.open(root) as store, failing, pytest.raises(OSError, match="no"):
        store.put("key", torch.zeros(5000))


def _die_before_publication(root: str) -> None:
    with memstore.open(root) as store, faults.at_step(2, faults.die, names=frozenset({faults.COMMIT})):
        store.put("key", torch.zeros(5000))


# --- what each call does ----------------------------------------------------------------------------------------------

MS = r"\d+\.\d{3} ms"


def test_puts_say_what_they_wrote_and_where(root: str) -> None:
    with memstore.open(root) as store:
        first = _log_of(lambda: store.put("key", torch.zeros(20_000)))
        assert len(first) == 1
        assert re.fullmatch(rf"put 'key': version 1, 80000 bytes in a new file, put 0x\w+, {MS}", first[0])
        store.put("key", torch.zeros(20_000))
        store.put("key", torch.zeros(20_000))
        again = _log_of(lambda: store.put("key", torch.zeros(20_000)))
        assert re.fullmatch(
            rf"put 'key': version 4, 80000 bytes in a file that is used again, put 0x\w+, {MS}", again[0]
        )
        inline = _log_of(lambda: store.put("small", torch.zeros(10)))
        assert re.fullmatch(rf"put 'small': version 5, 40 bytes in the catalog, {MS}", inline[0])
        several = _log_of(lambda: store.put_many({"a": torch.zeros(5000), "b": torch.zeros(2), "c": torch.zeros(5000)}))
        assert [line.split(",")[0].split(":")[0] for line in several] == ["put 'a'", "put 'b'", "put 'c'"]
        assert len({re.findall(MS, line)[0] for line in several}) == 1  # the time of all


GETS: dict[str, tuple[Callable[[memstore.Store], object], str]] = {
    "get": (lambda store: store.get("key"), "get"),
    "get(out=)": (lambda store: store.get("key", out=torch.empty(20_000)), "get"),
    "get_many": (lambda store: store.get_many(["key"]), "get"),
    "Ref.get": (lambda store: store.ref("key").get(), "get"),
    "view": (lambda store: store.view("key"), "view"),
}


@pytest.mark.parametrize("name", GETS)
def test_gets_say_which_version_they_got(root: str, name: str) -> None:
    call, word = GETS[name]
    with memstore.open(root) as store:
        version = store.put("key", torch.zeros(20_000))
    (line,) = _log_of_a_store(root, call)
    assert re.fullmatch(rf"{word} 'key': version {version} of put 0x\w+, 80000 bytes in its file, {MS}", line)


def test_a_wait_says_what_it_waited_for_and_how_long(root: str) -> None:
    with memstore.open(root) as store:
        version = store.put("key", 1)
    for wait in (lambda store: store.wait("key"), lambda store: store.wait_any(["other", "key"])):
        (line,) = _log_of_a_store(root, wait)
        assert re.fullmatch(rf"wait 'key': version {version}, {MS}", line)
    assert _log_of_a_store(root, _wait_in_vain) == []


def _wait_in_vain(store: memstore.Store) -> None:
    with pytest.raises(memstore.StoreTimeoutError):
        store.wait("nothing", timeout=0)


def test_gc_says_what_it_gave_back(root: str) -> None:
    with memstore.open(root) as store:
        for _ in range(3):
            store.put("key", torch.zeros(20_000))
        store.delete("key")
        size = sum(entry.stat().st_size for entry in os.scandir(f"{root}/segments"))
        swept, line = _log_of(store.gc)
        assert re.fullmatch(rf"swept {size} bytes of files that nobody holds, {MS}", swept)
        assert re.fullmatch(rf"gc: {size} bytes were given back, {MS}", line)


def test_ranks_say_the_version_that_they_put_together(root: str) -> None:
    def put(store: memstore.Store) -> None:
        for rank in range(2):
            part = {"x": memstore.TensorShard(torch.zeros(5), (10,), (5 * rank,))}
            store.put_sharded("key", part, attempt="step 1", rank=rank, world_size=2, wait=bool(rank))

    with memstore.open(root) as store:
        lines = _log_of(lambda: put(store))
        assert f"put 'key': version {store.version('key')} of all ranks, attempt 'step 1'" in lines


def test_tasks_say_the_same(root: str) -> None:
    async def use() -> None:
        async with memstore.aio.open(root) as store:
            await store.put("key", torch.zeros(20_000))
            await store.get("key")
            await store.get("key")  # at once, without a thread
            await store.wait("key")
            await store.wait_any(["key"])
            await store.gc()

    words = [line.split()[0].rstrip(":") for line in _log_of(lambda: asyncio.run(use()))]
    assert words == ["put", "get", "get", "wait", "wait", "gc"]


def test_nothing_is_said_where_nobody_asked(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memstore"), memstore.open(root) as store:
        store.put("key", torch.zeros(20_000))
        store.get("key")
        store.wait("key")
        store.gc()
    assert not caplog.records


def test_the_environment_switches_it_on(root: str) -> None:
    memstore.open(root).close()
    environment = {**os.environ, "MEMSTORE_LOG_LEVEL": "debug"}
    command = [sys.executable, "-m", "memstore", "gc", root]  # which imports no torch
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert re.search(rf"DEBUG {root}: gc: 0 bytes were given back, {MS}", done.stderr)
