"""Where the tests of checkpoints save."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import memstore
from tests.integrations.dcp.states import Place


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, scratch: str) -> Iterator[Place]:
    """A path or a store, and a key."""
    if request.param == "folder":
        yield Place(scratch, None)
        return
    with memstore.open(scratch) as store:
        yield Place(store, "runs/checkpoint")


@pytest.fixture(params=[None, pytest.param("checkpoint", marks=pytest.mark.full)], ids=["folder", "store"])
def key(request: pytest.FixtureRequest, scratch: str) -> str | None:
    """For ranks, which open the place themselves: None for a folder; for a store, which is there, the key."""
    if request.param is not None:
        memstore.open(scratch).close()
    return request.param
