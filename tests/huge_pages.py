"""Huge pages of files: whether the kernel makes them here, and operations that ask for them at any price."""

from __future__ import annotations

import mmap
import os
import tempfile

import pytest

from memstore.engine import syscalls
from memstore.engine.files import mapping


def require_huge_pages(folder: str) -> None:
    """Skips the test where the kernel refuses to collapse a file's pages in this folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.ftruncate(file.fileno(), syscalls.HUGE_PAGE)
        os.pwrite(file.fileno(), b"\0", 0)
        mapping, address, start = syscalls.reserve(syscalls.HUGE_PAGE)
        syscalls.map_shared(address + start, file.fileno(), syscalls.HUGE_PAGE)
        works = syscalls.collapse(address + start, syscalls.HUGE_PAGE)
        del mapping
    if not works:
        pytest.skip(f"the kernel makes no huge pages of files in {folder}")


class _AtAnyPrice(mapping.PagePrices):
    def prefers_huge(self) -> bool:
        return True


def ask_at_any_price() -> None:
    """In this process and its children: so that an operation has the same steps each time, whatever memory costs."""
    mapping.prices = _AtAnyPrice()


def warm_huge_pages(nbytes: int) -> None:
    """Takes huge pages and gives them back: the next who asks gets these, and none that costs more than small ones.

    Free memory that a virtual machine has given back to its host, or never had, costs ten times as much.
    """
    with mmap.mmap(-1, nbytes + syscalls.HUGE_PAGE) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:: syscalls.PAGE] = bytes(len(memory) // syscalls.PAGE)
