"""What each rank says first in a take; and rank 0 makes the folder, and claims its plain names if nobody has."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from memstore.errors import AlreadyExistsError
from memstore.snapshot.format import CLAIM, INDEX, MANIFEST, claim_name, local_path, others_in, path_of
from memstore.snapshot.options import Options
from memstore.snapshot.parts import Take
from memstore.snapshot.ranks import Ranks
from memstore.snapshot.stateful import check_app_state
from memstore.snapshot.storage import FileStorage
from memstore.snapshot.take.abandoning import abandon
from memstore.snapshot.take.drafts import Naming
from memstore.snapshot.take.replicated import inferred, is_replicating


class Opening(msgspec.Struct, frozen=True):
    """What a rank says first."""

    take: Take | None  # rank 0's
    replicated: list[str]
    keys: list[str]
    modules: list[tuple[str, str]]  # names of modules, and the prefix of DDP


def open_take(ranks: Ranks, path: Any, app_state: Any, options: Options, begun: list[Take]) -> bytes:
    """What this rank says first. Rank 0 begins the take, which it then finds in `begun`."""
    checked = check_app_state(app_state)
    if options.durability not in ("process", "disk"):
        raise ValueError(f"durability is 'process' or 'disk', and not {options.durability!r}")
    if isinstance(options.replicated, str) or not all(isinstance(glob, str) for glob in options.replicated):
        raise TypeError(f"replicated is a list of patterns, and not {options.replicated!r}")
    found = local_path(path)
    modules = [
        (key, "module." if is_replicating(value) else "")
        for key, value in checked.items()
        if isinstance(value, torch.nn.Module)
    ]
    replicated = [*options.replicated, *inferred(checked)]
    if not ranks.rank:
        begun.append(_begin(found, ranks.size, options))
    return msgspec.msgpack.encode(Opening(begun[0] if begun else None, replicated, list(checked), modules))


def _begin(path: str, world_size: int, options: Options) -> Take:
    """Rank 0's: an error for a snapshot that is there; else the folder, and whose names the plain ones are."""
    if os.path.lexists(f"{path}/{MANIFEST}"):
        raise AlreadyExistsError(f"{path} has a snapshot: take to another path, or remove it first")
    if os.path.lexists(f"{path}/memstore.json"):
        raise AlreadyExistsError(f"{path} is a store: take to a folder of its own, such as {path}-step-1")
    for other in others_in(path):
        raise AlreadyExistsError(f"{path} has {other.kind} ({other.name}): take to another path, or remove it first")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise AlreadyExistsError(f"{path} is there, and is no folder: take to another path")
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


def naming_of(opening: Sequence[Opening]) -> Naming:
    found = {key: prefix for said in opening for key, prefix in said.modules}
    if len(found) != 1:
        return Naming(None, "")
    ((key, prefix),) = found.items()
    return Naming(path_of((key,)), prefix)
