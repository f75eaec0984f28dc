"""Whether a snapshot is whole: its manifest, the headers of its files, and all their bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from memstore.engine import TORCH_DTYPES, header_size, read_tensors, split_header
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.info import Progress
from memstore.snapshot.format import StoredBox, StoredFile, StoredTensor
from memstore.snapshot.progress import Meter
from memstore.snapshot.read.stored import Stored
from memstore.snapshot.storage import FilePart, verify_file


def verify(stored: Stored, progress: Progress | None, *, allow_pickle: bool) -> None:
    """As `Snapshot.verify`."""
    for rank in range(stored.manifest.world_size):
        for key in stored.keys(rank):
            value = stored.value(rank, key)
            if value is not None:
                with contextlib.suppress(UnsupportedValueError):  # pickles, which only who trusts them may look into
                    stored.objects_of(value, allow_pickle=allow_pickle)
    meter = Meter(progress, stored.manifest.nbytes, "verifying")
    boxes: list[list[tuple[StoredTensor, StoredBox]]] = [[] for _ in stored.manifest.files]
    for tensor in stored.manifest.tensors:
        for box in tensor.boxes:
            boxes[box.file].append((tensor, box))
    with stored.reading():
        for file, found in zip(stored.manifest.files, boxes, strict=True):
            stored.check_size(file)
            if file.sums:
                verify_file(stored.storage, file.name, file.size, file.sums, meter.done)
            _check_header(stored, file, found)
    meter.finish()


def _check_header(stored: Stored, file: StoredFile, boxes: Sequence[tuple[StoredTensor, StoredBox]]) -> None:
    """The header that others read names the same ranges as the manifest has boxes in the file."""
    try:
        head = _bytes(stored, file, 0, min(8, file.size))
        start = header_size(head, file.size)
        _, values = split_header(_bytes(stored, file, 8, start - 8))
        entries = read_tensors(values, file.size - start)
    except CorruptionError as error:
        raise stored.damaged_file(file.name, error.detail) from error
    there = {(start + entry.data_offsets[0], start + entry.data_offsets[1]): entry for entry in entries.values()}
    for tensor, box in boxes:
        entry = there.get((box.offset, box.offset + box.nbytes))
        dtype = None if entry is None else TORCH_DTYPES[entry.dtype]
        if entry is None or (dtype == tensor.dtype and entry.shape != box.shape):
            raise stored.damaged_file(file.name, f"its header doesn't have {tensor.path!r:.100} where it is")


def _bytes(stored: Stored, file: StoredFile, offset: int, size: int) -> bytes:
    memory = bytearray(size)
    stored.storage.read(file.name, [FilePart(offset, memory)], sums=None)
    return bytes(memory)
