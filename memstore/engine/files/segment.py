"""A segment: the file that holds the tensor bytes of one put. Every segment is a valid safetensors file.

Its header is described in `format/header.py`. Its data is written only under the exclusive lock of the file
(`segment_writer.py`), and whoever holds a shared lock may rely on it; the state in the header may change under the
store's mutex meanwhile. Here: its path, how a get maps it, and how it is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from memstore.engine import syscalls
from memstore.engine.files import huge_pages
from memstore.engine.files.mapping import Mapping, map_file
from memstore.engine.format import HEAD_SIZE, SegmentExtent, belongs
from memstore.engine.syscalls import HUGE_PAGE, PAGE, Cleanup
from memstore.errors import CorruptionError


def segment_path(folder: str, segment: int) -> str:
    return f"{folder}/{segment:016x}.safetensors"


def map_segment(
    path: str,
    extent: SegmentExtent,
    *,
    store: str,
    dir_fd: int | None = None,
    live: bool = False,
    keep_open: bool = False,
    shared: bool = False,
) -> Mapping | None:
    """Locks, checks and maps the segment that a record names; with `shared`, to be written in place.

    Returns None if the segment was replaced since the record was read: somebody has locked the file, it is gone, or it
    has another put id; with `live`, also if its header says that it is not live. Raises CorruptionError if the file
    isn't as long as record and header say: who reads beyond its end would meet SIGBUS. With `keep_open`, the file stays
    open as long as it is mapped; see `filesystem.mappings_keep_locks`.
    """
    fds: list[int] = []
    closing = Cleanup(syscalls.drain, (map(os.close, fds),))  # a file that stays open stays locked, and is never swept
    try:
        syscalls.open_into(fds, path, os.O_RDWR if shared else os.O_RDONLY, 0, dir_fd)
        if not _is_locked_and_fits(path, fds[0], extent, store, live=live):
            return None
        return map_file(fds[0], extent.size, closing if keep_open else None, shared=shared)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _no_file(path, error) from None
    finally:
        del closing  # else the traceback of an error would keep the file open


def _is_locked_and_fits(path: str, fd: int, extent: SegmentExtent, store: str, *, live: bool) -> bool:
    if not syscalls.lock_shared(fd):
        return False
    head = syscalls.read_at(fd, HEAD_SIZE, 0)  # only now: before the lock it may be a writer's
    if not belongs(head, extent.put_id, store, live=live):
        if len(head) < HEAD_SIZE:  # no writer leaves so little: it sizes the file before the put has a record
            raise CorruptionError(path=path, detail=other_size(len(head), extent.size))
        return False
    start = 8 + int.from_bytes(head[:8], "little")
    size = syscalls.size_of(fd)
    if size != extent.size:
        raise CorruptionError(path=path, detail=other_size(size, extent.size))
    if start != extent.start:
        detail = f"its header has {start:,} bytes instead of {extent.start:,}: run memstore.repair"
        raise CorruptionError(path=path, detail=detail)
    return True


def other_size(size: int, expected: int) -> str:
    """Says in an error that somebody has truncated a segment, or extended it."""
    what = "it was truncated" if size < expected else "something was written behind its end"
    return f"the file has {size:,} bytes instead of {expected:,}: {what}: put the key again, or restore the file"


def map_segments(
    files: Sequence[tuple[str, SegmentExtent]],
    size: int,
    *,
    store: str,
    dir_fd: int | None = None,
    live: bool = False,
    keep_open: bool = False,
) -> Mapping | None:
    """As `map_segment`, of several segments in one range of `size` addresses, each from its base on.

    What is left of the range is zeros, and takes no memory until it is written.
    """
    kept: list[int] = []  # files that stay open as long as the range is mapped
    mapping = map_file(None, size, Cleanup(syscalls.drain, (map(os.close, kept),)) if keep_open else None)
    for path, extent in files:
        fds: list[int] = []
        closing = Cleanup(syscalls.drain, (map(os.close, fds),))
        try:
            syscalls.open_into(fds, path, os.O_RDONLY, 0, dir_fd)
            if not _is_locked_and_fits(path, fds[0], extent, store, live=live):
                return None
            syscalls.map_over(mapping.address + extent.base, fds[0], extent.size)
            if keep_open:
                kept.extend(map(os.dup, fds))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _no_file(path, error) from None
        finally:
            del closing
    end = max((-(-(extent.base + extent.size) // PAGE) * PAGE for _, extent in files), default=0)
    if size - end >= HUGE_PAGE and huge_pages.prices.prefers_huge():
        syscalls.prefer_huge_pages(mapping.address + end, size - end)
    return mapping


def _no_file(path: str, error: OSError) -> Exception:
    """What an error of open or read means: there may be a link, a folder or a FIFO where a segment should be."""
    what = {errno.ELOOP: "a link", errno.EISDIR: "a folder", errno.ESPIPE: "a FIFO", errno.ENXIO: "a socket"}
    if error.errno not in what:
        return error
    detail = f"it is {what[error.errno]}, and no file of memstore's"
    return CorruptionError(path=path, detail=detail)


def remove_file(path: str, dir_fd: int | None = None) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder there isn't ours: it is left alone
        syscalls.unlink(path, dir_fd)
