"""The dict that a store is compared with, the two openings of the store, and the rules that all such models have."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import memstore
from tests.crash.leftovers import end_leases, leftovers
from tests.leaks import find_leaks
from tests.store.two_stores import Named, OtherSide, Side

SIDES = st.sampled_from([0, 1])


class Model(RuleBasedStateMachine):
    @initialize(checksum=st.booleans(), inline_limit=st.sampled_from([0, 1536]))
    def create(self, checksum: bool, inline_limit: int) -> None:
        shm = Path("/dev/shm")
        self.parent = tempfile.mkdtemp(dir=shm if os.access(shm, os.W_OK) else None, prefix="memstore-test-")
        self.path = f"{self.parent}/store"
        self.options: dict[str, Any] = {"checksum": checksum, "inline_limit": inline_limit}
        self.options |= {"verify": checksum, "timeout": 10.0}
        self.here = Side(self.path, self.options)
        self.there = OtherSide(self.path, self.options)
        self.model: dict[str, tuple[Named, int]] = {}
        self.sent: list[tuple[bytes, Named]] = []  # refs, pickled
        self.highest = self.holds = self.attempts = 0
        self.is_full = False

    def side(self, number: int) -> Any:
        return self.there if number else self.here

    def version(self, key: str) -> int:
        return self.model[key][1] if key in self.model else 0

    def note(self, items: dict[str, Named], versions: dict[str, int]) -> None:
        assert items.keys() == versions.keys()
        for key, version in versions.items():
            assert version > self.highest
            self.highest, self.model[key] = version, (items[key], version)

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            self.model.pop(key, None)

    def put_one(self, put: Callable[[str, Named], int], key: str, value: Named) -> None:
        try:
            version = put(key, value)
        except memstore.StoreFullError:
            event("no room for a put")
            assert self.is_full
        else:
            self.note({key: value}, {key: version})

    def replace_the_dead(self, error: RuntimeError) -> None:
        """The other process died: another one takes its place."""
        assert "exit code -9" in str(error)
        self.here.delete("a key that never is")  # a commit that was cut short is seen after the next one
        self.there.close()
        self.there = OtherSide(self.path, self.options)

    @rule(side=SIDES, spare=st.sampled_from([0, 10_000, 100_000, 3 << 20]))
    def fill_up(self, side: int, spare: int) -> None:
        self.side(side).limit(spare)
        self.is_full = True

    @precondition(lambda self: self.is_full)
    @rule(side=SIDES)
    def make_room(self, side: int) -> None:
        self.side(side).limit(None)
        self.is_full = False

    @rule(side=SIDES)
    def collect(self, side: int) -> None:
        self.side(side).collect()

    @invariant()
    def all_are_the_same(self) -> None:
        if hasattr(self, "there"):
            self.here.check(self.model)
            self.there.check(self.model)

    def teardown(self) -> None:
        if not hasattr(self, "there"):
            return
        try:
            for pickled, named in self.sent:
                self.here.load(pickled, named)
            for side in (self.here, self.there):
                side.end_fork()
            self.there.close()
            end_leases(self.here.store)
            self.here.held.clear()
            gc.collect()
            self.here.collect()
            assert leftovers(self.here.store) == []
            self.here.end()
            assert find_leaks(self.path) == []
        finally:
            shutil.rmtree(self.parent)
