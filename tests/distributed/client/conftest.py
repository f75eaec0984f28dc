"""Clusters for tests of what a process of a served root does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.client.hosts import Cluster, cluster_of


@pytest.fixture
def pair(scratch: str) -> Iterator[Cluster]:
    """Two hosts, of which the second owns all keys."""
    with cluster_of(scratch, False, True) as made:
        yield made


@pytest.fixture
def homes(scratch: str) -> Iterator[Cluster]:
    """Two hosts that are owners."""
    with cluster_of(scratch, True, True) as made:
        yield made
