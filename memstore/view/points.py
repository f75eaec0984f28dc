"""Points of a tensor that lies in boxes: what indices by lists, masks and tensors name, and which of it a box has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from memstore.sharding import Box
from memstore.view.regions import Region, common, within


class Picked(NamedTuple):
    """What a box has of the points: its places in the result (see `Points.shape`), and the values there."""

    places: tuple[torch.Tensor | slice, ...]
    values: torch.Tensor


class Points:
    """Indices of some dimensions of a tensor, as torch's `index` takes them; all are in range, and none negative.

    Attributes:
        dims: the dimensions that are indexed.
        count: how many points there are.
    """

    def __init__(self, indices: Sequence[torch.Tensor | None]) -> None:
        self.dims = [dim for dim, index in enumerate(indices) if index is not None]
        broadcast = torch.broadcast_tensors(*(index for index in indices if index is not None))
        self._shape = tuple(broadcast[0].shape)
        self._flat = [index.reshape(-1) for index in broadcast]
        self.count = self._flat[0].numel()

    @property
    def rows(self) -> torch.Tensor | None:
        """The points, if they are rows: of the first dimension alone."""
        return self._flat[0] if self.dims == [0] else None

    def shape(self, of: Sequence[int]) -> tuple[int, ...]:
        """Of the result before it is `placed`: the points in front, and behind them the other dimensions."""
        return (self.count, *(size for dim, size in enumerate(of) if dim not in self.dims))

    def placed(self, made: torch.Tensor) -> torch.Tensor:
        """The result as torch has it: points where the indices stood, if these stood side by side, else in front."""
        made = made.view(*self._shape, *made.shape[1:])
        first, count = self.dims[0], len(self._shape)
        if not first or self.dims != list(range(first, first + len(self.dims))):
            return made
        return made.movedim(tuple(range(count)), tuple(range(first, first + count)))

    def pick(self, region: Region, sizes: Sequence[int], box: Box, part: torch.Tensor) -> Picked | None:
        """What a box has of the points of a view, whose region and sizes these are; None if that is nothing.

        Args:
            box, part: the box, and the tensor that has it.
        """
        along = [None if found is None else found[0] for found in region.dims or ()]
        chosen = self._coordinates(region, along, box)
        inside = self._inside(chosen, box)
        if inside is not None and not len(inside):
            return None
        ranges = [
            range(box.offsets[on], box.offsets[on] + 1) if on in chosen else one for on, one in enumerate(region.ranges)
        ]
        places = common(ranges, *box)
        if places is None:
            return None
        at = within(ranges, places, box.offsets)
        taken = part[tuple(slice(None) if on in chosen else one for on, one in enumerate(at))]
        rest = [dim for dim in range(len(sizes)) if dim not in self.dims]
        taken = _in_order(taken, list(chosen), [along[dim] for dim in rest])
        if chosen:
            taken = taken[tuple(one if inside is None else one[inside] for one in chosen.values())]
        else:  # only along dimensions that are expanded
            taken = taken.unsqueeze(0)
        spread = [slice(None) if (on := along[dim]) is None else places[on] for dim in rest]
        count = self.count if inside is None else len(inside)
        shape = [
            sizes[dim] if along[dim] is None else one.stop - one.start for dim, one in zip(rest, spread, strict=True)
        ]
        return Picked((slice(None) if inside is None else inside, *spread), taken.expand(count, *shape))

    def _coordinates(self, region: Region, along: Sequence[int | None], box: Box) -> dict[int, torch.Tensor]:
        """By dimension of the leaf: where the points lie in it, counted from the first element of the box."""
        found: dict[int, torch.Tensor] = {}
        for dim, index in zip(self.dims, self._flat, strict=True):
            on = along[dim]
            if on is not None:
                one = region.ranges[on]
                found[on] = index * one.step + (one.start - box.offsets[on])
        return found

    def _inside(self, coordinates: dict[int, torch.Tensor], box: Box) -> torch.Tensor | None:
        """Which points the box has; None for all."""
        inside: torch.Tensor | None = None
        for on, at in coordinates.items():
            is_in = (at >= 0) & (at < box.shape[on])
            inside = is_in if inside is None else inside & is_in
        return None if inside is None or bool(inside.all()) else inside.nonzero().squeeze(1)


def _in_order(taken: torch.Tensor, first: list[int], rest: Sequence[int | None]) -> torch.Tensor:
    """The dimensions `first`, then the `rest`, of which those that are None get one element. All others have one."""
    order = [*first, *(on for on in rest if on is not None)]
    taken = taken.permute([*order, *(on for on in range(taken.ndim) if on not in order)])
    taken = taken.reshape(taken.shape[: len(order)]) if taken.ndim > len(order) else taken
    for position, on in enumerate(rest, len(first)):
        if on is None:
            taken = taken.unsqueeze(position)
    return taken
