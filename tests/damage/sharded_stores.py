"""Small stores with sharded entries, to be damaged."""

from __future__ import annotations

from typing import Any

import torch

import memstore
from memstore import TensorShard
from tests.support.equality import is_same

RANKS = 3


def part(rank: int, seed: int = 0) -> dict[str, Any]:
    """What a rank puts: rows that adjoin, columns that don't, plain leaves of all, and one of its own."""
    rows, columns = whole(seed)["rows"], whole(seed)["columns"]
    return {
        "rows": TensorShard(rows[4 * rank : 4 * rank + 4], rows.shape, (4 * rank, 0)),
        "columns": TensorShard(columns[:, 2 * rank : 2 * rank + 2].contiguous(), columns.shape, (0, 2 * rank)),
        "same": torch.arange(700) + seed,
        "step": seed,
        f"of {rank}": torch.full((100,), rank),
    }


def whole(seed: int = 0) -> dict[str, Any]:
    """What a get gives."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.rand(4 * RANKS, 50, generator=numbers),
        "columns": torch.randint(0, 256, (300, 2 * RANKS), generator=numbers).byte(),
        "same": torch.arange(700) + seed,
        "step": seed,
        **{f"of {rank}": torch.full((100,), rank) for rank in range(RANKS)},
    }


def put(store: memstore.Store, key: str, seed: int = 0, *, ranks: range = range(RANKS)) -> int:
    """Puts the parts of some ranks. Returns the version; 0 if some are still missing."""
    pending = None
    for rank in ranks:
        pending = store.put_sharded(
            *(key, part(rank, seed)), attempt=f"{key} {seed}", rank=rank, world_size=RANKS, wait=False
        )
    assert pending is not None and not isinstance(pending, int)
    return pending.wait() if pending.done() else 0


def make(root: str, *, checksum: bool = True) -> dict[str, int]:
    """Two sharded keys, one of them after an overwrite; a plain one; and parts that wait. Returns the versions."""
    with memstore.open(root, checksum=checksum) as store:
        put(store, "a", 1)
        put(store, "b")
        put(store, "a")
        store.put("plain", torch.ones(5000))
        put(store, "waiting", ranks=range(2))
        return {key: store.version(key) for key in store}


def check(root: str, lost: set[str] | None = None) -> None:
    """What isn't lost is there, as it was put; all is in order, and can be put again."""
    with memstore.open(root, verify=True) as store:
        assert set(store) == {"a", "b", "plain"} - (lost or set())
        for key in {"a", "b"} - (lost or set()):
            assert is_same(store.get(key), whole())
        report = store.verify()
        assert report.ok, report
        assert store.pending() == () and store.stats().pending_bytes == 0 and store.stats().filling_bytes == 0
        assert put(store, "new", 5) > 1 << 32
        store.delete("new")
