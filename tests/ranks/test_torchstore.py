"""DTensors and FSDP models by TorchStore's functions: each rank puts its part, and the whole is there at one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import memstore
import memstore.integrations.torchstore as ts
from memstore.integrations.torchstore.folders import ROOT_VARIABLE
from tests.ranks import torchstore_calls as calls
from tests.ranks.launcher import Ranks


@pytest.fixture
def job(scratch: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(ROOT_VARIABLE, scratch)
    asyncio.run(ts.initialize())
    yield scratch
    asyncio.run(ts.shutdown())


def get(key: str, **options: Any) -> Any:
    return asyncio.run(ts.get(key, **options))


LAYOUTS: dict[str, Any] = {
    "rows": ([4], [Shard(0)]),
    "columns": ([4], [Shard(1)]),
    "both": ([2, 2], [Shard(0), Shard(1)]),
    "rows twice": ([2, 2], [Shard(0), Shard(0)]),
    "replicated rows": ([2, 2], [Replicate(), Shard(0)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_put_shards_and_others_get_theirs(job: str, ranks4: Ranks, layout: str) -> None:
    shape, placements = LAYOUTS[layout]
    assert any(ranks4.run(calls.put, job, "w", shape, placements))
    assert torch.equal(get("w"), calls.whole())
    target = torch.zeros(16, 12)
    assert get("w", inplace_tensor=target) is target and torch.equal(target, calls.whole())
    for ranks, other in (([0, 1], ([2], [Shard(1)])), ([0, 1, 2, 3], ([2, 2], [Shard(1), Shard(0)]))):
        found = ranks4.run(calls.get_into, job, "w", ranks, *other)
        assert [part for part in found if part is not None] == [True] * len(ranks)


def test_a_slice_of_what_ranks_have_put(job: str, ranks4: Ranks) -> None:
    ranks4.run(calls.put, job, "w", [4], [Shard(0)])
    wanted = ts.TensorSlice((2, 1), None, (16, 12), (9, 4), None)
    before = memstore.bytes_read()
    assert torch.equal(get("w", tensor_slice_spec=wanted), calls.whole()[2:11, 1:5])
    assert memstore.bytes_read() - before <= 16 * 12 * 4


def test_as_long_as_a_rank_has_not_put_there_is_no_such_key(job: str, ranks4: Ranks) -> None:
    ranks4.run(calls.put_unless, job, "w", 2, 0.0)
    assert not asyncio.run(ts.exists("w")) and asyncio.run(ts.keys()) == []
    with pytest.raises(memstore.PartialCommitError) as found:
        get("w")
    assert isinstance(found.value, KeyError) and found.value.missing_ranks == (2,)
    ranks4.run(calls.delete_pending, job, "w")
    with pytest.raises(memstore.KeyNotFoundError):
        get("w")


def test_as_long_as_a_rank_has_not_put_readers_get_the_version_before(job: str, ranks4: Ranks) -> None:
    for step in (0.0, 1.0):
        ranks4.run(calls.put, job, "w", [4], [Shard(0)], step)
    assert torch.equal(get("w"), calls.whole(1.0))
    ranks4.run(calls.put_unless, job, "w", 1, 2.0)
    assert torch.equal(get("w"), calls.whole(1.0))


def test_a_dtensor_that_each_rank_has_whole_is_a_plain_tensor(job: str, ranks4: Ranks) -> None:
    ranks4.run(calls.put_expert, job)
    for rank in range(4):
        assert torch.equal(get(f"expert{rank}"), calls.whole(rank))


def test_a_batch_may_have_dtensors(job: str, ranks4: Ranks) -> None:
    ranks4.run(calls.put_batch, job)
    assert sorted(asyncio.run(ts.keys())) == ["plain0", "plain1", "plain2", "plain3", "w"]
    assert torch.equal(asyncio.run(ts.get_batch(["w", "plain3"]))["w"], calls.whole())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transfer", [None, torch.bfloat16])
def test_an_fsdp_model_is_got_in_tensor_parallel_shards(
    job: str, ranks4: Ranks, transfer: torch.dtype | None, wanted: torch.dtype, strict: bool
) -> None:
    """Whichever side casts."""
    kept = transfer or torch.float32
    ranks4.run(calls.put_fsdp, job, 2, transfer)
    assert ranks4.run(calls.get_tensor_parallel, job, kept, wanted, 2, strict) == [True, True, None, None]
    stored = asyncio.run(ts.get_state_dict("policy"))
    assert stored["step"] == 2 and {leaf.dtype for leaf in stored["model"].values()} == {kept}


def test_followers_never_get_parts_of_two_versions(job: str, ranks4: Ranks) -> None:
    assert ranks4.run(calls.follow, job, 25)[:2] == [25, 25]


def test_ranks_agree_on_a_store_again_and_again(scratch: str, ranks4: Ranks) -> None:
    found = ranks4.run(calls.spmd, 3, scratch)
    assert found == [["2.0", "2.1", "2.2", "2.3"]] * 4
