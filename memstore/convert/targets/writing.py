"""Which writer a format has. What the format can't express is refused before anything is written."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from memstore.convert.formats import Format
from memstore.convert.leaves import Found
from memstore.convert.naming import Refusals, plain
from memstore.convert.nesting import Flat, nested
from memstore.convert.rules import Rules
from memstore.convert.targets import dcp, memmap, safetensors, snapshots
from memstore.convert.targets.pickles import Why, refuse_pickles, unread_by_torch, unstored_by_memstore
from memstore.convert.targets.torch_save import draft_torch
from memstore.formats import Meter, as_tensordict


class Draft(NamedTuple):
    """What is about to be written.

    Attributes:
        value: what a reader of the format has to find.
        is_folder: whether it is a folder, and no file.
        write: writes it. Called with the folder that is it, or that it is to be in, and with its name there.
        metadata: of each file, if the format has such texts beside its tensors.
    """

    value: Any
    is_folder: bool
    write: Callable[[str, str, Meter], None]
    metadata: Mapping[str, str] = {}


def draft_target(format: Format, found: Found, rules: Rules, target: str) -> Draft:
    """What is written of a value.

    Args:
        target: where it is going to be.

    Raises:
        UnsupportedValueError: the format can't express some leaves; it names them.
    """
    refusals = Refusals(format)
    draft = _DRAFTS[format](found, rules, refusals, target)
    refusals.check()
    return draft


def _safetensors(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    tensors = safetensors.tensors_of(found, rules, refusals)
    metadata = safetensors.metadata_of(found, refusals)
    return Draft(tensors, False, partial(safetensors.write_file, found, tensors, metadata), metadata)


def _huggingface(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    tensors = safetensors.tensors_of(found, rules, refusals)
    metadata = safetensors.metadata_of(found, refusals)
    return Draft(tensors, True, partial(safetensors.write_folder, found, tensors, metadata), metadata)


def _torch(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    value = plain(found.value, refusals)
    if not rules.allow_pickle:
        refuse_pickles((), value, unread_by_torch, refusals)
    refusals.check()
    return Draft(value, False, draft_torch(found, value, rules).write)


def _dcp(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    flat = dcp.items_of(found, rules, refusals)
    if not rules.allow_pickle:
        _refuse_items(flat, unread_by_torch, refusals)
    refusals.check()
    write = partial(dcp.write_torch_checkpoint, found, flat, rules, target)
    return Draft(nested(flat.items, flat.paths, target), True, write)


def _memstore_dcp(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    flat = dcp.items_of(found, rules, refusals)
    objects = {name: item for name, item in flat.items.items() if type(item) is not io.BytesIO}  # which is kept
    _refuse_items(Flat(objects, flat.paths), unstored_by_memstore, refusals)  # memstore's planner never pickles
    refusals.check()
    write = partial(dcp.write_own_checkpoint, found, flat, target)
    return Draft(nested(flat.items, flat.paths, target), True, write)


def _refuse_items(flat: Flat, why: Why, refusals: Refusals) -> None:
    for name, item in flat.items.items():
        refuse_pickles(flat.paths[name], item, why, refusals)


def _memmap(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    memmap.check(found, rules, refusals)
    refusals.check()
    source = as_tensordict(found.value)
    return Draft(source, True, partial(memmap.write_memmap, found, source, rules))


def _snapshot(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    if not rules.allow_pickle:
        refuse_pickles((), found.value, unstored_by_memstore, refusals)
        refusals.check()
    return Draft(found.value, True, partial(snapshots.write_snapshot, found, rules))


_DRAFTS: dict[Format, Callable[[Found, Rules, Refusals, str], Draft]] = {
    "dcp": _dcp,
    "huggingface": _huggingface,
    "memmap": _memmap,
    "memstore-dcp": _memstore_dcp,
    "safetensors": _safetensors,
    "snapshot": _snapshot,
    "torch": _torch,
}
