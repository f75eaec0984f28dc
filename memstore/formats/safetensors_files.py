"""safetensors files, and Hugging Face's checkpoints of several, adopted in place.

    | size of the header, 8 bytes | {"__metadata__": {...}, "name": {"dtype", "shape", "data_offsets"}, ...} | data |

A file gives a dict of its tensors by name, as `safetensors.torch.load_file` does; a checkpoint one of all that its
index (`*.safetensors.index.json`) lists. As strict as the format's own reader: the tensors cover the data, without
holes, overlaps or anything behind them, and no name comes twice.
"""

from __future__ import annotations

import json
import math
import os
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from memstore import structure
from memstore.engine import HEADER_LIMIT, SAFETENSORS_DTYPES, ExternalFiles, Leaf, opened, syscalls
from memstore.errors import PermissionDeniedError, UnsupportedValueError
from memstore.formats.documents import damaged, parse_object, parse_texts, read_whole, short
from memstore.formats.output import Meter, new_file, new_folder
from memstore.structure import DTYPE_NAMES, DTYPES

_INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 255  # of a file
_FIELDS = 3  # of an entry
_CODES = {code: name for name, code in SAFETENSORS_DTYPES.items()}


def find_in_folder(folder: str) -> str | None:
    """The path of the file that a checkpoint begins with, as transformers chooses it; None if the folder has none."""
    names = sorted(os.listdir(folder))
    for ending in ("model.safetensors", _INDEX, ".safetensors.index.json", ".safetensors"):
        found = [name for name in names if name == ending or (name.endswith(ending) and ending.startswith("."))]
        if len(found) > 1:
            raise UnsupportedValueError(f"{folder} has several *{ending}, attach one of them: {', '.join(found[:5])}")
        if found:
            _resolved(folder, found[0], folder)
            return os.path.join(folder, found[0])
    return None


def adopt_file(path: str, sources: ExternalFiles) -> structure.Adopted:
    """A single file; `path` may be a link to it."""
    return _as_dict(_read_file(os.path.realpath(path), sources))


def adopt_index(path: str, sources: ExternalFiles) -> structure.Adopted:
    """A checkpoint of several files, by its index."""
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


def _as_dict(tensors: dict[str, Leaf]) -> structure.Adopted:
    return structure.adopt_tree(("dict", list(tensors), [0] * len(tensors)), list(tensors.values()))


# --- the files of a checkpoint ----------------------------------------------------------------------------------------


def _read_index(path: str) -> dict[str, str]:
    """Which file each tensor is in."""
    index = parse_object(path, read_whole(os.path.realpath(path)))
    if "weight_map" not in index:
        damaged(path, "it has no weight_map")
    listed = parse_texts(path, index["weight_map"])
    for name in dict.fromkeys(listed.values()):
        if not name or len(name) > _LONGEST_NAME or "/" in name or "\0" in name or name in (".", ".."):
            damaged(path, f"it says that tensors are in {short(name)}, which names no file beside it")
    return listed


def _resolved(folder: str, name: str, index: str) -> str:
    """The path of a file beside the index. A link may lead within the folder, or to where Hugging Face's cache has
    the contents of its `snapshots/REVISION/`: `blobs/`. Others could make an entry of whatever this process may read.
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


def _read_file(path: str, sources: ExternalFiles) -> dict[str, Leaf]:
    """The tensors of a file by name, ordered as their bytes are."""
    with opened(path) as (fd, found):
        start = syscalls.read_at(fd, 8, 0)
        size = int.from_bytes(start, "little")
        if len(start) < 8 or 8 + size > found.st_size:
            damaged(path, f"{found.st_size:,} bytes are not even its header: it is truncated, or no safetensors file")
        if size > HEADER_LIMIT:
            damaged(path, f"a header of {size:,} bytes, and {HEADER_LIMIT:,} are the limit")
        entries = parse_object(path, syscalls.read_at(fd, size, 8))
        _check_metadata(path, entries.pop("__metadata__", None))
        base = sources.add(path, found) + 8 + size
        leaves = {name: _leaf(path, name, text, base) for name, text in entries.items()}
        ordered = dict(sorted(leaves.items(), key=_place))
        _check_cover(path, ordered, base, found.st_size - 8 - size)
    return ordered


def _place(item: tuple[str, Leaf]) -> tuple[int, int]:
    return item[1].offset, item[1].nbytes


def _check_metadata(path: str, text: msgspec.Raw | None) -> None:
    if text is not None and parse_texts(path, text).get("memstore", "").startswith("put="):
        raise UnsupportedValueError(f"{path} belongs to a store, which will use it for other values: export it first")


Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct, gc=False):
    """What the header says of a tensor."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]
    data_offsets: tuple[Size, Size]


_read_entry = msgspec.json.Decoder(_Entry).decode


def _leaf(path: str, name: str, text: msgspec.Raw, base: int) -> Leaf:
    """An entry of the header, each by itself. `base` is where the data starts."""
    try:
        entry = _read_entry(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        damaged(path, f"its entry {short(name)} is no dtype, shape and data_offsets: {error}")
    if bytes(text).count(b":") != _FIELDS:
        parse_object(path, text)  # it has others besides, or one of them twice
    dtype = _CODES.get(entry.dtype)
    start, stop = entry.data_offsets
    if dtype is None:
        what = f"the tensor {short(name)} has the dtype {short(entry.dtype)}"
        raise UnsupportedValueError(f"{path}: {what}, which can't be served")
    nbytes = DTYPES[dtype].itemsize * math.prod(entry.shape)
    if stop - start != nbytes:
        what = f"the tensor {short(name)} of {entry.dtype} and shape {short(list(entry.shape))}"
        damaged(path, f"{what} takes {nbytes:,} bytes, not {stop - start:,}")
    return Leaf((), dtype, entry.shape, None, base + start, nbytes)


def _check_cover(path: str, leaves: dict[str, Leaf], base: int, nbytes: int) -> None:
    end = base
    for name, leaf in leaves.items():
        if leaf.offset != end:
            what = "overlaps the one before it" if leaf.offset < end else "leaves a hole before it"
            where = f"it starts at {leaf.offset - base:,} of the data, not {end - base:,}"
            damaged(path, f"the tensor {short(name)} {what}: {where}")
        end += leaf.nbytes
    end -= base
    if end != nbytes:
        damaged(path, f"its tensors take {end:,} bytes, and it has {nbytes:,}: it is truncated, or has more behind it")


# --- writing ----------------------------------------------------------------------------------------------------------


def why_not(name: str, tensor: torch.Tensor) -> str | None:
    """What keeps a tensor from being written, if anything."""
    if DTYPE_NAMES[tensor.dtype] not in SAFETENSORS_DTYPES:
        return f"it is of {tensor.dtype}"
    return "its name is that of the metadata" if name == "__metadata__" else None


def write_file(path: str, tensors: dict[str, torch.Tensor], meter: Meter, *, durable: bool) -> None:
    """A file by itself, in place of one that is there."""
    header, order = _header(tensors)
    with new_file(path, meter, durable=durable) as file:
        file.write_uncounted(header)
        for name in order:
            file.write_tensor(tensors[name])


def write_checkpoint(
    path: str, tensors: dict[str, torch.Tensor], limit: int | None, meter: Meter, *, durable: bool
) -> None:
    """A folder as transformers writes it: `model.safetensors`, or shards of up to `limit` bytes and their index."""
    shards = _shards(tensors, limit)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    with new_folder(path, durable=durable) as folder:
        for name, shard in zip(names, shards, strict=True):
            write_file(f"{folder}/{name}", shard, meter, durable=False)
        if len(shards) > 1:
            listed = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": meter.total}, "weight_map": dict(sorted(listed.items()))}
            with new_file(f"{folder}/{_INDEX}", meter, durable=False) as file:
                file.write_uncounted(json.dumps(index, indent=2).encode())


def _shards(tensors: dict[str, torch.Tensor], limit: int | None) -> list[dict[str, torch.Tensor]]:
    """Filled in the order of the tensors. One that is larger than the limit has a shard for itself."""
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


def _header(tensors: dict[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """And the order of the tensors: by element size, so that each starts on a multiple of its own, as the data does."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        code = SAFETENSORS_DTYPES[DTYPE_NAMES[tensor.dtype]]
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise UnsupportedValueError(f"the names of {len(tensors):,} tensors don't fit into a header of safetensors")
    return len(text).to_bytes(8, "little") + text, order
