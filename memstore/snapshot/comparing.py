"""Two snapshots, compared leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memstore.figures import compare
from memstore.snapshot.format import StoredTensor
from memstore.snapshot.read import PICKLED, Leaf, Stored, leaves_of, read_tensor
from memstore.snapshot.snapshot import Snapshot, stored_of


@dataclass(frozen=True, slots=True)
class Difference:
    """A path, and how what two snapshots have there differs."""

    path: str
    what: str


def differences(first: Snapshot, second: Snapshot, done: Callable[[int, int], None] | None = None) -> list[Difference]:
    """What differs, by rank and path. Tensors are equal if their bits are; two are in memory at a time.

    Args:
        done: called with how many leaves have been compared, and how many there are.
    """
    left, right = stored_of(first), stored_of(second)
    ours, theirs = _leaves(left), _leaves(right)
    paths = list(dict.fromkeys([*ours, *theirs]))
    known: dict[tuple[int, int], str] = {}
    found: list[Difference] = []
    for number, path in enumerate(paths, 1):
        if path not in theirs or path not in ours:
            found.append(Difference(path, f"only in {(first if path in ours else second).path}"))
        else:
            what = _compare(left, right, path, ours[path], theirs[path], known)
            if what:
                found.append(Difference(path, what))
        if done is not None:
            done(number, len(paths))
    return found


def _leaves(stored: Stored) -> dict[str, Leaf]:
    found: dict[str, Leaf] = {}
    for rank in range(stored.manifest.world_size):
        for key in stored.keys(rank):
            value = stored.value(rank, key)
            for path, leaf in () if value is None else leaves_of(stored, value, allow_pickle=False):
                found[f"{rank}/{path}"] = leaf
    return found


def _compare(
    left: Stored, right: Stored, path: str, ours: Leaf, theirs: Leaf, known: dict[tuple[int, int], str]
) -> str:
    """ "" if they are equal."""
    if ours.tensor is None or theirs.tensor is None:
        if ours.tensor is not theirs.tensor:
            return "a tensor in one, an object in the other"
        if ours.object is PICKLED and theirs.object is PICKLED:
            return "" if ours.stored == theirs.stored else "both are stored with pickle, as other bytes"
        return "" if _same(ours.object, theirs.object) else f"{ours.object!r:.60} and {theirs.object!r:.60}"
    pair = (id(ours.tensor), id(theirs.tensor))
    if pair not in known:
        known[pair] = _compare_tensors(left, right, path, ours.tensor, theirs.tensor)
    return known[pair]


def _same(ours: Any, theirs: Any) -> bool:
    try:
        return type(ours) is type(theirs) and bool(ours == theirs or (ours != ours and theirs != theirs))
    except (TypeError, ValueError, RuntimeError):  # of arrays, and of classes of others
        return repr(ours) == repr(theirs)


def _compare_tensors(left: Stored, right: Stored, path: str, ours: StoredTensor, theirs: StoredTensor) -> str:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype}{list(ours.shape)} and {theirs.dtype}{list(theirs.shape)}"
    one: torch.Tensor = read_tensor(left, path, ours, None, None)
    other: torch.Tensor = read_tensor(right, path, theirs, None, None)
    unequal = compare(one, other)
    return "" if unequal is None else str(unequal)
