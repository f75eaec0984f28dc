"""The sweep: what nobody holds goes, whatever stands in front of it."""

from __future__ import annotations

import os

from memstore.engine.claim import abandon, claim
from memstore.engine.lookup import hold
from memstore.engine.pages import deadline_after
from memstore.engine.reuse import size_class
from memstore.engine.sweep import sweep_all
from tests.children import Child, Wire
from tests.engine.bytes_store import opened, put


def _claim_and_stay(wire: Wire, path: str) -> None:
    with opened(path) as root:
        claimed = [claim(root, b"dead", 4096, 5000, 0, deadline_after(10)) for _ in range(3)]
        wire.send(len(claimed))
        wire.receive()


def test_files_that_the_living_fill_hide_none_of_the_dead(root: str) -> None:
    with opened(root) as opened_root:
        fillings = [claim(opened_root, b"live", 4096, 5000, 0, deadline_after(10)) for _ in range(100)]
        with Child(_claim_and_stay, root) as dead:
            dead.receive()  # and is killed
        assert sweep_all(opened_root, deadline_after(10)) == 3 * (4096 + size_class(5000))
        assert {os.path.basename(filling.path) for filling in fillings} == set(os.listdir(f"{root}/segments"))
        abandon(opened_root, fillings)
        for filling in fillings:
            filling.close()


def test_puts_give_back_what_the_dead_filled(root: str) -> None:
    """At once: this process has not looked yet; later looks are a second apart."""
    with opened(root) as opened_root:
        with Child(_claim_and_stay, root) as dead:
            dead.receive()  # and is killed
        for number in range(2):
            put(opened_root, b"key", b"%d" % number * 5000)
        assert len(os.listdir(f"{root}/segments")) == 2
        with opened_root.guard:
            assert opened_root.catalog.view(lambda transaction: transaction.counters()).filling == 0


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
