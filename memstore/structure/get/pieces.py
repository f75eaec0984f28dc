"""What of a stored value goes where in a target: pieces, each a part of what is stored and the place that it fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from memstore.sharding import Box, Boxes, Shard, StoredBox, part, whole
from memstore.structure.get.matching import MatchedTarget
from memstore.structure.get.parts import Checks, assemble_one, box_tensor, boxes_of_leaf, copies_of, parts_of
from memstore.structure.plans import Memory, Plan


class Piece(NamedTuple):
    """Attributes:
    want: the target's tensor that it is a part of.
    target, source: as many elements of both, of one shape.
    """

    want: int
    target: torch.Tensor
    source: torch.Tensor


class Sources:
    """The stored leaves, to be copied from: whole or in boxes.

    Args:
        tensors: the leaves, as if all of them were whole.
        need: brings what tensors over `memory` have; None: all of it is there.
    """

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        boxes: Boxes,
        tensors: list[torch.Tensor],
        need: Callable[[Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        self._plan, self._memory, self._boxes, self._tensors, self._need = plan, memory, boxes, tensors, need

    def bring(self, pieces: Sequence[Piece]) -> None:
        """Call it before the pieces are read."""
        if self._need is not None:
            self._need([piece.source for piece in pieces])

    def whole(self, have: int, checks: Checks | None) -> torch.Tensor:
        """All of a leaf, checked; put together, if it lies in boxes."""
        stored = boxes_of_leaf(self._plan, self._boxes, have)
        self._compare(have, stored, checks)
        if self._need is not None:
            self._need(self._parts(have, stored))
        if stored:
            assemble_one(self._plan.leaves[have], stored, self._memory)
        return self._tensors[have]

    def pieces(self, found: MatchedTarget, checks: Checks | None) -> list[Piece]:
        """What fills the tensors of a target that a value was matched with, checked."""
        if not (self._boxes or found.sharded):
            if checks is not None:
                for have, _ in found.match.pairs:
                    self._compare(have, (), checks)
            return [Piece(want, found.tensors[want], self._tensors[have]) for have, want in found.match.pairs]
        pieces: list[Piece] = []
        for have, want in found.match.pairs:
            pieces += self.pieces_of(have, want, wanted_of(found, want), checks)
        return pieces

    def pieces_of(self, have: int, want: int, wanted: Sequence[Shard], checks: Checks | None) -> list[Piece]:
        """What fills these parts of one leaf."""
        stored = boxes_of_leaf(self._plan, self._boxes, have)
        parts = parts_of(self._plan, self._boxes, have, self._tensors[have], self._memory)
        if wanted and checks is not None:
            self._compare(have, [one for one in stored if _meets(one.box, wanted)], checks)
        everything = whole(self._plan.leaves[have].shape)
        if len(parts) == 1 and parts[0].box == everything:
            return [Piece(want, one.local, part(parts[0].local, one.box)) for one in wanted]
        if len(wanted) == 1 and wanted[0].box == everything:
            return [Piece(want, part(wanted[0].local, one.box), one.local) for one in parts]
        return [Piece(want, target, source) for target, source in copies_of(wanted, parts)]

    def _compare(self, have: int, stored: Sequence[StoredBox], checks: Checks | None) -> None:
        """Compares some boxes of a leaf with their checksums, or a leaf that lies whole."""
        if checks is None:
            return
        if self._need is not None:
            self._need(self._parts(have, stored))
        if stored:
            checks.compare_boxes(have, stored)
        elif not boxes_of_leaf(self._plan, self._boxes, have):
            checks.compare(have)

    def _parts(self, have: int, stored: Sequence[StoredBox]) -> list[torch.Tensor]:
        if not stored:
            return [self._tensors[have]]
        return [box_tensor(self._plan.leaves[have], one, self._memory) for one in stored]

    def nbytes(self, found: MatchedTarget, pieces: Sequence[Piece]) -> int:
        """Of those pieces that are read from boxes, or into shards."""
        have = {want: have for have, want in found.match.pairs}
        return sum(
            piece.source.nbytes
            for piece in pieces
            if piece.want in found.sharded or boxes_of_leaf(self._plan, self._boxes, have[piece.want])
        )


def wanted_of(found: MatchedTarget, want: int) -> Sequence[Shard]:
    """The parts of a target's tensor that this rank holds."""
    target = found.sharded.get(want)
    if target is not None:
        return target.leaf.shards
    tensor = found.tensors[want]
    return (Shard(whole(tensor.shape), tensor),)


def _meets(box: Box, wanted: Sequence[Shard]) -> bool:
    return any(box.meet(one.box) is not None for one in wanted)
