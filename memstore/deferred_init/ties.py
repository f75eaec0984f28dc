"""Tensors that are one in a module, or show the same memory, and have different values in a source.

The module can't have both, so nothing is taken: which of them is meant, nobody knows.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from memstore.deferred_init.shards import spread_as
from memstore.deferred_init.slots import Slot
from memstore.deferred_init.sources import Table
from memstore.deferred_init.tensors import ref_in
from memstore.deferred_init.wishes import Wish
from memstore.deferred_init.wrappers import is_wrapper
from memstore.fake import Ref, is_fake
from memstore.structure import is_wrapper as is_made_of_others
from memstore.structure import modes, over, traits, why_no_memory

_ALIGNMENT = 16  # bytes of the widest element
_NAMED = 4  # names in one message


class _Entry(NamedTuple):
    """A name that a source has something for, and the module's tensor of that name.

    Attributes:
        ref: what it shows of its storage; None where that isn't known.
    """

    name: str
    tensor: torch.Tensor
    ref: Ref | None

    @property
    def start(self) -> int:
        return 0 if self.ref is None else self.ref.offset * self.ref.dtype.itemsize

    @property
    def stop(self) -> int:
        if self.ref is None:
            return 1
        return self.start + traits.reach(self.ref.size, self.ref.stride) * self.ref.dtype.itemsize


def ties_apart(slots: Sequence[Slot], table: Table, wish: Wish) -> list[str]:
    """Returns a line for an error for each group of names whose values in the source can't stand together.

    Only what has several names in the source is read, unless these lie at one place there.
    """
    groups: dict[Any, list[_Entry]] = {}
    for slot in {id(slot.tensor): slot for slot in slots}.values():
        tensor = slot.tensor
        if is_wrapper(tensor) and spread_as(tensor) is None:
            continue  # its parts are replayed
        ref = None if is_wrapper(tensor) or is_lazy(tensor) else ref_in(tensor)
        for name in wish.names[id(tensor)]:
            if _has_values(table.find(name)):
                groups.setdefault(id(tensor) if ref is None else ref.mark, []).append(_Entry(name, tensor, ref))
    problems: list[str] = []
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        for group in groups.values():
            for cluster in _clusters(group):
                if not _can_be_one(cluster, table, wish):
                    names = [entry.name for entry in cluster]
                    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                    problems.append(
                        f"{', '.join(names[:_NAMED])}{more}: they share memory in the module (tied), and the source "
                        "has different values for them"
                    )
    return problems


def _has_values(stored: Any) -> bool:
    if stored is None or is_fake(stored) or isinstance(stored, FakeTensor) or is_lazy(stored) or stored.is_meta:
        return False
    return type(stored) not in (torch.Tensor, torch.nn.Parameter) or why_no_memory(stored) is None


def _clusters(group: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Groups the entries of a storage that overlap others, each with all that it is joined to by such."""
    if len(group) < 2:
        return
    cluster: list[_Entry] = []
    end = -1
    for entry in sorted(group, key=lambda entry: entry.start):
        if entry.start >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(entry)
        end = max(end, entry.stop)
    if len(cluster) > 1:
        yield cluster


def _can_be_one(cluster: Sequence[_Entry], table: Table, wish: Wish) -> bool:
    """Whether the source's values for all of them can be in the module at once."""
    first = cluster[0]
    others = [one for one in cluster if not is_lazy(one.tensor) and _shape(table.get(one.name)) != _shape(one.tensor)]
    if others:  # of the first name of a tensor this is told by itself
        return all(one.name == _first_name(one, table, wish) for one in others)
    if all(entry.ref == first.ref for entry in cluster):
        dtype = wish.dtype_of(first.tensor)
        values = [_local(table.take(entry.name)) for entry in cluster]
        return all(_is_alike(values[0], other, dtype) for other in values[1:])
    start = first.start - first.start % _ALIGNMENT
    storage = torch.empty(max(entry.stop for entry in cluster) - start, dtype=torch.uint8, device="cpu")
    doubles = [_double(entry, storage.untyped_storage(), start) for entry in cluster]
    values = [_local(table.take(entry.name)).to(device="cpu", dtype=entry.tensor.dtype) for entry in cluster]
    for double, value in zip(doubles, values, strict=True):
        for dim, step in enumerate(double.stride()):
            if not step:  # expanded
                double, value = double.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        if not traits.overlaps_itself(double.shape, double.stride()):
            double.copy_(value)
    return all(_is_alike(double, value, value.dtype) for double, value in zip(doubles, values, strict=True))


def _first_name(entry: _Entry, table: Table, wish: Wish) -> str:
    return next(name for name in wish.names[id(entry.tensor)] if table.find(name) is not None)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _double(entry: _Entry, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
    """Makes the tensor that the entry's would be over a storage which has the bytes from `start` on."""
    ref = entry.ref
    assert ref is not None, "it has neighbours in its storage"
    double = over(storage, ref.dtype, (entry.start - start) // ref.dtype.itemsize, ref.size, ref.stride)
    double = double.conj() if ref.conj else double
    return torch._neg_view(double) if ref.neg else double


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _is_alike(one: Any, other: Any, dtype: torch.dtype) -> bool:
    """Whether two tensors become the same bits when they are converted."""
    if one is other or _place_of(one) == _place_of(other) is not None:
        return True
    if one.shape != other.shape:
        return False
    if is_made_of_others(type(one)) or is_made_of_others(type(other)):
        names = one.__tensor_flatten__()[0] if type(one) is type(other) else ()
        return bool(names) and all(
            _is_alike(getattr(one, name), getattr(other, name), getattr(one, name).dtype) for name in names
        )
    if one.layout is not torch.strided or one.is_quantized or one.is_nested:
        return type(one) is type(other) and bool(torch.equal(one, other))
    return torch.equal(_bits(one, dtype), _bits(other, dtype).to(one.device))


def _place_of(value: Any) -> tuple[Any, ...] | None:
    """Where a plain tensor lies, and as what; None of any other."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or not value.numel():
        return None
    bits = value.is_conj(), value.is_neg()
    return value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), bits


def _bits(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    plain = value.detach().to(dtype).resolve_conj().resolve_neg()
    return traits.copyable(plain).contiguous().reshape(-1).view(torch.uint8)
