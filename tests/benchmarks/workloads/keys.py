"""Get, put and listing among few keys and many: a catalog is a tree, and a million keys are two levels more."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.benchmarks.measure import Contestant, Samples, spread, take_turns
from tests.benchmarks.peers import Peer, same
from tests.benchmarks.peers.limits import BareLmdb
from tests.benchmarks.peers.store import Store
from tests.benchmarks.processes import in_new_process
from tests.benchmarks.report import Beside, Figure, Goal, Series, Workload, exactly
from tests.benchmarks.session import Session

PEERS = (Store, BareLmdb)
KEY_BYTES, A_PREFIX, A_BATCH = 64, 100, 5_000
VALUE = torch.randn(16)
KEYS_READ = 10_000  # at most: they are taken in a random order
MOST_BYTES = 300


class Filled(NamedTuple):
    """A store, or an LMDB, with so many keys."""

    peer: Any
    count: int


class Pages(NamedTuple):
    """What a table takes, in bytes: its pages in use, and what lies in them."""

    used: int
    keys: int
    values: int


def measure(session: Session) -> Workload:
    counts = (100, 1_000, 10_000) if session.quick else (100, 10_000, 1_000_000)
    with session.started(PEERS * len(counts)) as (peers, absent):
        filled = [Filled(peer, counts[i // len(PEERS)]) for i, peer in enumerate(peers)]
        seconds = {one: _fill(one) for one in filled}
        most = next(one for one in filled if one.count == counts[-1] and isinstance(one.peer, Store))
        store = most.peer.store
        results = {
            id: _compare(session, filled, id, call)
            for id, call in (("get", _gets), ("put", _overwrites), ("list", _lists))
        }
        _check(filled)
        stats = store.stats()
        used = in_new_process(_pages, str(next(Path(store.root, "catalog").iterdir())), "entries")
    few, many = f"{counts[0]:,}", f"{counts[-1]:,}"
    (get, samples), (put, _), (listing, _) = results["get"], results["put"], results["list"]
    nbytes = VALUE.nbytes
    pages = used.used / stats.keys - nbytes
    record = (used.keys + used.values) / stats.keys - nbytes
    size = stats.catalog_bytes / stats.keys - nbytes
    return Workload(
        id="keys",
        title="Many keys",
        text=f"Keys of {KEY_BYTES} bytes, put in a random order, with values of {nbytes} bytes, which lie in the "
        f"catalog. Gets and overwrites take keys at random; a listing is of the {A_PREFIX} keys that have a prefix. "
        "LMDB alone holds the same keys and bytes.",
        series=[get, put, listing, _bytes(many, record, pages, size)],
        goals=[
            _flat(f"get among {many} keys, against {few}", samples, get, counts),
            Goal(f"catalog, a key of {many}, beside its value", exactly(pages), "<=", MOST_BYTES, "B"),
        ],
        absent=absent,
        notes=[f"put_many of {many} keys, {A_BATCH:,} at a time: {seconds[most]:.1f} s."],
    )


def _names(count: int) -> Iterator[str]:
    for i in range(count):
        yield f"run-{i // A_PREFIX:08d}/{i % A_PREFIX:03d}-".ljust(KEY_BYTES, "k")


def _fill(filled: Filled) -> float:
    """Returns the seconds that it took."""
    names = list(_names(filled.count))
    random.Random(0).shuffle(names)
    begun = time.perf_counter()
    for start in range(0, len(names), A_BATCH):
        batch = dict.fromkeys(names[start : start + A_BATCH], VALUE)
        if isinstance(filled.peer, Store):
            filled.peer.store.put_many(batch)
        else:
            filled.peer.put_all(batch)
    return time.perf_counter() - begun


def _compare(
    session: Session, filled: list[Filled], id: str, call: Callable[[Peer, str], object]
) -> tuple[Series, list[Samples]]:
    contestants = [_contestant(one, call) for one in filled]
    samples = take_turns(contestants, rounds=session.rounds)
    bases = {one.count: sample for one, sample in zip(filled, samples, strict=True) if isinstance(one.peer, Store)}
    figures = [
        Figure(
            one.peer.name,
            one.peer.role,
            spread(sample.all()),
            len(sample.all()),
            ratio=sample.ratio_to(bases[one.count]),
            x=one.count,
        )
        for one, sample in zip(filled, samples, strict=True)
    ]
    title = {"get": "get", "put": "overwrite", "list": f"listing of {A_PREFIX} keys"}[id] + ", by the number of keys"
    series = Series(id, title, "s", figures, reference=Store.name, x_title="keys in the store", x_unit="n")
    return series, [bases[count] for count in sorted(bases)]


def _contestant(filled: Filled, call: Callable[[Peer, str], object]) -> Contestant:
    chosen = list(_names(filled.count))
    random.Random(1).shuffle(chosen)
    names, name = cycle(chosen[:KEYS_READ]), [""]

    def before() -> None:
        name[0] = next(names)

    return Contestant(filled.peer.name, filled.peer.role, lambda: call(filled.peer, name[0]), before=before)


def _gets(peer: Peer, key: str) -> object:
    return peer.get(key)


def _overwrites(peer: Peer, key: str) -> object:
    return peer.put(key, VALUE)


def _lists(peer: Any, key: str) -> object:
    prefix = key.partition("/")[0] + "/"
    return list(peer.store.keys(prefix)) if isinstance(peer, Store) else peer.keys(prefix)


def _check(filled: list[Filled]) -> None:
    for one in filled:
        last = list(_names(one.count))[-1]
        if not same(one.peer.get(last), VALUE) or len(_lists(one.peer, last)) != A_PREFIX:
            raise SystemExit(f"{one.peer.name} with {one.count:,} keys: what was got differs from what was put")


def _flat(what: str, samples: list[Samples], get: Series, counts: tuple[int, ...]) -> Goal:
    limit = get.figure(BareLmdb.name, counts[-1])
    return Goal(what, samples[-1].ratio_to(samples[0]), "<=", 1.5, "x", limit=Beside(limit.name, limit.value.median))


def _bytes(many: str, record: float, pages: float, size: float) -> Series:
    figures = [
        Figure("key and record", "memstore", exactly(record), 1),
        Figure("pages in use", "memstore", exactly(pages), 1),
        Figure("files of the catalog, with what they have in reserve", "memstore", exactly(size), 1),
    ]
    return Series("bytes", f"catalog among {many} keys: bytes a key, beside its value", "B", figures)


def _pages(folder: str, table: str) -> Pages:
    """In a process of its own: LMDB is not to be opened twice in one."""
    import lmdb

    with lmdb.open(folder, readonly=True, max_dbs=16, create=False) as environment:
        entries = environment.open_db(table.encode(), create=False)
        with environment.begin(entries) as transaction:
            stat = transaction.stat(entries)
            used = stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])
            sizes = [(len(key), len(value)) for key, value in transaction.cursor()]
    return Pages(used, sum(key for key, _ in sizes), sum(value for _, value in sizes))
