"""External files as entries: which format a path has, what all formats have in common, and numpy's `.npy` files.

describe_files    what the record of an entry says that serves a file or folder in place
load_files        the value itself, over mapped files
file_format       the format of a path, by its names and first bytes
read_npy          the reader of `.npy`: a tensor, in C or Fortran order as the file is. safetensors.py, memmap.py and
                  torch_save.py have the readers of the other formats

Each reader checks everything that a file says before it is believed. Here it is checked again that every leaf lies in
a file. Only headers are read.
"""

from __future__ import annotations

import contextlib
import io
import os
from bisect import bisect_right
from collections.abc import Callable, Generator
from typing import Any, Literal, get_args

import numpy as np

from memstore import structure
from memstore._threads import between_forks
from memstore._wording import of_no_place, short
from memstore.engine import (
    HEADER_LIMIT,
    Content,
    ExternalFiles,
    Leaf,
    check_header,
    decode_external,
    has_settings,
    map_external,
    opened,
    syscalls,
)
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError
from memstore.formats.files import are_sizes, damaged, path_text
from memstore.formats.safetensors import find_in_folder, read_checkpoint, read_safetensors
from memstore.formats.torch_save import is_pickle, load_torch, read_torch
from memstore.structure import DTYPES, TENSOR, contiguous_stride, count, modes

Format = Literal["safetensors", "memmap", "torch", "npy"]
ATTACH_FORMATS: tuple[Format, ...] = get_args(Format)
_SAY_FORMAT = f"say format= ({', '.join(ATTACH_FORMATS)})"
_MAGIC: dict[bytes, Format] = {b"\x93NUMPY": "npy", b"PK\x03\x04": "torch"}


@modes.put_aside()
def describe_files(key: str, path: str | os.PathLike[str], format: Format | None, *, allow_pickle: bool) -> Content:
    """Describes, for a record, a value that lies in the file or folder at `path`."""
    name = _checked(path, format)
    with _naming(key, name):
        sources = ExternalFiles()
        with _of_format(name, format):
            found = _READERS[format or file_format(name)](name, sources, allow_pickle)
        _check_places(found.plan, sources)
        check_header(key, len(found.plan.description) + len(found.objects))
    return Content(found.plan.description, found.objects, found.plan.nbytes, adopted=sources.encode())


@modes.put_aside()
def load_files(key: str, path: str | os.PathLike[str], format: Format | None, *, allow_pickle: bool) -> Any:
    """Returns the value itself, over the mapped files; what can't be served from there is loaded.

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
    if format is not None and format not in ATTACH_FORMATS:
        raise ValueError(f"format is {', '.join(map(repr, ATTACH_FORMATS))} or None, and not {format!r}")
    return os.path.abspath(path_text(path))


@contextlib.contextmanager
def _naming(key: str, name: str) -> Generator[None]:
    """Adds the key to errors, and to a CorruptionError the path of the file."""
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


def file_format(path: str, advice: str = _SAY_FORMAT) -> Format:
    """Returns which format a file or folder has. Raises UnsupportedValueError for none that is known.

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
    """Raises CorruptionError unless every leaf lies in one file, whatever the reader of the format believed."""
    bases = [file.base for file in sources.files]
    for leaf in plan.leaves:
        if leaf.nbytes:
            i = bisect_right(bases, leaf.offset) - 1
            if i < 0 or leaf.offset + leaf.nbytes > bases[i] + sources.files[i].size:
                raise CorruptionError(f"{structure.render_path(leaf.name)} lies beyond the end of its file")


# --- the reader of each format ----------------------------------------------------------------------------------------


def _read_safetensors(path: str, sources: ExternalFiles, allow_pickle: bool) -> structure.ExternalValue:
    target = find_in_folder(path) if os.path.isdir(path) else path
    if target is None:
        raise UnsupportedValueError(f"{path} has neither a *.safetensors nor a *.safetensors.index.json")
    read = read_checkpoint if target.endswith(".json") else read_safetensors
    return read(target, sources)


def _read_memmap(path: str, sources: ExternalFiles, allow_pickle: bool) -> structure.ExternalValue:
    with between_forks():
        from memstore.formats.memmap import read_memmap
    return read_memmap(path, sources, allow_pickle)


def _read_npy(path: str, sources: ExternalFiles, allow_pickle: bool) -> structure.ExternalValue:
    return read_npy(path, sources)


_READERS: dict[Format, Callable[[str, ExternalFiles, bool], structure.ExternalValue]] = {
    "safetensors": _read_safetensors,
    "memmap": _read_memmap,
    "torch": read_torch,
    "npy": _read_npy,
}


# --- numpy's .npy files ----------------------------------------------------------------------------------------------


_LONGEST_NPY_HEADER = 1 << 16  # bytes; numpy itself reads no more than 10,000


def read_npy(path: str, sources: ExternalFiles) -> structure.ExternalValue:
    path = os.path.realpath(path)
    with opened(path) as (fd, found):
        shape, is_fortran, dtype, start = _read_npy_header(path, syscalls.read_at(fd, _LONGEST_NPY_HEADER, 0))
        nbytes = count(shape) * dtype.itemsize
        if start + nbytes != found.st_size:
            damaged(path, f"its array ends at byte {start + nbytes:,}, and the file at {found.st_size:,}")
        base = sources.add(path, found)
    stride = tuple(reversed(contiguous_stride(shape[::-1]))) if is_fortran else None
    return structure.describe_external_tree(TENSOR, [Leaf((), str(dtype), shape, stride, base + start, nbytes)])


def _read_npy_header(path: str, head: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Returns the shape, whether it is in Fortran's order, the dtype, and where the data starts."""
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise UnsupportedValueError(f"{path}: version {version} of the format, which has arrays of records only")
    except (UnsupportedValueError, MemoryError, RecursionError, OSError):
        raise
    except Exception as error:  # of numpy's parser, which evaluates a literal, and reads those of Python 2 too
        damaged(path, f"its header can't be read: {error}")
    if not are_sizes(list(shape)):
        damaged(path, f"an array of shape {short(shape)}")
    if dtype.kind not in "biufc" or str(dtype) not in DTYPES:
        raise UnsupportedValueError(
            f"{path}: an array of dtype {short(dtype.str)}, which no tensor has: {_npy_advice(dtype)}"
        )
    return tuple(shape), bool(is_fortran), dtype, file.tell()


def _npy_advice(dtype: np.dtype) -> str:
    if dtype.hasobject:
        return (
            "it is a pickle, which can run code; if you trust whoever wrote it, load it with numpy.load(path, "
            "allow_pickle=True), and put the array into a store that was opened with allow_pickle=True"
        )
    store = " into a store that was opened with allow_pickle=True" if dtype.kind == "V" else ""
    return f"load it with numpy.load, and put the array{store}"
