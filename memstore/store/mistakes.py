"""Arguments that nearly always mean something else than they say, and what to write instead."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from memstore.errors import UnsupportedValueError
from memstore.listing import UnknownKindError, outline
from memstore.undecodable import UNDECODABLE
from memstore.wording import an_instance

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|xla|mtia|meta)(:[0-9]+)?")


def check_default(key: str, default: Any, description: bytes | None = None, *, depth: int = 3) -> None:
    """Warns of a get whose default is a device or dtype, unless the key says that such a thing is what it has.

    Args:
        description: of the value that is there; then it warns also of a default that is the name of a part of it.
        depth: calls up to that of the get, whose line the warning names.
    """
    is_device = isinstance(default, torch.device) or (type(default) is str and _DEVICE.fullmatch(default))
    name = "device" if is_device else "dtype" if isinstance(default, torch.dtype) else None
    shown = repr(str(default)) if is_device else repr(default)
    if name is not None and name not in key:
        warnings.warn(
            f"get({key!r}, {shown}): the second argument is the default, which is returned as it is if there is no "
            f"such key; for values of this {name} write {name}={shown}",
            UserWarning,
            stacklevel=depth,
        )
    elif description is not None and type(default) is str and default in _first_names(description):
        warnings.warn(
            f"get({key!r}, {default!r}): the second argument is the default, which is returned as it is if there is no "
            f"such key; for that part of the value write get({key!r})[{default!r}]",
            UserWarning,
            stacklevel=depth,
        )


def _first_names(description: bytes) -> set[str | int]:
    """The names of a value's parts, as far as they can be told without its containers."""
    with contextlib.suppress(UnknownKindError, *UNDECODABLE):
        return {leaf.name[0] for leaf in outline(description)[1] if leaf.name}
    return set()


def as_items(items: Any, call: str = "put_many") -> Mapping[str, Any]:
    """What `put_many`, or another such call, was given, as a mapping. Raises TypeError."""
    if isinstance(items, Mapping):
        return items  # pyright: ignore[reportUnknownVariableType]
    if not callable(getattr(items, "items", None)):
        raise TypeError(
            f"{call} takes a dict of values by their keys, and this is {an_instance(items)}: "
            f"{call}({{'key': value}}), or put(key, value) for one"
        )
    return dict(items.items())  # a TensorDict, or another store: to iterate over them means something else


def refuse_one_of_many(key: str, error: UnsupportedValueError) -> NoReturn:
    """Says which of the values it was."""
    raise UnsupportedValueError(f"{key!r}: {error.message}; nothing was put", key=key) from None
