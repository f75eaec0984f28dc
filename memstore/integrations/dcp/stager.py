"""Stager: copies a state dict into warm memory, so that an asynchronous save may go on while training does.

The memory is that of asynchronous snapshots: blocks that are filled at the speed of memory, pinned where a tensor lies
on a GPU, and used again when nothing refers to what was staged any more.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from memstore import modes
from memstore.errors import UnsupportedValueError
from memstore.snapshot.staging import stage
from memstore.structure import traits

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Stager(AsyncStager):
    """Staging for `torch.distributed.checkpoint.async_save`: `async_stager=Stager()`.

    One may be used for all saves. What is staged takes memory until the save that reads it is over; later saves then
    use this memory again. At most a quarter of the machine's memory is staged at a time, before a save has to wait.

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
        """A copy on the CPU: of tensors, DTensors and ShardedTensors in dicts, lists and tuples, and of all else.

        Raises:
            UnsupportedValueError: a tensor that has no plain memory (sparse, nested, or of an unknown subclass).
            StoreTimeoutError: earlier saves still take too much memory.
            ResourceLimitError: the machine has not so much memory.
        """
        with modes.put_aside(), torch.no_grad():
            walk = _Walk()
            made = walk.visit(state_dict)
            held = stage(walk.tensors)
            memory = held.block.bytes[
                :
            ]  # an array of its own, by whose end it is known that nothing is needed any more
            storage = torch.from_numpy(memory).untyped_storage()
            weakref.finalize(memory, held.release).atexit = False
            copies = [
                traits.over(
                    storage,
                    tensor.dtype,
                    offset // tensor.itemsize,
                    tensor.shape,
                    traits.contiguous_stride(tensor.shape),
                )
                for tensor, (offset, _) in zip(walk.tensors, held.places, strict=True)
            ]
            return made(copies)

    def close(self) -> None:
        """Nothing is left to do: memory is given back when nothing refers to it."""


Make = Callable[[list[torch.Tensor]], Any]


class _Walk:
    """Finds the tensors of a state dict. `visit` returns what makes it again, of copies of these."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._known: dict[int, int] = {}

    def visit(self, value: Any) -> Make:
        if isinstance(value, torch.Tensor):
            return self._visit_tensor(value)
        if isinstance(value, Mapping):
            return self._visit_mapping(cast("Mapping[Any, Any]", value))
        if type(value) in (list, tuple):
            makers = [self.visit(entry) for entry in cast("list[Any]", value)]
            kind = type(value)
            return lambda copies: kind(make(copies) for make in makers)
        kept = copy.deepcopy(value)
        return lambda _: kept

    def _visit_mapping(self, value: Mapping[Any, Any]) -> Make:
        makers = {key: self.visit(entry) for key, entry in value.items()}
        return lambda copies: {key: make(copies) for key, make in makers.items()}

    def _visit_tensor(self, value: torch.Tensor) -> Make:
        if type(value) in _PLAIN:
            if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
                raise UnsupportedValueError(f"a tensor of {value.layout} on {value.device} can't be staged")
            number = self._known.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value.detach())
            return lambda copies: copies[number]
        if hasattr(value, "local_shards"):
            return self._visit_sharded(value)
        if hasattr(value, "__tensor_flatten__"):
            names, context = cast("Any", value).__tensor_flatten__()
            makers = {name: self.visit(getattr(value, name)) for name in names}
            kind, size, stride = cast("Any", type(value)), value.size(), value.stride()
            return lambda copies: kind.__tensor_unflatten__(
                {name: make(copies) for name, make in makers.items()}, context, size, stride
            )
        raise UnsupportedValueError(f"a {type(value).__qualname__} can't be staged")

    def _visit_sharded(self, value: Any) -> Make:
        makers = [self.visit(shard.tensor) for shard in value.local_shards()]

        def make(copies: list[torch.Tensor]) -> Any:
            made = copy.copy(value)
            shards = [copy.copy(shard) for shard in value.local_shards()]
            for shard, maker in zip(shards, makers, strict=True):
                shard.tensor = maker(copies)
            made._local_shards = shards
            return made

        return make
