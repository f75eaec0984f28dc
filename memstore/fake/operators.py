"""What an operator does, by its schema."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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


class Kind(NamedTuple):
    """
    Attributes:
        makes: it makes a tensor on a device that it is told.
        random: it draws random numbers.
        by_values: what it returns depends on values.
        sets: it gives a tensor another storage.
        written: the places of arguments that it writes, and the names of those that come by name.
    """

    makes: bool
    random: bool
    by_values: bool
    sets: bool
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
        _RANDOM in tags or any(one.name == "generator" for one in arguments),
        any(tag in tags for tag in _BY_VALUES),
        operator in _SETS,
        written,
    )


def written_in(kind: Kind, args: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """The arguments, or lists of them, that are written."""
    found: list[Any] = []
    for place in kind.written:
        if isinstance(place, str):
            found.append(options.get(place))
        elif place < len(args):
            found.append(args[place])
    return found
