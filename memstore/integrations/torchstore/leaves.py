"""State dicts that have other names than what is stored; and leaves, asked for by TorchStore's names of them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

import memstore
from memstore import structure
from memstore.errors import KeyNotFoundError
from memstore.store.gets import ref_lazily
from memstore.view import StoredTensor, load_leaf

DELIMITER, MAPPING = "/", "MAPPING"  # as TorchStore names the entries of a state dict: KEY/NAME, and KEY/MAPPING


def fill_common(store: memstore.Store, key: str, target: Any) -> Any:
    """Fills what `target` has in common with what is stored. Returns the stored structure, with its tensors in it.

    All is of one version. Of the stored tensors only those are read that are filled in, or that the target lacks.
    """
    ref = ref_lazily(store, key)
    ref.get(out=target, strict=False, cast=True)
    merged = _merged(ref.view(device="cpu"), target, {})
    if any(isinstance(leaf, StoredTensor) for _, leaf in structure.iter_tensors(merged)):
        return _merged(ref.get(device="cpu"), target, {})  # in a container of another kind, as a TensorDict
    return merged


def _merged(stored: Any, target: Any, loaded: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Args: loaded: each leaf with its result, by the leaf's id; so tied ones stay one tensor."""
    if isinstance(stored, torch.Tensor):
        if isinstance(target, torch.Tensor | memstore.TensorShard):
            return target
        if id(stored) not in loaded:
            found = load_leaf(stored) if isinstance(stored, StoredTensor) else stored
            loaded[id(stored)] = stored, plain_tensor(found)
        return loaded[id(stored)][1]
    if isinstance(stored, dict):
        others = target if isinstance(target, dict) else {}
        for name in stored:
            stored[name] = _merged(stored[name], others.get(name), loaded)
        return stored
    if type(stored) in (list, tuple):
        alike = type(target) is type(stored) and len(stored) == len(target)
        others = target if alike else [None] * len(stored)
        return type(stored)(_merged(*both, loaded) for both in zip(stored, others, strict=True))
    return stored


# --- without gradients ------------------------------------------------------------------------------------------------


def plain_tensor(value: Any) -> Any:
    """A tensor of a Parameter or Buffer, or of one that requires gradients. Other values are returned as they are."""
    marked = isinstance(value, torch.nn.Parameter | torch.nn.Buffer)
    return value.detach() if marked or (isinstance(value, torch.Tensor) and value.requires_grad) else value


def plain_tensors(state_dict: Any) -> Any:
    """The state dict that a get made, with plain tensors in its dicts, lists and tuples. Tied ones stay one tensor."""
    return _merged(state_dict, None, {})


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
