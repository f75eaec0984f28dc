"""LeafBytes: a stored leaf that lies whole in one mapping.

A box is read by looking at it there, and nothing is copied. The tensor for that lies over a second storage of the same
bytes, which may be written as far as torch knows, since many operators ask for a pointer to write by and then only
read. Nobody else gets it.
"""

from __future__ import annotations

import torch
import xxhash

from memstore import contents
from memstore.contents import count_read
from memstore.engine.syscalls import HUGE_PAGE, PAGE
from memstore.structure import modes, over, to_device, traits
from memstore.view import pages
from memstore.view.source import Source
from memstore.view.stored_leaf import StoredLeaf, nbytes_of

_POPULATE = 2  # bytes that are mapped in advance for each byte that is read
_dispatch_modes, _transform = modes.count_dispatch_modes, modes.current_transform
_in_inference_mode = torch.is_inference_mode_enabled


class LeafBytes(StoredLeaf):
    """The bytes of one stored leaf, in their source, and their checksum until somebody has checked it.

    Attributes:
        start: where the storages of its lazy leaves start, in the source: others may share them.
        base: a tensor over the storage that operators read from; None until the first one does.
    """

    __slots__ = ("_populated", "base", "checksum", "nbytes", "offset", "start")

    def __init__(
        self,
        source: Source,
        offset: int,
        nbytes: int,
        checksum: bytes | None,
        start: int,
        place: torch.device | None = None,
    ) -> None:
        self.source, self.place, self.wrapped = source, place, place
        self.offset, self.nbytes, self.checksum, self.start = offset, nbytes, checksum, start
        self.base: torch.Tensor | None = None
        self._populated = 0  # bytes, from the first on, that are mapped without a fault

    # --- a box --------------------------------------------------------------------------------------------------------

    def read(self, box: torch.Tensor) -> torch.Tensor:
        values = self.tensor(box)
        if self.checksum is not None:
            self.check()
        count_read(values.nbytes if values.is_contiguous() else nbytes_of(values))
        if self.source.is_on_disk:
            self.source.bring(values)
        return values if self.place is None else to_device(values, self.place)

    def tensor(self, box: torch.Tensor) -> torch.Tensor:
        """A box on the CPU, where it is, for a caller that reads some of it, and says by `use` how much.

        Not to be written, nor to be given to a user.
        """
        base = self.base
        if base is not None and base.dtype is box.dtype and not _dispatch_modes() and _transform() is None:
            return base.as_strided(box.shape, box.stride(), box.storage_offset())
        if modes.are_active() or _in_inference_mode():
            with modes.put_aside(), torch.inference_mode(False):
                return self._make_tensor(box)
        return self._make_tensor(box)

    def _make_tensor(self, box: torch.Tensor) -> torch.Tensor:
        dtype, shape, stride, offset = box.dtype, box.shape, box.stride(), box.storage_offset()
        base = self.base
        if base is None:
            memory = self.source.memory[self.start : self.start + box.untyped_storage().nbytes()]
            base = torch.from_numpy(memory)
            if memory.nbytes % dtype.itemsize == 0 and dtype not in traits.WITHOUT_COPY:
                base = base.view(dtype)  # a tenth of what `over` takes
            self.base = base
        if base.dtype is dtype:
            return base.as_strided(shape, stride, offset)
        return over(base.untyped_storage(), dtype, offset, shape, stride)

    def use(self, nbytes: int) -> None:
        """Says that so many bytes of a `tensor` are used. Raises CorruptionError, the first time."""
        if self.checksum is not None:
            self.check()
        count_read(nbytes)

    def check(self) -> None:
        """Compares the whole leaf with its checksum, and forgets that. Raises CorruptionError."""
        self.source.bring_bytes(self.offset, self.nbytes)
        data = self.source.memory[self.offset : self.offset + self.nbytes]
        count_read(data.nbytes)
        if xxhash.xxh3_64_digest(data.data) != self.checksum:
            detail = f"the bytes of the leaf at {self.offset:,} don't fit their checksum"
            raise self.source.damaged(detail, self.offset)
        self.checksum = None

    def copy_to(self, target: torch.Tensor, box: torch.Tensor) -> None:
        traits.copyable(target).copy_(traits.copyable(self.read(box)))

    # --- rows of a box ------------------------------------------------------------------------------------------------

    def prefetch(self, box: torch.Tensor, rows: torch.Tensor) -> None:
        if self.source.is_on_disk:
            self.source.ask_for(self.tensor(box), rows)

    def is_cold(self, box: torch.Tensor, rows: torch.Tensor) -> bool:
        return self.source.is_on_disk and self.source.are_cold(self.tensor(box), rows)

    def receive(self, values: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> bool:
        """Fills a target with rows of a `tensor`, straight from another host. False: they are to be read here.

        After an error anything may lie in the target.
        """
        absent = self.source.absent
        if absent is None or self.checksum is not None or not contents.receive_rows(absent, values, rows, target):
            return False
        count_read(target.nbytes)
        return True

    def populate(self, nbytes: int) -> bool:
        """Maps the next piece of the leaf, since `nbytes` of rows are read from it. Whether all of it is mapped."""
        source, left = self.source, self.nbytes - self._populated
        if left <= 0 or source.mapping is None:
            return True
        start = (source.address + self.offset + self._populated) // PAGE * PAGE
        size = min(-(-_POPULATE * nbytes // HUGE_PAGE) * HUGE_PAGE, left)
        self._populated += size
        pages.populate(start, size, on_disk=source.is_on_disk)
        return False
