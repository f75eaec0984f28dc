"""What the tests of catalogs share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def folder() -> Iterator[str]:
    """For several stores; in memory, and gone with the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as path:
        yield path
