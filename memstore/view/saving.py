"""Lazy leaves in files: `torch.save` writes their bytes, as plain tensors. Who sends a leaf sends a reference.

A reference is good for a minute, so a checkpoint must not have any. But whoever saves and whoever sends call the same
`__reduce_ex__`, and neither says what becomes of the pickle. So the stack is searched for one of the modules that
write files and nothing else. `pickle.dump` can't be told from `pickle.dumps`, and sends.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

from memstore.structure import has_gaps, pack, traits
from memstore.view.lazy import LazyTensor, kind_of, read
from memstore.view.stored_leaf import nbytes_of

_WRITERS = frozenset({"torch.serialization", "joblib.numpy_pickle", "shelve"})


def goes_to_a_file() -> bool:
    """Whether what is pickled now is written to a file, for all that can be told."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_globals.get("__name__") in _WRITERS:
            return True
        frame = frame.f_back
    return False


def plain_tensor(leaf: LazyTensor) -> torch.Tensor:
    """What is saved: over the mapping, which isn't copied first, or of a part of a stored leaf just that part.

    So leaves that share their bytes still do when they are loaded. Not to be written, nor to be given to a user.
    """
    with torch.inference_mode(False), torch.no_grad():
        plain = read(leaf).detach()
        if plain.untyped_storage().nbytes() != nbytes_of(plain):
            plain = _copy_apart(plain)
        return traits.with_traits(plain, kind_of(leaf)._replace(requires_grad=leaf.requires_grad))


def _copy_apart(part: torch.Tensor) -> torch.Tensor:
    """A copy of its bytes; with its strides, unless there are gaps."""
    if has_gaps(part.shape, part.stride()):
        packing = pack(part.shape, part.stride())
        once = part.as_strided(packing.shape, packing.stride)
        return traits.copyable(once).contiguous().view(part.dtype).as_strided(part.shape, packing.kept)
    reach = traits.reach(part.shape, part.stride())
    return (
        traits.copyable(part.as_strided((reach,), (1,))).clone().view(part.dtype).as_strided(part.shape, part.stride())
    )
