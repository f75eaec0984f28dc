"""Where the rows of each leaf go. Everything is checked before the first byte is written."""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import torch

from memstore import structure
from memstore.late_imports import between_forks
from memstore.rows.copy import copy_rows
from memstore.rows.index import Index
from memstore.structure import traits
from memstore.view import LeafBytes, StoredTensor

Path = tuple[Any, ...]


class Job(NamedTuple):
    """The rows of one leaf, and the tensor that they fill."""

    path: Path
    box: torch.Tensor  # the leaf's elements, as `LeafBytes` wants them
    real: torch.Tensor  # the same where they can be read
    stored: LeafBytes | None  # None: of a tensor in memory
    rows: torch.Tensor
    target: torch.Tensor
    is_given: bool

    def prefetch(self) -> None:
        if self.stored is not None:
            self.stored.prefetch(self.box, self.rows)


class Gather:
    """One batch: `plan` walks the source and makes what is returned, `check`, then `read` fills it."""

    def __init__(self, index: Index, device: torch.device | None) -> None:
        self._index, self._device = index, device
        self._jobs: list[Job] = []
        self._has_rows = False

    # --- the walk -----------------------------------------------------------------------------------------------------

    def plan(self, source: Any, out: Any, path: Path = ()) -> Any:
        """What the rows of `source` become: `out`, or a new value, yet to be filled."""
        if isinstance(source, torch.Tensor) and not _is_collection(source):
            return self._leaf(source, out, path)
        if isinstance(source, dict):
            return self._dict(source, out, path)
        if isinstance(source, (list, tuple)):
            return self._sequence(source, out, path)
        if _is_collection(source):
            with between_forks():
                from memstore.rows.collections import plan_collection

            return plan_collection(self, source, out, path)
        if next(structure.iter_tensors(source), None) is not None:
            kind = type(source).__qualname__
            raise TypeError(f"{name(path)} is a {kind}: rows are those of dicts, lists, tuples and TensorDicts")
        return source if out is None else out  # no tensor: it has no rows

    def _dict(self, source: dict[Any, Any], out: Any, path: Path) -> Any:
        outs = self.matching(source, out, path)
        entries = {key: self.plan(value, outs.get(key), (*path, key)) for key, value in source.items()}
        if out is not None:
            return out
        if type(source) is dict:
            return entries
        found = copy.copy(source)  # an OrderedDict, or what else a view has
        found.update(entries)
        return found

    def _sequence(self, source: Any, out: Any, path: Path) -> Any:
        outs = [None] * len(source) if out is None else out
        if not isinstance(outs, (list, tuple)) or len(outs) != len(source):
            raise ValueError(f"{name(path)} of out is no {type(source).__qualname__} of {len(source)}")
        entries = [self.plan(one, other, (*path, i)) for i, (one, other) in enumerate(zip(source, outs, strict=True))]
        if out is not None:
            return out
        kind: Any = type(source)
        return kind(*entries) if hasattr(kind, "_fields") else kind(entries)

    def matching(self, source: Any, out: Any, path: Path) -> Any:
        """`out`, once it has the keys of `source`; an empty dict if there is none."""
        if out is None:
            return {}
        keys, found = set(source.keys()), set(out.keys()) if hasattr(out, "keys") else None
        if found != keys:
            has = "it has no keys" if found is None else f"missing {list(keys - found)}, too many {list(found - keys)}"
            raise ValueError(f"{name(path)} of out has other entries than the source: {has}")
        return out

    def rows(self, count: int, path: Path) -> torch.Tensor:
        self._has_rows = True
        return self._index.rows(count, name(path))

    @property
    def device(self) -> torch.device | None:
        """Where new values go; None: where their leaves are."""
        return self._device

    def _leaf(self, source: torch.Tensor, out: Any, path: Path) -> torch.Tensor:
        if _is_unusual(source):
            raise TypeError(
                f"{name(path)} is a quantized, nested or sparse tensor, whose rows can't be read so: index it"
            )
        if source.ndim == 0:
            raise ValueError(f"{name(path)} has no dimension, and so no rows")
        if isinstance(source, StoredTensor):
            box, stored = source.shown, source.stored
            real = stored.tensor(box)
        else:
            box = real = source.detach()
            stored = None
        rows = self.rows(len(real), path)
        shape = (len(rows), *real.shape[1:])
        if out is None:
            target = torch.empty(shape, dtype=real.dtype, device=self._device or source.device)
        elif not isinstance(out, torch.Tensor) or isinstance(out, StoredTensor) or _is_unusual(out):
            raise ValueError(f"{name(path)} of out is a {type(out).__qualname__}, which can't be filled")
        elif tuple(out.shape) != shape or out.dtype != real.dtype:
            found = f"{out.dtype} of shape {tuple(out.shape)}"
            raise ValueError(f"{name(path)} of out is {found}, and takes {real.dtype} of shape {shape}")
        else:
            _check_memory(out, path)
            target = out
        self._jobs.append(Job(path, box, real, stored, rows, target, out is not None))
        return target

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_source(self, source: Any) -> None:
        """After `plan`. Raises TypeError if nothing in the source has rows."""
        if not self._has_rows:
            raise TypeError(
                f"a {type(source).__qualname__} without a tensor has no rows: they are read from a view, a lazy leaf, "
                "a tensor, and TensorDicts, dicts, lists and tuples of these"
            )

    def check(self) -> None:
        """Raises ValueError if what is to be filled overlaps itself or what is read."""
        given = [job for job in self._jobs if job.is_given and job.target.numel()]
        if not given:
            return
        ranges = sorted((*_range(job.target), i) for i, job in enumerate(given))
        for (_, stop, i), (start, _, j) in zip(ranges, ranges[1:], strict=False):
            if start < stop and _share_elements(given, ranges):
                raise ValueError(f"{name(given[i].path)} and {name(given[j].path)} of out overlap in memory")
        read = [job.real for job in self._jobs if job.stored is None] + [self._index.memory]
        for job in given:
            if traits.overlaps_itself(job.target.shape, job.target.stride()):
                raise ValueError(f"{name(job.path)} of out overlaps itself in memory")
            start, stop = _range(job.target)
            for other in read:
                if other is not None and other.numel() and other.device == job.target.device:
                    first, last = _range(other)
                    if start < last and first < stop:
                        raise ValueError(f"{name(job.path)} of out overlaps what is read")

    # --- reading ------------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        for job in self._jobs:
            job.prefetch()

    def read(self) -> None:
        cold = {i for i, job in enumerate(self._jobs) if job.stored and job.stored.is_cold(job.box, job.rows)}
        for i in cold:  # all of them before the first is waited for
            self._jobs[i].prefetch()
        with torch.no_grad():
            for i, job in enumerate(self._jobs):
                is_mapped = i not in cold
                if job.stored is not None:
                    job.stored.use(job.target.nbytes)
                    is_mapped = is_mapped and job.stored.populate(job.target.nbytes)
                _fill(job, is_mapped)


def _fill(job: Job, is_mapped: bool) -> None:
    """One copy a row; for a device by way of pinned memory, which torch keeps until the stream has done with it."""
    target = job.target.detach()
    if target.device.type == "cpu":
        copy_rows(job.real.cpu(), job.rows, target, is_mapped=is_mapped)
    elif target.device.type != "meta":
        staged = torch.empty(target.shape, dtype=target.dtype, pin_memory=target.device.type == "cuda")
        copy_rows(job.real.cpu(), job.rows, staged, is_mapped=is_mapped)
        target.copy_(staged, non_blocking=True)


def _check_memory(out: torch.Tensor, path: Path) -> None:
    """Raises ValueError for tensors that have none, or other memory than their shape says."""
    kind = "a meta tensor" if out.device.type == "meta" else f"a tensor of layout {out.layout}"
    if out.device.type == "meta" or out.layout is not torch.strided or out.is_nested:
        raise ValueError(f"{name(path)} of out is {kind}, which can't be filled")
    try:
        storage = out.untyped_storage()
        address = out.data_ptr() if storage.device == out.device else None
    except RuntimeError:  # of a transform
        storage = address = None
    if storage is None or address is None:
        raise ValueError(f"{name(path)} of out is a {type(out).__qualname__} that has no memory of its own")
    stop = out.storage_offset() + traits.reach(out.shape, out.stride())
    if out.numel() and (not address or stop * out.dtype.itemsize > storage.nbytes()):
        raise ValueError(f"{name(path)} of out is a tensor whose storage was freed or cut")


def _is_unusual(tensor: torch.Tensor) -> bool:
    """Whether its elements don't lie in memory by strides; torch may end the process that looks for them there."""
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + traits.reach(tensor.shape, tensor.stride()) * tensor.dtype.itemsize


def _share_elements(jobs: list[Job], ranges: list[tuple[int, int, int]]) -> bool:
    """Whether targets whose ranges cross, as columns of one matrix do, have a byte in common: counts each."""
    start = ranges[0][0]
    counts = torch.zeros(max(stop for _, stop, _ in ranges) - start, dtype=torch.uint8)
    for first, _, i in ranges:
        target = jobs[i].target
        item = target.dtype.itemsize
        if traits.overlaps_itself(target.shape, target.stride()):
            return True
        counts.as_strided((*target.shape, item), (*[step * item for step in target.stride()], 1), first - start).add_(1)
    return bool(counts.max() > 1)


def _is_collection(value: Any) -> bool:
    asked: Any = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return asked is not None and asked(value)


def name(path: Path) -> str:
    return "value" + "".join(f"[{key!r}]" for key in path)
