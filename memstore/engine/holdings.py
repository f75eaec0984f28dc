"""Which process holds which values: for people who look where memory went. It reads /proc, and takes milliseconds."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

from memstore.engine.catalog import Transaction
from memstore.engine.files import segment_path
from memstore.engine.format import LIVE, RETIRED
from memstore.engine.root import DOORBELL, Root, holders_of, mappers_of

_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Holding:
    """What a process holds of a store.

    Attributes:
        pid: as far as the kernel tells: see `holders_of`.
        keys: whose present versions it holds.
        live_bytes: of these.
        replaced: keys of which it holds versions that were replaced, or deleted.
        replaced_bytes: of these: they can't be given back as long as it does.
        is_open: whether it has the store open. A value stays held when the store was closed.
    """

    pid: int
    keys: tuple[str, ...]
    live_bytes: int
    replaced: tuple[str, ...]
    replaced_bytes: int
    is_open: bool


def who_holds(root: Root) -> list[Holding]:
    """Of all processes that hold values of the store, or have it open; who holds most comes first."""
    device = os.fstat(root.segments_fd).st_dev
    segments = {(device, inode): segment for segment, inode in _segments(root)}
    held: defaultdict[int, list[int]] = defaultdict(list)
    for file, pids in holders_of(segments).items():
        for pid in pids:
            held[pid].append(segments[file])
    found = os.stat(f"{root.state}/{DOORBELL}")
    openers = mappers_of((found.st_dev, found.st_ino))
    made = [_holding(root, pid, held.get(pid, []), pid in openers) for pid in {*held, *openers}]
    return sorted(made, key=lambda one: (-one.live_bytes - one.replaced_bytes, one.pid))


def _segments(root: Root) -> list[tuple[int, int]]:
    """The files that are there, with their inodes."""
    found: list[tuple[int, int]] = []
    for name in os.listdir(root.segments):
        stem, _, ending = name.partition(".")
        if f".{ending}" == _SUFFIX and len(stem) == 16:
            try:
                segment = int(stem, 16)
                found.append((segment, os.stat(segment_path(root.segments, segment)).st_ino))
            except (ValueError, FileNotFoundError):  # of others, or given back meanwhile
                continue
    return found


def _holding(root: Root, pid: int, segments: list[int], is_open: bool) -> Holding:
    keys: dict[str, None] = {}
    replaced: dict[str, None] = {}
    sizes = {LIVE: 0, RETIRED: 0}

    def look(transaction: Transaction) -> None:
        for segment in segments:
            row = transaction.segment(segment)
            if row is not None and row.state in sizes:
                sizes[row.state] += row.nbytes
                (keys if row.state == LIVE else replaced)[row.key.decode(errors="replace")] = None

    root.catalog.view(look)
    return Holding(pid, tuple(sorted(keys)), sizes[LIVE], tuple(sorted(replaced)), sizes[RETIRED], is_open)
