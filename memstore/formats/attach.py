"""External files as entries: which format a path has, and what all formats have in common.

Each format's reader checks all that a file says before it is believed. Here it is checked again that every leaf lies in
a file. Only headers are read.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Generator
from typing import Any, Literal

import numpy as np

from memstore import structure
from memstore.engine import (
    HEADER_LIMIT,
    Content,
    ExternalFiles,
    check_header,
    decode_external,
    has_settings,
    map_external,
    opened,
    syscalls,
)
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError
from memstore.formats.npy import read_npy
from memstore.formats.safetensors import find_in_folder, read_checkpoint, read_safetensors
from memstore.formats.torch_save import load_torch, read_torch
from memstore.formats.torch_zip import is_pickle
from memstore.late_imports import between_forks
from memstore.structure import modes
from memstore.wording import of_no_place

Format = Literal["safetensors", "memmap", "torch", "npy"]
FORMATS = ("safetensors", "memmap", "torch", "npy")
_SAY = f"say format= ({', '.join(FORMATS)})"
_MAGIC: dict[bytes, Format] = {b"\x93NUMPY": "npy", b"PK\x03\x04": "torch"}


@modes.put_aside()
def describe_files(key: str, path: str | os.PathLike[str], format: Format | None, *, allow_pickle: bool) -> Content:
    """What a record says of a value that lies in the file or folder at `path`."""
    name = _checked(path, format)
    with _naming(key, name):
        sources = ExternalFiles()
        found = _read(name, format, sources, allow_pickle)
        _check_places(found.plan, sources)
        check_header(key, len(found.plan.description) + len(found.objects))
    return Content(found.plan.description, found.objects, found.plan.nbytes, adopted=sources.encode())


@modes.put_aside()
def load_files(key: str, path: str | os.PathLike[str], format: Format | None, *, allow_pickle: bool) -> Any:
    """The value itself, over the mapped files; what can't be served from there is loaded.

    Args:
        key: that errors name; "": none.
    """
    name = _checked(path, format)
    with _naming(key, name):
        if not os.path.isdir(name) and (format or file_format(name)) == "torch":
            with _of_format(name, format):
                return load_torch(name, allow_pickle)
    content = describe_files(key, path, format, allow_pickle=allow_pickle)
    assert content.adopted is not None
    mapping = map_external(decode_external(content.adopted))
    memory = np.zeros(0, np.uint8) if mapping is None else np.asarray(mapping)
    plan = structure.plan_of(content.description)
    with _naming(key, name):
        return structure.rebuild(plan, content.objects, memory, mapping, allow_pickle=allow_pickle)


def _checked(path: Any, format: Any) -> str:
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {', '.join(map(repr, FORMATS))} or None, and not {format!r}")
    name: Any = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str) or not name:
        raise TypeError(f"path is that of a file or folder, as text, and not {path!r:.100}")
    return os.path.abspath(name)


@contextlib.contextmanager
def _naming(key: str, name: str) -> Generator[None]:
    """Errors name the key, and damage the file."""
    try:
        yield
    except CorruptionError as error:
        where = error.path or name
        text = error.message if where in error.message else f"{where}: {error.message}"
        text = f"{key!r}: {text}" if key else text
        raise CorruptionError(text, key=key or None, path=where, detail=error.detail) from None
    except FileNotFoundError as error:
        if key and error.filename in (name, os.path.realpath(name)):
            swapped = "; the key comes first, and then the path" if os.path.lexists(key) else ""
            what = f"there is nothing to attach{swapped or of_no_place(name)}"
            raise FileNotFoundError(error.errno, what, name) from None
        raise
    except MemstoreError as error:
        error.key = key or None
        raise


def _read(path: str, format: Format | None, sources: ExternalFiles, allow_pickle: bool) -> structure.ExternalValue:
    with _of_format(path, format):
        return _read_as(path, format or file_format(path), sources, allow_pickle)


@contextlib.contextmanager
def _of_format(path: str, format: Format | None) -> Generator[None]:
    """Raises UnsupportedValueError for a file that looks like another format than the caller says."""
    try:
        yield
    except (CorruptionError, UnsupportedValueError):
        found: Format | None = None
        with contextlib.suppress(MemstoreError, OSError):
            found = file_format(path)
        if format is None or found is None or found == format:
            raise
        raise UnsupportedValueError(
            f"{path} isn't of the format {format!r}: it looks like {found!r}, so leave format= out"
        ) from None


def _read_as(path: str, found: Format, sources: ExternalFiles, allow_pickle: bool) -> structure.ExternalValue:
    if found == "safetensors":
        target = find_in_folder(path) if os.path.isdir(path) else path
        if target is None:
            raise UnsupportedValueError(f"{path} has neither a *.safetensors nor a *.safetensors.index.json")
        read = read_checkpoint if target.endswith(".json") else read_safetensors
        return read(target, sources)
    if found == "memmap":
        with between_forks():
            from memstore.formats.memmap import read_memmap
        return read_memmap(path, sources, allow_pickle)
    if found == "torch":
        return read_torch(path, sources, allow_pickle)
    return read_npy(path, sources)


def file_format(path: str, advice: str = _SAY) -> Format:
    """Which format a file or folder has. Raises UnsupportedValueError for none that is known.

    Args:
        advice: for who has a file that looks like none.
    """
    if os.path.isdir(path):
        if find_in_folder(path) is not None:
            return "safetensors"
        if os.path.lexists(os.path.join(path, "meta.json")):
            return "memmap"
        if has_settings(path):
            raise UnsupportedValueError(f"{path} is a store: get a key of it, and put that")
        raise UnsupportedValueError(
            f"{path}: it has no *.safetensors, no *.safetensors.index.json and no meta.json of TensorDict.memmap"
        )
    if path.endswith((".safetensors", ".safetensors.index.json")):
        return "safetensors"
    with opened(os.path.realpath(path)) as (fd, _):
        start = syscalls.read_at(fd, 64, 0)
    for magic, format in _MAGIC.items():
        if start.startswith(magic):
            return format
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= HEADER_LIMIT:
        return "safetensors"
    if path.endswith(".npy"):
        return "npy"
    if path.endswith((".pt", ".pth", ".bin", ".ckpt")) or is_pickle(start):
        return "torch"
    raise UnsupportedValueError(f"{path} is of no known format, or is truncated: {advice}")


def _check_places(plan: structure.Plan, sources: ExternalFiles) -> None:
    """Every leaf lies in one file, whatever the reader of the format believed."""
    bases = [file.base for file in sources.files]
    for leaf in plan.leaves:
        if leaf.nbytes:
            i = bisect_right(bases, leaf.offset) - 1
            if i < 0 or leaf.offset + leaf.nbytes > bases[i] + sources.files[i].size:
                raise CorruptionError(f"{structure.render_path(leaf.name)} lies beyond the end of its file")
