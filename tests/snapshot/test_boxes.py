"""Who writes which box, and boxes read into any others: pure, or by ranks that are played in one process."""

from __future__ import annotations

import math
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memstore
from memstore import Snapshot, StateDict, TensorShard
from memstore.sharding import Box, whole
from memstore.snapshot import drafts as partitions
from memstore.snapshot import reading
from memstore.snapshot.drafts import Naming, Offer, draft, offers_of, own_bytes, partition
from memstore.snapshot.publishing import Take, publish
from memstore.snapshot.stateful import StateWalker
from memstore.snapshot.storage import FileStorage
from tests.examples import examples

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a tensor: cuts in each dimension."""
    boxes = [Box((), ())]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        sides = list(zip(cuts, cuts[1:], strict=False)) or [(0, 0)]
        boxes = [Box((*box.offsets, a), (*box.shape, b - a)) for box in boxes for a, b in sides]
    return boxes


def take_as_ranks(path: str, state_dicts: Sequence[Any]) -> None:
    """As ranks would with these state dicts, all of whose tensors are shared."""
    storage = FileStorage.create(path, durable=False)
    take = Take("0123456789abcdef", path, len(state_dicts), 0.0, "test", True, False, True)
    walked = []
    for state_dict in state_dicts:
        walker = StateWalker(allow_pickle=False)
        state = walker.add("state", state_dict)
        walked.append((state, walker.tensors, {tensor.path for tensor in walker.tensors if tensor.is_sharded}))
    shares = partition(
        [own_bytes(tensors, shared) for _, tensors, shared in walked],
        [offers_of(tensors, shared) for _, tensors, shared in walked],
    )
    parts = []
    for rank, (state, tensors, shared) in enumerate(walked):
        part, files = draft(take, rank, [state], tensors, shared, shares, Naming(None, ""))
        written = tuple(file.write(storage, durable=False, checksum=True) for file in files)
        parts.append(msgspec.structs.replace(part, files=written))
    publish(storage, parts)


@pytest.mark.parametrize("joined", [0, 64 << 10])
@given(st.data())
@settings(max_examples=examples(40))
def test_any_boxes_are_read_into_any_others(joined: int, data: st.DataObject) -> None:
    """Args: joined: gaps of so many bytes are read too; without any, runs are read each by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_JOINED", joined)
        _check_boxes_into_others(data)


def _check_boxes_into_others(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    dtype = data.draw(st.sampled_from([torch.int16, torch.float64, torch.complex128]))
    value = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    stored, wanted = data.draw(grids(shape)), data.draw(grids(shape))
    turned = data.draw(st.booleans())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        take_as_ranks(f"{folder}/s", [{"x": TensorShard(value[box.slices], shape, box.offsets)} for box in stored])
        snapshot = Snapshot(f"{folder}/s")
        snapshot.verify()
        assert torch.equal(snapshot.read_object("0/state/x"), value)
        for box in wanted:
            local = torch.zeros(tuple(reversed(box.shape)) if turned else box.shape, dtype=dtype)
            local = local.permute(tuple(range(len(shape) - 1, -1, -1))) if turned else local
            target = TensorShard(local, shape, box.offsets)
            snapshot.read_object("0/state/x", target, data.draw(st.sampled_from([None, 1, 64])))
            assert torch.equal(local, value[box.slices])


@given(st.data())
def test_every_box_is_written_once_by_a_rank_that_has_it(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    offers: list[list[Offer]] = [[] for _ in range(ranks)]
    wanted: dict[str, list[Box]] = {}
    for number in range(data.draw(st.integers(0, 4))):
        shape, path = data.draw(shapes), f"x{number}"
        boxes = [box for box in data.draw(grids(shape)) if not box.is_empty]
        wanted[path] = boxes
        held = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in boxes]
        for rank in range(ranks):
            mine = tuple(box for box, who in zip(boxes, held, strict=True) if rank in who)
            offers[rank].append(Offer(path, "int64", 8, shape, mine, True))
    shares = partition([0] * ranks, offers)
    for path, boxes in wanted.items():
        written = [(rank, box) for rank in range(ranks) for box in shares[rank].get(path, [])]
        assert sorted(box for _, box in written) == sorted(boxes)
        for rank, box in written:
            assert box in next(offer for offer in offers[rank] if offer.path == path).boxes


def test_what_all_ranks_have_is_balanced_and_large_tensors_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "SPLIT", 1000)
    sizes = [(7, 100), (1, 900), (90, 10), (3, 5), (1, 2000), ()]
    offers = [[Offer(f"x{i}", "int8", 1, size, (whole(size),), False) for i, size in enumerate(sizes)]]
    shares = partition([0, 0, 500], offers * 3)
    loads = [sum(math.prod(box.shape) for boxes in share.values() for box in boxes) for share in shares]
    assert sum(loads) == sum(map(math.prod, sizes)) and loads == pytest.approx([1500, 1700, 1200], abs=900)
    assert sum(len(share.get("x4", [])) for share in shares) == 1, "its rows can't be split"
    wide = partition([0, 0], [[Offer("w", "int8", 1, (40, 100), (whole((40, 100)),), False)]] * 2)
    assert sorted(box for share in wide for box in share["w"]) == [Box((0, 0), (20, 100)), Box((20, 0), (20, 100))]
    assert all(len(share["w"]) == 1 for share in wide)


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    offers = [[Offer("x", "int8", 1, (3,), (whole((3,)),), False)], [Offer("x", "int8", 1, (4,), (), False)]]
    with pytest.raises(memstore.ShardMismatchError, match=r"rank 0 has it as int8\[3\], rank 1 as int8\[4\]"):
        partition([0, 0], offers)
    beyond = [
        [Offer("x", "int8", 1, (3,), (Box((0,), (2,)),), True)],
        [Offer("x", "int8", 1, (3,), (Box((2,), (2,)),), True)],
    ]
    with pytest.raises(memstore.ShardMismatchError, match=r"x: the ranks' part \[2:4\] lies outside of \[3\]"):
        partition([0, 0], beyond)


@pytest.mark.parametrize("checksum, most", [(False, 4 << 20), (True, 120 << 20)])
def test_a_read_stays_within_its_memory_budget(tmp_path: Path, checksum: bool, most: int) -> None:
    value = torch.arange(16 << 20, dtype=torch.int32).reshape(4096, 4096)
    snapshot = Snapshot.take(f"{tmp_path}/s", {"s": StateDict(x=value)}, durability="process", checksum=checksum)
    target = torch.zeros(4096, 4096, dtype=torch.int32).t()
    columns = TensorShard(torch.zeros(4096, 8, dtype=torch.int32), (4096, 4096), (0, 99))
    tracemalloc.start()
    try:
        snapshot.read_object("0/s/x", target, memory_budget_bytes=1 << 20)
        snapshot.read_object("0/s/x", columns, memory_budget_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert torch.equal(target, value) and torch.equal(columns.local, value[:, 99:107])
    with pytest.raises(ValueError, match="memory_budget_bytes"):
        snapshot.read_object("0/s/x", memory_budget_bytes=0)


def test_of_columns_only_their_rows_are_read(tmp_path: Path) -> None:
    value = torch.arange(8 << 20, dtype=torch.int32).reshape(64, 128 << 10)  # rows of 512 KiB
    Snapshot.take(f"{tmp_path}/s", {"s": StateDict(x=value)}, durability="process", checksum=False)
    snapshot = Snapshot(f"{tmp_path}/s")
    snapshot.get_manifest()
    for local in (torch.zeros(64, 500, dtype=torch.int32), torch.zeros(500, 64, dtype=torch.int32).t()):
        before = _bytes_read()
        snapshot.read_object("0/s/x", TensorShard(local, (64, 128 << 10), (0, 1000)))
        assert torch.equal(local, value[:, 1000:1500])
        assert 64 * 500 * 4 <= _bytes_read() - before < 2 * 64 * 500 * 4, "and some of /proc"


def test_of_columns_only_the_chunks_that_have_them_are_read_and_compared(tmp_path: Path) -> None:
    value = torch.arange(20 << 20, dtype=torch.int32).reshape(2, 10 << 20)  # rows of 40 MiB, in chunks of 16
    path = f"{tmp_path}/s"
    Snapshot.take(path, {"s": StateDict(x=value)}, durability="process")
    with open(f"{path}/state.safetensors", "r+b") as file:
        file.seek(18 << 20)  # in the second chunk
        file.write(b"damage")
    snapshot = Snapshot(path)
    local = torch.zeros(2, 1000, dtype=torch.int32)
    before = _bytes_read()
    snapshot.read_object("0/s/x", TensorShard(local, tuple(value.shape), (0, 0)))
    assert torch.equal(local, value[:, :1000])
    assert _bytes_read() - before < 33 << 20, "two chunks of five"
    with pytest.raises(memstore.CorruptionError, match="chunk 1"):
        snapshot.read_object("0/s/x", TensorShard(local, tuple(value.shape), (0, 5 << 20)))


def _bytes_read() -> int:
    """By this process, with system calls."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
