"""The header of a segment: what the file says of itself, without the catalog.

    0      8                37                         ...                                  N*4096
    | size | {"__metadata__":{"memstore":"slots","store":.. | ..."}, "leaf":{...}, "__slack__":{...}} spaces | data |

The **slots** stand at a fixed offset and have a fixed width: put id, state, version, batch. They are rewritten in
place while the file lives. All else is immutable once the segment is live, and has a digest, right behind the store's
id. A repair makes the catalog anew from headers, so they carry all that a record does, but for the time of the put.

Headers are made here, and read by `header_reader.py`; `files/slots.py` rewrites the slots.
"""

from __future__ import annotations

import base64
import functools
import json
import struct
from dataclasses import dataclass

import xxhash

from memstore.engine.format.layout import SLACK
from memstore.engine.format.record import FILLING, LIVE, STATE_NAMES
from memstore.engine.format.safetensors import HEADER_LIMIT
from memstore.errors import UnsupportedValueError

HEAD_SIZE = 256  # bytes from the start of a file that tell readers which put it holds
HEADER_MULTIPLE = 4096  # bytes: data starts on pages, so that it can be mapped
_CACHED_TAIL = 1 << 20  # bytes: tails of more entries are not kept in the cache
PART_MARK = b"\xc1part"  # before the description of a part of a sharded value: no msgpack starts so
START = b'{"__metadata__":{"memstore":"'
SLOTS_OFFSET = 8 + len(START)
_SLACK_ROOM = 128  # bytes: the longest entry for the slack, and what closes the header
DIGEST_SIZE = 16  # hexadecimal digits of xxh3-64
_OBJECTS = b'","objects":"'


@dataclass(frozen=True, slots=True)
class Slots:
    """The state of a segment in its header, which recovery and readers compare with the catalog."""

    put_id: int
    state: int = FILLING
    version: int = 0
    batch: int = 0
    count: int = 0  # of segments in the batch

    def encode(self) -> bytes:
        numbers = b"%016x%016x%016x%08x" % (self.put_id, self.version, self.batch, self.count)
        return b"put=%016x state=%s version=%016x batch=%016x/%08x check=%016x" % (
            self.put_id,
            state_word(self.state),
            self.version,
            self.batch,
            self.count,
            xxhash.xxh3_64_intdigest(numbers),  # of the fields that don't change while the segment is live
        )


def state_word(state: int) -> bytes:
    return STATE_NAMES[state].ljust(max(map(len, STATE_NAMES.values()))).encode()


SLOTS_SIZE = len(Slots(0).encode())
PUT_ID_AT = SLOTS_OFFSET + len("put=")
STATE_AT = PUT_ID_AT + 16 + len(" state=")
STORE_AT = SLOTS_OFFSET + SLOTS_SIZE


def store_mark(store: str) -> str:
    """The text that follows the slots in each header of a store."""
    return f'","store":{json.dumps(store)}'


_PUT = START + b"put=%016x"
_LIVE_PUT = _PUT + b" state=" + state_word(LIVE)


def belongs(head: bytes, put_id: int, store: str, *, live: bool = False) -> bool:
    """Whether a file that starts with `head` (HEAD_SIZE bytes) holds that put of that store.

    With `live` the header must say that the put is live, too. That may be said of a put that was just replaced: the
    catalog is changed before the file's header.
    """
    put = (_LIVE_PUT if live else _PUT) % put_id
    return head.startswith(put, 8) and head.startswith(_encoded_mark(store), STORE_AT)


@functools.lru_cache(maxsize=64)
def _encoded_mark(store: str) -> bytes:
    return store_mark(store).encode()


class Header:
    """The header of a put. What is known only when the file is filled (checksums, put id, slack) is added by `finish`.

    Attributes:
        nbytes: of the file, up to its data: a whole number of pages.
    """

    __slots__ = ("_checksums_at", "_content", "_digest_at", "_end", "nbytes")

    def __init__(
        self,
        key: str,
        store: str,
        description: bytes,
        objects: bytes,
        entries: bytes,
        *,
        checksums: int = 0,
        room: int = 0,
    ) -> None:
        """`entries` are the tensors' places, as `lay_out` makes them; `checksums` is how many bytes of them come.

        `room`: bytes that the header has at least; a whole number of pages.
        """
        tail = _tail if len(entries) < _CACHED_TAIL else _tail.__wrapped__
        mark = f'{store_mark(store)},"digest":"'.encode()
        named = f'","key":{json.dumps(key)},"checksums":"'.encode()
        text = b"".join(
            (
                *(START, b" " * SLOTS_SIZE, mark, b" " * DIGEST_SIZE, named, b" " * (-(-checksums // 3) * 4)),
                *(_OBJECTS, base64.b64encode(objects), tail(description, entries)),
            )
        )
        self._digest_at = STORE_AT + len(mark)
        self._checksums_at = self._digest_at + DIGEST_SIZE + len(named)
        self._end = 8 + len(text)
        self.nbytes = max(-(-(self._end + _SLACK_ROOM) // HEADER_MULTIPLE) * HEADER_MULTIPLE, room)
        check_header(key, self.nbytes)
        self._content = bytearray(struct.pack("<Q", self.nbytes - 8) + text.ljust(self.nbytes - 8))

    def finish(self, put_id: int, nbytes: int, slack: int, checksums: bytes | None) -> bytearray:
        """The bytes of the header, state filling, for `nbytes` of data and `slack` bytes behind them."""
        content, end = self._content, self._end
        content[SLOTS_OFFSET:STORE_AT] = Slots(put_id).encode()
        if checksums:
            encoded = base64.b64encode(checksums)
            content[self._checksums_at : self._checksums_at + len(encoded)] = encoded
        last = b"}"
        if slack:
            places = (SLACK.encode(), slack, nbytes, nbytes + slack)
            last = b',"%s":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}}' % places
        content[end : end + _SLACK_ROOM] = last.ljust(_SLACK_ROOM)
        content[self._digest_at : self._digest_at + DIGEST_SIZE] = digest_of(content, self._digest_at)
        return content


def objects_at(key: str, store: str, checksums: int) -> int:
    """Where the base64 of the objects starts in the file of such a put, with `checksums` bytes of these."""
    header = Header(key, store, b"", b"", b"", checksums=checksums)
    return header._checksums_at + -(-checksums // 3) * 4 + len(_OBJECTS)  # pyright: ignore[reportPrivateUsage]


def digest_of(header: bytes | bytearray | memoryview, at: int) -> bytes:
    """The digest of the size, the store's id, and all behind the digest itself, which starts `at`."""
    view = memoryview(header)
    digest = xxhash.xxh3_64(view[:8])
    digest.update(view[STORE_AT:at])
    digest.update(view[at + DIGEST_SIZE :])
    return b"%016x" % digest.intdigest()


def check_header(key: str, nbytes: int) -> None:
    """Refuses a value whose header would be too large, even where the value is inline and has no header."""
    if nbytes > HEADER_LIMIT:
        raise UnsupportedValueError(
            f"the names, shapes and objects of the value take {nbytes:,} bytes, and may take {HEADER_LIMIT:,}: "
            "store large objects as tensors, or under several keys",
            key=key,
        )


@functools.lru_cache(maxsize=64)
def _tail(description: bytes, entries: bytes) -> bytes:
    """The end of the header, the same for all values of one structure. Cached: 300 tensors take 50 us."""
    return b"".join((b'","description":"', base64.b64encode(description), b'"}', entries))
