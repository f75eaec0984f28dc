"""Refs: one version, pinned while the ref lives, and on its way to another process by a lease."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import time

import pytest
import torch

import memstore
from memstore.engine import syscalls
from memstore.engine.sync.primitives import boot_clock
from tests.children import Child, Wire, in_child
from tests.inside import root_of
from tests.store.backends import open_store, overwrite_and_delete
from tests.support import faults
from tests.support.equality import assert_same

VALUES = {"inline": torch.arange(5), "segment": torch.arange(5000), "nested": {"a": torch.randn(1000), "b": [1, None]}}


@pytest.fixture(params=VALUES)
def value(request: pytest.FixtureRequest) -> object:
    return VALUES[request.param]


def test_it_pins_its_version(store: memstore.Store, value: object) -> None:
    version = store.put("key", value)
    ref = store.ref("key")
    assert (ref.key, ref.version, ref.root) == ("key", version, store.root)
    overwrite_and_delete(store)
    for _ in range(2):
        assert_same(value, ref.get())
    assert not store.get("key").any()


@pytest.mark.embedded
def test_it_lets_go_when_it_dies(store: memstore.Store) -> None:
    store.put("key", VALUES["segment"])
    ref = store.ref("key")
    overwrite_and_delete(store)
    assert store.stats().pinned_bytes > 0
    del ref
    store.gc()
    assert store.stats().pinned_bytes == store.stats().reusable_bytes == 0


def test_it_takes_gets_options(store: memstore.Store) -> None:
    store.put("key", torch.arange(1000.0))
    ref = store.ref("key")
    overwrite_and_delete(store)
    out = torch.zeros(1000)
    ref.get().zero_()  # each get maps the version anew
    assert ref.get(out=out) is out
    assert torch.equal(out, torch.arange(1000.0))
    assert ref.get(dtype=torch.float64).dtype == torch.float64
    assert ref.get(like=torch.zeros(1000, dtype=torch.float16)).dtype == torch.float16
    assert ref.get(device="cpu", strict=True, non_blocking=True, timeout=5.0).sum() == out.sum()
    with pytest.raises(memstore.StructureMismatchError):
        ref.get(out=torch.zeros(3))
    with pytest.raises(TypeError):
        ref.get(colour="blue")


def test_it_outlives_its_store(root: str, value: object) -> None:
    store = open_store(root)
    store.put("key", value)
    ref = store.ref("key")
    store.close()
    assert_same(value, ref.get())
    del store
    assert_same(value, ref.get())


def test_another_process_gets_that_very_version(store: memstore.Store, value: object) -> None:
    store.put("key", value)
    with Child(_wait_and_get) as child:
        child.send(store.ref("key"))  # the ref dies here at once; its lease holds
        child.receive()
        overwrite_and_delete(store)
        child.send("go")
        assert_same(value, child.receive())
    del child


def test_what_arrives_is_read_as_its_store_was_opened(root: str) -> None:
    with open_store(root, verify=True, allow_pickle=True, timeout=3.0) as store:
        store.put("key", [len])
        ref = pickle.loads(pickle.dumps(store.ref("key", lease=7.0)))
        assert ref.get() == [len]
        assert (ref._pin.options.verify, ref._pin.options.timeout, ref._pin.options.lease) == (True, 3.0, 7.0)


def _wait_and_get(wire: Wire) -> object:
    ref = wire.receive()
    wire.send()
    wire.receive()
    value = ref.get()
    return pickle.loads(pickle.dumps(value))


@pytest.mark.embedded
def test_a_lease_bridges_the_time_that_nobody_holds_it(store: memstore.Store, value: object) -> None:
    store.put("key", value)
    sent = pickle.dumps(store.ref("key"))
    overwrite_and_delete(store)
    assert_same(value, pickle.loads(sent).get())
    assert_same(value, in_child(_get_pickled, sent))
    for segment in _leases(store):
        _end_lease(store, segment)
    store.gc()


@pytest.mark.embedded
def test_puts_of_its_size_leave_a_leased_file_alone(store: memstore.Store) -> None:
    store.put("key", VALUES["segment"])
    sent = pickle.dumps(store.ref("key"))
    for number in range(6):
        store.put("key", torch.full((5000,), number))
    assert_same(VALUES["segment"], pickle.loads(sent).get())
    for segment in _leases(store):
        _end_lease(store, segment)
    store.gc()


def _get_pickled(sent: bytes) -> object:
    return pickle.loads(pickle.dumps(pickle.loads(sent).get()))


def _leases(store: memstore.Store) -> dict[int, int]:
    root = root_of(store)
    with root.guard:
        return root.catalog.view(lambda transaction: dict(transaction.numbers("leases", 100)))


def _end_lease(store: memstore.Store, segment: int) -> None:
    """Instead of waiting for it."""
    root = root_of(store)

    def end() -> None:
        with root.guard:
            root.catalog.update(lambda transaction: transaction.put_number("leases", segment, boot_clock() - 1))

    root.mutex.run(end, time.monotonic() + 10)


@pytest.mark.embedded
def test_after_the_lease_the_version_is_gone(store: memstore.Store) -> None:
    store.put("key", VALUES["segment"])
    ref = store.ref("key")
    sent = pickle.dumps(ref)
    version = ref.version
    del ref
    overwrite_and_delete(store)
    (segment,) = _leases(store)
    _end_lease(store, segment)
    assert store.gc() > 0
    late = pickle.loads(sent)
    with pytest.raises(memstore.VersionGoneError, match=rf"version {version} of 'key'.*lease of 60 s") as caught:
        late.get()
    assert caught.value.key == "key"
    assert isinstance(caught.value, KeyError)


@pytest.mark.embedded
def test_a_lease_that_ended_pins_nothing(store: memstore.Store) -> None:
    store.put("key", VALUES["segment"])
    pickle.dumps(store.ref("key"))
    overwrite_and_delete(store)
    assert store.stats().pinned_bytes > 0
    (segment,) = _leases(store)
    _end_lease(store, segment)
    assert store.stats().pinned_bytes == 0
    assert store.stats().reusable_bytes > 0
    store.gc()


@pytest.mark.embedded
def test_a_longer_lease_wins(store: memstore.Store) -> None:
    store.put("key", VALUES["segment"])
    pickle.dumps(store.ref("key", lease=1000.0))
    (until,) = _leases(store).values()
    pickle.dumps(store.ref("key", lease=1.0))
    assert list(_leases(store).values()) == [until]
    assert until - boot_clock() > 900e9
    store.delete("key")
    _end_lease(store, *_leases(store))
    store.gc()
    assert _leases(store) == {}


@pytest.mark.embedded
@pytest.mark.parametrize("lease", [float("inf"), 1e30, 0, 0.0001])
def test_any_lease_will_do(store: memstore.Store, lease: float) -> None:
    store.put("key", VALUES["segment"])
    ref = store.ref("key", lease=lease)
    assert_same(VALUES["segment"], pickle.loads(pickle.dumps(ref)).get())
    store.delete("key")
    for segment in _leases(store):
        _end_lease(store, segment)


@pytest.mark.embedded
def test_a_lease_ends_with_the_machines_boot(scratch: str) -> None:
    """Its time is counted from the boot: after another one it might never end."""
    sent = in_child(_lend_and_overwrite, scratch)
    with open_store(scratch) as store:  # the same boot: it holds
        assert_same(VALUES["segment"], in_child(_get_pickled, sent))
        assert len(_leases(store)) == 1
        folder = f"{scratch}/segments"
        assert len(os.listdir(folder)) == 2
    del store
    gc.collect()
    _reboot(scratch)
    with open_store(scratch) as store:
        assert _leases(store) == {}
        store.gc()
        assert len(os.listdir(folder)) == 1
        with pytest.raises(memstore.VersionGoneError, match="'key'"):
            pickle.loads(sent).get()
        assert not store.get("key").any()
        again = pickle.dumps(store.ref("key"))
        store.delete("key")
        assert not pickle.loads(again).get().any()  # leases of this boot are kept


def _lend_and_overwrite(root: str) -> bytes:
    with open_store(root) as store:
        store.put("key", VALUES["segment"])
        sent = pickle.dumps(store.ref("key", lease=float("inf")))
        store.put("key", torch.zeros(5000))
        return sent


def _reboot(root: str) -> None:
    """Makes the lock page of a store that nobody uses one of another boot."""
    with open(f"{root}/lock", "r+b") as file:
        file.seek(syscalls.MUTEX_SIZE + 8)  # behind the mutex and the magic
        file.write(b"another boot's id")


@pytest.mark.parametrize("lease", [float("nan"), -1.0, "long", None])
def test_a_lease_is_a_number(store: memstore.Store, lease: object) -> None:
    store.put("key", 1)
    with pytest.raises((TypeError, ValueError)):
        store.ref("key", lease=lease)  # type: ignore[arg-type]


@pytest.mark.embedded
def test_it_is_small_when_pickled(store: memstore.Store) -> None:
    store.put("key", torch.zeros(1 << 20))
    assert len(pickle.dumps(store.ref("key"))) < 600
    store.delete("key")
    _end_lease(store, *_leases(store))


def test_refs_compare_by_what_they_refer_to(store: memstore.Store) -> None:
    store.put("key", 1)
    one, other = store.ref("key"), store.ref("key")
    assert one == other and hash(one) == hash(other) and one is not other
    assert pickle.loads(pickle.dumps(one)) == one
    store.put("key", 2)
    assert store.ref("key") != one
    assert one != "key"
    assert {one, other} == {one}
    assert "'key'" in repr(one) and str(one.version) in repr(one)


def test_a_read_only_store_lends_inline_refs_only(store: memstore.Store) -> None:
    store.put_many({"small": 1, "large": VALUES["segment"]})
    with open_store(store.root, "r") as reader:
        assert pickle.loads(pickle.dumps(reader.ref("small"))).get() == 1
        ref = reader.ref("large")
        assert_same(VALUES["segment"], ref.get())
        with pytest.raises(memstore.ReadOnlyError, match="writes a lease.*'r\\+'"):
            pickle.dumps(ref)


@pytest.mark.embedded
def test_a_ref_of_a_store_that_is_gone_says_so(scratch: str) -> None:
    with open_store(scratch) as store:
        store.put("key", 1)
        sent = pickle.dumps(store.ref("key"))
    shutil.rmtree(scratch)
    with pytest.raises(memstore.NotAStoreError):
        pickle.loads(sent)


@pytest.mark.embedded
@pytest.mark.parametrize("name", ["inline", "segment"])
def test_a_ref_of_another_store_at_the_same_path_is_refused(scratch: str, name: str) -> None:
    """The other store may have the same key, version and file name: what it holds there is not what was meant."""
    sent = in_child(_lend, scratch, VALUES[name])
    shutil.rmtree(scratch)
    with open_store(scratch) as other:
        other.put("key", torch.zeros_like(VALUES[name]))
        for receive in (pickle.loads, lambda sent: in_child(_get_pickled, sent)):
            with pytest.raises(memstore.VersionGoneError, match=rf"version 1 of 'key'.*{scratch} is another store"):
                receive(sent)
        assert pickle.loads(pickle.dumps(other.ref("key"))).version == 1
        for segment in _leases(other):
            _end_lease(other, segment)


def _lend(root: str, value: object) -> bytes:
    with open_store(root) as store:
        store.put("key", value)
        return pickle.dumps(store.ref("key"))


@pytest.mark.embedded
def test_a_ref_whose_store_was_replaced_while_it_was_open_is_told(scratch: str) -> None:
    with open_store(scratch) as store:
        store.put("key", VALUES["segment"])
        ref, sent = store.ref("key"), pickle.dumps(store.ref("key"))
        shutil.rmtree(scratch)
        with open_store(scratch) as other:
            other.put("key", torch.zeros(5000))
            for call, why in ((ref.get, "was replaced meanwhile"), (lambda: pickle.loads(sent), "another store")):
                with pytest.raises(memstore.VersionGoneError, match=f"'key'.* {scratch} .*{why}") as caught:
                    call()
                assert caught.value.key == "key"
            assert not other.get("key").any()


@pytest.mark.embedded
def test_it_never_pins_a_file_that_was_swept_while_it_was_made(store: memstore.Store) -> None:
    """Between opening a file and locking it, it was replaced and unlinked: what then is held nobody can open again."""
    store.put("key", torch.zeros(5000))
    number = faults.record(lambda: store.ref("key")).index("lock_shared") + 1
    with faults.at_step(number, lambda: in_child(_replace_and_sweep, store.root)):
        ref = store.ref("key")
    assert torch.equal(ref.get(), pickle.loads(pickle.dumps(ref)).get())


def _replace_and_sweep(root: str) -> None:
    with open_store(root) as store:
        store.put("key", torch.ones(5000))
        store.gc()
