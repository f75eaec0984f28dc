"""Ranks of torch.distributed on two hosts: one store, which each of them opens where it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.tensor import Replicate, Shard

import memstore
from tests.distributed.home_server import HomeServer, ask
from tests.ranks import hosts
from tests.ranks.launcher import Ranks

pytestmark = pytest.mark.full


@pytest.fixture
def server() -> Iterator[HomeServer]:
    started = HomeServer()
    yield started
    started.close()


@pytest.fixture
def paths(root: str, server: HomeServer) -> list[str]:
    """The roots of two hosts, of which the last is the home of all keys."""
    found = [f"{root}-{name}" for name in "ab"]
    for path in found:
        memstore.open(path).close()
    ask(server.address, "serve", *found)
    return found


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


# --- a trainer's float32, spread by rows, for a generator's bfloat16, spread by columns -------------------------------


@pytest.mark.parametrize("by", ["get", "get_state_dict"])
def test_ranks_of_another_host_cast_into_their_columns_and_each_byte_is_sent_once(
    paths: list[str], server: HomeServer, ranks4: Ranks, by: str
) -> None:
    ranks4.run(hosts.put_weights, paths[0], "policy")
    Path(paths[1], "cluster").touch()  # as an agent does once its host is a member: TorchStore's functions look for it
    before = ask(server.address, "look")
    names = [*hosts.weights()]
    found = ranks4.run(hosts.get_cast, paths[1], "policy", by)
    assert found == [[*names, "head"] if by == "get" else names] * 2 + [None] * 2
    needed = sum(one.nbytes for one in hosts.weights().values())
    assert needed <= ask(server.address, "look") - before <= 1.01 * needed


def test_ranks_of_another_host_refuse_another_dtype_by_name_before_anything_is_sent(
    paths: list[str], server: HomeServer, ranks4: Ranks
) -> None:
    ranks4.run(hosts.put_weights, paths[0], "policy")
    before = ask(server.address, "look")
    for text in ranks4.run(hosts.get_uncast, paths[1], "policy")[:2]:
        assert "['layers.4']: stored as torch.float32, here torch.bfloat16; cast=True casts it" in text
        assert "layers.3" not in text
    assert ask(server.address, "look") == before


@pytest.mark.parametrize("from_both", [False, True])
@pytest.mark.parametrize("on_both", [False, True])
def test_a_module_of_another_dtype_is_loaded_from_other_hosts_and_each_byte_is_sent_once(
    paths: list[str], server: HomeServer, ranks4: Ranks, from_both: bool, on_both: bool
) -> None:
    ranks4.run(hosts.save_weights, paths if from_both else paths[:1], "policy")
    before = ask(server.address, "look")
    for text, is_right in ranks4.run(hosts.load_cast, paths if on_both else paths[1:], "policy"):
        assert is_right and "layers_4" in text and "cast=True casts it" in text
    whole = sum(one.nbytes for one in hosts.weights().values())
    needed = whole // 2 if from_both or on_both else whole
    assert needed <= ask(server.address, "look") - before <= 1.01 * needed


@pytest.mark.parametrize("on_both", [False, True])
def test_a_module_that_each_rank_has_whole_is_loaded_from_several_hosts(
    paths: list[str], ranks4: Ranks, on_both: bool
) -> None:
    ranks4.run(hosts.save_weights, paths, "policy")
    assert ranks4.run(hosts.load_whole, paths if on_both else paths[1:], "policy") == [True] * 4
