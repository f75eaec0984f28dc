"""The leaves of a batch of rows, and the tensors that they fill. All is checked before the first byte is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memstore.rows.copy import copy_rows
from memstore.rows.index import Index
from memstore.rows.path import Path, name_of
from memstore.rows.targets import check_overlaps, check_target, is_unusual
from memstore.structure import copy_into, takes_bytes
from memstore.view import LeafBoxes, LeafBytes, Points, StoredLeaf, StoredTensor
from memstore.wording import an

# What a user may take for a value: by a method that it has, and what reads its rows.
_BY_ITSELF = {
    "read_rows": "its own read_rows(index) reads its rows",
    "sample": "its sample(batch_size) reads rows of it",
    "lend_root": "read_rows(store.view(key), index) reads rows of a key's value",
    "prefetch": "data[index] reads its rows",
}
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class Job(NamedTuple):
    """The rows of one leaf, and the tensor that they fill."""

    path: Path
    box: torch.Tensor  # the leaf's elements, as `StoredLeaf` wants them
    real: torch.Tensor  # the same, where they can be read; of a leaf in boxes again as it wants them
    stored: StoredLeaf | None  # None: of a tensor in memory
    rows: torch.Tensor
    target: torch.Tensor
    is_given: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the rows as they are stored: the target may have another dtype."""
        return self.target.numel() * self.real.dtype.itemsize

    def prefetch(self) -> None:
        if self.stored is not None:
            self.stored.prefetch(self.box, self.rows)

    def receive(self) -> bool:
        """Fills a new target straight from another host, if the rows are there. (`out` waits until all have come.)"""
        is_new = not self.is_given and self.target.device.type == "cpu"
        return is_new and isinstance(self.stored, LeafBytes) and self.stored.receive(self.real, self.rows, self.target)


class Gather:
    """One batch: `walk.plan` adds its leaves, `check`, then `read` fills their targets.

    Args:
        device: where new targets are made.
        allocate: makes them, of a shape and a dtype; None: torch does, on the device.
        cast: targets that are given may have other floating dtypes.
    """

    def __init__(
        self, index: Index, device: torch.device | None, allocate: Allocate | None = None, *, cast: bool = False
    ) -> None:
        self._index, self._device, self._allocate, self._cast = index, device, allocate, cast
        self._jobs: list[Job] = []
        self._later: list[Callable[[], object]] = []
        self._has_rows = False

    @property
    def device(self) -> torch.device | None:
        """Where new values go; None: where their leaves are."""
        return self._device

    def of_picked(self) -> Gather:
        """One that adds leaves to this batch of which all rows are wanted: they were picked before."""
        whole = Gather(Index(slice(None)), self._device, self._allocate, cast=self._cast)
        whole._jobs, whole._later = self._jobs, self._later
        return whole

    def rows(self, count: int, path: Path) -> torch.Tensor:
        """The rows of what has `count` of them."""
        self._has_rows = True
        return self._index.rows(count, name_of(path))

    def add(self, source: torch.Tensor, out: Any, path: Path) -> torch.Tensor:
        """Returns what the rows of a leaf will fill: `out`, or a new tensor."""
        if is_unusual(source):
            raise TypeError(
                f"{name_of(path)} is a quantized, nested or sparse tensor, whose rows can't be read so: index it"
            )
        if source.ndim == 0:
            raise ValueError(f"{name_of(path)} has no dimension, and so no rows")
        if isinstance(source, StoredTensor):
            box, stored = source.shown, source.stored
            real = stored.tensor(box) if isinstance(stored, LeafBytes) else box
        else:
            box = real = source.detach()
            stored = None
        rows = self.rows(len(real), path)
        shape = (len(rows), *real.shape[1:])
        if out is None and self._allocate is not None:
            target = self._allocate(shape, real.dtype)
        elif out is None:
            target = torch.empty(shape, dtype=real.dtype, device=self._device or source.device)
        else:
            check_target(out, shape, real.dtype, path, self._cast)
            target = out
        self._jobs.append(Job(path, box, real, stored, rows, target, out is not None))
        return target

    def add_later(self, action: Callable[[], object]) -> None:
        """What else is done once all was checked: for what is no tensor."""
        self._later.append(action)

    def check(self, source: Any) -> None:
        """Looks at what can only be said once all leaves were added.

        Raises:
            TypeError: nothing in the source has rows.
            StructureMismatchError: targets overlap.
        """
        if not self._has_rows:
            raise TypeError(_no_rows(source))
        given = [(job.path, job.target) for job in self._jobs if job.is_given and job.target.numel()]
        if given:
            read = [job.real for job in self._jobs if job.stored is None]
            check_overlaps(given, read if self._index.memory is None else [*read, self._index.memory])

    def prefetch(self) -> None:
        for job in self._jobs:
            job.prefetch()

    def read(self) -> None:
        cold = {i for i, job in enumerate(self._jobs) if job.stored and job.stored.is_cold(job.box, job.rows)}
        received = {i for i in cold if self._jobs[i].receive()}
        for i in cold - received:  # all of them before the first is waited for
            self._jobs[i].prefetch()
        with torch.no_grad():
            for i, job in enumerate(self._jobs):
                if i in received:
                    continue
                is_mapped = i not in cold
                if isinstance(job.stored, LeafBytes):
                    job.stored.use(job.nbytes)
                    is_mapped = is_mapped and job.stored.populate(job.nbytes)
                _fill(job, is_mapped)
        for action in self._later:
            action()


def _no_rows(source: Any) -> str:
    kind = type(source)
    for method, instead in _BY_ITSELF.items():
        if hasattr(kind, method):
            return f"{an(kind)} is no view: {instead}"
    return (
        f"a value of type {kind.__qualname__} without a tensor has no rows: they are read from a view, a lazy leaf, a "
        "tensor, and TensorDicts, dicts, lists and tuples of these"
    )


def _fill(job: Job, is_mapped: bool) -> None:
    """One copy a row; for a device by way of pinned memory, which torch keeps until the stream has done with it.

    Rows that are cast are copied first, too: `index_select(out=)` and `take` have no dtype but that of their source.
    """
    target, dtype = job.target.detach(), job.real.dtype
    if takes_bytes(target) and target.dtype == dtype:
        _copy(job, target, is_mapped)
    elif target.device.type != "meta":
        staged = torch.empty(target.shape, dtype=dtype, pin_memory=target.device.type == "cuda")
        _copy(job, staged, is_mapped)
        copy_into(target, staged, non_blocking=True)


def _copy(job: Job, target: torch.Tensor, is_mapped: bool) -> None:
    real = job.real
    if isinstance(job.stored, LeafBoxes):
        if job.stored.pick(job.box, Points([job.rows]), target) is not None:
            return
        real = job.stored.read(job.box)
    copy_rows(real.cpu(), job.rows, target, is_mapped=is_mapped)
