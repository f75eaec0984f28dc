"""Changes: what a commit is asked to do, what is refused, and the features that a store needs for it.

A `Change` is one key's part of a commit. `record_of` makes the record of it, `check_versions` refuses keys at other
versions. A feature is something that older versions of memstore don't know; these refuse the store from then on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import msgspec

from memstore._wording import conflict, no_key
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.segments import SealedSegment
from memstore.engine.format.records import MUTABLE_MARK, MutableKind, Record, SegmentExtent
from memstore.engine.root import folder
from memstore.engine.root.folder import CLUSTER, DELTAS, HISTORY, MUTABLE, QUOTAS, SHARDED, Feature
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import Refusal
from memstore.errors import CorruptionError, KeyNotFoundError, MutableEntryError, NotServedError, VersionConflictError

_PAGE = 256  # keys
SMALL = 1536  # bytes: a larger value needs pages of its own in the catalog, and goes into a segment if they are scarce


class Content(msgspec.Struct, frozen=True):
    """Content of a record, beside where the data lies. The fields are those of `Record`."""

    description: bytes
    objects: bytes
    nbytes: int
    inline: bytes | None = None
    checksums: bytes | None = None
    objects_checksum: bytes | None = None
    adopted: bytes | None = None
    parts: bytes | None = None
    boxes: bytes | None = None
    origins: bytes | None = None

    @property
    def is_mutable(self) -> bool:
        return self.description.startswith(MUTABLE_MARK)


class Change(msgspec.Struct, frozen=True):
    """Change of one key in a commit: its new content, or with None its deletion.

    Attributes:
        expect: the version that the key must have; 0: it must not exist; None: whatever it has.
        missing_ok: a deletion of a key that doesn't exist is no error.
        segments: where the data lies, unless the content says all. Several are those that `content.parts` names.
        version: the new version; None: the next one of the store. A given one must be newer than the key's, and those
            of a batch must follow one another: by that a repair knows that it has all files of the batch.
        sealed_put_id: the put id of the mutable entry that the key must have; 0: it must have none.
        history: as of `Record`, from this version on; None: as the key has it.
        shares: files of earlier versions that the content names too: see `deltas.py`.
    """

    key: bytes
    content: Content | None
    expect: int | None = None
    missing_ok: bool = False
    segments: tuple[SealedSegment, ...] = ()
    version: int | None = None
    sealed_put_id: int = 0
    history: tuple[int, int] | None = None
    shares: tuple[SegmentExtent, ...] = ()


class MembershipChanged(Refusal):
    """Raised by a commit that has changed nothing: its keys may belong to other hosts by now.

    Its caller finds their owners anew. It is never seen by users.
    """


class KeptElsewhere(Refusal):
    """Raised by a commit that has changed nothing: other hosts keep versions of its keys, and are to be told; or it is
    to be remembered, since removed hosts may come back.

    Its caller makes it by the way that tells them. It is never seen by users.
    """


def record_of(content: Content, segments: Sequence[SealedSegment], version: int, put_id: int) -> Record:
    """Makes the record of a change; `put_id` is that of a value without a segment."""
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
        origins=content.origins,
    )


def check_versions(changes: Sequence[Change], found: Sequence[Record | None]) -> None:
    """Raises an error for the first change that can't be made to what was found.

    It is a VersionConflictError, KeyNotFoundError or MutableEntryError.
    """
    for change, old in zip(changes, found, strict=True):
        if change.sealed_put_id or (old is not None and old.is_mutable):
            check_mutable(change, old)
        if change.expect is not None:
            check_version(change.key, change.expect, old.version if old else 0)
        if change.content is None and old is None and not change.missing_ok:
            raise missing(change.key)


def check_version(key: bytes, expected: int | None, found: int) -> None:
    if expected is not None and expected != found:
        name = key.decode()
        raise VersionConflictError(conflict(name, expected, found), key=name, expected=expected, found=found)


def check_mutable(change: Change, old: Record | None) -> None:
    """Raises MutableEntryError if the change would put over a mutable entry, or seal another than is there."""
    if change.content is None or change.content.is_mutable:
        return
    if change.sealed_put_id and (old is None or old.put_id != change.sealed_put_id):
        raise gone_while_sealed(change.key.decode())
    if not change.sealed_put_id and old is not None and old.is_mutable:
        raise mutable_entry(change.key, old.mutable_kind)


_WAYS = {
    "dataset": "is a dataset, whose rows are written in place: use store.open_dataset({0!r}), or store.view({0!r}) to "
    "read it; seal() makes an ordinary entry of it, and store.delete({0!r}) frees the key",
    "buffer": "is a replay buffer, whose rows are written in place: use memstore.ReplayBuffer(store, {0!r}) and its "
    "sample(); store.delete({0!r}) frees the key",
}


def mutable_entry(key: bytes, kind: MutableKind) -> MutableEntryError:
    """Makes the error of a call that such entries don't have."""
    name = key.decode()
    return MutableEntryError(f"{name!r} {_WAYS[kind].format(name)}", key=name)


def gone_while_sealed(key: str) -> MutableEntryError:
    return MutableEntryError(f"{key!r} was deleted while it was sealed: nothing was put", key=key)


def missing(key: bytes) -> KeyNotFoundError:
    name = key.decode()
    return KeyNotFoundError(no_key(name), key=name)


# --- features --------------------------------------------------------------------------------------------------------


def need_boxes(root: Root, deadline: float) -> None:
    """Lets the store have records with boxes."""
    _need(root, SHARDED, deadline)


def need_mutable(root: Root, deadline: float) -> None:
    """Lets the store have entries whose rows are written in place.

    Raises UnsupportedFilesystemError where the storage has no mappings and locks to rely on.
    """
    root.storage.check_writable()
    _need(root, MUTABLE, deadline)


def need_history(root: Root, deadline: float) -> None:
    """Lets the store keep versions that were replaced. Raises CrossHostError on storage that hosts share."""
    _need(root, HISTORY, deadline)


def note_history(root: Root) -> None:
    """Does what `need_history` does, for who has the store's mutex."""
    if HISTORY not in root.settings.features:
        _add(root, HISTORY)


def need_quotas(root: Root, deadline: float) -> None:
    """Lets the store have quotas. Raises CrossHostError if other hosts use it, or may come to."""
    _need(root, QUOTAS, deadline)


def need_deltas(root: Root, deadline: float) -> None:
    """Lets versions share files. Raises CrossHostError if other hosts use the store, or may come to."""
    _need(root, DELTAS, deadline)


def deltas_here(root: Root) -> list[tuple[bytes, int]]:
    """Returns the versions that share files, with their keys: present ones, and kept ones. A served store has none."""
    settings = folder.read_settings(root.state)  # another process may have put the first one
    if settings is None or DELTAS not in settings.features or CLUSTER in settings.features:
        return []

    def find(transaction: Transaction) -> list[tuple[bytes, int]]:
        found: list[tuple[bytes, int]] = []
        last: bytes | None = None
        while keys := transaction.keys(b"", last, _PAGE):
            for key in keys:
                with contextlib.suppress(CorruptionError):  # whoever reads it is told
                    record = transaction.record(key)
                    if record is not None and record.is_delta:
                        found.append((key, record.version))
            last = keys[-1]
        for kept in tables.kept_versions(transaction):
            stored = transaction.row(tables.HISTORY, kept.name)
            with contextlib.suppress(CorruptionError):
                key, record = tables.read_version(kept.name, stored or b"")
                if record.is_delta:
                    found.append((key, record.version))
        return found

    root.catalog.open_optional()
    return root.catalog.view(find)


def need_cluster(root: Root, deadline: float) -> None:
    """Lets the store be served to other hosts: it gets the tables for that.

    Raises NotAStoreError; NotServedError if versions of keys share files: `contents.put_deltas_whole` ends that.
    """
    if CLUSTER in root.settings.features and root.catalog.is_served:
        return
    root.member_id()  # raises, before anything is changed
    _need(root, CLUSTER, deadline)
    root.mutex.run(root.catalog.create_served, deadline)


def _need(root: Root, feature: Feature, deadline: float) -> None:
    if feature not in root.settings.features:
        root.mutex.run(_add, deadline, root, feature)


def _add(root: Root, feature: Feature) -> None:
    root.check_in_place()
    if feature == CLUSTER and (left := deltas_here(root)):
        key, version = left[0]
        raise NotServedError(
            f"{root.path} can't be served: versions share files, as version {version} of {key.decode()!r} "
            "does: put that key without delta_of=, and with history=1 if the version is kept"
        )
    root.settings = folder.add_feature(root.state, root.settings, feature)
