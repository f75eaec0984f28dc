"""Ranks of torch.distributed on two hosts: one store, which each of them opens where it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed.tensor import Replicate, Shard

import memstore
from tests.distributed.home_server import HomeServer, ask
from tests.ranks import hosts
from tests.ranks.launcher import Ranks

pytestmark = pytest.mark.full


@pytest.fixture
def paths(root: str) -> Iterator[list[str]]:
    """The roots of two hosts, of which the last is the home of all keys."""
    found = [f"{root}-{name}" for name in "ab"]
    for path in found:
        memstore.open(path).close()
    server = HomeServer()
    ask(server.address, "serve", *found)
    yield found
    server.close()


@pytest.mark.parametrize("size", [2, 4])
def test_a_tensor_put_by_rows_is_got_in_other_placements_on_the_other_host(
    paths: list[str], size: int, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{size}")
    versions = ranks.run(hosts.put_rows, paths, "weights")
    assert len(set(versions)) == 1
    for placement in (Shard(1), Replicate(), Shard(0)):
        assert ranks.run(hosts.get_placed, paths, "weights", placement) == [True] * size
    assert ranks.run(hosts.put_rows, paths, "weights")[0] > versions[0]


def test_a_rank_that_does_not_come_is_named_to_those_on_both_hosts(paths: list[str], ranks4: Ranks) -> None:
    ranks4.begin(hosts.put_rows_within, paths, "weights", 2.0, ranks=[0, 1, 2])
    for rank in range(3):
        error = ranks4.answer(rank).error
        assert isinstance(error, memstore.errors.StoreTimeoutError), error
        assert "rank 3 of 4 had put nothing" in str(error)
