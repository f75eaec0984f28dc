"""The first put of 256 MiB: pages are taken from the kernel, and that costs more than the copy."""

from __future__ import annotations

import os

import torch

from tests.benchmarks.peers.limits import Memcpy, PlainFile
from tests.benchmarks.peers.memmap import Memmap
from tests.benchmarks.peers.safetensors_file import SafetensorsFile
from tests.benchmarks.peers.store import Store, StoreWithChecksums
from tests.benchmarks.report import Beside, Figure, Goal, Series, Workload, exactly
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import KEPT, keep, large_puts

PEERS = (Store, StoreWithChecksums, Memmap, SafetensorsFile, PlainFile, Memcpy)
FILE, COUNTED, MAPPED = "the file", "in huge pages, by stats()", "in huge pages, by smaps"


def measure(session: Session) -> Workload:
    with session.started(PEERS) as (peers, absent):
        value, size, put = large_puts(session, peers, "first put", fresh=True)
        huge = _huge_pages(next(peer for peer in peers if isinstance(peer, Store)), value)
    share = huge.figure(MAPPED).value.median / huge.figure(FILE).value.median
    plain = put.figure(PlainFile.name)
    assert plain.ratio is not None
    return Workload(
        id="large-fresh",
        title=f"First puts of {size}",
        text=f"One float32 tensor of {size} under a new key. Before each put the value before it is removed and its "
        "space given back to the kernel, so that each put takes new pages. A plain mapped file is what the "
        "kernel does by itself: pages of 4 KiB, one fault each.",
        series=[put, huge],
        goals=[
            Goal(
                f"first put of {size}, against a plain mapped file",
                plain.ratio,
                ">=",
                3,
                "x",
                limit=Beside(plain.name, plain.value.median),
                peer=(peer := put.best("peer")) and Beside(peer.name, peer.value.median),
            )
        ],
        absent=absent,
        notes=[
            f"{share:.1%} of the file of a first put is mapped in huge pages by whoever reads it.",
            "The goal of 3x a plain mmap write needs huge pages for shared memory (Linux 6.1 or later).",
        ],
    )


def _huge_pages(store: Store, value: torch.Tensor) -> Series:
    """Of a mapping that has been read: by the store's own count, and by the kernel's."""
    store.drop(KEPT)
    keep(store, KEPT, value)
    (file,) = store.store.info(KEPT).files
    before = store.store.stats().huge_page_bytes
    held = store.get(KEPT)
    held.sum()
    figures = [
        Figure(FILE, "memstore", exactly(float(os.stat(file).st_size)), 1),
        Figure(COUNTED, "memstore", exactly(float(store.store.stats().huge_page_bytes - before)), 1),
        Figure(MAPPED, "memstore", exactly(float(_mapped_huge(file))), 1),
    ]
    return Series("huge", "huge pages of a first put", "B", figures)


def _mapped_huge(file: str) -> int:
    """Bytes of a file that a reader in this process maps by whole huge pages (ShmemPmdMapped, FilePmdMapped).

    Not those of the shared mapping that its writer keeps for the next put.
    """
    total, ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):  # the head of a mapping
                ours = words[-1] == file and words[1] == "rw-p"
            elif ours and words[0] in ("ShmemPmdMapped:", "FilePmdMapped:"):
                total += int(words[1]) << 10
    return total
