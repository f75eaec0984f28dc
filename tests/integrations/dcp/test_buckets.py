"""torch.distributed.checkpoint with memstore's storage in a bucket."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from memstore.errors import AlreadyExistsError, NotAStoreError
from memstore.integrations import dcp as own
from memstore.integrations.dcp import StorageReader, StorageWriter
from memstore.snapshot.manifest import MANIFEST
from memstore.snapshot.objects import file_of, storage_at
from tests.ranks.launcher import Ranks
from tests.support.buckets import FaultProxy, Request


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and request.name == MANIFEST


def state(fill: float) -> dict[str, Any]:
    return {"w": torch.full((3, 4), fill), "n": int(fill)}


def loaded(url: str, options: dict[str, Any]) -> dict[str, Any]:
    found = state(0.0)
    own.load(found, storage_reader=StorageReader(url, storage_options=options), no_dist=True)
    return found


def test_a_save_takes_the_place_of_an_earlier_one(url: str, s3_options: dict[str, Any]) -> None:
    writer = StorageWriter(url, storage_options=s3_options)
    for fill in (1.0, 2.0):
        own.save(state(fill), storage_writer=pickle.loads(pickle.dumps(writer)), no_dist=True)
        found = loaded(url, s3_options)
        assert torch.equal(found["w"], torch.full((3, 4), fill))
        assert found["n"] == fill
    names = storage_at(url, s3_options).names()
    assert len(names) == 3, names  # nothing of the first is left, and no trace of a save
    writer = StorageWriter(url, overwrite=False, storage_options=s3_options)
    with pytest.raises(CheckpointException) as caught:
        own.save(state(3.0), storage_writer=writer, no_dist=True)
    assert isinstance(caught.value.failures[0][0], AlreadyExistsError)
    reader = pickle.loads(pickle.dumps(StorageReader(url, storage_options=s3_options)))
    assert reader.read_metadata().state_dict_metadata.keys() == {"w", "n"}


def test_of_two_saves_at_once_the_later_one_stays(url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy) -> None:
    def save(fill: float) -> None:
        own.save(state(fill), storage_writer=StorageWriter(url, storage_options=s3_options), no_dist=True)

    save(1.0)
    s3_proxy.call(is_manifest, lambda _: save(2.0))
    save(3.0)
    assert loaded(url, s3_options)["n"] == 3
    names = storage_at(url, s3_options).names()
    assert len({name.split("-")[1] for name in map(file_of, names) if name.endswith(".safetensors")}) == 1
    assert len(names) == 3, names


def test_a_save_that_fails_leaves_the_earlier_one(url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy) -> None:
    def save(fill: float) -> None:
        own.save(state(fill), storage_writer=StorageWriter(url, storage_options=s3_options), no_dist=True)

    save(1.0)
    s3_proxy.fail(is_manifest, 403, "AccessDenied")
    with pytest.raises(CheckpointException):
        save(2.0)
    assert loaded(url, s3_options)["n"] == 1
    assert len(storage_at(url, s3_options).names()) == 3


@pytest.mark.usefixtures("s3_environment")
def test_a_url_is_a_checkpoint_id(url: str) -> None:
    assert StorageWriter.validate_checkpoint_id(url)
    with pytest.raises(NotAStoreError, match="at this URL"):
        own.load(state(0.0), checkpoint_id=url)
    own.save(state(1.0), checkpoint_id=url)
    found = state(0.0)
    own.load(found, checkpoint_id=url)
    assert found["n"] == 1
    own.async_save(state(2.0), checkpoint_id=url).result()
    own.load(found, checkpoint_id=url)
    assert found["n"] == 2


def _save_and_load(url: str, options: dict[str, Any]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = torch.arange(48.0).reshape(8, 6)
    dcp.save(
        {"w": distribute_tensor(weight, mesh, [Shard(0)])}, storage_writer=StorageWriter(url, storage_options=options)
    )
    found: Any = distribute_tensor(torch.zeros(8, 6), mesh, [Shard(1)])
    dcp.load({"w": found}, storage_reader=StorageReader(url, storage_options=options))
    return torch.equal(found.full_tensor(), weight)


def test_several_ranks_save_and_load(ranks2: Ranks, url: str, s3_options: dict[str, Any]) -> None:
    assert ranks2.run(_save_and_load, url, s3_options) == [True, True]


def test_options_are_for_urls(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match="region"):
        StorageWriter(tmp_path, storage_options={"region": "x"})
    with pytest.raises(ValueError, match="no URL"):
        StorageWriter("s3://bucket/store", key="k")
