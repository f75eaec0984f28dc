"""One version of a nested value as named tensors: what inference engines take as weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch

from memstore._wording import an_instance
from memstore.engine import HeldVersion, deadline_after
from memstore.listing import check_store
from memstore.store.named_weights import named_weights
from memstore.store.store import Store
from memstore.store.values import Ref
from memstore.structure import modes
from memstore.view import StoredTensor, load_leaf


@modes.uncompiled
def iter_weights(
    store: Store,
    key: str,
    *,
    newer_than: int | None = None,
    prefix: str = "",
    names: Callable[[str], str | None] | None = None,
    timeout: float | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterates over the tensors of one version of a nested value, named by their paths joined with ".".

    Of what `save_model` has stored these are the module's tensors, by the same names as of its state_dict that was put.
    Those of an optimizer are left out, unless `prefix` is "optimizer.".

    Inference engines take their weights in this form (`model.load_weights(iter_weights(store, "policy"))`). The tensors
    are on the CPU, in shared memory, from whatever device they were put. Nothing is read before it is used; but of a
    value on another host all comes at once if most of it is wanted, once for all processes of this host. A loader
    that copies them one after the other into its parameters never has a second copy of all of them on its device. A
    tensor that ranks have put in parts is assembled in new memory when it is its turn, only one at a time.

    Args:
        store: the store.
        key: the key of the nested value.
        newer_than: wait first for a version that is newer than this one.
        prefix: removed from the front of the names, such as "model."; tensors without it are left out. Some tensor
            must have it.
        names: called with each name without the prefix; returns the new name, or None to leave the tensor out.
        timeout: seconds to wait; None: the store's.

    Returns:
        An iterator over pairs of a name and a tensor.

    Raises:
        KeyNotFoundError: no such key.
        UnsupportedValueError: its value is a number or text, or another one without any part that could be a tensor.
        StoreTimeoutError: there was no newer version in time.
        HomeUnavailableError: in a store on several hosts, the one that has the key, or its bytes, didn't answer.
        CorruptionError: a tensor is damaged, and the store verifies; the tensors before it were yielded.
        ValueError: no name starts with `prefix`, or two tensors would have the same name. No tensor was yielded by
            then.
        TypeError: `store` isn't a store, or `names` returned something else than a name.

    Example:
        >>> import memstore, tempfile, torch
        >>> with memstore.open(tempfile.mkdtemp()) as store:
        ...     version = store.put("run", {"model": torch.nn.Linear(2, 1).state_dict(), "step": torch.tensor(5)})
        ...     [name for name, weight in memstore.iter_weights(store, "run", prefix="model.")]
        ['weight', 'bias']
    """
    check_store(store, key)
    given: Any = prefix
    if not isinstance(given, str):
        raise TypeError(f"prefix is a str, and not {given!r:.100}")
    if names is not None and not callable(names):
        raise TypeError(f"names is a function of a name, and not {an_instance(names)}: {_of_mapping(names)}")
    if timeout is not None:
        deadline_after(timeout)  # which raises where it is none
    if newer_than is not None:
        store.wait(key, newer_than=newer_than, timeout=timeout)
    loaded: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # by lazy leaf: tied ones stay one tensor
    found = named_weights(key, store.view(key, device="cpu"), prefix, names)
    held = _brought(found.values())
    if held is not None:
        found = named_weights(key, Ref(held).view(device="cpu"), prefix, names)
    for name, leaf in found.items():
        tensor = loaded.get(id(leaf), leaf)
        if tensor is leaf and isinstance(leaf, StoredTensor):
            tensor = loaded[id(leaf)] = load_leaf(leaf)
        yield name, tensor


def _brought(chosen: Iterable[torch.Tensor]) -> HeldVersion | None:
    """Brings a value of other hosts at once, if most of it is wanted: a host keeps it, and passes it on.

    Returns as `Source.bring_whole`.
    """
    leaves = {id(leaf): leaf for leaf in chosen if isinstance(leaf, StoredTensor)}
    if not leaves:
        return None
    source = next(iter(leaves.values())).stored.source
    wanted = sum(leaf.nbytes for leaf in leaves.values())
    return source.bring_whole() if 2 * wanted >= source.memory.nbytes else None


def _of_mapping(names: object) -> str:
    return (
        "write names=that_dict.get, which leaves out the names that it doesn't have"
        if isinstance(names, Mapping)
        else "it returns the new name, or None"
    )
