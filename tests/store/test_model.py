"""A store against a dict: any sequence of operations leaves both the same, and what is held as it was."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import memstore
from memstore.testing.equality import assert_same
from tests.leaks import find_leaks

KEYS = st.sampled_from(["a", "b", "a/b", "🐍", "z" * 500])
NUMBERS = st.integers(0, 2**31)


def make(kind: str, number: int) -> Any:
    """Values of all sizes, made anew each time, so that the model's are nobody's memory."""
    return {
        "object": lambda: number,
        "inline": lambda: torch.tensor([number]),
        "segment": lambda: {"x": torch.full((700,), number), "y": [number, torch.tensor(number)]},
        "large": lambda: torch.full((1 << 19,), number),
    }[kind]()


VALUES = st.tuples(st.sampled_from(["object", "inline", "segment", "segment", "segment", "large"]), NUMBERS)


class StoreMachine(RuleBasedStateMachine):
    held = Bundle("held")
    refs = Bundle("refs")

    @initialize(checksum=st.booleans(), inline_limit=st.sampled_from([0, 1536]))
    def create(self, checksum: bool, inline_limit: int) -> None:
        shm = Path("/dev/shm")
        self.parent = tempfile.mkdtemp(dir=shm if os.access(shm, os.W_OK) else None, prefix="memstore-test-")
        self.options = {"checksum": checksum, "inline_limit": inline_limit, "verify": checksum, "timeout": 10.0}
        self.store = memstore.open(f"{self.parent}/store", **self.options)  # type: ignore[arg-type]
        self.model: dict[str, tuple[str, int]] = {}
        self.versions: dict[str, int] = {}
        self.highest = 0

    def note(self, key: str, value: tuple[str, int], version: int) -> None:
        assert version > self.highest
        self.highest, self.versions[key], self.model[key] = version, version, value

    @rule(key=KEYS, value=VALUES)
    def put(self, key: str, value: tuple[str, int]) -> None:
        self.note(key, value, self.store.put(key, make(*value)))

    @rule(items=st.dictionaries(KEYS, VALUES, max_size=3))
    def put_many(self, items: dict[str, tuple[str, int]]) -> None:
        versions = self.store.put_many({key: make(*value) for key, value in items.items()})
        for key, version in versions.items():
            self.note(key, items[key], version)

    @rule(key=KEYS, value=VALUES, wrong=st.booleans())
    def put_expecting(self, key: str, value: tuple[str, int], wrong: bool) -> None:
        expected = self.versions.get(key, 0) + wrong
        try:
            version = self.store.put(key, make(*value), expect_version=expected)
        except memstore.VersionConflictError as error:
            assert wrong and (error.expected, error.found) == (expected, self.versions.get(key, 0))
        else:
            assert not wrong
            self.note(key, value, version)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert self.store.delete(key, missing_ok=True) is (key in self.model)
        self.model.pop(key, None)
        self.versions.pop(key, None)

    @rule(keys=st.lists(KEYS, max_size=3))
    def delete_many(self, keys: list[str]) -> None:
        try:
            assert self.store.delete_many(keys) == len(set(keys))
        except memstore.KeyNotFoundError as error:
            assert error.key in keys and error.key not in self.model
        else:
            for key in set(keys):
                del self.model[key], self.versions[key]

    @rule(target=held, key=KEYS)
    def get(self, key: str) -> Any:
        if key not in self.model:
            assert self.store.get(key, None) is None
            return multiple()
        got = self.store.get(key)
        assert_same(make(*self.model[key]), got)
        return got, self.model[key]

    @rule(one=held)
    def look_again(self, one: tuple[Any, tuple[str, int]]) -> None:
        assert_same(make(*one[1]), one[0])

    @rule(one=consumes(held))
    def let_go(self, one: tuple[Any, tuple[str, int]]) -> None:
        pass

    @rule(target=refs, key=KEYS, sent=st.booleans())
    def ref(self, key: str, sent: bool) -> Any:
        if key not in self.model:
            return multiple()
        ref = self.store.ref(key)
        return pickle.loads(pickle.dumps(ref)) if sent else ref, self.model[key]

    @rule(one=refs)
    def get_ref(self, one: tuple[memstore.Ref, tuple[str, int]]) -> None:
        assert_same(make(*one[1]), one[0].get())

    @rule()
    def collect(self) -> None:
        self.store.gc()

    @rule(mode=st.sampled_from(["r+", "a"]))
    def reopen(self, mode: str) -> None:
        self.store.close()
        self.store = memstore.open(f"{self.parent}/store", mode, **self.options)  # type: ignore[arg-type]

    @invariant()
    def both_are_the_same(self) -> None:
        if not hasattr(self, "store"):
            return
        assert list(self.store) == sorted(self.model, key=str.encode)
        assert len(self.store) == len(self.model)
        for key, value in self.store.get_many(list(self.model)).items():
            assert_same(make(*self.model[key]), value)
            assert self.store.version(key) == self.store.wait(key, timeout=0) == self.versions[key]

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self._end_leases()
        self.store.close()
        del self.store
        try:
            never = ("a filling row", "a missing file")  # what the bundles hold is open, mapped and retired still
            assert [leak for leak in find_leaks(f"{self.parent}/store") if leak.startswith(never)] == []
        finally:
            shutil.rmtree(self.parent)

    def _end_leases(self) -> None:
        root = self.store._root
        assert root is not None

        def end() -> None:
            with root.guard:
                for segment, _ in root.catalog.view(lambda transaction: transaction.numbers("leases", 1000)):
                    root.catalog.update(
                        lambda transaction, segment=segment: transaction.put_number("leases", segment, 0)
                    )

        root.mutex.run(end, time.monotonic() + 10)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
