"""Whether boxes make up a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from memstore.errors import ShardMismatchError
from memstore.sharding import Box, overlap


def check_cover(path: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raises ShardMismatchError unless the boxes cover the tensor, each element once."""
    covered, wanted = sum(math.prod(box.shape) for box in boxes), math.prod(shape)
    if len(boxes) > 1 and overlap(boxes) is not None:
        raise ShardMismatchError(f"{path}: the ranks' parts of it overlap without being equal: it can't be saved")
    if covered != wanted:
        raise ShardMismatchError(f"{path}: the ranks have {covered:,} of its {wanted:,} elements: a rank is missing")
