"""Slots of a module, filled from a source: what fits is taken (`taking`), what is missing is replayed.

What an earlier call has put into the module stays as it is, here and where it is tied. What was only looked at, by
`materialize_tensor`, gets the source's values too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from memstore.deferred_init.placed import Swaps, as_before, have_same_slots, is_placed, note_placed
from memstore.deferred_init.shards import distribute
from memstore.deferred_init.slots import Slot
from memstore.deferred_init.sources import Table
from memstore.deferred_init.taking import Taking
from memstore.deferred_init.tensors import become, is_deferred_tensor, made_for_now, made_of, materialize, plainly
from memstore.deferred_init.ties import ties_apart
from memstore.deferred_init.wishes import Names, Wish, is_on
from memstore.deferred_init.wrappers import all_within, is_wrapper
from memstore.engine import syscalls
from memstore.errors import StructureMismatchError
from memstore.fake import is_fake, original_class
from memstore.structure import why_no_memory
from memstore.wording import an, short

_TRIMMED_EVERY = 32 << 20  # bytes


class Materialized(NamedTuple):
    """The names of the tensors that were made real. Made by `materialize_module`.

    Attributes:
        found: those that were taken from the source.
        replayed: all others; among them those that a former call has put into the module, in another place.
    """

    found: tuple[str, ...]
    replayed: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Materialized({len(self.found)} found, {len(self.replayed)} replayed)"


def fill(slots: Sequence[Slot], table: Table | None, wish: Wish) -> Materialized:
    """Puts real tensors into slots.

    Raises:
        StructureMismatchError: tensors of the source don't fit; all are listed.
        MemstoreError: see `materialize_module`. After any error nothing was changed.
    """
    slots = [slot for slot in slots if is_deferred_tensor(slot.tensor)]  # another thread may have made them since
    in_turn = sorted(slots, key=lambda slot: not slot.is_parameter)  # what is one is spread as one, wherever it is too
    seen = {id(slot.tensor): made_of(slot.tensor) for slot in in_turn}
    with as_before(slot.tensor for slot in in_turn), Swaps() as swaps:
        placed = {id(slot.tensor) for slot in in_turn if is_placed(slot.tensor)}
        todo = [slot for slot in in_turn if id(slot.tensor) not in placed]
        found = [] if table is None else _found(todo, table, wish.names)
        if table is not None:
            taking = Taking(slots, found, table, wish)
            _check(todo, found, table, wish, taking)
            taking.take()
            _replay(todo, wish)
            taking.write()
        else:
            _replay(todo, wish)
        made = _all_finished(in_turn, placed, wish)
        pairs = [(slot, one) for slot, one in zip(in_turn, made, strict=True) if id(slot.tensor) not in placed]
        _become_real(pairs, seen, swaps, wish.names)
    for slot, one in zip(in_turn, made, strict=True):
        deferred = swaps.deferred(slot.tensor)
        slot.put(one if deferred is None else slot.tensor)  # a scripted module's home is in C++
        note_placed(slot.tensor if deferred is None else deferred)
    taken = {id(slot.tensor) for slot, _ in found}
    saved = {id(slot.tensor) for slot in slots if slot.is_saved}
    named = [slot for slot in slots if slot.is_saved or id(slot.tensor) not in saved]
    return Materialized(
        tuple(slot.name for slot in named if id(slot.tensor) in taken),
        tuple(slot.name for slot in named if id(slot.tensor) not in taken),
    )


def _replay(slots: Sequence[Slot], wish: Wish) -> None:
    """What isn't real yet, all at once; for a mesh it is replayed when it is spread, one by one."""
    if wish.mesh is None:
        materialize(slot.tensor for slot in slots if made_of(slot.tensor) is None and not is_wrapper(slot.tensor))


def _found(slots: Sequence[Slot], table: Table, names: Names) -> list[tuple[Slot, str]]:
    """Slots that the source has something for, each tensor once, and its name there."""
    found: dict[int, tuple[Slot, str]] = {}
    for slot in slots:
        for name in names[id(slot.tensor)]:
            stored = table.find(name)
            if stored is not None and not (is_lazy(stored) and is_lazy(slot.tensor)):
                found.setdefault(id(slot.tensor), (slot, name))
    return list(found.values())


def _check(todo: Sequence[Slot], found: Sequence[tuple[Slot, str]], table: Table, wish: Wish, taking: Taking) -> None:
    problems: list[str] = []
    for slot, name in found:
        tensor, stored = slot.tensor, table.get(name)
        if is_fake(stored) or isinstance(stored, FakeTensor):
            problems.append(f"{name}: the source's is fake, and has no values")
        elif is_lazy(stored):
            problems.append(f"{name}: the source's is uninitialized, and has no values")
        elif stored.device.type == "meta" and wish.device_of(tensor).type != "meta":
            problems.append(f"{name}: the source's is on meta, and has no values")
        elif (why := _why_not_taken(tensor, stored) or _why_no_class(slot, stored, wish, taking)) is not None:
            problems.append(f"{name}: the source's is {why}")
        elif not is_lazy(tensor) and tuple(stored.shape) != tuple(tensor.shape):  # a lazy one takes any
            problems.append(f"{name}: shape {list(tensor.shape)} in the module, {list(stored.shape)} in the source")
        elif _kind(stored.dtype) != _kind(tensor.dtype):
            problems.append(f"{name}: {tensor.dtype} in the module, {stored.dtype} in the source")
    problems += ties_apart(todo, table, wish)
    if problems:
        where = f", under {short(table.prefix[:-1])}," if table.prefix else ""
        raise StructureMismatchError(
            f"{len(problems)} of {len(found)} tensors of {table.title}{where} don't fit the module:\n  "
            + "\n  ".join(problems)
        )


def _why_not_taken(tensor: torch.Tensor, stored: torch.Tensor) -> str | None:
    """Why a plain tensor of a source has no values for the module's, though it has a shape and a device."""
    if type(stored) not in (torch.Tensor, torch.nn.Parameter) or stored.is_meta or is_lazy(tensor):
        return None
    if stored.layout is not torch.strided and tensor.layout is torch.strided:
        return f"a {stored.layout} tensor: give its to_dense()"
    reason = None if stored.layout is not torch.strided or stored.is_quantized else why_no_memory(stored)
    return None if reason is None else "a tensor whose storage was freed or cut, and has no values"


def _why_no_class(slot: Slot, stored: torch.Tensor, wish: Wish, taking: Taking) -> str | None:
    """Why the module can't have a tensor of the class that the source has: one of them wraps others."""
    ours, theirs = slot.tensor, type(stored)
    if not is_wrapper(ours) and not is_wrapper(stored):
        return None
    spread = wish.spread_of(slot)
    if is_wrapper(ours) and spread is None:
        cls = original_class(type(ours))
        if cls is theirs:
            return None
        return f"{an(theirs)}, and the module's {an(cls)}: give one, or let the module have {an(theirs)}"
    if not is_wrapper(stored):
        return None
    plain = "its full_tensor()" if hasattr(stored, "full_tensor") else "a plain tensor"
    if spread is not None:
        return f"{an(theirs)}, which wraps others, and no rank can take its part of these: give {plain}"
    if taking.shares(ours):
        return f"{an(theirs)}, which wraps others, and the module's shares its memory with others: give {plain}"
    return None


def _kind(dtype: torch.dtype) -> int:
    return 2 if dtype.is_complex else int(dtype.is_floating_point)


def _all_finished(slots: Sequence[Slot], placed: Container[int], wish: Wish) -> list[torch.Tensor]:
    """What was made for each. Shards lie between tensors that were freed, whose pages the C library would keep."""
    made: list[torch.Tensor] = []
    freed = 0
    for slot in slots:
        made.append(materialize([slot.tensor])[0] if id(slot.tensor) in placed else _finished(slot, wish))
        freed += 0 if wish.mesh is None or is_lazy(slot.tensor) else slot.tensor.nbytes
        if freed >= _TRIMMED_EVERY:
            freed = 0
            syscalls.trim_heap()
    return made


def _finished(slot: Slot, wish: Wish) -> torch.Tensor:
    """What was made for a slot, as it is wished. What is replayed is spread one by one: all are never there at once."""
    tensor = slot.tensor
    made, dtype, spread = made_of(tensor), wish.dtype_of(tensor), wish.spread_of(slot)
    if spread is not None and not _is_spread(tensor, made):
        whole = made_for_now(tensor) if made is None else made
        return become(tensor, distribute(whole.detach(), spread, dtype))
    if made is None:
        made = materialize([tensor])[0]
    device = made.device if wish.device is None and wish.mesh is None else wish.device_of(tensor)
    if made.dtype != dtype or not is_on(made.device, device):
        return become(tensor, made.detach().to(device=device, dtype=dtype))
    return made


def _become_real(
    pairs: Sequence[tuple[Slot, torch.Tensor]], seen: Mapping[int, torch.Tensor | None], swaps: Swaps, names: Names
) -> None:
    """Makes the deferred tensors real as the same objects, but for those in whose place another object belongs.

    Args:
        pairs: slots, and what was made for each.
        seen: of each deferred tensor, what `materialize_tensor` has returned for it before. It stays as it is, and
            shares its memory. If the user has put it into the module, what is tied to it becomes that object.
    """
    with plainly():
        within = {id(part) for slot, _ in pairs for part in all_within(slot.tensor)}  # what was made is in wrappers
        for slot, one in pairs:
            tensor = slot.tensor
            if id(tensor) in within or swaps.deferred(tensor) is not None or made_of(tensor) is not one:
                continue
            if not have_same_slots(type(tensor), type(one)):
                continue
            if one is seen[id(tensor)]:
                if id(one) in names or is_lazy(one):
                    continue
                one = become(tensor, one.detach())
            swaps.swap(slot.name, tensor, one)


def _is_spread(tensor: torch.Tensor, made: torch.Tensor | None) -> bool:
    """Whether it is spread already, or can't be: a lazy one that the source lacks has no shape."""
    return is_wrapper(tensor) or is_lazy(tensor) or (made is not None and is_wrapper(made))
