"""What is left of a buffer after a crash of the host, a copy of the folder, damage and repair; and a full tmpfs."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import memstore
from memstore.engine import CLAIMS_SIZE, CONTROL_SIZE
from tests.overlay import on_overlay
from tests.replay.rows import (
    SPEC,
    check_priorities,
    check_whole,
    in_the_copy,
    new,
    numbers_of,
    ring_of,
    rows,
    there,
    write_data,
)
from tests.small_tmpfs import on_small_tmpfs

BOOT_AT, HEAD_AT, ROWS_AT, MAGIC_AT = 72, 320, 336, 64


def reboot(store: memstore.Store) -> None:
    """As far as the buffer can tell. Nobody has it open."""
    write_data(store, "replay", 0, b"\xff" * 64)  # a mutex that a dead boot has left
    write_data(store, "replay", BOOT_AT, b"another boot!!!!")
    write_data(store, "replay", CONTROL_SIZE, b"\xff" * CLAIMS_SIZE)


@pytest.mark.parametrize("durability", ["disk", "process"])
def test_in_another_boot_the_flushed_rows_are_there(disk_root: str, durability: Any) -> None:
    with memstore.open(disk_root, durability=durability) as store:
        buffer = new(store, sampler="prioritized")
        buffer.extend(rows(0, 4))
        buffer.update_priority([1], 9.0)
        buffer.flush()
        buffer.extend(rows(4, 2))
        del buffer
        reboot(store)
        found = new(store, sampler="prioritized")
        assert there(store, "replay") == {0: 0, 1: 1, 2: 2, 3: 3}
        check_priorities(found)
        priorities = ring_of(found).priorities
        assert priorities is not None and priorities.tree.priorities[1] == 9.0**0.6
        assert found.extend(rows(50, 1)).tolist() == [6]
        found.flush()
        del found, priorities
        reboot(store)
        again = new(store)
        assert there(store, "replay") == {0: 0, 1: 1, 2: 2, 3: 3, 6: 50}
        check_whole(store, again)


def test_one_that_was_never_flushed_is_empty_in_another_boot(disk_store: memstore.Store) -> None:
    new(disk_store).extend(rows(0, 4))
    reboot(disk_store)
    buffer = new(disk_store)
    assert there(disk_store, "replay") == {} and buffer.cursor == 4
    check_whole(disk_store, buffer)


def test_rows_that_were_written_again_after_a_flush_are_gone(disk_store: memstore.Store) -> None:
    buffer = new(disk_store)
    buffer.extend(rows(0, 8))
    buffer.flush()
    buffer.extend(rows(8, 2))
    del buffer
    reboot(disk_store)
    buffer = new(disk_store)
    assert there(disk_store, "replay") == {position: position for position in range(2, 8)}
    check_whole(disk_store, buffer)


def test_a_row_that_reached_the_disk_in_parts_is_gone(disk_store: memstore.Store) -> None:
    """The next row's first bytes over a flushed one, as a crash in the middle of its copy may leave it."""
    buffer = new(disk_store)
    buffer.extend(rows(0, 4))
    buffer.flush()
    offset = next(leaf.offset for leaf in ring_of(buffer).plan.leaves if leaf.name == ("copies",))
    del buffer
    reboot(disk_store)
    write_data(disk_store, "replay", offset + 2 * 64 * 8, b"other")
    buffer = new(disk_store)
    assert there(disk_store, "replay") == {0: 0, 1: 1, 3: 3}
    check_whole(disk_store, buffer)


def test_a_flush_while_others_write(disk_store: memstore.Store) -> None:
    buffer = new(disk_store, 64)
    other = memstore.ReplayBuffer(disk_store, "replay")
    for start in range(0, 640, 16):
        buffer.extend(rows(start, 16))
        other.flush()
    del buffer, other
    reboot(disk_store)
    check = new(disk_store, 64)
    assert there(disk_store, "replay") == {position: position for position in range(576, 640)}
    check_whole(disk_store, check)


def test_rows_that_were_handed_out_stay_so_in_another_boot(disk_store: memstore.Store) -> None:
    buffer = new(disk_store, sampler="fifo")
    buffer.extend(rows(0, 5))
    assert numbers_of(buffer.sample(2)) == [0, 1]
    buffer.flush()
    assert numbers_of(buffer.sample(1)) == [2]
    del buffer
    reboot(disk_store)
    buffer = new(disk_store, sampler="fifo")
    assert numbers_of(buffer.sample(2)) == [3, 4]
    with pytest.raises(memstore.StoreTimeoutError):
        buffer.sample(1, timeout=0)


def test_a_store_that_is_only_read_waits_for_a_writer_after_a_boot(disk_root: str) -> None:
    with memstore.open(disk_root, durability="disk") as store:
        buffer = new(store)
        buffer.extend(rows(0, 4))
        buffer.flush()
        del buffer
        reboot(store)
        with memstore.open(disk_root, "r") as reader:
            with pytest.raises(memstore.MutableEntryError, match="nobody has opened it to write since"):
                memstore.ReplayBuffer(reader, "replay")
            new(store)
            assert there(reader, "replay") == {position: position for position in range(4)}


def test_a_copy_of_the_folder_has_the_rows(root: str) -> None:
    """Also one that is made in the middle of a write: its rows are in the copy neither whole nor stuck."""
    with memstore.open(root) as store:
        buffer = new(store)
        buffer.extend(rows(0, 5))
        with in_the_copy(buffer, lambda: shutil.copytree(root, f"{root}-2")):
            buffer.extend(rows(5, 2))
        assert len(there(store, "replay")) == 7
    with memstore.open(f"{root}-2") as store:
        buffer = memstore.ReplayBuffer(store, "replay")
        assert there(store, "replay") == {position: position for position in range(5)}
        check_whole(store, buffer)


@pytest.mark.parametrize(
    ("offset", "data"), [(MAGIC_AT, b"nothing!"), (ROWS_AT, (9).to_bytes(8, "little")), (HEAD_AT, b"\xff" * 8)]
)
def test_a_damaged_control_page_is_told(scratch: str, offset: int, data: bytes) -> None:
    with memstore.open(scratch) as store:
        new(store).extend(rows(0, 4))
        write_data(store, "replay", offset, data)
        with pytest.raises(memstore.CorruptionError, match="control page"):
            memstore.ReplayBuffer(store, "replay")


def test_a_damaged_claim_is_told(scratch: str) -> None:
    with memstore.open(scratch) as store:
        buffer = new(store, rate_limiter=memstore.RateLimiter(1.0, 1, 100.0))
        buffer.extend(rows(0, 4))
        write_data(store, "replay", CONTROL_SIZE + 64, (2).to_bytes(8, "little") + b"\xff" * 32)
        with pytest.raises(memstore.CorruptionError, match="its claim 0 is damaged"):
            buffer.extend(rows(0, 8), timeout=0.1)


def test_random_bytes_in_the_words_give_no_rows_that_never_were(scratch: str) -> None:
    """Whatever stands there, samples are rows of the buffer or an error, and nothing crashes."""
    with memstore.open(scratch) as store:
        for seed in range(20):
            buffer = memstore.ReplayBuffer(store, f"replay {seed}", SPEC, capacity=64, sampler="prioritized")
            buffer.extend(rows(0, 64))
            words = ring_of(buffer).words
            generator = torch.Generator().manual_seed(seed)
            words[:] = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator).numpy()
            for sampler in ("uniform", "fifo", "lifo", "prioritized"):
                opened = memstore.ReplayBuffer(store, buffer.key, sampler=sampler)
                try:
                    opened.sample(8, timeout=0)
                    opened.sample_slices(2, 3, end_key=None, timeout=0)
                    opened.extend(rows(64, 8), timeout=0)
                except memstore.MemstoreError:
                    pass
            store.delete(buffer.key)


@pytest.mark.parametrize("is_lost", [False, True], ids=["sound", "without its catalog"])
def test_a_repair_keeps_a_buffer(root: str, is_lost: bool) -> None:
    with memstore.open(root) as store:
        new(store).extend(rows(0, 5))
        assert store.verify().damaged == ()
    if is_lost:
        with open(f"{root}/catalog/local/data.mdb", "r+b") as file:
            file.write(b"\x17" * (1 << 14))
    report = memstore.repair(root)
    assert report.recovered == ("replay",) and not report.lost
    with memstore.open(root) as store:
        assert store.info("replay").kind == "buffer"
        assert there(store, "replay") == {position: position for position in range(5)}
        check_whole(store, new(store))


def _on_overlay(root: str) -> None:
    with memstore.open(root) as store:
        buffer = new(store)
        buffer.extend(rows(0, 5))
        buffer.flush()
        assert there(store, "replay") == {position: position for position in range(5)}
        check_whole(store, buffer)


def test_on_an_overlay() -> None:
    on_overlay(_on_overlay)


def _fill(folder: str) -> None:
    with memstore.open(f"{folder}/store") as store:
        with pytest.raises(memstore.StoreFullError, match="has no room for 'large'"):
            memstore.ReplayBuffer(store, "large", ((1 << 20,), torch.uint8), capacity=100)
        assert "large" not in store
        buffer = memstore.ReplayBuffer(store, "replay", ((1 << 20,), torch.uint8), capacity=8)
        for number in range(20):
            buffer.add(torch.full((1 << 20,), number, dtype=torch.uint8))
        sample = buffer.sample(4)
        assert torch.equal(sample["data"][:, 0].long(), sample["index"])


def test_all_room_is_reserved_when_it_is_made() -> None:
    on_small_tmpfs(26, _fill)
