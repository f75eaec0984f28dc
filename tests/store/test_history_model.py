"""A store whose keys have histories, against lists: any sequence of operations leaves both the same.

The rules of `test_model.py` hold: two processes have the store open, one may die of what it does, and the disk may be
full. Where there was no room, the oldest versions may be gone.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

import memstore
from tests.examples import IS_FULL
from tests.store.model import SIDES, Model
from tests.store.two_stores import Named

KEYS = st.sampled_from(["a", "a", "a", "b", "a/b", "z" * 500])
KINDS = ["object", "inline", *["segment"] * 2, *["like it"] * 4, "medium", "large"]
VALUES = st.tuples(st.sampled_from(KINDS), st.integers(0, 2**31))
HISTORIES = st.sampled_from([None, None, None, 1, 2, 3, 3, 4, 6])
EXAMPLES = 1500 if IS_FULL else 5


class HistoryMachine(Model):
    """Beside the present versions, those that were replaced and are kept, the oldest first, and each key's limit."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: dict[str, list[tuple[Named, int]]] = {}
        self.limits: dict[str, int] = {}
        self.may_have_gone = False

    def note_put(self, items: dict[str, Named], versions: dict[str, int], history: int | None = None) -> None:
        for key in items:
            before = self.replaced.setdefault(key, [])
            if key in self.model:
                before.append(self.model[key])
            if history is not None:
                self.limits[key] = history
            del before[: max(0, len(before) - self.limits.get(key, 1) + 1)]
        self.note(items, versions)

    def note_delete(self, key: str) -> None:
        self.forget([key])
        self.replaced.pop(key, None)
        self.limits.pop(key, None)

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule(side=SIDES, key=KEYS, value=VALUES, history=HISTORIES, times=st.integers(1, 4))
    def put(self, side: int, key: str, value: Named, history: int | None, times: int) -> None:
        for number in range(times):
            one = (value[0], value[1] + number)
            try:
                version = self.side(side).put_with_history(key, one, history)
            except memstore.StoreFullError:
                assert self.is_full
                self.may_have_gone = True
            else:
                self.note_put({key: one}, {key: version}, history)

    @rule(side=SIDES, items=st.dictionaries(KEYS, VALUES, max_size=3))
    def put_many(self, side: int, items: dict[str, Named]) -> None:
        try:
            self.note_put(items, self.side(side).put_many(items))
        except memstore.StoreFullError:
            assert self.is_full
            self.may_have_gone = True

    @rule(side=SIDES, key=KEYS)
    def delete(self, side: int, key: str) -> None:
        assert self.side(side).delete(key) is (key in self.model)
        self.note_delete(key)

    @rule(key=KEYS, value=VALUES, history=HISTORIES, step=st.integers(1, 60), after=st.booleans())
    def die_in_a_put(self, key: str, value: Named, history: int | None, step: int, after: bool) -> None:
        try:
            version = self.there.dying(step, after, "put_with_history", [key, value, history])
            self.note_put({key: value}, {key: version}, history)
        except memstore.StoreFullError:
            assert self.is_full
            self.may_have_gone = True
        except RuntimeError as error:
            self.replace_the_dead(error)
            event("died in a put")
            self.may_have_gone = self.may_have_gone or self.is_full
            version = self.here.store.version(key) if key in self.here.store else 0
            if version != self.version(key):
                self.note_put({key: value}, {key: version}, history)

    @rule(key=KEYS, step=st.integers(1, 15), after=st.booleans())
    def die_in_a_delete(self, key: str, step: int, after: bool) -> None:
        try:
            self.there.dying(step, after, "delete", [key])
            self.note_delete(key)
        except RuntimeError as error:
            self.replace_the_dead(error)
            if key not in self.here.store:
                self.note_delete(key)

    @rule(side=SIDES, key=KEYS, value=VALUES, history=HISTORIES, step=st.integers(1, 20), lasts=st.booleans())
    def put_on_a_full_disk(
        self, side: int, key: str, value: Named, history: int | None, step: int, lasts: bool
    ) -> None:
        self.may_have_gone = True
        try:
            version = self.side(side).on_a_full_disk(step, lasts, "put_with_history", [key, value, history])
            self.note_put({key: value}, {key: version}, history)
        except memstore.StoreFullError:
            event("the disk was full for a put")

    @precondition(lambda self: self.model)
    @rule(side=SIDES, data=st.data())
    def hold_one_that_was_replaced(self, side: int, data: st.DataObject) -> None:
        known = [(key, one) for key, found in self.replaced.items() for one in found if key in self.model]
        if known:
            key, (named, version) = data.draw(st.sampled_from(known))
            self.holds += 1
            self.side(side).hold_version(self.holds, key, named, version)
            self.side(side).let_go(self.holds - 4)

    @rule(side=SIDES, ago=st.integers(0, 8))
    def let_go(self, side: int, ago: int) -> None:
        self.side(side).let_go(self.holds - ago)

    @precondition(lambda self: IS_FULL)  # each takes a second
    @rule(side=SIDES)
    def verify(self, side: int) -> None:
        self.side(side).verify()

    @rule(side=SIDES)
    def reopen(self, side: int) -> None:
        self.side(side).reopen()

    @precondition(lambda self: IS_FULL)
    @rule()
    def repair(self) -> None:
        """Nobody else has the store open then, or holds a value of it."""
        for side in (self.here, self.there):
            side.end_fork()
        self.there.close()
        self.here.end()
        assert memstore.repair(self.path).lost == ()
        self.here.reopen()
        self.there = type(self.there)(self.path, self.options)

    # --- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def versions_are_the_same(self) -> None:
        if not hasattr(self, "there"):
            return
        for key in self.model:
            kept = [version for _, version in self.replaced.get(key, [])]
            found = list(self.there.versions(key))
            assert found.pop() == self.version(key)
            if self.is_full or self.may_have_gone:
                assert found == kept[len(kept) - len(found) :]
                del self.replaced[key][: len(kept) - len(found)]
            assert found == [version for _, version in self.replaced.get(key, [])]
        self.may_have_gone = False
        for side in (self.here, self.there):
            side.check_versions(self.replaced)


@pytest.mark.embedded
@pytest.mark.timeout(7200 if IS_FULL else 900)
class TestHistory(HistoryMachine.TestCase):
    settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=16,
        deadline=None,
        phases=set(Phase) - (set() if IS_FULL else {Phase.shrink}),
    )
