"""What an operator does, by its schema."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_tag: Any = torch.Tag
_RANDOM = _tag.nondeterministic_seeded
_BY_VALUES = (_tag.data_dependent_output, _tag.dynamic_output_shape)
_aten: Any = torch.ops.aten
# They say of which storage a tensor is, and change none.
_SETS = {
    _aten.set_.source_Tensor,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten.set_.default,
}

_BATCH_NORM = _aten.native_batch_norm.default
_LIKE = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
# What remains of the functions that torch.autocast has on its lists of lower precision.
_LOWERED = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution"}
_LOWER = {torch.bfloat16, torch.float16}
_has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key


class Kind(NamedTuple):
    """
    Attributes:
        makes: it makes a tensor on a device that it is told.
        takes_shape: of a tensor that it is given, it takes no values.
        random: it draws random numbers.
        by_values: what it returns depends on values.
        sets: it gives a tensor another storage.
        collective: other processes take part in it.
        averages: in training it writes a running mean and variance, of which its schema says nothing.
        quantizes: it returns a quantized tensor, of which its meta kernel says nothing.
        lowered: torch.autocast runs it in lower precision.
        autocast: torch.autocast knows it: of tensors of lower precision it may make others.
        written: the places of arguments that it writes, and the names of those that come by name.
    """

    makes: bool
    takes_shape: bool
    random: bool
    by_values: bool
    sets: bool
    collective: bool
    averages: bool
    quantizes: bool
    lowered: bool
    autocast: bool
    written: tuple[int | str, ...]


@functools.cache
def kind_of(operator: Any) -> Kind:
    arguments = operator._schema.arguments
    written = tuple(
        one.name if one.kwarg_only else place
        for place, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
    tags = operator.tags
    return Kind(
        any(one.name == "device" for one in arguments),
        operator.namespace == "aten" and operator._schema.name.endswith(_LIKE),
        _RANDOM in tags or any(one.name == "generator" for one in arguments),
        any(tag in tags for tag in _BY_VALUES),
        operator in _SETS,
        operator.namespace in _COLLECTIVES,
        operator is _BATCH_NORM,
        operator._schema.name.startswith("aten::quantize_per"),
        operator._schema.name.removeprefix("aten::") in _LOWERED,
        any(_has_kernel(operator.name(), f"Autocast{device}") for device in ("CPU", "CUDA")),
        written,
    )


def is_autocast(kind: Kind, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether torch.autocast would run an operator on these in another dtype."""
    return kind.lowered or kind.autocast and any(one.dtype in _LOWER for one in tensors)


def written_in(kind: Kind, args: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """The arguments, or lists of them, that are written."""
    found: list[Any] = []
    for place in kind.written:
        if isinstance(place, str):
            found.append(options.get(place))
        elif place < len(args):
            found.append(args[place])
    if kind.averages and args[5]:
        found.extend(args[3:5])
    return found
