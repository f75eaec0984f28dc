"""The fake tensors of a session that live at its end, when they become of a class that says what they are."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any, TypeVar

import torch

from memstore.fake.marks import is_meta, mark_of, storage_of, tensors_in

T = TypeVar("T")

_count_users: Any = torch._C._storage_Use_Count


class Living:
    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._storages: list[weakref.ref[Any]] = []

    def note(self, tensor: torch.Tensor) -> None:
        self._seen[id(tensor)] = weakref.ref(tensor)

    def noted(self, result: T) -> T:
        """A function's result: a Parameter's copy is made by its class, which the modes don't see."""
        for one in tensors_in((result,)):
            self.note(one)
        return result

    def note_storage(self, tensor: torch.Tensor) -> None:
        """The session has made its storage."""
        self._storages.append(weakref.ref(storage_of(tensor)))

    def seen(self) -> list[torch.Tensor]:
        """Those that were noted."""
        found = [ref() for ref in self._seen.values()]
        return [one for one in found if one is not None and mark_of(one) is not None]

    def all(self) -> list[torch.Tensor]:
        """Those too that no mode has seen: `nn.Parameter(tensor)` puts all of them aside.

        If storages have more tensors than were noted, all objects of the process are looked through.
        """
        found = self.seen()
        counts = Counter(int(storage_of(one)._cdata) for one in found)
        storages = [one for one in (ref() for ref in self._storages) if one is not None]
        ours = 1  # the storage's object is a user too
        unseen = {one._cdata for one in storages if _count_users(one._cdata) > counts[one._cdata] + ours}
        if unseen:
            known = set(map(id, found))
            found.extend(
                one
                for one in gc.get_objects()
                if issubclass(type(one), torch.Tensor)  # isinstance asks the object, which may be anybody's
                and id(one) not in known
                and is_meta(one)
                and mark_of(one) is not None
                and storage_of(one)._cdata in unseen
            )
        return found
