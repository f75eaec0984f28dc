"""Leaves through multiprocessing: what lies in a mapping is copied into fresh shared memory before torch sends it.

torch sends a tensor by moving its storage to shared memory that the receiver may write, and swaps it under the sender:
a held value would change, and memory of its numpy aliases would go. So a sent leaf is copied once, just its own bytes,
or those of the view that is sent, anew at each send. Tensors elsewhere go torch's way, unchanged.

A copy is shared by its file descriptor, which must live until the receiver has one. A queue duplicates it at once. For
the arguments of a process that is being started (spawn, forkserver) multiprocessing only notes its number, and passes
it on when all of them are pickled; torch's own tensors keep it open all the while. So the copies that such a process
gets belong to its Popen: until the same thread starts another process, and no longer than the Popen lives. 300 leaves
and 8 workers would else hold 2400 descriptors.

What a DataLoader's worker has read lies in memory that it lends: there a reference is sent, and nothing is copied.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from memstore import _modes as modes
from memstore._compat import new_shared_storage
from memstore.engine import lies_in_mapping
from memstore.structure import traits
from memstore.structure.tensor_memory import over
from memstore.structure.traits import has_gaps, pack


def register() -> None:
    """Takes the places of torch's reducers. The last to register is asked, so this runs after torch is imported."""
    ForkingPickler.register(torch.Tensor, _reduce_tensor)
    ForkingPickler.register(torch.nn.Parameter, _reduce_tensor)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)


Lend = Callable[[torch.Tensor], "tuple[Any, ...] | None"]
_lend: Lend | None = None


def lend_by(lend: Lend) -> None:
    """Asks `lend` first how a tensor that is nothing but elements is sent; None: its memory is not lent."""
    global _lend
    _lend = lend


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if _must_be_copied(tensor):
        if _lend is not None and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg()):
            lent = _lend(tensor)
            if lent is not None:
                return lent
        tensor = _copy_to_shared_memory(tensor)
    return reductions.reduce_tensor(tensor)


def _must_be_copied(tensor: torch.Tensor) -> bool:
    # torch's own reducer takes the rest: tensors without a storage, and non-leaves, which it refuses
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.requires_grad and not tensor.is_leaf:
        return False
    return tensor.numel() > 0 and _lies_in_our_mapping(tensor)


def _lies_in_our_mapping(memory: torch.Tensor | torch.UntypedStorage) -> bool:
    try:
        return lies_in_mapping(memory.data_ptr())
    except RuntimeError:  # a view's memory, which may be read and not written, after `tensor.data = view[...]`
        return True


@modes.put_aside()
def _copy_to_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to shared memory of its own: the span of its bytes, or where that has gaps its elements."""
    shape, stride, itemsize = tensor.shape, tensor.stride(), tensor.dtype.itemsize
    source = tensor.detach()
    reach = traits.reach(shape, stride)
    packing = pack(shape, stride) if has_gaps(shape, stride) or tensor.is_conj() or tensor.is_neg() else None
    if packing is not None:
        reach, stride = packing.elements, packing.kept
    storage = new_shared_storage(reach * itemsize)
    _keep_for_child(storage)
    copy = over(storage, tensor.dtype, 0, shape, stride)
    if packing is None:
        start = source.storage_offset() * itemsize
        nbytes = (reach * itemsize,)
        span = over(source.untyped_storage(), torch.uint8, start, nbytes, (1,))
        over(storage, torch.uint8, 0, nbytes, (1,)).copy_(span)
    else:
        once = over(storage, tensor.dtype, 0, packing.shape, traits.contiguous_stride(packing.shape))
        each = source.as_strided(packing.shape, packing.stride, source.storage_offset())
        traits.copyable(once).copy_(traits.copyable(each))
    return traits.with_traits(copy, traits.traits_of(tensor))


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """Reduces what reaches the pickler as a bare storage: parts of sparse, nested and quantized tensors."""
    if storage.device.type == "cpu" and storage.nbytes() and _lies_in_our_mapping(storage):
        copy = new_shared_storage(storage.nbytes())
        _keep_for_child(copy)
        copy.copy_(storage, non_blocking=False)
        storage = copy
    return reductions.reduce_storage(storage)


class _Started(threading.local):
    """The process that this thread started last: a thread starts one after the other."""

    popen: weakref.ref[Any] | None = None


_started = _Started()


def _keep_for_child(storage: torch.UntypedStorage) -> None:
    popen: Any = get_spawning_popen()
    if popen is None:
        return
    former = _started.popen and _started.popen()
    if former is not popen:
        if former is not None:
            former._memstore_copies.clear()
        popen._memstore_copies = []
        _started.popen = weakref.ref(popen)
    popen._memstore_copies.append(storage)
