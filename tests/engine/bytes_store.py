"""Puts and gets of plain bytes, straight through the engine: no tensors, no structure."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from memstore.engine.files.segments import WritableMemory
from memstore.engine.format.headers import Header, Span, lay_out
from memstore.engine.opening import Creation, open_root
from memstore.engine.protocols import put as protocol
from memstore.engine.protocols.change import Change, Content
from memstore.engine.protocols.get import hold
from memstore.engine.protocols.put import Draft
from memstore.engine.root.roots import Root, close_root
from memstore.engine.sync.primitives import deadline_after

INLINE = 1536


@contextmanager
def opened(path: str, mode: str = "a", **creation: object) -> Generator[Root]:
    use = open_root(path, mode, Creation(**creation), 10.0)  # type: ignore[arg-type]
    try:
        yield use.root
    finally:
        close_root(use)


def put(root: Root, key: bytes, data: bytes, *, expect: int | None = None) -> int:
    return put_many(root, {key: data}, expect=expect)[0]


def put_many(root: Root, items: dict[bytes, bytes], *, expect: int | None = None) -> list[int]:
    drafts = [draft(root, key, data, expect) for key, data in items.items()]
    return protocol.put(root, drafts, deadline_after(10))


def draft(root: Root, key: bytes, data: bytes, expect: int | None = None) -> Draft:
    if len(data) <= INLINE:
        return Draft(key, Content(b"bytes", b"", len(data), inline=data), expect)
    layout = lay_out([Span(("data",), "uint8", 1, (len(data),), len(data))])
    header = Header(key.decode(), root.settings.store, b"bytes", b"", layout.header)

    def fill(memory: WritableMemory) -> None:
        np.asarray(memory)[:] = np.frombuffer(data, np.uint8)

    return Draft(key, Content(b"bytes", b"", len(data)), expect, header, fill)


def get(root: Root, key: bytes) -> bytes | None:
    (found,) = hold(root, [key], deadline_after(10), may_lock=True)
    if found is None:
        return None
    record, mapping = found.record, found.mapping
    if mapping is None:
        return record.inline
    return np.asarray(mapping)[record.start : record.start + record.nbytes].tobytes()


def delete(root: Root, key: bytes) -> None:
    protocol.delete(root, [Change(key, None)], deadline_after(10))


def keys(root: Root) -> list[bytes]:
    with root.guard:
        return root.catalog.view(lambda transaction: transaction.keys(b"", None, 1 << 20))
