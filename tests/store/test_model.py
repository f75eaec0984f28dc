"""A store against a dict: any sequence of operations leaves both the same, and what is held as it was.

Two processes have the store open, and either may do the next thing; one may die of it, and the disk may be full.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import memstore
from tests.examples import IS_FULL
from tests.store.model import SIDES, Model
from tests.store.two_stores import Named

KEYS = st.sampled_from(["a", "a", "a", "b", "b", "a/b", "🐍", "z" * 500])  # few, so that each has many versions
KINDS = ["object", "inline", *["segment"] * 3, *["like it"] * 5, "medium", "large"]
NUMBERS = st.integers(0, 2**31)
VALUES = st.tuples(st.sampled_from(KINDS), NUMBERS)
ITEMS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=3)
STEPS = {"get": 5, "send": 8, "collect": 14, "verify": 20, "reopen": 34}  # about so many: where it may die
DEATHS = st.sampled_from(sorted(STEPS)).flatmap(lambda name: st.tuples(st.just(name), st.integers(1, STEPS[name])))

EXAMPLES, PARTS = (3000, 4) if IS_FULL else (8, 1)
HELD = 6  # values a side
IN_FILES = {"segment", "like it", "medium", "large"}


def has_files(machine: Model) -> bool:
    return any(named[0] in IN_FILES for named, _ in machine.model.values())


class StoreMachine(Model):
    # --- changes ------------------------------------------------------------------------------------------------------

    @rule(side=SIDES, key=KEYS, value=VALUES, times=st.integers(1, 4))
    def put(self, side: int, key: str, value: Named, times: int) -> None:
        """Overwrites of like sizes: from the third on they use the files of the first ones, if nobody holds them."""
        kind, number = value
        for one in [(kind, number + i) for i in range(times)]:
            self.put_one(self.side(side).put, key, one)
        if key in self.model:
            assert self.side(1 - side).wait(key, self.version(key) - 1) == self.version(key)

    @rule(side=SIDES, key=KEYS, value=VALUES)
    def put_in_a_fork(self, side: int, key: str, value: Named) -> None:
        self.put_one(self.side(side).put_in_a_fork, key, value)

    @precondition(lambda self: not self.is_full)
    @rule(side=SIDES, key=KEYS, value=VALUES)
    def put_what_is_waited_for(self, side: int, key: str, value: Named) -> None:
        """The other side sleeps until then, and nothing but the put wakes it."""
        other = self.side(1 - side)
        other.start_waiting(key, self.version(key))
        self.put_one(self.side(side).put, key, value)
        assert other.end_waiting() == self.version(key)

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

    @rule(side=SIDES, key=KEYS, number=NUMBERS)
    def put_sharded(self, side: int, key: str, number: int) -> None:
        """Each process is one of two ranks."""
        self.attempts += 1
        try:
            assert self.side(side).put_shard(key, number, self.attempts, 0) is None
            assert [one.ranks for one in self.here.store.pending(key)] == [(0,)]
            version = self.side(1 - side).put_shard(key, number, self.attempts, 1)
        except memstore.StoreFullError:
            assert self.is_full
        else:
            self.note({key: ("sharded", number)}, {key: version})
        assert self.here.store.pending() == ()

    @rule(side=SIDES, by=SIDES, key=KEYS, number=NUMBERS)
    def give_up_a_sharded_put(self, side: int, by: int, key: str, number: int) -> None:
        self.attempts += 1
        try:
            assert self.side(side).put_shard(key, number, self.attempts, 0) is None
        except memstore.StoreFullError:
            assert self.is_full
        else:
            assert self.side(by).abort(key, self.attempts)
        assert not self.side(by).abort(key, self.attempts)

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
            self.forget(keys)

    # --- deaths, of the other process; and full disks -----------------------------------------------------------------

    @rule(items=ITEMS, step=st.integers(1, 60), after=st.booleans())
    def die_in_a_put(self, items: dict[str, Named], step: int, after: bool) -> None:
        """A put that was cut short is wholly there, or not at all."""
        try:
            self.note(items, self.there.dying(step, after, "put_many", [items]))
        except memstore.StoreFullError:
            assert self.is_full
        except RuntimeError as error:
            self.replace_the_dead(error)
            event("died in a put")
            versions = {key: self.here.store.version(key) if key in self.here.store else 0 for key in items}
            changed = {key for key, version in versions.items() if version != self.version(key)}
            assert changed in (set(), set(items))
            if changed:
                self.note({key: items[key] for key in versions}, versions)

    @rule(key=KEYS, number=NUMBERS, step=st.integers(1, 40), after=st.booleans())
    def die_in_a_sharded_put(self, key: str, number: int, step: int, after: bool) -> None:
        """The other rank gives it up then, unless it was published."""
        self.attempts += 1
        try:
            assert self.here.put_shard(key, number, self.attempts, 0) is None
            version = self.there.dying(step, after, "put_shard", [key, number, self.attempts, 1])
            self.note({key: ("sharded", number)}, {key: version})
        except memstore.StoreFullError:
            assert self.is_full
        except RuntimeError as error:
            self.replace_the_dead(error)
            event("died in a sharded put")
            if not self.here.abort(key, self.attempts):
                version = self.here.store.version(key) if key in self.here.store else 0
                if version > self.highest:
                    self.note({key: ("sharded", number)}, {key: version})
                else:  # the last rank had found no room, and ended the attempt, before it died
                    assert self.is_full
        assert self.here.store.pending() == ()

    @rule(key=KEYS, step=st.integers(1, 15), after=st.booleans())
    def die_in_a_delete(self, key: str, step: int, after: bool) -> None:
        try:
            self.there.dying(step, after, "delete", [key])
            self.forget([key])
        except RuntimeError as error:
            self.replace_the_dead(error)
            event("died in a delete")
            if key not in self.here.store:
                self.forget([key])

    @precondition(lambda self: self.model)
    @rule(death=DEATHS, after=st.booleans(), data=st.data())
    def die_in_what_changes_nothing(self, death: tuple[str, int], after: bool, data: st.DataObject) -> None:
        name, step = death
        keys = [data.draw(st.sampled_from(sorted(self.model)))] if name in ("get", "send") else []
        try:
            self.there.dying(step, after, name, keys)
        except RuntimeError as error:
            self.replace_the_dead(error)
            event(f"died in {name}")

    @rule(side=SIDES, items=ITEMS, step=st.integers(1, 20), lasts=st.booleans())
    def put_on_a_full_disk(self, side: int, items: dict[str, Named], step: int, lasts: bool) -> None:
        try:
            self.note(items, self.side(side).on_a_full_disk(step, lasts, "put_many", [items]))
        except memstore.StoreFullError:
            event("the disk was full for a put")

    @precondition(lambda self: self.model)
    @rule(side=SIDES, name=st.sampled_from(["delete", "send", "collect"]), step=st.integers(1, 10), data=st.data())
    def do_it_on_a_full_disk(self, side: int, name: str, step: int, data: st.DataObject) -> None:
        keys = [] if name == "collect" else [data.draw(st.sampled_from(sorted(self.model)))]
        try:
            found = self.side(side).on_a_full_disk(step, True, name, keys)
        except memstore.StoreFullError:
            event(f"the disk was full for {name}")
        else:
            if name == "delete":
                self.forget(keys)
            elif name == "send":
                self.sent.append((found, self.model[keys[0]][0]))

    # --- what is held -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model)
    @rule(side=SIDES, data=st.data(), by_ref=st.booleans())
    def hold(self, side: int, data: st.DataObject, by_ref: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.holds += 1
        self.side(side).hold(self.holds, key, self.model[key][0], by_ref)
        self.side(side).let_go(self.holds - HELD)

    @precondition(has_files)
    @rule(side=SIDES, by=SIDES, data=st.data(), how=st.sampled_from(["value", "ref", "fork"]))
    def overwrite_what_is_held(self, side: int, by: int, data: st.DataObject, how: str) -> None:
        """By a value, a ref, or a forked child alone."""
        key, one = self.one_with_a_file(data), self.side(side)
        self.holds += 1
        one.hold(self.holds, key, self.model[key][0], how == "ref")
        if how == "fork":
            one.fork()
            one.let_go(self.holds)
        self.overwrite_alike(by, key)

    @precondition(has_files)
    @rule(side=SIDES, by=SIDES, data=st.data())
    def overwrite_what_is_sent(self, side: int, by: int, data: st.DataObject) -> None:
        """Its lease alone keeps it, until it is loaded steps later."""
        key = self.one_with_a_file(data)
        self.sent.append((self.side(side).send(key), self.model[key][0]))
        self.overwrite_alike(by, key)

    def one_with_a_file(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(key for key, (named, _) in self.model.items() if named[0] in IN_FILES)))

    def overwrite_alike(self, by: int, key: str) -> None:
        """With values of its own size, which would fit into its file."""
        kind, number = self.model[key][0]
        for other in range(1, 4):
            self.put_one(self.side(by).put, key, (kind, number + 5 * other))

    @precondition(lambda self: self.sent)
    @rule(side=SIDES, data=st.data())
    def load(self, side: int, data: st.DataObject) -> None:
        self.side(side).load(*self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1))))

    @rule(side=SIDES)
    def read_in_the_fork(self, side: int) -> None:
        self.side(side).read_in_the_fork()

    @rule(side=SIDES, ago=st.integers(0, 2 * HELD))
    def let_go(self, side: int, ago: int) -> None:
        self.side(side).let_go(self.holds - ago)

    # --- the rest -----------------------------------------------------------------------------------------------------

    @rule(side=SIDES)
    def verify(self, side: int) -> None:
        self.side(side).verify()

    @rule(side=SIDES, mode=st.sampled_from(["r+", "a"]))
    def reopen(self, side: int, mode: str) -> None:
        self.side(side).reopen(mode)


@pytest.mark.embedded
@pytest.mark.timeout(7200 if IS_FULL else 900)
class TestStore(StoreMachine.TestCase):
    settings = settings(
        max_examples=EXAMPLES // PARTS,
        stateful_step_count=16,
        deadline=None,
        phases=set(Phase) - (set() if IS_FULL else {Phase.shrink}),  # it takes minutes, and the seed is there
    )


if IS_FULL:  # other examples, by other workers

    class TestStoreMore(TestStore): ...

    class TestStoreYetMore(TestStore): ...

    class TestStoreMost(TestStore): ...
