"""`verify` looks at every segment of a sharded entry, header and bytes, and names the file that is damaged."""

from __future__ import annotations

import os
import random
import shutil

import pytest
import torch

import memstore
from memstore import TensorShard, contents, structure
from memstore.engine import index
from memstore.engine.repair.verify import look_at
from tests.damage.sharded_stores import RANKS, make
from tests.damage.stores import content_of, flip, header_size, overwrite
from tests.inside import root_of


def test_a_store_that_is_whole(scratch: str) -> None:
    make(scratch)
    seen: list[tuple[int, int]] = []
    with memstore.open(scratch) as store:
        report = store.verify(progress=lambda done, total: seen.append((done, total)))
        nbytes = sum(store.info(key).nbytes for key in store)
    assert (report.checked, report.unchecked, report.damaged) == (3, 0, ())
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] >= nbytes
    assert len(seen) > 3 * RANKS  # not all at the end


def test_without_checksums(scratch: str) -> None:
    make(scratch, checksum=False)
    with memstore.open(scratch) as store:
        report = store.verify()
    assert (report.checked, report.unchecked, report.damaged) == (0, 3, ())


def test_leaves_without_bytes(scratch: str) -> None:
    with memstore.open(scratch, checksum=True, verify=True) as store:
        for rank in range(2):
            value = {"empty": torch.zeros(0, 3), "none": TensorShard(torch.zeros(0, 2), (0, 2), (0, 0)), "n": rank}
            store.put_sharded("bare", value, attempt="1", rank=rank, world_size=2, wait=False)
            value["rows"] = TensorShard(torch.ones(100 * rank, 2), (100, 2), (0, 0))
            store.put_sharded("one has bytes", value, attempt="1", rank=rank, world_size=2, wait=False)
        assert store.verify().damaged == ()
        assert store.get("bare")["empty"].shape == (0, 3)
        assert store.get("one has bytes")["rows"].sum() == 200


@pytest.mark.parametrize("number", range(RANKS))
def test_a_flipped_bit_names_key_and_file(scratch: str, number: int) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        path = store.info("a").files[number]
    content = content_of(path)
    chosen = random.Random(number)
    with memstore.open(scratch) as store, memstore.open(scratch, verify=True) as strict:
        boxes = _boxes(store, "a", number)
        for start, nbytes, leaf in boxes:
            flip(path, 8 * start + chosen.randrange(8 * nbytes))
            error = _look(store)
            assert (error.key, error.path) == ("a", path) and leaf in error.detail
            with pytest.raises(memstore.CorruptionError) as raised:
                strict.get("a")
            assert (raised.value.key, raised.value.path) == ("a", path)
            with pytest.raises(memstore.CorruptionError) as raised:
                strict.view("a")[leaf].sum()
            assert (raised.value.key, raised.value.path) == ("a", path)
            overwrite(path, 0, content)
        assert len({leaf for *_, leaf in boxes}) == (4 if number == 0 else 3)  # the first one has "same", too
        for bit in chosen.sample(range(8 * header_size(path)), 40):
            flip(path, bit)
            error = _look(store)
            assert error.key == "a" and path in str(error.path), bit
            overwrite(path, 0, content)
        assert store.verify().ok


def _look(store: memstore.Store) -> memstore.CorruptionError:
    """As `verify` looks at "a", without its child process."""
    with pytest.raises(memstore.CorruptionError) as raised:
        look_at(root_of(store), b"a", contents.verify, lambda done: None, 1.0, may_lock=True)
    return raised.value


def _boxes(store: memstore.Store, key: str, number: int) -> list[tuple[int, int, str]]:
    """What the record knows to lie in one of the segments: where in the file, how many bytes, of which leaf."""
    record = index.find(root_of(store), key.encode())
    assert record is not None
    extent, leaves, table = record.segments[number], store.info(key).leaves, contents.box_table(record)
    plan = structure.plan_of(record.description)
    found = [(box.place - extent.base, box.box.shape, leaf) for leaf, boxes in table.boxes.items() for box in boxes] + [
        (plan.leaves[leaf].offset - extent.base, leaves[leaf].shape, leaf) for leaf in table.ranks
    ]
    return [
        (start, leaves[leaf].dtype.itemsize * torch.Size(shape).numel(), str(leaves[leaf].name[0]))
        for start, shape, leaf in found
        if 0 <= start < extent.size
    ]


def test_segments_of_another_version(scratch: str) -> None:
    """Each is whole by itself."""
    make(scratch)
    with memstore.open(scratch) as store:
        one, two = store.info("a").files[0], store.info("b").files[0]
        shutil.copy(one, f"{scratch}.aside")
        overwrite(one, 0, content_of(two))
        (error,) = store.verify().damaged
        assert error.key == "a" and one in str(error.path)


def test_a_missing_and_a_truncated_segment(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        one, two = store.info("a").files[2], store.info("b").files[1]
        os.truncate(two, 5000)
        os.unlink(one)
        found = {error.key: str(error.path) for error in store.verify().damaged}
        assert set(found) == {"a", "b"} and one in found["a"] and found["b"] == two
        with pytest.raises(memstore.CorruptionError):
            store.get("a")
