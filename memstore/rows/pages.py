"""The pages below rows: which are to come from a disk, and which are mapped already.

Measured, 256 rows of 28 KiB, one of 2 busy cores (docs/views.md has the table): cold rows are 100 times as slow when
they are faulted in one after another than when the kernel is told of all of them first. Warm ones cost a fault for each
64 KiB the first time, which doubles their price; so with each batch some more of the leaf is mapped in advance, until
all of it is. `preadv` of each row costs no fault, but a system call and a slower copy: it lost to both.
"""

from __future__ import annotations

import numpy as np
import torch

from memstore.box import cover, runs
from memstore.engine import syscalls
from memstore.engine.syscalls import HUGE_PAGE, PAGE
from memstore.view.source import Span

_SAMPLES = 16  # rows that are looked at; 1 us each
_MOST_RUNS = 64  # of a row; beyond, gaps are read too
_POPULATE = 2  # bytes that are mapped in advance for each byte that is read


def ask_for(real: torch.Tensor, rows: torch.Tensor) -> None:
    """Tells the kernel that these rows will be read: it starts at once, and this doesn't wait."""
    if not rows.numel() or not real.numel():
        return
    item = real.dtype.itemsize
    offsets, length = runs(real.shape[1:], real.stride()[1:], _MOST_RUNS)
    starts = rows.numpy()[:, None] * real.stride(0) + offsets
    first, last = cover(real.data_ptr() + starts.ravel() * item, length * item, PAGE)
    syscalls.will_need(first.tolist(), (last - first).tolist())


def is_cold(span: Span, real: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether some of the rows are to come from a disk. Looks at the first pages of a few."""
    if not span.source.is_on_disk or not rows.numel() or not real.numel():
        return False
    step = max(len(rows) // _SAMPLES, 1)
    starts = real.data_ptr() + rows[::step].numpy() * (real.stride(0) * real.dtype.itemsize)
    return not all(map(syscalls.is_resident, np.unique(starts // PAGE * PAGE).tolist()))


def populate(span: Span, nbytes: int) -> None:
    """Maps the next piece of a leaf that many rows are read from, where it is in memory."""
    left = span.nbytes - span.populated
    if left <= 0 or span.source.mapping is None:
        return
    start = (span.source.address + span.offset + span.populated) // PAGE * PAGE
    size = min(-(-_POPULATE * nbytes // HUGE_PAGE) * HUGE_PAGE, left)
    span.populated += size
    samples = range(start, start + size, max(size // _SAMPLES // PAGE, 1) * PAGE)
    if not span.source.is_on_disk or all(map(syscalls.is_resident, samples)):
        syscalls.populate_for_reading(start, size)
