"""Where snapshots are taken, in these tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def path() -> Iterator[str]:
    """A path in memory, at which nothing is yet."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as folder:
        yield f"{folder}/snapshot"
