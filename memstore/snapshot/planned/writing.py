"""The boxes that one rank writes, as a file of a snapshot.

What a box has is made when it is written, so that a tensor which is on a device, or lies otherwise than in its file, is
in memory a second time for a moment only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from memstore import modes
from memstore.errors import ShardMismatchError, UnsupportedValueError
from memstore.sharding import Box
from memstore.snapshot.format import StoredBox, StoredFile, file_name
from memstore.snapshot.storage import FilePart, FileStorage, LateBytes
from memstore.snapshot.take import Piece, draft_file, label_of
from memstore.snapshot.tensor_bytes import bytes_of
from memstore.structure import DTYPE_NAMES


class PlannedBox(NamedTuple):
    """A part of a tensor, to be written.

    Attributes:
        path: of the tensor in the snapshot.
        dtype, shape: of the whole tensor.
        box: which elements the part has.
        make: makes a tensor of just these; called once, by one thread at a time, which need not be the caller's.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    make: Callable[[], torch.Tensor]


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that is written, and where its boxes are. It travels to the rank that publishes.

    Attributes:
        save: the id of the save that it is a part of.
        boxes: one for each box that was planned; None where that has no elements. `file` is 0 in all of them.
    """

    save: str
    file: StoredFile | None  # None: no box has elements
    boxes: tuple[StoredBox | None, ...]


def write_boxes(
    path: str,
    planned: Sequence[PlannedBox],
    *,
    save: str,
    rank: int,
    world_size: int,
    durable: bool,
    checksum: bool,
) -> WrittenFile:
    """Writes a file of the boxes into the folder, which is there. If it fails, the file is gone again.

    Raises:
        UnsupportedValueError: a dtype that can't be stored.
        ShardMismatchError: a tensor that was made is of another shape than its box.
        AlreadyExistsError: this rank has written for this save already.
        StoreFullError, OSError: as `FileStorage.write`.
    """
    held = [(i, one) for i, one in enumerate(planned) if not one.box.is_empty]
    if not held:
        return WrittenFile(save, None, (None,) * len(planned))
    pieces = [(label_of(one.path, one.shape, one.box), Piece(i, one.box, _shown(one))) for i, one in held]
    draft = draft_file(file_name("state", rank, world_size, save), pieces)
    lock = threading.Lock()
    parts = [FilePart(0, draft.header)]
    boxes: list[StoredBox | None] = [None] * len(planned)
    at = len(draft.header)
    for piece in draft.pieces:
        parts.append(FilePart(at, LateBytes(piece.nbytes, _Making(planned[piece.tensor], lock))))
        boxes[piece.tensor] = StoredBox(0, at, piece.nbytes, piece.box.offsets, piece.box.shape)
        at += piece.nbytes
    storage = FileStorage(path)
    sums = storage.write(draft.name, draft.size, parts, durable=durable, checksum=checksum)
    return WrittenFile(save, StoredFile(draft.name, draft.size, sums), tuple(boxes))


def _shown(planned: PlannedBox) -> torch.Tensor:
    """What has the dtype and the shape of the box, and no memory."""
    if planned.dtype not in DTYPE_NAMES:
        raise UnsupportedValueError(f"{planned.path}: a tensor of {planned.dtype} can't be stored")
    return torch.empty(planned.box.shape, dtype=planned.dtype, device="meta")


class _Making:
    """The bytes of a box, once they are wanted. The lock is that of all boxes: tensors are made one at a time."""

    def __init__(self, planned: PlannedBox, lock: threading.Lock) -> None:
        self._planned, self._lock = planned, lock

    def __call__(self) -> Any:
        planned = self._planned
        with modes.put_aside(), torch.no_grad():
            with self._lock:
                made = planned.make().detach()
            if made.shape != planned.box.shape:
                raise ShardMismatchError(
                    f"{planned.path}: the plan has a part of shape {list(planned.box.shape)}, and the tensor for it is "
                    f"of shape {list(made.shape)}"
                )
            if made.layout is not torch.strided:
                raise UnsupportedValueError(f"{planned.path}: a tensor whose layout is {made.layout} can't be stored")
            return bytes_of(made if made.dtype == planned.dtype else made.to(planned.dtype))
