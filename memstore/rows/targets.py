"""What rows are read into (`out`): whether it has the structure and the memory for that."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from memstore.errors import StructureMismatchError
from memstore.rows.path import Path, name_of
from memstore.structure import can_cast, traits, why_not_filled
from memstore.wording import an


def matching(source: Any, out: Any, path: Path) -> Any:
    """`out`, once it has the keys of `source`, or None if there is none."""
    if out is None:
        return None
    if isinstance(out, type) or not (hasattr(out, "keys") and hasattr(out, "get")):
        what = f"{name_of(path)} of out is {an(type(out))}"
        raise StructureMismatchError(f"{what}, and that of the source has entries by name")
    keys, found = set(source.keys()), set(out.keys())
    if found != keys:
        has = f"missing {list(keys - found)}, too many {list(found - keys)}"
        raise StructureMismatchError(f"{name_of(path)} of out has other entries than the source: {has}")
    return out


def entry_of(source: Any, out: Any, key: Any, path: Path) -> Any:
    """What the entry `source` is read into: that of `out`, once it is `matching`, or None if there is no `out`.

    Raises StructureMismatchError where `out` has None there, or makes its entries when it is asked for them.
    """
    if out is None:
        return None
    get = getattr(out, "_get_str", out.get)  # a TensorDict's `get` unwraps what is no tensor
    found = get(key, None)
    check_there(source, found, (*path, key))
    if not is_kept(found, get(key, None)):
        raise StructureMismatchError(
            f"{name_of(path)} of out is {an(type(out))}, which copies {key!r} when it is asked for it, and can't be "
            "filled: give a TensorDict or a dict"
        )
    return found


def check_there(source: Any, found: Any, path: Path) -> None:
    """Raises StructureMismatchError where an `out` has None in the place of a tensor, or of something that has some."""
    has_rows = isinstance(source, (torch.Tensor, dict, list, tuple)) or hasattr(source, "batch_size")
    if found is None and has_rows:
        raise StructureMismatchError(f"{name_of(path)} of out is None, which can't be filled")


def is_kept(found: Any, again: Any) -> bool:
    """Whether a container that was asked twice for an entry gave its own: a lazy stack copies a tensor each time."""
    if found is again or type(found) is not torch.Tensor or is_unusual(found):
        return True
    return found.data_ptr() == again.data_ptr()


def is_unusual(tensor: torch.Tensor) -> bool:
    """Whether its elements don't lie in memory by strides; torch may end the process that looks for them there."""
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized


def check_target(out: Any, shape: tuple[int, ...], dtype: torch.dtype, path: Path, cast: bool) -> None:
    """Raises StructureMismatchError unless it is a tensor of this shape and dtype that can be filled.

    Args:
        cast: another floating dtype will do.
    """
    if not isinstance(out, torch.Tensor):
        raise StructureMismatchError(f"{name_of(path)} of out is {an(type(out))}, which can't be filled")
    why = why_not_filled(out)
    if why is not None:
        raise StructureMismatchError(f"{name_of(path)} of out is {why}")
    is_cast = out.dtype != dtype and can_cast(dtype, out.dtype)
    if tuple(out.shape) != shape or not (out.dtype == dtype or (is_cast and cast)):
        found = f"{out.dtype} of shape {tuple(out.shape)}"
        advice = "; cast=True casts it" if is_cast and not cast else ""
        raise StructureMismatchError(f"{name_of(path)} of out is {found}, and takes {dtype} of shape {shape}{advice}")


def check_overlaps(targets: Sequence[tuple[Path, torch.Tensor]], read: Sequence[torch.Tensor]) -> None:
    """Raises StructureMismatchError if a target that is to be filled overlaps another one, or what is read."""
    ranges = sorted((*_range(target), i) for i, (_, target) in enumerate(targets))
    for (_, stop, i), (start, _, j) in zip(ranges, ranges[1:], strict=False):
        if start < stop and _share_elements([target for _, target in targets], ranges):
            both = f"{name_of(targets[i][0])} and {name_of(targets[j][0])}"
            raise StructureMismatchError(f"{both} of out overlap in memory")
    reads = {device: _Ranges(read, device) for device in {target.device for _, target in targets}}
    for path, target in targets:
        if reads[target.device].meet(*_range(target)):
            raise StructureMismatchError(f"{name_of(path)} of out overlaps what is read")


class _Ranges:
    """Where tensors of one device lie in its memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        found = sorted({_range(one) for one in tensors if one.numel() and one.device == device})
        self._starts = [start for start, _ in found]
        self._reached = list(itertools.accumulate((stop for _, stop in found), max))  # by those up to each

    def meet(self, start: int, stop: int) -> bool:
        before = bisect_left(self._starts, stop)
        return before > 0 and self._reached[before - 1] > start


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + traits.reach(tensor.shape, tensor.stride()) * tensor.dtype.itemsize


def _share_elements(targets: Sequence[torch.Tensor], ranges: Sequence[tuple[int, int, int]]) -> bool:
    """Whether targets whose ranges cross, as columns of one matrix do, have a byte in common: counts each."""
    start = ranges[0][0]
    counts = torch.zeros(max(stop for _, stop, _ in ranges) - start, dtype=torch.uint8)
    for first, _, i in ranges:
        target = targets[i]
        item = target.dtype.itemsize
        counts.as_strided((*target.shape, item), (*[step * item for step in target.stride()], 1), first - start).add_(1)
    return bool(counts.max() > 1)
