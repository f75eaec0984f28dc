"""Puts and gets of plain bytes, straight through the engine: no tensors, no structure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from memstore.engine.format.header import Header
from memstore.engine.format.layout import Span, lay_out
from memstore.engine.opening import Creation, open_root
from memstore.engine.protocols.claim import abandon, claim
from memstore.engine.protocols.commit import Change, Content, commit
from memstore.engine.protocols.get import hold
from memstore.engine.root.registry import close_root
from memstore.engine.root.root import Root
from memstore.engine.sync.clocks import deadline_after

INLINE = 1536


@contextmanager
def opened(path: str, mode: str = "a", **creation: object) -> Iterator[Root]:
    root = open_root(path, mode, Creation(**creation), 10.0)  # type: ignore[arg-type]
    try:
        yield root
    finally:
        close_root(root)


def put(root: Root, key: bytes, data: bytes, *, expect: int | None = None) -> int:
    return put_many(root, {key: data}, expect=expect)[0]


def put_many(root: Root, items: dict[bytes, bytes], *, expect: int | None = None) -> list[int]:
    changes: list[Change] = []
    batch = 0
    try:
        for key, data in items.items():
            content = _content(root, key, data, batch)
            changes.append(Change(key, content, expect))
            batch = batch or (content.filling.put_id if content.filling else 0)
        return commit(root, changes, deadline_after(10))
    except BaseException:
        abandon(root, fillings(changes))
        raise
    finally:
        for filling in fillings(changes):
            filling.close()


def _content(root: Root, key: bytes, data: bytes, batch: int) -> Content:
    if len(data) <= INLINE:
        return Content(b"bytes", b"", len(data), inline=data)
    layout = lay_out([Span(("data",), "uint8", 1, (len(data),), len(data))])
    header = Header(key.decode(), root.settings.store, b"bytes", b"", layout.header)
    filling = claim(root, key, header.nbytes, layout.nbytes, batch, deadline_after(10))
    filling.allocate(header, layout.nbytes, root.guard, huge_pages=root.on_tmpfs)
    np.asarray(filling)[:] = np.frombuffer(data, np.uint8)
    filling.seal(None, durable=root.settings.durable)
    return Content(b"bytes", b"", len(data), filling=filling)


def fillings(changes: Sequence[Change]) -> list:
    return [change.content.filling for change in changes if change.content and change.content.filling]


def get(root: Root, key: bytes) -> bytes | None:
    (found,) = hold(root, [key], deadline_after(10), may_lock=True)
    if found is None:
        return None
    record, mapping = found.record, found.mapping
    if mapping is None:
        return record.inline
    return np.asarray(mapping)[record.start : record.start + record.nbytes].tobytes()


def delete(root: Root, key: bytes) -> None:
    commit(root, [Change(key, None)], deadline_after(10))


def keys(root: Root) -> list[bytes]:
    with root.guard:
        return root.catalog.view(lambda transaction: transaction.keys(b"", None, 1 << 20))
