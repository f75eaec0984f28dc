"""Between values and bytes: what a put writes, and what a get makes of what it maps. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from memstore import structure
from memstore.engine.claim import abandon, claim, park
from memstore.engine.header import HEAD_SIZE, Header, belongs, check_header
from memstore.engine.header_reader import names_put, read_objects
from memstore.engine.limits import is_full
from memstore.engine.lookup import Held, files_of
from memstore.engine.mapping import watch
from memstore.engine.publish import Change, Content, commit
from memstore.engine.record import OBJECTS_IN_RECORD, Record
from memstore.engine.root import Root
from memstore.engine.segment import Filling
from memstore.engine.sweep import sweep_all
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError, VersionConflictError

Batch = Sequence[tuple[bytes, structure.Flat, int | None]]  # key, value, expected version

log = logging.getLogger("memstore")

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
    if len(objects) > OBJECTS_IN_RECORD:
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
    filling = claim(root, key, header.nbytes, plan.nbytes, batch, deadline)
    fillings.append(filling)
    filling.allocate(header, plan.nbytes, root.guard, huge_pages=root.on_tmpfs)
    memory = np.asarray(filling)
    structure.fill(flat, memory)
    content.checksums = _checksums(root, plan, memory.data)
    del memory
    filling.seal(content.checksums, durable=root.settings.durable)
    if len(fillings) > _OPEN_FILES:
        park(root, filling, deadline)
    content.filling = filling
    return content


def publish_where_room_is(root: Root, batch: Batch, deadline: float) -> list[int]:
    """Writes and publishes a batch; a second time if files that are kept for reuse stood in the way."""
    key = batch[0][0].decode() if len(batch) == 1 else None
    try:
        return publish_batch(root, batch, deadline)
    except OSError as error:
        if not is_full(error):
            raise
    sweep_all(root, deadline)  # the files that were kept for reuse; another process may have given them back by now
    try:
        return publish_batch(root, batch, deadline)
    except OSError as error:
        if not is_full(error):
            raise
        raise _explained(root, error, key) from error


def publish_batch(root: Root, batch: Batch, deadline: float) -> list[int]:
    fillings: list[Filling] = []
    try:
        changes = [
            Change(name, write(root, name, flat, fillings, deadline), expected) for name, flat, expected in batch
        ]
        versions = commit(root, changes, deadline)
    except BaseException as error:
        give_back(root, fillings, keep=isinstance(error, VersionConflictError))
        raise
    keep_mapped(root, fillings)
    return versions


def _explained(root: Root, error: OSError, key: str | None) -> OSError:
    from memstore.engine.usage import explain_full

    return explain_full(root, error, key)


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


def read(root: Root, key: str, held: Held, options: Options, *, verify: bool, allow_pickle: bool) -> Any:
    """Makes a value of a mapped segment or a record's bytes: without a copy, unless the options ask for one."""
    try:
        return _read(root, key, held, options, verify=verify, allow_pickle=allow_pickle)
    except MemstoreError as error:
        if isinstance(error, CorruptionError) and error.key is None:  # structure knows neither key nor file
            raise damaged(root, key, held[0], error.detail) from error
        error.key = key
        raise


def locate(root: Root, key: str, held: Held) -> tuple[structure.Plan, bytes, np.ndarray]:
    """The plan of a held value, its objects, and its data section in memory."""
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
        raise damaged(root, key, record, f"{memory.nbytes:,} bytes instead of {plan.nbytes:,}")
    return plan, objects, memory


def _read(root: Root, key: str, held: Held, options: Options, *, verify: bool, allow_pickle: bool) -> Any:
    record, mapping, _ = held
    plan, objects, memory = locate(root, key, held)
    if verify:
        _compare(record, plan, memory)
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


def _compare(
    record: Record, plan: structure.Plan, memory: np.ndarray, done: Callable[[int], None] | None = None
) -> None:
    """Compares the leaves with their checksums, if they have any; `done` is told how many bytes more were seen."""
    stored = record.checksums
    if stored is None:
        return
    if len(stored) != _CHECKSUM * len(plan.leaves):
        detail = f"{len(stored):,} bytes of checksums for {len(plan.leaves):,} leaves"
        raise CorruptionError(detail, detail=detail)
    data, reached = memory.data, 0
    for i, leaf in enumerate(plan.leaves):
        end = leaf.offset + leaf.nbytes
        if xxhash.xxh3_64_digest(data[leaf.offset : end]) != stored[i * _CHECKSUM : (i + 1) * _CHECKSUM]:
            detail = f"the bytes of leaf {leaf.name} don't fit their checksum"
            raise CorruptionError(detail, detail=detail)
        if done is not None:
            done(max(end - reached, 0))
        reached = max(end, reached)


def verify(root: Root, key: str, held: Held, done: Callable[[int], None]) -> bool:
    """Compares the bytes of a value with their checksums; `done` is told how many there were.

    Returns whether it has any; an inline value has its record's. Raises CorruptionError.
    """
    record, mapping, start = held
    file = np.asarray(mapping) if mapping is not None else np.frombuffer(record.inline or b"", np.uint8)
    memory = file[start : start + record.nbytes]
    try:
        if mapping is not None and record.objects_checksum is not None:
            _objects(record, file[8:start].tobytes())
        plan = structure.plan_of(record.description)
        if plan.nbytes != memory.nbytes:
            raise damaged(root, key, record, f"{memory.nbytes:,} bytes instead of {plan.nbytes:,}")
        _compare(record, plan, memory, done)
    except CorruptionError as error:
        raise damaged(root, key, record, error.detail) from error
    if record.checksums is None:
        done(record.nbytes)
    return mapping is None or record.checksums is not None or not record.nbytes


def header_of(store: str, key: str, record: Record, content: memoryview) -> bytes | None:
    """The header that a put wrote, made anew of its record, for a file with that content and a damaged header.

    None if the content can't be told to be that put's. Raises CorruptionError if it isn't.
    """
    plan = structure.plan_of(record.description)
    memory = np.frombuffer(content, np.uint8, record.nbytes, record.start)
    head = bytes(content[:HEAD_SIZE])
    if plan.nbytes != record.nbytes:
        return None
    if record.checksums is None and not (
        belongs(head, record.put_id, store) or names_put(head, record.put_id, record.version)
    ):
        return None
    _compare(record, plan, memory)
    objects = record.objects if record.objects_checksum is None else _objects(record, bytes(content[8 : record.start]))
    header = Header(key, store, plan.description, objects, plan.header, checksums=len(record.checksums or b""))
    slack = record.size - record.start - record.nbytes
    if header.nbytes != record.start or slack < 0:
        return None
    return bytes(header.finish(record.put_id, record.nbytes, slack, record.checksums))


def damaged(root: Root, key: str, record: Record, detail: str) -> CorruptionError:
    path = next(iter(files_of(root, record)), f"{root.path} (inline)")
    return CorruptionError(f"{key!r}: {path}: {detail}", key=key, path=path, detail=detail)
