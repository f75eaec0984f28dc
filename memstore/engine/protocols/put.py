"""How entries change: the protocols of put and delete. The labels in the code are the numbers of these steps.

1. *Draft* (the caller): flatten the value, encode the header. Nothing is written yet.
2. *Claim* (`claim.py`): take a file for the segment, and lock it. A kill leaves a retired file without a put id, or a
   filling row with an unlocked file or none: others claim or sweep it.
3. *Fill*: allocate, which is where a full disk shows, and let the caller copy its tensors. `seal` writes the header and
   what was assembled in memory, and syncs if the store is durable. A kill leaves what it leaves in step 2.
4. *Commit* (`commit.py`): publish all drafts at one moment, in one hold of the store's mutex. If the keys have their
   home on another host, it commits them (`publish.py`).
5. *After the mutex* (`commit.py`): wake the waiters, look whether the path still names this store, and sweep if there
   is something to do. Then close the files.

An inline value skips 2 and 3, and if it is the only one and goes over any version, its commit is a shorter one
(`commit_inline.py`). A put of several keys claims and fills the segment of each, then commits all as one batch. A
delete is steps 4 and 5 without a new record.

After an error, what was claimed is given back. If the error is that the mutex was not to be had in time, giving back
would wait for it as well: a single small file is kept for the next put instead (`ahead.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

import msgspec

from memstore.engine.failures import OneOfMany, is_full, one_of_many, resource_errors
from memstore.engine.files import SegmentWriter, WritableMemory
from memstore.engine.format import Header
from memstore.engine.protocols import ahead
from memstore.engine.protocols.change import Change, Content, check_mutable
from memstore.engine.protocols.claim import abandon, claim, park, size_of_new
from memstore.engine.protocols.publish import check_one_home, publish, publish_inline
from memstore.engine.protocols.sweep import sweep_all
from memstore.engine.root import Root
from memstore.errors import MemstoreError, StoreTimeoutError, VersionConflictError

Argument = TypeVar("Argument")
Result = TypeVar("Result")

log = logging.getLogger("memstore")
_logs = log.isEnabledFor

_OPEN_FILES = 16  # of a batch; the others are parked
_LARGE = 16 << 20  # bytes: to copy them takes a thousand times the look whether the commit would refuse them


class Draft(msgspec.Struct, frozen=True):
    """What a put is to store under one key. It can be put again if the first try fails.

    Attributes:
        expect: the version that the key must have; 0: it must not exist; None: whatever it has.
        header: of the segment that is to hold the data; None: the content says all, and no segment is needed.
        fill: with a header: writes the data into the memory that it is given, and returns the checksums for the record,
            or None if the store has none.
        seals: as in `Change`.
    """

    key: bytes
    content: Content
    expect: int | None = None
    header: Header | None = None
    fill: Callable[[WritableMemory], bytes | None] | None = None
    seals: int = 0


def put(root: Root, drafts: Sequence[Draft], deadline: float) -> list[int]:
    """Publishes all drafts at one moment, or none of them. Returns the new versions.

    Raises:
        VersionConflictError: a key is at another version than its draft expects.
        StoreFullError, ResourceLimitError, StoreTimeoutError.
        NotAStoreError: the store was removed or moved.
        CrossHostError, HomeUnavailableError, UnknownOutcomeError, StaleMembershipError: of a store on several hosts.
    """
    first = drafts[0]
    if len(drafts) > 1:
        check_one_home(root, [draft.key for draft in drafts])
        return retry_after_sweep(_put, root, drafts, deadline, None)
    key = first.key.decode()
    if first.expect is None and first.content.inline is not None and not first.seals:
        began = perf_counter() if _logs(logging.DEBUG) else 0.0
        version = retry_after_sweep(publish_inline, root, Change(first.key, first.content), deadline, key)
        if began:
            _tell(root, drafts, [], [version], began)
        return [version]
    return retry_after_sweep(_put, root, drafts, deadline, key)


def delete(root: Root, changes: Sequence[Change], deadline: float) -> list[int]:
    """Deletes keys at one moment, or none of them. Returns the versions that they had, or 0."""
    key = changes[0].key.decode() if len(changes) == 1 else None
    return retry_after_sweep(publish, root, changes, deadline, key)


def _put(root: Root, drafts: Sequence[Draft], deadline: float) -> list[int]:
    began = perf_counter() if _logs(logging.DEBUG) else 0.0
    writers: list[SegmentWriter] = []
    changes: list[Change] = []
    for draft in drafts:
        if draft.content.nbytes >= _LARGE:
            change = Change(draft.key, draft.content, draft.expect, seals=draft.seals)
            check_mutable(change, root.catalog.read(draft.key))
    try:
        for draft in drafts:
            changes.append(write(root, draft, writers, deadline))
        # 4. Commit, 5. After the mutex
        versions = publish(root, changes, deadline)
    except BaseException as error:
        clean_up(root, writers, error)
        if len(changes) < len(drafts) and len(drafts) > 1 and isinstance(error, OSError) and is_full(error):
            raise _no_room(root, drafts, len(changes), error) from None
        raise
    close_published(root, writers)
    if began:
        _tell(root, drafts, writers, versions, began)
    return versions


def _tell(
    root: Root, drafts: Sequence[Draft], writers: Sequence[SegmentWriter], versions: Sequence[int], began: float
) -> None:
    """Debug lines of a put: one for each key, with the time of all."""
    left, took = iter(writers), (perf_counter() - began) * 1e3
    for draft, version in zip(drafts, versions, strict=True):
        where = "in the catalog"
        if draft.header is not None:
            writer = next(left)
            where = f"in {'a new file' if writer.is_new else 'a file that is used again'}, put {writer.put_id:#x}"
        key, nbytes = draft.key.decode(), draft.content.nbytes or len(draft.content.objects)
        log.debug("%s: put %r: version %d, %d bytes %s, %.3f ms", root.path, key, version, nbytes, where, took)


def write(root: Root, draft: Draft, writers: list[SegmentWriter], deadline: float) -> Change:
    """Steps 2 and 3 for one key. `writers` are those of the batch so far; it appends its own as soon as it has it."""
    header, content = draft.header, draft.content
    if header is None:
        return Change(draft.key, content, draft.expect, seals=draft.seals)
    assert draft.fill is not None, "a header, and nothing that fills its segment"

    # 2. Claim
    batch = writers[0].put_id if writers else 0
    writer = claim(root, draft.key, header.nbytes, content.nbytes, batch, deadline, exact=content.is_mutable)
    writers.append(writer)

    # 3. Fill
    writer.allocate(header, content.nbytes, root.guard, huge_pages=root.on_tmpfs)
    checksums = draft.fill(writer)
    segment = writer.seal(checksums, durable=root.settings.durable)
    if content.is_mutable:
        writer.unmap()  # it is written through another mapping, and never again by a put
    if len(writers) > _OPEN_FILES:
        park(root, writer, deadline)

    if checksums is not None:
        content = msgspec.structs.replace(content, checksums=checksums)
    return Change(draft.key, content, draft.expect, segments=(segment,), seals=draft.seals)


def fill(root: Root, drafts: Sequence[Draft], publish: Callable[[list[Change]], Result], deadline: float) -> Result:
    """Steps 2 and 3 for what is no put: `publish` makes the segments live, all of them, in a way of its own.

    Raises what `publish` raises, and then the segments are given back; StoreFullError, StoreTimeoutError, OSError.
    """
    writers: list[SegmentWriter] = []
    try:
        published = publish([write(root, draft, writers, deadline) for draft in drafts])
    except BaseException as error:
        clean_up(root, writers, error)
        raise
    close_published(root, writers)
    return published


def clean_up(root: Root, writers: Sequence[SegmentWriter], error: BaseException) -> None:
    """Gives back the rows and files of a batch that was not published, or keeps its one small file for the next put.

    What fails here is left to the next sweep.
    """
    if isinstance(error, StoreTimeoutError) and ahead.keep(root, writers):
        return
    try:
        if writers:
            abandon(root, writers, keep=isinstance(error, VersionConflictError))
    except (OSError, MemstoreError) as failure:
        log.warning("%s: files of a failed put are left to the next sweep: %s", root.path, str(failure))
    finally:
        for writer in writers:
            writer.close()


def close_published(root: Root, writers: Sequence[SegmentWriter]) -> None:
    """Closes the files that were published, and keeps the mappings that the next puts can use."""
    for writer in writers:
        spare = writer.spare()
        if spare is not None:
            with root.guard:
                root.spares.keep(writer.segment, spare)
        writer.close()


# --- no room ----------------------------------------------------------------------------------------------------------


def _no_room(root: Root, drafts: Sequence[Draft], failed: int, reason: OSError) -> OneOfMany:
    """For one of several drafts. What was claimed is given back by now, so none of it is seen in the store."""
    sizes = [
        0 if draft.header is None else size_of_new(root, draft.header.nbytes, draft.content.nbytes) for draft in drafts
    ]
    return one_of_many(reason, drafts[failed].key, sizes[failed], len(drafts), sum(sizes))


def retry_after_sweep(
    make: Callable[[Root, Argument, float], Result], root: Root, change: Argument, deadline: float, key: str | None
) -> Result:
    """Makes a change; if there is no room for it, once more after a sweep of the files that are kept for reuse.

    Args:
        key: what errors name, if the change is of a single key.

    Raises:
        StoreFullError: there is still no room.
        ResourceLimitError: the kernel refused memory, files or mappings.
    """
    try:
        return make(root, change, deadline)
    except (OSError, MemoryError) as error:  # nothing is entered before: a change that succeeds pays nothing
        if isinstance(error, MemoryError) or not is_full(error):
            with resource_errors(root.path, key, root):
                raise
    with resource_errors(root.path, key, root):
        sweep_all(root, deadline)  # it may find nothing, where another process has swept since: try again all the same
        return make(root, change, deadline)
