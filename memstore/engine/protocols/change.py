"""What a commit is asked to do, the records that come of it, and what is refused: keys at other versions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from memstore.engine.files import SealedSegment
from memstore.engine.format import Record
from memstore.errors import KeyNotFoundError, VersionConflictError


class Content(msgspec.Struct, frozen=True):
    """What a record says of a value, beside where its data lies. The fields are those of `Record`."""

    description: bytes
    objects: bytes
    nbytes: int
    inline: bytes | None = None
    checksums: bytes | None = None
    objects_checksum: bytes | None = None
    adopted: bytes | None = None
    parts: bytes | None = None
    boxes: bytes | None = None


class Change(msgspec.Struct, frozen=True):
    """One key's part of a commit: its new content, or with None its deletion.

    Attributes:
        expect: the version that the key must have; 0: it must not exist; None: whatever it has.
        missing_ok: a deletion of a key that doesn't exist is no error.
        segments: where the data lies, unless the content says all. Several are those that `content.parts` names.
        version: the new version; None: the next one of the store. A given one must be newer than the key's, and those
            of a batch must follow one another: by that a repair knows that it has all files of the batch.
    """

    key: bytes
    content: Content | None
    expect: int | None = None
    missing_ok: bool = False
    segments: tuple[SealedSegment, ...] = ()
    version: int | None = None


def record_of(content: Content, segments: Sequence[SealedSegment], version: int, put_id: int) -> Record:
    """The record of a change; `put_id` is that of a value without a segment."""
    assert len(segments) < 2 or content.parts is not None, "a record names one segment, or has parts"
    segment = segments[0] if segments else None
    alone = segment if content.parts is None else None
    return Record(
        version=version,
        put_id=segment.put_id if segment else put_id,
        segment=alone.segment if alone else 0,
        size=alone.size if alone else len(segments),
        start=alone.start if alone else 0,
        nbytes=content.nbytes,
        created=time.time(),
        description=content.description,
        objects=content.objects,
        inline=content.inline,
        checksums=content.checksums,
        objects_checksum=content.objects_checksum,
        adopted=content.adopted,
        parts=content.parts,
        boxes=content.boxes,
    )


def check_versions(changes: Sequence[Change], found: Sequence[Record | None]) -> None:
    """Raises VersionConflictError or KeyNotFoundError for the first change that can't be made to what was found."""
    for change, old in zip(changes, found, strict=True):
        check_version(change.key, change.expect, old.version if old else 0)
        if change.content is None and old is None and not change.missing_ok:
            raise missing(change.key)


def check_version(key: bytes, expected: int | None, found: int) -> None:
    if expected is not None and expected != found:
        name = key.decode()
        is_at = f"is at version {found}" if found else "doesn't exist"
        raise VersionConflictError(
            f"{name!r} {is_at}, and version {expected} was expected: get it again and decide anew",
            key=name,
            expected=expected,
            found=found,
        )


def missing(key: bytes) -> KeyNotFoundError:
    name = key.decode()
    return KeyNotFoundError(f"no key {name!r}", key=name)
