"""Leaves that a target could have only as pickles: all of them are refused by name, before anything is written.

torch.save pickles whatever it is given, and torch.load reads only few types of it in its safe mode (`weights_only`).
memstore stores more types, but not all. So what one side has the other may lack: an array of numpy is an entry for
memstore, and a pickle for torch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from types import NoneType
from typing import Any, cast

import torch

from memstore import structure
from memstore.convert.naming import Refusals, part_of
from memstore.engine import Path
from memstore.structure import RefusedError, Walk

Why = Callable[[Any], str | None]
"""Says why a leaf would be a pickle; None: it isn't one."""

_READ_BY_TORCH = frozenset(
    {NoneType, bool, float, complex, str, bytes, bytearray, torch.Size, torch.device, torch.dtype, torch.layout}
)
_WITH_ITEMS = frozenset({tuple, set, Counter})  # of which torch reads what their items are
_STORED_BY_MEMSTORE = frozenset({NoneType, bool, int, float, bytes})  # whatever their values
_MOST_BITS = 2039  # of an int: more bits have an opcode that torch's safe mode lacks


def refuse_pickles(path: Path, value: Any, why: Why, refusals: Refusals) -> None:
    """Adds the leaves that would be pickles.

    Args:
        path: of the value, for their names.
        value: dicts, lists and tuples in one another, and leaves; whatever else there is counts as a leaf.
    """
    kind = cast("Any", type(value))  # pyright: ignore[reportUnknownArgumentType]
    if kind in (dict, OrderedDict):
        for key, entry in cast("dict[Any, Any]", value).items():
            reason = why(key)
            if reason is None:
                refuse_pickles((*path, part_of(key)), entry, why, refusals)
            else:
                refusals.add((*path, part_of(key)), f"its key is {reason}")
        for name, entry in getattr(value, "__dict__", {}).items():  # of a module's state dict: `_metadata`
            refuse_pickles((*path, str(name)), entry, why, refusals)
    elif kind in (list, tuple):
        for i, entry in enumerate(cast("list[Any]", value)):
            refuse_pickles((*path, i), entry, why, refusals)
    else:
        reason = why(value)
        if reason is not None:
            refusals.add(path, reason)


def unread_by_torch(leaf: Any) -> str | None:
    """Why torch.load doesn't read a leaf with `weights_only=True`."""
    kind = cast("Any", type(leaf))
    if kind in _READ_BY_TORCH or isinstance(leaf, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
        return None
    if kind is int:
        few = leaf.bit_length() <= _MOST_BITS
        return None if few else f"an int of more than {_MOST_BITS:,} bits, which torch.load reads only as a pickle"
    if kind in _WITH_ITEMS:
        return next((reason for reason in map(unread_by_torch, leaf) if reason is not None), None)
    if kind in torch.serialization.get_safe_globals():  # pyright: ignore[reportUnknownMemberType]
        return None
    return (
        f"of the class {kind.__module__}.{kind.__qualname__}, which torch.load reads only as a pickle; "
        "allow_pickle=True writes it"
    )


def unstored_by_memstore(leaf: Any) -> str | None:
    """Why memstore's formats don't store a leaf without pickle."""
    kind = cast("Any", type(leaf))
    if kind in _STORED_BY_MEMSTORE or (kind is str and leaf.isascii()) or isinstance(leaf, torch.Tensor):
        return None
    try:
        structure.take_apart(leaf, lambda careful: Walk(False, careful))
    except RefusedError as error:
        inside = "".join(f"[{key!r}]" for key in reversed(error.path))
        return f"{error.reason} (at {inside} in it)" if inside else error.reason
    return None
