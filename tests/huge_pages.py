"""Whether the kernel makes huge pages of files here, as it is asked for them by puts."""

from __future__ import annotations

import os
import tempfile

import pytest

from memstore.engine import syscalls


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
