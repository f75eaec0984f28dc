"""Tensors out of a source, as those of the module share their storages.

1. A tensor that is a storage by itself becomes what the source has: mapped, if it need not be converted.
2. One that shows all of a storage does too, and the others that show it become parts of that.
3. Into a storage of which the source has several tensors, or only a part, or that was made real before, values are
   written when it is real. So they are in all tensors that show it.

What is converted, moved or spread shares nothing with others, as in torch's `Module.to`.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from memstore.deferred_init.placed import is_real
from memstore.deferred_init.shards import distribute
from memstore.deferred_init.slots import Slot
from memstore.deferred_init.sources import Table
from memstore.deferred_init.tensors import become, keep_real, materialize, ref_in, shows_all
from memstore.deferred_init.wishes import Wish
from memstore.deferred_init.wrappers import is_wrapper
from memstore.fake import Mark, Ref, original_class
from memstore.structure import modes


class Taking:
    """What one call takes.

    Args:
        slots: all that the call fills.
        found: those that the source has something for, each tensor once, and its name there.
    """

    def __init__(self, slots: Sequence[Slot], found: Sequence[tuple[Slot, str]], table: Table, wish: Wish) -> None:
        self._found = sorted(found, key=lambda one: -_numel(one[0].tensor))
        self._table, self._wish = table, wish
        self._refs = {id(slot.tensor): ref_in(slot.tensor) for slot in slots if not is_wrapper(slot.tensor)}
        self._all = self._by_storage(slots)
        self._theirs = self._by_storage(slot for slot, _ in found)
        self._taken: dict[Ref, torch.Tensor] = {}
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether others show its memory, or its values are written there: it can't become one that wraps others."""
        ref = self._refs.get(id(tensor))
        if ref is None or is_lazy(tensor):
            return False
        return len(self._all[ref.mark]) > 1 or self._is_written(tensor, ref)

    def take(self) -> None:
        """Reads all that can't be mapped, and changes no memory."""
        for slot, name in self._found:
            self._take(slot, name)

    def write(self) -> None:
        """Puts values into storages that are real by now."""
        for tensor, values in self._later:
            made = materialize([tensor])[0]
            with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
                wanted = values.to(device=made.device, dtype=made.dtype)
                if not torch.equal(made, wanted):  # else pages that are mapped would be copied for nothing
                    made.copy_(wanted)

    def _take(self, slot: Slot, name: str) -> None:
        tensor, wish = slot.tensor, self._wish
        dtype, spread = wish.dtype_of(tensor), wish.spread_of(slot)
        if spread is not None and is_wrapper(tensor):
            become(tensor, distribute(self._table.get(name), spread, dtype))
            return
        if is_wrapper(tensor):
            become(tensor, self._table.take(name).to(device=wish.device_of(tensor), dtype=dtype))
            return
        ref = self._refs[id(tensor)]
        if ref in self._taken:
            become(tensor, self._taken[ref])
        elif self._is_written(tensor, ref):
            self._later.append((tensor, self._table.take(name)))
        elif spread is not None:
            self._become(tensor, ref, distribute(self._table.get(name), spread, dtype))
        else:
            values = self._table.take(name).to(device=wish.device_of(tensor), dtype=dtype)
            if not is_lazy(tensor) and wish.keeps(tensor) and shows_all(tensor):
                if len(self._all[ref.mark]) > 1 and not values.is_contiguous():
                    self._later.append((tensor, values))
                    return
                if type(values) is torch.Tensor and values.is_contiguous():
                    keep_real(tensor, values, ref)
            self._become(tensor, ref, values)

    def _become(self, tensor: torch.Tensor, ref: Ref, values: torch.Tensor) -> None:
        self._taken[ref] = values
        lazy: Any = tensor
        become(tensor, values, original_class(lazy.cls_to_become) if is_lazy(tensor) else None)

    def _by_storage(self, slots: Iterable[Slot]) -> dict[Mark, set[Ref]]:
        """What they show of each storage."""
        found: dict[Mark, set[Ref]] = {}
        for slot in slots:
            ref = self._refs.get(id(slot.tensor))
            if ref is not None:
                found.setdefault(ref.mark, set()).add(ref)
        return found

    def _is_written(self, tensor: torch.Tensor, ref: Ref) -> bool:
        """Whether values are to be written into the tensor's storage, as others show it too."""
        if is_lazy(tensor):
            return False
        if not self._wish.keeps(tensor):
            return not self._all[ref.mark] <= self._theirs[ref.mark]  # what isn't found shows what is
        if is_real(tensor) or len(self._theirs[ref.mark]) > 1:
            return True
        return not shows_all(tensor) and (len(self._all[ref.mark]) > 1 or _shows_a_part(tensor))


def _numel(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # a lazy one refuses
        return tensor.numel()


def _shows_a_part(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.numel() * tensor.itemsize < tensor.untyped_storage().nbytes()
