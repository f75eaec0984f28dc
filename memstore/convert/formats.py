"""Formats: what they are called, and which one a path has, or is meant to have."""

from __future__ import annotations

import difflib
import os
import re
from typing import Any, Literal, cast, get_args

from memstore.convert.dcp import DCP_METADATA
from memstore.convert.torchsnapshot import TORCHSNAPSHOT_METADATA
from memstore.errors import MemstoreError, NotAStoreError, UnsupportedValueError
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
_SUFFIX = re.compile(r"\.[A-Za-z]\w*")  # of a file; "step-1.5" and "llama-3.1-8B" have none
CHECKPOINT_VALUES = frozenset({"state", "bytes", "dcp"})  # of a snapshot that is a checkpoint of DCP


def checked(name: str, known: tuple[Format, ...]) -> Format:
    """Raises ValueError for what is no format, or none of those known here."""
    if name not in known:
        raise ValueError(f"{name!r} is no format here; {', '.join(known)} are")
    return cast("Any", name)


def source_format(path: str) -> Format:
    """Returns which format a file or folder has.

    Raises:
        FileNotFoundError: a link leads to neither.
        UnsupportedValueError: it looks like none of them.
    """
    if not os.path.isdir(path):
        found = file_format(path, "say source_as= (of safetensors, torch)")
        if found == "npy":
            raise UnsupportedValueError(f"{path} is an array of numpy, which isn't converted: load it with numpy.load")
        return "huggingface" if path.endswith(".index.json") else found
    if is_snapshot(path):
        values = frozenset(value.key for value in load_manifest(os.path.abspath(path)).values)
        return "memstore-dcp" if values - {"wrapped"} == CHECKPOINT_VALUES else "snapshot"
    for name, format in ((DCP_METADATA, "dcp"), (TORCHSNAPSHOT_METADATA, "torchsnapshot")):
        if os.path.lexists(f"{path}/{name}"):
            return cast("Any", format)
    if os.path.lexists(f"{path}/memstore.json"):
        raise NotAStoreError(f"{path} is a store, and no checkpoint: export a key of it to a file, and convert that")
    try:
        found = file_format(path)
    except UnsupportedValueError:
        if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in os.listdir(path)):
            return "huggingface"  # of several files or indices: its reader says why it can't choose
        raise NotAStoreError(
            f"{path} is no checkpoint that is known: it has no {DCP_METADATA}, no {TORCHSNAPSHOT_METADATA}, no "
            "*.safetensors, no meta.json of TensorDict and is no snapshot of memstore; --from says what it is"
        ) from None
    return "memmap" if found == "memmap" else "huggingface"


def check_source(path: str, format: Format) -> None:
    """Raises NotAStoreError for a path without what all of this format have, and says which format it looks like."""
    expected = _missing(path, format) if os.path.exists(path) else ""  # a link may lead to nothing
    if not expected:
        return
    try:
        advice = f"it looks like {source_format(path)!r}, so leave source_as= out"
    except (MemstoreError, OSError):
        advice = "check the path"
    raise NotAStoreError(f"{path} is not of the format {format!r}: expected {expected}, found {_kind(path)}; {advice}")


def _missing(path: str, format: Format) -> str:
    """Returns what the format needs and the path lacks, "" for nothing. A file's reader says what is wrong with it."""
    marks: dict[Format, str] = {"dcp": DCP_METADATA, "torchsnapshot": TORCHSNAPSHOT_METADATA, "memmap": "meta.json"}
    if format in marks:
        return "" if os.path.lexists(f"{path}/{marks[format]}") else f"a folder with {marks[format]}"
    if format in ("snapshot", "memstore-dcp"):
        return "" if is_snapshot(path) else "a folder with memstore_snapshot.json"
    if not os.path.isdir(path):
        return ""
    if format == "torch":
        return "a file of torch.save"
    has = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in os.listdir(path))
    return "" if has else "a file of safetensors, or a folder with *.safetensors"


def _kind(path: str) -> str:
    if not os.path.isdir(path):
        return "a file"
    names = sorted(os.listdir(path))
    return (
        f"a folder with {', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}" if names else "an empty folder"
    )


def checked_target(path: str, name: str) -> Format:
    """Raises ValueError for what is no format, and for a path with the suffix of another one's files."""
    found = checked(name, WRITTEN)
    suffix = os.path.splitext(path)[1]
    if _FILES.get(suffix, found) != found:
        raise ValueError(
            f"{path} has the suffix of a {_FILES[suffix]} file, and the target format is {name!r}: leave target_as= "
            f"out for {_FILES[suffix]}, or choose another path"
        )
    return found


def target_format(path: str) -> Format:
    """Returns the format that a new path is meant to have: by its suffix; a folder is a snapshot.

    Raises:
        ValueError: it has the suffix of a file, and no format has that.
    """
    suffix = os.path.splitext(path)[1]
    if suffix in _FILES:
        return _FILES[suffix]
    if not _SUFFIX.fullmatch(suffix):
        return "snapshot"
    near = difflib.get_close_matches(suffix.lower(), [*_FILES, *(f".{name}" for name in WRITTEN)], 1)
    named = f"say target_as= (of {', '.join(WRITTEN)})"
    if near and near[0] not in _FILES:
        advice = f"for a folder of this name say target_as={near[0][1:]!r}"
    elif near:
        advice = f"did you mean {near[0]!r}? For a folder, or another format, {named}"
    else:
        advice = f"files end with .safetensors, or .pt, .pth, .bin or .ckpt (torch); for others {named}"
    raise ValueError(f"no format has the suffix {suffix!r} of {path}: {advice}")
