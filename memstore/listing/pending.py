"""The sharded puts that wait for the parts of other ranks."""

from __future__ import annotations

import time

from memstore.engine import Part, Root, pending_parts
from memstore.info import PendingInfo


def pending(root: Root, key: bytes | None, deadline: float) -> tuple[PendingInfo, ...]:
    """The attempts that wait for parts: of one key, or all."""
    found: dict[tuple[bytes, str], list[tuple[Part, float]]] = {}
    for part, left in pending_parts(root, key, deadline):
        found.setdefault((part.key, part.attempt), []).append((part, left))
    return tuple(
        PendingInfo(
            key=name.decode(),
            attempt=attempt,
            world_size=parts[0][0].world_size,
            ranks=tuple(part.rank for part, _ in parts),
            nbytes=sum(part.size for part, _ in parts),
            expires=time.time() + max(left for _, left in parts),
        )
        for (name, attempt), parts in found.items()
    )
