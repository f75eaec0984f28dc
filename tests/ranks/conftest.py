"""Worlds of ranks: see `ranks4` and `ranks2` of tests/conftest.py."""

from __future__ import annotations

import pytest

from memstore.testing.fork_server import ForkServer


@pytest.fixture(scope="session")
def server(rank_server: ForkServer) -> ForkServer:
    """For worlds of a test's own."""
    return rank_server
