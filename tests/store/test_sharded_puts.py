"""What ranks may put: tensors of every kind and layout, and what is refused before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memstore
from memstore import TensorShard

pytestmark = pytest.mark.embedded


def put_by_ranks(store: memstore.Store, *values: Any, key: str = "key") -> int:
    """Each value is what one rank puts."""
    size = len(values)
    puts: list[Any] = [
        store.put_sharded(key, value, attempt="one", rank=rank, world_size=size, wait=False)
        for rank, value in enumerate(values)
    ]
    return puts[-1].wait(30)


def test_what_lies_between_the_elements_is_not_stored(store: memstore.Store) -> None:
    base = torch.arange(1, 8001).reshape(1000, 8)
    column = base[:, :1].expand(1000, 50)
    put_by_ranks(
        store,
        {"plain": column, "shard": TensorShard(base[:, 2:3], (1000, 2), (0, 0))},
        {"shard": TensorShard(base[:, 5:6], (1000, 2), (0, 1))},
    )
    got = store.get("key")
    assert torch.equal(got["plain"], column) and got["plain"].stride() == (1, 0)
    assert torch.equal(got["shard"], base[:, [2, 5]])
    stored = b"".join(_bytes_of(file) for file in store.info("key").files)
    assert int(base[500, 0]).to_bytes(8, "little") in stored
    for other in (1, 3, 4, 6, 7):
        assert int(base[500, other]).to_bytes(8, "little") not in stored


def _bytes_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
