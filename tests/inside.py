"""The ways by which tests reach into an opened store, past what it offers: each has a name here, and is here only.

What a test needs beside these it takes from the engine's own files, which it may import.
"""

from __future__ import annotations

import lmdb

import memstore
from memstore.engine.catalog.tables import Counters, Transaction
from memstore.engine.root.roots import Root


def root_of(store: memstore.Store) -> Root:
    """As it is, without the looks that each call of a Store takes first."""
    root = store._root
    assert root is not None, "the store is closed"
    return root


def counters_of(root: Root) -> Counters:
    with root.guard:
        return root.catalog.view(Transaction.counters)


def lmdb_of(root: Root) -> lmdb.Environment:
    return root.catalog._environment.handle


def lmdb_table(root: Root, name: str) -> object:
    """For `db=` of LMDB's own calls."""
    return root.catalog._environment.tables[name]


def raw_row(transaction: Transaction, table: str, key: bytes) -> bytes:
    """A row of the catalog, as it lies there."""
    return bytes(transaction._handle.get(key, db=transaction._tables[table]))


def put_raw_row(transaction: Transaction, table: str, key: bytes, stored: bytes) -> None:
    transaction._handle.put(key, stored, db=transaction._tables[table])


def delete_raw_row(transaction: Transaction, table: str, key: bytes) -> None:
    transaction._handle.delete(key, db=transaction._tables[table])


def owes_recovery(root: Root) -> bool:
    """Whether the mutex's next owner recovers."""
    return root.mutex._dirty[0] != 0


def spares_of(root: Root) -> list[tuple[int, int]]:
    """Address and size of the mappings that are kept for the next puts."""
    return [(spare.address, spare.size) for spare in root.storage.mappings._kept.values()]
