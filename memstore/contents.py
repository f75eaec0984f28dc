"""Between values and bytes: what a put writes, and what a get makes of what it maps. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from memstore import structure
from memstore.engine import publish
from memstore.engine.adopted import read_sources
from memstore.engine.header import Header, check_header, read_objects
from memstore.engine.lookup import Held
from memstore.engine.mapping import watch
from memstore.engine.publish import Content
from memstore.engine.record import Record
from memstore.engine.root import Root
from memstore.engine.segment import Filling, segment_path
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError

log = logging.getLogger("memstore")

_OBJECTS_IN_RECORD = 1536  # bytes; a larger record takes pages of its own in the catalog
_OPEN_FILES = 16  # of a batch; the rest keep their locks by mappings
_CHECKSUM = 8  # bytes of xxh3-64 a leaf


@dataclass(frozen=True, slots=True)
class Options:
    """How a get wants its value. As the arguments of `Store.get`."""

    out: Any = None
    like: Any = None
    device: Any = None
    dtype: Any = None
    non_blocking: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        if self.out is not None and self.like is not None:
            raise TypeError("get takes out= or like=, not both: out= fills what is there, like= makes its double")
        if (self.out is not None or self.like is not None) and (self.device is not None or self.dtype is not None):
            raise TypeError("out= and like= have devices and dtypes of their own: leave device= and dtype= out")


PLAIN = Options()


def flatten(key: str, value: Any, root: Root, *, allow_pickle: bool) -> structure.Flat:
    """Raises UnsupportedValueError, naming the leaf, before anything is written."""
    try:
        return structure.flatten(value, allow_pickle=allow_pickle, inline_limit=root.settings.inline_limit)
    except UnsupportedValueError as error:
        error.key = key
        raise


def write(root: Root, key: bytes, flat: structure.Flat, fillings: list[Filling], deadline: float) -> Content:
    """Copies a flattened value to where it is to lie: a claimed and sealed segment, or the bytes of a record.

    `fillings` are the segments of this batch so far; a new one is appended at once, and is the caller's to give back.
    """
    plan, objects = flat.plan, flat.objects
    content = Content(plan.description, objects, plan.nbytes)
    limit = root.settings.inline_limit
    if plan.inline and plan.nbytes + len(objects) <= limit and limit:
        check_header(key.decode(), len(plan.description))
        content.inline = structure.contents(flat)
        content.checksums = _checksums(root, plan, memoryview(content.inline))
        return content
    if len(objects) > _OBJECTS_IN_RECORD:
        content.objects, content.objects_checksum = b"", xxhash.xxh3_64_digest(objects)
    header = Header(
        key.decode(),
        root.settings.store,
        plan.description,
        objects,
        plan.header,
        checksums=_CHECKSUM * len(plan.leaves) if root.settings.checksum else 0,
    )
    batch = fillings[0].put_id if fillings else 0
    filling = publish.claim(root, key, header.nbytes, plan.nbytes, batch, deadline)
    fillings.append(filling)
    filling.allocate(header, plan.nbytes, root.guard, huge_pages=root.on_tmpfs)
    memory = np.asarray(filling)
    structure.fill(flat, memory)
    content.checksums = _checksums(root, plan, memory.data)
    del memory
    filling.seal(content.checksums, durable=root.settings.durable)
    if len(fillings) > _OPEN_FILES:
        filling.park(root.guard)
    content.filling = filling
    return content


def give_back(root: Root, fillings: Sequence[Filling], *, keep: bool) -> None:
    """After an error: the rows and files of a batch that was not published. `keep` as `publish.abandon` has it."""
    try:
        if fillings:
            publish.abandon(root, fillings, keep=keep)
    except (OSError, MemstoreError) as error:
        log.warning("%s: files of a failed put are left to the next sweep: %s", root.path, error)
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
            root.spares.keep(filling.segment, spare)
        filling.close()


def read(root: Root, key: str, held: Held, options: Options, *, verify: bool, allow_pickle: bool) -> Any:
    """Makes a value of a mapped segment or a record's bytes: without a copy, unless the options ask for one."""
    try:
        return _read(root, key, held, options, verify=verify, allow_pickle=allow_pickle)
    except MemstoreError as error:
        if isinstance(error, CorruptionError) and error.key is None:  # structure knows neither key nor file
            raise _damaged(root, key, held[0], error.detail) from error
        error.key = key
        raise


def _read(root: Root, key: str, held: Held, options: Options, *, verify: bool, allow_pickle: bool) -> Any:
    record, mapping, start = held
    objects = record.objects
    if mapping is None:
        memory = np.frombuffer(bytearray(record.inline or b""), np.uint8)
        if record.inline:
            watch(memory.__array_interface__["data"][0], memory)
    else:
        file = np.asarray(mapping)
        memory = file[start : start + record.nbytes]
        if record.objects_checksum is not None:
            objects = _objects(record, file[8:start].tobytes())
    plan = structure.plan_of(record.description)
    if plan.nbytes != memory.nbytes:
        raise _damaged(root, key, record, f"{memory.nbytes:,} bytes instead of {plan.nbytes:,}")
    if verify and record.checksums is not None:
        _verify(root, key, record, plan, memory)
    target = options.like if options.out is None else options.out
    if target is not None:
        copy = structure.get_like if options.out is None else structure.get_into
        return copy(
            plan,
            objects,
            memory,
            target,
            strict=options.strict,
            non_blocking=options.non_blocking,
            allow_pickle=allow_pickle,
        )
    return structure.rebuild(
        plan,
        objects,
        memory,
        mapping,
        allow_pickle=allow_pickle,
        device=options.device,
        dtype=options.dtype,
        non_blocking=options.non_blocking,
    )


def _objects(record: Record, header: bytes) -> bytes:
    """The objects of a value that has too many for its record."""
    objects = read_objects(header)
    if xxhash.xxh3_64_digest(objects) != record.objects_checksum:
        detail = "the objects in the header don't fit their checksum"
        raise CorruptionError(detail, detail=detail)
    return objects


def _checksums(root: Root, plan: structure.Plan, data: memoryview) -> bytes | None:
    if not root.settings.checksum:
        return None
    return b"".join(xxhash.xxh3_64_digest(data[leaf.offset : leaf.offset + leaf.nbytes]) for leaf in plan.leaves)


def _verify(root: Root, key: str, record: Record, plan: structure.Plan, memory: np.ndarray) -> None:
    found = _checksums(root, plan, memory.data)
    if found == record.checksums or found is None or record.checksums is None:
        return
    for i, leaf in enumerate(plan.leaves):
        part = slice(i * _CHECKSUM, (i + 1) * _CHECKSUM)
        if found[part] != record.checksums[part]:
            raise _damaged(root, key, record, f"the bytes of leaf {leaf.name} don't fit their checksum")


def files_of(root: Root, record: Record) -> tuple[str, ...]:
    """The paths of the bytes of a version."""
    if record.adopted is not None:
        return tuple(file.path for file in read_sources(record.adopted))
    return (segment_path(root.segments, record.segment),) if record.segment else ()


def _damaged(root: Root, key: str, record: Record, detail: str) -> CorruptionError:
    path = next(iter(files_of(root, record)), f"{root.path} (inline)")
    return CorruptionError(f"{key!r}: {path}: {detail}", key=key, path=path, detail=detail)
