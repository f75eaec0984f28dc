"""Readers of the catalog: whose moment is the oldest, and how many free pages that leaves to writers.

A page that was replaced is used again once nobody reads a moment from before. LMDB has free pages in a table of its
own, by the transaction that freed them, and its binding doesn't show it: it is read here from the file, as LMDB 0.9
lays it out. That is done under the store's mutex, so that nobody writes there.

To guess from the number of transactions instead was tried, in a store of 4 MiB that had been full once, beside a
stopped reader: at 64 pages a transaction 23 puts were possible instead of 210; and batches of 100 left room for 10
deletes instead of 49.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from memstore.engine import syscalls
from memstore.engine.catalog.meta import Meta, read_metas
from memstore.errors import CorruptionError

_PAGE_HEAD = 16  # bytes
_NO_ROOT = 2**64 - 1
_FLAGS_AT, _END_AT = 10, 12  # in a page: what it is; where the places of its nodes end
_BRANCH = 1
_NODE = struct.Struct("<HHHH")  # two halves of a size, or of a page's number; flags, or that number's top; size of key
_ELSEWHERE = 1  # flag: instead of its data, the node has the number of the page where they start
_MOST_PAGES = 1 << 16  # that are looked at: a damaged one may name itself


class Reader(NamedTuple):
    pid: int
    moment: int  # the transaction whose outcome it reads


def reader_of_the_past(env: Any) -> Reader | None:
    """The oldest living reader of LMDB's environment, if it reads what was changed since."""
    reader = _oldest(env)
    if reader is not None and env.reader_check():  # some were dead
        reader = _oldest(env)
    return reader


def _oldest(env: Any) -> Reader | None:
    reader = parse_readers(env.readers())
    return reader if reader is not None and reader.moment < env.info()["last_txnid"] else None


def parse_readers(listed: str) -> Reader | None:
    """The oldest of LMDB's list: a head, then process, thread and transaction a line; "-" where none is open."""
    lines = [line.split() for line in listed.splitlines()]
    readers = [Reader(int(words[0]), int(words[2])) for words in lines if len(words) == 3 and words[2].isdigit()]
    return min(readers, key=lambda reader: reader.moment, default=None)


def count_free(path: str, moment: int, enough: int) -> int:
    """How many free pages of a data.mdb a writer may use while `moment` is read; it stops counting at `enough`."""
    found, (metas, _) = 0, read_metas(path)
    fd = syscalls.open_file(path, os.O_RDONLY)
    try:
        for freed_by, count in _lists_of_free_pages(fd, max(metas, key=lambda meta: meta.state)):
            if freed_by >= moment or found >= enough:
                break
            found += count
    except (struct.error, IndexError, OverflowError) as error:
        detail = f"its list of free pages can't be read: {error}"
        raise CorruptionError(path=path, detail=detail) from error
    finally:
        syscalls.close(fd)
    return found


def _lists_of_free_pages(fd: int, meta: Meta) -> Iterator[tuple[int, int]]:
    """Transactions in their order, and how many pages each has freed."""
    page_size, pages = meta.page_size, [meta.free_root] if meta.free_root != _NO_ROOT else []
    for _ in range(_MOST_PAGES):
        if not pages:
            return
        page = syscalls.read_at(fd, page_size, pages.pop() * page_size)
        nodes = list(_nodes(page))
        if page[_FLAGS_AT] & _BRANCH:
            pages += [low | high << 16 | top << 32 for _, low, high, top, _ in reversed(nodes)]
            continue
        for place, _, _, flags, key_size in nodes:
            data = page[place + key_size :]
            if flags & _ELSEWHERE:
                data = syscalls.read_at(fd, 8, _word(data) * page_size + _PAGE_HEAD)
            yield _word(page, place), _word(data)


def _nodes(page: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Where each one's key starts, and its head."""
    end = int.from_bytes(page[_END_AT : _END_AT + 2], "little")
    for (place,) in struct.iter_unpack("<H", page[_PAGE_HEAD:end]):
        yield place + _NODE.size, *_NODE.unpack_from(page, place)


def _word(content: bytes, place: int = 0) -> int:
    return int.from_bytes(content[place : place + 8], "little")
