"""What all ranks do before one of them writes: steps 1 to 3 of a take, as taking.py has them.

Rank 0 looks that there is no snapshot, makes the folder, and claims its plain names if nobody has. The state dicts are
asked for. Then each rank knows what it writes. An error leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from memstore import modes
from memstore.errors import AlreadyExistsError, MemstoreError
from memstore.snapshot.drafts import FileDraft, Naming, draft, offers_of, own_bytes
from memstore.snapshot.manifest import (
    LIMIT,
    Manifest,
    StoredValue,
    check_length,
    read_manifest,
)
from memstore.snapshot.names import (
    CLAIM,
    INDEX,
    MANIFEST,
    claim_name,
    path_of,
)
from memstore.snapshot.part import Part, Take
from memstore.snapshot.partition import Offer, lone_replicas, partition
from memstore.snapshot.parts import claimant
from memstore.snapshot.ranks import Ranks
from memstore.snapshot.state import HeldTensor, State, StateWalker
from memstore.snapshot.stateful import AppState, RNGState, check_app_state
from memstore.snapshot.storage import FileStorage


class Options(NamedTuple):
    """As the arguments of `Snapshot.take`."""

    replicated: Sequence[Any]
    durability: str
    checksum: bool
    allow_pickle: bool


class _Opening(msgspec.Struct, frozen=True):
    """What a rank says first."""

    take: Take | None  # rank 0's
    replicated: list[str]
    keys: list[str]
    modules: list[tuple[str, str]]  # names of modules, and the prefix of DDP


class Prepared(NamedTuple):
    """What a rank is about to write."""

    ranks: Ranks
    storage: FileStorage
    part: Part
    files: list[FileDraft]

    @property
    def nbytes(self) -> int:
        """Of the files."""
        return sum(file.size for file in self.files)


def prepare(path: Any, app_state: Any, group: Any, options: Options) -> Prepared:
    """All but the writing: afterwards every rank knows what it writes."""
    ranks = Ranks(group)
    begun: list[Take] = []  # rank 0's
    try:
        said = ranks.together(lambda: _open(ranks, path, app_state, options, begun))
        opening = [msgspec.msgpack.decode(text, type=_Opening) for text in said]
        with modes.put_aside():
            return _prepare(ranks, opening, app_state, options)
    except BaseException:
        for take in begun:
            abandon(FileStorage(take.path), take, [], ranks.rank, all_ended=ranks.all_know)
        raise


def _open(ranks: Ranks, path: Any, app_state: Any, options: Options, begun: list[Take]) -> bytes:
    """What this rank says first. Rank 0 begins the take, which it then finds in `begun`."""
    checked = check_app_state(app_state)
    if options.durability not in ("process", "disk"):
        raise ValueError(f"durability is 'process' or 'disk', and not {options.durability!r}")
    if isinstance(options.replicated, str) or not all(isinstance(glob, str) for glob in options.replicated):
        raise TypeError(f"replicated is a list of patterns, and not {options.replicated!r}")
    found = local_path(path)
    modules = [
        (key, "module." if _is_replicating(value) else "")
        for key, value in checked.items()
        if isinstance(value, torch.nn.Module)
    ]
    replicated = [*options.replicated, *_inferred(checked)]
    if not ranks.rank:
        begun.append(_begin(found, ranks.size, options))
    return msgspec.msgpack.encode(_Opening(begun[0] if begun else None, replicated, list(checked), modules))


def local_path(path: Any) -> str:
    """The absolute path of a folder; TypeError or ValueError for what is none."""
    found = os.fspath(path)
    if not isinstance(found, str) or not found or "\0" in found:
        raise TypeError(f"path is that of a folder, as text, and not {path!r}")
    if "://" in found:
        scheme, _, rest = found.partition("://")
        if scheme not in ("file", "fs"):
            raise ValueError(f"{found!r}: snapshots are folders of a file system; there is no storage {scheme!r}")
        found = rest
    return os.path.abspath(found)


def _begin(path: str, world_size: int, options: Options) -> Take:
    """Rank 0's: an error for a snapshot that is there; else the folder, and whose names the plain ones are."""
    if os.path.lexists(f"{path}/{MANIFEST}"):
        raise AlreadyExistsError(f"{path} has a snapshot: take to another path, or remove it first")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise AlreadyExistsError(f"{path} is there, and is no folder")
    writer = f"memstore {importlib.import_module('memstore').__version__}"  # which is a layer above this one
    durable = options.durability == "disk"
    take = Take(uuid.uuid4().hex[:16], path, world_size, time.time(), writer, False, durable, options.checksum)
    storage = FileStorage.create(path, durable=durable)
    try:
        return msgspec.structs.replace(take, plain=_claim(storage, take.id))
    except BaseException:
        abandon(storage, take, [], 0, all_ended=True)
        raise


def _claim(storage: FileStorage, take: str) -> bool:
    """Claims names for a take. Whether it may use the plain ones: nobody else does, or has used them."""
    plain = not any(name.endswith(".safetensors") or name in (INDEX, CLAIM) for name in storage.names())
    if plain:
        with contextlib.suppress(AlreadyExistsError):
            storage.publish(CLAIM, take.encode(), durable=False)
            return True
    storage.publish(claim_name(take), b"", durable=False)
    return False


def _prepare(ranks: Ranks, opening: list[_Opening], app_state: AppState, options: Options) -> Prepared:
    take = opening[0].take
    if take is None:
        raise MemstoreError("rank 0 of the process group said nothing of the snapshot")
    storages: list[FileStorage] = []
    tensors: list[HeldTensor] = []
    states: list[State] = []
    shared: set[str] = set()
    dicts = _state_dicts(ranks, {key for said in opening for key in said.keys}, app_state)
    globs = set.intersection(*(set(said.replicated) for said in opening))

    def walk() -> bytes:
        storages.append(FileStorage(take.path))
        walker = StateWalker(allow_pickle=options.allow_pickle)
        # modules first: a tensor has the name of its first leaf, and a dict may hold a model's tensors, too
        found = sorted(dicts().items(), key=lambda item: not isinstance(app_state[item[0]], torch.nn.Module))
        states.extend(walker.add(key, value) for key, value in found)
        tensors.extend(walker.tensors)
        values = [StoredValue(*state) for state in states]
        check_length(sum(value.manifest_bytes for value in values) + sum(len(one.path) for one in tensors), values)
        if ranks.size > 1:
            shared.update(tensor.path for tensor in tensors if tensor.is_sharded or _matches(tensor.path, globs, ranks))
        else:
            shared.update(tensor.path for tensor in tensors if tensor.is_sharded)
        return msgspec.msgpack.encode((own_bytes(tensors, shared), offers_of(tensors, shared)))

    found = [msgspec.msgpack.decode(text, type=tuple[int, list[Offer]]) for text in ranks.together(walk)]
    alone = lone_replicas([mine for _, mine in found])
    shared -= alone
    try:
        shares = partition(
            [nbytes for nbytes, _ in found], [[offer for offer in mine if offer.path not in alone] for _, mine in found]
        )
    except MemstoreError:
        ranks.all_know = True  # each computes the same
        raise
    part, files = draft(take, ranks.rank, states, tensors, shared, shares, _naming(opening))
    return Prepared(ranks, storages[0], part, files)


def _matches(path: str, globs: set[str], ranks: Ranks) -> bool:
    """Patterns are of paths without a rank, as torchsnapshot has them; those of `get_manifest`'s do, too."""
    return any(fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(f"{ranks.rank}/{path}", glob) for glob in globs)


def _state_dicts(ranks: Ranks, keys: set[str], app_state: AppState) -> Callable[[], dict[str, Any]]:
    """The state dicts by name; a function, that raises what one of them raised once all ranks are through.

    The random state stays what it was: a state_dict may draw numbers.
    """
    random_state = RNGState()
    before = random_state.state_dict()
    found: dict[str, Any] = {}
    failed: list[Exception] = []
    for key, value in app_state.items():
        if isinstance(value, RNGState):
            found[key] = value.state_dict()
    for key in sorted(keys):
        if key in app_state and key not in found and not failed:
            try:
                found[key] = app_state[key].state_dict()
            except Exception as error:
                failed.append(error)
        ranks.wait()
    random_state.load_state_dict(before)

    def result() -> dict[str, Any]:
        if failed:
            raise failed[0]
        return found

    return result


# --- modules ----------------------------------------------------------------------------------------------------------


def _is_replicating(value: Any) -> bool:
    return isinstance(value, torch.nn.parallel.DistributedDataParallel)


def _inferred(app_state: AppState) -> list[str]:
    """The patterns of what DistributedDataParallel keeps equal on all ranks."""
    globs: list[str] = []
    for key, value in app_state.items():
        if _is_replicating(value):
            ignored = set(getattr(value, "parameters_to_ignore", ()))
            if not ignored:
                globs.append(f"{fnmatch_escaped(key)}/*")
                continue
            names = [name for name, _ in (*value.named_parameters(), *value.named_buffers())]
            globs += [
                f"{fnmatch_escaped(key)}/{fnmatch_escaped(name)}"
                for name in names
                if name not in ignored and name.removeprefix("module.") not in ignored
            ]
    return globs


def fnmatch_escaped(text: str) -> str:
    """A pattern that matches just this path."""
    escaped = text.replace("%", "%25").replace("/", "%2F")
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in escaped)


def _naming(opening: list[_Opening]) -> Naming:
    found = {key: prefix for said in opening for key, prefix in said.modules}
    if len(found) != 1:
        return Naming(None, "")
    ((key, prefix),) = found.items()
    return Naming(path_of((key,)), prefix)


# --- afterwards -------------------------------------------------------------------------------------------------------


def published(storage: FileStorage, take: Take) -> Manifest | None:
    """The manifest of this take, if it is there, and can be read."""
    with contextlib.suppress(MemstoreError, OSError):
        if storage.size(MANIFEST) is not None:
            found = read_manifest(take.path, storage.read_bytes(MANIFEST, LIMIT))
            return found if found.id == take.id else None
    return None


def abandon(storage: FileStorage, take: Take, written: Sequence[str], rank: int, *, all_ended: bool) -> None:
    """Removes what a take has written that failed; what is published stays, and so does what can't be removed.

    Args:
        written: this rank's files.
        all_ended: whether every other rank writes no more, and removes its files. Else (one may have died) the claim
            stays: by that the next take that is published in the folder knows whose they are.
    """
    if published(storage, take) is not None:
        return
    for name in written:
        with contextlib.suppress(OSError):
            storage.remove(name)
    if rank == 0:
        with contextlib.suppress(OSError):
            own = claimant(storage) == take.id
            if own:
                storage.remove(INDEX)  # first: while the claim is there, it is known whose it is
            if all_ended or take.world_size == 1:
                storage.remove(claim_name(take.id))
                if own:
                    storage.remove(CLAIM)
            if not storage.names():
                os.rmdir(take.path)
