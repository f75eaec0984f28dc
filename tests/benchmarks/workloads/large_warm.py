"""The same 256 MiB put again and again under one key: a memcpy, and the little that makes it atomic."""

from __future__ import annotations

from tests.benchmarks.peers.limits import Memcpy
from tests.benchmarks.peers.memmap import Memmap, MemmapUpdate
from tests.benchmarks.peers.ray_objects import RayObjects
from tests.benchmarks.peers.safetensors_file import SafetensorsFile
from tests.benchmarks.peers.store import Store, StoreWithChecksums
from tests.benchmarks.report import Beside, Goal, Series, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import large_puts


class RayAgain(RayObjects):
    """A new object each time, as Ray's objects never change; the one before it is released."""

    overwrites = True


PEERS = (Store, StoreWithChecksums, Memmap, MemmapUpdate, SafetensorsFile, RayAgain, Memcpy)


def measure(session: Session) -> Workload:
    with session.started(PEERS) as (peers, absent):
        _, size, series = large_puts(session, peers, "overwrite", fresh=False)
    return Workload(
        id="large-warm",
        title=f"Overwrites of {size}",
        text=f"One float32 tensor of {size}, put again and again under one key. memstore copies into the file of a "
        "version that nobody holds any more, and publishes it at one moment; memcpy copies into warm memory.",
        series=[series],
        goals=[_against_memcpy(f"overwrite of {size}, bandwidth against memcpy", series)],
        absent=absent,
        notes=[_with_checksums(series)],
    )


def _against_memcpy(what: str, series: Series) -> Goal:
    copy, peer = series.figure(Memcpy.name), series.best("peer")
    assert copy.ratio is not None
    return Goal(
        what,
        copy.ratio,  # its time over ours: our bandwidth over its
        ">=",
        0.9,
        "x",
        limit=Beside(copy.name, copy.value.median),
        peer=peer and Beside(peer.name, peer.value.median),
    )


def _with_checksums(series: Series) -> str:
    ratio = series.figure(StoreWithChecksums.name).ratio
    assert ratio is not None
    return f"With checksum=True, each byte is read once more: {ratio.median:.2f} times as long, and no goal."
