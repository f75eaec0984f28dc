"""What tests of this folder share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest


@pytest.fixture
def shared(scratch: str) -> Iterator[str]:
    """A path for a store in a folder that every user may enter and write to."""
    os.chmod(os.path.dirname(scratch), 0o1777)
    yield scratch
    shutil.rmtree(scratch, ignore_errors=True)
