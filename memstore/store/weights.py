"""One version of a nested value as named tensors: what inference engines take as weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memstore import structure
from memstore.store.store import Store


def iter_weights(
    store: Store, key: str, *, newer_than: int | None = None, timeout: float | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterates over the tensors of one version of a nested value, named by their paths joined with ".".

    What inference engines take as weights (`model.load_weights(iter_weights(store, "policy"))`).

    Args:
        store, key: where to read.
        newer_than: wait first for a version that is newer than this one.
        timeout: seconds to wait; None: the store's.
    """
    source: Any = store
    if not isinstance(source, Store):
        raise TypeError(f"iter_weights reads a Store, and not a {type(source).__qualname__}")
    if newer_than is not None:
        store.wait(key, newer_than=newer_than, timeout=timeout)
    value = store.get(key, timeout=timeout)
    for path, tensor in structure.iter_tensors(value):
        yield ".".join(map(str, path)), tensor
