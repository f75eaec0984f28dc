"""Files of others as entries: which format a path has, and what adopting has in common for all formats.

Nothing of the files is believed before it was checked: that is each format's part. Here it is checked again that every
leaf lies in a file. Only headers are read.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import Any, Literal, NoReturn

import numpy as np

from memstore import structure
from memstore.engine import syscalls
from memstore.engine.adopted import Sources, map_sources, opened, read_sources
from memstore.engine.header import check_header
from memstore.engine.publish import Content
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError
from memstore.structure import modes

Format = Literal["safetensors", "memmap", "torch", "npy"]
FORMATS = ("safetensors", "memmap", "torch", "npy")
_MAGIC: dict[bytes, Format] = {b"\x93NUMPY": "npy", b"PK\x03\x04": "torch"}


@modes.put_aside()
def adopt(key: str, path: str | os.PathLike[str], format: Format | None, *, allow_pickle: bool) -> Content:
    """What a record says of a value that lies in the file or folder at `path`."""
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {', '.join(map(repr, FORMATS))} or None, and not {format!r}")
    name: Any = os.fspath(path)
    if not isinstance(name, str) or not name:
        raise TypeError(f"path is that of a file or folder, as text, and not {path!r}")
    name = os.path.abspath(name)
    try:
        sources = Sources()
        adopted = _adopt(name, format, sources, allow_pickle)
        _check_places(adopted.plan, sources)
        check_header(key, len(adopted.plan.description) + len(adopted.objects))
    except CorruptionError as error:
        where = error.path or name
        text = error.message if where in error.message else f"{where}: {error.message}"
        raise CorruptionError(f"{key!r}: {text}", key=key, path=where, detail=error.detail) from error
    except MemstoreError as error:
        error.key = key
        raise
    return Content(adopted.plan.description, adopted.objects, adopted.plan.nbytes, adopted=sources.encode())


def _adopt(path: str, format: Format | None, sources: Sources, allow_pickle: bool) -> structure.Adopted:
    if format in (None, "safetensors"):
        from memstore.integrations import safetensors_files

        target = safetensors_files.find_in_folder(path) if os.path.isdir(path) else path
        if target is not None and (format is not None or _is_safetensors(target)):
            read = safetensors_files.adopt_index if target.endswith(".json") else safetensors_files.adopt_file
            return read(target, sources)
        if format is not None:
            raise UnsupportedValueError(f"{path} has neither a *.safetensors nor a *.safetensors.index.json")
    found = format or _format_of(path)
    if found == "memmap":
        from memstore.integrations import memmap

        return memmap.adopt_folder(path, sources, allow_pickle)
    if found == "torch":
        from memstore.integrations import torch_files

        return torch_files.adopt_file(path, sources, allow_pickle)
    from memstore.integrations import npy

    return npy.adopt_file(path, sources)


def _is_safetensors(path: str) -> bool:
    return path.endswith((".safetensors", ".safetensors.index.json")) or _format_of_bytes(path) is None


def _format_of_bytes(path: str) -> Format | None:
    with opened(os.path.realpath(path)) as (fd, _):
        start = syscalls.read_at(fd, 8, 0)
    for magic, format in _MAGIC.items():
        if start.startswith(magic):
            return format
    if path.endswith(".npy"):
        return "npy"
    if path.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return "torch"
    return None


def _format_of(path: str) -> Format:
    if os.path.isdir(path):
        if os.path.lexists(os.path.join(path, "meta.json")):
            return "memmap"
        _refuse(path, "it has no *.safetensors, no *.safetensors.index.json and no meta.json")
    return _format_of_bytes(path) or _refuse(path, "it looks like no format that can be attached; say format=")


def _refuse(path: str, why: str) -> NoReturn:
    raise UnsupportedValueError(f"{path}: {why}")


def _check_places(plan: structure.Plan, sources: Sources) -> None:
    """Every leaf lies in one file, whatever the reader of the format believed."""
    bases = [file.base for file in sources.files]
    for leaf in plan.leaves:
        if leaf.nbytes:
            i = bisect_right(bases, leaf.offset) - 1
            if i < 0 or leaf.offset + leaf.nbytes > bases[i] + sources.files[i].size:
                raise CorruptionError(detail := f"the leaf {leaf.name} lies beyond the end of its file", detail=detail)


@modes.put_aside()
def load(key: str, content: Content, *, allow_pickle: bool) -> Any:
    """The value itself, over the mapped files."""
    assert content.adopted is not None
    mapping = map_sources(read_sources(content.adopted))
    memory = np.zeros(0, np.uint8) if mapping is None else np.asarray(mapping)
    plan = structure.plan_of(content.description)
    try:
        return structure.rebuild(plan, content.objects, memory, mapping, allow_pickle=allow_pickle)
    except MemstoreError as error:
        error.key = key
        raise
