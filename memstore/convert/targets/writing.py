"""Which writer a format has. What the format can't express is refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from memstore.convert.formats import Format
from memstore.convert.leaves import Found
from memstore.convert.naming import Refusals, plain
from memstore.convert.nesting import nested
from memstore.convert.rules import Rules
from memstore.convert.targets import dcp, memmap, safetensors, snapshots
from memstore.convert.targets.torch_save import draft_torch
from memstore.formats import Meter, as_tensordict


class Draft(NamedTuple):
    """What is about to be written.

    Attributes:
        value: what a reader of the format has to find.
        is_folder: whether it is a folder, and no file.
        write: writes it. Called with the folder that is it, or that it is to be in, and with its name there.
    """

    value: Any
    is_folder: bool
    write: Callable[[str, str, Meter], None]


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
    return Draft(tensors, False, partial(safetensors.write_file, found, tensors))


def _huggingface(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    tensors = safetensors.tensors_of(found, rules, refusals)
    return Draft(tensors, True, partial(safetensors.write_folder, found, tensors))


def _torch(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    value = plain(found.value, refusals)
    refusals.check()
    return Draft(value, False, draft_torch(found, value, rules).write)


def _dcp(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    flat = dcp.items_of(found, rules, refusals)
    refusals.check()
    write = partial(dcp.write_torch_checkpoint, found, flat, rules, target)
    return Draft(nested(flat.items, flat.paths, target), True, write)


def _memstore_dcp(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    flat = dcp.items_of(found, rules, refusals)
    refusals.check()
    write = partial(dcp.write_own_checkpoint, found, flat, target)
    return Draft(nested(flat.items, flat.paths, target), True, write)


def _memmap(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
    memmap.check(found, rules, refusals)
    refusals.check()
    source = as_tensordict(found.value)
    return Draft(source, True, partial(memmap.write_memmap, found, source, rules))


def _snapshot(found: Found, rules: Rules, refusals: Refusals, target: str) -> Draft:
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
