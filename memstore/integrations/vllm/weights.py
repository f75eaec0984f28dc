"""Weights for inference engines, as a store has them: whole versions, and what has changed since. Without vLLM.

Under `key` lies the whole: a dict of tensors by their names, or what `save_model` has stored. Under `key/changed` lies
what a trainer has sent since which trains a part only: {"base": version of the whole, "weights": {name: tensor}}. It
has all names that were sent since that version, so the newest of the two together are the newest weights: whoever comes
late needs no others. Once the whole is newer than the base, what is under `key/changed` counts for nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from memstore._compat import TorchDispatchMode
from memstore.errors import ContentionError, CrossHostError, KeyNotFoundError, ReadOnlyError, VersionGoneError
from memstore.store.named_weights import named_weights
from memstore.store.opening import open as open_store
from memstore.store.store import Store

CHANGED = "/changed"
BASE, WEIGHTS = "base", "weights"
_LOOKS = 100  # at the two keys, which a trainer changes one after the other


class Round(NamedTuple):
    """The weights that one `send_weights` has made: a version of the whole, and of what has changed since; 0: none."""

    version: int
    changed: int = 0

    def __str__(self) -> str:
        return f"{self.version}.{self.changed}" if self.changed else str(self.version)


class TakenWeights(NamedTuple):
    """The tensors of a round, lazily, by the engine's names; and which of them have changed since the whole."""

    tensors: Mapping[str, torch.Tensor]
    changed: frozenset[str]


@dataclass(frozen=True, slots=True)
class WeightsPlace:
    """The key of a store under which weights lie, and how the engine calls them.

    Attributes:
        root: the folder of the store, on this host.
        key: the key.
        cluster: the address of the store's cluster, where hosts share it; None: the folder is enough.
        prefix: removed from the front of the names; tensors without it are left out.
        names: other names, by the stored ones without the prefix.
    """

    root: str
    key: str = "weights"
    cluster: str | None = None
    prefix: str = ""
    names: Mapping[str, str] | None = None

    def open(self, mode: Any) -> Store:
        return open_store(self.root, mode, cluster=self.cluster)

    def rename(self, name: str) -> str:
        return name if self.names is None else self.names.get(name, name)


def newest_round(store: Store, key: str) -> Round:
    """Returns the newest weights; Round(0): there are none yet. Raises ContentionError."""
    for _ in range(_LOOKS):
        version, changed = _version(store, key), _version(store, key + CHANGED)
        if not version or not changed:
            return Round(version)
        try:
            base = int(store.view(key + CHANGED, version=changed)[BASE])
        except VersionGoneError:
            continue
        if base <= version:
            return Round(version, changed if base == version else 0)
    raise too_fast(key)


def _version(store: Store, key: str) -> int:
    try:
        return store.version(key)
    except KeyNotFoundError:
        return 0


def take_round(store: Store, place: WeightsPlace, wanted: Round) -> TakenWeights:
    """Maps the tensors of a round. Nothing is read.

    Raises:
        VersionGoneError: the store has a newer version, and doesn't keep this one.
        ValueError: what has changed belongs to another version of the whole.
    """
    key = place.key
    tensors = named_weights(key, store.view(key, device="cpu", version=wanted.version), place.prefix, place.rename)
    if not wanted.changed:
        return TakenWeights(tensors, frozenset())
    changes = store.view(key + CHANGED, device="cpu", version=wanted.changed)
    if int(changes[BASE]) != wanted.version:
        raise ValueError(
            f"version {wanted.changed} of {key + CHANGED!r} has what has changed since version {int(changes[BASE])} of "
            f"{key!r}, and not since version {wanted.version}"
        )
    changed = named_weights(key + CHANGED, changes[WEIGHTS], place.prefix, place.rename)
    return TakenWeights({**tensors, **changed}, frozenset(changed))


@contextmanager
def keeping(store: Store, key: str, wanted: Round | None = None) -> Generator[Round]:
    """Keeps a round readable for others by its numbers, whatever is put meanwhile.

    A store on several hosts, or one that is opened for reading, can't pin versions: there the round stays until the
    next one is put.

    Args:
        wanted: the round; None: the newest, which may be Round(0).

    Raises:
        VersionGoneError: the store has a newer version, and doesn't keep this one.
    """
    for _ in range(_LOOKS):
        found = newest_round(store, key) if wanted is None else wanted
        with ExitStack() as pins:
            try:
                with suppress(CrossHostError, ReadOnlyError):
                    if found.version:
                        pins.enter_context(store.pin(key, version=found.version))
                    if found.changed:
                        pins.enter_context(store.pin(key + CHANGED, version=found.changed))
            except (VersionGoneError, KeyNotFoundError):
                if wanted is not None:
                    raise
                continue  # it was replaced in between
            yield found
            return
    raise too_fast(key)


def too_fast(key: str) -> ContentionError:
    """Makes the error of a look at a key that others change all the time."""
    return ContentionError(f"{key!r}: others put it faster than this call could follow", key=key)


# --- Copies to a device ----------------------------------------------------------------------------------------------


_COPY: Any = torch.ops.aten.copy_.default
_STAGED = 32 << 20  # bytes of each of two buffers


class Staging(TorchDispatchMode):
    """Copies from the host to a device in pieces, through two pinned buffers of bounded size, while it is active.

    The kernel's copy from pageable memory goes through buffers of the driver's, one piece after the other. Here one
    piece is read from the store while the one before is under way. Not run on hardware yet.

    Args:
        device: the device.
        nbytes: of each buffer.
    """

    def __init__(self, device: torch.device, nbytes: int = _STAGED) -> None:
        super().__init__()
        self._device, self._nbytes = device, nbytes
        is_apart = device.type != "cpu"
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_apart) for _ in range(2)]
        self._events: list[Any] = [torch.Event(device) if is_apart else None for _ in range(2)]
        self._turn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY and args[0].device.type == self._device.type and args[1].device.type == "cpu":
            self._copy(args[0], args[1].expand(args[0].shape) if args[1].shape != args[0].shape else args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        size = source.numel() * source.element_size()
        if size > self._nbytes:  # by halves of the largest dimension
            dim = max(range(source.ndim), key=lambda one: source.shape[one])
            half = source.shape[dim] // 2
            for start, length in ((0, half), (half, source.shape[dim] - half)):
                self._copy(target.narrow(dim, start, length), source.narrow(dim, start, length))
            return
        if not size:
            return
        self._turn ^= 1
        buffer, event = self._buffers[self._turn], self._events[self._turn]
        if event is not None:
            event.synchronize()  # of the copy that read this buffer before
        piece = buffer[:size].view(source.dtype).view(source.shape)
        piece.copy_(source)
        target.copy_(piece, non_blocking=event is not None)
        if event is not None:
            event.record()
