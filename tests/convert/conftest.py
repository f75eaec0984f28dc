"""Where conversions are tried."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.leaks import open_files


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder in memory. Afterwards no file in it is open, and no conversion has left something."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as found:
        yield found
        assert [name for name in os.listdir(found) if name.startswith(".memstore")] == []
        gc.collect()
        assert open_files(found) == []
