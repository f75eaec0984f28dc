"""Followers: a module that a thread keeps at the newest version, and requests that use it meanwhile."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memstore
from tests.children import Child, Wire
from tests.store.backends import open_store

PATIENCE = 60.0
WIDTH = 64


class Layers(torch.nn.Module):
    """Many tensors, which are all filled with the number of their version."""

    def __init__(self, number: float = 0.0, width: int = WIDTH, layers: int = 20) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.full((width, width), float(number)) for _ in range(layers))

    def numbers(self) -> set[float]:
        """Looks at each tensor, so slowly that a copy could come in between."""
        found: set[float] = set()
        for layer in self.layers:
            found |= {layer[0, 0].item(), layer[-1, -1].item()}
            time.sleep(1e-4)
        return found


def put(store: memstore.Store, number: float, width: int = WIDTH, key: str = "policy") -> int:
    return store.put(key, Layers(number, width).state_dict())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_version_is_loaded_and_told(store: memstore.Store) -> None:
    told: list[int] = []
    model, base, version = Layers(), 0, 0
    with memstore.follow(store, "policy", model, on_version=told.append) as follower:
        assert follower.version == 0
        for number in (1, 2, 3):
            version = put(store, number)
            base = version - number  # versions of a served store begin far above 0
            assert follower.wait(newer_than=version - 1, timeout=PATIENCE) == version
            with follower.use() as (current, loaded):
                assert (current is model, loaded, current.numbers()) == (True, version, {float(number)})
        status = follower.status()
        assert (status.version, status.newest, status.lag, status.loads) == (version, version, 0.0, 3)
        assert status.copied > 0 and status.error is None
        until(lambda: told == [base + 1, base + 2, base + 3])


def trainer(wire: Wire, root: str, versions: int) -> None:
    with memstore.open(root) as store:
        for number in range(2, versions + 2):
            put(store, number)
            time.sleep(0.01)


@pytest.mark.parametrize("kind", ["one module", "spare", "lock"])
def test_no_request_sees_two_versions(store: memstore.Store, kind: str) -> None:
    base = put(store, 1.0) - 1
    model, lock = Layers(), threading.Lock()
    options = {"spare": {"spare": Layers()}, "lock": {"lock": lock}}.get(kind, {})
    seen: list[tuple[int, set[float]]] = []
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            if kind == "lock":
                with lock:
                    seen.append((follower.version, model.numbers()))
            else:
                with follower.use() as (current, version):
                    seen.append((version, current.numbers()))

    with memstore.follow(store, "policy", model, **options) as follower:
        follower.wait(timeout=PATIENCE)
        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        with Child(trainer, store.root, 40) as child:
            child.receive()
        follower.wait(newer_than=base + 40, timeout=PATIENCE)
        is_over.set()
        for thread in threads:
            thread.join()
    assert {(float(version - base),) for version, _ in seen} == {tuple(numbers) for _, numbers in seen}
    assert all(numbers == {float(version - base)} for version, numbers in seen)
    assert len({version for version, _ in seen}) > 2, "it was changed under the requests"


def test_a_request_keeps_its_version_and_a_copy_waits_for_it(store: memstore.Store) -> None:
    base = put(store, 1.0) - 1
    with memstore.follow(store, "policy", Layers(), timeout=PATIENCE) as follower:
        follower.wait()
        with follower.use() as (model, version):
            put(store, 2.0)
            with pytest.raises(memstore.StoreTimeoutError):
                follower.wait(newer_than=base + 1, timeout=0.3)
            with pytest.raises(memstore.StoreTimeoutError, match="use\\(\\) twice"), follower.use(timeout=0.1):
                pass
            assert (version, follower.version, model.numbers()) == (base + 1, base + 1, {1.0})
            assert follower.status().newest == base + 2 and follower.status().lag > 0.1
        assert follower.wait(newer_than=base + 1) == base + 2


def test_a_request_that_takes_long_does_not_keep_others_out(store: memstore.Store) -> None:
    base = put(store, 1.0) - 1
    with memstore.follow(store, "policy", Layers(), timeout=0.2) as follower:
        follower.wait(timeout=PATIENCE)
        with follower.use():
            put(store, 2.0)
            until(lambda: isinstance(follower.error, memstore.StoreTimeoutError))
            with follower.use(timeout=PATIENCE) as (_, version):
                assert version == base + 1
        assert follower.wait(newer_than=base + 1, timeout=PATIENCE) == base + 2
        assert follower.error is None


def test_with_a_spare_module_nobody_waits(store: memstore.Store) -> None:
    base = put(store, 1.0) - 1
    model = Layers()
    with memstore.follow(store, "policy", model, spare=copy.deepcopy(model)) as follower:
        first = follower.wait(timeout=PATIENCE)
        with follower.use() as (old, version):
            put(store, 2.0)
            follower.wait(newer_than=first, timeout=PATIENCE)
            with follower.use(timeout=0.0) as (new, newer):
                assert (version, newer) == (base + 1, base + 2) and new is not old
                assert (old.numbers(), new.numbers()) == ({1.0}, {2.0})
            put(store, 3.0)  # which would go into the module that is still in use
            with pytest.raises(memstore.StoreTimeoutError):
                follower.wait(newer_than=base + 2, timeout=0.3)
            assert old.numbers() == {1.0}
        assert follower.wait(newer_than=base + 2, timeout=PATIENCE) == base + 3


@pytest.mark.embedded
@pytest.mark.parametrize("has_spare", [False, True])
def test_requests_wait_for_no_more_than_the_copy(store: memstore.Store, has_spare: bool) -> None:
    slow, slack = 1.5, 0.7
    waits: list[float] = []
    copies: list[float] = []
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            began = time.monotonic()
            with follower.use():
                waits.append(time.monotonic() - began)
            time.sleep(1e-3)

    def note(version: int) -> None:  # what else a load does may take long
        copies.append(follower.status().copied)
        time.sleep(slow)

    spare = Layers(width=512) if has_spare else None
    with memstore.follow(store, "policy", Layers(width=512), spare=spare, on_version=note) as follower:
        first = put(store, 1.0, 512)  # from here on there is a follower, whom note asks
        follower.wait(timeout=PATIENCE)
        threads = [threading.Thread(target=serve) for _ in range(2)]
        for thread in threads:
            thread.start()
        put(store, 2.0, 512)
        follower.wait(newer_than=first, timeout=PATIENCE)
        until(lambda: len(copies) == 2)
        is_over.set()
        for thread in threads:
            thread.join()
    assert len(waits) > 20
    assert max(waits) < slack + (0.0 if has_spare else max(copies))


def test_a_version_that_does_not_fit_is_left_out(store: memstore.Store, caplog: pytest.LogCaptureFixture) -> None:
    base = put(store, 1.0) - 1
    with memstore.follow(store, "policy", Layers()) as follower:
        follower.wait(timeout=PATIENCE)
        put(store, 2.0, width=8)
        with pytest.raises(memstore.StructureMismatchError, match=r"\[8, 8\]"):
            follower.wait(newer_than=base + 1, timeout=PATIENCE)
        with follower.use() as (model, version):
            assert (version, model.numbers()) == (base + 1, {1.0})
        assert isinstance(follower.status().error, memstore.StructureMismatchError)
        put(store, 3.0)
        assert follower.wait(newer_than=base + 1, timeout=PATIENCE) == base + 3
        assert follower.error is None
    assert [record.levelno for record in caplog.records if f"version {base + 2}" in record.message] == [logging.WARNING]


def test_a_deleted_key_changes_nothing(store: memstore.Store) -> None:
    base = put(store, 1.0) - 1
    with memstore.follow(store, "policy", Layers()) as follower:
        follower.wait(timeout=PATIENCE)
        store.delete("policy")
        status = follower.status()
        assert (status.version, status.newest, status.lag) == (base + 1, None, 0.0)
        put(store, 2.0)
        assert follower.wait(newer_than=base + 1, timeout=PATIENCE) == base + 2


@pytest.mark.embedded
def test_the_store_that_comes_in_the_place_of_one_is_followed(root: str) -> None:
    with open_store(root) as store:
        put(store, 1.0)
        put(store, 2.0)
        with memstore.follow(store, "policy", Layers()) as follower:
            assert follower.wait(timeout=PATIENCE) == 2
            memstore.destroy(root)
            until(lambda: isinstance(follower.error, memstore.NotAStoreError))
            with follower.use() as (model, version):
                assert (version, model.numbers()) == (2, {2.0})
            assert follower.status().newest is None
            with memstore.open(root) as another:
                put(another, 7.0)
                until(lambda: follower.version == 1)
                with follower.use() as (model, _):
                    assert model.numbers() == {7.0}


@pytest.mark.embedded
def test_a_copy_that_fails_lets_nobody_in(root: str) -> None:
    with open_store(root, verify=True, checksum=True) as store:
        put(store, 1.0, 256)
        with memstore.follow(store, "policy", Layers(width=256), every=0.5) as follower:
            follower.wait(timeout=PATIENCE)
            before = time.monotonic()
            with follower.use():  # the copy waits until the damage is done
                put(store, 2.0, 256)
                (file,) = store.info("policy").files
                damage(Path(file))
            until(lambda: isinstance(follower.error, memstore.CorruptionError))
            with pytest.raises(memstore.CorruptionError), follower.use():
                pass
            put(store, 3.0, 256)
            assert follower.wait(newer_than=2, timeout=PATIENCE) == 3
            assert time.monotonic() - before > 0.5
            with follower.use() as (model, version):
                assert (version, model.numbers()) == (3, {3.0})


def damage(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-64, 2)
        opened.write(b"\xff" * 32)


def in_a_child(wire: Wire, follower: memstore.Follower[Layers]) -> tuple[int, set[float], str, str]:
    with follower.use() as (model, version):
        numbers = model.numbers()
    try:
        follower.wait(newer_than=version, timeout=PATIENCE)
        waited = "a version"
    except memstore.StoreClosedError as error:
        waited = str(error)
    follower.close()
    return version, numbers, waited, repr(follower)


def test_a_forked_child_has_a_whole_module_and_follows_nothing(store: memstore.Store) -> None:
    base = put(store, 1.0) - 1
    is_over = threading.Event()

    def train() -> None:
        while not is_over.is_set():
            put(store, float(store.version("policy") + 1 - base))

    thread = threading.Thread(target=train)
    with memstore.follow(store, "policy", Layers()) as follower:
        follower.wait(timeout=PATIENCE)
        thread.start()
        try:
            for _ in range(4):  # at any moment of a load
                with Child(in_a_child, follower) as child:
                    version, numbers, waited, text = child.receive()
                assert numbers == {float(version - base)}
                assert "follow the key anew" in waited and "ended" in text
        finally:
            is_over.set()
            thread.join()
        follower.wait(newer_than=base + 1, timeout=PATIENCE)


def test_loads_are_as_far_apart_as_asked(store: memstore.Store) -> None:
    put(store, 1.0)
    times: list[float] = []
    with memstore.follow(store, "policy", Layers(), every=0.4, on_version=lambda _: times.append(time.monotonic())):
        for number in range(2, 30):
            put(store, number)
            time.sleep(0.03)
    assert 2 <= len(times) <= 4
    assert all(late - early > 0.3 for early, late in zip(times, times[1:], strict=False))


def test_what_on_version_raises_is_logged(store: memstore.Store, caplog: pytest.LogCaptureFixture) -> None:
    def fail(version: int) -> None:
        raise RuntimeError("of the user's")

    with memstore.follow(store, "policy", Layers(), on_version=fail) as follower:
        for number in (1, 2):
            version = put(store, number)
            follower.wait(newer_than=version - 1, timeout=PATIENCE)
        until(lambda: sum("on_version" in record.message for record in caplog.records) == 2)
    caplog.clear()  # its records hold the follower's frames


def test_a_follower_that_was_closed_follows_nothing_more(store: memstore.Store) -> None:
    base = put(store, 1.0) - 1
    follower = memstore.follow(store, "policy", Layers())
    follower.wait(timeout=PATIENCE)
    follower.close()
    follower.close()
    put(store, 2.0)
    with follower.use() as (_, version):
        assert version == base + 1
    with pytest.raises(memstore.StoreClosedError, match=r"memstore\.follow"):
        follower.wait(newer_than=base + 1, timeout=PATIENCE)


@pytest.mark.embedded
def test_a_store_that_its_user_closes_ends_the_follower(root: str) -> None:
    store = open_store(root)
    follower = memstore.follow(store, "policy", Layers())
    store.close()
    with pytest.raises(memstore.StoreClosedError, match="closed"):
        follower.wait(timeout=PATIENCE)
    follower.close()


def test_nothing_is_kept_of_a_version_that_was_left_out(store: memstore.Store) -> None:
    put(store, 1.0, 512)
    with memstore.follow(store, "policy", Layers()) as follower:
        until(lambda: isinstance(follower.error, memstore.StructureMismatchError))
        store.delete("policy")
        until(lambda: not store.stats().pinned_bytes)


def test_arguments_of_another_kind_are_refused(store: memstore.Store) -> None:
    model = Layers()
    with pytest.raises(TypeError, match="swapped"):
        memstore.follow("policy", store, model)  # pyright: ignore
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        memstore.follow(store, "policy", model.state_dict())  # pyright: ignore
    with pytest.raises(ValueError, match="model itself"):
        memstore.follow(store, "policy", model, spare=model)
    with pytest.raises(ValueError, match=r"shares 'layers\.0'"):
        memstore.follow(store, "policy", model, spare=copy.copy(model))
    with pytest.raises(ValueError, match="exclude each other"):
        memstore.follow(store, "policy", model, spare=Layers(), lock=threading.Lock())
    with pytest.raises(TypeError, match="threading"):
        memstore.follow(store, "policy", model, lock="mine")  # pyright: ignore
    with pytest.raises(ValueError):
        memstore.follow(store, "policy", model, every=-1.0)
    with pytest.raises(memstore.InvalidKeyError):
        memstore.follow(store, "", model)


def test_a_follower_is_not_sent(store: memstore.Store) -> None:
    said = r"send the store and the key, and call memstore\.follow there"
    with memstore.follow(store, "policy", Layers()) as follower, pytest.raises(TypeError, match=said):
        pickle.dumps(follower)
