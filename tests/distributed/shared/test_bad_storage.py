"""Storage that hosts share, and that lies about locks, fails, is full, can't be written, or shows what it likes."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.engine import syscalls
from tests.children import Child, Wire
from tests.distributed.shared.pairs import Pair
from tests.inside import root_of
from tests.support.faults import at_step, die, raising, record

SIZE = 1 << 14  # elements


def put(pair: Pair, number: int, key: str, value: float = 1.0) -> Path:
    """Returns the file."""
    pair.stores[number].put(key, torch.full((SIZE,), value))
    (file,) = pair.stores[number].info(key).files
    return Path(file)


def fails(call: Callable[[], object], code: int, *, names: frozenset[str]) -> list[BaseException]:
    """The errors of a call, where each of these steps in turn fails."""
    errors: list[BaseException] = []
    for step in range(1, 1 + len(record(call, names=names))):
        try:
            with at_step(step, raising(OSError(code, os.strerror(code))), names=names):
                call()
        except Exception as error:
            errors.append(error)
    return errors


# --- locks ------------------------------------------------------------------------------------------------------------


def test_nothing_on_the_storage_is_ever_locked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a storage may grant every lock, refuse all, or have none."""
    locked: list[str] = []
    for name in ("lock_exclusive", "lock_shared", "lock_byte"):
        real: Callable[..., bool] = getattr(syscalls, name)

        def lock(fd: int, *rest: int, real: Callable[..., bool] = real) -> bool:
            locked.append(os.readlink(f"/proc/self/fd/{fd}"))
            return real(fd, *rest)

        monkeypatch.setattr(syscalls, name, lock)
    here, there = pair.stores
    for store in (here, there, here):
        store.put_many({f"locks/{number}": torch.full((SIZE,), float(number)) for number in range(20)})
        assert float(there.get("locks/3")[0]) == 3.0
        view: Any = there.view("locks/4")
        assert float(view[0]) == 4.0
        store.gc()
    here.delete("locks/3")
    pair.open(0).close()
    assert locked and not [path for path in locked if path.startswith(f"{pair.root}/")], "claims are on a local disk"


def _put_and_die(wire: Wire, pair: Pair, step: int) -> None:
    with at_step(step, die, names=frozenset({"sync"})):
        pair.stores[0].put("killed/k", torch.ones(SIZE))


def _put_and_stop(wire: Wire, pair: Pair) -> None:
    def stop() -> None:
        wire.send("fills")
        wire.receive()

    with at_step(1, stop, names=frozenset({"sync"})):
        pair.stores[0].put("stopped/k", torch.full((SIZE,), 4.0))
    wire.send("done")


def test_what_a_killed_process_was_filling_is_swept_by_its_host_alone(pair: Pair) -> None:
    before = pair.files(0)
    with Child(_put_and_die, pair, 1) as child, pytest.raises(RuntimeError):
        child.receive()
    (left,) = set(pair.files(0)) - set(before)
    pair.stores[1].gc()
    assert left.exists(), "other hosts can't know who fills it"
    pair.stores[0].gc()
    assert not left.exists()
    assert pair.stores[0].get("killed/k", None) is None


def test_what_a_living_process_fills_is_not_swept(pair: Pair) -> None:
    with Child(_put_and_stop, pair) as child:
        assert child.receive() == "fills"
        pair.stores[0].gc()
        child.send()
        assert child.receive() == "done"
    assert float(pair.stores[1].get("stopped/k")[0]) == 4.0


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_storage_that_fails_is_a_storage_error_and_changes_nothing(pair: Pair, code: int) -> None:
    key = pair.key_at(0, f"fails{code}")
    put(pair, 0, key)
    version = pair.stores[0].version(key)
    errors = fails(lambda: put(pair, 0, f"{key}-2"), code, names=frozenset({"open_into", "write_at", "sync"}))
    assert {type(error) for error in errors} <= {memstore.StorageError}, errors
    assert errors and all(error.errno == code and error.host for error in errors if isinstance(error, OSError))
    assert pair.stores[1].version(key) == version
    assert float(pair.stores[1].get(key)[0]) == 1.0
    pair.stores[0].gc()
    assert pair.stores[0].stats().filling_bytes == 0


def test_a_full_storage_is_a_full_store(pair: Pair) -> None:
    key = pair.key_at(0, "full")
    errors = fails(lambda: put(pair, 0, key), errno.ENOSPC, names=frozenset({"write_at", "sync"}))
    # a put that fails for want of room is made once more after a sweep, and finds some
    assert all(isinstance(error, memstore.StoreFullError) for error in errors)

    def never(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(syscalls, "sync", never)
        with pytest.raises(memstore.StoreFullError):
            put(pair, 0, key)
    put(pair, 0, key)


def test_a_read_that_fails_says_where(pair: Pair) -> None:
    file = put(pair, 0, "eio/k")
    fault = at_step(1, raising(OSError(errno.EIO, "no answer")), names=frozenset({"read_parts_at"}))
    with fault, pytest.raises(memstore.StorageError, match="server") as caught:
        pair.stores[1].get("eio/k")
    assert (caught.value.path, caught.value.errno) == (str(file), errno.EIO) and caught.value.host
    assert float(pair.stores[1].get("eio/k")[0]) == 1.0


def test_a_file_that_another_host_has_removed_meanwhile_is_looked_up_again(pair: Pair) -> None:
    put(pair, 0, "stale/k")
    put(pair, 0, "stale/first")
    assert float(pair.stores[1].get("stale/first")[0]) == 1.0  # reads what each process reads once, such as the secret
    for name in ("open_into", "read_at", "read_parts_at"):
        with at_step(1, raising(OSError(errno.ESTALE, "stale")), names=frozenset({name})):
            assert float(pair.stores[1].get("stale/k")[0]) == 1.0


# --- what is seen of others' files ------------------------------------------------------------------------------------


def _away(file: Path) -> None:
    file.rename(file.with_suffix(".away"))


def _back(file: Path) -> None:
    file.with_suffix(".away").rename(file)


def _as_zeros(file: Path) -> None:
    file.with_suffix(".away").write_bytes(file.read_bytes())
    file.write_bytes(bytes(file.stat().st_size))


def _short(file: Path) -> None:
    file.with_suffix(".away").write_bytes(file.read_bytes())
    os.truncate(file, 4096)


def _empty(file: Path) -> None:
    file.with_suffix(".away").write_bytes(file.read_bytes())
    os.truncate(file, 0)


HIDDEN = (_away, _as_zeros, _short, _empty)


@pytest.mark.parametrize("hide", HIDDEN)
def test_a_file_that_is_not_whole_here_yet_is_waited_for(pair: Pair, hide: Callable[[Path], None]) -> None:
    key = f"late{hide.__name__}/k"
    file = put(pair, 0, key, 6.0)
    hide(file)
    comes = threading.Timer(0.2, lambda: _back(file))
    comes.start()
    started = time.monotonic()
    assert bool((pair.stores[1].get(key, timeout=20) == 6.0).all())
    assert time.monotonic() - started > 0.1
    comes.join()


@pytest.mark.parametrize("hide", HIDDEN)
def test_one_that_never_comes_is_an_error_within_the_timeout(pair: Pair, hide: Callable[[Path], None]) -> None:
    key = f"never{hide.__name__}/k"
    file = put(pair, 0, key)
    hide(file)
    started = time.monotonic()
    for read in (lambda: pair.stores[1].get(key, timeout=0.4), lambda: pair.stores[1].get_many([key], timeout=0.4)):
        with pytest.raises(memstore.StorageError, match="actimeo") as caught:
            read()
        assert str(file) in str(caught.value) and caught.value.key == key
    assert time.monotonic() - started < 20
    _back(file)


def test_zeros_in_the_middle_are_found_by_checksums(pair: Pair) -> None:
    file = put(pair, 0, "zeros/k")
    with open(file, "r+b") as written:
        written.seek(8192)
        written.write(bytes(4096))
    with pytest.raises(memstore.CorruptionError, match="zeros/k"):
        pair.stores[1].get("zeros/k")
    pair.stores[0].delete("zeros/k")  # other tests verify the store


def test_a_missing_file_of_this_host_is_damage_at_once(pair: Pair) -> None:
    key = pair.key_at(0, "damage")
    put(pair, 0, key).unlink()
    with pytest.raises(memstore.CorruptionError, match="missing"):
        pair.stores[0].get(key)
    pair.stores[0].delete(key)


# --- the storage as a whole -------------------------------------------------------------------------------------------


def test_a_store_that_may_only_read_reads(pair: Pair) -> None:
    put(pair, 1, "reader/k")
    with pair.open(0, "r") as reader:
        assert float(reader.get("reader/k")[0]) == 1.0
        assert float(reader.view("reader/k")[1]) == 1.0
        with pytest.raises(memstore.ReadOnlyError):
            reader.put("reader/k", 1)


def test_a_storage_that_goes_away_is_a_storage_error_until_it_is_back(pair: Pair) -> None:
    put(pair, 0, "away/k")
    root, away = Path(pair.root), Path(f"{pair.root}-away")
    root.rename(away)
    try:
        time.sleep(0.001)  # what was looked at just now is believed for a tenth of that
        for call in (
            lambda: pair.stores[1].get("away/k", timeout=1),
            lambda: pair.stores[0].put("away/k", torch.ones(SIZE), timeout=1),
            lambda: pair.open(0),
        ):
            with pytest.raises((memstore.StorageError, memstore.NotAStoreError), match=r"mounted|doesn't exist"):
                call()
    finally:
        away.rename(root)
    assert float(pair.stores[1].get("away/k")[0]) == 1.0
    assert root_of(pair.stores[0]).is_in_place()
