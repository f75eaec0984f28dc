from __future__ import annotations

from collections.abc import Iterator

import pytest

import memstore


@pytest.fixture(params=["segment", "inline"])
def any_store(request: pytest.FixtureRequest, root: str) -> Iterator[memstore.Store]:
    """A store that keeps small values in files, or in the catalog."""
    with memstore.open(root, inline_limit=0 if request.param == "segment" else 1536) as opened:
        yield opened
