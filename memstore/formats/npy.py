"""numpy's `.npy` files, served in place. The value is a tensor, in C or Fortran order as the file is."""

from __future__ import annotations

import io
import os

import numpy as np

from memstore import structure
from memstore.engine import ExternalFiles, Leaf, opened, syscalls
from memstore.errors import UnsupportedValueError
from memstore.formats.documents import are_sizes, damaged
from memstore.structure import DTYPES, TENSOR, contiguous_stride, count
from memstore.wording import short

_LONGEST_HEADER = 1 << 16  # bytes; numpy itself reads no more than 10,000


def read_npy(path: str, sources: ExternalFiles) -> structure.ExternalValue:
    path = os.path.realpath(path)
    with opened(path) as (fd, found):
        shape, is_fortran, dtype, start = _read_header(path, syscalls.read_at(fd, _LONGEST_HEADER, 0))
        nbytes = count(shape) * dtype.itemsize
        if start + nbytes != found.st_size:
            damaged(path, f"its array ends at byte {start + nbytes:,}, and the file at {found.st_size:,}")
        base = sources.add(path, found)
    stride = tuple(reversed(contiguous_stride(shape[::-1]))) if is_fortran else None
    return structure.describe_external_tree(TENSOR, [Leaf((), str(dtype), shape, stride, base + start, nbytes)])


def _read_header(path: str, head: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """The shape, whether it is in Fortran's order, the dtype, and where the data starts."""
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
            f"{path}: an array of dtype {short(dtype.str)}, which no tensor has: {_advice(dtype)}"
        )
    return tuple(shape), bool(is_fortran), dtype, file.tell()


def _advice(dtype: np.dtype) -> str:
    if dtype.hasobject:
        return (
            "it is a pickle, which can run code; if you trust whoever wrote it, load it with numpy.load(path, "
            "allow_pickle=True), and put the array into a store that was opened with allow_pickle=True"
        )
    store = " into a store that was opened with allow_pickle=True" if dtype.kind == "V" else ""
    return f"load it with numpy.load, and put the array{store}"
