"""Entries whose leaves lie in boxes, made without ranks: all bytes are put as one, and the record is changed.

So boxes lie as no put of ranks would have them, and a leaf of any kind can lie in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from hypothesis import strategies as st

import memstore
from memstore.contents import box_table
from memstore.contents.reading import encode_boxes
from memstore.engine import Record
from memstore.engine.format.records import encode_record
from memstore.sharding import Box, Boxes, StoredBox, narrow_to, whole
from memstore.structure import fill, flatten, lies_in_order, plan_of
from memstore.structure.tree import from_msgpack, to_msgpack
from tests.inside import lmdb_of, lmdb_table, root_of

Layout = Callable[
    [int, tuple[int, ...]], Sequence[Box] | None
]  # of a leaf, by its number and shape; None: it lies whole


class BoxedStore:
    """A store whose entries lie in boxes."""

    def __init__(self, store: memstore.Store) -> None:
        self.store = store

    def put(self, key: str, value: Any, layout: Layout, *, in_order: bool = False) -> None:
        """`in_order`: boxes that can lie where the whole tensor has them do."""
        flat = flatten(value, inline_limit=0)
        memory = np.full(flat.plan.nbytes, 0xA5, np.uint8)
        fill(flat, memory)
        tree, leaves, _ = from_msgpack(flat.plan.description)
        data, tail, table = bytearray(), 0, {}
        places: dict[int, int] = {}
        for i, leaf in enumerate(flat.plan.leaves):
            if i in flat.plan.same:
                continue
            chosen = None if leaf.stride is not None else layout(i, leaf.shape)
            data += bytes(-len(data) % 64)
            if chosen is None or not leaf.nbytes:
                places[i] = len(data)
                data += memory[leaf.offset : leaf.offset + leaf.nbytes].tobytes()
                continue
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
            item = leaf.nbytes // torch.Size(leaf.shape).numel()
            elements = torch.from_numpy(memory[leaf.offset : leaf.offset + leaf.nbytes]).view(bits[item])
            found, first = [], len(data)
            for rank, box in enumerate(chosen):
                held = (
                    narrow_to(elements.view(leaf.shape), box).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
                found.append(StoredBox(box, len(data), rank, xxhash.xxh3_64_digest(held)))
                data += held
                if not in_order:
                    data += bytes(-len(data) % 64)
            table[i] = tuple(found)
            lies = in_order and lies_in_order(msgspec.structs.replace(leaf, offset=first), table[i])
            places[i] = first if lies else -1
        for i, place in places.items():
            if place < 0:
                data += bytes(-len(data) % 64)
                tail = len(data)
                data += bytes(flat.plan.leaves[i].nbytes)
                place = tail
            leaves[i] = [*leaves[i][:2], place, *leaves[i][3:]]
        description = to_msgpack([tree, leaves, False])
        plan = plan_of(description)
        self._write(key, data[: plan.nbytes], description, flat.objects, plan, table)

    def _write(self, key: str, data: bytearray, description: bytes, objects: bytes, plan: Any, table: Any) -> None:
        held = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        self.store.put(key, held)
        root = root_of(self.store)
        record = root.catalog.read(key.encode())
        sums = None
        if record.checksums is not None:
            sums = b"".join(
                bytes(8) if i in table else xxhash.xxh3_64_digest(data[leaf.offset : leaf.offset + leaf.nbytes])
                for i, leaf in enumerate(plan.leaves)
            )
        self._replace(
            key, record, description=description, objects=objects, checksums=sums, boxes=encode_boxes(table, {})
        )

    def change_boxes(self, key: str, change: Callable[[Boxes], Boxes]) -> None:
        record = root_of(self.store).catalog.read(key.encode())
        assert record is not None and record.boxes is not None
        self._replace(key, record, boxes=encode_boxes(change(box_table(record).boxes), {}))

    def _replace(self, key: str, record: Record, **changes: Any) -> None:
        root, told = root_of(self.store), msgspec.structs.replace(record, **changes)
        with lmdb_of(root).begin(write=True) as transaction:
            transaction.put(key.encode(), encode_record(key.encode(), told), db=lmdb_table(root, "entries"))


def grid(*counts: int) -> Layout:
    """So many boxes along each dimension, of about one size; fewer dimensions than that: cut as far as they go."""

    def layout(_: int, shape: tuple[int, ...]) -> list[Box] | None:
        found = [whole(shape)]
        for dim, count in zip(range(len(shape)), counts, strict=False):
            found = [piece for box in found for piece in _cut(box, dim, count)]
        return found if len(found) > 1 else None

    return layout


def _cut(box: Box, dim: int, count: int) -> list[Box]:
    size = -(-box.shape[dim] // count)
    pieces: list[Box] = []
    for start in range(0, box.shape[dim], max(size, 1)):
        offsets, shape = list(box.offsets), list(box.shape)
        offsets[dim] += start
        shape[dim] = min(size, box.shape[dim] - start)
        pieces.append(Box(tuple(offsets), tuple(shape)))
    return pieces


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], most: int = 4) -> list[Box]:
    """Boxes that cut a tensor of this shape, any one again and again, in any order."""
    found = [whole(shape)]
    for _ in range(draw(st.integers(0, most))):
        number = draw(st.integers(0, len(found) - 1))
        box = found[number]
        dims = [dim for dim, size in enumerate(box.shape) if size > 1]
        if dims:
            dim = draw(st.sampled_from(dims))
            at = draw(st.integers(1, box.shape[dim] - 1))
            found[number : number + 1] = _split(box, dim, at)
    return draw(st.permutations(found))


def _split(box: Box, dim: int, at: int) -> list[Box]:
    first, second = list(box.shape), list(box.shape)
    start = list(box.offsets)
    first[dim], second[dim] = at, box.shape[dim] - at
    start[dim] += at
    return [Box(box.offsets, tuple(first)), Box(tuple(start), tuple(second))]
