"""Which storage a fake tensor shows: `set_` and `.data =` change that, and write none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memstore.fake.marks import is_meta, mark_of

_source_tensor: Any = torch.ops.aten.set_.source_Tensor


def lend(tensor: torch.Tensor) -> None:
    """Notes that a tensor is moved from its storage, or was moved to it; views keep sharing its count of writes."""
    mark = mark_of(tensor)
    if mark is not None:
        mark.is_lent = True


def set_storage(operator: Any, args: tuple[Any, ...], lift: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """An overload of `set_`, on a fake tensor. Of real memory (`torch.load` has some) it gets the values of now.

    Args:
        lift: makes a fake tensor for a real one.
    """
    fake, source = args[0], args[1] if len(args) > 1 else None
    lend(fake)
    if isinstance(source, torch.UntypedStorage) and source.device.type != "meta":
        real = torch.empty(0, dtype=fake.dtype, device=source.device)
        operator(real, *args[1:])
        source = real
    elif not isinstance(source, torch.Tensor):
        operator(*args)
        lend(fake)
        return fake
    if not is_meta(source):
        source = lift(source)
    _source_tensor(fake, source)
    lend(fake)
    return fake
