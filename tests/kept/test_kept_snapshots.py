"""A snapshot that an earlier version took is read and restored by this one."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import memstore
from memstore import RNGState, Snapshot, StateDict, TensorShard
from memstore.snapshot.manifest import VERSION
from tests.kept.kept_snapshot import RANKS, SEED, Model, archive, of_rank, unpack, whole
from tests.support.equality import assert_same

DIGESTS = {1: "fd1629f12ff6450c3262363fbd10d2e692bd46d9b1b4839f0431ef70c63f0884"}  # SHA-256 of the archives


@pytest.fixture(params=range(1, VERSION + 1))
def number(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def kept(number: int, tmp_path: Any) -> str:
    unpack(number, f"{tmp_path}/snapshot")
    return f"{tmp_path}/snapshot"


def test_every_format_is_kept_and_never_changes(number: int) -> None:
    assert archive(number).exists(), "python -m tests.kept.kept_snapshot makes it; then it is kept for ever"
    assert hashlib.sha256(archive(number).read_bytes()).hexdigest() == DIGESTS[number]


def test_it_is_whole(kept: str) -> None:
    snapshot = Snapshot(kept)
    snapshot.verify()
    assert snapshot.metadata.world_size == RANKS and snapshot.metadata.checksum


def test_its_values_are_read(kept: str) -> None:
    snapshot = Snapshot(kept)
    assert_same(Model().state_dict(), snapshot.get_state_dict_for_key("model"))
    assert_same(whole(), snapshot.get_state_dict_for_key("spread"))
    assert_same(of_rank(0), snapshot.get_state_dict_for_key("own"))
    for rank in range(RANKS):
        assert_same(of_rank(rank)["own"], snapshot.read_object(f"{rank}/own/own"))
        assert snapshot.read_object(f"{rank}/own/step") == 7 + rank
    assert_same(whole()["columns"], snapshot.view()["spread"]["columns"].clone())


def test_it_is_restored(kept: str) -> None:
    model, own = Model(), StateDict(of_rank(1))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    local = torch.zeros(3, 3, dtype=torch.int16)
    spread = StateDict(whole(), columns=TensorShard(local, (3, 8), (0, 3)))
    Snapshot(kept).restore({"model": model, "own": own, "spread": spread, "random": RNGState()})
    drawn = random.random(), np.random.random(), torch.rand(2).tolist()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(SEED)
    assert drawn == (random.random(), np.random.random(), torch.rand(2).tolist())
    assert_same(Model().state_dict(), model.state_dict())
    assert_same(of_rank(0), dict(own))
    assert torch.equal(local, whole()["columns"][:, 3:6])


def test_it_is_attached(kept: str, root: str) -> None:
    with memstore.open(root) as store:
        store.attach("key", kept)
        assert_same(whole(), store.get("key")["spread"], ties=False)
        assert_same(of_rank(0), store.get("key")["own"], ties=False)


def test_its_files_are_read_without_memstore(kept: str) -> None:
    found = {
        **load_file(f"{kept}/model-00001-of-00002.safetensors"),
        **load_file(f"{kept}/model-00002-of-00002.safetensors"),
    }
    for name, tensor in Model().state_dict().items():
        if name != "third.weight":  # the same as the first's
            assert torch.equal(found[name], tensor)
