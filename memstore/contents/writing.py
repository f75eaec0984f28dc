"""What a put writes: values into claimed segments or records, and the batch of them published at one moment."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from memstore import structure
from memstore.contents.checksums import CHECKSUM_SIZE, checksums_of
from memstore.engine import (
    HEADER_LIMIT,
    OBJECTS_IN_RECORD,
    Change,
    Content,
    Filling,
    Header,
    Root,
    abandon,
    check_header,
    claim,
    commit,
    commit_inline,
    park,
)
from memstore.engine.protocols import ahead
from memstore.errors import MemstoreError, StoreTimeoutError, UnsupportedValueError, VersionConflictError
from memstore.structure import modes

Batch = Sequence[tuple[bytes, structure.Flat, int | None]]  # key, value, expected version

log = logging.getLogger("memstore")

_OPEN_FILES = 16  # of a batch; the rest keep their locks by mappings, where these can


def flatten(key: str, value: Any, root: Root, *, allow_pickle: bool) -> structure.Flat:
    """Raises UnsupportedValueError, naming the leaf, before anything is written."""
    try:
        return structure.flatten(value, allow_pickle=allow_pickle, inline_limit=root.settings.inline_limit)
    except Exception as error:
        if modes.are_active():  # what they do says nothing of the value
            with modes.put_aside(entirely=True):
                return flatten(key, value, root, allow_pickle=allow_pickle)
        if isinstance(error, UnsupportedValueError):
            error.key = key
        raise


def _is_inline(root: Root, flat: structure.Flat) -> bool:
    limit = root.settings.inline_limit
    return bool(limit) and flat.plan.inline and flat.plan.nbytes + len(flat.objects) <= limit


def _inline(root: Root, key: bytes, flat: structure.Flat) -> Content:
    plan = flat.plan
    if len(plan.description) > HEADER_LIMIT:
        check_header(key.decode(), len(plan.description))
    memory = structure.contents(flat)
    checksums = checksums_of(root, plan, memoryview(memory)) if root.settings.checksum else None
    return Content(plan.description, flat.objects, plan.nbytes, memory, checksums=checksums)


def write(root: Root, key: bytes, flat: structure.Flat, fillings: list[Filling], deadline: float) -> Content:
    """Copies a flattened value to where it is to lie: a claimed and sealed segment, or the bytes of a record.

    `fillings` are the segments of this batch so far; a new one is appended at once, and is the caller's to give back.
    """
    if _is_inline(root, flat):
        return _inline(root, key, flat)
    plan, objects = flat.plan, flat.objects
    content = Content(plan.description, objects, plan.nbytes)
    if len(objects) > OBJECTS_IN_RECORD:
        content.objects, content.objects_checksum = b"", xxhash.xxh3_64_digest(objects)
    header = Header(
        key.decode(),
        root.settings.store,
        plan.description,
        objects,
        plan.header,
        checksums=CHECKSUM_SIZE * len(plan.leaves) if root.settings.checksum else 0,
    )
    batch = fillings[0].put_id if fillings else 0
    filling = claim(root, key, header.nbytes, plan.nbytes, batch, deadline)
    fillings.append(filling)
    filling.allocate(header, plan.nbytes, root.guard, huge_pages=root.on_tmpfs)
    memory = np.asarray(filling)
    structure.fill(flat, memory)
    content.checksums = checksums_of(root, plan, memory.data)
    del memory
    filling.seal(content.checksums, durable=root.settings.durable)
    if len(fillings) > _OPEN_FILES:
        park(root, filling, deadline)
    content.filling = filling
    return content


def publish_one(root: Root, put: tuple[bytes, structure.Flat, int | None], deadline: float) -> int:
    """As `publish_batch`, of one value; a small one takes a short way."""
    key, flat, expected = put
    if expected is None and _is_inline(root, flat):
        return commit_inline(root, key, _inline(root, key, flat), deadline)
    return publish_batch(root, (put,), deadline)[0]


def publish_batch(root: Root, batch: Batch, deadline: float) -> list[int]:
    fillings: list[Filling] = []
    try:
        changes = [
            Change(name, write(root, name, flat, fillings, deadline), expected) for name, flat, expected in batch
        ]
        versions = commit(root, changes, deadline)
    except BaseException as error:
        if isinstance(error, StoreTimeoutError) and ahead.keep(root, fillings):
            raise
        give_back(root, fillings, keep=isinstance(error, VersionConflictError))
        raise
    keep_mapped(root, fillings)
    return versions


def give_back(root: Root, fillings: Sequence[Filling], *, keep: bool) -> None:
    """After an error: the rows and files of a batch that was not published. `keep` as `claim.abandon` has it."""
    try:
        if fillings:
            abandon(root, fillings, keep=keep)
    except (OSError, MemstoreError) as error:
        log.warning("%s: files of a failed put are left to the next sweep: %s", root.path, str(error))
    finally:
        close(fillings)


def close(fillings: Sequence[Filling]) -> None:
    for filling in fillings:
        filling.close()


def keep_mapped(root: Root, fillings: Sequence[Filling]) -> None:
    """Closes what was published, but for the mappings that the next puts can use."""
    for filling in fillings:
        spare = filling.spare()
        if spare is not None:
            with root.guard:
                root.spares.keep(filling.segment, spare)
        filling.close()
