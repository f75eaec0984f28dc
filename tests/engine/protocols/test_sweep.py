"""The sweep: what nobody holds goes, whatever stands in front of it."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from memstore.engine import syscalls
from memstore.engine.format.headers import Header
from memstore.engine.protocols.get import hold
from memstore.engine.protocols.put import claim, park
from memstore.engine.protocols.reuse import lease_segments
from memstore.engine.protocols.sweep import abandon, sweep_all
from memstore.engine.root.roots import Root
from memstore.engine.root.storage import size_class
from memstore.engine.sync.primitives import deadline_after
from tests.children import Child, Wire
from tests.engine.bytes_store import delete, opened, put


def _claim_and_stay(wire: Wire, path: str) -> None:
    with opened(path) as root:
        claimed = [claim(root, b"dead", 4096, 5000, 0, deadline_after(10)) for _ in range(3)]
        wire.send(len(claimed))
        wire.receive()


def test_files_that_the_living_fill_hide_none_of_the_dead(root: str) -> None:
    with opened(root) as opened_root:
        writers = [claim(opened_root, b"live", 4096, 5000, 0, deadline_after(10)) for _ in range(100)]
        with Child(_claim_and_stay, root) as dead:
            dead.receive()  # and is killed
        assert sweep_all(opened_root, deadline_after(10)) == 3 * (4096 + size_class(5000))
        assert {os.path.basename(writer.file.path) for writer in writers} == set(os.listdir(f"{root}/segments"))
        abandon(opened_root, writers)
        for writer in writers:
            writer.close()


def test_puts_give_back_what_the_dead_filled(root: str) -> None:
    """At once: this process has not looked yet; later looks are a second apart."""
    with opened(root) as opened_root:
        with Child(_claim_and_stay, root) as dead:
            dead.receive()  # and is killed
        for number in range(2):
            put(opened_root, b"key", b"%d" % number * 5000)
        assert len(os.listdir(f"{root}/segments")) == 2
        assert opened_root.next_put.file is not None  # the other one is this process's next
        with opened_root.guard:
            counters = opened_root.catalog.view(lambda transaction: transaction.counters())
            assert (counters.filling, counters.retired) == (opened_root.next_put.file.size, 0)


def test_versions_that_are_held_hide_none_that_are_not(root: str) -> None:
    with opened(root) as opened_root:
        with Child(_hold_all, root, 100) as holder:
            holder.receive()
            for number in range(101):
                put(opened_root, b"%d" % number, b"new" * 2000)
            sweep_all(opened_root, deadline_after(10))
            assert len(os.listdir(f"{root}/segments")) == 201  # the one that nobody holds, retired last, is gone
        sweep_all(opened_root, deadline_after(10))
        assert len(os.listdir(f"{root}/segments")) == 101


def _hold_all(wire: Wire, path: str, count: int) -> None:
    with opened(path) as root:
        names = [b"%d" % number for number in range(count)]
        for name in [*names, b"%d" % count]:
            put(root, name, b"old" * 2000)
        held = hold(root, names, deadline_after(10), may_lock=True)
        wire.send(len(held))
        wire.receive()


def _blocks(fds: list[int]) -> list[int]:
    return [os.fstat(fd).st_blocks for fd in fds if os.fstat(fd).st_nlink == 0]


@contextmanager
def _looked_at(root: Root) -> Iterator[list[int]]:
    """File descriptors of all segments: they tell of a file that is unlinked whether its memory went."""
    fds = [os.open(f"{root.segments}/{name}", os.O_RDONLY) for name in os.listdir(root.segments)]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def test_a_sweep_that_fails_gives_back_the_memory_of_what_it_unlinked(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have it mapped; and no later sweep would find it."""
    with opened(root) as opened_root:
        put(opened_root, b"large", b"x" * 1_000_000)  # so that retired files may stay
        for name in (b"a", b"b", b"c"):
            put(opened_root, name, b"x" * 100_000)
        for name in (b"a", b"b", b"c"):
            delete(opened_root, name)
        open_into, calls = syscalls.open_into, itertools.count()

        def failing(*arguments: Any) -> None:
            if next(calls) == 2:
                raise OSError(errno.EMFILE, "too many open files")
            open_into(*arguments)

        with _looked_at(opened_root) as fds:
            monkeypatch.setattr(syscalls, "open_into", failing)
            with pytest.raises(OSError, match="too many open files"):
                sweep_all(opened_root, deadline_after(10))
            assert _blocks(fds) == [0, 0]
            sweep_all(opened_root, deadline_after(10))
            assert _blocks(fds) == [0, 0, 0]


def test_parked_files_that_are_abandoned_give_their_memory_back(root: str) -> None:
    with opened(root) as opened_root:
        header = Header("key", opened_root.settings.store, b"bytes", b"", b"")
        writer = claim(opened_root, b"key", header.nbytes, 100_000, 0, deadline_after(10))
        writer.allocate(header, 100_000, opened_root.guard, on_tmpfs=False)
        writer.seal(None, durable=False)
        park(opened_root, writer, deadline_after(10))
        with _looked_at(opened_root) as fds:
            assert os.fstat(fds[0]).st_blocks
            abandon(opened_root, [writer])
            assert _blocks(fds) == [0]
        writer.close()


def test_new_keys_too_use_and_give_back_what_was_held(root: str) -> None:
    data = b"x" * 100_000
    with opened(root) as opened_root:
        with Child(_hold_versions, root, 40) as holder:
            holder.receive()
        number, deadline = 0, time.monotonic() + 20
        while _retired_and_held(opened_root) > 2:
            assert time.monotonic() < deadline
            number += 1
            put(opened_root, b"new %d" % number, data)


def _hold_versions(wire: Wire, path: str, count: int) -> None:
    with opened(path) as root:
        held = []
        for _ in range(count):
            put(root, b"key", b"x" * 100_000)
            held.append(hold(root, [b"key"], deadline_after(10), may_lock=True))
        wire.send(len(held))
        wire.receive()


def _retired_and_held(root: Root) -> int:
    with root.guard:
        return root.catalog.view(lambda t: t.count("retired") + t.count("held"))


def test_an_abandoned_file_takes_its_lease_along(root: str) -> None:
    with opened(root) as opened_root:
        put(opened_root, b"key", b"x" * 100_000)
        (record,) = (found.record for found in hold(opened_root, [b"key"], deadline_after(10), may_lock=True) if found)
        assert lease_segments(opened_root, record.segments, deadline_after(10), seconds=0.0)
        del record
        delete(opened_root, b"key")
        writer = claim(opened_root, b"key", 4096, 100_000, 0, deadline_after(10))
        assert writer.segment == 1
        abandon(opened_root, [writer])
        writer.close()
        with opened_root.guard:
            assert opened_root.catalog.view(lambda transaction: transaction.count("leases")) == 0
