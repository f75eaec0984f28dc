"""A segment: the file that holds the tensor bytes of one put. Every segment is a valid safetensors file.

    0      8                37                        ...                              N*4096
    | size | {"__metadata__":{"memstore":"slots...","key":... | "leaf":{...},...} spaces | data |

The slots stand at a fixed offset and have a fixed width: put id, state, version, batch. They are rewritten in place
while the file lives; everything else is immutable once the segment is live. Who holds the file's exclusive lock may
write it, and who holds the shared lock may rely on it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import json
import os
import struct
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from memstore.engine import syscalls
from memstore.engine.lockfile import LockFile, OwnedFile
from memstore.engine.mapping import Mapping, map_file
from memstore.engine.record import FILLING, LIVE, STATE_NAMES
from memstore.engine.syscalls import Cleanup, Reservation
from memstore.errors import CorruptionError, UnsupportedValueError

Guard = AbstractContextManager[Any]  # of the process: held by whoever forks

HEADER_LIMIT = 100_000_000  # bytes, as the safetensors readers have it
_CACHED_TAIL = 1 << 20  # bytes
COLLAPSE_STEP = 8 << 20
COLLAPSE_SLOW = 0.1  # seconds a step: untouched memory of a virtual machine takes 0.04, compaction once took 0.7
_SLOTS_START = b'{"__metadata__":{"memstore":"'
SLOTS_OFFSET = 8 + len(_SLOTS_START)


@dataclass(frozen=True, slots=True)
class Slots:
    """What a header says of its segment: the words that recovery and readers compare with the catalog."""

    put_id: int
    state: int = FILLING
    version: int = 0
    batch: int = 0
    count: int = 0  # of segments in the batch

    def encode(self) -> bytes:
        batch = f"batch={self.batch:016x}/{self.count:08x}"
        return b"put=%016x state=%s version=%016x %s" % (self.put_id, _state(self.state), self.version, batch.encode())


def _state(state: int) -> bytes:
    return STATE_NAMES[state].ljust(max(map(len, STATE_NAMES.values()))).encode()


SLOTS_SIZE = len(Slots(0).encode())
_PUT_ID_AT = SLOTS_OFFSET + len("put=")
_STATE_AT = _PUT_ID_AT + 16 + len(" state=")


_HEAD_SIZE = 256  # bytes: what readers look at
assert _HEAD_SIZE > SLOTS_OFFSET + SLOTS_SIZE + 64


def segment_path(folder: str, segment: int) -> str:
    return f"{folder}/{segment:016x}.safetensors"


def encode_header(key: str, store: str, description: bytes, objects: bytes, entries: bytes) -> bytearray:
    """The file up to its data: a length, JSON, and spaces up to a page boundary. The slots are to be written."""
    named = f'{store_mark(store)},"key":{json.dumps(key)},"objects":"'
    tail = _header_tail if len(entries) < _CACHED_TAIL else _header_tail.__wrapped__
    text = b"".join(
        (_SLOTS_START, b" " * SLOTS_SIZE, named.encode(), base64.b64encode(objects), tail(description, entries))
    )
    check_header(key, len(text))
    size = -(-(8 + len(text)) // syscalls.PAGE) * syscalls.PAGE
    return bytearray(struct.pack("<Q", size - 8) + text.ljust(size - 8))


def store_mark(store: str) -> str:
    """What follows the slots in each header of a store."""
    return f'","store":{json.dumps(store)}'


def check_header(key: str, nbytes: int) -> None:
    """Refuses what would not fit into a header, also for values that need none."""
    if nbytes > HEADER_LIMIT:
        raise UnsupportedValueError(
            f"the names, shapes and objects of the value take {nbytes:,} bytes, and may take {HEADER_LIMIT:,}: "
            "store large objects as tensors, or under several keys",
            key=key,
        )


@functools.lru_cache(maxsize=64)
def _header_tail(description: bytes, entries: bytes) -> bytes:
    """What all values of one structure have in common; 50 us for one of 300 tensors."""
    return b"".join((b'","description":"', base64.b64encode(description), b'"}', entries, b"}"))


def write_state(fd: int, state: int) -> None:
    syscalls.write_at(fd, _state(state), _STATE_AT)


class Filling:
    """A segment that this process fills: its file, exclusively locked, and its bytes in memory.

    Small ones are assembled in memory and written at once (a pwrite of 64 KiB takes 21 us, faulting its pages in 55);
    from one huge page on, the file itself is mapped. Closing gives back the memory and the lock.
    """

    def __init__(self, path: str, segment: int, put_id: int, *, mode: int = 0o600, dir_fd: int | None = None) -> None:
        self.path, self.segment, self.put_id = path, segment, put_id
        self.size = self._start = 0
        self._dir_fd = dir_fd
        self._scratch = bytearray()
        self._mapping: Reservation | None = None
        self._address = 0
        self._file = LockFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode, dir_fd)

    @property
    def fd(self) -> int:
        return self._file.fd

    def allocate(self, header: bytearray, nbytes: int, guard: Guard, *, huge_pages: bool) -> None:
        """Makes room for the header and `nbytes` of data, and writes the header.

        Raises OSError (ENOSPC) here, and never later: every block of a mapped file is reserved before it is touched.
        No fork may come between a mapping and its being kept from children, so both are done under the guard.
        """
        header[SLOTS_OFFSET : SLOTS_OFFSET + SLOTS_SIZE] = Slots(self.put_id).encode()
        self._start, self.size = len(header), len(header) + nbytes
        if self.size < syscalls.HUGE_PAGE:
            self._scratch = bytearray(self.size)
            self._scratch[: len(header)] = header
            return
        syscalls.truncate(self.fd, self.size)
        if huge_pages:
            for offset in range(0, self.size, syscalls.HUGE_PAGE):
                syscalls.write_at(self.fd, b"\0", offset)
        else:
            syscalls.allocate(self.fd, self.size)
        self._map(self.size, guard)
        if huge_pages:
            self._collapse()
        syscalls.write_at(self.fd, header, 0)

    def _collapse(self) -> None:
        """Makes huge pages of whole extents of 2 MiB, which are touched, and allocates the rest in small ones.

        So too where the kernel refuses, or is slow for want of whole pages. (To collapse the last, incomplete extent
        as well and cut it by truncation splits it, and the next file finds no whole page: 4.5 ms instead of 0.3.)
        """
        whole = self.size // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE
        for offset in range(0, whole, COLLAPSE_STEP):
            start = time.monotonic()
            if not syscalls.collapse(self._address + offset, min(COLLAPSE_STEP, whole - offset)):
                break
            if time.monotonic() - start > COLLAPSE_SLOW:
                break
        if self.size > whole:
            syscalls.populate(self._address + whole, self.size - whole)
        if syscalls.status(self.fd).st_blocks * 512 < self.size:
            syscalls.allocate(self.fd, self.size)

    def _map(self, size: int, guard: Guard) -> None:
        self._mapping, address, start = syscalls.reserve(size)
        self._address = address + start
        with guard:
            syscalls.map_shared(self._address, self.fd, size)
            syscalls.keep_from_children(self._address, size)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The data section, to be filled. Not to be touched after `close`."""
        address = self._address or syscalls.buffer_address(self._scratch)
        data = (address + self._start, False)
        return {"version": 3, "typestr": "|u1", "shape": (self.size - self._start,), "data": data}

    def seal(self, *, durable: bool) -> None:
        """Everything is written; with `durable`, and on the disk."""
        if self._scratch:
            syscalls.write_at(self.fd, self._scratch, 0)
            self._scratch = bytearray()
        if durable:
            syscalls.sync(self.fd)
            syscalls.sync_folder(os.path.dirname(self.path))

    def park(self, guard: Guard) -> None:
        """Keeps the lock by a mapping of one page: a process may have 65,530 of these, and 1,024 files."""
        self._map(syscalls.PAGE, guard)
        self._file.close()

    def go_live(self, version: int, batch: int, count: int, *, durable: bool) -> None:
        """Under the mutex, right before the catalog's commit."""
        slots = Slots(self.put_id, LIVE, version, batch, count)
        file = OwnedFile(self.path, os.O_RDWR, dir_fd=self._dir_fd) if self.fd < 0 else self._file
        syscalls.write_at(file.fd, slots.encode(), SLOTS_OFFSET)
        if durable:
            syscalls.sync_data(file.fd)
        if file is self._file:
            syscalls.unlock(file.fd)
        else:
            self._mapping = None

    def close(self) -> None:
        self._address, self._mapping = 0, None
        self._file.close()


def map_segment(
    path: str, put_id: int, nbytes: int, *, store: str = "", dir_fd: int | None = None
) -> tuple[Mapping, int] | None:
    """Locks, checks and maps the segment of put `put_id`. Returns the mapping and where in it the data starts.

    None if it was replaced since the record was read: another's lock, no file, another put id. Raises CorruptionError
    if the file isn't as long as record and header say: mapping it would be a SIGBUS waiting for its reader.
    """
    fds: list[int] = []
    closing = Cleanup(syscalls.drain, (map(os.close, fds),))  # with a lock on it, a file that stays open bars the sweep
    try:
        syscalls.open_into(fds, path, os.O_RDONLY, 0, dir_fd)
        fd = fds[0]
        if not syscalls.lock_shared(fd):
            return None
        head = syscalls.read_at(fd, _HEAD_SIZE, 0)  # after the lock: before it, it may be a writer's
        if not head.startswith(b"%sput=%016x" % (_SLOTS_START, put_id), 8):
            return None
        if store and not head.startswith(_encoded_mark(store), SLOTS_OFFSET + SLOTS_SIZE):
            return None
        start = 8 + int.from_bytes(head[:8], "little")
        size = syscalls.size_of(fd)
        if start % syscalls.PAGE or start + nbytes != size:
            detail = f"the file has {size:,} bytes, its header takes {start:,} and its data {nbytes:,}"
            raise CorruptionError(f"{path}: {detail}", path=path, detail=detail)
        return map_file(fd, size), start
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _no_file(path, error) from None
    finally:
        del closing  # not what an error's traceback holds on to


@functools.lru_cache(maxsize=64)
def _encoded_mark(store: str) -> bytes:
    return store_mark(store).encode()


def _no_file(path: str, error: OSError) -> Exception:
    """What open and read say of links, folders and FIFOs that lie where a segment should."""
    what = {errno.ELOOP: "a link", errno.EISDIR: "a folder", errno.ESPIPE: "a FIFO", errno.ENXIO: "a socket"}
    if error.errno not in what:
        return error
    detail = f"it is {what[error.errno]}, and no file of memstore's"
    return CorruptionError(f"{path}: {detail}", path=path, detail=detail)


def remove_file(path: str, dir_fd: int | None = None) -> None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder there is nothing of ours: left alone
        syscalls.unlink(path, dir_fd)


class _Header(msgspec.Struct):
    """What is read of a header's JSON."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


def read_objects(header: bytes) -> bytes:
    """The objects that a header carries. Raises CorruptionError."""
    try:
        return base64.b64decode(msgspec.json.decode(header, type=_Header).metadata["objects"], validate=True)
    except (msgspec.MsgspecError, UnicodeError, KeyError, ValueError) as error:
        detail = f"the header can't be read: {error}"
        raise CorruptionError(detail, detail=detail) from None
