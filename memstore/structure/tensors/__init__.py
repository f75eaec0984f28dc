"""What memstore has to know of torch's tensors, whatever value they are in.

memory       whether a tensor's bytes can be read at its address; tensors over memory
traits       dtypes by name; Parameter, Buffer, requires_grad, device; the arithmetic of strides
devices      devices by the names that stored values have of them
gaps         tensors whose elements don't lie side by side, and how they are stored without the gaps
footprints   the bytes that tensors reach over, and whether their storages still have them
ties         tensors that share bytes

`modes` is `memstore.modes`: torch's modes and transforms, put aside while memstore works with tensors of its own.
"""

from __future__ import annotations

from memstore import modes
from memstore.structure.tensors.devices import (
    NO_DEVICE,
    has_device,
    lacks_device,
    need_device,
    own_device,
    read_device,
    to_device,
)
from memstore.structure.tensors.footprints import Footprints, Locations, locate_tensors
from memstore.structure.tensors.gaps import Packing, has_gaps, pack
from memstore.structure.tensors.memory import FREED, is_readable, memory_of, over, why_no_memory
from memstore.structure.tensors.ties import NO_TIES, Group, Ties
from memstore.structure.tensors.traits import (
    DTYPE_NAMES,
    DTYPES,
    MOST_EXPANDED,
    NUMPY_DTYPES,
    PARAMETER,
    PLAIN,
    Traits,
    contiguous_stride,
    count,
    expanded_bytes,
    may_be_dtype,
    read_flags,
    repeats,
    to_flags,
    with_traits,
)

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "FREED",
    "NO_DEVICE",
    "NO_TIES",
    "NUMPY_DTYPES",
    "PARAMETER",
    "PLAIN",
    "Footprints",
    "Group",
    "Locations",
    "Packing",
    "Ties",
    "Traits",
    "contiguous_stride",
    "count",
    "has_device",
    "has_gaps",
    "is_readable",
    "lacks_device",
    "locate_tensors",
    "may_be_dtype",
    "memory_of",
    "modes",
    "need_device",
    "own_device",
    "over",
    "pack",
    "read_device",
    "read_flags",
    "repeats",
    "to_device",
    "to_flags",
    "why_no_memory",
    "with_traits",
    "MOST_EXPANDED",
    "expanded_bytes",
]
