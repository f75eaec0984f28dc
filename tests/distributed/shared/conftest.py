from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.shared.pairs import Pair


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where a sync costs nothing."""
    path = Path(tempfile.mkdtemp(prefix="shared-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="package")
def pair() -> Iterator[Pair]:
    """The tests of this folder share it: each uses keys of its own."""
    path = Path(tempfile.mkdtemp(prefix="shared-", dir="/dev/shm"))
    try:
        with Pair(path) as made:
            yield made
    finally:
        shutil.rmtree(path, ignore_errors=True)
