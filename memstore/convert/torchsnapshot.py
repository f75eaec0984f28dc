"""Folders that torchsnapshot has written: what rank 0 would restore, with what was spread over the ranks put together.

    .snapshot_metadata      JSON, or YAML by older versions: an entry for each path, "RANK/NAME/KEY/..."
    RANK/..., replicated/..., sharded/..., batched/...      bytes of tensors, or what torch.save makes of objects

What ranks have each for themselves must be the same on all of them, since a conversion has one value.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections import OrderedDict
from typing import Any, NoReturn
from urllib.parse import unquote

import msgspec
import torch

from memstore._parsing import UNDECODABLE
from memstore._threads import between_forks
from memstore._wording import short
from memstore.convert.leaves import Assembly, Rules, SourceFiles, SourceValue, load_object, why_not_whole
from memstore.errors import CorruptionError, MissingPackageError, UnsupportedValueError
from memstore.formats import are_sizes, read_whole
from memstore.sharding import Box
from memstore.structure import DTYPES, MAX_DEPTH, count

TORCHSNAPSHOT_METADATA = ".snapshot_metadata"
_CONTAINERS = ("dict", "OrderedDict", "list")
_SHARDED = ("ShardedTensor", "DTensor")


class _ManifestEntry(msgspec.Struct):
    """An entry of the manifest; which fields it has depends on its type."""

    type: str = ""
    location: str = ""
    serializer: str = ""
    dtype: str = ""
    shape: list[int] = []
    byte_range: list[int] | None = None
    keys: list[str | int] = []
    shards: list[_ManifestShard] = []
    chunks: list[_ManifestShard] = []
    serialized_value: str = ""
    replicated: bool = False


class _ManifestShard(msgspec.Struct):
    offsets: list[int]
    sizes: list[int]
    tensor: _ManifestEntry


class _SnapshotMetadata(msgspec.Struct):
    version: str
    world_size: int
    manifest: dict[str, _ManifestEntry]


def open_torchsnapshot(path: str, rules: Rules) -> SourceValue:
    """Opens the app state, as rank 0 would restore it.

    Raises:
        UnsupportedValueError: ranks have different values at a path, or an object needs pickle that isn't allowed.
        CorruptionError: the metadata makes no sense, or a file is missing or too short.
        MissingPackageError: it is YAML, and PyYAML isn't installed.
    """
    return _Snapshot(path, rules).found()


class _Snapshot:
    def __init__(self, path: str, rules: Rules) -> None:
        self._path, self._rules, self._files = path, rules, SourceFiles(path)
        self._assembly = Assembly()
        self._ranks: dict[str, dict[int, _ManifestEntry]] = {}  # by path without the rank
        self._inside: dict[str, list[str]] = {}
        for name, entry in _read_metadata(path).manifest.items():
            rank, _, rest = name.partition("/")
            if not rank.isdecimal() or not rank.isascii() or len(rank) > 9:
                self._damaged(f"the path {short(name)} starts with no rank")
            if rest:
                self._ranks.setdefault(rest, {})[int(rank)] = entry
        for name in self._ranks:
            parent, _, last = name.rpartition("/")
            self._inside.setdefault(parent, []).append(last)

    def found(self) -> SourceValue:
        names = [name for name in self._inside.get("", []) if name]
        return SourceValue({unquote(name): self._value(name, 0) for name in names}, self._assembly.boxes)

    def _value(self, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UnsupportedValueError(f"{self._path}: {path:.100}... is nested more than {MAX_DEPTH} levels deep")
        ranks = self._ranks[path]
        entry = ranks[min(ranks)]
        if entry.type in _CONTAINERS:
            keys = dict.fromkeys(key for one in ranks.values() for key in one.keys)
            return self._container(path, entry.type, list(keys), depth)
        if entry.type in _SHARDED:
            self._check_ranks(path, ranks)
            return self._sharded(path, [shard for one in ranks.values() for shard in one.shards])
        first = self._leaf(path, entry)
        for rank, other in ranks.items():
            if other is not entry and not self._is_same(path, entry, first, other):
                raise UnsupportedValueError(
                    f"{self._path}: ranks {min(ranks)} and {rank} have different values at {path}, and a conversion "
                    "has one: restore it with as many ranks, and take it anew without"
                )
        return first

    def _container(self, path: str, kind: str, keys: list[str | int], depth: int) -> Any:
        tokens = self._inside.get(path, [])
        if kind == "list":
            if not all(token.isdecimal() and token.isascii() for token in tokens):
                self._damaged(f"the list at {path} has entries without numbers")
            return [self._value(f"{path}/{token}", depth + 1) for token in sorted(tokens, key=int)]
        made: dict[Any, Any] = OrderedDict() if kind == "OrderedDict" else {}
        known = set(tokens)
        for key in keys:
            token = _token(key)
            if token in known:
                made[key] = self._value(f"{path}/{token}", depth + 1)
        return made

    def _leaf(self, path: str, entry: _ManifestEntry) -> Any:
        if entry.type == "Tensor":
            return self._tensor(path, entry)
        if entry.type == "ChunkedTensor":
            return self._assembled(path, entry.chunks, entry.shape)
        if entry.type == "object":
            return load_object(f"{self._path}: {path}", self._stored_bytes(entry), self._rules)
        return self._primitive(path, entry)

    def _is_same(self, path: str, entry: _ManifestEntry, first: Any, other: _ManifestEntry) -> bool:
        if other.type != entry.type or other.shape != entry.shape or other.dtype != entry.dtype:
            return False
        if other.location and (other.location, other.byte_range) == (entry.location, entry.byte_range):
            return True
        if other.type == "object":
            return self._stored_bytes(other) == self._stored_bytes(entry)
        if not isinstance(first, torch.Tensor):
            return other.serialized_value == entry.serialized_value
        found = SourceValue(None, self._assembly.boxes)
        one, two = found.leaf(first), found.leaf(self._leaf(path, other))
        return all(bool((one.read(piece) == two.read(piece)).all()) for piece in one.pieces())

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _check_ranks(self, path: str, ranks: dict[int, _ManifestEntry]) -> None:
        """Checks that each rank whose container has the tensor says what its part is: no entry has the whole shape."""
        parent, _, last = path.rpartition("/")
        for rank, container in self._ranks.get(parent, {}).items():
            if rank not in ranks and any(_token(key) == last for key in container.keys):
                self._damaged(f"rank {rank} had a part of {path}, of which the metadata says nothing")

    def _sharded(self, path: str, shards: list[_ManifestShard]) -> torch.Tensor:
        """Assembles a tensor of which each rank has a part. Ranks that have the same part are one."""
        if not shards:
            self._damaged(f"{path} has no shards")
        distinct = {(tuple(shard.offsets), tuple(shard.sizes)): shard for shard in reversed(shards)}
        dims = {len(offsets) for offsets, _ in distinct} | {len(sizes) for _, sizes in distinct}
        if len(dims) != 1:
            self._damaged(f"the shards of {path} have different dimensions")
        shape = [max(offsets[dim] + sizes[dim] for offsets, sizes in distinct) for dim in range(dims.pop())]
        return self._assembled(path, list(distinct.values()), shape)

    def _assembled(self, path: str, shards: list[_ManifestShard], shape: list[int]) -> torch.Tensor:
        boxes: list[tuple[Box, torch.Tensor]] = []
        for shard in shards:
            fits = are_sizes([*shard.offsets, *shard.sizes], most=128) and shard.sizes == shard.tensor.shape
            if not fits or not len(shard.offsets) == len(shard.sizes) == len(shape):
                self._damaged(f"{path} has a shard at {shard.offsets!r:.100} of {shard.sizes!r:.100}")
            box = Box(tuple(shard.offsets), tuple(shard.sizes))
            if not box.is_empty:
                boxes.append((box, self._tensor(path, shard.tensor)))
        dtypes = {tensor.dtype for _, tensor in boxes}
        if len(dtypes) > 1:
            self._damaged(f"the shards of {path} are of several dtypes")
        reason = why_not_whole(shape, [box for box, _ in boxes])
        if reason is not None or not shards:
            self._damaged(f"the shards of {path} {reason or 'are missing'}")
        dtype = dtypes.pop() if dtypes else self._dtype(path, shards[0].tensor)
        return self._assembly.tensor(dtype, shape, tuple(boxes))

    def _tensor(self, path: str, entry: _ManifestEntry) -> torch.Tensor:
        dtype = self._dtype(path, entry)
        if not are_sizes(entry.shape):
            self._damaged(f"{path} has the shape {entry.shape!r:.100}")
        start, stop = self._range(entry)
        if entry.serializer == "buffer_protocol":
            if stop - start != count(entry.shape) * dtype.itemsize:
                self._damaged(f"{path} has {stop - start:,} bytes for a {dtype}{entry.shape}")
            return self._files.tensor(entry.location, start, dtype, entry.shape)
        if entry.serializer != "torch_save":
            raise UnsupportedValueError(
                f"{self._path}: {path} is stored as {entry.serializer!r:.60}, which isn't converted: restore it with "
                "torchsnapshot"
            )
        placed = self._files.locate(entry.location, start, stop - start)
        if (placed.dtype, list(placed.shape)) != (dtype, entry.shape):
            self._damaged(f"{path} is a {placed.dtype}{list(placed.shape)}, and no {dtype}{entry.shape}")
        return self._files.tensor(entry.location, placed.start, dtype, placed.shape, placed.stride, placed.offset)

    def _dtype(self, path: str, entry: _ManifestEntry) -> torch.dtype:
        found = DTYPES.get(entry.dtype.removeprefix("torch."))
        if found is None:
            raise UnsupportedValueError(f"{self._path}: {path} is of {entry.dtype!r:.60}, which isn't converted")
        return found

    def _range(self, entry: _ManifestEntry) -> tuple[int, int]:
        size = len(self._files.bytes(entry.location))
        if entry.byte_range is None:
            return 0, size
        if not are_sizes(entry.byte_range) or len(entry.byte_range) != 2 or entry.byte_range[0] > entry.byte_range[1]:
            self._damaged(f"{entry.location} has a part from {entry.byte_range!r:.60}")
        start, stop = entry.byte_range
        if stop > size:
            self._files.damaged(entry.location, f"it has {size:,} bytes, and those up to {stop:,} are needed")
        return start, stop

    # --- what is no tensor --------------------------------------------------------------------------------------------

    def _stored_bytes(self, entry: _ManifestEntry) -> bytes:
        start, stop = self._range(entry)
        return self._files.bytes(entry.location)[start:stop].tobytes()

    def _primitive(self, path: str, entry: _ManifestEntry) -> Any:
        text = entry.serialized_value
        try:
            if entry.type == "int":
                return int(text)
            if entry.type == "str":
                return text
            if entry.type == "bool":
                return {"True": True, "False": False}[text]
            if entry.type == "bytes":
                return base64.b64decode(text, validate=True)
            if entry.type == "float":
                return struct.unpack("<d", base64.b64decode(text, validate=True))[0]
        except (ValueError, KeyError, binascii.Error, struct.error):
            self._damaged(f"{path} is no {entry.type}: {text!r:.60}")
        raise UnsupportedValueError(f"{self._path}: {path} is a {entry.type!r:.60}, which isn't known")

    def _damaged(self, detail: str) -> NoReturn:
        raise CorruptionError(path=f"{self._path}/{TORCHSNAPSHOT_METADATA}", detail=detail)


def _token(key: str | int) -> str:
    """Returns a key as a path has it."""
    return str(key).replace("%", "%25").replace("/", "%2F")


def _read_metadata(folder: str) -> _SnapshotMetadata:
    path = f"{folder}/{TORCHSNAPSHOT_METADATA}"
    text = read_whole(path)
    try:
        if text.lstrip().startswith(b"{"):
            return msgspec.json.decode(text, type=_SnapshotMetadata)
        return msgspec.convert(_parse_yaml(path, text), type=_SnapshotMetadata)
    except UNDECODABLE as error:
        raise CorruptionError(path=path, detail=f"it can't be read: {error}") from None


def _parse_yaml(path: str, text: bytes) -> Any:
    """Parses what versions of torchsnapshot before 0.2 write."""
    with between_forks():
        try:
            import yaml
        except ImportError:
            raise MissingPackageError(f"{path} is YAML, as old versions write it: pip install pyyaml") from None
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CorruptionError(path=path, detail=f"it is no YAML: {error}") from None
