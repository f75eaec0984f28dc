"""safetensors files, and Hugging Face's checkpoints of several: served in place, and written.

A file gives a dict of its tensors by name, as `safetensors.torch.load_file` does; a checkpoint one of all that its
index (`*.safetensors.index.json`) lists. The rules of headers are in `engine/format/headers.py`.

read_safetensors, read_checkpoint     what lies in files that exist
write_safetensors, write_checkpoint   new ones
whole_files                           which files of an adopted value may become the shards of a new folder as they are
beside_weights                        a model's configuration, and what else lies in its folder
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memstore import structure
from memstore._wording import short
from memstore.engine import (
    METADATA,
    PLAIN_METADATA,
    SAFETENSORS_DTYPES,
    TORCH_DTYPES,
    ExternalExtent,
    ExternalFiles,
    HeaderEntry,
    Leaf,
    header_size,
    make_header,
    opened,
    read_tensors,
    split_header,
    syscalls,
)
from memstore.errors import CorruptionError, PermissionDeniedError, UnsupportedValueError
from memstore.formats.files import (
    ByteMeter,
    damaged,
    new_file,
    new_folder,
    parse_object,
    parse_texts,
    parse_value,
    read_whole,
)
from memstore.structure import DTYPE_NAMES

INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 255  # of a file
_MOST_DIMENSIONS = 64  # of a tensor


def find_in_folder(folder: str) -> str | None:
    """Returns the file that a checkpoint begins with, as transformers chooses it; None if the folder has none."""
    names = sorted(os.listdir(folder))
    for ending in ("model.safetensors", INDEX, ".safetensors.index.json", ".safetensors"):
        found = [name for name in names if name == ending or (name.endswith(ending) and ending.startswith("."))]
        if len(found) > 1:
            raise UnsupportedValueError(f"{folder} has several *{ending}, attach one of them: {', '.join(found[:5])}")
        if found:
            _resolved(folder, found[0], folder)
            return os.path.join(folder, found[0])
    return None


def read_safetensors(path: str, sources: ExternalFiles) -> structure.ExternalValue:
    """Reads a single file; `path` may be a link to it."""
    return _as_dict(_read_file(os.path.realpath(path), sources))


def read_checkpoint(path: str, sources: ExternalFiles) -> structure.ExternalValue:
    """Reads a checkpoint of several files; `path` is that of its index."""
    folder = os.path.dirname(path)
    listed = _read_index(path)
    tensors: dict[str, dict[str, Leaf]] = {}
    for name in dict.fromkeys(listed.values()):
        tensors[name] = _read_file(_resolved(folder, name, path), sources)
    chosen: dict[str, Leaf] = {}
    for tensor, name in listed.items():
        if tensor not in tensors[name]:
            damaged(path, f"it says that the tensor {short(tensor)} is in {name}, and there it is not")
        chosen[tensor] = tensors[name][tensor]
    return _as_dict(chosen)


def _as_dict(tensors: dict[str, Leaf]) -> structure.ExternalValue:
    return structure.describe_external_tree(("dict", list(tensors), [0] * len(tensors)), list(tensors.values()))


# --- the files of a checkpoint ----------------------------------------------------------------------------------------


def _read_index(path: str) -> dict[str, str]:
    """Returns which file each tensor is in."""
    index = parse_object(path, read_whole(os.path.realpath(path)))
    if "weight_map" not in index:
        damaged(path, "it has no weight_map")
    listed = parse_texts(path, index["weight_map"])
    for name in dict.fromkeys(listed.values()):
        if not name or len(name) > _LONGEST_NAME or "/" in name or "\0" in name or name in (".", ".."):
            damaged(path, f"it says that tensors are in {short(name)}, which names no file beside it")
    return listed


def _resolved(folder: str, name: str, index: str) -> str:
    """Returns the path of a file beside the index.

    A link may lead within the folder, or to where Hugging Face's cache has the contents of its `snapshots/REVISION/`:
    `blobs/`. Others could make an entry of whatever this process may read.
    """
    home = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(home, name))
    allowed = [home]
    above, _, _ = f"{home}/".rpartition("/snapshots/")
    if above:
        allowed.append(f"{above}/blobs")
    if not any(path.startswith(f"{place}/") for place in allowed):
        raise PermissionDeniedError(f"{home}/{name} is a link out of its folder, to {path}: attach that by itself")
    if not os.path.lexists(path):
        damaged(index, f"it names {name}, which is missing")
    return path


# --- headers ----------------------------------------------------------------------------------------------------------


def read_metadata(path: str) -> dict[str, dict[str, str]]:
    """Returns the texts beside the tensors, of each file of a checkpoint, by its path.

    Args:
        path: that of a file by itself, or of an index.
    """
    names = dict.fromkeys(_read_index(path).values()) if path.endswith(".json") else [os.path.basename(path)]
    found: dict[str, dict[str, str]] = {}
    for name in names:
        file = os.path.join(os.path.dirname(path), name)
        with opened(os.path.realpath(file)) as (fd, status):
            try:
                found[file] = split_header(_read_header(fd, status.st_size))[0]
            except CorruptionError as error:
                damaged(file, error.detail)
    return found


def _read_header(fd: int, size: int) -> bytes:
    return syscalls.read_at(fd, header_size(syscalls.read_at(fd, 8, 0), size) - 8, 8)


def _read_file(path: str, sources: ExternalFiles) -> dict[str, Leaf]:
    """Reads the tensors of a file by name, ordered as their bytes are."""
    with opened(path) as (fd, found):
        try:
            text = _read_header(fd, found.st_size)
            start = 8 + len(text)
            metadata, values = split_header(text)
            if metadata.get("memstore", "").startswith("put="):
                what = "it belongs to a store, which will use it for other values"
                raise UnsupportedValueError(f"{what}: export it first")
            entries = read_tensors(values, found.st_size - start)
        except CorruptionError as error:
            damaged(path, error.detail)
        except UnsupportedValueError as error:
            raise UnsupportedValueError(f"{path}: {error.message}") from None
        base = sources.add(path, found) + start
    return {name: _leaf(path, name, entry, base) for name, entry in entries.items()}


def _leaf(path: str, name: str, entry: HeaderEntry, base: int) -> Leaf:
    if len(entry.shape) > _MOST_DIMENSIONS:
        damaged(
            path, f"its entry {short(name)} has {len(entry.shape):,} dimensions, and {_MOST_DIMENSIONS} are the limit"
        )
    start, stop = entry.data_offsets
    return Leaf((), TORCH_DTYPES[entry.dtype], entry.shape, None, base + start, stop - start)


# --- files that become part of a new folder ---------------------------------------------------------------------------


class Beside(NamedTuple):
    """A file beside the weights: its name, and its contents or the path that it is copied from."""

    name: str
    content: bytes | str

    def place(self, target: str, meter: ByteMeter) -> None:
        with new_file(target, meter, durable=False) as file:
            file.write_uncounted(read_whole(self.content) if isinstance(self.content, str) else self.content)


class WholeFile(NamedTuple):
    """A file of an adopted value that becomes a shard as it is, by a hard link or a copy."""

    extent: ExternalExtent
    names: tuple[str, ...]
    link: bool

    def place(self, target: str, meter: ByteMeter) -> None:
        """Raises CorruptionError if it isn't the file that was attached."""
        is_linked = False
        if self.link:
            with contextlib.suppress(OSError):  # another file system, a file of another user, too many links
                syscalls.link(self.extent.path, target)
                is_linked = True
        if is_linked:
            self._check(os.lstat(target))
            meter.add(self.extent.size)
            return
        with opened(self.extent.path) as (source, found), new_file(target, meter, durable=False) as file:
            self._check(found)
            file.write_copy(source)

    def _check(self, found: os.stat_result) -> None:
        extent = self.extent
        if (found.st_size, found.st_mtime_ns, found.st_ino) != (extent.size, extent.mtime_ns, extent.inode):
            damaged(extent.path, "it isn't the file any more that was attached")


def whole_files(extents: Sequence[ExternalExtent], names: Collection[str], *, link: bool) -> list[WholeFile]:
    """Returns the files that have exactly these tensors, and transformers can load; none if they don't."""
    found: list[WholeFile] = []
    for extent in extents:
        if not extent.path.endswith(".safetensors") and "/blobs/" not in extent.path:
            return []
        try:
            with opened(extent.path) as (fd, status):
                text = _read_header(fd, status.st_size)
            metadata, _ = split_header(text)
            found.append(WholeFile(extent, tuple(_read_file(extent.path, ExternalFiles())), link))
        except (CorruptionError, UnsupportedValueError):
            return []
        if metadata.get("format") != PLAIN_METADATA["format"]:
            return []
    there = [name for file in found for name in file.names]
    return found if len(there) == len(names) and set(there) == set(names) else []


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_CONFIG = "config.json"
_OF_DTYPE = ("dtype", "torch_dtype")  # transformers 5 writes the first, older ones and other engines the second


def beside_weights(config: Any, dtype: torch.dtype | None) -> list[Beside]:
    """Returns the files beside a model's weights.

    Args:
        config: as of `Store.export_hf`.
        dtype: what the weights are cast to, which `config.json` has to say.

    Raises:
        TypeError: `config` is none of these.
        FileNotFoundError: the file, or `config.json` in the folder, isn't there.
        CorruptionError: it is no JSON object.
    """
    if config is None:
        return []
    others: list[Beside] = []
    if isinstance(config, (str, os.PathLike)):
        path = os.path.abspath(os.fspath(config))
        if os.path.isdir(path):
            for name in sorted(os.listdir(path)):
                file = os.path.realpath(f"{path}/{name}")  # Hugging Face's cache has links
                is_other = not name.startswith(".") and not name.endswith(_WEIGHTS) and name != _CONFIG
                if is_other and stat.S_ISREG(os.stat(file).st_mode):
                    others.append(Beside(name, file))
            path = f"{path}/{_CONFIG}"
        if not os.path.exists(path):
            what = f"config is a folder with a {_CONFIG}, or such a file, and no name of a hub: there is none"
            raise FileNotFoundError(errno.ENOENT, what, path)
        found: Any = parse_value(path, read_whole(os.path.realpath(path)))
        where = path
    else:
        where = _CONFIG
        made = getattr(config, "to_json_string", None)  # a PreTrainedConfig
        if made is None and not isinstance(config, Mapping):
            raise TypeError(
                "config is a model's configuration, a dict, or the path of a config.json or of a folder that has one, "
                f"and not {config!r:.100}"
            )
        found = dict(config) if made is None else json.loads(made())
        ties: Any = getattr(config, "tie_word_embeddings", None)
        if made is not None and ties is not None:  # of which it writes no default
            found["tie_word_embeddings"] = bool(ties)
    if not isinstance(found, dict):
        damaged(where, "it is no JSON object")
    if dtype is not None:
        known = [name for name in _OF_DTYPE if name in found] or [_OF_DTYPE[-1]]
        found |= dict.fromkeys(known, str(dtype).removeprefix("torch."))
    return [Beside(_CONFIG, json.dumps(found, indent=2).encode()), *others]


def ties_weights(beside: Iterable[Beside]) -> bool:
    """Returns whether the configuration says that loading ties the embeddings."""
    for file in beside:
        if file.name == _CONFIG and isinstance(file.content, bytes):
            return json.loads(file.content).get("tie_word_embeddings") is True
    return False


# --- writing ----------------------------------------------------------------------------------------------------------


def why_not(name: str, tensor: torch.Tensor) -> str | None:
    """Says what keeps a tensor from being written, if anything."""
    if DTYPE_NAMES[tensor.dtype] not in SAFETENSORS_DTYPES:
        return f"it is of {tensor.dtype}"
    return "its name is that of the metadata" if name == METADATA else None


def write_safetensors(
    path: str, tensors: dict[str, torch.Tensor], meter: ByteMeter, *, durable: bool, dtype: torch.dtype | None = None
) -> None:
    """Writes a file by itself, in place of one that is there; floating-point tensors are cast to `dtype`."""
    header, order = header_of({name: as_written(tensor, dtype) for name, tensor in tensors.items()})
    with new_file(path, meter, durable=durable) as file:
        file.write_uncounted(header)
        for name in order:
            file.write_tensor(tensors[name], as_written(tensors[name], dtype).dtype)


def as_written(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns what has the shape and the dtype of a tensor in its file: the tensor itself, or one without memory."""
    if dtype is None or tensor.dtype == dtype or not tensor.dtype.is_floating_point:
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def write_checkpoint(
    path: str,
    tensors: dict[str, torch.Tensor],
    limit: int | None,
    meter: ByteMeter,
    *,
    durable: bool,
    dtype: torch.dtype | None = None,
    beside: Iterable[Beside] = (),
    whole: Iterable[WholeFile] = (),
) -> None:
    """Writes a folder as transformers does: `model.safetensors`, or shards of up to `limit` bytes and an index.

    Args:
        dtype: floating-point tensors are cast to it.
        beside: further files of the folder.
        whole: files that have all of the tensors, as they are written: they become the shards.
    """
    given = list(whole)
    shards = [dict.fromkeys(file.names, None) for file in given] or shards_of(
        {name: as_written(tensor, dtype) for name, tensor in tensors.items()}, limit
    )
    names = shard_names(len(shards))
    with new_folder(path, durable=durable) as folder:
        for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
            if given:
                given[number].place(f"{folder}/{name}", meter)
            else:
                chosen = {tensor: tensors[tensor] for tensor in shard}
                write_safetensors(f"{folder}/{name}", chosen, meter, durable=False, dtype=dtype)
        if len(shards) > 1:
            listed = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            with new_file(f"{folder}/{INDEX}", meter, durable=False) as file:
                file.write_uncounted(index_of(listed, meter.total))
        for other in beside:
            other.place(f"{folder}/{other.name}", meter)


def shard_names(count: int) -> list[str]:
    """Returns the names of a checkpoint's files, as transformers calls them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def index_of(listed: dict[str, str], nbytes: int) -> bytes:
    """Makes the index of a checkpoint.

    Args:
        listed: the file of each tensor.
        nbytes: of the tensors.
    """
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(listed.items()))}
    return json.dumps(index, indent=2).encode()


def shards_of(tensors: dict[str, torch.Tensor], limit: int | None) -> list[dict[str, torch.Tensor]]:
    """Fills shards in the order of the tensors. One that is larger than the limit has a shard for itself."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.itemsize
        if room is not None and limit is not None:
            if nbytes > room and shards[-1]:
                shards.append({})
                room = limit
            room -= nbytes
        shards[-1][name] = tensor
    return shards


def header_of(
    tensors: dict[str, torch.Tensor], metadata: Mapping[str, str] = PLAIN_METADATA
) -> tuple[bytes, list[str]]:
    """Makes a header, and orders the tensors by element size, so that each starts on a multiple of its own."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    described = [
        (name, DTYPE_NAMES[one.dtype], tuple(one.shape), one.numel() * one.itemsize)
        for name, one in ((name, tensors[name]) for name in order)
    ]
    return make_header(described, metadata), order
