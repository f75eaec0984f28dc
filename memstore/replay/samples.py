"""What `sample` gives: a TensorDict of new memory, or of the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection

from memstore._compat import new_tensordict
from memstore._wording import an_instance
from memstore.datasets import NoLeafError
from memstore.errors import StructureMismatchError
from memstore.replay.picking import PickedSlots
from memstore.replay.ring import Ring, positions_of
from memstore.replay.sampling import Targets
from memstore.rows import is_kept
from memstore.structure import DTYPES, copy_into, takes_bytes, to_device, traits, why_not_filled

INDEX, WEIGHT = "index", "weight"
ONLY = "data"  # the name of the leaf of a spec that is one tensor

Name = tuple[str, ...]


class Samples:
    """The form of a buffer's samples.

    Attributes:
        names: of the leaves, in their order.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.names: list[Name] = [tuple(map(str, leaf.name)) or (ONLY,) for leaf in ring.plan.leaves]
        self._dtypes = [DTYPES[leaf.dtype] for leaf in ring.plan.leaves]
        self._apart: list[Any] | None = None  # where the leaves of the last `out` lay, which share no memory

    def number_of_end(self, key: Any) -> int:
        """Returns the number of the leaf that says where episodes end. Raises KeyError, TypeError."""
        name = (key,) if isinstance(key, str) else key
        if name not in self.names:
            names = ", ".join(map(_shown, self.names))
            text = f"end_key: {self._ring.key!r} has no leaf {key!r}, but {names}; None: slices run over all"
            raise NoLeafError(text)
        number = self.names.index(name)
        if self._dtypes[number].is_complex or not self._ring.tensors[number].numel():
            shape = list(self._ring.plan.leaves[number].shape[1:])
            raise TypeError(f"end_key: {key!r} is of {self._dtypes[number]} {shape}, which tells no end")
        return number

    def index_of(self, picked: PickedSlots, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the positions of rows, as the caller gets them."""
        return torch.as_tensor(positions_of(picked.words, picked.slots, self._ring.capacity)).view(shape)

    def weights_of(self, picked: PickedSlots, beta: float) -> torch.Tensor:
        """Returns the weights of rows that were drawn by priorities, over the largest of them."""
        odds = np.ones(len(picked.slots)) if picked.odds is None else picked.odds
        weights = odds**-beta
        return torch.as_tensor(weights / weights.max() if len(weights) else weights, dtype=torch.float32)

    def build(self, targets: Targets, extra: dict[str, torch.Tensor], device: torch.device | None) -> TensorDict:
        """Makes a TensorDict of copied rows, and of `extra`, whose shapes begin with its batch size."""
        shape = extra[INDEX].shape
        entries: dict[Any, Any] = {}
        for name, dtype, target in zip(self.names, self._dtypes, targets, strict=True):
            tensor: Any = target.view(dtype)
            if len(shape) > 1:
                tensor = tensor.unflatten(0, shape)
            at: Any = entries
            for part in name[:-1]:
                at = at.setdefault(part, {})
            at[name[-1]] = _moved(tensor, device)
        entries |= {name: _moved(tensor, device) for name, tensor in extra.items()}
        return _collected(entries, shape, device)

    # --- out= ---------------------------------------------------------------------------------------------------------

    def targets(self, out: Any, rows: int, extra: tuple[str, ...]) -> Targets:
        """Returns the leaves of `out` that rows can be copied to at once, and new tensors for the others.

        Called before rows are picked: none are handed out for what can't be filled.

        Raises:
            StructureMismatchError: lists what is wrong.
        """
        wrong: list[str] = []
        targets: Targets = []
        places: list[Any] = []
        for found, row, dtype, name in self._pairs(out):
            shape = (rows, *row.shape[1:])
            if not is_kept(found, _found(out, name)):
                wrong.append(f"{_shown(name)} is a copy, which {an_instance(out)} makes when it is asked for it")
            elif (why := _why_not(found, shape, dtype)) is not None:
                wrong.append(f"{_shown(name)} is {why}")
            elif _is_plain(found):
                places.append(found.data_ptr())
                targets.append(found.detach().view(row.dtype))
            else:
                places.append((found.data_ptr(), found.stride()))
                targets.append(torch.empty(shape, dtype=row.dtype))
        for name in extra:
            dtype = torch.int64 if name == INDEX else torch.float32
            found = out.get(name, None)
            if (why := _why_not(found, (rows,), dtype)) is not None:
                wrong.append(f"{name!r} is {why}")
            else:
                places.append((found.data_ptr(), found.stride()))
        places.append(rows)
        if not wrong and places != self._apart:
            wrong = _shared({name: _found(out, name) for name in (*self.names, *((name,) for name in extra))})
            self._apart = None if wrong else places
        if wrong:
            key = self._ring.key
            raise StructureMismatchError(f"{key!r}: out doesn't fit a sample: {'; '.join(wrong)}", key=key)
        return targets

    def fill(self, out: Any, targets: Targets, extra: dict[str, torch.Tensor]) -> Any:
        """Copies what was not copied to `out` at once."""
        for (found, _, dtype, _), target in zip(self._pairs(out), targets, strict=True):
            if not _is_plain(found):
                copy_into(found, target.view(dtype))
        with torch.no_grad():
            for name, tensor in extra.items():
                found = out.get(name)
                if found.is_inference():
                    copy_into(found, tensor)
                else:
                    found.copy_(tensor)  # a third of the time
        return out

    def _pairs(self, out: Any) -> Iterator[tuple[Any, torch.Tensor, torch.dtype, Name]]:
        if isinstance(out, type) or not is_tensor_collection(out):
            raise TypeError(f"out is {an_instance(out)}, and not the TensorDict that a sample is")
        for name, tensor, dtype in zip(self.names, self._ring.tensors, self._dtypes, strict=True):
            yield _found(out, name), tensor, dtype, name


def _found(out: Any, name: Name) -> Any:
    return out.get(name if len(name) != 1 else name[0], None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether rows can be copied to it as bytes; its class and autograd, if any, have no say in that."""
    is_plain = type(tensor) is torch.Tensor and tensor.is_contiguous() and not tensor.is_inference()
    return is_plain and takes_bytes(tensor)


def _moved(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if device is None or device.type == "cpu":
        return tensor
    if device.type == "cuda" and torch.cuda.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return to_device(tensor, device)


def _collected(entries: dict[Any, Any], shape: torch.Size, device: torch.device | None) -> TensorDict:
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor):
            entries[key] = _collected(value, shape, device)
    return new_tensordict(TensorDict, entries, shape, device=device, nested=False)


def _shown(name: Name) -> str:
    return repr(name[0] if len(name) == 1 else name)


def _shared(leaves: dict[Name, torch.Tensor]) -> list[str]:
    """Lists leaves that share memory, for an error: a sample has values of its own for each.

    Leaves that are columns of one tensor lie between each other, and share none: of such each byte is looked at.
    """
    wrong: list[str] = []
    near: dict[torch.device, list[tuple[int, int, Name]]] = {}  # leaves, each of which begins before others end
    for name, leaf in sorted(leaves.items(), key=lambda one: one[1].data_ptr()):
        start, nbytes = leaf.data_ptr(), traits.reach(leaf.shape, leaf.stride()) * leaf.itemsize
        others = near.setdefault(leaf.device, [])
        if all(end <= start for _, end, _ in others):
            others.clear()
        others.append((start, start + nbytes, name))
        if len(others) > 1 and (other := _that_shares(leaves, others)) is not None:
            wrong.append(f"{_shown(name)} is a tensor that shares memory with {_shown(other)}: give each its own")
    return wrong


def _that_shares(leaves: dict[Name, torch.Tensor], near: list[tuple[int, int, Name]]) -> Name | None:
    """Returns the first of the leaves that has bytes of the last one."""
    begin = near[0][0]
    bytes_of = torch.zeros(max(end for _, end, _ in near) - begin, dtype=torch.bool, device="cpu")

    def shown(name: Name, start: int) -> torch.Tensor:
        leaf = leaves[name]
        stride = [step * leaf.itemsize for step in leaf.stride()]
        return bytes_of.as_strided((*leaf.shape, leaf.itemsize), (*stride, 1), start - begin)

    start, _, last = near[-1]
    shown(last, start).fill_(True)
    return next((name for start, _, name in near[:-1] if bool(shown(name, start).any())), None)


def _why_not(found: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Says why an entry of `out` can't be filled with a tensor of this shape and dtype; None if it can."""
    if not isinstance(found, torch.Tensor):
        what = "missing" if found is None else type(found).__qualname__
        return f"{what}, and takes {dtype} of shape {list(shape)}"
    why = why_not_filled(found)
    if why is None and found.is_inference() and not torch.is_inference_mode_enabled():
        why = "an inference tensor, which is written in inference mode only: sample inside of torch.inference_mode()"
    if why is None and (tuple(found.shape) != shape or found.dtype != dtype):
        why = f"{found.dtype} of shape {list(found.shape)}, and takes {dtype} of shape {list(shape)}"
    return why
