"""How the parts of all ranks become a snapshot. Imports no torch.

A snapshot is published in these steps, by whoever has all parts; a kill between them leaves what stands behind them:

    1. the index for transformers, where this take has the folder's plain names     no snapshot: there is no manifest
    2. the manifest is linked: the moment of publication                            a snapshot, with leftovers beside it
    3. files of other takes go: they found or will find this manifest               the same, with fewer leftovers
    4. the index, where this take had to choose other names; the parts; the claim   the same

Of two takes to one path, one links the manifest; the other gets AlreadyExistsError, and removes its own files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from memstore.errors import AlreadyExistsError, CorruptionError, KeyNotFoundError
from memstore.snapshot.format import (
    CLAIM,
    INDEX,
    LIMIT,
    MANIFEST,
    check_length,
    claim_name,
    encode_manifest,
    is_id,
    others_in,
    part_name,
    read_manifest,
    take_of,
    trace_of,
)
from memstore.snapshot.parts.merging import index_of, merge
from memstore.snapshot.parts.part import Part, Take, with_sums
from memstore.snapshot.storage import Storage, is_unfinished
from memstore.undecodable import UNDECODABLE

PUBLISHED = b"published"


def finish_part(storage: Storage, argument: bytes, sums: Mapping[str, bytes], durable: bool) -> bytes:
    """The last step of a rank's writer, once its files are there: leaves the part, and publishes if it is the last one.

    Returns:
        PUBLISHED, or nothing if other ranks' parts are missing. (The manifest itself may be too long for a message.)
    """
    part = with_sums(msgspec.msgpack.decode(argument, type=Part), sums)
    take = part.take
    own = part_name(take.id, part.rank)
    try:
        text = msgspec.msgpack.encode(part)
        check_length(len(text), part.values)
        storage.publish(own, text, durable=durable)
        parts = read_parts(storage, take)
        if parts is None:
            return b""
        publish(storage, parts)
        return PUBLISHED
    except BaseException as error:
        # Where the part is there, another rank's writer may be publishing, and count on these files.
        if isinstance(error, AlreadyExistsError) or storage.size(own) is None:
            for name in (own, *sums):
                _remove(storage, name)
        raise


def read_parts(storage: Storage, take: Take) -> list[Part] | None:
    """The parts of all ranks; None if some are missing."""
    names = [part_name(take.id, rank) for rank in range(take.world_size)]
    if any(storage.size(name) is None for name in names):
        return None
    parts: list[Part] = []
    for name in names:
        try:
            parts.append(msgspec.msgpack.decode(storage.read_bytes(name, LIMIT), type=Part))
        except KeyNotFoundError:
            return None  # another rank's writer has published meanwhile, and removes them
        except UNDECODABLE as error:
            raise CorruptionError(path=f"{take.path}/{name}", detail=f"it is no part of a snapshot: {error}") from None
    return parts


def publish(storage: Storage, parts: Sequence[Part]) -> bytes:
    """Makes the snapshot of all parts. Returns its manifest.

    Raises:
        AlreadyExistsError: another take was first, or another library has saved to the folder.
    """
    take = parts[0].take
    manifest = merge(parts)
    text = encode_manifest(manifest)
    if storage.size(MANIFEST) is None:
        for other in others_in(take.path):
            raise AlreadyExistsError(f"{take.path}: {other.kind} ({other.name}) was saved there meanwhile")
    index = index_of(parts, manifest)
    if index and take.plain:
        with contextlib.suppress(AlreadyExistsError):  # this take's, by another rank's writer
            storage.publish(INDEX, index, durable=take.durable)
    try:
        storage.publish(MANIFEST, text, durable=take.durable)
    except AlreadyExistsError:
        found = read_manifest(take.path, storage.read_bytes(MANIFEST, LIMIT))
        if found.id != take.id:
            raise AlreadyExistsError(f"{take.path}: another take to this path was first") from None
    remove_other_takes(storage, take.id)
    if index and not take.plain:
        with contextlib.suppress(AlreadyExistsError):
            storage.publish(INDEX, index, durable=take.durable)
    for part in parts:
        storage.remove(part_name(take.id, part.rank))
    storage.remove(CLAIM if take.plain else claim_name(take.id))
    return text


def claimant(storage: Storage) -> str | None:
    """The id in the folder's claim, if there is one."""
    try:
        text = storage.read_bytes(CLAIM, 64).decode("ascii", "replace")
    except (KeyNotFoundError, CorruptionError):
        return None
    return text if is_id(text) else None


def remove_other_takes(storage: Storage, take: str) -> None:
    """Removes the files of all takes but this one. Files of others stay, whatever they are called.

    Called where no manifest names them: with a manifest of one take there, no other can be published any more. So a
    file that another process is about to publish goes, too: a part, a claim or a manifest of another take, or what this
    take has already.
    """
    owner = claimant(storage)
    names = storage.names()
    traced = {id for id in map(trace_of, names) if id is not None}
    theirs = [name for name in names if is_unfinished(name) or take_of(name, owner, traced) not in (None, take)]
    # Claims, parts and failures say whose the other files are: so they go after them.
    for name in sorted(theirs, key=lambda name: name == CLAIM or trace_of(name) is not None):
        _remove(storage, name)


def _remove(storage: Storage, name: str) -> None:
    """Best effort: what can't be removed stays, and harms nobody."""
    with contextlib.suppress(OSError):
        storage.remove(name)
