"""The two pages that a data.mdb starts with. Each commit writes one of them, in turn; LMDB opens the newer state.

They are read here from the file, as LMDB 0.9 lays them out. LMDB doesn't ask whether the file is long enough; if the
page of the newest state is damaged, it silently opens the older state; and its binding doesn't show where free pages
are.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from memstore.errors import CorruptionError

_HEAD = 16  # bytes, of any page
_META = struct.Struct("<II8x8xI36xQ48xQQ")
_MAGIC = 0xBEEFC0DE


class Meta(NamedTuple):
    magic: int
    version: int
    page_size: int
    free_root: int  # the page where the table of free pages starts
    last_page: int
    state: int  # the number of the transaction that wrote it


def check_file(path: str, *, is_stable: bool) -> None:
    """Raises CorruptionError where LMDB would end the process, or take an older state for the newest.

    `is_stable` False: somebody may be committing meanwhile, so the two pages may be of two moments.
    """
    try:
        metas, size = read_metas(path)
    except FileNotFoundError:
        return
    if not size:
        return  # a creator was killed before LMDB wrote anything
    if not metas or metas[0].magic != _MAGIC:
        raise damaged(path, "it doesn't start as an LMDB file does")
    last_page = max(metas, key=lambda meta: meta.state).last_page
    if (last_page + 1) * metas[0].page_size > size:  # a SIGBUS in LMDB
        raise damaged(path, f"{size:,} bytes, but it names page {last_page:,}: it was truncated")
    if is_stable and not _follow(metas):
        states = tuple(meta.state for meta in metas)
        raise damaged(
            path,
            f"it starts with states {states}, which don't follow one another, so one may be older than it says: "
            "close the store everywhere, and run memstore.repair",
        )


def has_gone_back(folder: str) -> bool:
    """Whether LMDB may take another state of the catalog than the newest, though both can be read. Nobody uses it."""
    try:
        metas, _ = read_metas(f"{folder}/data.mdb")
    except (OSError, ValueError):  # whoever reads it will say it
        return False
    return len(metas) == 2 and not _follow(metas)


def read_metas(path: str) -> tuple[list[Meta], int]:
    """The pages, unchecked, fewer than two where the file is too short; and its size."""
    metas: list[Meta] = []
    with open(path, "rb") as file:
        for _ in range(2):
            page = file.read(_HEAD + _META.size)
            if len(page) < _HEAD + _META.size:
                break
            metas.append(Meta._make(_META.unpack_from(page, _HEAD)))
            file.seek(metas[0].page_size)
        return metas, os.fstat(file.fileno()).st_size


def _follow(metas: Sequence[Meta]) -> bool:
    """Whether they are of two commits in a row: each writes the page of its number's last bit. A new file has two 0."""
    states = [meta.state for meta in metas]
    newest = max(states)
    return len(states) == 2 and (newest == 0 or (states[newest % 2], states[1 - newest % 2]) == (newest, newest - 1))


def damaged(path: str, detail: str) -> CorruptionError:
    return CorruptionError(path=path, detail=detail)
