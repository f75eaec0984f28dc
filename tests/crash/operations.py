"""The operations that are cut short at each of their steps, with what the store has before and after them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import cast

import torch

import memstore
from memstore import contents
from memstore.engine.protocols.put import put as engine_put
from memstore.engine.sync.primitives import deadline_after
from tests.crash.values import INLINE, LARGE, MEDIUM, SMALL, SMALLISH, stamp_at, stamp_of, stamped
from tests.huge_pages import ask_at_any_price
from tests.inside import root_of

ask_at_any_price()  # in the workers, too, which import this

OLD, NEW = 1, 2
Sizes = Mapping[str, int]  # of the keys' values, in bytes


@dataclass(frozen=True)
class Operation:
    """`prepare` runs in the process that is to die, before `run`; what it returns lives on meanwhile.

    With `spares`, retired files of all sizes are there for reuse; else none is.
    """

    run: Callable[[memstore.Store, object], object]
    before: Sizes
    after: Sizes
    prepare: Callable[[memstore.Store], object] = lambda store: None
    new: int = NEW  # the stamp that the values have afterwards
    spares: bool = False
    may_be_done: bool = False  # also if it fails: it does something else after its commit

    @property
    def keys(self) -> list[str]:
        return sorted({*self.before, *self.after})

    @property
    def changes(self) -> bool:
        return self.new != OLD or self.before.keys() != self.after.keys()

    def reset(self, store: memstore.Store) -> dict[str, int]:
        """Makes the store as it is before. Returns the versions."""
        store.delete_many([key for key in self.keys if key not in self.before], missing_ok=True)
        for key, nbytes in self.before.items():
            store.put(key, stamped(OLD, nbytes))
        store.gc()
        if self.spares:
            store.put_many({f"spare {nbytes}": stamped(OLD, nbytes) for nbytes in _MANY.values()})
            store.delete_many([f"spare {nbytes}" for nbytes in _MANY.values()])
        return {key: store.version(key) if key in self.before else 0 for key in self.keys}

    def outcome(self, store: memstore.Store) -> str:
        """Returns "old" or "new"; anything between them is an error."""
        found = {key: stamp_at(store, key) for key in self.keys}
        old = {key: OLD if key in self.before else None for key in self.keys}
        new = {key: self.new if key in self.after else None for key in self.keys}
        assert found in (old, new), f"neither {old} nor {new}, but {found}"
        return "new" if found == new else "old"


@dataclass(frozen=True)
class OnDataset(Operation):
    """One on the dataset "data", with rows before and after it, or None. The key "a" is an ordinary one beside it.

    With `seals`, it is an ordinary entry afterwards.
    """

    rows_before: list[int] | None = None
    rows_after: list[int] | None = None
    seals: bool = False

    @property
    def changes(self) -> bool:
        return True

    def reset(self, store: memstore.Store) -> dict[str, int]:
        store.delete("data", missing_ok=True)
        create_dataset(store, None).extend(rows_of(self.rows_before or []))  # the first one of a store takes more steps
        if self.rows_before is None:
            store.delete("data")
        return super().reset(store)

    def outcome(self, store: memstore.Store) -> str:
        assert stamp_at(store, "a") == OLD
        found = rows_at(store, "data")
        old = None if self.rows_before is None else (self.rows_before, "dataset")
        new = None if self.rows_after is None else (self.rows_after, "segment" if self.seals else "dataset")
        assert found in (old, new), f"neither {old} nor {new}, but {found}"
        return "new" if found == new else "old"


@dataclass(frozen=True)
class OnHistory(Operation):
    """One on the key "a", of which two versions are kept: with the stamps 0 and OLD before it."""

    stamps_after: tuple[int, ...] = (OLD, NEW)
    may_drop: bool = False  # the replaced version may go before the put is done

    @property
    def changes(self) -> bool:
        return True

    def reset(self, store: memstore.Store) -> dict[str, int]:
        store.delete("a", missing_ok=True)
        for stamp in (0, OLD):
            store.put("a", stamped(stamp, self.before["a"]), history=2)
        store.gc()
        return {"a": store.version("a")}

    def outcome(self, store: memstore.Store) -> str:
        versions = store.versions("a") if "a" in store else ()
        found = tuple(stamp_of(store.get("a", version=version)) for version in versions)
        before = ((0, OLD), (OLD,)) if self.may_drop else ((0, OLD),)
        assert found in (*before, self.stamps_after), f"neither the old ones nor the new ones, but {found}"
        return "new" if found == self.stamps_after else "old"


@dataclass(frozen=True)
class OnTiers(Operation):
    """One on a store whose values move to a disk: before it all lie in memory, and there is room for them."""

    def reset(self, store: memstore.Store) -> dict[str, int]:
        memstore.open(store.root, capacity="1TiB", spill=f"{store.root}.spill").close()
        store.clear()
        store.gc()  # so that files have the same sizes each time
        return super().reset(store)


@dataclass(frozen=True)
class OnDelta(Operation):
    """One on the key "a", which has a delta before it: a leaf that stays, and one with the stamp OLD."""

    stamps_after: tuple[int, ...] = (NEW,)
    history: int = 1

    @property
    def changes(self) -> bool:
        return True

    def reset(self, store: memstore.Store) -> dict[str, int]:
        store.delete("a", missing_ok=True)
        store.gc()
        for stamp in (0, OLD):
            put_delta(store, stamp, history=self.history)
        return {"a": store.version("a")}

    def outcome(self, store: memstore.Store) -> str:
        found: list[int] = []
        for version in store.versions("a") if "a" in store else ():
            value = store.get("a", version=version)
            assert isinstance(value, torch.Tensor) or stamp_of(value["stays"]) == 77
            found.append(stamp_of(value if isinstance(value, torch.Tensor) else value["stamp"]))
        before = (0, OLD)[-self.history :]
        assert tuple(found) in (before, self.stamps_after), f"neither {before} nor {self.stamps_after}, but {found}"
        return "new" if tuple(found) == self.stamps_after else "old"


def put_delta(store: memstore.Store, stamp: int, history: int | None = None) -> None:
    store.put("a", {"stays": stamped(77, LARGE), "stamp": stamped(stamp, SMALL)}, history=history, delta_of=True)


_ROW = ((1024,), torch.int64)


def rows_of(stamps: list[int]) -> torch.Tensor:
    return torch.tensor(stamps, dtype=torch.int64)[:, None].expand(-1, 1024)


def rows_at(store: memstore.Store, key: str) -> tuple[list[int], str] | None:
    """The rows of a dataset, or of what was one, and what it is; None if there is no such key."""
    if key not in store:
        return None
    kind = store.info(key).kind
    if kind == "dataset":
        data = store.open_dataset(key)
        data.flush()  # its mutex is to be had
        rows = data[:]
    else:
        rows = store.get(key)
    assert torch.equal(rows, rows[:, :1].expand(-1, 1024)), "a torn row"
    return [int(stamp) for stamp in rows[:, 0]], kind


def create_dataset(store: memstore.Store, _: object) -> memstore.Dataset:
    return store.create_dataset("data", _ROW, capacity=4)


def extend_dataset(store: memstore.Store, _: object) -> None:
    store.open_dataset("data").extend(rows_of([NEW, NEW]))


def seal_dataset(store: memstore.Store, _: object) -> None:
    store.open_dataset("data").seal()


def _put(key: str, nbytes: int) -> Callable[[memstore.Store, object], object]:
    return lambda store, _: store.put(key, stamped(NEW, nbytes))


def _put_many(store: memstore.Store, _: object) -> None:
    store.put_many({key: stamped(NEW, nbytes) for key, nbytes in _MANY.items()})


def _pickle(_: memstore.Store, ref: object) -> None:
    ForkingPickler(io.BytesIO()).dump(ref)


def _retire(store: memstore.Store) -> None:
    """Leaves a version behind that nobody holds any more, for gc."""
    held = store.get("a")
    store.put("a", stamped(OLD, LARGE))
    del held


def _pin_a_retired_file(store: memstore.Store) -> object:
    store.put("pinned", stamped(OLD, SMALL))
    pinned = store.get("pinned")
    store.delete("pinned")
    return pinned


def _lose_a_race(nbytes: int) -> Callable[[memstore.Store, object], object]:
    """A put whose key is replaced while it fills, so that only the commit finds the wrong version."""

    def put(store: memstore.Store, _: object) -> None:
        root, deadline = root_of(store), deadline_after(30.0)
        limit = contents.inline_limit(root)
        flat = contents.flatten("a", stamped(NEW, nbytes), root, limit=limit, allow_pickle=False)
        with contextlib.suppress(memstore.VersionConflictError):
            engine_put(root, [contents.draft(root, b"a", flat, limit, 1 << 60)], deadline)

    return put


def _put_before(*keys: str) -> Callable[[memstore.Store], object]:
    """Puts of the process that is to die: the second one of a size keeps the file that it replaces."""

    def put(store: memstore.Store) -> None:
        for key in keys:
            store.put(key, stamped(OLD, SMALL))

    return put


def _put_again_and_again(times: int) -> Callable[[memstore.Store], object]:
    """Puts that take turns at two files: the sixth put of a process, and the seventh, map theirs."""

    def put(store: memstore.Store) -> None:
        for _ in range(times):
            store.put("a", stamped(OLD, MEDIUM))

    return put


def _put_another_before(store: memstore.Store) -> None:
    """What is kept then is not for the key that is put."""
    _put_before("another", "another")(store)
    store.put("a", stamped(OLD, SMALLISH))


def _put_and_hold(store: memstore.Store) -> object:
    root_of(
        store
    ).next_put.keeps_none_for = 0  # as if the last refusal were long ago: after one, some puts keep nothing
    store.put("a", stamped(OLD, SMALL))
    return store.get("a")


def _fill_up(store: memstore.Store) -> None:
    """To the brim, with a retired file that is too large for the next put."""
    memstore.open(store.root, capacity=4 * LARGE).close()
    store.put("b", stamped(OLD, 2 * LARGE))
    store.delete("b")


def _pin_and_put(store: memstore.Store) -> memstore.Pin:
    pin = store.pin("a")
    store.put("a", stamped(OLD, SMALL))
    return pin


def _fill_up_beside(store: memstore.Store) -> None:
    """To the brim, so that what is kept has to go."""
    memstore.open(store.root, capacity=store.stats().live_bytes + (1 << 20)).close()


def _fill_up_with_spill(store: memstore.Store) -> None:
    """To the brim, so that values move to a disk."""
    capacity = root_of(store).catalog.growth + store.stats().live_bytes + (1 << 20)
    memstore.open(store.root, capacity=capacity, spill=f"{store.root}.spill").close()
    root_of(store).sweeps.looked_at_held = 0.0  # the sweep behind the commit looks, whatever the time


def _move_all(store: memstore.Store) -> None:
    _fill_up_with_spill(store)
    for key in "cd":
        store.put(key, stamped(OLD, LARGE))
    store.delete_many(["c", "d"])
    root_of(store).sweeps.looked_at_held = 0.0
    assert store.stats().spilled_bytes > 2 * LARGE


_A = {"a": SMALL}
_MANY = {"a": INLINE, "b": SMALL, "c": LARGE}
_CROWD = {f"a{number}": SMALL for number in range(8)}

OPERATIONS: dict[str, Operation] = {
    "put-inline": Operation(_put("a", INLINE), {}, {"a": INLINE}),
    "put-small": Operation(_put("a", SMALL), {}, {"a": SMALL}),
    "put-large": Operation(_put("a", LARGE), {}, {"a": LARGE}),
    "overwrite-inline": Operation(_put("a", INLINE), {"a": SMALL}, {"a": INLINE}),
    "overwrite-small": Operation(_put("a", SMALL), {"a": SMALL}, {"a": SMALL}),
    "overwrite-large": Operation(_put("a", LARGE), {"a": LARGE}, {"a": LARGE}),
    "reuse-small": Operation(_put("a", SMALL), {"a": SMALL}, {"a": SMALL}, spares=True),
    "reuse-large": Operation(_put("a", LARGE), {"a": LARGE}, {"a": LARGE}, spares=True),
    "reuse-many": Operation(_put_many, {"b": SMALL}, _MANY, spares=True),
    "claim-held": Operation(_put("a", SMALL), {"a": SMALL}, {"a": SMALL}, prepare=_pin_a_retired_file),
    "book-ahead": Operation(_put("a", SMALL), {"a": SMALL}, {"a": SMALL}, prepare=_put_before("a")),
    "use-ahead": Operation(_put("a", SMALL), {"a": SMALL}, {"a": SMALL}, prepare=_put_before("a", "a")),
    "map-ahead": Operation(_put("a", MEDIUM), {"a": MEDIUM}, {"a": MEDIUM}, prepare=_put_again_and_again(5)),
    "mapped-ahead": Operation(_put("a", MEDIUM), {"a": MEDIUM}, {"a": MEDIUM}, prepare=_put_again_and_again(7)),
    "book-held": Operation(_put("a", SMALL), {"a": SMALL}, {"a": SMALL}, prepare=_put_and_hold),
    "book-another": Operation(_put("a", SMALLISH), {"a": SMALLISH}, {"a": SMALLISH}, prepare=_put_another_before),
    "abandon-ahead": Operation(_lose_a_race(SMALL), {"a": SMALL}, {"a": SMALL}, prepare=_put_before("a", "a"), new=OLD),
    "gc-ahead": Operation(
        lambda store, _: store.gc(), {"a": SMALL}, {"a": SMALL}, prepare=_put_before("a", "a"), new=OLD
    ),
    "abandon-small": Operation(_lose_a_race(SMALL), {"a": SMALL}, {"a": SMALL}, new=OLD),
    "abandon-large": Operation(_lose_a_race(LARGE), {"a": LARGE}, {"a": LARGE}, new=OLD, spares=True),
    "delete-and-sweep": Operation(lambda store, _: store.delete_many(list(_CROWD)), _CROWD, {}),
    "put-at-capacity": Operation(_put("a", LARGE), {"a": LARGE}, {"a": LARGE}, prepare=_fill_up),
    "put-many": Operation(_put_many, {"b": SMALL}, _MANY),
    "delete": Operation(lambda store, _: store.delete("a"), {"a": SMALL}, {}),
    "delete-many": Operation(lambda store, _: store.delete_many(list(_MANY)), _MANY, {}),
    "get-many": Operation(
        lambda store, _: store.get_many(["a", "b"]), {"a": SMALL, "b": LARGE}, {"a": SMALL, "b": LARGE}, new=OLD
    ),
    "pickle-ref": Operation(
        _pickle, {"a": SMALL}, {"a": SMALL}, prepare=lambda store: store.ref("a", lease=0.0), new=OLD
    ),
    "gc": Operation(lambda store, _: store.gc(), {"a": LARGE}, {"a": LARGE}, prepare=_retire, new=OLD),
    "keep-inline": OnHistory(_put("a", INLINE), {"a": INLINE}, {"a": INLINE}),
    "keep-small": OnHistory(_put("a", SMALL), {"a": SMALL}, {"a": SMALL}),
    "keep-more": OnHistory(
        lambda store, _: store.put("a", stamped(NEW, SMALL), history=3),
        {"a": SMALL},
        {"a": SMALL},
        stamps_after=(0, OLD, NEW),
    ),
    "keep-one": OnHistory(
        lambda store, _: store.put("a", stamped(NEW, INLINE), history=1), {"a": SMALL}, _A, stamps_after=(NEW,)
    ),
    "keep-no-room": OnHistory(_put("a", LARGE), {"a": LARGE}, {"a": LARGE}, prepare=_fill_up_beside, may_drop=True),
    "move": OnTiers(
        lambda store, _: store.put_many({key: stamped(OLD, LARGE) for key in "cd"}),
        dict.fromkeys("ab", LARGE),
        dict.fromkeys("abcd", LARGE),
        prepare=_fill_up_with_spill,
        new=OLD,
    ),
    "replace-moved": OnTiers(
        lambda store, _: store.put_many({key: stamped(NEW, INLINE) for key in "ab"}),
        {"a": LARGE, "b": LARGE},
        {"a": INLINE, "b": INLINE},
        prepare=_move_all,
    ),
    "delta": OnDelta(lambda store, _: put_delta(store, NEW), _A, _A),
    "keep-delta": OnDelta(lambda store, _: put_delta(store, NEW), _A, _A, stamps_after=(OLD, NEW), history=2),
    "replace-delta": OnDelta(_put("a", SMALL), _A, _A),
    "delete-delta": OnDelta(lambda store, _: store.delete("a"), _A, {}, stamps_after=(), history=2),
    "delete-kept": OnHistory(lambda store, _: store.delete("a"), {"a": SMALL}, {}, stamps_after=()),
    "pin": Operation(lambda store, _: store.pin("a"), _A, _A, prepare=lambda store: store.pin("a").close(), new=OLD),
    "overwrite-pinned": Operation(_put("a", SMALL), _A, _A, prepare=lambda store: store.pin("a")),
    "end-pin": Operation(lambda _, pin: cast(memstore.Pin, pin).close(), _A, _A, prepare=_pin_and_put, new=OLD),
    "create-dataset": OnDataset(create_dataset, _A, _A, rows_after=[], may_be_done=True),
    "extend-dataset": OnDataset(extend_dataset, _A, _A, rows_before=[OLD], rows_after=[OLD, NEW, NEW]),
    "seal-dataset": OnDataset(seal_dataset, _A, _A, rows_before=[OLD], rows_after=[OLD], seals=True),
    "delete-dataset": OnDataset(lambda store, _: store.delete("data"), _A, _A, rows_before=[OLD]),
}

# The main ways to change a file, the catalog and the words in the lock page: these are killed at more steps than the
# others in the fast run, before and after them in turn, since the words may be others. In the full run all are, at all.
MAIN = {"overwrite-small", "put-large", "use-ahead", "mapped-ahead", "delete-many", "extend-dataset"}

# Every kind of change to a file and to the catalog once, where each is synced. All the others in the full run.
ON_DISK = ["put-inline", "overwrite-small", "use-ahead", "put-many", "delete"]
