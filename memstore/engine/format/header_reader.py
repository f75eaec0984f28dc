"""The header of a segment, read and checked: verify and repair take whole ones, a get the objects of large values.

A header may be damaged, or anybody's work. A get compares its first 256 bytes only: see `header.belongs`.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

import msgspec

from memstore.engine.format.header import (
    DIGEST_SIZE,
    SLOTS_OFFSET,
    START,
    STATE_AT,
    STORE_AT,
    Slots,
    digest_of,
    state_word,
    store_mark,
)
from memstore.engine.format.layout import SLACK
from memstore.engine.format.mutable import MARK
from memstore.engine.format.record import FILLING, STATE_NAMES
from memstore.engine.format.safetensors import Entry, header_size, read_tensors, split_header
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.keys import encode_key

_STATES = {state_word(state): state for state in STATE_NAMES}
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_MUTABLE = b'"description":"' + base64.b64encode(MARK)[: 8 * len(MARK) // 6]  # the others depend on what follows
_LARGEST_NUMBER = 1 << 62  # of versions and put ids: a repair counts on from them


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


def read_header(header: bytes | memoryview, size: int) -> Found:
    """Reads a whole header, its 8 bytes of size included, of a file of `size` bytes. Raises CorruptionError.

    It may come from a file that somebody tampered with, digest and all: everything that is returned is checked.
    """
    return read_header_and_tensors(header, size)[0]


def may_be_mutable(header: bytes) -> bool:
    """Whether a whole header can be that of a mutable entry, by one look: to read it takes a hundred times as long."""
    return _MUTABLE in header


def read_header_and_tensors(header: bytes | memoryview, size: int) -> tuple[Found, dict[str, Entry]]:
    """As `read_header`, and what it says of its tensors, by name, in the data's order; the slack is one of them."""
    view = memoryview(header)
    if header_size(bytes(view[:8]), size) != len(view):
        raise CorruptionError(f"the header has {len(view):,} bytes, and says otherwise")
    try:
        return _read_checked(view, size)
    except (msgspec.MsgspecError, UnsupportedValueError, ValueError) as error:
        raise CorruptionError(f"the header can't be read: {error}") from None


def _read_checked(header: memoryview, size: int) -> tuple[Found, dict[str, Entry]]:
    nbytes = size - len(header)
    metadata, values = split_header(bytes(header[8:]))
    entries = read_tensors(values, nbytes)
    said = msgspec.convert(metadata, _Metadata)
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
    found = Found(
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


def _read_slots(text: bytes) -> Slots:
    """Reads the slots. Where the put id was erased, what follows is of an earlier put, so only the state counts."""
    words = dict(word.split("=", 1) for word in text.decode("ascii").split() if "=" in word)
    state = _STATES.get(text[STATE_AT - SLOTS_OFFSET :][: len(state_word(FILLING))])
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


def read_slots(head: bytes, store: str) -> Slots | None:
    """The slots of a file of that store that starts with `head` (HEAD_SIZE bytes); None if they aren't whole."""
    if not head.startswith(START, 8) or not head.startswith(store_mark(store).encode(), STORE_AT):
        return None
    try:
        return _read_slots(head[SLOTS_OFFSET:STORE_AT])
    except (ValueError, UnicodeError):
        return None


def names_put(head: bytes, put_id: int, version: int) -> bool:
    """Whether the slots of a damaged header are whole and name this published put. `head` has HEAD_SIZE bytes."""
    try:
        slots = _read_slots(head[SLOTS_OFFSET:STORE_AT])
    except (ValueError, UnicodeError):
        return False
    return (slots.put_id, slots.version) == (put_id, version)


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
        raise CorruptionError(f"the header can't be read: {error}") from None


def leading_base64(text: bytes) -> bytes:
    """Decodes the base64 that `text` starts with, as far as it goes: the closing quote may be damaged."""
    match = _BASE64.match(text)
    return base64.b64decode(match[0]) if match else b""
