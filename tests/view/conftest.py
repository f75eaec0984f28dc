from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import memstore


@pytest.fixture(params=["segment", "inline"])
def any_store(request: pytest.FixtureRequest, root: str) -> Iterator[memstore.Store]:
    """A store that keeps small values in files, or in the catalog."""
    with memstore.open(root, inline_limit=0 if request.param == "segment" else 1536) as opened:
        yield opened


@pytest.fixture
def reads() -> Callable[[], Any]:
    """`with reads() as count: ...` and then `count()`: the bytes read within."""

    @contextmanager
    def counted() -> Iterator[Callable[[], int]]:
        before = memstore.bytes_read()
        yield lambda: memstore.bytes_read() - before

    return counted
