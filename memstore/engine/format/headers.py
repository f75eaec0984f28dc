"""Headers: what the file of a segment says of itself, without the catalog.

    0      8                37                         ...                                  N*4096
    | size | {"__metadata__":{"memstore":"slots","store":.. | ..."}, "leaf":{...}, "__slack__":{...}} spaces | data |

The **slots** stand at a fixed offset and have a fixed width: put id, state, version, batch. They are rewritten in
place while the file lives (`files/segments.py`). All else is immutable once the segment is live, and has a digest,
right behind the store's id. A repair makes the catalog anew from headers, so they carry all that a record does, but
for the time of the put.

1. `lay_out` places the tensors in the data, and writes the header's entries for them. What fills whole 64-byte lines
   comes first, then the rest by element size, largest first. So every tensor starts on 64 bytes (cache lines, and any
   SIMD load), and pad entries are needed only between the odd-sized ones at the end.
2. A `Header` is made from these entries. `finish` adds put id, slack and checksums when the data is there.
3. A get compares the first 256 bytes (`belongs`). Verify and repair read all of it (`read_header`), a get of large
   objects these alone (`read_objects`). A header may be damaged, or anybody's work.
4. `copy_header` makes the header of a copy: a segment of another store, whose data stays as it is, byte for byte.

Before all that come the rules of the format, for segments and for external files.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import re
import string
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
import xxhash
from msgspec import Meta

from memstore._arguments import encode_key
from memstore._parsing import UNDECODABLE, Document, read_texts, split_object
from memstore._wording import short
from memstore.engine.format.records import FILLING, LIVE, MUTABLE_MARK, STATE_NAMES, Path, SegmentExtent
from memstore.errors import CorruptionError, UnsupportedValueError

# --- the header of a safetensors file: its rules, for segments and for external files --------------------------------
#     | size of the header, 8 bytes | {"__metadata__": {...}, "name": {"dtype", "shape", "data_offsets"}, ...} | data |
#
# As strict as the format's own reader: the tensors cover the data, without holes, overlaps or anything behind them, and
# no name comes twice. A header may be anybody's work; to refuse one takes no longer than to read it. That a tensor has
# 1,024 dimensions at most is memstore's own rule.


_DATA_ALIGNMENT = 64  # of the first tensor in a file for others, who map it
HEADER_LIMIT = 100_000_000  # bytes, as the format's own reader has it
METADATA = "__metadata__"  # the name of the one entry that is no tensor
PLAIN_METADATA = {"format": "pt"}  # of a file for others: transformers loads none that doesn't say so

# dtypes that the format has, by torch's names; all others are stored as U8 and named in the description.
# F4 is left out: the format counts its elements in halves of bytes, and readers differ on what that means.
SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
TORCH_DTYPES = {code: name for name, code in SAFETENSORS_DTYPES.items()}
_ITEM_SIZES = {  # bytes, by the bits in the code: F64, BF16, F8_E4M3; BOOL has none, and takes 8
    code: int(code.lstrip(string.ascii_uppercase).split("_")[0] or 8) // 8 for code in TORCH_DTYPES
}
ELEMENT_SIZES = {name: _ITEM_SIZES[code] for name, code in SAFETENSORS_DTYPES.items()}  # bytes
_FIELDS = 3  # of an entry
_PARSED_AT_ONCE = 4096  # entries; all of a large header at once would take half as much memory again
_CODES = {code: code for code in TORCH_DTYPES}  # one text for all entries of a dtype

_Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class HeaderEntry(msgspec.Struct, gc=False):
    """An entry of a header: the format's code of a tensor's dtype, its shape, and where it lies in the data."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=1024)]  # as many dimensions as a value may have
    data_offsets: tuple[_Size, _Size]


_read_entry = msgspec.json.Decoder(HeaderEntry).decode
_read_entries = msgspec.json.Decoder(list[HeaderEntry]).decode


def header_size(head: bytes, size: int) -> int:
    """Returns the bytes before the data, in a file of `size` bytes that starts with `head`. Raises CorruptionError."""
    nbytes = int.from_bytes(head[:8], "little")
    if len(head) < 8 or 8 + nbytes > size:
        header = f"{8 + nbytes:,}" if len(head) >= 8 else "at least 8"
        what = f"it has {size:,} bytes, and its header alone takes {header}"
        raise CorruptionError(f"{what}: it is truncated, or no safetensors file")
    if nbytes > HEADER_LIMIT:
        raise CorruptionError(f"a header of {nbytes:,} bytes, and {HEADER_LIMIT:,} are the limit")
    return 8 + nbytes


def split_header(text: bytes) -> tuple[dict[str, str], Document]:
    """Returns a header's metadata in JSON, and its other entries, for `read_tensors`. Raises CorruptionError."""
    values = split_object(text)
    metadata = values.pop(METADATA, None)
    return {} if metadata is None else read_texts(metadata), values


def read_tensors(values: Document, nbytes: int) -> dict[str, HeaderEntry]:
    """Returns the tensors by name, ordered as their bytes are, of a header that `nbytes` of data follow.

    Args:
        values: the entries that `split_header` found. They are used up.

    Raises:
        CorruptionError: the header breaks a rule.
        UnsupportedValueError: a tensor has a dtype that torch doesn't have, or that readers differ on.
    """
    entries = _parse(values)
    for name, entry in entries.items():
        _check_size(name, entry)
    if not _is_ordered(entries.values()):
        entries = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
    _check_cover(entries, nbytes)
    return entries


def _parse(values: Document) -> dict[str, HeaderEntry]:
    """Parses thousands of entries at once, in place: a fifth of the time that each by itself would take."""
    entries = cast("dict[str, Any]", values)
    names = list(values)
    for start in range(0, len(names), _PARSED_AT_ONCE):
        part = names[start : start + _PARSED_AT_ONCE]
        text = b",".join([entries[name] for name in part])
        try:
            found = _read_entries(b"[%s]" % text)
        except UNDECODABLE:
            found = [_parse_one(name, entries[name]) for name in part]
        if text.count(b":") != _FIELDS * len(part):
            for name in part:
                split_object(entries[name])  # one has other fields besides, or one of them twice
        for name, entry in zip(part, found, strict=True):
            entry.dtype = _CODES.get(entry.dtype, entry.dtype)
            entries[name] = entry
    return entries


def _parse_one(name: str, text: msgspec.Raw) -> HeaderEntry:
    try:
        return _read_entry(text)
    except UNDECODABLE as error:
        raise CorruptionError(f"its entry {short(name)} is no dtype, shape and data_offsets: {error}") from None


def _check_size(name: str, entry: HeaderEntry) -> None:
    itemsize = _ITEM_SIZES.get(entry.dtype)
    if itemsize is None:
        what = f"the tensor {short(name)} has the dtype {short(entry.dtype)}"
        raise UnsupportedValueError(f"{what}, which can't be served")
    start, stop = entry.data_offsets
    nbytes = itemsize * math.prod(entry.shape)
    if stop - start != nbytes:
        what = f"the tensor {short(name)} of {entry.dtype} and shape {short(list(entry.shape))}"
        raise CorruptionError(f"{what} takes {nbytes:,} bytes, not {stop - start:,}")


def _is_ordered(entries: Iterable[HeaderEntry]) -> bool:
    """Returns whether the entries are in the order of their bytes. Nearly all are, and to sort the most takes 70 MB."""
    end = 0
    for entry in entries:
        if entry.data_offsets[0] < end:
            return False
        end = entry.data_offsets[1]
    return True


def _check_cover(entries: dict[str, HeaderEntry], nbytes: int) -> None:
    """Raises CorruptionError unless the entries, in their order, fill the data."""
    end = 0
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if start != end:
            what = "overlaps the one before it" if start < end else "leaves a hole before it"
            raise CorruptionError(f"the tensor {short(name)} {what}: it starts at {start:,} of the data, not {end:,}")
        end = stop
    if end != nbytes:
        what = "it is truncated" if nbytes < end else "something was written behind them"
        raise CorruptionError(f"its tensors take {end:,} bytes, and {nbytes:,} follow its header: {what}")


def make_header(
    tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] = PLAIN_METADATA
) -> bytes:
    """Makes the header of a file for others. `tensors`: name, dtype, shape and bytes of each, in the data's order."""
    entries: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        start, end = end, end + nbytes
        entries[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise UnsupportedValueError(
            f"the names of {len(tensors):,} tensors, with {METADATA}, don't fit into a header of safetensors"
        )
    return len(text).to_bytes(8, "little") + text


# --- where tensors lie in the data -----------------------------------------------------------------------------------


ALIGNMENT = 64
SLACK = "__slack__"  # the name of the entry for the unused end of a file that was reused


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes to store. `shape` is None where the bytes are not the C-contiguous elements of one tensor."""

    name: Path
    dtype: str  # torch's name without "torch."
    itemsize: int
    shape: tuple[int, ...] | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class DataLayout:
    offsets: tuple[int, ...]  # of the spans, in the order given, from the start of the data section
    nbytes: int  # of the data section
    header: bytes  # the header's entries behind __metadata__: ',"a":{...},"b":{...}'


def lay_out(spans: Sequence[Span], *, aligned: bool = True, first: int = 0) -> DataLayout:
    """Places spans in a data section. With `aligned` false (inline values) only to their element size, without pads.

    The `first` of them keep their places before all others.
    """
    others = range(first, len(spans))
    order = [*range(first), *sorted(others, key=lambda i: (spans[i].nbytes % ALIGNMENT != 0, -spans[i].itemsize, i))]
    offsets = [0] * len(spans)
    entries: list[tuple[str, str, Sequence[int], int, int]] = []
    names = _HeaderNames()
    end = 0
    for i in order:
        span = spans[i]
        multiple = ALIGNMENT if aligned and span.nbytes else span.itemsize
        start = -(-end // multiple) * multiple if span.nbytes else end
        if start > end and aligned:
            entries.append((names.unique("__pad__"), "U8", [start - end], end, start))
        offsets[i] = start
        end = start + span.nbytes
        code = SAFETENSORS_DTYPES.get(span.dtype, "U8") if span.shape is not None else "U8"
        raw = span.shape is None or span.dtype not in SAFETENSORS_DTYPES
        shape = [span.nbytes] if raw or span.shape is None else span.shape
        entries.append((names.unique(".".join(map(str, span.name))), code, shape, start, end))
    return DataLayout(tuple(offsets), end, encode_entries(entries))


def encode_entries(entries: Iterable[tuple[str, str, Sequence[int], int, int]]) -> bytes:
    """Encodes the entries behind the metadata: of name, code of the dtype, shape, and where its bytes lie."""
    return "".join(
        f',{json.dumps(name)}:{{"dtype":"{code}","shape":{json.dumps(shape)},"data_offsets":[{start},{stop}]}}'
        for name, code, shape, start, stop in entries
    ).encode()


class _HeaderNames:
    """Makes names unique: the leaves ("a", "b") and ("a.b",) would both be called "a.b"."""

    def __init__(self) -> None:
        self._seen = {METADATA, SLACK}
        self._counts: dict[str, int] = {}  # so that 10,000 pads take no 10,000 tries each

    def unique(self, name: str) -> str:
        candidate, count = name, self._counts.get(name, 0)
        while candidate in self._seen:
            count += 1
            candidate = f"{name}#{count}"
        self._counts[name] = count
        self._seen.add(candidate)
        return candidate


# --- headers, made ---------------------------------------------------------------------------------------------------


HEAD_SIZE = 256  # bytes from the start of a file that tell readers which put it holds
HEADER_MULTIPLE = 4096  # bytes: data starts on pages, so that it can be mapped
_CACHED_END = 1 << 20  # bytes: tails of more entries are not kept in the cache
PART_MARK = b"\xc1part"  # before the description of a part of a sharded value: no msgpack starts so
DELTA_MARK = b"\xc1delta"  # before what a delta says of itself: `DeltaHeader`
START = b'{"__metadata__":{"memstore":"'
SLOTS_OFFSET = 8 + len(START)
_SLACK_ROOM = 128  # bytes: the longest entry for the slack, and what closes the header
DIGEST_SIZE = 16  # hexadecimal digits of xxh3-64
_OBJECTS = b'","objects":"'


# As headers have them: all are of one width, since they are rewritten in place.
STATE_WORDS = {state: name.ljust(max(map(len, STATE_NAMES.values()))).encode() for state, name in STATE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class HeaderSlots:
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
            STATE_WORDS[self.state],
            self.version,
            self.batch,
            self.count,
            xxhash.xxh3_64_intdigest(numbers),  # of the fields that don't change while the segment is live
        )


SLOTS_SIZE = len(HeaderSlots(0).encode())
PUT_ID_AT = SLOTS_OFFSET + len("put=")
STATE_AT = PUT_ID_AT + 16 + len(" state=")
STORE_AT = SLOTS_OFFSET + SLOTS_SIZE


def store_mark(store: str) -> str:
    """Returns the text that follows the slots in each header of a store."""
    return f'","store":{json.dumps(store)}'


class DeltaHeader(msgspec.Struct, frozen=True, array_like=True):
    """The part of a delta's header that stands in place of a description.

    Attributes:
        description: of the whole value.
        nbytes: of its data section, the range of all files.
        shares: the files of earlier versions that it shares.
        own: the base of its own file.
    """

    description: bytes
    nbytes: int
    shares: tuple[SegmentExtent, ...]
    own: int


_decode_delta = msgspec.msgpack.Decoder(DeltaHeader).decode


def encode_delta(said: DeltaHeader) -> bytes:
    return DELTA_MARK + msgspec.msgpack.encode(said)


def decode_delta(said: bytes) -> DeltaHeader:
    """Decodes what the header of a delta says. Raises CorruptionError."""
    try:
        return _decode_delta(memoryview(said)[len(DELTA_MARK) :])
    except UNDECODABLE as error:
        raise CorruptionError(f"what it says of the files that it shares can't be read: {error}") from None


_PUT = START + b"put=%016x"
_LIVE_PUT = _PUT + b" state=" + STATE_WORDS[LIVE]


def belongs(head: bytes, put_id: int, store: str, *, live: bool = False) -> bool:
    """Returns whether a file that starts with `head` (HEAD_SIZE bytes) holds that put of that store.

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
        """Encodes all but what `finish` adds.

        `entries` are the tensors' places, as `lay_out` makes them; `checksums` is how many bytes of them come.

        `room`: bytes that the header has at least; a whole number of pages.
        """
        tail = _end_of_header if len(entries) < _CACHED_END else _end_of_header.__wrapped__
        mark = _encoded_mark(store) + b',"digest":"'
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
        """Returns the bytes of the header, state filling, for `nbytes` of data and `slack` bytes behind them."""
        content, end = self._content, self._end
        content[SLOTS_OFFSET:STORE_AT] = HeaderSlots(put_id).encode()
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
    """Returns where the base64 of the objects starts in the file of such a put, with `checksums` bytes of these."""
    header = Header(key, store, b"", b"", b"", checksums=checksums)
    return header._checksums_at + -(-checksums // 3) * 4 + len(_OBJECTS)  # pyright: ignore[reportPrivateUsage]


def digest_of(header: bytes | bytearray | memoryview, at: int) -> bytes:
    """Returns the digest of the size, the store's id, and all behind the digest itself, which starts `at`."""
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
def _end_of_header(description: bytes, entries: bytes) -> bytes:
    """Returns the end of the header, the same for all values of one structure. Cached: 300 tensors take 50 us."""
    return b"".join((b'","description":"', base64.b64encode(description), b'"}', entries))


# --- headers, read and checked ---------------------------------------------------------------------------------------


_STATES = {word: state for state, word in STATE_WORDS.items()}
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_MUTABLE_BASE64 = (
    b'"description":"' + base64.b64encode(MUTABLE_MARK)[: 8 * len(MUTABLE_MARK) // 6]
)  # the others depend on what follows
_LARGEST_NUMBER = 1 << 62  # of versions and put ids: a repair counts on from them


@dataclass(frozen=True, slots=True)
class ParsedHeader:
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


class _HeaderMetadata(msgspec.Struct):
    memstore: str
    store: str
    digest: str
    key: str
    checksums: str
    objects: str
    description: str


def read_header(header: bytes | memoryview, size: int) -> ParsedHeader:
    """Reads a whole header, its 8 bytes of size included, of a file of `size` bytes. Raises CorruptionError.

    It may come from a file that somebody tampered with, digest and all: everything that is returned is checked.
    """
    return read_header_and_tensors(header, size)[0]


def may_be_mutable(header: bytes) -> bool:
    """Returns whether a header can be a mutable entry's, by one look: to read it takes a hundred times as long."""
    return _MUTABLE_BASE64 in header


def read_header_and_tensors(header: bytes | memoryview, size: int) -> tuple[ParsedHeader, dict[str, HeaderEntry]]:
    """Reads a header as `read_header` does, and its tensors by name, in the data's order. The slack is one of them."""
    view = memoryview(header)
    if header_size(bytes(view[:8]), size) != len(view):
        raise CorruptionError(f"the header has {len(view):,} bytes, and says otherwise")
    try:
        return _parse_header(view, size)
    except (msgspec.MsgspecError, UnsupportedValueError, ValueError) as error:
        raise CorruptionError(f"the header can't be read: {error}") from None


def _parse_header(header: memoryview, size: int) -> tuple[ParsedHeader, dict[str, HeaderEntry]]:
    nbytes = size - len(header)
    metadata, values = split_header(bytes(header[8:]))
    entries = read_tensors(values, nbytes)
    said = msgspec.convert(metadata, _HeaderMetadata)
    mark = f'{store_mark(said.store)},"digest":"'
    at = STORE_AT + len(mark)
    beginning = f"{said.memstore}{mark}{said.digest}".encode()
    if bytes(header[8 : at + DIGEST_SIZE]) != START + beginning or said.digest.encode() != digest_of(header, at):
        raise ValueError("it doesn't agree with its digest")
    slots = _read_slots(bytes(header[SLOTS_OFFSET:STORE_AT]))
    encode_key(said.key)
    start, stop = entries[SLACK].data_offsets if SLACK in entries else (nbytes, nbytes)
    if stop != nbytes:
        raise ValueError("its slack isn't at its end")
    found = ParsedHeader(
        put_id=slots.put_id,
        state=slots.state,
        version=slots.version,
        batch=slots.batch,
        count=slots.count,
        store=said.store,
        key=said.key,
        description=base64.b64decode(said.description, validate=True),
        objects=base64.b64decode(said.objects, validate=True),
        checksums=base64.b64decode(said.checksums, validate=True) or None,
        start=len(header),
        nbytes=start,
    )
    return found, entries


def _read_slots(text: bytes) -> HeaderSlots:
    """Reads the slots. Where the put id was erased, what follows is of an earlier put, so only the state counts."""
    words = dict(word.split("=", 1) for word in text.decode("ascii").split() if "=" in word)
    state = _STATES.get(text[STATE_AT - SLOTS_OFFSET :][: len(STATE_WORDS[FILLING])])
    put_id, version, batch = (words.get(name, "") for name in ("put", "version", "batch"))
    if state is not None and put_id == "0" * 16:
        return HeaderSlots(0, state)
    numbers = [int(number, 16) for number in (put_id, version, *batch.split("/"))]
    if state is None or len(numbers) != 4 or max(numbers) > _LARGEST_NUMBER:
        raise ValueError("its slots have no meaning")
    slots = HeaderSlots(numbers[0], state, *numbers[1:])
    if slots.encode() != text:
        raise ValueError("its slots don't agree with their check")
    return slots


def read_slots(head: bytes, store: str) -> HeaderSlots | None:
    """Reads the slots of a file of that store. `head` is its first HEAD_SIZE bytes. None if they aren't whole."""
    if not head.startswith(START, 8) or not head.startswith(_encoded_mark(store), STORE_AT):
        return None
    try:
        return _read_slots(head[SLOTS_OFFSET:STORE_AT])
    except (ValueError, UnicodeError):
        return None


def names_put(head: bytes, put_id: int, version: int) -> bool:
    """Returns whether the slots of a damaged header are whole and name this published put.

    `head` has HEAD_SIZE bytes.
    """
    try:
        slots = _read_slots(head[SLOTS_OFFSET:STORE_AT])
    except (ValueError, UnicodeError):
        return False
    return (slots.put_id, slots.version) == (put_id, version)


class _HeaderObjects(msgspec.Struct):
    objects: str


class _ObjectsOnly(msgspec.Struct):
    metadata: _HeaderObjects = msgspec.field(name="__metadata__")


_read_objects = msgspec.json.Decoder(_ObjectsOnly).decode


def read_objects(header: bytes) -> bytes:
    """Returns the objects that the JSON of a header carries. Raises CorruptionError."""
    try:
        return base64.b64decode(_read_objects(header).metadata.objects, validate=True)
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise CorruptionError(f"the header can't be read: {error}") from None


def leading_base64(text: bytes) -> bytes:
    """Decodes the base64 that `text` starts with, as far as it goes: the closing quote may be damaged."""
    match = _BASE64.match(text)
    return base64.b64decode(match[0]) if match else b""


# --- the header of a copy --------------------------------------------------------------------------------------------


def copy_header(header: bytes | memoryview, size: int, store: str, *, room: int = 0) -> tuple[Header, ParsedHeader]:
    """Makes the header for a file of `store` that copies another one. Returns it, and what the other one says.

    Args:
        header: of the other file, as it came over the wire: it may be anybody's work, so all of it is checked.
        size: of the other file.
        room: bytes that the copy has at least; a whole number of pages.

    Raises:
        CorruptionError: it is damaged.
    """
    found, tensors = read_header_and_tensors(bytes(header), size)
    entries = encode_entries(
        (name, entry.dtype, list(entry.shape), *entry.data_offsets) for name, entry in tensors.items() if name != SLACK
    )
    copied = Header(
        found.key, store, found.description, found.objects, entries, checksums=len(found.checksums or b""), room=room
    )
    return copied, found
