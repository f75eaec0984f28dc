"""Values that a host of several has moved to its disk: others get them as before, and nothing of them is left over."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import memstore
from memstore.distributed.catalog import CatalogTables
from memstore.engine import syscalls
from memstore.errors import StorageError, StoreFullError
from tests.crash.leftovers import left_after_gc
from tests.distributed.client.hosts import Cluster, await_, cluster_of, hand_over
from tests.small_tmpfs import on_small_tmpfs

MIB = 1 << 20
ROOM = 6  # values


def value(number: int) -> torch.Tensor:
    return torch.full((MIB // 4,), float(number))


def make_small(cluster: Cluster, number: int, disk: str) -> memstore.Store:
    """Gives a host room for six values, and a folder for others."""
    store = cluster.stores[number]
    memstore.open(store.root, capacity=ROOM * (MIB + 8192), spill=disk).close()
    return store


@pytest.fixture
def disk(scratch: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=os.path.dirname(scratch), prefix="disk-") as path:
        yield f"{path}/spill"


def files_in(disk: str) -> int:
    return sum(name.endswith(".safetensors") for _, _, names in os.walk(disk) for name in names)


def check(store: memstore.Store, keys: list[str]) -> None:
    for number, key in enumerate(keys):
        assert torch.equal(store.get(key), value(number)), key


def test_what_is_lent_moves_and_is_got_fetched_viewed_and_given_back(pair: Cluster, disk: str) -> None:
    here, there = make_small(pair, 0, disk), pair.stores[1]
    keys = [f"run/{number}" for number in range(2 * ROOM)]
    for number, key in enumerate(keys):
        here.put(key, value(number))
    moved = [key for key in keys if here.info(key).spilled]
    assert len(moved) >= ROOM and here.stats().spilled_bytes > ROOM * MIB
    assert not any(there.info(key).spilled for key in keys), "that is of the host that is asked"
    view = there.view(moved[0])
    assert torch.equal(view[7:9], value(int(moved[0][4:]))[7:9])
    check(there, keys)
    check(here, keys)
    for store in (here, there):
        assert store.verify().ok
    there.put(moved[1], 1)
    there.delete(moved[2])
    here.put(moved[3], value(99))
    for key in set(keys) - {moved[0]}:
        there.delete(key, missing_ok=True)
    del view
    there.delete(moved[0])
    await_(lambda: not pair.homes[0].look(lambda tables: tables.all_lent(0, 1)))
    here.gc()
    await_(lambda: files_in(disk) == 0)
    assert left_after_gc(here) == []


def test_own_values_that_were_moved_go_with_their_group(homes: Cluster, disk: str) -> None:
    here, there = make_small(homes, 0, disk), homes.stores[1]
    group = homes.key_at(0).partition("/")[0]
    keys = [f"{group}/{number}" for number in range(2 * ROOM)]
    for number, key in enumerate(keys):
        here.put(key, value(number))
    assert here.stats().spilled_bytes > ROOM * MIB
    check(there, keys)
    hand_over(homes, keys[0], 1)
    check(there, keys)
    check(here, keys)
    assert here.verify().ok and there.verify().ok
    hand_over(homes, keys[0], 0)
    check(here, keys)
    for key in keys:
        there.delete(key)
    here.gc()
    assert files_in(disk) == 0 and left_after_gc(here) == []


def test_who_fetches_into_a_full_store_drops_copies_and_then_moves_values(pair: Cluster, disk: str) -> None:
    here, there = pair.stores[0], make_small(pair, 1, disk)
    own, keys = [f"own/{number}" for number in range(ROOM)], [f"run/{number}" for number in range(3)]
    for number, key in enumerate(own):
        there.put(key, value(number))
    for number, key in enumerate(keys):
        here.put(key, value(number))
    before = there.stats().spilled_bytes
    check(there, keys)
    assert len(pair.homes[1].look(lambda tables: tables.copies(b"", 10))) >= 1
    moved = there.stats().spilled_bytes
    assert before < moved < 3 * MIB, "one after the other took the same room"
    check(there, own)
    assert there.verify().ok


def test_rows_that_are_written_in_place_and_lent_stay(pair: Cluster, disk: str) -> None:
    here = make_small(pair, 0, disk)
    data = here.create_dataset("run/rows", ((MIB // 4,), torch.float32), capacity=2)
    data.extend(value(0)[None])
    del data
    for number in range(ROOM):
        here.put(f"run/{number}", value(number))
    assert here.stats().spilled_bytes > MIB and not here.info("run/rows").spilled
    data = here.open_dataset("run/rows")
    data.extend(value(1)[None])
    assert torch.equal(data[1], value(1))


def test_parts_of_a_value_on_two_hosts_move(homes: Cluster, disk: str) -> None:
    here, there = make_small(homes, 0, disk), homes.stores[1]
    key, whole = homes.key_at(1), torch.arange(2 * MIB // 4, dtype=torch.float32).reshape(2, -1)
    for rank, store in enumerate((here, there)):
        part = memstore.TensorShard(whole[rank : rank + 1], global_shape=tuple(whole.shape), offsets=(rank, 0))
        store.put_sharded(key, {"w": part}, attempt="1", rank=rank, world_size=2, wait=False)
    group = homes.key_at(0).partition("/")[0]
    for number in range(ROOM):
        here.put(f"{group}/{number}", value(number))
    assert here.info(key).spilled
    for store in (here, there):
        assert torch.equal(store.get(key)["w"], whole)
        assert torch.equal(store.view(key)["w"][0, :5], whole[0, :5])
    there.delete(key)
    await_(lambda: not homes.homes[0].look(lambda tables: tables.all_lent(0, 1)))
    assert here.verify().ok


def test_a_part_that_was_lent_and_moved_is_taken_back_and_published(homes: Cluster, disk: str) -> None:
    """The group comes to the rank's host between the lend and the question, which is then a transaction there."""
    home = homes.homes[0]
    here = make_small(homes, 0, disk)
    key = homes.key_at(1).encode()
    here.put(key.decode(), value(0))
    ((place, lent),) = home.look(lambda tables: tables.all_lent(0, 10))
    for number in range(ROOM):
        here.put(homes.key_at(0).replace("/k", f"/{number}"), value(number))
    assert here.info(key.decode()).spilled
    rows = home.root.catalog

    def states() -> tuple[int, int]:
        row, counters = rows.view(lambda transaction: (transaction.segment(place.segment), transaction.counters()))
        assert row is not None
        return row.state, counters.filling

    def prepare(tables: CatalogTables) -> None:
        tables._prepare(place, key)

    home.run(prepare)
    assert states()[0] == 4
    home.run(lambda tables: tables.lend(place, lent))
    assert states()[0] == 2 and torch.equal(homes.stores[1].get(key.decode()), value(0))
    home.run(prepare)
    home.run(lambda tables: tables.retire(place))
    here.gc()
    assert rows.view(lambda transaction: transaction.segment(place.segment)) is None and files_in(disk) == 0


def test_a_disk_that_is_gone_is_told_by_name_wherever_its_values_are_read(pair: Cluster, disk: str) -> None:
    here, there = make_small(pair, 0, disk), pair.stores[1]
    keys = [f"run/{number}" for number in range(ROOM + 2)]
    for number, key in enumerate(keys):
        here.put(key, value(number))
    moved = next(key for key in keys if here.info(key).spilled)
    os.rename(disk, f"{disk}.away")
    for store in (here, there):
        with pytest.raises(StorageError, match="isn't there: mount its disk") as raised:
            store.get(moved)
        del raised
    with pytest.raises(StorageError):
        there.view(moved)[0].item()
    stays = next(key for key in keys if not here.info(key).spilled)
    assert there.get(stays)[0] == float(stays[4:])
    os.rename(f"{disk}.away", disk)
    check(there, keys)


def test_of_rows_that_another_host_wants_the_disk_reads_few_others(pair: Cluster, disk_root: str) -> None:
    here, there = make_small(pair, 0, f"{disk_root}-spill"), pair.stores[1]
    rows = torch.arange(4 * MIB // 4, dtype=torch.float32).view(-1, 1024)
    here.put("run/rows", rows)
    for number in range(ROOM):
        here.put(f"run/{number}", value(number))
    (path,) = here.info("run/rows").files
    assert here.info("run/rows").spilled
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pages = np.memmap(path, mode="r")
    first: int = pages.ctypes.data

    def resident() -> int:
        return sum(map(syscalls.is_resident, range(first, first + len(pages), syscalls.PAGE)))

    before = resident()
    if before > 16:
        pytest.skip("this file system keeps its pages")
    picked = torch.arange(0, len(rows), 128)
    assert torch.equal(memstore.read_rows(there.view("run/rows"), picked), rows[picked])
    assert resident() - before <= 4 * len(picked), "around each row the kernel would read 32 pages"
    assert torch.equal(there.get("run/rows"), rows)


def _full_disk(folder: str, root: str) -> None:
    with cluster_of(root, False, True) as pair:
        here, there = make_small(pair, 0, f"{folder}/spill"), pair.stores[1]
        keys: list[str] = []
        with pytest.raises(StoreFullError) as raised:
            for number in range(20):
                here.put(f"run/{number}", value(number))
                keys.append(f"run/{number}")
        assert f"{folder}/spill" in str(raised.value) and "free" in str(raised.value)
        assert ROOM + 1 <= len(keys) <= ROOM + 3
        del raised
        for store in (there, here):
            check(store, keys)
        there.put("away", value(5))
        assert torch.equal(here.get("away"), value(5)), "it is read into memory of the process"
        here.delete(keys[0])
        await_(lambda: len(pair.homes[0].look(lambda tables: tables.all_lent(0, 100))) == len(keys) - 1)
        here.put("run/more", value(7))
        assert torch.equal(there.get("run/more"), value(7)) and here.verify().ok


def test_a_full_disk_is_told_and_nothing_is_lost(scratch: str) -> None:
    on_small_tmpfs(4, _full_disk, scratch)
