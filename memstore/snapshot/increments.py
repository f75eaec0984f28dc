"""Increments: a take writes only the boxes that differ from an earlier snapshot, its *base*, and shares files with it.

    1. each rank opens the base (`Base`), which no CheckpointManager removes meanwhile
    2. it compares the sums of the boxes that it is to write with those of the same boxes in the base (`Base.share`)
    3. each file of the base of which enough is unchanged gets a second name in the new folder, by link(2); before that
       a claim says whose this name is. Killed: names that no manifest mentions, as other files of such a take. In a
       bucket the service copies the file's objects, under names by the base's id, which are equal for equal bytes
    4. the take goes on as any other, with the rest

So each snapshot has all of its files in its own folder: a base may be removed, by whomever, and nobody counts
references. A linked file may have boxes that have changed since, which no manifest mentions. A file of which less than
half is unchanged isn't linked, so a snapshot takes at most twice the room of its bytes; nor are more than 64 of one
rank.

The sums that are compared are of pieces, the parts of a box in one chunk each. They are computed when the box is
written, of the bytes that are written. They lie beside the manifest (`encode_box_sums`), and are only hints: without
them, nothing is shared. This file imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from memstore._threads import collect_later
from memstore.errors import CorruptionError, KeyNotFoundError
from memstore.snapshot.buckets import is_url, open_bucket, parse_url
from memstore.snapshot.chunks import CHUNK, SUM_SIZE, PieceSums, in_parallel, pieces_between, sum_of
from memstore.snapshot.manifest import (
    LIMIT,
    MANIFEST,
    Manifest,
    ManifestBox,
    ManifestFile,
    ManifestTensor,
    claim_name,
    file_name,
    is_model_file,
    load_manifest,
    sums_name,
)
from memstore.snapshot.objects import ObjectStorage, Storage, storage_at
from memstore.snapshot.storage import FileStorage, hold

_log = logging.getLogger("memstore")
LATEST = "latest"

# --- Sums of boxes ---------------------------------------------------------------------------------------------------


BoxSums = dict[int, bytes]  # of the boxes in a file: where one starts -> the sums of its pieces, one after the other

_START = b"memstore box sums 1\n"


def sums_of_boxes(boxes: Sequence[ManifestBox], pieces: PieceSums) -> BoxSums:
    """Returns the sums of the boxes in a file that was written; none if it has no sums."""
    if not pieces:
        return {}
    return {
        box.offset: b"".join([pieces[start] for start, _ in pieces_between(box.offset, box.offset + box.nbytes)])
        for box in boxes
    }


def encode_box_sums(manifest: Manifest, sums: Sequence[BoxSums]) -> bytes | None:
    """Returns the file with the sums of all boxes, in the manifest's order; None if some are missing.

    Args:
        sums: for each file of the manifest.
    """
    found: list[bytes] = []
    for tensor in manifest.tensors:
        for box in tensor.boxes:
            own = sums[box.file].get(box.offset) if box.file < len(sums) else None
            if own is None:
                return None
            found.append(own)
    body = b"".join(found)
    head = _START + manifest.id.encode()
    return head + xxhash.xxh3_64_digest(head + body) + body if 0 < len(body) < LIMIT // 2 else None


def read_box_sums(storage: Storage, manifest: Manifest) -> list[BoxSums] | None:
    """Returns the sums for each file of a snapshot; None if they aren't there, are damaged, or another one's."""
    try:
        text = storage.read_bytes(sums_name(manifest.id), LIMIT)
    except (KeyNotFoundError, CorruptionError):
        return None
    head = _START + manifest.id.encode()
    start = len(head) + SUM_SIZE
    body = text[start:]
    if text[: len(head)] != head or text[len(head) : start] != xxhash.xxh3_64_digest(head + body):
        return None
    found: list[BoxSums] = [{} for _ in manifest.files]
    at = 0
    for tensor in manifest.tensors:
        for box in tensor.boxes:
            end = at + SUM_SIZE * (-(-(box.offset % CHUNK + box.nbytes) // CHUNK))
            found[box.file][box.offset] = body[at:end]
            at = end
    return found if at == len(body) else None


# --- What a take shares ----------------------------------------------------------------------------------------------


class BoxToWrite(NamedTuple):
    """A box that this rank is to write.

    Attributes:
        path, dtype, shape: of its tensor.
        offsets, sizes: which elements it has.
        memory: gives its bytes, in C order, in any thread.
        is_there: whether these are the tensor's own, so that parts of them can be had without a copy.
        nbytes: how many there are.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    memory: Callable[[], Any]
    is_there: bool
    nbytes: int


class SharedFiles(NamedTuple):
    """The files of a base that a rank's part has, too.

    Attributes:
        files: under their new names.
        boxes: of the boxes that needn't be written, by their numbers; `file` is the number in `files`.
        sums: of the boxes, for each file.
        traces: names of the claims that say whose the new names are.
    """

    files: tuple[ManifestFile, ...] = ()
    boxes: Mapping[int, ManifestBox] = {}
    sums: tuple[BoxSums, ...] = ()
    traces: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Returns the names of all that was made in the folder; the claims come last, as they are to be removed."""
        return [*(file.name for file in self.files), *self.traces]


_MOST_FILES = 64  # of one rank
_SHARE = 4 << 20  # bytes that a thread compares at a time
_BoxKey = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class _Match(NamedTuple):
    number: int
    box: ManifestBox
    sums: bytes


class _Comparison(NamedTuple):
    """A part of a box in memory, and the sums of its pieces."""

    number: int
    memory: Callable[[], Any]
    pieces: Sequence[tuple[int, int]]
    sums: bytes


class Base:
    """An earlier snapshot, of which a take shares what is unchanged. While it lives, no CheckpointManager removes it.

    Args:
        path: of its folder, or its URL.
        options: for a bucket.

    Raises:
        NotAStoreError: there is no snapshot.
        CorruptionError, FormatVersionError: its manifest can't be read.
    """

    def __init__(self, path: str, options: Mapping[str, Any] | None = None) -> None:
        self._held = None if is_url(path) else hold(path)
        self.path = path
        self._mark = _mark_of(path)
        self.manifest = load_manifest(path, options)
        self._storage = storage_at(path, options, files=self.manifest.files)
        self._sums = read_box_sums(self._storage, self.manifest)

    def share(
        self,
        storage: Storage,
        take: str,
        rank: int,
        world_size: int,
        durable: bool,
        wanted: Sequence[BoxToWrite],
        claim: Callable[[str], str] | None = None,
    ) -> SharedFiles:
        """Links the files that have unchanged boxes into the folder of a take. Returns what is shared.

        Args:
            storage: the folder of the take, or its place in a bucket.
            take: its id.
            rank, world_size: of this process in the take.
            durable: whether what is linked is synced: it may not be yet.
            wanted: the boxes that it is to write.
            claim: leaves a trace of files with an id in the folder, before they are there, and returns its name; None:
                that of a take.
        """
        if self._sums is None:
            _log.warning("%s has no sums of its boxes: the increment to it is written whole", self.path)
            return SharedFiles()
        by_file: dict[int, list[_Match]] = defaultdict(list)
        for match in self._unchanged(rank, wanted):
            by_file[match.box.file].append(match)
        bytes_of = {file: sum([match.box.nbytes for match in found]) for file, found in by_file.items()}
        worth = [file for file in by_file if 2 * bytes_of[file] >= self.manifest.files[file].size]
        files: list[ManifestFile] = []
        boxes: dict[int, ManifestBox] = {}
        sums: list[BoxSums] = []
        traces: list[str] = []
        try:
            for number in sorted(worth, key=lambda file: -bytes_of[file])[:_MOST_FILES]:
                file = self.manifest.files[number]
                maker = self.manifest.id if storage.is_remote else take
                own = xxhash.xxh3_64_hexdigest(f"{maker} {rank} {file.name}".encode())
                name = file_name("model" if is_model_file(file.name) else "state", rank, world_size, own)
                if not storage.is_remote:
                    if claim is None:
                        storage.publish(claim_name(own), b"", durable=False)
                    traces.append(claim_name(own) if claim is None else claim(own))
                if not self._link(storage, file, name, durable):
                    _log.info("%s/%s can't be linked into %s: it is written again", self.path, file.name, storage.path)
                    continue
                for match in by_file[number]:
                    box = match.box
                    boxes[match.number] = ManifestBox(len(files), box.offset, box.nbytes, box.offsets, box.shape)
                sums.append({match.box.offset: match.sums for match in by_file[number]})
                files.append(ManifestFile(name, file.size, file.sums))
            # A manifest is linked after its files, and no take writes beside one: so what was linked is of this base.
            if files and self._mark != _mark_of(self.path):
                _log.warning("%s was removed, or is another snapshot by now: the increment is whole", self.path)
                _remove_all(storage, files, traces)
                return SharedFiles()
        except BaseException:
            _remove_all(storage, files, traces)
            raise
        if worth and not files:
            _log.warning("the files of %s can't be linked into %s: the increment is whole", self.path, storage.path)
        return SharedFiles(tuple(files), boxes, tuple(sums), tuple(traces))

    def _link(self, storage: Storage, file: ManifestFile, name: str, durable: bool) -> bool:
        """Gives a file of the base a name in a take's folder, or has the service copy its objects."""
        other = self._storage
        if isinstance(storage, ObjectStorage):
            return isinstance(other, ObjectStorage) and storage.copy_from(other, file, name)
        return isinstance(other, FileStorage) and storage.link_from(other, file.name, name, file.size, durable=durable)

    def _unchanged(self, rank: int, wanted: Sequence[BoxToWrite]) -> list[_Match]:
        """Compares the boxes with those of the base, several at once. Returns those that are equal."""
        matches: list[_Match] = []
        comparisons: list[_Comparison] = []
        with collect_later():
            self._match(rank, wanted, matches, comparisons)
        changed: set[int] = set()

        def compare(some: Sequence[_Comparison]) -> None:
            for number, memory, pieces, sums in some:
                if number in changed:
                    continue
                found = memory()
                for i, (start, stop) in enumerate(pieces):
                    piece = found if stop - start == len(found) else found[start:stop]
                    if sum_of(piece) != sums[i * SUM_SIZE : (i + 1) * SUM_SIZE]:
                        changed.add(number)
                        break

        in_parallel(compare, list(_shares(comparisons)), lambda _: None)
        return [match for match in matches if match.number not in changed]

    def _match(
        self, rank: int, wanted: Sequence[BoxToWrite], matches: list[_Match], comparisons: list[_Comparison]
    ) -> None:
        """Finds the boxes that the base has, too, and what is to be compared of them."""
        there = self._boxes(rank)
        for number, one in enumerate(wanted):
            match = there.get((one.path, one.dtype, one.shape, one.offsets, one.sizes))
            if match is None or match[0].nbytes != one.nbytes:
                continue
            box, sums = match
            matches.append(_Match(number, box, sums))
            if len(sums) == SUM_SIZE:  # as of most
                comparisons.append(_Comparison(number, one.memory, ((0, box.nbytes),), sums))
                continue
            pieces = [
                (start - box.offset, stop - box.offset)
                for start, stop in pieces_between(box.offset, box.offset + box.nbytes)
            ]
            if not one.is_there:
                comparisons.append(_Comparison(number, one.memory, pieces, sums))
                continue
            for i, piece in enumerate(pieces):
                own = sums[i * SUM_SIZE : (i + 1) * SUM_SIZE]
                comparisons.append(_Comparison(number, one.memory, [piece], own))

    def _boxes(self, rank: int) -> dict[_BoxKey, tuple[ManifestBox, bytes]]:
        """Returns the boxes by what they are, with their sums; where several ranks have one, this rank's own."""
        found: dict[_BoxKey, tuple[ManifestBox, bytes]] = {}
        for tensor in self._tensors(rank):
            for box in tensor.boxes:
                sums = self._sums[box.file][box.offset] if self._sums is not None else b""
                found.setdefault((tensor.path, tensor.dtype, tensor.shape, box.offsets, box.shape), (box, sums))
        return found

    def _tensors(self, rank: int) -> Iterator[ManifestTensor]:
        """Yields all tensors, each once, and those of the rank first."""
        manifest = self.manifest
        own: dict[int, None] = {}
        if rank < len(manifest.ranks):
            for value in manifest.ranks[rank].values():
                own |= dict.fromkeys(manifest.values[value].tensors)
        for number in own:
            yield manifest.tensors[number]
        if len(own) < len(manifest.tensors):
            yield from [tensor for number, tensor in enumerate(manifest.tensors) if number not in own]


def _shares(comparisons: Sequence[_Comparison]) -> Iterator[list[_Comparison]]:
    """Yields the comparisons, several small ones together: to hand one to a thread takes as long as to sum 300 KB."""
    share: list[_Comparison] = []
    left = _SHARE
    for one in comparisons:
        share.append(one)
        left -= one.pieces[-1][1] - one.pieces[0][0]
        if left <= 0:
            yield share
            share, left = [], _SHARE
    if share:
        yield share


def _mark_of(path: str) -> tuple[int, int, int] | None:
    """Returns what tells the manifest in a folder from any other one; None if there is none, or in a bucket.

    There the objects that are copied have their checksums in their names, whatever manifest names them.
    """
    try:
        found = os.stat(f"{path}/{MANIFEST}", follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _remove_all(storage: Storage, files: Sequence[ManifestFile], traces: Sequence[str]) -> None:
    for name in [*(file.name for file in files), *traces]:
        with contextlib.suppress(OSError):  # there is another error to tell, or the next take removes it
            storage.remove(name)


def latest_beside(
    path: str, options: Mapping[str, Any] | None = None, *, or_there: bool = False, inner: str = ""
) -> str | None:
    """Returns the snapshot whose manifest is the newest in the folder that `path` lies in; None if there is none.

    Args:
        path: of a folder, or a URL.
        options: for a bucket.
        or_there: whether the one at `path` counts, too.
        inner: what lies between the path of a snapshot and its manifest, such as "/rank-0".
    """
    if is_url(path):
        return _latest_in_bucket(path, options, or_there, inner)
    newest: tuple[int, str] | None = None
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found = os.stat(f"{entry.path}{inner}/{MANIFEST}", follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode) and (or_there or entry.path != path):
                        newest = max(newest or (0, ""), (found.st_mtime_ns, entry.path))
    except OSError:
        return None
    return None if newest is None else newest[1]


def _latest_in_bucket(url: str, options: Mapping[str, Any] | None, or_there: bool, inner: str) -> str | None:
    place = parse_url(url)
    folder, _, own = place.key.rpartition("/")
    if not folder:
        return None  # all of the bucket would have to be listed
    found = open_bucket(place, options).list_all(folder)
    end = f"{inner}/{MANIFEST}"
    names = {name[: -len(end)]: one.modified for name, one in found.items() if name.endswith(end)}
    there = [one for one in names if (or_there or one != own) and "/" not in one]
    newest = max(there, key=lambda name: names[name], default=None)
    return None if newest is None else f"{place.scheme}://{place.bucket}/{folder}/{newest}"


_LENGTH = 8  # bytes that say how long the header of a file of tensors is


class Sharing(NamedTuple):
    """The bytes of a snapshot that aren't its alone.

    Attributes:
        shared: of files that other folders have, too, at this moment.
        unused: of files, where an increment doesn't use all that is in them: earlier values.
    """

    shared: int
    unused: int


def sharing_of(path: str, manifest: Manifest) -> Sharing:
    """Returns how much of the snapshot in a folder is shared; in a bucket, which has copies, nothing is."""
    used = [0] * len(manifest.files)
    for tensor in manifest.tensors:
        for box in tensor.boxes:
            used[box.file] += box.nbytes
    shared = unused = 0
    for file, needed in zip(manifest.files, used, strict=True):
        with contextlib.suppress(OSError), open(f"{path}/{file.name}", "rb") as opened:
            header = _LENGTH + int.from_bytes(opened.read(_LENGTH), "little")
            unused += max(file.size - header - needed, 0)
            if os.fstat(opened.fileno()).st_nlink > 1:
                shared += file.size
    return Sharing(shared, unused)
