"""The formats: what they are called, and which one a path has, or is meant to have."""

from __future__ import annotations

import os
from typing import Any, Literal, cast, get_args

from memstore.errors import NotAStoreError, UnsupportedValueError
from memstore.formats import file_format
from memstore.snapshot import is_snapshot, load_manifest

Format = Literal["dcp", "huggingface", "memmap", "memstore-dcp", "safetensors", "snapshot", "torch", "torchsnapshot"]
FORMATS: tuple[Format, ...] = get_args(Format)
WRITTEN: tuple[Format, ...] = tuple(name for name in FORMATS if name != "torchsnapshot")

_FILES: dict[str, Format] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
DCP_METADATA = ".metadata"
TORCHSNAPSHOT_METADATA = ".snapshot_metadata"
CHECKPOINT_VALUES = frozenset({"state", "bytes", "dcp"})  # of a snapshot that is a checkpoint of DCP


def checked(name: str, known: tuple[Format, ...]) -> Format:
    """Raises ValueError for what is no format, or none of those known here."""
    if name not in known:
        raise ValueError(f"{name!r} is no format here; {', '.join(known)} are")
    return cast("Any", name)


def source_format(path: str) -> Format:
    """Which format a file or folder has.

    Raises:
        FileNotFoundError: a link leads to neither.
        UnsupportedValueError: it looks like none of them.
    """
    if not os.path.isdir(path):
        found = file_format(path)
        if found == "npy":
            raise UnsupportedValueError(f"{path} is an array of numpy, which isn't converted: load it with numpy.load")
        return "huggingface" if path.endswith(".index.json") else found
    if is_snapshot(path):
        values = frozenset(value.key for value in load_manifest(os.path.abspath(path)).values)
        return "memstore-dcp" if values == CHECKPOINT_VALUES else "snapshot"
    for name, format in ((DCP_METADATA, "dcp"), (TORCHSNAPSHOT_METADATA, "torchsnapshot")):
        if os.path.lexists(f"{path}/{name}"):
            return cast("Any", format)
    if os.path.lexists(f"{path}/memstore.json"):
        raise NotAStoreError(f"{path} is a store, and no checkpoint: export a key of it to a file, and convert that")
    try:
        found = file_format(path)
    except UnsupportedValueError:
        raise NotAStoreError(
            f"{path} is no checkpoint that is known: it has no {DCP_METADATA}, no {TORCHSNAPSHOT_METADATA}, no "
            "*.safetensors, no meta.json of TensorDict and is no snapshot of memstore; --from says what it is"
        ) from None
    return "memmap" if found == "memmap" else "huggingface"


def target_format(path: str) -> Format:
    """Which format a path is meant to have that isn't there yet: by its ending; a folder is a snapshot."""
    ending = os.path.splitext(path)[1]
    if ending in _FILES:
        return _FILES[ending]
    return "snapshot"
