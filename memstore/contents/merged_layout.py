"""Where the leaves of a sharded value lie, in the one range of addresses that has all its segments. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from memstore import structure
from memstore.contents.boxes import StoredBox, encode_boxes
from memstore.contents.merged_leaves import LeafOfRank, MergedLeaf
from memstore.contents.parts import PartLeaf
from memstore.engine import ALIGNMENT, Leaf, Path, base_after
from memstore.structure import DTYPES, Traits

_OF_NOTHING = xxhash.xxh3_64_digest(b"")  # the checksum of a leaf that has no bytes


class LeafLayout:
    """The leaves of the whole value, in order, with their places."""

    def __init__(self, end: int) -> None:
        self._end = base_after(end, 0)
        self.leaves: list[Leaf] = []
        self.traits: list[Traits] = []
        self.boxes: dict[int, tuple[StoredBox, ...]] = {}
        self.plain: dict[int, StoredBox] = {}
        self._assembled: dict[tuple[int, ...], int] = {}  # tied leaves share their room

    def add(self, merged: MergedLeaf, name: Path) -> None:
        leaf, boxes = merged.leaf, merged.boxes
        nbytes = merged.nbytes or structure.count(leaf.shape) * DTYPES[leaf.dtype].itemsize
        offset, number = 0, len(self.leaves)
        if boxes and leaf.is_plain:
            self.plain[number], offset = boxes[0], boxes[0].place
        elif boxes:
            self.boxes[number] = boxes
            offset = boxes[0].place if self._adjoin(leaf, boxes) else self._room(boxes, nbytes)
        self.leaves.append(Leaf(name, leaf.dtype, leaf.shape, leaf.stride, offset, nbytes))
        kind, requires_grad = structure.read_flags(leaf.flags)
        self.traits.append(Traits(kind, requires_grad, None))

    def encode_boxes(self, *, with_checksums: bool) -> bytes:
        ranks = {leaf: one.rank for leaf, one in self.plain.items()}
        return encode_boxes(self.boxes, ranks, with_checksums=with_checksums)

    def checksums(self) -> bytes:
        """Of the plain leaves, in the order of all leaves. Boxes have theirs in the table."""
        sums = [self.plain[number].checksum if number in self.plain else None for number in range(len(self.leaves))]
        return b"".join(one or _OF_NOTHING for one in sums)

    def _adjoin(self, leaf: PartLeaf, boxes: Sequence[StoredBox]) -> bool:
        """Whether the boxes lie one behind the other, as the whole tensor would."""
        if len(boxes) == 1:
            return True
        place, row = boxes[0].place, DTYPES[leaf.dtype].itemsize * structure.count(leaf.shape[1:])
        start = 0
        for box, at, *_ in boxes:
            if box.shape[1:] != leaf.shape[1:] or (at, box.offsets[0]) != (place + start * row, start):
                return False
            start += box.shape[0]
        return True

    def _room(self, boxes: Sequence[StoredBox], nbytes: int) -> int:
        places = (nbytes, *[box.place for box in boxes])
        if places not in self._assembled:
            self._assembled[places] = self._end
            self._end = -(-(self._end + nbytes) // ALIGNMENT) * ALIGNMENT
        return self._assembled[places]


def find_ties(leaves: Sequence[Leaf], held: dict[Path, list[LeafOfRank]]) -> dict[int, int]:
    """By leaf, the earlier one that is the very same tensor on a rank that holds both, and lies where it lies."""
    numbers = {leaf.name: number for number, leaf in enumerate(leaves)}
    same: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        for one in held[leaf.name]:
            twin = -1 if one.twin is None else numbers[one.twin]
            if (
                0 <= twin < number
                and twin not in same
                and msgspec.structs.replace(leaf, name=leaves[twin].name) == leaves[twin]
            ):
                same[number] = twin
                break
    return same
