"""Values that describe themselves: one number, a stamp, all over the tensor. A torn one has two."""

from __future__ import annotations

import torch

import memstore

INLINE, SMALL, LARGE = 64, 8 << 10, (2 << 20) + (64 << 10)  # bytes: in the catalog, in a file, in a file that is mapped
SMALLISH = 3 * SMALL  # in a file that no SMALL one fits
MEDIUM = 160 << 10  # in a file that is mapped where it is filled again and again


def stamped(stamp: int, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes // 8,), stamp, dtype=torch.int64)


def stamp_of(value: torch.Tensor, *, every: int = 1) -> int:
    """The stamp of a value. Looks at both ends and at each `every`th element between them."""
    parts = [value] if every == 1 else [value[:512], value[::every], value[-512:]]
    stamps = {int(bound) for part in parts for bound in torch.aminmax(part)}
    assert len(stamps) == 1, f"a torn value: {sorted(stamps)}"
    return stamps.pop()


def stamp_at(store: memstore.Store, key: str) -> int | None:
    """The stamp of a key's value, None if there is no such key."""
    value = store.get(key, None)
    return None if value is None else stamp_of(value)
