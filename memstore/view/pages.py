"""The pages below a mapped tensor: which are to come from a disk, and which are mapped already.

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
from memstore.engine.syscalls import PAGE
from memstore.sharding import Offsets, cover, runs
from memstore.structure import traits

_SAMPLES = 16  # pages that are looked at; 1 us each
_MOST_RUNS = 64  # of a row; beyond, gaps are read too
_MOST_BYTES = 256 << 20  # of a box that is asked for at once; the kernel reads ahead of who reads on in order


def ask_for(values: torch.Tensor, rows: torch.Tensor) -> None:
    """Tells the kernel that these rows will be read: it starts at once, and this doesn't wait."""
    if rows.numel() and values.numel():
        offsets, length = runs(values.shape[1:], values.stride()[1:], _MOST_RUNS)
        _ask(values, (rows.numpy()[:, None] * values.stride(0) + offsets).ravel(), length)


def bring(values: torch.Tensor) -> None:
    """Asks for a box that will be read, unless it is in memory already."""
    if not values.numel():
        return
    size = traits.reach(values.shape, values.stride()) * values.dtype.itemsize
    start = values.data_ptr()
    if size <= _MOST_BYTES and not _are_resident(range(start, start + size, max(size // 4, PAGE))):
        offsets, length = runs(values.shape, values.stride(), _MOST_RUNS * _MOST_RUNS)
        _ask(values, offsets, length)


def _ask(values: torch.Tensor, offsets: Offsets, length: int) -> None:
    item = values.dtype.itemsize
    first, last = cover(values.data_ptr() + offsets * item, length * item, PAGE)
    syscalls.will_need(first.tolist(), (last - first).tolist())


def are_cold(values: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether some of the rows are to come from a disk. Looks at the first pages of a few."""
    if not rows.numel() or not values.numel():
        return False
    step = max(len(rows) // _SAMPLES, 1)
    starts = values.data_ptr() + rows[::step].numpy() * (values.stride(0) * values.dtype.itemsize)
    return not _are_resident(np.unique(starts // PAGE).tolist(), PAGE)


def populate(start: int, size: int, *, on_disk: bool) -> None:
    """Maps whole pages for reading, in advance; those of a file on a disk only if they are in memory."""
    if not on_disk or _are_resident(range(start, start + size, max(size // _SAMPLES, PAGE))):
        syscalls.populate_for_reading(start, size)


def _are_resident(addresses: Sequence[int], unit: int = 1) -> bool:
    return all(syscalls.is_resident(address * unit // PAGE * PAGE) for address in addresses)
