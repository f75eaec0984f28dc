"""Sources: mapped bytes that lazy leaves read, what they belong to, and the stored leaves that lie in them.

    Source, PinnedSource    mapped bytes: of a pinned version of a store
    *_pages                 which pages below a tensor lie on a disk still, and which are mapped already
    StoredLeaf, LeafBytes   the elements of one stored leaf; one that lies whole in one mapping

A pinned version is pickled as its pin is: see `engine/pin.py`. Whoever unpickles it has the version mapped at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from memstore import contents
from memstore._threads import between_forks
from memstore.contents import count_read
from memstore.engine import Absent, HeldVersion, Record, syscalls
from memstore.engine.syscalls import HUGE_PAGE, PAGE
from memstore.errors import CorruptionError, CrossHostError, StoreFullError
from memstore.sharding import Offsets, cover, runs
from memstore.structure import has_gaps, modes, over, pack, to_device, traits

# --- Sources ---------------------------------------------------------------------------------------------------------


Memory = np.ndarray[Any, np.dtype[np.uint8]]


@functools.cache
def _prepare_torch() -> None:
    """Imports what torch's C++ would import at the first operator on a lazy leaf: a fork would not wait for that."""
    with between_forks(), contextlib.suppress(ImportError):  # a torch without distributed
        importlib.import_module("torch.distributed.tensor")


def without_leaves(record: Record) -> Record:
    """Returns the record without what each leaf knows of itself, so that a reference to one leaf of many is small."""
    return msgspec.structs.replace(
        record, description=b"", objects=b"", checksums=None, objects_checksum=None, boxes=None
    )


class Source:
    """Value that lazy leaves are parts of, and its bytes in memory.

    Attributes:
        memory: the bytes. Never written: nobody else may hold this mapping.
        mapping: what keeps them in memory; None for those of a record.
        is_on_disk: whether they may have to come from a disk, or another host.
        absent: what brings bytes of other hosts, which have to be asked for; None: all are mapped.
        key: what errors call it.
    """

    __slots__ = ("__weakref__", "absent", "is_on_disk", "key", "mapping", "memory")

    def __init__(
        self, memory: Memory, mapping: object | None, key: str, *, is_on_disk: bool, absent: Absent | None = None
    ) -> None:
        _prepare_torch()
        self.memory, self.mapping, self.key, self.is_on_disk = memory, mapping, key, is_on_disk
        self.absent = absent

    @property
    def title(self) -> str:
        """Returns the name of the value that its leaves show when they are printed."""
        raise NotImplementedError

    @property
    def address(self) -> int:
        """Returns where its memory lies."""
        return int(self.memory.__array_interface__["data"][0])

    # What is on a disk is asked for all at once, and read whether it has come or not. What is absent is there then.

    def bring(self, values: torch.Tensor) -> None:
        """Asks for elements over the memory that will be read, unless they are there."""
        if self.absent is None:
            bring_pages(values)
        else:
            contents.bring(self.absent, [values])

    def bring_bytes(self, start: int, nbytes: int) -> None:
        if self.absent is not None:
            first = self.address + start
            self.absent.need([first], [first + nbytes])

    def ask_for(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Asks for some rows, as `bring`."""
        if self.absent is None:
            ask_for_pages(values, rows)
        else:
            contents.bring_rows(self.absent, values, rows)

    def are_cold(self, values: torch.Tensor, rows: torch.Tensor) -> bool:
        """Returns whether some of the rows are to be asked for."""
        return self.absent is not None or are_pages_cold(values, rows)

    def bring_whole(self) -> HeldVersion | None:
        """Brings all bytes of other hosts at once, by way of a copy that this host keeps, and other hosts may have.

        Returns the version where it lies elsewhere in memory by then; None: here, as far as it has come.
        """
        return None

    def damaged(self, detail: str, place: int = 0) -> CorruptionError:
        """Makes the error of damage at this `place` in the memory."""
        raise NotImplementedError

    def again(self) -> Source | None:
        """Maps the same bytes once more, for a caller who may write them.

        Returns None if there is no file to map, or it is gone.
        """
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles it as a reference: whoever unpickles it maps the bytes."""
        raise NotImplementedError


class PinnedSource(Source):
    """Pinned version of a key; its memory is the data section."""

    __slots__ = ("pin",)

    def __init__(self, pin: HeldVersion, memory: Memory) -> None:
        mapping = None if pin.held is None else pin.held.mapping
        absent = None if pin.held is None else pin.held.absent
        is_on_disk = mapping is not None and (
            not pin.root.on_tmpfs or pin.record.adopted is not None or absent is not None
        )
        super().__init__(memory, mapping, pin.key, is_on_disk=is_on_disk, absent=absent)
        self.pin = pin

    @property
    def title(self) -> str:
        return f"key={self.key!r}, version={self.pin.record.version}"

    def bring_whole(self) -> HeldVersion | None:
        pin = self.pin
        if self.absent is None or pin.options.mode == "r" or pin.root.storage.sees_all_hosts:
            return None
        if not pin.record.start:  # in parts, whose copies fill this memory
            self.absent.need_all()
            return None
        with contextlib.suppress(StoreFullError, CrossHostError):  # there is no room for a copy: what is read comes
            held = self.absent.localized()
            return HeldVersion(pin.root, pin.key, held.record, held, pin.options)
        return None

    def damaged(self, detail: str, place: int = 0) -> CorruptionError:
        return contents.damaged(self.pin.root, self.key, self.pin.record, detail, place)

    def again(self) -> PinnedSource | None:
        pin = self.pin
        held = None if self.mapping is None or self.absent is not None else pin.map()
        if held is None or held.mapping is None:
            return None
        return PinnedSource(HeldVersion(pin.root, pin.key, pin.record, held, pin.options), contents.memory_of(held))

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, (self.pin,)


def receive(pin: HeldVersion) -> PinnedSource:
    """Unpickles a source. Raises VersionGoneError if the version was replaced, and the lease is over."""
    held = pin.held or pin.map()
    if held is None:
        raise pin.gone()
    pin.held = held
    return PinnedSource(pin, contents.memory_of(held))


# --- The pages below a mapped tensor: which are to come from a disk, and which are mapped already --------------------
# A cold row that is faulted in waits for the disk by itself, and has the kernel read around it, by the disk's setting
# for files that are read in order (8 MiB where this was written). Told of all the runs first, it reads these, all at
# once: 256 rows of 28 KiB take 25 ms instead of 1000. Warm ones cost a fault for each 64 KiB the first time, which
# doubles their price; so with each batch of rows some more of the leaf is mapped in advance, until all of it is.


_SAMPLES = 16  # pages that are looked at; 1 us each
_MOST_RUNS = 64  # of a row; beyond, gaps are read too
_MOST_BYTES = 256 << 20  # of a box that is asked for at once; the kernel reads ahead of who reads on in order


def ask_for_pages(values: torch.Tensor, rows: torch.Tensor) -> None:
    """Tells the kernel that these rows will be read: it starts at once, and this doesn't wait."""
    if rows.numel() and values.numel():
        offsets, length = runs(values.shape[1:], values.stride()[1:], _MOST_RUNS)
        _ask_for_runs(values, (rows.numpy()[:, None] * values.stride(0) + offsets).ravel(), length)


def bring_pages(values: torch.Tensor) -> None:
    """Asks for a box that will be read, unless it is in memory already."""
    if not values.numel():
        return
    size = traits.reach(values.shape, values.stride()) * values.dtype.itemsize
    start = values.data_ptr()
    if size <= _MOST_BYTES and not _are_resident(range(start, start + size, max(size // 4, PAGE))):
        offsets, length = runs(values.shape, values.stride(), _MOST_RUNS * _MOST_RUNS)
        _ask_for_runs(values, offsets, length)


def _ask_for_runs(values: torch.Tensor, offsets: Offsets, length: int) -> None:
    item = values.dtype.itemsize
    first, last = cover(values.data_ptr() + offsets * item, length * item, PAGE)
    syscalls.will_need(first.tolist(), (last - first).tolist())


def are_pages_cold(values: torch.Tensor, rows: torch.Tensor) -> bool:
    """Returns whether some of the rows are to come from a disk. It looks at the first pages of a few."""
    if not rows.numel() or not values.numel():
        return False
    step = max(len(rows) // _SAMPLES, 1)
    starts = values.data_ptr() + rows[::step].numpy() * (values.stride(0) * values.dtype.itemsize)
    return not _are_resident(np.unique(starts // PAGE).tolist(), PAGE)


def populate_pages(start: int, size: int, *, on_disk: bool) -> None:
    """Maps whole pages for reading, in advance; those of a file on a disk only if they are in memory."""
    if not on_disk or _are_resident(range(start, start + size, max(size // _SAMPLES, PAGE))):
        syscalls.populate_for_reading(start, size)


def _are_resident(addresses: Sequence[int], unit: int = 1) -> bool:
    return all(syscalls.is_resident(address * unit // PAGE * PAGE) for address in addresses)


# --- StoredLeaf: what lazy leaves read. Every read of a stored leaf passes here --------------------------------------
# A box is asked for by a tensor that has its dtype, shape and strides, and whose offset counts from the first element
# that the leaf's lazy tensors can show. The memory of that tensor is not looked at.
#
#     LeafBytes    a leaf that lies whole in one mapping: it is looked at where it lies
#     LeafBoxes    a leaf in boxes that lie apart: those that are needed are put together


class StoredLeaf:
    """Elements of one stored leaf.

    Attributes:
        source: the version that it is a part of.
        place: the device that values go to when they are read; None: the CPU.
        wrapped: the device of its lazy tensors, if they have no memory; None: they lie over the leaf's.
    """

    __slots__ = ("place", "source", "wrapped")

    source: Source
    place: torch.device | None
    wrapped: torch.device | None

    def read(self, box: torch.Tensor) -> torch.Tensor:
        """Returns the values of a box, on their device: checked, counted, and on a disk asked for all at once.

        Not to be written, nor to be given to a user.
        """
        raise NotImplementedError

    def copy_to(self, target: torch.Tensor, box: torch.Tensor) -> None:
        """Reads a box into memory that the caller has, of the same shape and dtype."""
        raise NotImplementedError

    def prefetch(self, box: torch.Tensor, rows: torch.Tensor) -> None:
        """Starts to read rows of a box from a disk, and doesn't wait."""
        raise NotImplementedError

    def is_cold(self, box: torch.Tensor, rows: torch.Tensor) -> bool:
        """Returns whether some of the rows are to come from a disk."""
        raise NotImplementedError


def nbytes_of(values: torch.Tensor) -> int:
    """Counts the bytes of the elements; elements that several indices share count once."""
    shape, stride = values.shape, values.stride()
    count = pack(shape, stride).elements if has_gaps(shape, stride) else traits.reach(shape, stride)
    return count * values.dtype.itemsize


# --- LeafBytes: a stored leaf that lies whole in one mapping ---------------------------------------------------------
# A box is read by looking at it there, and nothing is copied. The tensor for that lies over a second storage of the
# same bytes, which may be written as far as torch knows, since many operators ask for a pointer to write by and then
# only read. Nobody else gets it.


_POPULATE = 2  # bytes that are mapped in advance for each byte that is read
_dispatch_modes, _transform = modes.count_dispatch_modes, modes.current_transform
_in_inference_mode = torch.is_inference_mode_enabled


class LeafBytes(StoredLeaf):
    """Bytes of one stored leaf, in their source, and their checksum until somebody has checked it.

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
        """Returns a box on the CPU, where it is, for a caller that reads some of it, and says by `use` how much.

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
        populate_pages(start, size, on_disk=source.is_on_disk)
        return False
