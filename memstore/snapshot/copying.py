"""Copies of snapshots: whole ones, which share no file with another snapshot, and have no bytes that nothing names.

1. the folder is made, and claimed, as by a take
2. the boxes of each rank are laid out anew, and copied from the files in which they lie. Each chunk that is read is
   compared with its checksum
3. the manifest is published, as that of a take. Killed before: files that no manifest names
"""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from memstore._info import Progress
from memstore.engine import TORCH_DTYPES, make_header
from memstore.errors import CorruptionError
from memstore.snapshot.buckets import is_url, open_bucket, parse_url, path_or_url
from memstore.snapshot.chunks import CHUNK, FilePart, LateBytes, PieceSums, pieces_between
from memstore.snapshot.increments import BoxSums, sums_of_boxes
from memstore.snapshot.manifest import (
    Manifest,
    ManifestBox,
    ManifestFile,
    is_model_file,
    name_with_id,
)
from memstore.snapshot.objects import PIECE, ObjectStorage, Storage
from memstore.snapshot.publishing import (
    Take,
    abandon,
    begin_in_bucket,
    claim,
    index_text,
    new_take,
    publish_manifest,
    refuse_what_is_there,
)
from memstore.snapshot.storage import FileStorage, ProgressMeter, file_errors
from memstore.snapshot.stored import Stored, read_header


class _BoxToCopy(NamedTuple):
    """A box of the source.

    Attributes:
        tensor, number: which tensor of the manifest, and which of its boxes.
        box: where it lies.
        label, dtype, shape: its entry in its file's header.
    """

    tensor: int
    number: int
    box: ManifestBox
    label: str
    dtype: str
    shape: tuple[int, ...]


def copy_snapshot(
    stored: Stored,
    target: str | os.PathLike[str],
    *,
    durable: bool = True,
    progress: Progress | bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Copies a snapshot to another folder, or to a bucket, as a whole one. It appears completely, or not at all.

    Args:
        stored: the source, in a folder or a bucket.
        target: the path of a folder, which has no snapshot and no store yet; or a URL.
        options: for the bucket of the target.
        durable: whether it is on the disk when the call returns.
        progress: as of `Snapshot.take`.

    Raises:
        AlreadyExistsError: something is at `target`.
        CorruptionError: the source is damaged. Nothing is left at `target`.
        StoreFullError: no room. Nothing is left.
    """
    path = path_or_url(target)
    storage: Storage
    if is_url(path):
        storage = ObjectStorage(path, options)
        take = msgspec.structs.replace(
            begin_in_bucket(storage, 1, durable=durable),
            world_size=stored.manifest.world_size,
            created=stored.manifest.created,
        )
    else:
        refuse_what_is_there(path)
        has_sums = any(file.sums for file in stored.manifest.files)
        take = new_take(path, stored.manifest.world_size, durable=durable, checksum=has_sums)
        take = msgspec.structs.replace(take, created=stored.manifest.created)
        take, storage = FileStorage.create_for(path, partial(claim, take, True), durable=durable)
    written: list[str] = []
    try:
        with stored.reading():
            return _copy(stored, storage, take, written, progress)
    except BaseException:
        abandon(storage, take, written, 0, all_ended=True)
        raise


def fetch_folder(url: str, path: str, options: Mapping[str, Any] | None = None) -> bool:
    """Fetches all objects at a URL into a new folder, where others read them as files: another library's checkpoint.

    Returns:
        Whether there are any. If not, the folder isn't made.

    Raises:
        CorruptionError: an object's name is no path inside of a folder, or one ended too early.
        AlreadyExistsError: the folder is there.
    """
    place = parse_url(url)
    bucket = open_bucket(place, options)
    found = bucket.list_all(place.key)
    for name in found:
        if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            raise CorruptionError(path=f"{url}/{name:.200}", detail="its name is no path inside of a folder")
    if not found:
        return False
    os.mkdir(path, 0o700)
    with file_errors(path):
        for name, about in found.items():
            os.makedirs(os.path.dirname(f"{path}/{name}"), mode=0o700, exist_ok=True)
            with open(f"{path}/{name}", "xb") as file:
                for start in range(0, about.size, PIECE):
                    data = bucket.fetch(f"{place.key}/{name}", start, min(start + PIECE, about.size))
                    if len(data) != min(PIECE, about.size - start):
                        raise CorruptionError(path=f"{url}/{name}", detail="it became shorter while it was read")
                    file.write(data)
    return True


def _copy(
    stored: Stored, storage: Storage, take: Take, written: list[str], progress: Progress | bool | None
) -> Manifest:
    manifest = stored.manifest
    groups = _groups(stored)
    chunks = _chunks(stored)
    total = sum(box.box.nbytes for boxes in groups.values() for box in boxes)
    meter = ProgressMeter(progress, total, "copying")
    files: list[ManifestFile] = []
    box_sums: list[BoxSums] = []
    moved: dict[tuple[int, int], ManifestBox] = {}
    places: dict[str, str] = {}  # of the model's tensors, for the index that transformers reads
    sizes: dict[str, int] = {}
    is_split = False
    for name, boxes in groups.items():
        own = name if take.plain else name_with_id(name, take.id)
        boxes.sort(key=lambda one: -(one.box.nbytes // math.prod(one.box.shape)))  # wide elements first
        header = make_header([(one.label, one.dtype, one.shape, one.box.nbytes) for one in boxes])
        parts, at = [FilePart(0, header)], len(header)
        for one in boxes:
            for start, stop in pieces_between(one.box.offset, one.box.offset + one.box.nbytes):
                late = LateBytes(stop - start, partial(chunks[one.box.file, start // CHUNK].take, start))
                parts.append(FilePart(at + start - one.box.offset, late))
            placed = msgspec.structs.replace(one.box, file=len(files), offset=at)
            moved[one.tensor, one.number] = placed
            if is_model_file(name):
                places[one.label] = own
                sizes[one.label] = one.box.nbytes
                is_split = is_split or one.box.shape != manifest.tensors[one.tensor].shape
            at += one.box.nbytes
        pieces: PieceSums = {}
        sums = storage.write(
            own, at, parts, durable=take.durable, checksum=take.checksum, done=meter.done, pieces=pieces
        )
        written.append(own)
        files.append(ManifestFile(own, at, sums))
        box_sums.append(sums_of_boxes([moved[one.tensor, one.number] for one in boxes], pieces))
    meter.finish()
    tensors = [
        msgspec.structs.replace(tensor, boxes=tuple([moved[i, k] for k in range(len(tensor.boxes))]))
        for i, tensor in enumerate(manifest.tensors)
    ]
    copied = msgspec.structs.replace(
        manifest, id=take.id, writer=take.writer, files=tuple(files), tensors=tuple(tensors)
    )
    index = None if is_split or storage.is_remote else index_text(places, sum(sizes.values()))
    publish_manifest(storage, take, copied, index, box_sums)
    return copied


def _groups(stored: Stored) -> dict[str, list[_BoxToCopy]]:
    """Returns the boxes by the plain name of the file that they go to, with their entries in the files' headers."""
    entries = [_entries(stored, file) for file in stored.manifest.files]
    found: dict[str, list[_BoxToCopy]] = defaultdict(list)
    for i, tensor in enumerate(stored.manifest.tensors):
        for k, box in enumerate(tensor.boxes):
            file = stored.manifest.files[box.file]
            entry = entries[box.file].get((box.offset, box.offset + box.nbytes))
            if entry is None:
                raise stored.damaged_file(file.name, f"its header doesn't have {tensor.path!r:.100} where it is")
            found[name_with_id(file.name, None)].append(_BoxToCopy(i, k, box, *entry))
    for boxes in found.values():
        boxes.sort(key=lambda one: (one.box.file, one.box.offset))
        labels: set[str] = set()
        for i, one in enumerate(boxes):
            label = one.label
            while label in labels:
                label += "~"
            labels.add(label)
            boxes[i] = one._replace(label=label)
    return found


def _entries(stored: Stored, file: ManifestFile) -> dict[tuple[int, int], tuple[str, str, tuple[int, ...]]]:
    """Returns the entries in the header of a file by where their bytes are: label, dtype, shape."""
    stored.check_size(file)
    start, entries = read_header(stored, file)
    return {
        (start + entry.data_offsets[0], start + entry.data_offsets[1]): (
            label,
            TORCH_DTYPES[entry.dtype],
            tuple(entry.shape),
        )
        for label, entry in entries.items()
    }


class _Chunk:
    """A chunk of a file of the source, which is read when the first of its pieces is wanted.

    Its memory is given back with the last one. Thread-safe.
    """

    def __init__(self, stored: Stored, file: ManifestFile) -> None:
        self._stored, self._file = stored, file
        self.pieces: dict[int, int] = {}  # start -> stop
        self._memory: dict[int, bytearray] = {}
        self._lock = threading.Lock()

    def take(self, start: int) -> bytearray:
        """Returns the bytes of a piece, once. Raises CorruptionError."""
        with self._lock:
            if not self._memory:
                self._memory = {at: bytearray(stop - at) for at, stop in self.pieces.items()}
                parts = [FilePart(at, memory) for at, memory in self._memory.items()]
                self._stored.storage.read(self._file.name, parts, sums=self._file.sums or None)
            return self._memory.pop(start)


def _chunks(stored: Stored) -> dict[tuple[int, int], _Chunk]:
    found: dict[tuple[int, int], _Chunk] = {}
    for tensor in stored.manifest.tensors:
        for box in tensor.boxes:
            for start, stop in pieces_between(box.offset, box.offset + box.nbytes):
                key = box.file, start // CHUNK
                if key not in found:
                    found[key] = _Chunk(stored, stored.manifest.files[box.file])
                found[key].pieces[start] = stop
    return found
