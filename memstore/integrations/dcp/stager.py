"""Stager: copies a state dict into warm memory, so that an asynchronous save may go on while training does.

The memory is that of asynchronous snapshots: blocks that are filled at the speed of memory, pinned where a tensor lies
on a GPU, and used again when nothing refers to what was staged any more.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from memstore import _modes as modes
from memstore import structure
from memstore._wording import an
from memstore.engine import Path
from memstore.errors import UnsupportedValueError
from memstore.integrations.dcp.plans import settled
from memstore.snapshot.staging import stage
from memstore.structure import RefusedError, over, traits
from memstore.view import StoredTensor

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


@modes.uncompiled_methods
class Stager(AsyncStager):
    """Staging for `torch.distributed.checkpoint.async_save`: `async_stager=Stager()`.

    Use one stager for all saves. A staged copy takes memory until its save is over; later saves reuse this memory. If
    more than a quarter of the machine's memory would be staged at a time, a save waits for earlier ones.

    Example:
        >>> import torch
        >>> state = {"w": torch.ones(3)}
        >>> staged = Stager().stage(state)
        >>> state["w"].zero_()
        tensor([0., 0., 0.])
        >>> staged
        {'w': tensor([1., 1., 1.])}
    """

    _synchronize_after_execute = False  # as torch calls it: when `stage` returns, all is copied

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Copies to the CPU: tensors, DTensors and ShardedTensors in dicts, lists and tuples, and objects.

        Raises:
            UnsupportedValueError: a tensor has no plain memory (sparse, nested, or of an unknown subclass), or is
                expanded far beyond it, or a container contains itself.
            StoreTimeoutError: earlier saves still take too much memory.
            ResourceLimitError: the machine doesn't have enough memory.
        """
        try:
            structure.check_nesting(state_dict)
        except RefusedError as error:
            raise UnsupportedValueError(error.message()) from None
        with modes.put_aside(), torch.no_grad():
            walk = _StagingWalk()
            made = walk.visit(state_dict)
            held = stage(walk.tensors, names=walk.names)
            # An array of its own, by whose end it is known that nothing is needed any more.
            memory = held.block.bytes[:]
            weakref.finalize(memory, held.release).atexit = False
            return made([_over(memory, *one) for one in zip(walk.tensors, held.places, strict=True)])

    def close(self) -> None:
        """Does nothing: memory is freed when nothing refers to it."""


def _over(memory: Any, tensor: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
    """Returns the copy of a tensor, which keeps the memory alive.

    It has a storage of its own: a DTensor takes over the offset of its local tensor, and has no memory; torch can't
    pickle it then, unless the offset is 0.
    """
    start, nbytes = place
    if not nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    part = np.frombuffer(memoryview(memory)[start : start + nbytes], np.uint8)  # a slice would not refer to `memory`
    stride = traits.contiguous_stride(tensor.shape)
    return over(torch.from_numpy(part).untyped_storage(), tensor.dtype, 0, tensor.shape, stride)


_Maker = Callable[[list[torch.Tensor]], Any]


class _StagingWalk:
    """A walk that finds the tensors of a state dict. `visit` returns what makes it again, of copies of these."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []  # of these, as errors have them
        self._known: dict[int, tuple[int, torch.Tensor]] = {}  # by id, and the tensor, which keeps that its own

    def visit(self, value: Any, path: Path = ()) -> _Maker:
        """Returns what makes the value again.

        Args:
            path: the keys that lead to it, for errors.
        """
        if isinstance(value, torch.Tensor):
            return self._visit_tensor(value, path)
        if isinstance(value, Mapping):
            entries = cast("Mapping[Any, Any]", value).items()
            of_keys = {key: self.visit(entry, (*path, key)) for key, entry in entries}
            return lambda copies: {key: make(copies) for key, make in of_keys.items()}
        if type(value) in (list, tuple):
            makers = [self.visit(entry, (*path, i)) for i, entry in enumerate(cast("list[Any]", value))]
            kind = type(value)
            return lambda copies: kind(make(copies) for make in makers)
        kept = copy.deepcopy(value)
        return lambda _: kept

    def _visit_tensor(self, value: torch.Tensor, path: Path) -> _Maker:
        value = settled(value)
        if type(value) in _PLAIN:
            if structure.is_made_of_several(value):
                kept = value.detach().clone()
                return lambda _: kept
            self._check(value, path)
            number, _ = self._known.setdefault(id(value), (len(self.tensors), value))
            if number == len(self.tensors):
                self.tensors.append(value.detach())
                self.names.append(structure.render_path(path))
            return lambda copies: copies[number]
        if isinstance(value, StoredTensor):  # it never changes: what is written is read of it
            return lambda _: value
        if isinstance(value, LocalShardsWrapper):  # the local tensor of an embedding table's DTensor
            makers = [self.visit(shard, path) for shard in value.local_shards()]
            offsets = [tuple(offset) for offset in value.local_offsets()]
            return lambda copies: LocalShardsWrapper([make(copies) for make in makers], offsets)
        if hasattr(value, "local_shards"):
            return self._visit_sharded(value, path)
        if structure.is_wrapper(type(value)):
            return self._visit_wrapper(value, path)
        self._check(value, path)
        raise UnsupportedValueError(f"{structure.render_path(path)}: {an(type(value))} can't be staged")

    def _check(self, value: torch.Tensor, path: Path) -> None:
        reason = structure.why_no_memory(value)
        if reason is not None:
            raise UnsupportedValueError(f"{structure.render_path(path)}: {reason}")
        reason = traits.why_too_expanded(value)
        if reason is not None:
            raise UnsupportedValueError(f"{structure.render_path(path)}: {reason}: save what it is expanded from")

    def _visit_wrapper(self, value: torch.Tensor, path: Path) -> _Maker:
        names, context = cast("Any", value).__tensor_flatten__()
        parts = {name: getattr(value, name) for name in names}
        makers = {
            name: self.visit(part, (*path, name)) for name, part in parts.items() if isinstance(part, torch.Tensor)
        }
        kind, size, stride = cast("Any", type(value)), value.size(), value.stride()

        def make(copies: list[torch.Tensor]) -> Any:
            copied = {name: maker(copies) for name, maker in makers.items()}
            return kind.__tensor_unflatten__(parts | copied, context, size, stride)  # a mesh stays the same one

        return make

    def _visit_sharded(self, value: Any, path: Path) -> _Maker:
        makers = [self.visit(shard.tensor, path) for shard in value.local_shards()]

        def make(copies: list[torch.Tensor]) -> Any:
            made = copy.copy(value)
            shards = [copy.copy(shard) for shard in value.local_shards()]
            for shard, maker in zip(shards, makers, strict=True):
                shard.tensor = maker(copies)
            made._local_shards = shards
            return made

        return make
