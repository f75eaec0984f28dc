"""A catalog that is older than its files is found out by what was lent or copied too, whose headers have no version."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

import pytest

import memstore
from memstore.distributed.catalog import look, run
from memstore.distributed.rules import Lent
from memstore.engine import record_of
from memstore.engine.root.folder import CATALOG
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import CorruptionError
from tests.distributed.catalog.filling import asked, fill, published
from tests.distributed.catalog.operations import BYTES, OTHER, put, serve
from tests.engine import bytes_store


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield f"{folder}/store"


def lend(root: Root, key: bytes) -> None:
    filled = fill(root, key, BYTES)
    (place,) = asked(root, filled).places
    run(root, lambda tables: tables.lend(place, Lent(key, OTHER)), deadline_after(10), sealed=filled.sealed)
    published(root, filled)


def keep_copy(root: Root, key: bytes) -> None:
    filled = fill(root, key, BYTES)
    (place,), (sealed,) = asked(root, filled).places, filled.sealed
    content = filled.change.content
    assert content is not None
    record = record_of(content, filled.sealed, 7, sealed.put_id)
    run(root, lambda tables: tables.put_copy(key, (place,), record), deadline_after(10), sealed=filled.sealed)
    published(root, filled)


@pytest.mark.parametrize("keep", [lend, keep_copy])
def test_an_older_catalog_with_its_lock_page(path: str, keep: Callable[[Root, bytes], None]) -> None:
    names = (f"{path}/{CATALOG}/data.mdb", f"{path}/lock")
    with bytes_store.opened(path) as root:
        serve(root)
        for _ in range(3):  # two files are retired
            filled = fill(root, b"owned", BYTES)
            put(root, filled)
            published(root, filled)
        old = {name: _content(name) for name in names}
        for number in range(4):
            keep(root, b"%d" % number)
    del root  # it keeps the lock page mapped
    for name, content in old.items():
        with open(name, "r+b") as file:
            file.write(content)
    with pytest.raises(CorruptionError, match="older than what lies beside it"), bytes_store.opened(path):
        pass
    memstore.repair(path)
    with bytes_store.opened(path) as root, pytest.raises(CorruptionError, match="memstore remove"):
        look(root, lambda tables: tables.standing(), deadline_after(10))


def _content(name: str) -> bytes:
    with open(name, "rb") as file:
        return file.read()
