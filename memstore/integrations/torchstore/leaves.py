"""State dicts that differ from what is stored: in dtypes, in what they have, or asked for by the name of one leaf."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from memstore.errors import KeyNotFoundError, StructureMismatchError

DELIMITER, MAPPING = "/", "MAPPING"  # as TorchStore names the entries of a state dict: KEY/NAME, and KEY/MAPPING

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # a target, and what is filled in its place


def fill(store: Any, key: str, target: Any, *, strict: bool = True) -> None:
    """Fills tensors in place, of one version; those of another floating dtype by a copy that is cast.

    Raises:
        StructureMismatchError: names or shapes differ. Nothing was written.
    """
    try:
        store.get(key, out=target, strict=strict)
    except StructureMismatchError:
        ref = store.ref(key)
        pairs: Pairs = []
        stand_in = _stand_in(target, ref.view(), pairs)
        if not pairs:
            raise
        ref.get(out=stand_in, strict=strict)
        with torch.no_grad():
            for tensor, filled in pairs:
                tensor.copy_(filled)
        _take_objects(target, stand_in)


def fill_common(store: Any, key: str, target: Any) -> Any:
    """Fills what `target` has in common with what is stored. Returns the stored structure, with its tensors in it."""
    ref = store.ref(key)
    fill(_At(ref), key, target, strict=False)
    return _merged(ref.get(device="cpu"), target)


class _At:
    """A store as it was when a reference was made: for `fill`."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def get(self, _key: str, **options: Any) -> Any:
        return self._ref.get(**options)

    def ref(self, _key: str) -> Any:
        return self._ref


def _stand_in(target: Any, stored: Any, pairs: Pairs) -> Any:
    """`target`, with new tensors of the stored dtype where it has another floating one."""
    if isinstance(target, torch.Tensor):
        if not isinstance(stored, torch.Tensor) or target.dtype == stored.dtype:
            return target
        if not (target.is_floating_point() and stored.is_floating_point()):
            return target
        filled = torch.empty_like(target, dtype=stored.dtype, requires_grad=False)
        pairs.append((target, filled))
        return filled
    if isinstance(target, dict) and isinstance(stored, dict):
        return type(target)(
            (name, _stand_in(value, stored[name], pairs) if name in stored else value) for name, value in target.items()
        )
    if type(target) in (list, tuple) and type(stored) is type(target) and len(stored) == len(target):
        return type(target)(_stand_in(*both, pairs) for both in zip(target, stored, strict=True))
    return target


def _take_objects(target: Any, stand_in: Any) -> None:
    """What is no tensor was filled into the stand-in's dicts and lists, which are new ones."""
    if isinstance(target, dict | list) and isinstance(stand_in, dict | list):
        names: Any = target if isinstance(target, dict) else range(len(target))
        for name in list(names):
            if isinstance(target[name], dict | list):
                _take_objects(target[name], stand_in[name])
            elif not isinstance(target[name], torch.Tensor | tuple):
                target[name] = stand_in[name]


def _merged(stored: Any, target: Any) -> Any:
    if isinstance(stored, torch.Tensor):
        return target if isinstance(target, torch.Tensor) else stored
    if isinstance(stored, dict) and isinstance(target, dict):
        for name in stored:
            if name in target:
                stored[name] = _merged(stored[name], target[name])
        return stored
    if type(stored) in (list, tuple) and type(target) is type(stored) and len(stored) == len(target):
        return type(stored)(_merged(*both) for both in zip(stored, target, strict=True))
    return stored


# --- one leaf ---------------------------------------------------------------------------------------------------------


def leaf_of(store: Any, key: str) -> Any:
    """The lazy leaf, or the object, of a state dict that was put, by TorchStore's name of it: KEY/NAME.NAME.

    Raises:
        KeyNotFoundError: there is none.
    """
    at = key.rfind(DELIMITER)
    while at > 0:
        whole, name = key[:at], key[at + 1 :]
        if whole in store:
            found = _find(store.view(whole), name)
            if found is not None:
                return found[0]
        at = key.rfind(DELIMITER, 0, at)
    raise KeyNotFoundError(f"no such key: {key!r}", key=key)


def has_leaf(store: Any, key: str) -> bool:
    """Whether `leaf_of` finds it; or it is the name of a state dict's mapping, which TorchStore writes last."""
    whole, _, name = key.rpartition(DELIMITER)
    if name == MAPPING and whole in store:
        return True
    try:
        leaf_of(store, key)
    except KeyNotFoundError:
        return False
    return True


def _find(value: Any, name: str) -> tuple[Any] | None:
    """What lies under these names, which are joined with dots, and may have some themselves."""
    if not isinstance(value, dict | list | tuple):
        return None
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for own, inner in items:
        text = str(own)
        if text == name:
            return (inner,)
        if name.startswith(f"{text}.") and (found := _find(inner, name[len(text) + 1 :])) is not None:
            return found
    return None
