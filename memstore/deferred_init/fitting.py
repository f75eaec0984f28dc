"""Slots of a module, filled from a source: what fits is taken, what is missing is replayed.

Tensors that share a storage share it afterwards. Of these, the one that shows all of it is mapped, and the others show
parts of that; if there is none, the storage is replayed, and what is found is copied into it.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memstore.deferred_init.shards import Spread, distribute, placements_of, spread_as
from memstore.deferred_init.slots import Slot
from memstore.deferred_init.sources import Table
from memstore.deferred_init.tensors import (
    become,
    is_wrapper,
    keep_real,
    made_for_now,
    made_of,
    materialize,
    ref_in,
    share,
    shows_all,
)
from memstore.engine import syscalls
from memstore.errors import StructureMismatchError
from memstore.fake import Mark, Ref, is_fake

Names = Mapping[int, Sequence[str]]
_TRIMMED_EVERY = 32 << 20  # bytes


class Wish(NamedTuple):
    """What real tensors are to be. None: as the deferred ones say."""

    device: torch.device | None
    dtype: torch.dtype | None
    mesh: Any
    placements: Any


class Materialized(NamedTuple):
    """The names of the tensors that `materialize_module` has made.

    Attributes:
        found: those that the source has.
        replayed: all others.
    """

    found: tuple[str, ...]
    replayed: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Materialized({len(self.found)} found, {len(self.replayed)} replayed)"


def fill(slots: Sequence[Slot], names: Names, table: Table | None, wish: Wish) -> Materialized:
    """Puts real tensors into slots.

    Args:
        names: all names of each tensor, by its id.

    Raises:
        StructureMismatchError: tensors of the source don't fit; all are listed, and nothing was changed.
    """
    in_turn = sorted(slots, key=lambda slot: not slot.is_parameter)  # what is one is spread as one, wherever it is too
    todo = [slot for slot in in_turn if made_of(slot.tensor) is None]
    found = _found(todo, names, table)
    if table is not None:
        _check(found, table)
        _Taking(slots, table, wish).take(found)
    if wish.mesh is None:
        materialize(slot.tensor for slot in todo if made_of(slot.tensor) is None and not is_wrapper(slot.tensor))
    made = _all_finished(in_turn, wish)
    for slot, one in zip(in_turn, made, strict=True):
        slot.home[slot.key] = one
    taken = {id(slot.tensor) for slot, _ in found}
    saved = {id(slot.tensor) for slot in slots if slot.is_saved}
    named = [slot for slot in slots if slot.is_saved or id(slot.tensor) not in saved]
    return Materialized(
        tuple(slot.name for slot in named if id(slot.tensor) in taken),
        tuple(slot.name for slot in named if id(slot.tensor) not in taken),
    )


def _found(slots: Sequence[Slot], names: Names, table: Table | None) -> list[tuple[Slot, str]]:
    """Slots that the source has something for, each tensor once, and its name there."""
    found: dict[int, tuple[Slot, str]] = {}
    for slot in slots if table is not None else ():
        if is_wrapper(slot.tensor) and spread_as(slot.tensor) is None:
            continue  # its parts are replayed
        for name in names[id(slot.tensor)]:
            if table is not None and table.find(name) is not None:
                found.setdefault(id(slot.tensor), (slot, name))
    return list(found.values())


def _check(found: Sequence[tuple[Slot, str]], table: Table) -> None:
    problems: list[str] = []
    for slot, name in found:
        tensor, stored = slot.tensor, table.get(name)
        if is_fake(stored):
            problems.append(f"{name}: the source's is fake, and has no values")
        elif tuple(stored.shape) != tuple(tensor.shape):
            problems.append(f"{name}: shape {list(tensor.shape)} in the module, {list(stored.shape)} in the source")
        elif _kind(stored.dtype) != _kind(tensor.dtype):
            problems.append(f"{name}: {tensor.dtype} in the module, {stored.dtype} in the source")
    if problems:
        raise StructureMismatchError(
            f"{len(problems)} of {len(found)} tensors of {table.title} don't fit the module:\n  "
            + "\n  ".join(problems)
        )


def _kind(dtype: torch.dtype) -> int:
    return 2 if dtype.is_complex else int(dtype.is_floating_point)


class _Taking:
    """Tensors out of a source, as those of the module share their storages."""

    def __init__(self, slots: Sequence[Slot], table: Table, wish: Wish) -> None:
        self._table, self._wish = table, wish
        self._taken: dict[Ref, torch.Tensor] = {}
        self._refs: dict[Mark, set[Ref]] = {}
        for slot in slots:
            if is_wrapper(slot.tensor):
                continue
            ref = ref_in(slot.tensor)
            self._refs.setdefault(ref.mark, set()).add(ref)

    def take(self, found: Sequence[tuple[Slot, str]]) -> None:
        for slot, name in sorted(found, key=lambda one: -one[0].tensor.numel()):
            if made_of(slot.tensor) is None:
                self._take(slot, name)

    def _take(self, slot: Slot, name: str) -> None:
        tensor, wish = slot.tensor, self._wish
        dtype, spread = _dtype(tensor, wish), _spread(slot, wish)
        if spread is not None and is_wrapper(tensor):
            become(tensor, distribute(self._table.get(name), spread, dtype))
            return
        ref = ref_in(tensor)
        if ref in self._taken:
            become(tensor, self._taken[ref])
        elif spread is not None:
            self._taken[ref] = distribute(self._table.get(name), spread, dtype)
            become(tensor, self._taken[ref])
        elif not share(tensor):
            values = self._table.take(name).to(device=_device(tensor, wish), dtype=dtype)
            if len(self._refs[ref.mark]) > 1 and wish.mesh is None and dtype == tensor.dtype:
                if not (shows_all(tensor) and values.is_contiguous()):
                    with torch.no_grad():
                        materialize([tensor])[0].copy_(values)
                    return
                keep_real(tensor, values, ref)
            self._taken[ref] = values
            become(tensor, values)


def _all_finished(slots: Sequence[Slot], wish: Wish) -> list[torch.Tensor]:
    """What was made for each. Shards lie between tensors that were freed, whose pages the C library would keep."""
    made: list[torch.Tensor] = []
    freed = 0
    for slot in slots:
        made.append(_finished(slot, wish))
        freed += slot.tensor.nbytes if wish.mesh is not None else 0
        if freed >= _TRIMMED_EVERY:
            freed = 0
            syscalls.trim_heap()
    return made


def _finished(slot: Slot, wish: Wish) -> torch.Tensor:
    """What was made for a slot, as it is wished. What is replayed is spread one by one: all are never there at once."""
    made = made_of(slot.tensor)
    dtype = _dtype(slot.tensor, wish)
    if made is None:
        spread = _spread(slot, wish)
        if spread is not None and not is_wrapper(slot.tensor):
            return become(slot.tensor, distribute(made_for_now(slot.tensor).detach(), spread, dtype))
        made = materialize([slot.tensor])[0]
    device = made.device if wish.device is None and wish.mesh is None else _device(slot.tensor, wish)
    if made.device.type != device.type or made.dtype != dtype:
        return become(slot.tensor, made.detach().to(device=device, dtype=dtype))
    return made


def _spread(slot: Slot, wish: Wish) -> Spread | None:
    """How a slot's tensor is spread: as it is wished, or as it is already."""
    if is_wrapper(slot.tensor):
        return spread_as(slot.tensor)
    if wish.mesh is None:
        return None
    placements = placements_of(wish.placements, slot.name, slot.tensor, is_parameter=slot.is_parameter)
    return None if placements is None else Spread(wish.mesh, placements)


def _dtype(tensor: torch.Tensor, wish: Wish) -> torch.dtype:
    return tensor.dtype if wish.dtype is None or not tensor.dtype.is_floating_point else wish.dtype


def _device(tensor: torch.Tensor, wish: Wish) -> torch.device:
    if wish.device is not None:
        return wish.device
    return tensor.device if wish.mesh is None else torch.device(wish.mesh.device_type)
