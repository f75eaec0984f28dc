"""Sharded puts of real ranks: one version for all, whatever the ranks hold."""

from __future__ import annotations

import pytest
import torch

import memstore
from tests.ranks import calls
from tests.ranks.launcher import Ranks
from tests.support.fork_server import ForkServer


def rows_by_rank(size: int) -> torch.Tensor:
    return torch.arange(float(size)).repeat_interleave(2)[:, None].expand(-1, 3)


def test_all_ranks_get_the_version(root: str, ranks4: Ranks) -> None:
    first, second = ranks4.run(calls.put, root), ranks4.run(calls.put, root)
    assert len(set(first)) == len(set(second)) == 1 and first[0] < second[0]
    with memstore.open(root) as store:
        assert store.version("key") == second[0]
        assert torch.equal(store.get("key")["w"], rows_by_rank(4))


def test_ranks_hold_different_leaves(root: str, ranks4: Ranks) -> None:
    ranks4.run(calls.put_stages, root)
    with memstore.open(root) as store:
        found = store.get("key")
    assert sorted(found["layers"]) == [f"layer{rank}" for rank in range(4)]
    for rank in range(4):
        layer = found["layers"][f"layer{rank}"]
        assert layer["name"] == f"stage {rank}" and torch.equal(layer["weight"], torch.full((3, 2), rank))
    assert torch.equal(found["norm"], torch.arange(4.0)) and found["sizes"] == [1, 2, 3]


def test_plain_leaves_that_differ_are_told_once_and_are_the_lowest_ranks(root: str, ranks4: Ranks) -> None:
    told: dict[int, list[str]] = {}
    for _ in range(3):
        for rank, (_, texts) in enumerate(ranks4.run(calls.put_buffers, root, 2)):
            told.setdefault(rank, []).extend(texts)
    (text,) = {text for texts in told.values() for text in texts}
    assert all(len(texts) <= 1 for texts in told.values())  # each rank may be the one that finds all parts there
    assert "value['mean'] (ranks 0, 2)" in text and "value['steps'] (ranks 0, 1)" in text
    with memstore.open(root) as store:
        found = store.get("key")
        assert torch.equal(found["mean"], torch.zeros(3)) and found["steps"] == 7
        assert store.info("key").nbytes < 100_000


def test_equal_replicas_are_stored_once(root: str, ranks4: Ranks) -> None:
    ranks4.run(calls.put_replicas, root, None)
    with memstore.open(root) as store:
        found = store.get("key")["layer"]["w"]
        assert torch.equal(found, torch.arange(6.0).reshape(2, 3).repeat(2, 1))
        assert len(store.info("key").files) == 2


def test_parameters_of_dtensors_come_back_as_parameters(root: str, ranks4: Ranks) -> None:
    ranks4.run(calls.put_parameters, root)
    with memstore.open(root) as store:
        found = store.get("key")
    expected = torch.arange(4.0)[:, None].expand(-1, 3)
    for name, requires_grad in (("parameter", True), ("frozen", False)):
        assert isinstance(found[name], torch.nn.Parameter) and found[name].requires_grad is requires_grad
        assert torch.equal(found[name], expected)


def test_groups_put_at_once_and_then_all_together(root: str, ranks4: Ranks) -> None:
    answers = ranks4.run(calls.put_in_groups, root)
    assert answers[0] == answers[2] and answers[1] == answers[3]
    with memstore.open(root) as store:
        assert torch.equal(store.get("group1")["w"], torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
        assert torch.equal(store.get("all")["w"], rows_by_rank(4))


def test_threads_put_different_keys_at_once(root: str, ranks2: Ranks) -> None:
    one, two = ranks2.run(calls.put_by_threads, root, 20)
    assert one == two
    assert all(len(set(versions)) == 20 for versions in one.values())
    with memstore.open(root) as store:
        assert all(torch.equal(store.get(key)["w"], torch.full((4, 3), 19.0)) for key in ("one", "two"))


def test_a_rank_that_waits_later_gets_the_version(root: str, ranks2: Ranks) -> None:
    answers = ranks2.run(calls.put_without_waiting, root)
    assert answers[0] == answers[1] and answers[0][1] is True


def test_a_rank_may_put_and_exit(root: str, rank_server: ForkServer) -> None:
    """The others complete what it has put."""
    with Ranks(rank_server, 3) as ranks:
        ranks.begin(calls.put_and_exit, root, ranks=[1])
        ranks.begin(calls.put, root, ranks=[0])
        assert ranks.workers[1].wait() == 0
        ranks.begin(calls.put, root, ranks=[2])
        versions = {ranks.answer(rank).value for rank in (0, 2)}
    with memstore.open(root) as store:
        assert versions == {store.version("key")}
        assert torch.equal(store.get("key")["w"], rows_by_rank(3))


@pytest.mark.parametrize("world_size", [1, 3])
def test_worlds_of_other_sizes(root: str, rank_server: ForkServer, world_size: int) -> None:
    with Ranks(rank_server, world_size) as ranks:
        assert len(set(ranks.run(calls.put, root))) == 1
    with memstore.open(root) as store:
        assert torch.equal(store.get("key")["w"], rows_by_rank(world_size))
