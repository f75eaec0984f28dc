"""Formats that a Store attaches too: their own readers check and map them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from memstore.convert.leaves import Found
from memstore.convert.rules import Rules
from memstore.engine import opened, syscalls
from memstore.errors import UnsupportedValueError
from memstore.formats import are_sizes, find_in_folder, is_legacy, load_files, parse_value, read_metadata

_SHARDS = "DCP_SHARDING_INFO"  # in the metadata: where the tensors of a file start in the whole ones
_MOST_LOADED = 256 << 20  # bytes of a file that can't be mapped


def open_torch(path: str, rules: Rules) -> Found:
    """A file of torch.save."""
    with opened(os.path.realpath(path)) as (fd, found):
        if found.st_size > _MOST_LOADED and is_legacy(syscalls.read_at(fd, 64, 0)):
            raise UnsupportedValueError(
                f"{path} has torch.save's format before torch 1.6, which is loaded whole, and {found.st_size:,} bytes: "
                "load it with torch.load where there is the memory, and save it anew"
            )
    return Found(load_files("", path, "torch", allow_pickle=rules.allow_pickle))


def open_safetensors(path: str, rules: Rules) -> Found:
    """A file of safetensors, a folder of Hugging Face, or the index in one.

    Raises:
        UnsupportedValueError: the files are parts of tensors; or a folder has several files, and no index.
    """
    try:
        first = find_in_folder(path) if os.path.isdir(path) else path
    except UnsupportedValueError as error:  # several files, and no index
        for name in sorted(os.listdir(path)):
            if name.endswith(".safetensors"):
                _check_whole(read_metadata(f"{path}/{name}"), listed=False)
        raise UnsupportedValueError(error.message.replace("attach one", "convert one")) from error
    value = load_files("", path, "safetensors", allow_pickle=rules.allow_pickle)
    metadata = read_metadata(first or path)
    _check_whole(metadata, listed=(first or path).endswith(".json"))
    return Found(value, metadata={file: _without_torchs(said) for file, said in metadata.items()})


def _without_torchs(metadata: Mapping[str, str]) -> dict[str, str]:
    """Not what torch says of parts: the tensors are whole."""
    return {name: text for name, text in metadata.items() if name not in (_SHARDS, "DCP_VERSION")}


def _check_whole(metadata: Mapping[str, Mapping[str, str]], *, listed: bool) -> None:
    """Raises UnsupportedValueError for files with the parts of tensors that a rank had.

    torch's HuggingFaceStorageWriter says of each tensor where its part starts, and nowhere how large the whole is: the
    first part alone looks like a whole tensor. But where ranks write their parts, there is no index.

    Args:
        metadata: of each file, by its path.
        listed: whether an index lists the files.
    """
    for path, said in metadata.items():
        if _SHARDS in said and not (listed and _all_start_at_zero(parse_value(path, said[_SHARDS].encode()))):
            raise UnsupportedValueError(
                f"{path} has parts of tensors, as each rank saves its own with torch's HuggingFaceStorageWriter "
                f"({_SHARDS}), and no file says how large the whole tensors are: save them with "
                "enable_consolidation=True and convert that, or load them with torch's HuggingFaceStorageReader. If "
                "the tensors are whole, convert the folder with their index"
            )


def _all_start_at_zero(places: Any) -> bool:
    """Args: places: of the tensors by name, each `{"saved_offsets": [...]}`."""
    if not isinstance(places, dict):
        return False
    known = cast("dict[str, Any]", places)
    starts: list[Any] = [
        cast("dict[str, Any]", place).get("saved_offsets") for place in known.values() if isinstance(place, dict)
    ]
    return bool(known) and len(starts) == len(known) and all(are_sizes(start) and not any(start) for start in starts)


def open_memmap(path: str, rules: Rules) -> Found:
    """A folder of TensorDict.memmap."""
    return Found(load_files("", path, "memmap", allow_pickle=rules.allow_pickle))
