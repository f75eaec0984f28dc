"""The pages below lazy leaves: which are to come from a disk, and which are mapped already.

A cold row that is faulted in waits for the disk by itself, and has the kernel read around it, by the disk's setting for
files that are read in order (8 MiB where this was written). Told of all the runs first, it reads these, all at once:
256 rows of 28 KiB take 25 ms instead of 1000. Warm ones cost a fault for each 64 KiB the first time, which doubles
their price; so with each batch of rows some more of the leaf is mapped in advance, until all of it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from memstore.engine import syscalls
from memstore.engine.syscalls import HUGE_PAGE, PAGE
from memstore.sharding import Offsets, cover, runs
from memstore.structure import traits
from memstore.view.source import Span

_SAMPLES = 16  # pages that are looked at; 1 us each
_MOST_RUNS = 64  # of a row; beyond, gaps are read too
_MOST_BYTES = 256 << 20  # of a box that is asked for at once; the kernel reads ahead of who reads on in order
_POPULATE = 2  # bytes that are mapped in advance for each byte that is read


def ask_for(real: torch.Tensor, rows: torch.Tensor) -> None:
    """Tells the kernel that these rows will be read: it starts at once, and this doesn't wait."""
    if rows.numel() and real.numel():
        offsets, length = runs(real.shape[1:], real.stride()[1:], _MOST_RUNS)
        _ask(real, (rows.numpy()[:, None] * real.stride(0) + offsets).ravel(), length)


def bring(real: torch.Tensor) -> None:
    """Before a box is read from a disk: asks for it, if it is there still."""
    if not real.numel():
        return
    size = traits.reach(real.shape, real.stride()) * real.dtype.itemsize
    start = real.data_ptr()
    if size <= _MOST_BYTES and not _are_resident(range(start, start + size, max(size // 4, PAGE))):
        offsets, length = runs(real.shape, real.stride(), _MOST_RUNS * _MOST_RUNS)
        _ask(real, offsets, length)


def bring_rows(span: Span, real: torch.Tensor, index: object) -> None:
    """Before rows are read by an index of one dimension: asks for those that are on a disk still."""
    if not span.source.is_on_disk or not real.ndim:
        return
    if isinstance(index, list) and all(type(row) is int for row in index):
        index = torch.tensor(index, dtype=torch.int64)
    if not isinstance(index, torch.Tensor) or index.ndim != 1 or index.dtype != torch.int64 or not len(index):
        return
    rows = torch.where(index < 0, index + len(real), index)
    if 0 <= int(rows.min()) <= int(rows.max()) < len(real) and is_cold(span, real, rows):
        ask_for(real, rows)


def _ask(real: torch.Tensor, offsets: Offsets, length: int) -> None:
    item = real.dtype.itemsize
    first, last = cover(real.data_ptr() + offsets * item, length * item, PAGE)
    syscalls.will_need(first.tolist(), (last - first).tolist())


def is_cold(span: Span, real: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether some of the rows are to come from a disk. Looks at the first pages of a few."""
    if not span.source.is_on_disk or not rows.numel() or not real.numel():
        return False
    step = max(len(rows) // _SAMPLES, 1)
    starts = real.data_ptr() + rows[::step].numpy() * (real.stride(0) * real.dtype.itemsize)
    return not _are_resident(np.unique(starts // PAGE).tolist(), PAGE)


def _are_resident(addresses: Sequence[int], unit: int = 1) -> bool:
    return all(syscalls.is_resident(address * unit // PAGE * PAGE) for address in addresses)


def populate(span: Span, nbytes: int) -> bool:
    """Maps the next piece of a leaf that rows are read from, where it is in memory. Whether all of it is mapped."""
    left = span.nbytes - span.populated
    if left <= 0 or span.source.mapping is None:
        return True
    start = (span.source.address + span.offset + span.populated) // PAGE * PAGE
    size = min(-(-_POPULATE * nbytes // HUGE_PAGE) * HUGE_PAGE, left)
    span.populated += size
    if not span.source.is_on_disk or _are_resident(range(start, start + size, max(size // _SAMPLES, PAGE))):
        syscalls.populate_for_reading(start, size)
    return False
