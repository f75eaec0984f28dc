"""A store on shared storage that was made with `--maps`: gets map the files of all hosts, and what is held stays."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from tests.children import Wire, children
from tests.distributed.shared.pairs import GRACE, Pair
from tests.leaks import mapped_files
from tests.support.faults import at_step, raising

SIZE = 1 << 16  # elements


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Its stores have read from each other: what opens a link reads files of its own host, which come before others."""
    path = Path(tempfile.mkdtemp(prefix="mapped-", dir="/dev/shm"))
    try:
        with Pair(path, maps=True) as made:
            for reader, home in ((0, 1), (1, 0)):
                key = made.key_at(home, "link")
                made.stores[home].put(key, torch.ones(SIZE))
                assert float(made.stores[reader].get(key)[0]) == 1.0
            yield made
    finally:
        shutil.rmtree(path, ignore_errors=True)


def put(pair: Pair, number: int, key: str, value: float = 1.0) -> Path:
    """Returns the file."""
    pair.stores[number].put(key, torch.full((SIZE,), value))
    (file,) = pair.stores[number].info(key).files
    return Path(file)


def is_mapped(file: Path) -> bool:
    """In this process, also if it was removed since."""
    return any(one.removesuffix(" (deleted)") == str(file) for one in mapped_files(str(file.parent)))


def wait_until_gone(file: Path) -> None:
    deadline = time.monotonic() + 30
    while file.exists():
        assert time.monotonic() < deadline, "it was replaced, and its host doesn't remove it"
        time.sleep(0.02)


@pytest.mark.parametrize("put_by", [0, 1])
def test_each_host_maps_the_file_that_another_has_put(pair: Pair, put_by: int) -> None:
    for home in range(2):
        key = pair.key_at(home, f"read{put_by}")
        file = put(pair, put_by, key, 3.0)
        for store in pair.stores:
            value = store.get(key)
            assert bool((value == 3.0).all()) and is_mapped(file)
            del value
        assert not is_mapped(file), "what nobody holds is mapped no longer"


def test_what_a_reader_changes_is_its_own(pair: Pair) -> None:
    """As of any value that was got: its pages are copied when they are written."""
    file = put(pair, 0, "own/k", 2.0)
    value = pair.stores[1].get("own/k")
    value.fill_(9.0)
    assert is_mapped(file)
    assert bool((pair.stores[0].get("own/k") == 2.0).all()) and bool((pair.stores[1].get("own/k") == 2.0).all())


def test_a_held_value_outlives_its_version_its_grace_time_and_its_file(pair: Pair) -> None:
    file = put(pair, 0, "held/k", 1.0)
    held = pair.stores[1].get("held/k")
    for number in range(2, 6):
        put(pair, 0, "held/k", float(number))
    wait_until_gone(file)
    pair.stores[0].gc()
    assert is_mapped(file) and bool((held == 1.0).all()), "the file system keeps it for who has mapped it"
    assert bool((pair.stores[1].get("held/k") == 5.0).all())


def test_a_replaced_file_stays_for_its_grace_time_and_a_view_for_longer(pair: Pair) -> None:
    file = put(pair, 0, "grace/k", 1.0)
    view: Any = pair.stores[1].view("grace/k")
    assert float(view[6]) == 1.0
    began = time.monotonic()
    put(pair, 0, "grace/k", 2.0)
    pair.stores[0].gc()
    assert file.exists() or time.monotonic() - began > 0.9 * GRACE, "it was removed before its time"
    wait_until_gone(file)
    assert float(view[8]) == 1.0, "it has mapped the file"


def _read_on(wire: Wire, number: int, pair: Pair) -> tuple[int, int]:
    """Gets what is there, and keeps some of it. Returns how many it got, and the last one's number."""
    store = pair.stores[1]
    held: dict[float, torch.Tensor] = {}
    last = count = 0
    wire.send()
    while not wire.has_message:
        value = store.get("rows/k")
        found = float(value[0])
        assert bool((value == found).all()) and found >= last, "torn, or an older one"
        last, count = int(found), count + 1
        held[found] = value
        for old in sorted(held)[:-3]:
            assert bool((held.pop(old) == old).all()), "what was held has changed"
    return count, last


def test_readers_on_another_host_map_while_a_writer_goes_on(pair: Pair) -> None:
    put(pair, 0, "rows/k", 0.0)
    with children(2, _read_on, pair) as readers:
        for reader in readers:
            reader.receive()
        began, number = time.monotonic(), 0
        while number < 20 or time.monotonic() - began < 2 * GRACE:  # so that files go under who reads
            number += 1
            put(pair, 0, "rows/k", float(number))
        for reader in readers:
            reader.send()
        for reader in readers:
            count, last = reader.receive()
            assert count > 0 and last <= number


@pytest.mark.parametrize("step", ["open_into", "read_at", "map_over"])
def test_a_file_that_is_replaced_and_removed_while_it_is_got_is_looked_up_again(pair: Pair, step: str) -> None:
    """By its host, between two steps of the reader."""
    key = f"under-{step}/k"
    file = put(pair, 0, key, 1.0)

    def replace() -> None:
        def by_its_host() -> None:
            put(pair, 0, key, 2.0)
            wait_until_gone(file)

        other = threading.Thread(target=by_its_host)
        other.start()
        other.join()

    with at_step(1, replace, names=frozenset({step})):
        value = pair.stores[1].get(key)
    assert float(value[0]) in (1.0, 2.0) and bool((value == value[0]).all())
    assert step == "map_over" or float(value[0]) == 2.0
    assert bool((pair.stores[1].get(key) == 2.0).all())


@pytest.mark.parametrize("step", ["open_into", "read_at", "map_over"])
def test_a_stale_file_is_looked_up_again_or_told(pair: Pair, step: str) -> None:
    """ESTALE, as NFS has it. Where the mapping itself is refused so, the error names file and host."""
    key = f"stale-{step}/k"
    file = put(pair, 0, key, 4.0)
    stale = raising(OSError(errno.ESTALE, os.strerror(errno.ESTALE)))
    with at_step(1, stale, names=frozenset({step})):
        if step == "map_over":
            with pytest.raises(memstore.StorageError) as caught:
                pair.stores[1].get(key)
            assert (caught.value.path, caught.value.errno) == (str(file), errno.ESTALE) and caught.value.host
        else:
            assert bool((pair.stores[1].get(key) == 4.0).all())
    assert bool((pair.stores[1].get(key) == 4.0).all())


def test_one_that_never_comes_is_an_error_within_the_timeout(pair: Pair) -> None:
    file = put(pair, 0, "never/k")
    away = file.rename(file.with_suffix(".away"))
    with pytest.raises(memstore.StorageError, match="actimeo") as caught:
        pair.stores[1].get("never/k", timeout=0.3)
    assert str(file) in str(caught.value)
    away.rename(file)
    assert bool((pair.stores[1].get("never/k") == 1.0).all())


def test_damaged_bytes_of_another_host_are_found(pair: Pair) -> None:
    file = put(pair, 0, "damaged/k")
    with open(file, "r+b") as written:
        written.seek(8192)
        written.write(bytes(4096))
    with pytest.raises(memstore.CorruptionError, match="damaged/k"):
        pair.stores[1].get("damaged/k")


def test_slices_and_targets_are_filled_as_elsewhere(pair: Pair) -> None:
    file = put(pair, 0, "parts/k", 6.0)
    before = memstore.bytes_read()
    view: Any = pair.stores[1].view("parts/k")
    assert float(view[10:20].sum()) == 60.0 and memstore.bytes_read() - before < SIZE
    target = torch.zeros(SIZE)
    pair.stores[1].get("parts/k", out=target)
    assert bool((target == 6.0).all())
    del view
    assert not is_mapped(file)
