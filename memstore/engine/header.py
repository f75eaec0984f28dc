"""The header of a segment: what the file says of itself, without the catalog.

    0      8                37                         ...                                  N*4096
    | size | {"__metadata__":{"memstore":"slots","store":.. | ..."}, "leaf":{...}, "__slack__":{...}} spaces | data |

The **slots** stand at a fixed offset and have a fixed width: put id, state, version, batch. They are rewritten in
place while the file lives. All else is immutable once the segment is live, and has a digest, right behind the store's
id. A repair makes the catalog anew from headers, so they carry all that a record does.
"""

from __future__ import annotations

import base64
import functools
import json
import string
import struct
from dataclasses import dataclass

import msgspec
import xxhash

from memstore.engine import syscalls
from memstore.engine.layout import SAFETENSORS_DTYPES, SLACK
from memstore.engine.record import FILLING, STATE_NAMES
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.keys import encode_key

HEADER_LIMIT = 100_000_000  # bytes, as the safetensors readers have it
HEAD_SIZE = 256  # bytes: what readers look at
_CACHED_TAIL = 1 << 20  # bytes
_START = b'{"__metadata__":{"memstore":"'
SLOTS_OFFSET = 8 + len(_START)
_SLACK_ROOM = 128  # bytes: the longest entry for the slack, and what closes the header
_DIGEST_SIZE = 16  # hexadecimal digits of xxh3-64


@dataclass(frozen=True, slots=True)
class Slots:
    """What a header says of its segment: the words that recovery and readers compare with the catalog."""

    put_id: int
    state: int = FILLING
    version: int = 0
    batch: int = 0
    count: int = 0  # of segments in the batch

    def encode(self) -> bytes:
        numbers = b"%016x%016x%016x%08x" % (self.put_id, self.version, self.batch, self.count)
        return b"put=%016x state=%s version=%016x batch=%016x/%08x check=%016x" % (
            self.put_id,
            _state(self.state),
            self.version,
            self.batch,
            self.count,
            xxhash.xxh3_64_intdigest(numbers),  # of what doesn't change while it is live
        )


def _state(state: int) -> bytes:
    return STATE_NAMES[state].ljust(max(map(len, STATE_NAMES.values()))).encode()


SLOTS_SIZE = len(Slots(0).encode())
_PUT_ID_AT = SLOTS_OFFSET + len("put=")
_STATE_AT = _PUT_ID_AT + 16 + len(" state=")
_STORE_AT = SLOTS_OFFSET + SLOTS_SIZE


def write_state(fd: int, state: int) -> None:
    syscalls.write_at(fd, _state(state), _STATE_AT)


def erase_put_id(fd: int) -> None:
    """From here on the file holds no put's contents: readers that come with an older record see it."""
    syscalls.write_at(fd, b"0" * 16, _PUT_ID_AT)


def write_slots(fd: int, slots: Slots) -> None:
    syscalls.write_at(fd, slots.encode(), SLOTS_OFFSET)


def store_mark(store: str) -> str:
    """What follows the slots in each header of a store."""
    return f'","store":{json.dumps(store)}'


def belongs(head: bytes, put_id: int, store: str) -> bool:
    """Whether a file that starts with `head` (HEAD_SIZE bytes) holds that put of that store."""
    return head.startswith(b"%sput=%016x" % (_START, put_id), 8) and head.startswith(_encoded_mark(store), _STORE_AT)


@functools.lru_cache(maxsize=64)
def _encoded_mark(store: str) -> bytes:
    return store_mark(store).encode()


class Header:
    """The header of a put, but for what is known only when its file is filled.

    Attributes:
        nbytes: of the file, up to its data: a whole number of pages.
    """

    __slots__ = ("_checksums_at", "_content", "_digest_at", "_end", "nbytes")

    def __init__(
        self, key: str, store: str, description: bytes, objects: bytes, entries: bytes, *, checksums: int = 0
    ) -> None:
        """`entries` are the tensors', as `lay_out` makes them; `checksums` is how many bytes of these there will be."""
        tail = _tail if len(entries) < _CACHED_TAIL else _tail.__wrapped__
        mark = f'{store_mark(store)},"digest":"'.encode()
        named = f'","key":{json.dumps(key)},"checksums":"'.encode()
        text = b"".join(
            (
                *(_START, b" " * SLOTS_SIZE, mark, b" " * _DIGEST_SIZE, named, b" " * (-(-checksums // 3) * 4)),
                *(b'","objects":"', base64.b64encode(objects), tail(description, entries)),
            )
        )
        self._digest_at = _STORE_AT + len(mark)
        self._checksums_at = self._digest_at + _DIGEST_SIZE + len(named)
        self._end = 8 + len(text)
        self.nbytes = -(-(self._end + _SLACK_ROOM) // syscalls.PAGE) * syscalls.PAGE
        check_header(key, self.nbytes)
        self._content = bytearray(struct.pack("<Q", self.nbytes - 8) + text.ljust(self.nbytes - 8))

    def finish(self, put_id: int, nbytes: int, slack: int, checksums: bytes | None) -> bytearray:
        """The bytes of the header, state filling, for `nbytes` of data and `slack` bytes behind them."""
        content, end = self._content, self._end
        content[SLOTS_OFFSET:_STORE_AT] = Slots(put_id).encode()
        if checksums:
            encoded = base64.b64encode(checksums)
            content[self._checksums_at : self._checksums_at + len(encoded)] = encoded
        last = b"}"
        if slack:
            places = (SLACK.encode(), slack, nbytes, nbytes + slack)
            last = b',"%s":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}}' % places
        content[end : end + _SLACK_ROOM] = last.ljust(_SLACK_ROOM)
        content[self._digest_at : self._digest_at + _DIGEST_SIZE] = _digest(content, self._digest_at)
        return content


def _digest(header: bytes | bytearray | memoryview, at: int) -> bytes:
    """Of the size, the store, and all behind the digest itself, which starts `at`."""
    view = memoryview(header)
    digest = xxhash.xxh3_64(view[:8])
    digest.update(view[_STORE_AT:at])
    digest.update(view[at + _DIGEST_SIZE :])
    return b"%016x" % digest.intdigest()


def check_header(key: str, nbytes: int) -> None:
    """Refuses what would not fit into a header, also for values that need none."""
    if nbytes > HEADER_LIMIT:
        raise UnsupportedValueError(
            f"the names, shapes and objects of the value take {nbytes:,} bytes, and may take {HEADER_LIMIT:,}: "
            "store large objects as tensors, or under several keys",
            key=key,
        )


@functools.lru_cache(maxsize=64)
def _tail(description: bytes, entries: bytes) -> bytes:
    """What all values of one structure have in common; 50 us for one of 300 tensors."""
    return b"".join((b'","description":"', base64.b64encode(description), b'"}', entries))


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """A header that was read and agrees with its digest.

    Attributes:
        put_id: 0 where a new put was being made of the file.
        state: FILLING, LIVE or RETIRED.
        nbytes: of the data, without the slack.
    """

    put_id: int
    state: int
    version: int
    batch: int
    count: int
    store: str
    key: str
    description: bytes
    objects: bytes
    checksums: bytes | None
    start: int
    nbytes: int


class _Metadata(msgspec.Struct):
    memstore: str
    store: str
    digest: str
    key: str
    checksums: str
    objects: str
    description: str


class _MetadataOnly(msgspec.Struct):
    metadata: _Metadata = msgspec.field(name="__metadata__")


class _Entry(msgspec.Struct, gc=False):
    """A tensor's place; the metadata, which lie among the entries, decode to one without fields."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


_read_json = msgspec.json.Decoder(_MetadataOnly).decode
_read_entries = msgspec.json.Decoder(dict[str, _Entry]).decode
_STATES = {_state(state): state for state in STATE_NAMES}
_ITEM_SIZES = {  # the names tell: F64, BF16, F8_E4M3, and BOOL
    code: int(code.lstrip(string.ascii_uppercase).split("_")[0] or 8) // 8 for code in SAFETENSORS_DTYPES.values()
}
_LARGEST_HEADER = HEADER_LIMIT + 2 * syscalls.PAGE  # with the slack's entry and the spaces
_LARGEST_NUMBER = 1 << 62  # of versions and put ids: a repair counts on from them


def header_size(head: bytes, size: int) -> int:
    """How long the header is of a file of `size` bytes that starts with `head`. Raises CorruptionError."""
    nbytes = 8 + int.from_bytes(head[:8], "little")
    if not _STORE_AT < nbytes <= min(size, _LARGEST_HEADER):
        detail = f"a file of {size:,} bytes can't have a header of {nbytes:,}"
        raise CorruptionError(detail, detail=detail)
    return nbytes


def read_header(header: bytes | memoryview, size: int) -> Found:
    """Reads a whole header, its 8 bytes of size included, of a file of `size` bytes. Raises CorruptionError.

    It may come from a file that somebody tampered with, digest and all: everything that is returned is checked.
    """
    view = memoryview(header)
    if header_size(bytes(view[:8]), size) != len(view):
        detail = f"the header has {len(view):,} bytes, and says otherwise"
        raise CorruptionError(detail, detail=detail)
    try:
        return _read_checked(view, size)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise CorruptionError(detail := f"the header can't be read: {error}", detail=detail) from None


def _read_checked(header: memoryview, size: int) -> Found:
    metadata = _read_json(header[8:]).metadata
    mark = f'{store_mark(metadata.store)},"digest":"'
    at = _STORE_AT + len(mark)
    said = f"{metadata.memstore}{mark}{metadata.digest}".encode()
    if bytes(header[8 : at + _DIGEST_SIZE]) != _START + said or metadata.digest.encode() != _digest(header, at):
        raise ValueError("it doesn't agree with its digest")
    slots = _read_slots(bytes(header[SLOTS_OFFSET:_STORE_AT]))
    encode_key(metadata.key)
    return Found(
        put_id=slots.put_id,
        state=slots.state,
        version=slots.version,
        batch=slots.batch,
        count=slots.count,
        store=metadata.store,
        key=metadata.key,
        description=base64.b64decode(metadata.description, validate=True),
        objects=base64.b64decode(metadata.objects, validate=True),
        checksums=base64.b64decode(metadata.checksums, validate=True) or None,
        start=len(header),
        nbytes=_data_size(_read_entries(header[8:]), size - len(header)),
    )


def _read_slots(text: bytes) -> Slots:
    """Where the put id was erased, the rest is another put's, or nobody's: only the state is told."""
    words = dict(word.split("=", 1) for word in text.decode("ascii").split() if "=" in word)
    state = _STATES.get(text[_STATE_AT - SLOTS_OFFSET :][: len(_state(FILLING))])
    put_id, version, batch = (words.get(name, "") for name in ("put", "version", "batch"))
    if state is not None and put_id == "0" * 16:
        return Slots(0, state)
    numbers = [int(number, 16) for number in (put_id, version, *batch.split("/"))]
    if state is None or len(numbers) != 4 or max(numbers) > _LARGEST_NUMBER:
        raise ValueError("its slots have no meaning")
    slots = Slots(numbers[0], state, *numbers[1:])
    if slots.encode() != text:
        raise ValueError("its slots don't agree with their check")
    return slots


def names_put(head: bytes, put_id: int, version: int) -> bool:
    """Whether the slots of a damaged header (HEAD_SIZE bytes of it) are whole, and those of a published put."""
    try:
        slots = _read_slots(head[SLOTS_OFFSET:_STORE_AT])
    except (ValueError, UnicodeError):
        return False
    return (slots.put_id, slots.version) == (put_id, version)


def _data_size(entries: dict[str, _Entry], room: int) -> int:
    """The bytes of the data without the slack. The entries must fill `room`, in their order, the slack last."""
    del entries["__metadata__"]
    slack = entries.pop(SLACK, None)
    end = 0
    for entry in entries.values() if slack is None else (*entries.values(), slack):
        start, stop = entry.data_offsets
        if start != end or not start <= stop <= room or stop - start != _span(entry, room):
            raise ValueError(f"an entry of shape {list(entry.shape)[:8]} can't lie at {start}:{stop}")
        end = stop
    if end != room:
        raise ValueError(f"its entries have {end:,} bytes, and the file {room:,}")
    return slack.data_offsets[0] if slack else room


def _span(entry: _Entry, most: int) -> int:
    """Bytes of a tensor; -1 if it has none that could be, or more than `most`."""
    nbytes = _ITEM_SIZES.get(entry.dtype, -1)
    if 0 in entry.shape:
        return 0 if nbytes > 0 else -1
    for length in entry.shape:
        nbytes *= length
        if not 0 < nbytes <= most:  # before numbers grow that take all day to multiply
            return -1
    return nbytes


class _Objects(msgspec.Struct):
    objects: str


class _ObjectsOnly(msgspec.Struct):
    metadata: _Objects = msgspec.field(name="__metadata__")


_read_objects = msgspec.json.Decoder(_ObjectsOnly).decode


def read_objects(header: bytes) -> bytes:
    """The objects that the JSON of a header carries. Raises CorruptionError."""
    try:
        return base64.b64decode(_read_objects(header).metadata.objects, validate=True)
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise CorruptionError(detail := f"the header can't be read: {error}", detail=detail) from None
