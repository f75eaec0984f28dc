"""The header of a copy: a segment of another store, stored here too. Its data stays as it is, byte for byte."""

from __future__ import annotations

from memstore.engine.format.header import Header
from memstore.engine.format.header_reader import Found, read_header_and_tensors
from memstore.engine.format.layout import SLACK, encode_entries


def copy_header(header: bytes | memoryview, size: int, store: str) -> tuple[Header, Found]:
    """The header for a file of `store`, and what the other one says.

    Args:
        header: of the other file, as it came over the wire: it may be anybody's work, so all of it is checked.
        size: of the other file.

    Raises:
        CorruptionError: it is damaged.
    """
    found, tensors = read_header_and_tensors(bytes(header), size)
    entries = encode_entries(
        (name, entry.dtype, list(entry.shape), *entry.data_offsets) for name, entry in tensors.items() if name != SLACK
    )
    copied = Header(
        found.key, store, found.description, found.objects, entries, checksums=len(found.checksums or b""), room=0
    )
    return copied, found
