"""A store against a dict: any sequence of operations leaves both the same, and what is held as it was.

Two processes have the store open, and either may do the next thing; one of them may die of it.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import memstore
from tests.crash.leftovers import end_leases, leftovers
from tests.leaks import find_leaks
from tests.store.two_stores import Named, OtherSide, Side

KEYS = st.sampled_from(["a", "a", "a", "b", "b", "a/b", "🐍", "z" * 500])  # few, so that each has many versions
KINDS = ["object", "inline", *["segment"] * 3, *["like it"] * 5, "medium", "large"]
VALUES = st.tuples(st.sampled_from(KINDS), st.integers(0, 2**31))
SIDES = st.sampled_from([0, 1])
SPARE = st.sampled_from([0, 10_000, 100_000, 3 << 20])
EXAMPLES = 3000 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 100
HELD = 6  # values a side


class StoreMachine(RuleBasedStateMachine):
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
        self.highest = self.holds = 0
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

    # --- changes ------------------------------------------------------------------------------------------------------

    @rule(side=SIDES, key=KEYS, value=VALUES, times=st.integers(1, 4))
    def put(self, side: int, key: str, value: Named, times: int) -> None:
        """Overwrites of like sizes: from the third on they use the files of the first ones, if nobody holds them."""
        kind, number = value
        for one in [(kind, number + i) for i in range(times)]:
            self._put(self.side(side).put, key, one)
        if key in self.model:
            assert self.side(1 - side).wait(key, self.version(key) - 1) == self.version(key)

    @rule(side=SIDES, key=KEYS, value=VALUES)
    def put_in_a_fork(self, side: int, key: str, value: Named) -> None:
        self._put(self.side(side).put_in_a_fork, key, value)

    def _put(self, put: Callable[[str, Named], int], key: str, value: Named) -> None:
        try:
            version = put(key, value)
        except memstore.StoreFullError:
            event("no room for a put")
            assert self.is_full
        else:
            self.note({key: value}, {key: version})

    @rule(side=SIDES, items=st.dictionaries(KEYS, VALUES, max_size=3))
    def put_many(self, side: int, items: dict[str, Named]) -> None:
        try:
            self.note(items, self.side(side).put_many(items))
        except memstore.StoreFullError:
            assert self.is_full

    @rule(side=SIDES, key=KEYS, value=VALUES, wrong=st.booleans())
    def put_expecting(self, side: int, key: str, value: Named, wrong: bool) -> None:
        expected = self.version(key) + wrong
        try:
            version = self.side(side).put(key, value, expected)
        except memstore.VersionConflictError as error:
            assert wrong and (error.expected, error.found) == (expected, self.version(key))
        except memstore.StoreFullError:
            assert self.is_full
        else:
            assert not wrong
            self.note({key: value}, {key: version})

    @rule(side=SIDES, key=KEYS)
    def delete(self, side: int, key: str) -> None:
        assert self.side(side).delete(key) is (self.model.pop(key, None) is not None)

    @rule(side=SIDES, keys=st.lists(KEYS, max_size=3))
    def delete_many(self, side: int, keys: list[str]) -> None:
        try:
            assert self.side(side).delete_many(keys) == len(set(keys))
        except memstore.KeyNotFoundError as error:
            assert error.key in keys and error.key not in self.model
        else:
            for key in set(keys):
                del self.model[key]

    @rule(items=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3), step=st.integers(1, 60), after=st.booleans())
    def die_in_a_put(self, items: dict[str, Named], step: int, after: bool) -> None:
        """The other process; a put that was cut short is wholly there, or not at all."""
        try:
            self.note(items, self.there.dying(step, after, "put_many", [items]))
        except memstore.StoreFullError:
            assert self.is_full
        except RuntimeError as error:
            self._replace_the_dead(error)
            event("died in a put")
            versions = {key: self.here.store.version(key) if key in self.here.store else 0 for key in items}
            changed = {key for key, version in versions.items() if version != self.version(key)}
            assert changed in (set(), set(items))
            if changed:
                self.note({key: items[key] for key in versions}, versions)

    @rule(key=KEYS, step=st.integers(1, 15), after=st.booleans())
    def die_in_a_delete(self, key: str, step: int, after: bool) -> None:
        try:
            self.there.dying(step, after, "delete", [key])
            self.model.pop(key, None)
        except RuntimeError as error:
            self._replace_the_dead(error)
            event("died in a delete")
            if key not in self.here.store:
                self.model.pop(key, None)

    def _replace_the_dead(self, error: RuntimeError) -> None:
        assert "exit code -9" in str(error)
        self.here.delete("a key that never is")  # a commit that was cut short is seen after the next one
        self.there.close()
        self.there = OtherSide(self.path, self.options)

    # --- the rest -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model)
    @rule(side=SIDES, data=st.data(), by_ref=st.booleans())
    def hold(self, side: int, data: st.DataObject, by_ref: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.holds += 1
        self.side(side).hold(self.holds, key, self.model[key][0], by_ref)
        self.side(side).let_go(self.holds - HELD)

    @precondition(lambda self: self.model)
    @rule(side=SIDES, by=SIDES, data=st.data(), by_ref=st.booleans())
    def overwrite_what_is_held(self, side: int, by: int, data: st.DataObject, by_ref: bool) -> None:
        """With values of its own size, which would fit into its file."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        kind, number = self.model[key][0]
        self.holds += 1
        self.side(side).hold(self.holds, key, (kind, number), by_ref)
        for other in range(1, 4):
            self._put(self.side(by).put, key, (kind, number + 5 * other))

    @rule(side=SIDES, ago=st.integers(0, 2 * HELD))
    def let_go(self, side: int, ago: int) -> None:
        self.side(side).let_go(self.holds - ago)

    @rule(side=SIDES)
    def collect(self, side: int) -> None:
        self.side(side).collect()

    @rule(side=SIDES)
    def verify(self, side: int) -> None:
        self.side(side).verify()

    @rule(side=SIDES, spare=SPARE)
    def fill_up(self, side: int, spare: int) -> None:
        self.side(side).limit(spare)
        self.is_full = True

    @precondition(lambda self: self.is_full)
    @rule(side=SIDES)
    def make_room(self, side: int) -> None:
        self.side(side).limit(None)
        self.is_full = False

    @rule(side=SIDES, mode=st.sampled_from(["r+", "a"]))
    def reopen(self, side: int, mode: str) -> None:
        self.side(side).reopen(mode)

    @invariant()
    def all_are_the_same(self) -> None:
        if hasattr(self, "there"):
            self.here.check(self.model)
            self.there.check(self.model)

    def teardown(self) -> None:
        if not hasattr(self, "there"):
            return
        try:
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


TestStore = pytest.mark.timeout(7200 if EXAMPLES > 100 else 120)(StoreMachine.TestCase)
TestStore.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=16,
    deadline=None,
    phases=set(Phase) - ({Phase.shrink} if EXAMPLES == 100 else set()),  # it takes minutes, and the seed is there
)
